"""preadv and pwritev on a few threads: works everywhere, and saturates one drive."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future

from offload.io.queue import DEPTH, REQUEST_BYTES, QueuedEngine, Refused, Request
from offload.io.workers import Workers


class ThreadEngine(QueuedEngine):
    """A thread a request under way."""

    name = "threads"

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        super().__init__(request_bytes, depth)
        self._pool = Workers(depth, "offload-io")

    def _start(self, requests: list[Request]) -> Sequence[Refused]:
        refused = []
        for request in requests:
            future: Future[None] = Future()
            try:
                self._pool.put(future, self._run, request)
            except BaseException as error:
                if future.cancel():
                    refused.append((request, error))
        return refused

    def _run(self, request: Request) -> None:
        self._ended(request, _move(request))

    def _stop(self) -> None:
        self._pool.shutdown(wait=True)


def _move(request: Request) -> int:
    """Bytes moved, or -errno."""
    try:
        if request.operation == "read":
            return os.preadv(request.file.fd, request.views, request.offset)
        if request.operation == "write":
            return os.pwritev(request.file.fd, request.views, request.offset)
        os.fdatasync(request.file.fd)
        return 0
    except OSError as error:
        return -(error.errno or errno.EIO)
    except MemoryError:
        return -errno.ENOMEM
