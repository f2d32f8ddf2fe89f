"""The contract of an I/O engine: aligned ranges between host memory and files, as futures.

Guarantees of every engine
- Offsets, lengths and buffer addresses are multiples of `sizes.PAGE_BYTES`; anything else raises ValueError at the
  call.
- A future resolves only when no part of its transfer is under way any more, so its buffer may be reused whether it
  succeeded or not.
- The result is the length asked for, always: a short transfer is continued, and if it cannot be, it is an error.
- An error of the system is a `TierIOError` with operation, errno, file, offset and length, from `result()`. What else
  ends a transfer, such as an exception that was thrown in while it began, comes from there as it is.
- No order between requests: who needs one waits for the first before submitting the second.
- A completed write is not durable before a `sync` that was submitted after its completion has completed.
- `close()` waits for everything under way, then closes the files. It may be called again.
- A forked child holds no file of its parent's engine: a lock ends with the process that took it.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from offload.errors import OffloadError, PathError, TierIOError
from offload.interrupts import is_of_system, uninterrupted, uninterrupted_entry, wait_until
from offload.sizes import MIB, PAGE_BYTES

IOFuture = Future[int]
"""`done()`, `result()` (bytes transferred, or raises) and `add_done_callback()`."""

_log = logging.getLogger("offload")


O_DIRECT = getattr(os, "O_DIRECT", 0)
"""0 where the system has no such thing."""
PRIVATE = 0o600
"""The mode of the files that a run has for itself."""
_STDERR = 2
"""The last descriptor of a standard stream."""


def open_nofollow(
    name: str, flags: int, *, dir_fd: int | None = None, path: str | None = None, mode: int = PRIVATE
) -> IOFile:
    """Opens a file, and makes it if `flags` say so. Every file of this library's own is opened here.

    A link as last component is refused. The call never blocks, not even on a FIFO in the file's place. O_DIRECT in
    `flags` is left out where the file system cannot do that.

    Args:
        name: the file's path or, with `dir_fd`, its name.
        flags: of `os.open`.
        dir_fd: the directory to which `name` is relative.
        path: what the file is called in errors; None: `name`.
        mode: of a file that is made, less what the umask takes.

    Raises:
        OSError: the operating system refused.
    """
    return _open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd, path, mode)


def open_follow(name: str) -> IOFile:
    """Opens a file to read it, or the one that a link leads to. The call never blocks.

    Raises:
        OSError: the operating system refused.
    """
    return _open(name, os.O_RDONLY | os.O_NONBLOCK, None)


def open_directory(name: str, *, dir_fd: int | None = None) -> IOFile:
    """Opens a directory, or the one that a link leads to.

    Args:
        name: its path or, with `dir_fd`, its name.
        dir_fd: the directory to which `name` is relative.

    Raises:
        OSError: the operating system refused.
    """
    return _open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd)


@uninterrupted  # or nobody would know of it, and close it
def _open(name: str, flags: int, dir_fd: int | None, path: str | None = None, mode: int = PRIVATE) -> IOFile:
    flags |= os.O_CLOEXEC
    try:
        fd = os.open(name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags & O_DIRECT:
            raise
        fd = os.open(name, flags & ~O_DIRECT, mode, dir_fd=dir_fd)
    fd = _beyond_standard_streams(fd)
    file = IOFile(name if path is None else path, fd, dir_fd)
    if flags & os.O_NONBLOCK and stat.S_ISREG(os.fstat(fd).st_mode):
        # It was for the open alone. Older kernels' io_uring (before Linux 5.15, and later on drives that cannot say
        # beforehand whether they would wait) fails a transfer with EAGAIN then, instead of waiting.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    return file


def _beyond_standard_streams(fd: int) -> int:
    """A descriptor of the same file above those of stdin, stdout and stderr; `fd` is closed if it is another.

    Where a process began without these streams, the system gives their numbers to the files it opens. Whatever prints
    then, a library in C or the interpreter itself, would write into a swap file or a lock.
    """
    if fd > _STDERR:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    finally:
        os.close(fd)


def aligned_memory(nbytes: int) -> memoryview:
    """`nbytes` bytes of zeros that begin at a page, as O_DIRECT needs them."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


