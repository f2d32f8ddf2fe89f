"""aiofiles: seek, read and write through the page cache, on any operating system and file system.

The slowest engine, and the one that asks least: no O_DIRECT, no preadv. An event loop on one thread awaits the
requests; each one has a file handle of its own, since seeking and moving are two calls.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import aiofiles
import aiofiles.os

from offload.errors import ClosedError
from offload.interrupts import uninterrupted
from offload.io.engine import DEPTH, REQUEST_BYTES, IOFile, QueuedEngine, Refused, Request, open_file, reopened
from offload.io.threads import Workers
from offload.native.threads import start_threads, wait_for_threads

_fsync = aiofiles.os.wrap(os.fsync)


class PortableEngine(QueuedEngine):
    """An engine on aiofiles; see the top of this file."""

    name = "portable"

    @uninterrupted
    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        super().__init__(request_bytes, depth)
        self._loop = asyncio.new_event_loop()
        # Handles are files of their own, also to a forked child, which closes them.
        self._opened: list[IOFile] = []
        self._handles: WeakKeyDictionary[IOFile, list[Any]] = WeakKeyDictionary()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._opened), name="offload-portable", daemon=True
        )
        with ExitStack() as undo:
            undo.callback(self._loop.close)
            self._workers = Workers(depth, "offload-portable-io")
            undo.callback(self._workers.shutdown)
            start_threads([self._thread])
            undo.pop_all()
        # The thread does not hold the engine: one that is forgotten ends it, too.
        self._end = weakref.finalize(self, _stop_serving, self._loop, self._thread, os.getpid())

    def open(self, path: str, *, dir_fd: int | None = None, is_new: bool = False) -> IOFile:
        return self.adopt(open_file(path, dir_fd=dir_fd, buffered=True, is_new=is_new))

    def _start(self, requests: list[Request]) -> Sequence[Refused]:
        refused = []
        for request in requests:
            coroutine = self._run(request)
            try:
                if not self._end.alive:
                    raise ClosedError("the portable I/O has ended with Python: close the optimizer before")
                asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except Exception as error:
                coroutine.close()
                refused.append((request, error))
        return refused

    async def _run(self, request: Request) -> None:
        result: int | Exception
        try:
            result = await self._move(request)
        except Exception as error:
            result = error  # whatever it was, the transfer has ended: nobody may wait for it forever
        self._ended(request, result)

    async def _move(self, request: Request) -> int:
        """Moves the bytes of a request, and returns how many."""
        if request.operation == "sync":
            await _fsync(request.file.fd, executor=self._workers)
            return 0
        handles = self._handles.setdefault(request.file, [])
        handle = handles.pop() if handles else await self._another(request.file)
        try:
            await handle.seek(request.offset)
            return int(await (handle.readinto if request.operation == "read" else handle.write)(request.view))
        finally:
            handles.append(handle)

    async def _another(self, file: IOFile) -> Any:
        handle = reopened(file)
        self._opened.append(handle)
        return await aiofiles.open(handle.fd, "r+b", buffering=0, closefd=False, executor=self._workers)

    def _stop(self) -> None:
        self._end()
        self._workers.shutdown()


def _serve(loop: asyncio.AbstractEventLoop, opened: list[IOFile]) -> None:
    """Runs in the engine's thread.

    A script may exit without close() while reads are under way. They end before the loop does.
    """
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        loop.run_until_complete(task)
    loop.close()
    for file in opened:
        file.close()


@uninterrupted
def _stop_serving(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return
    loop.call_soon_threadsafe(loop.stop)
    wait_for_threads([thread])
