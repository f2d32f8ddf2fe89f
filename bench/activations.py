"""What it costs to let activations wait elsewhere: `python bench/activations.py [--preset 20m] [--save]`.

Forward and backward of a GPT, whose activations stay, are recomputed, or wait in RAM or in files; all in one process,
in turns. Optimizer states are in RAM and never stepped. With files, a quarter of what waits has room in RAM. The limit
of files is the larger of two parts, each measured alone: the same computation with what waits left where it is, and the
bytes that were moved through the library's own I/O engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import Disk
from bench.report import Folder, Json, Out, Report, Rounds, Save, Table, judged, note, ratio, run, scratch, spread
from offload import OffloadZero, Tuning
from offload.cli.timeline_plot import timeline_picture
from offload.demo.gpt import GPT, PRESETS, VOCABULARY, GPTConfig
from offload.sizes import MIB, format_bytes

ROOM = 4
"""Of what waits, one part in so many has room in RAM, beside files."""
TRANSFER_BYTES = 4 * MIB
TARGET = 1.05
"""Of the limit, with files."""
COMPUTES = {
    "in RAM": "recomputed",
    "in files": "recomputed",
    "all saved, in RAM": "as it is",
    "all saved, in files": "as it is",
}
"""Whose computation each contestant does."""
HEADINGS = ("activations", "seconds", "spread", "x as it is", "moved", "x limit")
ABOUT = """\
**moved**: bytes written and read; **x as it is**: against activations that stay; **x limit**: against the larger of the
same computation with what waits left where it is, and the bytes moved alone. Seconds, medians."""


@dataclass
class Contestant:
    """A model of its own. Attributes: seconds: time of each forward and backward; moved: bytes that it moved on the
    disk."""

    model: GPT
    optimizer: OffloadZero
    seconds: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    @property
    def _moved(self) -> int:
        stats = self.optimizer.stats()
        return int(stats["activation_read_bytes"] + stats["activation_written_bytes"])

    def run(self, tokens: torch.Tensor) -> None:
        loss = self.model(tokens, tokens)[1]
        loss.backward()
        self.optimizer.zero_grad()

    def measure(self, tokens: torch.Tensor) -> None:
        before, begun = self._moved, time.perf_counter()
        self.run(tokens)
        self.seconds.append(time.perf_counter() - begun)
        self.moved.append(self._moved - before)


@dataclass(frozen=True)
class Run:
    """What every contestant computes: forward and backward of a GPT of `config` with `tokens`, in `dtype`. Files lie in
    `folder`."""

    config: GPTConfig
    tokens: torch.Tensor
    dtype: torch.dtype
    folder: Path

    @contextmanager
    def held(self, name: str, **options: Any) -> Iterator[Contestant]:
        """A contestant, warmed up. Args: name: of its folder; options: of OffloadZero."""
        model = GPT(self.config)
        if options.get("activation_tier") == "nvme":
            options |= {"path": self.folder / name, "commit_every": 0}
        with OffloadZero(model, tier="cpu", compute_dtype=self.dtype, **options) as optimizer:
            one = Contestant(model, optimizer)
            one.run(self.tokens)
            yield one

    def needed_bytes(self, tuning: Tuning) -> int:
        """The most bytes that wait at once, measured."""
        with self.held("measured", activation_tier="nvme", activation_memory="256MiB", tuning=tuning) as contestant:
            return int(contestant.optimizer.stats()["peak_activation_bytes"])

    def contestants(self, stack: ExitStack, entering: int, everything: int) -> dict[str, Contestant]:
        """The contestants. Args: entering, everything: bytes that wait if units are recomputed, and if they are not."""
        saved = Tuning(recompute=False)
        options: dict[str, dict[str, Any]] = {
            "as it is": {},
            "recomputed": {"activation_tier": "device"},
            "in RAM": {"activation_tier": "cpu", "activation_memory": entering},
            "in files": {"activation_tier": "nvme", "activation_memory": entering // ROOM},
            "all saved, in RAM": {"activation_tier": "cpu", "activation_memory": everything, "tuning": saved},
            "all saved, in files": {
                "activation_tier": "nvme", "activation_memory": everything // ROOM, "tuning": saved,
            },
        }  # fmt: skip
        return {name: stack.enter_context(self.held(name, **chosen)) for name, chosen in options.items()}


def race(found: dict[str, Contestant], tokens: torch.Tensor, disk: Disk, rounds: int) -> dict[str, float]:
    """Runs all in turns. Returns: by how much each contestant exceeds its limit."""
    disk.search()
    disk_s: list[float] = []
    for number in range(rounds):
        note(f"round {number + 1}")
        disk_s.append(disk.run())
        for one in found.values():
            one.measure(tokens)
    x_limit = {}
    for name in COMPUTES:
        one, same = found[name], found[COMPUTES[name]]
        each = zip(same.seconds, one.moved, disk_s, strict=True)
        x_limit[name] = ratio(one.seconds, [max(seconds, disk.seconds_for(moved, s)) for seconds, moved, s in each])
    return x_limit


def main(
    preset: Annotated[str, typer.Option(help=f"A GPT's size: {', '.join(PRESETS)}.")] = "5m",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 16,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 256,
    fp32: Annotated[bool, typer.Option("--fp32", help="Compute in fp32, for CPUs without bf16.")] = False,
    rounds: Rounds = 5,
    path: Folder = Path(),
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure, print the table, draw the timeline."""
    config, dtype = PRESETS[preset], torch.float32 if fp32 else torch.bfloat16
    tokens = torch.randint(VOCABULARY, (batch, seq))
    with scratch(path) as folder, ExitStack() as stack, TemporaryDirectory() as timelines:
        measured = Run(config, tokens, dtype, folder)
        entering, everything = measured.needed_bytes(Tuning()), measured.needed_bytes(Tuning(recompute=False))
        found = measured.contestants(stack, entering, everything)
        most = max(one.optimizer.stats()["activation_written_bytes"] for one in found.values())
        disk = stack.enter_context(closing(Disk(folder, max(1, most // TRANSFER_BYTES), TRANSFER_BYTES)))
        x_limit = race(found, tokens, disk, rounds)
        file = Path(timelines) / "activations.json"
        with found["all saved, in files"].optimizer.timeline(file):
            found["all saved, in files"].run(tokens)
        base = found["as it is"].seconds
        rows = [
            (
                name,
                f"{statistics.median(one.seconds):.3f}",
                spread(one.seconds),
                f"{ratio(one.seconds, base):.3f}",
                format_bytes(int(statistics.median(one.moved))),
                f"{x_limit[name]:.3f}" if name in COMPUTES else "",
            )
            for name, one in found.items()
        ]
        Report(
            name="activations",
            title="Activations that wait elsewhere",
            about=f"Forward and backward of a GPT, preset {preset}, {batch} x {seq} tokens in {dtype}: what enters its "
            f"{config.layers} blocks takes {format_bytes(entering)}, all that they save {format_bytes(everything)}. "
            f"Files: one part in {ROOM} of that has room in RAM. {ABOUT}",
            tables=[Table(HEADINGS, rows)],
            data={
                "entering_bytes": entering,
                "saved_bytes": everything,
                "runs": {name: {"seconds": one.seconds, "moved_bytes": one.moved} for name, one in found.items()},
                "x_limit": x_limit,
            },
            remarks=[
                judged(f"x limit, {name}", reached, TARGET) for name, reached in x_limit.items() if "files" in name
            ],
            setup=disk.setup,
            pictures={"activations.png": partial(timeline_picture, file, title="All saved, in files: one pass")},
        ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
