"""The gradient buffer of one rank among several: gradients are averaged over the ranks while backward runs.

[Note: averaging gradients over ranks]
A rank keeps the gradients of its own shards only. When the gradients of all parameters in a bucket are there
(ranks/buckets.py), they are copied into a communication buffer of constant size and sent. What comes back is the
average over the ranks of the bucket's part of this rank's shards, which goes to where gradients wait (shards.py). Until
a bucket is sent, its gradients stay where autograd made them. On a device with memory of its own they are sent and
averaged there, and the averages are copied to RAM. Where states are on the device, with the averages of their gradients
(`Run.device_flats`), these are written, or added, to where they wait there. All of this is queued at once, beside what
computes, and the device puts it in order: a bucket waits for the buffer of an earlier one, and its gradients wait for
that. The device goes on with backward meanwhile, and waits for the gradients of UNITS_WAITING units ago, whose memory
it then uses again. The host waits only for averages that it has to add to others in RAM, and for buckets of UNITS_AHEAD
units ago.

[Note: taking turns]
All ranks have to launch the collectives of all groups in one order: on GPUs they are kernels that wait for one another.
At stages 1 and 2 no others come between a step's gradients. At stage 3 backward gathers parameters, too, in an order
that is the same on all ranks, while gradients may come in different orders, or be missing on some ranks. So the buckets
of a unit are sent at one place between those gathers: after the one for this unit and before the next one. In between
a rank sends those that are complete, if nothing else can be gathered meanwhile. When it has left the unit
(model/backward_order.py), it sends the rest, with zeros for what is missing. For a bucket of several units that is the
unit that backward leaves last.

Tiles of a weight take turns as units do. At stages 1 and 2 each rank's routing is its own, and a tile that got no
tokens on a rank gets no gradient there. It sends zeros of it when its backward has left the block around the weight.
So the buckets behind it, and their gradients, wait no longer than that.

A *round* sends each bucket once, on all ranks in the same order, with zeros where a rank has no gradient. A step is one
round. With accumulation at stages 2 and 3 it is one round a micro-batch, and the averages are summed in fp32: a round
ends when a parameter gets its second gradient in it. At stage 1 whole micro-batches are summed first, in fp32, on each
rank. What is missing in a round is sent by `finalize`, so all ranks send the same, whichever gradients they have.
Where the number of micro-batches is not declared, ranks ask one another after each round whether one has another; those
that have none send zeros.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from offload import torch_private
from offload.choices import GradChoice
from offload.devices.copies import DONE, Copy, DeviceEvent
from offload.errors import AccumulationError, OffloadError
from offload.grads.base import GradientBuffer, is_in_backward
from offload.grads.reduction_plan import AVERAGES, COPIED, RECEIVED, SENT, WHOLE, ReductionPlan
from offload.grads.shards import GradShards
from offload.grads.sums import write_or_add
from offload.interrupts import uninterrupted
from offload.profiling import GRADIENTS, TO_HOST, Event
from offload.ranks.buckets import Bucket, Buckets, Part
from offload.ranks.communicator import Work
from offload.run import Run

UNITS_WAITING = 1
"""Units whose gradients wait on the device for a buffer, beside the one whose backward runs."""
UNITS_AHEAD = 4
"""The host waits, for a limited time, until the buckets are averaged that were sent so many units ago. Fewer than the
units of HOST_LEADS_UNITS in transfer.py, which it waits for without a limit: a rank that is gone is noticed here."""


@dataclass
class _Buffer:
    """Communication buffers of one bucket, in bytes; see ReductionPlan.

    Attributes:
        full: what this rank sends.
        scratch: what it receives.
        average: the averages, where they cannot be written to where they stay.
        copied: copies of these in RAM, where they have to be added to others.
    """

    full: Tensor
    scratch: Tensor
    average: Tensor
    copied: Tensor


class _Copies(Copy):
    """The copies of the averages of one bucket."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies

    def done(self) -> bool:
        return all(copy.done() for copy in self._copies)

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()

    def wait_on_device(self) -> None:
        for copy in self._copies:
            copy.wait_on_device()


