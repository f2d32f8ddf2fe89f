"""Which files live in the directories of a run, and the removal of all others of ours.

[Note: names never change]
A file of a run has its final name from its birth on, with the id of the run in it, and no name is used twice. So
nothing has to be renamed, and which files count is said in one place: the COMMIT record names every file that lives,
in every directory of every rank. It lies in the first directory of rank 0, the run's home. In time:

1. Each rank takes the locks of its directories (storage/directory_lock.py).
2. A run that begins gets a new id. Its home gets a tag; when that is durable, every other directory does. A tag says
   which run has files in the directory, which directories the run has, and so where its record is, or would be.
3. Swap files are made: `swap-<run id>-<rank>`. With two slots a chunk, a commit writes into the slots that the last
   one does not name.
4. A commit syncs the swap files, then writes manifests, then, when those of all ranks are durable, COMMIT. The rename
   of COMMIT decides. A run that goes on from another one, in another layout or from a snapshot, writes its own files
   beside that one's; its first COMMIT is the switch, and says what it `replaces`.

What lives is what was read, never what was not found:

- A run lives if there is a record of it. Then those of its files live that the record names.
- A run is dead if its home was read, tag and all, and has no record of it; or if another run's record replaces it.
- Of any other run nothing is known: its home is not mounted, or on another machine. Nothing of it is removed, and a
  start in its directories is refused. A directory that looks empty is not a home, for the home has the tag.
- A record speaks of the directories that it names, and a tag outside of the directories that were given, too. So
  nothing goes in a copy of a directory that somebody put elsewhere.

`collect` removes files of dead runs, unless a process holds their lock, and those files of a live run that its record
does not name. Any rank may do so at any time, in its own directories, in any order and again: it removes what has the
run's id in name and content. Three orders matter. Where a record was replaced by one in another directory, it is
removed first, durably, and on all ranks: without it the old run is dead. The tag of a run goes after its other files,
and the tag in its home goes last, when all directories that it names were given and have nothing of the run: it tells
all the others that the run is dead.

[Note: runs of format 1]
Versions before COMMIT format 2 called swap files `offload-rank<r>.swap`, or so with `.new` at the end, and had no
tags. Such a run is read, and written anew as one of another layout. It is dead if its first file lies where no record
of it does, or if a directory has its swap file and no manifest; of any other run without a record nothing is known.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

from msgspec import Meta

from offload.checkpoint.atomic_file import failing, read_whole, sync_directory, write_file
from offload.checkpoint.commit import (
    MAX_COMMIT_BYTES,
    Commit,
    manifest_name,
    path_of,
    read_commit,
    spelled,
)
from offload.checkpoint.manifest import MAX_WORLD, Directory, Manifest, Natural, Schema, canonical, decode, digest
from offload.errors import CorruptionError, PathError, ResumeError
from offload.interrupts import is_of_system
from offload.io.files import LOCAL, Files, unusable
from offload.sizes import PAGE_BYTES
from offload.storage.directories import (
    COMMIT_NAME,
    LOCK_NAME,
    OLDER_SUFFIX,
    RECORD_START,
    TEMPORARY,
    FileName,
    file_name,
    swap_name,
    tag_name,
)
from offload.storage.room import EXTRA, MANIFEST, Room
from offload.storage.swap_file import any_is_held
from offload.storage.swap_format import MAGIC, MAX_PATHS, RunId, Superblock, parse_superblock

# Tags.


@dataclass(frozen=True)
class Tag:
    """Says that a run has files of a rank in a directory. A file of two lines, as a COMMIT record has them.

    Attributes:
        run_id: 32 hex digits.
        rank: the rank.
        stripe: which of the rank's directories it is, and of how many.
        directories: the directories of each rank; see `spelled`.
    """

    run_id: RunId
    rank: Natural
    stripe: tuple[Natural, Natural]
    directories: Annotated[
        tuple[Annotated[tuple[Directory, ...], Meta(min_length=1, max_length=MAX_PATHS)], ...],
        Meta(min_length=1, max_length=MAX_WORLD),
    ]

    @property
    def home(self) -> Path:
        """The directory of the run's record."""
        return path_of(self.directories[0][0])

    @property
    def is_home(self) -> bool:
        """Whether the record is, or would be, beside this tag."""
        return (self.rank, self.stripe[0]) == (0, 0)

    def names(self, directory: Path) -> bool:
        """Whether the run has this directory."""
        return any(spelled(directory) in those for those in self.directories)


