"""Files that are written to a temporary name, synced, and then renamed: an atomic replace.

The temporary name is `name.offload.new`, or that of a spare file whose blocks are used (storage/room.py). The rename
is durable once the directory is synced. A crash at any moment leaves the old file, the new one, or none; never half of
one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from offload.checkpoint.manifest import Digest
from offload.errors import CorruptionError, PathError, TierIOError
from offload.interrupts import is_of_system
from offload.io.engine import PRIVATE, IOFile
from offload.io.files import Files
from offload.sizes import format_bytes
from offload.storage.directories import TEMPORARY


def nothing() -> None:
    return None


def write_file(
    files: Files,
    path: Path,
    pieces: Iterable[bytes | memoryview],
    spare: Path | None = None,
    *,
    is_exact: bool = False,
    check: Callable[[], None] = nothing,
) -> Digest:
    """Replaces a file atomically. That is not durable before `sync_directory`.

    Args:
        files: see `write_temporary`.
        path: see `write_temporary`.
        pieces: see `write_temporary`.
        spare: see `write_temporary`.
        is_exact: see `write_temporary`.
        check: called when all is written, just before the rename. If it raises, the file stays what it was.

    Raises:
        TierIOError: a disk or its file system failed.
        OffloadError: what `check` raises.
    """
    written = write_temporary(files, path, pieces, spare, is_exact=is_exact)
    check()
    atomic_replace(files, path, spare)
    return written


def write_temporary(
    files: Files,
    path: Path,
    pieces: Iterable[bytes | memoryview],
    spare: Path | None = None,
    *,
    is_exact: bool = False,
    mode: int = PRIVATE,
) -> Digest:
    """Writes the temporary file of `path`, and syncs it. `atomic_replace` makes it the file.

    A leftover of an earlier attempt is replaced. After a failure there is no temporary file, and the spare is there. A
    failed sync is final: it is not tried again.

    Args:
        files: the file system.
        path: the file.
        pieces: what is written, one after the other.
        spare: the file that is written to; None: a new one.
        is_exact: whether the file ends where `pieces` do. If not, a longer spare has a zero byte there.
        mode: of a new file, less what the umask takes.

    Returns:
        The digest of what was written.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    hasher = xxhash.xxh3_128()

    def write(file: IOFile) -> int:
        size = 0
        for piece in pieces:
            data = memoryview(piece).cast("B")
            with failing("write", spare or temporary(path), size, len(data)):
                files.write(file, data)
            hasher.update(data)
            size += len(data)
        return size

    return Digest(_make_temporary(files, path, write, spare, is_exact=is_exact, mode=mode), hasher.hexdigest())


def copy_file(files: Files, source: Path, path: Path, size: int) -> None:
    """As `write_file`, with the beginning of another file, which is neither read into RAM nor checked.

    Args:
        files: the file system.
        source: the other file.
        path: the file.
        size: how many bytes are copied.

    Raises:
        TierIOError: a disk or its file system failed, or `source` is shorter.
    """

    def copy(file: IOFile) -> int:
        with failing("write", temporary(path), 0, size):
            files.copy(source, file, 0, size)
        return size

    _make_temporary(files, path, copy)
    atomic_replace(files, path)


def _make_temporary(
    files: Files,
    path: Path,
    fill: Callable[[IOFile], int],
    spare: Path | None = None,
    *,
    is_exact: bool = False,
    mode: int = PRIVATE,
) -> int:
    """Makes the temporary file of `path`, and syncs it. Removes it if that fails, unless it is a spare.

    Args:
        files: the file system.
        path: the file.
        fill: writes to the temporary file, and returns its size.
        spare: see `write_temporary`.
        is_exact: see `write_temporary`.
        mode: see `write_temporary`.

    Returns:
        The size.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    made, size = spare or temporary(path), 0
    if spare is None:
        with failing("remove", made):
            files.remove(made)
    with failing("write", made):
        file = files.create(made, mode) if spare is None else files.open(made, os.O_WRONLY)
    try:
        try:
            size = fill(file)
            with failing("write", made, size, 1):
                if is_exact:
                    files.truncate(file, size)
                elif files.size(file) > size:
                    files.write(file, memoryview(b"\0"))
            with failing("sync", made, 0, size):
                files.sync(file)
        finally:
            with failing("sync", made, 0, size):
                files.close(file)
    except BaseException:
        if spare is None:
            with contextlib.suppress(OSError):
                files.remove(made)
        raise
    return size


def temporary(path: Path) -> Path:
    """The temporary name of a file that is going to be called `path`."""
    return path.with_name(path.name + TEMPORARY)


def atomic_replace(files: Files, path: Path, spare: Path | None = None) -> None:
    """Gives the temporary file of `path`, or a spare, its final name. That is not durable before `sync_directory`.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    with failing("rename", path):
        files.rename(spare or temporary(path), path)


def sync_directory(files: Files, directory: Path) -> None:
    """Makes durable what was renamed, made and removed in `directory`.

    Raises:
        TierIOError: a disk or its file system failed. Nobody knows then what is durable, and it is not tried again.
    """
    with failing("sync", directory):
        files.sync_directory(directory)


def sync_parent(files: Files, directory: Path) -> None:
    """Makes the name of a directory durable, where the one around it can be read.

    Where many users have directories side by side, often none may list them. Who may not read the directory around
    cannot sync it, and in most cases cannot have made anything in it either.

    Raises:
        TierIOError: a disk or its file system failed. Nobody knows then what is durable, and it is not tried again.
    """
    with failing("sync", directory.parent):
        try:
            files.sync_directory(directory.parent)
        except PermissionError as error:
            if not is_of_system(error):
                raise


def read_whole(files: Files, path: Path, most: int) -> bytes | None:
    """The content of a file; None: there is no such file.

    Args:
        files: the file system.
        path: the file.
        most: how many bytes are allowed. In a longer file a zero byte has to follow: [Note: room for commits].

    Raises:
        PathError: it is a link or no regular file, or cannot be read.
        CorruptionError: it is longer.
        TierIOError: a disk or its file system failed.
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
    if data[most:].strip(b"\0"):
        raise CorruptionError(f"is longer than {format_bytes(most)}", file=str(path))
    return data[:most]


@contextlib.contextmanager
def failing(operation: str, path: Path, offset: int = 0, length: int = 0) -> Iterator[None]:
    """A context that turns an OSError of the system into a TierIOError that says what failed.

    Args:
        operation: "read", "write", "sync", "rename" or another word for what is done.
        path: the file.
        offset: where in the file, in bytes.
        length: how many bytes.

    Raises:
        TierIOError: the operating system refused.
    """
    try:
        yield
    except OSError as error:
        if not is_of_system(error):
            raise
        raise TierIOError(operation, error.errno or errno.EIO, str(path), offset, length, str(error)) from error
