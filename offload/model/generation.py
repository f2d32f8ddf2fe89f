"""One warning, where text is generated token by token, and all parameters that stream come for each token.

A pass without gradients is a token's if a function called `generate` is among its callers: transformers, TRL and most
code of users call it so. An evaluation is not, whose batches are worth moving a model for.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import torch

from offload.profiling import Timeline
from offload.sizes import format_bytes

TOKENS = 16
"""After so many in a row the warning comes. Fewer are nobody's concern."""
NAME = "generate"

_OUTSIDE = (
    "generate inside `with optimizer.generating():`, which keeps as many units there as the budgets have room for, or "
    "`with optimizer.gathered(model):`, which keeps all of them"
)
_WITHIN = (
    "more units stay if you give more device_memory, and all of them inside `with optimizer.gathered(model):`, which "
    "takes what it needs"
)


class TokenWatch:
    """Counts the passes in a row that are a token's, and what they move.

    Args:
        timeline: counts what is moved.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._passes = 0
        self._moved_before = 0
        self._is_settled = False

    def pass_begins(self, *, keeps_units: bool) -> None:
        """Called when a pass of the whole model begins.

        Args:
            keeps_units: whether as many units stay as there is room for.
        """
        if self._is_settled:
            return
        frame = None if torch.is_grad_enabled() else _caller()
        if frame is None:
            self._passes = 0
            return
        moved = self._timeline.counted("gathered_bytes")
        if self._passes <= 1:  # with the first token comes what stays
            self._moved_before = moved
        elif self._passes == TOKENS and moved > self._moved_before:
            self._is_settled = True
            self._warn(frame, (moved - self._moved_before) // (TOKENS - 1), _WITHIN if keeps_units else _OUTSIDE)
        self._passes += 1

    def _warn(self, frame: FrameType, nbytes: int, way_out: str) -> None:
        warnings.warn_explicit(
            f"each token moves {format_bytes(nbytes)} of parameters to where they are used: {way_out}",
            UserWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )


def _caller() -> FrameType | None:
    """The innermost function of that name which is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != NAME:
        frame = frame.f_back
    return frame
