"""The kernels, a row each: which tensors and scalars it takes, and what it makes of them.

A row names a C function (`KERNEL(name)` in `kernels/`) and, but for `limit`, operations of torch with the same bits:
the method of that name in `torch_kernels`. Checks, binding, threads and version counters follow from the row.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.sizes import DITHER_BLOCK, SUM_BLOCK

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int16: 4,
    torch.float64: 5,
    torch.uint8: 6,
}
"""kernels.h: the numbers of element types."""
NO_TENSOR = 3

LINE = 64
"""Elements: whole cache lines of every dtype, so that no two threads write one line."""
MOST_ARGUMENTS = 8  # device_kernels.h: DEVICE_TENSORS

Dtypes = tuple[torch.dtype, ...]
FP32: Dtypes = (torch.float32,)
BF16: Dtypes = (torch.bfloat16,)
HALVES: Dtypes = (torch.bfloat16, torch.float16)
FLOATS: Dtypes = (torch.float32, torch.bfloat16, torch.float16)
INT16: Dtypes = (torch.int16,)
FP64: Dtypes = (torch.float64,)
UINT8: Dtypes = (torch.uint8,)


class Argument(NamedTuple):
    """A tensor that a kernel takes, one-dimensional and contiguous.

    Attributes:
        name: as errors say it.
        dtypes: those that it may have.
        is_written: whether the kernel writes to it.
        is_optional: whether None may take its place.
        block: how many positions share one of its elements.
    """

    name: str
    dtypes: Dtypes
    is_written: bool = False
    is_optional: bool = False
    block: int = 1


def touched(first: int, n: int, block: int) -> int:
    """How many blocks of `block` positions the range first .. first+n touches."""
    return 0 if n == 0 else (first + n - 1) // block - first // block + 1


def sum_blocks(first: int, numel: int) -> int:
    """How many blocks of SUM_BLOCK positions the range first .. first+numel touches."""
    return touched(first, numel, SUM_BLOCK)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel's row.

    Attributes:
        name: of the C function and of the operations of torch.
        arguments: its tensors. The first has an element for each position.
        scalars: the type of the numbers that a call takes beside the tensors.
        require: called with the tensors; raises ValueError for those that are right each, but not together.
        counts: whether its results depend on the very positions, and not only on where blocks of them begin. A call's
            first position is then a multiple of `cut`.
    """

    name: str
    arguments: tuple[Argument, ...]
    scalars: type[ctypes.Structure] | type[None] = NoneType
    require: Callable[..., None] | None = None
    counts: bool = False

    def __post_init__(self) -> None:
        assert len(self.arguments) <= MOST_ARGUMENTS

    @functools.cached_property
    def cut(self) -> int:
        """The number at whose multiples a range of positions may be cut."""
        return math.lcm(LINE, *(argument.block for argument in self.arguments))

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """The indices of the arguments that are written to."""
        return tuple(number for number, argument in enumerate(self.arguments) if argument.is_written)

    @functools.cached_property
    def pointers(self) -> struct.Struct:
        """Packs addresses of the tensors as a C array of pointers."""
        return struct.Struct(f"{len(self.arguments)}P")

    @functools.cached_property
    def types(self) -> struct.Struct:
        """Packs numbers of the tensors' element types as a C array of int32_t."""
        return struct.Struct(f"{len(self.arguments)}i")

    def addresses(self, tensors: Sequence[Tensor | None], first: int) -> tuple[list[int], list[int]]:
        """The addresses and the element types of tensors, as the C functions take them.

        Args:
            tensors: as the row has them.
            first: the position of their first element.

        Returns:
            The address at which position 0 of each tensor is, or would be (0 for None), and the numbers of the types.
        """
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        if first:
            for number, (argument, x) in enumerate(zip(self.arguments, tensors, strict=True)):
                pointers[number] -= 0 if x is None else first // argument.block * x.element_size()
        return pointers, [NO_TENSOR if x is None else TYPES[x.dtype] for x in tensors]

    def check(self, tensors: Sequence[Tensor | None], first: int, device: torch.device) -> int:
        """Checks that the kernel can take these tensors.

        Args:
            tensors: as the row has them.
            first: the position of their first element.
            device: where they have to be.

        Returns:
            How many positions they have.

        Raises:
            ValueError: for tensors that the kernel cannot take.
        """
        if len(tensors) != len(self.arguments):
            names = ", ".join(argument.name for argument in self.arguments)
            raise ValueError(f"{self.name} takes {len(self.arguments)} tensors ({names}), not {len(tensors)}")
        if first < 0 or (self.counts and first % self.cut):
            of_what = f", and begin at multiples of {self.cut}" if self.counts else ""
            raise ValueError(f"first {first}: positions are counted from 0{of_what}")
        n = 0 if tensors[0] is None else tensors[0].numel()
        for (name, dtypes, _, is_optional, block), x in zip(self.arguments, tensors, strict=True):
            if x is None:
                if is_optional:
                    continue
                raise ValueError(f"{name} is None: {self.name} needs it")
            if x.dtype not in dtypes:
                raise ValueError(f"{name} is {x.dtype}, not {' or '.join(map(str, dtypes))}")
            numel = n if block == 1 else touched(first, n, block)
            if x.device != device or x.dim() != 1 or x.numel() != numel or not x.is_contiguous():
                where = "CPU" if device.type == "cpu" else str(device)
                found = f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"
                raise ValueError(f"{name} has to be a contiguous 1-D {where} tensor of {numel} elements, not {found}")
        if self.require is not None:
            self.require(*tensors)
        return n


