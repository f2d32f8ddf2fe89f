"""`offload doctor`: what this machine has, and what makes it slower than it could be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.cli.console import plain_console, print_json, say, show_table
from offload.cli.options import Json
from offload.errors import ConfigError
from offload.sizes import format_bytes

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "neon", "asimd", "sve", *BF16_FLAGS)
"""CPU flags that decide how fast kernels and bf16 products are."""
IN_RAM = ("tmpfs", "ramfs")
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "lustre")


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        key: its name in the JSON, which never changes.
        item: its name in the table.
        value: the value in the JSON.
        shown: the value in the table, in words.
        hint: what to do if it makes the machine slower; empty if it does not.
    """

    key: str
    item: str
    value: Any
    shown: str
    hint: str = ""


def doctor(
    path: Annotated[Path, typer.Option(help="Directory that would hold swap files.")] = Path(),
    json: Json = False,
) -> None:
    """Show what this machine has, and what makes it slower than it could be."""
    from offload.options import absolute

    if not path.is_dir():
        raise ConfigError(f"--path {path} is not a directory: give one that exists")
    path = absolute(path)
    rows = [*_software(), *_processor(), *_kernels(), *_memory(), *_disk(path)]
    if json:
        values = {row.key: row.value for row in rows}
        print_json(values | {"hints": {row.key: row.hint for row in rows if row.hint}})
    else:
        _show(rows)


def _row(key: str, item: str, value: Any, hint: str = "") -> Row:
    """A row that shows its value as it is."""
    shown = ", ".join(value) if isinstance(value, list) else str(value)
    return Row(key, item, value, "unknown" if value is None else shown or "none", hint)


def _size(key: str, item: str, value: int | None, absent: str) -> Row:
    """A row for a number of bytes.

    Args:
        key: its name in the JSON.
        item: its name in the table.
        value: how many bytes; None if that is not known.
        absent: what None means, in words.
    """
    return Row(key, item, value, absent if value is None else format_bytes(value))


def _software() -> list[Row]:
    import platform

    import torch

    from offload.cli.machine import package_version
    from offload.devices.copies import accelerator

    device = accelerator()
    pinning = device is not None
    here = torch.accelerator.device_count() if pinning else 0
    devices = [torch.get_device_module(device).get_device_name(index) for index in range(here)]
    return [
        _row("python", "Python", platform.python_version()),
        _row("offload", "offload", package_version()),
        _row("torch", "torch", torch.__version__),
        _row("devices", "devices", [*devices, "cpu"]),
        Row("pinning", "pinned memory", pinning, "yes" if pinning else "no GPU that needs it"),
    ]


def _processor() -> list[Row]:
    import torch

    from offload.native import cpu_model, usable_cpus

    name, flags = cpu_model()
    found = [flag for flag in FLAGS if flag in flags]
    slow = "" if set(BF16_FLAGS) & set(found) else "no bf16 instructions: models on the CPU compute slowly in bf16"
    cpus, threads = usable_cpus(), torch.get_num_threads()
    few = "" if threads >= cpus else f"torch uses fewer threads than CPUs: torch.set_num_threads({cpus})"
    return [
        _row("cpu", "CPU", name),
        _row("cpu_flags", "CPU flags", found, slow),
        _row("usable_cpus", "usable CPUs", cpus),
        _row("torch_threads", "torch threads", threads, few),
    ]


def _kernels() -> list[Row]:
    from offload import native

    available = list(native.available_variants())
    kernels = native.load()
    chosen, threads = kernels.variant, kernels.threads
    kernels.close()
    reason, library = native.fallback_reason(), native.library_path()
    hint = "" if chosen == available[0] else f"{available[0]} is the fastest here: unset OFFLOAD_KERNELS"
    if reason:
        hint = f"Adam runs through separate torch operations, several times slower: {reason}"
    return [
        _row("kernel", "Adam kernel", chosen, hint),
        _row("kernel_threads", "kernel threads", threads),
        _row("kernels_available", "kernels available", available),
        Row("kernel_library", "kernel library", library and str(library), str(library or "none")),
        Row("kernel_fallback", "why a fallback", reason, reason or "no fallback"),
    ]


def _memory() -> list[Row]:
    import resource

    from offload.cli import machine
    from offload.planner.machine import cgroup_room, free_memory

    memlock = machine.soft_limit(resource.RLIMIT_MEMLOCK)
    pages = machine.huge_pages()
    slow = "I/O takes twice the CPU time: set /sys/kernel/mm/transparent_hugepage/enabled to madvise"
    files = machine.soft_limit(resource.RLIMIT_NOFILE)
    return [
        _size("memory_total_bytes", "memory", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "unknown"),
        _size("memory_free_bytes", "memory free for this process", free_memory(), "unknown"),
        _size("cgroup_room_bytes", "left by its control group", cgroup_room(), "no limit"),
        _size("memlock_limit_bytes", "locked-memory limit", memlock, "no limit"),
        _row("transparent_huge_pages", "transparent huge pages", pages, slow if pages == "never" else ""),
        Row("open_files_limit", "open-file limit", files, "no limit" if files is None else str(files)),
    ]


def _disk(path: Path) -> list[Row]:
    import shutil

    from offload.cli import machine
    from offload.io.select import open_engine

    engine = open_engine("auto", [path])
    engine.close()
    system = machine.file_system(path)
    far = "no local drive, which would be faster" if system and system.startswith(NETWORK) else ""
    if system in IN_RAM:
        far = "it is RAM: what lies there saves none, and is gone after a reboot; give --path on a drive"
    direct = machine.takes_direct_io(path)
    shown = {True: "yes", False: "no", None: "unknown: the path is not writable"}[direct]
    slow = "swap files go through the page cache, which costs CPU time and RAM: choose a local drive"
    return [
        _row("io_engine", "I/O engine", engine.name),
        _row("io_uring", "io_uring in this kernel", machine.io_uring()),
        _row("path", "path", str(path.resolve())),
        _row("file_system", "file system", system, far),
        _size("free_bytes", "free space", shutil.disk_usage(path).free, "unknown"),
        Row("o_direct", "O_DIRECT", direct, shown, slow if direct is False else ""),
    ]


def _show(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(title="This machine", title_justify="left")
    for heading in ("item", "value"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.item, row.shown, style="yellow" if row.hint else None)
    console = plain_console()
    show_table(console, table)
    slow = [row for row in rows if row.hint]
    verdict = "What slows this machine:" if slow else "Nothing slows this machine."
    for line in (verdict, *(f"- {row.item}: {row.shown}: {row.hint}" for row in slow)):
        say(console, line)
