"""The contract of an I/O engine: aligned ranges between host memory and files, as futures.

Guarantees of every engine
- Offsets, lengths and buffer addresses are multiples of `sizes.PAGE_BYTES`; anything else raises ValueError at the
  call.
- A future resolves only when no part of its transfer is under way any more, so its buffer may be reused whether it
  succeeded or not.
- The result is the length asked for, always: a short transfer is continued, and if it cannot be, it is an error.
- An error is a `TierIOError` with operation, errno, file, offset and length, from `result()`.
- No order between requests: who needs one waits for the first before submitting the second.
- A completed write is not durable before a `sync` that was submitted after its completion has completed.
- `close()` waits for everything under way, then closes the files. It may be called again.
- A forked child holds no file of its parent's engine: a lock ends with the process that took it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import numpy

from offload.errors import PathError, TierIOError
from offload.interrupts import uninterrupted, wait_until
from offload.sizes import MIB, PAGE_BYTES

IOFuture = Future[int]
"""`done()`, `result()` (bytes transferred, or raises) and `add_done_callback()`."""

_log = logging.getLogger("offload")


O_DIRECT = getattr(os, "O_DIRECT", 0)
"""0 where the system has no such thing."""


def open_nofollow(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Opens a file, and makes it with mode 0600 if `flags` say so. Every file of this library is opened here.

    A link as last component is refused. Nothing is waited for: a FIFO in the file's place would hang us. O_DIRECT in
    `flags` is left out where the file system cannot do that.
    Args: dir_fd: of the directory to which `path` is relative. Returns: the descriptor. Raises: OSError.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags & O_DIRECT:
            raise
        return os.open(path, flags & ~O_DIRECT, 0o600, dir_fd=dir_fd)


def aligned_memory(nbytes: int) -> memoryview:
    """`nbytes` zeros at the start of a page, as O_DIRECT wants them."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


class IOFile:
    """An open file.

    Attributes: path; fd; direct (whether O_DIRECT is on); dir_fd: of the directory in which it was opened, None if it
    was found by its path.
    """

    def __init__(self, path: str, fd: int, dir_fd: int | None = None) -> None:
        self.path = path
        self.fd = fd
        self.direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)
        self.dir_fd = dir_fd
        self._pid = os.getpid()
        _OPEN.add(self)

    def close(self) -> None:
        """Closes the descriptor, which frees its lock. May be called again."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if os.getpid() == self._pid:
            # Closing alone frees the lock only when the kernel lets go of the file, which io_uring can delay. Not in
            # a forked child, whose descriptor shares the lock with its parent's.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def __del__(self) -> None:
        # Who forgets to close must not keep the lock for the life of the process.
        with contextlib.suppress(OSError):
            self.close()


_OPEN: weakref.WeakSet[IOFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_OPEN):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_close_in_child)

_told_no_direct: set[int] = set()


def open_file(path: str, *, dir_fd: int | None = None, buffered: bool = False) -> IOFile:
    """Opens a regular file to read and write, made with mode 0600 if missing, past the page cache where the file
    system can, unless `buffered`. A link as last component is refused.

    Args: dir_fd: of the directory that it is in, wherever the path leads by now; None: it is found by its path.
    Raises: PathError.
    """
    name = path if dir_fd is None else os.path.basename(path)
    flags = os.O_RDWR | os.O_CREAT | (0 if buffered else O_DIRECT)
    try:
        fd = open_nofollow(name, flags, dir_fd=dir_fd)
    except OSError as error:
        raise PathError(error.errno, f"cannot open the swap file: {error.strerror}", path) from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise PathError(errno.EEXIST, "the swap file's place is taken by something that is no regular file", path)
    file = IOFile(path, fd, dir_fd)
    if not (file.direct or buffered) and info.st_dev not in _told_no_direct:
        _told_no_direct.add(info.st_dev)
        _log.warning("%s: no O_DIRECT on this file system; swap files go through the page cache", path)
    return file


def reopened(file: IOFile) -> IOFile:
    """The same file once more, with a position of its own, through the page cache. Raises: OSError if it is gone."""
    name = file.path if file.dir_fd is None else os.path.basename(file.path)
    found = IOFile(file.path, open_nofollow(name, os.O_RDWR, dir_fd=file.dir_fd), file.dir_fd)
    if not os.path.samestat(os.fstat(found.fd), os.fstat(file.fd)):
        found.close()
        raise OSError(errno.ESTALE, "another file has its name", file.path)
    return found


def require_aligned(offset: int, buffer: memoryview) -> None:
    """Raises: ValueError unless offset, length and address are multiples of PAGE_BYTES."""
    if offset % PAGE_BYTES or len(buffer) % PAGE_BYTES:
        raise ValueError(f"offset {offset} and length {len(buffer)} must be multiples of {PAGE_BYTES}")
    address = numpy.frombuffer(buffer, numpy.uint8).ctypes.data if len(buffer) else 0
    if address % PAGE_BYTES:
        raise ValueError(f"the buffer's address {address:#x} must be a multiple of {PAGE_BYTES}")


class IOEngine(ABC):
    """See the guarantees at the top of this file."""

    name: str

    @abstractmethod
    def open(self, path: str, *, dir_fd: int | None = None) -> IOFile:
        """Opens `path` as `open_file` does and keeps it until `close()`. Raises: PathError."""

    def register(self, memory: memoryview) -> None:
        """Tells the engine of the slab that most transfers will be from or to, which may make them cheaper."""
        return

    @abstractmethod
    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        """Starts filling `buffer` (writable bytes) from `offset`."""

    @abstractmethod
    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        """Starts writing `buffer` to `offset`."""

    @abstractmethod
    def sync(self, file: IOFile) -> IOFuture:
        """Starts making durable what completed before this call (fdatasync); the result is 0."""

    @abstractmethod
    def close(self) -> None:
        """Waits for everything under way and closes the files."""


REQUEST_BYTES = 4 * MIB
DEPTH = 8
Operation = Literal["read", "write", "sync"]


class Transfer:
    """What one call of `read` or `write` asked for: resolves when the last of its pieces is done.

    Args: length: bytes; result: of the future, None: all of them.
    """

    def __init__(self, length: int, result: int | None = None) -> None:
        self.future: IOFuture = IOFuture()
        self.future.set_running_or_notify_cancel()
        self._result = length if result is None else result
        self._left = length
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def piece_done(self, length: int, error: BaseException | None = None) -> None:
        """`length` bytes are not under way any more."""
        with self._lock:
            self._error = self._error or error
            self._left -= length
            if self._left:
                return
        if self._error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._error)


@dataclass
class Piece:
    """A part of a transfer, of at most a request's size. is_over: it has been counted as not under way."""

    view: memoryview
    transfer: Transfer
    is_over: bool = False

    def end(self, error: BaseException | None = None) -> None:
        """It is not under way any more. Once for each piece, whoever calls it again."""
        if not self.is_over:
            self.is_over = True
            self.transfer.piece_done(self.counts, error)

    @property
    def counts(self) -> int:
        """Of a sync, which moves nothing, 1."""
        return max(len(self.view), 1)


