"""A state dict names a commit, and loading it goes back there, whatever the run did since."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import BudgetError, ConfigError, CorruptionError, OffloadZero, ResumeError, Tuning
from offload.checkpoint import snapshot as snapshots
from tests.checkpoint.test_attached import Average


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3))


def hold(model: nn.Module, path: Path | None, **options: Any) -> OffloadZero:
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    return OffloadZero(model, adamw, path=path, **({"tuning": Tuning(chunk="4KiB", threads=1)} | options))


def train(model: nn.Module, optimizer: OffloadZero, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        number = optimizer.stats()["step"]
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        loss = model(x).float().square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def states(model: nn.Module, optimizer: OffloadZero) -> list[Tensor]:
    found = []
    for param in model.parameters():
        of = optimizer.state_of(param)
        with optimizer.gathered(param):
            found += [param.detach().clone(), of["master"], of["exp_avg"], of["exp_avg_sq"], torch.tensor(of["step"])]
    return found


def kept(folder: Path) -> list[int]:
    """The steps of the snapshots."""
    return sorted(int(path.name.split("-")[1]) for path in (folder / "run").glob("snapshot*"))


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


PLACES: dict[str, dict[str, Any]] = {
    "disk": {"cpu_memory": "90KiB"},
    "RAM": {"tier": "cpu", "commit_every": 0},
    "streamed": {"param_tier": "nvme", "commit_every": 2},
    "split": {"tuning": Tuning(chunk="4KiB", threads=1, split_master=True)},
    "two directories": {},
}


@pytest.mark.parametrize("place", PLACES)
def test_loading_a_state_dict_goes_back_to_its_step(tmp_path: Path, place: str) -> None:
    paths: Any = [tmp_path / "a", tmp_path / "b"] if place == "two directories" else tmp_path / "run"
    model = build()
    with hold(model, paths, **PLACES[place]) as optimizer:
        train(model, optimizer, 3)
        saved, then = copy.deepcopy(optimizer.state_dict()), states(model, optimizer)
        assert saved["step"] == 3
        expected = train(model, optimizer, 4)
        optimizer.state_dict()  # of step 7: the commit of step 3 is a snapshot now
        train(model, optimizer, 1)

        optimizer.load_state_dict(saved)
        assert_same(states(model, optimizer), then)
        assert train(model, optimizer, 4) == expected
        optimizer.commit()

    model = build()
    with hold(model, paths, **PLACES[place], resume=True) as optimizer:
        assert optimizer.stats()["step"] == 7
        optimizer.load_state_dict(saved)
        assert train(model, optimizer, 4) == expected


def test_the_last_commit_is_gone_back_to_without_a_snapshot(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        train(model, optimizer, 2)
        saved = optimizer.state_dict()
        expected = train(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        assert train(model, optimizer, 2) == expected
    assert not list((tmp_path / "run").glob("snapshot*"))


@pytest.mark.parametrize("place", PLACES)
def test_loading_a_state_dict_of_step_0_goes_back_to_the_beginning(tmp_path: Path, place: str) -> None:
    """As finders of learning rates and batch sizes do."""
    paths: Any = [tmp_path / "a", tmp_path / "b"] if place == "two directories" else tmp_path / "run"
    model = build()
    with hold(model, paths, **PLACES[place]) as optimizer:
        average = Average()
        optimizer.attach(average=average)
        saved, then = copy.deepcopy(optimizer.state_dict()), states(model, optimizer)
        assert saved["step"] == 0
        home = paths[0] if place == "two directories" else paths
        assert not (home / "COMMIT").exists()
        expected = train(model, optimizer, 3)
        average.value.fill_(7.0)
        optimizer.param_groups[0]["lr"] = 1.0
        for _ in range(2):
            optimizer.load_state_dict(saved)
            assert optimizer.stats()["step"] == 0
            assert optimizer.param_groups[0]["lr"] == 0.01
            assert_same(states(model, optimizer), then)
            assert average.value == 0
            assert optimizer.state_dict()["commit"] == saved["commit"]
            assert train(model, optimizer, 3) == expected
        optimizer.commit()
        optimizer.load_state_dict(saved)
        assert_same(states(model, optimizer), then)


def test_what_is_committed_at_step_0_is_what_a_state_dict_of_it_names(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        saved, then = optimizer.state_dict(), states(model, optimizer)
        optimizer.commit("mine")
        train(model, optimizer, 1)
        optimizer.commit()
        optimizer.load_state_dict(saved)
        assert_same(states(model, optimizer), then)


def test_a_batch_that_fails_before_the_first_step_leaves_the_way_back(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        saved, then = optimizer.state_dict(), states(model, optimizer)
        model(torch.ones(5, 6)).sum().backward()  # and the next batch is too large for the memory
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        train(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        assert_same(states(model, optimizer), then)


def test_nothing_is_written_for_a_step_that_was_named_already_or_for_none(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1)
        assert not (tmp_path / "run" / "COMMIT").exists()
        first = optimizer.state_dict()
        written = (tmp_path / "run" / "COMMIT").stat()
        assert optimizer.state_dict() == first
        optimizer.load_state_dict(first)
        again = (tmp_path / "run" / "COMMIT").stat()
        assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_the_newest_are_kept_also_across_a_resume_and_what_the_user_kept_stays(tmp_path: Path) -> None:
    model, saved = build(), []
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        train(model, optimizer, 1)
        optimizer.commit()
        optimizer.snapshot()  # the user's own
        for _ in range(3):
            train(model, optimizer, 1)
            saved.append(optimizer.state_dict())
        assert kept(tmp_path) == [1, 2, 3]
    model = build()
    with hold(model, tmp_path / "run", commit_every=0, resume=True) as optimizer:
        optimizer.load_state_dict(saved[-1])
        for _ in range(2):
            train(model, optimizer, 1)
            optimizer.state_dict()
        assert kept(tmp_path) == [1, 4, 5]
        with pytest.raises(
            ResumeError, match=r"step 2 that .* is gone: .* holds step 6, and snapshots of steps 1, 4, 5"
        ):
            optimizer.load_state_dict(saved[0])
        train(model, optimizer, 1)  # nothing was changed


def test_attached_objects_go_back_too(tmp_path: Path) -> None:
    model, average, saved = build(), Average(), []
    with hold(model, tmp_path / "run") as optimizer:
        optimizer.attach(average=average)
        for number in range(1, 4):
            train(model, optimizer, 1)
            average.value.fill_(number)
            saved.append(optimizer.state_dict())
        for number in (1, 2, 1):
            optimizer.load_state_dict(saved[number - 1])
            assert average.value == number


def test_another_way_from_the_same_step_is_another_commit(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", keep=3) as optimizer:
        train(model, optimizer, 1)
        first = optimizer.state_dict()
        train(model, optimizer, 1)
        old = optimizer.state_dict()
        train(model, optimizer, 1)
        optimizer.state_dict()
        optimizer.load_state_dict(first)
        optimizer.param_groups[0]["lr"] = 0.5
        train(model, optimizer, 1)
        new, then = optimizer.state_dict(), states(model, optimizer)
        train(model, optimizer, 1)
        optimizer.state_dict()
        optimizer.load_state_dict(new)
        assert_same(states(model, optimizer), then)
        with pytest.raises(ResumeError, match=r"step 2 .* is gone"):
            optimizer.load_state_dict(old)


def test_without_a_path_it_is_said_that_nothing_can_be_resumed() -> None:
    model = build()
    with hold(model, None) as optimizer:
        first = optimizer.state_dict()
        train(model, optimizer, 1)
        with pytest.raises(
            ResumeError, match=r"of step 0, this .* at step 1, .*: give OffloadZero a path, .*, or make"
        ):
            optimizer.load_state_dict(first)
        with pytest.warns(UserWarning, match="cannot be resumed from it: .*; give OffloadZero a path"):
            saved = optimizer.state_dict()
        optimizer.state_dict()  # said once
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1)
        with pytest.raises(ResumeError, match="is of step 1, this optimizer is at step 2"):
            optimizer.load_state_dict(saved)


def test_a_disk_that_has_no_space_for_the_snapshot_is_found_when_the_commit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        train(model, optimizer, 1)
        whole = snapshots.Snapshot.needs

        def needs(self: snapshots.Snapshot) -> list[snapshots.Need]:
            return [need._replace(available=100) for need in whole(self)]

        monkeypatch.setattr(snapshots.Snapshot, "needs", needs)
        with pytest.raises(BudgetError, match="a snapshot needs"):
            optimizer.state_dict()


@pytest.mark.parametrize("keep", [0, -1, True, "2"])
def test_a_wrong_keep_is_refused(keep: Any) -> None:
    with pytest.raises(ConfigError, match="keep="):
        hold(build(), None, keep=keep)


def test_a_damaged_snapshot_is_let_go_of_and_rollback_is_the_way_on(tmp_path: Path) -> None:
    def opened() -> list[str]:
        return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]

    model = build()
    with hold(model, tmp_path / "run") as optimizer:
        train(model, optimizer, 1)
        saved = optimizer.state_dict()
        train(model, optimizer, 1)
        optimizer.commit()
        then = states(model, optimizer)
        (swap,) = (tmp_path / "run").glob("snapshot*/swap-*")
        data = bytearray(swap.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        swap.write_bytes(data)
        with pytest.raises(CorruptionError):
            optimizer.load_state_dict(saved)
        assert str(swap) not in opened()
        with pytest.raises(CorruptionError):
            train(model, optimizer, 1)
        optimizer.rollback()
        assert_same(states(model, optimizer), then)


def name(model: nn.Module, optimizer: OffloadZero, times: int) -> list[dict[str, Any]]:
    """State dicts of as many steps, one after the other."""
    found = []
    for _ in range(times):
        train(model, optimizer, 1)
        found.append(copy.deepcopy(optimizer.state_dict()))
    return found


def test_a_snapshot_of_the_users_stays_also_if_a_state_dict_names_its_commit(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0, keep=1) as optimizer:
        (first,) = name(model, optimizer, 1)
        optimizer.snapshot()
        name(model, optimizer, 3)
        assert kept(tmp_path) == [1, 3]
        optimizer.load_state_dict(first)
        train(model, optimizer, 1)
        name(model, optimizer, 3)
        assert kept(tmp_path) == [1, 4]
        optimizer.load_state_dict(first)


def test_a_named_snapshot_that_the_user_asks_for_is_the_users_from_then_on(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0, keep=1) as optimizer:
        first, _ = name(model, optimizer, 2)
        optimizer.load_state_dict(first)
        (directory,) = optimizer.snapshot()
        name(model, optimizer, 3)
        assert kept(tmp_path) == [1, 3]
        assert directory.exists()


def test_what_was_gone_back_to_is_kept_anew_if_somebody_removes_its_snapshot(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        first, _ = name(model, optimizer, 2)
        optimizer.load_state_dict(first)
        then = states(model, optimizer)
        for directory in (tmp_path / "run").glob("snapshot-1-*"):
            shutil.rmtree(directory)
        assert optimizer.state_dict() == first
        name(model, optimizer, 2)
        optimizer.load_state_dict(first)
        assert_same(states(model, optimizer), then)


def test_named_snapshots_and_the_users_are_counted_apart(tmp_path: Path) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        name(model, optimizer, 3)
        for _ in range(2):
            train(model, optimizer, 1)
            optimizer.commit()
            optimizer.snapshot(keep=1)
        assert kept(tmp_path) == [2, 3, 5]


@pytest.mark.parametrize("moment", ["clear", "make", "decide"])
def test_what_was_cut_off_while_one_took_the_place_of_another_is_done_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    model = build()
    with hold(model, tmp_path / "run", commit_every=0, keep=3) as optimizer:
        first, _, _ = name(model, optimizer, 3)
        optimizer.load_state_dict(first)
        optimizer.param_groups[0]["lr"] = 0.5
        (new,) = name(model, optimizer, 1)
        then = states(model, optimizer)
        train(model, optimizer, 1)
        work = getattr(snapshots.Snapshot, moment)

        def cut_off(self: snapshots.Snapshot, *args: Any, **options: Any) -> None:
            work(self, *args, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(snapshots.Snapshot, moment, cut_off)
            with pytest.raises(KeyboardInterrupt):
                optimizer.commit()
        optimizer.commit()
        assert kept(tmp_path) == [1, 2, 3]
        optimizer.load_state_dict(new)
        assert_same(states(model, optimizer), then)


@pytest.mark.parametrize("to", ["the run", "elsewhere"])
def test_a_state_dict_is_known_in_another_layout_too(tmp_path: Path, to: str) -> None:
    """And what was named in the layout before stays, for parts of it may lie where the run is no more."""
    larger = Tuning(chunk="8KiB", threads=1)
    model = build()
    with hold(model, tmp_path / "run", commit_every=0) as optimizer:
        saved, then = name(model, optimizer, 2), states(model, optimizer)
    model = build()
    path = tmp_path / "run" if to == "the run" else tmp_path / "new"
    with hold(model, path, commit_every=0, tuning=larger, resume=[tmp_path / "run"]) as optimizer:
        assert optimizer.state_dict() | {"path": None} == saved[1] | {"path": None}
        optimizer.load_state_dict(saved[1])
        assert_same(states(model, optimizer), then)
        name(model, optimizer, 3)
        if to == "the run":
            assert kept(tmp_path) == [1, 3, 4]
            optimizer.load_state_dict(saved[0])
            expected = train(model, optimizer, 2)
            optimizer.load_state_dict(saved[0])
            assert train(model, optimizer, 2) == expected
