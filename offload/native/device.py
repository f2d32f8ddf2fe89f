"""The same contract on the memory of a device that is not the CPU, through separate torch operations.

Every operation rounds once, as IEEE 754 has it: no product is contracted with a sum, no division becomes a product with
an inverse, no sum changes its order. What runs here is the CPU kernels' numeric contract, and gives their bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offload.config import SUM_BLOCK
from offload.native.contract import AdamScalars, Part, sum_blocks
from offload.native.fallback import adam_steps

BLOCK = 64 * SUM_BLOCK
"""Elements at a time at most: enough that a device is busy with one operation for longer than it takes to launch it."""

_LANES = 32
_DOUBLES = 2
"""Of the scratch an element: squares, and their running sums. Two fp32 temporaries of Adam have room in them."""


def scratch_bytes(largest: int) -> int:
    """What the kernels hold on the device. Args: largest: elements of the largest tensor they are given."""
    return 8 * _DOUBLES * _block(largest)


def _block(largest: int) -> int:
    return min(BLOCK, max(-(-largest // SUM_BLOCK), 1) * SUM_BLOCK)


class DeviceKernels:
    """One thread launches; the device does the work, in the order of its current stream.

    Args: scratch: uint8, of `scratch_bytes(largest)`, on the device.
    Split masters are not for states that no disk moves: `split`, `join` and `adam_split` do not exist here.
    """

    def __init__(self, scratch: Tensor) -> None:
        self._block = scratch.numel() // (8 * _DOUBLES)
        self._squares, self._sums = scratch.view(torch.float64).split(self._block)
        self._g, self._t = scratch.view(torch.float32)[: 2 * self._block].split(self._block)

    def adam(
        self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None, s: AdamScalars
    ) -> Part:
        c = s.packed
        master, exp_avg, exp_avg_sq = master.detach(), exp_avg.detach(), exp_avg_sq.detach()
        grad, out = grad.detach(), None if out is None else out.detach()
        # By a number on the CPU torch's CUDA kernel would multiply with its inverse.
        divisor = torch.full((), c.sqrt_bias_correction2, dtype=torch.float32, device=master.device)

        def block(low: int, high: int) -> None:
            p = master[low:high]
            states = p, exp_avg[low:high], exp_avg_sq[low:high]
            with np.errstate(invalid="ignore"):
                adam_steps(*states, grad[low:high], c, divisor, self._g, self._t)
            if out is not None:
                out[low:high].copy_(p)

        return self._in_blocks(block)

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Part:
        x, out = x.detach(), out.detach()

        def part(low: int, high: int) -> None:
            if (first + low) % SUM_BLOCK:
                head = min(high, low + SUM_BLOCK - (first + low) % SUM_BLOCK)
                self._sum(x[low:head], out[:1])
                low = head
            while low < high:
                stop = min(high, low + self._block)
                at = (first + low) // SUM_BLOCK - first // SUM_BLOCK
                self._sum(x[low:stop], out[at : at + sum_blocks(0, stop - low)])
                low = stop

        return part

    def _sum(self, x: Tensor, out: Tensor) -> None:
        """Of whole blocks, the last of which may be shorter: what it lacks are zeros, which change no sum."""
        whole = len(out) * SUM_BLOCK
        squares, sums = self._squares[:whole], self._sums[:whole]
        squares[x.numel() :] = 0
        squares[: x.numel()].copy_(x)
        squares.mul_(squares)
        shape = (len(out), SUM_BLOCK // _LANES, _LANES)
        lanes = _add_rows(squares.view(shape), sums.view(shape))
        for width in (16, 8, 4, 2, 1):
            lanes[:, :width] += lanes[:, width : 2 * width]
        out.copy_(lanes[:, 0])

    def accumulate(self, acc: Tensor, x: Tensor) -> Part:
        acc, x = acc.detach(), x.detach()

        def block(low: int, high: int) -> None:
            acc[low:high].add_(self._g[: high - low].copy_(x[low:high]))

        return self._in_blocks(block)

    def cast(self, src: Tensor, dst: Tensor) -> Part:
        src, dst = src.detach(), dst.detach()

        def part(low: int, high: int) -> None:
            dst[low:high].copy_(src[low:high])

        return part

    def scale(self, x: Tensor, factor: float) -> Part:
        x = x.detach()
        with np.errstate(over="ignore"):
            once = float(np.float32(factor))

        def part(low: int, high: int) -> None:
            x[low:high].mul_(once)

        return part

    def split(self, *_: Tensor) -> Part:
        raise _no_split()

    def join(self, *_: Tensor) -> Part:
        raise _no_split()

    def adam_split(self, *_: object) -> Part:
        raise _no_split()

    def _in_blocks(self, block: Part) -> Part:
        def part(low: int, high: int) -> None:
            for start in range(low, high, self._block):
                block(start, min(start + self._block, high))

        return part


def _add_rows(rows: Tensor, sums: Tensor) -> Tensor:
    """[blocks, rows, lanes] summed over rows, one after the other: [blocks, lanes]. Uses up both arguments."""
    if not torch.are_deterministic_algorithms_enabled():
        # Along an axis that is not the last each running sum is one thread's, row after row.
        torch.cumsum(rows, 1, out=sums)
        return sums[:, -1]
    # torch.cumsum refuses then, for what it does along the last axis.
    total = rows[:, 0]
    for row in range(1, rows.shape[1]):
        total += rows[:, row]
    return total


def _no_split() -> AssertionError:
    return AssertionError("states on the device have no split master")
