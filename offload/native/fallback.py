"""The same contract without the C library: separate torch and NumPy operations."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from offload.native.contract import SUM_BLOCK, AdamScalars, Part

_TORCH_BLOCK = 32768  # elements: temporaries stay in the second-level cache, and torch starts no threads


class _Scratch(threading.local):
    """Each thread's temporaries, made at its first call."""

    def __init__(self) -> None:
        # Whatever the default dtype and device are.
        self.a, self.b = (torch.empty(_TORCH_BLOCK, dtype=torch.float32, device="cpu") for _ in range(2))
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
    ) -> Part:
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


def _in_blocks(block: Part) -> Part:
    def part(low: int, high: int) -> None:
        with _KeepDenormals(), np.errstate(all="ignore"):
            for start in range(low, high, _TORCH_BLOCK):
                block(start, min(start + _TORCH_BLOCK, high))

    return part
