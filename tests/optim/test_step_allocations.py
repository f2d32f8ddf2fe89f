"""Nothing that grows with the model is allocated in a step: first touch of fresh memory costs more than the step."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.planner import least_cpu_memory

LAYERS = 4
SLACK_BYTES = 16 << 10
"""What a step may allocate more for a model 16 times as large with as many chunks."""


def allocated_by_a_warm_step(width: int, tier: str, path: Path) -> tuple[int, int]:
    """(Python's peak, torch's total) bytes allocated in a step of a model of 4 layers of width x width."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    options: dict[str, Any] = {"tuning": Tuning(chunk=4 * width * width)}
    if tier == "nvme":
        options |= {"path": path / str(width), "cpu_memory": least_cpu_memory(model, tuning=options["tuning"])}
    grads = [torch.full_like(p, 1e-3, dtype=torch.bfloat16) for p in model.parameters()]
    with OffloadZero(model, tier=tier, **options) as optimizer:
        assert optimizer.stats()["chunks"] == LAYERS

        def step() -> None:
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.synchronize()

        step()
        step()
        tracemalloc.start()
        step()
        python_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            step()
    torch_bytes = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events() or [])
    return python_bytes, torch_bytes


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_warm_step_allocates_no_more_for_a_larger_model(tier: str, tmp_path: Path) -> None:
    allocated_by_a_warm_step(128, tier, tmp_path)  # imports and caches of the profiler
    small_python, small_torch = allocated_by_a_warm_step(128, tier, tmp_path)
    large_python, large_torch = allocated_by_a_warm_step(512, tier, tmp_path)
    assert large_python <= small_python + SLACK_BYTES
    assert large_torch <= small_torch + SLACK_BYTES
