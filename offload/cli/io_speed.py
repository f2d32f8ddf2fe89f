"""How fast a drive is: contestants move the same bytes of the same file, in turns.

They read or write `nbytes` from the file's start on. In the mixed operation they read the first half while they write
the second. Each uses a buffer of MEMORY_BYTES on huge pages, over and over: with a buffer that fits the CPU's cache the
drive would look faster than it is.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from offload.cli import machine
from offload.cli.progress import progress
from offload.devices.copies import HostCopier
from offload.errors import BudgetError, ConfigError, PathError
from offload.io import io_uring
from offload.io.engine import IOFuture, open_file
from offload.io.files import LOCAL
from offload.io.select import ENGINES, Settings, remember
from offload.io.threads import Workers
from offload.sizes import GIB, KIB, MIB, format_bytes, option_bytes, parse_bytes
from offload.storage.arena import Arena

OPERATIONS = ("read", "write", "mixed")
MEMORY_BYTES = 64 * MIB
TRANSFERS = 4
"""Under way at once in our engines, each a share of the buffer: as a step of the optimizer moves its chunks."""
AS_GOOD = 0.97
"""Of the best speed: among settings within this, the one with the least CPU time is recommended."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For a reference's process, so that its buffers are on huge pages as ours are: without, it is only half as fast."""
SMALLEST_BYTES = 16 * MIB
QUICK_BYTES = 128 * MIB
SWEEP_BYTES = 256 * MIB
"""What one measurement of the sweep moves at most."""
SWEEP_ROUNDS = 3
WISHED_S = 0.5
"""Of one measurement: on a slow drive it moves less than the file has."""
BYTES_A_PARAMETER = 24
"""Through the drive in a step: 12 read, 12 written."""
HEADINGS = ("", "settings", "read", "write", "mixed", "CPU s/GiB", "x read", "x write", "x mixed")

Peers = Callable[[Path, memoryview], "list[Contestant]"]
"""Makes more contestants, for bench/io.py. It takes the file that is measured, and the buffer to use."""


class LeftOutError(Exception):
    """A contestant cannot run here. The message says why."""


@dataclass(frozen=True, eq=False)
class Contestant(ABC):
    """An engine, or other code, whose speed is measured.

    Attributes:
        name: what it is called.
        file: the file whose bytes it moves.
        memory: the buffer that it moves them to and from.
        request_bytes: the size of a request.
        depth: how many requests are under way at once.
    """

    name: str
    file: Path
    memory: memoryview
    request_bytes: int
    depth: int

    @abstractmethod
    def run(self, operation: str, nbytes: int) -> float:
        """Moves bytes, and measures the time.

        Args:
            operation: one of OPERATIONS.
            nbytes: how many bytes.

        Returns:
            The seconds it took.

        Raises:
            LeftOutError: it cannot run here.
            OSError: a request failed.
        """

    @property
    def settings(self) -> str:
        size = self.request_bytes
        return f"{size // MIB}M x {self.depth}" if size % MIB == 0 else f"{size // KIB}K x {self.depth}"


@dataclass
class Speeds:
    """What a contestant reached.

    Attributes:
        contestant: the contestant.
        nbytes: how many bytes each operation moved.
        seconds: the time of each round, by operation.
        cpu_s: CPU seconds of this process for each GiB moved, by round.
    """

    contestant: Contestant
    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    cpu_s: list[float] = field(default_factory=list)

    def speed(self, operation: str) -> float:
        """The speed of an operation, in GB/s: that of the median round."""
        return self.nbytes / statistics.median(self.seconds[operation]) / 1e9

    @property
    def score(self) -> float:
        """The geometric mean of the speeds of all operations, in GB/s."""
        return math.prod(map(self.speed, OPERATIONS)) ** (1 / len(OPERATIONS))

    @property
    def cpu_s_per_gib(self) -> float:
        return statistics.median(self.cpu_s)

    def by(self, other: Speeds, operation: str) -> float:
        """How many times as fast as another contestant this one is: the median over the rounds of the ratio."""
        rounds = zip(other.seconds[operation], self.seconds[operation], strict=True)
        return statistics.median(theirs / ours for theirs, ours in rounds)

    def as_json(self) -> dict[str, Any]:
        one = self.contestant
        settings = {"name": one.name, "request_bytes": one.request_bytes, "depth": one.depth}
        return settings | {f"{operation}_gb_per_s": self.speed(operation) for operation in OPERATIONS}


