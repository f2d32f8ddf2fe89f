"""Where the gradients of a rank's own partitions wait for the step, once they are averaged over the ranks.

[Note: averages in slots]
With `grad_tier="nvme"` each chunk of them is an item of a store of their own. Buckets come from the end of a flat to
its beginning (reduction.py), the same elements in every round: what comes is put into the chunks it lies in, which stay
in RAM until their first elements are there. The squares are summed on the way, in the blocks in which they are summed
in RAM, so that they have the same bits: where a bucket begins inside a block, its part of that is carried to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from offload.config import SUM_BLOCK
from offload.dist.partition import Bucket
from offload.layout import Chunk, Layout
from offload.native import Kernels, sum_blocks
from offload.sizes import round_up
from offload.storage.arena import Lender, carved_bytes
from offload.storage.chunk_cache import Store


class Waiting(ABC):
    """Args: dtypes: of the gradients, by flat. Attribute: sums: by parameter, of the squares of what is here of it."""

    def __init__(self, layout: Layout, dtypes: list[torch.dtype], arena: Lender, kernels: Kernels) -> None:
        self._layout = layout
        self._dtypes = dtypes
        self._kernels = kernels
        blocks = sums_of(layout)
        self._all_sums = arena.carve(8 * sum(blocks)).view(torch.float64)
        self.sums = list(self._all_sums.split(blocks))

    def sums_here(self) -> list[Tensor]:
        """The `sums` on the CPU; from another device they come at once."""
        return self.sums if self._all_sums.is_cpu else list(self._all_sums.cpu().split(sums_of(self._layout)))

    @abstractmethod
    def place(self, bucket: Bucket) -> Tensor | None:
        """Memory to which a bucket's average of the first round may be written; None: `put` it."""

    @abstractmethod
    def put(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        """Takes the average of a bucket, shape (bucket.numel,), or adds it to what came in the rounds before."""

    @abstractmethod
    def sum(self, params: Collection[int]) -> None:
        """After the last round: makes the `sums` of these."""

    @abstractmethod
    def line(self, param: int) -> Tensor:
        """See Gradients."""

    @abstractmethod
    def chunk(self, index: int) -> Tensor:
        """See Gradients."""

    @abstractmethod
    def taken(self, index: int) -> AbstractContextManager[Tensor]:
        """See Gradients."""

    @abstractmethod
    def expect(self, chunks: Iterable[int]) -> None:
        """See Gradients."""


def sums_of(layout: Layout) -> list[int]:
    """How many sums of squares there are of what this rank has of each parameter."""
    held = (layout.param_shard_range(param) for param in range(len(layout.specs)))
    return [sum_blocks(first, last - first) if first < last else 0 for first, last in held]


def arena_bytes(layout: Layout, dtypes: list[torch.dtype], *, stored: bool) -> int:
    """What either takes from the arena."""
    sums = carved_bytes(8 * sum(sums_of(layout)))
    if stored:
        return sums + carved_bytes(_carried_bytes(dtypes))
    parts = (layout.shard_numel(flat.index) * dtypes[flat.index].itemsize for flat in layout.flats)
    return sums + sum(map(carved_bytes, parts))


def _carried_bytes(dtypes: list[torch.dtype]) -> int:
    return SUM_BLOCK * max((dtype.itemsize for dtype in dtypes), default=0)


class InRam(Waiting):
    """All of them."""

    def __init__(self, layout: Layout, dtypes: list[torch.dtype], arena: Lender, kernels: Kernels) -> None:
        super().__init__(layout, dtypes, arena, kernels)
        self._parts = [
            arena.carve(layout.shard_numel(flat.index) * dtypes[flat.index].itemsize).view(dtypes[flat.index])
            for flat in layout.flats
        ]

    def place(self, bucket: Bucket) -> Tensor:
        return self._parts[bucket.flat][bucket.start : bucket.start + bucket.numel]

    def put(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        self._kernels.accumulate(self.place(bucket), average)

    def sum(self, params: Collection[int]) -> None:
        for param in params:
            if self.sums[param].numel():
                self._kernels.sum_squares(self.line(param), self._layout.param_shard_range(param)[0], self.sums[param])

    def line(self, param: int) -> Tensor:
        flat, offset = self._layout.locations[param]
        first, last = self._layout.param_shard_range(param)
        start = offset - self._layout.shard_range(flat)[0]
        return self._parts[flat][start + first : start + last] if first < last else self._parts[flat][:0]

    def chunk(self, index: int) -> Tensor:
        chunk = self._layout.chunks[index]
        start = chunk.start - self._layout.shard_range(chunk.flat)[0]
        return self._parts[chunk.flat][start : start + chunk.numel]

    def taken(self, index: int) -> AbstractContextManager[Tensor]:
        return nullcontext(self.chunk(index))

    def expect(self, chunks: Iterable[int]) -> None:
        return None


class _Carried(NamedTuple):
    """Elements `start` to `stop` of a parameter, the later ones of a block."""

    param: int
    start: int
    stop: int


class InSlots(Waiting):
    """See [Note: averages in slots]. Args: store: of them."""

    def __init__(
        self, layout: Layout, dtypes: list[torch.dtype], arena: Lender, kernels: Kernels, store: Store
    ) -> None:
        super().__init__(layout, dtypes, arena, kernels)
        self._store = store
        self._memory = arena.carve(_carried_bytes(dtypes))
        self._carried: _Carried | None = None
        self._chunks: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in reversed(layout.chunks):
            self._chunks[chunk.flat].append(chunk)

    def place(self, bucket: Bucket) -> None:
        return None

    def put(self, bucket: Bucket, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        begin = self._layout.shard_range(bucket.flat)[0] + bucket.start
        for chunk in self._chunks[bucket.flat]:
            start, stop = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + bucket.numel)
            if start >= stop:
                continue
            is_fresh = is_first and stop - start == chunk.numel
            with self._store.lease(chunk.index, step=0, is_fresh=is_fresh) as lease:
                lease.dirty, lease.is_unfinished = True, start > chunk.start
                values = lease.arrays[0].view(self._dtypes[chunk.flat])[start - chunk.start : stop - chunk.start]
                if is_first:
                    values.copy_(average[start - begin : stop - begin])
                else:
                    self._kernels.accumulate(values, average[start - begin : stop - begin])
                if is_last:
                    self._sum_range(chunk, start - chunk.start, values)

    def _sum_range(self, chunk: Chunk, begin: int, values: Tensor) -> None:
        """Args: values: the elements of a chunk from `begin` on."""
        for piece in reversed(chunk.pieces):
            start, stop = max(piece.chunk_offset, begin), min(piece.chunk_offset + piece.numel, begin + len(values))
            if start < stop:
                first = piece.param_offset + start - piece.chunk_offset
                self._sum_part(piece.param, first, values[start - begin : stop - begin])

    def _sum_part(self, param: int, first: int, values: Tensor) -> None:
        """Args: values: the elements of a parameter from `first` on; the next ones have been here before."""
        held = self._layout.param_shard_range(param)[0]
        stop = first + len(values)
        if self._carried is not None:
            stop = max(first, held, (stop - 1) // SUM_BLOCK * SUM_BLOCK)
            self._carry(param, stop, values[stop - first :], self._carried.stop)
            if stop == held or stop % SUM_BLOCK == 0:
                self._sum(param, stop, self._carried_values(values.dtype))
                self._carried = None
        whole = first if first == held else min(round_up(first, SUM_BLOCK), stop)
        if whole < stop:
            self._sum(param, whole, values[whole - first : stop - first])
        if first < whole:
            self._carry(param, first, values[: whole - first], whole)

    def _carry(self, param: int, start: int, values: Tensor, stop: int) -> None:
        """Puts `values`, from element `start` on, before what is carried, which ends at `stop`."""
        at = start % SUM_BLOCK
        self._memory.view(values.dtype)[at : at + len(values)] = values
        self._carried = _Carried(param, start, stop)

    def _carried_values(self, dtype: torch.dtype) -> Tensor:
        assert self._carried is not None
        _, start, stop = self._carried
        return self._memory.view(dtype)[start % SUM_BLOCK :][: stop - start]

    def _sum(self, param: int, first: int, values: Tensor) -> None:
        block = first // SUM_BLOCK - self._layout.param_shard_range(param)[0] // SUM_BLOCK
        self._kernels.sum_squares(values, first, self.sums[param][block : block + sum_blocks(first, len(values))])

    def sum(self, params: Collection[int]) -> None:
        assert self._carried is None

    def line(self, param: int) -> Tensor:
        first, last = self._layout.param_shard_range(param)
        line = torch.empty(last - first, dtype=self._dtypes[self._layout.locations[param][0]], device="cpu")
        for index in self._layout.chunks_of[param]:
            with self._store.lease(index, step=0) as lease:
                values = lease.arrays[0].view(line.dtype)
                for piece in self._layout.chunks[index].pieces:
                    if piece.param == param:
                        start = piece.param_offset - first
                        line[start : start + piece.numel] = values[piece.chunk_offset :][: piece.numel]
        return line

    def chunk(self, index: int) -> Tensor:
        raise AssertionError("these gradients are in slots")

    @contextmanager
    def taken(self, index: int) -> Iterator[Tensor]:
        with self._store.lease(index, step=0) as lease:
            lease.is_spent = True
            yield lease.arrays[0].view(self._dtypes[self._layout.chunks[index].flat])

    def expect(self, chunks: Iterable[int]) -> None:
        self._store.expect(chunks)
