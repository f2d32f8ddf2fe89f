"""The parts of a step, each alone: what the disk needs for the states, and what the kernel needs."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from offload import native
from offload.cli.bench_adam_peers import States
from offload.io.engine import IOFuture
from offload.io.select import open_engine
from offload.sizes import MIB, PAGE_BYTES, round_up

IN_FLIGHT = 4


class Disk:
    """The states' bytes through the library's engine, as a step moves them: read, and written back, chunk by chunk."""

    def __init__(self, folder: Path, chunk_bytes: int, state_bytes: int) -> None:
        self._size = round_up(chunk_bytes, PAGE_BYTES)
        self._count = max(1, round(state_bytes / self._size))
        self._engine = open_engine("auto", [folder])
        name = folder / "reference"
        with open(name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size * self._count)
        self._file = self._engine.open(str(name))
        self._memory = mmap.mmap(-1, self._size * IN_FLIGHT)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._memory)
        self._buffers = [view[at : at + self._size] for at in range(0, len(view), self._size)]
        # The first write into reserved space is slower than any later one, and a read of it is none.
        for buffer in self._buffers:
            buffer[:] = os.urandom(MIB) * (self._size // MIB) + bytes(self._size % MIB)
        for slot in range(self._count):
            self._engine.write(self._file, slot * self._size, self._buffers[slot % IN_FLIGHT]).result()

    @property
    def moved_bytes(self) -> int:
        return 2 * self._size * self._count

    def run(self) -> float:
        """Seconds. Two reads and two writes are under way at once."""
        start = time.perf_counter()
        reads: list[IOFuture] = []
        writes: list[IOFuture] = []
        lag = IN_FLIGHT // 2
        for slot in range(self._count + lag):
            if slot < self._count:
                if slot >= IN_FLIGHT:
                    writes[slot - IN_FLIGHT].result()
                reads.append(self._engine.read(self._file, slot * self._size, self._buffers[slot % IN_FLIGHT]))
            if (done := slot - lag) >= 0:
                reads[done].result()
                writes.append(self._engine.write(self._file, done * self._size, self._buffers[done % IN_FLIGHT]))
        for write in writes[-IN_FLIGHT:]:
            write.result()
        return time.perf_counter() - start

    def close(self) -> None:
        self._engine.close()


class Adam:
    """The kernel alone, on states in RAM."""

    def __init__(self, count: int) -> None:
        self._states = States(count)
        self._kernels = native.load()
        self._scalars = native.AdamScalars.at(
            step=10, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True
        )

    def run(self) -> float:
        states, start = self._states, time.perf_counter()
        self._kernels.adam(states.master, states.exp_avg, states.exp_avg_sq, states.grad16, states.out, self._scalars)
        return time.perf_counter() - start

    def close(self) -> None:
        self._kernels.close()
