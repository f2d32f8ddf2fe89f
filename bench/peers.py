"""Whole training steps beside DeepSpeed's: `python bench/peers.py --deepspeed PYTHON` (`make bench-peers-step`).

The same GPT, initial values and batches of text for everyone: offload and DeepSpeed with the optimizer states on NVMe;
both with them in RAM, and plain torch with resident fp32 masters, as points of reference. With `--params nvme` the
parameters are on NVMe, too, and the gradients. Each is a process of its own, one runs at a time, and they take turns
block by block; what is timed is said in bench/trainer.py. PYTHON is an interpreter that has DeepSpeed
(`make .venv-peers/installed` makes one); its extensions are compiled at their first use (minutes; needs a C++ compiler
and libaio's headers).
"""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import (
    RESULTS,
    Block,
    Contestant,
    Entry,
    Grid,
    Say,
    hardware,
    paired,
    parameters,
    scratch,
    started,
    turns,
    versions_of,
)
from offload.models.gpt import GPT, GPTConfig
from offload.planner.machine import free_memory
from offload.sizes import MIB, format_bytes

OURS = "offload, NVMe"
CHUNK_BYTES = 16 * MIB
BUFFERS = {"device": 1, "nvme": 2}
"""Chunks in RAM beyond the least that works, by where parameters are; as `offload bench step` has it."""
AIO: dict[str, Any] = {"queue_depth": 32, "single_submit": False, "overlap_events": True}
BASE_BYTES = 600 * MIB
"""Of RAM, about: a process without its states."""
LOSS_MARGIN = 0.02
"""Of a loss: more than roundings at another place bring about in so few steps."""
STEP_TARGET, OPTIMIZER_TARGET = 1.5, 2.0

HEAD = """# {title}

{hardware}; {versions}.

`{command}`

- **step**: a block of {steps} by their number, from where one step returns to where the last one does; **spread**:
  fastest and slowest block. **f + b**: forward and backward until the last gradient is made; **optimizer**: from there
  until the new parameters can be read and nothing is under way; both from other blocks, in which every step waits for
  that. Medians over the rounds.
- **x ours**: the median over the rounds of the contestant's time by that of `{ours}` in the same round.
- **read, written**: bytes a parameter and step, as the kernel counted them for the process.
- **peak RSS**: of the process in the timed steps, and from its start on (building the model in fp32 takes part).
- Same initial values (rounded to bf16), same text, AdamW without clipping, bf16. One process runs at a time, everyone
  in turn.
{note}
"""


@dataclass(frozen=True)
class Job:
    """A model, tokens a step as batch x seq, and how many timed steps make a block."""

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


@dataclass(frozen=True)
class Score:
    """A contestant's part of a race: blocks for whole steps, and for phases, by round."""

    one: Contestant
    whole: list[Block]
    phases: list[Block]

    @property
    def steps_s(self) -> list[float]:
        return [block.step_s for block in self.whole]

    @property
    def optimizers_s(self) -> list[float]:
        return [statistics.mean(block.optimizer_s) for block in self.phases]

    @property
    def computes_s(self) -> list[float]:
        return [block.compute_s for block in self.phases]

    @property
    def peak_rss_bytes(self) -> int:
        return max(block.peak_rss_bytes for block in [*self.whole, *self.phases])

    @property
    def losses(self) -> list[float]:
        return [loss for block in self.one.blocks for loss in block.losses]

    def moved_bytes(self, count: int) -> tuple[float, float]:
        """Read and written, a parameter and step."""
        each = count * sum(block.trained for block in self.whole)
        read = sum(block.read_bytes for block in self.whole)
        return read / each, sum(block.written_bytes for block in self.whole) / each


