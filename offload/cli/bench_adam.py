"""`offload bench adam`: the CPU Adam against the machine's memory, and against its peers.

Every contestant updates the same tensors in the same run, one after the other, round after round, so
that a machine that drifts drifts for all. A contestant's `x_limit` is the median over the rounds of
its time by the limit's in the same round; the limit moves the same bytes with the same stores and no
arithmetic (kernels/limit.c).

    job     reads                                       writes                      bytes a parameter
    fp32    master, exp_avg, exp_avg_sq, fp32 gradient  the first three             28
    mixed   master, exp_avg, exp_avg_sq, bf16 gradient  the first three, bf16 copy  28
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from offload.cli.bench_adam_peers import States

BYTES_A_PARAMETER = 28
JOBS = ("fp32", "mixed")
_SAMPLE = 20_000_000  # parameters a timing covers at least: small sizes are repeated


@dataclass
class Result:
    """One contestant at one job, size and thread count; seconds of each round, a call."""

    contestant: str
    job: str
    n: int
    threads: int
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def ns_per_param(self) -> float:
        return statistics.median(self.seconds) / self.n * 1e9

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest round, ns a parameter."""
        return min(self.seconds) / self.n * 1e9, max(self.seconds) / self.n * 1e9

    @property
    def x_limit(self) -> float | None:
        """None where there is no C library, and so no limit."""
        if not self.limits:
            return None
        return statistics.median(mine / limit for mine, limit in zip(self.seconds, self.limits, strict=True))

    def as_json(self) -> dict[str, Any]:
        ns = self.ns_per_param
        return {
            "contestant": self.contestant,
            "job": self.job,
            "n": self.n,
            "threads": self.threads,
            "ns_per_param": ns,
            "gb_per_s": BYTES_A_PARAMETER / ns,
            "x_limit": self.x_limit,
        }


