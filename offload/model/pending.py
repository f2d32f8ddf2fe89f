"""Applying a pending step to the model, unit by unit, when somebody uses it.

A step that was queued is applied a unit at a time: when a forward enters the unit, or when anybody uses one of its
parameters (guard.py); and as a whole by the next `step()`, `synchronize()` and closing. Where all of it is in RAM and
the kernels write into the model it is applied inside `step()`, and nothing is ever pending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from offload.errors import StaleParameterError
from offload.layout import Layout
from offload.model.flat_param import Parameters
from offload.model.hiding import hidden
from offload.model.units import ROOT
from offload.optim.adam import Step
from offload.profiling import Timeline


class Landing:
    """Args: usable: raises if the optimizer cannot go on; failed: called with what cut a landing off; landed: called
    with each flat whose new values are there.

    Over several ranks applying takes collectives, in the order of the layout, the root's first. Of resident ones all
    are launched by `launch` inside `step()`, and whoever uses a unit waits for its own. Streamed ones are applied by
    forwards, which ranks run alike, a flat with all before it.
    """

    def __init__(
        self,
        layout: Layout,
        step: Step,
        parameters: Parameters,
        timeline: Timeline,
        usable: Callable[[], None],
        failed: Callable[[BaseException], None],
        landed: Callable[[int], None],
    ) -> None:
        self._layout = layout
        self._step = step
        self._parameters = parameters
        self._timeline = timeline
        self._usable = usable
        self._failed = failed
        self._on_device = landed
        self._flats_of: dict[str, list[int]] = {flat.unit: [] for flat in layout.flats}
        for flat in layout.flats:
            self._flats_of[flat.unit].append(flat.index)
        self._active: dict[int, list[int]] = {}
        self._order: list[int] = [flat.index for flat in layout.flats]
        self._landed: list[int] = []
        self._lock = threading.RLock()

    def begins(self, active: Sequence[int]) -> Sequence[int]:
        """Notes which parameters a step is about to change; returns all flats in the order of the last forward."""
        self._active = {flat.index: [] for flat in self._layout.flats}
        for number in active:
            self._active[self._layout.locations[number][0]].append(number)
        first = dict.fromkeys(self._landed)
        self._order = [*first, *(flat for flat in self._order if flat not in first)]
        self._landed = []
        if self._layout.ranks > 1:
            self._order = sorted(range(len(self._layout.flats)), key=lambda flat: self._layout.flats[flat].unit != ROOT)
        return self._order

    def launch(self) -> None:
        """Makes all new values of this rank and sends them to the others; use waits for theirs."""
        self._usable()
        with self._lock, self._timeline.span("landing_s"), hidden():
            try:
                for flat in list(self._step.pending):
                    self._step.start_apply(flat)
            except BaseException as error:
                self._failed(error)
                raise

    def is_pending(self, number: int) -> bool:
        """Whether the new value of parameter `number` is still to be applied."""
        flat = self._layout.locations[number][0]
        return flat in self._step.pending and number in self._active[flat]

    def is_unit_pending(self, name: str) -> bool:
        """Whether new values of a unit are still to be applied."""
        return any(flat in self._step.pending for flat in self._flats_of.get(name, ()))

    def unit(self, name: str) -> None:
        """Applies what is pending of a unit. Raises what went wrong with the step, and StaleParameterError."""
        if self._step.pending:
            self._land(self._up_to(name))

    def _up_to(self, name: str) -> list[int]:
        """The flats to apply so that a unit has its new values."""
        wanted = [flat for flat in self._flats_of.get(name, ()) if flat in self._step.pending]
        if wanted and self._layout.replicas > 1:
            queue = list(self._step.pending)
            wanted = queue[: 1 + max(map(queue.index, wanted))]
        return wanted

    def everything(self) -> None:
        """Applies what is left."""
        if self._step.pending:
            self._land(list(self._step.pending))

    def before_gradients(self) -> None:
        """Over several ranks gradients go, others' too, to where the last ones are until their step is applied."""
        if self._layout.ranks > 1:
            self.everything()

    def require_landed(self, number: int) -> None:
        """Raises: StaleParameterError if a gradient of `number` was made from its old value."""
        if self.is_pending(number):
            name = self._layout.specs[number].name
            raise StaleParameterError(
                f"a gradient reached {name} that was made from its value before the last step(): by a graph older than "
                "that step; run the forward again after step(), as torch asks for too"
            )

    def _land(self, flats: Collection[int]) -> None:
        if not flats:
            return
        self._usable()
        # A forward in another thread waits for this one, and then finds nothing left to do.
        with self._lock, self._timeline.span("landing_s"), hidden():
            for flat in flats:
                if flat not in self._step.pending:
                    continue
                numbers = self._active[flat]
                self._require_unwritten(numbers)
                try:
                    self._step.apply(flat)
                    self._parameters.written_here(numbers)
                    self._on_device(flat)
                except BaseException as error:
                    # Some chunks are a step further than others: nothing calculated from here on would be right.
                    self._failed(error)
                    raise
                self._landed.append(flat)

    def _require_unwritten(self, numbers: Sequence[int]) -> None:
        for number in self._parameters.written_outside(numbers):
            name = self._layout.specs[number].name
            raise StaleParameterError(
                f"{name} was written to after step(), through a view of it that was taken before, and its new value, "
                "which is still to be applied, would overwrite that: take views and .data anew after step(), or call "
                "optimizer.synchronize() before writing through old ones"
            )
