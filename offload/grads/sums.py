"""What is computed of gradients while they come: sums over micro-batches, and sums of squares.

[Note: sums of squares]
The squares of each gradient are summed in blocks of SUM_BLOCK elements, counted from the beginning of its parameter, or
of its tile. A block that two ranks share has a sum on each. So the bits of a sum do not depend on where gradients wait,
nor on chunks, buckets and threads.

Gradients in memory are summed when all of their elements are there. Those in slots are summed as they come, while they
are in RAM. With one rank chunks end where blocks end. With several, averages come from the end of a flat parameter to
its beginning (reduce_scatter.py), the same elements in every round: where a bucket begins inside a block, its part of
that block is *carried* until the rest of the block comes with the next bucket.

A sum is *current* if it is of what has come since gradients were last dropped, and of all that is there. Whoever
changes a gradient says so, and whoever needs sums makes those that are not current: after fewer, or more, micro-batches
than were expected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from offload.choices import GradChoice
from offload.layout import Layout, once_a_layout
from offload.native import ACCUMULATE, CAST, SUM_SQUARES, Kernels, sum_blocks
from offload.regions import Region
from offload.run import Run
from offload.sizes import SUM_BLOCK, round_up
from offload.tiers import DEVICE

_NEVER = 0
SQUARES, CARRIED = "sums of squares", "gradients of a block that is not whole"
DEVICE_SQUARES = "sums of squares on the device"


def write_or_add(kernels: Kernels | None, values: Tensor, into: Tensor, *, is_first: bool) -> None:
    """Writes the first micro-batch of a gradient, or adds another one. Each element is rounded once.

    Args:
        kernels: what computes; None: torch, for memory that no kernels reach.
        values: shape (n,).
        into: shape (n,), in the dtype in which the gradient waits; fp32 if there is something to add to.
        is_first: whether `values` replace what is there.
    """
    if kernels is None:
        with torch.no_grad():
            into.copy_(values) if is_first else into.add_(values)
    elif is_first:
        kernels.call(CAST, values, into)
    else:
        kernels.call(ACCUMULATE, into, values)


class Span(NamedTuple):
    """A tile of a parameter, or the parameter if it has no tiles, and this rank's elements of it.

    Attributes:
        begin: the element of the parameter at which the tile begins.
        first: this rank's first element.
        stop: the one after its last.
    """

    begin: int
    first: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements this rank has."""
        return self.stop - self.first

    @property
    def blocks(self) -> int:
        """How many blocks it has elements of."""
        return sum_blocks(self.first - self.begin, self.numel)


def spans_of(layout: Layout, param: int) -> list[Span]:
    """The tiles of a parameter, in their order. Over several ranks it counts as one."""
    low, high = layout.param_shard_range(param)
    found = []
    for begin, end in layout.tiles_of(param) if layout.ranks == 1 else [(0, layout.specs[param].numel)]:
        first = max(begin, low)
        found.append(Span(begin, first, max(first, min(end, high))))
    return found


def regions(
    layout: Layout, choice: GradChoice, dtypes: list[torch.dtype], device_flats: Collection[int] = ()
) -> list[Region]:
    """What `SquareSums` reserves.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients.
        dtypes: of the gradients while they wait, for each flat parameter.
        device_flats: see `Run`.
    """
    blocks = {False: 0, True: 0}
    for flat, count in zip(layout.flat_of, _blocks_of(layout), strict=True):
        blocks[flat in device_flats] += count
    reserved = [Region(choice.tier.memory, SQUARES, 8 * blocks[False], kind="grad")]
    if device_flats:
        reserved.append(Region(DEVICE, DEVICE_SQUARES, 8 * blocks[True], kind="grad"))
    if choice.tier.is_durable:
        carried = SUM_BLOCK * max((dtype.itemsize for dtype in dtypes), default=0) if layout.ranks > 1 else 0
        reserved.append(Region(choice.tier.memory, CARRIED, carried, kind="grad"))
    return reserved


