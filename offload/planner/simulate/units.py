"""The units of a model whose parameters stream, in virtual time: the same units and the same policy as in a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from offload.layout import Chunk, Layout
from offload.model.backward_order import BackwardOrder
from offload.model.policy import Ahead, UnitPolicy
from offload.model.scheduling import UnitScheduler, takes_updates
from offload.model.unit import Presence, Unit, Units
from offload.model.units import ROOT
from offload.planner.placement import Placement
from offload.tiers import DEVICE

_TASK = 0
"""The number of autograd's task, of which a backward has one."""


class ToCopy(NamedTuple):
    """What has to be copied to the device.

    Attributes:
        unit: the unit.
        chunks: of it.
        is_new: whether the unit has just got memory, of which others may still use a part.
    """

    unit: Unit
    chunks: Sequence[Chunk]
    is_new: bool


class ToGather(NamedTuple):
    """What other ranks have of units, and has to be fetched, when what this rank has of them is on its way.

    Attributes:
        units: the units.
        flat: the flat parameter of them, of which alone it is; None: all of them.
    """

    units: Sequence[Unit]
    flat: int | None = None


class ToAwait(NamedTuple):
    """A unit that is used now, of which other ranks have parts."""

    unit: Unit


class TimedMoves:
    """Changes the presence of units at once, and leaves what takes time to the host.

    Args:
        layout: of all parameters that are trained or stream.
        limit: how many bytes units may take on the device; None: any number.
        owed: how many steps each chunk owes that owes some.
        direct: whether the device is the CPU.

    Attributes:
        todo: what the host has to do before it goes on: copies, what other ranks have, and units that have left.
    """

    def __init__(self, layout: Layout, limit: int | None, owed: Mapping[int, int], *, direct: bool) -> None:
        self.todo: deque[ToCopy | ToGather | ToAwait | Unit] = deque()
        self._layout, self._limit, self._owed, self._direct = layout, limit, owed, direct
        self._with_memory: dict[Unit, None] = {}

    @property
    def with_memory(self) -> Collection[Unit]:
        return tuple(self._with_memory)

    def missing_bytes(self, units: Iterable[Unit]) -> int:
        together = {*units, *self._with_memory}
        return 0 if self._limit is None else sum(unit.nbytes for unit in together) - self._limit

    def owes(self, unit: Unit) -> bool:
        return not self._owed.keys().isdisjoint(unit.chunk_numbers)

    def prefetch(self, units: Sequence[Unit]) -> None:
        for unit in units:
            chunks = [chunk for _, chunk in unit.to_copy]
            is_new = unit.presence is Presence.RELEASED
            unit.fetch()
            self._with_memory[unit] = None
            self.todo.append(ToCopy(unit, chunks, is_new))
        if units:
            self._gather(units)

    def fetch(self, unit: Unit) -> None:
        if unit.is_missing:
            self.prefetch([unit])
        if unit.presence is Presence.FETCHING:
            self._arrive(unit)

    def release(self, unit: Unit) -> None:
        if unit.presence is not Presence.RELEASED and unit.slices:
            self._await(unit)
            unit.release()
            self._with_memory.pop(unit, None)
            self.todo.append(unit)

    def can_begin_update(self, unit: Unit) -> bool:
        return self._direct and takes_updates(unit, self._layout)

    def begin_update(self, unit: Unit) -> None:
        unit.expect_update()
        self._with_memory[unit] = None

    def flat_updated(self, unit: Unit, flat: int) -> None:
        """As UnitTransfers.flat_updated."""
        if unit.presence is Presence.FETCHING:
            self._arrive(unit)
        if unit.presence is Presence.AVAILABLE and flat in unit.chunks:
            self.todo.append(ToCopy(unit, unit.chunks[flat], is_new=False))
            self._gather([unit], flat)
            self._await(unit)

    def _gather(self, units: Sequence[Unit], flat: int | None = None) -> None:
        if self._layout.shard_group_size > 1:
            self.todo.append(ToGather(units, flat))

    def _await(self, unit: Unit) -> None:
        if self._layout.shard_group_size > 1:
            self.todo.append(ToAwait(unit))

    def _arrive(self, unit: Unit) -> None:
        self._await(unit)
        unit.arrive()


