"""Moves the parameters of streamed units between the store and the device.

[Note: what waits for a copy]
A copy to the device waits for the last use of the memory that it writes to. Kernels wait for the copy on the device: a
unit is AVAILABLE as soon as that wait is queued, and the host goes on. A chunk's lease is given back when its copy has
ended. The host asks for that without waiting; it waits only where somebody needs the chunk, or a buffer of the store.
It leads the device by at most HOST_LEADS_UNITS units.

unit.py has the states of a unit; policy.py says which unit is fetched and released, fetch.py when.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from offload.devices.copies import DONE, Copy, DeviceEvent
from offload.errors import OffloadError
from offload.interrupts import uninterrupted
from offload.layout import Chunk, FlatSlice, Layout
from offload.model.flat_param import FlatParameters
from offload.model.policy import Ahead
from offload.model.scheduling import takes_updates
from offload.model.torch_helpers import call_hidden
from offload.model.unit import Presence, Unit
from offload.optim.late import LateSteps
from offload.profiling import TO_DEVICE
from offload.ranks import gathers
from offload.ranks.communicator import Work
from offload.ranks.gathers import Gather, Gathers
from offload.regions import Region
from offload.run import Owner, Run
from offload.storage.chunk_cache import Lease, Store, Use
from offload.tiers import Tier

UNITS = "units that are gathered together"
HOST_LEADS_UNITS = 8
"""The host waits until the device is done with the unit that was released so many units ago."""


@dataclass(eq=False)
class _Upload:
    """A copy to the device, and the lease of its source.

    Attributes:
        unit: the unit.
        chunk: the chunk's index.
        copy: the copy.
        lease: gives the lease back when it is closed.
        is_awaited: whether the kernels of the unit wait for it.
    """

    unit: Unit
    chunk: int
    copy: Copy
    lease: ExitStack
    is_awaited: bool = False


def regions(unit_bytes: Sequence[int], ahead_bytes: int, communication: Tier) -> list[Region]:
    """What UnitTransfers reserves where ranks share parameters.

    Args:
        unit_bytes: of each unit but the root.
        ahead_bytes: see `Ahead`.
        communication: the tier whose memory the tensors of collectives are in.
    """
    return gathers.regions(UNITS, unit_bytes, ahead_bytes, communication) if ahead_bytes else []


def gathers_of(layout: Layout, memory: Tensor) -> Iterator[Gather]:
    """What ranks that together have all parameters gather of a slice. A rank's own shards of it are there.

    Args:
        layout: of all held parameters.
        memory: of the slice, shape (numel of all shards,).
    """
    if memory.numel():
        shards, groups = memory.view(layout.ranks, -1), memory.view(layout.replicas, -1)
        yield from zip((shards[rank] for rank in layout.replicated_shards), groups, strict=True)


class StreamedStores:
    """The stores of streamed parameters, as one. Chunks are numbered as in `Layout.param_chunks`.

    Args:
        stores: each with the number of its first chunk, in the order of these.
        late: the steps that chunks owe. They are made before a chunk is leased.
    """

    def __init__(self, stores: Sequence[tuple[Store, int]], late: LateSteps) -> None:
        self._stores = stores
        self._late = late

    def _of(self, chunk: int) -> tuple[Store, int]:
        return next((store, start) for store, start in reversed(self._stores) if chunk >= start)

    def lease(self, chunk: int, use: Use, *, step: int) -> AbstractContextManager[Lease]:
        """See Store.lease."""
        if chunk in self._late.owed:
            call_hidden(self._late.settle, chunk)
        store, first = self._of(chunk)
        return store.lease(chunk - first, use, step=step)

    def owe(self, chunks: Collection[int]) -> bool:
        """Whether some of these chunks owe steps."""
        return bool(self._late.owed) and not self._late.owed.keys().isdisjoint(chunks)

    def expect(self, order: Iterable[int]) -> None:
        """See Store.expect."""
        at = [(self._of(chunk), chunk) for chunk in order]
        for own in self._stores:
            own[0].expect(chunk - own[1] for found, chunk in at if found == own)

    def repeat(self) -> None:
        """See Store.repeat."""
        for store, _ in self._stores:
            store.repeat()

    def when_wanted(self, give_back: Callable[[int], None]) -> None:
        """Registers what gives leases back.

        Args:
            give_back: called, from any thread, when a lease cannot be had, with the chunk whose lease or buffer is
                waited for.
        """

        def of(first: int) -> Callable[[int], None]:
            return lambda chunk: give_back(first + chunk)

        for store, first in self._stores:
            store.lease_wanted = of(first)

    def are_together(self, one: int, other: int) -> bool:
        """Whether two chunks are in the same store, and so in the same buffers."""
        return self._of(one) == self._of(other)


@dataclass(frozen=True)
class TransferLimits:
    """How much of streamed parameters may be on its way, and on the device.

    Attributes:
        leases: how many chunks of the store may be on their way to the device at once.
        ahead: how far ahead of the unit in use others are fetched.
        nbytes: how many bytes streamed parameters may take on the device; None: any number.
    """

    leases: int
    ahead: Ahead
    nbytes: int | None = None


class UnitTransfers:
    """Moves the parameters of streamed units between the store and the device; see the top of this file.

    Args:
        run: what the parts of a run share.
        parameters: the model's.
        store: the parameters that this rank keeps and streams, by chunk.
        owner: the optimizer.
        gathers: of the ranks that share the parameters.
        limits: how much may be on its way, and on the device.
    """

    def __init__(
        self,
        run: Run,
        parameters: FlatParameters,
        store: StreamedStores,
        owner: Owner,
        gathers: Gathers,
        limits: TransferLimits,
    ) -> None:
        self._layout = parameters.layout
        self._copier = run.memory.param_copier
        self._timeline = run.timeline
        self._gathers = gathers
        self._parameters = parameters
        self._store = store
        self._owner = owner
        self._leases = limits.leases
        self.ahead = limits.ahead
        self.limit = limits.nbytes
        self.units = [unit for unit in parameters.units.values() if unit.slices]
        self._tiles_of: dict[int, list[Unit]] = {}  # by flat parameter
        for unit in self.units:
            for one in unit.slices if unit.weight is not None else ():
                self._tiles_of.setdefault(one.flat, []).append(unit)
        self._with_memory: dict[Unit, None] = {}
        self._fetched: set[Unit] = set()  # since the last step
        self._uploads: deque[_Upload] = deque()  # whose leases are not given back yet
        # Guards `_uploads` alone, because the step's worker may want a lease. The presence of units has the lock of the
        # run's entries.
        self._lock = threading.RLock()
        store.when_wanted(self._give_back)
        self._released: deque[DeviceEvent] = deque()  # the last uses of units
        self._awaited_gathers: list[Work] = []  # by the device; they have not all ended

    # What is where.

    @property
    def with_memory(self) -> Collection[Unit]:
        """The units that are not released, in the order in which they got memory."""
        return tuple(self._with_memory)

    def missing_bytes(self, units: Iterable[Unit]) -> int:
        """How many bytes `units` take beyond the limit, beside those that are on the device; at most 0 if they fit."""
        together = {*units, *self._with_memory}
        return 0 if self.limit is None else sum(unit.nbytes for unit in together) - self.limit

    def owes(self, unit: Unit) -> bool:
        """Whether steps have to be made before a unit can be fetched.

        Ranks that share parameters owe different ones, and have to fetch alike. There it is all that can owe steps, but
        for what was fetched since the last one: then each rank has made its own.
        """
        if self._layout.shard_group_size == 1:
            return self._store.owe(unit.chunk_numbers)
        params = (self._layout.flats[one.flat].params[0] for one in unit.slices)
        return unit not in self._fetched and any(self._layout.specs[param].is_late for param in params)

    def step_begins(self) -> None:
        """Called when a step begins, after which units may owe it."""
        self._fetched.clear()

    def expect(self, units: Iterable[Unit]) -> None:
        """Tells the store the order in which units will be fetched."""
        self._store.expect(chunk.index for unit in units for chunks in unit.chunks.values() for chunk in chunks)

    def expect_same_order(self) -> None:
        """Tells the store that the order of fetches since `expect` begins anew."""
        self._store.repeat()

    # From the store to the device.

    def fetch(self, unit: Unit) -> None:
        """Makes a unit available: what is queued on the device from now on can use it."""
        if unit.is_missing:
            self.prefetch([unit])
        if unit.presence is Presence.FETCHING:
            self._finish(unit)

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Starts to fetch units that are released, or what an update did not bring of them, together.

        Raises if the run cannot go on.
        """
        if not units:
            return
        self._owner.require_usable()
        self._fetched.update(units)
        for unit in units:
            for one in unit.slices:
                if not one.is_tile:
                    self._available_tiles(one.flat)
        try:
            last_uses = [self._start_copies(unit) for unit in units]
            self._launch_all_gathers([(unit, one) for unit in units for one in unit.slices], last_uses)
        except BaseException:
            for unit in units:
                self.release(unit)  # only a part of it would arrive
            raise

    def _start_copies(self, unit: Unit) -> DeviceEvent:
        """Starts to copy what this rank has of a unit.

        Returns:
            The event after which its memory may be written.
        """
        wanted = unit.to_copy
        last_use: DeviceEvent = DONE
        if unit.presence is Presence.UPDATING:
            unit.fetch()
        else:
            last_use = self._allocate(unit)
        for one, chunk in wanted:
            self._start_copy(unit, one, chunk, last_use)
        return last_use

    def release(self, unit: Unit) -> None:
        """Takes the memory away from a unit that is available or on its way, after what is queued on the device."""
        if unit.presence is Presence.RELEASED or not unit.slices:
            return
        self._wait_on_device(unit)  # if that fails, another rank may still write here: the memory stays
        self._free(unit)
        while len(self._released) > HOST_LEADS_UNITS:
            self._wait_for(self._released[0], "wait for device")
            self._released.popleft()

    def drain(self) -> None:
        """Gives back all leases, after the copies to the device that they are for."""
        self._wait_for_gathers()
        with self._lock:
            while self._uploads:
                self._finish_upload(self._uploads[0])

    def _refresh(self, unit: Unit, one: FlatSlice) -> None:
        """Copies what this rank has of the values of a slice of a unit, which is available, from the store again."""
        for chunk in unit.chunks[one.index]:
            self._start_copy(unit, one, chunk)
        self._wait_on_device(unit)

    def _refresh_all(self, unit: Unit, one: FlatSlice) -> None:
        """As `_refresh`, and fetches what other ranks have of it."""
        last_use = self._copier.mark()
        self._refresh(unit, one)
        self._launch_all_gathers([(unit, one)], [last_use])
        self._wait_on_device(unit)

    @torch.no_grad()
    def _copy_to_tiles(self, flat: int, tiles: Iterable[Unit]) -> None:
        """Copies the values of a flat parameter, which is available, to tiles of it that are."""
        shards = self._parameters.flats[flat].view(self._layout.ranks, -1)
        for tile in tiles:
            one = tile.slice_of(flat)
            parts = self._parameters.memory_of(one.index).view(self._layout.ranks, -1)
            parts.copy_(shards[:, one.start : one.start + parts.shape[1]])

    @uninterrupted
    def _allocate(self, unit: Unit, *, for_update: bool = False) -> DeviceEvent:
        """Gives a unit memory on the device.

        Returns:
            The event after which it may be written.
        """
        if for_update:
            unit.expect_update()
        else:
            unit.fetch()
        self._with_memory[unit] = None
        return self._parameters.allocate(unit)

    def _start_copy(self, unit: Unit, one: FlatSlice, chunk: Chunk, after: DeviceEvent | None = None) -> None:
        while (oldest := self._oldest_of(self._leases)) is not None:
            self._finish_upload(oldest)
        with ExitStack() as stack:
            lease = stack.enter_context(self._store.lease(chunk.index, Use.READ, step=0))
            source = self._in_store(lease.arrays[0], chunk)
            size = source.numel() * source.element_size()
            moving = self._timeline.begin(TO_DEVICE, "upload", chunk=chunk.index, size=size, tier="device")
            stack.callback(self._timeline.end, moving)
            self._timeline.count("gathered_bytes", size)
            if not self._copier.direct:
                self._timeline.count("host_to_device_bytes", size)
            self._launch_copy(unit, self._on_device(one, chunk), source, chunk, after, stack)
        with self._lock:  # asking a device takes so long that the step's worker may come between
            ended = [upload for upload in self._uploads if upload.copy.done()]
        for upload in ended:
            self._finish_upload(upload)

    def _oldest_of(self, count: int) -> _Upload | None:
        """The oldest upload, if there are `count` or more; else None."""
        with self._lock:
            return self._uploads[0] if len(self._uploads) >= count else None

    @uninterrupted
    def _launch_copy(
        self,
        unit: Unit,
        on_device: Tensor,
        source: Tensor,
        chunk: Chunk,
        after: DeviceEvent | None,
        lease: ExitStack,
    ) -> None:
        """Queues the copy of a leased chunk, and records it at once, so that an interrupt does not lose it."""
        copy = self._copier.to_device(source, on_device, after)
        with self._lock:
            self._uploads.append(_Upload(unit, chunk.index, copy, lease.pop_all()))

    def _give_back(self, chunk: int) -> None:
        """Gives back the lease of a chunk that somebody waits for, after its copy.

        If no copy holds that lease, the oldest copy is waited for, which frees a buffer.
        """
        with self._lock:
            beside = [one for one in self._uploads if self._store.are_together(one.chunk, chunk)]
            own = [one for one in beside if one.chunk == chunk]
            for upload in own or beside[:1]:
                self._finish_upload(upload)

    @uninterrupted
    def _launch_all_gathers(self, slices: Iterable[tuple[Unit, FlatSlice]], last_uses: Iterable[DeviceEvent]) -> None:
        """Starts to fetch the shards of other ranks, after this rank's own and after the last uses of their memory.

        Each all-gather is recorded as soon as it is under way, since the memory that it writes to must stay until it
        has ended.
        """
        if self._layout.shard_group_size > 1:
            with self._copier.after_uploads():
                for last_use in last_uses:
                    last_use.wait_on_device()  # a rank may have nothing of its own to copy there
                memory_of = self._parameters.memory_of
                wanted = [
                    (unit, gather) for unit, one in slices for gather in gathers_of(self._layout, memory_of(one.index))
                ]
                for numbers, work in self._gathers.launch([gather for _, gather in wanted]):
                    for unit in dict.fromkeys(wanted[number][0] for number in numbers):
                        unit.gathers.append(work)

    def _finish(self, unit: Unit) -> None:
        self._wait_on_device(unit)
        self._become_available(unit)

    @uninterrupted
    def _become_available(self, unit: Unit) -> None:
        self._parameters.return_versions(unit)
        unit.arrive()

    def _wait_on_device(self, unit: Unit) -> None:
        """Makes what is queued on the device from now on see the values of a unit that were on their way."""
        with self._lock:
            for upload in self._uploads:
                if upload.unit is unit and not upload.is_awaited:
                    upload.copy.wait_on_device()
                    upload.is_awaited = True
        for work in unit.gathers:
            work.wait_on_device()
        self._awaited_gathers.extend(unit.gathers)
        unit.gathers = []

    def _finish_upload(self, upload: _Upload) -> None:
        """Waits for a copy, and gives its lease back.

        The copy is forgotten only then, so a caller that was interrupted can wait for it again. A copy that has ended
        needs no wait on the device.
        """
        with self._lock:
            if upload in self._uploads:
                self._wait_for(upload.copy, "wait for upload")
                self._uploads.remove(upload)
                upload.lease.close()

    def _wait_for(self, event: DeviceEvent, why: str) -> None:
        if not event.done():
            with self._timeline.waiting(why, tier="device"):
                self._wait_for_gathers()  # raises if another rank is gone; the device would wait for ever
                event.wait()

    def _wait_for_gathers(self) -> None:
        while self._awaited_gathers:
            self._awaited_gathers[-1].wait()
            self._awaited_gathers.pop()

    @uninterrupted
    def _free(self, unit: Unit) -> None:
        # The state first: what another thread throws in must not leave a unit available without memory.
        unit.release()
        self._with_memory.pop(unit, None)  # it may have been cut off before it was noted
        self._released.append(self._parameters.free(unit))

    # Updates.

    def can_begin_update(self, unit: Unit) -> bool:
        """Whether the new values of a unit can go to the device as they are made.

        They can if the unit is released, and copies to the device need no buffers.
        """
        return self._copier.direct and takes_updates(unit, self._layout)

    def begin_update(self, unit: Unit) -> None:
        """Gives memory to a unit whose pending update is about to be applied."""
        self._allocate(unit, for_update=True)

    def chunk_updated(self, chunk: Chunk, values: Tensor) -> None:
        """Copies new values of a chunk, which are leased in RAM, to the device, if its unit is being updated.

        Args:
            chunk: the chunk.
            values: shape (chunk.numel,), in the compute dtype.
        """
        unit = self._unit_of(chunk.flat)
        if unit.presence is Presence.UPDATING:  # of an earlier update too, if an interrupt came before the fetch
            self._copier.to_device(values, self._on_device(self._layout.slices[chunk.flat], chunk)).wait()
            self._timeline.count("gathered_bytes", values.numel() * values.element_size())
            unit.not_updated.discard(chunk.index)

    def flat_updated(self, flat: int) -> None:
        """Called when all new values of a flat parameter are in the store, to replace old ones on the device."""
        unit = self._unit_of(flat)
        if not self._parameters.flat_streams(flat) or unit.presence is Presence.UPDATING:
            return  # the kernels wrote them to the model, or they were copied as they were made
        if unit.presence is Presence.FETCHING:
            self._finish(unit)
        tiles = self._available_tiles(flat)
        if unit.presence is Presence.AVAILABLE:
            self._refresh_all(unit, self._layout.slices[flat])
        for tile in tiles:
            self._refresh_all(tile, tile.slice_of(flat))

    def _unit_of(self, flat: int) -> Unit:
        return self._parameters.units[self._layout.flats[flat].unit]

    # From the device to the store.

    def store_and_free(self, flat: int) -> None:
        """Moves a flat parameter that was just made into the store."""
        self.store_flat(flat)
        self._parameters.free_flat(flat)

    def store_flat(self, flat: int) -> None:
        """Copies the values of a flat parameter, which is available, to the store, and to its tiles on the device."""
        tiles = self._available_tiles(flat)
        for chunk in self._unit_of(flat).chunks[flat]:
            with self._store.lease(chunk.index, Use.OVERWRITE, step=self._owner.step()) as lease:
                on_device = self._on_device(self._layout.slices[flat], chunk)
                self._copier.to_host(on_device, self._in_store(lease.arrays[0], chunk)).wait()
        self._copy_to_tiles(flat, tiles)

    def take_back_writes(self, flat: int) -> None:
        """Gives a flat parameter, which is available, the values that its store has."""
        self._refresh(self._unit_of(flat), self._layout.slices[flat])
        self._copy_to_tiles(flat, self._available_tiles(flat))
        self.drain()

    def find_silent_writes(self, numbers: Iterable[int]) -> None:
        """Compares parameters, all available, with the store, and increases the version of those that differ.

        It is for writes that leave no other trace, such as NumPy's.
        """
        for number in filter(self._parameters.streams, numbers):
            self._available_tiles(self._parameters.flat_of(number))
            chunks = (self._layout.param_chunks[index] for index in self._layout.param_chunks_of[number])
            if not all(self._equals_store(number, chunk) for chunk in chunks):
                torch.autograd.graph.increment_version(self._parameters.params[number])

    def _equals_store(self, number: int, chunk: Chunk) -> bool:
        with self._store.lease(chunk.index, Use.READ, step=0) as lease:
            stored = self._in_store(lease.arrays[0], chunk)
            for piece in chunk.pieces:
                if piece.param == number:
                    span = slice(piece.chunk_offset, piece.chunk_offset + piece.numel)
                    copy = torch.empty(piece.numel, dtype=stored.dtype, device=stored.device)
                    on_device = self._on_device(self._layout.slices[chunk.flat], chunk)
                    self._copier.to_host(on_device[span], copy).wait()
                    if not torch.equal(copy.view(torch.uint8), stored[span].view(torch.uint8)):
                        return False
        return True

    def _available_tiles(self, flat: int) -> list[Unit]:
        """The tiles of a flat parameter that are available. Those that are being fetched become available first."""
        tiles = self._tiles_of.get(flat, [])
        for tile in tiles:
            if tile.presence is Presence.FETCHING:
                self._finish(tile)
        return [tile for tile in tiles if tile.presence is Presence.AVAILABLE]

    # The end.

    def abandon(self) -> None:
        """Releases all units, whether what was under way arrived or failed."""
        self.close()
        for unit in self.with_memory:
            self._free(unit)

    def close(self) -> None:
        """Waits for all that is under way, whether it arrives or fails, because the memory is about to be freed."""
        for work in chain(self._awaited_gathers, *(unit.gathers for unit in self.units)):
            with suppress(OffloadError):
                work.wait()
        self._awaited_gathers.clear()
        for unit in self.units:
            unit.gathers = []
        with self._lock:
            while self._uploads:
                upload = self._uploads[0]
                with suppress(OffloadError):
                    self._finish_upload(upload)
                if upload in self._uploads:  # the device failed, and does nothing more
                    self._uploads.remove(upload)
                    upload.lease.close()

    def _on_device(self, one: FlatSlice, chunk: Chunk) -> Tensor:
        start = self._layout.in_slice(one, chunk.start)
        return self._parameters.memory_of(one.index)[start : start + chunk.numel]

    def _in_store(self, array: Tensor, chunk: Chunk) -> Tensor:
        return array.view(self._parameters.flats[chunk.flat].dtype)
