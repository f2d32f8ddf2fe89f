"""What one rank does in its iterations, in virtual time: the processes of a run, and the order in which they work.

[Note: what is simulated]
What decides in a run decides here: the layout, the placement, the stores (storage/chunk_cache.py) with their policy.
What stands here is the order in which a run asks them: forward, backward and step, as docs/one-step.md tells them.
Three threads of a run are processes: the one that trains (the host), the worker that brings gradients to RAM, and the
worker that steps states in RAM for a model on a device. The device does what the host has launched. Where the device is
the CPU, the host waits for all that it launches, and steps states itself.

Where parameters or gradients are on NVMe, whether one is still in RAM at its next use depends on how fast disk and
workers are, in a run too: reads then differ from those of a run by what the buffers hold. All other bytes are equal.

Where activations wait, the store of them decides (storage/activation_store.py); a tensor that several units keep waits
once, and counts as that of the first one. Trials are all kept, and those that have not begun when their step does are
dropped, as in a run; where the device is the CPU, they take its cores. A weight in tiles counts as used once a pass, by
an operation that uses no other parameter of its block: a bias beside it brings a run's backward to the block once more.
Where tiles of experts may owe steps, a chunk's gradient counts as zeros if its tile was used in no micro-batch.

What takes time: the device's passes, the optimizer's kernels, gradients that are copied, added and squared in RAM,
drives, the link, and that to other ranks ([Note: other ranks] in network.py). Of Python, what tiles and chunks take,
as many of them are small; on a CPU, also what tiles read and write in RAM beside (planner/tile_bytes.py).
All else takes none: other Python, checksums, commits' own files and syncs. Nothing that works beside something else
makes that slower, but for transfers on one drive and one link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offload.devices.copies import DOWN, UP
from offload.grads.local import UNITS_LEAVING
from offload.grads.micro_batches import MicroBatches
from offload.grads.shards import dtypes_of, use_of
from offload.layout import Chunk, Layout
from offload.model.pending import order_of_updates, updates_up_to
from offload.model.transfer import HOST_LEADS_UNITS
from offload.model.unit import Presence, Unit
from offload.model.units import ROOT, encloses
from offload.optim.flops import matrix_work
from offload.optim.late import Owed
from offload.optim.trials import TriedChunks
from offload.planner.link import chunk_bytes, new_bytes
from offload.planner.placement import Placement, tiers_of
from offload.planner.simulate.activations import TimedActivations, TimedCopier
from offload.planner.simulate.clock import Channel, Clock, Moment, Process, Server
from offload.planner.simulate.lines import COMMIT, COMPUTE, KERNELS, LINK, MEMORY, NOTHING, Line, Worker
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.simulate.stores import TimedStores
from offload.planner.simulate.units import TimedUnits, ToAwait, ToCopy, ToGather
from offload.storage.chunk_cache import Use
from offload.storage.slot_map import ChunkKind
from offload.tiers import DEVICE

After = tuple[Moment, str | Line]
"""What is waited for, and what that is a wait for."""


@dataclass(frozen=True)
class TiledParam:
    """A weight that runs in tiles.

    Attributes:
        unit: the name of its unit.
        tiles: the names of its tiles' units.
        param: its number among trained parameters; None: it is frozen.
    """

    unit: str
    tiles: tuple[str, ...]
    param: int | None


@dataclass(frozen=True)
class Station:
    """A part of a pass: a unit, or what the root unit does before the others, or after them.

    Attributes:
        unit: the unit's name.
        params: the numbers of its trained parameters, in the order of the model.
        tiled: the weights in it that run in tiles, likewise. Each counts as used once.
        computes: whether the time of the unit's pass is spent here.
    """

    unit: str
    params: tuple[int, ...] = ()
    tiled: tuple[TiledParam, ...] = ()
    computes: bool = True


def stations_of(held: Layout) -> list[Station]:
    """The parts of a forward, in their order: units run in the order in which the model has their parameters."""
    in_tiles = {flat.unit for flat in held.flats if held.tile_of(flat.index)}
    units = [unit for unit in dict.fromkeys(flat.unit for flat in held.flats) if unit not in {ROOT, *in_tiles}]
    around = {unit: max((one for one in units if encloses(one, unit)), key=len, default=ROOT) for unit in in_tiles}
    home = [around.get(spec.unit, spec.unit) for spec in held.specs]
    first = next((number for number, unit in enumerate(home) if unit != ROOT), len(home))
    params: dict[str, list[int]] = {unit: [] for unit in (*units, _BEFORE, _BEHIND)}
    tiled: dict[str, dict[str, int | None]] = {unit: {} for unit in params}
    trained = {spec.name: number for number, spec in enumerate(held.trained.specs)}
    for number, spec in enumerate(held.specs):
        station = home[number] if home[number] != ROOT else _BEFORE if number < first else _BEHIND
        param = None if spec.is_frozen else trained[spec.name]
        if spec.unit in in_tiles:
            tiled[station].setdefault(spec.unit, param)
        elif param is not None:
            params[station].append(param)
    tiles: dict[str, dict[str, None]] = {unit: {} for unit in in_tiles}
    for one in held.slices:
        if one.is_tile:
            tiles[held.flats[one.flat].unit][one.unit] = None

    def made(unit: str, key: str, *, computes: bool = True) -> Station:
        weights = (TiledParam(weight, tuple(tiles[weight]), param) for weight, param in tiled[key].items())
        return Station(unit, tuple(params[key]), tuple(weights), computes)

    return [made(ROOT, _BEFORE, computes=False), *(made(unit, unit) for unit in units), made(ROOT, _BEHIND)]


_BEFORE, _BEHIND = "\0before", "\0behind"
"""What the root unit does before the others, and after them; no unit has such a name."""


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
        self.stores = TimedStores(clock, placement, speeds, lambda step: step == self._commit_at)
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
        self._step = self._pass = 0
        self._used_tiles: dict[str, Sequence[int]] = {}  # in the present pass, by the unit of their weight
        self._order: Sequence[int] = [flat.index for flat in layout.flats]
        self._applied: list[int] = []
        self._pending: dict[int, list[Moment]] = {}  # of each flat parameter, when its chunks are stepped
        self._leaving: list[Moment] = []  # by unit, the copy of its last gradient
        self._summed: Moment | None = None  # the last gradient that was submitted
        self._owed = Owed()
        self._due: Mapping[int, int] = {}  # steps that chunks owed, which are made with the step under way
        self._works: dict[int, list[Chunk]] = {}  # the chunks that it steps, by flat parameter
        self._tiles_since: set[tuple[str, int]] = (
            set()
        )  # units of weights and numbers of tiles, used since the last step
        self._scheduler = TimedUnits(held, placement, self._has_update, self._owed.counts)
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
        over_link = {way: partial(self._move, way, what="activation", behind_device=True) for way in (UP, DOWN)}
        copier = TimedCopier(
            over_link[UP], over_link[DOWN], self._copied_in_ram if self._direct else None, self._wait_in_call
        )
        self._activations = TimedActivations(
            placement, passes.waiting, copier, self.stores.drives, self.stores.timeline, self._wait_in_call
        )
        self._recomputes = self._choice.activations.recomputes
        # As Step._is_in_ram: chunks in RAM are then stepped together.
        self._steps_together = (
            self._direct
            and self._params is None
            and self._stored_gradients is None
            and not self._choice.states.split_master
        )
        self._tried: TriedChunks | None = None
        self._trials = self._steps
        if self._choice.states.tries_steps:
            is_resident = self._states.store.is_resident
            self._tried = TriedChunks(layout, [one.index for one in layout.chunks if not is_resident(one.index)])
            if self._direct:
                self._trials = Worker(clock, Line(clock), self.device.line)
        self._waiting_trials: list[Moment] = []  # the ends of those that have not been made
        self._whole: dict[int, int] = {}  # by parameter whose gradient is whole, the step that it is for
        self._made: set[int] = set()  # the chunks whose next step was tried
        self._kept: set[int] = set()  # those whose step under way was
        self._kept_bytes = 0
        self._read_soon: Collection[int] = ()

    @property
    def busy_s(self) -> dict[str, float]:
        """For how many seconds each resource has worked."""
        channels = [*self.stores.drives, *(() if self.link is None else (self.link,))]
        found = {"compute": self.compute.busy_s, "kernels": self.kernels.busy_s, "RAM": self.memory.busy_s}
        ways = {} if self.link is None else self.link.way_busy_s
        of_ways = {f"{LINK}: {way}": seconds for way, seconds in ways.items()}
        return found | {channel.name: channel.busy_s for channel in channels} | of_ways

    @property
    def moved(self) -> dict[str, int]:
        """The bytes that were read from drives and written to them, and copied up and down, as a run counts them.

        And the bytes of states whose steps were tried and kept.
        """
        counted = self.stores.timeline.counted
        read, written = (
            sum(counted(f"{whose}_{way}_bytes") for whose in ("nvme", "activation")) for way in ("read", "written")
        )
        return {"read": read, "written": written, "kept": self._kept_bytes} | self.counted

    @property
    def sent(self) -> Counter[str]:
        """What went to other ranks, as Network.sent."""
        return Counter()

    # An iteration.

    def iterate(self, *, commits: bool = False) -> Process:
        """A process: forwards, backwards and a step.

        Args:
            commits: whether the step before is committed in it.
        """
        for _ in range(self._choice.grads.micro_batches):
            yield from self._forward()
            yield from self._backward()
            self._pass += 1
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
            for weight in station.tiled:
                yield from self._forward_tiles(weight)
            if station.computes and self._recomputes:
                self._activations.put(station.unit)  # what enters the unit
            seconds = self._passes.forward_s.get(station.unit, 0.0) if station.computes else 0.0
            yield from self._launch(seconds, f"forward {station.unit}", arrived + self._arrived.get(unit, []))
            if station.computes:
                if not self._recomputes:
                    self._activations.put(station.unit)
                self._scheduler.forward_ends(unit)

    def _backward(self) -> Process:
        for station in reversed(self._stations):
            seconds = self._passes.backward_s.get(station.unit, 0.0) if station.computes else 0.0
            leaving = self._wait_for_leaving()
            unit = self._units[station.unit]
            if station.computes:
                yield from self._backward_reaches(unit)
                self._scheduler.backward_begins(unit)
                yield from self._do_what_is_to_do()
                self._activations.get(station.unit)
                if self._recomputes and not unit.is_root:
                    seconds += self._passes.forward_s.get(station.unit, 0.0)
            waits = leaving + self._arrived.get(unit, [])
            for weight in reversed(station.tiled):
                yield from self._backward_tiles(weight)
            made = yield from self._launch(seconds, f"backward {station.unit}", waits)
            if station.computes:
                self._activations.drop(station.unit)
            yield from self._gradients_come(station.params, made)
        yield from self._backward_ends()
        self._scheduler.backward_ends()
        yield from self._do_what_is_to_do()

    def _forward_tiles(self, weight: TiledParam) -> Process:
        """A process of the host: as Tiling runs a weight of which a micro-batch uses some tiles."""
        arrived = yield from self._apply(weight.unit)
        chosen = self._passes.tiles.get(weight.unit)
        if not chosen or self._held.shard_group_size > 1:  # see [Note: tiles over ranks] in model/tiling.py
            chosen = [range(len(weight.tiles))]
        numbers = chosen[self._pass % len(chosen)]
        self._used_tiles[weight.unit] = numbers
        units = [self._units[weight.tiles[number]] for number in numbers]
        self._scheduler.tiles_begin(units)
        for unit in units:
            self._scheduler.forward_begins(unit)
            yield from self._do_what_is_to_do()
            yield from self.host.call(self._speeds.host.tile_s)
            seconds = self._passes.forward_s.get(weight.unit, 0.0) / len(units)
            yield from self._launch(seconds, f"forward {unit.name}", arrived + self._arrived.get(unit, []))
            yield from self._copy_for_tiles(weight.unit, 0, len(units))
            self._scheduler.forward_ends(unit)

    def _backward_tiles(self, weight: TiledParam) -> Process:
        """A process of the host: the backward of the tiles that the forward has used."""
        numbers, copies = self._used_tiles[weight.unit], []
        for number in reversed(numbers):
            unit = self._units[weight.tiles[number]]
            yield from self._backward_reaches(unit)
            self._scheduler.backward_begins(unit)
            yield from self._do_what_is_to_do()
            yield from self.host.call(self._speeds.host.tile_s)
            seconds = self._passes.backward_s.get(weight.unit, 0.0) / len(numbers)
            if self._recomputes and not unit.is_root:
                seconds += self._passes.forward_s.get(weight.unit, 0.0) / len(numbers)
            made = yield from self._launch(seconds, f"backward {unit.name}", self._arrived.get(unit, []))
            yield from self._copy_for_tiles(weight.unit, 1, len(numbers))
            if weight.param is not None:
                self._tiles_since.add((weight.unit, number))
                copies += yield from self._gradient_comes(weight.param, made, number)
        if copies:
            self._leaving.append(copies[-1])

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
        if self._tried is not None:
            yield from self.host.wait(self._trials.cancel(), self._trials.line)
            self._waiting_trials.clear()
        if commits:
            self.host.begins(COMMIT)
            for kind, store in self.stores.by_kind.items():
                if self._placement.slots.committed_chunks(kind):
                    yield from store.flush()
            self.host.begins(NOTHING)
        yield from self._agree()
        self._step += 1
        self._order = order_of_updates(self._layout, self._order, self._applied)
        self._applied = []
        waiting = yield from self._begin_late()
        self._works = {
            flat: [chunk for chunk in self._chunks_of[flat] if chunk.index not in waiting] for flat in self._order
        }
        works = [chunk for of_flat in self._works.values() for chunk in of_flat]
        yield from self._keep_trials()
        coming = [chunk.index for chunk in works if chunk.index not in self._kept]
        self._states.store.expect(coming, repeats=self._tried is None, once=self._layout.late_chunks)
        if self._stored_gradients is not None:
            if self._tried is None:
                self._stored_gradients.store.repeat(coming)
            else:
                self._stored_gradients.store.expect(coming, repeats=False)
        self._micro_batches.clear_all()
        self._pending = {flat: [] for flat in self._order if self._layout.flats[flat].numel}
        if not self._direct:
            for chunk in (chunk for chunk in works if chunk.flat not in self._there):
                self._pending[chunk.flat].append(self._steps.submit(self._step_chunk(chunk, self._steps.line)))
        yield from self._step_ends()

    def _step_ends(self) -> Process:
        """A process of the host: as HeldModel.step_ends."""
        if self._direct and not self._placement.uses_disk:
            yield from self._apply_all()

    # Gradients.

    def _wait_for_leaving(self) -> list[After]:
        """What the device waits for before a part of a backward, so that gradients take little of its memory."""
        leaving = [] if self._direct else self._leaving[:-UNITS_LEAVING]
        del self._leaving[: len(leaving)]
        return [(one, LINK) for one in leaving]

    def _gradients_come(self, params: Sequence[int], made: Moment) -> Process:
        """A process of the host: what hooks do with the gradients of a part of a backward.

        Args:
            params: the numbers of its parameters, in the order of the model.
            made: when the device has made the gradients.
        """
        copies: list[Moment] = []
        for param in reversed(params):
            copies += yield from self._gradient_comes(param, made)
        if copies:
            self._leaving.append(copies[-1])

    def _gradient_comes(self, param: int, made: Moment, tile: int = 0) -> Generator[Moment, None, list[Moment]]:
        """A process of the host: what a hook does with a gradient, or a tile of it.

        Args:
            param: the parameter's number.
            made: when the device has made it.
            tile: the tile's number.

        Returns:
            When it has left the device, if it has to.
        """
        number = self._micro_batches.count(param, tile)
        if self._direct:
            yield from self._add(param, tile, number, self.host)
            self._has_come(param, number)
            return []
        if self._layout.flat_of[param] in self._there:
            return []
        spec = self._layout.specs[param]
        numel = self._tile_numel(param, tile)
        copied = self._copy(DOWN, numel * spec.dtype.itemsize, f"gradient of {spec.name}", made)

        def work() -> Process:
            yield from self._gradients.line.wait(made, self.device.line)
            yield from self._gradients.line.wait(copied, LINK)
            yield from self._add(param, tile, number, self._gradients.line)
            self._has_come(param, number)

        self._summed = self._gradients.submit(work())
        return [copied]

    def _tile_numel(self, param: int, tile: int) -> int:
        start, stop = self._layout.tiles_of(param)[tile]
        return stop - start

    def _add(self, param: int, tile: int, number: int, line: Line) -> Process:
        """A process: brings a gradient that is in RAM to where it waits, and sums its squares."""
        is_first, is_last = number == 1, number == self._micro_batches.expected
        start, stop = self._layout.tiles_of(param)[tile]
        for chunk, piece in self._layout.pieces_of(param):
            if not start <= piece.param_offset < stop:  # no piece has elements of two tiles
                continue
            is_unfinished = False
            if self._stored_gradients is not None and len(chunk.pieces) > 1:
                is_unfinished = not self._micro_batches.are_equal([one.param for one in chunk.pieces])
            is_fresh = is_first and piece.numel == chunk.numel
            nbytes = self._bytes_in_ram(chunk.flat, piece.numel, is_first=is_first, is_last=is_last)
            yield from self._add_to(chunk, nbytes, line, is_fresh=is_fresh, is_unfinished=is_unfinished)

    def _add_to(self, chunk: Chunk, nbytes: float, line: Line, *, is_fresh: bool, is_unfinished: bool) -> Process:
        """A process: as GradShards.add.

        Args:
            chunk: the chunk to whose gradients is added.
            nbytes: what is read and written in RAM for that.
            line: of the thread that does it.
            is_fresh: see `use_of`.
            is_unfinished: likewise.
        """
        lease = None
        if self._stored_gradients is not None:
            use = use_of(is_fresh=is_fresh, is_unfinished=is_unfinished)
            lease = yield from self._stored_gradients.lease(chunk.index, use, 0, line)
        line.begins(MEMORY)
        yield self.memory.submit(nbytes / self._speeds.memory, "gradient")
        line.begins(NOTHING)
        if self._stored_gradients is not None and lease is not None:
            if not is_unfinished and chunk.index in self._read_soon:
                self._stored_gradients.store.retain(chunk.index)
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
        for flat in updates_up_to(self._layout, self._pending, self._units[unit].flats):
            found += yield from self._apply_flat(flat)
        return found

    def _apply_flat(self, flat: int) -> Generator[Moment, None, list[After]]:
        """A process of the host: applies what is pending of a flat parameter, and returns what `_apply` does."""
        uploads = yield from self._make_flat(flat)
        del self._pending[flat]
        self._applied.append(flat)
        if self._tried is not None and not self._pending:
            self._states.store.expect(self._tried.order, repeats=False)
            self._read_soon = set(self._tried.order)
        if self._params is not None:
            unit = self._units[self._layout.flats[flat].unit]
            if unit.presence is not Presence.UPDATING:
                self._scheduler.transfers.flat_updated(unit, flat)
                yield from self._do_what_is_to_do()
        return [(one, LINK) for one in uploads]

    def _make_flat(self, flat: int) -> Generator[Moment, None, list[Moment]]:
        """A process of the host: makes this rank's new values of a flat parameter, or waits until they are made.

        Returns:
            When they have come to the device, if they go there.
        """
        done, uploads = self._pending[flat], []
        for number, chunk in enumerate(self._works[flat]):
            if self._direct:
                yield from self._step_chunk(chunk, self.host)
            elif flat in self._there:
                yield from self._bring_made(chunk)
            else:
                yield from self.host.wait(done[number], self._steps.line)
                if self._params is None:
                    size = new_bytes(self._layout, chunk)
                    uploads.append(self._copy(UP, size, f"new parameters of chunk {chunk.index}"))
        return uploads

    def _bring_made(self, chunk: Chunk) -> Process:
        """A process of the host: brings parameters that stream to RAM, which the device has made."""
        if self._params is not None:
            target = yield from self._params.lease(chunk.index, Use.OVERWRITE, self._step, self.host)
            size = chunk_bytes(self._layout, chunk)
            yield from self.host.wait(self._copy(DOWN, size, f"new chunk {chunk.index}", self._launched), LINK)
            self._params.release(target)

    def _step_s(self, chunk: Chunk) -> float:
        """Seconds of the kernels that step a chunk. Matrices are brought to a device beside the products of others."""
        speeds = self._speeds
        if not self._layout.flats[chunk.flat].is_whole:
            return chunk.numel / speeds.elements_per_s
        assert speeds.matrix_flops is not None
        work = matrix_work(self._layout, [chunk])
        link = speeds.link
        over_link = 0.0 if link is None else max(work.up_bytes / link.up, work.down_bytes / link.down)
        return max(work.flops / speeds.matrix_flops, over_link)

    def _step_chunk(self, chunk: Chunk, line: Line) -> Process:
        """A process: what `Step._run` does with a chunk, in the thread of a line."""
        if chunk.index in self._kept:
            yield from self._take_tried(chunk, line)
            return
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
        if not self._states.store.is_resident(chunk.index):
            yield from line.call(self._speeds.host.chunk_s)
        elif not self._steps_together:
            yield from line.call(self._speeds.host.resident_s)
        line.begins(KERNELS)
        steps = 1 + self._due.get(chunk.index, 0)
        yield self.kernels.submit(steps * self._step_s(chunk), f"chunk {chunk.index}")
        line.begins(NOTHING)
        for store, lease in ((self._stored_gradients, gradient), (self._states, states)):
            if store is not None and lease is not None:
                store.release(lease)
        if self._params is not None and target is not None:
            yield from self._chunk_updated(chunk, line)
            yield from self._chunk_made(chunk, line)
            self._params.release(target)

    # Late steps: as optim/late.py makes them.

    def _begin_late(self) -> Generator[Moment, None, set[int]]:
        """A process of the host: notes a step that begins, and returns the chunks that owe it."""
        waiting: set[int] = set()
        due: dict[int, int] = {}
        for param, spec in enumerate(self._layout.specs):
            if not spec.is_late:
                continue
            tiles = self._layout.tiles_of(param)
            starts = [start for start, _ in tiles]
            pieces = [piece for _, piece in self._layout.pieces_of(param)]
            zeros = [(spec.unit, bisect_right(starts, one.param_offset) - 1) not in self._tiles_since for one in pieces]
            wait, made = self._owed.begin(self._layout.chunks_of[param], zeros)
            waiting.update(wait)
            due |= made
        self._tiles_since.clear()
        self._due = due
        if self._stored_gradients is not None:
            for chunk in sorted(waiting):
                yield from self._stored_gradients.discard(chunk, self.host)
        return waiting

    def _settle(self, number: int) -> Process:
        """A process of the host, before a chunk of parameters is leased: makes the steps that it owes."""
        count = self._owed.counts.get(number, 0)
        if not count:
            return
        assert self._params is not None
        states = yield from self._states.lease(number, Use.FILL, self._step, self.host)
        use = Use.FILL if self._choice.states.split_master else Use.REFILL
        values = yield from self._params.lease(number, use, self._step, self.host)
        in_ram, host = self._states.store.is_resident(number), self._speeds.host
        yield from self.host.call(host.resident_s if in_ram else host.chunk_s)
        self.host.begins(KERNELS)
        yield self.kernels.submit(count * self._step_s(self._layout.chunks[number]), f"late steps of chunk {number}")
        self.host.begins(NOTHING)
        self._params.release(values)
        self._states.release(states)
        self._owed.settle(number)

    # Trials: as optim/trials.py makes them, where all are kept.

    def _has_come(self, param: int, number: int) -> None:
        """A gradient has come, and how often."""
        if number == self._micro_batches.expected and self._micro_batches.has_all(param):
            self._gradient_is_whole(param)

    def _gradient_is_whole(self, param: int) -> None:
        """A gradient has come as often as is expected, with all of its tiles: steps are tried."""
        if self._tried is None:
            return
        self._whole[param] = self._step + 1
        if self._step:  # whether trials are kept is not known before the first step
            for index in self._tried.complete(param, self._whole.get):
                self._waiting_trials = [one for one in self._waiting_trials if not one.is_past]
                if len(self._waiting_trials) < self._tried.most_waiting:
                    self._waiting_trials.append(self._trials.submit(self._try(self._layout.chunks[index])))
                else:
                    self._states.store.unexpect(index)

    def _try(self, chunk: Chunk) -> Process:
        """A process: what `Trials._try` does, in its worker."""
        line, gradient = self._trials.line, None
        if self._choice.states.split_master:
            yield from self._copy_current(chunk, line)
        states = yield from self._states.lease(chunk.index, Use.TRY, self._step + 1, line)
        if self._stored_gradients is not None:
            gradient = yield from self._stored_gradients.lease(chunk.index, Use.READ, 0, line)
        line.begins(KERNELS)
        # A model that computes on the CPU shares its cores with them.
        kernels = self.compute if self._direct else self.kernels
        yield kernels.submit(self._step_s(chunk), f"try chunk {chunk.index}")
        line.begins(NOTHING)
        if self._stored_gradients is not None and gradient is not None:
            self._stored_gradients.release(gradient)
        self._states.release(states)
        self._made.add(chunk.index)

    def _copy_current(self, chunk: Chunk, line: Line) -> Process:
        """A process: brings the upper halves of a chunk's masters to memory of their own."""
        size = chunk_bytes(self._layout, chunk)
        if self._params is None and not self._direct:
            yield from line.wait(self._copy(DOWN, size, f"parameters of chunk {chunk.index}"), LINK)
            return
        source = None
        if self._params is not None:
            source = yield from self._params.lease(chunk.index, Use.READ, 0, line)
        yield from self._copy_in_ram(size, line)
        if self._params is not None and source is not None:
            self._params.release(source)

    def _keep_trials(self) -> Process:
        """A process of the host: gives the step that begins what was tried of it."""
        if self._tried is None:
            return
        self._read_soon = ()
        self._kept = yield from self._states.keep(self._made, self._step)
        self._kept_bytes += sum(map(self._states.store.nbytes, self._kept))
        self._tried.step_begins()
        self._made, self._whole = set(), {}

    def _take_tried(self, chunk: Chunk, line: Line) -> Process:
        """A process: takes the new parameters of a chunk whose step was tried."""
        target = None
        if self._params is not None:
            target = yield from self._params.lease(chunk.index, Use.OVERWRITE, self._step, line)
        yield from self._copy_in_ram(chunk_bytes(self._layout, chunk), line)
        if self._params is not None and target is not None:
            yield from self._chunk_updated(chunk, line)
            yield from self._chunk_made(chunk, line)
            self._params.release(target)
        if self._stored_gradients is not None:
            yield from self._stored_gradients.discard(chunk.index, line)

    # Units that stream.

    def _do_what_is_to_do(self) -> Process:
        """A process of the host: what the scheduler has left to it."""
        todo = self._scheduler.transfers.todo
        while todo:
            one = todo.popleft()
            if isinstance(one, ToCopy):
                yield from self._copy_unit(one)
                continue
            if isinstance(one, ToGather):
                yield from self._gather(one.units, one.flat)
                continue
            if isinstance(one, ToAwait):
                yield from self._await(one.unit)
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
            yield from self._settle(chunk.index)
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

    def _copy_for_tiles(self, weight: str, way: int, tiles: int) -> Process:
        """A process of the host: what one of the tiles of a weight that are used reads and writes in RAM beside.

        Args:
            weight: the unit of the weight.
            way: 0: forward, 1: backward.
            tiles: how many are used.
        """
        nbytes = self._passes.tiled_bytes.get(weight, (0.0, 0.0))[way] / tiles
        if self._direct and nbytes:
            self.host.begins(MEMORY)
            yield self.memory.submit(nbytes / self._speeds.memory, f"tile of {weight}")
            self.host.begins(NOTHING)

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
        self._behind_device()
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
        self.counted[way] += nbytes
        return self._move(way, nbytes, what, after)

    def _move(
        self, way: str, nbytes: int, what: str, after: Moment | None = None, *, behind_device: bool = False
    ) -> Moment:
        """As `_copy`, of bytes that a run does not count.

        Args:
            way: see `_copy`.
            nbytes: likewise.
            what: likewise.
            after: likewise.
            behind_device: whether they are there when the device has done what was launched.
        """
        assert self.link is not None
        link, arrived = self.link, Moment()
        if behind_device:
            after = self._behind_device()
        if after is None:
            return link.submit(way, nbytes, what)
        after.then(lambda: link.submit(way, nbytes, what).then(arrived.happen))
        return arrived

    def _behind_device(self) -> Moment:
        """When the device has done what was launched, and waited for what that has to come after."""
        on_device = self._activations.copier.on_device
        if on_device:
            waits, line = on_device[:], self.device.line
            on_device.clear()

            def work() -> Process:
                for moment in waits:
                    yield from line.wait(moment, LINK)

            self._launched = self.device.submit(work())
        return self._launched

    def _copied_in_ram(self, nbytes: int) -> Moment:
        return self.memory.submit(2 * nbytes / self._speeds.memory, "activation")

    def _wait_in_call(self, moment: Moment, reason: str) -> None:
        """Lets time pass in a call of the host, which is no process, until a moment. Nobody else waits like this."""
        if not moment.is_past:
            before = self.host.doing
            self.host.begins(reason)
            self.clock.run_until(moment)
            self.host.begins(before)

    # What a rank among several does beside; see several.py.

    def _backward_reaches(self, unit: Unit) -> Process:
        """A process of the host, before backward fetches a unit."""
        yield from ()

    def _backward_ends(self) -> Process:
        """A process of the host, at the end of a backward."""
        yield from ()

    def _agree(self) -> Process:
        """A process of the host: what ranks ask one another before a step."""
        yield from ()

    def _chunk_made(self, chunk: Chunk, line: Line) -> Process:
        """A process, after a chunk of parameters that stream was stepped, which is still leased."""
        yield from ()

    def _gather(self, units: Sequence[Unit], flat: int | None) -> Process:
        """A process of the host: starts to fetch what other ranks have of units, or of one flat parameter of them."""
        yield from ()

    def _await(self, unit: Unit) -> Process:
        """A process of the host: a unit is used now, of which other ranks have parts."""
        yield from ()
