"""What stands in `p.grad` after the gradient has left: a forgotten call must not be silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from offload.errors import GradientMovedError


class MovedGradient(Tensor):
    """A tensor without storage on which every operation raises GradientMovedError.

    torch's own `clip_grad_norm_`, which would see no gradient and return 0.0 without a word, another optimizer's
    step, and code that reads or changes `p.grad`, thereby learn what to call instead.
    """

    parameter_name: str

    @staticmethod
    def of(param: Tensor, name: str) -> MovedGradient:
        """A marker for `param`: of its shape, dtype and device."""
        marker: MovedGradient = Tensor._make_wrapper_subclass(
            MovedGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        marker.parameter_name = name
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
    ) -> NoReturn:
        _refuse(func, [*args, *(kwargs or {}).values()])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        _refuse(func, [*args, *(kwargs or {}).values()])


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
