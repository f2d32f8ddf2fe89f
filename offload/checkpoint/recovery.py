"""What a run finds in its directories before it begins, and what that means: the commit it resumes from, if any.

[Note: disks of machines]
A directory is known by what lies in it, never by its name. `/scratch/run` may be a disk of each machine, and then there
are as many directories of that name as machines; or a shared file system, and then there is one. So each rank looks for
records in the directories that were given to itself, and tells the others what it sees. Every directory of a run was
given to some rank, and so all ranks decide on the same facts. The record names the manifests by digest; a rank that
does not see one gets it from a rank that does. A manifest names slots by checksum, and these are looked for wherever a
name leads: what has the run's id and the checksum is the slot. Only a rank to which a directory was given changes what
is in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.checkpoint.atomic_file import sync_directory
from offload.checkpoint.commit import (
    Commit,
    extra_of,
    manifest_name,
    manifest_told,
    read_commit,
    read_extra,
    read_manifest,
    require_one_model,
    spelled,
)
from offload.checkpoint.extra import Carried, carried_in
from offload.checkpoint.live import (
    Live,
    OtherStep,
    Tag,
    collect,
    collect_homes,
    directories_of,
    last_of,
    leave,
    listed,
    live,
    manifests_in,
    merge,
    names_in,
    other_steps,
    ranks_in,
    read_tag,
    refuse_step,
    removal,
    require_manifests,
    swaps,
    untag,
    withdraw,
    write_tag,
)
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
from offload.checkpoint.reshard import copy_ranges
from offload.checkpoint.sharing import Sharing, remove_marks, require_one_holder, share_together
from offload.checkpoint.transfer import Transfer, plan_together, say, tensors_together
from offload.choices import Choice, CommitChoice
from offload.errors import CorruptionError, RankError, ResumeError
from offload.io.files import Files, Host, unusable
from offload.layout import Layout
from offload.model import written_frozen
from offload.model.dense import is_dense
from offload.planner.placement import chunk_arrays, slot_map
from offload.ranks.agreement import all_gather_object, found_by_all, together
from offload.ranks.communicator import Communicator, is_in_order
from offload.ranks.tensor_parallel import local_of
from offload.sizes import format_bytes
from offload.storage.directories import COMMIT_NAME, LOCK_NAME, RECORD_START, check_directory, swap_name, tag_name
from offload.storage.directory_lock import Claimant, Claims
from offload.storage.swap_file import make_directory, new_run_id, remove_if_empty
from offload.storage.swap_format import MAX_PLACES


class RunDirectories(NamedTuple):
    """The directories of all ranks, as their names are understood on this rank.

    Attributes:
        own: this rank's directories.
        others: directories of other ranks.
        named: directories given in some rank's `resume`, and in no rank's `path`.
        origins: the directories given in this rank's `resume`.
    """

    own: tuple[Path, ...]
    others: tuple[Path, ...]
    named: tuple[Path, ...]
    origins: tuple[Path, ...]

    @property
    def runs(self) -> tuple[Path, ...]:
        """The directories in which the run goes on."""
        return self.own + self.others


class Views(NamedTuple):
    """What all ranks see together.

    Attributes:
        runs: in the directories in which the run goes on.
        named: in the directories that `resume` names.
        mine: the records that this rank sees itself.
    """

    runs: Live
    named: Live
    mine: tuple[tuple[Path, Commit], ...]


class _Told(NamedTuple):
    """What a rank tells the others.

    Attributes:
        run_id: 32 hex digits, the id of a new run. That of rank 0 counts.
        host: the rank's machine.
        paths: the rank's directories, as it was given them.
        origins: the directories in its `resume`, as it was given them.
    """

    run_id: str
    host: Host
    paths: tuple[Path, ...]
    origins: tuple[Path, ...]


def meet(choice: CommitChoice, comm: Communicator, files: Files) -> tuple[RunDirectories, Claimant]:
    """What ranks have to know of each other before they look for a commit.

    Returns:
        The directories of all ranks, and who takes them. The id of the start is that of a new run, and rank 0's.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    told = all_gather_object(comm, _Told(new_run_id().hex(), files.host(), choice.paths, choice.origins), _Told)
    known = {files.real(path) for path in choice.paths}
    found: list[tuple[Path, ...]] = []
    for given in ([one.paths for one in told], [one.origins for one in told]):
        new = dict.fromkeys(path for paths in given for path in paths if files.real(path) not in known)
        known |= {files.real(path) for path in new}
        found.append(tuple(new))
    others, named = found
    claimant = Claimant(bytes.fromhex(told[0].run_id), tuple(one.host for one in told))
    return RunDirectories(choice.paths, others, named, choice.origins), claimant


