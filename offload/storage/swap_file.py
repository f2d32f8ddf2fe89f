"""Swap files: opened, locked, reserved, striped over directories, read and written. Their bytes: swap_format.py.

A file belongs to the process that holds its flock. It has its name from its birth on, and no other file ever gets that
name: which files live is what a COMMIT record says (checkpoint/live.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash
from torch import Tensor

from offload.errors import BudgetError, CorruptionError, PathError, PathInUseError, ResumeError, TierIOError, explained
from offload.interrupts import is_of_system, result_of, uninterrupted, wait_for_all
from offload.io.engine import O_DIRECT, IOEngine, IOFile, IOFuture, Transfer, aligned_memory
from offload.io.files import BUSY, LOCAL, Files, unusable
from offload.io.threads import Workers
from offload.profiling import Timeline, drive_lanes, drive_name
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.storage.directories import check_directory, file_name, older_swap_name, require_file_size, swap_name
from offload.storage.room import RECORD, SPARES, Room
from offload.storage.slot_map import ChunkKind, SlotMap, SlotTable
from offload.storage.swap_format import (
    HEADER_BYTES,
    MAGIC,
    SlotHeader,
    Superblock,
    parse_header,
    parse_superblock,
)

_NO_MODES = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What `fchmod` says of another user's file, and where files have no modes."""
_log = logging.getLogger("offload")

IN_USE = "a live run holds this path: close it, or give each run a path of its own"


def _lock(file: IOFile, files: Files, *, exclusive: bool = True) -> None:
    """Locks a swap file. Does not wait for a live process.

    Raises:
        PathInUseError: another process holds it.
        PathError: the file system cannot lock it.
    """
    try:
        files.lock(file, exclusive=exclusive)
    except OSError as error:
        if not is_of_system(error):
            raise
        if error.errno not in BUSY:
            raise PathError(error.errno, f"cannot be locked: {error.strerror}", file.path) from error
        raise PathInUseError(errno.EBUSY, IN_USE, file.path) from error


def lock(file: IOFile, files: Files) -> None:
    """Locks a swap file against all others. Does not wait for a live process.

    Raises:
        PathInUseError: another process holds it, or has just removed it.
        PathError: the file system cannot lock it, or look at it.
    """
    _lock(file, files)
    with unusable("cannot be looked at", file.path):
        links = files.stat(file).st_nlink
    if not links:
        raise PathInUseError(errno.EBUSY, "another run has just removed this file: try again", file.path)


def lock_shared(file: IOFile, files: Files) -> None:
    """Locks a file against those who would remove it. Others may hold it so, too.

    Raises:
        PathInUseError: a process holds it alone.
        PathError: the file system cannot lock it.
    """
    _lock(file, files, exclusive=False)


def is_held(path: Path, files: Files) -> bool:
    """Whether a live run holds a swap file. To know it, takes a reader's lock and gives it back at once.

    Raises:
        PathError: the file cannot be opened or locked.
    """
    try:
        file = files.open(path, os.O_RDONLY)
    except OSError as error:
        if not is_of_system(error):
            raise
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone meanwhile, a link, a socket
            return False
        raise PathError(error.errno, f"cannot be opened: {error.strerror}", str(path)) from error
    with file:
        try:
            _lock(file, files, exclusive=False)
        except PathInUseError:
            return True
        return False


def any_is_held(directory: Path, names: Iterable[str], files: Files) -> bool:
    """Whether a live run holds a swap file among the files of a directory.

    Args:
        directory: the directory.
        names: the names of its files.
        files: the file system.

    Raises:
        PathError: a swap file cannot be opened or locked.
    """
    found = ((name, file_name(name)) for name in names)
    return any(is_held(directory / name, files) for name, file in found if file and file.kind in ("swap", "older"))