@dataclass
class _Reduction:
    """A bucket that is being averaged over the ranks.

    Attributes:
        work: the collective.
        buffer: its communication buffers; None once a later bucket has them.
        bucket: what is averaged.
        averages: for each sub-range of the bucket, the average of what this rank has of it, shape (numel,); in RAM in
            the end.
        is_in_place: whether `averages` are the memory in which gradients wait.
        round: the number of its round.
        turn: the number of its unit, in the order in which units are sent.
        copy: the copies of the averages from the device, if there are any; or the event after which they are where they
            wait there.
        moving: their event in the timeline.
    """

    work: Work
    buffer: _Buffer | None
    bucket: Bucket
    averages: list[Tensor]
    is_in_place: bool
    round: int
    turn: int
    copy: DeviceEvent | None = None
    moving: Event | None = None


@dataclass
class _Waiting:
    """Gradients on the device that are being copied into a communication buffer.

    Attributes:
        turn: the number of their unit, in the order in which units are sent.
        copied: the event after the copies.
        grads: the gradients, which are kept alive until then.
    """

    turn: int
    copied: DeviceEvent
    grads: list[Tensor]


_abandoned: list[DeviceEvent | _Waiting] = []
"""Kept for ever, with their memory: to drop a copy is to wait for it, and a rank that is gone keeps it from ending."""


