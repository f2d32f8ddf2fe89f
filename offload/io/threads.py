"""preadv and pwritev on a few threads: works everywhere, and saturates one drive."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from offload.errors import TierIOError
from offload.io.engine import IOEngine, IOFile, IOFuture, open_file, require_aligned
from offload.sizes import MIB, PAGE_BYTES

THREADS = 4
REQUEST_BYTES = 4 * MIB
"""Larger transfers are split, so that one of them already keeps the drive's queue filled."""

Transfer = Callable[[int, list[memoryview], int], int]


class ThreadEngine(IOEngine):
    """One pool for reads and writes, first come, first served."""

    name = "threads"

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="offload-io")
        self._files: list[IOFile] = []

    def open(self, path: str) -> IOFile:
        file = open_file(path)
        self._files.append(file)
        return file

    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("read", os.preadv, file, offset, buffer)

    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("write", os.pwritev, file, offset, buffer)

    def sync(self, file: IOFile) -> IOFuture:
        def run() -> int:
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                raise TierIOError("sync", error.errno or errno.EIO, file.path, 0, 0) from error
            return 0

        return self._pool.submit(run)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for file in self._files:
            file.close()

    def _submit(self, name: str, transfer: Transfer, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        require_aligned(offset, buffer)
        whole: IOFuture = IOFuture()
        whole.set_running_or_notify_cancel()
        starts = range(0, len(buffer), REQUEST_BYTES) or range(1)
        join = _Join(whole, len(starts), len(buffer))
        for start in starts:
            part = buffer[start : start + REQUEST_BYTES]
            self._pool.submit(_run, name, transfer, file, offset + start, part).add_done_callback(join.part_done)
        return whole


class _Join:
    """Resolves a future when the last of its parts is done, with the first error if there was one."""

    def __init__(self, whole: IOFuture, parts: int, length: int) -> None:
        self._whole = whole
        self._left = parts
        self._length = length
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def part_done(self, part: IOFuture) -> None:
        with self._lock:
            self._error = self._error or part.exception()
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            self._whole.set_result(self._length)
        else:
            self._whole.set_exception(self._error)


def _run(name: str, transfer: Transfer, file: IOFile, offset: int, buffer: memoryview) -> int:
    """Transfers all of `buffer`, continuing after short transfers."""
    done = 0
    while done < len(buffer):
        try:
            count = transfer(file.fd, [buffer[done:]], offset + done)
        except OSError as error:
            code = error.errno or errno.EIO
            raise TierIOError(name, code, file.path, offset + done, len(buffer) - done) from error
        if count == 0:
            detail = "the file ends before the range does" if name == "read" else "nothing was written"
            raise TierIOError(name, errno.EIO, file.path, offset + done, len(buffer) - done, detail)
        done += count
        if file.direct and done < len(buffer) and done % PAGE_BYTES:
            # O_DIRECT cannot continue in the middle of a block: go back to the last whole one.
            done -= done % PAGE_BYTES
            if count < PAGE_BYTES:
                detail = f"cut short after {count} bytes"
                raise TierIOError(name, errno.EIO, file.path, offset + done, len(buffer) - done, detail)
    return done
