"""The layout: every element in exactly one place, whatever the shapes, groups, units and chunk sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from offload.layout import ALIGN_NUMEL, Layout, ParamSpec, Whole, build, segments
from offload.optim.flops import newton_schulz_flops
from offload.optim.rule import spans_of
from offload.sizes import SUM_BLOCK

DTYPES = (torch.bfloat16, torch.float32)

specs = st.lists(
    st.builds(
        ParamSpec,
        name=st.text(max_size=3),
        numel=st.one_of(st.integers(0, 3), st.integers(0, 5000), st.sampled_from([4095, 4096, 4097, 64, 63, 65])),
        unit=st.sampled_from(["", "blocks.0", "blocks.1"]),
        dtype=st.sampled_from(DTYPES),
        group=st.integers(0, 2),
    ),
    max_size=12,
)
chunk_numels = st.one_of(st.integers(1, 200), st.sampled_from([1024, 1031, 4096, 1 << 20]))


def places_by_chunk(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(param, element, flat, position in the flat) of every element, found through chunks and pieces."""
    return [
        (piece.param, piece.param_offset + i, chunk.flat, chunk.start + piece.chunk_offset + i)
        for chunk in layout.chunks
        for piece in chunk.pieces
        for i in range(piece.numel)
    ]


@given(specs=specs, chunk_numel=chunk_numels)
def test_every_element_lies_in_exactly_one_place(specs: list[ParamSpec], chunk_numel: int) -> None:
    layout = build(specs, chunk_numel)
    found = places_by_chunk(layout)
    elements = [(param, element) for param, element, _, _ in found]
    assert len(elements) == len(set(elements)) == layout.numel == sum(spec.numel for spec in specs)
    positions = [(flat, position) for _, _, flat, position in found]
    assert len(positions) == len(set(positions))
    for param, element, flat, position in found:
        assert layout.locations[param] == (flat, position - element)


@given(specs=specs, chunk_numel=chunk_numels)
def test_a_flat_is_of_one_unit_and_dtype_and_its_parameters_are_aligned(
    specs: list[ParamSpec], chunk_numel: int
) -> None:
    layout = build(specs, chunk_numel)
    assert len({(flat.unit, flat.dtype) for flat in layout.flats}) == len(layout.flats)
    assert sorted(param for flat in layout.flats for param in flat.params) == list(range(len(specs)))
    for flat in layout.flats:
        assert list(flat.params) == sorted(flat.params)
        for param, offset in zip(flat.params, flat.offsets, strict=True):
            assert (specs[param].unit, specs[param].dtype) == (flat.unit, flat.dtype)
            assert offset % ALIGN_NUMEL == 0
            assert offset + specs[param].numel <= flat.numel


@given(specs=specs, chunk_numel=chunk_numels)
def test_chunks_are_slices_in_order(specs: list[ParamSpec], chunk_numel: int) -> None:
    layout = build(specs, chunk_numel)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    for chunk in layout.chunks:
        assert 0 < chunk.numel <= chunk_numel
        stop, limit = chunk.start + chunk.numel, min(chunk.start + chunk_numel, layout.flats[chunk.flat].numel)
        if chunk_numel < SUM_BLOCK:
            assert stop == limit
        elif stop < limit:  # constant but for the end of a block
            flat, last = layout.flats[chunk.flat], chunk.pieces[-1]
            assert limit - stop < SUM_BLOCK
            assert stop in flat.offsets or (last.param_offset + last.numel) % SUM_BLOCK == 0
        assert chunk.pieces
    for param in range(len(specs)):
        through = [c.index for c in layout.chunks if any(piece.param == param for piece in c.pieces)]
        assert list(layout.chunks_of[param]) == through


@given(specs=specs, chunk_numel=chunk_numels, data=st.data())
def test_segments_cover_what_has_a_key_and_nothing_else(
    specs: list[ParamSpec], chunk_numel: int, data: st.DataObject
) -> None:
    layout = build(specs, chunk_numel)
    keys = [data.draw(st.sampled_from([None, "a", "b"])) for _ in specs]
    for chunk in layout.chunks:
        found = segments(chunk, lambda param: keys[param])
        assert all(a.stop <= b.start for a, b in itertools.pairwise(found))
        for piece in chunk.pieces:
            covering = [
                s.key for s in found if s.start < piece.chunk_offset + piece.numel and s.stop > piece.chunk_offset
            ]
            assert covering == ([] if keys[piece.param] is None else [keys[piece.param]])
            whole = [s for s in found if s.start <= piece.chunk_offset and s.stop >= piece.chunk_offset + piece.numel]
            assert len(whole) == (keys[piece.param] is not None)


