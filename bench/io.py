"""Run the I/O benchmark: `python bench/io.py PATH... [--save] [--deepspeed PYTHON] [options of offload bench io]`.

With --save the tables also go to bench/results/io.md. With --deepspeed, DeepSpeed's async I/O is one more reference:
PYTHON is an interpreter that has it (`make bench-peers` makes one).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offload.cli import bench_io, bench_io_report
from offload.cli.bench_io_contestants import HUGE_PAGES, Contestant, LeftOutError, size_label
from offload.cli.bench_io_place import Place
from offload.cli.bench_io_plots import draw_all
from offload.cli.bench_io_race import Family
from offload.sizes import KIB, MIB, parse_bytes

RESULTS = Path(__file__).parent / "results" / "io.md"
CHILD = Path(__file__).with_name("deepspeed_aio.py")

# block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, bytes a call
SETTINGS = (
    (MIB, 32, True, True, 1, 256 * MIB),
    (MIB, 32, False, True, 1, 256 * MIB),
    (MIB, 32, True, False, 1, 256 * MIB),
    (MIB, 16, True, True, 2, 256 * MIB),
    (4 * MIB, 8, True, True, 1, 256 * MIB),
    (4 * MIB, 8, True, True, 2, 64 * MIB),
    (512 * KIB, 32, True, True, 1, 256 * MIB),
)


Child = subprocess.Popen[str]


class DeepSpeed(Contestant):
    """Its aio_handle, in a process of its own, with a handle for each direction."""

    def __init__(self, name: str, place: Place, child: Child, settings: tuple[int, int, bool, bool, int, int]) -> None:
        self.name = name
        block, depth, single, overlap, threads, call = settings
        words = [word for word, on in (("single", single), ("overlap", overlap)) if on]
        self.settings = ", ".join([f"{size_label(block)} x {depth}", *words, f"{threads} threads"])
        self.buffer_bytes = call
        self._place, self._child, self._handle = place, child, settings

    def run(self, operation: str, nbytes: int) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps([self._place.name, operation, nbytes, *self._handle]), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise LeftOutError("its process ended")
        seconds = json.loads(answer)
        if isinstance(seconds, str):
            raise LeftOutError(seconds)
        return float(seconds)


@contextlib.contextmanager
def child_of(python: str | None) -> Iterator[tuple[str, Child] | None]:
    """DeepSpeed's version and the process that has it, ready; None without.

    Building its extension takes minutes the first time.

    Raises: RuntimeError if it cannot be built.
    """
    if python is None:
        yield None
        return
    command = [python, str(CHILD)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | HUGE_PAGES
    ) as child:
        try:
            assert child.stdout is not None
            word, _, version = child.stdout.readline().strip().partition(" ")
            if word != "ready":
                raise RuntimeError(f"{python} has no DeepSpeed with async I/O; its words are above")
            yield version, child
        finally:
            child.kill()


def main(
    paths: list[Path],
    size: str | None = None,
    rounds: int = 9,
    quick: bool = False,
    tbw: str = "600TB",
    out: Path = Path("out"),
    save: bool = False,
    deepspeed: Annotated[str | None, typer.Option(help="A Python that has DeepSpeed.")] = None,
) -> None:
    """Measure, print the tables, draw the pictures."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, life = Console(), parse_bytes(tbw, "--tbw")
    plans = bench_io.checked(paths, size, quick)
    with child_of(deepspeed) as found:

        def peers(place: Place) -> list[Family]:
            if found is None:
                return []
            version, child = found
            name = f"DeepSpeed {version} async I/O"
            return [Family(name, [DeepSpeed(name, place, child, one) for one in SETTINGS])]

        effort = bench_io.Effort(rounds, quick, limited=size is None)
        results = [bench_io.measure(plan, effort, console, peers) for plan in plans]
    draw_all(results, out)
    for result in results:
        for table in bench_io_report.tables(result):
            console.print(table)
        bench_io_report.say(console, *bench_io_report.meaning(result, life))
    if save:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        command = "python bench/io.py " + shlex.join(sys.argv[1:])
        RESULTS.write_text(bench_io_report.markdown(results, command, life))


if __name__ == "__main__":
    typer.run(main)
