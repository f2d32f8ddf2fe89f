"""The safetensors format, written as a stream: u64 length of the header, the header (JSON), then the data.

Reading is the `safetensors` package's, which needs a whole tensor in RAM to write one; this does not.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.checkpoint.manifest import canonical

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in the format."""

MAX_HEADER_BYTES = 100_000_000
"""The most bytes of a header: readers refuse more."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: its name in the file.
        dtype: its dtype.
        shape: its shape.
        pieces: gives its bytes, piece by piece, row-major.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with the wider dtypes first. The format has no gaps, and readers map the file."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def header(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """Everything before the data.

    Raises:
        ValueError: the format lacks a dtype, a name is taken, or there are too many names.
    """
    known: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for entry in entries:
        if entry.dtype not in DTYPES or entry.name in known:
            raise ValueError(f"{entry.name!r}, {entry.dtype}: the name is taken, or the format has no such dtype")
        end = start + entry.nbytes
        known[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": [*entry.shape], "data_offsets": [start, end]}
        start = end
    text = canonical(known)[:-1]  # type: ignore[arg-type]
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(entries)} tensors have too many names for one file")
    return struct.pack("<Q", len(text)) + text


def stream(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a whole file.

    Args:
        entries: the tensors, in the order in which they are to lie; see `aligned`.
        metadata: what the header says of the file.

    Raises:
        ValueError: the pieces of a tensor have not as many bytes as it has, or as `header`.
    """
    yield header(entries, metadata)
    for entry in entries:
        given = 0
        for piece in entry.pieces():
            given += len(piece)
            yield piece
        if given != entry.nbytes:
            raise ValueError(f"{entry.name!r} has {entry.nbytes} bytes, and {given} were given")
