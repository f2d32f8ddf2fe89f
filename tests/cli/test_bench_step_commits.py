"""`offload bench step --commit-every`: that commits are made and paid in the steps, what they flush, and the ratios."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.checkpoint.committer import Commits
from offload.cli import bench_step, bench_step_commits
from offload.cli.bench_step_commits import Report, Round, as_json, markdown, shortfalls, table
from offload.cli.bench_step_commits import Result as Case
from offload.cli.bench_step_contestants import Disk, Transfers
from offload.cli.main import app
from offload.io.engine import IOFuture
from offload.sizes import GIB, MIB, PAGE_BYTES
from tests.support.processes import arena_bytes, open_files, own_threads

N = 1_572_864  # 24 layers of 256 x 256
PAGE = PAGE_BYTES / 256**2  # of a chunk so small, in bytes a parameter


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def bench(drive: Path, *options: str) -> Result:
    words = ["bench", "step", "--n", str(N), "--rounds", "2", "--path", str(drive), "--out", str(drive.parent / "out")]
    return CliRunner().invoke(app, [*words, *options])


def test_commits_fall_into_the_steps_and_flush_what_stays_in_ram_and_split_parameters(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = 2
    order: list[str] = []
    committing, stepping = Commits.commit, OffloadZero.step

    def commit(self: Commits, prepare: object, step: int, *more: object) -> None:
        order.append(f"commit {step}")
        committing(self, prepare, step, *more)  # type: ignore[arg-type]

    def step(self: OffloadZero) -> None:
        order.append("with" if self._config.commit_every else "without")
        stepping(self)

    monkeypatch.setattr(Commits, "commit", commit)
    monkeypatch.setattr(OffloadZero, "step", step)
    before, memory = open_files(), arena_bytes()
    done = bench(drive, "--json", "--budgets", "0,0.5", "--commit-every", str(every))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["parameters"], found["commit_every"], found["rounds"]) == (N, every, 2)
    assert [(run["budget"], run["split_master"]) for run in found["runs"]] == [(0, False), (0.5, False), (0, True)]
    for run, flushed in zip(found["runs"], (0, 6 + 0.5 * PAGE, 2 + PAGE), strict=True):
        # All of it is written once a commit; a step pays its part.
        assert run["flushed_bytes_per_param"] == pytest.approx(flushed / every, rel=1e-6)
        assert (run["flush_s"] > 0) is (flushed > 0)
        assert len(run["rounds"]) == 2
    # The first case: two rounds to warm up, and two that count; a commit is made where the next step begins.
    with_commit = [["with", f"commit {number * every}", *["with"] * (every - 1)] for number in (1, 2, 3)]
    without, first = ["without"] * every, ["with"] * every
    expected = [*first, *without, *without, *with_commit[0], *with_commit[1], *without, *without, *with_commit[2]]
    assert order[: len(expected)] == expected
    assert list(drive.iterdir()) == []
    assert open_files() == before
    assert not own_threads()
    assert arena_bytes() <= memory


def test_only_writing_is_timed_for_a_flush(drive: Path) -> None:
    disk = Disk(drive, Transfers(4, MIB))
    moved: list[str] = []
    engine = disk._engine

    class Counting:
        def read(self, *args: Any) -> IOFuture:
            moved.append("read")
            return engine.read(*args)

        def write(self, *args: Any) -> IOFuture:
            moved.append("write")
            return engine.write(*args)

    try:
        disk._engine = Counting()  # type: ignore[assignment]
        assert disk.run(Transfers(4, MIB), 2, ways=("write",)) > 0
        assert moved == ["write"] * 4
    finally:
        disk._engine = engine
        disk.close()


def case(*rounds: Round) -> Case:
    plan = bench_step.Case(0.5, False, 4, 256, 1, 1, 1, Transfers(2, MIB), commit_every=1)
    return Case(plan, list(rounds), MIB)


def test_figures_are_medians_of_the_rounds_and_of_their_ratios() -> None:
    n = 4 * 256**2
    good = case(Round(1.0, 1.5, 6 * n, 0.5), Round(2.0, 9.0, 6 * n, 1.0), Round(4.0, 4.0, 6 * n, 1.0))
    assert (good.median("plain_s"), good.median("committing_s"), good.flushed_per_param) == (2.0, 4.0, 6.0)
    assert (good.x_step, good.x_limit) == (1.5, 1.0)
    slow = case(Round(1.0, 1.5, 0.0, 0.0))
    report = Report([good, slow], "a machine")
    assert list(shortfalls(report)) == ["off target: 50% in RAM takes 1.500 of its limit, wanted 1.03"]
    assert [run["x_limit"] for run in as_json(report)["runs"]] == [1.0, 1.5]
    assert table(report).row_count == 2
    written = markdown(report, "python bench/step.py --commit-every 1")
    row = "| 50% | 1 MiB | 2.000 s | 1.000-4.000 | 4.000 s | 1.500-9.000 | 6.00 | 1.000 s | 1.500 | 1.000 |"
    assert row in written


def test_room_for_two_runs_is_wanted_before_anything_is_written(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step_commits, "measure", None)
    usage = namedtuple("usage", "total used free")
    # Three places a chunk, and as much again for the drive alone.
    needed = 4 * N * 12
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB, GIB - needed, needed))
    result = bench(drive, "--commit-every", "1", "--budgets", "0", "--no-split-master")
    assert result.exit_code == 2
    assert result.stderr.startswith("BudgetError: 1.6e+06 parameters need ")
    assert list(drive.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB, 0, GIB))
    monkeypatch.setattr("offload.planner.machine.free_memory", lambda: 20 * MIB)
    assert "in RAM, 20 MiB are free: lower --n" in bench(drive, "--commit-every", "1").stderr
