"""Taking over an ordinary torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch

from offload.errors import ConfigError, GradientMovedError, ResumeError


def require_adoptable(optimizer: torch.optim.Optimizer) -> None:
    """Raises: ConfigError unless `optimizer` is a fresh Adam or AdamW, without the variants this library lacks."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer is {kind}: give torch.optim.AdamW or torch.optim.Adam, or None for AdamW")
    if "step" in vars(optimizer) and getattr(optimizer.step, "taken_over", False):
        raise ConfigError("the optimizer was taken over by another OffloadZero: give a fresh one")
    if optimizer.state:
        raise ConfigError("the optimizer has already stepped: its moments would be lost; give a fresh one")
    require_supported(optimizer.param_groups)


def require_supported(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ConfigError if a group asks for a variant of Adam that this library lacks."""
    for number, group in enumerate(groups):
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ConfigError(f"param group {number} has {option}=True, which is not supported: set it to False")


Groups = Sequence[Mapping[str, Any]]


def state_dict_of(groups: Groups, step: int, paths: Sequence[str]) -> dict[str, Any]:
    """What an optimizer's state_dict has: the groups, with parameters by number; no tensors."""
    params = [param for group in groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    numbered = [{**group, "params": [numbers[param] for param in group["params"]]} for group in groups]
    path = paths[0] if len(paths) == 1 else list(paths) or None
    return {"state": {}, "param_groups": numbered, "step": step, "path": path}


def take_groups(mine: Sequence[dict[str, Any]], step: int, state_dict: Mapping[str, Any]) -> None:
    """Takes hyper-parameters from a state_dict; `step` is the optimizer's.

    Raises: ResumeError if it is of another step, or its groups do not match.
    """
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in mine]
    if [len(group["params"]) for group in groups] != sizes:
        raise ResumeError(f"the state dict's groups do not match the {len(sizes)} groups of {sizes} parameters")
    if state_dict.get("step") != step:
        raise ResumeError(
            f"the state dict is of step {state_dict.get('step')}, this optimizer is at step {step}, and "
            "masters and moments are not in a state dict: resuming is not available in this version"
        )
    for own, theirs in zip(mine, groups, strict=True):
        own.update({key: value for key, value in theirs.items() if key != "params"})


def retire(optimizer: torch.optim.Optimizer) -> None:
    """A step of the old optimizer would move nothing, silently: makes it say what to call."""

    def step(*args: Any, **kwargs: Any) -> NoReturn:
        raise GradientMovedError("this optimizer was taken over by OffloadZero: call the step() of the OffloadZero")

    step.taken_over = True  # type: ignore[attr-defined]
    # A method, as schedulers expect: those made from the old optimizer go on to steer the groups.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
