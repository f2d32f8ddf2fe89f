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
import os
import stat
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future

import numpy

from offload.errors import PathError
from offload.sizes import PAGE_BYTES

IOFuture = Future[int]
"""`done()`, `result()` (bytes transferred, or raises) and `add_done_callback()`."""

_log = logging.getLogger("offload")


class IOFile:
    """A file opened for an engine.

    Attributes: path; fd; direct (whether O_DIRECT is on); dir_fd: of the directory in which it was opened, None if it
    was found by its path.
    """

    def __init__(self, path: str, fd: int, direct: bool, dir_fd: int | None = None) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
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
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    name = path if dir_fd is None else os.path.basename(path)
    direct = 0 if buffered else getattr(os, "O_DIRECT", 0)
    try:
        try:
            # O_NONBLOCK: a FIFO put in the file's place must not hang us; it changes nothing for a regular file.
            fd = os.open(name, flags | direct | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = 0
            fd = os.open(name, flags | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise PathError(error.errno, f"cannot open the swap file: {error.strerror}", path) from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise PathError(errno.EEXIST, "the swap file's place is taken by something that is no regular file", path)
    if not (direct or buffered) and info.st_dev not in _told_no_direct:
        _told_no_direct.add(info.st_dev)
        _log.warning("%s: no O_DIRECT on this file system; swap files go through the page cache", path)
    return IOFile(path, fd, bool(direct), dir_fd)


def reopened(file: IOFile) -> IOFile:
    """The same file once more, with a position of its own, through the page cache. Raises: OSError if it is gone."""
    name = file.path if file.dir_fd is None else os.path.basename(file.path)
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=file.dir_fd)
    found = IOFile(file.path, fd, direct=False, dir_fd=file.dir_fd)
    if not os.path.samestat(os.fstat(fd), os.fstat(file.fd)):
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
