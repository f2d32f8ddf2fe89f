"""What an iteration of a run takes, as predicted before it begins, beside what it takes.

[Note: predicted and measured]
What moves is known at construction, so the first line says the seconds of an iteration without compute: none takes
less. How many tokens a micro-batch has shows in the first forwards, from what is given to the model: the elements of
the largest matrix of whole numbers, or the vectors of the largest tensor of floating-point numbers with two or three
dimensions. Of images and videos, which have more dimensions, nothing is predicted: a model makes patches of them, and
the times and classes that come with them are no tokens. With the tokens the iteration is simulated once, when somebody
asks for it, or after STEPS steps. Then a line says if it took far longer, or far less, than predicted, and what differs
most. What is measured is a median, in which commits show only if they delay a good part of all iterations; what is
predicted has them only then, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import nan
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from offload import torch_private
from offload.layout import Layout
from offload.planner.fastest import uses
from offload.planner.measured import Here
from offload.planner.placement import Placement
from offload.planner.simulate import COMMITTED_BY, Iteration, NotPredicted, seconds_of, simulate
from offload.planner.simulate.lines import COMPUTE, DISK, KERNELS
from offload.planner.simulate.speeds import Passes
from offload.planner.simulate.what_if import passes_of
from offload.planner.verdict import Work

STEPS = 20
"""After so many steps both are compared."""
FIRST = 3
"""Steps that are not counted: memory is touched for the first time, kernels are chosen."""
MOST_USES = 4000
"""Of chunks in an iteration: one or two seconds of a CPU."""
FAR = 4 / 3
"""Times as long, or as short, that a line is written for."""


class Prediction:
    """See [Note: predicted and measured].

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where.
        work: what a micro-batch of one token computes.
        here: how fast this machine is.

    Attributes:
        least_s: the seconds of an iteration without compute; None: it is not predicted.
    """

    def __init__(self, layout: Layout, placement: Placement, work: Work, here: Here) -> None:
        self._layout, self._placement, self._work, self._here = layout, placement, work, here
        self.least_s: float | None = None
        if not isinstance(here.speeds, NotPredicted) and uses(layout, placement.choice) <= MOST_USES:
            least = seconds_of(layout, placement, Passes(), here.speeds)
            self.least_s = None if isinstance(least, NotPredicted) else least
        self._tokens = self._forwards = self._steps = 0
        self._ends: deque[float] = deque(maxlen=STEPS - FIRST + 1)
        self._before: Mapping[str, float] = {}
        self._found: Iteration | None = None

    @property
    def words(self) -> str:
        """What the first line says of it; empty: it is not predicted."""
        flops = self._here.flops_per_s
        if self.least_s is None or flops is None:
            return ""
        tokens = self.least_s * flops / (self._placement.choice.grads.micro_batches * self._work.flops)
        return (
            f"; a step moves this in {self.least_s:.3g} s (predicted), as long as {tokens:,.0f} tokens a micro-batch "
            "compute"
        )

    @property
    def is_counting(self) -> bool:
        """Whether it wants to know what is given to the model."""
        return self.least_s is not None and self._steps < STEPS

    def forward_begins(self, model: object, args: object, kwargs: object) -> None:
        """Counts the tokens of what a forward is given, as a hook."""
        if self.is_counting and torch.is_grad_enabled():
            self._tokens += _tokens_in((args, kwargs))
            self._forwards += 1

    @property
    def figures(self) -> dict[str, float]:
        """What `stats()` has of it: numbers always, which people subtract; nan: it is not known."""
        known = {"iteration_s": self.measured_s, "predicted_iteration_s": self.predicted_s}
        return {name: nan if seconds is None else seconds for name, seconds in known.items()}

    @property
    def measured_s(self) -> float | None:
        """The median of the last iterations; None: there were too few."""
        times = [after - before for before, after in pairwise(self._ends)]
        return median(times) if times else None

    @property
    def predicted_s(self) -> float | None:
        """The seconds of an iteration with as many tokens as were given to the model; None: it is not predicted."""
        found, every = self._predict(), self._placement.choice.commits.every
        if found is None:
            return None
        return found.seconds + (found.commit_s / every if every and every <= 2 * COMMITTED_BY else 0.0)

    def _predict(self) -> Iteration | None:
        flops, speeds = self._here.flops_per_s, self._here.speeds
        if self._found is None and flops and self._tokens and not isinstance(speeds, NotPredicted):
            work = replace(self._work, tokens=max(round(self._tokens / self._forwards), 1))
            found = simulate(self._layout, self._placement, passes_of(self._layout, work, flops), speeds)
            self._found = None if isinstance(found, NotPredicted) else found
        return self._found

    def step_ends(self, seconds: Callable[[str], float]) -> str | None:
        """Called after each step.

        Args:
            seconds: returns the seconds counted so far under a name of `stats()`.

        Returns:
            After STEPS steps what is to be said, if the prediction is far off.
        """
        self._steps += 1
        if self._steps >= FIRST:
            self._ends.append(perf_counter())
        if self.least_s is None or self._steps not in (FIRST, STEPS):
            return None
        now = {name: seconds(name) for name in ("adam_s", "wait_nvme_s", "step_s", "apply_s", "gradient_s")}
        before, self._before = self._before, now
        measured, predicted, found = self.measured_s, self.predicted_s, self._predict()
        if not before or measured is None or predicted is None or found is None:
            return None
        if 1 / FAR <= measured / predicted <= FAR:
            return None
        each = {name: (now[name] - before[name]) / (STEPS - FIRST) for name in now}
        pairs = self._pairs(found, measured, each)
        name = max(pairs, key=lambda one: abs(pairs[one][0] - pairs[one][1]))
        took, planned = pairs[name]
        return (
            f"offload: an iteration takes {measured:.3g} s, and {predicted:.3g} s were predicted from what `offload "
            f"probe` measured. What differs most: {name}, {took:.3g} s and not {planned:.3g} s. `offload probe` "
            "measures again; optimizer.timeline(file) shows what runs when"
        )

    def _pairs(self, found: Iteration, measured_s: float, each: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """By resource, the seconds of an iteration that were measured, and those that were predicted.

        Where the model is on a device, nobody waits for what it computes: that is what is left.
        """
        kernels = (each["adam_s"], found.busy_s["kernels"])
        disk = (each["wait_nvme_s"], found.parts.get(DISK, 0.0))
        own = each["step_s"] + each["apply_s"] + each["gradient_s"]
        planned = found.busy_s["compute"]
        if not self._placement.is_direct:
            own, planned = each["wait_nvme_s"], found.seconds - disk[1]
        rest = (max(measured_s - own, 0.0), planned)
        return {KERNELS: kernels, f"waits for the {DISK}": disk, f"{COMPUTE}, and the loop itself": rest}


def _tokens_in(given: Any) -> int:
    """How many tokens are given to a model; 0: that is not known."""
    tensors: list[Tensor] = []
    torch_private.tree_map_only(Tensor, tensors.append, given)
    whole = [one for one in tensors if not one.is_floating_point() and one.dtype is not torch.bool]
    if matrices := [one.numel() for one in whole if one.dim() == 2]:
        return max(matrices)
    vectors = [0]
    for one in tensors:
        if one.is_floating_point() and one.dim() > 3:
            return 0
        if one.is_floating_point() and one.dim() > 1 and one.shape[-1]:
            vectors.append(one.numel() // one.shape[-1])
    return max(vectors) or max((one.numel() for one in whole), default=0)
