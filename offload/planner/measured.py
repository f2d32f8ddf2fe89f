"""How fast a machine is, for a simulation: what is measured or described of it, or why that is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from offload.io import select
from offload.planner.machine_file import Host, Machine, here
from offload.planner.simulate import NotPredicted
from offload.planner.simulate.speeds import DriveSpeed, HostCosts, LinkSpeed, NetworkSpeed, Speeds
from offload.planner.trying import DTYPES

PROBE = "`offload probe` measures this machine, in half a minute"


def speeds_of(
    machine: Machine | None,
    *,
    elements_per_s: float | None,
    disk_bytes_per_s: float | None,
    matrix_flops: float | None = None,
    network: tuple[float, float] | None = None,
) -> Speeds | NotPredicted:
    """The speeds of a machine, if enough is known of it.

    Args:
        machine: what is known; None: nothing.
        elements_per_s: that the optimizer steps in RAM; None: that is not known.
        disk_bytes_per_s: of a disk, reads and writes together, if it is given; None: it is the machine's.
        matrix_flops: see `Speeds`.
        network: bytes a second between ranks, and a delay in seconds, if they are given; None: they are the machine's.
    """
    if machine is None:
        return NotPredicted("nothing is known of that machine: --machine describes one")
    if machine.memory is None:
        return NotPredicted(f"how fast RAM is, is not known: {PROBE if machine.is_here else '`memory` in its file'}")
    if elements_per_s is None:
        way_out = f"{PROBE} with the common ones" if machine.is_here else "`steps` in the file of the machine"
        return NotPredicted(f"how fast the optimizer steps is not known: {way_out}")
    drives = [
        DriveSpeed(one.read.value, one.write.value, one.mixed_bytes_per_s)
        for one in machine.drives
        for _ in range(one.count)
    ]
    alone = sum(one.both for one in drives)
    if machine.together is not None and alone:
        share = machine.together.value / alone
        drives = [one.scaled(share) for one in drives]
    if disk_bytes_per_s is not None:
        drives = [DriveSpeed(disk_bytes_per_s, disk_bytes_per_s, disk_bytes_per_s)]
    link = machine.link
    between = None if link is None else LinkSpeed(link.up.value, link.down.value, link.both.value)
    if network is None and machine.network is not None:
        network = machine.network.value, 0.0 if machine.network_delay is None else machine.network_delay.value
    ranks = None if network is None else NetworkSpeed(*network)
    host = machine.host or Host()
    found = (host.tile, host.chunk, host.resident, host.moved, host.delay)
    costs = HostCosts(*(0.0 if one is None else one.value for one in found))
    return Speeds(elements_per_s, machine.memory.value, drives, between, ranks, matrix_flops, costs)


class Here(NamedTuple):
    """How fast this machine is, as `offload probe` measured it.

    Attributes:
        speeds: of a run on it, or why they are not known.
        flops_per_s: FLOP/s of products of matrices in the dtype of the run; None: that is not known.
    """

    speeds: Speeds | NotPredicted
    flops_per_s: float | None

    @classmethod
    def of(cls, device: str, dtype: torch.dtype, step: str, paths: Sequence[Path]) -> Here:
        """What is remembered for a run.

        Args:
            device: that the model trains on, as `Rates.device`.
            dtype: in which it computes.
            step: the optimizer, as `rates.step_name` calls it.
            paths: the directories of the swap files.
        """
        machine = here(paths, device)
        steps, product = machine.elements_per_s(step, None), machine.products.get(DTYPES[dtype])
        speeds = speeds_of(machine, elements_per_s=None if steps is None else steps.value, disk_bytes_per_s=None)
        if len(machine.drives) < len({select.file_system_of(path) for path in paths}):
            speeds = NotPredicted(f"how fast the drives are is not known: {PROBE}")
        return cls(speeds, None if product is None else product.value)
