"""`offload train` on a device with memory of its own. The oracle: the same command with everything on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from tests import simulated_device
from tests.support.command import printed

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

TINY = "train --preset 1m --steps 2 --batch 1 --seq 16 --validation 1 --sample 1 --json --data text".split()  # noqa: SIM905


def losses(*options: str) -> Any:
    found = printed(CliRunner().invoke(app, [*TINY, *options]))
    assert found["device"] == simulated_device.NAME
    return found["losses"]


def test_streamed_parameters_train_in_the_least_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the command gives by itself, and copies to the device need a part of it."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("words of a text " * 400)
    assert losses("--param-tier", "nvme", "--grad-tier", "nvme") == losses("--tier", "device")
