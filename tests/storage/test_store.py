from __future__ import annotations

import contextlib
import errno
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.devices.copies import HostCopier
from offload.errors import ClosedError, CorruptionError, InterruptedStepError, OffloadError, TierIOError
from offload.health import Health, State
from offload.io.engine import IOEngine
from offload.io.threads import ThreadEngine
from offload.profiling import Timeline
from offload.sizes import MIB, PAGE_BYTES
from offload.storage.arena import Arena
from offload.storage.chunk_cache import Store, Use
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import Stripes
from offload.storage.swap_format import SlotArrays
from tests.storage.conftest import put, value_in
from tests.support.faulty_engine import FaultyEngine
from tests.support.interrupted import interrupt, interrupted_at, thrown_in
from tests.support.slot_maps import slots_of

NUMELS = (1024, 700, 1024, 5, 1500, 1024)

pytestmark = pytest.mark.timeout(60)


@contextmanager
def store_on(
    engine: IOEngine,
    path: Path,
    *,
    buffers: int = 3,
    kept: frozenset[int] = frozenset(),
    timeline: Timeline | None = None,
    due: Collection[int] = (),
    health: Health | None = None,
) -> Iterator[Store]:
    slot_arrays = [SlotArrays(numel) for numel in NUMELS]
    stripes = Stripes(engine, [path], [1.0], slots_of(NUMELS))
    slots = stripes.of(ChunkKind.STATES)
    arena = Arena(MIB, HostCopier())
    resident = {chunk: arena.carve(slot_arrays[chunk].nbytes) for chunk in sorted(kept)}
    passing = [arena.carve(max(slot.nbytes for slot in slot_arrays)) for _ in range(buffers)]
    timeline, health = timeline or Timeline(), health or Health()
    store = Store(slot_arrays, resident, passing, slots, timeline, health, due.__contains__)
    try:
        yield store
    finally:
        store.close()
        stripes.close()


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def store(engine: FaultyEngine, tmp_path: Path, health: Health) -> Iterator[Store]:
    with store_on(engine, tmp_path / "run", health=health) as made:
        yield made


