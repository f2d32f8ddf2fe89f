"""Commits of a run, and the return to the last one.

A commit needs no bytes of parameters: their 16-bit values are what the masters round to. Only with a split master they
are the other halves of what is in the slots, and committed too. The COMMIT record lies in the first directory, that of
rank 0 if there are several, a manifest in each, so that none of them looks like one without a commit.

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
it. So the commit is noted as pending first, in one assignment. Until that is cleared, whatever uses the last commit, or
writes to a slot, first calls `know`: it reads the record. If that is the pending one, it is synced and taken over; if
not, nothing was decided. With several ranks one cannot know alone what the others have heard: then it is final.
"""

from __future__ import annotations

import errno
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.checkpoint import recovery as resuming
from offload.checkpoint.atomic_file import sync_directory
from offload.checkpoint.commit import Commit, read_commit, remove_superseded, write_commit, write_manifest
from offload.checkpoint.extra import carried_in, stored
from offload.checkpoint.manifest import ChunkFacts, Digest, Manifest, differences
from offload.checkpoint.reader import Reader
from offload.checkpoint.recovery import RecoveryPlan
from offload.checkpoint.reshard import moves
from offload.checkpoint.snapshot import RUN_DIGITS, Need, Snapshot, require_space, snapshots_in
from offload.dist.agreement import agree_on_error, all_gather_object
from offload.errors import (
    ConfigError,
    InterruptedStepError,
    OffloadError,
    OtherRankError,
    RankError,
    ResumeError,
    TierIOError,
)
from offload.model.master_weights import MasterWeights
from offload.optim.adam import NewParameters
from offload.optim.adopt import require_sound
from offload.run import Run, Stores
from offload.storage.chunk_cache import Store, Version
from offload.storage.files import Files
from offload.storage.swap_file import Stripes

AMBIGUOUS = ("sync", "rename")
"""Operations after whose failure nobody knows what is on the disk."""
_DONE, _FAILED, _FINAL = range(3)
"""How a rank's part went, in what ranks tell each other."""


class _Pending(NamedTuple):
    """A commit that this process may have decided; see [Note: a commit that is cut off]."""

    manifest: Manifest
    versions: list[dict[int, Version]]
    record: Commit


