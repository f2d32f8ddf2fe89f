"""Taking a run's files away: this library's own, and only while no run holds them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offload.checkpoint import commit as commits
from offload.checkpoint.commit import SCHEMA, SNAPSHOT_SCHEMA
from offload.checkpoint.files import failing, sync_directory
from offload.errors import ConfigError
from offload.io.engine import IOFile
from offload.store.claim import lock
from offload.store.directories import ASIDE, COMMIT_NAME, MAGIC
from offload.store.files import LOCAL

_SWAP = re.compile(rf"offload-rank\d+\.swap(?:{re.escape(ASIDE)})?")


def ours(directory: Path) -> list[Path]:
    """The files of this library in `directory`, COMMIT first.

    Raises: ConfigError if it is no directory, TierIOError.
    """
    if not directory.is_dir() or directory.is_symlink():
        raise ConfigError(f"{directory} is not a directory: give the directory of a run")
    with failing("read", directory):
        names = sorted(os.listdir(directory), key=lambda name: (name != COMMIT_NAME, name))
    return [directory / name for name in names if _is_ours(directory / name)]


def remove(files: Sequence[Path]) -> None:
    """Deletes `files`, from `ours`, and their directories if nothing else is in them.

    Raises: PathInUseError (a live run holds one), before anything is deleted; PathError, TierIOError.
    """
    with ExitStack() as stack:
        for path in files:
            if _SWAP.fullmatch(path.name):
                with failing("read", path):
                    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                file = IOFile(str(path), fd, direct=False)
                stack.callback(file.close)
                lock(file)
        records = [path for path in files if path.name == COMMIT_NAME]
        # Without them the others mean nothing, in whatever directory they are.
        for those in (records, [path for path in files if path.name != COMMIT_NAME]):
            for path in those:
                with failing("remove", path):
                    LOCAL.remove(path)
            for directory in dict.fromkeys(path.parent for path in those):
                sync_directory(LOCAL, directory)
    for directory in dict.fromkeys(path.parent for path in files):
        if not os.listdir(directory):
            directory.rmdir()


def _is_ours(path: Path) -> bool:
    """By its name, and where the name is a common one by how it begins."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    if commits._OURS.fullmatch(path.name):
        return True
    if path.name.removesuffix(ASIDE) == COMMIT_NAME:
        begins = (b'{"schema":"%s"' % schema.encode() for schema in (SCHEMA, SNAPSHOT_SCHEMA))
        return path.name != COMMIT_NAME or any(_begins(path, start) for start in begins)
    if not _SWAP.fullmatch(path.name):
        return False
    # Blank, or empty: made, and then the run did not begin.
    blank = _begins(path, bytes(len(MAGIC))) or not os.lstat(path).st_size
    return blank or _begins(path, MAGIC)


def _begins(path: Path, start: bytes) -> bool:
    with failing("read", path), open(path, "rb") as file:
        return file.read(len(start)) == start
