"""The cache's decisions against brute force, LRU, and the fraction that a budget covers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.storage.policy import belady, residents, victim


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 400), st.randoms())
def test_residents_fit_and_nothing_more_would(sizes: list[int], budget: int, random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    chosen = residents(order, sizes, budget)
    left = budget - sum(sizes[chunk] for chunk in chosen)
    assert left >= 0
    assert all(sizes[chunk] > left for chunk in order if chunk not in chosen)


@given(st.integers(1, 40), st.integers(0, 50))
def test_equal_chunks_stay_in_exactly_the_fraction_that_the_budget_covers(chunks: int, covered: int) -> None:
    assert len(residents(range(chunks), [7] * chunks, 7 * covered + 6)) == min(covered, chunks)


@pytest.mark.parametrize(("chunks", "covered"), [(72, 18), (72, 36), (72, 54), (10, 3), (7, 1)])
def test_residents_are_spread_over_the_order(chunks: int, covered: int) -> None:
    places = sorted(residents(range(chunks), [4096] * chunks, 4096 * covered))
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert all(chunks // covered <= gap <= -(-chunks // covered) for gap in gaps)
    assert places[0] < chunks / covered


def brute_force(order: Sequence[int], buffers: int) -> int:
    """The fewest fetches that any choice of what to drop reaches, with one of `buffers` for the chunk in use."""

    @cache
    def least(position: int, held: frozenset[int]) -> int:
        if position == len(order):
            return 0
        if order[position] in held:
            return least(position + 1, held)
        room = [held - {gone} for gone in held] if len(held) == buffers else [held]
        return 1 + min(least(position + 1, left | {order[position]}) for left in room)

    return least(0, frozenset())


def least_recently_used(order: Sequence[int], buffers: int) -> int:
    held: dict[int, None] = {}
    count = 0
    for chunk in order:
        count += chunk not in held
        held.pop(chunk, None)
        held[chunk] = None
        if len(held) > buffers:
            del held[next(iter(held))]
    return count


def fetches(order: Sequence[int], retained: Collection[int], fresh: Collection[int] = ()) -> int:
    """How often a chunk is read on `order`, beginning with nothing in RAM."""
    return len(order) - len(retained) - len(fresh)


orders = st.lists(st.integers(0, 5), max_size=12)


@given(orders, st.integers(1, 4))
def test_fetches_are_the_fewest_possible(order: list[int], buffers: int) -> None:
    assert fetches(order, belady(order, buffers - 1)) == brute_force(order, buffers)


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 12))
def test_never_more_fetches_than_least_recently_used(order: list[int], buffers: int) -> None:
    assert fetches(order, belady(order, buffers - 1)) <= least_recently_used(order, buffers)


@given(orders, st.integers(0, 4))
def test_what_stays_fits_beside_the_chunk_in_use(order: list[int], waiting: int) -> None:
    kept = belady(order, waiting)
    for now, chunk in enumerate(order):
        beside = {
            order[start]
            for start in kept
            if start < now and order[start] != chunk and now < order.index(order[start], start + 1)
        }
        assert len(beside) <= waiting


def test_there_and_back_keeps_what_is_at_the_turn() -> None:
    there_and_back = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert belady(there_and_back, 1) == {3, 4}
    assert belady(there_and_back, 0) == {4}


def test_the_victim_is_what_is_used_furthest_ahead_or_not_at_all() -> None:
    assert victim([1, 2, 3], [3, 1, 2, 1]) == 2
    assert victim([1, 2, 3], [3, 1]) == 2
    assert victim([1], []) == 1
    assert victim([], [1, 2]) is None
