"""`offload inspect`, `verify`, `export` and `remove` on a run that really trained."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from offload import OffloadZero
from offload.checkpoint.manifest import committed_slots
from offload.checkpoint.reader import Reader
from offload.cli.main import app
from offload.errors import CorruptionError, PathError, ResumeError
from offload.io.files import LOCAL
from offload.sizes import PAGE_BYTES
from offload.storage.directories import older_swap_name
from tests.support.run_files import swap_in
from tests.support.toy import take_step


def call(*args: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=typed)


def trained(path: Path) -> tuple[dict[str, Tensor], OffloadZero]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = OffloadZero(model, path=path, commit_every=0)
    for _ in range(2):
        take_step(optimizer, model(torch.randn(4, 40).bfloat16()).square().mean())
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


def test_inspect_writes_long_names_in_full(tmp_path: Path) -> None:
    name = "a_module_with_a_name_that_is_longer_than_most_terminals_are_wide_and_goes_on_after_that"
    model = nn.ModuleDict({name: nn.Linear(4, 4)})
    with OffloadZero(model, path=tmp_path, commit_every=0) as optimizer:
        take_step(optimizer, model[name](torch.randn(4, 4).bfloat16()).square().mean())
        optimizer.commit()
    shown = call("inspect", tmp_path).stdout
    assert [f"{name}.{end}" in shown for end in ("weight", "bias")] == [True, True]


def test_verify_finds_a_flipped_bit(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    whole = call("verify", path, "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.stdout)["damaged"] == []
    with Reader([path]) as reader:
        slot = committed_slots(reader.manifests[0])[-1]
    data = bytearray(swap_in(path).read_bytes())
    data[slot.offset + 4096] ^= 4
    swap_in(path).write_bytes(data)
    broken = call("verify", path)
    assert broken.exit_code == 1
    assert f"chunk {slot.chunk}, {swap_in(path)}, offset {slot.offset}" in broken.stdout


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


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, nn.Module, list[torch.optim.Optimizer]]:
    """A run of two optimizers, one parameter of which was never stepped, and the same in plain torch."""

    def made() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
        momentum = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return model, [momentum, torch.optim.Adagrad(model[2].parameters(), initial_accumulator_value=0.5)]

    inputs = torch.randn(2, 4, 40)
    (reference, plain), (model, given) = made(), made()
    with OffloadZero(model, given, path=tmp_path / "run", commit_every=0, compute_dtype=torch.float32) as optimizer:
        for one, its in ((reference, plain), (model, [optimizer])):
            for x in inputs:
                one(x).square().mean().backward()
                one[0].bias.grad = one[2].bias.grad = None
                for part in its:
                    part.step()
                    part.zero_grad()
        optimizer.commit()
    return tmp_path / "run", reference, plain


def test_runs_of_other_optimizers_are_shown_verified_and_exported(
    mixed: tuple[Path, nn.Module, list[torch.optim.Optimizer]], tmp_path: Path
) -> None:
    path, model, plain = mixed
    (row,) = json.loads(call("list", tmp_path, "--json").stdout)["runs"]
    assert (row["optimizers"], row["step"], row["error"]) == (["SGD", "Adagrad"], 2, None)
    shown = json.loads(call("inspect", path, "--json").stdout)
    assert shown["optimizers"] == ["SGD", "Adagrad"]
    assert {one["name"]: (one["steps"], one["states"]) for one in shown["parameters"]} == {
        "0.weight": (2, ["momentum_buffer"]),
        "0.bias": (0, []),
        "2.weight": (2, ["sum"]),
        "2.bias": (0, ["sum"]),
    }
    assert shown["bytes"] == 8 * sum(param.numel() for param in model.parameters())
    assert "step 2: 4 parameters of SGD and Adagrad, " in call("inspect", path).stdout
    verified = json.loads(call("verify", path, "--json").stdout)
    assert (verified["damaged"], verified["slots"]) == ([], shown["chunks"])
    values = dict(model.named_parameters())
    for kind in ("master", "momentum_buffer", "sum"):
        assert call("export", path, tmp_path / kind, "--kind", kind).exit_code == 0
        stem = "model" if kind == "master" else kind
        found = load_file(str(tmp_path / kind / f"{stem}.safetensors"))
        states = {name: one.state[param] for name, param in values.items() for one in plain if param in one.state}
        expected = values if kind == "master" else {n: state[kind] for n, state in states.items() if kind in state}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    wrong = call("export", path, tmp_path / "out", "--kind", "exp_avg")
    assert "--kind exp_avg: choose one of master, momentum_buffer, sum" in wrong.stderr
    assert not (tmp_path / "out").exists()


def test_states_of_other_shapes_are_shown_verified_and_exported(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 3))
        return model, torch.optim.Adafactor(model.parameters(), lr=0.1)

    (reference, plain), (model, given) = made(), made()
    path = tmp_path / "run"
    options: dict[str, Any] = {"path": path, "commit_every": 0, "compute_dtype": torch.float32}
    with OffloadZero(model, given, **options) as optimizer:
        for one, its in ((reference, plain), (model, optimizer)):
            for x in torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(0)):
                one(x).square().mean().backward()
                its.step()
                its.zero_grad()
        for name, param in reference.named_parameters():
            shown = optimizer.state[model.get_parameter(name)]
            assert shown.keys() == plain.state[param].keys()
            for kind, value in plain.state[param].items():
                assert shown[kind].shape == value.shape
                assert torch.equal(shown[kind] + 1, value + 1)
        optimizer.commit()
    shown = json.loads(call("inspect", path, "--json").stdout)
    assert {one["name"]: one["states"] for one in shown["parameters"]} == {
        "0.weight": ["row_var", "col_var"],
        "0.bias": ["variance"],
        "2.weight": ["row_var", "col_var"],
        "2.bias": ["variance"],
    }
    # Room for the 70 and 40 numbers of 2,800 elements is one for each 32 and 64; for 3 and 70 of 210: 64 and 2.
    assert shown["bytes"] == 4 * (2800 + 88 + 44 + 210 + 4 + 105 + 2 * (70 + 3))
    assert json.loads(call("verify", path, "--json").stdout)["damaged"] == []
    for kind in ("row_var", "col_var", "variance"):
        assert call("export", path, tmp_path / kind, "--kind", kind).exit_code == 0
        found = load_file(str(tmp_path / kind / f"{kind}.safetensors"))
        states = {name: plain.state[param] for name, param in reference.named_parameters()}
        expected = {name: state[kind] for name, state in states.items() if kind in state}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 3))
    with pytest.raises(ResumeError, match=r"row_var, col_var was committed|Adafactor was committed"):
        OffloadZero(other, torch.optim.SGD(other.parameters(), momentum=0.9), resume=True, **options)


def test_a_damaged_state_of_another_optimizer_is_found(
    mixed: tuple[Path, nn.Module, list[torch.optim.Optimizer]], tmp_path: Path
) -> None:
    path, *_ = mixed
    with Reader([path]) as reader:
        manifest = reader.manifests[0]
        kinds = {number: manifest.flats[chunk.flat].kinds for number, chunk in enumerate(manifest.chunks)}
        slot = next(one for one in committed_slots(manifest) if "momentum_buffer" in kinds.get(one.chunk, ()))
    _, start, _ = list(slot.arrays.ranges())[kinds[slot.chunk].index("momentum_buffer")]
    data = bytearray(swap_in(path).read_bytes())
    data[slot.offset + start + 8] ^= 1
    swap_in(path).write_bytes(data)
    assert call("verify", path).exit_code == 1
    assert call("export", path, tmp_path / "out", "--kind", "momentum_buffer").exit_code != 0
    assert not (tmp_path / "out").exists()


def test_remove_takes_only_its_own_and_asks_first(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    (path / "notes.txt").write_text("mine")
    (path / "manifest.json").write_text("mine")
    before = sorted(path.iterdir())
    assert call("remove", path, typed="n\n").exit_code == 2
    assert sorted(path.iterdir()) == before
    assert call("remove", path, typed="y\n").exit_code == 0
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "notes.txt"]


@pytest.mark.parametrize("code", [None, errno.EBUSY, errno.EACCES], ids=["named .", "EBUSY", "EACCES"])
def test_a_directory_that_cannot_be_removed_stays_empty(
    code: int | None, run: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount point, and one that lies in a directory of another user."""
    path, _ = run

    def refuse(path: Path) -> None:
        raise OSError(code, "refused", str(path))

    monkeypatch.chdir(path)
    if code is not None:
        monkeypatch.setattr(LOCAL, "remove_directory", refuse)
    result = call("remove", "." if code is None else path, "--yes")
    assert result.exit_code == 0, result.output
    assert [*path.iterdir()] == []


