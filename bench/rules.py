"""What optimizers cost: `python bench/rules.py [--n 8e6] [--matrices 256x256,1024x1024] [--save]`.

A rule steps pieces of a master as a run does (offload/optim/rules/torch_rule.py). In the same rounds torch's own class
steps the whole as one parameter, and `limit` moves the same bytes through RAM with next to no arithmetic: it adds the
gradient to one array, and negates each of the others in place. AdamW by the C kernel comes first. Optimizers that look
at whole matrices step one matrix of each size in place of n elements. All with fp32 gradients.

    bytes an element   of the gradient 4; of the master and of each array 8, read and written
    states             of the master and the arrays, on the device, in RAM or on disk; with commits twice on a disk
    disk               of a step with nothing kept in RAM: states read and written
    link               of a step of a matrix on a GPU: states both ways, and a gradient of two bytes
"""

from __future__ import annotations

import math
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
from torch import nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import allocate
from bench.report import Json, Report, Rounds, Save, Table, note, ratio, run, spread
from offload import native
from offload.cli.plan_updates import measured_seconds
from offload.layout import Whole, blocks_of
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
OF_MATRICES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda params: o.Muon(params, lr=1e-4),
    "Adafactor": lambda params: o.Adafactor(params, lr=1e-4),
}
PLANNED = frozenset({"Muon"})
"""Those whose steps `offload plan` gives the time of."""
WHOLE = "whole"
MATRICES = "256x256,512x512,512x2048,1024x1024,1024x4096"


@dataclass
class Result:
    """One optimizer: seconds of a step in each round, on pieces, of plain torch, and of the limit.

    Attributes:
        state_bytes: of the master and its states, an element.
        piece: what is stepped at once, in words.
        planned_s: what `offload plan` says of it; None: it does not.
    """

    name: str
    n: int
    threads: int
    state_bytes: float
    piece: str
    planned_s: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"pieces": [], "torch": [], "limit": []})

    @property
    def nbytes(self) -> float:
        """Bytes that a step moves through RAM, an element."""
        return 4 + 2 * self.state_bytes

    def ns(self, what: str) -> float:
        return statistics.median(self.seconds[what]) / self.n * 1e9

    def as_json(self) -> dict[str, Any]:
        return {
            "optimizer": self.name,
            "n": self.n,
            "threads": self.threads,
            "piece": self.piece,
            "bytes_per_element": self.nbytes,
            "state_bytes": self.state_bytes,
            "disk_bytes": 2 * self.state_bytes,
            "link_bytes": 2 * self.state_bytes + 2,
            "planned_s": self.planned_s,
            "seconds": statistics.median(self.seconds["pieces"]),
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
            self.piece,
            f"{self.ns('pieces'):.2f}",
            spread([1e9 * seconds / self.n for seconds in self.seconds["pieces"]], 2),
            f"{self.ns('torch'):.2f}",
            spread([1e9 * seconds / self.n for seconds in self.seconds["torch"]], 2),
            f"{self.nbytes:.4g}",
            f"{self.ns('limit'):.2f}",
            f"{figures['x_torch']:.2f}",
            f"{figures['x_limit']:.2f}",
        )

    def costs(self) -> tuple[str, ...]:
        """A row of what it costs."""
        figures = self.as_json()
        return (
            self.name,
            f"{self.state_bytes:.4g}",
            f"{2 * self.state_bytes:.4g}",
            f"{figures['disk_bytes']:.4g}",
            f"{figures['link_bytes']:.4g}" if self.piece == WHOLE else "",
            f"{self.ns('pieces'):.3g}",
            f"{1e3 * figures['seconds']:.3g}",
            "" if self.planned_s is None else f"{1e3 * self.planned_s:.3g}",
        )


