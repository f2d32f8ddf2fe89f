"""The C library: where it is, which variants of it run here, and its symbols."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.config import SUM_BLOCK
from offload.native.contract import AdamScalars, Part

_LIBRARY_NAME = "liboffload_kernels.so"

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels.h
_NONE = 3


_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


LARGE_BYTES = 4 << 20
"""Of a block that goes back to the system when it is freed. Smaller ones, many activations and what a backward makes of
them, are used again: memory from the system is cleared page by page."""
_HELD_BYTES = 64 << 20
"""What may lie free at the end of the heap: as much as glibc chooses itself where nothing is set."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def return_large_blocks() -> None:
    """Makes malloc of this process map blocks of LARGE_BYTES and more one by one, so that freed ones are given back.

    glibc does so only until the first of them is freed: later ones it cuts from its heap, where what small blocks that
    live longer leave between them is too short for the next large one. Does nothing where there is no such option, or
    where the environment has set it.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
            # Setting the one fixes the other too, at 128 KiB.
            mallopt(_M_TRIM_THRESHOLD, _HELD_BYTES)


def advise_huge_pages(memory: Tensor) -> None:
    """Asks the kernel for huge pages behind a CPU tensor that was just allocated: its first touch is then several times
    faster. Where there are none, nothing changes."""
    size = memory.numel() * memory.element_size()
    if size < 2 * _HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (memory.data_ptr() + size) // _HUGE_PAGE * _HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def populate(memory: Tensor) -> bool:
    """Puts pages behind a page-aligned CPU tensor, without writing to it: what is there stays, what others write
    meanwhile, too. Returns: whether the kernel could (Linux 5.14)."""
    if not sys.platform.startswith("linux"):
        return False
    size = ctypes.c_size_t(memory.numel() * memory.element_size())
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), size, _MADV_POPULATE_WRITE) == 0)


class Library:
    """One variant's symbols. A part is a call with the addresses of its range."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        p, i, n = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

        def symbol(kernel: str, *arguments: Any) -> Callable[..., None]:
            function = getattr(library, f"offload_{kernel}_{variant}")
            function.argtypes = arguments
            function.restype = None
            return function  # type: ignore[no-any-return]

        self._adam = symbol("adam", p, p, p, p, i, p, i, n, p)
        self._adam_split = symbol("adam_split", p, p, p, p, p, i, p, n, p)
        self._split = symbol("split", p, p, p, p, n)
        self._join = symbol("join", p, p, p, p, p, n)
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
    ) -> Part:
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

    def adam_split(
        self,
        param: Tensor,
        low: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor,
        s: AdamScalars,
    ) -> Part:
        function, struct = self._adam_split, s.packed
        address = ctypes.addressof(struct)
        p, w, m, v = param.data_ptr(), low.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
        g, grad_type, grad_bytes, o = grad.data_ptr(), _TYPES[grad.dtype], grad.element_size(), out.data_ptr()

        def part(a: int, b: int) -> None:
            h, f = 2 * a, 4 * a
            function(p + h, w + h, m + f, v + f, g + grad_bytes * a, grad_type, o + h, b - a, address)

        return part

    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> Part:
        function = self._split
        p, w, v, o = master.data_ptr(), low.data_ptr(), exp_avg_sq.data_ptr(), param.data_ptr()

        def part(a: int, b: int) -> None:
            function(p + 4 * a, w + 2 * a, v + 4 * a, o + 2 * a, b - a)

        return part

    def join(self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor) -> Part:
        function = self._join
        p, w, v = param.data_ptr(), low.data_ptr(), exp_avg_sq.data_ptr()
        to, v_to = master_out.data_ptr(), exp_avg_sq_out.data_ptr()

        def part(a: int, b: int) -> None:
            function(p + 2 * a, w + 2 * a, v + 4 * a, to + 4 * a, v_to + 4 * a, b - a)

        return part

    def limit(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> Part:
        """For the benchmark: adam's traffic without its arithmetic (kernels/limit.c)."""
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = _TYPES[grad.dtype], grad.element_size()
        o = 0 if out is None else out.data_ptr()

        def part(low: int, high: int) -> None:
            at = 4 * low
            self._limit(p + at, m + at, v + at, g + grad_bytes * low, grad_type, o + 2 * low, high - low)

        return part

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Part:
        function, p, o = self._sum_squares, x.data_ptr(), out.data_ptr()
        x_type, x_bytes = _TYPES[x.dtype], x.element_size()
        block = first // SUM_BLOCK

        def part(low: int, high: int) -> None:
            to = o + 8 * ((first + low) // SUM_BLOCK - block)
            function(p + x_bytes * low, x_type, first + low, high - low, to)

        return part

    def accumulate(self, acc: Tensor, x: Tensor) -> Part:
        function, a, p = self._accumulate, acc.data_ptr(), x.data_ptr()
        x_type, x_bytes = _TYPES[x.dtype], x.element_size()

        def part(low: int, high: int) -> None:
            function(a + 4 * low, p + x_bytes * low, x_type, high - low)

        return part

    def cast(self, src: Tensor, dst: Tensor) -> Part:
        function, s, d = self._cast, src.data_ptr(), dst.data_ptr()
        src_type, src_bytes = _TYPES[src.dtype], src.element_size()
        dst_type, dst_bytes = _TYPES[dst.dtype], dst.element_size()

        def part(low: int, high: int) -> None:
            function(s + src_bytes * low, src_type, d + dst_bytes * low, dst_type, high - low)

        return part

    def scale(self, x: Tensor, factor: float) -> Part:
        function, p = self._scale, x.data_ptr()

        def part(low: int, high: int) -> None:
            function(p + 4 * low, high - low, factor)

        return part


def library_path() -> Path | None:
    """Where the C library lies: in the package (a wheel) or in the environment's `offload` folder
    (an editable install); None if in neither."""
    folders = (Path(__file__).parents[1], Path(sysconfig.get_path("platlib")) / "offload")
    paths = (folder / _LIBRARY_NAME for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def open_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The C library, or why there is none."""
    path = library_path()
    if path is None:
        return None, f"{_LIBRARY_NAME} was not built: there was no C compiler when offload was installed"
    try:
        library = ctypes.CDLL(str(path))
        library.offload_variant.argtypes = (ctypes.c_int,)
        library.offload_variant.restype = ctypes.c_char_p
        for variant in c_variants(library):
            Library(library, variant)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be used, install offload again: {error}"
    return library, None


def c_variants(library: ctypes.CDLL) -> tuple[str, ...]:
    found: list[str] = []
    while (name := library.offload_variant(len(found))) is not None:
        found.append(name.decode())
    return tuple(found)
