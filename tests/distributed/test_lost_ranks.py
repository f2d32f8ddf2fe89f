"""A rank that is dead, stuck or slow: the others get a typed error in time, and can end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from offload import comm
from offload.collectives import Communicator
from offload.errors import RankError
from tests.support.ranks import World, Worlds

TIMEOUT_S = 2.0
CALLS = ["reduce_scatter", "all_gather", "broadcast", "gather"]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world() -> Iterator[World]:
    """Three ranks, of which the last one is going to be lost."""
    with World(3, group_timeout_s=TIMEOUT_S + 2) as made:
        made.run(_meet)
        yield made


def _meet() -> None:
    comm.connect().barrier()


def _call(group: Communicator, name: str) -> None:
    if name == "reduce_scatter":
        group.reduce_scatter(torch.ones(3000), torch.empty(1000)).wait()
    elif name == "all_gather":
        group.all_gather(torch.ones(1000), torch.empty(3000)).wait()
    elif name == "broadcast":
        group.broadcast(torch.ones(1000), source=2)
    else:
        group.gather(torch.ones(10))


def _call_thrice(group: Communicator, name: str) -> None:
    """A collective may end on this rank though another one is lost; the ones after it do not."""
    for _ in range(3):
        _call(group, name)


def _try(name: str) -> tuple[RankError, float, float]:
    """The error, the seconds until it came, and those until the next call failed with the same."""
    group = comm.connect(timeout_s=TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        _call_thrice(group, name)
    failed = time.monotonic()
    with pytest.raises(RankError) as again:
        group.all_gather(torch.ones(1), torch.empty(3))  # not even begun
    ended = time.monotonic()
    assert again.value is caught.value
    group.close()
    return caught.value, failed - began, ended - failed


def _try_on_the_first_two(name: str) -> object:
    if dist.get_rank() == 2:
        time.sleep(600)
    return _try(name)


@pytest.mark.parametrize("name", CALLS)
def test_a_killed_rank_gives_an_error_at_once(world: World, name: str) -> None:
    world.start(_try_on_the_first_two, name)
    time.sleep(0.2)
    world.signal(2, signal.SIGKILL)
    for rank, (error, waited_s, again_s) in enumerate(world.results(20, ranks=[0, 1])):
        assert f"{name} on rank {rank} of 3 failed after" in str(error)
        assert "another rank is slow, stuck or dead" in str(error)
        assert error.collective == name
        assert error.waited_s <= waited_s < TIMEOUT_S
        assert again_s < 0.1
    assert world.exit_codes([0, 1]) == [0, 0]


@pytest.mark.parametrize("name", ["reduce_scatter", "gather"])
def test_a_stuck_rank_gives_an_error_within_the_timeout(world: World, name: str) -> None:
    world.signal(2, signal.SIGSTOP)
    world.start(_try_on_the_first_two, name)
    for error, waited_s, again_s in world.results(20, ranks=[0, 1]):
        assert "(timed out)" in str(error)
        assert error.collective == name
        assert TIMEOUT_S <= error.waited_s <= waited_s < TIMEOUT_S + 1
        assert again_s < 0.1
    # Gloo's threads hold on until the group's own timeout.
    assert world.exit_codes([0, 1], timeout_s=TIMEOUT_S + 10) == [0, 0]


def _late_by(seconds: float) -> float:
    group = comm.connect(timeout_s=TIMEOUT_S)
    if group.rank == 2:
        time.sleep(seconds)
    began = time.monotonic()
    group.barrier()
    return time.monotonic() - began


def test_a_rank_that_is_late_within_the_timeout_is_waited_for(worlds: Worlds) -> None:
    first, second, last = worlds(3).run(_late_by, TIMEOUT_S / 2)
    assert min(first, second) > TIMEOUT_S / 4
    assert last < TIMEOUT_S / 4


def _launch_and_wait_later(seconds: float) -> None:
    group = comm.connect(timeout_s=0.5)
    out = torch.empty(3)
    work = group.all_gather(torch.ones(1), out)
    time.sleep(seconds)
    work.wait()
    assert out.sum() == 3


def test_what_has_arrived_may_be_waited_for_after_the_timeout(worlds: Worlds) -> None:
    worlds(3).run(_launch_and_wait_later, 0.8)


def _wait_for_two() -> float:
    group = comm.connect(timeout_s=TIMEOUT_S)
    if group.rank == 2:
        time.sleep(600)
    began = time.monotonic()
    first = group.all_gather(torch.ones(1000), torch.empty(3000))
    time.sleep(TIMEOUT_S / 2)
    second = group.all_gather(torch.ones(1000), torch.empty(3000))
    for work in (first, second):
        with pytest.raises(RankError):
            work.wait()
    return time.monotonic() - began


def test_what_was_under_way_fails_with_the_first(world: World) -> None:
    world.start(_wait_for_two)
    for waited_s in world.results(20, ranks=[0, 1]):
        assert TIMEOUT_S <= waited_s < 1.4 * TIMEOUT_S


def _close_with_work_under_way() -> bool:
    group = comm.connect(timeout_s=TIMEOUT_S)
    if group.rank == 2:
        time.sleep(600)
    group.all_gather(torch.ones(1000), torch.empty(3000))
    return group.close()


def test_close_says_whether_memory_is_still_in_use(world: World) -> None:
    world.start(_close_with_work_under_way)
    assert world.results(20, ranks=[0, 1]) == [False, False]
    world.signal(2, signal.SIGKILL)


def _interrupted() -> str:
    group = comm.connect()
    if group.rank == 0:
        import _thread
        import threading

        threading.Timer(0.3, _thread.interrupt_main).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        assert time.monotonic() - began < 1
        return "interrupted"
    time.sleep(1.5)
    group.barrier()
    return "met"


def test_ctrl_c_ends_a_wait(worlds: Worlds) -> None:
    assert worlds(3).run(_interrupted) == ["interrupted", "met", "met"]
