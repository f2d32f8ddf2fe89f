"""The kernels' numeric contract as separate torch and NumPy operations: without the C library, and on a device.

Every operation rounds once, as IEEE 754 has it: no product is contracted with a sum, no division becomes a product with
an inverse, no sum changes its order. So these give the bits of the C kernels.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.layout import BF16, CODED
from offload.native import codes
from offload.native.library import Work
from offload.native.table import ADAM_DITHERED, AdamScalars, DitheredScalars, Kernel
from offload.sizes import SUM_BLOCK

_Bits = npt.NDArray[np.unsignedinteger[Any]]

_LANES = 32
_GROUP = 1024
_GROUPS = SUM_BLOCK // _GROUP
_HALVES = tuple(_GROUPS * _LANES >> fold for fold in range(1, 12))
"""How sums of squares are grouped and folded: reference.sum_squares."""

_TORCH_BLOCK = 32768  # elements: temporaries stay in the second-level cache, and torch starts no threads

_DITHERED_BYTES = 32
"""More than the allocator gives for each element of a piece of a step with moments of one or two bytes.

It gives 28 for moments of a byte, and 24 for those of two."""
_DITHERED_SHARE = 128
"""The elements of such a piece are at most this part of all that are stepped so: a quarter of a byte of each."""


class _Scratch(threading.local):
    """Each thread's temporaries, made at its first call."""

    def __init__(self) -> None:
        # Whatever the default dtype and device are.
        self.a, self.b, self.c = (torch.empty(_TORCH_BLOCK, dtype=torch.float32, device="cpu") for _ in range(3))
        self.mask = np.empty(_TORCH_BLOCK, dtype=np.bool_)
        self.wide = torch.zeros(SUM_BLOCK, dtype=torch.float64, device="cpu")
        self.lanes = np.zeros((_GROUPS, _LANES))


class _KeepDenormals:
    """Makes this thread keep denormals while a kernel runs.

    torch has no way to ask for the mode. So arithmetic tells: where denormals are flushed, the smallest double is 0.
    """

    smallest = 5e-324

    def __enter__(self) -> None:
        self.flushed = self.smallest * 3 == 0.0
        if self.flushed:
            torch.set_flush_denormal(False)

    def __exit__(self, *_: object) -> None:
        if self.flushed:
            torch.set_flush_denormal(True)


