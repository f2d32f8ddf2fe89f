"""Whether the placement that is searched is the best of those that are run: `python bench/search.py [--preset 1b]`.

The machine is probed, `offload plan --search` finds the fastest placement for a model in a memory cgroup, and so many
other placements that fit, drawn at random, are run beside it, each in a process of its own in that cgroup. The one that
was found runs before, amid and after them: that is its spread. Everything keeps fp32 states and one micro-batch a step.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.pretrained import cgroup
from bench.report import Folder, Json, Out, Report, Save, Table, note, run, scratch
from offload import OffloadZero, Tuning
from offload.cli.console import plain_console
from offload.cli.machine import fast_dtype
from offload.cli.plan import default_options
from offload.cli.plan_search import Candidate, searched
from offload.cli.plots import new_figure
from offload.demo.gpt import GPT, PRESETS
from offload.planner.machine_file import find
from offload.sizes import GIB, MIB, format_bytes, parse_bytes

BATCH, SEQ = 1, 64
RESERVED = 768 * MIB
"""Of the cgroup, for Python, torch and its threads, and what the matrix products of a CPU take beside tensors."""
GIVEN = {"states": "fp32", "accumulation": 1, "no_commits": True, "batch": BATCH, "seq": SEQ}
WARM_UP = 1
TIMES = 3
"""How often the placement that was found runs."""
ABOUT = """\
**predicted, measured**: seconds of an iteration; of the placement that was found the median of its runs; **RAM**: what
the plan takes of it, with parameters and activations. What the cgroup had no room for is told."""
HEADINGS = ("placement", "predicted", "measured", "RAM", "disk", "ended")


@dataclass(frozen=True)
class Job:
    """What a child process trains. Attributes: call: of OffloadZero; folder: for the run."""

    preset: str
    call: str
    steps: int
    folder: str


@dataclass
class Contestant:
    """A placement. Attributes: predicted_s: None: it is not predicted; measured_s: of an iteration, a median a run."""

    call: str
    predicted_s: float | None
    cpu_bytes: int
    disk_bytes: int
    measured_s: list[float]
    ended: str = "well"

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured_s) if self.measured_s else float("inf")

    def row(self) -> tuple[str, ...]:
        taken = f"{self.seconds:.3f} s" if self.measured_s else "-"
        sizes = format_bytes(self.cpu_bytes), format_bytes(self.disk_bytes)
        predicted = "-" if self.predicted_s is None else f"{self.predicted_s:.3f} s"
        return self.call, predicted, taken, *sizes, self.ended


def fill(name: str, tensor: Tensor) -> None:
    """Values of a weight. A pattern that is cheap: seconds are measured, not losses."""
    if tensor.dim() < 2:
        tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        return
    row = torch.randn(tensor.shape[-1], generator=torch.Generator().manual_seed(len(name))) / tensor.shape[-1] ** 0.5
    tensor.copy_(row)


def train(job: Job) -> list[float]:
    """Seconds of each iteration after the first ones."""
    model = GPT(PRESETS[job.preset], device="meta")
    optimizer = torch.optim.AdamW(model.parameters())

    def made(model: GPT, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadZero:
        return OffloadZero(model, optimizer, init=fill, **options)

    names = {
        "model": model, "optimizer": optimizer, "OffloadZero": made, "Tuning": Tuning, "PATH": Path(job.folder) / "run",
        "torch": torch,
    }  # fmt: skip
    seconds = []
    with eval(job.call, names) as offloaded:
        end = time.perf_counter()
        for step in range(WARM_UP + job.steps):
            words = torch.randint(0, 256, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
            model(words[:, :-1], words[:, 1:])[1].backward()
            offloaded.step()
            offloaded.zero_grad()
            start, end = end, time.perf_counter()
            seconds.append(end - start)
    return seconds[WARM_UP:]


def run_one(one: Contestant, job: Job, group: Path | None, timeout_s: float) -> None:
    """Runs a placement in a process of its own, and notes how it ended. Its files are removed."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    folder = Path(job.folder)
    free = shutil.disk_usage(folder.parent).free
    if one.disk_bytes > 0.9 * free:
        one.ended = f"not run: {format_bytes(free)} are free on the disk"
        return
    folder.mkdir()
    words = [sys.executable, __file__, "--child", json.dumps(asdict(job))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=enter, timeout=timeout_s)
        if done.returncode == 0:
            one.measured_s.append(statistics.median(json.loads(done.stdout.splitlines()[-1])))
        else:
            one.ended = "killed: out of memory" if done.returncode == -9 else (done.stderr.splitlines() or ["?"])[-1]
    except subprocess.TimeoutExpired:
        one.ended = f"took more than {timeout_s:.0f} s"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def contestants(preset: str, machine: Path, ram: int, others: int, seed: int) -> list[Contestant]:
    """The placement that the search finds, and so many others of those that fit, in an order drawn by `seed`."""
    dtype = fast_dtype()
    options = default_options(
        preset=preset, machine=find(str(machine)), ram=str(ram), dtype=dtype, search=True, goal="fastest", **GIVEN
    )
    found = searched(options, frozenset(GIVEN), plain_console(stderr=True))
    best = found.front.rows[0][0]
    rest = [one for one in found.fitting if one is not best]
    drawn = random.Random(seed).sample(rest, min(others, len(rest)))

    def of(one: Candidate) -> Contestant:
        figures = found.search.figures(one)["predicted"]
        seconds = None if figures is None else figures["seconds"]
        return Contestant(found.search.call(one), seconds, one.sums["cpu_total_bytes"], one.placement.disk_bytes, [])

    return [of(best), *map(of, drawn)]


