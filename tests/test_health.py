"""The table of offload/health.py, against the table of this file; threads and interrupts."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EIO
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offload.errors import ClosedError, InterruptedStepError, OffloadError, RankError, TierIOError
from offload.health import Health, PartHealth, State
from tests.support.interrupted import interrupt, interrupted_at, thrown_in

SOUND, HURT, FAILED, FINAL, CLOSED = State

NEXT: dict[str, dict[State, State]] = {
    "part fails": {SOUND: HURT, HURT: HURT, FAILED: FAILED, FINAL: FINAL, CLOSED: CLOSED},
    "last part resets": {SOUND: SOUND, HURT: SOUND, FAILED: FAILED, FINAL: FINAL, CLOSED: CLOSED},
    "check": {SOUND: SOUND, HURT: FAILED, FAILED: FAILED, FINAL: FINAL, CLOSED: CLOSED},
    "fail": {SOUND: FAILED, HURT: FAILED, FAILED: FAILED, FINAL: FINAL, CLOSED: CLOSED},
    "rollback fails": {SOUND: FAILED, HURT: FAILED, FAILED: FAILED, FINAL: FINAL, CLOSED: CLOSED},
    "rollback succeeds": {SOUND: SOUND, HURT: HURT, FAILED: SOUND, FINAL: FINAL, CLOSED: CLOSED},
    "fail for good": {SOUND: FINAL, HURT: FINAL, FAILED: FINAL, FINAL: FINAL, CLOSED: CLOSED},
    "close": {SOUND: CLOSED, HURT: CLOSED, FAILED: CLOSED, FINAL: CLOSED, CLOSED: CLOSED},
}
"""The state after each event, by the state before. No part is hurt after "rollback succeeds" from FAILED."""


def ours() -> OffloadError:
    return TierIOError("read", EIO, "swap", 0, 4096)


def said_by(look: Callable[[], None]) -> BaseException | None:
    """What a look at the health raises: a failure itself, or what InterruptedStepError is from; None: nothing."""
    try:
        look()
    except InterruptedStepError as error:
        return error.__cause__
    except OffloadError as error:
        return error
    return None


class Transitions(RuleBasedStateMachine):
    """Events in any order, and what the table says of them."""

    errors = st.sampled_from([ours, KeyboardInterrupt, RecursionError]).map(lambda make: make())

    @initialize(is_shared=st.booleans())
    def begin(self, is_shared: bool) -> None:
        self.health = Health()
        self.health.is_shared = is_shared
        self.parts = [self.health.part("came in a part") for _ in range(3)]
        self.state = SOUND
        self.error: BaseException | None = None  # what every call raises
        self.hurt: dict[PartHealth, BaseException] = {}

    def happens(self, event: str) -> State:
        """Returns: the state before."""
        before, after = self.state, NEXT[event][self.state]
        self.state = FINAL if after is FAILED and self.health.is_shared else after
        return before

    @rule(number=st.integers(0, 2), error=errors)
    def part_fails(self, number: int, error: BaseException) -> None:
        first = self.hurt.setdefault(self.parts[number], error)
        assert self.parts[number].fail(error) is first
        self.happens("part fails")

    @rule(number=st.integers(0, 2))
    def part_resets(self, number: int) -> None:
        self.parts[number].reset()
        self.hurt.pop(self.parts[number], None)
        if not self.hurt:
            self.happens("last part resets")

    @rule()
    def check(self) -> None:
        before = self.happens("check")
        if before is HURT:
            self.error = next(self.hurt[part] for part in self.parts if part in self.hurt)
        said = said_by(self.health.check)
        assert isinstance(said, ClosedError) if self.state is CLOSED else said is self.error

    @rule(error=errors)
    def fail(self, error: BaseException) -> None:
        before = self.happens("fail")
        self.health.fail(error)
        self.error = error if before in (SOUND, HURT) else self.error

    @rule(error=errors)
    def rollback_fails(self, error: BaseException) -> None:
        if self.state in (FINAL, CLOSED):
            return  # it has not begun
        self.happens("rollback fails")
        self.health.fail(error, replaces=True)
        self.error = error

    @rule()
    def rollback_succeeds(self) -> None:
        if self.state in (FINAL, CLOSED):
            return
        for part in self.parts:
            part.reset()
        if self.state is HURT:
            self.happens("last part resets")
        self.hurt.clear()
        self.happens("rollback succeeds")
        self.health.reset()
        self.error = None

    @rule()
    def fail_for_good(self) -> None:
        error = ours()
        before = self.happens("fail for good")
        self.health.fail(error, is_final=True)
        self.error = self.error if before in (FINAL, CLOSED) else error

    @rule()
    def close(self) -> None:
        self.happens("close")
        self.health.close()
        self.error = None

    @invariant()
    def it_is_as_the_table_says(self) -> None:
        assert self.health.state is self.state
        assert self.health.is_stopped == (self.state in (FAILED, FINAL, CLOSED))
        said = said_by(self.health.require_mendable)
        if self.state is FINAL:
            assert said is self.error
        else:
            assert isinstance(said, ClosedError) == (self.state is CLOSED)
            assert said is None or self.state is CLOSED
        assert (said_by(self.health.require_open) is None) == (self.state is not CLOSED)
        for part in self.parts:
            assert said_by(part.check) is self.hurt.get(part)
            assert part.is_sound == (part not in self.hurt)


Transitions.TestCase.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
TestTransitions = Transitions.TestCase


@pytest.mark.parametrize(("is_shared", "way_out"), [(False, r"call rollback\(\)"), (True, "start again on all ranks")])
def test_an_interrupt_names_the_way_out(is_shared: bool, way_out: str) -> None:
    health = Health()
    health.is_shared, health.can_go_back = is_shared, True
    health.fail(KeyboardInterrupt())
    with pytest.raises(InterruptedStepError, match=f"^KeyboardInterrupt\\(\\) interrupted a step, .*: {way_out}$"):
        health.check()


def test_what_came_in_a_part_names_the_way_out_of_now() -> None:
    health = Health()
    part = health.part("came while a chunk moved")
    part.fail(MemoryError())
    with pytest.raises(InterruptedStepError, match=r"MemoryError\(\) came while a chunk moved: nothing was committed"):
        part.check()
    health.can_go_back = True
    with pytest.raises(InterruptedStepError, match=r"call rollback\(\)"):
        health.check()


def test_a_collective_that_failed_is_final_for_the_run_and_stops_collectives_after_its_end() -> None:
    health = Health()
    health.is_shared = True
    ranks, store = health.part(), health.part()
    error = ranks.fail(RankError("all_gather failed", collective="all_gather", waited_s=1.0))
    store.check()
    assert said_by(health.check) is error
    assert said_by(health.require_mendable) is error
    health.close()
    assert not ranks.is_sound


def test_in_a_forked_child_every_look_says_so_and_changes_nothing() -> None:
    for prepare in (lambda health: None, lambda health: health.fail(ours()), lambda health: health.close()):
        health = Health()
        prepare(health)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                said = [said_by(look) for look in (health.check, health.require_mendable)]
                os.write(write, str(all("forked child" in str(error) for error in said)).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            assert pipe.read() == b"True"
        os.waitpid(child, 0)
        assert health.is_here


@pytest.mark.parametrize("what", ["the run", "a part"])
def test_of_two_threads_that_fail_at_once_the_first_wins(what: str) -> None:
    """The other one fails, and looks, between any two instructions of this one. Both hear of one error."""
    for place in count(1):
        health = Health()
        part = health.part()
        fail = health.fail if what == "the run" else part.fail
        own, other = ours(), ours()
        heard: list[BaseException | None] = []

        def fails(
            fail: Callable[[BaseException], object] = fail,
            health: Health = health,
            error: OffloadError = other,
            heard: list[BaseException | None] = heard,
        ) -> None:
            fail(error)
            heard.append(said_by(health.check))

        def meanwhile(fails: Callable[[], None] = fails) -> None:
            thread = threading.Thread(target=fails)
            thread.start()
            thread.join()

        with interrupted_at(place, meanwhile) as left:
            fail(own)
        if left[0] > 0:
            break
        heard.append(said_by(health.check))
        assert heard[0] is heard[1]
        assert what == "the run" or said_by(part.check) is heard[0]
    assert place > 1


def hurt_and_checked(health: Health, part: PartHealth, error: BaseException) -> Iterator[None]:
    """A part fails and a call looks; then a step fails, and what looks for a rollback."""
    part.fail(error)
    yield
    with suppress(OffloadError):
        health.check()
    yield
    part.reset()
    yield
    health.reset()
    yield
    health.fail(error)
    yield
    with suppress(OffloadError):
        health.check()
    yield


@pytest.mark.parametrize("by", [interrupt, thrown_in])
def test_an_interrupt_anywhere_leaves_one_state_of_the_table_or_the_next(by: Callable[[], None]) -> None:
    """What the call that was interrupted was to do is done, or is not; the next look knows which."""
    after = [HURT, FAILED, FAILED, SOUND, FAILED, FAILED]
    seen = set()
    for place in count(1):
        health, error = Health(), ours()
        part = health.part()
        done = 0
        try:
            with interrupted_at(place, by) as left:
                for _ in hurt_and_checked(health, part, error):
                    done += 1
        except KeyboardInterrupt:
            pass
        if left[0] > 0:
            break
        state = health.state
        before = SOUND if done == 0 else after[done - 1]
        assert state in (before, after[min(done, len(after) - 1)])
        seen.add((done, state))
        said = said_by(health.check)
        assert said is (None if state is SOUND else error)
        if state is HURT:
            assert health.state is FAILED
    assert place > 30
    assert {done for done, _ in seen} >= set(range(5))


def test_a_closed_run_keeps_no_frames_of_its_failure_alive() -> None:
    class Large:
        pass

    def failing() -> weakref.ref[Large]:
        large = Large()
        try:
            raise ours()
        except OffloadError as error:
            health.fail(error)
        return weakref.ref(large)

    health = Health()
    large = failing()
    gc.collect()
    assert large() is not None
    health.close()
    gc.collect()
    assert large() is None