@dataclass(eq=False)
class Request:
    """Pieces that lie one after another in the file, from `offset`; what an engine starts."""

    operation: Operation
    file: IOFile
    offset: int
    pieces: list[Piece]

    @property
    def length(self) -> int:
        return sum(len(piece.view) for piece in self.pieces)

    @property
    def views(self) -> list[memoryview]:
        return [piece.view for piece in self.pieces]

    def after(self, count: int) -> Request | None:
        """Resolves what the first `count` bytes (whole pages) finish; returns what is left."""
        over: list[Piece] = []
        left: list[Piece] = []
        for piece in self.pieces:
            done = min(count, len(piece.view))
            count -= done
            if done == len(piece.view):
                over.append(piece)
            elif done:
                # Both counted anew: nothing of it has been, and what is made here may fail.
                over.append(Piece(piece.view[:done], piece.transfer))
                left.append(Piece(piece.view[done:], piece.transfer))
            else:
                left.append(piece)
        rest = Request(self.operation, self.file, self.offset + sum(len(piece.view) for piece in over), left)
        self.pieces = over + left
        for piece in over:
            piece.end()
        return rest if left else None

    def fail(self, code: int, detail: str = "", cause: BaseException | None = None) -> None:
        """Resolves every piece that is under way with an error that says where it lies."""
        offset = self.offset
        for piece in self.pieces:
            error = TierIOError(self.operation, code, self.file.path, offset, len(piece.view), detail)
            error.__cause__ = cause
            piece.end(error)
            offset += len(piece.view)

    def abandon(self, error: BaseException) -> None:
        """Resolves what is under way with `error`, which was none of the disk."""
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None) or errno.EIO
        self.fail(code, f"{error!r}", error)


Refused = tuple[Request, BaseException]
"""What an engine could not start, and why."""


@dataclass
class Drive:
    """The requests of one file."""

    reads: deque[Request] = field(default_factory=deque)
    writes: deque[Request] = field(default_factory=deque)
    served: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    under_way: int = 0

    @property
    def idle(self) -> bool:
        return not (self.under_way or self.reads or self.writes)

    def take(self, depth: int, request_bytes: int, most_views: int) -> list[Request]:
        """The requests to start now."""
        taken: list[Request] = []
        while self.under_way < depth and (self.reads or self.writes):
            if not (self.reads and self.writes):
                # Nobody to share with: past service gives nobody a claim.
                self.served = {"read": 0, "write": 0}
            reads_first = self.served["read"] <= self.served["write"]
            queue = self.reads if self.reads and (reads_first or not self.writes) else self.writes
            request = queue.popleft()
            _join(request, queue, request_bytes, most_views)
            self.served[request.operation] += request.length
            self.under_way += 1
            taken.append(request)
        return taken


