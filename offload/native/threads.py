"""The threads that share a kernel's range, and how many there may be."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue

from offload.native.contract import Part

_Job = tuple[Part, int, int, "SimpleQueue[BaseException | None]"]


class Pool:
    """Persistent threads that take parts from one queue. They end with this object, not before the
    jobs queued by then are done."""

    def __init__(self, workers: int) -> None:
        self.pid = os.getpid()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"offload-kernel-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in threads:
            thread.start()
        self.stop = weakref.finalize(self, _stop, self._jobs, threads, self.pid)

    def run(self, part: Part, edges: list[int]) -> None:
        """Runs `part` on each range between two edges, the first of them here.

        Raises: the first exception of any of them, when all have ended.
        """
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for low, high in itertools.pairwise(edges[1:]):
            self._jobs.put((part, low, high, done))
        error: BaseException | None = None
        try:
            part(edges[0], edges[1])
        except BaseException as raised:
            error = raised
        waiting = len(edges) - 2
        while waiting:
            try:
                error = done.get() or error
                waiting -= 1
            except KeyboardInterrupt as raised:
                # Not before the others have let go of the caller's memory.
                error = raised
        if error is not None:
            raise error


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        part, low, high, done = job
        error = None
        try:
            part(low, high)
        except BaseException as raised:
            error = raised
        # The tensors that `part` holds have to go when the caller lets them go.
        del job, part
        done.put(error)
        del done, error


def _stop(jobs: SimpleQueue[_Job | None], threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has no such threads
    for _ in threads:
        jobs.put(None)
    # A thread that still ends while the interpreter does would abort the process: its tensors go then.
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def usable_cpus() -> int:
    """How many CPUs this process may keep busy: those of its affinity mask, no more than its cgroup's
    quota, shared with the ranks that LOCAL_WORLD_SIZE says are on this machine; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    count = min([count, *_cgroup_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count / max(1, int(ranks) if ranks.isdigit() else 1)))


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
        places = (place for place in (folder, *folder.parents) if place.is_relative_to(top))
        quotas.extend(_quota_v1(place) if controllers else _quota_v2(place) for place in places)
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
