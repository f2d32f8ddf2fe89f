"""The chunk cache: what of each chunk is in RAM, who uses it, and what is read and written next.

A chunk is used through a lease. Resident chunks have buffers of their own and never leave RAM. The others pass through
a few constant-size buffers: they are announced with `expect`, read ahead into free buffers, leased, and written back
after a dirty release. The cache expects the announced order to repeat. So it reads the beginning of the next step while
the present one ends, into half of the buffers: the next step then reads and writes from its first chunk on. Resident
chunks are written for commits only: behind the step that is to be committed, if that is known beforehand, else by
`flush`.

[Note: residency]
| state   | RAM     | slot  | meaning                                                        |
|---------|---------|-------|----------------------------------------------------------------|
| EMPTY   | -       | -     | nothing: before the first lease, or used up                    |
| STORED  | -       | valid | only in the swap file                                          |
| READING | filling | valid | being read                                                     |
| CLEAN   | valid   | valid | both hold the same                                             |
| LEASED  | in use  | maybe | the holder of the lease may write to it                        |
| DIRTY   | valid   | old   | RAM is newer                                                   |
| WRITING | valid   | torn  | being written; readers wait                                    |

A STORED chunk is LEASED at once if its user overwrites all of it, and STORED again if that is cut off. A LEASED chunk
becomes EMPTY if nobody needs it any more. Residency is a state, never a count.

[Note: policy]
Training uses chunks in the same order every step, so the future is known and the best policy can be computed (Belady,
"A study of replacement algorithms for a virtual-storage computer", 1966): evict what is used furthest ahead. Where a
step uses every chunk once, that is always the chunk just used, so a fixed resident set is best: `residents`. Where a
step returns to a chunk sooner, the chunk is retained until then if a buffer can wait with it: `belady`. Reading ahead
never evicts a chunk that is used earlier, so it costs no extra byte.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import cached_property, partial
from itertools import count
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from offload.errors import CLOSED, ClosedError, StateError
from offload.health import Health
from offload.interrupts import uninterrupted, uninterrupted_entry, wait_until
from offload.io.engine import IOFuture
from offload.profiling import Timeline
from offload.storage.pool import LEAST_IN_FLIGHT
from offload.storage.swap_file import Slots, memory_of
from offload.storage.swap_format import STATE_KINDS, SlotArrays


class Residency(Enum):
    __hash__ = object.__hash__  # Enum's own, of the name, is a call in Python

    EMPTY = "empty"
    STORED = "stored"
    READING = "reading"
    CLEAN = "clean"
    LEASED = "leased"
    DIRTY = "dirty"
    WRITING = "writing"


_LEGAL: dict[Residency, frozenset[Residency]] = {
    Residency.EMPTY: frozenset({Residency.LEASED}),
    Residency.STORED: frozenset({Residency.READING, Residency.LEASED}),
    Residency.READING: frozenset({Residency.CLEAN, Residency.STORED}),
    Residency.CLEAN: frozenset({Residency.LEASED, Residency.STORED}),
    Residency.LEASED: frozenset({Residency.CLEAN, Residency.DIRTY, Residency.EMPTY, Residency.STORED}),
    Residency.DIRTY: frozenset({Residency.LEASED, Residency.WRITING}),
    Residency.WRITING: frozenset({Residency.STORED, Residency.CLEAN}),
}


class ResidencyTable:
    """The state of every chunk; all begin EMPTY."""

    def __init__(self, chunks: int) -> None:
        self._states = [Residency.EMPTY] * chunks

    def __getitem__(self, chunk: int) -> Residency:
        return self._states[chunk]

    def change(self, chunk: int, to: Residency) -> None:
        """Raises: StateError if the change is not legal."""
        now = self._states[chunk]
        if to not in _LEGAL[now]:
            legal = ", ".join(sorted(state.value for state in _LEGAL[now]))
            raise StateError(f"chunk {chunk} is {now.value} and cannot become {to.value}, only {legal}")
        self._states[chunk] = to

    def reset(self, chunk: int, to: Residency) -> None:
        """Whatever it was: for a return to the last commit, when nobody uses the chunk."""
        self._states[chunk] = to


def residents(order: Sequence[int], sizes: Sequence[int], budget: int) -> frozenset[int]:
    """The chunks that never leave RAM.

    Args: order: ids as a step uses them, each once; sizes: bytes of each in RAM, by id; budget: bytes for them.
    They are spread evenly over the order: then the disk works while the kernels are busy with what is there, and any
    stretch of a step moves the same share of bytes.
    """
    total = sum(sizes[chunk] for chunk in order)
    share = min(budget / total, 1.0) if total else 0.0
    chosen: set[int] = set()
    due = 0.0
    for chunk in order:
        due += share * sizes[chunk]
        if due >= sizes[chunk] * (1 - 1e-9) and sizes[chunk] <= budget:
            chosen.add(chunk)
            budget -= sizes[chunk]
            due -= sizes[chunk]
    for chunk in order:
        if chunk not in chosen and sizes[chunk] <= budget:
            chosen.add(chunk)
            budget -= sizes[chunk]
    return frozenset(chosen)


def belady(order: Sequence[int], waiting: int, fresh: Collection[int] = ()) -> frozenset[int]:
    """The positions of `order` after which a chunk is retained in RAM until its next use.

    Args: order: chunks as they are used; waiting: how many chunks may wait in RAM beside the one in use; fresh:
    positions of uses that overwrite the chunk, for which nothing has to be retained.
    All others are read again at their next use; no other choice reads fewer.
    """
    following = [len(order) if use in fresh else use for use in _next_uses(order)]
    retained: set[int] = set()
    held: dict[int, int] = {}  # chunk: position after which it stays
    for position, chunk in enumerate(order):
        if chunk in held:
            retained.add(held.pop(chunk))
        while len(held) > waiting:
            del held[max(held, key=lambda other: following[held[other]])]
        if following[position] < len(order):
            held[chunk] = position
    return frozenset(retained)


def reservations(ahead: Iterable[tuple[int, bool]], in_ram: Container[int]) -> Iterator[tuple[int, bool, int]]:
    """Yields (chunk, should_prefetch, buffers reserved by earlier uses) for each use to come.

    Args: ahead: (chunk, whether the use overwrites all of it); in_ram: chunks that have a buffer.
    A chunk that is overwritten before it is read is not prefetched, but reserves a buffer.
    """
    overwritten: set[int] = set()
    taken = 0
    for chunk, is_fresh in ahead:
        if is_fresh:
            overwritten.add(chunk)
            taken += chunk not in in_ram
        yield chunk, chunk not in overwritten, taken


def victim(candidates: Iterable[int], ahead: Iterable[int]) -> int | None:
    """The candidate to evict: it is used furthest ahead, or never again. None without candidates.

    Args: candidates: chunks whose eviction costs no write; ahead: the uses to come.
    """
    left = dict.fromkeys(candidates)
    for chunk in ahead:
        if len(left) <= 1:
            break
        left.pop(chunk, None)
    return next(iter(left), None)


def _next_uses(order: Sequence[int]) -> list[int]:
    """For each position, that of the next use of the same chunk; len(order) without one."""
    following = [len(order)] * len(order)
    seen: dict[int, int] = {}
    for position in range(len(order) - 1, -1, -1):
        following[position] = seen.get(order[position], len(order))
        seen[order[position]] = position
    return following


class Lease(AbstractContextManager["Lease"]):
    """The right to use one chunk's arrays, from entering to leaving: CPU tensors of shape (chunk.numel,), as its slot
    says. See `Store.lease`.

    The holder sets `dirty` if it wrote to them; `is_unfinished` if it will write again: do not write back unless the
    buffer must be evicted; `is_spent` if nobody needs the values any more: the next lease finds zeros.
    is_blank: the arrays hold nothing of the chunk yet.
    """

    arrays: Sequence[Tensor]

    def __init__(self, store: Store, chunk: int, step: int, *, is_fresh: bool) -> None:
        self.chunk = chunk
        self.step = step
        self.is_fresh = is_fresh
        self.dirty = self.is_unfinished = self.is_spent = self.is_blank = False
        self.is_held = False
        self._store = store
        self._life = store.life

    @property
    def master(self) -> Tensor:
        """fp32; with a split master its low halves, int16, and exp_avg_sq carries the tie bits."""
        return self.arrays[0]

    @property
    def exp_avg(self) -> Tensor:
        return self.arrays[1]

    @property
    def exp_avg_sq(self) -> Tensor:
        return self.arrays[2]

    def states(self) -> dict[str, Tensor]:
        return dict(zip(STATE_KINDS, self.arrays, strict=True))

    @uninterrupted_entry
    def __enter__(self) -> Lease:
        try:
            self._store.acquire(self)
            return self
        except BaseException:
            self._give_back()
            raise

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self.is_held and self._life == self._store.life:
            self._store.release(self)


class _Buffer:
    """Memory for a chunk, and views of it, which are made once."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._arrays: dict[SlotArrays, Sequence[Tensor]] = {}

    def arrays(self, slot: SlotArrays) -> Sequence[Tensor]:
        """Tensors in its memory, for a chunk with such a slot."""
        arrays = self._arrays.get(slot)
        if arrays is None:
            with torch.inference_mode(False):  # those of a first lease inside it could not be written to outside
                arrays = self._arrays[slot] = slot.views(self.memory)
        return arrays

    @cached_property
    def data(self) -> memoryview:
        return memory_of(self.memory)