def entries(job: Job, deepspeed: str | None) -> Iterator[Entry]:
    """Everyone, ours first.

    DeepSpeed on NVMe twice. Small groups: requests as were its best in bench/results/io.md, sub-groups of a few
    parameters, which takes it little RAM. Large requests: larger than any gradient, which it then keeps in RAM
    and does not swap; all parameters in one sub-group, its default (it crashes on sub-groups smaller than a request).
    """
    yield Entry(OURS, "offload", {"tier": "nvme", "chunk": CHUNK_BYTES, "buffers": BUFFERS["device"]}, param_bytes=10)
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
    """Everyone whose parameters and gradients are on NVMe, ours first.

    DeepSpeed twice, with requests of a MiB (parameters smaller than that, or than a request, it leaves in RAM) and with
    sub-groups and buckets as take it least RAM; of 50M elements each, a step took it longer. Few buffers: its default
    number of them. Pipelined: states read and written while others are computed, and parameters of more than two layers
    read ahead. What it keeps for reuse would hold buffers, which run out; so it keeps none.
    """
    tiers = {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme"}
    yield Entry(OURS, "offload", tiers | {"chunk": CHUNK_BYTES, "buffers": BUFFERS["nvme"]}, param_bytes=10)
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


@dataclass(frozen=True)
class Kind:
    """A kind of race. on_nvme: what offload and DeepSpeed have there; title, file, note: of its page."""

    on_nvme: str
    title: str
    file: str
    entries: Callable[[Job, str | None], Iterator[Entry]]
    note: str = ""


NOTE = "- Gradients are on NVMe as well, ours in bf16, DeepSpeed's in fp32; it leaves parameters below a MiB in RAM.\n"
KINDS = {
    "device": Kind("states", "Beside peers", "peers", entries),
    "nvme": Kind(
        "states and parameters", "Beside peers, with parameters on NVMe", "peers-params", entries_with_params, NOTE
    ),
}
"""By the tier of parameters."""


def heats(found: list[Entry], count: int, room: int) -> list[list[Entry]]:
    """Everyone at once if RAM has room, else as many as it has, with ours, whom all are compared with, in each."""
    ours, others = found[0], found[1:]
    parted: list[list[Entry]] = []
    for entry in others:

        def holds(heat: list[Entry], entry: Entry = entry) -> bool:
            return sum(one.param_bytes * count + BASE_BYTES for one in [*heat, entry]) <= room

        heat = next(filter(holds, parted), None)
        if heat is None:
            heat = [ours]
            parted.append(heat)
        heat.append(entry)
    return parted or [[ours]]


def race(job: Job, contestants: list[Contestant], rounds: int, say: Say) -> list[Score]:
    """Raises: ContestError."""
    scores = [Score(one, [], []) for one in contestants]
    by_name = {score.one.name: score for score in scores}
    for number in range(rounds):
        say(f"{job.name}: round {number + 1} of {rounds}")
        for one in turns(contestants, number):
            score = by_name[one.name]
            score.whole.append(one.run(job.steps, job.batch, job.seq, fresh=not number))
            score.phases.append(one.run(max(1, job.steps // 2), job.batch, job.seq, phases=True))
    return scores


@dataclass(frozen=True)
class Result:
    """A race's rows, one for each contestant, ours first; losses by contestant; peers that could not run, and why."""

    job: Job
    count: int
    rows: list[dict[str, Any]]
    losses: dict[str, list[float]]
    versions: str
    left_out: list[str]
    kind: Kind = KINDS["device"]

    def met(self) -> Iterator[str]:
        """Who came to another loss, and how far ours is from the targets, against DeepSpeed's best on NVMe."""
        ours = self.rows[0]
        for row in self.rows[1:]:
            if abs(row["loss_last"] - ours["loss_last"]) > LOSS_MARGIN * ours["loss_last"]:
                yield f"{row['contestant']} trains otherwise: its last loss is {row['loss_last']:.3f}"
        theirs = [row for row in self.rows if row["contestant"].startswith("DeepSpeed 3, NVMe")]
        if not theirs:
            yield f"no DeepSpeed with {self.kind.on_nvme} on NVMe to compare with: give --deepspeed"
            return
        step, optimizer = (min(row[key] for row in theirs) for key in ("step_x_ours", "optimizer_x_ours"))
        rss, best = min(row["peak_rss_bytes"] for row in theirs), f"DeepSpeed's best with {self.kind.on_nvme} on NVMe"
        for what, reached, wanted in (
            ("whole step", step, STEP_TARGET),
            ("optimizer phase", optimizer, OPTIMIZER_TARGET),
            ("peak RSS", rss / ours["peak_rss_bytes"], 1.0),
        ):
            word = "met" if reached >= wanted else "NOT met"
            yield f"{what}: {reached:.2f} x less than {best}, wanted {wanted:g}: {word}"

    def grid(self) -> Grid:
        headings = ("contestant", "step s", "spread", "x ours", "f + b s", "optimizer s", "x ours", "read", "written")
        more = ("peak RSS", "from start", "loss")
        return Grid(headings + more, [_cells(row) for row in self.rows])

    @property
    def title(self) -> str:
        job = self.job
        return (
            f"GPT of {self.count:,} parameters ({job.model.layers} x {job.model.width}), {job.batch} x {job.seq} tokens"
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["step_spread_s"]
    return (
        row["contestant"],
        f"{row['step_s']:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{row['step_x_ours']:.2f}",
        f"{row['compute_s']:.3f}",
        f"{row['optimizer_s']:.3f}",
        f"{row['optimizer_x_ours']:.2f}",
        f"{row['read_bytes_per_param']:.1f}",
        f"{row['written_bytes_per_param']:.1f}",
        format_bytes(row["peak_rss_bytes"]),
        format_bytes(row["most_rss_bytes"]),
        f"{row['loss_first']:.3f} → {row['loss_last']:.3f}",
    )


def row_of(score: Score, ours: Score, count: int) -> dict[str, Any]:
    read, written = score.moved_bytes(count)
    return {
        "contestant": score.one.name,
        "step_s": statistics.median(score.steps_s),
        "step_spread_s": (min(score.steps_s), max(score.steps_s)),
        "step_x_ours": paired(ours.steps_s, score.steps_s),
        "compute_s": statistics.median(score.computes_s),
        "optimizer_s": statistics.median(score.optimizers_s),
        "optimizer_x_ours": paired(ours.optimizers_s, score.optimizers_s),
        "read_bytes_per_param": read,
        "written_bytes_per_param": written,
        "peak_rss_bytes": score.peak_rss_bytes,
        "most_rss_bytes": score.one.most_rss_bytes,
        "loss_first": score.losses[0],
        "loss_last": score.losses[-1],
    }


def measure(job: Job, path: Path, rounds: int, deepspeed: str | None, say: Say, kind: Kind) -> Result:
    """Raises: ContestError."""
    count = parameters(job.model)
    rows: list[dict[str, Any]] = []
    losses: dict[str, list[float]] = {}
    versions: dict[str, None] = {}
    left_out: list[str] = []
    for heat in heats(list(kind.entries(job, deepspeed)), count, free_memory() * 9 // 10):
        shape = (job.batch, job.seq)
        with scratch(path) as folder, started(heat, job.model, shape, folder, say) as (contestants, missing):
            left_out += missing
            scores = race(job, contestants, rounds, say)
            versions |= dict.fromkeys(versions_of(contestants).split(", "))
        found = [row_of(score, scores[0], count) for score in scores]
        rows += found[1:] if rows else found
        losses = {score.one.name: score.losses for score in scores} | losses
    return Result(job, count, rows, losses, ", ".join(versions), left_out, kind)


def draw(results: list[Result], picture: Path) -> None:
    """The loss of every contestant at every step; where they agree, the lines lie on each other."""
    figure = Figure(figsize=(6.5 * len(results), 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for result, axes in zip(results, figure.subplots(1, len(results), squeeze=False)[0], strict=True):
        for number, (name, losses) in enumerate(result.losses.items()):
            # The first at the bottom and thick, so that those on top do not hide it.
            width = 1.2 + 1.1 * (len(result.losses) - number - 1)
            axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=width, alpha=0.75)
        axes.set_title(result.title, fontsize=9)
        axes.set_xlabel("step")
        axes.set_ylabel("loss of its batch, before the update (nats a byte)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def markdown(results: list[Result], command: str) -> str:
    found = dict.fromkeys(part for result in results for part in result.versions.split(", "))
    steps = " or ".join(f"{result.job.steps} steps ({result.job.name})" for result in results)
    kind = results[0].kind
    about = {"title": kind.title, "note": kind.note, "steps": steps, "ours": OURS}
    text = HEAD.format(hardware=hardware(), versions=", ".join(found), command=command, **about)
    for result in results:
        lines = [f"## {result.title}", "", *result.grid().markdown(), "", *(f"- {line}" for line in result.met())]
        for words in result.left_out:
            lines += ["", "Left out:", "", *(f"    {line}" for line in words.splitlines())]
        text += "\n".join(lines) + "\n\n"
    return text + f"![loss by step]({kind.file}.png)\n"


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(JOBS)}, with commas.")] = "46m,368m",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    path: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    deepspeed: Annotated[str | None, typer.Option(help="A Python that has DeepSpeed.")] = None,
    params: Annotated[str, typer.Option(help=f"Tier of parameters: {' or '.join(KINDS)}.")] = "device",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    save: Annotated[bool, typer.Option(help="Write the page and the picture in bench/results.")] = False,
) -> None:
    """Race, print the tables, draw the losses."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, stderr = Console(width=170), Console(stderr=True)
    chosen = [JOBS[name] for name in models.split(",")]
    kind = KINDS[params]
    results = [measure(job, path, rounds, deepspeed, stderr.print, kind) for job in chosen]
    draw(results, (RESULTS if save else out) / f"{kind.file}.png")
    if as_json:
        print(
            json.dumps(
                [{"model": r.job.name, "parameters": r.count, "rows": r.rows, "losses": r.losses} for r in results]
            )
        )
    else:
        console.print(f"{hardware()}; {', '.join(r.versions for r in results[-1:])}")
        for result in results:
            result.grid().show(console, result.title)
            for line in result.met():
                console.print(line, highlight=False)
    if save:
        command = "python bench/peers.py " + shlex.join(sys.argv[1:])
        (RESULTS / f"{kind.file}.md").write_text(markdown(results, command))


if __name__ == "__main__":
    typer.run(main)
