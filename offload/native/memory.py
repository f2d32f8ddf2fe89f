"""Memory of this process, below torch: huge pages, blocks that malloc gives back, and a region that reads NaN.

The region stands in for the memory of a streamed parameter while that is released. Something that reads a released
parameter below Python (a C++ extension, functorch) would end the process at address 0, and would silently read wrong
numbers from zeros. Here every floating dtype reads NaN, and a write raises.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from offload.sizes import PAGE_BYTES
from offload.torch_private import throw_on_mutable_data_ptr

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


LARGE_BYTES = 4 << 20
"""Of a block that goes back to the system when it is freed. Smaller ones, many activations and what a backward makes of
them, are used again: memory from the system is cleared page by page."""
_HELD_BYTES = 64 << 20
"""What may lie free at the end of the heap: as much as glibc chooses itself where nothing is set."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def return_large_blocks() -> None:
    """Makes malloc of this process map blocks of LARGE_BYTES and more one by one, so that freed ones are given back.

    glibc does so only until the first of them is freed. Then it cuts large blocks from its heap; small blocks that live
    longer leave gaps between them that are too short for the next large one. This does nothing where there is no such
    option, or where the environment has set it.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
            # Setting the one fixes the other too, at 128 KiB.
            mallopt(_M_TRIM_THRESHOLD, _HELD_BYTES)


def return_freed() -> None:
    """Gives whole pages that malloc of this process keeps free back to the system, wherever in its heap they lie.

    It is for when large blocks were freed that will not be asked for again. No option of malloc changes: what training
    allocates and frees again and again, such as gradients, is still cut from the heap, and its pages are cleared once.
    This does nothing where there is no such function.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))


def discard(values: Tensor) -> None:
    """Gives the whole pages behind a dense CPU tensor back to the system, before the tensor is freed.

    Then it reads zeros, or anything. Its memory has to be malloc's, and must belong to this tensor alone.
    """
    if not sys.platform.startswith("linux"):
        return
    start = -(-values.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (values.data_ptr() + values.numel() * values.element_size()) // PAGE_BYTES * PAGE_BYTES
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def advise_huge_pages(memory: Tensor) -> None:
    """Asks the kernel for huge pages behind a CPU tensor that was just allocated.

    Its first touch is then several times faster. Where there are no huge pages, nothing changes.
    """
    size = memory.numel() * memory.element_size()
    if size < 2 * _HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (memory.data_ptr() + size) // _HUGE_PAGE * _HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def populate(memory: Tensor) -> bool:
    """Puts pages behind a page-aligned CPU tensor without writing to it.

    What is in the tensor stays, and so does what others write to it meanwhile.

    Returns:
        Whether the kernel could do that (from Linux 5.14 on).
    """
    if not sys.platform.startswith("linux"):
        return False
    size = ctypes.c_size_t(memory.numel() * memory.element_size())
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), size, _MADV_POPULATE_WRITE) == 0)


def immortalise(thing: object) -> None:
    """Keeps an object until the process ends, also past the end of Python: its destructor is never called."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_PIECE = 2 << 20
_MOST_PIECES = 4096
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_region: Any = None


def poison(nbytes: int) -> UntypedStorage:
    """A storage of `nbytes` bytes of 0xFF. All of them together take a few megabytes of memory.

    It is empty where the system cannot do that.
    """
    global _region
    if _region is None or ctypes.sizeof(_region) < nbytes:
        made = _map(nbytes)
        if made is None:
            return UntypedStorage(0)
        _region = made
    tensor = torch.frombuffer(_region, dtype=torch.uint8, count=nbytes)
    throw_on_mutable_data_ptr(tensor)
    return tensor.untyped_storage()


def _map(nbytes: int) -> Any:
    """Maps the same few pages again and again, read-only.

    They stay until the process ends, since tensors may lie there.
    """
    if not hasattr(os, "memfd_create"):
        return None
    size = -(-nbytes // _PIECE) * _PIECE
    piece = -(-size // (_MOST_PIECES * _PIECE)) * _PIECE
    size = -(-size // piece) * piece
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    failed = ctypes.c_void_p(-1).value
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = libc.mmap(None, size, 0, anonymous, -1, 0)
    if start == failed:
        return None
    file = os.memfd_create("offload-poison")
    try:
        os.write(file, b"\xff" * piece)
        for offset in range(0, size, piece):
            if libc.mmap(start + offset, piece, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0) == failed:
                return None
    finally:
        os.close(file)
    return (ctypes.c_char * size).from_address(start)
