"""Removes a run's files: only those of this library, and only while no run holds them.

A file is recognized by its content: a swap file by its first bytes, a record, tag or manifest by being one. A damaged
file, and one with the tensors of `extra`, is recognized by its run, if another file of that run is here. A file that
only has such a name belongs to somebody else, and stays. A kept base goes, too, unless a live run reads it: other runs
that named it make it again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.atomic_file import failing, sync_directory
from offload.checkpoint.commit import MAX_COMMIT_BYTES, manifest_in, parse_commit
from offload.checkpoint.live import leave, read_tag
from offload.errors import ConfigError, CorruptionError, ResumeError
from offload.io.files import LOCAL
from offload.sizes import PAGE_BYTES
from offload.storage.directories import (
    COMMIT_NAME,
    OLDER_SUFFIX,
    RECORD_START,
    TEMPORARY,
    file_name,
)
from offload.storage.directory_lock import Claimant, Claims
from offload.storage.kept_base import is_base_name, is_in_use
from offload.storage.swap_file import new_run_id, open_locked, remove_if_empty
from offload.storage.swap_format import MAGIC, parse_superblock

_NOT_KNOWN = "is not a file of this library, or is damaged"
_RECORDS = (COMMIT_NAME, COMMIT_NAME + OLDER_SUFFIX, COMMIT_NAME + TEMPORARY)


@dataclass(frozen=True)
class Found:
    """Files with names as this library gives them.

    Attributes:
        own: those that are this library's, COMMIT first.
        strange: those that are not, or cannot be recognized, each with the reason.
    """

    own: tuple[Path, ...]
    strange: tuple[tuple[Path, str], ...]

    @property
    def refused(self) -> list[tuple[Path, str]]:
        """The strange files that keep a run from beginning in their directory."""
        return [(path, why) for path, why in self.strange if path.name == COMMIT_NAME]


def find(directories: Sequence[Path]) -> Found:
    """The files of a run in its directories.

    Raises:
        ConfigError: one is no directory.
        TierIOError: a disk or its file system failed.
    """
    paths = [path for directory in directories for path in _named(directory)]
    runs: dict[Path, set[str]] = {}
    unknown: dict[Path, str] = {}
    for path in paths:
        try:
            found = _runs_in(path)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENOENT):
                with failing("read", path):
                    raise
            unknown[path] = "is a link" if error.errno == errno.ELOOP else "is no regular file"
            continue
        if found is None:
            unknown[path] = _NOT_KNOWN
        else:
            runs[path] = found
    for path in [path for path in runs if is_base_name(path.name) and is_in_use(path)]:
        del runs[path]
        unknown[path] = "is a kept base, and a live run uses it"
    known = set().union(*runs.values())
    by_run = {path for path, why in unknown.items() if why == _NOT_KNOWN and _is_of(path, known)}
    own = tuple(path for path in paths if path in runs or path in by_run)
    return Found(own, tuple((path, why) for path, why in unknown.items() if path not in by_run))


def require_idle(files: Sequence[Path]) -> None:
    """Checks that no live run holds one of `files`.

    Raises:
        PathInUseError: a live run holds one.
        PathError: a file cannot be opened or locked.
    """
    with _locked(files):
        pass


@contextmanager
def _locked(files: Sequence[Path]) -> Iterator[None]:
    """A context in which no run can take one of these swap files.

    Raises:
        PathInUseError: a live run holds one.
        PathError: a file cannot be opened or locked.
    """
    claims = Claims(Claimant(new_run_id(), (LOCAL.host(),)), LOCAL)
    with ExitStack() as stack:
        for directory in dict.fromkeys(path.parent for path in files):
            stack.callback(claims.take(directory))
            stack.callback(leave, directory, LOCAL)
        for path in files:
            if _is_swap(path):
                stack.callback(open_locked(path, LOCAL).close)
        yield


def remove(files: Sequence[Path]) -> None:
    """Deletes files of a run, and their directories if nothing else is in them and they can be removed.

    The working directory named ".", a mount point, and what is in a directory of another user cannot.

    Args:
        files: what `find` found.

    Raises:
        PathInUseError: a live run holds one. Nothing is deleted.
        PathError: a file cannot be opened or locked. Nothing is deleted.
        TierIOError: a disk or its file system failed.
    """
    with _locked(files):
        records = [path for path in files if path.name == COMMIT_NAME]
        tags = [path for path in files if _is_kind(path, "tag")]
        # First the records, of all directories: without them the other files mean nothing. Tags last: they say so.
        for those in (records, [path for path in files if path not in (*records, *tags)], tags):
            for path in those:
                with failing("remove", path):
                    LOCAL.remove(path)
            for directory in dict.fromkeys(path.parent for path in those):
                sync_directory(LOCAL, directory)
    for directory in dict.fromkeys(path.parent for path in files):
        remove_if_empty(directory, LOCAL)


def _named(directory: Path) -> Iterator[Path]:
    """The files with names as this library gives them, COMMIT first."""
    if not LOCAL.is_directory(directory):
        raise ConfigError(f"{directory} is not a directory: give the directory of a run")
    with failing("read", directory):
        names = sorted(LOCAL.names(directory), key=lambda name: (name != COMMIT_NAME, name))
    for name in names:
        if name in _RECORDS or file_name(name) is not None or is_base_name(name):
            yield directory / name


def _runs_in(path: Path) -> set[str] | None:
    """The ids of the runs that a file of this library names; None: it is not recognized as one.

    Raises:
        OSError: the operating system refused.
    """
    if _is_swap(path):
        page = LOCAL.read(path, PAGE_BYTES)
        if page.startswith(MAGIC):
            try:
                return {parse_superblock(page[:PAGE_BYTES], str(path)).run_id}
            except (CorruptionError, ResumeError):
                return set()
        # A run that was cut off before it wrote the superblock leaves one page of zeros, or an empty file.
        return None if len(page) > PAGE_BYTES or any(page) else set()
    if path.name in _RECORDS:
        data = LOCAL.read(path, MAX_COMMIT_BYTES)
        if not data.startswith(RECORD_START) and (data or path.name == COMMIT_NAME):
            return None
        try:
            commit = parse_commit(data, str(path))
        except (CorruptionError, ResumeError):
            return set()
        return {commit.run_id} | ({commit.replaces} if commit.replaces else set())
    if _is_kind(path, "tag"):
        LOCAL.open(path, os.O_RDONLY).close()  # whether it is a link
        return None if (tag := read_tag(path)) is None else {tag.run_id}
    if (manifest := manifest_in(path)) is not None:
        return {manifest.run_id}
    LOCAL.open(path, os.O_RDONLY).close()  # whether it is a link
    return None


def _is_swap(path: Path) -> bool:
    return _is_kind(path, "swap", "older") or is_base_name(path.name)


def _is_kind(path: Path, *kinds: str) -> bool:
    return (file := file_name(path.name)) is not None and file.kind in kinds


def _is_of(path: Path, runs: set[str]) -> bool:
    """Whether a file that could not be recognized belongs to one of `runs`."""
    if (file := file_name(path.name)) is not None:
        return file.run_id in runs
    return path.name == COMMIT_NAME and any(run.encode() in LOCAL.read(path, MAX_COMMIT_BYTES) for run in runs)
