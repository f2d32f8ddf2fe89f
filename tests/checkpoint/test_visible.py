"""What of a commit one machine sees, where other machines have the rest."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.checkpoint import recovery
from offload.checkpoint.commit import Commit
from offload.checkpoint.live import hidden_ranks, ranks_in
from offload.checkpoint.manifest import Digest, Manifest
from offload.errors import CorruptionError
from offload.io.engine import IOFile
from offload.io.files import LOCAL, Files
from offload.ranks import agreement
from offload.ranks.communicator import SingleProcess
from offload.storage.directories import swap_name
from offload.storage.swap_file import CommittedFile
from tests.support.committed import RUN, manifest_of, superblock

OTHER = "f" * 32
COMMIT = Commit(RUN, 7, (Digest(1, "0" * 32),) * 2)


@pytest.fixture
def manifests() -> list[Manifest]:
    """Of two ranks, each with slots on two paths."""
    return [manifest_of(rank, world=2, paths=2) for rank in range(2)]


def put(place: Path, manifest: Manifest, path: int, **changes: object) -> None:
    block = superblock(manifest, path, **changes)
    (place / swap_name(str(changes.get("run_id", RUN)), manifest.rank)).write_bytes(block)


def test_files_of_other_runs_are_no_part_of_a_commit(places: list[Path], manifests: list[Manifest]) -> None:
    put(places[0], manifests[0], 0)
    put(places[1], manifests[1], 0, run_id=OTHER)
    assert ranks_in(places, COMMIT, LOCAL, range(8)) == {0}
    put(places[1], manifests[1], 0)
    assert ranks_in(places, COMMIT, LOCAL, range(8)) == {0, 1}
    assert ranks_in(places[1:], COMMIT, LOCAL, range(8)) == {1}


def test_a_rank_is_hidden_if_any_of_its_files_with_slots_is(places: list[Path], manifests: list[Manifest]) -> None:
    assert hidden_ranks(places, manifests, LOCAL, {0, 1}) == {0, 1}
    for number, place in enumerate(places):
        put(place, manifests[0], number)
    assert hidden_ranks(places, manifests, LOCAL, {0, 1}) == {1}
    put(places[0], manifests[1], 0)
    assert hidden_ranks(places, manifests, LOCAL, {0, 1}) == {1}
    assert not hidden_ranks(places, manifests, LOCAL, {0})
    put(places[1], manifests[1], 1, run_id=OTHER)
    assert hidden_ranks(places, manifests, LOCAL, {0, 1}) == {1}
    put(places[1], manifests[1], 1)
    assert hidden_ranks(places, manifests, LOCAL, {0, 1}) == frozenset()


def test_a_file_without_slots_is_not_missed(places: list[Path]) -> None:
    """As a rank with fewer chunks than paths has it."""
    manifest = manifest_of(share=0, world=1)
    assert {slot.path for slot in manifest.slots} == {0}
    put(places[0], manifest, 0)
    assert hidden_ranks(places, [manifest], LOCAL, {0}) == frozenset()


class TwoMachines(SingleProcess):
    """This rank is 0 and sees its own manifest; rank 1 has the other, and sends what it is told to."""

    def __init__(self, sent: dict[int, bytes]) -> None:
        super().__init__()
        self.size = 2
        self.told: list[bool] = []
        self._sent = sent

    def all_reduce_any(self, value: bool) -> bool:
        self.told.append(value)
        return value

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack([values.flatten(), values.flatten().view(3, 2).flip(1).flatten()])


def test_a_manifest_that_one_rank_cannot_take_in_fails_on_all(
    places: list[Path], manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = TwoMachines({1: b"damaged on the way"})
    monkeypatch.setattr(recovery, "manifests_in", lambda *_: {0: places[0]})
    monkeypatch.setattr(recovery, "read_manifest", lambda *_: manifests[0])
    monkeypatch.setattr(recovery, "ranks_in", lambda *_: {0})
    monkeypatch.setattr(recovery, "all_gather_object", lambda *_: [{}, comm._sent])
    monkeypatch.setattr(agreement, "all_gather_object", lambda *_: [])
    with pytest.raises(CorruptionError):
        recovery.read_together({0, 1}, places, places[0], COMMIT, comm, LOCAL)
    assert comm.told[-1] is True, "the other rank waits for this one"


def test_an_exclusive_lock_is_asked_for_on_a_file_that_may_be_written(
    places: list[Path], manifests: list[Manifest]
) -> None:
    """NFS gives it to nobody else."""

    class OnNFS(Files):
        def lock(self, file: IOFile, *, exclusive: bool) -> None:
            writes = fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if exclusive and not writes:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    put(places[0], manifests[0], 0)
    place = places[0] / swap_name(RUN, 0)
    CommittedFile(place, OnNFS(), exclusive=True).close()
    CommittedFile(place, OnNFS()).close()
