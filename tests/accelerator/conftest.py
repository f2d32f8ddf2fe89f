from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import accelerator


@pytest.fixture(autouse=True)
def _known_state() -> Iterator[None]:
    accelerator.races()
    accelerator.set_delays(0)
    yield
    accelerator.refuse_launches(0)
    accelerator.refuse_pinning(0)
    accelerator.fail_allocation(0)
