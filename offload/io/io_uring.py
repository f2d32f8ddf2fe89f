"""io_uring: a batch of requests is one system call, and one thread sleeps until some have completed."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import numpy

from offload.errors import ClosedError
from offload.io import ring
from offload.io.queue import DEPTH, REQUEST_BYTES, QueuedEngine, Refused, Request
from offload.io.ring import Ring
from offload.sizes import GIB

ENTRIES = 256
_OPERATIONS = {"read": ring.READ, "write": ring.WRITE, "sync": ring.FDATASYNC}
RETRY_S = 0.01
_STOP = 0
_log = logging.getLogger("offload")

UnderWay = dict[int, tuple[Request, "UringEngine"]]
"""By token. Holds the engine as well: it lives as long as something is under way."""


class UringEngine(QueuedEngine):
    """See the top of this file. Raises: OSError with the errno that says why io_uring cannot be used here."""

    name = "uring"
    most_views = 1
    """One buffer a request: requests of a batch that follow one another are merged by the kernel."""

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        super().__init__(request_bytes, depth)
        self._ring = Ring(ENTRIES)
        self._tokens = itertools.count(_STOP + 1)
        self._under_way: UnderWay = {}
        self._registered = (0, 0)
        self._in_ring = 0
        self._waiting: deque[Request] = deque()
        self._room = threading.Lock()
        self._reaper = threading.Thread(
            target=_reap, args=(self._ring, self._under_way), name="offload-uring", daemon=True
        )
        self._reaper.start()
        # Also at exit: a thread that ends while the interpreter does can take it down.
        self._end = weakref.finalize(self, _stop_reaping, self._ring, self._reaper, os.getpid())

    def register(self, memory: memoryview) -> None:
        base, size = _address(memory), len(memory)
        spans = [(base + start, min(GIB, size - start)) for start in range(0, size, GIB)]
        if self._ring.register_buffers(spans):
            self._registered = (base, size)

    def _start(self, requests: list[Request]) -> Sequence[Refused]:
        with self._room:
            self._waiting.extend(requests)
        return self._submit_waiting()

    def _submit_waiting(self) -> Sequence[Refused]:
        """Submits what the ring has room for. What it does not take waits for a completion."""
        while True:
            with self._room:
                count = min(ENTRIES - self._in_ring, len(self._waiting))
                batch = [self._waiting.popleft() for _ in range(count)]
                self._in_ring += count
            tokens = list(itertools.islice(self._tokens, count))
            error: BaseException | None = None
            try:
                self._under_way.update(zip(tokens, ((request, self) for request in batch), strict=True))
                packed = [self._packed(token, request) for token, request in zip(tokens, batch, strict=True)]
                started = self._ring.submit(packed) if packed and self._reaper.is_alive() else 0
                if packed and not self._reaper.is_alive():
                    error = ClosedError("io_uring has ended with Python: close the optimizer before")
            except Exception as raised:
                started, error = 0, raised
            left = batch[started:]
            for token in tokens[started:]:
                self._under_way.pop(token, None)
            with self._room:
                self._in_ring -= len(left)
                if error is None:
                    self._waiting.extendleft(reversed(left))
                # A completion that came before they were put back has not seen them.
                is_done = error is not None or not self._waiting or self._in_ring > 0
            if is_done:
                return [] if error is None else [(request, error) for request in left]

    def _ended(self, request: Request, result: int) -> None:
        with self._room:
            self._in_ring -= 1
        super()._ended(request, result)
        if self._waiting:
            self._refuse(self._submit_waiting())

    def _packed(self, token: int, request: Request) -> tuple[int, int, int, int, int, int, int, int]:
        view = request.pieces[0].view
        address = _address(view) if len(view) else 0
        operation = _OPERATIONS[request.operation]
        return (
            operation,
            request.file.fd,
            -1,
            self._span(address, len(view)),
            address,
            len(view),
            request.offset,
            token,
        )

    def _span(self, address: int, length: int) -> int:
        """The registered span that holds the range, or -1."""
        base, size = self._registered
        first, last = address - base, address + length - 1 - base
        inside = bool(length) and first >= 0 and last < size
        return first // GIB if inside and first // GIB == last // GIB else -1

    def _stop(self) -> None:
        self._end()


def _address(view: memoryview) -> int:
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


def _reap(own: Ring, under_way: UnderWay) -> None:
    """The reaper's life. It holds no engine but those of requests under way, so a forgotten engine ends it.

    Nothing but the end of the ring ends it: what it did not hand on would be waited for forever.
    """
    while True:
        try:
            completions = own.wait()
        except ClosedError:
            return
        except Exception as error:  # no memory for a list, say: the ring keeps what it has handed out
            _log.warning("io_uring: %r while waiting for completions; trying again", error)
            time.sleep(RETRY_S)
            continue
        for token, result in completions:
            if token == _STOP:
                own.close()
                return
            try:
                request, engine = under_way.pop(token)
                engine._ended(request, result)
                del request, engine
            except Exception:  # _ended has resolved what it could
                _log.exception("io_uring: a completion could not be handed on")


def _stop_reaping(own: Ring, reaper: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return
    own.submit([ring.Request(ring.NOP, user_data=_STOP)])
    if threading.current_thread() is not reaper:
        reaper.join()
