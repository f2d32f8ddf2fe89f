"""What users see of commits: the part of OffloadZero that commits, goes back and exports, and its param groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.attachment import Attachment
from offload.checkpoint.export import export
from offload.checkpoint.extra import memory_of
from offload.checkpoint.manifest import Option
from offload.checkpoint.tensors import Entry
from offload.collectives import Communicator
from offload.commits import Commits
from offload.errors import ClosedError, ConfigError, ResumeError
from offload.layout import Layout
from offload.optim.adopt import require_sound
from offload.resuming import Found, Resumed


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
            "moments are not in a state dict: commit to a path, and give resume=True, for that"
        )
    for number, (group, other) in enumerate(zip(groups, theirs, strict=True)):
        kind = "decoupled_weight_decay"
        if other.get(kind, group[kind]) != group[kind]:
            raise ResumeError(f"param group {number} of the state dict is of {'AdamW' if other[kind] else 'Adam'}")
    require_sound([{**group, **other} for group, other in zip(groups, theirs, strict=True)])
    for group, other in zip(groups, theirs, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


class Committing:
    """The part of OffloadZero that commits, goes back and exports."""

    _model: nn.Module
    _commits: Commits
    _attached: Attachment
    _layout: Layout
    _resumed: Resumed | None
    _pid: int
    _failure: BaseException | None
    _comm: Communicator
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
        Raises: ConfigError (no path, or commit_every=None; extra cannot be stored; the step is committed already);
        TierIOError, and then the last commit is still there; OtherRankError and RankError over several ranks, all of
        which have to call it, each with its own extra.
        """
        self._require_usable()
        self._attached.step_begins()
        self._commit(extra)

    def _commit_if_due(self) -> None:
        if self._commits.is_due(self._step):
            self._commit(None)

    def _commit(self, extra: object) -> None:
        prepare = self._attached.take_outside_writes
        try:
            with self._beside_others():
                self._commits.commit(prepare, self._step, self._ages, self.param_groups, extra)
        finally:
            if self._commits.final is not None:
                self._cut_off(self._commits.final)

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        """What all ranks do together: one that is interrupted in it (Ctrl-C) is elsewhere than the others."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if self._comm.size > 1:
                self._cut_off(error)
            raise

    def snapshot(self, *, keep: int | None = None) -> tuple[Path, ...]:
        """Keeps the last commit, which the next one would replace, for as long as you like.

        It is copied to a directory of its own in each directory of this run, or shares its blocks with the swap file
        where the file system can do that (XFS, Btrfs); `resume=[...]` and `offload inspect`, `verify`, `export` and
        `remove` take these directories as those of any run. Training goes on when it returns, and it is durable then.

        Args: keep: how many snapshots of this run stay, the newest ones, this one among them; None: all.
        Returns: the directories, one for each of this rank's in `path`.
        Raises: ResumeError (nothing was committed), ConfigError (keep), BudgetError (disk space), PathError (something
        else has its name), TierIOError, CorruptionError; OtherRankError and RankError over several ranks, all of which
        have to call it. The run and its last commit stay what they were.
        """
        self._require_usable()
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"keep={keep!r}: give a whole number, at least 1, or None to keep all")
        with self._beside_others():
            return self._commits.snapshot(keep)

    def rollback(self) -> None:
        """Goes back to the last commit, also after an error: states, parameters, hyper-parameters and step.

        Gradients are dropped. Schedulers, data and frozen parameters are the caller's. Over several ranks all have to
        call it, and none can after an error that the others did not have: they are elsewhere, and have to start again.
        Raises: ResumeError if nothing was committed; CorruptionError, TierIOError, OtherRankError, RankError.
        """
        is_elsewhere = self._comm.size > 1 and self._failure is not None
        if os.getpid() != self._pid or isinstance(self._failure, ClosedError) or is_elsewhere:
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

    def _begin_at(self, found: Found) -> None:
        if found.manifest is not None:
            self._return_to_commit()
            return
        committed = found.reader.manifests[0]
        ages = {param.name: param.age for param in committed.parameters}
        take_groups(self.param_groups, committed.groups)
        self._step = committed.step
        self._ages = [ages[spec.name] for spec in self._layout.specs]
        self._commits.take_over(found, self._ages, self.param_groups)

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