class Commits:
    """The commits of one run whose directories are open and locked.

    Args: slots: the swap files; masters, new_params: through which parameters are restored; wanted: from `describe`;
    found: the commit that the run resumes from.
    Attributes: last: the manifest of the last durable commit, None before the first.
    Raises: ResumeError if the commit found is no longer the last one.
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
        self._config = run.config
        self._layout = run.layout
        self._comm = run.comm
        self._slots = slots
        self._all_stores = stores
        self._masters = masters
        self._new_params = new_params
        self._wanted = wanted
        self._final: OffloadError | None = None
        self.last: Manifest | None = None
        # Of the last durable commit, by chunk, for each of `_stores`.
        self._versions: list[dict[int, Version]] = []
        self._record: Commit | None = None
        self._pending: _Pending | None = None
        self._replaces: str | None = None
        self._is_coming = False
        # What state dicts name: whether the last commit is among it, and the snapshots of earlier ones.
        self._is_named = False
        self._named: tuple[str, ...] = ()
        # Of the snapshot that the last commit is a copy of.
        self._came_from: str | None = None
        if found is not None:
            found.require_last()
            self._named = found.extra.named
            self.last = found.manifest
            self._record = None if found.manifest is None else found.commit

    @property
    def last_id(self) -> str | None:
        """What state dicts call the last commit; None if nothing was committed."""
        return None if self.last is None or self._record is None else self._came_from or _id_of(self._record)

    def is_due(self, step: int) -> bool:
        """Whether `commit_every` wants a commit of `step`, and it is not there. Raises: as `know`."""
        self.know()
        return self._config.is_due(step) and (self.last is None or self.last.step != step)

    def commit(
        self,
        prepare: Callable[[], None],
        step: int,
        ages: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        extra: object,
    ) -> None:
        """Makes the states as they are now, which nobody is changing, the committed ones; durable when it returns.

        Every rank has to call it, and on each it does all or nothing: see [Note: commits over ranks].

        Args: prepare: called first; what it raises counts as the commit's failure.
        Raises: ConfigError (one slot a chunk, extra cannot be stored, this step is committed already), PathError (a
        directory or a swap file was moved, removed or cut off), TierIOError, OtherRankError, RankError; the last commit
        stays what it was, but for a RankError, after which a resume finds this one or the last. After a failed sync or
        rename nothing else can be done: `final` says so.
        """
        with self._together():
            self.know()
            if self._slots is not None:
                self._slots.require_here()
            prepare()
        self._keep_named(step)
        with self._together():
            written = self._write(step, ages, groups, extra)
        if written is None:
            return
        manifest, versions, digest = written
        commit = Commit(manifest.run_id, step, self._digests(digest), self._replaces)
        self._decide(_Pending(manifest, versions, commit))
        for path in self._config.paths:
            with suppress(TierIOError):  # they are cleared away next time
                remove_superseded(path, commit, self._comm.rank, self._files)

    def _decide(self, pending: _Pending) -> None:
        """Makes `pending` the last commit. Whatever is raised, it is known whether it is, or final."""
        self._pending = pending
        try:
            with self._together():
                if self._comm.rank == 0:
                    self._final_if_ambiguous(lambda: write_commit(self._home, pending.record, self._files))
            # Only now does this rank know.
            self._take_note(pending)
        except BaseException as error:
            if self._comm.size > 1 and isinstance(error, OffloadError):
                self._pending = None  # all ranks know that it was not, or that this is final
            with suppress(OffloadError):  # what is being raised says more; whoever comes next hears of this one
                self.know()
            raise

    def _take_note(self, pending: _Pending) -> None:
        """`pending` is the last commit. May be cut off anywhere and called again."""
        for store, of in zip(self._stores, pending.versions, strict=True):
            store.set_committed(of)
        self.last, self._versions, self._record = pending
        self._is_named, self._came_from = False, None
        self._pending = None

    def know(self) -> None:
        """Finds out how a commit ended that was cut off; see [Note: a commit that is cut off].

        Raises: what makes it impossible to go on, as `final`.
        """
        pending = self._pending
        if pending is not None and self._final is None:
            if self._comm.size > 1:
                self._final = _cut_off()
            else:
                self._final_if_ambiguous(lambda: self._look(pending))
        if self._final is not None:
            raise self._final

    def _look(self, pending: _Pending) -> None:
        """Takes note of `pending` if it was decided."""
        try:
            is_decided = read_commit(self._home, self._files) == pending.record
        except OffloadError as error:
            self._final = error
            raise
        if is_decided:
            sync_directory(self._files, self._home)
            self._take_note(pending)
        else:
            self._pending = None

    @property
    def _files(self) -> Files:
        """What the directories of this run are reached through."""
        slots = self._slots
        return resuming.FILES if slots is None else resuming.FILES.within(slots.directories)

    @property
    def _home(self) -> Path:
        """The directory of the COMMIT record."""
        return self._config.paths[0]

    def _write(
        self, step: int, ages: Sequence[int], groups: Sequence[Mapping[str, Any]], extra: object
    ) -> tuple[Manifest, list[dict[int, Version]], Digest] | None:
        """This rank's part before the decision, durable: what is in the slots. None: all of it is committed already."""
        slots = self._slots
        if self._config.commit_every is None or slots is None:
            raise ConfigError("commit() needs a path, and commit_every: 0 for commit() alone, or a number of steps")
        require_sound(groups)
        stored(groups)
        versions = self._flush()
        if self.last is not None and self.last.step == step:
            if carried_in(extra).extra is None and versions == self._versions:
                return None
            raise ConfigError(
                f"step {step} is committed already: commit once a step, with all there is to commit; state_dict() "
                "commits, too"
            )
        manifest = self._manifest(step, ages, groups, versions)
        self._final_if_ambiguous(slots.sync)
        if self.last is None:
            for path in self._config.paths:
                sync_directory(self._files, path.parent)  # the directory itself may be new
        carried = carried_in(extra)._replace(named=self._named)
        digests = [write_manifest(path, manifest, carried, self._files) for path in self._config.paths]
        slots.require_here()
        slots.keep()
        return manifest, versions, digests[0]

    def _digests(self, own: Digest) -> tuple[Digest, ...]:
        """Of all ranks' manifests."""
        line = torch.frombuffer(bytearray(own.size.to_bytes(8, "little") + bytes.fromhex(own.xxh3)), dtype=torch.uint8)
        rows = [bytes(row.tolist()) for row in self._comm.all_gather(line)]
        return tuple(Digest(int.from_bytes(row[:8], "little"), row[8:].hex()) for row in rows)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What fails here on one rank fails on all, and what is final on one is final on all.

        Raises: OtherRankError where nothing was wrong; RankError.
        """
        try:
            yield
        except Exception:
            self._worst(_FAILED if self._final is None else _FINAL)
            raise
        worst = self._worst(_DONE)
        if worst != _DONE:
            error = OtherRankError(
                "another rank could not do its part of this commit, so that the last one stays what it was: that "
                "rank's own error says why"
            )
            self._final = error if worst == _FINAL else None
            raise error

    def _worst(self, outcome: int) -> int:
        """Of all ranks."""
        return int(self._comm.all_gather(torch.tensor([outcome], dtype=torch.uint8, device="cpu")).max())

    def take_over(self, found: RecoveryPlan, ages: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes states and parameters those of a commit in another layout; see [Note: another layout] in scan.py.

        Every slot is read once. Where this run commits, the commit is made anew in its own layout, which decides, and
        the other one is cleared away; else that stays as it is. Nothing else is under way.
        Raises: CorruptionError, TierIOError, and then the other commit is still there.
        """
        reader, step = found.reader, found.commit.step
        assert reader is not None
        self._take_values(reader)
        slots = self._slots
        if self._config.commit_every is not None and slots is not None:
            self._replaces = found.commit.run_id
            self.commit(_nothing, step, ages, groups, found.extra)
            self._replaces = None
            assert self._record is not None
            found.finish(self._record, self._comm, _not_restored())
            slots.was_renamed()
        reader.close()

    def name_last(self) -> int:
        """A state dict names the last commit: before another one replaces it, it becomes a snapshot.

        Returns: the bytes that this takes. Raises: BudgetError (disk space), CorruptionError, TierIOError.
        """
        part = self._as_snapshot()
        needs = part.needs()
        if not self._is_named:
            if self._came_from is None and part.name not in self._named:
                part.require_name()
            require_space(needs)
            self._is_named = True
        return sum(need.nbytes for need in needs)

    def _keep_named(self, step: int) -> None:
        """Makes a snapshot of the last commit if a state dict names it, and takes those away that are too many."""
        if self.last is None or self.last.step == step or self._slots is None:
            return
        if not self._comm.all_gather(torch.tensor([self._is_named], dtype=torch.uint8, device="cpu")).any():
            return
        part = self._as_snapshot()
        if self._came_from is None:
            if part.name in self._named:
                # Of the same step, before the run went back to an earlier one.
                self._remove(part, [part.name])
            self.snapshot(None)
        named = [*(one for one in self._named if one != part.name), part.name]
        with ExitStack() as held:
            self._remove(part, part.free(named[: -self._config.keep], held))
        self._named = tuple(named[-self._config.keep :])
        self._is_named = False

    def snapshot_of(self, step: int, name: object) -> Reader:
        """The snapshot of the commit that a state dict calls `name`.

        Raises: ResumeError if there is none, or it is of another model; CorruptionError, PathError, TierIOError.
        """
        home, steps = self._config.paths[0], []
        for directory in snapshots_in(home, self._files):
            if (record := read_commit(home / directory, self._files)) is None:
                continue
            steps.append(record.step)
            if (record.step, _id_of(record)) == (step, name):
                reader = Reader([path / directory for path in self._config.paths], self._files)
                if found := differences(reader.manifests[0], self._wanted):
                    raise ResumeError(f"{home / directory} is of another model:\n" + "\n".join(found))
                return reader
        last = "nothing" if self.last is None else f"step {self.last.step}"
        raise ResumeError(
            f"the commit of step {step} that this state dict names is gone: {home} holds {last}, and snapshots of "
            f"steps {', '.join(map(str, sorted(steps))) or '(none)'}; OffloadZero(keep=...) says how many stay"
        )

    def go_back_to(self, reader: Reader, ages: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes states and parameters those of a snapshot, and commits them. The last commit has been restored before.

        Raises: CorruptionError, TierIOError, and then the last commit is what it was; as `commit`.
        """
        self._take_values(reader)
        self.commit(_nothing, reader.commit.step, ages, groups, reader.extra())
        self._came_from = _id_of(reader.commit)
        reader.close()

    def _take_values(self, reader: Reader) -> None:
        """Copies states and parameters from `reader`'s commit. Every slot is read once."""
        step, what = reader.commit.step, moves(reader.manifests, self._layout)
        order = sorted(what, key=lambda at: what[at][0].target)
        taken = ((what[at], states) for at, states in zip(order, reader.slots(order), strict=True))
        numels = Counter[int]()
        for ranges in what.values():
            for one in ranges:
                numels[one.target] += one.numel
        with agree_on_error(self._comm, _not_restored()):
            self._masters.take_over(taken, numels, step)
        self._put_together(step)

    def _as_snapshot(self) -> Snapshot:
        manifest, slots = self.require_last(), self._slots
        assert slots is not None
        assert self._record is not None
        return Snapshot(self._record, manifest, self._config.paths, slots.paths, self._files)

    def snapshot(self, keep: int | None) -> tuple[Path, ...]:
        """Keeps the last commit aside, whatever this run writes meanwhile; see [Note: snapshots] in snapshot.py.

        Every rank has to call it. Args: keep: how many of this run's stay, the newest; None: all.
        Returns: this rank's directories of it.
        Raises: ResumeError (nothing is committed), BudgetError, PathError, TierIOError, CorruptionError,
        OtherRankError, RankError. Run and commits are what they were. What fails on one rank fails on all.
        """
        part, slots, comm = self._as_snapshot(), self._slots, self._comm
        assert slots is not None
        with ExitStack() as held:
            with agree_on_error(comm, _not_kept()):
                slots.require_here()
                own: tuple[list[str], list[str], list[str], bool] = (part.decided(), [], [], False)
                if comm.rank == 0:
                    surplus = [] if keep is None else part.superseded(keep, held)
                    own = (own[0], surplus, [name for name in part.kept() if name not in surplus], part.is_kept())
            told = [json.loads(data) for data in all_gather_object(comm, json.dumps(own).encode())]
            _, surplus, others, is_kept = told[0]
            with agree_on_error(comm, _not_kept()):
                part.clear(decided={name for decided, *_ in told for name in decided})
            if not is_kept:
                self._keep(part)
            with suppress(TierIOError, OtherRankError):  # the next one clears away what is left
                with agree_on_error(comm, _not_kept()):
                    part.finish([part.name])
                self._remove(part, surplus)
                part.finish(others)
        return part.directories

    def _remove(self, part: Snapshot, names: Sequence[str]) -> None:
        """Takes snapshots of this run away. Args: part: of any snapshot."""
        with agree_on_error(self._comm, _not_kept()):
            part.retire(names)
        with agree_on_error(self._comm, _not_kept()):
            if self._comm.rank == 0:
                part.withdraw(names)
        part.clear(names)

    def _keep(self, part: Snapshot) -> None:
        """Makes a snapshot that is not there."""
        comm = self._comm
        with agree_on_error(comm, _not_kept()):
            part.require_no_other()
            needs = [asdict(need) for need in part.needs()]
        told = all_gather_object(comm, json.dumps(needs).encode())
        require_space(Need(**need) for data in told for need in json.loads(data))
        try:
            with agree_on_error(comm, _not_kept()):
                part.make()
        except OffloadError as error:
            if not isinstance(error, RankError):
                with suppress(TierIOError):
                    part.clear([part.name])
            raise
        with agree_on_error(comm, _not_kept()):
            # If this fails, it may be there or not: whoever comes next looks.
            if comm.rank == 0:
                part.decide()

    @property
    def final(self) -> OffloadError | None:
        """After which error neither this run nor a rollback can go on."""
        return self._final

    def require_last(self) -> Manifest:
        """Raises: ResumeError if nothing was committed, or what made it impossible to go on."""
        self.know()
        self._comm.check()
        if self.last is None:
            raise ResumeError("nothing has been committed yet: there is nothing to go back to")
        return self.last

    def restore(self) -> Manifest:
        """Makes states and parameters those of the last commit, on all ranks. Nothing else is under way.

        Raises: as `require_last`; CorruptionError, TierIOError, OtherRankError, RankError.
        """
        manifest = self.require_last()
        with agree_on_error(self._comm, _not_restored()):
            self._restore_own(manifest)
        self._put_together(manifest.step)
        return manifest

    def _put_together(self, step: int) -> None:
        """Gets the other ranks' parameters. Args: step: whose."""
        for flat in self._layout.flats:
            self._new_params.all_gather(flat.index, step)
        for store in self._all_stores.all:
            # What is read ahead for the next step is not waited for: a chunk that it needs has been checked already.
            if store is not self._all_stores.states or self._config.split_master:
                store.drain()

    def read_ahead(self) -> None:
        """Begins to read the last commit, for a `restore` before anything is leased, which says what goes wrong."""
        if self.last is not None:
            with suppress(OffloadError):  # then `restore` begins anew, and all ranks hear of it
                self._go_to(self.last)
                self._is_coming = True

    def _restore_own(self, manifest: Manifest) -> None:
        if not self._is_coming:
            self._go_to(manifest)
        self._is_coming = False
        self._masters.give_back(manifest.step)

    def _go_to(self, manifest: Manifest) -> None:
        """Everything in the stores is what `manifest` names."""
        self._versions = [
            {number: Version(slot.step, slot.slot, slot.checksum) for number, slot in enumerate(slots)}
            for slots in (manifest.chunks, manifest.copies)[: len(self._stores)]
        ]
        for store in self._all_stores.trained:
            store.reset({})
        for store, versions in zip(self._stores, self._versions, strict=True):
            store.reset(versions)
        self._all_stores.states.expect(chunk.index for chunk in self._layout.chunks)

    @property
    def _stores(self) -> list[Store]:
        """What is committed: the states, and with a split master the parameters, which are their other halves."""
        params = self._all_stores.params
        assert params is not None or not self._config.commits_parameters
        return [self._all_stores.states] + ([params] if params is not None and self._config.commits_parameters else [])

    def _flush(self) -> list[dict[int, Version]]:
        """Writes what only RAM, or the device, has newer. Returns: what is in the slots, for each of `_stores`."""
        versions = [self._all_stores.states.flush()]
        if self._config.commits_parameters:
            before = self._versions[0] if self._versions else {}
            changed = {chunk: at.step for chunk, at in versions[0].items() if before.get(chunk) != at}
            self._masters.bring_parameters(changed)
        own = range(len(self._layout.chunks))  # with replicas a rank keeps parameters that others commit
        for store in self._stores[1:]:
            found = store.flush()
            versions.append({chunk: found[chunk] for chunk in own})
        return versions

    def _final_if_ambiguous(self, work: Callable[[], None]) -> None:
        """Notes as final what leaves it open what is on the disk, also where an interrupt followed it at once."""
        before = sys.exception()  # is being handled by the caller
        try:
            work()
        except BaseException as raised:
            error = _cause(raised, before)
            if isinstance(error, OffloadError):
                is_known = isinstance(error, TierIOError) and error.operation not in AMBIGUOUS
                self._final = self._final if is_known else error
            elif error is not None:
                self._final = TierIOError("sync", error.errno or errno.EIO, str(self._home), 0, 0, str(error))
            if self._comm.size > 1 and not isinstance(raised, OffloadError) and self._final is None:
                self._final = _cut_off()
            raise

    def _manifest(
        self,
        step: int,
        ages: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        versions: Sequence[Mapping[int, Version]],
    ) -> Manifest:
        slots = self._slots
        assert slots is not None
        found: list[ChunkFacts] = []
        for of in versions:
            for chunk in self._layout.chunks:
                at, number = of[chunk.index], len(found)
                checksum = slots.checksum(number) if at.checksum is None else at.checksum
                path = slots.chosen[number]
                found.append(
                    ChunkFacts(chunk.flat, chunk.start, chunk.numel, path, at.slot, at.step, f"{checksum:016x}")
                )
        chunks = len(self._layout.chunks)
        return replace(
            self._wanted,
            run_id=slots.run_id.hex(),
            step=step,
            groups=stored(groups),
            parameters=tuple(replace(facts, age=age) for facts, age in zip(self._wanted.parameters, ages, strict=True)),
            chunks=tuple(found[:chunks]),
            copies=tuple(found[chunks:]),
        )


def _id_of(commit: Commit) -> str:
    """What a state dict calls a commit: its run, and the digest of its first manifest."""
    return f"{commit.run_id[:RUN_DIGITS]}-{commit.manifests[0].xxh3}"


def _cause(raised: BaseException, before: BaseException | None) -> OffloadError | OSError | None:
    """The error behind `raised`, which an interrupt may have hidden.

    Args: before: an exception that was being handled already, and is not the cause.
    """
    error: BaseException | None = raised
    while error is not None and error is not before:
        # Where a file may be missing, that it is comes before, and is nothing wrong.
        if isinstance(error, OffloadError | OSError) and not isinstance(error, FileNotFoundError):
            return error
        error = error.__context__
    return None


def _cut_off() -> InterruptedStepError:
    return InterruptedStepError(
        "a commit was interrupted, and this rank cannot know what the others know of it: start again with resume=True, "
        "which finds this commit or the last"
    )


def _not_restored() -> OtherRankError:
    return OtherRankError("another rank could not go to the last commit: its own error says why")


def _not_kept() -> OtherRankError:
    return OtherRankError("another rank could not keep its part of this snapshot: its own error says why")


def _nothing() -> None:
    return None
