"""What one of several simulated ranks moves is what a run counts; what it takes follows from what it sends, by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload import OffloadZero, Tuning
from offload.cli.plan_models import rules_named
from offload.grads.reduce_scatter import ReducedGradients
from offload.optim.trials import TriedChunks
from offload.planner.explain import Planned, plan_of, sent_numel
from offload.planner.simulate import Iteration, NotPredicted, averages, simulate
from offload.planner.simulate.clock import Moment
from offload.planner.simulate.lines import Worker
from offload.planner.simulate.network import Network
from offload.planner.simulate.speeds import DriveSpeed, LinkSpeed, NetworkSpeed, Passes, Speeds
from offload.ranks.communicator import Work
from offload.ranks.torch_distributed import Group
from offload.sizes import PAGE_BYTES
from tests.planner.test_simulate import Case, Routed, Wide, _end_worker, waiting_of
from tests.support import tried
from tests.support.cases import often
from tests.support.late_copier import LateCopier, copying_by
from tests.support.ranks import Worlds
from tests.support.toy import Net, batch, take_step

NETWORK = NetworkSpeed(1e9, 1e-5)
DRIVE, LINK = DriveSpeed(3e9, 2e9, 4e9), LinkSpeed(2e10, 2e10, 3e10)
SPEEDS = Speeds(1e9, 2e10, (DRIVE,), network=NETWORK, matrix_flops=1e10)
WITH_LINK = replace(SPEEDS, link=LINK)
STEPS = 4
COUNTED = {
    "read": ("nvme_read_bytes", "activation_read_bytes"),
    "written": ("nvme_written_bytes", "activation_written_bytes"),
    "up": ("host_to_device_bytes",),
    "down": ("device_to_host_bytes",),
    "kept": ("kept_bytes",),
}
SENT = ("reduce_scatter_calls", "reduce_scatter_bytes", "all_gather_calls", "all_gather_bytes", "gather_calls")


SMALL, LARGE = Tuning(chunk="4KiB", bucket=4096, threads=1), Tuning(chunk="256KiB", bucket="64KiB", threads=1)
ROOMY = Tuning(chunk="4KiB", threads=1)
IN_TILES, EXPERTS = replace(LARGE, tile="32KiB"), replace(SMALL, tile=512, late=False)
TRIED = replace(SMALL, speculate=True)
WAITING = {"activation_tier": "nvme", "activation_memory": 2 * PAGE_BYTES}
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
    "stage 2, activations in RAM, of a device": Case(
        {"tier": "cpu", "stage": 2, "activation_tier": "cpu"}, device=True
    ),
    "stage 3, activations on NVMe": Case({"tier": "nvme", "stage": 3, "accumulation": 2} | WAITING, 0.0),
    "matrices, stage 1": Case({"tier": "cpu", "stage": 1, "tuning": LARGE}, matrices=True),
    "matrices, stage 2, parameters in RAM": Case(
        {"tier": "nvme", "stage": 2, "param_tier": "cpu", "tuning": LARGE}, 0.0, matrices=True
    ),
    "matrices, stage 3": Case({"tier": "nvme", "stage": 3, "tuning": LARGE, "accumulation": 2}, 0.0, matrices=True),
    "tiles, stage 1": Case({"tier": "cpu", "stage": 1, "param_tier": "cpu", "tuning": IN_TILES, "accumulation": 2}),
    "tiles, stage 3, of a device": Case(
        {"tier": "nvme", "stage": 3, "param_tier": "cpu", "tuning": IN_TILES, "accumulation": 2}, 0.0, device=True
    ),
    "experts of which half are used, stage 2": Case(
        {"tier": "nvme", "stage": 2, "param_tier": "cpu", "tuning": EXPERTS, "accumulation": 2}, 0.0
    ),
    "experts, stage 3": Case({"tier": "nvme", "stage": 3, "param_tier": "cpu", "tuning": EXPERTS}, 0.0),
}
SLOW = (
    "stage 2, activations in RAM, of a device", "matrices, stage 1", "matrices, stage 3", "tiles, stage 1",
    "experts, stage 3",
)  # fmt: skip
"""Others stand for these in make test."""
TRIALS = {
    "stage 1": Case({"tier": "nvme", "stage": 1, "tuning": TRIED, "accumulation": 2}, 0.0),
    "stage 2, parameters in RAM": Case({"tier": "nvme", "stage": 2, "param_tier": "cpu", "tuning": TRIED}, 0.0),
    "stage 2, of a device": Case(
        {"tier": "nvme", "stage": 2, "tuning": replace(TRIED, split_master=True), "accumulation": 2}, 0.0, device=True
    ),
    "stage 3": Case({"tier": "nvme", "stage": 3, "tuning": TRIED}, 0.0),
}


def plan(case: Case, folder: Path) -> tuple[dict[str, Any], Planned]:
    """What OffloadZero is given, and its plan."""
    given: dict[str, Any] = {"tuning": SMALL} | case.options
    if given["tier"] == "nvme":
        given |= {"path": folder / "run", "commit_every": 0}
    rules = rules_named("muon") if case.matrices else None
    planned = plan_of(model_of(case), direct=not case.device, ranks=2, rules=rules, **given)
    if case.share is not None:
        given["cpu_memory"] = planned.cpu_memory_for(case.share)
        planned = planned.with_memory(given["cpu_memory"])
    return given, planned


def model_of(case: Case) -> Wide | Routed | Net:
    tuning = case.options.get("tuning", SMALL)
    if tuning == IN_TILES:
        return without_biases(Wide())
    return Wide() if tuning.chunk == LARGE.chunk else Routed() if tuning.tile else Net(12 if tuning.speculate else 4)


def without_biases(model: Wide) -> Wide:
    """A model whose tiled layers use no parameter of their block, which backward would enter once more for each."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.bias = None
    return model