class Pieces:
    """A rule over n elements in memory like a run's.

    Args:
        rule: the rule, of a parameter that was never stepped.
        group: its options.
        param: the parameter, with its gradient, fp32.
        kernels: whose threads step it.

    Attributes:
        numels: the elements of the master and of each array.
    """

    def __init__(self, rule: Rule, group: dict[str, Any], param: nn.Parameter, kernels: native.Kernels) -> None:
        self._rule, self._group, self._kernels, self._progress = rule, group, kernels, rule.initial
        assert param.grad is not None
        shape, n, grad = tuple(param.shape), param.numel(), param.grad.reshape(-1)
        kept = rule.kept(shape)
        self._like = kept.like
        self.numels = [n, *(-(-n // block) for block in blocks_of(kept.states)[1:])]
        starts = (0.5, *(kind.starts for kind in kept.states))
        both = zip(self.numels, starts, strict=True)
        arrays = [allocate(numel, torch.float32).fill_(start) for numel, start in both]
        span = Span(0, n, Whole(shape, small=kept.small) if rule.is_whole else None)
        self._bound = rule.bind(kernels, SegmentMemory(arrays, grad, arrays[0], [span]))

    def step(self) -> None:
        """One step, with what a run does before it."""
        before = self._progress
        self._progress, changed = self._rule.advance(self._group, before, self._like)
        self._kernels.run([self._bound(self._rule.scalars(self._group, before, 1.0))])
        self._group.update(changed)


def contestants(name: str, shape: tuple[int, ...], threads: int) -> tuple[Result, dict[str, Callable[[], object]]]:
    """What one optimizer is measured with, each called twice to warm up: the first step makes arrays."""
    torch.set_num_threads(threads)
    n = math.prod(shape)
    grad = allocate(n, torch.float32).normal_(std=1e-2)
    param = nn.Parameter(allocate(n, torch.float32).fill_(0.5).view(shape))
    param.grad = grad.view(shape)
    plain = (MAKES | OF_MATRICES)[name]([param])
    (rule,) = rules_of([plain])
    group = {key: value for key, value in plain.param_groups[0].items() if key != "params"}
    pieces = Pieces(rule, group, param, native.load(threads))
    master, *others = (allocate(numel, torch.float32).fill_(0.5) for numel in pieces.numels)

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
    block = getattr(rule, "block", None)
    piece = WHOLE if rule.is_whole else "C kernel" if block is None else f"{block:,}"
    title = f"{name}, {' x '.join(map(str, shape))}" if rule.is_whole else name
    return Result(title, n, threads, 4 * sum(pieces.numels) / n, piece), calls


def race(name: str, shape: tuple[int, ...], threads: int, rounds: int) -> Result:
    """Runs all of one optimizer in every round, in another order each time."""
    result, calls = contestants(name, shape, threads)
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
    matrices: Annotated[str, typer.Option(help="Rows x columns of matrices; several with commas.")] = MATRICES,
    threads: Annotated[str, typer.Option(help="Threads; several with commas.")] = "1,2",
    rounds: Rounds = 9,
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, and print the table."""
    results: list[Result] = []
    for count in map(int, threads.split(",")):
        each: list[tuple[str, tuple[int, ...]]] = [(name, (int(float(n)),)) for name in MAKES]
        each += [(name, _shape(size)) for name in OF_MATRICES for size in matrices.split(",")]
        for name, shape in each:
            note(f"{name}, {' x '.join(map(str, shape))}, {count} threads, {rounds} rounds")
            results.append(race(name, shape, count, rounds))
            if name in PLANNED:
                results[-1].planned_s = measured_seconds(name.lower(), {shape: 1})
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
    costs = (
        "optimizer",
        "states",
        "on disk with commits",
        "disk a step",
        "link a step",
        "ns/element",
        "ms a step",
        "ms, as planned",
    )
    Report(
        name="rules",
        title="What optimizers cost",
        about="First bytes a parameter: states (the fp32 master and what the class keeps) on the device, in RAM or on "
        "disk; on disk with commits; over the disk in a step with nothing kept in RAM; over the link, where a GPU "
        "steps matrices. Then seconds: a step of each optimizer as a run takes it, on pieces or on a whole matrix of "
        "the size that is named; torch's own step on the whole as one parameter; "
        "and the limit, which moves the same bytes through RAM. Medians. `x torch` and `x limit` are medians of the "
        "rounds' ratios. AdamW is the C kernel.",
        tables=[
            Table(costs, [result.costs() for result in results if result.threads == results[-1].threads]),
            Table(headings, [result.row() for result in results]),
        ],
        data={"results": [result.as_json() for result in results]},
        remarks=["The machine was shared with other work: ratios count, and not nanoseconds."],
    ).publish(as_json=as_json, save=save)


def _shape(size: str) -> tuple[int, ...]:
    try:
        rows, columns = map(int, size.split("x"))
    except ValueError:
        raise typer.BadParameter(f"{size}: give rows and columns, as 1024x4096") from None
    return rows, columns


if __name__ == "__main__":
    run(main)
