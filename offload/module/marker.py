"""What stands in `p.grad` after the gradient has left: a forgotten call must not be silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from offload.errors import GradientMovedError

Unscale = Callable[[Sequence[Tensor], Tensor, Tensor], bool]
"""Called with all gradients that a GradScaler found, its found_inf and the inverse of its scale; returns whether there
is still somebody to answer."""

_UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_
_DTYPE: Any = Tensor.dtype
_IS_SPARSE: Any = Tensor.is_sparse
_DEVICE: Any = Tensor.device
_LOOKS = (_DTYPE.__get__, _IS_SPARSE.__get__, _DEVICE.__get__)
"""What a GradScaler asks before it calls that function."""


class MovedGradient(Tensor):
    """A tensor without storage on which every operation raises GradientMovedError.

    torch's own `clip_grad_norm_`, which would see no gradient and return 0.0 without a word, another optimizer's
    step, and code that reads or changes `p.grad`, thereby learn what to call instead.

    A GradScaler is answered. Before it unscales it looks at dtype, device and is_sparse, and refuses fp16, because
    to unscale in place would lose what the scale is for. That of a marker is fp32, in which the step will multiply.
    """

    parameter_name: str
    unscale: Unscale | None

    @staticmethod
    def of(param: Tensor, name: str, unscale: Unscale | None = None) -> MovedGradient:
        """A marker for `param`: of its shape, dtype and device. Args: unscale: answers a GradScaler."""
        marker: MovedGradient = Tensor._make_wrapper_subclass(
            MovedGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        marker.parameter_name = name
        marker.unscale = unscale
        return marker

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"MovedGradient({self.parameter_name})"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return torch.float32 if func == _DTYPE.__get__ else func(*args)
        if func is not _UNSCALE or len(args) != 3 or not _answers(*args):
            _refuse(func, [*args, *(kwargs or {}).values()])
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        _refuse(func, [*args, *(kwargs or {}).values()])


def _answers(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> bool:
    unscale = next(grad.unscale for grad in grads if isinstance(grad, MovedGradient))
    return unscale is not None and unscale(grads, found_inf, inverse)


def _refuse(func: Any, args: Sequence[Any]) -> NoReturn:
    name = next((arg.parameter_name for arg in _flatten(args) if isinstance(arg, MovedGradient)), "a parameter")
    operation = getattr(func, "__name__", str(func))
    raise GradientMovedError(
        f"{operation} on the .grad of {name}, whose gradient has moved to where the optimizer keeps it: use "
        "optimizer.clip_grad_norm_(max_norm) to clip, optimizer.grad(p) to read it, optimizer.zero_grad() to drop it, "
        "and only this optimizer's step()"
    )


def _flatten(args: Sequence[Any]) -> list[Any]:
    return [inner for arg in args for inner in (_flatten(arg) if isinstance(arg, list | tuple) else [arg])]


def is_moved(grad: Tensor | None) -> bool:
    """Whether `grad` is a marker; asks nothing of it that would raise."""
    return type(grad) is MovedGradient
