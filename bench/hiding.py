"""How much of the disk's time hides behind compute: `python bench/hiding.py [--path DIR] [--save]`.

A GPT with its optimizer states on NVMe and no share of them kept in RAM, at 1, 2 and 3 times T* tokens a step, beside
plain torch with resident fp32 masters and offload with its states in RAM; everyone a process of its own, in turns
(bench/contest.py). In every round the parts of a step are measured too, each alone: the same bytes through the
library's own I/O engine, the Adam kernel on states in RAM, and plain torch's forward and backward. From them follows
what a step should take, `compute + Adam + max(0, I/O - forward)`, and the ratio of that to what it took.

T* = F t / 6 is where compute lasts as long as I/O. F: FLOP/s of forward and backward, at 6 a parameter and token;
t: seconds a parameter for the 24 bytes that a step reads and writes.
"""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import (
    RESULTS,
    Contestant,
    Entry,
    Grid,
    Say,
    hardware,
    parameters,
    scratch,
    started,
    turns,
    versions_of,
)
from bench.parts import Adam, Disk
from offload.cli.timeline_plot import timeline_picture
from offload.models.gpt import PRESETS, GPTConfig
from offload.sizes import parse_bytes

NVME, TORCH, RAM = "offload, NVMe", "torch, fp32 masters in RAM", "offload, RAM"
STATE_BYTES = 12
"""A parameter: master, exp_avg, exp_avg_sq. A step reads and writes them."""
TARGET = 0.93
FIRST_TOKENS = 512
"""To learn F with, before T* is known."""
SEQ = 256
TIMELINE_STEPS = 3

HEAD = """# Hiding the disk behind compute

{hardware}; {versions}.

`{command}`

{count:,} parameters; F = {flops:.3f} TFLOP/s; t = {each:.2f} ns for 24 bytes ({bandwidth:.2f} GB/s reading and writing
at once); T* = F t / 6 = {star:.0f} tokens a step.

- **forward, backward**: plain torch's; **Adam**: the kernel alone, states in RAM; **I/O**: what the step read and
  wrote, at the bandwidth of the library's engine alone; **predicted**: forward + backward + Adam +
  max(0, I/O - forward).
- **step**: of `{nvme}`, in blocks of {steps}, each from where one step returns to where the last one does; **ratio**:
  predicted by that, the median over the rounds (wanted: {target} or more). All other columns are medians too.
- **torch**, **RAM**: whole steps of plain torch with resident fp32 masters, and of offload with its states in RAM.

"""


@dataclass(frozen=True)
class Round:
    """Seconds a step: the parts, each measured alone, and whole steps. bytes_per_param: what the step moved."""

    forward_s: float
    backward_s: float
    adam_s: float
    io_s: float
    step_s: float
    torch_s: float
    ram_s: float
    bytes_per_param: float

    @property
    def predicted_s(self) -> float:
        return self.forward_s + self.backward_s + self.adam_s + max(0.0, self.io_s - self.forward_s)


@dataclass(frozen=True)
class Shape:
    """Tokens of a step as batch x seq, near `multiple` times T*."""

    multiple: float
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


def shape_of(multiple: float, tokens: float) -> Shape:
    """Sequences near SEQ long, as many as needed."""
    batch = max(1, round(tokens / SEQ))
    return Shape(multiple, batch, max(1, round(tokens / batch)))


