"""A kept base: quantised frozen parameters in a file of their own, which any number of runs read, and none changes.

[Note: kept base]
The file is called `base-<key>-<contents>`. The key, 32 hex digits, is the digest of all that the values come from: the
bytes of the source, the quantiser, its settings and its library's version. The contents, 16 hex digits, are the digest
of the names, dtypes and sizes of the tensors in it. So one name has one content, whoever makes it, and whoever loses it
can make it again: a run whose base is gone quantises anew.

It holds each inner tensor of the parameters under its name in the source, in the dtype that it was made in, its
elements in the order of its memory. It knows no units, chunks, ranks or compute dtype: a chunk is read from the runs of
elements that it holds, wherever they lie, and what has another dtype there is cast on the way. So it is made once for
all of them.

    page 0               a superblock of a swap file without slots, whose run is the key
    tensors              in the order of `about`, each from a page's beginning, padded with zeros to whole pages
    about                JSON: "tensors", a list of name, dtype, elements, and the XXH3-64 of all its elements
    sums                 u64 each, little-endian: the XXH3-64 of each BLOCK bytes of each tensor, of its last block only
                         the bytes that are there
    the last page        16 bytes magic, u64 offset of `about`, u64 its length, u64 that of both, their XXH3-128

It is made under a name that ends with TEMPORARY, synced, and renamed: what has the name is whole. Runs that begin at
once each make one; the first that is done gives its file the name, and the others use that one.

Everybody who has it open holds its lock, shared. Whoever removes it takes the lock alone, so a base in use stays.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta
from torch import Tensor

from offload.errors import CorruptionError, PathError, PathInUseError, StateError, TierIOError
from offload.interrupts import is_of_system, result_of, uninterrupted
from offload.io.engine import IOEngine, IOFile, IOFuture, Transfer, aligned_memory
from offload.io.files import LOCAL, Files
from offload.io.threads import ThreadEngine, Workers
from offload.profiling import Timeline, drive_lanes
from offload.sizes import MIB, PAGE_BYTES, round_up
from offload.storage.directories import TEMPORARY, check_directory, require_file_size
from offload.storage.swap_file import (
    CommittedFile,
    Slots,
    first_page,
    lock_shared,
    make_directory,
    open_locked,
    reserve,
)
from offload.storage.swap_format import MAX_NUMEL, Superblock

BLOCK = MIB // 4
"""Bytes of a tensor that have a checksum together: what is read beside a run of elements that begins or ends in it."""
WRITTEN_BYTES = 4 * MIB
"""Written at once. Two of these are under way while a base is made."""

_NAME = re.compile(rf"base-(?P<key>[0-9a-f]{{32}})-[0-9a-f]{{16}}(?P<made>-[0-9a-f]{{16}}{re.escape(TEMPORARY)})?")
_FOOTER = struct.Struct("<16sQQQ16s")
_MAGIC = b"offload base 2\n\0"
_MAX_END_BYTES = 128 * MIB
"""Of `about` and the sums together."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),  # MX formats: scales, and two values a byte
    )
}
"""The dtypes that a base can hold, by their names in it."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BaseTensor:
    """A tensor in a base.

    Attributes:
        name: its name in the source.
        dtype: its dtype.
        numel: how many elements it has, in the order of its memory.
        offset: where it begins in the file, in bytes.
        first_block: the number of the checksum of its first block.
    """

    name: str
    dtype: torch.dtype
    numel: int
    offset: int
    first_block: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return -(-self.nbytes // BLOCK)


@dataclass(frozen=True)
class Contents:
    """The tensors in a base, in their order, by name."""

    tensors: Mapping[str, BaseTensor]

    @staticmethod
    def of(tensors: Iterable[tuple[str, torch.dtype, int]]) -> Contents:
        """The contents of a base.

        Args:
            tensors: name, dtype and elements of each tensor.

        Raises:
            ValueError: two have one name.
        """
        found: dict[str, BaseTensor] = {}
        offset, block = PAGE_BYTES, 0
        for name, dtype, numel in tensors:
            if name in found:
                raise ValueError(f"{name[:100]!r} is there twice")
            found[name] = one = BaseTensor(name, dtype, numel, offset, block)
            offset += round_up(one.nbytes, PAGE_BYTES)
            block += one.blocks
        return Contents(found)

    @cached_property
    def end(self) -> int:
        """Where the tensors end in the file, in bytes."""
        return PAGE_BYTES + sum(round_up(one.nbytes, PAGE_BYTES) for one in self.tensors.values())

    @cached_property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(one.blocks for one in self.tensors.values())

    @cached_property
    def digest(self) -> str:
        """16 hex digits; see [Note: kept base]."""
        told = [(one.name, _NAMES[one.dtype], one.numel) for one in self.tensors.values()]
        return str(xxhash.xxh3_64_hexdigest(repr((_MAGIC, BLOCK, told)).encode()))

    @property
    def nbytes(self) -> int:
        """About what the file takes, which also says the names of its tensors."""
        return self.end + round_up(8 * self.blocks, PAGE_BYTES) + 2 * PAGE_BYTES

    @property
    def memory_bytes(self) -> int:
        """What a run that reads the base keeps in RAM for it."""
        return self.block_bytes + round_up(8 * self.blocks, PAGE_BYTES)

    @property
    def block_bytes(self) -> int:
        """What the largest block takes, whole pages."""
        return round_up(min(BLOCK, max((one.nbytes for one in self.tensors.values()), default=0)), PAGE_BYTES)


class BasePart(NamedTuple):
    """`numel` elements of the base's tensor `name` from `start`, which lie in their chunk from `at`."""

    name: str
    start: int
    at: int
    numel: int


