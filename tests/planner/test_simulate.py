"""What a simulated iteration moves is what a run counts; what it takes follows from what it moves, computed by hand."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.choices import ActivationChoice
from offload.cli.plan_models import rules_named
from offload.layout import Layout
from offload.optim.trials import TriedChunks
from offload.planner.activations import measure
from offload.planner.explain import Planned, plan_of
from offload.planner.link import link_bytes
from offload.planner.placement import Placement
from offload.planner.routing import Routing
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.bound import least_seconds
from offload.planner.simulate.clock import Channel, Clock, Moment
from offload.planner.simulate.lines import COMPUTE, KERNELS, Worker
from offload.planner.simulate.lines import DISK as DISK_WORKS
from offload.planner.simulate.lines import LINK as LINK_WORKS
from offload.planner.simulate.sensitivity import DRIVES, PRODUCTS, RAM, moved_by
from offload.planner.simulate.speeds import DriveSpeed, HostCosts, LinkSpeed, Passes, Speeds
from offload.planner.simulate.what_if import expected_tiles
from offload.planner.tile_bytes import noting, tiled_bytes
from offload.sizes import PAGE_BYTES
from offload.storage.pool import Pool
from offload.storage.slot_map import ChunkKind
from tests.support import tried
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.toy import Net, batch, take_step

DISK, MEMORY, LINK = DriveSpeed(3e9, 2e9, 4e9), 2e10, LinkSpeed(2e10, 2e10, 3e10)
SPEEDS = Speeds(1e9, MEMORY, (DISK,), matrix_flops=1e10)
WITH_LINK = replace(SPEEDS, link=LINK)
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


class Experts(nn.Module):
    """Four experts. Of the two that are used each gets half of the rows."""

    used = (1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = [len(x) // 2 * sum(one <= expert for one in self.used) for expert in range(4)]
        return x + F.grouped_mm(x, self.up, offs=torch.tensor(ends, dtype=torch.int32))


class Routed(nn.Module):
    """Blocks of experts, which use the same ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def use(self, experts: tuple[int, int]) -> None:
        """These are used from now on."""
        for block in self.blocks:
            block.used = experts


class Case(NamedTuple):
    """Attributes: share: of the states that RAM has room for; None: nothing is said; device: whether the model is on a
    device with memory of its own; matrices: whether those of blocks have Muon; used: the experts that a micro-batch
    uses, of one after the other, and then again; turn: the iterations that are counted."""

    options: dict[str, Any]
    share: float | None = None
    device: bool = False
    matrices: bool = False
    used: Sequence[tuple[int, int]] = ((1, 3),)
    turn: int = 1


