"""Which optimizers are taken over, and what moves along: hooks. The oracle is plain torch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload import ConfigError, GradientMovedError, OffloadZero
from tests.support.toy import Net, squares, take_step

WRAPPERS = [
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
]


def wrapped_by(module: str, name: str, inner: torch.optim.Optimizer, **more: Any) -> Any:
    """`inner` in a class of that name, as the framework of that module makes it."""
    made: Any = type(name, (), {"__module__": module, "optimizer": property(lambda self: self._optimizer)})()
    made._optimizer = inner
    if "lightning" in module:  # as it is done there, so that isinstance tells what is inside
        made.__class__ = type("Lightning" + type(inner).__name__, (type(made), type(inner)), more)
    return made


class Lookahead(torch.optim.Optimizer):
    """Steps the optimizer inside, and every second time goes half of the way back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)


class Averaged:
    """No optimizer, but it has one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


@pytest.mark.parametrize(("module", "name"), WRAPPERS)
def test_optimizers_that_frameworks_have_wrapped_are_unwrapped(module: str, name: str) -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.25)
    with OffloadZero(model, wrapped_by(module, name, inner)) as optimizer:
        assert optimizer.param_groups[0] is inner.param_groups[0]


def test_optimizers_in_two_wrappers_are_unwrapped() -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.25)
    with OffloadZero(model, wrapped_by(*WRAPPERS[1], wrapped_by(*WRAPPERS[0], inner))) as optimizer:
        assert optimizer.param_groups[0] is inner.param_groups[0]


@pytest.mark.parametrize("kind", [Lookahead, Averaged])
def test_optimizers_around_optimizers_are_refused_by_name(kind: Callable[[Any], Any]) -> None:
    model = Net()
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"optimizer is {kind.__name__}, around the AdamW in its attribute"):
        OffloadZero(model, kind(torch.optim.AdamW(model.parameters())))
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes


def test_wrappers_of_frameworks_that_a_user_has_changed_are_refused() -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters())
    wrapper = wrapped_by(*WRAPPERS[1], inner, step=lambda self: None)
    with pytest.raises(ConfigError, match="around the AdamW"):
        OffloadZero(model, wrapper)


def test_an_optimizer_whose_step_was_replaced_is_refused() -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters())
    inner.step = MethodType(lambda self: None, inner)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(inner, 1)
    with pytest.raises(ConfigError, match="register_step_post_hook"):
        OffloadZero(model, inner)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_an_optimizer_with_a_scheduler_is_taken_over() -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    with OffloadZero(model, inner) as optimizer:
        take_step(optimizer, squares(model))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


def calls_of_hooks(hold: Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]) -> list[Any]:
    """What hooks of an AdamW see of a few calls. Args: hold: makes of it the optimizer that is used."""
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[Any] = []
    held: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, *rest: found.append((name, optimizer is held[0], len(rest)))

    def halve(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    handles: list[RemovableHandle] = [
        register_optimizer_step_pre_hook(note("before any step")),
        register_optimizer_step_post_hook(note("after any step")),
        inner.register_step_pre_hook(note("before a step")),
        inner.register_step_post_hook(note("after a step")),
        inner.register_state_dict_pre_hook(note("before saving")),
        inner.register_state_dict_post_hook(note("after saving")),
        inner.register_state_dict_post_hook(halve),
        inner.register_load_state_dict_pre_hook(note("before loading")),
        inner.register_load_state_dict_pre_hook(halve, prepend=True),
        inner.register_load_state_dict_post_hook(note("after loading")),
    ]
    optimizer = hold(model, inner)
    held.append(optimizer)
    for _ in range(2):
        take_step(optimizer, squares(model))
        state = optimizer.state_dict()
        found.append(state["param_groups"][0]["lr"])
        optimizer.load_state_dict(state)
        found.append(optimizer.param_groups[0]["lr"])
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.filterwarnings("ignore:this state dict has hyper-parameters only")
def test_hooks_move_along_and_are_removed_by_the_handles_of_before() -> None:
    def hold(model: nn.Module, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return OffloadZero(model, inner)

    found = calls_of_hooks(hold)
    assert found == calls_of_hooks(lambda model, inner: inner)
    assert len(found) == 8 + 4


def test_methods_of_a_taken_optimizer_that_need_its_states_are_refused() -> None:
    """As schedule-free's `eval`, which would do nothing, and say nothing."""

    class Averaging(torch.optim.SGD):
        def swap(self) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.add_(self.state[param].get("momentum_buffer", 0))

    model = torch.nn.Linear(3, 3)
    given = Averaging(model.parameters(), lr=0.1, momentum=0.9)
    saved = given.state_dict()
    before = [param.detach().clone() for param in model.parameters()]
    with OffloadZero(model, given, tier="cpu", compute_dtype=torch.float32):
        assert not given.state
        with pytest.raises(GradientMovedError, match="taken over by OffloadZero and has no states"):
            given.swap()
        with pytest.raises(GradientMovedError, match=r"save the state_dict\(\) of the OffloadZero"):
            given.state_dict()
        with pytest.raises(GradientMovedError, match=r"call the load_state_dict\(\) of the OffloadZero"):
            given.load_state_dict(saved)
        with pytest.raises(GradientMovedError, match="nothing would train these parameters"):
            given.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert all(map(torch.equal, model.parameters(), before))


def take_out(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = groups[0]["params"][1:]


def move_over(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop())


def add_another(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(3))]})


def add_to_one(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(nn.Parameter(torch.zeros(3)))
    groups[1]["params"][-1].grad = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (take_out, r"0\.weight is in none, and was in param group 0"),
        (move_over, r"0\.bias is in param group 1, and was in param group 0"),
        (list.reverse, r"0\.weight is in param group 1, and was in param group 0"),
        (list.clear, r"0\.weight is in none"),
        (add_another, "has 3 param groups, and had 2"),
        (add_to_one, r"param group 1 holds a parameter of shape \(3,\) that is not in the model"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_parameters_that_have_left_their_param_groups_are_refused(
    change: Callable[[list[dict[str, Any]]], None], fault: str
) -> None:
    """Plain torch trains them otherwise from then on, or not at all."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    with OffloadZero(model, given, tier="cpu", compute_dtype=torch.float32) as optimizer:
        model(torch.ones(1, 3)).sum().backward()
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        change(optimizer.param_groups)
        with pytest.raises(ConfigError, match=fault):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        optimizer.param_groups[:] = groups
        optimizer.step()
        assert not any(map(torch.equal, model.parameters(), before))
