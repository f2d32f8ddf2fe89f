"""Which slot each chunk of a rank has, and where the slots lie in a file. Pure arithmetic.

[Note: numbers of slots]
The slots of a rank are numbered through all its files: those of one kind of chunks after those of another, in the order
of `ChunkKind`. A kind that is kept elsewhere has none. The number of its slot is what a chunk is called in the slot's
header, in a superblock and in a manifest.

            states        parameters    gradients     frozen
    chunk   0   1   2     0   1   2     0   1   2     0   1
    slot    0   1   2     3   4   5     6   7   8     9  10
            committed ----------|

What is committed are the first slots: states, and with split masters the rank's own parameters, which are the other
halves. With replicas a rank keeps parameters of other ranks as well, which these commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise

from offload.sizes import PAGE_BYTES
from offload.storage.swap_format import WHOLE, Chunks, SlotArrays


class ChunkKind(StrEnum):
    """The chunks of one store, in the order of their slots. The value is what plans call them."""

    STATES = "states"
    PARAMS = "parameters"
    GRADS = "stored gradients"
    FROZEN = "frozen parameters"


@dataclass(frozen=True)
class SlotMap:
    """Which slot each chunk of a rank has; see [Note: numbers of slots].

    Attributes:
        arrays: what the slot of each chunk holds, by kind, for the kinds that have slots.
        versions: how many places for its versions a slot of `several` has, 1 to 3: A, or A and B, or A, B and C. Any
            other slot has one.
        committed: how many slots, the first ones, are committed; None: nothing ever is.
        several: how many slots, the first ones, have `versions` places; None: those that are committed, or all if
            nothing ever is.
    """

    arrays: Mapping[ChunkKind, Sequence[SlotArrays]]
    versions: int = 1
    committed: int | None = None
    several: int | None = None

    @cached_property
    def _ranges(self) -> dict[ChunkKind, range]:
        kinds = [kind for kind in ChunkKind if kind in self.arrays]
        ends = accumulate((len(self.arrays[kind]) for kind in kinds), initial=0)
        return {kind: range(*both) for kind, both in zip(kinds, pairwise(ends), strict=True)}

    @property
    def total(self) -> int:
        """How many slots there are."""
        return len(self.all_arrays)

    @cached_property
    def all_arrays(self) -> tuple[SlotArrays, ...]:
        """What each slot holds, by its number."""
        return tuple(arrays for kind in self._ranges for arrays in self.arrays[kind])

    def of(self, kind: ChunkKind) -> range:
        """The slots of a kind, by chunk; empty if it has none."""
        return self._ranges.get(kind, range(0))

    def at(self, kind: ChunkKind, chunk: int) -> int:
        """The number of a chunk's slot.

        Raises:
            IndexError: the chunk has no slot.
        """
        return self.of(kind)[chunk]

    def committed_chunks(self, kind: ChunkKind) -> range:
        """The chunks of a kind that are committed."""
        slots = self.of(kind)
        return range(max(min(self.committed or 0, slots.stop) - slots.start, 0))

    def versions_of(self, slot: int) -> int:
        """How many places for its versions a slot has in its file."""
        several = self.committed if self.several is None else self.several
        return self.versions if several is None or slot < several else 1

    def describe(self, numbers: Sequence[int]) -> Chunks:
        """What a superblock says of the committed slots, or of all slots if nothing is ever committed.

        Args:
            numbers: the slots in the file.
        """
        told = range(self.total)[: self.committed]
        arrays = [self.all_arrays[slot] for slot in told]
        found: Chunks = {"held": [slot for slot in numbers if slot in told], "numels": [one.numel for one in arrays]}
        if any(one.itemsizes != WHOLE for one in arrays):
            found["itemsizes"] = [[*one.itemsizes] for one in arrays]
        if any(one.blocks for one in arrays):
            found["blocks"] = [[*one.blocks] for one in arrays]
        return found


class SlotTable:
    """Where the slots lie in one swap file: the places A of all that have several, their places B, C, then the others.

    Args:
        slots: the slots of the rank.
        numbers: the slots in this file, in the order in which they lie.

    Attributes:
        slots: see above.
        nbytes: the bytes of the file.
        uncommitted_nbytes: what the file would take without commits.
    """

    def __init__(self, slots: SlotMap, numbers: Sequence[int]) -> None:
        self.slots = slots
        sizes = {slot: slots.all_arrays[slot].nbytes for slot in numbers}
        several = [slot for slot in numbers if slots.versions_of(slot) == slots.versions]
        once = [slot for slot in numbers if slots.versions_of(slot) < slots.versions]
        *starts, self._step = accumulate((sizes[slot] for slot in several), initial=0)
        self._starts = dict(zip(several, starts, strict=True))
        *starts, end = accumulate((sizes[slot] for slot in once), initial=slots.versions * self._step)
        self._starts |= zip(once, starts, strict=True)
        self.nbytes = PAGE_BYTES + end
        self.uncommitted_nbytes = self.nbytes - (0 if slots.committed is None else self._step)

    def offset(self, slot: int, place: int = 0) -> int:
        """Where a place of a slot begins in the file, in bytes.

        Args:
            slot: the number of the slot.
            place: A (0), B (1) or C (2).
        """
        return PAGE_BYTES + place * self._step + self._starts[slot]