class Bench:
    """The contestants and the parts."""

    def __init__(self, contestants: list[Contestant], disk: Disk, adam: Adam, count: int) -> None:
        self._all = contestants
        self._by_name = {one.name: one for one in contestants}
        self._disk, self._adam, self._count = disk, adam, count

    def flops(self, shape: Shape, steps: int) -> float:
        """FLOP/s of plain torch's forward and backward."""
        one = self._by_name[TORCH]
        one.run(1, shape.batch, shape.seq)
        block = one.run(steps, shape.batch, shape.seq, phases=True)
        return 6 * self._count * shape.tokens / block.compute_s

    def seconds_a_param(self, rounds: int) -> float:
        """For 24 bytes, reading and writing at once."""
        each = [self._disk.run() / self._disk.moved_bytes for _ in range(rounds + 1)]
        return 2 * STATE_BYTES * statistics.median(each[1:])

    def round(self, shape: Shape, steps: int, number: int) -> Round:
        disk_s, adam_s = self._disk.run(), self._adam.run()
        blocks = {
            # Only plain torch's phases are asked for: parting a step makes it wait.
            one.name: one.run(steps, shape.batch, shape.seq, phases=one.name == TORCH)
            for one in turns(self._all, number)
        }
        nvme, plain = blocks[NVME], blocks[TORCH]
        moved = (nvme.stats["nvme_read_bytes"] + nvme.stats["nvme_written_bytes"]) / nvme.trained
        return Round(
            forward_s=statistics.mean(plain.forward_s),
            backward_s=statistics.mean(plain.backward_s),
            adam_s=adam_s,
            io_s=disk_s * moved / self._disk.moved_bytes,
            step_s=nvme.step_s,
            torch_s=plain.step_s,
            ram_s=blocks[RAM].step_s,
            bytes_per_param=moved / self._count,
        )

    def measure(self, shape: Shape, steps: int, rounds: int) -> list[Round]:
        for one in self._all:
            one.run(1, shape.batch, shape.seq)
        self._adam.run()
        return [self.round(shape, steps, number) for number in range(rounds)]

    def timeline(self, shape: Shape, picture: Path) -> None:
        """Draws some steps, and keeps the recording beside the picture."""
        file = picture.with_suffix(".json")
        self._by_name[NVME].run(TIMELINE_STEPS, shape.batch, shape.seq, timeline=file.absolute())
        title = f"{TIMELINE_STEPS} steps of {shape.tokens:,} tokens ({shape.multiple:g} T*), {self._count:,} parameters"
        timeline_picture(file, picture, title)


@dataclass(frozen=True)
class Row:
    """A shape's medians over the rounds; times in seconds; ratio: predicted by measured, the median of the rounds'."""

    multiple: float
    tokens: int
    forward_s: float
    backward_s: float
    adam_s: float
    io_s: float
    predicted_s: float
    step_s: float
    step_spread_s: tuple[float, float]
    ratio: float
    tokens_per_s: float
    torch_s: float
    ram_s: float
    bytes_per_param: float


def row_of(shape: Shape, rounds: list[Round]) -> Row:
    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in rounds))

    steps = [one.step_s for one in rounds]
    parts = ("forward_s", "backward_s", "adam_s", "io_s", "predicted_s")
    return Row(
        multiple=shape.multiple,
        tokens=shape.tokens,
        step_spread_s=(min(steps), max(steps)),
        ratio=statistics.median(one.predicted_s / one.step_s for one in rounds),
        tokens_per_s=shape.tokens / median("step_s"),
        **{name: median(name) for name in (*parts, "step_s", "torch_s", "ram_s", "bytes_per_param")},
    )


def grid_of(rows: list[Row]) -> Grid:
    headings = (
        "T* x",
        "tokens",
        "forward s",
        "backward s",
        "Adam s",
        "I/O s",
        "predicted s",
        "step s",
        "spread",
        "ratio",
    )
    more = ("tokens/s", "torch s", "RAM s", "bytes a parameter")
    cells = [
        (
            f"{row.multiple:g}",
            f"{row.tokens:,}",
            *(f"{value:.3f}" for value in (row.forward_s, row.backward_s, row.adam_s, row.io_s, row.predicted_s)),
            f"{row.step_s:.3f}",
            "{:.3f}-{:.3f}".format(*row.step_spread_s),
            f"{row.ratio:.3f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.torch_s:.3f}",
            f"{row.ram_s:.3f}",
            f"{row.bytes_per_param:.2f}",
        )
        for row in rows
    ]
    return Grid(headings + more, cells)


