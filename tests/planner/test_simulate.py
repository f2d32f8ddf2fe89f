"""What a simulated iteration moves is what a run counts; what it takes follows from what it moves, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.planner.explain import Planned, plan_of
from offload.planner.simulate import Iteration, simulate
from offload.planner.simulate.speeds import DriveSpeed, LinkSpeed, Passes, Speeds
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import Net, batch, take_step

DISK, MEMORY, LINK = DriveSpeed(3e9, 2e9, 4e9), 2e10, LinkSpeed(2e10, 2e10, 3e10)
SPEEDS = Speeds(1e9, MEMORY, (DISK,))
WITH_LINK = Speeds(1e9, MEMORY, (DISK,), LINK)
SMALL, LARGE = Tuning(chunk="4KiB"), Tuning(chunk="256KiB")


def iteration_of(planned: Planned, speeds: Speeds = SPEEDS, passes: Passes = Passes()) -> Iteration:
    found = simulate(planned.layout, planned.place(), passes, speeds)
    assert isinstance(found, Iteration), found
    return found


class Wide(nn.Module):
    """Blocks between layers of the root. A block's states are several chunks of the least size for gradients on NVMe."""

    def __init__(self, width: int = 192, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class Case(NamedTuple):
    """Attributes: share: of the states that RAM has room for; None: nothing is said; device: whether the model is on a
    device with memory of its own."""

    options: dict[str, Any]
    share: float | None = None
    device: bool = False


CASES = {
    "in RAM": Case({"tier": "cpu"}),
    "on NVMe": Case({"tier": "nvme"}, 0.0),
    "half on NVMe": Case({"tier": "nvme"}, 0.5),
    "half on NVMe, of a device": Case({"tier": "nvme"}, 0.5, device=True),
    "accumulation": Case({"tier": "nvme", "accumulation": 3}, 0.0),
    "gradients on NVMe": Case({"tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0),
    "accumulated gradients on NVMe": Case({"tier": "nvme", "grad_tier": "nvme", "accumulation": 2, "tuning": LARGE}, 0.25),
    "split masters": Case({"tier": "nvme", "tuning": Tuning(chunk="4KiB", split_master=True)}, 0.0),
    "split masters of a device": Case({"tier": "nvme", "tuning": Tuning(chunk="4KiB", split_master=True)}, 0.3, device=True),
    "8-bit states": Case({"tier": "nvme", "states": "8bit"}, 0.2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_moves_what_a_run_counts(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    case = CASES[name]
    given: dict[str, Any] = {"tuning": SMALL} | case.options
    if given["tier"] == "nvme":
        given |= {"path": tmp_path / "run", "commit_every": 0}
    model = Wide() if given["tuning"] is LARGE else Net()
    planned = plan_of(model, direct=not case.device, **given)
    if case.share is not None:
        given["cpu_memory"] = planned.cpu_memory_for(case.share)
        planned = planned.with_memory(given["cpu_memory"])
    found = iteration_of(planned, WITH_LINK if case.device else SPEEDS)
    if case.device:
        copied_by(lambda: LateCopier(1))
    simulated = found.read_bytes, found.written_bytes, found.up_bytes, found.down_bytes
    assert simulated == _counted(model, given)
    if case.share is not None:
        assert found.read_bytes > 0


def _end_worker(optimizer: OffloadZero) -> None:
    """Waits until what the step has queued for a worker has ended. Nothing is applied."""
    for works in optimizer._parts.step._pending.values():
        for work in works:
            if work.done is not None:
                work.done.result()


def _counted(model: nn.Module, options: dict[str, Any]) -> tuple[int, ...]:
    """What the third iteration of a run moves."""
    names = ("nvme_read_bytes", "nvme_written_bytes", "host_to_device_bytes", "device_to_host_bytes")
    seen: list[list[int]] = []
    with OffloadZero(model, **options) as optimizer:
        for step in range(4):
            for number in range(options.get("accumulation", 1)):
                model(batch(7 * step + number)).float().square().mean().backward()
            take_step(optimizer)
            _end_worker(optimizer)
            for store in optimizer._parts.stores.all:
                store.drain()
            stats = optimizer.stats()
            seen.append([stats[name] for name in names])
    return tuple(last - before for before, last in zip(seen[-2], seen[-1], strict=True))
