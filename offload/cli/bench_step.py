"""`offload bench step`: a whole `step()` on the NVMe tier at several budgets, against the drive and the kernel.

Every figure is a ratio to a limit measured in the same run, round by round in turns: machines are shared, and drives
drift. The limit of a step is the larger of

    disk    the bytes that the step moved, through the same engine, reading and writing at once, nothing computed
    kernel  Adam on as many states in RAM

A budget is the share of the optimizer states that `cpu_memory` has room for beside gradients and buffers in flight.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.console import print_json
from offload.errors import BudgetError, ConfigError, PathError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from offload import Tuning
    from offload.cli.bench_step_contestants import Limits, Subject, Transfers
    from offload.cli.bench_step_report import Report, Result
    from offload.planner.explain import Planned

LEAST_N = 1_500_000
"""With fewer, the buffers in flight would be a good part of all chunks."""
WIDTHS = (2048, 1024, 512, 256)
"""Of the layers, each of which is a chunk: the widest that gives LEAST_CHUNKS is taken."""
LEAST_CHUNKS = 256
PREFETCH = 6
"""Chunks read ahead: with the one in use and the one being written half as many buffers as the drive alone may have.
Fewer where they would be a good part of all chunks."""
SEARCH_ROUNDS = 2
"""Of the search for the number of buffers with which the drive is fastest."""
BUILT_BYTES = 6
"""A parameter: a model being built, in fp32 and bf16."""
ALONE_BYTES = 16
"""A parameter: states, gradient and result of the kernel that runs alone."""

SEQUENCE = 256
"""Tokens of a sequence, at most, of an iteration with streamed parameters."""
MOST_TOKENS = 1 << 20

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One run. count, width: of its layers; transfers: what the planner says that a step moves each way; commit_every:
    as `OffloadZero` takes it."""

    share: float
    split_master: bool
    count: int
    width: int
    cpu_memory: int
    arena_bytes: int
    disk_bytes: int
    transfers: Transfers
    commit_every: int | None = None

    @property
    def n(self) -> int:
        return self.count * self.width**2

    @property
    def tuning(self) -> Tuning:
        return tuning_of(self.count, self.width, split_master=self.split_master)

    @property
    def name(self) -> str:
        return f"{self.share:.0%} in RAM{', split master' * self.split_master}"

    def subject(self, swap: Path) -> Subject:
        """What is measured, with its swap files in `swap`."""
        from offload.cli.bench_step_contestants import Subject

        return Subject(self.count, self.width, self.tuning, self.cpu_memory, swap, self.commit_every)


def step(
    n: Annotated[str, typer.Option(help="Parameters.")] = "3e8",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which step and limits run.")] = 5,
    path: Annotated[Path, typer.Option(help="A directory on the drive to measure.")] = Path(),
    budgets: Annotated[
        str, typer.Option(help="Shares of the optimizer states that RAM has room for, with commas between.")
    ] = "0,0.25,0.5,0.75,1",
    split_master: Annotated[
        bool, typer.Option("--split-master/--no-split-master", help="One more run at budget 0, with a split master.")
    ] = True,
    commit_every: Annotated[
        int | None, typer.Option(min=1, help="Measure steps with a commit every so many against steps without instead.")
    ] = None,
    param_tier: Annotated[
        str | None, typer.Option(help="Measure whole iterations with the parameters there, nvme or cpu, instead.")
    ] = None,
    grad_tier: Annotated[str, typer.Option(help="Where gradients are then: cpu or nvme.")] = "cpu",
    tokens: Annotated[str, typer.Option(help="Tokens of an iteration then, with commas between.")] = "16,256,2048",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of a table.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture step.png.")] = Path("out"),
) -> None:
    """Measure whole steps on the NVMe tier against the drive's and the kernel's limit."""
    from rich.console import Console

    from offload.cli import bench_step_report as report
    from offload.cli.bench_step_plots import draw

    if param_tier is not None:
        _iterations(parameters(n), numbers_of_tokens(tokens), (param_tier, grad_tier), path, rounds, as_json=as_json)
        return
    cases = cases_of(parameters(n), shares(budgets), split_master=split_master, commit_every=commit_every)
    if commit_every is not None:
        _commits(cases, path, rounds, as_json=as_json)
        return
    check_place(path, cases)
    found = measure(cases, path, rounds, Console(stderr=True))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "step.png"
    draw(found, picture)
    if as_json:
        print_json(report.as_json(found) | {"picture": str(picture)})
        return
    _show(report.table(found), [*report.shortfalls(found), f"picture: {picture}"])


