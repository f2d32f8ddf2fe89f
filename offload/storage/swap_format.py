"""The format of a swap file: its superblock and slot headers are encoded and parsed here and nowhere else.

[Note: swap file format 1]
All integers are little-endian, all blocks whole pages. Page 0 is the superblock: 16 bytes magic, u32 format version,
u32 length of the text, u64 XXH3-64 of the text, and the text, JSON: {"run_id", "places": slots a chunk, "stripe": [this
file, of how many], "commits": whether this run ever commits (false: nothing in the file can be resumed from), "chunks":
{"held": those in this file, "numels": elements of each chunk of the run}}. If "chunks" does not fit into the page it is
{"xxh3": its digest}.

A slot is one page of header (see `_HEADER`), then the arrays of the chunk, each padded with zeros to whole
pages: the fp32 master, and the states that the optimizer keeps beside it, for Adam exp_avg and exp_avg_sq, fp32. With a
split master the first array is its low halves, 16 bits each. Where slots are not Adam's with whole masters, the
superblock's "chunks" have "itemsizes": bytes an element of each array. A state in a form with scales is two arrays: its
codes, and a byte for each block of elements. Where there are such, the superblock's "chunks" have "blocks": how many
elements share one of each array's. The header holds run id, chunk, step, element
count and the XXH3-64 of the pages after it, and ends with the XXH3-64 of itself.

A chunk has one slot, or several places for it: A and B, so that a new version is written beside the committed one, and
C, where steps are tried beside the last step's, too. All places A come first, then all places B, then all C. Chunks
that are never committed follow, with one place each: gradients and parameters in slots, frozen ones last. In a run that
commits, "chunks" describes the committed ones only. A superblock of three places has format version 2, and is otherwise
spelled as one of version 1; slot headers have version 1 in any case.

The checksums detect damage. They are no protection against somebody who writes a file on purpose; against that, every
size and type is checked before it is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple, TypedDict

import msgspec
import torch
import xxhash
from msgspec import Meta
from torch import Tensor

from offload.errors import CorruptionError, ResumeError
from offload.layout import ADAM_FORMS, Flat, Layout, StateKind, once_a_layout
from offload.sizes import MASTER_ITEM_BYTES, PAGE_BYTES, round_up

FORMAT = 1
FORMAT_OF_TRIALS = 2
"""That of superblocks of three places a chunk."""
MAX_INT = (1 << 63) - 1
MAX_PATHS = 1 << 10
MAX_PLACES = 3
MAX_NUMEL = 1 << 48
"""The most elements of a run. It is 256 times the largest known model, and no product of two overflows 128 bits."""

WHOLE = (4, 4, 4)
"""Bytes an element of Adam's states in a slot: fp32 master and two moments."""
HALF_BYTES = 2
"""Bytes an element of a split master, whose upper half is the 16-bit parameter and is in RAM anyway."""
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}

MAGIC = b"offload swap\n\0\0\0"
_SUPERBLOCK = struct.Struct("<16sIIQ")  # magic, format, length and checksum of the text
_HEADER_MAGIC = b"off slot"
_HEADER = struct.Struct("<8sI16sQQQQ")  # magic, format, run id, chunk, step, elements, checksum of the payload
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

RunId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]
_Count = Annotated[int, Meta(ge=0, le=MAX_NUMEL)]
_Stripe = Annotated[int, Meta(ge=0, le=MAX_PATHS)]


class SlotArrays(NamedTuple):
    """The arrays of one slot.

    Attributes:
        numel: the elements of the chunk.
        itemsizes: bytes an element of each array. In slots of states 4 is fp32, and 2 is the low halves of a split
            master, or bf16, as int16. In slots of parameters only whoever leases them knows the dtype.
        blocks: how many of the chunk's elements share one of each array's; empty: each array has all.
    """

    numel: int
    itemsizes: tuple[int, ...] = WHOLE
    blocks: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each array."""
        if not self.blocks:
            return tuple(itemsize * self.numel for itemsize in self.itemsizes)
        both = zip(self.itemsizes, self.blocks, strict=True)
        return tuple(itemsize * -(-self.numel // block) for itemsize, block in both)

    @property
    def nbytes(self) -> int:
        """Bytes of the slot, header included, in RAM and on disk."""
        return _slot_bytes(self)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """For each array: bytes an element, and where it begins and ends in the slot, without the padding."""
        start = PAGE_BYTES
        for itemsize, size in zip(self.itemsizes, self.sizes, strict=True):
            yield itemsize, start, start + size
            start += round_up(size, PAGE_BYTES)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays, of shape (numel,), or (blocks,), as tensors in a slot's memory.

        Args:
            buffer: uint8, as long as the slot.
        """
        return [buffer[start:end].view(_DTYPES[itemsize]) for itemsize, start, end in self.ranges()]


