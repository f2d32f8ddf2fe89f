"""The contract of a gradient sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import AccumulationError
from offload.layout import Chunk


@dataclass(frozen=True)
class GradientScale:
    """By what the step multiplies the gradients that are held.

    Attributes: unscaled: the inverse of a loss scale, None if no GradScaler has met them yet; clip: the factor of
    clipping, None if they were not clipped.
    """

    unscaled: float | None = None
    clip: float | None = None

    @property
    def factor(self) -> float:
        return (1.0 if self.unscaled is None else self.unscaled) * (1.0 if self.clip is None else self.clip)

    @property
    def is_fixed(self) -> bool:
        """Whether it would be wrong for a gradient that joins those it was calculated from."""
        return self.unscaled is not None or self.factor != 1.0


AS_HELD = GradientScale()
"""Neither unscaled nor clipped."""


class Gradients(ABC):
    """Where gradients go. Parameters are named by their index in `layout.specs`.

    Attributes: accumulation, micro-batches a step; scale, by which the step multiplies what is held; factors, by which
    it multiplies that of one parameter besides.
    """

    accumulation: int
    scale: GradientScale
    factors: dict[int, float]

    def factor_of(self, param: int) -> float:
        """By what the step multiplies what is held of `param`."""
        return self.scale.factor * self.factors.get(param, 1.0)

    def set_factor(self, param: int, factor: float) -> None:
        """Makes `factor` that by which the step multiplies what is held of `param`."""
        own = factor / self.scale.factor if self.scale.factor else factor
        if own == 1.0:
            self.factors.pop(param, None)
        else:
            self.factors[param] = own

    def as_held(self) -> None:
        """Forgets all factors."""
        self.scale = AS_HELD
        self.factors.clear()

    @abstractmethod
    def line(self, param: int) -> Tensor:
        """What this rank holds of the gradient of `param`: 1-D, on the CPU, in the order of the parameter's memory."""

    @abstractmethod
    def put(self, param: int, line: Tensor) -> None:
        """Makes `line` what is held of the gradient of `param`, as `line` gives it. After `collect`."""

    @abstractmethod
    def taken(self, index: int) -> AbstractContextManager[Tensor]:
        """The gradients of a chunk's elements, for the step, which is the last to need them: shape (chunk.numel,), on
        the CPU."""

    def expect(self, chunks: Iterable[int]) -> None:  # noqa: B027
        """Announces in which order they will be `taken`."""

    @abstractmethod
    def chunk(self, index: int) -> Tensor:
        """The memory of a chunk's gradients, where they stay in RAM: shape (chunk.numel,)."""

    @abstractmethod
    def dtype(self, chunk: Chunk) -> torch.dtype:
        """Of a chunk's gradients."""

    @abstractmethod
    def has(self, param: int) -> bool:
        """Whether a gradient of `param` arrived since it was last forgotten."""

    @abstractmethod
    def arrive(self, param: int, grad: Tensor, start: int = 0) -> None:
        """Takes the gradient of one micro-batch: shape (numel,), on the model's device, as the parameter's dtype; or
        that of one of its tiles, from element `start` on.

        It may still be under way when this returns. Raises: AccumulationError if one more than declared came.
        """

    @abstractmethod
    def forget(self, param: int) -> None:
        """The next gradient of `param` begins anew."""

    @abstractmethod
    def forget_all(self) -> None:
        """The next gradients begin anew."""

    @abstractmethod
    def collect(self, params: Collection[int]) -> list[int]:
        """Waits until the gradients of `params`, all of which must have arrived, are in RAM, summed and checked.

        Returns: those of which there are gradients: `params`, and what other ranks have.
        """

    @abstractmethod
    def drain(self) -> None:
        """Waits for what is under way."""

    @abstractmethod
    def reset(self) -> None:
        """Drops everything, failures too: for going back to a commit."""

    @abstractmethod
    def norm(self, params: Collection[int]) -> float:
        """The 2-norm over `params`, in fp64; inf or nan if one of them is not finite. After `collect`.

        The sum over blocks is exactly rounded (fsum), so it does not depend on their order.
        """

    @abstractmethod
    def norms(self, params: Sequence[int], order: float = 2.0) -> list[float]:
        """The norms of each of `params`, as they are held, in fp64. After `collect`.

        Args: order: 2, for which the sums are there; others are computed from the values.
        """

    @abstractmethod
    def not_finite(self, params: Collection[int]) -> list[int]:
        """Which of `params` hold NaN or Inf. After `collect`."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way, as far as it writes into the arena."""


def too_often(name: str, accumulation: int) -> AccumulationError:
    """A gradient came once more than was declared."""
    return AccumulationError(
        f"{name} got its gradient a {_ordinal(accumulation + 1)} time before step(), and accumulation={accumulation}: "
        "declare how many backward passes come before each step, OffloadZero(..., accumulation=N), or call step() or "
        "zero_grad() after each (with reentrant checkpointing, a module used twice counts twice: set "
        "use_reentrant=False)"
    )


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
