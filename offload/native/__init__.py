"""The CPU kernels: choice of instruction set, threads, and the fallback without a C library.

`load()` gives a `Kernels`: one variant of `kernels/*.c` (or the same numeric contract through separate torch
operations, variant "torch") and a pool of Python threads that share each call's range; ctypes drops the GIL, so that
they truly run side by side. No choice of variant, thread count or split changes a bit of any result:
`optim/reference.py` says what it is.

`table` has a row for each kernel. All tensors are one-dimensional, contiguous and on the CPU (those of `load_on` on its
device), and no two of a call overlap but where a row says that they may be the very same memory. Nothing is allocated
that grows with them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from offload.errors import ClosedError, ConfigError
from offload.native.compiled_kernels import device_kernels
from offload.native.library import Library, Work, c_variants, library_path, open_library
from offload.native.pool import LibraryPool, LibraryWork, Piecewise
from offload.native.table import (
    ACCUMULATE,
    ADAM,
    ADAM_DITHERED,
    ADAM_SPLIT,
    CAST,
    JOIN,
    LIMIT,
    LINE,
    SPLIT,
    SUM_SQUARES,
    AdamScalars,
    DitheredScalars,
    Kernel,
    sum_blocks,
)
from offload.native.threads import Pool, Range, usable_cpus
from offload.native.torch_kernels import DeviceKernels, TorchKernels
from offload.sizes import SUM_BLOCK, round_up

__all__ = [
    "ACCUMULATE",
    "ADAM",
    "ADAM_DITHERED",
    "ADAM_SPLIT",
    "CAST",
    "JOIN",
    "LIMIT",
    "SPLIT",
    "SUM_BLOCK",
    "SUM_SQUARES",
    "VARIANTS",
    "AdamScalars",
    "DitheredScalars",
    "Kernel",
    "Kernels",
    "Task",
    "available_variants",
    "cpu_model",
    "fallback_reason",
    "library_path",
    "load",
    "load_on",
    "open_library",
    "sum_blocks",
    "usable_cpus",
]

VARIANTS = ("avx512", "avx2", "neon", "baseline", "torch")
"""Every variant there is, best first; which of them run here, `available_variants` says."""

_ENVIRONMENT = "OFFLOAD_KERNELS"
_MIN_SHARE = 65536  # elements: fewer are done before another thread has woken up
_PIECES = 4
"""For each of the C library's threads: a thread that has to wait for a CPU then delays the others by a fourth."""

_logger = logging.getLogger("offload")

Backend = Library | TorchKernels | DeviceKernels


class Task(NamedTuple):
    """A kernel with all that it needs, for `Kernels.run`.

    Attributes:
        work: runs the kernel on a range of positions.
        low: the first position.
        high: the one after the last.
        cut: threads share the positions at multiples of this number.
        written: the tensors that the kernel writes to.
    """

    work: Work
    low: int
    high: int
    cut: int = LINE
    written: tuple[Tensor, ...] = ()


