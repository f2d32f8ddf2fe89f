"""First contact with a GPU: `python3 bench/gpu.py OUT --minutes 8`, from a folder, without installing or a network.

Call it again until no case is left. It begins with what fails first: a matrix of small runs, each of which says whether
its bits are those of tier="cpu". Then come the link and page-locking, Adam, a model of 1e9 parameters beside plain
torch, the largest models, and at the end the tests that need a device.

[Note: what comes back]
All results are in OUT/results.json, with a page beside it, report.md. Both are written, whole, after each case, and
before one begins, so a call that is killed loses one case. At the start results are read again: from OUT or, where OUT
does not outlive a call, from `--results FILE`. A case that has ended is not repeated. One that was killed, or that ran
when its call was killed, is skipped, too, until `--again`. OUT gets eight files at most. All other files (swap files,
logs) are in a folder that is removed at the end.

[Note: processes]
This process uses the standard library alone, and goes on whatever fails. Cases run in a worker (bench/gpu_cases.py),
one after the other; it says on a pipe how a case ended, and what it found before that. A worker that ends, that takes
too long, or whose device no longer answers is replaced by a new one. Tests run in processes of pytest's.

With `--tiny` all sizes are small, for the simulated accelerator: `python tests/support/gpu_bench.py OUT --tiny`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fnmatch
import functools
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import gpu_machine

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "liboffload_kernels.so"
GB, MIB, GIB = 10**9, 1 << 20, 1 << 30
START_LIMIT_S = 180
"""Of a worker: it imports torch, and opens the device."""
STARTS = 2
"""Workers in a row that may fail to start."""
LAST_CHARACTERS = 6000
"""Of a log, in a result."""
SCRATCH = "offload-gpu-"
_NOTHING_CHOSEN = 5
"""Pytest's exit code where no test of a file is chosen."""


# What there is to run: plain data, so that it has names where torch cannot be imported.


@dataclass(frozen=True)
class Sizes:
    """Attributes: toy, model: layers, width, heads and context of the small runs' model and of the one that is timed;
    chunk: of the small runs; copies, pinned: bytes; adam: parameters; threads: of the CPU kernels; timed, at_last:
    placements and tokens of a step; profiled: placements; wide: width, heads and context of the largest models; layers:
    of each of them; device_gb: that they are tried in; disk: bytes of the test of the disk."""

    toy: tuple[int, int, int, int]
    chunk: str
    copies: Sequence[int]
    pinned: Sequence[int]
    adam: int
    threads: Sequence[int]
    model: tuple[int, int, int, int]
    timed: Sequence[tuple[str, int]]
    at_last: Sequence[tuple[str, int]]
    profiled: Sequence[str]
    wide: tuple[int, int, int]
    layers: Sequence[int]
    device_gb: float
    disk: int


