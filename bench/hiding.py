"""How much of the disk's time hides behind compute: `python bench/hiding.py [--param-tier nvme] [--save]`.

Whole iterations (forward, backward, step) of a GPT with its optimizer states on NVMe and no share of them kept in RAM,
beside plain torch with resident fp32 masters; each a process of its own, in turns (bench/contest.py). Every round also
measures the parts of an iteration alone: the bytes that it moved through the library's own I/O engine, the Adam kernel
on states in RAM, and plain torch's forward and backward. The limit follows from them:

    max(forward + Adam, the I/O in forward) + max(backward, the rest of the I/O)

Two parts that run at once share the memory's bandwidth, and each takes longer than alone. So every round also measures
plain torch's forward and backward while the disk moves bytes, and the disk meanwhile; of these, the same sum is the
floor. Nothing in it waits for anything else, so it is what perfect hiding would reach.

One more contestant has `Tuning(speculate=True)`: it steps states in backward already. Of its iteration the limit is
max(all of the compute, all of the I/O).

A layer's states are updated when the next forward enters it, so nearly all bytes move in the forward. With few tokens
the disk takes longer than the compute, with many the compute does; in between, backward has little I/O to hide.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import Block, Contestant, Entry, parameters, started, turns, versions_of
from bench.limits import Adam, Disk
from bench.report import Folder, Json, Out, Report, Rounds, Save, Table, judged, note, ratio, run, scratch, spread
from offload.cli.timeline_plot import timeline_picture
from offload.demo.gpt import PRESETS
from offload.sizes import parse_bytes

NVME, TRIED, TORCH = "offload, NVMe", "offload, NVMe, speculate", "torch, fp32 masters in RAM"
STATE_BYTES = 12
"""A parameter: master, exp_avg, exp_avg_sq. A step reads and writes them."""
TARGET = 1.1
"""Of the floor."""
SEQ = 256
TIMELINE_STEPS = 3
BESIDE_RUNS = 3
"""How often the disk moves its file while plain torch computes beside it, at least."""
HEADINGS = (
    *("tokens", "forward", "backward", "adam", "disk", "limit", "floor", "step", "torch"),
    *("spread", "x limit", "x floor", "bytes a parameter", "in forward"),
    *("speculate", "spread", "x step", "x all", "kept"),
)
ABOUT = """\
**forward, backward**: plain torch's; **adam**: the kernel alone, states in RAM; **disk**: the bytes that the iteration
moved, through the same engine alone; **limit**: max(forward + Adam, its I/O) + max(backward, the rest of the I/O);
**floor**: the same of forward, backward and disk measured while both run, because they share the memory. **step**: from
where one step returns to where the next does; **x limit, x floor**: the median of the rounds' ratios. **torch**: plain
torch with resident fp32 masters. **speculate**: the iteration of a run that steps states in backward; **x
step**: by that of the run that does not; **x all**: by max(forward + backward + Adam, disk), each alone; **kept**: of
the bytes that it tried. Seconds, medians."""


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of an iteration. Attributes: disk_s: for all bytes that it moves."""

    forward_s: float
    backward_s: float
    adam_s: float
    disk_s: float

    def hidden_s(self, in_forward: float) -> float:
        """Seconds of an iteration that hides the shorter part of each phase. Args: in_forward: share of the bytes."""
        disk_forward_s = self.disk_s * in_forward
        rest_s = self.disk_s - disk_forward_s
        return max(self.forward_s + self.adam_s, disk_forward_s) + max(self.backward_s, rest_s)

    @property
    def all_s(self) -> float:
        """Seconds of an iteration that hides all of the disk behind all of the compute, or the other way round."""
        return max(self.forward_s + self.backward_s + self.adam_s, self.disk_s)


