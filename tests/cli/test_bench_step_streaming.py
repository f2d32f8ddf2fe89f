"""`offload bench step --param-tier`: what whole iterations move, what they are compared with, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.cli import bench_step_streaming
from offload.cli.bench_step_streaming import Block, Job, Report, Round, job_of
from offload.cli.bench_step_streaming import Result as Case
from offload.cli.bench_step_streaming_report import as_json, markdown, shortfalls, table
from offload.cli.main import app
from offload.sizes import MIB
from tests.support.processes import arena_bytes, open_files, own_threads


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def bench(drive: Path, *options: str) -> Result:
    words = ["bench", "step", "--n", "1.6e6", "--rounds", "1", "--path", str(drive), "--out", str(drive.parent / "out")]
    return CliRunner().invoke(app, [*words, "--param-tier", "nvme", *options])


@pytest.mark.parametrize(("grad_tier", "least", "most"), [("cpu", 20, 30), ("nvme", 24, 34)])
def test_iterations_move_states_parameters_and_gradients_beside_a_resident_model(
    drive: Path, monkeypatch: pytest.MonkeyPatch, grad_tier: str, least: float, most: float
) -> None:
    made: list[tuple[Any, Any]] = []
    constructed = OffloadZero.__init__

    def noted(self: OffloadZero, *args: Any, **options: Any) -> None:
        made.append((options["tier"], options["param_tier"]))
        constructed(self, *args, **options)

    monkeypatch.setattr(OffloadZero, "__init__", noted)
    before, memory = open_files(), arena_bytes()
    done = bench(drive, "--json", "--tokens", "16,48", "--grad-tier", grad_tier)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert made == [("nvme", "nvme"), ("cpu", "device")]
    assert (found["param_tier"], found["grad_tier"]) == ("nvme", grad_tier)
    assert [run["tokens"] for run in found["runs"]] == [16, 48]
    for run in found["runs"]:
        # Of so few chunks some stay in RAM.
        assert least < run["bytes_per_param"] < 1.02 * most
        assert run["peak_cpu_bytes"] <= found["cpu_memory"]
        assert min(run["iteration_s"], run["resident_s"], run["disk_s"], run["x_cpu"]) > 0
        assert run["forward_share"] > 0.5
        parts = run["forward_s"] + run["backward_s"] + run["step_s"]
        assert 0.9 * run["iteration_s"] < parts <= run["iteration_s"]
    assert list(drive.iterdir()) == []
    assert open_files() == before
    assert not own_threads()
    assert arena_bytes() <= memory


def case(*rounds: tuple[float, float, float], moved: float = 30.0) -> Case:
    job = Job(2, 256, "nvme", "cpu")
    parts = {"forward": 0.5, "backward": 0.25, "step": 0.125}

    def block(seconds: float) -> Block:
        return Block(seconds, 1.5 * seconds, moved * job.n, 0.8 * moved * job.n, seconds / 4, parts)

    found = [Round(block(streamed), block(resident), disk) for streamed, resident, disk in rounds]
    return Case(job, 16, found, MIB)


def test_figures_are_medians_of_the_rounds_and_the_limit_is_the_larger() -> None:
    good = case((2.0, 2.0, 1.0), (9.0, 3.0, 1.0), (5.0, 4.0, 5.0))
    assert (good.streamed_s, good.resident_s, good.disk_s, good.x_limit) == (5.0, 3.0, 1.0, 1.0)
    assert (good.wait_share, good.bytes_per_param, good.part_s("forward")) == (0.25, 30.0, 0.5)
    slow = case((3.0, 1.0, 2.0), moved=40.0)
    report = Report([good, slow], "a machine")
    assert list(shortfalls(report)) == [
        "off target: an iteration of 16 tokens moves 40.00 bytes, wanted 30",
        "off target: an iteration of 16 tokens takes 1.500 of its limit, wanted 1.15",
    ]
    assert [run["x_limit"] for run in as_json(report)["runs"]] == [1.0, 1.5]
    # 0.8 of the disk's time against the resident's 0.5 in forward, the rest against the rest.
    assert slow.rounds[0].phases_s == pytest.approx(1.6 + 0.5)
    assert [run["x_phases"] for run in as_json(report)["runs"]] == pytest.approx([2 / 2.3, 3 / 2.1])
    assert good.forward_share == pytest.approx(0.8)
    assert (good.x_cpu, slow.x_cpu) == (1.25, 3.0)
    assert table(report).row_count == 2
    row = f"| 16 | 5.00 s | 2.00-9.00 | 3.00 s | 1.00 s | 1.000 | {good.x_phases:.3f} | 1.25 |"
    row += " 30.00 of 30 | 80% | 1 MiB | 0.50 s | 0.25 s | 0.12 s | 25% |"
    assert row in markdown(report, "python bench/step.py --param-tier nvme")


def test_models_are_as_wide_as_leaves_enough_layers() -> None:
    for n, width in ((3e8, 1024), (3e7, 512), (1.6e6, 256)):
        job = job_of(int(n), "nvme", "nvme")
        assert job.width == width
        assert job.n == pytest.approx(n, rel=0.15)
        assert job.allowed_bytes == 34


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "ConfigError: --tokens='0'"),
        (["--tokens", "300"], "ConfigError: --tokens='300'"),
        (["--grad-tier", "tape"], "ConfigError: grad_tier='tape'"),
        (["--path", "missing"], "PathError: [Errno 20] cannot measure here"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    drive: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(bench_step_streaming, "measure", None)
    result = bench(drive, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert [path.name for path in drive.parent.iterdir()] == ["drive"]
