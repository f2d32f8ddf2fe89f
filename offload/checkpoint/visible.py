"""Which parts of a commit lie in directories: where machines have disks of their own a rank sees some of them alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from offload.checkpoint.commit import Commit, manifest_name, read_manifest
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.places import listed, names_in, swaps
from offload.errors import CorruptionError, ResumeError
from offload.storage.files import Files

ON_OTHER_MACHINES = (
    "if disks of other machines have them, start as many ranks as committed, each on the machine where it ran, in the "
    "same layout (stage, chunks, directories); or copy all directories to a file system that every rank sees, for any "
    "number of ranks, or to one machine for `offload export`"
)
"""What to do where a rank sees a part of a run alone."""


def directory_of(name: str, places: Sequence[Path], files: Files) -> Path | None:
    """The first of `places` with a file of this name."""
    return next((place for place in places if name in names_in(place, files)), None)


def read_manifests(places: Sequence[Path], commit: Commit, files: Files) -> dict[int, Manifest]:
    """By rank: those manifests of `commit` that lie in `places`. Raises: as `read_manifest`."""
    found = {}
    for rank in range(len(commit.manifests)):
        if (place := directory_of(manifest_name(commit, rank), places, files)) is not None:
            found[rank] = read_manifest(place, commit, rank, files)
    return found


def ranks_in(places: Sequence[Path], commit: Commit, files: Files) -> set[int]:
    """Those that have a swap file of the run of `commit` in `places`. Raises: PathError."""
    return {swap.rank for place in places for swap in swaps(place, files) if swap.run_id == commit.run_id}


def require_manifests(
    commit: Commit, found: Collection[int], lying: Collection[int], places: Sequence[Path], home: Path
) -> None:
    """Whether the manifests of all ranks were found.

    Args: lying: ranks of which a swap file was found; places: where; home: of the record.
    Raises: CorruptionError (a manifest is gone), ResumeError (directories are missing).
    """
    ranks = range(len(commit.manifests))
    if gone := [rank for rank in ranks if rank not in found and rank in lying]:
        name = manifest_name(commit, gone[0])
        raise CorruptionError(
            "is missing: name all directories of the run, or was it moved or removed?", file=str(home / name)
        )
    if missing := [rank for rank in ranks if rank not in found]:
        raise ResumeError(
            f"nothing of {ranks_named(missing)} of the {len(ranks)} that committed step {commit.step} lies in "
            f"{listed(places)}: name all directories of the run; {ON_OTHER_MACHINES}"
        )


def ranks_named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def hidden_ranks(places: Sequence[Path], manifests: Sequence[Manifest], files: Files) -> frozenset[int]:
    """Those of which a swap file with committed slots is in none of `places`. Raises: PathError."""
    found = (swap for place in places for swap in swaps(place, files))
    blocks = [(swap.rank, swap.block) for swap in found if swap.block is not None]
    seen = {(rank, block.stripe[0]) for rank, block in blocks if block.run_id == manifests[0].run_id}
    return frozenset(
        rank for rank, manifest in enumerate(manifests) if any((rank, slot.path) not in seen for slot in manifest.slots)
    )
