"""A unit of a held model, and the only place where its presence on the device changes.

[Note: presence of a unit]
`Unit` alone assigns `presence`. These are the transitions, and any other raises StateError. The thread that makes one
holds the lock of the run's entries (entries.py). A unit none of whose parameters stream is AVAILABLE for ever.

1. `fetch`, RELEASED to FETCHING. Before: only the store has its values. After: it has memory, to which they are copied.
2. `expect_update`, RELEASED to UPDATING. Before: the store has old values. After: it has memory, to which each chunk is
   copied as its new values are made; `not_updated` are the chunks to come.
3. `fetch`, UPDATING to FETCHING. Before: the update is applied. After: the chunks that it did not bring are copied from
   the store.
4. `arrive`, FETCHING to AVAILABLE. Before: what is queued from now on sees its values. After: its parameters have their
   versions, and its modules can run.
5. `release`, any to RELEASED. Before: the store has its values, and nobody uses it. After: its memory goes, when the
   device has done what is queued.

        expect_update            fetch
        ┌────────────▶ UPDATING ──────┐
        │                             ▼
    RELEASED ─────── fetch ──────▶ FETCHING ── arrive ──▶ AVAILABLE
        ▲                             │                       │
        └──────────── release ────────┴───────────────────────┘   (also from UPDATING)

transfer.py makes the copies and calls these methods; policy.py says for which units, fetch.py when. `forwards` is
counted by running.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum

from offload.errors import StateError
from offload.layout import Chunk, Flat, FlatSlice, Layout, starts_of
from offload.model.units import ROOT, encloses
from offload.ranks.communicator import Work


class Presence(Enum):
    """Where the values of a unit's streamed parameters are; see [Note: presence of a unit]."""

    RELEASED = "released"
    FETCHING = "being fetched"
    UPDATING = "being updated"
    AVAILABLE = "available"


_TRANSITIONS = {
    Presence.RELEASED: {Presence.FETCHING, Presence.UPDATING},
    Presence.UPDATING: {Presence.FETCHING, Presence.RELEASED},
    Presence.FETCHING: {Presence.AVAILABLE, Presence.RELEASED},
    Presence.AVAILABLE: {Presence.RELEASED},
}


@dataclass(eq=False)
class Unit:
    """The modules whose parameters are fetched and released together, or one tile of a weight.

    Attributes:
        name: as the model's modules have it, "" for the root unit; that of a tile ends in its number, "[0]".
        weight: of a tile, the unit of its weight; None of other units.
        flats: its flat parameters; none of a tile.
        slices: what of them streams: whole flat parameters, or the tile's part of each of its weight's.
        chunks: of each slice, by its index.
        params: the numbers of its parameters. A tile has none.
        streamed: those of them that stream.
        watched: those of them that are plain while its forward runs; the others are tiled.
        nbytes: bytes that it takes on the device while it is not released.
        presence: see [Note: presence of a unit].
        not_updated: while it is UPDATING, the chunks whose new values are not made yet.
        gathers: all-gathers of its values that are under way, over ranks that share parameters.
        forwards: how many forwards of its modules run, in any thread.
        guests: units whose parameters its forward used.
        stays: whether it stays on the device when it is not in use; see [Note: units that stay] in policy.py.
        is_in_ram: whether it is a tiled weight that is in RAM as a whole, since the device has no room for that.
    """

    name: str
    weight: Unit | None = None
    flats: tuple[Flat, ...] = ()
    slices: tuple[FlatSlice, ...] = ()
    chunks: dict[int, tuple[Chunk, ...]] = field(default_factory=dict)
    params: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    watched: frozenset[int] = frozenset()
    nbytes: int = 0
    presence: Presence = Presence.AVAILABLE
    not_updated: set[int] = field(default_factory=set)
    gathers: list[Work] = field(default_factory=list)
    forwards: int = 0
    guests: dict[Unit, None] = field(default_factory=dict)
    stays: bool = False
    is_in_ram: bool = False

    def __post_init__(self) -> None:
        if self.slices:
            self.presence = Presence.RELEASED

    def __repr__(self) -> str:
        return f"<Unit {self.name or 'root'}, {self.presence.value}>"

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name or "the root unit"

    @property
    def is_root(self) -> bool:
        """Whether it has all parameters that no other unit has."""
        return self.name == ROOT

    @property
    def is_frozen(self) -> bool:
        """Whether no step changes what of it streams. A tile counts as trained."""
        frozen = {flat.index for flat in self.flats if flat.is_frozen}
        return all(one.flat in frozen for one in self.slices)

    @property
    def home(self) -> Unit:
        """The unit whose update brings its new values: that of its weight, or itself."""
        return self.weight or self

    @property
    def is_here(self) -> bool:
        """Whether its parameters can be used."""
        return self.presence is Presence.AVAILABLE

    @property
    def is_coming(self) -> bool:
        """Whether it has memory, and its values are on their way there."""
        return self.presence in (Presence.FETCHING, Presence.UPDATING)

    @property
    def is_missing(self) -> bool:
        """Whether somebody has to fetch it before it arrives."""
        return self.presence in (Presence.RELEASED, Presence.UPDATING)

    @property
    def chunk_numbers(self) -> set[int]:
        """Those of all its chunks."""
        return {chunk.index for chunks in self.chunks.values() for chunk in chunks}

    @property
    def to_copy(self) -> list[tuple[FlatSlice, Chunk]]:
        """What a fetch has to copy from the store: all of its chunks, or what an update did not bring of them."""
        wanted = self.not_updated if self.presence is Presence.UPDATING else self.chunk_numbers
        return [(one, chunk) for one in self.slices for chunk in self.chunks[one.index] if chunk.index in wanted]

    def slice_of(self, flat: int) -> FlatSlice:
        """Its slice of a flat parameter, of which it has one."""
        return next(one for one in self.slices if one.flat == flat)

    def encloses(self, other: Unit) -> bool:
        """Whether another unit is this one or lies in it."""
        return encloses(self.name, other.name)

    # Transitions.

    def fetch(self) -> None:
        """Transitions 1 and 3."""
        self._become(Presence.FETCHING)
        self.not_updated = set()

    def expect_update(self) -> None:
        """Transition 2."""
        self._become(Presence.UPDATING)
        self.not_updated = self.chunk_numbers

    def arrive(self) -> None:
        """Transition 4."""
        self._become(Presence.AVAILABLE)

    def release(self) -> None:
        """Transition 5."""
        self._become(Presence.RELEASED)
        self.not_updated = set()

    def _become(self, presence: Presence) -> None:
        """Makes a transition.

        Raises:
            StateError: if there is none to that state.
        """
        if presence not in _TRANSITIONS[self.presence] or not self.slices:
            raise StateError(f"{self.title} is {self.presence.value} and cannot become {presence.value}")
        self.presence = presence


