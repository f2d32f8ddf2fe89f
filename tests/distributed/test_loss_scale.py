"""fp16 over ranks: an overflow on one of them skips the step on all, and their GradScalers stay alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload import ConfigError, OffloadZero, Tuning
from offload.layout import build
from offload.model.units import specs_of
from tests.support import models, sharded
from tests.support.cases import products
from tests.support.ranks import Worlds
from tests.support.training import LossScale, Run

TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
STEPS = 6
SPOILT = 3
SCALES = [256.0, 512.0, 512.0, 256.0, 256.0, 512.0]
FP16 = {"compute_dtype": torch.float16}


@cache
def wanted(kind: str, ranks: int, accumulation: int, stage: int) -> sharded.Reference:
    model = models.build(kind)
    specs, _ = specs_of(model, models.groups(model), models.keep_fp32(kind), torch.float16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        made = sharded.Reference(
            kind,
            ranks,
            build(specs, 1024, ranks=ranks).trained,
            accumulation,
            stage == 1,
            stage=stage,
            dtype=torch.float16,
            scale=LossScale(256.0, 2),
            spoilt=SPOILT,
        )
        made.train(STEPS)
    finally:
        torch.set_num_threads(before)
    return made


def trained(worlds: Worlds, kind: str, ranks: int = 2, **options: Any) -> None:
    """Runs it on all ranks, and compares with one process."""
    options = {"tuning": TUNING, "accumulation": 1, **FP16} | options
    runs: list[Run] = worlds(ranks).run(_train, kind, options, timeout_s=170)
    made = wanted(kind, ranks, options["accumulation"], 2 if options["accumulation"] == 1 else min(options["stage"], 2))
    made.assert_same_bits(runs)
    assert made.scales == SCALES
    for run in runs:
        assert (run.stats["step"], run.stats["skipped_steps"]) == (STEPS - 1, 1)
        assert run.losses[SPOILT * options["accumulation"]] < 1e6 or run is runs[-1]


def _train(kind: str, options: dict[str, Any]) -> Run:
    return sharded.train(kind, STEPS, scale=LossScale(256.0, 2), spoilt=SPOILT, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_has_the_bits_of_one_process(worlds: Worlds, stage: int, accumulation: int) -> None:
    trained(worlds, "mlp", stage=stage, accumulation=accumulation)


@pytest.mark.parametrize(
    ("tier", "stage"), products(["device", "cpu"], [1, 2, 3], often=[("device", 3), ("cpu", 1), ("cpu", 2)])
)
def test_devices_with_memory_of_their_own(worlds: Worlds, tier: str, stage: int) -> None:
    trained(worlds, "mlp", stage=stage, accumulation=2, tier=tier, apart=True, wire="late")


@pytest.mark.parametrize("wire", [pytest.param("plain", marks=pytest.mark.slow), "late"])
def test_streamed_from_disk(worlds: Worlds, tmp_path: Path, wire: str) -> None:
    options: dict[str, Any] = {"tier": "nvme", "param_tier": "nvme", "path": str(tmp_path), "cpu_memory": "least"}
    trained(worlds, "gpt", stage=3, accumulation=2, wire=wire, **options)


@pytest.mark.parametrize(
    ("stage", "accumulation"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (2, 2))), (3, 2)]
)
def test_gradients_on_disk(worlds: Worlds, tmp_path: Path, stage: int, accumulation: int) -> None:
    tuning = Tuning(chunk="256KiB", threads=1, bucket=4096)
    options: dict[str, Any] = {"grad_tier": "nvme", "path": str(tmp_path), "tuning": tuning}
    trained(worlds, "gpt", 3, stage=stage, accumulation=accumulation, **options)


def _differently(what: str) -> str:
    """What a rank says where the last one does something else, and whether all can go on."""
    model, is_last = models.build("mlp"), dist.get_rank() == dist.get_world_size() - 1
    batches = models.losses("mlp", model)
    with OffloadZero(model, stage=2, tuning=TUNING, **FP16) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (9 if what == "scale" and is_last else 8))
        scaler.scale(next(batches)()).backward()
        if what == "found_inf" and is_last:
            scaler.unscale_(optimizer)
            for found in scaler._found_inf_per_device(optimizer).values():
                found.fill_(1.0)
        with pytest.raises(ConfigError) as caught:
            optimizer.step() if what == "no scaler" and is_last else scaler.step(optimizer)
        optimizer.zero_grad()
        assert optimizer.stats()["step"] == optimizer.stats()["skipped_steps"] == 0
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(next(batches)()).backward()
        scaler.step(optimizer)
        assert optimizer.stats()["step"] == 1
    return str(caught.value)


@pytest.mark.parametrize("what", ["scale", "no scaler", "found_inf"])
def test_ranks_that_scale_differently_are_told_before_anything_changes(worlds: Worlds, what: str) -> None:
    said = worlds(2).run(_differently, what)
    assert "clipped or scaled" in said[0]
    assert ("need a loss scale" if what == "no scaler" else "clipped or scaled") in said[1]


def _without_backward() -> None:
    model, rank = models.build("mlp"), dist.get_rank()
    with OffloadZero(model, stage=2, tuning=TUNING, **FP16) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        loss = scaler.scale(next(models.losses("mlp", model))())
        if rank == 0:
            loss.backward()
        scaler.step(optimizer)
        assert optimizer.stats()["step"] == 1
        if rank:
            with pytest.raises(AssertionError, match="No inf checks were recorded"):
                scaler.update()


def test_a_rank_that_had_no_backward_steps_and_cannot_update_its_scale(worlds: Worlds) -> None:
    worlds(2).run(_without_backward)
