"""Slots of whole states."""

from __future__ import annotations

from collections.abc import Iterable

from offload.storage.slot_map import ChunkKind, SlotMap, SlotTable
from offload.storage.swap_format import SlotArrays


def slots_of(numels: Iterable[int], versions: int = 1, *, is_committed: bool = False) -> SlotMap:
    """The slots of chunks of so many elements. Args: versions: of each; is_committed: whether they are."""
    arrays = [SlotArrays(numel) for numel in numels]
    return SlotMap({ChunkKind.STATES: arrays}, versions, len(arrays) if is_committed else None)


def file_bytes(slots: SlotMap) -> int:
    """Bytes of the swap file if all slots lie in one."""
    return SlotTable(slots, range(slots.total)).nbytes
