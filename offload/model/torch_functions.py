"""What torch's functions do with a tensor, in one table: `kind_of(func)`.

A held parameter (guard.py), a gradient that has left the device (gradient.py) and a state in its tier (states.py) are
tensors whose values are elsewhere. Each gets torch's functions through `__torch_function__`, and has to know what a
function needs of it.

[Note: kinds of functions]
| kind     | what a function does with a tensor     | a held parameter              | a gradient that is elsewhere     |
|----------|----------------------------------------|-------------------------------|----------------------------------|
| META     | asks what it is; reads no values       | answers as it is              | answers as it is                 |
| SET      | changes what it is; reads no values    | is changed as it is           | a copy of the values is changed  |
| LIKE     | makes one that gets none of its values | answers as it is              | answers without values           |
| DETACH   | gives its values without their graph   | as READ                       | is itself: it has no graph       |
| MOVE     | gives itself if it has nothing to do   | is itself then; else READ     | is itself then; else READ        |
| READ     | reads values                           | is current while it runs      | runs on a copy of the values     |
| WRITE    | writes to its first argument           | as READ; the version tells it | runs on a copy that goes back    |
| EXPORT   | gives its memory to another library    | as READ; a copy, if streamed  | as READ                          |
| REFUSE   | gives it other memory                  | raises, if streamed           | raises                           |
| BACKWARD | runs autograd, whose threads may enter | runs without the lock         | as READ                          |

States behave as gradients do, but refuse what changes them.

The functions of most kinds are named below, and a few that write. Other READs and WRITEs are told from torch's names,
in `_by_name`, or from an operator's schema. A stand-in answers `share_memory_()` and `requires_grad_()` with itself.
Whatever its kind is, a function writes to what it got as `out=`. Some write where no name tells it (running statistics,
`inplace=True`). So versions of tensors, which torch counts up, have the last word on whether a call has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor

from offload import torch_private
from offload.model.torch_helpers import module_on_the_move


class Kind(Enum):
    """What a function of torch does with its tensors; see [Note: kinds of functions].

    SET, LIKE, DETACH, EXPORT and BACKWARD are kinds of their own, because guards or stand-ins treat each of them
    differently from every other kind.
    """

    META = auto()
    SET = auto()
    LIKE = auto()
    DETACH = auto()
    MOVE = auto()
    READ = auto()
    WRITE = auto()
    EXPORT = auto()
    REFUSE = auto()
    BACKWARD = auto()

    __hash__ = object.__hash__  # that of Enum is written in Python, and each use of a parameter looks up its kind


def _getters(names: str) -> Iterable[Any]:
    """Reads of attributes of a tensor as `__torch_function__` gets them, of those that this version of torch has."""
    return (getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name))


def _methods(names: str, place: Any = Tensor) -> Iterable[Any]:
    """Methods of a tensor, or functions of torch, of those that this version of torch has."""
    return (getattr(place, name) for name in names.split() if hasattr(place, name))


def _setters(names: str) -> Iterable[Any]:
    """Writes of attributes of a tensor."""
    return (getattr(Tensor, name).__set__ for name in names.split())


_GRAD: Any = Tensor.grad
_ATTRIBUTES_SET = (*_setters("grad requires_grad"), _GRAD.__delete__)

_WRITES_ELSEWHERE = frozenset(_methods("_native_batch_norm_legit fused_moving_avg_obs_fake_quant", torch))
"""Functions that write to another argument than the first, and say so in their schema."""

_SORTED: dict[Kind, tuple[Any, ...]] = {
    Kind.META: (
        *_getters(
            "shape dtype device layout grad requires_grad is_leaf grad_fn ndim names itemsize nbytes output_nr "
            "retains_grad _base _grad _backward_hooks _post_accumulate_grad_hooks _cdata is_cuda is_cpu is_meta is_mps "
            "is_xpu is_xla is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan is_ipu is_maia is_mtia"
        ),
        *_methods(
            "size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_complex "
            "is_floating_point get_device __len__ __hash__ is_same_size is_signed dim_order is_inference has_names "
            "_is_view is_conj is_neg _is_zerotensor"
        ),
        *_methods("numel is_complex is_floating_point get_device is_same_size is_signed is_inference", torch),
        *(torch.result_type, torch_private.has_compatible_type),
    ),
    Kind.SET: (
        *_ATTRIBUTES_SET,
        *_methods("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad"),
    ),
    # Those that are given a value (full_like, new_tensor) may be given one of a tensor whose values are elsewhere.
    Kind.LIKE: (
        *_methods("new_empty new_zeros new_ones"),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like),
    ),
    Kind.DETACH: (*_getters("data"), Tensor.detach, Tensor.detach_, torch.detach, torch.detach_),
    Kind.MOVE: tuple(_methods("to cpu cuda xpu mtia float half bfloat16 double type_as")),
    Kind.EXPORT: (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, torch_private.to_dlpack),
    Kind.REFUSE: (
        *_methods("share_memory_ set_ resize_ resize_as_ resize_as_sparse_"),
        *_methods("resize_as_ resize_as_sparse_", torch),
    ),
    Kind.BACKWARD: (torch.autograd.grad, torch.autograd.backward, Tensor.backward),
    Kind.WRITE: (*_setters("data real imag"), Tensor.module_load, *_WRITES_ELSEWHERE),
}
"""The functions that are sorted by hand."""

_CHANGES_NOTHING = (Tensor.requires_grad_, Tensor.share_memory_)
"""Functions that return their tensor, and change nothing of one that has no memory and no graph."""

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in "add sub mul matmul truediv div floordiv mod pow lshift rshift and or xor".split()  # noqa: SIM905
)


def _writes_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument, as torch names its functions."""
    if name.endswith("__"):
        return name in _IN_PLACE_OPERATORS or name in ("__setitem__", "__set__", "__delete__")
    return name.endswith("_")


