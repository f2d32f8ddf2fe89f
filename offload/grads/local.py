"""The gradient buffer of a rank that is alone. See [Note: the way of a gradient] in base.py.

On the CPU everything happens inside the hook. On a device with memory of its own the copies run on streams, and one
worker thread does what follows each copy, in the order in which the gradients came. What is to be summed or stored goes
through two bounce buffers in RAM; while both are in use, the hook waits. The device goes on while gradients leave it,
and waits for those of UNITS_LEAVING units ago, whose memory it then uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import chain
from queue import SimpleQueue

from torch import Tensor

from offload import torch_private
from offload.choices import GradChoice
from offload.devices.copies import Copy
from offload.grads import shards
from offload.grads.base import GradientBuffer, too_often
from offload.interrupts import wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Layout, Piece
from offload.native import SUM_SQUARES, sum_blocks
from offload.profiling import GRADIENTS, SUMS, TO_HOST
from offload.regions import Region
from offload.run import Run
from offload.sizes import SUM_BLOCK
from offload.storage.chunk_cache import Store

BOUNCES = 2
UNITS_LEAVING = 2
"""Units whose gradients are on their way to RAM, and take memory of the device, beside the one whose backward runs."""


BOUNCE = "gradients on their way from the device"


def regions(layout: Layout, choice: GradChoice, *, in_place: bool) -> list[Region]:
    """What LocalGradients reserves.

    That is the gradients, unless they are in slots; their sums of squares; and bounce buffers, if gradients that are
    copied from the device have to be summed or stored.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients.
        in_place: whether kernels read gradients where autograd makes them.
    """
    tier = choice.tier
    reserved = shards.regions(layout, choice)
    if not in_place and (choice.passes > 1 or tier.is_durable):
        nbytes = max((layout.flats[c.flat].dtype.itemsize * c.numel for c in layout.chunks), default=0)
        reserved.append(Region(tier.memory, BOUNCE, nbytes, BOUNCES, "grad"))
    return reserved


class LocalGradients(GradientBuffer):
    """All gradients of a model, on one rank."""

    def __init__(self, run: Run, choice: GradChoice, store: Store | None = None) -> None:
        super().__init__(run, choice, store)
        self._is_stored = store is not None
        # By parameter, of each of its tiles; a parameter without tiles is one.
        self._tiles = [run.layout.tiles_of(param) for param in range(len(run.layout.specs))]
        self._count = self._zeros()
        # Counts all gradients that ever came; a sum of squares belongs to the gradient whose number `_squared` notes.
        self._generation = self._zeros()
        self._squared = self._zeros()
        # The backward in which the last gradient of each tile came.
        self._backward = self._zeros()
        self._under_way: list[tuple[int, Future[None]]] = []
        self._worker: Workers | None = None
        self._bounces: SimpleQueue[Tensor] = SimpleQueue()
        self._leaving: dict[str, list[Copy]] = {}  # by unit, the first that left first
        # Of these sums of squares. A new dict for each new sum: what is computed of older ones meanwhile goes with it.
        self._norms: dict[tuple[int, ...], float] = {}
        if not self._copier.direct:
            self._worker = Workers(1, "offload-gradients")
            for memory in run.memory.take(BOUNCE):
                self._bounces.put(memory)

    def _zeros(self) -> list[list[int]]:
        return [[0] * len(tiles) for tiles in self._tiles]

    def accumulate(self, param: int, grad: Tensor, start: int = 0) -> None:
        for tile, (first, stop) in enumerate(self._tiles[param]):
            if start <= first and stop <= start + grad.numel():
                self._accumulate(param, tile, grad[first - start : stop - start])

    def _accumulate(self, param: int, tile: int, grad: Tensor) -> None:
        count, backward = self._count[param], torch_private.graph_task_id()
        if len(count) > 1 and count[tile] and backward == self._backward[param][tile]:
            self._add(param, tile, grad)
            return
        self._backward[param][tile] = backward
        if self.most is not None and count[tile] == self.most:
            raise too_often(self._layout.specs[param].name, self.most)
        is_first = count[tile] == 0
        count[tile] += 1
        is_last = count[tile] == self.expected
        self._generation[param][tile] += 1
        generation = self._generation[param][tile]
        size = grad.numel() * grad.element_size()
        if not self._copier.direct:
            self._timeline.count("device_to_host_bytes", size)
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param, size):
            region = None if self._is_stored else self._region(param, tile)
            if region is not None and not self._is_summed:
                self._queue(param, self._copy(param, grad, region))
            else:
                for chunk, piece in self._layout.pieces_of(param):
                    self._update(chunk, piece, tile, grad, is_first=is_first)
            if region is not None and is_last:
                self._queue(param, lambda: self._sum(param, tile, 0, region, generation))

    def _add(self, param: int, tile: int, grad: Tensor) -> None:
        """Adds to a gradient that came in the same backward, in the dtype in which it waits.

        A tiled weight and its tiles are leaves of their own. So their gradients come one by one if the weight was also
        used as a whole, and have to be added as autograd adds those of all uses of a parameter.
        """
        self.drain()
        if self._is_stored:
            values = self.values(param)
            start, stop = self._tiles[param][tile]
            values[start:stop] += grad.to(values.device)
            self.write(param, values)
        else:
            region = self._region(param, tile)
            region += grad.to(region.device)
            self._sum(param, tile, 0, region, self._generation[param][tile])

    def _region(self, param: int, tile: int) -> Tensor:
        flat, offset = self._layout.locations[param]
        start, stop = self._tiles[param][tile]
        region = self._shards.region(flat, offset + start, stop - start)
        assert region is not None
        return region

    def _update(self, chunk: Chunk, piece: Piece, tile: int, grad: Tensor, *, is_first: bool) -> None:
        """Adds one piece of a tile's gradient to its chunk."""
        param = piece.param
        start, stop = self._tiles[param][tile]
        if not start <= piece.param_offset < stop:  # no piece has elements of two tiles
            return
        # A chunk with a tile holds nothing else.
        counts = {self._count[other.param][0] for other in chunk.pieces} if len(chunk.pieces) > 1 else {0}
        is_last = self._count[param][tile] == self.expected
        generation = self._generation[param][tile]
        offset = piece.param_offset - start

        def add(values: Tensor) -> None:
            update = self._shards.updated(
                chunk, piece.chunk_offset, values, is_first=is_first, is_unfinished=len(counts) > 1
            )
            with self._event(SUMS, "cast" if is_first else "accumulate", param), update as summed:
                if self._is_stored and is_last:
                    self._sum(param, tile, offset, summed, generation)

        self._through_bounce(param, grad[offset : offset + piece.numel], add)

    def has(self, param: int) -> bool:
        return all(self._count[param])

    def clear(self, param: int) -> None:
        self._count[param] = [0] * len(self._tiles[param])

    def clear_all(self) -> None:
        self._learn(max(chain.from_iterable(self._count), default=0))
        self._count = self._zeros()

    def finalize(self, params: Collection[int]) -> list[int]:
        with self._timeline.span("gradient_s"):
            self.drain()
            for param in params:
                for tile, generation in enumerate(self._generation[param]):
                    if self._squared[param][tile] != generation:  # not as many micro-batches as expected
                        start, stop = self._tiles[param][tile]
                        self._sum(param, tile, 0, self.values(param)[start:stop], generation)
        return list(params)

    def norm(self, params: Collection[int]) -> float:
        if self._everyone.size > 1:  # tensor-parallel ranks ask each other, and have to do so alike
            return super().norm(params)
        norms, key = self._norms, tuple(params)
        if key not in norms:
            norms[key] = super().norm(params)
        return norms[key]

    def drain(self) -> None:
        while self._under_way:
            # Removed only when it is done: a call that is interrupted here has to wait again.
            param, work = self._under_way[0]
            if not work.done():
                with self._waiting("wait for gradient", param):
                    wait_for_all([work])
            work.result()
            del self._under_way[0]
        self._leaving.clear()

    def write(self, param: int, values: Tensor) -> None:
        self._shards.write(param, values)
        for tile, (start, stop) in enumerate(self._tiles[param]):
            self._sum(param, tile, 0, values[start:stop], self._generation[param][tile])

    def reset(self) -> None:
        wait_for_all([work for _, work in self._under_way])
        self._under_way.clear()
        self._leaving.clear()
        self.clear_all()
        self._generation = [[generation + 1 for generation in tiles] for tiles in self._generation]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def _sum(self, param: int, tile: int, first: int, values: Tensor, generation: int) -> None:
        """Sums the squares of the elements of a tile from `first` on.

        Args:
            param: the parameter's index.
            tile: the tile's index.
            first: the element of the tile at which `values` begins.
            values: the gradient's elements, 1-D.
            generation: which gradient of the tile they are, counted from the start.
        """
        block = first // SUM_BLOCK
        blocks = self._shards.sums[param][tile][block : block + sum_blocks(first, values.numel())]
        with self._event(SUMS, "sum of squares", param):
            self._kernels.call(SUM_SQUARES, values, blocks, first=first)
        self._norms = {}
        # Of an older generation, it says nothing about the gradient that has come since.
        self._squared[param][tile] = generation

    # Copies from the device.

    def _through_bounce(self, param: int, values: Tensor, use: Callable[[Tensor], None]) -> None:
        """Calls `use` with `values` in RAM: at once on the CPU, else in the worker after the copy."""
        if self._copier.direct:
            use(values)
            return
        # The memory is bounded, so the device has to wait while both bounces are in use.
        with self._waiting("wait for bounce", param):
            bounce = self._bounces.get()
        copied = bounce[: values.numel() * values.element_size()].view(values.dtype)
        wait = self._copy(param, values, copied)

        def finish() -> None:
            try:
                wait()
                use(copied)
            finally:
                self._bounces.put(bounce)

        self._queue(param, finish)

    def _copy(self, param: int, src: Tensor, dst: Tensor) -> Callable[[], None]:
        """Starts a copy into RAM, and returns the function that waits for it."""
        if self._copier.direct:
            return self._copier.to_host(src, dst).wait
        chunk, parameter = self._labels(param)
        size = src.numel() * src.element_size()
        moving = self._timeline.begin(TO_HOST, "copy", chunk=chunk, parameter=parameter, size=size, tier="device")
        copy = self._copier.to_host(src, dst)
        self._leaving.setdefault(self._layout.flats[self._layout.locations[param][0]].unit, []).append(copy)
        while len(self._leaving) > 1 + UNITS_LEAVING:
            for earlier in self._leaving.pop(next(iter(self._leaving))):
                earlier.wait_on_device()

        def wait() -> None:
            copy.wait()
            self._timeline.end(moving)

        return wait

    def _queue(self, param: int, work: Callable[[], None]) -> None:
        """Runs `work` now, or in the worker after the work that was queued before."""
        if self._worker is None:
            work()
        else:
            while self._under_way and self._under_way[0][1].done() and not self._under_way[0][1].exception():
                del self._under_way[0]
            self._under_way.append((param, self._worker.submit(work)))

    # For the timeline.

    def _labels(self, param: int) -> tuple[int | None, str]:
        """The first chunk with a piece of `param`, and its name."""
        return next(iter(self._layout.chunks_of[param]), None), self._layout.specs[param].name

    def _event(self, lane: str, name: str, param: int, size: int | None = None) -> AbstractContextManager[None]:
        chunk, parameter = self._labels(param)
        return self._timeline.event(lane, name, chunk=chunk, parameter=parameter, size=size)

    def _waiting(self, what: str, param: int) -> AbstractContextManager[None]:
        chunk, parameter = self._labels(param)
        return self._timeline.waiting(what, chunk=chunk, parameter=parameter, tier="device")
