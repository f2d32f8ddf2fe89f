"""Where the gradients of a rank's own shards wait for the step: in memory, in the slots of a store, or some in each.

[Note: gradients in slots]
With `grad_tier="nvme"` the gradients of each chunk are one item of a store. What comes is added to the chunks it lies
in; a chunk stays in RAM until its last elements of the micro-batch have come, is written, and is read again by the
next micro-batch or the step. The squares are summed while the values are in RAM: [Note: sums of squares] in sums.py.
Gradients whose states are on the device (`Run.device_flats`) wait there all the same, and their slots are not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from offload.choices import GradChoice
from offload.grads import sums
from offload.grads.sums import SquareSums, write_or_add
from offload.layout import Chunk, Layout, Piece, once_a_layout
from offload.profiling import SUMS
from offload.ranks.buckets import SubRange
from offload.regions import Region
from offload.run import Run
from offload.storage.chunk_cache import Store, Use
from offload.storage.swap_format import SlotArrays
from offload.tiers import DEVICE


def dtypes_of(layout: Layout, accumulation: int) -> list[torch.dtype]:
    """The dtype in which the gradients of each flat parameter wait: fp32 if they are sums."""
    return [torch.float32 if accumulation > 1 else flat.dtype for flat in layout.flats]


@once_a_layout
def gradient_slot_arrays(layout: Layout, accumulation: int) -> list[SlotArrays]:
    """What the slot of each chunk's gradients holds, with grad_tier="nvme"."""
    dtypes = dtypes_of(layout, accumulation)
    return [SlotArrays(chunk.numel, (dtypes[chunk.flat].itemsize,)) for chunk in layout.chunks]


GRADIENTS = "gradients"


def regions(layout: Layout, choice: GradChoice, device_flats: Collection[int] = ()) -> list[Region]:
    """What `open_shards` reserves.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients.
        device_flats: see `Run`.
    """
    dtypes = dtypes_of(layout, choice.micro_batches)
    reserved = sums.regions(layout, choice, dtypes, device_flats)
    for flat in layout.flats:
        is_there = flat.index in device_flats
        if choice.tier.is_durable and not is_there:
            continue
        tier = DEVICE if is_there else choice.tier.memory
        size = layout.shard_numel(flat.index) * dtypes[flat.index].itemsize
        reserved.append(Region(tier, GRADIENTS, size, kind="grad"))
    return reserved


class Place(NamedTuple):
    """Where elements of a gradient go, and in which of the step's micro-batches.

    Attributes:
        chunk: the chunk.
        start: its element at which they begin.
        is_first: whether they are of the first micro-batch, and replace what is there.
        is_last: whether they are of the last one that is expected.
        is_unfinished: whether more elements of this chunk are about to come.
    """

    chunk: Chunk
    start: int
    is_first: bool
    is_last: bool
    is_unfinished: bool


