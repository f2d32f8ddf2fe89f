"""Room on the disk for what commits write anew, reserved with the swap files.

[Note: room for commits]
A manifest, the tensors of `extra` and the COMMIT record are written while those of the last commit are still needed. So
each has a spare file, `room-<run id>-<rank>-<kind><0 or 1>`, whose blocks are there. What is next is written into the
spare, over what that holds, and then gets its own name. What it supersedes becomes the spare when the commit is
durable. The blocks never leave the run, so a commit like one before it needs none, however full the disk is.

Before its first commit a run has two spares of manifest and record, of the bytes that the plan has. The tensors have
what the first ones took, and all have what the largest so far took, as soon as the disk has it.

A manifest and a file of tensors may be longer than what is in them: the record, or the manifest, says where that ends,
and then comes a zero byte. What follows means nothing. A record ends where it ends, because older versions read it.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from offload.io.files import Files
from offload.layout import Layout, once_a_layout
from offload.sizes import PAGE_BYTES, round_up
from offload.storage.directories import room_name

MANIFEST, EXTRA, RECORD = "manifest", "extra", "record"
"""What has room: a manifest, the tensors of `extra`, and the COMMIT record."""
SPARES = 2
"""How many spares of a kind there are at most. One is enough beside a file of the last commit."""
ROW_BYTES = 96
"""The most bytes that a chunk takes in a manifest: five short numbers, a step and a checksum."""
_PARAM_BYTES, _OPTIMIZER_BYTES, _STATE_BYTES = 200, 1024, 64
LATE_BYTES = 320
"""About what the log of the steps that a parameter's chunks owe takes: two digits a step."""
_LATE_OPTIONS, _OWED_BYTES = 64, 12


@dataclass(frozen=True)
class Room:
    """The spare files of a rank in one directory; see [Note: room for commits].

    Attributes:
        directory: the directory.
        run_id: 32 hex digits.
        rank: the rank.
        files: the file system.

    Raises:
        OSError: from every method: the operating system refused.
    """

    directory: Path
    run_id: str
    rank: int
    files: Files

    def spare(self, kind: str) -> Path | None:
        """The file that the next one of a kind is written into; None: there is none, so that a new one is needed."""
        return next(reversed(self._there(kind)), None)

    def keep(self, path: Path, kind: str, *, is_needed: bool = False) -> bool:
        """Makes a file a spare.

        Args:
            path: the file.
            kind: the kind.
            is_needed: whether the file keeps its name until another one gets that.

        Returns:
            Whether there is a spare less than there may be. If not, nothing was changed.
        """
        free = next((spare for spare in self._all(kind) if spare not in self._there(kind)), None)
        if free is not None:
            (self.files.link if is_needed else self.files.rename)(path, free)
        return free is not None

    def missing(self, needed: Mapping[str, int], count: int) -> int:
        """The bytes that `reserve` will take."""
        sizes = {path: _blocks(self.files.stat(path).st_size) for kind in needed for path in self._there(kind)}
        paths = [(path, nbytes) for kind, nbytes in needed.items() for path in self._first(kind, count)]
        return sum(max(nbytes - sizes.get(path, 0), 0) for path, nbytes in paths)

    def reserve(self, needed: Mapping[str, int], count: int = 1, undo: ExitStack | None = None) -> None:
        """Sees to it that there are spares of some length.

        Args:
            needed: the bytes of a spare, by kind.
            count: how many there have to be of each kind.
            undo: gets the removal of those that are made; None: they stay.
        """
        for kind, nbytes in needed.items():
            for path in self._first(kind, count):
                if undo is not None and path not in self._there(kind):
                    undo.callback(self.files.remove, path)
                with self.files.open_or_create(path) as file:
                    size = self.files.size(file)
                    try:
                        if _blocks(size) < nbytes:
                            self.files.allocate(file, 0, nbytes)
                    except BaseException:
                        with suppress(OSError):
                            self.files.truncate(file, size)  # what was allocated before the disk was full
                        raise

    def _all(self, kind: str) -> list[Path]:
        return [self.directory / room_name(self.run_id, self.rank, f"{kind}{number}") for number in range(SPARES)]

    def _first(self, kind: str, count: int) -> list[Path]:
        """The first ones of those that may be there, which are those that are."""
        there = self._there(kind)
        return sorted(self._all(kind), key=lambda path: path not in there)[:count]

    def _there(self, kind: str) -> list[Path]:
        """Those that are there. One with a second name goes: it still is the record, or somebody else's copy."""
        names, found = self.files.names(self.directory), []
        for path in self._all(kind):
            if path.name in names:
                info = self.files.stat(path)
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
                    found.append(path)
                else:
                    self.files.remove(path)
        return found


def _blocks(size: int) -> int:
    return round_up(size, PAGE_BYTES)


@once_a_layout
def manifest_bytes(layout: Layout, slots: int) -> int:
    """About as many bytes as a manifest takes, rather more than less, without what the user gives along.

    Args:
        layout: of the trained parameters.
        slots: how many slots are committed.
    """
    found = max(PAGE_BYTES, len(set(layout.groups)) * _OPTIMIZER_BYTES)
    found += slots * ROW_BYTES + len(layout.flats) * _PARAM_BYTES
    for spec in layout.specs:
        found += _PARAM_BYTES + len(json.dumps(spec.name)) + len(json.dumps(spec.unit))
        found += len(spec.states) * _STATE_BYTES
        found += spec.is_late * LATE_BYTES
    return found + bool(layout.late_chunks) * LATE_BYTES * _LATE_OPTIONS + len(layout.late_chunks) * _OWED_BYTES


def record_bytes(paths: Iterable[Path], ranks: int) -> int:
    """About as many bytes as the COMMIT record takes.

    Args:
        paths: the directories of one rank.
        ranks: how many ranks commit.
    """
    return _PARAM_BYTES + ranks * (_PARAM_BYTES * 2 + sum(3 * len(bytes(path)) for path in paths))
