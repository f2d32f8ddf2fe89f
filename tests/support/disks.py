"""Other disks than this machine's, under the runs that a test makes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offload.io.engine import PRIVATE, IOEngine, IOFile
from offload.io.files import Files
from offload.run import DISK
from offload.sizes import PAGE_BYTES, round_up

T = TypeVar("T")
_NEVER_FAIL = {
    "hold",
    "holds",
    "require_here",
    "leads_to",
    "let_go",
    "close",
    "real",
    "may_write",
    "host",
    "holders",
    "lives",
}
"""Methods of `Files` that raise no error of the system's as it is."""


@contextmanager
def on_disk(files: Files | None = None, engine: IOEngine | None = None) -> Iterator[None]:
    """Inside, OffloadZero is made on these, for as long as it lives. None: as it is outside.

    `files` may serve several runs, one after the other. In another thread it is this machine's disk, as always.
    """
    disk = DISK.get()
    if files is not None:
        disk = replace(disk, files=partial(_same, files))
    if engine is not None:
        disk = replace(disk, open_engine=partial(_same, engine))
    token = DISK.set(disk)
    try:
        yield
    finally:
        DISK.reset(token)


def _same(made: T, *_: object) -> T:
    return made


class FreeFiles(Files):
    """A disk with so many free bytes, whatever is there. Args: free: bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self._free = free

    def available(self, file: IOFile) -> int:
        return self._free


class FailingFiles(Files):
    """A file system of which one call fails; a call that another one makes counts, too.

    Args: nth: which call, from 1 on; code: the number of the error. Attributes: failed: the method, once it has; is_on:
    whether calls count.
    """

    def __init__(self, nth: int, code: int) -> None:
        super().__init__()
        self.failed, self.is_on = "", True
        self._left, self._code = nth, code
        for name, value in vars(Files).items():
            if callable(value) and not name.startswith("_") and name not in _NEVER_FAIL:
                setattr(self, name, partial(self._call, name, getattr(self, name)))

    def _call(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._left -= self.is_on
        if self.is_on and not self._left:
            self.failed = name
            raise OSError(self._code, os.strerror(self._code), "name")
        return method(*args, **kwargs)


class FullFiles(Files):
    """A disk that another program fills, and on which that takes whatever is freed at once.

    Attributes: is_full: whether it has done so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
        self._require(-1)
        return super().create(path, mode)

    def open_or_create(self, path: Path) -> IOFile:
        if path.name not in self.names(path.parent):
            self._require(-1)
        return super().open_or_create(path)

    def write(self, file: IOFile, data: memoryview) -> None:
        end = os.lseek(file.fd, 0, os.SEEK_CUR) + len(data)
        self._require(self._blocks(file) - end)
        super().write(file, data)

    def allocate(self, file: IOFile, offset: int, length: int) -> None:
        self._require(self._blocks(file) - offset - length)
        super().allocate(file, offset, length)

    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        self._require(-length)
        super().copy(source, target, offset, length)

    def available(self, file: IOFile) -> int:
        return 0 if self.is_full else super().available(file)

    def _blocks(self, file: IOFile) -> int:
        return round_up(self.size(file), PAGE_BYTES)

    def _require(self, left: int) -> None:
        """Args: left: how many bytes of the file's blocks are left afterwards."""
        if self.is_full and left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SwitchedFiles(Files):
    """Files that another file system is asked for while a run goes on.

    Attributes: instead: is asked from now on for all but the directories that are held; None: this machine is.
    """

    _OWN = frozenset({"hold", "holds", "require_here", "let_go", "patience_s", "piece_bytes", "instead"})

    def __init__(self) -> None:
        super().__init__()
        self.instead: Files | None = None

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("_") or name in own("_OWN"):
            return own(name)
        instead = own("instead")
        return own(name) if instead is None else getattr(instead, name)

    @contextmanager
    def switched(self, instead: Files) -> Iterator[None]:
        """Inside, `instead` is asked."""
        self.instead = instead
        try:
            yield
        finally:
            self.instead = None
