"""Resuming against reading the same bytes once: `python bench/resume.py [--n 3e8] [--rounds 5] [--path DIR] [--save]`.

A run of n parameters in chunks of 16 MiB is committed on the NVMe tier. In every round its slots are read once,
through the library's own engine with the number of buffers that is fastest, and then it is resumed: with no share of
the states in RAM, with half of them, and with all. As much RAM as stays taken then (states, buffers, 16-bit
parameters) is taken for the reading, too: the system clears it page by page, and a virtual machine may have to get it
from its host first, to which it gives back what has been free for some seconds: so both begin after as long a rest,
and the ratio is to the larger of the two, for pages come while the drive reads. The clock runs from the call of
`OffloadZero(..., resume=True)` until it returns, with the 16-bit parameters in the model; building the model is not
in it.
"""

from __future__ import annotations

import gc
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from rich.console import Console

from bench.contest import Grid, hardware
from offload import OffloadZero, Tuning
from offload.checkpoint.manifest import Slot, committed_slots
from offload.checkpoint.reader import Reader
from offload.cli.bench_step_contestants import layers
from offload.devices.copies import HostCopier
from offload.io.engine import IOFuture
from offload.io.select import open_engine
from offload.planner import least_cpu_memory
from offload.sizes import format_bytes
from offload.storage.arena import Arena
from offload.storage.files import SWAP_NAME

RESULTS = Path(__file__).parent / "results" / "resume.md"
WIDTH = 2048
CHUNK = 4 * WIDTH * WIDTH
BUFFERS = (2, 4, 8, 16)
TARGET = 1.2
REST_S = 3.0


class Drive:
    """The committed slots, read through the library's engine into buffers that are used in turn."""

    def __init__(self, folder: Path, slots: list[Slot]) -> None:
        self._slots = slots
        self._engine = open_engine("auto", [folder])
        self.engine = self._engine.name
        self._file = self._engine.open(str(folder / SWAP_NAME))
        self._size = max(slot.size for slot in slots)
        # As the library's own: on huge pages, into which a drive reads faster.
        self._memory = Arena(self._size * max(BUFFERS), HostCopier())
        view = self._memory.memory
        self._engine.register(view)
        self._buffers = [view[at : at + self._size] for at in range(0, self._size * max(BUFFERS), self._size)]
        self.buffers = BUFFERS[0]

    def read(self, buffers: int | None = None) -> float:
        """Seconds."""
        start = time.perf_counter()
        under_way: deque[IOFuture] = deque()
        count = buffers or self.buffers
        for number, slot in enumerate(self._slots):
            if len(under_way) == count:
                under_way.popleft().result()
            buffer = self._buffers[number % count][: slot.size]
            under_way.append(self._engine.read(self._file, slot.offset, buffer))
        for future in under_way:
            future.result()
        return time.perf_counter() - start

    def search(self, rounds: int = 2) -> None:
        """Finds the number of buffers that is fastest."""
        seconds = {count: sum(self.read(count) for _ in range(rounds)) for count in BUFFERS}
        self.buffers = min(seconds, key=lambda count: seconds[count])

    def close(self) -> None:
        self._engine.close()
        self._buffers.clear()
        self._memory.close()


def take(nbytes: int) -> float:
    """Seconds until there is so much RAM."""
    time.sleep(REST_S)
    start = time.perf_counter()
    arena = Arena(nbytes, HostCopier())
    seconds = time.perf_counter() - start
    arena.close()
    return seconds


