"""Any way to run a model gives the same bits with streamed parameters as with parameters on the device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from offload import (
    BudgetError,
    ClosedError,
    ConfigError,
    NonFiniteGradientError,
    ReleasedParameterError,
    Tuning,
    torch_private,
)
from offload.devices.copies import DeviceEvent
from offload.model.unit import Unit
from offload.model.unit_memory import UnitMemory
from offload.planner import least_cpu_memory
from tests.support.late_copier import CopiedBy, LateCopier, _LateCopy
from tests.support.processes import holds_in_child
from tests.support.streamed import Streams, Watched, finish, state_of, train
from tests.support.toy import WIDTH, Block, Checkpointed, Net, batch, squares

# Activation checkpointing.


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("groups", [(1, 1, 1, 1), (1, 3)], ids=str)
def test_checkpoints(streams: Streams, groups: tuple[int, ...], reentrant: bool, nested: bool) -> None:
    streams.assert_same_bits(train(squares), lambda: Checkpointed(groups, reentrant, nested))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_a_checkpoint_around_the_model(streams: Streams, reentrant: bool) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).float().square().mean()

    streams.assert_same_bits(train(loss))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpoints_by_a_user_who_never_calls_the_model(streams: Streams, reentrant: bool) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        h = model.embed(x.bfloat16().requires_grad_())
        h = checkpoint_sequential(list(model.blocks), 2, h, use_reentrant=reentrant)
        return model.head(h).float().square().mean()

    streams.assert_same_bits(train(loss))


def test_a_checkpoint_that_recomputes_other_blocks_after_the_one_whose_backward_runs(streams: Streams) -> None:
    class Two(Net):
        def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.blocks[0](x)
            return h, self.blocks[2](self.blocks[1](h))

        def forward(self, x: Tensor) -> Tensor:
            h, unused = checkpoint(self.pair, self.embed(x), use_reentrant=False)
            return self.head(h) + 0 * unused.mean().detach()

    streams.assert_same_bits(train(squares), Two)


# Which modules, in which order.


def test_modules_called_more_than_once(streams: Streams) -> None:
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for block in (*self.blocks, self.blocks[1], *reversed(self.blocks)):
                h = block(h)
            return self.head(self.norm(self.head(self.norm(h)).mean() + h))

    streams.assert_same_bits(train(squares), Again)


def test_modules_not_called_and_called_in_another_order_from_step_to_step(streams: Streams) -> None:
    class Shuffled(Net):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            h = self.embed(x)
            for block in ((0, 1, 2, 3), (3, 1), (2,), (), (1, 0, 3, 2), (3, 2, 1, 0))[self.count % 6]:
                h = self.blocks[block](h)
            return self.head(h)

    streams.assert_same_bits(
        train(squares, steps=12), Shuffled, tuning=Tuning(chunk="4KiB", prefetch_chunks=3, prefetch_units=3, threads=1)
    )


def test_branches_that_join(streams: Streams) -> None:
    class Branches(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(self.blocks[0](h) + self.blocks[1](h) * self.blocks[2](self.blocks[0](h)))

    streams.assert_same_bits(train(squares), Branches)


def test_blocks_that_are_lists_of_modules(streams: Streams) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(5), nn.Linear(5, 5), nn.ModuleDict({"out": nn.Linear(5, 5)})])
                for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for norm, layer, more in self.layers:
                x = x + more["out"](torch.tanh(layer(norm(x))))
            return x

    streams.assert_same_bits(train(squares), Lists)


def test_shared_parameters_and_modules(streams: Streams) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[3].norm = self.blocks[1].norm
            self.again = nn.ModuleList([self.blocks[1], Block()])

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h + self.again[1](self.again[0](self.embed(x))).mean()

    streams.assert_same_bits(train(squares), Tied)


def test_frozen_parameters_and_frozen_units(streams: Streams) -> None:
    def build() -> Net:
        model = Net()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        model.blocks[2].after.requires_grad_(False)
        model.embed.requires_grad_(False)
        return model

    streams.assert_same_bits(train(squares), build)


def test_freezing_in_the_middle_of_training(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        model.blocks[1].requires_grad_(count % 2 == 0)
        return squares(model, x, count)

    def body(model: Net, optimizer: Watched) -> None:
        train(loss)(model, optimizer)
        model.requires_grad_(True)

    streams.assert_same_bits(body)


def test_a_parameter_class_of_ones_own_is_kept(streams: Streams) -> None:
    class Mine(nn.Parameter):
        pass

    def build() -> Net:
        model = Net()
        model.blocks[1].after = Mine(model.blocks[1].after.data)
        return model

    kinds = []

    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        handle = model.blocks[1].register_forward_hook(lambda *_: kinds.append(isinstance(model.blocks[1].after, Mine)))
        found = squares(model, x, count)
        handle.remove()
        return found

    streams.assert_same_bits(train(loss, steps=2), build)
    assert kinds == [True] * 4
    model = build()
    with streams.optimizer(model):
        assert isinstance(model.blocks[1].after, Mine)
    assert type(model.blocks[1].after) is Mine


def test_convolutions_and_modules_kept_in_fp32(streams: Streams) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.BatchNorm1d(1), nn.GELU()) for _ in range(3))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x[:, None])

    streams.assert_same_bits(train(squares), Conv, keep_fp32=(nn.BatchNorm1d,))


# What goes in and comes out.


@dataclasses.dataclass
class Hidden:
    state: Tensor
    more: dict[str, Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _cyclic(x: Tensor) -> list[Any]:
    found: list[Any] = [x]
    found.append(found)
    return found


SHAPES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda x: Hidden(x, {}), lambda tree: tree.state),
    "dict in dataclass": (lambda x: Hidden(x.detach(), {"x": [x]}), lambda tree: tree.more["x"][0]),
    "tuple": (lambda x: (None, 3, (x, "text")), lambda tree: tree[2][0]),
    "named tuple": (lambda x: Pair(x, None), lambda tree: tree.first),
    "slots": (Slotted, lambda tree: tree.value),
    "cycle": (_cyclic, lambda tree: tree[0]),
    "view": (lambda x: x.view(-1).view_as(x), lambda tree: tree),
    "changed in place": (lambda x: x, lambda tree: tree.mul_(0.5)),
    "view changed in place": (lambda x: x.view(-1), lambda tree: tree.mul_(0.5).view(-1, WIDTH)),
    "part changed in place": (lambda x: x[:2], lambda tree: torch.cat([tree.mul_(0.5), tree.detach()])),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_inputs_of_any_structure(streams: Streams, shape: str) -> None:
    pack, unpack = SHAPES[shape]

    class Packed(Block):
        def forward(self, x: Any, *, scale: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
            h = super().forward(unpack(x) if scale else x)
            return pack(nn.functional.linear(h, self.after))

    class Structured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Packed() for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            h = self.blocks[0](self.embed(x))
            for block in self.blocks[1:]:
                h = block(h, scale={"x": 2})
            return pack(unpack(h))

    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        return unpack(model(x)).float().square().mean()

    streams.assert_same_bits(train(loss), Structured)


def test_a_model_that_returns_nothing(streams: Streams) -> None:
    class Silent(Net):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            self.loss = super().forward(x).float().square().mean()

    def loss(model: Any, x: Tensor, count: int) -> Tensor:
        assert model(x) is None
        found: Tensor = model.loss
        return found

    streams.assert_same_bits(train(loss), Silent)


def test_losses_from_the_middle_kept_aside(streams: Streams) -> None:
    class Aside(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.aside = self.kept[1] + self.kept[0].mean()
            return out

    def build() -> Net:
        model = Aside()
        model.kept = {}
        for number, block in enumerate(model.blocks):
            block.up.register_forward_hook(lambda _, __, out, number=number: model.kept.update({number: out}))
        return model

    def loss(model: Any, x: Tensor, count: int) -> Tensor:
        out = model(x)
        found = model.aside.float().square().mean()
        return found if count % 2 else found + out.float().mean()

    streams.assert_same_bits(train(loss), build)


# Ways to run forward and backward.


def test_forwards_without_gradients_between_steps(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for count in range(3):
            model.eval()
            with torch.no_grad():
                optimizer.losses += [model(batch(n)).sum().item() for n in range(3)]
                model.blocks[2](torch.ones(1, WIDTH, dtype=torch.bfloat16))
            with torch.inference_mode():
                optimizer.losses.append(model(batch(9)).sum().item())
            model.train()
            loss = squares(model, batch(count), count)
            with torch.no_grad():  # between a forward and its backward
                optimizer.losses.append(model(batch(7)).sum().item())
            loss.backward()
            finish(optimizer)

    streams.assert_same_bits(body)


def test_two_forwards_before_one_backward(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        return squares(model, x, count) + squares(model, x * 2, count)

    streams.assert_same_bits(train(loss))


def test_gradient_accumulation(streams: Streams) -> None:
    streams.assert_same_bits(train(squares, backwards=3), accumulation=3)


def test_two_forwards_then_two_backwards(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for count in range(3):
            losses = [squares(model, batch(2 * count + n), count) for n in range(2)]
            for loss in losses:
                loss.backward()
            finish(optimizer)

    streams.assert_same_bits(body, accumulation=2)


def test_two_backwards_through_one_graph(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for count in range(3):
            loss = squares(model, batch(count), count)
            loss.backward(retain_graph=True)
            loss.backward()
            finish(optimizer)

    streams.assert_same_bits(body, accumulation=2)


def test_autograd_grad(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        x.requires_grad_()
        found = squares(model, x, count)
        (of_input,) = torch.autograd.grad(found, x, retain_graph=True)
        (of_block,) = torch.autograd.grad(found, model.blocks[1].after, retain_graph=True)
        return found * (1 + of_input.abs().mean() + of_block.abs().mean())

    streams.assert_same_bits(train(loss))


def test_a_partial_backward(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        hidden = []
        handle = model.blocks[count % 3].register_forward_hook(lambda _, __, out: hidden.append(out))
        model(x)
        handle.remove()
        return hidden[0].float().square().mean()

    streams.assert_same_bits(train(loss))


def test_blocks_run_by_the_user(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        h = model.embed(x.bfloat16())
        h = model.blocks[1](model.blocks[0].down(model.blocks[0].up(h)))
        return model.head(h).float().square().mean()

    def body(model: Net, optimizer: Watched) -> None:
        for _ in range(3):
            train(loss, steps=1)(model, optimizer)
            optimizer.synchronize()

    streams.assert_same_bits(body)


def test_a_model_that_differentiates_inside_its_forward(streams: Streams) -> None:
    class Energy(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(inner).sum(), inner)
            return super().forward(x + force)

    streams.assert_same_bits(train(squares), Energy)


def test_second_derivatives(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        x.requires_grad_()
        found = squares(model, x, count)
        (grad,) = torch.autograd.grad(found, x, create_graph=True)
        return found + grad.square().sum()

    streams.assert_same_bits(train(loss))


def test_a_gradient_penalty_on_parameters(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        found = squares(model, x, count)
        grads = torch.autograd.grad(found, [block.after for block in model.blocks], create_graph=True)
        return found + sum(grad.float().square().sum() for grad in grads)

    streams.assert_same_bits(train(loss))


def test_second_derivatives_keep_units_until_the_step_and_say_what_does_not_fit(streams: Streams) -> None:
    model = Net(12)
    with streams.optimizer(model) as optimizer:
        transfers = optimizer._held.units.transfers
        x = batch(0).requires_grad_()
        (grad,) = torch.autograd.grad(squares(model, x, 0), x, create_graph=True)
        assert len(transfers.with_memory) >= 12
        grad.square().sum().backward()
        optimizer.step()
        assert len(transfers.with_memory) < 6
        transfers.limit = 3 * optimizer._held.units.named("blocks.0").nbytes
        with pytest.raises(BudgetError, match="create_graph=True keeps more streamed parameters") as caught:
            torch.autograd.grad(squares(model, x, 0), x, create_graph=True)
        assert caught.value.option == "device_memory"


def test_a_view_kept_from_a_forward_is_refused_by_autograd(streams: Streams) -> None:
    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.after.view(-1)
            self.product = x.sum() * self.kept
            return super().forward(x)

    class Keeping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Keeps() for _ in range(3))

    model = Keeping()
    with streams.optimizer(model) as optimizer:
        model(batch(0)).sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model.blocks[0].product.sum().backward()
        optimizer.zero_grad()
        squares(model, batch(1), 1).backward()
        finish(optimizer)


def test_an_old_graph_is_refused_after_a_step(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        old = squares(model, batch(0), 0)
        for _ in range(2):
            squares(model, batch(0), 0).backward()
            finish(optimizer)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|older than"):
            old.backward()


# What goes wrong.


def test_a_skipped_step(streams: Streams) -> None:
    def loss(model: Net, x: Tensor, count: int) -> Tensor:
        return squares(model, x, count) * (float("nan") if count == 1 else 1.0)

    def body(model: Net, optimizer: Watched) -> None:
        train(loss)(model, optimizer)
        optimizer.losses = [loss for loss in optimizer.losses if loss == loss]
        assert optimizer.stats()["skipped_steps"] == 1

    streams.assert_same_bits(body, nonfinite="skip")


def test_a_refused_step(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        train(squares)(model, optimizer)
        (squares(model, batch(0), 0) * float("inf")).backward()
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
        optimizer.zero_grad()
        train(squares)(model, optimizer)

    streams.assert_same_bits(body)


class Trip(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


class Failing(Checkpointed):
    """Fails in the block and phase that `at` names."""

    at: tuple[str, int] | None = None

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__((2, 2), bool(reentrant))
        self.plain = reentrant is None
        for number, block in enumerate(self.blocks):
            block.up.register_forward_hook(lambda _, __, out, number=number: self.hook(out, number))

    def hook(self, out: Tensor, number: int) -> Tensor | None:
        if self.at == ("forward", number):
            raise ZeroDivisionError
        if self.at == ("recomputation", number) and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return Trip.apply(out) if self.at == ("backward", number) else None

    def forward(self, x: Tensor) -> Tensor:
        return Net.forward(self, x) if self.plain else super().forward(x)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "saved", "reentrant"])
def test_exceptions_of_the_user(streams: Streams, reentrant: bool | None) -> None:
    def body(model: Failing, optimizer: Watched) -> None:
        for phase in ("forward", "backward", "recomputation"):
            for number in (0, 3):
                model.at = (phase, number)
                if phase == "recomputation" and reentrant is None:
                    continue
                with pytest.raises(ZeroDivisionError):
                    squares(model, batch(0), 0).backward()
                model.at = None
                optimizer.zero_grad()
                train(squares, steps=1)(model, optimizer)

    streams.assert_same_bits(body, lambda: Failing(reentrant))


class Interrupted:
    """Raises KeyboardInterrupt at call `at` of a function, once."""

    def __init__(self, function: Callable[..., Any], at: int) -> None:
        self.function, self.at = function, at

    def __call__(self, *args: Any) -> Any:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return self.function(*args)


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_an_interrupt_while_a_unit_comes(streams: Streams, at: int) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        train(squares, steps=2)(model, optimizer)
        if optimizer._parts.parameters.streams_any:
            transfers = optimizer._held.units.transfers
            transfers._start_copy = Interrupted(transfers._start_copy, at)
            with pytest.raises(KeyboardInterrupt):
                squares(model, batch(0), 0).backward()
        optimizer.zero_grad()
        train(squares, steps=2)(model, optimizer)

    streams.assert_same_bits(body, tuning=Tuning(chunk="4KiB", prefetch_chunks=2, prefetch_units=2, threads=1))


def test_a_lease_is_wanted_while_uploads_are_asked_whether_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied_by: CopiedBy
) -> None:
    """The step's worker, at a moment when a device's event gives up the interpreter's lock."""
    copied_by(lambda: LateCopier(1))
    others: list[threading.Thread] = []
    with Streams(tmp_path, {"param_tier": "cpu"}).optimizer(Net(), tuning=Tuning(chunk="4KiB")) as optimizer:
        transfers = optimizer._held.units.transfers
        done = _LateCopy.done

        def slowly(copy: _LateCopy) -> bool:
            if not others and transfers._uploads:
                others.append(threading.Thread(target=transfers._give_back, args=(transfers._uploads[0].chunk,)))
                others[0].start()
                others[0].join(0.2)
            return done(copy)

        monkeypatch.setattr(_LateCopy, "done", slowly)
        with torch.no_grad():
            optimizer._model(batch(0))
        assert others
        others[0].join()


