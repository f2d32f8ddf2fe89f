"""Each event that a run waits for, taken out: the simulated device has to see it. And what a step costs the host."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import NonFiniteGradientError, OffloadZero, Tuning
from offload.devices.copies import DONE, DeviceCopier
from offload.grads.local import LocalGradients
from offload.model.transfer import UnitTransfers
from offload.model.unit_memory import UnitMemory
from offload.optim.new_params import NewParameters, ToDevice
from tests import simulated_device
from tests.support.toy import Mixed, take_step

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = "simulated:0"
BLOCKS, WIDTH, ROWS = 6, 32, 4
RESIDENT: dict[str, Any] = {"tier": "cpu"}
STREAMED: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu"}


class Training:
    """Steps of an MLP of blocks that asks the device for nothing; its data is there."""

    def __init__(self, options: dict[str, Any], *, blocks: int = BLOCKS) -> None:
        torch.manual_seed(4)
        made = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))
        self.model = nn.Sequential(*made).to(DEVICE)
        plain = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = OffloadZero(self.model, plain, **options)
        self.x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(torch.bfloat16).to(DEVICE)
        self.losses: list[Tensor] = []

    def forward(self) -> Tensor:
        return self.model(self.x).float().square().mean()

    def step(self) -> None:
        loss = self.forward()
        loss.backward()
        with torch.no_grad():
            self.losses.append(self.forward())  # reads the old values until the step
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = 4) -> list[float]:
        with self.optimizer:
            for _ in range(steps):
                self.step()
            self.optimizer.synchronize()
            return [loss.item() for loss in self.losses]


# What is seen when an event is missing.


def copies_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    copy = DeviceCopier._copy
    patch.setattr(DeviceCopier, "_copy", lambda self, stream, src, dst, after: copy(self, stream, src, dst, DONE))


def uploads_ignore_the_last_use(patch: pytest.MonkeyPatch) -> None:
    give = UnitMemory.give

    def give_at_once(self: UnitMemory, *args: Any, **options: Any) -> Any:
        give(self, *args, **options)
        return DONE

    patch.setattr(UnitMemory, "give", give_at_once)


def kernels_ignore_uploads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitTransfers, "_wait_on_device", lambda self, unit: None)


def new_values_ignore_the_step(patch: pytest.MonkeyPatch) -> None:
    begins = NewParameters.step_begins

    def without_mark(self: NewParameters) -> None:
        begins(self)
        self._step = DONE

    patch.setattr(NewParameters, "step_begins", without_mark)


def kernels_ignore_new_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToDevice, "finish", lambda self, flat: self._exchange.finish(flat))


def gradients_leave_before_they_are_made(patch: pytest.MonkeyPatch) -> None:
    gather = DeviceCopier.gather_to_host
    patch.setattr(
        DeviceCopier, "gather_to_host", lambda self, parts, by, dst, after: gather(self, parts, by, dst, DONE)
    )


MISSING: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Any]] = {
    copies_begin_at_once: STREAMED,
    uploads_ignore_the_last_use: STREAMED,
    kernels_ignore_uploads: STREAMED,
    new_values_ignore_the_step: RESIDENT,
    kernels_ignore_new_values: RESIDENT,
    gradients_leave_before_they_are_made: RESIDENT,
}


@pytest.mark.parametrize("options", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_with_all_events_nothing_races(options: dict[str, Any]) -> None:
    Training(options).run()
    assert not simulated_device.races()


@pytest.mark.parametrize("missing", MISSING, ids=lambda missing: missing.__name__)
def test_a_missing_event_is_a_race(
    missing: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(MISSING[missing])
    missing(monkeypatch)
    with contextlib.suppress(NonFiniteGradientError):  # of memory that nobody has written yet
        training.run()
    torch.accelerator.synchronize()
    assert simulated_device.races()


# What a step costs the host.


@pytest.mark.parametrize("options", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_a_forward_waits_for_no_device(options: dict[str, Any]) -> None:
    training = Training(options)
    with training.optimizer:
        for _ in range(3):
            training.step()
        with simulated_device.counted() as step:
            with simulated_device.counted() as forward:
                loss = training.forward()
            loss.backward()
            training.optimizer.step()
    assert forward["kernels"] > 0
    waits = ("device_waits", "stream_waits", "event_waits", "blocking_copies")
    assert {name: forward[name] for name in waits} == dict.fromkeys(waits, 0)
    nothing = ("device_waits", "stream_waits", "pageable_non_blocking", "segment_allocations", "segment_frees")
    assert {name: step[name] for name in nothing} == dict.fromkeys(nothing, 0)


@pytest.mark.parametrize("options", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_bytes_to_the_device_are_counted_as_they_travel(options: dict[str, Any]) -> None:
    """Parameters that stay go there once a step. Those that stream go there in the forward and in the backward, whose
    first unit is there already."""
    training = Training(options)
    with training.optimizer:
        for _ in range(3):
            training.forward().backward()
            take_step(training.optimizer)
        training.optimizer.synchronize()
        before = training.optimizer.stats()["host_to_device_bytes"]
        with simulated_device.counted() as counts:
            training.forward().backward()
            take_step(training.optimizer)
            training.optimizer.synchronize()
        found = training.optimizer.stats()["host_to_device_bytes"] - before
    units = 2 * BLOCKS - 1 if options is STREAMED else BLOCKS
    assert found == counts["to_device_bytes"] == units * 2 * (WIDTH * WIDTH + WIDTH)


MIXED: dict[str, dict[str, Any]] = {
    "none ahead": {"tuning": Tuning(prefetch_units=0)},
    "one ahead": {},
    "three ahead": {"tuning": Tuning(prefetch_units=3)},
    "nested": {"tuning": Tuning(units=(nn.ModuleDict, nn.Sequential))},
    "two dtypes": {"keep_fp32": [nn.LayerNorm]},
    "all saved": {"tuning": Tuning(recompute=False)},
    "in tiles": {"tuning": Tuning(tile="2KiB")},
}


@pytest.mark.parametrize("name", MIXED)
def test_units_of_many_sizes_are_allocated_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on a step allocates as often as one with resident parameters, to the same bits, and nothing
    for a unit; the device never has more than was planned."""
    made: list[int] = []
    allocate = UnitMemory._allocate

    def noted(self: UnitMemory, nbytes: int, *args: Any, **options: Any) -> Any:
        made.append(nbytes)
        return allocate(self, nbytes, *args, **options)

    monkeypatch.setattr(UnitMemory, "_allocate", noted)

    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(torch.bfloat16).to(DEVICE)

    def step(model: nn.Module, optimizer: OffloadZero) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        loss.backward()
        take_step(optimizer)
        return loss.detach()

    def train(**options: Any) -> tuple[list[float], list[int]]:
        torch.manual_seed(4)
        model = Mixed(WIDTH).to(DEVICE)
        plain = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses, allocations = [], []
        with OffloadZero(model, plain, tier="cpu", **options) as optimizer:
            losses += [step(model, optimizer) for _ in range(2)]
            made.clear()
            for _ in range(3):
                with simulated_device.counted() as counts:
                    losses.append(step(model, optimizer))
                    torch.accelerator.synchronize()
                assert counts["segment_allocations"] == counts["segment_frees"] == 0
                allocations.append(counts["allocations"])
            assert not made
            assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes
        return [loss.item() for loss in losses], allocations

    expected, least = train(**{key: given for key, given in MIXED[name].items() if key == "keep_fp32"})
    losses, allocations = train(param_tier="cpu", **MIXED[name])
    if name != "in tiles":  # these compute otherwise
        assert losses == expected
        assert allocations == least


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "all saved"])
@pytest.mark.parametrize("place", ["device", "device and cpu", "cpu", "nvme"])
def test_activations_that_wait_allocate_nothing(
    place: str, recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on a step allocates as often as one whose activations stay where they are made."""
    monkeypatch.setattr("offload.model.activations.LEAST_BYTES", 1)

    def allocations(**options: Any) -> list[int]:
        training, found = Training(RESIDENT | {"tuning": Tuning(recompute=recompute)} | options), []
        with training.optimizer:
            for _ in range(5):
                with simulated_device.counted() as counts:
                    training.step()
                    torch.accelerator.synchronize()
                found.append(counts["allocations"])
            if options.get("activation_memory"):
                assert training.optimizer.stats()["peak_activation_bytes"] >= 4096 * BLOCKS
                assert (training.optimizer.stats()["activation_read_bytes"] > 0) is (place == "nvme")
        return found[2:]

    options: dict[str, Any] = {"activation_tier": place.split()[0], "activation_memory": "256KiB"}
    if place == "nvme":
        options |= {"path": tmp_path / "run", "activation_memory": "12KiB"}
    if place == "device and cpu":
        options |= {"activation_memory": "12KiB" if recompute else "32KiB"}
    plain: dict[str, Any] = {"activation_tier": "device"} if recompute else {}
    assert allocations(**options) == allocations(**plain)


@pytest.mark.parametrize("options", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_the_gradients_of_a_unit_leave_in_one_copy(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events: they are made, and the copy has ended."""
    training, events = Training(options), 0
    record = DeviceCopier._record

    def counted(self: DeviceCopier, *args: Any) -> Any:
        nonlocal events
        events += 1
        return record(self, *args)

    with training.optimizer:
        for _ in range(3):
            training.step()
        loss = training.forward()
        monkeypatch.setattr(DeviceCopier, "_record", counted)
        with simulated_device.counted() as counts:
            loss.backward()
        assert all(param.grad is not None for param in training.model.parameters())
        assert counts["to_host"] == BLOCKS
        if options is RESIDENT:  # others are of parameters
            assert events == 2 * BLOCKS


def test_the_device_waits_for_gradients_so_that_few_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not get to look at the copies."""

    def peak() -> int:
        gc.collect()  # else what earlier tests left may go meanwhile, and be counted as memory that was not taken
        training, go_on = Training(RESIDENT, blocks=16), threading.Event()
        with training.optimizer:
            training.step()
            training.optimizer.synchronize()  # else its gradients may go while those to be counted come
            gradients = training.optimizer._parts.gradients
            assert isinstance(gradients, LocalGradients)
            assert gradients._worker is not None
            gradients._worker.submit(go_on.wait)
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            training.forward().backward()
            found = torch.accelerator.max_memory_allocated() - before
            go_on.set()
            return found

    bounded = peak()
    monkeypatch.setattr("offload.grads.local.UNITS_LEAVING", 1000)
    assert bounded + 8 * 2 * WIDTH * WIDTH < peak()


def norm_of_values(model: nn.Module) -> Tensor:
    return torch.cat([param.grad.clone().cpu().float().flatten() for param in model.parameters()]).norm()


@pytest.mark.parametrize("options", [RESIDENT, STREAMED, {"tier": "device"}], ids=["resident", "streamed", "device"])
def test_torchs_clipping_makes_the_host_wait_twice(options: dict[str, Any]) -> None:
    """Once for all norms to go to the device, and once for the factor that comes of them."""
    training = Training(options)
    with training.optimizer:
        for _ in range(2):
            training.forward().backward()
            training.optimizer.synchronize()
            torch.accelerator.synchronize()
            expected = norm_of_values(training.model)
            with simulated_device.counted() as counts:
                total = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
            assert counts["blocking_copies"] <= 2 + (options["tier"] == "device")  # of its sums of squares
            assert total.item() == pytest.approx(expected.item(), rel=1e-5)
            assert norm_of_values(training.model).item() == pytest.approx(1e-3, rel=1e-2)
            training.optimizer.step()
            training.optimizer.zero_grad()


@pytest.mark.parametrize("place", ["model on the device", "model on the CPU"])
def test_memory_of_units_leaves_none_behind(place: str) -> None:
    """Units of the first step had memory of their own sizes, and fp32 parameters were there before: the allocator
    gives it back to the device, where something else may need it."""
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    widths = [2300 + 100 * (n % 3) for n in range(7)]  # 10 to 12 MiB each, larger than what the allocator cuts up
    model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b)) for a, b in pairwise(widths)))
    model = model.to(DEVICE) if place == "model on the device" else model
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OffloadZero(model, plain, tier="cpu", param_tier="cpu", device=DEVICE) as optimizer:
        for _ in range(3):
            model(torch.ones(1, 2300, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
            take_step(optimizer)
            torch.accelerator.synchronize()
        units = 2 * 2 * 2500**2  # of which two are there at once
        gradients = units + 2 * 2500**2  # on their way
        assert torch.accelerator.memory_reserved() - before < units + gradients + (8 << 20)
