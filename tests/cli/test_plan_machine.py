"""`offload plan --machine` and `--path`: a plan for a machine that is not this one, and for several drives of this."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload.cli.main import app
from offload.io import remembered, select
from offload.optim.flops import newton_schulz_flops
from offload.planner import machine_file, rates
from offload.planner.machine_file import Drive, Figure, Machine, Size
from offload.planner.rates import Rate, Rates
from tests.support.command import printed

SMALL = ("--preset", "1m", "--batch", "2", "--seq", "64", "--chunk", "64KiB", "--cpu-memory", "least")


def run(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, options)])


def planned(*options: str | Path) -> dict[str, Any]:
    return printed(run("--json", *SMALL, *options))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(tmp_path: Path, **fields: Any) -> Path:
    """A file of a machine without a GPU, with two drives, of round numbers."""
    rate = Figure(1e12, "a data sheet")
    drive = Drive("x", Figure(2e9, "x"), Figure(2e9, "x"), None, Size("1TB", "x"), Size("600TB", "x"), 2)
    given: dict[str, Any] = {
        "threads": Size(64, "x"), "memory": Figure(28e9, "x"), "products": {"bf16": rate}, "drives": (drive,),
    }  # fmt: skip
    machine = Machine("mine", Size("64GiB", "x"), **given | fields)
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
    file.write_text(machine_file.written(machine))
    return file


def test_a_plan_for_a_machine_is_the_one_for_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As options give them: memory, FLOP/s, and 2 / (1/read + 1/write) GB/s. Nothing of this machine is asked."""

    def never(*_: object) -> int:
        raise AssertionError("this machine was asked")

    machine = machine_file.find("rtx4090-64gb")
    given = [
        *("--gpu-memory", "24GiB", "--ram", "60GiB", "--flops", str(machine.products["bf16"].value)),
        *("--disk-gb-per-s", str(2 / (1 / 7.45 + 1 / 6.9))),
    ]
    wanted = planned(*given, "--device-memory", "4MiB")
    for module in ("machine", "placement"):
        monkeypatch.setattr(f"offload.planner.{module}.free_memory", never)
    monkeypatch.setattr("offload.planner.machine.usable_cpus", never)
    for module in (rates, select):
        monkeypatch.setattr(module, "recall", never)
    found = planned("--machine", "rtx4090-64gb", "--device-memory", "4MiB")
    of_machine = {"flops_from", "disk_from", "drive_life_steps", "endurance_bytes", "disk_capacity_bytes"}
    of_kernels = {"kernel_seconds", "kernels_from", "budgets", "disk_gb_per_s"}
    of_time = {"predicted", "not_predicted"}  # of which the options give too few rates
    for key in wanted.keys() - of_machine - of_kernels - of_time:
        assert found[key] == wanted[key], key
    assert found["disk_gb_per_s"] == pytest.approx(wanted["disk_gb_per_s"])
    assert (found["flops_from"], found["disk_from"], found["kernels_from"]) == ("described",) * 3
    worn = found["written_bytes"] + found["commit_bytes"] / found["commit_every"]
    assert found["drive_life_steps"] == pytest.approx(1200e12 / worn)
    # 12 bytes of states and 2 of a parameter are written, 12 and 2 of a gradient read, of 66.56 GB/s.
    assert found["kernel_seconds"] == pytest.approx(found["parameters"] * 28 / 66.56e9)


def test_what_is_given_counts_more_than_the_machine() -> None:
    found = planned("--machine", "rtx4090-64gb", *("--gpu-memory", "2GiB", "--ram", "8GiB", "--flops", "1e12"))
    assert (found["gpu_bytes"], found["free_cpu_bytes"], found["flops"]) == (2 << 30, 8 << 30, 1e12)
    assert found["flops_from"] == "given"
    assert planned("--machine", "rtx4090-64gb", "--disk-gb-per-s", "1")["disk_from"] == "given"


def test_a_machine_without_a_gpu_is_planned_also_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("offload.devices.copies.accelerator", lambda: torch.device("cuda"))
    found = planned("--machine", written(tmp_path))
    assert (found["device"], found["gpu_bytes"], found["link_up_bytes"]) == ("cpu", None, None)
    assert found["disk_gb_per_s"] == pytest.approx(4)
    assert found["endurance_bytes"] == pytest.approx(1200e12)
    assert found["compute_seconds"] == pytest.approx(6 * found["parameters"] * 128 / 1e12)


