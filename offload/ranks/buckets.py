"""In which buckets gradients travel, as arithmetic.

[Note: shards and buckets]
A flat parameter is cut into `ranks` shards of the same number of elements, one after the other; the last ones reach
into padding behind it. A bucket is the same sub-range of every shard, so an all-to-all of it leaves one contiguous
piece of each rank's own shard on that rank. Its buffer holds the sub-ranges one after the other, by rank.

            shard 0               shard 1               shard 2
    flat    |---------------------|---------------------|-----------------....|
    bucket     |==|                  |==|                  |==|
    buffer  |==|==|==|

Small flat parameters of one dtype share a bucket, so that there are few collectives: then it has a *part* of each, and
its buffer holds, by rank, the sub-ranges of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from offload.errors import StateError
from offload.layout import ALIGN_NUMEL, Layout, Piece, pieces_between


@dataclass(frozen=True)
class Part:
    """Elements `start` to `start + numel` of every rank's shard of a flat parameter.

    Attributes:
        flat: the index of the flat parameter.
        start: the first element of each shard.
        numel: elements of each shard.
    """

    flat: int
    start: int
    numel: int

    def pieces(self, layout: Layout, rank: int) -> Iterator[Piece]:
        """The parts of parameters in one rank's sub-range, from whose start `chunk_offset` counts."""
        first, last = layout.shard_range(self.flat, rank)
        low, high = min(first + self.start, last), min(first + self.start + self.numel, last)
        return pieces_between(layout.flats[self.flat], layout.specs, low, high)


@dataclass(frozen=True)
class Bucket:
    """What travels together. See [Note: shards and buckets].

    Attributes:
        index: the bucket's index, which is its place in the order of sending.
        parts: of flat parameters of one dtype.
        pieces: the parts of parameters in it; `chunk_offset` counts from the start of the buffer.
        holes: the ranges [start, stop) of the buffer that belong to no parameter, and have to be zero.
    """

    index: int
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]
    holes: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        """Elements of each rank; the buffer has as many for each."""
        return sum(part.numel for part in self.parts)

    @cached_property
    def params(self) -> frozenset[int]:
        return frozenset(piece.param for piece in self.pieces)


def cut_buckets(layout: Layout, bucket_numel: int) -> tuple[Bucket, ...]:
    """Cuts every shard's elements into buckets, in the order in which backward makes gradients.

    That is from the end of the layout to its beginning. The root unit's are last: it has parameters at both ends of a
    model. A bucket has its place where its last part comes.

    Args:
        layout: the layout.
        bucket_numel: the most elements of a buffer. A bucket still has ALIGN_NUMEL elements of every rank, or all that
            the flat parameter has.
    """
    each = max(bucket_numel // (layout.ranks * ALIGN_NUMEL), 1) * ALIGN_NUMEL
    filled: dict[torch.dtype, list[Part]] = {}
    cut: dict[Part, list[Part]] = {}  # by the last part
    for flat in sorted(layout.flats, key=lambda flat: (flat.unit == "", -flat.index)):
        shard_numel = layout.shard_numel(flat.index)
        for start in reversed(range(0, shard_numel, each)):
            part = Part(flat.index, start, min(each, shard_numel - start))
            if not any(any(part.pieces(layout, rank)) for rank in range(layout.ranks)):
                continue
            parts = filled.get(flat.dtype, [])
            if parts and sum(other.numel for other in parts) + part.numel <= each:
                parts = [*cut.pop(parts[-1]), part]
            else:
                parts = [part]
            filled[flat.dtype] = cut[part] = parts
    return tuple(_bucket_of(layout, index, tuple(parts)) for index, parts in enumerate(cut.values()))


def _bucket_of(layout: Layout, index: int, parts: tuple[Part, ...]) -> Bucket:
    starts = list(accumulate((part.numel for part in parts), initial=0))
    pieces = tuple(
        Piece(piece.param, piece.param_offset, rank * starts[-1] + start + piece.chunk_offset, piece.numel)
        for rank in range(layout.ranks)
        for part, start in zip(parts, starts, strict=False)
        for piece in part.pieces(layout, rank)
    )
    return Bucket(index, parts, pieces, tuple(_holes(pieces, layout.ranks * starts[-1])))


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
        buckets: all of them, in that order, alike on all ranks.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._of_param: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._of_param.setdefault(param, []).append(bucket)
        self.reset()

    def reset(self) -> None:
        """Begins a round, before its first gradient."""
        self._ready: set[int] = set()
        self._left = [len(bucket.params) for bucket in self.buckets]
        self._sent = 0  # so many, in their order

    def ready(self, param: int) -> None:
        """Tells that the gradient of `param` is there.

        Raises:
            StateError: if it was there before in this round.
        """
        if param in self._ready:
            raise StateError(f"the gradient of parameter {param} arrived twice in a step")
        self._ready.add(param)
        for bucket in self._of_param.get(param, ()):
            self._left[bucket.index] -= 1

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients of a bucket are there."""
        return self._left[bucket.index] == 0

    def has_sent(self, param: int) -> bool:
        """Whether a bucket of `param` was sent in this round."""
        return any(bucket.index < self._sent for bucket in self._of_param.get(param, ()))

    def take(self, may_leave: Callable[[Bucket], bool]) -> Iterator[Bucket]:
        """Takes the buckets to send now, in their order, up to the first one that may not leave."""
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if not may_leave(bucket):
                return
            self._sent += 1
            yield bucket
