"""The CPU Adam beside the machine's memory and torch's: `python bench/adam.py [--n 1e6,1e8] [--save]`.

All update the same tensors in the same run, in turns, so that a machine that drifts drifts for all. `limit` moves the
same bytes with the same stores and no arithmetic (kernels/limit.c); `x limit` is the median of the rounds' ratios.

    job     reads                                       writes                      bytes a parameter
    fp32    master, exp_avg, exp_avg_sq, fp32 gradient  the first three             28
    mixed   master, exp_avg, exp_avg_sq, bf16 gradient  the first three, bf16 copy  28
    split   param, low, exp_avg, exp_avg_sq, gradient   low, the moments, param     26
    bf16    the same, with moments of 2 bytes           the same                    18
    8bit    the same, with moments of a byte            the same                    14

The last three have split masters and bf16 gradients, write the parameter over the old one, and have no `limit` and no
counterpart in torch.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import BETAS, DITHERED, EPS, LR, SCALARS, STEP, WEIGHT_DECAY, States, allocate, small_moments
from bench.report import Json, Out, Report, Rounds, Save, Table, note, ratio, run, spread
from offload import native
from offload.cli.plots import new_figure

JOBS = {"fp32": 28, "mixed": 28, "split": 26, "bf16": 18, "8bit": 14 + 4 / 64}
"""Bytes a parameter that each moves."""
LIMIT = "limit"
SAMPLE = 20_000_000
"""Parameters that a timing covers at least: smaller sizes are repeated."""

Step = Callable[[], object]


@dataclass
class Result:
    """One implementation: seconds of a call in each round, and those of the limit in the same rounds (none without C
    kernels)."""

    job: str
    n: int
    threads: int
    contestant: str
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def ns_per_param(self) -> float:
        return statistics.median(self.seconds) / self.n * 1e9

    @property
    def x_limit(self) -> float | None:
        return ratio(self.seconds, self.limits) if self.limits else None

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "n": self.n,
            "threads": self.threads,
            "contestant": self.contestant,
            "ns_per_param": self.ns_per_param,
            "gb_per_s": JOBS[self.job] / self.ns_per_param,
            "x_limit": self.x_limit,
        }

    def row(self) -> tuple[str, ...]:
        return (
            f"{self.job}, n = {self.n:.0e}, {self.threads} threads",
            self.contestant,
            f"{self.ns_per_param:.3f}",
            spread([1e9 * seconds / self.n for seconds in self.seconds]),
            f"{JOBS[self.job] / self.ns_per_param:.1f}",
            "" if self.x_limit is None else f"{self.x_limit:.2f}",
        )


def contestants(states: States, job: str, threads: int) -> dict[str, Step]:
    """The implementations that run on this machine, each called once to warm up."""
    torch.set_num_threads(threads)
    if job in ("split", "bf16", "8bit"):
        return split_contestants(states, job, threads)
    grad, out = (states.grad.float(), None) if job == "fp32" else (states.grad, states.out)
    state = (states.master, states.exp_avg, states.exp_avg_sq)
    calls: dict[str, Step] = {}
    for number, variant in enumerate(native.available_variants()):
        kernels = native.load(threads, variant)
        if number == 0 and variant != "torch":
            calls[LIMIT] = partial(kernels.call, native.LIMIT, *state, grad, out)
        calls[f"offload {variant}"] = partial(kernels.call, native.ADAM, *state, grad, out, scalars=SCALARS)
    calls["torch fused"] = torch_fused(states, grad, out)
    for call in calls.values():
        call()
    states.reset()
    return calls


def split_contestants(states: States, job: str, threads: int) -> dict[str, Step]:
    """The same for split masters. The moments are those of a first step, so that they are ordinary numbers."""
    n, low, param = states.n, allocate(states.n, torch.int16), states.out
    low.zero_()
    param.fill_(0.5)
    calls: dict[str, Step] = {}
    for variant in native.available_variants():
        kernels = native.load(threads, variant)
        if job == "split":
            tensors = (param, low, states.exp_avg, states.exp_avg_sq, states.grad, param)
            calls[f"offload {variant}"] = partial(kernels.call, native.ADAM_SPLIT, *tensors, scalars=SCALARS)
            continue
        small = (low, param, *small_moments(n, job), states.grad, param)
        calls[f"offload {variant}"] = partial(kernels.call, native.ADAM_DITHERED, *small, scalars=DITHERED)
    for call in calls.values():
        call()
    return calls


def torch_fused(states: States, grad: Tensor, out: Tensor | None) -> Step:
    """torch's fused AdamW. It has no 16-bit gradients and copies, so in the mixed job it casts into buffers made
    beforehand."""
    parameter = torch.nn.Parameter(states.master)
    parameter.grad = grad32 = grad if out is None else allocate(states.n, torch.float32)
    optimizer = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    moments = {"exp_avg": states.exp_avg, "exp_avg_sq": states.exp_avg_sq}
    optimizer.state[parameter] = {"step": torch.tensor(float(STEP)), **moments}

    def mixed() -> None:
        grad32.copy_(states.grad)
        optimizer.step()
        states.out.copy_(states.master)

    return optimizer.step if out is None else mixed


def race(states: States, job: str, threads: int, rounds: int) -> list[Result]:
    """Runs all in every round, in another order each time."""
    calls = contestants(states, job, threads)
    results = {name: Result(job, states.n, threads, name) for name in calls}
    repeats = max(1, SAMPLE // states.n)
    order, shuffle = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            if repeats > 1:
                calls[name]()  # a small size finds the cache as it leaves it itself
            start = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            results[name].seconds.append((time.perf_counter() - start) / repeats)
            if name == LIMIT:
                states.reset()  # it shuffles the states
    for result in results.values():
        result.limits = results[LIMIT].seconds if LIMIT in results else []
    return list(results.values())


def draw(results: list[Result], file: Path) -> None:
    """A panel for each job, size and number of threads; a bar for each implementation."""
    panels: dict[str, list[Result]] = {}
    for result in results:
        panels.setdefault(result.row()[0], []).append(result)
    figure = new_figure(12, 3.5 * len(panels))
    for axes, (title, panel) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        panel.sort(key=lambda result: result.ns_per_param, reverse=True)
        colors = ["tab:gray" if r.contestant == LIMIT else "tab:blue" for r in panel]
        bars = axes.barh([r.contestant for r in panel], [r.ns_per_param for r in panel], color=colors)
        axes.bar_label(bars, [f"{r.ns_per_param:.2f} ({r.row()[-1]} x limit)" for r in panel], padding=3)
        axes.set(title=title, xlabel="ns a parameter")
        axes.margins(x=0.3)
    figure.savefig(file)


def main(
    n: Annotated[str, typer.Option(help="Parameters; several with commas.")] = "1e8",
    threads: Annotated[str, typer.Option(help="Threads, likewise; 'all' is every usable CPU.")] = "1,all",
    jobs: Annotated[str, typer.Option(help=f"Of {', '.join(JOBS)}, with commas.")] = ",".join(JOBS),
    rounds: Rounds = 9,
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure, print the table, draw the chart."""
    results: list[Result] = []
    for size in map(float, n.split(",")):
        states = States(int(size))
        for count in map(int, threads.replace("all", str(native.usable_cpus())).split(",")):
            for job in jobs.split(","):
                note(f"{job}, n = {size:.0e}, {count} threads, {rounds} rounds")
                results += race(states, job, count, rounds)
    headings = ("job", "implementation", "ns/param", "fastest-slowest", "GB/s", "x limit")
    Report(
        name="adam",
        title="CPU Adam",
        about="`x limit`: the median of the rounds' times by those of the limit, which moves the same bytes without "
        "arithmetic.",
        tables=[Table(headings, [result.row() for result in results])],
        data={"results": [result.as_json() for result in results]},
        pictures={"adam.png": partial(draw, results)},
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
