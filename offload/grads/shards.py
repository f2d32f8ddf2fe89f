"""Where the gradients of a rank's own shards wait for the step: in memory, or in the slots of a store.

[Note: gradients in slots]
With `grad_tier="nvme"` the gradients of each chunk are one item of a store. What comes is added to the chunks it lies
in; a chunk stays in RAM until its last elements of the micro-batch have come, is written, and is read again by the
next micro-batch or the step.

The squares are summed while the values are in RAM, in the same blocks as those of gradients in RAM, so the sums have
the same bits. With one rank chunks end where blocks end. With several, averages come from the end of a flat to its
beginning (reduce_scatter.py), the same elements in every round: where a bucket begins inside a block, its part of that
block is carried until the rest of the block comes with the next bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from offload.choices import GradChoice
from offload.layout import Chunk, Layout
from offload.native import ACCUMULATE, CAST, SUM_SQUARES, sum_blocks
from offload.ranks.buckets import Bucket
from offload.regions import Region
from offload.run import Run
from offload.sizes import SUM_BLOCK, round_up
from offload.storage.chunk_cache import Store, Use
from offload.storage.swap_format import SlotArrays


def dtypes_of(layout: Layout, accumulation: int) -> list[torch.dtype]:
    """The dtype in which the gradients of each flat parameter wait: fp32 if they are sums."""
    return [torch.float32 if accumulation > 1 else flat.dtype for flat in layout.flats]


def gradient_slot_arrays(layout: Layout, accumulation: int) -> list[SlotArrays]:
    """What the slot of each chunk's gradients holds, with grad_tier="nvme"."""
    dtypes = dtypes_of(layout, accumulation)
    return [SlotArrays(chunk.numel, (dtypes[chunk.flat].itemsize,)) for chunk in layout.chunks]


SUMS, GRADIENTS, CARRIED = "sums of squares", "gradients", "gradients of a block that is not whole"


def regions(layout: Layout, choice: GradChoice) -> list[Region]:
    """What `open_shards` reserves."""
    dtypes, memory = dtypes_of(layout, choice.passes), choice.tier.memory
    sums = Region(memory, SUMS, 8 * sum(chain.from_iterable(_sum_sizes(layout))), kind="grad")
    if choice.tier.is_durable:
        return [sums, Region(memory, CARRIED, _carried_bytes(layout, dtypes), kind="grad")]
    sizes = [layout.shard_numel(flat.index) * dtypes[flat.index].itemsize for flat in layout.flats]
    return [sums, *(Region(memory, GRADIENTS, size, kind="grad") for size in sizes)]


def _sum_sizes(layout: Layout) -> list[list[int]]:
    """The number of sums of squares that this rank has of each parameter, for each of its tiles."""
    sizes = []
    for param in range(len(layout.specs)):
        first, last = layout.param_shard_range(param)
        tiles = ((start, max(start, first), min(stop, last)) for start, stop in layout.tiles_of(param))
        sizes.append([sum_blocks(low - start, max(high - low, 0)) for start, low, high in tiles])
    return sizes


def _carried_bytes(layout: Layout, dtypes: list[torch.dtype]) -> int:
    return SUM_BLOCK * max((dtype.itemsize for dtype in dtypes), default=0) if layout.ranks > 1 else 0


