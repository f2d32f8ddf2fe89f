"""Moments of one or two bytes in operations of torch, on any device: `reference.to_codes` and what is beside it.

A *form* is what an array of fp32 is stored as. All operations are on integers, so each has one result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.layout import Form, part_of
from offload.sizes import DITHER_BLOCK

PIECE = 1 << 16
"""The most elements at once where memory is not to grow with them. Temporaries take up to 32 bytes an element."""
_GOLDEN = 0x9E3779B9
_NAN, _MAGNITUDE = 0x7FC00000, 0x7FFFFFFF


def dither(numel: int, step: int, first: int, device: torch.device) -> Tensor:
    """Random bits of the elements of a parameter; see `reference.dither`.

    Args:
        numel: how many elements.
        step: the parameter's step, from 1.
        first: the position of the first one in its parameter, a multiple of 64.
        device: where.

    Returns:
        int32, shape (numel,).
    """
    start, blocks = first // DITHER_BLOCK, -(-numel // DITHER_BLOCK)
    z = torch.arange(start + 1, start + blocks + 1, dtype=torch.int64, device=device)
    z = z * _signed(0x9E3779B97F4A7C15) + _signed(step * 0xD1B54A32D192ED03)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    key = _shifted(z ^ _shifted(z, 31), 32).to(torch.int32)
    lanes = torch.arange(DITHER_BLOCK, dtype=torch.int64, device=device).mul_(_GOLDEN).to(torch.int32)
    return (key[:, None] + lanes).view(-1)[:numel]


def _signed(number: int) -> int:
    """A number modulo 2^64 as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, without copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def encode(form: Form, values: Tensor, random: Tensor, into: Sequence[Tensor]) -> None:
    """Stores fp32 values in a form.

    Args:
        form: how; it is not exact.
        values: fp32, shape (n,). With a scale they are whole blocks of one parameter, but for the parameter's last.
        random: of `dither`, shape (n,).
        into: the form's arrays, of shape (n,), and (blocks,) for the scales.
    """
    bits = values.view(torch.int32).masked_fill(values.isnan(), _NAN)
    if not form.block:
        upper = (bits + (random >> 16 & 0xFFFF)) >> 16
        into[0].view(torch.int16).copy_(upper)  # of which the lower 16 bits stay
        return
    rounded = ((bits & _MAGNITUDE) + (random >> 12 & 0xFFFFF)) >> 20
    codes, scales = into
    n, whole = len(values), len(values) // form.block * form.block
    for start, stop in ((0, whole), (whole, n)):
        if start < stop:
            blocks = rounded[start:stop].view(-1, min(form.block, stop - start))
            scale = ((blocks.amax(1) >> 3) - (form.octaves - 1)).clamp_(min=0)
            scales[start // form.block : -(-stop // form.block)] = scale
            blocks.sub_(scale[:, None] << 3).clamp_(min=0)
    if form.is_signed:
        rounded |= (bits >> 24) & 0x80
    codes.copy_(rounded)


def store(form: Form, values: Tensor, into: Sequence[Tensor], *, step: int, first: int) -> None:
    """Stores fp32 values that no step of the form's own has made.

    Args:
        form: how.
        values: fp32, shape (n,), on any device; see `encode`.
        into: see `encode`.
        step: the step whose random bits round them, if any do.
        first: where in their parameter they begin, in elements.
    """
    if form.is_exact:
        into[0].copy_(values[:: form.block] if form.is_sparse else values)
        return
    device = into[0].device
    for start, stop in _pieces(len(values)):
        random = dither(stop - start, step, first + start, device)
        encode(form, values[start:stop].to(device), random, _part(form, into, start, stop))


def decode(form: Form, arrays: Sequence[Tensor]) -> Tensor:
    """What `encode` stored: fp32, shape (n,), of which it makes the same bytes again. If the form is plain, a view.

    Args:
        form: how; not a sparse one.
        arrays: the form's arrays. With a scale they begin at a block's start.
    """
    assert not form.is_sparse
    if form.is_exact:
        return arrays[0]
    if not form.block:
        return (arrays[0].view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    codes, scales = arrays
    wide = codes.to(torch.int32)
    magnitude = wide & 0x7F if form.is_signed else wide
    # Whole blocks, and what is left: scales are not spread over memory of their own.
    bits = magnitude << 20
    n, whole = len(codes), len(codes) // form.block * form.block
    for start, stop in ((0, whole), (whole, n)):
        if start < stop:
            part = scales[start // form.block : -(-stop // form.block)].to(torch.int32) << 23
            bits[start:stop].view(-1, min(form.block, stop - start)).add_(part[:, None])
    if form.is_signed:
        bits.masked_fill_(magnitude == 0, 0)
        bits |= (wide & 0x80) << 24
    return bits.view(torch.float32)


def decode_into(form: Form, arrays: Sequence[Tensor], out: Tensor) -> Tensor:
    """`decode`, in pieces, so that temporaries stay small. Returns `out`, or the array itself if the form is plain.

    Args:
        form: how it is stored.
        arrays: the form's arrays. With a scale they begin at a block's start.
        out: fp32, shape (n,), on the device of the arrays.
    """
    if form.is_plain:
        return arrays[0]
    if form.is_sparse:
        out.zero_()[:: form.block] = arrays[0]
        return out
    for start, stop in _pieces(len(out)):
        out[start:stop] = decode(form, _part(form, arrays, start, stop))
    return out


def small(form: Form, line: Tensor, shape: Sequence[int]) -> Tensor:
    """A state that has another shape than its parameter.

    Args:
        form: how it is stored.
        line: what `decode_into` made of it: fp32, with an element for each one of the parameter.
        shape: its own.
    """
    return line[:: form.block or 1][: math.prod(shape)].view(shape)


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE, numel)) for start in range(0, numel, PIECE))


def _part(form: Form, arrays: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """What the arrays of a form have of elements `start` to `stop`."""
    return [part_of(array, block, start, stop) for array, (_, block) in zip(arrays, form.arrays, strict=True)]


def settle_(master: Tensor) -> Tensor:
    """Makes fp32 masters those that `split` can keep, in place; see `reference.settle`. Returns them."""
    for start, stop in _pieces(len(master)):
        piece = master[start:stop]
        piece.masked_fill_(piece.isnan(), torch.nan)
        bits = piece.view(torch.int32)
        bits -= ((bits & 0x1FFFF) == 0x8000).to(torch.int32)
    return master


def split(master: Tensor, low: Tensor, param: Tensor) -> None:
    """Splits settled masters.

    Args:
        master: fp32, shape (n,).
        low: int16, shape (n,): gets the lower halves.
        param: bf16, shape (n,): gets the masters rounded to nearest even.
    """
    low.copy_(master.view(torch.int32))  # of which the lower 16 bits stay
    param.copy_(master)


def join(param: Tensor, low: Tensor) -> Tensor:
    """Undoes `split`: the masters, fp32, shape (n,)."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    return upper.add_(low).view(torch.float32)


def join_into(param: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """`join`, in pieces, so that temporaries stay small. Returns `out`, fp32, shape (n,)."""
    for start, stop in _pieces(len(out)):
        out[start:stop] = join(param[start:stop], low[start:stop])
    return out
