"""Ctrl-C comes between any two operations of the main thread: what must not stay half done is done before it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Deferred:
    """A signal that arrives inside is handled at the end: `with Deferred(signal.SIGINT): ...`.

    Only handlers written in Python can raise, and only in the main thread; elsewhere this does nothing.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._came = False

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(self._number) if is_main else None
        if callable(self._handler):
            signal.signal(self._number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._handler):
            signal.signal(self._number, self._handler)
            if self._came:
                signal.raise_signal(self._number)
