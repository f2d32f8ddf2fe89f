"""The kernels' numeric contract as separate torch and NumPy operations: without the C library, and on a device.

Every operation rounds once, as IEEE 754 has it: no product is contracted with a sum, no division becomes a product with
an inverse, no sum changes its order. So these give the bits of the C kernels.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.native.library import AdamScalars, AdamStruct, Work, sum_blocks
from offload.sizes import SUM_BLOCK

_Bits = npt.NDArray[np.unsignedinteger[Any]]

_LANES = 32
_GROUP = 1024
_GROUPS = SUM_BLOCK // _GROUP
_HALVES = tuple(_GROUPS * _LANES >> fold for fold in range(1, 12))
"""How sums of squares are grouped and folded: reference.sum_squares."""

_TORCH_BLOCK = 32768  # elements: temporaries stay in the second-level cache, and torch starts no threads


class _Scratch(threading.local):
    """Each thread's temporaries, made at its first call."""

    def __init__(self) -> None:
        # Whatever the default dtype and device are.
        self.a, self.b, self.c = (torch.empty(_TORCH_BLOCK, dtype=torch.float32, device="cpu") for _ in range(3))
        self.mask = np.empty(_TORCH_BLOCK, dtype=np.bool_)
        self.wide = torch.zeros(SUM_BLOCK, dtype=torch.float64, device="cpu")
        self.lanes = np.zeros((_GROUPS, _LANES))


class _KeepDenormals:
    """Sets this thread to keep denormals while a kernel runs. torch has no way to ask, arithmetic has:
    with them flushed, the smallest double is 0."""

    smallest = 5e-324

    def __enter__(self) -> None:
        self.flushed = self.smallest * 3 == 0.0
        if self.flushed:
            torch.set_flush_denormal(False)

    def __exit__(self, *_: object) -> None:
        if self.flushed:
            torch.set_flush_denormal(True)


class _Operations(ABC):
    """The kernels that are the same on the CPU and on a device."""

    @abstractmethod
    def _temporaries(self) -> tuple[Tensor, Tensor]:
        """Two fp32 tensors, as long as a block."""

    @abstractmethod
    def _divisor(self, c: AdamStruct, device: torch.device) -> float | Tensor:
        """`c.sqrt_bias_correction2`, in a form by which the device really divides."""

    @abstractmethod
    def _in_blocks(self, block: Work) -> Work:
        """Runs `block` on pieces of a range that are no longer than the temporaries."""

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
    ) -> Callable[[AdamScalars], Work]:
        master, exp_avg, exp_avg_sq = master.detach(), exp_avg.detach(), exp_avg_sq.detach()
        grad, out = grad.detach(), None if out is None else out.detach()

        def bound(s: AdamScalars) -> Work:
            c = s.packed
            divisor = self._divisor(c, master.device)

            def block(low: int, high: int) -> None:
                p = master[low:high]
                states = p, exp_avg[low:high], exp_avg_sq[low:high]
                adam_steps(*states, grad[low:high], c, divisor, *self._temporaries())
                if out is not None:
                    out[low:high].copy_(p)

            return self._in_blocks(block)

        return bound

    def accumulate(self, acc: Tensor, x: Tensor) -> Work:
        acc, x = acc.detach(), x.detach()

        def block(low: int, high: int) -> None:
            wide = self._temporaries()[0][: high - low]
            acc[low:high].add_(wide.copy_(x[low:high]))

        return self._in_blocks(block)

    def cast(self, src: Tensor, dst: Tensor) -> Work:
        src, dst = src.detach(), dst.detach()

        def block(low: int, high: int) -> None:
            dst[low:high].copy_(src[low:high])

        return self._in_blocks(block)

    def scale(self, x: Tensor, factor: float) -> Work:
        x = x.detach()
        with np.errstate(over="ignore"):
            once = float(np.float32(factor))

        def block(low: int, high: int) -> None:
            x[low:high].mul_(once)

        return self._in_blocks(block)


