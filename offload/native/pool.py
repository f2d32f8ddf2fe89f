"""Threads of the C library, which share a kernel's range and never ask for Python's lock: kernels/pool.h says why."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Any

from offload.errors import BudgetError
from offload.interrupts import uninterrupted

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


def declare(library: ctypes.CDLL) -> None:
    """Says what the pool's functions take: pool.h.

    Raises:
        AttributeError: if one is missing.
    """
    library.offload_pool_open.argtypes = (ctypes.c_int, _POINTER)
    library.offload_pool_run.argtypes = (*[_POINTER] * 6, *[_NUMBER] * 4)
    library.offload_pool_run.restype = None
    for function in (library.offload_pool_close, library.offload_pool_free):
        function.argtypes, function.restype = (_POINTER,), None


class LibraryWork:
    """A kernel of the C library, bound to its tensors and scalars.

    Attributes:
        address: of the C function.
        pointers: the addresses of the tensors, as a C array.
        types: the numbers of their element types, as a C array.
        scalars: a reference to the structure, or None.
    """

    __slots__ = ("_function", "address", "pointers", "scalars", "types")

    def __init__(self, function: Any, address: int, pointers: bytes, types: bytes, scalars: object) -> None:
        self._function = function
        self.address, self.pointers, self.types, self.scalars = address, pointers, types, scalars

    def __call__(self, low: int, high: int) -> None:
        """Runs it on the positions low .. high."""
        self._function(self.pointers, self.types, low, high - low, self.scalars)


Piecewise = tuple[LibraryWork, int, int, int]
"""A kernel, the range of positions that it is to be run on, and a number of positions: a thread takes those between two
of its multiples at once."""


class LibraryPool:
    """Persistent threads of the C library.

    They end with this object, when the calls that are queued by then have ended.

    Args:
        library: the C library.
        workers: how many threads.

    Raises:
        BudgetError: if the system refuses them.
    """

    @uninterrupted
    def __init__(self, library: ctypes.CDLL, workers: int) -> None:
        self.pid = os.getpid()
        self._library = library
        self._handle = ctypes.c_void_p()
        error = library.offload_pool_open(workers, ctypes.byref(self._handle))
        if error:
            raise BudgetError(
                f"the system refuses {workers} threads for kernels ({os.strerror(-error)}): raise the limit of "
                "processes (ulimit -u, or pids.max of the cgroup) or of address space (ulimit -v), or give a smaller "
                "Tuning(threads=...)",
                needed=workers,
                available=0,
                option="threads",
            )
        self.stop = weakref.finalize(self, _close, library, self._handle, self.pid)

    @uninterrupted
    def run(self, calls: Iterable[Piecewise]) -> None:
        """Runs all of `calls`, here and in the threads. One is drawn here while the one before it runs.

        Whatever this raises, no thread uses what a call was given any more.
        """
        group = ctypes.c_int64()  # pool.h: struct offload_group
        given: list[LibraryWork] = []  # the threads read what is in there
        thrown: BaseException | None = None
        try:
            for work, low, high, piece in calls:
                given.append(work)
                self._run(group, work.address, work.pointers, work.types, work.scalars, low, high, piece, 1)
        finally:
            while group.value:
                try:
                    self._run(group, None, None, None, None, 0, 0, 0, 0)
                except BaseException as raised:  # another thread threw it in here
                    thrown = thrown or raised
        if thrown is not None:
            raise thrown

    def _run(self, group: ctypes.c_int64, *call_and_most: object) -> None:
        self._library.offload_pool_run(self._handle, ctypes.byref(group), *call_and_most)

    def __del__(self) -> None:
        # No handle: the constructor failed. In a forked child a thread that is not there may hold the lock.
        if self._handle and self.pid == os.getpid():
            self.stop()
            self._library.offload_pool_free(self._handle)


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, pid: int) -> None:
    if pid == os.getpid():
        library.offload_pool_close(handle)