FULL = Sizes(
    toy=(8, 256, 4, 64), chunk="512KiB",
    copies=(8192, MIB, 32 * MIB, 512 * MIB), pinned=(GIB, 8 * GIB, 32 * GIB),
    adam=10**8, threads=(8, 14, 16),
    model=(20, 2048, 16, 1024),
    timed=(
        ("cpu", 4096), ("cpu", 16384), ("nvme", 4096), ("streamed-cpu", 4096), ("streamed-cpu", 16384),
        ("streamed-nvme", 4096), ("device", 4096), ("device", 16384),
    ),
    at_last=(("nvme", 16384), ("cpu", 65536), ("streamed-cpu", 65536), ("device", 65536)),
    profiled=("cpu", "streamed-cpu"),
    wide=(4096, 32, 1024), layers=(8, 16, 25), device_gb=10,
    disk=2 * GIB,
)  # fmt: skip
TINY = Sizes(
    toy=(3, 32, 2, 16), chunk="8KiB",
    copies=(8192, MIB), pinned=(MIB,),
    adam=10**5, threads=(1, 2),
    model=(3, 32, 2, 16),
    timed=(("cpu", 32), ("nvme", 32), ("device", 32)), at_last=(), profiled=("streamed-cpu",),
    wide=(64, 2, 16), layers=(2,), device_gb=0.2,
    disk=16 * MIB,
)  # fmt: skip

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu"},
    "nvme": {"tier": "nvme"},
    "device": {"tier": "device"},
    "streamed-cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed-nvme": {"tier": "nvme", "param_tier": "nvme"},
}
"""Where NVMe is one of them, `cpu_memory` is the least."""
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("", options) for name, options in PLACEMENTS.items()},
    "activations-cpu": ("", {**PLACEMENTS["streamed-cpu"], "activation_tier": "cpu"}),
    "activations-nvme": ("", {**PLACEMENTS["streamed-nvme"], "activation_tier": "nvme"}),
    "split-master": ("", {**PLACEMENTS["streamed-cpu"], "split_master": True}),
    "accumulation": ("accumulation", PLACEMENTS["streamed-nvme"]),
    "fp16-scaler": ("fp16", PLACEMENTS["streamed-cpu"]),
    "reentrant": ("reentrant", PLACEMENTS["streamed-cpu"]),
    "torch-clip": ("torch-clip", PLACEMENTS["streamed-cpu"]),
    "side-stream": ("side-stream", PLACEMENTS["streamed-cpu"]),
    "parked": ("parked", PLACEMENTS["streamed-cpu"]),
    "closed": ("closed", PLACEMENTS["streamed-cpu"]),
    "resumed": ("resumed", PLACEMENTS["streamed-nvme"]),
    "refused-pin": ("refused-pin", PLACEMENTS["cpu"]),
    "out-of-memory": ("out-of-memory", PLACEMENTS["streamed-cpu"]),
    "compiled": ("compiled", PLACEMENTS["streamed-cpu"]),
    **{f"8bit-{name}": ("8bit", PLACEMENTS[name]) for name in ("device", "streamed-nvme")},
    "8bit-split": ("8bit", {**PLACEMENTS["streamed-cpu"], "split_master": True}),
    "bf16-device": ("bf16", PLACEMENTS["device"]),
    **{f"muon-{name}": ("muon", PLACEMENTS[name]) for name in ("device", "streamed-nvme")},
}
"""By name: what is special in the training, and the options of OffloadZero."""

PREDICTED: dict[str, dict[str, tuple[float, float]]] = {
    "link": {
        **{f"512 MiB {way}, GB/s": (50, 55) for way in ("up", "down")},
        "512 MiB both, GB/s each": (42, 48),
    },
    "pin": {
        **{f"{size} GiB empty, s a GiB": (0.4, 0.5) for size in (1, 8, 32)},
        **{f"{size} GiB populated, s a GiB": (0.0, 0.1) for size in (1, 8, 32)},
    },
    "adam-cpu": {f"{threads} threads, GB/s": (110, 110) for threads in (14, 16)},
    "train-cpu-4096": {"s a step": (0.36, 0.36), "x torch": (0.3, 0.3)},
    "train-cpu-16384": {"s a step": (0.55, 0.55), "x torch": (0.65, 0.65)},
    "train-cpu-65536": {"s a step": (1.39, 1.39), "x torch": (0.98, 0.98)},
    "train-device-4096": {"x torch": (0.45, 0.45)},
    "train-device-65536": {"x torch": (0.9, 0.9)},
}
"""Of the full sizes on an H100 with 16 cores, made before the first run: the least and the most of a figure."""


@dataclass(frozen=True)
class Case:
    """Attributes: function, arguments: of bench/gpu_cases.py, or None for `files`, which pytest runs; expects_s: about
    how long it takes: it is not begun with less; limit_s: after which it is killed."""

    name: str
    function: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    expects_s: float = 20
    limit_s: float = 100


