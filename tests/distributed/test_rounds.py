"""How many collectives a step takes over ranks, and how many of them follow one another: what a slow network costs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig
from offload.ranks import torch_distributed as comm
from offload.ranks.communicator import Communicator
from tests.support.communicators import Counted
from tests.support.ranks import Worlds
from tests.support.toy import take_step

BLOCKS = 8
STEPS = 3
"""After two steps all ranks know the order of units."""

START = {2: 18, 3: 20}
"""Collectives of a start in a directory that is empty, one after the other, by stage."""
COMMIT = 5
Found = tuple[int, int]
"""Collectives, and rounds of them."""


def _counted(path: str, options: dict[str, Any]) -> dict[str, list[Found]]:
    """What the start took, each step, and each of two commits."""
    made = comm.connect
    counters: list[Counted] = []

    def connect(*args: Any, **kwargs: Any) -> Communicator:
        counters.append(Counted(made(*args, **kwargs)))
        return counters[0]

    found: dict[str, list[Found]] = {"start": [], "step": [], "commit": []}
    began = (0, 0)

    def note(what: str) -> None:
        nonlocal began
        now = len(counters[0].clock.launched), counters[0].clock.now
        found[what].append((now[0] - began[0], now[1] - began[1]))
        began = now

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=BLOCKS, heads=2, width=32, context=16))
    with patch.object(comm, "connect", connect), OffloadZero(model, path=path, commit_every=0, **options) as optimizer:
        note("start")
        for _ in range(STEPS):
            tokens = torch.randint(256, (2, 17))
            model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1].backward()
            optimizer.clip_grad_norm_(1.0)
            take_step(optimizer)
            note("step")
        optimizer.synchronize()
        note("step")
        for _ in range(2):
            optimizer.commit()
            note("commit")
    return found


@pytest.mark.parametrize(("stage", "collectives", "rounds"), [(2, 5, 5), (3, 8, 7)])
def test_units_of_a_small_model_travel_together(
    worlds: Worlds, tmp_path: Any, stage: int, collectives: int, rounds: int
) -> None:
    """Gradients and the question who has some, the norm, what is to be alike, parameters: at stage 3 the root unit, the
    first block, the others, and these again for backward."""
    for found in worlds(2).run(_counted, str(tmp_path / "run"), {"stage": stage}, timeout_s=120):
        assert found["start"] == [(START[stage], START[stage])]
        assert found["commit"][-1][0] <= COMMIT
        assert found["step"][STEPS - 1][0] == collectives
        assert found["step"][STEPS - 1][1] <= rounds


def test_a_small_bucket_is_a_collective_for_each_unit(worlds: Worlds, tmp_path: Any) -> None:
    tuning = Tuning(bucket=1024)
    for found in worlds(2).run(_counted, str(tmp_path / "run"), {"stage": 3, "tuning": tuning}, timeout_s=120):
        assert found["step"][STEPS - 1][0] > 3 * BLOCKS
