"""How gradients of a rank among several are averaged, in virtual time; see grads/reduce_scatter.py, which this follows.

[Note: buckets that are simulated together]
A rank of 1,024 that train 10^12 parameters sends 10^5 buckets a step. Those of a unit are alike: they leave at the same
time, one after the other. So where there are more than MOST_BUCKETS, larger ones are simulated, each of which takes the
delays of as many collectives as it stands for. The bytes stay the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload.devices.copies import DOWN
from offload.grads.reduce_scatter import UNITS_AHEAD, UNITS_WAITING
from offload.grads.reduction_plan import ReductionPlan
from offload.grads.shards import use_of
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
        self._buckets = Buckets(self._plan.buckets)
        self._free = self._plan.buffers
        self._reducing: deque[_Reduction] = deque()
        self._filling: deque[tuple[int, Moment]] = deque()  # by turn, when gradients have left their memory
        self._device_waits: list[After] = []  # before it goes on
        self._turn = 0
        self._sent_unit: str | None = None
        self._round = 0
        self._came: set[Part] = set()  # in the round under way
        # As [Note: taking turns] in grads/reduce_scatter.py.
        self._shares_parameters = self._choice.params.streams and layout.shard_group_size > 1
        self._takes_turns = layout.shard_group_size > 1 and not choice.params_stay
        self._entered: dict[str, None] = {}  # units, by the backward under way
        self._left_units: set[str] = set()
        self._alone: str | None = None

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

    def _gradients_come(self, params: Sequence[int], made: Moment) -> Process:
        for param in reversed(params):
            yield from self._comes(param)
            while self._reducing and self._is_done(self._reducing[0]):
                yield from self._finish_reduction()

    def _comes(self, param: int) -> Process:
        if not self._plan.sums_locally and (param, 0) in self._came:
            yield from self._begin_next_round()
        number, numel = self._micro_batches.count(param), self._layout.specs[param].numel
        if self._plan.sums_locally:
            made = self._layout.specs[param].dtype.itemsize
            yield from self._in_ram(numel * (made + torch.float32.itemsize * (1 if number == 1 else 2)))
            if number != self._micro_batches.most:
                return
        yield from self._ready((param, 0))

    def _ready(self, part: Part) -> Process:
        self._came.add(part)
        self._buckets.ready(part)
        yield from self._send_ready()

    def _send_ready(self) -> Process:
        for bucket in self._buckets.take(self._may_leave):
            yield from self._send(bucket)

    def _may_leave(self, bucket: Bucket) -> bool:
        missing = {*bucket.units} - self._left_units
        is_turn = not self._takes_turns or missing <= {self._alone}
        return not missing or (is_turn and self._buckets.is_complete(bucket))

    def _backward_reaches(self, unit: Unit) -> Process:
        if self._shares_parameters:
            yield from self._leave()
            if self._came and unit.name in self._left_units and self._round + 1 != self._rounds:
                yield from self._begin_next_round()
            self._alone = None if unit.is_root else unit.name
            if not unit.is_root:
                self._entered[unit.name] = None

    def _backward_ends(self) -> Process:
        if self._shares_parameters:
            yield from self._leave()
            self._alone = None

    def _leave(self) -> Process:
        """Backward has left the units that it entered: it is at another one, or at its end."""
        left, self._entered = self._entered, {}
        if not self._plan.sums_locally and self._came:
            self._left_units.update(left)
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
        for bucket in self._buckets.take(lambda bucket: True):
            yield from self._send(bucket)
        self._buckets.reset()
        self._left_units.clear()
        self._came.clear()
        self._round += 1

    def _end_rounds(self) -> Process:
        if self._plan.sums_locally and self._micro_batches.most is None:
            for param in range(len(self._layout.specs)):
                yield from self._ready((param, 0))
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
        self._round = 0
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
        self._free += first.has_buffer

    def _add_range(self, one: SubRange, *, is_first: bool, is_last: bool) -> Process:
        """A process of the host: as GradShards.add_range."""
        flat, itemsize = one.within.flat, self._dtypes[one.within.flat].itemsize
        begin = self._layout.shard_range(flat)[0] + one.start
        for chunk in reversed(self._chunks_of[flat]):
            start, stop = max(chunk.start, begin), min(chunk.start + chunk.numel, begin + one.numel)
            if start >= stop:
                continue
            lease = None
            if self._stored_gradients is not None:
                use = use_of(is_fresh=is_first and stop - start == chunk.numel, is_unfinished=start > chunk.start)
                lease = yield from self._stored_gradients.lease(chunk.index, use, 0, self.host)
            yield from self._in_memory((stop - start) * itemsize * (2 + (not is_first) + is_last))
            if lease is not None:
                assert self._stored_gradients is not None
                self._stored_gradients.release(lease)

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