@dataclass(frozen=True, eq=False)
class Ours(Contestant):
    """An engine of this library, which is called `name`."""

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
            for index, (direction, offset, length) in enumerate(transfers(operation, nbytes, share)):
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
    """A plain pool of `depth` threads that call preadv and pwritev: what anyone would write in ten lines."""

    def run(self, operation: str, nbytes: int) -> float:
        todo = list(transfers(operation, nbytes, self.request_bytes))
        starts = range(0, len(self.memory), self.request_bytes)
        buffers = [self.memory[at : at + self.request_bytes] for at in starts]
        file = open_file(str(self.file))

        def move(number: int) -> None:
            direction, offset, length = todo[number]
            call = os.preadv if direction == "read" else os.pwritev
            if call(file.fd, [buffers[number % len(buffers)][:length]], offset) != length:
                raise LeftOutError("a transfer came up short")

        try:
            if not file.direct:
                _drop_cached(file.fd)
            with Workers(self.depth, "offload-preadv") as pool:
                list(pool.map(time.sleep, [0.001] * self.depth))  # the threads exist
                start = time.perf_counter()
                list(pool.map(move, range(len(todo))))
                if not file.direct and operation != "read":
                    os.fdatasync(file.fd)
                return time.perf_counter() - start
        finally:
            file.close()


def transfers(operation: str, nbytes: int, length: int) -> Iterator[tuple[str, int, int]]:
    """The requests of an operation.

    Args:
        operation: one of OPERATIONS.
        nbytes: how many bytes are moved in all.
        length: how many bytes a request moves; the last one may move fewer.

    Yields:
        "read" or "write", the offset in the file, and how many bytes.
    """
    half = nbytes // 2 if operation == "mixed" else nbytes
    for start in range(0, half, length):
        size = min(length, half - start)
        yield ("write" if operation == "write" else "read", start, size)
        if operation == "mixed":
            yield ("write", half + start, size)


def _drop_cached(fd: int) -> None:
    """Drops the file from the page cache, for contestants that do not use O_DIRECT."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def field_of(file: Path, memory: memoryview, *, quick: bool) -> list[Contestant]:
    """The contestants: our engines and the pool, each with all settings to try.

    Args:
        file: the file whose bytes they move.
        memory: the buffer that they use.
        quick: whether to try fewer settings.
    """
    names = ["uring", "threads"] if io_uring.is_available()[0] else ["threads"]
    sizes, depths = ((MIB, 4 * MIB), (2, 8)) if quick else ((512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB), (1, 4, 8, 16))
    pairs = [(size, depth) for size in sizes for depth in depths if size * depth <= len(memory)]
    few = [(size, 8) for size in (MIB, 4 * MIB)]
    ours: list[Contestant] = [Ours(name, file, memory, *pair) for name in names for pair in pairs]
    ours += [Ours("portable", file, memory, *pair) for pair in few]
    return ours + [Pool("preadv pool", file, memory, *pair) for pair in few]


def measure(
    contestants: Sequence[Contestant], nbytes: int, rounds: int, tell: Callable[[str], None]
) -> tuple[list[Speeds], list[str]]:
    """Runs all contestants in every round, in another order each time.

    The rounds are needed because a drive's bandwidth drifts by up to 2x in minutes.

    Args:
        contestants: who runs.
        nbytes: how many bytes each operation moves.
        rounds: how many rounds there are.
        tell: called before each run with words for people.

    Returns:
        The speeds of those that could run, in their order, and why the others could not.
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
    """The fastest of our engines, with its settings.

    Of those that are about as fast it is the one that takes the least CPU time, and of those the one with the fewest
    bytes under way.

    Raises:
        ConfigError: none of our engines could run.
    """
    ours = [one for one in found if isinstance(one.contestant, Ours)]
    if not ours:
        raise ConfigError("no engine works here")
    best = max(one.score for one in ours)
    good = {one.contestant: one.cpu_s_per_gib for one in ours if one.score >= AS_GOOD * best}
    return min(good, key=lambda one: (round(good[one], 3), one.request_bytes * one.depth))


