"""`offload inspect`, `verify`, `export` and `remove` on a run that really trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.checkpoint.blocks import committed_slots
from offload.checkpoint.reader import Reader
from offload.cli.main import app
from offload.store.directories import SWAP_NAME


def call(*args: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=typed)


def trained(path: Path) -> tuple[dict[str, Tensor], OffloadZero]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = OffloadZero(model, path=path, commit_every=0)
    for _ in range(2):
        model(torch.randn(4, 40).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.commit()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path / "run"
    values, optimizer = trained(path)
    optimizer.close()
    return path, values


def test_inspect_shows_step_and_parameters(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, values = run
    found = json.loads(call("inspect", path, "--json").stdout)
    assert (found["step"], found["ranks"], found["paths"]) == (2, 1, 1)
    assert [(row["name"], row["shape"], row["steps"]) for row in found["parameters"]] == [
        (name, list(value.shape), 2) for name, value in values.items()
    ]
    assert found["bytes"] == 12 * sum(value.numel() for value in values.values())
    assert "step 2: 4 parameters" in call("inspect", path).stdout


def test_verify_finds_a_flipped_bit(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    whole = call("verify", path, "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.stdout)["damaged"] == []
    with Reader([path]) as reader:
        slot = committed_slots(reader.manifests[0])[-1]
    data = bytearray((path / SWAP_NAME).read_bytes())
    data[slot.offset + 4096] ^= 4
    (path / SWAP_NAME).write_bytes(data)
    broken = call("verify", path)
    assert broken.exit_code == 1
    assert f"chunk {slot.chunk}, {path / SWAP_NAME}, offset {slot.offset}" in broken.stdout


def test_both_exports_give_the_weights_of_the_model(tmp_path: Path) -> None:
    values, optimizer = trained(tmp_path / "run")
    optimizer.export(tmp_path / "live")
    optimizer.close()
    assert call("export", tmp_path / "run", tmp_path / "out").exit_code == 0
    for folder in ("live", "out"):
        found = load_file(str(tmp_path / folder / "model.safetensors"))
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())
    assert call("export", tmp_path / "run", tmp_path / "moments", "--kind", "exp_avg").exit_code == 0
    assert (tmp_path / "moments" / "exp_avg.safetensors").exists()


def test_remove_takes_only_its_own_and_asks_first(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    (path / "notes.txt").write_text("mine")
    (path / "manifest.json").write_text("mine")
    before = sorted(path.iterdir())
    assert call("remove", path, typed="n\n").exit_code == 2
    assert sorted(path.iterdir()) == before
    assert call("remove", path, typed="y\n").exit_code == 0
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "notes.txt"]


def test_remove_leaves_a_stranger_s_files_of_the_same_name(tmp_path: Path) -> None:
    for name in ("COMMIT", SWAP_NAME):
        (tmp_path / name).write_text("this is somebody else's, and longer than a magic number")
    assert json.loads(call("remove", tmp_path, "--yes", "--json").stdout)["files"] == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_live_run_is_neither_removed_nor_verified(tmp_path: Path) -> None:
    _, optimizer = trained(tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    for command in (("remove", "--yes"), ("verify",)):
        result = call(command[0], tmp_path / "run", *command[1:])
        assert result.exit_code == 2
        assert "PathInUseError" in result.stderr
    assert sorted((tmp_path / "run").iterdir()) == before
    optimizer.close()
    assert call("remove", tmp_path / "run", "--yes").exit_code == 0
    assert not (tmp_path / "run").exists()
    shutil.rmtree(tmp_path, ignore_errors=True)
