"""Activations that wait in a tier: gradients have the bits that plain torch gives them, whatever a model does."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from offload import BudgetError, ClosedError, ConfigError, OffloadZero, StaleActivationError, Tuning
from tests.support.cases import often
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import Block, Checkpointed, Net, batch, squares, take_step

WIDTH, HEADS = 32, 4
ROWS = 16


class Rich(nn.Module):
    """A block that draws random numbers, and gets and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(
        self, state: tuple[Tensor, Tensor], *, mask: Tensor | None = None, options: dict[str, Any], calls: list[int]
    ) -> tuple[tuple[Tensor, Tensor], str]:
        x, sums = state
        q, k, v = self.qkv(x).view(ROWS, 3, HEADS, -1).unbind(1)
        scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        mixed = (nn.functional.dropout(scores.softmax(-1), 0.3) @ v.transpose(0, 1)).transpose(0, 1).flatten(1)
        calls.append(len(calls))
        x = x + options["gain"] * nn.functional.dropout(self.out(mixed), 0.2) + len(calls)
        return (x, sums + x.sum(0, keepdim=True)), "told"


class RichNet(nn.Module):
    """Tensors shared by all blocks, views of one, tuples, and a block that runs twice, one that runs now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Rich() for _ in range(4))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        calls: list[int] = []
        state = (self.embed(x), torch.zeros(1, WIDTH).expand(1, WIDTH))
        mask = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
        for number in (0, 1, 1, 2) if self.runs % 2 else (0, 1, 3):
            state, told = self.blocks[number](state, mask=mask if number else None, options={"gain": 0.5}, calls=calls)
            assert told == "told"
        assert calls == [0, 1, 2, 3][: len(calls)]  # a recomputation appends to a list of its own
        return state[0] + state[1]


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def options_of(where: str, path: Path) -> dict[str, Any]:
    """Of OffloadZero, all in fp32: gradients are then plain torch's."""
    options: dict[str, Any] = {"compute_dtype": torch.float32, "commit_every": 0}
    tuning: dict[str, Any] = {"chunk": "4KiB", "threads": 1}
    if "all saved" in where:
        tuning["recompute"] = False
    if "streamed" in where:
        options |= {"tier": "nvme", "param_tier": "nvme"}
    if "in place" in where:
        options |= {"activation_tier": "device"}
    else:
        # A few of them fit, or a dozen.
        region = ("192KiB", "72KiB") if "all saved" in where else ("40KiB", "16KiB")
        options |= {"activation_tier": "nvme", "activation_memory": region["small" in where]}
    return options | {"path": path, "tuning": Tuning(**tuning)}


WHERES = [
    *("in place", "nvme", "small", "small, streamed", "small, late copies"),
    *("all saved", "all saved, small", "all saved, streamed, late copies"),
]


@pytest.fixture(params=often(WHERES, "small, streamed", "all saved, streamed, late copies"))
def where(request: pytest.FixtureRequest, copied_by: CopiedBy) -> str:
    if "late copies" in request.param:
        copied_by(lambda: LateCopier(1))
    return str(request.param)


