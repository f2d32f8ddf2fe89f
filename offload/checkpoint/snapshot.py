"""Snapshots: the last commit kept aside, while the run goes on.

[Note: snapshots]
A run's swap files are written in place, so a commit lasts until the next one. A snapshot is a directory in each of the
run's directories, called after step and run, that holds what the commit is made of: a swap file with the committed
slots where they lay and holes for the rest, the manifest and the tensors of `extra`, byte for byte, and in the first
directory of rank 0 the record, which says that it is a snapshot. So whoever reads a run's directories reads these.

The record decides, and is written last, when the parts of all ranks are durable. Before anything else the home gets its
tag, and each part gets its own first of all ([Note: names never change] in live.py). To remove a snapshot, its record
goes first, durably, then what all ranks have, and the part in the home last. So a part is dead if its home has the tag
and no record: it was never finished, or is half removed. The next snapshot clears it away, and nothing else: not where
the home is missing, because somebody took it elsewhere; and not where a process holds the lock of a swap file in it,
because another run makes it now. Whoever resumes in a snapshot's directory turns its record into that of a run, which
is no snapshot any more.
"""

from __future__ import annotations

import errno
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from offload.checkpoint.atomic_file import failing, sync_directory
from offload.checkpoint.commit import (
    Commit,
    copy_manifest,
    path_of,
    read_commit,
    read_manifest,
    spelled,
    write_commit,
)
from offload.checkpoint.live import Tag, leave, names_in, read_tag, swaps, write_tag
from offload.checkpoint.manifest import Manifest, committed_slots
from offload.errors import BudgetError, OffloadError, PathError, PathInUseError
from offload.io.engine import IOFile
from offload.io.files import Files, unusable
from offload.sizes import MIB, PAGE_BYTES, format_bytes
from offload.storage.directories import COMMIT_NAME, TEMPORARY, file_name, swap_name, tag_name
from offload.storage.swap_file import lock, open_locked

PIECE_BYTES = 64 * MIB
"""Copied between two reports of progress."""
RUN_DIGITS = 8
"""How many digits of the run's id a snapshot's name has. A run that began from one may come to the same step again."""
_NAME = re.compile(rf"snapshot-(?:0|[1-9]\d{{0,18}})-[0-9a-f]{{{RUN_DIGITS}}}")


def name_of(commit: Commit) -> str:
    """The name of a snapshot's directory, the same in each directory of the run."""
    return f"snapshot-{commit.step}-{commit.run_id[:RUN_DIGITS]}"


def is_snapshot_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def snapshots_in(path: Path, files: Files) -> list[str]:
    """The names in `path` of directories that are called as snapshots are."""
    called_so = [name for name in names_in(path, files) if is_snapshot_name(name)]
    with unusable("cannot be looked at", path):
        return [name for name in called_so if files.is_directory(path / name)]


def records_in(path: Path, files: Files) -> dict[str, Commit]:
    """The records of the snapshots in `path`, by name. One whose record is damaged is left out."""
    found = {}
    for name in snapshots_in(path, files):
        with suppress(OffloadError):
            record = read_commit(path / name, files)
            if record is not None and record.is_snapshot and name == name_of(record):
                found[name] = record
    return found


def _is_tag(name: str) -> bool:
    return (file := file_name(name)) is not None and file.kind == "tag"


class Need(NamedTuple):
    """What one rank's part of a snapshot takes in one directory.

    Attributes:
        disk: a number, the same for directories that share their space.
        nbytes: the bytes that it takes.
        available: the bytes that are free.
        path: the directory.
    """

    disk: int
    nbytes: int
    available: int
    path: Path