@dataclass(frozen=True)
class Result:
    """The result for one directory: a sweep of all settings, then a race of each contestant's best setting.

    Attributes:
        path: the directory in which it was measured.
        file_system: the type of its file system.
        nbytes: how many bytes one measurement of the race moves.
        sweep: the speeds of all settings.
        race: the speeds of the race. The first is `chosen`.
        left_out: who could not run, and why.
    """

    path: Path
    file_system: str
    nbytes: int
    sweep: list[Speeds]
    race: list[Speeds]
    left_out: list[str]

    @property
    def chosen(self) -> Speeds:
        return self.race[0]

    @property
    def title(self) -> str:
        return f"{self.file_system}, {format_bytes(self.nbytes)} at a time: GB/s; x: the chosen engine's by this one's"

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path.resolve()),
            "fs": self.file_system,
            "bytes": self.nbytes,
            "chosen": self.chosen.as_json() | {"cpu_s_per_gib": self.chosen.cpu_s_per_gib},
            "race": [self.ratios(one) | one.as_json() for one in self.race],
            "sweep": [one.as_json() for one in self.sweep],
            "left_out": self.left_out,
        }

    def ratios(self, other: Speeds) -> dict[str, float]:
        """How many times as fast as another contestant the chosen one is, in the same rounds, by operation."""
        return {f"{operation}_chosen_by_it": self.chosen.by(other, operation) for operation in other.seconds}

    def rows(self) -> Iterator[list[str]]:
        """The cells of a row for each contestant in the race, under HEADINGS."""
        for one in self.race:
            speeds = (f"{one.speed(operation):.2f}" for operation in one.seconds)
            ratios = (f"{ratio:.3f}" for ratio in self.ratios(one).values())
            yield [one.contestant.name, one.contestant.settings, *speeds, f"{one.cpu_s_per_gib:.3f}", *ratios]

    def remarks(self) -> Iterator[str]:
        seconds = BYTES_A_PARAMETER / self.chosen.speed("mixed")
        yield f"Training: {seconds:.0f} s a step for a billion parameters, {BYTES_A_PARAMETER} bytes each."
        yield from (f"left out: {reason}" for reason in self.left_out)


def measure_all(
    paths: Sequence[Path], size: str | None, rounds: int, *, quick: bool, console: Console, peers: Peers | None = None
) -> list[Result]:
    """Measures several paths, after all of them were checked.

    Args:
        paths: directories on the drives to measure.
        size: the size of the file, such as "1GiB"; None: a default that fits.
        rounds: how many rounds the race has.
        quick: whether to try fewer settings on a smaller file.
        console: where progress is shown.
        peers: makes more contestants; None: there are none.

    Raises:
        PathError: a path is no writable directory, or its file system refused something while it was measured.
        ConfigError: the size cannot be read, or is too small to measure; or no engine works.
        BudgetError: the file does not fit on the drive, and nothing was written; or RAM has no room for the buffer.
    """
    wanted = None if size is None else parse_bytes(size, "--size")
    sizes = [checked_size(path, wanted, QUICK_BYTES if quick else GIB) for path in paths]
    return [
        measure_path(path, nbytes, rounds, quick=quick, console=console, peers=peers)
        for path, nbytes in zip(paths, sizes, strict=True)
    ]


