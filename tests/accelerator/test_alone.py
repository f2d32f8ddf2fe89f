"""The simulated accelerator without this project: its folder is all that a process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simulated_device
from tests.test_docs import scripts

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

TESTS = Path(__file__).parents[1]
WITHOUT_THE_REST = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules["offload"] = sys.modules["tests"] = sys.modules["support"] = None  # importing one of them raises
"""
MODULES = """
import importlib, pkgutil, simulated_device
for module in pkgutil.iter_modules(simulated_device.__path__, "simulated_device."):
    print(importlib.import_module(module.name).__name__)
"""


def alone(code: str) -> list[str]:
    """What a process prints that has torch and the folder, and neither this project nor the current directory."""
    command = [sys.executable, "-I", "-c", WITHOUT_THE_REST + code, str(TESTS)]
    environment = {name: value for name, value in os.environ.items() if name != "OFFLOAD_TEST_DEVICE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_program_of_its_page_sees_a_missing_wait() -> None:
    """It asserts that results are wrong without the wait, and right with it."""
    (_, program), *_ = scripts(TESTS.parent / "docs" / "simulated-device.md", run=False)
    (race,) = alone(program)
    assert "reads what copy to device on stream" in race


def test_each_of_its_modules_is_imported_without_the_rest() -> None:
    assert alone(MODULES) == ["simulated_device.process_group"]
