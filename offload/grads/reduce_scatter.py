"""The gradient sink of one rank among several: gradients are averaged over the ranks while backward runs.

[Note: the way of a gradient over ranks]
A rank holds the gradients of its own partitions only. A hook hands over each parameter's gradient; when those of all
parameters in a bucket are there (module/stages.py), they are copied into a buffer of constant size and sent; what comes
back is the average over the ranks of the bucket's part of this rank's partition, which goes into RAM, or to its slots
(module/waiting.py). Until then the gradients lie where autograd made them. On a device with memory of its own they
travel and are averaged there, and the averages are copied down.

A *round* sends each bucket once, all ranks in the same order, with zeros where a rank has no gradient. A step is one
round; with accumulation at stages 2 and 3 one a micro-batch, summed in fp32: a round ends when a gradient comes that
came in it before. At stage 1 micro-batches are summed before, in fp32, whole, on each rank. What is missing in a round
is sent by `collect`, so that all ranks send the same, whatever arrived.

What is of all parameters, the norm and the finite check, is exact over the ranks, and the same bits on all of them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from offload.devices.copies import Copier, Copy
from offload.dist.communicator import Communicator, Work
from offload.dist.partition import Bucket, Buckets
from offload.errors import AccumulationError, OffloadError
from offload.grads import shards as waiting
from offload.grads.base import AS_HELD, Gradients, too_often
from offload.grads.buckets import Reduction
from offload.layout import Chunk, Layout
from offload.native import Kernels
from offload.profiling import GRADIENTS, SUMS, TO_HOST, Event, Timeline
from offload.storage.arena import Lender
from offload.storage.chunk_cache import Store


@dataclass
class _Buffer:
    """Bytes: full, what is sent; scratch, what comes; part, the averages, if they are to be added or copied; landed,
    these in RAM, if they are to be added after they were copied."""

    full: Tensor
    scratch: Tensor
    part: Tensor
    landed: Tensor


@dataclass
class _Travelling:
    """A bucket under way. average: of its elements of this rank's partition; is_beside: not where they belong yet;
    round: see the note at the top."""

    work: Work
    buffer: _Buffer
    bucket: Bucket
    average: Tensor
    is_beside: bool
    round: int


@dataclass
class _Landing:
    """An average on its way from the device."""

    copy: Copy
    moving: Event | None
    travelled: _Travelling


class ReducedGradients(Gradients):
    """See [Note: the way of a gradient over ranks]. Parameters are named by their index in `layout.specs`.

    Args: arena: memory where gradients wait; device: where they are made, which may be the same; copier: from there.

    Every rank has to call `collect`, `norm`, `not_finite`, `forget_all` and `reset` alike. All raise RankError.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Reduction,
        accumulation: int,
        arena: Lender,
        device: Lender,
        copier: Copier,
        kernels: Kernels,
        comm: Communicator,
        timeline: Timeline,
        store: Store | None = None,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._copier = copier
        self.accumulation = accumulation
        self.scale = AS_HELD
        self.factors = {}
        self._kernels = kernels
        self._comm = comm
        self._timeline = timeline
        held = (layout, plan.held, arena, kernels)
        self._waiting: waiting.Waiting = waiting.InRam(*held) if store is None else waiting.InSlots(*held, store)
        self._whole = [device.carve(n).view(torch.float32) for n in plan.whole]
        self._free = [self._new_buffer(arena, device) for _ in range(plan.buffers)]
        self._buckets = Buckets(plan.buckets, _order(layout, plan.buckets))
        self._buckets_of = Counter(param for bucket in plan.buckets for param in bucket.params)
        self._arrived = [0] * len(layout.specs)
        self._lines: dict[int, Tensor] = {}
        self._uses: dict[int, int] = {}
        self._under_way: deque[_Travelling] = deque()
        self._landing: deque[_Landing] = deque()
        self._round = 0
        self._active: list[int] | None = None
        self._norms: dict[tuple[int, ...], float] = {}

    def _new_buffer(self, arena: Lender, device: Lender) -> _Buffer:
        plan = self._plan
        full, scratch = device.carve(plan.full_bytes), device.carve(plan.full_bytes)
        return _Buffer(full, scratch, device.carve(plan.part_bytes), arena.carve(plan.landing_bytes))

    def line(self, param: int) -> Tensor:
        """What this rank holds of the gradient of `param`: elements `layout.param_shard_range(param)`, on the CPU."""
        return self._waiting.line(param)

    def put(self, param: int, line: Tensor) -> None:
        raise AssertionError("no rank has all of a gradient")

    def taken(self, index: int) -> AbstractContextManager[Tensor]:
        return self._waiting.taken(index)

    def expect(self, chunks: Iterable[int]) -> None:
        self._waiting.expect(chunks)

    def dtype(self, chunk: Chunk) -> torch.dtype:
        return self._plan.held[chunk.flat]

    def chunk(self, index: int) -> Tensor:
        return self._waiting.chunk(index)

    def has(self, param: int) -> bool:
        return self._arrived[param] > 0

    def arrive(self, param: int, grad: Tensor, start: int = 0) -> None:
        assert start == 0  # there are no tiles over several ranks
        if self._active is not None:
            raise AccumulationError(
                f"a gradient of {self._layout.specs[param].name} came after those of this step were averaged over the "
                "ranks, by clip_grad_norm_() or grad(): call these after the last backward of a step"
            )
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param):
            if self._arrived[param] == self.accumulation:
                raise too_often(self._layout.specs[param].name, self.accumulation)
            if self._plan.sums_locally:
                grad = self._add(param, grad)
            elif param in self._uses:
                if self._round + 1 == self._plan.rounds:
                    raise too_often(self._layout.specs[param].name, self.accumulation)
                self._end_round()
            self._arrived[param] += 1
            if self._plan.rounds > 1 or self._arrived[param] == self.accumulation:
                self._ready(param, grad)
            while self._under_way and self._under_way[0].work.done():
                self._finish_one()
            while self._landing and self._landing[0].copy.done():
                self._land_one()

    def forget(self, param: int) -> None:
        """Raises: AccumulationError if a gradient of `param` has arrived: the other ranks have it by now."""
        if self._arrived[param]:
            raise AccumulationError(
                f"the gradient of {self._layout.specs[param].name} was dropped or replaced by hand after backward, "
                "when it was on its way to the other ranks: drop all of them, on every rank, with optimizer.zero_grad()"
            )

    def forget_all(self) -> None:
        """Raises: AccumulationError, as `collect`."""
        if self._active is None and any(self._arrived):
            self._end_rounds()
            self._agree(drops=True)
        self._begin_anew()

    def collect(self, params: Collection[int]) -> list[int]:
        """Waits until all that any rank has is averaged, summed and checked; returns what any of them names.

        Raises: AccumulationError on all ranks if some drop what was averaged; it is dropped on all of them then.
        """
        if self._active is None:
            with self._timeline.span("gradient_s"):
                self._end_rounds()
                self._active = self._agree(params)
                with self._timeline.event(SUMS, "sums of squares"):
                    self._waiting.sum(self._active)
        return self._active

    def drain(self) -> None:
        while self._under_way:
            self._finish_one()
        while self._landing:
            self._land_one()

    def norm(self, params: Collection[int]) -> float:
        """Over all ranks."""
        key = tuple(params)
        if key not in self._norms:
            sums = self._waiting.sums_here()
            own = chain.from_iterable(sums[param].tolist() for param in params)
            self._norms[key] = math.sqrt(self._comm.exact_sum(own))
        return self._norms[key]

    def norms(self, params: Sequence[int], order: float = 2.0) -> list[float]:
        """Over all ranks, in one collective."""
        own = torch.zeros(len(params), dtype=torch.float64, device="cpu")
        sums = self._waiting.sums_here() if order == 2.0 else []
        for at, param in enumerate(params):
            if order == 2.0:
                own[at] = math.fsum(sums[param].tolist())
            elif (line := self.line(param)).numel():
                norm = float(torch.linalg.vector_norm(line.float(), order))
                own[at] = norm if math.isinf(order) else norm**order
        told = self._comm.all_gather(own)
        if math.isinf(order):
            return (told.amax(0) if order > 0 else told.amin(0)).tolist()
        total = torch.tensor([math.fsum(column) for column in told.T.tolist()], dtype=torch.float64, device="cpu")
        return (total ** (1 / order)).tolist()

    def not_finite(self, params: Collection[int]) -> list[int]:
        """On any rank."""
        if math.isfinite(self.norm(params)):
            return []
        sums = self._waiting.sums_here()
        bad = [not bool(sums[param].isfinite().all()) for param in params]
        flags = self._comm.all_gather(torch.tensor(bad, device="cpu")).any(0).tolist()
        return [param for param, flag in zip(params, flags, strict=True) if flag]

    def reset(self) -> None:
        """On all ranks alike: what some of them have sent is sent by all."""
        if self._active is None:
            self._end_rounds()
        self._begin_anew()

    def close(self) -> None:
        """Copies are waited for. The communicator says when nobody else writes any more."""
        for landing in self._landing:
            with suppress(OffloadError):
                landing.copy.wait()
        self._landing.clear()
        self._under_way.clear()
        self._lines.clear()

    def _agree(self, params: Collection[int] = (), *, drops: bool = False) -> list[int]:
        """Ends the rounds of a step on all ranks; returns what any of them names. Args: drops: nobody is to use them.

        A rank that has nothing to drop is not here, but on its way to its next gradients: they have met those that the
        others drop by then, and are as lost.
        """
        mine = torch.zeros(1 + len(self._arrived), dtype=torch.uint8, device="cpu")
        mine[0] = drops
        mine[[1 + param for param in params]] = 1
        told = self._comm.all_gather(mine)
        if bool((told[:, 0] != drops).any()):
            self._begin_anew()
            who = [[rank for rank, row in enumerate(told) if bool(row[0]) is dropped] for dropped in (True, False)]
            raise AccumulationError(
                f"the gradients of ranks {who[0]} were dropped by zero_grad() when they had been averaged with those "
                f"of ranks {who[1]}: all of them are dropped now; after a backward on any rank call step() on every "
                "rank, or run it on every rank and call zero_grad() there"
            )
        return told[:, 1:].any(0).nonzero().flatten().tolist()

    def _begin_anew(self) -> None:
        self._arrived = [0] * len(self._arrived)
        self._round = 0
        self._active = None
        self._norms.clear()

    def _add(self, param: int, grad: Tensor) -> Tensor:
        """Adds a micro-batch's gradient; returns the sum."""
        flat, offset = self._layout.locations[param]
        total = self._whole[flat][offset : offset + self._layout.specs[param].numel]
        if not self._copier.direct:
            with torch.no_grad():
                if self._arrived[param]:
                    total.add_(grad)  # each rounds once, as the kernels do
                else:
                    total.copy_(grad)
        elif self._arrived[param]:
            self._kernels.accumulate(total, grad)
        else:
            self._kernels.cast(grad, total)
        return total

    def _ready(self, param: int, line: Tensor) -> None:
        self._lines[param] = line
        self._uses[param] = self._buckets_of[param]
        for bucket in self._buckets.ready(param):
            self._send(bucket)

    def _end_rounds(self) -> None:
        if self._plan.sums_locally:
            for param, count in enumerate(self._arrived):
                if 0 < count < self.accumulation:
                    flat, offset = self._layout.locations[param]
                    self._ready(param, self._whole[flat][offset : offset + self._layout.specs[param].numel])
        while self._round < self._plan.rounds:
            self._end_round()
        self.drain()

    def _end_round(self) -> None:
        for bucket in self._buckets.flush():
            self._send(bucket)
        self._buckets.reset()
        self._lines.clear()
        self._uses.clear()
        self._round += 1

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        while not self._free:
            if self._landing:
                self._land_one()
            else:
                self._finish_one()
        buffer = self._free.pop()
        numel, wire = self._layout.ranks * bucket.numel, self._plan.wire[bucket.flat]
        full = buffer.full[: numel * wire.itemsize].view(wire)
        for start, stop in bucket.holes:
            full[start:stop] = 0
        for piece in bucket.pieces:
            target = full[piece.chunk_offset : piece.chunk_offset + piece.numel]
            line = self._lines.get(piece.param)
            if line is None:
                target.zero_()
            else:
                target.copy_(line[piece.param_offset : piece.param_offset + piece.numel])
        for param in bucket.params & self._lines.keys():
            self._uses[param] -= 1
            if not self._uses[param]:
                del self._lines[param]
        place = self._waiting.place(bucket) if self._round == 0 and self._copier.direct else None
        held = self._plan.held[bucket.flat]
        average = buffer.part[: held.itemsize * bucket.numel].view(held) if place is None else place
        scratch = buffer.scratch[: numel * wire.itemsize].view(wire)
        work = self._comm.reduce_scatter(full, average, scratch=scratch)
        self._under_way.append(_Travelling(work, buffer, bucket, average, place is None, self._round))

    def _finish_one(self) -> None:
        # Forgotten only when it is done: whoever is interrupted here has to wait again.
        first = self._under_way[0]
        first.work.wait()
        self._under_way.popleft()
        if self._copier.direct:
            self._take_in(first)
        else:
            self._bring_down(first)

    def _bring_down(self, travelled: _Travelling) -> None:
        """Starts copying an average to where it belongs, or to where it is added from."""
        average = travelled.average
        size = average.numel() * average.element_size()
        target = self._waiting.place(travelled.bucket) if travelled.round == 0 else None
        travelled.is_beside = target is None
        if target is None:
            target = travelled.buffer.landed[:size].view(average.dtype)
        travelled.average = target
        moving = self._timeline.begin(TO_HOST, "copy", size=size, tier="device")
        self._timeline.count("device_to_host_bytes", size)
        self._landing.append(_Landing(self._copier.to_host(average, target), moving, travelled))

    def _land_one(self) -> None:
        first = self._landing[0]
        with nullcontext() if first.copy.done() else self._timeline.waiting("wait for gradient", tier="device"):
            first.copy.wait()
        self._timeline.end(first.moving)
        self._landing.popleft()
        self._take_in(first.travelled)

    def _take_in(self, travelled: _Travelling) -> None:
        if travelled.is_beside:
            is_last = travelled.round + 1 == self._plan.rounds
            self._waiting.put(travelled.bucket, travelled.average, is_first=travelled.round == 0, is_last=is_last)
        self._free.append(travelled.buffer)

    def _event(self, lane: str, name: str, param: int) -> AbstractContextManager[None]:
        return self._timeline.event(lane, name, parameter=self._layout.specs[param].name)


def _order(layout: Layout, buckets: Sequence[Bucket]) -> list[int]:
    """As backward goes, the root unit's last: it has parameters at both ends of a model."""
    backwards = reversed(range(len(buckets)))
    return sorted(backwards, key=lambda index: layout.flats[buckets[index].flat].unit == "")
