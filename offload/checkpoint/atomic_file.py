"""Files that are written to a temporary name, synced, and then renamed: an atomic replace.

The temporary name is `name.offload.new`. The rename is durable once the directory is synced. A crash at any moment
leaves the old file, the new one, or none; never half of one.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from offload.checkpoint.manifest import Digest
from offload.errors import CorruptionError, PathError, TierIOError
from offload.interrupts import is_of_system
from offload.io.engine import IOFile
from offload.io.files import Files
from offload.sizes import format_bytes
from offload.storage.directories import TEMPORARY


def write_temporary(files: Files, path: Path, pieces: Iterable[bytes | memoryview]) -> Digest:
    """Writes `pieces` to the temporary file of `path` and syncs them; `atomic_replace` makes them the file.

    A failed sync is final: it is not tried again.

    Returns:
        what was written. A leftover of an earlier attempt is replaced; after a failure there is none.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    hasher = xxhash.xxh3_128()

    def write(file: IOFile) -> int:
        size = 0
        for piece in pieces:
            data = memoryview(piece).cast("B")
            with failing("write", temporary(path), size, len(data)):
                files.write(file, data)
            hasher.update(data)
            size += len(data)
        return size

    return Digest(_make_temporary(files, path, write), hasher.hexdigest())


def copy_temporary(files: Files, source: Path, path: Path, size: int) -> None:
    """The same with the first `size` bytes of the file `source`, which are neither read into RAM nor checked.

    Raises:
        TierIOError: also if `source` is shorter.
    """

    def copy(file: IOFile) -> int:
        with failing("write", temporary(path), 0, size):
            files.copy(source, file, 0, size)
        return size

    _make_temporary(files, path, copy)


def _make_temporary(files: Files, path: Path, fill: Callable[[IOFile], int]) -> int:
    """Makes the temporary file of `path`, syncs what `fill` puts there, and returns its size; removes it on failure."""
    made, size = temporary(path), 0
    with failing("remove", made):
        files.remove(made)
    with failing("write", made):
        file = files.create(made)
    try:
        try:
            size = fill(file)
            with failing("sync", made, 0, size):
                files.sync(file)
        finally:
            with failing("sync", made, 0, size):
                files.close(file)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(made)
        raise
    return size


def temporary(path: Path) -> Path:
    """The temporary name of a file that is going to be called `path`."""
    return path.with_name(path.name + TEMPORARY)


def atomic_replace(files: Files, path: Path) -> None:
    """Renames what `write_temporary` wrote to `path`. Not durable before `sync_directory`.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    with failing("rename", path):
        files.rename(temporary(path), path)


def sync_directory(files: Files, directory: Path) -> None:
    """Makes what was renamed, made and removed in `directory` durable.

    Raises:
        TierIOError: then nobody knows whether it is, and it is not tried again.
    """
    with failing("sync", directory):
        files.sync_directory(directory)


def read_whole(files: Files, path: Path, most: int) -> bytes | None:
    """The content of `path`; None if there is no such file.

    Raises:
        PathError: for a link or anything but a file, CorruptionError if it is longer than `most` bytes, TierIOError.
    """
    try:
        data = files.read(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_of_system(error):
            raise
        if error.errno in (errno.EIO, errno.ESTALE):
            raise TierIOError("read", error.errno, str(path), 0, most) from error
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    if len(data) > most:
        raise CorruptionError(f"is longer than {format_bytes(most)}", file=str(path))
    return data


@contextlib.contextmanager
def failing(operation: str, path: Path, offset: int = 0, length: int = 0) -> Iterator[None]:
    """Turns an OSError of the system into a TierIOError that names what failed."""
    try:
        yield
    except OSError as error:
        if not is_of_system(error):
            raise
        raise TierIOError(operation, error.errno or errno.EIO, str(path), offset, length, str(error)) from error
