"""The directories of a run: how its files are called, and what a directory has to be."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from pathlib import Path
from typing import NamedTuple

from offload.errors import BudgetError, PathError, missing_parent
from offload.interrupts import is_of_system
from offload.io.files import Files
from offload.sizes import format_bytes

TEMPORARY = ".offload.new"
"""Ends the name of a file that is being written. Nobody else has files of such names."""
COMMIT_NAME = "COMMIT"
RECORD_START = b'{"schema":"offload '
"""How a COMMIT record, a manifest and a tag begin."""
LOCK_NAME = "offload.lock"
"""The lock of a directory; see storage/directory_lock.py."""
OLDER_SUFFIX = ".new"
"""Ends the name of a file that an older version was writing."""

_RUN, _STEP, _RANK = r"(?P<run>[0-9a-f]{32})", r"(?P<step>0|[1-9]\d{0,18})", r"(?P<rank>0|[1-9]\d{0,4})"
_SUFFIX = rf"(?P<suffix>{re.escape(TEMPORARY)}|{re.escape(OLDER_SUFFIX)})?"
_NAMES = [
    re.compile(pattern)
    for pattern in (
        rf"(?P<kind>manifest)-{_RUN}-{_STEP}-rank{_RANK}\.json{_SUFFIX}",
        rf"(?P<kind>extra)-{_RUN}-{_STEP}-rank{_RANK}\.safetensors{_SUFFIX}",
        rf"(?P<kind>tag)-{_RUN}-{_RANK}{_SUFFIX}",
        rf"(?P<kind>swap)-{_RUN}-{_RANK}",
        rf"(?P<kind>mark)-{_RUN}-{_RANK}-\d{{1,5}}",
        rf"(?P<kind>room)-{_RUN}-{_RANK}-(?:manifest|extra|record)[01]",
        rf"offload-rank{_RANK}\.swap(?P<suffix>{re.escape(OLDER_SUFFIX)})?",
    )
]


class FileName(NamedTuple):
    """What the name of a file says. The file may be somebody else's: only its content tells whose it is.

    Attributes:
        kind: "swap", "tag", "manifest", "extra", "room" or "mark"; "older": a swap file as older versions named it.
        rank: the rank that wrote it.
        run_id: 32 hex digits, of a mark the id of a start; "" for an older swap file, whose name does not say it.
        step: the step that was committed; 0 for files that have none in their name.
        suffix: TEMPORARY, OLDER_SUFFIX or "".
    """

    kind: str
    rank: int
    run_id: str
    step: int
    suffix: str


def file_name(name: str) -> FileName | None:
    """What `name` says if files of this library are called so, else None. COMMIT and the lock are not looked for."""
    for pattern in _NAMES:
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            kind, run, step = found.get("kind") or "older", found.get("run") or "", int(found.get("step") or 0)
            return FileName(kind, int(found["rank"]), run, step, found.get("suffix") or "")
    return None


def swap_name(run_id: str, rank: int) -> str:
    """The name of a rank's swap file, from its birth on. Each rank has its own, so that ranks can share a directory."""
    return f"swap-{run_id}-{rank}"


def tag_name(run_id: str, rank: int) -> str:
    """The name of the file that says of a directory which run's it is; see [Note: names never change] in live.py."""
    return f"tag-{run_id}-{rank}"


def room_name(run_id: str, rank: int, what: str) -> str:
    """The name of a spare file; see [Note: room for commits] in room.py."""
    return f"room-{run_id}-{rank}-{what}"


def mark_name(start: str, rank: int, number: int) -> str:
    """The name of a mark; see [Note: marks] in checkpoint/sharing.py.

    Args:
        start: the id of a start, 32 hex digits.
        rank: the rank that makes it.
        number: that of the rank's directory.
    """
    return f"mark-{start}-{rank}-{number}"


def mark_number(name: str, start: str) -> tuple[int, int] | None:
    """The rank and the number of its directory, if `name` is that of a mark of a start."""
    file = file_name(name)
    if file is None or (file.kind, file.run_id) != ("mark", start):
        return None
    return file.rank, int(name.rpartition("-")[2])


def older_swap_name(rank: int) -> str:
    """How versions before COMMIT format 2 named a rank's swap file. They lock it, so this version does, too."""
    return f"offload-rank{rank}.swap"


def require_file_size(file: str, needed: int, *, option: str = "path", advice: str = "") -> None:
    """Checks that this process may make a file of `needed` bytes.

    Args:
        file: the file, for the error.
        needed: bytes.
        option: the option that the error names.
        advice: what helps beside a higher limit.

    Raises:
        BudgetError: the limit of file sizes is lower.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise BudgetError(
            f"{file} needs {format_bytes(needed)}, and the limit of this process is {format_bytes(limit)} a file: "
            f"raise it (ulimit -f){advice and f', or {advice}'}",
            needed=needed,
            available=limit,
            option=option,
        )


def check_directory(path: Path, files: Files) -> None:
    """Checks that `path` is the directory of a run, or can be made one. Writes nothing.

    Args:
        path: the directory.
        files: the file system.

    Raises:
        PathError: it is no directory, cannot be made, or cannot be written to.
    """
    try:
        mode = files.stat(path).st_mode
    except FileNotFoundError:
        parent = path.parent
        if not files.is_directory(parent, follows=True):
            raise PathError(errno.ENOENT, missing_parent(path), str(path)) from None
        if not files.may_write(parent):
            raise PathError(errno.EACCES, f"its parent directory {parent} is not writable", str(path)) from None
        return
    except OSError as error:
        if not is_of_system(error):
            raise
        why = f"cannot be looked at: {error.strerror}"
        if isinstance(error, NotADirectoryError):
            file = next(above for above in reversed(path.parents) if not files.is_directory(above, follows=True))
            why = f"{file} is a file and no directory: give another path"
        raise PathError(error.errno, why, str(path)) from error
    if stat.S_ISLNK(mode):
        raise PathError(errno.ELOOP, f"is a symlink: give the directory itself, {files.real(path)}", str(path))
    if not stat.S_ISDIR(mode):
        raise PathError(errno.ENOTDIR, "is not a directory: give a directory for the swap files", str(path))
    if not files.may_write(path):
        raise PathError(errno.EACCES, "is not writable", str(path))


def replaceable_in(path: Path, files: Files) -> Path | None:
    """The directory in which any user of the machine may replace the directory of this run, or what is in it.

    It is `path` or the directory around it; None if neither is so. With the sticky bit, as /tmp has it, only the owner
    of a file or directory may rename it. A directory of this user's own is as its owner wants it.
    """
    for directory in (path, path.parent):
        try:
            info = files.stat(directory, follows=True)
        except OSError:
            continue
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX and info.st_uid != os.geteuid():
            return directory
    return None
