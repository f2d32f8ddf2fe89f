"""The chunk cache: what of each chunk is in RAM, who uses it, and what is read and written next.

A chunk is used through a lease. Resident chunks have buffers of their own and never leave RAM. The others pass through
a few constant-size buffers: they are announced with `expect`, read ahead into free buffers, leased, and written back
after a dirty release. The cache expects the announced order to repeat. So it reads the beginning of the next step while
the present one ends, into half of the buffers: the next step then reads and writes from its first chunk on. Resident
chunks are written for commits only: behind the step that is to be committed, if that is known beforehand, else by
`flush`.

cached_chunk.py has what is known of a chunk, and the states that it goes through; policy.py which chunks stay.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from itertools import count
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from offload.errors import CLOSED, ClosedError
from offload.health import Health
from offload.interrupts import uninterrupted, uninterrupted_entry, wait_until
from offload.io.engine import IOFuture
from offload.profiling import Timeline
from offload.storage.cached_chunk import Buffer, CachedChunk, Residency, Version
from offload.storage.policy import belady, reservations, victim
from offload.storage.pool import LEAST_IN_FLIGHT
from offload.storage.swap_file import Slots
from offload.storage.swap_format import SlotArrays


class Use(Enum):
    """What a chunk is leased for. So it is known what has to be read before, and what has to be written after."""

    READ = "read"
    """Its values are read, and stay what they are."""
    UPDATE = "update"
    """Its values are read and written to. They are written back after the release."""
    OVERWRITE = "overwrite"
    """All of its values are written, so none has to be read. If it is cut off by an exception, the old values stay,
    unless the lease was of the buffer that held them."""
    FILL = "fill"
    """As UPDATE, and more of it comes soon. It is written back when another use ends, or when its buffer is needed."""
    REFILL = "refill"
    """As OVERWRITE, and more uses of it come soon. It is written back as after FILL."""
    TRY = "try"
    """As UPDATE, for a step that may not be made. What is written goes to a place beside the last version, which stays
    the chunk's until `keep`. Of chunks that never leave RAM, and those that no slot has yet, nothing can be tried."""
    CONSUME = "consume"
    """Its values are read for the last time. The next lease finds zeros."""


class Lease(AbstractContextManager["Lease"]):
    """The right to use one chunk's arrays, from entering to leaving. See `Store.lease`.

    Args:
        store: the store of the chunk.
        chunk: the number of the chunk.
        use: what it is leased for.
        step: the step whose result the arrays are if the holder writes to them.

    Attributes:
        chunk: see above.
        use: see above.
        step: see above.
        arrays: the chunk's arrays, tensors of shape (chunk.numel,).
        is_blank: whether the arrays hold nothing of the chunk, since nothing was read for a use that overwrites it.
        is_held: whether the lease has been given, and not given back.
    """

    arrays: Sequence[Tensor]

    def __init__(self, store: Store, chunk: int, use: Use, step: int) -> None:
        self.chunk = chunk
        self.use = use
        self.step = step
        self.is_blank = False
        self.is_held = False
        self._store = store
        self._life = store.life

    @property
    def master(self) -> Tensor:
        """fp32, shape (chunk.numel,).

        With a split master it is the low halves, int16, and Adam's second moment carries the tie bits.
        """
        return self.arrays[0]

    @uninterrupted_entry
    def __enter__(self) -> Lease:
        try:
            self._store.acquire(self)
            return self
        except BaseException:
            self._give_back(is_cut_off=True)
            raise

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(is_cut_off=error is not None)

    def _give_back(self, *, is_cut_off: bool) -> None:
        if self.is_held and self._life == self._store.life:
            self._store.release(self, is_cut_off=is_cut_off)


LOOKS_BEFORE_COLLECTING = 20
"""A wait for a lease looks ten times a second. After so many it collects garbage, to find leases that are lost."""
_WAITS_FOR = {
    Residency.READING: "wait for read",
    Residency.WRITING: "wait for write",
    Residency.LEASED: "wait for lease",
}
"""What a lease waits for, by the state that it finds. In other states it waits for a buffer."""


class _Expected(NamedTuple):
    """A lease to come.

    Attributes:
        chunk: the number of the chunk.
        is_retained: whether the chunk stays in RAM after it.
        overwrites: whether it overwrites all of the chunk.
    """

    chunk: int
    is_retained: bool
    overwrites: bool