@lru_cache(1 << 12)  # most chunks of a run are alike, and a plan asks for the bytes of each many times
def _slot_bytes(slot: SlotArrays) -> int:
    return PAGE_BYTES + sum(round_up(size, PAGE_BYTES) for size in slot.sizes)


@once_a_layout
def state_slot_arrays(layout: Layout, *, split_master: bool) -> list[SlotArrays]:
    """The arrays of each chunk's states. Only a bf16 parameter is the upper half of its master."""
    split = [split_master and has_halves(flat) for flat in layout.flats]
    return [
        state_arrays(chunk.numel, layout.flats[chunk.flat].states, is_split=split[chunk.flat])
        for chunk in layout.chunks
    ]


def has_halves(flat: Flat) -> bool:
    """Whether masters of a flat can be split: Adam's of bf16 parameters."""
    return flat.dtype is torch.bfloat16 and flat.states in ADAM_FORMS.values()


def state_arrays(numel: int, states: Iterable[StateKind], *, is_split: bool) -> SlotArrays:
    """The arrays of a chunk's states.

    Args:
        numel: the elements of the chunk.
        states: what is kept beside the master.
        is_split: whether of the master there is the low half only.
    """
    master = (HALF_BYTES if is_split else MASTER_ITEM_BYTES, 1)
    itemsizes, blocks = zip(master, *(array for state in states for array in state.form.arrays), strict=True)
    return SlotArrays(numel, itemsizes, blocks if max(blocks) > 1 else ())


@once_a_layout
def param_slot_arrays(layout: Layout) -> list[SlotArrays]:
    """The array of each of `Layout.param_chunks`: its values in the compute dtype."""
    return [SlotArrays(chunk.numel, (layout.flats[chunk.flat].dtype.itemsize,)) for chunk in layout.param_chunks]


class Chunks(TypedDict, total=False):
    """What a superblock says of the committed slots, or of all slots if nothing is ever committed.

    It is `xxh3` alone, or the other fields. `itemsizes` is missing if all are WHOLE, and `blocks` if all are 1.

    Attributes:
        held: the numbers of those in this file.
        numels: the elements of each of the rank's.
        itemsizes: for each of the rank's, bytes an element of each array.
        blocks: for each of the rank's, how many elements share one of each array's; of one without scales, none.
        xxh3: the digest of the other fields, if these have no room.
    """

    held: list[_Natural]
    numels: list[_Count]
    itemsizes: list[list[_Natural]]
    blocks: list[list[_Natural]]
    xxh3: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


@dataclass(frozen=True)
class Superblock:
    """Page 0 of a swap file; see [Note: swap file format 1].

    Attributes:
        run_id: 32 hex digits.
        places: how many versions of a committed slot there are.
        stripe: which of a rank's files this is, and of how many.
        commits: whether the run ever commits.
        chunks: what `SlotMap.describe` returned, or its digest.
    """

    run_id: RunId
    places: Annotated[int, Meta(ge=1, le=MAX_PLACES)]
    stripe: tuple[_Stripe, _Stripe]
    commits: bool
    chunks: Chunks

    @property
    def format(self) -> int:
        """The version of its format."""
        return FORMAT if self.places < MAX_PLACES else FORMAT_OF_TRIALS

    def encode(self) -> bytes:
        """The bytes of the page."""
        text = self.encode_text(self.chunks)
        if _SUPERBLOCK.size + len(text) > PAGE_BYTES:
            text = self.encode_text({"xxh3": _digest(self.chunks)})
        head = _SUPERBLOCK.pack(MAGIC, self.format, len(text), xxhash.xxh3_64_intdigest(text))
        return (head + text).ljust(PAGE_BYTES, b"\0")

    def describes(self, chunks: Chunks) -> bool:
        """Whether it says this of the chunks, by value or by digest."""
        return self.chunks in (chunks, {"xxh3": _digest(chunks)})

    def encode_text(self, chunks: Chunks) -> bytes:
        """The text of the page.

        Args:
            chunks: what the text says of the chunks.
        """
        known = {"run_id": self.run_id, "places": self.places, "stripe": self.stripe, "commits": self.commits}
        return json.dumps(known | {"chunks": chunks}).encode()


def _digest(chunks: Chunks) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(chunks).encode())


