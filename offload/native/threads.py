"""The threads that share a kernel's range, and how many there may be."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue

from offload.interrupts import LET_IN_S, uninterrupted
from offload.native.library import Work


class Pool:
    """Persistent threads that take ranges from one queue of calls. They end with this object, not before the
    calls queued by then are done."""

    def __init__(self, workers: int) -> None:
        self.pid = os.getpid()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"offload-kernel-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in threads:
            thread.start()
        self.stop = weakref.finalize(self, _stop, self._calls, threads, self.pid)

    @uninterrupted
    def run(self, work: Work, edges: list[int]) -> None:
        """Runs `work` on each range between two edges, the first of them here.

        Whatever is raised, here or there, no thread is in `work` any more, nor will be: the memory is the caller's.
        Raises: the first exception of any of them, when all have ended.
        """
        call = _Call(work, edges)
        try:
            for _ in edges[2:]:
                self._calls.put(call)
            call.run(edges[0], edges[1])
        finally:
            call.join(self._calls)
        if call.error is not None:
            raise call.error


class _Call:
    """One call of `Pool.run`: the ranges that are not the caller's own.

    What decides when it is over is counted by the pool's threads alone: an exception that is thrown into the caller
    between two instructions loses no count.
    """

    def __init__(self, work: Work, edges: list[int]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._left = deque(itertools.pairwise(edges[1:]))
        self._under_way = 0
        self._lock = threading.Lock()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def run(self, low: int, high: int) -> None:
        try:
            self._work(low, high)
        except BaseException as raised:
            self.error = self.error or raised

    def take(self) -> None:
        """In a thread of the pool: runs a range that nobody has begun, if there is one."""
        with self._lock:
            if not self._left:
                return
            low, high = self._left.popleft()
            self._under_way += 1
        try:
            self.run(low, high)
        finally:
            with self._lock:
                self._under_way -= 1
            self._ended.put(None)

    def join(self, calls: SimpleQueue[_Call | None]) -> None:
        """Waits until all ranges are done. What is raised into the caller meanwhile waits, too."""
        while self._left or self._under_way:
            try:
                self._ended.get(timeout=LET_IN_S)  # only to wake up: what counts is above
            except Empty:
                calls.put(self)  # it may have been cut off before it was put there as often as it has ranges
            except BaseException as raised:
                self.error = self.error or raised
        del self._work  # the tensors that it holds have to go when the caller lets them go


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.take()
        del call


def _stop(calls: SimpleQueue[_Call | None], threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has no such threads
    for _ in threads:
        calls.put(None)
    # A thread that still ends while the interpreter does would abort the process: its tensors go then.
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def usable_cpus() -> int:
    """How many CPUs this process, and the ranks beside it, may keep busy: those of its affinity mask, no more than
    its cgroup's quota; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    count = min([count, *_cgroup_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    return max(1, int(count))


def _cgroup_quotas(membership: Path, root: Path) -> list[float]:
    """CPUs allowed by each cgroup that this process is in, from its own up to the root's, v1 and v2."""
    quotas: list[float | None] = []
    try:
        lines = membership.read_text().splitlines()
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
