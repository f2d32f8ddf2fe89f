"""A share of the states on the device, where `device_memory` leaves room: the same bits as on the CPU, fewer copies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero, Tuning
from offload.native.torch_kernels import scratch_bytes
from tests.support.cases import products
from tests.support.device import DEVICE
from tests.support.device_memory import memory_for as planned_memory_for
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.training import NumpyAdam, Run, train

SMALL = Tuning(chunk="4KiB")
SHARES = (0.0, 1 / 7, 1 / 2, 1.0)


@pytest.fixture(autouse=True)
def _a_device_of_its_own(copied_by: CopiedBy) -> None:
    if DEVICE == "cpu":
        copied_by(lambda: LateCopier(1))


@cache
def bytes_at(kind: str, tier: str, accumulation: int, states: str) -> int:
    """What the device holds with the states on one tier, all of them."""
    options: dict[str, Any] = {"tier": tier, "accumulation": accumulation, "states": states, "tuning": SMALL}
    peak: int = train(kind, steps=1, **options).stats["peak_device_bytes"]
    return peak


def memory_for(kind: str, share: float, accumulation: int = 1, states: str = "fp32") -> int:
    """The `device_memory` that has room for a share of the states and gradients.

    That is beside the parameters, and what the device's kernels take.
    """
    none, all_of_them = (bytes_at(kind, tier, accumulation, states) for tier in ("cpu", "device"))
    least = none + scratch_bytes(1)
    return int(least + share * (all_of_them - least))


def require_share(run: Run, share: float, memory: int) -> None:
    """Some states are on the device if there is room for a unit's, and no more than there is room for."""
    there, chunks = run.stats["device_chunks"], run.stats["chunks"]
    assert run.stats["peak_device_bytes"] <= memory
    assert there == chunks if share == 1 else there == 0 if share == 0 else there < chunks
    assert there or share < 1 / 2


@cache
def in_ram(kind: str, accumulation: int = 1, states: str = "fp32", steps: int = 12) -> Run:
    return train(kind, accumulation=accumulation, states=states, steps=steps, tier="cpu")


@pytest.mark.parametrize(
    ("kind", "accumulation", "share"),
    products(
        ["mlp", "gpt"],
        [1, 2],
        SHARES,
        often=[("mlp", 1, 1 / 2), ("mlp", 2, 1 / 7), ("gpt", 1, 1.0), ("mlp", 1, 0.0), ("gpt", 2, 1 / 2)],
    ),
)
def test_no_share_changes_a_bit(kind: str, accumulation: int, share: float) -> None:
    memory, reference = memory_for(kind, share, accumulation), NumpyAdam(accumulation)
    run = train(
        kind,
        accumulation=accumulation,
        prepare=reference.watch,
        each_step=reference.step,
        tier="cpu",
        device_memory=memory,
        tuning=SMALL,
    )
    reference.assert_same_bits(run)
    require_share(run, share, memory)


@pytest.mark.parametrize(
    ("states", "share"), products(["8bit", "bf16"], SHARES[1:], often=[("8bit", 1 / 2), ("bf16", 1 / 2)])
)
def test_nor_with_small_states(states: str, share: float) -> None:
    memory = memory_for("mlp", share, states=states)
    run = train("mlp", tier="cpu", states=states, device_memory=memory, tuning=SMALL)
    run.assert_same_bits(in_ram("mlp", states=states))
    require_share(run, share, memory)


@pytest.mark.parametrize(
    ("activations", "share"), products([None, "cpu"], SHARES[1:], often=[(None, 1 / 2), ("cpu", 1 / 7)])
)
def test_the_others_stream_from_the_disk(activations: str | None, share: float, tmp_path: Path) -> None:
    memory = memory_for("mlp", share)
    options: dict[str, Any] = {"param_tier": "device", "activation_tier": activations, "commit_every": 4}
    if activations is not None:
        options["activation_memory"] = "64KiB"
    run = train("mlp", path=tmp_path / "run", cpu_memory="320KiB", device_memory=memory, tuning=SMALL, **options)
    run.assert_same_bits(in_ram("mlp"))
    require_share(run, share, memory)
    assert run.stats["streamed_chunks"] + run.stats["device_chunks"] <= run.stats["chunks"]


@pytest.mark.parametrize(
    ("kind", "param_tier", "accumulation", "share"),
    products(
        ["mlp", "gpt"],
        ["cpu", "nvme"],
        [1, 2],
        SHARES,
        often=[("mlp", "cpu", 1, 1 / 2), ("gpt", "cpu", 2, 1 / 2), ("mlp", "nvme", 1, 1.0)],
    ),
)
def test_and_their_parameters_may_stream(
    kind: str, param_tier: str, accumulation: int, share: float, tmp_path: Path
) -> None:
    states = bytes_at(kind, "device", accumulation, "fp32")
    streamed: dict[str, Any] = {"param_tier": param_tier, "tuning": Tuning(chunk="4KiB", tile=0)}
    least = train(kind, steps=1, path=tmp_path / "least", accumulation=accumulation, commit_every=None, **streamed)
    memory = least.stats["peak_device_bytes"] + int(share * (states + scratch_bytes(1) + (96 << 10)))
    run = train(
        kind,
        accumulation=accumulation,
        path=tmp_path / "run",
        cpu_memory={"mlp": "360KiB", "gpt": "760KiB"}[kind],
        commit_every=4,
        grad_tier="cpu",
        device_memory=memory,
        **streamed,
    )
    run.assert_same_bits(in_ram(kind, accumulation))
    require_share(run, share, memory)
    stats = run.stats
    assert stats["device_chunks"] + stats["streamed_chunks"] <= stats["chunks"]


