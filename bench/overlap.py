"""How much of the collectives' time hides behind compute: `python bench/overlap.py [--save]`.

Two gloo ranks of one thread each train a GPT over a link that makes each collective take a fixed time longer, one after
the other, without needing a core: loopback alone shares the cores with compute, and would show nothing. Everything is
measured with collectives under way beside compute, as training has them, and with each waited for where it is launched.
The delay is half of a block's forward, so that a block's compute can hide those of its neighbours.

What could be hidden of L blocks, with one collective a unit and pass: in backward the reductions of all but the first
block, whose gradients are the last to come, and at stage 3 the gathers of all but the last one, which is still there;
in forward the gathers of all but the first block. The root unit's are never hidden.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import RESULTS, Grid, hardware
from bench.ranked import RANKS, Shape
from offload import OffloadZero, Tuning
from offload.cli.timeline_plot import timeline_picture
from offload.dist import torch_distributed as comm
from offload.dist.communicator import Communicator
from tests.support.communicators import Delayed, Waiting
from tests.support.ranks import World

STAGES = (1, 2, 3)
TARGET = 0.8
WARM_UP = 2

HEAD = """# Hiding collectives behind compute

{hardware}; torch {torch}.

`{command}`

{about}

{ranks} gloo ranks, one thread each; a GPT of {layers} blocks, {count:,} parameters, {tokens} tokens a rank and step;
each collective {delay:.1f} ms longer. Medians of {rounds} rounds of {steps} steps, in turns, of the slower rank.

- **none**: without a delay; **beside**: collectives under way beside compute; **at once**: each waited for where it is
  launched. backward: to where `step()` returns; forward: with the landing of new parameters in it.
- **could hide**: the delay that compute could hide; **hidden**: at once - beside, by that (wanted: {target} or more).

"""


@dataclass(frozen=True)
class Times:
    """Seconds a step."""

    forward_s: float
    backward_s: float


def link(kind: str, delay_s: float) -> Any:
    """What makes the communicators of a rank slow. kind: "none", "beside" or "at once"."""
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
            found.append(Times(between - began, time.perf_counter() - between))
    return found[WARM_UP:]


def could_hide(shape: Shape, stage: int) -> tuple[int, int]:
    """Collectives of forward and of backward, see above."""
    return shape.layers - 1, (shape.layers - 1) * (2 if stage == 3 else 1)


class Bench:
    """The ranks, and what they measured by (stage, kind)."""

    def __init__(self, world: World, shape: Shape, steps: int) -> None:
        self._world = world
        self._shape = shape
        self._steps = steps
        self._found: dict[tuple[int, str], list[Times]] = {}

    def measure(self, stage: int, kind: str, delay_s: float, file: Path | None = None) -> Times:
        """The slower rank's medians."""
        name = None if file is None else str(file)
        ranks = self._world.run(train, self._shape, stage, kind, delay_s, self._steps, name, timeout_s=300)
        times = Times(
            max(statistics.median(times.forward_s for times in one) for one in ranks),
            max(statistics.median(times.backward_s for times in one) for one in ranks),
        )
        self._found.setdefault((stage, kind), []).append(times)
        return times

    def median(self, stage: int, kind: str) -> Times:
        """Over the rounds."""
        rounds = self._found[stage, kind]
        return Times(
            statistics.median(times.forward_s for times in rounds),
            statistics.median(times.backward_s for times in rounds),
        )

    def rows(self, delay_s: float) -> list[tuple[str, ...]]:
        rows = []
        for stage in STAGES:
            none, beside, at_once = (self.median(stage, kind) for kind in ("none", "beside", "at once"))
            for what, count in zip(("forward_s", "backward_s"), could_hide(self._shape, stage), strict=True):
                each = [getattr(times, what) for times in (none, beside, at_once)]
                hidden = (each[2] - each[1]) / (count * delay_s)
                cells = [f"{1e3 * seconds:.0f}" for seconds in (*each, count * delay_s)]
                rows.append((str(stage), what.removesuffix("_s"), *cells, f"{hidden:.2f}"))
        return rows


def main(
    layers: Annotated[int, typer.Option(help="Blocks.")] = 8,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences a rank and step.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    steps: Annotated[int, typer.Option(help="Steps a round.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds, in turns.")] = 3,
    save: Annotated[bool, typer.Option("--save", help="Write bench/results/overlap.md, and the pictures.")] = False,
) -> None:
    """Measure how much of collectives' time hides behind compute."""
    shape = Shape(layers, width, batch, seq)
    with World(RANKS) as world, tempfile.TemporaryDirectory() as folder:
        bench = Bench(world, shape, steps)
        delay_s = bench.measure(2, "none", 0.0).forward_s / layers / 2
        for number in range(rounds):
            for stage in STAGES:
                for kind in ("none", "beside", "at once"):
                    file = Path(folder) / f"{stage}.json" if (number, kind) == (0, "beside") else None
                    bench.measure(stage, kind, delay_s, file)
        headings = ("stage", "phase", "none ms", "beside ms", "at once ms", "could hide ms", "hidden")
        grid = Grid(headings, bench.rows(delay_s))
        grid.show(Console(), f"Each collective {1e3 * delay_s:.1f} ms longer")
        if save:
            head = HEAD.format(
                hardware=hardware(),
                torch=torch.__version__,
                command=" ".join(["python", "bench/overlap.py", *sys.argv[1:]]),
                about=(__doc__ or "").split("\n\n", 1)[1].strip(),
                ranks=RANKS,
                layers=layers,
                count=shape.numel,
                tokens=batch * seq,
                delay=1e3 * delay_s,
                rounds=rounds,
                steps=steps,
                target=TARGET,
            )
            pictures = [f"overlap-{stage}.png" for stage in STAGES if stage > 1]
            for stage, name in zip(STAGES[1:], pictures, strict=True):
                title = f"Stage {stage}, each collective {1e3 * delay_s:.1f} ms longer: {steps} steps of rank 0"
                timeline_picture(Path(folder) / f"{stage}.json", RESULTS / name, title)
            shown = "\n".join(f"![{name}]({name})" for name in pictures)
            (RESULTS / "overlap.md").write_text(head + "\n".join([*grid.markdown(), "", shown, ""]))


if __name__ == "__main__":
    typer.run(main)
