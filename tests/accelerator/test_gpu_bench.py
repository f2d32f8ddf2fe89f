"""`make gpu` at a tiny size on the simulated accelerator, so that it works on the day there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import accelerator

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not accelerator.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]
ROOT = Path(__file__).parents[2]
CASES = {
    "tests-sanitizer",
    "link",
    "train-32-states-on-cpu",
    "train-32-parameters-from-nvme",
    "largest-0.1-2",
    "timeline",
}


def call(out: Path, minutes: str) -> str:
    command = [sys.executable, "bench/gpu.py", str(out), "--tiny", "--minutes", minutes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_all_cases_run_and_what_has_run_is_kept(tmp_path: Path) -> None:
    assert f"{len(CASES)} cases are left" in call(tmp_path, "0")
    assert not CASES & {file.stem for file in tmp_path.glob("*.json")}
    assert "all cases have run" in call(tmp_path, "12")
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in CASES}
    assert all(found["exit_code"] == 0 and "failed" not in found for found in results.values()), results
    trained = results["train-32-parameters-from-nvme"]["contestants"]
    assert trained.keys() == {"torch", "parameters from nvme"}
    assert all(min(found["tokens_per_s"]) > 0 and found["peak_device_bytes"] > 0 for found in trained.values())
    assert len(results["link"]["gb_per_s"]) == 6
    page = (tmp_path / "README.md").read_text()
    assert "training.png" in page
    assert "timeline.png" in page
    assert {"training.png", "timeline.png", "trace.json", "results.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]  # swap files are gone

    (tmp_path / "link.json").unlink()
    assert "link ..." in (said := call(tmp_path, "2"))
    assert "timeline ..." not in said
