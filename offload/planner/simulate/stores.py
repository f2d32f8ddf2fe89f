"""The stores of a run in virtual time: the same `Store`, with memory that has no bytes and files that take time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence

import torch

from offload.health import Health
from offload.io.engine import IOFuture
from offload.planner.placement import Placement
from offload.planner.simulate.clock import Changes, Channel, Clock, Moment
from offload.planner.simulate.lines import DISK, Line
from offload.planner.simulate.speeds import Speeds
from offload.profiling import Timeline, drive_name
from offload.storage.cached_chunk import Version
from offload.storage.chunk_cache import Lease, Store, Use
from offload.storage.pool import Pool
from offload.storage.slot_map import ChunkKind, SlotMap
from offload.storage.swap_file import HasSlots, Slots, assign

READ, WRITE = "reads", "writes"


class TimedFuture(IOFuture):
    """A transfer that nobody waits for but by a callback, so that it needs no lock: a simulation makes very many.

    Args:
        nbytes: what it moves.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._has_ended = nbytes, False
        self._calls: list[Callable[[IOFuture], object]] = []

    def done(self) -> bool:
        return self._has_ended

    def result(self, timeout: float | None = None) -> int:
        assert self._has_ended
        return self._nbytes

    def add_done_callback(self, fn: Callable[[IOFuture], object]) -> None:
        if self._has_ended:
            fn(self)
        else:
            self._calls.append(fn)

    def end(self) -> None:
        """It has ended."""
        self._has_ended = True
        for call in self._calls:
            call(self)


class TimedFile(HasSlots):
    """The swap file of a drive, whose transfers take time and move nothing.

    Args:
        drive: the drive.
        slots: the slots of the rank.
        changes: is told when a transfer has ended.
    """

    def __init__(self, drive: Channel, slots: SlotMap, changes: Changes) -> None:
        self._drive = drive
        self._slots = slots
        self._changes = changes

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        return self._move(WRITE, chunk)

    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        return self._move(READ, chunk)

    def _move(self, way: str, slot: int) -> IOFuture:
        nbytes = self._slots.all_arrays[slot].nbytes
        future = TimedFuture(nbytes)

        def end() -> None:
            future.end()
            self._changes.notify()

        self._drive.submit(way, nbytes, f"slot {slot}").then(end)
        return future


class TimedStore:
    """A store in virtual time.

    Args:
        store: the store.
        changes: is told when a chunk was given back, and when one has moved.
        lease_s: what Python takes for a lease of a chunk that does not stay in RAM.
    """

    def __init__(self, store: Store, changes: Changes, lease_s: float) -> None:
        self.store = store
        self._changes = changes
        self._lease_s = lease_s

    def lease(self, chunk: int, use: Use, step: int, line: Line) -> Generator[Moment, None, Lease]:
        """A process, of a line, that waits until a chunk is there, and returns its lease."""
        lease = Lease(self.store, chunk, use, step)
        while not self.store.try_acquire(lease):
            yield from line.wait(self._changes.next, DISK)
        if not self.store.is_resident(chunk):
            yield from line.call(self._lease_s)
        return lease

    def release(self, lease: Lease) -> None:
        """Gives a lease back."""
        self.store.release(lease, is_cut_off=False)
        self._changes.notify()

    def keep(self, chunks: Collection[int], step: int) -> Generator[Moment, None, set[int]]:
        """A process as `Store.keep`."""
        while not self.store.can_keep(chunks):
            yield self._changes.next
        kept = self.store.keep(chunks, step)
        self._changes.notify()
        return kept

    def discard(self, chunk: int, line: Line) -> Generator[Moment, None, None]:
        """A process, of a line, as `Store.discard`."""
        while not self.store.can_discard(chunk):
            yield from line.wait(self._changes.next, DISK)
        self.store.discard(chunk)
        self._changes.notify()

    def drain(self) -> Generator[Moment, None, None]:
        """A process that waits until nothing is under way."""
        while self.store.is_moving:
            yield self._changes.next

    def flush(self) -> Generator[Moment, None, None]:
        """A process as `Store.flush`, after which what is in the slots is committed."""
        yield from self.drain()
        self.store.write_newer()
        yield from self.drain()
        self.store.set_committed(self.store.versions())


class TimedStores:
    """The stores of a rank in virtual time, and its drives.

    Args:
        clock: the virtual time.
        placement: what is where.
        speeds: of the machine, with those of the drives of its directories, in their order.
        is_due: tells of a step whether its results are known to be committed.

    Attributes:
        drives: the drives.
        timeline: counts what moves, as that of a run.
        by_kind: the stores.
    """

    def __init__(self, clock: Clock, placement: Placement, speeds: Speeds, is_due: Callable[[int], bool]) -> None:
        drives = speeds.drives
        self.timeline = Timeline()
        self.drives = [
            Channel(
                clock,
                drive_name(number),
                {READ: one.read, WRITE: one.write},
                one.both,
                is_shared=True,
                delay_s=speeds.host.delay_s,
            )
            for number, one in enumerate(drives)
        ]
        changes, health, slots = Changes(), Health(), placement.slots
        files = [TimedFile(drive, slots, changes) for drive in self.drives]
        chosen = assign([one.nbytes for one in slots.all_arrays], [one.both for one in drives]) if drives else []
        of_slot = {slot: files[path] for slot, path in enumerate(chosen)}
        self.by_kind: dict[ChunkKind, TimedStore] = {}
        for kind, pool in placement.pools.items():
            found = Slots(of_slot, slots.of(kind)) if of_slot else None
            due = is_due if kind is ChunkKind.STATES else _never
            memory, buffers = _without_bytes(pool)
            store = Store(placement.arrays[kind], memory, buffers, found, self.timeline, health, due)
            if kind is not ChunkKind.GRADS:  # values are made before training, and gradients by it
                store.reset({chunk: Version(0, 0) for chunk in range(len(pool.sizes)) if chunk not in memory})
            # What the step of a chunk of states takes is counted with it, in rank.py.
            lease_s = 0.0 if kind is ChunkKind.STATES else speeds.host.moved_s
            self.by_kind[kind] = TimedStore(store, changes, lease_s)

    def __getitem__(self, kind: ChunkKind) -> TimedStore:
        return self.by_kind[kind]

    def get(self, kind: ChunkKind) -> TimedStore | None:
        return self.by_kind.get(kind)


def _never(step: int) -> bool:
    return False


def _without_bytes(pool: Pool) -> tuple[Mapping[int, torch.Tensor], Sequence[torch.Tensor]]:
    """The memory of the resident chunks of a pool, by chunk, and of its buffers, on the meta device."""
    stay = sorted(pool.resident | pool.on_device)
    memory = {chunk: torch.empty(pool.sizes[chunk], dtype=torch.uint8, device="meta") for chunk in stay}
    buffers = [torch.empty(pool.largest, dtype=torch.uint8, device="meta") for _ in range(pool.in_flight)]
    return memory, buffers