def look_together(directories: RunDirectories, comm: Communicator, files: Files) -> Views:
    """What all ranks see. Each looks in its own directories, and in those of its `resume`.

    Raises:
        OffloadError: what `live` raises.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    told = found_by_all(comm, lambda: [live(directories.own, files), live(directories.origins, files)], list[Live])
    runs, named = (merge([one[which] for one in told]) for which in (0, 1))
    own = told[comm.rank]
    # What one rank names in `resume` may be in another one's `path`.
    known = {commit for _, commit in runs.records}
    named = replace(named, records=tuple(at for at in named.records if at[1] not in known))
    return Views(runs, named, own[0].records + own[1].records)


def read_together(
    wanted: Collection[int], directories: Sequence[Path], home: Path, commit: Commit, comm: Communicator, files: Files
) -> dict[int, Manifest]:
    """The manifests of a commit that this rank wants, by rank.

    It reads those in `directories`. Those that only other ranks see are sent by them. Of manifests that nobody wants,
    it is only checked that some rank sees them.

    Args:
        wanted: the ranks whose manifests this rank wants.
        directories: where this rank looks.
        home: the directory of the record.
        commit: the record.
        comm: of all ranks.
        files: the file system.

    Raises:
        CorruptionError: a manifest is damaged, or is gone from a directory that is there.
        ResumeError: no rank sees anything of a rank that committed, or a newer version of this library wrote a
            manifest.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    count = len(commit.manifests)
    with together(comm):
        lying = manifests_in(directories, commit, files)
        swapping = ranks_in(directories, commit, files, set(range(count)) - lying.keys())
    flags = [[number in those for number in range(count)] for those in (lying, swapping, wanted)]
    rows = comm.all_gather(torch.tensor(flags, device="cpu").flatten()).view(comm.size, 3, count)
    seen, swapped, lacking = rows[:, 0], rows[:, 1], rows[:, 2] & ~rows[:, 0]
    if not seen.any(0).all():
        host = files.host().name if comm.size > 1 else ""

        def look() -> tuple[str, list[tuple[int, OtherStep]]]:
            others = other_steps(directories, commit, files).items()
            return host, [
                (rank, one._replace(where=f"{one.where} on {host}" if host else one.where)) for rank, one in others
            ]

        told = found_by_all(comm, look, tuple[str, list[tuple[int, OtherStep]]])
        others = {rank: one for _, those in reversed(told) for rank, one in those}
        found, lying_there = _numbers_in(seen.any(0)), _numbers_in(swapped.any(0))
        machines = [name for name, _ in told if name]
        require_manifests(commit, found, lying_there, others, directories, home, machines)
    # The first rank that sees one sends it, if one that wants it does not.
    mine = [number for number in _numbers_in(lacking.any(0)) if seen[:, number].tolist().index(True) == comm.rank]
    with together(comm):
        read = {number: read_manifest(lying[number], commit, number, files) for number in {*wanted, *mine} & {*lying}}
    if lacking.any():
        sent = {number: serialise(read[number]) for number in mine}
        told_of = all_gather_object(comm, sent, dict[int, bytes])
        with together(comm):  # the others would wait for a rank that has given up
            for number, data in (item for told in told_of for item in told.items()):
                if number in wanted and number not in read:
                    read[number] = manifest_told(data, commit, number)
    return {number: read[number] for number in wanted}


def _numbers_in(flags: Tensor) -> list[int]:
    """The numbers of the elements that are true."""
    found: list[int] = flags.nonzero().flatten().tolist()
    return found


SHOWN = 5
"""How many differences an error lists."""


class Resumed(NamedTuple):
    """What a run was resumed from.

    Attributes:
        step: the step that was committed.
        extra: what was given to `commit` along with it.
    """

    step: int
    extra: object


class Target(NamedTuple):
    """The commit to resume.

    Attributes:
        last: the directory of its record, and the record.
        is_elsewhere: whether it is a snapshot outside of this run's directories, which is only read.
        here: the last commit in this run's directories; None: there is none.
        directories: the directories in which the commit's files may lie.
        owned: the directories from which this rank removes what is dead.
    """

    last: tuple[Path, Commit]
    is_elsewhere: bool
    here: Commit | None
    directories: tuple[Path, ...]
    owned: tuple[Path, ...]