class IOFile:
    """An open file or directory, which is closed when nothing refers to it any more.

    Attributes:
        path: what it is called in errors.
        fd: the descriptor; -1 once it is closed.
        direct: whether O_DIRECT is on.
        dir_fd: the directory in which it was opened; None: it was found by its path.
    """

    def __init__(self, path: str, fd: int, dir_fd: int | None = None) -> None:
        self.path = path
        self.fd = fd
        self.direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)
        self.dir_fd = dir_fd
        self._pid = os.getpid()
        _OPEN.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @uninterrupted
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

    @uninterrupted_entry
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


def open_file(path: str, *, dir_fd: int | None = None, buffered: bool = False, is_new: bool = False) -> IOFile:
    """Opens a regular file to read and write, and makes it with mode 0600 if it is missing.

    A link as last component is refused. Transfers go past the page cache where the file system can do that.

    Args:
        path: the file's path.
        dir_fd: the directory that the file is in, wherever `path` leads by now; None: it is found by its path.
        buffered: whether transfers go through the page cache.
        is_new: whether it must not be there, whatever a file system of several machines remembers of its name.

    Raises:
        PathError: if it cannot be opened, is no regular file, or is there and must not be.
    """
    name = path if dir_fd is None else os.path.basename(path)
    flags = os.O_RDWR | os.O_CREAT | (0 if buffered else O_DIRECT)
    try:
        if is_new:  # in a call of its own: one with O_DIRECT that fails may have made the file
            open_nofollow(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd, path=path).close()
        file = open_nofollow(name, flags, dir_fd=dir_fd, path=path)
    except OSError as error:
        if not is_of_system(error):
            raise
        raise PathError(error.errno, f"cannot open the swap file: {error.strerror}", path) from error
    info = os.fstat(file.fd)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise PathError(errno.EEXIST, "the swap file's place is taken by something that is no regular file", path)
    if not (file.direct or buffered) and info.st_dev not in _told_no_direct:
        _told_no_direct.add(info.st_dev)
        _log.warning("%s: no O_DIRECT on this file system; swap files go through the page cache", path)
    return file


def reopened(file: IOFile) -> IOFile:
    """Opens the same file once more, with a position of its own, through the page cache.

    Raises:
        OSError: if it is gone.
    """
    if not os.fstat(file.fd).st_nlink:  # it has no name
        return IOFile(file.path, os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC))
    name = file.path if file.dir_fd is None else os.path.basename(file.path)
    copy = open_nofollow(name, os.O_RDWR, dir_fd=file.dir_fd, path=file.path)
    if not os.path.samestat(os.fstat(copy.fd), os.fstat(file.fd)):
        copy.close()
        raise OSError(errno.ESTALE, "another file has its name", file.path)
    return copy


def require_aligned(offset: int, buffer: memoryview) -> int:
    """The buffer's address.

    Raises:
        ValueError: unless offset, length and address are multiples of PAGE_BYTES.
    """
    if offset % PAGE_BYTES or len(buffer) % PAGE_BYTES:
        raise ValueError(f"offset {offset} and length {len(buffer)} must be multiples of {PAGE_BYTES}")
    address = address_of(buffer)
    if address % PAGE_BYTES:
        raise ValueError(f"the buffer's address {address:#x} must be a multiple of {PAGE_BYTES}")
    return address


