"""Gradients that wait in slots: the same bits as in RAM."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, Tuning
from offload.planner import least_cpu_memory
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import take_step

SEEDS = range(4)


class Wide(nn.Module):
    """Parameters of several chunks of 256 KiB, chunks of several parameters, and one that gets no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(257, 301), nn.Tanh(), nn.Linear(301, 257)) for _ in range(3)
        )
        self.late = nn.Linear(257, 257)

    def forward(self, x: Tensor, use_late: bool) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.late(x) if use_late else x


def run(accumulation: int, **options: Any) -> dict[str, Tensor]:
    model = Wide()
    if options.get("cpu_memory") == "least":
        least = {name: options.get(name) for name in ("param_tier", "grad_tier", "tuning")}
        options["cpu_memory"] = least_cpu_memory(model, accumulation=accumulation, **least)
    found: dict[str, Tensor] = {}
    with OffloadZero(model, accumulation=accumulation, **options) as optimizer:
        for seed in SEEDS:
            for micro in range(accumulation):
                x = torch.randn(3, 257, generator=torch.Generator().manual_seed(100 * seed + micro))
                (model(x, seed > 1).square().mean() / accumulation).backward()
            if seed == 1:
                found["grad"] = optimizer.grad(model.blocks[0][0].weight)  # type: ignore[assignment]
            found[f"norm {seed}"] = optimizer.clip_grad_norm_(0.1)
            take_step(optimizer)
        for name, param in model.named_parameters():
            state = optimizer.state_of(param)
            found |= {f"{name} {kind}": torch.as_tensor(value) for kind, value in state.items()}
        found["peak"] = torch.tensor(optimizer.stats()["peak_cpu_bytes"])
    return found


@cache
def in_ram(accumulation: int) -> dict[str, Tensor]:
    return run(accumulation)


def assert_same(found: dict[str, Tensor], accumulation: int) -> None:
    for name, value in in_ram(accumulation).items():
        assert name == "peak" or torch.equal(found[name], value), name


TUNING = Tuning(chunk="256KiB", threads=1)


@pytest.mark.parametrize("param_tier", ["device", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_in_slots_change_no_bit_and_take_no_ram(accumulation: int, param_tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"param_tier": param_tier, "tuning": TUNING, "cpu_memory": "least"}
    found = run(accumulation, path=tmp_path / "run", grad_tier="nvme", **options)
    assert_same(found, accumulation)
    assert found["peak"] < run(accumulation, path=tmp_path / "other", **options)["peak"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_in_slots_under_late_copies_and_a_late_disk_change_no_bit(
    accumulation: int, seed: int, tmp_path: Path, copied_by: CopiedBy
) -> None:
    copied_by(lambda: LateCopier(seed))
    tier = ("cpu", "nvme")[seed % 2]
    with on_disk(engine=FaultyEngine(seed=seed)):
        found = run(accumulation, path=tmp_path / "run", grad_tier="nvme", param_tier=tier, tuning=TUNING)
    assert_same(found, accumulation)


def test_a_device_that_holds_its_parameters_needs_gradients_in_ram(tmp_path: Path, copied_by: CopiedBy) -> None:
    copied_by(lambda: LateCopier(0))
    with pytest.raises(ConfigError, match="param_tier"):
        OffloadZero(Wide(), path=tmp_path / "run", param_tier="device", grad_tier="nvme")
    with OffloadZero(Wide(), path=tmp_path / "run", grad_tier="nvme") as optimizer:
        assert optimizer.stats()["param_tier"] == "cpu"


def test_chunks_too_small_for_a_sum_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 256KiB"):
        OffloadZero(Wide(), path=tmp_path / "run", grad_tier="nvme", tuning=Tuning(chunk="128KiB"))
