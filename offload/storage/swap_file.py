"""Swap files: a superblock, then a slot for every chunk and place.

[Note: swap file format 1]
All integers little-endian, all blocks whole pages. Page 0 is the superblock: 16 bytes magic, u32 format version, u32
length of the text, u64 XXH3-64 of the text, and the text, JSON: {"run_id", "places", "stripe": [this file, of how
many], "chunks": {"held": those here, "numels": elements of each of the run}, "commits": whether this run ever commits
(false: nothing in the file can be resumed from)}; where the page is too small for "chunks", {"xxh3": its digest}.
A slot is one page of header (see `_HEADER`), then the arrays of the chunk's record, each padded with zeros to whole
pages: master, exp_avg and exp_avg_sq, fp32; with a split master its low halves, 16 bits each, in place of the first,
and the superblock's "chunks" have "itemsizes": bytes an element of each array. The header carries run id, chunk, step,
element count and the XXH3-64 of what follows it, and ends with the XXH3-64 of itself. `places` slots a chunk, all of
place 0 first: with two, the new version of a chunk goes beside the committed one. What is never committed, gradients
and parameters in slots, follows with one place each; where a run commits, "chunks" are the others alone.

A file belongs to the process that holds its flock. It is never shortened, and never deleted here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from offload.errors import CorruptionError, PathError, ResumeError, TierIOError
from offload.interrupts import result_of
from offload.io.engine import IOEngine, IOFile, IOFuture
from offload.io.workers import Workers
from offload.layout import Layout
from offload.profiling import Event, Timeline, drive_lanes
from offload.sizes import PAGE_BYTES, round_up
from offload.storage.claim import first_page, lock, page, reserve
from offload.storage.directories import ASIDE, MAGIC, SUPERBLOCK, check_directory, swap_name
from offload.storage.files import LOCAL, Directories

FORMAT = 1
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
WHOLE = (4, 4, 4)
"""Bytes an element of each state kind in a slot."""
SPLIT = (2, 4, 4)
"""The same with a split master: its upper half is the 16-bit parameter, which is in RAM anyway."""
_DTYPES = {2: torch.int16, 4: torch.float32}
_HEADER = struct.Struct("<8sI16sQQQQ")  # magic, format, run id, chunk, step, elements, checksum of the payload
_HEADER_MAGIC = b"off slot"
_CHECKSUM = struct.Struct("<Q")


class Record(NamedTuple):
    """What one slot holds: arrays of `numel` elements each.

    itemsizes: bytes an element of each array: 4 is fp32, 2 the low halves of a split master, as int16.
    """

    numel: int
    itemsizes: tuple[int, ...] = WHOLE

    @property
    def nbytes(self) -> int:
        """Bytes of the slot, header included, in RAM and on disk."""
        return PAGE_BYTES + sum(round_up(itemsize * self.numel, PAGE_BYTES) for itemsize in self.itemsizes)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """For each array: its itemsize, and where its bytes begin and end in the slot, padding left out."""
        start = PAGE_BYTES
        for itemsize in self.itemsizes:
            yield itemsize, start, start + itemsize * self.numel
            start += round_up(itemsize * self.numel, PAGE_BYTES)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays, of shape (numel,), in a slot's uint8 `buffer`."""
        return [buffer[start:end].view(_DTYPES[itemsize]) for itemsize, start, end in self.ranges()]


def records_of(layout: Layout, *, split_master: bool) -> list[Record]:
    """What the slot of each chunk holds. Only a bf16 copy is the upper half of its master."""
    split = [split_master and flat.dtype is torch.bfloat16 for flat in layout.flats]
    return [Record(chunk.numel, SPLIT if split[chunk.flat] else WHOLE) for chunk in layout.chunks]


def param_records_of(layout: Layout) -> list[Record]:
    """The same for the 16-bit parameters of each chunk, copies too, where they are streamed."""
    return [Record(chunk.numel, (layout.flats[chunk.flat].dtype.itemsize,)) for chunk in layout.param_chunks]


def file_bytes(records: Sequence[Record], places: int, committed: int | None = None) -> int:
    """Bytes of the swap file. Args: committed: how many records, the first ones, have all the places; None: all."""
    both = records if committed is None else records[:committed]
    return PAGE_BYTES + sum(record.nbytes for record in records) + (places - 1) * sum(record.nbytes for record in both)