class TorchKernels(_Operations):
    """The kernels as separate operations on blocks that stay in the cache. Torch runs blocks of this
    size on the calling thread alone, so the pool splits here too."""

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def _temporaries(self) -> tuple[Tensor, Tensor]:
        return self._scratch.a, self._scratch.b

    def _divisor(self, c: AdamStruct, device: torch.device) -> float:
        return float(c.sqrt_bias_correction2)

    def _in_blocks(self, block: Work) -> Work:
        def work(low: int, high: int) -> None:
            with _KeepDenormals(), np.errstate(all="ignore"):
                for start in range(low, high, _TORCH_BLOCK):
                    block(start, min(start + _TORCH_BLOCK, high))

        return work

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
        c = s.packed
        exp_avg, exp_avg_sq, grad = exp_avg.detach(), exp_avg_sq.detach(), grad.detach()
        params, lows, squares, outs = _bits(param), _bits(low), _bits(exp_avg_sq), _bits(out)

        def block(a: int, b: int) -> None:
            master = self._scratch.c[: b - a]
            bits = _bits(master)
            self._join(params[a:b], lows[a:b], squares[a:b], bits, squares[a:b])
            states = master, exp_avg[a:b], exp_avg_sq[a:b]
            adam_steps(*states, grad[a:b], c, c.sqrt_bias_correction2, *self._temporaries())
            self._split(bits, lows[a:b], squares[a:b], outs[a:b])

        return self._in_blocks(block)

    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> Work:
        masters, lows, squares, params = _bits(master), _bits(low), _bits(exp_avg_sq), _bits(param)

        def block(a: int, b: int) -> None:
            bits = _bits(self._scratch.c)[: b - a]
            np.copyto(bits, masters[a:b])
            self._split(bits, lows[a:b], squares[a:b], params[a:b])

        return self._in_blocks(block)

    def join(self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor) -> Work:
        params, lows, squares = _bits(param), _bits(low), _bits(exp_avg_sq)
        masters, squares_out = _bits(master_out), _bits(exp_avg_sq_out)

        def block(a: int, b: int) -> None:
            self._join(params[a:b], lows[a:b], squares[a:b], masters[a:b], squares_out[a:b])

        return self._in_blocks(block)

    def _split(self, master: _Bits, low: _Bits, exp_avg_sq: _Bits, param: _Bits) -> None:
        """kernels/split.h: store_split, on bits; `master` is used up."""
        n = len(master)
        odd, nan = _bits(self._scratch.a)[:n], self._scratch.mask[:n]
        np.isnan(master.view(np.float32), out=nan)
        np.copyto(master, 0x7FC00000, where=nan)
        np.copyto(low, master, casting="unsafe")
        np.right_shift(master, 16, out=odd)
        odd &= 1
        master += 0x7FFF
        master += odd
        master >>= 16
        np.copyto(param, master, casting="unsafe")
        odd <<= 31
        exp_avg_sq &= 0x7FFFFFFF
        exp_avg_sq |= odd

    def _join(self, param: _Bits, low: _Bits, exp_avg_sq: _Bits, master: _Bits, exp_avg_sq_out: _Bits) -> None:
        """kernels/split.h: load_split, on bits."""
        carry, wide = (_bits(x)[: len(param)] for x in (self._scratch.a, self._scratch.b))
        np.copyto(wide, low)
        np.right_shift(exp_avg_sq, 31, out=carry)
        carry += wide
        carry += 0x7FFF
        carry &= 0x10000
        np.copyto(master, param)
        master <<= 16
        master |= wide
        master -= carry
        np.bitwise_and(exp_avg_sq, 0x7FFFFFFF, out=exp_avg_sq_out)

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Work:
        x, out = x.detach(), out.detach()

        def work(low: int, high: int) -> None:
            wide, lanes = self._scratch.wide, self._scratch.lanes
            with _KeepDenormals(), np.errstate(all="ignore"):
                while low < high:
                    n = min(high - low, SUM_BLOCK - (first + low) % SUM_BLOCK)
                    groups = -(-n // _GROUP)
                    wide[n : groups * _GROUP] = 0
                    wide[:n].copy_(x[low : low + n])
                    wide[:n].mul_(wide[:n])
                    # Along an axis that is not the last NumPy adds row after row: lane by lane, in order.
                    rows = wide[: groups * _GROUP].numpy().reshape(groups, -1, _LANES)
                    np.add.reduce(rows, axis=1, out=lanes[:groups])
                    lanes[groups:] = 0
                    flat = lanes.reshape(-1)
                    for width in _HALVES:
                        flat[:width] += flat[width : 2 * width]
                    out[(first + low) // SUM_BLOCK - first // SUM_BLOCK] = flat[0]
                    low += n

        return work


def adam_steps(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: AdamStruct, divisor: float | Tensor, a: Tensor, b: Tensor
) -> None:
    """Adam on any device, each operation rounded once. addcmul_, addcdiv_, lerp_ and alpha= are not used: they may
    contract to FMA. Args: divisor: c.sqrt_bias_correction2; a, b: fp32 temporaries, at least as long as p."""
    g, t = a[: p.numel()], b[: p.numel()]
    g.copy_(grad).mul_(c.scale)
    if c.add_decay:
        g.add_(torch.mul(p, c.weight_decay, out=t))
    else:
        p.mul_(c.decay)
    m.add_(torch.sub(g, m, out=t).mul_(c.one_minus_beta1))
    v.mul_(c.beta2).add_(torch.mul(g, c.one_minus_beta2, out=t).mul_(g))
    if v.is_cpu:
        np.sqrt(v.numpy(), out=g.numpy())  # torch's own, through a vector library, is an ulp off there
    else:
        torch.sqrt(v, out=g)
    g.div_(divisor).add_(c.eps)
    p.add_(torch.mul(m, c.neg_step_size, out=t).div_(g))


def _bits(x: Tensor) -> _Bits:
    """The same memory as unsigned numbers, which torch has few operations for."""
    if x.element_size() == 2:
        return x.detach().view(torch.int16).numpy().view(np.uint16)
    return x.detach().numpy().view(np.uint32)


BLOCK = 64 * SUM_BLOCK
"""Elements at a time at most: enough that a device is busy with one operation for longer than it takes to launch it."""


def scratch_bytes(largest: int) -> int:
    """What the kernels hold on the device. Args: largest: elements of the largest tensor they are given."""
    return 8 * _block(largest)


def _block(largest: int) -> int:
    return min(BLOCK, max(-(-largest // SUM_BLOCK), 1) * SUM_BLOCK)


class DeviceKernels(_Operations):
    """One thread launches; the device does the work, in the order of its current stream.

    Args: scratch: uint8, of `scratch_bytes(largest)`, on the device.
    Split masters are not for states that no disk moves: `split`, `join` and `adam_split` do not exist here.
    """

    def __init__(self, scratch: Tensor) -> None:
        # An element's square in fp64, or two fp32 temporaries of Adam.
        self._squares = scratch.view(torch.float64)
        self._block = self._squares.numel()
        self._g, self._t = scratch.view(torch.float32).split(self._block)

    def _temporaries(self) -> tuple[Tensor, Tensor]:
        return self._g, self._t

    def _divisor(self, c: AdamStruct, device: torch.device) -> Tensor:
        # By a number on the CPU torch's CUDA kernel would multiply with its inverse.
        return torch.full((), c.sqrt_bias_correction2, dtype=torch.float32, device=device)

    def cast(self, src: Tensor, dst: Tensor) -> Work:
        src, dst = src.detach(), dst.detach()

        def work(low: int, high: int) -> None:  # needs no temporaries, so it is one launch
            dst[low:high].copy_(src[low:high])

        return work

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Work:
        x, out = x.detach(), out.detach()

        def work(low: int, high: int) -> None:
            if (first + low) % SUM_BLOCK:
                head = min(high, low + SUM_BLOCK - (first + low) % SUM_BLOCK)
                self._sum(x[low:head], out[:1])
                low = head
            while low < high:
                stop = min(high, low + self._block)
                at = (first + low) // SUM_BLOCK - first // SUM_BLOCK
                self._sum(x[low:stop], out[at : at + sum_blocks(0, stop - low)])
                low = stop

        return work

    def _sum(self, x: Tensor, out: Tensor) -> None:
        """Of whole blocks, the last of which may be shorter: what it lacks are zeros, which change no sum."""
        whole = len(out) * SUM_BLOCK
        squares = self._squares[:whole]
        squares[x.numel() :] = 0
        squares[: x.numel()].copy_(x)
        squares.mul_(squares)
        # Additions of whole tensors: nothing that a device could do in an order of its own.
        rows = squares.view(len(out), _GROUPS, -1, _LANES).unbind(2)
        for row in rows[1:]:
            rows[0].add_(row)
        groups = rows[0]
        for width in _HALVES[:6]:
            groups[:, : width // _LANES] += groups[:, width // _LANES : 2 * width // _LANES]
        lanes = groups[:, 0]
        for width in _HALVES[6:]:
            lanes[:, :width] += lanes[:, width : 2 * width]
        out.copy_(lanes[:, 0])

    def split(self, *_: Tensor) -> Work:
        raise _no_split()

    def join(self, *_: Tensor) -> Work:
        raise _no_split()

    def adam_split(self, *_: object) -> Work:
        raise _no_split()

    def _in_blocks(self, block: Work) -> Work:
        def work(low: int, high: int) -> None:
            with np.errstate(all="ignore"):
                for start in range(low, high, self._block):
                    block(start, min(start + self._block, high))

        return work


def _no_split() -> AssertionError:
    return AssertionError("states on the device have no split master")