@once_a_layout
def _blocks_of(layout: Layout) -> list[int]:
    """How many blocks each parameter has on this rank."""
    return [sum(span.blocks for span in spans_of(layout, param)) for param in range(len(layout.specs))]


class _Carried(NamedTuple):
    """The later elements of a block, `start` to `stop` of a tile, which wait for the earlier ones."""

    start: int
    stop: int


class SquareSums:
    """The sums of squares of this rank's elements of all gradients; see [Note: sums of squares].

    Attributes:
        spans: for each parameter, its tiles.
        norms: norms that were computed of these sums, by the numbers of their parameters. It is a new dict whenever a
            sum changes: what somebody computes of older ones meanwhile goes with the older dict.
    """

    def __init__(self, run: Run) -> None:
        self.spans = [spans_of(run.layout, param) for param in range(len(run.layout.specs))]
        self.norms: dict[tuple[int, ...], float] = {}
        self._specs = run.layout.specs
        self._kernels = [run.kernels_of(flat) for flat in run.layout.flat_of]
        self._is_there = [flat in run.device_flats for flat in run.layout.flat_of]
        pieces = *run.memory.take(SQUARES), *run.memory.take(DEVICE_SQUARES)
        self._all = [sums.view(torch.float64) for sums in pieces]
        self._sums = self._split(self._all)
        # Of each tile, the time in which its sums are current. Each time ends when all gradients are dropped.
        self._current_in = [[_NEVER] * len(spans) for spans in self.spans]
        self._now = _NEVER + 1
        self._generations = [0] * len(self.spans)
        (self._memory,) = run.memory.take(CARRIED) or (torch.empty(0, dtype=torch.uint8, device="cpu"),)
        self._carried: _Carried | None = None

    def _split(self, sums: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parts the sums by parameter and tile.

        Args:
            sums: those of all parameters but `Run.device_flats`, then of these, if there are any; each of shape (n,).
        """
        starts = [0] * len(sums)
        found = []
        for is_there, spans in zip(self._is_there, self.spans, strict=True):
            of_tiles = []
            for span in spans:
                of_tiles.append(sums[is_there][starts[is_there] : starts[is_there] + span.blocks])
                starts[is_there] += span.blocks
            found.append(of_tiles)
        return found

    def on_cpu(self) -> list[list[Tensor]]:
        """For each parameter and tile, the sums of its blocks, fp64, in RAM.

        All are copied at once, if they are on another device.
        """
        return self._sums if all(one.is_cpu for one in self._all) else self._split([one.cpu() for one in self._all])

    def changes(self, param: int, tile: int = 0) -> None:
        """Says, before it is so, that elements of a gradient change: its sums are not current."""
        self._current_in[param][tile] = _NEVER
        self._generations[param] += 1

    def forget(self, param: int) -> None:
        """Says that a gradient is dropped: no sum of it is current until the next one has come."""
        self._current_in[param] = [_NEVER] * len(self._current_in[param])

    def forget_all(self) -> None:
        """Says that all gradients are dropped."""
        self._now += 1
        self.norms = {}

    def generation(self, param: int) -> int | None:
        """A number that changes with a gradient; None: some of it has not come, or has changed and is not summed."""
        generation = self._generations[param]  # first: whoever changes it afterwards makes the number another one
        return None if self.stale(param) else generation

    def squares(self, param: int) -> float:
        """The sum of squares of this rank's elements of a gradient, in the tiles whose sums are current."""
        stale = self.stale(param)
        return sum(float(sums.sum()) for tile, sums in enumerate(self._sums[param]) if tile not in stale)

    def are_zeros(self, param: int, parts: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether parts of a gradient are zeros; all sums of it are current.

        The square of an fp32 is exact in fp64, and 0 for zeros alone. Elements of a block have one sum: beside another
        one that is not zero, zeros count as such, too.

        Args:
            param: the parameter's index.
            parts: elements of this rank, [start, stop), at least one, of one tile each.
        """
        assert not self.stale(param)
        before = [0, *(torch.cat(self._sums[param]).ne(0).cumsum(0).tolist() if parts else ())]
        starts = [*accumulate((span.blocks for span in self.spans[param]), initial=0)]

        def block(element: int) -> int:
            tile = self.tile_at(param, element)
            span = self.spans[param][tile]
            return starts[tile] + (element - span.begin) // SUM_BLOCK - (span.first - span.begin) // SUM_BLOCK

        return [before[block(start)] == before[block(stop - 1) + 1] for start, stop in parts]

    def stale(self, param: int) -> list[int]:
        """The tiles of a parameter whose sums are not current."""
        now = self._now
        return [tile for tile, current_in in enumerate(self._current_in[param]) if current_in != now]

    def tile_at(self, param: int, element: int) -> int:
        """The tile that an element of a parameter is in."""
        return element // self._specs[param].tile if len(self.spans[param]) > 1 else 0

    def sum_tile(self, param: int, tile: int, values: Tensor) -> None:
        """Makes the sums of a tile.

        Args:
            param: the parameter's index.
            tile: the tile's index.
            values: all elements of it that this rank has, 1-D, on the device of the kernels.
        """
        span = self.spans[param][tile]
        if span.first < span.stop:
            self._sum(param, self._sums[param][tile], span.first - span.begin, values)
        self._current_in[param][tile] = self._now

    def make_zeros(self, param: int, tile: int) -> None:
        """Makes the sums of a tile whose elements are zeros."""
        self._sums[param][tile].zero_()
        self._current_in[param][tile] = self._now
        self.norms = {}

    def sum_part(self, param: int, first: int, values: Tensor) -> None:
        """Makes sums of elements as they come: whole blocks in any order, the parts of a block from the last one on.

        Args:
            param: the parameter's index.
            first: the element of the parameter at which `values` begins.
            values: elements of one tile, 1-D, in RAM. Those after them have come before, unless a block begins there.
        """
        tile = self.tile_at(param, first)
        span = self.spans[param][tile]
        begin, first = span.first - span.begin, first - span.begin
        stop = first + len(values)
        if self._carried is not None:
            stop = max(first, (stop - 1) // SUM_BLOCK * SUM_BLOCK)
            self._carry(stop, values[stop - first :], self._carried.stop)
            if stop == begin or stop % SUM_BLOCK == 0:
                self._sum_blocks(param, tile, stop, self._carried_values(values.dtype))
                self._carried = None
        whole = first if first == begin else min(round_up(first, SUM_BLOCK), stop)
        if whole < stop:
            self._sum_blocks(param, tile, whole, values[whole - first : stop - first])
        if first < whole:
            self._carry(first, values[: whole - first], whole)

    def have_come(self, param: int, tile: int) -> None:
        """Says that all elements of a tile have come to `sum_part`, so that its sums are current.

        Args:
            param: the parameter's index.
            tile: the tile's index.
        """
        self._current_in[param][tile] = self._now

    def require_whole(self) -> None:
        """Asserts that no part of a block waits for the rest: all elements have come."""
        assert self._carried is None

    def _carry(self, start: int, values: Tensor, stop: int) -> None:
        """Keeps `values`, elements from `start` on, before those that are carried already, which end at `stop`."""
        at = start % SUM_BLOCK
        self._memory.view(values.dtype)[at : at + len(values)] = values
        self._carried = _Carried(start, stop)

    def _carried_values(self, dtype: torch.dtype) -> Tensor:
        assert self._carried is not None
        start, stop = self._carried
        return self._memory.view(dtype)[start % SUM_BLOCK :][: stop - start]

    def _sum_blocks(self, param: int, tile: int, first: int, values: Tensor) -> None:
        """Sums whole blocks, or what this rank has of them, from element `first` of a tile on."""
        span = self.spans[param][tile]
        block = first // SUM_BLOCK - (span.first - span.begin) // SUM_BLOCK
        self._sum(param, self._sums[param][tile][block : block + sum_blocks(first, len(values))], first, values)

    def _sum(self, param: int, sums: Tensor, first: int, values: Tensor) -> None:
        self._kernels[param].call(SUM_SQUARES, values, sums, first=first)
        self.norms = {}