class Version(NamedTuple):
    """Which content of a chunk a slot holds: slot A (0) or B (1), and the step whose result it is.

    checksum: the one that the commit names; None: the one in the slot's header.
    """

    step: int
    slot: int
    checksum: int | None = None


LOOKS_BEFORE_COLLECTING = 20
"""A wait for a lease looks ten times a second, and this often before it looks for leases that were lost."""
_WAITS_FOR = {
    Residency.READING: "wait for read",
    Residency.WRITING: "wait for write",
    Residency.LEASED: "wait for lease",
}
"""What a lease waits for, by the state that it finds. In other states it waits for a buffer."""


class _Use(NamedTuple):
    """A lease to come. is_retained: the chunk stays in RAM after it; is_fresh: it overwrites all of the chunk."""

    chunk: int
    is_retained: bool
    is_fresh: bool


class _Books:
    """`with store._books: ...`: an exception while the store's tables are being changed is a failure of the store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store = self._store()
        if error is not None and store is not None:
            store._health.fail(error)


def _nobody(chunk: int) -> None:
    """Nobody gives a lease back because another one waits."""


class Store:
    """The cache of one kind of data for all chunks: states, parameters or gradients.

    The first lease of a chunk finds zeros.

    Args:
        slot_arrays: what each chunk holds.
        resident: the memory of the chunks that never leave RAM, by chunk.
        buffers: that the others pass through.
        slots: of the chunks; None if all are resident.
        health: of the run, of which the store is a part.
        is_due: whether the results of a step are known to be committed, so that resident chunks are written behind it.

    The slots that the last commit names are never written to: a new version goes to the chunk's other slot.
    A failure of the disk is raised by the call that meets it and by every later one. What is no OffloadError is raised
    by the call that it came in; from then on each call raises InterruptedStepError, until `reset`. Other stores of the
    run go on.
    Attribute: lease_wanted: called with a chunk whose lease has to wait until another one ends, its own or one with a
    buffer, by any thread: who only holds leases until copies have ended gives one back.
    """

    def __init__(
        self,
        slot_arrays: Sequence[SlotArrays],
        resident: Mapping[int, Tensor],
        buffers: Sequence[Tensor],
        slots: Slots | None,
        timeline: Timeline,
        health: Health,
        is_due: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.lease_wanted: Callable[[int], None] = _nobody
        self._slot_arrays = tuple(slot_arrays)
        self._sizes = [slot.nbytes for slot in slot_arrays]
        self._is_due = is_due
        self._slots = slots
        self._timeline = timeline
        self._table = ResidencyTable(len(self._slot_arrays))
        self._in_flight = len(buffers)
        self._free = [_Buffer(memory) for memory in buffers]
        self._waiting = max(len(self._free) - LEAST_IN_FLIGHT, 0)
        # Of the resident chunks, and of others that are in RAM now.
        self._resident = {chunk: _Buffer(memory) for chunk, memory in resident.items()}
        self._buffers: dict[int, _Buffer] = {}
        self._at: dict[int, Version] = {}
        self._committed: dict[int, int] = {}
        # Resident chunks that are newer in RAM, and since which step.
        self._newer: dict[int, int] = {}
        self._ahead: deque[_Use] = deque()
        self._announced: list[tuple[int, bool]] = []
        self._order: tuple[_Use, ...] = ()  # of what was announced, the uses of chunks that are not resident
        self._is_between = False  # the order has been used up, and has not begun again
        self._used: list[tuple[int, bool]] = []
        self._retained: set[int] = set()
        self._moving: dict[int, IOFuture] = {}
        # Left unfinished, and newer in RAM: nobody has it yet, or somebody holds it now.
        self._unwritten: dict[int, int] = {}
        self._owed: set[int] = set()
        self._health = health.part("came while a chunk moved between RAM and disk")
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._books = _Books(self)
        self._holders: dict[int, weakref.ref[Lease]] = {}
        self.life = 0  # ends with `reset`, after which the leases of before mean nothing

    @uninterrupted
    def expect(self, order: Iterable[int]) -> None:
        """Announces the leases to come, in order; reading ahead begins at once, and goes on with the same order."""
        with self._lock, self._books:
            self.check()
            self._announce([(chunk, False) for chunk in order])

    @uninterrupted
    def repeat(self) -> None:
        """Announces that the leases since the last call of this come again."""
        with self._lock, self._books:
            self.check()
            self._announce(self._used)

    def is_resident(self, chunk: int) -> bool:
        """Whether the chunk never leaves RAM: then all of its leases have the same arrays."""
        return chunk in self._resident

    def is_ready(self, chunk: int) -> bool:
        """Whether the chunk never leaves RAM, and nothing is under way with it: a lease does not wait."""
        return chunk in self._resident and self._table[chunk] in (Residency.CLEAN, Residency.DIRTY)

    def lease(self, chunk: int, *, step: int, is_fresh: bool = False) -> AbstractContextManager[Lease]:
        """Waits until `chunk` is in RAM and acquires it. A dirty one is written back after its release.

        Args: step: what a dirty chunk is the result of; goes into its slot's header; is_fresh: the caller overwrites
        all of it, so that nothing has to be read.
        """
        return Lease(self, chunk, step, is_fresh=is_fresh)

    def acquire(self, lease: Lease) -> None:
        """Waits until the chunk of `lease` is in RAM, and gives it its arrays. For leases only."""
        with self._lock:
            is_there = self._acquire(lease)
        if not is_there:
            self._want(lease.chunk)
            looks = count(1)

            def meanwhile() -> None:
                # The exception that parted a lease from its holder may keep it alive, in a cycle with its traceback.
                if next(looks) % LOOKS_BEFORE_COLLECTING == 0:
                    gc.collect()
                self._want(lease.chunk)

            with self._waiting_for(lease.chunk):
                wait_until(self._lock, self._changed, lambda: self._acquire(lease), meanwhile=meanwhile)

    def _want(self, chunk: int) -> None:
        if self._table[chunk] not in (Residency.READING, Residency.WRITING):
            self.lease_wanted(chunk)

    def release(self, lease: Lease) -> None:
        """Takes the chunk back. For leases only."""
        with self._lock:
            self._release(lease)
            lease.is_held = False

    @uninterrupted
    def drain(self) -> None:
        """Waits until nothing is under way."""
        while self._health.is_sound and (moving := list(self._moving)):
            self._wait_for_transfer(moving[0])
        self.check()

    def _wait_for_transfer(self, chunk: int) -> None:
        with self._waiting_for(chunk):
            wait_until(self._lock, self._changed, lambda: not self._health.is_sound or chunk not in self._moving)

    def flush(self) -> dict[int, Version]:
        """Writes what is newer in RAM, resident or not, and waits. Returns: which version of each chunk is in its slot.

        Nothing may be leased meanwhile.
        """
        self.drain()
        self._write_newer()
        self.drain()
        return self._now()

    @uninterrupted
    def _write_newer(self) -> None:
        with self._lock, self._books:
            for chunk, step in [*self._newer.items(), *self._unwritten.items()]:
                self._write(chunk, step, Residency.CLEAN)

    @uninterrupted
    def _now(self) -> dict[int, Version]:
        with self._lock:
            return dict(self._at)

    @uninterrupted
    def set_committed(self, versions: Mapping[int, Version]) -> None:
        """These versions, from `flush`, are committed now: their slots are not written to before the next call."""
        with self._lock:
            self._committed = {chunk: version.slot for chunk, version in versions.items()}

    @uninterrupted
    def reset(self, versions: Mapping[int, Version]) -> None:
        """Forgets RAM and failures: chunks are as their slots in `versions` have them, which are committed, or new.

        Nothing may be leased. Resident chunks are read at once, in the background.
        """
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock, self._books:
            self._begin_anew(versions)

    def _begin_anew(self, versions: Mapping[int, Version]) -> None:
        self._health.reset()
        self.life += 1
        self._forget_order()
        for left in (self._ahead, self._used, self._retained, self._unwritten, self._owed, self._newer, self._holders):
            left.clear()
        for chunk in range(len(self._slot_arrays)):
            self._table.reset(chunk, Residency.STORED if chunk in versions else Residency.EMPTY)
            if chunk in self._buffers:
                self._free.append(self._buffers.pop(chunk))
        self._at = dict(versions)
        self._committed = {chunk: version.slot for chunk, version in versions.items()}
        for chunk in self._resident:
            if chunk in versions:
                self._read(chunk)
        self._changed.notify_all()

    def check(self) -> None:
        """Raises the failure of a transfer in the background, or InterruptedStepError, if there was one."""
        self._health.check()

    @uninterrupted
    def close(self) -> None:
        """Waits for transfers under way, successful or not; every later lease raises ClosedError."""
        with self._lock:
            self._ahead.clear()
            self._forget_order()
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock:
            self._health.fail(ClosedError(CLOSED))
            self.lease_wanted = _nobody  # it belongs to who holds the leases, and holds this: a cycle
            self._changed.notify_all()

    # Everything below is called with the lock held.

    def _announce(self, order: list[tuple[int, bool]]) -> None:
        if order != self._announced:
            self._announced = order
            streamed = [use for use in order if use[0] not in self._resident]
            fresh = frozenset(position for position, use in enumerate(streamed) if use[1])
            retained = belady([chunk for chunk, _ in streamed], self._waiting, fresh)
            self._order = tuple(_Use(use[0], position in retained, use[1]) for position, use in enumerate(streamed))
        self._ahead = deque(self._order)
        self._is_between = False
        self._used = []
        self._read_ahead()

    def _forget_order(self) -> None:
        self._announced, self._order = [], ()

    def _acquire(self, lease: Lease) -> bool:
        """Moves the chunk to LEASED, if it has a buffer in RAM with its data; whether."""
        chunk = lease.chunk
        with self._books:
            if not self._is_ready(chunk, lease.is_fresh):
                return False
            lease.is_blank = lease.is_fresh and self._table[chunk] in (Residency.EMPTY, Residency.STORED)
            lease.arrays = self._buffer(chunk).arrays(self._slot_arrays[chunk])
            self._table.change(chunk, Residency.LEASED)
            lease.is_held = True
            self._holders[chunk] = weakref.ref(lease)
            if chunk in self._unwritten:
                del self._unwritten[chunk]
                self._owed.add(chunk)
            self._used.append((chunk, lease.is_fresh))
            if chunk not in self._resident:
                self._has_begun(chunk)
            return True

    def _has_begun(self, chunk: int) -> None:
        """The next use of a chunk is not ahead any more."""
        use = next((use for use in self._ahead if use.chunk == chunk), None)
        if use is not None:
            self._ahead.remove(use)
            if use.is_retained:
                self._retained.add(chunk)
            self._is_between = not self._ahead
        if not self._ahead:
            self._ahead.extend(self._order)
        self._read_ahead()

    def _buffer(self, chunk: int) -> _Buffer:
        return self._resident.get(chunk) or self._buffers[chunk]

    def _waiting_for(self, chunk: int) -> AbstractContextManager[None]:
        what = _WAITS_FOR.get(self._table[chunk], "wait for buffer")
        return self._timeline.waiting(what, chunk=chunk, tier="nvme")

    def _is_ready(self, chunk: int, is_fresh: bool) -> bool:
        """Whether the chunk has a buffer in RAM with its data; does what can be done now to bring it there."""
        self.check()
        state = self._table[chunk]
        if state in (Residency.CLEAN, Residency.DIRTY):
            return True
        if state is Residency.LEASED:
            holder = self._holders.get(chunk)
            if holder is not None and holder() is None:
                # What another thread threw in has parted the lease from its holder: nobody will give it back.
                raise self._health.interrupted(f"the lease of chunk {chunk} was lost")
        if state not in (Residency.EMPTY, Residency.STORED):
            return False
        if chunk not in self._resident and not self._free:
            self._drop_one()
            if not self._free:
                return False
        if state is Residency.STORED and not is_fresh:
            self._read(chunk)
            # It may have ended before it could be waited for.
            return self._table[chunk] is Residency.CLEAN
        if chunk not in self._resident:
            self._buffers[chunk] = self._free.pop()
        if not is_fresh:
            self._buffer(chunk).memory.zero_()
        return True

    def _release(self, lease: Lease) -> None:
        chunk, step = lease.chunk, lease.step
        with self._books:
            is_retained, is_owed = chunk in self._retained, chunk in self._owed
            self._retained.discard(chunk)
            self._owed.discard(chunk)
            self._holders.pop(chunk, None)
            if lease.is_spent:
                self._at.pop(chunk, None)
                self._newer.pop(chunk, None)
            if lease.is_spent or (lease.is_blank and not lease.dirty):  # or cut off before anything was put there
                self._table.change(chunk, Residency.STORED if chunk in self._at else Residency.EMPTY)
                if chunk not in self._resident:
                    self._free.append(self._buffers.pop(chunk))
            elif chunk in self._resident:
                if lease.dirty or chunk not in self._at:
                    self._newer[chunk] = step
                self._table.change(chunk, Residency.DIRTY if chunk in self._newer else Residency.CLEAN)
                if lease.dirty and not lease.is_unfinished and self._is_due(step):
                    self._write(chunk, step, Residency.CLEAN)
            elif not (lease.dirty or is_owed) and chunk in self._at:
                self._table.change(chunk, Residency.CLEAN)
                if not is_retained:
                    self._drop(chunk)
            else:
                self._table.change(chunk, Residency.DIRTY)
                if lease.is_unfinished or (is_owed and not lease.dirty):
                    self._unwritten[chunk] = step
                else:
                    self._write(chunk, step, Residency.CLEAN if is_retained else Residency.STORED)
            self._changed.notify_all()
            if chunk not in self._resident:
                self._read_ahead()

    def _drop(self, chunk: int) -> None:
        self._table.change(chunk, Residency.STORED)
        self._free.append(self._buffers.pop(chunk))

    def _drop_one(self) -> None:
        """Takes the buffer of a chunk that is not needed now, for one that is."""
        clean = [c for c in self._buffers if self._table[c] is Residency.CLEAN]
        chunk = victim(clean, (use.chunk for use in self._ahead if not use.is_fresh))
        if chunk is not None:
            self._drop(chunk)
        elif not any(self._table[c] is Residency.WRITING for c in self._buffers):
            dirty = [c for c in self._unwritten if self._table[c] is Residency.DIRTY]
            chunk = victim(dirty, (use.chunk for use in self._ahead))
            if chunk is not None:
                self._write(chunk, self._unwritten[chunk], Residency.STORED)

    def _read_ahead(self) -> None:
        """Reads what is expected next, as far as there are free buffers."""
        # Drives are faster where reads and writes are under way at once: a step that found all buffers read could only
        # write at first, and the one before could only read at last.
        left_free = self._in_flight // 2 if self._is_between else 0
        if len(self._free) <= left_free:
            return
        uses = ((use.chunk, use.is_fresh) for use in self._ahead)
        for chunk, is_read, taken in reservations(uses, self._buffers):
            if len(self._free) <= left_free + taken or not self._health.is_sound:
                return
            state = self._table[chunk]
            if state is Residency.EMPTY and is_read:
                left_free += 1  # for its first use
            if state in (Residency.WRITING, Residency.LEASED):
                # Still busy with the step before. What follows it can wait: it is used later.
                return
            if state is Residency.STORED and is_read:
                self._read(chunk)

    def _read(self, chunk: int) -> None:
        self._table.change(chunk, Residency.READING)
        if chunk not in self._resident:
            self._buffers[chunk] = self._free.pop()
        at = self._at[chunk]
        future = self._swap.read(chunk, self._bytes(chunk), step=at.step, slot=at.slot, checksum=at.checksum)
        self._follow(future, chunk, Residency.CLEAN, "nvme_read_bytes")

    def _write(self, chunk: int, step: int, then: Residency) -> None:
        self._unwritten.pop(chunk, None)
        self._newer.pop(chunk, None)
        self._table.change(chunk, Residency.WRITING)
        slot = 1 - self._committed[chunk] if chunk in self._committed else 0
        self._at[chunk] = Version(step, slot)
        future = self._swap.write(chunk, self._bytes(chunk), step=step, slot=slot)
        self._follow(future, chunk, then, "nvme_written_bytes")

    def _follow(self, future: IOFuture, chunk: int, then: Residency, counter: str) -> None:
        moved = partial(self._moved, chunk, then, counter)
        self._moving[chunk] = future
        try:
            future.add_done_callback(moved)
        except BaseException:  # thrown in, before it was added or after: the first of two counts
            future.add_done_callback(moved)
            raise

    @uninterrupted
    def _moved(self, chunk: int, then: Residency, counter: str, future: IOFuture) -> None:
        """Called in a thread of the engine when a transfer has ended."""
        with self._lock:
            if self._moving.get(chunk) is not future:
                return
            del self._moving[chunk]
            try:
                self._timeline.count(counter, future.result())
                self._table.change(chunk, then)
                if then is Residency.STORED:
                    self._free.append(self._buffers.pop(chunk))
                self._read_ahead()
            except BaseException as error:
                self._health.fail(error)  # a future's callback would swallow it
            self._changed.notify_all()

    def _bytes(self, chunk: int) -> memoryview:
        return self._buffer(chunk).data[: self._sizes[chunk]]

    @property
    def _swap(self) -> Slots:
        if self._slots is None:
            raise AssertionError("a chunk is to be streamed, but there is no swap file")
        return self._slots
