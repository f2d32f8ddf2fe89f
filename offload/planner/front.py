"""The Pareto front of candidates: those that no other one beats in everything that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SAME = 0.03
"""Costs that differ by less than this share are taken for equal: predictions are no better than that."""


class Costs(NamedTuple):
    """What a candidate costs. Less is better.

    Attributes:
        token_s: seconds a token.
        device_bytes: on the device.
        cpu_bytes: of RAM.
        disk_bytes: of files.
        written_bytes: written to drives for a token.
        rounding: how far its training is from that with fp32 states; 0: it is that.
    """

    token_s: float
    device_bytes: float
    cpu_bytes: float
    disk_bytes: float
    written_bytes: float
    rounding: int

    def beats(self, other: Costs, same: float = SAME) -> bool:
        """Whether nothing is worse than in another one, but for differences of `same`."""
        return all(one <= (1 + same) * cost for one, cost in zip(self, other, strict=True))


class Front(NamedTuple, Generic[T]):
    """What a search found. Each candidate is in one of these.

    Attributes:
        rows: the candidates on the front with their costs, the best first.
        skipped: how many were not looked at to the end, because one that was is better than they could be.
        beaten: how many were, and another one beats them.
        unknown: why the costs of others are not known, with those candidates.
    """

    rows: list[tuple[T, Costs]]
    skipped: int
    beaten: int
    unknown: dict[str, list[T]]


IsBeaten = Callable[[Costs], bool]
"""Whether a candidate that costs that much or more cannot be on the front."""


class Fronts(Generic[T]):
    """The front of candidates that come in several lots. Those that cannot be on it are not looked at.

    Each candidate that is not on the front is beaten by one that is, but for twice `same`.

    Args:
        at_best: the least that a candidate can cost, which is cheap to say.
        find: what it costs, or in words why that is not known. Whenever it knows more than `at_best` does, it may ask
            whether a candidate that costs no less is beaten, and return None if so: the front is the same. After an
            answer that is not None it is not called again.
        order: what a candidate is judged by; the least comes first.
        same: differences that count for nothing.
    """

    def __init__(
        self,
        at_best: Callable[[T], Costs],
        find: Callable[[T, IsBeaten], Costs | str | None],
        order: Callable[[Costs], tuple[float, ...]] = tuple,
        same: float = SAME,
    ) -> None:
        self._at_best, self._find, self._order, self._same = at_best, find, order, same
        self._candidates: list[T] = []
        self._known: dict[int, Costs] = {}  # by number among them
        self._unknown: dict[int, str] = {}

    def of(self, candidates: Sequence[T], tell: Callable[[int], None] = lambda known: None) -> Front[T]:
        """The front of some candidates, and of all that were given before.

        Args:
            candidates: those that are new.
            tell: called whenever the costs of one have become known, with the number of those that are.
        """
        self._candidates += candidates
        bounds = [self._known[n] if n in self._known else self._at_best(one) for n, one in enumerate(self._candidates)]
        looked_at: dict[int, Costs] = {}
        # Those that could be the best come first, so that they spare others.
        for number in sorted(range(len(bounds)), key=lambda number: (self._order(bounds[number]), number)):
            if number in self._unknown or any(costs.beats(bounds[number], self._same) for costs in looked_at.values()):
                continue
            if number not in self._known:
                self._look_at(number, looked_at.values())
                tell(len(self._known))
            if (costs := self._known.get(number)) is not None:
                looked_at[number] = costs
        rows: list[tuple[int, Costs]] = []
        for number, costs in sorted(looked_at.items(), key=lambda pair: (self._order(pair[1]), pair[1])):
            if not any(other.beats(costs, self._same) for _, other in rows):
                rows = [row for row in rows if not costs.beats(row[1], 0.0)] + [(number, costs)]
        unknown: dict[str, list[T]] = {}
        for number, reason in self._unknown.items():
            unknown.setdefault(reason, []).append(self._candidates[number])
        skipped = len(self._candidates) - len(self._known) - len(self._unknown)
        found = [(self._candidates[number], costs) for number, costs in rows]
        return Front(found, skipped, len(self._known) - len(rows), unknown)

    def _look_at(self, number: int, others: Iterable[Costs]) -> None:
        """Finds what a candidate costs, after others that have these costs."""
        # Without tolerance here: what beats those that are known also beats this one, whatever it costs.
        found = self._find(self._candidates[number], lambda least: any(costs.beats(least, 0.0) for costs in others))
        if isinstance(found, str):
            self._unknown[number] = found
        elif found is not None:
            self._known[number] = found
