"""Snapshots over ranks: whole on all of them, or there is none."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from offload.checkpoint.reader import Reader
from offload.checkpoint.snapshot import Need
from offload.errors import BudgetError, OffloadError, RankError
from offload.io.engine import IOFile
from tests.distributed.test_commits import AT, MORE, TIMEOUT_S, Failing, Training, _patient, same
from tests.support.disks import on_disk
from tests.support.ranks import World, Worlds

pytestmark = pytest.mark.timeout(120)


def paths_of(base: str, shared: bool) -> list[str]:
    """Two directories of this rank: for all ranks, or its own."""
    return [f"{base}/{'all' if shared else f'rank{dist.get_rank()}'}-{number}" for number in range(2)]


def snapshots(base: Path) -> set[int]:
    """Steps of the snapshots in the directories of all ranks."""
    return {int(one.name.split("-")[1]) for one in base.glob("*/snapshot-*")}


def _keep(base: str, shared: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Makes two snapshots and goes on: the bits of the first, and this rank's directories of it."""
    training = Training(paths_of(base, shared), stage=2)
    training.go_to(AT)
    training.optimizer.commit({"rank": dist.get_rank()})
    expected = training.bits()
    directories = training.optimizer.snapshot()
    assert training.optimizer.snapshot(keep=1) == directories
    for step in (AT + 1, AT + MORE):
        training.go_to(step)
        training.optimizer.commit()
    training.optimizer.snapshot()
    training.optimizer.close()
    return expected, [str(one) for one in directories]


def _go_back(base: str, shared: bool, directories: list[str], to: str) -> tuple[dict[str, Tensor], object]:
    path: Any = paths_of(base, shared) if to == "the run" else f"{base}/{to}"
    training = Training(path, stage=2, resume=directories)
    assert training.optimizer.resumed is not None
    step, extra = training.optimizer.resumed
    assert step == AT
    with training.optimizer:
        return training.bits(), extra


def _retire(base: str, shared: bool) -> None:
    training = Training(paths_of(base, shared), stage=2, resume=True)
    for more in range(2):
        training.go_to(AT + MORE + 1 + more)
        training.optimizer.commit()
        training.optimizer.snapshot(keep=2)
    training.optimizer.close()


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "own"])
def test_what_ranks_kept_goes_on_at_any_number_of_them(worlds: Worlds, tmp_path: Path, shared: bool) -> None:
    base = str(tmp_path)
    kept = worlds(3).run(_keep, base, shared)
    directories = list(dict.fromkeys(name for _, names in kept for name in names))
    assert len(directories) == (2 if shared else 6)
    with Reader([Path(name) for name in directories]) as reader:
        assert (reader.commit.is_snapshot, reader.commit.step, len(reader.manifests)) == (True, AT, 3)
        assert all(slot.error is None for slot in reader.verify())
    assert snapshots(tmp_path) == {AT, AT + MORE}
    worlds(3).run(_retire, base, shared)
    assert snapshots(tmp_path) == {AT + MORE + 1, AT + MORE + 2}
    assert all(not Path(name).exists() for name in directories)


@pytest.mark.parametrize(("ranks", "to"), [(3, "the run"), pytest.param(2, "new", marks=pytest.mark.slow)])
def test_ranks_go_back_to_what_they_kept(worlds: Worlds, tmp_path: Path, ranks: int, to: str) -> None:
    base = str(tmp_path)
    kept = worlds(3).run(_keep, base, False)
    directories = [name for _, names in kept for name in names]
    found = worlds(ranks).run(_go_back, base, False, directories, to)
    assert all(same(bits, kept[0][0]) for bits, _ in found)
    assert [extra for _, extra in found] == [{"rank": rank if ranks == 3 else 0} for rank in range(ranks)]
    with Reader([Path(name) for name in directories]) as reader:
        assert all(slot.error is None for slot in reader.verify())


