"""Where activations wait: what comes back is what was put, in whatever order, with whatever room."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.devices.copies import HostCopier
from offload.errors import BudgetError, ClosedError, CorruptionError, StaleActivationError, TierIOError
from offload.io.engine import IOFile, aligned_memory
from offload.io.files import Files
from offload.io.portable import PortableEngine
from offload.profiling import Timeline
from offload.sizes import PAGE_BYTES
from offload.storage import activation_store
from offload.storage.activation_store import MOST_COPIES, ActivationStore, NamelessFiles, Ranges, Stored
from tests.support.disks import SwitchedFiles
from tests.support.faulty_engine import FaultyEngine
from tests.support.late_copier import LateCopier

PAGE = 4096
CPU = torch.device("cpu")


def region(pages: int) -> Tensor:
    return torch.frombuffer(aligned_memory(pages * PAGE), dtype=torch.uint8)


def values(seed: int, nbytes: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def engine() -> Iterator[FaultyEngine]:
    engine = FaultyEngine(seed=3)
    yield engine
    engine.close()


def store_with_files(
    engine: FaultyEngine | PortableEngine, tmp_path: Path, pages: int, count: int = 1, files: Files | None = None
) -> ActivationStore:
    """Args: count: of files."""
    files = files or Files()
    opened = [engine.adopt(files.create_nameless(tmp_path)) for _ in range(count)]
    timeline = Timeline()
    spill = NamelessFiles(files, engine, opened, timeline)
    return ActivationStore(region(pages), HostCopier(), CPU, timeline, spill)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_ranges_never_overlap_and_none_is_lost(size: int, moves: list[tuple[bool, int]]) -> None:
    ranges, lent = Ranges(), []
    ranges.grow(size)
    for takes, amount in moves:
        if takes and amount <= ranges.free:
            lent.append(ranges.take(amount))
            assert sum(stop - start for start, stop in lent[-1]) == amount
        elif lent:
            ranges.give(lent.pop(amount % len(lent)))
        taken = sorted(one for piece in lent for one in piece)
        assert all(stop <= following for (_, stop), (following, _) in pairwise(taken))
        assert all(0 <= start < stop <= size for start, stop in taken)
        assert ranges.free == size - sum(stop - start for start, stop in taken)
    for one in lent:
        ranges.give(one)
    if size > 1:
        assert len(ranges.take(size)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_everything_comes_back_in_any_order(seed: int, engine: FaultyEngine, tmp_path: Path) -> None:
    """Forwards and backwards, more than one under way, in a region that holds a fraction."""
    store, rng = store_with_files(engine, tmp_path, 12, count=1 + seed % 2), random.Random(seed)
    waiting: list[tuple[Stored, Tensor]] = []
    for number in range(150):
        if rng.random() < (0.7 if number % 50 < 30 else 0.3) or not waiting:
            data = values(number, rng.randint(1, 4 * PAGE))
            waiting.append((store.put(data), data))
        else:
            at = -1 if rng.random() < 0.8 else rng.randrange(len(waiting))
            stored, data = waiting[at]
            assert torch.equal(store.get(stored), data)
            if rng.random() < 0.9:
                del waiting[at], stored
    for stored, data in waiting:
        assert torch.equal(store.get(stored), data)
    assert min(engine.reads, engine.writes) > 20
    del stored
    waiting.clear()
    assert store.nbytes == 0
    store.close()


def test_what_came_last_stays_in_the_region_and_the_rest_is_read_ahead(engine: FaultyEngine, tmp_path: Path) -> None:
    store = store_with_files(engine, tmp_path, 8)
    waiting = [store.put(values(number, PAGE)) for number in range(20)]
    assert engine.reads == 0
    writes = engine.writes
    assert 12 <= writes <= 17  # what is older than half of the region
    for number in reversed(range(20)):
        read = engine.reads
        assert torch.equal(store.get(waiting.pop()), values(number, PAGE))
        if number >= 12:
            assert read == 0 or number < 19  # those were still there
    assert engine.reads == 12
    assert engine.writes == writes  # nothing is written in a backward
    store.close()


def test_without_files_what_does_not_fit_is_refused_and_the_rest_stays() -> None:
    store = ActivationStore(region(4), HostCopier(), CPU, Timeline())
    waiting = [store.put(values(number, 2 * PAGE)) for number in range(2)]
    with pytest.raises(BudgetError) as caught:
        store.put(values(9, 1))
    assert (caught.value.needed, caught.value.available, caught.value.option) == (
        5 * PAGE,
        4 * PAGE,
        "activation_memory",
    )
    with pytest.raises(BudgetError):
        store.put(values(9, 5 * PAGE))
    del caught
    assert torch.equal(store.get(waiting[0]), values(0, 2 * PAGE))
    del waiting[0]
    waiting.append(store.put(values(9, 2 * PAGE)))
    assert [bool(torch.equal(store.get(one), values(n, 2 * PAGE))) for one, n in zip(waiting, (1, 9), strict=True)]
    assert store.peak_bytes == 4 * PAGE
    store.close()


def test_full_disk_is_refused_when_something_is_put(engine: FaultyEngine, tmp_path: Path) -> None:
    class Full(Files):
        def allocate(self, file: IOFile, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    files = SwitchedFiles()
    store = store_with_files(engine, tmp_path, 2, files=files)
    first = store.put(values(1, PAGE))
    with files.switched(Full()), pytest.raises(BudgetError, match="disk is full"):
        store.put(values(2, PAGE))
    second = store.put(values(2, 2 * PAGE))
    assert torch.equal(store.get(first), values(1, PAGE))
    assert torch.equal(store.get(second), values(2, 2 * PAGE))
    store.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_failing_disk_is_an_error_and_the_next_try_succeeds(
    operation: str, engine: FaultyEngine, tmp_path: Path
) -> None:
    store = store_with_files(engine, tmp_path, 2)
    engine.fail(operation, errno.EIO)
    waiting = [store.put(values(0, PAGE))]
    errors = 0
    for number in (1, 2, 3):
        try:
            waiting.append(store.put(values(number, PAGE)))
        except TierIOError:
            errors += 1
            waiting.append(store.put(values(number, PAGE)))
    for number in reversed(range(4)):
        try:
            found = store.get(waiting[number])
        except TierIOError:
            errors += 1
            found = store.get(waiting[number])
        assert torch.equal(found, values(number, PAGE))
    assert errors == 1
    store.close()


def test_flipped_bit_is_found(engine: FaultyEngine, tmp_path: Path) -> None:
    store = store_with_files(engine, tmp_path, 1)
    engine.flip("read", 100)
    first = store.put(values(0, PAGE))
    store.put(values(1, PAGE))
    with pytest.raises(CorruptionError):
        store.get(first)
    assert torch.equal(store.get(first), values(0, PAGE))
    store.close()


def test_changed_before_it_has_left_the_device_is_an_error(tmp_path: Path) -> None:
    store = ActivationStore(region(4), LateCopier(1), CPU, Timeline())
    data = values(0, PAGE)
    stored = store.put(data)
    data.add_(1)
    with pytest.raises(StaleActivationError):
        store.get(stored)
    other = store.put(values(1, PAGE))
    assert torch.equal(store.get(other), values(1, PAGE))
    store.close()


def test_files_have_no_names_and_go_with_the_store(tmp_path: Path) -> None:
    engine = PortableEngine()
    store = store_with_files(engine, tmp_path, 1)
    waiting = [store.put(values(number, PAGE)) for number in range(3)]
    assert torch.equal(store.get(waiting[0]), values(0, PAGE))
    assert os.listdir(tmp_path) == []
    assert isinstance(store._spill, NamelessFiles)
    (file,) = store._spill._opened
    assert os.fstat(file.fd).st_size == 3 * PAGE
    store.close()
    engine.close()
    assert file.fd == -1
    with pytest.raises(ClosedError):
        store.get(waiting[1])


@pytest.mark.parametrize("seed", range(2))
def test_what_the_first_region_lacks_room_for_waits_beneath(seed: int, engine: FaultyEngine, tmp_path: Path) -> None:
    """On a device, in RAM, in files."""
    beneath, rng = store_with_files(engine, tmp_path, 4), random.Random(seed)
    store = ActivationStore(region(5), HostCopier(), CPU, Timeline(), beneath=beneath)
    peak, below = 0, set()
    for _ in range(6):
        waiting: list[tuple[Stored, Tensor]] = []
        for number in range(12):
            data = values(number, rng.randint(1, 4 * PAGE))
            waiting.append((store.put(data), data))
        below.add(beneath.nbytes)
        peak = max(peak, store.nbytes)
        assert store.nbytes - beneath.nbytes <= 5 * PAGE
        assert store.nbytes == sum(-(-len(data) // PAGE) * PAGE for _, data in waiting)
        while waiting:
            stored, data = waiting.pop()
            assert torch.equal(store.get(stored), data)
            del stored
        assert store.nbytes == beneath.nbytes == 0
    assert store.peak_bytes == peak
    assert min(below) > 4 * PAGE < peak - 5 * PAGE
    assert engine.reads > 0
    with pytest.raises(BudgetError, match=r"activations of 24 KiB are .* allows 20 KiB, and RAM has 16 KiB") as caught:
        store.put(values(1, 6 * PAGE))
    assert (caught.value.needed, caught.value.available) == (6 * PAGE, 9 * PAGE)
    store.close()
    with pytest.raises(ClosedError):
        beneath.put(values(1, 1))


def test_without_room_beneath_it_is_refused_and_the_error_says_how_much_would_do() -> None:
    beneath = ActivationStore(region(2), HostCopier(), CPU, Timeline())
    store = ActivationStore(region(3), HostCopier(), CPU, Timeline(), beneath=beneath)
    waiting = [store.put(values(number, 2 * PAGE)) for number in range(2)]
    with pytest.raises(BudgetError, match=r"activation_memory=\"24KiB\" or more, .* a path for files") as caught:
        store.put(values(2, 2 * PAGE))
    assert caught.value.needed == 6 * PAGE
    waiting.append(store.put(values(3, PAGE)))  # that fits, in what is left above
    assert beneath.nbytes == 2 * PAGE
    for (stored, number), pages in zip(zip(waiting, (0, 1, 3), strict=True), (2, 2, 1), strict=True):
        assert torch.equal(store.get(stored), values(number, pages * PAGE))
    store.close()


def test_memory_on_the_device_is_lent_again_when_nobody_refers_to_it() -> None:
    store = ActivationStore(region(64), HostCopier(), CPU, Timeline())
    addresses = set()
    for length in (100, 7, 3000, 100, 3000, 9000, 9000, 1):
        stored = store.put(values(length, length))
        found = store.get(stored).view(-1, 1)  # whoever has a view has all of it
        assert torch.equal(found[:, 0], values(length, length))
        addresses.add(found.untyped_storage().data_ptr())
        kept, other = found, store.get(stored)
        other.zero_()
        assert torch.equal(kept[:, 0], values(length, length))
        addresses.add(other.untyped_storage().data_ptr())
        del found, kept, other
    assert len(store._buffers._made) == 2
    assert len(addresses) <= 6  # two, and each of them grown twice
    held = [store.get(stored) for _ in range(20)]
    assert len({one.data_ptr() for one in held}) == 20
    held.clear()
    store.get(stored)
    assert len(store._buffers._made) <= 9
    store.drop_spare()
    assert not store._buffers._made
    store.close()


@pytest.mark.parametrize("is_other", [False, True], ids=["the same stream", "another stream"])
def test_memory_of_an_activation_goes_back_to_its_stream_after_the_copy(
    is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device orders what one stream does after the copy. To another one the host has to lend a hand."""
    copier, stream = LateCopier(1), [7]
    monkeypatch.setattr(activation_store, "stream_handle", lambda device: stream[0])
    store = ActivationStore(region(16), copier, CPU, Timeline())
    put = [values(1, PAGE_BYTES)]
    kept = [store.put(put[0])]
    stream[0] = 8 if is_other else 7
    for seed in range(2, 2 + MOST_COPIES):
        put.append(values(seed, PAGE_BYTES))
        kept.append(store.put(put[-1]))
    first = kept[0].entry
    assert first.source is None
    assert (not first.copies) is is_other, "only the host forgets copies, when it has waited for them"
    for stored, expected in zip(reversed(kept), reversed(put), strict=True):
        assert torch.equal(store.get(stored), expected)
    store.close()
