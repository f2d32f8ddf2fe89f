"""Configurations of two ranks for `bench/predict.py`, which calls this: both on this machine, over gloo.

Each rank is a process with half of the CPUs. All rates are measured by both at once, so each of them is a rank's share,
right before and right after the run, as is the link between them: what an all-to-all of many bytes sends, and what one
takes that carries a few.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import statistics
import time
from contextlib import closing
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import predict
from bench.limits import Disk
from bench.predict import Configuration, Rates, Result
from offload import Tuning, native
from offload.native.threads import usable_cpus
from offload.optim.flops import matrix_work
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.speeds import NetworkSpeed
from offload.planner.simulate.what_if import shared_out
from offload.sizes import MIB

RANKS = 2
LARGE_BYTES, SMALL_BYTES = 32 * MIB, 64
REPEATED, REPEATED_SMALL = 4, 20


def _of(size: str, stage: int, **options: Any) -> Configuration:
    return Configuration(size, options={"tier": "cpu", "stage": stage} | options)


def _on_nvme(size: str, stage: int, **options: Any) -> Configuration:
    return replace(_of(size, stage, tier="nvme", commit_every=None, **options), share=0.0)


CONFIGURATIONS = {
    "46m, two ranks, stage 1": _of("46m", 1, accumulation=2),
    "46m, two ranks, stage 2": _of("46m", 2),
    "46m, two ranks, stage 3": _of("46m", 3),
    "125m, two ranks, stage 2, NVMe": _on_nvme("125m", 2),
    "125m, two ranks, stage 3, parameters on NVMe": _on_nvme("125m", 3, param_tier="nvme"),
    "125m, two ranks, stage 2, parameters in RAM": _on_nvme("125m", 2, param_tier="cpu"),
    "125m, two ranks, stage 2, steps tried": _on_nvme("125m", 2, tuning=Tuning(chunk="16MiB", speculate=True)),
    "125m, two ranks, stage 3, activations on NVMe": _on_nvme(
        "125m", 3, activation_tier="nvme", activation_memory="8MiB"
    ),
    "46m, two ranks, stage 2, Muon": replace(_of("46m", 2), optimizer="muon"),
    "125m, two ranks, stage 3, tiles": _on_nvme("125m", 3, param_tier="cpu", tuning=Tuning(chunk="16MiB", tile="2MiB")),
}
"""By name."""


def measured_network() -> NetworkSpeed:
    """The link between the ranks, measured. All of them call it."""

    def seconds(nbytes: int, count: int) -> float:
        sent, received = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        times = []
        for _ in range(1 + count):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(received, sent)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    delay_s = seconds(SMALL_BYTES, REPEATED_SMALL)
    others = LARGE_BYTES * (RANKS - 1) // RANKS
    return NetworkSpeed(others / max(seconds(LARGE_BYTES, REPEATED) - delay_s, 1e-9), delay_s)


def of_rank(name: str, one: Configuration, folder: Path, dtype: torch.dtype, steps: int) -> Result:
    """Predicts and measures a configuration, as each rank does: both call it.

    Args:
        name: of the configuration.
        one: the configuration.
        folder: of both.
        dtype: of compute.
        steps: iterations that are timed.
    """
    threads = max(usable_cpus() // RANKS, 1)
    torch.set_num_threads(threads)
    tuning = one.options.get("tuning", Tuning(chunk="16MiB"))
    one = replace(one, options={**one.options, "tuning": replace(tuning, threads=threads)})
    own = folder / f"{dist.get_rank()}"
    own.mkdir()
    given, planned = predict.options_of(one, folder, dtype, ranks=RANKS)
    layout, placement, count = planned.layout, planned.place(), planned.layout.trained.numel
    beside = predict.beside_of(one, planned, dtype)
    unknown = simulate(layout, placement, beside, replace(predict.ANY_SPEEDS, network=NetworkSpeed(1e9)))
    if isinstance(unknown, NotPredicted):
        return Result(name, count, unknown.reason)
    work = matrix_work(layout.trained, layout.trained.chunks)
    on_drive = own if placement.states.streamed else None
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    with (
        closing(Disk(own, predict.DISK_TRANSFERS, predict.DISK_BYTES)) as disk,
        closing(Rates(one, disk, dtype, native.load(threads), work if work.flops else None, on_drive, alone)) as rates,
    ):
        dist.barrier()
        before, network = rates.measure(), measured_network()
        gc.collect()
        seconds, counted = predict.measured(one, given, steps, math.inf)  # both take equally many
        gc.collect()
        after, network_after = rates.measure(), measured_network()
    mean = before.mean_with(after)
    pairs = [(getattr(network, part), getattr(network_after, part)) for part in ("bytes_per_s", "delay_s")]
    speeds = replace(mean.speeds, network=NetworkSpeed(*(statistics.mean(pair) for pair in pairs)))
    found = simulate(layout, placement, shared_out(layout, mean.forward_s, mean.backward_s, beside), speeds)
    assert isinstance(found, Iteration)
    return Result(
        name,
        count,
        predicted_s=found.seconds,
        measured_s=seconds,
        rates_moved=max(after.moved_from(before), *(abs(after / before - 1) for before, after in pairs[:1])),
        waits_for=found.waits_for,
        bytes_predicted=found.read_bytes + found.written_bytes,
        bytes_counted=counted,
        parts_s=found.parts,
    )


def result_of(name: str, folder: Path, dtype: torch.dtype, steps: int) -> Result:
    """Starts the ranks, and returns what the first one found."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, name, str(folder.resolve()), dtype, steps), daemon=True)
        for rank in range(RANKS)
    ]
    for one in ranks:
        one.start()
    while running := [one for one in ranks if one.is_alive()]:
        wait([one.sentinel for one in running])
        if any(one.exitcode for one in ranks):
            for one in running:  # which wait for it
                one.terminate()
    if any(one.exitcode for one in ranks):
        raise RuntimeError(f"{name}: a rank failed: see above")
    return Result(**json.loads((folder / "result.json").read_text()))


def _rank(rank: int, name: str, folder: str, dtype: torch.dtype, steps: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    found = of_rank(name, CONFIGURATIONS[name], Path(folder), dtype, steps)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()
