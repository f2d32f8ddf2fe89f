"""io_uring (Linux), as a batch of requests in and a list of completions out: the binding of kernels/uring.c.

`io/uring.py` builds an engine on it. Any thread may submit and register; one at a time waits. ctypes drops the GIL
for each call, so a waiting thread stops no other.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from offload import native
from offload.errors import ClosedError
from offload.sizes import GIB

READ, WRITE, FDATASYNC, NOP = 0, 1, 2, 3
"""`Request.op` (kernels/uring.h)."""

Completion = tuple[int, int]
"""(user_data, result): the result is the bytes transferred, or -errno."""

RSRC_TAGS = 1 << 10
"""IORING_FEAT_RSRC_TAGS: Linux 5.13 and later; see `Ring.register_buffers`."""

_REQUEST = struct.Struct("=IiiiQQQQ")
_COMPLETION = struct.Struct("=Qq")
_MOST_COMPLETIONS = 256  # handed out by one wait(); the rest by the next

_HINTS = {
    errno.ENOSYS: "this kernel, or this build of offload, has no io_uring",
    errno.EPERM: "the sysctl kernel.io_uring_disabled or a seccomp filter forbids io_uring",
    errno.ENOMEM: "no memory for a ring: before Linux 5.12 it counts against RLIMIT_MEMLOCK (ulimit -l)",
    errno.EMFILE: "too many open files (ulimit -n)",
}

_logger = logging.getLogger("offload")


class Request(NamedTuple):
    """One operation. A plain tuple of the same fields does too, and is made faster.

    Attributes: op (READ, WRITE, FDATASYNC, NOP); fd, not looked at with a file_slot; file_slot (`register_file`) or
    -1; buffer_index (place in the list given to `register_buffers`) or -1; address and length of the memory, bytes;
    offset in the file; user_data, 64 bits that come back with the completion.
    """

    op: int
    fd: int = -1
    file_slot: int = -1
    buffer_index: int = -1
    address: int = 0
    length: int = 0
    offset: int = 0
    user_data: int = 0


class Ring:
    """A ring of io_uring. Who submits keeps the memory alive and unmoved until the completion is there.

    A forked child has no part in it: there, every call raises ClosedError.
    The kernel may hold a file a moment longer than its last completion (after a sync: up to 20 ms were seen), so a
    flock ends for certain with LOCK_UN, not with the close of the descriptor.

    Args: entries: how many requests one `submit` has to take; without: features of this kernel (IORING_FEAT_*) to do
    without, as on an older one.
    Attributes: entries (how many requests one `submit` may take; twice as many may be under way).
    Raises: OSError with the errno that says why there is no io_uring here; see `is_available`.
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
        """Pins writable memory, given as such or as (address, length in bytes), in place of what was registered
        before; `Request.buffer_index` counts from 0 in this list. False where the system refuses (RLIMIT_MEMLOCK, for
        one), or is older than Linux 5.13, where it would wait for the thread that is in `wait`: then nothing is
        registered, and everything works without an index.

        Raises: ValueError for a buffer of more than 1 GiB, the kernel's limit.
        """
        spans = [_span(buffer) if isinstance(buffer, memoryview) else buffer for buffer in buffers]
        if any(length > GIB for _, length in spans):
            raise ValueError("a registered buffer has at most 1 GiB: register a larger one in parts")
        longs = ctypes.c_uint64 * len(spans)
        addresses, lengths = (longs(*column) for column in zip(*spans, strict=True)) if spans else (longs(), longs())
        status = self._library.offload_ring_register_buffers(self._handle, addresses, lengths, len(spans))
        return self._done(status, "buffers")

    def register_file(self, fd: int) -> int | None:
        """A slot that stands for the open file, or None where there is no room for one. The ring then holds the file:
        its flock ends only after `unregister_file` or `close` as well."""
        slot: int = self._library.offload_ring_register_file(self._handle, fd)
        return slot if self._done(slot, "a file") else None

    def unregister_file(self, slot: int) -> None:
        """Raises: OSError for a slot that is not taken."""
        self._check(self._library.offload_ring_unregister_file(self._handle, slot))

    def submit(self, batch: Sequence[Request | tuple[int, int, int, int, int, int, int, int]]) -> int:
        """Starts the first requests of `batch` with one system call: returns how many. Fewer than all when the ring
        is full (0 only while something is under way): submit the rest after a completion.

        What the kernel refuses of a single request comes back as its completion.
        Raises: ValueError for an unknown operation or a number out of range, OSError when nothing can be started and
        nothing is under way.
        """
        try:
            packed = b"".join([_REQUEST.pack(*request) for request in batch])
        except struct.error as error:
            raise ValueError(f"a request has a field that is out of range: {error}") from None
        taken: int = self._library.offload_ring_submit(self._handle, packed, len(batch))
        if taken == -errno.EINVAL:
            raise ValueError("a request has an unknown operation, or 4 GiB or more")
        return self._check(taken)

    def wait(self) -> list[Completion]:
        """Sleeps until there is a completion; returns those there are, at least one.

        What is raised once the kernel has handed some out, MemoryError for one, loses none: the next call returns them.
        Raises: OSError(EBUSY) when another thread is in it.
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
        """Frees descriptor, mappings, registered buffers and files. May be called again.

        Raises: OSError(EBUSY) while a thread waits or anything is under way, and changes nothing then: a transfer
        would go on into memory that its owner believes to be free.
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

    def _done(self, status: int, what: str) -> bool:
        if status in (-errno.EBADF, -errno.ECHILD):
            self._check(status)
        if status < 0:
            _logger.info("io_uring goes on without registering %s: %s", what, os.strerror(-status))
        return status >= 0


