"""Quantised bases that are kept: made once, read by any number of runs, changed by none.

The oracle is plain torch over the base quantised as a whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from offload import ConfigError, CorruptionError, OffloadZero, ResumeError, Tuning
from offload.checkpoint.remove import find, remove
from offload.cli.main import app
from offload.integrations.quantised import Quantised
from offload.storage.kept_base import is_base_name
from tests.model.test_frozen import options
from tests.model.test_quantised import held, same_steps
from tests.support.quantised import Adapted, Codes, adapt, quantise, quantised, weights_of
from tests.support.toy import Net, batch, squares, take_step


class Counted:
    """A quantiser that counts the modules with values that it gets."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: nn.Module) -> None:
        self.count += not next(model.parameters()).is_meta
        quantise(model)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(Net(4).state_dict(), path)
    return path


def run(
    weights: Path,
    at: Path,
    quantiser: Callable[[nn.Module], object] = quantise,
    trains_norms: bool = False,
    **more: Any,
) -> tuple[Any, Net]:
    """A held model whose base is kept in `at / base`, and the model."""
    with torch.device("meta"):
        model = Net(4)
    given = {"settings": "codes of 4 bits", "base": at / "base"}
    source = Quantised(weights, quantiser, model, **{key: more.pop(key, given[key]) for key in given})
    adapt(model)
    for block in model.blocks:
        block.norm.requires_grad_(trains_norms)  # type: ignore[operator, union-attr]
    return held(model, init=source, device="cpu", **options("cpu", "nvme", at) | more), model


def bases(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if is_base_name(name))


def test_a_second_run_reads_the_base_that_the_first_one_made(weights: Path, tmp_path: Path) -> None:
    quantiser = Counted()
    for name, made in (("one", 8), ("two", 8)):
        optimizer, model = run(weights, tmp_path, quantiser, path=tmp_path / name)
        with optimizer:
            assert quantiser.count == made
            same_steps(optimizer, model, quantised(), range(3))
            assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes
        (base,) = bases(tmp_path / "base")
        assert (tmp_path / "base" / base).stat().st_nlink == 1
        for one, expected in zip(weights_of(model), weights_of(quantised()), strict=True):
            assert torch.equal(one.codes, expected.codes)
            assert torch.equal(one.scales, expected.scales)
    swap_files = [*tmp_path.glob("*/swap-*")]
    assert not swap_files or max(one.stat().st_size for one in swap_files) < (tmp_path / "base" / base).stat().st_size


@pytest.mark.parametrize("change", ["values", "settings"])
def test_another_base_is_made_where_anything_differs(change: str, weights: Path, tmp_path: Path) -> None:
    quantiser = Counted()
    more: dict[str, Any] = {}
    run(weights, tmp_path, quantiser, path=tmp_path / "one")[0].close()
    if change == "values":
        save_file({name: 2 * value for name, value in Net(4).state_dict().items()}, weights)
    else:
        more = {"settings": "codes of 3 bits"}
    run(weights, tmp_path, quantiser, path=tmp_path / "two", **more)[0].close()
    assert quantiser.count == 16
    assert len(bases(tmp_path / "base")) == 2


def test_weights_of_a_kept_base_are_handed_over_as_they_are_in_the_state_dict(weights: Path, tmp_path: Path) -> None:
    optimizer, model = run(weights, tmp_path, path=tmp_path / "run")
    with optimizer:
        take_step(optimizer, squares(model, batch(0)))
        expected, found = model.state_dict(), dict(optimizer.weights())
        assert found.keys() == expected.keys()
        for own, other in zip(weights_of(quantised()), codes_in(found), strict=True):
            assert torch.equal(own.codes, other.codes)
            assert torch.equal(own.scales, other.scales)
        for name, value in expected.items():
            assert isinstance(value, Codes) or torch.equal(found[name], value), name
        # A base never changes.
        changed = dict(optimizer.weights(since=0))
        assert changed.keys() == {name for name, one in model.named_parameters() if one.requires_grad}
        assert dict(optimizer.weights(since=1)) == {}


def codes_in(found: dict[str, Tensor]) -> list[Any]:
    return [value for value in found.values() if isinstance(value, Codes)]


LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"tuning": Tuning(chunk=16384)},
    "units": {"tuning": Tuning(chunk=4096, units=(Adapted, nn.Linear))},
    "no commits": {"commit_every": 0},
    "frozen": {"trains_norms": True},
    "dtype": {"compute_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("change", LAYOUTS)
def test_one_base_serves_every_layout(change: str, weights: Path, tmp_path: Path) -> None:
    run(weights, tmp_path, path=tmp_path / "one")[0].close()
    quantiser, plain, more = Counted(), quantised(), dict(LAYOUTS[change])
    if trains_norms := more.pop("trains_norms", False):
        for block in plain.blocks:
            block.norm.requires_grad_(True)  # type: ignore[operator, union-attr]
    optimizer, model = run(weights, tmp_path, quantiser, trains_norms, path=tmp_path / "two", **more)
    with optimizer:
        assert quantiser.count == 0
        assert len(bases(tmp_path / "base")) == 1
        if change == "dtype":
            with optimizer.gathered(model):
                for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                    if type(other) is Codes:
                        assert torch.equal(own.codes, other.codes)  # type: ignore[attr-defined]
                        assert torch.equal(own.scales, other.scales)  # type: ignore[attr-defined]
                    else:
                        assert torch.equal(own, other.to(torch.bfloat16))
        else:
            same_steps(optimizer, model, plain, range(3))


def test_two_runs_at_once_read_one_base(weights: Path, tmp_path: Path) -> None:
    (one, first), (two, second) = (run(weights, tmp_path, path=tmp_path / name) for name in ("one", "two"))
    with one, two:
        assert len(bases(tmp_path / "base")) == 1
        for step in range(2):
            same_steps(one, first, quantised(), range(step, step + 1))
            same_steps(two, second, quantised(), range(step, step + 1))
        assert find([tmp_path / "base"]).own == ()
        ((base, why),) = find([tmp_path / "base"]).strange
        assert why == "is a kept base, and a live run uses it"
    assert find([tmp_path / "base"]).own == (base,)
    remove(find([tmp_path / "base"]).own)
    assert not (tmp_path / "base").exists()


MAKER = """
import sys
from pathlib import Path
from tests.checkpoint.test_kept_base import run
from tests.model.test_quantised import same_steps
from tests.support.quantised import quantised

optimizer, model = run(Path(sys.argv[1]), Path(sys.argv[2]), path=Path(sys.argv[2]) / sys.argv[3])
with optimizer:
    same_steps(optimizer, model, quantised(), range(2))
"""


@pytest.mark.slow
def test_processes_that_make_one_base_at_once_leave_one(weights: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", MAKER, str(weights), str(tmp_path)]
    made = [subprocess.Popen([*arguments, name], stderr=subprocess.PIPE, text=True) for name in ("one", "two", "three")]
    for process in made:
        errors = process.communicate(timeout=170)[1]
        assert process.returncode == 0, errors
    assert len(os.listdir(tmp_path / "base")) == 1


def commit(optimizer: OffloadZero, model: nn.Module) -> None:
    squares(model, batch(0)).backward()
    optimizer.step()
    optimizer.commit()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_goes_on_with_its_base_or_with_one_made_again(is_there: bool, weights: Path, tmp_path: Path) -> None:
    plain, quantiser = quantised(), Counted()
    optimizer, model = run(weights, tmp_path, path=tmp_path / "run", commit_every=0)
    with optimizer:
        commit(optimizer, model)
        values = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    (base,) = bases(tmp_path / "base")
    if not is_there:
        (tmp_path / "base" / base).unlink()
    optimizer, model = run(weights, tmp_path, quantiser, path=tmp_path / "run", commit_every=0, resume=True)
    with optimizer:
        assert quantiser.count == (0 if is_there else 8)
        for name, param in model.named_parameters():
            assert name not in values or torch.equal(param, values[name])
        same_steps(optimizer, model, plain, range(1, 3))
        optimizer.commit()
    assert bases(tmp_path / "base") == [base]


def test_a_resume_over_another_base_is_refused(weights: Path, tmp_path: Path) -> None:
    optimizer, model = run(weights, tmp_path, path=tmp_path / "run", commit_every=0)
    with optimizer:
        commit(optimizer, model)
    save_file({name: 2 * value for name, value in Net(4).state_dict().items()}, weights)
    for _ in range(2):  # the other base is made, and read
        with pytest.raises(ResumeError, match="is frozen, and has other values than in the run that was committed"):
            run(weights, tmp_path, path=tmp_path / "run", commit_every=0, resume=True)


def test_a_commit_names_its_base_and_verify_reads_it(weights: Path, tmp_path: Path) -> None:
    optimizer, model = run(weights, tmp_path, path=tmp_path / "run", commit_every=0)
    with optimizer:
        commit(optimizer, model)
    (base,) = bases(tmp_path / "base")
    (manifest,) = (tmp_path / "run").glob("manifest-*")
    said = json.loads(manifest.read_bytes().split(b"\0")[0])
    assert said["version"] == 6
    assert said["base"] == [str(tmp_path / "base"), base]
    sound = CliRunner().invoke(app, ["verify", str(tmp_path / "run"), "--json"])
    assert sound.exit_code == 0, sound.output
    damage(tmp_path / "base" / base, 4096 + 4096 + 5)
    damaged = CliRunner().invoke(app, ["verify", str(tmp_path / "run"), "--json"])
    assert damaged.exit_code == 1
    assert json.loads(damaged.stdout)["slots"] == json.loads(sound.stdout)["slots"]
    assert base in json.loads(damaged.stdout)["damaged"][0]["base"]


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("offset", [20, 4096 + 60, 2 * 4096 + 5, -4096, -2 * 4096 + 100], ids=str)
def test_a_damaged_base_is_told_and_is_not_made_again_over_it(offset: int, weights: Path, tmp_path: Path) -> None:
    run(weights, tmp_path, path=tmp_path / "one")[0].close()
    (base,) = bases(tmp_path / "base")
    before = (tmp_path / "base" / base).read_bytes()
    damage(tmp_path / "base" / base, offset)
    with pytest.raises(CorruptionError, match=base):
        _use(*run(weights, tmp_path, path=tmp_path / "two"))
    assert len((tmp_path / "base" / base).read_bytes()) == len(before)
    (tmp_path / "base" / base).unlink()
    _use(*run(weights, tmp_path, path=tmp_path / "two"))
    assert (tmp_path / "base" / base).read_bytes() == before


def _use(optimizer: OffloadZero, model: nn.Module) -> None:
    with optimizer:
        model(batch(0))


def test_a_base_that_was_cut_off_is_told(weights: Path, tmp_path: Path) -> None:
    run(weights, tmp_path, path=tmp_path / "one")[0].close()
    (base,) = bases(tmp_path / "base")
    os.truncate(tmp_path / "base" / base, 5000)
    with pytest.raises(CorruptionError, match="was cut off"):
        run(weights, tmp_path, path=tmp_path / "two")


def test_a_construction_that_fails_leaves_no_base_and_leftovers_go(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: nn.Module) -> None:
        if not next(model.parameters()).is_meta:
            raise OSError("no more")
        quantise(model)

    with pytest.raises(OSError, match="no more"):
        run(weights, tmp_path, failing, path=tmp_path / "one")
    assert not (tmp_path / "base").exists() or not os.listdir(tmp_path / "base")
    run(weights, tmp_path, path=tmp_path / "one")[0].close()
    (base,) = bases(tmp_path / "base")
    left = tmp_path / "base" / f"{base}-{'0' * 16}.offload.new"
    left.write_bytes((tmp_path / "base" / base).read_bytes()[:8192])
    other = tmp_path / "base" / f"{base}-{'1' * 16}.offload.new"
    other.write_bytes(b"somebody else's" * 1000)
    (tmp_path / "base" / base).unlink()
    run(weights, tmp_path, path=tmp_path / "one")[0].close()
    assert not left.exists()
    assert other.exists()


def test_a_base_is_locked_while_it_is_made(weights: Path, tmp_path: Path) -> None:
    refused = []

    def watched(model: nn.Module) -> None:
        for path in (tmp_path / "base").glob("base-*"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    refused.append(path.name.endswith(".offload.new"))
        quantise(model)

    run(weights, tmp_path, watched, path=tmp_path / "one")[0].close()
    assert refused == [True] * 8


def test_nobody_writes_to_a_kept_base(weights: Path, tmp_path: Path) -> None:
    optimizer, model = run(weights, tmp_path, path=tmp_path / "one")
    (base,) = bases(tmp_path / "base")
    before = (tmp_path / "base" / base).read_bytes()
    with optimizer:
        with torch.no_grad():
            weights_of(model)[0].scales.mul_(2)
        with pytest.raises(ConfigError, match=r"weight\.scales was written to, and lies in a kept base"):
            squares(model, batch(0)).backward()
        optimizer.zero_grad()
        same_steps(optimizer, model, quantised(), range(2))
    assert (tmp_path / "base" / base).read_bytes() == before


def test_what_is_not_kept_may_be_written_to(weights: Path, tmp_path: Path) -> None:
    optimizer, model = run(weights, tmp_path, path=tmp_path / "one", settings=None, base=None)
    with optimizer:
        with torch.no_grad():
            weights_of(model)[0].scales.mul_(2)
        model(batch(0))
    assert not (tmp_path / "base").exists()
    with pytest.raises(ConfigError, match="a base is kept if its values come from files"):
        run(weights, tmp_path, settings=None)