def test_a_forward_in_another_thread(streams: Streams) -> None:
    def body(model: Net, optimizer: Watched) -> None:
        for count in range(3):
            thread = threading.Thread(target=lambda count=count: squares(model, batch(count), count).backward())
            thread.start()
            thread.join()
            finish(optimizer)

    streams.assert_same_bits(body)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    model = Net()
    with Streams(tmp_path, {"param_tier": "cpu"}).optimizer(model):

        def claim() -> bool:
            with pytest.raises(ClosedError), torch.no_grad():
                model(batch(0))
            return True

        assert holds_in_child(claim)


def test_a_closed_optimizer_leaves_a_model_that_works(streams: Streams) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    with streams.optimizer(model, tuning=Tuning(chunk="4KiB", threads=1, tile=200)) as optimizer:
        train(squares, steps=2)(model, optimizer)
        masters = {name: optimizer.state_of(p)["master"] for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            expected = model(batch(0))
        loss = squares(model, batch(0), 0)
    assert torch.allclose(model(batch(0).bfloat16()), expected, rtol=2**-5)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    saved = model.state_dict()
    assert all(torch.equal(saved[name], master.bfloat16()) for name, master in masters.items())
    with pytest.raises(ClosedError):
        loss.backward()
    model(batch(0).bfloat16()).float().square().mean().backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
    model.zero_grad()
    with Watched(model) as optimizer:  # another takes it
        train(squares, steps=1)(model, optimizer)


@pytest.mark.parametrize("limit", ["device_memory", "free"])
def test_a_closed_optimizer_leaves_parameters_that_refuse_if_they_do_not_fit(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(8)
    options: dict[str, Any] = {"param_tier": "cpu"} | ({"device_memory": "6KiB"} if limit == "device_memory" else {})
    with Streams(tmp_path, options).optimizer(model) as optimizer:
        train(squares, steps=1)(model, optimizer)
        loss = squares(model, batch(0), 0)
        if limit == "free":
            monkeypatch.setattr("offload.build.free_memory", lambda: 20_000)
    with pytest.raises(ReleasedParameterError):
        model(batch(0).bfloat16())
    with pytest.raises(ReleasedParameterError):
        model.state_dict()
    with pytest.raises(ClosedError):
        loss.backward()


# Mistakes with the model.


def test_a_forward_beside_another_is_refused_and_the_first_goes_on(streams: Streams) -> None:
    refused: list[BaseException] = []

    class Beside(Block):
        def forward(self, x: Tensor) -> Tensor:
            if not refused and beside:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            return super().forward(x)

    def run() -> None:
        try:
            model(batch(0))
        except ConfigError as error:
            refused.append(error)

    def build() -> Net:
        model = Net()
        model.blocks[1] = Beside()
        return model

    beside = False
    expected = streams.run(train(squares), build)
    beside = True
    torch.manual_seed(5)
    model = build()
    with streams.optimizer(model) as optimizer:
        train(squares)(model, optimizer)
        assert optimizer.losses == expected[0]
        found = state_of(model, optimizer)
    assert "one thread at a time" in str(refused[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected[1].items())


def test_nan_from_a_view_that_a_block_kept_names_the_view(streams: Streams) -> None:
    """Torch itself would read the weight there. What it reads of a released one is NaN, and not any number;
    builds for CUDA do not let it."""

    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up.weight[0]
            return super().forward(x)

    model = Net()
    model.blocks[1] = Keeping()
    with streams.optimizer(model) as optimizer:
        train(squares, steps=1)(model, optimizer)
        loss = squares(model, batch(0), 0)
        if torch_private.forbid_data_access is not None:
            with pytest.raises(RuntimeError, match="not on the device now"):
                model.blocks[1].kept.detach().float()
            return
        (loss * model.blocks[1].kept.detach().float().sum()).backward()
        with pytest.raises(NonFiniteGradientError, match="a module keeps a view of a streamed weight: take it in each"):
            optimizer.step()


def test_parameters_added_or_replaced_afterwards_are_refused_by_name(streams: Streams) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        train(squares, steps=1)(model, optimizer)
        model.blocks[1].extra = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        handle = model.blocks[1].register_forward_hook(lambda module, _, out: module.extra(out))
        squares(model, batch(0), 0).backward()
        with pytest.raises(ConfigError, match=r"blocks\.1\.extra\.\w+ was added to the model after"):
            optimizer.step()
        for param in model.blocks[1].extra.parameters():
            param.grad = None
        finish(optimizer)
        handle.remove()
        del model.blocks[1].extra
        old, model.head.weight = model.head.weight, nn.Parameter(torch.zeros(3, WIDTH, dtype=torch.bfloat16))
        squares(model, batch(0), 0).backward()
        with pytest.raises(ConfigError, match=r"head\.weight is no longer in the model"):
            optimizer.step()
        model.head.weight = old
        optimizer.zero_grad()
        train(squares, steps=1)(model, optimizer)


def test_a_pass_without_gradients_does_not_cost_the_next_backward_its_read_ahead(tmp_path: Path) -> None:
    model = Net(6)
    least = least_cpu_memory(model, param_tier="nvme", tuning=Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1))
    options: dict[str, Any] = {"param_tier": "nvme", "cpu_memory": least}
    with Streams(tmp_path, options).optimizer(model) as optimizer:
        train(squares, steps=2)(model, optimizer)
        with torch.no_grad():
            model(batch(0))
        loss = squares(model, batch(0), 0)
        layout, store = optimizer._layout, optimizer._parts.stores.params
        assert store is not None
        units = [layout.flats[layout.chunks[use.chunk].flat].unit for use in store._ahead]
        # The last two are on the device.
        assert list(dict.fromkeys(units)) == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
        loss.backward()
        finish(optimizer)


# Memory.


class Gauge:
    """Counts the units that have memory, and keeps the most at once."""

    def __init__(self, optimizer: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: set[Unit] = set()
        self.most: set[Unit] = set()
        parameters = optimizer._parts.parameters
        allocate, free = parameters.allocate, parameters.free

        def allocated(unit: Unit) -> DeviceEvent:
            self.here.add(unit)
            self.most = max(self.most, set(self.here), key=len)
            return allocate(unit)

        def freed(unit: Unit) -> DeviceEvent:
            self.here.discard(unit)
            return free(unit)

        monkeypatch.setattr(parameters, "allocate", allocated)
        monkeypatch.setattr(parameters, "free", freed)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("checkpoints", [None, False, True], ids=["", "saved", "reentrant"])
@pytest.mark.parametrize("blocks", [12])
def test_memory_on_the_device_does_not_grow_with_depth(
    streams: Streams, checkpoints: bool | None, blocks: int, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Net(blocks)
    if checkpoints is not None:
        model = Checkpointed((blocks // 2, blocks // 2), checkpoints)
    with streams.optimizer(
        model, tuning=Tuning(chunk="4KiB", prefetch_chunks=prefetch, prefetch_units=prefetch, threads=1)
    ) as optimizer:
        gauge = Gauge(optimizer, monkeypatch)
        for count in range(3):
            squares(model, batch(count), count).backward()
            finish(optimizer)
            with torch.no_grad():
                model(batch(count))
            order = torch.randperm(blocks).tolist()
            model.blocks[order[0]](torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum()
            model.state_dict()
        assert len(gauge.most) <= 2 + prefetch + 1, gauge.most
        assert not gauge.here - {""}


def test_memory_on_the_device_is_bounded_when_the_order_is_never_the_same(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Random(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for number in torch.randperm(len(self.blocks)).tolist():
                h = self.blocks[number](h)
            return self.head(h)

    model = Random(10)
    with streams.optimizer(
        model, tuning=Tuning(chunk="4KiB", prefetch_chunks=2, prefetch_units=2, threads=1)
    ) as optimizer:
        gauge = Gauge(optimizer, monkeypatch)
        for count in range(4):
            squares(model, batch(count), count).backward()
            finish(optimizer)
        assert len(gauge.most) <= 2 + 2 + 1
        assert not gauge.here


def test_units_come_into_the_memory_that_others_left(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(12)
    made: list[int] = []

    allocate = UnitMemory._allocate

    def noted(self: UnitMemory, nbytes: int, *args: Any, **given: Any) -> Any:
        made.append(nbytes)
        return allocate(self, nbytes, *args, **given)

    monkeypatch.setattr(UnitMemory, "_allocate", noted)
    for block in model.blocks[8:]:
        block.larger = nn.Linear(WIDTH, WIDTH)
    with streams.optimizer(
        model, tuning=Tuning(chunk="4KiB", prefetch_chunks=2, prefetch_units=2, threads=1)
    ) as optimizer:
        parameters = optimizer._parts.parameters
        memory = parameters._unit_memory

        def note(block: nn.Module, args: object) -> None:
            assert parameters._bytes + memory.nbytes <= parameters.peak_bytes

        for block in model.blocks:
            block.register_forward_pre_hook(note)
        for count in range(4):
            if count == 2:
                assert made
                made.clear()
            squares(model, batch(count), count).backward()
            finish(optimizer)
        assert memory.nbytes > 0
        assert not made
        assert parameters.peak_bytes <= optimizer._placement.device_bytes


def test_closing_gives_back_what_lies_spare(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with streams.optimizer(model) as optimizer:
        squares(model, batch(0), 0).backward()
        finish(optimizer)
        monkeypatch.setattr("offload.build.Plan.room_at_end", lambda *unused: 0)
        memory = optimizer._parts.parameters._unit_memory
        assert memory.nbytes > 0
    assert memory.nbytes == 0