class BaseChunk(NamedTuple):
    """What a chunk of frozen parameters holds: elements of a dtype, in runs of elements of the base's tensors."""

    dtype: torch.dtype
    parts: Sequence[BasePart]


@dataclass(frozen=True)
class BaseName:
    """Which base a run uses.

    Attributes:
        directory: where it lies.
        key: 32 hex digits; see [Note: kept base].
        contents: what is in it.
    """

    directory: Path
    key: str
    contents: Contents

    @property
    def path(self) -> Path:
        return self.directory / f"base-{self.key}-{self.contents.digest}"

    @property
    def first_page(self) -> bytes:
        """What its first page has to be."""
        return Superblock(self.key, 1, (0, 1), False, {"held": [], "numels": []}).encode()


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


# Making one.


def is_there(name: BaseName, files: Files) -> bool:
    """Whether a base is there, damaged or not. Makes its directory.

    Raises:
        PathError: the directory cannot be used.
    """
    check_directory(name.directory, files)
    make_directory(name.directory, files)
    files.hold(name.directory)
    return name.path.name in files.names(name.directory)


def make(
    name: BaseName,
    values: Iterable[tuple[str, Tensor]],
    files: Files,
    engine: IOEngine,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Makes a base, durably.

    Args:
        name: which base. Its directory is there.
        values: gives each of its tensors once, by its name there: of shape (numel,), on the CPU.
        files: the file system.
        engine: writes the bytes.
        meanwhile: called after each tensor.

    Raises:
        PathError: the directory or a file cannot be used.
        BudgetError: the disk has no room for it.
        TierIOError: a disk or its file system failed.
    """
    contents = name.contents
    sums, digests = np.zeros(contents.blocks, dtype="<u8"), dict[str, str]()
    # Checked as if the end was of the same size as the first page: what else it takes is little.
    require_file_size(str(name.path), contents.end + PAGE_BYTES, option="base", advice="keep the base elsewhere")
    _remove_leftovers(name, files)
    with ExitStack() as undo:
        file = _new_file(name, files, engine, undo)
        reserve(file, files, contents.end + PAGE_BYTES, contents.end + PAGE_BYTES, 0, lambda: None)
        writer = _Writer(engine, file)
        undo.callback(writer.wait)  # before the memory that is written from goes
        writer.write(0, memoryview(name.first_page))
        for own, tensor in values:
            one, data = contents.tensors[own], memoryview(tensor.view(torch.uint8).numpy().data)
            assert (one.dtype, one.numel) == (tensor.dtype, tensor.numel())
            assert own not in digests
            hasher = xxhash.xxh3_64()
            for block, start in enumerate(range(0, len(data), BLOCK), one.first_block):
                sums[block] = xxhash.xxh3_64_intdigest(data[start : start + BLOCK])
                hasher.update(data[start : start + BLOCK])
            digests[own] = str(hasher.hexdigest()) if len(data) else ""
            writer.write(one.offset, data)
            del tensor, data
            meanwhile()
        assert digests.keys() == contents.tensors.keys()
        about = _About(
            [(one.name, _NAMES[one.dtype], one.numel, digests[own]) for own, one in contents.tensors.items()]
        )
        writer.write(contents.end, memoryview(_end_of(contents.end, msgspec.json.encode(about), sums.tobytes())))
        writer.wait()
        result_of(engine.sync(file))
        if not files.exists(name.path):  # else another run was faster, and made the same
            with failing_as_tier("rename", Path(file.path)):
                files.rename(Path(file.path), name.path)
                files.sync_directory(name.directory)


def _new_file(name: BaseName, files: Files, engine: IOEngine, undo: ExitStack) -> IOFile:
    """Makes a file for a base under a temporary name, and locks it. `undo` removes it unless it got another name."""
    while True:
        path = name.path.with_name(f"{name.path.name}-{secrets.token_hex(8)}{TEMPORARY}")
        file = engine.open(str(path), dir_fd=files.hold(name.directory), is_new=True)
        undo.callback(file.close)
        undo.callback(_remove, path, files)
        lock_shared(file, files)
        if files.stat(file).st_nlink:  # else it was taken for a leftover before it was locked
            return file


def _remove(path: Path, files: Files) -> None:
    with contextlib.suppress(OSError):
        files.remove(path)


def _remove_leftovers(name: BaseName, files: Files) -> None:
    """Removes what processes left that were killed while they made this base."""
    for found in files.names(name.directory):
        if is_base_name(found) and found.startswith(f"{name.path.name}-"):
            with contextlib.suppress(PathError), open_locked(name.directory / found, files) as file:
                page = bytes(first_page(file, files))
                if not any(page) or page == name.first_page:
                    files.remove(name.directory / found)


class _Writer:
    """Writes bytes from any memory to whole pages of a file."""

    def __init__(self, engine: IOEngine, file: IOFile) -> None:
        self._engine, self._file = engine, file
        self._buffers: list[tuple[memoryview, IOFuture | None]]
        self._buffers = [(aligned_memory(WRITTEN_BYTES), None) for _ in range(2)]

    def write(self, offset: int, data: memoryview) -> None:
        """Begins to write, and adds zeros up to whole pages. `data` may be changed afterwards.

        Raises:
            TierIOError: a disk or its file system failed.
        """
        for start in range(0, len(data), WRITTEN_BYTES):
            piece = data[start : start + WRITTEN_BYTES]
            memory, busy = self._buffers.pop(0)
            if busy is not None:
                result_of(busy)
            size = round_up(len(piece), PAGE_BYTES)
            memory[: len(piece)] = piece
            memory[len(piece) : size] = bytes(size - len(piece))
            self._buffers.append((memory, self._engine.write(self._file, offset + start, memory[:size])))

    def wait(self) -> None:
        """Waits for all that was written.

        Raises:
            TierIOError: a disk or its file system failed.
        """
        for _, busy in self._buffers:
            if busy is not None:
                result_of(busy)


# Reading one.


class KeptBase:
    """The base of a run, which is there. It serves the chunks of frozen parameters as the slots of a swap file do.

    Args:
        engine: moves the bytes.
        name: which base.
        frozen: the names in it of the frozen parameters that are read from it, in the order of the layout.
        chunks: what each chunk of these holds.
        files: the run's file system.
        timeline: of the run.

    Attributes:
        names: of all tensors in it.
        frozen: see above.
        digest: of all that is in it, 32 hex digits.

    Raises:
        CorruptionError: it is damaged.
        PathError: it is missing, or cannot be opened.
        TierIOError: a disk or its file system failed.
    """

    def __init__(
        self,
        engine: IOEngine,
        name: BaseName,
        frozen: Sequence[str],
        chunks: Sequence[BaseChunk],
        files: Files,
        timeline: Timeline,
    ) -> None:
        self._engine, self._timeline = engine, timeline
        self._contents, self._chunks = name.contents, chunks
        self.names, self.frozen = name.contents.tensors.keys(), frozen
        self._reads, _, self._hashes = drive_lanes(0)
        self._bounce = aligned_memory(name.contents.block_bytes)
        with ExitStack() as undo:
            self._hasher = Workers(1, "offload-checksum")
            undo.callback(self._hasher.shutdown)
            with told_how():
                opened = CommittedFile(name.path, files)
                undo.callback(opened.close)
                end = _read_end(opened, files)
                if opened.page != name.first_page or end.contents != name.contents:
                    raise CorruptionError("is not the base that its name says", file=opened.path)
            self._end, self.digest = end, end.digest
            self._file = engine.adopt(opened.file)
            undo.pop_all()

    @property
    def slots(self) -> Slots:
        """The slots of the chunks of frozen parameters."""
        numbers = range(len(self._chunks))
        return Slots(dict.fromkeys(numbers, self), numbers)

    @uninterrupted
    def read(self, chunk: int, data: memoryview, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """Reads a chunk; see SlotFile.read. It is the same at each step, and checked block by block.

        Blocks that lie in the chunk as in the file, page by page, are read into it, and all others copied from memory
        of a block.
        """
        moving = self._timeline.begin(self._reads, "read", chunk=chunk, size=len(data), tier="nvme")
        reading = _Reading(chunk, data)
        reading.add_done_callback(lambda done: Timeline.end(moving, failed=done.exception() is not None))
        transfers = []

        def ended(transfer: Transfer) -> None:
            self._hasher.put(None, self._arrived, reading, transfer)

        for part in self._chunks[chunk].parts:
            one, straight = self._contents.tensors[part.name], self._straight(chunk, part)
            if straight:
                begin, start = self._begin(chunk, part), straight.start * BLOCK
                stop = min(straight.stop * BLOCK, one.nbytes)
                view = data[begin + start : begin + stop]
                transfers.append(Transfer("read", self._file, one.offset + start, view, ended))
        reading.left = len(transfers)
        if not transfers:
            self._hasher.put(None, self._arrived, reading, None)
        for transfer in transfers:
            self._engine.submit(transfer)
        return reading

    def write(self, chunk: int, data: memoryview, *, step: int, place: int = 0) -> IOFuture:
        """Refuses to write.

        Raises:
            StateError: always: other runs read it.
        """
        raise StateError(f"{self._file.path} is a kept base, and is not written to")

    def digest_of(self, name: str, dtype: torch.dtype) -> str:
        """The XXH3-64 of a tensor, as a run computes it of its own in a dtype.

        Raises:
            CorruptionError: it had to be read, and is damaged.
            TierIOError: a disk or its file system failed.
        """
        one = self._contents.tensors[name]
        if dtype is one.dtype:
            return self._end.digests[name]
        return str(result_of(self._hasher.submit(self._cast_digest, one, dtype)))

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor.

        Returns:
            A tensor of shape (numel,) on the CPU, in its own dtype.

        Raises:
            CorruptionError: it is damaged.
            TierIOError: a disk or its file system failed.
        """
        return result_of(self._hasher.submit(self._whole, self._contents.tensors[name]))

    def close(self) -> None:
        """Waits until no checksum is being compared."""
        self._hasher.shutdown(wait=True)

    def _begin(self, chunk: int, part: BasePart) -> int:
        """Where the first element of a part's tensor would lie in the chunk's memory, in bytes, if it has its dtype."""
        return PAGE_BYTES + (part.at - part.start) * self._chunks[chunk].dtype.itemsize

    def _straight(self, chunk: int, part: BasePart) -> range:
        """The blocks of a part's tensor that are read straight into the memory of the chunk."""
        one = self._contents.tensors[part.name]
        if one.dtype is not self._chunks[chunk].dtype or self._begin(chunk, part) % PAGE_BYTES:
            return range(0)
        start, stop = (at * one.dtype.itemsize for at in (part.start, part.start + part.numel))
        is_end = stop == one.nbytes and stop % PAGE_BYTES == 0
        return range(-(-start // BLOCK), one.blocks if is_end else stop // BLOCK)

    def _arrived(self, reading: _Reading, transfer: Transfer | None) -> None:
        """Called in the thread of the checksums, for each transfer that has ended."""
        if transfer is not None:
            transfer.resolve()
            reading.left -= 1
            reading.error = reading.error or transfer.error
        if reading.left:
            return
        try:
            if reading.error is not None:
                raise reading.error
            with self._timeline.event(self._hashes, "check", chunk=reading.chunk, size=len(reading.data)):
                for part in self._chunks[reading.chunk].parts:
                    self._complete(reading, part)
        except BaseException as error:  # the thread would swallow it
            reading.set_exception(error)
        else:
            reading.set_result(len(reading.data))

    def _complete(self, reading: _Reading, part: BasePart) -> None:
        """Compares what was read straight with its checksums, and brings the rest of a part."""
        chunk, data = reading.chunk, reading.data
        one, dtype, begin = self._contents.tensors[part.name], self._chunks[chunk].dtype, self._begin(chunk, part)
        straight, size = self._straight(chunk, part), one.dtype.itemsize
        start, stop = part.start * size, (part.start + part.numel) * size
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, one.nbytes)
            if block in straight:
                self._end.require(one, block, data[begin + first : begin + last], chunk)
                continue
            found = self._block(one, block, chunk)
            low, high = max(first, start), min(last, stop)
            if dtype is one.dtype:
                data[begin + low : begin + high] = found[low - first : high - first]
            else:
                count, at = (high - low) // size, PAGE_BYTES + (part.at + low // size - part.start) * dtype.itemsize
                torch.frombuffer(data, dtype=dtype, count=count, offset=at).copy_(
                    torch.frombuffer(found, dtype=one.dtype, count=count, offset=low - first)
                )

    def _block(self, one: BaseTensor, block: int, chunk: int | None = None) -> memoryview:
        """Reads a block into the memory that there is for one, and checks it."""
        size = min(BLOCK, one.nbytes - block * BLOCK)
        pages = self._bounce[: round_up(size, PAGE_BYTES)]
        result_of(self._engine.read(self._file, one.offset + block * BLOCK, pages))
        self._end.require(one, block, pages[:size], chunk)
        return pages[:size]

    def _whole(self, one: BaseTensor) -> Tensor:
        found = torch.empty(one.numel, dtype=one.dtype, device="cpu")
        data = memoryview(found.view(torch.uint8).numpy().data)
        for block in range(one.blocks):
            part = self._block(one, block)
            data[block * BLOCK : block * BLOCK + len(part)] = part
        return found

    def _cast_digest(self, one: BaseTensor, dtype: torch.dtype) -> str:
        hasher = xxhash.xxh3_64()
        for block in range(one.blocks):
            part = torch.frombuffer(self._block(one, block), dtype=one.dtype).to(dtype)
            hasher.update(part.view(torch.uint8).numpy().data)
        return str(hasher.hexdigest()) if one.numel else ""


class _Reading(IOFuture):
    """A chunk that is being read.

    Attributes:
        left: how many transfers have not ended.
        error: the first of theirs.
    """

    def __init__(self, chunk: int, data: memoryview) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.chunk, self.data = chunk, data
        self.left = 0
        self.error: BaseException | None = None


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


# The end of the file.


_DType = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
_Numel = Annotated[int, Meta(ge=0, le=MAX_NUMEL)]
_Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]


class _About(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, _DType, _Numel, _Digest]]