class GradShards(ABC):
    """The gradients of this rank's shards, and the sums of their squares.

    Gradients come in one of two ways. Those that come whole are copied to the memory that `tile_memory`,
    `memory_of` or `range_memory` gives. All others come through `add` or `add_range`.

    One thread at a time calls it; beside it another one may call `tile_memory` and `memory_of`.

    Args:
        run: what the parts of a run share.
        micro_batches: the most micro-batches that a step may have.
        sums: the sums of squares; None: they are made here.

    Attributes:
        is_in_memory: whether all gradients are in memory that the step's kernels use. Then squares are summed when all
            of a gradient is there; if not, then as the elements of its last micro-batch come.
        dtypes: of the gradients, for each flat parameter.
        come_whole: whether all gradients come whole.
        sums: the sums of squares.
        read_soon: see `GradientBuffer.read_soon`.
    """

    is_in_memory: bool
    come_whole: bool = False
    read_soon: Collection[int] = ()

    def __init__(self, run: Run, micro_batches: int, sums: SquareSums | None = None) -> None:
        self._layout = run.layout
        self._kernels_of = run.kernels_of
        self._timeline = run.timeline
        self.dtypes = dtypes_of(run.layout, micro_batches)
        self.sums = SquareSums(run) if sums is None else sums
        self._chunks_of_flat: dict[int, list[Chunk]] = {flat.index: [] for flat in run.layout.flats}
        for chunk in reversed(run.layout.chunks):
            self._chunks_of_flat[chunk.flat].append(chunk)

    # As gradients come.

    @abstractmethod
    def tile_memory(self, param: int, tile: int) -> Tensor | None:
        """The memory to which a tile's gradient is copied, shape (numel of the tile,).

        It is None if the gradient has to come through `add`, because it is in slots, or there are micro-batches to be
        summed.

        Args:
            param: the parameter's index, with one rank.
            tile: the tile's index.
        """

    @abstractmethod
    def memory_of(self, params: Sequence[int]) -> Tensor | None:
        """The memory to which gradients are copied together, from the first one's beginning to the last one's end.

        It is None if they have to come through `add`, as for `tile_memory`.

        Args:
            params: parameters that lie side by side in a flat parameter, none of which has tiles, with one rank.
        """

    @abstractmethod
    def range_memory(self, one: SubRange) -> Tensor | None:
        """The memory of the averages of a sub-range of a bucket, shape (one.numel,), which are about to change.

        It is None if they have to come through `add_range`, because they are in slots.
        """

    def add(self, values: Tensor, place: Place) -> None:
        """Writes elements of a chunk's gradients, or adds to them.

        Args:
            values: 1-D, where the kernels can read them.
            place: which elements they are.
        """
        chunk, start, is_first, is_last, is_unfinished = place
        stop = start + len(values)
        is_fresh = is_first and len(values) == chunk.numel
        pieces = list(_pieces_in(chunk, start, stop))
        name = self._layout.specs[pieces[0].param].name if len(pieces) == 1 else None
        with self._lent(chunk, is_fresh=is_fresh, is_unfinished=is_unfinished) as grads:
            for piece in pieces:
                self.sums.changes(piece.param, self.sums.tile_at(piece.param, piece.param_offset))
            into = grads[start:stop]
            with self._event("cast" if is_first else "accumulate", chunk.index, name):
                write_or_add(self._kernels_of(chunk.flat), values, into, is_first=is_first)
            if is_last and not self.is_in_memory:
                with self._event("sum of squares", chunk.index, name):
                    for piece in reversed(pieces):
                        summed = into[piece.chunk_offset - start :][: piece.numel]
                        self.sums.sum_part(piece.param, piece.param_offset, summed)

    def add_range(self, one: SubRange, average: Tensor, *, is_first: bool, is_last: bool) -> None:
        """Writes the average of a sub-range of a bucket, or adds it.

        Args:
            one: the sub-range.
            average: shape (one.numel,), where the kernels can read it.
            is_first: whether this is the first round of the step.
            is_last: whether it is the last one that is expected.
        """
        begin = self._layout.shard_range(one.within.flat)[0] + one.start
        for chunk in self._chunks_of_flat[one.within.flat]:
            start, stop = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + one.numel)
            if start < stop:
                at, values = start - chunk.start, average[start - begin : stop - begin]
                self.add(values, Place(chunk, at, is_first, is_last, is_unfinished=at > 0))

    @abstractmethod
    def _lent(self, chunk: Chunk, *, is_fresh: bool, is_unfinished: bool) -> AbstractContextManager[Tensor]:
        """Lends a chunk's gradients, shape (chunk.numel,), to be changed.

        Args:
            chunk: the chunk.
            is_fresh: whether all elements are overwritten.
            is_unfinished: as in `Place`.
        """

    @abstractmethod
    def tile_has_come(self, param: int, tile: int) -> None:
        """Sums the squares of a tile when all of its elements have come for the last time that is expected."""

    def sum_squares(self, params: Iterable[int]) -> None:
        """Makes the sums of these parameters current, when all elements have come."""
        self.sums.require_whole()
        for param in params:
            for tile in self.sums.stale(param):
                self._sum_tile(param, tile, self._tile_values(param, tile))

    def _sum_tile(self, param: int, tile: int, values: Tensor) -> None:
        chunk = next(iter(self._layout.chunks_of[param]), None)
        with self._event("sum of squares", chunk, self._layout.specs[param].name):
            self.sums.sum_tile(param, tile, values)

    def _event(self, what: str, chunk: int | None, parameter: str | None) -> AbstractContextManager[None]:
        return self._timeline.event(SUMS, what, chunk=chunk, parameter=parameter)

    @abstractmethod
    def make_zeros(self, param: int, tile: int) -> None:
        """Makes the gradient of a tile, of which nothing has come, zeros."""

    @abstractmethod
    def _tile_values(self, param: int, tile: int) -> Tensor:
        """This rank's elements of a tile, 1-D."""

    # When they are there.

    @abstractmethod
    def values(self, param: int) -> Tensor:
        """See `GradientBuffer.values`."""

    def write(self, param: int, values: Tensor, start: int = 0) -> None:
        """Replaces whole tiles of a gradient, with one rank, and sums the squares of what is there then.

        Args:
            param: the parameter's index.
            values: 1-D, in the dtype in which they wait; or what `values` gave for these elements, and was changed.
            start: the element of the parameter at which they begin.
        """
        stop = start + len(values)
        tiles = [(tile, span) for tile, span in enumerate(self.sums.spans[param]) if start <= span.first < stop]
        for tile, _ in tiles:
            self.sums.changes(param, tile)
        self._write(param, values, start)
        for tile, span in tiles:
            self._sum_tile(param, tile, values[span.first - start :][: span.numel])

    @abstractmethod
    def _write(self, param: int, values: Tensor, start: int) -> None:
        """Replaces elements of a gradient."""

    @abstractmethod
    def chunk_memory(self, index: int) -> Tensor:
        """See `GradientBuffer.chunk_memory`."""

    @abstractmethod
    def lend(self, index: int) -> AbstractContextManager[Tensor]:
        """See `GradientBuffer.lend`."""

    @abstractmethod
    def drop_chunk(self, index: int) -> None:
        """See `GradientBuffer.drop_chunk`."""

    @abstractmethod
    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        """See `GradientBuffer.shard`."""

    def discard(self, index: int) -> None:  # noqa: B027
        """See `GradientBuffer.discard`."""

    @abstractmethod
    def expect(self, chunks: Iterable[int], *, repeats: bool) -> None:
        """See `GradientBuffer.expect`."""


