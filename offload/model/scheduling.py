"""Brings a unit to the device when it is used, and those that come next; lets the others leave. As policy.py says.

It knows neither bytes nor hooks. fetch.py does this in a run, and planner/simulate in virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from offload.layout import Layout
from offload.model.policy import UnitPolicy
from offload.model.unit import Presence, Unit


class Moves(Protocol):
    """What moves the parameters of units. UnitTransfers does."""

    @property
    def with_memory(self) -> Collection[Unit]: ...

    def missing_bytes(self, units: Iterable[Unit]) -> int: ...

    def owes(self, unit: Unit) -> bool: ...

    def prefetch(self, units: Sequence[Unit]) -> None: ...

    def can_begin_update(self, unit: Unit) -> bool: ...

    def begin_update(self, unit: Unit) -> None: ...


def takes_updates(unit: Unit, layout: Layout) -> bool:
    """Whether the new values of a unit can go to a device that is the CPU as they are made.

    Args:
        unit: the unit.
        layout: of all held parameters.
    """
    # Of a frozen unit, what changes is on the device.
    has_tiles = any(layout.tile_of(one.flat) for one in unit.slices)
    return unit.presence is Presence.RELEASED and not unit.is_frozen and not has_tiles


class UnitScheduler(ABC):
    """What happens to units where one of them is used; see the top of this file.

    Attributes:
        transfers: moves units.
    """

    transfers: Moves
    _policy: UnitPolicy
    _root: Unit

    @abstractmethod
    def _is_pending(self, unit: Unit) -> bool:
        """Whether an update of a unit is to be applied."""

    @abstractmethod
    def _fetch(self, unit: Unit) -> None:
        """Makes a unit available."""

    @abstractmethod
    def _release(self, unit: Unit) -> None:
        """Takes its memory away from a unit."""

    @abstractmethod
    def _require_room(self, units: Sequence[Unit]) -> None:
        """Requires that these units fit on the device beside what is in use.

        Raises:
            BudgetError: if they do not.
        """

    def _enter(self, unit: Unit) -> None:
        """Called when the forward or backward of a unit begins. Fetches it, releases others, and prefetches."""
        if unit.is_root or not unit.slices:
            self._fetch(unit)
            return
        self._policy.order.enter(unit)
        self._release_unused(self._root, *self._policy.wanted_with(unit))
        if self._policy.why_more_stays:
            if self.transfers.missing_bytes((unit,)) > 0:
                self._release_unused(self._root, unit)
            self._require_room((unit,))
        self._fetch(unit)
        self._prefetch(unit)

    def _make_way(self, unit: Unit) -> None:
        """Called before a pending update of a unit is applied that is about to be fetched.

        If possible, each new chunk goes to the device as it is made.
        """
        if self._is_pending(unit) and self.transfers.can_begin_update(unit):
            if not unit.is_root:
                self._policy.order.enter(unit)
                self._release_unused(self._root, *self._policy.wanted_with(unit))
            self.transfers.begin_update(unit)

    def _prefetch(self, unit: Unit) -> None:
        """Prefetches the next units, but for those whose values are not made yet and those that have no room.

        Args:
            unit: the one that was entered.
        """
        wanted: list[Unit] = []
        for one, has_room in self._policy.next_to(unit):
            if self._is_pending(one.home) or self.transfers.owes(one):
                continue  # a guess is not worth making a step for
            if has_room or self.transfers.missing_bytes((*wanted, one)) <= 0:
                wanted.append(one)
        self.transfers.prefetch(wanted)

    def _release_unused(self, *wanted: Unit) -> None:
        """Releases the units that are neither in use nor wanted, also those that were prefetched for later."""
        for unit in self._policy.unused(self.transfers.with_memory, wanted):
            self._release(unit)

    def _release_all_but(self, wanted: Collection[Unit] = ()) -> None:
        """Releases the units that are neither in use nor wanted, also those that stay."""
        for unit in self._policy.idle(self.transfers.with_memory):
            if unit not in wanted:
                self._release(unit)
