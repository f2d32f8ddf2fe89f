"""Records of whole states."""

from __future__ import annotations

from collections.abc import Iterable

from offload.storage.swap_format import Record


def records(numels: Iterable[int]) -> list[Record]:
    return [Record(numel) for numel in numels]
