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
"""Of the first rank, or the only one; `swap_name` of the others."""
COMMIT_NAME = "COMMIT"
RECORD_START = b'{"schema":"offload '
"""How a COMMIT record and a manifest begin."""

_NAME = re.compile(
    r"(?:(?P<kind>manifest|extra)-(?P<run>[0-9a-f]{32})-(?P<step>0|[1-9]\d{0,18})|(?P<swap>offload))"
    r"-rank(?P<rank>0|[1-9]\d{0,4})(?P<type>\.swap|\.json|\.safetensors)(?P<suffix>(?:\.offload)?\.new)?"
)


class FileName(NamedTuple):
    """What the name of a file says. It may be somebody else's: a file is known by its content.

    kind: "swap", "manifest" or "extra"; run_id (32 hex digits) and step: not in the name of a swap file; suffix:
    NEW_SUFFIX, TEMPORARY or "".
    """

    kind: str
    rank: int
    run_id: str
    step: int
    suffix: str


def file_name(name: str) -> FileName | None:
    """What `name` says if files of this library are called so, else None. Not for COMMIT."""
    match = _NAME.fullmatch(name)
    if match is None or (match["type"] == ".swap") != (match["swap"] is not None):
        return None
    suffix = match["suffix"] or ""
    if match["swap"] is None:
        return FileName(match["kind"], int(match["rank"]), match["run"], int(match["step"]), suffix)
    return None if suffix == TEMPORARY else FileName("swap", int(match["rank"]), "", 0, suffix)


def swap_name(rank: int) -> str:
    """The swap file's: each rank has its own, so that a directory can be shared."""
    return f"offload-rank{rank}.swap"


def require_file_size(file: str, needed: int, *, option: str = "path", advice: str = "") -> None:
    """TODO.

    Raises:
        BudgetError: if this process may make no file of `needed` bytes.

    Args:
        option: says where.
        advice: what helps beside another limit.
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
    """Checks that `path` is, or can be made, the directory of a run; writes nothing.

    Args:
        resumes: whether it may hold a commit.

    Raises:
        PathError: a file or directory cannot be used.
        ResumeError: what is committed cannot be resumed.
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
    """The directory, `path` or the one that it is in, in which any user of the machine may replace what this run has.

    None if there is none: with the sticky bit, as /tmp has it, only the owner of a file or directory may rename it. A
    directory of this user's own is as its owner wants it.
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
    """TODO.

    Raises:
        ResumeError: if what is called COMMIT there is none, or cannot be read.
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
    """Whether a committed run has, or may have, a file here. Its COMMIT record is in rank 0's first directory only."""
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
    """The run and the stripe of a rank's swap file. A damaged one counts, too: this is only used to refuse."""
    try:
        page = files.read(path / swap_name(rank), PAGE_BYTES)[:PAGE_BYTES]
        block = parse_superblock(page, str(path), is_whole=False)
    except (OSError, CorruptionError, ResumeError):
        return None
    return block.run_id, block.stripe[0]
