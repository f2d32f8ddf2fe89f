"""A split master of a resident parameter: its upper half is the parameter, so only announced writes may change that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, StaleParameterError, Tuning
from tests.support.streamed import Net, batch, finish

NAME = "blocks.2.up.weight"
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(2.0),
    "through data": lambda p: p.data.fill_(2.0),
    "through detach": lambda p: p.detach().fill_(2.0),
    "pointed elsewhere": lambda p: setattr(p, "data", torch.zeros_like(p)),
}


def split(model: nn.Module, tier: str, path: Path) -> OffloadZero:
    """With commits by hand, and a split master of each parameter."""
    options: dict[str, Any] = {"path": path / "run", "commit_every": 0} if tier == "nvme" else {"commit_every": None}
    return OffloadZero(model, tier=tier, tuning=Tuning(chunk="4KiB", split_master=True), **options)


def train(model: nn.Module, optimizer: OffloadZero, first: int, steps: int) -> None:
    for count in range(first, first + steps):
        model(batch(count)).float().square().sum().backward()
        finish(optimizer)


def states(model: nn.Module, optimizer: OffloadZero) -> list[Tensor]:
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return [optimizer.state_of(param)[kind] for param in model.parameters() for kind in kinds]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_that_a_split_master_cannot_follow_is_refused_until_a_rollback(
    write: Callable[[nn.Parameter], Any], tmp_path: Path
) -> None:
    model = Net()
    with split(model, "nvme", tmp_path) as optimizer:
        train(model, optimizer, 0, 2)
        optimizer.commit()
        expected = states(model, optimizer)
        param = model.get_parameter(NAME)
        with torch.no_grad():
            write(param)
        model(batch(2)).float().square().sum().backward()
        for call in (optimizer.step, optimizer.commit, lambda: optimizer.state_of(param)):
            with pytest.raises(StaleParameterError, match=rf"{NAME} was written to .*: call rollback.*split_master"):
                call()
        assert optimizer.stats()["step"] == 2
        optimizer.rollback()
        assert same(states(model, optimizer), expected)
        train(model, optimizer, 2, 1)
        assert optimizer.stats()["step"] == 3


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_loaded_state_dict_reaches_split_masters_where_it_is_new(tier: str, tmp_path: Path) -> None:
    model = Net()
    with split(model, tier, tmp_path) as optimizer:
        train(model, optimizer, 0, 2)
        param = model.get_parameter(NAME)
        before = optimizer.state_of(param)["master"]
        loaded = {name: value.clone() for name, value in model.state_dict().items()}
        loaded[NAME][0] = 3.0
        model.load_state_dict(loaded)
        master = optimizer.state_of(param)["master"]
    assert master[0].eq(3.0).all()
    assert torch.equal(master[1:], before[1:])
    assert not torch.equal(before, before.bfloat16().float()), "the masters say no more than the parameters"


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_loading_after_a_write_does_not_hide_that_the_masters_are_gone(tier: str, tmp_path: Path) -> None:
    model = Net()
    with split(model, tier, tmp_path) as optimizer:
        train(model, optimizer, 0, 2)
        loaded = {name: value.clone() for name, value in model.state_dict().items()}
        param = model.get_parameter(NAME)
        with torch.no_grad():
            param.fill_(2.0)
        model.load_state_dict(loaded)
        with pytest.raises(StaleParameterError, match=NAME):
            optimizer.state_of(param)
