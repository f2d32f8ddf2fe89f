"""ZeRO's stages as arithmetic: who owns what, how many bytes that is, and in which buckets gradients travel.

[Note: partitions and buckets]
A flat is cut into `ranks` partitions of the same number of elements, one after the other; the last ones reach into
padding behind the flat. A bucket is the same sub-range of every partition, so that what an all-to-all of it leaves on
a rank is one contiguous piece of that rank's partition. Its buffer holds the sub-ranges one after the other, by rank.

            partition 0           partition 1           partition 2
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
from offload.storage.swap_format import STATE_KINDS

KINDS = ("param", "grad", *STATE_KINDS)
"""State kinds: the 16-bit parameter, its gradient, the fp32 master and Adam's moments."""

STAGES = (0, 1, 2, 3)

SHARDED: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset(STATE_KINDS),
    frozenset((*STATE_KINDS, "grad")),
    frozenset(KINDS),
)
"""By stage: the kinds of which a rank holds its partition only (ZeRO-1, 2 and 3; 0 is plain data parallelism)."""


@dataclass(frozen=True)
class Split:
    """A flat of `numel` elements over `ranks` ranks, `shard_numel` elements each."""

    numel: int
    ranks: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        return self.ranks * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements behind the flat that belong to no parameter."""
        return self.padded_numel - self.numel

    def range_of(self, rank: int) -> tuple[int, int]:
        """First element of `rank`'s partition and the one after its last, without padding; equal if it has none."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def owner(self, element: int) -> int:
        """The rank whose partition holds `element`."""
        return element // self.shard_numel


def split(numel: int, ranks: int, align: int = ALIGN_NUMEL) -> Split:
    """Equal, contiguous, padded partitions.

    Args: align: elements of which each partition is a multiple.
    Raises: ConfigError for fewer than one rank.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: give a number, at least 1")
    return Split(numel, ranks, round_up(-(-numel // ranks), align))


def splits_of(layout: Layout, ranks: int) -> tuple[Split, ...]:
    """Each flat's."""
    return tuple(split(flat.numel, ranks) for flat in layout.flats)


def partition_of(layout: Layout, flat: int, split: Split, rank: int) -> tuple[Piece, ...]:
    """The pieces of parameters in `rank`'s partition of a flat; `chunk_offset` counts from the partition's start."""
    return tuple(pieces_between(layout.flats[flat], layout.specs, *split.range_of(rank)))


def held_bytes(split: Split, stage: int, *, itemsize: int = 2, accumulated: bool = False) -> dict[str, int]:
    """Bytes by state kind that one rank holds of a flat, padding included, wherever they lie.

    Without padding the sums are those of the ZeRO paper for mixed-precision Adam: 16 bytes a parameter at stage 0,
    4 + 12/N at 1, 2 + 14/N at 2, 16/N at 3 (Rajbhandari et al., arXiv:1910.02054, section 5).

    Args: itemsize: bytes of an element of the compute dtype. accumulated: gradients are summed in fp32.
    Raises: ConfigError for no stage of ZeRO.
    """
    sharded = sharded_at(stage)
    sizes = {"param": itemsize, "grad": 4 if accumulated else itemsize} | dict.fromkeys(STATE_KINDS, 4)
    return {kind: size * (split.shard_numel if kind in sharded else split.padded_numel) for kind, size in sizes.items()}


def total_held(layout: Layout, ranks: int, stage: int, *, accumulated: bool = False) -> dict[str, int]:
    """`held_bytes` of all flats of a model."""
    total = dict.fromkeys(KINDS, 0)
    for flat, cut in zip(layout.flats, splits_of(layout, ranks), strict=True):
        held = held_bytes(cut, stage, itemsize=flat.dtype.itemsize, accumulated=accumulated)
        total = {kind: total[kind] + held[kind] for kind in KINDS}
    return total


def device_bytes(held: Mapping[str, int], offloaded: Collection[str] = (), in_flight: int = 0) -> int:
    """What stays on the device of `held_bytes` when the kinds in `offloaded` live in RAM or on NVMe.

    Offloading all that a stage shards, `sharded_at(stage)`, takes off 12/N, 14/N or 16/N bytes a parameter.
    Args: in_flight: bytes of the units gathered at one time, which stay there.
    """
    return sum(size for kind, size in held.items() if kind not in offloaded) + in_flight


def sharded_at(stage: int) -> frozenset[str]:
    """Raises: ConfigError for no stage of ZeRO."""
    if stage not in STAGES:
        raise ConfigError(f"stage={stage!r}: give 0, 1, 2 or 3")
    return SHARDED[stage]


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `start + numel` of every rank's partition of `flat`. See [Note: partitions and buckets].

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
    """Every partition's elements in buckets, flat by flat.

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
    """Which buckets can travel, while gradients arrive.

    Buckets leave in one fixed order, because what belongs together on different ranks is found by order alone, and
    gradients need not arrive alike on all of them: a bucket that is complete waits for those before it.

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
        """All the others, in their order: no more gradients come. Fill what is `missing` with zeros."""
        return self._launch(lambda index: True)

    def missing(self, bucket: Bucket) -> list[Piece]:
        """The pieces of `bucket` whose parameters got no gradient in this step."""
        return [piece for piece in bucket.pieces if piece.param not in self._arrived]

    def _launch(self, may: Callable[[int], bool]) -> list[Bucket]:
        first = self._launched
        while self._launched < len(self.order) and may(self.order[self._launched]):
            self._launched += 1
        return [self.buckets[index] for index in self.order[first : self._launched]]
