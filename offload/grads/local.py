"""The gradient sink: where gradients go as backward makes them.

[Note: the way of a gradient]
A hook hands over each parameter's gradient as soon as autograd has accumulated it. The sink copies it into RAM: in
the dtype it was made in, or, with accumulation over N > 1 micro-batches, summed in fp32 in the order of the
micro-batches. With the last declared micro-batch it takes the sum of squares, in blocks fixed by an element's
position in its parameter, or in its tile: so the norm costs no pass of its own, and has the same bits whatever the
units, chunks and threads are. Non-finite gradients show in the same sums.

With `grad_tier="nvme"` the gradients of a chunk are an item of a store of their own: leased for each piece that comes,
kept in RAM until all of them have, written, and read again by the step. Chunks end at borders of those blocks then.

On a device with memory of its own the copies run on streams, and one worker thread does what follows them, in
order; on the CPU everything happens inside the hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from queue import SimpleQueue

import torch
from torch import Tensor

from offload.config import SUM_BLOCK
from offload.devices.copies import Copier
from offload.grads.base import AS_HELD, Gradients, too_often
from offload.interrupts import wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Layout, Piece
from offload.native import Kernels, sum_blocks
from offload.profiling import GRADIENTS, SUMS, TO_HOST, Timeline
from offload.storage.arena import Lender, carved_bytes
from offload.storage.chunk_cache import Store
from offload.storage.swap_format import Record

BOUNCES = 2


def _dtype(layout: Layout, flat: int, accumulation: int) -> torch.dtype:
    return torch.float32 if accumulation > 1 else layout.flats[flat].dtype


def _sums_numel(layout: Layout) -> int:
    tiles = chain.from_iterable(layout.tiles_of(param) for param in range(len(layout.specs)))
    return sum(sum_blocks(0, stop - start) for start, stop in tiles)


def _bounce_bytes(layout: Layout) -> int:
    return max((layout.flats[c.flat].dtype.itemsize * c.numel for c in layout.chunks), default=0)


def records_of(layout: Layout, accumulation: int) -> list[Record]:
    """What the slot of each chunk's gradients holds, with grad_tier="nvme"."""
    return [Record(c.numel, (_dtype(layout, c.flat, accumulation).itemsize,)) for c in layout.chunks]


def arena_bytes(layout: Layout, accumulation: int, *, direct: bool, stored: bool = False) -> int:
    """What a sink takes from the arena: the gradients, unless they are `stored`, their sums of squares and, if copies
    need them, bounces."""
    flats = sum(carved_bytes(f.numel * _dtype(layout, f.index, accumulation).itemsize) for f in layout.flats)
    needs_bounces = not direct and (accumulation > 1 or stored)
    bounces = BOUNCES * carved_bytes(_bounce_bytes(layout)) if needs_bounces else 0
    return (0 if stored else flats) + bounces + carved_bytes(8 * _sums_numel(layout))


