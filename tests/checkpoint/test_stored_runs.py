"""Runs that earlier versions committed on one rank go on under this one, with the bits of plain torch and NumPy."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.checkpoint.manifest import NEWEST, VERSION
from offload.cli.main import app
from tests.checkpoint import stored_runs
from tests.checkpoint.stored_runs import CASES, FOLDER, RANKS, STEPS, unpacked

ARCHIVES = sorted(FOLDER.glob("*/*.tar.xz"))
OF_ONE_RANK = [archive for archive in ARCHIVES if archive.name.removesuffix(".tar.xz") not in RANKS]
LAYOUTS: dict[str, dict[str, Any]] = {"as it was": {}, "another": {"tuning": {"chunk": "1MiB"}}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("archive", OF_ONE_RANK, ids=lambda archive: f"{archive.parent.name}/{archive.name}")
def test_a_stored_run_goes_on_with_the_same_bits(archive: Path, layout: str, tmp_path: Path) -> None:
    case, plain, directories = unpacked(archive, tmp_path)
    given = stored_runs.options(case, tmp_path, resume=True, **LAYOUTS[layout])
    if case == "snapshot":
        given["resume"] = directories
    model, optimizer = stored_runs.begun(case, given)
    with optimizer:
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


def test_every_version_of_the_manifest_is_stored() -> None:
    found = set()
    for archive in ARCHIVES:
        with tarfile.open(archive) as stored:
            for member in stored:
                if Path(member.name).name.startswith("manifest"):
                    content = stored.extractfile(member)
                    assert content is not None
                    found.add(json.loads(content.read().rstrip(b"\0"))["version"])
    assert found == {*range(VERSION, NEWEST + 1)}
