"""The memory of streamed units on the device: buffers that are allocated once and lent to one unit after the other.

[Note: unit memory]
A buffer is lent to a unit by exchanging what storages point to: a region of the buffer for each tensor of the unit.
Identity and views of a storage stay, as they do when it is resized. Each buffer comes with the event of its last use,
and is written only after that. On a device of its own a copy into it thus waits for the unit that left it, and for
nothing queued since; memory from the allocator would have to wait for all that is queued. On the CPU, memory that was
given back to the system returns as pages that the system has to clear first, which takes several times as long as to
copy a unit into them.

Units of different sizes share buffers. A step shows which units have memory at the same time; training repeats it. So
between two steps the units are divided into groups of which no two members have memory at the same time, and each group
gets one buffer, as large as its largest unit (`arrange`). Training then finds the buffer of each unit spare, and
allocates nothing. The largest units of the groups are different units, and there are as many groups as units that have
memory at once: together they take no more than the plan allows for so many of the largest units. Should they take
more all the same, no buffers are shared.

A unit that does not find its buffer, because the order has changed, gets memory of its own size, for which spare
buffers are given back. A smaller unit in a larger buffer keeps what it does not need; so there may be more than planned
then, by what the largest unit takes more than the next, and only if no unit is prefetched. What was not planned
(`gathered` of a whole model, a backward with create_graph=True) is allocated as it is needed, and given back when it is
not. While a text is generated, more units stay than in a step (`widen`): each has memory of its own size then, and what
they have at the same time says nothing of a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, UntypedStorage

from offload import torch_private
from offload.devices.copies import Copier, DeviceEvent
from offload.layout import starts_of
from offload.model.unit import Unit
from offload.native.memory import advise_huge_pages, poison

_REFUSED = "this parameter is not on the device now: use it inside `with optimizer.gathered(module_or_params):`"


@dataclass(eq=False)
class _Buffer:
    """Memory on the device.

    Attributes:
        memory: uint8, 1-D.
        last_use: the event after which it may be written.
        is_shared: whether it is kept for other units when a unit gives it back.
    """

    memory: Tensor
    last_use: DeviceEvent
    is_shared: bool

    @property
    def nbytes(self) -> int:
        return len(self.memory)


@dataclass(eq=False)
class _Group:
    """Units that never have memory at the same time.

    Attributes:
        units: their names.
        nbytes: how many bytes the largest of them takes.
        buffer: the buffer that they share already; None: they share none.
    """

    units: set[Unit] = field(default_factory=set)
    nbytes: int = 0
    buffer: _Buffer | None = None


class UnitMemory:
    """Gives memory to streamed units, and takes it away; see [Note: unit memory].

    Args:
        device: the device that units train on.
        copier: copies between that device and RAM.
        limit: how many bytes all buffers together may take, unless what is in use at once takes more.
    """

    def __init__(self, device: torch.device, copier: Copier, limit: int) -> None:
        self._device = device
        self._copier = copier
        self._planned = self._limit = limit
        self._is_wide = False
        self._spare: list[_Buffer] = []  # the oldest first
        self._lent: dict[Unit, _Buffer] = {}
        self._own: dict[Unit, _Buffer] = {}  # of each unit, as arranged
        self._sizes: dict[Unit, int] = {}  # of units, in the order of their first use
        self._beside: dict[Unit, set[Unit]] = {}  # by unit: those that had memory at the same time
        self._is_arranged = True  # each unit found its own buffer since

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers that units share, lent or spare."""
        return sum(buffer.nbytes for buffer in chain(self._spare, self._lent.values()) if buffer.is_shared)

    def give(self, unit: Unit, tensors: Sequence[Tensor], *, shares: bool = True) -> DeviceEvent:
        """Gives the tensors of a unit, which have no memory, as much as they need. Their values are undefined.

        Args:
            unit: the unit.
            tensors: its tensors.
            shares: False gives the unit memory that no other unit gets.

        Returns:
            The event after which the memory may be written.
        """
        starts, end = starts_of(tensor.nbytes for tensor in tensors)
        buffer = self._buffer_for(unit, end) if shares else self._allocate(end, tensors[0].device, is_shared=False)
        if shares:
            self._note(unit, end)
        for tensor, start in zip(tensors, starts, strict=True):
            storage = tensor.untyped_storage()
            if torch_private.allow_data_access is not None:
                torch_private.allow_data_access(storage._cdata)
            if tensor.nbytes:
                region = buffer.memory[start : start + tensor.nbytes]
                own = torch_private.from_dlpack(torch_private.to_dlpack(region))  # a storage of its own over it
                torch_private.swap_memory(storage, own.untyped_storage())
        self._lent[unit] = buffer
        return buffer.last_use

    def take(self, unit: Unit, tensors: Sequence[Tensor]) -> DeviceEvent:
        """Takes the memory of a unit's tensors away, if they have any.

        Returns:
            The event of its last use.
        """
        last_use = self._copier.mark()
        buffer = self._lent.get(unit)
        if buffer is not None:
            for tensor in tensors:
                strip(tensor)
            del self._lent[unit]
            if buffer.is_shared:
                buffer.last_use = last_use
                self._spare.append(buffer)
                self._trim(self._limit)
        return last_use

    def arrange(self, staying: Container[Unit] = ()) -> None:
        """Gives each unit a buffer that it shares with units that never have memory at the same time.

        Which these are is known from what was in use together so far. Called between two steps.

        Args:
            staying: units that keep the memory that they have.
        """
        if self._is_arranged or self._is_wide or any(unit not in staying for unit in self._lent):
            return
        limit = self._limit - sum(buffer.nbytes for buffer in self._lent.values())
        sizes = {unit: nbytes for unit, nbytes in self._sizes.items() if unit not in self._lent}
        groups = [_Group({unit}, nbytes) for unit, nbytes in sizes.items()]
        if _bytes_of(groups) > limit:
            by_size = sorted(sizes, key=lambda unit: -sizes[unit])
            groups = min((self._divide(order) for order in (sizes, by_size)), key=_bytes_of)
        if _bytes_of(groups) > limit:
            self._sizes = {unit: buffer.nbytes for unit, buffer in self._lent.items()}  # the next step may show less
            self._beside.clear()
            return
        spare, self._spare, self._own = self._spare, [], dict(self._lent)
        for group in groups:
            group.buffer = next((buffer for buffer in spare if buffer.nbytes == group.nbytes), None)
            if group.buffer is not None:
                spare.remove(group.buffer)
        if spare:
            spare.clear()
            self._copier.return_freed()  # other sizes are allocated now, and once for all
        with suppress(torch.OutOfMemoryError):  # then units get memory as they come
            for group in groups:
                buffer = group.buffer or self._allocate(group.nbytes, self._device)
                self._spare.append(buffer)
                self._own |= dict.fromkeys(group.units, buffer)
            self._is_arranged = True

    def free_spare(self) -> None:
        """Gives spare memory back to the system. From now on a unit gets memory of its size, until `arrange`."""
        self._own, self._is_arranged = {}, False
        self._trim(0)

    def widen(self, limit: int | None) -> None:
        """Lets all buffers together take more than was planned, until it is called again, and gives spare ones back.

        Args:
            limit: how many bytes they may take; None: as many as was planned.
        """
        self._limit = self._planned if limit is None else limit
        self._is_wide = limit is not None
        self.free_spare()

    def _buffer_for(self, unit: Unit, nbytes: int) -> _Buffer:
        found = self._own.get(unit)
        if found is None or found not in self._spare:
            self._is_arranged = False
            found = next((one for one in self._spare if one.nbytes == nbytes), None)
        if found is None:
            self._trim(self._limit - nbytes)
            return self._allocate(nbytes, self._device)
        self._spare.remove(found)
        return found

    def _allocate(self, nbytes: int, device: torch.device, *, is_shared: bool = True) -> _Buffer:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if memory.is_cpu:
            advise_huge_pages(memory)
        return _Buffer(memory, self._copier.mark(), is_shared)

    def _trim(self, limit: int) -> None:
        """Gives spare buffers back to the system until all buffers take at most `limit` bytes.

        Buffers that belong to no unit go first, then those that have been spare for longest.
        """
        own = set(self._own.values())
        while self._spare and self.nbytes > limit:
            self._spare.remove(next((one for one in self._spare if one not in own), self._spare[0]))

    def _note(self, unit: Unit, nbytes: int) -> None:
        """Records which units have memory while this one gets some, unless together they take more than was planned."""
        if self._is_wide:
            return
        others = [other for other, buffer in self._lent.items() if buffer.is_shared]
        self._sizes[unit] = nbytes
        if nbytes + sum(self._sizes[other] for other in others) <= self._limit:
            self._beside.setdefault(unit, set()).update(others)
            for other in others:
                self._beside.setdefault(other, set()).add(unit)

    def _divide(self, order: Iterable[Unit]) -> list[_Group]:
        """Divides the units into groups, none of which has two units that have memory at the same time.

        Each unit joins the smallest group that is large enough, or else the one that grows least.
        """
        groups: list[_Group] = []
        for unit in order:
            nbytes, beside = self._sizes[unit], self._beside.get(unit, set())
            free = (group for group in groups if group.units.isdisjoint(beside))
            best = min(free, key=lambda one: (one.nbytes < nbytes, abs(one.nbytes - nbytes)), default=None)
            if best is None:
                best = _Group()
                groups.append(best)
            best.units.add(unit)
            best.nbytes = max(best.nbytes, nbytes)
        return groups


def strip(tensor: Tensor) -> None:
    """Takes the memory of a tensor away. On the CPU its storage points to NaNs afterwards."""
    storage = tensor.untyped_storage()
    if nbytes := storage.nbytes():
        memory = poison(nbytes) if tensor.is_cpu else UntypedStorage(0, device=tensor.device)
        torch_private.swap_memory(storage, memory)
        if torch_private.forbid_data_access is not None:
            torch_private.forbid_data_access(storage._cdata, _REFUSED)


def _bytes_of(groups: Iterable[_Group]) -> int:
    return sum(group.nbytes for group in groups)