def _commits(cases: Sequence[Case], path: Path, rounds: int, *, as_json: bool) -> None:
    from rich.console import Console

    from offload.cli import bench_step_commits as commits

    commits.check_place(path, cases)
    found = commits.measure(cases, path, rounds, Console(stderr=True))
    if as_json:
        print_json(commits.as_json(found))
    else:
        _show(commits.table(found), commits.shortfalls(found))


def _iterations(
    n: int, tokens: Sequence[int], tiers: tuple[str, str], path: Path, rounds: int, *, as_json: bool
) -> None:
    from rich.console import Console

    from offload.cli import bench_step_streaming as streaming
    from offload.cli import bench_step_streaming_report as report

    job = streaming.job_of(n, *tiers)
    streaming.check_place(path, job)
    found = streaming.measure(job, tokens, path, rounds, Console(stderr=True))
    if as_json:
        print_json(report.as_json(found))
    else:
        _show(report.table(found), report.shortfalls(found))


def _show(table: Table, lines: Iterable[str]) -> None:
    from rich.console import Console

    from offload.cli.bench_step_sheet import WIDTH

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def parameters(text: str) -> int:
    """ "3e8" as a number. Raises: ConfigError."""
    try:
        n = int(float(text))
    except (ValueError, OverflowError):
        n = 0
    if n < LEAST_N:
        raise ConfigError(f"--n={text!r}: give a number of parameters from {LEAST_N:g} on, such as 3e8")
    return n


def shares(text: str) -> list[float]:
    """ "0,0.5" as numbers, each once. Raises: ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 1 for share in found):
        raise ConfigError(f"--budgets={text!r}: give shares from 0 to 1 with commas between, such as 0,0.5,1")
    return list(dict.fromkeys(found))


def numbers_of_tokens(text: str) -> list[int]:
    """ "16,256" as numbers, each once. Raises: ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if not all(count in range(1, MOST_TOKENS + 1) and count % min(count, SEQUENCE) == 0 for count in found):
        raise ConfigError(
            f"--tokens={text!r}: give numbers from 1 on with commas between, such as 16,256,2048; above {SEQUENCE} "
            "multiples of that"
        )
    return list(dict.fromkeys(found))


def shape(n: int) -> tuple[int, int]:
    """Layers and their width. A multiple of four layers: a budget of a quarter is a whole number of chunks."""
    width = next((width for width in WIDTHS if n >= LEAST_CHUNKS * width**2), WIDTHS[-1])
    return 4 * round(n / (4 * width**2)), width


