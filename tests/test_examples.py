"""Every script in docs/examples runs as it stands; those without a framework with warnings as errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
FRAMEWORKS = {"finetune": "transformers"}
"""What an example needs beside, by its name."""
LAUNCHED = {"tensor_parallel"}
"""Only under torchrun."""
PLAIN = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in {*FRAMEWORKS, *LAUNCHED}]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def output_of(script: Path, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    return done.stdout


@pytest.mark.parametrize("script", PLAIN, ids=lambda path: path.stem)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    done = run_script(script.read_text(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


def test_example_of_ranks_runs_and_resumes_under_torchrun() -> None:
    begun, resumed = output_of(EXAMPLES / "torchrun.py", *TORCHRUN, "2").split("resumed\n")
    assert "step  4" in begun
    assert "step  1" not in resumed
    assert "step  8" in resumed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_example_of_tensor_parallelism_runs_under_torchrun(ranks: int) -> None:
    assert "step 8" in output_of(EXAMPLES / "tensor_parallel.py", *TORCHRUN, str(ranks))


@pytest.mark.peers
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_example_with_a_framework_runs_and_resumes(name: str) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    resumed = output_of(EXAMPLES / f"{name}.py").split("resumed\n")[1]
    assert "step  8" in resumed or "step 16" in resumed
