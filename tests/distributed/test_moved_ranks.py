"""Machines with disks of their own that come in another order, fewer or more of them: shards stay where they are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_commits import AT, MORE, SPLIT, STEPS, Training, _uninterrupted, same
from tests.support.machines import RUN, needs_proc, on
from tests.support.ranks import Worlds

pytestmark = [pytest.mark.timeout(120), needs_proc]


class Drawn:
    """State of this rank that no other has."""

    def __init__(self) -> None:
        self.value = torch.full((3,), float(100 * dist.get_rank()))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def begin(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> None:
    """Commits a step, and is cut off later."""
    with on(base, machines):
        training = Training(RUN, **options)
        drawn = Drawn()
        training.optimizer.attach(drawn=drawn, rng=True)
        random.seed(dist.get_rank())
        training.go_to(AT)
        drawn.value += 1
        training.optimizer.commit({"rank": dist.get_rank(), "x": torch.arange(dist.get_rank() + 1)})
        training.go_to(AT + 1)
        training.optimizer.close()


def go_on(
    base: str, machines: tuple[int, ...], options: dict[str, Any], step: int, until: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Resumes at a step, and trains until another one, which is committed. Returns: the bits, and `stats()`."""
    with on(base, machines):
        training = Training(RUN, **{"resume": True} | options)
        optimizer, rank = training.optimizer, dist.get_rank()
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == step
        drawn = Drawn()
        optimizer.attach(drawn=drawn, rng=True)
        extra: Any = optimizer.resumed.extra
        assert (extra["rank"], len(extra["x"])) == (rank, rank + 1)
        assert drawn.value.tolist() == [100 * rank + 1] * 3
        random_of_rank = random.Random(rank)
        assert random.random() == random_of_rank.random()
        drawn.value += 1
        training.go_to(step + 1)
        optimizer.rollback()
        assert drawn.value.tolist() == [100 * rank + 1] * 3
        training.again_from(step)
        if until > step:
            training.go_to(until)
            random.seed(rank)
            optimizer.commit(extra)
        with optimizer:
            return training.bits(), optimizer.stats()


def numbers_in(base: Path) -> list[list[int]]:
    """The shards on each machine."""
    return [
        sorted(int(path.name.rpartition("-")[2]) for path in place.glob("run/swap-*"))
        for place in sorted(base.glob("machine*"))
    ]


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ((0, 1), (1, 0), {"stage": 2, "cpu_memory": "least", "tuning": SPLIT}),
        ((0, 1, 2), (2, 0, 1), {"stage": 3, "param_tier": "nvme", "cpu_memory": "least"}),
        ((0, 0, 1, 1), (1, 1, 0, 0), {"stage": 3, "mesh": (2, 2)}),
    ],
)
def test_machines_in_another_order_go_on_with_the_bits_of_those_in_their_own(
    worlds: Worlds, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], options: dict[str, Any]
) -> None:
    world, base = worlds(len(before)), str(tmp_path)
    (expected, *_) = world.run(_uninterrupted, str(tmp_path / "alone"), options)
    world.run(begin, base, before, options)
    lying, runs = numbers_in(tmp_path), {path.name for path in tmp_path.glob("machine*/run/swap-*")}
    step = AT
    for machines, until in ((after, AT + MORE), (before, AT + MORE), (after, STEPS)):
        for rank, (bits, stats) in enumerate(world.run(go_on, base, machines, options, step, until)):
            assert stats["rank"] == rank
            assert until < STEPS or same(bits, expected)
        step = until
        # No slot was written anew, or the files would have other names.
        assert numbers_in(tmp_path) == lying
        assert {path.name for path in tmp_path.glob("machine*/run/swap-*")} == runs
