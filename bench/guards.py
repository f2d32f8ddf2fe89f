"""What holding a model costs in Python: microseconds a unit and a parameter, apart from kernels and copies.

    python bench/guards.py [--params 300,3000] [--json]

A model of tiny layers is run forward with and without the hooks of OffloadZero, in turns, and its parameters are used
outside of their units. Medians of several rounds, with their spread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from offload import OffloadZero

A_UNIT = 10
"""Parameters of a unit."""
ROUNDS = 9
USES: dict[str, Callable[[Tensor], object]] = {
    "p.shape": lambda p: p.shape,
    "p.grad": lambda p: p.grad,
    "p.sum()": lambda p: p.sum(),
}
"""Of a parameter, outside of its unit."""


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(A_UNIT))

    def forward(self, x: Tensor) -> Tensor:
        return x


def model_of(params: int) -> nn.Module:
    return nn.Sequential(*[Unit() for _ in range(params // A_UNIT)])


def seconds(call: Callable[[], object], least_s: float = 0.05) -> float:
    """Of one call, in a loop of at least so long."""
    count, took = 0, 0.0
    start = time.perf_counter()
    while took < least_s:
        call()
        count += 1
        took = time.perf_counter() - start
    return took / count


def measured(params: int, **options: str) -> dict[str, list[float]]:
    """Microseconds by what they are for, one a round."""
    plain, held = model_of(params), model_of(params)
    with contextlib.redirect_stderr(io.StringIO()):
        optimizer = OffloadZero(held, compute_dtype=torch.float32, commit_every=None, **options)  # type: ignore[arg-type]
    x, units = torch.ones(1), params // A_UNIT
    found: dict[str, list[float]] = {name: [] for name in ("a unit's forward", *USES)}
    param, twin = next(held.parameters()), next(plain.parameters())
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            without, with_hooks = seconds(lambda: plain(x)), seconds(lambda: held(x))
            found["a unit's forward"].append((with_hooks - without) / units * 1e6)
            for name, use in USES.items():
                found[name].append((seconds(partial(use, param), 0.01) - seconds(partial(use, twin), 0.01)) * 1e6)
    optimizer.close()
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", default="300,3000")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for params in map(int, args.params.split(",")):
        for placement, options in (("resident", {"tier": "cpu"}), ("streamed", {"tier": "cpu", "param_tier": "cpu"})):
            for name, values in measured(params, **options).items():
                spread = max(values) - min(values)
                rows.append({"params": params, "placement": placement, "what": name} | {
                    "us": round(statistics.median(values), 2), "spread_us": round(spread, 2)
                })  # fmt: skip
    if args.json:
        print(json.dumps({"machine": platform.processor(), "torch": torch.__version__, "rows": rows}))
        return
    table = Table(title=f"microseconds more than plain torch, torch {torch.__version__}, {A_UNIT} parameters a unit")
    for column in ("parameters", "placement", "what", "us", "spread"):
        table.add_column(column)
    for row in rows:
        table.add_row(*[str(row[key]) for key in ("params", "placement", "what", "us", "spread_us")])
    Console().print(table)


if __name__ == "__main__":
    main()
