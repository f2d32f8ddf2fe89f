"""What is marked is not parted by a signal, and whoever would have got the signal gets it then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from offload import interrupts
from offload.interrupts import Handler, give_back, hold, let_in, result_of, uninterrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class EndedError(Exception):
    pass


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # An optimizer that an earlier test left open in this process holds the handlers, too.
    monkeypatch.setattr(interrupts, "_holders", 0)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error(number)

    return handler


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
