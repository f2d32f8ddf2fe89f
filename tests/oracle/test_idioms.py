"""Each idiom in each placement against plain torch on the same data, with fp32 parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle import idioms  # noqa: F401  # registers them
from tests.oracle.harness import IDIOMS, PLACEMENTS, check


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_is_as_in_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    check(IDIOMS[name], placement, tmp_path)
