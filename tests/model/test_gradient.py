"""What `p.grad` of a held model answers: what a plain gradient does, wherever the values are."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import AccumulationError, GradientMovedError, OffloadZero, Tuning
from offload.errors import ConfigError
from offload.model.gradient import is_stand_in
from tests.model.held import saved
from tests.support.toy import Net, batch

WAYS: dict[str, dict[str, Any]] = {
    "on the device": {"tier": "device"},
    "in RAM": {"tier": "cpu"},
    "summed in fp32": {"tier": "cpu", "accumulation": 2},
    "on NVMe": {
        "tier": "nvme",
        "grad_tier": "nvme",
        "tuning": Tuning(chunk="256KiB", prefetch_chunks=1, prefetch_units=1, threads=1),
    },
    "streamed": {"tier": "cpu", "param_tier": "cpu"},
}


class Made(NamedTuple):
    """A held model, and a plain bf16 one, with the gradients of the same backward."""

    model: Net
    optimizer: OffloadZero
    plain: Net

    @property
    def grad(self) -> Tensor:
        grad = self.model.blocks[1].after.grad
        assert is_stand_in(grad)
        return grad

    @property
    def plain_grad(self) -> Tensor:
        return self.plain.blocks[1].after.grad

    @property
    def stays(self) -> bool:
        """Whether the values can be read after the step."""
        return self.optimizer.stats()["grad_tier"] != "nvme"

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.parameters(), self.plain.parameters(), strict=True))

    def same(self, *, rounds: bool = False) -> None:
        """What the step is going to use is what plain torch has. Args: rounds: it was multiplied in bf16."""
        for param, plain in self.pairs:
            assert plain.grad is not None
            tolerance = {"rtol": 2**-6, "atol": 0.0} if rounds else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(param.grad.clone(), plain.grad, **tolerance)
            torch.testing.assert_close(self.optimizer.grad(param), plain.grad.float(), **tolerance)


@pytest.fixture(params=list(WAYS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    options = {"tuning": Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1), **WAYS[request.param]}
    if options["tier"] == "nvme":
        options["path"] = tmp_path / "run"
    model, plain = Net(), Net().bfloat16()
    with OffloadZero(model, **options) as optimizer:
        model(batch(0)).float().square().sum().backward()
        plain(batch(0).bfloat16()).float().square().sum().backward()
        yield Made(model, optimizer, plain)


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype is expected.dtype and torch.equal(found, expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return bool(found == expected)


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda g: (g.shape, g.size(), g.size(0), g.stride(), g.ndim, g.numel(), len(g), g.is_contiguous()),
    "kind": lambda g: (g.dtype, g.device, g.layout, g.is_cuda, g.is_sparse, g.itemsize, g.nbytes, g.element_size()),
    "autograd": lambda g: (g.requires_grad, g.is_leaf, g.grad_fn, g.grad),
    "torch": lambda g: (
        torch.is_tensor(g),
        torch.is_floating_point(g),
        g.is_complex(),
        isinstance(g, Tensor),
        g in {g},
    ),
    "one like it": lambda g: [torch.zeros_like(g), torch.ones_like(input=g), g.new_zeros(3), g.new_ones((2, 2))],
    "itself": lambda g: (g.detach() is not None, g.cpu() is g, g.to(g.dtype) is g, g.requires_grad_(False) is g),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=list(QUESTIONS))
def test_it_has_shape_dtype_and_device_of_the_parameter_before_and_after_the_step(
    made: Made, ask: Callable[[Tensor], Any]
) -> None:
    grad = made.grad
    assert alike(ask(grad), ask(made.plain_grad))
    made.optimizer.step()
    assert alike(ask(grad), ask(made.plain_grad))


USES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda g: [g + 1, 1 - g, -g, g * g, g @ g, g**2],
    "reductions": lambda g: [g.sum(), g.abs().max(), g.isnan().any(), g.mean()],
    "views": lambda g: [g.view(-1), g.t(), g[0], g[1:3, ::2], g.flatten()],
    "casts": lambda g: [g.float(), g.double(), g.clone(), g.to("cpu", copy=True)],
    "python": lambda g: [g.tolist(), g[0, 0].item(), bool(g.isfinite().all()), f"{g[0, 0]:.3f}"],
    "copies": lambda g: [copy.deepcopy(g), pickle.loads(pickle.dumps(g)), saved(g)],
    "lists": lambda g: [torch.stack([g, g]), torch.cat((g, g)), torch._foreach_add([g], 1.0)],
    "a histogram": lambda g: torch.histc(g.float(), bins=8),
    "keywords": lambda g: torch.add(torch.ones_like(g), other=g),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_its_values_are_read_before_the_step_and_after_it_where_they_stay(
    made: Made, use: Callable[[Tensor], Any]
) -> None:
    grad = made.grad
    assert alike(use(grad), use(made.plain_grad))
    made.same()
    made.optimizer.step()
    if made.stays:
        for _ in range(2):
            assert alike(use(grad), use(made.plain_grad))
        made.optimizer.zero_grad()
    with pytest.raises(
        GradientMovedError, match=r"blocks\.1\.after was used by step\(\).*between backward\(\) and step\(\).*clone\(\)"
    ):
        use(grad)


def test_after_a_step_it_is_what_the_step_has_used_until_the_next_one_comes(made: Made) -> None:
    for _ in range(3):
        for model in (made.model, made.plain):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.optimizer.step()
        for param, plain in made.pairs if made.stays else ():
            torch.testing.assert_close(param.grad.clone(), plain.grad, rtol=2**-6, atol=0)
            importance = (param * param.grad).abs()  # of the new weights, as AdaLoRA has it
            torch.testing.assert_close(importance, (param.detach() * plain.grad).abs(), rtol=2**-6, atol=0)
        made.plain.load_state_dict(made.model.state_dict())
        for plain in made.plain.parameters():
            plain.grad = None
        # Nobody clears the gradients: those of the next step replace them.
        made.model(batch(1)).float().square().sum().backward()
        made.plain(batch(1).bfloat16()).float().square().sum().backward()
        made.same()


NORMS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "norm": lambda grads: [grad.norm() for grad in grads],
    "torch.norm": lambda grads: [torch.norm(grad, 2) for grad in grads],
    "vector_norm": lambda grads: [torch.linalg.vector_norm(grad, 2) for grad in grads],
    "foreach": lambda grads: list(torch._foreach_norm(grads)),
    "get_total_norm": lambda grads: [nn.utils.get_total_norm(grads)],
}


@pytest.mark.parametrize("norms", NORMS.values(), ids=list(NORMS))
def test_norms_are_in_fp32_and_also_there_after_the_step(
    made: Made, norms: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    grads = [param.grad for param in made.model.parameters()]
    expected = norms([param.grad.float() for param in made.plain.parameters()])
    for _ in range(2):
        found = norms(grads)
        assert {norm.dtype for norm in found} == {torch.float32}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        if made.optimizer.stats()["step"] == 0:
            made.optimizer.step()
    made.optimizer.zero_grad()
    with pytest.raises(GradientMovedError, match="used by step"):
        norms(grads)


@pytest.mark.parametrize("order", [1.0, 3.0, math.inf, 0.0])
def test_other_norms_are_those_of_the_values(made: Made, order: float) -> None:
    found = torch.linalg.vector_norm(made.grad, order)
    expected = torch.linalg.vector_norm(made.plain_grad.float(), order)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0)


FACTORS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda g: g.mul_(0.5),
    "*=": lambda g: g.__imul__(4.0),
    "by a tensor": lambda g: g.mul_(torch.tensor(0.25)),
    "div_": lambda g: g.div_(2),
    "/=": lambda g: g.__itruediv__(8.0),
    "foreach": lambda g: torch._foreach_mul_([g], 0.5),
    "foreach of tensors": lambda g: torch._foreach_mul_([g], torch.tensor(2.0)),
    "foreach of a list": lambda g: torch._foreach_div_([g], [4.0]),
}


@pytest.mark.parametrize("multiply", FACTORS.values(), ids=list(FACTORS))
def test_a_factor_counts_and_costs_no_copy(made: Made, multiply: Callable[[Tensor], Any]) -> None:
    for _ in range(2):
        multiply(made.grad)
        multiply(made.plain_grad)
        assert not any(held.gradient.copy for held in made.optimizer._parts.parameters.held)
    torch.testing.assert_close(made.grad.norm(), made.plain_grad.float().norm(), rtol=1e-5, atol=0)
    made.same()
    grad = made.grad
    made.optimizer.step()
    with pytest.raises(GradientMovedError, match="was used by step"):
        multiply(grad)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda g: g.add_(1),
    "fill_": lambda g: g.fill_(2.0),
    "copy_": lambda g: g.copy_(torch.ones_like(g)),
    "clamp_": lambda g: g.clamp_(-0.01, 0.01),
    "an index": lambda g: g.__setitem__((0, slice(1, 3)), 7.0),
    "a view": lambda g: g.view(-1)[3:5].fill_(4.0),
    "a row": lambda g: g[2].mul_(3),
    "transposed": lambda g: g.t()[0].zero_(),
    "data": lambda g: g.data.add_(1),
    "detach": lambda g: g.detach().sub_(1),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "foreach": lambda g: torch._foreach_add_([g], 1.0),
    "by a vector": lambda g: g.mul_(torch.arange(12.0).bfloat16()),
    "a factor of a factor": lambda g: g.mul_(2).view(-1)[0].zero_(),
    "then a factor": lambda g: (g.view(-1)[0].fill_(1.0), g.mul_(2)),
    "a masked fill": lambda g: g.masked_fill_(g > 0, 0.5),
    "element by element": lambda g: g.apply_(lambda one: one + 1),
    "with another": lambda g: g.map_(torch.ones_like(g), lambda one, other: one + other),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_any_other_write_counts(made: Made, write: Callable[[Tensor], Any]) -> None:
    for _ in range(2):
        write(made.grad)
        write(made.plain_grad)
        made.same()
    grad = made.grad
    made.optimizer.step()
    try:
        write(grad)
    except GradientMovedError:
        return
    # A view is one of a copy, which the gradient is from now on.
    assert made.stays
    write(made.plain_grad)
    assert torch.equal(grad.clone(), made.plain_grad)
    torch.testing.assert_close(grad.norm().float(), made.plain_grad.float().norm(), rtol=1e-2, atol=0)


def test_a_view_that_is_kept_sees_and_makes_all_changes(made: Made) -> None:
    views, plain_views = ([made.grad.view(-1), made.grad[3]], [made.plain_grad.view(-1), made.plain_grad[3]])
    for grad, (line, row) in ((made.grad, views), (made.plain_grad, plain_views)):
        grad.mul_(2)
        line[:20].add_(1)
        row.zero_()
        grad.add_(0.5)
        row.mul_(4)
    assert alike(views, plain_views)
    made.same()


def test_what_was_not_written_keeps_more_bits_than_the_copy_has(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    with OffloadZero(model, tier="cpu", accumulation=2, tuning=Tuning(threads=1)) as optimizer:
        for x in (torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0**-12, 2.0**-12]])):
            model(x).sum().backward()
        held = optimizer.grad(model.weight)
        assert held.tolist() == [[1 + 2.0**-12] * 2]
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
        model.weight.grad[0, 0] = 5
        assert optimizer.grad(model.weight).tolist() == [[5, 1 + 2.0**-12]]


def test_zeros_count_as_a_gradient(made: Made) -> None:
    for zero in (lambda g: g.zero_(), lambda g: torch._foreach_zero_([g])):
        zero(made.grad)
        zero(made.plain_grad)
        assert made.grad.norm() == 0
        made.same()
    grad = made.grad
    made.optimizer.step()
    assert made.optimizer.state_of(made.model.blocks[1].after)["step"] == 1
    assert made.optimizer.state_of(made.model.blocks[1].after)["exp_avg"].eq(0).all()
    grad.zero_()
    assert grad.eq(0).all()


def test_clipping_is_torchs_own(made: Made) -> None:
    for clip in (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), math.inf),
        lambda model: nn.utils.clip_grad_norm_(list(model.parameters()), 0.25, foreach=False),
    ):
        found, expected = clip(made.model), clip(made.plain)
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=0)
    made.same(rounds=True)


def test_clipping_of_values_is_torchs_own(made: Made) -> None:
    for model in (made.model, made.plain):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    made.same()


def test_an_assigned_gradient_counts(made: Made) -> None:
    given = torch.full_like(made.plain_grad, 0.25)
    made.model.blocks[1].after.grad = given.clone()
    made.plain.blocks[1].after.grad = given
    assert torch.equal(made.model.blocks[1].after.grad, given)
    made.optimizer.grad(made.model.blocks[1].after)
    made.same()


def test_one_that_is_dropped_is_none_and_the_next_begins_anew(made: Made) -> None:
    made.model.blocks[1].after.grad = None
    assert made.optimizer.grad(made.model.blocks[1].after) is None
    made.optimizer.zero_grad()
    assert all(param.grad is None for param in made.model.parameters())
    made.model(batch(0)).float().square().sum().backward()
    made.same()


@pytest.mark.parametrize("drops", ["all", "one"])
def test_one_that_was_kept_does_not_answer_for_the_next_gradient(made: Made, drops: str) -> None:
    kept = made.grad
    if drops == "all":
        made.optimizer.zero_grad()
    made.model.blocks[1].after.grad = None
    if drops == "all":
        made.model(batch(1)).float().square().sum().backward()
    else:
        made.model(batch(1)).float().square().sum().backward(inputs=[made.model.blocks[1].after])
    assert made.grad is not kept
    for use in (kept.clone, kept.norm, lambda: kept.mul_(2), lambda: made.grad.add_(kept), lambda: kept.zero_()):
        with pytest.raises(GradientMovedError, match=r"blocks\.1\.after was used by step\(\), or dropped"):
            use()
    assert repr(kept) == "<the gradient of blocks.1.after, which the optimizer has used>"
    plain = made.plain.blocks[1].after
    expected = torch.autograd.grad(made.plain(batch(1).bfloat16()).float().square().sum(), plain)
    assert torch.equal(made.grad.clone(), *expected)


def test_one_that_was_kept_and_dropped_is_not_put_back(made: Made) -> None:
    kept = made.grad
    made.optimizer.zero_grad()
    made.model.blocks[1].after.grad = kept
    with pytest.raises(GradientMovedError, match=r"blocks\.1\.after was used by step\(\), or dropped"):
        made.optimizer.step()


def test_one_that_becomes_zeros_stays_the_same(made: Made) -> None:
    kept = made.grad
    made.optimizer.zero_grad(set_to_none=False)
    assert made.grad is kept
    assert kept.eq(0).all()


def test_gradients_change_places(made: Made) -> None:
    for model in (made.model, made.plain):
        one, other = model.blocks[0].after, model.blocks[1].after
        one.grad, other.grad = other.grad, one.grad
    assert torch.equal(made.model.blocks[0].after.grad, made.plain.blocks[0].after.grad)
    made.optimizer.grad(made.model.blocks[0].after)  # takes this one over, and not yet the other
    made.same()


def test_a_gradient_is_added_to_the_one_of_another_parameter(tmp_path: Path) -> None:
    model, plain = Net(), Net()
    with OffloadZero(model, tier="cpu", compute_dtype=torch.float32, accumulation="auto") as optimizer:
        for one in (model, plain):
            one(batch(0)).square().sum().backward()
            first, second = one.blocks[0].after, one.blocks[1].after
            first.grad, second.grad = second.grad, first.grad
            one(batch(1)).square().sum().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(optimizer.grad(param), expected.grad)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_reaches_a_gradient_that_was_assigned(made: Made, foreach: bool) -> None:
    for model in (made.model, made.plain):
        model.blocks[1].after.grad = torch.full_like(model.blocks[1].after, 0.25)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        other = model.blocks[0].after
        other.grad = other.grad + 1
    made.same(rounds=True)


def test_own_clipping_of_a_list_reaches_a_gradient_that_was_assigned(made: Made) -> None:
    for model in (made.model, made.plain):
        model.blocks[1].after.grad = torch.full_like(model.blocks[1].after, 0.25)
        grads = [param.grad for param in model.parameters()]
        factor = 0.5 / torch.stack([grad.float().norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(factor)
    made.same(rounds=True)


def test_gradients_of_two_models_are_used_in_one_call() -> None:
    held, plain = [], []
    for number in range(4):
        torch.manual_seed(number % 2)
        (held if number < 2 else plain).append(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    options: dict[str, Any] = {"tier": "cpu", "compute_dtype": torch.float32, "tuning": Tuning(threads=1)}
    with OffloadZero(held[0], **options), OffloadZero(held[1], **options):
        norms = []
        for one, other in (held, plain):
            one(torch.ones(2, 3)).square().sum().backward()
            other(torch.ones(2, 3) * 2).square().sum().backward()
            params = [*one.parameters(), *other.parameters()]
            norms.append(nn.utils.clip_grad_norm_(params, 0.5))
            of_one, of_other = one[0].weight.grad, other[1].weight.grad
            of_other.add_(of_one, alpha=2.0)
            one[1].bias.grad.copy_(of_other[0])
            torch._foreach_add_([one[0].bias.grad], [other[0].bias.grad])
            norms.append(torch.stack([of_one, of_other]).sum())
        for found, expected in zip(norms[:2], norms[2:], strict=True):
            torch.testing.assert_close(found, expected)
        for param, expected in zip(
            [*held[0].parameters(), *held[1].parameters()],
            [*plain[0].parameters(), *plain[1].parameters()],
            strict=True,
        ):
            torch.testing.assert_close(param.grad.clone(), expected.grad)
        with pytest.raises(GradientMovedError, match="gradients that several OffloadZero have"):
            torch._amp_foreach_non_finite_check_and_unscale_(
                [held[0][0].bias.grad, held[1][0].bias.grad], torch.zeros(()), torch.ones(())
            )


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_loss_of_a_gradient_with_a_graph_is_refused_in_its_backward(made: Made) -> None:
    made.optimizer.zero_grad()
    made.model(batch(0)).float().square().sum().backward(create_graph=True)
    made.same()
    for penalty in (made.grad.square().sum(), made.grad.norm(), made.grad.view(-1)[0]):
        with pytest.raises(GradientMovedError, match=r"from the gradient of blocks\.1\.after.*create_graph=True"):
            penalty.backward()
    for read in (made.grad.detach(), made.grad.data):
        assert torch.equal(read, made.plain_grad)
        assert not read.requires_grad
    made.grad.data.mul_(2.0)
    made.plain_grad.mul_(2.0)
    nn.utils.clip_grad_norm_(made.model.parameters(), math.inf)
    made.same()
    made.optimizer.step()
    made.optimizer.zero_grad()
    made.model(batch(1)).float().square().sum().backward()
    assert not made.grad.sum().requires_grad


def test_a_gradient_that_joins_a_multiplied_one_is_refused(made: Made) -> None:
    made.grad.mul_(0.5)
    is_declared = made.optimizer.accumulation == 2
    with pytest.raises(AccumulationError, match="multiplying the gradients" if is_declared else "2nd time"):
        made.model(batch(0)).float().square().sum().backward()


def test_gradients_of_others_may_come_after_one_was_multiplied() -> None:
    model, plain = Net(), Net()
    with OffloadZero(model, compute_dtype=torch.float32, accumulation="auto") as optimizer:
        for one in (model, plain):
            one.blocks[0](torch.ones(2, 12)).square().sum().backward()
            one.blocks[0].after.grad.mul_(0.5)
            one.blocks[1](torch.ones(2, 12)).square().sum().backward()
            one.blocks[0].after.grad = None
            one.blocks[0].after.square().sum().backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert other.grad is None or torch.equal(optimizer.grad(param), other.grad)


def drops(param: nn.Parameter) -> None:
    param.grad = None


def assigns(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.sign() + param.grad


def clamps(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.clamp_(-0.01, 0.02)


def halves(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.div_(2)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("changes", [drops, assigns, clamps, halves])
def test_what_a_hook_does_when_a_gradient_is_accumulated_counts(
    way: str, order: str, changes: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tuning": Tuning(chunk="4KiB", threads=1), "compute_dtype": torch.float32} | WAYS[way]
    if options["tier"] == "nvme":
        options["path"] = tmp_path / "run"
    model, plain = Net(), Net()

    def hook(one: nn.Module) -> None:
        for param in list(one.parameters())[::2]:
            param.register_post_accumulate_grad_hook(changes)

    hook(plain)
    if order == "before":
        hook(model)
    with OffloadZero(model, **options) as optimizer:
        if order == "after":
            hook(model)
        # What is halved is not added to: that is refused.
        for number in range(1 if changes is halves else optimizer.accumulation):
            for one in (model, plain):
                (one(batch(number)).square().sum() * 0.1).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            if other.grad is not None:
                assert torch.equal(optimizer.grad(param), other.grad)


@pytest.mark.parametrize("write", ["add_", "fill_", "copy_"])
def test_a_write_after_the_step_is_refused_and_changes_nothing(made: Made, write: str) -> None:
    grad, other = made.grad, 2.0 if write != "copy_" else torch.ones(12, 12)
    made.optimizer.step()
    with pytest.raises(GradientMovedError, match="cannot be changed any more"):
        getattr(grad, write)(other)
    if made.stays:
        assert torch.equal(grad.clone(), made.plain_grad)


@pytest.mark.parametrize(
    "give", [lambda g: g.set_(torch.ones(12, 12).bfloat16()), lambda g: g.resize_(2, 2)], ids=["set_", "resize_"]
)
def test_what_would_give_it_other_memory_is_refused_and_changes_nothing(
    made: Made, give: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(GradientMovedError, match=r"p\.grad = x"):
        give(made.grad)
    made.same()
    assert made.grad.share_memory_() is made.grad


def test_a_consumed_one_moves_and_prints_without_harm(made: Made) -> None:
    grad = made.grad
    assert repr(grad) == repr(made.plain_grad)
    made.optimizer.step()
    if made.stays:
        assert repr(grad) == repr(made.plain_grad)
        made.optimizer.zero_grad()
    assert repr(grad) == "<the gradient of blocks.1.after, which the optimizer has used>"
    assert made.model.cpu().to(torch.bfloat16) is made.model
    made.optimizer.close()
    assert made.model.blocks[1].after.grad is None
    assert grad.shape == (12, 12)


def test_that_of_an_optimizer_that_is_closed_says_so() -> None:
    model = nn.Linear(2, 2)
    optimizer = OffloadZero(model, tier="cpu", tuning=Tuning(threads=1))
    model(torch.ones(1, 2)).sum().backward()
    grad = model.weight.grad
    optimizer.close()
    for use in (grad.sum, grad.norm, lambda: grad.mul_(2), lambda: copy.deepcopy(grad)):
        with pytest.raises(GradientMovedError, match="the gradient of weight"):
            use()
    assert "weight" in repr(grad)


def test_a_grad_scaler_unscales_all_and_misses_none() -> None:
    model = nn.Linear(4, 4)
    with OffloadZero(model, tier="cpu", compute_dtype=torch.float16, tuning=Tuning(threads=1)) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        expected = optimizer.grad(model.weight) / 8
        scaler.unscale_(optimizer)
        assert torch.equal(optimizer.grad(model.weight), expected)
        assert torch.equal(model.weight.grad, expected.half())
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(ConfigError, match="but not that of bias"):
            scaler.unscale_(torch.optim.SGD([model.weight]))


@pytest.mark.parametrize("way", [*WAYS, "tiles"])
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(way: str, tmp_path: Path) -> None:
    options = WAYS.get(way) or {"tier": "cpu", "param_tier": "cpu", "tuning": Tuning(chunk="4KiB", tile=256)}
    if options["tier"] == "nvme":
        options = options | {"path": tmp_path / "run"}
    found = []
    for holds in (False, True):
        torch.manual_seed(0)
        model = Net()
        weight, other = model.blocks[1].up.weight, model.blocks[0].up.weight
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if holds:
            optimizer = OffloadZero(model, optimizer, compute_dtype=torch.float32, **options)
        for step in range(3):
            loss = model(batch(step)).square().sum()
            weight.requires_grad_(step != 1)
            loss.backward()
            assert (weight.grad is None) == (step == 1)
            assert other.grad is not None
            weight.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    optimizer.close()
    assert found[3:] == pytest.approx(found[:3], rel=1e-5)


FACTOR = torch.tensor(1.0)


def multiply_by_one_that_changes(param: nn.Parameter) -> None:
    assert param.grad is not None
    for factor in (0.5, 4.0):
        param.grad.mul_(FACTOR.fill_(factor))


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda param: param.grad.norm(),  # type: ignore[union-attr]
    "multiply": lambda param: param.grad.mul_(0.5),  # type: ignore[union-attr]
    "by a tensor": lambda param: param.grad.mul_(torch.tensor(0.25)),  # type: ignore[union-attr]
    "by one that changes": multiply_by_one_that_changes,
    "write": lambda param: param.grad.fill_(2.0),  # type: ignore[union-attr]
    "assign": lambda param: setattr(param, "grad", torch.full_like(param, 3.0)),
    "assign its own": lambda param: setattr(param, "grad", param.grad.clone() * 2),  # type: ignore[union-attr]
    "zero": lambda param: param.grad.zero_(),  # type: ignore[union-attr]
}


@settings(max_examples=60)
@given(changes=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3), st.booleans()), max_size=8))
def test_norms_follow_each_change_of_a_gradient(changes: list[tuple[str, int, bool]]) -> None:
    """Of one parameter, and of all. Powers of two round nothing."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    x = torch.randn(2, 8)
    with OffloadZero(model, tier="cpu", compute_dtype=torch.float32) as optimizer:
        for one in (model, plain):
            one(x).square().sum().backward()

        def norms(one: nn.Module) -> list[float]:
            return [param.grad.norm().item() for param in one.parameters()]  # type: ignore[union-attr]

        def clipped(one: nn.Module) -> float:
            return torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0).item()

        try:
            for name, number, all_norms in changes:
                for one in (model, plain):
                    CHANGES[name](list(one.parameters())[number])
                if all_norms:
                    assert norms(model) == pytest.approx(norms(plain), rel=1e-6)
            assert clipped(model) == pytest.approx(clipped(plain), rel=1e-6)
            found = [optimizer.grad(param) for param in model.parameters()]
        except AccumulationError:
            reject()  # a gradient assigned beside one that was multiplied
    for grad, expected in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, expected.grad, rtol=1e-6, atol=0.0)
