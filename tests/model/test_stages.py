"""Partitions and buckets: every element in exactly one place, in an order that all ranks share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StateError
from offload.layout import ALIGN_NUMEL, Layout, ParamSpec, build, pieces_between
from offload.ranks.buckets import Buckets, cut_buckets
from tests.test_layout import specs

ranks_st = st.integers(1, 5)
bucket_numels = st.one_of(st.integers(1, 700), st.sampled_from([1024, 4096, 1 << 20]))


def model(*numels: int, ranks: int = 1) -> Layout:
    specs = [ParamSpec(f"p{n}", numel, "", torch.bfloat16, 0) for n, numel in enumerate(numels)]
    return build(specs, 1 << 20, ranks=ranks)


@given(numel=st.integers(0, 10_000), ranks=st.integers(2, 20))
def test_shards_are_equal_contiguous_and_cover_the_flat(numel: int, ranks: int) -> None:
    layout = model(numel, ranks=ranks)
    shard_numel = layout.shard_numel(0)
    assert shard_numel % ALIGN_NUMEL == 0
    assert layout.padded_numel(0) == shard_numel * ranks
    assert 0 <= layout.padded_numel(0) - numel < ranks * ALIGN_NUMEL
    ranges = [layout.shard_range(0, rank) for rank in range(ranks)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(range(numel))
    for rank, (start, stop) in enumerate(ranges):
        assert start <= stop
        assert start == stop or start == rank * shard_numel


@given(specs=specs, ranks=ranks_st)
def test_every_element_is_in_one_ranks_shard(specs: list[ParamSpec], ranks: int) -> None:
    layout = build(specs, 1 << 20, ranks=ranks)
    found = []
    for flat in layout.flats:
        shard_numel = layout.shard_numel(flat.index)
        for rank in range(ranks):
            for piece in pieces_between(flat, layout.specs, *layout.shard_range(flat.index, rank)):
                assert piece.chunk_offset + piece.numel <= shard_numel
                _, offset = layout.locations[piece.param]
                assert offset + piece.param_offset == rank * shard_numel + piece.chunk_offset
                found += [(piece.param, piece.param_offset + i) for i in range(piece.numel)]
    assert sorted(found) == [(param, i) for param, spec in enumerate(specs) for i in range(spec.numel)]


# Buckets.


@given(specs=specs, ranks=ranks_st, bucket_numel=bucket_numels, there=st.sets(st.integers(0, 20)))
def test_every_element_is_in_one_bucket_at_its_owners_place(
    specs: list[ParamSpec], ranks: int, bucket_numel: int, there: set[int]
) -> None:
    layout = build(specs, 1 << 20, ranks=ranks)
    found = []
    for bucket in cut_buckets(layout, bucket_numel, there):
        assert len({one.within.flat in there for one in bucket.ranges}) == 1
        assert 0 < bucket.numel <= max(bucket_numel // ranks, ALIGN_NUMEL)
        assert len({layout.flats[one.within.flat].dtype for one in bucket.ranges}) == 1
        assert bucket.params == {piece.param for piece in bucket.pieces}
        inside = [(one, place) for one in bucket.ranges for place in range(one.numel)]
        assert len(inside) == bucket.numel
        for piece in bucket.pieces:
            flat, offset = layout.locations[piece.param]
            for i in (0, piece.numel - 1):
                owner, at = divmod(piece.chunk_offset + i, bucket.numel)
                one, place = inside[at]
                assert one.within.flat == flat
                assert offset + piece.param_offset + i == owner * layout.shard_numel(flat) + one.start + place
            found += [(piece.param, piece.param_offset + i) for i in range(piece.numel)]
    assert sorted(found) == [(param, i) for param, spec in enumerate(specs) for i in range(spec.numel)]


@given(specs=specs, ranks=ranks_st, bucket_numel=bucket_numels)
def test_pieces_and_holes_fill_a_buckets_buffer(specs: list[ParamSpec], ranks: int, bucket_numel: int) -> None:
    layout = build(specs, 1 << 20, ranks=ranks)
    for bucket in cut_buckets(layout, bucket_numel):
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
)
def test_buckets_leave_complete_and_in_one_order_whatever_arrives_when(
    specs: list[ParamSpec], ranks: int, bucket_numel: int, random: object
) -> None:
    cut = cut_buckets(build(specs, 1 << 20, ranks=ranks), bucket_numel)
    buckets = Buckets(cut)
    for _ in range(2):
        buckets.reset()
        params = [param for param in range(len(specs)) if random.random() < 0.8]  # type: ignore[attr-defined]
        random.shuffle(params)  # type: ignore[attr-defined]
        arrived: set[int] = set()
        left: list[int] = []
        for param in params:
            arrived.add(param)
            buckets.ready((param, 0))
            for bucket in buckets.take():
                assert bucket.params <= arrived
                left.append(bucket.index)
            following = cut[len(left) :]
            assert not following or not following[0].params <= arrived, "a complete bucket was held back"
        left += [bucket.index for bucket in buckets.take_all()]
        assert left == list(range(len(cut)))
        assert list(buckets.take_all()) == []


def test_a_bucket_needs_all_its_parameters_of_all_partitions() -> None:
    # A flat of 228: shards of 128, and the second parameter begins in the first one.
    cut = cut_buckets(model(100, 100, ranks=2), 1 << 20)
    assert [bucket.params for bucket in cut] == [frozenset({0, 1})]
    assert [(piece.param, piece.chunk_offset, piece.numel) for piece in cut[0].pieces] == [(0, 0, 100), (1, 128, 100)]
    assert cut[0].holes == ((100, 128), (228, 256))
    buckets = Buckets(cut)
    buckets.ready((1, 0))
    assert list(buckets.take()) == []
    buckets.ready((0, 0))
    assert list(buckets.take()) == [cut[0]]


def test_small_flat_parameters_of_one_dtype_share_buckets_in_the_order_of_backward() -> None:
    specs = [
        ParamSpec(f"{unit}.{name}", numel, unit, dtype, 0)
        for unit in ("", "first", "second", "large")
        for name, numel, dtype in (("norm", 64, torch.float32), ("w", 1000 if unit == "large" else 100, torch.bfloat16))
    ]
    layout = build(specs, 1 << 20, ranks=2)
    found = [
        [(one.within.unit, layout.flats[one.within.flat].dtype, one.start, one.numel) for one in bucket.ranges]
        for bucket in cut_buckets(layout, 512)
    ]
    half, full = torch.bfloat16, torch.float32
    assert found == [
        [("large", half, 256, 256)],
        [("large", half, 0, 256)],
        [("second", half, 0, 64), ("first", half, 0, 64), ("", half, 0, 64)],
        [("large", full, 0, 64), ("second", full, 0, 64), ("first", full, 0, 64), ("", full, 0, 64)],
    ]


def test_a_gradient_that_arrives_twice_in_a_step_is_a_mistake_here() -> None:
    buckets = Buckets(cut_buckets(model(10), 64))
    buckets.ready((0, 0))
    with pytest.raises(StateError, match="tile 0 of parameter 0 arrived twice"):
        buckets.ready((0, 0))
    buckets.reset()
    buckets.ready((0, 0))