IN_SLOTS = Tuning(chunk="256KiB", tile=0)
"""Chunks of gradients on NVMe are whole blocks of sums."""


@pytest.mark.parametrize(
    ("kind", "param_tier", "accumulation", "share"),
    products(
        ["mlp", "gpt"],
        ["cpu", "nvme"],
        [1, 2],
        SHARES,
        often=[("gpt", "cpu", 1, 1 / 2), ("mlp", "nvme", 2, 1 / 2), ("gpt", "nvme", 2, 1.0)],
    ),
)
def test_gradients_of_the_others_may_be_on_the_disk(
    kind: str, param_tier: str, accumulation: int, share: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tier": "nvme", "param_tier": param_tier, "grad_tier": "nvme", "tuning": IN_SLOTS}
    memory = planned_memory_for(kind, share, accumulation=accumulation, **options)
    reference = NumpyAdam(accumulation)
    run = train(
        kind,
        accumulation=accumulation,
        prepare=reference.watch,
        each_step=reference.step,
        path=tmp_path / "run",
        device_memory=memory,
        cpu_memory="8MiB",
        **options,
    )
    reference.assert_same_bits(run)
    assert run.stats["peak_device_bytes"] <= memory
    there = run.stats["device_chunks"]
    assert there < run.stats["chunks"] if share < 1 / 2 else there


@pytest.mark.parametrize(
    ("use", "late", "accumulation", "share"),
    products(
        ["indexed", "grouped"],
        [False, True],
        [1, 2],
        [1 / 2, 1.0],
        often=[("indexed", False, 1, 1 / 2), ("grouped", False, 2, 1.0), ("grouped", True, 1, 1.0)],
    ),
)
def test_weights_in_tiles_are_units_too(use: str, late: bool, accumulation: int, share: float, tmp_path: Path) -> None:
    """Those of experts that may be late are not, and their states stay on the disk."""
    options: dict[str, Any] = {"tier": "nvme", "param_tier": "cpu", "accumulation": accumulation}
    options["tuning"] = Tuning(chunk="256KiB", tile=512, late=late)
    memory, reference = planned_memory_for(use, share, **options), NumpyAdam(accumulation)
    prepared = {"prepare": reference.watch, "each_step": reference.step}
    run = train(use, path=tmp_path / "run", device_memory=memory, cpu_memory="8MiB", **prepared, **options)
    reference.assert_same_bits(run)
    there, chunks = run.stats["device_chunks"], run.stats["chunks"]
    assert run.stats["peak_device_bytes"] <= memory
    assert 0 < there < chunks
    assert (there > chunks / 2) is not late or share < 1, "most chunks are of experts"


@pytest.mark.parametrize(
    ("tier", "before", "after"), [("cpu", 0.0, 1 / 2), ("nvme", 1 / 2, 1 / 7), ("cpu", 1.0, 0.0), ("nvme", 1 / 7, 1.0)]
)
def test_another_share_resumes(tier: str, before: float, after: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tier": tier, "path": tmp_path / "run", "commit_every": 0, "tuning": SMALL}

    def commit_at_8(optimizer: OffloadZero) -> None:
        if optimizer.stats()["step"] == 8:
            optimizer.commit()

    first = train("mlp", device_memory=memory_for("mlp", before), each_step=commit_at_8, **options)
    require_share(first, before, memory_for("mlp", before))
    x = train("mlp", steps=0, device_memory=memory_for("mlp", after), resume=True, **options)
    require_share(x, after, memory_for("mlp", after))
    require_values(x, in_ram("mlp", steps=8))


@pytest.mark.parametrize("activations", [None, "cpu"])
def test_a_share_beside_frozen_units_that_stream(activations: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tuning": SMALL, "activation_tier": activations}
    if activations is not None:
        options["activation_memory"] = "64KiB"
    memory = (96 << 10) + scratch_bytes(1)
    run = train("adapted", path=tmp_path / "run", param_tier="cpu", device_memory=memory, **options)
    assert run.stats["device_chunks"] > 0
    assert run.stats["peak_device_bytes"] <= memory
    run.assert_same_bits(in_ram("adapted"))


def require_values(run: Run, expected: Run) -> None:
    assert run.steps == expected.steps
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in run.tensors.items())


@pytest.mark.parametrize("param_tiers", [("cpu", "device"), ("device", "cpu")], ids=["then resident", "then streamed"])
def test_another_tier_of_parameters_resumes_a_share(param_tiers: tuple[str, str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "run", "commit_every": 4, "cpu_memory": "400KiB", "tuning": SMALL}
    options["device_memory"] = memory_for("mlp", 1 / 2) + (48 << 10)
    before, after = param_tiers
    first = train("mlp", steps=8, param_tier=before, **options)
    other = train("mlp", steps=0, param_tier=after, resume=True, **options)
    assert all(0 < run.stats["device_chunks"] < run.stats["chunks"] for run in (first, other))
    require_values(other, in_ram("mlp", steps=8))
