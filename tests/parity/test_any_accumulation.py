"""accumulation="auto" takes as many backward passes as come before a step, with the bits of a fixed number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import AccumulationError, ConfigError, OffloadZero, Tuning
from tests.native.bits import assert_same_bits
from tests.support.toy import Net, batch, squares

MICRO_BATCHES = (3, 3, 1, 4, 2, 2)
"""Micro-batches of each step: as many as in the last one, fewer, more."""

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu"},
    "device": {"tier": "device"},
    "gradients on NVMe": {"tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
    "streamed": {"tier": "nvme", "param_tier": "nvme"},
}


def train(optimizer: Any, model: Net, clip: Any) -> list[Tensor]:
    """The norms of all steps."""
    norms = []
    number = 0
    for micro_batches in MICRO_BATCHES:
        for _ in range(micro_batches):
            (squares(model, batch(number)) / micro_batches).backward()
            number += 1
        norms.append(clip(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def held(path: Path, accumulation: int | str, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    if "nvme" in options.values():
        options = {"path": path / str(accumulation), "commit_every": None} | options
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"tuning": Tuning(chunk=4096)} | options
    with OffloadZero(model, adamw, accumulation=accumulation, **options) as optimizer:
        norms = train(optimizer, model, optimizer.clip_grad_norm_)
        return {name: optimizer.state_of(param)["master"] for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_any_number_has_the_bits_of_a_fixed_one(tmp_path: Path, place: str, dtype: torch.dtype) -> None:
    fixed, norms = held(tmp_path, max(MICRO_BATCHES), compute_dtype=dtype, **PLACES[place])
    found, found_norms = held(tmp_path, "auto", compute_dtype=dtype, **PLACES[place])
    assert_same_bits(torch.stack(found_norms), torch.stack(norms))
    for name, master in found.items():
        assert_same_bits(master, fixed[name])


@pytest.mark.parametrize("place", PLACES)
def test_any_number_trains_as_plain_torch(tmp_path: Path, place: str) -> None:
    plain = Net()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    wanted = train(adamw, plain, lambda most: torch.nn.utils.clip_grad_norm_(plain.parameters(), most))
    found, norms = held(tmp_path, "auto", compute_dtype=torch.float32, **PLACES[place])
    torch.testing.assert_close(torch.stack(norms), torch.stack(wanted), rtol=1e-5, atol=0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-6)


def test_a_number_that_is_set_is_the_most_that_come() -> None:
    model = Net()
    with OffloadZero(model, accumulation="auto") as optimizer:
        assert optimizer.accumulation == "auto"
        optimizer.accumulation = 2
        assert optimizer.accumulation == 2
        squares(model).backward()
        with pytest.raises(ConfigError, match="before the backward"):
            optimizer.accumulation = 3
        squares(model).backward()
        with pytest.raises(AccumulationError, match="a 3rd time"):
            squares(model).backward()
        optimizer.zero_grad()
        optimizer.accumulation = 3
        for _ in range(3):
            squares(model).backward()
        optimizer.step()


def test_auto_can_be_set_again() -> None:
    """Beside plain torch, which sums what comes."""
    torch.manual_seed(0)
    plain, model = (nn.Linear(3, 3) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    theirs = torch.optim.AdamW(plain.parameters())
    with OffloadZero(model, accumulation="auto", compute_dtype=torch.float32) as optimizer:
        for micro_batches in (2, "auto", 1, "auto"):
            optimizer.accumulation = micro_batches
            assert optimizer.accumulation == micro_batches
            for one, trainer in ((plain, theirs), (model, optimizer)):
                for _ in range(3 if micro_batches == "auto" else micro_batches):
                    one(torch.ones(2, 3)).square().sum().backward()
                trainer.step()
                trainer.zero_grad()
        assert torch.allclose(model.weight, plain.weight, atol=1e-6)
        with pytest.raises(ConfigError, match='a whole number, at least 1, or "auto"'):
            optimizer.accumulation = "many"
    with OffloadZero(nn.Linear(3, 3), accumulation=2) as optimizer:
        with pytest.raises(ConfigError, match="give OffloadZero accumulation='auto'"):
            optimizer.accumulation = "auto"
        weight = optimizer.param_groups[0]["params"][0]
        for _ in range(2):
            weight.sum().backward()
        with pytest.raises(AccumulationError, match='or accumulation="auto" where that is not known'):
            weight.sum().backward()


def test_a_fixed_number_stays() -> None:
    with OffloadZero(Net(), accumulation=3) as optimizer:
        optimizer.accumulation = 2
        assert optimizer.accumulation == 3
        with pytest.raises(ConfigError, match='give OffloadZero accumulation=4, or "auto"'):
            optimizer.accumulation = 4


def test_any_number_takes_the_memory_of_two() -> None:
    bytes_of = []
    for accumulation in (2, "auto"):
        with OffloadZero(Net(), accumulation=accumulation) as optimizer:
            bytes_of.append(optimizer.stats()["held_grad_bytes"])
    assert bytes_of[0] == bytes_of[1]
