"""The pages that describe a swap file, read as if an enemy had written them; see store.slots, swap file format 1."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from offload.checkpoint.manifest import MAX_CHUNKS, MAX_NUMEL, MAX_PATHS, MAX_PLACES, Manifest
from offload.checkpoint.strict import MAX_INT, Json, load
from offload.errors import CorruptionError, ResumeError
from offload.sizes import PAGE_BYTES, round_up
from offload.storage import swap_file as slots
from offload.storage.directories import MAGIC, SUPERBLOCK
from offload.storage.swap_file import FORMAT, STATE_KINDS

HEAD_BYTES = SUPERBLOCK.size
HEADER_BYTES = slots._HEADER.size + slots._CHECKSUM.size


@dataclass(frozen=True)
class Superblock:
    """Page 0 of a swap file. run_id: 32 hex digits; stripe: which of a rank's files this is, of how many.

    chunks: as the page has it: what it says of the chunks, or the digest of that.
    """

    run_id: str
    places: int
    stripe: tuple[int, int]
    commits: bool
    chunks: Json


@dataclass(frozen=True)
class SlotHeader:
    """What a slot says of itself. run_id: 32 hex digits; checksum: XXH3-64 of the slot after its first page."""

    run_id: str
    chunk: int
    step: int
    numel: int
    checksum: int


@dataclass(frozen=True)
class Slot:
    """Where a committed slot lies in its file, and the arrays in it. Sizes in bytes.

    chunk: its number; arrays: by state kind: (bytes an element, offset in the slot).
    """

    chunk: int
    path: int
    offset: int
    size: int
    arrays: dict[str, tuple[int, int]]


def parse_superblock(page: bytes, file: str) -> Superblock:
    """Raises: CorruptionError naming `file`; ResumeError (a newer version's)."""
    if len(page) < PAGE_BYTES:
        raise CorruptionError(f"ends after {len(page)} bytes, in its superblock", file=file)
    magic, version, length, checksum = SUPERBLOCK.unpack_from(page)
    if magic != MAGIC:
        raise CorruptionError("has no superblock of a swap file of this library", file=file)
    _require_format(version, file, 0)
    text = page[HEAD_BYTES : HEAD_BYTES + length]
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptionError("the superblock is damaged", file=file)
    root = load(text, file, PAGE_BYTES)
    run_id, places, stripe, commits, chunks = root.fields("run_id", "places", "stripe", "commits", "chunks")
    stripes = stripe.integers(MAX_PATHS, 2)
    if len(stripes) != 2 or stripes[0] >= stripes[1]:
        stripe.refuse("expected [this file, of how many]")
    described = dict(chunks.pairs())
    if described.keys() == {"xxh3"}:
        described["xxh3"].hex(16)
    else:
        held, numels = chunks.fields("held", "numels", *sorted(described.keys() & {"itemsizes"}))[:2]
        known = numels.integers(MAX_NUMEL, 2 * MAX_CHUNKS)
        held.integers(len(known) - 1, 2 * MAX_CHUNKS)
    return Superblock(
        run_id.hex(32), places.integer(MAX_PLACES, least=1), (stripes[0], stripes[1]), commits.flag(), chunks.value
    )


def parse_header(page: bytes, file: str, offset: int, chunk: int) -> SlotHeader:
    """Args: offset, chunk: of the slot, for the errors. Raises: CorruptionError, ResumeError (a newer version's)."""
    if len(page) < HEADER_BYTES:
        raise CorruptionError("the file ends in the slot's header", chunk=chunk, file=file, offset=offset)
    head = page[: slots._HEADER.size]
    (own,) = slots._CHECKSUM.unpack_from(page, slots._HEADER.size)
    if xxhash.xxh3_64_intdigest(head) != own:
        raise CorruptionError("the slot's header is damaged", chunk=chunk, file=file, offset=offset)
    magic, version, run_id, number, step, numel, checksum = slots._HEADER.unpack(head)
    if magic != slots._HEADER_MAGIC:
        raise CorruptionError("there is no slot here", chunk=chunk, file=file, offset=offset)
    _require_format(version, file, offset)
    if max(number, step) > MAX_INT or numel > MAX_NUMEL:
        raise CorruptionError("the slot's header is impossible", chunk=chunk, file=file, offset=offset)
    return SlotHeader(run_id.hex(), number, step, numel, checksum)


def header_problem(header: SlotHeader, manifest: Manifest, chunk: int) -> str | None:
    """What is wrong with a slot that `manifest` says has the number `chunk`, as far as its header tells."""
    facts = manifest.slots[chunk]
    if header.run_id != manifest.run_id:
        return f"the slot was written by run {header.run_id}, not by {manifest.run_id}"
    if (header.chunk, header.step) != (chunk, facts.step):
        return f"expected chunk {chunk} of step {facts.step}, found chunk {header.chunk} of step {header.step}"
    if (header.numel, header.checksum) != (facts.numel, facts.checksum):
        return "the slot is not the one that was committed"
    return None


def padding_problem(page: bytes) -> str | None:
    """What is wrong with a superblock that can be parsed, after its text."""
    length = SUPERBLOCK.unpack_from(page)[2]
    return "is damaged after the text of its superblock" if any(page[HEAD_BYTES + length :]) else None


def superblock_problem(block: Superblock, manifest: Manifest) -> str | None:
    """What is wrong with a swap file of the rank that `manifest` is of."""
    if not block.commits:
        return "belongs to a run that commits nothing, and a commit lies beside it"
    if (block.places, block.stripe[1]) != (manifest.places, manifest.paths):
        return "has other places or paths than its manifest"
    expected = described_chunks(manifest, block.stripe[0])
    if block.chunks not in (expected, {"xxh3": xxhash.xxh3_64_hexdigest(json.dumps(expected).encode())}):
        return "holds other chunks than its manifest says"
    return None


def described_chunks(manifest: Manifest, path: int) -> dict[str, Json]:
    """What the superblock of file `path` says of its chunks."""
    held: Json = [number for number, slot in enumerate(manifest.slots) if slot.path == path]
    found: dict[str, Json] = {"held": held, "numels": [slot.numel for slot in manifest.slots]}
    itemsizes = [_itemsizes(manifest, number) for number in range(len(manifest.slots))]
    if any(tuple(sizes.values()) != slots.WHOLE for sizes in itemsizes):
        found["itemsizes"] = [[*sizes.values()] for sizes in itemsizes]
    return found


def committed_slots(manifest: Manifest) -> list[Slot]:
    """By number: where the committed version lies. What a slot looks like is said in `_itemsizes` and here only."""
    itemsizes = [_itemsizes(manifest, number) for number in range(len(manifest.slots))]
    sizes = [_slot_bytes(slot.numel, of.values()) for slot, of in zip(manifest.slots, itemsizes, strict=True)]
    starts: list[int] = []
    ends: defaultdict[int, int] = defaultdict(int)
    for slot, size in zip(manifest.slots, sizes, strict=True):
        starts.append(ends[slot.path])
        ends[slot.path] += size
    found = []
    for number, (slot, size) in enumerate(zip(manifest.slots, sizes, strict=True)):
        offset = PAGE_BYTES + slot.place * ends[slot.path] + starts[number]
        arrays, start = {}, PAGE_BYTES
        for kind, itemsize in itemsizes[number].items():
            arrays[kind] = (itemsize, start)
            start += round_up(itemsize * slot.numel, PAGE_BYTES)
        found.append(Slot(number, slot.path, offset, size, arrays))
    return found


def _itemsizes(manifest: Manifest, number: int) -> dict[str, int]:
    """Bytes an element of each array in a slot, by state kind."""
    params = manifest.flats[manifest.slots[number].flat].params
    halves = manifest.split_master and any(manifest.parameters[param].dtype == "bfloat16" for param in params)
    if number < len(manifest.chunks):
        return dict(zip(STATE_KINDS, slots.SPLIT if halves else slots.WHOLE, strict=True))
    return {"param": 2 if halves else 4}


def _slot_bytes(numel: int, itemsizes: Iterable[int]) -> int:
    return PAGE_BYTES + sum(round_up(itemsize * numel, PAGE_BYTES) for itemsize in itemsizes)


def _require_format(version: int, file: str, offset: int) -> None:
    if version > FORMAT:
        raise ResumeError(
            f"{file} has version {version} of its format, and this version of offload reads up to {FORMAT}: use the "
            "offload that wrote it, or a newer one"
        )
    if version != FORMAT:
        raise CorruptionError(f"has a version of its format that does not exist: {version}", file=file, offset=offset)
