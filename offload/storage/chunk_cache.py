"""The only mover of bytes between RAM and the swap files.

A chunk is used through a lease. Chunks that the plan keeps in RAM have buffers of their own and never move; the
others pass through a few constant-size buffers: announced with `expect`, read ahead while there are free buffers,
leased, released dirty, written behind. When the announced order has been used up it is expected to come again, so
what a step begins with is read while the one before it ends: into half of the buffers, so that the next step reads and
writes from its first chunk on. Kept chunks are written for commits only: behind the step that is to be committed, if
that is known beforehand, so that the commit finds them written, else by `flush`. Which copies exist is written in
residency.py, what to drop is decided in cache.py, and nowhere else.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from offload.config import LEAST_IN_FLIGHT
from offload.errors import ClosedError, InterruptedStepError
from offload.interrupts import uninterrupted, uninterrupted_entry, wait_until
from offload.io.engine import IOFuture
from offload.profiling import Timeline
from offload.storage.arena import Lender
from offload.storage.lease import Lease, Version
from offload.storage.policy import announced, stays, victim
from offload.storage.residency import Residency, ResidencyTable
from offload.storage.stripes import Stripes
from offload.storage.swap_file import Record

_WAITS_FOR = {
    Residency.READING: "wait for read",
    Residency.WRITING: "wait for write",
    Residency.LEASED: "wait for lease",
}
"""By what it finds; otherwise it waits for a buffer, until some other chunk is written."""


class _Use(NamedTuple):
    """One to come. stays: whether the chunk stays in RAM after it; is_fresh: it needs nothing of what was there."""

    chunk: int
    stays: bool
    is_fresh: bool


class _Leasing(AbstractContextManager[Lease]):
    """See Store.lease."""

    def __init__(self, store: Store, chunk: int, step: int, *, is_fresh: bool) -> None:
        self._store = store
        self._chunk = chunk
        self._step = step
        self._is_fresh = is_fresh
        self._life = store._life
        self.lent: Lease | None = None

    @uninterrupted_entry
    def __enter__(self) -> Lease:
        try:
            self._store._wait_to_lend(self._chunk, self._is_fresh, self)
            assert self.lent is not None
            return self.lent
        except BaseException:
            self._give_back()
            raise

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self.lent is not None and self._life == self._store._life:
            with self._store._lock:
                self._store._put(self.lent, self._step)
                self.lent = None


class _Books:
    """`with store._books: ...`: an exception that leaves what a store knows half written is a failure of the store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store = self._store()
        if error is not None and store is not None:
            store._fail(error)


