"""A run goes on over another number of ranks, and at another stage: the states are those committed, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.checkpoint.reader import Reader
from offload.io.engine import IOFuture
from offload.storage.directories import file_name
from offload.storage.swap_file import SlotFile
from tests.distributed.test_commits import Training, same
from tests.support.cases import products
from tests.support.ranks import Worlds
from tests.support.toy import take_step

pytestmark = pytest.mark.timeout(120)


def _goes_on(base: str, number: int, options: dict[str, Any]) -> tuple[list[float], int]:
    """Resumes what the world before committed, compares, trains two steps, commits, and says what was computed.

    Returns: the losses; how many bytes of states this rank read from swap files of the commit.
    """
    read: list[int] = []
    real = SlotFile.read

    def counted(file: SlotFile, chunk: int, data: memoryview, **version: Any) -> IOFuture:
        if type(file) is SlotFile:  # and not one of this run's own
            read.append(len(data))
        return real(file, chunk, data, **version)

    SlotFile.read = counted  # type: ignore[method-assign, assignment]
    try:
        training = Training([f"{base}/a", f"{base}/b"], **options, resume="auto")
    finally:
        SlotFile.read = real  # type: ignore[method-assign]
    with training.optimizer as optimizer:
        if number:
            assert optimizer.resumed is not None
            assert optimizer.resumed.step == 2 * number
            assert optimizer.resumed.extra["number"] == number - 1  # type: ignore[index]
            assert same(training.bits(), torch.load(f"{base}/bits{number - 1}"))
        losses = []
        for _ in range(2):
            loss = next(training.batches)()
            loss.backward()
            losses.append(loss.item())
            optimizer.clip_grad_norm_(0.5)
            take_step(optimizer)
        optimizer.commit({"number": number})
        bits = training.bits()
        if dist.get_rank() == 0:
            torch.save(bits, f"{base}/bits{number}")
    return losses, sum(read)


WORLDS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "4, 2, 1": [(4, {"stage": 2}), (2, {"stage": 3}), (1, {})],
    "1, 3, 2": [(1, {"tuning": {"split_master": True}}), (3, {"stage": 1}), (2, {"stage": 3, "param_tier": "nvme"})],
    "2 whole, 2 partitioned, 2 whole": [
        (2, {"stage": 2, "param_tier": "nvme", "tuning": {"split_master": True}}),
        (2, {"stage": 3, "param_tier": "nvme", "tuning": {"split_master": True}}),
        (2, {"stage": 2, "param_tier": "nvme"}),
    ],
    "2 partitioned, 3 whole, 2 whole": [
        (2, {"stage": 3, "param_tier": "nvme", "tuning": {"split_master": True}}),
        (3, {"stage": 1, "param_tier": "cpu"}),
        (2, {"stage": 2, "param_tier": "nvme"}),
    ],
}


@pytest.mark.parametrize(
    ("worlds_of", "form"),
    products(
        WORLDS,
        ["fp32", "8bit"],
        often=[("4, 2, 1", "fp32"), ("1, 3, 2", "8bit"), ("2 whole, 2 partitioned, 2 whole", "fp32")],
    ),
)
def test_a_run_goes_on_over_another_number_of_ranks(worlds: Worlds, tmp_path: Path, worlds_of: str, form: str) -> None:
    every: list[float] = []
    for number, (ranks, options) in enumerate(WORLDS[worlds_of]):
        before = 0
        if number:
            with Reader([tmp_path / "a", tmp_path / "b"]) as reader:
                before = sum(slot.size for slots in reader._slots for slot in slots)
        answers = worlds(ranks).run(_goes_on, str(tmp_path), number, options | {"states": form})
        every += [sum(found[0][step] for found in answers) / ranks for step in range(2)]
        # Each rank reads what it needs; a slot at a border is needed on both sides of it.
        assert all(found[1] <= before for found in answers)
        assert sum(found[1] for found in answers) <= 2 * before
        with Reader([tmp_path / "a", tmp_path / "b"]) as reader:
            assert [manifest.rank for manifest in reader.manifests] == list(range(ranks))
            assert all(slot.error is None for slot in reader.verify())
        left = {name for place in "ab" for name in os.listdir(tmp_path / place)}
        swap = {name.rpartition("-")[2] for name in left if name.startswith("swap-")}
        assert swap == {str(rank) for rank in range(ranks)}
        assert len({file.run_id for file in map(file_name, left) if file and file.kind != "older"}) == 1
    assert every[-1] < every[0], "the loss does not go on"