def cases(tiny: bool) -> list[Case]:
    """All of them, in order."""
    sizes = TINY if tiny else FULL
    found = []
    for name, (special, options) in TOYS.items():
        expects_s, limit_s = (60, 150) if special == "compiled" else (10, 75)
        arguments = {"special": special, "options": options}
        found.append(Case(f"toy-{name}", "toy", arguments, expects_s=expects_s, limit_s=limit_s))
    found += [Case("link", "link"), Case("pin", "pin", expects_s=40)]
    found += [Case("adam-cpu", "adam_cpu"), Case("adam-device", "adam_device")]
    for placement, tokens in sizes.timed:
        found.append(_timed(placement, tokens))
        if placement in sizes.profiled and tokens == 4096:
            found.append(Case(f"profile-{placement}", "profile", {"placement": placement}, expects_s=40, limit_s=150))
    if tiny:
        found += [Case(f"profile-{name}", "profile", {"placement": name}) for name in sizes.profiled]
    found.append(Case("muon", "muon", expects_s=60, limit_s=180))
    found.append(Case("launch-blocking", "launch_blocking", expects_s=40, limit_s=120))
    found.append(Case("memcheck", "memcheck", expects_s=90, limit_s=270))
    for layers in sizes.layers:
        found.append(Case(f"largest-{layers}", "largest", {"layers": layers}, expects_s=90, limit_s=270))
    found += [_timed(placement, tokens) for placement, tokens in sizes.at_last]
    for file in suites(tiny):
        path = Path(file.partition("::")[0])
        name = f"tests-{path.parent.name}-{path.stem.removeprefix('test_')}"
        found.append(Case(name, None, files=[file], expects_s=60, limit_s=420))
    return [replace(case, expects_s=2) for case in found] if tiny else found


def _timed(placement: str, tokens: int) -> Case:
    # Seconds of a step that reads and writes all states of 1e9 parameters, with a drive of 2 GB/s.
    slow = 90 if "nvme" in placement else 0
    arguments = {"placement": placement, "tokens": tokens}
    return Case(f"train-{placement}-{tokens}", "train", arguments, expects_s=40 + slow, limit_s=180 + 2 * slow)


def suites(tiny: bool) -> list[str]:
    """What pytest runs, a case each."""
    if tiny:
        return ["tests/gpu/test_training.py::test_a_step_moves_two_bytes_a_parameter_each_way"]
    folders = (ROOT / "tests" / name for name in ("gpu", "parity"))
    found = [str(file.relative_to(ROOT)) for folder in folders for file in sorted(folder.glob("test_*.py"))]
    return [*found, "tests/optim/test_on_device.py", "tests/oracle/test_idioms.py"]


# Results.


