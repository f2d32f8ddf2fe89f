"""Directories of a run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Two, empty."""
    found = [tmp_path / name for name in "ab"]
    for place in found:
        place.mkdir()
    return found