@dataclass(frozen=True)
class End:
    """What a base says of itself.

    Attributes:
        file: the base, for errors.
        contents: the tensors in it.
        digests: the XXH3-64 of each, by name; "" of one without elements.
        sums: those of the blocks.
        digest: the XXH3-128 of all that.
    """

    file: str
    contents: Contents
    digests: Mapping[str, str]
    sums: np.ndarray[tuple[int], np.dtype[np.uint64]]
    digest: str

    def require(self, one: BaseTensor, block: int, data: memoryview, chunk: int | None = None) -> None:
        """Checks a block.

        Args:
            one: the tensor.
            block: the number of the block in it.
            data: its bytes.
            chunk: for the error.

        Raises:
            CorruptionError: it has another checksum.
        """
        if xxhash.xxh3_64_intdigest(data) != int(self.sums[one.first_block + block]):
            problem, offset = f"{one.name}: the data does not match its checksum", one.offset + block * BLOCK
            with told_how():
                raise CorruptionError(problem, chunk=chunk, file=self.file, offset=offset)


def _end_of(offset: int, about: bytes, sums: bytes) -> bytes:
    """What follows the tensors, whole pages."""
    both = about + sums
    footer = _FOOTER.pack(_MAGIC, offset, len(about), len(both), xxhash.xxh3_128_digest(both))
    return both.ljust(round_up(len(both), PAGE_BYTES), b"\0") + footer.ljust(PAGE_BYTES, b"\0")


