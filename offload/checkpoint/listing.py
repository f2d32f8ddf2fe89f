"""Lists the runs and snapshots below a directory: what their records say, without opening them as a resume does.

A run is known by its COMMIT record, or, before its first commit, by the superblock of a swap file. A directory that has
only swap files of a run whose record lies in another one, as a stripe or another rank's has, belongs to that one's row.
Of the states nothing is read: `offload verify` does that.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from offload.checkpoint.commit import Commit, read_commit, read_manifest
from offload.checkpoint.live import swaps
from offload.checkpoint.snapshot import is_snapshot_name
from offload.errors import ConfigError, OffloadError, explained
from offload.io.files import LOCAL
from offload.storage.directories import COMMIT_NAME, LOCK_NAME, RECORD_START, file_name
from offload.storage.swap_file import any_is_held

MOST_DIRECTORIES = 20_000
"""How many directories are looked at. So `offload list /` ends, too."""
_BLOCK_BYTES = 512
"""What `st_blocks` counts, whatever the file system's blocks are."""
_TRIES = 3


@dataclass(frozen=True)
class Listed:
    """A run or a snapshot, or a directory of which nobody can tell.

    Attributes:
        path: the directory of its record, or of its first file.
        also: its other directories.
        run_id: 32 hex digits; None: it is not known.
        step: the step that is committed; None: no commit was found.
        is_snapshot: whether it is a snapshot.
        optimizers: the optimizers of its param groups.
        nbytes: the bytes of this library's files on disk.
        committed_s: when it was committed, in Unix time; None: no commit was found.
        is_live: whether a process holds its files now.
        is_part: whether it is a directory of a run whose first directory was not seen.
        problem: why not all of this could be read; None: it could.
    """

    path: Path
    also: tuple[Path, ...] = ()
    run_id: str | None = None
    step: int | None = None
    is_snapshot: bool = False
    optimizers: tuple[str, ...] = ()
    nbytes: int = 0
    committed_s: float | None = None
    is_live: bool = False
    is_part: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Listing:
    """What was found below a directory.

    Attributes:
        rows: the runs and snapshots, by path.
        too_deep: how many directories lie deeper than was looked.
        is_cut: whether there are more directories than are looked at.
    """

    rows: list[Listed]
    too_deep: int
    is_cut: bool


@dataclass
class _Walk:
    depth: int
    too_deep: int = 0
    is_cut: bool = False
    rows: list[Listed] = field(default_factory=list)
    parts: list[Listed] = field(default_factory=list)


def find(root: Path, *, depth: int) -> Listing:
    """The runs and snapshots in a directory and below. Changes nothing, and follows no links.

    Args:
        root: the directory.
        depth: how many levels of directories below `root` are looked at. The nearest come first, up to
            MOST_DIRECTORIES.

    Raises:
        ConfigError: `root` is no directory.
    """
    if not LOCAL.is_directory(root, follows=True):
        raise ConfigError(f"{root} is not a directory: give one that has runs in it or below")
    walk = _Walk(depth)
    for directory, names in _directories(root, walk):
        own = [name for name in names if name == COMMIT_NAME or file_name(name) is not None]
        if own:
            _look(directory, own, walk)
    rows = _joined(walk.rows, walk.parts)
    return Listing(sorted(rows, key=lambda row: row.path), walk.too_deep, walk.is_cut)


def _directories(root: Path, walk: _Walk) -> Iterator[tuple[Path, list[str]]]:
    """Directories and the names of the files in them, breadth first. One that cannot be read becomes a row."""
    waiting, seen = deque([(root, 0)]), 0
    while waiting:
        directory, level = waiting.popleft()
        if seen == MOST_DIRECTORIES:
            walk.is_cut = True
            return
        seen += 1
        below: list[str] = []
        names: list[str] = []
        try:
            for name, is_directory in LOCAL.kinds(directory).items():
                (below if is_directory else names).append(name)
        except OSError as error:
            # Who trains meanwhile removes directories of snapshots.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or directory == root:
                walk.rows.append(Listed(directory, problem=explained(error)))
            continue
        if level == walk.depth:
            walk.too_deep += len(below)
        else:
            waiting.extend((directory / name, level + 1) for name in sorted(below))
        yield directory, sorted(names)


