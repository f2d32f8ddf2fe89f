"""The CPU kernels: choice of instruction set, threads, and the fallback without a C library.

The only file that knows ctypes. `load()` gives a `Kernels`: one variant of `kernels/*.c` (or the same
numeric contract through separate torch operations, variant "torch") and a pool of Python threads
that share each call's range; ctypes drops the GIL, so that they truly run side by side. No choice of
variant, thread count or split changes a bit of any result: `optim/reference.py` says what it is.

All tensors are one-dimensional, contiguous and on the CPU, and no two of a call overlap. Nothing is
allocated that grows with them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
import os
import sysconfig
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offload.errors import ClosedError, ConfigError

SUM_BLOCK = 65536
"""Positions at which a sum of squares is cut (kernels.h: OFFLOAD_SUM_BLOCK)."""

VARIANTS = ("avx512", "avx2", "neon", "baseline", "torch")
"""Every variant there is, best first; which of them run here, `available_variants` says."""

_ENVIRONMENT = "OFFLOAD_KERNELS"
_LIBRARY_NAME = "liboffload_kernels.so"
_LINE = 64  # elements: whole cache lines of every dtype, so that no two threads write one line
_MIN_SHARE = 65536  # elements: fewer are done before another thread has woken up
_TORCH_BLOCK = 16384  # elements: the fallback's temporaries stay in the second-level cache

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels.h
_NONE = 3

_logger = logging.getLogger("offload")

_Part = Callable[[int, int], None]
"""A kernel bound to its tensors, to be run on a range [low, high) of their elements."""


class _AdamStruct(ctypes.Structure):
    """kernels.h: struct offload_adam_scalars. Assigning a float rounds it once to fp32."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("neg_step_size", ctypes.c_float),
        ("sqrt_bias_correction2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("add_decay", ctypes.c_int32),
    )


@dataclass(frozen=True)
class AdamScalars:
    """What one Adam step of one param group needs beside its tensors, as doubles; each is rounded
    once to fp32 when a kernel takes it.

    `decoupled` is AdamW: `p *= decay`; otherwise `g += weight_decay * p`, left out if that is 0.
    """

    scale: float
    weight_decay: float
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    neg_step_size: float
    sqrt_bias_correction2: float
    eps: float
    decoupled: bool

    @classmethod
    def at(
        cls,
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        scale: float = 1.0,
    ) -> AdamScalars:
        """The scalars of step `step`, counted from 1. `scale` multiplies the gradient: the inverse of
        the loss scale times the clip coefficient."""
        if step < 1:
            raise ValueError(f"step {step}: steps are counted from 1")
        beta1, beta2 = betas
        return cls(
            scale=scale,
            weight_decay=weight_decay,
            decay=1 - lr * weight_decay,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            neg_step_size=-(lr / (1 - beta1**step)),
            sqrt_bias_correction2=math.sqrt(1 - beta2**step),
            eps=eps,
            decoupled=decoupled,
        )

    @functools.cached_property
    def packed(self) -> _AdamStruct:
        """The same as the C struct, made once."""
        return _AdamStruct(
            scale=self.scale,
            weight_decay=self.weight_decay,
            # Without weight decay both kinds are p *= 1.
            decay=self.decay if self.decoupled else 1.0,
            one_minus_beta1=self.one_minus_beta1,
            beta2=self.beta2,
            one_minus_beta2=self.one_minus_beta2,
            neg_step_size=self.neg_step_size,
            sqrt_bias_correction2=self.sqrt_bias_correction2,
            eps=self.eps,
            add_decay=int(not self.decoupled and self.weight_decay != 0),
        )


def sum_blocks(first: int, numel: int) -> int:
    """How many blocks of SUM_BLOCK positions the positions first .. first+numel touch."""
    return 0 if numel == 0 else (first + numel - 1) // SUM_BLOCK - first // SUM_BLOCK + 1


class _Backend(Protocol):
    """Each method binds one kernel to tensors that were checked before."""

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
        s: AdamScalars,
    ) -> _Part: ...
    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> _Part: ...
    def accumulate(self, acc: Tensor, x: Tensor) -> _Part: ...
    def cast(self, src: Tensor, dst: Tensor) -> _Part: ...
    def scale(self, x: Tensor, factor: float) -> _Part: ...


