"""Tuning(speculate="auto"): when steps are tried, and that a run that is resumed keeps the slots that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload import OffloadZero, Tuning
from offload.devices.copies import accelerator, device_name
from offload.io import select
from offload.io.files import Files
from offload.io.select import Settings
from offload.planner import least_cpu_memory, rates
from offload.planner.explain import plan_of
from offload.planner.rates import Rate, Rates
from offload.storage.slot_map import ChunkKind
from tests.support.disks import on_disk
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.ranks import Worlds

WIDTH = 64
AUTO = Tuning(chunk="4KiB", threads=1, speculate="auto")
TRIED = replace(AUTO, speculate=True)
FLOPS, DISK, ELEMENTS = 1e9, 1e9, 1e9
"""A second, of a machine that was measured: with 8 to 100 tokens of this model compute and disk take alike long."""


def model_of(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


LEAST = least_cpu_memory(model_of(), tuning=TRIED)


def measured(path: Path, *, flops: float = FLOPS, elements: float = ELEMENTS) -> None:
    """As `offload probe` writes it down."""
    one = {"adamw, fp32": Rate.of([elements])}
    rates.remember(Rates(device_name(accelerator()), 1, Rate.of([1e10]), {"bf16": Rate.of([flops])}, one))
    select.remember(path, Settings("auto", mixed_bytes_per_s=DISK))


def slots(path: Path, tuning: Tuning = AUTO, **options: Any) -> int:
    """How many slots a chunk has in a run that begins, or goes on, with these options; it commits one step."""
    model = model_of()
    given = {"cpu_memory": LEAST, "tuning": tuning, "path": path, "commit_every": 0} | options
    optimizer = given.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    with OffloadZero(model, optimizer, **given) as held:
        before = held.resumed.step if held.resumed else 0
        model(torch.ones(2, WIDTH).bfloat16()).sum().backward()
        held.step()
        held.commit()
        assert held.stats()["step"] == before + 1
        assert (held._parts.step.trials is not None) is held._choice.states.tries_steps
        return held._choice.slots_per_chunk


def test_steps_are_tried_where_a_machine_was_measured_and_gains(tmp_path: Path) -> None:
    assert slots(tmp_path / "unknown") == 2
    measured(tmp_path)
    assert slots(tmp_path / "known") == 3
    assert slots(tmp_path / "without", replace(AUTO, speculate=False)) == 2


def test_nothing_is_tried_where_kernels_on_the_cpu_take_most_of_the_time(tmp_path: Path) -> None:
    """They take it from the backward, as they would from the forward."""
    measured(tmp_path, elements=1e5)
    assert slots(tmp_path / "run") == 2


def test_nothing_is_tried_where_ram_is_better_spent_on_states(tmp_path: Path) -> None:
    measured(tmp_path, flops=1000 * FLOPS)  # else a step of one token would compute for long
    assert slots(tmp_path / "all states stream") == 3
    assert slots(tmp_path / "none does", cpu_memory=2 * LEAST + 12 * 5 * WIDTH * (WIDTH + 1)) == 2
    half_stream = LEAST + (100 << 10)
    assert slots(tmp_path / "half of them do", cpu_memory=half_stream) == 2
    assert slots(tmp_path / "half do, forced", TRIED, cpu_memory=half_stream) == 3


def test_nothing_is_tried_off_a_disk_nor_of_matrices_that_are_stepped_as_wholes(
    tmp_path: Path, copied_by: CopiedBy
) -> None:
    measured(tmp_path)
    assert slots(tmp_path / "cpu", tier="cpu", cpu_memory=None) == 2
    copied_by(lambda: LateCopier(1))  # for a model on a device the optimizer's rate need not be known
    options = {"optimizer": torch.optim.Adafactor, "cpu_memory": "220KiB", "tuning": replace(AUTO, chunk="16KiB")}
    assert slots(tmp_path / "adafactor", **options) == 2


def test_nothing_is_tried_where_the_disk_lacks_the_third_slot(tmp_path: Path) -> None:
    class Small(Files):
        def space(self, path: Path) -> tuple[int, int]:
            return super().space(path)[0], 36 * 5 * WIDTH * WIDTH  # no headers and no padding

    measured(tmp_path)
    with on_disk(Small()):
        assert slots(tmp_path / "run") == 2


@pytest.mark.parametrize(("first", "expected"), [(False, 2), (True, 3)])
def test_a_run_that_is_resumed_keeps_its_slots(first: bool, expected: int, tmp_path: Path) -> None:
    """Whatever is measured meanwhile. Only True or False changes them."""
    path = tmp_path / "run"
    assert slots(path, replace(AUTO, speculate=first)) == expected
    if expected == 2:
        measured(tmp_path)
    files = {file.name for file in path.glob("swap-*")}
    assert files
    assert slots(path, resume=True) == expected
    assert {file.name for file in path.glob("swap-*")} == files
    more = {"cpu_memory": LEAST + (256 << 10), "resume": True}  # the slots are written anew
    assert slots(path, replace(AUTO, speculate=not first), **more) == 5 - expected
    assert {file.name for file in path.glob("swap-*")}.isdisjoint(files)


def test_a_run_in_another_layout_keeps_as_many(tmp_path: Path) -> None:
    path, options = tmp_path / "run", {"resume": True, "cpu_memory": LEAST + (512 << 10)}
    assert slots(path, TRIED) == 3
    assert slots(path, replace(AUTO, chunk="8KiB"), **options) == 3


@pytest.mark.parametrize(
    ("every", "split", "places"),
    [(5, True, [3, 3, 1]), (5, False, [3, 1, 1]), (None, True, [2, 1, 1]), (None, False, [2, 1, 1])],
)
def test_a_place_for_trials_have_states_and_what_is_committed_with_them(
    every: int | None, split: bool, places: list[int]
) -> None:
    tuning = Tuning(chunk="256KiB", speculate=True, split_master=split)
    tiers = {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "path": "."}
    slots = plan_of(model_of(), direct=True, tuning=tuning, commit_every=every, **tiers).place().slots
    found = [
        {slots.versions_of(slot) for slot in slots.of(kind)}
        for kind in (ChunkKind.STATES, ChunkKind.PARAMS, ChunkKind.GRADS)
    ]
    assert found == [{one} for one in places]


def _tried(path: Path, knows: int) -> bool:
    """Whether ranks try steps of which one knows how fast its machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / f"cache-{dist.get_rank()}"))
        if dist.get_rank() == knows:
            measured(path)
        model = model_of()
        memory = least_cpu_memory(model, tuning=TRIED, ranks=2)
        with OffloadZero(model, path=path / "run", tuning=AUTO, cpu_memory=memory, commit_every=0) as optimizer:
            return optimizer._choice.states.tries_steps


@pytest.mark.parametrize("knows", [0, 1])
def test_all_ranks_do_what_rank_0_would(worlds: Worlds, knows: int, tmp_path: Path) -> None:
    assert worlds(2).run(_tried, tmp_path, knows) == [knows == 0] * 2