def address_of(buffer: memoryview) -> int:
    """The address of a writable buffer; 0 if it is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


Operation = Literal["read", "write", "sync"]


class Transfer(IOFuture):
    """One call of `read`, `write` or `sync`: a future that resolves when no part of it is under way.

    Args:
        operation: "read", "write" or "sync".
        file: the open file.
        offset: where in the file the range begins, in bytes.
        view: the memory, writable bytes.
        ended: called with this transfer when no part of it is under way; its `error` says how it went. It calls
            `resolve`, then or later. None: the transfer resolves at once.

    Attributes:
        address: of the memory.
        error: the first error of its requests.
        left: how many requests have not ended.

    Raises:
        ValueError: if offset, length or address are no multiples of PAGE_BYTES.
    """

    def __init__(
        self,
        operation: Operation,
        file: IOFile,
        offset: int,
        view: memoryview,
        ended: Callable[[Transfer], None] | None = None,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.address = require_aligned(offset, view)
        self.operation: Operation = operation
        self.file = file
        self.offset = offset
        self.view = view
        self.error: BaseException | None = None
        self.left = 0
        self._ended = ended

    def end(self) -> None:
        """Called by the engine when no part of the transfer is under way."""
        try:
            (self._ended or Transfer.resolve)(self)
        except BaseException as error:
            self.error = self.error or error
            self.resolve()

    def resolve(self) -> None:
        if self.error is None:
            self.set_result(len(self.view))
        else:
            self.set_exception(self.error)


class IOEngine(ABC):
    """Transfers between memory and files; see the guarantees at the top of this file."""

    name: str

    @abstractmethod
    def open(self, path: str, *, dir_fd: int | None = None, is_new: bool = False) -> IOFile:
        """Opens `path` as `open_file` does, and keeps the file open until `close()`.

        Raises:
            PathError: if it cannot be opened, or is no regular file.
        """

    @abstractmethod
    def adopt(self, file: IOFile) -> IOFile:
        """Takes over a file that was opened elsewhere, and closes it in the end."""

    def register(self, memory: memoryview) -> None:
        """Announces the slab that most transfers will use, which may make them cheaper."""
        return

    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        """Starts filling `buffer` (writable bytes) from `offset`."""
        return self.submit(Transfer("read", file, offset, buffer))

    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        """Starts writing `buffer` (writable bytes) to `offset`."""
        return self.submit(Transfer("write", file, offset, buffer))

    def sync(self, file: IOFile) -> IOFuture:
        """Starts making durable what completed before this call (fdatasync). The result is 0."""
        return self.submit(Transfer("sync", file, 0, memoryview(b"")))

    @abstractmethod
    def submit(self, transfer: Transfer) -> Transfer:
        """Starts a transfer, and returns it."""

    @abstractmethod
    def close(self) -> None:
        """Waits for everything under way and closes the files."""


REQUEST_BYTES = 4 * MIB
DEPTH = 8


@dataclass(eq=False, slots=True)
class Request:
    """What an engine starts at once: bytes `start` to `stop` of a transfer's memory."""

    transfer: Transfer
    start: int
    stop: int

    @property
    def operation(self) -> Operation:
        return self.transfer.operation

    @property
    def file(self) -> IOFile:
        return self.transfer.file

    @property
    def offset(self) -> int:
        return self.transfer.offset + self.start

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def view(self) -> memoryview:
        return self.transfer.view[self.start : self.stop]

    def moved(self, result: int) -> bool:
        """Takes the result of this request. If bytes are left, the request is cut down to them.

        Args:
            result: bytes moved, or -errno.

        Returns:
            Whether nothing is left.

        Raises:
            TierIOError: if the system refused, the file ended, or nothing was written.
        """
        if result < 0:
            raise self.error(-result)
        if self.operation == "sync":
            return True
        # O_DIRECT cannot go on in the middle of a page.
        whole_pages = result // PAGE_BYTES * PAGE_BYTES
        if not whole_pages:
            detail = "the file ends before the range does" if self.operation == "read" else "nothing was written"
            raise self.error(errno.EIO, detail if not result else f"cut short after {result} bytes")
        self.start += whole_pages
        return self.start >= self.stop

    def error(self, code: int, detail: str = "") -> TierIOError:
        """The error that names the request's file, offset and length."""
        return TierIOError(self.operation, code, self.file.path, self.offset, self.length, detail)

    def failed(self, error: BaseException) -> BaseException:
        """The error of the transfer, if this request ended with `error`.

        An error of the system or of memory becomes a TierIOError. Any other says nothing of the file, and stays what it
        is.
        """
        if isinstance(error, MemoryError):
            code = errno.ENOMEM
        elif isinstance(error, OSError) and is_of_system(error) and not isinstance(error, OffloadError):
            code = error.errno or errno.EIO
        else:
            return error
        told = self.error(code, f"{error!r}")
        told.__cause__ = error
        return told


Refused = tuple[Request, BaseException]
"""What an engine could not start, and why."""


