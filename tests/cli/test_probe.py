"""`offload probe`: what it measures, says and remembers, what it refuses, and what `offload plan` makes of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from offload.cli import host_costs, io_speed, probing
from offload.cli.main import app
from offload.io import remembered, select
from offload.planner import machine_file, rates
from offload.planner.rates import Rate, Rates
from offload.sizes import GIB, KIB, MIB
from tests.support.processes import open_files, own_threads


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little of everything, and a cache of its own."""
    for name, value in {
        "ROUNDS": 2,
        "LEAST_S": 1e-4,
        "COPIED_BYTES": MIB,
        "ELEMENTS": 64 * KIB,
        "QUICK_BYTES": 16 * MIB,
    }.items():
        monkeypatch.setattr(probing, name, value)
    monkeypatch.setattr(host_costs, "TILES", 8)
    monkeypatch.setattr(host_costs, "CHUNKS", 32)
    monkeypatch.setattr(io_speed, "SWEEP_ROUNDS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A directory whose file system's best engine is known."""
    (tmp_path / "drive").mkdir()
    select.remember(tmp_path, select.Settings("threads", request_bytes=MIB, depth=3))
    return tmp_path / "drive"


def probe(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def plan(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", "--json", "--cpu-memory", "least", *arguments])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def some(steps: float = 1e9) -> Rates:
    """Rates of this machine, of round numbers."""
    one = Rate.of([1e9])
    return Rates("cpu", 2, one, {"bf16": Rate.of([3e11, 1e11, 2e11])}, {"adamw, fp32, split": Rate.of([steps])})


def test_all_is_measured_and_remembered_and_nothing_is_left(drive: Path) -> None:
    probe(drive)  # what is loaded once stays
    before, threads = open_files(), own_threads()
    done = probe(drive, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "cpu"
    assert found["link"] is None
    assert set(found["products"]) == {"fp32", "bf16", "fp16"}
    assert len(found["steps"]) == len(probing.STEPS)
    (of_drive,) = found["drives"]
    assert (of_drive["path"], of_drive["engine"], found["together"]) == (str(drive), "threads", None)
    ranges = [found["memory"], *found["products"].values(), *found["steps"].values()]
    ranges += [of_drive[operation] for operation in io_speed.OPERATIONS]
    assert set(found["host"]) == {"tile", "chunk", "resident", "moved", "delay"}
    ranges += found["host"].values()
    assert all(0 < one["lowest"] <= one["median"] <= one["highest"] for one in ranges)
    known, settings = rates.recall("cpu"), select.recall(drive)
    assert known is not None
    assert msgspec.to_builtins(known.steps) == found["steps"]
    assert msgspec.to_builtins(known.host) == found["host"]
    assert settings is not None
    assert (settings.engine, settings.request_bytes, settings.depth) == ("threads", MIB, 3)
    speeds = (settings.read_bytes_per_s, settings.write_bytes_per_s, settings.mixed_bytes_per_s)
    assert speeds == tuple(of_drive[operation]["median"] for operation in io_speed.OPERATIONS)
    assert (list(drive.iterdir()), open_files(), own_threads()) == ([], before, threads)


def test_people_get_a_table(drive: Path) -> None:
    shown = probe(drive)
    assert "products of matrices, bf16" in shown.stdout
    assert "adamw, 8bit, split" in shown.stdout
    assert re.search(r"Python: a tile, forward or backward .* [um]?s ", shown.stdout)
    assert re.search(r"Python: a chunk of states, read, stepped and written .* [um]?s ", shown.stdout)
    assert re.search(r"Python: a chunk of states in RAM, stepped alone .* [um]?s ", shown.stdout)
    assert re.search(r"Python: a chunk of parameters, read or written .* [num]?s ", shown.stdout)
    assert re.search(r"a page, read or written alone .* [um]?s ", shown.stdout)
    assert "offload plan" in shown.stderr


def test_an_unknown_drive_gets_the_engine_that_is_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = io_speed.field_of

    def one(*arguments: Any, **options: Any) -> list[io_speed.Contestant]:
        return [one for one in everyone(*arguments, **options) if one.name == "portable"][:1]

    monkeypatch.setattr(io_speed, "field_of", one)
    monkeypatch.setattr(probing, "measure_rates", lambda tell: some())
    assert probe(tmp_path).exit_code == 0
    settings = select.recall(tmp_path)
    assert settings is not None
    assert settings.engine == "portable"


def test_several_drives_are_measured_together(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = drive.parent / "other"
    other.mkdir()
    for module in (probing, select):
        monkeypatch.setattr(module, "file_system_of", lambda path: path.name)
    for path in (drive, other):
        select.remember(path, select.Settings("threads"))
    monkeypatch.setattr(probing, "measure_rates", lambda tell: some())
    done = probe(drive, other, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["path"] for one in found["drives"]] == [str(drive), str(other)]
    assert found["together"]["median"] > 0
    known = select.recall_together(["other", "drive"])
    assert known is not None
    assert {name: getattr(known, name) for name in found["together"]} == found["together"]
    assert select.recall_together(["drive"]) is None
    assert plan("--path", str(drive), "--path", str(other))["disk_gb_per_s"] == known.median / 1e9


def test_two_directories_of_one_drive_are_refused_before_anything_is_measured(drive: Path, tmp_path: Path) -> None:
    done = probe(drive, tmp_path)
    assert done.exit_code == 2
    assert "are on one file system: give one directory of each" in done.stderr
    assert "this machine" not in done.stderr


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    done = probe(tmp_path / "missing")
    assert done.exit_code == 2
    assert done.stderr.startswith("PathError")


def test_too_little_ram_is_said_before_anything_is_measured(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "free_memory", lambda: GIB)
    done = probe(drive)
    assert done.exit_code == 2
    assert "measuring needs 2 GiB of RAM and 1 GiB" in done.stderr


def test_cache_that_cannot_be_written_is_said(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "measure_rates", lambda tell: some())
    monkeypatch.setattr(probing, "remember_all", lambda *_: (tmp_path / "missing" / "file").write_text(""))
    done = probe(drive)
    assert done.exit_code == 0
    assert "cannot write down what was measured" in done.stderr


def test_a_rate_is_units_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the work moves: 0.25 s a call, which is repeated until LEAST_S."""
    monkeypatch.setattr(probing, "LEAST_S", 0.9)
    now = [0.0]

    def work() -> None:
        now[0] += 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert probing._per_second(work, 10) == 40.0
    assert now[0] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"threads": "many"},
        {"memory": None},
        {"memory": {"median": 0, "lowest": 1, "highest": 1}},
        {"more": 1},
        {"measured_at": 0},
    ],
)
def test_what_is_stale_or_makes_no_sense_is_not_used(change: dict[str, object]) -> None:
    rates.remember(some())
    assert rates.recall("cpu") is not None
    assert rates.recall("another card") is None
    found = json.loads(remembered.cache_file().read_text())
    found["sections"]["rates"]["cpu"].update(change)
    remembered.cache_file().write_text(json.dumps(found))
    assert rates.recall("cpu") is None


def test_the_plan_computes_with_what_was_measured() -> None:
    """6 FLOP a parameter and token, by the median; on a CPU the kernels take theirs beside."""
    assert plan()["flops_from"] == "unknown"
    rates.remember(some(steps=1e6))
    found = plan("--split-master", "--batch", "2", "--seq", "64", "--disk-gb-per-s", "1e6")
    assert (found["flops"], found["flops_from"]) == (2e11, "measured")
    compute = 6 * found["parameters"] * 128 / 2e11
    assert found["compute_seconds"] == pytest.approx(compute)
    assert found["kernel_seconds"] == pytest.approx(found["parameters"] / 1e6)
    assert found["step_seconds"] == pytest.approx(compute + found["parameters"] / 1e6)
    assert found["waits_for"] == "update"
    assert plan("--ram", "64GiB")["flops_from"] == "unknown"  # another machine
    assert plan("--optimizer", "sgd")["kernel_seconds"] is None


def test_what_one_machine_measured_is_planned_on_another(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "measure_rates", lambda tell: some(steps=1e6))
    file = tmp_path / "here.toml"
    done = probe(drive, "--save", file, "--json")
    assert done.exit_code == 0, done.stderr
    assert f"offload plan --machine {file}" in done.stderr
    of_drive, host = (json.loads(done.stdout)[name] for name in ("drives", "host"))
    (of_drive,) = of_drive
    saved = machine_file.load(str(file))
    assert saved.is_here
    assert saved.drives[0].capacity is not None
    assert saved.host is not None
    assert {what: figure["value"] for what, figure in msgspec.to_builtins(saved.host).items()} == {
        what: rate["median"] for what, rate in host.items()
    }
    assert set(host) == {"tile", "chunk", "resident", "moved", "delay"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(remembered, "_machine", lambda: "another")
    given = ("--split-master", "--machine", str(file))
    found = plan(*given)
    assert found["flops"] == 2e11
    assert found["disk_gb_per_s"] == of_drive["mixed"]["median"] / 1e9
    assert found["kernel_seconds"] == pytest.approx(found["parameters"] / 1e6)
    assert found["free_cpu_bytes"] == saved.ram.number
    assert {found[f"{what}_from"] for what in ("flops", "disk", "kernels")} == {"elsewhere"}
    shown = CliRunner().invoke(app, ["plan", "--cpu-memory", "least", *given]).stdout
    assert "It is another machine than this one, measured less than a day ago." in shown.splitlines()[0]


def test_what_was_measured_before_python_was_is_still_used() -> None:
    rates.remember(some())
    found = json.loads(remembered.cache_file().read_text())
    del found["sections"]["rates"]["cpu"]["host"]
    remembered.cache_file().write_text(json.dumps(found))
    assert rates.recall("cpu") == msgspec.structs.replace(
        some(), measured_at=found["sections"]["rates"]["cpu"]["measured_at"]
    )


@pytest.mark.parametrize("name", ["there.toml", "missing/x.toml"])
def test_what_cannot_be_saved_is_said_before_anything_is_measured(name: str, drive: Path, tmp_path: Path) -> None:
    (tmp_path / "there.toml").write_text("kept")
    done = probe(drive, "--save", tmp_path / name)
    assert done.exit_code == 2
    assert f"--save {tmp_path / name}: there is" in done.stderr
    assert "this machine" not in done.stderr
    assert (tmp_path / "there.toml").read_text() == "kept"
