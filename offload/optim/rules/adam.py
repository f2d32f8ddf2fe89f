"""Adam and AdamW by the C kernels, in one pass over masters, moments and gradients; see optim/reference.py.

[Note: small states]
Moments of one or two bytes are another training than torch's: each step rounds them up or down by random bits. These
depend on nothing but the parameter's step and on where an element is in its parameter. A step encodes once, and what is
decoded is encoded to the same bytes again, so a commit in another layout, on other tiers or ranks has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from offload.errors import ConfigError
from offload.layout import ADAM_FORMS, ADAM_STATES, blocks_of, of_states, part_of
from offload.native import ADAM, ADAM_DITHERED, ADAM_SPLIT, AdamScalars, DitheredScalars, Kernels, Task
from offload.optim.rule import ONE, Progress, Rule, SegmentMemory

MOST_OF_CODES = 2.0**63
"""Gradients have a smaller norm than this, weight decay in them included, where moments are in other forms than fp32:
what is rounded up from the mean of their squares is finite, too."""
UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Variants of Adam, by their option."""


class AdamRule(Rule):
    """Adam, and AdamW where a group's `decoupled_weight_decay` says so.

    Args:
        form: how its moments are kept, of ADAM_FORMS; see [Note: small states].
    """

    name = "Adam"
    splits_masters = True
    can_try = True
    can_be_late = True
    has_same_bits = True

    def __init__(self, form: str = "fp32") -> None:
        self.states = ADAM_FORMS[form]

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

    def advance(
        self, group: Mapping[str, Any], before: Progress, like: tuple[int, ...] = ONE
    ) -> tuple[Progress, dict[str, Any]]:
        """See Rule.advance. Only the count changes."""
        return Progress(before.step + 1), {}

    def scalars(self, group: Mapping[str, Any], before: Progress, scale: float) -> AdamScalars:
        """See Rule.scalars."""
        kind = AdamScalars if self.states == ADAM_STATES else DitheredScalars
        return kind.at(step=before.step + 1, scale=scale, **hyper_parameters_of(group))

    def options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """See Rule.options_of."""
        found = hyper_parameters_of(group)
        return found | {"decoupled_weight_decay": found.pop("decoupled")}

    def scalar_bytes(self, scalars: AdamScalars) -> bytes:
        """See Rule.scalar_bytes."""
        return bytes(scalars)

    def decay_in_gradient(self, group: Mapping[str, Any]) -> float:
        """See Rule.decay_in_gradient."""
        return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])

    def shown(self, progress: Progress) -> dict[str, Any]:
        """See Rule.shown."""
        step = torch.tensor(float(progress.step), dtype=torch.float32, device="cpu")
        return {"step": step} | dict.fromkeys(state.name for state in self.states)

    def agreed(self, group: Mapping[str, Any]) -> Hashable:
        """See Rule.agreed."""
        variants = tuple(bool(group.get(option)) for option in UNSUPPORTED)
        return (*hyper_parameters_of(group).items(), variants)

    def bind(self, kernels: Kernels, memory: SegmentMemory) -> Callable[[AdamScalars], Task]:
        """See Rule.bind. Gaps are calculated along, on zeros, which is cheaper than one more call.

        Not so with small states, which need to know where an element is in its parameter.
        """
        if self.states != ADAM_STATES:
            return self._bind_dithered(kernels, memory)
        if memory.current is not None:
            return kernels.bind(ADAM_SPLIT, memory.current, *memory.arrays, memory.grad, memory.out)
        return kernels.bind(ADAM, *memory.arrays, memory.grad, memory.out)

    def _bind_dithered(self, kernels: Kernels, memory: SegmentMemory) -> Callable[[AdamScalars], Task]:
        """Binds the kernel to each span, and makes one task of several, so that threads share small parameters, too."""
        bound, blocks = [], blocks_of(self.states)
        for span in memory.spans:
            start, stop = span.start, span.start + span.numel
            arrays = zip(memory.arrays, blocks, strict=True)
            master, *moments = (part_of(array, block, start, stop) for array, block in arrays)
            (m, *m_scale), (v, *v_scale) = of_states(self.states, moments)
            if not m_scale:
                m, v = m.view(torch.bfloat16), v.view(torch.bfloat16)
            param = None if memory.current is None else memory.current[start:stop]
            scales = (*m_scale, *v_scale) or (None, None)
            grad, out = memory.grad[start:stop], memory.out[start:stop]
            bind = kernels.bind(ADAM_DITHERED, master, param, m, v, *scales, grad, out, first=span.offset)
            bound.append((span, bind))
        if len(bound) == 1:
            return bound[0][1]  # which needs no Python while it runs

        def task(scalars: AdamScalars) -> Task:
            tasks = [(span, bind(scalars)) for span, bind in bound]

            def work(low: int, high: int) -> None:
                for span, one in tasks:
                    first, last = max(span.start, low), min(span.start + span.numel, high)
                    if first < last:
                        one.work(first - span.start + span.offset, last - span.start + span.offset)

            return Task(work, 0, len(memory.grad), ADAM_DITHERED.cut, (*memory.arrays, memory.out))

        return task


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
