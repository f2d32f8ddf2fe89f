"""Which bytes of a batch wait between forward and backward, measured on the meta device: nothing is allocated or
computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from offload.config import Config
from offload.devices.copies import HostCopier
from offload.model.activations import Activations
from offload.profiling import Timeline
from offload.storage.activation_store import ActivationStore

_ENDLESS = 1 << 60


@dataclass(frozen=True)
class Waiting:
    """How many bytes of a forward wait for its backward.

    Attributes: entering_bytes: what enters units, in whole pages; saved_bytes: all that units save with
    Tuning(recompute=False), as the operations of the meta device do it (kernels of another device may save less or
    more, above all those of attention); largest_bytes: the largest tensor that enters a unit.
    """

    entering_bytes: int
    saved_bytes: int
    largest_bytes: int


def measure(model: nn.Module, config: Config, run: Callable[[nn.Module], object]) -> Waiting:
    """What `run(model)`, one forward, puts into an activation tier.

    Args: model: on the meta device, and not changed; run: its inputs are on the meta device, too.
    Raises: what the forward raises where it cannot run there, because it looks at values.
    """
    model = copy.deepcopy(model).to(config.compute_dtype)
    entering, largest = _run(model, replace(config, recompute=True), run)
    saved, _ = _run(model, replace(config, recompute=False), run)
    return Waiting(entering, saved, largest)


def _run(model: nn.Module, config: Config, run: Callable[[nn.Module], object]) -> tuple[int, int]:
    device = torch.device("meta")
    region = torch.empty(_ENDLESS, dtype=torch.uint8, device=device)
    store = ActivationStore(region, HostCopier(), device, Timeline())
    activations = Activations(model, config, None, store)
    try:
        result = run(model)
        del result
    finally:
        activations.remove()
        store.close()
    return store.peak_bytes, store.largest_bytes
