"""Parameters that stream: the same bits as with parameters on the device, under every disk, copier and depth."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offload import Tuning
from tests.support import models
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import Run, train

STEPS = 5


@cache
def resident(kind: str, accumulation: int) -> Run:
    return train(kind, steps=STEPS, accumulation=accumulation)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_streamed_parameters_change_no_bit(
    kind: str, accumulation: int, param_tier: str, prefetch: int, tmp_path: Path
) -> None:
    tuning = Tuning(chunk="4KiB", prefetch_chunks=prefetch, prefetch_units=prefetch)
    run = train(
        kind,
        steps=STEPS,
        accumulation=accumulation,
        path=tmp_path / "swap",
        param_tier=param_tier,
        cpu_memory="least",
        tuning=tuning,
    )
    run.assert_same_bits(resident(kind, accumulation))
    assert run.stats["gathered_bytes"] > 0
    assert run.stats["peak_cpu_bytes"] <= run.stats["cpu_budget_bytes"]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("split_master", [False, True])
@pytest.mark.parametrize("kind", models.KINDS)
def test_streamed_parameters_under_late_copies_and_a_late_disk_change_no_bit(
    kind: str, split_master: bool, seed: int, tmp_path: Path, copied_by: CopiedBy
) -> None:
    copied_by(lambda: LateCopier(seed))
    options: dict[str, Any] = {"param_tier": "nvme" if seed % 2 else "cpu", "cpu_memory": "4MiB"}
    tuning = Tuning(chunk="4KiB", prefetch_chunks=seed % 5, prefetch_units=seed % 5, split_master=split_master)
    with on_disk(engine=FaultyEngine(seed=seed)):
        run = train(kind, steps=STEPS, path=tmp_path / "swap", tuning=tuning, **options)
    run.assert_same_bits(resident(kind, 1))
