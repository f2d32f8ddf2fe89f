"""A committed run made by hand, without training: manifests, and swap files that hold what they say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from offload.checkpoint.commit import Commit, RankFiles, names_of, spelled, write_commit, write_files
from offload.checkpoint.live import Tag, write_tag
from offload.checkpoint.manifest import ChunkFacts, Digest, FlatFacts, Manifest, ParameterFacts, committed_slots
from offload.io.files import LOCAL, Files
from offload.optim import reference
from offload.sizes import PAGE_BYTES
from offload.storage import swap_format as slots
from offload.storage.directories import older_swap_name, swap_name
from offload.storage.swap_format import MAGIC

RUN = "0123456789abcdef" * 2
STEP = 7

PARAMETERS = (
    ParameterFacts("embed.weight", (7, 300), None, "", "bfloat16", 0, STEP),
    ParameterFacts("blocks.0.weight", (3, 4, 5, 6), (0, 2, 3, 1), "blocks.0", "bfloat16", 0, STEP),
    ParameterFacts("blocks.0.bias", (), None, "blocks.0", "bfloat16", 1, STEP - 2),
    ParameterFacts("blocks.0.none", (0, 4), None, "blocks.0", "bfloat16", 1, 0),
    ParameterFacts("blocks.0.norm", (9,), None, "blocks.0", "float32", 1, STEP),
)
FLATS = (  # (params, offsets, numel)
    ((0,), (0,), 2112),
    ((1, 2, 3), (0, 384, 385), 386),
    ((4,), (0,), 10),
)
CHUNK_NUMEL = 1000
GROUPS = (
    {"lr": 0.001, "betas": (0.9, 0.999), "name": "matrices"},
    {"lr": 1e-300, "betas": (0.8, 0.99), "foreach": None},
)


def manifest_of(rank: int = 0, world: int = 1, paths: int = 1, share: int | None = None, **changes: object) -> Manifest:
    """A manifest whose checksums are not yet those of any slot.

    Args: share: the stretch it owns; None: by rank; changes: with `split_master` it has rows of copies, too.
    """
    share = rank if share is None else share
    flats, chunks = [], []
    for number, (params, offsets, numel) in enumerate(FLATS):
        own = (numel * share // world, numel * (share + 1) // world)
        flats.append(FlatFacts(params, offsets, numel, own))
        for start in range(own[0], own[1], CHUNK_NUMEL):
            at = len(chunks)
            size = min(CHUNK_NUMEL, own[1] - start)
            chunks.append(ChunkFacts(number, start, size, at % paths, at % 2, STEP - at % 3, f"{at:016x}"))
    made = Manifest(
        RUN, STEP, rank, world, paths, 2, "bfloat16", False, GROUPS, PARAMETERS, tuple(flats), tuple(chunks)
    )
    if changes.get("split_master"):
        copies = [
            chunk._replace(path=(at + 1) % paths, place=(at + 1) % 2, step=STEP - at % 2)
            for at, chunk in enumerate(chunks)
        ]
        made = dataclasses.replace(made, copies=tuple(copies))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def superblock(manifest: Manifest, path: int, **changes: object) -> bytes:
    """As `Superblock.encode` writes it, with `commits` true."""
    chunks = manifest.slot_map.describe(manifest.slots_in(path))
    known = {"run_id": manifest.run_id, "places": manifest.places, "stripe": [path, manifest.paths], "commits": True}
    text = json.dumps({**known, "chunks": chunks, **changes}).encode()
    return superblock_of(text)


def superblock_of(text: bytes, version: int = slots.FORMAT) -> bytes:
    head = slots._SUPERBLOCK.pack(MAGIC, version, len(text), xxhash.xxh3_64_intdigest(text))
    return (head + text).ljust(PAGE_BYTES, b"\0")


def header(
    run_id: str,
    chunk: int,
    step: int,
    numel: int,
    checksum: int,
    version: int = slots.FORMAT,
    magic: bytes = slots._HEADER_MAGIC,
) -> bytes:
    head = slots._HEADER.pack(magic, version, bytes.fromhex(run_id), chunk, step, numel, checksum)
    return (head + slots._CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def value_of(kind: str, flat: int, numel: int) -> Tensor:
    """What the tests keep in a state of a flat: different everywhere; every seventh master is a tie of two bf16."""
    seed = 100 * flat + ("master", "exp_avg", "exp_avg_sq").index(kind)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if kind == "master":
        bits = values.view(torch.int32)
        bits[::7] = (bits[::7] & -65536) | 0x8000
    return values.abs() if kind == "exp_avg_sq" else values


def _stored(manifest: Manifest, kind: str, flat: int, itemsize: int) -> NDArray[Any]:
    """What of a flat lies in slots, where arrays of `kind` have so many bytes an element."""
    numel = FLATS[flat][2]
    if kind == "param" and itemsize == 4:
        return value_of("master", flat, numel).numpy()
    dtypes = {manifest.parameters[param].dtype for param in FLATS[flat][0]}
    if not manifest.split_master or dtypes == {"float32"}:
        return value_of(kind, flat, numel).numpy()
    halves = reference.split(value_of("master", flat, numel).numpy(), value_of("exp_avg_sq", flat, numel).numpy())
    return dict(zip(("param", "master", "exp_avg_sq"), halves, strict=True)).get(
        kind, value_of("exp_avg", flat, numel).numpy()
    )


def write_manifest(directory: Path, manifest: Manifest, extra: object = None, files: Files = LOCAL) -> Digest:
    """What the COMMIT record has to say of the manifest."""
    return write_files(directory, manifest, extra, files)[0]


def write_run(
    directories: list[Path],
    world: int = 1,
    extra: object = None,
    shares: Sequence[int] | None = None,
    split_master: bool = False,
    is_older: bool = False,
) -> list[Manifest]:
    """A run of `world` ranks striped over `directories`, committed; the COMMIT record lies in the first.

    Args: is_older: as versions before COMMIT format 2 wrote it.
    """
    manifests = [
        _write_rank(
            manifest_of(rank, world, len(directories), share, split_master=split_master), directories, is_older=is_older
        )
        for rank, share in enumerate(shares or range(world))
    ]
    digests = [write_manifest(directories[0], manifest, extra) for manifest in manifests]
    commit = Commit(RUN, STEP, tuple(digests))
    has_tensors = any(directories[0].glob("extra-*"))
    write_commit(directories[0], commit if is_older else named(commit, directories, has_tensors=has_tensors))
    return manifests


def named(commit: Commit, directories: Sequence[Path], *, has_tensors: bool = False) -> Commit:
    """The record with all files that live, and the tags of the run: all ranks have these directories."""
    places, ranks = tuple(map(spelled, directories)), range(len(commit.manifests))
    for rank in ranks:
        for number, directory in enumerate(directories):
            write_tag(directory, Tag(commit.run_id, rank, (number, len(directories)), (places,) * len(ranks)))
    at = manifest_of(run_id=commit.run_id, step=commit.step)
    files = tuple(RankFiles(places, names_of(at, rank, has_tensors=has_tensors)) for rank in ranks)
    return dataclasses.replace(commit, files=files)


def _write_rank(manifest: Manifest, directories: list[Path], *, is_older: bool) -> Manifest:
    written = list(manifest.slots)
    files = [bytearray(superblock(manifest, path)) for path in range(manifest.paths)]
    for slot in committed_slots(manifest):
        facts = manifest.slots[slot.chunk]
        payload = bytearray(slot.size - PAGE_BYTES)
        kinds = ("master", "exp_avg", "exp_avg_sq") if slot.chunk < len(manifest.chunks) else ("param",)
        for kind, (itemsize, start, _) in zip(kinds, slot.arrays.ranges(), strict=True):
            value = _stored(manifest, kind, facts.flat, itemsize)[facts.start : facts.start + facts.numel]
            payload[start - PAGE_BYTES : start - PAGE_BYTES + itemsize * facts.numel] = value.tobytes()
        checksum = xxhash.xxh3_64_intdigest(payload)
        written[slot.chunk] = facts._replace(xxh3=f"{checksum:016x}")
        file = files[slot.path]
        file.extend(bytes(max(0, slot.offset + slot.size - len(file))))
        file[slot.offset : slot.offset + slot.size] = (
            header(RUN, slot.chunk, facts.step, facts.numel, checksum) + payload
        )
    for directory, file in zip(directories, files, strict=True):
        directory.mkdir(exist_ok=True)
        rank = manifest.rank
        (directory / (older_swap_name(rank) if is_older else swap_name(RUN, rank))).write_bytes(file)
    chunks = len(manifest.chunks)
    return dataclasses.replace(manifest, chunks=tuple(written[:chunks]), copies=tuple(written[chunks:]))