def _look(directory: Path, own: Sequence[str], walk: _Walk) -> None:
    """Adds what a directory holds.

    That is a row if there is a record or a file that cannot be read, and else a part of a run.

    Args:
        directory: the directory.
        own: the names in it that are this library's.
        walk: gets the row or the part.
    """
    row = replace(Listed(directory), nbytes=sum(_bytes_on_disk(directory / name) for name in [*own, LOCK_NAME]))
    try:
        row = replace(row, is_live=any_is_held(directory, own, LOCAL))
        if COMMIT_NAME in own and (len(own) > 1 or _may_be_record(directory)):
            walk.rows.append(_committed(row))
            return
        found = list(swaps(directory, LOCAL))
        if blocks := [swap.block for swap in found if swap.block is not None]:
            row = replace(row, run_id=blocks[0].run_id)
            is_first = any(swap.rank == 0 and swap.block and swap.block.stripe[0] == 0 for swap in found)
            walk.parts.append(replace(row, is_part=not is_first))
        elif found and row.nbytes:
            walk.rows.append(replace(row, problem=f"{found[0].path.name} is not a file of this library, or is damaged"))
    except OffloadError as error:
        walk.rows.append(replace(row, problem=_said(error, directory)))


def _committed(row: Listed) -> Listed:
    """A row with what the record in its directory says, and the manifest of rank 0.

    Raises:
        OffloadError: what `read_commit` raises.
    """
    commit: Commit | None = None
    for _ in range(_TRIES):
        # A live run may commit meanwhile, and clear away what the record named.
        before, commit = commit, read_commit(row.path)
        if commit is None:  # removed meanwhile
            return row
        known = replace(row, run_id=commit.run_id, step=commit.step, is_snapshot=commit.is_snapshot)
        try:
            known = replace(known, committed_s=LOCAL.stat(row.path / COMMIT_NAME, follows=True).st_mtime)
            optimizers = read_manifest(row.path, commit, 0).optimizers
        except (OSError, OffloadError) as error:
            known = replace(known, problem=_said(error, row.path))
        else:
            return replace(known, optimizers=tuple(dict.fromkeys(optimizers)))
        if commit == before:
            break
    return known


def _joined(rows: Sequence[Listed], parts: Sequence[Listed]) -> list[Listed]:
    """Puts each part into the row of its run, or of its snapshot. A part without one becomes a row."""
    homes: dict[tuple[str | None, str | None], int] = {}
    found = list(rows)
    for number, row in enumerate(found):
        if row.run_id is not None:
            homes.setdefault((row.run_id, row.path.name if row.is_snapshot else None), number)
    for part in sorted(parts, key=lambda part: (part.is_part, part.path)):
        snapshot = part.path.name if is_snapshot_name(part.path.name) else None
        home = homes.get((part.run_id, snapshot), homes.get((part.run_id, None)))
        if home is None:
            homes[part.run_id, snapshot] = len(found)
            found.append(part)
            continue
        row = found[home]
        found[home] = replace(
            row,
            also=(*row.also, part.path),
            nbytes=row.nbytes + part.nbytes,
            is_live=row.is_live or part.is_live,
        )
    return found


def _may_be_record(directory: Path) -> bool:
    """Whether a file called COMMIT, with nothing of this library beside it, is a record or cannot be read."""
    try:
        return LOCAL.read(directory / COMMIT_NAME, len(RECORD_START)).startswith(RECORD_START)
    except OSError:
        return True


def _bytes_on_disk(path: Path) -> int:
    try:
        return LOCAL.stat(path).st_blocks * _BLOCK_BYTES
    except OSError:
        return 0


def _said(error: BaseException, directory: Path) -> str:
    """What an error about a file in `directory` says, in few words, for a table."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
    return text.replace("cannot be read: ", "").replace(f"{directory}{os.sep}", "")