class Kernels:
    """One variant of the kernels, and its threads. Calls may come from several threads at once.

    Every method raises ValueError for a tensor of a wrong dtype, shape or device, and ClosedError
    after `close()`. Zero elements are fine. Tensors written to get their version counter bumped.

    Attributes: variant (one of VARIANTS), threads (how many share a call, the caller among them).
    """

    def __init__(self, variant: str, threads: int, backend: _Backend) -> None:
        self.variant = variant
        self.threads = threads
        self._backend = backend
        self._pool: _Pool | None = None
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
            out: bf16 or fp16, gets the new master rounded to nearest even; or None.
        """
        n = master.numel()
        for name, x in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            _check(name, x, n, _FP32)
        _check("grad", grad, n, _FLOATS)
        if out is not None:
            _check("out", out, n, _HALVES)
        self._run(self._backend.adam(master, exp_avg, exp_avg_sq, grad, out, scalars), n)
        _written((master, exp_avg, exp_avg_sq) if out is None else (master, exp_avg, exp_avg_sq, out))

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> None:
        """The fp64 sum of squares of each block of SUM_BLOCK positions that x touches.

        A block's sum is finite exactly when all of its elements are.

        Args: x: n elements of fp32, bf16 or fp16 at the positions first .. first+n of a flat array.
            out: fp64, sum_blocks(first, n) elements, written.
        """
        n = x.numel()
        _check("x", x, n, _FLOATS)
        _check("out", out, sum_blocks(first, n), _FP64)
        if first < 0:
            raise ValueError(f"first {first}: positions are counted from 0")
        self._run(self._backend.sum_squares(x, first, out), n, SUM_BLOCK, -first % SUM_BLOCK)
        _written((out,))

    def accumulate(self, acc: Tensor, x: Tensor) -> None:
        """acc += x. Args: acc: n elements of fp32, read and written. x: fp32, bf16 or fp16, n."""
        n = acc.numel()
        _check("acc", acc, n, _FP32)
        _check("x", x, n, _FLOATS)
        self._run(self._backend.accumulate(acc, x), n)
        _written((acc,))

    def cast(self, src: Tensor, dst: Tensor) -> None:
        """dst = src rounded to nearest even, as torch casts. fp32 to fp32, bf16 or fp16 and back, or
        like to like; n elements each."""
        n = src.numel()
        _check("src", src, n, _FLOATS)
        _check("dst", dst, n, _FLOATS)
        if src.dtype != dst.dtype and torch.float32 not in (src.dtype, dst.dtype):
            raise ValueError(f"cast from {src.dtype} to {dst.dtype}: one of them has to be float32")
        self._run(self._backend.cast(src, dst), n)
        _written((dst,))

    def scale(self, x: Tensor, factor: float) -> None:
        """x *= factor, rounded once to fp32. Args: x: n elements of fp32, read and written."""
        n = x.numel()
        _check("x", x, n, _FP32)
        self._run(self._backend.scale(x, factor), n)
        _written((x,))

    def close(self) -> None:
        """Ends the threads once the calls in progress are done. May be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def _run(self, part: _Part, n: int, cut: int = _LINE, offset: int = 0) -> None:
        """Runs `part` on 0 .. n, split where an index is `offset` past a multiple of `cut`."""
        if self._closed:
            raise ClosedError("these kernels were closed: load() gives others")
        shares = min(self.threads, n // _MIN_SHARE)
        if shares <= 1:
            if n:
                part(0, n)
            return
        edges = [0]
        for i in range(1, shares):
            edge = round((n * i / shares - offset) / cut) * cut + offset
            if edges[-1] < edge < n:
                edges.append(edge)
        edges.append(n)
        pool = self._pool
        # A fork takes no threads along. Two callers may both make a pool here: one goes unused.
        if pool is None or pool.pid != os.getpid():
            pool = self._pool = _Pool(self.threads - 1)
        pool.run(part, edges)


_FP32 = (torch.float32,)
_FP64 = (torch.float64,)
_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(name: str, x: Tensor, n: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}, not {' or '.join(map(str, dtypes))}")
    if not x.is_cpu or x.dim() != 1 or x.numel() != n or not x.is_contiguous():
        raise ValueError(f"{name} has to be a contiguous 1-D CPU tensor of {n} elements, not {_describe(x)}")


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"


def _written(tensors: tuple[Tensor, ...]) -> None:
    """The kernels write behind torch's back; autograd has to know."""
    torch.autograd.graph.increment_version(tensors)


# ---- threads

_Job = tuple[_Part, int, int, "SimpleQueue[BaseException | None]"]


class _Pool:
    """Persistent threads that take parts from one queue. They end with this object, not before the
    jobs queued by then are done."""

    def __init__(self, workers: int) -> None:
        self.pid = os.getpid()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        for i in range(workers):
            thread = threading.Thread(target=_work, args=(self._jobs,), name=f"offload-kernel-{i}", daemon=True)
            thread.start()
        self.stop = weakref.finalize(self, _stop, self._jobs, workers, self.pid)

    def run(self, part: _Part, edges: list[int]) -> None:
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


def _stop(jobs: SimpleQueue[_Job | None], workers: int, pid: int) -> None:
    if pid == os.getpid():
        for _ in range(workers):
            jobs.put(None)


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


# ---- the C library


class _Library:
    """One variant's symbols. A part is a call with the addresses of its range."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        p, i, n = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

        def symbol(kernel: str, *arguments: Any) -> Callable[..., None]:
            function = getattr(library, f"offload_{kernel}_{variant}")
            function.argtypes = arguments
            function.restype = None
            return function  # type: ignore[no-any-return]

        self._adam = symbol("adam", p, p, p, p, i, p, i, n, p)
        self._sum_squares = symbol("sum_squares", p, i, n, n, p)
        self._accumulate = symbol("accumulate", p, p, i, n)
        self._cast = symbol("cast", p, i, p, i, n)
        self._scale = symbol("scale", p, n, ctypes.c_float)
        self._limit = symbol("limit", p, p, p, p, i, p, n)

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
        s: AdamScalars,
    ) -> _Part:
        function, struct = self._adam, s.packed
        address = ctypes.addressof(struct)
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = _TYPES[grad.dtype], grad.element_size()
        o, out_type = (0, _NONE) if out is None else (out.data_ptr(), _TYPES[out.dtype])

        def part(low: int, high: int) -> None:
            at = 4 * low
            to = o + 2 * low if o else None
            function(p + at, m + at, v + at, g + grad_bytes * low, grad_type, to, out_type, high - low, address)

        return part

    def limit(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> _Part:
        """For the benchmark: adam's traffic without its arithmetic (kernels/limit.c)."""
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = _TYPES[grad.dtype], grad.element_size()
        o = 0 if out is None else out.data_ptr()

        def part(low: int, high: int) -> None:
            at = 4 * low
            self._limit(p + at, m + at, v + at, g + grad_bytes * low, grad_type, o + 2 * low, high - low)

        return part

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> _Part:
        function, p, o = self._sum_squares, x.data_ptr(), out.data_ptr()
        x_type, x_bytes = _TYPES[x.dtype], x.element_size()
        block = first // SUM_BLOCK

        def part(low: int, high: int) -> None:
            to = o + 8 * ((first + low) // SUM_BLOCK - block)
            function(p + x_bytes * low, x_type, first + low, high - low, to)

        return part

    def accumulate(self, acc: Tensor, x: Tensor) -> _Part:
        function, a, p = self._accumulate, acc.data_ptr(), x.data_ptr()
        x_type, x_bytes = _TYPES[x.dtype], x.element_size()

        def part(low: int, high: int) -> None:
            function(a + 4 * low, p + x_bytes * low, x_type, high - low)

        return part

    def cast(self, src: Tensor, dst: Tensor) -> _Part:
        function, s, d = self._cast, src.data_ptr(), dst.data_ptr()
        src_type, src_bytes = _TYPES[src.dtype], src.element_size()
        dst_type, dst_bytes = _TYPES[dst.dtype], dst.element_size()

        def part(low: int, high: int) -> None:
            function(s + src_bytes * low, src_type, d + dst_bytes * low, dst_type, high - low)

        return part

    def scale(self, x: Tensor, factor: float) -> _Part:
        function, p = self._scale, x.data_ptr()

        def part(low: int, high: int) -> None:
            function(p + 4 * low, high - low, factor)

        return part


def library_path() -> Path | None:
    """Where the C library lies: beside this file (a wheel) or in the environment's `offload` folder
    (an editable install); None if in neither."""
    folders = (Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "offload")
    paths = (folder / _LIBRARY_NAME for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def _open_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The C library, or why there is none."""
    path = library_path()
    if path is None:
        return None, f"{_LIBRARY_NAME} was not built: there was no C compiler when offload was installed"
    try:
        library = ctypes.CDLL(str(path))
        library.offload_variant.argtypes = (ctypes.c_int,)
        library.offload_variant.restype = ctypes.c_char_p
        for variant in _c_variants(library):
            _Library(library, variant)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be used, install offload again: {error}"
    return library, None


def _c_variants(library: ctypes.CDLL) -> tuple[str, ...]:
    found: list[str] = []
    while (name := library.offload_variant(len(found))) is not None:
        found.append(name.decode())
    return tuple(found)


def fallback_reason() -> str | None:
    """Why there is no C library and kernels run through torch; None if there is one."""
    return _open_library()[1]


def available_variants() -> tuple[str, ...]:
    """The variants that this machine can run, best first; "torch" is always the last."""
    library, _ = _open_library()
    return (*(_c_variants(library) if library is not None else ()), "torch")


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
    library, reason = _open_library()
    _log_choice(chosen, reason)
    backend: _Backend = _Torch() if chosen == "torch" or library is None else _Library(library, chosen)
    return Kernels(chosen, usable_cpus() if threads is None else threads, backend)


@functools.cache
def cpu_model() -> tuple[str, tuple[str, ...]]:
    """This CPU's name and flags for people, from py-cpuinfo. Takes about a second the first time."""
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return str(info.get("brand_raw", "unknown")), tuple(info.get("flags", ()))


# ---- the same contract without the C library


class _Scratch(threading.local):
    """Each thread's temporaries, made at its first call."""

    def __init__(self) -> None:
        self.a, self.b = torch.empty(_TORCH_BLOCK), torch.empty(_TORCH_BLOCK)
        self.wide = torch.zeros(SUM_BLOCK, dtype=torch.float64)
        self.lanes = np.zeros(32)


class _KeepDenormals:
    """Sets this thread to keep denormals while a part runs. torch has no way to ask, arithmetic has:
    with them flushed, the smallest double is 0."""

    smallest = 5e-324

    def __enter__(self) -> None:
        self.flushed = self.smallest * 3 == 0.0
        if self.flushed:
            torch.set_flush_denormal(False)

    def __exit__(self, *_: object) -> None:
        if self.flushed:
            torch.set_flush_denormal(True)


class _Torch:
    """The kernels as separate operations on blocks that stay in the cache. addcmul_, addcdiv_,
    lerp_ and alpha= are not used: they may contract to FMA. Torch runs blocks of this size on the
    calling thread alone, so the pool splits here too."""

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
        s: AdamScalars,
    ) -> _Part:
        c = s.packed
        master, exp_avg, exp_avg_sq = master.detach(), exp_avg.detach(), exp_avg_sq.detach()
        grad, out = grad.detach(), None if out is None else out.detach()

        def block(low: int, high: int) -> None:
            p, m, v = master[low:high], exp_avg[low:high], exp_avg_sq[low:high]
            g, t = self._scratch.a[: high - low], self._scratch.b[: high - low]
            g.copy_(grad[low:high]).mul_(c.scale)
            if c.add_decay:
                g.add_(torch.mul(p, c.weight_decay, out=t))
            else:
                p.mul_(c.decay)
            m.add_(torch.sub(g, m, out=t).mul_(c.one_minus_beta1))
            v.mul_(c.beta2).add_(torch.mul(g, c.one_minus_beta2, out=t).mul_(g))
            np.sqrt(v.numpy(), out=g.numpy())  # torch's own, through a vector library, is an ulp off
            g.div_(c.sqrt_bias_correction2).add_(c.eps)
            p.add_(torch.mul(m, c.neg_step_size, out=t).div_(g))
            if out is not None:
                out[low:high].copy_(p)

        return _in_blocks(block)

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> _Part:
        x, out = x.detach(), out.detach()

        def part(low: int, high: int) -> None:
            wide, lanes = self._scratch.wide, self._scratch.lanes
            with _KeepDenormals(), np.errstate(all="ignore"):
                while low < high:
                    n = min(high - low, SUM_BLOCK - (first + low) % SUM_BLOCK)
                    padded = -(-n // 32) * 32
                    wide[n:padded] = 0
                    wide[:n].copy_(x[low : low + n])
                    wide[:n].mul_(wide[:n])
                    # Along the outer axis NumPy adds row after row: lane by lane, in order.
                    np.add.reduce(wide[:padded].numpy().reshape(-1, 32), axis=0, out=lanes)
                    for width in (16, 8, 4, 2, 1):
                        lanes[:width] += lanes[width : 2 * width]
                    out[(first + low) // SUM_BLOCK - first // SUM_BLOCK] = lanes[0]
                    low += n

        return part

    def accumulate(self, acc: Tensor, x: Tensor) -> _Part:
        acc, x = acc.detach(), x.detach()

        def block(low: int, high: int) -> None:
            wide = self._scratch.a[: high - low]
            acc[low:high].add_(wide.copy_(x[low:high]))

        return _in_blocks(block)

    def cast(self, src: Tensor, dst: Tensor) -> _Part:
        src, dst = src.detach(), dst.detach()

        def block(low: int, high: int) -> None:
            dst[low:high].copy_(src[low:high])

        return _in_blocks(block)

    def scale(self, x: Tensor, factor: float) -> _Part:
        x, once = x.detach(), ctypes.c_float(factor).value

        def block(low: int, high: int) -> None:
            x[low:high].mul_(once)

        return _in_blocks(block)


def _in_blocks(block: _Part) -> _Part:
    def part(low: int, high: int) -> None:
        with _KeepDenormals(), np.errstate(all="ignore"):
            for start in range(low, high, _TORCH_BLOCK):
                block(start, min(start + _TORCH_BLOCK, high))

    return part
