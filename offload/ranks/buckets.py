"""In which buckets gradients travel, as arithmetic.

[Note: shards and buckets]
A flat parameter is cut into `ranks` shards of the same number of elements, one after the other; the last ones reach
into padding behind it. A bucket is the same sub-range of every shard, so an all-to-all of it leaves one contiguous
piece of each rank's own shard on that rank. Its buffer holds the sub-ranges one after the other, by rank.

            shard 0               shard 1               shard 2
    flat    |---------------------|---------------------|-----------------....|
    bucket     |==|                  |==|                  |==|
    buffer  |==|==|==|

Small flat parameters of one dtype share a bucket, so that there are few collectives: its buffer then holds, by rank,
the sub-ranges of each of them. Those whose averages stay on the device share it with others of them only. A tile of a
weight is such sub-ranges, too (`FlatSlice` in layout.py), and has buckets of its own. A *part* is what gets a gradient
of its own: a tile of a parameter, or all of one without tiles.

A bucket has pieces of every rank's shard: a model of 10^12 parameters has 10^8 of them on 1,024 ranks. They are listed
when the bucket is filled, and a plan never asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from offload.errors import StateError
from offload.layout import ALIGN_NUMEL, FlatSlice, Layout, Piece, pieces_between

Part = tuple[int, int]
"""A parameter, and the number of its tile."""


@dataclass(frozen=True)
class SubRange:
    """Elements `start` to `start + numel` of every rank's shard of a flat parameter.

    Attributes:
        within: the flat parameter, or the tile of it.
        tile: the number of the tile; 0 where there are none.
        start: the first element of each shard.
        numel: elements of each shard.
    """

    within: FlatSlice
    tile: int
    start: int
    numel: int

    def pieces(self, layout: Layout, rank: int) -> Iterator[Piece]:
        """What it has of parameters in one rank's shard.

        `chunk_offset` counts from its start there, `param_offset` from that of the gradient of the part.
        """
        flat = layout.flats[self.within.flat]
        first, last = layout.shard_range(flat.index, rank)
        low, high = min(first + self.start, last), min(first + self.start + self.numel, last)
        for piece in pieces_between(flat, layout.specs, low, high):
            # A tile's parameter is the flat.
            at = layout.in_slice(self.within, low) if self.within.is_tile else piece.param_offset
            yield Piece(piece.param, at, piece.chunk_offset, piece.numel)

    def params(self, layout: Layout) -> Iterator[int]:
        """The parameters that it has elements of, in any rank's shard."""
        flat, shard = layout.flats[self.within.flat], layout.shard_numel(self.within.flat)
        for param, begin in zip(flat.params, flat.offsets, strict=True):
            end = begin + layout.specs[param].numel
            here = begin // shard * shard + self.start  # in the shard that the parameter begins in
            if max(here, begin) < min(here + self.numel, end) or here + shard < end:
                yield param


@dataclass(frozen=True)
class Bucket:
    """What travels together. See [Note: shards and buckets].

    Attributes:
        index: the bucket's index, which is its place in the order of sending.
        ranges: one of a tile, or several of flat parameters of one dtype, in the order of backward.
        layout: of the parameters.
    """

    index: int
    ranges: tuple[SubRange, ...]
    layout: Layout = field(repr=False, compare=False)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What it has of parameters.

        `chunk_offset` counts from the start of the buffer, and `param_offset` from that of the gradient of the part.
        """
        starts = list(accumulate((one.numel for one in self.ranges), initial=0))
        return tuple(
            Piece(piece.param, piece.param_offset, rank * starts[-1] + start + piece.chunk_offset, piece.numel)
            for rank in range(self.layout.ranks)
            for one, start in zip(self.ranges, starts, strict=False)
            for piece in one.pieces(self.layout, rank)
        )

    @cached_property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of the buffer that belong to no parameter, and have to be zero."""
        return tuple(_holes(self.pieces, self.layout.ranks * self.numel))

    @property
    def tile(self) -> int:
        """The number of the tile; 0 where there are none."""
        return self.ranges[0].tile

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units, which may be a tile, whose gradients it has, in the order of backward."""
        return tuple(dict.fromkeys(one.within.unit for one in self.ranges))

    @cached_property
    def numel(self) -> int:
        """Elements of each rank; the buffer has as many for each."""
        return sum(one.numel for one in self.ranges)

    @cached_property
    def params(self) -> frozenset[int]:
        return frozenset(param for one in self.ranges for param in one.params(self.layout))

    @cached_property
    def parts(self) -> frozenset[Part]:
        """The parts whose gradients it has elements of."""
        return frozenset((param, self.tile) for param in self.params)

    def params_of(self, rank: int) -> set[int]:
        """The parameters of which it has elements of this rank's shard."""
        return {piece.param for one in self.ranges for piece in one.pieces(self.layout, rank)}


