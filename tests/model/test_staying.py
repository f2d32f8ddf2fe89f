"""Units that stay on the device where `device_memory` leaves room: the same bits, fewer bytes over the link."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import BudgetError, OffloadZero, Tuning
from offload.layout import Layout, ParamSpec, build
from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.planner.placement import units_that_stay
from tests.support.device import DEVICE
from tests.support.training import Run, train

SMALL = Tuning(chunk="4KiB", tile=0)
AHEAD = replace(SMALL, prefetch_units=1)
LAYERS, WIDTH = 8, 32
UNIT_BYTES = 2 * (WIDTH * WIDTH + WIDTH)


def blocks(layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    return model.to(DEVICE)


@cache
def plain_losses(layers: int, accumulation: int) -> tuple[float, ...]:
    """With all parameters on the device."""
    return trained(blocks(layers), accumulation)[0]


def trained(model: nn.Module, accumulation: int = 1, **options: Any) -> tuple[tuple[float, ...], dict[str, Any], int]:
    """Losses of 4 steps; the stats; what each of the last 2 steps moved to the device."""
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(DEVICE, torch.bfloat16)
    losses, moved = [], []
    with OffloadZero(model, accumulation=accumulation, tuning=AHEAD, **options) as optimizer:
        for _ in range(4):
            for _ in range(accumulation):
                loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            moved.append(optimizer.stats()["gathered_bytes"])
        stats = optimizer.stats()
    return tuple(losses), stats, moved[-1] - moved[-2]


@pytest.mark.parametrize("stay", [0, 1, 3, LAYERS])
@pytest.mark.parametrize(("tier", "accumulation"), [("cpu", 1), ("cpu", 3), ("nvme", 1)])
def test_what_stays_comes_once_a_step(stay: int, tier: str, accumulation: int, tmp_path: Path) -> None:
    # Two units in use or around, and the one that is prefetched.
    memory = min(3 + stay, LAYERS) * UNIT_BYTES
    options: dict[str, Any] = {"tier": tier, "param_tier": tier, "device_memory": memory}
    if tier == "nvme":
        options["path"] = tmp_path / "run"
    losses, stats, moved = trained(blocks(), accumulation, **options)
    assert losses == plain_losses(LAYERS, accumulation)
    # A unit that comes and goes does so in each forward and backward, but the last one is still there in backward.
    comes = (LAYERS - stay) * 2 * accumulation - accumulation * (stay < LAYERS)
    assert moved == (comes + stay) * UNIT_BYTES
    assert stats["peak_device_bytes"] <= memory


def test_a_frozen_unit_that_stays_comes_once() -> None:
    model = blocks()
    for layer in model[:-1]:
        layer.requires_grad_(False)
    losses, _, moved = trained(model, param_tier="cpu", device_memory=12 * UNIT_BYTES)
    assert moved == UNIT_BYTES, "the trained one"
    expected = blocks()
    for layer in expected[:-1]:
        layer.requires_grad_(False)
    assert losses == trained(expected)[0]


KINDS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu", "param_tier": "cpu"},
    "nvme": {"tier": "nvme", "param_tier": "nvme", "commit_every": 3},
    "activations": {"tier": "cpu", "param_tier": "cpu", "activation_tier": "cpu"},
}


@cache
def all_on_the_device(kind: str, accumulation: int) -> Run:
    return train(kind, accumulation=accumulation, tier="cpu")


@cache
def bytes_of(kind: str, **options: Any) -> int:
    peak: int = train(kind, steps=2, **options).stats["peak_device_bytes"]
    return peak


@pytest.mark.parametrize("share", [1 / 7, 1 / 2, 1])
@pytest.mark.parametrize(
    ("where", "kind", "accumulation"),
    [("cpu", "gpt", 1), ("cpu", "mlp", 2), ("nvme", "gpt", 2), ("activations", "gpt", 1)],
)
def test_no_share_changes_a_bit(where: str, kind: str, accumulation: int, share: float, tmp_path: Path) -> None:
    options, most = dict(KINDS[where]), bytes_of(kind, tier="cpu")
    if options["tier"] == "nvme":
        options["path"] = tmp_path / "run"
    with pytest.raises(BudgetError) as refused:
        train(kind, device_memory=1, tuning=SMALL, **options)
    least = refused.value.needed
    assert least < most
    memory = int(least + share * (most - least))
    run = train(kind, accumulation=accumulation, device_memory=memory, tuning=SMALL, **options)
    run.assert_same_bits(all_on_the_device(kind, accumulation))
    assert run.stats["peak_device_bytes"] <= memory


def test_what_stays_leaves_for_what_needs_the_room() -> None:
    model = blocks()
    with OffloadZero(model, param_tier="cpu", device_memory=6 * UNIT_BYTES, tuning=SMALL) as optimizer:
        x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        model(x).float().sum().backward()
        optimizer.step()
        model(x)
        for first in (0, 2):  # each six of eight, so that what stayed for one is in the way of the other
            with optimizer.gathered(model[first : first + 6]):
                assert all(torch.isfinite(one.weight).all() for one, _ in model[first : first + 6])
        assert optimizer.stats()["peak_device_bytes"] <= 6 * UNIT_BYTES


def layout_of(sizes: dict[str, int]) -> Layout:
    return build([ParamSpec(f"{unit}.weight", numel, unit, torch.bfloat16, 0) for unit, numel in sizes.items()], 4096)


@pytest.mark.parametrize(
    ("room", "stay"),
    [
        (2 * 3, ""),
        (2 * 4, "e"),
        (2 * 5, "cg"),
        (2 * 7, "bdfh"),
        (2 * 8, "abcdefgh"),
    ],
)
def test_what_stays_is_spread_over_the_order(room: int, stay: str) -> None:
    numel = 4096
    choice = decide(
        Options(param_tier="cpu", tuning=Tuning(prefetch_units=1)), Situation(trained_bytes=1, frozen_bytes=0)
    )
    layout = layout_of(dict.fromkeys("abcdefgh", numel))
    found, nbytes = units_that_stay(layout, choice, room * numel)
    assert "".join(sorted(found)) == stay
    assert nbytes <= room * numel