class TimedUnits(UnitScheduler):
    """When units come and leave, as StreamedUnits (model/fetch.py).

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        is_pending: whether an update of a unit is to be applied.
        owed: how many steps each chunk owes that owes some.

    Attributes:
        transfers: what has to be done for that.
        units: the units.
    """

    transfers: TimedMoves

    def __init__(
        self, held: Layout, placement: Placement, is_pending: Callable[[Unit], bool], owed: Mapping[int, int]
    ) -> None:
        params, limit = placement.choice.params, placement.device_budget_bytes
        if limit is not None:
            limit += placement.streamed_bytes - placement.device_bytes
        streamed = {flat.index for flat in held.flats if params.tier_of(is_frozen=flat.is_frozen) > DEVICE}
        self.units = Units(held, streamed, placement.staying, placement.tiled_in_ram)
        self.transfers = TimedMoves(held, limit, owed, direct=placement.is_direct)
        self._root = self.units[ROOT]
        self._backward_order = BackwardOrder.over(held.trained, self.units.values()) if params.streams else None
        self._ends: dict[Unit, list[int]] = {}  # by unit, the positions at the ends of its forwards
        self._policy = UnitPolicy(Ahead(params.prefetch_units, placement.choice.ahead_bytes))
        self._pending = is_pending

    def pass_begins(self) -> None:
        """A forward of the model begins, and the root's update has been applied."""
        self._policy.forget_calls()
        self._policy.order.begin_pass()

    def update_begins(self, unit: Unit) -> None:
        """A pending update of a unit is about to be applied, and then the unit used."""
        self._make_way(unit)

    def forward_begins(self, unit: Unit) -> None:
        """A unit is used."""
        self._enter(unit)
        if self._backward_order is not None:
            self._backward_order.use(unit)
        unit.forwards += 1

    def forward_ends(self, unit: Unit) -> None:
        """The unit's forward ends."""
        unit.forwards -= 1
        if self._backward_order is not None:
            self._ends.setdefault(unit, []).append(self._backward_order.position)

    def tiles_begin(self, tiles: Sequence[Unit]) -> None:
        """These tiles of a weight are used next, in this order."""
        self._policy.order.expect_tiles(tiles)

    def backward_reaches(self, unit: Unit) -> tuple[list[str], bool] | None:
        """The backward of a unit is about to begin.

        Returns:
            The names of the units whose gradients have all come, and whether no other unit is fetched until this one is
            left, as `GradientBuffer.backward_enters` is told them; None: it is not told.
        """
        if self._backward_order is None:
            return None
        position = self._ends[unit].pop()
        left = self._backward_order.enter(unit, position, _TASK)
        return [one.name for one in left], self._backward_order.is_alone(unit, position)

    def backward_leaves(self) -> list[str] | None:
        """The backward of the model has come to its end.

        Returns:
            The names of the units whose gradients have all come since, as `GradientBuffer.backward_ends` is told them;
            None: it is not told.
        """
        return None if self._backward_order is None else [one.name for one in self._backward_order.end(_TASK)]

    def backward_begins(self, unit: Unit) -> None:
        """The backward of a unit begins."""
        if not unit.is_root:
            self._policy.backward_begins(unit)
        self._enter(unit)

    def backward_ends(self) -> None:
        """The backward of the model ends."""
        self._policy.backward_ends()
        self._release_unused()

    def step_begins(self) -> None:
        """The last step was applied, and the next one begins."""
        self._policy.forget_graphs()
        if self._backward_order is not None:
            self._backward_order.begin_anew()
        self._ends.clear()
        self.pass_begins()
        self._release_all_but([unit for unit in self.units.values() if unit.stays and unit.is_frozen])

    def _is_pending(self, unit: Unit) -> bool:
        return self._pending(unit)

    def _fetch(self, unit: Unit) -> None:
        self._policy.give_back(unit)
        self.transfers.fetch(unit)

    def _release(self, unit: Unit) -> None:
        self._policy.give_back(unit)
        self.transfers.release(unit)

    def _require_room(self, units: Sequence[Unit]) -> None:
        raise AssertionError("no graph keeps units here")
