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

A run knows for how long the kernels, each drive and each way of the link worked, and so does the simulation. One that
worked longer need not matter: it may have worked beside something else. So the iteration is simulated again with the
rate that each had, one at a time. What changes the prediction most towards what was measured is named. What all of them
together do not explain is time in which the disk was waited for, or compute and the loop itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from offload import torch_private
from offload.devices.copies import DOWN, UP, Copier
from offload.layout import Layout
from offload.planner.fastest import uses
from offload.planner.measured import Here
from offload.planner.placement import Placement
from offload.planner.simulate import COMMITTED_BY, Iteration, NotPredicted, seconds_of, simulate
from offload.planner.simulate.lines import COMPUTE, DISK, KERNELS, LINK
from offload.planner.simulate.speeds import LinkSpeed, Passes, Speeds
from offload.planner.simulate.what_if import passes_of
from offload.planner.verdict import Work
from offload.profiling import Timeline

STEPS = 20
"""After so many steps both are compared."""
FIRST = 3
"""Steps that are not counted: memory is touched for the first time, kernels are chosen."""
MOST_USES = 4000
"""Of chunks in an iteration: one or two seconds of a CPU."""
FAR = 4 / 3
"""Times as long, or as short, that a line is written for."""
NEAR = 0.1
"""A resource that worked less than this share longer, or shorter, than predicted had the predicted rate."""
_KERNELS, _DRIVES, _UP, _DOWN = "kernels", "drive", f"{LINK}: {UP}", f"{LINK}: {DOWN}"
"""Resources, as a simulation calls them; all drives are one here: the one that works longest."""


