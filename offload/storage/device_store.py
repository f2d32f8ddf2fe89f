"""States on the model's own device, and its memory.

All of them are there with `tier="device"`, or as many as there is room for. The others are in a store beneath, in RAM
or on NVMe, which knows all chunks.

Training never moves those on the device. A commit brings those that changed down into the buffers of the store beneath,
which streams them to the swap files as it does those of `tier="nvme"`; after a resume or a rollback they are brought up
the same way, before they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from offload.errors import BudgetError
from offload.health import Health
from offload.interrupts import uninterrupted
from offload.profiling import Timeline
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.storage.arena import Lender
from offload.storage.cached_chunk import Version
from offload.storage.chunk_cache import Lease, Store, Use
from offload.storage.swap_format import SlotArrays


class DeviceArena(Lender):
    """Memory of the device, of a size that is fixed before the first step.

    Args:
        size: its bytes, rounded up to whole pages.
        device: the device.

    Raises:
        BudgetError: the device refuses the memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            slab = torch.zeros(max(round_up(size, PAGE_BYTES), PAGE_BYTES), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f'{device} refuses {format_bytes(size)} ({error}): lower device_memory, or, with tier="device", choose '
                'tier="cpu", or "nvme" with a path',
                needed=size,
                available=0,
                option="device_memory",
            ) from error
        super().__init__(slab)
        self._parked: Tensor | None = None

    def park(self) -> int:
        if self._parked is not None:
            return 0
        self._parked = self._slab.cpu()
        self._slab.untyped_storage().resize_(0)
        return self._slab.numel()

    def bring_back(self) -> int:
        if self._parked is None:
            return 0
        self._slab.untyped_storage().resize_(self._slab.numel())
        self._slab.copy_(self._parked)
        self._parked = None
        return self._slab.numel()

    def close(self) -> None:
        """Gives the memory back. What was lent must not be used any more."""
        storage = self._slab.untyped_storage()
        if storage.resizable():  # not on the CPU, once NumPy has seen it
            storage.resize_(0)


class DeviceStore(Store):
    """The states of all chunks, of which some or all are on the device. Leases of those hold tensors on the device.

    Args:
        slot_arrays: the arrays of each chunk.
        resident: the memory of the chunks on the device, by chunk.
        arena: the arena from which that memory was lent.
        beneath: the store of the other chunks, through which commits of all go; None: all are on the device, and
            nothing is committed.
        timeline: of the run.
        health: of the run.
    """

    def __init__(
        self,
        slot_arrays: Sequence[SlotArrays],
        resident: Mapping[int, Tensor],
        arena: Lender,
        beneath: Store | None,
        timeline: Timeline,
        health: Health,
    ) -> None:
        super().__init__(slot_arrays, resident, (), None, timeline, health)
        self._arena = arena
        self._beneath = beneath
        self._here = [chunk for chunk in self._chunks if chunk.is_resident]
        self._below: dict[int, Version] = {}  # chunks that have to be brought up

    def expect(self, order: Iterable[int], *, repeats: bool = True, once: Collection[int] = ()) -> None:
        order = list(order)
        super().expect((chunk for chunk in order if self.is_here(chunk)), repeats=repeats, once=once)
        if self._beneath is not None:
            beneath = [chunk for chunk in order if chunk in self._below or not self.is_here(chunk)]
            # What is brought up is needed beneath no more.
            self._beneath.expect(beneath, repeats=repeats, once={*once, *self._below})

    def is_here(self, chunk: int) -> bool:
        """Whether a chunk is on the device, or is brought there by its next lease."""
        return super().is_resident(chunk)

    def is_resident(self, chunk: int) -> bool:
        return self.is_here(chunk) or self._other.is_resident(chunk)

    def is_ready(self, chunk: int) -> bool:
        return super().is_ready(chunk) if self.is_here(chunk) else self._other.is_ready(chunk)

    def lease(self, chunk: int, use: Use, *, step: int) -> AbstractContextManager[Lease]:
        if not self.is_here(chunk):
            return self._other.lease(chunk, use, step=step)
        self._arena.bring_back()  # somebody wants the states of a parked model
        if chunk in self._below:
            self._bring_up(chunk)
        return super().lease(chunk, use, step=step)

    def _bring_up(self, chunk: int) -> None:
        version = self._below[chunk]
        with (
            self._other.lease(chunk, Use.READ, step=version.step) as there,
            super().lease(chunk, Use.OVERWRITE, step=version.step) as here,
        ):
            for source, into in zip(there.arrays, here.arrays, strict=True):
                into.copy_(source)
        self._is_up(chunk, version)

    @uninterrupted
    def _is_up(self, chunk: int, version: Version) -> None:
        with self._lock:
            del self._below[chunk]
            self._now_in_slots({chunk: version})

    def flush(self) -> dict[int, Version]:
        beneath = self._other
        self.drain()
        for chunk in self._here:
            if chunk.newer is None:
                continue
            with self._both(chunk.index, chunk.newer) as (here, there):
                for source, into in zip(here.arrays, there.arrays, strict=True):
                    into.copy_(source)
        versions = beneath.flush()
        self._are_down(versions)  # not before: what was interrupted is brought down again
        return versions

    @uninterrupted
    def _are_down(self, versions: Mapping[int, Version]) -> None:
        with self._lock:
            self._now_in_slots(
                {chunk: at for chunk, at in versions.items() if self.is_here(chunk) and chunk not in self._below}
            )

    def set_committed(self, versions: Mapping[int, Version]) -> None:
        self._other.set_committed(versions)

    def reset(self, versions: Mapping[int, Version]) -> None:
        super().reset({})
        self._below = {chunk: at for chunk, at in versions.items() if self.is_here(chunk)}
        if self._beneath is not None:
            self._beneath.reset(versions)
            self._beneath.expect(self._below, repeats=False)  # the others are announced by the step that needs them

    def drain(self) -> None:
        super().drain()
        if self._beneath is not None:
            self._beneath.drain()

    def check(self) -> None:
        super().check()
        if self._beneath is not None:
            self._beneath.check()

    @property
    def _other(self) -> Store:
        if self._beneath is None:
            raise AssertionError("there is no store beneath that of the device")
        return self._beneath

    @contextmanager
    def _both(self, chunk: int, step: int) -> Iterator[tuple[Lease, Lease]]:
        """A lease of a chunk's states on the device, and one of a buffer for it in RAM.

        All of the buffer is about to be overwritten.
        """
        with (
            self.lease(chunk, Use.READ, step=step) as here,
            self._other.lease(chunk, Use.OVERWRITE, step=step) as there,
        ):
            yield here, there

    def _now_in_slots(self, versions: Mapping[int, Version]) -> None:
        for chunk, version in versions.items():
            self._chunks[chunk].matches_slot(version)