def parse_superblock(page: bytes, file: str, *, is_whole: bool = True) -> Superblock:
    """Decodes and checks the first page of a swap file.

    Args:
        page: the bytes of the page.
        file: the file's path, for the errors.
        is_whole: whether it is an error if the checksum does not match, or the text is not as this library writes it.

    Raises:
        CorruptionError: it is damaged, or is no superblock of this library.
        ResumeError: a newer version of this library wrote it.
    """
    if len(page) < PAGE_BYTES:
        raise CorruptionError(f"ends after {len(page)} bytes, in its superblock", file=file)
    magic, version, length, checksum = _SUPERBLOCK.unpack_from(page)
    if magic != MAGIC:
        raise CorruptionError("has no superblock of a swap file of this library", file=file)
    _require_format(version, file, 0, newest=FORMAT_OF_TRIALS)
    text = page[_SUPERBLOCK.size : _SUPERBLOCK.size + length]
    if is_whole and xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptionError("the superblock is damaged", file=file)
    try:
        block = msgspec.json.decode(text, type=Superblock)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(f"the superblock is not one that this library writes: {error}", file=file) from error
    is_own = not is_whole or (_is_sound(block) and block.format == version and block.encode_text(block.chunks) == text)
    if not is_own:
        raise CorruptionError("the superblock is not one that this library writes", file=file)
    return block


def _is_sound(block: Superblock) -> bool:
    chunks = block.chunks
    known = {"held", "numels", "itemsizes", "blocks"}
    if chunks.keys() != {"xxh3"} and not {"held", "numels"} <= chunks.keys() <= known:
        return False
    return block.stripe[0] < block.stripe[1] and max(chunks.get("held", ()), default=-1) < len(chunks.get("numels", ()))


def superblock_padding_is_clean(page: bytes) -> bool:
    """Whether only zeros follow the text of a superblock that can be parsed."""
    return not any(page[_SUPERBLOCK.size + _SUPERBLOCK.unpack_from(page)[2] :])


class SlotHeader(NamedTuple):
    """The header of a slot.

    Attributes:
        run_id: 32 hex digits.
        chunk: the number of the slot.
        step: the step whose result the slot holds.
        numel: the elements of each array.
        checksum: the XXH3-64 of the slot after its first page.
    """

    run_id: str
    chunk: int
    step: int
    numel: int
    checksum: int

    def encode(self) -> bytes:
        """The header's bytes, its own checksum included."""
        run_id = bytes.fromhex(self.run_id)
        head = _HEADER.pack(_HEADER_MAGIC, FORMAT, run_id, self.chunk, self.step, self.numel, self.checksum)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    def problem(self, run_id: str, chunk: int, step: int, numel: int, checksum: int | None) -> str | None:
        """In what the header differs from the one that is wanted; None if in nothing.

        Args:
            run_id: the run that is wanted.
            chunk: the number of the slot.
            step: the step.
            numel: the elements of each array.
            checksum: the checksum of the slot's data; None: any.
        """
        if self.run_id != run_id:
            return f"the slot was written by run {self.run_id}, not by {run_id}"
        if (self.chunk, self.step) != (chunk, step):
            return f"expected chunk {chunk} of step {step}, found chunk {self.chunk} of step {self.step}"
        if self.numel != numel or checksum not in (None, self.checksum):
            return "the slot holds another version than was written or committed there"
        return None


def parse_header(page: bytes | memoryview, file: str, offset: int, chunk: int) -> SlotHeader:
    """Decodes and checks the header of a slot.

    Args:
        page: the first page of the slot, or as much of it as there is.
        file: the file's path, for the errors.
        offset: where the slot begins in the file, for the errors.
        chunk: the number of the slot, for the errors.

    Raises:
        CorruptionError: it is damaged, or there is no slot.
        ResumeError: a newer version of this library wrote it.
    """

    def refused(problem: str) -> CorruptionError:
        return CorruptionError(problem, chunk=chunk, file=file, offset=offset)

    if len(page) < HEADER_BYTES:
        raise refused("the file ends in the slot's header")
    (own,) = _CHECKSUM.unpack_from(page, _HEADER.size)
    if xxhash.xxh3_64_intdigest(page[: _HEADER.size]) != own:
        raise refused("the slot's header is damaged")
    magic, version, run_id, *numbers = _HEADER.unpack_from(page)
    if magic != _HEADER_MAGIC:
        raise refused("there is no slot here")
    _require_format(version, file, offset)
    header = SlotHeader(run_id.hex(), *numbers)
    if max(header.chunk, header.step) > MAX_INT or header.numel > MAX_NUMEL:
        raise refused("the slot's header is impossible")
    return header


def _require_format(version: int, file: str, offset: int, newest: int = FORMAT) -> None:
    if version > newest:
        raise ResumeError(
            f"{file} has version {version} of its format, and this version of offload reads up to {newest}: use the "
            "offload that wrote it, or a newer one"
        )
    if version < FORMAT:
        raise CorruptionError(f"has a version of its format that does not exist: {version}", file=file, offset=offset)
