"""Shards as arithmetic: who owns what, and in which buckets gradients travel.

[Note: shards and buckets]
A flat parameter is cut into `ranks` shards of the same number of elements, one after the other; the last ones reach into
padding behind it. A bucket is the same sub-range of every shard, so an all-to-all of it leaves one contiguous piece of
each rank's own shard on that rank. Its buffer holds the sub-ranges one after the other, by rank.

            shard 0               shard 1               shard 2
    flat    |---------------------|---------------------|-----------------....|
    bucket     |==|                  |==|                  |==|
    buffer  |==|==|==|
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.errors import ConfigError, StateError
from offload.layout import ALIGN_NUMEL, Layout, Piece, pieces_between
from offload.sizes import round_up


@dataclass(frozen=True)
class Split:
    """A flat of `numel` elements over `ranks` ranks, `shard_numel` elements each."""

    numel: int
    ranks: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        return self.ranks * self.shard_numel

    def range_of(self, rank: int) -> tuple[int, int]:
        """First element of `rank`'s shard and the one after its last, without padding; equal if it has none."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

def split(numel: int, ranks: int, align: int = ALIGN_NUMEL) -> Split:
    """Equal, contiguous, padded shards.

    Args: align: elements of which each shard is a multiple.
    Raises: ConfigError for fewer than one rank.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: give a number, at least 1")
    return Split(numel, ranks, round_up(-(-numel // ranks), align))


def splits_of(layout: Layout, ranks: int) -> tuple[Split, ...]:
    """Each flat's."""
    return tuple(split(flat.numel, ranks) for flat in layout.flats)


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `start + numel` of every rank's shard of `flat`. See [Note: shards and buckets].

    Its buffer has ranks * numel elements. Each piece's `chunk_offset` counts from the buffer's start; `holes` are the
    buffer's ranges [start, stop) of no parameter, which have to be zero.
    """

    index: int
    flat: int
    start: int
    numel: int
    pieces: tuple[Piece, ...]
    holes: tuple[tuple[int, int], ...]

    @cached_property
    def params(self) -> frozenset[int]:
        return frozenset(piece.param for piece in self.pieces)


def cut_buckets(layout: Layout, splits: Sequence[Split], bucket_numel: int) -> tuple[Bucket, ...]:
    """Every shard's elements in buckets, flat by flat.

    Args: bucket_numel: most elements of a buffer; but a bucket has ALIGN_NUMEL of every rank, or all a flat has.
    """
    found: list[Bucket] = []
    for flat, cut in enumerate(splits):
        each = max(bucket_numel // (cut.ranks * ALIGN_NUMEL), 1) * ALIGN_NUMEL
        for start in range(0, cut.shard_numel, each):
            numel = min(each, cut.shard_numel - start)
            pieces = tuple(_pieces_of(layout, flat, cut, start, numel))
            if pieces:
                holes = tuple(_holes(pieces, cut.ranks * numel))
                found.append(Bucket(len(found), flat, start, numel, pieces, holes))
    return tuple(found)


def _pieces_of(layout: Layout, flat: int, cut: Split, start: int, numel: int) -> Iterator[Piece]:
    for rank in range(cut.ranks):
        first, last = cut.range_of(rank)
        low, high = min(first + start, last), min(first + start + numel, last)
        for piece in pieces_between(layout.flats[flat], layout.specs, low, high):
            yield Piece(piece.param, piece.param_offset, rank * numel + piece.chunk_offset, piece.numel)


def _holes(pieces: Sequence[Piece], numel: int) -> Iterator[tuple[int, int]]:
    end = 0
    for piece in pieces:
        if end < piece.chunk_offset:
            yield end, piece.chunk_offset
        end = piece.chunk_offset + piece.numel
    if end < numel:
        yield end, numel


class Buckets:
    """Which buckets can be sent, while gradients are made.

    Buckets are sent in one fixed order, because only the order tells ranks which of them belong together, and gradients
    need not come in the same order on all ranks. So a complete bucket waits for those before it.

    Args: order: the buckets' indices, alike on all ranks; None: last bucket first, as backward goes.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int] | None = None) -> None:
        self.buckets = tuple(buckets)
        self.order = tuple(reversed(range(len(buckets)))) if order is None else tuple(order)
        if sorted(self.order) != list(range(len(buckets))):
            raise ValueError(f"order={self.order} is no order of {len(buckets)} buckets")
        self._of_param: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._of_param.setdefault(param, []).append(bucket)
        self.reset()

    def reset(self) -> None:
        """Before the first gradient of a step."""
        self._arrived: set[int] = set()
        self._left = [len(bucket.params) for bucket in self.buckets]
        self._launched = 0

    def ready(self, param: int) -> list[Bucket]:
        """The buckets that can leave now that `param`'s gradient is in their buffers, in their order.

        Raises: StateError if `param` was ready before in this step.
        """
        if param in self._arrived:
            raise StateError(f"the gradient of parameter {param} arrived twice in a step")
        self._arrived.add(param)
        for bucket in self._of_param.get(param, ()):
            self._left[bucket.index] -= 1
        return self._launch(lambda index: self._left[index] == 0)

    def flush(self) -> list[Bucket]:
        """All the others, in their order: no more gradients come. Fill with zeros what got none."""
        return self._launch(lambda index: True)

    def _launch(self, may: Callable[[int], bool]) -> list[Bucket]:
        first = self._launched
        while self._launched < len(self.order) and may(self.order[self._launched]):
            self._launched += 1
        return [self.buckets[index] for index in self.order[first : self._launched]]
