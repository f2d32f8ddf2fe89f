from __future__ import annotations

import mmap
import re

import pytest
import torch

from offload.copies import HostCopier
from offload.errors import BudgetError
from offload.sizes import MIB, PAGE_BYTES
from offload.store.arena import Arena, carved_bytes
from tests.support.processes import holds_in_child, region_of, resident_bytes


def test_buffers_are_page_aligned_zero_and_apart() -> None:
    arena = Arena(MIB, HostCopier())
    buffers = [arena.carve(size) for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 0, 5)]
    assert all(buffer.data_ptr() % PAGE_BYTES == 0 for buffer in buffers)
    assert [buffer.numel() for buffer in buffers] == [1, PAGE_BYTES, PAGE_BYTES + 1, 0, 5]
    assert not any(buffer.any() for buffer in buffers)
    for n, buffer in enumerate(buffers):
        buffer.fill_(n + 1)
    assert [set(buffer.tolist()) for buffer in buffers] == [{1}, {2}, {3}, set(), {5}]
    assert arena.used == sum(carved_bytes(buffer.numel()) for buffer in buffers) == 5 * PAGE_BYTES


def test_no_more_is_lent_than_there_is() -> None:
    arena = Arena(2 * PAGE_BYTES, HostCopier())
    arena.carve(PAGE_BYTES + 1)
    with pytest.raises(AssertionError, match="the plan was wrong"):
        arena.carve(1)


def test_memory_that_the_machine_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError) as caught:
        Arena(1 << 60, HostCopier())
    assert caught.value.needed == 1 << 60
    assert caught.value.option == "cpu_memory"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux")
def test_a_forked_child_does_not_inherit_it() -> None:
    arena = Arena(8 * MIB, HostCopier())
    buffer = arena.carve(8 * MIB)
    buffer.fill_(1)
    address = buffer.data_ptr()
    assert "dc" in re.search(r"(?m)^VmFlags:(.*)$", region_of(address))[1].split()
    assert holds_in_child(lambda: region_of(address) == "")
    assert buffer.eq(1).all()


def test_close_gives_the_memory_back() -> None:
    arena = Arena(16 * MIB, HostCopier())
    buffer = arena.carve(16 * MIB)
    buffer.fill_(1)
    assert resident_bytes(buffer.data_ptr()) >= 16 * MIB
    arena.close()
    assert resident_bytes(buffer.data_ptr()) < MIB
    assert torch.equal(buffer[:8], torch.zeros(8, dtype=torch.uint8))
