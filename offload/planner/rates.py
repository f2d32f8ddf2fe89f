"""How fast this machine is, as `offload probe` measured it.

What it measured of a file system stands with the settings for it (io/select.py), what it measured of the rest here.
Both are in one file (io/remembered.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from offload.io import remembered

SECTION = "rates"
"""Of what is remembered; by the device that models train on."""

Figure = Annotated[float, Meta(gt=0, lt=1e18)]


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that was measured several times, in units a second. Of a cost, in seconds.

    Attributes:
        median: of all.
        lowest, highest: how far they are apart.
    """

    median: Figure
    lowest: Figure
    highest: Figure

    @classmethod
    def of(cls, values: Iterable[float]) -> Rate:
        """What several values, at least one, say."""
        found = list(values)
        return cls(median(found), min(found), max(found))


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the link between RAM and a device that has memory of its own, in bytes.

    Attributes:
        up: to the device.
        down: to RAM.
        both: up and down at once, added.
    """

    up: Rate
    down: Rate
    both: Rate


class HostRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the host takes in Python, in seconds; see `HostCosts` in simulate/speeds.py.

    Attributes:
        tile: for a tile that runs forward or backward.
        chunk: for a chunk of states that is read, stepped and written.
        resident: for a chunk of states in RAM that is stepped alone; None: it was measured before this cost was.
        moved: for a chunk of parameters or gradients that is read from a drive, or written to it; None: likewise.
        delay: of a transfer of a drive that somebody waits for, beside what its bytes take; None: likewise.
    """

    tile: Rate
    chunk: Rate
    resident: Rate | None = None
    moved: Rate | None = None
    delay: Rate | None = None


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of a machine beside its file systems.

    Attributes:
        device: that models train on: "cpu", or the name of an accelerator.
        threads: that the kernels of a step had.
        memory: bytes of RAM that a copy reads and writes, together.
        products: floating-point operations of a product of matrices on the device, by dtype.
        steps: elements that an optimizer steps in RAM, by its name and how it keeps states.
        link: None: the device has no memory of its own.
        measured_at: when, in seconds since 1970.
        host: None: it was measured before these costs were.
    """

    device: str
    threads: int
    memory: Rate
    products: dict[str, Rate]
    steps: dict[str, Rate]
    link: LinkRates | None = None
    measured_at: float = 0.0
    host: HostRates | None = None


def recall(device: str) -> Rates | None:
    """What was measured on this machine with a device; None: nothing, or too long ago."""
    return remembered.recall(SECTION, device, Rates)


def remember(rates: Rates) -> Path:
    """Writes down what was measured.

    Returns:
        The file in which it stands.

    Raises:
        OSError: if the cache directory cannot be written.
    """
    return remembered.remember(SECTION, rates.device, rates)


def step_name(optimizer: str, form: str, *, split_master: bool) -> str:
    """The key in `Rates.steps`.

    Args:
        optimizer: as `offload plan --optimizer` takes it.
        form: of its states, as OffloadZero's option `states` says it.
        split_master: whether masters are split.
    """
    return f"{optimizer}, {form}{', split' if split_master else ''}"
