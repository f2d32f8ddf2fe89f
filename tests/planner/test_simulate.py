"""What a simulated iteration moves is what a run counts; what it takes follows from what it moves, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.layout import Layout
from offload.planner.explain import Planned, plan_of
from offload.planner.placement import Placement
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.bound import least_seconds
from offload.planner.simulate.clock import Channel, Clock, Moment
from offload.planner.simulate.lines import COMPUTE, KERNELS
from offload.planner.simulate.lines import DISK as DISK_WORKS
from offload.planner.simulate.lines import LINK as LINK_WORKS
from offload.planner.simulate.sensitivity import DRIVES, PRODUCTS, RAM, moved_by
from offload.planner.simulate.speeds import DriveSpeed, LinkSpeed, Passes, Speeds
from offload.sizes import PAGE_BYTES
from offload.storage.pool import Pool
from offload.storage.slot_map import ChunkKind
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import Net, batch, take_step

DISK, MEMORY, LINK = DriveSpeed(3e9, 2e9, 4e9), 2e10, LinkSpeed(2e10, 2e10, 3e10)
SPEEDS = Speeds(1e9, MEMORY, (DISK,))
WITH_LINK = Speeds(1e9, MEMORY, (DISK,), LINK)
NO_COMPUTE = Passes()
SMALL, LARGE, SPLIT = Tuning(chunk="4KiB"), Tuning(chunk="256KiB"), Tuning(chunk="4KiB", split_master=True)


def iteration_of(planned: Planned, speeds: Speeds = SPEEDS, passes: Passes = NO_COMPUTE) -> Iteration:
    found = simulate(planned.layout, planned.place(), passes, speeds)
    assert isinstance(found, Iteration), found
    return found


class Wide(nn.Module):
    """Blocks between layers of the root, with several chunks each of the least size for gradients on NVMe."""

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
    "split masters": Case({"tier": "nvme", "tuning": SPLIT}, 0.0),
    "split masters of a device": Case({"tier": "nvme", "tuning": SPLIT}, 0.3, device=True),
    "8-bit states": Case({"tier": "nvme", "states": "8bit"}, 0.2),
    "parameters in RAM": Case({"tier": "cpu", "param_tier": "cpu", "accumulation": 2}),
    "parameters in RAM, of a device": Case({"tier": "cpu", "param_tier": "cpu", "accumulation": 2}, device=True),
}
UNIT_BYTES = 2 * 1088
THERE = {
    "all states on the device": Case({"tier": "device"}, device=True),
    "some states on the device": Case({"tier": "cpu", "device_memory": 8 * UNIT_BYTES + 650_000}, device=True),
    "some there, of parameters that stream": Case(
        {"tier": "nvme", "param_tier": "cpu", "accumulation": 2, "device_memory": 600_000}, 0.3, device=True
    ),
}
TIMED = {
    "parameters on NVMe": Case({"tier": "nvme", "param_tier": "nvme"}, 0.0),
    "parameters on NVMe, accumulation": Case({"tier": "nvme", "param_tier": "nvme", "accumulation": 2}, 0.4),
    "parameters on NVMe, of a device": Case({"tier": "nvme", "param_tier": "nvme"}, 0.0, device=True),
    "gradients on NVMe": Case({"tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0),
    "all on NVMe": Case({"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_moves_what_a_run_counts(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, _ = _both(CASES[name], copied_by, tmp_path)
    assert found == counted
    assert (found.read_bytes > 0) == (CASES[name].share is not None)


@pytest.mark.parametrize("name", THERE)
def test_states_on_the_device_spare_the_link(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, planned = _both(THERE[name], copied_by, tmp_path)
    assert found == counted
    seconds = iteration_of(planned, WITH_LINK, Passes({"blocks.0": 1.0}, {"blocks.0": 2.0})).seconds
    computed = 3.0 * THERE[name].options.get("accumulation", 1)
    assert computed <= seconds < computed + 0.1  # the host does not run ahead of the device
    assert planned.place().states.on_device


@pytest.mark.parametrize("name", TIMED)
def test_where_reads_depend_on_time_they_differ_by_what_buffers_hold(
    name: str, copied_by: CopiedBy, tmp_path: Path
) -> None:
    """Whether a chunk is still in RAM at its next use depends on how fast the disk and a worker are, in a run too."""
    found, counted, planned = _both(TIMED[name], copied_by, tmp_path)
    buffers = sum(pool.buffer_bytes for pool in planned.place().pools.values())
    assert found[1:] == counted[1:]
    assert abs(found.read_bytes - counted.read_bytes) <= buffers


class Moved(NamedTuple):
    """Bytes of an iteration."""

    read_bytes: int
    written_bytes: int
    up_bytes: int
    down_bytes: int


def _planned(case: Case, folder: Path) -> tuple[nn.Module, dict[str, Any], Planned]:
    """A model, the options of OffloadZero for it, and its plan."""
    given: dict[str, Any] = {"tuning": SMALL} | case.options
    if given["tier"] == "nvme":
        given |= {"path": folder / "run", "commit_every": 0}
    model = Wide() if given["tuning"] is LARGE else Net()
    planned = plan_of(model, direct=not case.device, **given)
    if case.share is not None:
        given["cpu_memory"] = planned.cpu_memory_for(case.share)
        planned = planned.with_memory(given["cpu_memory"])
    return model, given, planned


def _both(case: Case, copied_by: CopiedBy, folder: Path) -> tuple[Moved, Moved, Planned]:
    """What a simulated iteration moves, what that of a run counts, and the plan of both."""
    model, given, planned = _planned(case, folder)
    found = iteration_of(planned, WITH_LINK if case.device else SPEEDS)
    if case.device:
        copied_by(lambda: LateCopier(1))
    simulated = Moved(found.read_bytes, found.written_bytes, found.up_bytes, found.down_bytes)
    return simulated, Moved(*_counted(model, given)), planned


SLOW = {
    COMPUTE: (Passes({"blocks.0": 1.0}, {"blocks.0": 2.0}), WITH_LINK),
    KERNELS: (NO_COMPUTE, replace(WITH_LINK, elements_per_s=1e3)),
    DISK_WORKS: (NO_COMPUTE, replace(WITH_LINK, drives=(DriveSpeed(3e4, 2e4, 4e4),))),
    LINK_WORKS: (NO_COMPUTE, replace(WITH_LINK, link=LinkSpeed(2e4, 2e4, 3e4))),
}


@pytest.mark.parametrize("name", CASES | THERE | TIMED)
def test_an_iteration_takes_no_less_than_each_of_its_resources_and_little_more_than_a_slow_one(
    name: str, tmp_path: Path
) -> None:
    case = (CASES | THERE | TIMED)[name]
    _, _, planned = _planned(case, tmp_path)
    placement = planned.place()
    for slow, (passes, speeds) in SLOW.items():
        there = speeds if case.device else replace(speeds, link=None)
        found = iteration_of(planned, there, passes)
        least = least_seconds(planned.layout, placement, passes, there)
        assert least <= found.seconds * (1 + 1e-9), slow
        if found.parts.get(slow, 0.0) > 0.9 * found.seconds:
            assert least > 0.3 * found.seconds, slow


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


# Seconds, worked out by hand.

UNIT_S = Passes({"": 2.0}, {"": 3.0})


def two_chunks(buffers: int) -> tuple[Layout, Placement]:
    """One layer, whose states are two chunks of 12,288 elements on NVMe: each slot has 37 pages."""
    model = nn.Linear(191, 128)  # with its bias 24,576 elements
    planned = plan_of(model, direct=True, tier="nvme", path=".", commit_every=None, tuning=Tuning(chunk="48KiB"))
    placement = planned.place()
    sizes = placement.states.sizes
    assert list(sizes) == [37 * PAGE_BYTES] * 2
    return planned.layout, replace(
        placement,
        pools={ChunkKind.STATES: Pool(sizes, frozenset(), buffers)},
        uses_disk=True,
    )


def seconds_of(buffers: int, speeds: Speeds, passes: Passes = UNIT_S) -> float:
    found = simulate(*two_chunks(buffers), passes, speeds)
    assert isinstance(found, Iteration)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    return found.seconds


SLOT = 37 * PAGE_BYTES
HAND = Speeds(12288 / 4.0, drives=[DriveSpeed(SLOT / 1.5, SLOT / 2.0, SLOT / 1.0)])
"""A chunk is read in 1.5 s, written in 2 s, and stepped in 4 s. One each way together take the drive 2 s."""


def test_one_buffer_does_one_thing_after_the_other() -> None:
    """Step A 4, write A 2, read B 1.5, step B 4, forward 2, backward 3: meanwhile B is written and A read, in 3.5."""
    assert seconds_of(1, HAND) == pytest.approx(4 + 2 + 1.5 + 4 + 2 + 3)


def test_one_buffer_and_little_compute() -> None:
    """As before, but the passes take 0.5 s. Of the 3.5 s for B and the next A, 3 are waited for."""
    assert seconds_of(1, HAND, Passes({"": 0.2}, {"": 0.3})) == pytest.approx(4 + 2 + 1.5 + 4 + 3.5)


def test_two_buffers_hide_the_disk() -> None:
    """Step A 4, beside it B is read; step B 4, beside it A is written; forward 2, backward 3, beside them B is written
    and A is read."""
    assert seconds_of(2, HAND) == pytest.approx(4 + 4 + 2 + 3)


def test_two_buffers_share_a_slow_disk() -> None:
    """Kernels and passes take no time, so that two transfers are always under way, one each way, which takes SLOT both
    a second: two are read and two written in 4 s."""
    speeds = replace(HAND, elements_per_s=math.inf)
    found = seconds_of(2, speeds, Passes())
    assert 4.0 <= found <= 2 * (1.5 + 2.0)


def bounded(speeds: Speeds, passes: Passes, buffers: int) -> tuple[float, float]:
    """Seconds of an iteration, and the most that a resource alone takes."""
    found = simulate(*two_chunks(buffers), passes, speeds)
    assert isinstance(found, Iteration)
    drive = speeds.drives[0]
    compute = sum(passes.forward_s.values()) + sum(passes.backward_s.values()) + 2 * 12288 / speeds.elements_per_s
    moved = found.read_bytes + found.written_bytes
    disk = max(
        moved / max(drive.read, drive.write, drive.both),
        found.read_bytes / drive.read,
        found.written_bytes / drive.write,
    )
    return found.seconds, max(compute, disk)


times = st.floats(0.01, 100.0)


@given(read=times, write=times, both=times, kernels=times, compute=times, buffers=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_a_step_takes_no_less_than_any_resource_and_no_more_than_all_of_them(
    read: float, write: float, both: float, kernels: float, compute: float, buffers: int
) -> None:
    drive = DriveSpeed(SLOT / read, SLOT / write, min(SLOT / both, SLOT / read + SLOT / write))
    speeds, passes = Speeds(12288 / kernels, drives=[drive]), Passes({"": compute / 3}, {"": 2 * compute / 3})
    found, least = bounded(speeds, passes, buffers)
    alone = 2 * (SLOT / drive.read + SLOT / drive.write)
    together = 4 * SLOT / drive.both
    assert least * (1 - 1e-9) <= found <= (2 * kernels + compute + max(alone, together)) * (1 + 1e-9)


@given(
    read=times, write=times, kernels=times, compute=times, faster=st.floats(1.0, 10.0), which=st.integers(0, 3),
    buffers=st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_faster_resource_makes_no_step_slower_by_more_than_a_transfer(
    read: float, write: float, kernels: float, compute: float, faster: float, which: int, buffers: int
) -> None:
    """What is faster may ask for a transfer sooner, beside one that is then slower: anomalies of schedules (Graham,
    1969). They are bounded by what a chunk takes to be read and written."""

    def seconds(times: list[float]) -> float:
        drive = DriveSpeed(SLOT / times[0], SLOT / times[1], SLOT / times[0] + SLOT / times[1])
        speeds = Speeds(12288 / times[2], drives=[drive])
        return bounded(speeds, Passes({"": times[3] / 3}, {"": 2 * times[3] / 3}), buffers)[0]

    before = [read, write, kernels, compute]
    after = [one / faster if number == which else one for number, one in enumerate(before)]
    assert seconds(after) <= seconds(before) + read + write


def test_efficiency_is_that_of_zero_infinity_where_nothing_overlaps() -> None:
    """Of arXiv 2104.07857, section 4: ait * bw / (ait * bw + peak), with ait the operations of a byte. With one buffer
    all but the last write and the first read are beside nothing; here these two take no time."""
    flops, peak = 6.0 * 24576 * 1000, 1e12
    compute_s = flops / peak
    for bandwidth in (1e6, 1e8, 1e10):
        drive = DriveSpeed(bandwidth, bandwidth, bandwidth)
        speeds = Speeds(math.inf, drives=[drive])
        found = seconds_of(1, speeds, Passes({"": compute_s / 3}, {"": 2 * compute_s / 3}))
        moved = 4 * SLOT
        ait = flops / moved
        alone = ait * bandwidth / (ait * bandwidth + peak)
        assert alone <= compute_s / found <= min(1.0, ait * bandwidth / peak) * (1 + 1e-9)
        hidden = min(compute_s, 2 * SLOT / bandwidth)
        assert found == pytest.approx(compute_s + moved / bandwidth - hidden)


class _Counting(Clock):
    """Attributes: planned: how much was to happen; more than 50 of it fails."""

    planned = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self.planned += 1
        assert self.planned < 50, "time does not go on"
        super().at(when, call)


def test_a_transfer_of_which_rounding_leaves_less_than_nothing_ends() -> None:
    """At 1000 s, floats are so far apart that the end of the first transfer is after that of the second."""
    for more in range(1, 20):
        clock = _Counting()
        drive = Channel(clock, "drive", {"read": 1e15, "write": 1e15}, 2e15, is_shared=True)
        ended: list[Moment] = []

        def submit(drive: Channel, sizes: tuple[int, ...], ended: list[Moment]) -> None:
            ended.extend(drive.submit("read", nbytes, "") for nbytes in sizes)

        clock.at(1e3, partial(submit, drive, (150, 150 + more), ended))
        clock.run_out()
        assert [one.is_past for one in ended] == [True, True]


@pytest.mark.parametrize(("name", "passes", "speeds"), [
    (PRODUCTS, Passes({"": 2e3}, {"": 3e3}), HAND),
    (RAM, Passes(), Speeds(1.0, drives=HAND.drives)),
    (DRIVES, Passes(), replace(HAND, elements_per_s=1e12)),
])  # fmt: skip
def test_what_most_of_the_time_is_moves_a_prediction_most(name: str, passes: Passes, speeds: Speeds) -> None:
    """Nearly all of it: a fifth less of the rate is a quarter more time, a fifth more a sixth less."""
    found = moved_by(*two_chunks(1), passes, speeds)
    assert not isinstance(found, NotPredicted)
    assert next(iter(found)) == name
    assert found[name] == pytest.approx((0.25, -1 / 6), abs=0.01)
    assert all(moved.largest < 0.01 for other, moved in found.items() if other != name)