def test_matrices_on_a_cpu_elsewhere_are_not_timed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("measured here")

    monkeypatch.setattr("offload.cli.plan_updates.measured_seconds", never)
    found = planned("--machine", written(tmp_path), "--optimizer", "muon")
    width = 128
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    assert found["update_flops"] == 4 * sum(map(newton_schulz_flops, shapes))
    assert found["update_seconds"] == pytest.approx(found["update_flops"] / 1e12)


def test_more_than_the_drives_have_does_not_fit(tmp_path: Path) -> None:
    drive = Drive("x", Figure(2e9, "x"), Figure(2e9, "x"), None, Size("10MB", "x"))
    shown = run(*SMALL, "--machine", written(tmp_path, drives=(drive,))).stdout
    assert "Fits: no." in shown
    assert "Its drives have 9.537 MiB: have larger ones, or more of them." in shown
    found = planned("--machine", written(tmp_path, drives=(drive,)))
    assert (found["fits"], found["fits_disk"], found["fits_device"]) == (False, False, True)
    assert planned("--machine", written(tmp_path))["fits"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "For mine. Nothing was measured there"),
        ({"about": "of tests"}, "For mine: of tests. Nothing"),
        (
            {"measured_on": "another", "measured_at": timedelta(days=3)},
            "another machine than this one, measured 3 days",
        ),
        (
            {"measured_on": "this", "measured_at": timedelta(hours=3)},
            "It is this machine, measured less than a day ago.",
        ),
        (
            {"measured_on": "this", "measured_at": timedelta(days=100)},
            "measured 100 days ago, which is stale: `offload",
        ),
    ],
)
def test_it_is_said_whose_figures_these_are(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    if "measured_at" in fields:
        fields = fields | {"measured_at": datetime.now(UTC) - fields["measured_at"]}
    if fields.get("measured_on") == "this":
        fields = fields | {"measured_on": remembered.identity()}
    shown = run(*SMALL, "--machine", written(tmp_path, **fields)).stdout
    assert said in shown.splitlines()[0]
    if fields == {}:
        assert "described, not measured" in shown


def test_machines_that_come_with_the_package_are_listed() -> None:
    shown = run("--machine", "list")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in machine_file.names())
    assert "Nothing of this was measured" in shown.stdout
    found = printed(run("--machine", "list", "--json"))["machines"]
    assert list(found) == machine_file.names()
    assert found["h100-512gb"]["device"]["memory"]["source"].startswith("NVIDIA")


def test_a_machine_that_is_none_is_refused() -> None:
    refused = run(*SMALL, "--machine", "rtx4090")
    assert refused.exit_code == 2
    assert "--machine rtx4090" in refused.stderr
    both = run(*SMALL, "--machine", "rtx4090-64gb", "--path", ".")
    assert both.exit_code == 2
    assert "give one of the two" in " ".join(both.stderr.split())


# This machine.


def test_several_drives_are_those_that_were_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "file_system_of", lambda path: f"/{path.name}")
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for path, speed in zip(paths[:2], (3e9, 2e9), strict=True):
        select.remember(path, select.Settings("threads", mixed_bytes_per_s=speed))
    given = [word for path in paths[:2] for word in ("--path", str(path))]
    assert planned(*given)["disk_gb_per_s"] == pytest.approx(5)
    assert planned("--path", paths[1])["disk_gb_per_s"] == pytest.approx(2)
    select.remember_together(["/two", "/one"], select.Together(4e9, 3.5e9, 4.5e9))
    found = planned(*given)
    assert (found["disk_gb_per_s"], found["disk_from"]) == (4, "measured")
    assert planned(*given[2:], *given[:2])["disk_gb_per_s"] == 4
    assert planned(*given, "--path", paths[2])["disk_from"] == "measured"  # of the two that are known
    assert planned("--path", paths[2])["disk_from"] == "assumed"


def test_stale_and_foreign_rates_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rate.of([1e9])
    rates.remember(Rates("cpu", 2, one, {"bf16": Rate.of([3e11])}, {}))
    file = remembered.cache_file()
    assert "offload probe" not in run(*SMALL).stdout.splitlines()[0]
    fresh = json.loads(file.read_text())
    old = json.loads(file.read_text())
    old["sections"]["rates"]["cpu"]["measured_at"] = time.time() - 100 * 24 * 3600
    file.write_text(json.dumps(old))
    assert run(*SMALL).stdout.startswith("What `offload probe` measured is 100 days old: it is not used.")
    file.write_text(json.dumps(fresh))
    with monkeypatch.context() as there:
        there.setattr(remembered, "_machine", lambda: "another")
        assert run(*SMALL).stdout.startswith("What `offload probe` measured is of another machine: it is not used.")
        assert not run(*SMALL, "--machine", "rtx4090-64gb").stdout.startswith("What")
    assert not run(*SMALL).stdout.startswith("What")
