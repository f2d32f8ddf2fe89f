"""Ranks of one process, each a thread: for unit tests of what ranks do together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from offload.ranks.communicator import Communicator, Work, average
from tests.support.runs import Done


class Threads:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.rows: list[Tensor] = [torch.zeros(0)] * size

    def rank(self, number: int) -> Communicator:
        return _Rank(self, number)

    def run(self, work: Callable[[Communicator], Any]) -> list[Any]:
        """What `work` returns on each rank."""
        with ThreadPoolExecutor(len(self.rows)) as pool:
            return list(pool.map(lambda number: work(self.rank(number)), range(len(self.rows))))


class _Rank(Communicator):
    def __init__(self, threads: Threads, rank: int) -> None:
        super().__init__(rank, len(threads.rows), rank, len(threads.rows))
        self._threads = threads
        self._calls: Counter[str] = Counter()

    def _rows(self, own: Tensor) -> list[Tensor]:
        self._threads.rows[self.rank] = own
        self._threads.barrier.wait()
        rows = [row.clone() if isinstance(row, Tensor) else row for row in self._threads.rows]
        self._threads.barrier.wait()
        return rows

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        self._calls["reduce_scatter"] += 1
        average(torch.stack([row.view(self.size, -1)[self.rank] for row in self._rows(full)]), out)
        return Done()

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        out.copy_(torch.cat(self._rows(shard)))
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._rows(tensor)[source])

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._rows(values))

    def exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        found: list[tuple[Tensor, int]] = self._rows((sent, target))  # type: ignore[arg-type, assignment]
        came, to = found[source]
        if received.numel():
            assert to == self.rank
            received.copy_(came)

    def stats(self) -> dict[str, int]:
        return {"reduce_scatter": self._calls["reduce_scatter"]}

    def close(self) -> bool:
        return True
