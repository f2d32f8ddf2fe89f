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
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

SUM_BLOCK = 65536
DITHER_BLOCK = 64


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


# --- Small states: moments of 8 or 16 bits. A step decodes them, does what `adam` does, and encodes the new ones once.


def dither(numel: int, step: int, first: int = 0) -> U32:
    """Random bits of the elements of a parameter, by which its moments are rounded up or down.

    Each block of 64 elements, counted from the parameter's start, has a key: a hash of the block's number and the step
    (the finaliser of splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators"). An element's
    bits are the key and a multiple of the golden ratio, which spreads the 64 lanes evenly.

    Args:
        numel: how many elements.
        step: the parameter's step, from 1.
        first: the position of the first one in its parameter, a multiple of 64.

    Returns:
        32 bits an element, (numel,).
    """
    position = np.arange(first, first + numel, dtype=np.uint64)
    with np.errstate(over="ignore"):  # all of it is modulo 2^64, and at last modulo 2^32
        z = (position // np.uint64(DITHER_BLOCK) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(step) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
        lane = (position % np.uint64(DITHER_BLOCK)).astype(np.uint32)
        return key + lane * np.uint32(0x9E3779B9)


def to_dithered_bf16(x: F32, random: U32) -> U16:
    """Rounds fp32 (n,) to the bits of bf16 (n,), up with the chance of what is cut off. NaN gives 0x7fc0.

    Args:
        x: the numbers.
        random: what `dither` returned for them.
    """
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    upper: U16 = ((bits + (random >> np.uint32(16))) >> np.uint32(16)).astype(np.uint16)
    return upper


def to_codes(x: F32, random: U32, *, signed: bool) -> tuple[U8, U8]:
    """Rounds fp32 (n,) to codes of one byte, up with the chance of what is cut off, each block of 64 with a scale.

    A code has 3 bits of fraction, as an fp32 without its lower 20 bits: `(code << 20) + (scale << 23)` are its bits. A
    signed one has 4 bits of exponent, and 0 is exact: what is below 2^-15 of the block's largest magnitude is cut to 0.
    An unsigned one has 5 bits of exponent and none for 0: what is below 2^-31 of the block's largest becomes that least
    value, unless all of the block is 0. The scale is taken after rounding, so that the largest code cannot overflow. A
    NaN becomes 0x7FC00000.

    Args:
        x: the numbers. Those of an unsigned code are at least 0.
        random: what `dither` returned for them.
        signed: True: E4M3 with a sign, for exp_avg; False: E5M3 without one, for exp_avg_sq.

    Returns:
        The codes, (n,), and the scales, (ceil(n / 64),).
    """
    octaves = 16 if signed else 32
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    rounded = ((bits & 0x7FFFFFFF) + (random >> np.uint32(12))) >> np.uint32(20)
    codes, scales = [], []
    for start in range(0, len(x), DITHER_BLOCK):
        block = rounded[start : start + DITHER_BLOCK].astype(np.int64)
        scale = max((int(block.max()) >> 3) - (octaves - 1), 0)
        codes.append(np.maximum(block - 8 * scale, 0))
        scales.append(scale)
    found = np.concatenate(codes) if codes else np.zeros(0, dtype=np.int64)
    if signed:
        found |= (bits >> np.uint32(31)).astype(np.int64) << 7
    return found.astype(np.uint8), np.array(scales, dtype=np.uint8)


def from_codes(codes: U8, scales: U8, *, signed: bool) -> F32:
    """Widens what `to_codes` returned to fp32 (n,), exactly.

    `to_codes` gives the same codes for it again, whatever `random` is.
    """
    scale = np.repeat(scales.astype(np.uint32), DITHER_BLOCK)[: len(codes)] << np.uint32(23)
    wide = codes.astype(np.uint32)
    if not signed:
        return ((wide << np.uint32(20)) + scale).view(np.float32)
    magnitude = wide & np.uint32(0x7F)
    bits: U32 = np.where(magnitude == 0, np.uint32(0), (magnitude << np.uint32(20)) + scale)
    return (bits | (wide >> np.uint32(7)) << np.uint32(31)).view(np.float32)


def settle(master: F32) -> F32:
    """The masters, fp32 (n,), of which a bf16 copy and 16 bits tell all; see `split_settled`.

    A tie whose upper half is even, which is rounded down to it, becomes the next smaller magnitude, of the same copy.
    That is one number of 131072, by 2^-24 of it. A NaN becomes 0x7FC00000.
    """
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32))
    settled: U32 = (bits - ((bits & np.uint32(0x1FFFF)) == 0x8000)).astype(np.uint32)
    return settled.view(np.float32)


def split_settled(master: F32) -> tuple[U16, U16]:
    """Splits what `settle` returned into the bits of its bf16 copy, to nearest even, and its lower half, (n,) each."""
    return to_bf16(master), (master.view(np.uint32) & 0xFFFF).astype(np.uint16)


def join_settled(param: U16, low: U16) -> F32:
    """Undoes `split_settled`: the lower half is a signed number beside the copy."""
    with np.errstate(over="ignore"):
        upper = param.astype(np.uint32) << np.uint32(16)
        return (upper + low.view(np.int16).astype(np.int32).view(np.uint32)).view(np.float32)
