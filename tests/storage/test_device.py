"""States on the device: what a commit wrote is what comes back, whatever came between, and whichever write failed."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.devices.copies import HostCopier
from offload.errors import TierIOError
from offload.health import Health
from offload.io.engine import IOEngine
from offload.profiling import Timeline
from offload.sizes import MIB, PAGE_BYTES
from offload.storage.arena import Arena
from offload.storage.cached_chunk import Version
from offload.storage.chunk_cache import Lease, Store, Use
from offload.storage.device_store import DeviceArena, DeviceStore
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import Stripes
from offload.storage.swap_format import SlotArrays
from tests.storage.conftest import put, value_in
from tests.support.faulty_engine import FaultyEngine
from tests.support.slot_maps import slots_of

NUMELS = (1024, 700, 5, 1500)
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(60)


@contextmanager
def device_store(
    engine: IOEngine, path: Path, buffers: int = 2, there: Collection[int] = range(len(NUMELS))
) -> Iterator[DeviceStore]:
    """Args: there: the chunks on the device; of the others the first one stays in RAM."""
    slot_arrays = [SlotArrays(numel) for numel in NUMELS]
    slots = Stripes(engine, [path], [1.0], slots_of(NUMELS, 2))
    ram, arena = Arena(MIB, HostCopier()), DeviceArena(MIB, CPU)
    passing = [ram.carve(max(slot.nbytes for slot in slot_arrays)) for _ in range(buffers)]
    health = Health()
    others = [chunk for chunk in range(len(NUMELS)) if chunk not in there]
    stays = {chunk: ram.carve(slot_arrays[chunk].nbytes) for chunk in others[:1]}
    beneath = Store(slot_arrays, stays, passing, slots.of(ChunkKind.STATES), Timeline(), health)
    resident = {chunk: arena.carve(slot.nbytes) for chunk, slot in enumerate(slot_arrays) if chunk in there}
    store = DeviceStore(slot_arrays, resident, arena, beneath, Timeline(), health)
    try:
        yield store
    finally:
        store.close()
        beneath.close()
        slots.close()


def put_in(store: Store, chunk: int, value: float, step: int) -> None:
    with store.lease(chunk, Use.UPDATE, step=step) as lease:
        put(lease, value)


def found(store: Store, chunk: int) -> float:
    with store.lease(chunk, Use.READ, step=0) as lease:
        return value_in(lease)


actions = st.one_of(
    st.tuples(st.just("put"), st.integers(0, len(NUMELS) - 1)),
    st.tuples(st.just("commit"), st.none()),
    st.tuples(st.just("fail"), st.integers(0, 2 * len(NUMELS))),
    st.tuples(st.just("back"), st.none()),
    st.tuples(st.just("expect"), st.integers(0, len(NUMELS))),
)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(actions, max_size=20),
    buffers=st.integers(1, 4),
    seed=st.integers(0, 1000),
    there=st.sets(st.integers(0, len(NUMELS) - 1), min_size=1),
)
def test_any_use_equals_two_plain_dicts(
    script: list[tuple[str, int | None]], buffers: int, seed: int, there: set[int]
) -> None:
    engine = FaultyEngine(seed=seed, delay_s=0.0005)
    now = dict.fromkeys(range(len(NUMELS)), 0.0)
    committed, versions = dict(now), dict[int, Version]()
    with tempfile.TemporaryDirectory() as folder, device_store(engine, Path(folder) / "run", buffers, there) as store:
        for step, (action, argument) in enumerate(script, 1):
            try:
                if action == "put" and argument is not None:
                    put_in(store, argument, float(step), step)
                    now[argument] = float(step)
                elif action == "fail" and argument is not None:
                    engine.fail("write", errno.EIO, argument)
                elif action == "expect" and argument is not None:
                    store.expect([*range(argument, len(NUMELS)), *range(argument)])
                elif action == "commit":
                    versions = store.flush()
                    store.set_committed(versions)
                    committed = dict(now)
                else:
                    store.reset(versions)
                    now = dict(committed)
                seen = {chunk: found(store, chunk) for chunk in now}
            except TierIOError:
                store.reset(versions)  # a failure stays until then
                now = dict(committed)
                continue  # what is there is seen after the next action: to look may fail again
            assert seen == now
    engine.close()


def test_only_what_changed_is_brought_down(engine: FaultyEngine, tmp_path: Path) -> None:
    with device_store(engine, tmp_path / "run") as store:
        before = engine.writes
        for chunk in range(len(NUMELS)):
            put_in(store, chunk, 1.0, 1)
        first = store.flush()
        store.set_committed(first)
        assert engine.writes == before + len(NUMELS)
        put_in(store, 2, 2.0, 2)
        found(store, 1)
        second = store.flush()
        assert engine.writes == before + len(NUMELS) + 1
        assert second == first | {2: Version(2, 1)}


def test_after_a_return_only_what_is_wanted_is_read(engine: FaultyEngine, tmp_path: Path) -> None:
    with device_store(engine, tmp_path / "run", buffers=4, there=[1]) as store:
        for chunk in range(len(NUMELS)):
            put_in(store, chunk, 1.0, 1)
        versions = store.flush()
        store.set_committed(versions)
        before = engine.reads
        store.reset(versions)
        assert found(store, 1) == 1.0
        store.drain()
        assert engine.reads - before == 2  # that chunk, and the one that stays in RAM
        for step in (2, 3, 4):
            store.expect([2, 1, 3])
            for chunk in (2, 1, 3):
                put_in(store, chunk, float(step), step)
        store.drain()
        assert engine.reads - before <= 2 + 3 * 2 + 2  # the last two are ahead of a step that does not come


def test_a_commit_that_was_cut_off_is_made_whole_by_the_next(engine: FaultyEngine, tmp_path: Path) -> None:
    with device_store(engine, tmp_path / "run") as store:
        for chunk in range(len(NUMELS)):
            put_in(store, chunk, 1.0, 1)
        lease, leases = store.lease, 0

        @contextmanager
        def interrupted(chunk: int, use: Use, *, step: int) -> Iterator[Lease]:
            nonlocal leases
            leases += 1
            if leases == 3:
                raise KeyboardInterrupt
            with lease(chunk, use, step=step) as lent:
                yield lent

        store.lease = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            store.flush()
        store.lease = lease  # type: ignore[method-assign]
        versions = store.flush()
        assert versions.keys() == set(range(len(NUMELS)))
        store.set_committed(versions)
        put_in(store, 0, 9.0, 2)
        store.reset(versions)
        assert [found(store, chunk) for chunk in range(len(NUMELS))] == [1.0] * len(NUMELS)


def test_pieces_are_zero_and_apart_and_there_is_no_more_than_was_planned() -> None:
    arena = DeviceArena(3 * PAGE_BYTES - 1, CPU)
    one, other = arena.carve(5), arena.carve(PAGE_BYTES + 1)
    assert (one.sum(), other.sum(), arena.used) == (0, 0, 3 * PAGE_BYTES)
    one.fill_(1)
    assert other.sum() == 0
    with pytest.raises(AssertionError, match="was asked for"):
        arena.carve(1)
    arena.close()
