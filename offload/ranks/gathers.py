"""All-gathers that share a collective where what they gather is small.

[Note: gathered together]
Each collective takes a delay of the network, however little it carries. So this rank's shards of several small tensors
are copied into a buffer, one after the other, and travel as one. Whoever waits for one of the tensors first has all of
them copied to their places, and the buffer is free again. While it is not, each tensor travels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from offload.devices.copies import DONE, Copier, DeviceEvent
from offload.ranks.communicator import Work
from offload.regions import Region
from offload.tiers import Tier

Gather = tuple[Tensor, Tensor]
"""This rank's shard, shape (k,), and the tensor that gets those of all ranks, shape (size * k,)."""


class AllGathers(Protocol):
    """What launches all-gathers among ranks. A Communicator does; planner/simulate has one in virtual time."""

    rank: int
    size: int

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work: ...


def regions(what: str, sizes: Sequence[int], bucket_bytes: int, communication: Tier) -> list[Region]:
    """What Gathers reserves.

    Args:
        what: the region's name.
        sizes: bytes of the tensors that may travel together.
        bucket_bytes: the most that do.
        communication: the tier whose memory the tensors of collectives are in.
    """
    small = [size for size in sizes if size < bucket_bytes]
    return [Region(communication, what, min(sum(small), bucket_bytes), kind="buffers")] if len(small) > 1 else []


class Gathers:
    """Launches all-gathers, small ones together: see [Note: gathered together].

    Args:
        comm: the ranks.
        memory: none, or the piece of a region of `regions`.
        copier: knows the device.
    """

    def __init__(self, comm: AllGathers, memory: Sequence[Tensor], copier: Copier) -> None:
        self._comm = comm
        self._memory = next(iter(memory), torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._copier = copier
        self._lent: _Together | None = None
        self._is_free: DeviceEvent = DONE

    @property
    def room(self) -> int:
        """Bytes of tensors that can travel together."""
        return self._memory.numel()

    def launch(self, gathers: Sequence[Gather]) -> Iterator[tuple[list[int], Work]]:
        """Launches all-gathers, alike on all ranks.

        Args:
            gathers: what to gather.

        Yields:
            As soon as each collective is under way: which of `gathers` it brings, and its work.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        for group in self._groups(gathers):
            parts = [gathers[number] for number in group]
            if len(parts) > 1 and self._lent is None:
                yield group, self._launch(parts)
            else:
                for number, (shard, whole) in zip(group, parts, strict=True):
                    yield [number], self._comm.all_gather_into_tensor(shard, whole)

    def _groups(self, gathers: Sequence[Gather]) -> Iterator[list[int]]:
        """Parts tensors into groups of one dtype that fit into the buffer; what does not fit is a group of its own."""
        open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
        for number, (_, whole) in enumerate(gathers):
            group, filled = open_groups.get(whole.dtype, ([], 0))
            nbytes = whole.numel() * whole.element_size()
            if group and filled + nbytes > self.room:
                yield group
                group, filled = [], 0
            open_groups[whole.dtype] = [*group, number], filled + nbytes
        for group, _ in open_groups.values():
            yield group

    def _launch(self, parts: Sequence[Gather]) -> Work:
        size, dtype = self._comm.size, parts[0][0].dtype
        ends = list(accumulate(len(shard) for shard, _ in parts))
        memory = self._memory[: size * ends[-1] * dtype.itemsize].view(dtype)
        rows = memory.view(size, -1)
        self._is_free.wait_on_device()
        with torch.no_grad():
            for (shard, _), end in zip(parts, ends, strict=True):
                rows[self._comm.rank, end - len(shard) : end].copy_(shard)
        work = self._comm.all_gather_into_tensor(rows[self._comm.rank], memory)
        self._lent = _Together(self, work, rows, [whole for _, whole in parts])
        return self._lent

    def arrived(self, rows: Tensor, wholes: Sequence[Tensor]) -> DeviceEvent:
        """Copies what has come to its places, and takes the buffer back.

        Args:
            rows: what came from each rank.
            wholes: where it goes.

        Returns:
            The event after the copies.
        """
        widths = [len(whole) // self._comm.size for whole in wholes]
        with torch.no_grad():
            for whole, columns in zip(wholes, rows.split(widths, dim=1), strict=True):
                whole.view(columns.shape).copy_(columns)
        self._lent, self._is_free = None, self._copier.mark()
        return self._is_free


class _Together(Work):
    """A collective that carries several tensors."""

    def __init__(self, gathers: Gathers, work: Work, rows: Tensor, wholes: Sequence[Tensor]) -> None:
        self._gathers = gathers
        self._work = work
        self._rows = rows
        self._wholes = wholes
        self._copied: DeviceEvent | None = None

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        self._end()

    def wait_on_device(self) -> None:
        self._work.wait_on_device()
        self._end()

    def _end(self) -> None:
        if self._copied is None:
            self._copied = self._gathers.arrived(self._rows, self._wholes)
        self._copied.wait_on_device()
