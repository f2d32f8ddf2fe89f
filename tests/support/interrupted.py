"""Interrupts at a chosen instruction of the package, and the standard library's context managers and locks it uses.

Signals come before any instruction at all. What another thread throws in comes where CPython looks for it, where a
function or a loop begins anew and after a call, and in the package only, but for where transfers are started: neither
the locks of the standard library's futures nor what is on its way to the kernel can be helped.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import offload

FILES = (str(Path(offload.__file__).parent), *(str(module.__file__) for module in (contextlib, threading)))


def interrupt() -> None:
    """Ctrl-C, as the terminal sends it."""
    signal.raise_signal(signal.SIGINT)


def thrown_in() -> None:
    """What another thread throws in, which nothing can put off."""
    raise KeyboardInterrupt


@contextmanager
def interrupted_at(instruction: int, by: Callable[[], None] = interrupt) -> Iterator[list[int]]:
    """Calls `by` before this thread's so-manieth instruction in FILES; yields how many are left to go, in a list."""
    left = [instruction]
    last: dict[FrameType, str] = {}

    def is_place(frame: FrameType) -> bool:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        before, last[frame] = last.get(frame, ""), name
        return by is interrupt or before.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD")

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(FILES if by is interrupt else FILES[0]) or (by is not interrupt and "/io/" in name):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and is_place(frame):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                by()
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(trace)
        yield left
    finally:
        sys.settrace(before)
        last.clear()  # or what the frames hold would stay alive
        signal.signal(signal.SIGINT, handler)
