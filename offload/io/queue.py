"""What every engine does before and after its own way of moving bytes: splitting, joining, sharing, counting.

A transfer is cut into requests of bounded size, so that one of them already fills the drive's queue, and contiguous
small ones are put together into one request. Each file has two queues, for reading and for writing; the one that was
served fewer bytes goes first, and no more than `depth` requests are under way. A request that ends short is continued
from its last whole page.
"""

from __future__ import annotations

import errno
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

from offload.errors import TierIOError
from offload.interrupts import uninterrupted, wait_until
from offload.io.engine import IOEngine, IOFile, IOFuture, open_file, require_aligned
from offload.sizes import MIB, PAGE_BYTES

REQUEST_BYTES = 4 * MIB
DEPTH = 8
Operation = Literal["read", "write", "sync"]


class Transfer:
    """What one call of `read` or `write` asked for: resolves when the last of its pieces is done.

    Args: length: bytes; result: of the future, None: all of them.
    """

    def __init__(self, length: int, result: int | None = None) -> None:
        self.future: IOFuture = IOFuture()
        self.future.set_running_or_notify_cancel()
        self._result = length if result is None else result
        self._left = length
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def piece_done(self, length: int, error: BaseException | None = None) -> None:
        """`length` bytes are not under way any more."""
        with self._lock:
            self._error = self._error or error
            self._left -= length
            if self._left:
                return
        if self._error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._error)


@dataclass
class Piece:
    """A part of a transfer, of at most a request's size. is_over: it has been counted as not under way."""

    view: memoryview
    transfer: Transfer
    is_over: bool = False

    def end(self, error: BaseException | None = None) -> None:
        """It is not under way any more. Once for each piece, whoever calls it again."""
        if not self.is_over:
            self.is_over = True
            self.transfer.piece_done(self.counts, error)

    @property
    def counts(self) -> int:
        """Of a sync, which moves nothing, 1."""
        return max(len(self.view), 1)


@dataclass(eq=False)
class Request:
    """Pieces that lie one after another in the file, from `offset`; what an engine starts."""

    operation: Operation
    file: IOFile
    offset: int
    pieces: list[Piece]

    @property
    def length(self) -> int:
        return sum(len(piece.view) for piece in self.pieces)

    @property
    def views(self) -> list[memoryview]:
        return [piece.view for piece in self.pieces]

    def after(self, count: int) -> Request | None:
        """Resolves what the first `count` bytes (whole pages) finish; returns what is left."""
        over: list[Piece] = []
        left: list[Piece] = []
        for piece in self.pieces:
            done = min(count, len(piece.view))
            count -= done
            if done == len(piece.view):
                over.append(piece)
            elif done:
                # Both counted anew: nothing of it has been, and what is made here may fail.
                over.append(Piece(piece.view[:done], piece.transfer))
                left.append(Piece(piece.view[done:], piece.transfer))
            else:
                left.append(piece)
        rest = Request(self.operation, self.file, self.offset + sum(len(piece.view) for piece in over), left)
        self.pieces = over + left
        for piece in over:
            piece.end()
        return rest if left else None

    def fail(self, code: int, detail: str = "", cause: BaseException | None = None) -> None:
        """Resolves every piece that is under way with an error that says where it lies."""
        offset = self.offset
        for piece in self.pieces:
            error = TierIOError(self.operation, code, self.file.path, offset, len(piece.view), detail)
            error.__cause__ = cause
            piece.end(error)
            offset += len(piece.view)

    def abandon(self, error: BaseException) -> None:
        """Resolves what is under way with `error`, which was none of the disk."""
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None) or errno.EIO
        self.fail(code, f"{error!r}", error)


Refused = tuple[Request, BaseException]
"""What an engine could not start, and why."""


@dataclass
class Drive:
    """The requests of one file."""

    reads: deque[Request] = field(default_factory=deque)
    writes: deque[Request] = field(default_factory=deque)
    served: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    under_way: int = 0

    @property
    def idle(self) -> bool:
        return not (self.under_way or self.reads or self.writes)

    def take(self, depth: int, request_bytes: int, most_views: int) -> list[Request]:
        """The requests to start now."""
        taken: list[Request] = []
        while self.under_way < depth and (self.reads or self.writes):
            if not (self.reads and self.writes):
                # Nobody to share with: past service gives nobody a claim.
                self.served = {"read": 0, "write": 0}
            reads_first = self.served["read"] <= self.served["write"]
            queue = self.reads if self.reads and (reads_first or not self.writes) else self.writes
            request = queue.popleft()
            _join(request, queue, request_bytes, most_views)
            self.served[request.operation] += request.length
            self.under_way += 1
            taken.append(request)
        return taken