@dataclass(frozen=True)
class RecoveryPlan:
    """How a run resumes from a commit that fits the model. Either `manifest` or `reader` is None.

    Attributes:
        paths: this run's directories, in the order of its swap files.
        first: the manifest of the first rank that had this rank's slice of the model; of rank 0 where there is one
            slice.
        manifest: this rank's manifest, whose slots are used where they lie; None: the layout is another one.
        target: the commit.
        dead: the runs of which nothing lives in the run's directories.
        at: where this rank saw the record.
        files: the run's file system, which holds the directories.
        reader: reads what this rank needs if the layout is another one; None: it is the same.
        transfer: brings it what it does not see; None: it sees all of it.
        extra: what was committed along, for this rank.
        begins_states: whether only masters are taken from it.
    """

    paths: tuple[Path, ...]
    first: Manifest
    manifest: Manifest | None
    target: Target
    dead: frozenset[str]
    at: tuple[Path, ...]
    files: Files
    reader: Reader | None = None
    transfer: Transfer | None = None
    extra: Carried = field(default_factory=Carried)
    begins_states: bool = False

    @property
    def commit(self) -> Commit:
        return self.target.last[1]

    @property
    def committed_at(self) -> str:
        """The local time of the commit's record, with the date unless it is of today."""
        at = time.localtime(self.files.stat(self.target.last[0] / COMMIT_NAME, follows=True).st_mtime)
        is_today = at[:3] == time.localtime()[:3]
        return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", at)

    @property
    def slots(self) -> tuple[bytes, list[int]] | None:
        """The run's id, and the path of each committed slot, for `RunFiles`; None: new files are made."""
        if self.manifest is None:
            return None
        return bytes.fromhex(self.commit.run_id), [slot.path for slot in self.manifest.slots]

    @property
    def buffer_bytes(self) -> int:
        """The RAM in which slots are read if they are not used where they lie, in bytes."""
        return 0 if self.reader is None else self.reader.slots_bytes()

    def with_frozen(self, trained: Container[str]) -> RecoveryPlan:
        """The same plan, with the values of parameters that were trained when it was committed, and are frozen now.

        They are carried as frozen parameters that were written to, with their rounded masters.

        Args:
            trained: the names of the parameters that are trained now.

        Raises:
            CorruptionError: what was read is damaged.
            PathError: a file or directory cannot be used.
            TierIOError: a disk or its file system failed.
        """
        frozen = [param for param in self.first.parameters if param.name not in trained]
        if not frozen or self.reader is None:
            return self
        state: Any = self.extra.attached.get(written_frozen.NAME, {"values": {}, "digests": {}})
        values = {
            one.name: self.reader.read(one.name, "master", self.first.slice).to(getattr(torch, one.dtype))
            for one in frozen
        }
        state = {"values": state["values"] | values, "digests": state["digests"]}
        return replace(self, extra=self.extra._replace(attached={**self.extra.attached, written_frozen.NAME: state}))

    def collect(self, commit: Commit | None, comm: Communicator) -> None:
        """Removes what does not live beside `commit`, on all ranks; see [Note: names never change] in live.py.

        Args:
            commit: the last record in this run's directories, which is durable; None: there is none.
            comm: of all ranks.

        Raises:
            TierIOError: a disk or its file system failed.
            PathError: a file or directory cannot be used.
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        replaced = set() if commit is None or commit.replaces is None else {commit.replaces}
        dead, owned = self.dead | replaced, self.target.owned
        with together(comm):
            for path in owned:
                # A process that was killed may not have synced the record. What it does not name goes after it.
                if COMMIT_NAME in names_in(path, self.files):
                    sync_directory(self.files, path)
            for path in owned:
                withdraw(path, replaced, self.files)
        collect_together(owned, commit, dead, comm, self.files, held=replaced)

    def lock(self, *, alone: bool) -> None:
        """Locks the swap files that are read, or that are going to be replaced.

        When all files are locked, those too that are used where they lie, `require_last` has to be called.

        Args:
            alone: whether no other rank reads them.

        Raises:
            PathInUseError: a live run holds one.
            ResumeError: a directory is missing, or a newer version of this library wrote a file.
            CorruptionError: a file is damaged or too short.
            PathError: a file or directory cannot be used.
            TierIOError: a disk or its file system failed.
        """
        if self.manifest is not None:
            self._require_whole(self.manifest)
        if self.reader is not None:
            self.reader.swap_files.lock(exclusive=alone and not self.target.is_elsewhere)
            if self.target.is_elsewhere:
                found = (
                    swap for path in self.target.owned for swap in swaps(path, self.files, None, self.commit.run_id)
                )
                self.reader.swap_files.hold([swap.path for swap in found], exclusive=alone)

    def _require_whole(self, manifest: Manifest) -> None:
        """Checks that this rank's swap files hold all committed slots, before they get a run's size. Changes nothing.

        Raises:
            CorruptionError: a file ends before a committed slot does.
            PathError: a file cannot be opened.
        """
        sizes: dict[Path, int] = {}
        for slot in committed_slots(manifest):
            path = self.paths[slot.path] / swap_name(manifest.run_id, manifest.rank)
            if path not in sizes:
                with unusable("cannot be opened", path), self.files.open(path, os.O_RDONLY) as file:
                    sizes[path] = self.files.size(file)
            if sizes[path] < slot.offset + slot.size:
                raise CorruptionError(
                    f"the file ends before this slot of {format_bytes(slot.size)} does",
                    chunk=slot.chunk,
                    file=str(path),
                    offset=slot.offset,
                )

    def require_last(self) -> None:
        """Checks that the commit that was read is still the last one. It was read before its files were locked.

        Raises:
            ResumeError: another run has committed since, where this rank sees it.
        """
        home, commit = self.target.last
        if any(read_commit(directory, self.files) != commit for directory in self.at):
            raise _just_committed(home)


def describe(
    choice: Choice,
    layout: Layout,
    params: Sequence[nn.Parameter],
    groups: Sequence[Mapping[str, Option]],
    comm: Communicator | None = None,
) -> Manifest:
    """The manifest of this run as far as it is known before it begins: without chunks, and with step 0.

    Args:
        choice: what was decided.
        layout: the layout of this rank.
        params: the parameters of the layout.
        groups: of each param group, what must not change between a commit and a resume.
        comm: of all ranks; None: the model has one slice.

    Raises:
        ConfigError: there are more chunks than a manifest can name.
    """
    slices = 1 if comm is None else comm.tensor_parallel.size
    slice_number = 0 if comm is None else comm.tensor_parallel.rank
    params = [local_of(param) for param in params]  # type: ignore[misc]
    shapes = [tuple(param.shape) for param in params]
    # What has holes gets memory of its own, row-major.
    strides = [(p if is_dense(p) else torch.empty(p.shape, device="meta")).stride() for p in params]
    manifest = Manifest(
        run_id="0" * 32,
        step=0,
        rank=slice_number * layout.ranks + layout.rank,
        world=slices * layout.ranks,
        slices=slices,
        paths=max(len(choice.commits.paths), 1),
        places=choice.slots_per_chunk,
        compute_dtype=str(choice.model.compute_dtype).removeprefix("torch."),
        split_master=choice.states.split_master,
        user_ranks=() if comm is None or is_in_order(comm.user_ranks) else tuple(comm.user_ranks),
        groups=tuple(dict(group) for group in groups),
        parameters=parameters_of(layout, shapes, strides, [0] * len(params)),
        flats=flats_of(layout, [layout.shard_range(flat.index) for flat in layout.flats]),
        chunks=(),
    )
    if choice.commits.every is not None:
        require_room(manifest, slot_map(choice, chunk_arrays(layout, choice)).committed or 0)
    return manifest


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
        paths: the directories, in the order of their files.
        found: the commit that all ranks resume, whose files are locked if they are only read; None: the run begins
            anew.
        run_id: 16 bytes, the id of a new run.
        files: the file system, which holds those of this rank's directories that exist.
        claims: the directories, which no other run can take.
    """

    paths: tuple[Path, ...]
    found: RecoveryPlan | None
    run_id: bytes
    files: Files
    claims: Claims


