from __future__ import annotations

import ctypes
import gc
import mmap
import re
import threading

import pytest
import torch

from offload.devices.copies import HostCopier
from offload.errors import BudgetError
from offload.regions import Region, total_bytes
from offload.sizes import MIB, PAGE_BYTES
from offload.storage.arena import Arena, Reserved
from offload.tiers import CPU
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
    assert arena.used == 5 * PAGE_BYTES


def test_the_pieces_of_regions_are_given_by_name_and_once() -> None:
    regions = [Region(CPU, "sums", 5), Region(CPU, "buffers", PAGE_BYTES + 1, 2), Region(CPU, "sums", 7)]
    arena = Arena(total_bytes(regions, CPU), HostCopier())
    reserved = Reserved([*regions, Region(CPU, "none", 9, 0)], {CPU: arena})
    assert arena.used == arena.size == 6 * PAGE_BYTES
    assert reserved.left == ["sums", "buffers"]
    pieces = {what: reserved.take(what) for what in ("buffers", "sums", "none")}
    sizes = {what: [len(piece) for piece in found] for what, found in pieces.items()}
    assert sizes == {"buffers": [PAGE_BYTES + 1] * 2, "sums": [5, 7], "none": []}
    first = pieces["sums"][0].data_ptr()
    starts = [piece.data_ptr() - first for piece in (*pieces["buffers"], pieces["sums"][1])]
    assert starts == [PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES]
    assert reserved.take("sums") == reserved.left == []


def test_no_more_is_lent_than_there_is() -> None:
    arena = Arena(2 * PAGE_BYTES, HostCopier())
    arena.carve(PAGE_BYTES + 1)
    with pytest.raises(AssertionError, match="was asked for"):
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


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux")
@pytest.mark.parametrize("is_closed", [False, True])
def test_an_arena_collected_in_a_forked_child_unmaps_nothing_of_its(is_closed: bool) -> None:
    arenas = [Arena(8 * MIB, HostCopier())]
    arenas.append(arenas)  # garbage that waits for a collection
    address = arenas[0]._slab.data_ptr()
    if is_closed:
        arenas[0].close()

    def keeps_what_lies_there() -> bool:
        mine = map_at(address, 8 * MIB)
        mine[:5] = b"batch"
        arenas.clear()
        gc.collect()
        return mine[:5] == b"batch"

    try:
        assert holds_in_child(keeps_what_lies_there)
    finally:
        arenas.clear()


def map_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """New memory of this process at an address where there is none."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    return (ctypes.c_char * nbytes).from_address(address)


def test_close_gives_the_memory_back() -> None:
    arena = Arena(16 * MIB, HostCopier())
    buffer = arena.carve(16 * MIB)
    buffer.fill_(1)
    assert resident_bytes(buffer.data_ptr()) >= 16 * MIB
    arena.close()
    assert resident_bytes(buffer.data_ptr()) < MIB
    assert torch.equal(buffer[:8], torch.zeros(8, dtype=torch.uint8))


def test_pages_come_in_the_background_and_what_is_written_meanwhile_stays() -> None:
    arena, is_there = Arena(64 * MIB, HostCopier(), at_once=False), threading.Event()
    buffer = arena.carve(64 * MIB)
    assert resident_bytes(buffer.data_ptr()) < MIB
    arena.prefault(is_there.set)
    for start in range(0, 64 * MIB, MIB):
        buffer[start] = 7
    assert is_there.wait(30)
    assert resident_bytes(buffer.data_ptr()) >= 64 * MIB
    assert buffer[::MIB].eq(7).all()
    assert buffer.sum() == 7 * 64
    arena.close()


def test_what_follows_the_pages_comes_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    arena = Arena(40 * MIB, HostCopier(), at_once=False)
    address = arena.carve(40 * MIB).data_ptr()
    arena.prefault(lambda: told.append(resident_bytes(address)))
    arena._prefaulter.join()
    assert told
    assert told[0] >= 40 * MIB

    # Where the kernel cannot, they come as they are used.
    monkeypatch.setattr("offload.storage.arena.populate", lambda piece: False)
    other = Arena(40 * MIB, HostCopier(), at_once=False)
    other.prefault(lambda: told.append(-1))
    other._prefaulter.join()
    assert told[1:] == [-1]


def test_closing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    was_called: list[bool] = []
    goes_on = threading.Event()

    def populate(piece: torch.Tensor) -> bool:
        pieces.append(piece.numel())
        return goes_on.wait(30)

    monkeypatch.setattr("offload.storage.arena.populate", populate)
    arena = Arena(64 * MIB, HostCopier(), at_once=False)
    arena.prefault(lambda: was_called.append(True))
    closing = threading.Thread(target=arena.close)
    closing.start()
    while not arena._is_closing:
        pass
    goes_on.set()
    closing.join()
    assert not arena._prefaulter.is_alive()
    assert len(pieces) <= 1
    assert not was_called


class Locking(HostCopier):
    """Notes what is there when it is told to lock memory."""

    pins = True

    def __init__(self) -> None:
        self.resident: list[int] = []

    def pin(self, memory: torch.Tensor) -> None:
        self.resident.append(resident_bytes(memory.data_ptr()))


@pytest.mark.parametrize("can_populate", [True, False])
def test_all_pages_are_there_before_they_are_locked(can_populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_populate:
        monkeypatch.setattr("offload.storage.arena.populate", lambda piece: False)
    copier, size = Locking(), 100 * MIB + PAGE_BYTES
    arena = Arena(size, copier, at_once=False)
    assert copier.resident[0] >= size
    assert not arena.carve(size).any()
    arena.close()


def test_several_threads_get_the_pages_that_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(3)
    monkeypatch.setattr("offload.storage.arena.usable_cpus", lambda: 3)
    monkeypatch.setattr("offload.storage.arena.populate", lambda piece: meet.wait(20) >= 0)
    Arena(6 * 16 * MIB, Locking(), at_once=False).close()  # each piece waits for two others


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="Linux")
@pytest.mark.parametrize("is_slow", [True, False])
def test_huge_pages_that_come_slowly_are_done_without(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_slow:
        monkeypatch.setattr("offload.storage.arena._SLOW_S", -1.0)
    arena = Arena(32 * MIB, Locking(), at_once=False)
    flags = re.search(r"(?m)^VmFlags:(.*)$", region_of(arena.carve(32 * MIB).data_ptr()))[1].split()
    assert ("nh" in flags) is is_slow
    assert ("hg" in flags) is not is_slow
    arena.close()
