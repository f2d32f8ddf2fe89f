"""A share of the states on the devices of several ranks: the bits of one process, whatever the share.

Devices count as having memory of their own, and copies end as late as they may.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offload import Tuning
from tests.distributed import test_loss_scale as scaled
from tests.distributed.test_resharding import _goes_on
from tests.distributed.test_training import TUNING, trained
from tests.support import sharded
from tests.support.cases import products, some
from tests.support.device_memory import memory_for, placed
from tests.support.ranks import Worlds
from tests.support.training import Run

SHARES = (0.0, 1 / 7, 1 / 2, 1.0)
IN_SLOTS = Tuning(chunk="256KiB", threads=1, bucket=4096)
"""Chunks of gradients on NVMe are whole blocks of sums."""
TILES = Tuning(chunk=4096, threads=1, bucket=512, tile=512, late=False)


def require_share(runs: list[Run], share: float, memory: int) -> None:
    """On each rank there is no more than there is room for, and not nothing."""
    for run in runs:
        there, chunks = run.stats["device_chunks"], run.stats["chunks"]
        assert run.stats["peak_device_bytes"] <= memory
        assert there == chunks if share == 1 else there == 0 if share == 0 else there < chunks
    assert share < 1 / 2 or any(run.stats["device_chunks"] for run in runs)


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation", "share"),
    products(
        ["mlp", "gpt", "conv"],
        [1, 2],
        [1, 2],
        SHARES,
        often=[("mlp", 2, 1, 1 / 2), ("gpt", 1, 1, 1 / 7), ("conv", 2, 2, 1 / 2), ("mlp", 1, 2, 1.0)],
    ),
)
def test_no_share_changes_a_bit(worlds: Worlds, kind: str, stage: int, accumulation: int, share: float) -> None:
    """Gradients are clipped in each step."""
    options: dict[str, Any] = {"tier": "cpu", "stage": stage, "accumulation": accumulation, "tuning": TUNING}
    memory = memory_for(kind, share, 2, **options)
    runs = trained(worlds, kind, 2, 4, apart=True, wire="late", device_memory=memory, **options)
    require_share(runs, share, memory)


STREAMED = {
    "partitioned": {"stage": 3, "param_tier": "cpu"},
    "partitioned, on disks": {"stage": 3, "param_tier": "nvme"},
    "whole": {"stage": 2, "param_tier": "cpu"},
    "whole, on disks": {"stage": 1, "param_tier": "nvme"},
    "partitioned, gradients on disks": {"stage": 3, "param_tier": "nvme", "grad_tier": "nvme", "tuning": IN_SLOTS},
    "whole, gradients on disks": {"stage": 2, "param_tier": "cpu", "grad_tier": "nvme", "tuning": IN_SLOTS},
}


@pytest.mark.parametrize(
    ("kind", "streamed", "accumulation", "share"),
    products(
        ["mlp", "gpt"],
        STREAMED,
        [1, 2],
        SHARES,
        often=[
            ("mlp", "partitioned", 1, 1 / 2),
            ("gpt", "partitioned, on disks", 2, 1 / 7),
            ("mlp", "whole", 2, 1 / 2),
            ("gpt", "partitioned, gradients on disks", 2, 1 / 2),
            ("mlp", "whole, gradients on disks", 1, 1.0),
        ],
    ),
)
def test_and_their_parameters_may_stream(
    worlds: Worlds, kind: str, streamed: str, accumulation: int, share: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tier": "nvme", "accumulation": accumulation, "tuning": TUNING} | STREAMED[streamed]
    memory = memory_for(kind, share, 2, **options)
    given = options | {"path": str(tmp_path / "run"), "device_memory": memory, "cpu_memory": "2MiB"}
    runs = trained(worlds, kind, 2, 3, apart=True, wire="late", **given)
    for run in runs:
        assert run.stats["peak_device_bytes"] <= memory
    there = sum(run.stats["device_chunks"] for run in runs)
    assert there if share >= 1 / 2 else there == 0 or share


@pytest.mark.parametrize(
    ("use", "stage", "accumulation"),
    some(
        [(use, stage, m) for use in ("grouped", "indexed") for stage in (1, 2, 3) for m in (1, 2)][:-2],
        [("grouped", 3, 1), ("indexed", 2, 2)],
    ),
)
def test_so_may_tiles(worlds: Worlds, use: str, stage: int, accumulation: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tier": "nvme", "param_tier": "cpu", "stage": stage, "accumulation": accumulation}
    options["tuning"] = TILES
    memory = memory_for(use, 1 / 2, 2, **options)
    given = options | {"path": str(tmp_path / "run"), "device_memory": memory, "cpu_memory": "2MiB"}
    for run in trained(worlds, use, 2, 4, apart=True, wire="late", **given):
        assert run.stats["peak_device_bytes"] <= memory
        assert 0 < run.stats["device_chunks"] < run.stats["chunks"]


@pytest.mark.parametrize(("stage", "accumulation"), some([(1, 1), (2, 2), (3, 1)], [(2, 2)]))
def test_all_ranks_skip_a_step_whose_gradients_are_not_finite(
    worlds: Worlds, stage: int, accumulation: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stage": stage, "accumulation": accumulation, "tier": "nvme" if stage == 3 else "cpu"}
    memory = memory_for("mlp", 1 / 2, 2, tuning=TUNING, **options)
    paths = {"path": str(tmp_path / "run")} if stage == 3 else {}
    scaled.trained(worlds, "mlp", apart=True, wire="late", device_memory=memory, **options, **paths)


def test_a_share_is_that_of_the_rank_with_the_least_room(worlds: Worlds) -> None:
    options: dict[str, Any] = {"tier": "cpu", "stage": 2, "tuning": TUNING}
    less, more = (memory_for("gpt", share, 2, **options) for share in (1 / 3, 1.0))
    runs = trained(worlds, "gpt", 2, 3, apart=True, device_memory=[more, less], **options)
    there = placed("gpt", less, 2, **options).states.on_device
    assert runs[0].stats["device_chunks"] == len(there)
    assert all(0 < run.stats["device_chunks"] < run.stats["chunks"] for run in runs)
    assert all(run.stats["peak_device_bytes"] <= less for run in runs)


def _goes_on_apart(base: str, number: int, options: dict[str, Any]) -> int:
    with sharded.devices_apart(True):
        _goes_on(base, number, options)
    return dist.get_rank()


def test_another_share_over_another_number_of_ranks_goes_on(worlds: Worlds, tmp_path: Path) -> None:
    tuning = Tuning(chunk="4KiB", threads=1)
    for number, (ranks, share, options) in enumerate(
        [
            (2, 1 / 2, {"stage": 2, "param_tier": "device"}),
            (3, 1 / 7, {"stage": 3, "param_tier": "cpu"}),
            (1, 1.0, {"param_tier": "device"}),
            (2, 0.0, {"stage": 1, "param_tier": "device"}),
        ]
    ):
        given: dict[str, Any] = {"tier": "nvme", **options}
        memory = memory_for("gpt", share, ranks, tuning=tuning, **given)
        worlds(ranks).run(_goes_on_apart, str(tmp_path), number, {**given, "device_memory": memory})
