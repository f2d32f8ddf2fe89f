from __future__ import annotations

import itertools

import pytest

from offload.errors import StateError
from offload.storage.chunk_cache import Residency, ResidencyTable

# Written out here a second time: a move added there by mistake has to be added here on purpose.
LEGAL = {
    ("empty", "leased"),
    ("stored", "reading"),
    ("stored", "leased"),
    ("reading", "clean"),
    ("reading", "stored"),
    ("clean", "leased"),
    ("clean", "stored"),
    ("leased", "clean"),
    ("leased", "dirty"),
    ("leased", "empty"),
    ("leased", "stored"),
    ("dirty", "leased"),
    ("dirty", "writing"),
    ("writing", "stored"),
    ("writing", "clean"),
}


def table_in(state: Residency) -> ResidencyTable:
    """A table whose chunk 1 got into `state` by legal moves."""
    paths: list[list[Residency]] = [[]]
    seen = {Residency.EMPTY}
    for path in paths:
        now = path[-1] if path else Residency.EMPTY
        if now is state:
            table = ResidencyTable(3)
            for step in path:
                table.change(1, step)
            return table
        for after in Residency:
            if (now.value, after.value) in LEGAL and after not in seen:
                seen.add(after)
                paths.append([*path, after])
    raise AssertionError(f"nothing leads to {state}")


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Residency, Residency)))
def test_a_move_is_made_if_it_is_legal_and_raises_if_not(before: Residency, after: Residency) -> None:
    table = table_in(before)
    if (before.value, after.value) in LEGAL:
        table.change(1, after)
        assert table[1] is after
    else:
        with pytest.raises(StateError, match=f"chunk 1 is {before.value} and cannot become {after.value}"):
            table.change(1, after)
        assert table[1] is before
    assert table[0] is table[2] is Residency.EMPTY
