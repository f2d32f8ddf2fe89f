from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n ranks, started once for all tests."""
    made = Worlds()
    yield made
    made.close()
