"""The gradient buffers by themselves: in RAM and in slots, of one rank and of several, the same sums and bits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.errors import AccumulationError
from offload.grads.base import GradientBuffer
from offload.grads.local import LocalGradients
from offload.grads.reduce_scatter import ReducedGradients
from offload.grads.shards import gradient_slot_arrays, open_shards
from offload.layout import Layout
from offload.ranks.communicator import Communicator, SingleProcess
from offload.sizes import SUM_BLOCK
from tests.support.late_copier import LateCopier
from tests.support.runs import Twins, layout_of, run_of, store_in_ram

NUMELS = (3 * SUM_BLOCK + 5, 100, 7, SUM_BLOCK)
"""Over several blocks and chunks, and several in one chunk."""


def gradients_of(layout: Layout, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.numel, generator=generator).to(spec.dtype) for spec in layout.specs]


def buffer_of(
    kind: str, accumulation: int = 1, comm: Communicator | None = None, **options: object
) -> tuple[GradientBuffer, Layout]:
    """Args: kind: "local" or "reduced", then "in slots" if they are."""
    is_local, is_stored = kind.startswith("local"), kind.endswith("in slots")
    layout = layout_of(NUMELS, ranks=1 if is_local else 2)
    given = {"tier": "nvme", "path": ".", "grad_tier": "nvme"} if is_stored else {"tier": "cpu"}
    run = run_of(layout, comm or (None if is_local else Twins()), accumulation=accumulation, **given, **options)
    store = store_in_ram(run, gradient_slot_arrays(layout, accumulation)) if is_stored else None
    shards = open_shards(run, accumulation, store)
    return (LocalGradients if is_local else ReducedGradients)(run, run.choice.grads, shards), layout


KINDS = ("local", "local in slots", "reduced", "reduced in slots")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_held_as_it_was_made(kind: str) -> None:
    buffer, layout = buffer_of(kind)
    grads = gradients_of(layout, 1)
    for param in reversed(range(len(grads))):
        assert not buffer.has(param)
        buffer.accumulate(param, grads[param])
        assert buffer.has(param)
    params = list(range(len(grads)))
    assert buffer.finalize(params) == params
    for param, grad in enumerate(grads):
        first, last = layout.param_shard_range(param)
        assert torch.equal(buffer.values(param), grad[first:last])
    for chunk in layout.chunks:
        with buffer.shard(chunk.index) as values:
            for piece in chunk.pieces:
                held = values[piece.chunk_offset : piece.chunk_offset + piece.numel]
                assert torch.equal(held, grads[piece.param][piece.param_offset : piece.param_offset + piece.numel])


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_summed_in_fp32_in_their_order(kind: str) -> None:
    buffer, layout = buffer_of(kind, accumulation=3)
    expected = [torch.zeros(spec.numel) for spec in layout.specs]
    for seed in range(3):
        for param, grad in reversed(list(enumerate(gradients_of(layout, seed)))):
            buffer.accumulate(param, grad)
            expected[param] += grad
    buffer.finalize(range(len(NUMELS)))
    for param, total in enumerate(expected):
        first, last = layout.param_shard_range(param)
        assert torch.equal(buffer.values(param), total[first:last])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["local", "reduced"])
def test_norms_have_the_same_bits_in_ram_and_in_slots(kind: str, accumulation: int) -> None:
    found = []
    for where in (kind, f"{kind} in slots"):
        buffer, layout = buffer_of(where, accumulation)
        for seed in range(accumulation):
            for param, grad in reversed(list(enumerate(gradients_of(layout, seed)))):
                buffer.accumulate(param, grad)
        params = range(len(NUMELS))
        buffer.finalize(params)
        found.append((buffer.norm(params), buffer.norms(params), buffer.norms(params, math.inf)))
        values = [buffer.values(param).double() for param in params]
        # Both twins hold the shards of rank 0.
        whole = math.sqrt((1 if kind == "local" else 2) * sum(float((x * x).sum()) for x in values))
        assert found[-1][0] == pytest.approx(whole, rel=1e-12)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_gradient_too_many_is_refused(kind: str) -> None:
    buffer, layout = buffer_of(kind)
    grads = gradients_of(layout, 1)
    buffer.accumulate(2, grads[2])
    with pytest.raises(AccumulationError, match="p2 got its gradient a 2nd time"):
        buffer.accumulate(2, grads[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_is_found_and_named(kind: str) -> None:
    buffer, layout = buffer_of(kind)
    grads = gradients_of(layout, 1)
    grads[0][17] = math.nan
    for param in reversed(range(len(grads))):
        buffer.accumulate(param, grads[param])
    params = buffer.finalize(range(len(grads)))
    assert buffer.not_finite(params) == [0]
    assert not math.isfinite(buffer.norm(params))
    assert math.isfinite(buffer.norm([param for param in params if param]))


@pytest.mark.parametrize("kind", ["local", "local in slots"])
def test_what_is_written_replaces_values_and_sums(kind: str) -> None:
    buffer, layout = buffer_of(kind)
    for param, grad in enumerate(gradients_of(layout, 1)):
        buffer.accumulate(param, grad)
    buffer.finalize([0])
    buffer.write(0, torch.ones(NUMELS[0], dtype=torch.bfloat16))
    assert buffer.norm([0]) == math.sqrt(NUMELS[0])
    assert torch.equal(buffer.values(0), torch.ones(NUMELS[0], dtype=torch.bfloat16))


def test_a_cleared_gradient_is_replaced_by_the_next() -> None:
    buffer, layout = buffer_of("local", accumulation=2)
    first, second = gradients_of(layout, 1)[1], gradients_of(layout, 2)[1]
    buffer.accumulate(1, first)
    buffer.clear(1)
    buffer.accumulate(1, second)
    buffer.finalize([1])
    assert torch.equal(buffer.values(1), second.float())


class _Slow(LateCopier):
    """Whose copies take a while."""

    def hurry(self, waited: object) -> None:
        time.sleep(0.02)
        super().hurry(waited)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["reset", "close"])
def test_no_copy_of_a_gradient_is_under_way_after(end: str) -> None:
    """The memory that it writes to is about to be freed, or to hold other gradients."""
    copier = _Slow()
    buffer, layout = buffer_of("local", copier=copier)
    for param, grad in enumerate(gradients_of(layout, 1)):
        buffer.accumulate(param, grad)
    getattr(buffer, end)()
    assert copier.copies == 1  # they left together
    assert all(copy.done() for copy in copier._late)
    buffer.close()


class Asked(SingleProcess):
    """Counts how often a norm is computed. Args: size: as many tensor-parallel ranks."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.slices, self.times = SingleProcess(), 0
        self.slices.size = size
        self.slices.exact_sum = self._exact_sum  # type: ignore[method-assign]

    @property
    def everyone(self) -> Communicator:
        return self.slices

    def _exact_sum(self, values: Iterable[float]) -> float:
        self.times += 1
        return math.fsum(values)


