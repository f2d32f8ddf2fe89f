"""Ranks on devices of their own, over NCCL (make test-gpu), or simulated (make test-device); skipped with fewer than
two devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import NonFiniteGradientError, OffloadZero, Tuning
from offload.devices.copies import DONE, Copy, DeviceCopier, accelerator
from offload.grads import reduce_scatter
from offload.grads.reduce_scatter import ReducedGradients, _Waiting
from offload.model.unit_memory import UnitMemory
from offload.optim.new_params import NewParameters, ToDevice
from offload.ranks.torch_distributed import _GroupWork
from tests import simulated_device as simulated
from tests.simulated_device import process_group
from tests.support import models
from tests.support.cases import some
from tests.support.ranks import RanksFailedError, Worlds
from tests.support.toy import WIDTH, Mixed, take_step
from tests.support.training import CLIP

RANKS = min(torch.accelerator.device_count(), 4) if accelerator() is not None else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.device,
    pytest.mark.skipif(RANKS < 2, reason="fewer than two devices"),
    pytest.mark.timeout(1200),
]

TIERS: dict[str, dict[str, Any]] = {
    "device": {"tier": "device"},
    "cpu": {"tier": "cpu"},
    "nvme": {"tier": "nvme"},
    "nvme, streaming from cpu": {"tier": "nvme", "param_tier": "cpu"},
    "nvme, streaming": {"tier": "nvme", "param_tier": "nvme"},
}


CHUNKS = "chunks on the device"
MEMORY = 800_000
"""Of a device: room for a part of the states beside all else."""


def backend_for(device: torch.device) -> str:
    if device.type != simulated.NAME:
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    process_group.register()
    return process_group.BACKEND


def own_device() -> tuple[torch.device, dist.ProcessGroup]:
    """This rank's device, current from now on, and a group of all ranks that moves what is there."""
    device = torch.device(str(accelerator()), dist.get_rank())
    torch.accelerator.set_device_index(device.index)
    return device, dist.new_group(backend=backend_for(device))


def assert_no_races(device: torch.device) -> None:
    races = simulated.races() if device.type == simulated.NAME else []
    assert not races, races[:5]


def _train(options: dict[str, Any], accumulation: int) -> dict[str, Tensor]:
    """Five steps of an MLP; the states at the end, and the norms."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, group = own_device()
    torch.use_deterministic_algorithms(True)
    model = models.build("mlp").to(device)
    batches = models.losses("mlp", model, str(device))
    norms = []
    found: dict[str, Tensor] = {}
    options = {"tuning": Tuning(chunk=4096, bucket=4096)} | options
    with OffloadZero(model, process_group=group, accumulation=accumulation, **options) as optimizer:
        for _ in range(5):
            for _ in range(accumulation):
                drawn = [next(batches) for _ in range(ranks)]
                (drawn[rank]() / accumulation).backward()
            norms.append(optimizer.clip_grad_norm_(CLIP).cpu())
            take_step(optimizer)
        for name, param in model.named_parameters():
            with optimizer.gathered(param):
                found[name] = param.detach().cpu().clone()
            if param.requires_grad:
                state = optimizer.state_of(param)
                found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    assert_no_races(device)
    there = torch.tensor(optimizer.stats()["device_chunks"])
    return found | {"norms": torch.stack(norms), CHUNKS: there}


class _NotAwaited(Copy):
    """A copy for which no device waits."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def done(self) -> bool:
        return self._copy.done()

    def wait(self) -> None:
        self._copy.wait()

    def wait_on_device(self) -> None:
        return


def _lends_at_once(self: ReducedGradients) -> Any:
    lender = _next_lender(self)
    if lender is not None and lender.copy is not None:
        lender.copy = _NotAwaited(lender.copy)
    return lender


def _gathers_at_once(self: ToDevice, flat: int, step: int) -> None:
    with self._copier.after_uploads():
        NewParameters.start_gather(self, flat, step)


_next_lender = ReducedGradients._next_lender


