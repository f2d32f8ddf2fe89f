"""Copies when threads, devices and errors are not where one expects them. The oracle: what torch says of itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import BudgetError, DeviceError, OffloadZero, Tuning
from offload.devices import copies
from offload.devices.copies import DeviceCopier
from offload.model.transfer import UnitTransfers
from offload.storage.arena import Arena
from tests import simulated_device
from tests.support import models
from tests.support.cases import often
from tests.support.scripts import run_code

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")


def test_threads_that_share_a_copier_keep_the_streams_that_they_had() -> None:
    copier, meet = DeviceCopier(DEVICE), threading.Barrier(2)
    left_with: list[bool] = []

    def copy_many() -> None:
        own = torch.Stream(DEVICE)
        torch.accelerator.set_stream(own)
        device, host = torch.zeros(8, device=DEVICE), torch.zeros(8).pin_memory()
        meet.wait()
        for _ in range(1000):
            copier.to_host(device, host)
            with copier.after_uploads():
                copier.to_device(host, device)
        torch.accelerator.current_stream(DEVICE).synchronize()
        left_with.append(torch.accelerator.current_stream(DEVICE) == own)

    threads = [threading.Thread(target=copy_many) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert left_with == [True, True]
    simulated_device.races()  # they wrote each other's order away: each has its own memory


SECOND = """
import sys
import torch
from tests import simulated_device
from tests.support import models
from tests.support.device import load_simulated
load_simulated()
from offload import OffloadZero
model = models.build("gpt").to("simulated:1")
options = {"path": sys.argv[2]} if len(sys.argv) > 2 else {}
batches = models.losses("gpt", model, "simulated:1")
with OffloadZero(model, tier=sys.argv[1].split()[0], param_tier=sys.argv[1].split()[1], **options) as optimizer:
    for _ in range(3):
        next(batches)().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
del optimizer, model, batches
print(sorted(simulated_device.contexts()))
"""


@pytest.mark.parametrize(
    "tiers", often(["cpu device", "cpu cpu", "nvme nvme", "device device"], "nvme nvme", "device device")
)
def test_a_model_on_the_second_device_leaves_the_first_alone(tiers: str, tmp_path: Path) -> None:
    done = run_code(SECOND, tiers, *([str(tmp_path / "run")] if "nvme" in tiers else []))
    errors = [line for line in done.stderr.splitlines() if not line.startswith("offload: ")]
    assert (done.stdout, errors) == ("[1]\n", [])


DROPPED = """
import sys

import torch

from tests import simulated_device

simulated_device.load()
from offload.devices.copies import DeviceCopier
from offload.storage.arena import Arena

way, ending, nbytes = sys.argv[1], sys.argv[2], 4 << 20
copier = DeviceCopier(torch.device("simulated:0"))
arena = Arena(nbytes, copier)
host, there = arena.carve(nbytes).fill_(7), torch.full((nbytes,), 5, dtype=torch.uint8, device="simulated:0")
with simulated_device.slow_link(nbytes / 0.5):
    copy = copier.to_device(host, there) if way == "up" else copier.to_host(there, host)
copy.wait_on_device()
del copy, host
if ending == "is closed":
    arena.close()
del arena
print(there.cpu().unique().tolist())
"""


@pytest.mark.parametrize("ending", ["is closed", "is dropped"])
@pytest.mark.parametrize(("way", "found"), [("up", 7), ("down", 5)])
def test_memory_is_not_freed_under_a_copy_that_only_the_device_has_waited_for(
    way: str, found: int, ending: str
) -> None:
    done = run_code(DROPPED, way, ending)
    assert (done.stdout, done.stderr) == (f"[{found}]\n", "")


def test_memory_of_copies_that_do_not_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ENDING_S", 0.05)
    copier = DeviceCopier(DEVICE)
    arena = Arena(1 << 20, copier)
    memory = arena.carve(1 << 20).fill_(7)
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    with simulated_device.slow_link(1e6):
        copier.to_device(memory, there).wait_on_device()
    address = memory.data_ptr()
    del arena, memory
    assert is_mapped(address)
    assert there.cpu().eq(7).all()


def is_mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_what_is_computed_after_a_refused_pin_is_right() -> None:
    """And after memory that was not locked is unlocked."""
    copier, memory = DeviceCopier(DEVICE), torch.zeros(4096, dtype=torch.uint8)
    simulated_device.refuse_pinning(1)
    with pytest.raises(BudgetError):
        copier.pin(memory)
    assert torch.ones(3, device=DEVICE).cpu().tolist() == [1, 1, 1]
    copier.unpin(memory)
    assert torch.ones(3, device=DEVICE).cpu().tolist() == [1, 1, 1]


@pytest.mark.parametrize("when", ["after a backward", "between steps"])
@pytest.mark.parametrize(
    "options",
    [{"tier": "cpu"}, {"tier": "cpu", "param_tier": "cpu"}, {"tier": "device"}],
    ids=["resident", "streamed", "device"],
)
def test_a_device_that_fails_lets_go_of_the_model(options: dict[str, Any], when: str) -> None:
    model = models.build("mlp").to(DEVICE)
    kinds = [type(param) for param in model.parameters()]
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    optimizer = OffloadZero(model, tuning=Tuning(chunk="4KiB", threads=1), **options)
    batches = models.losses("mlp", model, DEVICE)
    for _ in range(2):
        next(batches)().backward()
        optimizer.step()
        optimizer.zero_grad()
    if when == "after a backward":
        next(batches)().backward()
    with simulated_device.failing():
        if when == "after a backward":
            with pytest.raises(DeviceError, match=r"device failed: .*device-side assert triggered\. .*resume=True"):
                optimizer.step()
        with contextlib.suppress(DeviceError):
            optimizer.close()
        optimizer.close()
    assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()] == hooks
    assert [type(param) for param in model.parameters()] == kinds or options.get("param_tier")
    simulated_device.races()


def test_the_first_error_of_a_device_is_raised_and_not_that_of_the_closing() -> None:
    model = models.build("mlp").to(DEVICE)
    optimizer = OffloadZero(model, tier="cpu", param_tier="cpu")
    with simulated_device.failing(), pytest.raises(ZeroDivisionError), optimizer:
        raise ZeroDivisionError
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_each_call_of_a_copier_says_that_the_device_failed() -> None:
    copier = DeviceCopier(DEVICE)
    device, host, other = torch.zeros(8, device=DEVICE), torch.zeros(8).pin_memory(), torch.zeros(8, device=DEVICE)
    copy, waits = copier.to_host(device, host), copier.to_device(torch.zeros(8), other)
    calls: list[Callable[[], object]] = [
        copier.mark,
        lambda: copier.to_host(device, host),
        copy.done,
        copy.wait,
        waits.wait_on_device,
    ]
    with simulated_device.failing():
        for call in calls:
            with pytest.raises(DeviceError) as raised:
                call()
            assert isinstance(raised.value.__cause__, torch.AcceleratorError)
    copy.wait()
    waits.wait()


def test_a_closing_that_fails_lets_go_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("mlp").to(DEVICE)
    optimizer = OffloadZero(model, tier="cpu", param_tier="cpu")
    close = UnitTransfers.close

    def fails(self: UnitTransfers) -> None:
        close(self)
        raise ZeroDivisionError

    monkeypatch.setattr(UnitTransfers, "close", fails)
    with pytest.raises(ZeroDivisionError):
        optimizer.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    optimizer.close()
