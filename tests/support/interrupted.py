"""Interrupts at a chosen instruction of the package, and the standard library's context managers and locks it uses.

Both come where CPython looks for them: where a function or a loop begins anew, and at the end of a call. An exception
at the end of a call belongs to it: it meets the handlers around the call. Python's tracing knows only the instruction
after it, so a place counts only where that one has the same handlers (it has not after the last call in a `with`).
What another thread throws in comes in the package only, but for where transfers are started: neither the locks of the
standard library's futures nor what is on its way to the kernel can be helped.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import offload

FILES = (str(Path(offload.__file__).parent), *(str(module.__file__) for module in (contextlib, threading)))


def interrupt() -> None:
    """Ctrl-C, as the terminal sends it."""
    signal.raise_signal(signal.SIGINT)


def by_signal(number: signal.Signals) -> Callable[[], None]:
    """What sends a signal to this process. Whoever uses it has installed a handler."""
    return lambda: signal.raise_signal(number)


def thrown_in() -> None:
    """What another thread throws in, which nothing can put off."""
    raise KeyboardInterrupt


def timeout_thrown_in() -> None:
    """The same with what is an OSError, too."""
    raise TimeoutError("thrown in")


NOT_DEFERRED = (thrown_in, timeout_thrown_in)


@cache
def _handlers(code: CodeType) -> dict[int, int]:
    """Where an exception at an instruction goes, by offset."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {at: entry.target for entry in entries for at in range(entry.start, entry.end, 2)}


@cache
def _places(code: CodeType) -> dict[tuple[int, int], bool]:
    """Which pairs of an instruction and the one that ran before it are places, of those that were seen."""
    return {}


def _is_place(code: CodeType, before: int, now: int) -> bool:
    """Args: before: -1: this is the first one."""
    if dis.opname[code.co_code[now]] in ("RESUME", "JUMP_BACKWARD"):
        return True
    if before < 0 or not dis.opname[code.co_code[before]].startswith("CALL"):
        return False
    return _handlers(code).get(before) == _handlers(code).get(now)


@cache
def _has_function(code: CodeType) -> bool:
    return "function" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _drops_errors(frame: FrameType) -> bool:
    """Whether Python itself drops what is raised here: in `__del__`, and in what is called by it or wraps it."""
    wrapped: FrameType | None = frame
    while wrapped is not None:
        if wrapped.f_code.co_name == "__del__":
            return True
        # Looking at the locals copies them all.
        if _has_function(wrapped.f_code) and getattr(wrapped.f_locals.get("function"), "__name__", "") == "__del__":
            return True
        wrapped = wrapped.f_back
    return False


@contextmanager
def interrupted_at(instruction: int, by: Callable[[], None] = interrupt) -> Iterator[list[int]]:
    """Calls `by` before this thread's so-manieth instruction in FILES; yields how many are left to go, in a list."""
    is_deferred = by not in NOT_DEFERRED
    left = [instruction]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(FILES if is_deferred else FILES[0]) or ("/io/" in name and not is_deferred):
            return None
        if _drops_errors(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return inside(frame.f_code)

    def inside(code: CodeType) -> Any:
        """Of a call: what a test takes is for the most part this, for each instruction."""
        places, before = _places(code), -1

        def trace_instruction(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "opcode":
                pair = before, frame.f_lasti
                before = frame.f_lasti
                if pair not in places:
                    places[pair] = _is_place(code, *pair)
                if places[pair]:
                    left[0] -= 1
                    if left[0] == 0:
                        sys.settrace(None)
                        by()
            return trace_instruction

        return trace_instruction

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions if one frame asked before settrace()
    try:
        sys.settrace(trace)
        yield left
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
