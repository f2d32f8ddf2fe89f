"""Files written whole and aside, and read whole, with nothing trusted that the disk did not confirm.

A file is made beside its name (`name.new`), synced, and only then renamed to it. The rename is durable once the
directory is synced. Whatever cuts in between leaves the old file, the new one, or none; never half of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import xxhash

from offload.checkpoint.manifest import Digest
from offload.errors import CorruptionError, PathError, TierIOError
from offload.sizes import MIB
from offload.store.directories import ASIDE

COPIED_BYTES = 64 * MIB
"""Asked of the kernel at once, so that a copy can be interrupted."""
PIECE_BYTES = 4 * MIB
"""Copied at once where the kernel does not."""
_NOT_IN_THE_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class Files(Protocol):
    """What committing asks of a file system. Every method raises OSError; no effect is durable before a sync."""

    def create(self, path: Path) -> int:
        """Makes a file of mode 0600 where there is none, follows no link; returns a descriptor to write to."""

    def write(self, fd: int, data: memoryview) -> None:
        """Appends all of `data`."""

    def sync(self, fd: int) -> None:
        """Makes the file's content durable. If it fails, the content is lost, whatever a second call says."""

    def close(self, fd: int) -> None: ...

    def rename(self, old: Path, new: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """Removes a file, not what it links to; one that is not there is fine."""

    def copy(self, source: Path, fd: int, offset: int, length: int) -> None:
        """Writes a range of the file `source` to the same place of the file `fd`, of which it has to be no part yet.

        Where the file system can, both share the blocks until one of them is written to.
        """

    def make_directory(self, path: Path) -> None:
        """Of mode 0700; one that is there is fine."""

    def remove_directory(self, path: Path) -> None:
        """If nothing is in it; one that is not there, or not empty, is fine."""

    def sync_directory(self, path: Path) -> None:
        """Makes what was made, renamed and removed in `path` durable."""

    def names(self, directory: Path) -> list[str]: ...

    def read(self, path: Path, most: int) -> bytes:
        """The content of a regular file, or the first `most + 1` bytes of it; follows no link."""


class LocalFiles:
    """The files of this machine."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def copy(self, source: Path, fd: int, offset: int, length: int) -> None:
        # O_DIRECT or not, what a swap file's engine has written is seen here: it was synced.
        with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
            end = offset + length
            while offset < end:
                done = _copy_some(file.fileno(), fd, offset, min(end - offset, COPIED_BYTES))
                if not done:
                    raise OSError(errno.EIO, f"{source} ends at {offset}, before what is to be copied does")
                offset += done

    def make_directory(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def remove_directory(self, path: Path) -> None:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def read(self, path: Path, most: int) -> bytes:
        # O_NONBLOCK: a FIFO put in the file's place must not hang us.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "is no regular file", str(path))
            return file.read(min(info.st_size, most + 1))


def _copy_some(source: int, target: int, offset: int, length: int) -> int:
    """Copies up to `length` bytes, in the kernel if that can. Returns: how many; 0 at the end of the source."""
    done = 0
    if hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source, target, length, offset, offset)
        except OSError as error:
            if error.errno not in _NOT_IN_THE_KERNEL:
                raise
    if not done:  # also some file systems' word for "not here"
        data = os.pread(source, min(length, PIECE_BYTES), offset)
        done = os.pwrite(target, data, offset) if data else 0
    if hasattr(os, "posix_fadvise"):
        # It was read once, and pushes nothing else out of the page cache.
        os.posix_fadvise(source, offset, done, os.POSIX_FADV_DONTNEED)
    return done


LOCAL = LocalFiles()


def write_aside(files: Files, path: Path, pieces: Iterable[bytes | memoryview]) -> Digest:
    """Writes `pieces` beside `path` and syncs them; `put_in_place` makes them the file.

    Returns: what was written. A leftover of an earlier attempt is replaced; after a failure there is none.
    Raises: TierIOError. A failed sync is final: it is not tried again.
    """
    aside = path.with_name(path.name + ASIDE)
    with failing("remove", aside):
        files.remove(aside)
    with failing("write", aside):
        fd = files.create(aside)
    size, hasher = 0, xxhash.xxh3_128()
    try:
        try:
            for piece in pieces:
                data = memoryview(piece).cast("B")
                with failing("write", aside, size, len(data)):
                    files.write(fd, data)
                hasher.update(data)
                size += len(data)
            with failing("sync", aside, 0, size):
                files.sync(fd)
        finally:
            with failing("sync", aside, 0, size):
                files.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(aside)
        raise
    return Digest(size, hasher.hexdigest())


def put_in_place(files: Files, path: Path) -> None:
    """Renames what `write_aside` wrote to `path`. Not durable before `sync_directory`. Raises: TierIOError."""
    with failing("rename", path):
        files.rename(path.with_name(path.name + ASIDE), path)


def sync_directory(files: Files, directory: Path) -> None:
    """Makes what was put in place in `directory` durable.

    Raises: TierIOError; then nobody knows whether it is, and it is not tried again.
    """
    with failing("sync", directory):
        files.sync_directory(directory)


def read_whole(files: Files, path: Path, most: int) -> bytes | None:
    """The content of `path`; None if there is no such file.

    Raises: PathError for a link or anything but a file, CorruptionError if it is longer than `most` bytes,
    TierIOError.
    """
    try:
        data = files.read(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE):
            raise TierIOError("read", error.errno, str(path), 0, most) from error
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    if len(data) > most:
        raise CorruptionError(f"is longer than {most} bytes", file=str(path))
    return data


@contextlib.contextmanager
def failing(operation: str, path: Path, offset: int = 0, length: int = 0) -> Iterator[None]:
    """Turns an OSError into a TierIOError that names what failed."""
    try:
        yield
    except OSError as error:
        raise TierIOError(operation, error.errno or errno.EIO, str(path), offset, length, str(error)) from error
