"""Streamed parameters: on the device only around their use.

[Note: residency of a unit]
| state    | device memory | guards (released.py) | meaning                                              |
|----------|---------------|----------------------|------------------------------------------------------|
| RELEASED | -             | yes                  | its values are in the store only                     |
| COMING   | allocated     | yes                  | copies from the store are under way                  |
| HERE     | allocated     | -                    | its modules can run                                  |

A state, never a count: recomputation in backward runs some hooks twice and some not at all. A unit is entered by the
forward of any of its modules, and by their backward, when the gradient of what that forward returned is there. Entering
one releases the others but those whose forward is running, the one whose backward began last (recomputation inside it
enters others, and it goes on afterwards), the root and what `gathered` holds. So the root, the unit in use, the one
around it and `depth` to come are on the device at most.

The memory of a flat is its storage's: freed by resizing it to 0, and views that autograd saved are right again once it
is back. As in FSDP2, identity, names and shapes of parameters stay.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.collectives import Work
from offload.copies import Copier, Copy
from offload.errors import OffloadError
from offload.layout import Chunk, Layout
from offload.module.graphs import call_alive, in_backward
from offload.module.parameters import Parameters
from offload.module.tensors import tensors_in
from offload.module.units import ROOT
from offload.module.where import Where, require_legal
from offload.store.store import Store
from offload.timeline import TO_DEVICE, Timeline

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

MOST_REMEMBERED = 1 << 14
"""Units of one pass whose order is remembered."""


class Streaming:
    """See [Note: residency of a unit].

    Args: store: the 16-bit parameters of all chunks; depth: units brought ahead of the one in use; leases: how many
    chunks of the store may be on their way to the device at once; is_pending: whether a unit's new values are still to
    be made, by name; usable: raises if the store cannot be used; take_writes: takes over what was written to
    parameters that are here, calling `write_back`; gather: launches the gathering of a flat from the partitions of all
    ranks, of which the store has those that this one keeps; None: it has all.
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
        usable: Callable[[], None],
        take_writes: Callable[[], None],
        gather: Callable[[int], Sequence[Work]] | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._store = store
        self._copier = copier
        self._timeline = timeline
        self._depth = depth
        self._leases = leases
        self._is_pending = is_pending
        self._usable = usable
        self._take_writes = take_writes
        self._gather = gather
        self._gathers: dict[str, list[Work]] = {}
        self._flats_of: dict[str, list[int]] = {flat.unit: [] for flat in layout.flats}
        for flat in layout.flats:
            self._flats_of[flat.unit].append(flat.index)
        self._chunks_of: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in layout.param_chunks:
            self._chunks_of[chunk.flat].append(chunk)
        self._where = dict.fromkeys(self._flats_of, Where.RELEASED)
        self._coming: deque[tuple[str, Copy, ExitStack]] = deque()
        self._held: list[str] = []
        self._running: list[str] = []
        self._backward: str | None = None
        self._tasks: set[int] = set()
        # What was entered since the pass began, and what the last pass like it entered: with gradients, or without.
        self._entered: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._is_training = True
        self._orders: dict[bool, Sequence[str]] = {}
        self._ahead: deque[str] = deque()
        # Chunks that an opened unit still lacks.
        self._missing: dict[str, set[int]] = {}

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

    def model_begins(self) -> None:
        """Before a forward of the whole model."""
        if not in_backward():
            self._forget_calls()
            self._begin_pass()
        self.forward_begins(ROOT)

    def model_ends(self, output: Any) -> None:
        """After it, also if it raised; then there is no output."""
        self.forward_ends(ROOT, output)
        if not in_backward() and not any(tensor.requires_grad for tensor in tensors_in(output)):
            self.release_all()  # no backward will
            self._store.repeat()

    def forward_begins(self, unit: str) -> None:
        """Before the forward of a module of `unit`."""
        if in_backward():
            # Before a backward inside this one (reentrant checkpointing) can begin: it would take its end for the end.
            self._note_task()
        self._running.append(unit)
        self._enter(unit)

    def forward_ends(self, unit: str, output: Any) -> None:
        """After it, also if it raised; then there is no output."""
        if unit in self._running:
            self._running.remove(unit)
        # Graphs outlive optimizers, and what they hold is not found by the collector of garbage.
        begins = partial(call_alive, weakref.WeakMethod(self._backward_begins), unit)
        for tensor in tensors_in(output):
            # A view that is changed in place gets another history, in which only its base has a place.
            for one in (tensor, tensor._base):
                if one is not None and one.grad_fn is not None:
                    one.register_hook(begins)

    def _backward_begins(self, unit: str) -> None:
        self._note_task()
        if unit != ROOT:
            self._backward = unit
        self._enter(unit)

    def _note_task(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(partial(call_alive, weakref.WeakMethod(self._backward_ends), task))

    def _backward_ends(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._backward = None
            self.release_all()

    def step_begins(self) -> None:
        """The order of this step is expected to come again."""
        self._forget_calls()
        self._begin_pass()
        self.release_all()
        self._take_writes()  # to what `gathered` holds: the step is to see them
        self._store.repeat()

    def _forget_calls(self) -> None:
        """What raised, or was interrupted, never said its end."""
        self._tasks.clear()
        self._running.clear()
        self._backward = None

    def _begin_pass(self) -> None:
        if self._entered:
            self._orders[self._is_training] = tuple(self._entered)
            self._entered.clear()
        self._is_training = torch.is_grad_enabled()
        self._ahead = deque(self._orders.get(self._is_training, ()))

    # Gathering and releasing.

    def visit(self, units: Iterable[str]) -> None:
        """Brings units for whoever reads or writes them now; they are released when others come."""
        if visited := [unit for unit in units if unit != ROOT]:
            self._release_others(*visited)
        for unit in units:
            self._bring(unit)

    def leave(self, unit: str) -> None:
        """Ends a visit."""
        if not self._is_in_use(unit) and not self._tasks:
            self._release(unit)

    def hold(self, unit: str) -> None:
        """The unit stays on the device until `let_go`, which is called as often; what was written to it before counts
        as written outside of that."""
        self._held.append(unit)
        self._bring(unit)
        self._take_writes()

    def let_go(self, unit: str) -> None:
        self._held.remove(unit)
        self._take_writes()
        self.leave(unit)

    def landed(self, flat: int) -> None:
        """New values of a flat are in the store: what is on the device are the old ones."""
        unit = self._layout.flats[flat].unit
        if unit in self._missing:
            return  # they came along
        if self._where[unit] is Where.COMING:
            self._finish(unit)
        if self._where[unit] is Where.HERE:
            self.refresh(flat)

    def refresh(self, flat: int) -> None:
        """Brings the values of a flat, which is here, from the store again, and from the other ranks."""
        for chunk in self._chunks_of[flat]:
            with self._store.lease(chunk.index, step=0) as lease:
                self._copier.to_device(self._in_store(lease.arrays[0], chunk), self._on_device(chunk)).wait()
        if self._gather is not None:
            for work in self._gather(flat):
                work.wait()

    def find_writes(self, numbers: Iterable[int]) -> None:
        """Notes as written to which of these parameters, all here, differ from the store: `p.data.copy_` leaves no
        other trace."""
        for number in numbers:
            chunks = (self._layout.param_chunks[index] for index in self._layout.param_chunks_of[number])
            if not all(self._is_in_store(number, chunk) for chunk in chunks):
                torch.autograd.graph.increment_version(self._parameters.params[number])

    def _is_in_store(self, number: int, chunk: Chunk) -> bool:
        with self._store.lease(chunk.index, step=0) as lease:
            stored = self._in_store(lease.arrays[0], chunk)
            for piece in chunk.pieces:
                if piece.param == number:
                    part = slice(piece.chunk_offset, piece.chunk_offset + piece.numel)
                    copy = torch.empty(piece.numel, dtype=stored.dtype, device="cpu")
                    self._copier.to_host(self._on_device(chunk)[part], copy).wait()
                    if not torch.equal(copy.view(torch.uint8), stored[part].view(torch.uint8)):
                        return False
        return True

    def release_all(self) -> None:
        """Releases what nobody uses."""
        for unit in self._where:
            if not self._is_in_use(unit):
                self._release(unit)

    def abandon(self) -> None:
        """Releases everything, and takes over nothing that was written to it."""
        self._forget_calls()
        self.close()
        for unit, where in self._where.items():
            if where is not Where.RELEASED:
                for flat in self._flats_of[unit]:
                    self._parameters.free(flat)
                self._move(unit, Where.RELEASED)

    def close(self) -> None:
        """Waits for copies under way: their memory is about to go."""
        while self._coming:
            with suppress(OffloadError):
                self._finish_one()

    def _is_in_use(self, unit: str) -> bool:
        return unit in self._running or unit in self._held or unit == self._backward

    def open(self, unit: str) -> None:
        """Memory for a unit whose new values are about to land: each chunk comes with its own, see `chunk_lands`."""
        if self._where.get(unit) is not Where.RELEASED or not self._copier.direct:
            return
        if unit != ROOT:
            self._release_others(unit, *self._follow(unit))
        self._move(unit, Where.COMING)
        self._missing[unit] = {chunk.index for flat in self._flats_of[unit] for chunk in self._chunks_of[flat]}
        for flat in self._flats_of[unit]:
            self._parameters.allocate(flat)

    def chunk_lands(self, chunk: Chunk, values: Tensor) -> None:
        """New `values` of a chunk are in RAM, and leased: of a unit that was opened they need not be read again."""
        missing = self._missing.get(self._layout.flats[chunk.flat].unit, set())
        if chunk.index in missing:
            self._copier.to_device(values, self._on_device(chunk)).wait()
            self._timeline.count("gathered_bytes", values.numel() * values.element_size())
            missing.discard(chunk.index)

    def _follow(self, unit: str) -> list[str]:
        """Notes that a unit is entered; returns those expected next."""
        if not self._entered or self._entered[-1] != unit:
            self._entered.append(unit)
            if unit in self._ahead:
                while self._ahead.popleft() != unit:
                    pass
        return list(dict.fromkeys(self._ahead))[: self._depth]

    def _enter(self, unit: str) -> None:
        if unit == ROOT or unit not in self._where:
            self._bring(unit)
            return
        following = self._follow(unit)
        # One that is here already, and not on its way, is not brought ahead: it comes anew.
        self._release_others(unit, *(one for one in following if self._where[one] is Where.COMING))
        self._bring(unit)
        for other in following:
            if self._where[other] is Where.RELEASED and not self._is_pending(other):
                self._start(other)

    def _release_others(self, *wanted: str) -> None:
        for unit in self._where:
            if unit == ROOT or self._is_in_use(unit):
                continue
            # Brought ahead, and now it comes later than thought, or not at all.
            if unit not in wanted:
                self._release(unit)

    def _bring(self, unit: str) -> None:
        if self._where.get(unit) is Where.RELEASED:
            self._start(unit)
        if unit in self._missing:
            for index in sorted(self._missing.pop(unit)):
                self._start_chunk(unit, self._layout.param_chunks[index])
            self._start_gathering(unit)
        if self._where.get(unit) is Where.COMING:
            self._finish(unit)

    def _start(self, unit: str) -> None:
        self._usable()
        self._move(unit, Where.COMING)
        try:
            for flat in self._flats_of[unit]:
                self._parameters.allocate(flat)
                for chunk in self._chunks_of[flat]:
                    self._start_chunk(unit, chunk)
            self._start_gathering(unit)
        except BaseException:
            self._release(unit)  # half of it is not coming
            raise

    def _start_gathering(self, unit: str) -> None:
        """From the other ranks, when this one's partitions are there."""
        if self._gather is not None:
            self._wait_for_copies(unit)
            self._gathers[unit] = [work for flat in self._flats_of[unit] for work in self._gather(flat)]

    def _start_chunk(self, unit: str, chunk: Chunk) -> None:
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
        self._wait_for(unit)
        for flat in self._flats_of[unit]:
            self._parameters.restore(flat)
        self._move(unit, Where.HERE)

    def _wait_for(self, unit: str) -> None:
        self._wait_for_copies(unit)
        for work in self._gathers.get(unit, ()):
            work.wait()
        self._gathers.pop(unit, None)

    def _wait_for_copies(self, unit: str) -> None:
        while any(one == unit for one, _, _ in self._coming):
            self._finish_one()

    def _finish_one(self) -> None:
        _, copy, stack = self._coming[0]
        # Forgotten only when it is done: whoever is interrupted here has to wait again.
        if copy.done():
            copy.wait()
        else:
            with self._timeline.waiting("wait for gather", tier="device"):
                copy.wait()
        self._coming.popleft()
        stack.close()

    def _release(self, unit: str) -> None:
        if self._where.get(unit, Where.RELEASED) is Where.RELEASED:
            return
        self._missing.pop(unit, None)
        if self._where[unit] is Where.COMING:
            self._wait_for(unit)
        else:
            numbers = [number for flat in self._flats_of[unit] for number in self._layout.flats[flat].params]
            self._parameters.require_attached(numbers)
            if self._parameters.written_outside(numbers):
                self._take_writes()
        for flat in self._flats_of[unit]:
            self._parameters.free(flat)
        self._move(unit, Where.RELEASED)

    def _move(self, unit: str, to: Where) -> None:
        require_legal(unit, self._where[unit], to)
        self._where[unit] = to

    def _on_device(self, chunk: Chunk) -> Tensor:
        return self._parameters.flats[chunk.flat][chunk.start : chunk.start + chunk.numel]

    def _in_store(self, array: Tensor, chunk: Chunk) -> Tensor:
        return array.view(self._parameters.flats[chunk.flat].dtype)
