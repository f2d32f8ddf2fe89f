"""Choosing what the user left open: the tiers of parameters and gradients, and how much is brought ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from offload.config import SUM_BLOCK, Config, ParamTier, Tier
from offload.errors import BudgetError
from offload.layout import Layout
from offload.planner.device import Room
from offload.planner.placement import Placement, place

# Read and written a parameter and step by streamed 16-bit parameters, and by gradients in slots.
_BYTES_OF_PARAM: dict[ParamTier, int] = {"device": 0, "cpu": 0, "nvme": 6}
_BYTES_OF_GRAD: dict[Tier, int] = {"cpu": 0, "nvme": 4}


def choose(
    config: Config, layout_of: Callable[[Config], Layout], *, direct: bool, room: Room
) -> tuple[Config, Layout, Placement]:
    """The fastest configuration that fits the budgets: fewest bytes over the disk first, then over the link.

    Args: layout_of: lays the model out for a configuration; direct: as in `place`.
    Raises: BudgetError if nothing fits, the one of what lacks least; ConfigError.
    """
    refused: list[BudgetError] = []
    for candidate in _candidates(config, direct=direct):
        layout = layout_of(candidate)
        try:
            return candidate, layout, place(layout, candidate, direct=direct, room=room)
        except BudgetError as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.needed - error.available)


def _candidates(config: Config, *, direct: bool) -> Iterator[Config]:
    params: list[ParamTier] = [config.param_tier]
    grads: list[Tier] = [config.grad_tier]
    if config.chooses_params:
        params = ["device", "cpu", "nvme"] if config.tier == "nvme" else ["device", "cpu"]
    if config.chooses_grads and config.tier == "nvme" and config.chunk_numel >= SUM_BLOCK:
        grads = ["cpu", "nvme"]
    pairs = list(product(params, grads))
    for param, grad in sorted(pairs, key=lambda pair: _BYTES_OF_PARAM[pair[0]] + _BYTES_OF_GRAD[pair[1]]):
        if len(pairs) > 1 and grad == "nvme" and param == "device" and not direct:
            continue  # see place
        is_open = param != "device" and config.in_flight is None  # Tuning(prefetch=None)
        for depth in (config.depth, 0) if is_open else (config.depth,):
            yield replace(config, param_tier=param, grad_tier=grad, depth=depth)