@dataclass(frozen=True)
class Round:
    """An iteration: its parts, and whole iterations of both contestants.

    Attributes: alone, beside: the parts, each measured alone, and while the disk and plain torch run at once;
    moved_bytes: of which forward_bytes moved in forward; tried_s: of iterations with speculate=True; None: it is not
    possible; kept: the share of what these tried.
    """

    alone: Parts
    beside: Parts
    moved_bytes: float
    forward_bytes: float
    step_s: float
    torch_s: float
    tried_s: float | None = None
    kept: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Of the parts, each alone, and of what they make up."""
        in_forward = self.forward_bytes / max(self.moved_bytes, 1)
        limits = {"limit_s": self.alone.hidden_s(in_forward), "floor_s": self.beside.hidden_s(in_forward)}
        return {**asdict(self.alone), **limits, "step_s": self.step_s, "torch_s": self.torch_s}


@dataclass(frozen=True)
class Result:
    """All rounds of one number of tokens."""

    tokens: int
    count: int
    rounds: list[Round]

    def all(self, name: str) -> list[float]:
        return [one.seconds[name] for one in self.rounds]

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(self.all(name)) for name in self.rounds[0].seconds}

    @property
    def bytes_per_param(self) -> float:
        return statistics.median(one.moved_bytes for one in self.rounds) / self.count

    def x(self, name: str) -> float:
        """Steps by "limit_s" or "floor_s"."""
        return ratio(self.all("step_s"), self.all(name))

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "x_limit": self.x("limit_s"),
            "x_floor": self.x("floor_s"),
            **self.medians,
            "bytes_per_param": self.bytes_per_param,
            "rounds_s": self.all("step_s"),
            "speculate": self.speculate,
        }

    @property
    def speculate(self) -> dict[str, Any] | None:
        """Of iterations that step states in backward; None: there are none."""
        tried = [one.tried_s for one in self.rounds if one.tried_s is not None]
        if not tried:
            return None
        return {
            "step_s": statistics.median(tried),
            "spread_s": spread(tried),
            "x_step": ratio(tried, self.all("step_s")),
            "x_all": ratio(tried, [one.alone.all_s for one in self.rounds]),
            "kept": statistics.median(one.kept for one in self.rounds),
            "rounds_s": tried,
        }

    def row(self) -> tuple[str, ...]:
        tried = self.speculate
        return (
            f"{self.tokens:,}",
            *(f"{seconds:.3f}" for seconds in self.medians.values()),
            spread(self.all("step_s")),
            f"{self.x('limit_s'):.3f}",
            f"{self.x('floor_s'):.3f}",
            f"{self.bytes_per_param:.2f}",
            f"{ratio([one.forward_bytes for one in self.rounds], [one.moved_bytes for one in self.rounds]):.0%}",
            *(("-",) * 5 if tried is None else _cells(tried)),
        )


def _cells(tried: dict[str, Any]) -> tuple[str, ...]:
    numbers = (f"{tried[name]:.3f}" for name in ("x_step", "x_all"))
    return f"{tried['step_s']:.3f}", tried["spread_s"], *numbers, f"{tried['kept']:.0%}"


def shape_of(tokens: int) -> tuple[int, int]:
    """Sequences near SEQ long, as many as needed: batch and sequence."""
    batch = max(1, round(tokens / SEQ))
    return batch, max(1, round(tokens / batch))


@dataclass(frozen=True)
class Race:
    """What runs in each round. Attributes: steps: how many a contestant makes in its turn."""

    contestants: list[Contestant]
    disk: Disk
    adam: Adam
    steps: int

    def run(self, shape: tuple[int, int], rounds: int) -> list[Round]:
        """Args: shape: batch and sequence."""
        note(f"{shape[0]} x {shape[1]} tokens")
        for one in self.contestants:
            one.run(1, *shape)
        self.adam.run()
        return [self._round(shape, number) for number in range(rounds)]

    def _round(self, shape: tuple[int, int], number: int) -> Round:
        before_s, adam_s = self.disk.run(), self.adam.run()
        # Only plain torch's phases are asked for: parting a step makes it wait.
        order = turns(self.contestants, number)
        blocks = {one.name: one.run(self.steps, *shape, phases=one.name == TORCH) for one in order}
        nvme, plain, tried = blocks[NVME], blocks[TORCH], blocks.get(TRIED)
        moved = (nvme.stats["nvme_read_bytes"] + nvme.stats["nvme_written_bytes"]) / nvme.trained

        def parts(torch: Block, disk_s: float) -> Parts:
            seconds = (statistics.mean(torch.forward_s), statistics.mean(torch.backward_s))
            return Parts(*seconds, adam_s, self.disk.seconds_for(moved, disk_s))

        return Round(
            alone=parts(plain, (before_s + self.disk.run()) / 2),  # a drive drifts within seconds
            beside=parts(*self._beside(shape, before_s / plain.step_s)),
            moved_bytes=moved,
            forward_bytes=nvme.forward_bytes / nvme.steps,
            step_s=nvme.step_s,
            torch_s=plain.step_s,
            tried_s=None if tried is None else tried.step_s,
            kept=0.0 if tried is None else tried.stats["kept_bytes"] / max(tried.stats["tried_bytes"], 1),
        )

    def _beside(self, shape: tuple[int, int], steps_a_run: float) -> tuple[Block, float]:
        """Plain torch's forward and backward while the disk moves bytes, and the seconds of a run of the disk."""
        (plain,) = (one for one in self.contestants if one.name == TORCH)
        steps = max(self.steps, math.ceil(BESIDE_RUNS * steps_a_run))
        return self.disk.beside(lambda: plain.run(steps, *shape, phases=True, updates=False))