def find_together(
    undo: ExitStack,
    choice: CommitChoice,
    comm: Communicator,
    layout: Layout,
    wanted: Manifest,
    files: Files,
    frozen: Container[str] = (),
) -> Start:
    """Takes the directories, and looks for the commit to resume; see [Note: disks of machines].

    If it raises, no commit was changed. What no commit names may be removed.

    Args:
        undo: gets what gives all of it back.
        choice: what was decided for commits.
        comm: of all ranks.
        layout: the layout of this rank.
        wanted: what `describe` returned.
        files: the run's file system, which holds its directories from then on.
        frozen: the names of parameters that are frozen now, and may have been trained when it was committed.

    Raises:
        ResumeError: there is a commit and nobody asked for it, or there is none; it is of another model; a directory is
            of a run whose record was not read; or a rank does not see what it needs.
        CorruptionError: what was read is damaged.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
        PathInUseError: a live run, or another start, has a directory or holds files.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    directories, claimant = meet(choice, comm, files)
    run_id = claimant.start
    undo.callback(files.let_go)
    # The other ranks wait in a collective meanwhile, and must not take this one for lost.
    claims = Claims(claimant, files, wait_s=min(choice.lock_timeout_s, comm.timeout_s / 2), say=say)
    with together(comm):
        _enter(undo, directories, claims, files)
        if not choice.resume:
            _require_no_strange_record(choice.paths, files)
    sharing = None
    if len({*claimant.hosts}) > 1 or not is_in_order(comm.user_ranks):
        sharing = share_together(choice.paths, claimant, comm, files)
        if sharing.deaf and not any(comm.rank > rank for rank in _with_the_same(sharing, comm.rank)):
            say(
                f"locks do not reach other machines in {listed(sharing.deaf)}: a second run there is found before the "
                "next step or commit of this one only"
            )
    seen = look_together(directories, comm, files)
    with together(comm):
        if not choice.resume:
            _require_uncommitted(choice.paths, seen.runs)
        target = target_of(seen, directories, choice)
    if target is None:
        collect_together(choice.paths, None, seen.runs.dead, comm, files)
        _tag(undo, choice.paths, run_id, comm, files)
        return Start(choice.paths, None, run_id, files, claims)
    if sharing is not None:
        require_one_holder(target.last[1], choice.paths, sharing, comm, files)
    found = _plan(undo, choice, comm, layout, wanted, files, frozen, target, seen)
    with together(comm):
        for path in target.owned:
            if path not in choice.paths and LOCK_NAME in names_in(path, files):
                _take(undo, path, claims, files)
    found.collect(target.here, comm)
    with together(comm):
        found.lock(alone=comm.size == 1)
    if choice.paths:
        _tag(undo, found.paths, run_id if found.slots is None else found.slots[0], comm, files)
    return Start(found.paths, found, run_id, files, claims)


def _with_the_same(sharing: Sharing, rank: int) -> list[int]:
    """The ranks that have a directory of a rank, too."""
    return [other for other, those in enumerate(sharing.directories) if {*those} & {*sharing.directories[rank]}]


def _enter(undo: ExitStack, directories: RunDirectories, claims: Claims, files: Files) -> None:
    """Makes and locks this rank's directories, and holds open those of `resume`.

    Raises:
        PathInUseError: a live run, or another start, has one.
        PathError: one cannot be used.
    """
    for path in directories.own:
        with unusable("cannot be used", path):
            check_directory(path, files)
    for path in directories.own:
        with unusable("cannot be used", path):
            if make_directory(path, files):
                undo.callback(remove_if_empty, path, files)
            files.hold(path)
            _take(undo, path, claims, files)
            remove_marks(path, claims.claimant.start, files)
    for path in directories.origins:
        if files.is_directory(path, follows=True):
            files.hold(path)


def _take(undo: ExitStack, path: Path, claims: Claims, files: Files) -> None:
    """Takes the lock of a directory. Giving it back removes it, too, if there is nothing else of ours.

    Raises:
        PathInUseError: a live run, or another start, has the directory.
        PathError: it cannot be locked.
    """
    undo.callback(claims.take(path))
    undo.callback(leave, path, files)


def _require_no_strange_record(paths: Sequence[Path], files: Files) -> None:
    """Checks that no file of somebody else's is called COMMIT in these directories.

    Raises:
        ResumeError: one is.
    """
    for path in paths:
        if COMMIT_NAME in names_in(path, files):
            try:
                is_own = files.read(path / COMMIT_NAME, len(RECORD_START)).startswith(RECORD_START)
            except OSError:
                is_own = False
            if not is_own:
                raise ResumeError(
                    f"{path / COMMIT_NAME} is no record of a commit, or a damaged one: move it away, or choose another "
                    "path"
                )


def _require_uncommitted(paths: Sequence[Path], runs: Live) -> None:
    """Checks that no run lives in these directories.

    Args:
        paths: this rank's directories.
        runs: what all ranks see.

    Raises:
        ResumeError: one does.
    """
    committed = {record.run_id for _, record in runs.records} - runs.replaced
    homes = {directory for directory, _ in runs.records}
    for path in paths:
        here = [one for one in runs.seen if one.directory == path and one.run_id in committed]
        if path in homes or here:
            way_out = removal(path, has_more=any(one.has_more for one in here))
            raise ResumeError(
                f"{path} holds a committed run: give resume=True to continue it, choose another path, or {way_out}"
            )


def _tag(undo: ExitStack, paths: Sequence[Path], run_id: bytes, comm: Communicator, files: Files) -> None:
    """Says durably in the directories of all ranks that they are this run's, and first of all in its home.

    Args:
        undo: gets the removal of tags beside which no swap file was made.
        paths: this rank's directories, in the order of its swap files.
        run_id: 16 bytes.
        comm: of all ranks.
        files: the file system.

    Raises:
        TierIOError: a disk or its file system failed.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    directories = tuple(tuple(one) for one in all_gather_object(comm, [spelled(path) for path in paths], list[str]))
    run = run_id.hex()
    for is_home in (True, False):
        with together(comm):
            for number, path in enumerate(paths):
                tag = Tag(run, comm.rank, (number, len(paths)), directories)
                if tag.is_home == is_home and read_tag(path / tag_name(run, comm.rank), files) != tag:
                    undo.callback(_untag_unless_lost, path, tag, comm, files)
                    write_tag(path, tag, files)


