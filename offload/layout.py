"""Where every element lies: parameters ▶ flat parameters ▶ shards ▶ chunks ▶ pieces. Pure arithmetic, no tensors.

[Note: flats, chunks, pieces]
A *flat* parameter holds one unit's parameters of one dtype, end to end. Each starts at a multiple of ALIGN_NUMEL
elements; the gaps belong to no parameter. With one rank the flat parameter is also the shard that the rank owns. Over
several ranks it is padded to as many equal *shards*. A layout is that of one rank: whole flat parameters, and the
chunks of its own shards.

A *frozen* parameter is one without states, since it is in no param group. Trained parameters come first, then frozen
ones that stream; no flat parameter holds both. So what is trained has the same numbers with and without the frozen
ones: `Layout.trained` is the layout without them, which is all that the optimizer knows.

With `replicas` the ranks form as many groups of consecutive ranks, and each group keeps all parameters. Of the
parameters alone, a rank then also keeps the shards of its counterparts in the other groups. With groups of one rank
(stages 1 and 2 where parameters stream) these are the shards of all other ranks. The counterparts have their states: of
`Layout.param_chunks` the first ones, `chunks`, have states and gradients here; the others, `stateless`, only values.

A *chunk* is a slice of at most `chunk_numel` elements of a shard, with its place in the flat parameter. A *piece* is
the part of one parameter that lies in one chunk. A *segment* is a run of pieces that one Adam call can do, because
param group and step count are the same.

A flat parameter is *whole* if its optimizer steps whole parameters. Its chunks hold as many of them as `chunk_numel`
has room for, and at least one, however large that is. One whose slices are stepped each by itself, such as the matrices
of experts, may be cut between slices. Over ranks each parameter has one owner: shards are as large as
the largest needs, and the parameters of each rank lie end to end at the beginning of its shard. Owners are chosen over
all flats together, since a flat may have fewer parameters than there are ranks.

A state of a whole parameter may have another shape, such as one number for each row of a matrix. Its array in a slot
has one number for each `Form.block` elements of the parameter, with as large a block as leaves room for the state. The
state's numbers are the first ones there.

          parameter 0          gap  parameter 1                parameter 2
    flat  |--------------------|....|-------------------------||-----|
   chunk  |---------------| |-----------------| |-----------------|
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import groupby, islice
from typing import Any, Concatenate, Generic, NamedTuple, TypeVar
from typing import ParamSpec as Arguments

import torch

from offload.sizes import DITHER_BLOCK, MASTER_ITEM_BYTES, SUM_BLOCK, round_up

ALIGN_NUMEL = 64
"""Parameters begin at multiples of so many elements: a cache line or more in every dtype.

So matrix kernels find them as aligned as torch's own allocator leaves them, and two threads never write one line."""
ALIGN_BYTES = 256
"""What lies in one piece of memory begins at multiples of this, which is enough for every kernel."""

OWNERS_DIFFER = 0.02
"""By this part of the mean, bytes of states may differ where that makes the updates of ranks cost more alike."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Form:
    """How a state's numbers are stored (native/codes.py encodes and decodes them; `reference.to_codes` says what).

    Attributes:
        name: as manifests have it.
        itemsize: bytes of an element.
        block: how many elements of a parameter, counted from its start, share a scale of one byte. Scales are an array
            of their own. 0: there are none.
        octaves: powers of two that the codes of a block span.
        is_signed: whether a code has a sign.
        is_sparse: whether there is one number for each block of elements, and no more. It counts as that of the first
            element of the block, and those of the others as 0.
    """

    name: str
    itemsize: int
    block: int = 0
    octaves: int = 0
    is_signed: bool = True
    is_sparse: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether each fp32 stays what it is."""
        return self.itemsize == 4

    @property
    def is_plain(self) -> bool:
        """Whether its array has an fp32 for each element."""
        return self.is_exact and not self.is_sparse

    @property
    def arrays(self) -> tuple[tuple[int, int], ...]:
        """Of each of its arrays: bytes of an element, and how many elements of the master share one."""
        if self.is_sparse:
            return ((self.itemsize, self.block),)
        return ((self.itemsize, 1), *(((1, self.block),) if self.block else ()))


