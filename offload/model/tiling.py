"""Tiles: large weights that are on the device part by part.

A weight that is larger than the device has room for is cut along its first dimension. A *tile* is a run of its rows:
output rows of an nn.Linear, rows of an nn.Embedding, matrices of a parameter with three dimensions, such as the experts
of a layer. It is a unit of its own, fetched and released as any other in forward and backward, and a leaf of autograd,
so that its gradient leaves the device as it is made. The module stays the module it is: calls of torch with the weight
are answered here, one tile after the other.

[Note: the loss of a tiled output layer]
Its loss (loss.py) runs over tiles in the forward, from the first to the last, and in the backward the other way round.
Each tile has a node, so that it is fetched for that; all chunks of tokens are computed while it is there. A block of
the vocabulary may lie in several tiles. Its rows are put together then, and it is computed at the last one of them: in
a forward at the one of its last row, in a backward at the one of its first row. So the gradient of a tile may be
complete only when the backward has come to the tile before, and it leaves from the node of that one.

[Note: calls that run in tiles]
| call                                          | of     | how                                                         |
|-----------------------------------------------|--------|-------------------------------------------------------------|
| `F.linear(x, w)`                              | 2 dims | outputs side by side                                        |
| `F.embedding(ids, w)`, `w[ids]`               | any    | each tile's rows are looked up, then put in order           |
| `w[e]`, `w.unbind()`; `w[a:b]` in one tile    | 3 dims | a view of a tile; what uses the view fetches the tile again |
| `w.transpose(1, 2)`, `w.mT`                   | 3 dims | a view without values, for one of the products below        |
| `grouped_mm(x, w, offs)`, and with `w.mT`     | 3 dims | the rows of `x` of each tile's matrices                     |
| `bmm(x, w)`, `bmm(w, x)`, `x @ w`             | 3 dims | the matrices of `x` of each tile                            |
| `einsum` whose output has the first dimension | 3 dims | that part of the output                                     |

Indexing and views are answered inside the forward of a unit around the weight: elsewhere somebody may want to write to
a view. For all other calls the weight is a guarded parameter (guard.py) and there as a whole. So it is where it has
hooks, which want its whole gradient.

Where the routing says which rows are used (ids, `offs`), the host waits for it, and only tiles with such rows are
fetched. Each row has an output of its own, so no sum is cut: the bits are those of the whole weight. But where each
tile meets the same input (`F.linear`; `einsum` with an operand without the first dimension), the gradient of that input
is a sum over tiles, taken in fp32 and rounded once: see docs/exactness.md.

A tile that nobody used gets no gradient from autograd where the whole weight would get zeros. The gradient buffer fills
them in (grads/local.py, grads/reduce_scatter.py).

[Note: tiles of quantised weights]
A tile has a part of each inner tensor of a weight ([Note: rows of inner tensors] in inner.py). Of a wrapper it is a
wrapper around these parts, and its class computes with it as with the whole one. So nothing here knows a format, and
rows, pieces and products have the bits that the class gives them. A format that is no wrapper has its codes as the
parameter itself, and its scales as tensors beside: calls with either are answered with its own part of the tile.

A transposed view of a wrapper without values, and rows of several tiles that are put together, have the form that the
class makes of a twin on the meta device, around inner tensors that are made here.

[Note: tiles over ranks]
Over ranks a tile has equally many rows of each rank's shard, so each of them gathers and reduces an equal part of it.
Where each rank has all parameters (stages 1 and 2), it fetches the tiles that its own routing names. Where ranks share
them (stage 3), a fetch needs all ranks, and their routings differ. So a call uses all tiles there, in their order, with
no rows where there are no tokens: forward and backward of every rank gather the same, and each tile has a gradient.
Views of single rows would come in another order on each rank, and are refused.

Where tiles may owe steps (optim/late.py), one that no rank has tokens for would come for nothing, and its states from
the disk with it. So ranks tell one another there which tiles they have tokens for, once a call, and all use those.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import torch_private
from offload.errors import ConfigError
from offload.layout import Layout
from offload.model import loss as losses
from offload.model.fetch import HeldUnits
from offload.model.flat_param import FlatParameters
from offload.model.held_param import HeldParam
from offload.model.inner import form_of, in_form_of, is_wrapper, kind_of, leaves_of, shape_of, twin_of
from offload.model.torch_helpers import call_hidden
from offload.model.unit import Unit

_log = logging.getLogger(__name__)


@torch_private.goes_past_subclasses
def has_hooks(weight: nn.Parameter) -> bool:
    """Whether somebody has hooks on a tiled weight, which would not see the gradients of its tiles.

    The hook that takes its gradient does not count.
    """
    hooks: Any = weight._post_accumulate_grad_hooks
    return bool(weight._backward_hooks) or len(hooks or ()) > 1


class Tile(NamedTuple):
    """Rows of a tiled weight.

    Attributes:
        unit: the unit that has them.
        leaf: them, as a leaf of autograd, or as a wrapper.
        spans: them, as runs of rows [start, stop) of the weight, one of each rank's shard.
    """

    unit: Unit
    leaf: Any
    spans: tuple[tuple[int, int], ...]


class TiledWeight:
    """A weight that is on the device tile by tile, or an inner tensor of it.

    Args:
        weight: the model's parameter, or the inner tensor.
        leaves: its plain tensors: itself, or of a wrapper those that it is made of.
        unit: its unit, whose update brings new values.
        shards: how many shards it has, of equally many rows each. A tile has some rows of every shard.
        has_views: whether a row of it is a view of a tile: it has three dimensions, or is a part of one that has.
        is_late: whether its tiles may owe steps.

    Attributes:
        tiles: in the order of the rows of a shard.
        rows: how many rows it has.
        is_wrapper: whether it is a wrapper.
        twin: see `twin_of`.
        transposed: the leaves of the transposed view of its twin, if that is a view.
    """

    def __init__(
        self, weight: Any, leaves: Sequence[Tensor], unit: Unit, shards: int, *, has_views: bool, is_late: bool
    ) -> None:
        self.weight = weight
        self.leaves = leaves
        self.unit = unit
        self.has_views = has_views
        self.is_late = is_late
        self.tiles: list[Tile] = []
        self.rows = len(weight)
        self.is_wrapper = is_wrapper(kind_of(weight))
        self.twin = twin_of(weight)
        self._shards = shards
        self._in_shard = self.rows // shards

    @cached_property
    def transposed(self) -> Any:
        """The transposed view of its twin. None if it has none, or if that looks like the twin itself."""
        if self.weight.dim() != 3:
            return None
        try:
            made = self.twin.transpose(1, 2)
        except (RuntimeError, TypeError, ValueError, AttributeError):  # of the class, which has none
            return None
        pairs = zip(leaves_of(self.twin), leaves_of(made), strict=False)
        are_views = all(one.untyped_storage()._cdata == other.untyped_storage()._cdata for one, other in pairs)
        is_same = kind_of(made) is kind_of(self.twin) and are_views
        return made if is_same and form_of(made) != form_of(self.twin) else None

    def add(self, unit: Unit, leaf: Any) -> None:
        """Adds the next tile."""
        first = self.tiles[-1].spans[0][1] if self.tiles else 0
        starts = range(first, self.rows, self._in_shard)
        self.tiles.append(Tile(unit, leaf, tuple((start, start + len(leaf) // self._shards) for start in starts)))

    def place(self, rows: Any) -> tuple[Any, Any]:
        """Where rows are: the numbers of their tiles, and their places in these.

        Args:
            rows: their numbers, an int or a tensor of any shape.
        """
        shard, within = rows // self._in_shard, rows % self._in_shard
        step = self.tiles[0].spans[0][1]
        tile = within // step
        last = len(self.tiles) - 1
        rows_of_last = self._in_shard - last * step  # of a shard
        of_tile = step - (tile == last) * (step - rows_of_last)
        return tile, shard * of_tile + within % step

    def split(self, x: Tensor, dim: int = 0, ends: Sequence[int] | None = None) -> dict[Tile, Tensor]:
        """What a tensor has for the rows of each tile.

        Args:
            x: the tensor.
            dim: along which it has something for each row, in their order.
            ends: 0, and where that ends for each row; None: it has one element for each.
        """
        runs = x.split([*chain.from_iterable(self._sizes(ends))], dim)
        parts: dict[Tile, list[Tensor]] = {tile: [] for tile in self.tiles}
        for tile, run in zip(self.tiles * self._shards, runs, strict=True):
            parts[tile].append(run)
        return {tile: _cat(found, dim) for tile, found in parts.items()}

    def join(self, parts: Mapping[Tile, Tensor], dim: int = 0, ends: Sequence[int] | None = None) -> Tensor:
        """The opposite of `split`: puts what was made for tiles in the order of the rows.

        Args:
            parts: what was made, for each tile that has any.
            dim: as for `split`.
            ends: as for `split`.
        """
        sizes = dict(zip(self.tiles, zip(*self._sizes(ends), strict=True), strict=True))
        runs = {tile: [part] if self._shards == 1 else part.split(sizes[tile], dim) for tile, part in parts.items()}
        return torch.cat(
            [runs[tile][shard] for shard in range(self._shards) for tile in self.tiles if tile in runs], dim
        )

    def _sizes(self, ends: Sequence[int] | None) -> list[list[int]]:
        """How much there is for the rows of each shard's part of each tile, by shard; see `split`."""
        ends = range(self.rows + 1) if ends is None else ends
        return [
            [ends[tile.spans[shard][1]] - ends[tile.spans[shard][0]] for tile in self.tiles]
            for shard in range(self._shards)
        ]