def _untag_unless_lost(path: Path, tag: Tag, comm: Communicator, files: Files) -> None:
    """Removes a tag if the rank has no swap file beside it, and is not the one that tells the others that it is dead.

    A rank that was lost may have left files on its machine. The next start removes them, because the home has the tag
    and no record.
    """
    try:
        comm.check()
    except RankError:
        if tag.is_home:
            return
    untag(path, tag.run_id, tag.rank, files)


def collect_together(
    owned: Sequence[Path],
    record: Commit | None,
    dead: Collection[str],
    comm: Communicator,
    files: Files,
    held: Container[str] = (),
) -> None:
    """Lets all ranks remove what does not live; see [Note: names never change] in live.py.

    Args:
        owned: this rank's directories.
        record: the last record in the directories of all ranks; None: there is none.
        dead: the runs that are dead.
        comm: of all ranks.
        files: the file system.
        held: the dead runs whose files this process holds itself.

    Raises:
        TierIOError: a disk or its file system failed.
        PathError: a file or directory cannot be used.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """

    def remove() -> list[list[str]]:
        left = [run for path in owned for run in collect(path, record, dead, files, held=held)]
        return [[*map(spelled, owned)], left]

    told = found_by_all(comm, remove, list[list[str]])
    if dead:
        given, gone = {place for places, _ in told for place in places}, {*dead}.difference(*(runs for _, runs in told))
        with together(comm):
            for path in owned:
                collect_homes(path, gone, given, files)


