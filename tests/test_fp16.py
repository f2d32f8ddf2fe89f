"""What an fp16 run takes, commits and exports; training itself is in parity/ and faults/test_loss_scale.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from offload import OffloadZero, ResumeError, Tuning
from offload.cli.main import app
from offload.planner import least_cpu_memory
from offload.planner.explain import plan_of
from tests.support.toy import Net, batch

OPTIONS: dict[str, Any] = {"compute_dtype": torch.float16, "tuning": Tuning(chunk="4KiB", threads=1)}


def train(model: nn.Module, optimizer: OffloadZero, steps: int = 3) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(steps):
        scaler.scale(model(batch(seed)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("param_tier", ["device", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp16_takes_the_bytes_that_bf16_takes(param_tier: str, accumulation: int, tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        options = OPTIONS | {"compute_dtype": dtype, "accumulation": accumulation, "param_tier": param_tier}
        memory = least_cpu_memory(Net(), **options)
        options |= {"path": tmp_path / str(dtype), "cpu_memory": memory}
        planned = plan_of(Net(), direct=True, **options).place()
        with OffloadZero(Net(), **options) as optimizer:
            assert optimizer.stats()["disk_bytes"] == planned.disk_bytes
            found.append((memory, planned.device_bytes, planned.read_bytes, planned.written_bytes))
    assert found[0] == found[1]


@pytest.mark.parametrize("param_tier", ["device", "nvme"])
def test_a_commit_says_fp16_and_is_exported_as_that(param_tier: str, tmp_path: Path) -> None:
    run, model = tmp_path / "run", Net()
    with OffloadZero(model, path=run, param_tier=param_tier, **OPTIONS) as optimizer:
        train(model, optimizer)
        optimizer.commit()
        optimizer.export(tmp_path / "live")
        masters = {name: optimizer.state_of(param)["master"] for name, param in model.named_parameters()}
    live = load_file(tmp_path / "live" / "model.safetensors")
    for options in ([], ["--fp32"]):
        out = tmp_path / f"out{options}"
        assert CliRunner().invoke(app, ["export", *options, str(run), str(out)]).exit_code == 0
        exported = load_file(out / "model.safetensors")
        dtype = torch.float32 if options else torch.float16
        for name, master in masters.items():
            assert exported[name].dtype is dtype
            assert torch.equal(exported[name], master.to(dtype)), name
            assert torch.equal(live[name], master.half()), name
    assert json.loads(CliRunner().invoke(app, ["inspect", "--json", str(run)]).stdout)["compute_dtype"] == "float16"
    with pytest.raises(ResumeError, match="compute_dtype is bfloat16, and float16 was committed"):
        OffloadZero(Net(), path=run, resume=True, **OPTIONS | {"compute_dtype": torch.bfloat16})


def test_a_model_on_the_meta_device_trains_in_fp16(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    with OffloadZero(model, path=tmp_path / "run", param_tier="nvme", **OPTIONS) as optimizer:
        train(model, optimizer)
        assert optimizer.stats()["step"] == 3
        state = model.state_dict()
        assert {tensor.dtype for tensor in state.values()} == {torch.float16}
        for name, param in model.named_parameters():
            assert torch.equal(optimizer.state_of(param)["master"].half(), state[name])


def test_values_written_from_outside_become_masters_only_where_they_are_new(tmp_path: Path) -> None:
    model = Net()
    with OffloadZero(model, path=tmp_path / "run", **OPTIONS) as optimizer:
        train(model, optimizer)
        before = optimizer.state_of(model.head.weight)["master"]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["head.weight"][0, 0] += 1
        model.load_state_dict(state)
        after = optimizer.state_of(model.head.weight)["master"]
        assert after[0, 0] == state["head.weight"][0, 0].float() != before[0, 0]
        after[0, 0] = before[0, 0]
        assert torch.equal(after, before)
        assert not torch.equal(before, before.half().float())
