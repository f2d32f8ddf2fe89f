"""Weights as others read them: safetensors, in shards with an index, written in constant memory.

The names and the index are those that `from_pretrained` of transformers and `safetensors.safe_open` expect. All
files are written under temporary names and synced, and then renamed, the index last. So a folder that was cut off in
between has no index, and no name that a reader would take for the whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from offload.checkpoint.atomic_file import (
    atomic_replace,
    failing,
    sync_directory,
    sync_parent,
    temporary,
    write_temporary,
)
from offload.checkpoint.extra import memory_of
from offload.checkpoint.manifest import ParameterFacts, canonical
from offload.checkpoint.reader import Reader
from offload.checkpoint.tensors import DTYPES, Entry, aligned, stream
from offload.errors import BudgetError, ConfigError, PathError, missing_parent
from offload.interrupts import is_of_system
from offload.io.files import LOCAL, Files
from offload.sizes import GIB, MIB, format_bytes
from offload.storage.directories import require_file_size

SHARD_BYTES = 5 * GIB
METADATA = {"format": "pt"}
MODE = 0o666
"""Of what is exported, less what the umask takes: it is for others, as what `safetensors` and `torch.save` write."""
COMPARED_BYTES = 4 * MIB


def export(
    directory: Path,
    entries: Iterable[Entry],
    *,
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
    shared: bool = False,
    files: Files = LOCAL,
) -> tuple[Path, ...]:
    """Writes tensors to `directory`, which is made if its parent exists.

    Other files in `directory` stay. A finished export of this stem is never overwritten. If it raises, nothing of this
    export is left.

    Args:
        directory: where.
        entries: the tensors. Their `pieces` are asked for one tensor after the other, in this order, but within a shard
            wider dtypes come first.
        shard_bytes: the most bytes of tensors in a file. A larger tensor has a file of its own.
        stem: "model" gives model.safetensors, or model-00001-of-00003.safetensors and so on with
            model.safetensors.index.json.
        shared: whether others that have the same tensors may export to this directory, too. They wait for each other.
            If what is there is what would be written, nothing is written.
        files: the file system.

    Returns:
        The files; none if `shared` and all was there already.

    Raises:
        PathError: `directory` is no directory or cannot be made, or has an export of this stem.
        BudgetError: the disk has no room for it, or the limit of file sizes is too low.
        ConfigError: safetensors cannot hold a name or a dtype, or `stem` or `shard_bytes` is impossible. Nothing was
            written.
        TierIOError: a disk or its file system failed.
        OffloadError: what `pieces` raise.
    """
    shards = _shards(_checked(entries), shard_bytes)
    total = sum(entry.nbytes for shard in shards for entry in shard)
    names = _names(stem, len(shards))
    index = f"{stem}.safetensors.index.json"
    made = _make(directory, files)
    try:
        with _alone_in(directory, files):
            if shared and _is_there(directory, index, names, shards, total, files):
                return ()
            _require_free(directory, stem, files)
            _require_space(directory, total, files)
            largest = max(sum(entry.nbytes for entry in shard) for shard in shards)
            require_file_size(str(directory / names[0]), largest, option="directory")
            done = _write(directory, index, names, shards, total, files)
            if made:
                sync_parent(files, directory)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                files.remove_directory(directory)
        raise
    return tuple(done)


def _write(
    directory: Path, index: str, names: Sequence[str], shards: Sequence[Sequence[Entry]], total: int, files: Files
) -> list[Path]:
    """Writes all files, or leaves none."""
    done: list[Path] = []
    replaced: list[Path] = []
    try:
        # One shard's tensors are streamed before the next one's are asked for.
        for name, shard in zip(names, shards, strict=True):
            done.append(directory / name)
            write_temporary(files, directory / name, stream(aligned(shard), METADATA), mode=MODE)
        if len(shards) > 1:
            done.append(directory / index)
            write_temporary(files, directory / index, [_index(total, names, shards)], mode=MODE)
        for path in done:
            atomic_replace(files, path)
            replaced.append(path)
        sync_directory(files, directory)
    except BaseException:
        for path in (*replaced, *(temporary(path) for path in done)):
            with contextlib.suppress(OSError):
                files.remove(path)
        raise
    return done


@contextlib.contextmanager
def _alone_in(directory: Path, files: Files) -> Iterator[None]:
    """Waits until no other export is under way in a directory. Some network file systems cannot tell."""
    with failing("open", directory):
        opened = files.open_directory(directory)
    with opened:
        with contextlib.suppress(OSError):
            files.wait_for_lock(opened)
        yield


def _is_there(
    directory: Path, index: str, names: Sequence[str], shards: Sequence[Sequence[Entry]], total: int, files: Files
) -> bool:
    """Whether a finished export holds the very bytes that would be written."""
    wanted: list[tuple[str, Iterable[bytes | memoryview]]] = [
        (name, stream(aligned(shard), METADATA)) for name, shard in zip(names, shards, strict=True)
    ]
    wanted += [(index, [_index(total, names, shards)])] if len(shards) > 1 else []
    return all(_holds(directory / name, pieces, files) for name, pieces in wanted)


def _holds(path: Path, pieces: Iterable[bytes | memoryview], files: Files) -> bool:
    try:
        with files.open(path, os.O_RDONLY) as opened:
            files.require_regular(opened)
            with files.stream(opened) as file:
                for piece in pieces:
                    data = memoryview(piece).cast("B")
                    for start in range(0, len(data), COMPARED_BYTES):
                        part = data[start : start + COMPARED_BYTES]
                        if file.read(len(part)) != part:
                            return False
                return not file.read(1)
    except OSError:
        return False


def _checked(entries: Iterable[Entry]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in found or entry.name == "__metadata__":
            raise ConfigError(
                f"the tensor name {entry.name!r} cannot be exported: another tensor has that name, or it is reserved"
            )
        if entry.dtype not in DTYPES:
            raise ConfigError(f"{entry.name} is {entry.dtype}, which safetensors has no name for: choose another dtype")
        found[entry.name] = entry
    return [*found.values()]


def _shards(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Parts entries into shards, in their order. There is at least one shard.

    Args:
        entries: the tensors.
        most: the most bytes of a shard that is not a single tensor.
    """
    if most < 1:
        raise ConfigError(f"shard_bytes={most}: give a number of bytes, at least 1")
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _names(stem: str, count: int) -> list[str]:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", stem):
        raise ConfigError(f"stem={stem!r} cannot begin a file's name: give letters, digits, dots and dashes")
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _index(total: int, names: Sequence[str], shards: Sequence[Sequence[Entry]]) -> bytes:
    file_of = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    return canonical({"metadata": {"total_size": total}, "weight_map": {**file_of}})


