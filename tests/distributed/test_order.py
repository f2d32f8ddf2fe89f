"""Ranks launch the collectives of all groups together in one order, as kernels that share a device need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import Tuning
from offload.dist import torch_distributed as comm
from tests.support import sharded
from tests.support.communicators import DifferentOrderError, Ordered
from tests.support.ranks import Worlds

STREAMED: dict[str, Any] = {"stage": 3, "tier": "cpu", "param_tier": "cpu"}


def _train(kind: str, idle: bool, options: dict[str, Any]) -> None:
    tuning = Tuning(chunk=4096, threads=1, bucket=4096)
    sharded.train(kind, 3, wire="ordered", idle=idle, tuning=tuning, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [STREAMED, STREAMED | {"accumulation": 2}, STREAMED | {"apart": True}, {"stage": 2, "tier": "cpu"}],
    ids=["streamed", "accumulated", "on a device of its own", "resident"],
)
@pytest.mark.parametrize("kind", ["gpt", "turns"])
def test_ranks_with_the_same_gradients_launch_in_one_order(worlds: Worlds, kind: str, options: dict[str, Any]) -> None:
    worlds(2).run(_train, kind, False, options)


@pytest.mark.parametrize(
    "options",
    [STREAMED, STREAMED | {"accumulation": 2}, STREAMED | {"apart": True}, {"stage": 2, "tier": "cpu"}],
    ids=["streamed", "accumulated", "on a device of its own", "resident"],
)
def test_ranks_with_different_gradients_launch_in_one_order(worlds: Worlds, options: dict[str, Any]) -> None:
    worlds(2).run(_train, "turns", True, options)


def _cross() -> bool:
    """Two groups, whose collectives every rank launches in an order of its own."""
    group = Ordered(comm.connect())
    side = group.side_group
    order = (group, side) if group.rank else (side, group)
    works = [one.all_gather_into_tensor(torch.ones(4), torch.empty(8)) for one in order]
    for work in works:
        work.wait()
    try:
        group.require_one_order()
    except DifferentOrderError:
        return True
    finally:
        group.close()
    return False


def test_another_order_is_seen(worlds: Worlds) -> None:
    assert worlds(2).run(_cross) == [True, True]
