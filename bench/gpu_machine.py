"""What bench/gpu.py notes of a machine: with the standard library alone, so that it is there whatever else fails."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GPU_FIELDS = (
    "name", "uuid", "driver_version", "memory.total", "memory.used", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "power.limit", "clocks.max.sm", "clocks.max.mem",
    "persistence_mode", "compute_mode",
)  # fmt: skip
PROC = (
    "/proc/driver/nvidia/version",
    "/proc/sys/kernel/io_uring_disabled",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/vm/compact_memory",
    "/proc/sys/vm/max_map_count",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/swappiness",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/memory.max",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/khugepaged/defrag",
)
MEMORY = ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "AnonHugePages", "HugePages_Total", "Hugepagesize")
PACKAGES = (
    "aiofiles", "hypothesis", "matplotlib", "msgspec", "numpy", "py-cpuinfo", "pytest", "pytest-timeout",
    "pytest-xdist", "rich", "safetensors", "torch", "triton", "typer", "xxhash",
)  # fmt: skip
_BLOCK = 8 << 20
_IN_FLIGHT = 8


def boot() -> str:
    """An identity of this machine since its last start."""
    return f"{platform.node()} {read('/proc/sys/kernel/random/boot_id')}"


def describe(scratch: Path, disk_bytes: int) -> dict[str, Any]:
    """Args: scratch: a folder on the disk to measure, with `disk_bytes`."""
    return {
        "boot": boot(),
        "gpu": gpu(),
        "pci": pci_section(run(["nvidia-smi", "-q"])),
        "topology": run(["nvidia-smi", "topo", "-m"]),
        "cpu": run(["lscpu"]),
        "memory": memory(),
        "proc": {file: text for file in PROC if (text := read(file))},
        "limits": {
            name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE")
        },
        "df": run(["df", "-hT"]),
        "mount": next((m for m in mounts(scratch)), ""),
        "disk": disk_speed(scratch, disk_bytes),
        "kernel": platform.platform(),
        "python": sys.version,
        "packages": packages(),
        "tools": {tool: shutil.which(tool) for tool in ("cc", "c++", "cmake", "ninja", "nvcc", "compute-sanitizer")},
    }


def run(command: Sequence[str], limit_s: float = 20) -> str:
    """What a command prints, or why it prints nothing."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()


def gpu() -> list[dict[str, str]]:
    """Of each GPU, what nvidia-smi says now: generation and width of an idle link may be lower than in use."""
    lines = run(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]).splitlines()
    rows = ([field.strip() for field in line.split(",")] for line in lines)
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def pci_section(text: str) -> str:
    """The lines under PCI of `nvidia-smi -q`."""
    found: list[str] = []
    indent = None
    for line in text.splitlines():
        deep = len(line) - len(line.lstrip())
        if line.strip() == "PCI":
            indent = deep
        elif indent is not None and line.strip():
            if deep <= indent:
                break
            found.append(line[indent:])
    return "\n".join(found)


def read(file: str | Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return Path(file).read_text(errors="replace").strip()
    except OSError:
        return ""


def memory() -> dict[str, str]:
    lines = (line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    return {name: value.strip() for name, value in lines if name in MEMORY}


def mounts(folder: Path) -> list[str]:
    """Type and options of the file systems on the way to `folder`, the nearest one first."""
    found = []
    for line in read("/proc/mounts").splitlines():
        _, point, kind, options, *_ = line.split()
        if folder.resolve().is_relative_to(point.encode().decode("unicode_escape")):
            found.append((len(point), f"{kind} {options}"))
    return [words for _, words in sorted(found, reverse=True)]


def packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def disk_speed(folder: Path, nbytes: int) -> dict[str, Any]:
    """GB/s of writing a file past the page cache and of reading it, in blocks of 8 MiB, several at once."""
    file = folder / "disk-speed"
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(_IN_FLIGHT)]
    noise = os.urandom(1 << 20)
    for buffer in buffers:
        buffer.write(noise * (_BLOCK >> 20))
    blocks = max(1, nbytes // _BLOCK)
    found: dict[str, Any] = {"bytes": blocks * _BLOCK, "direct": True}
    try:
        try:
            opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            found |= {"direct": False, "why": str(error)}
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(opened, 0, blocks * _BLOCK)
            for name, move in (("write", os.pwritev), ("read", os.preadv)):

                def one(worker: int, move: Any = move) -> None:
                    for block in range(worker, blocks, _IN_FLIGHT):
                        if move(opened, [buffers[worker]], block * _BLOCK) != _BLOCK:
                            raise OSError("a short transfer")

                began = time.perf_counter()
                with ThreadPoolExecutor(_IN_FLIGHT) as pool:
                    list(pool.map(one, range(_IN_FLIGHT)))
                os.fdatasync(opened)
                found[f"{name}_gb_per_s"] = blocks * _BLOCK / 1e9 / (time.perf_counter() - began)
        finally:
            os.close(opened)
    except OSError as error:
        found["error"] = str(error)
    finally:
        file.unlink(missing_ok=True)
    return found
