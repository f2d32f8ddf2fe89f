"""What `offload bench io` found: for people, for machines, and for `io_engine="auto"`."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.cli.bench_io_contestants import OPERATIONS, size_label
from offload.cli.bench_io_place import Plan
from offload.cli.bench_io_race import Duel, Point, Race
from offload.io.select import Settings, remember
from offload.sizes import format_bytes

TARGET_RATIO = 0.97
TARGET_CPU = 0.03
BYTES_A_PARAMETER = 24
"""Through the drive in a step: 12 read, 12 written."""

_DAY_S = 24 * 3600


@dataclass(frozen=True)
class Result:
    """One path. nbytes: moved in one measurement of the race; left_out: engines and references, and why."""

    plan: Plan
    direct: bool
    nbytes: int
    points: list[Point]
    race: Race
    left_out: list[str]

    @property
    def best(self) -> Point:
        return self.race.ours

    @property
    def mixed_bytes_per_s(self) -> float:
        return self.best.speed("mixed") * 1e9


def as_json(result: Result) -> dict[str, Any]:
    return {
        "path": str(result.plan.path.resolve()),
        "fs": result.plan.fs,
        "o_direct": result.direct,
        "bytes": result.nbytes,
        **_speeds(result.best),
        "engine": result.best.engine,
        "request_bytes": result.best.request_bytes,
        "depth": result.best.depth,
        "cpu_s_per_gib": result.best.cpu,
        "references": {name: _duels(duels) for name, duels in result.race.duels.items()},
        "points": [
            {
                "engine": point.engine,
                "request_bytes": point.request_bytes,
                "depth": point.depth,
                **_speeds(point),
                "cpu_s_per_gib": point.cpu,
            }
            for point in result.points
        ],
        "left_out": result.left_out,
        "warnings": list(result.plan.warnings),
    }


def _speeds(point: Point) -> dict[str, float]:
    return {f"{operation}_gb_per_s": point.speed(operation) for operation in OPERATIONS}


def _duels(duels: dict[str, Duel]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for operation, duel in duels.items():
        values[f"{operation}_gb_per_s"] = duel.speed
        values[f"{operation}_ratio"] = duel.ratio
        values[f"{operation}_settings"] = duel.contestant.settings
    return values


def remember_settings(result: Result, console: Console) -> None:
    """For `io_engine="auto"`, and for the shares of several paths."""
    best = result.best
    settings = Settings(best.engine, best.request_bytes, best.depth, result.mixed_bytes_per_s)
    try:
        place = remember(result.plan.path, settings)
    except OSError as error:
        say(console, f'cannot write down the settings for io_engine="auto": {error}')
    else:
        say(console, f'io_engine="auto" will use {label(best)} on the file system of {result.plan.path} ({place})')


def label(point: Point) -> str:
    return f"{point.engine} {size_label(point.request_bytes)} x {point.depth}"


def tables(result: Result) -> Iterator[Table]:
    """The engines at their best, and the references."""
    yield _grid(_engine_rows(result), title=_title(result), caption=caption())
    if result.race.duels:
        text = "ours / reference: the median of the rounds' ratios, in a buffer of the same size, one after the other"
        yield _grid(_reference_rows(result), title="Against others", caption=text)


def _title(result: Result) -> str:
    through = "O_DIRECT" if result.direct else "page cache"
    return f"{result.plan.path.resolve()}: {result.plan.fs}, {through}, {format_bytes(result.nbytes)} at a time"


def _engine_rows(result: Result) -> Iterator[tuple[str, ...]]:
    yield ("engine", "settings", *(f"{name} GB/s" for name in OPERATIONS), "CPU s/GiB")
    yield _point_row(result.best, f"{result.best.engine}, chosen")
    for engine in dict.fromkeys(point.engine for point in result.points):
        best = max((point for point in result.points if point.engine == engine), key=lambda point: point.score)
        yield _point_row(best, f"{engine}, sweep")


def _point_row(point: Point, name: str) -> tuple[str, ...]:
    speeds = (f"{point.speed(operation):.2f}" for operation in OPERATIONS)
    return (name, f"{size_label(point.request_bytes)} x {point.depth}", *speeds, f"{point.cpu:.3f}")


def _reference_rows(result: Result) -> Iterator[tuple[str, ...]]:
    yield ("reference", "", "settings", "buffer", "GB/s", "ours", "ours / reference")
    for name, duels in result.race.duels.items():
        for operation, duel in duels.items():
            one = duel.contestant
            speeds = (f"{duel.speed:.2f}", f"{duel.own_speed:.2f}", f"{duel.ratio:.3f}")
            yield (name, operation, one.settings, format_bytes(one.buffer_bytes), *speeds)


def _grid(rows: Iterator[tuple[str, ...]], title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption)
    numbers = ("GB/s", "CPU", "ours", "buffer")
    for heading in next(rows):
        right = any(word in heading for word in numbers)
        table.add_column(heading, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def meaning(result: Result, life: int) -> Iterator[str]:
    """What the figures say to somebody who trains. Args: life: bytes that can be written to the drive."""
    speed = result.mixed_bytes_per_s
    seconds, flops = BYTES_A_PARAMETER / speed, matmul_flops()
    yield (
        f"Training: {seconds * 1e9:.0f} s a step for a billion parameters ({BYTES_A_PARAMETER} bytes each). "
        f"At {flops / 1e12:.3g} TFLOP/s (bf16 products, measured here), compute hides that from "
        f"{flops * seconds / 6:,.0f} tokens a step on if the drive works all the time, "
        f"from {flops * seconds / 2:,.0f} if it only works between two steps' compute."
    )
    yield (
        f"Wear: writing half of that bandwidth all the time reaches {life / 1e12:,.0f} TB written "
        f"in {life / (speed / 2) / _DAY_S:,.1f} days (--tbw)."
    )
    yield from shortfalls(result)
    yield from (f"left out: {reason}" for reason in result.left_out)


def shortfalls(result: Result) -> Iterator[str]:
    """Where we are slower than we want to be."""
    for name, duels in result.race.duels.items():
        for operation, duel in duels.items():
            if duel.ratio < TARGET_RATIO:
                yield f"below target: {operation} at {duel.ratio:.3f} of {name}, wanted {TARGET_RATIO}"
    if result.best.cpu > TARGET_CPU:
        yield f"below target: {result.best.cpu:.3f} CPU seconds a GiB, wanted {TARGET_CPU}"


def markdown(results: Sequence[Result], command: str, life: int) -> str:
    """For bench/results."""
    lines = ["# I/O", "", f"{caption()}.", "", f"`{command}`", ""]
    for result in results:
        path = f"{result.plan.fs}, {'O_DIRECT' if result.direct else 'page cache'}"
        lines += [f"## {path}, {format_bytes(result.nbytes)} at a time", ""]
        for rows in (_engine_rows(result), _reference_rows(result)):
            lines += [*_markdown(rows), ""]
        lines += [f"- {line}" for line in meaning(result, life)]
        lines += [
            "",
            "ours / reference: the median of the rounds' ratios; each pair ran one right after the other on the same "
            "file, in buffers of the same size (ours: 64 MiB at most) on huge pages, the reference at the best of its "
            "settings. What fits the CPU's cache looks faster: a step of training does not.",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    heading = next(rows)
    yield "| " + " | ".join(heading) + " |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def caption() -> str:
    """What the figures were measured on and with."""
    from importlib import metadata

    from offload import native

    name, _ = native.cpu_model()
    return (
        f"{name}, {native.usable_cpus()} usable CPUs; Linux {platform.release()}; "
        f"offload {metadata.version('offload')}, Python {platform.python_version()}{_fio_version()}"
    )


def _fio_version() -> str:
    if shutil.which("fio") is None:
        return ""
    return ", " + subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def matmul_flops() -> float:
    """FLOP/s of bf16 products on the device that would train."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n = 128  # CPUs without instructions for bf16 are a thousand times slower than those with
    while True:
        left, right = (torch.ones(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
        fastest = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            # One element comes back: a GPU has then done them all.
            (left @ right)[0, 0].item()
            fastest = min(fastest, time.perf_counter() - start)
        if n == 4096 or fastest > 0.02:
            return float(2 * n**3 / fastest)
        n *= 2


def say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
