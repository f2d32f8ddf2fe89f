"""Commits of a run, and the way back to the last one: between the parts and what lies in the run's directories.

A commit needs no bytes of parameters: their 16-bit values are what the masters round to. The COMMIT record lies in the
first directory, the manifest in each, so that none of them looks like one without a commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from offload.assembly import Parts
from offload.attachment import Attachment
from offload.checkpoint.commit import (
    Commit,
    read_commit,
    read_extra,
    read_manifest,
    remove_superseded,
    write_commit,
    write_manifest,
)
from offload.checkpoint.describe import differences, flats_of, parameters_of
from offload.checkpoint.export import export
from offload.checkpoint.extra import memory_of
from offload.checkpoint.files import LOCAL, Files, sync_directory
from offload.checkpoint.manifest import ChunkFacts, Manifest, Option
from offload.checkpoint.tensors import Entry
from offload.config import Config
from offload.errors import ClosedError, ConfigError, OffloadError, ResumeError, TierIOError
from offload.layout import Layout
from offload.module.parameters import is_dense
from offload.store.slots import check_directory, holds_commit
from offload.store.store import Version

FILES: Files = LOCAL
"""Where commits are written; the tests have one that loses power."""
SHOWN = 5
"""Differences that an error lists."""
AMBIGUOUS = ("sync", "rename")
"""Operations after whose failure nobody knows what is on the disk."""


class Resumed(NamedTuple):
    """What a run was resumed from: the step, and what was given to `commit` along with it."""

    step: int
    extra: object


@dataclass(frozen=True)
class Found:
    """A commit that fits the model, before any file was opened."""

    commit: Commit
    manifest: Manifest
    extra: object

    @property
    def slots(self) -> tuple[bytes, list[int]]:
        """Run id, and the path of each chunk, as `Stripes` takes them."""
        return bytes.fromhex(self.commit.run_id), [chunk.path for chunk in self.manifest.chunks]


def describe(config: Config, layout: Layout, params: Sequence[nn.Parameter]) -> Manifest:
    """The manifest of this run as far as it is known before it begins: no chunks, no groups."""
    shapes = [tuple(param.shape) for param in params]
    # What has holes gets memory of its own, row-major.
    strides = [(p if is_dense(p) else torch.empty(p.shape, device="meta")).stride() for p in params]
    return Manifest(
        run_id="0" * 32,
        step=0,
        rank=0,
        world=1,
        paths=max(len(config.paths), 1),
        places=config.places,
        compute_dtype=str(config.compute_dtype).removeprefix("torch."),
        split_master=config.split_master,
        groups=(),
        parameters=parameters_of(layout, shapes, strides, [0] * len(params)),
        flats=flats_of(layout),
        chunks=(),
    )


def find(config: Config, layout: Layout, wanted: Manifest, groups: int) -> Found | None:
    """The commit to resume from; None for a run that begins anew. Writes nothing, and locks nothing.

    Args: wanted: from `describe`; groups: how many param groups there are.
    Raises: ResumeError (there is one and nobody asked for it, or none; it is of another model), CorruptionError,
    PathError, TierIOError.
    """
    for path in config.paths:
        check_directory(path, resumes=bool(config.resume))
    if not config.resume:
        return None
    home = config.paths[0]
    commit = read_commit(home, FILES)
    if commit is None:
        elsewhere = [path for path in config.paths[1:] if holds_commit(path)]
        if elsewhere:
            raise ResumeError(
                f"{elsewhere[0]} belongs to a committed run whose COMMIT record is not in {home}: give all the "
                "directories as that run had them"
            )
        if config.resume == "auto":
            return None
        raise ResumeError(f'{home} holds no commit to resume from: give resume="auto" to begin anew where none is')
    if len(commit.manifests) != 1:
        raise ResumeError(f"{home} was committed by {len(commit.manifests)} ranks, and this run is one")
    manifest = read_manifest(home, commit, 0, FILES)
    found = differences(manifest, replace(wanted, groups=({},) * groups))
    if found:
        more = f"\n... and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
        raise ResumeError(f"{home} holds a commit of something else:\n" + "\n".join(found[:SHOWN]) + more)
    _require_same_layout(manifest, wanted, layout, home)
    return Found(commit, manifest, read_extra(home, manifest, FILES))


def _require_same_layout(manifest: Manifest, wanted: Manifest, layout: Layout, home: Path) -> None:
    """Raises: ResumeError: this version only reuses slots where they lie."""
    if manifest.paths != wanted.paths:
        raise ResumeError(f"{home} was committed on {manifest.paths} paths, not {wanted.paths}: give the same ones")
    if manifest.split_master:
        raise ResumeError(f"{home} holds split masters, which this version cannot resume")
    chunks = [(chunk.flat, chunk.start, chunk.numel) for chunk in layout.chunks]
    if [(chunk.flat, chunk.start, chunk.numel) for chunk in manifest.chunks] != chunks:
        largest = 4 * max((chunk.numel for chunk in manifest.chunks), default=0)
        raise ResumeError(
            f"{home} was committed in other chunks, the largest of {largest} bytes: give Tuning(chunk=...) as that run "
            "had it"
        )
    names = [param.name for param in wanted.parameters]
    if manifest.flats != wanted.flats or [param.name for param in manifest.parameters] != names:
        raise ResumeError(f"{home} was committed with its units or parameters in another order: build them as then")


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
        self._versions: dict[int, Version] = {}
        if found is not None:
            # It was read before the lock was taken.
            if read_commit(config.paths[0], FILES) != found.commit:
                raise ResumeError(f"{config.paths[0]}: another run has just committed here: try again")
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
        versions = self._parts.store.flush()
        if self.last is not None and self.last.step == step:
            if extra is None and versions == self._versions:
                return
            raise ConfigError(f"step {step} is committed already: commit once a step, with all there is to commit")
        manifest = self._manifest(step, ages, groups, versions)
        self._final_if_ambiguous(slots.sync)
        home, *_ = self._config.paths
        if self.last is None:
            for path in self._config.paths:
                sync_directory(FILES, path.absolute().parent)  # the directory itself may be new
        digests = [write_manifest(path, manifest, extra, FILES) for path in self._config.paths]
        commit = Commit(manifest.run_id, step, (digests[0],))
        self._final_if_ambiguous(lambda: write_commit(home, commit, FILES))
        self._parts.store.settle(versions)
        self.last, self._versions = manifest, versions
        for path in self._config.paths:
            with suppress(TierIOError):  # they are cleared away next time
                remove_superseded(path, commit, 0, FILES)

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
        self._versions = {
            number: Version(chunk.step, chunk.place, chunk.checksum) for number, chunk in enumerate(manifest.chunks)
        }
        store = self._parts.store
        store.reset(self._versions)
        for other in (self._parts.streamed, self._parts.stored):
            if other is not None:
                other.reset({})
        store.expect(chunk.index for chunk in self._layout.chunks)
        self._parts.masters.give_back(manifest.step)
        for other in self._parts.stores:
            other.drain()
        return manifest

    def _final_if_ambiguous(self, work: Any) -> None:
        try:
            work()
        except OffloadError as error:
            if not isinstance(error, TierIOError) or error.operation in AMBIGUOUS:
                self._final = error
            raise

    def _manifest(
        self, step: int, ages: Sequence[int], groups: Sequence[Mapping[str, Any]], versions: Mapping[int, Version]
    ) -> Manifest:
        slots = self._parts.slots
        assert slots is not None
        chunks = []
        for chunk in self._layout.chunks:
            at = versions[chunk.index]
            checksum = slots.checksum(chunk.index) if at.checksum is None else at.checksum
            path = slots.chosen[chunk.index]
            chunks.append(ChunkFacts(chunk.flat, chunk.start, chunk.numel, path, at.place, at.step, checksum))
        return replace(
            self._wanted,
            run_id=slots.run_id.hex(),
            step=step,
            groups=tuple({key: _option(group[key]) for key in group if key != "params"} for group in groups),
            parameters=tuple(replace(facts, age=age) for facts, age in zip(self._wanted.parameters, ages, strict=True)),
            chunks=tuple(chunks),
        )


def _option(value: Any) -> Option:
    if isinstance(value, list | tuple):
        return tuple(_option(item) for item in value)  # type: ignore[misc]
    # Tensors and NumPy's scalars: a learning rate may be either.
    return cast(Option, value.item() if hasattr(value, "item") else value)


@torch.no_grad()
def take_groups(groups: Sequence[dict[str, Any]], committed: Sequence[Mapping[str, Option]]) -> None:
    """Gives param groups the hyper-parameters that were committed."""
    for group, options in zip(groups, committed, strict=True):
        for name, value in options.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def groups_state(groups: Sequence[Mapping[str, Any]], step: int, paths: Sequence[Path]) -> dict[str, Any]:
    """See OffloadZero.state_dict."""
    params = [param for group in groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    names = [str(path) for path in paths]
    return {
        "state": {},
        "param_groups": [{**group, "params": [numbers[param] for param in group["params"]]} for group in groups],
        "step": step,
        "path": names[0] if len(names) == 1 else names or None,
    }


def load_groups(groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any], step: int) -> None:
    """See OffloadZero.load_state_dict."""
    theirs = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if [len(group["params"]) for group in theirs] != sizes:
        raise ResumeError(f"the state dict's groups do not match the {len(sizes)} groups of {sizes} parameters")
    if state_dict.get("step") != step:
        raise ResumeError(
            f"the state dict is of step {state_dict.get('step')}, this optimizer is at step {step}, and masters and "
            "moments are not in a state dict: give commit_every and resume=True for that"
        )
    for group, other in zip(groups, theirs, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


class Committing:
    """The part of OffloadZero that commits, goes back and exports."""

    _model: nn.Module
    _commits: Commits
    _attached: Attachment
    _resumed: Resumed | None
    _pid: int
    _failure: BaseException | None
    _step: int
    _ages: list[int]
    param_groups: list[dict[str, Any]]

    if TYPE_CHECKING:  # a method here would hide torch's

        def zero_grad(self, set_to_none: bool = True) -> None: ...

        def _require_usable(self) -> None: ...

        def _cut_off(self, error: BaseException) -> None: ...

    @property
    def resumed(self) -> Resumed | None:
        """The step that this run was resumed at, and the extra committed with it; None if it began anew."""
        return self._resumed

    def commit(self, extra: object = None) -> None:
        """Makes this step the one to come back to, at the end of an iteration; durable when it returns.

        Args: extra: what else the loop needs to go on: plain values, containers, tensors; no objects.
        Raises: ConfigError (no commit_every; extra cannot be stored; the step is committed already); TierIOError, and
        then the last commit is still there.
        """
        self._require_usable()
        self._attached.step_begins()
        self._commit(extra)

    def _commit_if_due(self) -> None:
        if self._commits.is_due(self._step):
            self._commit(None)

    def _commit(self, extra: object) -> None:
        self._attached.take_outside_writes()
        try:
            self._commits.commit(self._step, self._ages, self.param_groups, extra)
        finally:
            if self._commits.final is not None:
                self._cut_off(self._commits.final)

    def rollback(self) -> None:
        """Goes back to the last commit, also after an error: states, parameters, hyper-parameters and step.

        Gradients are dropped. Schedulers, data and frozen parameters are the caller's.
        Raises: ResumeError if nothing was committed; CorruptionError, TierIOError.
        """
        if os.getpid() != self._pid or isinstance(self._failure, ClosedError):
            self._require_usable()
        self._commits.require_last()
        try:
            self._attached.abandon()
            self._return_to_commit()
        except BaseException as error:
            self._failure = error
            raise
        self._failure = None
        self.zero_grad()

    def _return_to_commit(self) -> None:
        manifest = self._commits.restore()
        take_groups(self.param_groups, manifest.groups)
        self._step = manifest.step
        self._ages = [facts.age for facts in manifest.parameters]

    def export(self, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Writes the model as it is now, under its own names and in its own dtypes, as safetensors.

        The files are what `from_pretrained` of transformers and `safetensors` read; large models get several and an
        index. Returns: the files. Raises: PathError, BudgetError (disk space), ConfigError, TierIOError.
        """
        self._require_usable()
        self._attached.synchronize()
        state = self._model.state_dict()
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        return export(Path(directory), (_entry(name, tensor) for name, tensor in tensors.items()))


def _entry(name: str, tensor: Tensor) -> Entry:
    def pieces() -> Iterator[memoryview]:
        yield memory_of(tensor.cpu())

    return Entry(name, tensor.dtype, tuple(tensor.shape), pieces)
