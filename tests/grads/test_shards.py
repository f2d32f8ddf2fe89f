"""Where gradients wait, by itself: in memory, and in a store that is a dict of tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.grads.shards import GradShards, Place, ShardsInMemory, ShardsInSlots, dtypes_of
from offload.layout import Layout, ParamSpec, build
from offload.optim import reference
from offload.ranks.buckets import SubRange, cut_buckets
from offload.sizes import SUM_BLOCK
from offload.storage.chunk_cache import Use
from tests.support.runs import layout_of, run_of

NUMELS = (2 * SUM_BLOCK + 5, 100, 7, SUM_BLOCK)
"""Over several chunks, and several in one chunk."""


class FakeStore:
    """A buffer for each chunk, and nothing else. What is there is NaN until it is written, and when it is not read.

    leased: the chunks, in the order in which they were lent; expected: as they were announced.
    """

    def __init__(self, layout: Layout, micro_batches: int) -> None:
        dtypes = dtypes_of(layout, micro_batches)
        self.buffers = [torch.full((chunk.numel,), float("nan"), dtype=dtypes[chunk.flat]) for chunk in layout.chunks]
        self.leased: list[int] = []
        self.expected: list[int] = []
        self.is_lent = False

    @contextmanager
    def lease(self, chunk: int, use: Use, *, step: int) -> Iterator[SimpleNamespace]:
        assert not self.is_lent, "one at a time"
        if use is Use.OVERWRITE:
            self.buffers[chunk].fill_(float("nan"))
        self.leased.append(chunk)
        self.is_lent = True
        yield SimpleNamespace(arrays=[self.buffers[chunk]])
        self.is_lent = False

    def repeat(self, consumed: Any) -> None:
        self.expected = list(consumed)


def shards_of(where: str, layout: Layout, micro_batches: int = 1) -> GradShards:
    stage = 2 if layout.ranks > 1 else None
    if where == "memory":
        return ShardsInMemory(run_of(layout, tier="cpu", accumulation=micro_batches, stage=stage), micro_batches)
    run = run_of(layout, tier="nvme", path=".", grad_tier="nvme", accumulation=micro_batches, stage=stage)
    return ShardsInSlots(run, micro_batches, FakeStore(layout, micro_batches))  # type: ignore[arg-type]


def gradient(param: int, micro: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * param + micro)).bfloat16()


def add_all(shards: GradShards, layout: Layout, micro: int, *, is_last: bool) -> None:
    """Each parameter's gradient, piece by piece, as one rank brings it."""
    for param in reversed(range(len(layout.specs))):
        values = gradient(param, micro, layout.specs[param].numel)
        for chunk, piece in layout.pieces_of(param):
            part = values[piece.param_offset : piece.param_offset + piece.numel]
            shards.add(part, Place(chunk, piece.chunk_offset, micro == 0, is_last, is_unfinished=False))
        if is_last:
            shards.tile_has_come(param, 0)


def squares(values: np.ndarray, first: int = 0) -> list[float]:
    return reference.sum_squares(values, first).tolist() if len(values) else []


@pytest.mark.parametrize("where", ["memory", "slots"])
@pytest.mark.parametrize("came", [1, 2, 3])
def test_what_comes_is_summed_and_its_squares_too_whichever_micro_batch_is_the_last(where: str, came: int) -> None:
    layout = layout_of(NUMELS)
    shards = shards_of(where, layout, micro_batches=3)
    for micro in range(came):
        add_all(shards, layout, micro, is_last=micro == 1)  # two were expected
    params = range(len(NUMELS))
    assert [bool(shards.sums.stale(param)) for param in params] == [came != 2] * len(NUMELS)
    shards.sum_squares(params)
    for param, numel in enumerate(NUMELS):
        total = np.zeros(numel, dtype=np.float32)
        for micro in range(came):
            total += gradient(param, micro, numel).float().numpy()
        assert np.array_equal(shards.values(param).numpy(), total)
        assert shards.sums.on_cpu()[param][0].tolist() == squares(total)
    for chunk in layout.chunks:
        with shards.shard(chunk.index) as lent:
            grads = lent.clone()
        for piece in chunk.pieces:
            found = grads[piece.chunk_offset : piece.chunk_offset + piece.numel]
            assert torch.equal(found, shards.values(piece.param)[piece.param_offset :][: piece.numel])


def test_slots_are_leased_once_for_each_piece_that_comes_and_not_again_for_its_squares() -> None:
    layout = layout_of(NUMELS)
    shards = shards_of("slots", layout)
    add_all(shards, layout, 0, is_last=True)
    shards.sum_squares(range(len(NUMELS)))
    store = shards._store  # type: ignore[attr-defined]
    assert store.leased == [c for param in reversed(range(len(NUMELS))) for c in layout.chunks_of[param]]
    shards.expect([2, 0], repeats=True)
    assert store.expected == [2, 0]