class Kernels:
    """One variant of the kernels, and its threads. Calls may come from several threads at once.

    `table` has a row for each kernel, with its contract. Tensors may be empty. The version counter of tensors that are
    written to is increased.

    Attributes:
        threads: how many share a call, the caller among them.
    """

    def __init__(self, threads: int, backend: Backend, device: torch.device | None = None) -> None:
        self.threads = threads
        self._device = device or torch.device("cpu")
        self._backend = backend
        self._pool: LibraryPool | None = None
        self._python_pool: Pool | None = None
        self._closed = False

    @property
    def variant(self) -> str:
        """The variant that runs now: one of VARIANTS, or what `load_on` names."""
        return self._backend.variant

    def call(
        self, kernel: Kernel, *tensors: Tensor | None, first: int = 0, scalars: ctypes.Structure | None = None
    ) -> None:
        """Runs a kernel.

        Args:
            kernel: its row in `table`.
            *tensors: as the row has them.
            first: the position of their first element, for kernels that work on blocks of positions or count them.
            scalars: of the row's type.

        Raises:
            ValueError: for a tensor of a wrong dtype, shape or device.
            ClosedError: after `close()`.
        """
        task = self.bind(kernel, *tensors, first=first)(scalars)
        if self.threads > 1 and self._shares(task) == 1:  # no call of the pool for so little
            self._require_open()
            _run_here(task)
        else:
            self.run((task,))

    def bind(
        self, kernel: Kernel, *tensors: Tensor | None, first: int = 0
    ) -> Callable[[ctypes.Structure | None], Task]:
        """Checks a kernel's tensors once, so that it can run any number of times while they stay where they are.

        Args:
            kernel: as for `call`.
            *tensors: as for `call`.
            first: as for `call`.

        Returns:
            A function that takes the scalars and gives the task for `run`. It raises ValueError for scalars of another
            type.

        Raises:
            ValueError: for a tensor of a wrong dtype, shape or device.
        """
        n = kernel.check(tensors, first, self._device)
        low = first if kernel.counts else first % kernel.cut  # else what is before it is the same everywhere
        bound = self._backend.bind(kernel, tensors, low)
        written = tuple(x for number in kernel.written if (x := tensors[number]) is not None)

        def task(scalars: ctypes.Structure | None = None) -> Task:
            if type(scalars) is not kernel.scalars:
                raise ValueError(f"{kernel.name} takes {kernel.scalars.__name__}, not {type(scalars).__name__}")
            return Task(bound(scalars), low, low + n, kernel.cut, written)

        return task

    def run(self, tasks: Iterable[Task]) -> None:
        """Runs all of `tasks`, which share no memory, side by side on all threads.

        The caller's thread draws one task after the other from `tasks`, while others run. Those of the C library run on
        threads of the library, others, which need Python, on threads of Python.
        """
        self._require_open()
        if self.threads == 1:
            for task in tasks:
                _run_here(task)
        elif isinstance(self._backend, Library):
            self._library_threads(self._backend.library).run(self._piecewise(tasks))
        else:
            self._python_threads().run(self._ranges(tasks))

    def _piecewise(self, tasks: Iterable[Task]) -> Iterator[Piecewise]:
        for task in tasks:
            if not isinstance(task.work, LibraryWork):
                self._python_threads().run(self._ranges((task,)))
            elif self._shares(task) > 1:
                share = max(_MIN_SHARE, -(-(task.high - task.low) // (_PIECES * self.threads)))
                yield task.work, task.low, task.high, round_up(share, task.cut)
                _written(task.written)
            else:
                _run_here(task)

    def _ranges(self, tasks: Iterable[Task]) -> Iterator[Range]:
        for task in tasks:
            shares = self._shares(task)
            if shares > 1:
                edges = _edges(task, shares)
                yield from zip(repeat(task.work), edges, edges[1:])
                _written(task.written)
            else:
                _run_here(task)

    def _shares(self, task: Task) -> int:
        return max(1, min(self.threads, (task.high - task.low) // _MIN_SHARE))

    def close(self) -> None:
        """Ends the threads when the calls in progress have ended. May be called twice."""
        self._closed = True
        for pool in (self._pool, self._python_pool):
            if pool is not None:
                pool.stop()
        self._pool = self._python_pool = None

    def start(self) -> None:
        """Starts the backend's threads now, instead of in the first call that needs them.

        Raises:
            BudgetError: if the system refuses them.
        """
        if self.threads > 1:
            if isinstance(self._backend, Library):
                self._library_threads(self._backend.library)
            else:
                self._python_threads()

    # A fork takes no threads along. Two callers may both make a pool: one goes unused.

    def _library_threads(self, library: ctypes.CDLL) -> LibraryPool:
        pool = self._pool
        if pool is None or pool.pid != os.getpid():
            pool = self._pool = LibraryPool(library, self.threads - 1)
        return pool

    def _python_threads(self) -> Pool:
        pool = self._python_pool
        if pool is None or pool.pid != os.getpid():
            pool = self._python_pool = Pool(self.threads - 1)
        return pool

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("these kernels were closed: load() gives others")


def _edges(task: Task, shares: int) -> list[int]:
    """The positions at which a task begins, is cut into about equal shares, and ends."""
    edges = [task.low]
    for i in range(1, shares):
        edge = round((task.low + (task.high - task.low) * i / shares) / task.cut) * task.cut
        if edges[-1] < edge < task.high:
            edges.append(edge)
    edges.append(task.high)
    return edges


def _run_here(task: Task) -> None:
    task.work(task.low, task.high)
    _written(task.written)


def _written(tensors: tuple[Tensor, ...]) -> None:
    """Increases the tensors' version counters, since autograd does not see what the kernels write."""
    torch.autograd.graph.increment_version(tensors)


def fallback_reason() -> str | None:
    """Why there is no C library and kernels run through torch; None if there is one."""
    return open_library()[1]


def available_variants() -> tuple[str, ...]:
    """The variants that this machine can run, best first; "torch" is always the last."""
    library, _ = open_library()
    return (*(c_variants(library) if library is not None else ()), "torch")


@functools.cache
def _log_choice(variant: str, reason: str | None) -> None:
    """Logs the variant, once a process for each variant and reason."""
    if variant == "torch" and reason is not None:
        _logger.warning("the CPU kernels run through torch, slower and with the same bits: %s", reason)
    else:
        _logger.info("the CPU kernels run as %s", variant)


def load(threads: int | None = None, variant: str | None = None) -> Kernels:
    """Loads the kernels, by default the best variant on all usable CPUs.

    Args:
        threads: how many share a call; None: `usable_cpus()`.
        variant: one of `available_variants()`; None: the environment's OFFLOAD_KERNELS, else the best.

    Raises:
        ConfigError: for a thread count below 1 and for a variant that is unknown or cannot run here.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"threads={threads!r}: give a number of threads from 1 on, or None for all CPUs")
    available = available_variants()
    source = "variant"
    if variant is None and (forced := os.environ.get(_ENVIRONMENT)):
        variant, source = forced, _ENVIRONMENT
    chosen = available[0] if variant is None else variant
    if chosen not in available:
        why = "cannot run on this machine" if chosen in VARIANTS else "is not a variant of the kernels"
        raise ConfigError(f"{source}={chosen!r} {why}: give one of {', '.join(available)}")
    library, reason = open_library()
    _log_choice(chosen, reason)
    backend: Backend = TorchKernels() if chosen == "torch" or library is None else Library(library, chosen)
    return Kernels(usable_cpus() if threads is None else threads, backend)


def load_on(scratch: Tensor, stream: Callable[[], int] | None = None, room: int = SUM_BLOCK) -> Kernels:
    """Loads kernels for tensors on the device of `scratch`, whose current stream runs them in order.

    Their variant is "device" where they are compiled for it, which is tried once a process and device. It is "device,
    by torch" where they are torch's operations, also after the driver refused a launch. They cannot split masters.

    Args:
        scratch: uint8, of `torch_kernels.scratch_bytes(n)` for tensors of about n elements; larger ones take several
            rounds.
        stream: gives the driver's handle of the device's current stream; None: nothing is compiled.
        room: of `torch_kernels.dithered_room`: how many elements with moments of one or two bytes are stepped at a
            time.
    """
    backend = device_kernels(scratch, stream, room)
    return Kernels(1, backend, scratch.device)


@functools.cache
def cpu_model() -> tuple[str, tuple[str, ...]]:
    """This CPU's name and flags for people, from py-cpuinfo. The first call takes about a second."""
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return str(info.get("brand_raw", "unknown")), tuple(info.get("flags", ()))
