"""Machines with disks of their own that come in another order, fewer or more of them: shards stay where they are."""

from __future__ import annotations

import os
import pkgutil
import random
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.checkpoint import transfer
from offload.errors import OffloadError
from tests.distributed.test_commits import AT, MORE, SPLIT, STEPS, Training, _uninterrupted, same
from tests.support.machines import RUN, needs_proc, on
from tests.support.ranks import RanksFailedError, Worlds
from tests.support.run_files import contents

pytestmark = [pytest.mark.timeout(120), needs_proc]


class Drawn:
    """State of this rank that no other has."""

    def __init__(self) -> None:
        self.value = torch.full((3,), float(100 * dist.get_rank()))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def extra_of_rank() -> dict[str, Any]:
    return {"rank": dist.get_rank(), "x": torch.arange(dist.get_rank() + 1)}


def begin(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> None:
    """Commits a step, and is cut off later."""
    with on(base, machines):
        training = Training(RUN, **options)
        drawn = Drawn()
        training.optimizer.attach(drawn=drawn, rng=True)
        random.seed(dist.get_rank())
        training.go_to(AT)
        drawn.value += 1
        training.optimizer.commit(extra_of_rank())
        training.go_to(AT + 1)
        training.optimizer.close()


def go_on(
    base: str, machines: tuple[int, ...], committed: int, options: dict[str, Any], step: int, until: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Resumes at a step, and trains until another one, which is committed.

    Args: committed: how many ranks committed. Returns: the bits, and `stats()`.
    """
    with on(base, machines):
        training = Training(RUN, **{"resume": True} | options)
        optimizer, rank = training.optimizer, dist.get_rank()
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == step
        drawn = Drawn()
        optimizer.attach(drawn=drawn, rng=True)
        extra: Any = optimizer.resumed.extra
        # On another number of ranks all have what the first one gave.
        of = rank if committed == dist.get_world_size() else 0
        assert (extra["rank"], len(extra["x"])) == (of, of + 1)
        assert drawn.value.tolist() == [100 * of + 1] * 3
        if committed == dist.get_world_size():
            assert random.random() == random.Random(rank).random()
        drawn.value += 1
        training.go_to(step + 1)
        optimizer.rollback()
        assert drawn.value.tolist() == [100 * of + 1] * 3
        training.again_from(step)
        if until > step:
            training.go_to(until)
            random.seed(rank)
            drawn.value = torch.full((3,), float(100 * rank + 1))
            optimizer.commit(extra_of_rank())
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
        pytest.param((0, 1), (1, 0), {"stage": 2, "cpu_memory": "least", "tuning": SPLIT}, marks=pytest.mark.slow),
        ((0, 1, 2), (2, 0, 1), {"stage": 3, "param_tier": "nvme", "compute_dtype": torch.float32}),
        pytest.param((0, 0, 1, 1), (1, 1, 0, 0), {"stage": 3, "mesh": (2, 2)}, marks=pytest.mark.slow),
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
        for rank, (bits, stats) in enumerate(world.run(go_on, base, machines, len(before), options, step, until)):
            assert stats["rank"] == rank
            assert until < STEPS or same(bits, expected)
        step = until
        # No slot was written anew, or the files would have other names.
        assert numbers_in(tmp_path) == lying
        assert {path.name for path in tmp_path.glob("machine*/run/swap-*")} == runs


def take_snapshot(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    """A snapshot of a step, after which another one is committed. Returns: the bits of the snapshot."""
    with on(base, machines):
        training = Training(RUN, **options)
        training.go_to(AT)
        training.optimizer.commit(extra_of_rank())
        found = training.bits()
        training.optimizer.snapshot()
        training.go_to(AT + MORE)
        training.optimizer.commit()
        training.optimizer.close()
        return found


def go_back(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    with on(base, machines):
        (name,) = Path("run").glob("snapshot-*")
        training = Training(RUN, resume=[f"{RUN}/{name.name}"], **options)
        assert training.optimizer.resumed is not None
        assert training.optimizer.resumed.step == AT
        assert training.optimizer.resumed.extra["rank"] == dist.get_rank()  # type: ignore[index]
        with training.optimizer:
            return training.bits()


@pytest.mark.slow
def test_machines_in_another_order_go_back_to_a_snapshot(worlds: Worlds, tmp_path: Path) -> None:
    expected = worlds(3).run(take_snapshot, str(tmp_path), (0, 1, 2), {"stage": 2})
    for machines in ((2, 0, 1), (0, 1, 2)):
        found = worlds(3).run(go_back, str(tmp_path), machines, {"stage": 2})
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))


# Slots that are sent.


def refused(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> str:
    with on(base, machines), pytest.raises(OffloadError) as caught:
        Training(RUN, **{"resume": True} | options)
    return f"{type(caught.value).__name__}: {caught.value}"


def in_one_directory(base: Path, to: Path) -> None:
    """What lies on all machines, on one that all see."""
    to.mkdir(parents=True)
    for path in base.glob("machine*/run/*"):
        if not path.name.endswith(".lock"):
            shutil.copy(path, to / path.name)


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ((0, 0, 1), (0, 1), {"stage": 2, "tuning": SPLIT}),
        ((0, 1), (1, 2, 0), {"stage": 3, "param_tier": "cpu"}),
        pytest.param((0, 0, 1), (1, 1, 0), {"stage": 2}, marks=pytest.mark.slow),
        pytest.param((0, 1, 2, 2), (2, 1, 0), {"stage": 2}, marks=pytest.mark.slow),
        pytest.param((0, 0, 1), (0, 1), {"stage": 2, "states": "8bit"}, marks=pytest.mark.slow),
        pytest.param((0, 1), (2, 2, 1, 0), {"stage": 1}, marks=pytest.mark.slow),
        pytest.param((0, 0, 1, 1), (0, 0, 0, 1), {"stage": 3, "mesh": (2, 2)}, marks=pytest.mark.slow),
        pytest.param((0, 1), (0, 2, 1), {"stage": 2, "tuning": {"chunk": "8KiB"}}, marks=pytest.mark.slow),
    ],
)
def test_what_lies_on_other_machines_is_sent_where_that_is_asked_for(
    worlds: Worlds, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], options: dict[str, Any]
) -> None:
    base, shared = tmp_path / "own", tmp_path / "shared"
    worlds(len(before)).run(begin, str(base), before, options)
    in_one_directory(base, shared / "machine0" / "run")
    content = contents(base)
    for said in worlds(len(after)).run(refused, str(base), after, options):
        assert said.startswith("ResumeError: ")
        assert f" of slots of step {AT} lie where the ranks that need them do not see them: rank " in said
        assert "Give resume_transfer=True to have them sent, which takes about " in said
    assert contents(base) == content
    sent = options | {"resume_transfer": True}
    found = worlds(len(after)).run(go_on, str(base), after, len(before), sent, AT, STEPS)
    expected = worlds(len(after)).run(go_on, str(shared), (0,) * len(after), len(before), options, AT, STEPS)
    for (bits, _), (of_shared, without) in zip(found, expected, strict=True):
        assert same(bits, of_shared)
        assert "exchange_bytes" not in without
    assert sum(stats["exchange_bytes"] for _, stats in found) > 0
    # What was replaced is gone from all machines that take part.
    assert len({path.name.split("-")[1] for path in base.glob("machine*/run/swap-*")}) == 1
    # Now as many ranks resume, with nothing to be sent: of a mesh only whole rows can be counted otherwise.
    world = worlds(len(after))
    options = options | {"resume_transfer": "mesh" in options}
    for (bits, _), (of_shared, _) in zip(
        world.run(go_on, str(base), after[1:] + after[:1], len(after), options, STEPS, STEPS), expected, strict=True
    ):
        assert same(bits, of_shared)


def test_a_shard_that_lies_in_two_places_is_named_with_both(worlds: Worlds, tmp_path: Path) -> None:
    """Where each rank sees the shard of its own number a copy elsewhere does no harm."""
    base, options = str(tmp_path), {"stage": 2, "resume_transfer": True}
    worlds(3).run(begin, base, (0, 0, 1), {"stage": 2})
    shutil.copytree(tmp_path / "machine1", tmp_path / "machine2")
    before = contents(tmp_path)
    for said in worlds(3).run(refused, base, (1, 2, 0), options):
        assert said.startswith("ResumeError: ")
        assert "(rank 0) and " in said or "(rank 1) and " in said
        assert f"both have what rank 2 committed at step {AT}, and are two directories: one is a copy" in said
    assert contents(tmp_path) == before
    worlds(3).run(go_on, base, (0, 0, 2), 3, options, AT, AT)


def test_a_disk_that_is_lost_or_older_is_named_where_ranks_move(worlds: Worlds, tmp_path: Path) -> None:
    base, options = str(tmp_path), {"stage": 2, "resume_transfer": True}
    worlds(3).run(begin, base, (0, 1, 2), {"stage": 2})
    shutil.copytree(tmp_path / "machine1", tmp_path / "older")
    worlds(3).run(go_on, base, (0, 1, 2), 3, options, AT, AT + MORE)
    for machines in ((2, 3, 0), (0, 2), (3, 0, 2)):
        before = contents(tmp_path)
        for said in worlds(len(machines)).run(refused, base, machines, options):
            assert f"ResumeError: nothing of rank 1 of the 3 that committed step {AT + MORE} lies in {RUN} on " in said
            assert f"(it was in {RUN}, as its machine calls it)" in said
        assert contents(tmp_path) == before
        shutil.rmtree(tmp_path / "machine3", ignore_errors=True)
    (tmp_path / "older").rename(tmp_path / "machine3")
    before = contents(tmp_path)
    for said in worlds(3).run(refused, base, (2, 3, 0), options):
        assert said.startswith("ResumeError: ")
        assert f" has step {AT} of rank 1, and the record in " in said
        assert f"is of step {AT + MORE}: " in said
        assert "is older, a copy from before or an exchanged disk" in said
    assert contents(tmp_path) == before


def damaged_on_its_way(base: str) -> str:
    """Rank 1 gets another byte than was sent in the second round."""
    found, calls = transfer.exchange, count()

    def exchange(comm: Any, pieces: Any, sent: Tensor, received: Tensor, **options: Any) -> None:
        found(comm, pieces, sent, received, **options)
        if next(calls) >= 3 and dist.get_rank() == 1 and len(received):
            received[5000] += 1

    with patch.object(transfer, "exchange", exchange):
        return refused(base, (0, 1), {"stage": 2, "resume_transfer": True})


def test_what_is_damaged_on_its_way_is_found_and_no_rank_waits_for_another(worlds: Worlds, tmp_path: Path) -> None:
    worlds(3).run(begin, str(tmp_path), (0, 0, 1), {"stage": 2})
    before = contents(tmp_path)
    first, second = worlds(2).run(damaged_on_its_way, str(tmp_path))
    assert second.startswith("CorruptionError: ")
    assert "was damaged on its way from another rank" in second
    assert first == f"OtherRankError: rank 1: {second}"
    assert {name for name in contents(tmp_path) if "swap-" in name} == {name for name in before if "swap-" in name}


# Kills.


MOMENTS = {
    "sends": "offload.checkpoint.transfer.exchange",
    "decides": "offload.checkpoint.committer.write_commit",
    "has decided": "offload.checkpoint.recovery.RecoveryPlan.collect",
}


def killed(base: str, machines: tuple[int, ...], options: dict[str, Any], moment: str, after: int, who: int) -> None:
    """Resumes, and one rank is killed when it calls something for the last time but `after`."""
    found, calls = pkgutil.resolve_name(MOMENTS[moment]), count()

    def die(*args: Any, **named: Any) -> Any:
        # The first call of `collect` is for the commit that is there.
        if next(calls) >= after and dist.get_rank() == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return found(*args, **named)

    with on(base, machines), patch(MOMENTS[moment], die):
        Training(RUN, **options, resume=True, resume_transfer=True)


@pytest.mark.parametrize(
    ("moment", "after", "who"),
    [
        ("sends", 3, 1),
        pytest.param("has decided", 1, 0, marks=pytest.mark.slow),
        *(pytest.param("sends", after, who, marks=pytest.mark.slow) for after in range(2, 12) for who in range(2)),
        pytest.param("decides", 0, 0, marks=pytest.mark.slow),
        pytest.param("has decided", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_while_slots_are_sent_leaves_the_commit_that_was_there(
    worlds: Worlds, tmp_path: Path, moment: str, after: int, who: int
) -> None:
    own, alone, options = tmp_path / "own", tmp_path / "alone", {"stage": 2}
    worlds(3).run(begin, str(own), (0, 0, 1), options)
    shutil.copytree(own, alone)
    sent = options | {"resume_transfer": True}
    (expected, *_) = worlds(2).run(go_on, str(alone), (0, 1), 3, sent, AT, STEPS)
    before = contents(own)
    with pytest.raises(RanksFailedError, match="died with exit code -9"):
        worlds(2).run(killed, str(own), (0, 1), options, moment, after, who)
    if moment != "has decided":
        later = contents(own)
        committed = [name for name in before if not name.endswith(".lock")]
        assert {name: later[name] for name in committed} == {name: before[name] for name in committed}
        # As if nothing had been: also on the machines that committed.
        shutil.copytree(own, tmp_path / "original")
        worlds(3).run(go_on, str(tmp_path / "original"), (0, 0, 1), 3, options, AT, AT)
    (found, *_) = worlds(2).run(go_on, str(own), (0, 1), 3, sent, AT, STEPS)
    assert same(found[0], expected[0])
    assert len({path.name.split("-")[1] for path in own.glob("machine*/run/swap-*")}) == 1
