"""Which of the files in a run's directories are the committed ones, and bringing them to their place.

[Note: another layout]
A run that is resumed in another layout (chunks, directories, ranks, split masters) gets another run id, and writes its
swap files beside the old ones, under their names with `.new`. Then it commits the same step; the record says which run
id it `replaces`, and decides. What follows is `settle`, which only clears up and may be cut off anywhere: a record of
the old run in another directory goes first, for the old files mean nothing without it; then the `.new` files get their
names, and what is left of the old run is removed. Files are known by the run id in them, never by the name alone: a
`.new` file that no record names was left by a run that was cut off, and goes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from offload.checkpoint.blocks import Superblock, parse_superblock
from offload.checkpoint.commit import Commit, read_commit, remove_superseded
from offload.checkpoint.files import Files, failing, sync_directory
from offload.errors import CorruptionError, PathError, ResumeError
from offload.io.engine import IOFile
from offload.sizes import PAGE_BYTES
from offload.store.claim import lock
from offload.store.directories import ASIDE, COMMIT_NAME, holds_commit, swap_name

_SWAP = re.compile(rf"offload-rank(0|[1-9]\d*)\.swap({re.escape(ASIDE)})?")


@dataclass(frozen=True)
class Swap:
    """A file with a swap file's name. block: its superblock, None if it has none that makes sense."""

    path: Path
    rank: int
    is_aside: bool
    block: Superblock | None

    @property
    def run_id(self) -> str | None:
        return None if self.block is None else self.block.run_id


def swaps(directory: Path) -> Iterator[Swap]:
    """The regular files in `directory` with a swap file's name; none if there is no such directory.

    Raises: PathError.
    """
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(directory)) from error
    for name in names:
        match = _SWAP.fullmatch(name)
        path = directory / name
        if match is not None and stat.S_ISREG(os.lstat(path).st_mode):
            yield Swap(path, int(match[1]), match[2] is not None, _block_of(path))


def directories_of(run_id: str, rank: int, places: Sequence[Path]) -> dict[int, Path]:
    """By number of the stripe: which of `places` has a swap file of `rank` of this run."""
    return {
        swap.block.stripe[0]: place
        for place in places
        for swap in swaps(place)
        if swap.block is not None and swap.rank == rank and swap.run_id == run_id
    }


def last_commit(places: Sequence[Path], files: Files) -> tuple[Path, Commit] | None:
    """The last commit in the directories of a run, and in which its record lies; None if there is none.

    Raises: ResumeError (a directory of a committed run, whose record is in none; several runs'; a newer version's),
    CorruptionError, PathError, TierIOError.
    """
    found = [(place, commit) for place in places if (commit := read_commit(place, files)) is not None]
    if not found:
        first = (swap for place in places for swap in swaps(place) if swap.block is not None and swap.rank == 0)
        begun = {swap.run_id for swap in first if swap.block is not None and not swap.block.stripe[0]}
        for place in places:
            # Where the first file of a run is and no record, nothing was ever committed.
            if holds_commit(place) and not begun & {swap.run_id for swap in swaps(place)}:
                raise ResumeError(
                    f"{place} belongs to a committed run whose COMMIT record is not in {listed(places)}: give all the "
                    "directories of that run"
                )
        return None
    replaced = {commit.replaces for _, commit in found}
    last = [one for one in found if one[1].run_id not in replaced]
    if len(last) != 1:
        raise ResumeError(
            f"{listed([place for place, _ in found])} hold commits of several runs, or snapshots: name the directories "
            "of one"
        )
    return last[0]


def require_no_other(directories: Sequence[Path], commit: Commit) -> None:
    """Raises: ResumeError if one of `directories` has a file of a committed run that is not the one of `commit`."""
    for directory in directories:
        runs = {swap.run_id for swap in swaps(directory)}
        if holds_commit(directory) and not runs & {commit.run_id, commit.replaces}:
            raise ResumeError(
                f"{directory} holds a file of another committed run: choose another directory, or remove that run "
                f"with `offload remove {directory}`"
            )


def require_free(directories: Sequence[Path], commit: Commit) -> None:
    """Whether no live run of another kind than that of `commit` has a swap file in `directories`.

    Raises: PathInUseError, PathError.
    """
    for directory in directories:
        for swap in swaps(directory):
            if not swap.is_aside and swap.run_id not in (commit.run_id, commit.replaces):
                claimed(swap.path).close()


def settle(places: Sequence[Path], home: Path, commit: Commit, files: Files, *, locked: bool) -> None:
    """Makes the files in `places` those of `commit` alone, under their names. See [Note: another layout].

    Args: home: where the record lies; locked: this process holds the files that are moved or removed.
    Raises: PathInUseError (a live run holds one of them), PathError, TierIOError.
    """
    before = commit.replaces
    with ExitStack() as undo:
        found = {place: [*swaps(place)] for place in places}
        for swap in () if locked else chain(*found.values()):
            if swap.is_aside or swap.run_id in (commit.run_id, before):
                undo.callback(claimed(swap.path).close)
        _remove_record(places, home, before, files)
        for place, those in found.items():
            if _put_in_place(those, commit) | remove_superseded(place, commit, None, files):
                sync_directory(files, place)


def _remove_record(places: Sequence[Path], home: Path, run_id: str | None, files: Files) -> None:
    """Removes the record of another run, durably: without it that run's files mean nothing."""
    for place in places:
        if run_id is None or place == home:
            continue
        other = read_commit(place, files)
        if other is not None and other.run_id == run_id:
            with failing("remove", place / COMMIT_NAME):
                files.remove(place / COMMIT_NAME)
            sync_directory(files, place)


def _put_in_place(found: Sequence[Swap], commit: Commit) -> bool:
    """Gives the swap files of `commit` in a directory their names, and removes what is in their way; whether any."""
    new = [swap for swap in found if swap.run_id == commit.run_id and swap.is_aside]
    others = [swap for swap in found if swap.run_id != commit.run_id]
    stale = [swap for swap in others if swap.is_aside or swap.run_id == commit.replaces]
    renamed = set()
    for swap in new:
        place = swap.path.with_name(swap_name(swap.rank))
        with failing("rename", swap.path):
            os.rename(swap.path, place)
        renamed.add(place)
    for swap in stale:
        if swap.path not in renamed and (swap.run_id is not None or _is_blank(swap.path)):
            with failing("remove", swap.path):
                os.unlink(swap.path)
    return bool(new or stale)


def claimed(path: Path) -> IOFile:
    """Opens and locks a file that is to be moved or removed. Raises: PathInUseError, PathError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PathError(error.errno, f"cannot be opened: {error.strerror}", str(path)) from error
    file = IOFile(str(path), fd, direct=False)
    try:
        lock(file)
    except BaseException:
        file.close()
        raise
    return file


def _block_of(path: Path) -> Superblock | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return parse_superblock(file.read(PAGE_BYTES), str(path))
    except (CorruptionError, ResumeError):
        return None
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _is_blank(path: Path) -> bool:
    """Whether it was made, and then the run did not begin."""
    with failing("read", path), open(path, "rb") as file:
        return not any(file.read(PAGE_BYTES))


def listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths) or "no directory"
