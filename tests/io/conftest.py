from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.io import engine as contract
from offload.io.engine import IOEngine
from offload.io.io_uring import UringEngine
from offload.io.portable import PortableEngine
from offload.io.threads import ThreadEngine
from tests.support.faulty_engine import FaultyEngine
from tests.support.simulated_disk import SimulatedDisk

ENGINES: dict[str, Callable[[], IOEngine]] = {
    "threads": ThreadEngine,
    "portable": PortableEngine,
    "uring": UringEngine,
    "late": FaultyEngine,
    "simulated": SimulatedDisk,
}
OVER_PREADV = ("threads", "late")
"""Those whose system calls a test can replace."""
QUEUED = ("threads", "portable", "uring")
"""Those whose requests a test can answer in their place."""


def _made(request: pytest.FixtureRequest) -> Iterator[IOEngine]:
    engine = ENGINES[request.param]()
    yield engine
    engine.close()


engine = pytest.fixture(params=ENGINES)(_made)
over_preadv = pytest.fixture(params=OVER_PREADV)(_made)
queued = pytest.fixture(params=QUEUED)(_made)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "file")


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_told_no_direct", set())
