"""Which units are prefetched, and which may be released: decided from the order and the uses of units alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.layout import ParamSpec, build
from offload.model.policy import Ahead, UnitOrder, UnitPolicy
from offload.model.unit import Unit, Units

NAMES = ["", "a", "b", "b.inner", "c", "d"]


def units_of(*names: str) -> list[Unit]:
    """Units that stream, each of one parameter."""
    specs = [ParamSpec(f"{name}.weight", 10, name, torch.bfloat16, 0) for name in names]
    made = Units(build(specs, 1024), range(len(names)))
    return [made[name] for name in names]


def arrive(*units: Unit) -> None:
    for unit in units:
        unit.fetch()
        unit.arrive()


# The order.


@given(
    passes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=2, max_size=4),
    ahead=st.integers(0, 3),
)
def test_what_comes_next_is_what_came_next_in_the_pass_before(passes: list[list[int]], ahead: int) -> None:
    units, order = units_of("a", "b", "c", "d", "e"), UnitOrder(Ahead(ahead))
    before: list[int] = []
    for numbers in passes:
        order.begin_pass()
        left, entered = list(before), []
        for number in numbers:
            order.enter(units[number])
            if not entered or entered[-1] != number:
                entered.append(number)
                # What is not expected any more does not change what is.
                left = left[left.index(number) + 1 :] if number in left else left
            assert order.after(units[number]) == [units[one] for one in dict.fromkeys(left[:ahead])]
        before = entered


def test_tiles_that_the_routing_names_are_expected_in_place_of_those_of_the_pass_before() -> None:
    specs = [ParamSpec("a.w", 10, "a", torch.bfloat16, 0), ParamSpec("w", 256, "w", torch.bfloat16, 0, tile=64)]
    made = Units(build(specs, 1024), range(2))
    block, *tiles = made["a"], *(made[f"w[{number}]"] for number in range(4))
    order = UnitOrder(Ahead(2))
    order.begin_pass()
    for unit in (block, tiles[0], tiles[1], block, tiles[1], tiles[0], block):
        order.enter(unit)
    order.begin_pass()
    order.enter(block)
    assert order.after(block) == [tiles[0], tiles[1]]
    order.expect_tiles([tiles[1], tiles[3]])
    assert order.after(block) == [tiles[1], tiles[3]]
    order.enter(tiles[1])
    order.enter(tiles[3])
    assert order.after(tiles[3]) == [block, tiles[1]]
    order.enter(block)
    order.enter(tiles[1])
    assert order.after(tiles[1]) == [block], "the first tile is not used in this pass"


def test_passes_with_and_without_gradients_have_orders_of_their_own() -> None:
    (a, b, c), order = units_of("a", "b", "c"), UnitOrder(Ahead(2))
    for unit in (a, b, c, b, a):
        order.enter(unit)
    assert order.begin_pass() == (), "the store expects it already"
    for unit in (a, b, c, b, a):
        order.enter(unit)
    with torch.no_grad():
        assert order.begin_pass() == ()
        assert not order.is_training
        for unit in (c, a):
            order.enter(unit)
    # The store has expected the pass without gradients until now, and learns of the other one.
    assert order.begin_pass() == (a, b, c, b, a)
    assert order.is_training
    order.enter(a)
    assert order.after(a) == [b, c]
    with torch.no_grad():
        order.begin_pass()
        assert order.after(a) == [c, a]


# What stays.


def uses(policy: UnitPolicy, unit: Unit) -> dict[str, tuple[object, object]]:
    """By the reason for which a unit stays: what makes it stay, and what ends that."""

    def run(forwards: int) -> None:
        unit.forwards = forwards

    return {
        "its forward runs": (lambda: run(1), lambda: run(0)),
        "gathered": (lambda: policy.gather(unit), lambda: policy.let_go(unit)),
        "used": (lambda: policy.use_begins([unit]), lambda: policy.use_ends([unit])),
        "kept": (lambda: policy.keep([unit]), policy.forget_graphs),
        "its backward began last": (lambda: policy.backward_begins(unit), policy.backward_ends),
        "interrupted": (lambda: policy.use_begins([unit]), policy.forget_calls),
    }


@pytest.mark.parametrize("why", uses(UnitPolicy(Ahead(0)), units_of("a")[0]))
def test_a_unit_in_use_stays_until_its_use_ends(why: str) -> None:
    (a, b), policy = units_of("a", "b"), UnitPolicy(Ahead(1))
    begin, end = uses(policy, a)[why]
    assert policy.unused([a, b], []) == [a, b]
    begin()  # type: ignore[operator]
    assert policy.is_in_use(a)
    assert policy.unused([a, b], []) == [b]
    assert policy.unused([a, b], [b]) == []
    end()  # type: ignore[operator]
    assert policy.unused([a, b], []) == [a, b]


def test_uses_are_nested_and_a_unit_gathered_twice_is_let_go_of_twice() -> None:
    (a, b), policy = units_of("a", "b"), UnitPolicy(Ahead(1))
    policy.use_begins([a, b])
    policy.use_begins([a])
    policy.use_ends([a])
    assert policy.unused([a, b], []) == []
    policy.use_ends([a, b])
    assert policy.unused([a, b], []) == [a, b]
    policy.gather(a)
    policy.gather(a)
    policy.let_go(a)
    assert policy.holds_any
    assert policy.is_in_use(a)
    policy.let_go(a)
    assert not policy.holds_any


def test_the_units_around_the_one_whose_backward_began_last_stay_in_each_thread() -> None:
    units = units_of(*NAMES)
    root, a, b, inner, _, d = units
    policy = UnitPolicy(Ahead(1))
    policy.backward_begins(inner)
    other = threading.Thread(target=policy.backward_begins, args=(d,))
    other.start()
    other.join()
    assert [unit for unit in units if policy.is_in_use(unit)] == [root, b, inner, d]
    policy.backward_begins(a)  # in this thread the one before has ended
    assert [unit for unit in units if policy.is_in_use(unit)] == [root, a, d]
    policy.backward_ends()
    assert not any(map(policy.is_in_use, units))


def test_while_a_graph_is_made_of_a_backward_nothing_leaves() -> None:
    (a, b), policy = units_of("a", "b"), UnitPolicy(Ahead(1))
    assert policy.why_more_stays is None
    policy.keep([a])
    assert "functions of autograd" in str(policy.why_more_stays)
    policy.makes_graph = True
    assert "create_graph=True" in str(policy.why_more_stays)
    assert policy.unused([a, b], []) == []
    policy.forget_graphs()
    assert policy.why_more_stays is None
    assert policy.unused([a, b], []) == [a, b]


# What comes.


def test_guests_come_first_and_have_no_room_that_was_planned() -> None:
    (a, b, c, guest), policy = units_of("a", "b", "c", "guest"), UnitPolicy(Ahead(2))
    for unit in (a, b, c):
        policy.order.enter(unit)
    policy.order.begin_pass()
    policy.order.enter(a)
    a.guests[guest] = None
    assert list(policy.next_to(a)) == [(guest, False), (b, True), (c, True)]
    arrive(guest, c)
    assert list(policy.next_to(a)) == [(b, True)]
    policy.keep([c])  # of which the plan knows nothing
    assert list(policy.next_to(a)) == [(b, False)]


def test_what_is_on_its_way_stays_for_the_unit_that_is_entered_and_what_is_here_does_not() -> None:
    (a, b, c), policy = units_of("a", "b", "c"), UnitPolicy(Ahead(2))
    for unit in (a, b, c):
        policy.order.enter(unit)
    policy.order.begin_pass()
    policy.order.enter(a)
    b.fetch()
    arrive(c)
    assert policy.wanted_with(a) == [a, b]


def test_a_unit_that_was_borrowed_is_so_until_it_is_given_back() -> None:
    (a, b), policy = units_of("a", "b"), UnitPolicy(Ahead(1))
    policy.borrow(a)
    policy.borrow(b)
    policy.borrow(a)
    assert policy.borrowed == [a, b]
    assert policy.unused([a, b], []) == [a, b], "of no use to the thread that trains"
    policy.give_back(a)
    policy.give_back(a)
    assert policy.borrowed == [b]


# Units that stay.


def test_what_stays_is_released_only_if_nobody_uses_it_and_everything_has_to_go() -> None:
    a, b, c = units_of("a", "b", "c")
    policy = UnitPolicy(Ahead(1))
    a.stays = b.stays = True
    policy.keep([b])
    assert policy.unused([a, b, c], ()) == [c]
    assert policy.idle([a, b, c]) == [a, c]
    policy.makes_graph = True
    assert policy.idle([a, b, c]) == []


def test_what_is_there_and_stays_is_passed_over_by_what_comes_next() -> None:
    a, b, c, d = units_of("a", "b", "c", "d")
    order = UnitOrder(Ahead(1))
    b.stays = True
    for unit in (a, b, c, d):
        order.enter(unit)
    order.begin_pass()
    order.enter(a)
    assert order.after(a) == [b], "it is not there"
    arrive(b, c)
    assert order.after(a) == [c], "c is there, and does not stay"
    order.enter(b)
    assert order.after(b) == [c, d], "b has no place of those that come and go"


def test_the_store_expects_what_stays_once() -> None:
    a, b, c = units_of("a", "b", "c")
    order = UnitOrder(Ahead(1))
    a.stays = b.stays = True

    def two_passes() -> Sequence[Unit]:
        for unit in (a, b, c, b, a):
            order.enter(unit)
        with torch.no_grad():
            order.begin_pass()
        return order.begin_pass()

    assert two_passes() == (a, b, c)
    arrive(b)
    assert two_passes() == (a, c)