class _Operations(ABC):
    """Binds kernels to operations of torch.

    A kernel's operations are the method with its name. It gets the scalars, the first position if the kernel counts
    them, and a piece of each tensor. A piece is a part of one block or some whole blocks, and has at most as many
    positions as the temporaries have room for.
    """

    variant: str

    @abstractmethod
    def _temporaries(self) -> tuple[Tensor, Tensor]:
        """Two fp32 tensors, each with room for a piece."""

    @abstractmethod
    def _divisor(self, c: AdamScalars, device: torch.device) -> float | Tensor:
        """`c.sqrt_bias_correction2`, in a form by which the device really divides."""

    @abstractmethod
    def _rounding(self) -> AbstractContextManager[object]:
        """A context in which this thread's operations keep denormals."""

    @abstractmethod
    def _room(self, kernel: Kernel) -> int:
        """The most elements of a piece; if that is less than a block, a piece is a block."""

    def bind(self, kernel: Kernel, tensors: Sequence[Tensor | None], first: int) -> Callable[[Any], Work]:
        """Binds a kernel to tensors, as `Library.bind` does.

        Raises:
            ValueError: for a kernel without operations.
        """
        operations = getattr(self, kernel.name, None)
        if operations is None:
            raise ValueError(f"torch has no operations for {kernel.name} here: it is one of the C kernels for the CPU")
        given = [None if x is None else x.detach() for x in tensors]
        blocks = [argument.block for argument in kernel.arguments]
        room = self._room(kernel)

        def bound(scalars: Any) -> Work:
            def work(low: int, high: int) -> None:
                with self._rounding(), np.errstate(all="ignore"):
                    for start, stop in _pieces(low, high, kernel.cut, room):
                        piece = [
                            None
                            if x is None
                            else x[start // block - first // block : -(-stop // block) - first // block]
                            for x, block in zip(given, blocks, strict=True)
                        ]
                        operations(scalars, *((start,) if kernel.counts else ()), *piece)

            return work

        return bound

    def adam(
        self, c: AdamScalars, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None
    ) -> None:
        adam_steps(master, exp_avg, exp_avg_sq, grad, c, self._divisor(c, master.device), *self._temporaries())
        if out is not None:
            out.copy_(master)

    def adam_dithered(
        self,
        c: DitheredScalars,
        first: int,
        master: Tensor,
        param: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        exp_avg_scale: Tensor | None,
        exp_avg_sq_scale: Tensor | None,
        grad: Tensor,
        out: Tensor,
    ) -> None:
        is_coded = exp_avg.dtype is torch.uint8
        forms = CODED if is_coded else (BF16, BF16)
        arrays = [[one for one in (exp_avg, exp_avg_scale) if one is not None]]
        arrays += [[one for one in (exp_avg_sq, exp_avg_sq_scale) if one is not None]]
        p = master if param is None else codes.join(param, master)
        m, v = (codes.decode(form, of_one) for form, of_one in zip(forms, arrays, strict=True))
        adam_steps(p, m, v, grad, c, self._divisor(c, master.device), *self._temporaries())
        if out.dtype is torch.bfloat16:
            codes.settle_(p)
        if param is None:
            out.copy_(p)
        else:
            codes.split(p, master, out)
        random = codes.dither(len(master), c.step, first, master.device)
        for form, values, into in zip(forms, (m, v), arrays, strict=True):
            codes.encode(form, values, random, into)

    def accumulate(self, _: None, acc: Tensor, x: Tensor) -> None:
        acc.add_(self._temporaries()[0][: x.numel()].copy_(x))

    def cast(self, _: None, src: Tensor, dst: Tensor) -> None:
        dst.copy_(src)


def _pieces(low: int, high: int, cut: int, room: int) -> Iterator[tuple[int, int]]:
    length = max(room // cut, 1) * cut
    while low < high:
        stop = min(high, low + (cut - low % cut if low % cut else length))
        yield low, stop
        low = stop


class TorchKernels(_Operations):
    """The kernels as separate operations on pieces that stay in the cache.

    Torch runs pieces of this size on the calling thread alone. So `Kernels` splits ranges among its threads here, too.
    """

    variant = "torch"

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def _temporaries(self) -> tuple[Tensor, Tensor]:
        return self._scratch.a, self._scratch.b

    def _divisor(self, c: AdamScalars, device: torch.device) -> float:
        return float(c.sqrt_bias_correction2)

    def _rounding(self) -> AbstractContextManager[object]:
        return _KeepDenormals()

    def _room(self, kernel: Kernel) -> int:
        return _TORCH_BLOCK

    def adam_split(
        self,
        c: AdamScalars,
        param: Tensor,
        low: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor,
    ) -> None:
        master = self._scratch.c[: param.numel()]
        bits, lows, squares = _bits(master), _bits(low), _bits(exp_avg_sq)
        self._join(_bits(param), lows, squares, bits, squares)
        adam_steps(master, exp_avg, exp_avg_sq, grad, c, c.sqrt_bias_correction2, *self._temporaries())
        self._split(bits, lows, squares, _bits(out))

    def split(self, _: None, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> None:
        bits = _bits(self._scratch.c)[: master.numel()]
        np.copyto(bits, _bits(master))
        self._split(bits, _bits(low), _bits(exp_avg_sq), _bits(param))

    def join(
        self, _: None, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor
    ) -> None:
        self._join(_bits(param), _bits(low), _bits(exp_avg_sq), _bits(master_out), _bits(exp_avg_sq_out))

    def _split(self, master: _Bits, low: _Bits, exp_avg_sq: _Bits, param: _Bits) -> None:
        """store_split of kernels/split.h, on bits. The bits of `master` are used up."""
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
        """load_split of kernels/split.h, on bits."""
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

    def sum_squares(self, _: None, x: Tensor, out: Tensor) -> None:
        wide, lanes = self._scratch.wide, self._scratch.lanes
        n = x.numel()
        groups = -(-n // _GROUP)
        wide[n : groups * _GROUP] = 0
        wide[:n].copy_(x)
        wide[:n].mul_(wide[:n])
        # Along an axis that is not the last NumPy adds row after row: lane by lane, in order.
        rows = wide[: groups * _GROUP].numpy().reshape(groups, -1, _LANES)
        np.add.reduce(rows, axis=1, out=lanes[:groups])
        lanes[groups:] = 0
        flat = lanes.reshape(-1)
        for width in _HALVES:
            flat[:width] += flat[width : 2 * width]
        out[0] = flat[0]


def adam_steps(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: AdamScalars, divisor: float | Tensor, a: Tensor, b: Tensor
) -> None:
    """Adam on any device, with each operation rounded once.

    addcmul_, addcdiv_, lerp_ and alpha= are not used, since they may contract to FMA. The formula is that of
    `optim/reference.py`.

    Args:
        p: the masters, fp32, shape (n,), written to.
        m: exp_avg, likewise.
        v: exp_avg_sq, likewise.
        grad: the gradient, shape (n,), of any float dtype.
        c: the scalars of the step.
        divisor: c.sqrt_bias_correction2.
        a: an fp32 temporary, at least as long as p.
        b: another one.
    """
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
    """The same memory as unsigned integers in NumPy; torch has few operations for these."""
    if x.element_size() == 2:
        return x.detach().view(torch.int16).numpy().view(np.uint16)
    return x.detach().numpy().view(np.uint32)


BLOCK = 64 * SUM_BLOCK
"""Elements at a time at most: enough that a device is busy with one operation for longer than it takes to launch it."""


def scratch_bytes(largest: int) -> int:
    """How many bytes the kernels hold on the device.

    Args:
        largest: the number of elements of the largest tensor that they are given.
    """
    return 8 * _block(largest)


def dithered_room(largest: int, numel: int) -> int:
    """How many elements steps with moments of one or two bytes take at a time on a device.

    Each takes 90 to 135 operations, so the more the better. Their temporaries are the allocator's, and take at most a
    quarter of a byte for each element of all, or what one block of a sum of squares takes.

    Args:
        largest: the number of elements of the largest tensor that they are given.
        numel: the elements that are stepped so.
    """
    return min(_block(largest), max(numel // _DITHERED_SHARE // SUM_BLOCK, 1) * SUM_BLOCK)


def dithered_bytes(largest: int, room: int) -> int:
    """How many bytes steps with moments of one or two bytes take of the device's allocator at once.

    Args:
        largest: the number of elements of the largest tensor that they are given.
        room: of `dithered_room`.
    """
    return _DITHERED_BYTES * min(room, largest)


def _block(largest: int) -> int:
    return min(BLOCK, max(-(-largest // SUM_BLOCK), 1) * SUM_BLOCK)


class DeviceKernels(_Operations):
    """The kernels as operations of torch on a device, in the order of its current stream.

    There are no operations for split masters, which are for states that a disk moves.

    Args:
        scratch: uint8, of `scratch_bytes(largest)`, on the device.
        room: of `dithered_room`.
    """

    variant = "device, by torch"

    def __init__(self, scratch: Tensor, room: int = SUM_BLOCK) -> None:
        self._dithered_room = room
        # An element's square in fp64, or two fp32 temporaries of Adam.
        self._squares = scratch.view(torch.float64)
        self._g, self._t = scratch.view(torch.float32).split(self._squares.numel())

    def _temporaries(self) -> tuple[Tensor, Tensor]:
        return self._g, self._t

    def _divisor(self, c: AdamScalars, device: torch.device) -> Tensor:
        # By a number on the CPU torch's CUDA kernel would multiply with its inverse.
        return torch.full((), c.sqrt_bias_correction2, dtype=torch.float32, device=device)

    def _rounding(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _room(self, kernel: Kernel) -> int:
        room = self._squares.numel()
        return min(room, self._dithered_room) if kernel is ADAM_DITHERED else room

    def sum_squares(self, _: None, x: Tensor, out: Tensor) -> None:
        # What the last block lacks are zeros, which change no sum.
        squares = self._squares[: len(out) * SUM_BLOCK]
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
