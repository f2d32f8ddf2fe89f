"""Which chunks stay in RAM, and how many buffers the others pass through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.errors import BudgetError
from offload.planner.explain import plan_of
from offload.planner.placement import IN_FLIGHT, _within
from offload.storage.pool import Pool


@given(st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from([None, 1, 2, 3, 7]))
def test_buffers_are_as_many_as_wanted_and_fit_and_no_more_than_chunks_need(
    data: st.DataObject, sizes: list[int], in_flight: int | None
) -> None:
    room = data.draw(st.integers(max(sizes), sum(sizes) + 60), "room")
    pool = _within(room, Pool(sizes, frozenset(range(len(sizes))), 0), in_flight)
    assert sum(size for chunk, size in enumerate(sizes) if chunk in pool.resident) == pool.resident_bytes
    assert pool.resident_bytes + pool.buffer_bytes == pool.nbytes <= room
    streamed = len(sizes) - len(pool.resident)
    if sum(sizes) <= room:
        assert (streamed, pool.in_flight) == (0, 0)
    else:
        assert 1 <= pool.in_flight <= streamed
        assert pool.in_flight == min(in_flight or IN_FLIGHT, room // max(sizes))
        assert pool.in_flight * max(sizes) <= room


@pytest.mark.parametrize(("tier", "said"), [("cpu", "are needed"), ("nvme", "would be used")])
def test_ranks_of_one_machine_share_what_is_free(tier: str, said: str) -> None:
    """They look before any of them takes memory: a budget that fits once does not fit as often as there are ranks."""
    options = {"path": "."} if tier == "nvme" else {}
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    planned = plan_of(model, direct=True, tier=tier, cpu_memory="1GiB", commit_every=None, **options)
    needed = planned.place().arena_bytes

    def placed(free: int, ranks: int) -> int:
        room = replace(planned.room, free_cpu_bytes=free, ranks_on_node=ranks)
        return replace(planned, room=room).place().arena_bytes

    assert placed(needed, 1) == placed(3 * needed, 3) == needed
    with pytest.raises(BudgetError, match=f"{said} and .* are free for each of 3 ranks") as caught:
        placed(3 * needed - 1, 3)
    assert (caught.value.needed, caught.value.available) == (needed, (3 * needed - 1) // 3)