_TAG = Schema("offload tag", 1)


def _line(tag: Tag) -> bytes:
    return canonical(
        {
            "schema": _TAG.schema,
            "version": _TAG.version,
            "run_id": tag.run_id,
            "rank": tag.rank,
            "stripe": tag.stripe,
            "directories": tag.directories,
        }
    )


def write_tag(directory: Path, tag: Tag, files: Files = LOCAL) -> None:
    """Writes a tag, durably.

    Raises:
        TierIOError: a disk or its file system failed.
    """
    path, line = directory / tag_name(tag.run_id, tag.rank), _line(tag)
    write_file(files, path, [line + digest(line).encode() + b"\n"])
    sync_directory(files, directory)


def untag(directory: Path, run_id: str, rank: int, files: Files) -> None:
    """Removes a tag if the rank has no swap file beside it."""
    with suppress(OSError, PathError):
        if swap_name(run_id, rank) not in names_in(directory, files):
            files.sync_directory(directory)  # a swap file that a power cut brings back needs its tag
            files.remove(directory / tag_name(run_id, rank))


def read_tag(path: Path, files: Files = LOCAL) -> Tag | None:
    """The tag in a file; None: there is no such file, or it holds none.

    Raises:
        PathError: the file cannot be read.
        TierIOError: a disk or its file system failed.
    """
    with suppress(CorruptionError, ResumeError):
        data = read_whole(files, path, MAX_COMMIT_BYTES)
        if data is not None:
            end = data.find(b"\n") + 1
            line, name = data[:end], str(path)
            if data[end:] != digest(line).encode() + b"\n":
                raise CorruptionError("is damaged: it does not match its checksum", file=name)
            tag = decode(line, Tag, _line, _TAG, name, MAX_COMMIT_BYTES)
            if path.name == tag_name(tag.run_id, tag.rank):
                return tag
    return None


# Swap files.


@dataclass(frozen=True)
class Swap:
    """A regular file with a swap file's name.

    Attributes:
        path: its path.
        name: what the name says.
        block: its superblock; None: it has none that this library can read.
    """

    path: Path
    name: FileName
    block: Superblock | None

    @property
    def rank(self) -> int:
        return self.name.rank

    @property
    def run_id(self) -> str | None:
        return None if self.block is None else self.block.run_id


def swaps(
    directory: Path,
    files: Files,
    ranks: Container[int] | None = None,
    run_id: str | None = None,
    kinds: Collection[str] = ("swap", "older"),
) -> Iterator[Swap]:
    """The regular files in a directory with a swap file's name; none if there is no such directory.

    The single page that keeps older versions out is no swap file.

    Args:
        directory: the directory.
        files: the file system.
        ranks: the ranks whose files are opened; None: of all.
        run_id: the run whose files are opened; None: of all.
        kinds: the kinds of names that are looked at.

    Raises:
        PathError: a file or directory cannot be read.
    """
    for name in names_in(directory, files):
        file, path = file_name(name), directory / name
        if file is None or file.kind not in kinds or not (ranks is None or file.rank in ranks):
            continue
        if run_id is not None and file.run_id not in ("", run_id):
            continue
        if file.kind == "older" and not file.suffix and _is_page(path, files):
            continue
        if (page := _page_of(path, files)) is not None:
            found = Swap(path, file, _block_of(page, path))
            if run_id is None or found.run_id == run_id:
                yield found


def _keeps_older_out(path: Path, files: Files) -> bool:
    """Whether a file is the page that keeps older versions out, or was to become it."""
    page = _page_of(path, files) if _is_page(path, files) else None
    return page is not None and (not any(page) or page.startswith(MAGIC))


def _is_page(path: Path, files: Files) -> bool:
    with suppress(OSError):
        return files.stat(path).st_size <= PAGE_BYTES
    return False


