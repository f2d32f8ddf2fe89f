"""What is printed at a terminal of 80 columns: no line is longer, nothing is cut off, and no word is parted.

The oracle is the same command at a terminal that is wide enough for everything.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from torch import nn
from typer import rich_utils
from typer.testing import CliRunner

from offload import OffloadZero
from offload.cli.main import app
from tests.cli.test_main import OPTIONS
from tests.support.toy import take_step

TRAIN = ["train", "--preset", "1m", "--steps", "2", "--batch", "2", "--seq", "16", "--sample", "3", "--tier", "cpu"]
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WORD = re.compile(r"[A-Za-z][A-Za-z-]+")


def at_width(columns: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a command writes to the stdout of a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", True)  # typer has asked for that variable when it was imported
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 1, 2), result.output
    assert "…" not in COLOURS.sub("", result.stdout), result.stdout
    return COLOURS.sub("", result.stdout).splitlines()


def words_in(lines: list[str]) -> set[str]:
    """All words. A path, a number or a name may be folded, or differ: what has a slash or a digit, or is too long."""
    tokens = [token for token in " ".join(lines).split() if not re.search(r"[/\\0-9_]", token)]
    return {word for token in tokens for word in WORD.findall(token) if len(word) < 24}


def require_whole(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = at_width(80, words, monkeypatch), at_width(400, words, monkeypatch)
    assert max(map(cell_len, narrow)) <= 80
    assert words_in(wide) - words_in(narrow) == set()
    assert words_in(wide)


@pytest.mark.parametrize("name", ["", *OPTIONS, "bench"])
def test_help_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_whole([*name.split(), "--help"], monkeypatch)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, a snapshot of it, one with a long name, and a record that is none."""
    for name in ("run", "a-run-with-a-name-that-is-longer-than-one-column-of-any-table-at-this-width"):
        model = nn.ModuleDict({"first_module_with_a_rather_long_name": nn.Linear(4, 4)})
        with OffloadZero(model, path=tmp_path / name, commit_every=0) as optimizer:
            take_step(optimizer, next(iter(model.values()))(torch.randn(4, 4).bfloat16()).square().mean())
            optimizer.commit()
            optimizer.snapshot(keep=None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "COMMIT").write_bytes(b'{"schema":"offload commit"')
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "--layers", "8", "--width", "4096", "--gpu-memory", "24GiB", "--activation-tier", "cpu"],
        ["plan", "--layers", "8", "--width", "8192", "--ranks", "8", "--ram", "128GiB", "--tensor-parallel", "2"],
        ["plan", "--layers", "8", "--width", "4096", "--cpu-memory", "1MiB"],
        ["doctor"],
        ["bench", "io", ".", "--quick", "--size", "16MiB", "--rounds", "1"],
        TRAIN,
    ],
    ids=lambda words: " ".join(words[:2]) + str(len(words)),
)
def test_what_commands_print_fits(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    require_whole(words, monkeypatch)


@pytest.mark.parametrize("command", ["list .", "inspect run", "verify run"])
def test_what_is_said_of_runs_fits(command: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    require_whole(command.split(), monkeypatch)


def test_what_a_configuration_becomes_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "fp16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local/nvme/of/mine"}},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    lines = at_width(80, ["convert", str(tmp_path / "ds.json")], monkeypatch)
    assert max(map(cell_len, lines)) <= 80
    assert {"    weight_decay=0.1,", "    growth_interval=1000,"} <= {line.rstrip() for line in lines}


def test_a_pipe_gets_a_line_for_each_row(runs: Path) -> None:
    """However many columns a terminal has there."""
    lines = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "40"}).stdout.splitlines()
    assert all(line.count("│") in (0, 3) for line in lines)
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "" not in rows
    assert max(map(cell_len, lines)) > 40
