"""The one decision: which manifests are the committed ones, and which files live.

Order of a commit: the swap files are synced; every rank writes its manifest (`write_files`) into each directory of
its own swap files, durable when the call returns; then rank 0 writes the COMMIT record with the digests of all of them
(`write_commit`) into its first directory, and only there. That decides, for all ranks at once. Whatever
is cut off before leaves the commit before; once the call has returned the new one is found, whatever happens then.
Only after that may a rank clear away what the record does not name (live.py) and let go of the older slots.

[Note: COMMIT format 2]
Two lines: {"schema": "offload commit", "version": 2, "run_id", "step", "replaces", "manifests": [[bytes, XXH3-128] of
each rank's manifest, by rank], "files": [[directories, names] of each rank, by rank]}, spelled by `canonical`, and
the XXH3-128 of that line. `files` are all files of the commit: each name is in each of the rank's directories.
Directories are absolute paths, of which all bytes but letters, digits and -._~/ are written as %XX. Where a commit is
written anew in another layout, under another run id, `replaces` is the id that the same run had before; else null.
The record of a snapshot (snapshot.py) has the schema "offload snapshot", and replaces nothing.

Format 1 has no `files`: its swap files are called as `older_swap_name` says, or with .new at the end. It is read, never
written.

If `write_commit` raises, the older commit is what is found, with one exception: when renaming or the sync of the
directory failed, either may be. Then nothing of either may be overwritten by this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from offload.checkpoint import extra as extra_state
from offload.checkpoint.atomic_file import copy_file, failing, nothing, read_whole, sync_directory, write_file
from offload.checkpoint.manifest import (
    MAX_BYTES,
    MAX_WORLD,
    Digest,
    Directory,
    Manifest,
    Natural,
    Schema,
    canonical,
    decode,
    digest,
    parse,
    serialise,
)
from offload.checkpoint.tensors import Entry, stream
from offload.errors import ConfigError, CorruptionError, OffloadError, PathError, ResumeError, TierIOError
from offload.io.files import LOCAL, Files
from offload.sizes import format_bytes
from offload.storage.directories import COMMIT_NAME, file_name, swap_name, tag_name
from offload.storage.room import EXTRA, MANIFEST, RECORD, Room
from offload.storage.swap_format import MAX_PATHS, RunId

SCHEMA = "offload commit"
SNAPSHOT_SCHEMA = "offload snapshot"
VERSION = 2
MAX_COMMIT_BYTES = 64 << 20
MAX_TENSORS_BYTES = 16 << 30
"""The most bytes of the file with the tensors of the user's extra state, which is read as a whole."""


Name = Annotated[str, Meta(max_length=255, pattern=r"^[A-Za-z0-9.-]+\Z")]


def spelled(path: Path) -> str:
    """A path as a record has it. `path_of` is the inverse."""
    return quote_from_bytes(bytes(path), safe="/")


def path_of(directory: str) -> Path:
    """The path that a record names."""
    return Path(os.fsdecode(unquote_to_bytes(directory)))


class RankFiles(NamedTuple):
    """The files of one rank that live with a commit.

    Attributes:
        directories: the rank's directories, in the order of its swap files; see `spelled`.
        names: the names of its files, which are in each of these.
    """

    directories: Annotated[tuple[Directory, ...], Meta(min_length=1, max_length=MAX_PATHS)]
    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=8)]


