"""Memory-centric tiling: a linear layer whose weight is larger than what the device has room for.

Its weight is never on the device as a whole. `F.linear` with it runs tile by tile: a *tile* is a run of output rows,
and a unit of its own, gathered and released as any other, forward and backward, and a leaf of autograd, so that its
gradient leaves as it is made. The layer stays the module it is: what stands in the weight's place outside of
`gathered` is a guarded parameter (guard.py), with which `F.linear` multiplies tile by tile. As a whole it is in RAM,
for any other use.

The gradient of the input is a sum over tiles, taken in fp32 and rounded once: see docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.model.fetch import Streaming


class Tiling:
    """Args: tiles: of each tiled weight, the unit and the leaf of each tile, in the order of its rows; lands: brings
    the new values of a weight into the store."""

    def __init__(
        self,
        tiles: Mapping[nn.Parameter, Sequence[tuple[str, nn.Parameter]]],
        streaming: Streaming,
        lands: Callable[[nn.Parameter], None],
    ) -> None:
        self._tiles = tiles
        self._streaming = streaming
        self._lands = lands

    def has(self, weight: Any) -> bool:
        return isinstance(weight, nn.Parameter) and weight in self._tiles

    def linear(self, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        """`F.linear` with a tiled weight."""
        self._lands(weight)
        tiles = self._tiles[weight]
        biases: Sequence[Tensor | None] = [None] * len(tiles)
        if bias is not None:
            biases = bias.split([len(leaf) for _, leaf in tiles])
        carry = _Widen.apply(inputs) if torch.is_grad_enabled() and inputs.requires_grad else None  # type: ignore[no-untyped-call]
        outputs = []
        for (unit, leaf), part in zip(tiles, biases, strict=True):
            leaf.requires_grad_(weight.requires_grad)
            output = None
            self._streaming.forward_begins(unit)
            try:
                x = inputs
                if carry is not None:
                    x, carry = _Carry.apply(inputs.detach(), carry)  # type: ignore[no-untyped-call]
                output = F.linear(x, leaf, part)
            finally:
                self._streaming.forward_ends(unit, output)
            outputs.append(output)
        return torch.cat(outputs, -1)


class _Widen(torch.autograd.Function):
    """An fp32 tensor of the shape of `x`, without memory, whose gradient is that of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(ctx.dtype)


class _Carry(torch.autograd.Function):
    """`x` for one tile, and the carry for the next: backwards, a tile's gradient of `x` is added to the carry's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), carry.view_as(carry)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor | None, of_carry: Tensor | None) -> tuple[None, Tensor | None]:
        if of_x is None or of_carry is None:
            return None, of_carry if of_x is None else of_x.float()
        return None, of_carry + of_x
