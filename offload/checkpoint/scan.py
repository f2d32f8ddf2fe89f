"""Scans a run's directories: which files are the committed ones, and what is left of others and has to be cleaned up.

[Note: another layout]
A run that is resumed in another layout (chunks, directories, ranks, split masters) gets another run id, and writes its
swap files under temporary names, which end in `.new`. Then it commits the same step; the record says which run id it
`replaces`, and decides. `clean_up` follows and may be cut off anywhere. It first removes a record of the old run in
another directory, because the old files mean nothing without it. Then it renames the `.new` files and removes what is
left of the old run. Each rank does so in its own directories, one rank after the other, and those with the old record
first. Files are known by the run id in them, never by the name alone: a `.new` file that no record names was left by a
run that was cut off, and is removed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from offload.checkpoint.atomic_file import failing, sync_directory
from offload.checkpoint.commit import Commit, manifest_name, read_commit, remove_superseded, superseded
from offload.checkpoint.manifest import Manifest
from offload.errors import CorruptionError, PathError, ResumeError
from offload.interrupts import is_of_system
from offload.io.files import Files
from offload.sizes import PAGE_BYTES
from offload.storage.directories import COMMIT_NAME, file_name, holds_commit, swap_name
from offload.storage.swap_file import open_locked
from offload.storage.swap_format import Superblock, parse_superblock


@dataclass(frozen=True)
class Swap:
    """A file with a swap file's name.

    Attributes:
        path: its path.
        rank: the rank in its name.
        is_temporary: whether its name ends in `.new`.
        block: its superblock; None: it has none that this library can read.
    """

    path: Path
    rank: int
    is_temporary: bool
    block: Superblock | None

    @property
    def run_id(self) -> str | None:
        return None if self.block is None else self.block.run_id


def swaps(directory: Path, files: Files, ranks: Container[int] | None = None) -> Iterator[Swap]:
    """The regular files in a directory with a swap file's name; none if there is no such directory.

    Args:
        directory: the directory.
        files: the file system.
        ranks: the ranks whose files are opened; None: of all.

    Raises:
        PathError: a file or directory cannot be read.
    """
    for name in names_in(directory, files):
        file = file_name(name)
        if file is None or file.kind != "swap" or not (ranks is None or file.rank in ranks):
            continue
        if (page := _page_of(directory / name, files)) is not None:
            yield Swap(directory / name, file.rank, bool(file.suffix), _block_of(page, directory / name))


def names_in(directory: Path, files: Files) -> list[str]:
    """The names in a directory, sorted; none if there is no such directory.

    Raises:
        PathError: the directory cannot be read.
    """
    try:
        return sorted(files.names(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if not is_of_system(error):
            raise
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(directory)) from error


def directories_of(run_id: str, rank: int, directories: Sequence[Path], files: Files) -> dict[int, Path]:
    """The directories that have a swap file of a rank of this run, by the number of its stripe."""
    return {
        swap.block.stripe[0]: directory
        for directory in directories
        for swap in swaps(directory, files, {rank})
        if swap.block is not None and swap.run_id == run_id
    }


@dataclass(frozen=True)
class ScanResult:
    """What some directories say of commits, without judging it: several ranks may each see a part of a run's.

    Attributes:
        records: the COMMIT records, each with its directory.
        begun: the ids of runs whose first swap file is here. Their record would be beside it: so they never committed.
        elsewhere: directories with a file of a committed run, whose record is in another one. With each, the ids of the
            runs that have swap files there.
    """

    records: tuple[tuple[Path, Commit], ...] = ()
    begun: frozenset[str] = frozenset()
    elsewhere: tuple[tuple[Path, frozenset[str]], ...] = ()

    def __add__(self, other: ScanResult) -> ScanResult:
        return ScanResult(self.records + other.records, self.begun | other.begun, self.elsewhere + other.elsewhere)


def scan(directories: Sequence[Path], files: Files) -> ScanResult:
    """What these directories say of commits. If one has a record, only records are looked for.

    Raises:
        CorruptionError: a record is damaged.
        ResumeError: a newer version of this library wrote a record.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
    """
    records = tuple(
        (directory, commit) for directory in directories if (commit := read_commit(directory, files)) is not None
    )
    if records:
        return ScanResult(records)
    found = {directory: swaps(directory, files) for directory in directories}
    runs = {directory: [(swap.rank, swap.block) for swap in those if swap.block] for directory, those in found.items()}
    begun = {block.run_id for those in runs.values() for rank, block in those if (rank, block.stripe[0]) == (0, 0)}
    ids = {directory: frozenset(block.run_id for _, block in those) for directory, those in runs.items()}
    return ScanResult(
        (),
        frozenset(begun),
        tuple((directory, ids[directory]) for directory in directories if holds_commit(directory, files)),
    )


def merge(looks: Sequence[ScanResult]) -> ScanResult:
    """What ranks see together. A record that several see, in a shared directory, counts once.

    Args:
        looks: what each rank sees, by rank.
    """
    found = ScanResult()
    for rank, one in enumerate(looks):
        known = {commit for _, commit in found.records}
        names = {directory for directory, _ in found.records}
        # Where machines have disks of their own, other directories have the same name there.
        new = [
            (Path(f"{directory} (of rank {rank})") if directory in names else directory, commit)
            for directory, commit in one.records
            if commit not in known
        ]
        found += ScanResult(tuple(new), one.begun, one.elsewhere)
    return found


def last_of(scanned: ScanResult, directories: Sequence[Path]) -> tuple[Path, Commit] | None:
    """The last commit, with the directory of its record; None if there is none.

    Args:
        scanned: what the directories say.
        directories: the directories that were looked at, for the errors.

    Raises:
        ResumeError: a directory is of a committed run whose record is in none of them, or they hold commits of several
            runs.
    """
    found = scanned.records
    if not found:
        for directory, runs in scanned.elsewhere:
            # Where the first file of a run is and no record, nothing was ever committed.
            if not scanned.begun & runs:
                raise ResumeError(
                    f"{directory} belongs to a committed run whose COMMIT record is not in {listed(directories)}: give "
                    "all the directories of that run, or, if nothing of it is needed, remove this part of it with "
                    f"`offload remove {directory}`"
                )
        return None
    replaced = {commit.replaces for _, commit in found}
    last = [one for one in found if one[1].run_id not in replaced]
    if len(last) != 1:
        raise ResumeError(
            f"{listed([directory for directory, _ in found])} hold commits of several runs, or snapshots: name the "
            "directories of one"
        )
    return last[0]


def require_no_other(directories: Sequence[Path], commit: Commit, rank: int, files: Files) -> None:
    """Checks that no directory has a file of a committed run other than that of `commit`.

    Args:
        directories: the directories.
        commit: the record.
        rank: the rank whose swap file is looked at first, because it mostly tells that a directory is this run's.
        files: the file system.

    Raises:
        ResumeError: one has such a file.
        OffloadError: what `swaps` and `read_commit` raise.
    """
    ours = {commit.run_id, commit.replaces}
    for directory in directories:
        if any(swap.run_id in ours for swap in swaps(directory, files, {rank})):
            continue
        runs = {swap.run_id for swap in swaps(directory, files) if swap.run_id is not None}
        if not runs:  # where the swap file is missing or damaged, other files say whose the directory is
            runs = {file.run_id for file in map(file_name, names_in(directory, files)) if file and file.run_id}
            record = read_commit(directory, files)
            runs |= set() if record is None else {record.run_id}
        if holds_commit(directory, files) and not runs & ours:
            raise ResumeError(
                f"{directory} holds a file of another committed run: choose another directory, or remove that run "
                f"with `offload remove {directory}`"
            )


def require_free(directories: Sequence[Path], commit: Commit, files: Files) -> None:
    """Checks that no live run other than that of `commit` has a swap file in `directories`.

    Raises:
        PathInUseError: a live run has one.
        PathError: a file or directory cannot be used.
    """
    for swap in foreign(dict.fromkeys(directories), commit, files):
        open_locked(swap.path, files).close()


def foreign(directories: Mapping[Path, Container[int] | None], commit: Commit, files: Files) -> list[Swap]:
    """The swap files that are in the way: they are of other runs than that of `commit`.

    Args:
        directories: the directories, each with the ranks whose swap files are looked at there; None: of all ranks.
        commit: the record.
        files: the file system.

    Raises:
        PathError: a file or directory cannot be read.
    """
    ours = (commit.run_id, commit.replaces)
    found = (swap for directory, ranks in directories.items() for swap in swaps(directory, files, ranks))
    return [swap for swap in found if not swap.is_temporary and swap.run_id not in ours]


def holds_record(directories: Sequence[Path], run_id: str | None, files: Files) -> bool:
    """Whether one of `directories` has the record of this run.

    Raises:
        OffloadError: what `read_commit` raises.
    """
    records = (read_commit(directory, files) for directory in directories)
    return run_id is not None and any(record is not None and record.run_id == run_id for record in records)


def is_clean(directories: Mapping[Path, Container[int]], commit: Commit, files: Files) -> bool:
    """Whether `clean_up` would change nothing but a record that was replaced.

    Args:
        directories: the directories, each with the ranks whose swap files are looked at there.
        commit: the record.
        files: the file system.

    Raises:
        PathError: a file or directory cannot be read.
        TierIOError: a disk or its file system failed.
    """
    for directory, ranks in directories.items():
        new, stale = _to_rename_and_remove([*swaps(directory, files, ranks)], commit, files)
        if new or stale or superseded(directory, commit, None, files):
            return False
    return True


def clean_up(directories: Sequence[Path], commit: Commit, files: Files, *, locked: bool) -> None:
    """Removes files of runs that no commit needs after `commit`, and gives its own files their final names.

    See [Note: another layout].

    Args:
        directories: the directories.
        commit: the record.
        files: the file system.
        locked: whether this process holds the files that are moved or removed.

    Raises:
        PathInUseError: a live run holds one of them.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
    """
    before = commit.replaces
    with ExitStack() as undo:
        found = {directory: [*swaps(directory, files)] for directory in directories}
        for swap in () if locked else chain(*found.values()):
            if swap.is_temporary or swap.run_id in (commit.run_id, before):
                undo.callback(open_locked(swap.path, files).close)
        _remove_record(directories, before, files)
        for directory, those in found.items():
            new, stale = _to_rename_and_remove(those, commit, files)
            # As long as the swap file of a start that was cut off is there, it is known whose the other files are.
            runs = [swap.run_id for swap in stale if swap.run_id is not None]
            has_removed = remove_superseded(directory, commit, None, files, runs)
            _rename_and_remove(new, stale, files)
            if has_removed or new or stale:
                sync_directory(files, directory)


def uncommitted(directories: Sequence[Path], runs: Collection[str], files: Files) -> list[Path]:
    """The files that `runs` left in `directories` beside their swap files.

    Raises:
        PathError: a directory cannot be read.
    """
    return [
        directory / name
        for directory in directories
        for name in names_in(directory, files)
        if (file := file_name(name)) is not None and file.run_id in runs
    ]


def forget(directories: Sequence[Path], runs: Collection[str], files: Files) -> None:
    """Removes, durably, the files of runs that are `uncommitted`.

    A run that begins in several directories marks one swap file after the other as its own. Where it is cut off, the
    others would still look like a part of the run before, whose manifests lie there and whose first file is gone.

    Args:
        directories: the directories.
        runs: the ids of runs that committed nothing.
        files: the file system.

    Raises:
        PathInUseError: one of the runs is live, and about to commit.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
    """
    with ExitStack() as locks:
        for swap in (swap for directory in directories for swap in swaps(directory, files)):
            if swap.run_id in runs:
                locks.callback(open_locked(swap.path, files).close)
        found = uncommitted(directories, runs, files)
        for path in found:
            with failing("remove", path):
                files.remove(path)
        for directory in {path.parent for path in found}:
            sync_directory(files, directory)


def _remove_record(directories: Sequence[Path], run_id: str | None, files: Files) -> None:
    """Removes the record of another run, durably. Without it, that run's files mean nothing."""
    for directory in directories:
        if holds_record([directory], run_id, files):
            with failing("remove", directory / COMMIT_NAME):
                files.remove(directory / COMMIT_NAME)
            sync_directory(files, directory)


