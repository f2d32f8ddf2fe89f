"""What a communicator is without other ranks. See tests/distributed for those with."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.ranks import torch_distributed as comm
from offload.ranks.communicator import SingleProcess, _exact_terms, average
from tests.support.communicators import Late


def test_one_process_is_alone() -> None:
    group = comm.connect()
    assert isinstance(group, SingleProcess)
    assert (group.rank, group.size, group.local_rank, group.ranks_on_node) == (0, 1, 0, 1)


def test_processes_that_nobody_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert comm.connect().size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4, but torch\.distributed is not initialized"):
        comm.connect()


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        comm.connect(object())


@pytest.mark.parametrize(
    ("backends", "device", "fault"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cuda:1", None),
        ("cuda:nccl", "cuda:1", None),
        ("cuda:nccl", "cuda", None),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cuda:0", r"set_device_index\(0\)"),
    ],
)
def test_a_group_has_to_carry_tensors_of_the_models_device(backends: str, device: str, fault: str | None) -> None:
    if fault is None:
        comm.require_backend(backends, torch.device(device), 1)
        return
    with pytest.raises(ConfigError, match=fault):
        comm.require_backend(backends, torch.device(device), 1)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), max_size=50))
def test_exact_terms_lose_nothing(values: list[float]) -> None:
    if not math.isfinite(total := _fsum(values)):
        return
    parts = _exact_terms(values)
    assert len(parts) <= 40
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values))
    assert (parts[0] if parts else 0.0) == total


def _fsum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def test_averages_divide_and_do_not_multiply_with_a_reciprocal() -> None:
    """1/3 is no fp32 number: 3 * (1/3) would be off by an ulp for some sums."""
    sums = torch.arange(1, 100_000, dtype=torch.float32)
    out = torch.empty_like(sums)
    average(torch.stack([sums, torch.zeros_like(sums), torch.zeros_like(sums)]), [out])
    assert torch.equal(out.double(), (sums.double() / 3).float().double())
    assert not torch.equal(out, sums * torch.tensor(1 / 3))


def test_averages_of_bf16_are_rounded_once_at_the_end() -> None:
    parts = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)  # 1 + 2^-8 is a tie: bf16 loses each
    out = torch.empty(1, dtype=torch.bfloat16)
    average(parts, [out])
    assert out.item() == torch.tensor((1 + 2**-7) / 3).bfloat16().item()


def test_alone_casts_and_copies() -> None:
    full = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    out = torch.empty(2)
    SingleProcess().reduce_scatter(full, [out]).wait()
    assert out.tolist() == [1, 3]
    gathered = torch.zeros(2, dtype=torch.bfloat16)
    SingleProcess().all_gather_into_tensor(full, gathered).wait()
    assert torch.equal(gathered, full)
    SingleProcess().all_gather_into_tensor(full, full).wait()
    assert full.tolist() == [1, 3]


def test_the_late_communicator_shows_a_missing_wait() -> None:
    late = Late(SingleProcess())
    first, second = torch.zeros(2), torch.zeros(2)
    one, full = late.reduce_scatter(torch.ones(2), [first]), torch.ones(2)
    two = late.reduce_scatter(full, [second])
    assert first.isnan().all()
    full.fill_(5)  # before it was waited for
    two.wait()
    assert first.tolist() == [1, 1]
    assert second.tolist() == [5, 5]
    assert one.done()
