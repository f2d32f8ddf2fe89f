"""Who gets the next byte that `device_memory` leaves: what saves most of the disk for it, then of the link.

[Note: the next byte]
Units of streamed parameters that stay, and states with their gradients, take turns. What a parameter takes, and saves
in a step of m micro-batches, in bytes:

| | takes | saves over the disk | saves over the link |
|---|---|---|---|
| a unit that stays, trained | 2 | 2 (2m - 1), if parameters are on NVMe | 2 (2m - 1) |
| a unit that stays, frozen | 2 | 2 (2m), if they are on NVMe | 2 (2m) |
| states of parameters that stay | 12 + 2, or 12 + 4 if m > 1 | 24, if states are on NVMe | 2m + 2 |
| states of parameters that stream | the same | 24 | 2m - 2: gradients stay, new parameters go down |

States whose gradients would be on NVMe save 4 bytes more over the disk, or 8m if m > 1.
Where n ranks share parameters, a unit that stays takes as much, and saves each of them an n-th of that: each reads and
copies its own shard. Of states each has its shard.

No rates are asked for. Disk, link and compute work at the same time, so a step takes what the slowest of them does, and
that is the disk wherever it has states to move: it is slower than the link, and has more to move.
tests/planner/test_share.py computes this for links and disks from the slowest to the fastest.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.choices import Choice
from offload.tiers import DEVICE

STATE_BYTES = 12
"""The master and two moments of a parameter."""


class Saved(NamedTuple):
    """What a byte of the device saves in a step, in bytes. The greater one comes first.

    Attributes:
        disk: over the disk.
        link: over the link.
    """

    disk: float
    link: float


def saved_by_units(choice: Choice, ranks: int = 1) -> Saved:
    """What streamed units save that stay on the device: trained ones, if some stream.

    Args:
        choice: what was decided.
        ranks: how many share the parameters.
    """
    is_trained = choice.params.tier > DEVICE
    tier = choice.params.tier if is_trained else choice.params.frozen_tier
    fetches = (2 * choice.grads.micro_batches - is_trained) / ranks
    return Saved(fetches if tier.is_durable else 0, fetches)


def saved_by_states(choice: Choice) -> Saved:
    """What states and their gradients save that are on the device."""
    micro_batches, streams = choice.grads.micro_batches, choice.params.tier > DEVICE
    grad_bytes = 4 if micro_batches > 1 else 2
    taken = STATE_BYTES + grad_bytes
    over_disk = 2 * STATE_BYTES if choice.states.tier.is_durable else 0
    over_disk += 2 * micro_batches * grad_bytes if choice.grads.tier.is_durable else 0
    return Saved(over_disk / taken, (2 * micro_batches + (-2 if streams else 2)) / taken)


def states_come_first(choice: Choice, ranks: int = 1) -> bool:
    """Whether states get the device's memory before units that stay; see [Note: the next byte].

    Args:
        choice: what was decided.
        ranks: how many share the parameters.
    """
    return saved_by_states(choice) > saved_by_units(choice, ranks)
