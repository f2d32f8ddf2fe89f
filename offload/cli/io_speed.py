"""How fast a drive is: contestants move the same bytes of the same file, in turns.

They read or write `nbytes` from the file's start on, or, mixed, read the first half while they write the second. Each
uses a buffer of MEMORY_BYTES on huge pages, over and over: one that fits the CPU's cache makes the drive look faster.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.io import ring
from offload.io.engine import IOFuture, open_file
from offload.io.select import ENGINES
from offload.sizes import GIB, KIB, MIB

OPERATIONS = ("read", "write", "mixed")
MEMORY_BYTES = 64 * MIB
TRANSFERS = 4
"""Under way at once in our engines, each a share of the buffer: as a step of the optimizer moves its chunks."""
AS_GOOD = 0.97
"""Of the best speed: among settings within this, the one with the least CPU time is recommended."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For a reference's process, so that its buffers are on huge pages as ours are: without, it is only half as fast."""


class LeftOutError(Exception):
    """Why a contestant cannot run here."""


@dataclass(frozen=True, eq=False)
class Contestant(ABC):
    """Something that moves bytes of `file` with `depth` requests of `request_bytes` under way."""

    name: str
    file: Path
    memory: memoryview
    request_bytes: int
    depth: int

    @abstractmethod
    def run(self, operation: str, nbytes: int) -> float:
        """Moves `nbytes`; returns the seconds it took. Raises: LeftOutError, OSError."""

    @property
    def settings(self) -> str:
        size = self.request_bytes
        return f"{size // MIB}M x {self.depth}" if size % MIB == 0 else f"{size // KIB}K x {self.depth}"


@dataclass
class Speeds:
    """What a contestant reached. Attributes: seconds: of each round, by operation; cpu_s: that this process used for a
    GiB, of each round."""

    contestant: Contestant
    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    cpu_s: list[float] = field(default_factory=list)

    def speed(self, operation: str) -> float:
        """GB/s."""
        return self.nbytes / statistics.median(self.seconds[operation]) / 1e9

    @property
    def score(self) -> float:
        """GB/s, the geometric mean over the operations."""
        return math.prod(map(self.speed, OPERATIONS)) ** (1 / len(OPERATIONS))

    @property
    def cpu_s_per_gib(self) -> float:
        return statistics.median(self.cpu_s)

    def by(self, other: Speeds, operation: str) -> float:
        """This speed by the other's: the median of the rounds' ratios."""
        rounds = zip(other.seconds[operation], self.seconds[operation], strict=True)
        return statistics.median(theirs / ours for theirs, ours in rounds)

    def as_json(self) -> dict[str, Any]:
        one = self.contestant
        settings = {"name": one.name, "request_bytes": one.request_bytes, "depth": one.depth}
        return settings | {f"{operation}_gb_per_s": self.speed(operation) for operation in OPERATIONS}


@dataclass(frozen=True, eq=False)
class Ours(Contestant):
    """The engine `name` of this library."""

    def run(self, operation: str, nbytes: int) -> float:
        share = len(self.memory) // TRANSFERS
        engine = ENGINES[self.name](self.request_bytes, self.depth)
        try:
            engine.register(self.memory)
            file = engine.open(str(self.file))
            if not file.direct:
                _drop_cached(file.fd)
            under_way: deque[IOFuture] = deque()
            start = time.perf_counter()
            for index, (direction, offset, length) in enumerate(parts(operation, nbytes, share)):
                if len(under_way) == TRANSFERS:
                    under_way.popleft().result()
                at = index % TRANSFERS * share
                move = engine.read if direction == "read" else engine.write
                under_way.append(move(file, offset, self.memory[at : at + length]))
            for future in under_way:
                future.result()
            if not file.direct and operation != "read":
                engine.sync(file).result()
            return time.perf_counter() - start
        finally:
            engine.close()


