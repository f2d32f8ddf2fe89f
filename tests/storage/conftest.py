from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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
