"""fp16 with torch's own GradScaler: the same bits on every tier, with overflows and a scale that grows."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero, Tuning
from offload.native import available_variants
from tests.support import models, training
from tests.support.device import DEVICE
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import LR, LossScale, NumpyAdam, Run, train

STEPS = 10
SPOILT = (3, 6)
SCALES = [256.0, 512.0, 512.0, 256.0, 256.0, 512.0, 256.0, 256.0, 512.0, 512.0]
"""After each step: it doubles after two that are clean, from 256 on."""


def fp16(kind: str, accumulation: int = 1, scale: LossScale | None = None, **options: Any) -> Run:
    scale = LossScale(256.0, 2) if scale is None else scale
    options = {"steps": STEPS, "spoilt": SPOILT, "compute_dtype": torch.float16} | options
    return train(kind, accumulation=accumulation, scale=scale, **options)


@cache
def in_ram(kind: str, accumulation: int) -> Run:
    return fp16(kind, accumulation, tier="cpu")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_in_fp16_equals_the_numpy_reference(kind: str, accumulation: int) -> None:
    reference = NumpyAdam(accumulation, scale=LossScale(256.0, 2))
    run = fp16(kind, accumulation, prepare=reference.watch, each_step=reference.step)
    reference.assert_same_bits(run)
    run.assert_same_bits(in_ram(kind, accumulation))
    assert run.scales == SCALES
    assert [step for step, norm in enumerate(run.norms) if norm == float("inf")] == list(SPOILT)
    assert (run.stats["step"], run.stats["skipped_steps"]) == (STEPS - len(SPOILT), len(SPOILT))
    assert run.losses[-1] != run.losses[0]
    trained = {name: tensor.dtype for name, tensor in run.tensors.items() if "exp_avg" not in name}
    assert torch.float16 in trained.values()


TIERS: dict[str, dict[str, Any]] = {
    "states on disk": {},
    "parameters in RAM": {"param_tier": "cpu"},
    "parameters on disk": {"param_tier": "nvme"},
    "gradients on disk": {"grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "all on disk": {"param_tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("kind", "accumulation"), [("gpt", 2), ("mlp", 1)])
def test_every_tier_has_the_bits_of_ram(kind: str, tier: str, accumulation: int, tmp_path: Path) -> None:
    options = {"path": tmp_path / "swap", "cpu_memory": "least", "tuning": Tuning(chunk="4KiB")} | TIERS[tier]
    run = fp16(kind, accumulation, tier="nvme", **options)
    run.assert_same_bits(in_ram(kind, accumulation))
    # What trials reserve suffices for a few large chunks.
    assert run.stats["streamed_chunks"] > 0 or os.environ.get("OFFLOAD_TEST_TRIALS")
    assert run.stats["peak_cpu_bytes"] <= run.stats["cpu_budget_bytes"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_late_copies_change_no_bit(accumulation: int, streams: bool, tmp_path: Path, copied_by: CopiedBy) -> None:
    """As a device with memory of its own makes them; new parameters rest where gradients were."""
    copier = LateCopier(1)
    copied_by(lambda: copier)
    options: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "swap", "tuning": Tuning(chunk="4KiB")}
    run = fp16("gpt", accumulation, cpu_memory="2MiB", param_tier="cpu" if streams else "device", **options)
    assert copier.copies > 0
    run.assert_same_bits(in_ram("gpt", accumulation))


@pytest.mark.parametrize("variant", available_variants())
def test_instruction_sets_change_no_bit(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_KERNELS", variant)
    run = fp16("mlp", 2)
    assert run.stats["kernel"] == variant
    run.assert_same_bits(in_ram("mlp", 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_where_nothing_overflows_a_scale_changes_no_bit(dtype: torch.dtype) -> None:
    """It is a power of two, and these have exponents enough; so it is divided out exactly once."""
    plain = train("mlp", steps=6, compute_dtype=dtype)
    scaled = fp16("mlp", compute_dtype=dtype, steps=6, spoilt=())
    assert scaled.scales[-1] == 2048.0
    scaled.scales = plain.scales
    scaled.assert_same_bits(plain)


@pytest.mark.parametrize("place", [{"tier": "cpu"}, {"tier": "nvme", "param_tier": "nvme"}], ids=["RAM", "disk"])
def test_resumed_training_has_the_bits_of_training_that_never_stopped(place: dict[str, Any], tmp_path: Path) -> None:
    """Interrupted after the first overflow, one clean step away from a larger scale."""
    options = {"path": tmp_path / "run", "commit_every": 0, "tuning": Tuning(chunk="4KiB"), **place}
    half, whole = 5, in_ram("gpt", 1)
    model = models.build("gpt").to(DEVICE)
    plain = torch.optim.AdamW(models.groups(model), lr=LR)
    first = Run()
    with OffloadZero(model, plain, compute_dtype=torch.float16, **options) as optimizer:
        scaler = LossScale(256.0, 2).scaler(DEVICE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, training.schedule)
        optimizer.attach(scaler=scaler, scheduler=scheduler)
        _go(first, model, optimizer, scheduler, scaler, range(half))
        optimizer.commit({"done": half})
        _go(Run(), model, optimizer, scheduler, scaler, range(half, half + 2))  # lost
    again = models.build("gpt").to(DEVICE)
    second = Run()
    plain = torch.optim.AdamW(models.groups(again), lr=LR)
    with OffloadZero(again, plain, compute_dtype=torch.float16, resume=True, **options) as optimizer:
        assert optimizer.resumed is not None
        found: Any = optimizer.resumed.extra
        assert (optimizer.resumed.step, found["done"]) == (half - 1, half)
        scaler = torch.amp.GradScaler(DEVICE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, training.schedule)
        optimizer.attach(scaler=scaler, scheduler=scheduler)
        _go(second, again, optimizer, scheduler, scaler, range(found["done"], STEPS))
        second.end(again, optimizer)
    second.losses, second.norms, second.scales = (
        before + after
        for before, after in ((first.losses, second.losses), (first.norms, second.norms), (first.scales, second.scales))
    )
    second.assert_same_bits(whole)


def _go(
    run: Run,
    model: torch.nn.Module,
    optimizer: OffloadZero,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    steps: range,
) -> None:
    batches = models.losses("gpt", model, DEVICE)
    for _ in range(steps.start):
        next(batches)
    for step in steps:
        factor = training.SPOILS if step in SPOILT else 1.0
        run.step(optimizer, scheduler, [next(batches)() * factor], scaler=scaler)
