"""At stages 1 and 2 no forward is a collective: a rank may run one that the others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero, ReleasedParameterError, Tuning
from tests.oracle.models import TinyLm, token_batches, token_loss
from tests.support.ranks import Worlds
from tests.support.toy import take_step


def _evaluate_alone(stage: int, tier: str, path: str) -> list[float]:
    """Rank 0 alone evaluates after each step, and reads a parameter."""
    torch.manual_seed(0)
    model = TinyLm()
    options: dict[str, Any] = {"path": Path(path) / "run"} if tier == "nvme" else {}
    first = torch.distributed.get_rank() == 0
    losses = []
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options |= {"tuning": Tuning(chunk="4KiB"), "compute_dtype": torch.float32, "commit_every": None}
    with OffloadZero(model, plain, tier=tier, stage=stage, **options) as optimizer:
        for tokens, targets in token_batches():
            take_step(optimizer, token_loss(model, tokens, targets))
            if first:
                with torch.no_grad():
                    losses.append(token_loss(model, tokens, targets).item())
                losses.append(model.blocks[1].up.weight.norm().item())
    return losses


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_may_evaluate_after_a_step(worlds: Worlds, stage: int, tier: str, tmp_path: Path) -> None:
    losses, none = worlds(2).run(_evaluate_alone, stage, tier, str(tmp_path))
    assert none == []
    assert losses == pytest.approx(_in_plain_torch(), abs=1e-5)


def _in_plain_torch() -> list[float]:
    torch.manual_seed(0)
    model = TinyLm()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, targets in token_batches():
        token_loss(model, tokens, targets).backward()
        plain.step()
        plain.zero_grad()
        with torch.no_grad():
            losses.append(token_loss(model, tokens, targets).item())
        losses.append(model.blocks[1].up.weight.norm().item())
    return losses


def _use_outside() -> str:
    """At stage 3 a parameter is used outside of every forward."""
    model = TinyLm()
    with OffloadZero(model, stage=3) as optimizer:
        try:
            model.blocks[1].up.weight.sum()
        except ReleasedParameterError as error:
            message = str(error)
        with optimizer.gathered(model.blocks[1]):
            assert model.blocks[1].up.weight.sum().isfinite()
        return message


def test_at_stage_3_a_use_outside_of_a_forward_names_gathered(worlds: Worlds) -> None:
    assert all("optimizer.gathered" in message for message in worlds(2).run(_use_outside))
