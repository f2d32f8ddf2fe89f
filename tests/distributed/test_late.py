"""Idle experts owe their steps over ranks: the bits of one process that makes all of them in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.checkpoint.export import entries, export
from offload.checkpoint.reader import Reader
from offload.planner import least_cpu_memory
from tests.distributed.test_training import trained
from tests.support import models, sharded
from tests.support.cases import products
from tests.support.ranks import Worlds

MATRIX = models.Sparse.WIDTH**2
TUNING = Tuning(chunk="256KiB", threads=1, bucket="64KiB")
"""A chunk is one expert."""


def tiles(experts: int, **options: Any) -> Tuning:
    """Args: experts: of a tile, equally many of each rank's."""
    return replace(TUNING, tile=2 * experts * MATRIX, **options)


def on_disk(path: Path, **options: Any) -> dict[str, Any]:
    """Options of a run in the least RAM."""
    path = path / "swap"
    return {"tier": "nvme", "param_tier": "nvme", "path": str(path), "cpu_memory": "least"} | options


CASES = products([2, 4], [1, 2], ["cpu", "nvme"], often=[(2, 1, "nvme"), (2, 2, "cpu"), (4, 1, "cpu")])


@pytest.mark.parametrize(("ranks", "accumulation", "grad_tier"), CASES)
def test_ranks_that_owe_different_steps_have_the_bits_of_one_process(
    worlds: Worlds, ranks: int, accumulation: int, grad_tier: str, tmp_path: Path
) -> None:
    """Also where one of them has tokens for an expert that another one has to step first, and in one order."""
    options = on_disk(tmp_path, tuning=tiles(ranks), accumulation=accumulation, grad_tier=grad_tier)
    runs = trained(worlds, "sparse", ranks, 6, stage=3, wire="ordered", **options)
    late = [run.stats["late_bytes"] for run in runs]
    assert all(late)
    assert len(set(late)) > 1


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_that_have_copies_make_all_steps_in_time(worlds: Worlds, stage: int, tmp_path: Path) -> None:
    """One of them may use a parameter alone, whose steps another one would have to make."""
    runs = trained(worlds, "sparse", 2, 4, stage=stage, **on_disk(tmp_path, tuning=tiles(2)))
    assert [run.stats["late_bytes"] for run in runs] == [0, 0]


class Leg(NamedTuple):
    """What there is after some steps. Attributes: owing: chunks of this rank; values: by name, those of all ranks."""

    owing: int
    values: dict[str, Tensor]


def _leg(path: str, experts: int, late: bool, steps: int, reads: bool) -> Leg:
    """Goes on for `steps` steps, and commits. Args: reads: whether what is owed is read, and then gone back from."""
    model, ranks = models.build("sparse"), dist.get_world_size()
    options: dict[str, Any] = {
        "param_tier": "nvme",
        "stage": 3 if ranks > 1 else None,
        "tuning": tiles(experts, late=late),
    }
    memory = least_cpu_memory(model, ranks=ranks, **options) + (
        3 << 20
    )  # a resume in another layout reads slots of the old one
    options |= {"path": path, "commit_every": 0, "resume": "auto", "cpu_memory": memory}
    with sharded.communicators("ordered"), OffloadZero(model, **options) as optimizer:
        batches = sharded.batches_of("sparse", model, dist.get_rank(), ranks)
        done = optimizer.resumed.step if optimizer.resumed else 0
        for _ in range(done):
            next(batches)
        for _ in range(steps):
            next(batches)().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()  # so no update is pending, and units are fetched ahead
        optimizer.commit()
        owing = optimizer.stats()["owing_chunks"]
        if reads:
            _values(model, optimizer)
            assert not optimizer.stats()["owing_chunks"]
            optimizer.rollback()
            assert optimizer.stats()["owing_chunks"] == owing
        return Leg(owing, _values(model, optimizer))


def _values(model: torch.nn.Module, optimizer: OffloadZero) -> dict[str, Tensor]:
    with optimizer.gathered(model):
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{kind}": torch.as_tensor(value) for kind, value in optimizer.state_of(param).items()}
    return found


def test_a_run_goes_on_with_other_ranks_and_tiles(worlds: Worlds, tmp_path: Path) -> None:
    """What is committed says what each rank owes, and whoever reads it makes these steps."""
    legs = [(2, 2), (2, 2), (4, 4), (1, 1)]
    for number, (ranks, experts) in enumerate(legs):
        both = [
            worlds(ranks).run(_leg, str(tmp_path / str(late)), experts, late, 3, number == 1, timeout_s=170)
            for late in (True, False)
        ]
        for found, wanted in zip(*both, strict=True):
            assert not wanted.owing
            for name, value in wanted.values.items():
                assert torch.equal(found.values[name], value), name
        assert any(found.owing for found in both[0])
        with Reader([tmp_path / "True"]) as reader:
            assert sum(len(one.owed) for one in reader.manifests) == sum(found.owing for found in both[0])
            assert not [one.error for one in reader.verify() if one.error is not None]
            export(tmp_path / f"exported{number}", entries(reader))
        for name, value in load_file(tmp_path / f"exported{number}" / "model.safetensors").items():
            assert torch.equal(value, both[1][0].values[name]), name
