"""Any elementwise optimizer over ranks has the bits of plain torch on gradients averaged in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from tests.optim.test_torch_rules import WORKING
from tests.support.ranks import Worlds
from tests.support.toy import Net, batch

STEPS = 5
LATE = 2
"""The step from which on the last bias has gradients."""
TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
NAMES = ("sgd_dampening", "adagrad_initial", "nadam", "lion", "rmsprop_centered")
CASES = [
    pytest.param(
        name, ranks, stage, tier, id=f"{name}-{ranks}-{stage}-{tier}", marks=() if is_often else pytest.mark.slow
    )
    for number, name in enumerate(NAMES)
    for ranks in (2, 3)
    for stage in (1, 2, 3)
    for tier in ("device", "cpu")
    for is_often in ((ranks, stage, tier) in [(2 + number % 2, 1 + number % 3, ("device", "cpu")[number // 2 % 2])],)
]


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def gradients(model: nn.Module, step: int, rank: int, ranks: int) -> None:
    loss = model(batch(step * ranks + rank)).square().mean()
    loss.backward()
    if step < LATE:
        model.head.bias.grad = None  # type: ignore[union-attr]


def schedule(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9


RESUMED_ANEW = {"resume": True, "resume_states": "anew"}
Found = tuple[dict[str, Tensor], dict[str, Mapping[str, Any]]]


@cache
def plain(name: str, counts: tuple[int, ...], *, begins: str = "", at: int = -1) -> Found:
    """Parameters and states of plain torch.

    Args:
        name: of the optimizer.
        counts: how many ranks take each step.
        begins: of another one, which takes over before step `at`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    model = net()
    optimizer = WORKING[name](list(model.parameters()))
    for step, ranks in enumerate(counts):
        if step == at:
            optimizer = WORKING[begins](list(model.parameters()))
        total: dict[str, Tensor] = {}
        for rank in range(ranks):
            model.zero_grad()
            gradients(model, step, rank, ranks)
            for key, param in model.named_parameters():
                if param.grad is not None:
                    total[key] = total[key] + param.grad if key in total else param.grad.clone()
        for key, param in model.named_parameters():
            param.grad = total[key] / ranks if key in total else None
        optimizer.step()
        schedule(optimizer)
    torch.set_num_threads(before)
    states = {key: dict(optimizer.state[param]) for key, param in model.named_parameters()}
    return {key: param.detach().clone() for key, param in model.named_parameters()}, states


def train(name: str, first: int, last: int, commit: bool, options: dict[str, Any]) -> Found:
    """On a rank."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = net()
    given = WORKING[name](list(model.parameters()))
    with OffloadZero(model, given, compute_dtype=torch.float32, tuning=TUNING, **options) as optimizer:
        for step in range(first, last):
            optimizer.zero_grad()
            gradients(model, step, rank, ranks)
            optimizer.step()
            schedule(optimizer)
        if commit:
            optimizer.commit()
        states = {key: dict(optimizer.state_of(param)) for key, param in model.named_parameters()}
        # At stage 3 no rank has a whole parameter between two units.
        read = (
            (lambda key, _: states[key]["master"])
            if options["stage"] == 3
            else (lambda _, param: param.detach().clone())
        )
        return {key: read(key, param) for key, param in model.named_parameters()}, states


def assert_as_plain(name: str, counts: tuple[int, ...], runs: list[Found], **other: Any) -> None:
    params, states = plain(name, counts, **other)
    for found, shown in runs:
        for key, value in params.items():
            assert torch.equal(found[key], value), key
            for kind, state in states[key].items():
                expected = state if isinstance(state, Tensor) else torch.tensor(float(state))
                assert torch.equal(torch.as_tensor(shown[key][kind], dtype=expected.dtype), expected), (key, kind)


@pytest.mark.parametrize(("name", "ranks", "stage", "tier"), CASES)
def test_ranks_have_the_bits_of_plain_torch(worlds: Worlds, name: str, ranks: int, stage: int, tier: str) -> None:
    options = {"tier": "cpu", "stage": stage, "param_tier": tier}
    runs = worlds(ranks).run(train, name, 0, STEPS, False, options)
    assert_as_plain(name, (ranks,) * STEPS, runs)


def changes() -> Iterator[Any]:
    for number, name in enumerate(NAMES):
        for way in ((2, 3), (3, 2)):
            marks = () if number == 0 and way == (2, 3) else pytest.mark.slow
            yield pytest.param(name, *way, id=f"{name}-{way[0]}-{way[1]}", marks=marks)


@pytest.mark.parametrize(("name", "before", "after"), list(changes()))
def test_a_commit_is_resumed_at_another_number_of_ranks(
    worlds: Worlds, name: str, before: int, after: int, tmp_path: Path
) -> None:
    """One parameter has been stepped less often than the others."""
    options = {"tier": "nvme", "path": tmp_path / "run", "commit_every": 0, "stage": 2}
    worlds(before).run(train, name, 0, 3, True, options)
    runs = worlds(after).run(train, name, 3, STEPS, False, options | {"resume": True})
    assert_as_plain(name, (before,) * 3 + (after,) * (STEPS - 3), runs)


@pytest.mark.parametrize("after", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_another_optimizer_begins_on_committed_masters(worlds: Worlds, after: int, tmp_path: Path) -> None:
    options = {"tier": "nvme", "path": tmp_path / "run", "commit_every": 0, "stage": 2}
    worlds(2).run(train, "sgd_dampening", 0, 3, True, options)
    runs = worlds(after).run(train, "adagrad_initial", 3, STEPS, False, options | RESUMED_ANEW)
    counts = (2,) * 3 + (after,) * (STEPS - 3)
    assert_as_plain("sgd_dampening", counts, runs, begins="adagrad_initial", at=3)
