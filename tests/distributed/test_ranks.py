"""The harness itself: a rank that fails, dies or hangs is reported, not waited for."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailedError, World, Worlds


def _sum_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} cannot")
    return dist.get_rank()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_work_together(worlds: Worlds, size: int) -> None:
    assert worlds(size).run(_sum_of_ranks) == [sum(range(size))] * size


def test_a_world_stays_for_the_next_test(worlds: Worlds) -> None:
    first = worlds(2)
    first.run(_sum_of_ranks)
    assert worlds(2) is first


def test_an_error_of_a_rank_is_reported_and_its_world_not_used_again(worlds: Worlds) -> None:
    world = worlds(3)
    with pytest.raises(RanksFailedError, match=r"rank 1 of 3:(.|\n)*ValueError: rank 1 cannot"):
        world.run(_fail_on, 1)
    assert worlds(3) is not world
    assert worlds(3).run(_sum_of_ranks) == [3.0] * 3


def test_a_dead_rank_is_reported() -> None:
    with World(2) as world, pytest.raises(RanksFailedError, match="rank 1 of 2: died with exit code 7"):
        world.run(_die_on, 1)


def test_a_rank_that_hangs_is_reported_and_ended() -> None:
    began = time.monotonic()
    with World(2) as world:
        world.run(_sum_of_ranks)
        with pytest.raises(RanksFailedError, match=r"rank 0 of 2: not finished within 0\.5 s"):
            world.run(_hang_on, 0, timeout_s=0.5)
    assert time.monotonic() - began < 30
