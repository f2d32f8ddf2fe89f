"""What a run reserves before its first step: RAM, and memory of the model's device beside its parameters."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from offload.config import Config
from offload.devices.copies import Copier, HostCopier
from offload.dist.communicator import Communicator
from offload.layout import Layout
from offload.native import Kernels, load, load_on
from offload.native.threads import usable_cpus
from offload.native.torch_kernels import scratch_bytes
from offload.planner.placement import Placement
from offload.run import Memory
from offload.storage.arena import Arena
from offload.storage.device_store import DeviceArena


def reserve(
    undo: ExitStack, config: Config, placement: Placement, device: torch.device, copier: Copier, comm: Communicator
) -> Memory:
    """`undo` gets the end of it. The pages of `ram` do not come before they are touched. Raises: BudgetError."""
    ram = Arena(placement.arena_bytes, copier, at_once=False)
    undo.callback(_end, comm, ram)
    if config.tier != "device" and not placement.slab_bytes:
        return Memory(ram, None, ram, ram, copier)
    slab = _slab(placement.slab_bytes, device, copier)
    undo.callback(_end, comm, slab)
    if config.tier == "device":
        return Memory(ram, slab, slab, slab, HostCopier())  # nothing leaves it in a step
    return Memory(ram, slab, ram, slab, copier)


def kernels_for(undo: ExitStack, config: Config, layout: Layout, memory: Memory) -> Kernels:
    """Those that work where the states are."""
    if isinstance(memory.states, DeviceArena):
        largest = max((spec.numel for spec in layout.specs), default=0)
        kernels = load_on(memory.states.carve(scratch_bytes(largest)))
    else:
        kernels = load(kernel_threads(config.threads, ranks_on_node=config.ranks_on_node))
    undo.callback(kernels.close)
    return kernels


def kernel_threads(wanted: int | None, *, ranks_on_node: int) -> int:
    """How many threads this rank's kernels take. Args: wanted: `Tuning.threads`; None: a share of the usable CPUs."""
    return wanted or max(usable_cpus() // ranks_on_node, 1)


def _slab(nbytes: int, device: torch.device, copier: Copier) -> Arena | DeviceArena:
    if not copier.direct:
        return DeviceArena(nbytes, device)
    arena = Arena(nbytes, copier, at_once=False)
    arena.prefault(lambda: None)
    return arena


_abandoned: list[Arena | DeviceArena] = []
"""Into which a rank that is stuck may still make this one write: they stay mapped."""


def _end(comm: Communicator, arena: Arena | DeviceArena) -> None:
    if not comm.close():
        _abandoned.append(arena)
    arena.close()