class ShardsInMemory(GradShards):
    """Gradients that wait in memory: each in RAM, or on the device, with its states.

    Args:
        run: what the parts of a run share.
        micro_batches: the most micro-batches that a step may have.
        flats: the flat parameters whose gradients these are; None: all.
        sums: the sums of squares; None: they are made here.
    """

    is_in_memory = True

    def __init__(
        self, run: Run, micro_batches: int, flats: Collection[int] | None = None, sums: SquareSums | None = None
    ) -> None:
        super().__init__(run, micro_batches, sums)
        layout = run.layout
        own = [flat.index for flat in layout.flats if flats is None or flat.index in flats]
        pieces = zip(own, run.memory.take(GRADIENTS), strict=True)
        self._flats = {flat: shard.view(self.dtypes[flat]) for flat, shard in pieces}
        starts = [layout.shard_range(flat.index)[0] for flat in layout.flats]
        chunks = (chunk for chunk in layout.chunks if chunk.flat in self._flats)
        self._chunks = {c.index: self._flats[c.flat][c.start - starts[c.flat] :][: c.numel] for c in chunks}
        self._params: dict[int, Tensor] = {}
        for param, flat in enumerate(layout.flat_of):
            if flat in self._flats:
                offset, (first, last) = layout.locations[param][1], layout.param_shard_range(param)
                self._params[param] = self._flats[flat][max(offset + first - starts[flat], 0) :][: last - first]
        self._tiles = {param: self._tiles_of(param) for param in self._params}
        self.come_whole = micro_batches == 1

    def _tiles_of(self, param: int) -> list[Tensor]:
        spans, values = self.sums.spans[param], self._params[param]
        return [values[span.first - spans[0].first :][: span.numel] for span in spans]

    def tile_memory(self, param: int, tile: int) -> Tensor | None:
        if not self.come_whole:
            return None
        self.sums.changes(param, tile)
        return self._tiles[param][tile]

    def memory_of(self, params: Sequence[int]) -> Tensor | None:
        if not self.come_whole:
            return None
        for param in params:
            self.sums.changes(param)
        (flat, start), (_, last) = (self._layout.locations[param] for param in (params[0], params[-1]))
        return self._flats[flat][start : last + self._layout.specs[params[-1]].numel]

    def range_memory(self, one: SubRange) -> Tensor:
        for piece in one.pieces(self._layout, self._layout.rank):
            self.sums.changes(piece.param)  # which has no tiles
        return self._flats[one.within.flat][one.start : one.start + one.numel]

    def _lent(self, chunk: Chunk, *, is_fresh: bool, is_unfinished: bool) -> AbstractContextManager[Tensor]:
        return nullcontext(self._chunks[chunk.index])

    def tile_has_come(self, param: int, tile: int) -> None:
        self._sum_tile(param, tile, self._tiles[param][tile])

    def make_zeros(self, param: int, tile: int) -> None:
        self.sums.changes(param, tile)
        self._tiles[param][tile].zero_()

    def _tile_values(self, param: int, tile: int) -> Tensor:
        return self._tiles[param][tile]

    def values(self, param: int) -> Tensor:
        return self._params[param]

    def _write(self, param: int, values: Tensor, start: int) -> None:
        target = self._params[param][start : start + len(values)]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)

    def chunk_memory(self, index: int) -> Tensor:
        return self._chunks[index]

    def lend(self, index: int) -> AbstractContextManager[Tensor]:
        return nullcontext(self._chunks[index])

    def drop_chunk(self, index: int) -> None:
        return None  # what comes next overwrites it

    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        return nullcontext(self._chunks[index])

    def expect(self, chunks: Iterable[int], *, repeats: bool) -> None:
        return None


