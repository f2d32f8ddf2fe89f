"""Calls of bench/gpu.py: whatever a case does, or a kill of the call, costs that case alone. Without a device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_machine

ROOT = Path(__file__).parents[1]
NAMES = ["good", "crashes", "hangs", "loses the device", "differs", "kills its call", "slow"]


class Calls:
    """Calls of tests/support/gpu_calls.py. Attributes: out: where results go; scratch: where their folders are made."""

    def __init__(self, folder: Path) -> None:
        self.out, self.scratch = folder / "out", folder / "scratch"
        self.scratch.mkdir()
        self.flag, self.broken = folder / "flag", folder / "broken"
        self.environment = os.environ | {"FLAG": str(self.flag), "BROKEN": str(self.broken)}

    def begin(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "support" / "gpu_calls.py"), str(self.out), "--tiny"]
        command += ["--scratch", str(self.scratch), *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, text=True, stdout=pipe, stderr=pipe)

    def run(self, *options: str) -> str:
        """What it says; and to the test, its exit code."""
        child = self.begin(*options)
        says, errors = child.communicate(timeout=100)
        self.code = child.returncode
        return says + errors

    def results(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads((self.out / "results.json").read_text())["cases"]
        return found

    def statuses(self) -> dict[str, str]:
        return {name: one["status"] for name, one in self.results().items()}


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


def is_alive(pid: float) -> bool:
    state = gpu_machine.read(f"/proc/{int(pid)}/stat").rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def test_a_call_goes_on_after_cases_that_crash_hang_or_lose_the_device(calls: Calls) -> None:
    says = calls.run("--only", "good,crashes,hangs,loses*,differs")
    assert calls.code == 0, says
    assert "all cases have run" in says
    statuses = ["ok", "killed", "killed", "failed", "differs"]
    assert calls.statuses() == dict(zip(NAMES, statuses, strict=False))
    found = calls.results()
    assert "SIGSEGV" in found["crashes"]["says"]
    assert found["hangs"]["says"] == "not finished in 2 s"
    assert found["hangs"]["figures"]["pid"], "what it had found before is kept"
    pids = [found[name]["figures"]["pid"] for name in NAMES[:5]]
    assert pids[0] == pids[1], "one process runs one case after the other"
    assert len(set(pids[1:])) == 4, "and is replaced where it can no longer go on"
    assert not any(map(is_alive, pids))
    assert not list(calls.scratch.iterdir())
    assert "| hangs | killed |" in (calls.out / "report.md").read_text()


def test_a_killed_call_loses_one_case_which_is_run_when_asked_for_again(calls: Calls) -> None:
    chosen = ("--only", "good,kills*,differs")
    calls.run(*chosen)
    assert calls.code == -signal.SIGKILL
    assert calls.statuses() == {"good": "ok", "differs": "differs", "kills its call": "running"}
    pid = calls.results()["good"]["figures"]["pid"]
    end = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid), "nothing uses the device any more"
    assert list(calls.scratch.iterdir()), "nobody could remove it"

    calls.flag.touch()
    says = calls.run(*chosen)
    assert "all cases have run" in says
    assert calls.results()["kills its call"]["status"] == "killed"
    assert "good:" not in says, "it has run"
    assert not list(calls.scratch.iterdir()), "also what the killed call had left"

    calls.run(*chosen, "--again")
    assert set(calls.statuses().values()) == {"ok"}


@pytest.mark.slow
def test_a_case_that_the_end_of_a_call_cuts_off_begins_anew_in_the_next_one(calls: Calls) -> None:
    says = calls.run("--only", "good,slow", "--minutes", "0.15")
    assert "1 cases are left: call again" in says
    assert calls.statuses() == {"good": "ok", "slow": "cut"}
    # Now it has a whole call. One that never ends would otherwise be the last that ever runs.
    assert "all cases have run" in calls.run("--only", "good,slow", "--minutes", "0.15")
    assert calls.statuses() == {"good": "ok", "slow": "killed"}
    assert "slow:" not in calls.run("--only", "slow", "--minutes", "0.15")


def test_no_case_begins_without_time(calls: Calls) -> None:
    assert "7 cases are left" in calls.run("--minutes", "0")
    assert calls.statuses() == {}


def test_a_call_that_is_asked_to_end_leaves_no_files(calls: Calls) -> None:
    child = calls.begin("--only", "good,slow")
    assert child.stdout is not None
    assert child.stdout.readline().startswith("good: ok")
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert not list(calls.scratch.iterdir())
    assert calls.statuses()["good"] == "ok"


def test_where_no_worker_starts_the_machine_and_the_reason_come_back(calls: Calls) -> None:
    calls.broken.touch()
    says = calls.run()
    assert calls.code == 1
    assert "this device is broken" in says
    [machine] = json.loads((calls.out / "results.json").read_text())["machines"]
    assert "this device is broken" in machine["software"]["log"]
    assert machine["disk"]["read_gb_per_s"] > 0
    assert calls.statuses() == {}
    calls.broken.unlink()
    calls.run("--only", "good")
    assert calls.statuses() == {"good": "ok"}
    assert len(json.loads((calls.out / "results.json").read_text())["machines"]) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"sizes": "tiny", "machines": [], "cases": {}}'])
def test_results_that_cannot_be_used_are_refused_where_they_were_asked_for_and_else_left_out(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    assert gpu.load(file, "full", must=False) == {}
    assert f"{file} is left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="cannot be read"):
        gpu.load(file, "full", must=True)
    assert gpu.load(tmp_path / "none", "full", must=False) == {}
    with pytest.raises(SystemExit, match="cannot be read"):
        gpu.load(tmp_path / "none", "full", must=True)


def test_a_figure_stands_beside_its_prediction() -> None:
    one = {"status": "ok", "at": "", "machine": 0, "sources": "", "figures": {"s a step": 0.5, "x torch": 0.25}}
    page = gpu.report({"sizes": "full", "machines": [], "cases": {"train-cpu-4096": one}})
    assert "| train-cpu-4096 | s a step | 0.5 | 0.36 |" in page
    assert "| train-cpu-4096 | x torch | 0.25 | 0.3 |" in page


def test_each_prediction_is_of_a_case() -> None:
    assert gpu.PREDICTED.keys() <= {case.name for case in gpu.cases(tiny=False)}


def test_names_of_cases_are_their_own() -> None:
    for tiny in (False, True):
        names = [case.name for case in gpu.cases(tiny)]
        assert len(set(names)) == len(names)


def test_all_suites_of_devices_are_cases() -> None:
    files = [file for case in gpu.cases(tiny=False) for file in case.files]
    assert "tests/gpu/test_training.py" in files
    assert "tests/parity/test_same_bits.py" in files
    assert all((ROOT / file).is_file() for file in files)


def test_wheels_are_unpacked_where_they_can_be_imported_from(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert gpu.unpacked(wheels, tmp_path) == wheels
    with zipfile.ZipFile(wheels / "some_package-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some_package/__init__.py", "value = 7")
    found = gpu.unpacked(wheels, tmp_path)
    assert (found / "some_package" / "__init__.py").read_text() == "value = 7"


def test_a_folder_of_its_own_is_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ram, on_disk = tmp_path / "ram", tmp_path / "disk"
    for folder in (in_ram, on_disk):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(in_ram))
    monkeypatch.setenv("HOME", str(on_disk))
    kinds = {in_ram: "tmpfs rw", on_disk: "ext4 rw"}
    monkeypatch.setattr(gpu_machine, "mounts", lambda place: [kinds.get(place, "ramfs rw")])
    assert gpu.own_folder(None).parent == on_disk


def test_the_folder_of_a_call_that_has_ended_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, living = (tmp_path / f"{gpu.SCRATCH}{pid}-x" for pid in (ended.pid, os.getpid()))
    for folder in (left, living, tmp_path / "other"):
        folder.mkdir()
    found = gpu.own_folder(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {living.name, "other", found.name}
    with pytest.raises(SystemExit, match="--scratch"):
        gpu.own_folder(tmp_path / "none")


# As nvidia-smi -q prints it.
QUERY = """
GPU 00000000:04:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    PCI
        Bus                               : 0x04
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 4
            Link Width
                Max                       : 16x
    Fan Speed                             : N/A
"""


def test_the_link_is_what_nvidia_smi_says_of_it() -> None:
    lines = gpu_machine.pci_section(QUERY).splitlines()
    assert lines[0].split() == ["Bus", ":", "0x04"]
    assert lines[-1].split() == ["Max", ":", "16x"]
    assert any(line.split() == ["Current", ":", "4"] for line in lines)
    assert gpu_machine.pci_section("no GPU") == ""


def test_the_speed_of_a_disk_is_that_of_a_file_which_is_gone_afterwards(tmp_path: Path) -> None:
    found = gpu_machine.disk_speed(tmp_path, 20 << 20)
    assert found["bytes"] == 16 << 20
    assert found["write_gb_per_s"] > 0
    assert found["read_gb_per_s"] > 0
    assert not list(tmp_path.iterdir())
    assert "error" in gpu_machine.disk_speed(tmp_path / "none", 8 << 20)


def test_a_library_of_another_interface_is_not_taken(tmp_path: Path) -> None:
    import _ctypes

    from offload.native import library_path

    found = library_path()
    if found is not None:
        assert gpu._is_current(found)
    assert not gpu._is_current(Path(_ctypes.__file__))
    assert not gpu._is_current(tmp_path / "none")