def _to_rename_and_remove(found: Sequence[Swap], commit: Commit, files: Files) -> tuple[list[Swap], list[Swap]]:
    """Of the swap files in a directory, those of `commit` with temporary names, and those that no commit needs."""
    new = [swap for swap in found if swap.run_id == commit.run_id and swap.is_temporary]
    others = [swap for swap in found if swap.run_id != commit.run_id]
    stale = [swap for swap in others if swap.is_temporary or swap.run_id == commit.replaces]
    return new, [swap for swap in stale if swap.run_id is not None or _is_blank(swap.path, files)]


def _rename_and_remove(new: Sequence[Swap], stale: Sequence[Swap], files: Files) -> None:
    renamed = set()
    for swap in new:
        named = swap.path.with_name(swap_name(swap.rank))
        with failing("rename", swap.path):
            files.rename(swap.path, named)
        renamed.add(named)
    for swap in stale:
        if swap.path not in renamed:
            with failing("remove", swap.path):
                files.remove(swap.path)


def _page_of(path: Path, files: Files) -> bytes | None:
    """The first page of a regular file; None if it is something else, or gone.

    Raises:
        PathError: the file cannot be read.
    """
    try:
        return files.read(path, PAGE_BYTES)[:PAGE_BYTES]
    except OSError as error:
        # A run that ends removes what is beside its files. EINVAL: no regular file, as `Files.read` says.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO):
            return None
        if not is_of_system(error):
            raise
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _block_of(page: bytes, path: Path) -> Superblock | None:
    try:
        return parse_superblock(page, str(path))
    except (CorruptionError, ResumeError):
        return None


