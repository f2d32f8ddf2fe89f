"""What watches somebody's forward sees their operations and none of ours, and changes nothing for us."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from offload import ConfigError
from offload.model.torch_helpers import call_hidden, is_watched
from tests.model.held import Held
from tests.support.toy import batch


class Operations(TorchDispatchMode):
    """Notes all that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes all functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def trains(held: Held) -> None:
    """Two more steps give what they give without anything that watches."""
    model, _, plain = held
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected)
    held.step()
    assert not any(param.isnan().any() for param in model.parameters())


def watchers() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "flops": lambda: FlopCounterMode(display=False),
        "a dispatch mode": Operations,
        "a function mode": Functions,
        "a default device": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
        "nothing": nullcontext,
    }


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("watch", watchers().values(), ids=list(watchers()))
def test_a_forward_inside_gives_the_same_and_lands_all(
    held: Held, watch: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, optimizer, plain = held
    x = batch(1).bfloat16()
    expected = plain(x)
    with watch():
        found = model(x)
    assert torch.equal(found, expected)
    assert not optimizer._parts.step.pending
    trains(held)


@pytest.mark.parametrize("watch", watchers().values(), ids=list(watchers()))
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_a_use_outside_every_forward_inside_gives_the_same(
    held: Held, watch: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, _, plain = held
    expected = plain.blocks[1].after.detach() * 2
    with watch():
        found = model.blocks[1].after * 2
    with torch.inference_mode():
        assert torch.equal(found, expected)
    trains(held)


def test_operations_and_flops_are_those_of_the_plain_model(held: Held) -> None:
    model, _, plain = held
    x = batch(1).bfloat16()
    seen = []
    for one in (model, plain):
        with FlopCounterMode(display=False) as flops, Operations() as operations, Functions() as functions:
            one(x).sum()
        names = [name for name in functions.seen if name not in ("__get__", "__set__")]
        seen.append((flops.get_total_flops(), [name for name in operations.seen if "detach" not in name], names))
    assert seen[0][0] == seen[1][0] > 0
    assert seen[0][1] == seen[1][1]
    # A held model casts its inputs and puts hooks on outputs: not one function touches a parameter.
    assert [name for name in seen[0][2] if "copy" in name or "set_" in name] == []


def test_second_derivatives_inside_a_flop_counter_are_those_of_the_plain_model(held: Held) -> None:
    model, optimizer, plain = held
    slopes = []
    for one in (model, plain):
        x = batch(1).bfloat16().requires_grad_() * 1  # the counter takes no leaf
        with FlopCounterMode(display=False):
            (slope,) = torch.autograd.grad(one(x).float().square().sum(), x, create_graph=True)
            slope.float().square().sum().backward()
        slopes.append(slope.detach())
    assert torch.equal(*slopes)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        found = optimizer.grad(param)
        assert (found is None) == (expected.grad is None)
        assert found is None or torch.equal(found, expected.grad.float())
    optimizer.zero_grad()
    trains(held)


def test_a_level_of_functorch_around_the_model(held: Held) -> None:
    model, _, plain = held
    x = batch(1).bfloat16()
    found = torch.func.grad(lambda x: model(x).float().square().sum())(x)
    expected = torch.func.grad(lambda x: plain(x).float().square().sum())(x)
    assert torch.equal(found, expected)
    trains(held)


def test_vmap_around_the_model(held: Held) -> None:
    model, _, plain = held
    x = batch(1).bfloat16()
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(x), torch.vmap(plain)(x))
    trains(held)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_is_of_the_models_operations_alone(held: Held) -> None:
    model, optimizer, plain = held
    x = batch(1).bfloat16()
    if optimizer._parts.parameters.streams_any:
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match=r"torch\.jit\.trace of a model with streamed parameters"),
        ):
            torch.jit.trace(model, (x,), check_trace=False)
        with torch.no_grad():
            traced = torch.jit.trace(copy.deepcopy(model), (x,), check_trace=False)
        assert torch.equal(traced(x), plain(x))
        trains(held)
        return
    kinds = []
    for one in (model, plain):
        with torch.no_grad():
            traced = torch.jit.trace(one, (x,), check_trace=False)
        kinds.append([node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("aten::")])
    linear = ("aten::linear", "aten::layer_norm", "aten::tanh", "aten::mul")
    assert [kind for kind in kinds[0] if kind in linear] == [kind for kind in kinds[1] if kind in linear]
    assert "aten::copy_" not in kinds[0]
    trains(held)


def test_a_hidden_call_sees_none_of_them_and_they_come_back() -> None:
    def make() -> Tensor:
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        return torch.zeros(3).add_(1)

    assert not is_watched()
    with Operations() as operations, Functions() as functions, torch.inference_mode():
        assert is_watched()
        made = call_hidden(make)
        assert torch.is_inference_mode_enabled()
        assert not made.is_inference()
        assert [name for name in operations.seen if "add" in name] == []
        assert "add_" not in functions.seen
        made + 1
        assert [name for name in operations.seen if "add" in name] == ["aten.add.Tensor"]

    def inside(x: Tensor) -> Tensor:
        assert call_hidden(lambda: torch.ones(2).sum().item()) == 2  # a level of functorch has no .item()
        return x.sum()

    assert torch.func.grad(inside)(torch.ones(3)).tolist() == [1, 1, 1]
    assert not is_watched()
    assert torch.is_grad_enabled()


def test_a_hidden_call_that_raises_leaves_none_of_them_off() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with Operations() as operations:
        with pytest.raises(ZeroDivisionError):
            call_hidden(fail)
        torch.ones(1) + 1
    assert "aten.add.Tensor" in operations.seen
    assert not is_watched()
