"""The memory of one kind of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from offload.regions import Region
from offload.storage.swap_format import SlotArrays
from offload.tiers import DEVICE, Tier

LEAST_IN_FLIGHT = 3
"""The least chunks in flight in a step: one is read while one is in Adam and one is written."""
BUFFERS = "buffers"
"""The kind of the memory that chunks pass through."""


@dataclass(frozen=True)
class Pool:
    """The memory of one kind of chunks: some stay in it, the others pass through buffers.

    Attributes:
        sizes: the bytes of each chunk.
        resident: the chunks that stay.
        in_flight: how many buffers there are.
        on_device: the chunks that stay on the device. They pass through the buffers at commits only, if at all.
    """

    sizes: Sequence[int]
    resident: frozenset[int]
    in_flight: int
    on_device: frozenset[int] = frozenset()

    @cached_property
    def streamed(self) -> list[int]:
        """Bytes of each chunk that does not stay anywhere."""
        stay = self.resident | self.on_device
        return [size for chunk, size in enumerate(self.sizes) if chunk not in stay]

    @property
    def resident_bytes(self) -> int:
        return sum(self.sizes[chunk] for chunk in self.resident)

    @property
    def device_bytes(self) -> int:
        """The bytes of the chunks that stay on the device."""
        return sum(self.sizes[chunk] for chunk in self.on_device)

    @cached_property
    def largest(self) -> int:
        """Bytes of a buffer: those of the largest chunk that does not stay in this memory."""
        return max((size for chunk, size in enumerate(self.sizes) if chunk not in self.resident), default=0)

    @property
    def buffer_bytes(self) -> int:
        return self.in_flight * self.largest

    @property
    def nbytes(self) -> int:
        return self.resident_bytes + self.buffer_bytes

    @property
    def utilisation(self) -> float:
        """The share of the pool's memory that chunks fill: a buffer is as large as the largest chunk."""
        in_buffers = self.in_flight * sum(self.streamed) / len(self.streamed) if self.streamed else 0
        stays = self.resident_bytes + self.device_bytes
        return (stays + in_buffers) / max(stays + (self.buffer_bytes if self.streamed else 0), 1)

    def regions(
        self, tier: Tier, name: str, kind: str, holds: Sequence[tuple[tuple[str, int], ...]] | None = None
    ) -> Iterator[Region]:
        """The regions that a Store with this pool takes. `Memory.take` in run.py gives them by the same name.

        Args:
            tier: the tier whose memory they are in.
            name: what the chunks are called.
            kind: the kind of the resident chunks; see `Region.kind`.
            holds: for each chunk, `Region.holds`; None: nothing is counted under other kinds.
        """
        if self.in_flight:
            yield Region(tier, in_flight(name), self.largest, self.in_flight, BUFFERS)
        for chunk in sorted(self.resident | self.on_device):
            where = DEVICE if chunk in self.on_device else tier
            yield Region(where, resident(name), self.sizes[chunk], 1, kind, () if holds is None else holds[chunk])


def in_flight(name: str) -> str:
    """The name of the region of the buffers."""
    return f"{name} in flight"


def resident(name: str) -> str:
    """The name of the regions of the resident chunks, in their order."""
    return f"{name} that stay"


@lru_cache(1 << 12)
def kinds_held(slot: SlotArrays, kinds: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The bytes of each array of a slot, without header and padding, as pairs (kind, bytes).

    Args:
        slot: the arrays of the slot.
        kinds: the kind of each array.
    """
    return tuple(zip(kinds, slot.sizes, strict=True))
