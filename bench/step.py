"""A whole step on the NVMe tier beside its limits: `python bench/step.py [--n 3e8] [--save]`.

`step(); synchronize()` with RAM for several shares of the optimizer states. Its limit, measured in the same rounds, is
the larger of

    disk    the bytes that the step moved, through the same engine, reading and writing at once, nothing computed
    kernel  Adam on as many states in RAM, in the form of --states, with whole masters

With --commit-every N, two optimizers take turns instead: one with a commit every N steps, one without any. The limit is
the step without commits plus the time in which the disk alone writes what the commits wrote. With --resume, a committed
run is resumed instead; the limit is reading its states once.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import Adam, Disk
from bench.report import Folder, Json, Out, Report, Rounds, Save, Table, judged, note, ratio, run, scratch, spread
from offload import OffloadZero, Tuning
from offload.cli.plots import new_figure
from offload.planner.explain import plan_of
from offload.sizes import format_bytes

WIDTHS = (2048, 1024, 512, 256)
"""Of the layers, each of which is a chunk: the widest that gives LEAST_CHUNKS is taken."""
LEAST_CHUNKS = 256
PREFETCH = 6
"""Chunks read ahead; fewer where they would be a good part of all chunks."""
ABOUT = """\
`step(); synchronize()` on the NVMe tier. `states`: the share that `cpu_memory` has room for, beside gradients and
buffers in flight. `bytes a parameter`: read and written in a step. `disk alone`: as many bytes through the same engine,
reading and writing at once with nothing computed; `Adam alone`: the kernel on as many states in RAM. `x limit`: the
median of the rounds' times by the larger of both. Times are medians."""
COMMITS_ABOUT = """\
`step(); synchronize()` on the NVMe tier with commits, in turns with the same without. `flushed a parameter`: bytes a
step that commits write beyond the step's own; `flushing alone`: writing as many through the same engine. `x limit`: the
median of the rounds' times by the sum of `without commits` and `flushing alone`. Times are medians."""
RESUME_ABOUT = """\
`OffloadZero(..., resume=True)` of a committed run, until it returns; building the model is not in it. `reading alone`:
the states' bytes, once, through the same engine into memory that is there already. `x limit`: the median of the rounds'
ratios. Times are medians."""


