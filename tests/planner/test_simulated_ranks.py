"""What one of several simulated ranks moves is what a run counts; what it takes follows from what it sends, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from offload import OffloadZero, Tuning
from offload.planner.explain import Planned, plan_of
from offload.planner.simulate import Iteration, simulate
from offload.planner.simulate.speeds import DriveSpeed, LinkSpeed, NetworkSpeed, Passes, Speeds
from tests.planner.test_simulate import Wide, _end_worker
from tests.support.late_copier import LateCopier, copying_by
from tests.support.ranks import Worlds
from tests.support.toy import Net, batch, take_step

NETWORK = NetworkSpeed(1e9, 1e-5)
DRIVE, LINK = DriveSpeed(3e9, 2e9, 4e9), LinkSpeed(2e10, 2e10, 3e10)
SPEEDS = Speeds(1e9, 2e10, (DRIVE,), network=NETWORK)
WITH_LINK = Speeds(1e9, 2e10, (DRIVE,), LINK, NETWORK)
STEPS = 4
COUNTED = {
    "read": "nvme_read_bytes",
    "written": "nvme_written_bytes",
    "up": "host_to_device_bytes",
    "down": "device_to_host_bytes",
}
SENT = ("reduce_scatter_calls", "reduce_scatter_bytes", "all_gather_calls", "all_gather_bytes", "gather_calls")


class Case(NamedTuple):
    """Attributes: share: of the states that RAM has room for; None: nothing is said; device: whether the model is on a
    device with memory of its own."""

    options: dict[str, Any]
    share: float | None = None
    device: bool = False


SMALL, LARGE = Tuning(chunk="4KiB", bucket=4096, threads=1), Tuning(chunk="256KiB", bucket="64KiB", threads=1)
ROOMY = Tuning(chunk="4KiB", threads=1)
CASES = {
    "stage 1": Case({"tier": "cpu", "stage": 1}),
    "stage 1, summed before": Case({"tier": "cpu", "stage": 1, "accumulation": 3}),
    "stage 2": Case({"tier": "cpu", "stage": 2, "tuning": ROOMY}),
    "stage 2, on NVMe": Case({"tier": "nvme", "stage": 2}, 0.0),
    "stage 2, accumulation": Case({"tier": "nvme", "stage": 2, "accumulation": 2}, 0.0),
    "stage 2, of a device": Case({"tier": "nvme", "stage": 2, "accumulation": 2}, 0.0, device=True),
    "stage 1, parameters in RAM": Case({"tier": "nvme", "stage": 1, "param_tier": "cpu"}, 0.0),
    "stage 2, parameters in RAM, of a device": Case({"tier": "cpu", "stage": 2, "param_tier": "cpu"}, device=True),
    "stage 3": Case({"tier": "cpu", "stage": 3}),
    "stage 3, small units together": Case({"tier": "nvme", "stage": 3, "accumulation": 2, "tuning": ROOMY}, 0.0),
    "stage 3, parameters in RAM, of a device": Case(
        {"tier": "nvme", "stage": 3, "param_tier": "cpu", "accumulation": 2}, 0.0, device=True
    ),
    "any number of micro-batches": Case({"tier": "cpu", "stage": 2, "accumulation": "auto"}),
    "8-bit states": Case({"tier": "nvme", "stage": 2, "states": "8bit"}, 0.0),
    "stage 3, parameters on NVMe": Case({"tier": "nvme", "stage": 3, "param_tier": "nvme"}, 0.0),
    "stage 2, all on NVMe": Case(
        {"tier": "nvme", "stage": 2, "param_tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0
    ),
}


def plan(case: Case, folder: Path) -> tuple[dict[str, Any], Planned]:
    """What OffloadZero is given, and its plan."""
    given: dict[str, Any] = {"tuning": SMALL} | case.options
    if given["tier"] == "nvme":
        given |= {"path": folder / "run", "commit_every": 0}
    planned = plan_of(model_of(case), direct=not case.device, ranks=2, **given)
    if case.share is not None:
        given["cpu_memory"] = planned.cpu_memory_for(case.share)
        planned = planned.with_memory(given["cpu_memory"])
    return given, planned


def model_of(case: Case) -> Wide | Net:
    return Wide() if case.options.get("tuning") is LARGE else Net()


def iteration_of(planned: Planned, speeds: Speeds, passes: Passes | None = None) -> Iteration:
    found = simulate(planned.layout, planned.place(), passes or Passes(), speeds)
    assert isinstance(found, Iteration), found
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_rank_sends_and_moves_what_a_run_counts(name: str, worlds: Worlds, tmp_path: Path) -> None:
    """Which chunk leaves its buffer, and is read again, depends on which was written first, in a run too."""
    case = CASES[name]
    given, planned = plan(case, tmp_path)
    found = iteration_of(planned, WITH_LINK if case.device else SPEEDS)
    counted = worlds(2).run(_counted, name, given)[0]
    assert {what: found.sent.get(what, 0) for what in SENT} == {what: counted[what] for what in SENT}
    moved = {"read": found.read_bytes, "written": found.written_bytes, "up": found.up_bytes, "down": found.down_bytes}
    buffers = sum(pool.buffer_bytes for pool in planned.place().pools.values())
    assert abs(moved.pop("read") - counted["read"]) <= buffers
    assert moved == {what: counted[what] for what in moved}
    assert counted["reduce_scatter_bytes"] > 0
    assert (counted["read"] > 0) == (case.share is not None)


def _counted(name: str, options: dict[str, Any]) -> Mapping[str, int]:
    """What the last iteration of a run moves."""
    case = CASES[name]
    names = COUNTED | {what: what for what in SENT}
    seen: list[dict[str, int]] = []
    copying = copying_by(lambda: LateCopier(dist.get_rank())) if case.device else nullcontext()
    micro_batches = options.get("accumulation", 1)
    with copying, OffloadZero(model := model_of(case), **options) as optimizer:
        for step in range(STEPS):
            for number in range(2 if micro_batches == "auto" else micro_batches):
                model(batch(7 * step + number)).float().square().mean().backward()
            take_step(optimizer)
            _end_worker(optimizer)
            for store in optimizer._parts.stores.all:
                store.drain()
            stats = optimizer.stats()
            seen.append({what: stats.get(key, 0) for what, key in names.items()})
    return {what: seen[-1][what] - seen[-2][what] for what in names}