def _make(directory: Path, files: Files) -> bool:
    """Makes a directory.

    Returns:
        Whether it was missing.

    Raises:
        PathError: it cannot be made, or is no directory.
    """
    try:
        made = files.make_directory(directory, 0o777)
    except OSError as error:
        if not is_of_system(error):
            raise
        is_missing = isinstance(error, FileNotFoundError) and not files.exists(directory.parent)
        why = missing_parent(directory) if is_missing else f"cannot be made: {error.strerror}"
        raise PathError(error.errno, why, str(directory)) from error
    if not made and not files.is_directory(directory, follows=True):
        raise PathError(errno.ENOTDIR, "is not a directory: give one to export to", str(directory))
    return made


def _require_free(directory: Path, stem: str, files: Files) -> None:
    taken = re.compile(rf"{re.escape(stem)}(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
    with failing("read", directory):
        names = sorted(name for name in files.names(directory) if taken.fullmatch(name))
    if names:
        raise PathError(
            errno.EEXIST, "is there already: export to another directory, or remove it", str(directory / names[0])
        )


def _require_space(directory: Path, needed: int, files: Files) -> None:
    with failing("read", directory):
        _, available = files.space(directory)
    if needed > available:
        raise BudgetError(
            f"{directory} needs {format_bytes(needed)} of disk and {format_bytes(available)} are free: free some, or "
            "export to another directory",
            needed=needed,
            available=available,
            option="directory",
        )


def entries(reader: Reader, kind: str = "master", dtype: torch.dtype | None = None) -> Iterator[Entry]:
    """The parameters of a commit under their own names, in the order in which each slot is read once.

    It takes the memory of a slot and its cast. For a parameter that does not lie row-major, is cut along another
    dimension than the first, or has a state of another shape, it takes that of the whole parameter, twice.

    Args:
        reader: of the commit.
        kind: the name of an array. Parameters that do not have it are left out: see `Manifest.arrays_of`.
        dtype: what values are rounded to, to nearest even; None: a master is rounded to its parameter's compute dtype,
            and a moment stays fp32.
    """
    manifest = reader.manifests[0]
    for flat in manifest.flats:
        for number in (number for number in flat.params if kind in manifest.arrays_of(number)):
            facts = manifest.parameters[number]
            own: torch.dtype = getattr(torch, facts.dtype) if kind == "master" else torch.float32
            wanted = own if dtype is None else dtype
            shape = reader.state_shape_of(facts.name, kind)
            yield Entry(facts.name, wanted, shape, partial(_pieces, reader, facts, kind, wanted))


def _pieces(reader: Reader, facts: ParameterFacts, kind: str, dtype: torch.dtype) -> Iterator[memoryview]:
    if facts.order is not None or facts.shard_dim or kind in dict(facts.shapes or ()):
        yield memory_of(reader.read(facts.name, kind).to(dtype))
        return
    for number in reader.slices_of(facts.name):
        for piece in reader.pieces(facts.name, kind, number):
            yield memory_of(piece.to(dtype))
