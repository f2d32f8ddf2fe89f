"""`offload bench io`: what a drive gives, with which engine, request size and depth, and what that means for training.

In the order of the work: a look at the path (bench_io_place.py), a sweep over our engines and a race of the best of
them against others (bench_io_field.py, bench_io_contestants.py, bench_io_race.py), and what came out, for people, for
machines, and for the cache that `io_engine="auto"` uses (bench_io_report.py, bench_io_plots.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import ConfigError, PathError
from offload.sizes import MIB, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from offload.cli.bench_io_field import Field
    from offload.cli.bench_io_place import Place, Plan
    from offload.cli.bench_io_race import Family
    from offload.cli.bench_io_report import Result

MEMORY_BYTES = 64 * MIB
"""What our engines work in: more than a CPU's cache keeps of it, as in training."""

QUICK_BYTES = 128 * MIB

Peers = Callable[["Place"], "Sequence[Family]"]
"""More references than those of this package, for bench/io.py."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. `limited`: on a slow drive, fewer bytes than the file has."""

    rounds: int
    quick: bool
    limited: bool


def io(
    paths: Annotated[list[Path], typer.Argument(help="Directories on the drives to measure.")],
    size: Annotated[str | None, typer.Option(help="Bytes of the file measured; by default 1GiB or what fits.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the race against the references.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller file and fewer settings: some seconds.")] = False,
    tbw: Annotated[str, typer.Option(help="What the drive's maker says can be written to it.")] = "600TB",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the heat map and the bar chart.")] = Path("out"),
) -> None:
    """Measure drives against others' best, and remember the best settings for io_engine="auto"."""
    from rich.console import Console

    from offload.cli import bench_io_report as report
    from offload.cli.bench_io_plots import draw_all

    console = Console(stderr=True)
    life = parse_bytes(tbw, "--tbw")
    if not life:
        raise ConfigError("--tbw=0 is no drive's life: give bytes, such as 600TB")
    plans = checked(paths, size, quick)
    results = [measure(plan, Effort(rounds, quick, size is None), console) for plan in plans]
    for result in results:
        report.remember_settings(result, console)
    pictures = draw_all(results, out)
    if as_json:
        values = [report.as_json(result) for result in results]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2, allow_nan=False))
        return
    shown = Console()
    for result in results:
        for table in report.tables(result):
            shown.print(table)
        report.say(shown, *report.meaning(result, life))
    report.say(shown, *(f"picture: {picture}" for picture in pictures))


def checked(paths: Sequence[Path], size: str | None, quick: bool) -> list[Plan]:
    """Looks at every path before anything is written to any. Raises: ConfigError, PathError, BudgetError."""
    from offload.cli.bench_io_place import check

    wanted = None if size is None else parse_bytes(size, "--size")
    plans = [check(path, wanted) for path in paths]
    if not quick or wanted is not None:
        return plans
    return [check(plan.path, min(plan.size, QUICK_BYTES)) for plan in plans]


def measure(plan: Plan, effort: Effort, console: Console, peers: Peers | None = None) -> Result:
    """One path. Raises: PathError, TierIOError, ConfigError where no engine works."""
    from offload.cli.bench_io_field import FULL, QUICK, Field
    from offload.cli.bench_io_place import folder, opened
    from offload.cli.bench_io_report import say
    from offload.devices.copies import HostCopier
    from offload.storage.arena import Arena

    say(console, *(f"warning: {warning}" for warning in plan.warnings))
    arena = Arena(MEMORY_BYTES, HostCopier())
    try:
        # A drive or file system that compresses would be faster with other bytes.
        arena.memory[:] = os.urandom(len(arena.memory))
        with opened(plan) as place, folder(plan.path) as named:
            if not place.direct:
                say(console, f"{plan.path}: no O_DIRECT on this file system: everything goes through the page cache")
            field = Field(place, named / "file", arena.memory, QUICK if effort.quick else FULL)
            return _measured(plan, field, effort, console, peers(place) if peers else ())
    except OSError as error:
        if isinstance(error, PathError) or error.errno is None:
            raise
        raise PathError(error.errno, f"measuring ended early: {error.strerror}", str(plan.path)) from error
    finally:
        arena.close()


def _measured(plan: Plan, field: Field, effort: Effort, console: Console, peers: Sequence[Family]) -> Result:
    from offload.cli.bench_io_place import PART_BYTES
    from offload.cli.bench_io_progress import progress
    from offload.cli.bench_io_race import race, recommended, search_steps, sweep
    from offload.cli.bench_io_report import Result

    points, left_out = field.points()
    references, missing = field.families()
    families = [*references, *peers]
    left_out += missing
    sweeps = field.grid.rounds
    steps = sweeps * len(points) + search_steps(families) + effort.rounds * (1 + len(families))
    with progress(console, str(plan.path), steps) as tick:
        nbytes = field.lay_out(effort.limited)
        left_out += sweep(points, field.ours, sweeps, min(nbytes, PART_BYTES), tick)
        alive = [point for point in points if all(point.speeds.values())]
        if not alive:
            raise ConfigError(f"{plan.path}: no engine works here: {'; '.join(left_out)}")
        best = recommended(alive)
        outcome = race(lambda most: field.ours(best, most), families, best, effort.rounds, nbytes, tick)
    return Result(plan, field.place.direct, nbytes, alive, outcome, [*left_out, *outcome.left_out])
