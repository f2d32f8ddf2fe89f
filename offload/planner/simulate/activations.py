"""Where activations wait in virtual time: the same `ActivationStore`, with memory that has no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from offload.devices.copies import DONE, Copier, Copy, DeviceEvent, Part
from offload.io.engine import IOFuture
from offload.planner.placement import ACTIVATIONS, SPILLED, Placement
from offload.planner.simulate.clock import Channel, Moment
from offload.planner.simulate.lines import DISK, LINK, MEMORY
from offload.planner.simulate.stores import READ, WRITE
from offload.profiling import Timeline
from offload.storage.activation_store import SpillFiles, Stored, stacked
from offload.tiers import DEVICE

Wait = Callable[[Moment, str], None]
"""Lets time pass in a call of the host, until a moment, which is a wait for what the word says."""


class TimedCopy(Copy):
    """A copy over the link.

    Args:
        arrived: when it has ended.
        wait: see `Wait`.
        on_device: takes what the device waits for, before it goes on.
    """

    def __init__(self, arrived: Moment, wait: Wait, on_device: list[Moment]) -> None:
        self._arrived, self._wait, self._on_device = arrived, wait, on_device

    def done(self) -> bool:
        return self._arrived.is_past

    def wait(self) -> None:
        self._wait(self._arrived, LINK)

    def wait_on_device(self) -> None:
        self._on_device.append(self._arrived)


class TimedCopier(Copier):
    """Copies that take time, and move nothing.

    Args:
        up: starts to copy so many bytes to the device, behind what it does.
        down: likewise, to RAM.
        in_ram: copies so many bytes there; None: the device has memory of its own, and `up` and `down` are for it.
        wait: see `Wait`.

    Attributes:
        on_device: what the device waits for, before it goes on.
    """

    def __init__(
        self,
        up: Callable[[int], Moment],
        down: Callable[[int], Moment],
        in_ram: Callable[[int], Moment] | None,
        wait: Wait,
    ) -> None:
        self.direct = in_ram is not None
        self.on_device: list[Moment] = []
        self._up, self._down, self._in_ram, self._wait = up, down, in_ram, wait

    def mark(self, stream: object = None) -> DeviceEvent:
        return DONE

    def to_host(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        return self._copy(src.nbytes, self._down)

    def gather_to_host(
        self, parts: Sequence[Part], staging: Tensor, dst: Tensor, after: DeviceEvent | None = None
    ) -> Copy:
        return self._copy(dst.nbytes, self._down)

    def to_device(self, src: Tensor, dst: Tensor, after: DeviceEvent | None = None) -> Copy:
        return self._copy(src.nbytes, self._up)

    def _copy(self, nbytes: int, over_link: Callable[[int], Moment]) -> Copy:
        if self._in_ram is None:
            return TimedCopy(over_link(nbytes), self._wait, self.on_device)
        self._wait(self._in_ram(nbytes), MEMORY)
        return DONE

    def pin(self, memory: Tensor) -> None:
        return None

    def unpin(self, memory: Tensor) -> None:
        return None


class TimedTransfer(IOFuture):
    """A transfer of a drive. Who asks for its result waits in virtual time.

    Args:
        ended: when it has ended.
        nbytes: what it moves.
        wait: see `Wait`.
    """

    def __init__(self, ended: Moment, nbytes: int, wait: Wait) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._moment, self._wait = ended, wait
        ended.then(lambda: self.set_result(nbytes))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(self._moment, DISK)
        return super().exception(timeout)


class TimedSpill(SpillFiles):
    """Files on the drives of a rank.

    Args:
        drives: the drives.
        wait: see `Wait`.
    """

    def __init__(self, drives: Sequence[Channel], wait: Wait) -> None:
        self.paths = [drive.name for drive in drives]
        self._drives, self._wait = drives, wait

    def grow(self, number: int, size: int, nbytes: int) -> None:
        return None

    def begin(self, operation: Literal["read", "write"], number: int, offset: int, memory: Tensor) -> IOFuture:
        way = READ if operation == "read" else WRITE
        return TimedTransfer(self._drives[number].submit(way, memory.nbytes, "activation"), memory.nbytes, self._wait)


class TimedActivations:
    """What waits of each unit between its forward and its backward.

    Args:
        placement: what is where.
        waiting: of each unit, by its name, the bytes of each tensor that waits.
        copier: copies them.
        drives: of the rank.
        timeline: counts what moves.
        wait: see `Wait`.

    Attributes:
        copier: see above.
    """

    def __init__(
        self,
        placement: Placement,
        waiting: Mapping[str, Sequence[int]],
        copier: TimedCopier,
        drives: Sequence[Channel],
        timeline: Timeline,
        wait: Wait,
    ) -> None:
        choice = placement.choice.activations
        self.copier = copier
        self._waiting = waiting
        self._is_reversed = not choice.recompute  # a checkpoint asks for all that entered it, in order
        self._stored: dict[str, list[Stored]] = {}
        spills = bool(placement.choice.commits.paths)
        is_there = choice.tier == DEVICE and not placement.is_direct
        self._store = stacked(
            (
                list(_memory(placement, SPILLED if is_there else ACTIVATIONS)),
                list(_memory(placement, ACTIVATIONS)) if is_there else [],
            ),
            copier,
            torch.device("meta"),
            timeline,
            lambda: TimedSpill(drives, wait) if spills else None,
        )

    def put(self, unit: str) -> None:
        """A unit's forward keeps what its backward needs.

        Raises:
            BudgetError: there is no room for it.
        """
        if self._store is not None:
            self._stored[unit] = [self._store.put(_tensor(nbytes)) for nbytes in self._waiting.get(unit, ())]

    def get(self, unit: str) -> None:
        """A unit's backward begins."""
        stored = self._stored.get(unit, [])
        for one in reversed(stored) if self._is_reversed else stored:
            one.store.get(one)

    def drop(self, unit: str) -> None:
        """A unit's backward has ended."""
        self._stored.pop(unit, None)


def _memory(placement: Placement, what: str) -> Iterator[Tensor]:
    return (_tensor(region.nbytes) for region in placement.regions if region.what == what)


def _tensor(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
