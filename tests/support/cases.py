"""Which cases of a test run with all other tests: the others are slow."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def covering(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """The numbers of a few cases that together have each value at each place: first whichever brings most new ones."""
    new = [set(enumerate(case)) for case in cases]
    chosen: set[int] = set()
    seen: set[tuple[int, Hashable]] = set()
    while any(case - seen for case in new):
        best = max(range(len(new)), key=lambda number: len(new[number] - seen))
        chosen.add(best)
        seen |= new[best]
    return chosen


def each_value_often(cases: Iterable[Sequence[str]]) -> list[Any]:
    """The cases as params: a few run in make test, which have each value at each place, and all of them in make
    test-slow."""
    cases = list(cases)
    chosen = covering(cases)
    marks = [() if number in chosen else (pytest.mark.slow,) for number in range(len(cases))]
    return [pytest.param(*case, id="-".join(case), marks=of) for case, of in zip(cases, marks, strict=True)]


def products(*lists: Iterable[Any], often: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All combinations of values of several lists as params: those that `often` names run in make test, all of them in
    make test-slow."""
    return some([*itertools.product(*lists)], often)


def some(cases: Sequence[tuple[Any, ...]], often: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases as params, as `products` of those that it makes."""
    chosen = [*often]
    assert all(case in cases for case in chosen)
    return [pytest.param(*case, marks=() if case in chosen else (pytest.mark.slow,)) for case in cases]


def often(cases: Iterable[str], *chosen: str) -> list[Any]:
    """The cases as params: those that are `chosen` run in make test, all of them in make test-slow."""
    cases = list(cases)
    assert set(chosen) <= set(cases)
    return [pytest.param(case, id=case, marks=() if case in chosen else (pytest.mark.slow,)) for case in cases]