_ADDED_NUMEL = 1 << 18
"""Elements of a gradient that a CPU adds at once."""


class Tiling:
    """Answers calls with tiled weights; see the top of this file."""

    def __init__(self, layout: Layout, parameters: FlatParameters, units: HeldUnits) -> None:
        self._units = units
        self._parameters = parameters
        self._tiled: dict[Tensor, TiledWeight] = {}
        self._of_flat: dict[int, TiledWeight] = {}
        self._around: dict[int, TiledWeight] = {}  # by flat parameter: the wrapper whose inner tensor that is
        self._told: set[Unit] = set()
        self._takes_all = layout.shard_group_size > 1  # see [Note: tiles over ranks]
        for index, leaf in parameters.tiles.items():
            one = layout.slices[index]
            if one.flat not in self._of_flat:
                held = parameters.held[layout.flats[one.flat].params[0]]
                found = self._new(held.tensor, [held.local], held)
                self._of_flat[one.flat] = found
            self._of_flat[one.flat].add(parameters.units[one.unit], leaf)
        for param in parameters.wrappers:
            self._add_wrapper(param)

    def _new(self, tensor: Any, leaves: Sequence[Tensor], held: HeldParam) -> TiledWeight:
        has_views, ranks = len(shape_of(held.param)) == 3, self._parameters.layout.ranks
        made = TiledWeight(tensor, leaves, held.unit, ranks, has_views=has_views, is_late=held.spec.is_late)
        self._tiled[tensor] = made
        return made

    def _add_wrapper(self, param: Tensor) -> None:
        """Adds a wrapper whose inner tensors have tiles. A tile of it is a wrapper around tiles of these."""
        held = {one.local: one for one in map(self._parameters.held.__getitem__, self._parameters.numbers_of(param))}
        first = next(iter(held.values()))
        if not first.spec.tile:
            return
        leaves = leaves_of(param)
        one = self._new(param, leaves, first)
        tables: dict[Tensor, Tensor] = {}
        for number, tile in enumerate(self._of_flat[first.flat].tiles):
            parts = [
                self._of_flat[held[leaf].flat].tiles[number].leaf
                if leaf in held
                else tables.setdefault(leaf, leaf.to(self._parameters.device))
                for leaf in leaves
            ]
            rows = one.rows * len(tile.leaf) // len(first.local)
            made = in_form_of(one.twin[:rows], parts)
            one.add(tile.unit, made)
            self._parameters.wrappers[param].tiles.append(made)
        for inner in held.values():
            self._around[inner.flat] = one

    def leaves_of(self, weight: Any) -> list[nn.Parameter]:
        """The tiles of a parameter; empty if it has none."""
        one = self._tiled.get(weight) if isinstance(weight, Tensor) else None
        return [] if one is None else [tile.leaf for tile in one.tiles]

    def joined(self, weight: Any, parts: Sequence[Tensor | None]) -> Tensor:
        """The gradient of a weight, made of those of its tiles. One that was not used has zeros."""
        one = self._tiled[weight]
        found = next(part for part in parts if part is not None)
        lead = found.shape[: found.dim() - one.weight.dim()]  # of a batch of gradients
        filled = {
            tile: found.new_zeros((*lead, *tile.leaf.shape)) if part is None else part
            for tile, part in zip(one.tiles, parts, strict=True)
        }
        return one.join(filled, -one.weight.dim())

    def is_in_tile(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a tile."""
        index = self._parameters.slice_at(tensor)
        return index is not None and index in self._parameters.tiles

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answers a call of one of `SERVED`.

        Returns:
            The result, which may be a view of a tile, or views; NotImplemented if it needs the weight as a whole.
        """
        names, answer = _ANSWERS[func]
        if not names:
            return NotImplemented if kwargs else answer(self, *args)
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        if len(args) > len(names) or given.keys() - set(names):
            return NotImplemented
        return answer(self, *map(given.get, names))

    def _of(self, tensor: Any) -> TiledWeight | None:
        """What is known of a weight that runs in tiles; None of any other tensor.

        One that has hooks does not run in tiles.
        """
        one = self._tiled.get(tensor) if isinstance(tensor, Tensor) else None
        return None if one is None or has_hooks(one.weight) else one

    def _factor(self, tensor: Any) -> tuple[TiledWeight, bool] | None:
        """The tiled weight of three dimensions that a factor of a product is, and whether it is transposed."""
        if (one := self._of(tensor)) is not None:
            return (one, False) if one.weight.dim() == 3 else None
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            return None
        places = map(self._parameters.slice_at, leaves_of(tensor))
        index = next((found for found in places if found is not None), None)
        one = None if index is None else (self._around if is_wrapper(kind_of(tensor)) else self._of_flat).get(index)
        if one is None or one.transposed is None or has_hooks(one.weight):
            return None
        return (one, True) if form_of(tensor) == form_of(one.transposed) else None

    def _is_inside(self, one: TiledWeight) -> bool:
        """Whether this thread runs the forward of a unit around a weight. Inside `gathered` its own one runs."""
        return any(unit is not one.unit and unit.encloses(one.unit) for unit in self._units.running.units_here)

    # Running tile by tile.

    def _run(self, one: TiledWeight, tiles: Sequence[Tile], call: Callable[[Tile], Tensor]) -> list[Tensor]:
        """The results of a call for each of these tiles, while it is on the device."""
        self._units.apply(one.unit)
        self._units.expect_tiles([tile.unit for tile in tiles])
        outputs = []
        for tile in tiles:
            output = None
            self._begin(one, tile)
            self._units.forward_begins(tile.unit)
            try:
                output = call(tile)
            finally:
                self._units.forward_ends(tile.unit, output)
            outputs.append(output)
        if torch.is_grad_enabled() and one.weight.requires_grad and not _may_have_tangents(outputs[0]):
            outputs[0] = _Anchor.apply(outputs[0], one.weight, tiles[0].leaf, one.unit.name)  # type: ignore[no-untyped-call]
        return outputs

    def _to_run(self, one: TiledWeight, counts: Mapping[Tile, int]) -> list[Tile]:
        """The tiles that a call uses: those with rows, by how many they have. It is at least one."""
        used = [counts[tile] > 0 for tile in one.tiles]
        if self._takes_all:
            if not one.is_late:
                return one.tiles
            used = self._units.on_any_rank(used)
        return [tile for tile, is_used in zip(one.tiles, used, strict=True) if is_used] or one.tiles[:1]

    def _begin(self, one: TiledWeight, tile: Tile) -> None:
        if tile.leaf.requires_grad != one.weight.requires_grad:
            call_hidden(tile.leaf.requires_grad_, one.weight.requires_grad)

    def _run_with_same(self, one: TiledWeight, x: Tensor, call: Callable[[Tile, Tensor], Tensor]) -> list[Tensor]:
        """As `_run` of all tiles, each of which meets the same input: its gradient is summed in fp32."""
        carry = None
        if torch.is_grad_enabled() and x.requires_grad:
            carry = _Widen.apply(x, _may_have_tangents(x))  # type: ignore[no-untyped-call]

        def run(tile: Tile) -> Tensor:
            nonlocal carry
            own = x
            if carry is not None:
                own, carry = _Carry.apply(x.detach(), carry)  # type: ignore[no-untyped-call]
            return call(tile, own)

        return self._run(one, one.tiles, run)

    def _linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Any:
        one = self._of(weight)
        if one is None:
            return NotImplemented
        biases: Mapping[Tile, Tensor | None] = dict.fromkeys(one.tiles) if bias is None else one.split(bias)
        outputs = self._run_with_same(one, x, lambda tile, own: F.linear(own, tile.leaf, biases[tile]))
        return one.join(dict(zip(one.tiles, outputs, strict=True)), -1)

    # Rows by their numbers.

    def _embedding(
        self, ids: Any, weight: Any, pad: int | None, max_norm: Any, norm_type: Any, by_count: Any, sparse: Any
    ) -> Any:
        one = self._of(weight)
        if (
            one is None or max_norm is not None or sparse or not isinstance(ids, Tensor)
        ):  # max_norm writes to the weight
            return NotImplemented
        of_pad, in_pad = (None, None) if pad is None else one.place(pad % one.rows)

        def look_up(tile: Tile, of_tile: Tensor) -> Tensor:
            own = in_pad if of_pad is not None and tile is one.tiles[of_pad] else None
            return F.embedding(of_tile, tile.leaf, own, scale_grad_by_freq=bool(by_count))

        return self._rows(one, ids, look_up, least=0)

    def _index_select(self, weight: Any, dim: Any, ids: Any) -> Any:
        one = self._of(weight)
        if one is None or dim not in (0, -one.weight.dim()) or not isinstance(ids, Tensor) or ids.dim() != 1:
            return NotImplemented
        return self._rows(one, ids, lambda tile, own: tile.leaf.index_select(0, own), least=0)

    def _rows(self, one: TiledWeight, ids: Tensor, look_up: Callable[[Tile, Tensor], Tensor], *, least: int) -> Any:
        """Rows of a weight, shape (*ids.shape, *shape of a row).

        Args:
            one: the weight.
            ids: the numbers of the rows, any shape.
            look_up: returns rows of a tile, by their numbers in it, 1-D.
            least: the least number that `ids` may have.
        """
        if torch_private.functorch_level() is not None or ids.dtype not in (torch.int64, torch.int32):
            return NotImplemented
        flattened = ids.reshape(-1)
        if flattened.numel():
            lowest, highest = torch.stack([flattened.min(), flattened.max()]).tolist()
            if lowest < least or highest >= one.rows:
                return NotImplemented  # torch has an error for it
            if lowest < 0:
                flattened = torch.where(flattened < 0, flattened + one.rows, flattened)
        numbers, places = one.place(flattened)
        counts = torch.bincount(numbers, minlength=len(one.tiles)).tolist()
        order = torch.argsort(numbers, stable=True)  # within a tile as they come: their gradients are added so
        own = dict(zip(one.tiles, places[order].split(counts), strict=True))
        tiles = self._to_run(one, {tile: len(part) for tile, part in own.items()})
        parts = self._run(one, tiles, lambda tile: look_up(tile, own[tile]))
        found = parts[0]
        if len(parts) > 1:
            back = torch.empty_like(order).scatter_(0, order, _range_like(order))
            form = look_up(tiles[0]._replace(leaf=one.twin), flattened.to("meta")) if one.is_wrapper else None
            found = _put_back(parts, back, form)
        return found if ids.dim() == 1 else found.view(*ids.shape, *found.shape[1:])

    # Views.

    def _getitem(self, weight: Any, key: Any) -> Any:
        one = self._of(weight)
        if one is None or not self._is_inside(one):
            return NotImplemented
        if isinstance(key, Tensor) and key.dim() and key.dtype is torch.bool:
            return (
                self._rows(one, key.nonzero().view(-1), _index, least=0) if key.shape == (one.rows,) else NotImplemented
            )
        if isinstance(key, Tensor) and key.dim():
            return self._rows(one, key, _index, least=-one.rows)
        first, *others = key if isinstance(key, tuple) and key else (key,)
        if not one.has_views or any(isinstance(other, Tensor | list | bool) or other is None for other in others):
            return NotImplemented
        if isinstance(first, slice):
            return self._piece(one, first, tuple(others))
        row = _row(first, one.rows)
        return NotImplemented if row is None else self._view(one, row, tuple(others))

    def _select(self, weight: Any, dim: Any, index: Any) -> Any:
        one = self._of(weight)
        if one is None or not one.has_views or dim not in (0, -one.weight.dim()) or not self._is_inside(one):
            return NotImplemented
        row = _row(index, one.rows)
        return NotImplemented if row is None else self._view(one, row)

    def _unbind(self, weight: Any, dim: Any) -> Any:
        one = self._of(weight)
        if one is None or not one.has_views or dim not in (None, 0, -one.weight.dim()) or not self._is_inside(one):
            return NotImplemented
        return tuple(self._view(one, row) for row in range(one.rows))

    def _piece(self, one: TiledWeight, rows: slice, others: tuple[Any, ...]) -> Any:
        """Several rows of a weight, if they lie side by side in one tile."""
        numbers = range(one.rows)[rows]
        if len(numbers) in (0, one.rows) or numbers.step != 1 or self._takes_all:
            return NotImplemented
        (first, start), (last, end) = one.place(numbers[0]), one.place(numbers[-1])
        if first != last or end - start != len(numbers) - 1:
            return NotImplemented
        return self._view(one, numbers[0], others, len(numbers))

    def _narrow(self, weight: Any, dim: Any, start: Any, length: Any) -> Any:
        one = self._of(weight)
        if one is None or not one.has_views or dim not in (0, -one.weight.dim()) or not self._is_inside(one):
            return NotImplemented
        if not isinstance(start, int) or not isinstance(length, int) or not 0 <= start <= start + length <= one.rows:
            return NotImplemented
        return self._piece(one, slice(start, start + length), ())

    def _view(self, one: TiledWeight, row: int, others: tuple[Any, ...] = (), count: int | None = None) -> Any:
        """A view of a tile: a row, or `count` rows from that one on."""
        if self._takes_all:
            raise ConfigError(
                f"{one.unit.name} runs in tiles, and the forward takes one row of it after the other, which ranks that "
                "share parameters may do in different orders: use it by grouped_mm or batched_mm (of transformers, "
                'experts_implementation="grouped_mm"), or give stage=2, or Tuning(tile=0)'
            )
        self._units.apply(one.unit)
        number, place = one.place(row)
        tile = one.tiles[number]
        self._begin(one, tile)
        whole: Tensor = tile.leaf
        with self._units.used([tile.unit]):  # torch makes no views of a tensor without memory
            if torch.is_grad_enabled() and one.weight.requires_grad and not _may_have_tangents(whole):
                whole = _Anchor.apply(whole, one.weight, tile.leaf, one.unit.name)  # type: ignore[no-untyped-call]
            key = place if count is None else slice(place, place + count)
            return whole[(key, *others)] if others else whole[key]

    def _transpose(self, weight: Any, *dims: Any) -> Any:
        one = self._of(weight)
        if (
            one is None
            or one.transposed is None
            or not self._is_inside(one)
            or torch_private.functorch_level() is not None
        ):
            return NotImplemented
        if dims and (not all(isinstance(dim, int) for dim in dims) or {dim % 3 for dim in dims} != {1, 2}):
            return NotImplemented
        self._units.apply(one.unit)
        if one.is_wrapper:
            pairs = zip(one.leaves, leaves_of(one.transposed), strict=True)
            return in_form_of(one.transposed, [_without_values(leaf, as_leaf) for leaf, as_leaf in pairs])
        number = self._parameters.index[one.weight]
        return _Transposed.apply(one.weight, self._parameters.data_of(number))  # type: ignore[no-untyped-call]

    def note_whole_use(self, weight: Any) -> None:
        """Says once of each tiled weight that the forward around it uses it as a whole."""
        one = self._tiled.get(weight) if isinstance(weight, Tensor) else None
        if one is not None and one.unit not in self._told and self._is_inside(one):
            self._told.add(one.unit)
            _log.warning(
                "the forward uses %s as a whole, not in tiles: it comes whole, to %s, each time",
                one.unit.name,
                "RAM" if one.unit.is_in_ram else "the device",
            )

    # Products.

    def _grouped_mm(self, x: Any, weight: Any, offs: Tensor | None, bias: Any, out_dtype: torch.dtype | None) -> Any:
        factor = self._factor(weight)
        if factor is None or not isinstance(x, Tensor) or x.dim() != 2 or offs is None or bias is not None:
            return NotImplemented
        one, is_transposed = factor
        if offs.shape != (one.rows,) or torch_private.functorch_level() is not None:
            return NotImplemented
        ends = [0, *offs.tolist()]
        if any(start > stop for start, stop in pairwise(ends)) or ends[-1] > len(x):
            return NotImplemented
        rows, rest = x.split([ends[-1], len(x) - ends[-1]])
        own = one.split(rows, 0, ends)
        columns = one.weight.shape[1 if is_transposed else 2]

        def multiply(tile: Tile) -> Tensor:
            if one.is_wrapper and not len(own[tile]):
                none = own[tile][:, :1].expand(-1, columns).to(out_dtype or x.dtype)
                return none.clone()  # as a view it would count as a use of `x` too
            matrices: Tensor = tile.leaf.transpose(1, 2) if is_transposed else tile.leaf
            if not len(own[tile]):  # kernels may want some
                return (own[tile] @ matrices[0]).to(out_dtype or x.dtype)
            ends_here, before = [], 0
            for start, stop in tile.spans:
                ends_here.append(offs[start:stop] - (ends[start] - before))
                before += ends[stop] - ends[start]
            return F.grouped_mm(own[tile], matrices, offs=_cat(ends_here), out_dtype=out_dtype)

        tiles = self._to_run(one, {tile: len(part) for tile, part in own.items()})
        outputs = self._run(one, tiles, multiply)
        found = one.join(dict(zip(tiles, outputs, strict=True)), 0, ends)
        return torch.cat([found, found.new_zeros(len(rest), found.shape[1])]) if len(rest) else found

    def _bmm(self, left: Any, right: Any) -> Any:
        is_left = (factor := self._factor(left)) is not None
        factor = factor or self._factor(right)
        other = right if is_left else left
        if factor is None or not isinstance(other, Tensor) or other.dim() != 3:
            return NotImplemented
        one, is_transposed = factor
        if len(other) != one.rows:
            return NotImplemented
        own = one.split(other)

        def multiply(tile: Tile) -> Tensor:
            matrices: Tensor = tile.leaf.transpose(1, 2) if is_transposed else tile.leaf
            return torch.bmm(matrices, own[tile]) if is_left else torch.bmm(own[tile], matrices)

        return one.join(dict(zip(one.tiles, self._run(one, one.tiles, multiply), strict=True)))

    def _einsum(self, equation: Any, *operands: Any) -> Any:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        plan = _einsum_plan(equation, len(operands))
        factors = [(at, found) for at, one in enumerate(operands) if (found := self._factor(one)) is not None]
        if plan is None or len(factors) != 1:
            return NotImplemented
        ((at, (one, is_transposed)),) = factors
        inputs, output = plan
        row = inputs[at][:1]
        if row not in output or any(labels.count(row) > 1 for labels in inputs):
            return NotImplemented
        cut = {n: labels.index(row) for n, labels in enumerate(inputs) if n != at and row in labels}
        same = [n for n in range(len(operands)) if n != at and n not in cut]
        if len(same) > 1 or any(operands[n].shape[dim] != one.rows for n, dim in cut.items()):
            return NotImplemented
        parts = {n: one.split(operands[n], dim) for n, dim in cut.items()}

        def multiply(tile: Tile, x: Tensor | None = None) -> Tensor:
            own = [x if n in same else parts[n][tile] if n in parts else None for n in range(len(operands))]
            own[at] = tile.leaf.transpose(1, 2) if is_transposed else tile.leaf
            return torch.einsum(equation, *own)

        x = operands[same[0]] if same else None
        outputs = self._run(one, one.tiles, multiply) if x is None else self._run_with_same(one, x, multiply)
        return one.join(dict(zip(one.tiles, outputs, strict=True)), output.index(row))

    def loss(self, hidden: Tensor, weight: nn.Parameter, bias: Tensor | None, loss: losses.TokenLosses) -> Any:
        """Runs the loss of an output layer with a tiled weight; see [Note: the loss of a tiled output layer].

        Returns:
            0-dim, or one of each token; NotImplemented if the weight does not run in tiles, or its tiles are no runs of
            words, as over several ranks.
        """
        tiled = self._of(weight)
        if tiled is None or tiled.is_wrapper or len(tiled.tiles[0].spans) > 1:
            return NotImplemented
        tiles = tiled.tiles
        self._units.apply(tiled.unit)
        self._units.expect_tiles([tile.unit for tile in tiles])
        makes_graph = torch.is_grad_enabled()
        needed = [makes_graph and one is not None and one.requires_grad for one in (hidden, weight, bias)]
        run = _LossInTiles(loss, hidden.detach(), bias, [tile.leaf for tile in tiles], needed)
        result: Tensor | None = None
        for number, tile in enumerate(tiles):
            output = None
            self._begin(tiled, tile)
            self._units.forward_begins(tile.unit)
            try:
                with losses.exactly(hidden.device):
                    run.see(number)
                    value = loss.end_forward() if tile is tiles[-1] else hidden.new_zeros((), dtype=loss.wide)
                inputs = (hidden, bias) if result is None else (result, None)
                done = [tiles[at].leaf for at in run.completes(number)]
                output = _TileOfLoss.apply(value, run, number, *inputs, *done)  # type: ignore[no-untyped-call]
            finally:
                self._units.forward_ends(tile.unit, output)
            result = output
        if needed[1]:
            result = _Anchor.apply(result, weight, tiles[-1].leaf, tiled.unit.name)  # type: ignore[no-untyped-call]
        assert result is not None
        return result


def _index(tile: Tile, ids: Tensor) -> Any:
    return tile.leaf[ids]


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _put_back(parts: Sequence[Any], back: Tensor, form: Any) -> Any:
    """Rows of several tiles, put in another order.

    Args:
        parts: the rows, tile by tile.
        back: the place among all of them of each row of the result.
        form: for wrappers, the result without values.
    """
    if not all(is_wrapper(kind_of(part)) for part in parts):
        found = torch.cat(list(parts))
        return found.index_select(0, back.to(found.device))
    made = []
    for several in zip(*map(leaves_of, parts), strict=True):
        if all(leaf is several[0] for leaf in several):  # a table
            made.append(several[0])
            continue
        joined = torch.cat(several)
        rows = joined.unflatten(0, (len(back), -1)).index_select(0, back.to(joined.device))
        made.append(rows.flatten(0, 1))
    return in_form_of(form, made)


def _range_like(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), dtype=ids.dtype, device=ids.device)