def optimizers_of(case: Case, model: nn.Module) -> list[torch.optim.Optimizer] | None:
    own = [param for name, param in model.named_parameters() if name.startswith("blocks") and param.dim() == 2]
    others = [param for param in model.parameters() if all(param is not one for one in own)]
    return [torch.optim.Muon(own), torch.optim.AdamW(others)] if case.matrices else None


def iteration_of(planned: Planned, speeds: Speeds, passes: Passes | None = None) -> Iteration:
    found = simulate(planned.layout, planned.place(), passes or Passes(), speeds)
    assert isinstance(found, Iteration), found
    return found


@pytest.mark.parametrize("name", often(CASES, *(name for name in CASES if name not in SLOW)))
def test_a_simulated_rank_sends_and_moves_what_a_run_counts(name: str, worlds: Worlds, tmp_path: Path) -> None:
    """Which chunk leaves its buffer, and is read again, depends on which was written first, in a run too."""
    compare(CASES[name], worlds, tmp_path)


@pytest.mark.parametrize("name", often(TRIALS, "stage 2, of a device", "stage 3"))
def test_steps_that_a_simulated_rank_tries_are_those_of_a_run(
    name: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that can be tried before the step, however busy the machine is: averages are waited for in backward."""
    at_once(monkeypatch)
    monkeypatch.setattr(averages.AveragingRank, "_is_done", lambda self, reduction: True)
    monkeypatch.setattr(Worker, "cancel", lambda self: self._queue[-1][1] if self._queue else self._last)
    unbounded = property(lambda self: math.inf, lambda self, most: None)
    monkeypatch.setattr(TriedChunks, "most_waiting", unbounded, raising=False)
    counted = compare(TRIALS[name], worlds, tmp_path, backward_s=1.0, patch=at_once)
    assert counted["kept"] > 0


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Averages are waited for as soon as they are under way, and trials as soon as they can be made."""
    tried.at_once(patch)
    patch.setattr(ReducedGradients, "_is_done", lambda self, reduction: True)


def compare(
    case: Case,
    worlds: Worlds,
    folder: Path,
    *,
    backward_s: float = 0.0,
    patch: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> Mapping[str, int]:
    """Compares what a simulated rank moves with what a run counts, which is returned, and their collectives in order.

    Args:
        case: the options.
        worlds: the ranks.
        folder: for the swap files.
        backward_s: of each unit.
        patch: patches the ranks.
    """
    given, planned = plan(case, folder)
    model = model_of(case)
    units = {spec.unit for spec in planned.layout.specs}
    # A tile has matrices of both shards: the first one 0 and 2, the second one 1 and 3.
    tiles = {unit: [(1,)] for unit in units if unit.endswith(".up")} if isinstance(model, Routed) else {}
    passes = Passes({}, dict.fromkeys(units, backward_s), waiting_of(planned, model), tiles)
    launched, launch = [], Network._launch

    def noted(self: Network, group: str, name: str, nbytes: int, *others: Any) -> Moment:
        launched.append((name, nbytes))
        return launch(self, group, name, nbytes, *others)

    with pytest.MonkeyPatch.context() as noting:
        noting.setattr(Network, "_launch", noted)
        found = iteration_of(planned, WITH_LINK if case.device else SPEEDS, passes)
    counted, order = worlds(2).run(_counted, case, given, patch, timeout_s=150)[0]
    assert launched[-len(order) :] == order
    assert {what: found.sent.get(what, 0) for what in SENT} == {what: counted[what] for what in SENT}
    moved = {"read": found.read_bytes, "written": found.written_bytes, "up": found.up_bytes, "down": found.down_bytes}
    moved["kept"] = found.kept_bytes
    buffers = sum(pool.buffer_bytes for pool in planned.place().pools.values())
    assert abs(moved.pop("read") - counted["read"]) <= buffers
    assert moved == {what: counted[what] for what in moved}
    assert counted["reduce_scatter_bytes"] > 0
    assert (counted["read"] > 0) == (case.share is not None)
    return counted


def _counted(
    case: Case, options: dict[str, Any], patch: Callable[[pytest.MonkeyPatch], None] | None
) -> tuple[Mapping[str, int], list[tuple[str, int]]]:
    """What the last iteration of a run moves, and its collectives in order, with the bytes of all but questions."""
    names = COUNTED | {what: (what,) for what in SENT}
    seen: list[dict[str, int]] = []
    micro_batches = options.get("accumulation", 1)
    launched, launch, before = [], Group._launch, 0

    def noted(self: Group, name: str, exchange: Any, tensor: torch.Tensor, numel: int, **others: Any) -> Work:
        launched.append((name, 0 if name == "gather" else numel * tensor.element_size()))
        return launch(self, name, exchange, tensor, numel, **others)

    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(Group, "_launch", noted)
        if patch is not None:
            patch(patched)
        stack.enter_context(copying_by(lambda: LateCopier(dist.get_rank())) if case.device else nullcontext())
        model = model_of(case)
        optimizer = stack.enter_context(OffloadZero(model, optimizers_of(case, model), **options))
        for step in range(STEPS):
            before = len(launched)
            for number in range(2 if micro_batches == "auto" else micro_batches):
                model(batch(7 * step + number)).float().square().mean().backward()
            take_step(optimizer)
            _end_worker(optimizer)
            for store in optimizer._parts.stores.all:
                store.drain()
            stats = optimizer.stats()
            seen.append({what: sum(stats.get(key, 0) for key in keys) for what, keys in names.items()})
        order = launched[before:]
    return {what: seen[-1][what] - seen[-2][what] for what in names}, order


# Seconds, worked out by hand.


class TwoUnits(nn.Module):
    """Two units of UNIT elements each, and nothing else."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(127, 128) for _ in range(blocks))


UNIT = 128 * 128
SENT_BYTES = UNIT // 2 * 2
"""What one of two ranks sends of a unit's gradients, or of its new parameters: its half, in 16 bits."""
UNIT_S = Passes({"blocks.0": 1.0, "blocks.1": 1.0}, {"blocks.0": 2.0, "blocks.1": 2.0})


@cache
def two_units(stage: int, ranks: int = 2, bucket: int = 4 * UNIT) -> Planned:
    """Their plan, with states in RAM, and no unit fetched ahead. By that default a bucket has a unit's gradients."""
    tuning = Tuning(bucket=bucket, prefetch_units=0)
    return plan_of(TwoUnits(), direct=True, ranks=ranks, stage=stage, tier="cpu", cpus=1, tuning=tuning)


def seconds_of(planned: Planned, speeds: Speeds, passes: Passes = UNIT_S) -> float:
    found = iteration_of(planned, speeds, passes)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    return found.seconds


def taking(transfer_s: float, step_s: float, delay_s: float = 0.0) -> Speeds:
    """With which what a rank sends of a unit, and the step of its half of it, take so many seconds."""
    return Speeds(UNIT / 2 / step_s, network=NetworkSpeed(SENT_BYTES / transfer_s, delay_s))


def test_gradients_travel_beside_the_next_backward_and_new_parameters_together() -> None:
    """Forwards to 2, backward of the second unit to 4. Its gradients travel until 7, those of the first, made at 6,
    until 10. Steps until 12. New parameters of both travel together, until 18."""
    assert seconds_of(two_units(2), taking(3.0, 1.0)) == pytest.approx(18.0)


def test_large_new_parameters_travel_alone_beside_the_first_forward() -> None:
    """The step ends at 0. New parameters come at 3 and 6: forwards until 4 and 7. Backwards until 9 and 11. Gradients,
    two buckets a unit, travel from 9 to 12 and to 15. Steps until 17."""
    assert seconds_of(two_units(2, bucket=2 * UNIT), taking(3.0, 1.0)) == pytest.approx(17.0)


def test_units_that_ranks_share_come_for_each_pass_and_share_the_link_with_gradients() -> None:
    """The first unit comes at 3, its forward ends at 4; the second at 7, 8. It is still there: its backward ends at 10.
    Then its gradients and the first unit travel at once, until 16. Backward until 18, gradients until 21, steps until
    23."""
    assert seconds_of(two_units(3), taking(3.0, 1.0)) == pytest.approx(23.0)


def two_chunks_a_shard(blocks: int, **options: Any) -> Planned:
    """The plan of units of which each of two ranks has two chunks, and keeps all parameters in RAM."""
    tuning = Tuning(chunk=UNIT, bucket=4 * UNIT, prefetch_units=0, speculate=options.pop("speculate", False))
    planned = plan_of(
        TwoUnits(blocks), direct=True, ranks=2, stage=2, param_tier="cpu", cpus=1, tuning=tuning, **options
    )
    assert [chunk.numel for chunk in planned.layout.chunks] == [UNIT // 4] * 2 * blocks
    return planned


def test_new_values_of_a_chunk_travel_beside_the_step_of_the_next() -> None:
    """Forward to 1, backward to 3. Gradients travel until 7. The first chunk is stepped until 10, the second until 13;
    the values of the first travel until 12, those of the second until 15."""
    planned = two_chunks_a_shard(1, tier="cpu")
    speeds = Speeds(UNIT / 4 / 3.0, network=NetworkSpeed(SENT_BYTES / 2 / 2.0))
    assert seconds_of(planned, speeds, Passes({"": 1.0}, {"": 2.0})) == pytest.approx(15.0)


def test_values_of_a_step_that_was_tried_travel_beside_the_copy_of_the_next_chunk() -> None:
    """A chunk is copied in RAM in 1/4, and travels in 1, a unit's gradients in 2. Nothing else takes time but passes.

    New values of a chunk go to the model and into a window; those of the other rank, out of one, and to the model. The
    first unit's are stepped: 1/2, and 1 on the way, beside which the next is copied to the model; then 1/2 and 1/4, 1
    on the way, 1/2. Of the second unit the first chunk was tried, and is first copied to the parameters in RAM: 3/4,
    and then as before. Forwards take 2.

    Backward of the second unit 2, its gradients are sent, 4/4. The first unit is copied to the model, 4/4; its
    backward 2. The averages of the second have come, 4/4, with their squares; those of the first are sent, 4/4, travel,
    2, and are averaged, 4/4."""
    planned = two_chunks_a_shard(2, tier="nvme", path=".", commit_every=None, speculate=True)
    planned = planned.with_memory(planned.least())
    fast = DriveSpeed(1e18, 1e18, 1e18)
    copied = 2 * 2 * (UNIT / 4) / 0.25
    speeds = Speeds(math.inf, copied, (fast,), network=NetworkSpeed(SENT_BYTES / 2))
    found = iteration_of(planned, speeds, UNIT_S)
    assert found.kept_bytes == planned.place().states.streamed[0]
    values_s = (0.5 + 1.0 + 0.75 + 1.0 + 0.5) + (0.75 + 1.0 + 0.75 + 1.0 + 0.5)
    assert found.seconds == pytest.approx(values_s + 2.0 + (2.0 + 1.0) + (1.0 + 2.0) + (1.0 + 1.0 + 2.0 + 1.0))


def test_each_collective_takes_its_delay() -> None:
    """Two of gradients, of which one is beside the backward; three questions; one of new parameters. Bytes and steps
    take next to nothing."""
    speeds = taking(1e-9, 1e-9, delay_s=0.25)
    assert seconds_of(two_units(2), speeds) == pytest.approx(6.0 + 0.25 * (1 + 3 + 1))
    assert seconds_of(two_units(2, ranks=8), speeds) == pytest.approx(6.0 + 0.25 * (1 + 3 * 3 + 3))  # log2(8) rounds


def test_ranks_of_one_machine_share_it() -> None:
    """Kernels, RAM, drives and links are all halved, and compute is not."""
    speeds = replace(WITH_LINK, elements_per_s=1e6, network=NetworkSpeed(1e6))
    alone, shared = (iteration_of(two_units(2), one, Passes()).seconds for one in (speeds, speeds.shared_by(2)))
    assert shared == pytest.approx(2 * alone)
    assert speeds.shared_by(2).link == LinkSpeed(LINK.up / 2, LINK.down / 2, LINK.both / 2)
    assert speeds.shared_by(2).drives == [DriveSpeed(DRIVE.read / 2, DRIVE.write / 2, DRIVE.both / 2)]


times = st.floats(0.01, 100.0)


@given(
    transfer=times, step=times, forward=times, backward=times, delay=st.floats(0, 1), stage=st.integers(1, 3),
    ranks=st.sampled_from([2, 4]), bucket=st.sampled_from([UNIT, 2 * UNIT, 4 * UNIT]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_step_takes_no_less_than_any_resource_and_no_more_than_all_of_them(
    transfer: float, step: float, forward: float, backward: float, delay: float, stage: int, ranks: int, bucket: int
) -> None:
    speeds = taking(transfer, step, delay)
    assert speeds.network is not None
    units = ("blocks.0", "blocks.1")
    found = iteration_of(
        two_units(stage, ranks, bucket), speeds, Passes(dict.fromkeys(units, forward), dict.fromkeys(units, backward))
    )
    sent = found.sent["reduce_scatter_bytes"] + found.sent["all_gather_bytes"]
    travel = sent / speeds.network.bytes_per_s
    calls = (found.sent[f"{name}_calls"] for name in ("reduce_scatter", "all_gather", "gather"))
    steps, compute = 2 * step * 2 / ranks, 2 * (forward + backward)
    most = steps + compute + travel + sum(calls) * delay * (ranks - 1).bit_length()
    assert max(travel, steps + compute) * (1 - 1e-9) <= found.seconds <= most * (1 + 1e-9)


@given(transfer=times, step=times, compute=times, faster=st.floats(1.0, 10.0), stage=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_faster_link_makes_no_step_slower(
    transfer: float, step: float, compute: float, faster: float, stage: int
) -> None:
    units = ("blocks.0", "blocks.1")
    passes = Passes(dict.fromkeys(units, compute), dict.fromkeys(units, 2 * compute))
    slow, fast = (seconds_of(two_units(stage), taking(one, step), passes) for one in (transfer, transfer / faster))
    assert fast <= slow * (1 + 1e-9)


# What the papers say.


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 2), (3, 3)])
def test_a_rank_sends_two_or_three_times_the_parameters(stage: int, times: int, ranks: int) -> None:
    """arXiv 1910.02054, section 7: 2 psi elements at stages 1 and 2, and 3 psi at stage 3, of which (N - 1) / N go to
    others. At stage 3 here backward finds the root unit and the last block still there. Padding is beside it."""
    planned = plan_of(Wide(width=256, blocks=8), direct=True, ranks=ranks, stage=stage, tier="cpu", cpus=1)
    found, psi = iteration_of(planned, SPEEDS), planned.layout.numel
    itemsize, parts = 2, dict.fromkeys(("", "blocks.7"), 0)
    for spec in planned.layout.specs:
        if spec.unit in parts and stage == 3:
            parts[spec.unit] += spec.numel
    elements = (times * psi - sum(parts.values())) * (ranks - 1) / ranks
    sent = found.sent["reduce_scatter_bytes"] + found.sent["all_gather_bytes"]
    assert elements <= sent / itemsize <= elements * 1.01
    assert sum(sent_numel(planned).values()) == sent / itemsize


def test_what_ranks_wait_for_one_with_larger_matrices_is_said_not_to_be_counted() -> None:
    given: dict[str, Any] = {"direct": True, "ranks": 2, "tier": "cpu", "stage": 2, "cpus": 1}
    found = iteration_of(plan_of(Wide(), rules=rules_named("muon"), **given), SPEEDS)
    assert found.not_counted == ("waits for the rank whose matrices take longest",)
    assert not iteration_of(plan_of(Wide(), **given), SPEEDS).not_counted


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
def test_efficiency_is_that_of_zero_infinity_where_nothing_overlaps(bandwidth: float) -> None:
    """arXiv 2104.07857, section 4: ait * bw / (ait * bw + peak), with ait the operations of a byte. At stage 3 without
    prefetching only the gradients of the last unit travel beside anything: the fetch of the first one, on one link."""
    planned, tokens, peak = two_units(3), 1000, 1e12
    flops = 6.0 * planned.layout.numel * tokens
    compute_s = flops / peak
    units = ("blocks.0", "blocks.1")
    passes = Passes(dict.fromkeys(units, compute_s / 6), dict.fromkeys(units, compute_s / 3))
    found = iteration_of(planned, Speeds(math.inf, network=NetworkSpeed(bandwidth)), passes)
    ait = flops / (found.sent["reduce_scatter_bytes"] + found.sent["all_gather_bytes"])
    assert compute_s / found.seconds == pytest.approx(ait * bandwidth / (ait * bandwidth + peak))


# Many ranks.


def test_buckets_that_are_simulated_together_change_no_byte_and_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_of(Wide(), direct=False, ranks=2, tier="cpu", stage=3, tuning=Tuning(bucket=4096), cpus=1)
    passes = Passes({f"blocks.{n}": 1e-3 for n in range(4)}, {f"blocks.{n}": 2e-3 for n in range(4)})
    one_by_one = iteration_of(planned, WITH_LINK, passes)
    monkeypatch.setattr(averages, "MOST_BUCKETS", 24)
    together = iteration_of(planned, WITH_LINK, passes)
    assert one_by_one.sent["reduce_scatter_calls"] > 5 * 24
    for name in ("reduce_scatter_bytes", "all_gather_bytes"):
        assert together.sent[name] == one_by_one.sent[name]
    calls = (found.sent["reduce_scatter_calls"] for found in (together, one_by_one))
    assert next(calls) == pytest.approx(next(calls), rel=0.05)
    assert together.seconds == pytest.approx(one_by_one.seconds, rel=0.02)


class Trillion(nn.Module):
    """10^12 parameters, in 128 blocks."""

    def __init__(self) -> None:
        super().__init__()
        width, linear = 25600, partial(nn.Linear, device="meta")
        self.blocks = nn.ModuleList(
            nn.Sequential(
                linear(width, 3 * width), linear(width, width), linear(width, 4 * width), linear(4 * width, width)
            )
            for _ in range(128)
        )


@pytest.mark.slow
def test_a_trillion_parameters_on_1024_ranks_are_simulated_in_seconds() -> None:
    planned = plan_of(
        Trillion(), direct=False, ranks=1024, tier="nvme", param_tier="nvme", stage=3, path=".", device_memory="80GiB",
        cpu_memory="200GiB", free_cpu_bytes=1 << 40, cpus=64,
    )  # fmt: skip
    placement = planned.place()
    psi = planned.layout.numel
    assert psi > 1e12
    units = [f"blocks.{number}" for number in range(128)]
    passes = Passes(dict.fromkeys(units, 0.1), dict.fromkeys(units, 0.2))
    began = time.process_time()
    found = simulate(planned.layout, placement, passes, replace(WITH_LINK, network=NetworkSpeed(25e9, 5e-6)))
    assert time.process_time() - began < 30
    assert isinstance(found, Iteration)
    sent = found.sent["reduce_scatter_bytes"] + found.sent["all_gather_bytes"]
    assert 2.97 * psi < sent / 2 < 3 * psi
    assert found.seconds > sent / 25e9


def test_without_the_speed_of_the_link_between_ranks_nothing_is_predicted() -> None:
    planned = two_units(2)
    found = simulate(planned.layout, planned.place(), UNIT_S, Speeds(1e9))
    assert found == NotPredicted("the speed of the link between ranks is not known")
