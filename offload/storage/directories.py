"""The directories of a run: how its files are called, and what a directory has to be."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from pathlib import Path
from typing import NamedTuple

from offload.errors import BudgetError, CorruptionError, PathError, ResumeError, missing_parent
from offload.interrupts import is_of_system
from offload.io.files import Files
from offload.sizes import PAGE_BYTES, format_bytes
from offload.storage.swap_format import parse_superblock

NEW_SUFFIX = ".new"
"""Ends the temporary name of a swap file that is going to replace another one."""
TEMPORARY = ".offload.new"
"""Ends the name of a file that is being written. Nobody else has files of such names."""
SWAP_NAME = "offload-rank0.swap"
"""The name of the swap file of the first rank, or the only one. `swap_name` has the names of the others."""
COMMIT_NAME = "COMMIT"
RECORD_START = b'{"schema":"offload '
"""How a COMMIT record and a manifest begin."""

_NAME = re.compile(
    r"(?:(?P<kind>manifest|extra)-(?P<run>[0-9a-f]{32})-(?P<step>0|[1-9]\d{0,18})|(?P<swap>offload))"
    r"-rank(?P<rank>0|[1-9]\d{0,4})(?P<type>\.swap|\.json|\.safetensors)(?P<suffix>(?:\.offload)?\.new)?"
)


class FileName(NamedTuple):
    """What the name of a file says. The file may be somebody else's: only its content tells whose it is.

    Attributes:
        kind: "swap", "manifest" or "extra".
        rank: the rank that wrote it.
        run_id: 32 hex digits; "" for a swap file, whose name does not say it.
        step: the step that was committed; 0 for a swap file, whose name does not say it.
        suffix: NEW_SUFFIX, TEMPORARY or "".
    """

    kind: str
    rank: int
    run_id: str
    step: int
    suffix: str


def file_name(name: str) -> FileName | None:
    """What `name` says if files of this library are called so, else None. COMMIT is not looked for."""
    match = _NAME.fullmatch(name)
    if match is None or (match["type"] == ".swap") != (match["swap"] is not None):
        return None
    suffix = match["suffix"] or ""
    if match["swap"] is None:
        return FileName(match["kind"], int(match["rank"]), match["run"], int(match["step"]), suffix)
    return None if suffix == TEMPORARY else FileName("swap", int(match["rank"]), "", 0, suffix)


def swap_name(rank: int) -> str:
    """The name of a rank's swap file. Each rank has its own, so that ranks can share a directory."""
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


def check_directory(path: Path, files: Files, *, resumes: bool = False) -> None:
    """Checks that `path` is the directory of a run, or can be made one. Writes nothing.

    Args:
        path: the directory.
        files: the file system.
        resumes: whether it may hold a commit.

    Raises:
        PathError: it is no directory, cannot be made, or cannot be written to.
        ResumeError: it holds a commit, or a file called COMMIT, and it must not.
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
    if not resumes and holds_commit(path, files):
        _require_own_record(path, files)
        raise ResumeError(
            f"{path} holds a committed run: give resume=True to continue it, choose another path, or remove it with "
            f"`offload remove {path}`"
        )


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


def _require_own_record(path: Path, files: Files) -> None:
    """Checks that a file called COMMIT, if there is one, is a record of this library.

    Raises:
        ResumeError: it is none, or cannot be read.
    """
    try:
        is_own = files.read(path / COMMIT_NAME, len(RECORD_START)).startswith(RECORD_START)
    except FileNotFoundError:
        return
    except OSError:
        is_own = False
    if not is_own:
        raise ResumeError(
            f"{path / COMMIT_NAME} is no record of a commit, or a damaged one: move it away, or choose another path"
        )


def holds_commit(path: Path, files: Files) -> bool:
    """Whether a committed run has, or may have, a file in `path`.

    The COMMIT record of a run is in rank 0's first directory only, so other files tell it, too.
    """
    try:
        names = files.names(path)
    except OSError:
        return False
    if COMMIT_NAME in names:
        return True
    found = {(name.run_id, name.rank) for name in map(file_name, names) if name and name.kind == "manifest"}
    decided_here = _run_and_stripe(path, 0, files)
    own = None if decided_here is None or decided_here[1] else decided_here[0]
    return any(
        run != own and (known := _run_and_stripe(path, rank, files)) is not None and known[0] == run
        for run, rank in found
    )


def _run_and_stripe(path: Path, rank: int, files: Files) -> tuple[str, int] | None:
    """The run and the stripe that a rank's swap file names, even if it is damaged: this is used only to refuse."""
    try:
        page = files.read(path / swap_name(rank), PAGE_BYTES)[:PAGE_BYTES]
        block = parse_superblock(page, str(path), is_whole=False)
    except (OSError, CorruptionError, ResumeError):
        return None
    return block.run_id, block.stripe[0]
