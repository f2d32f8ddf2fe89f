"""What every variant of the kernels has in common: Adam's scalars, the blocks of a sum, the contract."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.config import SUM_BLOCK

Part = Callable[[int, int], None]
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


class Backend(Protocol):
    """Each method binds one kernel to tensors that were checked before."""

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor | None,
        s: AdamScalars,
    ) -> Part: ...
    def adam_split(
        self,
        param: Tensor,
        low: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        out: Tensor,
        s: AdamScalars,
    ) -> Part: ...
    def split(self, master: Tensor, low: Tensor, exp_avg_sq: Tensor, param: Tensor) -> Part: ...
    def join(
        self, param: Tensor, low: Tensor, exp_avg_sq: Tensor, master_out: Tensor, exp_avg_sq_out: Tensor
    ) -> Part: ...
    def sum_squares(self, x: Tensor, first: int, out: Tensor) -> Part: ...
    def accumulate(self, acc: Tensor, x: Tensor) -> Part: ...
    def cast(self, src: Tensor, dst: Tensor) -> Part: ...
    def scale(self, x: Tensor, factor: float) -> Part: ...
