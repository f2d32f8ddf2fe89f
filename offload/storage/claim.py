"""Claiming a swap file for a run: its lock, its space, and what lies in it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from pathlib import Path

from offload.errors import BudgetError, PathError, PathInUseError
from offload.io.engine import IOFile
from offload.sizes import PAGE_BYTES, format_bytes

BUSY = (errno.EWOULDBLOCK, errno.EACCES)
"""What `flock` says where another open file has the lock."""
PATIENCE_S = 30.0
"""How long a lock may outlive its process."""


def page() -> memoryview:
    """A page of zeros, aligned for O_DIRECT."""
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


def take_lock(fd: int, how: int) -> None:
    """`flock` without waiting for anybody who lives. Args: how: LOCK_EX or LOCK_SH.

    A process that was killed may have had transfers under way, and io_uring ends them, and then lets go of the file, a
    moment after the process. Until then nobody may write there: so the lock is waited for.
    Raises: OSError; of `BUSY` if a live process has it.
    """
    ends, unknown = time.monotonic() + PATIENCE_S, 0
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in BUSY or time.monotonic() > ends:
                raise
            holders = _holders(fd)
            # None is seen in another container, and where it has let go meanwhile.
            unknown += not holders
            if unknown > 2 or any(map(_lives, holders)):
                raise
        time.sleep(0.01)


def _holders(fd: int) -> list[int]:
    """The processes that locked the file, as far as the kernel tells."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    info = os.fstat(fd)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    fields = [line.split() for line in lines if " -> " not in line]
    locks = [(int(words[4]), words[5]) for words in fields if words[1] == "FLOCK"]
    exact = [pid for pid, where in locks if where == file]
    # Btrfs tells `stat` the device of the subvolume, and /proc/locks that of the file system.
    return exact or [pid for pid, where in locks if where.rpartition(":")[2] == str(info.st_ino)]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def lock(file: IOFile) -> None:
    """Raises: PathInUseError if another process holds it, PathError."""
    try:
        take_lock(file.fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in BUSY:
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