def cut_buckets(layout: Layout, bucket_numel: int, device_flats: Collection[int] = ()) -> tuple[Bucket, ...]:
    """Cuts every shard's elements into buckets, in the order in which backward makes gradients.

    That is from the end of the layout to its beginning. The root unit's are last: it has parameters at both ends of a
    model. A bucket has its place where its last sub-range comes.

    Args:
        layout: the layout.
        bucket_numel: the most elements of a buffer. A bucket still has ALIGN_NUMEL elements of every rank, or all that
            the flat parameter has.
        device_flats: see `Run`.
    """
    each = most_numel(layout.ranks, bucket_numel)
    filled: dict[tuple[torch.dtype, bool], int] = {}  # where in `cut` the last bucket of each kind is
    cut: dict[int, list[SubRange]] = {}  # by the number of the last of them
    for number, one in enumerate(_in_backward(layout, each)):
        if not any(True for _ in one.params(layout)):
            continue
        if one.within.is_tile:
            cut[number] = [one]
            continue
        kind = layout.flats[one.within.flat].dtype, one.within.flat in device_flats
        before = filled.get(kind)
        if before is not None and sum(other.numel for other in cut[before]) + one.numel <= each:
            cut[number] = [*cut.pop(before), one]
        else:
            cut[number] = [one]
        filled[kind] = number
    return tuple(Bucket(index, tuple(ranges), layout) for index, ranges in enumerate(cut.values()))


def most_numel(ranks: int, bucket_numel: int) -> int:
    """The most elements of each rank in a bucket; see `cut_buckets`."""
    return max(bucket_numel // (ranks * ALIGN_NUMEL), 1) * ALIGN_NUMEL


def _in_backward(layout: Layout, each: int) -> Iterator[SubRange]:
    """All sub-ranges, of at most `each` elements, in the order of backward."""
    tiles: dict[int, list[FlatSlice]] = {}
    for one in layout.slices:
        if one.is_tile:
            tiles.setdefault(one.flat, []).append(one)
    for flat in sorted(layout.flats, key=lambda flat: (flat.unit == "", -flat.index)):
        for tile, one in reversed(list(enumerate(tiles.get(flat.index, [layout.slices[flat.index]])))):
            stop = one.start + one.numel // layout.ranks
            for start in reversed(range(one.start, stop, each)):
                yield SubRange(one, tile, start, min(each, stop - start))


def _holes(pieces: Sequence[Piece], numel: int) -> Iterator[tuple[int, int]]:
    end = 0
    for piece in pieces:
        if end < piece.chunk_offset:
            yield end, piece.chunk_offset
        end = piece.chunk_offset + piece.numel
    if end < numel:
        yield end, numel


class Buckets:
    """Which buckets have been sent, and which may be, while gradients are made.

    Buckets are sent in one fixed order, because gradients need not come in the same order on all ranks, and only the
    order of sending tells ranks which buckets belong together. So a bucket that may be sent waits for those before it.
    It may be sent when all of its gradients are there, or when backward has left its units, so that no other one comes.

    Args:
        buckets: all of them, in that order, alike on all ranks.
        take_turns: whether they may be sent only at one place between the fetches of units: when backward has left
            their units, or while it is in the last of them alone. See [Note: taking turns] in grads/reduce_scatter.py.

    Attributes:
        alone: the unit that backward is in, if nothing is fetched until it leaves that; else None.
    """

    def __init__(self, buckets: Sequence[Bucket], *, take_turns: bool = False) -> None:
        self.buckets = buckets
        self.alone: str | None = None
        self._take_turns = take_turns
        self._with_part: dict[Part, list[Bucket]] = {}
        for bucket in self.buckets:
            for part in bucket.parts:
                self._with_part.setdefault(part, []).append(bucket)
        self.reset()

    def reset(self) -> None:
        """Begins a round, before its first gradient."""
        self._ready: set[Part] = set()
        self._missing = [len(bucket.parts) for bucket in self.buckets]
        self._left: set[str] = set()
        self._sent = 0  # so many, in their order

    def ready(self, part: Part) -> None:
        """Tells that the gradient of a part is there.

        Raises:
            StateError: if it was there before in this round.
        """
        if part in self._ready:
            raise StateError(f"the gradient of tile {part[1]} of parameter {part[0]} arrived twice in a step")
        self._ready.add(part)
        for bucket in self._with_part.get(part, ()):
            self._missing[bucket.index] -= 1

    def leave(self, units: Iterable[str]) -> None:
        """Tells that backward has left units, so that all their gradients of this round are there.

        Args:
            units: their names.
        """
        self._left.update(units)

    def has_left(self, unit: str) -> bool:
        """Whether backward has left a unit in this round."""
        return unit in self._left

    def has_come(self, part: Part) -> bool:
        """Whether a gradient of a part was there in this round, or a bucket of it was sent without one."""
        return part in self._ready or any(bucket.index < self._sent for bucket in self._with_part.get(part, ()))

    def take(self) -> Iterator[Bucket]:
        """Takes the buckets to send now, in their order, up to the first one that may not be sent."""
        while self._sent < len(self.buckets) and self._may_leave(self.buckets[self._sent]):
            yield self._take_next()

    def take_all(self) -> Iterator[Bucket]:
        """Takes all buckets that are left, in their order, whatever is missing."""
        while self._sent < len(self.buckets):
            yield self._take_next()

    def _take_next(self) -> Bucket:
        self._sent += 1
        return self.buckets[self._sent - 1]

    def _may_leave(self, bucket: Bucket) -> bool:
        entered = {*bucket.units} - self._left
        is_turn = not self._take_turns or entered <= {self.alone}
        return not entered or (is_turn and self._missing[bucket.index] == 0)
