"""Where activations wait between forward and backward: a region of memory, and files for what it lacks room for.

A backward asks for activations in the reverse order of their forward. So those that came last stay in the region, and
the oldest go to the files. Half of the region is kept ready for what comes next, by writing behind what is older; and
the newest of what is not there is read ahead as room becomes free. Nothing of it is ever committed. The files have no
names: they are gone when the store is closed, or the process ends in any way.

What a region on a device has no room for goes to another store beneath it, in RAM. So a device keeps the oldest, and
what came last is brought up again first. Room is given when something is put, in a forward: a backward needs no more.

Bytes of the region and of the files are lent in whole pages, in as many ranges as it takes. So no free page is ever out
of reach, whatever lengths come and go.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
import xxhash
from torch import Tensor, UntypedStorage

from offload import torch_private
from offload.devices.copies import Copier, Copy, HostCopier, stream_handle
from offload.errors import BudgetError, ClosedError, CorruptionError, StaleActivationError, TierIOError
from offload.interrupts import is_of_system, uninterrupted, wait_for_all
from offload.io.engine import IOEngine, IOFile, IOFuture, Transfer
from offload.io.files import Files
from offload.profiling import Event, Timeline, drive_lanes, drive_name
from offload.sizes import PAGE_BYTES, format_bytes, option_bytes, round_up
from offload.storage.directories import require_file_size
from offload.storage.swap_file import memory_of

Range = tuple[int, int]
"""First byte, and the one after the last."""

MOST_COPIES = 2
"""How many activations keep their memory on the device while they leave. That of others is used again by what the
device does after it has copied them."""


MOST_SPARE = 8
"""How many buffers on the device are kept that nobody refers to."""


class Ranges:
    """Lends ranges of bytes.

    Attributes:
        size: how many bytes there are.
        free: how many of these are not lent.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = self.free = size
        self._free = [(0, size)] if size else []

    def grow(self, nbytes: int) -> None:
        """Adds bytes at the end."""
        self.size += nbytes
        self.give([(self.size - nbytes, self.size)])

    def take(self, nbytes: int) -> list[Range]:
        """Lends free bytes: one range if one is long enough, else several.

        Args:
            nbytes: how many. As many have to be free.
        """
        fitting = next((number for number, (start, stop) in enumerate(self._free) if stop - start >= nbytes), None)
        taken: list[Range] = []
        self.free -= nbytes
        while nbytes:
            start, stop = self._free.pop(-1 if fitting is None else fitting)
            cut = min(stop, start + nbytes)
            taken.append((start, cut))
            nbytes -= cut - start
            if cut < stop:
                self._merge([(cut, stop)])
        return taken

    def give(self, ranges: Sequence[Range]) -> None:
        """Takes back what was lent."""
        self.free += sum(stop - start for start, stop in ranges)
        self._merge(ranges)

    def _merge(self, ranges: Sequence[Range]) -> None:
        merged: list[Range] = []
        for start, stop in sorted([*self._free, *ranges]):
            merged.append((merged.pop()[0] if merged and merged[-1][1] == start else start, stop))
        self._free = merged


def _pairs(ones: Sequence[Range], others: Sequence[Range]) -> Iterator[tuple[Range, int]]:
    """The pieces in which one sequence of ranges lies in another one, which is as long.

    Args:
        ones: ranges.
        others: ranges of as many bytes together.

    Yields:
        A range within `ones`, and the byte where it begins in `others`.
    """
    left = deque(others)
    for start, stop in ones:
        while start < stop:
            at, end = left.popleft()
            cut = min(stop, start + end - at)
            yield (start, cut), at
            if at + cut - start < end:
                left.appendleft((at + cut - start, end))
            start = cut


