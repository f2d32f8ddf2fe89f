"""Run the benchmark of whole steps: `python bench/step.py [--save] [options of offload bench step]`.

With --save the table also goes to bench/results/step.md.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import typer
from rich.console import Console

from offload.cli import bench_step, bench_step_report
from offload.cli.bench_step_plots import draw

RESULTS = Path(__file__).parent / "results" / "step.md"


def main(
    n: str = "3e8",
    rounds: int = 5,
    path: Path = Path(),
    budgets: str = "0,0.25,0.5,0.75,1",
    split_master: bool = True,
    out: Path = Path("out"),
    save: bool = False,
) -> None:
    """Measure, print the table, draw the picture."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=bench_step_report.WIDTH)
    cases = bench_step.cases_of(bench_step.parameters(n), bench_step.shares(budgets), split_master=split_master)
    bench_step.check_place(path, cases)
    report = bench_step.measure(cases, path, rounds, Console(stderr=True))
    console.print(bench_step_report.table(report))
    for line in bench_step_report.shortfalls(report):
        console.print(line, soft_wrap=True, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    draw(report, out / "step.png")
    if save:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(bench_step_report.markdown(report, "python bench/step.py " + shlex.join(sys.argv[1:])))


if __name__ == "__main__":
    typer.run(main)
