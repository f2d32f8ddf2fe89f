"""The threads that share a kernel's range, and how many there may be."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from offload.errors import BudgetError
from offload.interrupts import LET_IN_S, let_in, uninterrupted
from offload.native.library import Work

Range = tuple[Work, int, int]
"""A kernel and the bounds of elements that it is to be run on."""


class Pool:
    """Persistent threads that take ranges from one queue of calls.

    They end with this object, when the calls that are queued by then have ended.

    Args:
        workers: how many threads.

    Raises:
        BudgetError: if the system refuses them.
    """

    @uninterrupted
    def __init__(self, workers: int) -> None:
        self.pid = os.getpid()
        self._workers = workers
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"offload-kernel-{i}", daemon=True)
            for i in range(workers)
        ]
        start_threads(threads, self._calls)
        self.stop = weakref.finalize(self, end_threads, self._calls, threads, self.pid)

    @uninterrupted
    def run(self, ranges: Iterable[Range]) -> None:
        """Runs each of `ranges` once, here and in the threads. They are drawn here, as threads become free.

        Whatever this raises, no thread uses the memory of a range any more. The first exception of a range is raised
        when all have ended.
        """
        call = _Call()
        try:
            for one in ranges:
                call.left.append(one)
                self._calls.put(call)
                if len(call.left) > self._workers:
                    call.run_next()
                if call.error is not None:
                    break
            while call.left:
                call.run_next()
        finally:
            call.join(self._calls)
        if call.error is not None:
            raise call.error


class _Call:
    """One call of `Pool.run`.

    The pool's threads alone count what decides when it is over. So an exception that is thrown into the caller between
    two instructions loses no count.

    Attributes:
        left: the ranges that nobody has begun.
        error: the first exception.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.left: deque[Range] = deque()
        self._under_way = 0
        self._lock = threading.Lock()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def run_next(self) -> None:
        """Runs a range in the caller's thread, if one is left."""
        one = self._next()
        if one is not None:
            self._run(one)

    def take(self) -> None:
        """Runs a range in a thread of the pool, if one is left."""
        with self._lock:
            self._under_way += 1  # before the range is gone from `left`: `join` looks at both
        try:
            one = self._next()
            if one is not None:
                self._run(one)
            del one
        finally:
            with self._lock:
                self._under_way -= 1
            self._ended.put(None)

    def _next(self) -> Range | None:
        try:
            return self.left.popleft()
        except IndexError:
            return None

    def _run(self, one: Range) -> None:
        work, low, high = one
        try:
            work(low, high)
        except BaseException as raised:
            self.error = self.error or raised

    def join(self, calls: SimpleQueue[_Call | None]) -> None:
        """Waits until all ranges have ended. What is thrown into the caller meanwhile is kept in `error`."""
        while self.left or self._under_way:
            try:
                self._ended.get(timeout=LET_IN_S)  # only to wake up: what counts is above
            except Empty:
                calls.put(self)  # it may have been cut off before it was put there as often as it has ranges
            except BaseException as raised:
                self.error = self.error or raised


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.take()
        del call


@uninterrupted
def start_threads(threads: list[threading.Thread], calls: SimpleQueue[Any] | None = None) -> None:
    """Starts all of these threads, or none.

    Args:
        threads: not started yet.
        calls: the queue from which they take calls, until None comes.

    Raises:
        BudgetError: if the system refuses one.
    """
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except BaseException as error:
        if calls is not None:
            end_threads(calls, started, os.getpid())
        if not isinstance(error, RuntimeError | MemoryError | OSError):
            raise
        raise BudgetError(
            f"the system refuses {threads[0].name}, a thread ({error}): raise the limit of processes (ulimit -u, or "
            "pids.max of the cgroup) or of address space (ulimit -v), or give a smaller Tuning(threads=...)",
            needed=len(threads),
            available=len(started),
            option="threads",
        ) from error


@uninterrupted
def end_threads(calls: SimpleQueue[Any], threads: list[threading.Thread], pid: int) -> None:
    """Ends threads that take calls from a queue until None comes, and waits for them.

    Args:
        calls: the queue.
        threads: the threads.
        pid: of the process that started them.
    """
    if pid != os.getpid():
        return  # a forked child has no such threads
    for _ in threads:
        calls.put(None)
    wait_for_threads(threads)


@uninterrupted
def wait_for_threads(threads: Iterable[threading.Thread]) -> None:
    """Waits until these threads have ended. A thread that still ends while Python does can abort the process.

    Args:
        threads: were told to end; the current one is not waited for.
    """
    for thread in threads:
        while thread is not threading.current_thread() and thread.is_alive():
            thread.join(LET_IN_S)
            let_in()


def usable_cpus() -> int:
    """How many CPUs this process, and the ranks beside it, may keep busy; at least 1.

    These are the CPUs of its affinity mask, and no more than the quota of its cgroup.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    count = min([count, *_cgroup_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    return max(1, int(count))


def _cgroup_quotas(membership: Path, root: Path) -> list[float]:
    """The CPUs that each cgroup of this process allows, from its own up to the root's, v1 and v2."""
    quotas: list[float | None] = []
    try:
        lines = os.fsdecode(membership.read_bytes()).splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root if not controllers else root / "cpu"
        folder = top / path.lstrip("/")
        folders = (one for one in (folder, *folder.parents) if one.is_relative_to(top))
        quotas.extend(_quota_v1(one) if controllers else _quota_v2(one) for one in folders)
    return [quota for quota in quotas if quota is not None]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
