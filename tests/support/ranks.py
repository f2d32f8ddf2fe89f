"""Ranks: processes that run test functions together, over gloo, as torchrun would start them.

A world's processes stay for many tests: they are forked from one server process that has imported already what tests
need, so the first world costs those imports and the next ones little. A world in which something went wrong is not used
again.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Self

Function = Callable[..., Any]

PRELOADED = ["torch.distributed", "torch.nn.parallel", "pytest", "tests.support.sharded", "tests.support.communicators"]
"""Seconds of importing on each rank otherwise."""

GROUP_TIMEOUT_S = 60.0
"""Of the process group."""

MANY_THREADS = 64
"""A world whose ranks have more threads is not used again. Each process group that nobody destroys keeps threads of
gloo's, of which one wakes up a hundred times a second."""


class RanksFailedError(AssertionError):
    """What each rank that failed says."""


class World:
    """`size` processes, connected by torch.distributed, that run the same function at the same time.

    Functions are named, not sent: they have to be at the top of a module. Attributes: usable: False: something went
    wrong; most_threads: of a rank, when the last call ended.
    """

    def __init__(self, size: int, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self.size = size
        self.usable = True
        self.most_threads = 0
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, group_timeout_s, self._folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Function, *args: Any, timeout_s: float = 60) -> list[Any]:
        """Calls `function(*args)` on every rank; returns what they return, by rank. Raises: RanksFailedError."""
        self.start(function, *args)
        return self.results(timeout_s)

    def start(self, function: Function, *args: Any) -> None:
        """Begins a call; `results` ends it."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))

    def results(self, timeout_s: float = 60, ranks: Sequence[int] | None = None) -> list[Any]:
        """What `ranks` (None: all) returned. Raises: RanksFailedError, which tells of dead and late ranks too."""
        asked = list(range(self.size)) if ranks is None else list(ranks)
        found: dict[int, Any] = {}
        faults: dict[int, str] = {}
        end = time.monotonic() + timeout_s
        while left := [rank for rank in asked if rank not in found and rank not in faults]:
            pipes = {self._pipes[rank]: rank for rank in left}
            ready = wait(list(pipes), max(end - time.monotonic(), 0))
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    good, value, threads = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    self.most_threads = max(self.most_threads, threads)
                    (found if good else faults)[rank] = value
                except EOFError:
                    self._processes[rank].join(5)
                    faults[rank] = f"died with exit code {self._processes[rank].exitcode}"
            if not ready:
                faults |= dict.fromkeys(left, f"not finished within {timeout_s} s")
        if faults:
            self.usable = False
            raise RanksFailedError("\n".join(f"rank {rank} of {self.size}: {faults[rank]}" for rank in sorted(faults)))
        return [found[rank] for rank in asked]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank: SIGKILL, SIGSTOP. The world is not used again."""
        self.usable = False
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_codes(self, ranks: Sequence[int], timeout_s: float = 30) -> list[int | None]:
        """Lets `ranks` end by themselves, as a program that is through would. None: one did not within the time."""
        self.usable = False
        for rank in ranks:
            self._pipes[rank].close()
        end = time.monotonic() + timeout_s
        for rank in ranks:
            self._processes[rank].join(max(end - time.monotonic(), 0))
        return [self._processes[rank].exitcode for rank in ranks]

    def close(self) -> None:
        """Ends the processes, gently at first, and takes the folder away."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5 if self.usable else 0)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worlds:
    """Worlds by size, one of each, for as long as they are usable and cost little while they wait."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is None or not world.usable or world.most_threads > MANY_THREADS:
            if world is not None:
                world.close()
            world = self._worlds[size] = World(size)
        return world

    def close(self) -> None:
        """Ends those that there are. Later calls start others."""
        while self._worlds:
            self._worlds.popitem()[1].close()


def _serve(rank: int, size: int, group_timeout_s: float, folder: str, pipe: Connection) -> None:
    """A rank's process: connects, then does what it is asked until the pipe closes."""
    import torch
    import torch.distributed as dist

    from tests import simulated_device
    from tests.support.device import load_simulated

    if simulated_device.is_wanted():
        load_simulated()

    torch.set_num_threads(1)
    # A rank alone on its node would look for the name of the machine, which need not resolve.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=group_timeout_s),
    )
    gc.freeze()  # what was imported stays: no collection has to look through it
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = pickle.dumps((True, function(*args), _threads()))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc(), _threads()))
            pipe.send_bytes(answer)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _threads() -> int:
    """How many threads this process has, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))
