"""Moving the parameters of units between the store and the device, and what is where meanwhile.

[Note: residency of a unit]
| state    | device memory | guards (released.py) | meaning                                              |
|----------|---------------|----------------------|------------------------------------------------------|
| RELEASED | -             | yes                  | its values are in the store only                     |
| COMING   | allocated     | yes                  | copies from the store are under way                  |
| HERE     | allocated     | -                    | its modules can run                                  |

The memory of a flat is its storage's: freed by resizing it to 0, and views that autograd saved are right again once it
is back. As in FSDP2, identity, names and shapes of parameters stay. Which unit is wanted when is streaming.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain

import torch
from torch import Tensor

from offload.devices.copies import Copier, Copy
from offload.dist.communicator import Work
from offload.errors import OffloadError
from offload.interrupts import uninterrupted
from offload.layout import Chunk, Layout, Part
from offload.model.flat_param import Parameters
from offload.model.where import Where, require_legal
from offload.profiling import TO_DEVICE, Timeline
from offload.storage.chunk_cache import Store


class Gathering:
    """See [Note: residency of a unit].

    Args: store: the 16-bit parameters of all chunks; leases: how many chunks of the store may be on their way to the
    device at once; usable: raises if the store cannot be used; gather: launches the gathering of a flat from the
    partitions of all ranks, of which the store has those that this one keeps; None: it has all, of other ranks too.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Parameters,
        store: Store,
        copier: Copier,
        timeline: Timeline,
        *,
        leases: int,
        usable: Callable[[], None],
        gather: Callable[[int], Sequence[Work]] | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._store = store
        self._copier = copier
        self._timeline = timeline
        self._leases = leases
        self._usable = usable
        self._gather = gather
        self._gathers: dict[str, list[Work]] = {}
        self._parts_of: dict[str, list[Part]] = {part.unit: [] for part in layout.parts}
        for part in layout.parts:
            self._parts_of[part.unit].append(part)
        of_flat: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in layout.param_chunks:
            of_flat[chunk.flat].append(chunk)
        self._chunks_of = {
            part.index: [c for c in of_flat[part.flat] if part.start <= c.start < part.start + part.numel]
            for part in layout.parts
        }
        self._where = dict.fromkeys(self._parts_of, Where.RELEASED)
        self._allocated: dict[str, None] = {}  # the units that are not released
        self._coming: deque[tuple[str, Copy, ExitStack]] = deque()
        # Chunks that an opened unit still lacks.
        self._missing: dict[str, set[int]] = {}

    @property
    def units(self) -> Iterable[str]:
        """Those that have parameters."""
        return self._where

    @property
    def allocated(self) -> Collection[str]:
        """Those that have device memory now, in the order in which they got it."""
        return tuple(self._allocated)

    def is_at(self, unit: str, where: Where) -> bool:
        """Whether a unit is there; one without parameters is nowhere."""
        return self._where.get(unit) is where

    def params_of(self, unit: str) -> list[int]:
        parts = (part for part in self._parts_of[unit] if not part.is_tile)
        return [number for part in parts for number in self._layout.flats[part.flat].params]

    def bytes_of(self, unit: str) -> int:
        """What a unit takes on the device. A weight that has tiles is never there as a whole."""
        parts = [p for p in self._parts_of.get(unit, ()) if p.is_tile or not self._layout.tile_of(p.flat)]
        return sum(part.numel * self._layout.flats[part.flat].dtype.itemsize for part in parts)

    def home_of(self, unit: str) -> str:
        """The unit itself; of a tile the one that it is a part of."""
        return self._layout.flats[self._parts_of[unit][0].flat].unit

    def require_usable(self) -> None:
        """Raises what is wrong with the store."""
        self._usable()

    def expect(self, units: Iterable[str]) -> None:
        """Announces the order in which units are to come."""
        parts = (part for unit in units for part in self._parts_of.get(unit, ()))
        self._store.expect(chunk.index for part in parts for chunk in self._chunks_of[part.index])

    # From the device, and comparing with it.

    def take(self, flat: int) -> None:
        """Moves a flat that has just been attached into the store."""
        self.write_back(flat, step=0)
        self._parameters.free(flat)

    def write_back(self, flat: int, *, step: int) -> None:
        """Makes the values in the model those of the store. Args: step: whose they are."""
        tiles = self._settle_tiles(flat)
        for chunk in self._chunks_of[flat]:
            with self._store.lease(chunk.index, step=step, is_fresh=True) as lease:
                lease.dirty = True
                on_device = self._on_device(self._layout.parts[flat], chunk)
                self._copier.to_host(on_device, self._in_store(lease.arrays[0], chunk)).wait()
        for part in tiles:
            self._refresh(part)

    def refresh(self, flat: int) -> None:
        """Brings the values of a flat, which is here, from the store again, and from the other ranks."""
        self._settle_tiles(flat)
        self._refresh(self._layout.parts[flat])
        if self._gather is not None:
            for work in self._gather(flat):
                work.wait()

    def _refresh(self, part: Part) -> None:
        for chunk in self._chunks_of[part.index]:
            with self._store.lease(chunk.index, step=0) as lease:
                self._copier.to_device(self._in_store(lease.arrays[0], chunk), self._on_device(part, chunk)).wait()

    def _settle_tiles(self, flat: int) -> list[Part]:
        """The tiles of a flat that are here. Those on their way arrive first: they hold leases of its chunks."""
        if not self._layout.tile_of(flat):
            return []
        tiles = [part for part in self._layout.parts if part.is_tile and part.flat == flat]
        for part in tiles:
            if self._where[part.unit] is Where.COMING:
                self._finish(part.unit)
        return [part for part in tiles if self._where[part.unit] is Where.HERE]

    def find_writes(self, numbers: Iterable[int]) -> None:
        """Notes as written to which of these parameters, all here, differ from the store: `p.data.copy_` leaves no
        other trace."""
        for number in numbers:
            self._settle_tiles(self._parameters.flat_of(number))
            chunks = (self._layout.param_chunks[index] for index in self._layout.param_chunks_of[number])
            if not all(self._is_in_store(number, chunk) for chunk in chunks):
                torch.autograd.graph.increment_version(self._parameters.params[number])

    def _is_in_store(self, number: int, chunk: Chunk) -> bool:
        with self._store.lease(chunk.index, step=0) as lease:
            stored = self._in_store(lease.arrays[0], chunk)
            for piece in chunk.pieces:
                if piece.param == number:
                    part = slice(piece.chunk_offset, piece.chunk_offset + piece.numel)
                    copy = torch.empty(piece.numel, dtype=stored.dtype, device=stored.device)
                    on_device = self._on_device(self._layout.parts[chunk.flat], chunk)
                    self._copier.to_host(on_device[part], copy).wait()
                    if not torch.equal(copy.view(torch.uint8), stored[part].view(torch.uint8)):
                        return False
        return True

    # To the device.

    def can_open(self, unit: str) -> bool:
        """Where copies need no buffers: whether nothing of a unit is here yet."""
        if not self._copier.direct or not self.is_at(unit, Where.RELEASED):
            return False
        return not any(self._layout.tile_of(part.flat) for part in self._parts_of[unit])

    def is_open(self, unit: str) -> bool:
        """Whether it was opened, and did not start yet."""
        return unit in self._missing

    @uninterrupted
    def open(self, unit: str) -> None:
        """Memory for a unit whose new values are about to land: each chunk comes with its own, see `chunk_lands`."""
        self._missing[unit] = {c.index for part in self._parts_of[unit] for c in self._chunks_of[part.index]}
        self._begin_to_come(unit)

    def chunk_lands(self, chunk: Chunk, values: Tensor) -> None:
        """New `values` of a chunk are in RAM, and leased: of a unit that was opened they need not be read again."""
        missing = self._missing.get(self._layout.flats[chunk.flat].unit, set())
        if chunk.index in missing:
            self._copier.to_device(values, self._on_device(self._layout.parts[chunk.flat], chunk)).wait()
            self._timeline.count("gathered_bytes", values.numel() * values.element_size())
            missing.discard(chunk.index)

    def landed(self, flat: int) -> None:
        """New values of a flat are in the store: what is on the device are the old ones."""
        unit = self._layout.flats[flat].unit
        if unit in self._missing:
            return  # they came along
        if self._where[unit] is Where.COMING:
            self._finish(unit)
        if self._where[unit] is Where.HERE:
            self.refresh(flat)
        for part in self._settle_tiles(flat):
            self._refresh(part)

    def bring(self, unit: str) -> None:
        """Waits until a unit is here."""
        if self._where.get(unit) is Where.RELEASED:
            self.start(unit)
        if unit in self._missing:
            self.start(unit)
        if self._where.get(unit) is Where.COMING:
            self._finish(unit)

    def start(self, unit: str) -> None:
        """Lets a released unit come, or what an opened one still lacks. Raises what is wrong with the store."""
        self._usable()
        if unit in self._missing:
            for index in sorted(self._missing.pop(unit)):
                chunk = self._layout.param_chunks[index]
                self._start_chunk(self._layout.parts[chunk.flat], chunk)
            self._start_gathering(unit)
            return
        for part in self._parts_of[unit]:
            if not part.is_tile:
                self._settle_tiles(part.flat)
        self._begin_to_come(unit)
        try:
            for part in self._parts_of[unit]:
                for chunk in self._chunks_of[part.index]:
                    self._start_chunk(part, chunk)
            self._start_gathering(unit)
        except BaseException:
            self.release(unit)  # half of it is not coming
            raise

    @uninterrupted
    def _begin_to_come(self, unit: str) -> None:
        self._move(unit, Where.COMING)
        for part in self._parts_of[unit]:
            self._parameters.allocate(part.index)

    def _start_gathering(self, unit: str) -> None:
        """From the other ranks, when this one's partitions are there."""
        if self._gather is not None:
            self._wait_for_copies(unit)
            self._gathers[unit] = [work for part in self._parts_of[unit] for work in self._gather(part.flat)]

    def _start_chunk(self, part: Part, chunk: Chunk) -> None:
        while len(self._coming) >= self._leases:
            self._finish_one()
        with ExitStack() as stack:
            lease = stack.enter_context(self._store.lease(chunk.index, step=0))
            source = self._in_store(lease.arrays[0], chunk)
            size = source.numel() * source.element_size()
            moving = self._timeline.begin(TO_DEVICE, "gather", chunk=chunk.index, size=size, tier="device")
            stack.callback(self._timeline.end, moving)
            self._timeline.count("gathered_bytes", size)
            copy = self._copier.to_device(source, self._on_device(part, chunk))
            self._coming.append((part.unit, copy, stack.pop_all()))
        while self._coming and self._coming[0][1].done():
            self._finish_one()

    def _finish(self, unit: str) -> None:
        self._wait_for(unit)
        self._is_here(unit)

    @uninterrupted
    def _is_here(self, unit: str) -> None:
        for part in self._parts_of[unit]:
            self._parameters.restore(part.index)
        self._move(unit, Where.HERE)

    def _wait_for(self, unit: str) -> None:
        self._wait_for_copies(unit)
        for work in self._gathers.get(unit, ()):
            work.wait()
        self._gathers.pop(unit, None)

    def _wait_for_copies(self, unit: str) -> None:
        while any(one == unit for one, _, _ in self._coming):
            self._finish_one()

    def _finish_one(self) -> None:
        _, copy, stack = self._coming[0]
        # Forgotten only when it is done: whoever is interrupted here has to wait again.
        if copy.done():
            copy.wait()
        else:
            with self._timeline.waiting("wait for gather", tier="device"):
                copy.wait()
        self._coming.popleft()
        stack.close()

    def release(self, unit: str) -> None:
        """Frees the memory of a unit that is here or on its way."""
        if self._where.get(unit, Where.RELEASED) is Where.RELEASED:
            return
        self._missing.pop(unit, None)
        if self._where[unit] is Where.COMING:
            self._wait_for(unit)
        self._leave(unit)

    @uninterrupted
    def _leave(self, unit: str) -> None:
        for part in self._parts_of[unit]:
            self._parameters.free(part.index)
        self._move(unit, Where.RELEASED)

    def abandon(self) -> None:
        """Releases everything, successfully or not."""
        self.close()
        for work in (work for works in self._gathers.values() for work in works):
            with suppress(OffloadError):
                work.wait()
        self._gathers.clear()
        self._missing.clear()
        for unit, where in self._where.items():
            if where is not Where.RELEASED:
                self._leave(unit)

    def close(self) -> None:
        """Waits for copies under way, successful or not: their memory is about to go."""
        while self._coming:
            with suppress(OffloadError):
                self._finish_one()
        for work in chain.from_iterable(self._gathers.values()):
            with suppress(OffloadError):
                work.wait()
        self._gathers.clear()

    def _move(self, unit: str, to: Where) -> None:
        require_legal(unit, self._where[unit], to)
        self._where[unit] = to
        if to is Where.RELEASED:
            del self._allocated[unit]
        else:
            self._allocated[unit] = None

    def _on_device(self, part: Part, chunk: Chunk) -> Tensor:
        start = chunk.start - part.start
        return self._parameters.memory_of(part.index)[start : start + chunk.numel]

    def _in_store(self, array: Tensor, chunk: Chunk) -> Tensor:
        return array.view(self._parameters.flats[chunk.flat].dtype)
