"""What of a commit one machine sees, where other machines have the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.checkpoint.commit import Commit
from offload.checkpoint.manifest import Digest, Manifest
from offload.checkpoint.visible import hidden_ranks, ranks_in
from offload.store.files import LOCAL
from tests.support.committed import RUN, manifest_of, superblock

OTHER = "f" * 32
COMMIT = Commit(RUN, 7, (Digest(1, "0" * 32),) * 2)


@pytest.fixture
def manifests() -> list[Manifest]:
    """Of two ranks, each with slots on two paths."""
    return [manifest_of(rank, world=2, paths=2) for rank in range(2)]


def put(place: Path, manifest: Manifest, path: int, **changes: object) -> None:
    (place / f"offload-rank{manifest.rank}.swap").write_bytes(superblock(manifest, path, **changes))


def test_files_of_other_runs_are_no_part_of_a_commit(places: list[Path], manifests: list[Manifest]) -> None:
    put(places[0], manifests[0], 0)
    put(places[1], manifests[1], 0, run_id=OTHER)
    assert ranks_in(places, COMMIT, LOCAL) == {0}
    put(places[1], manifests[1], 0)
    assert ranks_in(places, COMMIT, LOCAL) == {0, 1}
    assert ranks_in(places[1:], COMMIT, LOCAL) == {1}


def test_a_rank_is_hidden_if_any_of_its_files_with_slots_is(places: list[Path], manifests: list[Manifest]) -> None:
    assert hidden_ranks(places, manifests, LOCAL) == {0, 1}
    for number, place in enumerate(places):
        put(place, manifests[0], number)
    assert hidden_ranks(places, manifests, LOCAL) == {1}
    put(places[0], manifests[1], 0)
    assert hidden_ranks(places, manifests, LOCAL) == {1}
    put(places[1], manifests[1], 1, run_id=OTHER)
    assert hidden_ranks(places, manifests, LOCAL) == {1}
    put(places[1], manifests[1], 1)
    assert hidden_ranks(places, manifests, LOCAL) == frozenset()


def test_a_file_without_slots_is_not_missed(places: list[Path]) -> None:
    """As a rank with fewer chunks than paths has it."""
    manifest = manifest_of(share=0, world=1)
    assert {slot.path for slot in manifest.slots} == {0}
    put(places[0], manifest, 0)
    assert hidden_ranks(places, [manifest], LOCAL) == frozenset()
