"""The ZeRO paper's tables (Rajbhandari et al., arXiv:1910.02054), from the plan.

What a rank holds (table 1), which models fit (table 2), and what becomes of activations (ZeRO-R).
"""

from __future__ import annotations

import pytest
import torch

from offload import Tuning
from offload.layout import ParamSpec, build
from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.planner.explain import Planned, zero_r
from offload.planner.placement import Needs, Room

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
    given = Options(stage=stage, accumulation=accumulation, tuning=Tuning(chunk="1TiB", bucket="64TiB"))
    layout = build([ParamSpec("weight", numel, "", torch.bfloat16, 0)], given.chunk_numel, ranks=ranks)
    held = Needs(layout, decide(given, Situation(numel, 0, ranks=ranks)), True).held_bytes
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


# Tensor-parallel ranks, GPUs in all, 1e9 parameters of the largest models in 32 GB: without ZeRO, at stages 1, 2, 3.
LARGEST = """
1  | 64   | 2 / 7.6 / 14.4 / 128
2  | 128  | 4 / 15.2 / 28.8 / 256
4  | 256  | 8 / 30.4 / 57.6 / 512
8  | 512  | 16 / 60.8 / 115.2 / 1024
16 | 1024 | 32 / 121.6 / 230.4 / 2048
"""


@pytest.mark.parametrize("line", LARGEST.strip().splitlines(), ids=lambda line: f"{line.split()[0]} parts")
def test_largest_models_are_the_papers(line: str) -> None:
    """Each of so many tensor-parallel ranks holds that share of the parameters, and ZeRO is over the rest."""
    parts, gpus, models = line.split("|")
    billions = [float(one) for one in models.split("/")]
    ranks = int(gpus) // int(parts)
    assert 16 * billions[0] / int(parts) == 32
    for stage, numel in enumerate(billions[1:], 1):
        shared = round(numel * GB / int(parts))
        # Printed with one digit after the point, and the last two rows of stage 3 as 1T and 2T.
        assert held_gb(shared, ranks, stage) == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_activations_are_the_papers(parts: int) -> None:
    """2 x batch x sequence x width x layers bytes of checkpoints, one a block, of which P_a leaves each rank a part.

    For it (N-1)/N of the elements are sent, under a tenth of the 12 x sequence x width that tensor parallelism sends.
    """
    batch, seq, width, layers = 32, 1024, 8192, 125
    given = Options(activation_tier="cpu", activation_memory="1GiB")
    choice = decide(given, Situation(1 << 20, 0))
    layout = build([ParamSpec("weight", 1 << 20, "", torch.bfloat16, 0)], given.chunk_numel)
    found = zero_r(
        Planned(layout, choice, True, Room(cpu_memory=1 << 40)),
        parts,
        blocks=layers,
        entering_bytes=2 * batch * seq * width,
    )
    assert found["checkpoint_bytes"] == 2 * batch * seq * width * layers
    assert found["part_bytes"] == found["checkpoint_bytes"] // parts
    assert found["gathered_elements"] == batch * seq * width * layers * (parts - 1) // parts
    assert found["gathered_elements"] < 12 * batch * seq * width * layers / 10
    assert found["device_bytes"] == 2 * 2 * batch * seq * width
