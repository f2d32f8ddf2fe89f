"""How far the host runs ahead of a device that is behind. The oracle: what is stated."""

from __future__ import annotations

import pytest
import torch

from offload import OffloadZero, Tuning
from offload.devices.copies import DeviceEvent, HostCopier
from offload.model.transfer import AHEAD_UNITS
from tests.support.toy import Net, batch


class _Later(DeviceEvent):
    """A device that does nothing until somebody waits for it."""

    def __init__(self, copier: SlowDevice) -> None:
        self._copier = copier
        copier.marks += 1
        self._number = copier.marks
        self._is_past = False

    def done(self) -> bool:
        return self._is_past

    def wait(self) -> None:
        self._copier.ahead.append(self._copier.marks - self._number)
        self._is_past = True

    def wait_on_device(self) -> None:
        return None


class SlowDevice(HostCopier):
    """Attributes: marks: how many were set; ahead: how many had been set after the one that was waited for."""

    def __init__(self) -> None:
        self.marks = 0
        self.ahead: list[int] = []

    def mark(self) -> DeviceEvent:
        return _Later(self)


def test_the_host_is_a_stated_number_of_units_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = SlowDevice()
    monkeypatch.setattr("offload.build.copier_for", lambda device: copier)
    model = Net(3 * AHEAD_UNITS)
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        for _ in range(2):  # memory from the system has a mark, too: the second pass needs none
            copier.ahead.clear()
            with torch.no_grad():
                model(batch(0))
        assert set(copier.ahead) <= {AHEAD_UNITS, AHEAD_UNITS + 1}  # one release may be of two flat parameters
        assert len(copier.ahead) > AHEAD_UNITS
        assert optimizer.stats()["wait_device_s"] > 0
