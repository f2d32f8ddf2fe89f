"""Memory that the parts of a run reserve.

Each part says once, in a function `regions` beside its constructor, what it will take. The plan is the sum of these
against the budgets, `offload plan` shows them, and when a run is built each part gets the pieces of its regions by name
(`Memory.take` in run.py). So no part can take what was not planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.sizes import PAGE_BYTES, round_up
from offload.tiers import Tier

REST = "rest"


@dataclass(frozen=True)
class Region:
    """Bytes that a part reserves on a tier.

    Attributes:
        tier: where.
        what: its name. Regions of different sizes may have the same name, and are then pieces of one thing.
        nbytes: of one piece.
        count: how many pieces there are.
        kind: under which `offload plan` counts it: a state kind, or one of [Note: rows] in planner/explain.py.
        holds: of these bytes, those that are counted under other kinds, as pairs (kind, bytes).
        is_lent: whether the part gets pieces of reserved memory. What is not lent is allocated by torch while it is
            used, and is only counted.
    """

    tier: Tier
    what: str
    nbytes: int
    count: int = 1
    kind: str = REST
    holds: tuple[tuple[str, int], ...] = ()
    is_lent: bool = True

    @property
    def total_bytes(self) -> int:
        """The bytes of all pieces, each rounded up to whole pages."""
        return self.count * round_up(self.nbytes, PAGE_BYTES)

    def rows(self) -> Iterable[tuple[str, int]]:
        """The bytes of each kind, as pairs (kind, bytes) whose sum is `total_bytes`."""
        yield from self.holds
        yield self.kind, self.total_bytes - sum(nbytes for _, nbytes in self.holds)


def total_bytes(regions: Iterable[Region], tier: Tier) -> int:
    """The bytes of all regions that are on `tier`."""
    rank = tier.rank  # a plan asks this of the regions of each chunk, and tiers take long to compare
    return sum(region.total_bytes for region in regions if region.tier.rank == rank)


def lent_bytes(regions: Iterable[Region], tier: Tier) -> int:
    """The bytes that have to be reserved on `tier`, of which parts get pieces."""
    return total_bytes((region for region in regions if region.is_lent), tier)


def total_of(regions: Iterable[Region], names: Sequence[str]) -> int:
    """The bytes of all regions with one of these names, on any tier."""
    return sum(region.total_bytes for region in regions if region.what in names)