@dataclass(frozen=True)
class Commit:
    """What was decided; see [Note: COMMIT format 2].

    Attributes:
        run_id: 32 hex digits.
        step: the step that is committed.
        manifests: the digest of each rank's manifest, by rank.
        replaces: the id that the same run had before, if it was written anew in another layout.
        files: the files of each rank, by rank; none in a record of format 1.
        is_snapshot: whether it is the record of a snapshot.
    """

    run_id: RunId
    step: Natural
    manifests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_WORLD)]
    replaces: RunId | None = None
    files: Annotated[tuple[RankFiles, ...], Meta(max_length=MAX_WORLD)] = ()
    is_snapshot: bool = False

    @property
    def is_older(self) -> bool:
        """Whether an older version of this library wrote it, in format 1."""
        return not self.files

    def directories_of(self, rank: int) -> tuple[Path, ...]:
        """The directories of a rank, as its machine calls them; none in a record of format 1."""
        return () if self.is_older else tuple(map(path_of, self.files[rank].directories))

    def supersedes(self, name: str, rank: int, directory: Path) -> bool:
        """Whether a file of this run does not live any more: the rank has the directory, and other files in it.

        Args:
            name: the name of the file.
            rank: the rank that wrote it.
            directory: where it is. The record says nothing of files in directories that it does not name for the rank.
        """
        if rank >= len(self.files) or spelled(directory) not in self.files[rank].directories:
            return False
        return name not in self.files[rank].names


def manifest_name(of: Commit | Manifest, rank: int) -> str:
    return f"manifest-{of.run_id}-{of.step}-rank{rank}.json"


def tensors_name(of: Commit | Manifest, rank: int) -> str:
    """The name of the file with the tensors of the user's extra state."""
    return f"extra-{of.run_id}-{of.step}-rank{rank}.safetensors"


def names_of(manifest: Manifest, rank: int, *, has_tensors: bool) -> tuple[str, ...]:
    """The names of the files of a rank that live with a commit.

    Args:
        manifest: a manifest of the commit, of any rank.
        rank: the rank.
        has_tensors: whether the rank commits tensors of the user's extra state.
    """
    tensors = (tensors_name(manifest, rank),) if has_tensors else ()
    run = manifest.run_id
    return tag_name(run, rank), swap_name(run, rank), manifest_name(manifest, rank), *tensors


def write_files(
    directory: Path,
    manifest: Manifest,
    extra: object = None,
    files: Files = LOCAL,
    check: Callable[[], None] = nothing,
    sync: Callable[[Files, Path], None] = sync_directory,
) -> tuple[Digest, bool]:
    """Writes the rank's manifest, and what the user gives along. Both are durable when it returns.

    Args:
        directory: where.
        manifest: the manifest, whose `extra` and `tensors` are filled in here.
        extra: anything that `extra.encode` takes.
        files: the file system.
        check: see `write_file`.
        sync: syncs the directory in the end.

    Returns:
        What the COMMIT record has to say of the manifest, and whether there are tensors beside it.

    Raises:
        ConfigError: a part of `extra`, which the error names, or of the run cannot be stored; or the tensors are too
            large. Nothing was written.
        TierIOError: a disk or its file system failed.
        OffloadError: what `check` raises.
    """
    room = Room(directory, manifest.run_id, manifest.rank, files)
    structure, tensors = extra_state.encode(extra)
    _check(replace(manifest, extra=structure, tensors=None))
    if sum(tensor.nbytes for tensor in tensors) > MAX_TENSORS_BYTES // 2:
        raise ConfigError(
            f"the tensors in extra are larger than {format_bytes(MAX_TENSORS_BYTES // 2)}: save them elsewhere"
        )
    found = None
    if tensors:
        path, entries = directory / tensors_name(manifest, manifest.rank), map(_entry, count(), tensors)
        found = write_file(files, path, stream([*entries]), _spare(room, EXTRA), check=check)
    path, whole = directory / manifest_name(manifest, manifest.rank), replace(manifest, extra=structure, tensors=found)
    written = write_file(files, path, [serialise(whole)], _spare(room, MANIFEST), check=check)
    sync(files, directory)
    return written, found is not None


def serialise_commit(commit: Commit) -> bytes:
    """The bytes of the record, as `parse_commit` reads them. Checks nothing."""
    line = _line(commit)
    return line + digest(line).encode() + b"\n"


def _line(commit: Commit) -> bytes:
    return canonical(
        {
            "schema": SNAPSHOT_SCHEMA if commit.is_snapshot else SCHEMA,
            "version": 1 if commit.is_older else VERSION,
            "run_id": commit.run_id,
            "step": commit.step,
            "replaces": commit.replaces,
            "manifests": commit.manifests,
            **({} if commit.is_older else {"files": commit.files}),
        }
    )