FP32 = Form("fp32", 4)
BF16 = Form("bf16", 2)
CODED = (
    Form("e4m3-64", 1, DITHER_BLOCK, octaves=16),
    Form("e5m3-64", 1, DITHER_BLOCK, octaves=32, is_signed=False),
)
"""Of Adam's two moments in one byte each."""
SPARSE = tuple(Form(f"fp32-{block}", 4, block, is_sparse=True) for block in (64, 32, 16, 8, 4, 2))
"""Of states that have another shape than their parameter, and fewer elements."""
FORMS = {form.name: form for form in (FP32, BF16, *CODED, *SPARSE)}


def form_for(numel: int, of: int) -> Form:
    """The smallest form that has room for a state of `numel` elements, of a parameter of `of`, at least as many."""
    return next((form for form in SPARSE if numel <= -(-of // form.block)), FP32)


@dataclass(frozen=True)
class StateKind:
    """A number that a rule keeps of each element beside its master.

    Attributes:
        name: as the optimizer's `state[p]` names it.
        form: how it is stored.
        starts: its value for all elements of a parameter that was never stepped; 0 unless the form is exact.
    """

    name: str
    form: Form = FP32
    starts: float = 0.0


MASTER = "master"
"""The kind of the fp32 masters, which every rule has beside its states."""
ADAM_STATES = (StateKind("exp_avg"), StateKind("exp_avg_sq"))
ADAM_FORMS = {
    "fp32": ADAM_STATES,
    "bf16": (StateKind("exp_avg", BF16), StateKind("exp_avg_sq", BF16)),
    "8bit": (StateKind("exp_avg", CODED[0]), StateKind("exp_avg_sq", CODED[1])),
}
"""Adam's states, by the value of the option `states`."""

T = TypeVar("T")
P = Arguments("P")


def is_dithered(states: Iterable[StateKind]) -> bool:
    """Whether some of these states are rounded by random bits."""
    return any(not state.form.is_exact for state in states)


def of_states(states: Iterable[StateKind], arrays: Iterable[T]) -> list[tuple[T, ...]]:
    """Parts what a slot has of each array beside the master's into what it has of each state."""
    left = iter(arrays)
    found = [tuple(islice(left, len(state.form.arrays))) for state in states]
    assert next(left, None) is None
    return found


@dataclass(frozen=True)
class Whole:
    """A parameter that its optimizer steps as a whole, as the optimizer sees it.

    Attributes:
        shape: its shape.
        strides: how its elements lie, as a tensor's strides say; empty: row-major.
        small: by name, the shapes of those states that have another one, and at most as many elements.
        has_slices: whether each slice of its first dimension is stepped by itself. It is row-major then, and all of its
            states have its shape.
        flops: floating-point operations of a step of it, where they are known and many; else 0.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    small: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_slices: bool = False
    flops: float = 0.0

    @property
    def part(self) -> Whole:
        """What is stepped at once: the parameter, or a slice of it."""
        return Whole((1, *self.shape[1:])) if self.has_slices else self

    @property
    def part_numel(self) -> int:
        """The elements of `part`."""
        return math.prod(self.part.shape)

    def numels(self, states: Iterable[StateKind]) -> list[int]:
        """The elements of each of these states."""
        small = dict(self.small)
        return [math.prod(small.get(state.name, self.shape)) for state in states]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, as this rank has it. Sizes are those of this rank's part.

    Attributes:
        name: its name in the model.
        numel: how many elements it has.
        unit: the unit that it belongs to.
        dtype: the dtype of its copy for compute.
        group: the number of its param group; None: it is in none, and so is frozen: it has no states, and no step.
        tile: how many of its elements are on the device at once; 0: all. One with tiles is alone in its flat parameter.
            The parameters that a weight is made of have equally many tiles. Over ranks each shard has an equal part of
            every tile.
        shard_dim: the dimension along which tensor-parallel ranks cut it; None: each of them has all of it.
        states: what its optimizer keeps of each element beside its master. It means nothing if it is frozen.
        whole: how its optimizer sees it, if that steps it as a whole; None: in pieces.
        is_late: whether a tile of it whose gradient is zeros may owe the step (optim/late.py). It has tiles then.
        why_whole: why the quantised weight that it is a part of cannot run in tiles, in words; empty: it can, or that
            is no weight of which it would be expected.
    """

    name: str
    numel: int
    unit: str
    dtype: torch.dtype
    group: int | None
    tile: int = 0
    shard_dim: int | None = None
    states: tuple[StateKind, ...] = ADAM_STATES
    whole: Whole | None = None
    is_late: bool = False
    why_whole: str = ""

    @property
    def is_frozen(self) -> bool:
        """Whether it has no states."""
        return self.group is None


@dataclass(frozen=True)
class Flat:
    """One unit's parameters of one dtype and with the same states, end to end.

    Attributes:
        index: its number in `Layout.flats`.
        unit: the unit.
        dtype: the dtype of its parameters.
        params: the numbers of its parameters in `Layout.specs`.
        offsets: where each of them begins, in elements.
        numel: how many elements it has, gaps included and padding excluded.
        is_frozen: whether its parameters are frozen.
        states: what is kept of each element beside its master; nothing if it is frozen.
        is_whole: whether its parameters are stepped as wholes, each by one rank.
    """

    index: int
    unit: str
    dtype: torch.dtype
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    is_frozen: bool = False
    states: tuple[StateKind, ...] = ADAM_STATES
    is_whole: bool = False

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The names of the master and of its states."""
        return (MASTER, *(state.name for state in self.states))

    @cached_property
    def array_kinds(self) -> tuple[str, ...]:
        """For each array in the slots of its states, the name of what it belongs to."""
        return (MASTER, *(state.name for state in self.states for _ in state.form.arrays))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """For each array in the slots of its states, how many elements of the master share one of its elements."""
        return blocks_of(self.states)


@dataclass(frozen=True)
class Piece:
    """`numel` elements of `param` from `param_offset`, which lie in their chunk from `chunk_offset`."""

    param: int
    param_offset: int
    chunk_offset: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `start + numel` of flat `flat`."""

    index: int
    flat: int
    start: int
    numel: int
    pieces: tuple[Piece, ...]

    def piece_at(self, at: int) -> Piece:
        """The last piece that begins at element `at` of the chunk, or before."""
        return self.pieces[bisect(self.pieces, at, key=lambda piece: piece.chunk_offset) - 1]


@dataclass(frozen=True)
class FlatSlice:
    """Elements of flat parameter `flat` that are fetched together: all of it, or one of its tiles.

    A tile is a unit of its own, with a slice of each flat parameter that its weight is made of. That is elements
    `start` to `start + numel // ranks` of each rank's shard, one after the other in its memory. So it is gathered, and
    its gradient reduced, as a flat parameter is.

    Attributes:
        index: its number in `Layout.slices`.
        unit: its unit.
        flat: the number of the flat parameter.
        start: where it begins in each shard.
        numel: how many elements it has in all shards.
        is_tile: whether it is of a tile.
    """

    index: int
    unit: str
    flat: int
    start: int
    numel: int
    is_tile: bool = False


@dataclass(frozen=True)
class CopyRange:
    """`numel` elements from `source_start` in a committed slot to `target_start` in chunk `target`."""

    target: int
    source_start: int
    target_start: int
    numel: int


@dataclass(frozen=True)
class Segment(Generic[Key]):
    """Elements `start` to `stop` of a chunk, gaps included, whose pieces all have `key`."""

    key: Key
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where every element lies; see [Note: flats, chunks, pieces].

    Chunks are in the order of the flats, and flats in the order of their units.

    Attributes:
        specs: the parameters, the trained ones first.
        flats: the flat parameters.
        chunks: the chunks that have states: those of this rank's shards of trained parameters.
        chunk_numel: the most elements of a chunk, unless it is one whole parameter. With several ranks, others begin at
            multiples of it within a shard.
        ranks: the number of ranks that the flats are sharded over.
        rank: the rank whose shards the chunks are.
        replicas: the number of groups of ranks, each of which keeps all parameters.
        stateless: the chunks of which this rank keeps only values: those of trained parameters for its counterparts in
            the other groups, then those of frozen parameters.
        trained_replicas: how many groups keep all trained parameters, if only frozen ones are kept `replicas` times;
            None: `replicas`.
    """

    specs: tuple[ParamSpec, ...]
    flats: tuple[Flat, ...]
    chunks: tuple[Chunk, ...]
    chunk_numel: int
    ranks: int = 1
    rank: int = 0
    replicas: int = 1
    stateless: tuple[Chunk, ...] = ()
    trained_replicas: int | None = None

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What functions marked `once_a_layout` have returned."""
        return {}

    @cached_property
    def trained(self) -> Layout:
        """The layout of the trained parameters alone."""
        if not any(flat.is_frozen for flat in self.flats):
            return self
        specs = tuple(spec for spec in self.specs if not spec.is_frozen)
        flats = tuple(flat for flat in self.flats if not flat.is_frozen)
        stateless = tuple(chunk for chunk in self.stateless if chunk.flat < len(flats))
        replicas = self.trained_replicas or self.replicas
        return replace(self, specs=specs, flats=flats, stateless=stateless, replicas=replicas, trained_replicas=None)

    @cached_property
    def state_kinds(self) -> tuple[str, ...]:
        """The names of all arrays of states that there are, the masters' first, each once."""
        return tuple(
            dict.fromkeys((MASTER, *(kind for flat in self.flats if not flat.is_frozen for kind in flat.kinds)))
        )

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The number of each trained parameter's param group."""
        return tuple(spec.group for spec in self.specs if spec.group is not None)

    @property
    def shard_group_size(self) -> int:
        """Ranks that keep all parameters together."""
        return self.ranks // self.replicas

    @property
    def replicated_shards(self) -> range:
        """The ranks whose shards of the parameters this one keeps.

        They are this rank, and its counterparts in the other groups.
        """
        return range(self.rank % self.shard_group_size, self.ranks, self.shard_group_size)

    @cached_property
    def param_chunks(self) -> tuple[Chunk, ...]:
        """The chunks of which this rank keeps the parameters: `chunks`, then `stateless`, each at its number."""
        return self.chunks + self.stateless

    def shard_numel(self, flat: int) -> int:
        """Elements of each rank's shard of a flat, padding included."""
        return shard_numel(self.flats[flat].numel, self.ranks)

    def padded_numel(self, flat: int) -> int:
        """Elements of a flat in memory, padding included."""
        return self.shard_numel(flat) * self.ranks

    def shard_range(self, flat: int, rank: int | None = None) -> tuple[int, int]:
        """The first element of a rank's shard of a flat, and the one after its last, without padding.

        Args:
            flat: the number of the flat.
            rank: whose shard; None: this rank's.
        """
        numel, shard = self.flats[flat].numel, self.shard_numel(flat)
        start = min((self.rank if rank is None else rank) * shard, numel)
        return start, min(start + shard, numel)

    def param_shard_range(self, param: int, rank: int | None = None) -> tuple[int, int]:
        """Which elements of a parameter are in a rank's shard: the first, and the one after the last.

        Args:
            param: the number of the parameter.
            rank: whose shard; None: this rank's.
        """
        flat, offset = self.locations[param]
        start, stop = self.shard_range(flat, rank)
        numel = self.specs[param].numel
        return min(max(start - offset, 0), numel), min(max(stop - offset, 0), numel)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without gaps."""
        return sum(spec.numel for spec in self.specs)

    def tile_of(self, flat: int) -> int:
        """Elements of each tile of a flat; 0: it has none."""
        info = self.flats[flat]
        return self.specs[info.params[0]].tile if len(info.params) == 1 else 0

    def tiles_of(self, param: int) -> list[tuple[int, int]]:
        """Which part of each rank's shard of a parameter each tile is: its first element, and the one after its last.

        With one rank these are elements of the parameter. A parameter without tiles counts as one tile.
        """
        spec = self.specs[param]
        if not spec.tile:
            return [(0, spec.numel)]
        shard, step = spec.numel // self.ranks, spec.tile // self.ranks
        return [(start, min(start + step, shard)) for start in range(0, shard, step)]

    def in_slice(self, one: FlatSlice, element: int) -> int:
        """Where an element of a flat parameter, which is in a slice of it, lies in the memory of that slice."""
        if not one.is_tile:
            return element
        rank, within = divmod(element, self.shard_numel(one.flat))
        return rank * (one.numel // self.ranks) + within - one.start

    @cached_property
    def slices(self) -> tuple[FlatSlice, ...]:
        """The flat parameters, each with its own number, then the tiles of those that have some."""
        made = [FlatSlice(flat.index, flat.unit, flat.index, 0, self.padded_numel(flat.index)) for flat in self.flats]
        for flat in self.flats:
            if self.tile_of(flat.index):
                for number, (start, stop) in enumerate(self.tiles_of(flat.params[0])):
                    unit = f"{flat.unit}[{number}]"
                    numel = self.ranks * (stop - start)
                    made.append(FlatSlice(len(made), unit, flat.index, start, numel, is_tile=True))
        return tuple(made)

    @cached_property
    def late_chunks(self) -> frozenset[int]:
        """The chunks of `chunks` that may owe steps. Each has elements of one tile of one parameter."""
        return frozenset(one.index for one in self.chunks if self.specs[one.pieces[0].param].is_late)

    @cached_property
    def locations(self) -> dict[int, tuple[int, int]]:
        """For each parameter: (flat, offset in it)."""
        return {
            param: (flat.index, offset)
            for flat in self.flats
            for param, offset in zip(flat.params, flat.offsets, strict=True)
        }

    @cached_property
    def flat_of(self) -> list[int]:
        """For each parameter: the number of its flat parameter."""
        return [self.locations[param][0] for param in range(len(self.specs))]

    @cached_property
    def chunks_of(self) -> dict[int, tuple[int, ...]]:
        """For each parameter: the chunks of `chunks` that hold a piece of it, in the parameter's order."""
        return self._holders(self.chunks)

    def pieces_of(self, param: int) -> Iterator[tuple[Chunk, Piece]]:
        """The pieces of a parameter in this rank's chunks, each with its chunk, in the parameter's order."""
        offset = self.locations[param][1]
        for index in self.chunks_of[param]:
            chunk = self.chunks[index]
            yield chunk, chunk.piece_at(max(offset - chunk.start, 0))

    @cached_property
    def param_chunks_of(self) -> dict[int, tuple[int, ...]]:
        """For each parameter: the chunks of `param_chunks` that hold a piece of it, in the parameter's order."""
        return self._holders(self.param_chunks)

    def _holders(self, chunks: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {param: [] for param in range(len(self.specs))}
        for chunk in chunks:
            for piece in chunk.pieces:
                found[piece.param].append(chunk.index)
        return {param: tuple(holders) for param, holders in found.items()}


def once_a_layout(
    function: Callable[Concatenate[Layout, P], T],
) -> Callable[Concatenate[Layout, P], T]:
    """Marks a function that is called with the same layout again and again, as for the many placements of one model.

    What it returns is kept with the layout, for each of its other arguments, and is not to be changed. These can be
    hashed.
    """

    @wraps(function)
    def kept(layout: Layout, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (function, args, tuple(kwargs.items()))
        if key not in layout.kept:
            layout.kept[key] = function(layout, *args, **kwargs)
        found: T = layout.kept[key]
        return found

    return kept


def blocks_of(states: Iterable[StateKind]) -> tuple[int, ...]:
    """For the master's array and each of the states', how many elements of the master share one of its elements."""
    return (1, *(block for state in states for _, block in state.form.arrays))


def part_of(array: T, block: int, start: int, stop: int) -> T:
    """What an array has of elements `start` to `stop` of a chunk.

    Args:
        array: a tensor of the chunk.
        block: how many elements of the chunk share one of the array's.
        start: the first element, a multiple of `block`.
        stop: the one after the last.
    """
    part: T = array[start // block : -(-stop // block)]  # type: ignore[index]
    return part


def starts_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where parts of these sizes begin if they lie one after the other in one piece of memory, and the bytes of all.

    Args:
        sizes: the bytes of each part.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(round_up(end, ALIGN_BYTES))
        end = starts[-1] + size
    return starts, end


def shard_numel(numel: int, ranks: int) -> int:
    """Elements of each of `ranks` equal shards of a flat; one rank's is the flat itself."""
    return numel if ranks == 1 else round_up(-(-numel // ranks), ALIGN_NUMEL)


def build(
    specs: Sequence[ParamSpec],
    chunk_numel: int,
    *,
    ranks: int = 1,
    rank: int = 0,
    replicas: int = 1,
    trained_replicas: int | None = None,
) -> Layout:
    """Lays out parameters. Within a unit they keep their order, among those of their dtype and states.

    Args:
        specs: the parameters, the trained ones first.
        chunk_numel: the most elements of a chunk, a positive number.
        ranks: the number of ranks that the flats are sharded over.
        rank: the rank whose layout it is.
        replicas: the number of groups of ranks that each keep all parameters, a divisor of `ranks`.
        trained_replicas: how many groups keep all trained parameters: `replicas`, or 1; None: `replicas`.
    """
    flats: list[Flat] = []
    parts = list(_by_unit_and_dtype(specs))
    owners = _owners(specs, [params for key, params in parts if key.is_whole], ranks) if ranks > 1 else {}
    for key, params in parts:
        if key.is_whole and ranks > 1:
            params, offsets, end = _by_owner(specs, params, owners, ranks)
        else:
            offsets, end = _end_to_end(specs, params)
        flats.append(
            Flat(
                len(flats),
                key.unit,
                key.dtype,
                tuple(params),
                tuple(offsets),
                end,
                key.is_frozen,
                key.states,
                key.is_whole,
            )
        )
    whole = Layout(
        tuple(specs), tuple(flats), (), chunk_numel, ranks, rank, replicas, trained_replicas=trained_replicas
    )
    others = [other for other in whole.replicated_shards if other != rank]
    counterparts = others if trained_replicas in (None, replicas) else []
    own = [(flat, rank) for flat in flats if not flat.is_frozen]
    kept = [(flat, other) for flat in flats for other in ((rank, *others) if flat.is_frozen else counterparts)]
    chunks = _chunks_of(whole, own, 0)
    return replace(whole, chunks=chunks, stateless=_chunks_of(whole, kept, len(chunks)))


def _end_to_end(specs: Sequence[ParamSpec], params: Sequence[int]) -> tuple[list[int], int]:
    """Where each of these parameters begins if they lie end to end, and where the last one ends."""
    offsets: list[int] = []
    end = 0
    for param in params:
        offsets.append(round_up(end, ALIGN_NUMEL))
        end = offsets[-1] + specs[param].numel
    return offsets, end


def _owners(specs: Sequence[ParamSpec], flats: Sequence[Sequence[int]], ranks: int) -> dict[int, int]:
    """The rank that owns each of these parameters. All ranks have about as many bytes of states.

    The largest parameters come first, and of these the most costly. Each goes to the rank that has the least bytes of
    all flats together, among those whose shard has room for it. A shard has room for what the fullest one needs if its
    flat is divided alone. Among ranks that have about as many bytes the one is chosen whose updates take the fewest
    operations.

    Args:
        specs: all parameters.
        flats: the numbers of the parameters of each flat that is whole.
        ranks: how many ranks there are.
    """
    numels = {param: round_up(specs[param].numel, ALIGN_NUMEL) for params in flats for param in params}
    costs = {param: whole.flops for param in numels if (whole := specs[param].whole) is not None}
    flat_of = {param: flat for flat, params in enumerate(flats) for param in params}
    room = [_fullest([numels[param] for param in params], ranks) for params in flats]
    filled = [[0] * ranks for _ in flats]
    nbytes, flops = [0] * ranks, [0.0] * ranks
    slack = OWNERS_DIFFER * sum(_state_bytes(specs[param]) for param in numels) / ranks
    found: dict[int, int] = {}
    for param in sorted(numels, key=lambda param: (-numels[param], -costs[param])):
        flat, numel = flat_of[param], numels[param]
        able = [rank for rank in range(ranks) if filled[flat][rank] + numel <= room[flat]]
        if not able:  # others of this flat lie so that what is left of the shards is in pieces
            able = [filled[flat].index(min(filled[flat]))]
        most = min(nbytes[rank] for rank in able) + (slack if costs[param] else 0)
        able = [rank for rank in able if nbytes[rank] <= most]
        owner = min(able, key=lambda rank: (flops[rank], nbytes[rank]))
        found[param] = owner
        filled[flat][owner] += numel
        nbytes[owner] += _state_bytes(specs[param])
        flops[owner] += costs[param]
    return found


def _fullest(numels: Iterable[int], ranks: int) -> int:
    """What the fullest rank has if each of these goes to the rank that has least, the largest first."""
    sizes = [0] * ranks
    for numel in sorted(numels, reverse=True):
        sizes[sizes.index(min(sizes))] += numel
    return max(sizes)


def _state_bytes(spec: ParamSpec) -> int:
    """The bytes of a parameter's master and of its states."""
    arrays = ((MASTER_ITEM_BYTES, 1), *(array for state in spec.states for array in state.form.arrays))
    return sum(itemsize * -(-spec.numel // block) for itemsize, block in arrays)


def _by_owner(
    specs: Sequence[ParamSpec], params: Sequence[int], owners: Mapping[int, int], ranks: int
) -> tuple[list[int], list[int], int]:
    """Lays out the parameters of a flat by their owners.

    Returns:
        The parameters in the order in which they lie, where each begins, and the end of all shards.
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for param in params:
        owned[owners[param]].append(param)
    laid = [_end_to_end(specs, mine) for mine in owned]
    shard = round_up(max(end for _, end in laid), ALIGN_NUMEL)
    offsets = [rank * shard + offset for rank, (mine, _) in enumerate(laid) for offset in mine]
    return [param for mine in owned for param in mine], offsets, ranks * shard


def _chunks_of(layout: Layout, shards: Iterable[tuple[Flat, int]], first: int) -> tuple[Chunk, ...]:
    """The chunks of these shards, each a flat and the rank that owns the shard, numbered from `first`."""
    chunks: list[Chunk] = []
    for flat, rank in shards:
        start, last = layout.shard_range(flat.index, rank)
        for begin, end in _cuts(layout, flat, start, last):
            pieces = tuple(pieces_between(flat, layout.specs, begin, end))
            if pieces:
                chunks.append(Chunk(first + len(chunks), flat.index, begin, end - begin, pieces))
    return tuple(chunks)


class Rows(NamedTuple):
    """Where a weight can be cut into tiles.

    Attributes:
        weight: its name.
        numels: by the number of each parameter that it is made of: the elements between two places where that can be
            cut. All of them are cut at the same places.
    """

    weight: str
    numels: Mapping[int, int]


def tiled(specs: Sequence[ParamSpec], weights: Iterable[Rows], tile_bytes: int, *, ranks: int = 1) -> list[ParamSpec]:
    """The specs, with tiles for each weight that can be tiled and is larger than `tile_bytes`.

    A tile has as many of the runs between two cuts as fit into `tile_bytes`, at least one of each rank's shard, and so
    many that the next tile of a trained parameter is aligned, as kernels want it. A weight with tiles becomes a unit of
    its own. Over ranks one has tiles only if each shard has equally many whole runs.

    Args:
        specs: the parameters.
        weights: those that can be tiled.
        tile_bytes: the most bytes of a tile; 0: no tiles.
        ranks: the number of ranks that the flats are sharded over.
    """
    made = list(specs)
    for weight, numels in weights if tile_bytes else ():
        parts = {number: specs[number] for number in numels}
        run_bytes = sum(numel * parts[number].dtype.itemsize for number, numel in numels.items())
        is_trained = not all(spec.is_frozen for spec in parts.values())
        least = (
            math.lcm(*(ALIGN_NUMEL // math.gcd(ALIGN_NUMEL, numel) for numel in numels.values())) if is_trained else 1
        )
        count = max(tile_bytes // (run_bytes * ranks * least), 1) * least
        nbytes = sum(spec.numel * spec.dtype.itemsize for spec in parts.values())
        is_even = ranks == 1 or not any(
            parts[number].numel % math.lcm(ranks * numel, ranks * ALIGN_NUMEL) for number, numel in numels.items()
        )
        is_part = all(ranks * count * numel < parts[number].numel for number, numel in numels.items())
        if nbytes > tile_bytes and is_part and is_even:
            for number, numel in numels.items():
                made[number] = replace(parts[number], unit=weight, tile=ranks * count * numel)
    return made


class _FlatKey(NamedTuple):
    """What is the same of all parameters of a flat; see Flat."""

    is_frozen: bool
    unit: str
    dtype: torch.dtype
    states: tuple[StateKind, ...]
    is_whole: bool
    tiled: int | None  # the number of a parameter that has tiles, which is alone in its flat


def _by_unit_and_dtype(specs: Sequence[ParamSpec]) -> Iterator[tuple[_FlatKey, list[int]]]:
    """The numbers of the parameters of each flat: what is trained first, then what is frozen.

    Units are in the order of their first appearance, and so are the flats within a unit.
    """
    units: dict[tuple[bool, str], dict[_FlatKey, list[int]]] = {}
    for number, spec in enumerate(specs):
        states, is_whole = ((), False) if spec.is_frozen else (spec.states, spec.whole is not None)
        key = _FlatKey(spec.is_frozen, spec.unit, spec.dtype, states, is_whole, number if spec.tile else None)
        units.setdefault((spec.is_frozen, spec.unit), {}).setdefault(key, []).append(number)
    for parts in units.values():
        yield from parts.items()


def _cuts(layout: Layout, flat: Flat, start: int, last: int) -> Iterator[tuple[int, int]]:
    """Cuts elements `start` to `last` of a flat into chunks.

    The squares of gradients are summed over blocks of SUM_BLOCK elements of a parameter. With one rank, a chunk with
    room for a block ends where a block ends. So a sum needs one chunk.
    """
    if flat.is_whole:
        yield from _whole_cuts(layout, flat, start, last)
        return
    ends_at_blocks = _ends_at_blocks(layout)
    tile, first = layout.tile_of(flat.index) // layout.ranks, start
    while start < last:
        stop = min(start + layout.chunk_numel, last)
        begin = flat.offsets[bisect(flat.offsets, stop) - 1]  # of the blocks; a tile has its own, and chunks of its own
        if tile:
            begin = start - (start - first) % tile
            stop = min(stop, begin + tile)
        if ends_at_blocks and stop < min(last, begin + tile if tile else last):
            stop -= (stop - begin) % SUM_BLOCK
        yield start, stop
        start = stop


def _whole_cuts(layout: Layout, flat: Flat, start: int, last: int) -> Iterator[tuple[int, int]]:
    """Cuts elements `start` to `last` of a whole flat between parameters, or slices: as many as fit, at least one."""
    begin = end = start
    for param, offset in zip(flat.params, flat.offsets, strict=True):
        spec = layout.specs[param]
        if not start <= offset < last:
            continue
        for first in range(offset, offset + spec.numel, _inseparable(layout, spec)):
            stop = min(first + _inseparable(layout, spec), offset + spec.numel)
            if begin < end and stop - begin > layout.chunk_numel:
                yield begin, end
                begin = first
            end = stop
    if begin < end:
        yield begin, end


def _inseparable(layout: Layout, spec: ParamSpec) -> int:
    """The elements of a whole parameter that are in one chunk: all, or slices that end where blocks of a sum may."""
    if spec.whole is None or not spec.whole.has_slices:
        return max(spec.numel, 1)
    return math.lcm(spec.whole.part_numel, SUM_BLOCK if _ends_at_blocks(layout) else ALIGN_NUMEL)


def _ends_at_blocks(layout: Layout) -> bool:
    """Whether chunks end where blocks of a sum of squares end."""
    return layout.ranks == 1 and layout.chunk_numel >= SUM_BLOCK


def pieces_between(flat: Flat, specs: Sequence[ParamSpec], start: int, stop: int) -> Iterator[Piece]:
    """What lies in elements `start` to `stop` of `flat`; `chunk_offset` counts from `start`."""
    for param, offset in zip(flat.params, flat.offsets, strict=True):
        first, last = max(start, offset), min(stop, offset + specs[param].numel)
        if first < last:
            yield Piece(param, first - offset, first - start, last - first)


def segments(chunk: Chunk, key: Callable[[int], Key | None]) -> list[Segment[Key]]:
    """The runs of pieces of a chunk that share a key.

    A gap between two parameters of one key belongs to their segment. It is calculated along, on zeros, and never read:
    that is cheaper than one more call.

    Args:
        chunk: the chunk.
        key: the key of a parameter, by its number; None: no part of it belongs to a segment.
    """
    runs: list[Segment[Key]] = []
    for this, group in groupby(chunk.pieces, lambda piece: key(piece.param)):
        if this is not None:
            pieces = list(group)
            runs.append(Segment(this, pieces[0].chunk_offset, pieces[-1].chunk_offset + pieces[-1].numel))
    return runs
