"""What the experts of a mixture move in a step, by how many of them its tokens need, computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from math import comb
from typing import NamedTuple

from offload.optim.late import most_owed
from offload.planner.explain import Planned
from offload.storage.pool import Pool
from offload.storage.slot_map import ChunkKind
from offload.tiers import DEVICE


class Routing(NamedTuple):
    """How a mixture routes tokens.

    Attributes:
        experts: how many experts a layer has.
        per_token: how many of them a token needs.
    """

    experts: int
    per_token: int

    def likelihood(self, tokens: int, together: int = 1) -> float:
        """The probability that tokens need any of some experts, which are fetched together, if routing is uniform.

        Each token chooses `per_token` of the E experts, all sets of them equally likely, and tokens choose
        independently. A token needs none of m given ones with probability C(E - m, per_token) / C(E, per_token), which
        is 1 - per_token / E for one; all tokens do with that to the power of their number. The expected number of
        experts that tokens need is E times the result for m = 1, as expectations add up: the classical occupancy
        problem (Feller, An Introduction to Probability Theory and Its Applications, vol. 1, IV.2). A trained router is
        not uniform, and needs fewer.

        Args:
            tokens: how many tokens.
            together: how many experts, m.

        Returns:
            A number from 0 to 1.
        """
        return 1 - (comb(self.experts - together, self.per_token) / comb(self.experts, self.per_token)) ** tokens


class RoutedBytes(NamedTuple):
    """What the streamed experts move in a step, in bytes: all of them, and what is expected of uniform routing.

    Attributes:
        nbytes: what the experts take in the compute dtype.
        link: over the link to the device and back, if all come; 0 where the device is the CPU.
        link_expected: what is expected.
        disk: read from the disk, if all come.
        disk_expected: what is expected.
        states: of their states, read from the disk and written to it, if all are stepped.
        states_expected: what is expected where idle experts owe their steps (optim/late.py); else all.
        together: how many experts a tile has, at most; 0: layers come whole, so what is expected is all.
    """

    nbytes: int
    link: int
    link_expected: int
    disk: int
    disk_expected: int
    states: int
    states_expected: int
    together: int


def routed_bytes(planned: Planned, names: Collection[str], routing: Routing, tokens: int) -> RoutedBytes:
    """What streamed experts move in a step.

    Each micro-batch fetches a tile for its forward and for its backward if one of its experts has tokens; over ranks
    that share parameters, always, but where idle experts owe their steps: then if one has tokens on any rank. The
    gradient of a tile that was fetched leaves the device. The states of a tile that may owe steps are moved in a step
    in which one of its experts has tokens, or when it owes the most. Of what stays in RAM of parameters and states the
    experts have a part like all others, and what a forward has read stays for the step.

    Args:
        planned: the plan.
        names: of the parameters that are experts; each has `routing.experts` rows.
        routing: how tokens are routed.
        tokens: of a micro-batch.

    Raises:
        BudgetError: as `Planned.place`.
    """
    placement, choice = planned.place(), planned.choice
    micro_batches, layout = choice.grads.micro_batches, planned.layout
    shares, of_all = layout.shard_group_size > 1, tokens * layout.ranks
    nbytes, link, disk, states, together = 0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0
    for number, spec in enumerate(layout.specs):
        if spec.name not in names:
            continue
        in_tile = min(spec.tile * routing.experts // spec.numel, routing.experts)
        stepped = routing.likelihood(micro_batches * of_all, in_tile) if spec.is_late else 1.0
        for chunk, piece in () if spec.is_frozen else layout.trained.pieces_of(number):
            size = placement.states.sizes[chunk.index] * piece.numel / chunk.numel
            of_piece = 2 * size * _streamed(placement.states)
            states[0] += of_piece
            states[1] += of_piece * _moves(stepped, most_owed(chunk.index))
        tier = choice.params.tier_of(is_frozen=spec.is_frozen)
        if tier == DEVICE:
            continue
        together = max(together, in_tile)
        always = not in_tile or (shares and not spec.is_late)
        chance = 1.0 if always else routing.likelihood(of_all if shares else tokens, in_tile)
        size = spec.numel * spec.dtype.itemsize
        nbytes += size
        over_link = 0 if planned.direct else micro_batches * (2 + (not spec.is_frozen)) * size
        kind = ChunkKind.FROZEN if spec.is_frozen else ChunkKind.PARAMS
        from_disk = 2.0 * micro_batches * size * _streamed(placement.pools.get(kind)) if tier.is_durable else 0.0
        for found, moved in ((link, over_link), (disk, from_disk)):
            found[0] += moved
            found[1] += chance * moved
    (all_link, link_expected), (all_disk, disk_expected) = map(_rounded, (link, disk))
    return RoutedBytes(nbytes, all_link, link_expected, all_disk, disk_expected, *_rounded(states), together)


def _rounded(figures: Sequence[float]) -> tuple[int, int]:
    """What all take, and what is expected, in whole bytes."""
    all_take, expected = figures
    return round(all_take), round(expected)


def _moves(chance: float, most: int) -> float:
    """In which part of all steps a chunk is moved.

    Args:
        chance: that it has to be, in each step.
        most: it is moved at the latest after so many steps in which it had not to be. So those from one move to the
            next are 1 + (1 - chance) + ... + (1 - chance)**most on average.
    """
    return 1 / math.fsum((1 - chance) ** steps for steps in range(most + 1))


def _streamed(pool: Pool | None) -> float:
    """Which part of the bytes of a pool stays neither in RAM nor on the device."""
    total = 0 if pool is None else sum(pool.sizes)
    return sum(pool.streamed) / total if pool is not None and total else 0.0
