"""A rank that is dead, stuck or slow: the others get a typed error in time, and can end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload import OffloadZero, Tuning
from offload.checkpoint.reader import Reader
from offload.errors import (
    AccumulationError,
    BudgetError,
    ConfigError,
    NonFiniteGradientError,
    OffloadError,
    OtherRankError,
    RankError,
    TierIOError,
)
from offload.grads.base import GradientBuffer
from offload.model.flat_param import FlatParameters
from offload.model.master_weights import MasterWeights
from offload.model.weights import Weights
from offload.ranks import torch_distributed as comm
from offload.ranks.communicator import Communicator, Work
from offload.storage.directory_lock import Claims
from offload.storage.swap_file import SwapFile
from tests.support import models, sharded
from tests.support.cases import products
from tests.support.communicators import Late
from tests.support.ranks import World, Worlds
from tests.support.toy import take_step

TIMEOUT_S = 2.0
UNIT_BYTES = 16 << 10
"""Of a bucket: no two units of the model fit in it, so each is gathered when it is entered."""
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
        group.reduce_scatter(torch.ones(3000), [torch.empty(1000)]).wait()
    elif name == "all_gather":
        group.all_gather_into_tensor(torch.ones(1000), torch.empty(3000)).wait()
    elif name == "broadcast":
        group.broadcast(torch.ones(1000), source=2)
    else:
        group.all_gather(torch.ones(10))


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
        group.all_gather_into_tensor(torch.ones(1), torch.empty(3))  # not even begun
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
        assert again_s < TIMEOUT_S / 2  # it does not wait once more
    assert world.exit_codes([0, 1]) == [0, 0]


@pytest.mark.parametrize("name", ["reduce_scatter", "gather"])
def test_a_stuck_rank_gives_an_error_within_the_timeout(world: World, name: str) -> None:
    world.signal(2, signal.SIGSTOP)
    world.start(_try_on_the_first_two, name)
    for error, waited_s, again_s in world.results(20, ranks=[0, 1]):
        assert "(timed out)" in str(error)
        assert error.collective == name
        assert TIMEOUT_S <= error.waited_s <= waited_s < TIMEOUT_S + 1
        assert again_s < TIMEOUT_S / 2  # it does not wait once more
    # Gloo's threads hold on until the group's own timeout.
    assert world.exit_codes([0, 1], timeout_s=TIMEOUT_S + 10) == [0, 0]


def _wait_in_a_side_group() -> tuple[float, float]:
    """How long it waits for, and did."""
    group = comm.connect()
    group.side_group.barrier()
    if group.rank == 2:
        time.sleep(600)
    began = time.monotonic()
    with pytest.raises(RankError):
        group.side_group.barrier()
    return group.timeout_s, time.monotonic() - began


def test_the_timeout_of_the_process_group_counts_where_it_is_shorter(world: World) -> None:
    """Gradients travel in a group of their own, which has the same."""
    world.start(_wait_in_a_side_group)
    own_s = TIMEOUT_S + 2
    for limit_s, waited_s in world.results(20, ranks=[0, 1]):
        assert limit_s == own_s
        assert own_s - 0.1 <= waited_s < own_s + 2
    world.signal(2, signal.SIGKILL)


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
    work = group.all_gather_into_tensor(torch.ones(1), out)
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
    first = group.all_gather_into_tensor(torch.ones(1000), torch.empty(3000))
    time.sleep(TIMEOUT_S / 2)
    second = group.all_gather_into_tensor(torch.ones(1000), torch.empty(3000))
    for work in (first, second):
        with pytest.raises(RankError):
            work.wait()
    return time.monotonic() - began


def test_what_was_under_way_fails_with_the_first(world: World) -> None:
    world.start(_wait_for_two)
    for waited_s in world.results(20, ranks=[0, 1]):
        assert TIMEOUT_S <= waited_s < 1.4 * TIMEOUT_S
    world.signal(2, signal.SIGKILL)


def _close_with_work_under_way() -> bool:
    group = comm.connect(timeout_s=TIMEOUT_S)
    if group.rank == 2:
        time.sleep(600)
    group.all_gather_into_tensor(torch.ones(1000), torch.empty(3000))
    return group.close()


def test_close_says_whether_memory_is_still_in_use(world: World) -> None:
    world.start(_close_with_work_under_way)
    assert world.results(20, ranks=[0, 1]) == [False, False]
    world.signal(2, signal.SIGKILL)


def _interrupted(folder: Path) -> str:
    """Rank 0 is interrupted while it waits for the others, which come to the barrier after that."""
    group = comm.connect()
    ended = folder / "ended"
    if group.rank == 0:
        import _thread
        import threading

        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        ended.touch()
        return "interrupted"
    while not ended.exists():
        time.sleep(0.05)
    group.barrier()
    return "met"


def test_ctrl_c_ends_a_wait(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(3).run(_interrupted, tmp_path) == ["interrupted", "met", "met"]


def _impatient(stage: int, **tuning: Any) -> tuple[OffloadZero, Iterator[Callable[[], torch.Tensor]]]:
    """A training that waits for TIMEOUT_S, and its losses."""
    made = comm.connect

    def connect(*args: Any, **options: Any) -> Communicator:
        return made(*args, **{"timeout_s": TIMEOUT_S} | options)

    model = models.build("gpt")
    with patch.object(comm, "connect", connect):
        return OffloadZero(model, stage=stage, tuning=Tuning(threads=1, **tuning)), models.losses("gpt", model)


def _train_until_lost(stage: int, lost: int) -> tuple[str, str, float]:
    """The errors of the step in which a rank dies and of a later call, and the seconds until the first."""
    optimizer, batches = _impatient(stage)

    def step() -> None:
        take_step(optimizer, next(batches)())

    step()
    step()
    if dist.get_rank() == lost:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        step()
    waited_s = time.monotonic() - began
    with pytest.raises(RankError) as again:
        optimizer.step()
    with suppress(RankError):
        optimizer.close()
    return str(caught.value), str(again.value), waited_s


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_dies_in_training_is_final_on_the_others(world: World, stage: int) -> None:
    world.start(_train_until_lost, stage, 2)
    for first, again, waited_s in world.results(60, ranks=[0, 1]):
        assert "another rank is slow, stuck or dead" in first
        assert again == first
        assert waited_s < 10 * TIMEOUT_S


def _differ(kind: str) -> str:
    model = models.build("mlp")
    rank = dist.get_rank()
    options: dict[str, Any] = {}
    if kind == "model" and rank == 1:
        model.last = torch.nn.Linear(67, 9)
    if kind == "memory" and rank == 1:
        options["cpu_memory"] = 1000
    if kind == "stage":
        options["stage"] = 1 + rank % 2
    with pytest.raises((ConfigError, BudgetError, OtherRankError)) as caught:
        OffloadZero(model, tuning=Tuning(threads=1), **options)
    return str(caught.value)


def test_ranks_that_differ_are_refused_on_all_of_them(worlds: Worlds) -> None:
    assert all("the ranks differ in the model" in error for error in worlds(2).run(_differ, "model"))
    assert all("the ranks differ in the model" in error for error in worlds(2).run(_differ, "stage"))
    first, second = worlds(2).run(_differ, "memory")
    assert "of RAM are needed" in second
    assert first == f"rank 1: BudgetError: {second}"


TAKEN: dict[str, tuple[type, str]] = {
    "before values travel": (FlatParameters, "make_dense"),
    "after they have": (MasterWeights, "make_flat"),
    "when all is taken": (SwapFile, "make_permanent"),
}
"""What fails, by when that is."""


def _take_twice(place: str | None, path: Path) -> list[torch.Tensor]:
    """Rank 1 has no memory there, once. Returns: a second model after a step."""
    fails_here = dist.get_rank() == 1
    options: dict[str, Any] = {"path": path, "tuning": Tuning(threads=1)}
    if place is not None:
        owner, name = TAKEN[place]
        real = getattr(owner, name)

        def call(*args: Any, **given: Any) -> Any:
            if fails_here:
                raise MemoryError("none is left")
            return real(*args, **given)

        with patch.object(owner, name, call), pytest.raises((MemoryError, OtherRankError)) as caught:
            OffloadZero(models.build("gpt"), **options)
        assert str(caught.value) == ("none is left" if fails_here else "rank 1: MemoryError: none is left")
    model = models.build("gpt")
    with OffloadZero(model, **options) as optimizer:
        take_step(optimizer, next(models.losses("gpt", model))())
        optimizer.synchronize()
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("place", TAKEN)
def test_a_rank_that_fails_to_take_the_model_is_an_error_on_all_at_once(
    worlds: Worlds, tmp_path: Path, place: str
) -> None:
    expected, _ = worlds(2).run(_take_twice, None, tmp_path / "expected")
    for stepped in worlds(2).run(_take_twice, place, tmp_path / "run", timeout_s=40):
        assert all(map(torch.equal, stepped, expected))


ASKED: dict[str, tuple[type, str]] = {
    "step": (Claims, "require_ours"),
    "grad": (GradientBuffer, "values"),
    "state_of": (MasterWeights, "states"),
    "weights": (Weights, "parts"),
}
"""What fails in a call, by the call."""


def _ask_twice(call: str) -> None:
    """The disk of rank 1 fails in a call, once."""
    model, fails_here = models.build("mlp"), dist.get_rank() == 1
    owner, name = ASKED[call]
    param = next(model.parameters())
    with OffloadZero(model, tuning=Tuning(threads=1)) as optimizer:
        next(models.losses("mlp", model))().backward()

        def ask() -> object:
            if call == "weights":
                return list(optimizer.weights())
            return optimizer.step() if call == "step" else getattr(optimizer, call)(param)

        real = getattr(owner, name)

        def fail(*args: Any, **given: Any) -> Any:
            if fails_here:
                raise TierIOError("read", 5, "/a", 0, 0, "failed")
            return real(*args, **given)

        with patch.object(owner, name, fail), pytest.raises((TierIOError, OtherRankError, ConfigError)) as caught:
            ask()
        kind = TierIOError if fails_here else ConfigError if call == "step" else OtherRankError
        assert type(caught.value) is kind
        ask()
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.stats()["step"] == 1 + (call == "step")


@pytest.mark.parametrize("call", ASKED)
def test_a_rank_that_fails_in_a_call_of_all_is_an_error_on_all_and_they_go_on(worlds: Worlds, call: str) -> None:
    worlds(2).run(_ask_twice, call, timeout_s=40)


class _Drawn:
    """Attributes: fails: whether its state cannot be had, once."""

    fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            self.fails = False
            raise ValueError("no state")
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def _commit_twice(path: Path) -> None:
    model, drawn, fails_here = models.build("mlp"), _Drawn(), dist.get_rank() == 1
    with OffloadZero(model, path=path, commit_every=0, tuning=Tuning(threads=1)) as optimizer:
        optimizer.attach(drawn=drawn)
        take_step(optimizer, next(models.losses("mlp", model))())
        drawn.fails = fails_here
        with pytest.raises((ValueError, OtherRankError)) as caught:
            optimizer.commit()
        assert str(caught.value) == ("no state" if fails_here else "rank 1: ValueError: no state")
        optimizer.commit()


def test_a_state_that_one_rank_cannot_commit_is_an_error_on_all_and_they_go_on(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(_commit_twice, tmp_path / "run", timeout_s=40)
    with Reader([tmp_path / "run"]) as reader:
        assert reader.commit.step == 1


def _drop_by_hand() -> tuple[str, str, float]:
    model = models.build("mlp")
    batches = models.losses("mlp", model)
    with OffloadZero(model, tuning=Tuning(threads=1)) as optimizer:
        next(batches)().backward()
        model.zero_grad()
        with pytest.raises(AccumulationError) as dropped:
            next(batches)().backward()
        optimizer.zero_grad()
        next(batches)().backward()
        norm = optimizer.clip_grad_norm_(1e9).item()
        model.zero_grad()
        with pytest.raises(AccumulationError) as late:
            next(batches)().backward()
        optimizer.zero_grad()
        next(batches)().backward()
        optimizer.step()
        assert optimizer.stats()["step"] == 1
        return str(dropped.value), str(late.value), norm


def test_gradients_are_dropped_on_all_ranks_or_not_at_all(worlds: Worlds) -> None:
    first, second = worlds(2).run(_drop_by_hand)
    assert first == second
    assert "with optimizer.zero_grad()" in first[0]
    assert "with optimizer.zero_grad()" in first[1]
    assert first[2] > 0


def _drop_one(stage: int, when: str, ranks: tuple[int, ...]) -> tuple[str, bool, int]:
    """What `step()` says, whether the parameter without its gradient is what it was, and the steps after one more."""
    torch.manual_seed(0)
    model, rank = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), dist.get_rank()
    weight, inputs = model[1].weight, torch.full((2, 8), 1.0 + rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with OffloadZero(model, sgd, stage=stage, compute_dtype=torch.float32, tuning=Tuning(threads=1)) as optimizer:
        before = optimizer.state_of(weight)["master"]
        model(inputs).square().mean().backward()
        if when == "after a norm":
            optimizer.clip_grad_norm_(1e9)
        if rank in ranks:
            weight.grad = None
        said = "nothing"
        try:
            optimizer.step()
        except OffloadError as error:
            said = f"{type(error).__name__}: {error}"
        is_kept = torch.equal(optimizer.state_of(weight)["master"], before)
        optimizer.zero_grad()
        take_step(optimizer, model(inputs).square().mean())
        return said, is_kept, optimizer.stats()["step"]


@pytest.mark.parametrize(
    ("stage", "when", "ranks"),
    products(
        [1, 2, 3],
        ["before", "after a norm"],
        [(0,), (0, 1)],
        often=[(1, "before", (0,)), (2, "after a norm", (0, 1)), (3, "before", (0, 1)), (3, "after a norm", (0,))],
    ),
)
def test_a_gradient_that_is_dropped_by_hand_is_left_out_or_refused(
    worlds: Worlds, stage: int, when: str, ranks: tuple[int, ...]
) -> None:
    """Left out, as in plain torch, where all ranks do so before it was averaged for a norm."""
    for rank, (said, is_kept, steps) in enumerate(worlds(2).run(_drop_one, stage, when, ranks, timeout_s=40)):
        assert is_kept
        if (when, ranks) == ("before", (0, 1)):
            assert (said, steps) == ("nothing", 2)
        else:
            expected = "AccumulationError: the gradient of 1.weight" if rank in ranks else "ConfigError"
            assert said.startswith(expected), said
            assert steps == 1


def _drop_on_some(stage: int, accumulation: int, way: str | None) -> tuple[list[str], list[torch.Tensor]]:
    """What is said where not all ranks drop their gradients, and what a training that goes on after it makes."""
    model = models.build("gpt")
    rank = dist.get_rank()
    said: list[str] = []
    with OffloadZero(model, stage=stage, accumulation=accumulation, tuning=Tuning(threads=1, bucket=4096)) as optimizer:

        def train(batches: Iterator[Any]) -> None:
            for _ in range(accumulation):
                (next(batches)() / accumulation).backward()
            take_step(optimizer)

        train(sharded.batches_of("gpt", model, rank, 2))
        if way is not None:
            batches = models.losses("gpt", model)
            loss = next(batches)()
            if way == "other dropped" or rank == 0:
                loss.backward()
            try:
                if way != "other dropped" or rank == 0:
                    optimizer.zero_grad()
                    train(batches)
                else:
                    optimizer.step()
            except AccumulationError as error:
                said.append(str(error))
            optimizer.zero_grad()
        batches = sharded.batches_of("gpt", model, rank, 2)
        for _ in range(2):
            train(batches)
        optimizer.synchronize()
        return said, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("way", "stage", "accumulation"),
    products(
        ["only one had any", "other dropped"],
        [1, 2],
        [1, 2],
        often=[("only one had any", 2, 1), ("other dropped", 1, 2)],
    ),
)
def test_gradients_dropped_on_some_ranks_are_an_error_on_all_and_they_go_on(
    worlds: Worlds, stage: int, accumulation: int, way: str
) -> None:
    _, expected = worlds(2).run(_drop_on_some, stage, accumulation, None)[0]
    for said, params in worlds(2).run(_drop_on_some, stage, accumulation, way, timeout_s=40):
        assert [text.split(":")[0] for text in said] == [
            "the gradients of ranks [0] were dropped by zero_grad() when they had been averaged with those of ranks [1]"
        ]
        assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


def _backward_on_some(way: str) -> tuple[str, int]:
    """The error, and the steps that were made."""
    optimizer, batches = _impatient(3, bucket=UNIT_BYTES)
    take_step(optimizer, next(batches)())
    said = "nothing"
    try:
        loss = next(batches)()
        if dist.get_rank() == 0:
            loss.backward()
        if way == "zero_grad":
            optimizer.zero_grad()
            next(batches)().backward()
        optimizer.step()
    except OffloadError as error:
        said = type(error).__name__
    steps = optimizer.stats()["step"]
    with suppress(OffloadError):
        optimizer.close()
    return said, steps


@pytest.mark.parametrize("way", ["step", "zero_grad"])
def test_at_stage_3_a_backward_on_one_rank_alone_is_an_error_and_no_step(way: str) -> None:
    """It gathers units, which the other ranks do not enter."""
    with World(2, group_timeout_s=TIMEOUT_S + 2) as world:
        for said, steps in world.run(_backward_on_some, way, timeout_s=30):
            assert (said, steps) == ("RankError", 1)


def _step_of_one(stage: int) -> tuple[int, list[torch.Tensor]]:
    """The steps that were made, the last of them with a gradient on one rank alone, and the parameters."""
    model = models.build("gpt")
    batches = models.losses("gpt", model)
    with OffloadZero(model, stage=stage, tuning=Tuning(threads=1)) as optimizer:
        take_step(optimizer, next(batches)())
        loss = next(batches)()
        if dist.get_rank() == 0:
            loss.backward()
        optimizer.step()
        with optimizer.gathered(model):
            return optimizer.stats()["step"], [param.detach().clone() for param in model.parameters()]


def test_a_backward_on_one_rank_alone_that_gathers_nothing_is_the_step_of_all_ranks_at_every_stage(
    worlds: Worlds,
) -> None:
    """At stage 3 the whole model stays gathered after its forward, where it is no larger than a bucket."""
    (_, expected), *_ = worlds(2).run(_step_of_one, 2)
    for steps, params in worlds(2).run(_step_of_one, 3):
        assert steps == 2
        assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


def _not_finite(skip: bool) -> tuple[int, str]:
    model = models.build("mlp")
    batches = models.losses("mlp", model)
    with OffloadZero(model, nonfinite="skip" if skip else "raise", tuning=Tuning(threads=1)) as optimizer:
        loss = next(batches)()
        (loss * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
        said = ""
        if skip:
            optimizer.step()
        else:
            with pytest.raises(NonFiniteGradientError) as caught:
                optimizer.step()
            said = str(caught.value.parameter)
        optimizer.zero_grad()
        next(batches)().backward()
        optimizer.step()
        return optimizer.stats()["step"], said


@pytest.mark.parametrize("skip", [False, True])
def test_nan_on_one_rank_is_seen_by_all(worlds: Worlds, skip: bool) -> None:
    assert worlds(2).run(_not_finite, skip) == [(1, "" if skip else "gain")] * 2


def _step_differently(how: str) -> tuple[str, list[torch.Tensor]]:
    model = models.build("mlp")
    batches = models.losses("mlp", model)
    with OffloadZero(model, tuning=Tuning(threads=1)) as optimizer:
        next(batches)().backward()
        (group,) = optimizer.param_groups
        given = group["lr"]
        is_other = dist.get_rank() == 1
        if how == "lr" and is_other:
            group["lr"] = 2 * given
        if how == "amsgrad" and is_other:
            group["amsgrad"] = True
        if how == "clip" and is_other:
            optimizer.clip_grad_norm_(1e-3)
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        assert optimizer.stats()["step"] == 0
        group["lr"], group["amsgrad"] = given, False
        if how == "clip" and not is_other:
            optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.synchronize()
        return str(caught.value), [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("how", ["lr", "amsgrad", "clip"])
def test_another_step_on_some_ranks_is_an_error_on_all_and_they_go_on(worlds: Worlds, how: str) -> None:
    (said, first), (other, second) = worlds(2).run(_step_differently, how)
    assert "alike on every rank" in said
    assert said == other or "param group 0 has amsgrad=True" in other  # whose fault it is says what it is
    assert all(map(torch.equal, first, second))


class _NeverEnds(Work):
    def __init__(self, group: Communicator) -> None:
        self._group = group

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._group.check()
        raise AssertionError("nobody waits for ever")


class _Stuck(Late):
    """From `armed` on the first all-gather never ends, and the second cannot be launched."""

    armed = -1
    writes_to = 0

    def all_gather_into_tensor(self, shard: torch.Tensor, out: torch.Tensor) -> Work:
        if _Stuck.armed < 0:
            return super().all_gather_into_tensor(shard, out)
        _Stuck.armed += 1
        if _Stuck.armed == 1:
            _Stuck.writes_to = out.data_ptr()
            return _NeverEnds(self)
        assert isinstance(self._inner, comm.Group)
        raise self._inner.fail("all_gather", 0.0, "stuck")


class _TwoDtypes(nn.Module):
    """One unit of two flat parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.linear(x).float())
        return found


def _memory_of_a_stuck_collective() -> list[bool]:
    """Whether a flat parameter still has the memory, after the failure and when all is closed."""
    made, model = comm.connect, _TwoDtypes()
    connect = patch.object(comm, "connect", lambda *args, **options: _Stuck(made(*args, **options)))
    with connect, OffloadZero(model, stage=3, param_tier="cpu", keep_fp32=[nn.LayerNorm]) as optimizer:
        flats, found = optimizer._parts.parameters.flats, []
        _Stuck.armed = 0
        with pytest.raises(RankError):
            model(torch.ones(2, 8))
        found.append(_Stuck.writes_to in [flat.data_ptr() for flat in flats])
        with suppress(OffloadError):
            optimizer.close()
        found.append(_Stuck.writes_to in [flat.data_ptr() for flat in flats])
        _Stuck.armed = -1
    return found


def test_memory_stays_where_a_stuck_collective_may_still_write(world: World) -> None:
    assert world.run(_memory_of_a_stuck_collective) == [[True, True]] * 3
