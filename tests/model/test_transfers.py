"""Units between store and device: random uses, failures and interrupts, against a model of the table in unit.py.

Below UnitTransfers all is fake: a store with few buffers, memory that is NaN until it was copied to, a copier that
copies as late as it may. So what is tested is which transition is made, what holds after it, and that no lease is lost.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from offload.devices.copies import DONE, DeviceEvent
from offload.errors import TierIOError
from offload.layout import Chunk, Layout, ParamSpec, build
from offload.model.policy import Ahead
from offload.model.transfer import TransferLimits, UnitTransfers
from offload.model.unit import Presence, Unit, Units
from offload.profiling import Timeline
from offload.storage.chunk_cache import Use
from tests.support.interrupted import interrupt, interrupted_at, thrown_in
from tests.support.late_copier import LateCopier

BUFFERS = 3
RELEASED, FETCHING, UPDATING, AVAILABLE = Presence


def layout() -> Layout:
    """Units with one, with several and with frozen chunks, of two dtypes, and a weight in three tiles."""
    bf16, fp32 = torch.bfloat16, torch.float32
    specs = [
        ParamSpec("embed", 300, "", bf16, 0),
        ParamSpec("block.up", 2500, "block", bf16, 0),
        ParamSpec("block.norm", 7, "block", fp32, 0),
        ParamSpec("head", 4000, "head", bf16, 0, tile=1500),
        ParamSpec("block.base", 1500, "block", bf16, None),
    ]
    return build(specs, 1024)


class FewBuffers:
    """A store whose chunks are leased in `BUFFERS` buffers. What a buffer held is NaN when its lease ends."""

    def __init__(self, made: Layout) -> None:
        self.values = {chunk.index: torch.zeros(chunk.numel) for chunk in made.param_chunks}
        self.dtypes = {chunk.index: made.flats[chunk.flat].dtype for chunk in made.param_chunks}
        self.leased: dict[int, int] = {}  # how many leases of a chunk there are
        self.fails_after: int | None = None
        self.give_back: Callable[[int], None]

    def when_wanted(self, give_back: Callable[[int], None]) -> None:
        self.give_back = give_back

    def are_together(self, one: int, other: int) -> bool:
        return True

    @contextmanager
    def lease(self, chunk: int, use: Use, *, step: int) -> Iterator[Any]:
        assert use is Use.READ
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise TierIOError("read", errno.EIO, "swap", 0, 0, "a test's disk")
        while chunk not in self.leased and len(self.leased) >= BUFFERS:
            before = len(self.leased)
            self.give_back(chunk)
            assert len(self.leased) < before, "nobody gives a buffer back"
        array = self.values[chunk].to(self.dtypes[chunk])
        self.leased[chunk] = self.leased.get(chunk, 0) + 1
        try:
            yield SimpleNamespace(arrays=[array])
        finally:
            self.leased[chunk] -= 1
            if not self.leased[chunk]:
                del self.leased[chunk]
            array.fill_(float("nan"))

    def write(self, chunk: int, values: Tensor) -> None:
        """What a lease for an update does: it waits for those that read."""
        while chunk in self.leased:
            self.give_back(chunk)
        self.values[chunk] = values


class Memory:
    """The parameters of a model: memory for each slice of its layout, NaN whenever a unit gets or loses it."""

    def __init__(self, made: Layout) -> None:
        self.layout, self.units = made, Units(made, range(len(made.flats)))
        self.flats = [torch.empty(flat.numel, dtype=flat.dtype) for flat in made.flats]
        self._tiles = {one.index: torch.empty(one.numel, dtype=self.flats[one.flat].dtype) for one in made.slices}
        self.given: set[Unit] = set()
        self.versions: set[Unit] = set()
        self.torn: set[Unit] = set()  # what was thrown in may have cut them off half-way, until they get memory again
        for unit in self.units.values():
            self._poison(unit)

    def memory_of(self, index: int) -> Tensor:
        return self.flats[index] if index < len(self.flats) else self._tiles[index]

    def allocate(self, unit: Unit) -> DeviceEvent:
        assert unit not in self.given or unit in self.torn
        self.torn.discard(unit)
        self.versions.discard(unit)
        self.given.add(unit)
        self._poison(unit)
        return DONE

    def free(self, unit: Unit) -> DeviceEvent:
        self.versions.discard(unit)
        self.given.discard(unit)
        self._poison(unit)
        return DONE

    def return_versions(self, unit: Unit) -> None:
        self.versions.add(unit)

    def flat_streams(self, flat: int) -> bool:
        return True

    def _poison(self, unit: Unit) -> None:
        for one in unit.slices:
            self.memory_of(one.index).fill_(float("nan"))


class Traffic(RuleBasedStateMachine):
    """Each rule states what it makes of the presence of a unit; the invariants, what holds in each presence."""

    @initialize(seed=st.integers(0, 1000), is_direct=st.booleans(), leases=st.integers(1, BUFFERS))
    def begin(self, seed: int, is_direct: bool, leases: int) -> None:
        made = layout()
        self.copier = LateCopier(seed)
        self.copier.direct = is_direct
        self.store, self.memory = FewBuffers(made), Memory(made)
        self.versions = 0
        for chunk in made.param_chunks:
            self.store.values[chunk.index] = self.new_values(chunk)
        timeline = Timeline()
        run: Any = SimpleNamespace(memory=SimpleNamespace(param_copier=self.copier), timeline=timeline, comm=None)
        owner: Any = SimpleNamespace(require_usable=lambda: None, step=lambda: 1)
        store: Any = self.store
        memory: Any = self.memory
        gathers: Any = None  # one rank
        self.transfers = UnitTransfers(run, memory, store, owner, gathers, TransferLimits(leases, Ahead(1)))
        self.expected = dict.fromkeys(self.transfers.units, RELEASED)
        self.to_update: dict[Unit, list[Chunk]] = {}  # of updates that have begun

    def new_values(self, chunk: Chunk) -> Tensor:
        self.versions += 1
        return torch.arange(chunk.numel).remainder(61) + self.versions * 64

    def unit(self, number: int) -> Unit:
        return self.transfers.units[number % len(self.transfers.units)]

    # Uses.

    numbers = st.integers(0, 20)

    @rule(number=numbers)
    def fetch(self, number: int) -> None:
        unit = self.unit(number)
        if unit not in self.to_update:
            if unit.is_missing:
                self.tiles_arrive(unit)
            self.transfers.fetch(unit)
            self.expected[unit] = AVAILABLE

    @rule(number=numbers)
    def prefetch(self, number: int) -> None:
        unit = self.unit(number)
        if unit.is_missing and unit not in self.to_update:
            self.transfers.prefetch([unit])
            self.expected[unit] = FETCHING
            self.tiles_arrive(unit)

    def tiles_arrive(self, unit: Unit) -> None:
        """Tiles on their way arrive before their weight is read as a whole."""
        for other, presence in self.expected.items():
            if other.weight is unit and presence is FETCHING:
                self.expected[other] = AVAILABLE

    @rule(number=numbers)
    def release(self, number: int) -> None:
        unit = self.unit(number)
        if unit not in self.to_update:
            self.transfers.release(unit)
            self.expected[unit] = RELEASED

    @rule()
    def drain(self) -> None:
        self.transfers.drain()
        assert not self.store.leased

    # Updates.

    @rule(number=numbers)
    def begin_update(self, number: int) -> None:
        unit = self.unit(number)
        if unit in self.to_update or unit.weight is not None:
            return
        if self.transfers.can_begin_update(unit):
            assert self.copier.direct
            self.transfers.begin_update(unit)
            self.expected[unit] = UPDATING
        flats = self.memory.layout.flats
        self.to_update[unit] = [
            chunk for chunks in unit.chunks.values() for chunk in chunks if not flats[chunk.flat].is_frozen
        ]

    @rule(count=st.integers(1, 5))
    @precondition(lambda self: self.to_update)
    def update_chunks(self, count: int) -> None:
        """Chunks get new values in their order; after the last one of a flat parameter its unit is told."""
        unit, chunks = next(iter(self.to_update.items()))
        for _ in range(min(count, len(chunks))):
            chunk = chunks.pop(0)
            values = self.new_values(chunk)
            self.store.write(chunk.index, values)
            self.transfers.chunk_updated(chunk, values.to(self.store.dtypes[chunk.index]))
            if not any(other.flat == chunk.flat for other in chunks):
                self.transfers.flat_updated(chunk.flat)
                if self.expected[unit] is FETCHING:
                    self.expected[unit] = AVAILABLE
                self.tiles_arrive(unit)
        if not chunks:
            del self.to_update[unit]

    # Failures.

    @rule(number=numbers, after=st.integers(0, 3))
    def disk_fails(self, number: int, after: int) -> None:
        unit = self.unit(number)
        if unit in self.to_update or not unit.is_missing:
            return
        self.store.fails_after = after
        with suppress(TierIOError):
            self.transfers.prefetch([unit])
            after = -1
        self.store.fails_after = None
        self.expected[unit] = FETCHING if after == -1 else RELEASED
        self.tiles_arrive(unit)

    @rule(
        number=numbers,
        at=st.integers(1, 25) | st.integers(26, 150),
        by=st.sampled_from([interrupt, thrown_in]),
        call=st.integers(0, 3),
    )
    def interrupts(self, number: int, at: int, by: Callable[[], None], call: int) -> None:
        """Afterwards the unit is as it was, or as the call makes it, or what was begun is undone."""
        unit = self.unit(number)
        if unit in self.to_update:
            return
        before = self.expected[unit]
        calls: list[tuple[Callable[[], object], set[Presence]]] = [
            (lambda: self.transfers.fetch(unit), {before, FETCHING, AVAILABLE, RELEASED}),
            (lambda: self.transfers.prefetch([unit]), {before, FETCHING, RELEASED}),
            (lambda: self.transfers.release(unit), {before, RELEASED}),
            (lambda: self.transfers.drain(), {before}),
        ]
        run, possible = calls[call]
        if call == 1 and not unit.is_missing:
            return
        with suppress(KeyboardInterrupt), interrupted_at(at, by):
            run()
        assert unit.presence in possible
        for other in self.expected:
            if other is unit or other.weight is unit:
                self.expected[other] = other.presence
                self.memory.torn |= {other} if by is thrown_in else set()

    # What holds.

    @invariant()
    def it_is_as_the_table_says(self) -> None:
        for unit, presence in self.expected.items():
            assert unit.presence is presence, unit
            assert not unit.not_updated or presence is UPDATING, unit
            assert presence is RELEASED or unit in self.memory.given, unit
            assert presence is not AVAILABLE or unit in self.memory.versions, unit
            if unit not in self.memory.torn:
                assert (unit in self.memory.given) is (presence is not RELEASED), unit
                assert (unit in self.memory.versions) is (presence is AVAILABLE), unit
                assert (unit in self.transfers.with_memory) is (presence is not RELEASED), unit
        assert sum(self.store.leased.values()) == len(self.transfers._uploads)

    @invariant()
    def what_is_available_has_the_values_of_the_store(self) -> None:
        for unit in self.expected:
            if unit.is_here and unit not in self.to_update and (unit.weight not in self.to_update):
                self.compare(unit)

    @invariant()
    def nothing_is_copied_to_memory_that_was_taken(self) -> None:
        for unit, presence in self.expected.items():
            if presence is RELEASED and unit not in self.memory.torn:
                assert all(self.memory.memory_of(one.index).isnan().all() for one in unit.slices), unit

    def compare(self, unit: Unit) -> None:
        for one in unit.slices:
            memory = self.memory.memory_of(one.index)
            for chunk in unit.chunks[one.index]:
                start = chunk.start - one.start
                there = memory[start : start + chunk.numel]
                assert torch.equal(there, self.store.values[chunk.index].to(there.dtype)), (unit, chunk.index)

    def teardown(self) -> None:
        if hasattr(self, "transfers"):
            for unit, chunks in list(self.to_update.items()):
                while unit in self.to_update:
                    self.update_chunks(len(chunks) or 1)
            for unit in self.transfers.units:
                self.transfers.fetch(unit)
                self.compare(unit)
            self.transfers.abandon()
            assert not self.store.leased
            assert all(unit.presence is RELEASED for unit in self.transfers.units)
            assert self.memory.given <= self.memory.torn


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
