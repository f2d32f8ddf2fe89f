"""What goes over the link between RAM and the model's device in a step, computed."""

from __future__ import annotations

from typing import NamedTuple

from offload.layout import Layout
from offload.model.units import ROOT
from offload.planner.placement import Placement, unit_bytes
from offload.tiers import DEVICE


class LinkBytes(NamedTuple):
    """Bytes over the link in a step.

    Attributes:
        up: to the device: new parameters, and parameters of units that stream.
        down: to RAM: gradients, parameters that split masters need, and new ones of streamed units that are made there.
    """

    up: int
    down: int

    @property
    def total(self) -> int:
        return self.up + self.down


def link_bytes(layout: Layout, placement: Placement) -> LinkBytes | None:
    """What a step moves over the link; None over several ranks, which have collectives between.

    A unit that streams comes for each forward and for each backward, but for the last one, which is there still. A unit
    that stays comes once a step with its new values, as the root unit does; never, if it is frozen.

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where, with a device that has memory of its own.
    """
    choice = placement.choice
    if layout.ranks > 1:
        return None
    if choice.states.tier == DEVICE:
        up = down = 0
    else:
        located = zip(layout.trained.specs, layout.trained.flat_of, strict=True)
        leaves = made = 0
        for spec, flat in located:
            if flat not in placement.device_flats:
                leaves += spec.numel * spec.dtype.itemsize
            else:
                made += spec.numel * spec.dtype.itemsize
        down = choice.grads.micro_batches * leaves + (leaves if choice.states.split_master else 0)
        down += made if choice.params.tier > DEVICE else 0  # for the next fetch
        up = leaves if choice.params.tier == DEVICE else 0
    if choice.params.streams:
        up += _fetched(layout, placement)
    return LinkBytes(up, down)


def _fetched(layout: Layout, placement: Placement) -> int:
    """The bytes of the units that come in a step."""
    choice = placement.choice
    trained = {spec.unit for spec in layout.trained.specs} if choice.params.tier > DEVICE else set()
    once, often = 0, []
    for unit, nbytes in unit_bytes(layout, choice).items():
        if unit == ROOT or unit in placement.staying:
            once += nbytes if unit in trained else 0
        else:
            often.append(nbytes)
    return once + choice.grads.micro_batches * (2 * sum(often) - sum(often[-1:]))
