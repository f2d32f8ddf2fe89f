"""A chunk in the cache: one object of all that is known of it.

[Note: residency]
| state   | RAM     | slot  | meaning                                                        |
|---------|---------|-------|----------------------------------------------------------------|
| EMPTY   | -       | -     | nothing: before the first lease, or used up                    |
| STORED  | -       | valid | only in the swap file                                          |
| READING | filling | valid | being read                                                     |
| CLEAN   | valid   | valid | both hold the same                                             |
| LEASED  | in use  | maybe | the holder of the lease may write to it                        |
| DIRTY   | valid   | old   | RAM is newer                                                   |
| WRITING | valid   | torn  | being written; readers wait                                    |

|   | from and to                   | by         | before                        | after                               |
|---|-------------------------------|------------|-------------------------------|-------------------------------------|
| 1 | EMPTY, STORED -> LEASED       | `_acquire` | it has a buffer               | zeros; of a use that overwrites all |
|   |                               |            |                               | of it, anything                     |
| 2 | STORED -> READING             | `_read`    | a buffer was free             | the engine fills it                 |
| 3 | READING -> CLEAN              | `_moved`   | checksum and step are right   | somebody may lease it               |
| 4 | CLEAN, DIRTY -> LEASED        | `_acquire` | nobody has it                 | `holder` has it                     |
| 5 | LEASED -> CLEAN               | `_release` | it was not written to         | its slot holds the same             |
| 6 | LEASED -> DIRTY               | `_release` | it was written to, or no slot | 7 at once, or later: see `newer`    |
|   |                               |            | has it yet                    |                                     |
| 7 | DIRTY -> WRITING              | `_write`   | the slot is not committed     | `stored` is what the slot will hold |
| 8 | WRITING -> STORED, CLEAN      | `_moved`   | all bytes are written         | its buffer is free; or retained     |
| 9 | LEASED -> EMPTY, STORED       | `_release` | nobody needs it any more; or  | its buffer is free                  |
|   |                               |            | the use was cut off before it |                                     |
|   |                               |            | wrote                         |                                     |
| 10| CLEAN -> STORED               | `_drop`    | it need not wait in RAM       | its buffer is free                  |
| 11| LEASED -> WRITING             | `_release` | a step of it was tried        | `tried` is what that place will     |
|   |                               |            |                               | hold; `stored` is what it was       |
| 12| STORED, CLEAN, DIRTY -> EMPTY | `discard`  | nobody needs what it holds    | its buffer is free                  |

Methods of `Store` (chunk_cache.py) make them, with its lock held. `reset` goes anywhere, for a return to the last
commit; `matches_slot` says what a store beneath has done. Residency is a state, never a count.

[Note: places]
C is the version that the last commit names, L the last step's, S one that was tried: a step of L that may be made. X, Y
and Z are places for versions, of which a run without trials has no Z.

|    | moment                           | C         | L | S | after a kill  |                                          |
|----|----------------------------------|-----------|---|---|---------------|------------------------------------------|
| 1  | step t was committed             | X         | X | - | t             |                                          |
| 2  | step t+1 is tried                | X         | X | Y | t             | two places would do                      |
| 3  | it is kept                       | X         | Y | - | t             | `stored` changes; nothing is written     |
| 3' | or: it is made with other inputs | X         | Y | - | t             | read from X, written over S              |
| 4  | step t+2 is tried                | X         | Y | Z | t             | C and L are both needed                  |
| 5  | it is kept                       | X         | Z | - | t             | the next one goes to Y                   |
| 5' | or: it is made with other inputs | X         | Y | - | t             | over L in place, as without trials       |
| 6  | step t+1 is committed beside S   | X, then Y | Y | Z | t, or t+1     | L is named, never S, which stays         |
| 7  | rollback                         | X         | X | - | t             | `reset` forgets S                        |

So a try goes to a place that is neither C's nor L's, and a step over L if that is not C. Whatever a commit that was cut
off has decided, it names C or L.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offload.errors import StateError
from offload.io.engine import IOFuture
from offload.storage.swap_file import memory_of
from offload.storage.swap_format import MAX_PLACES, SlotArrays

if TYPE_CHECKING:
    from offload.storage.chunk_cache import Lease


class Residency(Enum):
    """Where a chunk's content is; see [Note: residency]."""

    __hash__ = object.__hash__  # Enum's own, of the name, is a call in Python

    EMPTY = "empty"
    STORED = "stored"
    READING = "reading"
    CLEAN = "clean"
    LEASED = "leased"
    DIRTY = "dirty"
    WRITING = "writing"


_TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.EMPTY: frozenset({Residency.LEASED}),
    Residency.STORED: frozenset({Residency.READING, Residency.LEASED, Residency.EMPTY}),
    Residency.READING: frozenset({Residency.CLEAN}),
    Residency.CLEAN: frozenset({Residency.LEASED, Residency.STORED, Residency.EMPTY}),
    Residency.LEASED: frozenset(
        {Residency.CLEAN, Residency.DIRTY, Residency.EMPTY, Residency.STORED, Residency.WRITING}
    ),
    Residency.DIRTY: frozenset({Residency.LEASED, Residency.WRITING, Residency.EMPTY}),
    Residency.WRITING: frozenset({Residency.STORED, Residency.CLEAN}),
}