@pytest.mark.parametrize("kind", ["local", "local in slots"])
def test_a_norm_is_computed_once_and_again_when_a_gradient_changes(kind: str) -> None:
    comm = Asked()
    buffer, layout = buffer_of(kind, comm=comm)
    grads, params = gradients_of(layout, 1), list(range(len(NUMELS)))
    for param in params:
        buffer.accumulate(param, grads[param])
    buffer.finalize(params)

    def expected() -> float:
        return float(np.linalg.norm(torch.cat(grads).double().numpy()))

    for changed in [None, *params]:
        if changed is not None:
            grads[changed] = grads[changed] * 3
            buffer.write(changed, grads[changed].clone())
        assert [buffer.norm(params), buffer.norm(params)] == pytest.approx([expected()] * 2, rel=1e-12)
        assert buffer.norm([0]) == pytest.approx(grads[0].double().norm().item(), rel=1e-12)
    buffer.clear_all()
    for param in params:
        grads[param] = grads[param] + 1
        buffer.accumulate(param, grads[param])
    buffer.finalize(params)
    assert buffer.norm(params) == pytest.approx(expected(), rel=1e-12)
    assert comm.times == 2 * (1 + len(params)) + 1


def test_tensor_parallel_ranks_ask_one_another_each_time() -> None:
    """One that has written to a gradient has to ask again: the other one, which has not, has to answer."""
    comm = Asked(2)
    buffer, layout = buffer_of("local", comm=comm)
    buffer.accumulate(0, gradients_of(layout, 1)[0])
    buffer.finalize([0])
    assert buffer.norm([0]) == buffer.norm([0])
    assert comm.times == 2
