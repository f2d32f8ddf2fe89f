"""The directory of a run's swap files: what the run made in it goes when the run ends, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path


class Workspace:
    """Remembers what lay at `path` before the run, and takes away what came with it.

    Attributes: kept: files of the run that were there before it; it wrote over them but does not delete them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._existed = self._path.exists()
        self._before = set(self._path.iterdir()) if self._path.is_dir() else set()
        self.kept: tuple[Path, ...] = ()

    def remove_files(self, files: Sequence[str | Path]) -> None:
        """Deletes those of the run's files that it made."""
        paths = [Path(file).absolute() for file in files]
        self.kept = tuple(file for file in paths if file in self._before)
        for file in paths:
            if file not in self._before:
                file.unlink(missing_ok=True)

    def remove_abandoned(self, file: Path) -> None:
        """Deletes what a run that could not begin left, unless a live run holds the lock of a file so named."""
        with contextlib.suppress(OSError), open(file, "r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove_files([file])
        self.remove_directory()

    def remove_directory(self) -> None:
        """Deletes the directory if the run made it and nothing is left in it."""
        if not self._existed:
            with contextlib.suppress(OSError):  # never made, or holds something of someone else's
                self._path.rmdir()


@contextlib.contextmanager
def removed_at_end(space: Workspace, files: Sequence[str | Path]) -> Iterator[None]:
    """Deletes `files` on the way out, whatever happened inside.

    Enter it after the optimizer, so that it leaves before: as long as the optimizer holds its lock, no
    other run can have taken the files over.
    """
    try:
        yield
    finally:
        space.remove_files(files)
        space.remove_directory()
