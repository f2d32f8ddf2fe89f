"""Ranks launch the collectives of all groups together in one order, as kernels that share a device need it, and wait
for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero, Tuning
from offload.ranks import torch_distributed as comm
from tests.support import models, sharded
from tests.support.communicators import Awaited, DifferentOrderError, Ordered
from tests.support.ranks import Worlds

STREAMED: dict[str, Any] = {"stage": 3, "tier": "cpu", "param_tier": "cpu"}


def _train(kind: str, idle: bool, options: dict[str, Any]) -> None:
    tuning = Tuning(chunk=4096, threads=1, bucket=4096)
    sharded.train(kind, 3, idle=idle, tuning=tuning, **{"wire": "ordered"} | options)


def _train_without_clipping(path: str, options: dict[str, Any]) -> None:
    """So nothing asks for the gradients before `step`. At stages 1 and 2 one rank has no backward in one step, and
    another none before the end."""
    rank = torch.distributed.get_rank()
    model = models.build("turns")
    model.calls = rank  # type: ignore[assignment]
    tuning = Tuning(chunk=4096, threads=1, bucket=4096)
    with (
        sharded.communicators("ordered"),
        OffloadZero(model, tier="cpu", path=path, commit_every=1, tuning=tuning, **options) as optimizer,
    ):
        for step in range(4):
            if options["stage"] == 3 or (step, rank) not in ((1, 1), (3, 0)):
                model(torch.ones(2, 13)).float().square().sum().backward()
            if step < 3:
                optimizer.step()
                optimizer.zero_grad()


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


@pytest.mark.parametrize("declares", [True, False], ids=["", "undeclared"])
@pytest.mark.parametrize("param_tier", ["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_commits_come_in_one_order_with_gradients_that_some_ranks_lack(
    worlds: Worlds, stage: int, param_tier: str, declares: bool, tmp_path: Path
) -> None:
    """A commit is due in each step, and when a run ends after a backward without a step."""
    given: dict[str, Any] = {"stage": stage, "param_tier": param_tier, "accumulation": 1 if declares else "auto"}
    worlds(2).run(_train_without_clipping, str(tmp_path / "run"), given, timeout_s=60)


def _synchronize(options: dict[str, Any]) -> None:
    model = models.build("turns")
    with (
        sharded.communicators("awaited"),
        OffloadZero(model, tuning=Tuning(chunk=4096, threads=1, bucket=4096), **options) as optimizer,
    ):
        for _ in range(3):
            model(torch.ones(2, 13)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            assert isinstance(optimizer._comm, Awaited)
            assert not optimizer._comm.under_way


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_synchronize_waits_for_all(worlds: Worlds, stage: int, param_tier: str) -> None:
    worlds(2).run(_synchronize, {"stage": stage, "tier": "cpu", "param_tier": param_tier})


@pytest.mark.parametrize("param_tier", ["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_when_a_run_ends_the_host_has_waited_for_all(worlds: Worlds, stage: int, param_tier: str) -> None:
    """What another rank failed to send would go unnoticed otherwise."""
    given: dict[str, Any] = {"stage": stage, "tier": "cpu", "param_tier": param_tier}
    worlds(2).run(_train, "turns", False, given | {"wire": "awaited"})


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


def _look(how: str) -> None:
    """Rank 0 alone looks at parameters that all ranks have gathered: before the backward, when other units are on their
    way, and between two steps."""
    model = models.build("turns")

    def look() -> None:
        if torch.distributed.get_rank() == 0:
            if how == "state_dict":
                model.blocks[-1].state_dict()
            else:
                [param.square().sum().item() for param in model.blocks[-1].parameters()]

    options: dict[str, Any] = STREAMED | {"accumulation": 2, "tuning": Tuning(chunk=4096, threads=1, bucket=4096)}
    with sharded.communicators("ordered"), OffloadZero(model, **options) as optimizer:
        for _ in range(3):
            with optimizer.gathered(model.blocks[-1]):
                loss = model(torch.ones(2, 13)).float().square().sum()
                look()
            loss.backward()
            model(torch.ones(2, 13)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered(model):
                look()


@pytest.mark.parametrize("how", ["state_dict", "operations"])
def test_what_one_rank_alone_reads_of_gathered_parameters_changes_no_order(worlds: Worlds, how: str) -> None:
    worlds(2).run(_look, how, timeout_s=20)
