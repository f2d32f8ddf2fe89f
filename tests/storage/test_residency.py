from __future__ import annotations

import itertools

import pytest

from offload.errors import StateError
from offload.storage.cached_chunk import CachedChunk, Residency
from offload.storage.swap_format import SlotArrays

# Written out here a second time: a move added there by mistake has to be added here on purpose.
LEGAL = {
    ("empty", "leased"),
    ("stored", "reading"),
    ("stored", "leased"),
    ("reading", "clean"),
    ("clean", "leased"),
    ("clean", "stored"),
    ("leased", "clean"),
    ("leased", "dirty"),
    ("leased", "empty"),
    ("leased", "stored"),
    ("leased", "writing"),
    ("stored", "empty"),
    ("clean", "empty"),
    ("dirty", "empty"),
    ("dirty", "leased"),
    ("dirty", "writing"),
    ("writing", "stored"),
    ("writing", "clean"),
}


SLOT = SlotArrays(5)


def chunk_in(state: Residency) -> CachedChunk:
    """A chunk that got into `state` by legal transitions."""
    paths: list[list[Residency]] = [[]]
    seen = {Residency.EMPTY}
    for path in paths:
        now = path[-1] if path else Residency.EMPTY
        if now is state:
            chunk = CachedChunk(1, SLOT)
            for step in path:
                chunk.change(step)
            return chunk
        for after in Residency:
            if (now.value, after.value) in LEGAL and after not in seen:
                seen.add(after)
                paths.append([*path, after])
    raise AssertionError(f"nothing leads to {state}")


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Residency, Residency)))
def test_a_transition_is_made_if_it_is_legal_and_raises_if_not(before: Residency, after: Residency) -> None:
    chunk = chunk_in(before)
    if (before.value, after.value) in LEGAL:
        chunk.change(after)
        assert chunk.state is after
    else:
        with pytest.raises(StateError, match=f"chunk 1 is {before.value} and cannot become {after.value}"):
            chunk.change(after)
        assert chunk.state is before