@dataclass(eq=False, slots=True)
class _Entry:
    """An activation that waits.

    Attributes:
        number: its number; later ones have higher numbers.
        nbytes: its bytes.
        memory: its ranges in the region; empty if it is not there.
        disk: its ranges in a file; empty without files.
        copies: copies under way from or into `memory`.
        source: the tensor that was put, until its memory may be used again.
        version: torch's version of `source` when it was put.
        stream: the stream on which it was put, whose work `source` belongs to.
        is_torn: whether `source` was changed before its memory could be used again.
        transfers: transfers under way between `memory` and `disk`.
        is_read: whether `transfers` are reads.
        checksum: of what is written to `disk`; None: it is not written.
        was_used: it was asked for. Only a backward that retains its graph asks for it again.
    """

    number: int
    nbytes: int
    memory: list[Range] = field(default_factory=list)
    disk: list[Range] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    source: Tensor | None = None
    version: int = 0
    stream: int = 0
    is_torn: bool = False
    transfers: list[IOFuture] = field(default_factory=list)
    is_read: bool = False
    checksum: int | None = None
    was_used: bool = False

    @property
    def size(self) -> int:
        """Its bytes, rounded up to whole pages."""
        return round_up(self.nbytes, PAGE_BYTES)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is under way."""
        return all(one.done() for one in self.copies) and all(one.done() for one in self.transfers)


class Stored:
    """The right to get an activation back. A graph of autograd holds it; when it is gone, so are the bytes.

    Attributes:
        entry: the activation.
        store: the store in which it waits.
    """

    __slots__ = ("__weakref__", "entry", "store")

    def __init__(self, entry: _Entry, store: ActivationStore) -> None:
        self.entry = entry
        self.store = store


class _Buffers:
    """Memory of a device. A buffer is lent again when nobody refers to it any more.

    From the second step on nothing is allocated: buffers grow to the longest that is asked for, and there are as many
    as were in use at once. As in torch's own allocator, memory stays with the stream that it was first used on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[tuple[UntypedStorage, int]] = []  # with the stream

    def take(self, nbytes: int) -> Tensor:
        """uint8 of shape (nbytes,), of undefined values. It is lent as long as a tensor refers to its memory."""
        stream = stream_handle(self._device)
        spare = sorted((one for one in self._spare() if one[1] == stream), key=lambda one: one[0].nbytes())
        found = next((one for one in spare if one[0].nbytes() >= nbytes), None)
        if found is None:
            if spare:
                self._made.remove(spare[-1])  # it has grown
            found = UntypedStorage(nbytes, device=self._device), stream
            self._made.append(found)
        for one in spare[:-MOST_SPARE]:
            if one is not found:
                self._made.remove(one)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(found[0], 0, (nbytes,), (1,))

    def drop_spare(self) -> None:
        """Frees those that nobody refers to."""
        for one in self._spare():
            self._made.remove(one)

    def _spare(self) -> list[tuple[UntypedStorage, int]]:
        return [one for one in self._made if torch_private.storage_uses(one[0]._cdata) == 1]


class SpillFiles(Protocol):
    """Files for activations that have no room in RAM.

    Attributes:
        paths: where they are, for people.
    """

    paths: Sequence[str]

    def grow(self, number: int, size: int, nbytes: int) -> None:
        """Makes a file longer.

        Args:
            number: of the file.
            size: its bytes so far.
            nbytes: how many more.

        Raises:
            OSError: as the file system says.
        """

    def begin(self, operation: Literal["read", "write"], number: int, offset: int, memory: Tensor) -> IOFuture:
        """Starts to move bytes between a file and memory.

        Args:
            operation: which way.
            number: of the file.
            offset: the byte of the file at which they begin.
            memory: uint8, 1-D.
        """


class NamelessFiles(SpillFiles):
    """Files without names.

    Args:
        disk: the file system.
        engine: reads and writes the files.
        opened: the files, which belong to the engine, one in each directory of the run.
        timeline: of the run.
    """

    def __init__(self, disk: Files, engine: IOEngine, opened: Sequence[IOFile], timeline: Timeline) -> None:
        self.paths = [file.path for file in opened]
        self._disk = disk
        self._engine = engine
        self._opened = opened
        self._busy = [timeline.busy(drive_name(number)) for number in range(len(opened))]

    def grow(self, number: int, size: int, nbytes: int) -> None:
        self._disk.allocate(self._opened[number], size, nbytes)

    def begin(self, operation: Literal["read", "write"], number: int, offset: int, memory: Tensor) -> IOFuture:
        busy = self._busy[number]

        def ended(transfer: Transfer) -> None:
            busy.ends()
            transfer.resolve()

        transfer = Transfer(operation, self._opened[number], offset, memory_of(memory), ended)
        busy.begins()
        return self._engine.submit(transfer)


