"""`offload bench step --commit-every N`: a step with commits against the same step without, in turns.

What a commit may cost is measured in the same run: the time of writing what it wrote beyond the step's own bytes,
through the same engine, with nothing else under way. With a budget of 0 that is nothing, and a step with commits is to
be as fast as one without.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.cli import bench_step
from offload.cli.bench_io_progress import progress
from offload.cli.bench_step import BUILT_BYTES, Case, Tick
from offload.cli.bench_step_contestants import EACH_WAY, Disk, Measured, Subject, Transfers
from offload.cli.bench_step_sheet import Sheet, hardware, median, spread
from offload.sizes import format_bytes

TARGET = 1.03
"""Of a step and what its commit flushes."""
_WARM = 2
"""Rounds that do not count: both places of each slot are written once, for the first write into reserved space is
slower."""
HEADINGS = (
    "in RAM", "peak RAM", "step", "fastest-slowest", "with commits", "fastest-slowest", "flushed a parameter",
    "flushing alone", "x step", "x step and flush",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """Seconds and bytes of a step, means over as many as there are to a commit: without commits, with them, and writing
    alone what these wrote more."""

    plain_s: float
    committing_s: float
    flushed_bytes: float
    flush_s: float


@dataclass(frozen=True)
class Result:
    """One case. peak_cpu_bytes: of the library, with commits."""

    case: Case
    rounds: list[Round]
    peak_cpu_bytes: int

    def median(self, name: str) -> float:
        return median(self.rounds, attrgetter(name))

    def spread(self, name: str) -> str:
        return spread([getattr(one, name) for one in self.rounds])

    @property
    def flushed_per_param(self) -> float:
        return self.median("flushed_bytes") / self.case.n

    @property
    def x_step(self) -> float:
        """The median of the rounds' ratios, as is `x_limit`."""
        return median(self.rounds, lambda one: one.committing_s / one.plain_s)

    @property
    def x_limit(self) -> float:
        return median(self.rounds, lambda one: one.committing_s / (one.plain_s + one.flush_s))


@dataclass(frozen=True)
class Report:
    """All cases, in the order they ran. hardware: and versions."""

    results: list[Result]
    hardware: str

    @property
    def every(self) -> int:
        every = self.results[0].case.commit_every
        assert every is not None
        return every


def check_place(path: Path, cases: Sequence[Case]) -> None:
    """Whether RAM and disk have room. Writes nothing. Raises: PathError, BudgetError."""
    bench_step.require_directory(path)
    whole = _whole(cases)
    beside = 2 * max(EACH_WAY) * whole.length
    bench_step.require_room(
        path,
        cases[0].n,
        ram=2 * (max(case.arena_bytes for case in cases) + BUILT_BYTES * cases[0].n) + beside,
        # One place a chunk without commits, two with them.
        disk=max(2 * case.disk_bytes for case in cases) + whole.nbytes // 2,
    )


def measure(cases: Sequence[Case], path: Path, rounds: int, console: Console) -> Report:
    """Runs every case with and without commits, in a folder in `path` that goes at the end, however it ends.

    Raises: PathError, TierIOError.
    """
    with (
        bench_step.folder_in(path) as folder,
        closing(Disk(folder, _whole(cases))) as disk,
        progress(console, "bench step", len(cases) * (rounds + _WARM)) as tick,
    ):
        results, shown = [], ""
        for case in cases:
            plain = replace(case, commit_every=None)
            with plain.subject(folder / "plain") as one, case.subject(folder / "committing") as other:
                stats = other.optimizer.stats()
                shown = hardware(stats["threads"], stats["kernel"], f", {stats['io_engine']}")
                results.append(_run(case, one, other, disk, rounds, tick))
        return Report(results, shown)


def _whole(cases: Sequence[Case]) -> Transfers:
    return Transfers(cases[0].count, max(case.transfers.length for case in cases))


