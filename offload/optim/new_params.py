"""The new parameters of a step, on their way to where the model has them.

Kernels write them to the memory that `target` lends. In `InPlace` that is where they stay: the model's own memory,
where kernels can write to it, or the buffer of a chunk of streamed parameters. In `ToDevice` it is the memory of the
gradient that they were made from, which nobody needs any more, or a bounce buffer and then that, if the gradient has
another dtype; from there they are copied to the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offload.devices.copies import DONE, Copy, DeviceEvent
from offload.errors import OffloadError
from offload.grads.base import GradientBuffer
from offload.layout import Chunk, Layout, Segment
from offload.profiling import TO_DEVICE, Event
from offload.ranks.exchange import EXCHANGED, TOGETHER, Exchange, FlatGather, ReplicaExchange
from offload.ranks.gathers import Gathers
from offload.regions import Region
from offload.run import Run
from offload.storage.chunk_cache import Use
from offload.storage.param_store import ParamStore
from offload.tiers import DEVICE, Tier

BOUNCE = "new parameters on their way to the device"
MADE = "new parameters on their way from the device"


def regions(
    layout: Layout, memory: Tier, *, bounces: bool, streams: bool = False, device_flats: Collection[int] = ()
) -> list[Region]:
    """The memory that NewParameters reserves.

    Args:
        layout: of the trained parameters.
        memory: the tier in which the states are stepped.
        bounces: whether new parameters are copied to the device, and gradients have another dtype. Then one bounce
            buffer is reserved, as large as the largest chunk of 16-bit parameters.
        streams: whether the parameters stream.
        device_flats: see `Run`. Their parameters are written where they are, or, if they stream, to a buffer on the
            device that is as large as the largest chunk.
    """
    if streams and device_flats:
        there = (chunk for chunk in layout.chunks if chunk.flat in device_flats)
        return [Region(DEVICE, MADE, max((layout.flats[c.flat].dtype.itemsize * c.numel for c in there), default=0))]
    if not bounces:
        return []
    copied = [chunk for chunk in layout.chunks if chunk.flat not in device_flats]
    narrow = [chunk for chunk in copied if layout.flats[chunk.flat].dtype is not torch.float32]
    nbytes = max((layout.flats[c.flat].dtype.itemsize * c.numel for c in narrow), default=0)
    return [Region(memory, BOUNCE, nbytes)]


class NewParameters(ABC):
    """Takes the new parameters of a step to where the model has them; see the top of this file.

    Args:
        run: the run.
        params: has the parameters.
        exchange: brings them to the other ranks.

    Attributes:
        direct: whether kernels can write where the model's parameters are.
        is_in_place: whether kernels write into the model itself.
    """

    is_in_place = False

    def __init__(self, run: Run, params: ParamStore, exchange: Exchange) -> None:
        self._params = params
        self._copier = run.memory.copier
        self.direct = self._copier.direct
        self._timeline = run.timeline
        self._exchange = exchange
        self._step: DeviceEvent = DONE  # the end of what was queued before it

    def step_begins(self) -> None:
        """Begins a step: waits until the new values of the step before have arrived.

        What the device does from now on reads no old values, and writes no gradient over new values that are on their
        way.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self.wait_for_transfers()
        self._step = self._copier.mark()

    def begin(self) -> None:
        """Begins flat parameters, before the first of their new values is written."""
        self._exchange.begin()

    @abstractmethod
    def target(self, chunk: Chunk, *, step: int, is_whole: bool) -> AbstractContextManager[Tensor]:
        """Lends the memory to which the kernels write the new parameters of a chunk.

        Args:
            chunk: one of this rank.
            step: the step that makes these parameters.
            is_whole: whether all parameters of the chunk are written.

        Returns:
            A context manager, which gives shape (chunk.numel,) in the dtype of the chunk's parameters.
        """

    @abstractmethod
    def lends_several(self, chunk: Chunk) -> bool:
        """Whether `target` lends memory for a chunk that no other chunk needs."""

    @abstractmethod
    def current(self, chunk: Chunk, target: Tensor) -> Tensor:
        """The 16-bit parameters of a chunk before the step.

        Args:
            chunk: one of this rank.
            target: what `target` gave for this chunk, called with is_whole=False.

        Returns:
            Shape (chunk.numel,), on the CPU.
        """

    @abstractmethod
    def copy_current(self, chunk: Chunk, into: Tensor) -> None:
        """Copies the parameters of a chunk, which no step is about to change, and leaves them as they are.

        Args:
            chunk: one of this rank.
            into: shape (chunk.numel,), in the dtype of the chunk's parameters, where the kernels can read it.
        """

    def writes(self, chunk: Chunk) -> int:
        """See `ParamStore.writes`."""
        return self._params.writes(chunk.index)

    def upload(self, chunk: Chunk, runs: Sequence[Segment[Any]]) -> None:  # noqa: B027
        """Starts to copy new parameters to the device, if they go there now.

        Args:
            chunk: one whose kernels have run.
            runs: the elements of the chunk that have new values.
        """

    def wait_for_transfers(self) -> None:
        """Waits until all new parameters that were sent, here or by other ranks, have arrived.

        The memory that they were sent from holds gradients again.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self._exchange.wait()

    def start_gather(self, flat: int, step: int) -> None:
        """Starts to receive the other ranks' new parameters of a flat parameter.

        The collectives come after the copies of this rank's own new parameters.

        Args:
            flat: the flat parameter's number.
            step: the step that made these parameters.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self._step.wait_on_device()
        self._exchange.start(flat, step)

    def send_rest(self) -> None:
        """Sends what `start_gather` has kept back to send it with others. All ranks call it at the same place.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self._exchange.send_rest()

    def finish(self, flat: int) -> None:
        """Makes what is queued on the device from now on see all new values of a flat parameter.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self._exchange.finish(flat)

    def all_gather(self, flats: Iterable[int], step: int) -> None:
        """Gets the other ranks' shards of flat parameters. This rank's own shards are in the model already.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        flats = list(flats)
        for flat in flats:
            self.begin()
            self.start_gather(flat, step)
        self.send_rest()
        for flat in flats:
            self.finish(flat)

    def abandon(self) -> None:
        """Waits for transfers under way, successful or not. New parameters that are not in the model are dropped."""
        self.close()
        self._exchange.abandon()

    def close(self) -> None:  # noqa: B027
        """Waits for copies under way, successful or not: their memory is about to be freed."""


class InPlace(NewParameters):
    """Kernels write to where the parameters stay, but for a device's kernels, whose parameters that stream are copied.

    Args:
        run: the run.
        params: has the parameters.
        exchange: brings them to the other ranks.
    """

    def __init__(self, run: Run, params: ParamStore, exchange: Exchange) -> None:
        super().__init__(run, params, exchange)
        self.is_in_place = params.in_model
        self._device_flats = run.device_flats
        self._made = next(iter(run.memory.take(MADE)), None)

    def target(self, chunk: Chunk, *, step: int, is_whole: bool) -> AbstractContextManager[Tensor]:
        if self._made is not None and chunk.flat in self._device_flats:
            return self._from_device(self._made, chunk, step, is_whole=is_whole)
        lease = self._params.lease(chunk.index, Use.OVERWRITE if is_whole else Use.UPDATE, step=step)
        # Of what is in the model nobody has to hear, and other ranks get all of a flat parameter at once.
        return lease if self.is_in_place else self._passed_on(lease, chunk, step)

    @contextmanager
    def _passed_on(self, lease: AbstractContextManager[Tensor], chunk: Chunk, step: int) -> Iterator[Tensor]:
        with lease as values:
            yield values
            self._params.chunk_updated(chunk, values)
            # Not in a worker, whose collectives would be in no order with others: then `start_gather` sends it.
            if self.direct:
                self._exchange.send(chunk, values, step)

    @contextmanager
    def _from_device(self, made: Tensor, chunk: Chunk, step: int, *, is_whole: bool) -> Iterator[Tensor]:
        """Lends memory of the device, from which the new parameters go to where they stay.

        Args:
            made: the memory, which the last chunk has left.
            chunk: the chunk.
            step: the step that makes its parameters.
            is_whole: whether all of them are written.
        """
        with self._params.lease(chunk.index, Use.OVERWRITE if is_whole else Use.UPDATE, step=step) as values:
            there = made[: values.nbytes].view(values.dtype)
            if not is_whole:
                self._copier.to_device(values, there).wait()
                self._timeline.count("host_to_device_bytes", values.nbytes)
            yield there
            with self._timeline.waiting("wait for copy", chunk=chunk.index, tier="device"):
                self._copier.to_host(there, values).wait()
            self._timeline.count("device_to_host_bytes", values.nbytes)
            self._params.chunk_updated(chunk, values)

    def lends_several(self, chunk: Chunk) -> bool:
        return self._params.is_resident(chunk.index)

    def current(self, chunk: Chunk, target: Tensor) -> Tensor:
        return target

    def copy_current(self, chunk: Chunk, into: Tensor) -> None:
        with self._params.lease(chunk.index, Use.READ, step=0) as values:
            into.copy_(values)


class ToDevice(NewParameters):
    """Kernels write over the gradients, or to a bounce buffer, and the new parameters are copied to the device.

    Those of the device write to the model's parameters.

    Args:
        run: the run.
        params: the model's, on its device.
        exchange: brings them to the other ranks.
        gradients: the gradient buffer.
    """

    def __init__(self, run: Run, params: ParamStore, exchange: Exchange, gradients: GradientBuffer) -> None:
        super().__init__(run, params, exchange)
        self._layout = run.layout
        self._device_flats = run.device_flats
        self._gradients = gradients
        self._bounce = next(iter(run.memory.take(BOUNCE)), torch.empty(0, dtype=torch.uint8))
        self._copies: list[tuple[Chunk, Copy, Event | None]] = []

    def target(self, chunk: Chunk, *, step: int, is_whole: bool) -> AbstractContextManager[Tensor]:
        if chunk.flat in self._device_flats:
            return self._params.lease(chunk.index, Use.OVERWRITE if is_whole else Use.UPDATE, step=step)
        return nullcontext(self._in_gradient(chunk)) if self._fits_gradient(chunk) else self._bounced(chunk)

    def lends_several(self, chunk: Chunk) -> bool:
        return self._fits_gradient(chunk)

    @contextmanager
    def _bounced(self, chunk: Chunk) -> Iterator[Tensor]:
        target = self._as_params(self._bounce, chunk)
        yield target
        self._in_gradient(chunk).copy_(target)

    def current(self, chunk: Chunk, target: Tensor) -> Tensor:
        bounce = self._as_params(self._bounce, chunk)
        self.copy_current(chunk, bounce)
        return bounce

    def copy_current(self, chunk: Chunk, into: Tensor) -> None:
        waiting = self._timeline.waiting("wait for copy", chunk=chunk.index, tier="device")
        with waiting, self._params.lease(chunk.index, Use.READ, step=0) as on_device:
            self._copier.to_host(on_device, into, self._step).wait()
        self._timeline.count("device_to_host_bytes", into.nbytes)

    def upload(self, chunk: Chunk, runs: Sequence[Segment[Any]]) -> None:
        if chunk.flat in self._device_flats:
            return
        while self._copies and self._copies[0][1].done():
            self._finish_copy()
        source = self._in_gradient(chunk)
        with self._params.lease(chunk.index, Use.UPDATE, step=0) as into:
            for span in _together(runs):
                size = (span.stop - span.start) * source.element_size()
                moving = self._timeline.begin(TO_DEVICE, "copy", chunk=chunk.index, size=size, tier="device")
                self._copies.append((chunk, self._copier.to_device(source[span], into[span], self._step), moving))
                self._timeline.count("host_to_device_bytes", size)

    def wait_for_transfers(self) -> None:
        while self._copies:
            self._finish_copy()
        super().wait_for_transfers()

    def _finish_copy(self) -> None:
        chunk, copy, moving = self._copies[0]
        if not copy.done():
            with self._timeline.waiting("wait for copy", chunk=chunk.index, tier="device"):
                copy.wait()
        self._timeline.end(moving)
        is_last = all(other.index != chunk.index for other, _, _ in self._copies[1:2])
        if is_last and not self._fits_gradient(chunk):
            self._clear_gaps(chunk)
        del self._copies[0]

    def start_gather(self, flat: int, step: int) -> None:
        is_made_there = flat in self._device_flats and self._layout.ranks > 1
        made = self._copier.mark() if is_made_there else DONE
        with self._copier.after_uploads():
            made.wait_on_device()
            super().start_gather(flat, step)  # the event also counts where this rank has sent nothing

    def send_rest(self) -> None:
        with self._copier.after_uploads():
            super().send_rest()

    def finish(self, flat: int) -> None:
        for chunk, copy, _ in self._copies:
            if chunk.flat == flat:
                copy.wait_on_device()
        super().finish(flat)

    def abandon(self) -> None:
        super().abandon()
        for chunk in self._layout.chunks:
            if chunk.flat not in self._device_flats:
                self._clear_gaps(chunk)

    def close(self) -> None:
        for _, copy, _ in self._copies:
            with suppress(OffloadError):
                copy.wait()
        self._copies.clear()

    def _clear_gaps(self, chunk: Chunk) -> None:
        """Fills the gaps between a chunk's gradients with zeros, which is what kernels rely on.

        New parameters were written over them. The next gradients overwrite all other elements.
        """
        grads = self._gradients.chunk_memory(chunk.index)
        for piece, following in pairwise(chunk.pieces):
            grads[piece.chunk_offset + piece.numel : following.chunk_offset] = 0

    def _fits_gradient(self, chunk: Chunk) -> bool:
        """Whether a chunk's gradients have its parameters' dtype, so that kernels can write one over the other."""
        return self._gradients.dtype(chunk) is self._dtype(chunk)

    def _in_gradient(self, chunk: Chunk) -> Tensor:
        return self._as_params(self._gradients.chunk_memory(chunk.index).view(torch.uint8), chunk)

    def _as_params(self, memory: Tensor, chunk: Chunk) -> Tensor:
        dtype = self._dtype(chunk)
        return memory[: chunk.numel * dtype.itemsize].view(dtype)

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        return self._layout.flats[chunk.flat].dtype


def _together(runs: Sequence[Segment[Any]]) -> Iterator[slice]:
    """The elements of runs of several param groups. Runs without a gap between them are one span."""
    start = stop = 0
    for run in runs:
        if run.start != stop:
            if start < stop:
                yield slice(start, stop)
            start = run.start
        stop = run.stop
    if start < stop:
        yield slice(start, stop)


def new_parameters(run: Run, params: ParamStore, flats: Sequence[Tensor], gradients: GradientBuffer) -> NewParameters:
    """What takes new parameters to where the model of a run has them.

    Args:
        run: the run.
        params: has the parameters.
        flats: the model's flat parameters, on its device.
        gradients: the gradient buffer.
    """
    layout, comm = run.layout, run.comm
    exchange = Exchange()
    if params.in_model and comm.size > 1:
        gathers = Gathers(comm, run.memory.take(TOGETHER), run.memory.copier)
        exchange = FlatGather(layout, flats, gathers, comm.rank)
    elif not params.in_model and layout.replicas > 1:
        holders = comm if layout.shard_group_size == 1 else comm.replicate_group
        (buffer,) = run.memory.take(EXCHANGED)
        exchange = ReplicaExchange(layout, params, buffer, holders)
    if params.in_model and not run.memory.copier.direct:
        return ToDevice(run, params, exchange, gradients)
    return InPlace(run, params, exchange)
