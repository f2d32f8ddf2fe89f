"""The bytes that a plan says go over the link are those that a run counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.planner.explain import plan_of
from offload.planner.link import link_bytes
from tests.support.late_copier import CopiedBy, LateCopier

LAYERS, WIDTH = 8, 32
UNIT_BYTES = 2 * (WIDTH * WIDTH + WIDTH)


def blocks() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 2},
        {"device_memory": LAYERS * UNIT_BYTES + 650_000},
        {"param_tier": "cpu", "accumulation": 3},
        {"param_tier": "cpu", "accumulation": 2, "device_memory": 6 * UNIT_BYTES},
        {"tier": "device"},
        {"tier": "nvme", "param_tier": "cpu", "accumulation": 2, "device_memory": 650_000, "cpu_memory": "700KiB"},
    ],
    ids=["resident", "states there", "streamed", "some stay", "all there", "states there, streamed"],
)
def test_a_plan_counts_what_a_run_does(options: dict[str, Any], copied_by: CopiedBy, tmp_path: Path) -> None:
    given: dict[str, Any] = {"tier": "cpu", "tuning": Tuning(chunk="4KiB")} | options
    if given["tier"] == "nvme":
        given["path"] = tmp_path / "run"
    planned = plan_of(blocks(), direct=False, **given)
    counted = link_bytes(planned.layout, planned.place())
    assert counted is not None
    copied_by(lambda: LateCopier(1))
    model, x = blocks(), torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).bfloat16()
    seen = []
    with OffloadZero(model, **given) as optimizer:
        for _ in range(3):
            for _ in range(options.get("accumulation", 1)):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            stats = optimizer.stats()
            seen.append((stats["host_to_device_bytes"], stats["device_to_host_bytes"]))
        there, chunks = stats["device_chunks"], stats["chunks"]
    assert tuple(last - before for before, last in zip(seen[-2], seen[-1], strict=True)) == tuple(counted)
    if options.get("device_memory", 0) > LAYERS * UNIT_BYTES:
        assert 0 < there < chunks
