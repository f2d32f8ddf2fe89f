"""The manifest: what one rank's swap files hold at one commit, enough to read every number in them again.

[Note: manifest format 2]
One JSON object, spelled as `strict.canonical` spells it, with these fields:

    schema, version    "offload manifest", 2
    run_id             32 hex digits, the same in all files of a run
    step, rank, world  the step that was committed; whose manifest this is, of how many ranks
    paths, places      the rank's swap files, one a directory; slots a chunk has in its file
    compute_dtype      "bfloat16", "float16" or "float32"
    split_master       whether the slots hold the low halves of the masters instead of the masters
    groups             param groups: {hyper-parameter: number, string, bool, null, or a list of these}
    parameters         {name, shape, order, unit, dtype, group, age}; order: dimensions from the outermost in memory to
                       the innermost, null if that is their own order; age: steps that this parameter has taken
    flats              {params: numbers of its parameters, offsets, numel, owned: [start, stop)}: all ranks have the
                       same flats, and each owns a stretch of each
    chunks             rows of flat, start, numel, path, place, step it was written at, checksum of its slot's data
                       (XXH3-64, 16 hex digits); by flat and start. A row's number is the chunk's number in its slot.
    copies             with a split master as many rows of the same kind: of the slots that hold the same chunks' 16-bit
                       parameters, which are the other halves. They are numbered on: chunk c has slot c and slot
                       len(chunks) + c, each with a step of its own. Without one: none
    extra              what the user gave, as `extra.encode` writes it; null: nothing
    tensors            [bytes, XXH3-128] of the file with the tensors of `extra`; null: there is none

Sizes, offsets and starts are in elements. Names are names: no path is ever made of anything in here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from offload.checkpoint.strict import Json, Node, canonical, load, require_schema, short
from offload.errors import ConfigError

SCHEMA = "offload manifest"
VERSION = 2
DTYPES = ("bfloat16", "float16", "float32")

MAX_BYTES = 128 << 20
MAX_WORLD = 1 << 16
MAX_PATHS = 1 << 10
MAX_PLACES = 2
MAX_DIMENSIONS = 64
MAX_PARAMETERS = 1 << 20
MAX_GROUPS = 1 << 12
MAX_OPTIONS = 1 << 8
MAX_CHUNKS = 1 << 20
ROW_BYTES = 96
"""The most that a chunk takes: seven fields, of which five are short numbers, a step and a checksum."""
MAX_NUMEL = 1 << 48
"""Elements of a run: 256 times the largest model anybody has spoken of, and no product of two overflows 128 bits."""

_FIELDS: tuple[str, ...] = ("schema", "version", "run_id", "step", "rank", "world", "paths", "places")
_FIELDS += ("compute_dtype", "split_master", "groups", "parameters", "flats", "chunks", "copies", "extra", "tensors")

Scalar: TypeAlias = "bool | int | float | str | None"
Option: TypeAlias = "Scalar | tuple[Scalar, ...]"


@dataclass(frozen=True)
class ParameterFacts:
    """One trained parameter; fields as in [Note: manifest format 2]."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    unit: str
    dtype: str
    group: int
    age: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatFacts:
    """One unit's parameters of one dtype, end to end; `owned` is the rank's stretch, [start, stop)."""

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    owned: tuple[int, int]


@dataclass(frozen=True)
class ChunkFacts:
    """Where a chunk's committed version lies. `checksum` is the XXH3-64 of its slot after the header."""

    flat: int
    start: int
    numel: int
    path: int
    place: int
    step: int
    checksum: int


@dataclass(frozen=True)
class Digest:
    """What a file has to be: bytes, and XXH3-128 in 32 hex digits."""

    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """See [Note: manifest format 2]. What `parse` returns is consistent; one made by hand is checked when written."""

    run_id: str
    step: int
    rank: int
    world: int
    paths: int
    places: int
    compute_dtype: str
    split_master: bool
    groups: tuple[Mapping[str, Option], ...]
    parameters: tuple[ParameterFacts, ...]
    flats: tuple[FlatFacts, ...]
    chunks: tuple[ChunkFacts, ...]
    copies: tuple[ChunkFacts, ...] = ()
    extra: Json = None
    tensors: Digest | None = None

    @cached_property
    def slots(self) -> tuple[ChunkFacts, ...]:
        """What is committed, by the number in the slot."""
        return self.chunks + self.copies

    @cached_property
    def homes(self) -> dict[int, tuple[int, int]]:
        """For each parameter: (flat, offset in it)."""
        return {
            param: (number, offset)
            for number, flat in enumerate(self.flats)
            for param, offset in zip(flat.params, flat.offsets, strict=True)
        }


