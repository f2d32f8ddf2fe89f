"""Whole training steps beside DeepSpeed's: `python bench/peers.py --deepspeed PYTHON` (`make bench-peers-step`).

The same GPT, initial values and batches of text for all: offload and DeepSpeed with the optimizer states on NVMe; both
with them in RAM, and plain torch with resident fp32 masters, as points of reference. Two more rows are offload with
steps that are tried in backward, and with states="8bit", which is another training. With `--params nvme` parameters and
gradients are on NVMe as well. Each contestant is a process of its own, one runs at a time, and they take turns block by
block; bench/trainer.py says what is timed. PYTHON is an interpreter that has DeepSpeed (`make .venv-peers/installed`
makes one); its extensions are compiled at their first use (minutes; needs a C++ compiler and libaio's headers). A model
alone (`--models 46m`) is saved on a page of its own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import Block, Contestant, Entry, parameters, started, turns, versions_of
from bench.report import Folder, Json, Out, Report, Rounds, Save, Table, judged, note, ratio, run, scratch, spread
from offload.cli.plots import new_figure
from offload.demo.gpt import GPT, GPTConfig
from offload.planner.machine import free_memory
from offload.sizes import MIB, format_bytes

OURS, TRIED, SMALL = "offload, NVMe", "offload, NVMe, speculate", "offload, NVMe, 8bit states"
CHUNK_BYTES = 16 * MIB
BUFFERS = {"device": 1, "nvme": 2}
"""Chunks in RAM beyond the least that works, by the tier of parameters."""
AIO: dict[str, Any] = {"queue_depth": 32, "single_submit": False, "overlap_events": True}
BASE_BYTES = 600 * MIB
"""RAM of a process without its states, about."""
LOSS_MARGIN = 0.02
"""Of a loss: more than what other roundings bring about in so few steps."""
STEP_TARGET, OPTIMIZER_TARGET, RSS_TARGET = 1.5, 2.0, 1.0
ABOUT = """\
- **step**: a block of steps by their number, from where one step returns to where the last one does; **spread**:
  fastest and slowest block. **f + b**: forward and backward until the last gradient is made; **optimizer**: from there
  until the new parameters can be read and nothing is under way; both from other blocks, in which every step waits for
  that. Medians over the rounds.
