"""What ranks find out together about the directories of a run, of which each may see a part.

[Note: disks of machines]
A directory is known by what lies in it, never by its name: `/scratch/run` is another one on every machine with disks of
its own, and the same on all where it is a shared file system. So each rank looks for records in the directories that
were given to itself, and tells what it sees; every directory of a run was given to somebody, and all ranks decide on
the same facts. The record names the manifests by digest; those that a rank does not see come from one that does. A
manifest names slots by checksum, and these are looked for wherever a name leads: what has the run's id and the checksum
is the slot. Only a rank to which a directory was given changes what is in it, one rank after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.checkpoint.commit import Commit, manifest_told, parse_commit, serialise_commit
from offload.checkpoint.manifest import Manifest, serialise
from offload.checkpoint.places import Looked, look, together
from offload.checkpoint.visible import ranks_in, read_manifests, require_manifests
from offload.config import Config
from offload.dist.agreement import agree_on_error, all_gather_object
from offload.dist.communicator import Communicator
from offload.errors import OffloadError
from offload.storage.files import Files
from offload.storage.swap_file import new_run_id


class Places(NamedTuple):
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


class Seen(NamedTuple):
    """What all ranks see. runs: in the directories in which the run goes on; named: in those that `resume` names."""

    runs: Looked
    named: Looked


def meet(config: Config, comm: Communicator) -> tuple[Places, bytes]:
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
    return Places(config.paths, others, named, config.origins), bytes.fromhex(told[0][0])


def look_together(places: Places, comm: Communicator, files: Files) -> Seen:
    """Every rank looks in its own directories. Raises: as `look`; ConfigError where nothing was wrong; RankError."""
    with agree_on_error(comm):
        own = [look(places.own, files), look(places.origins, files)]
    told = [json.loads(data) for data in all_gather_object(comm, json.dumps([_told(one) for one in own]).encode())]
    runs, named = (together([_looked(one[which]) for one in told]) for which in (0, 1))
    # What one rank names in `resume` may be in another one's `path`.
    known = {commit for _, commit in runs.records}
    return Seen(runs, replace(named, records=tuple(at for at in named.records if at[1] not in known)))


def _told(looked: Looked) -> dict[str, Any]:
    return {
        "records": [(str(place.absolute()), serialise_commit(commit).decode()) for place, commit in looked.records],
        "begun": [*looked.begun],
        "held": [(str(place.absolute()), [*runs]) for place, runs in looked.held],
    }


def _looked(told: dict[str, Any]) -> Looked:
    return Looked(
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
        found, lying = read_manifests(places, commit, files), ranks_in(places, commit, files)
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
