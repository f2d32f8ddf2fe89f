"""Run the benchmark of whole steps: `python bench/step.py [--save] [options of offload bench step]`.

With --save the table also goes to bench/results/step.md, with --commit-every to commits.md, and with --param-tier to
iterations.md there.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from offload.cli import bench_step, bench_step_commits, bench_step_report, bench_step_streaming
from offload.cli import bench_step_streaming_report as streaming_report
from offload.cli.bench_step_plots import draw
from offload.cli.bench_step_sheet import WIDTH

RESULTS = Path(__file__).parent / "results"


def main(
    n: str = "3e8",
    rounds: int = 5,
    path: Path = Path(),
    budgets: str = "0,0.25,0.5,0.75,1",
    split_master: bool = True,
    commit_every: int | None = None,
    param_tier: str | None = None,
    grad_tier: str = "cpu",
    tokens: str = "16,256,2048",
    out: Path = Path("out"),
    save: bool = False,
) -> None:
    """Measure, print the table, draw the picture."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=WIDTH)
    command = "python bench/step.py " + shlex.join(sys.argv[1:])
    if param_tier is not None:
        job = bench_step_streaming.job_of(bench_step.parameters(n), param_tier, grad_tier)
        bench_step_streaming.check_place(path, job)
        counts = bench_step.numbers_of_tokens(tokens)
        iterations = bench_step_streaming.measure(job, counts, path, rounds, Console(stderr=True))
        _show(console, streaming_report.table(iterations), streaming_report.shortfalls(iterations))
        if save:
            (RESULTS / "iterations.md").write_text(streaming_report.markdown(iterations, command))
        return
    budget_shares = bench_step.shares(budgets)
    cases = bench_step.cases_of(
        bench_step.parameters(n), budget_shares, split_master=split_master, commit_every=commit_every
    )
    if commit_every is not None:
        bench_step_commits.check_place(path, cases)
        commits = bench_step_commits.measure(cases, path, rounds, Console(stderr=True))
        _show(console, bench_step_commits.table(commits), bench_step_commits.shortfalls(commits))
        if save:
            (RESULTS / "commits.md").write_text(bench_step_commits.markdown(commits, command))
        return
    bench_step.check_place(path, cases)
    report = bench_step.measure(cases, path, rounds, Console(stderr=True))
    _show(console, bench_step_report.table(report), bench_step_report.shortfalls(report))
    out.mkdir(parents=True, exist_ok=True)
    draw(report, out / "step.png")
    if save:
        (RESULTS / "step.md").write_text(bench_step_report.markdown(report, command))


def _show(console: Console, table: Table, lines: Iterable[str]) -> None:
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
