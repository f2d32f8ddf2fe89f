"""Run the CPU Adam benchmark: `python bench/adam.py [--save] [options of offload bench adam]`.

With --save the table also goes to bench/results/adam.md.
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from offload.cli import bench_adam

RESULTS = Path(__file__).parent / "results" / "adam.md"


def main(
    n: str = "1e8",
    threads: str = "1,all",
    rounds: int = 9,
    out: Path = Path("out"),
    save: bool = False,
) -> None:
    """Measure, print the table, draw the chart."""
    console = Console()
    results, skipped = bench_adam.measure(bench_adam.sizes(n), bench_adam.thread_counts(threads), rounds, console.print)
    console.print(bench_adam.table(results))
    out.mkdir(parents=True, exist_ok=True)
    bench_adam.draw(results, out / "adam.png")
    if save:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(bench_adam.markdown(results, skipped))


if __name__ == "__main__":
    typer.run(main)
