"""Training on an accelerator (make test-gpu), or the simulated one (make test-device); skipped without one."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import Tuning
from offload.devices.copies import accelerator, stream_handle
from offload.native import ADAM, SUM_BLOCK, SUM_SQUARES, AdamScalars, load_on, sum_blocks
from offload.native.device_program import LIBRARIES
from offload.native.torch_kernels import scratch_bytes
from offload.optim import reference
from tests.support import models
from tests.support.training import LossScale, NumpyAdam, Run, train

DEVICE = str(accelerator())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.device,
    pytest.mark.skipif(accelerator() is None, reason="no accelerator"),
]


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    # The promise is "with torch's own determinism settings fixed".
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@cache
def in_ram(kind: str, accumulation: int) -> Run:
    return train(kind, accumulation=accumulation, device=DEVICE, tier="cpu")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_equals_the_numpy_reference(kind: str, accumulation: int) -> None:
    reference = NumpyAdam(accumulation)
    run = train(kind, accumulation=accumulation, device=DEVICE, prepare=reference.watch, each_step=reference.step)
    reference.assert_same_bits(run)
    run.assert_same_bits(in_ram(kind, accumulation))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("chunk", ["4KiB", "8KiB"])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_from_disk_equals_training_in_ram(kind: str, chunk: str, accumulation: int, tmp_path: Path) -> None:
    run = train(
        kind,
        accumulation=accumulation,
        device=DEVICE,
        tier="nvme",
        path=tmp_path / "swap",
        cpu_memory="least",
        tuning=Tuning(chunk=chunk, threads=2),
    )
    run.assert_same_bits(in_ram(kind, accumulation))
    assert run.stats["streamed_chunks"] == run.stats["chunks"]
    assert run.stats["peak_cpu_bytes"] <= run.stats["cpu_budget_bytes"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", models.KINDS)
def test_training_with_states_on_the_device_equals_training_in_ram(
    kind: str, accumulation: int, tmp_path: Path
) -> None:
    run = train(kind, accumulation=accumulation, device=DEVICE, tier="device", path=tmp_path / "run", commit_every=5)
    run.assert_same_bits(in_ram(kind, accumulation))
    assert (run.stats["kernel"] == "device") is (torch.device(DEVICE).type in LIBRARIES)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("n", [1, 4095, SUM_BLOCK + 1, 5 * SUM_BLOCK - 3])
def test_a_devices_kernels_equal_the_reference(n: int, is_deterministic: bool, is_compiled: bool) -> None:
    torch.use_deterministic_algorithms(is_deterministic)
    rng = np.random.default_rng(n)
    p, m, v, g = (torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for _ in range(4))
    v = v.square()
    hyper: dict[str, Any] = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    hyper |= {"decoupled": True, "scale": 0.37}
    wanted = reference.adam(p.numpy(), m.numpy(), v.numpy(), g.numpy(), **hyper)
    scratch = torch.zeros(scratch_bytes(1), dtype=torch.uint8, device=DEVICE)
    kernels = load_on(scratch, partial(stream_handle, scratch.device) if is_compiled else None)
    assert (kernels.variant == "device") is (is_compiled and scratch.device.type in LIBRARIES)
    states = [x.to(DEVICE) for x in (p, m, v)]
    kernels.call(ADAM, *states, g.to(DEVICE), None, scalars=AdamScalars.at(**hyper))
    for state, expected in zip(states, wanted, strict=True):
        assert torch.equal(state.cpu(), torch.from_numpy(expected))
    for first in (0, 77):
        sums = torch.zeros(sum_blocks(first, n), dtype=torch.float64, device=DEVICE)
        kernels.call(SUM_SQUARES, g.to(DEVICE), sums, first=first)
        assert torch.equal(sums.cpu(), torch.from_numpy(reference.sum_squares(g.numpy(), first)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_in_fp16_with_a_loss_scale(accumulation: int, tmp_path: Path) -> None:
    """It overflows once, and grows."""
    options: dict[str, Any] = {"accumulation": accumulation, "device": DEVICE, "compute_dtype": torch.float16}
    options |= {"spoilt": (3,), "steps": 8}
    reference = NumpyAdam(accumulation, scale=LossScale(256.0, 2))
    run = train(
        "gpt", prepare=reference.watch, each_step=reference.step, scale=LossScale(256.0, 2), tier="cpu", **options
    )
    reference.assert_same_bits(run)
    assert (run.stats["step"], run.stats["skipped_steps"]) == (7, 1)
    assert run.scales == [256.0, 512.0, 512.0, 256.0, 256.0, 512.0, 512.0, 1024.0]
    options |= {"tier": "nvme", "path": tmp_path / "swap", "cpu_memory": "least", "tuning": Tuning(chunk="4KiB")}
    train("gpt", scale=LossScale(256.0, 2), **options).assert_same_bits(run)


def test_a_step_moves_two_bytes_a_parameter_each_way() -> None:
    run = train("gpt", device=DEVICE, steps=5)
    parameters = run.stats["parameters"]
    assert run.stats["device_to_host_bytes"] == 5 * 2 * parameters
    assert 5 * 2 * parameters <= run.stats["host_to_device_bytes"] <= 5 * 2 * parameters * 1.05
