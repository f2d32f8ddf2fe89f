"""What a parameter is while its memory is elsewhere: shape, dtype and gradient as ever, and no values to use.

Its memory is a storage of size 0, and torch would read from address 0. Two guards stand before that. The Python class
of a released parameter lets only questions pass that need no values. And its version is one that no graph has saved, so
that autograd, which knows nothing of classes, raises before it looks at a saved parameter that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload.errors import ReleasedParameterError

NO_VERSION = 1 << 31
"""Of a released parameter: no graph has saved it."""

_QUESTIONS = """
    shape dtype device layout grad requires_grad is_leaf grad_fn ndim names itemsize nbytes output_nr retains_grad _base
    _version _backward_hooks _post_accumulate_grad_hooks is_cuda is_cpu is_meta is_mps is_xpu is_xla is_sparse
    is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan is_ipu is_maia is_mtia
"""
_METHODS = """
    requires_grad_ size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_complex
    is_floating_point get_device register_hook register_post_accumulate_grad_hook __len__ __hash__
"""
_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad

_NEEDS_NO_VALUES = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _QUESTIONS.split() if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(_GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__set__),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.get_device),
    }
)


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are in another tier just now; any use of them raises ReleasedParameterError."""

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("a deep copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("saving")

    def __dlpack__(self, **unused: Any) -> NoReturn:
        _refuse("an export to another library")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:  # which may run modules again: their guards stay up
            return func(*_as_edges(args), **{key: _as_edges(value) for key, value in (kwargs or {}).items()})
        if func not in _NEEDS_NO_VALUES:
            _refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _as_edges(tree: Any) -> Any:
    """`tree` (nested lists, tuples) with the place in a graph for each released parameter."""
    if isinstance(tree, ReleasedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(tree)
    return tuple(_as_edges(one) for one in tree) if type(tree) in (list, tuple) else tree


def _refuse(what: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} needs the values of a parameter that is not on the device outside its unit's forward and backward: "
        "use it inside `with optimizer.gathered(module_or_params):`"
    )


def release(params: Sequence[nn.Parameter], kinds: Sequence[type[ReleasedParameter]]) -> None:
    """Puts the guards before `params`. Args: kinds: what each is until `restore`."""
    torch._C._autograd._unsafe_set_version_counter(tuple(params), (NO_VERSION,) * len(params))
    for param, kind in zip(params, kinds, strict=True):
        param.__class__ = kind


def restore(params: Sequence[nn.Parameter], versions: Sequence[int], classes: Sequence[type[nn.Parameter]]) -> None:
    """Takes the guards away; their values are there again, of `versions`."""
    for param, kind in zip(params, classes, strict=True):
        param.__class__ = kind
    torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
