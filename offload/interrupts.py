"""What must change together is changed in one call that no signal can part: `@uninterrupted`.

[Note: interrupts]
A handler written in Python runs between two instructions of the main thread, whatever that is doing, and most raise:
KeyboardInterrupt on Ctrl-C, SystemExit on SIGTERM, a timeout on SIGALRM. A lock taken a moment before would never be
free again; a chunk lent a moment before could never be used again.

So a `Handler` is installed in front of the user's. It looks at the stack: is a call of a function under way that is
marked `uninterrupted`? Then it only notes the signal, and the outermost such call hands it to the user's handler when
it is done. The stack cannot be wrong, as a counter could be that an exception left too high, and a call that no signal
interrupts pays for two looks at which handlers are installed.

- Only the main thread handles signals, so elsewhere the mark costs the same and does nothing.
- Who waits within such a call lets interrupts in where nothing is half changed: `let_in`, `wait_until`, `result_of`.
- `__enter__` of a context manager is marked `uninterrupted_entry`: an exception at its end would leave something
  entered that nobody leaves. What came meanwhile is handled at the end of the next marked call.
- A handler that the user installs later replaces ours, until the next marked call puts another one in front of it.
  Whoever restores what `signal.signal` returned restores ours, which hands on to what was there before.
- Optimizers `hold()` the handlers; when the last has given them back, the users' own are installed again.
- Exceptions that another thread throws in (PyThreadState_SetAsyncExc) cannot be put off by anything. They are rare, and
  are met where they can do harm: locks are taken by `with` on the lock itself, which CPython enters in one
  instruction, and a store whose books were left half written raises InterruptedStepError from then on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal looks for an enum first, which takes 4 us
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LET_IN_S = 0.1
"""How long an interrupt may have to wait for whoever waits for something else."""
_INT, _TERM = int(signal.SIGINT), int(signal.SIGTERM)

_came: dict[int, Handler] = {}
"""Signals that wait for the end of a call. Only the main thread changes it."""
_holders = 0
_counting = threading.Lock()


class Handler:
    """Installed for a signal in front of `before`, the handler that was there; see the note at the top of this file."""

    __slots__ = ("before",)

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _region(frame) is None:
            self.before(number, frame)
        else:
            _came[number] = self


_NOT_TO_REPLACE = (Handler, int, type(None))
"""Of handlers: ours, SIG_DFL and SIG_IGN, and what was installed from C."""


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """A signal that arrives during a call of `function` is handled at its end, or at that of the outermost one."""

    @functools.wraps(function)
    def region(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if (
                _signal.getsignal(_INT).__class__ not in _NOT_TO_REPLACE
                or _signal.getsignal(_TERM).__class__ not in _NOT_TO_REPLACE
            ):
                _install((_INT, _TERM))
            return function(*args, **kwargs)
        finally:
            # The last instruction at which the interpreter looks for signals lies before this line.
            if _came:
                _handle_outside(sys._getframe())

    return region


def uninterrupted_entry(function: Callable[P, R]) -> Callable[P, R]:
    """For an `__enter__`: as `uninterrupted`, but what arrived is handled at the end of the next marked call."""

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        if (
            _signal.getsignal(_INT).__class__ not in _NOT_TO_REPLACE
            or _signal.getsignal(_TERM).__class__ not in _NOT_TO_REPLACE
        ):
            _install((_INT, _TERM))
        return function(*args, **kwargs)

    return entry


def let_in() -> None:
    """Handles now what has come since the outermost marked call began, if this is it: nothing is half changed here."""
    if _came:
        own = _region(sys._getframe())
        if own is not None:
            _handle_outside(own)


def wait_until(lock: threading.RLock, changed: threading.Condition, done: Callable[[], bool]) -> None:
    """Waits in a marked call until `done()`, which is called with `lock` held, that of `changed`."""
    while True:
        with lock:
            if done():
                return
            changed.wait(LET_IN_S)
        let_in()


@uninterrupted
def wait_for_all(futures: Iterable[Future[Any]]) -> None:
    """Waits until they are done, whatever becomes of them.

    An interrupt in `Future.result` or `concurrent.futures.wait` could keep a future's lock, and whoever resolves it
    would hang.
    """
    for future in futures:
        while not future.done():
            try:
                future.exception(LET_IN_S)
                break
            except TimeoutError:
                let_in()
            except CancelledError:
                break


def result_of(future: Future[R]) -> R:
    """`future.result()`, as `wait_for_all` waits."""
    wait_for_all([future])
    return future.result()


def hold() -> None:
    """Keeps handlers installed until `give_back` was called as often."""
    global _holders
    with _counting:
        _holders += 1
    _install(tuple(map(int, signal.valid_signals())))


def give_back() -> None:
    """Installs the users' handlers again, if nobody else holds ours."""
    global _holders
    with _counting:
        _holders -= 1
        is_last = _holders == 0
    if is_last and _is_main():
        for number in map(int, signal.valid_signals()):
            handler = _signal.getsignal(number)
            if isinstance(handler, Handler):
                signal.signal(number, handler.before)


def _install(numbers: tuple[int, ...]) -> None:
    if _is_main():
        for number in numbers:
            before = _signal.getsignal(number)
            if before.__class__ not in _NOT_TO_REPLACE:
                signal.signal(number, Handler(before))


def _region(frame: FrameType | None) -> FrameType | None:
    """The innermost marked call that `frame` is in."""
    while frame is not None:
        if frame.f_code is _REGION or frame.f_code is _ENTRY:
            return frame
        frame = frame.f_back
    return None


def _handle_outside(own: FrameType) -> None:
    """Handles what came, unless the marked call `own` lies within another one."""
    if _is_main() and _region(own.f_back) is None:
        _handle(own.f_back)


def _handle(frame: FrameType | None) -> None:
    try:
        number, handler = _came.popitem()
        handler.before(number, frame)
    finally:
        if _came:  # the others do not get lost if it raises
            _handle(frame)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


_REGION = uninterrupted(_is_main).__code__
_ENTRY = uninterrupted_entry(_is_main).__code__