class GradientSink(Gradients):
    """Of a rank that is alone: all gradients. See [Note: the way of a gradient]."""

    def __init__(
        self,
        layout: Layout,
        accumulation: int,
        arena: Lender,
        kernels: Kernels,
        copier: Copier,
        timeline: Timeline,
        store: Store | None = None,
    ) -> None:
        self._layout = layout
        self._store = store
        self.accumulation = accumulation
        self._kernels = kernels
        self._copier = copier
        self._timeline = timeline
        self._flats = []
        for flat in layout.flats if store is None else ():
            dtype = _dtype(layout, flat.index, accumulation)
            self._flats.append(arena.carve(flat.numel * dtype.itemsize).view(dtype))
        # By parameter, of each of its tiles; a parameter without tiles is one.
        self._tiles = [layout.tiles_of(param) for param in range(len(layout.specs))]
        self._all_sums = arena.carve(8 * _sums_numel(layout)).view(torch.float64)
        self._sums = self._split_sums(self._all_sums)
        self.scale = AS_HELD
        self.factors = {}
        self._arrived = self._none()
        # Counts what arrived; the sums are of the count noted with them.
        self._generation = self._none()
        self._summed = self._none()
        self._pending: list[tuple[int, Future[None]]] = []
        self._first_chunk = [next(iter(layout.chunks_of[param]), None) for param in range(len(layout.specs))]
        self._worker: Workers | None = None
        self._bounces: SimpleQueue[Tensor] = SimpleQueue()
        if not copier.direct:
            self._worker = Workers(1, "offload-gradients")
            if accumulation > 1 or store is not None:
                for _ in range(BOUNCES):
                    self._bounces.put(arena.carve(_bounce_bytes(layout)))

    def _none(self) -> list[list[int]]:
        return [[0] * len(tiles) for tiles in self._tiles]

    def _split_sums(self, sums: Tensor) -> list[list[Tensor]]:
        sizes = [sum_blocks(0, stop - start) for tiles in self._tiles for start, stop in tiles]
        blocks = iter(sums.split(sizes) if sizes else ())
        return [[next(blocks) for _ in tiles] for tiles in self._tiles]

    def line(self, param: int) -> Tensor:
        if self._store is None:
            return self._buffer(param)
        dtype = _dtype(self._layout, self._layout.places[param][0], self.accumulation)
        line = torch.empty(self._layout.specs[param].numel, dtype=dtype, device="cpu")
        for index in self._layout.chunks_of[param]:
            with self._store.lease(index, step=0) as lease:
                for piece in self._layout.chunks[index].pieces:
                    if piece.param == param:
                        part = lease.arrays[0].view(dtype)[piece.chunk_offset : piece.chunk_offset + piece.numel]
                        line[piece.param_offset : piece.param_offset + piece.numel] = part
        return line

    def put(self, param: int, line: Tensor) -> None:
        if self._store is None:
            self._buffer(param).copy_(line)
        else:
            for index in self._layout.chunks_of[param]:
                with self._store.lease(index, step=0) as lease:
                    lease.dirty = True
                    values = lease.arrays[0].view(line.dtype)
                    for piece in self._layout.chunks[index].pieces:
                        if piece.param == param:
                            part = line[piece.param_offset : piece.param_offset + piece.numel]
                            values[piece.chunk_offset : piece.chunk_offset + piece.numel] = part
        for tile, (start, stop) in enumerate(self._tiles[param]):
            self._kernels.sum_squares(line[start:stop], 0, self._sums[param][tile])
            self._summed[param][tile] = self._generation[param][tile]

    @contextmanager
    def taken(self, index: int) -> Iterator[Tensor]:
        if self._store is None:
            yield self.chunk(index)
            return
        with self._store.lease(index, step=0) as lease:
            lease.is_spent = True
            yield lease.arrays[0].view(_dtype(self._layout, self._layout.chunks[index].flat, self.accumulation))

    def expect(self, chunks: Iterable[int]) -> None:
        if self._store is not None:
            self._store.expect(chunks)

    def chunk(self, index: int) -> Tensor:
        chunk = self._layout.chunks[index]
        return self._flats[chunk.flat][chunk.start : chunk.start + chunk.numel]

    def dtype(self, chunk: Chunk) -> torch.dtype:
        return _dtype(self._layout, chunk.flat, self.accumulation)

    def _buffer(self, param: int, tile: int | None = None) -> Tensor:
        flat, offset = self._layout.places[param]
        start, stop = (0, self._layout.specs[param].numel) if tile is None else self._tiles[param][tile]
        return self._flats[flat][offset + start : offset + stop]

    def has(self, param: int) -> bool:
        return all(self._arrived[param])

    def arrive(self, param: int, grad: Tensor, start: int = 0) -> None:
        for tile, (first, stop) in enumerate(self._tiles[param]):
            if start <= first and stop <= start + grad.numel():
                self._arrive(param, tile, grad[first - start : stop - start])

    def _arrive(self, param: int, tile: int, grad: Tensor) -> None:
        arrived = self._arrived[param]
        if arrived[tile] == self.accumulation:
            raise too_often(self._layout.specs[param].name, self.accumulation)
        first = arrived[tile] == 0
        arrived[tile] += 1
        self._generation[param][tile] += 1
        generation = self._generation[param][tile]
        if not self._copier.direct:
            self._timeline.count("device_to_host_bytes", grad.numel() * grad.element_size())
        size = grad.numel() * grad.element_size()
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param, size):
            if self._store is not None:
                for piece in self._pieces(param, tile):
                    self._store_piece(piece, tile, grad, first=first, generation=generation)
                return
            if self.accumulation == 1:
                self._then(param, self._copy(param, grad, self._buffer(param, tile)))
            else:
                for part, into in self._parts(param, tile, grad):
                    self._accumulate(param, part, into, first=first)
            if arrived[tile] == self.accumulation:
                self._then(param, lambda: self._sum(param, tile, generation))

    def forget(self, param: int) -> None:
        self._arrived[param] = [0] * len(self._tiles[param])

    def forget_all(self) -> None:
        self._arrived = self._none()

    def drain(self) -> None:
        while self._pending:
            # Forgotten only when it is done: whoever is interrupted here has to wait again.
            param, work = self._pending[0]
            if not work.done():
                with self._waiting("wait for gradient", param):
                    wait_for_all([work])
            work.result()
            del self._pending[0]

    def collect(self, params: Collection[int]) -> list[int]:
        with self._timeline.span("gradient_s"):
            self.drain()
            for param in params:
                for tile, generation in enumerate(self._generation[param]):
                    if self._summed[param][tile] != generation:
                        if self._store is None:
                            self._sum(param, tile, generation)
                        else:
                            self._sum_stored(param, tile)
        return list(params)

    def norm(self, params: Collection[int]) -> float:
        # From another device they come at once.
        held = self._sums if self._all_sums.is_cpu else self._split_sums(self._all_sums.cpu())
        sums = (blocks.numpy() for param in params for blocks in held[param])
        return math.sqrt(math.fsum(chain.from_iterable(sums)))

    def norms(self, params: Sequence[int], order: float = 2.0) -> list[float]:
        if order == 2.0:
            return [self.norm([param]) for param in params]
        return [float(torch.linalg.vector_norm(self.line(param).float(), order)) for param in params]

    def not_finite(self, params: Collection[int]) -> list[int]:
        if math.isfinite(self.norm(params)):
            return []
        return [param for param in params if not math.isfinite(self.norm([param]))]

    def reset(self) -> None:
        """Drops everything, failures too. The store of gradients, if there is one, is reset by its owner."""
        wait_for_all([work for _, work in self._pending])
        self._pending.clear()
        self._arrived = self._none()
        self._generation = [[generation + 1 for generation in tiles] for tiles in self._generation]
        self.as_held()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def _event(self, lane: str, name: str, param: int, size: int | None = None) -> AbstractContextManager[None]:
        """For the timeline: something about `param`, under the first chunk that holds a piece of it."""
        chunk, parameter = self._first_chunk[param], self._layout.specs[param].name
        return self._timeline.event(lane, name, chunk=chunk, parameter=parameter, size=size)

    def _waiting(self, what: str, param: int) -> AbstractContextManager[None]:
        name = self._layout.specs[param].name
        return self._timeline.waiting(what, chunk=self._first_chunk[param], parameter=name, tier="device")

    def _copy(self, param: int, src: Tensor, dst: Tensor) -> Callable[[], None]:
        """Starts a copy into RAM; returns what waits for it."""
        if self._copier.direct:
            return self._copier.to_host(src, dst).wait
        moving = self._timeline.begin(
            TO_HOST,
            "copy",
            chunk=self._first_chunk[param],
            parameter=self._layout.specs[param].name,
            size=src.numel() * src.element_size(),
            tier="device",
        )
        copy = self._copier.to_host(src, dst)

        def arrived() -> None:
            copy.wait()
            self._timeline.end(moving)

        return arrived

    def _then(self, param: int, work: Callable[[], None]) -> None:
        """Runs `work` now, or after what was handed to the worker before."""
        if self._worker is None:
            work()
        else:
            while self._pending and self._pending[0][1].done() and not self._pending[0][1].exception():
                del self._pending[0]
            self._pending.append((param, self._worker.submit(work)))

    def _parts(self, param: int, tile: int, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and its buffer, in parts that fit a bounce."""
        line = self._buffer(param, tile)
        size = grad.numel() if self._copier.direct else max(_bounce_bytes(self._layout) // grad.element_size(), 1)
        yield from zip(grad.split(size or 1), line.split(size or 1), strict=True)

    def _accumulate(self, param: int, part: Tensor, into: Tensor, *, first: bool) -> None:
        def add(x: Tensor) -> None:
            with self._event(SUMS, "cast" if first else "accumulate", param):
                if first:
                    self._kernels.cast(x, into)
                else:
                    self._kernels.accumulate(into, x)

        self._through_bounce(param, part, add)

    def _through_bounce(self, param: int, part: Tensor, use: Callable[[Tensor], None]) -> None:
        """Calls `use` with `part` in RAM: now, or in the worker when it has landed there."""
        if self._copier.direct:
            use(part)
            return
        # Blocks while both bounces are under way: the memory is bounded, so the device has to wait.
        with self._waiting("wait for bounce", param):
            bounce = self._bounces.get()
        landed = bounce[: part.numel() * part.element_size()].view(part.dtype)
        arrived = self._copy(param, part, landed)

        def finish() -> None:
            try:
                arrived()
                use(landed)
            finally:
                self._bounces.put(bounce)

        self._then(param, finish)

    def _pieces(self, param: int, tile: int) -> Iterator[tuple[Chunk, Piece]]:
        start, stop = self._tiles[param][tile]
        for index in self._layout.chunks_of[param]:
            chunk = self._layout.chunks[index]
            # No chunk has parts of two tiles.
            yield from ((chunk, p) for p in chunk.pieces if p.param == param and start <= p.param_offset < stop)

    def _store_piece(
        self, place: tuple[Chunk, Piece], tile: int, grad: Tensor, *, first: bool, generation: int
    ) -> None:
        chunk, piece = place
        offset = piece.param_offset - self._tiles[piece.param][tile][0]
        part = grad[offset : offset + piece.numel]
        # One with a tile has nothing else.
        counts = {self._arrived[other.param][0] for other in chunk.pieces} if len(chunk.pieces) > 1 else {0}
        is_complete = self._arrived[piece.param][tile] == self.accumulation

        def put(x: Tensor) -> None:
            assert self._store is not None
            with self._store.lease(chunk.index, step=0) as lease:
                lease.dirty, lease.is_unfinished = True, len(counts) > 1
                into = lease.arrays[0].view(self.dtype(chunk))[piece.chunk_offset : piece.chunk_offset + piece.numel]
                with self._event(SUMS, "store", piece.param):
                    if first:
                        self._kernels.cast(x, into)
                    else:
                        self._kernels.accumulate(into, x)
                if is_complete:
                    self._sum_piece(piece, tile, into)
                    self._summed[piece.param][tile] = generation

        self._through_bounce(piece.param, part, put)

    def _sum_piece(self, piece: Piece, tile: int, values: Tensor) -> None:
        first = piece.param_offset - self._tiles[piece.param][tile][0]
        block = first // SUM_BLOCK
        blocks = self._sums[piece.param][tile][block : block + sum_blocks(first, piece.numel)]
        with self._event(SUMS, "sum of squares", piece.param):
            self._kernels.sum_squares(values, first, blocks)

    def _sum_stored(self, param: int, tile: int) -> None:
        """Of micro-batches fewer than declared."""
        start, stop = self._tiles[param][tile]
        line = self.line(param)[start:stop]
        with self._event(SUMS, "sum of squares", param):
            self._kernels.sum_squares(line, 0, self._sums[param][tile])
        self._summed[param][tile] = self._generation[param][tile]

    def _sum(self, param: int, tile: int, generation: int) -> None:
        with self._event(SUMS, "sum of squares", param):
            self._kernels.sum_squares(self._buffer(param, tile), 0, self._sums[param][tile])
        # Of an older generation it says nothing about the gradient that came meanwhile.
        self._summed[param][tile] = generation
