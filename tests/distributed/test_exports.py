"""Exports of several ranks: one writer, whole files, and the same end on every rank that waits for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from offload import OffloadZero, PathError, Tuning
from offload.errors import OtherRankError
from tests.support import models, sharded
from tests.support.ranks import Worlds
from tests.support.toy import take_step

TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
PLACES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, streamed": {"stage": 2, "param_tier": "cpu"},
    "stage 3": {"stage": 3, "param_tier": "cpu"},
}


def _trained(options: dict[str, Any]) -> tuple[torch.nn.Module, OffloadZero]:
    model = models.build("gpt")
    batches = sharded.batches_of("gpt", model, dist.get_rank(), dist.get_world_size())
    optimizer = OffloadZero(model, tier="cpu", tuning=TUNING, **options)
    next(batches)().backward()
    take_step(optimizer)
    return model, optimizer


def _all_export(path: str, options: dict[str, Any]) -> list[tuple[int, bool]]:
    """Of each try: how many files this rank wrote, and whether the model's values are in them."""
    model, optimizer = _trained(options)
    found = []
    with optimizer:
        for number in range(4):
            files = optimizer.export(f"{path}/{number}")
            dist.barrier()
            read = load_file(f"{path}/{number}/model.safetensors")
            values = {name: value.clone() for name, value in model.state_dict().items()}
            same = read.keys() == values.keys() and all(torch.equal(read[name], values[name]) for name in values)
            found.append((len(files), same))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_export_into_one_directory(place: str, worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds(4).run(_all_export, str(tmp_path), PLACES[place], timeout_s=100)
    for tries in zip(*ranks, strict=True):
        assert sum(count for count, _ in tries) == 1
        assert all(same for _, same in tries)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["model.safetensors"]


def _one_exports(path: str, writer: int) -> int:
    _, optimizer = _trained({"stage": 2})
    with optimizer:
        files = optimizer.export(path) if dist.get_rank() == writer else ()
    return len(files)


@pytest.mark.parametrize("writer", [0, 1])
def test_one_rank_exports_by_itself_where_it_has_all_parameters(writer: int, worlds: Worlds, tmp_path: Path) -> None:
    found = worlds(2).run(_one_exports, str(tmp_path / "trained"), writer)
    assert found == [int(rank == writer) for rank in range(2)]
    assert load_file(tmp_path / "trained" / "model.safetensors")


def _cannot(path: str, options: dict[str, Any]) -> tuple[str, bool]:
    """What an export into a directory that is taken raises, and whether the run goes on."""
    model, optimizer = _trained(options)
    batches = sharded.batches_of("gpt", model, dist.get_rank(), dist.get_world_size())
    with optimizer:
        try:
            optimizer.export(path)
        except (PathError, OtherRankError) as error:
            raised = type(error).__name__
        next(batches)().backward()
        take_step(optimizer)
        files = optimizer.export(f"{path}-other")
        dist.barrier()
    return raised, bool(files) == (dist.get_rank() == 0) or options["stage"] < 3


@pytest.mark.parametrize("place", ["stage 2", "stage 3"])
def test_an_export_of_other_values_stays_and_every_rank_knows(place: str, worlds: Worlds, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "model.safetensors").write_bytes(b"somebody's")
    found = worlds(2).run(_cannot, str(taken), PLACES[place])
    others = "OtherRankError" if place == "stage 3" else "PathError"
    assert found == [("PathError", True), (others, True)]
    assert (taken / "model.safetensors").read_bytes() == b"somebody's"


def _differ(path: str) -> str:
    model, optimizer = _trained({"stage": 2})
    buffer: Tensor = torch.full((3,), float(dist.get_rank()))
    model.register_buffer("seen", buffer)
    with optimizer:
        try:
            return f"{len(optimizer.export(path))} files"
        except PathError:
            return "PathError"


def test_ranks_that_would_write_other_values_are_told(worlds: Worlds, tmp_path: Path) -> None:
    """Running statistics are of each rank's own batches."""
    found = worlds(2).run(_differ, str(tmp_path / "trained"))
    assert sorted(found) == ["1 files", "PathError"]
