"""docs/what-it-takes.md has a row for each model and machine, as its script writes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload.planner import machine_file
from tests.support.processes import ROOT

MODELS = ("7B", "13B", "70B", "30B-A3B")
PAGE = ROOT / "docs" / "what-it-takes.md"


def test_the_page_has_six_machines_that_come_with_the_package_for_each_model() -> None:
    page = PAGE.read_text()
    for model in MODELS:
        rows = _rows(page, model)
        assert len(rows) == 6
        assert {row.split("|")[1].strip() for row in rows} <= set(machine_file.names())
    assert "nothing of this was measured" in page


def _rows(page: str, model: str) -> list[str]:
    """The lines of a model's table."""
    section = page.partition(f"\n## {model}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| machine")]


@pytest.mark.slow
def test_rows_are_those_of_the_script() -> None:
    pytest.importorskip("transformers")
    code = "import what_it_takes; print(what_it_takes.table('7B'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert _rows("\n" + done.stdout, "7B") == _rows(PAGE.read_text(), "7B")