def _train_without(event: str, options: dict[str, Any]) -> None:
    """Without what orders the streams of collectives and of copies."""
    patches = {
        "all-gathers wait for kernels": patch.object(ToDevice, "start_gather", _gathers_at_once),
        "averages are awaited": patch.object(ReducedGradients, "_finish_copy", lambda self, reduction: None),
        "all-gathers wait for uploads": patch.object(DeviceCopier, "after_uploads", lambda self: nullcontext()),
        "kernels wait for all-gathers": patch.object(_GroupWork, "wait_on_device", lambda self: None),
        "buckets wait for gradients": patch.object(DeviceCopier, "beside", lambda self: self._on(self._beside)),
        "buckets wait for buffers": patch.object(ReducedGradients, "_next_lender", _lends_at_once),
        "gradients wait for buckets": patch.multiple(
            reduce_scatter, UNITS_WAITING=-1, _Waiting=lambda turn, copied, grads: _Waiting(turn, DONE, grads)
        ),
    }
    with patches[event], suppress(NonFiniteGradientError):
        _train(options, 1)
    assert_no_races(torch.device(str(accelerator())))


def _train_mixed(prefetch_units: int) -> list[float]:
    """Units of many sizes. Returns: the losses. From the third step on nothing is allocated for a unit."""
    device, group = own_device()
    torch.manual_seed(3)
    model = Mixed().to(device)
    plain = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    options: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu", "stage": 3, "process_group": group}
    tuning = Tuning(chunk=4096, prefetch_units=prefetch_units)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(torch.bfloat16).to(device)
    losses, allocate = [], UnitMemory._allocate
    with OffloadZero(model, plain, tuning=tuning, **options) as optimizer:
        for number in range(5):
            with patch.object(UnitMemory, "_allocate", autospec=True, side_effect=allocate) as allocations:
                loss = model(x).float().square().mean()
                loss.backward()
                take_step(optimizer)
            assert bool(allocations.call_count) is (number == 0) or number == 1
            losses.append(loss.item())
        assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes
    assert_no_races(device)
    return losses


