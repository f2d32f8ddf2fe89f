"""Paths, names and texts of users are printed as they are: nothing in them is markup, a format or an encoding.

The oracle is the text itself.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from offload.cli import io_speed, train_run
from offload.cli.console import plain_console, say, show_table
from offload.cli.main import app
from offload.cli.progress import progress
from tests.support.processes import ROOT

ODD = ("[/x]", "[lr=1e-3]", "[bold]", "{x}", ":fire:")
"""A tag that is closed and was never opened, two that look like styles, a format, and an emoji."""
MACHINE = """
name = "[/x] of [lr=1e-3]"
about = "for :fire: [bold]"
ram = { value = "64GiB", source = "me" }
"""


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an odd name, which has a slash in its name if that has one."""
    path = tmp_path / f"a{request.param}b"
    path.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("text", ODD)
def test_sentences_tables_and_bars(text: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    console = plain_console()
    assert console.is_terminal is is_terminal
    table = Table(f"{text}heading", title=f"{text}title", caption=f"{text}caption")
    table.add_row(f"{text}cell")
    show_table(console, table)
    say(console, f"{text}sentence")
    with progress(console, f"{text}bar", 1) as tell:
        tell(1, f"{text}status")
    for name in ("heading", "title", "caption", "cell", "sentence", "bar", "status"):
        assert text + name in file.getvalue()


def test_a_title_is_not_cut_where_nobody_sees_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file, title = io.StringIO(), "/a/path/" * 40
    monkeypatch.setattr(sys, "stdout", file)
    show_table(plain_console(), Table("narrow", title=title, title_justify="left"))
    assert title in file.getvalue().splitlines()[0]


def test_what_doctor_says_of_a_directory(odd: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", "--path", str(odd)])
    assert found.exit_code == 0, found.output
    assert str(odd) in found.stdout


def test_what_is_measured_in_a_directory(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field_of = io_speed.field_of
    monkeypatch.setattr(io_speed, "field_of", lambda *given, **options: field_of(*given, **options)[:1])
    monkeypatch.setattr(io_speed, "SWEEP_ROUNDS", 1)
    found = CliRunner().invoke(app, ["bench", "io", str(odd), "--quick", "--size", "16MiB", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    assert f"{odd}:" in found.stdout
    assert f"{odd}: 1/2" in found.stderr


def test_where_the_picture_of_a_run_is(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "loss_curve", lambda file, *rest: None)
    options = [
        "--preset",
        "1m",
        "--steps",
        "1",
        "--batch",
        "1",
        "--seq",
        "16",
        "--sample",
        "1",
        "--validation",
        "1",
        "--tier",
        "cpu",
    ]
    found = CliRunner().invoke(app, ["train", *options, "--out", str(odd)])
    assert found.exit_code == 0, found.output
    assert f"Loss curve: {odd}/loss.png" in found.stdout


def test_options_that_a_configuration_has(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({f"{text}a": f"{text}b" for text in ODD}))
    found = CliRunner().invoke(app, ["convert", str(tmp_path / "ds.json")])
    assert found.exit_code == 0, found.output
    assert all(f"{text}{name}" in found.stdout for text in ODD for name in "ab")


def test_what_a_machine_is_called(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(MACHINE)
    found = CliRunner().invoke(app, ["plan", "--preset", "1m", "--machine", str(tmp_path / "machine.toml")])
    assert found.exit_code == 0, found.output
    assert "For [/x] of [lr=1e-3]: for :fire: [bold]." in found.stdout


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"\u2192"), ("utf-8", "\u2192")])
def test_what_the_terminal_has_no_letters_for_is_escaped(encoding: str, shown: str) -> None:
    """A name of a file may have bytes that are no UTF-8."""
    code = """
import sys
from offload.cli import main
main.app = lambda: print("\\u2192", "u\\udcff")
main.run()
"""
    options = {"PYTHONIOENCODING": f"{encoding}:strict", "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=options, capture_output=True, check=True)
    assert done.stdout.decode() == shown + " u\\udcff\n"