def names_in(directory: Path, files: Files) -> list[str]:
    """The names in a directory, sorted; none if there is no such directory.

    Raises:
        PathError: the directory cannot be read.
    """
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        unusable("cannot be read", directory, but=(errno.ENOENT, errno.ENOTDIR)),
    ):
        return sorted(files.names(directory))
    return []


def directories_of(run_id: str, rank: int, directories: Sequence[Path], files: Files) -> dict[int, Path]:
    """The directories that have a swap file of a rank of this run, by the number of its stripe."""
    return {
        swap.block.stripe[0]: directory
        for directory in directories
        for swap in swaps(directory, files, {rank}, run_id)
        if swap.block is not None
    }


# What lives.


class Seen(NamedTuple):
    """A run that has files in a directory.

    Attributes:
        directory: the directory.
        run_id: the run.
        home: where its record is, or would be; None: nothing here says it.
        is_dead: whether that was read, and has no record of the run.
        has_more: whether the run has directories that are not seen here: of other machines, or not mounted.
    """

    directory: Path
    run_id: str
    home: Path | None
    is_dead: bool
    has_more: bool = False


@dataclass(frozen=True)
class Live:
    """What some directories say of the runs in them. Several ranks may each see a part.

    Attributes:
        records: the COMMIT records, each with its directory.
        homes: the runs whose home is among the directories.
        seen: the runs that have files in the directories.
    """

    records: tuple[tuple[Path, Commit], ...] = ()
    homes: frozenset[str] = frozenset()
    seen: tuple[Seen, ...] = ()

    def __add__(self, other: Live) -> Live:
        return Live(self.records + other.records, self.homes | other.homes, self.seen + other.seen)

    @property
    def replaced(self) -> frozenset[str]:
        """The runs of which another run's record says that it replaces them."""
        return frozenset(record.replaces for _, record in self.records if record.replaces is not None)

    @property
    def dead(self) -> frozenset[str]:
        """The runs of which nothing lives."""
        committed = {record.run_id for _, record in self.records}
        known = {one.run_id for one in self.seen if one.is_dead} | self.homes
        return frozenset(known - committed) | self.replaced

    @property
    def unknown(self) -> list[Seen]:
        """The runs whose record was not read, by directory."""
        known = self.dead | {record.run_id for _, record in self.records}
        return [one for one in self.seen if one.run_id not in known]


def live(directories: Sequence[Path], files: Files) -> Live:
    """What these directories say of the runs in them.

    Raises:
        CorruptionError: a record is damaged.
        ResumeError: a newer version of this library wrote a record.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
    """
    found = Live()
    for directory in directories:
        record = read_commit(directory, files)
        found += Live(() if record is None else ((directory, record),))
        found += _tagged(directory, files) + _older(directory, record, files)
    return found


def _tagged(directory: Path, files: Files) -> Live:
    """The runs in a directory whose files have the run's id in their names."""
    known = [file for file in map(file_name, names_in(directory, files)) if file is not None]
    found = {file.run_id: [one for one in known if one.run_id == file.run_id] for file in known if file.kind == "tag"}
    found |= {file.run_id: [] for file in known if file.kind == "swap" and file.run_id not in found}
    homes, seen = set(), []
    for run_id, those in found.items():
        tag, ranks = None, [file.rank for file in those if file.kind == "tag" and not file.suffix]
        if ranks:
            tag = read_tag(directory / tag_name(run_id, min(ranks)), files)
        if tag is not None and tag.is_home:
            homes.add(run_id)
        # Where there is nothing but a tag, or half of one, nothing was begun.
        is_dead = bool(those) and all(file.kind in ("tag", "room") for file in those)
        is_dead |= tag is not None and not tag.is_home and tag.names(directory) and _is_dead_in(tag, files)
        has_more = tag is not None and lies_elsewhere(run_id, tag.directories, files)
        seen.append(Seen(directory, run_id, None if tag is None else tag.home, is_dead, has_more))
    return Live((), frozenset(homes), tuple(seen))