def tuning_of(count: int, width: int, *, split_master: bool) -> Tuning:
    from offload import Tuning

    ahead = min(PREFETCH, count // 16)
    return Tuning(chunk=4 * width**2, prefetch_chunks=ahead, split_master=split_master)


def cases_of(n: int, budgets: Sequence[float], *, split_master: bool, commit_every: int | None = None) -> list[Case]:
    """What will run, planned before anything is allocated. Raises: ConfigError, BudgetError."""
    from offload.cli.bench_step_contestants import layers
    from offload.planner.explain import plan_of

    count, width = shape(n)
    model = layers(count, width)
    cases = []
    for share, split in [*((share, False) for share in budgets), *([(0.0, True)] if split_master else [])]:
        tuning = tuning_of(count, width, split_master=split)
        planned = plan_of(model, direct=True, tier="nvme", path=".", commit_every=commit_every, tuning=tuning)
        cases.append(_case(planned.with_memory(planned.cpu_memory_for(share)), share, count, width))
    return cases


def _case(planned: Planned, share: float, count: int, width: int) -> Case:
    from offload.cli.bench_step_contestants import Transfers

    placement, cpu_memory = planned.place(), planned.config.cpu_memory
    assert cpu_memory is not None
    return Case(
        share=share,
        split_master=planned.config.split_master,
        count=count,
        width=width,
        cpu_memory=cpu_memory,
        arena_bytes=placement.arena_bytes,
        disk_bytes=placement.disk_bytes,
        transfers=Transfers(len(planned.needs.states) - len(placement.kept), planned.needs.states[0].nbytes),
        commit_every=planned.config.commit_every,
    )


def check_place(path: Path, cases: Sequence[Case]) -> None:
    """Whether RAM and disk have room. Writes nothing. Raises: PathError, BudgetError."""
    from offload.cli.bench_step_contestants import EACH_WAY

    require_directory(path)
    n, most = cases[0].n, _most(cases)
    beside = (BUILT_BYTES + ALONE_BYTES) * n + 2 * max(EACH_WAY) * most.length
    require_room(
        path,
        n,
        ram=max(case.arena_bytes for case in cases) + beside,
        disk=max(case.disk_bytes for case in cases) + most.count * most.length,
    )


def require_directory(path: Path) -> None:
    """Raises: PathError unless `path` is a directory that can be written to."""
    if not path.is_dir():
        raise PathError(errno.ENOTDIR, "cannot measure here: give a directory on the drive", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "cannot measure here: you may not write to this directory", str(path))


def require_room(path: Path, n: int, *, ram: int, disk: int) -> None:
    """Raises: BudgetError unless that many bytes are free, for n parameters."""
    from offload.planner.machine import free_memory

    for place, needed, available in (
        ("RAM", ram, free_memory()),
        (str(path), disk, shutil.disk_usage(path).free),
    ):
        if needed > available:
            raise BudgetError(
                f"{n:.1e} parameters need {format_bytes(needed)} in {place}, {format_bytes(available)} are free: "
                "lower --n, or make room",
                needed=needed,
                available=available,
                option="--n",
            )


def measure(cases: Sequence[Case], path: Path, rounds: int, console: Console) -> Report:
    """Runs every case against both limits, in a folder in `path` that goes at the end, however it ends.

    Raises: PathError, TierIOError.
    """
    from offload.cli.bench_io_progress import progress
    from offload.cli.bench_step_contestants import EACH_WAY, Limits
    from offload.cli.bench_step_report import Report

    most = _most(cases)
    search = SEARCH_ROUNDS * len(EACH_WAY) if most.count else 0
    with (
        folder_in(path) as folder,
        Limits(folder, most, cases[0].n, cases[0].width ** 2) as limits,
        progress(console, "bench step", search + len(cases) * (rounds + 1)) as tick,
    ):
        if most.count:
            limits.search(most, SEARCH_ROUNDS, tick)
        results = [_run(case, folder / "swap", limits, rounds, tick) for case in cases]
        return Report(results, limits.engine_name, limits.buffers, limits.kernel, limits.threads)


def _most(cases: Sequence[Case]) -> Transfers:
    """What the drive's reference has to have room for."""
    from offload.cli.bench_step_contestants import Transfers

    moving = [case.transfers for case in cases]
    return Transfers(max(one.count for one in moving), max(one.length for one in moving))


@contextmanager
def folder_in(path: Path) -> Iterator[Path]:
    """A new folder in `path` that goes at the end. Raises: PathError."""
    try:
        made = tempfile.TemporaryDirectory(prefix=".offload-bench-step-", dir=path, ignore_cleanup_errors=True)
    except OSError as error:
        raise PathError(error.errno, f"cannot measure here: {error.strerror}", str(path)) from error
    with made as name:
        yield Path(name)


def _run(case: Case, swap: Path, limits: Limits, rounds: int, tick: Tick) -> Result:
    """One case: a round to warm up, then those that count."""
    from offload.cli.bench_step_report import Result

    with case.subject(swap) as subject:
        limits.round(subject, case.transfers)
        tick(f"{case.name}: warm")
        before, found = subject.moved_bytes(), []
        for number in range(rounds):
            found.append(limits.round(subject, case.transfers))
            tick(f"{case.name}: round {number + 1}/{rounds}")
        moved = (subject.moved_bytes() - before) / rounds
        return Result(case, found, moved, subject.peak_cpu_bytes)
