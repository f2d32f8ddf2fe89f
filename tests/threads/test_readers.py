"""Threads that read a held model while it trains see values of one step, and the training never notices."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero
from tests.support.beside import PLACEMENTS, Model, Reader, Readers, Values, expected_of, hold, often_switching, train
from tests.support.cases import each_value_often


def state_dicts(model: nn.Module, optimizer: OffloadZero) -> Values:
    return model.state_dict()


def norms(model: nn.Module, optimizer: OffloadZero) -> Values:
    number = next(_numbers) % 4
    return {f"norm of blocks.{number}.up.weight": model.get_parameter(f"blocks.{number}.up.weight").norm().detach()}


def details(model: nn.Module, optimizer: OffloadZero) -> Values:
    """One parameter, copied in one call."""
    number = next(_numbers) % 4
    name = f"blocks.{number}.down.weight"
    with torch.no_grad():
        return {name: model.get_parameter(name).clone()}


def deep_copies(model: nn.Module, optimizer: OffloadZero) -> Values:
    name = f"blocks.{next(_numbers) % 4}.up.weight"
    return {name: copy.deepcopy(model.get_parameter(name)).detach()}


def whole_copies(model: nn.Module, optimizer: OffloadZero) -> Values:
    copy.deepcopy(model)(torch.ones(1, 7))
    return {}


def commits(model: nn.Module, optimizer: OffloadZero) -> Values:
    optimizer.commit()
    return {}


def snapshots(model: nn.Module, optimizer: OffloadZero) -> Values:
    if optimizer.stats()["step"]:
        optimizer.consolidate_state_dict()
        optimizer.snapshot(keep=1)
    return {}


def figures(model: nn.Module, optimizer: OffloadZero) -> Values:
    optimizer.stats()
    optimizer.synchronize()
    return {}


def gradient_norms(model: nn.Module, optimizer: OffloadZero) -> Values:
    grad = model.get_parameter("blocks.1.up.weight").grad
    if grad is not None:
        grad.norm()
    return {}


_numbers = itertools.count()
READERS: dict[str, Reader] = {
    "state_dict": state_dicts,
    "norm": norms,
    "clone": details,
    "deepcopy of a parameter": deep_copies,
    "deepcopy of the model": whole_copies,
    "commit": commits,
    "snapshot": snapshots,
    "stats and synchronize": figures,
    "norm of a gradient": gradient_norms,
}


def check(path: Path, lr: float, placement: str, readers: list[str]) -> int:
    """Trains beside readers. Returns: how often they read."""
    needs_commits = bool({"commit", "snapshot"} & set(readers))
    expected = expected_of(lr, commits=needs_commits, **PLACEMENTS[placement])
    model = Model()
    options: dict[str, Any] = {"commits": needs_commits, **PLACEMENTS[placement]}
    with hold(model, path, lr, **options) as optimizer, often_switching():
        with Readers(model, optimizer, [READERS[name] for name in readers]) as beside:
            losses = train(model, optimizer)
        assert not beside.errors, beside.errors[0]
        assert losses == expected.losses
    last = 0
    for read in beside.seen:
        steps = expected.steps_of(read)
        assert steps, f"values of no one step: {sorted(read)}"
        if len(readers) == 1:
            assert max(steps) >= last, "values of an earlier step than those read before"
            last = min(steps)
    return len(beside.seen)


# A resident model's state_dict has its tensors themselves, as in plain torch, and they go on.
LIVE = {("resident", "state_dict"), ("states on nvme", "state_dict")}
CASES = [(p, r) for p, r in itertools.product(PLACEMENTS, READERS) if (p, r) not in LIVE]


@pytest.mark.parametrize(("placement", "reader"), each_value_often(CASES))
def test_a_reader_sees_values_of_one_step_and_the_training_its_own(placement: str, reader: str, tmp_path: Path) -> None:
    assert check(tmp_path / "run", 1e-2, placement, [reader])


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "lr"), [(p, lr) for p in PLACEMENTS for lr in (0.0, 1e-2)])
def test_many_readers_beside_many_trainings(placement: str, lr: float, tmp_path: Path) -> None:
    names = [name for name in READERS if (placement, name) not in LIVE]
    reads = 0
    for run in range(84):
        chosen = [names[run % len(names)], names[run // len(names) % len(names)]]
        reads += check(tmp_path / str(run), lr, placement, chosen)
    assert reads > 84