class Scale(nn.Module):
    """So few parameters that the second rank has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Scaled(nn.Module):
    """Units of which the second rank has nothing to copy beside others, the last one among them, and the root unit if
    it has parameters at all."""

    def __init__(self, *, has_root: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) if has_root else 2
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) if n % 2 else Scale() for n in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def _train_scaled(options: dict[str, Any], holds: bool) -> list[float]:
    """Args: holds: the last unit stays fetched, and no gradient is left for `step` to send. Returns: the losses."""
    device, group = own_device()
    torch.manual_seed(3)
    model = Scaled(has_root=not holds).to(device)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(torch.bfloat16).to(device)
    losses = []
    with OffloadZero(model, process_group=group, tuning=Tuning(chunk=4096), **options) as optimizer:
        for _ in range(4):
            with optimizer.gathered(model.blocks[-1] if holds else []):
                model(x).float().square().mean().backward()
                with torch.no_grad():
                    losses.append(model(x).float().square().mean())  # reads old values until the step
                take_step(optimizer)
                optimizer.synchronize()
                with torch.no_grad():
                    losses.append(model.blocks[-1](x).float().square().mean())  # reads the new ones where it is held
        found = [loss.item() for loss in losses]
    assert_no_races(device)
    return found


def _train_and_go_back(options: dict[str, Any]) -> None:
    """Each step is followed by a forward, and both are taken back while their collectives are under way."""
    device, group = own_device()
    torch.manual_seed(3)
    model = Mixed().to(device)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(torch.bfloat16).to(device)
    trained = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with OffloadZero(model, trained, process_group=group, tuning=Tuning(chunk=4096), **options) as optimizer:
        losses = []
        for _ in range(3):
            if not losses:
                optimizer.commit()
            losses.append(model(x).float().square().mean())
            losses[-1].backward()
            take_step(optimizer)
            if options["stage"] == 3:
                optimizer.synchronize()
                with torch.no_grad():
                    model.stages[0]["scale"](x)  # the units that follow are on their way
            optimizer.rollback()
        assert len({loss.item() for loss in losses}) == 1
    assert_no_races(device)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


_first: dict[int, dict[str, Tensor]] = {}
_first_losses: list[list[float]] = []


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_every_stage_and_tier_has_the_same_bits(
    worlds: Worlds, stage: int, accumulation: int, tier: str, tmp_path: Path
) -> None:
    """As the first of them that ran, and on every rank."""
    given = TIERS[tier] | {"stage": stage}
    if given["tier"] == "nvme":
        given |= {"path": str(tmp_path / "run")}
    for found in worlds(RANKS).run(_train, given, accumulation, timeout_s=170):
        found.pop(CHUNKS)
        require_same(found, accumulation)


def require_same(found: dict[str, Tensor], accumulation: int) -> None:
    """The bits are those of the first rank that ran with this accumulation."""
    first = _first.setdefault(accumulation, found)
    assert found.keys() == first.keys()
    assert all(torch.equal(found[key], first[key]) for key in first)


SHARES: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu", "param_tier": "device"},
    "nvme, streaming from cpu": {"tier": "nvme", "param_tier": "cpu"},
    "nvme, streaming": {"tier": "nvme", "param_tier": "nvme"},
    "nvme, streaming, gradients too": {
        "tier": "nvme",
        "param_tier": "nvme",
        "grad_tier": "nvme",
        "tuning": Tuning(chunk="256KiB", bucket=4096, prefetch_units=0, tile=0),
    },
}


@pytest.mark.parametrize(
    ("share", "stage", "accumulation"),
    some(
        [
            *(("cpu", stage, accumulation) for stage in (1, 2) for accumulation in (1, 2)),
            *((share, stage, accumulation) for share in [*SHARES][1:] for stage in (2, 3) for accumulation in (1, 2)),
        ],
        [("cpu", 1, 1), ("cpu", 2, 2), ("nvme, streaming from cpu", 3, 2), ("nvme, streaming, gradients too", 3, 1)],
    ),
)
def test_a_share_of_the_states_on_the_devices_has_the_same_bits(
    worlds: Worlds, share: str, stage: int, accumulation: int, tmp_path: Path
) -> None:
    given = SHARES[share] | {"stage": stage, "device_memory": MEMORY}
    if given["tier"] == "nvme":
        given |= {"path": str(tmp_path / "run")}
    for found in worlds(RANKS).run(_train, given, accumulation, timeout_s=170):
        assert found.pop(CHUNKS) > 0
        require_same(found, accumulation)


@pytest.mark.parametrize("prefetch_units", [0, 1, 3])
def test_gathered_units_of_many_sizes_are_allocated_once(worlds: Worlds, prefetch_units: int) -> None:
    found = worlds(RANKS).run(_train_mixed, prefetch_units, timeout_s=170)
    _first_losses.append(found[0])
    assert all(losses == _first_losses[0] for losses in found)


@pytest.mark.parametrize("holds", [False, True], ids=["", "held"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_has_nothing_of_a_unit_waits_for_its_last_use_too(worlds: Worlds, stage: int, holds: bool) -> None:
    options: dict[str, Any] = {"tier": "cpu", "stage": stage} | ({"param_tier": "cpu"} if stage == 3 else {})
    first, *others = worlds(RANKS).run(_train_scaled, options, holds, timeout_s=170)
    assert all(losses == first for losses in others)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rollback_waits_for_collectives_under_way(worlds: Worlds, stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tier": "cpu", "stage": stage, "path": str(tmp_path / "run"), "commit_every": 0}
    worlds(RANKS).run(_train_and_go_back, options | ({"param_tier": "cpu"} if stage == 3 else {}), timeout_s=170)


@pytest.mark.slow
@pytest.mark.skipif(not simulated.is_wanted(), reason="only the simulated accelerator sees it")
@pytest.mark.parametrize(
    "event",
    [
        "all-gathers wait for uploads",
        "kernels wait for all-gathers",
        "buckets wait for gradients",
        "buckets wait for buffers",
        "gradients wait for buckets",
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_event_between_ranks_is_a_race(worlds: Worlds, stage: int, event: str) -> None:
    options: dict[str, Any] = {"tier": "cpu", "stage": stage} | ({"param_tier": "cpu"} if stage == 3 else {})
    require_race(worlds, event, options)


@pytest.mark.slow
@pytest.mark.skipif(not simulated.is_wanted(), reason="only the simulated accelerator sees it")
@pytest.mark.parametrize(
    "event", ["all-gathers wait for kernels", "buckets wait for gradients", "averages are awaited"]
)
def test_so_it_is_with_a_share_of_the_states_there(worlds: Worlds, event: str) -> None:
    require_race(worlds, event, {"tier": "cpu", "param_tier": "device", "stage": 1, "device_memory": MEMORY})


def require_race(worlds: Worlds, event: str, options: dict[str, Any]) -> None:
    with pytest.raises(RanksFailedError, match="has not waited for it"):
        worlds(RANKS).run(_train_without, event, options, timeout_s=170)
