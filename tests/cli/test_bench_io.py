"""`offload bench io`: what it says and remembers, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli import io_speed
from offload.cli.io_speed import OPERATIONS, Contestant, LeftOutError, Ours, Speeds
from offload.cli.main import app
from offload.errors import BudgetError, PathError
from offload.io import io_uring, select
from offload.sizes import GIB, MIB
from tests.support.processes import ROOT, open_files, own_threads


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One setting of each engine, one round, and a cache of its own."""
    everyone = io_speed.field_of

    def few(*arguments: Any, **options: Any) -> list[Contestant]:
        return list({one.name: one for one in everyone(*arguments, **options)}.values())

    monkeypatch.setattr(io_speed, "field_of", few)
    monkeypatch.setattr(io_speed, "SWEEP_ROUNDS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def bench(*arguments: str | Path) -> Any:
    words = ["bench", "io", *map(str, arguments), "--quick", "--size", "16MiB", "--rounds", "1"]
    return CliRunner().invoke(app, words)


def test_json_has_speeds_and_ratios_and_the_best_settings_are_remembered(drive: Path) -> None:
    done = bench(drive, "--json")
    assert done.exit_code == 0, done.stderr
    (found,) = json.loads(done.stdout)["drives"]
    assert found["path"] == str(drive)
    assert {one["name"] for one in found["race"]} >= {"threads", "portable", "preadv pool"}
    assert all(one[f"{operation}_gb_per_s"] > 0 for one in found["race"] for operation in OPERATIONS)
    assert all(one[f"{operation}_chosen_by_it"] > 0 for one in found["race"] for operation in OPERATIONS)
    known, chosen = select.recall(drive), found["chosen"]
    assert known is not None
    assert (known.engine, known.request_bytes, known.depth) == (
        chosen["name"],
        chosen["request_bytes"],
        chosen["depth"],
    )
    assert known.mixed_bytes_per_s == pytest.approx(chosen["mixed_gb_per_s"] * 1e9)


def test_people_get_a_table_and_it_leaves_no_file_descriptor_or_thread(drive: Path) -> None:
    shown = bench(drive)  # what is loaded once stays
    assert "GB/s; x: the chosen engine's by this one's" in " ".join(shown.stdout.split())
    assert "s a step for a billion parameters" in shown.stdout
    assert 'io_engine="auto" will use' in shown.stderr
    before, threads = open_files(), own_threads()
    assert bench(drive).exit_code == 0
    assert list(drive.iterdir()) == []
    assert open_files() == before
    assert own_threads() == threads


def test_cache_that_cannot_be_written_is_said(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    done = bench(drive)
    assert done.exit_code == 0
    assert "cannot write down the settings" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["missing"], "PathError", "give a directory"),
        (["file"], "PathError", "give a directory"),
        ([".", "--size", "512"], "ConfigError", "--size 512 is too small to measure: give at least 16MiB"),
        ([".", "--size", "900TB"], "BudgetError", "lower --size"),
        ([".", "missing"], "PathError", "give a directory"),
    ],
)
def test_wrong_arguments_are_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["bench", "io", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(error)
    assert message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_unwritable_path_is_refused(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PathError, match="may not write"):
        io_speed.checked_size(drive, None, GIB)


def test_file_system_that_fills_up_is_a_path_error_and_leaves_nothing(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    done = bench(drive)
    assert (done.exit_code, list(drive.iterdir())) == (2, [])
    assert "PathError" in done.stderr
    assert "No space left" in done.stderr


def test_size_fits_the_free_space_or_is_refused(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_speed.shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, free=GIB))
    assert io_speed.checked_size(drive, None, GIB) == 256 * MIB
    with pytest.raises(BudgetError) as caught:
        io_speed.checked_size(drive, 2 * GIB, GIB)
    assert (caught.value.needed, caught.value.available) == (2 * GIB, GIB)


def test_without_io_uring_the_threads_are_measured(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_uring, "is_available", lambda: (False, "the sysctl forbids it"))
    names = {
        one.name for one in io_speed.field_of(drive / "file", memoryview(bytes(io_speed.MEMORY_BYTES)), quick=True)
    }
    assert names == {"threads", "portable", "preadv pool"}


def test_terminated_sweep_leaves_nothing(drive: Path) -> None:
    code = "import sys; from offload.cli.main import run; sys.argv = ['offload', *sys.argv[1:]]; run()"
    words = ["bench", "io", str(drive), "--size", "64MiB"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert child.stderr is not None
        assert any("round 1/" in line for line in child.stderr)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()
    assert list(drive.iterdir()) == []


def test_recommended_is_the_cheapest_of_those_as_fast_as_the_fastest() -> None:
    found = [speeds("a", 1.0, 0.05), speeds("b", 1.02, 0.01), speeds("c", 1.2, 0.001)]
    assert io_speed.recommended(found).name == "b"


def test_ratio_is_the_median_of_the_rounds_own() -> None:
    ours, theirs = speeds("a", 1.0, 0.0), speeds("b", 1.0, 0.0)
    ours.seconds["read"], theirs.seconds["read"] = [1.0, 4.0, 9.0], [2.0, 2.0, 18.0]
    assert ours.by(theirs, "read") == 2.0


def test_contestant_that_fails_is_left_out_with_its_reason() -> None:
    good, bad = Fake("good"), Fake("bad")
    found, left_out = io_speed.measure([good, bad], 10, 2, lambda what: None)
    assert [one.contestant for one in found] == [good]
    assert found[0].seconds["mixed"] == [1.0, 1.0]
    assert left_out == ["bad 1M x 1: no more"]


def test_mixed_reads_the_first_half_and_writes_the_second() -> None:
    found = list(io_speed.transfers("mixed", 12, 4))
    assert found == [("read", 0, 4), ("write", 6, 4), ("read", 4, 2), ("write", 10, 2)]


class Fake(Contestant):
    def __init__(self, name: str) -> None:
        super().__init__(name, Path(), memoryview(b""), MIB, 1)

    def run(self, operation: str, nbytes: int) -> float:
        if self.name == "bad":
            raise LeftOutError("no more")
        return 1.0


def speeds(name: str, seconds: float, cpu_s: float) -> Speeds:
    one = Ours(name, Path(), memoryview(b""), MIB, 1)
    return Speeds(one, 1, {operation: [seconds] for operation in OPERATIONS}, [cpu_s])