class Results:
    """results.json and report.md. Args: known: from earlier calls.

    `data`: "sizes"; "machines", those that cases ran on; "cases", by name. A case has a status (see below), "seconds",
    "says" (its result in a line), the number of its machine, "figures" by name, and what else there is to know.

    running   it has begun; no later call finds that, but `killed`
    ok        it ended, and what it checks is right
    differs   it ended, and its bits are others
    failed    it raised; "traceback" is the end of that
    killed    it took too long, its process ended, or its call was killed meanwhile; "threads" is where it was
    cut       its call was over; the next call has it again
    skipped   this machine has not what it needs
    """

    def __init__(self, out: Path, sizes: str, known: Mapping[str, Any]) -> None:
        self._out = out
        self.machine = 0
        self.data: dict[str, Any] = {"sizes": sizes, "machines": [], "cases": {}, **known}
        for one in self.cases.values():
            if one["status"] == "running":
                one |= {"status": "killed", "says": "its call was killed while it ran"}

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.data["cases"]
        return found

    def use_machine(self, described: dict[str, Any]) -> None:
        """Results from now on are from this one."""
        self.machine = len(self.data["machines"])
        self.data["machines"].append(described)
        self.write()

    def know_machine(self) -> bool:
        """Whether results of this machine, since its last start, are here. They are from it from now on, then."""
        boots = [one.get("boot") for one in self.data["machines"]]
        found = gpu_machine.boot() in boots
        if found:
            self.machine = boots.index(gpu_machine.boot())
        return found

    def is_left(self, case: Case, again: bool) -> bool:
        one = self.cases.get(case.name)
        return one is None or one["status"] == "cut" or (again and one["status"] != "ok")

    def begin(self, case: Case) -> None:
        """Replaces the result of a case, which runs now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.cases[case.name] = {"status": "running", "at": now, "machine": self.machine, "sources": sources()}
        self.write()

    def add(self, case: Case, values: Mapping[str, Any]) -> None:
        """Adds to the result of a case that runs."""
        self.cases[case.name] |= values
        self.write()

    def write(self) -> None:
        _replace(self._out / "results.json", json.dumps(self.data, indent=1, allow_nan=False))
        _replace(self._out / "report.md", report(self.data))


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(text)
    os.replace(temporary, file)


def load(file: Path, sizes: str, *, must: bool) -> dict[str, Any]:
    """What earlier calls wrote; nothing if there is no such file. Args: must: whether it has to be there, and good.

    Raises: SystemExit if it is not.
    """
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        if data["sizes"] != sizes:
            raise ValueError(f"it is of {data['sizes']} sizes, and this call is of {sizes}")
        return {name: data[name] for name in ("sizes", "machines", "cases")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if must:
            sys.exit(f"{file} cannot be read: {type(error).__name__}: {error}")
        if not isinstance(error, FileNotFoundError):
            say(f"{file} is left out: {type(error).__name__}: {error}")
        return {}


@functools.cache
def sources() -> str:
    """A digest of the library, its kernels and this benchmark: results of different ones are told apart."""
    files = [*ROOT.glob("offload/**/*.py"), *ROOT.glob("kernels/*.[ch]"), *ROOT.glob("bench/gpu*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


# The page.


def report(data: Mapping[str, Any]) -> str:
    """report.md."""
    found: dict[str, dict[str, Any]] = data["cases"]
    lines = ["# On a GPU", ""]
    for number, machine in enumerate(data["machines"]):
        lines += [f"- Machine {number}: {_in_a_line(machine)}"]
    counts = {status: sum(one["status"] == status for one in found.values()) for status in _statuses(found)}
    lines += ["", "Cases: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "none") + ".", ""]
    figures = []
    for name, one in found.items():
        for figure, value in one.get("figures", {}).items():
            least, most = PREDICTED.get(name, {}).get(figure, (None, None))
            predicted = "" if least is None else f"{least:g}" if least == most else f"{least:g}-{most:g}"
            measured = f"{value:,.4g}" if isinstance(value, int | float) else value
            figures.append((name, figure, measured, predicted if data["sizes"] == "full" else ""))
    rows = [
        (name, one["status"], f"{one.get('seconds', 0):.1f}", str(one["machine"]), one["sources"], one.get("says", ""))
        for name, one in found.items()
    ]
    lines += _table(("case", "result", "s", "machine", "sources", "in words"), rows)
    if figures:
        lines += ["## Figures", "", "Medians; *predicted* before the first run.", ""]
        lines += _table(("case", "figure", "measured", "predicted"), figures)
    for name, one in found.items():
        if ends := one.get("traceback") or one.get("threads") or one.get("log"):
            lines += [f"## {name}", "", "```", ends.replace("```", "'''").strip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _statuses(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({str(one["status"]) for one in found.values()})


def _in_a_line(machine: Mapping[str, Any]) -> str:
    words = []
    for one in machine.get("gpu", []):
        link = f"PCIe {one['pcie.link.gen.max']} x{one['pcie.link.width.max']}"
        words += [f"{one['name']}, {one['memory.total']}, {link}, driver {one['driver_version']}"]
    words = words or ["no GPU"]
    says = dict(line.split(":", 1) for line in str(machine.get("cpu")).splitlines() if ":" in line)
    words += [f"{name} {says[name].strip()}" for name in ("Model name", "CPU(s)", "NUMA node(s)") if name in says]
    words.append(f"RAM {machine.get('memory', {}).get('MemTotal', 'unknown')}")
    pages = machine.get("proc", {}).get("/sys/kernel/mm/transparent_hugepage/enabled")
    words += [f"huge pages {pages}"] if pages else []
    disk = machine.get("disk", {})
    words += [
        f"disk {way} {disk[f'{way}_gb_per_s']:.2f} GB/s" for way in ("read", "write") if f"{way}_gb_per_s" in disk
    ]
    software = machine.get("software", {}).items()
    words += [f"{name} {value.strip().splitlines()[-1]}" for name, value in software if str(value or "").strip()]
    return "; ".join(words)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    clean = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    lines = [headings, ["---"] * len(headings), *clean]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


# Processes.


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a child: it is killed when the thread that started it ends, so that nothing uses the device afterwards."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class WorkerEndedError(RuntimeError):
    """A worker's process has ended."""