def write_commit(directory: Path, commit: Commit, files: Files = LOCAL, check: Callable[[], None] = nothing) -> None:
    """Makes `commit` the one that is found, durably.

    Args:
        directory: where.
        commit: the record.
        files: the file system.
        check: see `write_file`.

    Raises:
        TierIOError: a disk or its file system failed. [Note: COMMIT format 2] says which commit is found then.
        OffloadError: what `check` raises.
    """
    data = serialise_commit(commit)
    parse_commit(data, COMMIT_NAME)
    path, room = directory / COMMIT_NAME, Room(directory, commit.run_id, 0, files)
    made = _spare(room, RECORD)
    # The record before becomes the spare. It has that name, too, when it loses its own.
    with suppress(TierIOError), failing("link", path):
        room.keep(path, RECORD, is_needed=True)
    write_file(files, path, [data], made, is_exact=True, check=check)
    sync_directory(files, directory)


def read_commit(directory: Path, files: Files = LOCAL) -> Commit | None:
    """The last commit in `directory`; None: there is none.

    Raises:
        CorruptionError: the record is damaged.
        ResumeError: a newer version of this library wrote it.
        PathError: it is a link, or cannot be read.
        TierIOError: a disk or its file system failed.
    """
    path = directory / COMMIT_NAME
    data = read_whole(files, path, MAX_COMMIT_BYTES)
    return None if data is None else parse_commit(data, str(path))


def parse_commit(data: bytes, file: str = COMMIT_NAME) -> Commit:
    """Decodes and checks a record.

    Args:
        data: the bytes of the record.
        file: its path, for the errors.

    Raises:
        CorruptionError: it is damaged, or not one that this library writes.
        ResumeError: a newer version of this library wrote it.
    """
    end = data.find(b"\n") + 1
    line, checksum = data[:end], data[end:]
    if checksum != digest(line).encode() + b"\n":
        raise CorruptionError("is damaged: it does not match its checksum", file=file)
    is_snapshot = line.startswith(canonical({"schema": SNAPSHOT_SCHEMA})[:-2])

    def spell(commit: Commit) -> bytes:
        return _line(replace(commit, is_snapshot=is_snapshot))

    known = SNAPSHOT_SCHEMA if is_snapshot else SCHEMA
    is_older = False
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        is_older = msgspec.json.decode(line, type=Schema) == Schema(known, 1)
    schema = Schema(known, 1 if is_older else VERSION)
    commit = replace(decode(line, Commit, spell, schema, file, MAX_COMMIT_BYTES), is_snapshot=is_snapshot)
    if is_snapshot and commit.replaces is not None:
        raise CorruptionError("is a snapshot that replaces a run", file=file)
    if commit.files and len(commit.files) != len(commit.manifests):
        raise CorruptionError("names the files of more or fewer ranks than there are", file=file)
    return commit


def read_manifest(directory: Path, commit: Commit, rank: int, files: Files = LOCAL) -> Manifest:
    """The manifest of `rank` that `commit` names.

    Raises:
        CorruptionError: it is missing or damaged, or another one has its name.
        ResumeError: another version of this library wrote it.
        PathError: it is a link, or cannot be read.
        TierIOError: a disk or its file system failed.
    """
    path = directory / manifest_name(commit, rank)
    return _manifest_of(_read_exactly(files, path, commit.manifests[rank], MAX_BYTES), commit, rank, str(path))


def manifest_told(data: bytes, commit: Commit, rank: int) -> Manifest:
    """The manifest of `rank` that `commit` names, of which another rank has sent the bytes.

    Raises:
        CorruptionError: these are not the bytes that were committed.
        ResumeError: another version of this library wrote them.
    """
    expected, name = commit.manifests[rank], manifest_name(commit, rank)
    if len(data) != expected.size or digest(data) != expected.xxh3:
        raise CorruptionError("is not the file that was committed", file=name)
    return _manifest_of(data, commit, rank, name)


