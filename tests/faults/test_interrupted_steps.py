"""Ctrl-C at any instruction of a step: what belongs together has changed together, and training goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadError, OffloadZero, Tuning
from offload import optimizer as optimizer_file
from tests.optim.test_methods import Averaged
from tests.support import interrupted
from tests.support.cases import often
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


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, lr_decay=0.1),
}


def fresh(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return model, MAKES[name](model.parameters())


def build(path: Path, options: dict[str, Any], name: str = "AdamW") -> tuple[nn.Module, OffloadZero]:
    model, plain = fresh(name)
    if options["tier"] == "nvme":
        options = {"path": path, "commit_every": 0} | options
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


@cache
def of_plain_torch(name: str) -> list[list[dict[str, Any]]]:
    """The states of each parameter, with its value as "master", after so many steps."""
    model, plain = fresh(name)
    found = []
    for _ in range(4):
        shown = [{"master": param.detach(), **plain.state[param]} for param in model.parameters()]
        found.append([{kind: torch.as_tensor(value).clone() for kind, value in one.items()} for one in shown])
        model(X).float().square().sum().backward()
        plain.step()
        plain.zero_grad()
    return found


def interrupted_step_of(name: str, path: Path, options: dict[str, Any], instruction: int) -> bool:
    """As `interrupted_step`; where the run goes on, it has the bits of plain torch after as many steps."""
    model, optimizer = build(path, options | {"compute_dtype": torch.float32}, name)
    with suppress(OffloadError), optimizer:
        train(model, optimizer)
        with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            train(model, optimizer)
        try:
            optimizer.zero_grad()
            train(model, optimizer)
            states = [optimizer.state_of(param) for param in model.parameters()]
        except OffloadError:
            return False
        steps = optimizer.stats()["step"]
        assert steps in (2, 3)
        for state, expected in zip(states, of_plain_torch(name)[steps], strict=True):
            assert state["step"] == steps
            for kind in expected.keys() - {"step"}:
                assert torch.equal(torch.as_tensor(state[kind]), expected[kind]), kind
        return left[0] > 0
    return False


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_a_step_that_torch_runs_is_made_or_not(name: str, placement: str, tmp_path: Path) -> None:
    instruction, number = 1, 0
    while not interrupted_step_of(name, tmp_path / str(number), PLACEMENTS[placement], instruction):
        number += 1
        instruction += FAR_APART
    assert number > 3


def interrupted_method(path: Path, options: dict[str, Any], instruction: int, outcomes: Counter[str]) -> bool:
    """Applies a method, interrupted. Returns whether the interrupt came too late."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    options = {"path": path, "commit_every": 0, "compute_dtype": torch.float32} | options
    optimizer = OffloadZero(model, Averaged(model.parameters()), tuning=Tuning(chunk="4KiB", threads=1), **options)
    with suppress(OffloadError), optimizer:
        for _ in range(2):
            train(model, optimizer)
        optimizer.commit()
        before = [optimizer.state_of(param) for param in model.parameters()]
        with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            optimizer.apply("exchange")
        try:
            states = [optimizer.state_of(param) for param in model.parameters()]
            values = [param.detach().clone() for param in model.parameters()]
        except OffloadError:
            optimizer.rollback()
            outcomes["rolled back"] += 1
            states = [optimizer.state_of(param) for param in model.parameters()]
            values = [param.detach().clone() for param in model.parameters()]
            kinds = {"master": "master", "z": "z"}
        else:
            is_made = not torch.equal(states[0]["master"], before[0]["master"])
            outcomes["made" if is_made else "not made"] += 1
            kinds = {"master": "z", "z": "master"} if is_made else {"master": "master", "z": "z"}
        for value, state, one in zip(values, states, before, strict=True):
            assert all(torch.equal(state[kind], one[other]) for kind, other in kinds.items())
            assert torch.equal(value, state["master"])
        return left[0] > 0
    return False


@pytest.mark.parametrize("placement", often(PLACEMENTS, "streamed"))
def test_a_method_is_applied_or_not_or_says_so(placement: str, tmp_path: Path) -> None:
    instruction, number, outcomes = 1, 0, Counter[str]()
    while not interrupted_method(tmp_path / str(number), PLACEMENTS[placement], instruction, outcomes):
        number += 1
        instruction += FAR_APART
    assert outcomes.keys() == {"made", "not made", "rolled back"}, outcomes


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@pytest.mark.parametrize("share", range(4))
def test_a_step_that_torch_runs_is_made_or_not_at_any_instruction(
    name: str, placement: str, share: int, tmp_path: Path
) -> None:
    instruction, number = 1 + share, 0
    while not interrupted_step_of(name, tmp_path / str(number), PLACEMENTS[placement], instruction):
        number += 1
        instruction += 4 * CLOSE


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
