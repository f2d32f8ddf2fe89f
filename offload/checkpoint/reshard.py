"""From one layout to another: which elements of which committed slot go where. Pure arithmetic.

Parameters are found by their names, so units, their order, chunks, paths and ranks may all be different. The slots are
in the order in which the first chunk that needs them stands, each once: where the order of the parameters is the same,
chunks become complete one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.checkpoint.manifest import Manifest
from offload.layout import Chunk, CopyRange, Layout


@dataclass(frozen=True)
class Extent:
    """Elements `start` to `stop` of a flat, in `chunk` of `rank`."""

    start: int
    stop: int
    rank: int
    chunk: int


def copy_ranges(
    manifests: Sequence[Manifest], layout: Layout, slice_number: int = 0
) -> dict[tuple[int, int], list[CopyRange]]:
    """What of a commit goes where in a layout, by the (rank, chunk) that it is read from.

    Args:
        manifests: the manifests of all ranks that committed, by rank.
        layout: the layout.
        slice_number: the number of the slice of the model that the layout is of.
    """
    ranks = manifests[0].ranks_of(slice_number)
    first = manifests[ranks.start]
    extents = _extents(manifests, ranks)
    starts = [[extent.start for extent in of_flat] for of_flat in extents]
    numbers = {param.name: number for number, param in enumerate(first.parameters)}
    found: defaultdict[tuple[int, int], list[CopyRange]] = defaultdict(list)
    for chunk in layout.chunks:
        for flat, begin, offset, numel in _wanted(first, layout, chunk, numbers):
            at = bisect_right(starts[flat], begin) - 1
            end = begin + numel
            while at < len(extents[flat]) and extents[flat][at].start < end:
                source = extents[flat][at]
                start, last = max(begin, source.start), min(end, source.stop)
                copied = CopyRange(chunk.index, start - source.start, offset + start - begin, last - start)
                found[source.rank, source.chunk].append(copied)
                at += 1
    return dict(found)


def _extents(manifests: Sequence[Manifest], ranks: range) -> list[list[Extent]]:
    """For each flat, where it lies, in the order of its elements."""
    found: list[list[Extent]] = [[] for _ in manifests[ranks.start].flats]
    for rank in ranks:
        for number, chunk in enumerate(manifests[rank].chunks):
            found[chunk.flat].append(Extent(chunk.start, chunk.start + chunk.numel, rank, number))
    for of_flat in found:
        of_flat.sort(key=lambda extent: extent.start)
    return found


def _wanted(
    committed: Manifest, layout: Layout, chunk: Chunk, numbers: dict[str, int]
) -> Iterator[tuple[int, int, int, int]]:
    """For each piece of a chunk, where the commit has it.

    Args:
        committed: a manifest of the commit.
        layout: the layout of the chunk.
        chunk: the chunk.
        numbers: the number of each parameter of the commit, by name.

    Yields:
        (the committed flat, where in it the piece begins, where in the chunk the piece begins, elements).
    """
    for piece in chunk.pieces:
        if (number := numbers.get(layout.specs[piece.param].name)) is None:
            continue  # it was frozen then
        flat, offset = committed.homes[number]
        yield flat, offset + piece.param_offset, piece.chunk_offset, piece.numel
