"""What a run finds in its directories before it begins: the commit it resumes from, if there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from offload.checkpoint.commit import Commit
from offload.checkpoint.describe import differences, flats_of, parameters_of
from offload.checkpoint.files import LOCAL, Files
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.places import directories_of, last_commit, listed, require_free, require_no_other, settle
from offload.checkpoint.reader import Reader
from offload.collectives import Communicator
from offload.config import Config
from offload.errors import ResumeError
from offload.layout import Layout
from offload.module.parameters import is_dense
from offload.module.sharing import all_or_none, bytes_of_all
from offload.store.directories import check_directory
from offload.store.slots import new_run_id

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
    """A commit that fits the model.

    reader: of it; paths: this run's directories, in the order of its swap files; manifest: this rank's part if its
    slots are used where they lie; None: the layout is another one, and what this rank needs is read by `reader`.
    """

    reader: Reader
    extra: object
    paths: tuple[Path, ...]
    manifest: Manifest | None

    @property
    def commit(self) -> Commit:
        return self.reader.commit

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

    def clear_up(self) -> None:
        """After a run that was cut off; for one rank, before any locks what is to be read.

        Raises: PathInUseError (a live run), PathError, TierIOError, ResumeError (another run has just committed).
        """
        require_free(self.paths, self.commit)
        settle(self.reader.paths, self.reader.home, self.commit, FILES, locked=False)
        self.require_last()

    def claim(self, *, alone: bool) -> None:
        """Locks what is to be read. Args: alone: no other rank reads it. Raises: as `clear_up`."""
        if self.manifest is None:
            self.reader.lock(exclusive=alone)
        self.require_last()

    def require_last(self) -> None:
        """It was read before any lock was taken. Raises: ResumeError."""
        if not self.reader.is_last():
            raise ResumeError(f"{self.reader.home}: another run has just committed here: try again")


def describe(config: Config, layout: Layout, params: Sequence[nn.Parameter]) -> Manifest:
    """The manifest of this run as far as it is known before it begins: no chunks, no groups."""
    shapes = [tuple(param.shape) for param in params]
    # What has holes gets memory of its own, row-major.
    strides = [(p if is_dense(p) else torch.empty(p.shape, device="meta")).stride() for p in params]
    return Manifest(
        run_id="0" * 32,
        step=0,
        rank=layout.rank,
        world=layout.ranks,
        paths=max(len(config.paths), 1),
        places=config.places,
        compute_dtype=str(config.compute_dtype).removeprefix("torch."),
        split_master=config.split_master,
        groups=(),
        parameters=parameters_of(layout, shapes, strides, [0] * len(params)),
        flats=flats_of(layout, [layout.part_of(flat.index) for flat in layout.flats]),
        chunks=(),
    )


def find_together(
    undo: ExitStack, config: Config, comm: Communicator, layout: Layout, wanted: Manifest, groups: int
) -> tuple[Config, Found | None, bytes]:
    """The commit that all ranks resume, locked as far as it is only read; None for a run that begins anew.

    Args: wanted, groups: as `find`; undo: gets the closing of what is opened.
    Returns: also the config with the directories in the order of their files, and 16 bytes, the id of a new run.
    Raises: as `find`; PathInUseError; on ranks where nothing was wrong ConfigError; RankError.
    """
    config, run_id = _meet(config, comm)
    with all_or_none(comm):
        found = find(config, layout, wanted, groups)
    found = _agree_on(found, comm)
    if found is not None:
        config = replace(config, paths=found.paths)
        undo.callback(found.reader.close)
        with all_or_none(comm):
            if comm.rank == 0:
                found.clear_up()
        with all_or_none(comm):
            found.claim(alone=comm.size == 1)
    return config, found, run_id


def _meet(config: Config, comm: Communicator) -> tuple[Config, bytes]:
    """What ranks have to know of each other before they look for a commit: all directories, and the id of a new run.

    Returns: the config, in which the other ranks' directories are among the origins; 16 bytes, of rank 0.
    Raises: RankError.
    """
    run_id = new_run_id()
    own = [str(path.absolute()) for path in (*config.paths, *config.origins)]
    told = [json.loads(data) for data in bytes_of_all(comm, json.dumps([run_id.hex(), own]).encode())]
    if config.resume:
        mine = {os.path.realpath(path) for path in config.paths}
        others = dict.fromkeys(path for _, paths in told for path in paths if os.path.realpath(path) not in mine)
        config = replace(config, origins=tuple(map(Path, others)))
    return config, bytes.fromhex(told[0][0])


def _agree_on(found: Found | None, comm: Communicator) -> Found | None:
    """`found`, if all ranks found the same; used where it lies by all of them, or by none.

    Raises: ResumeError if they did not; RankError.
    """
    if not comm.all_agree("" if found is None else f"{found.commit}"):
        raise ResumeError("the ranks found different commits: give each of them the directories as that run had them")
    if comm.any_true(found is not None and found.manifest is None) and found is not None:
        return replace(found, manifest=None)
    return found


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
    places = (*config.paths, *config.origins)
    if last_commit(places, FILES) is None:
        if config.resume == "auto":
            return None
        raise ResumeError(f'{listed(places)}: no commit to resume from: give resume="auto" to begin anew where none is')
    reader = Reader(places, FILES)
    found = differences(reader.manifests[0], replace(wanted, groups=({},) * groups))
    if found:
        more = f"\n... and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
        raise ResumeError(f"{reader.home} holds a commit of something else:\n" + "\n".join(found[:SHOWN]) + more)
    require_no_other(config.paths, reader.commit)
    as_it_lies = _directories_in_order(config, layout, wanted, reader)
    if as_it_lies is not None:
        manifest = reader.manifests[wanted.rank]
        return Found(reader, reader.extra(wanted.rank), as_it_lies, manifest)
    # The record stays where it is, if it can: then replacing it is one rename.
    paths = tuple(sorted(config.paths, key=lambda path: path != reader.home))
    rank = wanted.rank if len(reader.manifests) == wanted.world else 0
    return Found(reader, reader.extra(rank), paths, None)


def _directories_in_order(config: Config, layout: Layout, wanted: Manifest, reader: Reader) -> tuple[Path, ...] | None:
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
    lying = directories_of(reader.commit.run_id, wanted.rank, config.paths)
    return tuple(lying[number] for number in range(wanted.paths)) if len(lying) == wanted.paths else None
