"""New parameters land in the model only inside waits.

A step that was queued is brought into the model a unit at a time, when the next forward enters the unit, and as a whole
by whatever has to see all of it: the next `step()`, `synchronize()`, saving or loading a state_dict. In between a
parameter has its whole old value; who wrote to it then, or made a gradient from it, would get a wrong number, and gets
a StaleParameterError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from offload.errors import StaleParameterError
from offload.layout import Layout
from offload.module.parameters import Parameters
from offload.module.units import ROOT
from offload.optim.step import Step
from offload.timeline import Timeline


class Landing:
    """Args: usable: raises if the optimizer cannot go on; failed: called with what cut a landing off; landed: called
    with each flat whose new values are there; opens: called with a unit that is about to land ahead of its use;
    streams: whether parameters are on the device around their use only.

    Over several ranks a landing is a collective, and which units a forward enters may differ among them: so flats land
    in the order of the layout, the root's first, and with a flat all before it.
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
        opens: Callable[[str], None],
        *,
        streams: bool,
    ) -> None:
        self._layout = layout
        self._step = step
        self._parameters = parameters
        self._timeline = timeline
        self._usable = usable
        self._failed = failed
        self._on_device = landed
        self._opens = opens
        self._streams = streams
        self._flats_of: dict[str, list[int]] = {flat.unit: [] for flat in layout.flats}
        for flat in layout.flats:
            self._flats_of[flat.unit].append(flat.index)
        self._active: dict[int, list[int]] = {}
        self._order: list[int] = [flat.index for flat in layout.flats]
        self._landed: list[int] = []
        self._ahead: str | None = None  # the unit that was begun ahead, and has not been entered yet
        self._lock = threading.RLock()

    def begins(self, active: Sequence[int]) -> Sequence[int]:
        """Notes which parameters a step is about to change; returns all flats in the order of the last forward."""
        self._active = {flat.index: [] for flat in self._layout.flats}
        for number in active:
            self._active[self._layout.places[number][0]].append(number)
        first = dict.fromkeys(self._landed)
        self._order = [*first, *(flat for flat in self._order if flat not in first)]
        self._landed = []
        self._ahead = None
        if self._layout.ranks > 1:
            self._order = sorted(range(len(self._layout.flats)), key=lambda flat: self._layout.flats[flat].unit != ROOT)
        return self._order

    def is_pending(self, number: int) -> bool:
        """Whether the new value of parameter `number` is still to land."""
        flat = self._layout.places[number][0]
        return flat in self._step.pending and number in self._active[flat]

    def is_unit_pending(self, name: str) -> bool:
        """Whether new values of a unit are still to land."""
        return any(flat in self._step.pending for flat in self._flats_of.get(name, ()))

    def unit(self, name: str) -> None:
        """Lands the parameters of a unit. Raises what went wrong with the step, and StaleParameterError."""
        if name == self._ahead:
            self._ahead = None
        if self._step.pending:
            self._land(self._up_to(name))

    def _up_to(self, name: str) -> list[int]:
        """What has to land so that a unit does."""
        wanted = [flat for flat in self._flats_of.get(name, ()) if flat in self._step.pending]
        if wanted and self._layout.ranks > 1:
            queue = list(self._step.pending)
            wanted = queue[: 1 + max(map(queue.index, wanted))]
        return wanted

    def everything(self) -> None:
        """Lands what is left."""
        if self._step.pending:
            self._land(list(self._step.pending))

    def ahead(self) -> bool:
        """Over several ranks, begins to land what comes next, which then travels beside the forward of what has landed.

        Returns: whether streamed parameters of another unit have their new values.
        """
        if self._layout.ranks == 1 or not self._step.pending or self._ahead is not None:
            return False
        flat = next(iter(self._step.pending))
        self._ahead = self._layout.flats[flat].unit
        if self._streams:
            self._opens(self._ahead)
            self._land(self._up_to(self._ahead))
        else:
            self._usable()
            with self._lock, self._timeline.span("landing_s"):
                self._require_unwritten(self._active[flat])
                try:
                    self._step.begin_landing(flat)
                except BaseException as error:
                    self._failed(error)
                    raise
        return self._streams

    def before_gradients(self) -> None:
        """Over several ranks gradients go, others' too, to where the last ones are until their step has landed."""
        if self._layout.ranks > 1:
            self.everything()

    def require_landed(self, number: int) -> None:
        """Raises: StaleParameterError if a gradient of `number` was made from its old value."""
        if self.is_pending(number):
            name = self._layout.specs[number].name
            raise StaleParameterError(
                f"a gradient reached {name} that was made from its value before the last step(): by a graph older than "
                "that, or by using it without the forward of a module that holds it; call optimizer.synchronize() "
                "after step()"
            )

    def _land(self, flats: Collection[int]) -> None:
        self._usable()
        # A forward in another thread waits for this one, and then finds nothing left to do.
        with self._lock, self._timeline.span("landing_s"):
            for flat in flats:
                if flat not in self._step.pending:
                    continue
                numbers = self._active[flat]
                self._require_unwritten(numbers)
                try:
                    self._step.land(flat)
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
                f"{name} was written to between step() and the moment its new value landed, which would overwrite "
                "that: call optimizer.synchronize() after step(), before writing to parameters"
            )
