from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.late_copier import LateCopier
from tests.support.streamed import Streams


@pytest.fixture(params=["cpu", "nvme", "late copies"])
def streams(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Streams:
    if request.param == "late copies":
        monkeypatch.setattr("offload.build.copier_for", lambda device: LateCopier(1))
    return Streams(tmp_path, {"param_tier": "cpu" if request.param == "cpu" else "nvme"})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models here are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