class Worker:
    """Runs cases in one process. Args: command: of it; folder: for its log, and for where its threads are."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._log, self._threads = folder / "worker.log", folder / "threads.log"
        self._answers: queue.Queue[str] = queue.Queue()
        with open(self._log, "w") as log:
            self._child = subprocess.Popen(
                [*command, "--threads-log", str(self._threads)], env=environment, cwd=ROOT, text=True, process_group=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, preexec_fn=end_with_parent,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._answers.put(line)
        self._answers.put("")

    def start(self) -> dict[str, Any]:
        """What it says of torch and the device. Raises: TimeoutError, WorkerEndedError."""
        return self._answer(time.monotonic() + START_LIMIT_S)

    def run(self, case: Case, limit_s: float, add: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """A case's result. Args: add: gets what is found before. Raises: TimeoutError, WorkerEndedError."""
        end = time.monotonic() + limit_s
        assert self._child.stdin is not None
        order = {"function": case.function, "arguments": case.arguments, "limit_s": limit_s}
        try:
            print(json.dumps(order), file=self._child.stdin, flush=True)
        except BrokenPipeError as error:
            raise WorkerEndedError("it had ended") from error
        while True:
            answer = self._answer(end)
            if "status" in answer:
                return answer
            add(answer)

    def _answer(self, end: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            code = self._child.wait()
            raise WorkerEndedError(f"the process ended with {signal_name(code)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> dict[str, str]:
        """The end of its log, and where its threads were when they had taken long, or when it crashed."""
        return {"log": last(self._log), "threads": last(self._threads)}

    def close(self) -> None:
        kill(self._child)


def signal_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last(file: Path) -> str:
    """The end of a text file."""
    try:
        return file.read_text(errors="replace")[-LAST_CHARACTERS:]
    except OSError:
        return ""


def kill(child: subprocess.Popen[Any]) -> None:
    """A process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    child.wait()


# A call.


@dataclass
class Call:
    """One call: everything that runs until its time is over."""

    results: Results
    program: Sequence[str]
    environment: Mapping[str, str]
    scratch: Path
    end: float
    whole_s: float
    worker: Worker | None = None

    def go_on(self, chosen: Sequence[Case], again: bool) -> int:
        """Runs what fits. Returns: how many cases are left."""
        todo = [case for case in chosen if self.results.is_left(case, again=False)]
        todo += [case for case in chosen if again and case not in todo and self.results.is_left(case, again=True)]
        left, is_first = 0, True
        for case in todo:
            remaining = self.end - time.monotonic()
            # The first case of a call has all of it, so that one which no call is long enough for is known.
            if remaining < (min(case.expects_s, self.whole_s / 2) if is_first else case.expects_s):
                left += 1
                continue
            self._one(case, min(case.limit_s, remaining), is_cut=remaining < case.limit_s and not is_first)
            left += self.results.cases[case.name]["status"] == "cut"
            is_first = False
        return left

    def _one(self, case: Case, limit_s: float, is_cut: bool) -> None:
        """Runs a case. Args: is_cut: whether the end of its time is only the end of the call."""
        if case.function is not None and self.worker is None:
            self.start()
        began = time.monotonic()
        self.results.begin(case)
        found: dict[str, Any] = {}
        try:
            found = self._tests(case, limit_s) if case.function is None else self._in_worker(case, limit_s)
        except TimeoutError:
            said = "the call was over" if is_cut else f"not finished in {limit_s:.0f} s"
            found = {"status": "cut" if is_cut else "killed", "says": said, **self._replace_worker()}
        except WorkerEndedError as error:
            found = {"status": "killed", "says": str(error), **self._replace_worker()}
        seconds = time.monotonic() - began
        self.results.add(case, {**found, "seconds": seconds})
        say(f"{case.name}: {found['status']}: {found.get('says', '')} ({seconds:.1f} s)")

    def start(self) -> dict[str, Any]:
        """A worker. Raises: SystemExit if none starts."""
        for _ in range(STARTS):
            self.worker = Worker([*self.program, "--worker"], self.environment, self.scratch)
            try:
                return self.worker.start()
            except (TimeoutError, WorkerEndedError) as error:
                words = {"error": f"no worker starts: {error or type(error).__name__}", **self._replace_worker()}
        self.results.data["machines"][-1]["software"] = words
        self.results.write()
        sys.exit(f"{words['error']}\n{words['log']}")

    def _replace_worker(self) -> dict[str, str]:
        """Kills the worker. The next case starts another one. Returns: its last words."""
        if self.worker is None:
            return {}
        words = self.worker.last_words()
        self.worker.close()
        self.worker = None
        return words

    def _in_worker(self, case: Case, limit_s: float) -> dict[str, Any]:
        assert self.worker is not None
        found = self.worker.run(case, limit_s, lambda values: self.results.add(case, values))
        if not found.pop("answers"):
            self._replace_worker()
        return found

    def _tests(self, case: Case, limit_s: float) -> dict[str, Any]:
        """Runs pytest. Raises: TimeoutError."""
        self._replace_worker()  # its memory is the tests', too
        log = self.scratch / "tests.log"
        marks = "not peers and not oracle and not slow"
        command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", marks]
        # No plugins but those that the tests need: others warn, and warnings are errors.
        command += [f"-p{plugin}" for plugin in ("pytest_timeout", "xdist.plugin") if _has(plugin)]
        command += ["-n", str(min(4, os.cpu_count() or 1))] if _has("xdist.plugin") else []
        environment = {"OFFLOAD_TEST_DEVICE": "cuda", **self.environment}
        environment |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with open(log, "w") as words:
            child = subprocess.Popen(
                [*command, *case.files], env=environment, cwd=ROOT, process_group=0, stdin=subprocess.DEVNULL,
                stdout=words, stderr=words, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.results.add(case, {"log": last(log)})
            raise TimeoutError from None
        finally:
            kill(child)
        lines = last(log).strip().splitlines() or [""]
        if code == _NOTHING_CHOSEN:
            return {"status": "skipped", "says": lines[-1]}
        if code:
            return {"status": "failed", "says": lines[-1], "log": last(log)}
        return {"status": "ok", "says": lines[-1]}


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# What this folder needs to run as it is.


def own_folder(where: Path | None) -> Path:
    """A new folder for swap files and logs. Args: where: None: the disk with the most space, of the usual places for
    such files. Those that killed calls left there are removed."""
    places = [where] if where else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home()]
    usable = [place for place in places if place.is_dir() and os.access(place, os.W_OK)]
    if not usable:
        sys.exit(f"{where or places}: give a folder with --scratch that exists and can be written to")

    def space(place: Path) -> tuple[bool, int]:
        kind = (gpu_machine.mounts(place) or [""])[0].partition(" ")[0]
        return kind not in ("tmpfs", "ramfs"), shutil.disk_usage(place).free

    place = max(usable, key=space)
    for old in place.glob(f"{SCRATCH}*"):
        number = old.name.removeprefix(SCRATCH).partition("-")[0]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=place))


def unpacked(wheels: Path, scratch: Path) -> Path:
    """A folder to import from, with what the wheels in `wheels` hold; that folder itself if it has none."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        say(f"{wheels} has no wheels: it is imported from as it is")
        return wheels
    for file in files:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(scratch / "wheels")
    return scratch / "wheels"


def kernels(scratch: Path) -> tuple[dict[str, str], str]:
    """The environment that names the kernels' library, and what it is: the one in the package, that of an installed
    offload, or one that is built here."""
    for folder in (ROOT / "offload", Path(sysconfig.get_path("platlib")) / "offload"):
        if (folder / LIBRARY).is_file():
            if _is_current(folder / LIBRARY):
                return {}, "in the package" if folder.is_relative_to(ROOT) else "of an installed offload"
            break  # the library would refuse it
    build = scratch / "kernels"
    # Also where it is a package of this Python, whose folder of programs nobody put on the path.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=places) or "cmake"
    configured = [cmake, "-S", str(ROOT / "kernels"), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    said = gpu_machine.run(configured, 60) + "\n" + gpu_machine.run([cmake, "--build", str(build), "-j"], 120)
    library = build / LIBRARY
    if library.is_file():
        return {"OFFLOAD_KERNEL_LIBRARY": str(library)}, "built here"
    return {}, f"none, Adam runs through torch: {said.strip().splitlines()[-1]}"


def _is_current(library: Path) -> bool:
    """Whether a built library has the interface that the Python sources call."""
    wanted = re.search(r"^ABI = (\d+)", gpu_machine.read(ROOT / "offload" / "native" / "library.py"), re.MULTILINE)
    with contextlib.suppress(OSError, AttributeError):
        return wanted is not None and ctypes.CDLL(str(library)).offload_abi() == int(wanted[1])
    return False


@dataclass(frozen=True)
class Options:
    out: Path
    minutes: float
    results: Path | None
    scratch: Path | None
    wheels: Path | None
    only: str
    again: bool
    tiny: bool
    worker: bool
    threads_log: Path | None
    one: str
    draw: bool


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="folder of results")
    add("--minutes", type=float, default=8, help="after so long no case is begun, and the one that runs is stopped (8)")
    add("--results", type=Path, help="results of earlier calls (those in OUT)")
    add(
        "--scratch",
        type=Path,
        help="folder for what is removed at the end (of /tmp, /var/tmp and the home, the one with the most space)",
    )
    add("--wheels", type=Path, help="folder of wheels to import from, for what is not installed")
    add("--only", default="*", help="patterns of names of cases, with commas, such as 'toy-*,link'")
    add("--again", action="store_true", help="also cases that have run, and were not ok")
    add("--tiny", action="store_true", help="small sizes")
    for internal in ("--worker", "--draw"):
        add(internal, action="store_true", help=argparse.SUPPRESS)
    add("--threads-log", type=Path, help=argparse.SUPPRESS)
    add("--one", default="", help=argparse.SUPPRESS)
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is left of everything that needs a GPU."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.worker or options.one or options.draw:
        from bench import gpu_cases

        gpu_cases.run(options)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sizes = TINY if options.tiny else FULL
    named = "tiny" if options.tiny else "full"
    known = load(options.results or out / "results.json", named, must=options.results is not None)
    results = Results(out, named, known)
    scratch = own_folder(options.scratch)
    call = None
    try:
        if not results.know_machine():
            results.use_machine(gpu_machine.describe(scratch, sizes.disk))
        environment, library = _environment(options, scratch)
        program = [sys.executable, str(Path(sys.argv[0]).resolve()), str(out), "--scratch", str(scratch)]
        program += ["--tiny"] if options.tiny else []
        whole_s = 60 * options.minutes
        call = Call(results, program, environment, scratch, began + whole_s, whole_s)
        results.data["machines"][results.machine]["software"] = {**call.start(), "kernel library": library}
        results.write()
        chosen = [case for case in cases(options.tiny) if _matches(case.name, options.only)]
        left = call.go_on(chosen, options.again)
        _draw(program, environment, results)
    finally:
        if call is not None and call.worker is not None:
            call.worker.close()
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{left} cases are left: call again" if left else "all cases have run")


def _environment(options: Options, scratch: Path) -> tuple[dict[str, str], str]:
    """Of all processes, and what kernels they use."""
    named, library = kernels(scratch)
    folders = [str(unpacked(options.wheels.resolve(), scratch))] if options.wheels else []
    folders += [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    caches = {
        "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
        "TMPDIR": "tmp",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "cache",
    }
    for name in caches.values():
        (scratch / name).mkdir()
    ours = {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONDONTWRITEBYTECODE": "1",
        # What older versions of torch ask of whoever wants the same bits again.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **{name: str(scratch / folder) for name, folder in caches.items()},
        **named,
    }
    return os.environ | ours, library


def _draw(program: Sequence[str], environment: Mapping[str, str], results: Results) -> None:
    """Pictures, if they can be drawn: nothing depends on them."""
    if any(name.startswith("train-") for name in results.cases):
        try:
            subprocess.run([*program, "--draw"], env=environment, cwd=ROOT, capture_output=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"there are no pictures: {error}")


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
