"""`offload bench step`: the bytes it counts, the limits it takes, what it refuses, and that nothing is left."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.cli import bench_step, bench_step_contestants
from offload.cli.bench_step_contestants import EACH_WAY, Disk, Limits, Measured, Round, Transfers
from offload.cli.bench_step_plots import draw
from offload.cli.bench_step_report import Report, as_json, markdown, shortfalls, table
from offload.cli.bench_step_report import Result as Case
from offload.cli.main import app
from offload.io.engine import IOEngine, IOFile, IOFuture
from offload.sizes import GIB, MIB, PAGE_BYTES
from tests.support.processes import ROOT, arena_bytes, open_files, own_threads

N = 1_572_864  # 24 layers of 256 x 256
HEADER = PAGE_BYTES / 256**2  # of a chunk so small, in bytes a parameter, each way
RUN = {
    "budget", "split_master", "cpu_memory", "peak_cpu_bytes", "streamed_chunks", "bytes_per_param",
    "expected_bytes_per_param", "step_s", "disk_s", "kernel_s", "limit_s", "x_limit", "adam_share", "wait_share",
    "rounds",
}  # fmt: skip


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def bench(drive: Path, *options: str) -> Result:
    words = ["bench", "step", "--n", str(N), "--rounds", "2", "--path", str(drive), "--out", str(drive.parent / "out")]
    return CliRunner().invoke(app, [*words, *options])


def test_budgets_leave_their_share_of_24_bytes_and_a_split_master_20(drive: Path) -> None:
    done = bench(drive, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["parameters"], found["chunks"], found["chunk_bytes"], found["rounds"]) == (N, 24, 256 * 1024, 2)
    runs = found["runs"]
    assert [(run["budget"], run["split_master"]) for run in runs] == [
        (0.0, False), (0.25, False), (0.5, False), (0.75, False), (1.0, False), (0.0, True),
    ]  # fmt: skip
    for run in runs:
        assert set(run) == RUN
        share = 1 - run["budget"]
        assert run["expected_bytes_per_param"] == share * (20 if run["split_master"] else 24)
        assert run["bytes_per_param"] == pytest.approx(run["expected_bytes_per_param"] + 2 * share * HEADER, rel=1e-6)
        assert run["streamed_chunks"] == 24 * share
        assert 0 < run["peak_cpu_bytes"] <= run["cpu_memory"]
        assert run["limit_s"] > 0
        assert run["x_limit"] > 0
        assert 0 < run["adam_share"] < 1
        assert 0 <= run["wait_share"] < 1
        assert (run["disk_s"] > 0) is (share > 0)
        assert len(run["rounds"]) == 2
    assert found["engine"] in ("uring", "threads", "portable")
    assert found["limit_buffers"] in [2 * each_way for each_way in EACH_WAY]
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")


def test_people_get_a_table_and_progress_and_nothing_is_left(drive: Path) -> None:
    options = ("--budgets", "0,1", "--no-split-master")
    bench(drive, *options)  # what is loaded once stays
    before, memory = open_files(), arena_bytes()
    done = bench(drive, *options)
    assert done.exit_code == 0, done.output
    assert list(drive.iterdir()) == []
    assert open_files() == before
    assert not own_threads()
    assert arena_bytes() <= memory
    for words in ("x limit", "drive alone", "Adam alone", "waiting", "of 24.00", "of 0.00", "1,572,864 parameters"):
        assert words in done.stdout
    assert f"picture: {drive.parent / 'out' / 'step.png'}" in done.stdout
    assert "bench step: 12/12 100% in RAM: round 2/2" in done.stderr


def test_all_in_ram_needs_no_reference_of_the_drive(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step_contestants, "Disk", None)
    found = json.loads(bench(drive, "--json", "--budgets", "1", "--no-split-master").stdout)
    assert found["engine"] is None
    (run,) = found["runs"]
    assert run["limit_s"] == run["kernel_s"] > run["disk_s"] == 0


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_run_that_fails_leaves_nothing(drive: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    before, memory = open_files(), arena_bytes()
    seen: list[str] = []

    def failing(subject: Any) -> Measured:
        seen.extend(path.name for path in next(drive.iterdir()).iterdir())
        raise error

    closed: list[bool] = []
    closing = OffloadZero.close
    monkeypatch.setattr(OffloadZero, "close", lambda optimizer: closed.append(True) or closing(optimizer))
    monkeypatch.setattr(bench_step_contestants.Subject, "run", failing)
    assert bench(drive, "--budgets", "0", "--no-split-master").exit_code != 0
    assert sorted(seen) == ["limit", "swap"]
    assert closed
    assert list(drive.iterdir()) == []
    assert set(open_files()) <= set(before)
    assert not own_threads()
    assert arena_bytes() <= memory


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(drive: Path, tmp_path: Path, number: int) -> None:
    words = ["bench", "step", "--n", "5e6", "--rounds", "1000", "--budgets", "0", "--no-split-master"]
    code = "import sys; from offload.cli.main import run; sys.argv = ['offload', *sys.argv[1:]]; run()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--path", str(drive), "--out", str(tmp_path / "out")],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert child.stderr is not None
        assert any("offload: " in line for line in child.stderr), "the optimizer is made"
        assert list(drive.iterdir())
        child.send_signal(number)
        assert child.wait(timeout=60) == (130 if number == signal.SIGINT else 128 + number)
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "many"], "ConfigError: --n='many'"),
        (["--n", "1e5"], "ConfigError: --n='1e5': give a number of parameters from 1.5e+06 on"),
        (["--budgets", "0,2"], "ConfigError: --budgets='0,2'"),
        (["--budgets", "half"], "ConfigError: --budgets='half'"),
        (["--path", "missing"], "PathError: [Errno 20] cannot measure here: give a directory"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_written(
    drive: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(bench_step, "measure", None)
    result = bench(drive, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in drive.parent.iterdir()] == ["drive"]


def test_too_little_ram_or_disk_is_refused_with_the_option_that_helps(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_step, "measure", None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB, GIB - 30 * MIB, 30 * MIB))
    result = bench(drive)
    assert result.stderr.startswith(f"BudgetError: 1.6e+06 parameters need 36.19 MiB in {drive}, 30 MiB are free")
    assert "lower --n" in result.stderr
    monkeypatch.setattr("offload.planner.machine.free_memory", lambda: 40 * MIB)
    assert "in RAM, 40 MiB are free: lower --n" in bench(drive).stderr


def test_budgets_of_a_quarter_are_whole_chunks_at_any_size() -> None:
    for n in (1_500_000, 5_000_000, 30_000_000, 300_000_000, 1_000_000_000):
        count, width = bench_step.shape(n)
        assert count % 4 == 0
        assert count * width**2 == pytest.approx(n, rel=0.05)
        assert count >= 240 or width == 256
    assert bench_step.shape(300_000_000) == (288, 1024)


class Recording:
    """An engine that says what it was asked for."""

    def __init__(self, engine: IOEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.open, self.register, self.close = engine.open, engine.register, engine.close
        self.moved: list[tuple[str, int, int]] = []
        self.under_way: list[tuple[str, IOFuture]] = []
        self.most = {"read": 0, "write": 0}

    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._note("read", offset, buffer, self._engine.read(file, offset, buffer))

    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._note("write", offset, buffer, self._engine.write(file, offset, buffer))

    def _note(self, way: str, offset: int, buffer: memoryview, future: IOFuture) -> IOFuture:
        self.moved.append((way, offset, len(buffer)))
        self.under_way = [(other, one) for other, one in self.under_way if not one.done()] + [(way, future)]
        for other in self.most:
            self.most[other] = max(self.most[other], sum(one == other for one, _ in self.under_way))
        return future


def test_the_drives_reference_moves_every_slot_each_way_both_ways_at_once(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Recording] = []
    opening = bench_step_contestants.open_engine

    def recording(name: str, paths: Sequence[Path]) -> Recording:
        engines.append(Recording(opening(name, paths)))
        return engines[-1]

    monkeypatch.setattr(bench_step_contestants, "open_engine", recording)
    disk = Disk(drive, Transfers(10, MIB))
    try:
        (engine,) = engines
        assert sorted(engine.moved) == [("write", i * MIB, MIB) for i in range(10)], "nothing is written a first time"
        for transfers, each_way in ((Transfers(10, MIB), 2), (Transfers(7, MIB // 2), 4)):
            engine.moved.clear()
            engine.most = {"read": 0, "write": 0}
            assert disk.run(transfers, each_way) > 0
            expected = [(way, i * MIB, transfers.length) for way in ("read", "write") for i in range(transfers.count)]
            assert sorted(engine.moved) == expected
            assert [offset for way, offset, _ in engine.moved if way == "read"] == sorted(
                offset for way, offset, _ in engine.moved if way == "read"
            )
            assert max(engine.most.values()) <= each_way
            assert {way for way, *_ in engine.moved[: 2 * each_way]} == {"read", "write"}
    finally:
        disk.close()


class Fake:
    """Takes the seconds it is told."""

    def __init__(self, seconds: dict[int, float], moved: int = 0) -> None:
        self._seconds, self._moved = seconds, moved
        self.engine_name = "fake"
        self.asked: list[Transfers] = []

    def run(self, transfers: Transfers, each_way: int) -> float:
        self.asked.append(transfers)
        return self._seconds[each_way]


def test_the_limit_is_the_larger_of_both_for_the_bytes_that_moved_with_the_best_buffers() -> None:
    transfers = Transfers(4, MIB)
    limits = Limits.__new__(Limits)
    disk = Fake({2: 3.0, 4: 2.0, 8: 2.5})
    limits._disk = disk  # type: ignore[assignment]
    limits._alone = type("", (), {"run": lambda self: 1.5})()
    limits._before = None
    limits.search(transfers, 2, lambda what: None)
    assert (limits.buffers, len(disk.asked)) == (8, 6)

    def subject(moved: int) -> Any:
        step = Measured(seconds=4.0, adam_s=1.0, wait_s=2.0, moved_bytes=moved)
        return type("", (), {"run": lambda self: step})()

    whole = limits.round(subject(8 * MIB), transfers)
    assert (whole.disk_s, whole.kernel_s, whole.limit_s, len(disk.asked)) == (2.0, 1.5, 2.0, 8), "before and after"
    disk._seconds[4] = 4.0
    half = limits.round(subject(4 * MIB), transfers)
    assert (half.disk_s, half.limit_s, len(disk.asked)) == (1.5, 1.5, 9), "the mean of both, of half the bytes"
    other = limits.round(subject(4 * MIB), Transfers(2, MIB))
    assert (other.disk_s, len(disk.asked)) == (4.0, 11), "what others moved is no measure for these"
    none = limits.round(subject(0), Transfers(0, MIB))
    assert (none.disk_s, none.limit_s, len(disk.asked)) == (0.0, 1.5, 11)


def case(share: float, moved: float, *rounds: tuple[float, float, float], split: bool = False) -> Case:
    plan = bench_step.Case(share, split, 4, 256, 1, 1, 1, Transfers(4, MIB))
    found = [Round(Measured(step, step / 4, step / 2, 0), disk, kernel) for step, disk, kernel in rounds]
    return Case(plan, found, moved * plan.n, MIB)


def test_figures_are_medians_of_the_rounds_and_of_their_ratios(tmp_path: Path) -> None:
    good = case(0.5, 12.1, (2.0, 2.0, 1.0), (9.0, 3.0, 1.0), (4.0, 4.0, 5.0))
    assert (good.step_s, good.disk_s, good.kernel_s, good.limit_s) == (4.0, 3.0, 1.0, 3.0)
    assert good.x_limit == 1.0
    assert (good.adam_share, good.wait_share) == (0.25, 0.5)
    slow = case(0.0, 20.5, (2.0, 1.0, 1.0), split=True)
    report = Report([good, slow], "uring", 8, "avx2", 2)
    texts = list(shortfalls(report))
    assert len(texts) == 2
    assert "0% in RAM, split master moves 20.50 bytes a parameter and step, wanted 20.00" in texts[0]
    assert "takes 2.000 of its limit" in texts[1]
    assert [run["x_limit"] for run in as_json(report)["runs"]] == [1.0, 2.0]
    assert table(report).row_count == 2
    written = markdown(report, "python bench/step.py --n 3e8")
    assert "| 50% | 1 MiB | 12.10 of 12.00 | 4.000 s | 2.000-9.000 | 3.000 s | 1.000 s | 1.000 | 25% | 50% |" in written
    assert "`python bench/step.py --n 3e8`" in written
    draw(report, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
