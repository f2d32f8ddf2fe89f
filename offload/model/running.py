"""Which units' forwards run now, and in which threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload import torch_private
from offload.entries import Entries, entry
from offload.interrupts import uninterrupted, uninterrupted_lookup
from offload.model.flat_param import FlatParameters
from offload.model.torch_helpers import only_asks
from offload.model.unit import Unit


def _guard(func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Called by torch for an operation with a tensor that is not plain in this thread; see guard.py."""
    for kind in types:
        if (guard := getattr(kind, "guard", None)) is not None:
            return guard(func, types, args, kwargs)
    raise AssertionError("none of the tensors is guarded")


class _NotPlain:
    """The `__torch_function__` of tensors that are not plain in this thread. A thread overrides it."""

    @uninterrupted_lookup
    def __get__(self, here: Here, kind: type[Here]) -> Any:
        if torch.compiler.is_compiling():  # which cannot look at frames, and takes no fast path
            return _guard
        return torch_private.disabled_torch_function if only_asks(sys._getframe(1)) else _guard


class Here(threading.local):
    """What is true of one thread.

    `guarded`, `watched` and `opened` are the `__torch_function__` of classes of these names, see [Note: guarded
    parameters] in guard.py. Torch looks it up with each operation. So where it is that of plain tensors, no Python code
    runs.

    Attributes:
        entered: how often the thread has entered each unit whose forward it runs.
        owner: the thread whose pass that is.
        guarded: see above.
        watched: see above.
        opened: see above.
    """

    owner: threading.Thread
    guarded: Any = _NotPlain()
    watched: Any = _NotPlain()
    opened: Any = _NotPlain()

    def __init__(self) -> None:
        self.entered: dict[Unit, int] = {}


class RunningUnits:
    """Which units' forwards run now.

    Their parameters are plain in the threads that run them; all others are guarded (guard.py). A unit runs from the
    entry of the first of its modules until the last one is left. A forward that was interrupted never says that it
    ended: its unit counts as running until `reset`.

    Args:
        parameters: the model's.
        entries: the threads in the run.
    """

    def __init__(self, parameters: FlatParameters, entries: Entries) -> None:
        self._parameters = parameters
        self.entries = entries
        self._units: dict[Unit, None] = {}  # that run, in the order in which they were entered, by any thread
        self.here = Here()

    @entry
    @uninterrupted
    def enter(self, unit: Unit) -> None:
        """Called when a module of `unit`, whose values are current, begins its forward in this thread."""
        here = self.here
        if not here.entered:
            here.watched = torch_private.disabled_torch_function
            here.owner = self.entries.pass_begins()
        if not unit.forwards:
            self._parameters.watch(unit)
            self._units[unit] = None
        unit.forwards += 1
        here.entered[unit] = here.entered.get(unit, 0) + 1

    @entry
    @uninterrupted
    def leave(self, unit: Unit) -> None:
        """Called when a module of `unit` ends its forward.

        It does nothing if this thread did not begin the forward, or has forgotten it.
        """
        entered = self.here.entered
        if unit not in entered:
            return
        if entered[unit] > 1:
            entered[unit] -= 1
        else:
            del entered[unit]
        if not entered:
            self._end_pass()
        if unit.forwards == 1:
            del self._units[unit]
            self._parameters.guard(unit)
        unit.forwards = max(unit.forwards - 1, 0)  # it is 0 where another thread has forgotten all forwards

    def _end_pass(self) -> None:
        del self.here.watched
        self.entries.pass_ends(self.here.owner)

    def runs_here(self, unit: Unit) -> bool:
        """Whether this thread runs a forward of `unit`."""
        return unit in self.here.entered

    def watches(self, unit: Unit, number: int) -> bool:
        """Whether parameter `number` of `unit` is plain now in the threads that run the unit."""
        return unit.forwards > 0 and number in unit.watched

    @property
    def units(self) -> Sequence[Unit]:
        """The units that run, in the order in which they were entered."""
        return tuple(self._units)

    @property
    def units_here(self) -> Sequence[Unit]:
        """The units that this thread runs, in the order in which they were entered."""
        return tuple(self.here.entered)

    @entry
    @uninterrupted
    def reset(self) -> None:
        """Counts no unit as running, since a forward that raised, or was interrupted, never ended."""
        for unit in self._units:
            self._parameters.guard(unit)
            unit.forwards = 0
        self._units.clear()
        if self.here.entered:
            self.here.entered.clear()
            self._end_pass()
