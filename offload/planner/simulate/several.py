"""One rank among several, in virtual time: how new parameters come to it, and those of units; see network.py.

What decides in a run decides here: how all-gathers share a collective (ranks/gathers.py), which flat parameters are
sent together and which windows new values travel in (ranks/exchange.py). What stands here is when they are asked, as
model/pending.py and model/transfer.py do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.layout import Chunk, Layout
from offload.model.transfer import UNITS, gathers_of
from offload.model.unit import Presence, Unit
from offload.planner.placement import Placement
from offload.planner.simulate.averages import AveragingRank
from offload.planner.simulate.clock import Moment, Process
from offload.planner.simulate.lines import LINK, Line
from offload.planner.simulate.network import VALUES, After, TimedGroup
from offload.planner.simulate.speeds import Passes, Speeds
from offload.ranks.communicator import Work
from offload.ranks.exchange import TOGETHER, FlatGather, Windows
from offload.ranks.gathers import Gathers
from offload.storage.chunk_cache import Use


class OneOfSeveral(AveragingRank):
    """One rank among several.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of its machine, and of the link between ranks.
    """

    def __init__(self, held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> None:
        super().__init__(held, placement, passes, speeds)
        layout = self._layout
        stays = self._params is None
        # Those that gather units, and those to whom new values go.
        self._sharing = TimedGroup(self.network, layout.rank % held.shard_group_size, held.shard_group_size)
        self._unit_gathers = Gathers(self._sharing, self._room(UNITS), HostCopier())
        self._holding = TimedGroup(self.network, layout.rank, layout.ranks)
        self._flat_gather: FlatGather | None = None
        if stays:
            flats = [_meta(layout.padded_numel(flat.index), flat.dtype) for flat in layout.flats]
            gathers = Gathers(self._holding, self._room(TOGETHER), HostCopier())
            self._flat_gather = FlatGather(layout, flats, gathers, layout.rank)
        self._windows = Windows(layout) if not stays and layout.replicas > 1 else None
        self._sent = 0  # elements of each shard of the flat parameter that has begun
        self._under_way: tuple[Moment, int, int] | None = None  # a window: its flat parameter, and where it begins
        self._started: dict[int, list[Moment]] = {}  # of flat parameters that were sent, their copies to the device
        self._carried: dict[Work, int] = {}  # bytes that are copied to their places once they have come

    def _room(self, what: str) -> list[Tensor]:
        """The memory of a region, on the meta device."""
        return [_meta(one.nbytes, torch.uint8) for one in self._placement.regions if one.what == what]

    # New parameters.

    def _agree(self) -> Process:
        yield from super()._agree()
        if self._flat_gather is not None:
            for work in [*self._flat_gather.under_way.values()]:
                yield from self._wait_for(work)
            self._flat_gather.wait()

    def _step_ends(self) -> Process:
        if self._flat_gather is None:
            yield from super()._step_ends()
            return
        for flat in list(self._pending):
            yield from self._make_flat(flat)
        self._flat_gather.send_rest()
        coming = self._flat_gather.under_way
        together = Counter(coming.values())
        for flat, work in coming.items():
            if together[work] > 1:
                nbytes = self._layout.padded_numel(flat) * self._itemsize(flat)
                self._carried[work] = self._carried.get(work, 0) + nbytes

    def _make_flat(self, flat: int) -> Generator[Moment, None, list[Moment]]:
        if flat in self._started:
            return self._started.pop(flat)
        self._sent = 0
        uploads = yield from super()._make_flat(flat)
        if self._flat_gather is not None:
            if uploads:  # copies come one after the other
                self._holding.after = [(uploads[-1], LINK)]
            self._flat_gather.start(flat, self._step)
            self._started[flat] = uploads
        elif self._windows is not None:
            yield from self._send_up_to(flat, self._layout.shard_numel(flat))
            yield from self._receive()
        return uploads

    def _apply_flat(self, flat: int) -> Generator[Moment, None, list[After]]:
        found = yield from super()._apply_flat(flat)
        if self._flat_gather is not None and flat in self._flat_gather.under_way:
            found += yield from self._wait_in_order(self._flat_gather.under_way[flat])
            self._flat_gather.finish(flat)
        return found

    def _chunk_made(self, chunk: Chunk, line: Line) -> Process:
        if self._windows is not None and self._direct and self._windows.is_one(chunk):
            yield from self._send_up_to(chunk.flat, chunk.start - self._layout.shard_range(chunk.flat)[0])
            yield from self._receive()
            yield from self._copy_in_ram(self._itemsize(chunk.flat) * chunk.numel, self.host)
            self._launch_window(chunk.flat)

    # Windows, as ReplicaExchange.

    def _send_up_to(self, flat: int, stop: int) -> Process:
        assert self._windows is not None
        assert self._params is not None
        while self._sent < stop:
            yield from self._receive()
            numel = self._windows.numel(flat, self._sent)
            for chunk, _, _, part in self._windows.parts(flat, self._layout.rank, self._sent, numel):
                lease = yield from self._params.lease(chunk.index, Use.READ, 0, self.host)
                yield from self._copy_in_ram(self._itemsize(flat) * part, self.host)
                self._params.release(lease)
            self._launch_window(flat)

    def _launch_window(self, flat: int) -> None:
        assert self._windows is not None
        numel, layout = self._windows.numel(flat, self._sent), self._layout
        sent = (layout.replicas - 1) * numel * self._itemsize(flat)
        self._under_way = self.network.all_gather(sent, layout.replicas, ()), flat, self._sent
        self._sent += numel

    def _receive(self) -> Process:
        if self._under_way is None:
            return
        assert self._windows is not None
        assert self._params is not None
        (arrived, flat, first), self._under_way = self._under_way, None
        yield from self.host.wait(arrived, self.network.line(VALUES))
        numel = self._windows.numel(flat, first)
        for rank in self._layout.replicated_shards:
            if rank == self._layout.rank:
                continue
            for chunk, start, _, part in self._windows.parts(flat, rank, first, numel):
                use = Use.OVERWRITE if part == chunk.numel else Use.UPDATE
                lease = yield from self._params.lease(chunk.index, use, self._step, self.host)
                yield from self._copy_in_ram(self._itemsize(flat) * part, self.host)
                if start + part == chunk.numel:
                    yield from self._chunk_updated(chunk, self.host)
                self._params.release(lease)

    # Units.

    def _gather(self, units: Sequence[Unit], flat: int | None) -> Process:
        yield from ()
        layout = self._held
        wanted = [
            (unit, gather)
            for unit in units
            for one in unit.slices
            if flat is None or one.flat == flat
            for gather in gathers_of(layout, _meta(one.numel, layout.flats[one.flat].dtype))
        ]
        self._sharing.after = [after for unit in units for after in self._arrived.get(unit, [])]
        for numbers, work in self._unit_gathers.launch([gather for _, gather in wanted]):
            if len(numbers) > 1:
                self._carried[work] = sum(wanted[number][1][1].nbytes for number in numbers)
            for unit in dict.fromkeys(wanted[number][0] for number in numbers):
                unit.gathers.append(work)

    def _await(self, unit: Unit) -> Process:
        for work in unit.gathers:
            after = yield from self._wait_in_order(work)
            if unit.presence is not Presence.RELEASED:
                self._arrived.setdefault(unit, []).extend(after)
            work.wait_on_device()
        unit.gathers = []

    # Waiting.

    def _wait_in_order(self, work: Work) -> Generator[Moment, None, list[After]]:
        """A process of the host: waits for a collective, where the device is the CPU.

        Returns:
            What the device has to wait for, where it has memory of its own.
        """
        if not self._direct:
            return [(self.clock.start(self._arrival(work)), self.network.line(VALUES))]
        yield from self._wait_for(work)
        yield from self._copy_in_ram(self._carried.pop(work, 0), self.host)
        return []

    def _wait_for(self, work: Work) -> Process:
        while not work.done():
            yield from self.host.wait(self.network.arrivals.next, self.network.line(VALUES))

    def _arrival(self, work: Work) -> Process:
        while not work.done():
            yield self.network.arrivals.next

    def _itemsize(self, flat: int) -> int:
        return self._layout.flats[flat].dtype.itemsize


def _meta(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")
