"""The manifest: what one rank's swap files hold at one commit, enough to read every number in them again.

[Note: manifest format]
One JSON object, spelled as `canonical` spells it, with these fields:

    schema, version    "offload manifest", 2; 3 if a param group is of another optimizer than Adam; 4 if a state is in
                       another form than fp32; 5 if one has another shape than its parameter; 6 if frozen parameters
                       are in a kept base; 7 if a chunk has three slots; 8 if a chunk owes steps
    run_id             32 hex digits, the same in all files of a run
    step, rank, world  the step that was committed; whose manifest this is, of how many ranks
    paths, places      the rank's swap files, one a directory; slots a chunk has in its file
    compute_dtype      "bfloat16", "float16" or "float32"
    split_master       whether the slots hold the low halves of the masters instead of the masters
    groups             param groups: {hyper-parameter: number, string, bool, null, or a list of these}
    parameters         {name, shape, order, unit, dtype, group, age}; order: dimensions from the outermost in memory to
                       the innermost, null if that is their own order; age: steps that this parameter has taken
    flats              {params: numbers of its parameters, offsets, numel, owned: [start, stop)}: all ranks have the
                       same flats, and each owns a shard of each
    chunks             rows of flat, start, numel, path, place (A, B, C: 0, 1, 2), step that it was written at,
                       checksum of its slot's data (XXH3-64, 16 hex digits); by flat and start. A row's number is the
                       chunk's number in its slot.
    copies             with a split master as many rows of the same kind: of the slots that hold the same chunks' 16-bit
                       parameters, which are the other halves. They are numbered on: chunk c has slot c and slot
                       len(chunks) + c, each with a step of its own. Without one: none
    extra              what the user gave, as `extra.encode` writes it; null: nothing
    tensors            [bytes, XXH3-128] of the file with the tensors of `extra`; null: there is none

Of a model with tensor parallelism there are two fields more, which are not spelled otherwise:

    slices             at the end: how many parts of the model there are. Ranks 0 to world / slices - 1 have the first,
                       and so on. All that is said of flats and chunks is of the ranks of one slice
    shard_dim          at the end of a parameter that the slices share: the dimension along which it is cut, as
                       torch.chunk cuts. `shape` is that of the part. Of any other parameter all slices hold the same

Where a param group is of another optimizer than Adam or AdamW, there are three more, which are not spelled otherwise:

    rules              at the end: the name of each group's optimizer; of Adam and AdamW without a kernel "... run by
                       torch"
    states             at the end of a flat of such a group: the names of the fp32 arrays beside the master in its slots
    progress           at the end of a parameter of such a group: what is known of it beside its arrays: {scalars: rows
                       of name, number, dtype of the tensor that holds it or null; arrays: the names of those that it
                       has by now}

Where states are in other forms than fp32, flats have one more, which is not spelled otherwise:

    forms              at the end of a flat of such states: how each is stored, by a name of `layout.FORMS`. With a
                       split master such a flat has no tie bits: the lower half is a signed number beside the copy

Where a state has another shape than its parameter, such as a number for each row of a matrix, the parameter has one
more, which is not spelled otherwise:

    shapes             at the end of a parameter: rows of the name of such a state and its shape. Its form is "fp32-64",
                       "fp32-32" ... "fp32-2", or "fp32": its numbers are the first ones of the parameter's part of an
                       array that has one for each 64, 32 ... elements of the parameters

Where frozen parameters are in a kept base (storage/kept_base.py) there is one more, which is not spelled otherwise:

    base               at the end: the directory of the base, as COMMIT spells directories, and its name there. A resume
                       does not go by it: it finds the base, or makes it again, where it is told to. It is for who
                       verifies a run

Where chunks owe steps (optim/late.py) there is one more, which is not spelled otherwise:

    late               at the end: {options: what steps took of their param groups, each once: objects with "lr",
                       "betas", "eps", "weight_decay" and "decoupled_weight_decay"; logs: rows of the number of a
                       parameter and, for each of its last steps, the last one last, the number of its options; owed:
                       rows of the number of a chunk and how many of the last steps of its parameter it owes}. What is
                       in the slots of such a chunk is as of the steps before these, at the step that its row names

Two fields have older names than the code: `places` is `SlotMap.versions` there, and `age` a parameter's `step`.

Sizes, offsets and starts are in elements. Names are names: no path is ever made of anything in here.

The JSON is decoded into these types by msgspec, with bounded sizes and exact types, and is encoded again: only the
bytes that this library would write are taken, so there is no room for duplicate or unknown fields. The XXH3 checksums
detect damage. They are no protection against somebody who writes a file on purpose.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch
import xxhash
from msgspec import Meta

from offload.errors import ConfigError, CorruptionError, ResumeError
from offload.layout import ADAM_FORMS, ADAM_STATES, FORMS, MASTER, Flat, Layout, StateKind
from offload.optim.late import MOST_OWED, LateStep, LateSteps
from offload.optim.rule import Progress
from offload.optim.rule import Scalar as NamedScalar
from offload.optim.rules.adam import AdamRule
from offload.sizes import MASTER_ITEM_BYTES, format_bytes
from offload.storage.room import ROW_BYTES
from offload.storage.slot_map import ChunkKind, SlotMap, SlotTable
from offload.storage.swap_format import (
    HALF_BYTES,
    MAX_INT,
    MAX_NUMEL,
    MAX_PATHS,
    MAX_PLACES,
    RunId,
    SlotArrays,
    state_arrays,
)

SCHEMA = "offload manifest"
ADAM = "Adam"
"""The rule of Adam and AdamW, which a manifest without rules is of."""
VERSION = 2
VERSION_OF_RULES = 3
"""That of manifests with other optimizers than Adam."""
VERSION_OF_FORMS = 4
"""That of manifests with states in other forms than fp32."""
VERSION_OF_SHAPES = 5
"""That of manifests with states of other shapes than their parameter's."""
VERSION_OF_BASES = 6
"""That of manifests of runs with a kept base."""
VERSION_OF_TRIALS = 7
"""That of manifests with three slots a chunk: in one of them steps are tried."""
VERSION_OF_LATE_STEPS = 8
"""That of manifests of chunks that owe steps."""
NEWEST = VERSION_OF_LATE_STEPS