def _row(key: Any, rows: int) -> int | None:
    """The number of the row that an index names; None if it is no number of a row."""
    if isinstance(key, bool) or (isinstance(key, Tensor) and (key.dtype is torch.bool or key.is_floating_point())):
        return None
    if torch_private.functorch_level() is not None:
        return None
    with suppress(TypeError):
        number = operator.index(key)
        if -rows <= number < rows:
            return number % rows
    return None


def _einsum_plan(equation: Any, count: int) -> tuple[list[str], str] | None:
    """The labels of each operand, and of the output, if the equation names them all."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    left, output = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    return (inputs, output) if len(inputs) == count else None


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
        losses.require_first_order()
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
        # Not `name`: a node has a method of that name, which others ask.
        ctx.weight, ctx.tile, ctx.parameter = weight, tile, name
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if has_hooks(ctx.weight):
            raise ConfigError(
                f"{ctx.parameter} runs in tiles, and got a hook for its gradient after its forward: register the hook "
                "before the forward, or give Tuning(tile=0)"
            )
        if _is_asked_for(ctx.weight) and not _is_asked_for(ctx.tile):
            raise ConfigError(
                f"backward(inputs=...) names {ctx.parameter}, which runs in tiles: leave inputs out, take the "
                "gradients from torch.autograd.grad, or give Tuning(tile=0)"
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


def _without_values(tensor: Tensor, form: Tensor) -> Tensor:
    """A view with the shape and strides of another tensor. Unlike others it may be made of a tensor without memory."""
    with torch_private.PastSubclasses(), torch.no_grad():
        made: Tensor = torch.ops.aten._reshape_alias.default(tensor, form.shape, form.stride())
    return made


class _Transposed(torch.autograd.Function):
    """The transposed view of a weight of three dimensions.

    It is made of `p.data`: a view of the weight itself would get another history with each new version of that.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, data: Tensor) -> Tensor:
        return _without_values(data, twin_of(data).transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.transpose(1, 2), None


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


def _added(total: Tensor, part: Tensor) -> Tensor:
    """A sum in fp32 with another part.

    It is made in place unless there is a graph of this backward, or a derivative of it. Memory that is new each time
    comes from the system, which clears it first: on a CPU that took longer than all else here. There it is added in
    pieces whose fp32 copies stay in the cache.

    Args:
        total: the sum of the parts before, which nobody else has.
        part: of the same shape.
    """
    in_place = not torch.is_grad_enabled() and not _may_have_tangents(part)
    if not (in_place and total.is_contiguous() and part.is_contiguous()):
        return total + part
    if not total.is_cpu:
        return total.add_(part)
    for own, other in zip(total.view(-1).split(_ADDED_NUMEL), part.view(-1).split(_ADDED_NUMEL), strict=True):
        own.add_(other)
    return total


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
        if of_x is None:
            return None, of_carry
        if of_carry is None:  # the sum of those that come, so nobody else may have it
            return None, of_x.to(torch.float32, copy=not torch.is_grad_enabled())
        return None, _added(of_carry, of_x)

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_carry: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if of_carry is None:
            return None, None
        return of_carry.to(ctx.dtype), of_carry.view_as(of_carry)


_MT: Any = Tensor.mT

_ANSWERS: dict[Any, tuple[tuple[str, ...], Callable[..., Any]]] = {
    F.linear: (("input", "weight", "bias"), Tiling._linear),
    F.embedding: (
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        Tiling._embedding,
    ),
    Tensor.__getitem__: (("input", "key"), Tiling._getitem),
    torch.einsum: ((), Tiling._einsum),
    torch_private.grouped_mm: (("input", "mat2", "offs", "bias", "out_dtype"), Tiling._grouped_mm),
    **dict.fromkeys((Tensor.index_select, torch.index_select), (("input", "dim", "index"), Tiling._index_select)),
    **dict.fromkeys((Tensor.select, torch.select), (("input", "dim", "index"), Tiling._select)),
    **dict.fromkeys((Tensor.narrow, torch.narrow), (("input", "dim", "start", "length"), Tiling._narrow)),
    **dict.fromkeys((Tensor.unbind, torch.unbind), (("input", "dim"), Tiling._unbind)),
    **dict.fromkeys((Tensor.transpose, torch.transpose), (("input", "dim0", "dim1"), Tiling._transpose)),
    _MT.__get__: (("input",), Tiling._transpose),
    **dict.fromkeys((Tensor.bmm, torch.bmm), (("input", "mat2"), Tiling._bmm)),
    **dict.fromkeys((Tensor.matmul, torch.matmul), (("input", "other"), Tiling._bmm)),
}
"""By function: the names of its arguments, none if it takes any number of them, and what answers it."""

SERVED: Iterable[Any] = _ANSWERS.keys()
"""The functions of torch that may run in tiles."""
