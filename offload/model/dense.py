"""The elements of a dense tensor, in the order of its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.native.memory import discard


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a view of shape (numel,), in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`tensor`, or a copy with these strides if it has others."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def flattened_like(param: Tensor, tensor: Tensor) -> Tensor:
    """The elements of `tensor` in the order of `param`'s memory: a view if the strides agree.

    Both have the same shape.
    """
    return flattened(with_strides(tensor, param.stride()))


_MOVED_AT_ONCE = 1 << 21  # elements


def move_values(target: Tensor, source: Tensor) -> None:
    """Copies the values of a dense tensor to another one of its shape and strides, and may cast them.

    Both are on the CPU. The pages of `source` are freed as those of `target` are written, so there is never room for
    both. The memory of `source` has to be malloc's, and must belong to it alone.
    """
    pairs = zip(flattened(target).split(_MOVED_AT_ONCE), flattened(source).split(_MOVED_AT_ONCE), strict=True)
    for into, values in pairs:
        into.copy_(values)
        discard(values)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a range of memory without gap or overlap, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