class AdamScalars(ctypes.Structure):
    """What one Adam step of one param group needs beside its tensors: kernels.h, struct offload_adam_scalars.

    Assigning a float rounds it once to fp32.
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
    add_decay: int
    """Whether the step is Adam's, `g += weight_decay * p`; or AdamW's, `p *= decay`, as without weight decay, too."""

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
        """The scalars of a step, computed in double.

        Args:
            step: its number, counted from 1.
            lr: as for torch's Adam.
            betas: as for torch's Adam.
            eps: as for torch's Adam.
            weight_decay: as for torch's Adam.
            decoupled: whether weight decay is AdamW's.
            scale: multiplies the gradient: the inverse of the loss scale times the clip coefficient.

        Raises:
            ValueError: if `step` is below 1.
        """
        if step < 1:
            raise ValueError(f"step {step}: steps are counted from 1")
        beta1, beta2 = betas
        return cls(
            scale=scale,
            weight_decay=weight_decay,
            decay=1 - lr * weight_decay if decoupled else 1.0,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            neg_step_size=-(lr / (1 - beta1**step)),
            sqrt_bias_correction2=math.sqrt(1 - beta2**step),
            eps=eps,
            add_decay=int(not decoupled and weight_decay != 0),
        )


class DitheredScalars(AdamScalars):
    """Those of a step that rounds moments by random bits: kernels.h, struct offload_dithered_scalars."""

    step: int
    """Of the parameters, from 1."""

    _fields_ = (("step", ctypes.c_int64),)  # type: ignore[assignment]

    @classmethod
    def at(cls, *, step: int, **hyper_parameters: Any) -> DitheredScalars:
        """See AdamScalars.at."""
        made = super().at(step=step, **hyper_parameters)
        assert isinstance(made, cls)
        made.step = step
        return made


# --- The rows. Where a text says nothing else, a kernel's tensors share no memory.


def _require_one_fp32(src: Tensor, dst: Tensor) -> None:
    if src.dtype != dst.dtype and torch.float32 not in (src.dtype, dst.dtype):
        raise ValueError(f"cast from {src.dtype} to {dst.dtype}: one of them has to be float32")


def _require_streams(_master: Tensor, _exp_avg: Tensor, _exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> None:
    if (grad.dtype is torch.float32) is not (out is None):
        raise ValueError(f"grad is {grad.dtype}: out is for 16-bit gradients, and is needed for them")
    if out is not None and out.data_ptr() % 64:
        raise ValueError("out has to start at a multiple of 64 bytes")


ADAM = Kernel(
    "adam",
    (
        Argument("master", FP32, is_written=True),
        Argument("exp_avg", FP32, is_written=True),
        Argument("exp_avg_sq", FP32, is_written=True),
        Argument("grad", FLOATS),
        Argument("out", FLOATS, is_written=True, is_optional=True),
    ),
    AdamScalars,
)
"""One Adam step, in place, in one pass. `out` gets the new master, rounded to nearest even; it may be the very same
memory as a gradient of its size."""

ADAM_SPLIT = Kernel(
    "adam_split",
    (
        Argument("param", BF16),
        Argument("low", INT16, is_written=True),
        Argument("exp_avg", FP32, is_written=True),
        Argument("exp_avg_sq", FP32, is_written=True),
        Argument("grad", (*FP32, *BF16)),
        Argument("out", BF16, is_written=True),
    ),
    AdamScalars,
)
"""`JOIN`, `ADAM` and `SPLIT` in one pass, with the bits of the three. `out` gets the new param; it may be the very same
memory as param or as a bf16 grad."""


def _require_one_form(
    master: Tensor,
    param: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    grad: Tensor,
    out: Tensor,
) -> None:
    is_split, is_coded = master.dtype is torch.int16, exp_avg.dtype is torch.uint8
    if is_split is (param is None):
        raise ValueError(f"master is {master.dtype}: param is for int16, and is needed for it")
    if is_split and (out.dtype is not torch.bfloat16 or grad.dtype is torch.float16):
        raise ValueError(f"grad is {grad.dtype} and out {out.dtype}, and master is half of a bfloat16")
    if exp_avg_sq.dtype is not exp_avg.dtype:
        raise ValueError(f"exp_avg is {exp_avg.dtype}, and exp_avg_sq {exp_avg_sq.dtype}")
    if any(is_coded is (scale is None) for scale in (exp_avg_scale, exp_avg_sq_scale)):
        raise ValueError(f"exp_avg is {exp_avg.dtype}: scales are for uint8, and are needed for it")


ADAM_DITHERED = Kernel(
    "adam_dithered",
    (
        Argument("master", (*FP32, *INT16), is_written=True),
        Argument("param", BF16, is_optional=True),
        Argument("exp_avg", (*BF16, *UINT8), is_written=True),
        Argument("exp_avg_sq", (*BF16, *UINT8), is_written=True),
        Argument("exp_avg_scale", UINT8, is_written=True, is_optional=True, block=DITHER_BLOCK),
        Argument("exp_avg_sq_scale", UINT8, is_written=True, is_optional=True, block=DITHER_BLOCK),
        Argument("grad", FLOATS),
        Argument("out", FLOATS, is_written=True),
    ),
    DitheredScalars,
    _require_one_form,
    counts=True,
)
"""One Adam step with moments of one or two bytes, in place, in one pass (`reference.to_codes`). Positions count from
the parameter's start. `out` gets the new param; it may be the very same memory as param or as a gradient of its size.
The master is whole, or what `reference.split_settled` leaves beside param; with a bf16 `out` both have the same
bits."""

SPLIT = Kernel(
    "split",
    (
        Argument("master", FP32),
        Argument("low", INT16, is_written=True),
        Argument("exp_avg_sq", FP32, is_written=True),
        Argument("param", BF16, is_written=True),
    ),
)
"""Splits masters into their bf16 rounding, param, and their lower half, low (bits, no number). The bit that the two
cannot tell goes into the sign of exp_avg_sq, which had none (`reference.split`)."""

JOIN = Kernel(
    "join",
    (
        Argument("param", BF16),
        Argument("low", INT16),
        Argument("exp_avg_sq", FP32),
        Argument("master_out", FP32, is_written=True),
        Argument("exp_avg_sq_out", FP32, is_written=True),
    ),
)
"""The masters that `SPLIT` took apart, every bit of them (NaN as NaN), and exp_avg_sq without sign. exp_avg_sq_out may
be the very same memory as exp_avg_sq."""

SUM_SQUARES = Kernel("sum_squares", (Argument("x", FLOATS), Argument("out", FP64, is_written=True, block=SUM_BLOCK)))
"""The fp64 sum of squares of each block of SUM_BLOCK positions that x touches. A block's sum is finite exactly when all
of its elements are."""

ACCUMULATE = Kernel("accumulate", (Argument("acc", FP32, is_written=True), Argument("x", FLOATS)))
"""acc += x."""

CAST = Kernel("cast", (Argument("src", FLOATS), Argument("dst", FLOATS, is_written=True)), require=_require_one_fp32)
"""dst = src rounded to nearest even, as torch casts: fp32 to fp32, bf16 or fp16 and back, or like to like."""

LIMIT = Kernel(
    "limit",
    (
        Argument("master", FP32, is_written=True),
        Argument("exp_avg", FP32, is_written=True),
        Argument("exp_avg_sq", FP32, is_written=True),
        Argument("grad", FLOATS),
        Argument("out", HALVES, is_written=True, is_optional=True),
    ),
    require=_require_streams,
)
"""For the benchmark: moves the bytes of `ADAM` without its arithmetic; the states are shuffled. fp32 gradients without
`out`, or 16-bit ones with an `out` that starts a line. The C library alone has it."""

KERNELS = (ADAM, ADAM_SPLIT, ADAM_DITHERED, SPLIT, JOIN, SUM_SQUARES, ACCUMULATE, CAST, LIMIT)