MAX_BYTES = 128 << 20
MAX_COMMAS = 1 << 23
"""The most values of a document, roughly. It bounds the memory that reading one takes."""
MAX_TEXT = 4096
"""The most characters of a name or another string."""
MAX_WORLD = 1 << 16
MAX_DIMENSIONS = 64
MAX_PARAMETERS = 1 << 20
MAX_GROUPS = 1 << 12
MAX_OPTIONS = 1 << 8
MAX_CHUNKS = 1 << 20
PARAMS = "params"
"""The key under which a param group of torch has its parameters. No hyper-parameter can be called so."""

_CONTROL = "\\x00-\\x1f\\x7f-\\x9f"
_FORBIDDEN = re.compile(f"[{_CONTROL}\\ud800-\\udfff]")

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
T = TypeVar("T")

Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_NUMEL)]
Number = Annotated[int, Meta(ge=0, le=MAX_PARAMETERS)]
Shape: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT, pattern=f"^[^{_CONTROL}]*\\Z")]
DType = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32)\Z")]
ScalarDType = Annotated[str, Meta(pattern=r"^(bfloat16|float16|float32|float64|int32|int64|bool)\Z")]
NumberValue: TypeAlias = bool | Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | float
Scalar: TypeAlias = bool | Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | float | Text | None
Option: TypeAlias = Scalar | Annotated[tuple[Scalar, ...], Meta(max_length=MAX_OPTIONS)]


Directory = Annotated[str, Meta(max_length=3 * 4096, pattern=r"^(?:[A-Za-z0-9_.~/-]|%[0-9A-F]{2})*\Z")]
"""The path of a directory, as records have it."""


class Digest(NamedTuple):
    """What the content of a file has to be.

    Attributes:
        size: its bytes.
        xxh3: its XXH3-128, in 32 hex digits.
    """

    size: Natural
    xxh3: RunId


@dataclass(frozen=True)
class ProgressFacts:
    """What is known of a parameter beside its arrays; fields as in [Note: manifest format]."""

    scalars: Annotated[tuple[tuple[Text, NumberValue, ScalarDType | None], ...], Meta(max_length=MAX_OPTIONS)]
    arrays: Annotated[tuple[Text, ...], Meta(max_length=MAX_OPTIONS)]

    @classmethod
    def of(cls, progress: Progress) -> ProgressFacts | None:
        """What a manifest says beside the steps; None: there is nothing."""
        if not progress.scalars and not progress.arrays:
            return None
        rows = [
            (one.name, one.value, None if one.dtype is None else str(one.dtype).removeprefix("torch."))
            for one in progress.scalars
        ]
        return cls(tuple(rows), progress.arrays)


@dataclass(frozen=True)
class ParameterFacts:
    """One trained parameter; fields as in [Note: manifest format]."""

    name: Text
    shape: Shape
    order: Annotated[tuple[Natural, ...], Meta(max_length=MAX_DIMENSIONS)] | None
    unit: Text
    dtype: DType
    group: Natural
    age: Natural
    shard_dim: Annotated[int, Meta(ge=0, lt=MAX_DIMENSIONS)] | None = None
    progress: ProgressFacts | None = None
    shapes: Annotated[tuple[tuple[Text, Shape], ...], Meta(max_length=MAX_OPTIONS)] | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def restored(self) -> Progress:
        """The progress that was committed."""
        if self.progress is None:
            return Progress(self.age)
        scalars = [
            NamedScalar(name, value, None if dtype is None else getattr(torch, dtype))
            for name, value, dtype in self.progress.scalars
        ]
        return Progress(self.age, tuple(scalars), self.progress.arrays)


