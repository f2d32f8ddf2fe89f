"""The buffer of one rank with shards that only note what they are given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.grads import local
from offload.grads.local import LocalGradients
from offload.grads.shards import Place
from offload.layout import Layout, ParamSpec, build
from offload.sizes import SUM_BLOCK
from tests.support.late_copier import LateCopier
from tests.support.runs import layout_of, run_of


@dataclass
class Noted:
    """Shards in slots that note each call, with the values and the thread. `fails`: so do those that follow."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    values_given: list[Tensor] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    fails: bool = False
    is_in_memory = come_whole = False

    def __post_init__(self) -> None:
        self.sums = SimpleNamespace(norms={}, forget=lambda param: None, forget_all=lambda: None)
        self.dtypes = [torch.float32] * 10
        self.stored = torch.zeros(1000)

    def _note(self, what: str, about: Any) -> None:
        self.calls.append((what, about))
        self.threads.add(threading.current_thread().name)

    def tile_memory(self, param: int, tile: int) -> Tensor | None:
        return None

    def add(self, values: Tensor, place: Place) -> None:
        if self.fails:
            raise OSError("the disk is gone")
        self._note("add", place)
        self.values_given.append(values.clone())

    def make_zeros(self, param: int, tile: int) -> None:
        self._note("zeros", (param, tile))

    def tile_has_come(self, param: int, tile: int) -> None:
        self._note("has come", (param, tile))

    def sum_squares(self, params: Any) -> None:
        self._note("sum", list(params))

    def values(self, param: int) -> Tensor:
        return self.stored.clone()

    def write(self, param: int, values: Tensor, start: int = 0) -> None:
        self._note("write", (param, start))
        self.stored[start : start + len(values)] = values


@contextmanager
def noted(layout: Layout, *, late: bool = False, **options: Any) -> Iterator[tuple[LocalGradients, Noted]]:
    copier = LateCopier(1) if late else HostCopier()
    shards = Noted()
    run = run_of(layout, copier=copier, tier="nvme", path=".", grad_tier="nvme", **options)
    buffer = LocalGradients(run, run.choice.grads, shards)  # type: ignore[arg-type]
    try:
        yield buffer, shards
    finally:
        buffer.close()


THREE = layout_of((10, 20, 30))
"""In one chunk."""


def ones(param: int) -> Tensor:
    return torch.full((THREE.specs[param].numel,), param + 1.0).bfloat16()


def test_a_chunk_is_unfinished_until_the_last_of_a_micro_batch_and_squares_follow_the_expected_one() -> None:
    with noted(THREE, accumulation=2) as (buffer, shards):
        for _ in range(2):
            for param in (2, 0, 1):
                buffer.accumulate(param, ones(param))
        assert buffer.finalize([0, 1, 2]) == [0, 1, 2]
    (chunk,) = THREE.chunks
    starts = [piece.chunk_offset for piece in chunk.pieces]
    expected: list[tuple[str, Any]] = []
    for micro in range(2):
        for param in (2, 0, 1):
            place = Place(chunk, starts[param], is_first=micro == 0, is_last=micro == 1, is_unfinished=param != 1)
            expected.append(("add", place))
            expected += [("has come", (param, 0))] * (micro == 1)
    assert shards.calls == [*expected, ("sum", [0, 1, 2])]


def test_a_number_that_is_not_declared_is_learnt_from_the_step_before() -> None:
    with noted(THREE, accumulation="auto") as (buffer, shards):
        for came in (3, 3, 1):
            shards.calls.clear()
            for _ in range(came):
                buffer.accumulate(1, ones(1))
            found = [place.is_last for what, place in shards.calls if what == "add"]
            assert found == (
                [True, False, False] if buffer.micro_batches.expected == 1 else [False, False, True][:came]
            )
            buffer.clear_all()
        assert buffer.micro_batches.expected == 1


def test_a_gradient_that_lies_in_several_chunks_comes_in_pieces() -> None:
    layout = layout_of((3 * SUM_BLOCK + 5,))
    grad = torch.arange(3 * SUM_BLOCK + 5).bfloat16()
    with noted(layout) as (buffer, shards):
        buffer.accumulate(0, grad)
    places = [about for what, about in shards.calls if what == "add"]
    assert [place.chunk.index for place in places] == list(range(len(layout.chunks)))
    assert not any(place.is_unfinished for place in places)
    assert torch.equal(torch.cat(shards.values_given), grad)
    assert shards.calls[-1] == ("has come", (0, 0))


