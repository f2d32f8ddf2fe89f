"""Adam and AdamW by the C kernels, in one pass over masters, moments and gradients; see optim/reference.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from offload.errors import ConfigError
from offload.layout import ADAM_STATES
from offload.native import ADAM, ADAM_SPLIT, AdamScalars, Kernels, Task
from offload.optim.rule import Progress, Rule, SegmentMemory

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Variants of Adam, by their option."""


class AdamRule(Rule):
    """Adam, and AdamW where a group's `decoupled_weight_decay` says so."""

    name = "Adam"
    states = ADAM_STATES
    splits_masters = True

    def require_sound(self, number: int, group: Mapping[str, Any]) -> None:
        """See Rule.require_sound.

        Raises:
            ConfigError: the group asks for a variant of Adam in UNSUPPORTED, or a value is out of range or missing.
        """
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

    def advance(self, group: Mapping[str, Any], before: Progress) -> tuple[Progress, dict[str, Any]]:
        """See Rule.advance. Only the count changes."""
        return Progress(before.step + 1), {}

    def scalars(self, group: Mapping[str, Any], before: Progress, scale: float) -> AdamScalars:
        """See Rule.scalars."""
        return AdamScalars.at(step=before.step + 1, scale=scale, **hyper_parameters_of(group))

    def shown(self, progress: Progress) -> dict[str, Any]:
        """See Rule.shown."""
        step = torch.tensor(float(progress.step), dtype=torch.float32, device="cpu")
        return {"step": step} | dict.fromkeys(state.name for state in self.states)

    def agreed(self, group: Mapping[str, Any]) -> Hashable:
        """See Rule.agreed."""
        variants = tuple(bool(group.get(option)) for option in UNSUPPORTED)
        return (*hyper_parameters_of(group).items(), variants)

    def bind(self, kernels: Kernels, memory: SegmentMemory) -> Callable[[AdamScalars], Task]:
        """See Rule.bind. Gaps are calculated along, on zeros, which is cheaper than one more call."""
        if memory.current is not None:
            return kernels.bind(ADAM_SPLIT, memory.current, *memory.arrays, memory.grad, memory.out)
        return kernels.bind(ADAM, *memory.arrays, memory.grad, memory.out)


def hyper_parameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a torch param group of Adam or AdamW, as plain numbers.

    Args:
        group: the param group. Its lr and betas may be tensors.

    Returns:
        "lr", "betas", "eps", "weight_decay", and "decoupled", which is True for AdamW.
    """
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "betas": (float(beta1), float(beta2)),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": bool(group["decoupled_weight_decay"]),
    }


def _number(value: object) -> float:
    """A value as a float. What is no number becomes NaN, which is in no range."""
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # more than one element
        return math.nan
    return float(plain) if isinstance(plain, int | float) and not isinstance(plain, bool) else math.nan


def _refused(number: int, group: Mapping[str, Any], option: str, allowed: str) -> ConfigError:
    found = f"{option}={group[option]!r}" if option in group else f"no {option}"
    return ConfigError(f"param group {number} has {found:.200}: give {allowed}; nothing was changed")
