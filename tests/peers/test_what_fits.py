"""The README's table of what fits is what `offload plan` says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers
pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1800)
def test_the_table_is_that_of_offload_plan() -> None:
    specification = importlib.util.spec_from_file_location("what_fits", ROOT / "docs" / "what_fits.py")
    assert specification is not None
    assert specification.loader is not None
    what_fits = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(what_fits)
    page = what_fits.README.read_text()
    assert page == what_fits.written(page, what_fits.table()), "run python docs/what_fits.py"
