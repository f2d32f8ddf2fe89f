"""What goes over the link between RAM and the model's device in a step, computed."""

from __future__ import annotations

from typing import NamedTuple

from offload.layout import Chunk, Layout, segments
from offload.model.units import ROOT
from offload.planner.placement import Placement
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

    A unit that streams comes for each forward and for each backward, but for the last one, which is there still, and
    the root unit, which is there from its forward to its backward. A unit that stays comes once a step with its new
    values; never, if it is frozen.

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where, with a device that has memory of its own.
    """
    choice, trained = placement.choice, layout.trained
    if layout.ranks > 1:
        return None
    up = down = 0
    if choice.states.tier > DEVICE:
        for spec, flat in zip(trained.specs, trained.flat_of, strict=True):
            leaves = flat not in placement.device_flats
            down += choice.grads.micro_batches * spec.numel * spec.dtype.itemsize if leaves else 0
        for chunk in trained.chunks:
            nbytes, is_there = chunk_bytes(trained, chunk), chunk.flat in placement.device_flats
            if is_there:
                down += nbytes if choice.params.tier > DEVICE else 0  # for the next fetch
                continue
            down += nbytes if choice.states.split_master and choice.params.tier == DEVICE else 0
            up += new_bytes(trained, chunk) if choice.params.tier == DEVICE else 0
    if choice.params.streams:
        up += _fetched(layout, placement)
    return LinkBytes(up, down)


def chunk_bytes(layout: Layout, chunk: Chunk) -> int:
    """The bytes of a chunk's parameters, gaps between them included, as they are fetched."""
    return chunk.numel * layout.flats[chunk.flat].dtype.itemsize


def new_bytes(layout: Layout, chunk: Chunk) -> int:
    """The bytes of a chunk's new parameters, as they are copied to the device where they stay.

    Those of each param group are copied together, with the gaps between them.
    """
    runs = segments(chunk, lambda param: layout.groups[param])
    return sum(run.stop - run.start for run in runs) * layout.flats[chunk.flat].dtype.itemsize


def _fetched(layout: Layout, placement: Placement) -> int:
    """The bytes of the units that come in a step."""
    choice = placement.choice
    trained = {spec.unit for spec in layout.trained.specs} if choice.params.tier > DEVICE else set()
    units: dict[str, int] = {}
    for chunk in layout.param_chunks:
        info = layout.flats[chunk.flat]
        if choice.params.tier_of(is_frozen=info.is_frozen) > DEVICE:
            units[info.unit] = units.get(info.unit, 0) + chunk_bytes(layout, chunk)
    micro_batches, found, often = choice.grads.micro_batches, 0, []
    for unit, nbytes in units.items():
        if unit in placement.staying:
            found += nbytes if unit in trained else 0
        elif unit == ROOT:
            found += micro_batches * nbytes
        else:
            often.append(nbytes)
    return found + micro_batches * (2 * sum(often) - sum(often[-1:]))