CASES = {
    "in RAM": Case({"tier": "cpu"}),
    "on NVMe": Case({"tier": "nvme"}, 0.0),
    "half on NVMe": Case({"tier": "nvme"}, 0.5),
    "half on NVMe, of a device": Case({"tier": "nvme"}, 0.5, device=True),
    "accumulation": Case({"tier": "nvme", "accumulation": 3}, 0.0),
    "split masters": Case({"tier": "nvme", "tuning": SPLIT}, 0.0),
    "split masters of a device": Case({"tier": "nvme", "tuning": SPLIT}, 0.3, device=True),
    "8-bit states": Case({"tier": "nvme", "states": "8bit"}, 0.2),
    "matrices on NVMe": Case({"tier": "nvme", "tuning": LARGE}, 0.0, matrices=True),
    "matrices, parameters that stream": Case(
        {"tier": "nvme", "param_tier": "cpu", "tuning": LARGE, "accumulation": 2}, 0.4, matrices=True
    ),
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
ON_NVME = {"tier": "nvme", "commit_every": None}
TIGHT = {"activation_tier": "nvme", "activation_memory": 2 * PAGE_BYTES}
WAITING = {
    "of each unit what enters it, in RAM": Case({"tier": "cpu", "activation_tier": "cpu"}, device=True),
    "likewise on NVMe, where RAM has room for two": Case(ON_NVME | TIGHT, 0.0),
    "likewise of a device": Case(ON_NVME | TIGHT | {"accumulation": 2}, 0.3, device=True),
    "the oldest on the device, the others on NVMe": Case(
        ON_NVME | {"activation_tier": "device", "activation_memory": PAGE_BYTES, "cpu_memory": "1GiB"}, device=True
    ),
    "recomputed, and nothing waits elsewhere": Case({"tier": "cpu", "activation_tier": "cpu"}),
    "all that units save": Case(
        ON_NVME
        | {"activation_tier": "nvme", "activation_memory": 8 * PAGE_BYTES, "tuning": replace(LARGE, recompute=False)},
        0.0,
    ),
}
IN_TILES = replace(LARGE, tile="32KiB")
TILES = {
    "of dense weights, from RAM": Case({"tier": "cpu", "param_tier": "cpu", "tuning": IN_TILES}),
    "of dense weights, of a device": Case(
        {"tier": "nvme", "param_tier": "cpu", "tuning": IN_TILES, "accumulation": 2}, 0.3, device=True
    ),
    "of experts of which half are used": Case({"tier": "cpu", "param_tier": "cpu", "tuning": replace(SMALL, tile=512)}),
    "of experts of which half are used, of a device": Case(
        {"tier": "nvme", "param_tier": "cpu", "tuning": replace(SMALL, tile=512, late=False), "accumulation": 3},
        0.3,
        device=True,
    ),
}
A_TILE_EACH = {"tier": "nvme", "param_tier": "cpu", "tuning": replace(SMALL, tile=512)}
LATE = {
    "in turns": Case(A_TILE_EACH, 0.0, used=((0, 1), (1, 2), (0, 3)), turn=3),
    "of a device, in two micro-batches": Case(
        A_TILE_EACH | {"accumulation": 2}, 0.3, device=True, used=((0, 1), (1, 2), (2, 3), (2, 3)), turn=2
    ),
    "with split masters": Case(
        A_TILE_EACH | {"tuning": replace(SMALL, tile=512, split_master=True)}, 0.0, used=((0, 1), (2, 3)), turn=2
    ),
}
TRIED = Tuning(chunk="4KiB", speculate=True)
TRIALS = {
    "steps tried": Case({"tier": "nvme", "tuning": TRIED}, 0.0),
    "steps tried, of a device": Case({"tier": "nvme", "tuning": TRIED, "accumulation": 2}, 0.3, device=True),
    "steps tried, split masters of a device": Case(
        {"tier": "nvme", "tuning": replace(TRIED, split_master=True)}, 0.3, device=True
    ),
    "steps tried, parameters that stream": Case({"tier": "nvme", "param_tier": "cpu", "tuning": TRIED}, 0.2),
}
TIMED = {
    "parameters on NVMe": Case({"tier": "nvme", "param_tier": "nvme"}, 0.0),
    "parameters on NVMe, accumulation": Case({"tier": "nvme", "param_tier": "nvme", "accumulation": 2}, 0.4),
    "parameters on NVMe, of a device": Case({"tier": "nvme", "param_tier": "nvme"}, 0.0, device=True),
    "tiles on NVMe": Case({"tier": "nvme", "param_tier": "nvme", "tuning": IN_TILES}, 0.0),
    "gradients on NVMe": Case({"tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0),
    "gradients on NVMe, accumulation": Case(
        {"tier": "nvme", "grad_tier": "nvme", "tuning": LARGE, "accumulation": 3}, 0.0
    ),
    "all on NVMe": Case({"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": LARGE}, 0.0),
}


def require_same(found: Moved, counted: Moved, planned: Planned) -> None:
    """What moves over the link is equal. Chunks that a run still has in RAM, as the disk or the device was slow, are
    neither written nor read: at most as many as its buffers hold."""
    buffers = sum(pool.buffer_bytes for pool in planned.place().pools.values())
    assert found[2:] == counted[2:]
    assert abs(found.read_bytes - counted.read_bytes) <= buffers
    assert abs(found.written_bytes - counted.written_bytes) <= buffers


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_moves_what_a_run_counts(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, planned = _both(CASES[name], copied_by, tmp_path)
    assert found == _computed(planned)
    if CASES[name].device:
        require_same(found, counted, planned)
    else:
        assert found == counted
    assert (found.read_bytes > 0) == (CASES[name].share is not None)


@pytest.mark.parametrize("name", THERE)
def test_states_on_the_device_spare_the_link(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, planned = _both(THERE[name], copied_by, tmp_path)
    require_same(found, counted, planned)
    assert found == _computed(planned)
    seconds = iteration_of(planned, WITH_LINK, Passes({"blocks.0": 1.0}, {"blocks.0": 2.0})).seconds
    computed = 3.0 * THERE[name].options.get("accumulation", 1)
    assert computed <= seconds < computed + 0.1  # the host does not run ahead of the device
    assert planned.place().states.on_device


@pytest.mark.parametrize("name", WAITING)
def test_activations_move_as_in_a_run(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, planned = _both(WAITING[name], copied_by, tmp_path)
    assert found == counted
    on_nvme = WAITING[name].options.get("activation_memory") is not None
    assert (planned.place().activation_bytes > 0) == (name != "recomputed, and nothing waits elsewhere")
    without = replace(planned, choice=replace(planned.choice, activations=ActivationChoice(None)))
    states = iteration_of(without, WITH_LINK)
    assert (found.written_bytes > states.written_bytes) == on_nvme


@pytest.mark.parametrize("name", TILES)
def test_tiles_move_as_in_a_run(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    found, counted, planned = _both(TILES[name], copied_by, tmp_path)
    require_same(found, counted, planned)
    assert TILES[name].device or found == counted
    assert any(spec.tile for spec in planned.layout.specs)


@pytest.mark.parametrize("name", LATE)
def test_experts_that_owe_steps_move_as_in_a_run(name: str, copied_by: CopiedBy, tmp_path: Path) -> None:
    """The mean of the iterations that use all of them."""
    found, counted, planned = _both(LATE[name], copied_by, tmp_path)
    require_same(found, counted, planned)
    assert planned.layout.trained.late_chunks
    assert found.written_bytes < planned.place().written_bytes  # of all, which are not all stepped


def test_steps_that_are_made_late_take_as_long() -> None:
    """Two tiles of 256 elements, each a chunk, of which every other iteration uses the other one. It owes a step when
    it is used: that takes 5 s before its forward, and the step after its backward 5 s. The other chunk is not moved."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 16, 16))

    options: dict[str, Any] = {"tier": "nvme", "param_tier": "cpu", "path": ".", "commit_every": None}
    planned = plan_of(Pair(), direct=True, tuning=replace(SMALL, tile=512), **options)
    placement = planned.place()
    slots = placement.states.sizes
    one_buffer = {**placement.pools, ChunkKind.STATES: Pool(slots, frozenset(), 1)}
    placement = replace(placement, pools=one_buffer, uses_disk=True)
    speeds = Speeds(256 / 5, drives=[DriveSpeed(1e15, 1e15, 2e15)])

    def of(*used: list[int]) -> Iteration:
        found = simulate(planned.layout, placement, Passes(tiles={"up": used}), speeds)
        assert isinstance(found, Iteration)
        assert found.seconds == pytest.approx(5 + 5)
        return found

    found = of([0], [1])
    assert found.written_bytes == found.read_bytes == slots[0]
    assert any(span.what.startswith("late steps of chunk") for span in found.spans)
    assert of([0, 1]).written_bytes == sum(slots)
    # The second one, never used, owes 63 steps at most: they are made with the 64th.
    assert of([0]).written_bytes == round(slots[0] + slots[1] / 64)


@pytest.mark.parametrize("name", TRIALS)
def test_steps_that_are_tried_move_what_a_run_counts(
    name: str, copied_by: CopiedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.at_once(monkeypatch)  # all that can be made, however busy the machine is, in the simulation too
    monkeypatch.setattr(Worker, "cancel", lambda self: self._queue[-1][1] if self._queue else self._last)
    unbounded = property(lambda self: math.inf, lambda self, most: None)
    monkeypatch.setattr(TriedChunks, "most_waiting", unbounded, raising=False)
    found, counted, _ = _both(TRIALS[name], copied_by, tmp_path, is_slow=True)
    assert found == counted
    assert found.kept_bytes > 0


@pytest.mark.parametrize("name", TRIALS)
def test_few_trials_wait_at_a_time_and_each_chunk_moves_once(name: str, tmp_path: Path) -> None:
    _, _, planned = _planned(TRIALS[name], tmp_path)
    speeds = replace(WITH_LINK if TRIALS[name].device else SPEEDS, drives=(DriveSpeed(1e6, 1e6, 1e6),))
    backward_s = dict.fromkeys((spec.unit for spec in planned.layout.specs), 1.0)  # far longer than a trial
    found, placement = iteration_of(planned, speeds, Passes({}, backward_s)), planned.place()
    assert (found.read_bytes, found.written_bytes) == (placement.read_bytes, placement.written_bytes)
    assert found.kept_bytes > 0


@pytest.mark.parametrize("name", TIMED)
def test_where_reads_depend_on_time_they_differ_by_what_buffers_hold(
    name: str, copied_by: CopiedBy, tmp_path: Path
) -> None:
    """Whether a chunk is still in RAM at its next use depends on how fast the disk and a worker are, in a run too."""
    found, counted, planned = _both(TIMED[name], copied_by, tmp_path)
    buffers = sum(pool.buffer_bytes for pool in planned.place().pools.values())
    computed = _computed(planned)
    assert found[1:] == counted[1:] == computed[1:]
    assert abs(found.read_bytes - counted.read_bytes) <= buffers
    assert abs(computed.read_bytes - counted.read_bytes) <= buffers
    if name.startswith("gradients on NVMe"):
        assert planned.place().read_bytes - buffers <= counted.read_bytes <= planned.place().read_bytes


def waiting_of(planned: Planned, model: nn.Module) -> Mapping[str, Sequence[int]]:
    """What of `batch` waits in the activation tier, measured on the meta device."""
    on_meta = copy.deepcopy(model).to("meta")
    found = measure(on_meta, torch.bfloat16, lambda module: module(batch(0).to("meta", torch.bfloat16)))
    return found.of(planned.choice.activations)


class Moved(NamedTuple):
    """Bytes of an iteration; kept_bytes: of states of steps that were tried."""

    read_bytes: int
    written_bytes: int
    up_bytes: int
    down_bytes: int
    kept_bytes: int


def _planned(case: Case, folder: Path) -> tuple[nn.Module, dict[str, Any], Planned]:
    """A model, the options of OffloadZero for it, and its plan."""
    given: dict[str, Any] = {"tuning": SMALL} | case.options
    if given["tier"] == "nvme":
        given |= {"path": folder / "run", "commit_every": 0}
    tuning = given["tuning"]
    model = Wide() if tuning.chunk == LARGE.chunk else Routed() if tuning.tile else Net()
    rules = rules_named("muon") if case.matrices else None
    planned = plan_of(model, direct=not case.device, rules=rules, **given)
    if case.share is not None:
        given["cpu_memory"] = planned.cpu_memory_for(case.share)
        planned = planned.with_memory(given["cpu_memory"])
    return model, given, planned


def _both(case: Case, copied_by: CopiedBy, folder: Path, *, is_slow: bool = False) -> tuple[Moved, Moved, Planned]:
    """What a simulated iteration moves, what that of a run counts, and the plan of both.

    Args:
        case: the options.
        copied_by: see there.
        folder: for the swap files.
        is_slow: whether a backward takes far longer than what is beside it.
    """
    model, given, planned = _planned(case, folder)
    backward_s = dict.fromkeys((spec.unit for spec in planned.layout.specs), 1.0) if is_slow else {}
    in_tiles = {spec.unit for spec in planned.layout.specs if spec.tile}
    tiles = dict.fromkeys(in_tiles, case.used) if isinstance(model, Routed) else {}
    passes = Passes({}, backward_s, waiting_of(planned, model), tiles)
    found = iteration_of(planned, WITH_LINK if case.device else SPEEDS, passes)
    if case.device:
        copied_by(lambda: LateCopier(1))
    simulated = Moved(found.read_bytes, found.written_bytes, found.up_bytes, found.down_bytes, found.kept_bytes)
    return simulated, Moved(*_counted(model, given, case)), planned


def _computed(planned: Planned) -> Moved:
    """What a plan says, without a simulation."""
    placement = planned.place()
    link = None if planned.direct else link_bytes(planned.layout, placement)
    return Moved(placement.read_bytes, placement.written_bytes, *((0, 0) if link is None else link), kept_bytes=0)


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
        # Of tiles and whole matrices the bound leaves out what depends on the tokens, or on another rate.
        is_bounded = case.options.get("tuning") is not IN_TILES
        if is_bounded and not case.matrices and found.parts.get(slow, 0.0) > 0.9 * found.seconds:
            assert least > 0.3 * found.seconds, slow


def _end_worker(optimizer: OffloadZero) -> None:
    """Waits until what the step has queued for a worker has ended. Nothing is applied."""
    for works in optimizer._parts.step._pending.values():
        for work in works:
            if work.done is not None:
                work.done.result()


def _counted(model: nn.Module, options: dict[str, Any], case: Case) -> list[int]:
    """What an iteration of a run moves: the mean of `case.turn` iterations, after as many, or after three."""
    own = [param for name, param in model.named_parameters() if name.startswith("blocks") and param.dim() == 2]
    others = [param for param in model.parameters() if all(param is not one for one in own)]
    optimizers = [torch.optim.Muon(own), torch.optim.AdamW(others)] if case.matrices else None
    nvme = ("nvme_read_bytes", "activation_read_bytes"), ("nvme_written_bytes", "activation_written_bytes")
    names = (*nvme, ("host_to_device_bytes",), ("device_to_host_bytes",), ("kept_bytes",))
    seen: list[list[int]] = []
    with OffloadZero(model, optimizers, **options) as optimizer:
        each = options.get("accumulation", 1)
        for step in range(max(3, case.turn) + case.turn):
            for number in range(each):
                if isinstance(model, Routed):
                    model.use(case.used[(each * step + number) % len(case.used)])
                model(batch(7 * step + number)).float().square().mean().backward()
            take_step(optimizer)
            _end_worker(optimizer)
            for store in optimizer._parts.stores.all:
                store.drain()
            stats = optimizer.stats()
            seen.append([sum(stats[name] for name in some) for some in names])
    before = seen[-1 - case.turn]
    return [round((last - first) / case.turn) for first, last in zip(before, seen[-1], strict=True)]


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


def test_a_transfer_that_is_waited_for_takes_its_delay_too() -> None:
    """As with one buffer: one write and one read are waited for."""
    speeds = replace(HAND, host=HostCosts(delay_s=0.25))
    assert seconds_of(1, speeds) == pytest.approx(4 + 2.25 + 1.75 + 4 + 2 + 3)


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


def two_units(**options: Any) -> Planned:
    """Two layers of 272 elements, each a unit and a chunk of 544 bytes in bf16."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return plan_of(model, tuning=options.pop("tuning", SMALL), **options)


TWO_PASSES = Passes({"0": 4.0, "1": 4.0}, {"0": 8.0, "1": 8.0}, {"0": [PAGE_BYTES], "1": [PAGE_BYTES]})


def test_activations_come_back_over_the_link() -> None:
    """A page takes a second each way. Two forwards 8, beside them the inputs leave; the second one's comes back, 1, and
    then beside its backward, 4 + 8, the first one's; that backward, 12. Then the gradients of the first unit leave, and
    its new values come."""
    planned = two_units(direct=False, tier="cpu", activation_tier="cpu", activation_memory=2 * PAGE_BYTES)
    link = LinkSpeed(PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES)
    found = iteration_of(planned, Speeds(math.inf, link=link), TWO_PASSES)
    assert found.seconds == pytest.approx(8 + 1 + 12 + 12 + 2 * 544 / PAGE_BYTES)


def test_activations_in_one_page_of_ram() -> None:
    """A page is written in 2 s and read in 1. Forward 4; what entered it is written, 2, before there is room for what
    enters the next one; forward 4, backward 4 + 8; the first page is read, 1; backward 12."""
    planned = two_units(
        direct=True, tier="cpu", path=".", commit_every=None, activation_tier="nvme", activation_memory=PAGE_BYTES
    )
    drive = DriveSpeed(PAGE_BYTES, PAGE_BYTES / 2, 1.5 * PAGE_BYTES)
    found = iteration_of(planned, Speeds(math.inf, drives=[drive]), TWO_PASSES)
    assert found.seconds == pytest.approx(4 + 2 + 4 + 12 + 1 + 12)
    assert (found.written_bytes, found.read_bytes) == (PAGE_BYTES, PAGE_BYTES)


def test_tiles_come_beside_one_another() -> None:
    """A layer of 192 x 16, in RAM, runs in six tiles, of which each takes a second over the link, half a second forward
    and a second backward. The next one comes beside one: the first is waited for, a second, then each forward ends half
    a second after its tile came, the last at 6.5. That tile is there for its backward. Each other one comes beside the
    backward before, so these take 6. Nothing else takes time."""
    tile = 2 * 32 * 16
    model = nn.Linear(16, 192, bias=False)
    planned = plan_of(model, direct=False, tier="cpu", param_tier="cpu", tuning=replace(SMALL, tile=tile))
    assert [spec.tile for spec in planned.layout.specs] == [32 * 16]
    link = LinkSpeed(tile, 1e12, 1e12 + tile)
    passes = Passes({"weight": 3.0}, {"weight": 6.0})
    found = iteration_of(planned, Speeds(math.inf, link=link), passes)
    assert found.up_bytes == (6 + 5) * tile
    assert found.seconds == pytest.approx(6.5 + 6)


def test_tiles_and_chunks_take_what_python_takes_and_what_is_copied_beside() -> None:
    """Six tiles: 3 s forward, 6 s backward, 12 times a quarter of a second in Python. Of ten vectors of 16 elements in
    bf16, 192 go out each: 7,680 bytes forward. Backward the first tile's gradient of them takes 6 bytes an element,
    each other one 10, their sum 6: 160 x 62 bytes. At 1,000 bytes a second."""
    model = nn.Linear(16, 192, bias=False)
    planned = plan_of(model, direct=True, tier="cpu", param_tier="cpu", tuning=replace(SMALL, tile=2 * 32 * 16))
    on_meta, x = copy.deepcopy(model).to("meta"), torch.empty(2, 5, 16, device="meta")
    with noting(on_meta) as linears:
        on_meta(x)
    beside = tiled_bytes(planned.layout, linears, torch.bfloat16)
    assert beside == {"weight": (7680, 160 * 62)}
    assert not on_meta._forward_pre_hooks
    passes = Passes({"weight": 3.0}, {"weight": 6.0}, tiled_bytes=beside)
    host = HostCosts(tile_s=0.25)
    assert iteration_of(planned, Speeds(math.inf, host=host), passes).seconds == pytest.approx(9 + 12 * 0.25)
    # At that rate memory also takes what comes to the device, gradients, and so on: the difference counts.
    slow, plain = Speeds(math.inf, 1e3), replace(passes, tiled_bytes={})
    more = iteration_of(planned, slow, passes).seconds - iteration_of(planned, slow, plain).seconds
    assert more == pytest.approx((7680 + 160 * 62) / 1e3)
    chunks = replace(HAND, host=HostCosts(chunk_s=1.0))
    assert seconds_of(1, chunks) == pytest.approx(seconds_of(1, HAND) + 2)
    alone = Speeds(math.inf, host=HostCosts(resident_s=0.5))  # parameters are beside the model: no two go together
    assert iteration_of(planned, alone, passes).seconds == pytest.approx(9 + 0.5 * len(planned.layout.trained.chunks))
    together = plan_of(model, direct=True, tier="cpu", param_tier="device", tuning=SMALL)
    assert iteration_of(together, alone, Passes({"": 3.0}, {"": 6.0})).seconds == pytest.approx(9)


def test_chunks_of_parameters_on_a_drive_take_what_python_takes() -> None:
    """A step makes 24 chunks anew, and hands them to the forward; the backward leases those of five layers of six."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    options = {"tier": "nvme", "path": "/none", "param_tier": "nvme", "grad_tier": "cpu"}
    planned = plan_of(model, direct=True, tuning=replace(SMALL, prefetch_chunks=2), **options)
    planned = planned.with_memory(planned.cpu_memory_for(1.0))
    speeds = Speeds(math.inf, drives=[DriveSpeed(1e18, 1e18, 1e18)], host=HostCosts(moved_s=0.5))
    found = iteration_of(planned, speeds, Passes({"": 3.0}, {"": 6.0}))
    assert 0 < found.read_bytes < found.written_bytes  # a few are still in RAM
    assert found.seconds == pytest.approx(9 + 0.5 * (24 + 20))


def test_as_many_tiles_are_used_as_are_expected() -> None:
    planned = plan_of(
        Routed(), direct=True, tier="cpu", param_tier="cpu", tuning=replace(SMALL, tile=512), accumulation=4
    )
    routing = Routing(4, 1)
    found = expected_tiles(planned.layout, {"blocks.0.up", "blocks.1.up"}, routing, tokens=2, micro_batches=64)
    assert found.keys() == {"blocks.0.up", "blocks.1.up"}
    for of_weight in found.values():
        assert len(of_weight) == 64
        used = [len(numbers) for numbers in of_weight]
        assert sum(used) / (4 * 64) == pytest.approx(1 - 0.75**2, abs=1 / 64)
        assert max(used) - min(used) <= 1
        counts = Counter(number for numbers in of_weight for number in numbers)
        assert max(counts.values()) - min(counts.values()) <= 8
    few = expected_tiles(planned.layout, {"blocks.0.up"}, routing._replace(experts=400), tokens=1, micro_batches=4)
    assert [len(numbers) for numbers in few["blocks.0.up"]] == [1, 1, 1, 1]


def test_matrices_take_their_operations_or_the_link() -> None:
    """Two matrices of 16 x 16 have 20 m + 10 m^2 / n operations an element. Each step takes a second, and
    nothing is beside it but the other one's first forward. Where the link takes longer, that counts."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    planned = plan_of(model, direct=False, tier="cpu", tuning=LARGE, rules=rules_named("muon"))
    flops = 256 * (20 * 16 + 10 * 16)
    passes = Passes({"0": 4.0, "1": 4.0}, {"0": 8.0, "1": 8.0})
    fast = Speeds(math.inf, link=LinkSpeed(1e12, 1e12, 2e12), matrix_flops=flops)
    assert iteration_of(planned, fast, passes).seconds == pytest.approx(24 + 1)
    up = 256 * (4 + 4 + 2)  # the master, the momentum and the gradient
    slow = replace(fast, link=LinkSpeed(up / 2, 1e12, 1e12 + up / 2))
    upload = 2 * 256 / (up / 2)  # of new parameters
    assert iteration_of(planned, slow, passes).seconds == pytest.approx(24 + 2 + upload)
    unknown = simulate(planned.layout, planned.place(), passes, replace(fast, matrix_flops=None))
    assert isinstance(unknown, NotPredicted)
    assert "matrices" in unknown.reason


def test_activations_without_room_are_no_iteration() -> None:
    planned = two_units(direct=False, tier="cpu", activation_tier="cpu", activation_memory=PAGE_BYTES)
    found = simulate(planned.layout, planned.place(), TWO_PASSES, WITH_LINK)
    assert isinstance(found, NotPredicted)
    assert "activation_memory" in found.reason


@pytest.mark.parametrize(("tries", "seconds"), [(True, 8 + 16 + 5), (False, 8 + 16 + 5 + 1)])
def test_a_tried_step_is_beside_the_backward(tries: bool, seconds: float) -> None:
    """A step takes 5 s, a forward 4, a backward 8. Tried, the second unit's is beside the first one's backward, and the
    first one's behind it. Else both are behind it, the second one's beside the first forward, but for a second."""
    planned = two_units(direct=False, tier="nvme", path=".", commit_every=None, tuning=replace(SMALL, speculate=tries))
    placement = planned.place()
    pool = Pool(placement.states.sizes, frozenset(), 2)
    placement = replace(placement, pools={**placement.pools, ChunkKind.STATES: pool}, uses_disk=True)
    fast = DriveSpeed(1e12, 1e12, 2e12)
    speeds = Speeds(272 / 5, drives=[fast], link=LinkSpeed(1e12, 1e12, 2e12))
    found = simulate(planned.layout, placement, Passes({"0": 4.0, "1": 4.0}, {"0": 8.0, "1": 8.0}), speeds)
    assert isinstance(found, Iteration)
    assert found.seconds == pytest.approx(seconds, abs=1e-3)


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
    share = drive.both / (drive.read + drive.write)  # of its rate, that each way has beside the other one
    disk = 2 * (SLOT / drive.read + SLOT / drive.write) / share
    assert least * (1 - 1e-9) <= found <= (2 * kernels + compute + disk) * (1 + 1e-9)


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


def test_what_is_planned_for_the_present_comes_behind_what_was_planned_for_it_before() -> None:
    clock = Clock()
    called: list[str] = []

    def first() -> None:
        called.append("first")
        clock.at(clock.now, partial(called.append, "for the present"))
        clock.at(clock.now - 1.0, partial(called.append, "for the past"))

    clock.at(1.0, first)
    clock.at(1.0 + 1e-9, partial(called.append, "a little later"))
    clock.at(1.0, partial(called.append, "second"))
    clock.run_out()
    assert called == ["first", "second", "for the present", "for the past", "a little later"]
    assert clock.now == 1.0 + 1e-9


def ends_of(
    submitted: Sequence[tuple[float, str, int]], rates: Mapping[str, float], both: float, *, is_shared: bool
) -> list[float]:
    """When each of these transfers ends, of all of which everything is computed anew whenever one begins or ends.

    Args:
        submitted: when each is submitted, in that order, which way, and its bytes.
        rates: see `Channel`.
        both: likewise.
        is_shared: likewise.
    """
    ends, now = [math.inf] * len(submitted), 0.0
    coming = list(range(len(submitted)))
    left: dict[int, float] = {}
    while coming or left:
        queues = {way: [one for one in left if submitted[one][1] == way] for way in rates}
        share = both / sum(rates.values()) if all(queues.values()) else 1.0
        speeds = {
            one: share * rates[way] / (len(queue) if is_shared else 1)
            for way, queue in queues.items()
            for one in (queue if is_shared else queue[:1])
        }
        soonest = min((left[one] / speed for one, speed in speeds.items()), default=math.inf)
        comes = bool(coming) and submitted[coming[0]][0] <= now + soonest
        ended = [] if comes else [one for one in speeds if left[one] / speeds[one] <= soonest * (1 + 1e-12)]
        until = submitted[coming[0]][0] if comes else now + soonest
        left |= {one: max(left[one] - (until - now) * speed, 0.0) for one, speed in speeds.items()}
        now = until
        for one in ended:
            ends[one] = now
            del left[one]
        if comes:
            left[coming[0]] = float(submitted[coming[0]][2])
            del coming[0]
    return ends


@given(
    gaps=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 1.0, 2.5]), st.booleans(), st.sampled_from([0, 1, 7, 100, 300])),
        min_size=1,
        max_size=30,
    ),
    is_shared=st.booleans(),
    delay_s=st.sampled_from([0.0, 0.75]),
)
@settings(max_examples=200, deadline=None)
def test_transfers_end_when_they_do_if_all_are_computed_anew_at_each_change(
    gaps: list[tuple[float, bool, int]], is_shared: bool, delay_s: float
) -> None:
    """One with a delay ends when it would if it were submitted that much later without one."""
    rates, both, now = {"read": 70.0, "write": 30.0}, 90.0, 0.0
    submitted = []
    for gap, is_read, nbytes in gaps:
        now += gap
        submitted.append((now, "read" if is_read else "write", nbytes))
    clock = Clock()
    found: dict[int, float] = {}
    drive = Channel(clock, "drive", rates, both, is_shared=is_shared, delay_s=delay_s)

    def submit(number: int, way: str, nbytes: int) -> None:
        drive.submit(way, nbytes, f"{number}").then(lambda: found.setdefault(number, clock.now))

    for number, (when, way, nbytes) in enumerate(submitted):
        clock.at(when, partial(submit, number, way, nbytes))
    clock.run_out()
    later = [(when + delay_s, way, nbytes) for when, way, nbytes in submitted]
    assert [found[number] for number in range(len(submitted))] == ends_of(later, rates, both, is_shared=is_shared)
    assert drive.moved == {way: sum(one[2] for one in submitted if one[1] == way) for way in rates}


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
