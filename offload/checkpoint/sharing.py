"""Which directories of several ranks are the same one, and whether locks reach from one machine to another.

[Note: marks]
Names of directories, machines and devices do not tell whether two ranks see one directory. So each rank makes a file
in each of its directories, its mark, under a lock of its own, and syncs the directory. When all have done so each
looks which marks it sees, and tries the locks of those of other machines. When all have looked the marks go. What a
process that was killed meanwhile leaves is removed by the next start that takes the directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from offload.checkpoint.commit import Commit
from offload.checkpoint.live import manifests_in, names_in, swaps
from offload.errors import ResumeError
from offload.io.files import BUSY, Files, Host, unusable
from offload.ranks.agreement import found_by_all, together
from offload.ranks.communicator import Communicator, is_in_order
from offload.storage.directories import file_name, mark_name, mark_number
from offload.storage.directory_lock import Claimant

T = TypeVar("T")


class _Told(NamedTuple):
    """What a rank tells the others. All are by the number of its directory.

    Attributes:
        host: its machine.
        devices: the device that the directory is on.
        seen: the marks in it, as (rank, number of that rank's directory).
    """

    host: Host
    devices: list[int]
    seen: list[list[tuple[int, int]]]


class Sharing(NamedTuple):
    """What ranks have in common.

    Attributes:
        directories: for each rank and each of its directories a number, the same for those that are one directory.
        disks: the same, of those whose space is the same: one directory, or on one device of a machine.
        deaf: those of this rank's directories where a lock does not keep other machines out.
    """

    directories: list[list[int]]
    disks: list[list[int]]
    deaf: tuple[Path, ...]


def share_together(paths: Sequence[Path], claimant: Claimant, comm: Communicator, files: Files) -> Sharing:
    """Finds out what ranks have in common; see [Note: marks].

    Args:
        paths: this rank's directories, which are there.
        claimant: the start of this run, with the machine of each rank.
        comm: the ranks.
        files: the file system.

    Raises:
        PathError: a directory cannot be used.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    start, own = claimant.start.hex(), claimant.hosts[comm.rank]
    with ExitStack() as undo:
        with together(comm):
            for number, path in enumerate(paths):
                mark = path / mark_name(start, comm.rank, number)
                with unusable("cannot be written to", path):
                    file = files.create(mark)
                    undo.callback(_remove, mark, files)
                    undo.callback(file.close)
                    files.lock(file, exclusive=True)
                    files.sync_directory(path)
        deaf: list[Path] = []

        def look() -> _Told:
            seen, devices = [], []
            for path in paths:
                marks = {name: at for name in names_in(path, files) if (at := mark_number(name, start)) is not None}
                seen.append(sorted(marks.values()))
                others = [
                    name for name, (rank, _) in marks.items() if claimant.hosts[rank] != claimant.hosts[comm.rank]
                ]
                if any(not _is_locked(path / name, files) for name in others):
                    deaf.append(path)
                with unusable("cannot be looked at", path):
                    devices.append(files.space(path)[0])
            return _Told(own, devices, seen)

        told = found_by_all(comm, look, _Told)
    places = [(rank, number) for rank, one in enumerate(told) for number in range(len(one.seen))]
    marked = [((rank, number), at) for rank, number in places for at in told[rank].seen[number]]
    first: dict[object, tuple[int, int]] = {}
    near = [(at, first.setdefault((told[at[0]].host, told[at[0]].devices[at[1]]), at)) for at in places]
    return Sharing(_numbered(places, marked, told), _numbered(places, marked + near, told), tuple(deaf))


def require_one_holder(
    commit: Commit, paths: Sequence[Path], sharing: Sharing, comm: Communicator, files: Files
) -> None:
    """Checks that no shard of a commit lies in two places, where ranks have not all the shards of their own numbers.

    Where they have, the shard of its number is what a rank goes on with, and copies elsewhere do no harm.

    Args:
        commit: the record.
        paths: this rank's directories.
        sharing: what ranks have in common.
        comm: the ranks.
        files: the file system.

    Raises:
        ResumeError: one does.
        PathError: a directory cannot be read.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """

    def look() -> tuple[str, list[tuple[int, int, int, str]]]:
        found = []
        for number, path in enumerate(paths):
            lying = manifests_in([path], commit, files)
            found += [
                (swap.rank, swap.block.stripe[0], number, str(path))
                for swap in swaps(path, files, lying, commit.run_id)
                if swap.block is not None
            ]
        return files.host().name, found

    told = found_by_all(comm, look, tuple[str, list[tuple[int, int, int, str]]])
    if (
        len(commit.manifests) == comm.size
        and is_in_order(comm.user_ranks)
        and all(any(shard == rank for shard, *_ in those) for rank, (_, those) in enumerate(told))
    ):
        return
    places: dict[tuple[int, int], tuple[int, str]] = {}
    for rank, (host, those) in enumerate(told):
        for shard, stripe, number, place in those:
            at = sharing.directories[rank][number], f"{place} on {host} (rank {comm.user_ranks[rank]})"
            other = places.setdefault((shard, stripe), at)
            if other[0] != at[0]:
                raise ResumeError(
                    f"{other[1]} and {at[1]} both have what rank {shard} committed at step {commit.step}, and are two "
                    "directories: one is a copy; move it away, or start each rank on the machine where it ran"
                )


def remove_marks(path: Path, start: bytes, files: Files) -> None:
    """Removes the marks of other starts in a directory whose lock this one has."""
    for name in names_in(path, files):
        file = file_name(name)
        if file is not None and file.kind == "mark" and file.run_id != start.hex():
            _remove(path / name, files)


def _remove(path: Path, files: Files) -> None:
    with suppress(OSError):
        files.remove(path)


def _is_locked(path: Path, files: Files) -> bool:
    """Whether this machine sees that another one holds a mark."""
    with unusable("cannot be opened", path), files.open(path, os.O_RDONLY) as file:
        try:
            files.lock(file, exclusive=False)
        except OSError as error:
            if error.errno not in BUSY:
                raise
            return True
    return False


def _numbered(
    places: Sequence[tuple[int, int]], pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]], told: Sequence[_Told]
) -> list[list[int]]:
    """A number for each place, the same for those that pairs connect."""
    above = {place: place for place in places}

    def top(place: tuple[int, int]) -> tuple[int, int]:
        while above[place] != place:
            above[place] = place = above[above[place]]
        return place

    for one, other in pairs:
        above[top(one)] = top(other)
    numbers = {place: number for number, place in enumerate(places)}
    return [[numbers[top((rank, number))] for number in range(len(one.seen))] for rank, one in enumerate(told)]
