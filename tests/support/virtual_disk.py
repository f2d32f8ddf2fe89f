"""A disk in the virtual time of the simulated accelerator, and the worker of the steps beside it.

What takes time has one order: that of virtual time, whatever the threads of this machine do. A transfer ends when
somebody's clock is past its end, or when somebody waits for it. A task of the step's worker runs when somebody's clock
is past its beginning, or when somebody waits for it; once it has begun, it runs to its end.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from offload.io.engine import QueuedEngine, Request, Transfer
from offload.io.threads import Workers
from offload.optim.step import Step
from offload.optim.trials import Trials
from offload.storage import chunk_cache
from offload.storage.chunk_cache import Store
from tests import simulated_device

CLOCKS = {"offload-gradients": 1, "offload-step": 2}
"""Of the workers, by name; all other threads are one after the other, and have clock 0."""
WORKER = "offload-step"
HASHER = "offload-checksum"


def clock_of_thread() -> int:
    return CLOCKS.get(threading.current_thread().name.rpartition("_")[0], 0)


class VirtualDisk(QueuedEngine):
    """Moves one transfer after the other, as the engines choose them.

    Args: bytes_per_s: of reads and writes; inf: nothing takes time.
    Attributes: busy_s: for how long it has worked.
    """

    name = "virtual"

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(request_bytes=sys.maxsize, depth=1)
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self._started: deque[tuple[float, Request]] = deque()  # with when they end
        self._of_thread = threading.local()
        self._ending = threading.RLock()  # taken before any lock of a store, and none of those before it

    def _start(self, requests: list[Request]) -> None:
        for request in requests:
            # What is no slot takes no time.
            lasts = request.length / self.bytes_per_s if request.offset else 0.0
            self.busy_s += lasts
            self._started.append((self._now() + lasts, request))

    def submit(self, transfer: Transfer) -> Transfer:
        super().submit(transfer)
        if transfer.operation == "sync" or not transfer.offset:  # somebody waits for it
            while not transfer.done():
                self.end_one()
        return transfer

    def close(self) -> None:
        while self.end_one() is not None:
            pass
        super().close()

    def _now(self) -> float:
        """When what the thread does happens: in what it does at the end of a transfer, that is then."""
        ended: float | None = getattr(self._of_thread, "ended", None)
        return simulated_device.host_s(clock_of_thread()) if ended is None else ended

    def advance(self) -> None:
        """Ends what has ended by now."""
        with self._ending:
            while self._started and self._started[0][0] <= self._now():
                self.end_one()

    def end_one(self) -> float | None:
        """Ends the transfer that ends next. Returns: when that is; None: nothing is under way."""
        with self._ending:
            if not self._started:
                return None
            ended, request = self._started.popleft()
            moved = _move(request)
            self._of_thread.ended, before = ended, getattr(self._of_thread, "ended", None)
            try:
                self._ended(request, moved)
            finally:
                self._of_thread.ended = before
            return ended


def _move(request: Request) -> int:
    if request.operation == "read":
        return os.preadv(request.file.fd, [request.view], request.offset)
    if request.operation == "write":
        return os.pwritev(request.file.fd, [request.view], request.offset)
    return 0


class _Tasks:
    """Those of the step's worker: in the order in which they were given, each in the worker's own thread."""

    def __init__(self) -> None:
        self._put = Workers.put
        self._given: deque[tuple[float, Workers, Future[Any], Callable[[], Any]]] = deque()
        self._ends: dict[Future[Any], float] = {}
        self._running = threading.RLock()

    def give(self, worker: Workers, future: Future[Any], function: Callable[[], Any]) -> None:
        self._given.append((simulated_device.host_s(clock_of_thread()), worker, future, function))

    def run_until(self, is_enough: Callable[[float], bool]) -> None:
        """Runs tasks. Args: is_enough: whether those that begin then, or later, may wait."""
        with self._running:
            while self._given:
                given_s, worker, future, function = self._given[0]
                if is_enough(max(given_s, simulated_device.host_s(CLOCKS[WORKER]))):
                    return
                self._given.popleft()
                if future.cancelled():
                    continue
                self._put(worker, future, self._clocked(given_s, future, function))
                future.exception()

    def run_begun(self) -> None:
        """Runs those that have begun by now."""
        now = simulated_device.host_s(clock_of_thread())
        self.run_until(lambda begins: begins >= now)

    def wait_for(self, future: Future[Any]) -> None:
        self.run_until(lambda _: future.done())
        simulated_device.host_until(self._ends.get(future, 0.0))

    def _clocked(self, given_s: float, future: Future[Any], function: Callable[[], Any]) -> Callable[[], Any]:
        def task() -> Any:
            simulated_device.use_clock(CLOCKS[WORKER])
            simulated_device.host_until(given_s)
            try:
                return function()
            finally:
                self._ends[future] = simulated_device.host_s(CLOCKS[WORKER])

        return task


@contextmanager
def steps_wait_for(disk: VirtualDisk, adam_s: float) -> Iterator[None]:
    """In the block stores, steps and trials have the order of virtual time.

    Args: disk: whose transfers they wait for. adam_s: what Adam takes of a chunk.
    """
    tasks = _Tasks()
    put, wait_until = Workers.put, chunk_cache.wait_until
    tasks_of, end, whole = Step._tasks, Trials.end, Trials._gradient_is_whole

    def put_in_order(
        self: Workers, future: Future[Any] | None, function: Callable[..., Any], /, *args: Any, **options: Any
    ) -> None:
        if self._threads[0].name.startswith(HASHER):
            function(*args, **options)  # nobody waits for checksums here
        elif self._threads[0].name.startswith(WORKER):
            assert future is not None
            tasks.give(self, future, functools.partial(function, *args, **options))
        else:
            put(self, future, function, *args, **options)

    def wait_for_disk(lock: Any, changed: Any, done: Callable[[], bool], **options: Any) -> None:
        while True:
            with lock:
                if done():
                    return
            ended = disk.end_one()
            if ended is None:
                wait_until(lock, changed, done, **options)
                return
            simulated_device.host_until(ended)

    def after_disk(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def advanced(self: Store, *args: Any, **options: Any) -> Any:
            disk.advance()
            return function(self, *args, **options)

        return advanced

    def adam(self: Step, *args: Any, **options: Any) -> Any:
        simulated_device.host_spends(adam_s)
        return tasks_of(self, *args, **options)

    def tells(self: Trials, param: int) -> None:
        tasks.run_begun()
        whole(self, param)

    def end_begun(self: Trials) -> None:
        tasks.run_begun()
        queue = [*self._queue]
        end(self)
        for future in queue:
            tasks.wait_for(future)

    def waits(self: Step, done: Future[None], chunk: Any) -> None:
        tasks.wait_for(done)
        done.result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "put", put_in_order)
        patch.setattr(chunk_cache, "wait_until", wait_for_disk)
        for name in ("expect", "keep", "acquire", "release"):
            patch.setattr(Store, name, after_disk(getattr(Store, name)))
        patch.setattr(Step, "_tasks", adam)
        patch.setattr(Step, "_wait_for", waits)
        patch.setattr(Trials, "_gradient_is_whole", tells)
        patch.setattr(Trials, "end", end_begun)
        yield
