"""Runs whose machines have disks of their own: the same name is another directory on each of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.checkpoint.commit import Commit, read_commit, write_commit
from offload.checkpoint.live import swaps
from offload.checkpoint.reader import Reader
from offload.checkpoint.recovery import RecoveryPlan
from offload.errors import OffloadError, PathInUseError, ResumeError, TierIOError
from offload.io.files import LOCAL
from offload.ranks.communicator import Communicator
from tests.cli.test_stored import call
from tests.distributed.test_commits import AT, MORE, SPLIT, STEPS, Training, _uninterrupted, kill_all, same
from tests.support.copying import CopyingFiles
from tests.support.disks import on_disk
from tests.support.machines import RUN, needs_proc, on
from tests.support.ranks import RanksFailedError, Worlds
from tests.support.run_files import contents, kinds_in

TWO, THREE = (0, 1), (0, 0, 1)
"""By rank: its machine."""
pytestmark = [pytest.mark.timeout(120), needs_proc]


def content(base: Path) -> dict[str, bytes]:
    """All that lies on the disks of all machines."""
    return contents(base)


def run_ids(base: Path) -> set[str | None]:
    return {swap.run_id for place in base.glob("machine*/run") for swap in swaps(place, LOCAL)}


def extra_of_rank() -> dict[str, Any]:
    return {"rank": dist.get_rank(), "x": torch.arange(dist.get_rank() + 1)}


def _begin(base: str, machines: tuple[int, ...], step: int) -> int | None:
    """Each rank has a name of its own. Returns: the step at which it began."""
    with on(base, machines):
        training = Training(f"{RUN}{dist.get_rank()}", stage=2, resume="auto")
        resumed = training.optimizer.resumed
        training.go_to(step)
        training.optimizer.commit()
        training.optimizer.close()
    return None if resumed is None else resumed.step


def test_another_run_under_another_ranks_name_is_no_part_of_this_one(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(2).run(_begin, str(tmp_path), (1, 0), 1) == [None, None]
    leftover = tmp_path / "machine1" / "run0" / "offload-rank0.swap.new"
    leftover.touch()
    other = content(tmp_path)
    assert worlds(2).run(_begin, str(tmp_path), (0, 1), AT) == [None, None]
    assert worlds(2).run(_begin, str(tmp_path), (0, 1), AT + MORE) == [AT, AT]
    after = content(tmp_path)
    assert {name: after.get(name) for name in other} == other


def _commit(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    """Commits a step, and is cut off later: the bits committed."""
    with on(base, machines):
        training = Training(RUN, **options)
        training.go_to(AT)
        training.optimizer.commit(extra_of_rank())
        found = training.bits()
        training.go_to(AT + 1)
        training.optimizer.close()
    return found


def _resume(base: str, machines: tuple[int, ...], options: dict[str, Any], step: int = AT) -> dict[str, Tensor]:
    """The bits at which it goes on."""
    with on(base, machines):
        training = Training(RUN, **{"resume": True} | options)
        assert training.optimizer.resumed is not None
        assert training.optimizer.resumed.step == step
        extra = training.optimizer.resumed.extra
        assert extra is None or extra["rank"] == dist.get_rank()  # type: ignore[index]
        assert extra is None or torch.equal(extra["x"], torch.arange(dist.get_rank() + 1))  # type: ignore[index]
        with training.optimizer:
            return training.bits()


def _interrupted(base: str, machines: tuple[int, ...], options: dict[str, Any]) -> None:
    expected = _uninterrupted(f"{base}/alone", options)
    _commit(base, machines, options)
    dist.barrier()
    with on(base, machines):
        again = Training(RUN, **options, resume="auto")
        assert again.optimizer.resumed is not None
        step, extra = again.optimizer.resumed
        assert (step, extra["rank"], len(extra["x"])) == (AT, dist.get_rank(), dist.get_rank() + 1)  # type: ignore[index]
        again.go_to(AT + MORE)
        again.optimizer.commit()
        again.optimizer.rollback()
        again.go_to(STEPS)
        with again.optimizer:
            assert same(again.bits(), expected)


@pytest.mark.parametrize(
    ("machines", "options"),
    [
        (TWO, {"stage": 2, "cpu_memory": "least", "tuning": SPLIT}),
        pytest.param(THREE, {"stage": 1, "tier": "cpu"}, marks=pytest.mark.slow),
        pytest.param(TWO, {"stage": 3, "param_tier": "nvme", "cpu_memory": "least"}, marks=pytest.mark.slow),
        pytest.param((0, 0, 1, 1), {"stage": 3, "param_tier": "cpu"}, marks=pytest.mark.slow),
    ],
)
def test_each_rank_goes_on_from_the_disk_of_its_machine(
    worlds: Worlds, tmp_path: Path, machines: tuple[int, ...], options: dict[str, Any]
) -> None:
    worlds(len(machines)).run(_interrupted, str(tmp_path), machines, options)
    for machine in set(machines):
        names = {path.name for path in (tmp_path / f"machine{machine}" / "run").iterdir()}
        ranks = [rank for rank, own in enumerate(machines) if own == machine]
        assert sorted(int(name.rpartition("-")[2]) for name in names if name.startswith("swap-")) == ranks
        assert len([name for name in names if name.startswith("manifest-")]) == len(ranks)
        assert ("COMMIT" in names) == (machine == 0)
    # The slots were used where they lie, or else the run would have another id: it commits in all files.
    assert len(run_ids(tmp_path)) == 1
    with Reader([*tmp_path.glob("machine*/run")]) as reader:
        assert reader.commit.step == AT + MORE
        assert all(slot.error is None for slot in reader.verify())


# Cut off.


def _cut_off(base: str, decided: bool) -> str:
    """A commit of which machines have the manifests, and the record or not: what it raised."""

    def write(*args: Any) -> None:
        if decided:
            write_commit(*args)
        raise TierIOError("rename" if decided else "write", errno.EIO, "COMMIT", 0, 0)

    with on(base, TWO):
        training = Training(RUN, stage=2)
        training.go_to(AT)
        training.optimizer.commit(extra_of_rank())
        training.go_to(AT + MORE)
        with patch("offload.checkpoint.committer.write_commit", write), pytest.raises(OffloadError) as caught:
            training.optimizer.commit(extra_of_rank())
        with suppress(OffloadError):
            training.optimizer.close()
    return type(caught.value).__name__


@pytest.mark.parametrize("decided", [False, True])
def test_cut_off_before_or_after_the_record_all_machines_have_the_same_commit(
    worlds: Worlds, tmp_path: Path, decided: bool
) -> None:
    assert worlds(2).run(_cut_off, str(tmp_path), decided) == ["TierIOError", "OtherRankError"]
    for machine in range(2):
        assert len([*(tmp_path / f"machine{machine}" / "run").glob("manifest-*.json")]) == 2
    step = AT + MORE if decided else AT
    bits = worlds(2).run(_resume, str(tmp_path), TWO, {"stage": 2}, step)
    expected = worlds(2).run(_at, str(tmp_path / "alone"), step)
    assert all(same(one, other) for one, other in zip(bits, expected, strict=True))
    # What was not decided has gone from each machine.
    for machine in range(2):
        assert len([*(tmp_path / f"machine{machine}" / "run").glob("manifest-*.json")]) == 1


def _at(path: str, step: int) -> dict[str, Tensor]:
    training = Training(path, stage=2)
    training.go_to(step)
    with training.optimizer:
        return training.bits()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_ranks_killed_twenty_times_on_machines_of_their_own(tmp_path: Path) -> None:
    kill_all(tmp_path, 20, seed=3, own_disks=True)


# Another layout.


@pytest.mark.parametrize("cut_off", [pytest.param(False, marks=pytest.mark.slow), True])
def test_other_chunks_need_nothing_of_other_machines(worlds: Worlds, tmp_path: Path, cut_off: bool) -> None:
    base = str(tmp_path)
    expected = worlds(2).run(_commit, base, TWO, {"stage": 2})
    before = run_ids(tmp_path)
    other = {"stage": 1, "tuning": {"chunk": "8KiB"}}
    if cut_off:
        worlds(2).run(_decided, base, other)
        assert len([*tmp_path.glob("machine*/run/swap-*")]) == 4
    found = worlds(2).run(_resume, base, TWO, other)
    assert all(same(one, expected[0]) for one in found)
    after = run_ids(tmp_path)
    assert len(after) == 1
    assert not after & before
    rest = {"manifest", "extra", "swap", "tag"}
    assert [kinds_in(place) for place in sorted(tmp_path.glob("machine*/run"))] == [{"COMMIT", *rest}, rest]


def _decided(base: str, options: dict[str, Any]) -> None:
    """Cut off when the commit in the new layout is decided, and no machine is cleared up."""
    collect, failed = RecoveryPlan.collect, TierIOError("remove", errno.EIO, "x", 0, 0)

    def never(plan: RecoveryPlan, commit: Commit | None, comm: Communicator) -> None:
        if commit is not None and commit.replaces is not None:
            raise failed
        collect(plan, commit, comm)

    with on(base, TWO), patch.object(RecoveryPlan, "collect", never), pytest.raises(TierIOError):
        Training(RUN, **options, resume=True)


def _refused(base: str, machines: tuple[int, ...]) -> str:
    with on(base, machines), pytest.raises(OffloadError) as caught:
        Training(RUN, stage=2, resume=True)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_lies_on_other_machines_is_refused_before_anything_is_changed(worlds: Worlds, tmp_path: Path) -> None:
    base = str(tmp_path)
    expected = worlds(3).run(_commit, base, THREE, {"stage": 2})
    before = content(tmp_path)
    (alone,) = worlds(1).run(_refused, base, (0,))
    assert f"ResumeError: nothing of rank 2 of the 3 that committed step {AT} lies in" in alone
    assert "(it was in /proc/self/cwd/run, as its machine calls it)" in alone
    fewer = worlds(2).run(_refused, base, TWO)
    assert fewer[0] == fewer[1]
    machine = socket.gethostname()
    assert f"ResumeError: 208 KiB of slots of step {AT} lie where the ranks that need them do not see them" in fewer[0]
    assert f"rank 1 on {machine} needs slots of rank 1 of the 3 that committed" in fewer[0]
    assert "Give resume_transfer=True to have them sent" in fewer[0]
    for said in (alone, fewer[0]):
        assert "as many ranks as committed" in said
        assert "file system that every rank sees" in said
    assert "offload export" in alone
    assert content(tmp_path) == before
    assert all(same(one, expected[0]) for one in worlds(3).run(_resume, base, THREE, {"stage": 2}))
    # Machines in another order have all that their ranks need.
    assert all(same(one, expected[0]) for one in worlds(3).run(_resume, base, (1, 0, 0), {"stage": 2}))
    # All of it under one name, as a shared file system shows it: then any number of ranks goes on.
    together = Path(base, "machine2", "run")
    together.mkdir(parents=True)
    for path in tmp_path.glob("machine[01]/run/*"):
        if not (together / path.name).exists():  # a lock
            os.link(path, together / path.name)
    assert same(worlds(2).run(_bits, base, (2, 2))[0], expected[0])


def _go_on(base: str, step: int) -> None:
    with on(base, TWO):
        training = Training(RUN, stage=2, resume=True)
        training.go_to(step)
        training.optimizer.commit()
        training.optimizer.close()


@pytest.mark.parametrize("stale", [0, 1])
def test_an_older_disk_is_named_with_its_machine_and_both_steps(worlds: Worlds, tmp_path: Path, stale: int) -> None:
    worlds(2).run(_commit, str(tmp_path), TWO, {"stage": 2})
    disk, copy = tmp_path / f"machine{stale}", tmp_path / "copy"
    shutil.copytree(disk, copy)
    worlds(2).run(_go_on, str(tmp_path), AT + MORE)
    shutil.rmtree(disk)
    copy.rename(disk)
    before = content(tmp_path)
    on_host, later = f" on {socket.gethostname()}", AT + MORE
    found, recorded = (later, AT) if stale == 0 else (AT, later)
    for said in worlds(2).run(_refused, str(tmp_path), TWO):
        assert said.startswith("ResumeError: ")
        assert f"{on_host} has step {found} of rank 1" in said
        assert f"is of step {recorded}: " in said
        assert "is older, a copy from before or an exchanged disk" in said
    assert content(tmp_path) == before


def _bits(base: str, machines: tuple[int, ...]) -> dict[str, Tensor]:
    with on(base, machines):
        training = Training(RUN, stage=3, resume=True)
        with training.optimizer:
            return training.bits()


def _lost(base: str) -> list[str]:
    """What starts say where rank 0's disk is gone, without and with a commit asked for."""
    said = []
    with on(base, (2, 1)):
        for options in ({"resume": "auto"}, {}):
            with pytest.raises(OffloadError) as caught:
                Training(RUN, stage=2, **options)  # type: ignore[arg-type]
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def _says_without(base: str, machines: tuple[int, ...]) -> str:
    with on(base, machines), pytest.raises(OffloadError) as caught:
        Training(RUN, stage=2)
    return str(caught.value)