class ActivationStore:
    """Where activations wait; see the top of this file. May be called from any thread.

    Args:
        memory: the region, uint8, whole pages.
        copier: copies between the region and `device`.
        device: the device on which activations are made and used.
        timeline: of the run.
        spill: the files for what has no room in the region.
        beneath: the store that takes what has no room here. With neither, such an activation is refused.

    Attributes:
        device: see above.
        peak_bytes: the most bytes that have waited, here and beneath, in whole pages.
        largest_bytes: the bytes of the largest activation here, in whole pages.
    """

    def __init__(
        self,
        memory: Tensor,
        copier: Copier,
        device: torch.device,
        timeline: Timeline,
        spill: SpillFiles | None = None,
        beneath: ActivationStore | None = None,
    ) -> None:
        self._memory = memory
        self._copier = copier
        self.device = device
        self._timeline = timeline
        self._spill = spill
        self._files = () if spill is None else spill.paths
        self._beneath = beneath
        self._region = Ranges(len(memory))
        self._disks = [Ranges() for _ in self._files]
        self._count = 0
        self._present: dict[int, _Entry] = {}
        self._unwritten: dict[int, _Entry] = {}  # in the region alone; the oldest first
        self._leaving: list[_Entry] = []  # nobody asks for them any more, and something is under way
        self._copying: deque[_Entry] = deque()
        self._buffers = _Buffers(device)
        self._brought: tuple[_Entry, Tensor] | None = None  # a copy on the device, ahead of its use
        self._entries: dict[weakref.ref[Stored], _Entry] = {}
        self._dropped: deque[weakref.ref[Stored]] = deque()
        self._process = os.getpid()
        self._is_open = True
        self._lock = threading.RLock()
        self.peak_bytes = self.largest_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that wait now, here and beneath, in whole pages."""
        with self._lock:
            self._reclaim()
            beneath = 0 if self._beneath is None else self._beneath.nbytes
            return beneath + sum(entry.size for entry in self._present.values())

    @uninterrupted
    def put(self, data: Tensor) -> Stored:
        """Keeps an activation. If it is changed in place before it has been copied, it is lost.

        Args:
            data: uint8 of shape (nbytes,), on the device.

        Raises:
            BudgetError: neither the region, the files nor the store beneath has room for it.
            TierIOError: a disk or its file system failed.
            ClosedError: the store is closed, or this is a forked child.
        """
        stored = self._put(data)
        if stored is None:
            raise self._too_small(len(data))
        return stored

    def _put(self, data: Tensor) -> Stored | None:
        """Keeps an activation here or beneath; None if neither has room."""
        with self._lock:
            self._require_usable()
            self._reclaim()
            stored = self._put_here(data)
            if stored is None and self._beneath is not None:
                stored = self._beneath._put(data)
            self.peak_bytes = max(self.peak_bytes, self.nbytes)
            return stored

    def _put_here(self, data: Tensor) -> Stored | None:
        entry = _Entry(self._count, len(data), source=data, version=data._version, stream=stream_handle(self.device))
        if entry.size > len(self._memory):
            return None
        try:
            if not self._find_room(entry, waits=True):
                return None
            self._reserve(entry)
            for (start, stop), at in _pairs(entry.memory, [(0, entry.size)]):
                piece = data[at : at + stop - start]
                entry.copies.append(self._copier.to_host(piece, self._memory[start : start + len(piece)]))
        except BaseException:
            _wait_for_copies(entry)
            self._leave(entry)
            raise
        self._count += 1
        self.largest_bytes = max(self.largest_bytes, entry.size)
        self._present[entry.number] = self._unwritten[entry.number] = entry
        self._copying.append(entry)
        while self._copying and (len(self._copying) > MOST_COPIES or self._copying[0].is_idle):
            self._let_go(self._copying.popleft())
        self._write_behind()
        stored = Stored(entry, self)
        # Called in any thread, at any moment, and by no Python code that a signal could interrupt: the next call of
        # the store sees to it.
        self._entries[weakref.ref(stored, self._dropped.append)] = entry
        return stored

    @uninterrupted
    def get(self, stored: Stored) -> Tensor:
        """A copy of an activation, on the device. It can be asked for again.

        Raises:
            ClosedError: the store is closed, or this is a forked child.
            StaleActivationError: the activation was changed in place before it had been copied.
            TierIOError: a disk or its file system failed.
            CorruptionError: what was read is not what was written.
        """
        return stored.store._get(stored.entry)

    def _get(self, entry: _Entry) -> Tensor:
        with self._lock:
            self._require_usable()
            self._reclaim()
            if not entry.memory:
                self._find_room(entry, waits=True)
                self._begin_read(entry)
            entry.was_used = False  # not to go for what is read ahead
            self._read_ahead(entry)
            if entry.is_read and entry.transfers:
                with self._timeline.waiting("read", tier="activations"):
                    self._end_transfers(entry)
            self._let_go(entry)
            if entry.is_torn:
                raise StaleActivationError(
                    "a tensor that autograd saved was changed in place before it had left the device: change a copy"
                )
            if self._brought is not None and self._brought[0] is entry:
                (_, data), self._brought = self._brought, None
            else:
                data = self._bring(entry)
            for copy in entry.copies:
                copy.wait_on_device()
            entry.was_used = True
            if not self._copier.direct:
                self._bring_ahead(entry)
            return data

    def close(self) -> None:
        """Waits for what is under way. The activations that wait are lost."""
        with self._lock:
            self._is_open = False
            if os.getpid() != self._process:
                return
            for entry in [*self._present.values(), *self._leaving]:
                self._end(entry)
            self._brought = None
            self._buffers.drop_spare()
        if self._beneath is not None:
            self._beneath.close()

    def drop_spare(self) -> None:
        """Frees memory of the device that nobody uses now."""
        with self._lock:
            self._buffers.drop_spare()
        if self._beneath is not None:
            self._beneath.drop_spare()

    def _let_go(self, entry: _Entry) -> None:
        """Lets go of the tensor that was put. What this stream does from now on comes after the copies of the entry.

        The tensor's memory is used again by the stream that it was put on. If that is another one, the host waits.
        """
        if entry.source is not None and entry.stream != stream_handle(self.device):
            _wait_for_copies(entry)
            return
        for copy in entry.copies:
            copy.wait_on_device()
        if entry.source is not None:
            entry.is_torn, entry.source = entry.source._version != entry.version, None

    def _bring(self, entry: _Entry) -> Tensor:
        """Starts to copy an activation to the device."""
        data = self._buffers.take(entry.nbytes)
        for (start, stop), at in _pairs(entry.memory, [(0, entry.size)]):
            piece = data[at : at + stop - start]
            entry.copies.append(self._copier.to_device(self._memory[start : start + len(piece)], piece))
        return data

    def _bring_ahead(self, entry: _Entry) -> None:
        """Copies the activation that will be asked for next, while the device computes with `entry`."""
        following = next(self._older(entry), None)
        if self._brought is not None or following is None or not following.memory:
            return
        if not all(transfer.done() for transfer in following.transfers):
            return
        if following.is_read:
            with suppress(TierIOError, CorruptionError):  # it is raised if it is asked for, and fails again
                self._end_transfers(following)
        self._let_go(following)
        if following.memory and not following.is_torn:
            self._brought = (following, self._bring(following))

    def _older(self, entry: _Entry) -> Iterator[_Entry]:
        """The activations that came before `entry`, the newest first, which is how they will be asked for."""
        return (other for other in reversed(self._present.values()) if other.number < entry.number)

    # Room.

    def _find_room(self, entry: _Entry, *, waits: bool) -> bool:
        """Gives an activation memory in the region.

        Args:
            entry: the activation.
            waits: whether to wait for copies and transfers that are under way.

        Returns:
            Whether there is room.
        """
        while self._region.free < entry.size:
            if waits and self._leaving:
                self._end(self._leaving[0])
                self._reclaim()
            elif (victim := self._victim(entry, is_ready=not waits)) is not None:
                self._evict(victim)
            else:
                return False
        entry.memory = self._region.take(entry.size)
        return True

    def _victim(self, entry: _Entry, *, is_ready: bool) -> _Entry | None:
        """Which activation leaves the region for `entry`: the one that will be asked for last; None if none can.

        Args:
            entry: the activation that needs room.
            is_ready: whether it has to be one that can leave at once, and is asked for later than `entry`.
        """

        def can_go(other: _Entry) -> bool:
            if other is entry or not other.memory or not other.disk:
                return False
            is_later = other.was_used or other.number < entry.number
            return not is_ready or (is_later and other.checksum is not None and other.is_idle)

        found = (other for other in self._present.values() if can_go(other))
        return min(found, key=lambda other: (not other.was_used, other.number), default=None)

    def _evict(self, entry: _Entry) -> None:
        if entry.checksum is None:
            self._begin_write(entry)
        self._end_transfers(entry)
        _wait_for_copies(entry)
        self._region.give(entry.memory)
        entry.memory = []

    def _reclaim(self) -> None:
        """Takes back the room of activations that nobody can ask for any more."""
        while self._dropped:
            entry = self._entries.pop(self._dropped.popleft())
            if self._brought is not None and self._brought[0] is entry:
                _wait_for_copies(entry)
                self._brought = None
            self._present.pop(entry.number, None)
            self._unwritten.pop(entry.number, None)
            self._leaving.append(entry)
        for entry in [one for one in self._leaving if one.is_idle]:
            self._leaving.remove(entry)
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        self._region.give(entry.memory)
        if entry.disk:
            self._disks[self._file_of(entry)].give(entry.disk)
        entry.memory, entry.disk = [], []

    def _end(self, entry: _Entry) -> None:
        """Waits for what is under way of an activation, whether it fails or not."""
        _wait_for_copies(entry)
        wait_for_all(entry.transfers)

    # Files.

    def _file_of(self, entry: _Entry) -> int:
        return entry.number % len(self._files)

    def _reserve(self, entry: _Entry) -> None:
        """Gives an activation room in a file now, because a backward may find none left.

        Raises:
            BudgetError: the disk is full, or the limit of file sizes is too low.
            TierIOError: a disk or its file system failed.
        """
        if self._spill is None:
            return
        number = self._file_of(entry)
        disk, path = self._disks[number], self._files[number]
        missing = entry.size - disk.free
        if missing > 0:
            advice = "give path several directories, which share the activations"
            require_file_size(path, disk.size + missing, advice=advice)
            try:
                self._spill.grow(number, disk.size, missing)
            except OSError as error:
                if not is_of_system(error):
                    raise
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise TierIOError("write", error.errno or errno.EIO, path, disk.size, missing) from error
                raise BudgetError(
                    f"activations need {format_bytes(disk.size + missing)} in {path}, and the disk is full: free "
                    "some, choose another path, or give smaller batches",
                    needed=missing,
                    available=0,
                    option="path",
                ) from error
            disk.grow(missing)
        entry.disk = disk.take(entry.size)

    def _write_behind(self) -> None:
        """Begins to write the oldest activations, so that half of the region can be freed at once."""
        if not self._files:
            return
        nbytes = sum(entry.size for entry in self._unwritten.values())
        while nbytes > len(self._memory) // 2 and len(self._unwritten) > 1:
            entry = next(iter(self._unwritten.values()))
            nbytes -= entry.size
            self._begin_write(entry)

    def _begin_write(self, entry: _Entry) -> None:
        _wait_for_copies(entry)
        self._unwritten.pop(entry.number, None)
        entry.checksum = self._checksum(entry)
        self._begin(entry, "write")

    def _begin_read(self, entry: _Entry) -> None:
        entry.is_read = True
        self._begin(entry, "read")

    def _read_ahead(self, entry: _Entry) -> None:
        """Starts to read what will be asked for next, as far as there is room."""
        for other in self._older(entry) if self._files else ():
            if not other.memory:
                if not self._find_room(other, waits=False):
                    return
                self._begin_read(other)

    def _begin(self, entry: _Entry, operation: Literal["read", "write"]) -> None:
        assert self._spill is not None
        number = self._file_of(entry)
        lane = drive_lanes(number)[operation == "write"]
        for (start, stop), at in _pairs(entry.disk, entry.memory):
            moving = self._timeline.begin(lane, operation, size=stop - start, tier="nvme")
            transfer = self._spill.begin(operation, number, start, self._memory[at : at + stop - start])
            if moving is not None:
                transfer.add_done_callback(partial(_ended, moving))
            entry.transfers.append(transfer)
        self._timeline.count("activation_read_bytes" if entry.is_read else "activation_written_bytes", entry.size)

    def _end_transfers(self, entry: _Entry) -> None:
        """Waits for the transfers of an activation. If one fails, the activation is where it was before.

        Raises:
            TierIOError: a disk or its file system failed.
            CorruptionError: what was read is not what was written.
        """
        transfers, entry.transfers = entry.transfers, []
        is_read, entry.is_read = entry.is_read, False
        try:
            wait_for_all(transfers)  # all of them, before the memory goes
            for transfer in transfers:
                transfer.result()
            if is_read and self._checksum(entry) != entry.checksum:
                path, at = self._files[self._file_of(entry)], entry.disk[0][0]
                raise CorruptionError("an activation is not what was written", file=path, offset=at)
        except BaseException:
            if is_read:
                self._region.give(entry.memory)
                entry.memory = []
            else:
                entry.checksum = None
                self._unwritten[entry.number] = entry
            raise

    def _checksum(self, entry: _Entry) -> int:
        digest = xxhash.xxh3_64()
        for start, stop in entry.memory:
            digest.update(memory_of(self._memory[start:stop]))
        return digest.intdigest()

    def _too_small(self, nbytes: int) -> BudgetError:
        size, beneath = round_up(nbytes, PAGE_BYTES), self._beneath
        what, needed = f"one activation of {format_bytes(size)} is", size
        if not self._files:
            needed += self.nbytes
            what = f"activations of {format_bytes(needed)} are"
        more = "" if beneath is None else f", and RAM has {format_bytes(len(beneath._memory))} for more"
        has_files = self._files or (beneath is not None and beneath._files)
        files = "" if has_files else ", or a path for files"
        return BudgetError(
            f"{what} to wait for the backward, and activation_memory allows {format_bytes(len(self._memory))}{more}: "
            f'give activation_memory="{option_bytes(needed)}" or more, smaller batches{files}',
            needed=needed,
            available=len(self._memory) + (0 if beneath is None else len(beneath._memory)),
            option="activation_memory",
        )

    def _require_usable(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this is a forked child: the activations of its parent are not here")
        if not self._is_open:
            raise ClosedError("the optimizer that held the activations of this graph is closed")


def stacked(
    regions: tuple[Sequence[Tensor], Sequence[Tensor]],
    copier: Copier,
    device: torch.device,
    timeline: Timeline,
    spill: Callable[[], SpillFiles | None],
) -> ActivationStore | None:
    """The store in which activations wait, and the one beneath it.

    Args:
        regions: the memory for them in RAM, and on the device; each has one tensor or none.
        copier: copies between RAM and the device.
        device: the device.
        timeline: of the run.
        spill: opens the files for what RAM has no room for.

    Returns:
        None if there is no memory for them: they wait where they are made.
    """
    store = None
    in_ram, on_device = regions
    for region in in_ram:
        store = ActivationStore(region, copier, device, timeline, spill())
    for region in on_device:
        # What stays on the device is copied there, in the order of its own work.
        store = ActivationStore(region, HostCopier(), device, timeline, beneath=store)
    return store


def _ended(moving: Event, transfer: IOFuture) -> None:
    Timeline.end(moving, failed=transfer.exception() is not None)


def _wait_for_copies(entry: _Entry) -> None:
    for copy in entry.copies:
        copy.wait()
    entry.copies = []
    if entry.source is not None:
        entry.is_torn, entry.source = entry.source._version != entry.version, None
