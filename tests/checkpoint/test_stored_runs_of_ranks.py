"""Runs that several ranks of earlier versions committed go on under this one, on as many ranks and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint import stored_runs
from tests.checkpoint.stored_runs import FOLDER, RANKS, STEPS, PlainRun, unpacked
from tests.support.ranks import Worlds

ARCHIVES = [path for path in sorted(FOLDER.glob("*/*.tar.xz")) if path.name.removesuffix(".tar.xz") in RANKS]
MORE = 2
"""Steps after the commit."""


def _gone_on(case: str, given: dict[str, Any], rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Resumes. Returns: what the run has at its commit, and `MORE` steps later."""
    model, optimizer = stored_runs.begun(case, given)
    with optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == STEPS
        extra: Any = optimizer.resumed.extra
        committed = stored_runs.extra_of(rank)
        assert extra["tokens"] == committed["tokens"]
        assert torch.equal(extra["position"], committed["position"])
        found = stored_runs.states_of(model, optimizer)
        for step in range(STEPS, STEPS + MORE):
            stored_runs.train(model, optimizer, step, rank)
        return found, stored_runs.states_of(model, optimizer)


def _go_on(case: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On one of the ranks that committed it."""
    rank = dist.get_rank()
    return _gone_on(case, stored_runs.options(case, folder, rank, resume=True), rank)


def _assert_plain(plain: PlainRun, ranks: int, runs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    committed = plain.states()
    for step in range(STEPS, STEPS + MORE):
        plain.step(step, ranks)
    for found, later in runs:
        stored_runs.assert_same(found, committed)
        stored_runs.assert_same(later, plain.states())


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: f"{archive.parent.name}/{archive.name}")
def test_a_stored_run_of_ranks_goes_on_with_the_same_bits(archive: Path, worlds: Worlds, tmp_path: Path) -> None:
    case, plain, _ = unpacked(archive, tmp_path)
    _assert_plain(plain, RANKS[case], worlds(RANKS[case]).run(_go_on, case, tmp_path))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: f"{archive.parent.name}/{archive.name}")
def test_a_stored_run_of_ranks_goes_on_with_the_same_bits_on_one(archive: Path, tmp_path: Path) -> None:
    case, plain, directories = unpacked(archive, tmp_path)
    alone = stored_runs.options(case, tmp_path, resume=True)
    if alone["path"] != directories:  # one for each rank
        alone |= {"path": tmp_path / "alone", "resume": directories}
    _assert_plain(plain, 1, [_gone_on(case, alone)])