def use_of(*, is_fresh: bool, is_unfinished: bool) -> Use:
    """What a chunk in a slot is leased for when gradients are added to it.

    Args:
        is_fresh: whether all of its elements are overwritten.
        is_unfinished: as in `Place`.
    """
    return Use.OVERWRITE if is_fresh else Use.FILL if is_unfinished else Use.UPDATE


class ShardsInSlots(GradShards):
    """Gradients that wait in the slots of a store; see [Note: gradients in slots]."""

    is_in_memory = False

    def __init__(self, run: Run, micro_batches: int, store: Store, sums: SquareSums | None = None) -> None:
        super().__init__(run, micro_batches, sums)
        self._store = store

    def tile_memory(self, param: int, tile: int) -> None:
        return None

    def memory_of(self, params: Sequence[int]) -> None:
        return None

    def range_memory(self, one: SubRange) -> None:
        return None

    def tile_has_come(self, param: int, tile: int) -> None:
        self.sums.have_come(param, tile)  # they were summed as they came

    def make_zeros(self, param: int, tile: int) -> None:
        span = self.sums.spans[param][tile]
        for chunk, piece in self._layout.pieces_of(param):
            if span.first <= piece.param_offset < span.stop:  # no piece has elements of two tiles
                self._store.discard(chunk.index)  # whose next lease finds zeros; it has a tile, and nothing else
        self.sums.make_zeros(param, tile)

    def _tile_values(self, param: int, tile: int) -> Tensor:
        span = self.sums.spans[param][tile]
        return self._values_between(param, span.first, span.stop)

    @contextmanager
    def _lent(self, chunk: Chunk, *, is_fresh: bool, is_unfinished: bool) -> Iterator[Tensor]:
        use = use_of(is_fresh=is_fresh, is_unfinished=is_unfinished)
        with self._store.lease(chunk.index, use, step=0) as lease:
            yield lease.arrays[0].view(self.dtypes[chunk.flat])
            if not is_unfinished and chunk.index in self.read_soon:
                self._store.retain(chunk.index)

    def values(self, param: int) -> Tensor:
        return self._values_between(param, *self._layout.param_shard_range(param))

    def _values_between(self, param: int, first: int, last: int) -> Tensor:
        """Elements of a gradient between two places where pieces begin or end."""
        result = torch.empty(last - first, dtype=self.dtypes[self._layout.locations[param][0]], device="cpu")
        for chunk, piece in self._layout.pieces_of(param):
            if first <= piece.param_offset < last:
                with self._store.lease(chunk.index, Use.READ, step=0) as lease:
                    stored = lease.arrays[0].view(result.dtype)[piece.chunk_offset :][: piece.numel]
                    result[piece.param_offset - first :][: piece.numel] = stored
        return result

    def _write(self, param: int, values: Tensor, start: int) -> None:
        for chunk, piece in self._layout.pieces_of(param):
            if start <= piece.param_offset < start + len(values):  # no piece has elements of two tiles
                with self._store.lease(chunk.index, Use.UPDATE, step=0) as lease:
                    stored = lease.arrays[0].view(values.dtype)[piece.chunk_offset :][: piece.numel]
                    stored.copy_(values[piece.param_offset - start :][: piece.numel])

    def chunk_memory(self, index: int) -> Tensor:
        raise AssertionError("these gradients are in slots")

    @contextmanager
    def lend(self, index: int) -> Iterator[Tensor]:
        with self._store.lease(index, Use.READ, step=0) as lease:
            yield lease.arrays[0].view(self.dtypes[self._layout.chunks[index].flat])

    def drop_chunk(self, index: int) -> None:
        self._store.discard(index)

    @contextmanager
    def shard(self, index: int) -> Iterator[Tensor]:
        with self._store.lease(index, Use.CONSUME, step=0) as lease:
            yield lease.arrays[0].view(self.dtypes[self._layout.chunks[index].flat])

    def discard(self, index: int) -> None:
        self._store.discard(index)

    def expect(self, chunks: Iterable[int], *, repeats: bool) -> None:
        if repeats:  # the next backward comes to them in the order of the last one, not of the step
            self._store.repeat(chunks)
        else:
            self._store.expect(chunks, repeats=False)


