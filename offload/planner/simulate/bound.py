"""The least that an iteration can take: each resource alone, at its best rate. It is cheap where simulating is not."""

from __future__ import annotations

from offload.layout import Layout
from offload.planner.link import link_bytes
from offload.planner.placement import Placement
from offload.planner.simulate.speeds import Passes, Speeds
from offload.planner.verdict import stepped_in_ram
from offload.storage.slot_map import ChunkKind

TURNS = 2
"""Passes of a micro-batch. At the end of each, buffers may hold what the next one reads."""


def least_seconds(held: Layout, placement: Placement, passes: Passes, speeds: Speeds) -> float:
    """The seconds of an iteration, of which each resource needs so many for what it has to do.

    Args:
        held: the layout of all parameters that are trained or stream.
        placement: what is where.
        passes: what a micro-batch computes.
        speeds: of the machine.

    Returns:
        Never more than `simulate` says.
    """
    micro_batches = placement.choice.grads.micro_batches
    compute = micro_batches * (sum(passes.forward_s.values()) + sum(passes.backward_s.values()))
    if any(spec.tile for spec in held.specs):  # which of them are used, and so what moves, depends on the tokens
        return compute
    in_ram = 0 if any(flat.is_whole for flat in held.flats) else stepped_in_ram(held, placement)
    kernels = in_ram / speeds.elements_per_s
    found = [compute + kernels] if placement.is_direct else [compute, kernels]
    if speeds.drives:
        read = max(placement.read_bytes - _not_read(placement, micro_batches), 0)
        written = placement.written_bytes
        either = sum(max(drive.read, drive.write, drive.both) for drive in speeds.drives)
        found += [read / sum(drive.read for drive in speeds.drives), (read + written) / either]
        found.append(written / sum(drive.write for drive in speeds.drives))
    moved = None if placement.is_direct or speeds.link is None else link_bytes(held, placement)
    if moved is not None and speeds.link is not None:
        link = speeds.link
        found += [moved.up / link.up, moved.down / link.down, moved.total / max(link.up, link.down, link.both)]
    return max(found)


def _not_read(placement: Placement, micro_batches: int) -> int:
    """The most bytes that are still in buffers when they are needed again: that depends on how fast the others are."""
    pools = [pool for kind, pool in placement.pools.items() if kind != ChunkKind.STATES]
    return (1 + TURNS * micro_batches) * sum(pool.buffer_bytes for pool in pools)
