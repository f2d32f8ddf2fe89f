"""Taking over an ordinary torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch

from offload.errors import ConfigError, GradientMovedError

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Variants of Adam, by their option."""


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
        for option in UNSUPPORTED:
            if group.get(option):
                raise ConfigError(f"param group {number} has {option}=True, which is not supported: set it to False")


def retire(optimizer: torch.optim.Optimizer) -> None:
    """A step of the old optimizer would move nothing, silently: makes it say what to call."""

    def step(*args: Any, **kwargs: Any) -> NoReturn:
        raise GradientMovedError("this optimizer was taken over by OffloadZero: call the step() of the OffloadZero")

    step.taken_over = True  # type: ignore[attr-defined]
    # A method, as schedulers expect: those made from the old optimizer go on to steer the groups.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