class _Books:
    """Turns an exception that comes while the store's tables are being changed into a failure of the store.

    It is entered around such changes.
    """

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
    """Stands in for `Store.lease_wanted` where nobody can give a lease back."""


class Store:
    """The cache of one kind of data for all chunks: states, parameters or gradients.

    The first lease of a chunk finds zeros. The slots that the last commit names are never written to: a new version
    goes to the slot's other version.

    A failure of the disk is raised by the call that meets it, and by every later one. An exception that is no
    OffloadError is raised by the call that it came in. From then on each call raises InterruptedStepError, until
    `reset`. Other stores of the run go on.

    Args:
        slot_arrays: the arrays of each chunk.
        resident: the memory of the chunks that never leave RAM, by chunk.
        buffers: the memory that the other chunks pass through.
        slots: the slots of the chunks; None: no chunk moves between RAM and the disk.
        timeline: of the run.
        health: of the run.
        is_due: tells whether the results of a step are known to be committed. Resident chunks are then written behind
            it.

    Attributes:
        lease_wanted: called, from any thread, with a chunk whose lease cannot be had because another lease has the
            chunk, or has a buffer. Whoever keeps leases only for copies in flight must give one back then.
        life: the number of the present life. `reset` begins the next one, in which earlier leases mean nothing.
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
        self._chunks = tuple(CachedChunk(index, slot, resident.get(index)) for index, slot in enumerate(slot_arrays))
        self._is_due = is_due
        self._slots = slots
        self._timeline = timeline
        self._in_flight = len(buffers)
        self._free = [Buffer(memory) for memory in buffers]
        self._waiting = max(len(self._free) - LEAST_IN_FLIGHT, 0)
        self._in_buffers: dict[CachedChunk, None] = {}  # the streamed chunks that have one, the oldest first
        self._moving: set[CachedChunk] = set()
        self._ahead: deque[_Expected] = deque()
        self._announced: list[tuple[int, bool]] = []
        self._order: tuple[_Expected, ...] = ()  # of what was announced, the uses of chunks that are not resident
        self._is_between = False  # the order has been used up, and has not begun again
        self._is_once = False  # some of what was announced was not expected again
        self._used: list[tuple[int, bool]] = []
        self._health = health.part("came while a chunk moved between RAM and disk")
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._books = _Books(self)
        self.life = 0  # ends with `reset`, after which the leases of before mean nothing

    @uninterrupted
    def expect(self, order: Iterable[int], *, repeats: bool = True, once: Collection[int] = ()) -> None:
        """Announces the leases to come, in order. Reading ahead begins at once.

        Args:
            order: the numbers of the chunks.
            repeats: whether they are expected again in the same order, when all have come.
            once: chunks that are not expected again.
        """
        with self._lock, self._books:
            self.check()
            self._announce([(chunk, False) for chunk in order], repeats=repeats)
            self._is_once = bool(once)
            if once:
                self._announced = []  # what repeats is another order
                self._order = tuple(use for use in self._order if use.chunk not in once)

    @uninterrupted
    def repeat(self, consumed: Iterable[int] = ()) -> None:
        """Announces that the leases since the last announcement come again.

        Args:
            consumed: chunks that are consumed before that, in this order. Those that were consumed since the last
                announcement are not expected again.
        """
        with self._lock, self._books:
            self.check()
            self._announce([*((chunk, False) for chunk in consumed), *self._used])

    @uninterrupted
    def unexpect(self, chunk: int) -> None:
        """Takes back that a chunk is leased next, if it was announced. Others are read in its place."""
        with self._lock, self._books:
            use = next((use for use in self._ahead if use.chunk == chunk), None)
            if use is not None:
                self._ahead.remove(use)
                self._read_ahead()

    def is_resident(self, chunk: int) -> bool:
        """Whether the chunk never leaves RAM. All of its leases then have the same arrays."""
        return self._chunks[chunk].is_resident

    def nbytes(self, chunk: int) -> int:
        """The bytes of the chunk's slot."""
        return self._chunks[chunk].slot_arrays.nbytes

    def writes(self, chunk: int) -> int:
        """A number that changes with each use of the chunk that writes to it, but for those that try a step."""
        return self._chunks[chunk].writes

    @uninterrupted
    def keep(self, chunks: Collection[int], step: int) -> set[int]:
        """Makes what was tried of chunks their last version, where it was tried from the present one.

        Nothing of these chunks may be leased.

        Args:
            chunks: their numbers.
            step: the step that was tried.

        Returns:
            The numbers of those of which it is.
        """
        ones = [self._chunks[chunk] for chunk in chunks]
        wait_until(self._lock, self._changed, lambda: self.can_keep(chunks))
        with self._lock, self._books:
            self.check()
            kept = {one.index for one in ones if one.tried is not None and one.tried.step == step}
            for one in ones:
                if one.index in kept:
                    one.stored, one.tried = one.tried, None
                    if one.state is Residency.CLEAN:  # somebody has read the version before
                        self._drop(one)
            return kept

    def can_keep(self, chunks: Iterable[int]) -> bool:
        """Whether `keep` does not wait: none of these chunks is leased, or being read."""
        busy = (Residency.READING, Residency.LEASED)
        return self._is_free_of((self._chunks[chunk] for chunk in chunks), busy)

    def _is_free_of(self, chunks: Iterable[CachedChunk], states: Collection[Residency]) -> bool:
        self.check()
        return not any(chunk.state in states for chunk in chunks)

    @uninterrupted
    def discard(self, chunk: int) -> None:
        """Forgets what a chunk holds, which is in no commit: its next lease finds zeros. Nobody may have it."""
        one = self._chunks[chunk]
        wait_until(self._lock, self._changed, lambda: self.can_discard(chunk))
        with self._lock, self._books:
            self.check()
            assert one.committed is None
            one.stored = one.newer = one.tried = None
            if one.state is not Residency.EMPTY:
                has_buffer = one.state is not Residency.STORED
                one.change(Residency.EMPTY)
                if has_buffer:
                    self._free_buffer(one)
                    self._changed.notify_all()

    def can_discard(self, chunk: int) -> bool:
        """Whether `discard` does not wait: the chunk is not leased, and does not move."""
        busy = (Residency.READING, Residency.WRITING, Residency.LEASED)
        return self._is_free_of([self._chunks[chunk]], busy)

    def retain(self, chunk: int) -> None:
        """Keeps the buffer of a chunk, which is leased, until its next use, or until another chunk needs a buffer."""
        self._chunks[chunk].is_retained = True

    def is_ready(self, chunk: int) -> bool:
        """Whether the chunk never leaves RAM, and nothing is under way with it, so that a lease does not wait."""
        one = self._chunks[chunk]
        return one.is_resident and one.state in (Residency.CLEAN, Residency.DIRTY)

    def lease(self, chunk: int, use: Use, *, step: int) -> AbstractContextManager[Lease]:
        """A context for a use of a chunk. Entering it waits until the chunk is there; leaving it writes what is new.

        Args:
            chunk: the number of the chunk.
            use: what it is leased for.
            step: the step whose result its values are, if they are new. It goes into the slot's header.
        """
        return Lease(self, chunk, use, step)

    def acquire(self, lease: Lease) -> None:
        """Waits until the chunk of `lease` is in RAM, and gives it its arrays. For leases only."""
        if not self.try_acquire(lease):
            self._want(lease.chunk)
            looks = count(1)

            def meanwhile() -> None:
                # The exception that parted a lease from its holder may keep it alive, in a cycle with its traceback.
                if next(looks) % LOOKS_BEFORE_COLLECTING == 0:
                    gc.collect()
                self._want(lease.chunk)

            with self._waiting_for(self._chunks[lease.chunk]):
                wait_until(self._lock, self._changed, lambda: self._acquire(lease), meanwhile=meanwhile)

    def try_acquire(self, lease: Lease) -> bool:
        """Gives a lease its arrays if its chunk is in RAM. If not, starts what can be done now to bring it there.

        Returns:
            Whether it was.
        """
        with self._lock:
            return self._acquire(lease)

    def _want(self, chunk: int) -> None:
        if self._chunks[chunk].state not in (Residency.READING, Residency.WRITING):
            self.lease_wanted(chunk)

    def release(self, lease: Lease, *, is_cut_off: bool) -> None:
        """Takes the chunk back. For leases only.

        Args:
            lease: of the chunk.
            is_cut_off: whether an exception came in its use.
        """
        with self._lock:
            self._release(lease, is_cut_off=is_cut_off)
            lease.is_held = False

    @property
    def is_moving(self) -> bool:
        """Whether a chunk is being read or written."""
        return bool(self._moving)

    @uninterrupted
    def drain(self) -> None:
        """Waits until nothing is under way."""
        while self._health.is_sound and (moving := list(self._moving)):
            self._wait_for_transfer(moving[0])
        self.check()

    def _wait_for_transfer(self, chunk: CachedChunk) -> None:
        with self._waiting_for(chunk):
            wait_until(self._lock, self._changed, lambda: not self._health.is_sound or chunk not in self._moving)

    def flush(self) -> dict[int, Version]:
        """Writes all chunks that are newer in RAM, resident or not, and waits. Nothing may be leased meanwhile.

        Returns:
            Which version of each chunk is in its slot.
        """
        self.drain()
        self.write_newer()
        self.drain()
        return self.versions()

    @uninterrupted
    def write_newer(self) -> None:
        """Starts to write all chunks that are newer in RAM, resident or not, of which none moves."""
        with self._lock, self._books:
            for chunk in self._chunks:
                if chunk.newer is not None:
                    self._write(chunk, Residency.CLEAN)

    @uninterrupted
    def versions(self) -> dict[int, Version]:
        """Which version of each chunk is in its slot, by chunk."""
        with self._lock:
            return {chunk.index: chunk.stored for chunk in self._chunks if chunk.stored is not None}

    @uninterrupted
    def set_committed(self, versions: Mapping[int, Version]) -> None:
        """Records which versions are committed now. Their slots are not written to before the next call.

        Args:
            versions: what `flush` returned, by chunk.
        """
        with self._lock:
            for chunk in self._chunks:
                version = versions.get(chunk.index)
                chunk.committed = None if version is None else version.place

    @uninterrupted
    def reset(self, versions: Mapping[int, Version]) -> None:
        """Forgets what is in RAM, and failures. Nothing may be leased.

        Resident chunks are read at once, in the background.

        Args:
            versions: what the slots hold, by chunk, which is committed. Other chunks are new.
        """
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock, self._books:
            self._begin_anew(versions)

    def _begin_anew(self, versions: Mapping[int, Version]) -> None:
        self._health.reset()
        self.life += 1
        self._forget_order()
        self._ahead.clear()
        self._used.clear()
        for chunk in self._chunks:
            chunk.reset(versions.get(chunk.index))
            if chunk in self._in_buffers:
                self._free_buffer(chunk)
        for chunk in self._chunks:
            if chunk.is_resident and chunk.stored is not None:
                self._read(chunk)
        self._changed.notify_all()

    def check(self) -> None:
        """Raises the failure of a transfer in the background, or InterruptedStepError, if there was one."""
        self._health.check()

    @uninterrupted
    def close(self) -> None:
        """Waits for transfers under way, successful or not. Every later lease raises ClosedError."""
        with self._lock:
            self._ahead.clear()
            self._forget_order()
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock:
            self._health.fail(ClosedError(CLOSED))
            self.lease_wanted = _nobody  # it belongs to who holds the leases, and holds this: a cycle
            self._changed.notify_all()

    # Everything below is called with the lock held.

    def _announce(self, order: list[tuple[int, bool]], *, repeats: bool = True) -> None:
        if not repeats:
            self._forget_order()
            ahead = [_Expected(chunk, False, overwrites) for chunk, overwrites in order if self._streams(chunk)]
            self._begin_order(ahead)
            return
        if order != self._announced:
            self._announced = order
            streamed = [use for use in order if not self._chunks[use[0]].is_resident]
            overwriting = frozenset(at for at, (_, overwrites) in enumerate(streamed) if overwrites)
            retained = belady([chunk for chunk, _ in streamed], self._waiting, overwriting)
            self._order = tuple(
                _Expected(chunk, at in retained, overwrites) for at, (chunk, overwrites) in enumerate(streamed)
            )
        self._begin_order(self._order)

    def _begin_order(self, ahead: Iterable[_Expected]) -> None:
        self._ahead = deque(ahead)
        self._is_between = False
        self._used = []
        self._read_ahead()

    def _streams(self, chunk: int) -> bool:
        return not self._chunks[chunk].is_resident

    def _forget_order(self) -> None:
        self._announced, self._order = [], ()

    def _acquire(self, lease: Lease) -> bool:
        """Moves the chunk to LEASED if it has a buffer in RAM with its data.

        Returns:
            Whether it had.
        """
        chunk = self._chunks[lease.chunk]
        with self._books:
            overwrites = lease.use in (Use.OVERWRITE, Use.REFILL)
            if not self._make_ready(chunk, overwrites=overwrites, tries=lease.use is Use.TRY):
                return False
            lease.is_blank = overwrites and chunk.state in (Residency.EMPTY, Residency.STORED)
            lease.arrays = chunk.arrays
            chunk.change(Residency.LEASED)
            lease.is_held = True
            chunk.holder = weakref.ref(lease)
            if lease.use is not Use.CONSUME:
                self._used.append((chunk.index, overwrites))
            if not chunk.is_resident:
                self._has_begun(chunk)
            return True

    def _has_begun(self, chunk: CachedChunk) -> None:
        """Records that the next use of a chunk has begun."""
        use = next((use for use in self._ahead if use.chunk == chunk.index), None)
        if use is not None:
            self._ahead.remove(use)
            chunk.is_retained = chunk.is_retained or use.is_retained
            self._is_between = not self._ahead
        if not self._ahead:
            self._ahead.extend(self._order)
        self._read_ahead()

    def _waiting_for(self, chunk: CachedChunk) -> AbstractContextManager[None]:
        what = _WAITS_FOR.get(chunk.state, "wait for buffer")
        return self._timeline.waiting(what, chunk=chunk.index, tier="nvme")

    def _make_ready(self, chunk: CachedChunk, *, overwrites: bool, tries: bool) -> bool:
        """Whether the chunk has a buffer in RAM with its data. If not, does what can be done now to bring it there."""
        self.check()
        state = chunk.state
        assert not tries or (not chunk.is_resident and chunk.stored is not None)
        if tries and state is Residency.DIRTY:
            self._write(chunk, Residency.CLEAN)  # what is tried overwrites the buffer
            return False
        if state in (Residency.CLEAN, Residency.DIRTY):
            return True
        if state is Residency.LEASED and chunk.holder is not None and chunk.holder() is None:
            # What another thread threw in has parted the lease from its holder: nobody will give it back.
            raise self._health.interrupted(f"the lease of chunk {chunk.index} was lost")
        if state not in (Residency.EMPTY, Residency.STORED):
            return False
        if not chunk.is_resident and not self._free:
            self._drop_one()
            if not self._free:
                return False
        if state is Residency.STORED and not overwrites:
            self._read(chunk)
            # It may have ended before it could be waited for.
            return chunk.state is Residency.CLEAN
        self._take_buffer(chunk)
        if not overwrites:
            assert chunk.buffer is not None
            chunk.buffer.memory.zero_()
        return True

    def _release(self, lease: Lease, *, is_cut_off: bool) -> None:
        chunk, step, use = self._chunks[lease.chunk], lease.step, lease.use
        with self._books:
            is_retained, chunk.is_retained = chunk.is_retained, False
            chunk.holder = None
            if use is Use.CONSUME:
                chunk.stored = chunk.newer = None
            elif use is Use.TRY:
                self._release_tried(chunk, step, is_cut_off=is_cut_off)
                return
            if use is not Use.READ:
                chunk.writes += 1
                chunk.tried = None
            if use is Use.CONSUME or (lease.is_blank and is_cut_off):
                chunk.change(Residency.EMPTY if chunk.stored is None else Residency.STORED)
                self._free_buffer(chunk)
            else:
                # What was filled in part, and what no slot has yet, is newer in RAM until it is written.
                is_new = use is not Use.READ or (chunk.newer is None and chunk.stored is None)
                chunk.newer = step if is_new else chunk.newer
                if chunk.newer is None:
                    chunk.change(Residency.CLEAN)
                    if not (chunk.is_resident or is_retained):
                        self._drop(chunk)
                else:
                    chunk.change(Residency.DIRTY)
                    is_wanted = is_new and use not in (Use.FILL, Use.REFILL)
                    if chunk.is_resident:
                        is_wanted = use in (Use.UPDATE, Use.OVERWRITE) and self._is_due(step)
                    if is_wanted:
                        self._write(chunk, Residency.CLEAN if chunk.is_resident or is_retained else Residency.STORED)
            self._changed.notify_all()
            if not chunk.is_resident:
                self._read_ahead()

    def _release_tried(self, chunk: CachedChunk, step: int, *, is_cut_off: bool) -> None:
        if is_cut_off:  # its buffer may have half of a step
            chunk.change(Residency.STORED)
            self._free_buffer(chunk)
        else:
            chunk.change(Residency.WRITING)
            chunk.tried = Version(step, chunk.place_to_try)
            future = self._swap.write(chunk.index, chunk.data, step=step, place=chunk.tried.place)
            self._follow(future, chunk, Residency.STORED, "nvme_written_bytes")
        self._changed.notify_all()
        self._read_ahead()

    def _take_buffer(self, chunk: CachedChunk) -> None:
        if not chunk.is_resident:
            chunk.buffer = self._free.pop()
            self._in_buffers[chunk] = None

    def _free_buffer(self, chunk: CachedChunk) -> None:
        if not chunk.is_resident:
            assert chunk.buffer is not None
            del self._in_buffers[chunk]
            self._free.append(chunk.buffer)
            chunk.buffer = None

    def _drop(self, chunk: CachedChunk) -> None:
        chunk.change(Residency.STORED)
        self._free_buffer(chunk)

    def _drop_one(self) -> None:
        """Takes the buffer of a chunk that is not needed now, for one that is."""
        clean = [chunk.index for chunk in self._in_buffers if chunk.state is Residency.CLEAN]
        index = victim(clean, (use.chunk for use in self._ahead if not use.overwrites))
        if index is not None:
            self._drop(self._chunks[index])
        elif not any(chunk.state in (Residency.READING, Residency.WRITING) for chunk in self._in_buffers):
            dirty = [chunk.index for chunk in self._in_buffers if chunk.state is Residency.DIRTY]
            if self._is_once:  # a step that is not known yet uses them in their order: the last of them last
                dirty.sort(reverse=True)
            index = victim(dirty, (use.chunk for use in self._ahead))
            if index is not None:
                self._write(self._chunks[index], Residency.STORED)

    def _read_ahead(self) -> None:
        """Reads what is expected next, as far as there are free buffers."""
        # Drives are faster where reads and writes are under way at once: a step that found all buffers read could only
        # write at first, and the one before could only read at last.
        left_free = self._in_flight // 2 if self._is_between else 0
        if len(self._free) <= left_free:
            return
        uses = ((use.chunk, use.overwrites) for use in self._ahead)
        in_buffers = {chunk.index for chunk in self._in_buffers}
        for index, is_read, taken in reservations(uses, in_buffers):
            if len(self._free) <= left_free + taken or not self._health.is_sound:
                return
            chunk = self._chunks[index]
            if chunk.state is Residency.EMPTY and is_read:
                left_free += 1  # for its first use
            if chunk.state in (Residency.WRITING, Residency.LEASED):
                # Still busy with the step before. What follows it can wait: it is used later.
                return
            if chunk.state is Residency.STORED and is_read:
                self._read(chunk)

    def _read(self, chunk: CachedChunk) -> None:
        version = chunk.stored
        assert version is not None
        chunk.change(Residency.READING)
        self._take_buffer(chunk)
        future = self._swap.read(
            chunk.index, chunk.data, step=version.step, place=version.place, checksum=version.checksum
        )
        self._follow(future, chunk, Residency.CLEAN, "nvme_read_bytes")

    def _write(self, chunk: CachedChunk, then: Residency) -> None:
        step = chunk.newer
        assert step is not None
        chunk.newer = None
        chunk.change(Residency.WRITING)
        chunk.stored = Version(step, chunk.place)
        future = self._swap.write(chunk.index, chunk.data, step=step, place=chunk.stored.place)
        self._follow(future, chunk, then, "nvme_written_bytes")

    def _follow(self, future: IOFuture, chunk: CachedChunk, then: Residency, counter: str) -> None:
        moved = partial(self._moved, chunk, then, counter)
        chunk.transfer = future
        self._moving.add(chunk)
        try:
            future.add_done_callback(moved)
        except BaseException:  # thrown in, before it was added or after: the first of two counts
            future.add_done_callback(moved)
            raise

    @uninterrupted
    def _moved(self, chunk: CachedChunk, then: Residency, counter: str, future: IOFuture) -> None:
        """Records that a transfer has ended. Called in the thread of the engine or of the checksums that ended it."""
        with self._lock:
            if chunk.transfer is not future:
                return
            chunk.transfer = None
            self._moving.discard(chunk)
            try:
                self._timeline.count(counter, future.result())
                chunk.change(then)
                if then is Residency.STORED:
                    self._free_buffer(chunk)
                self._read_ahead()
            except BaseException as error:
                self._health.fail(error)  # a future's callback would swallow it
            self._changed.notify_all()

    @property
    def _swap(self) -> Slots:
        if self._slots is None:
            raise AssertionError("a chunk is to be streamed, but there is no swap file")
        return self._slots
