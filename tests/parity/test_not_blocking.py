"""A step that does not block gives the bits of one that does, whatever the disk and the copies do in between."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import OffloadZero, Tuning
from tests.support import models
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.late_copier import LateCopier, copying_by
from tests.support.training import Run, train

STEPS = 3


@cache
def blocking(kind: str, accumulation: int) -> Run:
    return train(kind, steps=STEPS, accumulation=accumulation, each_step=OffloadZero.synchronize)


SCHEDULES = given(
    kind=st.sampled_from([*models.KINDS, "mlp", "mlp"]),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 1 << 20),
    delay_s=st.sampled_from([0.0, 0.0002, 0.002]),
    on_device=st.booleans(),
    split_master=st.booleans(),
    chunk=st.sampled_from(["4KiB", "12KiB", "64KiB"]),
    prefetch=st.integers(0, 4),
    looks=st.sets(st.integers(0, STEPS - 1)),
)


@settings(max_examples=25)
@SCHEDULES
@pytest.mark.timeout(300)
def test_any_schedule_gives_the_bits_of_a_blocking_step(**schedule: Any) -> None:
    run_in(**schedule)


@pytest.mark.slow
@settings(max_examples=600)
@SCHEDULES
@pytest.mark.timeout(900)
def test_many_schedules_give_the_bits_of_a_blocking_step(**schedule: Any) -> None:
    run_in(**schedule)


def run_in(
    kind: str,
    accumulation: int,
    seed: int,
    delay_s: float,
    on_device: bool,
    split_master: bool,
    chunk: str,
    prefetch: int,
    looks: set[int],
) -> None:
    def look(optimizer: OffloadZero) -> None:
        if optimizer.stats()["step"] - 1 in looks:
            optimizer.synchronize()

    options: dict[str, Any] = {
        "tuning": Tuning(chunk=chunk, prefetch_chunks=prefetch, prefetch_units=prefetch, split_master=split_master),
        "cpu_memory": "least" if seed % 2 else "2MiB",
    }
    if on_device:
        options["cpu_memory"] = "2MiB"
    copier = copying_by(lambda: LateCopier(seed)) if on_device else nullcontext()
    with copier, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "swap"
        with on_disk(engine=FaultyEngine(seed=seed, delay_s=delay_s)):
            run = train(kind, steps=STEPS, accumulation=accumulation, path=path, each_step=look, **options)
    run.assert_same_bits(blocking(kind, accumulation))
