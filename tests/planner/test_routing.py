"""What a plan says of the experts of a mixture. The oracles are counting all cases, and a run."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, product
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.optim.late import most_owed
from offload.planner.explain import plan_of
from offload.planner.routing import Routing, routed_bytes
from tests.support.experts import EXPERTS, HIDDEN, WIDTH, loss_of, mixture
from tests.support.late_copier import CopiedBy, LateCopier

MATRIX = 2 * WIDTH * HIDDEN
"""Bytes of an expert's part of a parameter."""


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 2, 3), (5, 1, 4), (6, 3, 2)])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_the_likelihood_is_that_of_all_cases_counted(experts: int, per_token: int, tokens: int, together: int) -> None:
    choices = [set(one) for one in combinations(range(experts), per_token)]
    hit = sum(any(one & set(range(together)) for one in case) for case in product(choices, repeat=tokens))
    expected = hit / comb(experts, per_token) ** tokens
    assert Routing(experts, per_token).likelihood(tokens, together) == pytest.approx(expected, rel=1e-12)


ON_CPU: dict[str, Any] = {
    "tier": "cpu",
    "param_tier": "cpu",
    "tuning": Tuning(chunk="4KiB", prefetch_units=0, tile=MATRIX),
}


def _moved(use: str) -> int:
    """What goes over the link in a step whose tokens all need expert 0, or, where they are batched, all experts."""
    model = mixture(use)()
    for layer in model.layers:
        layer.router.bias.data[0] = 100.0
    with OffloadZero(model, **ON_CPU) as optimizer:
        for _ in range(2):
            before = optimizer.stats()
            loss_of(model, torch.arange(11)).backward()
            optimizer.grad(model.head.bias)  # waits for the last one
            after = optimizer.stats()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    return sum(int(after[key] - before[key]) for key in ("host_to_device_bytes", "device_to_host_bytes"))


def test_a_run_moves_as_much_more_for_more_experts_as_the_plan_says(copied_by: CopiedBy) -> None:
    names = [name for name, _ in mixture("batched")().named_parameters() if name.endswith(("up", "down"))]
    planned = plan_of(mixture("batched")(), direct=False, **ON_CPU)
    found = routed_bytes(planned, names, Routing(EXPERTS, 1), 1)
    assert found.nbytes == 2 * 2 * EXPERTS * MATRIX
    copied_by(lambda: LateCopier(1))
    assert _moved("batched") - _moved("grouped") == found.link - found.link_expected


def test_tiles_of_one_expert_move_what_tokens_need(tmp_path: Path) -> None:
    tuning = Tuning(chunk="4KiB", tile=MATRIX)
    model = mixture("grouped")()
    names = ["layers.0.experts.up", "layers.0.experts.down"]
    model.layers[0].experts.requires_grad_(False)
    options: dict[str, Any] = {"path": tmp_path, "param_tier": "nvme", "cpu_memory": "1MiB", "tuning": tuning}
    planned = plan_of(model, direct=False, **options)
    routing = Routing(EXPERTS, 2)
    found = routed_bytes(planned, names, routing, 3)
    size = 2 * EXPERTS * MATRIX
    expected = 1 - (2 / 3) ** 3
    assert found.together == 1
    assert (found.link, found.link_expected) == (2 * size, round(expected * 2 * size))  # no gradient comes back
    assert found.disk_expected == round(expected * found.disk)
    assert found.disk <= 2 * size
    assert routed_bytes(planned, [], routing, 3).nbytes == 0
    alike = plan_of(model, direct=False, ranks=2, stage=3, **options)
    assert routed_bytes(alike, names, routing, 3).link_expected == 2 * size  # ranks gather all tiles
    assert found.states == found.states_expected == 0  # they are frozen


class Layer(nn.Module):
    """Experts, each with one matrix."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, HIDDEN, WIDTH))


@cache
def _simulated(chance: float, most: int) -> float:
    """In which part of many steps a chunk is stepped that has tokens with this chance, and owes at most so many."""
    generator = random.Random(1)
    owed = moved = 0
    for _ in range(steps := 50_000):
        if generator.random() < chance or owed == most:
            moved, owed = moved + 1, 0
        else:
            owed += 1
    return moved / steps


def test_ranks_that_share_late_experts_fetch_what_any_of_them_needs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path, "param_tier": "nvme", "tuning": Tuning(chunk="4KiB", tile=2 * MATRIX)}
    planned = plan_of(nn.ModuleList([Layer(EXPERTS)]), direct=False, ranks=2, stage=3, **options)
    found = routed_bytes(planned, ["0.up"], Routing(EXPERTS, 1), 3)
    assert found.link_expected == round(found.link * (1 - (2 / 3) ** 6))


@pytest.mark.parametrize("experts", [EXPERTS, 500])
def test_states_of_idle_experts_are_moved_when_they_have_tokens_or_owe_the_most(experts: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path, "param_tier": "nvme", "accumulation": 2}
    planned = plan_of(
        nn.ModuleList([Layer(experts)]), direct=False, tuning=Tuning(chunk="4KiB", tile=MATRIX), **options
    )
    planned = planned.with_memory(planned.least())
    found = routed_bytes(planned, ["0.up"], Routing(experts, 1), 2)
    slots = planned.place().states
    assert found.states == 2 * sum(slots.streamed)
    chance = 1 - (1 - 1 / experts) ** 4  # of two micro-batches
    expected = [size * _simulated(chance, most_owed(chunk)) for chunk, size in enumerate(slots.sizes)]
    assert found.states_expected == pytest.approx(2 * sum(expected) * sum(slots.streamed) / sum(slots.sizes), rel=0.03)
