"""What make test-torch reads of pytest, and writes into the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import torch_versions
from tests.torch_versions import BEGINS, ENDS, PAGE, Result

CASES = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("afterwards")

def test_good(): pass
def test_of_two(): assert 1 == 2
@pytest.mark.parametrize("n", [1, 2])
def test_cases(n): assert n == 1
def test_left_out(): pytest.skip("not here")
def test_fails_twice(broken): assert 1 == 2
"""


def test_what_pytest_reports_is_counted_and_failures_can_be_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "test_some.py").write_text(CASES)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--rootdir", str(tmp_path)]
    subprocess.run([*command, "inner"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    found = torch_versions.read(report)
    assert (found.passed, found.skipped) == (2, 1)
    names = ["test_of_two", "test_cases[2]", "test_fails_twice"]
    assert found.failed == [f"inner/test_some.py::{name}" for name in names]
    subprocess.run([*command, *found.failed], cwd=tmp_path, stdout=subprocess.DEVNULL)
    again = torch_versions.read(report)
    assert (again.passed, again.failed) == (0, found.failed)


def test_a_row_takes_the_place_of_the_one_of_the_same_version() -> None:
    page = f"before\n{BEGINS}\n{ENDS}\nafter\n"
    for torch, passed in (("2.11.0", 1), ("2.9.1", 2), ("2.11.0", 3)):
        row = torch_versions.row((torch, "3.11.7", "CPUs"), [Result(passed), Result(0, 5, ["a.py::b[x|y]"])], None)
        page = torch_versions.written(page, row)
    assert page.startswith(f"before\n{BEGINS}\n| torch |")
    assert page.endswith(f"{ENDS}\nafter\n")
    rows = [line for line in page.splitlines() if line.startswith("| 2.")]
    assert [line[:15] for line in rows] == ["| 2.9.1 | 3.11.", "| 2.11.0 | 3.11"]
    assert "| 3 passed | 1 failed, 0 passed, 5 skipped |" in rows[1]
    assert "`a.py::b[x\\|y]`" in rows[1]


def test_a_row_says_why_a_version_is_refused() -> None:
    row = torch_versions.row(("2.10.0", "3.11.7", "CPUs"), [], "TorchVersionError: torch 2.10.0 lacks x")
    assert row.startswith("| 2.10.0 | 3.11.7 | CPUs | - | - |")
    assert row.endswith("| TorchVersionError: torch 2.10.0 lacks x |")


def test_a_page_without_the_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="lacks the lines"):
        torch_versions.written("nothing", "| 2.9.1 | 3.11.7 | CPUs |")
    assert torch_versions.written(PAGE.read_text(), "| 0.0.1 | 3.0.0 | CPUs |") != PAGE.read_text()