def test_chunks_do_not_depend_on_the_order_of_units_given() -> None:
    one = ParamSpec("a", 10, "blocks.0", torch.bfloat16, 0)
    two = ParamSpec("b", 10, "blocks.1", torch.bfloat16, 0)
    root = ParamSpec("c", 10, "", torch.bfloat16, 0)
    layout = build([root, one, two, root], 1024)
    assert [flat.unit for flat in layout.flats] == ["", "blocks.0", "blocks.1"]
    assert layout.flats[0].params == (0, 3)


def test_an_element_larger_than_any_chunk_is_split() -> None:
    layout = build([ParamSpec("a", 10_007, "", torch.bfloat16, 0)], 1024)
    assert [chunk.numel for chunk in layout.chunks] == [1024] * 9 + [791]


@given(
    numels=st.lists(st.integers(1, 5 * SUM_BLOCK), min_size=1, max_size=6),
    chunk_numel=st.integers(SUM_BLOCK, 4 * SUM_BLOCK),
)
def test_no_block_of_a_sum_of_squares_lies_in_two_chunks(numels: list[int], chunk_numel: int) -> None:
    layout = build([ParamSpec(str(n), numel, "", torch.bfloat16, 0) for n, numel in enumerate(numels)], chunk_numel)
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            end = piece.param_offset + piece.numel
            assert piece.param_offset % SUM_BLOCK == 0
            assert end % SUM_BLOCK == 0 or end == numels[piece.param]


def test_no_parameters_make_no_chunks() -> None:
    assert build([], 1024).chunks == ()
    assert build([ParamSpec("empty", 0, "", torch.bfloat16, 0)], 1024).chunks == ()


@given(specs=specs, chunk_numel=chunk_numels, frozen=st.sets(st.integers(0, 11)), replicas=st.sampled_from([1, 2, 4]))
def test_parameters_that_a_rank_keeps_are_numbered_through(
    specs: list[ParamSpec], chunk_numel: int, frozen: set[int], replicas: int
) -> None:
    marked = [replace(spec, group=None if number in frozen else 0) for number, spec in enumerate(specs)]
    layout = build(sorted(marked, key=lambda spec: spec.is_frozen), chunk_numel, ranks=4, rank=1, replicas=replicas)
    assert [chunk.index for chunk in layout.param_chunks] == [*range(len(layout.param_chunks))]
    are_frozen = [layout.flats[chunk.flat].is_frozen for chunk in layout.param_chunks]
    assert are_frozen == sorted(are_frozen), "those of trained parameters come first"
    assert layout.trained.param_chunks == layout.param_chunks[: are_frozen.count(False)]
    assert all(layout.specs[piece.param].group is not None for chunk in layout.chunks for piece in chunk.pieces)


