"""aiofiles: seek, read and write through the page cache, on any operating system and file system.

The slowest engine, and the one that asks least: no O_DIRECT, no preadv. An event loop on one thread awaits the
requests; each one has a file handle of its own, since seeking and moving are two calls.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

import aiofiles
import aiofiles.os

from offload.io.engine import IOFile, open_file, reopened
from offload.io.queue import DEPTH, REQUEST_BYTES, QueuedEngine, Request

_fsync = aiofiles.os.wrap(os.fsync)


class PortableEngine(QueuedEngine):
    """See the top of this file."""

    name = "portable"

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        super().__init__(request_bytes, depth)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="offload-portable", daemon=True)
        self._thread.start()
        self._handles: WeakKeyDictionary[IOFile, list[Any]] = WeakKeyDictionary()
        # Handles are files of their own, also to a forked child, which closes them.
        self._opened: list[IOFile] = []

    def open(self, path: str, *, dir_fd: int | None = None) -> IOFile:
        return self.adopt(open_file(path, dir_fd=dir_fd, buffered=True))

    def _start(self, requests: list[Request]) -> None:
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._run(request), self._loop)

    async def _run(self, request: Request) -> None:
        try:
            result = await self._move(request)
        except Exception as error:
            # Whatever it was, the transfer has ended: nobody may wait for it forever.
            result = -(getattr(error, "errno", None) or errno.EIO)
        self._ended(request, result)

    async def _move(self, request: Request) -> int:
        """Bytes moved."""
        if request.operation == "sync":
            await _fsync(request.file.fd)
            return 0
        handles = self._handles.setdefault(request.file, [])
        handle = handles.pop() if handles else await self._another(request.file)
        try:
            await handle.seek(request.offset)
            moved = 0
            for view in request.views:
                count = await (handle.readinto(view) if request.operation == "read" else handle.write(view))
                moved += count
                if count < len(view):
                    break
            return moved
        finally:
            handles.append(handle)

    async def _another(self, file: IOFile) -> Any:
        own = reopened(file)
        self._opened.append(own)
        return await aiofiles.open(own.fd, "r+b", buffering=0, closefd=False)

    def _stop(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for own in self._opened:
            own.close()
