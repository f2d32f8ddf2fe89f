"""The gradient sink of one rank among several: gradients are averaged over the ranks while backward runs.

[Note: the way of a gradient over ranks]
A rank holds the gradients of its own partitions only. A hook hands over each parameter's gradient; when those of all
parameters in a bucket are there (module/stages.py), they are copied into a buffer of constant size and sent; what comes
back is the average over the ranks of the bucket's part of this rank's partition, which goes into RAM, or to its slots
(module/waiting.py). Until then the gradients lie where autograd made them.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from offload.collectives import Communicator, Work
from offload.errors import AccumulationError
from offload.layout import Chunk, Layout
from offload.module import waiting
from offload.module.stages import Bucket, Buckets, cut_buckets, splits_of
from offload.native import Kernels
from offload.optim.sink import AS_HELD, Gradients, too_often
from offload.store.arena import Lender, carved_bytes
from offload.store.store import Store
from offload.timeline import GRADIENTS, SUMS, Timeline

BUFFERS = 3
"""Buckets under way at a time: one is filled while one travels and one is averaged."""


class Reduction:
    """The sizes of what is reduced, for the plan and for the run.

    Attributes: sums_locally: micro-batches are summed before they are sent; rounds: see the note above; wire, held:
    by flat, the dtypes of what travels and of what stays.
    """

    def __init__(
        self, layout: Layout, stage: int, accumulation: int, bucket_bytes: int, *, stored: bool = False
    ) -> None:
        self.sums_locally = stage == 1 and accumulation > 1
        self.rounds = 1 if self.sums_locally else accumulation
        dtypes = [flat.dtype for flat in layout.flats]
        self.wire = [torch.float32 if self.sums_locally else dtype for dtype in dtypes]
        self.held = [torch.float32 if accumulation > 1 else dtype for dtype in dtypes]
        self.buckets = cut_buckets(layout, splits_of(layout, layout.ranks), bucket_bytes // 4)
        self.full_bytes = max((layout.ranks * b.numel * self.wire[b.flat].itemsize for b in self.buckets), default=0)
        averages = (b.numel * self.held[b.flat].itemsize for b in self.buckets)
        self.part_bytes = max(averages, default=0) if self.rounds > 1 or stored else 0
        self.buffers = min(BUFFERS, len(self.buckets))
        self.whole = [4 * flat.numel for flat in layout.flats] if self.sums_locally else []
        self._waiting = waiting.arena_bytes(layout, self.held, stored=stored)

    @property
    def arena_bytes(self) -> int:
        """What the sink takes from the arena."""
        buffer = 2 * carved_bytes(self.full_bytes) + carved_bytes(self.part_bytes)
        return self._waiting + sum(map(carved_bytes, self.whole)) + self.buffers * buffer


@dataclass
class _Buffer:
    """Bytes: full, what is sent; scratch, what comes; part, the averages if they are to be added."""

    full: Tensor
    scratch: Tensor
    part: Tensor


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


class ReducedGradients(Gradients):
    """See [Note: the way of a gradient over ranks]. Parameters are named by their index in `layout.specs`.

    Every rank has to call `collect`, `norm`, `not_finite`, `forget_all` and `reset` alike. All raise RankError.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        accumulation: int,
        bucket_bytes: int,
        arena: Lender,
        kernels: Kernels,
        comm: Communicator,
        timeline: Timeline,
        store: Store | None = None,
    ) -> None:
        self._layout = layout
        self._plan = Reduction(layout, stage, accumulation, bucket_bytes, stored=store is not None)
        self.accumulation = accumulation
        self.scale = AS_HELD
        self._kernels = kernels
        self._comm = comm
        self._timeline = timeline
        plan = self._plan
        held = (layout, plan.held, arena, kernels)
        self._waiting: waiting.Waiting = waiting.InRam(*held) if store is None else waiting.InSlots(*held, store)
        self._whole = [arena.carve(n).view(torch.float32) for n in plan.whole]
        self._free = [
            _Buffer(arena.carve(plan.full_bytes), arena.carve(plan.full_bytes), arena.carve(plan.part_bytes))
            for _ in range(plan.buffers)
        ]
        self._buckets = Buckets(plan.buckets, _order(layout, plan.buckets))
        self._buckets_of = Counter(param for bucket in plan.buckets for param in bucket.params)
        self._arrived = [0] * len(layout.specs)
        self._lines: dict[int, Tensor] = {}
        self._uses: dict[int, int] = {}
        self._under_way: deque[_Travelling] = deque()
        self._round = 0
        self._active: list[int] | None = None
        self._norms: dict[tuple[int, ...], float] = {}

    def line(self, param: int) -> Tensor:
        """What this rank holds of the gradient of `param`: elements `layout.held_of(param)`, on the CPU."""
        return self._waiting.line(param)

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

    def norm(self, params: Collection[int]) -> float:
        """Over all ranks."""
        key = tuple(params)
        if key not in self._norms:
            sums = self._waiting.sums_here()
            own = chain.from_iterable(sums[param].tolist() for param in params)
            self._norms[key] = math.sqrt(self._comm.exact_sum(own))
        return self._norms[key]

    def not_finite(self, params: Collection[int]) -> list[int]:
        """On any rank."""
        if math.isfinite(self.norm(params)):
            return []
        sums = self._waiting.sums_here()
        bad = [not bool(sums[param].isfinite().all()) for param in params]
        flags = self._comm.gather(torch.tensor(bad, device="cpu")).any(0).tolist()
        return [param for param, flag in zip(params, flags, strict=True) if flag]

    def reset(self) -> None:
        """On all ranks alike: what some of them have sent is sent by all."""
        if self._active is None:
            self._end_rounds()
        self._begin_anew()

    def close(self) -> None:
        """What is under way is not waited for here: the communicator says when nobody writes any more."""
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
        told = self._comm.gather(mine)
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
        flat, offset = self._layout.places[param]
        total = self._whole[flat][offset : offset + self._layout.specs[param].numel]
        if self._arrived[param]:
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
                    flat, offset = self._layout.places[param]
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
        place = self._waiting.place(bucket) if self._round == 0 else None
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
        if first.is_beside:
            is_last = first.round + 1 == self._plan.rounds
            self._waiting.put(first.bucket, first.average, is_first=first.round == 0, is_last=is_last)
        self._free.append(first.buffer)

    def _event(self, lane: str, name: str, param: int) -> AbstractContextManager[None]:
        return self._timeline.event(lane, name, parameter=self._layout.specs[param].name)


def _order(layout: Layout, buckets: Sequence[Bucket]) -> list[int]:
    """As backward goes, the root unit's last: it has parameters at both ends of a model."""
    backwards = reversed(range(len(buckets)))
    return sorted(backwards, key=lambda index: layout.flats[buckets[index].flat].unit == "")
