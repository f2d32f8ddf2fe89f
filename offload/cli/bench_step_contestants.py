"""What `offload bench step` measures: the step itself, and its two limits, the disk's and the kernel's."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.devices.copies import HostCopier
from offload.io.engine import IOFuture
from offload.io.select import open_engine
from offload.native import AdamScalars, Kernels, load
from offload.sizes import PAGE_BYTES, round_up
from offload.storage.arena import Arena

EACH_WAY = (2, 4, 8)
"""Buffers for reading, and as many for writing, among which the best number for the disk is looked for. Not fewer in
all than the step has: memory that fits a CPU's cache makes the same drive look faster."""


@dataclass(frozen=True)
class Transfers:
    """What a step moves each way: so many slots of so many bytes."""

    count: int
    length: int

    @property
    def nbytes(self) -> int:
        """Both ways together."""
        return 2 * self.count * self.length


class Disk:
    """The engine of the step, reading a file and writing it at once, and nothing else.

    Reads and writes do not wait for each other, so that, unlike in a step, both directions have work from the first
    byte to the last; each goes through its file in order.

    Args: path: a directory on the drive; most: of any run, for which file and buffers are made.
    """

    def __init__(self, path: Path, most: Transfers) -> None:
        self._length = round_up(most.length, PAGE_BYTES)
        with ExitStack() as undo:
            arena = Arena(2 * max(EACH_WAY) * self._length, HostCopier())
            undo.callback(arena.close)
            # Closed before the arena: it waits for what is under way, also when a run was cut off.
            engine = open_engine("auto", [path])
            undo.callback(engine.close)
            self.engine_name = engine.name
            self._engine = engine
            self._file = engine.open(str(path / "limit"))
            os.posix_fallocate(self._file.fd, 0, most.count * self._length)
            engine.register(arena.memory)
            lent = [arena.carve(self._length) for _ in range(2 * max(EACH_WAY))]
            for buffer in lent:
                # A drive that compresses would be faster with other bytes.
                buffer.view(torch.int64).random_()
            self._buffers = [memoryview(buffer.numpy().data) for buffer in lent]
            # The first write into reserved space is slower than those of a step.
            for future in [engine.write(self._file, i * self._length, self._buffers[0]) for i in range(most.count)]:
                future.result()
            self._undo = undo.pop_all()

    def run(self, transfers: Transfers, each_way: int, ways: Sequence[str] = ("read", "write")) -> float:
        """Seconds that `transfers` take, with `each_way` buffers for reading and as many for writing.

        Args: ways: what to do; both at once, if both.
        """
        half = transfers.count // 2
        todo = {
            "read": deque(range(transfers.count)),
            "write": deque((half + i) % transfers.count for i in range(transfers.count)),
        }
        moves = {way: move for way, move in (("read", self._engine.read), ("write", self._engine.write)) if way in ways}
        free = {"read": self._buffers[:each_way], "write": self._buffers[each_way : 2 * each_way]}
        under_way: dict[IOFuture, tuple[str, memoryview]] = {}
        start = time.perf_counter()
        while under_way or any(todo[way] for way in moves):
            for way, move in moves.items():
                while free[way] and todo[way]:
                    buffer = free[way].pop()
                    future = move(self._file, todo[way].popleft() * self._length, buffer[: transfers.length])
                    under_way[future] = (way, buffer)
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                way, buffer = under_way.pop(future)
                future.result()
                free[way].append(buffer)
        return time.perf_counter() - start

    def close(self) -> None:
        self._undo.close()