def layers(count: int, width: int, device: str = "cpu") -> nn.Module:
    """A model of `count` units with width x width parameters each. With chunks of that size each unit is one chunk."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    if device != "meta":
        model = model.to_empty(device=device)
        for param in model.parameters():
            nn.init.normal_(param, std=width**-0.5)
    return model


@dataclass(frozen=True)
class Case:
    """One run: `share` of the optimizer states fits in `cpu_memory`, beside gradients and buffers in flight.

    Attributes: count, width: see `layers`; streamed, length: how many chunks a step moves each way, and bytes of each.
    """

    share: float
    split_master: bool
    count: int
    width: int
    cpu_memory: int
    streamed: int
    length: int
    states: str = "fp32"

    @property
    def n(self) -> int:
        return self.count * self.width**2

    @property
    def name(self) -> str:
        form = "" if self.states == "fp32" else f", {self.states}"
        return f"{self.share:.0%} in RAM{', split master' * self.split_master}{form}"


def tuning_of(count: int, width: int, split_master: bool) -> Tuning:
    ahead = min(PREFETCH, count // 16)
    return Tuning(chunk=4 * width**2, prefetch_chunks=ahead, split_master=split_master)


def cases_of(
    n: int, shares: Sequence[float], *, split_master: bool, commit_every: int | None, states: str = "fp32"
) -> Iterator[Case]:
    """What will run, planned before anything is allocated. Raises: ConfigError, BudgetError."""
    width = next((width for width in WIDTHS if n >= LEAST_CHUNKS * width**2), WIDTHS[-1])
    count = max(1, round(n / (4 * width**2))) * 4  # a quarter of the states is a whole number of chunks
    model = layers(count, width, "meta")
    for share, split in [*((share, False) for share in shares), *([(0.0, True)] * split_master)]:
        tuning = tuning_of(count, width, split)
        options: dict[str, Any] = {"commit_every": commit_every, "tuning": tuning, "states": states}
        planned = plan_of(model, direct=True, tier="nvme", path=".", **options)
        memory = planned.cpu_memory_for(share)
        streamed = len(planned.with_memory(memory).place().states.streamed)
        yield Case(share, split, count, width, memory, streamed, planned.needs.states[0].nbytes, states)


class Subject:
    """OffloadZero on the NVMe tier, with its swap files in `path`, which are removed at the end.

    The gradients are one tensor for all layers, collected before the clock runs: nothing but the step is timed.
    """

    def __init__(self, case: Case, path: Path, commit_every: int | None) -> None:
        self._path = path
        self.optimizer = OffloadZero(
            layers(case.count, case.width),
            tier="nvme",
            path=path,
            cpu_memory=case.cpu_memory,
            commit_every=commit_every,
            states=case.states,
            tuning=tuning_of(case.count, case.width, case.split_master),
        )
        self._params: list[Tensor] = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._grad = torch.randn(case.width, case.width, dtype=torch.bfloat16)

    def run(self) -> tuple[float, int]:
        """Makes a step. Returns: its seconds until nothing is under way any more, and the bytes that it moved on the
        disk."""
        for param in self._params:
            param.grad = self._grad
        self.optimizer.grad(self._params[0])  # the gradients are in RAM before the step, as after a backward
        before = self._moved_bytes()
        start = perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        return perf_counter() - start, self._moved_bytes() - before

    def _moved_bytes(self) -> int:
        self.optimizer.synchronize()
        stats = self.optimizer.stats()
        return int(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])

    def close(self) -> None:
        self.optimizer.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._params.clear()
        del self.optimizer
        gc.collect()  # model and optimizer hold each other


@dataclass(frozen=True)
class Result:
    """The result of one case, by round: seconds and bytes of a step, and the seconds of each part of its limit, by
    name.

    Attributes: bound: how the limit follows from its parts: their maximum, or their sum.
    """

    case: Case
    bound: Callable[[Sequence[float]], float]
    parts: dict[str, list[float]]
    step_s: list[float] = field(default_factory=list)
    moved_bytes: list[float] = field(default_factory=list)

    def add(self, step_s: float, moved_bytes: float, *parts_s: float) -> None:
        """Adds a round."""
        self.step_s.append(step_s)
        self.moved_bytes.append(moved_bytes)
        for values, seconds in zip(self.parts.values(), parts_s, strict=True):
            values.append(seconds)

    @property
    def x_limit(self) -> float:
        return ratio(self.step_s, [self.bound(parts) for parts in zip(*self.parts.values(), strict=True)])

    @property
    def bytes_per_param(self) -> float:
        return statistics.fmean(self.moved_bytes) / self.case.n

    def as_json(self) -> dict[str, Any]:
        return {
            "budget": self.case.share,
            "split_master": self.case.split_master,
            "states": self.case.states,
            "cpu_memory": self.case.cpu_memory,
            "bytes_per_param": self.bytes_per_param,
            "step_s": statistics.median(self.step_s),
            "x_limit": self.x_limit,
            "rounds": {"step": self.step_s, **self.parts},
        }

    def row(self) -> tuple[str, ...]:
        parts = (f"{statistics.median(seconds):.3f}" for seconds in self.parts.values())
        step = (f"{statistics.median(self.step_s):.3f}", spread(self.step_s))
        memory = format_bytes(self.case.cpu_memory)
        return (self.case.name, memory, f"{self.bytes_per_param:.2f}", *step, *parts, f"{self.x_limit:.3f}")


def beside_limits(cases: Sequence[Case], folder: Path, rounds: int) -> tuple[list[Result], str]:
    """Measures every case and both limits. Returns: the results, and what the limits were measured with."""
    most = max(cases, key=lambda case: case.streamed)
    results = []
    with (
        closing(Adam(most.n, most.width**2, most.states)) as adam,
        closing(Disk(folder, max(most.streamed, 1), most.length)) as disk,
    ):
        disk.search()
        for case in cases:
            note(f"{case.name}: {rounds} rounds")
            result = Result(case, max, {"disk alone": [], "Adam alone": []})
            # Drives drift within seconds: the limit is the mean of what the disk takes right before and after a step.
            after_s = disk.run(case.streamed)
            with closing(Subject(case, folder / "swap", None)) as subject:
                for number in range(1 + rounds):
                    seconds, nbytes = subject.run()
                    before_s, after_s, adam_s = after_s, disk.run(case.streamed), adam.run()
                    if number:  # the first round warms up
                        disk_s = disk.seconds_for(nbytes, (before_s + after_s) / 2, case.streamed)
                        result.add(seconds, nbytes, disk_s, adam_s)
            results.append(result)
        return results, f"{adam.setup}, {disk.setup}"


def beside_plain(cases: Sequence[Case], every: int, folder: Path, rounds: int) -> tuple[list[Result], str]:
    """Measures every case with a commit every `every` steps, and without any. Returns: the results, and what the disk
    was measured with."""
    results = []
    with closing(Disk(folder, cases[0].count, cases[0].length)) as disk:
        for case in cases:
            note(f"{case.name}: {rounds} rounds")
            result = Result(case, sum, {"without commits": [], "flushing alone": []})
            with ExitStack() as stack:
                commits = {"plain": None, "committing": every}
                subjects = [stack.enter_context(closing(Subject(case, folder / k, v))) for k, v in commits.items()]
                for number in range(-2, rounds):  # two rounds warm up: both versions of each slot are written once
                    means = {}
                    for one in subjects if number % 2 else subjects[::-1]:
                        steps = [one.run() for _ in range(every)]  # just one of them makes a commit
                        means[one] = [statistics.fmean(values) for values in zip(*steps, strict=True)]
                    (plain_s, plain_bytes), (seconds, nbytes) = (means[one] for one in subjects)
                    flushed = max(nbytes - plain_bytes, 0.0)
                    count = min(-(-int(flushed) // disk.length), disk.count)
                    write_s = disk.run(count, ways=("write",)) * flushed / (max(count, 1) * disk.length)
                    if number >= 0:
                        result.add(seconds, flushed, plain_s, write_s)
            results.append(result)
        return results, disk.setup


def beside_reading(cases: Sequence[Case], folder: Path, rounds: int) -> tuple[list[Result], str]:
    """Measures resuming a run with every budget, and reading its states once. Returns: the results, and what the disk
    was measured with."""
    results = [Result(case, max, {"reading alone": []}) for case in cases]
    committed = Subject(cases[0], folder / "run", 0)
    committed.run()
    committed.optimizer.commit()
    committed.optimizer.close()
    with closing(Disk(folder, cases[0].count, cases[0].length)) as disk:
        for number in range(-1, rounds):  # the first round warms up
            note(f"round {number + 1} of {rounds}")
            for result in results:
                read_s, seconds = disk.run(ways=("read",)), resume(result.case, folder / "run")
                if number >= 0:
                    result.add(seconds, disk.count * disk.length, (read_s + disk.run(ways=("read",))) / 2)
        return results, disk.setup


def resume(case: Case, path: Path) -> float:
    """Seconds of making the optimizer from a commit; building the model does not count."""
    model, tuning = layers(case.count, case.width), tuning_of(case.count, case.width, case.split_master)
    start = perf_counter()
    optimizer = OffloadZero(
        model,
        tier="nvme",
        path=path,
        cpu_memory=case.cpu_memory,
        commit_every=0,
        resume=True,
        states=case.states,
        tuning=tuning,
    )
    seconds = perf_counter() - start
    optimizer.close()
    return seconds


def draw(results: Sequence[Result], file: Path) -> None:
    """Time by share of the states in RAM, with what bounds it."""
    figure = new_figure(9, 5)
    times = figure.subplots()
    names = [one.case.name.replace(", ", "\n") for one in results]
    for part in results[0].parts:
        times.plot(names, [statistics.median(one.parts[part]) for one in results], "_", markersize=12, label=part)
    middle = [statistics.median(one.step_s) for one in results]
    below = [mid - min(one.step_s) for mid, one in zip(middle, results, strict=True)]
    above = [max(one.step_s) - mid for mid, one in zip(middle, results, strict=True)]
    times.errorbar(names, middle, [below, above], fmt="o", capsize=3, label="measured, fastest to slowest")
    for name, mid, one in zip(names, middle, results, strict=True):
        times.annotate(f"{one.x_limit:.2f}", (name, mid), xytext=(8, 4), textcoords="offset points")
    times.set(ylabel="seconds", title="Medians; the number is x limit", ylim=(0, None))
    times.margins(x=0.12)
    times.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.savefig(file)


@dataclass(frozen=True)
class Mode:
    """What is measured. Attributes: moved: heading of the column of bytes a parameter; target: for the ratio to the
    limit."""

    title: str
    moved: str
    target: float
    about: str


MODES = {
    "step": Mode("A whole step", "moved a parameter", 1.05, ABOUT),
    "commits": Mode("A step with commits", "flushed a parameter", 1.03, COMMITS_ABOUT),
    "resume": Mode("Resuming", "read a parameter", 1.7, RESUME_ABOUT),
}
"""By name of the page."""


def main(
    n: Annotated[str, typer.Option(help="Parameters.")] = "46e6",
    rounds: Rounds = 5,
    path: Folder = Path(),
    budgets: Annotated[str, typer.Option(help="Shares of the states that RAM has room for.")] = "0,0.25,0.5,0.75,1",
    split_master: Annotated[bool, typer.Option(help="One more run at budget 0, with a split master.")] = True,
    states: Annotated[str, typer.Option(help="How Adam keeps its moments: fp32, bf16 or 8bit.")] = "fp32",
    commit_every: Annotated[int | None, typer.Option(min=1, help="Measure commits every so many steps.")] = None,
    resuming: Annotated[bool, typer.Option("--resume", help="Measure resuming.")] = False,
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure, print the table, draw the picture."""
    shares, commits = [float(share) for share in budgets.split(",")], 0 if resuming else commit_every
    splits = split_master and not resuming
    cases = list(cases_of(int(float(n)), shares, split_master=splits, commit_every=commits, states=states))
    with scratch(path) as folder:
        if resuming:
            name, (results, setup) = "resume", beside_reading(cases, folder, rounds)
        elif commit_every:
            name, (results, setup) = "commits", beside_plain(cases, commit_every, folder, rounds)
        else:
            name, (results, setup) = "step", beside_limits(cases, folder, rounds)
    mode = MODES[name]
    headings = ("states", "cpu_memory", mode.moved, "seconds", "fastest-slowest", *results[0].parts, "x limit")
    title = f"{cases[0].n:,} parameters in {cases[0].count} chunks"
    Report(
        name=name,
        title=mode.title,
        about=mode.about,
        tables=[Table(headings, [result.row() for result in results], title)],
        data={"parameters": cases[0].n, "chunks": cases[0].count, "runs": [result.as_json() for result in results]},
        remarks=[judged(f"x limit, {result.case.name}", result.x_limit, mode.target) for result in results],
        setup=setup,
        pictures={f"{name}.png": partial(draw, results)},
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
