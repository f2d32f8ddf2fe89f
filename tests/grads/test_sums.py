"""Sums over micro-batches and sums of squares by themselves, against NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import native
from offload.grads.sums import SquareSums, spans_of, write_or_add
from offload.layout import Layout, ParamSpec, build
from offload.optim import reference
from offload.sizes import SUM_BLOCK
from tests.support.runs import layout_of, run_of

NUMELS = (100, 2 * SUM_BLOCK + 77, 7, 3 * SUM_BLOCK)


def values_of(layout: Layout, param: int) -> Tensor:
    generator = torch.Generator().manual_seed(param)
    return torch.randn(layout.specs[param].numel, generator=generator).bfloat16()


def sums_of(layout: Layout) -> SquareSums:
    return SquareSums(run_of(layout, tier="nvme", path=".", grad_tier="nvme", stage=2 if layout.ranks > 1 else None))


@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_the_first_micro_batch_replaces_and_the_others_are_added_in_fp32(by: str) -> None:
    kernels = native.load(1) if by == "kernels" else None
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(1000, generator=generator).bfloat16() for _ in range(4)]
    into = torch.full((1000,), float("nan"))
    total = np.zeros(1000, dtype=np.float32)
    for number, batch in enumerate(batches):
        write_or_add(kernels, batch, into, is_first=number == 0)
        total += batch.float().numpy()
    assert np.array_equal(into.numpy(), total)


def test_a_gradient_that_is_no_sum_keeps_its_dtype_and_bits() -> None:
    values = torch.randn(100).bfloat16()
    into = torch.full((100,), float("nan"), dtype=torch.bfloat16)
    write_or_add(native.load(1), values, into, is_first=True)
    assert torch.equal(into, values)


def test_adding_by_torch_is_no_part_of_autograds_graph() -> None:
    into = torch.zeros(3, requires_grad=True)
    with torch.enable_grad():
        write_or_add(None, torch.ones(3), into, is_first=True)
        write_or_add(None, torch.ones(3), into, is_first=False)
    assert into.tolist() == [2, 2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_of_whole_gradients_are_of_blocks_that_are_counted_from_the_parameters_beginning(ranks: int) -> None:
    for rank in range(ranks):
        layout = layout_of(NUMELS, ranks=ranks, rank=rank)
        sums = sums_of(layout)
        for param in range(len(NUMELS)):
            first, last = layout.param_shard_range(param)
            mine = values_of(layout, param)[first:last]
            assert sums.stale(param) == [0]
            sums.sum_tile(param, 0, mine)
            assert sums.stale(param) == []
            expected = reference.sum_squares(mine.float().numpy(), first) if first < last else []
            assert sums.on_cpu()[param][0].tolist() == list(expected)


@pytest.mark.parametrize("seed", range(20))
def test_parts_from_the_end_to_the_beginning_give_the_bits_of_the_whole(seed: int) -> None:
    """As buckets bring them: cuts anywhere, also several in one block, and a block that begins before this rank's."""
    chance = np.random.default_rng(seed)
    ranks = int(chance.integers(2, 4))
    rank = int(chance.integers(ranks))
    layout = layout_of(NUMELS, ranks=ranks, rank=rank)
    sums = sums_of(layout)
    for param in range(len(NUMELS)):
        first, last = layout.param_shard_range(param)
        if first == last:
            continue
        values = values_of(layout, param)
        cuts = sorted({first, last, *chance.integers(first, last, int(chance.integers(0, 6))).tolist()})
        for start, stop in reversed(list(pairwise(cuts))):
            sums.sum_part(param, start, values[start:stop])
        sums.require_whole()
        expected = reference.sum_squares(values[first:last].float().numpy(), first)
        assert sums.on_cpu()[param][0].tolist() == expected.tolist()


def test_the_sums_of_a_gradient_in_slots_are_current_when_all_of_it_has_come() -> None:
    """A trial of a chunk in the middle would else be of a gradient that is about to change."""
    layout = layout_of(NUMELS)
    sums, values = sums_of(layout), values_of(layout, 3)
    for start in (2 * SUM_BLOCK, SUM_BLOCK, 0):
        sums.changes(3)
        sums.sum_part(3, start, values[start : start + SUM_BLOCK])
        assert sums.generation(3) is None
    sums.have_come(3, 0)
    assert sums.generation(3) == 3


def test_squares_are_of_the_tiles_that_have_come_since_gradients_were_dropped() -> None:
    layout = build([ParamSpec("p", 10, "p", torch.float32, 0, tile=4)], SUM_BLOCK)
    sums = sums_of(layout)
    for tile, span in enumerate(sums.spans[0]):
        sums.sum_tile(0, tile, torch.ones(span.numel))
    assert sums.squares(0) == 10
    sums.forget_all()
    assert sums.squares(0) == 0
    sums.sum_tile(0, 1, torch.full((4,), 3.0))
    assert sums.squares(0) == 36