@dataclass(frozen=True)
class FlatFacts:
    """One unit's parameters of one dtype, end to end; fields as in [Note: manifest format]."""

    params: Annotated[tuple[Number, ...], Meta(max_length=MAX_PARAMETERS)]
    offsets: Annotated[tuple[Count, ...], Meta(max_length=MAX_PARAMETERS)]
    numel: Count
    owned: tuple[Count, Count]
    states: Annotated[tuple[Text, ...], Meta(max_length=MAX_OPTIONS)] | None = None
    forms: Annotated[tuple[Text, ...], Meta(max_length=MAX_OPTIONS)] | None = None

    @cached_property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """What is in its slots beside the master."""
        names = [state.name for state in ADAM_STATES] if self.states is None else self.states
        forms = ["fp32"] * len(names) if self.forms is None else self.forms
        return tuple(StateKind(name, FORMS[form]) for name, form in zip(names, forms, strict=True))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the master and the states in its slots."""
        return (MASTER, *(state.name for state in self.state_kinds))


@dataclass(frozen=True)
class LateFacts:
    """The steps that chunks owe; fields as in [Note: manifest format]."""

    options: Annotated[
        tuple[Annotated[dict[Text, Option], Meta(max_length=MAX_OPTIONS)], ...], Meta(max_length=MAX_PARAMETERS)
    ]
    logs: Annotated[
        tuple[tuple[Number, Annotated[tuple[Number, ...], Meta(max_length=MOST_OWED)]], ...],
        Meta(max_length=MAX_PARAMETERS),
    ]
    owed: Annotated[tuple[tuple[Number, Annotated[int, Meta(ge=1, le=MOST_OWED)]], ...], Meta(max_length=MAX_CHUNKS)]

    @classmethod
    def of(cls, late: LateSteps) -> LateFacts | None:
        """What a manifest says of the steps that chunks owe; None: they owe none."""
        if not late.owed:
            return None
        options: dict[str, Any] = {}  # by how they are spelled: 0.0 and -0.0 are two
        logs = []
        for param in sorted(late.log):
            for one in late.log[param]:
                options.setdefault(repr(one.options), one.options)
            numbers = {key: number for number, key in enumerate(options)}
            logs.append((param, tuple(numbers[repr(one.options)] for one in late.log[param])))
        return cls((*options.values(),), tuple(logs), tuple(sorted(late.owed.items())))


class ChunkFacts(NamedTuple):
    """Where the committed version of a chunk lies.

    Attributes:
        flat: the number of its flat.
        start: its first element in the flat.
        numel: its elements.
        path: the number of its swap file.
        place: of its version, A (0), B (1) or C (2).
        step: the step that this version was written at.
        xxh3: the XXH3-64 of its slot after the header, in 16 hex digits.
    """

    flat: Number
    start: Count
    numel: Annotated[int, Meta(ge=1, le=MAX_NUMEL)]
    path: Annotated[int, Meta(ge=0, le=MAX_PATHS)]
    place: Annotated[int, Meta(ge=0, le=MAX_PLACES)]
    step: Natural
    xxh3: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]

    @property
    def checksum(self) -> int:
        return int(self.xxh3, 16)


@dataclass(frozen=True)
class Manifest:
    """What one rank's swap files hold at one commit; fields as in [Note: manifest format].

    What `parse` returns is consistent. One made by hand is checked when it is written.
    """

    run_id: RunId
    step: Natural
    rank: Natural
    world: Annotated[int, Meta(ge=1, le=MAX_WORLD)]
    paths: Annotated[int, Meta(ge=1, le=MAX_PATHS)]
    places: Annotated[int, Meta(ge=1, le=MAX_PLACES)]
    compute_dtype: DType
    split_master: bool
    groups: Annotated[
        tuple[Annotated[dict[Text, Option], Meta(max_length=MAX_OPTIONS)], ...], Meta(max_length=MAX_GROUPS)
    ]
    parameters: Annotated[tuple[ParameterFacts, ...], Meta(max_length=MAX_PARAMETERS)]
    flats: Annotated[tuple[FlatFacts, ...], Meta(max_length=MAX_PARAMETERS)]
    chunks: Annotated[tuple[ChunkFacts, ...], Meta(max_length=MAX_CHUNKS)]
    copies: Annotated[tuple[ChunkFacts, ...], Meta(max_length=MAX_CHUNKS)] = ()
    extra: Any = None
    tensors: Digest | None = None
    slices: Annotated[int, Meta(ge=1, le=MAX_WORLD)] = 1
    rules: Annotated[tuple[Text, ...], Meta(max_length=MAX_GROUPS)] = ()
    base: tuple[Directory, Annotated[str, Meta(pattern=r"^base-[0-9a-f]{32}-[0-9a-f]{16}\Z")]] | None = None
    late: LateFacts | None = None

    def optimizer_of(self, number: int) -> str:
        """The name of a parameter's rule."""
        return self.rules[self.parameters[number].group] if self.rules else ADAM

    @property
    def optimizers(self) -> list[str]:
        """The name of each param group's optimizer."""
        names = self.rules or (ADAM,) * len(self.groups)
        return [
            "AdamW" if name == ADAM and group.get("decoupled_weight_decay") else name
            for name, group in zip(names, self.groups, strict=True)
        ]

    def arrays_of(self, number: int) -> tuple[str, ...]:
        """The names of the arrays that a parameter has by now, its master first. Some come with its first step."""
        facts, flat = self.parameters[number], self.flats[self.homes[number][0]]
        if flat.states is None:
            return flat.kinds
        return (MASTER, *(() if facts.progress is None else facts.progress.arrays))

    @cached_property
    def owed(self) -> dict[int, int]:
        """How many steps each chunk owes that owes some."""
        return {} if self.late is None else dict(self.late.owed)

    @cached_property
    def logs(self) -> dict[int, list[LateStep]]:
        """By parameter, its last steps, if some of its chunks owe them."""
        found: dict[int, list[LateStep]] = {}
        if self.late is not None:
            for number, steps in self.late.logs:
                facts, options = self.parameters[number], self.late.options
                numbered = enumerate(steps, facts.age - len(steps))
                found[number] = [LateStep(facts.group, options[at], Progress(step)) for step, at in numbered]
        return found

    def steps_owed_by(self, chunk: int) -> list[LateStep]:
        """The steps that a chunk owes, the first one first."""
        if chunk not in self.owed:
            return []
        (number,) = self.flats[self.chunks[chunk].flat].params
        return self.logs[number][-self.owed[chunk] :]

    @property
    def slice(self) -> int:
        """The number of the rank's slice."""
        return self.rank // (self.world // self.slices)

    def ranks_of(self, number: int) -> range:
        """The ranks of slice `number`."""
        count = self.world // self.slices
        return range(number * count, (number + 1) * count)

    @cached_property
    def slots(self) -> tuple[ChunkFacts, ...]:
        """The committed slots, by their number."""
        return self.chunks + self.copies

    @cached_property
    def homes(self) -> dict[int, tuple[int, int]]:
        """For each parameter: the number of its flat, and where in the flat it begins, in elements."""
        return {
            param: (number, offset)
            for number, flat in enumerate(self.flats)
            for param, offset in zip(flat.params, flat.offsets, strict=True)
        }

    @cached_property
    def slot_map(self) -> SlotMap:
        """Which slots are committed, numbered as the run has them."""
        split = [self._has_halves(number) for number in range(len(self.flats))]
        states = [
            state_arrays(row.numel, self.flats[row.flat].state_kinds, is_split=split[row.flat]) for row in self.chunks
        ]
        params = [SlotArrays(row.numel, (HALF_BYTES if split[row.flat] else MASTER_ITEM_BYTES,)) for row in self.copies]
        return SlotMap({ChunkKind.STATES: states, ChunkKind.PARAMS: params}, self.places, len(self.slots))

    @cached_property
    def slot_tables(self) -> dict[int, SlotTable]:
        """Where the committed slots lie, by the number of their swap file."""
        return {path: SlotTable(self.slot_map, self.slots_in(path)) for path in {slot.path for slot in self.slots}}

    def _has_halves(self, flat: int) -> bool:
        """Whether the masters of a flat are split."""
        facts = self.flats[flat]
        is_narrow = any(self.parameters[param].dtype == "bfloat16" for param in facts.params)
        return self.split_master and is_narrow and facts.states is None

    def slots_in(self, path: int) -> list[int]:
        """The numbers of the slots in one swap file."""
        return [number for number, slot in enumerate(self.slots) if slot.path == path]