def lies_elsewhere(run_id: str, directories: Sequence[Sequence[str]], files: Files) -> bool:
    """Whether some directories of a run are not seen here.

    Args:
        run_id: the run.
        directories: those of each rank; see `spelled`.
        files: the file system.
    """
    with suppress(PathError):
        there = {place: {*names_in(path_of(place), files)} for places in directories for place in places}
        return any(
            tag_name(run_id, rank) not in there[place] for rank, places in enumerate(directories) for place in places
        )
    return True


def removal(directory: Path, *, has_more: bool) -> str:
    """How to get rid of a run, in words. Removing a part of it makes the others useless.

    Args:
        directory: one of the run.
        has_more: whether the run has directories that are not seen here.
    """
    if has_more:
        return "remove all of it, on the machines that have its other directories, too"
    return f"remove it with `offload remove {directory}`"


def _is_dead_in(tag: Tag, files: Files) -> bool:
    """Whether the home of a run, which may not be among the directories that were given, has no record of it."""
    with suppress(PathError, CorruptionError, ResumeError):
        there = read_tag(tag.home / tag_name(tag.run_id, 0), files)
        if there is not None and there.is_home:
            record = read_commit(tag.home, files)
            return record is None or record.run_id != tag.run_id
    return False


def _older(directory: Path, record: Commit | None, files: Files) -> Live:
    """The runs of older versions; see [Note: runs of format 1]."""
    blocks = [(swap.rank, swap.block) for swap in swaps(directory, files, kinds=["older"]) if swap.block is not None]
    homes = {block.run_id for rank, block in blocks if (rank, block.stripe[0]) == (0, 0)}
    named = {file.run_id for file in map(file_name, names_in(directory, files)) if file and file.kind == "manifest"}
    named |= set() if record is None else {record.run_id}
    runs = dict.fromkeys(block.run_id for _, block in blocks)
    return Live((), frozenset(homes), tuple(Seen(directory, run, None, run not in named) for run in runs))


def merge(looks: Sequence[Live]) -> Live:
    """What ranks see together. A record that several see, in a shared directory, counts once.

    Args:
        looks: what each rank sees, by rank.
    """
    found = Live()
    for rank, one in enumerate(looks):
        known = {commit for _, commit in found.records}
        names = {directory for directory, _ in found.records}
        # Where machines have disks of their own, other directories have the same name there.
        new = [
            (Path(f"{directory} (of rank {rank})") if directory in names else directory, commit)
            for directory, commit in one.records
            if commit not in known
        ]
        found += replace(one, records=tuple(new))
    return found


def last_of(found: Live, directories: Sequence[Path]) -> tuple[Path, Commit] | None:
    """The last commit, with the directory of its record; None if there is none.

    Args:
        found: what the directories say.
        directories: the directories that were looked at, for the errors.

    Raises:
        ResumeError: a directory is of a run whose record was not read, or they hold commits of several runs.
    """
    if not found.records:
        for seen in found.unknown:
            raise unread(seen, directories)
        return None
    last = [one for one in found.records if one[1].run_id not in found.replaced]
    if len(last) != 1:
        raise ResumeError(
            f"{listed([directory for directory, _ in found.records])} hold commits of several runs, or snapshots: name "
            "the directories of one"
        )
    return last[0]


def unread(seen: Seen, directories: Sequence[Path]) -> ResumeError:
    """The error of a directory with files of a run whose record was not read.

    Args:
        seen: the run in the directory.
        directories: where its record was looked for.
    """
    # Nor where other machines have parts of it.
    remove = (
        ""
        if seen.has_more
        else (f"; or, if nothing of it is needed, remove this part of it with `offload remove {seen.directory}`")
    )
    there = "" if seen.home is None or seen.home in directories else f", but in {seen.home}"
    return ResumeError(
        f"{seen.directory} belongs to a run whose COMMIT record is not in {listed(directories)}{there}: give all the "
        f"directories of that run, and mount those that are missing{remove}. Nothing was removed"
    )


# What does not live.


