"""Pending updates: new values of parameters that are applied when somebody uses the parameters.

`step()` queues an update of all parameters. It is applied a unit at a time: when a forward enters the unit, or when
anybody uses one of its parameters (guard.py). The next `step()`, `synchronize()` and closing apply what is left. Where
the states are in RAM and the kernels write into the model, `step()` applies all of it, and nothing is ever pending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from offload.errors import StaleParameterError
from offload.layout import Flat, Layout
from offload.model.flat_param import FlatParameters
from offload.model.torch_helpers import call_hidden
from offload.model.transfer import UnitTransfers
from offload.model.unit import Unit
from offload.model.units import ROOT
from offload.optim.step import Step
from offload.run import Owner, Run


def order_of_updates(layout: Layout, before: Sequence[int], applied: Sequence[int]) -> list[int]:
    """The order in which a step is queued.

    It is that in which the last updates were applied, which is that of a forward. Over several ranks it is that of the
    layout, the root unit's first.

    Args:
        layout: of the trained parameters.
        before: the last order.
        applied: the flat parameters whose updates were applied since then, in that order.
    """
    if layout.ranks > 1:
        return sorted(range(len(layout.flats)), key=lambda flat: layout.flats[flat].unit != ROOT)
    first = dict.fromkeys(applied)
    return [*first, *(flat for flat in before if flat not in first)]


def updates_up_to(layout: Layout, pending: Collection[int], flats: Iterable[Flat]) -> list[int]:
    """The updates to apply so that a unit has its new values.

    They are its own. Where ranks exchange new values, all of them apply all updates up to these, in one order.

    Args:
        layout: of the trained parameters.
        pending: the flat parameters with a pending update, in the order of the queue.
        flats: those of the unit.
    """
    wanted = [flat.index for flat in flats if flat.index in pending]
    if wanted and layout.replicas > 1:
        queue = list(pending)
        wanted = queue[: 1 + max(map(queue.index, wanted))]
    return wanted


class PendingUpdates:
    """The updates that are not in the model yet.

    Over several ranks an update takes collectives, which all ranks have to call in one order: that of the layout, the
    root unit's first. Where parameters are resident, `step()` launches all of them (`launch`), and who uses a unit
    waits for that unit's. Where they are streamed, all updates before that of the unit in use are applied with it.

    Args:
        run: what the parts of a run share.
        step: makes the new values.
        parameters: the model's.
        transfers: of streamed units.
        owner: the optimizer.
    """

    def __init__(
        self, run: Run, step: Step, parameters: FlatParameters, transfers: UnitTransfers, owner: Owner
    ) -> None:
        self._layout = run.layout
        self._timeline = run.timeline
        self._step = step
        self._parameters = parameters
        self._transfers = transfers
        self._owner = owner
        self._health = run.health
        self._active: dict[int, list[int]] = {}
        self._order: list[int] = [flat.index for flat in run.layout.flats]
        self._applied: list[int] = []

    def begin(self, active: Sequence[int]) -> Sequence[int]:
        """Called before a step is queued.

        Args:
            active: the parameters that it changes.

        Returns:
            All flat parameters in the order in which the last updates were applied, which is that of a forward.
        """
        self._active = {flat.index: [] for flat in self._layout.flats}
        for number in active:
            self._active[self._parameters.flat_of(number)].append(number)
        self._order = order_of_updates(self._layout, self._order, self._applied)
        self._applied = []
        return self._order

    def is_pending(self, unit: Unit) -> bool:
        """Whether an update of a unit is still to be applied."""
        return any(flat.index in self._step.pending for flat in unit.flats)

    def launch(self) -> None:
        """Makes all new values of this rank and sends them to the other ranks. Who uses a unit waits for theirs."""
        self._owner.require_usable()
        with self._timeline.span("apply_s"):
            call_hidden(self._start_all)

    def _start_all(self) -> None:
        try:
            for group in self._step.together(list(self._step.pending)):
                self._step.start_apply(group)
            self._step.send_rest()
        except BaseException as error:
            self._health.fail(error)
            raise

    def apply(self, unit: Unit) -> None:
        """Applies the pending update of a unit. Raises what went wrong with the step, too.

        Raises:
            StaleParameterError: if others wrote to a parameter after the step, which the update would undo.
        """
        if self._step.pending:
            self._apply(updates_up_to(self._layout, self._step.pending, unit.flats))

    def apply_all(self) -> None:
        """Applies all updates that are pending."""
        if self._step.pending:
            self._apply(list(self._step.pending))

    def before_gradients(self) -> None:
        """Applies all updates before a gradient comes, over several ranks.

        Gradients go to memory that the last ones occupy until their step is applied. Over several ranks, those of any
        rank do.
        """
        if self._layout.ranks > 1:
            self.apply_all()

    def require_applied(self, number: int) -> None:
        """Requires that a gradient of parameter `number`, which comes now, was made from its current value.

        Raises:
            StaleParameterError: if it was made from the value before the last step.
        """
        flat = self._parameters.flat_of(number)
        if flat in self._step.pending and number in self._active[flat]:
            name = self._layout.specs[number].name
            raise StaleParameterError(
                f"a gradient reached {name} that was made from its value before the last step(): by a graph older than "
                "that step; run the forward again after step(), as torch asks for too"
            )

    def _apply(self, flats: Collection[int]) -> None:
        if not flats:
            return
        self._owner.require_usable()
        with self._timeline.span("apply_s"):
            call_hidden(self._apply_each, flats)

    def _apply_each(self, flats: Collection[int]) -> None:
        for group in self._step.together([flat for flat in flats if flat in self._step.pending]):
            for flat in group:
                self._require_unwritten(self._active[flat])
            try:
                self._step.start_apply(group)
                for flat in group:
                    self._finish(flat)
            except BaseException as error:
                # Some chunks are a step ahead of others: every later result would be wrong.
                self._health.fail(error)
                raise

    def _finish(self, flat: int) -> None:
        self._step.apply(flat)
        self.replaced(flat, self._active[flat])
        self._applied.append(flat)

    def replaced(self, flat: int, numbers: Sequence[int]) -> None:
        """Called when all new values of a flat parameter are where its parameters are kept.

        Args:
            flat: its number.
            numbers: those of its parameters that have new values.
        """
        self._parameters.bump_versions(numbers)
        self._transfers.flat_updated(flat)

    def _require_unwritten(self, numbers: Sequence[int]) -> None:
        for number in self._parameters.find_outside_writes(numbers):
            name = self._layout.specs[number].name
            raise StaleParameterError(
                f"{name} was written to after step(), through a view of it that was taken before, and its new value, "
                "which is still to be applied, would overwrite that: take views and .data anew after step(), or call "
                "optimizer.synchronize() before writing through old ones"
            )
