"""An I/O engine that uses every freedom its contract leaves, and that fails, loses and damages what it is told to.

Each transfer starts late and is reported late, in random order. On top of that `fail`, `flip`, `lose` and `tear`
arm one fault for one transfer to come.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.errors import TierIOError
from offload.io.engine import IOEngine, IOFile, IOFuture, Transfer
from offload.io.threads import ThreadEngine
from offload.sizes import PAGE_BYTES
from offload.storage.swap_format import parse_header

Move = Callable[[IOFile, int, memoryview], IOFuture]
Fault = Callable[[Move, IOFile, int, memoryview], IOFuture]


def resolved(result: int = 0, error: BaseException | None = None) -> IOFuture:
    future: IOFuture = IOFuture()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


def aligned(data: bytes | memoryview) -> memoryview:
    """A copy of `data` that O_DIRECT takes."""
    copy = memoryview(mmap.mmap(-1, max(len(data), PAGE_BYTES)))[: len(data)]
    copy[:] = data
    return copy


class FaultyEngine(IOEngine):
    """See the top of this file.

    Args: delay_s: the most that a start and a report are put off, each.
    Attributes: reads, writes: transfers submitted; most_at_once: under way together.
    """

    name = "faulty"

    def __init__(self, *, seed: int = 0, delay_s: float = 0.002) -> None:
        self._inner = ThreadEngine()
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._under_way = 0
        self._closed = False
        self._faults: dict[tuple[str, int], Fault] = {}
        self._refused: tuple[str, int | Exception, Callable[[int], bool]] | None = None
        self._counts: defaultdict[str, int] = defaultdict(int)
        self.most_at_once = 0
        self._thread = threading.Thread(target=self._run, name="faulty-disk", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> int:
        return self._counts["read"]

    @property
    def writes(self) -> int:
        return self._counts["write"]

    # Faults: `nth` counts the transfers of that operation from now on; 0 is the next.

    def fail(self, operation: str, code: int, nth: int = 0) -> None:
        """The transfer fails with errno `code`, without touching anything."""

        def fault(move: Move, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
            return resolved(error=TierIOError(operation, code, file.path, offset, len(buffer)))

        self._arm(operation, nth, fault)

    @contextmanager
    def failing(
        self, operation: str, error: int | Exception, chunk: Callable[[int], bool] = lambda chunk: True
    ) -> Iterator[None]:
        """Inside, transfers of that operation fail. Args: error: its errno, or what ends them; chunk: only writes of
        slots of these."""
        self._refused = operation, error, chunk
        try:
            yield
        finally:
            self._refused = None

    def flip(self, operation: str, at: int, nth: int = 0) -> None:
        """Byte `at` of the transfer arrives changed, without an error."""

        def read(move: Move, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
            count = move(file, offset, buffer).result()
            buffer[at] ^= 0x10
            return resolved(count)

        def write(move: Move, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
            damaged = aligned(buffer)
            damaged[at] ^= 0x10
            return resolved(move(file, offset, damaged).result())

        self._arm(operation, nth, read if operation == "read" else write)

    def lose(self, nth: int = 0) -> None:
        """The write is reported as done and never happens."""

        def fault(move: Move, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
            return resolved(len(buffer))

        self._arm("write", nth, fault)

    def tear(self, keep: int, nth: int = 0) -> None:
        """The write is reported as done, but only its first `keep` bytes (whole pages) get there."""

        def fault(move: Move, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
            move(file, offset, buffer[:keep]).result()
            return resolved(len(buffer))

        self._arm("write", nth, fault)

    def _arm(self, operation: str, nth: int, fault: Fault) -> None:
        with self._changed:
            self._faults[operation, self._counts[operation] + nth] = fault

    # The contract.

    def open(self, path: str, *, dir_fd: int | None = None, is_new: bool = False) -> IOFile:
        return self._inner.open(path, dir_fd=dir_fd, is_new=is_new)

    def adopt(self, file: IOFile) -> IOFile:
        return self._inner.adopt(file)

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._inner.close()

    def submit(self, transfer: Transfer) -> Transfer:
        operation, file, offset, buffer = transfer.operation, transfer.file, transfer.offset, transfer.view
        if operation == "sync":
            move: Move = lambda file, offset, buffer: self._inner.sync(file)  # noqa: E731
        else:
            move = self._inner.read if operation == "read" else self._inner.write
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine is closed")
            fault = self._faults.pop((operation, self._counts[operation]), None) or self._refusal(transfer)
            self._counts[operation] += 1
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)

        def start() -> None:
            if fault is None:
                ended = move(file, offset, buffer)
            else:
                try:
                    ended = fault(move, file, offset, buffer)
                except BaseException as error:
                    ended = resolved(error=error)
            ended.add_done_callback(lambda _: self._later(lambda: self._report(transfer, ended)))

        self._later(start)
        return transfer

    def _refusal(self, transfer: Transfer) -> Fault | None:
        """What `failing` says of a transfer."""
        if self._refused is None:
            return None
        operation, error, of = self._refused
        if operation != transfer.operation:
            return None
        if operation == "write" and not of(parse_header(transfer.view, transfer.file.path, transfer.offset, 0).chunk):
            return None
        if isinstance(error, int):
            error = TierIOError(operation, error, transfer.file.path, transfer.offset, len(transfer.view))
        return lambda *_: resolved(error=error)

    def _report(self, transfer: Transfer, ended: IOFuture) -> None:
        transfer.error = ended.exception()
        try:
            transfer.end()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _later(self, action: Callable[[], None]) -> None:
        with self._changed:
            due = time.monotonic() + self._random.random() * self._delay_s
            heapq.heappush(self._late, (due, next(self._number), action))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._late or self._late[0][0] > time.monotonic():
                    if self._closed and not self._late:
                        return
                    self._changed.wait(self._late[0][0] - time.monotonic() if self._late else None)
                _, _, action = heapq.heappop(self._late)
            action()