class ReducedGradients(GradientBuffer):
    """Averages, over all ranks, of the gradients of this rank's shards."""

    def __init__(self, run: Run, choice: GradChoice, shards: GradShards | None = None) -> None:
        super().__init__(run, choice, shards)
        self._plan = ReductionPlan(run.layout, choice, direct=self._copier.direct, device_flats=run.device_flats)
        self._whole = [memory.view(torch.float32) for memory in run.memory.take(WHOLE)]
        pieces = map(run.memory.take, (SENT, RECEIVED, AVERAGES, COPIED))
        self._free = [_Buffer(*one) for one in zip(*pieces, strict=True)]
        # Where ranks share parameters and fetch them, gradients take turns with these: see [Note: taking turns].
        takes_turns = run.layout.shard_group_size > 1 and not choice.params_stay
        self._buckets = Buckets(self._plan.buckets, take_turns=takes_turns)
        self._buckets_of = Counter(part for bucket in self._plan.buckets for part in bucket.parts)
        # In how many buckets this rank's elements of each parameter are, and how many of them have not come for the
        # last time that is expected.
        own = (bucket.params_of(run.layout.rank) for bucket in self._plan.buckets)
        self._parts_of = Counter(param for params in own for param in params)
        self._missing = self._parts_of.copy()
        self._tiles = [run.layout.tiles_of(param) for param in range(len(run.layout.specs))]
        # For sums before they are sent, where autograd makes gradients.
        self._local_kernels = run.kernels if self._copier.direct else None
        # Of the round under way: gradients that are not sent yet, and in how many buckets each is still to be sent.
        self._unsent: dict[Part, Tensor] = {}
        self._uses: dict[Part, int] = {}
        self._reducing: deque[_Reduction] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._turn = 0  # counts changes of the unit whose buckets are sent
        self._sent_unit: str | None = None
        self._round = 0
        self._came = False  # in the backward under way
        self._backward: dict[Part, int] = {}  # in which the last gradient of each tile came
        # What `finalize` returned, once it has been called.
        self._active: list[int] | None = None

    def accumulate(self, param: int, grad: Tensor, start: int = 0) -> None:
        tiles, ranks = self._tiles[param], self._layout.ranks
        if len(tiles) > 1 and grad.numel() == self._layout.specs[param].numel:  # of the whole weight
            for tile, (first, stop) in enumerate(tiles):
                self._accumulate((param, tile), grad.view(ranks, -1)[:, first:stop].reshape(-1))
        else:
            self._accumulate((param, start // tiles[0][1] if len(tiles) > 1 else 0), grad)

    def _accumulate(self, part: Part, grad: Tensor) -> None:
        """Adds the gradient of one micro-batch.

        Args:
            part: whose it is.
            grad: as for `accumulate`.
        """
        param, tile = part
        if self._active is not None:
            raise AccumulationError(
                f"a gradient of {self._layout.specs[param].name} came after those of this step were averaged over the "
                "ranks, by clip_grad_norm_() or grad(): call these after the last backward of a step"
            )
        if len(self._tiles[param]) > 1:
            self._require_one_use(part)
        with self._timeline.span("gradient_s"), self._event(GRADIENTS, "gradient", param):
            if not self._plan.sums_locally and self._buckets.has_come(part):
                if self._round + 1 == self._rounds:
                    raise self._too_late(part)
                self._begin_next_round()
            number = self.micro_batches.count(param, tile)
            self._came = True
            if self._plan.sums_locally:
                total = self._sum_of(part)
                write_or_add(self._local_kernels, grad, total, is_first=number == 1)
                if number == self.micro_batches.most:
                    self._ready(part, total)
            else:
                self._ready(part, grad)
            while self._reducing and self._is_done(self._reducing[0]):
                self._finish_reduction()

    def _require_one_use(self, part: Part) -> None:
        """Requires that the backward that runs has made no other gradient of a tile.

        Raises:
            AccumulationError: if the weight was used both in tiles and as a whole: the first gradient has left.
        """
        task = torch_private.graph_task_id()
        if self._backward.get(part) == task:
            raise AccumulationError(
                f"{self._layout.specs[part[0]].name} was used both in tiles and as a whole in one loss: over several "
                "ranks its gradients leave as they come, so give each use a backward of its own, with accumulation "
                "for both, or Tuning(tile=0)"
            )
        self._backward[part] = task

    def _too_late(self, part: Part) -> AccumulationError:
        param, tile = part
        name, most = self._layout.specs[param].name, self.micro_batches.most
        assert most is not None
        if self.micro_batches.of(param, tile):
            return self.micro_batches.too_often(param)
        unit = self._layout.flats[self._layout.locations[param][0]].unit
        return AccumulationError(
            f"a gradient of {name} came when those of its unit, {unit}, had been averaged over the ranks, in another "
            f"backward: declare how many backward passes come before each step, OffloadZero(..., accumulation="
            f"{most + 1}), or let one backward make all gradients of that unit"
        )

    def backward_enters(self, unit: str, left: Sequence[str], *, is_alone: bool) -> None:
        self._leave(left)
        if self._came and self._buckets.has_left(unit) and self._round + 1 != self._rounds:
            self._begin_next_round()  # of the next micro-batch
        self._buckets.alone = unit if is_alone else None

    def backward_ends(self, left: Sequence[str], *, is_whole: bool) -> None:
        self._leave(left)
        if is_whole:
            self._buckets.alone, self._came = None, False

    def _leave(self, units: Sequence[str]) -> None:
        if self._plan.sums_locally:
            return  # all micro-batches of a gradient are sent together, from memory of their own
        if self._came and self._active is None:  # torch.autograd.grad() accumulates nothing
            with self._timeline.span("gradient_s"):
                self._buckets.leave(units)
                self._send_ready()

    def clear(self, param: int) -> None:
        """Refuses to forget a gradient that was made.

        Raises:
            AccumulationError: if there is a gradient of `param`, which other ranks have by now.
        """
        if self.micro_batches.has(param):
            raise AccumulationError(
                f"the gradient of {self._layout.specs[param].name} was dropped or replaced by hand after backward, "
                "when it was on its way to the other ranks: drop all of them, on every rank, with optimizer.zero_grad()"
            )

    def clear_all(self) -> None:
        """Forgets all gradients; those that were not sent yet are sent first.

        Raises:
            AccumulationError: if other ranks do not drop theirs; see `finalize`.
        """
        if self._active is None and self.micro_batches.has_any():
            self._end_rounds()
            self._agree(drops=True)
        self._begin_anew(self._round)

    def _collect(self, params: Collection[int]) -> list[int]:
        """Sends what is missing in this step's rounds, and asks all ranks which parameters have a gradient."""
        if self._active is None:
            self._end_rounds()
            self._active = self._agree(params)
        return self._active

    def drain(self) -> None:
        while self._reducing:
            self._finish_reduction()
        self._waiting.clear()  # what was copied from them has ended

    def reset(self) -> None:
        """Sends what other ranks wait for, then drops everything."""
        if self._active is None:
            self._end_rounds()
        self.drain()
        self._begin_anew(self._round)

    def close(self) -> None:
        """Waits for copies. When no other rank writes here any more, the communicator says."""
        for reduction in self._reducing:
            if reduction.copy is not None and reduction.work.done():
                with suppress(OffloadError):
                    reduction.copy.wait()
            elif reduction.copy is not None:
                _abandoned.extend((reduction.copy, *self._waiting))
        self._reducing.clear()
        self._waiting.clear()
        self._unsent.clear()

    def _agree(self, params: Collection[int] = (), *, drops: bool = False) -> list[int]:
        """Ends the rounds of a step on all ranks, and waits for the averages, which are under way beside the question.

        A rank that has nothing to drop does not call this with `drops`, but goes on to its next gradients. These meet
        the ones that other ranks drop here, and are dropped too.

        Args:
            params: the parameters that have a gradient on this rank.
            drops: whether this rank drops its gradients.

        Returns:
            The parameters that any rank names.

        Raises:
            AccumulationError: if some ranks drop their gradients and others do not.
        """
        mine = torch.zeros(1 + len(self._layout.specs), dtype=torch.uint8, device="cpu")
        mine[0] = drops
        mine[[1 + param for param in params]] = 1
        rows = self._comm.all_gather(mine)
        self.drain()
        if bool((rows[:, 0] != drops).any()):
            self._begin_anew(self._round)
            who = [[rank for rank, row in enumerate(rows) if bool(row[0]) is dropped] for dropped in (True, False)]
            raise AccumulationError(
                f"the gradients of ranks {who[0]} were dropped by zero_grad() when they had been averaged with those "
                f"of ranks {who[1]}: all of them are dropped now; after a backward on any rank call step() on every "
                "rank, or run it on every rank and call zero_grad() there"
            )
        return rows[:, 1:].any(0).nonzero().flatten().tolist()

    def _begin_anew(self, had: int | None = None) -> None:
        super()._begin_anew(had)
        self._round = 0
        self._active = None
        self._came = False
        self._missing = self._parts_of.copy()

    # Rounds.

    @property
    def _rounds(self) -> int | None:
        """The most rounds that a step may have; None: any number."""
        return 1 if self._plan.sums_locally else self.micro_batches.most

    @property
    def _expected_rounds(self) -> int:
        """The rounds that this step is expected to have. In the last one, squares are summed as the averages come."""
        return 1 if self._plan.sums_locally else self.micro_batches.expected

    def _sum_of(self, part: Part) -> Tensor:
        """The fp32 memory in which the micro-batches of a part are summed before they are sent."""
        param, tile = part
        flat, offset = self._layout.locations[param]
        if len(self._tiles[param]) == 1:
            return self._whole[flat][offset : offset + self._layout.specs[param].numel]
        return self._whole[flat][slice(*(self._layout.ranks * edge for edge in self._tiles[param][tile]))]

    def _ready(self, part: Part, grad: Tensor) -> None:
        self._unsent[part] = grad
        self._uses[part] = self._buckets_of[part]
        self._buckets.ready(part)
        self._send_ready()

    def _send_ready(self) -> None:
        for bucket in self._buckets.take():
            self._send(bucket)

    def _end_rounds(self) -> None:
        if self._plan.sums_locally:
            for part in self._buckets_of:
                if self.micro_batches.of(*part) not in (0, self.micro_batches.most):
                    self._ready(part, self._sum_of(part))
        if self._rounds is None:
            self._end_round()
            while self._comm.all_reduce_any(False):
                self._end_round()
        else:
            while self._round < self._rounds:
                self._end_round()

    def _begin_next_round(self) -> None:
        self._end_round()
        if self._rounds is None:
            self._comm.all_reduce_any(True)

    def _end_round(self) -> None:
        for bucket in self._buckets.take_all():
            self._send(bucket)
        self._buckets.reset()
        self._unsent.clear()
        self._uses.clear()
        self._round += 1

    # The way of a bucket: sent and averaged, copied from the device, added to what waits.

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        self._wait_for_others(bucket.units[-1])
        self._launch(bucket)
        if not self._copier.direct:
            self._start(self._reducing[-1])

    def _wait_for_others(self, unit: str) -> None:
        """Waits for earlier buckets, before one is sent whose last gradients are of `unit`.

        These are the buckets of UNITS_AHEAD units ago, the gradients of UNITS_WAITING units ago, and one more where no
        buffer is free.
        """
        if unit != self._sent_unit:
            self._sent_unit, self._turn = unit, self._turn + 1
        while self._reducing and self._reducing[0].turn < self._turn - UNITS_AHEAD:
            self._finish_reduction()
        while self._waiting and self._waiting[0].turn < self._turn - UNITS_WAITING:
            self._waiting[0].copied.wait_on_device()
            self._waiting.popleft()
        while not self._free and self._next_lender() is None:
            self._finish_reduction()

    def _next_lender(self) -> _Reduction | None:
        """Of the buckets that have a buffer, the one sent first, if only the device has to wait for that buffer."""
        first = next((reduction for reduction in self._reducing if reduction.buffer is not None), None)
        return first if first is not None and first.copy is not None and first.is_in_place else None

    @uninterrupted  # a buffer must not be lost on its way from one bucket to the next
    def _launch(self, bucket: Bucket) -> None:
        """Fills a buffer and sends it. If an earlier bucket had the buffer, the device waits until that has ended."""
        is_free: DeviceEvent = DONE
        if self._free:
            buffer = self._free.pop()
        else:
            lender = self._next_lender()
            assert lender is not None
            assert lender.buffer is not None
            assert lender.copy is not None
            buffer, lender.buffer, is_free = lender.buffer, None, lender.copy
        numel, wire = self._layout.ranks * bucket.numel, self._plan.wire_of(bucket)
        full = buffer.full[: numel * wire.itemsize].view(wire)
        is_there = self._copier.direct or self._plan.is_on_device(bucket)
        memory = self._memory_for(bucket, self._round) if is_there else None
        averages = self._in_buffer(buffer.average, bucket) if memory is None else memory
        scratch = buffer.scratch[: numel * wire.itemsize].view(wire)
        with self._copier.beside():
            is_free.wait_on_device()
            self._fill(full, bucket)
            work = self._comm.reduce_scatter(full, averages, scratch=scratch)
        self._reducing.append(_Reduction(work, buffer, bucket, averages, memory is not None, self._round, self._turn))

    def _fill(self, full: Tensor, bucket: Bucket) -> None:
        """Copies the gradients of a bucket to their places in a buffer, with zeros for those that are missing."""
        for start, stop in bucket.holes:
            full[start:stop] = 0
        grads = []
        for piece in bucket.pieces:
            target = full[piece.chunk_offset : piece.chunk_offset + piece.numel]
            grad = self._unsent.get((piece.param, bucket.tile))
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad[piece.param_offset : piece.param_offset + piece.numel])
                grads.append(grad)
        if not self._copier.direct:
            self._waiting.append(_Waiting(self._turn, self._copier.mark(), grads))
        for part in bucket.parts & self._unsent.keys():
            self._uses[part] -= 1
            if not self._uses[part]:
                del self._unsent[part]

    def _memory_for(self, bucket: Bucket, number: int) -> list[Tensor] | None:
        """The memory in which the averages of a bucket's sub-ranges may be written at once in this round, or None.

        In the first round that is where gradients wait, if they wait in memory. Later averages have to be added.
        """
        found = [self._shards.range_memory(one) for one in bucket.ranges] if number == 0 else []
        memory = [one for one in found if one is not None]
        return memory or None

    def _in_buffer(self, buffer: Tensor, bucket: Bucket) -> list[Tensor]:
        """The places of a bucket's sub-ranges in a buffer for averages."""
        dtype = self._plan.average_dtype_of(bucket)
        together = buffer[: dtype.itemsize * bucket.numel].view(dtype)
        return list(together.split([one.numel for one in bucket.ranges]))

    def _is_done(self, reduction: _Reduction) -> bool:
        return reduction.work.done() and (reduction.copy is None or reduction.copy.done())

    def _finish_reduction(self) -> None:
        # Removed only when it is done: a call that is interrupted here has to wait again.
        first = self._reducing[0]
        first.work.wait()
        if not self._copier.direct:
            if first.copy is None:
                self._start(first)  # an interrupt came before it
            self._finish_copy(first)
        self._reducing.popleft()
        self._add_to_shards(first)

    def _start(self, reduction: _Reduction) -> None:
        """Queues what brings averages to where they wait, on a device with memory of its own."""
        if self._plan.is_on_device(reduction.bucket):
            self._start_adding(reduction)
        else:
            self._start_copy(reduction)

    @uninterrupted  # what is added once must not be added again
    def _start_adding(self, reduction: _Reduction) -> None:
        """Queues the averages of a bucket whose states are on the device: they stay there, or are added there."""
        with self._copier.ahead_of_downloads():
            reduction.work.wait_on_device()
            if not reduction.is_in_place:
                for one, average in zip(reduction.bucket.ranges, reduction.averages, strict=True):
                    memory = self._shards.range_memory(one)
                    assert memory is not None
                    write_or_add(None, average, memory, is_first=False)  # kernels have temporaries of one stream
            reduction.copy, reduction.is_in_place = self._copier.mark(), True

    def _start_copy(self, reduction: _Reduction) -> None:
        """Queues copies of averages from the device to where they wait, or to a buffer from which they are added."""
        size = sum(average.numel() * average.element_size() for average in reduction.averages)
        targets = self._memory_for(reduction.bucket, reduction.round)
        is_in_place = targets is not None
        if targets is None:
            assert reduction.buffer is not None  # only a copy in place lends it
            targets = self._in_buffer(reduction.buffer.copied, reduction.bucket)
        # Averages are made where they are copied: what computes does not wait for other ranks.
        with self._copier.ahead_of_downloads():
            reduction.work.wait_on_device()
            copies = [self._copier.to_host(*one) for one in zip(reduction.averages, targets, strict=True)]
        copy = copies[0] if len(copies) == 1 else _Copies(copies)
        reduction.copy, reduction.averages, reduction.is_in_place = copy, targets, is_in_place
        reduction.moving = self._timeline.begin(TO_HOST, "copy", size=size, tier="device")
        self._timeline.count("device_to_host_bytes", size)

    def _finish_copy(self, reduction: _Reduction) -> None:
        assert reduction.copy is not None
        with nullcontext() if reduction.copy.done() else self._timeline.waiting("wait for gradient", tier="device"):
            reduction.copy.wait()
        self._timeline.end(reduction.moving)

    def _add_to_shards(self, reduction: _Reduction) -> None:
        is_last = reduction.round + 1 == self._expected_rounds
        if not reduction.is_in_place:
            is_first = reduction.round == 0
            for one, average in zip(reduction.bucket.ranges, reduction.averages, strict=True):
                self._shards.add_range(one, average, is_first=is_first, is_last=is_last)
        if is_last:
            self._have_come(reduction.bucket)
        if reduction.buffer is not None:
            self._free.append(reduction.buffer)

    def _have_come(self, bucket: Bucket) -> None:
        """Sums the squares of the averages that are whole with a bucket of the last round that is expected."""
        for param in bucket.params_of(self._layout.rank):
            self._missing[param] -= 1
            if not self._missing[param]:
                self._shards.tile_has_come(param, 0)
                if is_in_backward():
                    self._on_whole(param)

    def _event(self, lane: str, name: str, param: int) -> AbstractContextManager[None]:
        return self._timeline.event(lane, name, parameter=self._layout.specs[param].name)
