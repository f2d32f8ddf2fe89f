"""A run that ends with Python makes its last commit on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadZero, Tuning
from tests.support.scripts import run_code

SCRIPT = """
import atexit, sys, torch
from torch import nn
from offload import OffloadZero, Tuning
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
optimizer = OffloadZero(model, path=sys.argv[1], cpu_memory="12MiB", commit_every=1,
                        tuning=Tuning(chunk="64KiB", io_engine=sys.argv[2]))
atexit.register(optimizer.close)
model(torch.ones(2, 256)).float().sum().backward()
optimizer.step()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["threads", "portable"])
def test_close_at_exit_ends_the_step_under_way_and_commits_it(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run"
    run = run_code(SCRIPT, str(path), engine, limit_s=200)
    assert run.returncode == 0, run.stderr
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with OffloadZero(
        model, path=path, cpu_memory="12MiB", commit_every=1, resume=True, tuning=Tuning(chunk="64KiB")
    ) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 1