def open_locked(path: Path, files: Files) -> IOFile:
    """Opens and locks a swap file that is to be moved or removed.

    Raises:
        PathInUseError: a live run holds it, or has just removed it.
        PathError: it cannot be opened or locked.
    """
    with unusable("cannot be opened", path):
        file = files.open(path, os.O_RDWR)
    try:
        lock(file, files)
    except BaseException:
        file.close()
        raise
    return file


def first_page(file: IOFile, files: Files) -> memoryview:
    """The file's first page, with zeros after the file's end.

    Raises:
        PathError: it cannot be read.
    """
    start = aligned_memory(PAGE_BYTES)
    with unusable("cannot be read", file.path):
        files.read_at(file, 0, start)
    return start


def reserve(
    file: IOFile, files: Files, needed: int, uncommitted: int, beside: int, reserve_beside: Callable[[], None]
) -> None:
    """Allocates the file's blocks now, so that a full disk shows before training and not in it.

    Args:
        file: the file.
        files: the file system.
        needed: the bytes that it will have.
        uncommitted: the bytes that it would have without commits.
        beside: the bytes that files beside it will take.
        reserve_beside: allocates these.

    Raises:
        BudgetError: the disk has no room for it.
        PathError: the file system refuses for another reason.
    """
    with unusable("cannot be looked at", file.path):
        info = files.stat(file)
        available = files.available(file) + info.st_blocks * 512
    with unusable("cannot be made private", file.path):
        _make_private(file, files)
    try:
        if needed + beside > available:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        files.allocate(file, 0, needed)
        reserve_beside()
    except OSError as error:
        # What was allocated before the disk was full goes back; what was there before stays.
        files.truncate(file, info.st_size)
        if not is_of_system(error):
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise PathError(error.errno, f"cannot reserve space: {explained(error)}", file.path) from error
        needed += beside
        refused, what = "", "some"
        if needed <= available:
            refused, what = f", but {error.strerror!r} came", "some of your quota, or of the inodes (df -i)"
        fits = uncommitted <= available < needed
        other = f", or give commit_every=None, which takes {format_bytes(uncommitted)} and commits nothing"
        raise BudgetError(
            f"{file.path} needs {format_bytes(needed)} of disk and {format_bytes(available)} are free{refused}: "
            f"free {what}, or choose another path{other if fits else ''}",
            needed=needed,
            available=available,
            option="commit_every" if fits else "path",
        ) from error


def _make_private(file: IOFile, files: Files) -> None:
    """Lets only the file's owner open it, where that can be said."""
    try:
        files.make_private(file)
    except OSError as error:
        if not is_of_system(error) or error.errno not in _NO_MODES:
            raise
        _log.warning("%s: its mode cannot be set (%s): others may be able to read it", file.path, error.strerror)


def new_run_id() -> bytes:
    """16 random bytes: no two runs have the same."""
    return secrets.token_bytes(16)


@dataclass(frozen=True)
class RunFiles:
    """Whose swap files these are.

    Attributes:
        run_id: 16 bytes, the same in all files of a run.
        rank: the rank that has the files.
        resumed: for each committed slot, the number of the directory whose file holds it. The files are there and are
            used where they lie. None: new files are made.
        room: the bytes of a manifest, and of the record, in each directory; see [Note: room for commits] in room.py.
        files: the run's file system, which holds the directories from then on.
    """

    run_id: bytes = field(default_factory=new_run_id)
    rank: int = 0
    resumed: Sequence[int] | None = None
    files: Files = field(default_factory=Files)
    room: Mapping[str, int] = field(default_factory=dict)

    def room_in(self, stripe: int) -> dict[str, int]:
        """The bytes of what is written anew in a directory: the record only in the home."""
        is_home = (self.rank, stripe) == (0, 0)
        return {kind: nbytes for kind, nbytes in self.room.items() if is_home or kind != RECORD}


