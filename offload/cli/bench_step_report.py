"""What `offload bench step` found: for people, for machines and for bench/results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from offload.cli.bench_step import Case
from offload.cli.bench_step_contestants import Round
from offload.cli.bench_step_sheet import Sheet, hardware, median, spread
from offload.sizes import format_bytes

WHOLE_BYTES, SPLIT_BYTES = 24, 20
"""A parameter and step through the disk, with all states there."""
TARGET_RATIO = 1.05
TARGET_BYTES = 0.02

HEADINGS = (
    "in RAM", "peak RAM", "bytes a parameter", "step", "fastest-slowest", "drive alone", "Adam alone", "x limit",
    "Adam", "waiting",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One case. moved_bytes: on the disk a step, both ways, over all rounds; peak_cpu_bytes: of the library."""

    case: Case
    rounds: list[Round]
    moved_bytes: float
    peak_cpu_bytes: int

    @property
    def bytes_per_param(self) -> float:
        return self.moved_bytes / self.case.n

    @property
    def expected_bytes(self) -> float:
        return (1 - self.case.share) * (SPLIT_BYTES if self.case.split_master else WHOLE_BYTES)

    @property
    def step_s(self) -> float:
        return median(self.rounds, lambda one: one.step.seconds)

    @property
    def steps(self) -> list[float]:
        return [one.step.seconds for one in self.rounds]

    @property
    def disk_s(self) -> float:
        return median(self.rounds, lambda one: one.disk_s)

    @property
    def kernel_s(self) -> float:
        return median(self.rounds, lambda one: one.kernel_s)

    @property
    def limit_s(self) -> float:
        return median(self.rounds, lambda one: one.limit_s)

    @property
    def x_limit(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.rounds, lambda one: one.step.seconds / one.limit_s)

    @property
    def adam_share(self) -> float:
        return median(self.rounds, lambda one: one.step.adam_s / one.step.seconds)

    @property
    def wait_share(self) -> float:
        return median(self.rounds, lambda one: one.step.wait_s / one.step.seconds)


@dataclass(frozen=True)
class Report:
    """All cases, in the order they ran, and what they were measured with.

    engine: of the disk; None if nothing moved; buffers: of the drive's reference, with which it is fastest.
    """

    results: list[Result]
    engine: str | None
    buffers: int
    kernel: str
    threads: int


def as_json(report: Report) -> dict[str, Any]:
    case = report.results[0].case
    return {
        "parameters": case.n,
        "chunks": case.count,
        "chunk_bytes": 4 * case.width**2,
        "rounds": len(report.results[0].rounds),
        "engine": report.engine,
        "limit_buffers": report.buffers,
        "kernel": report.kernel,
        "threads": report.threads,
        "hardware": caption(report),
        "runs": [_run(result) for result in report.results],
    }


def _run(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "budget": case.share,
        "split_master": case.split_master,
        "cpu_memory": case.cpu_memory,
        "peak_cpu_bytes": result.peak_cpu_bytes,
        "streamed_chunks": case.transfers.count,
        "bytes_per_param": result.bytes_per_param,
        "expected_bytes_per_param": result.expected_bytes,
        "step_s": result.step_s,
        "disk_s": result.disk_s,
        "kernel_s": result.kernel_s,
        "limit_s": result.limit_s,
        "x_limit": result.x_limit,
        "adam_share": result.adam_share,
        "wait_share": result.wait_share,
        "rounds": [
            {"step_s": one.step.seconds, "disk_s": one.disk_s, "kernel_s": one.kernel_s} for one in result.rounds
        ],
    }


def table(report: Report) -> Table:
    """For people."""
    return _sheet(report).table()


def _sheet(report: Report) -> Sheet:
    case = report.results[0].case
    title = f"step() of {case.n:,} parameters in {case.count} chunks"
    return Sheet(title, caption(report), HEADINGS, [_row(result) for result in report.results])


def _row(result: Result) -> tuple[str, ...]:
    return (
        f"{result.case.share:.0%}{', split' * result.case.split_master}",
        format_bytes(result.peak_cpu_bytes),
        f"{result.bytes_per_param:.2f} of {result.expected_bytes:.2f}",
        f"{result.step_s:.3f} s",
        spread(result.steps),
        f"{result.disk_s:.3f} s",
        f"{result.kernel_s:.3f} s",
        f"{result.x_limit:.3f}",
        f"{result.adam_share:.0%}",
        f"{result.wait_share:.0%}",
    )


def shortfalls(report: Report) -> Iterator[str]:
    """Where the step is slower, or moves other bytes, than we want."""
    for result in report.results:
        if abs(result.bytes_per_param - result.expected_bytes) > TARGET_BYTES * result.expected_bytes:
            yield (
                f"off target: {result.case.name} moves {result.bytes_per_param:.2f} bytes a parameter and step, "
                f"wanted {result.expected_bytes:.2f} within {TARGET_BYTES:.0%}"
            )
        if result.x_limit > TARGET_RATIO:
            yield f"off target: {result.case.name} takes {result.x_limit:.3f} of its limit, wanted {TARGET_RATIO}"


def markdown(report: Report, command: str) -> str:
    """For bench/results."""
    case = report.results[0].case
    about = (
        f"`step(); synchronize()` of {case.n:,} parameters in {case.count} chunks on the NVMe tier. `in RAM`: the "
        "share of the optimizer states that `cpu_memory` has room for beside gradients and buffers in flight. `bytes a "
        "parameter`: read and written a step, of those that this share leaves. `x limit`: the median over the rounds "
        "of the step's time by the larger of `drive alone`, the bytes it moved through the same engine, reading and "
        "writing at once, with nothing computed, and `Adam alone`, the kernel on as many states in RAM. `split`: with "
        "a split master. Times are medians."
    )
    return _sheet(report).page("A whole step", command, about, shortfalls(report))


def caption(report: Report) -> str:
    """What the figures were measured on and with."""
    disk = f", {report.engine} (drive alone: {report.buffers} buffers)" if report.engine else ""
    return hardware(report.threads, report.kernel, disk)


def whole(results: Sequence[Result]) -> list[Result]:
    """Those without a split master, by budget: what is drawn as a line."""
    return sorted((one for one in results if not one.case.split_master), key=lambda one: one.case.share)