@pytest.mark.parametrize("where", ["memory", "slots"])
@pytest.mark.parametrize(("came", "expected"), [(1, 1), (2, 2), (3, 2), (1, 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_buckets_are_summed_as_they_come_from_the_end(where: str, came: int, expected: int, rank: int) -> None:
    layout = layout_of(NUMELS, ranks=2, rank=rank)
    shards = shards_of(where, layout, micro_batches=3)
    for step in range(2):
        step_over_buckets(shards, layout, 10 * step, came, expected)


def _ranges(layout: Layout) -> list[SubRange]:
    return [one for bucket in cut_buckets(layout, 20_000) for one in bucket.ranges]


def step_over_buckets(shards: GradShards, layout: Layout, seed: int, came: int, expected: int) -> None:
    numel = layout.shard_numel(0)
    start = layout.shard_range(0)[0]
    rounds = [torch.randn(numel, generator=torch.Generator().manual_seed(seed + number)) for number in range(came)]
    for number, average in enumerate(rounds):
        for one in _ranges(layout):
            values = average[one.start : one.start + one.numel]
            memory = shards.range_memory(one) if number == 0 else None
            if memory is None:
                shards.add_range(one, values, is_first=number == 0, is_last=number + 1 == expected)
            else:
                memory.copy_(values)
    ready = not shards.is_in_memory and came == expected
    held = [param for param in range(len(NUMELS)) if layout.chunks_of[param]]
    for param in held if ready else ():
        shards.tile_has_come(param, 0)
    stale = [param for param in range(len(NUMELS)) if shards.sums.stale(param)]
    assert set(held) & set(stale) == (set() if ready else set(held))
    shards.sum_squares(range(len(NUMELS)))
    total = sum(rounds[1:], rounds[0]).numpy()
    for param in range(len(NUMELS)):
        first, last = layout.param_shard_range(param)
        at = layout.locations[param][1] + first - start
        mine = total[at : at + last - first]
        assert np.array_equal(shards.values(param).numpy(), mine)
        assert shards.sums.on_cpu()[param][0].tolist() == squares(mine, first)


class Places(ShardsInMemory):
    """Notes what is added, and adds nothing."""

    noted: list[Place]

    def add(self, values: Tensor, place: Place) -> None:
        self.noted.append(place)


def test_a_chunk_is_unfinished_until_a_bucket_brings_its_first_element() -> None:
    layout = layout_of(NUMELS, ranks=2)
    places = Places(run_of(layout, tier="cpu", accumulation=2, stage=2), 2)
    places.noted = []
    for one in _ranges(layout):
        places.add_range(one, torch.zeros(one.numel), is_first=False, is_last=True)
    finished = [place for place in places.noted if not place.is_unfinished]
    assert [place.start for place in finished] == [0] * len(layout.chunks)
    assert [place.chunk for place in finished] == list(reversed(layout.chunks))
    assert len(places.noted) > len(finished)
    assert all(place.is_last and not place.is_first for place in places.noted)


def test_gradients_come_whole_only_where_nothing_is_added() -> None:
    layout = layout_of(NUMELS)
    assert shards_of("memory", layout, micro_batches=2).tile_memory(0, 0) is None
    assert shards_of("slots", layout).tile_memory(0, 0) is None
    shards = shards_of("memory", layout)
    for param, numel in enumerate(NUMELS):
        memory = shards.tile_memory(param, 0)
        assert memory is not None
        memory.copy_(gradient(param, 0, numel))
        shards.tile_has_come(param, 0)
        assert torch.equal(shards.values(param), gradient(param, 0, numel))
        assert shards.sums.on_cpu()[param][0].tolist() == squares(gradient(param, 0, numel).float().numpy())


@pytest.mark.parametrize("where", ["memory", "slots"])
def test_one_tile_is_written_and_the_others_stay(where: str) -> None:
    tile = SUM_BLOCK + 64
    layout = build([ParamSpec("p", 3 * tile, "p", torch.bfloat16, 0, tile=tile)], 4 * SUM_BLOCK)
    shards = shards_of(where, layout)
    if where == "memory":
        for number in range(3):
            memory = shards.tile_memory(0, number)
            assert memory is not None
            memory.fill_(1)
            shards.tile_has_come(0, number)
    else:
        for chunk, piece in layout.pieces_of(0):
            values = torch.ones(piece.numel).bfloat16()
            shards.add(values, Place(chunk, 0, is_first=True, is_last=True, is_unfinished=False))
        for number in range(3):
            shards.tile_has_come(0, number)
    shards.write(0, torch.full((tile,), 3.0).bfloat16(), tile)
    assert shards.values(0).float().tolist() == [1.0] * tile + [3.0] * tile + [1.0] * tile
    sums = [one.sum().item() for one in shards.sums.on_cpu()[0]]
    assert sums == [tile, 9 * tile, tile]
    assert shards.sums.stale(0) == []


def test_values_that_were_changed_where_they_are_count_when_they_are_written_back() -> None:
    layout = layout_of((10,), dtype=torch.float32)
    shards = shards_of("memory", layout)
    memory = shards.tile_memory(0, 0)
    assert memory is not None
    memory.fill_(1)
    values = shards.values(0)
    values += 1
    shards.write(0, values)
    assert shards.sums.on_cpu()[0][0].tolist() == [40.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_changes_gradients_of_which_it_has_elements_of_this_rank_only(rank: int) -> None:
    """A parameter may be whole on this rank before the others have all of theirs."""
    layout = layout_of(NUMELS, ranks=2, rank=rank)
    shards = shards_of("memory", layout)
    first, stop = layout.shard_range(0)
    for one in _ranges(layout):
        for param in range(len(NUMELS)):
            shards.tile_has_come(param, 0)
        shards.range_memory(one)
        begin, end = first + one.start, min(first + one.start + one.numel, stop)
        for param in range(len(NUMELS)):
            at = layout.locations[param][1]
            has_some = max(at, begin) < min(at + NUMELS[param], end)
            assert (shards.sums.generation(param) is None) is has_some