def _plan(
    undo: ExitStack,
    choice: CommitChoice,
    comm: Communicator,
    layout: Layout,
    wanted: Manifest,
    files: Files,
    frozen: Container[str],
    target: Target,
    seen: Views,
) -> RecoveryPlan:
    """How the run resumes from `target`. Changes nothing; for the arguments and errors see `find_together`."""
    every = range(len(target.last[1].manifests))
    at = tuple(directory for directory, record in seen.mine if record == target.last[1])

    def read(ranks: Collection[int]) -> dict[int, Manifest]:
        try:
            return read_together(ranks, target.directories, *target.last, comm, files)
        except (CorruptionError, ResumeError) as error:
            # A live run clears away what its next commit has replaced.
            if any(read_commit(directory, files) != target.last[1] for directory in at):
                raise _just_committed(target.last[0]) from error
            raise

    manifests = read({0, _first_rank(wanted, len(every)), comm.rank} & {*every})
    if manifests[0].user_ranks or wanted.user_ranks:
        manifests |= read({_extra_rank(wanted, manifests[0])})
    with together(comm):
        taken = {"of_masters": choice.begins_states, "converts": choice.converts_states}
        first = _require_this_model(target, manifests, wanted, files, frozen, **taken)
        _require_no_other(choice.paths, target, seen.runs)
        _require_current([*choice.origins, *(() if target.is_elsewhere else choice.paths)], *target.last, files)
        # States that begin anew would be written over committed ones.
        can_stay = not (target.is_elsewhere or target.last[1].is_older or choice.begins_states)
        manifest = _own_of(manifests, wanted) if can_stay else None
        if manifest is not None and not manifest.owed.keys() <= layout.late_chunks:
            manifest = None  # this run's chunks owe nothing: what is read owes nothing either
        paths = None if manifest is None else _directories_in_order(choice, layout, wanted, manifest, files)
        if paths is None:
            # The record stays where it is, if it can: then replacing it is one rename.
            homes = {directory for directory, record in seen.mine if record == target.here}
            manifest, paths = None, tuple(sorted(choice.paths, key=lambda path: path not in homes))
        dead = (seen.runs if target.owned == choice.paths else seen.runs + seen.named).dead
        found = RecoveryPlan(paths, first, manifest, target, dead, at, files, begins_states=choice.begins_states)
    # Used where it lies by all ranks, or by none.
    if comm.all_reduce_any(found.manifest is None):
        manifests = read(every)
        with together(comm):
            reader = Reader(target.directories, files, (*target.last, tuple(manifests[rank] for rank in every)))
            undo.callback(reader.close)
            needed = sorted(copy_ranges(reader.manifests, layout, wanted.slice))
        transfer = plan_together(reader, needed, comm, files, sends=choice.transfers)
        shards = {shard for shard, _ in needed}
        reader.swap_files.ranks = shards if transfer is None else shards & transfer.seen | transfer.sent_shards
        found = replace(found, manifest=None, reader=reader, transfer=transfer)
    return replace(found, extra=_extra_together(manifests, target, wanted, comm, files))


