"""What torch 2.11 cannot do by a function of its own, done with what it has.

`torch.distributed.new_group` sorts the ranks that it is given; from 2.12 on it can be told not to (`in_this_order`).

A streamed parameter's storage keeps its identity and its views while its memory comes and goes. From 2.12 on
`UntypedStorage._swap_data_ptr_` exchanges the memory of two storages. In 2.11 nothing does that Python can call. There
the fields of the two C++ objects are exchanged where they lie, which is what that function does: `std::swap` of fields
that may be moved as bytes.

[Note: fields of a storage]
`c10::StorageImpl` of 2.11 (c10/core/StorageImpl.h) has behind its table of virtual functions and its reference count,
in bytes:

    16  data, the function that frees it, and that function's argument
    40  device: type and index, one byte each, and six of padding
    48  nbytes
    56  seven flags: nbytes is symbolic; resizable; received from another process; access is checked;
        writing raises; reading raises; writing warns
    64  allocator

No patch release of 2.11 can move them: extensions that were compiled for one have these offsets in their code. 2.12
has the same, and from 2.13 on they lie elsewhere. `has_known_fields` looks at storages whose values are known before
anything is written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch
from torch import UntypedStorage

_FIELDS = 16
_WORDS = ctypes.c_uint64 * 7
_FORMAT = "=QQQbb6xq7BxQ"
_FLAGS = 56
_Flags = ctypes.c_uint8 * 7
_CHECKED, _WRITING_RAISES, _READING_RAISES, _WRITING_WARNS = 3, 4, 5, 6


class _Placed(int):
    """A rank that sorts by its place in a list.

    Attributes:
        place: its index there.
    """

    place: int

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def in_this_order(ranks: Sequence[int]) -> list[int]:
    """The ranks as numbers that stay in their order where they are sorted."""
    placed = [_Placed(rank) for rank in ranks]
    for place, rank in enumerate(placed):
        rank.place = place
    return list(placed)


def exchange_memory(storage: UntypedStorage, other: UntypedStorage) -> None:
    """Exchanges the memory of two storages, and what goes with it, as `UntypedStorage._swap_data_ptr_` does."""
    ours, theirs = (_WORDS.from_address(one._cdata + _FIELDS) for one in (storage, other))
    ours[:], theirs[:] = list(theirs), list(ours)


def allow_data_access(storage: int) -> None:
    """Undoes `torch_private.forbid_data_access`.

    Args:
        storage: its `_cdata`.
    """
    flags = _Flags.from_address(storage + _FLAGS)
    if flags[_READING_RAISES]:
        flags[_READING_RAISES] = 0
        flags[_CHECKED] = flags[_WRITING_RAISES] | flags[_WRITING_WARNS]


def has_known_fields(forbid: Callable[[int, str], None] | None) -> bool:
    """Whether storages of the installed torch have their fields where this file writes to them.

    Args:
        forbid: makes reading a storage raise, see `torch_private.forbid_data_access`; None: torch cannot.
    """
    memory = bytearray(7)
    for tensor in (torch.empty(11, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8)):
        storage = tensor.untyped_storage()
        resizable = storage.resizable()
        data, _, _, *fields, allocator = _fields(storage)
        if data != storage.data_ptr() or resizable != bool(allocator):
            return False
        if fields != [0, -1, storage.nbytes(), 0, int(resizable), 0, 0, 0, 0, 0]:  # device cpu, which has no index
            return False
        if forbid is not None:
            forbid(storage._cdata, "")
            if list(_fields(storage)[-8:-1]) != [0, int(resizable), 0, 1, 0, 1, 0]:
                return False
    return True


def _fields(storage: UntypedStorage) -> tuple[int, ...]:
    return struct.unpack(_FORMAT, bytes(_WORDS.from_address(storage._cdata + _FIELDS)))