class Pair:
    """A held model, whose activations wait in a tier, and a plain one of the same values."""

    def __init__(self, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
        torch.manual_seed(3)
        self.plain = make()
        torch.manual_seed(3)
        self.model = make()
        self.optimizer = OffloadZero(self.model, **options)

    def same(self, run: Callable[[nn.Module], object], seed: int = 1) -> None:
        """Runs backwards with both, from the same random numbers; compares all gradients, and drops them."""
        states = []
        for model in (self.plain, self.model):
            torch.manual_seed(seed)
            run(model)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        for (name, plain), param in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            found = self.optimizer.grad(param)
            assert (plain.grad is None) == (found is None), name
            assert plain.grad is None or (found is not None and torch.equal(plain.grad, found)), name
        for (name, plain_buffer), buffer in zip(self.plain.named_buffers(), self.model.buffers(), strict=True):
            assert torch.equal(plain_buffer, buffer), name
        self.plain.zero_grad()
        self.optimizer.zero_grad()

    @property
    def waiting_bytes(self) -> int:
        store = self.optimizer._parts.activations
        return 0 if store is None else store.nbytes


@pytest.fixture
def pair(where: str, tmp_path: Path) -> Iterator[Callable[[Callable[[], nn.Module]], Pair]]:
    made: list[Pair] = []

    def make(model: Callable[[], nn.Module]) -> Pair:
        made.append(Pair(model, options_of(where, tmp_path / "run")))
        return made[-1]

    yield make
    for one in made:
        assert not one.waiting_bytes
        one.optimizer.close()
        assert "forward" not in vars(one.model)


Make = Callable[[Callable[[], nn.Module]], Pair]


def backward(step: int, **options: Any) -> Callable[[nn.Module], None]:
    return lambda model: squares(model, rows(step)).backward(**options)


def test_tuples_views_masks_dropout_and_lists(pair: Make) -> None:
    both = pair(RichNet)
    for step in range(3):
        both.same(backward(step))
    if both.optimizer._parts.activations is not None:
        assert both.optimizer.stats()["peak_activation_bytes"] > 0


class Cross(nn.Module):
    """Attention that is another one where both inputs are one tensor, wherever it finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, given: Any, *, memory: Tensor | None = None, holder: Any = None) -> Tensor:
        found = given[0] if isinstance(given, tuple | list) else given
        for one in (found, memory, None if holder is None else holder.hidden):
            if one is not None:
                x = x + (self.own(one) if one is x else self.other(one))
        return x


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class CrossNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cross() for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = {
                "twice": lambda block=block, x=x: block(x, x),
                "in a tuple": lambda block=block, x=x: block(x, (x, x)),
                "by name": lambda block=block, x=x: block(x, x * 2, memory=x),
                "in an object": lambda block=block, x=x: block(x, x + 1, holder=Holder(x)),
                "a view": lambda block=block, x=x: block(x, x.view(-1, 5)),
            }[self.how]()
        return x


@pytest.mark.parametrize("how", ["twice", "in a tuple", "by name", "in an object", "a view"])
def test_a_unit_that_gets_one_tensor_twice_gets_one_when_it_is_recomputed(pair: Make, how: str) -> None:
    made = pair(lambda: CrossNet(how))
    for step in range(2):
        made.same(backward(step))


class AttentionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(5, 1, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return x


def test_multihead_attention_is_a_unit(pair: Make) -> None:
    made = pair(AttentionNet)
    for step in range(2):
        made.same(backward(step))


class Chance(Block):
    """Draws from Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.random()) * np.random.uniform(0.5, 1.5)


def test_python_and_numpy_draw_again_what_the_forward_drew(pair: Make) -> None:
    def build() -> nn.Module:
        net = Net()
        net.blocks = nn.ModuleList(Chance() for _ in range(3))
        return net

    drawn: list[float] = []

    def call(net: nn.Module) -> None:
        random.seed(1)
        np.random.seed(1)
        squares(net, rows(1)).backward()
        drawn.append(random.random() + np.random.uniform())

    pair(build).same(call)
    assert drawn[0] == drawn[1]


def test_several_forwards_before_backward_and_no_grad_between(pair: Make) -> None:
    def run(model: nn.Module) -> None:
        first = squares(model, rows(1))
        with torch.no_grad():
            squares(model, rows(2))
        second = squares(model, rows(3))
        (first + second).backward()

    def accumulate(model: nn.Module) -> None:
        losses = [squares(model, rows(step)) for step in range(3)]
        torch.autograd.backward([losses[1], losses[0]])
        del losses[2]

    both = pair(RichNet)
    both.same(run)
    both.same(accumulate)


def test_retained_graphs_are_used_again(pair: Make) -> None:
    def run(model: nn.Module) -> None:
        loss = squares(model, rows(1))
        found = torch.autograd.grad(loss, [p for p in model.parameters() if p.shape == (WIDTH, 5)], retain_graph=True)
        (loss + found[0].sum()).backward()

    both = pair(RichNet)
    both.same(run)


def test_a_backward_that_names_its_inputs(pair: Make) -> None:
    def run(model: nn.Module) -> None:
        assert isinstance(model, RichNet)
        params = list(model.blocks[1].parameters())
        squares(model, rows(0)).backward(inputs=params)
        outputs = model(rows(1))
        torch.autograd.backward([outputs], [torch.ones_like(outputs)], inputs=[model.embed.weight])

    both = pair(RichNet)
    both.same(run)


