"""Optimizers of other packages, held, have the bits of the same ones in plain torch, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import ConfigError, OffloadZero, Tuning
from tests.support.toy import Net, batch

lion_pytorch = pytest.importorskip("lion_pytorch")
prodigyopt = pytest.importorskip("prodigyopt")
schedulefree = pytest.importorskip("schedulefree")
optimization = pytest.importorskip("transformers.optimization")
pytestmark = pytest.mark.peers

MAKES: dict[str, Callable[[Any], Any]] = {
    "schedule-free AdamW": lambda ps: schedulefree.AdamWScheduleFree(ps, lr=0.01, warmup_steps=3),
    "schedule-free AdamW, one by one": lambda ps: schedulefree.AdamWScheduleFree(ps, lr=0.01, foreach=False),
    "schedule-free SGD": lambda ps: schedulefree.SGDScheduleFree(ps, lr=0.1),
    "Lion": lambda ps: lion_pytorch.Lion(ps, lr=1e-3, weight_decay=0.1),
    "Adafactor": optimization.Adafactor,
    "Adafactor that warms up": lambda ps: optimization.Adafactor(ps, warmup_init=True, clip_threshold=0.5),
    "Adafactor with a rate": lambda ps: optimization.Adafactor(
        ps, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9, weight_decay=0.1
    ),
}
PLACES: dict[str, dict[str, Any]] = {"RAM": {"tier": "cpu"}, "disk": {"tier": "nvme", "param_tier": "nvme"}}

EVALUATED = PLACES | {"device": {"tier": "device"}, "streamed": {"tier": "cpu", "param_tier": "cpu"}}


def made(name: str) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = MAKES[name](list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MAKES)
def test_held_they_have_the_bits_of_plain_torch(name: str, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": Tuning(chunk="4KiB"), "commit_every": 0}
    options |= {"path": tmp_path / "run"} | PLACES[place]
    reference, expected = made(name)
    for number in range(6):
        step(reference, expected, number)
    model, given = made(name)
    with OffloadZero(model, given, **options) as optimizer:
        for number in range(3):
            step(model, optimizer, number)
        optimizer.commit()
    model, given = made(name)
    with OffloadZero(model, given, resume=True, **options) as optimizer:
        for number in range(3, 6):
            step(model, optimizer, number)
        for (key, found), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(found, other), key
        found, wanted = optimizer.param_groups[0], expected.param_groups[0]
        assert {key: found[key] for key in wanted if key != "params"} == {
            key: value for key, value in wanted.items() if key != "params"
        }


def evaluated(model: Net, optimizer: Any) -> torch.Tensor:
    """In the mode for evaluation, with the averaged weights."""
    is_held = isinstance(optimizer, OffloadZero)
    optimizer.apply("eval") if is_held else optimizer.eval()
    with torch.no_grad():
        found = model(batch(99)).clone()
    optimizer.apply("train") if is_held else optimizer.train()
    return found


@pytest.mark.parametrize("place", EVALUATED)
@pytest.mark.parametrize("name", [name for name in MAKES if "free" in name])
def test_schedule_free_evaluates_with_its_averages_and_trains_on(name: str, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": Tuning(chunk="4KiB"), "commit_every": 0}
    options |= {"path": tmp_path / "run"} | EVALUATED[place]
    reference, expected = made(name)
    outputs = []
    for number in range(6):
        step(reference, expected, number)
        if number in (1, 2, 4):
            outputs.append(evaluated(reference, expected))
    expected.eval()
    model, given = made(name)
    found = []
    with OffloadZero(model, given, **options) as optimizer:
        for number in range(3):
            step(model, optimizer, number)
            if number == 1:
                found.append(evaluated(model, optimizer))
        optimizer.apply("eval")
        optimizer.commit()
    model, given = made(name)
    with OffloadZero(model, given, resume=True, **options) as optimizer:
        found.append(evaluated(model, optimizer))
        for number in range(3, 6):
            step(model, optimizer, number)
            if number == 4:
                found.append(evaluated(model, optimizer))
        optimizer.apply("eval")
        assert all(torch.equal(one, other) for one, other in zip(found, outputs, strict=True))
        for (key, value), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(value, other), key
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(optimizer.state[param]["z"], expected.state[other]["z"])


def test_schedule_free_says_that_it_has_to_be_in_train_mode() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"its step\(\) raises .*train mode"):
        OffloadZero(model, schedulefree.AdamWScheduleFree(model.parameters()), tier="cpu")


def test_prodigy_is_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match="optimizer is Prodigy, which cannot be offloaded"):
        OffloadZero(model, prodigyopt.Prodigy(model.parameters()), tier="cpu")
