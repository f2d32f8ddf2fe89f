"""Taking over an ordinary torch optimizer, and what its param groups may hold.

A scheduler or the user may write anything into a param group at any time, so they are looked at where a run begins, and
before each step and each commit changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch

from offload.errors import ConfigError, GradientMovedError

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Variants of Adam, by their option."""


class NoStates(dict[Any, Any]):
    """`optimizer.state`, which is empty: the states are in their tiers. To ask for one says how to get it."""

    def __missing__(self, param: Any) -> NoReturn:
        raise ConfigError(
            "optimizer.state holds no tensors: they are in the tiers; call optimizer.state_of(p) for copies of the "
            "master, exp_avg and exp_avg_sq of a parameter"
        )

    def __setitem__(self, param: Any, value: Any) -> None:
        raise ConfigError(
            "optimizer.state cannot be written to: the states are in the tiers; resume a commit (resume=True) instead "
            "of loading states"
        )


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of what Accelerate's `prepare`, Lightning or Fabric made of it; others as they are."""
    while not isinstance(optimizer, torch.optim.Adam):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def require_adoptable(optimizer: torch.optim.Optimizer) -> None:
    """Raises: ConfigError unless `optimizer` is a fresh Adam or AdamW, without the variants this library lacks."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer is {kind}: give torch.optim.AdamW or torch.optim.Adam, or None for AdamW")
    if "step" in vars(optimizer) and getattr(optimizer.step, "taken_over", False):
        raise ConfigError("the optimizer was taken over by another OffloadZero: give a fresh one")
    if optimizer.state:
        raise ConfigError("the optimizer has already stepped: its moments would be lost; give a fresh one")
    require_sound(optimizer.param_groups)


def require_sound(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ConfigError if a group asks for a variant of Adam that this library lacks, or for what is no Adam."""
    for number, group in enumerate(groups):
        for option in UNSUPPORTED:
            if group.get(option):
                raise ConfigError(f"param group {number} has {option}=True, which is not supported: set it to False")
        for option in ("lr", "eps", "weight_decay"):
            if not 0 <= _number(group.get(option)) < math.inf:
                raise _refused(number, group, option, "a finite number, at least 0")
        betas = group.get("betas")
        is_pair = isinstance(betas, list | tuple) and len(betas) == 2
        if not is_pair or not all(0 <= _number(beta) < 1 for beta in betas):  # type: ignore[union-attr]
            raise _refused(number, group, "betas", "two numbers, each at least 0 and below 1")
        if not isinstance(group.get("decoupled_weight_decay"), bool):
            raise _refused(number, group, "decoupled_weight_decay", "True, for AdamW, or False, for Adam")


def _number(value: object) -> float:
    """NaN for what is none: it is in no range."""
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # more than one element
        return math.nan
    return float(plain) if isinstance(plain, int | float) and not isinstance(plain, bool) else math.nan


def _refused(number: int, group: Mapping[str, Any], option: str, allowed: str) -> ConfigError:
    found = f"{option}={group[option]!r}" if option in group else f"no {option}"
    return ConfigError(f"param group {number} has {found:.200}: give {allowed}; nothing was changed")


def retire(optimizer: torch.optim.Optimizer) -> None:
    """A step of the old optimizer would move nothing, silently: makes it say what to call."""

    def step(*args: Any, **kwargs: Any) -> NoReturn:
        raise GradientMovedError("this optimizer was taken over by OffloadZero: call the step() of the OffloadZero")

    step.taken_over = True  # type: ignore[attr-defined]
    # A method, as schedulers expect: those made from the old optimizer go on to steer the groups.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
