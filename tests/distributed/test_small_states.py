"""What has no room in small states is refused by all ranks together, though one of them has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import NonFiniteGradientError, OffloadZero, Tuning
from tests.support.ranks import Worlds

ROWS, WIDTH = 200, 64
OF_LAST = ROWS - 1
"""A row in the shard of the last rank."""
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"stage": 1, "tier": "cpu"},
    "streamed": {"stage": 3, "param_tier": "nvme"},
}


def _refused(path: str | None, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """What a rank is told in each step: "" where the step is made, and whether all is as it was before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Embedding(ROWS, WIDTH)
    given = torch.optim.Adam(model.parameters(), weight_decay=0.5)
    where = {} if path is None else {"path": path}
    told: list[tuple[str, bool]] = []
    with OffloadZero(
        model, given, states="8bit", tuning=Tuning(chunk=4096, threads=1), **where, **options
    ) as optimizer:

        def states() -> dict[str, Tensor]:
            found = {key: torch.as_tensor(one).clone() for key, one in optimizer.state_of(model.weight).items()}
            with optimizer.gathered(model.weight):
                return found | {"weight": model.weight.detach().clone()}

        def step(row: int, size: float) -> None:
            (model(torch.tensor([row])).float().sum() * size).backward()
            before = states()
            error = ""
            try:
                optimizer.step()
            except NonFiniteGradientError as refusal:
                error = str(refusal)
            optimizer.zero_grad()
            after = states()
            told.append(
                (error, all(torch.equal(one.nan_to_num(7), after[key].nan_to_num(7)) for key, one in before.items()))
            )

        step(rank, 1.0)
        step(OF_LAST, 1e20 if rank == ranks - 1 else 1.0)  # of one rank's batch, and in one rank's shard
        step(0, 1.0)
        for value in (1.9e19, math.nan, 1.0):
            with optimizer.gathered(model.weight, writable=True), torch.no_grad():
                model.weight[OF_LAST, 1] = value
            step(0, 1.0)
    return told


@pytest.mark.parametrize(
    ("place", "ranks"), [("resident", 2), ("streamed", 3), pytest.param("resident", 4, marks=pytest.mark.slow)]
)
def test_what_one_rank_has_no_room_for_is_refused_by_all(
    worlds: Worlds, place: str, ranks: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "run") if place == "streamed" else None
    told = worlds(ranks).run(_refused, path, PLACES[place])
    assert all(one == told[0] for one in told)
    errors, unchanged = zip(*told[0], strict=True)
    assert [bool(error) for error in errors] == [False, True, False, True, True, False]
    assert unchanged == tuple(map(bool, errors))
    assert "the gradient of weight has a norm of 9.22e+18 or more" in errors[1]
    assert all("the gradient of weight, with its weight decay of" in error for error in errors[3:5])
