"""What one rank does in its iterations, in virtual time: the processes of a run, and the order in which they work.

[Note: what is simulated]
What decides in a run decides here: the layout, the placement, the stores (storage/chunk_cache.py) with their policy.
What stands here is the order in which a run asks them: forward, backward and step, as docs/one-step.md tells them.
Three threads of a run are processes: the one that trains (the host), the worker that brings gradients to RAM, and the
worker that steps states in RAM for a model on a device. The device does what the host has launched. Where the device is
the CPU, the host waits for all that it launches, and steps states itself.

Where parameters or gradients are on NVMe, whether one is still in RAM at its next use depends on how fast disk and
workers are, in a run too: reads then differ from those of a run by what the buffers hold. All other bytes are equal.

What takes time: the device's passes, the optimizer's kernels, gradients that are copied, added and squared in RAM,
drives, and the link. All else takes none: Python, checksums, commits' own files and syncs. Nothing that works beside
something else makes that slower, but for transfers on one drive and one link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

from offload.grads.local import UNITS_LEAVING
from offload.grads.micro_batches import MicroBatches
from offload.grads.shards import dtypes_of, use_of
from offload.layout import Chunk, Layout
from offload.model.pending import order_of_updates
from offload.model.transfer import HOST_LEADS_UNITS
from offload.model.unit import Presence, Unit
from offload.model.units import ROOT
from offload.planner.link import chunk_bytes, new_bytes
from offload.planner.placement import Placement, tiers_of
from offload.planner.simulate.clock import Channel, Clock, Moment, Process, Server
from offload.planner.simulate.lines import COMMIT, COMPUTE, KERNELS, LINK, MEMORY, NOTHING, Line, Worker
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.simulate.stores import TimedStores
from offload.planner.simulate.units import TimedUnits, ToCopy
from offload.storage.chunk_cache import Use
from offload.storage.slot_map import ChunkKind
from offload.tiers import DEVICE

UP, DOWN = "up", "down"
After = tuple[Moment, str | Line]
"""What is waited for, and what that is a wait for."""


@dataclass(frozen=True)
class Station:
    """A part of a pass: a unit, or what the root unit does before the others, or after them.

    Attributes:
        unit: the unit's name.
        params: the numbers of its trained parameters, in the order of the model.
        computes: whether the time of the unit's pass is spent here.
    """

    unit: str
    params: tuple[int, ...]
    computes: bool = True


def stations_of(held: Layout) -> list[Station]:
    """The parts of a forward, in their order: units run in the order in which the model has their parameters."""
    units = dict.fromkeys(flat.unit for flat in held.flats if flat.unit != ROOT)
    first = next((number for number, spec in enumerate(held.specs) if spec.unit != ROOT), len(held.specs))
    before: list[int] = []
    behind: list[int] = []
    of_unit: dict[str, list[int]] = {unit: [] for unit in units}
    for number, spec in enumerate(held.trained.specs):
        (of_unit[spec.unit] if spec.unit != ROOT else before if number < first else behind).append(number)
    found = [Station(unit, tuple(params)) for unit, params in of_unit.items()]
    return [Station(ROOT, tuple(before), computes=False), *found, Station(ROOT, tuple(behind))]


class Rank:
    """One rank, in virtual time.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of its machine.

    Attributes:
        clock: the virtual time.
        device: what the device does.
        stores: the chunks.
        kernels: the threads of the optimizer's kernels.
        link: between RAM and the device; None: it has no memory of its own.
        counted: bytes that have moved between RAM and the device: up, and down.
    """

    def __init__(self, held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> None:
        self._held, self._layout = held, held.trained
        layout = self._layout
        self._placement, self._choice = placement, placement.choice
        self._passes, self._speeds = passes, speeds
        self._direct = placement.is_direct
        self._stations = stations_of(held)
        self._commit_at = 0
        self.clock = clock = Clock()
        self.stores = TimedStores(clock, placement, speeds.drives, lambda step: step == self._commit_at)
        self.kernels, self.compute = Server(clock, "kernels"), Server(clock, "compute")
        self.memory = Server(clock, "RAM")
        self.link: Channel | None = None
        if speeds.link is not None:
            ways = {UP: speeds.link.up, DOWN: speeds.link.down}
            self.link = Channel(clock, "link", ways, speeds.link.both, is_shared=False)
        self.host = Line(clock)
        self.device = Worker(clock, Line(clock), self.host)
        self._gradients = Worker(clock, Line(clock), self.device.line)
        self._steps = Worker(clock, Line(clock), self._gradients.line)
        self.counted = {UP: 0, DOWN: 0}
        self._states = self.stores[ChunkKind.STATES]
        self._params = self.stores.get(ChunkKind.PARAMS) if self._choice.params.tier > DEVICE else None
        there = self._choice.states.tier == DEVICE and not self._direct
        self._there = frozenset(flat.index for flat in layout.flats) if there else placement.device_flats
        self._stored_gradients = self.stores.get(ChunkKind.GRADS)
        self._dtypes = dtypes_of(layout, self._choice.grads.micro_batches)
        self._micro_batches = MicroBatches(layout, self._choice.grads)
        self._chunks_of: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in layout.chunks:
            self._chunks_of[chunk.flat].append(chunk)
        self._step = 0
        self._order: Sequence[int] = [flat.index for flat in layout.flats]
        self._applied: list[int] = []
        self._pending: dict[int, list[Moment]] = {}  # of each flat parameter, when its chunks are stepped
        self._leaving: list[Moment] = []  # by unit, the copy of its last gradient
        self._summed: Moment | None = None  # the last gradient that was submitted
        self._scheduler = TimedUnits(held, placement, self._has_update)
        self._units = self._scheduler.units
        firsts = {ChunkKind.PARAMS: 0, ChunkKind.FROZEN: len(layout.param_chunks)}
        streamed = {kind: first for kind, first in firsts.items() if tiers_of(self._choice)[kind] > DEVICE}
        self._fetched = [(self.stores[kind], first) for kind, first in streamed.items()]
        for fetched, _ in self._fetched:
            fetched.store.expect(())
        leases = [max(placement.pools[kind].in_flight - 1, 1) for kind in streamed if placement.pools[kind].in_flight]
        self._leases = min(leases, default=len(held.param_chunks))
        self._uploads: deque[Moment] = deque()
        self._arrived: dict[Unit, list[After]] = {}  # by unit, what the device waits for before it uses it
        self._left: deque[Moment] = deque()  # the last uses of memory that is free
        self._released: deque[Moment] = deque()  # the last uses of units
        self._launched = Moment()
        self._launched.happen()

    @property
    def busy_s(self) -> dict[str, float]:
        """For how many seconds each resource has worked."""
        channels = [*self.stores.drives, *(() if self.link is None else (self.link,))]
        found = {"compute": self.compute.busy_s, "kernels": self.kernels.busy_s, "RAM": self.memory.busy_s}
        return found | {channel.name: channel.busy_s for channel in channels}

    @property
    def moved(self) -> dict[str, int]:
        """The bytes that were read from drives and written to them, and copied up and down, as a run counts them."""
        counted = self.stores.timeline.counted
        return {"read": counted("nvme_read_bytes"), "written": counted("nvme_written_bytes")} | self.counted

    # An iteration.

    def iterate(self, *, commits: bool = False) -> Process:
        """A process: forwards, backwards and a step.

        Args:
            commits: whether the step before is committed in it.
        """
        for _ in range(self._choice.grads.micro_batches):
            yield from self._forward()
            yield from self._backward()
        yield from self._take_step(commits=commits)

    def expect_commit(self) -> None:
        """The results of the next step are going to be committed."""
        self._commit_at = self._step + 1

    def _forward(self) -> Process:
        root = self._units[ROOT]
        for station in self._stations:
            unit = self._units[station.unit]
            arrived: list[After] = []
            if not (unit is root and station.computes):  # the root is entered once
                self._scheduler.update_begins(unit)
                yield from self._do_what_is_to_do()
                arrived += yield from self._apply(station.unit)
                if unit is root:
                    self._scheduler.pass_begins()
                self._scheduler.forward_begins(unit)
                yield from self._do_what_is_to_do()
            seconds = self._passes.forward_s.get(station.unit, 0.0) if station.computes else 0.0
            yield from self._launch(seconds, f"forward {station.unit}", arrived + self._arrived.get(unit, []))
            if station.computes:
                self._scheduler.forward_ends(unit)

    def _backward(self) -> Process:
        for station in reversed(self._stations):
            seconds = self._passes.backward_s.get(station.unit, 0.0) if station.computes else 0.0
            leaving = [] if self._direct else self._leaving[:-UNITS_LEAVING]
            del self._leaving[: len(leaving)]
            unit = self._units[station.unit]
            if station.computes:
                self._scheduler.backward_begins(unit)
                yield from self._do_what_is_to_do()
            waits = [(one, LINK) for one in leaving] + self._arrived.get(unit, [])
            made = yield from self._launch(seconds, f"backward {station.unit}", waits)
            copies = []
            for param in reversed(station.params):
                copies += yield from self._gradient_comes(param, made)
            if copies:
                self._leaving.append(copies[-1])
        self._scheduler.backward_ends()
        yield from self._do_what_is_to_do()

    def _take_step(self, *, commits: bool) -> Process:
        yield from self._apply_all()
        self._scheduler.step_begins()
        yield from self._do_what_is_to_do()
        while self._uploads:
            yield from self.host.wait(self._uploads[0], LINK)
            self._uploads.popleft()
        for fetched, _ in self._fetched:
            fetched.store.repeat()
        yield from self._wait_for_gradients()
        if commits:
            self.host.begins(COMMIT)
            for kind, store in self.stores.by_kind.items():
                if self._placement.slots.committed_chunks(kind):
                    yield from store.flush()
            self.host.begins(NOTHING)
        self._step += 1
        self._order = order_of_updates(self._layout, self._order, self._applied)
        self._applied = []
        works = [chunk for flat in self._order for chunk in self._chunks_of[flat]]
        self._states.store.expect([chunk.index for chunk in works])
        if self._stored_gradients is not None:
            self._stored_gradients.store.expect([chunk.index for chunk in works])
        self._micro_batches.clear_all()
        self._pending = {flat: [] for flat in self._order if self._chunks_of[flat]}
        if not self._direct:
            for chunk in (chunk for chunk in works if chunk.flat not in self._there):
                self._pending[chunk.flat].append(self._steps.submit(self._step_chunk(chunk, self._steps.line)))
        elif not self._placement.uses_disk:  # as HeldModel.step_ends
            yield from self._apply_all()

    # Gradients.

    def _gradient_comes(self, param: int, made: Moment) -> Generator[Moment, None, list[Moment]]:
        """A process of the host: what a hook does with a gradient.

        Args:
            param: the parameter's number.
            made: when the device has made it.

        Returns:
            When it has left the device, if it has to.
        """
        number = self._micro_batches.count(param)
        if self._direct:
            yield from self._add(param, number, self.host)
            return []
        if self._layout.flat_of[param] in self._there:
            return []
        spec = self._layout.specs[param]
        copied = self._copy(DOWN, spec.numel * spec.dtype.itemsize, f"gradient of {spec.name}", made)

        def work() -> Process:
            yield from self._gradients.line.wait(made, self.device.line)
            yield from self._gradients.line.wait(copied, LINK)
            yield from self._add(param, number, self._gradients.line)

        self._summed = self._gradients.submit(work())
        return [copied]

    def _add(self, param: int, number: int, line: Line) -> Process:
        """A process: brings a gradient that is in RAM to where it waits, and sums its squares."""
        is_first, is_last = number == 1, number == self._micro_batches.expected
        for chunk, piece in self._layout.pieces_of(param):
            lease = None
            if self._stored_gradients is not None:
                params = [one.param for one in chunk.pieces]
                is_unfinished = len(params) > 1 and not self._micro_batches.are_equal(params)
                use = use_of(is_fresh=is_first and piece.numel == chunk.numel, is_unfinished=is_unfinished)
                lease = yield from self._stored_gradients.lease(chunk.index, use, 0, line)
            line.begins(MEMORY)
            nbytes = self._bytes_in_ram(chunk.flat, piece.numel, is_first=is_first, is_last=is_last)
            yield self.memory.submit(nbytes / self._speeds.memory, "gradient")
            line.begins(NOTHING)
            if lease is not None:
                assert self._stored_gradients is not None
                self._stored_gradients.release(lease)

    def _bytes_in_ram(self, flat: int, numel: int, *, is_first: bool, is_last: bool) -> float:
        """What is read and written in RAM for elements of a gradient."""
        made, waits = self._layout.flats[flat].dtype.itemsize, self._dtypes[flat].itemsize
        is_copied_there = not self._direct and self._stored_gradients is None and made == waits
        moved = 0 if is_copied_there else made + waits + (0 if is_first else waits)
        return numel * (moved + (waits if is_last else 0))

    def _wait_for_gradients(self) -> Process:
        if self._summed is not None:
            yield from self.host.wait(self._summed, self._gradients.line)
        yield from self.host.wait(self._launched, self.device.line)  # whose sums of squares the step has to know
        self._leaving.clear()

    # The step.

    def _has_update(self, unit: Unit) -> bool:
        return any(flat.index in self._pending for flat in unit.flats)

    def _apply_all(self) -> Process:
        for flat in list(self._pending):
            yield from self._apply_flat(flat)

    def _apply(self, unit: str) -> Generator[Moment, None, list[After]]:
        """A process of the host: applies what is pending of a unit.

        Returns:
            What the device has to wait for before it uses the unit.
        """
        found: list[After] = []
        for flat in [flat for flat in self._pending if self._layout.flats[flat].unit == unit]:
            found += yield from self._apply_flat(flat)
        return found

    def _apply_flat(self, flat: int) -> Generator[Moment, None, list[After]]:
        done, uploads = self._pending.pop(flat), []
        for number, chunk in enumerate(self._chunks_of[flat]):
            if self._direct:
                yield from self._step_chunk(chunk, self.host)
            elif flat in self._there:
                yield from self._bring_made(chunk)
            else:
                yield from self.host.wait(done[number], self._steps.line)
                if self._params is None:
                    size = new_bytes(self._layout, chunk)
                    uploads.append(self._copy(UP, size, f"new parameters of chunk {chunk.index}"))
        self._applied.append(flat)
        if self._params is not None:
            unit = self._units[self._layout.flats[flat].unit]
            if unit.presence is not Presence.UPDATING:
                self._scheduler.transfers.flat_updated(unit, flat)
                yield from self._do_what_is_to_do()
        return [(one, LINK) for one in uploads]

    def _bring_made(self, chunk: Chunk) -> Process:
        """A process of the host: brings parameters that stream to RAM, which the device has made."""
        if self._params is not None:
            target = yield from self._params.lease(chunk.index, Use.OVERWRITE, self._step, self.host)
            size = chunk_bytes(self._layout, chunk)
            yield from self.host.wait(self._copy(DOWN, size, f"new chunk {chunk.index}", self._launched), LINK)
            self._params.release(target)

    def _step_chunk(self, chunk: Chunk, line: Line) -> Process:
        """A process: what `Step._run` does with a chunk, in the thread of a line."""
        is_split, target, gradient = self._choice.states.split_master, None, None
        if self._params is not None:
            use = Use.UPDATE if is_split else Use.OVERWRITE
            target = yield from self._params.lease(chunk.index, use, self._step, line)
        states = yield from self._states.lease(chunk.index, Use.UPDATE, self._step, line)
        if self._stored_gradients is not None:
            gradient = yield from self._stored_gradients.lease(chunk.index, Use.CONSUME, self._step, line)
        if is_split and self._params is None and not self._direct:
            size = chunk_bytes(self._layout, chunk)
            yield from line.wait(self._copy(DOWN, size, f"parameters of chunk {chunk.index}"), LINK)
        line.begins(KERNELS)
        yield self.kernels.submit(chunk.numel / self._speeds.elements_per_s, f"chunk {chunk.index}")
        line.begins(NOTHING)
        if target is not None:
            yield from self._chunk_updated(chunk, line)
        for store, lease in ((self._stored_gradients, gradient), (self._states, states), (self._params, target)):
            if store is not None and lease is not None:
                store.release(lease)

    # Units that stream.

    def _do_what_is_to_do(self) -> Process:
        """A process of the host: what the scheduler has left to it."""
        todo = self._scheduler.transfers.todo
        while todo:
            one = todo.popleft()
            if isinstance(one, ToCopy):
                yield from self._copy_unit(one)
                continue
            self._arrived.pop(one, None)
            self._left.append(self._launched)
            self._released.append(self._launched)
            while len(self._released) > HOST_LEADS_UNITS:
                yield from self.host.wait(self._released.popleft(), self.device.line)

    def _copy_unit(self, one: ToCopy) -> Process:
        """A process of the host: as UnitTransfers._start_copy, for each chunk of a unit."""
        # The memory that was left first is lent first.
        after = self._left.popleft() if one.is_new and self._left else None
        if one.is_new:
            self._arrived[one.unit] = []
        for chunk in one.chunks:
            while len(self._uploads) >= self._leases:
                yield from self.host.wait(self._uploads[0], LINK)
                self._uploads.popleft()
            store, first = next((store, first) for store, first in reversed(self._fetched) if chunk.index >= first)
            lease = yield from store.lease(chunk.index - first, Use.READ, 0, self.host)
            nbytes = chunk_bytes(self._held, chunk)
            if self._direct:
                yield from self._copy_in_ram(nbytes, self.host)
                store.release(lease)
                continue
            copied = self._copy(UP, nbytes, f"parameters of {one.unit.title}", after)
            copied.then(partial(store.release, lease))
            self._uploads.append(copied)
            self._arrived.setdefault(one.unit, []).append((copied, LINK))

    def _chunk_updated(self, chunk: Chunk, line: Line) -> Process:
        """A process: as UnitTransfers.chunk_updated."""
        unit = self._units[self._layout.flats[chunk.flat].unit]
        if unit.presence is Presence.UPDATING:
            yield from self._copy_in_ram(chunk_bytes(self._layout, chunk), line)
            unit.not_updated.discard(chunk.index)

    def _copy_in_ram(self, nbytes: int, line: Line) -> Process:
        line.begins(MEMORY)
        yield self.memory.submit(2 * nbytes / self._speeds.memory, "parameters")
        line.begins(NOTHING)

    # What the device does.

    def _launch(self, seconds: float, what: str, after: Sequence[After] = ()) -> Generator[Moment, None, Moment]:
        """A process of the host: has the device compute. Where that is the CPU, the host waits.

        Args:
            seconds: for how long.
            what: what it is called.
            after: what the device waits for first, and what that is a wait for.

        Returns:
            When it is done.
        """
        line = self.device.line

        def work() -> Process:
            for moment, reason in after:
                yield from line.wait(moment, reason)
            line.begins(COMPUTE)
            yield self.compute.submit(seconds, what)

        done = self._launched = self.device.submit(work())
        if self._direct:
            yield from self.host.wait(done, line)
        return done

    def _copy(self, way: str, nbytes: int, what: str, after: Moment | None = None) -> Moment:
        """Copies bytes between RAM and the device.

        Args:
            way: UP or DOWN.
            nbytes: how many.
            what: what they are called.
            after: when they are there; None: they are.

        Returns:
            When they have arrived.
        """
        assert self.link is not None
        link, arrived = self.link, Moment()
        self.counted[way] += nbytes
        if after is None:
            return link.submit(way, nbytes, what)
        after.then(lambda: link.submit(way, nbytes, what).then(arrived.happen))
        return arrived
