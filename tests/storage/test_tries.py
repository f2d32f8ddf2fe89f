"""Steps that are tried: where they lie, what is kept of them, and what the last step and the last commit keep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.devices.copies import HostCopier
from offload.errors import CorruptionError, TierIOError
from offload.health import Health
from offload.io.engine import IOEngine
from offload.profiling import Timeline
from offload.sizes import MIB
from offload.storage.arena import Arena
from offload.storage.cached_chunk import CachedChunk, Version
from offload.storage.chunk_cache import Store, Use
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import Stripes
from offload.storage.swap_format import SlotArrays
from tests.storage.conftest import put, value_in
from tests.support.faulty_engine import FaultyEngine
from tests.support.slot_maps import slots_of

NUMELS = (1024, 5, 700)


@contextmanager
def store_on(engine: IOEngine, path: Path, *, buffers: int = 3, timeline: Timeline | None = None) -> Iterator[Store]:
    """A store of committed chunks, each of which has three places, and version 1 in its slot."""
    arrays = [SlotArrays(numel) for numel in NUMELS]
    stripes = Stripes(engine, [path], [1.0], slots_of(NUMELS, 3, is_committed=True))
    arena = Arena(MIB, HostCopier())
    passing = [arena.carve(max(slot.nbytes for slot in arrays)) for _ in range(buffers)]
    store = Store(arrays, {}, passing, stripes.of(ChunkKind.STATES), timeline or Timeline(), Health())
    try:
        for index in range(len(NUMELS)):
            with store.lease(index, Use.UPDATE, step=1) as lease:
                put(lease, 1)
        yield store
    finally:
        store.close()
        stripes.close()


@pytest.fixture
def store(engine: FaultyEngine, tmp_path: Path) -> Iterator[Store]:
    with store_on(engine, tmp_path / "run") as made:
        yield made


def attempt(store: Store, index: int, value: float, *, step: int = 2) -> float:
    """Tries a step that makes `value`. Returns what it found."""
    with store.lease(index, Use.TRY, step=step) as lease:
        found = value_in(lease)
        put(lease, value)
    return found


def read(store: Store, index: int) -> float:
    with store.lease(index, Use.READ, step=0) as lease:
        return value_in(lease)


def test_what_was_tried_is_nobodys_until_it_is_kept(store: Store) -> None:
    assert attempt(store, 0, 2) == 1
    assert read(store, 0) == 1
    assert store.keep([0], 2) == {0}
    assert read(store, 0) == 2


def test_keeping_neither_reads_nor_writes(engine: FaultyEngine, store: Store) -> None:
    attempt(store, 0, 2)
    store.drain()
    before = engine.reads, engine.writes
    store.keep([0], 2)
    store.drain()
    assert (engine.reads, engine.writes) == before


@pytest.mark.parametrize("buffers", [1, 3])
def test_a_chunk_that_is_retained_gives_its_buffer_only_to_one_that_needs_it(
    engine: FaultyEngine, buffers: int, tmp_path: Path
) -> None:
    with store_on(engine, tmp_path / "run", buffers=buffers) as store:
        with store.lease(0, Use.UPDATE, step=1) as lease:
            store.retain(0)
            put(lease, 5)
        store.drain()
        before = engine.reads
        assert read(store, 0) == 5
        assert engine.reads == before
        with store.lease(0, Use.READ, step=0):
            store.retain(0)
        assert read(store, 1) == 1  # it needs a buffer
        assert read(store, 0) == 5
        assert engine.reads == before + (2 if buffers > 1 else 3)


def test_what_others_write_ends_what_was_tried_before(store: Store) -> None:
    attempt(store, 0, 2)
    attempt(store, 1, 2)
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 7)
    assert store.keep([0, 1], 2) == {1}
    assert (read(store, 0), read(store, 1)) == (7, 2)


def test_what_was_tried_for_another_step_is_not_kept(store: Store) -> None:
    attempt(store, 0, 2, step=2)
    assert store.keep([0], 3) == set()
    assert read(store, 0) == 1


def test_a_try_that_is_cut_off_changes_nothing(store: Store) -> None:
    with suppress(KeyboardInterrupt), store.lease(0, Use.TRY, step=2) as lease:
        put(lease, 2)
        raise KeyboardInterrupt
    assert read(store, 0) == 1
    assert store.keep([0], 2) == set()


def test_a_reader_keeps_the_version_before_in_ram_no_longer_than_that_is_the_last(store: Store) -> None:
    store.expect([0, 1, 2])
    attempt(store, 0, 2)
    store.expect([0], repeats=False)  # it is read ahead, as the last version
    store.drain()
    store.keep([0], 2)
    assert read(store, 0) == 2


def test_keeping_waits_for_whoever_reads_the_version_before(store: Store) -> None:
    attempt(store, 0, 2)
    store.drain()
    store.expect([0], repeats=False)  # it is being read
    store.keep([0], 2)
    assert read(store, 0) == 2


def test_going_back_forgets_what_was_tried(store: Store) -> None:
    versions = store.flush()
    store.set_committed(versions)
    attempt(store, 0, 2)
    store.reset(versions)
    assert store.keep([0], 2) == set()
    assert read(store, 0) == 1


def test_an_order_that_does_not_repeat_is_read_once(engine: FaultyEngine, tmp_path: Path) -> None:
    with store_on(engine, tmp_path / "run") as store:
        store.drain()
        before = engine.reads
        store.expect([2, 0], repeats=False)
        for index in (2, 0):
            attempt(store, index, 2)
        store.drain()
        assert engine.reads - before == 2


def test_what_is_taken_back_is_not_read(engine: FaultyEngine, tmp_path: Path) -> None:
    with store_on(engine, tmp_path / "run", buffers=1) as store:
        store.drain()
        before = engine.reads
        store.expect([0, 1, 2], repeats=False)
        store.unexpect(1)
        for index in (0, 2):
            attempt(store, index, 2)
        store.drain()
        assert engine.reads - before == 2


def test_each_lease_that_writes_to_a_chunk_changes_the_number_of_its_writes_but_for_tries(store: Store) -> None:
    numbers = [store.writes(0)]
    for use in (Use.UPDATE, Use.OVERWRITE, Use.FILL, Use.REFILL):
        with store.lease(0, use, step=1) as lease:
            put(lease, 3)
        numbers.append(store.writes(0))
    assert len({*numbers}) == 5
    attempt(store, 0, 2)
    read(store, 0)
    assert store.writes(0) == numbers[-1]
    assert store.writes(1) == numbers[0]


def test_every_row_of_the_table_of_places() -> None:
    """[Note: places] in cached_chunk.py, by hand."""
    chunk = CachedChunk(0, SlotArrays(1))
    chunk.reset(Version(10, 0))  # 1: C and L in X
    assert (chunk.place, chunk.place_to_try) == (1, 1)  # 2, 3'
    chunk.stored = Version(11, 1)  # 3: L in Y
    assert (chunk.place, chunk.place_to_try) == (1, 2)  # 4, 5'
    chunk.stored = Version(12, 2)  # 5: L in Z
    assert (chunk.place, chunk.place_to_try) == (2, 1)
    chunk.committed = 2  # 6
    assert (chunk.place, chunk.place_to_try) == (0, 0)


@pytest.mark.parametrize("lost", ["tried", "anew"])
def test_a_lost_write_is_found_though_both_contents_are_of_one_step(
    store: Store, engine: FaultyEngine, lost: str
) -> None:
    """Dropped and made anew, a chunk has two contents of one step in turn, in one place where C and L are one."""
    store.set_committed(store.flush())
    engine.lose(nth=0 if lost == "tried" else 1)
    attempt(store, 0, 2)
    if lost == "tried":
        assert store.keep([0], 2) == {0}
    else:
        with store.lease(0, Use.UPDATE, step=2) as lease:
            put(lease, 3)
    with pytest.raises(CorruptionError):
        read(store, 0)


def test_a_disk_that_fails_in_a_try_fails_the_store(store: Store, engine: FaultyEngine) -> None:
    store.drain()
    engine.fail("write", 5)
    attempt(store, 0, 2)
    with pytest.raises(TierIOError):
        store.drain()
    with pytest.raises(TierIOError):
        store.keep([0], 2)


chunk = st.integers(0, len(NUMELS) - 1)
actions = st.one_of(
    *(st.tuples(st.just(use), chunk) for use in (Use.READ, Use.UPDATE, Use.OVERWRITE, Use.FILL, Use.TRY)),
    st.tuples(st.just("cut off"), chunk),
    st.tuples(st.just("expect"), st.lists(chunk, unique=True)),
    *(st.tuples(st.just(what), st.none()) for what in ("keep", "step", "commit", "reset", "drain")),
)


@settings(max_examples=80, deadline=None)
@given(script=st.lists(actions, max_size=30), buffers=st.integers(1, len(NUMELS)), seed=st.integers(0, 1000))
def test_tries_steps_and_commits_in_any_order_equal_three_plain_dicts(
    script: list[tuple[str | Use, object]], buffers: int, seed: int
) -> None:
    engine = FaultyEngine(seed=seed, delay_s=0.0005)
    last = dict.fromkeys(range(len(NUMELS)), 1.0)
    committed, tried = dict(last), dict[int, float]()
    clock, step = 1, 2
    with tempfile.TemporaryDirectory() as folder, store_on(engine, Path(folder), buffers=buffers) as store:
        versions = store.flush()
        store.set_committed(versions)
        for action, argument in script:
            clock += 1
            match action, argument:
                case Use.TRY, int(index):
                    assert attempt(store, index, clock, step=step) == last[index]
                    tried[index] = clock
                case Use(), int(index):
                    with store.lease(index, action, step=step - 1) as lease:
                        if action is not Use.OVERWRITE:
                            assert value_in(lease) == last[index]
                        if action is not Use.READ:
                            put(lease, clock)
                            last[index] = clock
                            tried.pop(index, None)
                case "cut off", int(index):
                    with suppress(KeyboardInterrupt), store.lease(index, Use.TRY, step=step) as lease:
                        put(lease, clock)
                        raise KeyboardInterrupt
                case "expect", list(order):
                    store.expect(order, repeats=bool(clock % 2))
                case "keep" | "step", _:
                    kept = store.keep(range(len(NUMELS)) if action == "keep" else [], step)
                    assert kept == ({*tried} if action == "keep" else set())
                    for index in last:
                        if index in kept:
                            last[index] = tried[index]
                        else:
                            with store.lease(index, Use.UPDATE, step=step) as lease:
                                assert value_in(lease) == last[index]
                                put(lease, clock)
                            last[index] = clock
                    tried.clear()
                    step += 1
                case "commit", _:
                    versions = store.flush()
                    store.set_committed(versions)
                    committed = dict(last)
                case "reset", _:
                    store.reset(versions)
                    last, tried = dict(committed), {}
                case "drain", _:
                    store.drain()
        assert {index: read(store, index) for index in last} == last
        store.reset(versions)
        assert {index: read(store, index) for index in committed} == committed
    engine.close()