def serialise(manifest: Manifest) -> bytes:
    """The bytes of `manifest`, the same for equal manifests. Checks nothing: `parse` does."""
    return canonical(
        {
            "schema": SCHEMA,
            "version": VERSION,
            "run_id": manifest.run_id,
            "step": manifest.step,
            "rank": manifest.rank,
            "world": manifest.world,
            "paths": manifest.paths,
            "places": manifest.places,
            "compute_dtype": manifest.compute_dtype,
            "split_master": manifest.split_master,
            "groups": [
                {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
                for group in manifest.groups
            ],
            "parameters": [_parameter_json(param) for param in manifest.parameters],
            "flats": [
                {"params": [*flat.params], "offsets": [*flat.offsets], "numel": flat.numel, "owned": [*flat.owned]}
                for flat in manifest.flats
            ],
            "chunks": _rows(manifest.chunks),
            "copies": _rows(manifest.copies),
            "extra": manifest.extra,
            "tensors": None if manifest.tensors is None else [manifest.tensors.size, manifest.tensors.xxh3],
        }
    )


def require_room(manifest: Manifest, slots: int) -> None:
    """Args: manifest: of a run that begins, without slots.

    Raises: ConfigError if it would be too large with so many.
    """
    needed = slots * ROW_BYTES
    if slots > MAX_CHUNKS // 8:  # with fewer, all but the parameters' names is far below
        needed += len(serialise(manifest))
    if slots > MAX_CHUNKS or needed > MAX_BYTES:
        raise ConfigError(
            f"a commit would have to name {slots} chunks in {needed >> 20} MiB of manifest, and {MAX_CHUNKS} chunks "
            f"and {MAX_BYTES >> 20} MiB are allowed: choose a larger Tuning(chunk=...)"
        )


def _rows(slots: Sequence[ChunkFacts]) -> Json:
    return [
        [slot.flat, slot.start, slot.numel, slot.path, slot.place, slot.step, f"{slot.checksum:016x}"] for slot in slots
    ]


def _parameter_json(param: ParameterFacts) -> Json:
    return {
        "name": param.name,
        "shape": [*param.shape],
        "order": None if param.order is None else [*param.order],
        "unit": param.unit,
        "dtype": param.dtype,
        "group": param.group,
        "age": param.age,
    }


def parse(data: bytes, file: str = "manifest") -> Manifest:
    """The manifest that `data` spells, checked: every field, and that they fit together.

    Args: file: its name, for the errors.
    Raises: CorruptionError naming file and place; ResumeError if a newer version of this library wrote it.
    """
    root = load(data, file, MAX_BYTES)
    require_schema(root, SCHEMA, VERSION)
    fields = dict(zip(_FIELDS, root.fields(*_FIELDS), strict=True))
    world = fields["world"].integer(MAX_WORLD, least=1)
    step = fields["step"].integer()
    groups = tuple(_group(node) for node in fields["groups"].items(MAX_GROUPS))
    manifest = Manifest(
        run_id=fields["run_id"].hex(32),
        step=step,
        rank=fields["rank"].integer(world - 1),
        world=world,
        paths=fields["paths"].integer(MAX_PATHS, least=1),
        places=fields["places"].integer(MAX_PLACES, least=1),
        compute_dtype=fields["compute_dtype"].one_of(DTYPES),
        split_master=fields["split_master"].flag(),
        groups=groups,
        parameters=tuple(_parameter(node, len(groups), step) for node in fields["parameters"].items(MAX_PARAMETERS)),
        flats=tuple(_flat(node) for node in fields["flats"].items(MAX_PARAMETERS)),
        chunks=tuple(_chunks(fields["chunks"], step)),
        copies=tuple(_chunks(fields["copies"], step)),
        extra=fields["extra"].value,
        tensors=None if fields["tensors"].value is None else parse_digest(fields["tensors"]),
    )
    _require_fitting(manifest, fields)
    if serialise(manifest) != data:
        root.refuse("is spelled in another way than this library spells it")
    return manifest


def parse_digest(node: Node) -> Digest:
    """[bytes, XXH3-128]. Raises: CorruptionError."""
    parts = node.items(2)
    if len(parts) != 2:
        node.refuse("expected [bytes, XXH3-128]")
    return Digest(parts[0].integer(), parts[1].hex(32))


def _group(node: Node) -> Mapping[str, Option]:
    pairs = node.pairs()
    if len(pairs) > MAX_OPTIONS:
        node.refuse(f"{len(pairs)} hyper-parameters are too many, {MAX_OPTIONS} are allowed")
    found: dict[str, Option] = {}
    for name, value in pairs:
        Node(name, f"{node.place}, a name", node.file).text()
        if isinstance(value.value, list):
            found[name] = tuple(_scalar(item) for item in value.items(MAX_OPTIONS))
        else:
            found[name] = _scalar(value)
    return MappingProxyType(found)


def _scalar(node: Node) -> Scalar:
    if isinstance(node.value, list | dict):
        node.refuse("expected a number, string, bool or null")
    return node.text() if isinstance(node.value, str) else node.value


def _parameter(node: Node, groups: int, step: int) -> ParameterFacts:
    name, shape, order, unit, dtype, group, age = node.fields("name", "shape", "order", "unit", "dtype", "group", "age")
    param = ParameterFacts(
        name=name.text(),
        shape=shape.integers(MAX_NUMEL, MAX_DIMENSIONS),
        order=None if order.value is None else order.integers(MAX_DIMENSIONS, MAX_DIMENSIONS),
        unit=unit.text(),
        dtype=dtype.one_of(DTYPES),
        group=group.integer(groups - 1),
        age=age.integer(step),
    )
    dimensions = range(len(param.shape))
    if param.order is not None and (sorted(param.order) != [*dimensions] or param.order == (*dimensions,)):
        order.refuse("expected the dimensions in another order than their own")
    return param


def _flat(node: Node) -> FlatFacts:
    params, offsets, numel, owned = node.fields("params", "offsets", "numel", "owned")
    size = numel.integer(MAX_NUMEL)
    stretch = owned.integers(size, 2)
    if len(stretch) != 2 or stretch[0] > stretch[1]:
        owned.refuse("expected [start, stop], start not after stop")
    return FlatFacts(
        params=params.integers(MAX_PARAMETERS, MAX_PARAMETERS),
        offsets=offsets.integers(size, MAX_PARAMETERS),
        numel=size,
        owned=(stretch[0], stretch[1]),
    )


def _chunks(node: Node, step: int) -> Iterator[ChunkFacts]:
    # Without a Node a number: there may be a hundred thousand rows.
    least = (0, 0, 1, 0, 0, 0)
    most = (MAX_PARAMETERS, MAX_NUMEL, MAX_NUMEL, MAX_PATHS, MAX_PLACES, step)
    for number, row in enumerate(node.array(MAX_CHUNKS)):
        if not isinstance(row, list) or len(row) != 7:
            node.refuse(f"[{number}]: expected flat, start, numel, path, place, step and checksum")
        numbers: list[int] = []
        for value, low, high in zip(row[:6], least, most, strict=True):
            if type(value) is not int or not low <= value <= high:
                node.refuse(f"[{number}]: expected a whole number from {low} to {high}, found {short(value)}")
            numbers.append(value)
        checksum = int(Node(row[6], f"{node.place}[{number}][6]", node.file).hex(16), 16)
        flat, start, numel, path, place, written = numbers
        yield ChunkFacts(flat, start, numel, path, place, written, checksum)


def _require_fitting(manifest: Manifest, fields: Mapping[str, Node]) -> None:
    """Raises: CorruptionError unless parameters, flats and chunks make sense together."""
    flats, chunks, parameters = fields["flats"], fields["chunks"], fields["parameters"]
    if len({param.name for param in manifest.parameters}) != len(manifest.parameters):
        parameters.refuse("two have one name")
    if sum(flat.numel for flat in manifest.flats) > MAX_NUMEL:
        flats.refuse(f"hold more than {MAX_NUMEL} elements together")
    held = [param for flat in manifest.flats for param in flat.params]
    if sorted(held) != [*range(len(manifest.parameters))]:
        flats.refuse("every parameter has to be in exactly one")
    for number, flat in enumerate(manifest.flats):
        problem = _flat_problem(flat, manifest.parameters)
        if problem:
            flats.refuse(f"[{number}]: {problem}")
    of_flat: list[list[ChunkFacts]] = [[] for _ in manifest.flats]
    for number, chunk in enumerate(manifest.chunks):
        if chunk.flat >= len(of_flat) or chunk.path >= manifest.paths or chunk.place >= manifest.places:
            chunks.refuse(f"[{number}]: there is no such flat, path or place")
        if number and manifest.chunks[number - 1].flat > chunk.flat:
            chunks.refuse(f"[{number}]: not in the order of the flats")
        of_flat[chunk.flat].append(chunk)
    for number, (flat, mine) in enumerate(zip(manifest.flats, of_flat, strict=True)):
        problem = _chunks_problem(flat, mine, manifest.parameters)
        if problem:
            chunks.refuse(f"of flat {number}: {problem}")
    _require_copies(manifest, fields["copies"])


def _require_copies(manifest: Manifest, node: Node) -> None:
    wanted = [(chunk.flat, chunk.start, chunk.numel) for chunk in manifest.chunks] if manifest.split_master else []
    if [(copy.flat, copy.start, copy.numel) for copy in manifest.copies] != wanted:
        node.refuse("expected a row for each chunk with a split master, and none without")
    if any(copy.path >= manifest.paths or copy.place >= manifest.places for copy in manifest.copies):
        node.refuse("there is no such path or place")


def _flat_problem(flat: FlatFacts, parameters: Sequence[ParameterFacts]) -> str | None:
    if len(flat.params) != len(flat.offsets):
        return "as many offsets as parameters are needed"
    if len({(parameters[number].unit, parameters[number].dtype) for number in flat.params}) > 1:
        return "its parameters differ in unit or dtype"
    end = 0
    for number, offset in zip(flat.params, flat.offsets, strict=True):
        if offset < end:
            return f"parameter {number} begins at {offset}, before {end}, where the one before it ends"
        end = offset + parameters[number].numel
    return f"its parameters end at {end}, after its own end at {flat.numel}" if end > flat.numel else None


def _chunks_problem(flat: FlatFacts, chunks: Sequence[ChunkFacts], parameters: Sequence[ParameterFacts]) -> str | None:
    """Chunks follow each other in the owned stretch, and only what belongs to no parameter is in none of them."""
    start, stop = flat.owned
    end = start
    gaps: list[tuple[int, int]] = []
    for chunk in chunks:
        if chunk.start < end:
            return f"one begins at {chunk.start}, before {end}, where the one before it ends or the rank's own begins"
        gaps.append((end, chunk.start))
        end = chunk.start + chunk.numel
    if end > stop:
        return f"they end at {end}, after {stop}, where the rank's own ends"
    gaps.append((end, stop))
    lost = next(_in_both(gaps, _spans(flat, parameters)), None)
    return None if lost is None else f"none holds the elements {lost[0]} to {lost[1]}, which are of a parameter"


def _spans(flat: FlatFacts, parameters: Sequence[ParameterFacts]) -> Iterator[tuple[int, int]]:
    for number, offset in zip(flat.params, flat.offsets, strict=True):
        yield offset, offset + parameters[number].numel


def _in_both(gaps: Sequence[tuple[int, int]], spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The overlaps of two ascending sequences of [start, stop)."""
    number = 0
    for start, stop in spans:
        while number < len(gaps) and gaps[number][1] <= start:
            number += 1
        at = number
        while at < len(gaps) and gaps[at][0] < stop:
            first, last = max(start, gaps[at][0]), min(stop, gaps[at][1])
            if first < last:
                yield first, last
            at += 1
