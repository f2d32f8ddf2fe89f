"""How many floating-point operations the optimizers take that multiply matrices. Others take next to none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.layout import Chunk, Layout
from offload.sizes import MASTER_ITEM_BYTES

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


class MatrixWork(NamedTuple):
    """What the steps of matrices take.

    Attributes:
        flops: floating-point operations.
        up_bytes: to a device that makes them: masters, states and gradients.
        down_bytes: back.
        shapes: how many matrices there are of each shape.
    """

    flops: float
    up_bytes: int
    down_bytes: int
    shapes: Mapping[tuple[int, ...], int]


def matrix_work(layout: Layout, chunks: Iterable[Chunk]) -> MatrixWork:
    """What the steps of those parameters in chunks take that are stepped as matrices.

    Args:
        layout: of the trained parameters.
        chunks: some of its chunks.
    """
    flops, up_bytes, down_bytes = 0.0, 0, 0
    shapes: Counter[tuple[int, ...]] = Counter()
    for spec, numel in ((layout.specs[piece.param], piece.numel) for chunk in chunks for piece in chunk.pieces):
        if spec.whole is not None:
            flops += spec.whole.flops * numel / spec.numel
            shapes[spec.whole.shape] += spec.whole.flops > 0
            states = MASTER_ITEM_BYTES * (numel + sum(spec.whole.numels(spec.states)))
            up_bytes += states + spec.dtype.itemsize * numel  # with the gradient
            down_bytes += states
    return MatrixWork(flops, up_bytes, down_bytes, +shapes)
