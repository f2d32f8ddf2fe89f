"""In which buckets gradients travel, as arithmetic.

[Note: shards and buckets]
A flat parameter is cut into `ranks` shards of the same number of elements, one after the other; the last ones reach
into padding behind it. A bucket is the same sub-range of every shard, so an all-to-all of it leaves one contiguous
piece of each rank's own shard on that rank. Its buffer holds the sub-ranges one after the other, by rank.

            shard 0               shard 1               shard 2
    flat    |---------------------|---------------------|-----------------....|
    bucket     |==|                  |==|                  |==|
    buffer  |==|==|==|

A tile of a weight is such sub-ranges, too (`FlatSlice` in layout.py), and no bucket has elements of two. A *part* is
what gets a gradient of its own: a tile of a parameter, or all of one without tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.errors import StateError
from offload.layout import ALIGN_NUMEL, Flat, FlatSlice, Layout, Piece, pieces_between

Part = tuple[int, int]
"""A parameter, and the number of its tile."""


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `start + numel` of every rank's shard of a flat parameter. See [Note: shards and buckets].

    Attributes:
        index: the bucket's index.
        flat: the index of the flat parameter.
        start: the first element of each shard.
        numel: elements of each shard; the buffer has ranks * numel.
        pieces: what it has of parameters; `chunk_offset` counts from the start of the buffer, and `param_offset` from
            that of the gradient of the part.
        holes: the ranges [start, stop) of the buffer that belong to no parameter, and have to be zero.
        unit: the unit, which may be a tile, whose gradients it has.
        tile: the number of the tile; 0 where there are none.
    """

    index: int
    flat: int
    start: int
    numel: int
    pieces: tuple[Piece, ...]
    holes: tuple[tuple[int, int], ...]
    unit: str
    tile: int = 0

    @cached_property
    def params(self) -> frozenset[int]:
        return frozenset(piece.param for piece in self.pieces)

    @cached_property
    def parts(self) -> frozenset[Part]:
        """The parts whose gradients it has elements of."""
        return frozenset((param, self.tile) for param in self.params)

    def params_of(self, rank: int) -> set[int]:
        """The parameters of which it has elements of this rank's shard."""
        return {piece.param for piece in self.pieces if piece.chunk_offset // self.numel == rank}


def cut_buckets(layout: Layout, bucket_numel: int) -> tuple[Bucket, ...]:
    """Cuts every shard's elements into buckets, one flat parameter after the other.

    Args:
        layout: the layout.
        bucket_numel: the most elements of a buffer. A bucket still has ALIGN_NUMEL elements of every rank, or all that
            the flat parameter has.
    """
    buckets: list[Bucket] = []
    each = max(bucket_numel // (layout.ranks * ALIGN_NUMEL), 1) * ALIGN_NUMEL
    tiles: dict[int, list[FlatSlice]] = {}
    for one in layout.slices:
        if one.is_tile:
            tiles.setdefault(one.flat, []).append(one)
    for flat in layout.flats:
        for tile, one in enumerate(tiles.get(flat.index, [layout.slices[flat.index]])):
            stop = one.start + one.numel // layout.ranks
            for start in range(one.start, stop, each):
                numel = min(each, stop - start)
                pieces = tuple(_pieces_of(layout, flat, one, start, numel))
                if pieces:
                    holes = tuple(_holes(pieces, layout.ranks * numel))
                    buckets.append(Bucket(len(buckets), flat.index, start, numel, pieces, holes, one.unit, tile))
    return tuple(buckets)


def _pieces_of(layout: Layout, flat: Flat, one: FlatSlice, start: int, numel: int) -> Iterator[Piece]:
    for rank in range(layout.ranks):
        first, last = layout.shard_range(flat.index, rank)
        low, high = min(first + start, last), min(first + start + numel, last)
        for piece in pieces_between(flat, layout.specs, low, high):
            at = layout.in_slice(one, low) if one.is_tile else piece.param_offset  # a tile's parameter is the flat
            yield Piece(piece.param, at, rank * numel + piece.chunk_offset, piece.numel)


def _holes(pieces: Sequence[Piece], numel: int) -> Iterator[tuple[int, int]]:
    end = 0
    for piece in pieces:
        if end < piece.chunk_offset:
            yield end, piece.chunk_offset
        end = piece.chunk_offset + piece.numel
    if end < numel:
        yield end, numel


class Buckets:
    """Which buckets have been sent, while gradients are made.

    Buckets are sent in one fixed order, because gradients need not come in the same order on all ranks, and only the
    order of sending tells ranks which buckets belong together. So a bucket that may be sent waits for those before it.

    Args:
        buckets: all of them.
        order: the buckets' indices, each once, alike on all ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int]) -> None:
        self.buckets = buckets
        self.order = order
        self._with_part: dict[Part, list[Bucket]] = {}
        for bucket in self.buckets:
            for part in bucket.parts:
                self._with_part.setdefault(part, []).append(bucket)
        self.reset()

    def reset(self) -> None:
        """Begins a round, before its first gradient."""
        self._ready: set[Part] = set()
        self._left = [len(bucket.parts) for bucket in self.buckets]
        self._sent: set[int] = set()

    def ready(self, part: Part) -> None:
        """Tells that the gradient of a part is there.

        Raises:
            StateError: if it was there before in this round.
        """
        if part in self._ready:
            raise StateError(f"the gradient of tile {part[1]} of parameter {part[0]} arrived twice in a step")
        self._ready.add(part)
        for bucket in self._with_part.get(part, ()):
            self._left[bucket.index] -= 1

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients of a bucket are there."""
        return self._left[bucket.index] == 0

    def has_sent(self, part: Part) -> bool:
        """Whether a bucket of a part was sent in this round."""
        return any(bucket.index in self._sent for bucket in self._with_part.get(part, ()))

    def take(self, may_leave: Callable[[Bucket], bool]) -> Iterator[Bucket]:
        """Takes the buckets to send now, in their order, up to the first one that may not leave."""
        while len(self._sent) < len(self.order):
            bucket = self.buckets[self.order[len(self._sent)]]
            if not may_leave(bucket):
                return
            self._sent.add(bucket.index)
            yield bucket