def require_space(needs: Iterable[Need]) -> None:
    """Checks that the parts of all ranks fit on their disks together.

    Raises:
        BudgetError: a disk has no room for them.
    """
    together: defaultdict[int, list[Need]] = defaultdict(list)
    for need in needs:
        together[need.disk].append(need)
    for those in together.values():
        needed, available = sum(need.nbytes for need in those), min(need.available for need in those)
        if needed > available:
            raise BudgetError(
                f"a snapshot needs {format_bytes(needed)} of disk at {those[0].path} and {format_bytes(available)} are "
                "free: free some, remove an older one with `offload remove`, or give a smaller keep",
                needed=needed,
                available=available,
                option="keep",
            )


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a snapshot. Also removes parts of other snapshots.

    No method changes the run's own files.

    Attributes:
        commit: the record of the commit that is kept.
        manifest: this rank's manifest of that commit.
        paths: this rank's directories.
        swaps: this rank's swap files, one for each directory.
        files: the file system.
        sources: where the manifest and the tensors are, by directory; None: in `paths`.

    Raises:
        TierIOError: from every method: a disk or its file system failed.
        PathError: from every method: a file or directory cannot be used.
    """

    commit: Commit
    manifest: Manifest
    paths: Sequence[Path]
    swaps: Sequence[str]
    files: Files
    sources: Sequence[Path] | None = None

    @cached_property
    def name(self) -> str:
        return name_of(self.commit)

    @property
    def record(self) -> Commit:
        parts = [[spelled(path_of(place) / self.name) for place in rank.directories] for rank in self.commit.files]
        files = tuple(one._replace(directories=tuple(own)) for one, own in zip(self.commit.files, parts, strict=True))
        return replace(self.commit, replaces=None, files=files, is_snapshot=True)

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(path / self.name for path in self.paths)

    def undecided(self) -> list[str]:
        """For rank 0: the names of the snapshots that were never finished, or are half removed."""
        home = self.paths[0]
        return [name for name in snapshots_in(home, self.files) if self._is_undecided(home / name)]

    def _is_undecided(self, home: Path) -> bool:
        with ExitStack() as locks:
            if not self._is_left(home, locks):
                return False
            names = self._names(home)
            return COMMIT_NAME not in names and (any(self._marks(home).values()) or all(map(_is_tag, names)))

    def _marks(self, directory: Path) -> dict[str, bool]:
        """The files that say whose part of a snapshot a directory is, and whether they say that it is the home.

        They are tags; in one of format 1 the swap files.
        """
        tags = ((name, read_tag(directory / name, self.files)) for name in self._names(directory) if _is_tag(name))
        marks = [(name, tag.run_id, tag.is_home) for name, tag in tags if tag is not None]
        older = ((one.path.name, one.rank, one.block) for one in swaps(directory, self.files, kinds=["older"]))
        marks += [(name, block.run_id, (rank, block.stripe[0]) == (0, 0)) for name, rank, block in older if block]
        return {name: is_home for name, run_id, is_home in marks if run_id.startswith(directory.name[-RUN_DIGITS:])}

    def exists(self) -> bool:
        """For rank 0: whether this very snapshot is there, durably.

        Raises:
            PathError: something else has its name.
        """
        home, found, is_other = self.directories[0], None, False
        try:
            found = read_commit(home, self.files)
            is_other = found not in (None, self.record)
        except OffloadError:
            is_other = True
        if is_other:
            raise PathError(errno.EEXIST, "is there already, and is another snapshot or a run: move it", str(home))
        if found is not None:
            sync_directory(self.files, home)  # who wrote its record may have been killed before
        return found is not None

    def existing(self) -> dict[str, Commit]:
        """For rank 0: the records of the snapshots of this run that are there, by name."""
        records = records_in(self.paths[0], self.files)
        return {name: record for name, record in records.items() if record.run_id == self.commit.run_id}

    def superseded(self, keep: int, besides: Collection[str], locks: ExitStack) -> list[str]:
        """For rank 0: the names of the oldest snapshots of this run, so that `keep` stay, this one included.

        A snapshot that is being read, or resumed in, is left out.

        Args:
            keep: how many stay.
            besides: the names of snapshots that do not count, and stay.
            locks: gets the locks of those that are returned.
        """
        steps = {name: record.step for name, record in self.existing().items() if name not in besides}
        newest = sorted(steps, key=lambda name: (name == self.name, steps[name]), reverse=True)
        return [name for name in newest[keep:] if self._is_free(self.paths[0] / name, locks)]

    def free(self, names: Iterable[str], locks: ExitStack) -> list[str]:
        """For rank 0: those of `names` that are snapshots of this run, and not in use.

        Args:
            names: names.
            locks: gets their locks.
        """
        existing = self.existing()
        return [name for name in names if name in existing and self._is_free(self.paths[0] / name, locks)]

    def clear(self, names: Iterable[str], *, are_held: bool = False) -> None:
        """Removes this rank's parts of snapshots that are dead, but for the tags in their homes.

        Args:
            names: the names of the snapshots.
            are_held: whether rank 0 has their locks. Else what a process makes now stays.
        """
        for path in self.paths:
            for name in names:
                with ExitStack() as locks:
                    if are_held or self._is_left(path / name, locks):
                        self._clear(path / name)
            sync_directory(self.files, path)  # before the tags in their homes go

    def clear_homes(self, names: Iterable[str]) -> None:
        """For rank 0, when all ranks have cleared their parts of these snapshots: removes the tags in their homes."""
        for name in names:
            home = self.paths[0] / name
            if not self._is_undecided(home):
                continue
            with failing("remove", home), suppress(FileNotFoundError):
                for mark in self._marks(home):
                    self.files.remove(home / mark)
                leave(home, self.files)
                self.files.remove_directory(home)

    def require_no_other(self) -> None:
        """Checks that nothing else has this snapshot's name. To be called after `clear_homes`.

        Raises:
            PathError: something has.
        """
        for directory in self.directories:
            with failing("remove", directory), suppress(NotADirectoryError):
                self.files.remove_directory(directory)  # if it is empty
            if self.name in self._names(directory.parent):
                raise PathError(errno.EEXIST, "is there already, and is no snapshot: move it", str(directory))

    def needs(self) -> list[Need]:
        """What `make` will write, by directory. The disks are the devices of this machine.

        Raises:
            CorruptionError: the manifest is damaged.
        """
        found = []
        for number, path in enumerate(self.paths):
            with failing("read", path):
                device, available = self.files.space(path)
            rank = self.manifest.rank
            nbytes = sum(length for _, length in self._ranges(number)) + self.commit.manifests[rank].size
            tensors = read_manifest(self._sources[number], self.commit, rank, self.files).tensors
            nbytes += 0 if tensors is None else tensors.size
            found.append(Need(device, nbytes, available, path))
        return found

    def begin(self) -> None:
        """For rank 0: makes the home, durably, with its tag. Until `decide`, the snapshot is dead."""
        self._make_part(0)

    def make(self, progress: Callable[[int], None] = lambda _: None, locks: ExitStack | None = None) -> None:
        """Makes this rank's part, durably, when the home is there. It counts only after `decide`.

        Args:
            progress: told how many bytes were copied, now and then; what it raises ends this.
            locks: gets the locks of its swap files, without which another run may clear it away before `decide`; None:
                no other run has these directories.

        Raises:
            PathInUseError: another run has cleared it away.
        """
        for number, directory in enumerate(self.directories):
            self._make_part(number)
            self._copy_slots(number, directory / swap_name(self.manifest.run_id, self.manifest.rank), progress, locks)
            if locks is not None:
                self._make_part(number)  # another run may have taken the tag away before there was a lock
            sync_directory(self.files, directory)
            copy_manifest(self._sources[number], directory, self.commit, self.manifest.rank, self.files)

    @property
    def _sources(self) -> Sequence[Path]:
        return self.paths if self.sources is None else self.sources

    def _make_part(self, number: int) -> None:
        directory, rank = self.directories[number], self.manifest.rank
        with failing("write", directory):
            self.files.make_directory(directory)
        sync_directory(self.files, directory.parent)
        directories = tuple(one.directories for one in self.record.files)
        tag = Tag(self.commit.run_id, rank, (number, len(self.paths)), directories)
        if read_tag(directory / tag_name(tag.run_id, rank), self.files) != tag:
            write_tag(directory, tag, self.files)

    def decide(self) -> None:
        """For rank 0, when all ranks have made their part: writes the record, after which the snapshot is there."""
        write_commit(self.directories[0], self.record, self.files)

    def withdraw(self, names: Iterable[str]) -> None:
        """For rank 0: removes the records of these snapshots, durably, which decides."""
        for name in names:
            record = self.paths[0] / name / COMMIT_NAME
            with failing("remove", record):
                self.files.remove(record)
            sync_directory(self.files, record.parent)

    def _ranges(self, number: int) -> list[tuple[int, int]]:
        """Where the committed bytes lie in a swap file, its superblock included, as (offset, length).

        Args:
            number: the number of the swap file.
        """
        slots = sorted((slot.offset, slot.size) for slot in committed_slots(self.manifest) if slot.path == number)
        found = [(0, PAGE_BYTES)]
        for offset, size in slots:
            start, length = found[-1]
            if start + length == offset:
                found[-1] = (start, length + size)
            else:
                found.append((offset, size))
        return found

    def _copy_slots(self, number: int, target: Path, progress: Callable[[int], None], locks: ExitStack | None) -> None:
        source = Path(self.swaps[number])
        with ExitStack() as undo:
            with failing("write", target):
                file = self.files.create(target)
            undo.callback(self._close, file)
            if locks is not None:
                self._lock(file)
            for offset, length in self._ranges(number):
                for start in range(offset, offset + length, PIECE_BYTES):
                    size = min(PIECE_BYTES, offset + length - start)
                    with failing("write", target, start, size):
                        self.files.copy(source, file, start, size)
                    progress(size)
            with failing("sync", target):
                self.files.sync(file)
            if locks is not None:
                locks.push(undo.pop_all())

    def _lock(self, file: IOFile) -> None:
        try:
            lock(file, self.files)
        except PathInUseError:
            raise
        except PathError:
            pass  # no locks there: then no run clears away what is another one's

    def _close(self, file: IOFile) -> None:
        with failing("sync", Path(file.path)):
            self.files.close(file)

    def _clear(self, directory: Path) -> None:
        """Removes a part of a snapshot that is dead. What marks it goes after all else, and in its home stays."""
        names, marks, run = self._names(directory), self._marks(directory), directory.name[-RUN_DIGITS:]
        if COMMIT_NAME in names:
            return
        # Where ranks share a directory another one may be doing the same.
        with failing("remove", directory), suppress(FileNotFoundError):
            for those in ({*names} - {*marks}, {name for name, is_home in marks.items() if not is_home}):
                for name in sorted(those):
                    file = file_name(name)
                    is_own = file is not None and file.run_id.startswith(run) and file.kind != "older"
                    if is_own or name in marks or name == COMMIT_NAME + TEMPORARY:
                        self.files.remove(directory / name)
                if those:
                    self.files.sync_directory(directory)
            if not any(marks.values()):
                leave(directory, self.files)
            self.files.remove_directory(directory)

    def _is_left(self, directory: Path, locks: ExitStack) -> bool:
        """Whether nobody makes a snapshot, or a copy of one, that has no record. Others may make theirs beside it.

        Args:
            directory: a part of it.
            locks: gets the locks of its swap files.
        """
        return self._is_free(directory, locks, is_own=directory.name.endswith(self.commit.run_id[:RUN_DIGITS]))

    def _is_free(self, directory: Path, locks: ExitStack, *, is_own: bool = True) -> bool:
        files = ((name, file_name(name)) for name in self._names(directory))
        names = [name for name, file in files if file is not None and file.kind in ("swap", "older")]
        return all(self._try_lock(directory / name, locks, is_own=is_own) for name in names)

    def _try_lock(self, swap: Path, locks: ExitStack, *, is_own: bool) -> bool:
        """Locks a swap file of a snapshot if nobody else uses it.

        Args:
            swap: the file.
            locks: gets the lock.
            is_own: whether it is of this run; else it has to be locked, or gone.

        Returns:
            Whether nobody else uses it.
        """
        try:
            locks.callback(open_locked(swap, self.files).close)
        except PathInUseError:
            return False
        except PathError as error:  # damaged: nobody can use it; or there are no locks
            return is_own or error.errno == errno.ENOENT
        return True

    def _names(self, directory: Path) -> list[str]:
        return names_in(directory, self.files)
