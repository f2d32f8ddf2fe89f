"""The count of micro-batches by itself."""

from __future__ import annotations

import pytest
import torch

from offload.choices import GradChoice
from offload.errors import AccumulationError
from offload.grads.micro_batches import MicroBatches
from offload.layout import ParamSpec, build
from offload.tiers import CPU

TILED, PLAIN, EMPTY = 0, 1, 2


def counted(most: int | None) -> MicroBatches:
    """Of a parameter of 10 elements with tiles of 4, one without tiles, and one without elements."""
    specs = [
        ParamSpec("tiled", 10, "tiled", torch.bfloat16, 0, tile=4),
        ParamSpec("plain", 5, "", torch.bfloat16, 0),
        ParamSpec("empty", 0, "", torch.bfloat16, 0),
    ]
    choice = GradChoice(CPU, most or 2, takes_any=most is None, params_stay=True, stage=None, bucket_bytes=0)
    return MicroBatches(build(specs, 1 << 16), choice)


def test_each_tile_is_counted_by_itself_and_those_that_nobody_used_are_filled() -> None:
    micro_batches = counted(3)
    assert micro_batches.fill(TILED) == []
    assert not micro_batches.has_any()
    assert [micro_batches.count(TILED, tile) for tile in (0, 0, 2)] == [1, 2, 1]
    assert micro_batches.has_any()
    assert micro_batches.has(TILED)
    assert not micro_batches.has_all(TILED)
    assert micro_batches.fill(TILED) == [1]
    assert micro_batches.has_all(TILED)
    assert micro_batches.fill(TILED) == []
    assert [micro_batches.of(TILED, tile) for tile in range(3)] == [2, 1, 1]
    assert not micro_batches.has(PLAIN)
    micro_batches.count(EMPTY)
    assert micro_batches.has(EMPTY)
    assert (micro_batches.of(PLAIN), micro_batches.of(EMPTY)) == (0, 1)


def test_clearing_one_parameter_leaves_the_others() -> None:
    micro_batches = counted(3)
    for tile in range(3):
        micro_batches.count(TILED, tile)
    micro_batches.count(PLAIN)
    micro_batches.clear(TILED)
    assert [micro_batches.of(TILED, tile) for tile in range(3)] == [0, 0, 0]
    assert micro_batches.has(PLAIN)
    micro_batches.clear_all()
    assert not micro_batches.has_any()


@pytest.mark.parametrize(("most", "ordinal"), [(1, "2nd"), (2, "3rd"), (10, "11th"), (21, "22nd"), (111, "112th")])
def test_one_too_many_is_refused_by_name_and_not_counted(most: int, ordinal: str) -> None:
    micro_batches = counted(most)
    for _ in range(most):
        micro_batches.count(PLAIN)
    with pytest.raises(AccumulationError, match=rf"^plain got its gradient a {ordinal} time .* accumulation={most}:"):
        micro_batches.count(PLAIN)
    assert micro_batches.of(PLAIN) == most
    micro_batches.clear(PLAIN)
    assert micro_batches.count(PLAIN) == 1


def test_an_undeclared_number_is_expected_to_be_that_of_the_last_step() -> None:
    micro_batches = counted(None)
    assert (micro_batches.most, micro_batches.expected) == (None, 1)
    for _ in range(5):
        micro_batches.count(PLAIN)
    micro_batches.count(EMPTY)
    micro_batches.clear_all()
    assert micro_batches.expected == 5
    micro_batches.clear_all()  # zero_grad() after zero_grad(): no step
    assert micro_batches.expected == 5
    micro_batches.count(PLAIN)
    micro_batches.clear_all(3)  # rounds over ranks, in most of which this one had no gradient
    assert micro_batches.expected == 3


def test_a_declared_number_is_expected_however_many_came() -> None:
    micro_batches = counted(4)
    micro_batches.count(PLAIN)
    micro_batches.clear_all()
    assert (micro_batches.most, micro_batches.expected) == (4, 4)
    micro_batches.declare(2)
    assert (micro_batches.most, micro_batches.expected) == (2, 2)
    micro_batches.declare(None)
    assert (micro_batches.most, micro_batches.expected) == (None, 1)


def test_parameters_are_equal_when_none_of_them_misses_a_micro_batch() -> None:
    specs = [ParamSpec(f"p{number}", 5, "", torch.bfloat16, 0) for number in range(4)]
    choice = GradChoice(CPU, 2, takes_any=False, params_stay=True, stage=None, bucket_bytes=0)
    for missing in range(4):
        micro_batches = MicroBatches(build(specs, 1 << 16), choice)
        assert micro_batches.are_equal(range(4))
        for param in range(4):
            if param != missing:
                micro_batches.count(param)
        assert not micro_batches.are_equal(range(4))
        assert micro_batches.are_equal([param for param in range(4) if param != missing])
        micro_batches.count(missing)
        assert micro_batches.are_equal(range(4))