@dataclass(frozen=True)
class Slot:
    """Where a committed slot lies in its file, and the arrays in it.

    Attributes:
        chunk: the number of the slot.
        path: the number of its swap file.
        offset: where it begins in the file, in bytes.
        size: its bytes.
        arrays: what is in it.
    """

    chunk: int
    path: int
    offset: int
    size: int
    arrays: SlotArrays


def committed_slots(manifest: Manifest) -> list[Slot]:
    """Where the committed version of each slot lies, by the number of the slot."""
    slots, tables = manifest.slot_map, manifest.slot_tables
    found = []
    for kind in (ChunkKind.STATES, ChunkKind.PARAMS):
        for number, one in zip(slots.of(kind), slots.arrays[kind], strict=True):
            facts = manifest.slots[number]
            offset = tables[facts.path].offset(number, facts.place)
            found.append(Slot(number, facts.path, offset, one.nbytes, one))
    return found


def is_text(value: str) -> bool:
    """Whether a string is short enough, and without control characters and lone surrogates."""
    return len(value) <= MAX_TEXT and not _FORBIDDEN.search(value)


def canonical(value: Json) -> bytes:
    """The one spelling of a JSON value.

    It is ASCII, with the keys in the order that they have, no blanks, and a newline at the end.
    """
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def digest(data: bytes | memoryview) -> str:
    """XXH3-128 as 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True)
class Schema:
    """How every JSON document of a run begins."""

    schema: Any = None
    version: Any = None


def decode(
    data: bytes,
    kind: type[T],
    spell: Callable[[T], bytes],
    schema: Schema,
    file: str,
    most: int = MAX_BYTES,
    least_version: int | None = None,
) -> T:
    """Decodes and checks a document.

    Args:
        data: its bytes.
        kind: the type of the document.
        spell: the inverse of this. Only the bytes that it returns are accepted.
        schema: the schema that the document has to name, and the newest version that it may name.
        file: its path, for the errors.
        most: how many bytes are allowed.
        least_version: the oldest version that it may name; None: the newest. `spell` tells which one it has to be.

    Raises:
        CorruptionError: it is damaged, or not one that this library writes.
        ResumeError: another version of this library wrote it.
    """
    if len(data) > most:
        raise CorruptionError(f"is longer than the {format_bytes(most)} that are allowed", file=file)
    # Before parsing, which takes some 40 bytes of RAM a value.
    if data.count(b",") > MAX_COMMAS:
        raise CorruptionError(f"holds more than {MAX_COMMAS} values", file=file)
    try:
        found = msgspec.json.decode(data, type=Schema)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(f"is not the JSON that this library writes: {error}", file=file) from error
    _require_schema(found, schema, schema.version if least_version is None else least_version, file)
    try:
        document = msgspec.json.decode(data, type=kind)
        is_own = spell(document) == data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(f"is not one that this library writes: {error}", file=file) from error
    if not is_own:
        raise CorruptionError("is not spelled as this library spells it", file=file)
    return document


def _require_schema(found: Schema, wanted: Schema, least: int, file: str) -> None:
    if found.schema != wanted.schema:
        raise CorruptionError(f"is no {wanted.schema}", file=file)
    number = found.version
    if type(number) is not int or number < 1:
        raise CorruptionError(f"names a version of its format that does not exist: {number!r:.120}", file=file)
    if number > wanted.version:
        raise ResumeError(
            f"{file} has version {number} of its format, and this version of offload reads up to {wanted.version}: "
            "use the offload that wrote it, or a newer one"
        )
    if number < least:
        raise ResumeError(
            f"{file} has version {number} of its format, and this version of offload reads {least} only: "
            "resume with the offload that wrote it, or choose another path"
        )


def serialise(manifest: Manifest) -> bytes:
    """The bytes of a manifest, the same for equal manifests. Checks nothing: `parse` does."""
    values = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    plain = msgspec.to_builtins(values)
    if manifest.slices == 1:
        del plain["slices"]
    if not manifest.rules:
        del plain["rules"]
    if manifest.base is None:
        del plain["base"]
    if manifest.late is None:
        del plain["late"]
    for facts in (*plain["parameters"], *plain["flats"]):
        for name in ("shard_dim", "progress", "shapes", "states", "forms"):
            if facts.get(name) is None:
                facts.pop(name, None)
    version = VERSION_OF_RULES if manifest.rules else VERSION
    if any(flat.forms is not None for flat in manifest.flats):
        version = VERSION_OF_FORMS
    if any(param.shapes is not None for param in manifest.parameters):
        version = VERSION_OF_SHAPES
    if manifest.base is not None:
        version = VERSION_OF_BASES
    if manifest.places == MAX_PLACES:
        version = VERSION_OF_TRIALS
    if manifest.late is not None:
        version = VERSION_OF_LATE_STEPS
    return canonical({"schema": SCHEMA, "version": version, **plain})


def parse(data: bytes, file: str = "manifest") -> Manifest:
    """Decodes a manifest, and checks every field, and that the fields fit together.

    Args:
        data: the bytes of the manifest.
        file: its path, for the errors.

    Raises:
        CorruptionError: it is damaged, or not one that this library writes. The error names file and field.
        ResumeError: another version of this library wrote it.
    """
    manifest = decode(data, Manifest, serialise, Schema(SCHEMA, NEWEST), file, least_version=VERSION)
    if problem := next(_problems(manifest), None):
        raise CorruptionError(problem, file=file)
    return manifest


def require_room(manifest: Manifest, slots: int) -> None:
    """Checks that a manifest may name so many slots.

    Args:
        manifest: the manifest of a run that begins, without slots.
        slots: how many slots will be committed.

    Raises:
        ConfigError: there are too many, or the manifest would be too large.
    """
    needed = slots * ROW_BYTES
    if slots > MAX_CHUNKS // 8:  # with fewer, all but the parameters' names is far below
        needed += len(serialise(manifest))
    if slots > MAX_CHUNKS or needed > MAX_BYTES:
        raise ConfigError(
            f"a commit would have to name {slots} chunks in {needed >> 20} MiB of manifest, and {MAX_CHUNKS} chunks "
            f"and {MAX_BYTES >> 20} MiB are allowed: choose a larger Tuning(chunk=...)"
        )


def _problems(manifest: Manifest) -> Iterator[str]:
    """Why parameters, flats and chunks do not fit together."""
    step, parameters, flats = manifest.step, manifest.parameters, manifest.flats
    if manifest.rank >= manifest.world:
        yield f"rank: there is no rank {manifest.rank} of {manifest.world}"
    if manifest.world % manifest.slices:
        yield f"slices: {manifest.world} ranks are not {manifest.slices} equal slices"
    for number, param in enumerate(parameters):
        if param.group >= len(manifest.groups) or param.age > step:
            yield f"parameters[{number}]: there is no such group, or it took more steps than the run"
        own = (*range(len(param.shape)),)
        if param.order is not None and (tuple(sorted(param.order)) != own or param.order == own):
            yield f"parameters[{number}].order: expected the dimensions in another order than their own"
        if param.shard_dim is not None and (param.shard_dim >= len(param.shape) or manifest.slices == 1):
            yield f"parameters[{number}].shard_dim: there is no such dimension, or one slice only"
    if manifest.rules and len(manifest.rules) != len(manifest.groups):
        yield "rules: expected one for each param group"
    if not manifest.rules and any(facts.states is not None for facts in flats):
        yield "flats: states of their own are of a rule, and there is none"
    for number, param in enumerate(parameters):
        if problem := _progress_problem(param, manifest):
            yield f"parameters[{number}].progress: {problem}"
    for number, group in enumerate(manifest.groups):
        if PARAMS in group:
            yield f"groups[{number}]: no hyper-parameter is called {PARAMS}"
    if len({param.name for param in parameters}) != len(parameters):
        yield "parameters: two have one name"
    if sum(flat.numel for flat in flats) > MAX_NUMEL:
        yield f"flats: hold more than {MAX_NUMEL} elements together"
    if sorted(param for flat in flats for param in flat.params) != [*range(len(parameters))]:
        yield "flats: every parameter has to be in exactly one"
    for number, flat in enumerate(flats):
        if problem := _flat_problem(flat, parameters):
            yield f"flats[{number}]: {problem}"
    for number, slot in enumerate(manifest.slots):
        if slot.flat >= len(flats) or slot.path >= manifest.paths or slot.place >= manifest.places or slot.step > step:
            yield f"chunks[{number}]: there is no such flat, path, slot or step"
    if [chunk.flat for chunk in manifest.chunks] != sorted(chunk.flat for chunk in manifest.chunks):
        yield "chunks: not in the order of the flats"
    of_flat: list[list[ChunkFacts]] = [[] for _ in flats]
    for chunk in manifest.chunks:
        of_flat[chunk.flat].append(chunk)
    for number, (flat, mine) in enumerate(zip(flats, of_flat, strict=True)):
        if problem := _chunks_problem(flat, mine, parameters):
            yield f"chunks of flat {number}: {problem}"
    wanted = [chunk[:3] for chunk in manifest.chunks] if manifest.split_master else []
    if [copy[:3] for copy in manifest.copies] != wanted:
        yield "copies: expected a row for each chunk with a split master, and none without"
    if manifest.late is not None and (problem := _late_problem(manifest, manifest.late)):
        yield f"late: {problem}"


def _late_problem(manifest: Manifest, late: LateFacts) -> str | None:
    """Why the steps that chunks owe do not fit them; None: they do."""
    for number, options in enumerate(late.options):
        try:
            AdamRule().require_sound(0, options)
        except ConfigError:
            return f"options[{number}] are none of Adam"
        if options != AdamRule().options_of(options):
            return f"options[{number}] are not spelled as this library spells them"
    logs, owed = dict(late.logs), dict(late.owed)
    if not owed or [*late.owed] != sorted(owed.items()) or [number for number, _ in late.logs] != sorted(logs):
        return "expected some chunks, and each chunk and parameter once, in their order"
    used = [*dict.fromkeys(one for steps in logs.values() for one in steps)]
    if used != [*range(len(late.options))]:
        return "options: expected each that a step took, in the order in which logs name them"
    needed: dict[int, int] = {}
    for chunk, steps in owed.items():
        if chunk >= len(manifest.chunks):
            return f"there is no chunk {chunk}"
        flat = manifest.flats[manifest.chunks[chunk].flat]
        is_of_adam = flat.state_kinds in ADAM_FORMS.values() and flat.states is None
        if len(flat.params) != 1 or not is_of_adam or manifest.optimizer_of(flat.params[0]) != ADAM:
            return f"chunk {chunk} has several parameters, or is not of Adam"
        needed[flat.params[0]] = max(steps, needed.get(flat.params[0], 0))
    if needed != {number: len(steps) for number, steps in logs.items()}:
        return "logs: expected as many steps of each parameter as one of its chunks owes"
    short = [number for number, steps in needed.items() if steps > manifest.parameters[number].age]
    return f"parameter {short[0]} did not take so many steps" if short else None


def _progress_problem(param: ParameterFacts, manifest: Manifest) -> str | None:
    if param.progress is None:
        return None
    if not manifest.rules or not (param.progress.scalars or param.progress.arrays):
        return "there is no rule, or nothing in it"
    names = [*(name for name, *_ in param.progress.scalars), *param.progress.arrays]
    if len(set(names)) != len(names):
        return "two of its states have one name"
    for name, value, dtype in param.progress.scalars:
        if dtype is not None and not _fits(value, getattr(torch, dtype)):
            return f"{name} is no {dtype}"
    return None


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether a tensor of a dtype can hold exactly this number."""
    if dtype is torch.bool or isinstance(value, bool):
        return dtype is torch.bool and isinstance(value, bool)
    if not dtype.is_floating_point:
        return type(value) is int and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    return type(value) is float and torch.tensor(value, dtype=dtype, device="cpu").item() == value


