"""Partitions and buckets: every element in exactly one place, in an order that all ranks share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.dist.partition import Buckets, cut_buckets, split, splits_of
from offload.errors import ConfigError, StateError
from offload.layout import ALIGN_NUMEL, Layout, ParamSpec, build
from tests.support.zero_stages import (
    KINDS,
    STATE_KINDS,
    device_bytes,
    held_bytes,
    partition_of,
    sharded_at,
    total_held,
)
from tests.test_layout import specs

ranks_st = st.integers(1, 5)
bucket_numels = st.one_of(st.integers(1, 700), st.sampled_from([1024, 4096, 1 << 20]))


def model(*numels: int, unit: str = "") -> Layout:
    return build([ParamSpec(f"p{n}", numel, unit, torch.bfloat16, 0) for n, numel in enumerate(numels)], 1 << 20)


@given(numel=st.integers(0, 10_000), ranks=st.integers(1, 20), align=st.sampled_from([1, 2, 64, 1000]))
def test_partitions_are_equal_contiguous_and_cover_the_flat(numel: int, ranks: int, align: int) -> None:
    cut = split(numel, ranks, align)
    assert cut.shard_numel % align == 0
    assert cut.padded_numel == cut.shard_numel * ranks
    assert 0 <= cut.padded_numel - numel < ranks * align
    ranges = [cut.range_of(rank) for rank in range(ranks)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(range(numel))
    for rank, (start, stop) in enumerate(ranges):
        assert start <= stop
        assert start == stop or start == rank * cut.shard_numel


@given(specs=specs, ranks=ranks_st)
def test_every_element_is_in_one_ranks_partition(specs: list[ParamSpec], ranks: int) -> None:
    layout = build(specs, 1 << 20)
    found = []
    for flat, cut in enumerate(splits_of(layout, ranks)):
        for rank in range(ranks):
            for piece in partition_of(layout, flat, cut, rank):
                assert piece.chunk_offset + piece.numel <= cut.shard_numel
                _, offset = layout.locations[piece.param]
                assert offset + piece.param_offset == rank * cut.shard_numel + piece.chunk_offset
                found += [(piece.param, piece.param_offset + i) for i in range(piece.numel)]
    assert sorted(found) == [(param, i) for param, spec in enumerate(specs) for i in range(spec.numel)]


# Bytes.


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_bytes_a_rank_are_the_papers_formulas(ranks: int) -> None:
    psi = 64 * 192  # a multiple of every number of ranks here: no padding
    cut = split(psi, ranks, align=1)
    held = [held_bytes(cut, stage) for stage in (0, 1, 2, 3)]
    assert [sum(each.values()) for each in held] == [
        16 * psi,
        4 * psi + 12 * psi // ranks,
        2 * psi + 14 * psi // ranks,
        16 * psi // ranks,
    ]
    assert held[1] == {"param": 2 * psi, "grad": 2 * psi} | dict.fromkeys(STATE_KINDS, 4 * psi // ranks)
    offloaded = [sum(held[stage].values()) - device_bytes(held[stage], sharded_at(stage)) for stage in (1, 2, 3)]
    assert offloaded == [12 * psi // ranks, 14 * psi // ranks, 16 * psi // ranks]
    assert device_bytes(held[3], sharded_at(3), in_flight=100) == 100
    for stage, extra in ((0, 2 * psi), (1, 2 * psi), (2, 2 * psi // ranks), (3, 2 * psi // ranks)):
        more = held_bytes(cut, stage, accumulated=True)
        assert sum(more.values()) - sum(held[stage].values()) == extra


@given(specs=specs, ranks=ranks_st, stage=st.sampled_from([0, 1, 2, 3]), accumulated=st.booleans())
def test_bytes_of_a_model_are_the_formulas_within_padding(
    specs: list[ParamSpec], ranks: int, stage: int, accumulated: bool
) -> None:
    layout = build(specs, 1 << 20)
    held = total_held(layout, ranks, stage, accumulated=accumulated)
    assert tuple(held) == KINDS
    gaps = sum(flat.numel - sum(specs[p].numel for p in flat.params) for flat in layout.flats)
    extra = gaps + sum(cut.padded_numel - cut.numel for cut in splits_of(layout, ranks))
    for kind, size in held.items():
        share = ranks if kind in sharded_at(stage) else 1
        itemsizes = {"param": [spec.dtype.itemsize for spec in specs]}
        itemsizes["grad"] = [4] * len(specs) if accumulated else itemsizes["param"]
        sizes = itemsizes.get(kind, [4] * len(specs))
        exact = sum(spec.numel * size for spec, size in zip(specs, sizes, strict=True))
        assert exact <= size * share <= exact + 4 * extra


def test_an_unknown_stage_or_no_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage=4: give 0, 1, 2 or 3"):
        held_bytes(split(10, 1), 4)
    with pytest.raises(ConfigError, match="ranks=0"):
        split(10, 0)


# Buckets.


@given(specs=specs, ranks=ranks_st, bucket_numel=bucket_numels)
def test_every_element_is_in_one_bucket_at_its_owners_place(
    specs: list[ParamSpec], ranks: int, bucket_numel: int
) -> None:
    layout = build(specs, 1 << 20)
    splits = splits_of(layout, ranks)
    found = []
    for bucket in cut_buckets(layout, splits, bucket_numel):
        cut = splits[bucket.flat]
        assert 0 < bucket.numel <= max(bucket_numel // ranks, ALIGN_NUMEL)
        assert bucket.start + bucket.numel <= cut.shard_numel
        for piece in bucket.pieces:
            flat, offset = layout.locations[piece.param]
            assert flat == bucket.flat
            for i in (0, piece.numel - 1):
                owner, place = divmod(piece.chunk_offset + i, bucket.numel)
                assert offset + piece.param_offset + i == owner * cut.shard_numel + bucket.start + place
            found += [(piece.param, piece.param_offset + i) for i in range(piece.numel)]
    assert sorted(found) == [(param, i) for param, spec in enumerate(specs) for i in range(spec.numel)]


@given(specs=specs, ranks=ranks_st, bucket_numel=bucket_numels)
def test_pieces_and_holes_fill_a_buckets_buffer(specs: list[ParamSpec], ranks: int, bucket_numel: int) -> None:
    layout = build(specs, 1 << 20)
    for bucket in cut_buckets(layout, splits_of(layout, ranks), bucket_numel):
        parts = [(piece.chunk_offset, piece.chunk_offset + piece.numel) for piece in bucket.pieces]
        end = 0
        for start, stop in sorted([*parts, *bucket.holes]):
            assert start == end < stop
            end = stop
        assert end == ranks * bucket.numel


@given(
    specs=specs,
    ranks=ranks_st,
    bucket_numel=bucket_numels,
    random=st.randoms(use_true_random=False),
    given_order=st.booleans(),
)
def test_buckets_leave_complete_and_in_one_order_whatever_arrives_when(
    specs: list[ParamSpec], ranks: int, bucket_numel: int, random: object, given_order: bool
) -> None:
    layout = build(specs, 1 << 20)
    cut = cut_buckets(layout, splits_of(layout, ranks), bucket_numel)
    order = list(range(len(cut)))
    if given_order:
        random.shuffle(order)  # type: ignore[attr-defined]
    else:
        order.reverse()
    buckets = Buckets(cut, order if given_order else None)
    for _ in range(2):
        buckets.reset()
        params = [param for param in range(len(specs)) if random.random() < 0.8]  # type: ignore[attr-defined]
        random.shuffle(params)  # type: ignore[attr-defined]
        arrived: set[int] = set()
        left: list[int] = []
        for param in params:
            arrived.add(param)
            for bucket in buckets.ready(param):
                assert bucket.params <= arrived
                left.append(bucket.index)
            following = order[len(left) :]
            assert not following or not cut[following[0]].params <= arrived, "a complete bucket was held back"
        left += [bucket.index for bucket in buckets.flush()]
        assert left == order
        assert buckets.flush() == []


def test_a_bucket_needs_all_its_parameters_of_all_partitions() -> None:
    layout = model(100, 100)  # flat of 228: partitions of 128, the second parameter begins in the first one
    cut = cut_buckets(layout, splits_of(layout, 2), 1 << 20)
    assert [bucket.params for bucket in cut] == [frozenset({0, 1})]
    assert [(piece.param, piece.chunk_offset, piece.numel) for piece in cut[0].pieces] == [(0, 0, 100), (1, 128, 100)]
    assert cut[0].holes == ((100, 128), (228, 256))
    buckets = Buckets(cut)
    assert buckets.ready(1) == []
    assert buckets.ready(0) == [cut[0]]


def test_a_gradient_that_arrives_twice_in_a_step_is_a_mistake_here() -> None:
    buckets = Buckets(cut_buckets(model(10), splits_of(model(10), 1), 64))
    buckets.ready(0)
    with pytest.raises(StateError, match="parameter 0 arrived twice"):
        buckets.ready(0)
    buckets.reset()
    buckets.ready(0)


def test_an_order_that_leaves_a_bucket_out_is_refused() -> None:
    cut = cut_buckets(model(640), splits_of(model(640), 1), 64)
    with pytest.raises(ValueError, match="is no order of 10 buckets"):
        Buckets(cut, [0, 0, 1])
