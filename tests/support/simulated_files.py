"""A file system in memory whose power can be cut: what was not synced may be there, or not, or in part.

Contents are lost by sectors, and a file's length among those it had since its last sync. Of what was made, renamed
and removed since a directory's last sync, any subset may have happened. A failed sync loses what it was to keep, for
good, and a second one does not say so: as Linux does.

Swap files may really be there, written through an engine that is simulated on its own. They are seen here, too, unless
their directory was loaded.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offload.checkpoint.snapshot import is_snapshot_name
from offload.io.engine import PRIVATE, IOFile
from offload.io.files import Files
from tests.support.simulated_disk import SECTOR_BYTES


class PowerCut(BaseException):
    """Nothing of the process goes on; not an Exception, as nothing may handle it."""


@dataclass
class _Inode:
    """`content` is what programs see, `durable` what is on the platter; `versions` were seen since. Or a directory."""

    content: bytes = b""
    durable: bytes = b""
    versions: list[bytes] = field(default_factory=list)
    is_directory: bool = False

    def after_cut(self, chance: random.Random) -> bytes:
        found = [self.durable, *self.versions]
        length = len(chance.choice(found))
        sectors = []
        for start in range(0, length, SECTOR_BYTES):
            part = chance.choice(found)[start : start + SECTOR_BYTES]
            sectors.append(part.ljust(min(SECTOR_BYTES, length - start), b"\0")[: length - start])
        return b"".join(sectors)


class _Opened(IOFile):
    """A file that is only simulated. Attributes: at: where the next write goes."""

    def __init__(self, path: Path) -> None:
        self.path, self.fd, self.at = str(path), -1, 0


_SWAP = re.compile(r"offload-rank\d+\.swap(\.new)?|swap-[0-9a-f]{32}-\d+|offload\.lock")

Names = dict[str, _Inode]
Change = Callable[[Names], None]


def _remade(names: Names, content: Callable[[_Inode], bytes]) -> Names:
    """The same names, of files with other contents. What had two names has two names again."""
    made: dict[int, _Inode] = {}
    for inode in names.values():
        if id(inode) not in made:
            made[id(inode)] = _Inode(found := content(inode), found, is_directory=inode.is_directory)
    return {name: made[id(inode)] for name, inode in names.items()}


class SimulatedFiles(Files):
    """What commits write is simulated. Swap files and the directories of runs are really there, and what is asked of
    them is asked of the machine. Attributes: operations: those made so far; log: their names.

    Args: cut_at: the operation, from 0 on, in whose place the power is cut; fail_at: the one that fails, with `code`.
    """

    def __init__(self, cut_at: int | None = None, fail_at: int | None = None, code: int = errno.EIO) -> None:
        super().__init__()
        self.cut_at = cut_at
        self.fail_at = fail_at
        self.code = code
        self.operations = 0
        self.log: list[str] = []
        self._seen: dict[Path, Names] = {}
        self._durable: dict[Path, Names] = {}
        self._pending: dict[Path, list[Change]] = {}
        self._open: dict[IOFile, _Inode] = {}
        self._loaded: set[Path] = set()

    # What commits use.

    def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
        self._operation("create", path)
        if path.name in self._names(path.parent):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        inode = _Inode()
        self._change(path.parent, lambda names: names.__setitem__(path.name, inode))
        return self._opened(path)

    def _opened(self, path: Path) -> IOFile:
        file = _Opened(path)
        self._open[file] = self._names(path.parent)[path.name]
        return file

    def open(self, path: Path, flags: int) -> IOFile:
        is_real = _SWAP.fullmatch(path.name) or path.name not in self._names(path.parent)
        return super().open(path, flags) if is_real else self._opened(path)

    def open_or_create(self, path: Path) -> IOFile:
        if _SWAP.fullmatch(path.name):
            return super().open_or_create(path)
        return self._opened(path) if path.name in self._names(path.parent) else self.create(path)

    def write(self, file: IOFile, data: memoryview) -> None:
        assert isinstance(file, _Opened)
        self._operation("write", Path(file.path))
        end = file.at + len(data)
        self._set(file, self._open[file].content[: file.at] + bytes(data) + self._open[file].content[end:])
        file.at = end

    def truncate(self, file: IOFile, size: int) -> None:
        if file in self._open:
            self._operation("truncate", Path(file.path))
            self._set(file, self._open[file].content[:size].ljust(size, b"\0"))
        else:
            super().truncate(file, size)

    def allocate(self, file: IOFile, offset: int, length: int) -> None:
        if file in self._open:
            self._operation("allocate", Path(file.path))
            self._set(file, self._open[file].content.ljust(offset + length, b"\0"))
        else:
            super().allocate(file, offset, length)

    def _set(self, file: IOFile, content: bytes) -> None:
        inode = self._open[file]
        inode.content = content
        inode.versions.append(content)

    def stat(self, at: Path | IOFile, *, follows: bool = False) -> os.stat_result:
        inode = self._open.get(at) if isinstance(at, IOFile) else self._names(at.parent).get(at.name)
        if inode is None or inode.is_directory:
            return super().stat(at, follows=follows)
        links = sum(other is inode for names in self._seen.values() for other in names.values())
        return os.stat_result((stat.S_IFREG | 0o600, 0, 0, links, 0, 0, len(inode.content), 0, 0, 0))

    def sync(self, file: IOFile) -> None:
        if file not in self._open:  # the lock, which tells nothing once power is lost
            super().sync(file)
            return
        inode = self._open[file]
        try:
            self._operation("sync", Path(file.path))
        except OSError:
            inode.versions.clear()
            raise
        if inode.versions:
            inode.durable = inode.content
        inode.versions.clear()

    def close(self, file: IOFile) -> None:
        del self._open[file]

    def lock(self, file: IOFile, *, exclusive: bool) -> None:
        if file not in self._open:  # nobody else has what is only simulated
            super().lock(file, exclusive=exclusive)

    def rename(self, old: Path, new: Path) -> None:
        self._operation("rename", new)
        if old.name in self._real(old.parent):
            os.rename(old, new)
            return
        inode = self._names(old.parent)[old.name]

        def change(names: Names) -> None:
            names.pop(old.name, None)
            names[new.name] = inode

        self._change(old.parent, change)

    def link(self, old: Path, new: Path) -> None:
        if old.name not in self._names(old.parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        self._operation("link", new)
        inode = self._names(old.parent)[old.name]
        self._change(new.parent, lambda names: names.__setitem__(new.name, inode))

    def remove(self, path: Path) -> None:
        self._operation("remove", path)
        if path.name in self._real(path.parent):
            os.unlink(path)
            return
        self._change(path.parent, lambda names: names.pop(path.name, None))

    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        inode, simulated = self._open[target], self._names(source.parent).get(source.name)
        self._operation("copy", Path(target.path))
        if simulated is None:
            with open(source, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        else:
            data = simulated.content[offset : offset + length]
        if len(data) < length:
            raise OSError(errno.EIO, f"{source} ends before what is to be copied does")
        inode.content = inode.content.ljust(offset, b"\0")[:offset] + data + inode.content[offset + length :]
        inode.versions.append(inode.content)

    def make_directory(self, path: Path, mode: int = 0o700) -> bool:
        if not is_snapshot_name(path.name):
            return super().make_directory(path, mode)
        self._operation("make directory", path)
        if path.name in self._names(path.parent):
            return False
        inode = _Inode(is_directory=True)
        self._change(path.parent, lambda names: names.__setitem__(path.name, inode))
        return True

    def remove_directory(self, path: Path) -> None:
        if not is_snapshot_name(path.name):
            super().remove_directory(path)
            return
        self._operation("remove directory", path)
        if not self._names(path):
            self._change(path.parent, lambda names: names.pop(path.name, None))

    def sync_directory(self, path: Path) -> None:
        self._operation("sync directory", path)
        self._durable[path] = dict(self._names(path))
        self._pending[path] = []

    def names(self, directory: Path) -> list[str]:
        return sorted([*self._names(directory), *self._real(directory)])

    def is_directory(self, path: Path, *, follows: bool = False) -> bool:
        inode = self._names(path.parent).get(path.name)
        if inode is None and path.parent not in self._loaded:
            return super().is_directory(path, follows=follows)
        return inode is not None and inode.is_directory

    def read(self, path: Path, most: int) -> bytes:
        if path.name in self._real(path.parent):
            return super().read(path, most)
        if path.name not in self._names(path.parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._names(path.parent)[path.name].content[: most + 1]

    # What tests use.

    def load(self, folder: Path) -> SimulatedFiles:
        """Takes what is really there for durable, and returns itself."""
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            contents = {file: b"" if file.is_dir() else file.read_bytes() for file in place.iterdir()}
            names = {file.name: _Inode(data, data, is_directory=file.is_dir()) for file, data in contents.items()}
            self._seen[place], self._durable[place], self._pending[place] = names, dict(names), []
            self._loaded.add(place)
        return self

    def move(self, old: Path, new: Path) -> SimulatedFiles:
        """What was in one folder is in another; returns itself."""
        self._loaded = {new / place.relative_to(old) for place in self._loaded}
        for known in (self._seen, self._durable, self._pending):
            for place in [*known]:
                known[new / place.relative_to(old)] = known.pop(place)  # type: ignore[index]
        return self

    def write_out(self, folder: Path) -> None:
        """Makes what is really there what is here."""
        shutil.rmtree(folder)
        folder.mkdir()
        for directory in sorted(self._seen):
            if directory.is_dir():  # its own name may be lost
                made: dict[int, Path] = {}
                for name, inode in self._seen[directory].items():
                    if inode.is_directory:
                        (directory / name).mkdir()
                    elif id(inode) in made:
                        (directory / name).hardlink_to(made[id(inode)])
                    else:
                        (directory / name).write_bytes(inode.content)
                        made[id(inode)] = directory / name

    def after_cut(self, seed: int) -> SimulatedFiles:
        """What may be found when the power is back."""
        chance = random.Random(seed)
        keep = chance.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        found = SimulatedFiles()
        found._loaded = set(self._loaded)
        for directory, durable in self._durable.items():
            names = dict(durable)
            for change in self._pending[directory]:
                if chance.random() < keep:
                    change(names)
            found._seen[directory] = _remade(names, lambda inode: inode.after_cut(chance))
            found._durable[directory] = dict(found._seen[directory])
            found._pending[directory] = []
        return found

    def killed(self) -> SimulatedFiles:
        """What is found when only the process ended."""
        found = SimulatedFiles()
        found._loaded = set(self._loaded)
        for directory, names in self._seen.items():
            found._seen[directory] = _remade(names, lambda inode: inode.content)
            found._durable[directory] = dict(found._seen[directory])
            found._pending[directory] = []
        return found

    def _names(self, directory: Path) -> Names:
        if directory not in self._seen:
            self._seen[directory], self._durable[directory], self._pending[directory] = {}, {}, []
        return self._seen[directory]

    def _real(self, directory: Path) -> list[str]:
        """Swap files that are really there."""
        if directory in self._loaded or not directory.is_dir():
            return []
        simulated = self._names(directory)
        return [name for name in os.listdir(directory) if _SWAP.fullmatch(name) and name not in simulated]

    def _change(self, directory: Path, change: Change) -> None:
        change(self._names(directory))
        self._pending[directory].append(change)

    def _operation(self, what: str, path: Path) -> None:
        number, self.operations = self.operations, self.operations + 1
        if self.cut_at is not None and number >= self.cut_at:
            raise PowerCut
        self.log.append(f"{what} {path.name}")
        if number == self.fail_at:
            raise OSError(self.code, os.strerror(self.code), str(path))