def _run(case: Case, plain: Subject, committing: Subject, disk: Disk, rounds: int, tick: Tick) -> Result:
    """Rounds to warm up, then those that count; both take turns in being first."""
    found = []
    for number in range(1 - _WARM, rounds + 1):
        subjects = [committing, plain] if number % 2 else [plain, committing]
        taken = {subject: _block(case, subject) for subject in subjects}
        found.append(_round(case, taken[plain], taken[committing], disk))
        tick(f"{case.name}: {f'round {number}/{rounds}' if number > 0 else 'warm'}")
    return Result(case, found[_WARM:], committing.peak_cpu_bytes)


def _block(case: Case, subject: Subject) -> list[Measured]:
    """Steps of which just one makes a commit: that of the step before it."""
    assert case.commit_every is not None
    return [subject.run() for _ in range(case.commit_every)]


def _round(case: Case, plain: Sequence[Measured], committing: Sequence[Measured], disk: Disk) -> Round:
    def mean(steps: Sequence[Measured], name: str) -> float:
        return statistics.fmean(getattr(step, name) for step in steps)

    flushed = max(mean(committing, "moved_bytes") - mean(plain, "moved_bytes"), 0.0)
    length = case.transfers.length
    transfers = Transfers(min(-(-int(flushed) // length), case.count), length)
    flush_s = 0.0
    if transfers.count:
        seconds = disk.run(transfers, max(EACH_WAY), ways=("write",))
        flush_s = seconds * flushed / (transfers.count * length)
    return Round(mean(plain, "seconds"), mean(committing, "seconds"), flushed, flush_s)


def as_json(report: Report) -> dict[str, Any]:
    case = report.results[0].case
    return {
        "parameters": case.n,
        "chunks": case.count,
        "chunk_bytes": 4 * case.width**2,
        "commit_every": report.every,
        "rounds": len(report.results[0].rounds),
        "hardware": report.hardware,
        "runs": [_run_json(result) for result in report.results],
    }


def _run_json(result: Result) -> dict[str, Any]:
    return {
        "budget": result.case.share,
        "split_master": result.case.split_master,
        "cpu_memory": result.case.cpu_memory,
        "peak_cpu_bytes": result.peak_cpu_bytes,
        "step_s": result.median("plain_s"),
        "committing_s": result.median("committing_s"),
        "flushed_bytes_per_param": result.flushed_per_param,
        "flush_s": result.median("flush_s"),
        "x_step": result.x_step,
        "x_limit": result.x_limit,
        "rounds": [vars(one) for one in result.rounds],
    }


def _title(report: Report) -> str:
    case = report.results[0].case
    return f"step() of {case.n:,} parameters in {case.count} chunks, a commit every {report.every}"


def table(report: Report) -> Table:
    """For people."""
    return _sheet(report).table()


def _sheet(report: Report) -> Sheet:
    return Sheet(_title(report), report.hardware, HEADINGS, [_row(result) for result in report.results])


def _row(result: Result) -> tuple[str, ...]:
    return (
        f"{result.case.share:.0%}{', split' * result.case.split_master}",
        format_bytes(result.peak_cpu_bytes),
        f"{result.median('plain_s'):.3f} s",
        result.spread("plain_s"),
        f"{result.median('committing_s'):.3f} s",
        result.spread("committing_s"),
        f"{result.flushed_per_param:.2f}",
        f"{result.median('flush_s'):.3f} s",
        f"{result.x_step:.3f}",
        f"{result.x_limit:.3f}",
    )


def shortfalls(report: Report) -> Iterator[str]:
    """Where a step with commits takes longer than we want."""
    for result in report.results:
        if result.x_limit > TARGET:
            yield f"off target: {result.case.name} takes {result.x_limit:.3f} of its limit, wanted {TARGET}"


def markdown(report: Report, command: str) -> str:
    """For bench/results."""
    about = (
        f"{_title(report)}: `step(); synchronize()` on the NVMe tier of two optimizers, with `commit_every="
        f"{report.every}` and with `None`, in turns. `flushed a parameter`: bytes that commits write, a step, beyond "
        "those of the step itself: of what stays in RAM, and with a split master the parameters; `flushing alone`: "
        "writing as many through the same engine, with nothing else under way. `x step`: with commits by without, and "
        "`x step and flush`: by the sum of without and flushing alone, medians over the rounds. Times are medians."
    )
    return _sheet(report).page("A step with commits", command, about, shortfalls(report))
