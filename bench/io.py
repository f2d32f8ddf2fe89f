"""The I/O engines beside fio and DeepSpeed: `python bench/io.py PATH... [--deepspeed PYTHON] [--save]`.

What `offload bench io` measures, with more references: fio, where it is installed, and DeepSpeed's async I/O, where
PYTHON is an interpreter that has it (`make bench-peers` makes one). All use buffers of 64 MiB on huge pages, in turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.report import Json, Out, Report, Rounds, Save, Table, run
from offload.cli.console import plain_console
from offload.cli.io_speed import (
    HEADINGS,
    HUGE_PAGES,
    MEMORY_BYTES,
    OPERATIONS,
    Contestant,
    LeftOutError,
    Result,
    Speeds,
    measure_all,
)
from offload.cli.plots import new_figure
from offload.sizes import KIB, MIB

CHILD = Path(__file__).with_name("deepspeed_aio.py")
FIO_TIMEOUT_S = 300
FIO_REQUESTS = (MIB, 2 * MIB, 4 * MIB)
"""With as many under way as fill the buffer."""
AIO_REQUESTS = ((MIB, 32), (4 * MIB, 8), (512 * KIB, 32))


@dataclass(frozen=True, eq=False)
class Fio(Contestant):
    """fio, the disk benchmark. The time is that of its own clock, without starting it."""

    def run(self, operation: str, nbytes: int) -> float:
        engine = self.name.removeprefix("fio ")
        words = [
            "fio", "--name=bench", f"--filename={self.file}", "--output-format=json", f"--ioengine={engine}",
            f"--bs={self.request_bytes}", f"--iodepth={self.depth}", "--direct=1", "--thread", "--invalidate=0",
            "--fallocate=none", "--allow_file_create=0", f"--size={nbytes}",
            f"--rw={'rw' if operation == 'mixed' else operation}",
        ]  # fmt: skip
        words += ["--fixedbufs=1", "--registerfiles=1"] if engine == "io_uring" else []
        pipes = {"capture_output": True, "text": True, "check": True, "timeout": FIO_TIMEOUT_S}
        try:
            done = subprocess.run(words, env=os.environ | HUGE_PAGES, **pipes)  # type: ignore[call-overload]
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            moved = sum(job[direction]["io_bytes"] for direction in ("read", "write"))
            milliseconds = max(job[direction]["runtime"] for direction in ("read", "write"))
            return float(max(milliseconds, 1) / 1000 * nbytes / moved)
        except (subprocess.SubprocessError, ValueError, LookupError, ArithmeticError) as error:
            raise LeftOutError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class DeepSpeed(Contestant):
    """DeepSpeed's aio_handle, in a process of its own, with a handle for each direction."""

    child: subprocess.Popen[str]
    threads: int

    @property
    def settings(self) -> str:
        return f"{super().settings}, {self.threads} threads"

    def run(self, operation: str, nbytes: int) -> float:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        orders = [str(self.file), operation, nbytes, self.request_bytes, self.depth, self.threads]
        print(json.dumps(orders), file=self.child.stdin, flush=True)
        answer = self.child.stdout.readline()
        seconds = json.loads(answer) if answer else "its process ended"
        if isinstance(seconds, str):
            raise LeftOutError(seconds)
        return float(seconds)


@contextlib.contextmanager
def child_of(python: str | None) -> Iterator[subprocess.Popen[str] | None]:
    """The process that has DeepSpeed, ready; None without. Building its extension takes minutes the first time.

    Raises: RuntimeError if it cannot be built.
    """
    if python is None:
        yield None
        return
    command, pipe = [python, str(CHILD)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | HUGE_PAGES) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{python} has no DeepSpeed with async I/O; it says why above")
            yield child
        finally:
            child.kill()


def peers(child: subprocess.Popen[str] | None, file: Path, memory: memoryview) -> list[Contestant]:
    found: list[Contestant] = []
    if shutil.which("fio"):
        found += [
            Fio(f"fio {engine}", file, memory, request, MEMORY_BYTES // request)
            for engine in ("io_uring", "libaio")
            for request in FIO_REQUESTS
        ]
    if child is not None:
        found += [
            DeepSpeed("DeepSpeed async I/O", file, memory, *pair, child, threads)
            for pair in AIO_REQUESTS
            for threads in (1, 2)
        ]
    return found


def draw(result: Result, file: Path) -> None:
    """GB/s of the sweep by request size: a panel for each operation, a line for each engine and depth."""
    lines: dict[str, list[Speeds]] = {}
    for one in sorted(result.sweep, key=lambda one: one.contestant.request_bytes):
        lines.setdefault(f"{one.contestant.name}, depth {one.contestant.depth}", []).append(one)
    figure = new_figure(15, 6)
    for axes, operation in zip(figure.subplots(1, len(OPERATIONS)), OPERATIONS, strict=True):
        for name, line in lines.items():
            requests = [one.contestant.request_bytes / MIB for one in line]
            axes.plot(requests, [one.speed(operation) for one in line], "o-", label=name)
        axes.set(title=f"{operation}, {result.file_system}", xlabel="request (MiB)", ylabel="GB/s")
        axes.set_ylim(bottom=0)  # so that drift looks as small as it is
    axes.legend(fontsize=8)
    figure.savefig(file)


def main(
    paths: list[Path],
    size: Annotated[str | None, typer.Option(help="Bytes of the file measured; by default 1GiB or what fits.")] = None,
    rounds: Rounds = 9,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller file and fewer settings.")] = False,
    deepspeed: Annotated[str | None, typer.Option(help="A Python that has DeepSpeed.")] = None,
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure, print the tables, draw the speeds."""
    with child_of(deepspeed) as child:
        results = measure_all(
            paths, size, rounds, quick=quick, console=plain_console(stderr=True), peers=partial(peers, child)
        )
    Report(
        name="io",
        title="I/O",
        about="The race of the best settings of each engine and reference, found in a sweep of all; all in buffers of "
        '64 MiB on huge pages, in turns. `x`: the speed of the chosen engine, which `io_engine="auto"` will use, '
        "by that of the line: the median of the rounds' ratios.",
        tables=[Table(HEADINGS, list(result.rows()), result.title) for result in results],
        data={"drives": [result.as_json() for result in results]},
        remarks=[remark for result in results for remark in result.remarks()],
        pictures={f"io-{number + 1}.png": partial(draw, one) for number, one in enumerate(results)},
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
