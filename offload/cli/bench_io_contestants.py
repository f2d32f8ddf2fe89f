"""Who competes in `offload bench io`: our engines, and what they are compared with.

Everyone moves the same bytes of the same file: reading or writing `nbytes` from its start on, or, mixed, reading the
first half while writing the second. Everyone does so in a buffer of known size on huge pages, over and over; one that
fits the CPU's cache makes the same drive look faster, so the buffer's size is part of every comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from offload.cli.bench_io_place import Place
from offload.io.engine import IOFile, IOFuture, QueuedEngine
from offload.sizes import KIB, MIB

OPERATIONS = ("read", "write", "mixed")
FIO_TIMEOUT_S = 300
TRANSFERS = 4
"""Under way at once, each a share of the buffer: as a step of the optimizer moves its chunks."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For a reference's process, so that its buffers are on huge pages as ours are: without, it is only half as fast."""

Part = tuple[str, int, int]
"""(read or write, offset, length)"""


class LeftOutError(Exception):
    """Why a contestant cannot run here."""


class Contestant(ABC):
    """Attributes: name; settings (for people); buffer_bytes (of the memory it works in)."""

    name: str
    settings: str
    buffer_bytes: int

    @abstractmethod
    def run(self, operation: str, nbytes: int) -> float:
        """Moves `nbytes`; returns the seconds it took. Raises: LeftOutError."""


def parts(operation: str, nbytes: int, length: int) -> list[Part]:
    """What has to be moved, `length` bytes at a time."""
    if operation != "mixed":
        return [(operation, start, min(length, nbytes - start)) for start in range(0, nbytes, length)]
    half = nbytes // 2
    pairs = ((start, min(length, half - start)) for start in range(0, half, length))
    return [part for start, size in pairs for part in (("read", start, size), ("write", half + start, size))]


def drop_cached(fd: int) -> None:
    """Takes the file out of the page cache, for those who go through it."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Ours(Contestant):
    """One of this library's engines. In a small `memory` it uses smaller requests, and as many as fit.

    Args: make: of request_bytes and depth; open_file: gives the engine the file; cached: whether the page cache is in
    the way, so that reads have to start without it, and writes to end with a sync.
    Attributes: cpu_s: what this process used during the last run.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int, int], QueuedEngine],
        open_file: Callable[[QueuedEngine], IOFile],
        request_bytes: int,
        depth: int,
        memory: memoryview,
        cached: bool,
    ) -> None:
        self.name = name
        self.request_bytes = min(request_bytes, len(memory) // TRANSFERS)
        self.depth = min(depth, len(memory) // self.request_bytes)
        self.settings = f"{size_label(self.request_bytes)} x {self.depth}"
        self.buffer_bytes = len(memory)
        self.cpu_s = 0.0
        self._make = make
        self._open_file = open_file
        self._memory = memory
        self._cached = cached

    def run(self, operation: str, nbytes: int) -> float:
        engine = self._make(self.request_bytes, self.depth)
        try:
            engine.register(self._memory)
            file = self._open_file(engine)
            if self._cached:
                drop_cached(file.fd)
            return self._timed(engine, file, operation, nbytes)
        finally:
            engine.close()

    def _timed(self, engine: QueuedEngine, file: IOFile, operation: str, nbytes: int) -> float:
        share = len(self._memory) // TRANSFERS
        todo = parts(operation, nbytes, share)
        under_way: deque[IOFuture] = deque()
        cpu, start = time.process_time(), time.perf_counter()
        for index, (direction, offset, length) in enumerate(todo):
            if len(under_way) == TRANSFERS:
                under_way.popleft().result()
            at = index % TRANSFERS * share
            move = engine.read if direction == "read" else engine.write
            under_way.append(move(file, offset, self._memory[at : at + length]))
        for future in under_way:
            future.result()
        if self._cached and operation != "read":
            engine.sync(file).result()
        elapsed = time.perf_counter() - start
        self.cpu_s = time.process_time() - cpu
        return elapsed


class Pool(Contestant):
    """preadv and pwritev on a few threads: what one would write in ten lines. It goes round all of `memory`."""

    def __init__(self, name: str, place: Place, memory: memoryview, request_bytes: int, threads: int) -> None:
        self.name = name
        self.settings = f"{size_label(request_bytes)} x {threads}"
        self.buffer_bytes = len(memory)
        self._place = place
        self._request_bytes = request_bytes
        self._threads = threads
        self._buffers = [memory[at : at + request_bytes] for at in range(0, len(memory), request_bytes)]

    def run(self, operation: str, nbytes: int) -> float:
        todo = parts(operation, nbytes, self._request_bytes)
        threads, buffers = self._threads, self._buffers
        if not self._place.direct:
            drop_cached(self._place.fd)

        def work(index: int) -> None:
            for number in range(index, len(todo), threads):
                direction, offset, length = todo[number]
                move = os.preadv if direction == "read" else os.pwritev
                if move(self._place.fd, [buffers[number % len(buffers)][:length]], offset) != length:
                    raise LeftOutError("a transfer came up short")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.001] * threads))  # the threads exist
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            if not self._place.direct and operation != "read":
                os.fdatasync(self._place.fd)
            return time.perf_counter() - start


class Fio(Contestant):
    """The disk benchmark of kernel people; its own clock counts, without its start."""

    def __init__(self, place: Place, engine: str, request_bytes: int, depth: int) -> None:
        self.name = f"fio {engine}"
        self.settings = f"{size_label(request_bytes)} x {depth}"
        self.buffer_bytes = request_bytes * depth
        self._arguments = [
            "fio", "--name=bench", f"--filename={place.name}", "--output-format=json", f"--ioengine={engine}",
            f"--bs={request_bytes}", f"--iodepth={depth}", "--direct=1", "--thread", "--invalidate=0",
            "--fallocate=none", "--allow_file_create=0",
        ]  # fmt: skip
        if engine == "io_uring":
            self._arguments += ["--fixedbufs=1", "--registerfiles=1"]

    def run(self, operation: str, nbytes: int) -> float:
        kind = "rw" if operation == "mixed" else operation
        try:
            done = subprocess.run(
                [*self._arguments, f"--rw={kind}", f"--size={nbytes}"],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ | HUGE_PAGES,
                timeout=FIO_TIMEOUT_S,
            )
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            moved = sum(job[direction]["io_bytes"] for direction in ("read", "write"))
            milliseconds = max(job[direction]["runtime"] for direction in ("read", "write"))
            return float(max(milliseconds, 1) / 1000 * nbytes / moved)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout).strip().splitlines() or ["it failed without a word"]
            raise LeftOutError(lines[0]) from error
        except (OSError, ValueError, LookupError, ArithmeticError, subprocess.TimeoutExpired) as error:
            raise LeftOutError(f"{type(error).__name__}: {error}") from error


def size_label(count: int) -> str:
    """Bytes as in a request's size: 512K, 4M."""
    return f"{count // MIB}M" if count % MIB == 0 else f"{count // KIB}K"