def _flat_problem(flat: FlatFacts, parameters: Sequence[ParameterFacts]) -> str | None:
    start, stop = flat.owned
    if not start <= stop <= flat.numel:
        return "expected owned to be [start, stop] within the flat"
    if len(flat.params) != len(flat.offsets):
        return "as many offsets as parameters are needed"
    if len({(parameters[number].unit, parameters[number].dtype) for number in flat.params}) > 1:
        return "its parameters differ in unit or dtype"
    if flat.forms is not None:
        if not set(flat.forms) <= FORMS.keys() or set(flat.forms) == {"fp32"}:
            return "forms: expected known ones, of which some are not fp32"
        if len(flat.forms) != (len(ADAM_STATES) if flat.states is None else len(flat.states)):
            return "forms: expected one for each state"
    if len(set(flat.kinds)) != len(flat.kinds):
        return "two of its states have one name"
    for number in flat.params:
        if problem := _shapes_problem(parameters[number], flat):
            return f"parameter {number}: {problem}"
        progress = parameters[number].progress
        if progress is not None and not set(progress.arrays) <= set(flat.kinds[1:]):
            return f"parameter {number} has a state that is not in its slots"
    end = 0
    for number, offset in zip(flat.params, flat.offsets, strict=True):
        if offset < end:
            return f"parameter {number} begins at {offset}, before {end}, where the one before it ends"
        end = offset + parameters[number].numel
    return f"its parameters end at {end}, after its own end at {flat.numel}" if end > flat.numel else None


