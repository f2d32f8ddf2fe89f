"""A recording of the timeline. The model's forward and backward are hooked while it lasts.

The times are the host's: where a device computes beside it, a forward ends when all of it is queued.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offload import torch_private
from offload.layout import Layout
from offload.model.torch_helpers import hook_forward, in_backward
from offload.model.units import Chosen, blocks_of
from offload.profiling import PHASES, UNITS, Event, Timeline


@contextmanager
def recorded(
    timeline: Timeline, file: str | os.PathLike[str], model: nn.Module, layout: Layout, chosen: Chosen
) -> Iterator[None]:
    """Records the timeline inside, and writes it to `file`. Raises as `Timeline.recorded` does."""
    chunks = [
        {
            "unit": layout.flats[chunk.flat].unit or "root",
            "parameters": [layout.specs[piece.param].name for piece in chunk.pieces],
        }
        for chunk in layout.param_chunks
    ]
    with timeline.recorded(file, chunks), ExitStack() as hooks:
        phases = _Phases(timeline)
        handles = [*hook_forward(model, phases.forward_begins, phases.forward_ends)]
        for name, block in blocks_of(model, chosen):
            unit = _Unit(timeline, name)
            handles += hook_forward(block, unit.begins, unit.ends)
        for handle in handles:
            hooks.callback(handle.remove)
        yield


class _Unit:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._open: list[Event | None] = []

    def begins(self) -> None:
        self._open.append(self._timeline.begin(UNITS, "unit", unit=self._name, overlaps=False))

    def ends(self, _: Any) -> None:
        if self._open:
            self._timeline.end(self._open.pop())


class _Phases:
    """One phase at a time: a phase that begins ends one that raised and never ended."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._open: Event | None = None

    def forward_begins(self) -> None:
        if not in_backward():  # else it is recomputation, a part of backward
            self._begin("forward" if torch.is_grad_enabled() else "inference")

    def forward_ends(self, output: Any) -> None:
        if in_backward():
            return
        self._end()
        for tensor in torch_private.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        if self._open is None:
            self._begin("backward")
            torch_private.queue_callback(self._end)

    def _begin(self, name: str) -> None:
        self._end()
        self._open = self._timeline.begin(PHASES, name, overlaps=False)

    def _end(self) -> None:
        self._timeline.end(self._open)
        self._open = None
