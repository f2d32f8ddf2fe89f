"""Which units' forwards run now: operations on their parameters go unseen, all others are guarded (guard.py)."""

from __future__ import annotations

from collections.abc import Sequence

from offload.interrupts import uninterrupted
from offload.layout import Layout
from offload.model.flat_param import Parameters


class Running:
    """A unit runs from the first of its modules that is entered to the last one that is left.

    What is left without notice (an interrupt) runs until `reset`.
    """

    def __init__(self, layout: Layout, parameters: Parameters) -> None:
        self._parameters = parameters
        self._numbers: dict[str, list[int]] = {}
        self._tiled: set[int] = set()
        for flat in layout.flats:
            # A tiled weight is multiplied with tile by tile, by its guard.
            if layout.tile_of(flat.index):
                self._tiled.update(flat.params)
            else:
                self._numbers.setdefault(flat.unit, []).extend(flat.params)
        self._depth: dict[str, int] = {}
        self._order: list[str] = []

    @uninterrupted
    def enter(self, unit: str) -> None:
        """A module of `unit`, whose values are current, begins its forward."""
        depth = self._depth.get(unit, 0)
        if not depth:
            self._parameters.watch(self._numbers.get(unit, ()))
            self._order.append(unit)
        self._depth[unit] = depth + 1

    @uninterrupted
    def leave(self, unit: str) -> None:
        depth = self._depth.get(unit, 0)
        if depth > 1:
            self._depth[unit] = depth - 1
        elif depth:
            del self._depth[unit]
            self._order.remove(unit)
            self._parameters.guard(self._numbers.get(unit, ()))

    def runs(self, unit: str) -> bool:
        return unit in self._depth

    def watches(self, unit: str, number: int) -> bool:
        """Whether operations on parameter `number` of `unit` go unseen now."""
        return unit in self._depth and number not in self._tiled

    @property
    def units(self) -> Sequence[str]:
        """Those that run, in the order in which they were entered."""
        return self._order

    @uninterrupted
    def reset(self) -> None:
        """Nothing runs: what raised, or was interrupted, never said its end."""
        for unit in self._order:
            self._parameters.guard(self._numbers.get(unit, ()))
        self._depth.clear()
        self._order.clear()
