"""Ctrl-C at any instruction of a step: what belongs together has changed together, and training goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadError, OffloadZero, Tuning
from offload import optimizer as optimizer_file
from tests.support import interrupted
from tests.support.interrupted import interrupted_at
from tests.support.late_copier import CopiedBy, LateCopier

# What a hook of a forward that failed already raises, torch gives as a warning.
pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with")

FAR_APART, CLOSE = 499, 11
"""Places between interrupts, in the short and in the long form: primes, with which no loop repeats."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu"},
    "nvme": {"tier": "nvme"},
    "streamed": {"tier": "nvme", "param_tier": "nvme"},
}
X = torch.ones(2, 3)


def build(path: Path, options: dict[str, Any]) -> tuple[nn.Module, OffloadZero]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    if options["tier"] == "nvme":
        options = {"path": path, "commit_every": 0} | options
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, OffloadZero(model, plain, tuning=Tuning(chunk="4KiB", threads=1), **options)


def train(model: nn.Module, optimizer: OffloadZero) -> None:
    model(X).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def interrupted_step(path: Path, options: dict[str, Any], instruction: int) -> bool:
    """Trains for three steps, interrupted in the second one. Returns whether the interrupt came too late."""
    model, optimizer = build(path, options)
    with suppress(OffloadError), optimizer:
        train(model, optimizer)
        with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            train(model, optimizer)
        try:
            optimizer.zero_grad()
            train(model, optimizer)
            states = [optimizer.state_of(param) for param in model.parameters()]
        except OffloadError:
            return False  # it says so, and nothing is wrong without a word
        assert len({state["step"] for state in states}) == 1
        assert states[0]["step"] == optimizer.stats()["step"] in (2, 3)
        for param, state in zip(model.parameters(), states, strict=True):
            assert torch.equal(param, state["master"].bfloat16())
            assert state["master"].isfinite().all()
        return left[0] > 0
    return False


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_is_made_or_not(placement: str, tmp_path: Path) -> None:
    instruction, number = 1, 0
    while not interrupted_step(tmp_path / str(number), PLACEMENTS[placement], instruction):
        number += 1
        instruction += FAR_APART


def test_all_that_changes_with_a_step_changes_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts only the instructions of the optimizer's own file."""
    monkeypatch.setattr(interrupted, "FILES", (optimizer_file.__file__,))
    instruction = 1
    while not interrupted_step(tmp_path, PLACEMENTS["cpu"], instruction):
        instruction += 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("share", range(8))
def test_a_step_is_made_or_not_at_any_instruction(placement: str, share: int, tmp_path: Path) -> None:
    instruction, number = 1 + share, 0
    while not interrupted_step(tmp_path / str(number), PLACEMENTS[placement], instruction):
        number += 1
        instruction += CLOSE


def test_closing_after_an_interrupt_waits_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied_by: CopiedBy
) -> None:
    copier = LateCopier(1)
    copied_by(lambda: copier)
    model, optimizer = build(tmp_path, {"tier": "cpu"})
    train(model, optimizer)
    copies = optimizer._parts.new_params
    with monkeypatch.context() as patch:
        patch.setattr(copies, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            model[0].weight.sum()
    assert copies._copies
    under_way = [copy for _, copy, _ in copies._copies]
    with suppress(OffloadError):
        optimizer.close()
    assert not copies._copies
    assert all(copy.done() for copy in under_way)


def _interrupt(flat: int) -> None:
    raise KeyboardInterrupt
