"""bench/gpu.py at tiny sizes on the simulated accelerator, as on a machine that has a GPU for some minutes: from a copy
of this folder, with a Python that has neither this library nor msgspec, without a network, in several calls."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_cases
from offload.native import library_path
from tests import simulated_device

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
    pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a Python in which this library is not installed"),
]
ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_BYTES = 8, 16 << 20
"""That come back from a call."""
SANITIZER = """#!/bin/sh
# Runs what it is given.
while [ "$1" != "--print-limit" ]; do shift; done
shift 2
"$@"
code=$?
echo "========= ERROR SUMMARY: 0 errors"
exit $code
"""


@dataclass(frozen=True)
class Machine:
    """Attributes: checkout: nobody writes to it; out: emptied before each call; scratch: a folder on its disk."""

    checkout: Path
    out: Path
    scratch: Path
    wheels: Path
    environment: dict[str, str]

    def call(self, *options: str) -> str:
        """What it says. What came back is in `out`, and the next call gets its results."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        before = self.files()
        command = [sys._base_executable, "tests/support/gpu_bench.py", str(self.out), "--tiny"]  # type: ignore[attr-defined]
        command += ["--wheels", str(self.wheels), "--scratch", str(self.scratch), *options]
        known = self.out.with_suffix(".json")
        command += ["--results", str(known)] if known.exists() else []
        done = subprocess.run(command, cwd=self.checkout, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.files() == before
        assert not list(self.scratch.iterdir())
        back = list(self.out.rglob("*"))
        assert len(back) <= MOST_FILES
        assert all(re.fullmatch(r"[\w.-]+", file.name) and file.stat().st_size <= MOST_BYTES for file in back)
        shutil.copy(self.out / "results.json", known)
        return done.stdout

    def files(self) -> dict[str, float]:
        found = (file for file in self.checkout.rglob("*") if "__pycache__" not in file.parts)
        return {str(file): file.stat().st_mtime for file in found if file.is_file()}

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "results.json").read_text())
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(*(tmp_path / name for name in ("checkout", "out", "scratch", "wheels")), environment={})
    made.scratch.mkdir()
    made.wheels.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "results", "*.so")
    for folder in ("bench", "kernels", "offload", "tests"):
        shutil.copytree(ROOT / folder, made.checkout / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", made.checkout)
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "offload" not in entry.name and entry.suffix != ".pth" and not entry.name.startswith("msgspec"):
            (packages / entry.name).symlink_to(entry)
    programs = tmp_path / "bin"
    programs.mkdir()
    sanitizer = programs / "compute-sanitizer"
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    ours = ("PYTHON", "PYTEST", "OFFLOAD", "VIRTUAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    made.environment.update(
        kept,
        PATH=os.pathsep.join([str(programs), os.environ["PATH"]]),
        PYTHONPATH=str(packages),
        PYTHONNOUSERSITE="1",
        PIP_NO_INDEX="1",
        OFFLOAD_TEST_CACHE=os.environ.get("OFFLOAD_TEST_CACHE", tempfile.gettempdir()),
    )
    _pack_msgspec(made.wheels)
    return made


def _pack_msgspec(wheels: Path) -> None:
    """The wheel that msgspec was installed from, or like it."""
    purelib = Path(sysconfig.get_path("purelib"))
    with zipfile.ZipFile(wheels / "msgspec-0-py3-none-any.whl", "w") as archive:
        for folder in purelib.glob("msgspec*"):
            for file in folder.rglob("*"):
                archive.write(file, str(file.relative_to(purelib)))


def forbid_writing(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def endings(says: str) -> dict[str, str]:
    """The status of each case that has ended in a call."""
    return dict(re.findall(r"^(\S+): (ok|differs|failed|killed|skipped|cut): ", says, re.MULTILINE))


@pytest.mark.timeout(300)
def test_two_calls_from_a_folder_have_run_their_cases_once(machine: Machine) -> None:
    library = library_path()
    if library is not None:
        shutil.copy(library, machine.checkout / "offload")
    forbid_writing(machine.checkout / "offload")
    chosen = ("--only", "toy-cpu,toy-streamed-nvme,link,tests-*")
    assert endings(machine.call("--only", "toy-cpu,link")) == {"toy-cpu": "ok", "link": "ok"}
    assert endings(machine.call(*chosen)) == {"toy-streamed-nvme": "ok", "tests-gpu-training": "ok"}
    data = machine.data()
    assert set(data["cases"]) == {"toy-cpu", "link", "toy-streamed-nvme", "tests-gpu-training"}
    assert data["cases"]["toy-streamed-nvme"]["says"] == 'bits equal tier="cpu"'
    [described] = data["machines"]
    assert described["packages"]["msgspec"] == "missing"
    if library is not None:
        assert described["software"]["kernel library"] == "in the package"
        assert described["software"]["kernels"] != "torch"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_some_calls_each_case_has_run_once(machine: Machine) -> None:
    """The kernels are built on the machine."""
    wanted = {case.name for case in gpu.cases(tiny=True)}
    says = [machine.call("--only", "toy-*")]
    files = {file.name for file in machine.out.iterdir()}
    while "all cases have run" not in says[-1] or len(says) == 1:
        assert len(says) < 6
        says.append(machine.call("--minutes", "3"))
        files |= {file.name for file in machine.out.iterdir()}
    ended = Counter(name for one in says for name, status in endings(one).items() if status != "cut")
    assert ended == dict.fromkeys(wanted, 1)
    data = machine.data()
    assert {name: one["says"] for name, one in data["cases"].items() if one["status"] != "ok"} == {}
    assert data["cases"].keys() == wanted
    for name, one in data["cases"].items():
        assert one["seconds"] > 0
        if "nvme" in name and name.startswith("toy"):
            assert one["nvme_read_bytes"] > 0
        if name.startswith("train"):
            assert one["figures"]["x torch"] > 0
            assert one["figures"]["tokens/s"] > 0
    assert data["cases"]["train-nvme-32"]["stats"]["nvme_read_bytes"] > 0
    # As predictions name them, with the full sizes.
    assert {"1 MiB up, GB/s", "1 MiB both, GB/s each", "8 KiB down, us"} <= data["cases"]["link"]["figures"].keys()
    assert {"1 MiB empty, s a GiB", "1 MiB populated, s a GiB"} <= data["cases"]["pin"]["figures"].keys()
    assert {"2 threads, GB/s", "limit, 2 threads, GB/s"} <= data["cases"]["adam-cpu"]["figures"].keys()
    assert data["cases"]["train-cpu-32"]["figures"]["s a step"] > 0
    assert data["cases"]["train-cpu-32"]["figures"]["s of the first step"] > 0
    assert data["cases"]["train-nvme-32"]["figures"]["GB/s of NVMe"] > 0
    assert {"results.json", "report.md", "training.png", "timeline.png", "trace-streamed-cpu.json.gz"} <= files
    software = data["machines"][0]["software"]
    if shutil.which("cmake") and shutil.which("cc"):
        assert (software["kernel library"], software["fallback"]) == ("built here", None)
    page = (machine.out / "report.md").read_text()
    assert "simulated accelerator" in page
    assert "| toy-parked | ok |" in page


def run_toy(tmp_path: Path, name: str, expected: dict[str, gpu_cases.Bits]) -> dict[str, Any]:
    device = torch.device(simulated_device.NAME, 0)
    context = gpu_cases.Context(device, gpu.TINY, tmp_path / "case", tmp_path, [], lambda values: None, expected)
    special, options = gpu.TOYS[name]
    return gpu_cases.result_of(context, "toy", {"special": special, "options": options})


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_a_bit_that_is_another_is_found(tmp_path: Path, as_it_was: None) -> None:
    expected: dict[str, gpu_cases.Bits] = {}
    assert run_toy(tmp_path, "streamed-cpu", expected)["says"] == 'bits equal tier="cpu"'
    expected[""]["blocks.1.qkv.weight, exp_avg"] = "others"
    found = run_toy(tmp_path, "streamed-cpu", expected)
    assert found["status"] == "differs"
    assert found["says"].endswith("differ, first ['blocks.1.qkv.weight, exp_avg']")
    assert found["answers"]


def test_a_run_on_nvme_whose_states_stay_in_ram_is_a_failure(
    tmp_path: Path, as_it_was: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.planner.least_cpu_memory", lambda *args, **options: 1 << 30)
    found = run_toy(tmp_path, "nvme", {})
    assert (found["status"], found["says"]) == ("failed", "AssertionError: nothing was read from NVMe")
    assert "require_streamed" in found["traceback"]


# Microseconds, as in torch.profiler's traces.
KERNEL, COPY = {"cat": "kernel", "name": "gemm"}, {"cat": "gpu_memcpy", "name": "Memcpy HtoD"}


def test_the_share_of_copies_under_compute_is_that_of_their_time() -> None:
    events = [
        {**KERNEL, "ts": 0, "dur": 10},
        {**KERNEL, "ts": 5, "dur": 10},
        {**COPY, "ts": 10, "dur": 10},  # half of it is under a kernel
        {**COPY, "ts": 12, "dur": 2},  # all
        {**COPY, "name": "Memcpy DtoD", "ts": 30, "dur": 50},
    ]
    assert gpu_cases.share_under_compute(events) == pytest.approx(7 / 12)
    assert gpu_cases.share_under_compute(events[:2]) is None


def test_a_figure_that_is_no_number_is_said() -> None:
    said = gpu_cases.sayable({"figures": {"a": math.nan, "b": 1.5}, "times": (math.inf, 2)})
    assert said == {"figures": {"a": "nan", "b": 1.5}, "times": ["inf", 2]}
