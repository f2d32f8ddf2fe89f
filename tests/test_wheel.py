"""The wheel: what is in it, and that it trains where nothing of this folder and no matplotlib is."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_BYTES = 1_000_000
WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
# An editable install of this folder comes before any path.
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import offload
assert offload.__file__.startswith(sys.argv.pop(1)), offload.__file__
from offload.cli.main import run
run()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_only_the_package_is_in_it(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = next(name for name in file.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(file.read(about))
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload").rglob("*.py")}
    machines = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload").rglob("*.toml")}
    assert len(machines) > 5
    assert names - {"offload/liboffload_kernels.so"} == sources | machines | {
        "offload/py.typed",
        "offload/native/device_kernels.h",
    }
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert not [line for line in metadata.get_all("Requires-Dist", []) if "matplotlib" in line and "extra" not in line]


def test_it_trains(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(command, check=True)
    environment = os.environ | {"PYTHONPATH": str(installed)}
    options = ["train", "--preset", "1m", "--steps", "2", "--batch", "1", "--seq", "16", "--validation", "1"]
    command = [sys.executable, "-P", "-c", WITHOUT_MATPLOTLIB, str(installed), *options, "--json"]
    found = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert '"steps": 2' in found.stdout
