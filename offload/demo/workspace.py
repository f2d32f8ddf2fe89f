"""The directory of a run's swap files. When the run ends, the files that it made there are removed, and no others.

What else a run has there, an optimizer removes itself when it is closed and has no swap files any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


class Workspace:
    """Remembers what lay at `path` before the run, and removes what came with it."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._existed = self._path.exists()
        self._before = set(self._path.iterdir()) if self._path.is_dir() else set()
        self._known: dict[Path, os.stat_result] = {}

    def know(self, files: Sequence[str | Path]) -> None:
        """Remembers which files have these names now.

        Other files that get the names later are not removed: the directory may be moved away, and another run may begin
        under its name.
        """
        for path in (self._path, *(Path(file).absolute() for file in files)):
            with contextlib.suppress(FileNotFoundError):
                self._known[path] = path.lstat()

    def remove_files(self, files: Sequence[str | Path]) -> None:
        """Deletes those of `files` that the run made."""
        for file in (Path(file).absolute() for file in files):
            if file not in self._before and self._is_known(file):
                file.unlink(missing_ok=True)

    def remove_directory(self) -> None:
        """Deletes the directory if the run made it and it is empty."""
        if not self._existed and self._is_known(self._path):
            with contextlib.suppress(OSError):  # never made, or holds something of someone else's
                self._path.rmdir()

    def _is_known(self, path: Path) -> bool:
        try:
            return path not in self._known or os.path.samestat(path.lstat(), self._known[path])
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def removed_at_end(space: Workspace, files: Sequence[str | Path]) -> Iterator[None]:
    """A context that deletes `files` at its end, also after an error.

    Enter it after the optimizer, so that it is left before it: no other run can take the files over as long as the
    optimizer holds its lock.
    """
    space.know(files)
    try:
        yield
    finally:
        space.remove_files(files)
        space.remove_directory()
