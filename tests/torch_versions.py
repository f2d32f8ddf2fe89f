"""Runs the tests with several versions of torch, and writes what came of it into docs/development.md.

`python -m tests.torch_versions 2.11.0 2.14.1`. Each version is installed from pip's index, with the versions of
constraints.txt for all else, into an environment of its own, which is deleted afterwards: a build for CUDA takes 5 GB.
The library is this folder's, and its kernels are of one wheel for all. What fails is repeated alone, because tests that
wait may take too long beside others. A row is written as soon as its version is through.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/development.md"
BEGINS, ENDS = "<!-- tests/torch_versions.py writes this table -->", "<!-- until here -->"
HEAD = """\
| torch | Python | built for | `make unit` | `make device` | day (UTC) | what failed |
|---|---|---|---|---|---|---|"""
MOST_NAMES = 5
"""Failed tests that a row names."""

DESCRIBE = """
import json, platform, torch
print(json.dumps([torch.__version__, platform.python_version(), torch.version.cuda]))
"""


@dataclass(frozen=True)
class Suite:
    """What pytest is given, and what it finds in its environment."""

    options: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


SUITES = (
    Suite(),
    Suite(("-m", "device and not slow"), ("tests/accelerator", "tests/gpu"), {"OFFLOAD_TEST_DEVICE": "simulated"}),
)
"""The default suite, and the one of make device."""


@dataclass
class Result:
    """Of one suite. Attributes: failed: tests that failed, also when they were repeated alone."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        words = [f"{self.passed} passed", f"{self.skipped} skipped" if self.skipped else ""]
        return ", ".join(filter(None, [f"{len(self.failed)} failed" if self.failed else "", *words]))


@dataclass(frozen=True)
class Environment:
    """A Python with one version of torch, in a folder of its own."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    def install(self, base: str, torch: str, wheel: Path) -> None:
        """Raises: CalledProcessError if pip fails."""
        subprocess.run([base, "-m", "venv", str(self.folder)], check=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = [*project["optional-dependencies"]["plots"], *project["optional-dependencies"]["dev"]]
        wanted = [one for one in (*project["dependencies"], *extras) if not re.match("(torch|offload)\\b", one)]
        pinned = (ROOT / "constraints.txt").read_text().splitlines()
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(constraints), f"torch=={torch}", *wanted], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)

    def describe(self) -> tuple[str, str, str]:
        """The versions of torch and Python, and what torch was built for."""
        done = subprocess.run([self.python, "-c", DESCRIBE], check=True, capture_output=True, text=True)
        torch, python, cuda = json.loads(done.stdout)
        return torch.partition("+")[0], python, f"CUDA {cuda}" if cuda else "CPUs"

    def refusal(self) -> str | None:
        """Why the library cannot be imported; None if it can."""
        done = subprocess.run([self.python, "-c", "import offload.torch_private"], capture_output=True, text=True)
        return done.stderr.strip().splitlines()[-1] if done.returncode else None

    def test(self, suite: Suite) -> Result:
        """Runs pytest, and what fails once more, in one process."""
        result = self._pytest([*suite.options, "-n", "2", *suite.paths], suite.environ)
        if result.failed:
            again = self._pytest([*suite.options, *result.failed], suite.environ)
            result.passed += again.passed
            result.failed = again.failed
        return result

    def _pytest(self, args: Sequence[str], environ: dict[str, str]) -> Result:
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *args]
        subprocess.run(command, cwd=ROOT, env=os.environ | environ, check=False)
        return read(report)


def read(report: Path) -> Result:
    """What a report in JUnit's format says. Raises: FileNotFoundError if pytest ended before it wrote one."""
    result = Result()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = {child.tag for child in case}
        if found & {"failure", "error"}:
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            if name not in result.failed:  # a test and its fixture may both fail
                result.failed.append(name)
        elif "skipped" in found:
            result.skipped += 1
        else:
            result.passed += 1
    return result


def row(described: tuple[str, str, str], results: list[Result], refusal: str | None) -> str:
    """A line of the table."""
    failed = [f"`{name}`" for result in results for name in result.failed]
    if len(failed) > MOST_NAMES:
        failed[MOST_NAMES:] = [f"and {len(failed) - MOST_NAMES} others"]
    suites = map(str, results) if results else ["-"] * len(SUITES)
    cells = [*described, *suites, f"{datetime.now(UTC):%Y-%m-%d}", refusal or ", ".join(failed) or "-"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def written(page: str, new: str) -> str:
    """The page with a row, instead of the one of the same torch, Python and build if there is one."""
    before, begins, rest = page.partition(BEGINS)
    table, ends, after = rest.partition(ENDS)
    if not begins or not ends:
        raise ValueError(f"the page lacks the lines {BEGINS} and {ENDS}")
    rows = {_key(line): line for line in (*table.strip().splitlines()[2:], new)}
    return f"{before}{BEGINS}\n{HEAD}\n" + "\n".join(rows[key] for key in sorted(rows)) + f"\n{ENDS}{after}"


def _key(line: str) -> tuple[Any, ...]:
    torch, python, build = (cell.strip() for cell in line.split("|")[1:4])
    return *(tuple(map(int, version.split("."))) for version in (torch, python)), build


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.14.1")
    parser.add_argument("--python", default=sys.executable, help="the Python that environments are made of")
    parser.add_argument("--scratch", type=Path, help="where environments are made; default: the system's folder")
    parser.add_argument("--tests", nargs="*", default=[], help="of the default suite; then no row is written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torch-versions-", dir=args.scratch) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--wheel-dir", scratch, str(ROOT)], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        for version in args.versions:
            with tempfile.TemporaryDirectory(prefix=f"{version}-", dir=scratch) as folder:
                environment = Environment(Path(folder))
                environment.install(args.python, version, wheel)
                described, refusal = environment.describe(), environment.refusal()
                suites = [Suite(paths=tuple(args.tests))] if args.tests else SUITES
                results = [] if refusal else [environment.test(suite) for suite in suites]
                line = row(described, results, refusal)
                print(line, flush=True)
                if not args.tests:
                    PAGE.write_text(written(PAGE.read_text(), line))


if __name__ == "__main__":
    main()
