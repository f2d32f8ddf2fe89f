"""What the kernels compute, in NumPy: the numeric contract, to be read, and for tests to compare with.

Every operation is one fp32 operation, rounded to nearest even, in the order written. Denormals are kept. `kernels/*.c`
gives the same bits on every instruction set (NaN compared as NaN). Gradients are fp32 here: a bf16 or fp16 gradient is
widened first, which is exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

SUM_BLOCK = 65536


def adam(
    master: F32,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: F32,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: float = 1.0,
) -> tuple[F32, F32, F32]:
    """One step of AdamW or Adam.

    Scalars are computed in double and rounded once to fp32. After Kingma and Ba, "Adam", algorithm 1, and Loshchilov
    and Hutter, "Decoupled weight decay regularization", algorithm 2, in the order of torch's plain loop.

    Args:
        master: the parameters, fp32 (n,).
        exp_avg: the first moment, fp32 (n,).
        exp_avg_sq: the second moment, fp32 (n,).
        grad: the gradients, fp32 (n,).
        step: the number of this step, from 1.
        lr: the learning rate.
        betas: the decay rates of the two moments, each at least 0 and below 1.
        eps: added to the denominator.
        weight_decay: the weight decay.
        decoupled: True: AdamW; False: Adam.
        scale: the factor of the gradients.

    Returns:
        The new master, exp_avg and exp_avg_sq, fp32 (n,) each.
    """
    beta1, beta2 = betas
    p, m, v = master, exp_avg, exp_avg_sq
    with np.errstate(all="ignore"):
        f = np.float32
        g = grad * f(scale)
        if decoupled:
            p = p * f(1 - lr * weight_decay)
        elif weight_decay != 0:
            g = g + f(weight_decay) * p
        m = m + f(1 - beta1) * (g - m)
        v = v * f(beta2) + (f(1 - beta2) * g) * g
        root: F32 = np.sqrt(v)
        p = p + (f(-(lr / (1 - beta1**step))) * m) / (root / f(math.sqrt(1 - beta2**step)) + f(eps))
    return p, m, v


def to_bf16(x: F32) -> U16:
    """Rounds fp32 (n,) to the bits of bf16 (n,), to nearest even. NaN gives 0x7fc0."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # the sum wraps for some NaN only
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: U16) -> F32:
    """Widens the bits of bf16 (n,) to fp32 (n,), exactly: they are its upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def split(master: F32, exp_avg_sq: F32) -> tuple[U16, U16, F32]:
    """Splits a master into its bf16 copy and the rest.

    The copy is rounded to nearest even, so it is the upper half, or one more where the lower half is above 0x8000. The
    lower half tells which, except at 0x8000 itself. There the copy is the even one of the two: 0x3F7F8000 and
    0x3F808000 have the same copy, 0x3F80, and the same lower half. What tells them apart is whether the upper half was
    odd. This bit travels in the sign bit of exp_avg_sq, which is a mean of squares and has no sign of its own. A NaN
    becomes 0x7FC00000.

    Args:
        master: fp32 (n,).
        exp_avg_sq: the second moment, fp32 (n,).

    Returns:
        The bits of the bf16 copy (n,), the lower 16 bits (n,), and exp_avg_sq, fp32 (n,), with one more bit.
    """
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32))
    odd = (bits >> 16) & 1
    marked = (exp_avg_sq.view(np.uint32) & 0x7FFFFFFF) | (odd << 31)
    return to_bf16(bits.view(np.float32)), (bits & 0xFFFF).astype(np.uint16), marked.view(np.float32)


def join(param: U16, low: U16, exp_avg_sq: F32) -> tuple[F32, F32]:
    """Undoes `split`.

    Args:
        param: the bits of the bf16 copy (n,).
        low: the lower 16 bits (n,).
        exp_avg_sq: as `split` returned it, fp32 (n,).

    Returns:
        The master and the exp_avg_sq that `split` was given, fp32 (n,) each. A NaN comes back as a NaN.
    """
    bits, odd = exp_avg_sq.view(np.uint32), exp_avg_sq.view(np.uint32) >> 31
    rounded_up = (low > 0x8000) | ((low == 0x8000) & (odd == 1))
    upper = param.astype(np.uint32) - rounded_up
    return ((upper << 16) | low).view(np.float32), (bits & 0x7FFFFFFF).view(np.float32)


def to_f16(x: F32) -> U16:
    """Rounds fp32 (n,) to the bits of fp16 (n,), to nearest even. What is too large gives Inf."""
    with np.errstate(all="ignore"):
        return x.astype(np.float16).view(np.uint16)


def from_f16(bits: U16) -> F32:
    """Widens the bits of fp16 (n,) to fp32 (n,), exactly."""
    with np.errstate(all="ignore"):
        return bits.view(np.float16).astype(np.float32)


def sum_squares(x: F32, first: int = 0) -> F64:
    """The sum of squares of each block of 65536 positions.

    A block's part of `x` is cut into groups of 1024 elements, counted from the part's start. In each group, lane j of
    32 adds the elements j, j+32, ... in turn. Then the 64 groups fold into one, and the lanes of that one into one
    value. The square of an fp32 is exact in fp64, so only the order of the sums has to be given.

    Args:
        x: fp32 (n,).
        first: the position of its first element.

    Returns:
        One fp64 sum for each block that `x` touches, in order.
    """
    sums = []
    while len(x):
        count = SUM_BLOCK - first % SUM_BLOCK
        sums.append(_sum_part(x[:count]))
        x, first = x[count:], first + count
    return np.array(sums, dtype=np.float64)


def _sum_part(x: F32) -> np.float64:
    lanes = np.zeros(2048)
    with np.errstate(all="ignore"):
        for start in range(0, len(x), 32):
            row = x[start : start + 32].astype(np.float64)
            lane = start // 1024 * 32
            lanes[lane : lane + len(row)] += row * row
        for width in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            lanes[:width] += lanes[width : 2 * width]
    return np.float64(lanes[0])


def accumulate(acc: F32, x: F32) -> F32:
    """The sum acc + x, fp32 (n,)."""
    with np.errstate(all="ignore"):
        return acc + x
