"""Memory-centric tiling: a linear layer whose weight is too large for the device.

Its weight is never on the device as a whole. `F.linear` with it runs tile by tile. A *tile* is a run of output rows. It
is a unit of its own, fetched and released as any other in forward and backward, and a leaf of autograd, so that its
gradient leaves the device as it is made. The layer stays the module it is, and for any use but `F.linear` its weight is
a guarded parameter (guard.py), which is in RAM as a whole.

The gradient of the input is a sum over tiles, taken in fp32 and rounded once: see docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import torch_private
from offload.layout import Layout
from offload.model.fetch import StreamedUnits
from offload.model.flat_param import FlatParameters
from offload.model.torch_helpers import call_hidden


class Tiling:
    """Multiplies with tiled weights."""

    def __init__(self, layout: Layout, parameters: FlatParameters, units: StreamedUnits) -> None:
        self._units = units
        self._unit_of: dict[nn.Parameter, str] = {}
        self._tiles: dict[nn.Parameter, list[tuple[str, nn.Parameter]]] = {}  # in the order of the rows
        for index, leaf in parameters.tiles.items():
            flat = layout.flats[layout.slices[index].flat]
            weight = parameters.params[flat.params[0]]
            self._unit_of[weight] = flat.unit
            self._tiles.setdefault(weight, []).append((layout.slices[index].unit, leaf))

    def has(self, weight: Any) -> bool:
        """Whether `weight` is a parameter that has tiles."""
        return isinstance(weight, nn.Parameter) and weight in self._tiles

    def linear(self, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        """`F.linear` with a tiled weight."""
        self._units.apply(self._unit_of[weight])
        tiles = self._tiles[weight]
        biases: Sequence[Tensor | None] = [None] * len(tiles)
        if bias is not None:
            biases = bias.split([len(leaf) for _, leaf in tiles])
        carry = None
        if torch.is_grad_enabled() and inputs.requires_grad:
            carry = _Widen.apply(inputs, _may_have_tangents(inputs))  # type: ignore[no-untyped-call]
        outputs = []
        for (unit, leaf), own_bias in zip(tiles, biases, strict=True):
            call_hidden(leaf.requires_grad_, weight.requires_grad)
            output = None
            self._units.forward_begins(unit)
            try:
                x = inputs
                if carry is not None:
                    x, carry = _Carry.apply(inputs.detach(), carry)  # type: ignore[no-untyped-call]
                output = F.linear(x, leaf, own_bias)
            finally:
                self._units.forward_ends(unit, output)
            outputs.append(output)
        return torch.cat(outputs, -1)


def _may_have_tangents(tensor: Tensor) -> bool:
    """Whether derivatives may be taken forwards."""
    is_dual = torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
    return is_dual or torch_private.functorch_level() is not None


class _Widen(torch.autograd.Function):
    """An fp32 tensor of the shape of `x`. Its gradient is the gradient of `x`. It takes memory only if `has_memory`:
    torch gives a tangent the strides of its tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, has_memory: bool) -> Tensor:
        if has_memory:
            return torch.zeros_like(x, dtype=torch.float32)
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else grad.to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, _: None) -> Tensor | None:
        return None if of_x is None else of_x.float()


class _Carry(torch.autograd.Function):
    """`x` for one tile, and the carry for the next one.

    Backward adds the tile's gradient of `x` to the carry's. Forward derivatives of `x` are those of the carry."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), carry.view_as(carry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.dtype = inputs[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor | None, of_carry: Tensor | None) -> tuple[None, Tensor | None]:
        if of_x is None or of_carry is None:
            return None, of_carry if of_x is None else of_x.float()
        return None, of_carry + of_x

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_carry: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if of_carry is None:
            return None, None
        return of_carry.to(ctx.dtype), of_carry.view_as(of_carry)
