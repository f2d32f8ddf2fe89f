"""Memory that nobody should read: what takes the place of a streamed parameter's while it is elsewhere.

Where something gets at a released parameter below Python (a C++ extension, functorch), address 0 would end the process
and zeros would be a wrong number without a word. Here it reads NaN in every floating dtype, and a write raises.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import UntypedStorage

from offload.torch_private import throw_on_mutable_data_ptr

_PIECE = 2 << 20
_MOST_PIECES = 4096
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_region: Any = None


def poison(nbytes: int) -> UntypedStorage:
    """A storage of `nbytes` bytes of 0xFF, which takes a few megabytes of memory for all of them together; an empty
    one where the system cannot do that."""
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
    """The same few pages again and again, read-only. They stay until the process ends: tensors may lie there."""
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
