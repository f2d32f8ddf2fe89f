"""Units that stay while two ranks generate: as many as each of them has room for, and the bits of a plain model."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from offload import OffloadZero, Tuning, build
from tests.model.test_generating import IN_FP32, PROMPT, assert_same, decoded, gpt, here, sgd, step
from tests.support.ranks import Worlds

BLOCKS = 6


def _generate(options: dict[str, Any]) -> tuple[int, list[int]]:
    """How many units stayed, and what each token moved. The second rank has room for one unit only."""
    model = gpt(BLOCKS)
    plain = copy.deepcopy(model)
    other = sgd(plain)
    tuning = Tuning(chunk=4096, threads=1, bucket=4096, prefetch_units=0)
    with OffloadZero(model, sgd(model), tuning=tuning, **options, **IN_FP32) as optimizer:
        free = 2 * optimizer._parts.parameters.units["blocks.0"].nbytes if dist.get_rank() else 1 << 30
        moved = []
        with patch.object(build, "_free_on_device", lambda *_: free):
            for number in range(2):
                assert_same([step(model, optimizer, number)], [step(plain, other, number)])
                with optimizer.generating():
                    for _ in range(3):
                        before = optimizer.stats()["gathered_bytes"]
                        model.generate(PROMPT, 1, temperature=0)
                        moved.append(optimizer.stats()["gathered_bytes"] - before)
                    assert_same(decoded(model), decoded(plain))
                assert here(optimizer) == []
        return optimizer.stats()["generating_units"], moved


@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
def test_ranks_that_share_parameters_keep_the_same_units(worlds: Worlds, param_tier: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    options = {"stage": 3, "param_tier": param_tier, "path": str(tmp_path / "run")}
    for kept, moved in worlds(2).run(_generate, options):
        assert kept == 2
        assert 0 < moved[1] == moved[2] < moved[0]


def test_ranks_that_have_all_parameters_keep_what_each_has_room_for(worlds: Worlds) -> None:
    first, second = worlds(2).run(_generate, {"stage": 2, "param_tier": "cpu"})
    assert first[0] == BLOCKS + 1
    assert second[0] == 2
    assert first[1][1] == 0 < second[1][1]