def _is_blank(path: Path, files: Files) -> bool:
    """Whether a file was made for a run that then did not begin.

    Such a file has no more than a page, of zeros, before it has a superblock.
    """
    try:
        page = files.read(path, PAGE_BYTES)
    except OSError:
        return False
    return len(page) <= PAGE_BYTES and not any(page)


def listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths) or "no directory"


ON_OTHER_MACHINES = (
    "if disks of other machines have them, start as many ranks as committed, each on the machine where it ran, in the "
    "same layout (stage, chunks, directories); or copy all directories to a file system that every rank sees, for any "
    "number of ranks, or to one machine for `offload export`"
)
"""What to do if a rank sees only a part of a run."""


def manifests_in(directories: Sequence[Path], commit: Commit, files: Files) -> dict[int, Path]:
    """For each rank whose manifest is there, the first of `directories` with a file of that name.

    Raises:
        PathError: a directory cannot be read.
    """
    named = {manifest_name(commit, rank): rank for rank in range(len(commit.manifests))}
    return {
        named[name]: directory
        for directory in reversed(directories)
        for name in names_in(directory, files)
        if name in named
    }


def ranks_in(directories: Sequence[Path], commit: Commit, files: Files, ranks: Container[int]) -> set[int]:
    """Those of `ranks` that have a swap file of the run of `commit` in `directories`.

    Raises:
        PathError: a file or directory cannot be read.
    """
    return {
        swap.rank
        for directory in directories
        for swap in swaps(directory, files, ranks)
        if swap.run_id == commit.run_id
    }


