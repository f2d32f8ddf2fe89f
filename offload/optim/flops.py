"""How many floating-point operations the optimizers take that multiply matrices. Others take next to none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

NEWTON_SCHULZ_ROUNDS = 5
"""That torch's Muon makes by default."""


def newton_schulz_flops(shape: Sequence[int], rounds: int = NEWTON_SCHULZ_ROUNDS) -> float:
    """Floating-point operations of a step of torch's Muon on a matrix.

    In each round x, with at most as many rows as columns, is multiplied by its transpose, the product by itself, and x
    by what comes out. In five rounds these are 20 m + 10 m^2 / n operations an element of a matrix of m x n.

    Args:
        shape: of the matrix.
        rounds: of the Newton-Schulz iteration.
    """
    rows, columns = sorted(shape)
    return float(rounds) * (2 * rows * rows * columns + 2 * rows**3 + 2 * rows * rows * columns)


FLOPS: dict[type, Callable[[Sequence[int], Mapping[str, Any]], float]] = {
    torch.optim.Muon: lambda shape, group: newton_schulz_flops(shape, group["ns_steps"]),
}
"""Of a step of a parameter, by the optimizer's class, for a shape and the options of a param group."""
