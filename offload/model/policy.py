"""Which units come to the device next, and which may leave it. It moves nothing: fetch.py does, as this says.

[Note: what stays]
Entering a unit releases the others, except: the root unit, which fetch.py always wants; units whose forward is running;
the unit whose backward began last and those around it (recomputation inside of it enters others, and it goes on
afterwards); what `gathered` holds. So the device holds at most the root unit, the unit in use, the units around it, and
those that are prefetched. Where units return tensors on the CPU beside those on a device, two threads of autograd run
their backward, and each has a unit whose backward began last: one unit more.

[Note: units that stay]
Where `device_memory` leaves room beside all this, some units stay on the device from their first use in a step to the
end of that step; frozen ones for good. They are spread evenly over the order, so that a unit that comes is hidden
behind more than one unit's compute. The plan says which (planner/placement.py, `units_that_stay`). At the end of a step
a unit with new values leaves like the others, and its memory is its own until it comes back with them. If an operation
has no room otherwise, units that stay leave, too.

Inside `generating` the root unit stays, and as many others as the same function finds room for then: no activations
wait beside them, and where `device_memory` was not given none may stay outside. All else there meets units that stay,
as it does outside.

Two kinds of nodes announce nothing, and what they need stays until the next step: in a backward with
`create_graph=True` whatever was fetched, and the units of parameters that somebody's `autograd.Function` or checkpoint
was given (`keep`).

[Note: prefetching]
Which units are on their way to the device is proposed here. fetch.py leaves out those with a pending update, whose
values a fetch would miss, and those without room. Which chunks are read ahead from the disk into RAM is decided by the
store that they come from (storage/chunk_cache.py), which expects the same order (`expect`). Training repeats the order
of its units, so a pass expects the order of the last pass of its kind (`UnitOrder`). Entering a unit prefetches the
next `Tuning.prefetch_units` units of that order. Ranks that share parameters gather small ones several at a time, up to
`Tuning.bucket` bytes ahead: a collective costs a delay, however little it carries. A unit that used the parameters of
others (its `guests`) gets those prefetched when it is entered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from offload.model.unit import Presence, Unit

MAX_REMEMBERED = 1 << 14
"""Units of one pass whose order is remembered."""


@dataclass(frozen=True)
class Ahead:
    """How far ahead of the unit in use others are fetched; see [Note: prefetching].

    Attributes:
        units: so many.
        nbytes: more than that as long as they take no more than this together; 0: no more.
    """

    units: int
    nbytes: int = 0


class UnitOrder:
    """The order in which units are entered; see [Note: prefetching].

    Args:
        ahead: how many units are prefetched.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._is_training = True
        self._entered: deque[Unit] = deque(maxlen=MAX_REMEMBERED)
        self._orders: dict[bool, Sequence[Unit]] = {}  # of the last pass with gradients, and of the last one without
        self._expected: deque[Unit] = deque()

    @property
    def is_training(self) -> bool:
        """Whether the pass that began last has gradients."""
        return self._is_training

    def begin_pass(self) -> Sequence[Unit]:
        """Begins a pass.

        Returns:
            The units that this pass will fetch, in order, if it is a training pass after one without gradients and they
            are known; else none.
        """
        if self._entered:
            self._orders[self._is_training] = tuple(self._entered)
            self._entered.clear()
        was_training, self._is_training = self._is_training, torch.is_grad_enabled()
        order = self._orders.get(self._is_training, ())
        self._expected = deque(order)
        return self._fetched(order) if self._is_training and not was_training else ()

    def _fetched(self, order: Sequence[Unit]) -> Sequence[Unit]:
        """What of an order of uses is fetched: units that stay once, unless they are there."""
        fetched: list[Unit] = []
        there = {unit for unit in order if unit.stays and unit.is_here}
        for unit in order:
            if unit not in there:
                fetched.append(unit)
                if unit.stays:
                    there.add(unit)
        return tuple(fetched)

    def enter(self, unit: Unit) -> None:
        """Records that a unit is entered."""
        if not self._entered or self._entered[-1] != unit:
            self._entered.append(unit)
            if unit in self._expected:
                while self._expected.popleft() != unit:
                    pass

    def expect_tiles(self, tiles: Sequence[Unit]) -> None:
        """Expects these tiles of a weight next, in place of those that the last pass used at this point.

        Of the weight's other tiles none is expected later in this pass.
        """
        weight, left = tiles[0].weight, list(self._expected)
        first = next((at for at, unit in enumerate(left) if unit.weight is weight), 0)
        later = next((at for at in range(first, len(left)) if left[at].weight is not weight), len(left))
        used = (unit for unit in left[later:] if unit.weight is not weight or unit in tiles)
        self._expected = deque((*tiles, *left[:first], *used))

    def after(self, unit: Unit) -> list[Unit]:
        """The units to have on the device, or on their way, while a unit is in use, the next one first.

        Those that are there and stay are passed over. Where the unit in use is one of them, the place of a unit that
        comes and goes is free for one more. A unit that comes twice counts twice: what is needed between stays away.
        """
        comes = (one for one in self._expected if not (one.is_here and one.stays))
        found = list(dict.fromkeys(islice(comes, self._places(unit))))
        left = self._ahead.nbytes - sum(one.nbytes for one in found)
        for one in comes:
            left -= one.nbytes
            if left < 0 or one is unit or one in found or one.weight is not None:  # of tiles the next step uses others
                break
            found.append(one)
        return found

    def _places(self, unit: Unit) -> int:
        return self._ahead.units + (self._ahead.units > 0 and unit.stays)

    def to_fetch(self, unit: Unit) -> list[Unit]:
        """The units to prefetch when a unit is entered: what is missing of `after`, once it is worth a collective.

        Beyond `Ahead.units` that is when less than half of it is there or on its way.
        """
        after = self.after(unit)
        there = sum(one.nbytes for one in after if not one.is_missing)
        if 2 * there >= sum(one.nbytes for one in after):
            after = after[: self._places(unit)]
        return [one for one in after if one.is_missing]