@dataclass(frozen=True)
class Result:
    """flops: F; each_s: t; star: T*, tokens a step; model: parameters and text for people."""

    count: int
    flops: float
    each_s: float
    star: float
    rows: list[Row]
    versions: str

    def text(self, template: str, **more: object) -> str:
        return template.format(
            hardware=hardware(),
            versions=self.versions,
            count=self.count,
            flops=self.flops / 1e12,
            each=self.each_s * 1e9,
            bandwidth=2 * STATE_BYTES / self.each_s / 1e9,
            star=self.star,
            nvme=NVME,
            target=TARGET,
            **more,
        )

    def met(self) -> list[str]:
        return [
            f"{row.multiple:g} T*: {row.ratio:.3f} of the predicted tokens/s, wanted {TARGET}: "
            + ("met" if row.ratio >= TARGET else "NOT met")
            for row in self.rows
        ]


@dataclass(frozen=True)
class Plan:
    """What is asked for. buffers: chunks in RAM beyond the least that works."""

    model: GPTConfig
    multiples: list[float]
    rounds: int
    steps: int
    chunk: int
    buffers: int


def measure(plan: Plan, path: Path, pictures: Path, say: Say) -> Result:
    """Raises: ContestError."""
    count = parameters(plan.model)
    room = {"chunk": plan.chunk, "buffers": plan.buffers}
    entries = [
        Entry(NVME, "offload", {"tier": "nvme"} | room),
        Entry(TORCH, "torch"),
        Entry(RAM, "offload", {"tier": "cpu"} | room),
    ]
    first = shape_of(0, min(FIRST_TOKENS, plan.model.context))
    with scratch(path) as folder, started(entries, plan.model, (first.batch, first.seq), folder, say) as (found, _):
        disk, adam = Disk(folder, 3 * plan.chunk, STATE_BYTES * count), Adam(count)
        try:
            bench = Bench(found, disk, adam, count)
            say("F and t")
            each_s = bench.seconds_a_param(plan.rounds)
            guess = shape_of(1, bench.flops(first, plan.steps) * each_s / 6)
            flops = bench.flops(guess, plan.steps)  # at the tokens that matter: it depends on them
            star = flops * each_s / 6
            rows = []
            for multiple in plan.multiples:
                shape = shape_of(multiple, multiple * star)
                say(f"{multiple:g} T*: {shape.batch} x {shape.seq} tokens")
                rows.append(row_of(shape, bench.measure(shape, plan.steps, plan.rounds)))
                bench.timeline(shape, pictures / f"hiding-{multiple:g}.png")
            return Result(count, flops, each_s, star, rows, versions_of(found))
        finally:
            adam.close()
            disk.close()


def main(
    preset: Annotated[str, typer.Option(help=f"A GPT's size: {', '.join(PRESETS)}.")] = "125m",
    multiples: Annotated[str, typer.Option(help="Of T*, with commas.")] = "1,2,3",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a block.")] = 3,
    chunk: str = "16MiB",
    buffers: Annotated[int, typer.Option(min=0, help="Chunks in RAM beyond the least that works.")] = 1,
    path: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path, typer.Option(help="Folder for timelines and their pictures.")] = Path("out"),
    save: Annotated[bool, typer.Option(help="Write bench/results/hiding.md and pictures.")] = False,
) -> None:
    """Measure, print the table, draw timelines."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, stderr = Console(width=170), Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    chosen = [float(word) for word in multiples.split(",")]
    plan = Plan(PRESETS[preset], chosen, rounds, steps, parse_bytes(chunk, "--chunk"), buffers)
    result = measure(plan, path, out, stderr.print)
    grid = grid_of(result.rows)
    command = "python bench/hiding.py " + shlex.join(sys.argv[1:])
    head = result.text(HEAD, command=command, steps=steps)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        console.print(head, highlight=False)
        grid.show(console, "Hiding the disk")
        for line in result.met():
            console.print(line, highlight=False)
    if save:
        pictures = [f"hiding-{multiple:g}.png" for multiple in chosen]
        for name in pictures:
            (RESULTS / name).write_bytes((out / name).read_bytes())
        lines = [*grid.markdown(), "", *(f"- {line}" for line in result.met()), ""]
        lines += [f"![{name}]({name})" for name in pictures]
        (RESULTS / "hiding.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
