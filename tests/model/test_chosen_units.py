"""`Tuning(units=...)`: which parameters are gathered together, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import ConfigError, OffloadZero, Tuning
from offload.model.units import encloses, units_of
from tests.support.streamed import Streams, train
from tests.support.toy import Block, Checkpointed, Net, squares

CHOICES: dict[str, Any] = {
    "everything in the root": (),
    "layers": (nn.Linear, nn.LayerNorm),
    "two of the blocks": ("blocks.1", "blocks.3"),
    "nested": (Block, "blocks.0.up", "blocks.2.norm", "blocks.2.down", "embed"),
    "a list": ("blocks", "blocks.1"),
}


@pytest.mark.parametrize("build", [Net, Checkpointed])
@pytest.mark.parametrize("choice", CHOICES)
def test_no_bit_depends_on_what_the_units_are(streams: Streams, choice: str, build: Callable[[], nn.Module]) -> None:
    losses, expected = streams.run(train(squares), build, param_tier="device")
    for prefetch in (0, 3):
        tuning = Tuning(
            chunk="4KiB", prefetch_chunks=prefetch, prefetch_units=prefetch, threads=1, units=CHOICES[choice]
        )
        chosen_losses, chosen = streams.run(train(squares), build, tuning=tuning)
        assert chosen_losses == losses
        assert all(torch.equal(chosen[name], tensor) for name, tensor in expected.items())


def test_norms_do_not_depend_on_what_the_units_are(tmp_path: Path) -> None:
    """Of parameters longer than the blocks whose squares are summed together."""
    streams = Streams(tmp_path, {"param_tier": "cpu"})

    def norm(**options: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(301, 307) if n % 2 else nn.Linear(307, 301) for n in range(3)))
        with streams.optimizer(model, **options) as optimizer:
            model(torch.randn(3, 307)).square().mean().backward()
            return optimizer.clip_grad_norm_(1.0).item()

    def tuning(units: Any) -> Tuning:
        return Tuning(chunk="512KiB", threads=1, units=units)

    found = {norm(tuning=tuning(units), grad_tier=tier) for units in (None, (), ("1",)) for tier in ("cpu", "nvme")}
    assert len(found) == 1


def test_of_nested_units_the_innermost_has_a_parameter() -> None:
    model = Net(2)
    units = units_of(model, (Block, "blocks.1.up", "head"))
    named = {name: units[param] for name, param in model.named_parameters()}
    assert named["embed.weight"] == named["norm.weight"] == ""
    assert named["blocks.0.up.weight"] == named["blocks.0.before"] == "blocks.0"
    assert named["blocks.1.up.weight"] == named["blocks.1.up.bias"] == "blocks.1.up"
    assert named["blocks.1.down.weight"] == "blocks.1"
    assert named["head.weight"] == "head"
    assert encloses("blocks.1", "blocks.1.up")
    assert not encloses("blocks.1", "blocks.10")


def test_what_chosen_units_share_belongs_to_the_root() -> None:
    model = Net(3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[2].norm = model.blocks[1].norm
    units = units_of(model, (Block, nn.LayerNorm))
    assert units[model.blocks[0].up.weight] == units[model.blocks[1].norm.weight] == ""
    assert units[model.blocks[0].norm.weight] == "blocks.0.norm"
    assert units[model.norm.weight] == "norm"


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("blocks.0", r"Tuning.units='blocks.0': give a sequence, such as"),
        (Block, r"Tuning.units=.*: give a sequence, such as"),
        ((3,), r"Tuning.units holds 3"),
        ((int,), r"Tuning.units holds <class 'int'>"),
        (("blocks.7",), r"'blocks.7', which is no module of the model; did you mean 'blocks.\d'"),
        (("nowhere",), r"'nowhere', which is no module of the model; give names as"),
        (("",), r"names '', which is no module"),
        ((nn.Conv2d,), r"Tuning.units names Conv2d, and the model has no module of that class"),
    ],
)
def test_units_that_are_not_there_are_refused_before_the_model_is_touched(units: Any, message: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=message):
        OffloadZero(model, tuning=Tuning(units=units))
    assert model.embed.weight.dtype is torch.float32
