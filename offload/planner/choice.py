"""Choosing what the user left open: the tiers of parameters and gradients, how much is brought ahead, and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from offload.config import SUM_BLOCK, Config, Tier
from offload.errors import BudgetError
from offload.layout import Layout
from offload.planner.device import Room
from offload.planner.placement import Placement, place

# Read and written a parameter and step by streamed 16-bit parameters, and by gradients in slots.
_BYTES_OF_PARAM: dict[Tier, int] = {"device": 0, "cpu": 0, "nvme": 6}
_BYTES_OF_GRAD: dict[Tier, int] = {"device": 0, "cpu": 0, "nvme": 4}


MOST_HALVINGS = 8
"""Of the largest weight, until its tiles fit."""


def choose(
    config: Config, layout_of: Callable[[Config], Layout], *, direct: bool, room: Room
) -> tuple[Config, Layout, Placement]:
    """The fastest configuration that fits the budgets: fewest bytes over the disk first, then over the link.

    Args: layout_of: lays the model out for a configuration; direct: as in `place`.
    Raises: BudgetError if nothing fits, the one of what lacks least; ConfigError.
    """
    refused: list[BudgetError] = []
    for tiers in _tiers(config, direct=direct):
        for candidate in _shapes(tiers, layout_of):
            layout = layout_of(candidate)
            try:
                return candidate, layout, place(layout, candidate, direct=direct, room=room)
            except BudgetError as error:
                refused.append(error)
                if error.option != "device_memory":
                    break  # what saves memory on the device does not help
    raise min(refused, key=lambda error: error.needed - error.available)


def _tiers(config: Config, *, direct: bool) -> Iterator[Config]:
    params: list[Tier] = [config.param_tier]
    grads: list[Tier] = [config.grad_tier]
    if config.chooses_params:
        params = ["device", "cpu", "nvme"] if config.tier == "nvme" else ["device", "cpu"]
    if config.chooses_grads and config.tier == "nvme" and config.chunk_numel >= SUM_BLOCK:
        grads = ["cpu", "nvme"]
    pairs = list(product(params, grads))
    for param, grad in sorted(pairs, key=lambda pair: _BYTES_OF_PARAM[pair[0]] + _BYTES_OF_GRAD[pair[1]]):
        if len(pairs) > 1 and grad == "nvme" and param == "device" and not direct:
            continue  # see place
        yield replace(config, param_tier=param, grad_tier=grad)


def _shapes(config: Config, layout_of: Callable[[Config], Layout]) -> Iterator[Config]:
    """What is brought ahead, and in which tiles: from the fastest to what takes least on the device."""
    if config.param_tier == "device":
        yield replace(config, tile_bytes=0)
        return
    depths = (config.depth, 0) if config.in_flight is None else (config.depth,)  # Tuning(prefetch=None)
    whole = replace(config, tile_bytes=config.tile_bytes or 0)
    yield from (replace(whole, depth=depth) for depth in depths)
    if config.tile_bytes is None:
        specs = layout_of(whole).specs
        largest = max((spec.numel * spec.dtype.itemsize for spec in specs), default=0)
        for tile in (largest >> halvings for halvings in range(1, MOST_HALVINGS + 1)):
            yield from (replace(whole, depth=depth, tile_bytes=max(tile, 1)) for depth in depths)