def require_manifests(
    commit: Commit, found: Collection[int], lying: Collection[int], directories: Sequence[Path], home: Path
) -> None:
    """Checks that the manifests of all ranks were found.

    Args:
        commit: the record.
        found: the ranks whose manifest was found.
        lying: the ranks of which a swap file was found.
        directories: where all this was looked for.
        home: the directory of the record.

    Raises:
        CorruptionError: a manifest is gone, and the swap files are there.
        ResumeError: directories are missing.
    """
    ranks = range(len(commit.manifests))
    if gone := [rank for rank in ranks if rank not in found and rank in lying]:
        name = manifest_name(commit, gone[0])
        raise CorruptionError(
            "is missing: name all directories of the run, or was it moved or removed?", file=str(home / name)
        )
    if missing := [rank for rank in ranks if rank not in found]:
        raise ResumeError(
            f"nothing of {ranks_named(missing)} of the {len(ranks)} that committed step {commit.step} lies in "
            f"{listed(directories)}: name all directories of the run; {ON_OTHER_MACHINES}"
        )


def ranks_named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def hidden_ranks(
    directories: Sequence[Path], manifests: Sequence[Manifest], files: Files, ranks: Container[int]
) -> frozenset[int]:
    """Those of `ranks` that have a swap file with committed slots in none of `directories`.

    Raises:
        PathError: a file or directory cannot be read.
    """
    found = (swap for directory in directories for swap in swaps(directory, files, ranks))
    blocks = [(swap.rank, swap.block) for swap in found if swap.block is not None]
    seen = {(rank, block.stripe[0]) for rank, block in blocks if block.run_id == manifests[0].run_id}
    return frozenset(
        rank
        for rank, manifest in enumerate(manifests)
        if rank in ranks and any((rank, slot.path) not in seen for slot in manifest.slots)
    )
