"""Where frameworks are told to train: on the CPU, or on the simulated accelerator, as on one that they do not know."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.device import DEVICE

ON_CPU = DEVICE == "cpu"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, so that sums have the same order in both runs, and no state of an accelerator before this one."""
    accelerate = pytest.importorskip("accelerate")
    if not ON_CPU:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def own(rank: int) -> torch.device:
    """The device of a rank."""
    return torch.device(DEVICE, rank)


def for_lightning(part: str = "pytorch") -> dict[str, Any]:
    """Arguments of Lightning's Trainer. Args: part: "fabric": of its Fabric."""
    if ON_CPU:
        return {"accelerator": "cpu", "devices": 1}
    from lightning.pytorch.accelerators import Accelerator  # Fabric's, too

    class Simulated(Accelerator):  # type: ignore[misc]
        """What Lightning's documentation asks of a device that it has no class for."""

        setup_device = staticmethod(torch.accelerator.set_device_index)
        parse_devices = get_parallel_devices = staticmethod(lambda devices: [torch.device(DEVICE, 0)])
        auto_device_count = staticmethod(torch.accelerator.device_count)
        is_available = staticmethod(torch.accelerator.is_available)
        name = staticmethod(lambda: DEVICE)

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

    strategies = importlib.import_module(f"lightning.{part}.strategies")
    return {"strategy": strategies.SingleDeviceStrategy(torch.device(DEVICE, 0), Simulated())}