- **x ours**: the median of the rounds' times by those of `offload, NVMe`.
- **read, written**: bytes a parameter and step, as the kernel counted them for the process.
- **peak RSS**: of the process in the timed steps.
- Same initial values (rounded to bf16), same text, AdamW without clipping, bf16. One process runs at a time."""
NVME_ABOUT = """
- Gradients are on NVMe as well, ours in bf16, DeepSpeed's in fp32; it leaves parameters below a MiB in RAM."""
HEADINGS = (
    "contestant", "step s", "spread", "x ours", "f + b s", "optimizer s", "x ours", "read", "written", "peak RSS",
    "loss",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What all contestants train: a model, batch and sequence, and how many timed steps make a block."""

    name: str
    model: GPTConfig
    batch: int
    seq: int
    steps: int


JOBS = {
    # Every matrix is whole MiB: of others, DeepSpeed 0.19.8 makes other numbers when it swaps gradients.
    "46m": Job("46M", GPTConfig(layers=14, width=512, heads=8, context=4096), batch=4, seq=256, steps=4),
    "368m": Job("368M", GPTConfig(layers=29, width=1024, heads=16, context=2048), batch=1, seq=256, steps=2),
    "tiny": Job("tiny", GPTConfig(layers=2, width=256, heads=4, context=64), batch=1, seq=32, steps=2),
}


def entries(job: Job, deepspeed: str | None) -> Iterator[Entry]:
    """All contestants, ours first.

    DeepSpeed on NVMe runs twice. "Small groups" has the request size that was its best in bench/results/io.md, and
    sub-groups of a few parameters, which take little RAM. "Large requests" has requests larger than any gradient, so
    that it keeps gradients in RAM and does not swap them, and all parameters in one sub-group, its default: it crashes
    on sub-groups smaller than a request.
    """
    on_nvme = {"tier": "nvme", "chunk": CHUNK_BYTES, "buffers": BUFFERS["device"]}
    yield Entry(OURS, "offload", on_nvme, param_bytes=10)
    yield Entry(TRIED, "offload", on_nvme | {"speculate": True}, param_bytes=12)
    yield Entry(SMALL, "offload", on_nvme | {"states": "8bit"}, param_bytes=10)
    if deepspeed:
        largest = 4 * job.model.width**2  # elements of a parameter
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
        small = {"zero": zero | {"sub_group_size": 4 * largest}, "aio": AIO | {"block_size": MIB}}
        large = {"zero": zero, "aio": AIO | {"block_size": (4 * largest // MIB + 1) * MIB}}
        yield Entry("DeepSpeed 3, NVMe, small groups", "deepspeed", small, deepspeed)
        yield Entry("DeepSpeed 3, NVMe, large requests", "deepspeed", large, deepspeed, param_bytes=40)
    yield Entry("torch, fp32 masters in RAM", "torch")
    yield Entry("offload, RAM", "offload", {"tier": "cpu", "chunk": CHUNK_BYTES})
    if deepspeed:
        in_ram = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        yield Entry("DeepSpeed 2, RAM", "deepspeed", {"zero": in_ram, "aio": {}}, deepspeed, param_bytes=30)


def entries_with_params(job: Job, deepspeed: str | None) -> Iterator[Entry]:
    """All contestants with parameters and gradients on NVMe, ours first.

    DeepSpeed runs twice, both times with requests of a MiB (it leaves smaller parameters in RAM), and with the
    sub-groups and buckets that take least RAM: with 50M elements each its step took longer. "Few buffers" has its
    default number of buffers. "Pipelined" reads and writes states while it computes others, and reads the parameters of
    more than two layers ahead. It keeps no parameters for reuse, because these would hold buffers until none are left.
    """
    tiers = {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme"}
    on_nvme = tiers | {"chunk": CHUNK_BYTES, "buffers": BUFFERS["nvme"]}
    yield Entry(OURS, "offload", on_nvme, param_bytes=10)
    yield Entry(SMALL, "offload", on_nvme | {"states": "8bit"}, param_bytes=10)
    if deepspeed:
        largest = max(param.numel() for param in GPT(job.model, device="meta").parameters())
        pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}  # it crashes on its default, 4
        for name, optimizer, buffers, ahead in (("few buffers", {}, 5, 1), ("pipelined", pipelined, 16, 12)):
            params = {"device": "nvme", "buffer_count": buffers, "buffer_size": largest, "max_in_cpu": 0}
            zero = {
                "stage": 3,
                "offload_optimizer": {"device": "nvme"} | optimizer,
                "offload_param": params,
                "sub_group_size": 4 * largest,
                "reduce_bucket_size": largest,
                "stage3_prefetch_bucket_size": ahead * largest,
                "stage3_max_live_parameters": 3 * ahead * largest,
                "stage3_max_reuse_distance": 0,
            }
            options = {"zero": zero, "aio": AIO | {"block_size": MIB}}
            yield Entry(f"DeepSpeed 3, NVMe, {name}", "deepspeed", options, deepspeed)


ENTRIES = {"device": entries, "nvme": entries_with_params}
"""By the tier of parameters."""


@dataclass(frozen=True)
class Score:
    """A contestant's blocks, by round: those timed as whole steps, and those timed by phases."""

    one: Contestant
    whole: list[Block]
    phases: list[Block]

    @property
    def steps_s(self) -> list[float]:
        return [block.step_s for block in self.whole]

    @property
    def optimizers_s(self) -> list[float]:
        return [statistics.mean(block.optimizer_s) for block in self.phases]

    def row(self, ours: Score, count: int) -> dict[str, Any]:
        """This contestant as --json shows it. Args: count: the number of parameters."""
        each = count * sum(block.trained for block in self.whole)
        losses = [loss for block in self.one.blocks for loss in block.losses]
        return {
            "contestant": self.one.name,
            "step_s": statistics.median(self.steps_s),
            "spread_s": spread(self.steps_s),
            "step_x_ours": ratio(self.steps_s, ours.steps_s),
            "compute_s": statistics.median(block.compute_s for block in self.phases),
            "optimizer_s": statistics.median(self.optimizers_s),
            "optimizer_x_ours": ratio(self.optimizers_s, ours.optimizers_s),
            "read_bytes_per_param": sum(block.read_bytes for block in self.whole) / each,
            "written_bytes_per_param": sum(block.written_bytes for block in self.whole) / each,
            "peak_rss_bytes": max(block.peak_rss_bytes for block in [*self.whole, *self.phases]),
            "losses": losses,
        }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["contestant"],
        f"{row['step_s']:.3f}",
        row["spread_s"],
        f"{row['step_x_ours']:.2f}",
        f"{row['compute_s']:.3f}",
        f"{row['optimizer_s']:.3f}",
        f"{row['optimizer_x_ours']:.2f}",
        f"{row['read_bytes_per_param']:.1f}",
        f"{row['written_bytes_per_param']:.1f}",
        format_bytes(row["peak_rss_bytes"]),
        f"{row['losses'][0]:.3f} → {row['losses'][-1]:.3f}",
    )


def heats(found: list[Entry], count: int, room: int) -> list[list[Entry]]:
    """Divides the contestants into heats that fit in RAM: one, if it has room for all. Ours, with which the others are
    compared, is in each heat."""
    ours, others = found[0], found[1:]
    parted: list[list[Entry]] = [[ours]]
    for entry in others:
        needed = sum(one.param_bytes * count + BASE_BYTES for one in [*parted[-1], entry])
        if needed > room and len(parted[-1]) > 1:
            parted.append([ours])
        parted[-1].append(entry)
    return parted


