from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import simulated_device
from tests.support.device import refuse_launches


@pytest.fixture(autouse=True)
def _known_state() -> Iterator[None]:
    simulated_device.races()
    simulated_device.set_delays(0)
    yield
    refuse_launches(0)
    simulated_device.refuse_pinning(0)
    simulated_device.fail_allocation(0)
