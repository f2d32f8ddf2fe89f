"""`offload train --commit-every N --resume`, and what SIGTERM does to it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.demo import loop


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


COMMITTING = [
    "--batch",
    "1",
    "--seq",
    "16",
    "--path",
    "run",
    "--commit-every",
    "2",
    "--out",
    "out",
    "--sample",
    "3",
    "--validation",
    "1",
    "--json",
]


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_one_that_went_through() -> None:
    base = ["train", "--preset", "1m", "--steps", "6"]
    whole = json.loads(CliRunner().invoke(app, [*base, *COMMITTING[:4], *COMMITTING[10:]]).stdout)
    process = start("--preset", "1m", "--steps", "6", *COMMITTING, stop_after=3)
    assert process == 143
    rest = CliRunner().invoke(app, [*base, *COMMITTING, "--resume"])
    assert rest.exit_code == 0, rest.stderr
    found = json.loads(rest.stdout)
    assert 3 <= found["steps_before"] < 6
    assert found["losses"] == whole["losses"][found["steps_before"] :]
    assert found["committed"]
    refused = CliRunner().invoke(app, [*base, *COMMITTING])
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr


def test_a_resumed_run_keeps_its_learning_rate_and_refuses_another_one() -> None:
    """The schedule of it is committed, so another one would do nothing."""
    base = ["train", "--preset", "1m", "--tier", "nvme", "--lr", "0.002"]
    assert CliRunner().invoke(app, [*base, "--steps", "1", *COMMITTING]).exit_code == 0
    other = CliRunner().invoke(app, [*base, "--steps", "3", *COMMITTING, "--resume", "--lr", "0.004"])
    assert other.exit_code == 2
    assert "begun with --lr 0.002" in other.stderr
    same = CliRunner().invoke(app, [*base, "--steps", "2", *COMMITTING, "--resume"])
    left_out = CliRunner().invoke(app, [*base[:-2], "--steps", "3", *COMMITTING, "--resume"])
    assert [json.loads(one.stdout)["steps_before"] for one in (same, left_out)] == [1, 2]


@pytest.mark.parametrize(
    ("at", "words"),
    [(2, "nothing was committed yet: that comes every 2 steps"), (4, "go on with --resume, from step 2")],
)
def test_an_interrupted_run_says_how_to_go_on(at: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take, steps = loop._accumulate, []

    def interrupted(*args: Any) -> float:
        steps.append(1)
        if len(steps) == at:
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(loop, "_accumulate", interrupted)
    result = CliRunner().invoke(app, ["train", "--preset", "1m", "--steps", "6", *COMMITTING])
    assert result.exit_code == 130
    assert "offload: every 2 steps and at the end the run is committed to run" in result.stderr
    assert words in result.stderr.splitlines()


def start(*args: str, stop_after: int) -> int:
    """Runs `offload train`, and sends it SIGTERM after that many steps; its exit status."""
    code = (
        "import os, signal, torch; torch.set_num_threads(1)\n"
        "from offload.demo import loop\n"
        "take = loop._accumulate\n"
        "steps = []\n"
        "def stopping(*args):\n"
        "    steps.append(1)\n"
        f"    if len(steps) == {stop_after}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return take(*args)\n"
        "loop._accumulate = stopping\n"
        "from offload.cli.main import app\n"
        "app()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(offload.__file__).parents[1])}
    command = [sys.executable, "-c", code, "train", *args]
    return subprocess.run(command, timeout=120, check=False, env=environment).returncode
