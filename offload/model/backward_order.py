"""Which units a backward has left: no gradient of theirs is still to come.

Autograd runs the nodes of a graph in the opposite of the order in which the forward made them. So when it runs a node
that is older than all uses of a unit, all gradients of that unit have come. Ranks that share parameters use units in
one order, because they fetch them together. So they leave a unit at the same place between their collectives, whichever
of its parameters have a gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from offload.layout import Layout
from offload.model.torch_helpers import in_backward
from offload.model.unit import Unit


class BackwardOrder:
    """Numbers the uses of units, and tells which units a backward has left.

    Positions count up during forwards. A recomputation in a backward gets the positions of the forward that it repeats.

    Args:
        tiles: those that weights run in. They are left with the unit around their weight, also where none of them had a
            gradient.
        tiles_alone: whether nobody wants to know of other units.

    Attributes:
        position: the number of the last use of a unit.
    """

    def __init__(self, tiles: Sequence[Unit] = (), *, tiles_alone: bool = False) -> None:
        self.position = 0
        self._tiles, self._tiles_alone = tiles, tiles_alone
        self._last = 0
        self._uses: dict[Unit, list[int]] = {}  # by unit, the positions from which gradients are still to come
        self._top: int | None = None  # where the backward under way began
        self._entered: dict[Unit, None] = {}  # units that it has not left
        self._lowest: dict[int, int] = {}  # by task, the lowest position that it has reached
        self._ended: dict[Unit, list[int]] = {}  # uses in the last backward's graph, which may be used again

    @classmethod
    def over(cls, layout: Layout, units: Iterable[Unit]) -> Self | None:
        """The order in which a rank's backward leaves units whose parameters stream; None: nobody has to know it.

        Where each rank has all parameters, only tiles are of interest: gradients of others leave as they come.

        Args:
            layout: of the trained parameters.
            units: all of them.
        """
        shares_parameters, tiles = layout.shard_group_size > 1, [unit for unit in units if unit.weight is not None]
        is_needed = shares_parameters or (layout.ranks > 1 and tiles)
        return cls(tiles, tiles_alone=not shares_parameters) if is_needed else None

    def use(self, unit: Unit) -> None:
        """Counts a use of a unit that begins, in a forward or in an operation outside of one."""
        uses = self._uses.setdefault(unit, [])
        if in_backward():
            self.position = max(uses, default=self.position)
        else:
            self.position = self._last = self._last + 1
            uses.append(self.position)

    def enter(self, unit: Unit, position: int, task: int) -> list[Unit]:
        """Tells that backward runs a node which a use of `unit` made.

        The root unit counts as left only at the end of a backward, and is never returned.

        Args:
            unit: the unit.
            position: the position at the end of that use.
            task: the number of autograd's task.

        Returns:
            The units whose gradients have all come: those that backward has left, and their tiles.
        """
        if self._top is None:
            self._top = position
            if all(use > position for uses in self._uses.values() for use in uses):
                # The graph of the backward before, once more (retain_graph).
                for one, uses in self._ended.items():
                    self._uses[one] = uses + self._uses.get(one, [])
        self._lowest[task] = min(position, self._lowest.get(task, position))
        left = self._leave(position + 1)
        self._entered[unit] = None
        return self._with_tiles(left)

    def is_alone(self, unit: Unit, position: int) -> bool:
        """Whether backward, which has entered `unit` at `position`, needs no other unit until it leaves this one."""
        top = self._top or 0
        return not unit.is_root and [use for use in self._uses.get(unit, ()) if use <= top] == [position]

    def end(self, task: int) -> list[Unit]:
        """Tells that one of autograd's tasks ends, which may be inside another one.

        Returns:
            The units whose gradients have all come, as `enter` does.
        """
        lowest = self._lowest.pop(task, None)
        if lowest is None:
            return []
        left = self._leave(lowest)
        if not self._lowest:
            left += [unit for unit in self._entered if not unit.is_root]
            self.forget()
        return self._with_tiles(left)

    def _with_tiles(self, left: Sequence[Unit]) -> list[Unit]:
        tiles = [unit for unit in self._tiles if any(one.encloses(unit.home) for one in left)]
        return tiles if self._tiles_alone else [*left, *tiles]

    def forget(self) -> None:
        """Forgets the backward under way, if there is one, which raised or was interrupted.

        The next backward may go through its graph again.
        """
        if (top := self._top) is not None:
            self._ended = {unit: [use for use in uses if use <= top] for unit, uses in self._uses.items()}
            self._uses = {unit: [use for use in uses if use > top] for unit, uses in self._uses.items()}
        self._top = None
        self._entered.clear()
        self._lowest.clear()

    def begin_anew(self) -> None:
        """Forgets all uses, since no backward will go through a graph that was made until now."""
        self.forget()
        self._uses.clear()
        self._ended.clear()

    def _leave(self, reached: int) -> list[Unit]:
        """Leaves the entered units that have no use before position `reached`, to which backward has come.

        Returns:
            These units.
        """
        left = [
            one for one in self._entered if not one.is_root and all(use >= reached for use in self._uses.get(one, ()))
        ]
        for unit in left:
            del self._entered[unit]
        return left
