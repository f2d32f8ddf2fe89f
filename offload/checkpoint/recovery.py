"""What a run finds in its directories before it begins, and what that means: the commit it resumes from, if any.

[Note: disks of machines]
A directory is known by what lies in it, never by its name: `/scratch/run` is another one on every machine with disks of
its own, and the same on all where it is a shared file system. So each rank looks for records in the directories that
were given to itself, and tells what it sees; every directory of a run was given to some rank, and all ranks decide on
the same facts. The record names the manifests by digest; a rank that does not see one gets it from a rank that does. A
manifest names slots by checksum, and these are looked for wherever a name leads: what has the run's id and the checksum
is the slot. Only a rank to which a directory was given changes what is in it, one rank after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.checkpoint.commit import Commit, manifest_told, parse_commit, read_commit, serialise_commit
from offload.checkpoint.extra import Carried, carried_in
from offload.checkpoint.manifest import (
    Manifest,
    Option,
    committed_slots,
    differences,
    flats_of,
    parameters_of,
    require_room,
    serialise,
)
from offload.checkpoint.reader import Reader
from offload.checkpoint.reshard import moves
from offload.checkpoint.scan import (
    ON_OTHER_MACHINES,
    ScanResult,
    clean_up,
    directories_of,
    foreign,
    hidden_ranks,
    holds_record,
    is_clean,
    last_of,
    listed,
    ranks_in,
    ranks_named,
    read_manifests,
    require_free,
    require_manifests,
    require_no_other,
    scan,
    swaps,
    together,
)
from offload.config import Config
from offload.dist.agreement import agree_on_error, all_gather_object
from offload.dist.communicator import Communicator
from offload.errors import CorruptionError, OffloadError, PathError, ResumeError
from offload.layout import Layout
from offload.model.flat_param import is_dense
from offload.storage.files import LOCAL, Directories, Files, check_directory, swap_name
from offload.storage.swap_file import new_run_id


class RunDirectories(NamedTuple):
    """Directories of all ranks, as their names are understood here.

    own: this rank's; others: other ranks'; named: in `resume`, and in nobody's `path`; origins: in this one's `resume`.
    """

    own: tuple[Path, ...]
    others: tuple[Path, ...]
    named: tuple[Path, ...]
    origins: tuple[Path, ...]

    @property
    def runs(self) -> tuple[Path, ...]:
        """In which a run goes on."""
        return self.own + self.others


class Scans(NamedTuple):
    """What all ranks see. runs: in the directories in which the run goes on; named: in those that `resume` names."""

    runs: ScanResult
    named: ScanResult


def meet(config: Config, comm: Communicator) -> tuple[RunDirectories, bytes]:
    """What ranks have to know of each other before they look for a commit: all directories, and the id of a new run.

    Returns: also 16 bytes, of rank 0. Raises: RankError.
    """
    own = [[str(path.absolute()) for path in paths] for paths in (config.paths, config.origins)]
    told = [json.loads(data) for data in all_gather_object(comm, json.dumps([new_run_id().hex(), *own]).encode())]
    known = {os.path.realpath(path) for path in config.paths}
    found: list[tuple[Path, ...]] = []
    for which in (1, 2):
        new = dict.fromkeys(path for one in told for path in one[which] if os.path.realpath(path) not in known)
        known |= {os.path.realpath(path) for path in new}
        found.append(tuple(map(Path, new)))
    others, named = found
    return RunDirectories(config.paths, others, named, config.origins), bytes.fromhex(told[0][0])


def scan_together(places: RunDirectories, comm: Communicator, files: Files) -> Scans:
    """Every rank looks in its own directories. Raises: as `scan`; ConfigError where nothing was wrong; RankError."""
    with agree_on_error(comm):
        own = [scan(places.own, files), scan(places.origins, files)]
    told = [json.loads(data) for data in all_gather_object(comm, json.dumps([_scan_json(one) for one in own]).encode())]
    runs, named = (together([_scan_from(one[which]) for one in told]) for which in (0, 1))
    # What one rank names in `resume` may be in another one's `path`.
    known = {commit for _, commit in runs.records}
    return Scans(runs, replace(named, records=tuple(at for at in named.records if at[1] not in known)))


def _scan_json(scanned: ScanResult) -> dict[str, Any]:
    return {
        "records": [(str(place.absolute()), serialise_commit(commit).decode()) for place, commit in scanned.records],
        "begun": [*scanned.begun],
        "held": [(str(place.absolute()), [*runs]) for place, runs in scanned.held],
    }


def _scan_from(told: dict[str, Any]) -> ScanResult:
    return ScanResult(
        tuple((Path(place), parse_commit(line.encode())) for place, line in told["records"]),
        frozenset(told["begun"]),
        tuple((Path(place), frozenset(runs)) for place, runs in told["held"]),
    )


def manifests_of_all(
    places: Sequence[Path], home: Path, commit: Commit, comm: Communicator, files: Files
) -> tuple[Manifest, ...]:
    """The manifests of `commit`, by rank: those in `places`, and from other ranks those that only they see.

    Raises: CorruptionError, ResumeError (some are nowhere), PathError, TierIOError; ConfigError, RankError.
    """
    count = len(commit.manifests)
    with agree_on_error(comm):
        found = read_manifests(places, commit, files)
        lying = ranks_in(places, commit, files, set(range(count)) - found.keys())
    flags = [[number in those for number in range(count)] for those in (found, lying)]
    told = comm.all_gather(torch.tensor(flags, dtype=torch.uint8, device="cpu").flatten()).view(comm.size, 2, count)
    anybody = [{number for number in range(count) if told[:, which, number].any()} for which in (0, 1)]
    require_manifests(commit, anybody[0], anybody[1], places, home)
    has = told[:, 0]
    if not has.all():
        # The first rank that sees one sends it, if one does not.
        mine = [number for number in found if has[:, number].tolist().index(1) == comm.rank]
        sent = {number: serialise(found[number]).decode() for number in mine if not has[:, number].all()}
        told_of = all_gather_object(comm, json.dumps(sent).encode())
        with agree_on_error(comm):  # the others would wait for a rank that has given up
            for data in told_of:
                for number, text in json.loads(data).items():
                    if int(number) not in found:
                        found[int(number)] = manifest_told(text.encode(), commit, int(number))
    return tuple(found[number] for number in range(count))


def in_turns(
    comm: Communicator, left: Callable[[], int], work: Callable[[], None], elsewhere: OffloadError | None = None
) -> None:
    """Lets every rank do what there is to do in its own directories, one after the other, for they may be shared.

    Args: left: how pressing it is for this rank to go next, 0: nothing is left to do; asked after every turn, for the
    rank whose turn it was may have done it; elsewhere: see `agree_on_error`.
    Raises: what they raise, `elsewhere` (None: ConfigError) on the other ranks; RankError.
    """
    is_done = False
    while True:
        with agree_on_error(comm, elsewhere):
            own = 0 if is_done else left()
        pressing = comm.all_gather(torch.tensor([own], dtype=torch.uint8, device="cpu")).flatten().tolist()
        if not any(pressing):
            return
        with agree_on_error(comm, elsewhere):
            if pressing.index(max(pressing)) == comm.rank:
                is_done = True
                work()


FILES: Files = LOCAL
"""Where commits are written; the tests have one that loses power."""
SHOWN = 5
"""Differences that an error lists."""


class Resumed(NamedTuple):
    """What a run was resumed from: the step, and what was given to `commit` along with it."""

    step: int
    extra: object


class Target(NamedTuple):
    """The commit to resume.

    last: the directory of its record, and the commit; is_elsewhere: it is a snapshot that lies elsewhere, which stays
    what it is; here: what is committed in this run's directories, None: nothing; places: where the commit's files may
    be; owned: of the directories in which the files of no other run stay, those that were given to this rank.
    """

    last: tuple[Path, Commit]
    is_elsewhere: bool
    here: Commit | None
    places: tuple[Path, ...]
    owned: tuple[Path, ...]


class Records(NamedTuple):
    """The records in the directories that were given to this rank, but for those of runs that were replaced."""

    places: tuple[Path, ...]
    replaced: frozenset[str | None]
    found: tuple[tuple[Path, Commit], ...]


@dataclass(frozen=True)
class RecoveryPlan:
    """How a run resumes from a commit that fits the model.

    reader: of the commit; paths: this run's directories, in the order of its swap files; manifest: this rank's, if its
    slots are used where they lie; None: the layout is another one, and `reader` reads what this rank needs; records: as
    they were before anything was locked; held: the directories that are open; extra: what was committed along, for this
    rank; without: ranks whose slots this one neither needs nor sees.
    """

    reader: Reader
    paths: tuple[Path, ...]
    manifest: Manifest | None
    target: Target
    records: Records
    held: Directories
    extra: Carried = field(default_factory=Carried)
    without: frozenset[int] = frozenset()

    @property
    def commit(self) -> Commit:
        return self.reader.commit

    @property
    def files(self) -> Files:
        return FILES.within(self.held)

    @property
    def slots(self) -> tuple[bytes, list[int]] | None:
        """Run id, and the path of each committed slot, as `Stripes` takes them; None: files of its own are made."""
        if self.manifest is None:
            return None
        return bytes.fromhex(self.commit.run_id), [slot.path for slot in self.manifest.slots]

    @property
    def buffer_bytes(self) -> int:
        """Of the RAM in which slots are read that do not lie where they are used."""
        return 0 if self.manifest is not None else self.reader.slots_bytes()

    def clear_up(self, comm: Communicator) -> None:
        """After a run that was cut off, before any rank locks what is to be read.

        Raises: PathInUseError (a live run), PathError, TierIOError, ResumeError (another run has just committed);
        on ranks where nothing was wrong ConfigError; RankError.
        """
        commit = self.target.here or self.commit

        def left() -> int:
            return self._left(commit) or int(bool(foreign(self.paths, self.commit, self.files)))

        def work() -> None:
            require_free(self.paths, self.commit, self.files)
            self.require_last()
            clean_up(self.target.owned, commit, self.files, locked=False)

        in_turns(comm, left, work)

    def finish(self, commit: Commit, comm: Communicator, elsewhere: OffloadError) -> None:
        """Makes the files those of `commit` alone, when it is durable and this run holds them. Raises: TierIOError."""

        def work() -> None:
            clean_up(self.target.owned, commit, self.files, locked=True)

        in_turns(comm, lambda: self._left(commit), work, elsewhere)

    def _left(self, commit: Commit) -> int:
        """What there is to clean_up: a record that was replaced goes first of all, on whatever rank."""
        if holds_record(self.target.owned, commit.replaces, self.files):
            return 2
        return int(not is_clean(self.target.owned, commit, self.files))

    def lock(self, *, alone: bool) -> None:
        """Locks what is to be read, and replaced; `require_last` when all is locked, also what is used where it lies.

        Args: alone: no other rank reads it. Raises: as `clear_up`.
        """
        if self.manifest is not None:
            self._require_whole(self.manifest)
        else:
            self.reader.swap_files.lock(exclusive=alone and not self.target.is_elsewhere, without=self.without)
            if self.target.is_elsewhere:
                found = (swap for place in self.target.owned for swap in swaps(place, self.files))
                replaced = [swap.path for swap in found if swap.run_id == self.commit.run_id]
                self.reader.swap_files.hold(replaced, exclusive=alone)

    def _require_whole(self, manifest: Manifest) -> None:
        """Whether this rank's swap files hold all committed slots, before they get a run's size. Changes nothing.

        Raises: CorruptionError, PathError.
        """
        sizes: dict[Path, int] = {}
        for slot in committed_slots(manifest):
            path = self.paths[slot.path] / swap_name(manifest.rank)
            if path not in sizes:
                try:
                    with open(self.files.open(path, os.O_RDONLY), "rb", buffering=0) as file:
                        sizes[path] = os.fstat(file.fileno()).st_size
                except OSError as error:
                    raise PathError(error.errno, f"cannot be opened: {error.strerror}", str(path)) from error
            if sizes[path] < slot.offset + slot.size:
                raise CorruptionError(
                    f"the file ends before this slot of {slot.size} bytes does",
                    chunk=slot.chunk,
                    file=str(path),
                    offset=slot.offset,
                )

    def require_last(self) -> None:
        """It was read before any lock was taken. Raises: ResumeError."""
        if _records_in(self.records.places, self.files, self.records.replaced) != self.records.found:
            raise _just_committed(self.reader.home)


def describe(
    config: Config, layout: Layout, params: Sequence[nn.Parameter], groups: Sequence[Mapping[str, Option]]
) -> Manifest:
    """The manifest of this run as far as it is known before it begins: no chunks, of groups what must not change.

    Raises: ConfigError if there are more chunks than a manifest can name.
    """
    shapes = [tuple(param.shape) for param in params]
    # What has holes gets memory of its own, row-major.
    strides = [(p if is_dense(p) else torch.empty(p.shape, device="meta")).stride() for p in params]
    manifest = Manifest(
        run_id="0" * 32,
        step=0,
        rank=layout.rank,
        world=layout.ranks,
        paths=max(len(config.paths), 1),
        places=config.slots_per_chunk,
        compute_dtype=str(config.compute_dtype).removeprefix("torch."),
        split_master=config.split_master,
        groups=tuple(dict(group) for group in groups),
        parameters=parameters_of(layout, shapes, strides, [0] * len(params)),
        flats=flats_of(layout, [layout.shard_range(flat.index) for flat in layout.flats]),
        chunks=(),
    )
    if config.commit_every is not None:
        require_room(manifest, len(layout.chunks) * (2 if config.commits_parameters else 1))
    return manifest


class Start(NamedTuple):
    """What a run begins with.

    config: with the directories in the order of their files; found: the commit that all ranks resume, locked as far as
    it is only read, None: the run begins anew; run_id: 16 bytes, of a new run; held: this rank's directories, as far as
    they are there.
    """

    config: Config
    found: RecoveryPlan | None
    run_id: bytes
    held: Directories


def find_together(undo: ExitStack, config: Config, comm: Communicator, layout: Layout, wanted: Manifest) -> Start:
    """Looks for the commit to resume. See [Note: disks of machines] above.

    Args: wanted: from `describe`; undo: gets the closing of what is opened.
    Raises: ResumeError (there is a commit and nobody asked for it, or none; it is of another model; a rank does not see
    what it needs of it), CorruptionError, PathError, TierIOError, PathInUseError, before anything is changed but
    leftovers; on ranks where nothing was wrong ConfigError; RankError.
    """
    places, run_id = meet(config, comm)
    own = places.own + places.origins
    held = Directories()
    undo.callback(held.close)
    with agree_on_error(comm):
        for path in config.paths:
            check_directory(path, resumes=bool(config.resume))
        for path in own:
            if path.is_dir():
                held.hold(path)
        files = FILES.within(held)
        before = _records_in(own, files) if config.resume else ()
    if not config.resume:
        return Start(config, None, run_id, held)
    seen = scan_together(places, comm, files)
    with agree_on_error(comm):
        target = _target_of(seen, places)
    if target is None:
        if config.resume == "auto":
            return Start(config, None, run_id, held)
        where = listed(places.runs + places.named)
        raise ResumeError(f'{where}: no commit to resume from: give resume="auto" to begin anew where none is')
    try:
        manifests = manifests_of_all(target.places, *target.last, comm, files)
    except (CorruptionError, ResumeError) as error:
        # A live run clears away what its next commit has replaced.
        if _records_in(own, files) != before:
            raise _just_committed(target.last[0]) from error
        raise
    with agree_on_error(comm):
        found = _find(config, places, seen, target, manifests, layout, wanted, held)
    # Used where it lies by all ranks, or by none.
    if comm.all_reduce_any(found.manifest is None):
        found = replace(found, manifest=None)
    undo.callback(found.reader.close)
    with agree_on_error(comm):
        found = _reach(found, layout, wanted)
    found.clear_up(comm)
    with agree_on_error(comm):
        found.lock(alone=comm.size == 1)
    return Start(replace(config, paths=found.paths), found, run_id, held)


def _target_of(seen: Scans, places: RunDirectories) -> Target | None:
    """The commit to resume; None for a run that begins anew.

    A snapshot that `resume` names comes before what its run committed later, and stays what it is.
    Raises: ResumeError if another run is committed where it is to go on; as `last_of`.
    """
    kept = next(((place, record) for place, record in seen.named.records if record.is_snapshot), None)
    if kept is None:
        everywhere = places.runs + places.named
        last = last_of(seen.runs + seen.named, everywhere)
        return None if last is None else Target(last, False, last[1], everywhere, places.own + places.origins)
    here = last_of(seen.runs, places.runs)
    if here is None or (here[1].run_id == kept[1].run_id and not here[1].is_snapshot):
        last = last_of(seen.named, places.named)
        assert last is not None
        return Target(last, True, None if here is None else here[1], places.named, places.own)
    if here[1].replaces == kept[1].run_id:  # it has begun from there, and was cut off
        return Target(here, False, here[1], places.runs, places.own)
    raise ResumeError(
        f"{here[0]} holds a commit, of step {here[1].step}, that is not of the run of which {kept[0]} is a snapshot: "
        f"give resume=True to continue it, choose another path, or remove it with `offload remove {here[0]}`"
    )


def _find(
    config: Config,
    places: RunDirectories,
    seen: Scans,
    target: Target,
    manifests: tuple[Manifest, ...],
    layout: Layout,
    wanted: Manifest,
    held: Directories,
) -> RecoveryPlan:
    """What is target, if it is of this model. Writes nothing, and locks nothing.

    Raises: ResumeError (it is of another model), CorruptionError, PathError, TierIOError.
    """
    home, commit = target.last
    files = FILES.within(held)
    reader = Reader(target.places, files, (home, commit, manifests))
    found = differences(manifests[0], wanted)
    if found:
        more = f"\n... and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
        raise ResumeError(f"{home} holds a commit of something else:\n" + "\n".join(found[:SHOWN]) + more)
    require_no_other(config.paths, commit, files)
    replaced = frozenset(record.replaces for _, record in seen.runs.records + seen.named.records)
    scanned = places.own + places.origins
    records = _records_in(scanned, files, replaced)
    paths = None if target.is_elsewhere else _directories_in_order(config, layout, wanted, reader, files)
    manifest = None if paths is None else manifests[wanted.rank]
    if paths is None:
        # The record stays where it is, if it can: then replacing it is one rename.
        homes = {place for place, record in records if record == target.here}
        paths = tuple(sorted(config.paths, key=lambda path: path not in homes))
    return RecoveryPlan(reader, paths, manifest, target, Records(scanned, replaced, records), held)


def _just_committed(place: Path) -> ResumeError:
    return ResumeError(f"{place}: another run has just committed here: try again")


def _records_in(
    places: Sequence[Path], files: Files, replaced: frozenset[str | None] = frozenset()
) -> tuple[tuple[Path, Commit], ...]:
    """The records in `places`, but for those of runs that were replaced."""
    records = ((place, read_commit(place, files)) for place in places)
    return tuple((place, one) for place, one in records if one is not None and one.run_id not in replaced)


def _reach(found: RecoveryPlan, layout: Layout, wanted: Manifest) -> RecoveryPlan:
    """With all that this rank needs of the commit. Changes nothing.

    Raises: ResumeError if a part of it lies where this rank does not see it; CorruptionError, PathError, TierIOError.
    """
    reader = found.reader
    extra = wanted.rank if len(reader.manifests) == wanted.world else 0
    alone = wanted.world == len(reader.manifests) == 1
    if found.manifest is None and not alone and (hidden := hidden_ranks(reader.paths, reader.manifests, found.files)):
        needed = {rank for rank, _ in moves(reader.manifests, layout)}
        if reader.manifests[extra].tensors is not None:
            needed.add(extra)
        if those := needed & hidden:
            raise ResumeError(
                f"rank {wanted.rank} needs slots of {ranks_named(those)} of the {len(reader.manifests)} that committed "
                f"step {found.commit.step}, and does not see all their swap files in {listed(reader.paths)}: "
                f"{ON_OTHER_MACHINES}"
            )
        found = replace(found, without=hidden)
    carried = carried_in(reader.extra(extra))
    if len(reader.manifests) != wanted.world:
        carried = carried.for_other_ranks()
    return replace(found, extra=carried)


def _directories_in_order(
    config: Config, layout: Layout, wanted: Manifest, reader: Reader, files: Files
) -> tuple[Path, ...] | None:
    """The directories by the number of the file in them, if the slots can be used where they lie; None if not."""
    if config.commit_every is None or len(reader.manifests) != wanted.world:
        return None
    manifest = reader.manifests[wanted.rank]
    chunks = [(chunk.flat, chunk.start, chunk.numel) for chunk in layout.chunks]
    known = (manifest.paths, manifest.places, manifest.split_master, manifest.flats)
    if (
        known != (wanted.paths, wanted.places, wanted.split_master, wanted.flats)
        or [(chunk.flat, chunk.start, chunk.numel) for chunk in manifest.chunks] != chunks
        or [param.name for param in manifest.parameters] != [param.name for param in wanted.parameters]
    ):
        return None
    lying = directories_of(reader.commit.run_id, wanted.rank, config.paths, files)
    return tuple(lying[number] for number in range(wanted.paths)) if len(lying) == wanted.paths else None