STRANGE: dict[str, bytes] = {
    "COMMIT.new": b"this is somebody else's",
    f"manifest-{'0' * 32}-7-rank0.json": b"{}",
    f"manifest-{'0' * 32}-7-rank0.json.new": b"{}",
    f"extra-{'0' * 32}-7-rank0.safetensors": b"x",
    "offload-rank3.swap": bytes(3 * PAGE_BYTES),
    "offload-rank4.swap": b"this is somebody else's, and longer than a magic number",
    "offload-rank5.swap.new": bytes(3 * PAGE_BYTES),
}


def test_remove_leaves_a_stranger_s_files_of_the_same_name(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    for name, data in STRANGE.items():
        (path / name).write_bytes(data)
    found = call("remove", path, "--yes", "--json")
    assert found.exit_code == 0
    assert {Path(one["file"]).name for one in json.loads(found.stdout)["left"]} == STRANGE.keys()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == STRANGE
    assert "left: " in call("remove", path, "--yes").stdout


def test_commits_leave_a_stranger_s_files_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, data in STRANGE.items():
        (tmp_path / "run" / name).write_bytes(data)
    _, optimizer = trained(tmp_path / "run")
    optimizer.close()
    assert call("verify", tmp_path / "run").exit_code == 0
    assert {name: (tmp_path / "run" / name).read_bytes() for name in STRANGE} == STRANGE


def test_a_longer_file_of_zeros_is_not_written_over(tmp_path: Path) -> None:
    place = tmp_path / older_swap_name(0)
    place.write_bytes(bytes(3 * PAGE_BYTES))
    with pytest.raises(PathError, match="is no file of this library"):
        trained(tmp_path)
    assert place.read_bytes() == bytes(3 * PAGE_BYTES)


@pytest.mark.parametrize("damage", ["a byte at the start", "a byte at the end", "half of it", "newer"])
def test_remove_takes_a_damaged_record_along(run: tuple[Path, dict[str, Tensor]], damage: str) -> None:
    path, _ = run
    record = (path / "COMMIT").read_bytes()
    damaged = {
        "a byte at the start": b"[" + record[1:],
        "a byte at the end": record[:-2] + b"x\n",
        "half of it": record[: len(record) // 2],
        "newer": record.replace(b'"version":2', b'"version":9'),
    }[damage]
    (path / "COMMIT").write_bytes(damaged)
    assert call("remove", path, "--yes").exit_code == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["another's", "empty", "link", "directory"])
def test_a_record_that_stays_is_said_and_the_path_refused_with_a_way_out(
    run: tuple[Path, dict[str, Tensor]], kind: str
) -> None:
    path, _ = run
    record = path / "COMMIT"
    record.rename(path.with_name("elsewhere"))
    if kind == "link":
        record.symlink_to(path.with_name("elsewhere"))
    elif kind == "directory":
        record.mkdir()
    else:
        record.write_text("mine" if kind == "another's" else "")
    found = call("remove", path, "--yes", "--json")
    assert found.exit_code == 2
    assert str(record) in found.stderr
    assert "move it away" in found.stderr
    assert [one["file"] for one in json.loads(found.stdout)["left"]] == [str(record)]
    assert [*path.iterdir()] == [record]
    with pytest.raises(ResumeError, match="move it away"):
        trained(path)
    record.rename(path.with_name("away"))
    trained(path)[1].close()


@pytest.mark.parametrize("kind", ["missing", "link", "damaged"])
def test_resuming_without_the_swap_file_does_not_advise_to_remove_the_run(
    run: tuple[Path, dict[str, Tensor]], kind: str
) -> None:
    path, _ = run
    swap = swap_in(path)
    swap.rename(path.with_name("elsewhere"))
    if kind == "link":
        swap.symlink_to(path.with_name("elsewhere"))
    elif kind == "damaged":
        data = path.with_name("elsewhere").read_bytes()
        swap.write_bytes(b"x" + data[1:])
    before = sorted(path.iterdir())
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    with pytest.raises((ResumeError, PathError, CorruptionError)) as caught:
        OffloadZero(model, path=path, commit_every=0, resume=True)
    verified = call("verify", path)
    name = swap.name
    for says in (str(caught.value), verified.stderr + verified.stdout):
        assert "remove" not in says
        assert name in says
    assert verified.exit_code
    assert sorted(path.iterdir()) == before
    swap.unlink(missing_ok=True)
    path.with_name("elsewhere").rename(swap)
    OffloadZero(model, path=path, commit_every=0, resume=True).close()


def test_verify_finds_damaged_tensors_of_extra_and_padding(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = run
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    with OffloadZero(model, path=path, commit_every=0, resume=True) as optimizer:
        model(torch.randn(4, 40).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.commit({"seen": torch.ones(3)})
    (extra,) = path.glob("extra-*")
    for file, offset in ((extra, extra.stat().st_size - 1), (swap_in(path), PAGE_BYTES - 1)):
        whole = file.read_bytes()
        file.write_bytes(whole[:offset] + b"\xaa" + whole[offset + 1 :])
        found = call("verify", path)
        assert found.exit_code == 1
        assert str(file) in found.stdout
        assert "1 damaged" in found.stdout
        damaged = file.read_bytes()
        with pytest.raises(CorruptionError):
            OffloadZero(model, path=path, commit_every=0, resume=True)
        assert file.read_bytes() == damaged
        file.write_bytes(whole)
    assert call("verify", path).exit_code == 0


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
