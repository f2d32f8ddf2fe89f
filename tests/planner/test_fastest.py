"""Where tiers are left open, measured rates decide. No bit changes, and a resume keeps its files."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from offload.devices.copies import accelerator, device_name
from offload.io import remembered, select
from offload.io.select import Settings
from offload.planner import fastest, rates
from offload.planner.choice import Candidate
from offload.planner.explain import Planned, plan_of
from offload.planner.fastest import Fastest
from offload.planner.rates import Rate, Rates
from offload.planner.simulate import NotPredicted, seconds_of
from offload.planner.simulate.clock import Channel, Clock
from offload.planner.simulate.speeds import DriveSpeed, Passes, Speeds
from offload.planner.verdict import Work

WIDTH, LAYERS = 256, 24
MEMORY, STEPPED, READ, WRITE, BOTH = 2e10, 1e9, 3e9, 2e9, 4e9
SPEEDS = Speeds(STEPPED, MEMORY, [DriveSpeed(READ, WRITE, BOTH)])
FAST_DISK = Speeds(STEPPED, MEMORY, [DriveSpeed(1e15, 1e15, 1e15)])
WORK = Work(LAYERS * WIDTH * (WIDTH + 1), 0, 1, recomputes=False)
TUNING = Tuning(chunk="256KiB", threads=1, prefetch_units=1)
OPEN: dict[str, Any] = {"tier": "nvme", "param_tier": "nvme", "tuning": TUNING}
"""Where gradients wait is left open."""


def blocks(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))


def planned(speeds: Speeds | NotPredicted | None, **options: Any) -> Planned:
    pick = None if speeds is None else Fastest(WORK, speeds)
    return plan_of(blocks(), direct=True, path=".", pick=pick, **OPEN | options)


TIGHT = planned(None).cpu_memory_for(0.8)
"""Without gradients all states have room in it."""


def measured(folder: Path) -> None:
    """As `offload probe` writes it down."""
    rate, steps = Rate.of([1e9]), {"adamw, fp32": Rate.of([STEPPED])}
    rates.remember(Rates(device_name(accelerator()), 1, Rate.of([MEMORY]), {"bf16": rate}, steps))
    select.remember(folder, Settings("auto", 1 << 20, 4, BOTH, READ, WRITE))


def trained(path: Path, **options: Any) -> tuple[str, list[torch.Tensor]]:
    """The tier of gradients that was chosen, and the parameters after two more steps, the second one committed."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with OffloadZero(model, optimizer, path=path, cpu_memory=TIGHT, commit_every=0, **OPEN | options) as held:
        for seed in range(2):
            x = torch.linspace(-1, 1, 2 * WIDTH).roll(seed).view(2, WIDTH).bfloat16()
            model(x).float().square().mean().backward()
            held.step()
            held.zero_grad()
        held.commit()
        return held.stats()["grad_tier"], [param.detach().clone() for param in model.parameters()]


def test_gradients_make_room_for_states_where_that_is_faster() -> None:
    today, chosen = (planned(one, cpu_memory=TIGHT) for one in (None, SPEEDS))
    assert (today.choice.grads.tier.name, chosen.choice.grads.tier.name) == ("cpu", "nvme")
    times = [seconds_of(one.layout, one.place(), Passes(), SPEEDS) for one in (today, chosen)]
    assert times[0] > 1.05 * times[1]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        (NotPredicted("no rates are known"), {}),
        (FAST_DISK, {}),
        (SPEEDS, {"cpu_memory": "1GiB"}),
        (SPEEDS, {"grad_tier": "cpu"}),
        (SPEEDS, {"activation_tier": "cpu", "activation_memory": "1MiB"}),
    ],
    ids=["not measured", "nothing gained", "all fits", "said", "not simulated"],
)
def test_else_it_is_what_moves_the_fewest_bytes(speeds: Speeds | NotPredicted, options: dict[str, Any]) -> None:
    given = {"cpu_memory": TIGHT} | options
    today, chosen = (planned(one, **given) for one in (None, speeds))
    assert (chosen.choice, chosen.layout) == (today.choice, today.layout)
    assert chosen.choice.grads.tier.name == "cpu"


@pytest.mark.parametrize(("device_memory", "has_tiles"), [("8MiB", False), (300_000, True)])
def test_tiles_are_neither_taken_nor_left_for_speed(device_memory: int | str, has_tiles: bool) -> None:
    """They change bits."""
    seen: list[dict[str, int]] = []

    def look(first: Candidate, others: Iterator[Candidate]) -> Candidate:
        seen.extend({spec.name: spec.tile for spec in one.layout.specs} for one in (first, *others))
        return first

    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)) for _ in range(3)))
    given = OPEN | {"param_tier": "cpu"}
    plan_of(model, direct=False, path=".", pick=look, device_memory=device_memory, cpu_memory="1GiB", **given)
    assert [any(one.values()) for one in seen] == [has_tiles] * len(seen)
    assert all(one == seen[0] for one in seen)
    assert has_tiles or len(seen) > 1


def test_a_model_with_many_chunks_is_not_simulated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "MOST_USES", 10)
    assert planned(SPEEDS, cpu_memory=TIGHT).choice.grads.tier.name == "cpu"


def test_a_run_takes_it_with_the_same_bits_and_a_resume_keeps_its_files(tmp_path: Path) -> None:
    where, before = trained(tmp_path / "unknown")
    assert where == "cpu"
    files = {file.name: file.stat().st_ino for file in (tmp_path / "unknown").glob("swap-*")}
    assert files
    measured(tmp_path)
    where, after = trained(tmp_path / "known")
    assert where == "nvme"
    assert all(map(torch.equal, before, after))
    where, on = trained(tmp_path / "unknown", resume=True)  # what was measured meanwhile counts
    assert where == "nvme"
    assert {file.name: file.stat().st_ino for file in (tmp_path / "unknown").glob("swap-*")} == files
    assert all(map(torch.equal, on, trained(tmp_path / "known", resume=True)[1]))


@pytest.mark.parametrize("why", ["stale", "foreign"])
def test_what_is_stale_or_another_machines_decides_nothing(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path)
    if why == "foreign":
        monkeypatch.setattr(remembered, "_machine", lambda: "another")
    else:
        now = time.time() + 100 * 24 * 3600
        monkeypatch.setattr(remembered.time, "time", lambda: now)
    assert trained(tmp_path / "run")[0] == "cpu"


def test_transfers_that_end_at_almost_the_same_time_all_end() -> None:
    """A rounding left less than nothing of one, and it never ended."""
    clock, sizes = Clock(), random.Random(0)
    clock.now = 10.49
    link = Channel(clock, "link", {"up": 1e10, "down": 1e10}, 1e10, is_shared=False)
    moments = []
    for _ in range(40):
        moments += [link.submit(way, sizes.choice((128, 8192)), "") for way in ("up", "down")]
        _go_on(clock, sizes.randint(1, 4))
    _go_on(clock, 500)
    assert all(one.is_past for one in moments)


def _go_on(clock: Clock, count: int) -> None:
    """Lets so many things happen."""
    for _ in range(count):
        clock._call_next()
