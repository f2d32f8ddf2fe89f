"""The lock of a directory: the ranks of one run share it, and it keeps all other runs out.

[Note: the lock of a directory]
`offload.lock` is locked with flock by every rank that has the directory, shared, and holds the id of their start,
which all ranks of one start know. Whoever finds the lock free takes it alone, writes the id, and then shares it.
Whoever finds it taken shares it and reads the id: another start's is a run in use. So of two simultaneous starts one
wins, and a rank that comes late joins its own. Taking the lock alone again after another start has read the id is
left to the kernel: where that loses the lock in between, the other start has written its id, and wins.

The file stays when the run ends. Who removes it holds it, and whoever has opened it before finds that its name leads
elsewhere, and opens it again.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from offload.errors import PathInUseError
from offload.io.engine import IOFile
from offload.io.files import BUSY, Files, unusable
from offload.storage.directories import LOCK_NAME, file_name
from offload.storage.swap_file import IN_USE, any_is_held

PATIENCE_S = 2.0
"""For how long the id of whoever has the lock alone is waited for, which it writes at once."""


def claim(directory: Path, start: bytes, files: Files) -> IOFile:
    """Takes the lock of a directory for the ranks of one start. Closing what is returned gives it back.

    A run of a version that does not know this lock is seen by the locks of its swap files.

    Args:
        directory: the directory, which is there.
        start: the id of the start, the same on all of its ranks.
        files: the file system.

    Raises:
        PathInUseError: a live run, or another start, has the directory.
        PathError: the lock cannot be opened, or the file system cannot lock it.
    """
    path, ends = directory / LOCK_NAME, time.monotonic() + PATIENCE_S
    _require_no_older(directory, files)
    while True:
        with unusable("cannot be locked", path, but=BUSY):
            file = files.open_or_create(path)
        try:
            with unusable("cannot be locked", path, but=BUSY):
                is_shared = _share(file, start, files)
            if is_shared and files.leads_to(path, file):
                if _id_in(file, files) != start:
                    raise PathInUseError(errno.EBUSY, IN_USE, str(directory))
                _require_no_older(directory, files)
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        if not is_shared:  # somebody writes its id now, or has it alone for good
            if time.monotonic() > ends:
                raise PathInUseError(errno.EBUSY, IN_USE, str(directory))
            time.sleep(0.01)


def _require_no_older(directory: Path, files: Files) -> None:
    """Checks that no process holds a file that older versions lock.

    Raises:
        PathInUseError: one does.
        PathError: a file cannot be opened or locked.
    """
    found = ((name, file_name(name)) for name in files.names(directory))
    if any_is_held(directory, [name for name, file in found if file and file.kind == "older"], files):
        raise PathInUseError(errno.EBUSY, IN_USE, str(directory))


def _share(file: IOFile, start: bytes, files: Files) -> bool:
    """Shares the lock, after having taken it alone and written the id of the start, if that was possible.

    Returns:
        Whether the lock is shared now.

    Raises:
        OSError: the file system cannot lock it.
    """
    with suppress(BlockingIOError, PermissionError):
        files.lock(file, exclusive=True)
        files.set_content(file, start)
    try:
        files.lock(file, exclusive=False)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _id_in(file: IOFile, files: Files) -> bytes:
    found = bytearray(17)
    return bytes(found[: files.read_at(file, 0, memoryview(found))])
