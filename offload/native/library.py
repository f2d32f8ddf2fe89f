"""The C library: where it is, which variants of it run here, and its symbols."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.sizes import SUM_BLOCK

Work = Callable[[int, int], None]
"""A kernel bound to its tensors, to be run on a range [low, high) of their elements."""


class AdamStruct(ctypes.Structure):
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
    def packed(self) -> AdamStruct:
        """The same as the C struct, made once."""
        return AdamStruct(
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


_LIBRARY_NAME = "liboffload_kernels.so"
ABI = 3
"""kernels.h: OFFLOAD_ABI."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels.h
NO_OUTPUT = 3


class Library:
    """One variant's symbols. Each method binds a kernel to tensors that were checked before: what it returns is called
    with the bounds of each thread's range."""

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
    ) -> Callable[[AdamScalars], Work]:
        function = self._adam
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = TYPES[grad.dtype], grad.element_size()
        o, out_type = (0, NO_OUTPUT) if out is None else (out.data_ptr(), TYPES[out.dtype])

        def bound(s: AdamScalars) -> Work:
            address = ctypes.addressof(s.packed)

            def work(low: int, high: int) -> None:
                at = 4 * low
                to = o + 2 * low if o else None
                function(p + at, m + at, v + at, g + grad_bytes * low, grad_type, to, out_type, high - low, address)

            return work

        return bound

    def adam_split(
        self,
        param: Tensor,
        low: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor,
        s: AdamScalars,
    ) -> Work:
        function, struct = self._adam_split, s.packed
        address = ctypes.addressof(struct)
        p, w, m, v = param.data_ptr(), low.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
        g, grad_type, grad_bytes, o = grad.data_ptr(), TYPES[grad.dtype], grad.element_size(), out.data_ptr()

        def work(a: int, b: int) -> None:
            h, f = 2 * a, 4 * a
            function(p + h, w + h, m + f, v + f, g + grad_bytes * a, grad_type, o + h, b - a, address)

        return work

    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> Work:
        function = self._split
        p, w, v, o = master.data_ptr(), low.data_ptr(), exp_avg_sq.data_ptr(), param.data_ptr()

        def work(a: int, b: int) -> None:
            function(p + 4 * a, w + 2 * a, v + 4 * a, o + 2 * a, b - a)

        return work

    def join(self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor) -> Work:
        function = self._join
        p, w, v = param.data_ptr(), low.data_ptr(), exp_avg_sq.data_ptr()
        to, v_to = master_out.data_ptr(), exp_avg_sq_out.data_ptr()

        def work(a: int, b: int) -> None:
            function(p + 2 * a, w + 2 * a, v + 4 * a, to + 4 * a, v_to + 4 * a, b - a)

        return work

    def limit(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> Work:
        """For the benchmark: adam's traffic without its arithmetic (kernels/limit.c)."""
        p, m, v, g = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()
        grad_type, grad_bytes = TYPES[grad.dtype], grad.element_size()
        o = 0 if out is None else out.data_ptr()

        def work(low: int, high: int) -> None:
            at = 4 * low
            self._limit(p + at, m + at, v + at, g + grad_bytes * low, grad_type, o + 2 * low, high - low)

        return work

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Work:
        function, p, o = self._sum_squares, x.data_ptr(), out.data_ptr()
        x_type, x_bytes = TYPES[x.dtype], x.element_size()
        block = first // SUM_BLOCK

        def work(low: int, high: int) -> None:
            to = o + 8 * ((first + low) // SUM_BLOCK - block)
            function(p + x_bytes * low, x_type, first + low, high - low, to)

        return work

    def accumulate(self, acc: Tensor, x: Tensor) -> Work:
        function, a, p = self._accumulate, acc.data_ptr(), x.data_ptr()
        x_type, x_bytes = TYPES[x.dtype], x.element_size()

        def work(low: int, high: int) -> None:
            function(a + 4 * low, p + x_bytes * low, x_type, high - low)

        return work

    def cast(self, src: Tensor, dst: Tensor) -> Work:
        function, s, d = self._cast, src.data_ptr(), dst.data_ptr()
        src_type, src_bytes = TYPES[src.dtype], src.element_size()
        dst_type, dst_bytes = TYPES[dst.dtype], dst.element_size()

        def work(low: int, high: int) -> None:
            function(s + src_bytes * low, src_type, d + dst_bytes * low, dst_type, high - low)

        return work

    def scale(self, x: Tensor, factor: float) -> Work:
        function, p = self._scale, x.data_ptr()

        def work(low: int, high: int) -> None:
            function(p + 4 * low, high - low, factor)

        return work


def library_path() -> Path | None:
    """Where the C library lies: where OFFLOAD_KERNEL_LIBRARY says, for those who run from a folder and build it
    elsewhere; in the package (a wheel); or in the environment's `offload` folder (an editable install). None if in
    none of them."""
    if given := os.environ.get("OFFLOAD_KERNEL_LIBRARY"):
        return Path(given)
    folders = (Path(__file__).parents[1], Path(sysconfig.get_path("platlib")) / "offload")
    paths = (folder / _LIBRARY_NAME for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@functools.cache
def open_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The C library, or why there is none. Raises: ConfigError if it is that of another version of offload."""
    path = library_path()
    if path is None:
        return None, f"{_LIBRARY_NAME} was not built: there was no C compiler when offload was installed"
    try:
        library = ctypes.CDLL(str(path))
        found = library.offload_abi() if hasattr(library, "offload_abi") else 0
        if found != ABI:
            raise ConfigError(
                f"{path} was built from another version of offload (its interface has number {found}, this version "
                f"needs {ABI}): install offload again"
            )
        library.offload_prefetch.argtypes = (ctypes.c_int64,)
        library.offload_prefetch.restype = ctypes.c_int64
        library.offload_prefetch(-1)
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
