"""Which rate of a machine a prediction depends on most: each is changed by a fifth, and simulated again."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from offload.layout import Layout
from offload.planner.placement import Placement
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.speeds import LinkSpeed, Passes, Speeds

CHANGE = 0.2
PRODUCTS, RAM, DRIVES, LINKS = "products of the device", "RAM", "drives", "link"


class Moved(NamedTuple):
    """How the seconds of an iteration change, as shares of them.

    Attributes:
        slower: if the rate is lower by CHANGE.
        faster: if it is higher by CHANGE.
    """

    slower: float
    faster: float

    @property
    def largest(self) -> float:
        return max(abs(self.slower), abs(self.faster))


def moved_by(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> dict[str, Moved] | NotPredicted:
    """How much each rate moves the seconds of an iteration; the one that moves them most comes first.

    The optimizer's kernels are as fast as RAM, so that they change with it.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of the machine.
    """
    before = simulate(held, placement, passes, speeds)
    if isinstance(before, NotPredicted):
        return before
    found = {}
    for name in (PRODUCTS, RAM, *((DRIVES,) if speeds.drives else ()), *((LINKS,) if speeds.link else ())):
        shares = []
        for factor in (1 - CHANGE, 1 + CHANGE):
            after = simulate(held, placement, *_changed(name, factor, passes, speeds))
            assert isinstance(after, Iteration)
            shares.append(after.seconds / before.seconds - 1)
        found[name] = Moved(*shares)
    return dict(sorted(found.items(), key=lambda pair: -pair[1].largest))


def _changed(name: str, factor: float, passes: Passes, speeds: Speeds) -> tuple[Passes, Speeds]:
    """What is computed and the speeds, with one rate so many times as high."""
    if name == PRODUCTS:
        forward_s, backward_s = (
            {unit: seconds / factor for unit, seconds in one.items()} for one in (passes.forward_s, passes.backward_s)
        )
        return replace(passes, forward_s=forward_s, backward_s=backward_s), speeds
    if name == RAM:
        return passes, replace(speeds, memory=factor * speeds.memory, elements_per_s=factor * speeds.elements_per_s)
    if name == DRIVES:
        drives = [one.scaled(factor) for one in speeds.drives]
        return passes, replace(speeds, drives=drives)
    assert speeds.link is not None
    link = LinkSpeed(factor * speeds.link.up, factor * speeds.link.down, factor * speeds.link.both)
    return passes, replace(speeds, link=link)