def test_blocks_may_come_in_any_order_and_a_tile_counts_its_own() -> None:
    tile = SUM_BLOCK + 192  # no multiple of a block
    specs = [ParamSpec("p", 2 * tile + 50, "p", torch.bfloat16, 0, tile=tile)]
    layout = build(specs, 4 * SUM_BLOCK)
    sums = sums_of(layout)
    values = values_of(layout, 0)
    for start, stop in ((tile + SUM_BLOCK, 2 * tile), (SUM_BLOCK, tile), (2 * tile, 2 * tile + 50), (0, SUM_BLOCK)):
        sums.sum_part(0, start, values[start:stop])
    sums.sum_part(0, tile, values[tile : tile + SUM_BLOCK])
    sums.require_whole()
    for number, (begin, first, stop) in enumerate(spans_of(layout, 0)):
        assert begin == first == number * tile
        expected = reference.sum_squares(values[first:stop].float().numpy(), 0)
        assert sums.on_cpu()[0][number].tolist() == expected.tolist()


def test_a_change_makes_the_sums_of_one_tile_stale_and_a_sum_forgets_norms() -> None:
    layout = build([ParamSpec("p", 10, "p", torch.float32, 0, tile=4)], SUM_BLOCK)
    sums = sums_of(layout)
    for tile, span in enumerate(sums.spans[0]):
        sums.sum_tile(0, tile, torch.ones(span.numel))
    assert sums.stale(0) == []
    assert [one.tolist() for one in sums.on_cpu()[0]] == [[4.0], [4.0], [2.0]]
    norms = sums.norms
    norms[0,] = 1.0
    sums.changes(0, 1)
    assert sums.stale(0) == [1]
    assert sums.norms is norms, "they are still those of the sums"
    sums.sum_tile(0, 1, torch.zeros(4))
    assert sums.stale(0) == []
    assert not sums.norms


def test_a_gradient_that_begins_to_change_while_its_number_is_asked_for_has_the_number_before() -> None:
    """In another thread, say, between any two lines: the number after is that of the new gradient alone."""
    sums = sums_of(layout_of((10,)))
    sums.sum_tile(0, 0, torch.ones(10, dtype=torch.bfloat16))
    before, stale = sums.generation(0), sums.stale

    def changes(param: int) -> list[int]:
        found = stale(param)
        sums.changes(param)
        return found

    sums.stale = changes  # type: ignore[method-assign]
    assert sums.generation(0) == before
    sums.stale = stale  # type: ignore[method-assign]
    assert sums.generation(0) is None
    sums.sum_tile(0, 0, torch.zeros(10, dtype=torch.bfloat16))
    assert sums.generation(0) not in (before, None)


def test_zeros_are_what_has_no_other_elements() -> None:
    """Also where a square is less than any fp32, and where it is NaN."""
    tile, tiles = SUM_BLOCK + 64, 7
    layout = build([ParamSpec("p", tiles * tile - 5, "p", torch.float32, 0, tile)], 1 << 20)
    sums, grad = sums_of(layout), torch.zeros(tiles * tile - 5)
    grad[1 * tile + 3] = -0.0
    grad[2 * tile + 3] = 1e-45
    grad[3 * tile + SUM_BLOCK] = -1e-30
    grad[4 * tile] = float("nan")
    grad[-1] = float("inf")
    for number, span in enumerate(sums.spans[0]):
        sums.sum_tile(0, number, grad[span.first : span.stop])
    tiles_of = [(span.first, span.stop) for span in sums.spans[0]]
    assert sums.are_zeros(0, tiles_of) == [True, True, False, False, False, True, False]
    ends = [(start + SUM_BLOCK, stop) for start, stop in tiles_of]
    assert sums.are_zeros(0, ends) == [True, True, True, False, True, True, False]
    assert sums.are_zeros(0, []) == []


def test_zeros_that_share_a_block_with_others_are_none() -> None:
    """A rank has parts of tiles, one after the other, whose blocks count from the beginning of the parameter."""
    part = SUM_BLOCK + 64
    layout = build([ParamSpec("p", 8 * part, "p", torch.float32, 0, 2 * part)], 1 << 20, ranks=2, rank=1)
    sums, grad = sums_of(layout), torch.zeros(4 * part)
    grad[1 * part - 1] = 1.0
    sums.sum_tile(0, 0, grad)
    parts = [(4 * part + start * part, 4 * part + (start + 1) * part) for start in range(4)]
    assert sums.are_zeros(0, parts) == [False, False, True, True]
