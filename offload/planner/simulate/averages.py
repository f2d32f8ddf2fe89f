"""How gradients of a rank among several are averaged, in virtual time; see grads/reduce_scatter.py, which this follows.

[Note: buckets that are simulated together]
A rank of 1,024 that train 10^12 parameters sends 10^5 buckets a step. Those of a unit are alike: they leave at the same
time, one after the other. So where there are more than MOST_BUCKETS, larger ones are simulated, each of which takes the
delays of as many collectives as it stands for. The bytes stay the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch

from offload.devices.copies import DOWN
from offload.grads.reduce_scatter import UNITS_AHEAD, UNITS_WAITING
from offload.grads.reduction_plan import ReductionPlan
from offload.layout import ALIGN_NUMEL, Layout
from offload.model.unit import Unit
from offload.planner.placement import Placement
from offload.planner.simulate.clock import Moment, Process
from offload.planner.simulate.lines import LINK, MEMORY, NOTHING
from offload.planner.simulate.network import AVERAGES, VALUES, After, Network
from offload.planner.simulate.rank import Rank
from offload.planner.simulate.speeds import Passes, Speeds
from offload.ranks.buckets import Bucket, Buckets, Part, SubRange, most_numel
from offload.sizes import round_up
from offload.tiers import DEVICE

MOST_BUCKETS = 1024
"""Of a step, that are simulated one by one."""


@dataclass
class _Reduction:
    """A bucket that is being averaged, as `_Reduction` in grads/reduce_scatter.py.

    Attributes:
        bucket: what is averaged.
        arrived: when what other ranks sent is there.
        round: the number of its round.
        turn: the number of its unit, in the order in which units are sent.
        has_buffer: whether it has its communication buffers; else a later bucket has them.
        is_in_place: whether averages are made, or copied to, where they wait.
        copied: when they have left the device; None: they are made where they wait.
    """

    bucket: Bucket
    arrived: Moment
    round: int
    turn: int
    has_buffer: bool = True
    is_in_place: bool = False
    copied: Moment | None = None


class AveragingRank(Rank):
    """A rank whose gradients are averaged over ranks.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of its machine, and of the link between ranks.

    Attributes:
        network: the link between ranks.
    """

    def __init__(self, held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> None:
        super().__init__(held, placement, passes, speeds)
        assert speeds.network is not None
        self.network = Network(self.clock, speeds.network)
        choice, layout = self._choice.grads, self._layout
        # Whether kernels can write where autograd makes gradients, as Needs.in_place says.
        self._in_place = self._direct or self._choice.states.tier == DEVICE
        self._is_in_ram = self._direct or not self._in_place
        self._each = most_numel(layout.ranks, choice.bucket_bytes // 4)
        least = -(-sum(layout.shard_numel(flat.index) for flat in layout.flats) // MOST_BUCKETS)
        if least > self._each:
            choice = replace(choice, bucket_bytes=4 * layout.ranks * round_up(least, ALIGN_NUMEL))
        self._plan = ReductionPlan(layout, choice, direct=self._in_place, device_flats=self._placement.device_flats)
        takes_turns = layout.shard_group_size > 1 and not choice.params_stay
        self._buckets = Buckets(self._plan.buckets, take_turns=takes_turns)
        self._parts = dict.fromkeys(part for bucket in self._plan.buckets for part in bucket.parts)
        self._free = self._plan.buffers
        self._reducing: deque[_Reduction] = deque()
        self._filling: deque[tuple[int, Moment]] = deque()  # by turn, when gradients have left their memory
        self._device_waits: list[After] = []  # before it goes on
        self._turn = 0
        self._sent_unit: str | None = None
        self._round = 0
        self._is_in_backward = False
        self._came = False  # in the backward under way
        # In how many buckets this rank's elements of each parameter are, and how many of them have not come for the
        # last time; for trials.
        own = (bucket.params_of(layout.rank) for bucket in self._plan.buckets if self._tried is not None)
        self._parts_of = Counter(param for params in own for param in params)
        self._missing = self._parts_of.copy()

    @property
    def busy_s(self) -> dict[str, float]:
        return super().busy_s | {self.network.channel.name: self.network.channel.busy_s}

    @property
    def sent(self) -> Counter[str]:
        return self.network.sent

    # As gradients come.

    def _wait_for_leaving(self) -> list[After]:
        waits, self._device_waits = self._device_waits, []
        return waits

    def _gradient_comes(self, param: int, made: Moment, tile: int = 0) -> Generator[Moment, None, list[Moment]]:
        yield from self._comes((param, tile))
        while self._reducing and self._is_done(self._reducing[0]):
            yield from self._finish_reduction()
        return []

    def _comes(self, part: Part) -> Process:
        if not self._plan.sums_locally and self._buckets.has_come(part):
            yield from self._begin_next_round()
        number, self._came = self._micro_batches.count(*part), True
        if self._plan.sums_locally:
            spec = self._layout.specs[part[0]]
            numel = self._tile_numel(*part) * (self._layout.ranks if spec.tile else 1)
            yield from self._in_ram(numel * (spec.dtype.itemsize + torch.float32.itemsize * (1 if number == 1 else 2)))
            if number != self._micro_batches.most:
                return
        yield from self._ready(part)

    def _ready(self, part: Part) -> Process:
        self._buckets.ready(part)
        yield from self._send_ready()

    def _send_ready(self) -> Process:
        for bucket in self._buckets.take():
            yield from self._send(bucket)

    def _backward(self) -> Process:
        self._is_in_backward = True
        yield from super()._backward()
        self._is_in_backward = False

    def _backward_reaches(self, unit: Unit) -> Process:
        told = self._scheduler.backward_reaches(unit)
        if told is not None:
            left, is_alone = told
            yield from self._leave(left)
            if self._came and self._buckets.has_left(unit.name) and self._round + 1 != self._rounds:
                yield from self._begin_next_round()
            self._buckets.alone = unit.name if is_alone else None

    def _backward_ends(self) -> Process:
        left = self._scheduler.backward_leaves()
        if left is not None:
            yield from self._leave(left)
            self._buckets.alone, self._came = None, False

    def _leave(self, units: Sequence[str]) -> Process:
        if not self._plan.sums_locally and self._came:
            self._buckets.leave(units)
            yield from self._send_ready()

    # Rounds.

    @property
    def _rounds(self) -> int | None:
        """The most rounds that a step may have; None: any number."""
        return 1 if self._plan.sums_locally else self._micro_batches.most

    @property
    def _expected_rounds(self) -> int:
        return 1 if self._plan.sums_locally else self._micro_batches.expected

    def _begin_next_round(self) -> Process:
        yield from self._end_round()
        if self._rounds is None:
            yield from self._ask(AVERAGES)

    def _end_round(self) -> Process:
        for bucket in self._buckets.take_all():
            yield from self._send(bucket)
        self._buckets.reset()
        self._round += 1

    def _end_rounds(self) -> Process:
        if self._plan.sums_locally:
            for part in self._parts:
                if self._micro_batches.of(*part) not in (0, self._micro_batches.most):
                    yield from self._ready(part)
        if self._rounds is None:
            yield from self._end_round()
            yield from self._ask(AVERAGES)
        while self._rounds is not None and self._round < self._rounds:
            yield from self._end_round()

    def _wait_for_gradients(self) -> Process:
        yield from self._end_rounds()
        yield from self._ask(AVERAGES)
        while self._reducing:
            yield from self._finish_reduction()
        self._filling.clear()
        self._round, self._came = 0, False
        self._missing = self._parts_of.copy()
        yield from super()._wait_for_gradients()

    def _agree(self) -> Process:
        yield from self._ask(AVERAGES)  # the norm, in which NaN and Inf are found
        yield from self._ask(VALUES)

    def _ask(self, group: str) -> Process:
        """A process of the host: waits for the answers of all ranks."""
        yield from self.host.wait(self.network.ask(group, self._layout.ranks), self.network.line(group))

    # The way of a bucket.

    def _send(self, bucket: Bucket) -> Process:
        yield from self._wait_for_others(bucket.units[-1])
        after: list[After] = [] if self._direct else [(self._launched, self.device.line)]
        if self._free:
            self._free -= 1
        else:
            lender = self._next_lender()
            assert lender is not None
            assert lender.copied is not None
            lender.has_buffer = False
            after.append((lender.copied, LINK))
        ranks, itemsize = self._layout.ranks, self._plan.wire_of(bucket).itemsize
        yield from self._in_ram(2 * ranks * bucket.numel * itemsize)
        if not self._in_place:
            self._filling.append((self._turn, after[-1][0]))
        calls = -(-bucket.numel // self._each)
        arrived = self.network.reduce_scatter((ranks - 1) * bucket.numel * itemsize, calls, after)
        sent = _Reduction(bucket, arrived, self._round, self._turn)
        self._reducing.append(sent)
        stays = self._plan.is_on_device(bucket)
        sent.is_in_place = self._round == 0 and (stays or self._stored_gradients is None)
        if not self._in_place:
            nbytes = bucket.numel * self._plan.average_dtype_of(bucket).itemsize
            sent.copied = arrived if stays else self._copy(DOWN, nbytes, "averages", arrived)
            sent.is_in_place = sent.is_in_place or stays

    def _wait_for_others(self, unit: str) -> Process:
        if unit != self._sent_unit:
            self._sent_unit, self._turn = unit, self._turn + 1
        while self._reducing and self._reducing[0].turn < self._turn - UNITS_AHEAD:
            yield from self._finish_reduction()
        while self._filling and self._filling[0][0] < self._turn - UNITS_WAITING:
            self._device_waits.append((self._filling.popleft()[1], self.network.line(AVERAGES)))
        while not self._free and self._next_lender() is None:
            yield from self._finish_reduction()

    def _next_lender(self) -> _Reduction | None:
        first = next((one for one in self._reducing if one.has_buffer), None)
        return first if first is not None and first.copied is not None and first.is_in_place else None

    def _is_done(self, reduction: _Reduction) -> bool:
        return reduction.arrived.is_past and (reduction.copied is None or reduction.copied.is_past)

    def _finish_reduction(self) -> Process:
        """A process of the host: waits for the averages of a bucket, and adds them to those of earlier rounds."""
        first = self._reducing[0]
        yield from self.host.wait(first.arrived, self.network.line(AVERAGES))
        bucket, plan = first.bucket, self._plan
        average = bucket.numel * plan.average_dtype_of(bucket).itemsize
        yield from self._in_ram(self._layout.ranks * bucket.numel * plan.wire_of(bucket).itemsize + average)
        if first.copied is not None:
            yield from self.host.wait(first.copied, LINK)
        self._reducing.popleft()
        is_last = first.round + 1 == self._expected_rounds
        if not first.is_in_place:
            for one in bucket.ranges:
                yield from self._add_range(one, is_first=first.round == 0, is_last=is_last)
        elif is_last and not plan.is_on_device(bucket):
            yield from self._in_memory(average)  # its squares
        if is_last and self._tried is not None:
            self._have_come(bucket)
        self._free += first.has_buffer

    def _have_come(self, bucket: Bucket) -> None:
        """As ReducedGradients._have_come."""
        for param in bucket.params_of(self._layout.rank):
            self._missing[param] -= 1
            if not self._missing[param] and self._is_in_backward:
                self._gradient_is_whole(param)

    def _add_range(self, one: SubRange, *, is_first: bool, is_last: bool) -> Process:
        """A process of the host: as GradShards.add_range."""
        flat, itemsize = one.within.flat, self._dtypes[one.within.flat].itemsize
        begin = self._layout.shard_range(flat)[0] + one.start
        for chunk in reversed(self._chunks_of[flat]):
            start, stop = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + one.numel)
            if start < stop:
                numel, is_unfinished = stop - start, start > chunk.start
                nbytes = numel * itemsize * (2 + (not is_first) + is_last) if self._is_in_ram else 0
                is_fresh = is_first and numel == chunk.numel
                yield from self._add_to(chunk, nbytes, self.host, is_fresh=is_fresh, is_unfinished=is_unfinished)

    def _in_ram(self, nbytes: float) -> Process:
        """A process of the host: what is done where the model is. A device's own memory takes no time."""
        if self._direct:
            yield from self._in_memory(nbytes)

    def _in_memory(self, nbytes: float) -> Process:
        """A process of the host: what is done where gradients wait."""
        if self._is_in_ram:
            self.host.begins(MEMORY)
            yield self.memory.submit(nbytes / self._speeds.memory, "gradient")
            self.host.begins(NOTHING)