def test_on_a_device_one_worker_does_all_that_follows_a_copy_in_the_order_of_the_gradients() -> None:
    with noted(THREE, late=True) as (buffer, shards):
        for param in (2, 0, 1):
            buffer.accumulate(param, ones(param))
        buffer.drain()
        threads = set(shards.threads)
        buffer.finalize([0, 1, 2])
    assert threads == {"offload-gradients_0"}
    (chunk,), (together,) = THREE.chunks, shards.values_given
    place = Place(chunk, 0, is_first=True, is_last=True, is_unfinished=False)
    assert shards.calls == [("add", place), *(("has come", (param, 0)) for param in (2, 0, 1)), ("sum", [0, 1, 2])]
    for param, piece in enumerate(chunk.pieces):
        assert torch.equal(together[piece.chunk_offset :][: piece.numel], ones(param))


def test_a_chunk_is_unfinished_while_gradients_of_it_wait_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second leaves alone, after the others have come and before they leave."""
    monkeypatch.setattr("offload.grads.staging.LARGE_BYTES", 39)
    layout = layout_of((10, 20, 15))
    with noted(layout, late=True) as (buffer, shards):
        for param in (2, 0, 1):
            buffer.accumulate(param, torch.ones(layout.specs[param].numel).bfloat16())
        buffer.drain()
    found = [(place.start, place.is_unfinished) for what, place in shards.calls if what == "add"]
    starts = [piece.chunk_offset for piece in layout.chunks[0].pieces]
    assert found == [(starts[1], True), (starts[0], True), (starts[2], False)]


def test_what_fails_in_the_worker_is_raised_when_gradients_are_waited_for_and_bounces_are_free_again() -> None:
    with noted(THREE, late=True) as (buffer, shards):
        for _ in range(local.BOUNCES + 1):
            shards.fails = True
            for param in range(3):
                buffer.accumulate(param, ones(param))
            for _ in range(2):
                with pytest.raises(OSError, match="the disk is gone"):
                    buffer.finalize([0, 1, 2])
            buffer.reset()
            assert not buffer.has(0)
        shards.fails = False
        buffer.accumulate(0, ones(0))
        assert buffer.finalize([0]) == [0]


def test_tiles_of_one_backward_are_added_as_autograd_adds_uses() -> None:
    """Outside of a backward all gradients are of one, which is none."""
    layout = build([ParamSpec("p", 100, "p", torch.float32, 0, tile=64)], SUM_BLOCK)
    with noted(layout) as (buffer, shards):
        buffer.accumulate(0, torch.ones(64))
        buffer.accumulate(0, torch.ones(36), start=64)
        assert buffer.has(0)
        buffer.accumulate(0, torch.full((100,), 5.0))  # the weight was used as a whole, too
    assert [what for what, _ in shards.calls] == ["add", "has come", "add", "has come", "write", "write"]
    assert [about for what, about in shards.calls if what == "write"] == [(0, 0), (0, 64)]
    assert shards.stored[:101].tolist() == [5.0] * 100 + [0.0]


def test_tiles_that_nobody_used_are_zeros_once_their_parameter_has_a_gradient() -> None:
    layout = build(
        [ParamSpec("p", 192, "p", torch.float32, 0, tile=64), ParamSpec("q", 3, "", torch.float32, 0)], SUM_BLOCK
    )
    with noted(layout) as (buffer, shards):
        for used, others in ((64, [0, 2]), (0, [1, 2])):
            buffer.accumulate(0, torch.ones(64), start=used)
            assert buffer.finalize([0]) == buffer.finalize([0]) == [0]
            assert [about for what, about in shards.calls if what == "zeros"] == [(0, tile) for tile in others]
            shards.calls.clear()
            buffer.clear_all()
            buffer.finalize([0])  # what a step has used can still be read
            assert not [what for what, _ in shards.calls if what == "zeros"]


def test_a_tile_that_was_cleared_in_a_backward_begins_anew() -> None:
    layout = build([ParamSpec("p", 100, "p", torch.float32, 0, tile=64)], SUM_BLOCK)
    with noted(layout) as (buffer, shards):
        buffer.accumulate(0, torch.ones(64))
        buffer.clear(0)
        buffer.accumulate(0, torch.ones(64))
    assert [what for what, _ in shards.calls] == ["add", "has come"] * 2
