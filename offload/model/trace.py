"""A recording of the timeline: the model's forward and backward are hooked for as long as it lasts.

The times are the host's: where a device computes beside it, a forward ends when all of it is queued.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offload.layout import Layout
from offload.model.units import Chosen, blocks_of
from offload.profiling import PHASES, UNITS, Event, Timeline

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@contextmanager
def recorded(
    timeline: Timeline, file: str | os.PathLike[str], model: nn.Module, layout: Layout, chosen: Chosen
) -> Iterator[None]:
    """Writes what happens inside to `file`; raises as `Timeline.recorded`."""
    chunks = [
        {
            "unit": layout.flats[chunk.flat].unit or "root",
            "parameters": [layout.specs[piece.param].name for piece in chunk.pieces],
        }
        for chunk in layout.param_chunks
    ]
    with timeline.recorded(file, chunks), ExitStack() as hooks:
        phases = _Phases(timeline)
        _hook(hooks, model, phases.forward_begins, phases.forward_ends)
        for name, block in blocks_of(model, chosen):
            unit = _Unit(timeline, name)
            _hook(hooks, block, unit.begins, unit.ends)
        yield


class _Hook:
    """A copy or pickle of the model takes along a hook that does nothing."""

    def __init__(self, call: Callable[[Any], None] | None = None) -> None:
        self._call = call

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self._call is not None:
            self._call(output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _hook(stack: ExitStack, module: nn.Module, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Around the module's forward and its other hooks, also when it raises."""
    stack.callback(module.register_forward_pre_hook(_Hook(before), prepend=True).remove)
    stack.callback(module.register_forward_hook(_Hook(after), always_call=True).remove)


class _Unit:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._open: list[Event | None] = []

    def begins(self, _: Any) -> None:
        self._open.append(self._timeline.begin(UNITS, "unit", unit=self._name, overlaps=False))

    def ends(self, _: Any) -> None:
        if self._open:
            self._timeline.end(self._open.pop())


class _Phases:
    """One phase at a time: what begins ends what never said its end, a backward that raised."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._open: Event | None = None

    def forward_begins(self, _: Any) -> None:
        if not _in_backward():  # else it is recomputation, a part of backward
            self._begin("forward" if torch.is_grad_enabled() else "inference")

    def forward_ends(self, output: Any) -> None:
        if _in_backward():
            return
        self._end()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        if self._open is None:
            self._begin("backward")
            _queue_callback(self._end)

    def _begin(self, name: str) -> None:
        self._end()
        self._open = self._timeline.begin(PHASES, name, overlaps=False)

    def _end(self) -> None:
        self._timeline.end(self._open)
        self._open = None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