def _by_name(func: Any) -> Kind:
    """The kind of a function that is not sorted by hand.

    It is READ or WRITE, but for what `__torch_dispatch__` gets of a REFUSE: `set_` does not pass `__torch_function__`.
    """
    if isinstance(func, torch_private.OpOverload):
        method = getattr(Tensor, func.__name__.partition(".")[0], None)
        if _kinds.get(method) is Kind.REFUSE:
            return Kind.REFUSE
        return Kind.WRITE if func._schema.is_mutable else Kind.READ
    return Kind.WRITE if _writes_in_place(getattr(func, "__name__", "")) else Kind.READ


class _Kinds(dict[Any, Kind]):
    """Kinds by function. Those of torch's own functions are kept, but not of functions that somebody makes anew."""

    _IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)

    def __missing__(self, func: Any) -> Kind:
        kind = _by_name(func)
        is_of_torch = isinstance(func, FunctionType) and func.__module__.startswith("torch.")
        if isinstance(func, self._IN_C) or (is_of_torch and func.__closure__ is None):
            self[func] = kind
        return kind


_kinds = _Kinds((func, kind) for kind, functions in _SORTED.items() for func in functions)

kind_of: Callable[[Any], Kind] = _kinds.__getitem__
"""The kind of a function, as `__torch_function__` or `__torch_dispatch__` gets it.

It is no more than a lookup in a dict, because each use of a parameter asks for it.
"""


def changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments that a call changes, as far as torch's names tell: tensors, or lists of them."""
    outputs = () if kwargs.get("out") is None else (kwargs["out"],)
    is_first = kind_of(func) in (Kind.WRITE, Kind.REFUSE) or func in _ATTRIBUTES_SET
    if not is_first or func in _WRITES_ELSEWHERE:
        return outputs
    return (*(args or tuple(kwargs.values()))[:1], *outputs)  # torch.nn.init gives all by keyword


UNCOUNTED = (Tensor.apply_, Tensor.map_, Tensor.map2_)
"""Functions that write to their first argument, whose version torch does not count up then."""


def counting(func: Any) -> Callable[..., Any]:
    """A function that does as `func` does, and counts up the version of what it writes to."""
    return partial(_count_up, func) if func in UNCOUNTED else func


def _count_up(func: Any, *args: Any, **kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if not args[0].is_inference():
        torch.autograd.graph.increment_version(args[0])
    return result


def takes_lists(func: Any) -> bool:
    """Whether a function does the same with each element of lists of tensors."""
    return getattr(func, "__name__", "").startswith("_foreach_")


@torch_private.goes_past_subclasses
def moved_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device to which `func`, a MOVE, moves args[0]; None if it copies or changes it otherwise.

    Torch copies from "cpu" to "cpu:0", which is the same device. What `module.to(memory_format=...)` asks for does not
    count: strides are those that a parameter has where it is held.
    """
    if "memory_format" in kwargs and module_on_the_move() is not None:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    tensor = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    try:
        moved = func(tensor, *args[1:], **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None
    if moved.dtype is not tensor.dtype or moved.layout is not tensor.layout or kwargs.get("copy", False):
        return None
    return device_of(moved)


@torch_private.goes_past_subclasses
def device_of(tensor: Tensor) -> torch.device:
    """The device of a tensor, in the form in which `moved_to` names it."""
    return torch.device("cpu") if tensor.device.type == "cpu" else tensor.device


def answer_without_values(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], own: type[Tensor], home: torch.device | None = None
) -> Any:
    """What a tensor without memory answers a call with, if that needs none of its values.

    Args:
        func: called with such tensors.
        args: its arguments.
        kwargs: its keywords.
        own: the class of tensors without memory.
        home: a device on which the values are anyway; None: there is none.

    Returns:
        The result; NotImplemented if values are needed.
    """
    one = args[0] if args else None
    if not isinstance(one, own):
        return NotImplemented
    kind = kind_of(func)
    if kind is Kind.DETACH or func in _CHANGES_NOTHING:
        return one
    if kind is Kind.LIKE:
        like = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or one.device})
    if kind is Kind.MOVE and moved_to(func, args, kwargs) in (device_of(one), home or device_of(one)):
        return one
    return NotImplemented
