"""Which `device_memory` would suit a run: more where some was left over, less where torch ran out of memory.

[Note: what others take]
Torch's allocator counts all that is allocated on the device, and what this library has there is known. In training the
latter stays the same, so the most that was ever allocated, less that, is no less than what all else took: activations,
gradients on their way to RAM, a loss. A tenth more is left to it. While the model is taken, its values are there beside
what was reserved, and the parameters grow as they are made of them; so what is reserved has to leave room for the peak
of that time, too. Nothing moves by itself: the figure is told, and the next run is given it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from offload.devices.copies import Copier
from offload.errors import BudgetError
from offload.layout import Layout
from offload.planner.placement import Needs, OnDevice, Placement, Room, fill_device
from offload.regions import lent_bytes
from offload.sizes import format_bytes, option_bytes, parse_bytes
from offload.tiers import DEVICE

FIRST_STEPS = 3
"""After so many steps a run has allocated what it will."""
SPARE = 10
"""One part in so many is left free beside what others take in whole steps."""
SPARE_OF_FAILED = 2
"""The same beside what they had when they got no more: what would have come after that is not known."""

_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_OUT_OF_MEMORY = "offload: torch ran out of memory"


class DeviceAdvice:
    """Tells which `device_memory` would suit a run; see [Note: what others take].

    Where the model is on the CPU there is nothing to tell.

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where.
        room: what there was room for when that was decided.
        copier: copies between the model's device and RAM.
        own_bytes: returns how many bytes this library has on the device now.
    """

    def __init__(
        self, layout: Layout, placement: Placement, room: Room, copier: Copier, own_bytes: Callable[[], int]
    ) -> None:
        self._while_taken = 0  # what others took while the model was taken, and its parameters
        self._needs = Needs(layout, placement.choice, copier.direct)
        self._placement = placement
        self._room = room
        self._copier = copier
        self._own_bytes = own_bytes
        self._steps = 0
        self._has_stepped = False  # since gradients were dropped
        self._refusals = copier.refusals()
        self._process = os.getpid()

    def model_is_taken(self) -> None:
        """Called when the model has been taken, before it is used."""
        use = self._copier.use()
        if use is not None:
            self._while_taken = use.reserved_peak_bytes - lent_bytes(self._placement.regions, DEVICE)

    def step_ends(self) -> str | None:
        """Called after each step.

        Returns:
            After the first ones the line that says what `device_memory` would use what they left over. None later, and
            where nothing more would stay on the device.
        """
        self._steps += 1
        self._has_stepped = True
        if self._steps != FIRST_STEPS or (use := self._copier.use()) is None:
            return None
        wanted = _beside(use.peak_bytes - self._own_bytes(), use.within_bytes)
        if wanted <= self._placement.device_bytes:
            return None
        reserved = self._filled(wanted).needs.device_bytes
        wanted -= max(reserved - _beside(self._while_taken, use.within_bytes), 0)
        if wanted <= max(self._placement.device_bytes, self._room.device_memory or 0):
            return None
        there = self._filled(wanted)
        if _shares(there) == self._shares_now():
            return None
        needed = there.model_bytes + there.needs.device_bytes
        return (
            f"offload: {FIRST_STEPS} steps left {format_bytes(use.within_bytes - use.peak_bytes)} of the device's "
            f'memory unused: with device_memory="{option_bytes(needed)}" {self._would_stay(there)}'
        )

    def note(self, error: BaseException | None) -> None:
        """Adds a note to an out-of-memory error of torch's, which says what to lower. Other errors stay as they are."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        words = self._way_out(str(error))
        if words is not None and not any(_OUT_OF_MEMORY in one for one in getattr(error, "__notes__", ())):
            error.add_note(words)
        self._refusals = self._copier.refusals()

    def gradients_are_dropped(self) -> str | None:
        """Called by `zero_grad()`, without a step before if a backward failed.

        Returns:
            See `left_unsaid`.
        """
        line = None if self._has_stepped else self.left_unsaid()  # which takes 0.1 ms
        self._has_stepped = False
        return line

    def left_unsaid(self) -> str | None:
        """What is to be said of an out-of-memory error that has no note.

        Autograd raises those of a backward past this library.
        """
        if os.getpid() != self._process or (refusals := self._copier.refusals()) == self._refusals:
            return None
        self._refusals = refusals
        return self._way_out(str(getattr(sys, "last_value", "")))

    def _way_out(self, message: str) -> str | None:
        """What to lower to what, so that others get what they asked for, and half as much more.

        Args:
            message: of the error, which says how much was asked for; empty: it is not known.
        """
        use = self._copier.use()
        if use is None:
            return None
        own, asked = self._own_bytes(), _ASKED.search(message)
        others = use.within_bytes - own
        if asked is not None:
            unit = "" if asked[2].lower() == "bytes" else asked[2]
            others = max(others, use.allocated_bytes - own + parse_bytes(f"{float(asked[1])}{unit}", "device_memory"))
        found = (
            f"{_OUT_OF_MEMORY}: of {format_bytes(use.within_bytes)} of the device this library has "
            f"{format_bytes(own)}, and all else needs {format_bytes(others)} or more"
        )
        if not any(self._shares_now()):
            return f"{found}: give {', or '.join(self._without_shares())}"
        wanted, also = _beside(others, use.within_bytes, SPARE_OF_FAILED), ""
        try:
            there = self._filled(wanted)
        except BudgetError as error:
            wanted, there = error.needed, self._filled(error.needed)
            also = f", and {', or '.join(self._without_shares())}"
        return f'{found}: lower device_memory to "{option_bytes(wanted)}", with which {self._would_stay(there)}{also}'

    def _without_shares(self) -> list[str]:
        """What else needs less memory of the device."""
        choice = self._placement.choice
        found = ["a smaller micro-batch with accumulation"]
        if choice.activations.tier in (None, DEVICE):
            found.append('activation_tier="cpu"')
        if choice.states.tier == DEVICE:
            found.append('tier="cpu"')
        elif choice.params.tier == DEVICE:
            found.append('param_tier="cpu"')
        return found

    def _filled(self, device_memory: int) -> OnDevice:
        return fill_device(self._needs, replace(self._room, device_memory=device_memory))

    def _shares_now(self) -> tuple[int, int]:
        now = self._placement
        return len(now.staying), 0 if now.choice.states.tier == DEVICE else len(now.states.on_device)

    def _would_stay(self, there: OnDevice) -> str:
        """In words: what would stay on the device, and what does now."""
        kinds = ("streamed units", "chunks of optimizer states")
        both = zip(_shares(there), self._shares_now(), kinds, strict=True)
        return " and ".join(f"{new} {kind} would stay there (now {now})" for new, now, kind in both if new or now)


def _shares(there: OnDevice) -> tuple[int, int]:
    """How many streamed units stay on the device, and how many chunks of states."""
    return len(there.staying), 0 if there.needs.choice.states.tier == DEVICE else len(there.needs.on_device)


def _beside(others: int, within_bytes: int, spare: int = SPARE) -> int:
    """The `device_memory` that leaves others what they take, and more.

    Args:
        others: what they take, in bytes.
        within_bytes: what the device has for this process.
        spare: they get one part in so many more.
    """
    return max(within_bytes - others - others // spare, 0)
