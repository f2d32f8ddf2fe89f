"""Memory-centric tiling: a linear layer whose weight is too large for the device.

Its weight is never on the device as a whole. `F.linear` with it runs tile by tile. A *tile* is a run of output rows. It
is a unit of its own, fetched and released as any other in forward and backward, and a leaf of autograd, so that its
gradient leaves the device as it is made. The layer stays the module it is, and for any use but `F.linear` its weight is
a guarded parameter (guard.py), which is in RAM as a whole. So it is where the weight has hooks, which want its whole
gradient.

The gradient of the input is a sum over tiles, taken in fp32 and rounded once: see docs/exactness.md.

[Note: the loss of a tiled output layer]
Its loss (loss.py) runs over tiles in the forward, from the first to the last, and in the backward the other way round.
Each tile has a node, so that it is fetched for that; all chunks of tokens are computed while it is there. A block of
the vocabulary may lie in several tiles. Its rows are put together then, and it is computed at the last one of them: in
a forward at the one of its last row, in a backward at the one of its first row. So the gradient of a tile may be
complete only when the backward has come to the tile before, and it leaves from the node of that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import Layout
from offload.model import loss as losses
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

    def loss(self, hidden: Tensor, weight: nn.Parameter, bias: Tensor | None, loss: losses.TokenLosses) -> Tensor:
        """Runs the loss of an output layer with a tiled weight; see [Note: the loss of a tiled output layer]."""
        self._units.apply(self._unit_of[weight])
        tiles = self._tiles[weight]
        makes_graph = torch.is_grad_enabled()
        needed = [makes_graph and one is not None and one.requires_grad for one in (hidden, weight, bias)]
        run = _LossInTiles(loss, hidden.detach(), bias, [leaf for _, leaf in tiles], needed)
        result: Tensor | None = None
        for number, (unit, leaf) in enumerate(tiles):
            call_hidden(leaf.requires_grad_, weight.requires_grad)
            output = None
            self._units.forward_begins(unit)
            try:
                with losses.exactly(hidden.device):
                    run.see(number)
                    value = loss.end_forward() if leaf is tiles[-1][1] else hidden.new_zeros((), dtype=loss.wide)
                inputs = (hidden, bias) if result is None else (result, None)
                done = [tiles[at][1] for at in run.completes(number)]
                output = _TileOfLoss.apply(value, run, number, *inputs, *done)  # type: ignore[no-untyped-call]
            finally:
                self._units.forward_ends(unit, output)
            result = output
        if needed[1]:
            result = _Anchor.apply(result, weight, tiles[-1][1], self._unit_of[weight].name)  # type: ignore[no-untyped-call]
        assert result is not None
        return result


class _LossInTiles:
    """One call of the loss of a tiled output layer.

    Args:
        loss: the loss.
        hidden: `(N, H)`.
        bias: `(V,)`, or None.
        leaves: the tiles.
        needed: whether gradients of `hidden`, the weight and the bias are wanted.

    Attributes:
        loss: the loss.
        hidden: what the node of the last tile saves.
        leaves: the tiles.
        needed: as above.
    """

    def __init__(
        self,
        loss: losses.TokenLosses,
        hidden: Tensor,
        bias: Tensor | None,
        leaves: Sequence[nn.Parameter],
        needed: Sequence[bool],
    ) -> None:
        self.loss = loss
        self.hidden: Tensor | None = hidden
        self.leaves = leaves
        self.needed = needed
        self._bias = None if bias is None else bias.detach().clone().to(loss.dtype)
        ends = list(accumulate(len(leaf) for leaf in leaves))
        self._ranges = [range(end - len(leaf), end) for end, leaf in zip(ends, leaves, strict=True)]
        self._rows: dict[int, Tensor] = {}  # by its first word: a block of which not all tiles were met

    def completes(self, number: int) -> list[int]:
        """The tiles whose gradients are complete when a backward has computed a tile."""
        found = []
        for at, words in enumerate(self._ranges):
            first = words.start // losses.BLOCK * losses.BLOCK  # of the last block that a backward computes of it
            if first in self._ranges[number]:
                found.append(at)
        return found

    def _blocks(self, number: int, *, up: bool) -> Iterator[tuple[slice, Tensor]]:
        """The blocks that are complete with a tile, and their rows, in the dtype of products.

        Args:
            number: of the tile, whose values are there.
            up: whether tiles are met from the first one on.
        """
        own, leaf, dtype = self._ranges[number], self.leaves[number], self.loss.dtype
        found = [one for one in losses.blocks(self.loss.words) if one.start < own.stop and one.stop > own.start]
        for block in found if up else reversed(found):
            start, stop = max(block.start, own.start), min(block.stop, own.stop)
            rows = leaf[start - own.start : stop - own.start].to(dtype)
            if (start, stop) != (block.start, block.stop):
                if block.start not in self._rows:
                    self._rows[block.start] = rows.new_empty(block.stop - block.start, rows.shape[1])
                self._rows[block.start][start - block.start : stop - block.start] = rows
                if (stop if up else start) != (block.stop if up else block.start):
                    continue
                rows = self._rows.pop(block.start)
            yield block, rows

    def see(self, number: int) -> None:
        """Takes the words of a tile into the losses."""
        assert self.hidden is not None
        for block, rows in self._blocks(number, up=True):
            for tokens in self.loss.chunks():
                raw = F.linear(self.hidden[tokens], rows, None if self._bias is None else self._bias[block])
                self.loss.see(tokens, block.start, raw)

    def begin_backward(self, hidden: Tensor, of_result: Tensor) -> None:
        """Called when a backward comes to the last tile.

        Args:
            hidden: `(N, H)`.
            of_result: the gradient of the result.
        """
        self._hidden = hidden
        self._factor, self._of_tokens = self.loss.factors(of_result)
        self._sums = losses.Sums(self.loss, hidden, has_hidden=self.needed[0])
        self._of_bias = torch.zeros(self.loss.words, dtype=self.loss.wide, device=hidden.device)
        self._of_tiles: dict[int, Tensor] = {}
        self._rows = {}

    def go_back(self, number: int) -> list[Tensor | None]:
        """Computes the gradients of the words of a tile.

        Returns:
            Of each tile that `completes` names its gradient.
        """
        loss, of_rows = self.loss, None
        for block, rows in self._blocks(number, up=False):
            of_rows = torch.zeros_like(rows, dtype=loss.wide) if self.needed[1] else None
            for tokens in loss.chunks():
                raw = F.linear(self._hidden[tokens], rows, None if self._bias is None else self._bias[block])
                grad = loss.gradient(tokens, block.start, raw, loss.lse[tokens], self._of_tokens)
                self._sums.add(tokens, grad, rows, of_rows, self._of_bias[block] if self.needed[2] else None)
            if of_rows is not None:
                self._split(block, of_rows)
        return [self._of_tiles.pop(at, None) for at in self.completes(number)]

    def _split(self, block: slice, of_rows: Tensor) -> None:
        """Gives the gradient of a block to the tiles in which it lies."""
        of_rows = of_rows.mul_(self._factor)
        for at, (words, leaf) in enumerate(zip(self._ranges, self.leaves, strict=True)):
            start, stop = max(block.start, words.start), min(block.stop, words.stop)
            if start < stop:
                if at not in self._of_tiles:
                    self._of_tiles[at] = torch.empty(leaf.shape, dtype=leaf.dtype, device=of_rows.device)
                part = of_rows[start - block.start : stop - block.start]
                self._of_tiles[at][start - words.start : stop - words.start] = part

    def end_backward(self, hidden: torch.dtype, bias: torch.dtype | None) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `hidden` and of the bias, in these dtypes, after all tiles."""
        of_hidden = losses.scaled(self._sums.of_hidden, self._factor, hidden)
        of_bias = None if bias is None else losses.scaled(self._of_bias, self._factor, bias)
        del self._hidden, self._sums, self._of_bias
        return of_hidden, of_bias


class _TileOfLoss(torch.autograd.Function):
    """The node of a tile in the graph of a loss: it is computed when the one of the tile after it was."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        run: _LossInTiles,
        number: int,
        before: Tensor,
        bias: Tensor | None,
        *done: nn.Parameter,
    ) -> Tensor:
        ctx.run, ctx.number = run, number
        ctx.dtypes = (before.dtype, None if bias is None else bias.dtype)
        saved: list[Tensor | None] = [run.leaves[number]]
        if number == len(run.leaves) - 1:
            saved.append(run.hidden)
            run.hidden = None
        ctx.save_for_backward(*saved)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        run: _LossInTiles = ctx.run
        _, *hidden = ctx.saved_tensors  # which checks that nobody has written to the tile
        with losses.exactly(of_result.device):
            if hidden:
                run.begin_backward(hidden[0], of_result)
            of_done = run.go_back(ctx.number)
            if ctx.number:
                before: tuple[Tensor | None, Tensor | None] = (of_result.new_zeros(()), None)
            else:
                before = run.end_backward(*ctx.dtypes)
                if not run.needed[2]:
                    before = before[0], None
        return (None, None, None, *before, *of_done)


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