def test_nobody_is_told_to_remove_a_run_of_which_other_machines_have_parts(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(_commit, str(tmp_path), TWO, {"stage": 2})
    for said in worlds(2).run(_says_without, str(tmp_path), TWO):
        assert "holds a committed run: give resume=True to continue it, choose another path" in said
        assert "or remove all of it, on the machines that have its other directories, too" in said
    (alone,) = worlds(1).run(_says_without, str(tmp_path), (1,))
    assert "belongs to a run whose COMMIT record is not in" in alone
    assert "offload remove" not in alone


def test_without_the_machine_of_the_record_nothing_begins_anew(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(_commit, str(tmp_path), TWO, {"stage": 2})
    before = content(tmp_path)
    first, second = worlds(2).run(_lost, str(tmp_path))
    assert all("belongs to a run whose COMMIT record is not in" in said[0] for said in (first, second))
    assert "belongs to a run whose COMMIT record is not in" in second[1]
    assert content(tmp_path) == before


# Snapshots, live runs, tools.


def _snapshot(base: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with on(base, TWO):
        training = Training(RUN, stage=2)
        training.go_to(AT)
        training.optimizer.commit(extra_of_rank())
        expected = training.bits()
        names = [str(path) for path in training.optimizer.snapshot(keep=1)]
        with pytest.raises(PathInUseError):
            Training(RUN, stage=2, resume=True)
        training.go_to(AT + MORE)
        training.optimizer.commit()
        training.optimizer.close()
        dist.barrier()
        return expected, _resume(base, TWO, {"stage": 2, "resume": names})


def test_machines_go_back_to_a_snapshot_that_each_has_a_part_of(worlds: Worlds, tmp_path: Path) -> None:
    for expected, found in worlds(2).run(_snapshot, str(tmp_path)):
        assert same(found, expected)
    assert len([*tmp_path.glob("machine*/run/snapshot-*/swap-*")]) == 2
    assert len([*tmp_path.glob("machine*/run/swap-*")]) == 2


def _copied(base: str, shared: str) -> tuple[dict[str, Tensor], str, list[str]]:
    """A snapshot that is copied to what both machines see: its bits, its directory, what is left on this machine."""
    with on(base, TWO):
        training = Training(RUN, stage=2)
        training.go_to(AT)
        training.optimizer.commit()
        expected = training.bits()
        (directory,) = training.optimizer.snapshot(path=shared)
        training.go_to(AT + MORE)
        training.optimizer.close()
        return expected, str(directory), [name for name in os.listdir(RUN) if name.startswith("snapshot-")]


def _elsewhere(path: str, directory: str) -> tuple[int, dict[str, Tensor]]:
    training = Training(path, stage=2, resume=[directory])
    assert training.optimizer.resumed is not None
    with training.optimizer:
        return training.optimizer.resumed.step, training.bits()


def test_a_snapshot_on_shared_storage_outlives_the_disks_and_goes_on_with_any_number_of_ranks(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = worlds(2).run(_copied, str(tmp_path), str(tmp_path / "shared"))
    expected, directory, _ = found[0]
    assert all(one == directory and not left for _, one, left in found)
    for machine in tmp_path.glob("machine*"):
        shutil.rmtree(machine)
    for ranks in (1, 3):
        for step, again in worlds(ranks).run(_elsewhere, str(tmp_path / f"new{ranks}"), directory):
            assert step == AT
            assert same(again, expected)


class Killed(CopyingFiles):
    """The process is killed by its copying thread. Attributes: left: before which of its operations; -1: it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1

    def copies(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left = max(self.left - 1, -1)


def _killed_in_a_copy(base: str, shared: str, who: int, operation: int) -> None:
    """Two commits, a copy of a snapshot of each; one rank is killed while it makes its part of the second."""
    files = Killed()
    with on(base, TWO), on_disk(files):
        training = Training(RUN, stage=2)
        for step in (AT, AT + MORE):
            training.go_to(step)
            training.optimizer.commit(extra_of_rank())
            training.optimizer.snapshot(keep=1)  # waits for the copy before
            files.left = operation if step > AT and dist.get_rank() == who else -1
            training.optimizer.snapshot(path=shared)
        training.optimizer.close()


@pytest.mark.parametrize(
    ("who", "operation"),
    [
        (1, 5),
        *(pytest.param(who, at, marks=pytest.mark.slow) for who in (0, 1) for at in range(16) if (who, at) != (1, 5)),
    ],
)
def test_a_copy_of_whose_ranks_one_is_killed_is_whole_or_not_there_and_the_one_before_is(
    worlds: Worlds, tmp_path: Path, who: int, operation: int
) -> None:
    base, shared = str(tmp_path), tmp_path / "shared"
    expected = {step: worlds(2).run(_at, str(tmp_path / f"alone{step}"), step)[0] for step in (AT, AT + MORE)}
    with suppress(RanksFailedError):  # where there are fewer operations nobody is killed
        worlds(2).run(_killed_in_a_copy, base, str(shared), who, operation)
    steps = set()
    for number, directory in enumerate(shared.iterdir()):
        if (directory / "COMMIT").exists():
            with Reader([directory]) as reader:
                assert all(slot.error is None for slot in reader.verify())
            for step, again in worlds(1).run(_elsewhere, str(tmp_path / f"new{number}"), str(directory)):
                assert same(again, expected[step])
                steps.add(step)
    assert AT in steps
    # The run itself goes on from its last commit.
    assert same(worlds(2).run(_resume, base, TWO, {"stage": 2}, AT + MORE)[0], expected[AT + MORE])


def test_tools_say_what_one_machine_alone_lacks(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(_commit, str(tmp_path), TWO, {"stage": 2})
    first, second = (tmp_path / f"machine{number}" / "run" for number in range(2))
    for command in ("inspect", "verify"):
        for place, says in (
            (first, f"nothing of rank 1 of the 2 that committed step {AT} lies in"),
            (second, "belongs to a run whose COMMIT record is not in"),
        ):
            result = call(command, place)
            assert result.exit_code == 2
            assert says in " ".join(result.stderr.split())
        assert call(command, first, second).exit_code == 0
    assert call("remove", second, "--yes").exit_code == 0
    assert not second.exists()
    commit = read_commit(first)
    assert commit is not None
    assert commit.step == AT
    with pytest.raises(ResumeError, match="rank 1 of the 2"):
        Reader([first])
