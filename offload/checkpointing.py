"""What a run finds in its directories before it begins: the commit it resumes from, if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from offload.checkpoint.commit import (
    Commit,
    read_commit,
    read_extra,
    read_manifest,
)
from offload.checkpoint.describe import differences, flats_of, parameters_of
from offload.checkpoint.files import LOCAL, Files
from offload.checkpoint.manifest import Manifest
from offload.config import Config
from offload.errors import ResumeError
from offload.layout import Layout
from offload.module.parameters import is_dense
from offload.store.slots import check_directory, holds_commit

FILES: Files = LOCAL
"""Where commits are written; the tests have one that loses power."""
SHOWN = 5
"""Differences that an error lists."""


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
        """Run id, and the path of each committed slot, as `Stripes` takes them."""
        return bytes.fromhex(self.commit.run_id), [slot.path for slot in self.manifest.slots]


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
    if manifest.split_master != wanted.split_master:
        raise ResumeError(
            f"{home} was committed with Tuning(split_master={manifest.split_master}): give it as that run had it"
        )
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
