"""Measures a machine: memory, products of matrices, steps of optimizers, the link to its device, drives, and Python.

All measurements take turns, in several rounds. So a machine that drifts drifts for all, and what else runs there for a
moment is in one round.
"""

from __future__ import annotations

import contextlib
import platform
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from offload import native
from offload.cli import host_costs, io_speed
from offload.cli.io_speed import OPERATIONS, QUICK_BYTES, Ours, checked_size, file_in, lay_out
from offload.cli.plan_models import optimizers, rules_named
from offload.cli.progress import Tell
from offload.devices.copies import HostCopier, accelerator, copier_for, device_name
from offload.errors import BudgetError, ConfigError
from offload.io.select import AUTO, Settings, Together, file_system_of, recall, remember, remember_together
from offload.optim.rule import SegmentMemory, Span
from offload.planner import machine_file
from offload.planner.machine import free_memory, kernel_threads
from offload.planner.rates import HostRates, LinkRates, Rate, Rates, step_name
from offload.planner.rates import remember as remember_rates
from offload.sizes import GIB, MIB, format_bytes
from offload.storage.arena import Arena

ROUNDS = 5
LEAST_S = 0.03
"""Of one measurement: what takes less is repeated."""
COPIED_BYTES = 256 * MIB
ELEMENTS = 8 * MIB
"""That an optimizer steps at once: with their states they fit no cache."""
LEAST_WIDTH, MOST_WIDTH = 256, 8192
"""Of the square matrices that are multiplied. They grow until a product takes LEAST_S."""
LEAST_BYTES = 2 * GIB
"""Of RAM: what is copied and stepped takes three quarters of it."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BY_SIZE = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
"""The dtype of a state, by the bytes of an element."""
STEPS = (
    ("adamw", "fp32", False), ("adamw", "fp32", True), ("adamw", "bf16", False), ("adamw", "bf16", True),
    ("adamw", "8bit", False), ("adamw", "8bit", True), ("sgd", "fp32", False), ("sgd-momentum", "fp32", False),
)  # fmt: skip
"""Optimizer, form of its states, and whether its masters are split."""

Measured = Callable[[], float]
"""Does something, and returns how many units a second that were."""


def measure_rates(tell: Tell) -> Rates:
    """Measures everything but the disks and what Python takes.

    Args:
        tell: called before each measurement.

    Raises:
        BudgetError: RAM has no room for it.
    """
    device = accelerator()
    if (free := free_memory()) < LEAST_BYTES:
        raise BudgetError(
            f"measuring needs {format_bytes(LEAST_BYTES)} of RAM and {format_bytes(free)} are free: end what else runs",
            needed=LEAST_BYTES,
            available=free,
            option="cpu_memory",
        )
    with contextlib.ExitStack() as stack:
        threads = kernel_threads(None, ranks_on_node=1, direct=device is None)
        kernels = stack.enter_context(contextlib.closing(native.load(threads)))
        jobs: dict[str, Measured] = {"memory": copies()}
        jobs |= {_dtype_name(dtype): _products(dtype, device) for dtype in DTYPES}
        for optimizer, form, split in STEPS:
            name = step_name(optimizer, form, split_master=split)
            jobs[name] = steps_of(kernels, optimizer, form, split=split)
        if device is not None:
            jobs |= _link(device, stack)
        found = in_turns(jobs, tell)
    rates = {name: Rate.of(values) for name, values in found.items()}
    link = None if device is None else LinkRates(*(rates[way] for way in ("up", "down", "both")))
    steps = [step_name(optimizer, form, split_master=split) for optimizer, form, split in STEPS]
    products = [_dtype_name(dtype) for dtype in DTYPES]
    return Rates(
        device_name(device),
        threads,
        rates["memory"],
        {name: rates[name] for name in products},
        {name: rates[name] for name in steps},
        link,
    )


def count_of_measurements() -> int:
    """How often `measure_rates` calls `tell`."""
    return ROUNDS * (1 + len(DTYPES) + len(STEPS) + (3 if accelerator() is not None else 0))


def in_turns(jobs: Mapping[str, Measured], tell: Tell) -> dict[str, list[float]]:
    """Does all jobs in each of ROUNDS rounds, after once without a clock.

    Returns:
        What they returned, by their name.
    """
    for job in jobs.values():
        job()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(ROUNDS):
        for place, (name, job) in enumerate(jobs.items()):
            tell(number * len(jobs) + place + 1, name)
            found[name].append(job())
    return found


def _per_second(work: Callable[[], object], units: float) -> float:
    """How many units a second are done.

    Args:
        work: called until LEAST_S have passed.
        units: that a call does.
    """
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < LEAST_S or not count:
        work()
        count += 1
    return count * units / taken


def copies() -> Measured:
    """Copies in RAM, in bytes that are read and written."""
    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    return lambda: _per_second(lambda: target.copy_(source), 2 * COPIED_BYTES)


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _products(dtype: torch.dtype, device: torch.device | None) -> Measured:
    """Products of square matrices, of the least width that takes LEAST_S."""
    where = device or torch.device("cpu")
    width = LEAST_WIDTH
    while True:
        one, other = (torch.randn(width, width, device=where).to(dtype) for _ in range(2))
        multiply = _waited_for(partial(torch.matmul, one, other), device)
        multiply()
        start = time.perf_counter()
        multiply()
        if time.perf_counter() - start > LEAST_S or width == MOST_WIDTH:
            return lambda: _per_second(multiply, 2.0 * width**3)
        width *= 2


def _waited_for(work: Callable[[], object], device: torch.device | None) -> Callable[[], None]:
    def run() -> None:
        work()
        if device is not None:
            torch.get_device_module(device).synchronize(device)

    return run


def steps_of(kernels: native.Kernels, optimizer: str, form: str, *, split: bool) -> Measured:
    """Steps of bf16 parameters by an optimizer, as a run makes them of states in RAM."""
    rule, _ = rules_named(optimizer, form)
    arrays = [_array(torch.int16 if split else torch.float32)]
    arrays += [_array(_BY_SIZE[size], block) for state in rule.states for size, block in state.form.arrays]
    grad, out = (_array(torch.bfloat16) for _ in range(2))
    # Zeros, and denormals, are slow or fast as no training is.
    grad.normal_(std=1e-2)
    memory = SegmentMemory(arrays, grad, out, [Span(0, ELEMENTS)], out if split else None)
    bound = rule.bind(kernels, memory)
    kind, options = optimizers()[optimizer]
    (group,) = kind([nn.Parameter(torch.zeros(1))], **options).param_groups
    scalars = rule.scalars({name: value for name, value in group.items() if name != "params"}, rule.initial, 1.0)

    def step(_: SegmentMemory = memory) -> None:  # what is bound has its addresses, and does not keep it
        kernels.run([bound(scalars)])

    return lambda: _per_second(step, ELEMENTS)


def _array(dtype: torch.dtype, block: int = 1) -> Tensor:
    nbytes = -(-ELEMENTS // block) * dtype.itemsize
    return Arena(nbytes, HostCopier()).carve(nbytes).view(dtype).zero_()


def _link(device: torch.device, stack: contextlib.ExitStack) -> dict[str, Measured]:
    """Copies between pinned memory and a device.

    Args:
        device: the device.
        stack: gives the memory back.
    """
    copier = copier_for(device)
    arena = stack.enter_context(contextlib.closing(Arena(2 * COPIED_BYTES, copier)))
    out, back = (arena.carve(COPIED_BYTES) for _ in range(2))
    there, here = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def move(*, up: bool = False, down: bool = False) -> None:
        copies = [copier.to_device(out, there)] if up else []
        copies += [copier.to_host(here, back)] if down else []
        for copy in copies:
            copy.wait()

    return {
        "up": lambda: _per_second(lambda: move(up=True), COPIED_BYTES),
        "down": lambda: _per_second(lambda: move(down=True), COPIED_BYTES),
        "both": lambda: _per_second(lambda: move(up=True, down=True), 2 * COPIED_BYTES),
    }


def measure_host(drive: Drive) -> HostRates:
    """Measures what Python takes for tiles, chunks in RAM and on a drive, and transfers; see `host_costs`.

    Raises:
        OffloadError: what a run on that drive raises.
    """
    where = drive.path, drive.settings.engine
    measures = {
        "tile": host_costs.tiles(),
        "chunk": host_costs.chunks(*where),
        "resident": host_costs.resident_chunks(),
        "moved": host_costs.moved_chunks(*where),
        "delay": host_costs.delays(*where),
    }
    with contextlib.ExitStack() as stack:
        entered = {name: stack.enter_context(one) for name, one in measures.items()}
        found = in_turns(entered, lambda done, name: None)
    return HostRates(**{name: Rate.of(values) for name, values in found.items()})


# The disks.


@dataclass(frozen=True)
class Drive:
    """What was measured of a file system, in bytes a second.

    Attributes:
        path: a directory on it.
        settings: the engine that moved the bytes.
        rates: by operation, of OPERATIONS.
    """

    path: Path
    settings: Settings
    rates: Mapping[str, Rate]


def require_drives(paths: Sequence[Path]) -> list[int]:
    """Requires directories that can be measured, each on a file system of its own. Writes nothing.

    Returns:
        The size of the file to measure in each, in bytes.

    Raises:
        PathError: a path is no writable directory.
        BudgetError: the file has no room.
        ConfigError: two of them are on one file system.
    """
    sizes = [checked_size(path, None, QUICK_BYTES) for path in paths]
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(file_system_of(path), path)
        if other is not path:
            raise ConfigError(f"{other} and {path} are on one file system: give one directory of each")
    return sizes


def measure_drives(paths: Sequence[Path], sizes: Sequence[int], console: Console) -> tuple[list[Drive], Rate | None]:
    """Measures file systems, each alone and then all together.

    Where it is not known which engine is fastest, that is found first, as `offload bench io --quick` does.

    Args:
        paths: directories.
        sizes: of the file to measure in each, as `require_drives` says.
        console: where progress is shown.

    Returns:
        What was found of each; and of all at once, reading and writing together, if there are several.

    Raises:
        PathError: a file system refused something.
        ConfigError: no engine works.
    """
    found = []
    with contextlib.ExitStack() as stack:
        contestants = []
        for path, size in zip(paths, sizes, strict=True):
            known = recall(path)
            if known is None or known.engine == AUTO:
                best = io_speed.measure_path(path, size, 1, quick=True, console=console, peers=None).chosen.contestant
                known = Settings(best.name, best.request_bytes, best.depth)
            memory = stack.enter_context(contextlib.closing(Arena(io_speed.MEMORY_BYTES, HostCopier()))).memory
            memory[:] = random.Random(0).randbytes(
                len(memory)
            )  # a drive that compresses would be faster with equal bytes
            file = stack.enter_context(file_in(path))
            one = Ours(known.engine, file, memory, known.request_bytes, known.depth)
            nbytes = lay_out(file, size, memory)
            contestants.append((one, nbytes))
            seconds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
            for _ in range(ROUNDS):
                for operation, taken in seconds.items():
                    taken.append(one.run(operation, nbytes))
            rates = {name: Rate.of(nbytes / second for second in taken) for name, taken in seconds.items()}
            found.append(Drive(path, known, rates))
        together = _together(contestants) if len(contestants) > 1 else None
    return found, together


def remember_all(rates: Rates, drives: Sequence[Drive], together: Rate | None) -> Path:
    """Writes down what was measured.

    Args:
        rates: of all but the drives.
        drives: what each does alone.
        together: what all do at once; None: there is one.

    Returns:
        The file in which it stands.

    Raises:
        OSError: if the cache directory cannot be written.
    """
    for drive in drives:
        read, write, mixed = (drive.rates[operation].median for operation in OPERATIONS)
        known = drive.settings
        remember(drive.path, Settings(known.engine, known.request_bytes, known.depth, mixed, read, write))
    if together is not None:
        systems = [file_system_of(drive.path) for drive in drives]
        remember_together(systems, Together(together.median, together.lowest, together.highest))
    return remember_rates(rates)


def save(file: Path, rates: Rates, drives: Sequence[Drive], together: Rate | None) -> None:
    """Writes a description of this machine, which `machine_file.load` reads.

    Args:
        file: under whose name there is nothing yet.
        rates: of all but the drives.
        drives: what each does alone.
        together: what all do at once; None: there is one.

    Raises:
        ConfigError: the file cannot be written.
    """
    of_drives = []
    for drive in drives:
        free = machine_file.Size(max(shutil.disk_usage(drive.path).free, 1), "free when it was measured", True)
        read, write, mixed = (machine_file.of_rate(drive.rates[operation]) for operation in OPERATIONS)
        of_drives.append(machine_file.Drive(str(drive.path.resolve()), read, write, mixed, free))
    machine = machine_file.described(rates, of_drives, together, name=platform.node() or "a machine")
    try:
        with file.open("x", encoding="utf-8", errors="replace") as opened:
            opened.write(machine_file.written(machine))
    except OSError as error:
        raise ConfigError(f"--save {file} cannot be written: {error.strerror}") from error


def _together(contestants: Sequence[tuple[Ours, int]]) -> Rate:
    """Bytes a second of several drives that move theirs at once.

    Args:
        contestants: one for each drive, and how many bytes it moves.
    """
    total = sum(nbytes for _, nbytes in contestants)

    def once(pool: ThreadPoolExecutor) -> float:
        start = time.perf_counter()
        for moved in [pool.submit(one.run, "mixed", nbytes) for one, nbytes in contestants]:
            moved.result()
        return total / (time.perf_counter() - start)

    with ThreadPoolExecutor(len(contestants)) as pool:
        return Rate.of(once(pool) for _ in range(ROUNDS))
