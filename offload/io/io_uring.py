"""io_uring: a batch of requests is one system call, and one thread sleeps until some have completed."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from offload import native
from offload.errors import ClosedError
from offload.interrupts import uninterrupted
from offload.io.engine import DEPTH, REQUEST_BYTES, QueuedEngine, Refused, Request, address_of
from offload.io.threads import move
from offload.native.threads import start_threads, wait_for_threads
from offload.sizes import GIB

READ, WRITE, FDATASYNC, NOP = 0, 1, 2, 3
"""`Submission.op` (kernels/uring.h)."""

Completion = tuple[int, int]
"""(user_data, result): the result is the bytes transferred, or -errno."""

RSRC_TAGS = 1 << 10
"""IORING_FEAT_RSRC_TAGS: Linux 5.13 and later; see `Ring.register_buffers`."""

_SUBMISSION = struct.Struct("=IiiIQQQ")
_COMPLETION = struct.Struct("=Qq")
_MOST_COMPLETIONS = 256  # handed out by one wait(); the rest by the next

_HINTS = {
    errno.ENOSYS: "this kernel, or this build of offload, has no io_uring",
    errno.EPERM: "the sysctl kernel.io_uring_disabled or a seccomp filter forbids io_uring",
    errno.ENOMEM: "no memory for a ring: before Linux 5.12 it counts against RLIMIT_MEMLOCK (ulimit -l)",
    errno.EMFILE: "too many open files (ulimit -n)",
}


class Submission(NamedTuple):
    """One operation of the ring.

    Attributes:
        op: READ, WRITE, FDATASYNC or NOP.
        fd: the file's descriptor.
        buffer_index: the index of the memory in the list given to `register_buffers`; -1: it was not registered.
        length: in bytes, below 4 GiB.
        address: of the memory.
        offset: in the file, in bytes.
        user_data: 64 bits that come back with the completion.
    """

    op: int
    fd: int = -1
    buffer_index: int = -1
    length: int = 0
    address: int = 0
    offset: int = 0
    user_data: int = 0


class Ring:
    """A ring of io_uring. Who submits keeps the memory alive and unmoved until its completion is there.

    In a forked child every call raises ClosedError: the ring is its parent's.

    The kernel may hold a file up to 20 ms longer than its last completion, as was seen after syncs. So a flock ends for
    certain only with LOCK_UN, not with the close of the descriptor.

    Args:
        entries: how many requests one `submit` has to take.
        without: features of this kernel (IORING_FEAT_*) to do without, as on an older one.

    Attributes:
        entries: how many requests one `submit` may take; twice as many may be under way.

    Raises:
        OSError: if there is no io_uring here; its errno says why, see `is_available`.
    """

    def __init__(self, entries: int, *, without: int = 0) -> None:
        self._handle = 0  # what __del__ looks at, also after an error below
        self._library = _library()
        handle = ctypes.c_void_p()
        _require(self._library.offload_ring_open(entries, without, ctypes.byref(handle)))
        self._handle = handle.value or 0
        _OPEN.add(self)
        self.entries: int = self._library.offload_ring_entries(self._handle)
        # Written by the one thread that waits.
        self._completions = ctypes.create_string_buffer(_MOST_COMPLETIONS * _COMPLETION.size)
        self._view = memoryview(self._completions)
        self._handed_out = 0

    def register_buffers(self, buffers: Sequence[memoryview | tuple[int, int]]) -> bool:
        """Pins writable memory, in place of what was registered before.

        If the system refuses, nothing is registered and everything works without an index. It refuses beyond
        RLIMIT_MEMLOCK, for one. Before Linux 5.13 this does not ask it: the call would wait for the thread that is in
        `wait`.

        Args:
            buffers: each a buffer, or a pair (address, length in bytes). `Submission.buffer_index` is an index into
                this list.

        Returns:
            Whether they are registered.

        Raises:
            ValueError: for a buffer of more than 1 GiB, the kernel's limit.
        """
        spans = [
            (address_of(buffer), buffer.nbytes) if isinstance(buffer, memoryview) else buffer for buffer in buffers
        ]
        if any(length > GIB for _, length in spans):
            raise ValueError("a registered buffer has at most 1 GiB: register a larger one in parts")
        longs = ctypes.c_uint64 * len(spans)
        addresses, lengths = (longs(*column) for column in zip(*spans, strict=True)) if spans else (longs(), longs())
        status: int = self._library.offload_ring_register_buffers(self._handle, addresses, lengths, len(spans))
        if status in (-errno.EBADF, -errno.ECHILD):
            self._check(status)
        if status < 0:
            _log.info("io_uring goes on without registered buffers: %s", os.strerror(-status))
        return status >= 0

    def submit(self, batch: Sequence[Submission]) -> int:
        """Starts the first requests of `batch` with one system call.

        What the kernel refuses of a single request comes back as its completion.

        Returns:
            How many were started. There are fewer than all when the ring is full; submit the rest after a completion.
            There are none only while something is under way.

        Raises:
            ValueError: for an unknown operation or a number out of range.
            OSError: if nothing can be started and nothing is under way.
        """
        try:
            packed = b"".join([_SUBMISSION.pack(*entry) for entry in batch])
        except struct.error as error:
            raise ValueError(f"a request has a field that is out of range: {error}") from None
        taken: int = self._library.offload_ring_submit(self._handle, packed, len(batch))
        if taken == -errno.EINVAL:
            raise ValueError("a request has an unknown operation")
        return self._check(taken)

    def wait(self) -> list[Completion]:
        """Sleeps until there is a completion.

        If this raises after the kernel has handed out completions (MemoryError, for one), the next call returns them.

        Returns:
            All completions that are there, at least one.

        Raises:
            OSError: EBUSY if another thread is in this method.
        """
        while not self._handed_out:
            count: int = self._library.offload_ring_wait(self._handle, self._completions, _MOST_COMPLETIONS)
            # Back in Python, a signal that came first has been handled, and Ctrl-C has raised.
            if count != -errno.EINTR:
                self._handed_out = self._check(count)
        completions = _unpacked(self._view[: self._handed_out * _COMPLETION.size])
        self._handed_out = 0
        return completions

    def close(self) -> None:
        """Frees the descriptor, the mappings and the registered buffers. May be called again.

        Raises:
            OSError: EBUSY while a thread waits or anything is under way. Nothing is changed then: a transfer would go
                on into memory that its owner believes to be free.
        """
        if self._handle:
            _require(self._library.offload_ring_close(self._handle))

    def __del__(self) -> None:
        # Not in close(): a thread that comes late finds the ring closed, not its memory gone. What is busy is leaked.
        if self._handle and self._library.offload_ring_close(self._handle) == 0:
            self._library.offload_ring_free(self._handle)

    def _check(self, status: int) -> int:
        if status == -errno.EBADF:
            raise ClosedError("the ring is closed: open another one")
        if status == -errno.ECHILD:
            raise ClosedError("a forked child has no part in its parent's ring: open one in the child")
        return _require(status)


_OPEN: weakref.WeakSet[Ring] = weakref.WeakSet()


def _leave_in_child() -> None:
    # A child's copy of the descriptor would keep the ring, its files and their locks alive.
    for ring in list(_OPEN):
        ring.close()


os.register_at_fork(after_in_child=_leave_in_child)


@uninterrupted
def is_available() -> tuple[bool, str]:
    """Whether a ring opens and answers here; if not, a sentence says why."""
    try:
        ring = Ring(1)
        try:
            ring.submit([Submission(NOP)])
            ring.wait()
        finally:
            ring.close()
    except OSError as error:  # also where a ring opens, and a filter of system calls lets nothing into it
        code = error.errno or 0
        return False, f"{_HINTS.get(code, 'io_uring cannot be used')} ({errno.errorcode.get(code, code)})"
    return True, "io_uring works"


@functools.cache
def _library() -> ctypes.CDLL:
    library, reason = native.open_library()
    if library is None:
        raise OSError(errno.ENOSYS, f"no io_uring: {reason}")
    try:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        library.offload_ring_open.argtypes = (ctypes.c_uint, ctypes.c_uint, pointer)
        library.offload_ring_close.argtypes = (pointer,)
        library.offload_ring_free.argtypes = (pointer,)
        library.offload_ring_entries.argtypes = (pointer,)
        library.offload_ring_register_buffers.argtypes = (pointer, pointer, pointer, number)
        library.offload_ring_submit.argtypes = (pointer, ctypes.c_char_p, number)
        library.offload_ring_wait.argtypes = (pointer, pointer, number)
    except AttributeError as error:
        raise OSError(errno.ENOSYS, f"this build of offload has no io_uring: {error}") from error
    return library


def _unpacked(completions: memoryview) -> list[Completion]:
    return list(_COMPLETION.iter_unpack(completions))


def _require(status: int) -> int:
    if status < 0:
        raise OSError(-status, f"io_uring: {os.strerror(-status)}")
    return status


ENTRIES = 256
_OPERATIONS = {"read": READ, "write": WRITE, "sync": FDATASYNC}
_OF_THE_RING = (errno.EINTR, errno.EAGAIN, errno.ECANCELED, errno.EFAULT)
"""Errors that say nothing of the file. The thread that submitted was sent a signal (EINTR: a request cannot be begun
again as a call can); the request could have waited (EAGAIN, seen with SCSI); or the thread has ended, and with it its
part in what has not begun, or waits for the page cache (ECANCELED, EFAULT)."""
RETRY_S = 0.01
_STOP = 0
_log = logging.getLogger("offload")

UnderWay = dict[int, tuple[Request, "UringEngine"]]
"""By token. Holds the engine as well: it lives as long as something is under way."""


class UringEngine(QueuedEngine):
    """An engine on a ring of io_uring; see the top of this file.

    Raises:
        OSError: if io_uring cannot be used here; its errno says why.
    """

    name = "uring"

    @uninterrupted
    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        super().__init__(request_bytes, depth)
        self._ring = Ring(ENTRIES)
        self._tokens = itertools.count(_STOP + 1)
        self._under_way: UnderWay = {}
        self._registered = (0, 0)
        self._waiting: deque[Request] = deque()
        self._room = threading.Lock()
        self._reaper = threading.Thread(
            target=_reap, args=(self._ring, self._under_way), name="offload-uring", daemon=True
        )
        try:
            start_threads([self._reaper])
        except BaseException:
            self._ring.close()
            raise
        # Also at exit: a thread that ends while the interpreter does can take it down.
        self._end = weakref.finalize(self, _stop_reaping, self._ring, self._reaper, os.getpid())

    def register(self, memory: memoryview) -> None:
        base, size = address_of(memory), len(memory)
        spans = [(base + start, min(GIB, size - start)) for start in range(0, size, GIB)]
        if self._ring.register_buffers(spans):
            self._registered = (base, size)

    def _start(self, requests: list[Request]) -> Sequence[Refused]:
        with self._room:
            self._waiting.extend(requests)
            return self._submit_waiting()

    def _submit_waiting(self) -> Sequence[Refused]:
        """Submits the requests that the ring has room for. A completion makes room for the rest.

        The caller holds `_room`.

        Returns:
            The requests that could not be started, and why.
        """
        while self._waiting:
            batch = list(itertools.islice(self._waiting, ENTRIES))
            tokens = list(itertools.islice(self._tokens, len(batch)))
            self._under_way.update(zip(tokens, ((request, self) for request in batch), strict=True))
            started = 0
            try:
                if not self._end.alive:
                    raise ClosedError("io_uring has ended with Python: close the optimizer before")
                started = self._ring.submit(list(map(self._packed, tokens, batch)))
            except Exception as error:
                refused = [(request, error) for request in self._waiting]
                self._waiting.clear()
                return refused
            finally:
                for token in tokens[started:]:
                    del self._under_way[token]
            for _ in range(started):
                self._waiting.popleft()
            # With nothing under way no completion would come.
            if started < len(batch) and self._under_way:
                break
        return []

    def _ended(self, request: Request, result: int | Exception) -> None:
        if isinstance(result, int) and -result in _OF_THE_RING:
            # It has ended, so it can be done anew. A plain call says what of it the system really refuses.
            result = move(request)
        super()._ended(request, result)
        if self._waiting:
            with self._room:
                refused = self._submit_waiting()
            self._refuse(refused)

    def _packed(self, token: int, request: Request) -> Submission:
        address, length = request.transfer.address + request.start, request.length
        operation = _OPERATIONS[request.operation]
        span = self._span(address, length)
        return Submission(operation, request.file.fd, span, length, address, request.offset, token)

    def _span(self, address: int, length: int) -> int:
        """The index of the registered buffer that holds the range, or -1."""
        base, size = self._registered
        first, last = address - base, address + length - 1 - base
        inside = bool(length) and first >= 0 and last < size
        return first // GIB if inside and first // GIB == last // GIB else -1

    def _stop(self) -> None:
        self._end()


def _reap(ring: Ring, under_way: UnderWay) -> None:
    """Runs in the thread that hands on completions.

    It refers to no engine but those of requests under way, so an engine that is forgotten ends this thread.

    Nothing but the end of the ring ends it, since a completion that is not handed on would be waited for forever. A
    script may exit without close() while reads are under way; the ring ends after them.
    """
    is_last = False
    while True:
        try:
            completions = ring.wait()
        except ClosedError:
            return
        except Exception as error:  # no memory for a list, say: the ring keeps what it has handed out
            _log.warning("io_uring: %r while waiting for completions; trying again", error)
            time.sleep(RETRY_S)
            continue
        for token, result in completions:
            if token == _STOP:
                is_last = True
                continue
            try:
                request, engine = under_way.pop(token)
                engine._ended(request, result)
                del request, engine
            except Exception:  # _ended has resolved what it could
                _log.exception("io_uring: a completion could not be handed on")
        if is_last and not under_way:
            try:
                ring.close()
                return
            except OSError as error:
                # A request that began before the end was known: its completion is still to come.
                if error.errno != errno.EBUSY:
                    raise


@uninterrupted
def _stop_reaping(ring: Ring, reaper: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return
    while not ring.submit([Submission(NOP, user_data=_STOP)]):
        time.sleep(RETRY_S)  # the ring is full: a completion will make room
    wait_for_threads([reaper])
