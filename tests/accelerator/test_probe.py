"""`offload probe` on a machine whose device has memory of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli import probing
from offload.cli.main import app
from offload.devices.copies import accelerator, device_name
from offload.io import select
from offload.planner import rates
from offload.sizes import KIB, MIB
from tests import simulated_device

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]


def test_the_link_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROUNDS": 2,
        "LEAST_S": 1e-4,
        "COPIED_BYTES": MIB,
        "ELEMENTS": 64 * KIB,
        "MOST_WIDTH": 256,
    }.items():
        monkeypatch.setattr(probing, name, value)
    select.remember(tmp_path, select.Settings("threads"))
    done = CliRunner().invoke(app, ["probe", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found["link"][way]["median"] > 0 for way in ("up", "down", "both"))
    assert found["device"] == device_name(accelerator()) != "cpu"
    assert rates.recall(found["device"]) is not None
    assert rates.recall("cpu") is None
