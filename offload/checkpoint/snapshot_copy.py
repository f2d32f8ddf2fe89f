"""Copies of snapshots on other storage, made beside training.

[Note: copies of snapshots]
Where each machine has disks of its own, a lost disk is a lost run. So a snapshot may be copied to storage that all
machines share. In time:

1. The snapshot is made in the run's directories, as any other ([Note: snapshots] in snapshot.py).
2. Rank 0 makes the home of the copy, with its tag. Until there is a record, the copy is dead.
3. A thread of each rank copies its part, durably, the manifest last.
4. The thread of rank 0 waits until it sees the manifests of all ranks, and writes the record, which decides. Nobody
   asks anybody: ranks may be at any step meanwhile.
5. At the next collective call (`snapshot`, `commit`, `close`) whose ranks have all ended their copies, the snapshot in
   the run's directories is removed.

Until 5 each rank holds the locks of the swap files that it has made there. So other runs may copy their snapshots to
the same storage, and clear away there what is dead.

A copy is a run's directory like any other: `resume=[DIRECTORY]` takes it, with any number of ranks.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from offload.checkpoint.atomic_file import sync_directory
from offload.checkpoint.commit import Commit, manifest_name, path_of, spelled
from offload.checkpoint.live import names_in
from offload.checkpoint.snapshot import Snapshot
from offload.errors import OffloadError, PathError
from offload.io.files import Files
from offload.io.threads import Workers

POLL_S = 0.2
"""How often rank 0 looks whether other ranks have copied their parts."""


def copy_of(snapshot: Snapshot, target: Path) -> Snapshot:
    """One rank's part of the copy of a snapshot, which is not made yet.

    Args:
        snapshot: is there.
        target: the directory in which the copy gets its own.
    """
    commit = snapshot.commit
    paths = _paths_in(target, len(snapshot.paths))
    files = tuple(
        one._replace(directories=tuple(map(spelled, _paths_in(target, len(one.directories))))) for one in commit.files
    )
    return replace(
        snapshot,
        commit=replace(commit, files=files),
        paths=paths,
        swaps=[
            str(directory / Path(swap).name)
            for directory, swap in zip(snapshot.directories, snapshot.swaps, strict=True)
        ],
        sources=snapshot.directories,
    )


def _paths_in(target: Path, count: int) -> list[Path]:
    """The directories that stand for those of a rank: files of several may have the same name."""
    return [target, *(target / f"path{number}" for number in range(1, count))]


class SnapshotCopy:
    """The copy of this rank's part of a snapshot, under way.

    Args:
        snapshot: in the run's directories.
        copy: its copy, whose home is there.
        keep: how many copies stay when it is there; None: all.
        limit_s: for how many seconds rank 0 waits for the other ranks, once its own part is there.
        counted: told how many bytes were copied.

    Attributes:
        snapshot: see above.
        copy: see above.
        keep: see above.
        nbytes: the bytes of this rank's part.
        error: why it failed; None: it did not.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        copy: Snapshot,
        keep: int | None,
        *,
        limit_s: float,
        counted: Callable[[int], None],
    ) -> None:
        self.snapshot = snapshot
        self.copy = copy
        self.keep = keep
        self.error: OffloadError | None = None
        self._limit_s = limit_s
        self._counted = counted
        self._copied = 0
        self.nbytes = sum(need.nbytes for need in copy.needs())
        self._ends, self._has_part = threading.Event(), threading.Event()
        self._locks = ExitStack()
        self._worker = Workers(1, "offload-snapshot")
        self._done = self._worker.submit(self._run)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.done()

    def wait_for_part(self) -> None:
        """Waits until this rank's part is there, or has failed."""
        self._has_part.wait()

    def wait(self) -> None:
        """Waits until it has ended."""
        self._worker.shutdown()
        self._done.result()

    def stop(self) -> None:
        """Ends it before it has copied everything, and waits until it has."""
        self._ends.set()
        self.wait()
        self.let_go()

    def let_go(self) -> None:
        """Gives its locks back, when it has ended on all ranks."""
        self._locks.close()

    def _run(self) -> None:
        try:
            self.copy.make(self._progress, self._locks)
            self._has_part.set()
            if self.copy.manifest.rank == 0:
                decide(self.copy, self._ends, self._limit_s)
        except OffloadError as error:
            self.error = error
        finally:
            self._has_part.set()

    @property
    def left(self) -> int:
        """The bytes of this rank's part that are not copied yet."""
        return 0 if self._has_part.is_set() else max(self.nbytes - self._copied, 0)

    def _progress(self, nbytes: int) -> None:
        self._copied += nbytes
        self._counted(nbytes)
        if self._ends.is_set():
            raise _stopped(self.copy)


def decide(copy: Snapshot, ends: threading.Event, limit_s: float) -> None:
    """For rank 0: writes the record of a copy, when the parts of all ranks are there.

    Args:
        copy: the copy.
        ends: when it is set, nothing is decided.
        limit_s: for how many seconds the other ranks' parts are waited for.

    Raises:
        PathError: they do not come, or `ends` was set.
        TierIOError: a disk or its file system failed.
    """
    begun = time.monotonic()
    while missing := _missing(copy.record, copy.files):
        if ends.wait(POLL_S):
            raise _stopped(copy)
        if time.monotonic() > begun + limit_s:
            problem = f"has no {missing[0].name} after {limit_s:.0f} s: do all ranks see it?"
            raise PathError(errno.ETIMEDOUT, problem, str(missing[0].parent))
    for one in copy.record.files:
        for directory in one.directories:  # a manifest that is seen need not be durable yet
            sync_directory(copy.files, path_of(directory))
    copy.decide()


def _stopped(copy: Snapshot) -> PathError:
    return PathError(errno.ECANCELED, "is not whole: the run ended before", str(copy.directories[0]))


def _missing(record: Commit, files: Files) -> Sequence[Path]:
    """The manifests that are not in their directories yet."""
    wanted = [
        path_of(directory) / manifest_name(record, rank)
        for rank, one in enumerate(record.files)
        for directory in one.directories
    ]
    there = {directory: {*names_in(directory, files)} for directory in {path.parent for path in wanted}}
    return [path for path in wanted if path.name not in there[path.parent]]
