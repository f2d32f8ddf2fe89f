"""A kept base: quantised frozen parameters in a file of their own, which any number of runs read, and none changes.

[Note: kept base]
The file is called `base-<key>-<layout>`. The key, 32 hex digits, is the digest of all that the values come from: the
bytes of the source, the quantiser, its settings and its library's version. The layout, 16 hex digits, is that of where
each inner tensor lies in it. So one name has one content, whoever makes it, and whoever loses it can make it again: a
run whose base is gone quantises anew.

It is a swap file of format 1 whose run is the key: a superblock, and one slot for each chunk of the frozen parameters,
of step 0. After the slots come a safetensors document, `about` among its tensors: JSON with the elements of each chunk,
bytes an element, and the XXH3-64 of each inner tensor; the other tensors are tables (inner.py). The last page is the
footer: 16 bytes magic, u64 offset and u64 length of that document, and its XXH3-128.

It is made under a name that ends with TEMPORARY, synced, and renamed: what has the name is whole. Runs that begin at
once each make one; the first that is done gives its file the name, and the others use that one.

Everybody who has it open holds its lock, shared. Whoever removes it takes the lock alone, so a base in use stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from offload.errors import CorruptionError, PathError, PathInUseError, StateError, TierIOError
from offload.interrupts import is_of_system, result_of
from offload.io.engine import IOEngine, IOFile, IOFuture, aligned_memory
from offload.io.files import LOCAL, Files
from offload.io.regular import parse_json
from offload.io.threads import ThreadEngine, Workers
from offload.profiling import Timeline
from offload.sizes import MIB, PAGE_BYTES, round_up
from offload.storage.directories import TEMPORARY, check_directory, require_file_size
from offload.storage.slot_map import ChunkKind, SlotMap, SlotTable
from offload.storage.swap_file import (
    CommittedFile,
    SlotFile,
    Slots,
    WrittenSlots,
    first_page,
    lock_shared,
    make_directory,
    open_locked,
    reserve,
)
from offload.storage.swap_format import SlotArrays, Superblock

_NAME = re.compile(rf"base-(?P<key>[0-9a-f]{{32}})-[0-9a-f]{{16}}(?P<made>-[0-9a-f]{{16}}{re.escape(TEMPORARY)})?")
_FOOTER = struct.Struct("<16sQQ16s")
_MAGIC = b"offload base\n\0\0\0"
_ABOUT = "about"


@dataclass(frozen=True)
class BaseName:
    """Which base a run uses.

    Attributes:
        directory: where it lies.
        key: 32 hex digits; see [Note: kept base].
        layout: 16 hex digits.
        names: the names of its inner tensors in the source, in the order of the layout.
    """

    directory: Path
    key: str
    layout: str
    names: Sequence[str]

    @property
    def path(self) -> Path:
        return self.directory / f"base-{self.key}-{self.layout}"


def is_base_name(name: str) -> bool:
    """Whether bases are called so, also while they are made."""
    return _NAME.fullmatch(name) is not None


def is_in_use(path: Path) -> bool:
    """Whether a process has a base open.

    Raises:
        PathError: it cannot be opened or locked.
    """
    try:
        open_locked(path, LOCAL).close()
    except PathInUseError:
        return True
    return False


class KeptBase(WrittenSlots):
    """The base of a run: one that is there, or one that this run makes.

    Args:
        engine: moves the bytes.
        name: which base.
        arrays: what the slot of each chunk of frozen parameters holds.
        files: the run's file system.
        timeline: of the run.

    Attributes:
        names: the names of its inner tensors.
        digests: the XXH3-64 of each inner tensor, by its name in the source.
        tables: the tables of quantised parameters, by name.

    Raises:
        CorruptionError: the base that is there is damaged.
        PathError: the directory or a file cannot be used.
        BudgetError: the disk has no room for it.
        TierIOError: a disk or its file system failed.
    """

    def __init__(
        self, engine: IOEngine, name: BaseName, arrays: Sequence[SlotArrays], files: Files, timeline: Timeline
    ) -> None:
        self._disk, self._name = files, name
        self.names = name.names
        slots = SlotMap({ChunkKind.FROZEN: arrays})
        self._block = Superblock(name.key, 1, (0, 1), False, slots.describe(range(slots.total)))
        self._made: Path | None = None
        self.digests: Mapping[str, str] = {}
        self.tables: Mapping[str, Tensor] = {}
        check_directory(name.directory, files)
        table = SlotTable(slots, range(slots.total))
        with ExitStack() as undo:
            hasher = Workers(1, "offload-checksum")
            undo.callback(hasher.shutdown)
            make_directory(name.directory, files)
            dir_fd = files.hold(name.directory)
            is_there = name.path.name in files.names(name.directory)
            if is_there:
                file = engine.adopt(self._open_whole(table))
            else:
                require_file_size(str(name.path), table.nbytes, option="base", advice="keep the base elsewhere")
                self._remove_leftovers()
                self._made = name.path.with_name(f"{name.path.name}-{secrets.token_hex(8)}{TEMPORARY}")
                file = engine.open(str(self._made), dir_fd=dir_fd, is_new=True)
                undo.callback(self._remove_made)
                lock_shared(file, files)
                reserve(file, files, table.nbytes, table.nbytes, 0, lambda: None)
                page = aligned_memory(PAGE_BYTES)
                page[:] = self._block.encode()
                result_of(engine.write(file, 0, page))
            super().__init__(engine, file, table, name.key, hasher, timeline)
            undo.pop_all()

    @property
    def is_whole(self) -> bool:
        """Whether it has all values. If not, they are to be written, and `finish` called."""
        return self._made is None

    @property
    def slots(self) -> Slots:
        """The slots of the chunks of frozen parameters."""
        numbers = range(self._table.slots.total)
        return Slots(dict.fromkeys(numbers, self), numbers)

    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """See SlotFile.read. All values are of step 0, whichever step the run began at."""
        return super().read(chunk, data, step=0, checksum=checksum)

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        """See WrittenSlots.write.

        Raises:
            StateError: it is whole, so that other runs may read it.
        """
        if self.is_whole:
            raise StateError(f"{self._name.path} is whole, and is not written to any more")
        return super().write(chunk, data, step=0)

    def finish(self, digests: Mapping[str, str], tables: Mapping[str, Tensor]) -> None:
        """Makes the base the one that all runs find, durably. All slots have been written.

        Args:
            digests: what `digests` will be.
            tables: what `tables` will be.

        Raises:
            TierIOError: a disk or its file system failed.
        """
        assert self._made is not None
        rows = self._table.slots.all_arrays
        about = {"numels": [one.numel for one in rows], "itemsizes": [one.itemsizes[0] for one in rows]}
        text = torch.frombuffer(bytearray(json.dumps(about | {"digests": dict(digests)}).encode()), dtype=torch.uint8)
        data = safetensors.torch.save({_ABOUT: text} | {name: table.contiguous() for name, table in tables.items()})
        end = round_up(len(data), PAGE_BYTES)
        memory = aligned_memory(end + PAGE_BYTES)
        memory[: len(data)] = data
        footer = _FOOTER.pack(_MAGIC, self._table.nbytes, len(data), xxhash.xxh3_128_digest(data))
        memory[end : end + len(footer)] = footer
        result_of(self._engine.write(self._file, self._table.nbytes, memory))
        result_of(self._engine.sync(self._file))
        if not self._disk.exists(self._name.path):  # else another run was faster, and made the same
            with failing_as_tier("rename", self._made):
                self._disk.rename(self._made, self._name.path)
                self._disk.sync_directory(self._name.directory)
        self._remove_made()
        made, self._file = self._file, self._engine.adopt(self._open_whole(self._table))
        self._made = None
        made.close()

    def close(self) -> None:
        """Waits until no checksum is being taken or compared. One that was not finished is removed."""
        self._hasher.shutdown(wait=True)
        if not self.is_whole:
            self._remove_made()

    def _remove_made(self) -> None:
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._disk.remove(self._made)

    def _open_whole(self, table: SlotTable) -> IOFile:
        """Opens the base that is there, and reads what it says of itself.

        Raises:
            CorruptionError: it is damaged.
        """
        with told_how():
            opened = CommittedFile(self._name.path, self._disk)
            try:
                if opened.page != self._block.encode():
                    raise CorruptionError("is not the base that its name says", file=opened.path)
                about, self.tables = _read_end(opened, self._disk, table.nbytes)
            except BaseException:
                opened.close()
                raise
            self.digests = about["digests"]
        return opened.file

    def _remove_leftovers(self) -> None:
        """Removes what processes left that were killed while they made this base."""
        for name in self._disk.names(self._name.directory):
            if is_base_name(name) and name.startswith(f"{self._name.path.name}-"):
                with contextlib.suppress(PathError), open_locked(self._name.directory / name, self._disk) as file:
                    page = bytes(first_page(file, self._disk))
                    if not any(page) or page == self._block.encode():
                        self._disk.remove(self._name.directory / name)


@contextlib.contextmanager
def told_how() -> Iterator[None]:
    """A context in which a damaged base is told with what to do about it."""
    try:
        yield
    except CorruptionError as error:
        error.add_note("A kept base can be made again: remove this file, and the next run quantises anew.")
        raise


@contextlib.contextmanager
def failing_as_tier(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_of_system(error):
            raise
        raise TierIOError(operation, error.errno or errno.EIO, str(path), 0, 0, str(error)) from error


def _read_end(opened: CommittedFile, files: Files, start: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What follows the slots of a base.

    Args:
        opened: the base.
        files: the file system.
        start: where it has to begin; None: anywhere.

    Returns:
        What it says of itself, and the tables.

    Raises:
        CorruptionError: it is damaged.
        TierIOError: a disk or its file system failed.
    """

    def read(offset: int, size: int) -> memoryview:
        memory, done = aligned_memory(round_up(size, PAGE_BYTES)), 0
        with failing_as_tier("read", Path(opened.path)):
            while done < size and (count := files.read_at(opened.file, offset + done, memory[done:])):
                done += count
        return memory[:size]

    if opened.size % PAGE_BYTES or opened.size < 2 * PAGE_BYTES:
        raise CorruptionError("was cut off", file=opened.path, offset=opened.size)
    last = opened.size - PAGE_BYTES
    magic, offset, length, checksum = _FOOTER.unpack_from(read(last, PAGE_BYTES))
    is_here = offset + round_up(length, PAGE_BYTES) == last and start in (None, offset)
    if magic != _MAGIC or not is_here:
        raise CorruptionError("has no end that this library wrote", file=opened.path, offset=last)
    data = bytes(read(offset, length))
    if xxhash.xxh3_128_digest(data) != checksum:
        raise CorruptionError("what follows the slots is damaged", file=opened.path, offset=offset)
    try:
        tables = safetensors.torch.load(data)
        about = parse_json(tables.pop(_ABOUT).numpy().tobytes())
        if {*about} != {"numels", "itemsizes", "digests"}:
            raise ValueError("it has other fields")
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptionError(f"what follows the slots cannot be read: {error}", file=opened.path) from error
    return about, tables


def verify(path: Path) -> Iterator[CorruptionError | None]:
    """Reads a base, and compares it with its checksums.

    Args:
        path: the base.

    Yields:
        For each slot what is damaged; None: nothing.

    Raises:
        CorruptionError: it is damaged where it says what is in it.
        PathError: it cannot be opened.
        TierIOError: a disk or its file system failed.
    """
    with told_how(), ExitStack() as stack:
        opened = CommittedFile(path)
        stack.callback(opened.close)
        about, _ = _read_end(opened, LOCAL, None)
        pairs = zip(about["numels"], about["itemsizes"], strict=True)
        slots = SlotMap({ChunkKind.FROZEN: [SlotArrays(numel, (itemsize,)) for numel, itemsize in pairs]})
        engine = ThreadEngine()
        stack.callback(engine.close)
        hasher = Workers(1, "offload-checksum")
        stack.callback(hasher.shutdown)
        table = SlotTable(slots, range(slots.total))
        file = SlotFile(engine, engine.adopt(opened.file), table, opened.block.run_id, hasher)
        buffer = aligned_memory(MIB)
        for slot in range(slots.total):
            try:
                file.verify(slot, buffer, step=0)
                yield None
            except CorruptionError as error:
                yield error