class SlotFile:
    """The slots in one open swap file, as they are read.

    A slot is called by its number in `SlotMap`, and its places A, B and C by 0, 1 and 2.

    Args:
        engine: moves the bytes, and has the file open.
        file: the swap file.
        table: where its slots lie.
        run_id: 32 hex digits, the run that writes the file.
        hasher: takes and compares checksums, beside the transfers.
        timeline: of the run.
        stripe: which of the rank's files this is.
    """

    def __init__(
        self,
        engine: IOEngine,
        file: IOFile,
        table: SlotTable,
        run_id: str,
        hasher: Workers,
        timeline: Timeline | None = None,
        stripe: int = 0,
    ) -> None:
        self._engine = engine
        self._file = file
        self._table = table
        self._run_id = run_id
        self._hasher = hasher
        self._timeline = timeline or Timeline()
        self._reads, self._writes, self._hashes = drive_lanes(stripe)
        self._busy = self._timeline.busy(drive_name(stripe))
        self._checksums: dict[tuple[int, int], int] = {}  # by slot and place, of what was written here last

    @property
    def path(self) -> str:
        return self._file.path

    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """Reads a slot, and checks that it is what was written there as the result of `step`.

        Args:
            chunk: the number of the slot.
            data: the memory, as long as the slot.
            step: the step.
            place: A (0), B (1) or C (2).
            checksum: the one that the header has to name; None: any.

        Returns:
            A future. It raises CorruptionError if the slot is something else, and the engine's errors.
        """
        moving = self._timeline.begin(self._reads, "read", chunk=chunk, size=len(data), tier="nvme")

        def arrived(transfer: Transfer) -> None:
            self._busy.ends()
            Timeline.end(moving, failed=transfer.error is not None)
            if transfer.error is not None:
                transfer.resolve()
            else:
                self._hasher.put(None, _guarded, self._check, transfer, chunk, step, checksum)

        transfer = Transfer("read", self._file, self._table.offset(chunk, place), data, arrived)
        self._busy.begins()
        return self._engine.submit(transfer)

    def _check(self, transfer: Transfer, chunk: int, step: int, checksum: int | None) -> None:
        data, offset = transfer.view, transfer.offset
        with self._timeline.event(self._hashes, "check", chunk=chunk, size=len(data)):
            header = self._header(data, chunk, offset, step, checksum)
            self._require_sum(xxhash.xxh3_64_intdigest(data[PAGE_BYTES:]), header, offset)
        transfer.resolve()

    def verify(self, chunk: int, buffer: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> None:
        """Reads a slot piece by piece, and checks it as `read` does. It takes no more memory than `buffer`.

        Args:
            chunk: the number of the slot.
            buffer: the memory for a piece, whole pages.
            step: the step whose result it has to be.
            place: A (0), B (1) or C (2).
            checksum: the one that the header has to name; None: any.

        Raises:
            CorruptionError: the slot is not what was written there as the result of `step`.
            TierIOError: a disk or its file system failed.
        """
        offset, size = self._table.offset(chunk, place), self._table.slots.all_arrays[chunk].nbytes
        hasher, header = xxhash.xxh3_64(), None
        for start in range(0, size, len(buffer)):
            data = buffer[: min(len(buffer), size - start)]
            result_of(self._engine.read(self._file, offset + start, data))
            if header is None:
                header = self._header(data, chunk, offset, step, checksum)
                data = data[PAGE_BYTES:]
            hasher.update(data)
        assert header is not None
        self._require_sum(hasher.intdigest(), header, offset)

    def _header(self, data: memoryview, chunk: int, offset: int, step: int, checksum: int | None) -> SlotHeader:
        """The header of a slot.

        Args:
            data: the beginning of the slot.
            chunk: the number of the slot.
            offset: where the slot begins in the file.
            step: the step whose result it has to be.
            checksum: the one that the header has to name; None: any.

        Raises:
            CorruptionError: it is damaged, or not the header that is wanted.
        """
        header = parse_header(data[:PAGE_BYTES], self.path, offset, chunk)
        numel = self._table.slots.all_arrays[chunk].numel
        if problem := header.problem(self._run_id, chunk, step, numel, checksum):
            raise CorruptionError(problem, chunk=chunk, file=self.path, offset=offset)
        return header

    def _require_sum(self, found: int, header: SlotHeader, offset: int) -> None:
        """Checks that the data of a slot have the checksum that its header names.

        Args:
            found: the checksum of the data.
            header: the header of the slot.
            offset: where the slot begins in the file.

        Raises:
            CorruptionError: they have another one.
        """
        if found != header.checksum:
            problem = "the slot's data does not match its checksum"
            raise CorruptionError(problem, chunk=header.chunk, file=self.path, offset=offset)


class WrittenSlots(SlotFile):
    """The slots in one open swap file, as they are written, too. The arguments are SlotFile's."""

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        """Adds padding, checksum and header to a slot, and writes it.

        Args:
            chunk: the number of the slot.
            data: the whole slot, of which the first page is for the header.
            step: the step whose result it is.
            place: A (0), B (1) or C (2).

        Returns:
            A future. It raises the engine's errors.
        """
        transfer = Transfer("write", self._file, self._table.offset(chunk, place), data, self._written)
        self._hasher.put(None, _guarded, self._seal, transfer, chunk, step, place)
        return transfer

    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """See SlotFile.read. Without `checksum`, the header has to name that of what this run wrote there last.

        So a write that a drive has lost is found even if what was there before is of the same step.
        """
        checksum = self._checksums.get((chunk, place)) if checksum is None else checksum
        return super().read(chunk, data, step=step, place=place, checksum=checksum)

    def _seal(self, transfer: Transfer, chunk: int, step: int, place: int) -> None:
        data, slot = transfer.view, self._table.slots.all_arrays[chunk]
        with self._timeline.event(self._hashes, "seal", chunk=chunk, size=len(data)):
            for _, _, end in slot.ranges():
                data[end : round_up(end, PAGE_BYTES)] = bytes(-end % PAGE_BYTES)
            checksum = self._checksums[chunk, place] = xxhash.xxh3_64_intdigest(data[PAGE_BYTES:])
            data[:HEADER_BYTES] = SlotHeader(self._run_id, chunk, step, slot.numel, checksum).encode()
        moving = self._timeline.begin(self._writes, "write", chunk=chunk, size=len(data), tier="nvme")
        if moving is not None:
            transfer.add_done_callback(lambda _: Timeline.end(moving, failed=transfer.error is not None))
        self._busy.begins()
        self._engine.submit(transfer)

    def _written(self, transfer: Transfer) -> None:
        self._busy.ends()
        transfer.resolve()

    def checksum(self, chunk: int, place: int = 0) -> int:
        """The XXH3-64 of the data that the last `write` to a place of a slot wrote. That write has to have ended."""
        return self._checksums[chunk, place]


class SwapFile(WrittenSlots):
    """The slots of one rank in one directory, as a run reads and writes them; see [Note: swap file format 1].

    Making one makes the file, or opens the one that is resumed, locks it and reserves its space. If that fails, nothing
    of another run is lost, and what was made is removed.

    Args:
        engine: moves the bytes.
        directory: the directory, which is made with mode 0700 if it is missing.
        slots: all slots of the rank.
        run: whose file it is.
        numbers: the slots in this file, in the order in which they lie; None: all.
        stripe: which of the rank's files this is, and of how many.
        timeline: of the run.

    Raises:
        PathError: the directory or the file cannot be used, or the file is somebody else's.
        PathInUseError: a live run holds the file.
        BudgetError: the disk has no room for the file, the limit of file sizes is too low, or the system refuses a
            thread.
        ResumeError: the directory does not hold the file that is to be resumed.
        CorruptionError: the file that is to be resumed is damaged.
        TierIOError: a disk or its file system failed.
    """

    def __init__(
        self,
        engine: IOEngine,
        directory: Path,
        slots: SlotMap,
        run: RunFiles,
        *,
        numbers: Sequence[int] | None = None,
        stripe: tuple[int, int] = (0, 1),
        timeline: Timeline | None = None,
    ) -> None:
        resumes = run.resumed is not None
        self._disk = files = run.files
        check_directory(directory, files)
        numbers = range(slots.total) if numbers is None else numbers
        table = SlotTable(slots, numbers)
        self._is_permanent = False
        # What takes away again what would be left where the run does not begin.
        self._traces = ExitStack()
        self._size_before: int | None = None
        path = directory / swap_name(run.run_id.hex(), run.rank)
        advice = "give path several directories, which share the chunks"
        require_file_size(str(path), table.nbytes, advice=advice)
        with ExitStack() as undo:
            # Checksums are taken beside the step and the transfers; XXH3 outruns any drive on one core. Its thread may
            # be refused, so it begins before there are files.
            hasher = Workers(1, "offload-checksum")
            undo.callback(hasher.shutdown)
            if not files.holds(directory) and make_directory(directory, files):
                undo.callback(remove_if_empty, directory, files)
            dir_fd = files.hold(directory)
            is_new = path.name not in files.names(directory)
            if is_new and resumes:
                raise ResumeError(f"{path}, a file of the committed run, is missing: was it moved or removed?")
            if not (is_new or resumes):
                raise PathError(errno.EEXIST, "is there already: no run uses a name again", str(path))
            file = engine.open(str(path), dir_fd=dir_fd, is_new=is_new)
            undo.callback(file.close)
            super().__init__(engine, file, table, run.run_id.hex(), hasher, timeline, stripe[0])
            lock(file, files)
            undo.push(self._traces)
            if is_new:
                self._traces.callback(self._remove, file)
            commits = slots.committed is not None
            superblock = Superblock(self._run_id, slots.versions, stripe, commits, slots.describe(numbers))
            block = aligned_memory(PAGE_BYTES)
            block[:] = superblock.encode()
            self._older = directory / older_swap_name(run.rank), block
            self._shut_out: IOFile | None = None
            if resumes:
                _require_same(file, files, block)
                self._size_before = files.size(file)
            # Before the file grows beyond this page: so a longer one of zeros is never one of this library's.
            is_marked = not resumes and self._mark(block)
            room = Room(directory, self._run_id, run.rank, files)
            spares = run.room_in(stripe[0]), 1 if resumes else SPARES
            beside = room.missing(*spares), partial(room.reserve, *spares, self._traces)
            reserve(file, files, table.nbytes, table.uncommitted_nbytes, *beside)
            if not (resumes or is_marked):
                result_of(engine.write(file, 0, block))
            self._undo = undo.pop_all()
        try:
            self.shut_out_older(writes=resumes)
        except BaseException:
            self.abandon()
            raise

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is on."""
        return self._file.direct

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        self._size_before = None
        return super().write(chunk, data, step=step, place=place)

    def sync(self) -> IOFuture:
        """Makes durable what was written before; see IOEngine.sync."""
        return self._engine.sync(self._file)

    def make_permanent(self) -> None:
        """Records that the run has begun, or that a commit may name this file: `close` does not remove it then."""
        self._is_permanent = True

    def close(self) -> None:
        """Waits until no checksum is being taken or compared. The engine's `close` frees the lock.

        A new file that was not made permanent is removed, because no commit names it, and none is going to. A file that
        was to be resumed, and was not written to, gets the size back that it had.
        """
        self._hasher.shutdown(wait=True)
        size, self._size_before = self._size_before, None
        if size is not None and size < self._table.nbytes:
            with contextlib.suppress(OSError):
                self._disk.truncate(self._file, size)
        if not self._is_permanent:
            with contextlib.suppress(OSError):
                self._traces.close()

    def abandon(self) -> None:
        """Closes, and removes what was made. For a run that did not begin."""
        self.close()
        self._undo.close()

    def shut_out_older(self, *, writes: bool = True) -> None:
        """Holds the file that versions before COMMIT format 2 lock, and in which they look for a run.

        It is one page, a copy of the superblock. What is longer is a swap file of such a version, which is only read:
        when that is removed, this is called again.

        Args:
            writes: whether the page becomes this run's if it is another one's, which may still live.

        Raises:
            PathError: it is somebody else's.
            PathInUseError: a live run holds it.
            TierIOError: a disk or its file system failed.
        """
        (path, block), files = self._older, self._disk
        with ExitStack() as undo:
            is_new = False
            if (file := self._shut_out) is None:
                is_new = path.name not in files.names(path.parent)
                file = self._engine.adopt(_opened(path, files))
                undo.callback(file.close)
                if files.size(file) > PAGE_BYTES and first_page(file, files)[: len(MAGIC)] == MAGIC:
                    return
                lock(file, files)
                if is_new:
                    undo.callback(self._remove, file)
            start = first_page(file, files)
            if (any(start) and start[: len(MAGIC)] != MAGIC) or files.size(file) > PAGE_BYTES:
                raise PathError(errno.EEXIST, "is no file of this library: move it, or choose another path", file.path)
            if start != block and (writes or not any(start)):
                result_of(self._engine.write(file, 0, block))
                result_of(self._engine.sync(file))
            self._shut_out = file
            undo.pop_all()
            self._traces.callback(file.close)
            if is_new:
                self._traces.callback(self._remove, file)

    def _mark(self, block: memoryview) -> bool:
        """Writes the superblock, durably.

        Returns:
            Whether the disk has room for it.

        Raises:
            TierIOError: a disk or its file system failed.
        """
        try:
            result_of(self._engine.write(self._file, 0, block))
            result_of(self.sync())
        except TierIOError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return True

    def require_here(self) -> None:
        """Checks that directory and file are still what their names lead to, and that the file has its size.

        Raises:
            PathError: one was moved, removed or cut off. What is committed must be there to be found.
        """
        file = self._file.path
        self._disk.require_here(Path(file).parent)
        if not self._disk.leads_to(Path(file), self._file):
            raise PathError(
                errno.ESTALE,
                "is not the file that this run opened, which was moved or removed: move it back and commit again, or "
                "start again",
                file,
            )
        with unusable("cannot be looked at", file):
            size = self._disk.size(self._file)
        if size < self._table.nbytes:
            raise PathError(
                errno.ESTALE,
                f"was cut off at {size} of {self._table.nbytes} bytes while this run used it: start again",
                file,
            )

    def _remove(self, file: IOFile) -> None:
        """Removes a file, if it is still the one that has its name.

        Raises:
            OSError: the operating system refused.
        """
        path = Path(file.path)
        if self._disk.leads_to(path, file):
            self._disk.remove(path)


def memory_of(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, without a copy; none of one on the meta device, which has none."""
    return memoryview(b"") if buffer.is_meta else memoryview(buffer.numpy().data)


def _guarded(work: Callable[..., None], transfer: Transfer, *about: int | None) -> None:
    """Calls `work`. An exception becomes the transfer's, because the pool's thread would swallow it."""
    try:
        work(transfer, *about)
    except BaseException as error:
        transfer.error = error
        transfer.resolve()


def _opened(path: Path, files: Files) -> IOFile:
    """Opens a regular file to read and write, and makes it if it is not there.

    Raises:
        PathError: it cannot be opened, or is no regular file.
    """
    with unusable("cannot be opened", path), ExitStack() as undo:
        file = files.open_or_create(path)
        undo.callback(file.close)
        files.require_regular(file)
        undo.pop_all()
    return file


def make_directory(directory: Path, files: Files) -> bool:
    """Makes a directory.

    Returns:
        Whether it was missing.

    Raises:
        PathError: it cannot be made.
    """
    with unusable("cannot be made", directory):
        return files.make_directory(directory)


def remove_if_empty(directory: Path, files: Files) -> None:
    """Removes a directory if it is empty, and can be removed."""
    with contextlib.suppress(OSError):
        files.remove_directory(directory)


def _require_same(file: IOFile, files: Files, block: memoryview) -> None:
    found = first_page(file, files)
    end = len(bytes(block).rstrip(b"\0"))
    if found[:end] == block[:end] and found != block:
        raise CorruptionError("is damaged after the text of its superblock", file=file.path, offset=end)
    if found != block:
        raise ResumeError(
            f"{file.path} is not the file that was committed here, or the directories are named in another order: give "
            "them as the run had them"
        )


def assign(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The path of each chunk, by number. It is computed from these arguments alone, so that a plan and a run agree.

    Each chunk goes to the path that would be done with it first. So every path has its share of any stretch of the
    order, not only of the whole, and all of them work at all times.

    Args:
        sizes: the bytes of each chunk, in the order of a step.
        weights: the bandwidth of each path, in any unit, positive.
    """
    loads = [0.0] * len(weights)
    chosen = []
    for size in sizes:
        path = min(range(len(weights)), key=lambda number: ((loads[number] + size) / weights[number], number))
        loads[path] += size
        chosen.append(path)
    return chosen


class HasSlots(Protocol):
    """What slots are read from and written to, by their numbers: see WrittenSlots."""

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture: ...

    def read(
        self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None
    ) -> IOFuture: ...


class Slots:
    """The slots of the chunks of one kind.

    Args:
        files: the file of each slot of the rank, by the number of the slot.
        numbers: the numbers of the slots, by chunk.
    """

    def __init__(self, files: Mapping[int, HasSlots], numbers: Sequence[int]) -> None:
        self._files = files
        self._numbers = numbers

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        """See SwapFile.write."""
        number = self._numbers[chunk]
        return self._files[number].write(number, data, step=step, place=place)

    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """See SlotFile.read."""
        number = self._numbers[chunk]
        return self._files[number].read(number, data, step=step, place=place, checksum=checksum)


class Stripes:
    """All slots of a rank, over several directories.

    If one of its files cannot be used, nothing is left behind in any of the directories.

    Args:
        engine: moves the bytes.
        directories: one or more, all different.
        weights: the bandwidths of the directories.
        slots: the slots of the rank.
        run: whose files they are; None: a new run.
        timeline: of the run.
        resident: the slots of chunks that stay in RAM, which seldom move.

    Attributes:
        map: the slots of the rank.
        run_id: 16 bytes.
        chosen: for each slot, the number of its directory.

    Raises:
        OffloadError: what `SwapFile` raises.
    """

    def __init__(
        self,
        engine: IOEngine,
        directories: Sequence[Path],
        weights: Sequence[float],
        slots: SlotMap,
        run: RunFiles | None = None,
        *,
        timeline: Timeline | None = None,
        resident: Collection[int] = (),
    ) -> None:
        run = run or RunFiles()
        for directory in directories:
            check_directory(directory, run.files)
        chosen = assign([slot.nbytes for slot in slots.all_arrays], weights)
        if run.resumed is not None:
            chosen[: len(run.resumed)] = run.resumed
        self.map = slots
        self.run_id = run.run_id
        self.chosen = tuple(chosen)
        self._stripes: list[SwapFile] = []
        self._files: dict[int, SwapFile] = {}
        self._syncs: list[IOFuture] = []
        with ExitStack() as undo:
            for number, directory in enumerate(directories):
                # The chunks that move lie side by side: a drive reads on faster than it skips.
                numbers = [slot for slot, path in enumerate(chosen) if path == number]
                numbers.sort(key=lambda slot: slot in resident)
                stripe = (number, len(directories))
                with unusable("cannot be used", directory):
                    file = SwapFile(engine, directory, slots, run, numbers=numbers, stripe=stripe, timeline=timeline)
                undo.callback(file.abandon)
                self._stripes.append(file)
                self._files |= dict.fromkeys(numbers, file)
            undo.pop_all()

    def of(self, kind: ChunkKind) -> Slots | None:
        """The slots of the chunks of one kind; None if it has none."""
        numbers = self.map.of(kind)
        return Slots(self._files, numbers) if numbers else None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the swap files."""
        return tuple(file.path for file in self._stripes)

    def checksum(self, slot: int, place: int = 0) -> int:
        """See SwapFile.checksum."""
        return self._files[slot].checksum(slot, place)

    def sync(self) -> None:
        """Makes durable, in all files, what was written before.

        Raises:
            TierIOError: a disk failed. An earlier call that was interrupted may have begun the sync: a disk says it
                only once, and nothing after that is trusted.
        """
        wait_for_all(self._syncs)
        for future in self._syncs:
            # What else an earlier call was interrupted by has been raised there, and says nothing of the disk.
            if isinstance(error := future.exception(), TierIOError):
                raise error
        self._begin_syncs()
        for future in self._syncs:
            result_of(future)

    @uninterrupted
    def _begin_syncs(self) -> None:
        self._syncs = [file.sync() for file in self._stripes]

    def require_here(self) -> None:
        """See SwapFile.require_here."""
        for file in self._stripes:
            file.require_here()

    def shut_out_older(self) -> None:
        """See SwapFile.shut_out_older. To be called when no other run lives in the directories."""
        for file in self._stripes:
            file.shut_out_older()

    def make_permanent(self) -> None:
        """See SwapFile.make_permanent."""
        for file in self._stripes:
            file.make_permanent()

    def close(self) -> None:
        for file in self._stripes:
            file.close()


class CommittedFile:
    """A swap file that is opened to be read: past the page cache where that works. It is never changed.

    It holds a shared lock until `close()`: others may read it too, but no run starts on it meanwhile.

    Args:
        path: the file's path.
        files: the file system.
        exclusive: whether to lock it against other readers, too.

    Attributes:
        path: the file's path.
        file: the open file, for an engine.
        page: the bytes of its first page.
        block: the superblock in that page.
        size: its bytes.

    Raises:
        PathError: it cannot be opened or locked, or is no regular file.
        PathInUseError: a live run holds it.
        CorruptionError: its superblock is damaged, or is none of this library's.
        ResumeError: a newer version of this library wrote it.
        TierIOError: a disk or its file system failed.
    """

    def __init__(self, path: Path, files: Files = LOCAL, *, exclusive: bool = False) -> None:
        self.path = str(path)
        self._disk = files
        try:
            # NFS gives an exclusive lock only to who may write.
            self.file = files.open(path, O_DIRECT | (os.O_RDWR if exclusive else os.O_RDONLY))
        except OSError as error:
            if not is_of_system(error):
                raise
            why = "is a symlink: replace the link by the swap file"
            if error.errno != errno.ELOOP:
                why = f"cannot open the swap file: {error.strerror}"
            raise PathError(error.errno, why, self.path) from error
        try:
            info = files.stat(self.file)
            if not stat.S_ISREG(info.st_mode):
                raise PathError(errno.EINVAL, "is no regular file", self.path)
            self.size = info.st_size
            _lock(self.file, files, exclusive=exclusive)
            page = aligned_memory(PAGE_BYTES)
            self.page = bytes(page[: self._read(page)])
            self.block = parse_superblock(self.page, self.path)
        except BaseException:
            self.close()
            raise

    def _read(self, page: memoryview) -> int:
        """Fills `page` from the beginning of the file.

        Returns:
            How many bytes were read, fewer only at the end of the file.

        Raises:
            TierIOError: a disk or its file system failed.
        """
        try:
            return self._disk.read_at(self.file, 0, page)
        except OSError as error:
            if not is_of_system(error):
                raise
            raise TierIOError("read", error.errno or errno.EIO, self.path, 0, len(page)) from error

    def close(self) -> None:
        """Closes the file, which frees its lock. May be called again."""
        self.file.close()
