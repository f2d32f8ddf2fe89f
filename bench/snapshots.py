"""What a snapshot that is copied to shared storage costs training meanwhile: `python bench/snapshots.py [--save]`.

A GPT trains with its optimizer states on NVMe, none of them kept in RAM. In each round it makes some iterations alone,
commits, makes a snapshot whose copy goes to another folder, and trains on until the copy is whole. What these
iterations took beyond those alone is compared with the seconds that the disk takes for the copy's bytes and nothing
else: its share of the bandwidth. Here the shared storage is a folder of the same disk, which has to read and write each
byte of the copy; with a file server the disk only reads it.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import LR, SEED, parameters
from bench.hiding import STATE_BYTES, shape_of
from bench.limits import Disk
from bench.report import Folder, Json, Report, Rounds, Save, Table, judged, note, run, scratch, spread
from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, PRESETS
from offload.demo.text import Batches, load_text
from offload.planner import least_cpu_memory

CHUNK_BYTES = 16 << 20
WARM_UP = 2
TARGET = 1.0
"""Seconds that training loses, by the disk's seconds for the copy: all of its share of the bandwidth."""
HEADINGS = (
    "tokens",
    "alone",
    "beside",
    "spread",
    "x alone",
    "iterations",
    "copy GB",
    "copy s",
    "lost s",
    "disk s",
    "x share",
)
ABOUT = """\
**alone, beside**: seconds of an iteration without and beside the copy, medians, and the spread of the rounds beside
it; **iterations**: that a copy lasts; **copy GB, copy s**: its bytes, and how long it was under way; **lost s**: what
the iterations beside a copy took beyond as many alone; **disk s**: what the disk alone takes to read and write the
copy's bytes; **x share**: lost by disk, the median of the rounds. At most 1: training loses no more than the copy's
share of the bandwidth; less where the disk had time left."""


@dataclass(frozen=True)
class Round:
    """Attributes: alone_s, beside_s: of an iteration; iterations: beside the copy; copied_bytes; copy_s: how long the
    copy was under way; disk_s: of the disk alone for its bytes."""

    alone_s: float
    beside_s: float
    iterations: int
    copied_bytes: float
    copy_s: float
    disk_s: float

    @property
    def lost_s(self) -> float:
        return self.iterations * (self.beside_s - self.alone_s)

    @property
    def share(self) -> float:
        return self.lost_s / self.disk_s


class Run:
    """A training run. Args: folder: of its swap file."""

    def __init__(self, preset: str, folder: Path) -> None:
        self.config = PRESETS[preset]
        self._text = load_text(None, self.config.context).train
        self._batches: dict[tuple[int, int], Batches] = {}
        self._model = GPT(self.config, SEED)
        adamw = torch.optim.AdamW(self._model.parameters(), lr=LR)
        tuning = Tuning(chunk=CHUNK_BYTES, speculate=False)
        places: dict[str, Any] = {"tuning": tuning, "commit_every": 0}
        least = least_cpu_memory(self._model, adamw, **places)
        self.optimizer = OffloadZero(
            self._model, adamw, tier="nvme", path=folder, cpu_memory=least + 3 * CHUNK_BYTES + (64 << 10), **places
        )

    def iterate(self, shape: tuple[int, int]) -> None:
        if shape not in self._batches:
            self._batches[shape] = Batches(self._text, *shape, SEED, torch.device("cpu"))
        loss: Tensor = self._model(*self._batches[shape]())[1]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, shape: tuple[int, int], steps: int) -> float:
        """Seconds of an iteration; one before these is not timed, as its step leaves work to the first."""
        self.iterate(shape)
        start = time.perf_counter()
        for _ in range(steps):
            self.iterate(shape)
        return (time.perf_counter() - start) / steps


def one_round(training: Run, disk: Disk, shape: tuple[int, int], steps: int, shared: Path) -> Round:
    before_s = disk.run()
    first_s = training.timed(shape, steps)
    optimizer = training.optimizer
    optimizer.commit()
    training.iterate(shape)  # what a commit leaves to do is not the copy's
    copied = optimizer.stats()["snapshot_copied_bytes"]
    optimizer.snapshot(keep=1, path=shared)
    start, iterations = time.perf_counter(), 0
    while optimizer.stats()["snapshot_left_bytes"]:
        training.iterate(shape)
        iterations += 1
    copy_s = time.perf_counter() - start
    copied_bytes = optimizer.stats()["snapshot_copied_bytes"] - copied
    alone_s = statistics.mean([first_s, training.timed(shape, steps)])
    disk_s = statistics.mean([before_s, disk.run()])
    return Round(
        alone_s, copy_s / iterations, iterations, copied_bytes, copy_s, disk.seconds_for(2 * copied_bytes, disk_s)
    )


def row(tokens: int, rounds: list[Round]) -> list[str]:
    def of(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in rounds))

    beside = [one.beside_s for one in rounds]
    return [
        f"{tokens:,}",
        f"{of('alone_s'):.3f}",
        f"{of('beside_s'):.3f}",
        spread(beside),
        f"{statistics.median(one.beside_s / one.alone_s for one in rounds):.3f}",
        f"{of('iterations'):.0f}",
        f"{of('copied_bytes') / 1e9:.2f}",
        f"{of('copy_s'):.2f}",
        f"{of('lost_s'):.2f}",
        f"{of('disk_s'):.2f}",
        f"{of('share'):.3f}",
    ]


def main(
    preset: Annotated[str, typer.Option(help=f"A GPT's size: {', '.join(PRESETS)}.")] = "125m",
    tokens: Annotated[str, typer.Option(help="Tokens of an iteration, with commas.")] = "16,1024",
    rounds: Rounds = 3,
    steps: Annotated[int, typer.Option(min=1, help="Iterations alone, before the copy and after it.")] = 4,
    path: Folder = Path(),
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, print the table."""
    count = parameters(PRESETS[preset])
    found: dict[int, list[Round]] = {}
    slot_bytes = 3 * CHUNK_BYTES
    with scratch(path) as folder:
        for name in ("run", "shared"):
            (folder / name).mkdir(mode=0o700)
        training = Run(preset, folder / "run")
        with training.optimizer, closing(Disk(folder, max(1, STATE_BYTES * count // slot_bytes), slot_bytes)) as disk:
            disk.search()
            for shape in (shape_of(int(word)) for word in tokens.split(",")):
                done = shape[0] * shape[1]
                note(f"{done:,} tokens")
                for _ in range(WARM_UP):
                    training.iterate(shape)
                found[done] = [one_round(training, disk, shape, steps, folder / "shared") for _ in range(rounds)]
            setup = disk.setup
    table = Table(HEADINGS, [row(done, of) for done, of in found.items()])
    remarks = [
        judged(f"x share, {done:,} tokens", statistics.median(one.share for one in of), TARGET)
        for done, of in found.items()
    ]
    Report(
        name="snapshots",
        title="Copying a snapshot beside training",
        about=f"{count:,} parameters, optimizer states on NVMe.\n{ABOUT}",
        tables=[table],
        data={"parameters": count, "runs": {str(done): [asdict(one) for one in of] for done, of in found.items()}},
        remarks=remarks,
        setup=setup,
    ).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
