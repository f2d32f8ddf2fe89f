"""Which slot each chunk has: numbers written by hand, and counted one by one over any layout."""

from __future__ import annotations

import dataclasses
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.choices import Choice
from offload.layout import Chunk, Layout, ParamSpec, build
from offload.options import Options, Tuning
from offload.planner.decide import Situation, decide
from offload.planner.placement import chunk_arrays, slot_map
from offload.sizes import PAGE_BYTES
from offload.storage.slot_map import ChunkKind, SlotMap, SlotTable
from offload.storage.swap_format import SlotArrays
from tests.support.slot_maps import slots_of

STATES, PARAMS, GRADS, FROZEN = ChunkKind

# By hand.

BY_HAND = SlotMap(
    {
        FROZEN: [SlotArrays(7, (2,))],
        PARAMS: [SlotArrays(1, (2,)), SlotArrays(2048, (2,)), SlotArrays(2049, (2,))],
        STATES: [SlotArrays(1), SlotArrays(1024)],
    },
    versions=2,
    committed=4,
)
"""Of a rank that has two chunks, and a copy of the parameters of another rank's."""


def test_kinds_lie_one_after_the_other_and_those_without_slots_take_no_number() -> None:
    assert [BY_HAND.at(STATES, 0), BY_HAND.at(STATES, 1)] == [0, 1]
    assert [BY_HAND.at(PARAMS, chunk) for chunk in range(3)] == [2, 3, 4]
    assert BY_HAND.at(FROZEN, 0) == 5
    assert BY_HAND.total == 6
    assert BY_HAND.all_arrays[4] == SlotArrays(2049, (2,))
    assert [*BY_HAND.of(GRADS)] == []


@pytest.mark.parametrize(("kind", "chunk"), [(STATES, 2), (PARAMS, 3), (GRADS, 0), (FROZEN, 1)])
def test_a_chunk_that_has_no_slot_gets_none_of_another_kind(kind: ChunkKind, chunk: int) -> None:
    with pytest.raises(IndexError):
        BY_HAND.at(kind, chunk)


def test_of_parameters_those_are_committed_that_are_the_ranks_own() -> None:
    assert [*BY_HAND.committed_chunks(STATES)] == [0, 1]
    assert [*BY_HAND.committed_chunks(PARAMS)] == [0, 1]
    assert [*BY_HAND.committed_chunks(GRADS)] == [*BY_HAND.committed_chunks(FROZEN)] == []
    assert [BY_HAND.versions_of(slot) for slot in range(6)] == [2, 2, 2, 2, 1, 1]
    assert [*dataclasses.replace(BY_HAND, committed=None).committed_chunks(STATES)] == []