def _require_no_other(paths: Sequence[Path], target: Target, runs: Live) -> None:
    """Checks that no directory of this run is of another run only, of which it is not known that it is dead.

    Raises:
        ResumeError: one is.
    """
    ours = {target.last[1].run_id, target.last[1].replaces, target.here and target.here.run_id}
    for path in paths:
        own = {one.run_id for one in runs.seen if one.directory == path}
        unknown = [one for one in runs.unknown if one.directory == path and one.run_id not in ours]
        if unknown and not own & ours:
            raise ResumeError(
                f"{path} holds a file of another committed run: choose another directory, or "
                f"{removal(path, has_more=any(one.has_more for one in unknown))}"
            )


def _require_current(paths: Iterable[Path], home: Path, commit: Commit, files: Files) -> None:
    """Checks that no directory of a run is a copy from before the commit, which lacks the manifest.

    Raises:
        ResumeError: one is.
        CorruptionError: the manifest is gone from one.
    """
    for path in paths:
        there, others = {*names_in(path, files)}, other_steps([path], commit, files)
        for rank in range(len(commit.files)):
            name = manifest_name(commit, rank)
            if tag_name(commit.run_id, rank) in there and name not in there:
                if rank in others:
                    refuse_step(rank, others[rank], commit, home)
                problem = f"is missing: is {path} a copy from before the commit of step {commit.step}?"
                raise CorruptionError(problem, file=str(path / name))


def target_of(seen: Views, directories: RunDirectories, choice: CommitChoice) -> Target | None:
    """The commit to resume; None for a run that begins anew.

    A snapshot that `resume` names comes before what its run committed later. It stays what it is.

    Raises:
        ResumeError: another run is committed where this one is to go on; or as `last_of`.
    """
    kept = next(((directory, record) for directory, record in seen.named.records if record.is_snapshot), None)
    if kept is None:
        everywhere = directories.runs + directories.named
        last = last_of(seen.runs + seen.named, everywhere)
        if last is not None:
            moves = directories.origins if choice.every is not None else ()  # else that is only read
            return Target(last, False, last[1], everywhere, directories.own + moves)
        if choice.resume not in (False, "auto"):
            raise ResumeError(
                f'{listed(everywhere)}: no commit to resume from: give resume="auto" to begin anew where none is'
            )
        return None
    here = last_of(seen.runs, directories.runs)
    if here is None or (here[1].run_id == kept[1].run_id and not here[1].is_snapshot):
        last = last_of(seen.named, directories.named)
        assert last is not None
        return Target(last, True, None if here is None else here[1], directories.named, directories.own)
    if here[1].replaces == kept[1].run_id:  # it has begun from there, and was cut off
        return Target(here, False, here[1], directories.runs, directories.own)
    raise ResumeError(
        f"{here[0]} holds a commit, of step {here[1].step}, that is not of the run of which {kept[0]} is a snapshot: "
        f"give resume=True to continue it, choose another path, or "
        f"{removal(here[0], has_more=any(one.has_more for one in seen.runs.seen if one.run_id == here[1].run_id))}"
    )