@given(
    numels=st.lists(st.one_of(st.integers(0, 500), st.sampled_from([64, 4096, 9973])), max_size=9),
    chunk_numel=chunk_numels,
    ranks=st.integers(1, 5),
)
def test_a_whole_parameter_lies_in_one_chunk_of_one_rank(numels: list[int], chunk_numel: int, ranks: int) -> None:
    specs = [
        ParamSpec(str(n), numel, f"unit{n // 4}", torch.bfloat16, 0, whole=Whole((numel,)))
        for n, numel in enumerate(numels)
    ]
    layouts = [build(specs, chunk_numel, ranks=ranks, rank=rank) for rank in range(ranks)]
    held: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
    for rank, layout in enumerate(layouts):
        assert layout.flats == layouts[0].flats
        taken: list[tuple[int, int, int]] = []
        for chunk in layout.chunks:
            low, high = layout.shard_range(chunk.flat, rank)
            assert low <= chunk.start < chunk.start + chunk.numel <= high
            assert chunk.numel <= chunk_numel or len(chunk.pieces) == 1
            taken.append((chunk.flat, chunk.start, chunk.start + chunk.numel))
            for piece in chunk.pieces:
                assert (piece.param_offset, piece.numel) == (0, numels[piece.param])
                assert (chunk.start + piece.chunk_offset) % ALIGN_NUMEL == 0
                held[piece.param] += 1
        taken.sort()
        assert all(one[:1] != other[:1] or one[2] <= other[1] for one, other in itertools.pairwise(taken))
    assert held == {param: int(numel > 0) for param, numel in enumerate(numels)}


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 90), st.sampled_from([1, 37, 64, 128])), max_size=5),
    chunk_numel=st.one_of(chunk_numels, st.integers(SUM_BLOCK, 2 * SUM_BLOCK)),
    ranks=st.integers(1, 3),
)
@example([(9, 90, 128)], SUM_BLOCK, 1)
def test_slices_that_are_stepped_by_themselves_are_not_cut(
    shapes: list[tuple[int, int, int]], chunk_numel: int, ranks: int
) -> None:
    numels = [math.prod(shape) for shape in shapes]
    specs = [
        ParamSpec(str(n), numel, f"unit{n // 2}", torch.bfloat16, 0, whole=Whole(shape, has_slices=True))
        for n, (numel, shape) in enumerate(zip(numels, shapes, strict=True))
    ]
    seen: list[tuple[int, int]] = []
    for rank in range(ranks):
        layout = build(specs, chunk_numel, ranks=ranks, rank=rank)
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                matrix = math.prod(shapes[piece.param][1:])
                assert piece.param_offset % matrix == piece.numel % matrix == 0
                assert (chunk.start + piece.chunk_offset) % ALIGN_NUMEL == 0
                if ranks == 1 and chunk_numel >= SUM_BLOCK:
                    assert piece.param_offset % SUM_BLOCK == 0
            spans = spans_of(layout, chunk, 0, chunk.numel)
            assert {span.whole for span in spans} <= {Whole((1, *shape[1:])) for shape in shapes}
            matrices = [math.prod(shape[1:]) for shape in shapes]
            inside = [one.param for one in chunk.pieces for _ in range(one.numel // matrices[one.param])]
            seen += [(param, span.offset) for param, span in zip(inside, spans, strict=True)]
            # As few as may be: one more would be one too many.
            least = math.lcm(matrix, SUM_BLOCK if ranks == 1 and chunk_numel >= SUM_BLOCK else ALIGN_NUMEL)
            assert chunk.numel <= chunk_numel or (len(chunk.pieces) == 1 and chunk.numel <= least)
    wanted = [(n, at * math.prod(shape[1:])) for n, shape in enumerate(shapes) for at in range(shape[0])]
    assert sorted(seen) == wanted


BLOCK_OF_8E9 = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *[(4096, 14336)] * 3]
"""The matrices of a block of a model of 8e9 parameters."""


def of_blocks(count: int, flops: Callable[[tuple[int, ...]], float]) -> list[ParamSpec]:
    wholes = [Whole(shape, flops=flops(shape)) for shape in BLOCK_OF_8E9]
    return [
        ParamSpec(f"{block}.{n}", math.prod(whole.shape), f"block{block}", torch.bfloat16, 0, whole=whole)
        for block in range(count)
        for n, whole in enumerate(wholes)
    ]


def test_owners_of_whole_parameters_have_about_as_much() -> None:
    specs = of_blocks(1, lambda shape: 0.0)
    for ranks, most in ((2, 1.08), (3, 1.04), (4, 1.08)):
        layout = build(specs, 1 << 20, ranks=ranks)
        assert layout.padded_numel(0) / sum(spec.numel for spec in specs) < most


@pytest.mark.parametrize(("blocks", "ranks"), [(1, 4), (2, 8), (4, 8), (4, 16), (32, 16), (32, 3)])
@pytest.mark.parametrize("flops", [newton_schulz_flops, lambda shape: 0.0], ids=["known", "unknown"])
def test_owners_over_several_units_have_about_as_much(
    blocks: int, ranks: int, flops: Callable[[tuple[int, ...]], float]
) -> None:
    """A block has fewer matrices than there are ranks: chosen for each block alone, one of 16 has 4.3 of the mean."""
    specs = of_blocks(blocks, flops)
    layouts = [build(specs, 1 << 30, ranks=ranks, rank=rank) for rank in range(ranks)]
    owned = [[specs[piece.param] for chunk in layout.chunks for piece in chunk.pieces] for layout in layouts]
    numels = [sum(spec.numel for spec in mine) for mine in owned]
    costs = [sum(newton_schulz_flops(spec.whole.shape) for spec in mine if spec.whole) for mine in owned]
    assert max(numels) / (sum(numels) / ranks) < 1.1
    assert max(costs) / (sum(costs) / ranks) < 1.1
    # No unit takes more memory for it.
    (alone,) = build(specs[: len(BLOCK_OF_8E9)], 1 << 30, ranks=ranks).flats
    for flat in layouts[0].flats:
        assert layouts[0].padded_numel(flat.index) == alone.numel


def test_owners_are_chosen_by_what_updates_cost_where_bytes_are_equal() -> None:
    """The more square a matrix is, the more an element costs."""
    shapes = [(512, 512), (256, 1024), (128, 2048), (64, 4096)]
    specs = [
        ParamSpec(str(n), 512 * 512, "unit", torch.bfloat16, 0, whole=Whole(shape, flops=newton_schulz_flops(shape)))
        for n, shape in enumerate(shapes)
    ]
    for order in itertools.permutations(specs):
        for rank, wanted in enumerate(([shapes[0], shapes[3]], [shapes[1], shapes[2]])):
            layout = build(order, 1 << 20, ranks=2, rank=rank)
            owned = [layout.specs[piece.param].whole for chunk in layout.chunks for piece in chunk.pieces]
            assert sorted(whole.shape for whole in owned if whole) == sorted(wanted)
