"""Each event that a run waits for, taken out: the simulated device has to see it. And what a step costs the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import NonFiniteGradientError, OffloadZero, Tuning
from offload.devices.copies import DONE, DeviceCopier
from offload.grads.local import LocalGradients
from offload.model import flat_param
from offload.model.flat_param import SpareMemory
from offload.model.transfer import UnitTransfers
from offload.optim.adam import NewParameters
from tests.support import accelerator

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not accelerator.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
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
    give = SpareMemory.give

    def give_at_once(self: SpareMemory, tensor: Tensor, limit: int) -> Any:
        give(self, tensor, limit)
        return DONE

    patch.setattr(SpareMemory, "give", give_at_once)


def kernels_ignore_uploads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitTransfers, "_wait_on_device", lambda self, unit: None)


def new_values_ignore_the_step(patch: pytest.MonkeyPatch) -> None:
    begins = NewParameters.step_begins

    def without_mark(self: NewParameters) -> None:
        begins(self)
        self._step = DONE

    patch.setattr(NewParameters, "step_begins", without_mark)


def kernels_ignore_new_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewParameters, "finish", lambda self, flat: self._exchange.finish(flat))


def gradients_leave_before_they_are_made(patch: pytest.MonkeyPatch) -> None:
    to_host = DeviceCopier.to_host
    patch.setattr(DeviceCopier, "to_host", lambda self, src, dst, after=None: to_host(self, src, dst, DONE))


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
    assert not accelerator.races()


@pytest.mark.parametrize("missing", MISSING, ids=lambda missing: missing.__name__)
def test_a_missing_event_is_a_race(
    missing: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(MISSING[missing])
    missing(monkeypatch)
    with contextlib.suppress(NonFiniteGradientError):  # of memory that nobody has written yet
        training.run()
    torch.accelerator.synchronize()
    assert accelerator.races()


# What a step costs the host.


@pytest.mark.parametrize("options", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_a_forward_waits_for_no_device(options: dict[str, Any]) -> None:
    training = Training(options)
    with training.optimizer:
        for _ in range(3):
            training.step()
        with accelerator.counted() as step:
            with accelerator.counted() as forward:
                loss = training.forward()
            loss.backward()
            training.optimizer.step()
    assert forward["kernels"] > 0
    waits = ("device_waits", "stream_waits", "event_waits", "blocking_copies")
    assert {name: forward[name] for name in waits} == dict.fromkeys(waits, 0)
    nothing = ("device_waits", "stream_waits", "pageable_non_blocking", "segment_allocations", "segment_frees")
    assert {name: step[name] for name in nothing} == dict.fromkeys(nothing, 0)


def test_units_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = flat_param.UntypedStorage

    def storage(nbytes: int, **given: Any) -> torch.UntypedStorage:
        sizes.append(nbytes)
        return real(nbytes, **given)

    monkeypatch.setattr(flat_param, "UntypedStorage", storage)
    training = Training(STREAMED)
    with training.optimizer:
        training.step()
        training.step()
        assert any(sizes)
        sizes.clear()
        training.step()
        assert not any(sizes)  # storages without memory are not allocations


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
                with accelerator.counted() as counts:
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


def test_the_device_waits_for_gradients_so_that_few_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not get to look at the copies."""

    def peak() -> int:
        training, go_on = Training(RESIDENT, blocks=16), threading.Event()
        with training.optimizer:
            training.step()
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