def draw(ones: Sequence[Contestant]) -> Callable[[Path], None]:
    """Seconds of an iteration, measured by predicted; the placement that was found comes first, with its runs."""

    def to(file: Path) -> None:
        figure = new_figure(6.5, 5)
        axes = figure.add_subplot()
        ran = [one for one in ones if one.measured_s and one.predicted_s is not None]
        ends = [end for one in ran for end in (one.predicted_s or 0.0, *one.measured_s)] or [1.0]
        span = [0.8 * min(ends), 1.25 * max(ends)]
        axes.plot(span, span, color="#555555", linewidth=1, label="as predicted")
        for name, colour, there in (
            ("others", "#4c78a8", [one for one in ran if one is not ones[0]]),
            ("found", "#b8423f", [one for one in ran if one is ones[0]]),
        ):
            predicted = [one.predicted_s or 0.0 for one in there for _ in one.measured_s]
            measured = [seconds for one in there for seconds in one.measured_s]
            axes.scatter(predicted, measured, s=26, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlim=span, ylim=span, title="An iteration of each placement")
        axes.set(xlabel="seconds, predicted", ylabel="seconds, measured")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        figure.savefig(file)

    return to


def judged(best: Contestant, others: Sequence[Contestant]) -> list[str]:
    """Whether none of the others was faster than the placement that was found, but for its spread."""
    ran = [one for one in others if one.measured_s]
    if not best.measured_s or not ran:
        return [f"nothing to compare: the one that was found ended {best.ended}, and {len(ran)} others ran"]
    fastest = min(ran, key=lambda one: one.seconds)
    spread = max(best.measured_s) / min(best.measured_s)
    met = min(best.measured_s) <= fastest.seconds * spread
    return [
        f"found: {best.seconds:.3f} s ({min(best.measured_s):.3f}-{max(best.measured_s):.3f}); the best of {len(ran)} "
        f"others: {fastest.seconds:.3f} s: {'met' if met else 'NOT met'}"
    ]


def main(
    preset: Annotated[str, typer.Option(help="Of the model, as `offload train` has them.")] = "1b",
    memory: Annotated[str, typer.Option(help="Of the cgroup.")] = "3GiB",
    others: Annotated[int, typer.Option(min=1, help="How many other placements run.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Iterations of each that are timed.")] = 3,
    seed: Annotated[int, typer.Option(help="Which others.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one may take.")] = 1800.0,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    path: Folder = Path(),
    as_json: Json = False,
    save: Save = False,
    out: Out = Path("out"),
) -> None:
    """Probe, search, run, print the table."""
    if child:
        print(json.dumps(train(Job(**json.loads(child)))))
        return
    limit = parse_bytes(memory, "--memory")
    with scratch(path) as folder, cgroup(limit) as group:
        machine = folder / "machine.toml"
        probe = "from offload.cli.main import run; run()"
        # What it measures on a machine that may be busy, other plans are not to use.
        own = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        words = [sys.executable, "-c", probe, "probe", str(folder), "--save", str(machine)]
        subprocess.run(words, check=True, env=own, stdout=subprocess.DEVNULL)
        ones = contestants(preset, machine, limit - RESERVED, others, seed)
        best, rest = ones[0], ones[1:]
        turns: list[Contestant] = [best, *rest[: len(rest) // 2], best, *rest[len(rest) // 2 :], best]
        assert turns.count(best) == TIMES
        for number, one in enumerate(turns):
            note(f"{number + 1}/{len(turns)} {one.call}")
            run_one(one, Job(preset, one.call, steps, str(folder / f"{number}")), group, timeout)
        in_what = f"a memory cgroup of {limit / GIB:g} GiB" if group is not None else "NO cgroup, which needs root"
        Report(
            name="search",
            title="The placement that is searched, and others",
            about=ABOUT,
            tables=[Table(HEADINGS, [one.row() for one in ones])],
            data={"contestants": [asdict(one) for one in ones]},
            remarks=judged(best, rest),
            setup=f"{preset}, {BATCH} x {SEQ} tokens, in {in_what}",
            pictures={"search.png": draw(ones)},
        ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
