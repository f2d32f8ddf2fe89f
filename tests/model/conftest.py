from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.held import Held, held_after_a_step
from tests.support.cases import often
from tests.support.late_copier import CopiedBy, LateCopier
from tests.support.streamed import Streams


# What reads too early, or writes too late, is wrong with late copies wherever it is with those of a disk.
@pytest.fixture(params=often(["cpu", "nvme", "late copies"], "cpu", "late copies"))
def streams(request: pytest.FixtureRequest, tmp_path: Path, copied_by: CopiedBy) -> Streams:
    if request.param == "late copies":
        copied_by(lambda: LateCopier(1))
    return Streams(tmp_path, {"param_tier": "cpu" if request.param == "cpu" else "nvme"})


@pytest.fixture(params=often(["resident", "streamed from cpu", "streamed from nvme"], "resident", "streamed from nvme"))
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Held]:
    with held_after_a_step(request.param, tmp_path / "run") as found:
        yield found