def _shapes_problem(param: ParameterFacts, flat: FlatFacts) -> str | None:
    small = dict(param.shapes or ())
    if param.shapes is not None and len(small) != max(len(param.shapes), 1):
        return "shapes: expected some, and each name once"
    for state in flat.state_kinds:
        shape = small.pop(state.name, None)
        if shape is None:
            if state.form.is_sparse:
                return f"shapes: {state.name} has no element for each of its own, and no shape"
        elif not state.form.is_exact or math.prod(shape) > -(-param.numel // (state.form.block or 1)):
            return f"shapes: there is no room for {state.name}"
    return f"shapes: there is no state {next(iter(small))}" if small else None


def _chunks_problem(flat: FlatFacts, chunks: Sequence[ChunkFacts], parameters: Sequence[ParameterFacts]) -> str | None:
    """Why the chunks of a flat do not fit it; None: they do.

    They have to follow each other in the owned shard. Only what belongs to no parameter may be in none of them.
    """
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
    """The overlaps of two ascending sequences of ranges [start, stop)."""
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


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor, from the outermost in memory to the innermost; None: that is their own order.

    Dimensions of one element, whose strides mean nothing, come first.
    """
    single = [dimension for dimension, size in enumerate(shape) if size == 1]
    several = [dimension for dimension, size in enumerate(shape) if size != 1]
    ordered = sorted(several, key=lambda dimension: -stride[dimension])
    return None if ordered == several else (*single, *ordered)


def parameters_of(
    layout: Layout, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], param_steps: Sequence[int]
) -> tuple[ParameterFacts, ...]:
    """The parameters of a layout, as a manifest has them.

    Args:
        layout: the layout.
        shapes: the shape of each parameter.
        strides: the strides of each parameter.
        param_steps: for each parameter, how many steps it has taken.
    """
    return tuple(
        ParameterFacts(
            name=spec.name,
            shape=tuple(shape),
            order=memory_order(shape, stride),
            unit=spec.unit,
            dtype=str(spec.dtype).removeprefix("torch."),
            group=group,
            age=step,
            shard_dim=spec.shard_dim,
            shapes=None if spec.whole is None else spec.whole.small or None,
        )
        for spec, group, shape, stride, step in zip(
            layout.specs, layout.groups, shapes, strides, param_steps, strict=True
        )
    )


def flats_of(layout: Layout, owned: Sequence[tuple[int, int]] | None = None) -> tuple[FlatFacts, ...]:
    """The flats of a layout, as a manifest has them.

    Args:
        layout: the layout.
        owned: the rank's shard of each flat, as elements [start, stop); None: one rank owns all.
    """
    shards = [(0, flat.numel) for flat in layout.flats] if owned is None else owned
    return tuple(
        FlatFacts(flat.params, flat.offsets, flat.numel, shard, _states_of(flat), _forms_of(flat))
        for flat, shard in zip(layout.flats, shards, strict=True)
    )


def _states_of(flat: Flat) -> tuple[str, ...] | None:
    return None if flat.states in ADAM_FORMS.values() else tuple(state.name for state in flat.states)


def _forms_of(flat: Flat) -> tuple[str, ...] | None:
    is_plain = all(state.form.is_plain for state in flat.states)
    return None if is_plain else tuple(state.form.name for state in flat.states)


def differences(
    committed: Manifest,
    wanted: Manifest,
    *,
    unfrozen: Container[str] = (),
    frozen: Container[str] = (),
    converts: bool = False,
    of_masters: bool = False,
) -> list[str]:
    """What keeps a commit from being resumed by a run, in words; empty if nothing does.

    Units, chunks, paths, ranks and hyper-parameters may differ: elements are found by their parameter's name.

    Args:
        committed: a manifest of the commit.
        wanted: the manifest of the run.
        unfrozen: the names of parameters that were frozen when it was committed.
        frozen: the names of parameters that are frozen now.
        converts: whether states may be in another form than they were committed in.
        of_masters: whether only masters are taken, so that the optimizer, its groups and its states may differ.
    """
    if committed.slices != wanted.slices:
        return [f"tensor parallelism is over {wanted.slices} ranks, and over {committed.slices} when it was committed"]
    found = []
    if committed.compute_dtype != wanted.compute_dtype:
        found.append(f"compute_dtype is {wanted.compute_dtype}, and {committed.compute_dtype} was committed")
    if not of_masters:
        found += _optimizer_differences(committed, wanted)
    old = {param.name: param for param in committed.parameters}
    new = {param.name: param for param in wanted.parameters}
    found += [
        f"{name} is in the model, and was not committed" for name in new if name not in old and name not in unfrozen
    ]
    gone = (name for name in old if name not in new and name not in frozen)
    found += [f"{name} was committed, and is not in the model" for name in gone]
    now, before = _states(wanted), _states(committed)
    for name in new:
        if name in old:
            found += _param_differences(old[name], new[name])
            if of_masters:
                continue
            if (group := new[name].group) != (former := old[name].group):
                found.append(f"{name} is in param group {group}, and {former} was committed")
            if now[name] != before[name]:
                found.append(f"{name} has {', '.join(now[name])}, and {', '.join(before[name])} was committed")
            elif (is_of := new[name].shapes) != (was_of := old[name].shapes):
                found.append(f"{name} has states of the shapes {is_of}, and {was_of} was committed")
    if not (converts or of_masters) and not found and (changed := in_other_forms(committed, wanted)):
        (name, (is_in, was_in)), more = changed[0], len(changed) - 1
        and_more = f" (and so for {more} more parameters)" if more else ""
        found.append(
            f"states of {name} are kept as {is_in}, and were committed as {was_in}{and_more}: give the option states "
            'as it was, or resume_states="convert"'
        )
    return found


def in_other_forms(committed: Manifest, wanted: Manifest) -> list[tuple[str, tuple[str, str]]]:
    """The parameters whose states are in another form than they were committed in, with both forms in words."""
    now, before = _forms(wanted), _forms(committed)
    return [(name, (now[name], before[name])) for name in now if before.get(name, now[name]) != now[name]]


def _forms(manifest: Manifest) -> dict[str, str]:
    """The forms of each parameter's states."""
    words = [", ".join(state.form.name for state in flat.state_kinds) for flat in manifest.flats]
    return {param.name: words[manifest.homes[number][0]] for number, param in enumerate(manifest.parameters)}


def _optimizer_differences(committed: Manifest, wanted: Manifest) -> list[str]:
    found = []
    if len(committed.groups) != len(wanted.groups):
        found.append(f"there are {len(wanted.groups)} param groups, and {len(committed.groups)} were committed")
    for number, (is_of, was_of) in enumerate(zip(wanted.optimizers, committed.optimizers, strict=False)):
        if is_of != was_of:
            found.append(f"param group {number} is of {is_of}, and one of {was_of} was committed")
    return found


def _states(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """The names of the arrays in the slots of each parameter."""
    kinds = {number: flat.kinds for flat in manifest.flats for number in flat.params}
    return {param.name: kinds[number] for number, param in enumerate(manifest.parameters)}


def _param_differences(old: ParameterFacts, new: ParameterFacts) -> list[str]:
    pairs = [
        ("has the shape", new.shape, old.shape),
        ("is", new.dtype, old.dtype),
        ("has its dimensions in memory in the order", new.order, old.order),
        ("is cut for tensor parallelism along dimension", new.shard_dim, old.shard_dim),
    ]
    return [f"{new.name} {what} {one}, and {other} was committed" for what, one, other in pairs if one != other]
