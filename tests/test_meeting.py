"""Ranks that take turns in what they clear up: the old record goes first of all, whoever has it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from offload.checkpoint.commit import Commit, write_commit
from offload.checkpoint.manifest import Digest
from offload.collectives import Communicator
from offload.meeting import in_turns
from offload.resuming import Found


class Threads:
    """Ranks of one process, each a thread."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._rows: list[Tensor] = [torch.zeros(0)] * size

    def rank(self, number: int) -> Communicator:
        def gather(values: Tensor) -> Tensor:
            self._rows[number] = values
            self._barrier.wait()
            found = torch.stack(self._rows)
            self._barrier.wait()
            return found

        def any_true(flag: bool) -> bool:
            return bool(gather(torch.tensor([flag])).any())

        return cast(Communicator, SimpleNamespace(rank=number, gather=gather, any_true=any_true))


def turns(pressing: list[int], *, stays: bool = False) -> list[int]:
    """In which order the ranks worked. Args: pressing: how pressing it is for each; stays: also when it has worked."""
    ranks, left, worked = Threads(len(pressing)), [*pressing], cast(list[int], [])

    def run(rank: int) -> None:
        def work() -> None:
            worked.append(rank)
            assert len(worked) <= len(pressing), "some rank never ends"
            left[rank] = left[rank] if stays else 0

        in_turns(ranks.rank(rank), lambda: left[rank], work)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(pressing))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return worked


@pytest.mark.parametrize("stays", [False, True])
def test_each_rank_works_once_the_most_pressing_first(stays: bool) -> None:
    assert turns([1, 2, 0, 1, 2], stays=stays) == [1, 4, 0, 3]
    assert turns([0, 0]) == []


def test_a_record_that_was_replaced_is_what_presses_most(tmp_path: Path) -> None:
    before, after = (Commit(run * 32, 7, (Digest(1, "0" * 32),), old) for run, old in (("a", None), ("b", "a" * 32)))
    found: Any = SimpleNamespace(settled=[tmp_path])
    assert Found._left(found, after) == 0
    (tmp_path / "COMMIT.new").touch()
    assert Found._left(found, after) == 1
    write_commit(tmp_path, before)
    (tmp_path / "COMMIT.new").touch()
    assert Found._left(found, after) == 2
