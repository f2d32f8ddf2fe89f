"""Streamed parameters: on the device only around their use.

[Note: residency of a unit]
| state    | device memory | guards (released.py) | meaning                                              |
|----------|---------------|----------------------|------------------------------------------------------|
| RELEASED | -             | yes                  | its values are in the store only                     |
| COMING   | allocated     | yes                  | copies from the store are under way                  |
| HERE     | allocated     | -                    | its modules can run                                  |

A state, never a count: recomputation in backward runs some hooks twice and some not at all. A unit is entered by its
forward, and by its backward when the gradient of what its forward returned is there; entering another one releases
those that are done. So the unit in use, the one before it, `depth` to come and the root are on the device at most.

The memory of a flat is its storage's: freed by resizing it to 0, and views that autograd saved are right again once it
is back. As in FSDP2, identity, names and shapes of parameters stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from offload.copies import Copier, Copy
from offload.errors import StateError
from offload.layout import Chunk, Layout
from offload.module.parameters import Parameters
from offload.module.units import ROOT
from offload.store.store import Store
from offload.timeline import TO_DEVICE, Timeline

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Where(Enum):
    RELEASED = "released"
    COMING = "coming"
    HERE = "here"


_LEGAL = {
    (Where.RELEASED, Where.COMING),
    (Where.COMING, Where.HERE),
    (Where.HERE, Where.RELEASED),
}


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward inside is recomputation."""
    return torch._C._current_graph_task_id() != -1


