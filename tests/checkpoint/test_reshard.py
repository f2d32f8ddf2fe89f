"""From any layout over any ranks to any other: every element goes where it belongs, once, and nothing else is read."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.checkpoint.manifest import ChunkFacts, Manifest, flats_of, parameters_of
from offload.checkpoint.reshard import copy_ranges
from offload.layout import Layout, ParamSpec, build
from tests.support.committed import manifest_of

DTYPES = (torch.bfloat16, torch.float32)
PARAMS = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from(["", "a", "b"]), st.sampled_from(DTYPES)), min_size=1, max_size=7
)


def layouts(specs: list[ParamSpec], chunk: int, ranks: int) -> list[Layout]:
    return [build(specs, chunk, ranks=ranks, rank=rank) for rank in range(ranks)]


def manifests_of(of_ranks: list[Layout]) -> list[Manifest]:
    found = []
    for layout in of_ranks:
        shapes = [(spec.numel,) for spec in layout.specs]
        chunks = tuple(
            ChunkFacts(chunk.flat, chunk.start, chunk.numel, 0, 0, 7, f"{1:016x}") for chunk in layout.chunks
        )
        made = manifest_of(
            layout.rank,
            layout.ranks,
            parameters=parameters_of(layout, shapes, [(1,)] * len(shapes), [0] * len(shapes)),
            flats=flats_of(layout, [layout.shard_range(flat.index) for flat in layout.flats]),
        )
        found.append(dataclasses.replace(made, chunks=chunks))
    return found


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.randoms(use_true_random=False), *[st.integers(1, 300), st.integers(1, 4)] * 2)
def test_every_element_goes_where_it_belongs_once(
    params: list[tuple[int, str, torch.dtype]], chance: object, chunk: int, ranks: int, other_chunk: int, others: int
) -> None:
    specs = [ParamSpec(f"p{n}", numel, unit, dtype, 0) for n, (numel, unit, dtype) in enumerate(params)]
    before = layouts(specs, chunk, ranks)
    chance.shuffle(before)  # type: ignore[attr-defined]  # ranks own their stretches in any order
    chance.shuffle(specs)  # type: ignore[attr-defined]
    committed = [values(layout) for layout in before]
    for layout in layouts(specs, other_chunk, others):
        found = [torch.full((one.numel,), -1) for one in layout.chunks]
        targets = []
        for (rank, number), those in copy_ranges(manifests_of(before), layout).items():
            targets.append(those[0].target)
            for move in those:
                assert move.numel > 0
                source = committed[rank][number][move.source_start :][: move.numel]
                place = found[move.target][move.target_start :][: move.numel]
                assert place.eq(-1).all()
                place.copy_(source)
        assert targets == sorted(targets)
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, values(layout), strict=True))


def values(layout: Layout) -> list[torch.Tensor]:
    """Of each chunk: which element of which parameter an element is, -1 where it is of none."""
    found = []
    for chunk in layout.chunks:
        line = torch.full((chunk.numel,), -1)
        for piece in chunk.pieces:
            name = int(layout.specs[piece.param].name[1:])
            first = 1000 * name + piece.param_offset
            line[piece.chunk_offset : piece.chunk_offset + piece.numel] = torch.arange(first, first + piece.numel)
        found.append(line)
    return found