def _join(request: Request, queue: deque[Request], request_bytes: int, most_views: int) -> None:
    """Takes requests that follow in the file from the head of the queue into `request`."""
    length = request.length
    while queue and len(request.pieces) < most_views:
        following = queue[0]
        if following.offset != request.offset + length or length + following.length > request_bytes:
            return
        request.pieces += queue.popleft().pieces
        length = request.length


class QueuedEngine(IOEngine):
    """An engine that only has to start requests; see the top of this file.

    Args: request_bytes: the most a request moves, whole pages; depth: requests under way a file.
    """

    most_views = 64
    """Buffers a joined request: far below the 1024 that preadv takes."""

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        self._request_bytes = request_bytes
        self._depth = depth
        self._drives: WeakKeyDictionary[IOFile, Drive] = WeakKeyDictionary()
        self._files: list[IOFile] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _start(self, requests: list[Request]) -> Sequence[Refused] | None:
        """Starts them; calls `_ended` for each, from any thread but not from within this call.

        Returns: what could not be started, for which it is not called, and why. Raises nothing.
        """

    def _stop(self) -> None:
        """Ends the engine's own threads; nothing is under way any more."""

    def open(self, path: str, *, dir_fd: int | None = None) -> IOFile:
        return self.adopt(open_file(path, dir_fd=dir_fd))

    def adopt(self, file: IOFile) -> IOFile:
        """Uses a file that was opened elsewhere, and closes it in the end."""
        with self._lock:
            self._files.append(file)
            self._drives[file] = Drive()
        return file

    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("read", file, offset, buffer)

    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("write", file, offset, buffer)

    # What was counted as under way and never started would be waited for forever: so what follows is not parted.

    @uninterrupted
    def sync(self, file: IOFile) -> IOFuture:
        transfer = Transfer(1, result=0)
        request = Request("sync", file, 0, [Piece(memoryview(b""), transfer)])
        with self._lock:
            self._drives[file].under_way += 1
        self._begin([request])
        return transfer.future

    def close(self) -> None:
        self._wait_until_idle()
        self._stop()
        for file in self._files:
            file.close()

    @uninterrupted
    def _wait_until_idle(self) -> None:
        """Waits until nothing is under way."""
        wait_until(self._lock, self._changed, lambda: all(drive.idle for drive in self._drives.values()))

    @uninterrupted
    def _submit(self, operation: Operation, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        require_aligned(offset, buffer)
        transfer = Transfer(len(buffer))
        if not len(buffer):
            transfer.piece_done(0)
            return transfer.future
        requests = []
        for start in range(0, len(buffer), self._request_bytes):
            piece = Piece(buffer[start : start + self._request_bytes], transfer)
            requests.append(Request(operation, file, offset + start, [piece]))
        with self._lock:
            drive = self._drives[file]
            (drive.reads if operation == "read" else drive.writes).extend(requests)
            requests = drive.take(self._depth, self._request_bytes, self.most_views)
        self._begin(requests)
        return transfer.future

    def _begin(self, requests: list[Request]) -> None:
        """Starts them, which are counted as under way."""
        if requests:
            self._refuse(self._start(requests))

    def _refuse(self, refused: Sequence[Refused] | None) -> None:
        """Ends what could not be started, and starts what comes next."""
        while refused:
            requests = []
            for request, error in refused:
                request.abandon(error)
                requests += self._over(request, None)
            refused = self._start(requests) if requests else None

    def _ended(self, request: Request, result: int) -> None:
        """A request is not under way any more, whatever goes wrong here. Args: result: bytes moved, or -errno."""
        rest = None
        try:
            rest = _rest_of(request, result)
        except BaseException as error:
            request.abandon(error)  # nobody may wait for it forever
        self._begin(self._over(request, rest))

    def _over(self, request: Request, rest: Request | None) -> list[Request]:
        """Counts a request as ended. Args: rest: of it, to be asked for again. Returns: what to start now."""
        with self._lock:
            drive = self._drives[request.file]
            drive.under_way -= 1
            if rest is not None:
                (drive.reads if rest.operation == "read" else drive.writes).appendleft(rest)
            requests = drive.take(self._depth, self._request_bytes, self.most_views)
            self._changed.notify_all()
        return requests


def _rest_of(request: Request, result: int) -> Request | None:
    """Resolves what has ended of a request; returns what has to be asked for again."""
    if result < 0:
        request.fail(-result)
        return None
    if request.operation == "sync":
        request.pieces[0].end()
        return None
    # O_DIRECT cannot go on in the middle of a page.
    whole_pages = result // PAGE_BYTES * PAGE_BYTES
    rest = request.after(whole_pages)
    if rest is not None and not whole_pages:
        detail = "the file ends before the range does" if request.operation == "read" else "nothing was written"
        rest.fail(errno.EIO, detail if not result else f"cut short after {result} bytes")
        return None
    return rest
