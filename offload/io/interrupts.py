"""Ctrl-C comes between any two operations of the main thread: what must not stay half done is done before it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

LET_IN_S = 0.1
"""How long an interrupt may have to wait for whoever waits for something else."""


class Deferred:
    """A signal that arrives inside is handled at the end: `with Deferred(signal.SIGINT): ...`.

    Only handlers written in Python can raise, and only in the main thread; elsewhere this does nothing. Of nested ones
    the outermost decides.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._came = False

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(self._number) if is_main else None
        is_deferred = getattr(handler, "__func__", None) is Deferred._note
        self._handler = handler if callable(handler) and not is_deferred else None
        if self._handler is not None:
            signal.signal(self._number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(self._number, self._handler)
            if self._came:
                signal.raise_signal(self._number)


class Held:
    """A lock, held with interrupts deferred: `with Held(lock): ...`.

    With the lock alone one could come when it has been taken and nobody knows yet, and it would never be free again.
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._deferred = Deferred(signal.SIGINT), Deferred(signal.SIGTERM)

    def __enter__(self) -> None:
        interrupt, end = self._deferred
        interrupt.__enter__()
        try:
            end.__enter__()
        except BaseException:
            interrupt.__exit__(None, None, None)
            raise
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt, end = self._deferred
        self._lock.release()
        try:
            end.__exit__(kind, error, trace)
        finally:
            interrupt.__exit__(kind, error, trace)


def wait_until(changed: threading.Condition, done: Callable[[], bool]) -> None:
    """Waits until `done()`, which is called with `changed` held and interrupts deferred; in between they are let in."""
    while True:
        with Held(changed):
            if done():
                return
            changed.wait(LET_IN_S)
