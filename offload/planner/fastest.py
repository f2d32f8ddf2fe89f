"""Which placement makes the fastest steps, of those that fit where the user leaves tiers open.

[Note: what is compared]
Whole placements are simulated, with the rates that `offload probe` measured on this machine. What decides within one
stays as it is: who gets the next byte of the device (share.py), which chunks stay in RAM. The first candidate is the
one that moves the fewest bytes over the disk, then over the link; it is taken where rates are not known, or a run is
not simulated.

How many tokens a step will have is not known when this is decided. With no compute placements differ most. So another
one is taken if it is LEAST_GAIN times as fast without compute, and no slower with as much compute as takes what the
first one takes without, and with four times as much. Less is within what a simulation is off, and rates of products are
not asked for.

A construction must not get slow by it. One that moves no fewer bytes over the disk and the link than the first one, and
steps no fewer elements in RAM, is not simulated. Neither is one of which the disk alone takes as long as the first one.
What is left is simulated only for MOST_USES of chunks in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from offload.choices import Choice
from offload.layout import Layout
from offload.planner.choice import Candidate
from offload.planner.link import link_bytes
from offload.planner.placement import Placement
from offload.planner.simulate import NotPredicted, seconds_of
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.simulate.what_if import passes_of
from offload.planner.trying import LEAST_GAIN, MOST_LOST
from offload.planner.verdict import Work, moved_bytes, stepped_in_ram
from offload.tiers import DEVICE

COMPUTES = (1.0, 4.0)
"""Of the seconds that the first candidate takes without compute."""
MOST_USES = 1000
"""Of chunks in an iteration, all candidates together that are not left out: a tenth to half a second of a CPU."""


class Moved(NamedTuple):
    """What a step of a placement moves.

    Attributes:
        disk: bytes read and written.
        link: bytes over the link to the device, both ways.
        stepped: elements that the CPU steps.
    """

    disk: int
    link: int
    stepped: int

    @classmethod
    def of(cls, layout: Layout, placement: Placement) -> Moved:
        """What a placement moves."""
        link = None if placement.is_direct else link_bytes(layout, placement)
        return cls(moved_bytes(placement), 0 if link is None else link.total, stepped_in_ram(layout, placement))


class Fastest:
    """Takes the candidate that makes the fastest steps; see [Note: what is compared].

    Args:
        work: what a step computes, whatever its tokens.
        speeds: of the machine, or why they are not known.
    """

    def __init__(self, work: Work, speeds: Speeds | NotPredicted) -> None:
        self._work = work
        self._speeds = speeds

    def __call__(self, first: Candidate, others: Iterator[Candidate]) -> Candidate:
        """The one to take.

        Args:
            first: the one that moves the fewest bytes.
            others: the others that fit, with the same bits.
        """
        speeds = self._speeds
        if isinstance(speeds, NotPredicted):
            return first
        moved = Moved.of(first.layout, first.placement)
        less = [one for one in others if not _is_dominated(Moved.of(one.layout, one.placement), moved)]
        left = MOST_USES - uses(first.layout, first.choice)
        if not less or left < 0:
            return first
        alone = seconds_of(first.layout, first.placement, Passes(), speeds)
        if isinstance(alone, NotPredicted):
            return first
        best, fastest = first, alone / LEAST_GAIN
        for one in less:
            if (left := left - uses(one.layout, one.choice)) < 0:
                break
            if _least_s(one, speeds) > fastest or (seconds := self._seconds(one, 0.0, speeds)) > fastest:
                continue
            if all(self._gain(one, first, share * alone, speeds) >= MOST_LOST for share in COMPUTES):
                best, fastest = one, seconds
        return best

    def _gain(self, one: Candidate, other: Candidate, compute_s: float, speeds: Speeds) -> float:
        """How many times as fast as another candidate one is, where an iteration computes for so long."""
        return self._seconds(other, compute_s, speeds) / self._seconds(one, compute_s, speeds)

    def _seconds(self, one: Candidate, compute_s: float, speeds: Speeds) -> float:
        """Seconds of an iteration that computes for so long; inf: it is not simulated."""
        flops = one.choice.grads.micro_batches * self._work.flops
        passes = passes_of(one.layout, self._work, flops / compute_s) if compute_s else Passes()
        found = seconds_of(one.layout, one.placement, passes, speeds)
        return float("inf") if isinstance(found, NotPredicted) else found


def _is_dominated(one: Moved, other: Moved) -> bool:
    """Whether a candidate moves no less than another one, whatever is looked at."""
    return all(mine >= its for mine, its in zip(one, other, strict=True))


def _least_s(one: Candidate, speeds: Speeds) -> float:
    """Less than a step of a candidate takes: its disks alone, but for what is still in buffers at its next use."""
    buffers = sum(pool.buffer_bytes for pool in one.placement.pools.values())
    most = sum(max(drive.read, drive.write, drive.both) for drive in speeds.drives)
    return max(moved_bytes(one.placement) - buffers, 0) / most if most else 0.0


def uses(layout: Layout, choice: Choice) -> int:
    """About how many times a step uses a chunk, of all chunks together."""
    micro_batches = choice.grads.micro_batches
    params = 2 * micro_batches + 1 if choice.params.tier > DEVICE else 0
    frozen = 2 * micro_batches if choice.params.frozen_tier > DEVICE else 0
    grads = micro_batches + 1 if choice.grads.tier.is_durable else 0
    trained = len(layout.trained.param_chunks)
    return trained * (1 + params + grads) + (len(layout.param_chunks) - trained) * frozen
