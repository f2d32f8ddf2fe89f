"""Commits of a run, and the return to the last one.

A commit needs no bytes of parameters: their 16-bit values are what the masters round to. Only with a split master they
are the other halves of what is in the slots, and committed too. The COMMIT record lies in the first directory, of rank
0 if there are several ranks. A manifest lies in every directory, so that none looks as if nothing were committed.

[Note: commits over ranks]
Every rank flushes and syncs its own slots and writes its own manifest, durable; then all tell each other how that
went, and the digests of the manifests. If all went well rank 0 writes the COMMIT record, and tells how that went: until
it has heard, no rank writes over a slot that the commit before names. What fails on one rank fails on all, before any
goes on. A rank that dies meanwhile is a RankError on the others, and final: they write to no slot any more, and a
resume finds the one commit or the other, on all ranks the same, for one record names all manifests. Not all of them
need to see it: [Note: disks of machines] in recovery.py.

[Note: a commit that is cut off]
An interrupt, or whatever else another thread or a signal handler raises, may come between the rename of COMMIT and the
moment this process has taken note of it. What is committed is then written on the disk only, and a step would overwrite
it. So the attempt is noted as undecided first, in one assignment. Until that is cleared, whatever uses the last commit,
or writes to a slot, first calls `learn_outcome`: it reads the record. If that is the attempt's, it is synced and taken
over; if not, nothing was decided. With several ranks one alone cannot know what the others have heard: the failure is
then final.
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from offload.checkpoint.atomic_file import nothing, sync_directory, sync_parent
from offload.checkpoint.commit import (
    Commit,
    RankFiles,
    keep_room,
    names_of,
    read_commit,
    read_extra,
    read_manifest,
    spelled,
    write_commit,
    write_files,
)
from offload.checkpoint.extra import Carried, carried_in, stored
from offload.checkpoint.live import collect
from offload.checkpoint.manifest import (
    ChunkFacts,
    Digest,
    LateFacts,
    Manifest,
    ProgressFacts,
    differences,
    in_other_forms,
)
from offload.checkpoint.reader import Reader
from offload.checkpoint.recovery import RecoveryPlan
from offload.checkpoint.reshard import copy_ranges
from offload.checkpoint.sharing import share_together
from offload.checkpoint.snapshot import (
    RUN_DIGITS,
    Need,
    Snapshot,
    records_in,
    require_space,
)
from offload.checkpoint.snapshot_copy import SnapshotCopy, copy_of
from offload.checkpoint.transfer import Transfer
from offload.errors import (
    ConfigError,
    InterruptedStepError,
    OffloadError,
    OtherRankError,
    PathError,
    RankError,
    ResumeError,
    TierIOError,
)
from offload.interrupts import is_of_system
from offload.io.files import Files
from offload.layout import MASTER
from offload.model.master_weights import MasterWeights
from offload.optim.new_params import NewParameters
from offload.optim.rule import Progress
from offload.ranks.agreement import all_gather_object, found_by_all, together
from offload.run import Run, Stores
from offload.storage.cached_chunk import Version
from offload.storage.chunk_cache import Store
from offload.storage.directories import check_directory
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import Stripes, make_directory

T = TypeVar("T")

AMBIGUOUS = ("sync", "rename")
"""Operations after whose failure nobody knows what is on the disk."""
STAYS = "; the last commit stays what it was"


class _Attempt(NamedTuple):
    """A commit that this process may have decided; see [Note: a commit that is cut off]."""

    manifest: Manifest
    versions: list[dict[int, Version]]
    record: Commit
    source: str


class Commits:
    """The commits of one run whose directories are open and locked.

    Args:
        run: what the parts of the run share.
        slots: the swap files; None: the run has none.
        stores: the stores of the run.
        masters: the masters of the parameters.
        new_params: restores parameters.
        wanted: what `describe` returned.
        found: the commit that the run resumes from; None: it begins anew.

    Attributes:
        last: the manifest of the last durable commit; None before the first.
        is_outdated: whether the states of its step have changed since, without another step.

    Raises:
        ResumeError: the commit that was found is no longer the last one.
    """

    def __init__(
        self,
        run: Run,
        slots: Stripes | None,
        stores: Stores,
        masters: MasterWeights,
        new_params: NewParameters,
        wanted: Manifest,
        found: RecoveryPlan | None,
    ) -> None:
        self._choice, self._paths = run.commits, run.paths
        self._layout = run.layout
        self._comm = run.comm.everyone
        self._files = run.files
        self._claims = run.claims
        self._slots = slots
        self._all_stores = stores
        self._masters = masters
        self._new_params = new_params
        self._wanted = wanted
        self._health = run.health
        self.last: Manifest | None = None
        self.is_outdated = False
        # Of the last durable commit, by chunk, for each of `_stores`.
        self._versions: list[dict[int, Version]] = []
        self._record: Commit | None = None
        # No failure, and so not in the run's health: what may have been decided, until that is known.
        self._undecided: _Attempt | None = None
        self._replaces: str | None = None
        # Of all ranks, as records have them; None: before the first commit.
        self._directories: list[tuple[str, ...]] | None = None
        self._is_read_ahead = False
        # See `Carried`. Snapshots that this run made under another id may lie in directories that it has no more.
        self._source = ""
        self._named: tuple[str, ...] = ()
        # What the last commit carries for this rank, if it is not beside this rank's slots.
        self._carried: Carried | None = None
        # Whether a state dict names the last commit.
        self._is_named = False
        self._timeline = run.timeline
        self._copying: SnapshotCopy | None = None
        self._copied_step = 0
        if found is not None:
            found.require_last()
            if found.manifest is not None:
                self._source, self._named = found.extra.source, found.extra.named
                if found.manifest.user_rank != self._comm.user_rank:
                    self._carried = found.extra
            self.last = found.manifest
            self._record = None if found.manifest is None else found.commit
        self._health.can_go_back = self.last is not None

    @property
    def last_id(self) -> str | None:
        """What state dicts call the last commit; None: nothing was committed."""
        return None if self.last is None or self._record is None else _id_of(self._record, self._source)

    def is_due(self, step: int) -> bool:
        """Whether `commit_every` wants a commit of `step`, and there is none.

        Raises:
            OffloadError: what `learn_outcome` raises.
        """
        self.learn_outcome()
        return self._choice.is_due(step) and not self.has(step)

    def has(self, step: int) -> bool:
        """Whether the last commit is of `step`."""
        return self.last is not None and self.last.step == step

    def commit(
        self,
        prepare: Callable[[], None],
        step: int,
        progress: Sequence[Progress],
        groups: Sequence[Mapping[str, Any]],
        extra: object,
    ) -> None:
        """Commits the present states, which nobody may change meanwhile. The commit is durable when this returns.

        Every rank has to call it. On each rank it does all or nothing: see [Note: commits over ranks]. If it raises,
        the last commit stays what it was, but for a RankError: then a resume finds this commit or the last one. After a
        failed sync or rename the run's health is final.

        Args:
            prepare: called first. What it raises counts as the commit's failure.
            step: the step whose results the states are.
            progress: what the optimizer knows of each parameter beside its arrays.
            groups: the param groups, with their hyper-parameters.
            extra: what is committed along.

        Raises:
            ConfigError: the run has no path or no commits, `extra` or a hyper-parameter cannot be stored, or another
                commit of this step was made.
            PathError: a directory or a swap file was moved, removed or cut off.
            TierIOError: a disk or its file system failed.
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        with self._agree():
            self.learn_outcome()
            if self._slots is not None:
                self._slots.require_here()
            self._claims.require_ours()
            prepare()
        self.finish_copy(waits=False)
        self._snapshot_if_named(step)
        with self._agree():
            written = self._write(step, progress, groups, extra)
        if written is None:
            return
        manifest, versions, digest, has_tensors = written
        commit = self._record_of(manifest, digest, has_tensors=has_tensors)
        self._decide(_Attempt(manifest, versions, commit, carried_in(extra).source))
        for path in self._paths:
            with suppress(TierIOError, PathError):  # they are cleared away next time
                self._clear_away(path, commit)

    def _clear_away(self, path: Path, commit: Commit) -> None:
        """Makes what a commit superseded in a directory the room for the next one."""
        collect(path, commit, (), self._files, rank=self._comm.rank)
        keep_room(path, commit, self._comm.rank, self._files)

    def _decide(self, attempt: _Attempt) -> None:
        """Makes `attempt` the last commit.

        If this raises, either it is known which commit is the last, or the failure is final.
        """
        self._undecided = attempt
        try:
            with self._agree():
                if self._comm.rank == 0:
                    self._final_if_ambiguous(
                        lambda: write_commit(self._home, attempt.record, self._files, self._claims.require_ours)
                    )
            # Only now does this rank know.
            self._note(attempt)
        except BaseException as error:
            if self._comm.size > 1 and isinstance(error, OffloadError):
                self._undecided = None  # all ranks know that it was not, or that this is final
            with suppress(OffloadError):  # what is being raised says more; whoever comes next hears of this one
                self.learn_outcome()
            raise

    def _note(self, attempt: _Attempt) -> None:
        """Records that `attempt` is the last commit. If this is interrupted, it is called again."""
        for store, of in zip(self._stores, attempt.versions, strict=True):
            store.set_committed(of)
        self._health.can_go_back = True
        self.last, self._versions, self._record, self._source = attempt
        self._masters.late.committed()
        self._is_named = self.is_outdated = False
        self._carried = None
        self._undecided = None

    @property
    def is_undecided(self) -> bool:
        """Whether a commit was cut off, and `learn_outcome` has something to find out."""
        return self._undecided is not None

    def learn_outcome(self) -> None:
        """Finds out how a commit ended that was cut off; see [Note: a commit that is cut off].

        Raises:
            OffloadError: what makes it impossible to go on, also after a rollback.
        """
        attempt = self._undecided
        if attempt is not None and not self._health.is_final:
            if self._comm.size > 1:
                self._health.fail(_cut_off(), is_final=True)
            else:
                self._final_if_ambiguous(lambda: self._read_record(attempt))
        self._health.require_mendable()

    def _read_record(self, attempt: _Attempt) -> None:
        """Records that `attempt` is the last commit, if the COMMIT record on the disk is its own."""
        try:
            is_decided = read_commit(self._home, self._files) == attempt.record
        except OffloadError as error:
            self._health.fail(error, is_final=True)
            raise
        if is_decided:
            sync_directory(self._files, self._home)
            self._note(attempt)
        else:
            self._undecided = None

    @property
    def _home(self) -> Path:
        """The directory of the COMMIT record."""
        return self._paths[0]

    def _write(
        self, step: int, progress: Sequence[Progress], groups: Sequence[Mapping[str, Any]], extra: object
    ) -> tuple[Manifest, list[dict[int, Version]], Digest, bool] | None:
        """Makes this rank's part durable, before the decision. For the arguments see `commit`.

        Returns:
            The manifest, the version of each chunk that is in its slot, for each of `_stores`, the digest of the
            manifest, and whether it has tensors; None: all of it is committed already.
        """
        slots = self._slots
        if self._choice.every is None or slots is None:
            raise ConfigError("commit() needs a path, and commit_every: 0 for commit() alone, or a number of steps")
        stored(groups)
        versions = self._flush()
        if self.has(step):
            if carried_in(extra).extra is None and self._are_committed(versions):
                return None
            raise ConfigError(
                f"step {step} is committed already: commit once a step, with all there is to commit, and after "
                "apply(); state_dict() commits, too"
            )
        manifest = self._manifest(step, progress, groups, versions)
        self._final_if_ambiguous(slots.sync)
        if self.last is None:
            for path in self._paths:  # the directory itself may be new
                self._final_if_ambiguous(partial(sync_parent, self._files, path))
        carried = carried_in(extra)._replace(named=self._named)
        # Before each name that is given or taken: another run may have one of the same name.
        check = self._claims.require_ours
        check()
        if self._record is not None:
            for path in self._paths:  # what a commit that failed has left is room for this one
                collect(path, self._record, (), self._files, rank=self._comm.rank)
        written = [write_files(path, manifest, carried, self._files, check, self._sync_names) for path in self._paths]
        slots.require_here()
        check()
        slots.make_permanent()
        return manifest, versions, *written[0]

    def _sync_names(self, files: Files, directory: Path) -> None:
        """Makes durable what a directory of the run has got. If that fails, the names of swap files may be lost, too,
        and a second sync would not say so."""
        self._final_if_ambiguous(lambda: sync_directory(files, directory))

    def _are_committed(self, versions: Sequence[Mapping[int, Version]]) -> bool:
        """Whether the last commit has the values of these versions of all chunks.

        A chunk that has made steps that it owed then is another version of the same.
        """
        settled = self._masters.late.settled
        return all(
            now.keys() == before.keys() and all(at == before[chunk] or chunk in settled for chunk, at in now.items())
            for now, before in zip(versions, self._versions, strict=True)
        )

    def _record_of(self, manifest: Manifest, digest: Digest, *, has_tensors: bool) -> Commit:
        """The record of a commit, which names the manifests and files of all ranks.

        Args:
            manifest: this rank's.
            digest: of that manifest.
            has_tensors: whether this rank commits tensors along.
        """
        if self._directories is None:
            self._directories = all_gather_object(self._comm, tuple(map(spelled, self._paths)), tuple[str, ...])
        line = digest.size.to_bytes(8, "little") + bytes.fromhex(digest.xxh3) + bytes([has_tensors])
        rows = [
            bytes(row.tolist()) for row in self._comm.all_gather(torch.frombuffer(bytearray(line), dtype=torch.uint8))
        ]
        digests = tuple(Digest(int.from_bytes(row[:8], "little"), row[8:-1].hex()) for row in rows)
        names = [names_of(manifest, rank, has_tensors=bool(row[-1])) for rank, row in enumerate(rows)]
        files = tuple(map(RankFiles, self._directories, names))
        return Commit(manifest.run_id, manifest.step, digests, self._replaces, files)

    @contextmanager
    def _agree(self) -> Iterator[None]:
        """A context whose work succeeds on all ranks, or fails on all. What is final on one rank is final on all.

        Raises:
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        try:
            with together(self._comm, STAYS, lambda: self._health.is_final):
                yield
        except OtherRankError as error:
            if error.is_final:
                self._health.fail(error, is_final=True)
            raise

    def reshard(self, found: RecoveryPlan, progress: Sequence[Progress], groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes states and parameters those of a commit in another layout; see [Note: names never change] in live.py.

        Every slot is read once. If this run commits, it makes the commit anew in its own layout, which decides, and
        clears the other one away. If not, the other one stays as it is. Nothing else may be under way. If reading
        fails, the other commit is still there.

        Args:
            found: the commit.
            progress: what the optimizer knows of each parameter beside its arrays.
            groups: the param groups, with their hyper-parameters.

        Raises:
            CorruptionError: what was read is damaged.
            TierIOError: a disk or its file system failed.
            OffloadError: what `commit` raises.
        """
        reader, step = found.reader, found.commit.step
        assert reader is not None
        self._take_values(reader, found.transfer, begins_states=found.begins_states)
        slots = self._slots
        if self._choice.every is not None and slots is not None:
            self._replaces = found.commit.run_id
            # With other states it is no copy of that commit: a state dict that names it is of another optimizer.
            source = "" if found.begins_states else _id_of(found.commit, found.extra.source)
            self.commit(nothing, step, progress, groups, found.extra._replace(source=source))
            self._replaces = None
            assert self._record is not None
            found.collect(self._record, self._comm)
            with together(self._comm):
                slots.shut_out_older()
        reader.close()

    def name_last(self) -> int:
        """Records that a state dict names the last commit. Before another one replaces it, it becomes a snapshot.

        Returns:
            The bytes that the snapshot takes.

        Raises:
            ResumeError: nothing is committed.
            BudgetError: the disk has no room for the snapshot.
            CorruptionError: what was read is damaged.
            TierIOError: a disk or its file system failed.
        """
        snapshot = self._as_snapshot()
        needs = snapshot.needs()
        if not self._is_named and self._named_snapshot(snapshot) is None:
            require_space(needs)
        self._is_named = True
        return sum(need.nbytes for need in needs)

    def _snapshot_if_named(self, step: int) -> None:
        """Makes a snapshot of the last commit if a state dict names it, and removes the oldest ones beyond `keep`.

        What an interrupt leaves undone is done by the next call.

        Args:
            step: the step that is about to be committed.
        """
        if self.last is None or self.has(step) or self._slots is None:
            return
        if not self._comm.all_reduce_any(self._is_named):
            return
        snapshot = self._as_snapshot()
        found = self._found_by_first(lambda: self._named_snapshot(snapshot))
        if found is None or found in self._named:  # what the user has made stays, however many are named
            name = found or snapshot.name
            self._named = *(one for one in self._named if one != name), name
            # One with this name already is of the same step, taken before the run went back to an earlier one.
            gone = {*self._named[: -self._choice.keep], snapshot.name} - {found}
            self._remove(snapshot, lambda locks: snapshot.free(gone, locks))
            if found is None:
                self._complete(snapshot)
            existing = self._found_by_first(lambda: [*snapshot.existing()])
            self._named = tuple(one for one in self._named if one in existing)
        self._is_named = False

    def _named_snapshot(self, snapshot: Snapshot) -> str | None:
        """For rank 0: the name of the snapshot of the last commit; None: there is none yet.

        A snapshot of the commit that the last one is a copy of counts, too.

        Args:
            snapshot: of the last commit.

        Raises:
            PathError: something of the user's has its name.
        """
        found = self._snapshot_called(snapshot.commit.step, self.last_id)
        if found is None and snapshot.name not in self._named:
            snapshot.exists()
        return found

    def _snapshot_called(self, step: int, name: object) -> str | None:
        """The directory's name of the snapshot of a commit, or of a copy of it, which is durable; None: there is none.

        Args:
            step: the step that was committed.
            name: what state dicts call the commit.
        """
        for directory, record in records_in(self._home, self._files).items():
            if record.step == step and self._is_called(self._home / directory, record, name):
                sync_directory(self._files, self._home / directory)  # who wrote its record may have been killed before
                return directory
        return None

    def _is_called(self, home: Path, record: Commit, name: object) -> bool:
        """Whether the snapshot in `home` is of the commit that state dicts call `name`, or of a copy of it."""
        if name == _id_of(record):
            return True
        with suppress(OffloadError):  # damaged: of some other one
            extra = read_extra(home, read_manifest(home, record, 0, self._files), self._files)
            return name == carried_in(extra).source
        return False

    def snapshot_of(self, step: int, name: object) -> Reader:
        """Opens the snapshot of a commit. The caller closes it.

        Args:
            step: the step that was committed.
            name: what a state dict calls the commit.

        Raises:
            ResumeError: there is none, it is of another model, or has states in another form that cannot become those
                of this run, or are not to.
            CorruptionError: what was read is damaged.
            PathError: a file or directory cannot be used.
            TierIOError: a disk or its file system failed.
        """
        home, files = self._home, self._files
        if (directory := self._snapshot_called(step, name)) is not None:
            with ExitStack() as undo:
                reader = undo.enter_context(Reader([path / directory for path in self._paths], files))
                found = differences(reader.manifests[0], self._wanted, converts=self._choice.converts_states)
                if found:
                    raise ResumeError(f"{home / directory} cannot be gone back to:\n" + "\n".join(found))
                self._require_convertible(reader)
                undo.pop_all()
            return reader
        steps = sorted(record.step for record in records_in(home, files).values())
        last = "nothing" if self.last is None else f"step {self.last.step}"
        gone = "is gone" if step else "was never made, or is gone"
        raise ResumeError(
            f"the commit of step {step} that this state dict names {gone}: {home} holds {last}, and snapshots of "
            f"steps {', '.join(map(str, steps)) or '(none)'}; OffloadZero(keep=...) says how many stay"
        )

    def go_back_to(self, reader: Reader, progress: Sequence[Progress], groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes states and parameters those of a snapshot, and commits them.

        The last commit has to have been restored before. If reading fails, it stays what it was.

        Args:
            reader: of the snapshot.
            progress: what the optimizer knows of each parameter beside its arrays.
            groups: the param groups, with their hyper-parameters.

        Raises:
            CorruptionError: what was read is damaged.
            TierIOError: a disk or its file system failed.
            OffloadError: what `commit` raises.
        """
        self._take_values(reader)
        carried = carried_in(reader.extra())
        source = _id_of(reader.commit, carried.source)
        self.commit(nothing, reader.commit.step, progress, groups, carried._replace(source=source))

    def _require_convertible(self, reader: Reader) -> None:
        """Reads the states that are in another form in a commit, if there are any, before anything is changed.

        Raises:
            ResumeError: they are to be rounded, and are not finite.
            CorruptionError: what was read is damaged.
            TierIOError: a disk or its file system failed.
        """
        converts = {name for name, _ in in_other_forms(reader.manifests[0], self._wanted)}
        if not converts:
            return
        what = copy_ranges(reader.manifests, self._layout, self._wanted.slice)
        order = sorted(what, key=lambda at: what[at][0].target)
        for at, states in zip(order, reader.slots(order), strict=True):
            for copied in what[at]:
                self._masters.require_convertible(copied, states, converts)

    def _take_values(self, reader: Reader, transfer: Transfer | None = None, *, begins_states: bool = False) -> None:
        """Copies states and parameters from the commit of `reader`. Every slot is read once.

        Args:
            reader: of the commit.
            transfer: brings what this rank does not see; None: it sees all.
            begins_states: whether only masters are taken; states are as if no step had been made.
        """
        step, what = reader.commit.step, copy_ranges(reader.manifests, self._layout, self._wanted.slice)
        near = [at for at in what if transfer is None or at[0] in transfer.seen]
        order = sorted(near, key=lambda at: what[at][0].target)
        numels = Counter[int]()
        for ranges in what.values():
            for one in ranges:
                numels[one.target] += one.numel
        with together(self._comm) as check:
            # What is sent comes first: no rank waits for another one that reads its own.
            sent = iter(()) if transfer is None else transfer.receive(check)
            read = chain(sent, zip(order, reader.slots(order), strict=True))
            taken = ((what[at], {MASTER: states[MASTER]} if begins_states else states) for at, states in read)
            converts = {name for name, _ in in_other_forms(reader.manifests[0], self._wanted)}
            self._masters.late.go_to(step, {}, {})  # the reader makes the steps that its chunks owe
            self._masters.take_resharded(taken, numels, step, converts)
        self._all_gather_parameters(step)

    def _as_snapshot(self) -> Snapshot:
        manifest, slots = self.require_last(), self._slots
        assert slots is not None
        assert self._record is not None
        return Snapshot(self._record, manifest, self._paths, slots.paths, self._files)

    def snapshot(self, keep: int | None, target: Path | None) -> tuple[Path, ...]:
        """Copies the last commit, which the next one would replace; see [Note: snapshots] in snapshot.py.

        Every rank has to call it. It changes neither the run nor its commits. What fails on one rank fails on all.

        Args:
            keep: how many of this run's snapshots stay, the newest; None: all. With a `target` those in it are meant.
            target: a directory to which it is copied while training goes on; see [Note: copies of snapshots] in
                snapshot_copy.py. None: it stays where it is made.

        Returns:
            This rank's directories of the snapshot, or of its copy.

        Raises:
            ResumeError: nothing is committed.
            BudgetError: the disks have no room for it.
            PathError: a file or directory cannot be used.
            TierIOError: a disk or its file system failed.
            CorruptionError: what was read is damaged.
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        self.finish_copy(waits=True)
        snapshot = self._as_snapshot()
        # The one of which the last commit is a copy may have the same name.
        if (
            target is not None
            or not self._source
            or self._found_by_first(lambda: self._snapshot_called(snapshot.commit.step, self.last_id)) != snapshot.name
        ):
            self._complete(snapshot)
        if target is not None:
            return self._begin_copy(snapshot, copy_of(snapshot, target), keep)
        # It is the user's from now on.
        self._named = tuple(name for name in self._named if name != snapshot.name)
        if keep is not None:
            self._remove(snapshot, lambda locks: snapshot.superseded(keep, self._named, locks))
        return snapshot.directories

    def _begin_copy(self, snapshot: Snapshot, copied: Snapshot, keep: int | None) -> tuple[Path, ...]:
        """Begins to copy a snapshot that is there.

        Returns:
            This rank's directories of the copy.
        """
        comm, files = self._comm, self._files

        def make_home() -> None:
            for path in copied.paths:
                check_directory(path, files)
                if make_directory(path, files):
                    sync_parent(files, path)

        with together(comm):
            if comm.rank == 0:
                make_home()
        with together(comm):
            make_home()
        exists, undecided = self._found_by_first(lambda: (copied.exists(), copied.undecided()))
        self._clear(copied, undecided)
        if not exists:
            self._require_room(copied)
            with together(comm):
                if comm.rank == 0:
                    copied.begin()
            with together(comm):
                self._copying = SnapshotCopy(snapshot, copied, keep, limit_s=comm.timeout_s, counted=self._count_copied)
        return copied.directories

    def _count_copied(self, nbytes: int) -> None:
        self._timeline.count("snapshot_copied_bytes", nbytes)

    @property
    def copies_of_snapshots(self) -> dict[str, int]:
        """The step of the last snapshot that was copied, 0: none; the bytes of this rank's part of it that are left."""
        copying = self._copying
        left = 0 if copying is None else copying.left
        return {"snapshot_copied_step": self._copied_step, "snapshot_left_bytes": left}

    def finish_copy(self, *, waits: bool) -> None:
        """Takes note of a copy of a snapshot that has ended on all ranks, and removes the snapshot that was copied.

        Every rank has to call it. A copy that failed is told in a warning, and the snapshot stays.

        Args:
            waits: whether one that has not ended is waited for.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        copying, comm = self._copying, self._comm
        if copying is None:
            return
        if not waits and comm.all_reduce_any(not copying.is_done):
            return
        copying.wait_for_part()
        if comm.all_reduce_any(copying.error is not None):
            copying.stop()  # rank 0 waits for a part that does not come
        copying.wait()
        self._copying = None
        told = [
            error for error in all_gather_object(comm, "" if copying.error is None else str(copying.error)) if error
        ]
        copying.let_go()
        if told:
            target = copying.copy.directories[0]
            warnings.warn(
                f"the snapshot of step {copying.copy.commit.step} was not copied to {target}: {told[0]}; it stays in "
                f"{copying.snapshot.directories[0]}",
                stacklevel=2,
            )
            return
        self._copied_step, keep = copying.copy.commit.step, copying.keep
        if keep is not None:
            self._remove(copying.copy, lambda locks: copying.copy.superseded(keep, (), locks))
        if copying.snapshot.name not in self._named:
            self._remove(copying.snapshot, lambda locks: copying.snapshot.free([copying.snapshot.name], locks))

    def stop_copy(self) -> None:
        """Ends the copy that is under way, which is then not whole. Other ranks are not asked."""
        if self._copying is not None:
            self._copying.stop()

    def _complete(self, snapshot: Snapshot) -> None:
        """Makes a snapshot if there is none, and clears away those that are half made or half removed."""
        slots, comm = self._slots, self._comm
        assert slots is not None
        with together(comm):
            slots.require_here()
        exists, undecided = self._found_by_first(lambda: (snapshot.exists(), snapshot.undecided()))
        self._clear(snapshot, undecided)
        if not exists:
            self._make(snapshot)

    def _clear(self, snapshot: Snapshot, names: Sequence[str], *, are_held: bool = False) -> None:
        """Removes what all ranks have of snapshots that are dead, and their homes last."""
        if not names:
            return
        with together(self._comm):
            snapshot.clear(names, are_held=are_held)
        with together(self._comm):
            if self._comm.rank == 0:
                snapshot.clear_homes(names)

    def _require_room(self, snapshot: Snapshot) -> None:
        """Checks that nothing has a snapshot's name, and that there is space for it."""

        def needs() -> list[Need]:
            snapshot.require_no_other()
            return snapshot.needs()

        needed = found_by_all(self._comm, needs, list[Need])
        if self._comm.size > 1:  # machines and devices do not tell what is shared
            disks = share_together(snapshot.paths, self._claims.claimant, self._comm, self._files).disks
            pairs = zip(needed, disks, strict=True)
            needed = [[need._replace(disk=on) for need, on in zip(*pair, strict=True)] for pair in pairs]
        require_space(chain.from_iterable(needed))

    def _make(self, snapshot: Snapshot) -> None:
        """Makes a snapshot that is not there."""
        comm = self._comm
        self._require_room(snapshot)
        try:
            with together(comm):
                if comm.rank == 0:
                    snapshot.begin()
            with together(comm):
                snapshot.make()
        except OffloadError as error:
            if not isinstance(error, RankError):
                with suppress(OffloadError):
                    self._clear(snapshot, [snapshot.name])
            raise
        with together(comm):
            # If this fails, it may be there or not: whoever comes next looks.
            if comm.rank == 0:
                snapshot.decide()

    def _remove(self, snapshot: Snapshot, choose: Callable[[ExitStack], list[str]]) -> None:
        """Removes snapshots of this run. What cannot be removed now is left to the next call.

        Args:
            snapshot: any snapshot of the run; it does the work.
            choose: called on rank 0. It returns the names of those to remove, and gives their locks to its argument.
        """
        comm = self._comm
        with ExitStack() as locks, suppress(TierIOError, OtherRankError):
            names = self._found_by_first(lambda: choose(locks))
            with together(comm):
                if comm.rank == 0:
                    snapshot.withdraw(names)
            self._clear(snapshot, names, are_held=True)

    def _found_by_first(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks.

        Args:
            find: called on rank 0.

        Raises:
            OffloadError: what `find` raises.
        """
        found = found_by_all(self._comm, lambda: find() if self._comm.rank == 0 else None)[0]
        return cast(T, found)

    def require_last(self) -> Manifest:
        """The manifest of the last commit.

        Raises:
            ResumeError: nothing was committed.
            OffloadError: what makes it impossible to go on, also after a rollback.
        """
        self.learn_outcome()
        self._comm.check()
        if self.last is None:
            raise ResumeError("nothing has been committed yet: call commit() before, or let commit_every do it")
        return self.last

    def carried(self) -> Carried:
        """What the last commit carries.

        Raises:
            OffloadError: what `require_last` raises.
            CorruptionError: what was read is damaged.
            PathError: a file or directory cannot be used.
            TierIOError: a disk or its file system failed.
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        self.require_last()
        record, files = self._record, self._files
        assert record is not None
        with together(self._comm):
            if self._carried is not None:
                return self._carried
            manifest = read_manifest(self._home, record, self._comm.rank, files)
            return carried_in(read_extra(self._home, manifest, files))

    def restore(self) -> Manifest:
        """Makes states and parameters those of the last commit, on all ranks. Nothing else may be under way.

        Returns:
            The manifest of that commit.

        Raises:
            OffloadError: what `require_last` raises.
            CorruptionError: what was read is damaged.
            TierIOError: a disk or its file system failed.
            OtherRankError: it failed on another rank.
            RankError: another rank failed, or cannot be reached.
        """
        manifest = self.require_last()
        with together(self._comm):
            self._restore_own(manifest)
        self._all_gather_parameters(manifest.step)
        return manifest

    def _all_gather_parameters(self, step: int) -> None:
        """Gets the parameters of the other ranks.

        Args:
            step: the step whose results they are.
        """
        self._new_params.all_gather((flat.index for flat in self._layout.flats), step)
        for store in self._all_stores.all:
            # Not for what is read ahead for the next step: a chunk that was needed here has been checked already.
            if store is not self._all_stores.states or self._wanted.split_master:
                store.drain()

    def read_ahead(self) -> None:
        """Begins to read the last commit, for a `restore` before anything is leased.

        `restore` raises what goes wrong.
        """
        if self.last is not None:
            with suppress(OffloadError):  # then `restore` begins anew, and all ranks hear of it
                self._go_to(self.last)
                self._is_read_ahead = True

    def _restore_own(self, manifest: Manifest) -> None:
        if not self._is_read_ahead:
            self._go_to(manifest)
        self._is_read_ahead = False
        self._masters.restore(manifest.step)

    def _go_to(self, manifest: Manifest) -> None:
        """Makes the content of all stores what `manifest` names."""
        self.is_outdated = False
        self._masters.late.go_to(manifest.step, manifest.owed, manifest.logs)
        self._versions = [
            {number: Version(slot.step, slot.place, slot.checksum) for number, slot in enumerate(slots)}
            for slots in (manifest.chunks, manifest.copies)[: len(self._stores)]
        ]
        for store in self._all_stores.trained:
            store.reset({})
        for store, versions in zip(self._stores, self._versions, strict=True):
            store.reset(versions)
        self._all_stores.states.expect(chunk.index for chunk in self._layout.chunks)

    @property
    def _stores(self) -> list[Store]:
        """The stores that are committed.

        They are that of the states, and with a split master that of the parameters, which are the other halves.
        """
        params = self._all_stores.params
        assert params is not None or not self._choice.holds_params
        return [self._all_stores.states] + ([params] if params is not None and self._choice.holds_params else [])

    def _flush(self) -> list[dict[int, Version]]:
        """Writes what only RAM, or the device, has newer.

        Returns:
            The version of each chunk that is in its slot, for each of `_stores`.
        """
        versions = [self._all_stores.states.flush()]
        if self._choice.holds_params:
            before = self._versions[0] if self._versions else {}
            changed = {chunk: at.step for chunk, at in versions[0].items() if before.get(chunk) != at}
            self._masters.store_parameters(changed)
        slots = self._slots
        assert slots is not None
        for store in self._stores[1:]:
            found = store.flush()
            # With replicas a rank keeps parameters that others commit.
            versions.append({chunk: found[chunk] for chunk in slots.map.committed_chunks(ChunkKind.PARAMS)})
        return versions

    def _final_if_ambiguous(self, work: Callable[[], None]) -> None:
        """Calls `work`. A failure after which nobody knows what is on the disk is final for the run's health.

        That holds even if an interrupt followed at once and hides the failure.
        """
        before = sys.exception()  # is being handled by the caller
        try:
            work()
        except BaseException as raised:
            error = _cause(raised, before)
            if isinstance(error, OffloadError):
                if not isinstance(error, TierIOError) or error.operation in AMBIGUOUS:
                    self._health.fail(error, is_final=True)
            elif error is not None:
                unknown = TierIOError("sync", error.errno or errno.EIO, str(self._home), 0, 0, str(error))
                self._health.fail(unknown, is_final=True)
            if self._comm.size > 1 and not isinstance(raised, OffloadError):
                self._health.fail(_cut_off(), is_final=True)  # unless it is already
            raise

    def _manifest(
        self,
        step: int,
        progress: Sequence[Progress],
        groups: Sequence[Mapping[str, Any]],
        versions: Sequence[Mapping[int, Version]],
    ) -> Manifest:
        slots = self._slots
        assert slots is not None

        def facts(kind: ChunkKind, versions: Mapping[int, Version]) -> tuple[ChunkFacts, ...]:
            rows = []
            for chunk in self._layout.chunks:
                at, slot = versions[chunk.index], slots.map.at(kind, chunk.index)
                checksum = slots.checksum(slot, at.place) if at.checksum is None else at.checksum
                path = slots.chosen[slot]
                rows.append(
                    ChunkFacts(chunk.flat, chunk.start, chunk.numel, path, at.place, at.step, f"{checksum:016x}")
                )
            return tuple(rows)

        return replace(
            self._wanted,
            run_id=slots.run_id.hex(),
            step=step,
            groups=stored(groups),
            parameters=tuple(
                replace(facts, age=one.step, progress=ProgressFacts.of(one))
                for facts, one in zip(self._wanted.parameters, progress, strict=True)
            ),
            chunks=facts(ChunkKind.STATES, versions[0]),
            copies=facts(ChunkKind.PARAMS, versions[1]) if self._choice.holds_params else (),
            late=LateFacts.of(self._masters.late),
        )


def _id_of(commit: Commit, source: str = "") -> str:
    """What a state dict calls a commit. It is made of the id of the run and the digest of the first manifest.

    Args:
        commit: the record.
        source: what state dicts call the commit that this one is a copy of; "": it is none.
    """
    return source or f"{commit.run_id[:RUN_DIGITS]}-{commit.manifests[0].xxh3}"


def _cause(raised: BaseException, before: BaseException | None) -> OffloadError | OSError | None:
    """The error behind an exception, which an interrupt may have hidden; None: there is none.

    Args:
        raised: the exception.
        before: an exception that was being handled already, and is not the cause.
    """
    error: BaseException | None = raised
    while error is not None and error is not before:
        # A missing file is no cause: where one may be missing, that was handled before the error came.
        if isinstance(error, OffloadError):
            return error
        if isinstance(error, OSError) and is_of_system(error) and not isinstance(error, FileNotFoundError):
            return error
        error = error.__context__
    return None


def _cut_off() -> InterruptedStepError:
    return InterruptedStepError(
        "a commit was interrupted, and this rank cannot know what the others know of it: start again with resume=True, "
        "which finds this commit or the last"
    )
