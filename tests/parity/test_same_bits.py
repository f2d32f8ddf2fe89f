"""Promise 1: the same bits on every tier, budget, chunk size, thread count, instruction set and copy engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Tuning
from offload.io import io_uring
from offload.native import available_variants
from tests.support import models
from tests.support.device import DEVICE
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import NumpyAdam, Run, train


@cache
def in_ram(kind: str, accumulation: int) -> Run:
    return train(kind, accumulation=accumulation, tier="cpu")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_in_ram_equals_the_numpy_reference(kind: str, accumulation: int) -> None:
    reference = NumpyAdam(accumulation)
    run = train(kind, accumulation=accumulation, prepare=reference.watch, each_step=reference.step)
    reference.assert_same_bits(run)
    run.assert_same_bits(in_ram(kind, accumulation))
    assert run.losses[-1] != run.losses[0]
    assert set(run.steps.values()) == ({12} if kind != "mlp" else {12, *([4] if accumulation == 1 else [8])})


def test_plain_adam_equals_the_numpy_reference_too() -> None:
    reference = NumpyAdam(1, decoupled=False)
    run = train("mlp", prepare=reference.watch, each_step=reference.step, adam=torch.optim.Adam)
    reference.assert_same_bits(run)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("chunk", ["4KiB", "8KiB"])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_from_disk_equals_training_in_ram(kind: str, chunk: str, accumulation: int, tmp_path: Path) -> None:
    run = train(
        kind,
        accumulation=accumulation,
        tier="nvme",
        path=tmp_path / "swap",
        cpu_memory="least",
        tuning=Tuning(chunk=chunk),
    )
    run.assert_same_bits(in_ram(kind, accumulation))
    assert run.stats["streamed_chunks"] == run.stats["chunks"]
    assert run.stats["peak_cpu_bytes"] <= run.stats["cpu_budget_bytes"]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_prefetch_depth_changes_no_bit(prefetch: int, tmp_path: Path) -> None:
    tuning = Tuning(chunk="4KiB", prefetch_chunks=prefetch, prefetch_units=prefetch)
    run = train("mlp", tier="nvme", path=tmp_path / "swap", cpu_memory="192KiB", tuning=tuning)
    run.assert_same_bits(in_ram("mlp", 1))


@pytest.mark.parametrize("chunk", ["4KiB", "1MiB"])
def test_chunk_size_changes_no_bit_in_ram(chunk: str) -> None:
    train("gpt", tuning=Tuning(chunk=chunk)).assert_same_bits(in_ram("gpt", 1))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("variant", available_variants())
def test_instruction_set_and_threads_change_no_bit(variant: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_KERNELS", variant)
    # Below this many elements a kernel runs in one thread: small models would never be split.
    monkeypatch.setattr("offload.native._MIN_SHARE", 256)
    run = train("mlp", accumulation=2, tuning=Tuning(threads=threads))
    assert (run.stats["kernel"], run.stats["threads"]) == (variant, threads)
    run.assert_same_bits(in_ram("mlp", 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_late_copies_in_any_order_change_no_bit(
    kind: str, accumulation: int, seed: int, tmp_path: Path, copied_by: CopiedBy
) -> None:
    copier = LateCopier(seed)
    copied_by(lambda: copier)
    options: dict[str, Any] = {"cpu_memory": "1MiB", "tuning": Tuning(chunk="4KiB")}
    if seed:
        options |= {"tier": "nvme", "path": tmp_path / "swap"}
    else:
        options["cpu_memory"] = "8MiB"
    run = train(kind, accumulation=accumulation, **options)
    assert copier.copies > 0
    run.assert_same_bits(in_ram(kind, accumulation))


@pytest.mark.parametrize("is_apart", [False, True], ids=["on the CPU", "on a device of its own"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_with_states_on_the_device_equals_training_in_ram(
    kind: str, accumulation: int, is_apart: bool, copied_by: CopiedBy
) -> None:
    if is_apart:
        copied_by(lambda: LateCopier(0))
    run = train(kind, accumulation=accumulation, tier="device", tuning=Tuning(chunk="4KiB"))
    run.assert_same_bits(in_ram(kind, accumulation))
    assert run.stats["kernel"].startswith("device") is (is_apart or DEVICE != "cpu")
    assert run.stats["peak_cpu_bytes"] == 0
    assert run.stats["peak_device_bytes"] >= 16 * run.stats["parameters"]


def test_whole_model_in_fp32_equals_the_numpy_reference() -> None:
    reference = NumpyAdam(1)
    run = train("mlp", prepare=reference.watch, each_step=reference.step, compute_dtype=torch.float32)
    reference.assert_same_bits(run)
    assert run.tensors["first.weight"].dtype is torch.float32


@pytest.mark.parametrize("engine", ["uring", "threads", "portable"])
def test_io_engine_changes_no_bit(engine: str, tmp_path: Path) -> None:
    if engine == "uring" and not io_uring.is_available()[0]:
        pytest.skip(io_uring.is_available()[1])
    tuning = Tuning(chunk="4KiB", io_engine=engine)
    run = train("gpt", tier="nvme", path=tmp_path / "swap", cpu_memory="least", tuning=tuning)
    assert run.stats["io_engine"] == engine
    run.assert_same_bits(in_ram("gpt", 1))


def test_striping_over_two_paths_changes_no_bit(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    run = train("gpt", tier="nvme", path=paths, cpu_memory="least", tuning=Tuning(chunk="4KiB"))
    assert all(any(path.iterdir()) for path in paths)
    run.assert_same_bits(in_ram("gpt", 1))
