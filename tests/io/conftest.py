from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.io import engine as contract
from offload.io.engine import IOEngine
from offload.io.threads import ThreadEngine
from tests.support.faulty_engine import FaultyEngine

ENGINES: dict[str, Callable[[], IOEngine]] = {"threads": ThreadEngine, "late": FaultyEngine}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[IOEngine]:
    made = ENGINES[request.param]()
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "file")


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_told_no_direct", set())