class SlotFile:
    """The slots of one rank on one path; see [Note: swap file format 1].

    Args: directory: made with mode 0700 if missing; records: what each chunk of the run holds; places: slots a
    chunk; held: the chunks that lie here (None: all); run_id: 16 bytes, the same in all files of a run; stripe: which
    of the rank's files this is, of how many; committed: how many of the chunks, the first ones, are committed and have
    all the places; None: this run does not commit; resumes: the file is there, with this very superblock; rank: whose;
    is_aside: the directory may hold the run that this one continues, so it lies beside its name until `took_place`;
    is_known: somebody has looked already whether the directory holds a commit; within: directories that are held open,
    to which this one is added; None: it alone.
    Raises: PathError, PathInUseError, BudgetError (disk space), ResumeError. Nothing of another run is lost then.
    """

    def __init__(
        self,
        engine: IOEngine,
        directory: Path,
        records: Sequence[Record],
        places: int = 1,
        *,
        held: Sequence[int] | None = None,
        run_id: bytes | None = None,
        stripe: tuple[int, int] = (0, 1),
        committed: int | None = None,
        resumes: bool = False,
        timeline: Timeline | None = None,
        rank: int = 0,
        is_aside: bool = False,
        is_known: bool = False,
        within: Directories | None = None,
    ) -> None:
        check_directory(directory, resumes=resumes or is_aside or is_known)
        self._records = tuple(records)
        self._held = tuple(range(len(self._records)) if held is None else held)
        self._committed = committed
        both = [chunk for chunk in self._held if committed is None or chunk < committed]
        *starts, self._place_bytes = accumulate((self._records[chunk].nbytes for chunk in both), initial=0)
        self._starts = dict(zip(both, starts, strict=True))
        once = [chunk for chunk in self._held if chunk not in self._starts]
        *starts, end = accumulate((self._records[chunk].nbytes for chunk in once), initial=places * self._place_bytes)
        self._starts |= zip(once, starts, strict=True)
        self._sealed: dict[int, int] = {}
        self._engine = engine
        self._timeline = timeline or Timeline()
        self._reads, self._writes, self._checksums = drive_lanes(stripe[0])
        self._run_id = run_id or new_run_id()
        self._place = directory / swap_name(rank)
        self._is_left = is_aside
        self._within = Directories() if within is None else within
        self._nbytes = PAGE_BYTES + end
        self._size_before: int | None = None
        path = self._place.with_name(self._place.name + ASIDE) if is_aside else self._place
        with ExitStack() as undo:
            if within is None:
                undo.callback(self._within.close)
            if directory not in self._within and _made(directory):
                undo.callback(_remove_if_empty, directory)
            dir_fd = self._within.hold(directory)
            is_new = path.name not in LOCAL.within(self._within).names(directory)
            if is_new and resumes:
                raise ResumeError(f"{path}, a file of the committed run, is missing: was it moved or removed?")
            self._file = engine.open(str(path), dir_fd=dir_fd)
            undo.callback(self._file.close)
            lock(self._file)
            if is_new:
                undo.callback(self._remove)
            is_blank = _is_blank(self._file)
            block = self._superblock(places, stripe)
            if resumes:
                _require_same(self._file, block)
                self._size_before = os.fstat(self._file.fd).st_size
            # Before the file has more than this page: so a longer one of zeros is never one of this library's.
            is_marked = is_blank and not resumes and self._mark(block)
            reserve(self._file, self._nbytes, self._nbytes - (places - 1) * self._place_bytes)
            if not (resumes or is_marked):
                result_of(self._engine.write(self._file, 0, block))
            self._undo = undo.pop_all()
        # Checksums are taken beside the step and the transfers; XXH3 outruns any drive on one core.
        self._sealer = Workers(1, "offload-seal")

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is on."""
        return self._file.direct

    def write(self, chunk: int, buffer: Tensor, *, step: int, place: int = 0) -> IOFuture:
        """Seals `buffer` (uint8, `Record.nbytes` long: room for the header first) and writes it to its slot.

        Args: step: the step whose result it is. The future's errors are those of the engine.
        """
        written: IOFuture = IOFuture()
        written.set_running_or_notify_cancel()
        self._size_before = None
        record = self._records[chunk]

        def seal() -> None:
            data = memory_of(buffer)
            with self._timeline.event(self._checksums, "seal", chunk=chunk, size=len(data)):
                _zero_padding(buffer, record)
                checksum = self._sealed[chunk] = xxhash.xxh3_64_intdigest(data[PAGE_BYTES:])
                head = _HEADER.pack(_HEADER_MAGIC, FORMAT, self._run_id, chunk, step, record.numel, checksum)
                data[: len(head)] = head
                data[len(head) : len(head) + _CHECKSUM.size] = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
            moving = self._timeline.begin(self._writes, "write", chunk=chunk, size=len(data), tier="nvme")
            future = self._engine.write(self._file, self._offset(chunk, place), data)
            future.add_done_callback(_pass_on(written, moving))

        self._sealer.submit(_guarded(seal, written))
        return written

    def read(self, chunk: int, buffer: Tensor, *, step: int, place: int = 0, checksum: int | None = None) -> IOFuture:
        """Reads a slot into `buffer` and checks that it is what `write(chunk, ..., step)` wrote.

        Args: checksum: that its data have to have; None: the one in its header.

        The future raises CorruptionError if it is not, and the engine's errors.
        """
        checked: IOFuture = IOFuture()
        checked.set_running_or_notify_cancel()
        data = memory_of(buffer)
        offset = self._offset(chunk, place)
        moving = self._timeline.begin(self._reads, "read", chunk=chunk, size=len(data), tier="nvme")

        def check() -> None:
            with self._timeline.event(self._checksums, "check", chunk=chunk, size=len(data)):
                problem = self._problem(data, chunk, step, checksum)
            if problem:
                raise CorruptionError(problem, chunk=chunk, file=self.path, offset=offset)
            checked.set_result(len(data))

        def arrived(read: IOFuture) -> None:
            error = read.exception()
            self._timeline.end(moving, failed=error is not None)
            if error is not None:
                checked.set_exception(error)
            else:
                self._sealer.submit(_guarded(check, checked))

        self._engine.read(self._file, offset, data).add_done_callback(arrived)
        return checked

    def checksum(self, chunk: int) -> int:
        """The XXH3-64 of the slot's data that the last `write` of `chunk`, which has ended, wrote."""
        return self._sealed[chunk]

    def sync(self) -> IOFuture:
        """Makes durable what was written before; see IOEngine.sync."""
        return self._engine.sync(self._file)

    def keep(self) -> None:
        """From now on a commit may name this file: it is not removed, wherever it lies."""
        self._is_left = False

    def took_place(self) -> None:
        """It has been given the name of the file beside which it was made."""
        self._file.path = str(self._place)

    def close(self) -> None:
        """Waits for what is being sealed or checked. The engine's `close` frees the lock.

        A file that is still beside another one, and was not kept, is removed: nobody could ever use it. One that was to
        be resumed, and was not written to, gets the size back that it had.
        """
        self._sealer.shutdown(wait=True)
        size, self._size_before = self._size_before, None
        if size is not None and size < self._nbytes:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fd, size)
        if self._is_left:
            self._is_left = False
            with contextlib.suppress(OSError):
                self._remove()

    def abandon(self) -> None:
        """Closes, and takes back what was made: for a run that did not begin."""
        self.close()
        self._undo.close()

    def _mark(self, block: memoryview) -> bool:
        """Writes the superblock, durably; whether the disk has room for it. Raises: TierIOError."""
        try:
            result_of(self._engine.write(self._file, 0, block))
            result_of(self.sync())
        except TierIOError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return True

    def require_here(self) -> None:
        """Whether directory and file are still what their names lead to, and the file has its size.

        Raises: PathError if one was moved, removed or cut off: what is committed must be there to be found.
        """
        self._within.require_here(self._place.parent)
        file = Path(self._file.path)
        try:
            name, dir_fd = self._within.at(file)
            is_here = os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False), os.fstat(self._file.fd))
        except FileNotFoundError:
            is_here = False
        except OSError as error:
            raise PathError(error.errno, f"cannot be looked at: {error.strerror}", str(file)) from error
        if not is_here:
            raise PathError(
                errno.ESTALE,
                "is not the file that this run opened, which was moved or removed: move it back and commit again, or "
                "start again",
                str(file),
            )
        if (size := os.fstat(self._file.fd).st_size) < self._nbytes:
            raise PathError(
                errno.ESTALE,
                f"was cut off at {size} of {self._nbytes} bytes while this run used it: start again",
                str(file),
            )

    def _remove(self) -> None:
        """Removes the file, if it is still the one that has its name. Raises: OSError."""
        name, dir_fd = self._within.at(Path(self._file.path))
        if os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False), os.fstat(self._file.fd)):
            os.unlink(name, dir_fd=dir_fd)

    def _offset(self, chunk: int, place: int) -> int:
        return PAGE_BYTES + place * self._place_bytes + self._starts[chunk]

    def _problem(self, data: memoryview, chunk: int, step: int, wanted: int | None) -> str | None:
        head = bytes(data[: _HEADER.size])
        (own,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        if xxhash.xxh3_64_intdigest(head) != own:
            return "the slot's header is damaged"
        magic, version, run_id, found_chunk, found_step, numel, checksum = _HEADER.unpack(head)
        if (magic, version) != (_HEADER_MAGIC, FORMAT) or numel != self._records[chunk].numel:
            return "this is no slot of this format"
        if run_id != self._run_id:
            return f"the slot was written by run {run_id.hex()}, not by this one"
        if (found_chunk, found_step) != (chunk, step):
            return f"expected chunk {chunk} of step {step}, found chunk {found_chunk} of step {found_step}"
        if wanted is not None and checksum != wanted:
            return "the slot is not the one that was committed"
        if xxhash.xxh3_64_intdigest(data[PAGE_BYTES:]) != checksum:
            return "the slot's data does not match its checksum"
        return None

    def _superblock(self, places: int, stripe: tuple[int, int]) -> memoryview:
        commits = self._committed is not None
        records = self._records[: self._committed]
        held = [chunk for chunk in self._held if chunk < len(records)]
        chunks: dict[str, Any] = {"held": held, "numels": [record.numel for record in records]}
        if any(record.itemsizes != WHOLE for record in records):
            chunks["itemsizes"] = [record.itemsizes for record in records]
        known = {"run_id": self._run_id.hex(), "places": places, "stripe": stripe, "commits": commits}
        text = json.dumps(known | {"chunks": chunks}).encode()
        if SUPERBLOCK.size + len(text) > PAGE_BYTES:
            digest = xxhash.xxh3_64_hexdigest(json.dumps(chunks).encode())
            text = json.dumps(known | {"chunks": {"xxh3": digest}}).encode()
        block = page()
        head = SUPERBLOCK.pack(MAGIC, FORMAT, len(text), xxhash.xxh3_64_intdigest(text))
        block[: len(head) + len(text)] = head + text
        return block


def new_run_id() -> bytes:
    """16 random bytes: no two runs have the same."""
    return secrets.token_bytes(16)


def memory_of(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, without a copy."""
    return memoryview(buffer.numpy().data)


def _zero_padding(buffer: Tensor, record: Record) -> None:
    for _, _, end in record.ranges():
        buffer[end : round_up(end, PAGE_BYTES)] = 0


def _pass_on(target: IOFuture, moving: Event | None) -> Callable[[IOFuture], None]:
    """A callback that ends `moving` and resolves `target` as the future it is called with."""

    def done(source: IOFuture) -> None:
        error = source.exception()
        Timeline.end(moving, failed=error is not None)
        if error is None:
            target.set_result(source.result())
        else:
            target.set_exception(error)

    return done


def _guarded(work: Callable[[], None], future: IOFuture) -> Callable[[], None]:
    """`work`, whose exception goes to `future`: a pool's thread would swallow it."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)

    return run


def _made(directory: Path) -> bool:
    """Makes `directory`; whether it was missing. Raises: PathError."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise PathError(error.errno, f"cannot be made: {error.strerror}", str(directory)) from error
    return True


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _is_blank(file: IOFile) -> bool:
    """Whether nothing is in it. Raises: PathError if it is somebody else's. One with our magic was left by a run that
    committed nothing, and is reused."""
    start = first_page(file)
    if start[: len(MAGIC)] == MAGIC:
        return False
    if any(start) or os.fstat(file.fd).st_size > PAGE_BYTES:
        raise PathError(errno.EEXIST, "is no swap file of this library: move it, or choose another path", file.path)
    return True


def _require_same(file: IOFile, block: memoryview) -> None:
    found = first_page(file)
    end = len(bytes(block).rstrip(b"\0"))
    if found[:end] == block[:end] and found != block:
        raise CorruptionError("is damaged after the text of its superblock", file=file.path, offset=end)
    if found != block:
        raise ResumeError(
            f"{file.path} is not the file that was committed here, or the directories are named in another order: give "
            "them as the run had them"
        )
