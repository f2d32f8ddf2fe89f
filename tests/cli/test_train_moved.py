"""`offload train` with a relative --path, and with a directory that is moved, while it runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offload.cli.main import app
from offload.demo import loop

TEXT = "To be, or not to be, that is the question. " * 40
OPTIONS = "train --preset 1m --batch 1 --seq 16 --path run --commit-every 1 --sample 1 --validation 1 --json".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setattr("offload.cli.train_run.loss_curve", lambda *args: None)
    return tmp_path


def train(*options: object) -> Result:
    Path("text").write_text(TEXT)
    return CliRunner().invoke(app, [*OPTIONS, "--data", "text", *map(str, options)])


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    take, calls = loop._accumulate, []

    def acting(*args: Any) -> float:
        calls.append(1)
        if len(calls) == step:
            act()
        return take(*args)

    monkeypatch.setattr(loop, "_accumulate", acting)


def test_a_run_stays_where_it_began_when_the_working_directory_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--steps", 1, "--out", folder / "out").exit_code == 0
    shutil.copytree(folder / "one", folder / "other")
    before = contents(folder / "other" / "run")
    before_step(monkeypatch, 1, lambda: os.chdir(folder / "other"))
    done = train("--steps", 2, "--resume", "--out", folder / "out")
    assert done.exit_code == 0, done.stderr
    assert contents(folder / "other" / "run") == before
    for place, step in (("one", 2), ("other", 1)):
        found = CliRunner().invoke(app, ["verify", str(folder / place / "run"), "--json"])
        assert found.exit_code == 0, found.stderr
        assert json.loads(found.stdout)["step"] == step


def test_a_run_whose_directory_is_moved_says_so_and_touches_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--steps", 1, "--out", folder / "out").exit_code == 0
    other = shutil.copytree("run", folder / "other")
    before = contents(other)

    def move() -> None:
        os.rename("run", folder / "moved")
        os.rename(other, "run")

    before_step(monkeypatch, 1, move)
    done = train("--steps", 3, "--resume", "--out", folder / "out")
    assert done.exit_code == 2
    assert "PathError" in done.stderr
    assert "move it back" in done.stderr
    assert contents(Path("run")) == before
    found = CliRunner().invoke(app, ["verify", str(folder / "moved"), "--json"])
    assert (found.exit_code, json.loads(found.stdout)["step"]) == (0, 1)
