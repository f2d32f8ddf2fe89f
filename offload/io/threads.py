"""preadv and pwritev on a few threads: works everywhere, and saturates one drive."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from offload.errors import ClosedError
from offload.interrupts import uninterrupted
from offload.io.engine import DEPTH, REQUEST_BYTES, QueuedEngine, Refused, Request
from offload.native.threads import end_threads, start_threads

P = ParamSpec("P")
R = TypeVar("R")
_Call = tuple[Future[Any] | None, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Workers(Executor):
    """An executor on a few threads. One that is forgotten ends its threads when its calls are done.

    Args:
        count: how many threads.
        name: the beginning of their names.

    Raises:
        BudgetError: if the system refuses threads.
    """

    @uninterrupted
    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        start_threads(self._threads, self._calls)
        self._end = weakref.finalize(self, end_threads, self._calls, self._threads, os.getpid())

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls `fn` in one of the threads.

        Raises:
            ClosedError: after `shutdown`, and when Python has ended the threads.
        """
        future: Future[R] = Future()
        self.put(future, fn, *args, **kwargs)
        return future

    def put(self, future: Future[R] | None, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls `fn` in one of the threads, for a future that the caller has made.

        If this raises, `fn` may still be called, unless the caller cancels the future.

        Args:
            future: gets the result; None: nobody waits, and `fn` raises nothing.
            fn: the function.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Raises:
            ClosedError: after `shutdown`, and when Python has ended the threads.
        """
        if self._is_closed or not self._end.alive:
            raise ClosedError("the threads for this have ended: close the optimizer before Python ends")
        self._calls.put((future, fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True
        if cancel_futures:
            try:
                while (call := self._calls.get_nowait()) is not None:
                    if call[0] is not None:
                        call[0].cancel()
            except Empty:
                pass
        if wait:
            self._end()
        elif self._end.detach() is not None:
            for _ in self._threads:
                self._calls.put(None)


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, args, kwargs = call
        if future is None:
            function(*args, **kwargs)
        elif future.set_running_or_notify_cancel():
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
                del error
            else:
                future.set_result(result)
                del result
        # What it holds has to go when its caller lets it go.
        del call, future, function, args, kwargs


class ThreadEngine(QueuedEngine):
    """An engine that uses one thread for each request under way."""

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
        self._ended(request, move(request))

    def _stop(self) -> None:
        self._pool.shutdown(wait=True)


def move(request: Request) -> int:
    """Moves the bytes of a request, and returns how many, or -errno."""
    try:
        if request.operation == "read":
            return os.preadv(request.file.fd, [request.view], request.offset)
        if request.operation == "write":
            return os.pwritev(request.file.fd, [request.view], request.offset)
        os.fdatasync(request.file.fd)
        return 0
    except OSError as error:
        return -(error.errno or errno.EIO)
    except MemoryError:
        return -errno.ENOMEM
