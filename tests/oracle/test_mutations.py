"""Each idiom fails when a part of the mechanism that it needs is taken out."""

from __future__ import annotations

import pytest

from tests.oracle import idioms  # noqa: F401  # registers them
from tests.oracle.harness import IDIOMS, PLACEMENTS
from tests.oracle.mutations import MUTATIONS, sees


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name, idiom in IDIOMS.items() if len(idiom.refused) < len(PLACEMENTS)])
def test_an_idiom_sees_that_a_part_is_missing(name: str) -> None:
    assert any(sees(IDIOMS[name], mutation) for mutation in reversed(MUTATIONS)), "it shows nothing"
