"""What the experts of a mixture move in a step, by how many of them its tokens need, computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import comb
from typing import NamedTuple

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
        together: how many experts a tile has, at most; 0: layers come whole, so what is expected is all.
    """

    nbytes: int
    link: int
    link_expected: int
    disk: int
    disk_expected: int
    together: int


def routed_bytes(planned: Planned, names: Collection[str], routing: Routing, tokens: int) -> RoutedBytes:
    """What streamed experts move in a step.

    Each micro-batch fetches a tile for its forward and for its backward if one of its experts has tokens; over ranks
    that share parameters, always. The gradient of a tile that was fetched leaves the device. Of what stays in RAM of
    streamed parameters the experts have a part like all others.

    Args:
        planned: the plan.
        names: of the parameters that are experts; each has `routing.experts` rows.
        routing: how tokens are routed.
        tokens: of a micro-batch.

    Raises:
        BudgetError: as `Planned.place`.
    """
    placement, choice = planned.place(), planned.choice
    micro_batches, shares = choice.grads.micro_batches, planned.layout.shard_group_size > 1
    nbytes, link, disk, together = 0, [0.0, 0.0], [0.0, 0.0], 0
    for spec in planned.layout.specs:
        tier = choice.params.tier_of(is_frozen=spec.is_frozen)
        if spec.name not in names or tier == DEVICE:
            continue
        in_tile = spec.tile * routing.experts // spec.numel
        together = max(together, in_tile)
        chance = 1.0 if not in_tile or shares else routing.likelihood(tokens, min(in_tile, routing.experts))
        size = spec.numel * spec.dtype.itemsize
        nbytes += size
        over_link = 0 if planned.direct else micro_batches * (2 + (not spec.is_frozen)) * size
        kind = ChunkKind.FROZEN if spec.is_frozen else ChunkKind.PARAMS
        from_disk = 2.0 * micro_batches * size * _streamed(placement.pools, kind) if tier.is_durable else 0.0
        for found, moved in ((link, over_link), (disk, from_disk)):
            found[0] += moved
            found[1] += chance * moved
    return RoutedBytes(nbytes, round(link[0]), round(link[1]), round(disk[0]), round(disk[1]), together)


def _streamed(pools: Mapping[ChunkKind, Pool], kind: ChunkKind) -> float:
    """Which part of the bytes of a kind of chunks stays neither in RAM nor on the device."""
    total = sum(pools[kind].sizes) if kind in pools else 0
    return sum(pools[kind].streamed) / total if total else 0.0