chunk = st.integers(0, len(NUMELS) - 1)
actions = st.one_of(
    *(st.tuples(st.just(use), chunk) for use in Use if use is not Use.TRY),  # test_tries.py has that
    st.tuples(st.just("cut off"), chunk),
    st.tuples(st.just("discard"), chunk),
    st.tuples(st.just("hold"), chunk),
    st.tuples(st.just("release"), chunk),
    st.tuples(st.just("expect"), st.permutations(range(len(NUMELS)))),
    st.tuples(st.just("step"), st.permutations(range(len(NUMELS)))),
    st.tuples(st.just("drain"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(actions, max_size=25),
    buffers=st.integers(1, len(NUMELS)),
    kept=st.frozensets(chunk, max_size=4),
    due=st.frozensets(st.integers(1, 25)),
    seed=st.integers(0, 1000),
)
def test_any_use_under_any_timing_equals_a_plain_dict(
    script: list[tuple[str | Use, object]], buffers: int, kept: frozenset[int], due: frozenset[int], seed: int
) -> None:
    engine = FaultyEngine(seed=seed, delay_s=0.0005)
    values = dict.fromkeys(range(len(NUMELS)), 0.0)
    held: dict[int, ExitStack] = {}
    clock = 0

    def use(index: int, how: Use, *, is_cut_off: bool = False) -> None:
        nonlocal clock
        streamed = [other for other in held if other not in kept]
        if index in held or (index not in kept and len(streamed) >= buffers):
            return
        clock += 1
        with suppress(KeyboardInterrupt), store.lease(index, how, step=clock) as lease:
            if is_cut_off:
                raise KeyboardInterrupt
            if how not in (Use.OVERWRITE, Use.REFILL):
                assert value_in(lease) == values[index]
            if how in (Use.UPDATE, Use.OVERWRITE, Use.FILL, Use.REFILL):
                put(lease, clock)
                values[index] = clock
            elif how is Use.CONSUME:
                values[index] = 0.0

    with (
        tempfile.TemporaryDirectory() as folder,
        store_on(engine, Path(folder), buffers=buffers, kept=kept, due=due) as store,
    ):
        for action, argument in script:
            match action, argument:
                case Use(), int(index):
                    use(index, action)
                case "cut off", int(index):
                    use(index, Use.OVERWRITE, is_cut_off=True)
                case "discard", int(index):
                    if index not in held:
                        store.discard(index)
                        values[index] = 0.0
                case "hold", int(index):
                    # One buffer stays free: whoever holds them all cannot lease another.
                    streamed = [other for other in held if other not in kept]
                    if index not in held and (index in kept or len(streamed) + 1 < buffers):
                        clock += 1
                        held[index] = ExitStack()
                        lease = held[index].enter_context(store.lease(index, Use.UPDATE, step=clock))
                        assert value_in(lease) == values[index]
                        put(lease, clock)
                        values[index] = clock
                case "release", _:
                    if held:
                        held.pop(next(iter(held))).close()
                case "expect", list(order):
                    store.expect(order)
                case "step", list(order):
                    store.expect([index for index in order if index not in held], once=order[::2])
                    for index in order:
                        use(index, Use.UPDATE)
                case "drain", _:
                    store.drain()
        for stack in held.values():
            stack.close()
        for index in values:
            held.clear()
            use(index, Use.READ)
    engine.close()


@pytest.mark.parametrize("buffers", [1, 2, 3, 6])
def test_an_expected_order_is_read_ahead_and_each_byte_moves_once(
    engine: FaultyEngine, tmp_path: Path, buffers: int
) -> None:
    timeline = Timeline()
    order = range(len(NUMELS))
    size = sum(SlotArrays(numel).nbytes for numel in NUMELS)
    with store_on(engine, tmp_path / "run", buffers=buffers, timeline=timeline) as store:
        for step in range(1, 5):
            store.expect(order)
            for index in order:
                with store.lease(index, Use.UPDATE, step=step) as lease:
                    assert value_in(lease) == step - 1
                    put(lease, step)
        store.drain()
        assert timeline.counted("nvme_written_bytes") == 4 * size
        # What the next step begins with has been read as well, into half of the buffers.
        again = sum(SlotArrays(numel).nbytes for numel in NUMELS[: buffers - buffers // 2])
        assert timeline.counted("nvme_read_bytes") == 3 * size + again
        assert engine.most_at_once >= min(buffers, 3)


def test_a_kept_chunk_at_the_end_of_the_order_does_not_begin_it_again(engine: FaultyEngine, tmp_path: Path) -> None:
    timeline = Timeline()
    last = len(NUMELS) - 1
    with store_on(engine, tmp_path / "run", buffers=4, kept=frozenset({last}), timeline=timeline) as store:
        store.expect(range(len(NUMELS)))
        for index in range(len(NUMELS)):
            with store.lease(index, Use.UPDATE, step=1) as lease:
                put(lease, 1)
        store.drain()
        assert timeline.counted("nvme_read_bytes") == sum(SlotArrays(numel).nbytes for numel in NUMELS[:2])
        store.expect(range(len(NUMELS)))
        store.drain()
        assert timeline.counted("nvme_read_bytes") == sum(SlotArrays(numel).nbytes for numel in NUMELS[:4])


@pytest.mark.parametrize("buffers", [3, 6])
def test_what_a_step_consumes_comes_again_in_another_order(engine: FaultyEngine, tmp_path: Path, buffers: int) -> None:
    """As gradients of two micro-batches: a step consumes them in its order, and backwards come in the opposite one."""
    timeline = Timeline()
    size = sum(SlotArrays(numel).nbytes for numel in NUMELS)
    seen = []
    with store_on(engine, tmp_path / "run", buffers=buffers, timeline=timeline) as store:
        for step in range(1, 5):
            for use in (Use.OVERWRITE, Use.UPDATE):
                for index in reversed(range(len(NUMELS))):
                    with store.lease(index, use, step=step) as lease:
                        put(lease, step)
                    store.drain()  # what could be read ahead has been
            store.repeat(range(len(NUMELS)))
            for index in range(len(NUMELS)):
                with store.lease(index, Use.CONSUME, step=step) as lease:
                    assert value_in(lease) == step
                store.drain()
            seen.append(timeline.counted("nvme_read_bytes"))
    reads = [last - before for before, last in pairwise(seen[1:])]
    assert all(read <= 2 * size for read in reads)
    assert any(read < 2 * size for read in reads) == (buffers > 3)  # some stay from a backward's end to the step


@pytest.mark.parametrize("buffers", [3, 4, 6])
def test_what_is_overwritten_before_it_is_read_is_read_once(engine: FaultyEngine, tmp_path: Path, buffers: int) -> None:
    """As parameters that stream: new in a forward, read in a backward. Reading ahead leaves buffers to new ones."""
    timeline = Timeline()
    size = sum(SlotArrays(numel).nbytes for numel in NUMELS)
    with store_on(engine, tmp_path / "run", buffers=buffers, timeline=timeline) as store:
        for step in range(1, 5):
            for index in range(len(NUMELS)):
                with store.lease(index, Use.OVERWRITE, step=step) as lease:
                    put(lease, step)
                store.drain()  # what could be read ahead has been
            for index in reversed(range(len(NUMELS))):
                with store.lease(index, Use.READ, step=step) as lease:
                    assert value_in(lease) == step
            store.repeat()
        store.drain()
        assert timeline.counted("nvme_written_bytes") == 4 * size
        assert timeline.counted("nvme_read_bytes") <= 4 * size


def test_kept_chunks_never_move(engine: FaultyEngine, tmp_path: Path) -> None:
    with store_on(engine, tmp_path / "run", buffers=0, kept=frozenset(range(len(NUMELS)))) as store:
        written = engine.writes
        for step in range(1, 3):
            store.expect(range(len(NUMELS)))
            for index in range(len(NUMELS)):
                with store.lease(index, Use.UPDATE, step=step) as lease:
                    put(lease, step)
        store.drain()
        assert (engine.reads, engine.writes) == (0, written)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_kept_chunks_are_written_once_for_a_commit_and_behind_the_step_if_it_is_known(
    engine: FaultyEngine, tmp_path: Path, is_known: bool
) -> None:
    kept = frozenset(range(len(NUMELS)))
    with store_on(engine, tmp_path / "run", buffers=0, kept=kept, due=[2, 4] if is_known else []) as store:
        before = engine.writes
        for step in (1, 2, 3, 4):
            for index in sorted(kept):
                with store.lease(index, Use.UPDATE, step=step) as lease:
                    assert value_in(lease) == step - 1
                    put(lease, step)
            store.drain()
            commits, is_commit = step // 2, step % 2 == 0
            if is_known and is_commit:
                assert engine.writes - before == commits * len(NUMELS)
            if is_commit:
                versions = store.flush()
                assert {version.step for version in versions.values()} == {step}
                assert engine.writes - before == commits * len(NUMELS)
        store.reset(versions)
        for index in kept:
            with store.lease(index, Use.READ, step=4) as lease:
                assert value_in(lease) == 4


def test_what_is_left_unfinished_at_a_step_that_is_committed_is_not_written_yet(
    engine: FaultyEngine, tmp_path: Path
) -> None:
    with store_on(engine, tmp_path / "run", buffers=0, kept=frozenset(range(len(NUMELS))), due=[1]) as store:
        before = engine.writes
        with store.lease(0, Use.FILL, step=1) as lease:
            put(lease, 1)
        store.drain()
        assert engine.writes == before
        assert store.flush()[0].step == 1
        assert engine.writes == before + 1


def test_reading_begins_when_the_order_is_announced(store: Store, engine: FaultyEngine) -> None:
    for index in range(3):
        with store.lease(index, Use.UPDATE, step=1) as lease:
            put(lease, 1)
    store.drain()
    store.expect([2, 0])
    assert engine.reads == 2


def test_chunks_still_being_written_are_read_ahead_once_they_are_there(tmp_path: Path) -> None:
    engine = FaultyEngine(delay_s=0.02)
    with store_on(engine, tmp_path / "run") as store:
        for index in (0, 1, 2):
            with store.lease(index, Use.UPDATE, step=1) as lease:
                put(lease, 1)
        store.expect([2, 1, 0])
        end = time.monotonic() + 10
        while engine.reads < 3 and time.monotonic() < end:
            time.sleep(0.005)
        assert engine.reads == 3
        for index in (2, 1, 0):
            with store.lease(index, Use.READ, step=2) as lease:
                assert value_in(lease) == 1
    engine.close()


def test_a_clean_release_writes_nothing(store: Store, engine: FaultyEngine) -> None:
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 1)
    store.drain()
    written = engine.writes
    with store.lease(0, Use.READ, step=2) as lease:
        assert value_in(lease) == 1
    store.drain()
    assert engine.writes == written


@pytest.mark.parametrize("kept", [frozenset(), frozenset({0})], ids=["streamed", "kept"])
def test_a_chunk_that_was_first_used_in_inference_mode_can_be_written_outside(
    engine: FaultyEngine, tmp_path: Path, kept: frozenset[int]
) -> None:
    with store_on(engine, tmp_path / "run", buffers=1, kept=kept) as store:
        with torch.inference_mode(), store.lease(0, Use.UPDATE, step=1) as lease:
            put(lease, 1)
        with store.lease(0, Use.UPDATE, step=2) as lease:
            assert value_in(lease) == 1
            put(lease, 2)


def test_leases_end_in_any_order(store: Store) -> None:
    stacks = [ExitStack() for _ in range(3)]
    for index, stack in enumerate(stacks):
        put(stack.enter_context(store.lease(index, Use.UPDATE, step=1)), index + 1)
    for index in (1, 2, 0):
        stacks[index].close()
    for index in range(3):
        with store.lease(index, Use.READ, step=2) as lease:
            assert value_in(lease) == index + 1


def test_what_a_lease_was_interrupted_in_stays_what_it_was_left(store: Store) -> None:
    def interrupted() -> None:
        with store.lease(0, Use.UPDATE, step=1) as lease:
            put(lease, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with store.lease(0, Use.READ, step=2) as lease:
        assert value_in(lease) == 1


def test_an_overwriting_that_is_cut_off_leaves_what_was_there(store: Store) -> None:
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 1)
    store.drain()
    for index in (0, 1):  # one is only in its slot, of the other there is nothing yet
        with suppress(KeyboardInterrupt), store.lease(index, Use.OVERWRITE, step=2) as lease:
            put(lease, 2)
            raise KeyboardInterrupt
    store.drain()
    for index, value in ((0, 1), (1, 0)):
        with store.lease(index, Use.READ, step=2) as lease:
            assert value_in(lease) == value


def test_a_chunk_that_is_filled_in_parts_is_written_once(store: Store, engine: FaultyEngine) -> None:
    before = engine.writes
    for use in (Use.FILL, Use.FILL, Use.UPDATE):
        with store.lease(0, use, step=1) as lease:
            put(lease, 1)
    store.drain()
    assert engine.writes == before + 1


def test_a_chunk_that_is_refilled_is_not_read_and_is_written_once(store: Store, engine: FaultyEngine) -> None:
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 1)
    store.drain()
    before = engine.reads, engine.writes
    with store.lease(0, Use.REFILL, step=2) as lease:
        put(lease, 2)
    with store.lease(0, Use.READ, step=3) as lease:
        assert value_in(lease) == 2
    store.drain()
    assert (engine.reads, engine.writes) == before
    with store.lease(0, Use.UPDATE, step=3) as lease:
        put(lease, 3)
    store.drain()
    assert (engine.reads, engine.writes) == (before[0], before[1] + 1)


def _stored(store: Store) -> None:
    for index in range(len(NUMELS)):
        with store.lease(index, Use.UPDATE, step=1) as lease:
            put(lease, 1)
    store.drain()


def _fill(store: Store, *chunks: int) -> None:
    for index in chunks:
        with store.lease(index, Use.FILL, step=2) as lease:
            put(lease, 2)


def test_of_chunks_for_a_step_to_come_the_last_one_leaves(store: Store, engine: FaultyEngine) -> None:
    """It uses them in their order: whatever leaves instead has to be there sooner."""
    _stored(store)
    store.expect([], once={0, 1, 2, 3})
    _fill(store, 0, 1, 2, 3)
    store.drain()
    before = engine.reads
    _fill(store, 0, 1, 3)
    assert engine.reads == before
    _fill(store, 2)
    assert engine.reads == before + 1


def test_no_chunk_is_written_for_a_buffer_that_a_read_will_leave(tmp_path: Path) -> None:
    engine = FaultyEngine(delay_s=0.05)
    with store_on(engine, tmp_path / "run") as store:
        _stored(store)
        store.expect([], once={0, 1})
        _fill(store, 0, 1)
        before = engine.writes
        store.expect([5])
        with store.lease(2, Use.READ, step=2) as lease:
            assert value_in(lease) == 1
        assert engine.writes == before
    engine.close()


def test_what_is_consumed_is_gone(store: Store, engine: FaultyEngine) -> None:
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 1)
    store.drain()
    with store.lease(0, Use.CONSUME, step=1) as lease:
        assert value_in(lease) == 1
    before = engine.reads
    assert store.flush() == {}
    with store.lease(0, Use.READ, step=2) as lease:
        assert value_in(lease) == 0
    assert engine.reads == before


def test_what_is_discarded_moves_no_byte(store: Store, engine: FaultyEngine) -> None:
    for index in (0, 1):
        with store.lease(index, Use.UPDATE, step=1) as lease:
            put(lease, 1)
    store.drain()
    with store.lease(1, Use.FILL, step=2) as lease:
        put(lease, 2)
    before = engine.reads, engine.writes
    store.discard(0)
    store.discard(1)
    assert store.flush() == {}
    for index in (0, 1):
        with store.lease(index, Use.CONSUME, step=3) as lease:
            assert value_in(lease) == 0
    assert (engine.reads, engine.writes) == before


def test_what_is_expected_once_is_not_read_ahead_again(engine: FaultyEngine, tmp_path: Path) -> None:
    timeline = Timeline()
    with store_on(engine, tmp_path / "run", buffers=4, timeline=timeline) as store:
        for step in (1, 2, 3):
            before = timeline.counted("nvme_read_bytes")
            store.expect(range(len(NUMELS)), once={0, 1})
            store.drain()  # from the second step on, what the order begins with comes from the disk
            expected = [0, 1, 2, 3] if step > 1 else []
            already = [] if step == 1 else [2, 3]
            moved = sum(SlotArrays(NUMELS[index]).nbytes for index in expected if index not in already)
            assert timeline.counted("nvme_read_bytes") - before == moved
            for index in range(len(NUMELS)):
                with store.lease(index, Use.UPDATE, step=step) as lease:
                    put(lease, step)
            store.drain()


def use_all(store: Store, step: int) -> None:
    store.expect(range(len(NUMELS)))
    for index in range(len(NUMELS)):
        with store.lease(index, Use.UPDATE, step=step) as lease:
            put(lease, step)
    store.drain()


def interrupted_store(path: Path, kept: frozenset[int], instruction: int, by: Callable[[], None]) -> bool:
    """Interrupts two steps there, and uses what is left; whether they ended before."""
    engine, is_over = ThreadEngine(), False
    with store_on(engine, path, kept=kept) as store:
        try:
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(instruction, by):
                for step in (1, 2):
                    use_all(store, step)
                is_over = True
            for step in (3, 4):
                use_all(store, step)
            for index in range(len(NUMELS)):
                with store.lease(index, Use.READ, step=5) as lease:
                    assert value_in(lease) == 4
        except InterruptedStepError:
            assert by is thrown_in  # which may leave anything half changed, but not without a word
    engine.close()
    return is_over


@pytest.mark.parametrize("kept", [frozenset[int](), frozenset({1, 4})])
def test_after_an_interrupt_at_any_instruction_every_chunk_can_be_used(tmp_path: Path, kept: frozenset[int]) -> None:
    """At one in a thousand, and at all of them in tests/faults."""
    instruction = 1
    while not interrupted_store(tmp_path / f"run{instruction}", kept, instruction, interrupt):
        instruction += 1009


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 3])
def test_a_failure_is_raised_at_every_call_from_then_on(
    store: Store, engine: FaultyEngine, operation: str, nth: int
) -> None:
    use_all(store, 1)
    engine.fail(operation, errno.EIO, nth)
    with pytest.raises(TierIOError) as first:
        use_all(store, 2)
    assert first.value.errno == errno.EIO
    for again in (
        store.check,
        store.drain,
        lambda: store.expect([0]),
        lambda: store.lease(0, Use.READ, step=3).__enter__(),
        lambda: store.lease(5, Use.READ, step=3).__enter__(),
    ):
        with pytest.raises(TierIOError) as later:
            again()
        assert later.value is first.value
    store.close()
    with pytest.raises(TierIOError):
        store.check()