def race(job: Job, contestants: list[Contestant], rounds: int) -> list[Score]:
    """Raises: ContestError."""
    scores = {one.name: Score(one, [], []) for one in contestants}
    for number in range(rounds):
        note(f"{job.name}: round {number + 1} of {rounds}")
        for one in turns(contestants, number):
            scores[one.name].whole.append(one.run(job.steps, job.batch, job.seq, fresh_peak=not number))
            scores[one.name].phases.append(one.run(max(1, job.steps // 2), job.batch, job.seq, phases=True))
    return list(scores.values())


@dataclass(frozen=True)
class Result:
    """A race. Attributes: rows: one for each contestant, ours first; left_out: why peers are missing."""

    job: Job
    count: int
    rows: list[dict[str, Any]]
    versions: str
    left_out: list[str]

    @property
    def title(self) -> str:
        model, job = self.job.model, self.job
        return f"GPT of {self.count:,} parameters ({model.layers} x {model.width}), {job.batch} x {job.seq} tokens"

    def remarks(self) -> Iterator[str]:
        """Remarks: whose last loss is not ours, and how far ours is from the targets, beside DeepSpeed's best on
        NVMe."""
        ours = self.rows[0]
        for row in self.rows[1:]:
            if abs(row["losses"][-1] - ours["losses"][-1]) > LOSS_MARGIN * ours["losses"][-1]:
                yield f"{row['contestant']} does not train as ours does: its last loss is {row['losses'][-1]:.3f}"
        yield from (f"left out: {' '.join(words.split())}" for words in self.left_out)
        theirs = [row for row in self.rows if row["contestant"].startswith("DeepSpeed 3, NVMe")]
        if not theirs:
            yield f"{self.job.name}: no DeepSpeed on NVMe to compare with: give --deepspeed"
            return
        for what, reached, wanted in (
            ("whole step", min(row["step_x_ours"] for row in theirs), STEP_TARGET),
            ("optimizer phase", min(row["optimizer_x_ours"] for row in theirs), OPTIMIZER_TARGET),
            ("peak RSS", min(row["peak_rss_bytes"] for row in theirs) / ours["peak_rss_bytes"], RSS_TARGET),
        ):
            yield judged(f"{self.job.name}, {what}, DeepSpeed's best by ours", reached, wanted, is_least=True)


def measure(job: Job, path: Path, rounds: int, deepspeed: str | None, params: str) -> Result:
    """Raises: ContestError."""
    count = parameters(job.model)
    rows: list[dict[str, Any]] = []
    versions: dict[str, None] = {}
    left_out: list[str] = []
    for heat in heats(list(ENTRIES[params](job, deepspeed)), count, free_memory() * 9 // 10):
        shape = (job.batch, job.seq)
        with scratch(path) as folder, started(heat, job.model, shape, folder) as (contestants, missing):
            left_out += missing
            scores = race(job, contestants, rounds)
            versions |= dict.fromkeys(versions_of(contestants).split(", "))
        rows += [score.row(scores[0], count) for score in scores[bool(rows) :]]
    return Result(job, count, rows, ", ".join(versions), left_out)


def draw(results: list[Result], file: Path) -> None:
    """The loss of every contestant at every step; where they agree, the lines lie on each other."""
    figure = new_figure(6.5 * len(results), 4.8)
    for result, axes in zip(results, figure.subplots(1, len(results), squeeze=False)[0], strict=True):
        for number, row in enumerate(result.rows):
            # The first at the bottom and thick, so that those on top do not hide it.
            width = 1.2 + 1.1 * (len(result.rows) - number - 1)
            axes.plot(row["losses"], label=row["contestant"], linewidth=width, alpha=0.75)
        axes.set_title(result.title, fontsize=9)
        axes.set(xlabel="steps done", ylabel="loss of its batch, before the update (nats a byte)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file)


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(JOBS)}, with commas.")] = "46m,368m",
    rounds: Rounds = 5,
    path: Folder = Path(),
    deepspeed: Annotated[str | None, typer.Option(help="A Python that has DeepSpeed.")] = None,
    params: Annotated[str, typer.Option(help=f"Tier of parameters: {' or '.join(ENTRIES)}.")] = "device",
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Race, print the tables, draw the losses."""
    results = [measure(JOBS[name], path, rounds, deepspeed, params) for name in models.split(",")]
    name, title, about = "peers", "Beside peers", ABOUT
    if params == "nvme":
        name, title, about = "peers-params", "Beside peers, with parameters on NVMe", ABOUT + NVME_ABOUT
    if models in JOBS:  # one alone has a page of its own
        name, title = f"{name}-{models}", f"{title}: {JOBS[models].name}"
    Report(
        name=name,
        title=title,
        about=about,
        tables=[Table(HEADINGS, [cells(row) for row in result.rows], result.title) for result in results],
        data={"models": [{"model": one.job.name, "parameters": one.count, "rows": one.rows} for one in results]},
        remarks=[remark for result in results for remark in result.remarks()],
        setup=results[-1].versions,
        pictures={f"{name}.png": partial(draw, results)},
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
