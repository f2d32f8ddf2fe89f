"""What every part of one run shares."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import Config
from offload.devices.copies import Copier
from offload.dist.communicator import Communicator
from offload.layout import Layout
from offload.native import Kernels
from offload.profiling import Timeline
from offload.storage.arena import Arena, Lender


@dataclass(frozen=True)
class Memory:
    """The buffers of a run.

    Attributes:
        ram: the arena in RAM; also holds the buffers of transfers from and to swap files.
        device: memory of the model's device, None if none is reserved.
        states: where states and gradients wait for the step: `ram` or `device`.
        communication: for buffers of collectives: in device memory if the model is on a device of its own.
        copier: copies between the model and `states`.
    """

    ram: Arena
    device: Lender | None
    states: Lender
    communication: Lender
    copier: Copier

    @property
    def device_bytes(self) -> int:
        """Bytes lent of the device's memory."""
        return 0 if self.device is None else self.device.used


@dataclass(frozen=True)
class Run:
    """What the parts of one run are built from: each takes this instead of its pieces."""

    config: Config
    layout: Layout
    memory: Memory
    kernels: Kernels
    comm: Communicator
    timeline: Timeline
