"""The Pareto front of candidates: those that no other one beats in everything that counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """What a search found.

    Attributes:
        rows: the candidates on the front with their costs, the best first.
        skipped: how many were not looked at to the end, because one that was is better than they could be.
        beaten: how many another one beats.
        unknown: why the costs of others are not known, with those candidates.
    """

    rows: list[tuple[T, Costs]]
    skipped: int
    beaten: int
    unknown: dict[str, list[T]]


IsBeaten = Callable[[Costs], bool]
"""Whether a candidate that costs that much or more cannot be on the front."""


def front_of(
    candidates: Sequence[T],
    at_best: Callable[[T], Costs],
    find: Callable[[T, IsBeaten], Costs | str | None],
    order: Callable[[Costs], tuple[float, ...]] = tuple,
    same: float = SAME,
) -> Front[T]:
    """The front of some candidates. Those that cannot be on it are not looked at.

    Each candidate that is not on the front is beaten by one that is, but for twice `same`.

    Args:
        candidates: that there are.
        at_best: the least that a candidate can cost, which is cheap to say.
        find: what it costs, or in words why that is not known. As soon as it knows more than `at_best` does, it may
            ask whether a candidate that costs no less is beaten, and return None if so: the front is the same.
        order: what a candidate is judged by; the least comes first.
        same: differences that count for nothing.
    """
    known: list[tuple[T, Costs]] = []
    unknown: dict[str, list[T]] = {}
    skipped = 0
    bounds = [at_best(one) for one in candidates]
    # Those that could be the best come first, so that they spare others.
    for number in sorted(range(len(candidates)), key=lambda number: (order(bounds[number]), number)):
        if any(costs.beats(bounds[number], same) for _, costs in known):
            skipped += 1
            continue
        # Without tolerance here: what beats those that are known also beats this one, whatever it costs.
        found = find(candidates[number], lambda least: any(costs.beats(least, 0.0) for _, costs in known))
        if found is None:
            skipped += 1
        elif isinstance(found, str):
            unknown.setdefault(found, []).append(candidates[number])
        else:
            known.append((candidates[number], found))
    rows: list[tuple[T, Costs]] = []
    for one, costs in sorted(known, key=lambda pair: (order(pair[1]), pair[1])):
        if not any(other.beats(costs, same) for _, other in rows):
            rows = [row for row in rows if not costs.beats(row[1], 0.0)] + [(one, costs)]
    return Front(rows, skipped, len(known) - len(rows), unknown)
