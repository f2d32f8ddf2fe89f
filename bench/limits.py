"""What bounds a step, each measured alone: the disk for the bytes that it moves, and the Adam kernel."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.io.engine import IOFuture
from offload.io.select import open_engine
from offload.native import ADAM, ADAM_DITHERED, AdamScalars, DitheredScalars, load
from offload.sizes import DITHER_BLOCK, PAGE_BYTES, round_up
from offload.storage.arena import Arena

EACH_WAY = (2, 4, 8)
"""Buffers for reading, and as many for writing, that `Disk.search` tries. Not fewer than a step has: memory that fits a
CPU's cache makes the same drive look faster."""
LR, BETAS, EPS, WEIGHT_DECAY, STEP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 100
T = TypeVar("T")
SCALARS = AdamScalars.at(step=STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)
DITHERED = DitheredScalars.at(step=STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)


class Disk:
    """The library's engine reading a file and writing it at once, with nothing computed.

    Reads and writes do not wait for each other, so that, unlike in a step, both have work from the first byte to the
    last. Args: folder: on the disk; count, length: of the transfers each way; bytes.
    """

    def __init__(self, folder: Path, count: int, length: int) -> None:
        self.count, self.length = count, round_up(length, PAGE_BYTES)
        self._each_way = EACH_WAY[-1]
        self._arena = Arena(2 * max(EACH_WAY) * self.length, HostCopier())
        # A drive that compresses would be faster with equal bytes.
        torch.frombuffer(self._arena.memory, dtype=torch.int64).random_()
        view = self._arena.memory
        self._buffers = [view[at : at + self.length] for at in range(0, len(view), self.length)]
        self._engine = open_engine("auto", [folder])
        self._file = self._engine.open(str(folder / "limit"))
        os.posix_fallocate(self._file.fd, 0, count * self.length)
        self._engine.register(view)
        # The first write into reserved space is slower than any later one, and a read of it does not reach the drive.
        for future in [self._engine.write(self._file, i * self.length, self._buffers[0]) for i in range(count)]:
            future.result()

    @property
    def setup(self) -> str:
        return f"{self._engine.name}, disk alone with {2 * self._each_way} buffers"

    def search(self, rounds: int = 2) -> None:
        """Finds the number of buffers with which the disk is fastest. Its rounds are not part of the results."""
        seconds = dict.fromkeys(EACH_WAY, 0.0)
        for _ in range(rounds):
            for self._each_way in EACH_WAY:
                seconds[self._each_way] += self.run()
        self._each_way = min(seconds, key=lambda each_way: seconds[each_way])

    def run(self, count: int | None = None, ways: Sequence[str] = ("read", "write")) -> float:
        """Seconds that `count` transfers (None: all) in each of `ways` take together."""
        count = self.count if count is None else count
        half = count // 2
        starts = {"read": 0, "write": half}
        todo = {way: deque((starts[way] + i) % count for i in range(count)) for way in ways}
        moves = {"read": self._engine.read, "write": self._engine.write}
        each = self._each_way
        free = {"read": self._buffers[:each], "write": self._buffers[each : 2 * each]}
        under_way: dict[IOFuture, tuple[str, memoryview]] = {}
        start = time.perf_counter()
        while under_way or any(todo.values()):
            for way, places in todo.items():
                while free[way] and places:
                    buffer = free[way].pop()
                    under_way[moves[way](self._file, places.popleft() * self.length, buffer)] = (way, buffer)
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                way, buffer = under_way.pop(future)
                future.result()
                free[way].append(buffer)
        return time.perf_counter() - start

    def beside(self, work: Callable[[], T]) -> tuple[T, float]:
        """What `work` returns, and the seconds of a `run` while another thread does it; the median of several."""
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            seconds = [self.run()]
            while not working.done():
                seconds.append(self.run())
        # `work` ended in the last one.
        return working.result(), statistics.median(seconds[:-1] or seconds)

    def seconds_for(self, nbytes: float, seconds: float, count: int | None = None) -> float:
        """Seconds for `nbytes`, half of them each way, at the speed of a `run` of `count` that took `seconds`."""
        return seconds * nbytes / (2 * (count or self.count) * self.length)

    def close(self) -> None:
        self._engine.close()
        self._buffers.clear()
        self._arena.close()


class States:
    """The states of n parameters that Adam updates, in memory like the library's: on huge pages where there are some.

    Attributes: master, exp_avg, exp_avg_sq: (n,) fp32; grad, out: (n,) bf16.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.master, self.exp_avg, self.exp_avg_sq = (allocate(n, torch.float32) for _ in range(3))
        self.grad, self.out = (allocate(n, torch.bfloat16) for _ in range(2))
        self.grad.normal_(std=1e-2)
        self.reset()

    def reset(self) -> None:
        """Sets ordinary values: denormals are slow on some CPUs."""
        self.master.fill_(0.5)
        self.exp_avg.fill_(1e-3)
        self.exp_avg_sq.fill_(1e-4)


def allocate(n: int, dtype: torch.dtype) -> Tensor:
    return Arena(n * dtype.itemsize, HostCopier()).carve(n * dtype.itemsize).view(dtype)


def small_moments(n: int, form: str) -> list[Tensor | None]:
    """Adam's moments of n parameters, all 0, and their scales, as ADAM_DITHERED takes them. Args: form: "bf16" or
    "8bit"."""
    dtype, scales = (torch.bfloat16, 0) if form == "bf16" else (torch.uint8, 2)
    moments = [allocate(n, dtype).zero_() for _ in range(2)]
    return [*moments, *([allocate(-(-n // DITHER_BLOCK), dtype).zero_() for _ in range(scales)] or (None, None))]


class Adam:
    """The Adam kernel alone, on states in RAM, with `chunk` elements in each call.

    Args: chunk: a multiple of 64; form: of the moments, as OffloadZero's option `states` says it.
    """

    def __init__(self, n: int, chunk: int, form: str = "fp32") -> None:
        self._states, self._chunk, self._kernels = States(n), chunk, load()
        self._small = None if form == "fp32" else small_moments(n, form)
        self.setup = f"{self._kernels.threads} threads, kernel {self._kernels.variant}"
        if self._small is not None:
            self.run()  # so that moments are ordinary numbers

    def run(self) -> float:
        """Updates all states once. Returns: the seconds that it took."""
        states, start = self._states, time.perf_counter()
        for at in range(0, states.n, self._chunk):
            part = slice(at, at + self._chunk)
            master, grad, out = states.master[part], states.grad[part], states.out[part]
            if self._small is None:
                moments = (states.exp_avg[part], states.exp_avg_sq[part])
                self._kernels.call(ADAM, master, *moments, grad, out, scalars=SCALARS)
                continue
            m, v, *scales = self._small
            blocks = slice(at // DITHER_BLOCK, -(-(at + self._chunk) // DITHER_BLOCK))
            assert m is not None
            assert v is not None
            of_part = (m[part], v[part], *(None if scale is None else scale[blocks] for scale in scales))
            self._kernels.call(ADAM_DITHERED, master, None, *of_part, grad, out, first=at, scalars=DITHERED)
        return time.perf_counter() - start

    def close(self) -> None:
        self._kernels.close()
