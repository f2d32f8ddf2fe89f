"""The Adam kernel by prefetch distance: `python bench/adam_prefetch.py [--rounds 100] [--save]`.

It measures the CPU time of one thread: short calls, each on another part of the states, in random order. The figure of
a distance is the 20th percentile. So the figures also hold on a machine that others use.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import SCALARS, States, allocate
from bench.report import Json, Out, Report, Rounds, Save, Table, note, run
from offload import native

PARAMETERS, CALL = 48_000_000, 1_000_000
"""Of the states, far more than a cache holds; of a call."""
JOBS = ("mixed", "fp32")
ABOUT = f"""\
ns a parameter, the 20th percentile of calls on {CALL:,} parameters. `limit` moves the same bytes with the same prefetch
and no arithmetic. The library takes the distance marked with *."""

Times = dict[tuple[str, str, int], list[float]]
"""Seconds a call, by job, what was called, and distance."""


def measure(distances: list[int], rounds: int) -> Times:
    library, reason = native.open_library()
    if library is None:
        raise SystemExit(reason)
    kernels, states = native.load(1), States(PARAMETERS)
    grad32, times, start = allocate(PARAMETERS, torch.float32), defaultdict(list), 0
    for job in JOBS:
        note(f"{job}: {rounds} rounds")
        for number in range(rounds):
            if number % 20 == 0:
                states.reset()  # the limit shuffles them
            calls = [(what, distance) for what in ("adam", "limit") for distance in distances]
            for what, distance in random.sample(calls, len(calls)):
                start = (start + CALL) % PARAMETERS
                part = slice(start, start + CALL)
                moments = states.exp_avg[part], states.exp_avg_sq[part]
                grad, out = (states.grad[part], states.out[part]) if job == "mixed" else (grad32[part], None)
                library.offload_prefetch(distance)
                begun = time.thread_time()
                if what == "adam":
                    kernels.call(native.ADAM, states.master[part], *moments, grad, out, scalars=SCALARS)
                else:
                    kernels.call(native.LIMIT, states.master[part], *moments, grad, out)
                times[job, what, distance].append(time.thread_time() - begun)
    library.offload_prefetch(-1)
    return times


def main(
    rounds: Rounds = 100,
    distances: Annotated[str, typer.Option(help="Elements.")] = "0,32,64,96,128,160,192,256,384,512",
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure and print the table."""
    tried = [int(distance) for distance in distances.split(",")]
    times = measure(tried, rounds)
    library, _ = native.open_library()
    usual = library.offload_prefetch(-1) if library is not None else -1

    def nanoseconds(job: str, what: str, distance: int) -> float:
        return statistics.quantiles(times[job, what, distance], n=5, method="inclusive")[0] / CALL * 1e9

    columns = [(job, what) for job in JOBS for what in ("adam", "limit")]
    rows = [
        (f"{distance}{' *' * (distance == usual)}", *(f"{nanoseconds(*column, distance):.3f}" for column in columns))
        for distance in tried
    ]
    Report(
        name="adam_prefetch",
        title="CPU Adam by prefetch distance",
        about=ABOUT,
        tables=[Table(("elements ahead", *(f"{job} {what}" for job, what in columns)), rows)],
        data={"rows": rows},
        setup=f"1 thread, kernel {native.load(1).variant}",
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
