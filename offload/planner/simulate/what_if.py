"""What a run is asked before it begins: what a micro-batch computes, and how many tokens hide all else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from offload.layout import Layout
from offload.planner.placement import Placement
from offload.planner.routing import Routing
from offload.planner.simulate import Iteration, simulate
from offload.planner.simulate.lines import COMPUTE, KERNELS, MEMORY, PYTHON
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.verdict import Work

HIDDEN = 0.01
"""Less than this share of an iteration counts as nothing."""
MOST_TIMES = 1 << 16
"""So many times the tokens of a plan are tried."""
NOTHING_BESIDE = Passes()
ROUTED = 64
"""Of so many micro-batches the tiles of experts that they use are told, before these come again."""


def passes_of(held: Layout, work: Work, flops_per_s: float, beside: Passes = NOTHING_BESIDE) -> Passes:
    """What a micro-batch computes, shared out over the units by their elements.

    Args:
        held: the layout of all parameters that are trained or stream.
        work: what the model computes.
        flops_per_s: FLOP/s that the device achieves; inf: compute takes no time.
        beside: what else is known of a micro-batch: all but its seconds.
    """
    return shared_out(held, work.forward_flops / flops_per_s, work.backward_flops / flops_per_s, beside)


def shared_out(held: Layout, forward_s: float, backward_s: float, beside: Passes = NOTHING_BESIDE) -> Passes:
    """What a micro-batch computes, from the seconds of all units.

    Args:
        held: the layout of all parameters that are trained or stream.
        forward_s: of the forward.
        backward_s: of the backward, without those of a forward that runs again in it.
        beside: what else is known of a micro-batch: all but its seconds.
    """
    numels: dict[str, int] = {}
    for spec in held.specs:
        numels[spec.unit] = numels.get(spec.unit, 0) + spec.numel
    total = max(sum(numels.values()), 1)
    return replace(
        beside,
        forward_s={unit: forward_s * numel / total for unit, numel in numels.items()},
        backward_s={unit: backward_s * numel / total for unit, numel in numels.items()},
    )


def expected_tiles(
    held: Layout, names: Collection[str], routing: Routing, tokens: int, micro_batches: int = ROUTED
) -> dict[str, list[list[int]]]:
    """Tiles of experts that micro-batches use: as many as are expected of uniform routing, each as often as another.

    Args:
        held: the layout of all parameters that are trained or stream.
        names: of the parameters that are experts.
        routing: how tokens are routed.
        tokens: of a micro-batch.
        micro_batches: of how many the tiles are told.

    Returns:
        See `Passes.tiles`.
    """
    found: dict[str, list[list[int]]] = {}
    for spec in held.specs:
        if spec.name not in names or not spec.tile:
            continue
        count = -(-spec.numel // spec.tile)
        chance = routing.likelihood(tokens, min(spec.tile * routing.experts // spec.numel, routing.experts))
        due, place = 0.0, 0
        found[spec.unit] = []
        for _ in range(micro_batches):
            due += chance * count
            used = min(max(int(due), 1), count)  # a call uses one at least
            due = max(due - used, 0.0)
            found[spec.unit].append(sorted((place + number) % count for number in range(used)))
            place = (place + used) % count
    return found


def hiding_tokens(held: Layout, placement: Placement, passes: Passes, speeds: Speeds, tokens: int) -> int | None:
    """The tokens of a micro-batch from which on nothing is waited for but what the device does itself.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch of `tokens` computes.
        speeds: of the machine.
        tokens: of that micro-batch.

    Returns:
        None: with many times as many tokens there still is a wait, or compute takes no time.
    """

    def hides(times: float) -> bool:
        found = simulate(held, placement, passes.times(times), speeds)
        if not isinstance(found, Iteration):
            return False
        own = (COMPUTE, KERNELS, MEMORY, PYTHON) if placement.is_direct else (COMPUTE,)
        return sum(found.parts.get(name, 0.0) for name in own) >= (1 - HIDDEN) * found.seconds

    low, high = 0.0, 1.0
    while not hides(high):
        low, high = high, 2 * high
        if high > MOST_TIMES:
            return None
    while high - low > max(high / 64, 1 / tokens):
        middle = (low + high) / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return round(high * tokens)