class Alone:
    """Adam on states in RAM: what a step would cost if nothing had to move."""

    def __init__(self, n: int, chunk_numel: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._chunk_numel = chunk_numel
        # On huge pages, as in the step.
        self._arena = Arena(16 * n + 5 * PAGE_BYTES, HostCopier())
        self._states = [self._arena.carve(4 * n).view(torch.float32) for _ in range(3)]
        self._grad, self._out = (self._arena.carve(2 * n).view(torch.bfloat16) for _ in range(2))
        self._grad.fill_(1e-3)
        self._scalars = AdamScalars.at(
            step=10, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True
        )

    def run(self) -> float:
        start = time.perf_counter()
        for low in range(0, len(self._grad), self._chunk_numel):
            part = slice(low, low + self._chunk_numel)
            master, exp_avg, exp_avg_sq = (state[part] for state in self._states)
            self._kernels.adam(master, exp_avg, exp_avg_sq, self._grad[part], self._out[part], self._scalars)
        return time.perf_counter() - start

    def close(self) -> None:
        self._arena.close()


def layers(count: int, width: int, device: str = "meta") -> nn.Module:
    """`count` units of width x width parameters: with chunks as big as that, each is one chunk."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    if device != "meta":
        model = model.to_empty(device=device)
        values = torch.randn(width, width, device=device) / width**0.5
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(values)
    return model


@dataclass(frozen=True)
class Measured:
    """One step: seconds from its call until nothing is under way any more, what of them was Adam and what waiting,
    and the bytes that moved on the disk meanwhile."""

    seconds: float
    adam_s: float
    wait_s: float
    moved_bytes: int


class Subject:
    """OffloadZero on the NVMe tier, with its swap files in `path`, which goes at the end.

    The gradients are assigned, one tensor for all layers, and taken over before the clock runs: nothing but the step is
    timed, and nothing but this library's memory grows with the model.
    """

    def __init__(
        self, count: int, width: int, tuning: Tuning, cpu_memory: int, path: Path, commit_every: int | None = None
    ) -> None:
        self._path = path
        self.optimizer = OffloadZero(
            layers(count, width, "cpu"),
            tier="nvme",
            path=path,
            cpu_memory=cpu_memory,
            commit_every=commit_every,
            tuning=tuning,
        )
        self._params: list[Tensor] = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._grad = torch.randn(width, width, dtype=torch.bfloat16)

    def run(self) -> Measured:
        for param in self._params:
            param.grad = self._grad
        self.optimizer.grad(self._params[0])  # the gradients are in RAM before the step, as after a backward
        self.optimizer.synchronize()
        before = self.optimizer.stats()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        seconds = time.perf_counter() - start
        after = self.optimizer.stats()

        def spent(*names: str) -> Any:
            return sum(after[name] - before[name] for name in names)

        return Measured(
            seconds=seconds,
            adam_s=spent("adam_s"),
            wait_s=spent("wait_nvme_s", "wait_device_s"),
            moved_bytes=spent("nvme_read_bytes", "nvme_written_bytes"),
        )

    @property
    def peak_cpu_bytes(self) -> int:
        return int(self.optimizer.stats()["peak_cpu_bytes"])

    def moved_bytes(self) -> int:
        """On the disk, since training began; nothing is under way."""
        self.optimizer.synchronize()
        stats = self.optimizer.stats()
        return int(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.optimizer.close()
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
            self._params.clear()
            del self.optimizer
            # Model and optimizer hold each other: the next run's memory is to be this one's.
            gc.collect()


@dataclass(frozen=True)
class Round:
    """A step and its limits, one after the other. Seconds."""

    step: Measured
    disk_s: float
    kernel_s: float

    @property
    def limit_s(self) -> float:
        return max(self.disk_s, self.kernel_s)


class Limits:
    """What bounds a step of n parameters: the drive and the kernel.

    Args: path: a directory on the drive; most: of any case; without transfers there is nothing to measure there.
    Attributes: kernel, threads, engine_name (None: no drive), buffers (of the drive's reference).
    """

    def __init__(self, path: Path, most: Transfers, n: int, chunk_numel: int) -> None:
        self.buffers = 0
        self._each_way = EACH_WAY[0]
        self._before: tuple[Transfers, float] | None = None  # what the drive alone did last, and its seconds
        with ExitStack() as undo:
            kernels = load()
            undo.callback(kernels.close)
            self.kernel, self.threads = kernels.variant, kernels.threads
            self._alone = Alone(n, chunk_numel, kernels)
            undo.callback(self._alone.close)
            self._disk = Disk(path, most) if most.count else None
            if self._disk is not None:
                undo.callback(self._disk.close)
            self._undo = undo.pop_all()

    @property
    def engine_name(self) -> str | None:
        return None if self._disk is None else self._disk.engine_name

    def search(self, transfers: Transfers, rounds: int, tick: Callable[[str], None]) -> None:
        """Finds the number of buffers with which the drive is fastest: the least mean over rounds of their own, so
        that no lucky measurement becomes the limit of a round."""
        assert self._disk is not None
        seconds = dict.fromkeys(EACH_WAY, 0.0)
        for _ in range(rounds):
            for each_way in EACH_WAY:
                seconds[each_way] += self._disk.run(transfers, each_way)
                tick(f"the drive alone, {2 * each_way} buffers")
        self._each_way = min(seconds, key=lambda each_way: seconds[each_way])
        self.buffers = 2 * self._each_way

    def round(self, subject: Subject, transfers: Transfers) -> Round:
        """Measures `subject` and both limits, one right after the other.

        Drives drift within seconds: the drive's limit is the mean of what it takes alone before the step and after it.
        """
        before_s = self._disk_s(transfers) if self._before is None or self._before[0] != transfers else self._before[1]
        measured = subject.run()
        after_s = self._disk_s(transfers)
        self._before = transfers, after_s
        kernel_s = self._alone.run()
        # Reads ahead for the next step can fall into this one or the one before: what moved is what counts.
        moved = measured.moved_bytes / transfers.nbytes if transfers.count else 0.0
        return Round(measured, (before_s + after_s) / 2 * moved, kernel_s)

    def _disk_s(self, transfers: Transfers) -> float:
        return self._disk.run(transfers, self._each_way) if self._disk and transfers.count else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