class GradShards(ABC):
    """The gradients of this rank's shards.

    Args:
        passes: the most micro-batches that a step may have.

    Attributes:
        dtypes: of the gradients, for each flat parameter.
        sums: for each parameter and tile, the sums of squares of its blocks, fp64. A parameter without tiles is one.
    """

    def __init__(self, run: Run, passes: int) -> None:
        self._layout = run.layout
        self._kernels = run.kernels
        self.dtypes = dtypes_of(run.layout, passes)
        self._sizes = _sum_sizes(run.layout)
        (sums,) = run.memory.take(SUMS)
        self._all_sums = sums.view(torch.float64)
        self.sums = self._split(self._all_sums)

    def _split(self, sums: Tensor) -> list[list[Tensor]]:
        sizes = list(chain.from_iterable(self._sizes))
        blocks = iter(sums.split(sizes) if sizes else ())
        return [[next(blocks) for _ in tiles] for tiles in self._sizes]

    def sums_on_cpu(self) -> list[list[Tensor]]:
        """The `sums` in RAM. All are copied at once, if they are on another device."""
        return self.sums if self._all_sums.is_cpu else self._split(self._all_sums.cpu())

    @abstractmethod
    def region(self, flat: int, start: int, numel: int) -> Tensor | None:
        """The memory of elements `start` to `start + numel` of this rank's shard of a flat parameter.

        It is None if the gradients are in slots.
        """

    @abstractmethod
    def updated(
        self, chunk: Chunk, start: int, values: Tensor, *, is_first: bool, is_unfinished: bool
    ) -> AbstractContextManager[Tensor]:
        """Writes or adds `values` to the gradients of a chunk, and lends the result.

        Args:
            chunk: the chunk.
            start: the chunk's element at which `values` begins.
            values: 1-D.
            is_first: whether they are of the first micro-batch, and replace what is there.
            is_unfinished: whether more elements of this chunk are about to come.
        """

    def _put(self, values: Tensor, into: Tensor, *, is_first: bool) -> None:
        if is_first:
            self._kernels.call(CAST, values, into)
        else:
            self._kernels.call(ACCUMULATE, into, values)

    @abstractmethod
    def add_bucket(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        """Writes or adds the average of a bucket.

        Args:
            bucket: the bucket.
            average: shape (bucket.numel,).
            is_first: whether this is the first round of the step.
            is_last: whether it is the last one.
        """

    @abstractmethod
    def sum_squares(self, params: Iterable[int], *, is_on_way: bool) -> None:
        """Makes the `sums` of `params`, after the last round over several ranks.

        Args:
            params: the parameters.
            is_on_way: whether the last calls of `add_bucket` had `is_last`, so that the sums may be there already.
        """

    def _sum_squares(self, params: Iterable[int]) -> None:
        for param in params:
            (sums,) = self.sums[param]
            if sums.numel():
                self._kernels.call(
                    SUM_SQUARES, self.values(param), sums, first=self._layout.param_shard_range(param)[0]
                )

    @abstractmethod
    def values(self, param: int) -> Tensor:
        """See `GradientBuffer.values`."""

    @abstractmethod
    def write(self, param: int, values: Tensor) -> None:
        """Replaces the elements that `values(param)` returns. The sums of squares stay what they were."""

    @abstractmethod
    def chunk_memory(self, index: int) -> Tensor:
        """See `GradientBuffer.chunk_memory`."""

    @abstractmethod
    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        """See `GradientBuffer.shard`."""

    @abstractmethod
    def expect(self, chunks: Iterable[int]) -> None:
        """See `GradientBuffer.expect`."""


class ShardsInMemory(GradShards):
    """Gradients that wait in memory: in RAM, or where the states are."""

    def __init__(self, run: Run, passes: int) -> None:
        super().__init__(run, passes)
        shards = run.memory.take(GRADIENTS)
        self._flats = [shard.view(dtype) for shard, dtype in zip(shards, self.dtypes, strict=True)]
        starts = [chunk.start - run.layout.shard_range(chunk.flat)[0] for chunk in run.layout.chunks]
        self._chunks = [
            self.region(chunk.flat, start, chunk.numel) for chunk, start in zip(run.layout.chunks, starts, strict=True)
        ]

    def region(self, flat: int, start: int, numel: int) -> Tensor:
        return self._flats[flat][start : start + numel]

    @contextmanager
    def updated(
        self, chunk: Chunk, start: int, values: Tensor, *, is_first: bool, is_unfinished: bool
    ) -> Iterator[Tensor]:
        into = self.chunk_memory(chunk.index)[start : start + len(values)]
        self._put(values, into, is_first=is_first)
        yield into

    def add_bucket(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        self._kernels.call(ACCUMULATE, self.region(bucket.flat, bucket.start, bucket.numel), average)

    def sum_squares(self, params: Iterable[int], *, is_on_way: bool) -> None:
        self._sum_squares(params)

    def values(self, param: int) -> Tensor:
        flat, offset = self._layout.locations[param]
        first, last = self._layout.param_shard_range(param)
        start = offset + first - self._layout.shard_range(flat)[0] if first < last else 0
        return self.region(flat, start, last - first)

    def write(self, param: int, values: Tensor) -> None:
        self.values(param).copy_(values)

    def chunk_memory(self, index: int) -> Tensor:
        return self._chunks[index]

    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        return nullcontext(self.chunk_memory(index))

    def expect(self, chunks: Iterable[int]) -> None:
        return None


class _Carried(NamedTuple):
    """The later elements of a block, `start` to `stop` of a parameter, which wait for the earlier ones."""

    param: int
    start: int
    stop: int


class ShardsInSlots(GradShards):
    """Gradients that wait in the slots of a store; see [Note: gradients in slots]."""

    def __init__(self, run: Run, passes: int, store: Store) -> None:
        super().__init__(run, passes)
        self._store = store
        (self._memory,) = run.memory.take(CARRIED)
        self._carried: _Carried | None = None
        self._chunks: dict[int, list[Chunk]] = {flat.index: [] for flat in run.layout.flats}
        for chunk in reversed(run.layout.chunks):
            self._chunks[chunk.flat].append(chunk)

    def region(self, flat: int, start: int, numel: int) -> None:
        return None

    @contextmanager
    def updated(
        self, chunk: Chunk, start: int, values: Tensor, *, is_first: bool, is_unfinished: bool
    ) -> Iterator[Tensor]:
        use = Use.FILL if is_unfinished else Use.UPDATE
        if is_first and len(values) == chunk.numel:
            use = Use.OVERWRITE
        with self._store.lease(chunk.index, use, step=0) as lease:
            into = lease.arrays[0].view(self.dtypes[chunk.flat])[start : start + len(values)]
            self._put(values, into, is_first=is_first)
            yield into

    def add_bucket(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        begin = self._layout.shard_range(bucket.flat)[0] + bucket.start
        for chunk in self._chunks[bucket.flat]:
            start, stop = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + bucket.numel)
            if start < stop:
                at, values = start - chunk.start, average[start - begin : stop - begin]
                with self.updated(chunk, at, values, is_first=is_first, is_unfinished=at > 0) as summed:
                    if is_last:
                        self._sum_range(chunk, at, summed)

    def _sum_range(self, chunk: Chunk, begin: int, values: Tensor) -> None:
        """Sums the squares of the elements of a chunk from `begin` on."""
        for piece in reversed(chunk.pieces):
            start, stop = max(piece.chunk_offset, begin), min(piece.chunk_offset + piece.numel, begin + len(values))
            if start < stop:
                first = piece.param_offset + start - piece.chunk_offset
                self._sum_piece(piece.param, first, values[start - begin : stop - begin])

    def _sum_piece(self, param: int, first: int, values: Tensor) -> None:
        """Sums the squares of the elements of a parameter from `first` on. Those after them have come before."""
        begin = self._layout.param_shard_range(param)[0]
        stop = first + len(values)
        if self._carried is not None:
            stop = max(first, begin, (stop - 1) // SUM_BLOCK * SUM_BLOCK)
            self._carry(param, stop, values[stop - first :], self._carried.stop)
            if stop == begin or stop % SUM_BLOCK == 0:
                self._sum(param, stop, self._carried_values(values.dtype))
                self._carried = None
        whole = first if first == begin else min(round_up(first, SUM_BLOCK), stop)
        if whole < stop:
            self._sum(param, whole, values[whole - first : stop - first])
        if first < whole:
            self._carry(param, first, values[: whole - first], whole)

    def _carry(self, param: int, start: int, values: Tensor, stop: int) -> None:
        """Keeps `values`, elements from `start` on, before those that are carried already, which end at `stop`."""
        at = start % SUM_BLOCK
        self._memory.view(values.dtype)[at : at + len(values)] = values
        self._carried = _Carried(param, start, stop)

    def _carried_values(self, dtype: torch.dtype) -> Tensor:
        assert self._carried is not None
        _, start, stop = self._carried
        return self._memory.view(dtype)[start % SUM_BLOCK :][: stop - start]

    def _sum(self, param: int, first: int, values: Tensor) -> None:
        block = first // SUM_BLOCK - self._layout.param_shard_range(param)[0] // SUM_BLOCK
        (sums,) = self.sums[param]
        self._kernels.call(SUM_SQUARES, values, sums[block : block + sum_blocks(first, len(values))], first=first)

    def sum_squares(self, params: Iterable[int], *, is_on_way: bool) -> None:
        assert self._carried is None
        if not is_on_way:
            self._sum_squares(params)

    def values(self, param: int) -> Tensor:
        first, last = self._layout.param_shard_range(param)
        result = torch.empty(last - first, dtype=self.dtypes[self._layout.locations[param][0]], device="cpu")
        for chunk, piece in self._layout.pieces_of(param):
            with self._store.lease(chunk.index, Use.READ, step=0) as lease:
                stored = lease.arrays[0].view(result.dtype)[piece.chunk_offset :][: piece.numel]
                result[piece.param_offset - first :][: piece.numel] = stored
        return result

    def write(self, param: int, values: Tensor) -> None:
        first = self._layout.param_shard_range(param)[0]
        for chunk, piece in self._layout.pieces_of(param):
            with self._store.lease(chunk.index, Use.UPDATE, step=0) as lease:
                stored = lease.arrays[0].view(values.dtype)[piece.chunk_offset :][: piece.numel]
                stored.copy_(values[piece.param_offset - first :][: piece.numel])

    def chunk_memory(self, index: int) -> Tensor:
        raise AssertionError("these gradients are in slots")

    @contextmanager
    def shard(self, index: int) -> Iterator[Tensor]:
        with self._store.lease(index, Use.CONSUME, step=0) as lease:
            yield lease.arrays[0].view(self.dtypes[self._layout.chunks[index].flat])

    def expect(self, chunks: Iterable[int]) -> None:
        self._store.expect(chunks)


def open_shards(run: Run, passes: int, store: Store | None) -> GradShards:
    """Opens the place where this rank's gradients wait.

    Args:
        run: what the parts of a run share.
        passes: the most micro-batches that a step may have.
        store: where gradients in slots are; None: they are in memory.
    """
    return ShardsInMemory(run, passes) if store is None else ShardsInSlots(run, passes, store)
