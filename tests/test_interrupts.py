"""What is marked is not parted by a signal, and whoever would have got the signal gets it then."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from offload import interrupts
from offload.interrupts import (
    Handler,
    give_back,
    hold,
    is_of_system,
    let_in,
    result_of,
    uninterrupted,
    uninterrupted_entry,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
OTHERS = sorted(signal.valid_signals() - {*SIGNALS, signal.SIGKILL, signal.SIGSTOP})


class EndedError(Exception):
    pass


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # An optimizer that an earlier test left open in this process holds the handlers, too.
    monkeypatch.setattr(interrupts, "_holders", 0)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, *OTHERS)}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        if handler is not signal.getsignal(number):
            signal.signal(number, handler)


def raising(error: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error(number)

    return handler


def test_a_signal_in_a_lookup_waits_for_the_next_marked_call() -> None:
    """Torch would drop what is raised there."""

    @interrupts.uninterrupted_lookup
    def looked_up() -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    @uninterrupted
    def next_one() -> None: ...

    hold()
    try:
        assert looked_up()
        with pytest.raises(KeyboardInterrupt):
            next_one()
    finally:
        give_back()


def test_a_signal_waits_for_the_end_of_the_call() -> None:
    done = []

    @uninterrupted
    def change() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done == [1]


def test_a_signal_waits_for_the_end_of_the_outermost_call() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        let_in()
        done.append(1)

    @uninterrupted
    def outer() -> None:
        inner()
        let_in()
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == [1]  # the outermost one may let it in


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_goes_to_the_handler_that_would_have_got_it(number: signal.Signals) -> None:
    signal.signal(number, raising(EndedError))
    hold()
    try:

        @uninterrupted
        def change() -> int:
            signal.raise_signal(number)
            return 1

        with pytest.raises(EndedError, match=str(int(number))):
            change()
        with pytest.raises(EndedError):
            signal.raise_signal(number)
    finally:
        give_back()


def test_two_signals_are_both_handled() -> None:
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))

    @uninterrupted
    def change() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert seen == [signal.SIGTERM]


def test_a_handler_that_only_notes_lets_the_call_return() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))

    @uninterrupted
    def change() -> str:
        signal.raise_signal(signal.SIGTERM)
        assert not seen
        return "done"

    assert change() == "done"
    assert seen == [signal.SIGTERM]


def test_a_handler_that_is_installed_later_is_waited_for_too_and_one_restored_as_well() -> None:
    hold()

    @uninterrupted
    def change() -> None:
        signal.raise_signal(signal.SIGINT)

    ours = signal.signal(signal.SIGINT, raising(EndedError))
    assert isinstance(ours, Handler)
    with pytest.raises(EndedError):
        change()
    signal.signal(signal.SIGINT, ours)
    with pytest.raises(KeyboardInterrupt):
        change()
    give_back()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("marked", [uninterrupted, uninterrupted_entry])
def test_a_handler_of_any_signal_that_is_installed_later_is_waited_for(
    number: int, marked: Callable[[Callable[[], None]], Callable[[], None]]
) -> None:
    hold()
    done = []

    @marked
    def change() -> None:
        signal.raise_signal(number)
        done.append(1)

    @uninterrupted
    def nothing() -> None:
        return

    try:
        for step in (1, 2):  # also if it is installed for each step
            signal.signal(number, raising(EndedError))
            with pytest.raises(EndedError):  # noqa: PT012  # an entry leaves it to the next call
                change()
                nothing()
            assert len(done) == step
    finally:
        give_back()


def test_a_handler_that_another_handler_installs_is_waited_for_in_the_same_call() -> None:
    hold()
    done = []

    def again(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, raising(EndedError))

    @uninterrupted
    def change() -> None:
        signal.raise_signal(signal.SIGALRM)
        done.append(1)

    @uninterrupted
    def outer() -> None:
        signal.raise_signal(signal.SIGALRM)
        let_in()  # installs the other one
        change()
        done.append(2)

    signal.signal(signal.SIGALRM, again)
    with pytest.raises(EndedError):
        outer()
    assert done == [1, 2]
    give_back()


def test_a_handler_that_installs_itself_anew_has_ours_in_front_of_it_at_once() -> None:
    """As those of System V have to. Between two marked calls another signal may come."""
    came: list[int] = []

    def anew(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, anew)
        came.append(number)

    signal.signal(signal.SIGUSR1, anew)
    hold()
    signal.raise_signal(signal.SIGUSR1)
    assert isinstance(signal.getsignal(signal.SIGUSR1), Handler)
    assert came == [signal.SIGUSR1]
    give_back()


def test_what_a_handler_raised_is_no_error_of_the_system() -> None:
    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "out of time")

    signal.signal(signal.SIGALRM, out_of_time)
    hold()
    change = uninterrupted(lambda: signal.raise_signal(signal.SIGALRM))
    for work in (change, lambda: signal.raise_signal(signal.SIGALRM)):
        with pytest.raises(TimeoutError) as caught:
            work()
        assert not is_of_system(caught.value)
    give_back()
    with pytest.raises(FileNotFoundError) as missing:
        open("/nowhere")  # noqa: SIM115
    assert is_of_system(missing.value)
    assert not is_of_system(TimeoutError("thrown in by another thread"))
    assert not is_of_system(ValueError())


def test_the_last_that_gives_back_installs_the_users_handlers_again() -> None:
    mine = raising(EndedError)
    signal.signal(signal.SIGALRM, mine)
    hold()
    hold()
    give_back()
    assert isinstance(signal.getsignal(signal.SIGALRM), Handler)
    give_back()
    assert signal.getsignal(signal.SIGALRM) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_replaced_is_left_as_it_is() -> None:
    hold()
    mine = raising(EndedError)
    signal.signal(signal.SIGINT, mine)
    give_back()
    assert signal.getsignal(signal.SIGINT) is mine


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hold()

    @uninterrupted
    def change() -> None:
        signal.raise_signal(signal.SIGINT)

    change()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    give_back()


def test_a_call_in_another_thread_puts_off_no_signal() -> None:
    began, ends = threading.Event(), threading.Event()

    @uninterrupted
    def change() -> None:
        began.set()
        ends.wait(10)

    hold()
    other = threading.Thread(target=change)
    other.start()
    try:
        began.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        ends.set()
        other.join()
        give_back()


def test_what_an_exception_left_puts_off_nothing() -> None:
    """A counter would have stayed too high."""
    hold()

    @uninterrupted
    def change() -> None:
        raise EndedError

    with pytest.raises(EndedError):
        change()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    give_back()


def test_a_wait_for_a_future_is_interrupted_between_its_looks() -> None:
    future: Future[int] = Future()
    hold()
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        result_of(future)
    assert time.monotonic() - start < 5
    give_back()
    # Nobody holds its lock.
    future.set_result(1)
    assert result_of(future) == 1


def test_nothing_is_left_to_handle() -> None:
    assert not interrupts._came