def _require_this_model(
    target: Target,
    manifests: Mapping[int, Manifest],
    wanted: Manifest,
    files: Files,
    frozen: Container[str],
    *,
    of_masters: bool,
    converts: bool,
) -> Manifest:
    """Checks that what is committed is of this model.

    Args:
        target: the commit.
        manifests: the manifests of rank 0, of the first rank of this one's slice, and of this rank, if they were
            committed.
        wanted: the manifest of this run.
        files: the file system.
        frozen: the names of parameters that are frozen now.
        of_masters: whether only masters are taken from it.
        converts: whether states may be in another form than they were committed in.

    Returns:
        The manifest of the first rank of this one's slice; of rank 0 where there were other slices.

    Raises:
        ResumeError: it is of another model.
        CorruptionError: what was read is damaged.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
    """
    home, commit = target.last
    first = manifests[0]
    if first.slices == wanted.slices:
        first = manifests[_first_rank(wanted, len(commit.manifests))]
    if own := _own_of(manifests, wanted):
        require_one_model(first, own, str(home))
    differing = partial(differences, first, wanted, converts=converts)
    found = differing(of_masters=of_masters)
    if found and len(commit.manifests) == wanted.world == 1:
        carried = carried_in(read_extra(manifests_in(target.directories, commit, files).get(0, home), first, files))
        state = carried.attached.get(written_frozen.NAME)
        differing = partial(differing, unfrozen=written_frozen.was_frozen(state), frozen=frozen)
        found = differing(of_masters=of_masters)
    if found:
        more = f"\n... and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
        way_out = "" if differing(of_masters=True) else ', or resume_states="anew" to keep the weights alone'
        raise ResumeError(
            f"{home} holds a commit of another model, optimizer or dtype: give those, or another path{way_out}. What "
            "differs:\n" + "\n".join(found[:SHOWN]) + more
        )
    return first


def _own_of(manifests: Mapping[int, Manifest], wanted: Manifest) -> Manifest | None:
    """This rank's manifest, if as many ranks committed, and as many slices; else None."""
    own = manifests.get(wanted.rank)
    return own if own is not None and (own.world, own.slices) == (wanted.world, wanted.slices) else None


def _just_committed(directory: Path) -> ResumeError:
    return ResumeError(f"{directory}: another run has just committed here: try again")


def _first_rank(wanted: Manifest, count: int) -> int:
    """The first rank that had this one's slice. As many slices were committed as there are now.

    Args:
        wanted: the manifest of this run.
        count: how many ranks committed.
    """
    return wanted.slice * (count // wanted.slices)


def _extra_rank(wanted: Manifest, first: Manifest) -> int:
    """The number of the manifest whose extra this rank gets. It may hold values of that rank's slice of the model.

    Args:
        wanted: the manifest of this run.
        first: the manifest of the first rank that committed.
    """
    count = first.world
    rank = wanted.user_rank if count == wanted.world else _first_rank(wanted, count)
    return first.user_ranks.index(rank) if first.user_ranks else rank


def _extra_together(
    manifests: Mapping[int, Manifest], target: Target, wanted: Manifest, comm: Communicator, files: Files
) -> Carried:
    """What was committed along, for each rank.

    Raises:
        ResumeError: no rank sees a part of it.
        CorruptionError: what was read is damaged.
        PathError: a file or directory cannot be used.
        TierIOError: a disk or its file system failed.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    own = manifests[_extra_rank(wanted, manifests[0])]
    tensors = tensors_together(own, target.directories, comm, files)
    with together(comm):
        carried = carried_in(extra_of(own, tensors, target.last[0]))
    return carried if own.world == wanted.world else carried.for_other_ranks()


def _directories_in_order(
    choice: CommitChoice, layout: Layout, wanted: Manifest, manifest: Manifest, files: Files
) -> tuple[Path, ...] | None:
    """The directories by the number of the file in them, if the slots can be used where they lie; else None."""
    if choice.every is None:
        return None
    chunks = [(chunk.flat, chunk.start, chunk.numel) for chunk in layout.chunks]
    known = (manifest.paths, manifest.places, manifest.split_master, manifest.flats)
    places = MAX_PLACES if choice.keeps_places and manifest.places == MAX_PLACES else wanted.places
    if (
        known != (wanted.paths, places, wanted.split_master, wanted.flats)
        or [(chunk.flat, chunk.start, chunk.numel) for chunk in manifest.chunks] != chunks
        or [param.name for param in manifest.parameters] != [param.name for param in wanted.parameters]
    ):
        return None
    lying = directories_of(manifest.run_id, wanted.rank, choice.paths, files)
    return tuple(lying[number] for number in range(wanted.paths)) if len(lying) == wanted.paths else None