@dataclass(frozen=True, eq=False)
class Pool(Contestant):
    """preadv and pwritev on `depth` threads: what one would write in ten lines."""

    def run(self, operation: str, nbytes: int) -> float:
        todo = list(parts(operation, nbytes, self.request_bytes))
        places = range(0, len(self.memory), self.request_bytes)
        buffers = [self.memory[at : at + self.request_bytes] for at in places]
        file = open_file(str(self.file))

        def work(first: int) -> None:
            for number in range(first, len(todo), self.depth):
                direction, offset, length = todo[number]
                move = os.preadv if direction == "read" else os.pwritev
                if move(file.fd, [buffers[number % len(buffers)][:length]], offset) != length:
                    raise LeftOutError("a transfer came up short")

        try:
            if not file.direct:
                _drop_cached(file.fd)
            with ThreadPoolExecutor(self.depth) as pool:
                list(pool.map(time.sleep, [0.001] * self.depth))  # the threads exist
                start = time.perf_counter()
                list(pool.map(work, range(self.depth)))
                if not file.direct and operation != "read":
                    os.fdatasync(file.fd)
                return time.perf_counter() - start
        finally:
            file.close()


def parts(operation: str, nbytes: int, length: int) -> Iterator[tuple[str, int, int]]:
    """What has to be moved, `length` bytes at a time: read or write, offset, length."""
    half = nbytes // 2 if operation == "mixed" else nbytes
    for start in range(0, half, length):
        size = min(length, half - start)
        yield ("write" if operation == "write" else "read", start, size)
        if operation == "mixed":
            yield ("write", half + start, size)


def _drop_cached(fd: int) -> None:
    """Takes the file out of the page cache, for those who go through it."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def field_of(file: Path, memory: memoryview, *, quick: bool) -> list[Contestant]:
    """Our engines and the pool, each with the settings to try."""
    names = ["uring", "threads"] if ring.is_available()[0] else ["threads"]
    sizes, depths = ((MIB, 4 * MIB), (2, 8)) if quick else ((512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB), (1, 4, 8, 16))
    pairs = [(size, depth) for size in sizes for depth in depths if size * depth <= len(memory)]
    few = [(size, 8) for size in (MIB, 4 * MIB)]
    ours: list[Contestant] = [Ours(name, file, memory, *pair) for name in names for pair in pairs]
    ours += [Ours("portable", file, memory, *pair) for pair in few]
    return ours + [Pool("preadv pool", file, memory, *pair) for pair in few]


def measure(
    contestants: Sequence[Contestant], nbytes: int, rounds: int, tell: Callable[[str], None]
) -> tuple[list[Speeds], list[str]]:
    """Runs all in every round, in another order each time: a drive's bandwidth drifts by up to 2x over minutes.

    Returns: the speeds of those that could run, in their order, and why the others could not.
    """
    shuffle, left_out = random.Random(0), []
    found = {one: Speeds(one, nbytes) for one in contestants}
    for number in range(rounds):
        order = list(found)
        shuffle.shuffle(order)
        for one in order:
            tell(f"round {number + 1}/{rounds}: {one.name} {one.settings}")
            cpu_s = time.process_time()
            try:
                for operation in OPERATIONS:
                    found[one].seconds[operation].append(one.run(operation, nbytes))
            except (OSError, LeftOutError) as error:
                del found[one]
                left_out.append(f"{one.name} {one.settings}: {error}")
            else:
                found[one].cpu_s.append((time.process_time() - cpu_s) / (len(OPERATIONS) * nbytes) * GIB)
    return list(found.values()), left_out


def recommended(found: Sequence[Speeds]) -> Contestant:
    """Of our engines the fastest, or one as good that costs less CPU time; the fewest bytes under way if that is equal.

    Raises: ConfigError if none could run.
    """
    ours = [one for one in found if isinstance(one.contestant, Ours)]
    if not ours:
        raise ConfigError("no engine works here")
    best = max(one.score for one in ours)
    good = {one.contestant: one.cpu_s_per_gib for one in ours if one.score >= AS_GOOD * best}
    return min(good, key=lambda one: (round(good[one], 3), one.request_bytes * one.depth))