def test_a_failure_behind_the_calls_stops_the_run_and_its_own_store_alone(
    store: Store, engine: FaultyEngine, health: Health, tmp_path: Path
) -> None:
    """A resume, a rollback or a closing may still need what the other stores have."""
    with store_on(FaultyEngine(), tmp_path / "other", health=health) as other:
        use_all(store, 1)
        versions = store.flush()
        store.set_committed(versions)
        use_all(other, 1)
        engine.fail("write", errno.ENOSPC, 0)
        with suppress(TierIOError):
            use_all(store, 2)
        assert health.state is State.HURT
        use_all(other, 2)
        with pytest.raises(TierIOError) as own:
            store.drain()
        with pytest.raises(TierIOError) as said:
            health.check()
        assert said.value is own.value
        store.reset(versions)
        assert health.state is State.FAILED  # until all of the run is of one step
        health.reset()
        health.check()
        use_all(store, 2)


@pytest.mark.parametrize("fault", ["flip", "lose", "tear"])
def test_damage_done_on_the_way_is_raised_at_the_next_read(store: Store, engine: FaultyEngine, fault: str) -> None:
    use_all(store, 1)
    if fault == "flip":
        engine.flip("write", 2 * PAGE_BYTES, nth=1)
    elif fault == "lose":
        engine.lose(nth=1)
    else:
        engine.tear(2 * PAGE_BYTES, nth=1)
    with pytest.raises(CorruptionError) as caught:
        use_all(store, 2)  # which reads what step 3 begins with
    assert caught.value.chunk == 1
    with pytest.raises(CorruptionError):
        store.check()


