from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload.storage.chunk_cache import Lease
from tests.support.faulty_engine import FaultyEngine


@pytest.fixture
def engine() -> Iterator[FaultyEngine]:
    made = FaultyEngine(delay_s=0.0005)
    yield made
    made.close()


def put(lease: Lease, value: float) -> None:
    """Gives all arrays of a lease values that `value_in` knows."""
    for number, state in enumerate(lease.arrays):
        state.fill_(value + number / 4)


def value_in(lease: Lease) -> float:
    """What was `put`, in all arrays; 0 if nothing was."""
    value = lease.master[0].item()
    for number, state in enumerate(lease.arrays):
        assert state.eq(value + number / 4 if value else 0).all()
    return value