class UnitPolicy:
    """Which units are in use, which may be released, and which are prefetched; see the top of this file.

    Args:
        ahead: how many units are prefetched.

    Attributes:
        order: in which units are entered.
        makes_graph: whether a backward with `create_graph=True` ran since the last step, so that all stays.
    """

    def __init__(self, ahead: Ahead) -> None:
        self.order = UnitOrder(ahead)
        self.makes_graph = False
        self._gathered: list[Unit] = []  # by `gathered`
        self._used: list[Unit] = []  # by operations that run now
        self._kept: dict[Unit, None] = {}  # for nodes that announce nothing
        self._borrowed: dict[Unit, None] = {}  # by threads beside the one that trains, and of no use to that one
        # The unit whose backward began last, by thread: nodes of tensors on the CPU run in another one than a device's.
        self._backward: dict[int, Unit] = {}

    # What is in use.

    def gather(self, unit: Unit) -> None:
        """A unit is in use until `let_go`."""
        self._gathered.append(unit)

    def let_go(self, unit: Unit) -> None:
        """Ends one `gather` of a unit."""
        self._gathered.remove(unit)

    def is_gathered(self, unit: Unit) -> bool:
        """Whether `gathered` holds a unit."""
        return unit in self._gathered

    @property
    def holds_any(self) -> bool:
        """Whether `gathered` holds any unit."""
        return bool(self._gathered)

    def use_begins(self, units: Collection[Unit]) -> None:
        """An operation uses units, which do not release one another meanwhile."""
        self._used.extend(units)

    def use_ends(self, units: Collection[Unit]) -> None:
        """Ends the `use_begins` of these units. Uses are nested."""
        del self._used[max(0, len(self._used) - len(units)) :]

    def keep(self, units: Iterable[Unit]) -> None:
        """Keeps units until the next step, because a graph needs them and does not say when."""
        self._kept.update(dict.fromkeys(units))

    def backward_begins(self, unit: Unit) -> None:
        """In this thread the backward of a unit is the one that began last."""
        self._backward[threading.get_ident()] = unit

    def backward_ends(self) -> None:
        """No backward runs."""
        self._backward.clear()

    def borrow(self, unit: Unit) -> None:
        """A thread beside the one that trains has fetched a unit, which that one does not use."""
        self._borrowed[unit] = None

    def give_back(self, unit: Unit) -> None:
        """A unit is not borrowed any more: it was released, or the thread that trains uses it."""
        self._borrowed.pop(unit, None)

    @property
    def borrowed(self) -> list[Unit]:
        """The units that are borrowed."""
        return list(self._borrowed)

    def forget_calls(self) -> None:
        """Forgets uses and backwards, which raised or were interrupted, and will never end."""
        self._used.clear()
        self._backward.clear()

    def forget_graphs(self) -> None:
        """Forgets what stays for graphs, which are not used any more."""
        self.makes_graph = False
        self._kept.clear()

    def is_in_use(self, unit: Unit) -> bool:
        """Whether a unit must stay, whoever needs its memory."""
        in_backward_of = any(unit.encloses(inner) for inner in self._backward.values())
        is_used = unit.forwards > 0 or unit in self._gathered or unit in self._used or unit in self._kept
        return in_backward_of or is_used

    @property
    def why_more_stays(self) -> str | None:
        """Why units stay on the device that the plan does not count, in words; None: none does."""
        if self.makes_graph:
            return "a backward with create_graph=True keeps"
        return "what functions of autograd have saved until the next step, and one unit, are" if self._kept else None

    # What leaves, and what comes.

    def unused(self, present: Iterable[Unit], wanted: Collection[Unit]) -> list[Unit]:
        """The units to release.

        Args:
            present: those that have memory.
            wanted: those that stay, besides what is in use and what always stays.
        """
        return [unit for unit in self.idle(present) if unit not in wanted and not unit.stays]

    def idle(self, present: Iterable[Unit]) -> list[Unit]:
        """The units that nobody uses, those that stay among them.

        Args:
            present: those that have memory.
        """
        return [] if self.makes_graph else [unit for unit in present if not self.is_in_use(unit)]

    def wanted_with(self, unit: Unit) -> list[Unit]:
        """The units that stay while a unit is entered: itself, its guests, and units to come that are on their way.

        Units to come that are available, because they were in use before, do not stay. The store was told that each
        unit of the order is fetched (`expect`): it would read ahead, and keep in RAM, what nobody fetches.
        """
        return [unit, *unit.guests, *(one for one in self.order.after(unit) if one.is_coming)]

    def next_to(self, unit: Unit) -> Iterator[tuple[Unit, bool]]:
        """The units to prefetch when a unit is entered, the most urgent one first.

        Yields:
            (unit, whether the plan has counted its memory, so that there is room for it).
        """
        for guest in unit.guests:
            if guest.presence is Presence.RELEASED:
                yield guest, False
        for one in self.order.to_fetch(unit):
            yield one, self.why_more_stays is None