@dataclass
class Case:
    """What is measured beside reading. resume: returns seconds, and the bytes of RAM that stay taken, nbytes;
    seconds: of each round, and in the same of reading and of taking RAM for it."""

    name: str
    resume: Callable[[], tuple[float, int]]
    nbytes: int = 0
    seconds: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    taking: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """To the larger of both, for they overlap: the median of the rounds' ratios."""
        rounds = zip(self.seconds, self.reading, self.taking, strict=True)
        return statistics.median(own / max(read, taken) for own, read, taken in rounds)

    @property
    def of_reading(self) -> float:
        """The same of reading alone, into memory that is there."""
        return statistics.median(own / read for own, read in zip(self.seconds, self.reading, strict=True))

    def row(self) -> tuple[str, ...]:
        own = sorted(self.seconds)
        return (
            self.name,
            f"{statistics.median(own):.3f} s",
            f"{own[0]:.3f}-{own[-1]:.3f}",
            f"{statistics.median(self.reading):.3f} s",
            f"{statistics.median(self.taking):.3f} s",
            f"{self.ratio:.3f}",
            f"{self.of_reading:.3f}",
        )


def resume(folder: Path, count: int, share: float) -> tuple[float, int]:
    """Seconds of a resume with `share` of the states in RAM, and bytes of RAM that stay taken."""
    model = layers(count, WIDTH, "cpu")
    tuning = Tuning(chunk=CHUNK)
    memory = least_cpu_memory(model, tuning=tuning, commit_every=0) + int(share * 12.01 * count * WIDTH * WIDTH)
    gc.collect()
    time.sleep(REST_S)
    start = time.perf_counter()
    optimizer = OffloadZero(model, path=folder, cpu_memory=memory, commit_every=0, resume=True, tuning=tuning)
    seconds = time.perf_counter() - start
    nbytes = optimizer.stats()["peak_cpu_bytes"] + sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer.close()
    del optimizer, model
    gc.collect()
    return seconds, nbytes


def commit(folder: Path, count: int) -> list[Slot]:
    """A run that has committed a step; its slots."""
    model = layers(count, WIDTH, "cpu")
    with OffloadZero(model, path=folder, cpu_memory="1GiB", commit_every=0, tuning=Tuning(chunk=CHUNK)) as optimizer:
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
        optimizer.commit()
    with Reader([folder]) as reader:
        return committed_slots(reader.manifests[0])


def main(n: str = "3e8", rounds: int = 5, path: Path = Path(), save: bool = False) -> None:
    """Measure, print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=120)
    count = max(round(float(n) / WIDTH**2), 1)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=path))
    try:
        run = folder / "run"
        slots = commit(run, count)
        drive = Drive(run, slots)
        drive.search()
        cases = [
            Case(
                f"{share:.0%} of the states in RAM",
                lambda share=share: resume(run, count, share),  # type: ignore[misc]
            )
            for share in (0.0, 0.5, 1.0)
        ]
        for number in range(-1, rounds):  # the first one warms up
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                reading, taking = drive.read(), take(case.nbytes)
                seconds, case.nbytes = case.resume()
                if number >= 0:
                    case.taking.append((taking + take(case.nbytes)) / 2)
                    case.reading.append((reading + drive.read()) / 2)
                    case.seconds.append(seconds)
        drive.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grid = Grid(
        ("resumed with", "seconds", "fastest-slowest", "reading once", "RAM for it", "ratio", "of reading alone"),
        [case.row() for case in cases],
    )
    nbytes = sum(slot.size for slot in slots)
    title = f"{count * WIDTH**2:,} parameters, {format_bytes(nbytes)} in {count} chunks; {rounds} rounds"
    grid.show(console, title)
    worst = max(case.ratio for case in cases)
    verdict = f"wanted: at most {TARGET}; {'met' if worst <= TARGET else f'missed by {worst - TARGET:.3f}'}"
    console.print(verdict)
    if save:
        command = "python bench/resume.py " + shlex.join(sys.argv[1:])
        lines = ["# Resuming", "", f"{hardware()}; {drive.engine}, {drive.buffers} buffers.", "", f"`{command}`", ""]
        doc = " ".join((__doc__ or "").split("\n\n")[1].split())
        RESULTS.write_text("\n".join([*lines, doc, "", f"{title}.", "", *grid.markdown(), "", verdict, ""]))


if __name__ == "__main__":
    typer.run(main)
