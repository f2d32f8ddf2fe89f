"""The count of micro-batches by itself."""

from __future__ import annotations

import pytest
import torch

from offload.choices import GradChoice
from offload.errors import AccumulationError
from offload.grads.passes import Passes
from offload.layout import ParamSpec, build
from offload.tiers import CPU

TILED, PLAIN, EMPTY = 0, 1, 2


def passes_of(most: int | None) -> Passes:
    """Of a parameter of 10 elements with tiles of 4, one without tiles, and one without elements."""
    specs = [
        ParamSpec("tiled", 10, "tiled", torch.bfloat16, 0, tile=4),
        ParamSpec("plain", 5, "", torch.bfloat16, 0),
        ParamSpec("empty", 0, "", torch.bfloat16, 0),
    ]
    choice = GradChoice(CPU, most or 2, takes_any=most is None, params_stay=True, stage=None, bucket_bytes=0)
    return Passes(build(specs, 1 << 16), choice)


def test_each_tile_is_counted_by_itself_and_a_parameter_has_a_gradient_when_all_have() -> None:
    passes = passes_of(3)
    assert not passes.has_any()
    assert [passes.count(TILED, tile) for tile in (0, 0, 2)] == [1, 2, 1]
    assert passes.has_any()
    assert not passes.has(TILED)
    assert passes.count(TILED, 1) == 1
    assert passes.has(TILED)
    assert [passes.of(TILED, tile) for tile in range(3)] == [2, 1, 1]
    assert not passes.has(PLAIN)
    passes.count(EMPTY)
    assert passes.has(EMPTY)
    assert (passes.of(PLAIN), passes.of(EMPTY)) == (0, 1)


def test_clearing_one_parameter_leaves_the_others() -> None:
    passes = passes_of(3)
    for tile in range(3):
        passes.count(TILED, tile)
    passes.count(PLAIN)
    passes.clear(TILED)
    assert [passes.of(TILED, tile) for tile in range(3)] == [0, 0, 0]
    assert passes.has(PLAIN)
    passes.clear_all()
    assert not passes.has_any()


@pytest.mark.parametrize(("most", "ordinal"), [(1, "2nd"), (2, "3rd"), (10, "11th"), (21, "22nd"), (111, "112th")])
def test_one_too_many_is_refused_by_name_and_not_counted(most: int, ordinal: str) -> None:
    passes = passes_of(most)
    for _ in range(most):
        passes.count(PLAIN)
    with pytest.raises(AccumulationError, match=rf"^plain got its gradient a {ordinal} time .* accumulation={most}:"):
        passes.count(PLAIN)
    assert passes.of(PLAIN) == most
    passes.clear(PLAIN)
    assert passes.count(PLAIN) == 1


def test_an_undeclared_number_is_expected_to_be_that_of_the_last_step() -> None:
    passes = passes_of(None)
    assert (passes.most, passes.expected) == (None, 1)
    for _ in range(5):
        passes.count(PLAIN)
    passes.count(EMPTY)
    passes.clear_all()
    assert passes.expected == 5
    passes.clear_all()  # zero_grad() after zero_grad(): no step
    assert passes.expected == 5
    passes.count(PLAIN)
    passes.clear_all(3)  # rounds over ranks, in most of which this one had no gradient
    assert passes.expected == 3


def test_a_declared_number_is_expected_however_many_came() -> None:
    passes = passes_of(4)
    passes.count(PLAIN)
    passes.clear_all()
    assert (passes.most, passes.expected) == (4, 4)
    passes.declare(2)
    assert (passes.most, passes.expected) == (2, 2)
    passes.declare(None)
    assert (passes.most, passes.expected) == (None, 1)


def test_parameters_are_equal_when_none_of_them_misses_a_micro_batch() -> None:
    specs = [ParamSpec(f"p{number}", 5, "", torch.bfloat16, 0) for number in range(4)]
    choice = GradChoice(CPU, 2, takes_any=False, params_stay=True, stage=None, bucket_bytes=0)
    for missing in range(4):
        passes = Passes(build(specs, 1 << 16), choice)
        assert passes.are_equal(range(4))
        for param in range(4):
            if param != missing:
                passes.count(param)
        assert not passes.are_equal(range(4))
        assert passes.are_equal([param for param in range(4) if param != missing])
        passes.count(missing)
        assert passes.are_equal(range(4))
