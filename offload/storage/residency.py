"""Which copies of a chunk exist, and which moves between those states are legal.

| state   | RAM     | slot  | meaning                                                        |
|---------|---------|-------|----------------------------------------------------------------|
| EMPTY   | -       | -     | nothing: before the first lease, or used up                    |
| STORED  | -       | valid | only in the swap file                                          |
| READING | filling | valid | coming                                                         |
| CLEAN   | valid   | valid | both hold the same                                             |
| LEASED  | in use  | maybe | somebody may be writing to it: nothing else may touch it       |
| DIRTY   | valid   | old   | RAM is newer                                                   |
| WRITING | valid   | torn  | going; readers wait                                            |

From STORED a chunk is LEASED at once if its user overwrites all of it, and STORED again if that was cut off; and from
LEASED it is EMPTY if nobody needs it any more.

A state, never a count: the table says all there is to know about a chunk.
"""

from __future__ import annotations

from enum import Enum

from offload.errors import StateError


class Residency(Enum):
    EMPTY = "empty"
    STORED = "stored"
    READING = "reading"
    CLEAN = "clean"
    LEASED = "leased"
    DIRTY = "dirty"
    WRITING = "writing"


_LEGAL: dict[Residency, frozenset[Residency]] = {
    Residency.EMPTY: frozenset({Residency.LEASED}),
    Residency.STORED: frozenset({Residency.READING, Residency.LEASED}),
    Residency.READING: frozenset({Residency.CLEAN, Residency.STORED}),
    Residency.CLEAN: frozenset({Residency.LEASED, Residency.STORED}),
    Residency.LEASED: frozenset({Residency.CLEAN, Residency.DIRTY, Residency.EMPTY, Residency.STORED}),
    Residency.DIRTY: frozenset({Residency.LEASED, Residency.WRITING}),
    Residency.WRITING: frozenset({Residency.STORED, Residency.CLEAN}),
}


class ResidencyTable:
    """The state of every chunk; all begin EMPTY."""

    def __init__(self, chunks: int) -> None:
        self._states = [Residency.EMPTY] * chunks

    def __getitem__(self, chunk: int) -> Residency:
        return self._states[chunk]

    def move(self, chunk: int, to: Residency) -> None:
        """Raises: StateError if the move is not legal."""
        now = self._states[chunk]
        if to not in _LEGAL[now]:
            legal = ", ".join(sorted(state.value for state in _LEGAL[now]))
            raise StateError(f"chunk {chunk} is {now.value} and cannot become {to.value}, only {legal}")
        self._states[chunk] = to

    def reset(self, chunk: int, to: Residency) -> None:
        """Whatever it was: for a return to the last commit, when nobody uses the chunk."""
        self._states[chunk] = to
