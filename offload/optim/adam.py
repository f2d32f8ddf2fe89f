"""The step: every chunk through Adam, and the new parameters back to the model.

[Note: a step does not block]
`begin` fixes all that the step depends on, gradients, hyper-parameters and scale, and queues a piece of work for each
chunk: lease its states ▶ Adam kernel, a segment at a time ▶ release dirty. New parameters get into the model only
inside `land`, a flat at a time: a reader in between sees the whole old value of a parameter or the whole new one.

- On a device with memory of its own one worker does the queue in its order; the new parameters rest in the memory of
  the gradients they were made from, which nobody needs any more, until `land` copies them to the device.
- On the CPU `land` itself does the work, on all threads, and the kernels write into the model: a memory-bound thread
  beside the matrix products of a forward costs more than it hides. Only I/O overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offload.devices.copies import Copier, Copy
from offload.dist.communicator import Communicator
from offload.dist.exchange import Exchange, Gathers
from offload.errors import OffloadError
from offload.grads.base import Gradients
from offload.interrupts import wait_for_all
from offload.io.threads import Workers
from offload.layout import Chunk, Layout, Segment, segments
from offload.native import AdamScalars, Kernels
from offload.profiling import ADAM, TO_DEVICE, Event, Timeline
from offload.storage.arena import Lender, carved_bytes
from offload.storage.chunk_cache import Lease, Store

StepKey = tuple[int, int, float]
"""(param group, how often its parameters were stepped, this step included, a factor of their gradients)."""


def _bounce_bytes(layout: Layout) -> int:
    narrow = [chunk for chunk in layout.chunks if layout.flats[chunk.flat].dtype is not torch.float32]
    return max((layout.flats[c.flat].dtype.itemsize * c.numel for c in narrow), default=0)


def arena_bytes(layout: Layout, accumulation: int, *, direct: bool, split_master: bool) -> int:
    """What returning parameters takes from the arena."""
    if direct or not (accumulation > 1 or split_master):
        return 0
    return carved_bytes(_bounce_bytes(layout))


class ParameterReturn:
    """Brings new parameters into the model; see [Note: a step does not block].

    Args: flats: the model's parameters on its device, one tensor a flat of the layout; streamed: the store of all
    parameters, if they are on the device only around their use: then the new ones go there; comm: over which flats
    are put together from all ranks' partitions, or those of replicas; travelling: memory through which they go between
    these.
    Attribute: lands: called with each chunk and its new values, on their way to that store, other ranks' too.
    """

    def __init__(
        self,
        layout: Layout,
        flats: Sequence[Tensor],
        gradients: Gradients,
        arena: Lender,
        copier: Copier,
        timeline: Timeline,
        comm: Communicator,
        travelling: Lender,
        *,
        split_master: bool,
        streamed: Store | None = None,
    ) -> None:
        self._layout = layout
        self._flats = flats
        self._streamed = streamed
        self.lands: Callable[[Chunk, Tensor], None] = lambda chunk, values: None
        self._gradients = gradients
        self._copier = copier
        self._timeline = timeline
        through_ram = copier.direct or streamed is not None
        size = arena_bytes(layout, gradients.accumulation, direct=through_ram, split_master=split_master)
        self._bounce = arena.carve(size)
        self._copies: list[tuple[Chunk, Copy, Event | None]] = []
        self._gathers: Gathers | None = None
        self._exchange: Exchange | None = None
        if comm.size > 1 and streamed is None:
            self._gathers = Gathers(layout, flats, comm)
        elif streamed is not None and layout.replicas > 1:
            keepers = comm if layout.shards == 1 else comm.across
            self._exchange = Exchange(layout, streamed, travelling, keepers, lambda *new: self.lands(*new))

    @property
    def direct(self) -> bool:
        """Whether the kernels write into the model."""
        return self._copier.direct

    def begin(self, flat: int) -> None:
        """Before new parameters of a flat are brought into the model."""
        if self._exchange is not None:
            self._exchange.begin()

    @contextmanager
    def into(self, chunk: Chunk, *, step: int, is_whole: bool) -> Iterator[Tensor]:
        """Where the kernels write the new parameters of `chunk`: shape (chunk.numel,), in the flat's dtype.

        Args: step: whose they are; is_whole: whether all parameters of the chunk are written.
        """
        if self._streamed is not None:
            with self._streamed.lease(chunk.index, step=step, is_fresh=is_whole) as lease:
                lease.dirty = True
                values = self._in(lease.arrays[0].view(torch.uint8), chunk)
                yield values
                self.lands(chunk, values)
                # A worker's collectives would be in no order with others: there `put_together` sends it.
                if self._exchange is not None and self.direct:
                    self._exchange.send(chunk, values, step)
        elif self.direct:
            yield self._on_device(chunk)
        elif self._in_place(chunk):
            yield self._resting(chunk)
        else:
            target = self._in(self._bounce, chunk)
            yield target
            self._resting(chunk).copy_(target)

    def current(self, chunk: Chunk, target: Tensor) -> Tensor:
        """The 16-bit parameters of `chunk` as they are now: shape (chunk.numel,), on the CPU.

        Args: target: from `into`, for a chunk that is not whole.
        """
        if self._streamed is not None:
            return target
        on_device = self._on_device(chunk)
        if self.direct:
            return on_device
        bounce = self._in(self._bounce, chunk)
        with self._timeline.waiting("wait for copy", chunk=chunk.index, tier="device"):
            self._copier.to_host(on_device, bounce).wait()
        self._timeline.count("device_to_host_bytes", bounce.numel() * bounce.element_size())
        return bounce

    def send(self, chunk: Chunk, runs: Sequence[Segment[StepKey]]) -> None:
        """Sends the `runs` of a chunk on their way into the model."""
        if self.direct or self._streamed is not None:
            return
        resting, target = self._resting(chunk), self._on_device(chunk)
        for run in runs:
            part = slice(run.start, run.stop)
            size = (run.stop - run.start) * resting.element_size()
            moving = self._timeline.begin(TO_DEVICE, "copy", chunk=chunk.index, size=size, tier="device")
            self._copies.append((chunk, self._copier.to_device(resting[part], target[part]), moving))
            self._timeline.count("host_to_device_bytes", size)

    def wait(self) -> None:
        """Waits until all that was sent is on the device."""
        for chunk, copy, moving in self._copies:
            if copy.done():
                copy.wait()
            else:
                with self._timeline.waiting("wait for copy", chunk=chunk.index, tier="device"):
                    copy.wait()
            self._timeline.end(moving)
        for chunk, _, _ in self._copies:
            if not self._in_place(chunk):
                self._clear_gaps(chunk)
        self._copies.clear()

    def abandon(self) -> None:
        """Waits for copies under way, successful or not; what rests in the memory of gradients is dropped."""
        self.close()
        if self._gathers is not None:
            self._gathers.abandon()
        elif self._exchange is not None:
            self._exchange.abandon()
        if not self.direct and self._streamed is None:
            for chunk in self._layout.chunks:
                self._clear_gaps(chunk)

    def close(self) -> None:
        """Waits for copies under way, successful or not: their memory is about to go."""
        for _, copy, _ in self._copies:
            with suppress(OffloadError):
                copy.wait()
        self._copies.clear()

    def put_together(self, flat: int, step: int) -> None:
        """Gets the other ranks' new parameters of a flat, made in step `step`, until `finish`. Raises: RankError."""
        if self._exchange is not None:
            self._exchange.finish(flat, step)
        elif self._gathers is not None:
            self._gathers.launch(flat)

    def finish(self, flat: int) -> None:
        """Waits until all of a flat has its new value. Raises: RankError."""
        if self._gathers is not None:
            self._gathers.finish(flat)

    def gather(self, flat: int, step: int) -> None:
        """Gets the other ranks' parameters of a flat, of which this rank's own are in the model. Raises: RankError."""
        self.begin(flat)
        self.put_together(flat, step)
        self.finish(flat)

    def _clear_gaps(self, chunk: Chunk) -> None:
        """The next gradients overwrite all that rested there but the gaps, which are zeros by contract."""
        grads = self._gradients.chunk(chunk.index)
        for piece, following in pairwise(chunk.pieces):
            grads[piece.chunk_offset + piece.numel : following.chunk_offset] = 0

    def _in_place(self, chunk: Chunk) -> bool:
        """Whether a gradient is as wide as its parameter, so that one can be written over the other."""
        return self._gradients.dtype(chunk) is self._flats[chunk.flat].dtype

    def _resting(self, chunk: Chunk) -> Tensor:
        return self._in(self._gradients.chunk(chunk.index).view(torch.uint8), chunk)

    def _in(self, memory: Tensor, chunk: Chunk) -> Tensor:
        dtype = self._flats[chunk.flat].dtype
        return memory[: chunk.numel * dtype.itemsize].view(dtype)

    def _on_device(self, chunk: Chunk) -> Tensor:
        return self._flats[chunk.flat][chunk.start : chunk.start + chunk.numel]


