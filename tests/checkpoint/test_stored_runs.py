"""Runs that earlier versions committed on one rank go on under this one, with the bits of plain torch and NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.cli.main import app
from tests.checkpoint import stored_runs
from tests.checkpoint.stored_runs import CASES, FOLDER, RANKS, STEPS, Model, unpacked

ARCHIVES = sorted(FOLDER.glob("*/*.tar.xz"))
OF_ONE_RANK = [archive for archive in ARCHIVES if archive.name.removesuffix(".tar.xz") not in RANKS]
LAYOUTS: dict[str, dict[str, Any]] = {"as it was": {}, "another": {"tuning": {"chunk": "1MiB"}}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("archive", OF_ONE_RANK, ids=lambda archive: f"{archive.parent.name}/{archive.name}")
def test_a_stored_run_goes_on_with_the_same_bits(archive: Path, layout: str, tmp_path: Path) -> None:
    case, plain, directories = unpacked(archive, tmp_path)
    model = Model(is_frozen=case == "frozen")
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.constant_(param, 0.5)  # what was there before has no part in it
    given = stored_runs.options(case, tmp_path, resume=True, **LAYOUTS[layout])
    if case == "snapshot":
        given["resume"] = directories
    with stored_runs.in_least_memory(model, case, given) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == STEPS
        extra: Any = optimizer.resumed.extra
        committed = stored_runs.extra_of(0)
        assert extra["tokens"] == committed["tokens"]
        assert torch.equal(extra["position"], committed["position"])
        stored_runs.assert_same(stored_runs.states_of(model, optimizer), plain.states())
        for step in range(STEPS, STEPS + 2):
            plain.step(step)
            stored_runs.train(model, optimizer, step)
        stored_runs.assert_same(stored_runs.states_of(model, optimizer), plain.states())


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: f"{archive.parent.name}/{archive.name}")
def test_a_stored_run_is_verified(archive: Path, tmp_path: Path) -> None:
    *_, directories = unpacked(archive, tmp_path)
    result = CliRunner().invoke(app, ["verify", *map(str, directories)])
    assert result.exit_code == 0, result.output


def test_every_case_is_stored() -> None:
    assert {archive.name.removesuffix(".tar.xz") for archive in ARCHIVES} == CASES.keys()