def parse_end(data: bytes, start: int, file: str) -> End:
    """Parses what follows the tensors of a base.

    Args:
        data: the file from `start` to its end.
        start: where that begins in the file, in bytes: where its last page says that the tensors end.
        file: the base, for errors.

    Raises:
        CorruptionError: it is damaged, or not what this library writes.
    """
    if len(data) % PAGE_BYTES or len(data) < 2 * PAGE_BYTES:
        raise CorruptionError("was cut off", file=file, offset=start + len(data))
    length, size, checksum = _parse_footer(data[-PAGE_BYTES:], start + len(data), file)[1:]
    if len(data) != round_up(size, PAGE_BYTES) + PAGE_BYTES or xxhash.xxh3_128_digest(data[:size]) != checksum:
        raise CorruptionError("what follows the tensors is damaged", file=file, offset=start)
    try:
        about = msgspec.json.decode(data[:length], type=_About)
        if msgspec.json.encode(about) != data[:length]:
            raise ValueError("it is spelled otherwise")
        contents = Contents.of((name, DTYPES[dtype], numel) for name, dtype, numel, _ in about.tensors)
        if contents.end != start or size - length != 8 * contents.blocks:
            raise ValueError("its tensors take other bytes than there are")
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CorruptionError(f"what follows the tensors cannot be read: {error}", file=file, offset=start) from error
    sums = np.frombuffer(data[length:size], dtype="<u8")
    digests = {name: digest for name, _, _, digest in about.tensors}
    return End(file, contents, digests, sums, checksum.hex())


