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

from offload.checkpoint.commit import Commit, read_commit
from offload.checkpoint.describe import differences, flats_of, parameters_of
from offload.checkpoint.files import LOCAL, Files
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.places import (
    directories_of,
    last_commit,
    listed,
    require_free,
    require_no_other,
    settle,
    swaps,
)
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


class Places(NamedTuple):
    """Directories of all ranks. own: this rank's; others: other ranks'; named: in `resume`, and in nobody's `path`."""

    own: tuple[Path, ...]
    others: tuple[Path, ...]
    named: tuple[Path, ...]

    @property
    def runs(self) -> tuple[Path, ...]:
        """In which a run goes on."""
        return self.own + self.others


class Resumed(NamedTuple):
    """What a run was resumed from: the step, and what was given to `commit` along with it."""

    step: int
    extra: object


@dataclass(frozen=True)
class Found:
    """A commit that fits the model.

    reader: of it; paths: this run's directories, in the order of its swap files; manifest: this rank's part if its
    slots are used where they lie; None: the layout is another one, and what this rank needs is read by `reader`;
    settled: the directories in which the files of no other run stay; here: what is committed in these, and where; None:
    nothing is, and `reader` reads a snapshot that lies elsewhere.
    """

    reader: Reader
    extra: object
    paths: tuple[Path, ...]
    manifest: Manifest | None
    settled: tuple[Path, ...]
    here: tuple[Path, Commit] | None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is a snapshot, which stays what it is."""
        return self.settled != self.reader.paths

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
        home, commit = self.here or (self.reader.home, self.commit)
        settle(self.settled, home, commit, FILES, locked=False)
        self.require_last()

    def claim(self, *, alone: bool) -> None:
        """Locks what is to be read, and replaced. Args: alone: no other rank reads it. Raises: as `clear_up`."""
        if self.manifest is None:
            self.reader.lock(exclusive=alone and not self.is_elsewhere)
            if self.is_elsewhere:
                found = (swap for place in self.settled for swap in swaps(place))
                replaced = [swap.path for swap in found if swap.run_id == self.commit.run_id]
                self.reader.hold(replaced, exclusive=alone)
        self.require_last()

    def require_last(self) -> None:
        """It was read before any lock was taken. Raises: ResumeError."""
        if not self.reader.is_last() or last_commit(self.settled, FILES) != self.here:
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
    places, run_id = _meet(config, comm)
    with all_or_none(comm):
        found = find(config, places, layout, wanted, groups)
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


def _meet(config: Config, comm: Communicator) -> tuple[Places, bytes]:
    """What ranks have to know of each other before they look for a commit: all directories, and the id of a new run.

    Returns: also 16 bytes, of rank 0. Raises: RankError.
    """
    own = [[str(path.absolute()) for path in paths] for paths in (config.paths, config.origins)]
    told = [json.loads(data) for data in bytes_of_all(comm, json.dumps([new_run_id().hex(), *own]).encode())]
    known = {os.path.realpath(path) for path in config.paths}
    found: list[tuple[Path, ...]] = []
    for which in (1, 2):
        new = dict.fromkeys(path for one in told for path in one[which] if os.path.realpath(path) not in known)
        known |= {os.path.realpath(path) for path in new}
        found.append(tuple(map(Path, new)))
    return Places(config.paths, *found), bytes.fromhex(told[0][0])


def _agree_on(found: Found | None, comm: Communicator) -> Found | None:
    """`found`, if all ranks found the same; used where it lies by all of them, or by none.

    Raises: ResumeError if they did not; RankError.
    """
    if not comm.all_agree("" if found is None else f"{found.commit}"):
        raise ResumeError("the ranks found different commits: give each of them the directories as that run had them")
    if comm.any_true(found is not None and found.manifest is None) and found is not None:
        return replace(found, manifest=None)
    return found


def find(config: Config, places: Places, layout: Layout, wanted: Manifest, groups: int) -> Found | None:
    """The commit to resume from; None for a run that begins anew. Writes nothing, and locks nothing.

    Args: places: from `_meet`; wanted: from `describe`; groups: how many param groups there are.
    Raises: ResumeError (there is one and nobody asked for it, or none; it is of another model), CorruptionError,
    PathError, TierIOError.
    """
    for path in config.paths:
        check_directory(path, resumes=bool(config.resume))
    if not config.resume:
        return None
    meant, settled = _meant(places)
    if last_commit(meant, FILES) is None:
        if config.resume == "auto":
            return None
        raise ResumeError(f'{listed(meant)}: no commit to resume from: give resume="auto" to begin anew where none is')
    reader = Reader(meant, FILES)
    found = differences(reader.manifests[0], replace(wanted, groups=({},) * groups))
    if found:
        more = f"\n... and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
        raise ResumeError(f"{reader.home} holds a commit of something else:\n" + "\n".join(found[:SHOWN]) + more)
    require_no_other(config.paths, reader.commit)
    here = last_commit(settled, FILES)
    as_it_lies = _directories_in_order(config, layout, wanted, reader) if settled == meant else None
    if as_it_lies is not None:
        manifest = reader.manifests[wanted.rank]
        return Found(reader, reader.extra(wanted.rank), as_it_lies, manifest, settled, here)
    # The record stays where it is, if it can: then replacing it is one rename.
    paths = tuple(sorted(config.paths, key=lambda path: here is None or path != here[0]))
    rank = wanted.rank if len(reader.manifests) == wanted.world else 0
    return Found(reader, reader.extra(rank), paths, None, settled, here)


def _meant(places: Places) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The directories of the commit to resume, and those in which the run goes on, where the files of no other stay.

    A snapshot that `resume` names comes before what its run committed later, and stays what it is.
    Raises: ResumeError if another run is committed where it is to go on; as `last_commit`.
    """
    records = ((place, read_commit(place, FILES)) for place in places.named)
    kept = next(((place, record) for place, record in records if record is not None and record.is_snapshot), None)
    if kept is None:
        return places.runs + places.named, places.runs + places.named
    here = last_commit(places.runs, FILES)
    if here is None or (here[1].run_id == kept[1].run_id and not here[1].is_snapshot):
        return places.named, places.runs
    if here[1].replaces == kept[1].run_id:  # it has begun from there, and was cut off
        return places.runs, places.runs
    raise ResumeError(
        f"{here[0]} holds a commit, of step {here[1].step}, that is not of the run of which {kept[0]} is a snapshot: "
        f"give resume=True to continue it, choose another path, or remove it with `offload remove {here[0]}`"
    )


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
