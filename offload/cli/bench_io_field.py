"""The field of `offload bench io`: which settings of our engines are tried, and which references with which."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.cli.bench_io_contestants import TRANSFERS, Fio, Ours, Pool
from offload.cli.bench_io_place import SMALLEST_BYTES, Place
from offload.cli.bench_io_race import Family, Point
from offload.io import io_uring
from offload.io.engine import IOFile, QueuedEngine
from offload.io.io_uring import UringEngine
from offload.io.portable import PortableEngine
from offload.io.threads import ThreadEngine
from offload.sizes import KIB, MIB

WISHED_S = 0.5
"""Of one measurement of the race, which on a slow drive moves less for it."""

MAKERS: dict[str, Callable[[int, int], QueuedEngine]] = {
    "uring": UringEngine,
    "threads": ThreadEngine,
    "portable": PortableEngine,
}


@dataclass(frozen=True)
class Grid:
    """What is tried: requests in bytes, pairs of request and depth (or threads); rounds of the sweep."""

    requests: tuple[int, ...]
    depths: tuple[int, ...]
    portable: tuple[tuple[int, int], ...]
    fio: tuple[tuple[int, int], ...]
    pool: tuple[tuple[int, int], ...]
    rounds: int


FULL = Grid(
    requests=(512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB),
    depths=(1, 4, 8, 16),
    portable=((MIB, 2), (MIB, 8), (4 * MIB, 2), (4 * MIB, 8)),
    fio=((512 * KIB, 32), (MIB, 8), (MIB, 32), (4 * MIB, 8)),
    pool=((MIB, 4), (MIB, 8), (4 * MIB, 4), (4 * MIB, 8)),
    rounds=3,
)
QUICK = Grid(
    requests=(MIB, 4 * MIB),
    depths=(2, 8),
    portable=((4 * MIB, 2),),
    fio=((MIB, 32), (4 * MIB, 8)),
    pool=((MIB, 8), (4 * MIB, 8)),
    rounds=1,
)


@dataclass(frozen=True)
class Field:
    """Makes contestants. Attributes: named: a file with a name, for the engine that needs one."""

    place: Place
    named: Path
    memory: memoryview
    grid: Grid

    def points(self) -> tuple[list[Point], list[str]]:
        """The settings to try, and why an engine is missing."""
        available, reason = io_uring.is_available()
        points = [
            Point(name, request, depth)
            for name in (["uring", "threads"] if available else ["threads"])
            for request in self.grid.requests
            for depth in self.grid.depths
            if request * depth <= len(self.memory)
        ]
        points += [Point("portable", request, depth) for request, depth in self.grid.portable]
        return points, [] if available else [f"uring: {reason}"]

    def ours(self, point: Point, most: int | None = None) -> Ours:
        """An engine at a point, in the first `most` bytes of the memory."""
        # Whole pages for each transfer, whatever a reference's buffer is.
        size = min(most or len(self.memory), len(self.memory)) // (TRANSFERS * MIB // 4) * (TRANSFERS * MIB // 4)
        portable = point.engine == "portable"
        return Ours(
            point.engine,
            MAKERS[point.engine],
            self._by_name if portable else self._nameless,
            point.request_bytes,
            point.depth,
            self.memory[: max(size, TRANSFERS * MIB // 4)],
            cached=portable or not self.place.direct,
        )

    def _nameless(self, engine: QueuedEngine) -> IOFile:
        return engine.adopt(IOFile(str(self.place.path), os.dup(self.place.fd)))

    def _by_name(self, engine: QueuedEngine) -> IOFile:
        return engine.open(str(self.named))

    def families(self) -> tuple[list[Family], list[str]]:
        """The references, and why one is missing."""
        found = []
        # The second has in memory what it has in flight, as fio does: the CPU's cache may hold that.
        for name, small in (("preadv pool", False), ("preadv pool, small", True)):
            pool = [
                Pool(name, self.place, self.memory[: request * threads if small else None], request, threads)
                for request, threads in self.grid.pool
            ]
            found.append(Family(name, pool))
        if shutil.which("fio") is None:
            return found, ["fio: not installed"]
        if not self.place.direct:
            return found, ["fio: compared only where there is O_DIRECT"]
        for engine in ("io_uring", "libaio"):
            settings = [Fio(self.place, engine, request, depth) for request, depth in self.grid.fio]
            found.append(Family(f"fio {engine}", settings))
        return found, []

    def lay_out(self, limited: bool) -> int:
        """Writes what will be measured: the first write into reserved space is slower than any later one, and a read
        of it is none. Returns the bytes of one measurement: all, or `limited` to what takes about half a second.

        Raises: OSError.
        """
        fd, size = self.place.fd, self.place.size
        start, done = time.perf_counter(), 0
        while done < size:
            done += os.pwrite(fd, self.memory[: min(len(self.memory), size - done)], done)
            elapsed = time.perf_counter() - start
            if limited and done % SMALLEST_BYTES == 0 and elapsed > 2 * WISHED_S:
                size = done
        os.fdatasync(fd)
        speed = size / (time.perf_counter() - start)
        if limited:
            wished = int(WISHED_S * speed) // SMALLEST_BYTES * SMALLEST_BYTES
            size = min(size, max(wished, SMALLEST_BYTES))
        named = os.open(self.named, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for at in range(0, size, len(self.memory)):
                os.pwrite(named, self.memory[: min(len(self.memory), size - at)], at)
            os.fdatasync(named)
        finally:
            os.close(named)
        return size