def main(
    preset: Annotated[str, typer.Option(help=f"A GPT's size: {', '.join(PRESETS)}.")] = "125m",
    tokens: Annotated[str, typer.Option(help="Tokens of an iteration, with commas.")] = "256,512,1024",
    param_tier: Annotated[str, typer.Option(help="Tier of parameters: device or nvme.")] = "device",
    grad_tier: Annotated[str, typer.Option(help="Tier of gradients: cpu or nvme.")] = "cpu",
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Iterations in a block.")] = 3,
    chunk: str = "16MiB",
    buffers: Annotated[int, typer.Option(min=0, help="Chunks in RAM beyond the least that works.")] = 1,
    path: Folder = Path(),
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure, print the table, draw timelines."""
    model, chunk_bytes = PRESETS[preset], parse_bytes(chunk, "--chunk")
    count = parameters(model)
    options = {
        "tier": "nvme",
        "param_tier": param_tier,
        "grad_tier": grad_tier,
        "chunk": chunk_bytes,
        "buffers": buffers,
    }
    tried = Entry(TRIED, "offload", options | {"speculate": True})
    entries = [Entry(NVME, "offload", options), Entry(TORCH, "torch"), tried]
    shapes = [shape_of(int(word)) for word in tokens.split(",")]
    name, moved = ("hiding", "states") if param_tier == "device" else ("iterations", "parameters")
    results: list[Result] = []
    pictures: dict[str, Callable[[Path], None]] = {}
    slot_bytes = 3 * chunk_bytes
    with (
        scratch(path) as folder,
        TemporaryDirectory() as timelines,
        started(entries, model, shapes[0], folder) as (contestants, _),
        closing(Disk(folder, max(1, STATE_BYTES * count // slot_bytes), slot_bytes)) as disk,
        closing(Adam(count, chunk_bytes // 4)) as adam,
    ):
        disk.search()
        race = Race(contestants, disk, adam, steps)
        for shape in shapes:
            done = shape[0] * shape[1]
            results.append(Result(done, count, race.run(shape, rounds)))
            file = Path(timelines) / f"{done}.json"
            contestants[0].run(TIMELINE_STEPS, *shape, timeline=str(file))
            title = f"{TIMELINE_STEPS} steps of {done:,} tokens, {count:,} parameters"
            pictures[f"{name}-{done}.png"] = partial(timeline_picture, file, title=title)
        Report(
            name=name,
            title=f"Hiding the disk behind compute: {moved}",
            about=f"{count:,} parameters on {param_tier}, gradients on {grad_tier}, optimizer states on NVMe.\n{ABOUT}",
            tables=[Table(HEADINGS, [result.row() for result in results])],
            data={"parameters": count, "runs": [result.as_json() for result in results]},
            remarks=[judged(f"x floor, {one.tokens} tokens", one.x("floor_s"), TARGET) for one in results],
            setup=f"{adam.setup}, {disk.setup}; {versions_of(contestants)}",
            pictures=pictures,
        ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
