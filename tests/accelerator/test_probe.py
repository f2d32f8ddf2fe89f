"""`offload probe` on a machine whose device has memory of its own."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from offload import OffloadZero, Tuning
from offload.cli import probing
from offload.cli.main import app
from offload.devices.copies import accelerator, device_name
from offload.io import select
from offload.planner import prediction, rates
from offload.planner.rates import LinkRates, Rate, Rates
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


def test_a_link_that_is_slower_than_measured_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of 16k parameters whose copies take about 0.1 s each way, and a TB a second was measured."""
    fast, bytes_per_s, width = Rate.of([1e12]), 3e5, 128
    name, steps = device_name(accelerator()), {"adamw, fp32": fast}
    rates.remember(Rates(name, 1, fast, {"bf16": fast}, steps, LinkRates(fast, fast, fast)))
    monkeypatch.setattr(prediction, "STEPS", 7)
    model, began = nn.Linear(width, width, bias=False, device="simulated"), perf_counter()
    with simulated_device.slow_link(bytes_per_s), OffloadZero(model, tier="cpu", tuning=Tuning(threads=1)) as optimizer:
        for _ in range(prediction.STEPS):
            model(torch.ones(2, width, device="simulated")).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.stats()
    assert "What differs most: the link to " in capsys.readouterr().err
    for way in ("host_to_device", "device_to_host"):
        least = found[f"{way}_bytes"] / bytes_per_s
        assert 0.9 * least <= found[f"{way}_s"] <= perf_counter() - began