def _name(base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Only one rank asks for state dicts, as frameworks do."""
    training = Training(f"{base}/rank{dist.get_rank()}", stage=2, keep=1)
    named: dict[str, Any] = {}
    expected: dict[str, Tensor] = {}
    for step in range(1, 5):
        training.go_to(step)
        training.optimizer.commit()
        if step < 4:
            expected = training.bits()
            named = training.optimizer.state_dict() if dist.get_rank() == 1 else {}
    training.optimizer.close()
    return named, expected


def test_named_snapshots_go_from_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    (_, expected), (named, _) = worlds(2).run(_name, str(tmp_path))
    assert named["step"] == 3
    directories = sorted(tmp_path.glob("rank*/snapshot-*"))
    assert [(one.parent.name, one.name.split("-")[1]) for one in directories] == [("rank0", "3"), ("rank1", "3")]
    found = worlds(2).run(_gone_back, str(tmp_path), [str(one) for one in directories])
    assert all(same(bits, expected) and commit == named["commit"] for bits, commit in found)


def _gone_back(base: str, directories: list[str]) -> tuple[dict[str, Tensor], str]:
    training = Training(f"{base}/again{dist.get_rank()}", stage=2, resume=directories)
    with training.optimizer:
        return training.bits(), training.optimizer.state_dict()["commit"]


class FailingCopy(Failing):
    def copy(self, source: Path, target: IOFile, offset: int, length: int) -> None:
        self._fail("copy", Path(target.path))
        super().copy(source, target, offset, length)


def _refused(base: str, shared: bool, rank: int, operation: str, name: str) -> str:
    files = FailingCopy()
    with on_disk(files):
        training = Training(paths_of(base, shared), stage=2)
    training.go_to(AT)
    training.optimizer.commit()
    said = "nothing"
    if dist.get_rank() == rank:
        files.fail(operation, name)
    try:
        training.optimizer.snapshot()
    except OffloadError as error:
        said = type(error).__name__
    left = [*Path(base).glob("*/snapshot-*/COMMIT")]
    assert not left
    training.go_to(AT + 1)
    training.optimizer.commit()
    training.optimizer.snapshot()
    training.optimizer.close()
    return said


@pytest.mark.parametrize(
    ("shared", "rank", "operation", "name"),
    [(True, 1, "copy", "swap"), (False, 0, "write", "manifest"), (False, 0, "write", "COMMIT")],
)
def test_what_fails_on_one_rank_fails_on_all_and_nothing_is_left(
    worlds: Worlds, tmp_path: Path, shared: bool, rank: int, operation: str, name: str
) -> None:
    found = worlds(3).run(_refused, str(tmp_path), shared, rank, operation, name)
    assert found == ["TierIOError" if number == rank else "OtherRankError" for number in range(3)]
    assert snapshots(tmp_path) == {AT + 1}
    with Reader([*tmp_path.glob("*/snapshot-*")]) as reader:
        assert all(slot.error is None for slot in reader.verify())


def _too_large_together(base: str) -> tuple[int, int]:
    training = Training(f"{base}/run", stage=2)
    training.go_to(1)
    training.optimizer.commit()
    own: list[Need] = []

    def needs(part: Any) -> list[Need]:
        # Each machine counts the devices of a shared directory otherwise.
        own.extend([Need(dist.get_rank(), 1000 + dist.get_rank(), 3002, Path("here"))])
        return own

    with patch("offload.checkpoint.snapshot.Snapshot.needs", needs), pytest.raises(BudgetError) as caught:
        training.optimizer.snapshot()
    assert not [*Path(base).glob("run/snapshot-*")]
    training.optimizer.close()
    return caught.value.needed, caught.value.available


def test_what_ranks_need_on_one_device_is_added(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(3).run(_too_large_together, str(tmp_path)) == [(3003, 3002)] * 3


def _lost(base: str, moment: str, lost: int) -> str:
    with _patient(TIMEOUT_S):
        training = Training(paths_of(base, False), stage=2)
    training.go_to(AT)
    training.optimizer.commit()

    def die(*args: Any, **options: Any) -> Any:
        os._exit(1)

    with patch(moment, die) if dist.get_rank() == lost else nullcontext(), pytest.raises(RankError) as caught:
        training.optimizer.snapshot()
    with suppress(RankError):
        training.optimizer.close()
    return str(caught.value)


def _again(base: str) -> None:
    training = Training(paths_of(base, False), stage=2, resume=True)
    training.optimizer.snapshot()
    training.optimizer.close()


@pytest.mark.parametrize(
    ("moment", "lost"),
    [
        ("copy_manifest", 2),
        pytest.param("write_commit", 0, marks=pytest.mark.slow),
        pytest.param("Snapshot.begin", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_leaves_a_whole_one_or_none(worlds: Worlds, tmp_path: Path, moment: str, lost: int) -> None:
    with World(3, group_timeout_s=TIMEOUT_S + 2) as world:
        world.start(_lost, str(tmp_path), f"offload.checkpoint.snapshot.{moment}", lost)
        world.results(60, ranks=[rank for rank in range(3) if rank != lost])
    assert not [*tmp_path.glob("*/snapshot-*/COMMIT")]
    worlds(3).run(_again, str(tmp_path))
    with Reader([*tmp_path.glob("*/snapshot-*")]) as reader:
        assert all(slot.error is None for slot in reader.verify())
    worlds(3).run(_again, str(tmp_path))
    assert len([*tmp_path.glob("*/snapshot-*")]) == 6
