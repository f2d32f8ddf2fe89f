"""Ranks on GPUs of their own, over NCCL (make test-gpu); skipped with fewer than two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload import OffloadZero, Tuning
from tests.support import models
from tests.support.ranks import World
from tests.support.toy import take_step
from tests.support.training import CLIP

RANKS = min(torch.cuda.device_count(), 4) if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason="fewer than two CUDA devices"),
    pytest.mark.timeout(1200),
]

TIERS: dict[str, dict[str, Any]] = {
    "device": {"tier": "device"},
    "cpu": {"tier": "cpu"},
    "nvme": {"tier": "nvme"},
    "nvme, streaming from cpu": {"tier": "nvme", "param_tier": "cpu"},
    "nvme, streaming": {"tier": "nvme", "param_tier": "nvme"},
}


def _train(options: dict[str, Any], accumulation: int) -> dict[str, Tensor]:
    """Five steps of an MLP; the states at the end, and the norms."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    model = models.build("mlp").to(f"cuda:{rank}")
    batches = models.losses("mlp", model, f"cuda:{rank}")
    norms = []
    found: dict[str, Tensor] = {}
    with OffloadZero(
        model, process_group=group, accumulation=accumulation, tuning=Tuning(chunk=4096, bucket=4096), **options
    ) as optimizer:
        for _ in range(5):
            for _ in range(accumulation):
                drawn = [next(batches) for _ in range(ranks)]
                (drawn[rank]() / accumulation).backward()
            norms.append(optimizer.clip_grad_norm_(CLIP).cpu())
            take_step(optimizer)
        for name, param in model.named_parameters():
            with optimizer.gathered(param):
                found[name] = param.detach().cpu().clone()
            if param.requires_grad:
                state = optimizer.state_of(param)
                found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found | {"norms": torch.stack(norms)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_stage_and_tier_has_the_same_bits(accumulation: int, tmp_path: Path) -> None:
    first: dict[str, Tensor] | None = None
    for stage in (1, 2, 3) if accumulation == 1 else (2, 3):
        for tier, options in TIERS.items():
            given = options | {"stage": stage}
            if options["tier"] == "nvme":
                given |= {"path": str(tmp_path / f"{stage}-{tier}")}
            world = World(RANKS)
            try:
                for found in world.run(_train, given, accumulation, timeout_s=170):
                    first = found if first is None else first
                    assert found.keys() == first.keys()
                    assert all(torch.equal(found[key], first[key]) for key in first), (stage, tier)
            finally:
                world.close()