class Units(dict[str, Unit]):
    """The units of a held model, by name. The unit of any other name has no parameters.

    Args:
        layout: of all held parameters.
        streamed: the flat parameters whose memory comes and goes.
        staying: names of units that stay on the device.
        in_ram: names of tiled weights that are in RAM as a whole.
    """

    def __init__(
        self,
        layout: Layout,
        streamed: Container[int] = (),
        staying: Container[str] = (),
        in_ram: Container[str] = (),
    ) -> None:
        super().__init__()
        of_flat: dict[int, list[Chunk]] = {flat.index: [] for flat in layout.flats}
        for chunk in layout.param_chunks:
            of_flat[chunk.flat].append(chunk)
        flats: dict[str, list[Flat]] = {}
        slices: dict[str, list[FlatSlice]] = {}
        for flat in layout.flats:
            flats.setdefault(flat.unit, []).append(flat)
        for one in layout.slices:
            if one.flat in streamed:
                slices.setdefault(one.unit, []).append(one)
        for name in dict.fromkeys((*flats, *slices)):
            own, parts = tuple(flats.get(name, ())), tuple(slices.get(name, ()))
            self[name] = Unit(
                name,
                weight=None if own else self[layout.flats[parts[0].flat].unit],
                flats=own,
                slices=parts,
                chunks={one.index: _chunks_in(layout, one, of_flat[one.flat]) for one in parts},
                params=_params_of(own),
                streamed=_params_of(flat for flat in own if flat.index in streamed),
                watched=frozenset(_params_of(flat for flat in own if not layout.tile_of(flat.index))),
                nbytes=0 if name in in_ram else _bytes_of(layout, parts),
                stays=name in staying,
                is_in_ram=name in in_ram,
            )

    def __missing__(self, name: str) -> Unit:
        self[name] = unit = Unit(name)
        return unit


def _params_of(flats: Iterable[Flat]) -> tuple[int, ...]:
    return tuple(number for flat in flats for number in flat.params)


def _chunks_in(layout: Layout, one: FlatSlice, chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    if not one.is_tile:
        return tuple(chunks)
    shard, stop = layout.shard_numel(one.flat), one.start + one.numel // layout.ranks
    return tuple(chunk for chunk in chunks if one.start <= chunk.start % shard < stop)


def _bytes_of(layout: Layout, slices: Iterable[FlatSlice]) -> int:
    return starts_of(one.numel * layout.flats[one.flat].dtype.itemsize for one in slices)[1]