def test_versions_a_of_what_is_committed_lie_first_then_their_versions_b_then_the_rest() -> None:
    """In pages, the superblock and each slot's header included."""
    pages = {0: 4, 1: 4, 2: 2, 3: 2, 4: 3, 5: 2}
    assert {slot: one.nbytes // PAGE_BYTES for slot, one in enumerate(BY_HAND.all_arrays)} == pages
    every = SlotTable(BY_HAND, range(6))
    assert [every.offset(slot) // PAGE_BYTES for slot in range(6)] == [1, 5, 9, 11, 25, 28]
    assert [every.offset(slot, 1) // PAGE_BYTES for slot in range(4)] == [13, 17, 21, 23]
    assert (every.nbytes // PAGE_BYTES, every.uncommitted_nbytes // PAGE_BYTES) == (30, 18)
    one = SlotTable(BY_HAND, [5, 3, 4, 0])
    assert [one.offset(slot) // PAGE_BYTES for slot in (3, 0, 5, 4)] == [1, 3, 13, 15]
    assert [one.offset(slot, 1) // PAGE_BYTES for slot in (3, 0)] == [7, 9]
    assert one.nbytes // PAGE_BYTES == 18


def test_where_steps_are_tried_states_have_one_place_more_and_nothing_else_has() -> None:
    """In pages. `BY_HAND` without the copies of parameters: two chunks of states of 4 pages each."""
    arrays = {STATES: BY_HAND.arrays[STATES], FROZEN: BY_HAND.arrays[FROZEN]}
    committed = SlotTable(SlotMap(arrays, versions=3, committed=2), range(3))
    assert [committed.offset(slot, 2) // PAGE_BYTES for slot in range(2)] == [17, 21]
    assert committed.offset(2) // PAGE_BYTES == 25
    assert (committed.nbytes // PAGE_BYTES, committed.uncommitted_nbytes // PAGE_BYTES) == (27, 19)
    slots = SlotMap(arrays, versions=2, several=2)
    assert [slots.versions_of(slot) for slot in range(3)] == [2, 2, 1]
    never = SlotTable(slots, range(3))
    assert [never.offset(slot, 1) // PAGE_BYTES for slot in range(2)] == [9, 13]
    assert never.nbytes // PAGE_BYTES == never.uncommitted_nbytes // PAGE_BYTES == 19


def test_a_run_without_commits_has_its_slots_in_the_order_it_wants() -> None:
    slots = slots_of([1024, 1, 1024])
    table = SlotTable(slots, [2, 0, 1])
    assert [table.offset(slot) // PAGE_BYTES for slot in (2, 0, 1)] == [1, 5, 9]
    assert table.nbytes == table.uncommitted_nbytes == 13 * PAGE_BYTES


def test_a_file_without_slots_has_a_superblock() -> None:
    assert SlotTable(BY_HAND, []).nbytes == SlotTable(SlotMap({}), []).nbytes == PAGE_BYTES
    assert SlotMap({}).total == 0


def test_a_superblock_tells_of_committed_slots_only_or_of_all_where_nothing_is() -> None:
    committed = dataclasses.replace(
        BY_HAND, arrays={**BY_HAND.arrays, STATES: [SlotArrays(1, (2, 4, 4)), SlotArrays(5)]}
    )
    told = {"held": [3, 0], "numels": [1, 5, 1, 2048], "itemsizes": [[2, 4, 4], [4, 4, 4], [2], [2]]}
    assert committed.describe([5, 3, 4, 0]) == told
    assert slots_of([5, 6]).describe([1, 0]) == {"held": [1, 0], "numels": [5, 6]}


def test_an_array_may_have_an_element_for_several_of_the_chunks() -> None:
    # By hand: 70 halves, 70 codes, 2 scales, each from a page's start.
    small = SlotArrays(70, (2, 1, 1), (1, 1, 64))
    assert small.sizes == (140, 70, 2)
    assert small.nbytes == 4 * PAGE_BYTES
    assert [*small.ranges()] == [(2, 4096, 4236), (1, 8192, 8262), (1, 12288, 12290)]
    assert [len(view) for view in small.views(torch.zeros(small.nbytes, dtype=torch.uint8))] == [70, 70, 2]
    told = SlotMap({STATES: [small], PARAMS: [SlotArrays(70, (2,))]}).describe([0])
    assert told == {
        "held": [0], "numels": [70, 70], "itemsizes": [[2, 1, 1], [2]], "blocks": [[1, 1, 64], []],
    }  # fmt: skip


# Counted one by one.

OPTIONS: dict[str, dict[str, Any]] = {
    "states": {"tier": "nvme", "commit_every": None},
    "states, committed": {"tier": "nvme", "commit_every": 3},
    "all": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme"},
    "all, without commits": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "commit_every": None},
    "gradients": {"tier": "nvme", "param_tier": "cpu", "grad_tier": "nvme", "accumulation": 2},
    "split masters": {"tier": "nvme", "tuning": Tuning(split_master=True)},
    "split masters, parameters": {"tier": "nvme", "param_tier": "nvme", "tuning": Tuning(split_master=True)},
    "commits of what is in RAM": {"tier": "cpu", "commit_every": 1},
    "nothing but frozen": {"tier": "cpu", "param_tier": "nvme", "commit_every": None},
}
SPECS = st.lists(
    st.builds(
        ParamSpec,
        name=st.text(max_size=2),
        numel=st.one_of(st.integers(0, 3), st.integers(0, 3000)),
        unit=st.sampled_from(["", "blocks.0"]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        group=st.sampled_from([0, None]),
    ),
    max_size=8,
)


def frozen_in(held: Layout) -> list[Chunk]:
    """The chunks of frozen parameters."""
    return [chunk for chunk in held.param_chunks if held.flats[chunk.flat].is_frozen]


def counted(held: Layout, choice: Choice) -> dict[tuple[ChunkKind, int], int]:
    """The number of each chunk's slot, by kind and the chunk's number in its kind."""
    numbers, found = count(), {}
    if choice.states.tier.is_durable or choice.commits.every is not None:
        for chunk in held.chunks:
            found[STATES, chunk.index] = next(numbers)
    if choice.params.tier.is_durable or choice.commits.holds_params:
        for chunk in held.trained.param_chunks:
            found[PARAMS, chunk.index] = next(numbers)
    if choice.grads.tier.is_durable:
        for chunk in held.chunks:
            found[GRADS, chunk.index] = next(numbers)
    if choice.params.frozen_tier.is_durable:
        for number, _ in enumerate(frozen_in(held)):
            found[FROZEN, number] = next(numbers)
    return found


@given(
    specs=SPECS,
    chunk_numel=st.one_of(st.integers(1, 64), st.integers(64, 4096)),
    options=st.sampled_from([*OPTIONS.values()]),
    world=st.sampled_from([(1, 0, 1), (2, 1, 1), (4, 0, 2), (4, 3, 4)]),
    data=st.data(),
)
def test_every_slot_is_where_counting_one_by_one_finds_it(
    specs: list[ParamSpec], chunk_numel: int, options: dict[str, Any], world: tuple[int, int, int], data: st.DataObject
) -> None:
    ranks, rank, replicas = world
    specs.sort(key=lambda spec: spec.is_frozen)
    held = build(specs, chunk_numel, ranks=ranks, rank=rank, replicas=replicas)
    # Whatever is drawn: without frozen parameters some options would be refused.
    choice = decide(Options(path="run", **options), Situation(4 * held.trained.numel, 1 << 20, ranks=ranks))
    slots = slot_map(choice, chunk_arrays(held, choice))
    expected = counted(held, choice)
    assert slots.total == len(expected)
    assert {at: slots.at(*at) for at in expected} == expected
    for kind in ChunkKind:
        assert [*slots.of(kind)] == [number for (one, _), number in expected.items() if one is kind]
    numels = {slot: slots.all_arrays[slot].numel for slot in range(slots.total)}
    chunks = {
        STATES: held.chunks, PARAMS: held.trained.param_chunks, GRADS: held.chunks, FROZEN: frozen_in(held)
    }  # fmt: skip
    assert numels == {number: chunks[kind][chunk].numel for (kind, chunk), number in expected.items()}
    # What is committed: all states, and with split masters the own parameters.
    both = (STATES, PARAMS) if choice.commits.holds_params else (STATES,)
    named = [] if choice.commits.every is None else [(kind, chunk.index) for kind in both for chunk in held.chunks]
    assert [(kind, chunk) for kind in ChunkKind for chunk in slots.committed_chunks(kind)] == named
    # One file of them, page by page.
    every = data.draw(st.permutations(range(slots.total)))
    lying = every[: data.draw(st.integers(0, len(every)))]
    versions = 1 if choice.commits.every is None else 2
    twice = {expected[at] for at in named}
    end, table = PAGE_BYTES, SlotTable(slots, lying)
    for version in range(versions):
        for slot in lying if versions == 1 else [slot for slot in lying if slot in twice]:
            assert table.offset(slot, version) == end
            end += slots.all_arrays[slot].nbytes
    for slot in [] if versions == 1 else [slot for slot in lying if slot not in twice]:
        assert table.offset(slot) == end
        end += slots.all_arrays[slot].nbytes
    assert table.nbytes == end
