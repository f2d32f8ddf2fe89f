"""Gradients in slots over several ranks: the bits that they have in RAM, at any bucket and chunk size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.errors import ConfigError
from offload.planner import least_cpu_memory
from offload.planner.explain import plan_of
from tests.support.ranks import Worlds
from tests.support.sharded import communicators
from tests.support.toy import take_step

BUCKETS = ["16KiB", "300KiB", "32MiB"]


class Wide(nn.Module):
    """Parameters of several chunks a rank, with blocks of squares across all borders; one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([nn.Linear(317, 701), nn.Linear(701, 317)])
        self.rare = nn.Parameter(torch.zeros(317))
        self.small = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.small + self.rare if whole else x * self.small


def _train(path: str, grads: str, accumulation: int, wire: str, bucket: int | str, options: dict[str, Any]) -> Any:
    """Norms, gradients of a step, and everything after three; on the way gradients are dropped, and a step skipped."""
    model = Wide()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tuning = Tuning(chunk="256KiB", threads=1, bucket=bucket)
    asked = {name: options.get(name) for name in ("param_tier", "stage")}
    memory = least_cpu_memory(model, accumulation=accumulation, ranks=ranks, tuning=tuning, grad_tier=grads, **asked)
    generator = torch.Generator().manual_seed(rank)
    norms: list[float] = []
    found: dict[str, Tensor] = {}
    options = {"path": path, "cpu_memory": memory, "grad_tier": grads, "nonfinite": "skip"} | options
    with communicators(wire), OffloadZero(model, accumulation=accumulation, tuning=tuning, **options) as optimizer:

        def backward(number: int, by: float = 1.0) -> None:
            x = torch.randn(3, 317, generator=generator)
            (model(x, (number + rank) % 2 == 0).square().mean() * by / accumulation).backward()

        for step in range(4):
            if step == 1:  # dropped half way
                backward(0)
                optimizer.zero_grad()
            for number in range(1 if step == 2 else accumulation):  # fewer than declared
                backward(number + step, float("nan") if (step, rank) == (3, ranks - 1) else 1.0)
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            if step == 2:
                for name, param in model.named_parameters():
                    grad = optimizer.grad(param)
                    found[f"{name}.grad"] = torch.zeros(()) if grad is None else grad
            take_step(optimizer)
        optimizer.synchronize()
        stats = optimizer.stats()
        assert (stats["step"], stats["skipped_steps"]) == (3, 1)
        assert stats["peak_cpu_bytes"] <= memory
        for name, param in model.named_parameters():
            with optimizer.gathered(param):
                found[name] = param.detach().clone()
            found |= {f"{name}.{kind}": torch.as_tensor(state) for kind, state in optimizer.state_of(param).items()}
    return stats["nvme_written_bytes"], found | {"norms": torch.tensor(norms[:3])}


def require_same_bits(worlds: Worlds, tmp_path: Path, ranks: int, *args: Any, **options: Any) -> None:
    runs = {
        tier: worlds(ranks).run(_train, str(tmp_path / tier), tier, *args, options, timeout_s=60)
        for tier in ("cpu", "nvme")
    }
    for (without, expected), (written, found) in zip(runs["cpu"], runs["nvme"], strict=True):
        assert written > without
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_in_slots_have_the_bits_of_those_in_ram(
    worlds: Worlds, tmp_path: Path, accumulation: int, bucket: int | str
) -> None:
    require_same_bits(worlds, tmp_path, 2, accumulation, "plain", bucket, stage=2)


@pytest.mark.parametrize(
    ("ranks", "stage", "tier"),
    [
        (1, None, "device"),
        pytest.param(3, 2, "device", marks=pytest.mark.slow),
        pytest.param(2, 2, "nvme", marks=pytest.mark.slow),
        (3, 3, "nvme"),
        pytest.param(2, 3, "cpu", marks=pytest.mark.slow),
    ],
)
def test_on_every_number_of_ranks_and_at_every_stage(
    worlds: Worlds, tmp_path: Path, ranks: int, stage: int | None, tier: str
) -> None:
    wire = "plain" if ranks == 1 else "late"
    require_same_bits(worlds, tmp_path, ranks, 2, wire, "300KiB", stage=stage, param_tier=tier)


def _whole_at_stage_1(path: str) -> str:
    options: dict[str, Any] = {"path": path, "grad_tier": "nvme", "stage": 1, "tuning": Tuning(threads=1)}
    OffloadZero(Wide(), **options).close()
    with pytest.raises(ConfigError) as caught:
        OffloadZero(Wide(), accumulation=2, **options)
    return str(caught.value)


def test_whole_gradients_stay_in_ram(worlds: Worlds, tmp_path: Path) -> None:
    for said in worlds(2).run(_whole_at_stage_1, str(tmp_path / "run")):
        assert "choose stage=2, or leave grad_tier out" in said


def _moved(path: str, accumulation: int) -> tuple[int, int, int, int, int]:
    """Bytes read and written in three steps, those planned, and what buffers may hold meanwhile."""
    model = Wide()
    tuning = Tuning(chunk="256KiB", threads=1, bucket="300KiB")
    options: dict[str, Any] = {"path": path, "grad_tier": "nvme", "stage": 2}  # the states stay in RAM
    options |= {"accumulation": accumulation, "tuning": tuning}
    planned = plan_of(model, direct=True, ranks=2, **options).place()
    with OffloadZero(model, **options) as optimizer:
        for _ in range(3):
            for _ in range(accumulation):
                (model(torch.ones(1, 317), True).sum() / accumulation).backward()
            take_step(optimizer)
        optimizer.synchronize()
        stats = optimizer.stats()
        moved = stats["nvme_read_bytes"], stats["nvme_written_bytes"]
        held = 3 * accumulation * sum(pool.buffer_bytes for pool in planned.pools.values())
        return *moved, 3 * planned.read_bytes, 3 * planned.written_bytes, held


@pytest.mark.parametrize("accumulation", [1, 2])
def test_chunks_move_once_a_round(worlds: Worlds, tmp_path: Path, accumulation: int) -> None:
    for read, written, may_be_read, may_be_written, held in worlds(2).run(_moved, str(tmp_path / "run"), accumulation):
        assert written == may_be_written
        # What is still in a buffer at its next use is not read.
        assert may_be_read - (0 if accumulation == 1 else held) <= read <= may_be_read