class Store:
    """One kind of thing for all chunks: their states, or their parameters.

    Args: records: what each chunk holds; kept: chunks that stay in RAM; in_flight: buffers for the others; slots:
    their swap file, None if all are kept, in which chunk 0 has slot `first`; is_due: whether the results of a
    step are known to be committed, so that kept chunks are written behind it. The first lease of a chunk finds zeros.
    A slot that `settle` or `reset` named is never written to: a chunk's new versions go to its other place.
    A failure of the disk is raised by the call that meets it and by every later one.
    """

    def __init__(
        self,
        records: Sequence[Record],
        kept: frozenset[int],
        in_flight: int,
        arena: Lender,
        slots: Stripes | None,
        timeline: Timeline,
        first: int = 0,
        is_due: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._records = tuple(records)
        self._first = first
        self._is_due = is_due
        self._kept = kept
        self._slots = slots
        self._timeline = timeline
        self._table = ResidencyTable(len(self._records))
        largest = max((record.nbytes for chunk, record in enumerate(records) if chunk not in kept), default=0)
        self._in_flight = in_flight if largest else 0
        self._free = [arena.carve(largest) for _ in range(self._in_flight)]
        self._waiting = max(len(self._free) - LEAST_IN_FLIGHT, 0)
        self._buffers = {chunk: arena.carve(self._records[chunk].nbytes) for chunk in sorted(kept)}
        self._at: dict[int, Version] = {}
        self._committed: dict[int, int] = {}
        # Kept chunks that are newer in RAM, and since which step.
        self._newer: dict[int, int] = {}
        self._ahead: deque[_Use] = deque()
        self._order: tuple[_Use, ...] = ()
        self._is_between = False  # the order has been used up, and has not begun again
        self._used: list[tuple[int, bool]] = []
        self._staying: set[int] = set()
        self._moving: dict[int, IOFuture] = {}
        # Left unfinished, and newer in RAM: nobody has it yet, or somebody holds it now.
        self._unwritten: dict[int, int] = {}
        self._owed: set[int] = set()
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._books = _Books(self)
        self._holders: dict[int, weakref.ref[_Leasing]] = {}
        self._life = 0  # ends with `reset`, after which the leases of before mean nothing

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

    def lease(self, chunk: int, *, step: int, is_fresh: bool = False) -> AbstractContextManager[Lease]:
        """Waits until `chunk` is in RAM and lends it; left dirty, it is written behind.

        Args: step: what a dirty chunk is the result of; goes into its slot's header; is_fresh: the caller overwrites
        all of it, so that nothing has to be read.
        """
        return _Leasing(self, chunk, step, is_fresh=is_fresh)

    def _wait_to_lend(self, chunk: int, is_fresh: bool, to: _Leasing) -> None:
        with self._lock:
            is_there = self._lend(chunk, is_fresh, to)
        if not is_there:
            with self._waiting_for(chunk):
                wait_until(self._lock, self._changed, lambda: self._lend(chunk, is_fresh, to))

    @uninterrupted
    def drain(self) -> None:
        """Waits until nothing is under way."""
        while self._failure is None and (moving := list(self._moving)):
            self._wait_for_transfer(moving[0])
        self.check()

    def _wait_for_transfer(self, chunk: int) -> None:
        with self._waiting_for(chunk):
            wait_until(self._lock, self._changed, lambda: self._failure is not None or chunk not in self._moving)

    def flush(self) -> dict[int, Version]:
        """Writes what is newer in RAM, kept or not, and waits. Returns: which version of each chunk is in its slot.

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
    def settle(self, versions: Mapping[int, Version]) -> None:
        """These, of `flush`, are committed now: their slots are not written to before the next call."""
        with self._lock:
            self._committed = {chunk: version.place for chunk, version in versions.items()}

    @uninterrupted
    def reset(self, versions: Mapping[int, Version]) -> None:
        """Forgets RAM and failures: chunks are as their slots in `versions` have them, which are committed, or new.

        Nothing may be leased. Kept chunks are read at once, in the background.
        """
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock, self._books:
            self._begin_anew(versions)

    def _begin_anew(self, versions: Mapping[int, Version]) -> None:
        self._failure = None
        self._life += 1
        self._order = ()
        for left in (self._ahead, self._used, self._staying, self._unwritten, self._owed, self._newer, self._holders):
            left.clear()
        for chunk in range(len(self._records)):
            self._table.reset(chunk, Residency.STORED if chunk in versions else Residency.EMPTY)
            if chunk not in self._kept and chunk in self._buffers:
                self._free.append(self._buffers.pop(chunk))
        self._at = dict(versions)
        self._committed = {chunk: version.place for chunk, version in versions.items()}
        for chunk in sorted(self._kept & versions.keys()):
            self._read(chunk)
        self._changed.notify_all()

    def check(self) -> None:
        """Raises the failure of a transfer in the background, if there was one."""
        if self._failure is not None:
            raise self._failure

    @uninterrupted
    def close(self) -> None:
        """Waits for transfers under way, successful or not; every later lease raises ClosedError."""
        with self._lock:
            self._ahead.clear()
            self._order = ()
        wait_until(self._lock, self._changed, lambda: not self._moving)
        with self._lock:
            self._failure = self._failure or ClosedError("the optimizer is closed: make a new one")
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """The first failure is the cause; others follow from it."""
        if not isinstance(error, Exception):
            interrupted = InterruptedStepError(f"{error!r} came while a chunk changed its place: call rollback()")
            interrupted.__cause__ = error
            error = interrupted
        self._failure = self._failure or error

    # Everything below is called with the lock held.

    def _announce(self, order: Sequence[tuple[int, bool]]) -> None:
        streamed = [use for use in order if use[0] not in self._kept]
        fresh = frozenset(position for position, use in enumerate(streamed) if use[1])
        staying = stays([chunk for chunk, _ in streamed], self._waiting, fresh)
        self._order = tuple(_Use(use[0], position in staying, use[1]) for position, use in enumerate(streamed))
        self._ahead = deque(self._order)
        self._is_between = False
        self._used = []
        self._read_ahead()

    def _lend(self, chunk: int, is_fresh: bool, to: _Leasing) -> bool:
        """Moves the chunk to LEASED, and gives the lease to `to`, if it has a buffer in RAM with its data; whether."""
        with self._books:
            if not self._is_ready(chunk, is_fresh):
                return False
            is_blank = is_fresh and self._table[chunk] in (Residency.EMPTY, Residency.STORED)
            self._table.move(chunk, Residency.LEASED)
            to.lent = Lease(chunk, self._records[chunk].views(self._buffers[chunk]), is_blank=is_blank)
            self._holders[chunk] = weakref.ref(to)
            if chunk in self._unwritten:
                del self._unwritten[chunk]
                self._owed.add(chunk)
            self._used.append((chunk, is_fresh))
            use = next((use for use in self._ahead if use.chunk == chunk), None)
            if use is not None:
                self._ahead.remove(use)
                if use.stays:
                    self._staying.add(chunk)
                # A chunk that is kept, and never moves, may come after the last one that does.
                self._is_between = not self._ahead
            if not self._ahead:
                self._ahead.extend(self._order)
            self._read_ahead()
            return True

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
                raise InterruptedStepError(f"the lease of chunk {chunk} was lost: call rollback(), or start again")
        if state not in (Residency.EMPTY, Residency.STORED):
            return False
        if chunk not in self._kept and not self._free:
            self._drop_one()
            if not self._free:
                return False
        if state is Residency.STORED and not is_fresh:
            self._read(chunk)
            # It may have ended before it could be waited for.
            return self._table[chunk] is Residency.CLEAN
        if chunk not in self._kept:
            self._buffers[chunk] = self._free.pop()
        if not is_fresh:
            self._buffers[chunk].zero_()
        return True

    def _put(self, lease: Lease, step: int) -> None:
        with self._books:
            chunk = lease.chunk
            is_staying, is_owed = chunk in self._staying, chunk in self._owed
            self._staying.discard(chunk)
            self._owed.discard(chunk)
            self._holders.pop(chunk, None)
            if lease.is_spent:
                self._at.pop(chunk, None)
                self._newer.pop(chunk, None)
            if lease.is_spent or (lease.is_blank and not lease.dirty):  # or cut off before anything was put there
                self._table.move(chunk, Residency.STORED if chunk in self._at else Residency.EMPTY)
                if chunk not in self._kept:
                    self._free.append(self._buffers.pop(chunk))
            elif chunk in self._kept:
                if lease.dirty or chunk not in self._at:
                    self._newer[chunk] = step
                self._table.move(chunk, Residency.DIRTY if chunk in self._newer else Residency.CLEAN)
                if lease.dirty and not lease.is_unfinished and self._is_due(step):
                    self._write(chunk, step, Residency.CLEAN)
            elif not (lease.dirty or is_owed) and chunk in self._at:
                self._table.move(chunk, Residency.CLEAN)
                if not is_staying:
                    self._drop(chunk)
            else:
                self._table.move(chunk, Residency.DIRTY)
                if lease.is_unfinished or (is_owed and not lease.dirty):
                    self._unwritten[chunk] = step
                else:
                    self._write(chunk, step, Residency.CLEAN if is_staying else Residency.STORED)
            self._changed.notify_all()
            self._read_ahead()

    def _drop(self, chunk: int) -> None:
        self._table.move(chunk, Residency.STORED)
        self._free.append(self._buffers.pop(chunk))

    def _drop_one(self) -> None:
        """Takes the buffer of a chunk that is not needed now, for one that is."""
        clean = [c for c in self._buffers if self._table[c] is Residency.CLEAN and c not in self._kept]
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
        uses = ((use.chunk, use.is_fresh) for use in self._ahead)
        for chunk, is_read, taken in announced(uses, self._buffers):
            if len(self._free) <= left_free + taken or self._failure is not None:
                return
            state = self._table[chunk]
            if state in (Residency.WRITING, Residency.LEASED):
                # Still busy with the step before. What follows it can wait: it is used later.
                return
            if state is Residency.STORED and is_read:
                self._read(chunk)

    def _read(self, chunk: int) -> None:
        self._table.move(chunk, Residency.READING)
        if chunk not in self._kept:
            self._buffers[chunk] = self._free.pop()
        at = self._at[chunk]
        future = self._swap.read(self._first + chunk, self._bytes(chunk), **at._asdict())
        self._follow(future, chunk, Residency.CLEAN, "nvme_read_bytes")

    def _write(self, chunk: int, step: int, then: Residency) -> None:
        self._unwritten.pop(chunk, None)
        self._newer.pop(chunk, None)
        self._table.move(chunk, Residency.WRITING)
        place = 1 - self._committed[chunk] if chunk in self._committed else 0
        self._at[chunk] = Version(step, place)
        future = self._swap.write(self._first + chunk, self._bytes(chunk), step=step, place=place)
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
                self._table.move(chunk, then)
                if then is Residency.STORED:
                    self._free.append(self._buffers.pop(chunk))
                self._read_ahead()
            except BaseException as error:
                self._fail(error)  # a future's callback would swallow it
            self._changed.notify_all()

    def _bytes(self, chunk: int) -> Tensor:
        return self._buffers[chunk][: self._records[chunk].nbytes]

    @property
    def _swap(self) -> Stripes:
        if self._slots is None:
            raise AssertionError("a chunk is to be streamed, but there is no swap file")
        return self._slots
