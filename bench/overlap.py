"""How much of the collectives' time hides behind compute: `python bench/overlap.py [--save]`.

Two gloo ranks of one thread each train a GPT over a link that makes each collective take a fixed time longer, one after
the other, without needing a core: loopback alone shares the cores with compute, and would show nothing. Everything is
measured with collectives under way beside compute, as training has them, and with each waited for where it is launched.
The delay is half of a block's forward, so that a block's compute can hide those of its neighbours.

What could be hidden of L blocks, with one collective a unit and pass: in backward the reductions of all but the first
block, whose gradients are the last to come, and at stage 3 the all-gathers of all but the last one, which is still
there; in forward the all-gathers of all but the first block. The root unit's are never hidden.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.report import Json, Out, Report, Rounds, Save, Table, judged, note, run
from offload import OffloadZero, Tuning
from offload.cli.timeline_plot import timeline_picture
from offload.dist import torch_distributed as comm
from offload.dist.communicator import Communicator
from offload.models.gpt import GPT, GPTConfig
from tests.support.communicators import Delayed, Waiting
from tests.support.ranks import World

RANKS = 2
STAGES = (1, 2, 3)
KINDS = ("none", "beside", "at once")
TARGET = 0.8
WARM_UP = 2

Times = tuple[float, float]
"""Seconds of forward, and from there to where step() returns."""


@dataclass(frozen=True)
class Shape:
    """What is trained: `batch` sequences of `seq` bytes a rank and step."""

    layers: int
    width: int
    batch: int
    seq: int

    def model(self) -> GPT:
        return GPT(GPTConfig(layers=self.layers, width=self.width, heads=4, context=self.seq))


def link(kind: str, delay_s: float) -> Any:
    """What makes the communicators of a rank slow."""
    made = comm.connect

    def connect(group: object = None, **options: Any) -> Communicator:
        of = {"beside": Delayed, "at once": Waiting}[kind]
        return of(made(group), delay_s, options["timeline"])

    return nullcontext() if kind == "none" else patch.object(comm, "connect", connect)


def train(shape: Shape, stage: int, kind: str, delay_s: float, steps: int, file: str | None) -> list[Times]:
    """Trains on one of the ranks. Returns: each step's times, but those of the first ones."""
    model = shape.model()
    tokens = torch.randint(256, (shape.batch, shape.seq + 1))
    found = []
    with ExitStack() as stack:
        stack.enter_context(link(kind, delay_s))
        optimizer = stack.enter_context(OffloadZero(model, stage=stage, tuning=Tuning(threads=1)))
        for step in range(WARM_UP + steps):
            if step == WARM_UP and file is not None and optimizer.stats()["rank"] == 0:
                stack.enter_context(optimizer.timeline(file))
            began = time.perf_counter()
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]
            between = time.perf_counter()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((between - began, time.perf_counter() - between))
    return found[WARM_UP:]


def slower(ranks: list[list[Times]]) -> list[float]:
    """Medians over the steps, of the slower rank: forward and backward."""
    return [max(statistics.median(times[phase] for times in one) for one in ranks) for phase in (0, 1)]


def main(
    layers: Annotated[int, typer.Option(help="Blocks.")] = 8,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences a rank and step.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    steps: Annotated[int, typer.Option(help="Steps a round.")] = 3,
    rounds: Rounds = 3,
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure how much of the collectives' time hides behind compute."""
    shape = Shape(layers, width, batch, seq)
    found: dict[tuple[int, str], list[list[float]]] = {(stage, kind): [] for stage in STAGES for kind in KINDS}
    with World(RANKS) as world, TemporaryDirectory() as folder:

        def measure(stage: int, kind: str, delay_s: float, file: str | None) -> list[float]:
            return slower(world.run(train, shape, stage, kind, delay_s, steps, file, timeout_s=300))

        delay_s = measure(2, "none", 0.0, None)[0] / layers / 2
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}")
            for stage, kind in found:
                file = f"{folder}/{stage}.json" if (number, kind) == (0, "beside") else None
                found[stage, kind].append(measure(stage, kind, delay_s, file))
        rows: list[dict[str, Any]] = []
        for stage in STAGES:
            for phase, what in enumerate(("forward", "backward")):
                none, beside, at_once = (statistics.median(one[phase] for one in found[stage, kind]) for kind in KINDS)
                could_s = delay_s * (layers - 1) * (2 if (what, stage) == ("backward", 3) else 1)
                times = {"none_s": none, "beside_s": beside, "at_once_s": at_once, "could_hide_s": could_s}
                rows.append({"stage": stage, "phase": what, **times, "hidden": (at_once - beside) / could_s})
        headings = ("stage", "phase", "none ms", "beside ms", "at once ms", "could hide ms", "hidden")
        cells = [
            (str(row["stage"]), row["phase"], *(f"{1e3 * row[name]:.0f}" for name in times), f"{row['hidden']:.2f}")
            for row in rows
        ]
        title = f"each collective {1e3 * delay_s:.1f} ms longer"
        pictures: dict[str, Callable[[Path], None]] = {
            f"overlap-{stage}.png": partial(
                timeline_picture,
                Path(f"{folder}/{stage}.json"),
                title=f"Stage {stage}, {title}: {steps} steps of rank 0",
            )
            for stage in STAGES[1:]
        }
        Report(
            name="overlap",
            title="Hiding collectives behind compute",
            about=f"{RANKS} gloo ranks, one thread each; {shape}; {title}. **none**: without a delay; **beside**: "
            "collectives under way beside compute; **at once**: each waited for where it is launched. "
            "backward: until `step()` returns. **could hide**: the delay that compute could hide; **hidden**: (at once "
            "- beside) by that. Medians of the slower rank.",
            tables=[Table(headings, cells)],
            data={"delay_s": delay_s, "rows": rows},
            remarks=[judged(f"stage {r['stage']}, {r['phase']}", r["hidden"], TARGET, is_least=True) for r in rows],
            pictures=pictures,
        ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