def test_close_waits_for_what_is_under_way(tmp_path: Path) -> None:
    engine = FaultyEngine(delay_s=0.1)
    with store_on(engine, tmp_path / "run") as store:
        with store.lease(0, Use.UPDATE, step=1) as lease:
            put(lease, 1)
        start = time.monotonic()
        store.close()
        assert engine._under_way == 0
        assert time.monotonic() - start < 10
        for call in (store.check, store.drain, lambda: store.lease(0, Use.READ, step=2).__enter__()):
            with pytest.raises(ClosedError):
                call()
        store.close()
    engine.close()


def test_whoever_waits_for_a_chunk_learns_that_the_store_was_closed(store: Store) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with store.lease(5, Use.READ, step=1):
                pass
        except OffloadError as error:
            errors.append(error)

    with ExitStack() as held:
        for index in range(3):
            held.enter_context(store.lease(index, Use.READ, step=1))
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        store.close()
        waiting.join(10)
        assert not waiting.is_alive()
        assert isinstance(errors[0], ClosedError)


def test_what_no_disk_said_is_raised_once_and_then_names_the_way_out(
    store: Store, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_all(store, 1)
    versions = store.flush()
    store.set_committed(versions)
    came = RecursionError("maximum recursion depth exceeded")

    def recursing(*args: object) -> None:
        raise came

    with monkeypatch.context() as patch:
        patch.setattr(store, "_has_begun", recursing)
        with pytest.raises(RecursionError), store.lease(0, Use.READ, step=2):
            pass
    with pytest.raises(InterruptedStepError, match="new OffloadZero") as caught:
        store.drain()
    assert caught.value.__cause__ is came
    health.can_go_back = True
    with pytest.raises(InterruptedStepError, match=r"call rollback\(\)"), store.lease(1, Use.READ, step=2):
        pass
    store.reset(versions)
    for index in range(len(NUMELS)):
        with store.lease(index, Use.READ, step=2) as lease:
            assert value_in(lease) == 1


def test_a_mistake_inside_a_callback_reaches_whoever_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, amount: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(store._timeline, "count", broken)
    with store.lease(0, Use.UPDATE, step=1) as lease:
        put(lease, 1)
    with pytest.raises(InterruptedStepError) as caught:
        store.drain()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_thread_engine_keeps_several_transfers_under_way(tmp_path: Path) -> None:
    engine = ThreadEngine()
    with store_on(engine, tmp_path / "run") as store:
        for step in range(1, 4):
            use_all(store, step)
    engine.close()
