"""The front of a search is that of all candidates, though some are not looked at."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offload.planner.front import Costs, Fronts, IsBeaten

COSTS = st.builds(Costs, *(st.integers(1, 4) for _ in range(5)), st.integers(0, 1))
CANDIDATES = st.lists(st.tuples(COSTS, st.integers(0, 3)), min_size=1, max_size=25)


def searched(
    candidates: Sequence[tuple[Costs, int]], same: float, *, asks: bool = False
) -> tuple[list[Costs], list[Costs], int]:
    """The costs on the front, those that were looked at, and the number of those that were not.

    Each candidate is its costs, and how much less of them its bound says. If it `asks`, it is looked at to the end only
    where half of that would not do.
    """
    seen: list[Costs] = []

    def find(one: tuple[Costs, int], is_beaten: IsBeaten) -> Costs | str | None:
        if asks and is_beaten(one[0]._replace(token_s=one[0].token_s - one[1] / 2)):
            return None
        seen.append(one[0])
        return one[0]

    found = Fronts(lambda one: one[0]._replace(token_s=one[0].token_s - one[1]), find, same=same).of(candidates)
    assert found.skipped + found.beaten + len(found.rows) == len(candidates)
    return [costs for _, costs in found.rows], seen, found.skipped


@given(CANDIDATES)
def test_the_front_is_what_no_other_candidate_beats(candidates: list[tuple[Costs, int]]) -> None:
    everything = {costs for costs, _ in candidates}
    wanted = {one for one in everything if not any(other != one and other.beats(one, 0.0) for other in everything)}
    found, _, _ = searched(candidates, 0.0)
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert [one.token_s for one in found] == sorted(one.token_s for one in found)


@given(CANDIDATES)
def test_what_is_left_out_is_about_as_bad_as_something_on_the_front(candidates: list[tuple[Costs, int]]) -> None:
    found, _, _ = searched(candidates, 0.3)
    assert all(any(row.beats(costs, 1.3**2 - 1) for row in found) for costs, _ in candidates)


@given(CANDIDATES, st.sampled_from([0.0, 0.3]))
def test_who_asks_in_between_finds_the_same_front(candidates: list[tuple[Costs, int]], same: float) -> None:
    whole, seen, _ = searched(candidates, same)
    found, less, _ = searched(candidates, same, asks=True)
    assert found == whole
    assert len(less) <= len(seen)


def test_who_asks_in_between_is_told_of_those_that_are_better() -> None:
    fast, slow = Costs(1.0, 5, 5, 5, 5, 0), Costs(9.0, 5, 5, 5, 5, 0)
    found, seen, skipped = searched([(fast, 1), (slow, 9)], 0.0, asks=True)
    assert (found, seen, skipped) == ([fast], [fast], 1)


def test_what_cannot_be_on_the_front_is_not_looked_at() -> None:
    fast, slow = Costs(1.0, 5, 5, 5, 5, 0), Costs(9.0, 5, 5, 5, 5, 0)
    small = Costs(9.0, 1, 5, 5, 5, 0)
    found, seen, skipped = searched([(slow, 2), (small, 2), (fast, 1)], 0.01)
    assert found == [fast, small]
    assert seen == [fast, small]
    assert skipped == 1


def test_whose_costs_are_not_known_is_named() -> None:
    costs = Costs(1.0, 1, 1, 1, 1, 0)
    fronts = Fronts[str](lambda one: costs._replace(token_s=0.5), lambda one, _: costs if one == "b" else "why")
    found = fronts.of(["a", "b", "c"])
    assert found.rows == [("b", costs)]
    assert found.unknown == {"why": ["a", "c"]}


@given(CANDIDATES, CANDIDATES, st.sampled_from([0.0, 0.3]))
def test_of_all_that_were_given_each_is_counted_as_what_was_found_of_it_and_none_is_looked_at_twice(
    first: list[tuple[Costs, int]], others: list[tuple[Costs, int]], same: float
) -> None:
    numbered = list(enumerate(first + others))
    seen: list[int] = []

    def find(one: tuple[int, tuple[Costs, int]], is_beaten: IsBeaten) -> Costs | str:
        seen.append(one[0])
        return "why" if one[0] % 5 == 4 else one[1][0]

    fronts = Fronts[tuple[int, tuple[Costs, int]]](
        lambda one: one[1][0]._replace(token_s=one[1][0].token_s - one[1][1]), find, same=same
    )
    fronts.of(numbered[: len(first)])
    found = fronts.of(numbered[len(first) :])
    unknown = sorted(number for ones in found.unknown.values() for number, _ in ones)
    assert len(seen) == len(set(seen))
    assert unknown == sorted(number for number in seen if number % 5 == 4)
    assert found.beaten + len(found.rows) == len(seen) - len(unknown)
    assert found.skipped == len(numbered) - len(seen)


def test_one_that_a_later_candidate_beats_is_beaten_and_not_skipped() -> None:
    slow, fast = Costs(2.0, 5, 5, 5, 5, 0), Costs(1.0, 5, 5, 5, 5, 0)
    fronts = Fronts[Costs](lambda one: one, lambda one, _: one)
    fronts.of([slow])
    found = fronts.of([fast])
    assert (found.rows, found.skipped, found.beaten) == ([(fast, fast)], 0, 1)
