"""The gradient buffer of a rank that is alone. See [Note: the way of a gradient] in base.py.

On the CPU all of this file happens inside the hook. On a device with memory of its own the copies run on streams, and
one worker thread does what follows each copy, in the order in which the gradients came. What is to be summed or stored
goes through two bounce buffers in RAM; while both are in use, the hook waits. The device goes on while gradients leave
it, and waits for those of UNITS_LEAVING units ago, whose memory it then uses again. Small gradients leave together:
[Note: gathered gradients] in staging.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import zip_longest
from queue import SimpleQueue
from typing import ParamSpec

from torch import Tensor

from offload import torch_private
from offload.choices import GradChoice
from offload.devices.copies import Copy, DeviceEvent, HostCopier
from offload.grads import shards, staging
from offload.grads.base import GradientBuffer, is_in_backward
from offload.grads.shards import GradShards, Place
from offload.grads.staging import STAGING, Common, Share, Staging, side_by_side
from offload.interrupts import uninterrupted, wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Layout
from offload.profiling import GRADIENTS, TO_HOST, Event
from offload.regions import Region
from offload.run import Run

P = ParamSpec("P")

BOUNCES = 2
UNITS_LEAVING = 2
"""Units whose gradients are on their way to RAM, and take memory of the device, beside the one whose backward runs."""


BOUNCE = "gradients on their way from the device"


def regions(layout: Layout, choice: GradChoice, *, in_place: bool, device_flats: Collection[int] = ()) -> list[Region]:
    """What LocalGradients reserves.

    That is the gradients, unless they are in slots; their sums of squares; where the device has memory of its own, a
    region of that for those that leave it together; and bounce buffers, if they then have to be summed or stored.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients.
        in_place: whether kernels read gradients where autograd makes them.
        device_flats: see `Run`.
    """
    tier = choice.tier
    reserved = shards.regions(layout, choice, device_flats)
    if not in_place:
        reserved += staging.regions(layout, device_flats)
    if not in_place and (choice.micro_batches > 1 or tier.is_durable):
        come = (chunk for chunk in layout.chunks if chunk.flat not in device_flats)
        nbytes = max((layout.flats[c.flat].dtype.itemsize * c.numel for c in come), default=0)
        reserved.append(Region(tier.memory, BOUNCE, nbytes, BOUNCES, "grad"))
    return reserved


class LocalGradients(GradientBuffer):
    """All gradients of a model, on one rank."""

    def __init__(self, run: Run, choice: GradChoice, shards: GradShards | None = None) -> None:
        super().__init__(run, choice, shards)
        self._params_of = [[piece.param for piece in chunk.pieces] for chunk in run.layout.chunks]
        # By parameter, of each of its tiles; a parameter without tiles is one.
        self._tiles = [run.layout.tiles_of(param) for param in range(len(run.layout.specs))]
        self._is_direct = [run.reaches(flat) for flat in run.layout.flat_of]
        self._backward: dict[tuple[int, int], int] = {}  # in which the last gradient of each (parameter, tile) came
        self._under_way: list[tuple[int, Future[None]]] = []
        self._worker: Workers | None = None
        self._bounces: SimpleQueue[Tensor] = SimpleQueue()
        self._leaving: dict[str, list[Copy]] = {}  # by unit, the first that left first
        self._staging = Staging(run.layout, run.memory.take(STAGING))
        self._untiled: dict[str, list[int]] = {}  # by unit, the parameters without tiles
        for param, spec in enumerate(run.layout.specs):
            if not spec.tile:
                self._untiled.setdefault(spec.unit, []).append(param)
        if not self._copier.direct:
            self._worker = Workers(1, "offload-gradients")
            for memory in run.memory.take(BOUNCE):
                self._bounces.put(memory)

    def accumulate(self, param: int, grad: Tensor, start: int = 0) -> None:
        tiles = self._tiles[param]
        if len(tiles) == 1:
            self._accumulate(param, 0, grad)
            return
        for tile, (first, stop) in enumerate(tiles):
            if start <= first and stop <= start + grad.numel():
                values = grad[first - start : stop - start]
                if self._has_come_in_this_backward(param, tile):
                    self._add_use(param, tile, values)
                else:
                    self._accumulate(param, tile, values)

    def has(self, param: int) -> bool:
        if len(self._tiles[param]) == 1 or torch_private.graph_task_id() == -1:
            return super().has(param)
        return self.micro_batches.has_all(param)  # gradients of other tiles may be about to come

    def _accumulate(self, param: int, tile: int, grad: Tensor) -> None:
        number = self.micro_batches.count(param, tile)
        size = grad.numel() * grad.element_size()
        if not self._is_direct[param]:
            self._timeline.count("device_to_host_bytes", size)
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param, size):
            if not self._is_direct[param] and self._staging.takes(param, grad):
                self._wait_with_others(param, grad, number)
            else:
                self._come(param, tile, grad, number)
            if self._staging.common is not None and self._is_complete(self._staging.common.unit):
                self._leave_together()

    def _come(self, param: int, tile: int, grad: Tensor, number: int) -> None:
        """Brings the gradient of a tile to the shards.

        Args:
            param: the parameter's index.
            tile: the tile's index.
            grad: shape (numel of the tile,).
            number: which micro-batch of the step it is of, from 1.
        """
        is_last = number == self.micro_batches.expected
        memory = self._shards.tile_memory(param, tile)
        if memory is not None:
            self._queue(param, self._copy(param, grad, memory))
        else:
            self._add(param, tile, grad, is_first=number == 1, is_last=is_last)
        if is_last:
            self._queue(param, self._tile_has_come, param, tile, is_early=is_in_backward())

    def _tile_has_come(self, param: int, tile: int, *, is_early: bool) -> None:
        """Sums the squares of a tile that has come for the last time that is expected.

        Args:
            param: the parameter's index.
            tile: the tile's index.
            is_early: whether it left in a backward. If not, a step is near, and nobody need be told.
        """
        self._shards.tile_has_come(param, tile)
        if is_early:
            self._on_whole(param)

    def _wait_with_others(self, param: int, grad: Tensor, number: int) -> None:
        """Makes a gradient wait on the device for those that it leaves with."""
        common = Common(self._layout.specs[param].unit, number, self._copier.current())
        if not self._staging.has_room(grad, common):
            self._leave_together()
        self._staging.add(param, grad, common)

    def _is_complete(self, unit: str) -> bool:
        """Whether equally many gradients of each parameter of a unit have come."""
        return self.micro_batches.are_equal(self._untiled[unit])

    @uninterrupted  # what has left the queue must be on its way
    def _leave_together(self) -> None:
        """Sends the gradients that wait on the device to RAM."""
        common = self._staging.common
        if common is None:
            return
        gradients = self._staging.take()
        made = self._copier.mark(common.stream)
        is_last, is_early = common.number == self.micro_batches.expected, is_in_backward()
        if self._shards.come_whole:
            for shares in side_by_side(self._whole(gradients)):
                params = [one.param for one in shares]
                memory = self._shards.memory_of(params)
                assert memory is not None
                sent, last = self._send(shares, memory, made), params if is_last else ()
                self._queue(params[0], self._have_come, last, sent, is_early=is_early)
            return
        groups = list(side_by_side(self._by_chunk(gradients)))
        for shares, then in zip_longest(groups, groups[1:]):
            chunk, start = self._layout.chunks[shares[0].within], shares[0].start
            is_unfinished = self._is_unfinished(chunk) or (then is not None and then[0].within == chunk.index)
            place = Place(chunk, start - chunk.start, common.number == 1, is_last, is_unfinished)
            bounce = self._bounce_for(shares[0].param)
            values = shares[0].values
            copied = bounce[: (shares[-1].stop - start) * values.element_size()].view(values.dtype)
            self._queue(shares[0].param, self._add_copied, self._send(shares, copied, made), bounce, copied, place)
        if is_last:
            self._queue(next(iter(gradients)), self._have_come, list(gradients), is_early=is_early)

    def _whole(self, gradients: Mapping[int, Tensor]) -> Iterator[Share]:
        """Gradients, by parameter, in their flat parameters."""
        for param, grad in gradients.items():
            flat, start = self._layout.locations[param]
            yield Share(flat, start, grad, param)

    def _by_chunk(self, gradients: Mapping[int, Tensor]) -> Iterator[Share]:
        """Gradients, by parameter, cut where their chunks begin: a bounce has room for one."""
        for param, grad in gradients.items():
            for chunk, piece in self._layout.pieces_of(param):
                values = grad[piece.param_offset : piece.param_offset + piece.numel]
                yield Share(chunk.index, chunk.start + piece.chunk_offset, values, param)

    def _have_come(self, params: Iterable[int], wait: Callable[[], None] | None = None, *, is_early: bool) -> None:
        """Waits for a copy, if there is one, and sums the squares of what came last.

        Args:
            params: parameters without tiles, which are there with their last gradient.
            wait: waits for the copy.
            is_early: as for `_tile_has_come`.
        """
        if wait is not None:
            wait()
        for param in params:
            self._tile_has_come(param, 0, is_early=is_early)

    def _add(self, param: int, tile: int, grad: Tensor, *, is_first: bool, is_last: bool) -> None:
        """Adds a tile's gradient to its chunks, piece by piece: a bounce has room for one."""
        start, stop = self._tiles[param][tile]
        for chunk, piece in self._layout.pieces_of(param):
            if start <= piece.param_offset < stop:  # no piece has elements of two tiles
                first = piece.param_offset - start
                self._pass_on(
                    param,
                    grad[first : first + piece.numel],
                    Place(chunk, piece.chunk_offset, is_first, is_last, self._is_unfinished(chunk)),
                )

    def _is_unfinished(self, chunk: Chunk) -> bool:
        """Whether more elements of a chunk are about to come.

        Only in slots is a chunk written when all of it has come. One with a tile holds nothing else.
        """
        if self.is_in_memory or len(chunk.pieces) == 1:
            return False
        params = self._params_of[chunk.index]
        return not self.micro_batches.are_equal(params) or self._staging.has_any(params)

    def _has_come_in_this_backward(self, param: int, tile: int) -> bool:
        """Whether a tile has a gradient from the backward that runs."""
        key, now = (param, tile), torch_private.graph_task_id()
        before, self._backward[key] = self._backward.get(key), now
        return before == now and self.micro_batches.of(param, tile) > 0

    def _add_use(self, param: int, tile: int, grad: Tensor) -> None:
        """Adds to a gradient that came in the same backward, in the dtype in which it waits.

        A tiled weight and its tiles are leaves of their own. So their gradients come one by one if the weight was also
        used as a whole, and have to be added as autograd adds those of all uses of a parameter.
        """
        self.drain()
        start, stop = self._tiles[param][tile]
        values = self._shards.values(param)[start:stop]
        values += grad.to(values.device)
        self._shards.write(param, values, start)
        self._on_whole(param)

    # What is dropped has to have come first: it would be taken for the next gradient, which goes to the same memory.

    def clear(self, param: int) -> None:
        self._staging.drop(param)
        if self.micro_batches.has(param):
            self._wait_for_worker()
        super().clear(param)

    def clear_all(self) -> None:
        self._staging.take()
        self._wait_for_worker()
        super().clear_all()

    def _collect(self, params: Collection[int]) -> list[int]:
        self.drain()
        for param in params:
            for tile in self.micro_batches.fill(param) if len(self._tiles[param]) > 1 else ():
                self._shards.make_zeros(param, tile)  # nobody used it
        return list(params)

    def drain(self) -> None:
        self._leave_together()
        self._wait_for_worker()

    def _wait_for_worker(self) -> None:
        """Waits for all gradients that have left the device."""
        while self._under_way:
            # Removed only when it is done: a call that is interrupted here has to wait again.
            param, work = self._under_way[0]
            if not work.done():
                with self._waiting("wait for gradient", param):
                    wait_for_all([work])
            work.result()
            del self._under_way[0]
        self._leaving.clear()

    def reset(self) -> None:
        wait_for_all([work for _, work in self._under_way])
        self._under_way.clear()
        self._leaving.clear()
        self.clear_all()

    def close(self) -> None:
        self._staging.take()
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    # Copies from the device.

    def _pass_on(self, param: int, values: Tensor, place: Place) -> None:
        """Adds values to the shards: at once on the CPU, else in the worker when they are in RAM."""
        if self._is_direct[param]:
            self._shards.add(values, place)
            return
        bounce = self._bounce_for(param)
        copied = bounce[: values.numel() * values.element_size()].view(values.dtype)
        self._queue(param, self._add_copied, self._copy(param, values, copied), bounce, copied, place)

    def _bounce_for(self, param: int) -> Tensor:
        """A bounce. The memory is bounded, so the device has to wait while both are in use."""
        with self._waiting("wait for bounce", param):
            return self._bounces.get()

    def _add_copied(self, wait: Callable[[], None], bounce: Tensor, copied: Tensor, place: Place) -> None:
        """Adds values that are being copied to a bounce, which is free then."""
        try:
            wait()
            self._shards.add(copied, place)
        finally:
            self._bounces.put(bounce)

    def _copy(self, param: int, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Callable[[], None]:
        """Starts a copy into RAM, and returns the function that waits for it."""
        if self._is_direct[param]:
            return HostCopier().to_host(src, dst).wait
        chunk, parameter = self._labels(param)
        moving = self._timeline.begin(TO_HOST, "copy", chunk=chunk, parameter=parameter, size=src.nbytes, tier="device")
        return self._leaves(param, self._copier.to_host(src, dst, after), moving)

    def _send(self, shares: Sequence[Share], dst: Tensor, made: DeviceEvent) -> Callable[[], None]:
        """Starts a copy of gradients that lie side by side into RAM.

        Args:
            shares: the gradients, in the order of their places.
            dst: where all of them go, with the gaps between them.
            made: the event after which they are there.

        Returns:
            The function that waits for the copy.
        """
        param, begin = shares[0].param, shares[0].start
        if len(shares) == 1:
            return self._copy(param, shares[0].values, dst, made)
        parts = [(one.start - begin, one.values) for one in shares]
        chunk, _ = self._labels(param)
        moving = self._timeline.begin(TO_HOST, "copy", chunk=chunk, size=dst.nbytes, tier="device")
        return self._leaves(param, self._copier.gather_to_host(parts, self._staging.memory_for(dst), dst, made), moving)

    def _leaves(self, param: int, copy: Copy, moving: Event | None) -> Callable[[], None]:
        """Makes the device wait for the copies of UNITS_LEAVING units ago, and returns what waits for this one.

        Args:
            param: the parameter that is copied, or the first one.
            copy: the copy.
            moving: its event in the timeline.
        """
        self._leaving.setdefault(self._layout.flats[self._layout.locations[param][0]].unit, []).append(copy)
        while len(self._leaving) > 1 + UNITS_LEAVING:
            for earlier in self._leaving.pop(next(iter(self._leaving))):
                earlier.wait_on_device()

        def wait() -> None:
            copy.wait()
            self._timeline.end(moving)

        return wait

    def _queue(self, param: int, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls `work` now where a gradient is not copied to RAM; else in the worker, after what was queued before."""
        if self._worker is None or self._is_direct[param]:
            work(*args, **kwargs)
        else:
            while self._under_way and self._under_way[0][1].done() and not self._under_way[0][1].exception():
                del self._under_way[0]
            self._under_way.append((param, self._worker.submit(work, *args, **kwargs)))

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
