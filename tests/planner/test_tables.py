"""The ZeRO paper's table of what a rank holds (Rajbhandari et al., arXiv:1910.02054, table 1), from the plan."""

from __future__ import annotations

import pytest
import torch

from offload import Tuning
from offload.config import check, over_ranks
from offload.layout import ParamSpec, build
from offload.planner.placement import Needs

GB = 10**9
# Ranks, and GB at stages 1, 2 and 3 of models of 7.5e9, 128e9 and 1e12 parameters; cut or rounded as printed there.
MEMORY = """
1    | 120 / 120 / 120    | 2048 / 2048 / 2048 | 16000 / 16000 / 16000
4    | 52.5 / 41.3 / 30   | 896 / 704 / 512    | 7000 / 5500 / 4000
16   | 35.6 / 21.6 / 7.5  | 608 / 368 / 128    | 4750 / 2875 / 1000
64   | 31.4 / 16.6 / 1.88 | 536 / 284 / 32     | 4187 / 2218 / 250
256  | 30.4 / 15.4 / 0.47 | 518 / 263 / 8      | 4046 / 2054 / 62.5
1024 | 30.1 / 15.1 / 0.12 | 513 / 257 / 2      | 4011 / 2013 / 15.6
"""


def held_gb(numel: int, ranks: int, stage: int) -> float:
    # Without accumulation, stage 1 holds gradients as stage 2 does. With it, they are as wide again, in fp32.
    accumulation = 2 if stage == 1 else 1
    given = check(stage=stage, accumulation=accumulation, tuning=Tuning(chunk="1TiB", bucket="64TiB"))
    layout = build([ParamSpec("weight", numel, "", torch.bfloat16, 0)], given.chunk_numel, ranks=ranks)
    held = Needs(layout, over_ranks(given, ranks=ranks, ranks_on_node=1), True).held_bytes
    return (sum(held.values()) - (held["grad"] // 2 if stage == 1 else 0)) / GB


@pytest.mark.parametrize("line", MEMORY.strip().splitlines(), ids=lambda line: f"{line.split()[0]} ranks")
def test_memory_a_rank_is_the_papers(line: str) -> None:
    ranks, *models = line.split("|")
    for billions, cells in zip((7.5, 128, 1000), models, strict=True):
        for stage, printed in enumerate(cells.split("/"), 1):
            last_digit = 10 ** -len(printed.strip().partition(".")[2])
            assert held_gb(int(billions * GB), int(ranks), stage) == pytest.approx(float(printed), abs=last_digit)


def test_70b_on_16_ranks() -> None:
    assert [held_gb(70 * GB, 16, stage) for stage in (1, 2, 3)] == [332.5, 201.25, 70]
