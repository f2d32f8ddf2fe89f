"""Files whose operations by the thread that copies snapshots a test watches, fails, or ends the process at."""

from __future__ import annotations

import threading
from abc import abstractmethod
from pathlib import Path

from offload.io.engine import PRIVATE, IOFile
from offload.io.files import Files


class CopyingFiles(Files):
    """The files of this machine."""

    @abstractmethod
    def copies(self) -> None:
        """Called in the copying thread before each of its operations that change something."""

    def _spend(self) -> None:
        if threading.current_thread().name.startswith("offload-snapshot"):
            self.copies()

    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        self._spend()
        super().copy(source, target, offset, length)

    def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
        self._spend()
        return super().create(path, mode)

    def sync(self, file: IOFile) -> None:
        self._spend()
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self._spend()
        super().sync_directory(path)

    def make_directory(self, path: Path, mode: int = 0o700) -> bool:
        self._spend()
        return super().make_directory(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        self._spend()
        super().rename(old, new)
