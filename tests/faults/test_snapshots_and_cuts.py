"""Snapshots of trainings that are killed, or lose power, at random instants."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from offload import OffloadZero
from offload.checkpoint.reader import Reader
from offload.storage.directories import COMMIT_NAME
from tests.faults.conftest import Make, Tiny, assert_same, bits
from tests.faults.test_commits import Cuts, cut_power
from tests.support.processes import run_killed

KEEP = 2

# Kills.


def test_killed_at_any_instant_snapshots_are_whole_or_cleared_away(tmp_path: Path) -> None:
    run_killed("killed_snapshots", 1, 1, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("paths", [1, 2])
def test_a_hundred_kills_of_trainings_that_take_snapshots(tmp_path: Path, paths: int) -> None:
    run_killed("killed_snapshots", 100 + paths, 100, tmp_path, paths)


# Power cuts.


class KeepingCuts(Cuts):
    """Takes snapshots, too, and looks at them when the power is back. Attributes: found: how many it looked at."""

    def __init__(self, make: Make, path: Path) -> None:
        self._taken: list[int] = []
        self.found = 0
        super().__init__(make, path)

    def begin_anew(self) -> None:
        super().begin_anew()
        self._taken = []

    def until_cut(self, chance: random.Random) -> None:
        super().until_cut(chance)
        self._look(chance.random() < 0.2)

    def _after_step(self, optimizer: OffloadZero, chance: random.Random) -> None:
        if not self.least or chance.random() < 0.5:
            return
        (directory,) = optimizer.snapshot(keep=KEEP)
        self._taken = [*dict.fromkeys([*self._taken, int(directory.name.split("-")[1])])]
        there = [name for name in self.files.names(self._path) if name.startswith("snapshot-")]
        assert len(there) <= KEEP
        for name in there:
            files = self.files.names(self._path / name)
            assert COMMIT_NAME in files

    def _look(self, resumes: bool) -> None:
        steps = set()
        folder = self._path.with_name("looked")
        for name in self.files.names(self._path):
            directory = self._path / name
            if name.startswith("snapshot-") and COMMIT_NAME in self.files.names(directory):
                (folder / name).mkdir(parents=True)
                for file in self.files.names(directory):
                    (folder / name / file).write_bytes(self.files.read(directory / file, 1 << 30))
                steps.add(self._look_at(folder / name, resumes))
        shutil.rmtree(folder, ignore_errors=True)
        newest = sorted(steps)[-KEEP:]  # calls that were cut off may have made newer ones
        assert not self._taken or self._taken[-1] in steps or self._taken[-1] < newest[0], "the last one is gone"
        assert min(KEEP, len(self._taken)) <= len(steps)

    def _look_at(self, place: Path, resumes: bool) -> int:
        self.found += 1
        with Reader([place]) as reader:
            step = reader.commit.step
            assert reader.commit.is_snapshot
            assert all(slot.error is None for slot in reader.verify())
        if resumes:
            model = Tiny()
            with self._make(
                model, path=place.with_name(f"own{step}"), commit_every=0, resume=[place], cpu_memory="1MiB"
            ) as optimizer:
                assert_same(self.expected[step], bits(model, optimizer))
        return step


def test_power_cuts_leave_whole_snapshots(make: Make, path: Path) -> None:
    training = KeepingCuts(make, path)
    cut_power(training, 20, seed=1)
    assert training.found > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_power_cuts_of_trainings_that_take_snapshots(make: Make, path: Path) -> None:
    training = KeepingCuts(make, path)
    cut_power(training, 1000, seed=3)
    assert training.found > 500