def adam(
    n: Annotated[str, typer.Option(help="Parameters: one number or several with commas, as 1e6,1e7,1e8.")] = "1e8",
    threads: Annotated[str, typer.Option(help="Threads, likewise; 'all' is every usable CPU.")] = "1,all",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every contestant runs.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout instead of a table.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the bar chart adam.png.")] = Path("out"),
) -> None:
    """Measure the CPU Adam against memory bandwidth and against other implementations."""
    from rich.console import Console

    console = Console(stderr=True)
    results, skipped = measure(sizes(n), thread_counts(threads), rounds, note=console.print)
    for reason in skipped:
        console.print(f"left out: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "adam.png"
    draw(results, picture)
    if as_json:
        print(json.dumps([result.as_json() for result in results], indent=2, allow_nan=False))
    else:
        Console().print(table(results))
        Console().print(f"chart: {picture}")


def measure(
    counts: list[int], threads: list[int], rounds: int, note: Callable[[str], None] = lambda _: None
) -> tuple[list[Result], list[str]]:
    """Runs every contestant at every size, thread count and job.

    Returns: the results, in the order contestants are made, and why others were left out.
    """
    results: list[Result] = []
    skipped: dict[str, None] = {}
    from offload.cli.bench_adam_peers import States

    for size in counts:
        states = States(size)
        for count in threads:
            for job in JOBS:
                note(f"{job}, n = {size:.0e}, {count} threads, {rounds} rounds")
                results.extend(_race(states, job, count, rounds, skipped))
    return results, list(skipped)


def _race(states: States, job: str, threads: int, rounds: int, skipped: dict[str, None]) -> Iterator[Result]:
    """One job: warm everybody up, then rounds in which all run, in another order each time."""
    from offload.cli.bench_adam_peers import LIMIT, contestants

    calls = contestants(states, job, threads, skipped)
    results = {name: Result(name, job, states.n, threads) for name in calls}
    repeats = max(1, _SAMPLE // states.n)
    order, shuffle = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            if repeats > 1:
                calls[name]()  # the cache as it leaves it itself; a large size leaves nothing behind
            start = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            results[name].seconds.append((time.perf_counter() - start) / repeats)
            if name.startswith(LIMIT):
                states.reset()
    limits = [name for name in calls if name.startswith(LIMIT)]
    if limits:
        # Each instruction set has its limit; the fastest is the machine's.
        best = min(limits, key=lambda name: statistics.median(results[name].seconds))
        for result in results.values():
            result.limits = results[best].seconds
        for name in limits:
            if name != best:
                del results[name]
        results[best].contestant = LIMIT
    yield from results.values()


def caption() -> str:
    """What the figures were measured on and with."""
    from offload import native

    name, flags = native.cpu_model()
    telling = [flag for flag in ("avx2", "avx512f", "avx512bw", "amx_tile", "asimd", "sve") if flag in flags]
    versions = [f"{package} {_version(package)}" for package in ("offload", "torch", "numba", "deepspeed")]
    shown = ", ".join(version for version in versions if not version.endswith(" none"))
    return f"{name} ({' '.join(telling)}), {native.usable_cpus()} usable CPUs; {shown}; Python {sys.version.split()[0]}"


def table(results: list[Result]) -> Table:
    """For people."""
    from rich.table import Table

    shown = Table(title="CPU Adam, one step", caption=caption())
    for column in ("job", "n", "threads", "contestant", "ns/param", "fastest-slowest", "GB/s", "x limit"):
        shown.add_column(column, justify="left" if column in ("job", "contestant") else "right")
    last = None
    for result in results:
        here = (result.job, result.n, result.threads)
        if last is not None and here != last:
            shown.add_section()
        shown.add_row(*_row(result))
        last = here
    return shown


def markdown(results: list[Result], skipped: list[str]) -> str:
    """For bench/results."""
    lines = [
        "# CPU Adam",
        "",
        caption() + ".",
        "",
        "`x limit`: median over the rounds of the time by that of the no-math limit in the same round.",
        "",
        "| job | n | threads | contestant | ns/param | fastest-slowest | GB/s | x limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(_row(result)) + " |" for result in results]
    lines += ["", *(f"Left out: {reason}." for reason in skipped)]
    return "\n".join(lines).rstrip() + "\n"


def _row(result: Result) -> tuple[str, ...]:
    ns, (low, high), ratio = result.ns_per_param, result.spread, result.x_limit
    return (
        result.job,
        f"{result.n:.0e}".replace("e+0", "e"),
        str(result.threads),
        result.contestant,
        f"{ns:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{BYTES_A_PARAMETER / ns:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
    )


def draw(results: list[Result], file: Path) -> None:
    """A bar a contestant, a panel for each job, size and thread count."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int, int], list[Result]] = {}
    for result in results:
        panels.setdefault((result.job, result.n, result.threads), []).append(result)
    tallest = max(len(panel) for panel in panels.values())
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(12, rows * (0.9 + 0.32 * tallest)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for index, ((job, n, threads), panel) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, min(2, len(panels)), index + 1)
        panel = sorted(panel, key=lambda result: result.ns_per_param, reverse=True)
        colors = [_color(result.contestant) for result in panel]
        bars = axes.barh([r.contestant for r in panel], [r.ns_per_param for r in panel], color=colors)
        axes.bar_label(bars, [_label(result) for result in panel], padding=3, fontsize=8)
        axes.set_title(f"{job}, n = {n:.0e}, {threads} thread{'s' * (threads > 1)}", fontsize=10)
        axes.set_xlabel("ns a parameter")
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption(), fontsize=8)
    figure.savefig(file)


def _label(result: Result) -> str:
    ratio = result.x_limit
    return f"{result.ns_per_param:.2f}" + ("" if ratio is None else f" ({ratio:.2f} x limit)")


def _color(contestant: str) -> str:
    if contestant == "limit":
        return "tab:gray"
    return "tab:blue" if contestant.startswith("offload") else "tab:orange"


def _whole_numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if any(number < 1 or not number.is_integer() for number in numbers):
        raise ConfigError(f"{option}={text!r}: give whole numbers from 1 on with commas between, such as 1e6,1e8")
    return [int(number) for number in numbers]


def sizes(text: str) -> list[int]:
    """ "1e6,1e8" as numbers of parameters. Raises: ConfigError."""
    return _whole_numbers(text, "--n")


def thread_counts(text: str) -> list[int]:
    """ "1,all" as numbers of threads, each once. Raises: ConfigError."""
    from offload import native

    counts = _whole_numbers(text.replace("all", str(native.usable_cpus())), "--threads")
    return list(dict.fromkeys(counts))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
