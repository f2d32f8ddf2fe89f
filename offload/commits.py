"""Commits of a run, and the way back to the last one: between the parts and what lies in the run's directories.

A commit needs no bytes of parameters: their 16-bit values are what the masters round to. Only with a split master they
are the other halves of what is in the slots, and committed too. The COMMIT record lies in the
first directory, the manifest in each, so that none of them looks like one without a commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from offload import checkpointing
from offload.assembly import Parts
from offload.checkpoint.commit import Commit, remove_superseded, write_commit, write_manifest
from offload.checkpoint.files import sync_directory
from offload.checkpoint.manifest import ChunkFacts, Manifest, Option
from offload.checkpoint.moves import moves
from offload.checkpoint.places import settle
from offload.checkpointing import Found
from offload.config import Config
from offload.errors import ConfigError, OffloadError, ResumeError, TierIOError
from offload.layout import Layout
from offload.store.store import Store, Version

AMBIGUOUS = ("sync", "rename")
"""Operations after whose failure nobody knows what is on the disk."""


class Commits:
    """The commits of one run whose directories are open and locked.

    Args: wanted: from `describe`; found: the commit it resumes from.
    Attributes: last: the manifest of the last durable commit, None before the first.
    Raises: ResumeError if the commit found is no longer the last one.
    """

    def __init__(self, config: Config, layout: Layout, parts: Parts, wanted: Manifest, found: Found | None) -> None:
        self._config = config
        self._layout = layout
        self._parts = parts
        self._wanted = wanted
        self._final: OffloadError | None = None
        self.last: Manifest | None = None
        # Of the last durable commit, by chunk, for each of `_stores`.
        self._versions: list[dict[int, Version]] = []
        self._record: Commit | None = None
        self._replaces: str | None = None
        if found is not None:
            found.require_last()
            self.last = found.manifest

    def is_due(self, step: int) -> bool:
        """Whether `commit_every` wants a commit of `step`."""
        every = self._config.commit_every
        if not every or not step or step % every:
            return False
        return self.last is None or self.last.step != step

    def commit(self, step: int, ages: Sequence[int], groups: Sequence[Mapping[str, Any]], extra: object) -> None:
        """Makes the states as they are now, which nobody is changing, the committed ones; durable when it returns.

        Raises: ConfigError (one slot a chunk, extra cannot be stored, this step is committed already), TierIOError;
        the last commit stays what it was. After a failed sync or rename nothing else can be done: `final` says so.
        """
        slots = self._parts.slots
        if self._config.commit_every is None or slots is None:
            raise ConfigError("commit() needs commit_every: 0 for commit() alone, or a number of steps")
        versions = self._flush()
        if self.last is not None and self.last.step == step:
            if extra is None and versions == self._versions:
                return
            raise ConfigError(f"step {step} is committed already: commit once a step, with all there is to commit")
        manifest = self._manifest(step, ages, groups, versions)
        self._final_if_ambiguous(slots.sync)
        home, *_ = self._config.paths
        if self.last is None:
            for path in self._config.paths:
                sync_directory(checkpointing.FILES, path.absolute().parent)  # the directory itself may be new
        digests = [write_manifest(path, manifest, extra, checkpointing.FILES) for path in self._config.paths]
        commit = Commit(manifest.run_id, step, (digests[0],), self._replaces)
        slots.keep()
        self._final_if_ambiguous(lambda: write_commit(home, commit, checkpointing.FILES))
        for store, of in zip(self._stores, versions, strict=True):
            store.settle(of)
        self.last, self._versions, self._record = manifest, versions, commit
        for path in self._config.paths:
            with suppress(TierIOError):  # they are cleared away next time
                remove_superseded(path, commit, 0, checkpointing.FILES)

    def take_over(self, found: Found, ages: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes states and parameters those of a commit in another layout; see [Note: another layout] in places.py.

        Every slot is read once. Where this run commits, the commit is made anew in its own layout, which decides, and
        the other one is cleared away; else that stays as it is. Nothing else is under way.
        Raises: CorruptionError, TierIOError, and then the other commit is still there.
        """
        reader, step = found.reader, found.commit.step
        what = moves(reader.manifests, self._layout)
        order = sorted(what, key=lambda at: what[at][0].target)
        taken = ((what[at], states) for at, states in zip(order, reader.slots(order), strict=True))
        self._parts.masters.take_over(taken, step)
        for store in self._parts.stores:
            store.drain()
        slots = self._parts.slots
        if self._config.commit_every is not None and slots is not None:
            self._replaces = found.commit.run_id
            self.commit(step, ages, groups, found.extra)
            self._replaces = None
            assert self._record is not None
            settle(reader.paths, self._config.paths[0], self._record, checkpointing.FILES, locked=True)
            slots.took_place()
        reader.close()

    @property
    def final(self) -> OffloadError | None:
        """After which error neither this run nor a rollback can go on."""
        return self._final

    def require_last(self) -> Manifest:
        """Raises: ResumeError if nothing was committed, or what made it impossible to go on."""
        if self._final is not None:
            raise self._final
        if self.last is None:
            raise ResumeError("nothing has been committed yet: there is nothing to go back to")
        return self.last

    def restore(self) -> Manifest:
        """Makes states and parameters those of the last commit. Nothing else is under way.

        Raises: as `require_last`; CorruptionError, TierIOError.
        """
        manifest = self.require_last()
        self._versions = [
            {number: Version(slot.step, slot.place, slot.checksum) for number, slot in enumerate(slots)}
            for slots in (manifest.chunks, manifest.copies)[: len(self._stores)]
        ]
        for store in self._parts.stores:
            store.reset({})
        for store, versions in zip(self._stores, self._versions, strict=True):
            store.reset(versions)
        self._parts.store.expect(chunk.index for chunk in self._layout.chunks)
        self._parts.masters.give_back(manifest.step)
        for store in self._parts.stores:
            store.drain()
        return manifest

    @property
    def _stores(self) -> list[Store]:
        """What is committed: the states, and with a split master the parameters, which are their other halves."""
        params = self._parts.params
        assert params is not None or not self._config.commits_parameters
        return [self._parts.store] + ([params] if params is not None and self._config.commits_parameters else [])

    def _flush(self) -> list[dict[int, Version]]:
        """Writes what only RAM, or the device, has newer. Returns: what is in the slots, for each of `_stores`."""
        versions = [self._parts.store.flush()]
        if self._config.commits_parameters:
            before = self._versions[0] if self._versions else {}
            changed = {chunk: at.step for chunk, at in versions[0].items() if before.get(chunk) != at}
            self._parts.masters.bring_parameters(changed)
        return versions + [store.flush() for store in self._stores[1:]]

    def _final_if_ambiguous(self, work: Any) -> None:
        try:
            work()
        except OffloadError as error:
            if not isinstance(error, TierIOError) or error.operation in AMBIGUOUS:
                self._final = error
            raise

    def _manifest(
        self,
        step: int,
        ages: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        versions: Sequence[Mapping[int, Version]],
    ) -> Manifest:
        slots = self._parts.slots
        assert slots is not None
        found: list[ChunkFacts] = []
        for of in versions:
            for chunk in self._layout.chunks:
                at, number = of[chunk.index], len(found)
                checksum = slots.checksum(number) if at.checksum is None else at.checksum
                path = slots.chosen[number]
                found.append(ChunkFacts(chunk.flat, chunk.start, chunk.numel, path, at.place, at.step, checksum))
        chunks = len(self._layout.chunks)
        return replace(
            self._wanted,
            run_id=slots.run_id.hex(),
            step=step,
            groups=tuple({key: _option(group[key]) for key in group if key != "params"} for group in groups),
            parameters=tuple(replace(facts, age=age) for facts, age in zip(self._wanted.parameters, ages, strict=True)),
            chunks=tuple(found[:chunks]),
            copies=tuple(found[chunks:]),
        )


def _option(value: Any) -> Option:
    if isinstance(value, list | tuple):
        return tuple(_option(item) for item in value)  # type: ignore[misc]
    # Tensors and NumPy's scalars: a learning rate may be either.
    return cast(Option, value.item() if hasattr(value, "item") else value)
