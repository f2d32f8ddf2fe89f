"""Steps of optimizers on pieces beside plain torch's and memory: `python bench/rules.py [--n 8e6] [--save]`.

A rule steps pieces of a master as a run does (offload/optim/rules/torch_rule.py). In the same rounds torch's own class
steps the whole as one parameter, and `limit` moves the same bytes through RAM with next to no arithmetic: it adds the
gradient to one array, and negates each of the others in place. AdamW by the C kernel comes first. All with fp32
gradients.

    bytes an element   of the gradient 4; of the master and of each array 8, read and written
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import allocate
from bench.report import Json, Report, Rounds, Save, Table, note, ratio, run, spread
from offload import native
from offload.optim.adopt import rules_of
from offload.optim.rule import Rule, SegmentMemory, Span

o = torch.optim
MAKES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": o.AdamW,
    "SGD": lambda params: o.SGD(params, lr=1e-4),
    "SGD momentum": lambda params: o.SGD(params, lr=1e-4, momentum=0.9),
    "SGD momentum, fused": lambda params: o.SGD(params, lr=1e-4, momentum=0.9, fused=True),
    "AdamW amsgrad": lambda params: o.AdamW(params, amsgrad=True),
    "AdamW amsgrad, fused": lambda params: o.AdamW(params, amsgrad=True, fused=True),
    "RMSprop": lambda params: o.RMSprop(params, lr=1e-4),
    "Adagrad": lambda params: o.Adagrad(params, lr=1e-4),
    "Adagrad, fused": lambda params: o.Adagrad(params, lr=1e-4, fused=True),
    "Adadelta": o.Adadelta,
    "NAdam": lambda params: o.NAdam(params, lr=1e-4),
    "RAdam": lambda params: o.RAdam(params, lr=1e-4),
    "Adamax": lambda params: o.Adamax(params, lr=1e-4),
    "ASGD": lambda params: o.ASGD(params, lr=1e-4),
    "Rprop": lambda params: o.Rprop(params, lr=1e-4),
}
"""The optimizers. The first one is stepped by the C kernel."""


@dataclass
class Result:
    """One optimizer: seconds of a step in each round, on pieces, of plain torch, and of the limit."""

    name: str
    n: int
    threads: int
    nbytes: int
    block: int | None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"pieces": [], "torch": [], "limit": []})

    def ns(self, what: str) -> float:
        return statistics.median(self.seconds[what]) / self.n * 1e9

    def as_json(self) -> dict[str, Any]:
        return {
            "optimizer": self.name,
            "n": self.n,
            "threads": self.threads,
            "block": self.block,
            "bytes_per_element": self.nbytes,
            "ns_pieces": self.ns("pieces"),
            "ns_torch": self.ns("torch"),
            "ns_limit": self.ns("limit"),
            "x_torch": ratio(self.seconds["pieces"], self.seconds["torch"]),
            "x_limit": ratio(self.seconds["pieces"], self.seconds["limit"]),
        }

    def row(self) -> tuple[str, ...]:
        figures = self.as_json()
        return (
            f"{self.name}, {self.threads} threads",
            "C kernel" if self.block is None else f"{self.block:,}",
            f"{self.ns('pieces'):.2f}",
            spread([1e9 * seconds / self.n for seconds in self.seconds["pieces"]], 2),
            f"{self.ns('torch'):.2f}",
            spread([1e9 * seconds / self.n for seconds in self.seconds["torch"]], 2),
            str(self.nbytes),
            f"{self.ns('limit'):.2f}",
            f"{figures['x_torch']:.2f}",
            f"{figures['x_limit']:.2f}",
        )


class Pieces:
    """A rule over n elements in memory like a run's.

    Args:
        rule: the rule, of a parameter that was never stepped.
        group: its options.
        grad: (n,) fp32.
        kernels: whose threads step it.
    """

    def __init__(self, rule: Rule, group: dict[str, Any], grad: Tensor, kernels: native.Kernels) -> None:
        self._rule, self._group, self._kernels, self._progress = rule, group, kernels, rule.initial
        n = len(grad)
        arrays = [allocate(n, torch.float32).fill_(start) for start in (0.5, *(kind.starts for kind in rule.states))]
        self._bound = rule.bind(kernels, SegmentMemory(arrays, grad, arrays[0], [Span(0, n)]))

    def step(self) -> None:
        """One step, with what a run does before it."""
        before = self._progress
        self._progress, changed = self._rule.advance(self._group, before)
        self._kernels.run([self._bound(self._rule.scalars(self._group, before, 1.0))])
        self._group.update(changed)


def contestants(name: str, n: int, threads: int) -> tuple[Result, dict[str, Callable[[], object]]]:
    """What one optimizer is measured with, each called twice to warm up: the first step makes arrays."""
    torch.set_num_threads(threads)
    grad = allocate(n, torch.float32).normal_(std=1e-2)
    param = nn.Parameter(allocate(n, torch.float32).fill_(0.5))
    param.grad = grad
    plain = MAKES[name]([param])
    (rule,) = rules_of([plain])
    group = {key: value for key, value in plain.param_groups[0].items() if key != "params"}
    pieces = Pieces(rule, group, grad, native.load(threads))
    nbytes = 4 + 8 * (1 + len(rule.states))
    master, *others = (allocate(n, torch.float32).fill_(0.5) for _ in range(1 + len(rule.states)))

    def limit() -> None:
        master.add_(grad)
        for array in others:
            array.neg_()

    calls: dict[str, Callable[[], object]] = {
        "pieces": pieces.step,
        "torch": plain.step,
        "limit": limit,
    }
    for call in calls.values():
        call()
        call()
    return Result(name, n, threads, nbytes, getattr(rule, "block", None)), calls


def race(name: str, n: int, threads: int, rounds: int) -> Result:
    """Runs all of one optimizer in every round, in another order each time."""
    result, calls = contestants(name, n, threads)
    order, shuffle = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for what in order:
            start = time.perf_counter()
            calls[what]()
            result.seconds[what].append(time.perf_counter() - start)
    return result


def main(
    n: Annotated[str, typer.Option(help="Elements.")] = "8e6",
    threads: Annotated[str, typer.Option(help="Threads; several with commas.")] = "1,2",
    rounds: Rounds = 9,
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, and print the table."""
    results: list[Result] = []
    for count in map(int, threads.split(",")):
        for name in MAKES:
            note(f"{name}, n = {float(n):.0e}, {count} threads, {rounds} rounds")
            results.append(race(name, int(float(n)), count, rounds))
    headings = (
        "optimizer",
        "piece",
        "ns/element",
        "fastest-slowest",
        "torch, ns/element",
        "fastest-slowest",
        "bytes",
        "limit, ns/element",
        "x torch",
        "x limit",
    )
    Report(
        name="rules",
        title="Optimizers on pieces",
        about="A step of each optimizer as a run takes it, on pieces; torch's own step on the whole as one parameter; "
        "and the limit, which moves the same bytes through RAM. Medians. `x torch` and `x limit` are medians of the "
        "rounds' ratios. AdamW is the C kernel.",
        tables=[Table(headings, [result.row() for result in results])],
        data={"results": [result.as_json() for result in results]},
        remarks=["The machine was shared with other work: ratios count, and not nanoseconds."],
    ).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
