"""Reductions under way beside compute; what is in them is tested in tests/grads."""

from __future__ import annotations

import time

import pytest
import torch

from offload.ranks import torch_distributed as comm
from tests.support.communicators import Delayed
from tests.support.ranks import Worlds


def _seconds(overlapped: bool, delay_s: float) -> float:
    """Of a backward that computes for a while after each of 6 buckets has left."""
    group = Delayed(comm.connect(), delay_s)
    group.barrier()
    began = time.monotonic()
    works = []
    for _ in range(6):
        works.append(group.reduce_scatter(torch.ones(1000 * group.size), [torch.empty(1000)]))
        if not overlapped:
            works[-1].wait()
        time.sleep(1.2 * delay_s)
    for work in works:
        work.wait()
    assert group.busy_s == pytest.approx(7 * delay_s)
    return time.monotonic() - began


def test_collectives_are_under_way_while_the_rank_computes(worlds: Worlds) -> None:
    """Compared with waiting for each at once: no absolute times, which depend on the machine."""
    delay_s = 0.05
    apart = max(worlds(2).run(_seconds, False, delay_s))
    overlapped = max(worlds(2).run(_seconds, True, delay_s))
    assert apart - overlapped > 0.8 * 5 * delay_s
