"""A swap file opened to be read: past the page cache where that works, locked against a run, changed in nothing."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from offload.errors import PathError, PathInUseError, TierIOError
from offload.sizes import PAGE_BYTES
from offload.storage.claim import BUSY, take_lock
from offload.storage.files import LOCAL, Files
from offload.storage.swap_format import parse_superblock


def aligned_memory(size: int) -> Tensor:
    """`size` bytes, uint8, at the start of a page, as O_DIRECT wants them."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


class SwapFile:
    """Attributes: path; page, the first one; block, the superblock in it; size in bytes.

    Holds a shared lock until `close()`: other readers may too, but no run starts on it meanwhile. `exclusive`: alone.
    Raises: PathError, PathInUseError (a live run), CorruptionError, ResumeError (a newer version's), TierIOError.
    """

    def __init__(self, path: Path, files: Files = LOCAL, *, exclusive: bool = False) -> None:
        self.path = str(path)
        self._fd = _open(path, files, os.O_RDWR if exclusive else os.O_RDONLY)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise PathError(errno.EINVAL, "is no regular file", self.path)
            self.size = info.st_size
            _lock(self._fd, self.path, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            page = memoryview(aligned_memory(PAGE_BYTES).numpy().data)
            self.page = bytes(page[: self.read(page, 0)])
            self.block = parse_superblock(self.page, self.path)
        except BaseException:
            self.close()
            raise

    def read(self, data: memoryview, offset: int) -> int:
        """Fills `data` from `offset`, all in whole pages. Returns: bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(data):
            try:
                got = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                code = error.errno or errno.EIO
                raise TierIOError("read", code, self.path, offset + done, len(data) - done) from error
            # Past the page cache, what is no whole page was the last of the file.
            done += got
            if not got or got % PAGE_BYTES:
                break
        return done

    def close(self) -> None:
        """May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open(path: Path, files: Files, access: int) -> int:
    """Args: access: O_RDWR for an exclusive lock, which NFS gives to nobody else, though nothing is written."""
    try:
        try:
            return files.open(path, access | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return files.open(path, access)
    except OSError as error:
        why = "is a symlink: put the swap file itself in its place"
        if error.errno != errno.ELOOP:
            why = f"cannot open the swap file: {error.strerror}"
        raise PathError(error.errno, why, str(path)) from error


def _lock(fd: int, path: str, how: int) -> None:
    try:
        take_lock(fd, how)
    except OSError as error:
        if error.errno not in BUSY:
            raise PathError(error.errno, f"cannot be locked: {error.strerror}", path) from error
        raise PathInUseError(errno.EBUSY, "a live run holds this path: wait for its end, or close it", path) from error
