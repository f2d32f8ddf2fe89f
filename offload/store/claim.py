"""Claiming a swap file for a run: its lock, its space, and what lies in it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from offload.errors import BudgetError, PathError, PathInUseError
from offload.io.engine import IOFile
from offload.sizes import PAGE_BYTES, format_bytes


def page() -> memoryview:
    """A page of zeros, aligned for O_DIRECT."""
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


def lock(file: IOFile) -> None:
    """Raises: PathInUseError if another process holds it, PathError."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise PathError(error.errno, f"cannot be locked: {error.strerror}", file.path) from error
        raise PathInUseError(
            errno.EBUSY, "a live run holds this path: close it, or give each run a path of its own", file.path
        ) from error
    if os.fstat(file.fd).st_nlink == 0:
        raise PathInUseError(errno.EBUSY, "another run has just removed this file: try again", file.path)


def first_page(file: IOFile) -> memoryview:
    """What lies there, zeros after the file's end. Raises: PathError."""
    start = page()
    try:
        os.preadv(file.fd, [start], 0)
    except OSError as error:
        raise PathError(error.errno, f"cannot be read: {error.strerror}", file.path) from error
    return start


def reserve(file: IOFile, needed: int, uncommitted: int) -> None:
    """Allocates the file's blocks now: a full disk shows before training, not in it.

    Args: needed: bytes; uncommitted: what would do without commits.
    Raises: BudgetError, PathError.
    """
    info = os.fstat(file.fd)
    os.fchmod(file.fd, 0o600)
    disk = os.fstatvfs(file.fd)
    available = disk.f_bavail * disk.f_frsize + info.st_blocks * 512
    try:
        if needed > available:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(file.fd, 0, needed)
    except OSError as error:
        # What was allocated before the disk was full goes back; what was there before stays.
        os.ftruncate(file.fd, info.st_size)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise PathError(error.errno, f"cannot reserve space: {error.strerror}", file.path) from error
        fits = uncommitted <= available < needed
        other = f", or give commit_every=None, which takes {format_bytes(uncommitted)} and commits nothing"
        raise BudgetError(
            f"{file.path} needs {format_bytes(needed)} of disk and {format_bytes(available)} are free: "
            f"free some, or choose another path{other if fits else ''}",
            needed=needed,
            available=available,
            option="commit_every" if fits else "path",
        ) from error