def _manifest_of(data: bytes, commit: Commit, rank: int, file: str) -> Manifest:
    manifest = parse(data, file)
    found = (manifest.run_id, manifest.step, manifest.rank, manifest.world)
    if found != (commit.run_id, commit.step, rank, len(commit.manifests)):
        raise CorruptionError("is of another run, step or rank than its name and the COMMIT record say", file=file)
    return manifest


def read_extra(directory: Path, manifest: Manifest, files: Files = LOCAL) -> object:
    """What the user gave along with the commit. Tensors are on the CPU.

    Raises:
        CorruptionError: what was read is damaged, or missing.
        PathError: the file is a link, or cannot be read.
        TierIOError: a disk or its file system failed.
    """
    return extra_of(manifest, {} if manifest.tensors is None else read_tensors(directory, manifest, files), directory)


def extra_of(manifest: Manifest, tensors: Mapping[str, Tensor], directory: Path) -> object:
    """What the user gave along with the commit.

    Args:
        manifest: the manifest.
        tensors: those that belong to it.
        directory: where it is, for the errors.

    Raises:
        CorruptionError: it is damaged.
    """
    return extra_state.decode(manifest.extra, tensors, str(directory / manifest_name(manifest, manifest.rank)))


def read_tensors(directory: Path, manifest: Manifest, files: Files = LOCAL) -> dict[str, Tensor]:
    """The tensors of the user's extra state, on the CPU.

    Raises:
        CorruptionError: what was read is damaged, or missing.
        PathError: the file is a link, or cannot be read.
        TierIOError: a disk or its file system failed.
    """
    path = directory / tensors_name(manifest, manifest.rank)
    assert manifest.tensors is not None
    return _tensors_in(_read_exactly(files, path, manifest.tensors, MAX_TENSORS_BYTES), str(path))


