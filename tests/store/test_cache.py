from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.store.cache import keep_in_ram


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 400), st.randoms())
def test_what_is_kept_fits_and_nothing_more_would(sizes: list[int], budget: int, random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    kept = keep_in_ram(order, sizes, budget)
    left = budget - sum(sizes[chunk] for chunk in kept)
    assert left >= 0
    assert all(sizes[chunk] > left for chunk in order if chunk not in kept)


@given(st.integers(1, 30), st.integers(0, 40))
def test_equal_chunks_keep_exactly_the_fraction_that_the_budget_covers(chunks: int, covered: int) -> None:
    kept = keep_in_ram(range(chunks), [7] * chunks, 7 * covered + 6)
    assert kept == frozenset(range(max(chunks - covered, 0), chunks))


def test_the_last_of_the_order_are_kept() -> None:
    assert keep_in_ram([2, 0, 1], [4, 4, 4], 8) == {0, 1}
    assert keep_in_ram([0, 1, 2], [4, 4, 4], 0) == frozenset()