_OPEN: weakref.WeakSet[Ring] = weakref.WeakSet()


def _leave_in_child() -> None:
    # A child's copy of the descriptor would keep the ring, its files and their locks alive.
    for ring in list(_OPEN):
        ring.close()


os.register_at_fork(after_in_child=_leave_in_child)


def is_available() -> tuple[bool, str]:
    """Whether a ring opens and answers here, and if not, why, in a sentence."""
    try:
        ring = Ring(1)
    except OSError as error:
        code = error.errno or 0
        return False, f"{_HINTS.get(code, 'io_uring cannot be used')} ({errno.errorcode.get(code, code)})"
    try:
        ring.submit([Request(NOP)])
        ring.wait()
    finally:
        ring.close()
    return True, "io_uring works"


@functools.cache
def _library() -> ctypes.CDLL:
    path = native.library_path()
    if path is None:
        raise OSError(errno.ENOSYS, f"no io_uring: {native.fallback_reason()}")
    try:
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        library.offload_ring_open.argtypes = (ctypes.c_uint, ctypes.c_uint, pointer)
        library.offload_ring_close.argtypes = (pointer,)
        library.offload_ring_free.argtypes = (pointer,)
        library.offload_ring_entries.argtypes = (pointer,)
        library.offload_ring_register_buffers.argtypes = (pointer, pointer, pointer, number)
        library.offload_ring_register_file.argtypes = (pointer, number)
        library.offload_ring_unregister_file.argtypes = (pointer, number)
        library.offload_ring_submit.argtypes = (pointer, ctypes.c_char_p, number)
        library.offload_ring_wait.argtypes = (pointer, pointer, number)
    except (OSError, AttributeError) as error:
        raise OSError(errno.ENOSYS, f"{path} has no io_uring: {error}") from error
    return library


def _unpacked(completions: memoryview) -> list[Completion]:
    return list(_COMPLETION.iter_unpack(completions))


def _require(status: int) -> int:
    if status < 0:
        raise OSError(-status, f"io_uring: {os.strerror(-status)}")
    return status


def _span(buffer: memoryview) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