def _join(request: Request, queue: deque[Request], request_bytes: int, most_views: int) -> None:
    """Takes requests that follow in the file from the head of the queue into `request`."""
    length = request.length
    while queue and len(request.pieces) < most_views:
        following = queue[0]
        if following.offset != request.offset + length or length + following.length > request_bytes:
            return
        request.pieces += queue.popleft().pieces
        length = request.length


class QueuedEngine(IOEngine):
    """An engine that only has to start requests; see the top of this file.

    Args: request_bytes: the most a request moves, whole pages; depth: requests under way a file.
    """

    most_views = 64
    """Buffers a joined request: far below the 1024 that preadv takes."""

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        self._request_bytes = request_bytes
        self._depth = depth
        self._drives: WeakKeyDictionary[IOFile, Drive] = WeakKeyDictionary()
        self._files: list[IOFile] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _start(self, requests: list[Request]) -> Sequence[Refused] | None:
        """Starts them; calls `_ended` for each, from any thread but not from within this call.

        Returns: what could not be started, for which it is not called, and why. Raises nothing.
        """

    def _stop(self) -> None:
        """Ends the engine's own threads; nothing is under way any more."""

    def open(self, path: str, *, dir_fd: int | None = None) -> IOFile:
        return self.adopt(open_file(path, dir_fd=dir_fd))

    def adopt(self, file: IOFile) -> IOFile:
        """Uses a file that was opened elsewhere, and closes it in the end."""
        with self._lock:
            self._files.append(file)
            self._drives[file] = Drive()
        return file

    def read(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("read", file, offset, buffer)

    def write(self, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        return self._submit("write", file, offset, buffer)

    # What was counted as under way and never started would be waited for forever: so what follows is not parted.

    @uninterrupted
    def sync(self, file: IOFile) -> IOFuture:
        transfer = Transfer(1, result=0)
        request = Request("sync", file, 0, [Piece(memoryview(b""), transfer)])
        with self._lock:
            self._drives[file].under_way += 1
        self._begin([request])
        return transfer.future

    def close(self) -> None:
        self._wait_until_idle()
        self._stop()
        for file in self._files:
            file.close()

    @uninterrupted
    def _wait_until_idle(self) -> None:
        """Waits until nothing is under way."""
        wait_until(self._lock, self._changed, lambda: all(drive.idle for drive in self._drives.values()))

    @uninterrupted
    def _submit(self, operation: Operation, file: IOFile, offset: int, buffer: memoryview) -> IOFuture:
        require_aligned(offset, buffer)
        transfer = Transfer(len(buffer))
        if not len(buffer):
            transfer.piece_done(0)
            return transfer.future
        requests = []
        for start in range(0, len(buffer), self._request_bytes):
            piece = Piece(buffer[start : start + self._request_bytes], transfer)
            requests.append(Request(operation, file, offset + start, [piece]))
        with self._lock:
            drive = self._drives[file]
            (drive.reads if operation == "read" else drive.writes).extend(requests)
            requests = drive.take(self._depth, self._request_bytes, self.most_views)
        self._begin(requests)
        return transfer.future

    def _begin(self, requests: list[Request]) -> None:
        """Starts them, which are counted as under way."""
        if requests:
            self._refuse(self._start(requests))

    def _refuse(self, refused: Sequence[Refused] | None) -> None:
        """Ends what could not be started, and starts what comes next."""
        while refused:
            requests = []
            for request, error in refused:
                request.abandon(error)
                requests += self._over(request, None)
            refused = self._start(requests) if requests else None

    def _ended(self, request: Request, result: int) -> None:
        """A request is not under way any more, whatever goes wrong here. Args: result: bytes moved, or -errno."""
        rest = None
        try:
            rest = _rest_of(request, result)
        except BaseException as error:
            request.abandon(error)  # nobody may wait for it forever
        self._begin(self._over(request, rest))

    def _over(self, request: Request, rest: Request | None) -> list[Request]:
        """Counts a request as ended. Args: rest: of it, to be asked for again. Returns: what to start now."""
        with self._lock:
            drive = self._drives[request.file]
            drive.under_way -= 1
            if rest is not None:
                (drive.reads if rest.operation == "read" else drive.writes).appendleft(rest)
            requests = drive.take(self._depth, self._request_bytes, self.most_views)
            self._changed.notify_all()
        return requests


def _rest_of(request: Request, result: int) -> Request | None:
    """Resolves what has ended of a request; returns what has to be asked for again."""
    if result < 0:
        request.fail(-result)
        return None
    if request.operation == "sync":
        request.pieces[0].end()
        return None
    # O_DIRECT cannot go on in the middle of a page.
    whole_pages = result // PAGE_BYTES * PAGE_BYTES
    rest = request.after(whole_pages)
    if rest is not None and not whole_pages:
        detail = "the file ends before the range does" if request.operation == "read" else "nothing was written"
        rest.fail(errno.EIO, detail if not result else f"cut short after {result} bytes")
        return None
    return rest
