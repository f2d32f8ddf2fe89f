"""Tensors and torch functions: what has tensors inside, what needs no values of them, what a move would change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ATTRIBUTES = """
    shape dtype device layout grad requires_grad is_leaf grad_fn ndim names itemsize nbytes output_nr retains_grad _base
    _backward_hooks _cdata is_cuda is_cpu is_meta is_mps is_xpu is_xla is_sparse is_sparse_csr is_quantized is_nested
    is_mkldnn is_vulkan is_ipu is_maia is_mtia
"""
_METHODS = """
    size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_complex is_floating_point
    get_device __len__ __hash__ is_same_size is_signed dim_order is_inference has_names _is_view is_conj is_neg
    _is_zerotensor
"""


def torch_functions(attributes: str = "", methods: str = "") -> set[Any]:
    """As `__torch_function__` gets them: reading an attribute of a tensor, calling a method; those this torch has.

    Args: names with spaces between them.
    """
    reads = {getattr(Tensor, name).__get__ for name in attributes.split() if hasattr(Tensor, name)}
    return reads | {getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name)}


METADATA = frozenset(
    {
        *torch_functions(_ATTRIBUTES, _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.get_device, torch.is_same_size),
        torch._has_compatible_shallow_copy_type,
    }
)
"""What is asked of a tensor without its values."""

MOVES = frozenset(torch_functions(methods="to cpu cuda float half bfloat16 double type_as"))
"""What returns the tensor itself where there is nothing to do."""


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers and plain objects (dataclasses, a library's output classes), each once."""
    seen: set[int] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Tensor):
            if id(node) not in seen:
                yield node
        elif id(node) not in seen:
            left.extend(_inside(node))
        seen.add(id(node))


def is_no_move(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func`, one of MOVES, leaves args[0] what and where it is.

    Torch copies from "cpu" to "cpu:0", which is no other device.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        try:
            moved = func(tensor, *args[1:], **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return False
        if moved is tensor:
            return True
        is_same = moved.dtype is tensor.dtype and moved.is_cpu and tensor.is_cpu and moved.layout is tensor.layout
        return is_same and not kwargs.get("copy", False)


def _inside(node: Any) -> Iterable[Any]:
    if node is None or isinstance(node, str | bytes | int | float | type | nn.Module):
        return
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list | tuple | set | frozenset | deque):
        yield from node
    for kind in type(node).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(node, name, None)
    yield from getattr(node, "__dict__", {}).values()