class Buffer:
    """Memory for a chunk, and views of it, which are made once."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._arrays: dict[SlotArrays, Sequence[Tensor]] = {}

    def arrays(self, slot: SlotArrays) -> Sequence[Tensor]:
        """The arrays of a chunk with such a slot, as tensors in this memory."""
        arrays = self._arrays.get(slot)
        if arrays is None:
            with torch.inference_mode(False):  # those of a first lease inside it could not be written to outside
                arrays = self._arrays[slot] = slot.views(self.memory)
        return arrays

    @cached_property
    def data(self) -> memoryview:
        return memory_of(self.memory)


class Version(NamedTuple):
    """Which content of a chunk a slot holds.

    Attributes:
        step: the step whose result it is.
        place: A (0), B (1) or C (2).
        checksum: the checksum that the commit names; None: the one in the slot's header counts.
    """

    step: int
    place: int
    checksum: int | None = None


class CachedChunk:
    """All that is known of one chunk of a store.

    Args:
        index: its number.
        slot_arrays: the arrays in its slot.
        memory: uint8, 1-D, for a chunk that never leaves RAM; None for one that streams.

    Attributes:
        index: its number.
        slot_arrays: the arrays in its slot.
        is_resident: whether it never leaves RAM.
        buffer: its memory; None while it has none.
        state: see [Note: residency].
        stored: the version that its slot holds, or will hold when a write has ended; None: none.
        committed: the place, A (0), B (1) or C (2), that the last commit names, which is never written to; None: none.
        tried: the version that a step would make of `stored`, where it was tried; see [Note: places]. None: none.
        newer: the step whose result is in RAM, in no slot and not being written; None: RAM has nothing newer.
        is_retained: whether it keeps its buffer until its next use.
        transfer: the read or write under way.
        holder: the lease that it was given to.
        writes: how many leases have written to it, but for those that tried a step.
    """

    __slots__ = (
        "buffer",
        "committed",
        "holder",
        "index",
        "is_resident",
        "is_retained",
        "newer",
        "slot_arrays",
        "state",
        "stored",
        "transfer",
        "tried",
        "writes",
    )

    state: Residency
    stored: Version | None
    committed: int | None
    tried: Version | None
    newer: int | None
    is_retained: bool
    transfer: IOFuture | None
    holder: weakref.ref[Lease] | None
    writes: int

    def __init__(self, index: int, slot_arrays: SlotArrays, memory: Tensor | None = None) -> None:
        self.index = index
        self.slot_arrays = slot_arrays
        self.is_resident = memory is not None
        self.buffer = None if memory is None else Buffer(memory)
        self.writes = 0
        self.reset(None)

    def __repr__(self) -> str:
        return f"<chunk {self.index}, {self.state.value}>"

    def change(self, state: Residency) -> None:
        """Makes a transition of [Note: residency].

        Raises:
            StateError: no transition leads from the present state to that one.
        """
        if state not in _TRANSITIONS[self.state]:
            legal = ", ".join(sorted(one.value for one in _TRANSITIONS[self.state]))
            raise StateError(f"chunk {self.index} is {self.state.value} and cannot become {state.value}, only {legal}")
        self.state = state

    def reset(self, version: Version | None) -> None:
        """Forgets all but its buffer, and the number of writes.

        Args:
            version: what its slot holds, which is committed; None: the chunk is new.
        """
        self.state = Residency.EMPTY if version is None else Residency.STORED
        self.stored = version
        self.committed = None if version is None else version.place
        self.newer = self.transfer = self.holder = self.tried = None
        self.is_retained = False

    def matches_slot(self, version: Version) -> None:
        """Records that a slot holds what is in RAM, whatever the state was.

        Args:
            version: what the slot holds.
        """
        self.state, self.stored, self.newer = Residency.CLEAN, version, None

    @property
    def place(self) -> int:
        """The place for its next version; see [Note: places]."""
        if self.stored is not None and self.stored.place != self.committed:
            return self.stored.place
        return 0 if self.committed != 0 else 1

    @property
    def place_to_try(self) -> int:
        """The place for a version that is tried; see [Note: places]."""
        needed = {self.committed, None if self.stored is None else self.stored.place}
        return next(place for place in range(MAX_PLACES) if place not in needed)

    @property
    def arrays(self) -> Sequence[Tensor]:
        """Its tensors in RAM, one for each array of its slot, each of shape (chunk.numel,)."""
        assert self.buffer is not None
        return self.buffer.arrays(self.slot_arrays)

    @property
    def data(self) -> memoryview:
        """Its bytes in RAM."""
        assert self.buffer is not None
        return self.buffer.data[: self.slot_arrays.nbytes]