def test_gradients_of_gradients(pair: Make) -> None:
    def run(model: nn.Module) -> None:
        x = rows(1).requires_grad_()
        (found,) = torch.autograd.grad(squares(model, x), x, create_graph=True)
        found.square().sum().backward()

    both = pair(lambda: nn.Sequential(nn.Linear(5, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 3)))
    both.same(run)


@pytest.mark.parametrize(("reentrant", "nested"), [(False, False), (True, False), (False, True)])
def test_checkpoints_of_the_model_recompute_alone(pair: Make, reentrant: bool, nested: bool) -> None:
    both = pair(lambda: Checkpointed((1, 2, 1), reentrant=reentrant, nested=nested))
    x = [torch.randn(300, 5, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    for step in range(2):
        both.same(lambda model, step=step: squares(model, x[step]).backward())
    if (store := both.optimizer._parts.activations) is not None:
        # What enters each of the three checkpoints: (300, 12) in fp32, in whole pages.
        assert store.peak_bytes == 3 * 16384


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stops_early", [True, False])
def test_a_checkpoint_around_the_model_recomputes_alone(pair: Make, reentrant: bool, stops_early: bool) -> None:
    """One that a loop makes of the whole model: what the units compute is saved when it runs them again."""

    def run(model: nn.Module) -> None:
        with set_checkpoint_early_stop(stops_early):
            squares(lambda x: checkpoint(model, x, use_reentrant=reentrant), rows(1).requires_grad_()).backward()

    both = pair(Net)
    for _ in range(2):
        both.same(run)


def test_lengths_that_change(pair: Make) -> None:
    both = pair(Net)
    for length in (3, 700, 1, 250, 9000, 8):
        x = torch.randn(length, 5, generator=torch.Generator().manual_seed(length))
        if length * 48 > both.optimizer.stats()["activation_bytes"] > 0:  # one of them
            with pytest.raises(BudgetError, match="activation_memory") as caught:
                squares(both.model, x)
            assert caught.value.option == "activation_memory"
            del caught
            continue
        both.same(lambda model, x=x: squares(model, x).backward())


def test_exceptions_in_forward_and_backward_leave_nothing(pair: Make) -> None:
    both = pair(Net)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for register in (Block.register_forward_pre_hook, Block.register_forward_hook):
        handle = register(both.model.blocks[2], fail)
        with pytest.raises(ZeroDivisionError):
            squares(both.model)
        handle.remove()
    handle = both.model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        squares(both.model).backward()
    handle.remove()
    assert not both.waiting_bytes
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    both.optimizer.zero_grad()
    both.same(lambda model: squares(model).backward())


def test_interrupt_in_a_forward_leaves_no_hooks(pair: Make) -> None:
    both = pair(Net)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = both.model.blocks[2].up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        squares(both.model)
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    both.same(lambda model: squares(model).backward())


class Marked(torch.autograd.Function):
    """As long as a graph lives, so does what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: object) -> Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Marks(Net):
    """Operations in the root unit and in blocks save what they return."""

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        kept = {0}
        self.graph = weakref.ref(kept)
        h = Marked.apply(self.embed(x), kept)
        for block in self.blocks:
            h = block(h.sigmoid())
        if fails:
            raise KeyError("later")
        return self.head(h).softmax(-1)


def test_graphs_without_a_backward_leave_nothing(pair: Make) -> None:
    both = pair(Marks)

    def run(model: nn.Module) -> None:
        for fails in (False, True, False):
            with suppress(KeyError):
                model(batch(1), fails)
            gc.collect()
            assert model.graph() is None
        squares(model, batch(1)).backward()
        assert model.graph() is None

    both.same(run)
    assert both.waiting_bytes == 0


class InPlace(Net):
    """Changes what entered a block, or what the root computed, after autograd has saved it."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        entered = h
        for number, block in enumerate(self.blocks):
            h = block(h)
            if self.of == "an input" and number == 1:
                with torch.no_grad():
                    entered.add_(1)
        y = self.norm(h).exp()
        if self.of == "the root":
            y.add_(1)
        return self.head(y)


def test_changes_in_place_are_errors_or_make_no_difference(where: str, tmp_path: Path) -> None:
    for of in ("an input", "the root"):
        both = Pair(lambda of=of: InPlace(of), options_of(where, tmp_path / of))
        x = torch.randn(200, 5)
        with pytest.raises(RuntimeError, match="inplace"):
            squares(both.plain, x).backward()
        loss = squares(both.model, x)
        if of == "an input" and "in place" not in where:
            # It was copied, or was about to be.
            with suppress(StaleActivationError) if "late" in where else nullcontext():
                loss.backward()
        else:
            with pytest.raises(StaleActivationError, match="inplace"):
                loss.backward()
        both.optimizer.close()


@pytest.mark.parametrize("change", ["step", "eval", "buffer", "freeze"])
def test_changes_of_a_unit_before_its_recomputation_are_refused(change: str, tmp_path: Path) -> None:
    both = Pair(RichNet, options_of("nvme", tmp_path))
    loss = squares(both.model, rows(0))
    if change == "step":
        take_step(both.optimizer, squares(both.model, rows(1)))
    elif change == "eval":
        both.model.eval()
    elif change == "freeze":
        both.model.blocks[0].requires_grad_(False)
    else:
        both.model.blocks[0].scale.mul_(2)
    with pytest.raises(StaleActivationError, match="blocks"):
        loss.backward()
    both.optimizer.close()


class Touches(nn.Module):
    """Moves the version of a frozen weight and not its value, as adapters on parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.base.add_(0)
        return x @ self.base


def test_a_unit_that_moves_the_version_of_a_weight_names_the_way_out(tmp_path: Path) -> None:
    both = Pair(lambda: Norms(Touches), options_of("nvme", tmp_path / "one"))
    with pytest.raises(StaleActivationError, match=r"give Tuning\(recompute=False\)"):
        squares(both.model, rows(0)).backward()
    both.optimizer.close()
    both = Pair(lambda: Norms(Touches), options_of("all saved", tmp_path / "other"))
    for model in (both.plain, both.model):
        squares(model, rows(0)).backward()
    for plain, param in zip(both.plain.parameters(), both.model.parameters(), strict=True):
        assert plain.grad is None or torch.equal(plain.grad, both.optimizer.grad(param))
    both.optimizer.close()


class Shrinks(nn.Linear):
    """Writes to its weight in its forward, by an alias that moves no version."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "written":
            self.weight.data.mul_(0.5)
        elif self.how == "assigned":
            self.weight.data = self.weight.data * 0.5
        else:  # for the forward only
            kept = self.weight.data
            self.weight.data = kept.round()
            found = super().forward(x)
            self.weight.data = kept
            return found
        return super().forward(x)


@pytest.mark.parametrize("where", ["nvme", "small, streamed"])
@pytest.mark.parametrize("how", ["written", "assigned", "for a while"])
def test_a_unit_that_writes_by_data_in_its_forward_is_not_recomputed(where: str, how: str, tmp_path: Path) -> None:
    """Its weights would be halved twice, and nothing would say so."""
    both = Pair(lambda: Norms(lambda: Shrinks(how)), options_of(where, tmp_path / "one"))
    with pytest.raises(StaleActivationError, match=r"blocks\.0 writes to a parameter by p\.data.*recompute=False"):
        both.model(rows(0))
    both.optimizer.close()
    both = Pair(lambda: Norms(lambda: Shrinks(how)), options_of(f"all saved, {where}", tmp_path / "other"))
    for _ in range(2):
        both.same(lambda model: squares(model, rows(0)).backward())
    for plain, param in zip(both.plain.parameters(), both.model.parameters(), strict=True):
        assert torch.equal(plain, param)
    both.optimizer.close()


class Norms(nn.Module):
    """Args: norm: the kind of module in each block that changes its buffers."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return h


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_batch_norm_counts_each_batch_once(pair: Make) -> None:
    both = pair(lambda: Norms(lambda: nn.BatchNorm1d(WIDTH)))
    for step in range(2):
        both.same(backward(step))


def test_unit_that_changes_a_buffer_is_not_recomputed(tmp_path: Path) -> None:
    both = Pair(lambda: Norms(Counts), options_of("nvme", tmp_path / "one"))
    with pytest.raises(ConfigError, match="recompute=False"):
        squares(both.model, rows(0))
    both.optimizer.close()
    both = Pair(lambda: Norms(Counts), options_of("all saved", tmp_path / "other"))
    for step in range(2):
        both.same(backward(step))
    both.optimizer.close()


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Becomes(nn.Linear):
    """Gives itself another class when it runs first, as lazy modules do."""

    def forward(self, x: Tensor) -> Tensor:
        out = nn.Linear.forward(self, x)
        self.__class__ = Halved
        return out


def _given_a_class(model: nn.Module) -> None:
    for block in model.blocks:
        block.__class__ = type("Other", (type(block),), {"forward": lambda self, x: x + torch.tanh(self[0](x))})


def _class_patched(model: nn.Module) -> None:
    for block in model.blocks:
        type(block).forward = lambda self, x: x + torch.tanh(self[0](x))


@pytest.mark.parametrize("change", [_given_a_class, _class_patched])
def test_a_unit_whose_class_or_whose_classes_forward_is_changed_later_runs_what_it_has_now(
    pair: Make, change: Callable[[nn.Module], None]
) -> None:
    own = type("Own", (nn.Sequential,), {})

    def make() -> Norms:
        model = Norms(nn.Identity)
        for block in model.blocks:
            block.__class__ = own
        return model

    both = pair(make)
    both.same(backward(0))
    for model in (both.plain, both.model):
        change(model)
    both.same(backward(1))


def test_a_class_that_a_forward_changes_is_refused_in_the_recomputation_alone(pair: Make, where: str) -> None:
    both = pair(lambda: Norms(lambda: Becomes(WIDTH, WIDTH)))
    if "all saved" not in where:
        with pytest.raises(StaleActivationError, match="a class of blocks"):
            backward(0)(both.model)
        both.optimizer.zero_grad()
        for block in both.plain.blocks:
            block[1].__class__ = Halved
    for step in range(2):
        both.same(backward(step))


class Cache:
    """What a forward adds to, as caches of keys and values are."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []


class Cached(Net):
    def forward(self, x: Tensor) -> Tensor:
        h, self.cache = self.embed(x), Cache()
        for block in self.blocks:
            h = block(h, self.cache)
        return self.head(h)


class CachedBlock(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.held.append(self.up(x))
        return super().forward(x) + torch.cat(cache.held[-2:], -1).mean(-1, keepdim=True)


def test_objects_that_a_forward_changes_are_changed_once(pair: Make) -> None:
    def make() -> Cached:
        model = Cached()
        model.blocks = nn.ModuleList(CachedBlock() for _ in range(3))
        return model

    both = pair(make)
    both.same(lambda model: squares(model).backward())
    assert len(both.model.cache.held) == 3
    del both.model.cache, both.plain.cache


class Rows(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm(dim=1, keepdim=True)


def test_parametrized_weights_from_a_cache(pair: Make) -> None:
    """A recomputation after the cache has gone would save other tensors."""

    def build() -> nn.Module:
        net = Net()
        for block in net.blocks:
            parametrize.register_parametrization(block.up, "weight", Rows())
        return net

    def call(net: nn.Module) -> None:
        with parametrize.cached():
            loss = squares(net, rows(1)) + squares(net, rows(2))
        loss.backward()

    both = pair(build)
    both.same(call)
    both.same(call, seed=2)


def test_a_held_model_is_exported_as_the_plain_one(pair: Make) -> None:
    both = pair(Net)
    x = batch(3)
    exported = [torch.export.export(model, (x,)) for model in (both.model, both.plain)]
    weights = [dict(both.plain.named_parameters())] * 2
    codes = [one.graph_module.code for one in exported]
    assert codes[0].count("linear") == codes[1].count("linear") > 0
    assert torch.equal(exported[1].module()(x), torch.func.functional_call(exported[0].module(), weights[0], (x,)))


def test_copies_and_signatures_are_those_of_the_plain_model(pair: Make) -> None:
    both = pair(Net)
    assert list(both.model.state_dict()) == list(both.plain.state_dict())
    assert type(both.model.blocks[0]) is Block
    assert inspect.signature(both.model.forward) == inspect.signature(both.plain.forward)
    for copied in (copy.deepcopy(both.model), pickle.loads(pickle.dumps(both.model))):
        assert copied.blocks[1].forward.__self__ is copied.blocks[1]
        x = batch(3)
        squares(copied, x).backward()
        squares(both.plain, x).backward()
        for param, plain in zip(copied.parameters(), both.plain.parameters(), strict=True):
            assert torch.equal(param.grad, plain.grad)
        both.plain.zero_grad()
        assert not both.waiting_bytes


def test_parameters_that_are_lent_are_used(pair: Make) -> None:
    both = pair(Net)
    lent = {name: torch.randn_like(param) for name, param in both.plain.named_parameters()}
    found = []
    for model in (both.plain, both.model):
        x = batch(1).requires_grad_()
        torch.func.functional_call(model, lent, (x,)).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_units_called_by_themselves_and_hooks_of_others(pair: Make) -> None:
    both = pair(Net)
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(1))
    both.same(lambda model: model.blocks[1](x).square().sum().backward())
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = both.model(batch(0))
    assert packed  # what the root saved, and ours did not take
    out.sum().backward()
    both.optimizer.zero_grad()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        both.same(lambda model: squares(model).backward())


def test_autocast_is_that_of_the_forward(pair: Make) -> None:
    def run(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = squares(model, rows(1))
        loss.backward()

    pair(RichNet).same(run)


def test_graph_that_outlives_the_optimizer_says_so(where: str, tmp_path: Path) -> None:
    both = Pair(RichNet, options_of(where, tmp_path))
    loss = squares(both.model, rows(0))
    both.optimizer.close()
    with pytest.raises(ClosedError):
        loss.backward()


def test_activations_beyond_the_region_are_refused_in_the_forward(tmp_path: Path) -> None:
    options = options_of("nvme", tmp_path) | {"activation_tier": "cpu", "path": None, "commit_every": None}
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    both = Pair(Net, options | {"activation_memory": 3 * 12288})
    with pytest.raises(BudgetError, match='give activation_memory="48KiB" or more'):
        squares(both.model, x)
    both.optimizer.close()
    both = Pair(Net, options | {"activation_memory": 4 * 12288})
    both.same(lambda model: squares(model, x).backward())
    assert both.optimizer.stats()["peak_activation_bytes"] == 4 * 12288
    both.optimizer.close()


def test_activations_beyond_a_models_own_memory_go_to_files(tmp_path: Path) -> None:
    """Of a model on the CPU, whose device is the CPU."""
    options = options_of("nvme", tmp_path) | {"activation_tier": "device", "activation_memory": 12288}
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    both = Pair(Net, options)
    both.same(lambda model: squares(model, x).backward())
    assert both.optimizer.stats()["peak_activation_bytes"] == 4 * 12288
    assert both.optimizer.stats()["activation_read_bytes"] == 3 * 12288
    both.optimizer.close()


def test_model_checkpoints_by_functions_of_its_own(pair: Make) -> None:
    """As transformers does: with what is no tensor bound to the function."""

    class Layers(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for number, block in enumerate(self.blocks):
                h = checkpoint(lambda h, block=block: block(h), h, use_reentrant=number % 2 == 0)
            return self.head(h)

    both = pair(Layers)
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    both.same(lambda model: squares(model, x).backward())


def test_layers_whose_forward_is_a_checkpoint_are_recomputed_once(pair: Make) -> None:
    """As those of transformers since version 5."""

    class Layer(Block):
        gradient_checkpointing = True
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=False)

        def run(self, x: Tensor) -> Tensor:
            Layer.calls += 1
            return super().forward(x)

    def make() -> Net:
        model = Net()
        model.blocks = nn.ModuleList(Layer() for _ in range(3))
        return model

    both = pair(make)
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    both.same(lambda model: squares(model, x).backward())
    assert Layer.calls == 2 * 2 * 3
    if (store := both.optimizer._parts.activations) is not None:
        assert store.peak_bytes == 3 * 12288