class ShardsInBoth(GradShards):
    """Gradients of `Run.device_flats` on the device, and others in slots; see [Note: gradients in slots].

    Each call is passed on to those whose gradient it is of.
    """

    is_in_memory = False

    def __init__(self, run: Run, micro_batches: int, store: Store) -> None:
        super().__init__(run, micro_batches)
        there = ShardsInMemory(run, micro_batches, run.device_flats, self.sums)
        in_slots = ShardsInSlots(run, micro_batches, store, self.sums)
        self._by_flat = [there if flat.index in run.device_flats else in_slots for flat in run.layout.flats]
        self._in_slots = in_slots

    def _of(self, param: int) -> GradShards:
        return self._by_flat[self._layout.flat_of[param]]

    def tile_memory(self, param: int, tile: int) -> Tensor | None:
        return self._of(param).tile_memory(param, tile)

    def memory_of(self, params: Sequence[int]) -> Tensor | None:
        return self._of(params[0]).memory_of(params)

    def range_memory(self, one: SubRange) -> Tensor | None:
        return self._by_flat[one.within.flat].range_memory(one)

    def add(self, values: Tensor, place: Place) -> None:
        self._by_flat[place.chunk.flat].add(values, place)

    def _lent(self, chunk: Chunk, *, is_fresh: bool, is_unfinished: bool) -> AbstractContextManager[Tensor]:
        raise AssertionError("`add` is passed on")

    def tile_has_come(self, param: int, tile: int) -> None:
        self._of(param).tile_has_come(param, tile)

    def make_zeros(self, param: int, tile: int) -> None:
        self._of(param).make_zeros(param, tile)

    def _tile_values(self, param: int, tile: int) -> Tensor:
        return self._of(param)._tile_values(param, tile)

    def values(self, param: int) -> Tensor:
        return self._of(param).values(param)

    def _write(self, param: int, values: Tensor, start: int) -> None:
        self._of(param)._write(param, values, start)

    def _of_chunk(self, index: int) -> GradShards:
        return self._by_flat[self._layout.chunks[index].flat]

    def chunk_memory(self, index: int) -> Tensor:
        return self._of_chunk(index).chunk_memory(index)

    def lend(self, index: int) -> AbstractContextManager[Tensor]:
        return self._of_chunk(index).lend(index)

    def drop_chunk(self, index: int) -> None:
        self._of_chunk(index).drop_chunk(index)

    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        return self._of_chunk(index).shard(index)

    def discard(self, index: int) -> None:
        self._of_chunk(index).discard(index)

    def expect(self, chunks: Iterable[int], *, repeats: bool) -> None:
        of = self._layout.chunks
        own = (chunk for chunk in chunks if self._by_flat[of[chunk].flat] is self._in_slots)
        self._in_slots.expect(own, repeats=repeats)


def _pieces_in(chunk: Chunk, start: int, stop: int) -> Iterator[Piece]:
    """The pieces of a chunk, or parts of them, which lie in its elements `start` to `stop`, in their order."""
    at = max(bisect(chunk.pieces, start, key=lambda piece: piece.chunk_offset) - 1, 0)
    while at < len(chunk.pieces) and (piece := chunk.pieces[at]).chunk_offset < stop:
        low, high = max(piece.chunk_offset, start), min(piece.chunk_offset + piece.numel, stop)
        if high - low == piece.numel:
            yield piece
        elif low < high:
            yield Piece(piece.param, piece.param_offset + low - piece.chunk_offset, low, high - low)
        at += 1


def open_shards(run: Run, micro_batches: int, store: Store | None) -> GradShards:
    """Opens the place where this rank's gradients wait.

    Args:
        run: what the parts of a run share.
        micro_batches: the most micro-batches that a step may have.
        store: where gradients in slots are; None: they are in memory.
    """
    if store is None:
        return ShardsInMemory(run, micro_batches)
    return (ShardsInBoth if run.device_flats else ShardsInSlots)(run, micro_batches, store)