def _parse_footer(page: bytes, end: int, file: str) -> tuple[int, int, int, bytes]:
    """Where `about` begins, its length, that of it and the sums, and their checksum.

    Args:
        page: the last page.
        end: the size of the file.
        file: the base, for errors.

    Raises:
        CorruptionError: it is damaged.
    """
    magic, offset, length, size, checksum = _FOOTER.unpack_from(page)
    last = end - PAGE_BYTES
    is_here = length <= size <= _MAX_END_BYTES and offset + round_up(size, PAGE_BYTES) == last
    if magic != _MAGIC or not is_here or any(page[_FOOTER.size :]):
        raise CorruptionError("has no end that this library wrote", file=file, offset=last)
    return offset, length, size, checksum


def _read_end(opened: CommittedFile, files: Files) -> End:
    """What a base says of itself.

    Raises:
        CorruptionError: it is damaged.
        TierIOError: a disk or its file system failed.
    """

    def read(offset: int, size: int) -> bytes:
        memory, done = aligned_memory(size), 0
        with failing_as_tier("read", Path(opened.path)):
            while done < size and (count := files.read_at(opened.file, offset + done, memory[done:])):
                done += count
        return bytes(memory)

    if opened.size % PAGE_BYTES or opened.size < 2 * PAGE_BYTES:
        raise CorruptionError("was cut off", file=opened.path, offset=opened.size)
    offset = _parse_footer(read(opened.size - PAGE_BYTES, PAGE_BYTES), opened.size, opened.path)[0]
    return parse_end(read(offset, opened.size - offset), offset, opened.path)


def verify(path: Path) -> Iterator[CorruptionError | None]:
    """Reads a base, and compares it with its checksums.

    Args:
        path: the base.

    Yields:
        For each tensor what is damaged; None: nothing.

    Raises:
        CorruptionError: it is damaged where it says what is in it.
        PathError: it cannot be opened.
        TierIOError: a disk or its file system failed.
    """
    with told_how(), ExitStack() as stack:
        opened = CommittedFile(path)
        stack.callback(opened.close)
        contents = _read_end(opened, LOCAL).contents
        engine = ThreadEngine()
        stack.callback(engine.close)
        base = KeptBase(engine, BaseName(path.parent, opened.block.run_id, contents), (), (), LOCAL, Timeline())
        stack.callback(base.close)
        for one in contents.tensors.values():
            try:
                for block in range(one.blocks):
                    base._block(one, block)
                yield None
            except CorruptionError as error:
                yield error