class Drive:
    """The requests of one file."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Request]] = {"read": deque(), "write": deque()}
        self._served = {"read": 0, "write": 0}
        self.under_way = 0

    def take(self, depth: int) -> list[Request]:
        """Takes from the queues the requests to start now.

        Args:
            depth: requests under way at most.
        """
        taken: list[Request] = []
        reads, writes = self.queues["read"], self.queues["write"]
        while self.under_way < depth and (reads or writes):
            if not (reads and writes):
                # Nobody to share with: past service gives nobody a claim.
                self._served = {"read": 0, "write": 0}
            reads_first = self._served["read"] <= self._served["write"]
            request = (reads if reads and (reads_first or not writes) else writes).popleft()
            self._served[request.operation] += request.length
            self.under_way += 1
            taken.append(request)
        return taken


class QueuedEngine(IOEngine):
    """An engine that only has to start requests; this class queues them and counts what is under way.

    Args:
        request_bytes: the most that one request moves; whole pages.
        depth: requests under way for each file.
    """

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        self._request_bytes = request_bytes
        self._depth = depth
        self._drives: dict[IOFile, Drive] = {}
        self._unresolved = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _start(self, requests: list[Request]) -> Sequence[Refused] | None:
        """Starts requests, and raises nothing. Calls `_ended` for each one later, from any thread.

        Returns:
            The requests that could not be started, and why. `_ended` is not called for these.
        """

    def _stop(self) -> None:
        """Ends the engine's own threads. Called when nothing is under way any more."""

    def open(self, path: str, *, dir_fd: int | None = None, is_new: bool = False) -> IOFile:
        return self.adopt(open_file(path, dir_fd=dir_fd, is_new=is_new))

    def adopt(self, file: IOFile) -> IOFile:
        with self._lock:
            self._drives[file] = Drive()
        return file

    def close(self) -> None:
        self._wait_until_idle()
        self._stop()
        for file in self._drives:
            file.close()

    @uninterrupted
    def _wait_until_idle(self) -> None:
        """Waits until nothing is under way."""
        wait_until(self._lock, self._changed, lambda: not self._unresolved)

    # What was counted as under way and never started would be waited for forever: so this is not parted.
    @uninterrupted
    def submit(self, transfer: Transfer) -> Transfer:
        length = len(transfer.view)
        starts = range(0, length, self._request_bytes) if transfer.operation != "sync" else range(1)
        requests = [Request(transfer, start, min(start + self._request_bytes, length)) for start in starts]
        if not requests:
            transfer.end()
            return transfer
        transfer.left = len(requests)
        with self._lock:
            drive = self._drives[transfer.file]
            self._unresolved += 1
            if transfer.operation == "sync":
                drive.under_way += 1
            else:
                drive.queues[transfer.operation].extend(requests)
                requests = drive.take(self._depth)
        self._begin(requests)
        return transfer

    def _begin(self, requests: list[Request]) -> None:
        """Starts requests that are counted as under way already."""
        while requests:  # and no call in a call: all that is queued may be refused, one after the other
            requests = self._fail(self._start(requests))

    def _refuse(self, refused: Sequence[Refused] | None) -> None:
        """Ends requests that could not be started, and starts the next ones."""
        self._begin(self._fail(refused))

    def _fail(self, refused: Sequence[Refused] | None) -> list[Request]:
        """Ends requests that could not be started, and returns those to start now."""
        return [
            following for request, error in refused or () for following in self._over(request, request.failed(error))
        ]

    def _ended(self, request: Request, result: int | Exception) -> None:
        """Called once a request is not under way any more. It raises nothing.

        Args:
            request: the request.
            result: bytes moved, or -errno, or what was raised instead.
        """
        error, is_over = None, True
        try:
            if isinstance(result, Exception):
                raise result
            is_over = request.moved(result)
        except BaseException as raised:
            error = request.failed(raised)  # nobody may wait for it forever
        self._begin(self._over(request, error, is_over=is_over))

    def _over(self, request: Request, error: BaseException | None, *, is_over: bool = True) -> list[Request]:
        """Counts a request as ended, or queues what is left of it.

        Args:
            request: the request.
            error: what its transfer fails with, if it failed.
            is_over: whether nothing of it is left.

        Returns:
            The requests to start now.
        """
        transfer = request.transfer
        with self._lock:
            drive = self._drives[transfer.file]
            drive.under_way -= 1
            if is_over:
                transfer.error = transfer.error or error
                transfer.left -= 1
            else:
                drive.queues[request.operation].appendleft(request)
            requests = drive.take(self._depth)
            is_last = is_over and not transfer.left
        if is_last:
            transfer.end()
            with self._lock:
                self._unresolved -= 1
                self._changed.notify_all()
        return requests
