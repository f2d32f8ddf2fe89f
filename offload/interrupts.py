"""Critical sections: `@uninterrupted` defers a signal (Ctrl-C) until the call it arrives in has ended.

[Note: interrupts]
A signal handler written in Python runs between two instructions of the main thread, whatever that is doing. Most
handlers raise: KeyboardInterrupt on Ctrl-C, SystemExit on SIGTERM, a timeout on SIGALRM. A lock acquired a moment
before would never be released; a chunk leased a moment before could never be used again.

So a `Handler` is installed in front of the user's. It looks at the stack for a call of a function that is marked
`uninterrupted`. If there is one, the handler only notes the signal, and the outermost such call passes it to the
user's handler when it ends. (A counter of such calls could stay too high after an exception; the stack is always
right.)

A handler may be installed at any time: before a step, in a forward, by another handler. So each marked call begins with
a look at the handlers of all signals, and puts one in front of those that are new. As long as none is, that is one
comparison of lists. Only the main thread can install handlers. So inside a marked call only a user's handler, or a
function of the user that is called there, can install another one; after a user's handler we look again.

- Only the main thread handles signals. In other threads the mark does nothing.
- A function that waits inside such a call handles signals where nothing is half changed: `let_in`, `wait_until`,
  `result_of`.
- `__enter__` of a context manager is marked `uninterrupted_entry`: an exception at its end would leave it entered for
  ever. So is `__del__`, where Python drops what is raised. A signal that came meanwhile is handled at the end of the
  next marked call.
- What torch calls while it looks at arguments is marked `uninterrupted_lookup`: torch drops an exception from there, or
  takes it for a bug of its own. It is called with each operation, so this mark costs nothing. A signal that came
  meanwhile is handled as for `__enter__`.
- A handler that the user installs later replaces ours, until the next marked call puts another one in front of it.
  A user who restores what `signal.signal` returned restores ours, which passes signals on to the one before it.
- Optimizers `hold()` the handlers. When the last has given them back, the users' own are installed again.
- Nothing can defer an exception that another thread raises here (PyThreadState_SetAsyncExc), nor RecursionError. These
  are rare, and are dealt with where they can do harm: locks are acquired by `with` on the lock itself, which CPython
  does in one instruction, and a store whose bookkeeping was left half done raises InterruptedStepError from then on.
- A TimeoutError is an OSError, also if a handler raised it. Whoever tells the user of an error of the disk asks
  `is_of_system` before. What a handler raised has the handler in its traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal looks for an enum first, which takes 4 us
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LET_IN_S = 0.1
"""The longest that a signal waits while a marked call waits for something else."""
_NUMBERS = tuple(sorted(map(int, signal.valid_signals())))
_getsignal = _signal.getsignal

_seen: list[object] = []
"""The handlers of `_NUMBERS`, in front of all of which ours are. Only the main thread changes it."""
_came: dict[int, Handler] = {}
"""Signals to be handled at the end of a call. Only the main thread changes it."""
_lookups: list[CodeType] = []
_holders = 0
_counting = threading.Lock()


class Handler:
    """Stands in front of a signal's handler `before`; see [Note: interrupts]."""

    __slots__ = ("before",)

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _region(frame) is None and not _is_looked_up(frame):
            self.pass_on(number, frame)
        else:
            _came[number] = self

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Calls the user's handler."""
        try:
            self.before(number, frame)
        finally:
            _install()  # it may have installed others


_NOT_TO_REPLACE = (Handler, int, type(None))
"""Types of handlers: ours; SIG_DFL and SIG_IGN; one installed from C."""


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Defers a signal that arrives during a call of `function` until the outermost marked call ends."""
    return _marked(function, handles=True)


def uninterrupted_entry(function: Callable[P, R]) -> Callable[P, R]:
    """As `uninterrupted`, for `__enter__` and `__del__`. The signal is handled at the end of the next marked call."""
    return _marked(function, handles=False)


def uninterrupted_lookup(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a property that torch asks for while it looks at arguments; see [Note: interrupts]."""
    _lookups.append(function.__code__)
    return function


def _marked(function: Callable[P, R], *, handles: bool) -> Callable[P, R]:
    @functools.wraps(function)
    def region(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if list(map(_getsignal, _NUMBERS)) != _seen:
                _install()
            return function(*args, **kwargs)
        finally:
            # The last instruction at which the interpreter looks for signals lies before this line.
            if _came and handles:
                _handle_outside(sys._getframe())

    return region


def let_in() -> None:
    """Handles deferred signals now. Does nothing inside another marked call: something may be half changed there."""
    if _came:
        call = _region(sys._getframe())
        if call is not None:
            _handle_outside(call)


def wait_until(
    lock: threading.RLock,
    changed: threading.Condition,
    done: Callable[[], bool],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Waits in a marked call until `done()`.

    Args:
        lock: held while `done` is called; the lock of `changed`.
        changed: notified when `done()` may have become true.
        done: whether the wait is over.
        meanwhile: called now and then without the lock.
    """
    while True:
        with lock:
            if done():
                return
            changed.wait(LET_IN_S)
        let_in()
        meanwhile()


@uninterrupted
def wait_for_all(futures: Iterable[Future[Any]]) -> None:
    """Waits until all futures are done, successful or not.

    An interrupt in `Future.result` or `concurrent.futures.wait` could leave a future locked, and the thread that
    resolves it would hang.
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
    """As `future.result()`, but waits as `wait_for_all` does."""
    wait_for_all([future])
    return future.result()


def hold() -> None:
    """Installs handlers, which stay until `give_back` has been called as often as this."""
    global _holders
    with _counting:
        _holders += 1
    _install()


def give_back() -> None:
    """Installs the users' handlers again, if no other optimizer holds ours."""
    global _holders
    with _counting:
        _holders -= 1
        is_last = _holders == 0
    if is_last and _is_main():
        for number in _NUMBERS:
            handler = _getsignal(number)
            if isinstance(handler, Handler):
                signal.signal(number, handler.before)


def is_of_system(error: BaseException) -> bool:
    """Whether the operating system refused something. An OSError that a signal's handler raised does not count."""
    if not isinstance(error, OSError) or error.errno is None:
        return False
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _PASS_ON:
            return False
        trace = trace.tb_next
    return True


def _install() -> None:
    """Puts a handler of ours in front of each one that is the user's."""
    global _seen
    if _is_main():
        for number in _NUMBERS:
            before = _getsignal(number)
            if before.__class__ not in _NOT_TO_REPLACE:
                signal.signal(number, Handler(before))
        _seen = list(map(_getsignal, _NUMBERS))


def _region(frame: FrameType | None) -> FrameType | None:
    """The innermost marked call that `frame` is in."""
    while frame is not None:
        if frame.f_code is _REGION:
            return frame
        frame = frame.f_back
    return None


def _is_looked_up(frame: FrameType | None) -> bool:
    """Whether `frame` is in a call that is marked `uninterrupted_lookup`."""
    while frame is not None:
        if any(frame.f_code is code for code in _lookups):
            return True
        frame = frame.f_back
    return False


def _handle_outside(call: FrameType) -> None:
    """Handles deferred signals, unless the marked call `call` is inside another one."""
    if _is_main() and _region(call.f_back) is None:
        _handle(call.f_back)


def _handle(frame: FrameType | None) -> None:
    try:
        number, handler = _came.popitem()
        handler.pass_on(number, frame)
    finally:
        if _came:  # the other signals are not lost if it raises
            _handle(frame)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


_REGION: CodeType = uninterrupted(_is_main).__code__
_PASS_ON: CodeType = Handler.pass_on.__code__
