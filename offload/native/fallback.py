"""The same contract without the C library: separate torch and NumPy operations."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.config import SUM_BLOCK
from offload.native.contract import AdamScalars, AdamStruct, Part

_Bits = npt.NDArray[np.unsignedinteger[Any]]

_TORCH_BLOCK = 32768  # elements: temporaries stay in the second-level cache, and torch starts no threads


class _Scratch(threading.local):
    """Each thread's temporaries, made at its first call."""

    def __init__(self) -> None:
        # Whatever the default dtype and device are.
        self.a, self.b, self.c = (torch.empty(_TORCH_BLOCK, dtype=torch.float32, device="cpu") for _ in range(3))
        self.mask = np.empty(_TORCH_BLOCK, dtype=np.bool_)
        self.wide = torch.zeros(SUM_BLOCK, dtype=torch.float64, device="cpu")
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


class TorchKernels:
    """The kernels as separate operations on blocks that stay in the cache. Torch runs blocks of this
    size on the calling thread alone, so the pool splits here too."""

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
    ) -> Part:
        c = s.packed
        master, exp_avg, exp_avg_sq = master.detach(), exp_avg.detach(), exp_avg_sq.detach()
        grad, out = grad.detach(), None if out is None else out.detach()

        def block(low: int, high: int) -> None:
            p = master[low:high]
            self._adam(p, exp_avg[low:high], exp_avg_sq[low:high], grad[low:high], c)
            if out is not None:
                out[low:high].copy_(p)

        return _in_blocks(block)

    def _adam(self, p: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: AdamStruct) -> None:
        adam_steps(p, m, v, grad, c, c.sqrt_bias_correction2, self._scratch.a, self._scratch.b)

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
        c = s.packed
        exp_avg, exp_avg_sq, grad = exp_avg.detach(), exp_avg_sq.detach(), grad.detach()
        params, lows, squares, outs = _bits(param), _bits(low), _bits(exp_avg_sq), _bits(out)

        def block(a: int, b: int) -> None:
            master = self._scratch.c[: b - a]
            bits = _bits(master)
            self._join(params[a:b], lows[a:b], squares[a:b], bits, squares[a:b])
            self._adam(master, exp_avg[a:b], exp_avg_sq[a:b], grad[a:b], c)
            self._split(bits, lows[a:b], squares[a:b], outs[a:b])

        return _in_blocks(block)

    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> Part:
        masters, lows, squares, params = _bits(master), _bits(low), _bits(exp_avg_sq), _bits(param)

        def block(a: int, b: int) -> None:
            bits = _bits(self._scratch.c)[: b - a]
            np.copyto(bits, masters[a:b])
            self._split(bits, lows[a:b], squares[a:b], params[a:b])

        return _in_blocks(block)

    def join(self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor) -> Part:
        params, lows, squares = _bits(param), _bits(low), _bits(exp_avg_sq)
        masters, squares_out = _bits(master_out), _bits(exp_avg_sq_out)

        def block(a: int, b: int) -> None:
            self._join(params[a:b], lows[a:b], squares[a:b], masters[a:b], squares_out[a:b])

        return _in_blocks(block)

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

    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Part:
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

    def accumulate(self, acc: Tensor, x: Tensor) -> Part:
        acc, x = acc.detach(), x.detach()

        def block(low: int, high: int) -> None:
            wide = self._scratch.a[: high - low]
            acc[low:high].add_(wide.copy_(x[low:high]))

        return _in_blocks(block)

    def cast(self, src: Tensor, dst: Tensor) -> Part:
        src, dst = src.detach(), dst.detach()

        def block(low: int, high: int) -> None:
            dst[low:high].copy_(src[low:high])

        return _in_blocks(block)

    def scale(self, x: Tensor, factor: float) -> Part:
        x = x.detach()
        with np.errstate(over="ignore"):
            once = float(np.float32(factor))

        def block(low: int, high: int) -> None:
            x[low:high].mul_(once)

        return _in_blocks(block)


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


def _in_blocks(block: Part) -> Part:
    def part(low: int, high: int) -> None:
        with _KeepDenormals(), np.errstate(all="ignore"):
            for start in range(low, high, _TORCH_BLOCK):
                block(start, min(start + _TORCH_BLOCK, high))

    return part
