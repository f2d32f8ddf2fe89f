"""Training over ranks has the bits of one process that adds the ranks' gradients in their order."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Tuning
from offload.layout import Layout, build
from offload.module.units import specs_of
from tests.support import models, sharded
from tests.support.ranks import Worlds
from tests.support.training import Run

TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
KINDS = ("gpt", "mlp", "conv")


def layout_of(kind: str, ranks: int) -> Layout:
    model = models.build(kind)
    specs, _ = specs_of(model, models.groups(model), models.keep_fp32(kind), torch.bfloat16)
    return build(specs, 1024, ranks=ranks)


@cache
def wanted(kind: str, ranks: int, steps: int, accumulation: int, sums_locally: bool, idle: bool) -> sharded.Reference:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        made = sharded.Reference(kind, ranks, layout_of(kind, ranks), accumulation, sums_locally, idle)
        made.train(steps)
    finally:
        torch.set_num_threads(before)
    return made


def trained(worlds: Worlds, kind: str, ranks: int, steps: int, idle: bool = False, **options: Any) -> list[Run]:
    """Runs it on all ranks, compares with one process, returns the runs."""
    options = {"tuning": TUNING, "accumulation": 1} | options
    runs: list[Run] = worlds(ranks).run(_train, kind, steps, idle, options)
    sums_locally = options.get("stage") == 1 and options["accumulation"] > 1
    wanted(kind, ranks, steps, options["accumulation"], sums_locally, idle).assert_same_bits(runs)
    return runs


def _train(kind: str, steps: int, idle: bool, options: dict[str, Any]) -> Run:
    return sharded.train(kind, steps, idle=idle, **options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_has_the_bits_of_one_process(worlds: Worlds, ranks: int, stage: int) -> None:
    trained(worlds, "mlp", ranks, 4, stage=stage)
