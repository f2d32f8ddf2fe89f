"""Memory-centric tiling: a linear layer whose weight is too large for the device.

Its weight is never on the device as a whole. `F.linear` with it runs tile by tile. A *tile* is a run of output rows. It
is a unit of its own, fetched and released as any other in forward and backward, and a leaf of autograd, so that its
gradient leaves the device as it is made. The layer stays the module it is, and for any use but `F.linear` its weight is
a guarded parameter (guard.py), which is in RAM as a whole. So it is where the weight has hooks, which want its whole
gradient.

The gradient of the input is a sum over tiles, taken in fp32 and rounded once: see docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import Layout
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.torch_helpers import call_hidden
from offload.model.unit import Unit


@torch_private.goes_past_subclasses
def has_hooks(weight: nn.Parameter) -> bool:
    """Whether somebody has hooks on a tiled weight, which would not see the gradients of its tiles.

    The hook that takes its gradient does not count.
    """
    hooks: Any = weight._post_accumulate_grad_hooks
    return bool(weight._backward_hooks) or len(hooks or ()) > 1


class Tiling:
    """Runs linear layers whose weights are tiled; see the top of this file."""

    def __init__(self, layout: Layout, parameters: FlatParameters, units: HeldUnits) -> None:
        self._units = units
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._tiles: dict[nn.Parameter, list[tuple[Unit, nn.Parameter]]] = {}  # in the order of the rows
        for index, leaf in parameters.tiles.items():
            flat = layout.flats[layout.slices[index].flat]
            weight = parameters.params[flat.params[0]]
            self._unit_of[weight] = parameters.units[flat.unit]
            self._tiles.setdefault(weight, []).append((parameters.units[layout.slices[index].unit], leaf))

    def runs(self, weight: Any) -> bool:
        """Whether `F.linear` with `weight` runs in tiles: it has tiles, and no hooks that need its whole gradient."""
        return isinstance(weight, nn.Parameter) and weight in self._tiles and not has_hooks(weight)

    def leaves_of(self, weight: Any) -> list[nn.Parameter]:
        """The tiles of a parameter; empty if it has none."""
        tiles = self._tiles.get(weight, ()) if isinstance(weight, nn.Parameter) else ()
        return [leaf for _, leaf in tiles]

    def linear(self, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        """Runs `F.linear` with a tiled weight."""
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
        if torch.is_grad_enabled() and weight.requires_grad and not _may_have_tangents(outputs[0]):
            outputs[0] = _Anchor.apply(outputs[0], weight, tiles[0][1], self._unit_of[weight].name)  # type: ignore[no-untyped-call]
        return torch.cat(outputs, -1)


def _may_have_tangents(tensor: Tensor) -> bool:
    """Whether forward-mode derivatives may be taken of a tensor."""
    is_dual = torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
    return is_dual or torch_private.functorch_level() is not None


class _Anchor(torch.autograd.Function):
    """The output of the first tile of a layer, whose graph leads to the weight, too.

    The weight gets no gradient from here. But a backward that asks for the weight, and would not get to its tiles, is
    seen this way, and so are hooks, which would get nothing.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: nn.Parameter, tile: nn.Parameter, name: str) -> Tensor:
        ctx.weight, ctx.tile, ctx.name = weight, tile, name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if has_hooks(ctx.weight):
            raise ConfigError(
                f"{ctx.name} runs in tiles, and got a hook for its gradient after its forward: register the hook "
                "before the forward, or give Tuning(tile=0)"
            )
        if _is_asked_for(ctx.weight) and not _is_asked_for(ctx.tile):
            raise ConfigError(
                f"backward(inputs=...) names {ctx.name}, which runs in tiles: leave inputs out, take the gradients "
                "from torch.autograd.grad, or give Tuning(tile=0)"
            )
        return grad, None, None, None


def _is_asked_for(leaf: nn.Parameter) -> bool:
    """Whether the backward that runs accumulates a gradient of a leaf; False in `torch.autograd.grad`."""
    with torch_private.PastSubclasses():
        if not leaf.requires_grad:
            return False
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    with suppress(RuntimeError):  # which torch.autograd.grad is answered with
        return bool(torch_private.will_run_node(node))
    return False


class _Widen(torch.autograd.Function):
    """An fp32 tensor of the shape of `x`, whose gradient is the gradient of `x`.

    It takes memory only if `has_memory`: torch gives a tangent the strides of its tensor.
    """

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

    Backward adds the tile's gradient of `x` to the carry's. Forward derivatives of `x` are those of the carry.
    """

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
