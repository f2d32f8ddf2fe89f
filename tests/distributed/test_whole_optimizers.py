"""Optimizers that step whole parameters, over ranks: the bits of plain torch on gradients averaged in their order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from tests.parity.test_optimizers import clip
from tests.parity.test_whole_optimizers import MAKES, Net
from tests.support.cases import products
from tests.support.ranks import Worlds
from tests.support.toy import batch

STEPS = 4
MOST = 0.05
"""That a gradient is clipped to."""
TUNING = Tuning(chunk=4096, threads=1, bucket=4096)
"""Some matrices are larger than a chunk, and than a bucket."""
NAMES = ("muon", "muon adjusted", "muon and adamw", "lamb", "adafactor", "factored", "one class with a flag")
USUAL = [
    ("muon", 2, 1, "cpu"),
    ("muon", 2, 2, "device"),
    ("muon", 3, 3, "cpu"),
    ("lamb", 2, 2, "cpu"),
    ("factored", 3, 2, "cpu"),
]
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in USUAL else pytest.mark.slow)
    for case in (
        (name, ranks, stage, tier)
        for name in NAMES
        for ranks in (2, 3, 4)
        for stage in (1, 2, 3)
        for tier in ("device", "cpu")
    )
]
Found = tuple[dict[str, Tensor], dict[str, Mapping[str, Any]]]


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def gradients(model: nn.Module, step: int, micro: int, rank: int, ranks: int, micros: int) -> None:
    (model(batch((step * micros + micro) * ranks + rank)).square().mean() / micros).backward()
    if step < 2 and micros == 1:
        model.blocks[1][1].weight.grad = None  # type: ignore[union-attr, index]


def add(total: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for key, value in values.items():
        total[key] = total[key] + value if key in total else value.clone()


@cache
def plain(name: str, counts: tuple[int, ...], micros: int = 1, stage: int = 1) -> Found:
    """Args: counts: how many ranks take each step; micros: micro-batches of each of them; stage: from 2 on each
    micro-batch is averaged by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    model = net()
    optimizers = MAKES[name](list(model.parameters()))
    for step, ranks in enumerate(counts):
        total: dict[str, Tensor] = {}
        for together in [range(micros)] if stage == 1 else [range(micro, micro + 1) for micro in range(micros)]:
            average: dict[str, Tensor] = {}
            for rank in range(ranks):
                model.zero_grad()
                for micro in together:
                    gradients(model, step, micro, rank, ranks, micros)
                add(average, {key: param.grad for key, param in model.named_parameters() if param.grad is not None})
            add(total, {key: value / ranks for key, value in average.items()})
        for key, param in model.named_parameters():
            param.grad = total.get(key)
        clip(model, MOST)
        for optimizer in optimizers:
            optimizer.step()
    torch.set_num_threads(before)
    states: dict[str, Mapping[str, Any]] = {}
    for key, param in model.named_parameters():
        states[key] = next(dict(one.state[param]) for one in optimizers if param in one.state)
    return {key: param.detach().clone() for key, param in model.named_parameters()}, states


def train(name: str, first: int, last: int, commit: bool, options: dict[str, Any], micros: int = 1) -> Found:
    """On a rank."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = net()
    given = MAKES[name](list(model.parameters()))
    options = {"compute_dtype": torch.float32, "tuning": TUNING, "accumulation": micros} | options
    with OffloadZero(model, given, **options) as optimizer:
        for step in range(first, last):
            optimizer.zero_grad()
            for micro in range(micros):
                gradients(model, step, micro, rank, ranks, micros)
            optimizer.clip_grad_norm_(MOST)
            optimizer.step()
        if commit:
            optimizer.commit()
        states = {key: dict(optimizer.state_of(param)) for key, param in model.named_parameters()}
        params = {}
        for key, param in model.named_parameters():
            with optimizer.gathered(param):
                params[key] = param.detach().clone()
        return params, states


def assert_as_plain(found: list[Found], expected: Found) -> None:
    params, states = expected
    for values, shown in found:
        for key, value in params.items():
            assert torch.equal(values[key], value), key
            assert torch.equal(shown[key]["master"], value), key
            for kind, state in states[key].items():
                wanted = state if isinstance(state, Tensor) else torch.tensor(float(state))
                assert torch.equal(torch.as_tensor(shown[key][kind], dtype=wanted.dtype), wanted), (key, kind)


@pytest.mark.parametrize(("name", "ranks", "stage", "tier"), CASES)
def test_ranks_have_the_bits_of_plain_torch(worlds: Worlds, name: str, ranks: int, stage: int, tier: str) -> None:
    options = {"tier": "cpu", "stage": stage, "param_tier": tier}
    runs = worlds(ranks).run(train, name, 0, STEPS, False, options)
    assert_as_plain(runs, plain(name, (ranks,) * STEPS))


@pytest.mark.parametrize(
    ("name", "stage", "tier"),
    products(NAMES, [1, 2, 3], ["device", "cpu"], often=[("muon", 1, "cpu"), ("one class with a flag", 3, "cpu")]),
)
def test_one_step_is_of_the_average_of_all_micro_batches(worlds: Worlds, name: str, stage: int, tier: str) -> None:
    """Newton-Schulz once a step: not once for each micro-batch, and not of a part of a matrix."""
    runs = worlds(2).run(train, name, 0, STEPS, False, {"tier": "cpu", "stage": stage, "param_tier": tier}, 4)
    assert_as_plain(runs, plain(name, (2,) * STEPS, 4, stage))


WAYS = [(name, *ranks) for name in NAMES for ranks in [(2, 3), (3, 2), (1, 2), (2, 1), (4, 3)]]
USUAL_WAYS = [("muon", 2, 3), ("adafactor", 3, 2)]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [pytest.param(*way, marks=() if way in USUAL_WAYS else pytest.mark.slow) for way in WAYS],
)
def test_a_commit_is_resumed_at_another_number_of_ranks(
    worlds: Worlds, name: str, before: int, after: int, tmp_path: Path
) -> None:
    options = {"tier": "nvme", "path": tmp_path / "run", "commit_every": 0, "stage": 2, "param_tier": "nvme"}
    worlds(before).run(train, name, 0, 2, True, options)
    found = worlds(after).run(train, name, 2, STEPS, False, options | {"resume": True})
    assert_as_plain(found, plain(name, (before,) * 2 + (after,) * (STEPS - 2)))
