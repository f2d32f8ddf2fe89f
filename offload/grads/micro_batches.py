"""How many micro-batches of a step have come, for each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from offload.choices import GradChoice
from offload.errors import AccumulationError
from offload.layout import Layout


class MicroBatches:
    """Counts the micro-batches of a step, for each tile of each parameter. A parameter without tiles is one tile.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients.

    Attributes:
        most: the most micro-batches that a step may have; None: any number.
        expected: how many micro-batches this step is expected to have.
    """

    def __init__(self, layout: Layout, choice: GradChoice) -> None:
        self.most: int | None = None if choice.takes_any else choice.micro_batches
        self.expected = self.most or 1
        self._names = [spec.name for spec in layout.specs]
        # Of all tiles of all parameters, and where those of each parameter begin.
        tiles = [len(layout.tiles_of(param)) for param in range(len(layout.specs))]
        self._starts = [0, *accumulate(tiles)]
        self._counts = [0] * self._starts[-1]

    def declare(self, most: int | None) -> None:
        """Sets the most micro-batches of every step from now on; None: any number.

        Called while no gradient is there, with the same number on all ranks.
        """
        self.most, self.expected = most, most or 1

    def count(self, param: int, tile: int = 0) -> int:
        """Counts one more micro-batch of a gradient.

        Returns:
            Which one of the step it is, from 1.

        Raises:
            AccumulationError: if all micro-batches that may come have come. Nothing is changed.
        """
        at = self._starts[param] + tile
        number = self._counts[at]
        if number == self.most:
            raise self.too_often(param)
        self._counts[at] = number = number + 1
        return number

    def of(self, param: int, tile: int = 0) -> int:
        """How many micro-batches of a gradient have come."""
        return self._counts[self._starts[param] + tile]

    def has(self, param: int) -> bool:
        """Whether a parameter, or a tile of it, has a gradient."""
        start, stop = self._starts[param : param + 2]
        return self._counts[start] > 0 if stop == start + 1 else any(self._counts[start:stop])

    def has_all(self, param: int) -> bool:
        """Whether all tiles of a parameter have a gradient."""
        return all(self._counts[slice(*self._starts[param : param + 2])])

    def fill(self, param: int) -> list[int]:
        """Counts one micro-batch of each tile that has none, of a parameter of which other tiles have some.

        Returns:
            These tiles.
        """
        if not self.has(param):
            return []
        start, stop = self._starts[param : param + 2]
        found = [at for at in range(start, stop) if not self._counts[at]]
        for at in found:
            self._counts[at] = 1
        return [at - start for at in found]

    def has_any(self) -> bool:
        """Whether any gradient has come, or a tile of one."""
        return any(self._counts)

    def are_equal(self, params: Sequence[int]) -> bool:
        """Whether equally many micro-batches of these parameters, none of which has tiles, have come.

        Gradients come roughly in order. So the two ends are compared first: if they differ, the rest need not be read.
        """
        counts, starts = self._counts, self._starts
        number = counts[starts[params[0]]]
        return counts[starts[params[-1]]] == number and all(counts[starts[param]] == number for param in params)

    def clear(self, param: int) -> None:
        """Begins the count of one parameter anew."""
        for at in range(*self._starts[param : param + 2]):
            self._counts[at] = 0

    def clear_all(self, had: int | None = None) -> None:
        """Begins all counts anew. Where the number is not declared, the next step is expected to have as many.

        Args:
            had: how many micro-batches the step had; None: as many as that parameter which had most.
        """
        if had is None:
            had = max(self._counts, default=0)
        if self.most is None and had:
            self.expected = had
        self._counts = [0] * len(self._counts)

    def too_often(self, param: int) -> AccumulationError:
        """The error for one micro-batch of a parameter too many."""
        assert self.most is not None
        return AccumulationError(
            f"{self._names[param]} got its gradient a {_ordinal(self.most + 1)} time before step(), and "
            f"accumulation={self.most}: declare how many backward passes come before each step, OffloadZero(..., "
            'accumulation=N), or accumulation="auto" where that is not known, or call step() or zero_grad() after each '
            "(with reentrant checkpointing, a module used twice counts twice: set use_reentrant=False)"
        )


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
