"""How far the host runs ahead of a device that is behind. The oracle: what is stated."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from offload import OffloadZero, RankError, Tuning
from offload.devices.copies import DeviceEvent, HostCopier
from offload.model.fetch import StreamedUnits
from offload.model.transfer import HOST_LEADS_UNITS
from offload.optim.step import Step
from tests.support.communicators import GoneWork, PendingWork
from tests.support.late_copier import CopiedBy, LateCopier
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

    def mark(self, stream: object = None) -> DeviceEvent:
        return _Later(self)


def test_the_host_is_a_stated_number_of_units_ahead(copied_by: CopiedBy) -> None:
    copier = SlowDevice()
    copied_by(lambda: copier)
    model = Net(3 * HOST_LEADS_UNITS)
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        for _ in range(2):  # memory from the system has a mark, too: the second pass needs none
            copier.ahead.clear()
            with torch.no_grad():
                model(batch(0))
        # One release may be of two flat parameters.
        assert set(copier.ahead) <= {HOST_LEADS_UNITS, HOST_LEADS_UNITS + 1}
        assert len(copier.ahead) > HOST_LEADS_UNITS
        assert optimizer.stats()["wait_device_s"] > 0


class _Never(DeviceEvent):
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        pytest.fail("the host waits for ever")

    def wait_on_device(self) -> None:
        return None


def test_the_host_asks_other_ranks_before_it_waits_for_the_device() -> None:
    model = Net(2)
    with OffloadZero(model, tier="cpu", param_tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        units = optimizer._held.units
        assert isinstance(units, StreamedUnits)
        transfers = units.transfers
        transfers._awaited_gathers.append(GoneWork())
        with pytest.raises(RankError, match="rank 1 is gone"):
            transfers._wait_for(_Never(), "wait for device")
        transfers._awaited_gathers.clear()


def test_what_was_waited_for_on_the_device_only_has_ended_when_all_is_abandoned() -> None:
    """Its memory goes then."""
    with OffloadZero(Net(2), tier="cpu", param_tier="cpu", tuning=Tuning(chunk="4KiB")) as optimizer:
        units = optimizer._held.units
        assert isinstance(units, StreamedUnits)
        under_way = [PendingWork() for _ in range(2)]
        units.transfers._awaited_gathers.append(under_way[0])
        units.named("blocks.0").gathers.append(under_way[1])
        units.transfers.abandon()
        assert all(one.has_ended for one in under_way)


@pytest.mark.parametrize("end", [Step.abandon, Step.close])
def test_a_step_has_ended_when_its_worker_has_ended_what_it_began(
    end: Callable[[Step], None], monkeypatch: pytest.MonkeyPatch, copied_by: CopiedBy
) -> None:
    """The memory of its chunks goes then. What the worker has not begun is dropped."""
    copied_by(lambda: LateCopier(1))
    began, go_on, ended = threading.Event(), threading.Event(), list[object]()
    model = Net(2)
    with OffloadZero(model, tier="cpu", param_tier="device", tuning=Tuning(chunk="4KiB")) as optimizer:

        def run(self: Step, work: object) -> None:
            began.set()
            go_on.wait()
            ended.append(work)

        monkeypatch.setattr(Step, "_run", run)
        model(batch(0)).float().square().mean().backward()
        optimizer.step()
        assert began.wait(60)
        threading.Timer(0.2, go_on.set).start()
        assert len(optimizer._parts.step._pending) > 1
        end(optimizer._parts.step)
        assert len(ended) == 1
        optimizer._parts.step.abandon()