class Prediction:
    """See [Note: predicted and measured].

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where.
        work: what a micro-batch of one token computes.
        here: how fast this machine is.
        paths: the directories of the run, one for each drive.

    Attributes:
        least_s: the seconds of an iteration without compute; None: it is not predicted.
    """

    def __init__(self, layout: Layout, placement: Placement, work: Work, here: Here, paths: Sequence[Path]) -> None:
        self._layout, self._placement, self._work, self._here = layout, placement, work, here
        self._paths = paths
        self.least_s: float | None = None
        if not isinstance(here.speeds, NotPredicted) and uses(layout, placement.choice) <= MOST_USES:
            least = seconds_of(layout, placement, Passes(), here.speeds)
            self.least_s = None if isinstance(least, NotPredicted) else least
        self._given = 0, 0  # tokens, and forwards that had them; replaced at once, since any thread may ask
        self._steps = 0
        self._ends: deque[float] = deque(maxlen=STEPS - FIRST + 1)
        self._before: Mapping[str, float] = {}
        self._passes: Passes | None = None
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
            tokens, forwards = self._given
            self._given = tokens + _tokens_in((args, kwargs)), forwards + 1

    @property
    def figures(self) -> dict[str, float]:
        """What `stats()` has of it: numbers always, which people subtract; nan: it is not known."""
        known = {"iteration_s": self.measured_s, "predicted_iteration_s": self.predicted_s}
        return {name: nan if seconds is None else seconds for name, seconds in known.items()}

    @property
    def measured_s(self) -> float | None:
        """The median of the last iterations; None: there were too few."""
        ends = tuple(self._ends)  # at once: `stats()` may be asked in any thread, while a step ends
        times = [after - before for before, after in pairwise(ends)]
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
        tokens, forwards = self._given
        if self._found is None and flops and tokens and not isinstance(speeds, NotPredicted):
            work = replace(self._work, tokens=max(round(tokens / forwards), 1))
            self._passes = passes_of(self._layout, work, flops)
            found = simulate(self._layout, self._placement, self._passes, speeds)
            self._found = None if isinstance(found, NotPredicted) else found
        return self._found

    def step_ends(self, timeline: Timeline, copier: Copier) -> str | None:
        """Called after each step.

        Args:
            timeline: counts what the run does.
            copier: copies over the link.

        Returns:
            After STEPS steps what is to be said, if the prediction is far off.
        """
        self._steps += 1
        if self._steps >= FIRST:
            self._ends.append(perf_counter())
        if self.least_s is None or self._steps not in (FIRST, STEPS):
            return None
        now = {name: timeline.seconds(name) for name in ("adam_s", "wait_nvme_s")}
        now |= timeline.busy_s | {f"{LINK}: {way}": seconds for way, seconds in copier.busy_s.items()}
        before, self._before = self._before, now
        measured, predicted, found = self.measured_s, self.predicted_s, self._predict()
        if not before or measured is None or predicted is None or found is None:
            return None
        if 1 / FAR <= measured / predicted <= FAR:
            return None
        each = {name: (now[name] - before.get(name, 0.0)) / (STEPS - FIRST) for name in now}
        name, took, planned = self._differs_most(found, measured - (predicted - found.seconds), each)
        return (
            f"offload: an iteration takes {measured:.3g} s, and {predicted:.3g} s were predicted from what `offload "
            f"probe` measured. What differs most: {name}, {took:.3g} s and not {planned:.3g} s. `offload probe` "
            "measures again; optimizer.timeline(file) shows what runs when"
        )

    def _differs_most(self, found: Iteration, measured_s: float, each: Mapping[str, float]) -> tuple[str, float, float]:
        """What explains best why an iteration takes longer than predicted, or less long; see the top of this file.

        Args:
            found: the predicted iteration.
            measured_s: what one takes, without a commit.
            each: the seconds of an iteration by the names of `stats()`, and those in which each drive and each way of
                the link worked, by the names of a simulation.

        Returns:
            A resource in words, its seconds of an iteration, and those that were predicted.
        """
        pairs = self._worked(found, each)
        factors = {name: planned / took for name, (took, planned) in pairs.items() if _is_off(took, planned)}
        corrected = self._with_rates(factors) or found
        explains: dict[str, float] = {}
        told: dict[str, tuple[str, float, float]] = {}
        for name, factor in factors.items():
            one = corrected if len(factors) == 1 else self._with_rates({name: factor})
            explains[name] = 0.0 if one is None else one.seconds - found.seconds
            told[name] = self._words(name, each), *pairs[name]
        waits = each["wait_nvme_s"] - corrected.parts.get(DISK, 0.0)
        explains[DISK] = waits
        told[DISK] = f"waits for the {DISK}", each["wait_nvme_s"], corrected.parts.get(DISK, 0.0)
        left, computes = measured_s - corrected.seconds - waits, found.busy_s["compute"]
        explains[COMPUTE] = left
        told[COMPUTE] = f"{COMPUTE}, and the loop itself", max(computes + left, 0.0), computes
        sign = 1 if measured_s > found.seconds else -1
        return told[max(explains, key=lambda name: sign * explains[name])]

    def _worked(self, found: Iteration, each: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """For how long each resource worked in an iteration, measured and predicted."""

        def longest(seconds: Mapping[str, float]) -> float:
            return max((one for name, one in seconds.items() if name.startswith(_DRIVES)), default=0.0)

        ways = {way: (each.get(way, 0.0), found.busy_s.get(way, 0.0)) for way in (_UP, _DOWN)}
        kernels = each["adam_s"], found.busy_s[_KERNELS]
        return {_KERNELS: kernels, _DRIVES: (longest(each), longest(found.busy_s))} | ways

    def _words(self, resource: str, each: Mapping[str, float]) -> str:
        if resource == _DRIVES:
            drives = [name for name in each if name.startswith(_DRIVES)]
            number = int(max(drives, key=lambda name: each[name]).removeprefix(_DRIVES))
            return f"the {DISK} of {self._paths[number]}"
        return {_KERNELS: KERNELS, _UP: f"the {LINK} to the device", _DOWN: f"the {LINK} to RAM"}[resource]

    def _with_rates(self, factors: Mapping[str, float]) -> Iteration | None:
        """The iteration, simulated with other rates of some resources.

        Args:
            factors: how many times as fast each of them is.
        """
        speeds, passes = self._here.speeds, self._passes
        if not factors or isinstance(speeds, NotPredicted) or passes is None:
            return None
        found = simulate(self._layout, self._placement, passes, _with_factors(speeds, factors))
        return None if isinstance(found, NotPredicted) else found


def _is_off(took: float, planned: float) -> bool:
    """Whether a resource had another rate than was predicted. What did nothing, or was to do nothing, has none."""
    return took > 0 and planned > 0 and abs(took / planned - 1) > NEAR


def _with_factors(speeds: Speeds, factors: Mapping[str, float]) -> Speeds:
    of_drive, up, down = (factors.get(name, 1.0) for name in (_DRIVES, _UP, _DOWN))
    drives = [one.scaled(of_drive) for one in speeds.drives]
    link = speeds.link
    if link is not None:
        ways = up * link.up, down * link.down
        link = LinkSpeed(*ways, link.both * sum(ways) / (link.up + link.down))
    kernels = factors.get(_KERNELS, 1.0) * speeds.elements_per_s
    return replace(speeds, elements_per_s=kernels, drives=drives, link=link)


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
