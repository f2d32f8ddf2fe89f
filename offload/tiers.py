"""The tiers: where bytes live.

Users write a tier's name, and `stats()` and plans show it. Inside the library it is one of these objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering


@total_ordering
@dataclass(frozen=True)
class Tier:
    """A kind of memory. Of two tiers the slower one is the greater one.

    Attributes:
        name: what users write.
        rank: 0 for the fastest; the higher, the slower.
        is_durable: whether chunks lie in slots of files, which outlive the process. They pass through buffers in RAM
            on their way. Otherwise they lie in memory.
        words: the tier in a sentence.
        where: the place in a sentence, with its preposition.
    """

    name: str
    rank: int
    is_durable: bool
    words: str
    where: str

    def __str__(self) -> str:
        return self.name

    @property
    def memory(self) -> Tier:
        """The tier in whose memory its chunks are while they are used."""
        return CPU if self.is_durable else self

    def __lt__(self, other: Tier) -> bool:
        return self.rank < other.rank


DEVICE = Tier("device", 0, False, "the device", "on the device")
CPU = Tier("cpu", 1, False, "RAM", "in RAM")
NVME = Tier("nvme", 2, True, "NVMe", "on NVMe")

TIERS = {tier.name: tier for tier in (DEVICE, CPU, NVME)}
"""By name, the fastest first."""
