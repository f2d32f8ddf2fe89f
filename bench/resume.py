"""Resuming beside reading the same bytes once: `python bench/resume.py [--n 3e8] [--path DIR] [--save]`.

A run of n parameters in chunks of 16 MiB is committed on the NVMe tier. In every round the library's own engine reads
as many bytes once, as fast as it can, and then the run is resumed: with no share of the states in RAM, with half of
them, and with all. As much RAM as stays taken then is taken for the reading, too: the system clears it page by page,
and a virtual machine may have to get it from its host first, to which it gives back what has been free for seconds. So
both begin after as long a rest, and the ratio is to the larger of the two, for pages come while the drive reads. The
clock runs from the call of `OffloadZero(..., resume=True)` until it returns; building the model is not in it.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import Disk
from bench.report import Folder, Json, Report, Rounds, Save, Table, judged, note, ratio, run, scratch, spread
from bench.step import layers
from offload import OffloadZero, Tuning
from offload.devices.copies import HostCopier
from offload.planner import least_cpu_memory
from offload.sizes import PAGE_BYTES
from offload.storage.arena import Arena

WIDTH = 2048
CHUNK = 4 * WIDTH * WIDTH
SHARES = (0.0, 0.5, 1.0)
TARGET = 1.2
REST_S = 3.0


@dataclass
class Case:
    """Resuming with `share` of the states in RAM, of which `nbytes` stay taken; seconds of each round, and in the same
    round of reading and of taking as much RAM."""

    share: float
    nbytes: int = 0
    resume_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    take_s: list[float] = field(default_factory=list)

    @property
    def x_limit(self) -> float:
        return ratio(self.resume_s, [max(both) for both in zip(self.read_s, self.take_s, strict=True)])

    def row(self) -> tuple[str, ...]:
        return (
            f"{self.share:.0%} of the states in RAM",
            f"{statistics.median(self.resume_s):.3f} s",
            spread(self.resume_s),
            f"{statistics.median(self.read_s):.3f} s",
            f"{statistics.median(self.take_s):.3f} s",
            f"{self.x_limit:.3f}",
            f"{ratio(self.resume_s, self.read_s):.3f}",
        )


def take(nbytes: int) -> float:
    """Seconds until there is so much RAM."""
    time.sleep(REST_S)
    start = time.perf_counter()
    arena = Arena(nbytes, HostCopier())
    seconds = time.perf_counter() - start
    arena.close()
    return seconds


def resume(folder: Path, count: int, share: float) -> tuple[float, int]:
    """Seconds of a resume with `share` of the states in RAM, and bytes of RAM that stay taken."""
    model = layers(count, WIDTH)
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


def commit(folder: Path, count: int) -> None:
    """A run that has committed a step."""
    model = layers(count, WIDTH)
    with OffloadZero(model, path=folder, cpu_memory="1GiB", commit_every=0, tuning=Tuning(chunk=CHUNK)) as optimizer:
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
        optimizer.commit()


def main(
    n: Annotated[str, typer.Option(help="Parameters.")] = "3e8",
    rounds: Rounds = 5,
    path: Folder = Path(),
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, print the table."""
    count = max(round(float(n) / WIDTH**2), 1)
    cases = [Case(share) for share in SHARES]
    with scratch(path) as folder, closing(Disk(folder, count, 3 * CHUNK + PAGE_BYTES)) as disk:
        commit(folder / "run", count)
        disk.search()
        for number in range(-1, rounds):  # the first one warms up
            note(f"round {number + 1} of {rounds}")
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                read_s, take_s = disk.run(ways=("read",)), take(case.nbytes)
                seconds, case.nbytes = resume(folder / "run", count, case.share)
                if number >= 0:
                    case.take_s.append((take_s + take(case.nbytes)) / 2)
                    case.read_s.append((read_s + disk.run(ways=("read",))) / 2)
                    case.resume_s.append(seconds)
        setup = disk.setup
    headings = ("resumed with", "seconds", "spread", "reading once", "RAM for it", "x limit", "x reading alone")
    Report(
        name="resume",
        title="Resuming",
        about=" ".join((__doc__ or "").split("\n\n")[1].split()),
        tables=[Table(headings, [case.row() for case in cases], f"{count * WIDTH**2:,} parameters in {count} chunks")],
        data={"runs": [{"share": case.share, "x_limit": case.x_limit, "rounds_s": case.resume_s} for case in cases]},
        remarks=[judged(f"x limit, {case.share:.0%} in RAM", case.x_limit, TARGET) for case in cases],
        setup=setup,
    ).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
