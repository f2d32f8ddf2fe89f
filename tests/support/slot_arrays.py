"""Records of whole states."""

from __future__ import annotations

from collections.abc import Iterable

from offload.storage.swap_format import SlotArrays


def slot_arrays(numels: Iterable[int]) -> list[SlotArrays]:
    return [SlotArrays(numel) for numel in numels]
