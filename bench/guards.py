"""What holding a model costs in Python: `python bench/guards.py [--params 300,3000] [--json] [--save]`.

A model of tiny layers runs forward with and without the hooks of OffloadZero, in turns. Then one of its parameters, and
a list of all of them, is used outside of its unit. The figures are microseconds of CPU time beyond those of plain
torch, for each unit, each use, and each parameter of the list: medians of the rounds.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.report import Json, Report, Rounds, Save, Table, ratio, run, spread
from offload import OffloadZero

A_UNIT = 10
"""Parameters of a unit."""
USES: dict[str, Callable[[Tensor], object]] = {
    "p.shape": lambda p: p.shape,
    "p.grad": lambda p: p.grad,
    "p.sum()": lambda p: p.sum(),
}
"""Of a parameter, outside of its unit."""
IN_A_LIST = "a parameter of torch._foreach_norm"
WHAT = ("a unit's forward", *USES, IN_A_LIST)
PLACEMENTS = {"resident": {"tier": "cpu"}, "streamed": {"tier": "cpu", "param_tier": "cpu"}}


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(A_UNIT))

    def forward(self, x: Tensor) -> Tensor:
        return x


def seconds(call: Callable[[], object], least_s: float = 0.05) -> float:
    """CPU time of this thread for one call, measured in a loop of at least `least_s`. Other programs do not count."""
    count, took, start = 0, 0.0, time.thread_time()
    while took < least_s:
        call()
        count += 1
        took = time.thread_time() - start
    return took / count


def measure(params: int, rounds: int, options: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Microseconds for a unit or a use in each round, of the held and of the plain model, by what is measured."""
    plain, held = (nn.Sequential(*[Unit() for _ in range(params // A_UNIT)]) for _ in range(2))
    with contextlib.redirect_stderr(io.StringIO()):
        optimizer = OffloadZero(held, compute_dtype=torch.float32, commit_every=None, **options)
    lists: list[list[Tensor]] = [list(model.parameters()) for model in (held, plain)]
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WHAT}
    with torch.no_grad(), optimizer:
        for number in range(1 + rounds):
            taken = {"a unit's forward": [seconds(partial(m, torch.ones(1))) / len(plain) for m in (held, plain)]}
            taken |= {name: [seconds(partial(use, ps[0]), 0.01) for ps in lists] for name, use in USES.items()}
            taken[IN_A_LIST] = [seconds(partial(torch._foreach_norm, ps)) / len(ps) for ps in lists]
            for name, both in taken.items():
                for values, value in zip(found[name], both, strict=True):
                    values += [1e6 * value] * bool(number)  # the first round warms up
    return found


def main(
    params: Annotated[str, typer.Option(help="Parameters of the model, with commas.")] = "300,3000",
    rounds: Rounds = 9,
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, print the table."""
    torch.set_num_threads(1)
    rows = []
    for count in map(int, params.split(",")):
        for placement, options in PLACEMENTS.items():
            for what, (held, plain) in measure(count, rounds, options).items():
                more = [one - other for one, other in zip(held, plain, strict=True)]
                us = {"us": statistics.median(more), "spread_us": spread(more, 2), "x_plain": ratio(held, plain)}
                rows.append({"params": count, "placement": placement, "what": what, **us})
    headings = ("parameters", "placement", "what", "us more than plain torch", "spread", "x plain torch")
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    about = f"One thread, {A_UNIT} parameters a unit."
    table = Table(headings, cells, "What holding a model costs")
    Report("guards", table.title, about, [table], {"rows": rows}).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
