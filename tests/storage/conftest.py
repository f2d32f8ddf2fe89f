from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.storage.chunk_cache import Lease
from tests.support.faulty_engine import FaultyEngine


@pytest.fixture
def engine() -> Iterator[FaultyEngine]:
    made = FaultyEngine(delay_s=0.0005)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False, capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("may not mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


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
