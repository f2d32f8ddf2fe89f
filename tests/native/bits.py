"""Inputs that are hard on arithmetic, and comparison bit for bit with NaN equal to NaN."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload import native
from offload.native.compiled_kernels import CompiledKernels
from offload.native.library import open_library
from offload.native.torch_kernels import scratch_bytes
from offload.optim import reference

from .emulated import emulated

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 997, 4095, 10007)

# Zero, the smallest and largest denormal and normal of fp32, bf16 and fp16, ties, Inf, NaN of both kinds.
_SPECIAL_WORDS = """
00000000 00000001 007fffff 00800000 7f7fffff 7f800000 7fc00000 7f800001 7fffffff 3f800000 3f807fff 3f808000
3f818000 3f808001 7f7f8000 00008000 33000000 33000001 33800000 387fe000 387fffff 38800000 477fefff 477ff000
"""
SPECIAL = np.array([int(word, 16) for word in _SPECIAL_WORDS.split()], dtype=np.uint32)
SPECIAL = np.concatenate([SPECIAL, SPECIAL | np.uint32(0x80000000)])


class HostProgram:
    """`device_kernels.h` as the kernel library has it, on memory of the CPU.

    Args: is_backwards: the last thread of a block runs first.
    """

    def __init__(self, is_backwards: bool = False) -> None:
        library, reason = open_library()
        assert library is not None, reason
        self._launch = library.offload_device_launch
        self._launch.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
        self._is_backwards = is_backwards

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        assert self._launch(kernel.encode(), blocks, self._is_backwards, addresses) == 0


_loaded: dict[tuple[str, int], native.Kernels] = {}


def kernels(variant: str, threads: int = 1) -> native.Kernels:
    """One for all tests: each would start its own threads."""
    key = (variant, threads)
    if key not in _loaded:
        # As small as may be: tensors of more than a block take several rounds.
        scratch = torch.zeros(scratch_bytes(1), dtype=torch.uint8)
        if variant == "device":
            _loaded[key] = native.load_on(scratch)
        elif variant == "compiled":
            _loaded[key] = native.Kernels(1, CompiledKernels(scratch, HostProgram()))
        elif variant == "qemu":
            _loaded[key] = native.Kernels(threads, emulated())
        else:
            _loaded[key] = native.load(threads, variant)
    return _loaded[key]


def numbers(rng: np.random.Generator, n: int, wild: bool, size: float = 1.0) -> Tensor:
    """fp32 [n]: normal ones of about `size`, or any bit pattern with special ones among them."""
    if not wild:
        return torch.from_numpy((rng.standard_normal(n) * size).astype(np.float32))
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    chosen = rng.random(n) < 0.3
    bits[chosen] = rng.choice(SPECIAL, chosen.sum())
    return torch.from_numpy(bits.view(np.float32))


def halves(rng: np.random.Generator, n: int, dtype: torch.dtype, wild: bool, size: float = 1.0) -> Tensor:
    """`dtype` [n], any bit pattern when `wild`."""
    if dtype == torch.float32 or not wild:
        return numbers(rng, n, wild, size).to(dtype)
    return torch.from_numpy(rng.integers(0, 1 << 16, n, dtype=np.uint16).view(np.int16)).view(dtype)


def at_offset(x: Tensor, offset: int) -> Tensor:
    """A copy of x that starts `offset` elements behind a 64-byte line, with room full of 7 around it."""
    room = torch.full((x.numel() + offset + 128,), 7, dtype=x.dtype)
    start = -room.data_ptr() % 64 // x.element_size() + offset
    view = room[start : start + x.numel()]
    view.copy_(x)
    return view


def raw(x: Tensor) -> np.ndarray:
    """The bits of a tensor, every NaN made the same."""
    whole = {torch.float64: torch.int64, torch.float32: torch.int32}.get(x.dtype, torch.int16)
    return torch.where(torch.isnan(x), torch.full_like(x, torch.nan), x).view(whole).numpy()


def assert_same_bits(found: Tensor, wanted: Tensor, what: str = "") -> None:
    assert found.dtype == wanted.dtype
    differs = np.flatnonzero(raw(found) != raw(wanted))
    assert len(differs) == 0, (
        f"{what}: {len(differs)} of {found.numel()} differ, first at {differs[0]}: "
        f"{found[differs[0]].item()!r}, wanted {wanted[differs[0]].item()!r}"
    )


def widened(x: Tensor) -> np.ndarray:
    """fp32 of any dtype, by the NumPy reference and not by torch."""
    if x.dtype == torch.float32:
        return x.numpy()
    bits = x.view(torch.int16).numpy().view(np.uint16)
    return reference.from_bf16(bits) if x.dtype == torch.bfloat16 else reference.from_f16(bits)


def narrowed(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of `dtype` from fp32, by the NumPy reference."""
    if dtype == torch.float32:
        return torch.from_numpy(x)
    bits = reference.to_bf16(x) if dtype == torch.bfloat16 else reference.to_f16(x)
    return torch.from_numpy(bits.view(np.int16)).view(dtype)