def garbage(
    directory: Path, record: Commit | None, dead: Container[str], files: Files, *, rank: int | None = None
) -> list[str]:
    """The names of the files in a directory that do not live, but for the tag in the home of a dead run.

    Args:
        directory: the directory.
        record: the record of the run that lives there.
        dead: the runs that are dead. One of which a process holds a file here is left out.
        files: the file system.
        rank: whose files of the run that lives are looked at, while other ranks may be a commit ahead; None: of all.

    Raises:
        PathError: a file or directory cannot be read.
    """
    names = names_in(directory, files)
    found = [name for name in names if rank is None and _is_left(directory / name, files)]
    for name in names:
        file = file_name(name)
        if file is None:
            continue
        if file.kind == "older":
            if rank is None and _is_older_garbage(directory / name, file, dead, files):
                found.append(name)
        elif record is not None and file.run_id == record.run_id:
            is_own = rank in (None, file.rank) and file.kind != "room"
            if is_own and record.supersedes(name, file.rank, directory):
                found.append(name)
        elif rank is None and file.run_id in dead and _is_ours(directory / name, file, files):
            found.append(name)
    return found


def _is_ours(path: Path, file: FileName, files: Files) -> bool:
    """Whether a file of a dead run is what its name says, and nothing that the home of the run still needs."""
    if file.kind == "swap":
        page = _page_of(path, files)
        block = None if page is None else _block_of(page, path)
        # One that was cut off before it had a superblock has no more than a page, of zeros.
        is_blank = page is not None and not any(page) and _is_page(path, files)
        return is_blank or (block is not None and block.run_id == file.run_id)
    if file.kind == "tag" and not file.suffix:
        tag = read_tag(path, files)
        return tag is not None and not tag.is_home
    return True


def _is_older_garbage(path: Path, file: FileName, dead: Container[str], files: Files) -> bool:
    page = _page_of(path, files)
    block = None if page is None else _block_of(page, path)
    if page is None or (block is None and any(page)) or any_is_held(path.parent, [path.name], files):
        return False
    is_page = _is_page(path, files)
    return bool(file.suffix) and is_page if block is None else not is_page and block.run_id in dead


def _is_left(path: Path, files: Files) -> bool:
    """Whether a file was to become a COMMIT record.

    An older version called such a file COMMIT.new. Others may have files of that name, so its content decides.
    """
    if path.name != COMMIT_NAME + OLDER_SUFFIX:
        return path.name == COMMIT_NAME + TEMPORARY
    return _is_record(path, files)


def _is_record(path: Path, files: Files) -> bool:
    """Whether a file holds a record, or the beginning of one."""
    with suppress(OSError):
        return (files.read(path, len(RECORD_START)) + RECORD_START).startswith(RECORD_START)
    return False


def collect(
    directory: Path,
    record: Commit | None,
    dead: Collection[str],
    files: Files,
    *,
    rank: int | None = None,
    held: Container[str] = (),
) -> set[str]:
    """Removes, durably, what `garbage` finds. What a commit of the run that lives wrote becomes room for the next one.

    Args:
        directory: the directory.
        record: the record of the run that lives there.
        dead: the runs that are dead.
        files: the file system.
        rank: see `garbage`.
        held: the dead runs whose files this process holds itself.

    Returns:
        The dead runs of which a process holds a file here, and nothing was removed.

    Raises:
        PathError: a file or directory cannot be read.
        TierIOError: a disk or its file system failed.
    """
    names = [] if rank is not None else names_in(directory, files)
    live = {run for run in dead if run not in held and _is_held(directory, run, names, files)}
    found = garbage(directory, record, {*dead} - live, files, rank=rank)
    tags = [name for name in found if name.startswith("tag-")]
    for those in ([name for name in found if name not in tags], tags):
        for name in those:
            with failing("remove", directory / name):
                if not _is_kept(directory / name, record, files):
                    files.remove(directory / name)
        if those and rank is None:
            sync_directory(files, directory)
    return live


def _is_kept(path: Path, record: Commit | None, files: Files) -> bool:
    """Whether a file that does not live became room for the next commit."""
    file = file_name(path.name)
    if file is None or record is None or file.run_id != record.run_id or file.suffix:
        return False
    with suppress(FileNotFoundError):  # where ranks share a directory another one may have done so
        return file.kind in (MANIFEST, EXTRA) and Room(path.parent, file.run_id, file.rank, files).keep(path, file.kind)
    return False