def tensors_told(data: bytes, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of the user's extra state, of which another rank has sent the bytes.

    Raises:
        CorruptionError: these are not the bytes that were committed.
    """
    name = tensors_name(manifest, manifest.rank)
    if manifest.tensors != (len(data), digest(data)):
        raise CorruptionError("is not the file that was committed", file=name)
    return _tensors_in(data, name)


def _tensors_in(data: bytes, file: str) -> dict[str, Tensor]:
    try:
        return load_tensors(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptionError(f"holds no tensors: {error}", file=file) from error


def copy_manifest(source: Path, target: Path, commit: Commit, rank: int, files: Files = LOCAL) -> None:
    """Copies the manifest of `rank` that `commit` names, and its tensors, to another directory. The copies are durable.

    The manifest comes last: whoever sees it finds all else. It is written as it was read and checked. The tensors are
    not checked, like the slots that a snapshot copies: whoever reads them does that.

    Raises:
        CorruptionError: the manifest is missing or damaged.
        ResumeError: another version of this library wrote it.
        PathError: it is a link, or cannot be read.
        TierIOError: a disk or its file system failed.
    """
    manifest = read_manifest(source, commit, rank, files)
    if manifest.tensors is not None:
        made = target / tensors_name(commit, rank)
        copy_file(files, source / made.name, made, manifest.tensors.size)
        sync_directory(files, target)
    write_file(files, target / manifest_name(commit, rank), [serialise(manifest)])
    sync_directory(files, target)


def manifest_in(path: Path, files: Files = LOCAL) -> Manifest | None:
    """The manifest that a file holds; None: it holds none, or another one than its name says.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    file = file_name(path.name)
    if file is None or not path.name.endswith(".json"):
        return None
    try:
        data = read_whole(files, path, MAX_BYTES)
        manifest = None if data is None else parse(data.partition(b"\0")[0], str(path))
    except (CorruptionError, PathError, ResumeError):
        return None
    if manifest is None or (manifest.run_id, manifest.step, manifest.rank) != (file.run_id, file.step, file.rank):
        return None
    return manifest


def _check(manifest: Manifest) -> None:
    """Checks that a manifest can be read back, so that no other is ever committed.

    Raises:
        ConfigError: it cannot be read back.
    """
    try:
        parse(serialise(manifest), "the manifest to be written")
    except (OffloadError, ValueError) as error:
        raise ConfigError(f"this run cannot be committed: {error}") from error


def _spare(room: Room, kind: str) -> Path | None:
    with failing("write", room.directory):
        return room.spare(kind)


def keep_room(directory: Path, commit: Commit, rank: int, files: Files) -> None:
    """Sees to it that a rank's next commit has as much room in a directory as the last one took, if the disk has it.

    Raises:
        TierIOError: a disk or its file system failed, or is full.
    """
    room = Room(directory, commit.run_id, rank, files)
    names = {file.kind: name for name in commit.files[rank].names if (file := file_name(name)) is not None}
    written = {kind: names[kind] for kind in (MANIFEST, EXTRA) if kind in names}
    if (rank, directory) == (0, path_of(commit.files[0].directories[0])):
        written[RECORD] = COMMIT_NAME
    with failing("write", directory):
        room.reserve({kind: files.stat(directory / name).st_size for kind, name in written.items()})


def _entry(number: int, tensor: Tensor) -> Entry:
    def pieces() -> Iterable[memoryview]:
        yield extra_state.memory_of(tensor)

    return Entry(str(number), tensor.dtype, tuple(tensor.shape), pieces)


def _read_exactly(files: Files, path: Path, expected: Digest, limit: int) -> bytes:
    if expected.size > limit:
        raise CorruptionError(f"is longer than the {format_bytes(limit)} that are allowed", file=str(path))
    data = read_whole(files, path, expected.size)
    if data is None:
        raise CorruptionError(
            "is missing: name all directories of the run, or was it moved or removed?", file=str(path)
        )
    if len(data) != expected.size or digest(data) != expected.xxh3:
        raise CorruptionError("is not the file that was committed", file=str(path))
    return data


def require_one_model(first: Manifest, other: Manifest, file: str) -> None:
    """Checks that the manifests of two ranks describe one model.

    Args:
        first: a manifest.
        other: another one.
        file: what the error names.

    Raises:
        CorruptionError: they describe different models.
    """
    if _model_of(first) != _model_of(other):
        raise CorruptionError(
            f"the manifests of ranks {first.rank} and {other.rank} describe different models", file=file
        )


def _model_of(manifest: Manifest) -> tuple[object, ...]:
    """What is the same on all ranks of a slice."""
    flats = [(flat.params, flat.offsets, flat.numel) for flat in manifest.flats]
    split = manifest.split_master, manifest.slices, manifest.user_ranks
    return manifest.parameters, manifest.groups, manifest.compute_dtype, *split, flats


def agree(manifests: Sequence[Manifest], file: str) -> None:
    """Checks that the manifests describe one model, and that the ranks of each slice together own each element once.

    Args:
        manifests: of all ranks, by rank.
        file: what the error names.

    Raises:
        CorruptionError: they do not.
    """
    ranks = len(manifests) // manifests[0].slices
    for start in range(0, len(manifests), ranks):
        of_slice = manifests[start : start + ranks]
        named = [[(param.name, param.shard_dim) for param in one.parameters] for one in (manifests[0], of_slice[0])]
        if named[0] != named[1]:
            raise CorruptionError(f"the slices of ranks 0 and {of_slice[0].rank} are of different models", file=file)
        _agree_in_slice(of_slice, file)


def _agree_in_slice(manifests: Sequence[Manifest], file: str) -> None:
    for manifest in manifests[1:]:
        require_one_model(manifests[0], manifest, file)
    for number, flat in enumerate(manifests[0].flats):
        end = 0
        for start, stop in sorted(manifest.flats[number].owned for manifest in manifests):
            if start != end:
                raise CorruptionError(f"flat parameter {number}: its ranks do not own each element once", file=file)
            end = stop
        if end != flat.numel:
            raise CorruptionError(f"flat parameter {number}: no rank owns it from element {end} on", file=file)
