"""Which of the files in a run's directories are the committed ones, and bringing them to their place.

[Note: another layout]
A run that is resumed in another layout (chunks, directories, ranks, split masters) gets another run id, and writes its
swap files beside the old ones, under their names with `.new`. Then it commits the same step; the record says which run
id it `replaces`, and decides. What follows is `settle`, which only clears up and may be cut off anywhere: a record of
the old run in another directory goes first, for the old files mean nothing without it; then the `.new` files get their
names, and what is left of the old run is removed. Over ranks each does so in its own directories, one rank after the
other, and those with the old record first. Files are known by the run id in them, never by the name alone: a
`.new` file that no record names was left by a run that was cut off, and goes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from offload.checkpoint.atomic_file import failing, sync_directory
from offload.checkpoint.commit import FILE_NAME, Commit, read_commit, remove_superseded, superseded
from offload.errors import CorruptionError, PathError, ResumeError
from offload.io.engine import IOFile
from offload.sizes import PAGE_BYTES
from offload.storage.claim import lock
from offload.storage.directories import ASIDE, COMMIT_NAME, holds_commit, swap_name
from offload.storage.files import Files
from offload.storage.swap_format import Superblock, parse_superblock

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


def swaps(directory: Path, files: Files) -> Iterator[Swap]:
    """The regular files in `directory` with a swap file's name; none if there is no such directory.

    Raises: PathError.
    """
    for name in names_in(directory, files):
        match = _SWAP.fullmatch(name)
        if match is not None and (page := _page_of(directory / name, files)) is not None:
            yield Swap(directory / name, int(match[1]), match[2] is not None, _block_of(page, directory / name))


def names_in(directory: Path, files: Files) -> list[str]:
    """What lies there, sorted; nothing if there is no such directory. Raises: PathError."""
    try:
        return sorted(files.names(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(directory)) from error


def directories_of(run_id: str, rank: int, places: Sequence[Path], files: Files) -> dict[int, Path]:
    """By number of the stripe: which of `places` has a swap file of `rank` of this run."""
    return {
        swap.block.stripe[0]: place
        for place in places
        for swap in swaps(place, files)
        if swap.block is not None and swap.rank == rank and swap.run_id == run_id
    }


@dataclass(frozen=True)
class Looked:
    """What some directories say of commits, without judging it: several ranks may each see a part of a run's.

    records: of COMMIT, and where; begun: runs whose first file, beside which their record would be, lies there without
    one; held: directories with a file of a committed run and no record, and the runs of which they have files.
    """

    records: tuple[tuple[Path, Commit], ...] = ()
    begun: frozenset[str] = frozenset()
    held: tuple[tuple[Path, frozenset[str]], ...] = ()

    def __add__(self, other: Looked) -> Looked:
        return Looked(self.records + other.records, self.begun | other.begun, self.held + other.held)


def look(places: Sequence[Path], files: Files) -> Looked:
    """Raises: CorruptionError (a record), ResumeError (a newer version's), PathError, TierIOError."""
    records = tuple((place, commit) for place in places if (commit := read_commit(place, files)) is not None)
    if records:
        return Looked(records)
    found = {place: swaps(place, files) for place in places}
    runs = {place: [(swap.rank, swap.block) for swap in those if swap.block] for place, those in found.items()}
    begun = {block.run_id for those in runs.values() for rank, block in those if (rank, block.stripe[0]) == (0, 0)}
    ids = {place: frozenset(block.run_id for _, block in those) for place, those in runs.items()}
    return Looked((), frozenset(begun), tuple((place, ids[place]) for place in places if holds_commit(place, files)))


def together(looks: Sequence[Looked]) -> Looked:
    """What ranks see together, by rank: a record that several see, in a shared directory, counts once."""
    found = Looked()
    for rank, one in enumerate(looks):
        known = {commit for _, commit in found.records}
        names = {place for place, _ in found.records}
        # Where machines have disks of their own, other directories have the same name there.
        new = [
            (Path(f"{place} (of rank {rank})") if place in names else place, commit)
            for place, commit in one.records
            if commit not in known
        ]
        found += Looked(tuple(new), one.begun, one.held)
    return found


def last_commit(places: Sequence[Path], files: Files) -> tuple[Path, Commit] | None:
    """The last commit in the directories of a run, and in which its record lies; None if there is none.

    Raises: as `last_of` and `look`.
    """
    return last_of(look(places, files), places)


def last_of(looked: Looked, places: Sequence[Path]) -> tuple[Path, Commit] | None:
    """The last commit, and where its record lies; None if there is none. Args: places: that were looked at.

    Raises: ResumeError (a directory of a committed run, whose record is in none; several runs').
    """
    found = looked.records
    if not found:
        for place, runs in looked.held:
            # Where the first file of a run is and no record, nothing was ever committed.
            if not looked.begun & runs:
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


def require_no_other(directories: Sequence[Path], commit: Commit, files: Files) -> None:
    """Raises: ResumeError if one of `directories` has a file of a committed run that is not the one of `commit`."""
    for directory in directories:
        runs = {swap.run_id for swap in swaps(directory, files) if swap.run_id is not None}
        if not runs:  # where the swap file is missing or damaged, other files say whose the directory is
            runs = {match[1] for name in names_in(directory, files) if (match := FILE_NAME.fullmatch(name))}
            record = read_commit(directory, files)
            runs |= set() if record is None else {record.run_id}
        if holds_commit(directory, files) and not runs & {commit.run_id, commit.replaces}:
            raise ResumeError(
                f"{directory} holds a file of another committed run: choose another directory, or remove that run "
                f"with `offload remove {directory}`"
            )


def require_free(directories: Sequence[Path], commit: Commit, files: Files) -> None:
    """Whether no live run of another kind than that of `commit` has a swap file in `directories`.

    Raises: PathInUseError, PathError.
    """
    for swap in foreign(directories, commit, files):
        claimed(swap.path, files).close()


def foreign(directories: Sequence[Path], commit: Commit, files: Files) -> list[Swap]:
    """Swap files of other runs, which are in the way. Raises: PathError."""
    ours = (commit.run_id, commit.replaces)
    found = (swap for place in directories for swap in swaps(place, files))
    return [swap for swap in found if not swap.is_aside and swap.run_id not in ours]


def holds_record(places: Sequence[Path], run_id: str | None, files: Files) -> bool:
    """Whether one of `places` has the record of this run. Raises: as `read_commit`."""
    records = (read_commit(place, files) for place in places)
    return run_id is not None and any(record is not None and record.run_id == run_id for record in records)


def is_settled(places: Sequence[Path], commit: Commit, files: Files) -> bool:
    """Whether `settle` would change nothing but a record that was replaced. Raises: PathError, TierIOError."""
    for place in places:
        new, stale = _astray([*swaps(place, files)], commit, files)
        if new or stale or superseded(place, commit, None, files):
            return False
    return True


def settle(places: Sequence[Path], commit: Commit, files: Files, *, locked: bool) -> None:
    """Makes the files in `places` those of `commit` alone, under their names. See [Note: another layout].

    Args: locked: this process holds the files that are moved or removed.
    Raises: PathInUseError (a live run holds one of them), PathError, TierIOError.
    """
    before = commit.replaces
    with ExitStack() as undo:
        found = {place: [*swaps(place, files)] for place in places}
        for swap in () if locked else chain(*found.values()):
            if swap.is_aside or swap.run_id in (commit.run_id, before):
                undo.callback(claimed(swap.path, files).close)
        _remove_record(places, before, files)
        for place, those in found.items():
            # As long as the swap file of a start that was cut off is there, it is known whose the other files are.
            left = [swap.run_id for swap in _astray(those, commit, files)[1] if swap.run_id is not None]
            if remove_superseded(place, commit, None, files, left) | _put_in_place(those, commit, files):
                sync_directory(files, place)


def _remove_record(places: Sequence[Path], run_id: str | None, files: Files) -> None:
    """Removes the record of another run, durably: without it that run's files mean nothing."""
    for place in places:
        if holds_record([place], run_id, files):
            with failing("remove", place / COMMIT_NAME):
                files.remove(place / COMMIT_NAME)
            sync_directory(files, place)


def _astray(found: Sequence[Swap], commit: Commit, files: Files) -> tuple[list[Swap], list[Swap]]:
    """Of the swap files in a directory those of `commit` that lack their names, and those that are to go."""
    new = [swap for swap in found if swap.run_id == commit.run_id and swap.is_aside]
    others = [swap for swap in found if swap.run_id != commit.run_id]
    stale = [swap for swap in others if swap.is_aside or swap.run_id == commit.replaces]
    return new, [swap for swap in stale if swap.run_id is not None or _is_blank(swap.path, files)]


def _put_in_place(found: Sequence[Swap], commit: Commit, files: Files) -> bool:
    """Gives the swap files of `commit` in a directory their names, and removes what is in their way; whether any."""
    new, stale = _astray(found, commit, files)
    renamed = set()
    for swap in new:
        place = swap.path.with_name(swap_name(swap.rank))
        with failing("rename", swap.path):
            files.rename(swap.path, place)
        renamed.add(place)
    for swap in stale:
        if swap.path not in renamed:
            with failing("remove", swap.path):
                files.remove(swap.path)
    return bool(new or stale)


def claimed(path: Path, files: Files) -> IOFile:
    """Opens and locks a file that is to be moved or removed. Raises: PathInUseError, PathError."""
    try:
        fd = files.open(path, os.O_RDWR)
    except OSError as error:
        raise PathError(error.errno, f"cannot be opened: {error.strerror}", str(path)) from error
    file = IOFile(str(path), fd, direct=False)
    try:
        lock(file)
    except BaseException:
        file.close()
        raise
    return file


def _page_of(path: Path, files: Files) -> bytes | None:
    """The first page of a regular file; None if it is something else, or gone. Raises: PathError."""
    try:
        return files.read(path, PAGE_BYTES)[:PAGE_BYTES]
    except OSError as error:
        # A run that ends removes what is beside its files. EINVAL: no regular file, as `Files.read` says.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO):
            return None
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _block_of(page: bytes, path: Path) -> Superblock | None:
    try:
        return parse_superblock(page, str(path))
    except (CorruptionError, ResumeError):
        return None


def _is_blank(path: Path, files: Files) -> bool:
    """Whether it was made, and then the run did not begin: it has no more than a page before it has a superblock."""
    try:
        page = files.read(path, PAGE_BYTES)
    except OSError:
        return False
    return len(page) <= PAGE_BYTES and not any(page)


def listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths) or "no directory"