def _is_held(directory: Path, run_id: str, names: Sequence[str], files: Files) -> bool:
    own = [name for name in names if (file := file_name(name)) and (file.kind, file.run_id) == ("swap", run_id)]
    return any_is_held(directory, own, files)


def withdraw(directory: Path, replaced: Container[str | None], files: Files) -> None:
    """Removes, durably, the record in a directory if it was replaced by one in another directory.

    Raises:
        OffloadError: what `read_commit` raises.
    """
    record = read_commit(directory, files)
    if record is not None and record.run_id in replaced:
        with failing("remove", directory / COMMIT_NAME):
            files.remove(directory / COMMIT_NAME)
        sync_directory(files, directory)


def collect_homes(directory: Path, dead: Collection[str], given: Container[str], files: Files) -> None:
    """Removes the tag in the home of each dead run whose directories were all cleared.

    Args:
        directory: the directory.
        dead: the runs that are dead.
        given: the directories that were cleared, of all ranks; see `spelled`.
        files: the file system.

    Raises:
        PathError: a file or directory cannot be read.
        TierIOError: a disk or its file system failed.
    """
    names = names_in(directory, files)
    for run_id in dead:
        name = tag_name(run_id, 0)
        is_alone = not any(name != other and (file := file_name(other)) and file.run_id == run_id for other in names)
        tag = read_tag(directory / name, files) if name in names and is_alone else None
        if tag is not None and tag.is_home and all(place in given for places in tag.directories for place in places):
            with failing("remove", directory / name):
                files.remove(directory / name)
            sync_directory(files, directory)


def _page_of(path: Path, files: Files) -> bytes | None:
    """The first page of a regular file; None if it is something else, or gone.

    Raises:
        PathError: the file cannot be read.
    """
    try:
        return files.read(path, PAGE_BYTES)[:PAGE_BYTES]
    except OSError as error:
        # A run that ends removes what is beside its files. EINVAL: no regular file, as `Files.read` says.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO):
            return None
        if not is_of_system(error):
            raise
        raise PathError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _block_of(page: bytes, path: Path) -> Superblock | None:
    try:
        return parse_superblock(page, str(path))
    except (CorruptionError, ResumeError):
        return None


def leave(directory: Path, files: Files) -> None:
    """Removes the lock and the files that keep older versions out, if there is nothing else of ours in a directory."""
    with suppress(OSError, PathError):
        names = names_in(directory, files)
        known = [(name, file.kind) for name in names if (file := file_name(name)) is not None]
        pages = [name for name, kind in known if kind == "older" and _keeps_older_out(directory / name, files)]
        record = directory / COMMIT_NAME
        is_committed = COMMIT_NAME in names and _is_record(record, files) and files.stat(record).st_size > 0
        has_more = is_committed or any(kind in ("swap", "tag") for _, kind in known)
        if not has_more and not any_is_held(directory, pages, files):
            if any(kind != "older" for _, kind in known):  # of an older run such a page may be the swap file
                pages = []
            for name in [*pages, LOCK_NAME]:
                files.remove(directory / name)


def listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths) or "no directory"


ON_OTHER_MACHINES = (
    "if disks of other machines have them, start on these machines, too, with as many ranks as committed, or with "
    "resume_transfer=True; or copy all directories to a file system that every rank sees, or to one machine for "
    "`offload export`"
)
"""What to do if a rank sees only a part of a run."""


def manifests_in(directories: Sequence[Path], commit: Commit, files: Files) -> dict[int, Path]:
    """For each rank whose manifest is there, the first of `directories` with a file of that name.

    Raises:
        PathError: a directory cannot be read.
    """
    named = {manifest_name(commit, rank): rank for rank in range(len(commit.manifests))}
    return {
        named[name]: directory
        for directory in reversed(directories)
        for name in names_in(directory, files)
        if name in named
    }


def ranks_in(directories: Sequence[Path], commit: Commit, files: Files, ranks: Container[int]) -> set[int]:
    """Those of `ranks` that have a swap file of the run of `commit` in `directories`.

    Raises:
        PathError: a file or directory cannot be read.
    """
    return {swap.rank for directory in directories for swap in swaps(directory, files, ranks, commit.run_id)}