@dataclass
class _Work:
    """One chunk's share of a step. is_whole: all of its parameters are in it; done: of the worker, if there is one."""

    step: int
    chunk: Chunk
    is_whole: bool
    runs: Sequence[Segment[StepKey]]
    scalars: Mapping[StepKey, AdamScalars]
    done: Future[None] | None = None


class Step:
    """Runs Adam over the chunks of a layout; see [Note: a step does not block]."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        gradients: Gradients,
        returned: ParameterReturn,
        kernels: Kernels,
        timeline: Timeline,
        *,
        split_master: bool,
    ) -> None:
        self._layout = layout
        self._store = store
        self._split_master = split_master
        self._gradients = gradients
        self._returned = returned
        self._kernels = kernels
        self._timeline = timeline
        self._pending: dict[int, list[_Work]] = {}
        self._number = 0
        self._begun: set[int] = set()
        self._failure: BaseException | None = None
        self._worker = None if returned.direct else Workers(1, "offload-step")

    @property
    def pending(self) -> Collection[int]:
        """The flats whose new parameters are not in the model yet, in the order of the queue."""
        return self._pending.keys()

    def begin(
        self,
        step: int,
        keys: Mapping[int, StepKey],
        groups: Sequence[Mapping[str, Any]],
        scale: float,
        flats: Sequence[int],
    ) -> None:
        """Queues one step; the one before has landed.

        Args: step: its number, from 1; keys: of each parameter that has a gradient; groups: the optimizer's
        param_groups; scale: of the gradients (clipping); flats: all of them, in the order in which they are needed.
        """
        self._number = step
        scalars = {key: scalars_of(groups[key[0]], key[1], scale * key[2]) for key in set(keys.values())}
        queue: dict[int, list[_Work]] = {flat: [] for flat in flats}
        for chunk in self._layout.chunks:
            runs = segments(chunk, keys.get)
            if runs:
                is_whole = all(piece.param in keys for piece in chunk.pieces)
                queue[chunk.flat].append(_Work(step, chunk, is_whole, runs, scalars))
        # All ranks land the same flats, though not each of them has a part in each.
        changed = {self._layout.places[param][0] for param in keys if self._layout.specs[param].numel}
        self._pending = {flat: works for flat, works in queue.items() if flat in changed}
        works = [work for works in self._pending.values() for work in works]
        self._store.expect(work.chunk.index for work in works)
        self._gradients.expect(work.chunk.index for work in works)
        if self._worker is not None:
            for work in works:
                work.done = self._worker.submit(self._run, work)

    def begin_landing(self, flat: int) -> None:
        """Makes the new parameters of `flat`, which is pending, or waits for them, and sends them to other ranks."""
        if flat in self._begun:
            return
        self._returned.begin(flat)
        for work in self._pending[flat]:
            if work.done is None:
                self._run(work)
            else:
                self._wait_for(work.done, work.chunk)
            self._returned.send(work.chunk, work.runs)
        self._returned.wait()
        self._returned.put_together(flat, self._number)
        self._begun.add(flat)

    def land(self, flat: int) -> None:
        """Brings the new parameters of `flat`, which is pending, into the model."""
        self.begin_landing(flat)
        self._returned.finish(flat)
        self._begun.discard(flat)
        del self._pending[flat]

    def _wait_for(self, done: Future[None], chunk: Chunk) -> None:
        if not done.done():
            with self._timeline.waiting("wait for Adam", chunk=chunk.index, tier="cpu"):
                wait_for_all([done])
        done.result()

    def abandon(self) -> None:
        """Forgets the step under way, and its failure; what has begun ends first."""
        works = [work.done for queued in self._pending.values() for work in queued if work.done is not None]
        for done in works:
            done.cancel()
        wait_for_all(works)
        self._pending = {}
        self._begun.clear()
        self._failure = None
        self._returned.abandon()

    def close(self) -> None:
        """Ends the worker; what it has not begun is dropped."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._returned.close()

    def _run(self, work: _Work) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            # A split master is half in its lease and half in the parameters: they are read, too.
            is_whole = work.is_whole and not self._split_master
            with (
                self._returned.into(work.chunk, step=work.step, is_whole=is_whole) as target,
                self._store.lease(work.chunk.index, step=work.step) as lease,
                self._gradients.taken(work.chunk.index) as grads,
            ):
                lease.dirty = True
                is_split = lease.master.dtype is torch.int16
                current = self._returned.current(work.chunk, target) if is_split else None
                with self._timeline.span("adam_s"), self._timeline.event(ADAM, "Adam", chunk=work.chunk.index):
                    self._adam(work, lease, grads, current, target)
        except BaseException as error:
            self._failure = error
            raise

    def _adam(self, work: _Work, lease: Lease, grads: Tensor, current: Tensor | None, target: Tensor) -> None:
        for run in work.runs:
            part, scalars = slice(run.start, run.stop), work.scalars[run.key]
            master, new = lease.master[part], target[part]
            exp_avg, exp_avg_sq, grad = lease.exp_avg[part], lease.exp_avg_sq[part], grads[part]
            if current is not None:
                self._kernels.adam_split(current[part], master, exp_avg, exp_avg_sq, grad, new, scalars)
            elif new.dtype is torch.float32:
                self._kernels.adam(master, exp_avg, exp_avg_sq, grad, None, scalars)
                self._kernels.cast(master, new)
            else:
                self._kernels.adam(master, exp_avg, exp_avg_sq, grad, new, scalars)


def scalars_of(group: Mapping[str, Any], step: int, scale: float) -> AdamScalars:
    """The kernel's scalars for a torch param group of Adam or AdamW, whose lr and betas may be tensors."""
    beta1, beta2 = group["betas"]
    return AdamScalars.at(
        step=step,
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        scale=scale,
    )