class Streaming:
    """See [Note: residency of a unit].

    Args: store: the 16-bit parameters of all chunks; depth: units brought ahead of the one in use; leases: how many
    chunks of the store may be on their way to the device at once; is_pending: whether a unit's new values are still to
    be made, by name; written: called with a flat that was written to, before it is released.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Parameters,
        store: Store,
        copier: Copier,
        timeline: Timeline,
        *,
        depth: int,
        leases: int,
        is_pending: Callable[[str], bool],
        written: Callable[[int], None],
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._store = store
        self._copier = copier
        self._timeline = timeline
        self._depth = depth
        self._leases = leases
        self._written = written
        self._is_pending = is_pending
        self._flats_of: dict[str, list[int]] = {flat.unit: [] for flat in layout.flats}
        for flat in layout.flats:
            self._flats_of[flat.unit].append(flat.index)
        self._chunks_of: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in layout.chunks:
            self._chunks_of[chunk.flat].append(chunk)
        self._where = dict.fromkeys(self._flats_of, Where.RELEASED)
        self._coming: deque[tuple[str, Copy, ExitStack]] = deque()
        self._held: list[str] = []
        self._running: list[str] = []
        self._done: set[str] = set()
        self._last: str | None = None
        self._in_task = False
        self._ahead: deque[str] = deque()
        self._entered: list[str] = []

    def take(self, flat: int) -> None:
        """Moves a flat that has just been attached into the store."""
        self.write_back(flat, step=0)
        self._parameters.free(flat)

    def write_back(self, flat: int, *, step: int) -> None:
        """Makes the values in the model those of the store. Args: step: whose they are."""
        for chunk in self._chunks_of[flat]:
            with self._store.lease(chunk.index, step=step, is_fresh=True) as lease:
                lease.dirty = True
                self._copier.to_host(self._on_device(chunk), self._in_store(lease.arrays[0], chunk)).wait()

    # What hooks call.

    def forward_begins(self, unit: str) -> None:
        if unit == ROOT and not in_backward():
            self._in_task = False  # a backward that raised never said its end
            self._running.clear()
        self._running.append(unit)
        self._enter(unit)

    def forward_ends(self, unit: str, output: Any) -> None:
        """Also after a forward that raised; then there is no output."""
        if unit in self._running:
            self._running.remove(unit)
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._backward_begins(unit))
        if in_backward():
            return
        self._done.add(unit)
        if unit == ROOT and not (tensors and torch.is_grad_enabled()):
            self.release_all()

    def _backward_begins(self, unit: str) -> None:
        if not self._in_task:
            self._in_task = True
            _queue_callback(self._backward_ends)
        if self._last is not None and self._last != unit:
            self._done.add(self._last)
        self._last = unit
        self._enter(unit)

    def _backward_ends(self) -> None:
        self._in_task = False
        self._last = None
        self.release_all()

    def step_begins(self) -> None:
        """The order of this step is expected to come again."""
        self.release_all()
        self._ahead = deque(self._entered)
        self._entered.clear()
        self._store.repeat()

    # Gathering and releasing.

    def hold(self, unit: str) -> None:
        """The unit stays on the device until `let_go`, which is called as often."""
        self._held.append(unit)
        self._bring(unit)

    def let_go(self, unit: str) -> None:
        self._held.remove(unit)
        if unit not in self._running and not self._in_task:
            self._release(unit)

    def is_here(self, unit: str) -> bool:
        return self._where[unit] is Where.HERE

    def release_all(self) -> None:
        """Releases what nobody holds; a unit that was on its way is brought first, and then released."""
        for unit, where in self._where.items():
            if where is Where.COMING:
                self._finish(unit)
            self._release(unit)
        self._done.clear()

    def _enter(self, unit: str) -> None:
        if not self._entered or self._entered[-1] != unit:
            self._entered.append(unit)
        self._done.discard(unit)
        for other in list(self._done):
            if other not in self._running and other != ROOT:
                self._release(other)
                self._done.discard(other)
        self._bring(unit)
        if unit in self._ahead:
            while self._ahead.popleft() != unit:
                pass
        for following in list(self._ahead)[: self._depth]:
            if self._where.get(following) is Where.RELEASED and not self._is_pending(following):
                self._start(following)

    def _bring(self, unit: str) -> None:
        if self._where.get(unit) is Where.RELEASED:
            self._start(unit)
        if self._where.get(unit) is Where.COMING:
            self._finish(unit)

    def _start(self, unit: str) -> None:
        self._move(unit, Where.COMING)
        for flat in self._flats_of[unit]:
            self._parameters.allocate(flat)
            for chunk in self._chunks_of[flat]:
                while len(self._coming) >= self._leases:
                    self._finish_one()
                stack = ExitStack()
                lease = stack.enter_context(self._store.lease(chunk.index, step=0))
                source = self._in_store(lease.arrays[0], chunk)
                size = source.numel() * source.element_size()
                moving = self._timeline.begin(TO_DEVICE, "gather", chunk=chunk.index, size=size, tier="device")
                stack.callback(self._timeline.end, moving)
                self._timeline.count("gathered_bytes", size)
                self._coming.append((unit, self._copier.to_device(source, self._on_device(chunk)), stack))
                while self._coming and self._coming[0][1].done():
                    self._finish_one()

    def _finish(self, unit: str) -> None:
        while any(one == unit for one, _, _ in self._coming):
            self._finish_one()
        for flat in self._flats_of[unit]:
            self._parameters.restore(flat)
        self._move(unit, Where.HERE)

    def _finish_one(self) -> None:
        _, copy, stack = self._coming.popleft()
        with stack:
            if copy.done():
                copy.wait()
            else:
                with self._timeline.waiting("wait for gather", tier="device"):
                    copy.wait()

    def _release(self, unit: str) -> None:
        if self._where.get(unit) is not Where.HERE or unit in self._held:
            return
        for flat in self._flats_of[unit]:
            if self._parameters.written_outside(self._layout.flats[flat].params):
                self._written(flat)
            self._parameters.free(flat)
        self._move(unit, Where.RELEASED)

    def _move(self, unit: str, to: Where) -> None:
        if (self._where[unit], to) not in _LEGAL:
            raise StateError(f"unit {unit or 'root'} is {self._where[unit].value} and cannot become {to.value}")
        self._where[unit] = to

    def _on_device(self, chunk: Chunk) -> Tensor:
        return self._parameters.flats[chunk.flat][chunk.start : chunk.start + chunk.numel]

    def _in_store(self, array: Tensor, chunk: Chunk) -> Tensor:
        return array.view(self._parameters.flats[chunk.flat].dtype)


def _tensors(tree: Any, depth: int = 8) -> Iterable[Tensor]:
    """The tensors in nested lists, tuples, dicts and plain objects (dataclasses, a library's output classes)."""
    if isinstance(tree, Tensor):
        yield tree
    elif depth and isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(tree, list | tuple | set | frozenset):
        for value in tree:
            yield from _tensors(value, depth - 1)
    elif depth and hasattr(tree, "__dict__"):
        for value in vars(tree).values():
            yield from _tensors(value, depth - 1)
    elif depth and hasattr(type(tree), "__slots__"):
        for name in type(tree).__slots__:
            yield from _tensors(getattr(tree, name, None), depth - 1)