class OtherStep(NamedTuple):
    """A manifest of another commit of a run, in a directory that lacks the one that the record names.

    Attributes:
        step: the step that it commits.
        where: the directory, and the machine where there are several.
    """

    step: int
    where: str


def other_steps(directories: Sequence[Path], commit: Commit, files: Files) -> dict[int, OtherStep]:
    """For each rank with manifests of other commits of the run, the last of them.

    Raises:
        PathError: a directory cannot be read.
    """
    found: dict[int, OtherStep] = {}
    for directory in directories:
        for name in names_in(directory, files):
            said = file_name(name)
            if said is None or (said.kind, said.run_id, said.suffix) != ("manifest", commit.run_id, ""):
                continue
            if said.step != commit.step and (said.rank not in found or said.step > found[said.rank].step):
                found[said.rank] = OtherStep(said.step, str(directory))
    return found


def refuse_step(rank: int, found: OtherStep, commit: Commit, home: Path) -> NoReturn:
    """Refuses the files of a rank that are of another step than the record.

    Raises:
        ResumeError: always.
    """
    older, newer = f"{found.where} (rank {rank})", f"{home} (the record)"
    if found.step > commit.step:
        older, newer = newer, older
    raise ResumeError(
        f"{found.where} has step {found.step} of rank {rank}, and the record in {home} is of step {commit.step}: "
        f"{older} is older, a copy from before or an exchanged disk. Bring back what belongs to {newer}, or resume "
        "from a snapshot"
    )


def require_manifests(
    commit: Commit,
    found: Collection[int],
    lying: Collection[int],
    others: Mapping[int, OtherStep],
    directories: Sequence[Path],
    home: Path,
    machines: Sequence[str] = (),
) -> None:
    """Checks that the manifests of all ranks were found.

    Args:
        commit: the record.
        found: the ranks whose manifest was found.
        lying: the ranks of which a swap file was found.
        others: the ranks of which a manifest of another commit was found.
        directories: where all this was looked for.
        home: the directory of the record.
        machines: the names of those on which it was looked for, if there are several ranks.

    Raises:
        CorruptionError: a manifest is gone, and the swap files are there.
        ResumeError: directories are missing, or older than the record, or the record is older.
    """
    ranks = range(len(commit.manifests))
    for rank in ranks:
        if rank not in found and rank in others:
            refuse_step(rank, others[rank], commit, home)
    if gone := [rank for rank in ranks if rank not in found and rank in lying]:
        name = manifest_name(commit, gone[0])
        raise CorruptionError(
            "is missing: name all directories of the run, or was it moved or removed?", file=str(home / name)
        )
    if missing := [rank for rank in ranks if rank not in found]:
        raise ResumeError(
            f"nothing of {ranks_named(missing)} of the {len(ranks)} that committed step {commit.step} lies in "
            f"{listed(directories)}{machines_named(machines)}{where_they_were(commit, missing)}: name all directories "
            f"of the run; {ON_OTHER_MACHINES}"
        )


def where_they_were(commit: Commit, ranks: Sequence[int]) -> str:
    """The directories of ranks that committed, as the machines that had them called these."""
    named = dict.fromkeys(place for rank in ranks[:4] for place in commit.directories_of(rank))
    return f" (it was in {listed([*named])}, as its machine calls it)" if named else ""


def machines_named(names: Sequence[str]) -> str:
    return f" on {', '.join(dict.fromkeys(names))}" if names else ""


def ranks_named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def hidden_ranks(
    directories: Sequence[Path], manifests: Sequence[Manifest], files: Files, ranks: Container[int]
) -> frozenset[int]:
    """Those of `ranks` that have a swap file with committed slots in none of `directories`.

    Raises:
        PathError: a file or directory cannot be read.
    """
    found = (swap for directory in directories for swap in swaps(directory, files, ranks, manifests[0].run_id))
    seen = {(swap.rank, swap.block.stripe[0]) for swap in found if swap.block is not None}
    return frozenset(
        rank
        for rank, manifest in enumerate(manifests)
        if rank in ranks and any((rank, slot.path) not in seen for slot in manifest.slots)
    )
