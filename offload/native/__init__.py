"""The CPU kernels: choice of instruction set, threads, and the fallback without a C library.

The only room that knows ctypes. `load()` gives a `Kernels`: one variant of `kernels/*.c` (or the same
numeric contract through separate torch operations, variant "torch") and a pool of Python threads
that share each call's range; ctypes drops the GIL, so that they truly run side by side. No choice of
variant, thread count or split changes a bit of any result: `optim/reference.py` says what it is.

All tensors are one-dimensional, contiguous and on the CPU (those of `load_on` on its device), and no
two of a call overlap but where a method says that they may be the very same memory. Nothing is
allocated that grows with them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from offload.errors import ClosedError, ConfigError
from offload.native.compiled_kernels import CompiledKernels, device_kernels
from offload.native.library import (
    AdamScalars,
    Library,
    Work,
    c_variants,
    library_path,
    open_library,
    sum_blocks,
)
from offload.native.threads import Pool, Range, usable_cpus
from offload.native.torch_kernels import DeviceKernels, TorchKernels
from offload.sizes import SUM_BLOCK

__all__ = [
    "SUM_BLOCK",
    "VARIANTS",
    "AdamScalars",
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
_LINE = 64  # elements: whole cache lines of every dtype, so that no two threads write one line
_MIN_SHARE = 65536  # elements: fewer are done before another thread has woken up

_logger = logging.getLogger("offload")

Backend = Library | TorchKernels | DeviceKernels


class Task(NamedTuple):
    """A kernel with all that it needs, for `Kernels.run`. written: the tensors that it writes to."""

    work: Work
    numel: int
    written: tuple[Tensor, ...]


class Kernels:
    """One variant of the kernels, and its threads. Calls may come from several threads at once.

    Every method raises ValueError for a tensor of a wrong dtype, shape or device, and ClosedError
    after `close()`. Zero elements are fine. Tensors written to get their version counter bumped.

    Attributes: variant (one of VARIANTS, or as `load_on` says), threads (how many share a call, the caller among them).
    """

    def __init__(self, variant: str, threads: int, backend: Backend, device: torch.device | None = None) -> None:
        self.variant = variant
        self.threads = threads
        self._device = device or torch.device("cpu")
        self._backend = backend
        self._pool: Pool | None = None
        self._closed = False

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
        scalars: AdamScalars,
    ) -> None:
        """One Adam step on n elements, in place, in one pass.

        Args: master, exp_avg, exp_avg_sq: fp32, read and written. grad: fp32, bf16 or fp16, read.
            out: bf16, fp16 or fp32, gets the new master, rounded to nearest even; or None. May be the very
            same memory as a 16-bit grad.
        """
        self.run([self.bind_adam(master, exp_avg, exp_avg_sq, grad, out)(scalars)])

    def bind_adam(
        self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None
    ) -> Callable[[AdamScalars], Task]:
        """`adam` of these tensors, checked now, for `run`, any number of times while they are in their memory."""
        n = master.numel()
        for name, x in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            self._check(name, x, n, _FP32)
        self._check("grad", grad, n, _FLOATS)
        if out is not None:
            self._check("out", out, n, _FLOATS)
        written = (master, exp_avg, exp_avg_sq) if out is None else (master, exp_avg, exp_avg_sq, out)
        cast = None
        if out is not None and out.dtype is torch.float32:  # not the kernel's business: a copy of the master
            cast, out = self._backend.cast(master, out), None
        kernel = self._backend.adam(master, exp_avg, exp_avg_sq, grad, out)

        def bound(scalars: AdamScalars) -> Task:
            work = kernel(scalars)
            return Task(work if cast is None else _one_after_another(work, cast), n, written)

        return bound

    def run(self, tasks: Iterable[Task]) -> None:
        """Runs all of `tasks`, which share no memory, one beside the other on all threads. They are drawn by the caller
        while others run."""
        self._require_open()
        if self.threads == 1:
            for task in tasks:
                task.work(0, task.numel)
                _written(task.written)
        else:
            self._threads().run(self._ranges(tasks))

    def _ranges(self, tasks: Iterable[Task]) -> Iterator[Range]:
        for task in tasks:
            if task.numel < _MIN_SHARE:
                task.work(0, task.numel)
            else:
                edges = _edges(task.numel, self._shares(task.numel))
                yield from zip(repeat(task.work), edges, edges[1:])
            _written(task.written)

    def adam_split(
        self,
        param: Tensor,
        low: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor,
        scalars: AdamScalars,
    ) -> None:
        """`join`, `adam` and `split` of n elements in one pass, with the bits of the three.

        Args: param: bf16, read. low, exp_avg, exp_avg_sq: as `split` gives them, read and written.
            grad: fp32 or bf16, read. out: bf16, gets the new param; may be the very same memory as
            param or as a bf16 grad.
        """
        n = param.numel()
        self._check_split(n, param, low, exp_avg_sq)
        self._check("exp_avg", exp_avg, n, _FP32)
        self._check("grad", grad, n, (*_FP32, *_BF16))
        self._check("out", out, n, _BF16)
        self._run(self._backend.adam_split(param, low, exp_avg, exp_avg_sq, grad, out, scalars), n)
        _written((low, exp_avg, exp_avg_sq, out))

    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> None:
        """Splits an fp32 master into its bf16 rounding and its lower half, n elements; the bit that the
        two cannot tell goes into exp_avg_sq's sign (`reference.split`).

        Args: master: fp32, read. low: int16 (bits, no number), written. exp_avg_sq: fp32 without a
            sign, which it gets. param: bf16, written.
        """
        n = master.numel()
        self._check("master", master, n, _FP32)
        self._check_split(n, param, low, exp_avg_sq)
        self._run(self._backend.split(master, low, exp_avg_sq, param), n)
        _written((low, exp_avg_sq, param))

    def join(self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor) -> None:
        """The master that `split` took apart, every bit of it (NaN as NaN), and exp_avg_sq without sign.

        Args: param, low, exp_avg_sq: bf16, int16 and fp32, n elements, read. master_out,
            exp_avg_sq_out: fp32, written; exp_avg_sq_out may be the very same memory as exp_avg_sq.
        """
        n = param.numel()
        self._check_split(n, param, low, exp_avg_sq)
        self._check("master_out", master_out, n, _FP32)
        self._check("exp_avg_sq_out", exp_avg_sq_out, n, _FP32)
        self._run(self._backend.join(param, low, exp_avg_sq, master_out, exp_avg_sq_out), n)
        _written((master_out, exp_avg_sq_out))

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> None:
        """The fp64 sum of squares of each block of SUM_BLOCK positions that x touches.

        A block's sum is finite exactly when all of its elements are.

        Args: x: n elements of fp32, bf16 or fp16 at the positions first .. first+n of a flat array.
            out: fp64, sum_blocks(first, n) elements, written.
        """
        n = x.numel()
        self._check("x", x, n, _FLOATS)
        self._check("out", out, sum_blocks(first, n), _FP64)
        if first < 0:
            raise ValueError(f"first {first}: positions are counted from 0")
        self._run(self._backend.sum_squares(x, first, out), n, SUM_BLOCK, -first % SUM_BLOCK)
        _written((out,))

    def accumulate(self, acc: Tensor, x: Tensor) -> None:
        """acc += x. Args: acc: n elements of fp32, read and written. x: fp32, bf16 or fp16, n."""
        n = acc.numel()
        self._check("acc", acc, n, _FP32)
        self._check("x", x, n, _FLOATS)
        self._run(self._backend.accumulate(acc, x), n)
        _written((acc,))

    def cast(self, src: Tensor, dst: Tensor) -> None:
        """dst = src rounded to nearest even, as torch casts. fp32 to fp32, bf16 or fp16 and back, or
        like to like; n elements each."""
        n = src.numel()
        self._check("src", src, n, _FLOATS)
        self._check("dst", dst, n, _FLOATS)
        if src.dtype != dst.dtype and torch.float32 not in (src.dtype, dst.dtype):
            raise ValueError(f"cast from {src.dtype} to {dst.dtype}: one of them has to be float32")
        self._run(self._backend.cast(src, dst), n)
        _written((dst,))

    def scale(self, x: Tensor, factor: float) -> None:
        """x *= factor, rounded once to fp32. Args: x: n elements of fp32, read and written."""
        n = x.numel()
        self._check("x", x, n, _FP32)
        self._run(self._backend.scale(x, factor), n)
        _written((x,))

    def limit(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> None:
        """Moves adam's bytes without its arithmetic, for the benchmark; the states are shuffled.

        Args: as adam's; grad fp32 with out None, or 16-bit with a 16-bit out that starts a 64-byte line.
        Raises: ValueError also for the variant "torch", which has no such kernel.
        """
        if not isinstance(self._backend, Library):
            raise ValueError("the limit is one of the C kernels: there is none in the variant torch")
        n = master.numel()
        for name, x in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            self._check(name, x, n, _FP32)
        self._check("grad", grad, n, _FP32 if out is None else _HALVES)
        if out is not None:
            self._check("out", out, n, _HALVES)
            if out.data_ptr() % _LINE:
                raise ValueError("out has to start at a multiple of 64 bytes")
        self._run(self._backend.limit(master, exp_avg, exp_avg_sq, grad, out), n)

    def close(self) -> None:
        """Ends the threads once the calls in progress are done. May be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def _check(self, name: str, x: Tensor, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
        if x.dtype not in dtypes:
            raise ValueError(f"{name} is {x.dtype}, not {' or '.join(map(str, dtypes))}")
        if x.device != self._device or x.dim() != 1 or x.numel() != n or not x.is_contiguous():
            where = "CPU" if self._device.type == "cpu" else str(self._device)
            raise ValueError(f"{name} has to be a contiguous 1-D {where} tensor of {n} elements, not {_describe(x)}")

    def _check_split(self, n: int, param: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
        self._check("param", param, n, _BF16)
        self._check("low", low, n, _INT16)
        self._check("exp_avg_sq", exp_avg_sq, n, _FP32)

    def _run(self, work: Work, n: int, cut: int = _LINE, offset: int = 0) -> None:
        """Runs `work` on 0 .. n, split where an index is `offset` past a multiple of `cut`."""
        self._require_open()
        shares = self._shares(n)
        if shares > 1:
            edges = _edges(n, shares, cut, offset)
            self._threads().run(zip(repeat(work), edges, edges[1:]))
        elif n:
            work(0, n)

    def _shares(self, n: int) -> int:
        return max(1, min(self.threads, n // _MIN_SHARE))

    def start(self) -> None:
        """Starts the threads now, and not in the first call that needs them. Raises: BudgetError if the system refuses
        them."""
        if self.threads > 1:
            self._threads()

    def _threads(self) -> Pool:
        pool = self._pool
        # A fork takes no threads along. Two callers may both make a pool here: one goes unused.
        if pool is None or pool.pid != os.getpid():
            pool = self._pool = Pool(self.threads - 1)
        return pool

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("these kernels were closed: load() gives others")


_FP32 = (torch.float32,)
_FP64 = (torch.float64,)
_BF16 = (torch.bfloat16,)
_INT16 = (torch.int16,)
_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"


def _edges(n: int, shares: int, cut: int = _LINE, offset: int = 0) -> list[int]:
    """0, n, and where between them about equal shares part."""
    edges = [0]
    for i in range(1, shares):
        edge = round((n * i / shares - offset) / cut) * cut + offset
        if edges[-1] < edge < n:
            edges.append(edge)
    edges.append(n)
    return edges


def _one_after_another(first: Work, second: Work) -> Work:
    def work(low: int, high: int) -> None:
        first(low, high)
        second(low, high)

    return work


def _written(tensors: tuple[Tensor, ...]) -> None:
    """The kernels write behind torch's back; autograd has to know."""
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
    """Once a process and choice, for the cache."""
    if variant == "torch" and reason is not None:
        _logger.warning("the CPU kernels run through torch, slower and with the same bits: %s", reason)
    else:
        _logger.info("the CPU kernels run as %s", variant)


def load(threads: int | None = None, variant: str | None = None) -> Kernels:
    """The kernels, by default the best variant on all usable CPUs.

    Args:
        threads: how many share a call; None: `usable_cpus()`.
        variant: one of `available_variants()`; None: the environment's OFFLOAD_KERNELS, else the best.
    Raises: ConfigError for a thread count below 1 and for a variant that is unknown or cannot run here.
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
    return Kernels(chosen, usable_cpus() if threads is None else threads, backend)


def load_on(scratch: Tensor, stream: Callable[[], int] | None = None) -> Kernels:
    """Kernels for tensors on the device of `scratch`, which its current stream runs in their order; they split no
    masters.

    Their variant is "device" where they are compiled for it, which is tried once a process and device, and
    "device, by torch" where they are torch's operations.

    Args:
        scratch: uint8, of `torch_kernels.scratch_bytes(n)` for tensors of about n elements; larger ones take several
            rounds.
        stream: gives the driver's handle of the device's current stream; None: nothing is compiled.
    """
    backend = device_kernels(scratch, stream)
    variant = "device" if isinstance(backend, CompiledKernels) else "device, by torch"
    return Kernels(variant, 1, backend, scratch.device)


@functools.cache
def cpu_model() -> tuple[str, tuple[str, ...]]:
    """This CPU's name and flags for people, from py-cpuinfo. Takes about a second the first time."""
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return str(info.get("brand_raw", "unknown")), tuple(info.get("flags", ()))
