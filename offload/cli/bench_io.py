"""`offload bench io`: with which engine, request size and depth a drive is fastest, for `io_engine="auto"`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json
from offload.errors import BudgetError, ConfigError, PathError
from offload.sizes import GIB, MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from offload.cli.io_speed import Contestant, Speeds

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
"""More references than those of this package, for bench/io.py. Args: the file that is measured, memory."""


@dataclass(frozen=True)
class Result:
    """One path: the sweep of all settings, and then the race of the best of each, `chosen` first.

    Attributes: nbytes: moved in one measurement of the race; left_out: who could not run, and why.
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
        """Of the chosen engine's speed to another's in the same rounds."""
        return {f"{operation}_chosen_by_it": self.chosen.by(other, operation) for operation in other.seconds}

    def rows(self) -> Iterator[list[str]]:
        """A line for each in the race."""
        for one in self.race:
            speeds = (f"{one.speed(operation):.2f}" for operation in one.seconds)
            ratios = (f"{ratio:.3f}" for ratio in self.ratios(one).values())
            yield [one.contestant.name, one.contestant.settings, *speeds, f"{one.cpu_s_per_gib:.3f}", *ratios]

    def remarks(self) -> Iterator[str]:
        seconds = BYTES_A_PARAMETER / self.chosen.speed("mixed")
        yield f"Training: {seconds:.0f} s a step for a billion parameters, {BYTES_A_PARAMETER} bytes each."
        yield from (f"left out: {reason}" for reason in self.left_out)


def io(
    paths: Annotated[list[Path], typer.Argument(help="Directories on the drives to measure.")],
    size: Annotated[str | None, typer.Option(help="Bytes of the file measured; by default 1GiB or what fits.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the race of the best settings.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller file and fewer settings: some seconds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure drives, and remember the best settings for io_engine="auto".

    Our engines are compared with each other and with a plain pool of threads, on the same file and in turns.
    """
    from rich.console import Console
    from rich.table import Table

    stderr, stdout = Console(stderr=True), Console()
    results = measure_all(paths, size, rounds, quick=quick, console=stderr)
    for result in results:
        say(stderr, remember_settings(result))
    if json:
        print_json({"drives": [result.as_json() for result in results]})
        return
    for result in results:
        table = Table(*HEADINGS, title=f"{result.path.resolve()}: {result.title}", title_justify="left")
        for row in result.rows():
            table.add_row(*row)
        stdout.print(table)
        say(stdout, *result.remarks())


def say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def measure_all(
    paths: Sequence[Path], size: str | None, rounds: int, *, quick: bool, console: Console, peers: Peers | None = None
) -> list[Result]:
    """Every path, after all of them were checked.

    Raises: PathError for what is no writable directory; ConfigError for a size too small to measure; BudgetError for
    one that does not fit: before anything is written. TierIOError.
    """
    wanted = None if size is None else parse_bytes(size, "--size")
    sizes = [checked_size(path, wanted, QUICK_BYTES if quick else GIB) for path in paths]
    return [
        measure(path, nbytes, rounds, quick=quick, console=console, peers=peers)
        for path, nbytes in zip(paths, sizes, strict=True)
    ]


def checked_size(path: Path, size: int | None, default: int) -> int:
    """Bytes of the file to measure in `path`. Writes nothing. Raises: as `measure_all` does."""
    if not path.is_dir():
        raise PathError(errno.ENOTDIR, "cannot measure here: give a directory on the drive", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(errno.EACCES, "cannot measure here: you may not write to this directory", str(path))
    free = shutil.disk_usage(path).free
    if size is None:
        size = min(default, max(free // 4, SMALLEST_BYTES))
    if size < SMALLEST_BYTES:
        least = format_bytes(SMALLEST_BYTES)
        raise ConfigError(f"--size={format_bytes(size)} is too small to measure: give at least {least}")
    if size > free:
        raise BudgetError(
            f"{path}: measuring needs {format_bytes(size)}, {format_bytes(free)} are free: lower --size, or make room",
            needed=size,
            available=free,
            option="--size",
        )
    return size // SMALLEST_BYTES * SMALLEST_BYTES


def measure(path: Path, size: int, rounds: int, *, quick: bool, console: Console, peers: Peers | None) -> Result:
    """One path, in a file of `size` bytes. Raises: PathError, TierIOError; ConfigError where no engine works."""
    from offload.cli import io_speed, machine
    from offload.cli.progress import progress
    from offload.devices.copies import HostCopier
    from offload.storage.arena import Arena

    with contextlib.closing(Arena(io_speed.MEMORY_BYTES, HostCopier())) as arena, _file_in(path) as file:
        memory = arena.memory
        memory[:] = os.urandom(len(memory))  # a drive that compresses would be faster with equal bytes
        nbytes = _lay_out(file, size, memory)
        field = io_speed.field_of(file, memory, quick=quick) + (peers(file, memory) if peers else [])
        names = {one.name for one in field}
        with progress(console, f"{path}:", SWEEP_ROUNDS * len(field) + rounds * len(names)) as told:
            count = itertools.count(1)

            def tell(what: str) -> None:
                told(next(count), what)

            sweep, left_out = io_speed.measure(field, min(nbytes, SWEEP_BYTES), SWEEP_ROUNDS, tell)
            chosen = io_speed.recommended(sweep)
            best = {one.contestant.name: one.contestant for one in sorted(sweep, key=lambda one: one.score)}
            del best[chosen.name]
            race, more = io_speed.measure([chosen, *best.values()], nbytes, rounds, tell)
    return Result(path, machine.file_system(path) or "unknown", nbytes, sweep, race, left_out + more)


@contextlib.contextmanager
def _file_in(path: Path) -> Iterator[Path]:
    """A file to be, in a new folder in `path` that is removed at the end. Raises: PathError."""
    try:
        with tempfile.TemporaryDirectory(prefix=".offload-bench-io-", dir=path) as folder:
            yield Path(folder) / "file"
    except OSError as error:
        if isinstance(error, PathError) or error.errno is None:
            raise
        raise PathError(error.errno, f"measuring ended early: {error.strerror}", str(path)) from error


def _lay_out(file: Path, size: int, memory: memoryview) -> int:
    """Writes what will be measured: the first write into reserved space is slower than any later one, and a read of it
    does not reach the drive. Returns the bytes of one measurement: all, or on a slow drive those of WISHED_S.

    Raises: OSError.
    """
    from offload.io.engine import open_file

    opened = open_file(str(file))
    try:
        os.posix_fallocate(opened.fd, 0, size)
        start, done = time.perf_counter(), 0
        while done < size and time.perf_counter() - start < 4 * WISHED_S:
            done += os.pwrite(opened.fd, memory[: min(len(memory), size - done)], done)
        os.fdatasync(opened.fd)
        wished = int(WISHED_S * done / (time.perf_counter() - start))
        return min(done, max(wished // SMALLEST_BYTES, 1) * SMALLEST_BYTES)
    finally:
        opened.close()


def remember_settings(result: Result) -> str:
    """For `io_engine="auto"`, and for the shares of several paths. Returns: what was done, for people."""
    from offload.io.select import Settings, remember

    best, bandwidth = result.chosen.contestant, result.chosen.speed("mixed") * 1e9
    try:
        place = remember(result.path, Settings(best.name, best.request_bytes, best.depth, bandwidth))
    except OSError as error:
        return f'cannot write down the settings for io_engine="auto": {error}'
    return f'io_engine="auto" will use {best.name} {best.settings} on the file system of {result.path} ({place})'