def checked_size(path: Path, size: int | None, default: int) -> int:
    """The size of the file to measure in `path`. Writes nothing.

    Args:
        path: a directory.
        size: the size asked for, in bytes; None: `default`, or less if the drive has little room.
        default: in bytes.

    Returns:
        The size in bytes, a multiple of SMALLEST_BYTES.

    Raises:
        PathError: `path` is no writable directory.
        ConfigError: the size is below SMALLEST_BYTES.
        BudgetError: the file does not fit on the drive.
    """
    if not path.is_dir():
        raise PathError(errno.ENOTDIR, "cannot measure here: give a directory on the drive", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "cannot measure here: you may not write to this directory", str(path))
    free = shutil.disk_usage(path).free
    if size is None:
        size = min(default, max(free // 4, SMALLEST_BYTES))
    if size < SMALLEST_BYTES:
        least = option_bytes(SMALLEST_BYTES)
        raise ConfigError(f"--size {option_bytes(size)} is too small to measure: give at least {least}")
    if size > free:
        way_out = "lower --size, or make room" if size >= 2 * SMALLEST_BYTES else "make room, or choose another drive"
        raise BudgetError(
            f"{path}: measuring needs {format_bytes(size)}, {format_bytes(free)} are free: {way_out}",
            needed=size,
            available=free,
            option="--size",
        )
    return size // SMALLEST_BYTES * SMALLEST_BYTES


def measure_path(path: Path, size: int, rounds: int, *, quick: bool, console: Console, peers: Peers | None) -> Result:
    """Measures one path.

    Args:
        path: a directory.
        size: the size of the file, in bytes.
        rounds: how many rounds the race has.
        quick: whether to try fewer settings.
        console: where progress is shown.
        peers: makes more contestants; None: there are none.

    Raises:
        PathError: the file system refused something.
        ConfigError: no engine works.
        BudgetError: RAM has no room for the buffer.
    """
    with contextlib.closing(Arena(MEMORY_BYTES, HostCopier())) as arena, file_in(path) as file:
        memory = arena.memory
        memory[:] = os.urandom(len(memory))  # a drive that compresses would be faster with equal bytes
        nbytes = lay_out(file, size, memory)
        field = field_of(file, memory, quick=quick) + (peers(file, memory) if peers else [])
        steps = SWEEP_ROUNDS * len(field) + rounds * len({one.name for one in field})
        with progress(console, f"{path}:", steps) as told:
            count = itertools.count(1)

            def tell(what: str) -> None:
                told(next(count), what)

            sweep, left_out = measure(field, min(nbytes, SWEEP_BYTES), SWEEP_ROUNDS, tell)
            chosen = recommended(sweep)
            best = {one.contestant.name: one.contestant for one in sorted(sweep, key=lambda one: one.score)}
            del best[chosen.name]
            race, more = measure([chosen, *best.values()], nbytes, rounds, tell)
    available, reason = io_uring.is_available()
    left_out += more if available else [*more, f"uring: {reason}"]
    return Result(path, machine.file_system(path) or "unknown", nbytes, sweep, race, left_out)


@contextlib.contextmanager
def file_in(path: Path) -> Iterator[Path]:
    """A context that gives a name for a new file, in a new folder in `path` that is removed at the end.

    Raises:
        PathError: the folder cannot be made, or the body raised an error of the operating system.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".offload-bench-io-", dir=path) as folder:
            yield Path(folder) / "file"
    except OSError as error:
        if isinstance(error, PathError) or error.errno is None:
            raise
        raise PathError(error.errno, f"measuring ended early: {error.strerror}", str(path)) from error


def lay_out(file: Path, size: int, memory: memoryview) -> int:
    """Writes the file once before it is measured.

    The first write into reserved space is slower than any later one, and a read of such space does not reach the drive.

    Args:
        file: the file, which is made.
        size: its size, in bytes.
        memory: what is written, over and over.

    Returns:
        How many bytes one measurement moves: the whole file, or on a slow drive as many as it moves in WISHED_S.

    Raises:
        OSError: the operating system refused.
    """
    opened = open_file(str(file))
    try:
        LOCAL.allocate(opened, 0, size)
        start, done = time.perf_counter(), 0
        while done < size and time.perf_counter() - start < 4 * WISHED_S:
            done += os.pwrite(opened.fd, memory[: min(len(memory), size - done)], done)
        os.fdatasync(opened.fd)
        wished = int(WISHED_S * done / (time.perf_counter() - start))
        return min(done, max(wished // SMALLEST_BYTES, 1) * SMALLEST_BYTES)
    finally:
        opened.close()


def remember_settings(result: Result) -> str:
    """Writes down the best settings, for `io_engine="auto"` and for the shares of several paths.

    Returns:
        What was done, for people.
    """
    best = result.chosen.contestant
    read, write, mixed = (result.chosen.speed(operation) * 1e9 for operation in OPERATIONS)
    try:
        file = remember(result.path, Settings(best.name, best.request_bytes, best.depth, mixed, read, write))
    except OSError as error:
        return f'cannot write down the settings for io_engine="auto": {error}'
    return f'io_engine="auto" will use {best.name} {best.settings} on the file system of {result.path} ({file})'
