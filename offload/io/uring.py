"""io_uring: a batch of requests is one system call, and one thread sleeps until some have completed."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from collections import deque

import numpy

from offload import ring
from offload.io.queue import DEPTH, REQUEST_BYTES, QueuedEngine, Request
from offload.ring import Ring
from offload.sizes import GIB

ENTRIES = 256
_OPERATIONS = {"read": ring.READ, "write": ring.WRITE, "sync": ring.FDATASYNC}
_STOP = 0

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

    def _start(self, requests: list[Request]) -> None:
        with self._room:
            self._waiting.extend(requests)
            count = min(ENTRIES - self._in_ring, len(self._waiting))
            self._in_ring += count
            batch = [self._packed(self._waiting.popleft()) for _ in range(count)]
        # As many as the ring has room for: it takes all of them, and nobody has to wait here.
        try:
            started = self._ring.submit(batch) if batch else 0
            code = errno.EAGAIN
        except OSError as error:
            started, code = 0, error.errno or errno.EIO
        if started < len(batch):
            self._refuse([token for *_, token in batch[started:]], code)

    def _ended(self, request: Request, result: int) -> None:
        with self._room:
            self._in_ring -= 1
            waiting = bool(self._waiting)
        super()._ended(request, result)
        if waiting:
            self._start([])

    def _packed(self, request: Request) -> tuple[int, int, int, int, int, int, int, int]:
        token = next(self._tokens)
        self._under_way[token] = (request, self)
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

    def _refuse(self, tokens: list[int], code: int) -> None:
        refused = [self._under_way.pop(token)[0] for token in tokens]

        def end() -> None:
            for request in refused:
                self._ended(request, -code)

        # Not from within `_start`, which is what `_ended` may call next.
        threading.Thread(target=end, name="offload-uring-refused").start()

    def _stop(self) -> None:
        self._end()


def _address(view: memoryview) -> int:
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


def _reap(own: Ring, under_way: UnderWay) -> None:
    """The reaper's life. It holds no engine but those of requests under way, so a forgotten engine ends it."""
    while True:
        for token, result in own.wait():
            if token == _STOP:
                own.close()
                return
            request, engine = under_way.pop(token)
            engine._ended(request, result)
            del request, engine


def _stop_reaping(own: Ring, reaper: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return
    own.submit([ring.Request(ring.NOP, user_data=_STOP)])
    if threading.current_thread() is not reaper:
        reaper.join()
