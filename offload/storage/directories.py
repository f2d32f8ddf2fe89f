"""The directories of a run: what the files in them are called, and whether a run may use one."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from pathlib import Path

from offload.errors import PathError, ResumeError
from offload.sizes import PAGE_BYTES
from offload.storage.files import LOCAL, Files

ASIDE = ".new"
"""Ends the name of a swap file that is beside the one whose place it is going to take."""
TEMPORARY = ".offload.new"
"""Ends the name of a file that is being written. Nobody else has files of such names."""
SWAP_NAME = "offload-rank0.swap"
"""Of the first rank, or the only one; `swap_name` of the others."""
COMMIT_NAME = "COMMIT"

RECORD_START = b'{"schema":"offload '
"""How a COMMIT record begins, and a manifest."""
MAGIC = b"offload swap\n\0\0\0"
SUPERBLOCK = struct.Struct("<16sIIQ")
"""How a swap file begins, see slots.py: magic, format, length and checksum of the text that follows."""

_MANIFEST = re.compile(r"manifest-([0-9a-f]{32})-\d+-rank(\d{1,5})\.json")


def swap_name(rank: int) -> str:
    """The swap file's: each rank has its own, so that a directory can be shared."""
    return f"offload-rank{rank}.swap"


def check_directory(path: Path, *, resumes: bool = False) -> None:
    """Whether `path` is, or can be made, the directory of a run; writes nothing.

    Args: resumes: whether it may hold a commit.

    Raises: PathError, ResumeError.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        parent = path.parent
        if not parent.is_dir():
            raise PathError(
                errno.ENOENT, "the directory to make it in does not exist: make it first", str(path)
            ) from None
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PathError(errno.EACCES, "its parent directory is not writable", str(path)) from None
        return
    except OSError as error:
        raise PathError(error.errno, f"cannot be looked at: {error.strerror}", str(path)) from error
    if stat.S_ISLNK(mode):
        raise PathError(errno.ELOOP, f"is a symlink: give the directory itself, {os.path.realpath(path)}", str(path))
    if not stat.S_ISDIR(mode):
        raise PathError(errno.ENOTDIR, "is not a directory: give a directory for the swap files", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "is not writable", str(path))
    if not resumes and holds_commit(path):
        _require_own_record(path)
        raise ResumeError(
            f"{path} holds a committed run: give resume=True to continue it, choose another path, or remove it with "
            f"`offload remove {path}`"
        )


def _require_own_record(path: Path) -> None:
    """Raises: ResumeError if what is called COMMIT there is none, or cannot be read."""
    try:
        is_own = LOCAL.read(path / COMMIT_NAME, len(RECORD_START)).startswith(RECORD_START)
    except FileNotFoundError:
        return
    except OSError:
        is_own = False
    if not is_own:
        raise ResumeError(
            f"{path / COMMIT_NAME} is no record of a commit, or a damaged one: move it away, or choose another path"
        )


def holds_commit(path: Path, files: Files = LOCAL) -> bool:
    """Whether a committed run has, or may have, a file here. Its COMMIT record is in rank 0's first directory only."""
    try:
        names = files.names(path)
    except OSError:
        return False
    if COMMIT_NAME in names:
        return True
    found = {(match[1], int(match[2])) for name in names if (match := _MANIFEST.fullmatch(name))}
    decided_here = _known(path, 0, files)
    own = None if decided_here is None or decided_here[1] else decided_here[0]
    return any(
        run != own and (known := _known(path, rank, files)) is not None and known[0] == run for run, rank in found
    )


def _known(path: Path, rank: int, files: Files) -> tuple[str, int] | None:
    """Of whose run a rank's swap file is, and which of its stripes; nothing is relied on but to refuse."""
    try:
        page = files.read(path / swap_name(rank), PAGE_BYTES)
        magic, _, length, _ = SUPERBLOCK.unpack_from(page)
        known = json.loads(page[SUPERBLOCK.size : SUPERBLOCK.size + length])
        return (str(known["run_id"]), int(known["stripe"][0])) if magic == MAGIC else None
    except (OSError, ValueError, TypeError, LookupError, struct.error):
        return None
