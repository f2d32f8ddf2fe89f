"""`offload plan --sweep`: more memory of the device never moves more, and the picture is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from tests.support.command import printed

GIVEN = (
    *("plan", "--preset", "5m", "--chunk", "256KiB", "--batch", "1", "--seq", "64", "--gpu", "--ram", "8GiB"),
    *("--cpu-memory", "24MiB", "--activation-tier", "cpu", "--sweep", "device_memory"),
)


def test_more_memory_moves_less() -> None:
    points = printed(CliRunner().invoke(app, [*GIVEN, "--json"]))["points"]
    assert len(points) > 3
    assert all(one["device_bytes"] <= one["device_memory"] for one in points)
    for what in ("link_bytes", "disk_bytes", "seconds"):
        moved = [one[what] for one in points]
        assert moved == sorted(moved, reverse=True), what
    assert points[0]["disk_bytes"] > 0 < points[0]["link_bytes"]
    last = points[-1]
    assert (last["device_share"], last["link_bytes"], last["disk_bytes"]) == (1, 0, 0)


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(GIVEN))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "device_memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ("--layers", "1", "--width", "1", "--batch", "1", "--seq", "1", "--gpu", "--ram", "8GiB")
    file = tmp_path / "swept.png"
    sweep = ("--sweep", "device_memory", "--picture", str(file), "--json")
    assert printed(CliRunner().invoke(app, ["plan", *given, *sweep]))["points"]
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sweep", "cpu_memory"], "is not known"),
        (["--sweep", "device_memory", "--device-memory", "1GiB"], "give one of the two"),
    ],
)
def test_what_cannot_be_swept_is_said(given: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--preset", "1m", *given])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
