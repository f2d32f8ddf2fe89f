"""The pages that describe a swap file, read as if an enemy had written them; see store.slots, swap file format 1."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from offload.checkpoint.manifest import MAX_CHUNKS, MAX_NUMEL, MAX_PATHS, MAX_PLACES, ChunkFacts, Manifest
from offload.checkpoint.strict import MAX_INT, Json, load
from offload.errors import CorruptionError, ResumeError
from offload.sizes import PAGE_BYTES, round_up
from offload.store import slots
from offload.store.slots import FORMAT, STATE_KINDS

HEAD_BYTES = slots._SUPERBLOCK.size
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
    """Where a chunk's committed slot lies in its file, and the arrays in it. Sizes in bytes.

    arrays: by state kind: (bytes an element, offset in the slot).
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
    magic, version, length, checksum = slots._SUPERBLOCK.unpack_from(page)
    if magic != slots._MAGIC:
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
        known = numels.integers(MAX_NUMEL, MAX_CHUNKS)
        held.integers(len(known) - 1, MAX_CHUNKS)
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
    """What is wrong with a slot that `manifest` says holds `chunk`, as far as its header tells."""
    facts = manifest.chunks[chunk]
    if header.run_id != manifest.run_id:
        return f"the slot was written by run {header.run_id}, not by {manifest.run_id}"
    if (header.chunk, header.step) != (chunk, facts.step):
        return f"expected chunk {chunk} of step {facts.step}, found chunk {header.chunk} of step {header.step}"
    if (header.numel, header.checksum) != (facts.numel, facts.checksum):
        return "the slot is not the one that was committed"
    return None


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
    held: Json = [number for number, chunk in enumerate(manifest.chunks) if chunk.path == path]
    found: dict[str, Json] = {"held": held, "numels": [chunk.numel for chunk in manifest.chunks]}
    if manifest.split_master:
        found["itemsizes"] = [[*_itemsizes(manifest, chunk)] for chunk in manifest.chunks]
    return found


def committed_slots(manifest: Manifest) -> list[Slot]:
    """By chunk: where its committed version lies. What a slot looks like is said in `_itemsizes` and here only."""
    sizes = [_slot_bytes(chunk.numel, _itemsizes(manifest, chunk)) for chunk in manifest.chunks]
    starts: list[int] = []
    ends: defaultdict[int, int] = defaultdict(int)
    for chunk, size in zip(manifest.chunks, sizes, strict=True):
        starts.append(ends[chunk.path])
        ends[chunk.path] += size
    found = []
    for number, (chunk, size) in enumerate(zip(manifest.chunks, sizes, strict=True)):
        offset = PAGE_BYTES + chunk.place * ends[chunk.path] + starts[number]
        arrays, start = {}, PAGE_BYTES
        for kind, itemsize in zip(STATE_KINDS, _itemsizes(manifest, chunk), strict=True):
            arrays[kind] = (itemsize, start)
            start += round_up(itemsize * chunk.numel, PAGE_BYTES)
        found.append(Slot(number, chunk.path, offset, size, arrays))
    return found


def _itemsizes(manifest: Manifest, chunk: ChunkFacts) -> tuple[int, ...]:
    """Bytes an element of each array in a chunk's slot."""
    params = manifest.flats[chunk.flat].params
    halves = manifest.split_master and any(manifest.parameters[param].dtype != "float32" for param in params)
    return (2 if halves else 4, 4, 4)


def _slot_bytes(numel: int, itemsizes: Sequence[int]) -> int:
    return PAGE_BYTES + sum(round_up(itemsize * numel, PAGE_BYTES) for itemsize in itemsizes)


def _require_format(version: int, file: str, offset: int) -> None:
    if version > FORMAT:
        raise ResumeError(
            f"{file} has version {version} of its format, and this version of offload reads up to {FORMAT}: use the "
            "offload that wrote it, or a newer one"
        )
    if version != FORMAT:
        raise CorruptionError(f"has a version of its format that does not exist: {version}", file=file, offset=offset)
