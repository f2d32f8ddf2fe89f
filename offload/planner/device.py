"""What parameters take on the device, and with `tier="device"` states and gradients, and the room there is for them.
Activations and gradients on their way are not in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.config import Config
from offload.errors import BudgetError
from offload.layout import Layout
from offload.model.units import ROOT, encloses
from offload.sizes import format_bytes


@dataclass(frozen=True)
class Room:
    """The device beside what streams. resident_bytes: frozen parameters and buffers, which are always there;
    available_bytes: for these and all others, if no `device_memory` is given; None: nobody limits it."""

    resident_bytes: int = 0
    available_bytes: int | None = None

    def limit(self, config: Config) -> int | None:
        return self.available_bytes if config.device_memory is None else config.device_memory


def peak_bytes(layout: Layout, config: Config) -> int:
    """Of trained parameters at most: all; or, where they are streamed, the root's, those of the unit in use and of the
    one around it, each with the units that it lies in, and of those brought ahead."""
    sizes = unit_bytes(layout)
    if config.param_tier == "device":
        return sum(sizes.values())
    root = sizes.pop(ROOT, 0)
    inner: dict[str, list[str]] = {unit: [] for unit in (ROOT, *sizes)}
    for unit in sizes:
        outer = [other for other in sizes if other != unit and encloses(other, unit)]
        inner[max(outer, key=len, default=ROOT)].append(unit)
    ahead = sum(sorted(sizes.values(), reverse=True)[: config.depth])
    return root + min(_deepest(ROOT, inner, sizes)[1] + ahead, sum(sizes.values()))


def _deepest(unit: str, inner: Mapping[str, list[str]], sizes: Mapping[str, int]) -> tuple[int, int]:
    """The most bytes of `unit` with units in one another in it, and with two such stacks."""
    found = [_deepest(one, inner, sizes) for one in inner[unit]]
    ones = sorted((one for one, _ in found), reverse=True)
    own = sizes.get(unit, 0)
    return own + sum(ones[:1]), own + max(sum(ones[:2]), max((two for _, two in found), default=0))


def unit_bytes(layout: Layout) -> dict[str, int]:
    """What each unit takes on the device, in the order of the layout."""
    sizes: dict[str, int] = {}
    for one in layout.slices:
        if one.is_tile or not layout.tile_of(one.flat):  # never all of what has tiles
            nbytes = one.numel * layout.flats[one.flat].dtype.itemsize
            sizes[one.unit] = sizes.get(one.unit, 0) + nbytes
    return sizes


def require_room(layout: Layout, config: Config, room: Room, beside: int = 0) -> int:
    """What the device holds at most. Args: beside: bytes of it that are no parameters and no buffers of the model.
    Raises: BudgetError if it is more than there is room for."""
    needed, limit = room.resident_bytes + peak_bytes(layout, config) + beside, room.limit(config)
    if limit is None or needed <= limit:
        return needed
    origin = "half of what is free on the device allows" if config.device_memory is None else "device_memory allows"
    if config.tier == "device":
        others = ', or choose tier="cpu", or "nvme" with a path'
    elif config.param_tier == "device":
        others = ', or param_tier="cpu" or "nvme"'
    else:
        sizes = unit_bytes(layout)
        largest = max(sizes, key=lambda unit: sizes[unit])
        others = (
            f", or smaller units with Tuning(units=...): the largest, {largest or 'the root'}, takes "
            f"{format_bytes(sizes[largest])}"
        )
    raise BudgetError(
        f"{format_bytes(needed)} are needed on the device and {origin} {format_bytes(limit)}: "
        f"give device_memory={needed} or more{others}",
        needed=needed,
        available=limit,
        option="device_memory",
    )
