"""Where the bytes go, computed before anything is allocated, from the same layout and sizes that training runs on.

With `tier="cpu"` every chunk is resident in RAM. With `tier="nvme"` as many are resident as the budget has room for,
beside the buffers that the others stream through: one computation with different budgets. With `tier="device"` all that
would be in RAM is on the device, and in RAM are only the buffers through which commits go. With the other tiers a share
is on the device: [Note: states on the device]
Where `device_memory` leaves room, states stay on the device with their gradients, those of whole units. They are
stepped there, so neither gradients nor new parameters go over the link, and nothing of them over the disk. Where
parameters stream, new ones go to RAM instead of gradients, so only states that would be on the disk are there, and
share.py says whether they come before units that stay. The units are the first ones in the order of the model: a
forward needs them first, before the CPU has stepped the others, and a backward makes their gradients last, when nothing
is left beside which they could leave. One that does not fit is left out, and the next ones are tried. So are experts
whose steps may be late: states of those without tokens are not moved anyway. Over several ranks the states of a unit
are on the devices of all of them, each with its own shard, or of none: a bucket of gradients goes one way on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from offload.choices import Choice
from offload.errors import BudgetError, ConfigError
from offload.grads import local as gradients
from offload.grads.reduction_plan import TRAVELLING, ReductionPlan
from offload.grads.shards import dtypes_of as gradient_dtypes
from offload.grads.shards import gradient_slot_arrays
from offload.layout import MASTER, Layout, ParamSpec, is_dithered, starts_of
from offload.model import transfer
from offload.model.units import ROOT
from offload.native.torch_kernels import dithered_bytes, dithered_room, scratch_bytes
from offload.optim import late, new_params, on_device, trials
from offload.planner.machine import free_memory
from offload.planner.share import states_come_first
from offload.ranks import exchange
from offload.regions import REST, Region, lent_bytes, total_bytes, total_of
from offload.sizes import MASTER_ITEM_BYTES, MIB, PAGE_BYTES, format_bytes, option_bytes, round_up
from offload.storage.policy import residents
from offload.storage.pool import LEAST_IN_FLIGHT, Pool, kinds_held
from offload.storage.room import MANIFEST, RECORD, SPARES, manifest_bytes, record_bytes
from offload.storage.slot_map import ChunkKind, SlotMap
from offload.storage.swap_format import (
    SlotArrays,
    param_slot_arrays,
    state_slot_arrays,
)
from offload.tiers import CPU, DEVICE, NVME, TIERS, Tier

IN_FLIGHT = 4
"""How many buffers streamed chunks have if the budget allows: one more than the least, so that a late write delays no
read."""

ACTIVATION_SHARE = 4
"""If `activation_memory` is not given, activations get one part in so many of the RAM that is left.

Those that a region on the device has no room for get no more than that."""
LEAST_ACTIVATION_BYTES = 16 * MIB
"""The least that activations get if `activation_memory` is not given."""
UNITS_ON_THE_WAY = 4
"""RAM has room for the inputs of so many units on their way to and from the files: two move, and two are in use."""

TYPICAL_TBW = 600e12
"""How many bytes may be written to a common 1 TB consumer drive under its warranty."""

ACTIVATIONS, SPILLED = "activations", "activations that the device has no room for"
SCRATCH = "temporaries of kernels"
TEMPORARIES = "temporaries of steps that torch runs"
LOSS = "gradients of an output layer, from the forward to the backward"
TOKEN_SUMS = "gradients of a module in tiles of tokens"
SUPERBLOCK, SECOND = "superblock", "second slots, for commits"
BASE = "kept base, which other runs may share"
TRIED_SLOTS = "slots for steps that are tried"
SLOTS = "slots"
"""The kind of slots that are there for commits only."""
ARRAYS = {ChunkKind.PARAMS: "param", ChunkKind.GRADS: "grad", ChunkKind.FROZEN: "frozen"}
"""The kind of the only array in a slot that is not of states, as plans call it."""

_MASTERS_OF_HALF = ", whose values fp32 masters begin with"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Placement:
    """Bytes by tier, fixed before the first step.

    Attributes:
        choice: what was decided.
        is_direct: whether the model's device is the CPU.
        regions: what the parts of a run reserve in RAM, on the device and on the disk.
        arrays: the arrays of each chunk, by kind.
        slots: which of the chunks have slots on the disk, and the numbers of these.
        pools: the pools of the chunks, by kind, of those kinds that have some: see `Needs.pools`, and the states'.
        device_flats: the flat parameters whose states and gradients are on the device while those of others are not.
        budget_bytes: the most bytes that may be held in RAM.
        device_budget_bytes: the most bytes that may be held on the device; None: any number.
        device_memory: the option, in bytes; None: it was not given.
        model_bytes: the most that parameters and buffers of the model take on the device at once.
        resident_bytes: the part of `model_bytes` for frozen parameters that stay there, and for buffers.
        streamed_bytes: the part of `model_bytes` for units that stream.
        staying: the names of streamed units that stay on the device between two uses, see [Note: units that stay].
        tiled_in_ram: the names of tiled weights that are in RAM where an operation needs all of one.
        read_bytes: what a step reads from the disk.
        written_bytes: what a step writes to the disk.
        held_bytes: what this rank holds of each state kind, on any tier, gaps between parameters included.
        uses_disk: whether a step waits for a disk; of ranks that share parameters, that of any rank.
    """

    choice: Choice
    is_direct: bool
    regions: Sequence[Region]
    arrays: Mapping[ChunkKind, Sequence[SlotArrays]]
    slots: SlotMap
    pools: Mapping[ChunkKind, Pool]
    device_flats: frozenset[int]
    budget_bytes: int
    device_budget_bytes: int | None
    device_memory: int | None
    model_bytes: int
    resident_bytes: int
    streamed_bytes: int
    staying: frozenset[str]
    tiled_in_ram: frozenset[str]
    read_bytes: int
    written_bytes: int
    held_bytes: Mapping[str, int]
    uses_disk: bool

    @property
    def states(self) -> Pool:
        """The pool in which the states wait for the step."""
        return self.pools[ChunkKind.STATES]

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes that this library holds in RAM."""
        return total_bytes(self.regions, CPU)

    def temporary_bytes(self, tier: Tier) -> int:
        """Bytes on a tier that are not reserved, and taken by torch for a while."""
        return total_bytes(self.regions, tier) - lent_bytes(self.regions, tier)

    @cached_property
    def slab_bytes(self) -> int:
        """Bytes that this library takes on the device beside the model.

        With tier="device" these are for states, gradients and what works on them. Else they are for the buffers of
        collectives and for activations, if the device has memory of its own.
        """
        return total_bytes(self.regions, DEVICE)

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of the swap files, and of what commits write beside them."""
        return total_bytes(self.regions, NVME)

    @property
    def device_bytes(self) -> int:
        """The most that the device holds at once, without what batches add."""
        return self.model_bytes + self.slab_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations, on all tiers."""
        return total_of(self.regions, (ACTIVATIONS, SPILLED))

    @cached_property
    def commit_bytes(self) -> int:
        """Bytes that a commit writes beside those that steps write: of chunks that stay in RAM or on the device."""
        tiers, nbytes = tiers_of(self.choice), 0
        for kind, pool in self.pools.items():
            stay, streams = pool.resident | pool.on_device, tiers[kind].is_durable
            committed = self.slots.committed_chunks(kind)
            nbytes += sum(pool.sizes[chunk] for chunk in committed if chunk in stay or not streams)
        return nbytes

    @property
    def worn_bytes(self) -> float:
        """Bytes that a step writes to the disk, with its share of a commit. Activations are not known, nor counted."""
        every = self.choice.commits.every
        return self.written_bytes + (self.commit_bytes / every if every else 0)

    def life_steps(self, endurance: float | None = None) -> float | None:
        """After how many steps drives have been written as much as their warranty covers; None: never.

        Args:
            endurance: the bytes that it covers; None: those of a common drive.
        """
        covered = TYPICAL_TBW if endurance is None else endurance
        return covered / self.worn_bytes if self.worn_bytes else None

    def describe(
        self,
        layout: Layout,
        paths: Sequence[Path],
        given: Collection[torch.dtype],
        unquantised: tuple[int, Sequence[str]] = (0, ()),
    ) -> str:
        """The placement in one line, for people.

        Args:
            layout: of all parameters that are trained or stream.
            paths: the directories of the swap files, in their order.
            given: the dtypes that the trained parameters had in the model.
            unquantised: bytes and names of what a quantised base has in 16 or 32 bits.
        """
        choice = self.choice
        dtype = _DTYPES[choice.model.compute_dtype]
        if others := [name for one, name in _DTYPES.items() if one in given and one is not choice.model.compute_dtype]:
            dtype += f" (given in {' and '.join(others)}{_MASTERS_OF_HALF if torch.float16 in given else ''})"
        at_most = "" if self.device_memory is None else f" of {format_bytes(self.device_memory)} allowed"
        if at_most and self.is_direct:
            at_most += " (on a CPU what stays there saves nothing)"
        where = "" if choice.params.tier == DEVICE else f", streamed from {choice.params.tier.words}"
        if choice.states.tier == DEVICE and where:
            where = ", gathered from the ranks"
        tiled = len({spec.unit for spec in layout.specs if spec.tile})
        if self.staying:
            units = {one.unit for one in layout.slices if not one.is_tile}
            where += f", {len(self.staying)} of {len(units)} units stay on the device"
        where += f", {tiled} layers run in tiles of {format_bytes(choice.params.tile_bytes)}" if tiled else ""
        where += f", gradients {choice.grads.tier.where}" if choice.grads.tier.is_durable else ""
        if choice.activations.tier:
            where += f", activations {choice.activations.tier.where}"
        return (
            f"offload: {layout.trained.numel:,} parameters in {dtype}{where}; "
            f"{self._frozen(layout)}{in_words(*unquantised)}"
            f"peak on the device {format_bytes(self.device_bytes)}{at_most}; "
            f"peak RAM {format_bytes(self.arena_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"{self._states()}{self._forms(layout)}{self._files(paths)}"
        )

    def _states(self) -> str:
        """In words: where fp32 masters and moments are."""
        chunks, there = len(self.states.sizes), len(self.states.on_device)
        beside = f", {there} stay on the device" if there else ""
        if self.states.streamed:
            tried = ", stepped in backward" if self.choice.states.tries_steps else ""
            return f"{len(self.states.streamed)} of {chunks} chunks of optimizer states stream from NVMe{tried}{beside}"
        if 0 < there < chunks:
            return f"optimizer states stay in RAM ({chunks - there} of {chunks} chunks) and on the device ({there})"
        where = DEVICE.where if there else CPU.where
        return f"optimizer states stay {where} ({chunks} {'chunk' if chunks == 1 else 'chunks'})"

    def _forms(self, layout: Layout) -> str:
        """In words: in which form states are, and of how many parameters not."""
        form, trained = self.choice.states.form, [spec for spec in layout.specs if not spec.is_frozen]
        if form == "fp32":
            return ""
        exact = sum(not is_dithered(spec.states) for spec in trained)
        kept = f", those of {exact} of {len(trained)} parameters in fp32, for their optimizer has no other form"
        return f" in {form}{kept if exact else ''}"

    def _files(self, paths: Sequence[Path]) -> str:
        """In words: what the disk has, and what moves in a step."""
        if not paths:
            return ""
        moved = f"{format_bytes(self.read_bytes)} read and {format_bytes(self.written_bytes)} written a step, "
        if not (self.read_bytes or self.written_bytes):
            moved = "nothing moves in a step, "
        every = {None: "nothing is committed", 0: "a commit when commit() is called", 1: "a commit after each step"}
        steps = self.choice.commits.every
        commits = every.get(steps, f"a commit every {steps} steps")
        where = " and ".join(map(str, paths))
        return f"; {format_bytes(self.disk_bytes)} in {where}: {moved}{commits}{self._wear(len(paths))}"

    def _wear(self, drives: int) -> str:
        """In words: how long common drives last, so many."""
        steps = self.life_steps()
        if steps is None:
            return ""
        tb, last = f"{TYPICAL_TBW / 1e12:.0f} TB", life_in_words(steps)
        lasts = f"a drive warranted for {tb} lasts" if drives == 1 else f"drives warranted for {tb} together last"
        tier = self.choice.activations.tier
        return f", so {lasts} {last}{' (activations not counted)' if tier and tier.is_durable else ''}"

    def _frozen(self, layout: Layout) -> str:
        """In words: which frozen parameters stream, and which stay on the device."""
        choice = self.choice
        stays = f"{format_bytes(self.resident_bytes)} of other parameters and buffers stay on the device; "
        if choice.params.frozen_tier == DEVICE:
            return stays if choice.params.has_frozen else ""
        frozen = [spec for spec in layout.specs if spec.is_frozen]
        nbytes = sum(spec.numel * spec.dtype.itemsize for spec in frozen)
        kept = trained_bytes(layout) if choice.params.tier == DEVICE else 0
        also = f"{format_bytes(kept)} of trained parameters and " if kept else ""
        in_ram = self.pools[ChunkKind.FROZEN].resident_bytes if choice.params.frozen_tier.is_durable else 0
        cached = f" ({format_bytes(in_ram)} stay in RAM)" if in_ram else ""
        where = choice.params.frozen_tier.words + (", kept for other runs" if choice.params.base_bytes else "")
        return f"{format_bytes(nbytes)} of frozen ones streamed from {where}{cached}, {also}{stays}"


def life_in_words(steps: float | None) -> str:
    """In words: for how many steps a drive lasts; None: nothing is written."""
    if steps is None:
        return "-"
    return f"{steps:,.0f} steps" if steps < 1e9 else "over a billion steps"


def in_words(nbytes: int, names: Sequence[str]) -> str:
    """In words: what a quantised base has in 16 or 32 bits; nothing if there is none.

    Args:
        nbytes: what it takes.
        names: the parameters, the largest first.
    """
    if not names:
        return ""
    others = f" and {len(names) - 2} other{'s' if names[3:] else ''}" if names[2:] else ""
    return f"{format_bytes(nbytes)} of frozen ones not quantised ({', '.join(names[:2])}{others}); "


def activation_memory(tier: str | None, units: int, nbytes: int) -> int | None:
    """The `activation_memory` with which a tier has room for the inputs of all units; None without a tier.

    With "nvme" the files have room for them, and the memory is for what is on its way to and from the files.

    Args:
        tier: the tier of activations, as users name it.
        units: how many units there are.
        nbytes: the bytes of one unit's inputs.
    """
    if tier is None:
        return None
    return round_up(nbytes, PAGE_BYTES) * (min(units, UNITS_ON_THE_WAY) if TIERS[tier].is_durable else units)


# What the device needs.


@dataclass(frozen=True)
class Room:
    """What the model's device and the RAM beside it have room for.

    Attributes:
        resident_bytes: what buffers, and parameters that never leave the device, take there.
        available_bytes: the most bytes on the device if `device_memory` is not given; None: any number.
        frozen_bytes: what frozen parameters take on the device unless they stream.
        free_cpu_bytes: free RAM; None: what is free on this machine.
        cpu_memory: the option, in bytes; None: it was not given.
        device_memory: the option, in bytes; None: it was not given.
        ranks_on_node: how many ranks share this machine.
    """

    resident_bytes: int = 0
    available_bytes: int | None = None
    frozen_bytes: int = 0
    free_cpu_bytes: int | None = None
    cpu_memory: int | None = None
    device_memory: int | None = None
    ranks_on_node: int = 1

    def resident(self, choice: Choice) -> int:
        """Bytes of the model that are on the device at all times."""
        return self.resident_bytes + (self.frozen_bytes if choice.params.frozen_tier == DEVICE else 0)

    @property
    def limit(self) -> int | None:
        return self.available_bytes if self.device_memory is None else self.device_memory

    @property
    def of_each(self) -> str:
        """In words: whose part of the free RAM that is; nothing if one rank has all of it."""
        ranks = self.ranks_on_node
        told = "as a launcher's LOCAL_WORLD_SIZE says, or all where there is none"
        return f" for each of {ranks} ranks on this machine ({told})" if ranks > 1 else ""


def peak_bytes(layout: Layout, choice: Choice) -> int:
    """The most that trained parameters, and frozen ones that stream, take on the device at once."""
    resident = trained_bytes(layout) if choice.params.tier == DEVICE else 0
    return resident + streamed_bytes(layout, choice)


def streamed_bytes(layout: Layout, choice: Choice) -> int:
    """The most that streamed units take on the device at once.

    That is the root unit, two other units with the units that enclose each of them, and the prefetched units.
    """
    return _at_once(unit_bytes(layout, choice), choice) if choice.params.streams else 0


def units_that_stay(layout: Layout, choice: Choice, room: int, most: int | None = None) -> tuple[frozenset[str], int]:
    """Which streamed units stay on the device; see [Note: units that stay].

    Args:
        layout: of all parameters that are trained or stream.
        choice: what was decided.
        room: bytes of the device for units that stream, at least `streamed_bytes`.
        most: the most units that stay; None: any number.

    Returns:
        Their names, and the most bytes that streamed units take at once then.
    """
    if not choice.params.streams:
        return frozenset(), 0
    sizes = unit_bytes(layout, choice)
    in_tiles = {one.unit for one in layout.slices if layout.tile_of(one.flat)}
    in_tiles |= {layout.flats[one.flat].unit for one in layout.slices if layout.tile_of(one.flat)}
    names = [unit for unit in sizes if unit != ROOT and unit not in in_tiles]
    for count in range(len(names) if most is None else most, 0, -1):
        # In the middle of equal parts of the order.
        staying = {names[(2 * place + 1) * len(names) // (2 * count)] for place in range(count)}
        others = {unit: nbytes for unit, nbytes in sizes.items() if unit not in staying}
        at_once = sum(sizes[unit] for unit in staying) + _at_once(others, choice)
        if at_once <= room:
            return frozenset(staying), at_once
    return frozenset(), _at_once(sizes, choice)


def tiled_in_ram(layout: Layout, free: int | None, *, direct: bool) -> frozenset[str]:
    """The names of the tiled weights that are in RAM where an operation needs all of one.

    The others are on the device then, as any parameter is outside of its unit.

    Args:
        layout: of all parameters that are trained or stream.
        free: bytes of the device beside the most that units take; None: any number.
        direct: whether the device is the CPU.
    """
    sizes: Counter[str] = Counter()
    for flat in layout.flats:
        if layout.tile_of(flat.index):
            sizes[flat.unit] += flat.numel * flat.dtype.itemsize
    return frozenset(unit for unit, nbytes in sizes.items() if direct or (free is not None and nbytes > free))


def _at_once(unit_bytes: Mapping[str, int], choice: Choice) -> int:
    """The most that units take on the device at once; see `streamed_bytes`.

    Args:
        unit_bytes: what each unit takes.
        choice: what was decided.
    """
    sizes = dict(unit_bytes)
    root = sizes.pop(ROOT, 0)
    inner: dict[str, list[str]] = {unit: [] for unit in (ROOT, *sizes)}
    for unit in sizes:
        outer = unit.rpartition(".")[0]
        while outer not in inner:
            outer = outer.rpartition(".")[0]
        inner[outer].append(unit)
    ahead = max(sum(sorted(sizes.values(), reverse=True)[: choice.params.prefetch_units]), choice.ahead_bytes)
    return root + min(_deepest(ROOT, inner, sizes)[1] + ahead, sum(sizes.values()))


def trained_bytes(layout: Layout) -> int:
    """Bytes that all trained parameters take on the device."""
    layout = layout.trained
    return sum(layout.padded_numel(flat.index) * flat.dtype.itemsize for flat in layout.flats)


def _deepest(unit: str, inner: Mapping[str, list[str]], sizes: Mapping[str, int]) -> tuple[int, int]:
    """The most bytes of `unit` with one stack of units nested in it, and with two such stacks."""
    found = [_deepest(one, inner, sizes) for one in inner[unit]]
    ones = sorted((one for one, _ in found), reverse=True)
    own = sizes.get(unit, 0)
    return own + sum(ones[:1]), own + max(sum(ones[:2]), max((two for _, two in found), default=0))


def unit_bytes(layout: Layout, choice: Choice) -> dict[str, int]:
    """Bytes that the streamed parameters of each unit take on the device, in the order of the layout."""
    sizes: dict[str, list[int]] = {}
    for one in layout.slices:
        if choice.params.tier_of(is_frozen=layout.flats[one.flat].is_frozen) == DEVICE:
            continue
        if one.is_tile or not layout.tile_of(one.flat):  # what has tiles is never there as a whole
            sizes.setdefault(one.unit, []).append(one.numel * layout.flats[one.flat].dtype.itemsize)
    return {unit: starts_of(parts)[1] for unit, parts in sizes.items()}


def _module_bytes(layout: Layout, choice: Choice) -> dict[str, dict[str, int]]:
    """For each unit, what the streamed parameters of each of its modules take, by the module's name. Without tiles."""
    sizes: dict[str, dict[str, int]] = {}
    for spec in layout.specs:
        if not spec.tile and choice.params.tier_of(is_frozen=spec.is_frozen) > DEVICE:
            unit, module = sizes.setdefault(spec.unit, {}), spec.name.rpartition(".")[0]
            unit[module] = unit.get(module, 0) + spec.numel * spec.dtype.itemsize
    return sizes


def _require_room(layout: Layout, choice: Choice, room: Room, slab_bytes: int) -> int:
    """The most bytes that the model takes on the device.

    Raises:
        BudgetError: the device has no room for them.
    """
    model_bytes, limit = room.resident(choice) + peak_bytes(layout, choice), room.limit
    needed = model_bytes + slab_bytes
    if limit is None or needed <= limit:
        return model_bytes
    origin = "half of what is free on the device allows" if room.device_memory is None else "device_memory allows"
    if choice.states.tier == DEVICE and not choice.params.has_frozen:
        others = ', or choose tier="cpu", or "nvme" with a path'
    elif not choice.params.streams:
        others = "" if choice.params.is_chosen else ', or param_tier="cpu" or "nvme"'  # else they were tried
    else:
        others = _smaller_units(layout, choice, limit - needed + streamed_bytes(layout, choice))
    raise BudgetError(
        f"{format_bytes(needed)} are needed on the device and {origin} {format_bytes(limit)}: "
        f'give device_memory="{option_bytes(needed)}" or more{others}',
        needed=needed,
        available=limit,
        option="device_memory",
    )


def _smaller_units(layout: Layout, choice: Choice, limit: int) -> str:
    """In words: whether smaller units would take at most `limit` bytes at once, and which unit is the largest."""
    units = _module_bytes(layout, choice)
    smallest = {unit: size for unit, size in unit_bytes(layout, choice).items() if unit not in units}  # the tiles
    smallest |= {module: size for modules in units.values() for module, size in modules.items()}
    parted = {unit: sum(modules.values()) for unit, modules in units.items() if len(modules) > 1}
    if not parted or _at_once(smallest, choice) > limit:
        largest = max(smallest, key=lambda unit: smallest[unit])
        tiles = (
            ", and only weights of nn.Linear, nn.Embedding and with 3 dimensions run in tiles"
            if layout.ranks == 1
            else ""
        )
        whole = max((spec for spec in layout.specs if spec.why_whole), key=lambda spec: spec.numel, default=None)
        return (
            f"; smaller units are not enough: {largest or 'the root'} takes {format_bytes(smallest[largest])} at once"
            f"{tiles}{'' if whole is None else '; ' + why_whole(whole)}"
        )
    largest = max(parted, key=lambda unit: parted[unit])
    return (
        f", or smaller units with Tuning(units=...): the largest, {largest or 'the root'}, takes "
        f"{format_bytes(parted[largest])}"
    )


def why_whole(spec: ParamSpec) -> str:
    """In words: why a quantised weight of three dimensions does not run in tiles, and what to do."""
    return (
        f"{spec.why_whole}, so it runs in no tiles: quantise it in blocks that end where a matrix ends, with scales of "
        "each matrix or row"
    )


def require_cuts(layout: Layout, tile_bytes: int | None) -> None:
    """Requires that quantised weights of three dimensions run in tiles if the user asked for tiles.

    Args:
        layout: of all parameters that are trained or stream.
        tile_bytes: what `Tuning.tile` says.

    Raises:
        ConfigError: naming one that is larger than a tile, and cannot be cut.
    """
    sizes: Counter[str] = Counter()
    for spec in layout.specs if tile_bytes else ():
        sizes[spec.why_whole] += spec.numel * spec.dtype.itemsize
        if tile_bytes and spec.why_whole and sizes[spec.why_whole] > tile_bytes:
            raise ConfigError(f"Tuning.tile={option_bytes(tile_bytes)}: {why_whole(spec)}; or give Tuning(tile=0)")


# What each kind of bytes needs, whatever the budget.


def chunk_arrays(held: Layout, choice: Choice) -> dict[ChunkKind, list[SlotArrays]]:
    """The arrays of each chunk, by kind, whether the chunk has a slot or not.

    Args:
        held: the layout of all parameters that are trained or stream.
        choice: what was decided.
    """
    params, trained = param_slot_arrays(held), len(held.trained.param_chunks)
    return {
        ChunkKind.STATES: state_slot_arrays(held, split_master=choice.states.split_master),
        ChunkKind.PARAMS: params[:trained],
        ChunkKind.GRADS: gradient_slot_arrays(held, choice.grads.micro_batches),
        ChunkKind.FROZEN: params[trained:],
    }


def tiers_of(choice: Choice) -> dict[ChunkKind, Tier]:
    """Where the chunks of each kind are outside their use."""
    return {
        ChunkKind.STATES: choice.states.tier,
        ChunkKind.PARAMS: choice.params.tier,
        ChunkKind.GRADS: choice.grads.tier,
        ChunkKind.FROZEN: choice.params.frozen_tier,
    }


def slot_map(choice: Choice, arrays: Mapping[ChunkKind, Sequence[SlotArrays]]) -> SlotMap:
    """Which slots a run has: those of the kinds that are on NVMe or committed.

    Args:
        choice: what was decided.
        arrays: what `chunk_arrays` returned.
    """
    commits = choice.commits
    is_committed = {ChunkKind.STATES: commits.every is not None, ChunkKind.PARAMS: commits.holds_params}
    tiers = tiers_of(choice).items()
    kinds = {kind: arrays[kind] for kind, tier in tiers if tier.is_durable or is_committed.get(kind, False)}
    if choice.params.base_bytes:
        kinds.pop(ChunkKind.FROZEN)
    # With replicas the other parameters are committed by other ranks.
    committed = len(arrays[ChunkKind.STATES]) * (2 if commits.holds_params else 1)
    if commits.every is not None:
        return SlotMap(kinds, choice.slots_per_chunk, committed)
    # A step that is tried has a place of its own: those of states only, which are the first slots.
    several = len(arrays[ChunkKind.STATES]) if choice.states.tries_steps else None
    return SlotMap(kinds, choice.slots_per_chunk, None, several)


@dataclass(frozen=True)
class Needs:
    """The bytes that a choice needs, whatever the budget is.

    Attributes:
        held: the layout of all parameters that are trained or stream.
        choice: what was decided.
        direct: whether the model's device is the CPU.
        device_flats: see `Placement`.
    """

    held: Layout
    choice: Choice
    direct: bool
    device_flats: frozenset[int] = frozenset()

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters."""
        return self.held.trained

    @property
    def in_place(self) -> bool:
        """Whether the kernels read gradients and write parameters where the model has them."""
        return self.direct or self.choice.states.tier == DEVICE

    @cached_property
    def arrays(self) -> dict[ChunkKind, list[SlotArrays]]:
        """The arrays of each chunk, by kind."""
        return chunk_arrays(self.held, self.choice)

    @cached_property
    def slots(self) -> SlotMap:
        """Which slots this rank has."""
        return slot_map(self.choice, self.arrays)

    @cached_property
    def tiers(self) -> dict[ChunkKind, Tier]:
        """Where the chunks of each kind are outside their use."""
        return tiers_of(self.choice)

    @property
    def states(self) -> list[SlotArrays]:
        """The arrays of each chunk's optimizer states."""
        return self.arrays[ChunkKind.STATES]

    def kinds_of(self, kind: ChunkKind) -> list[tuple[str, ...]]:
        """What the arrays of each chunk's slot are called."""
        if kind is ChunkKind.STATES:
            return [self.layout.flats[chunk.flat].array_kinds for chunk in self.layout.chunks]
        return [(ARRAYS[kind],)] * len(self.arrays[kind])

    @cached_property
    def _sizes(self) -> dict[ChunkKind, list[int]]:
        """Bytes of each chunk, by kind."""
        return {kind: [one.nbytes for one in arrays] for kind, arrays in self.arrays.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that are not on the device."""
        return sum(slot.nbytes for chunk, slot in enumerate(self.states) if chunk not in self.on_device)

    @cached_property
    def on_device(self) -> frozenset[int]:
        """The chunks whose states stay on the device."""
        all_are = self.choice.states.tier == DEVICE
        return frozenset(chunk.index for chunk in self.layout.chunks if all_are or chunk.flat in self.device_flats)

    @property
    def staged(self) -> int:
        """Through how many buffers in RAM states on the device go to the disk, where none stream; 0: they never do."""
        commits = self.choice.commits
        is_committed = bool(commits.paths) and commits.every is not None
        return min(self.choice.states.in_flight or IN_FLIGHT, len(self.on_device)) if is_committed else 0

    @cached_property
    def states_in_memory(self) -> Pool:
        """The pool of the states if none stream."""
        sizes = self._sizes[ChunkKind.STATES]
        return Pool(sizes, frozenset(range(len(sizes))) - self.on_device, self.staged, self.on_device)

    def states_within(self, room: int) -> Pool:
        """The pool of the states that takes at most `room` bytes of RAM: as many stay there as fit."""
        return _within(room, self.states_in_memory, self.choice.states.in_flight)

    def pools(self, spare_bytes: int | None = None) -> dict[ChunkKind, Pool]:
        """The pools of the chunks of parameters and gradients, by kind.

        What streams from NVMe has as few buffers as work: the same RAM saves as many bytes of the disk when states have
        it, which are written as well. What streams from RAM is all there. Parameters that stay on the device have a
        pool only if commits hold them, and gradients only if they are in slots.

        Args:
            spare_bytes: RAM that states leave, for frozen parameters on NVMe; None: these have few buffers, too.
        """
        found = {}
        for kind in (ChunkKind.PARAMS, ChunkKind.GRADS, ChunkKind.FROZEN):
            tier, sizes = self.tiers[kind], self._sizes[kind]
            if tier.is_durable:
                pool = self._few(sizes)
                if kind is ChunkKind.FROZEN and spare_bytes is not None and self._memory_of(kind) == CPU:
                    pool = _within(pool.nbytes + max(spare_bytes, 0), _resident(sizes), pool.in_flight)
                found[kind] = pool
            elif tier > DEVICE and kind is not ChunkKind.GRADS:
                found[kind] = _resident(sizes)
            elif kind is ChunkKind.PARAMS and self.choice.commits.holds_params:
                # At a commit some are written while another is copied: with two, the drive would wait half of the time.
                found[kind] = Pool(sizes, frozenset(), min(IN_FLIGHT, len(sizes)))
        return found

    def _memory_of(self, kind: ChunkKind) -> Tier:
        """The tier whose memory the pool of a kind is in: that of the states.

        But if all that is trained stays on the device, what streams comes from RAM.
        """
        return CPU if kind is ChunkKind.FROZEN and self.choice.params.tier == DEVICE else self.memory

    def _few(self, sizes: list[int]) -> Pool:
        return Pool(sizes, frozenset(), min(self.choice.states.in_flight or IN_FLIGHT, len(sizes)))

    @cached_property
    def reduction(self) -> ReductionPlan | None:
        """How gradients of several ranks are reduced; None for one rank."""
        if self.layout.ranks == 1:
            return None
        return ReductionPlan(self.layout, self.choice.grads, direct=self.in_place, device_flats=self.device_flats)

    @property
    def memory(self) -> Tier:
        """The tier whose memory states and gradients are in when they are stepped."""
        return self.choice.states.tier.memory

    @property
    def communication(self) -> Tier:
        """The tier whose memory the buffers of collectives are in."""
        return CPU if self.direct and self.choice.states.tier > DEVICE else DEVICE

    @cached_property
    def regions(self) -> list[Region]:
        """What everything takes but pools and activations."""
        choice, memory = self.choice, self.memory
        bounces = choice.grads.micro_batches > 1 or choice.states.split_master
        together = choice.grads.bucket_bytes if choice.params.tier == DEVICE else None
        found = self._gradients + exchange.regions(self.layout, self.communication, together)
        if self.held.shard_group_size > 1:
            sizes = [nbytes for unit, nbytes in unit_bytes(self.held, choice).items() if unit != ROOT]
            found += transfer.regions(sizes, choice.ahead_bytes, self.communication)
        is_in_model = self.in_place or choice.params.tier > DEVICE
        found += new_params.regions(
            self.layout,
            memory,
            bounces=bounces and not is_in_model,
            streams=choice.params.tier > DEVICE,
            device_flats=self.device_flats,
        )
        every = choice.states.tier == DEVICE
        if (every or self.device_flats) and not self.direct:  # also where this rank's shards are empty
            located = zip(self.layout.specs, self.layout.flat_of, strict=True)
            there = [spec for spec, flat in located if every or flat in self.device_flats]
            found.append(Region(DEVICE, SCRATCH, scratch_bytes(max(spec.numel for spec in there))))
            dithered = max((spec.numel for spec in there if is_dithered(spec.states)), default=0)
            if dithered:  # also where they are compiled: the driver may refuse that
                nbytes = dithered_bytes(dithered, dithered_room_of(self.layout))
                found.append(Region(DEVICE, TEMPORARIES, nbytes, is_lent=False))
        found += late.regions(self.layout, memory)
        matrices = [] if self.in_place else on_device.regions(self.layout)
        if choice.states.temporary_bytes:
            where, at_once = (DEVICE, on_device.AT_ONCE) if matrices else (memory, 1)
            found.append(Region(where, TEMPORARIES, at_once * choice.states.temporary_bytes, is_lent=False))
        if choice.params.base_bytes:
            found.append(Region(CPU, BASE, choice.params.base_memory_bytes, is_lent=False))
        for spec in self.layout.specs:
            if spec.name in choice.model.loss_weights and not spec.is_frozen and not spec.tile:
                found.append(Region(DEVICE, LOSS, torch.float32.itemsize * spec.numel, is_lent=False))
        if choice.model.token_sum_bytes:
            found.append(Region(DEVICE, TOKEN_SUMS, choice.model.token_sum_bytes, is_lent=False))
        return found + matrices

    @cached_property
    def fixed(self) -> list[Region]:
        """What everything takes but states and activations, with as few buffers for what streams as work."""
        return [*self.regions, *self.of_pools(self.pools())]

    @property
    def _gradients(self) -> list[Region]:
        if self.reduction is not None:
            return self.reduction.regions(self.communication)
        return gradients.regions(self.layout, self.choice.grads, in_place=self.in_place, device_flats=self.device_flats)

    def of_pools(self, pools: Mapping[ChunkKind, Pool]) -> list[Region]:
        """What pools of parameters and gradients take."""
        found: list[Region] = []
        for kind, pool in pools.items():
            found += pool.regions(self._memory_of(kind), kind, ARRAYS[kind])
        return found

    def of_states(self, states: Pool) -> list[Region]:
        """What the states take."""
        holds = [
            kinds_held(slot, kinds) for slot, kinds in zip(self.states, self.kinds_of(ChunkKind.STATES), strict=True)
        ]
        return list(states.regions(CPU, ChunkKind.STATES, REST, holds))

    def of_trials(self, states: Pool) -> list[Region]:
        """What new parameters of steps that are tried take.

        Args:
            states: the pool of the states.
        """
        if not self.choice.states.tries_steps:
            return []
        stay = states.resident | states.on_device
        streamed = [chunk for chunk in range(len(self.states)) if chunk not in stay]
        return trials.regions(self.layout, self.memory, streamed)

    @cached_property
    def tried_bytes(self) -> int:
        """RAM for new parameters of steps that are tried, if all states stream."""
        return total_bytes(self.of_trials(replace(self.states_in_memory, resident=frozenset())), CPU)

    def of_activations(self, nbytes: int, spill_bytes: int) -> list[Region]:
        """What activations take while they wait.

        Args:
            nbytes: the bytes of the region in which they wait.
            spill_bytes: the bytes of the region in RAM for those that a region on the device has no room for.
        """
        where = DEVICE if self.has_activations_on_device else CPU
        both = (where, ACTIVATIONS, nbytes), (CPU, SPILLED, spill_bytes)
        return [Region(tier, what, size, kind="activation") for tier, what, size in both if size]

    @property
    def communication_bytes(self) -> int:
        """Bytes of the buffers in which gradients travel."""
        return total_of(self.regions, TRAVELLING)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the region in which activations wait: `activation_memory`, or the least.

        Activations that stay on the device where they are made have a region only if `activation_memory` is given.
        """
        activations = self.choice.activations
        if activations.nbytes is not None:
            return round_up(activations.nbytes, PAGE_BYTES)
        is_there = activations.tier in (None, DEVICE) or (self.direct and activations.tier == CPU)
        return 0 if is_there else LEAST_ACTIVATION_BYTES

    @property
    def has_activations_on_device(self) -> bool:
        """Whether the region of activations is in memory that a device has for itself."""
        return self.choice.activations.tier == DEVICE and not self.direct

    @cached_property
    def device_bytes(self) -> int:
        """What is reserved on the device, states included."""
        fixed = [*self.fixed, *self.of_activations(self.activation_bytes, 0)]
        return total_bytes([*fixed, *self.of_states(self.states_in_memory)], DEVICE)

    def with_states_on_device(self, room: int, most: Collection[int] | None = None) -> Needs:
        """These needs with the states of as many units on the device as fit: [Note: states on the device].

        Args:
            room: the most bytes that may be reserved there.
            most: the flat parameters whose states may be there; None: any.
        """
        if not self.choice.states.shares or self.direct:
            return self
        left_out = {spec.unit for spec in self.layout.specs if spec.is_late}
        if most is not None:
            left_out |= {flat.unit for flat in self.layout.flats if flat.index not in most}
        units, spent = [], 0
        for unit, nbytes in self._bytes_with_gradients().items():
            if unit not in left_out and spent + nbytes <= room:
                units.append(unit)
                spent += nbytes
        while units:
            flats = frozenset(flat.index for flat in self.layout.flats if flat.unit in units)
            found = replace(self, device_flats=flats)
            if found.device_bytes <= room:
                return found
            units.pop()  # beside states and gradients there is little: sums of squares, and what kernels need
        return self

    def _bytes_with_gradients(self) -> dict[str, int]:
        """About what the states of each unit take with their gradients, in the order of the layout."""
        sizes: dict[str, int] = {}
        dtypes = gradient_dtypes(self.layout, self.choice.grads.micro_batches)
        for flat, dtype in zip(self.layout.flats, dtypes, strict=True):
            sizes[flat.unit] = sizes.get(flat.unit, 0) + self.layout.shard_numel(flat.index) * dtype.itemsize
        for chunk, slot in zip(self.layout.chunks, self.states, strict=True):
            sizes[self.layout.flats[chunk.flat].unit] += slot.nbytes
        return sizes

    @property
    def least_bytes(self) -> int:
        """The least RAM, in bytes, with states on NVMe.

        That is for everything but the states, and for as few buffers as the states can stream through.
        """
        largest = max((slot.nbytes for slot in self.states), default=0)
        fixed = [*self.fixed, *self.of_activations(self.activation_bytes, 0)]
        return total_bytes(fixed, CPU) + self.tried_bytes + min(LEAST_IN_FLIGHT * largest, self.states_in_memory.nbytes)

    def of_files(self, states: Pool) -> list[Region]:
        """What the slots of this rank take in its swap files, one superblock, and what commits write beside them.

        Each file after the first takes one page more than this says.
        """
        if not self.choice.commits.paths:
            return []
        found, slots = [Region(NVME, SUPERBLOCK, PAGE_BYTES)], self.slots
        for kind, arrays in slots.arrays.items():
            for chunk, (one, names) in enumerate(zip(arrays, self.kinds_of(kind), strict=True)):
                # Parameters that are not on NVMe are in slots for commits only.
                stays = not self.tiers[kind].is_durable
                if kind is ChunkKind.STATES:
                    stays = chunk in states.resident or chunk in states.on_device
                found.append(_slot(kind, one, names, is_moved=not stays))
        if self.choice.params.base_bytes and self.layout.rank == 0:
            found.append(Region(NVME, BASE, self.choice.params.base_bytes))
        several = [one for slot, one in enumerate(slots.all_arrays) if slots.versions_of(slot) > 1]
        if self.choice.commits.every is not None:
            found += [Region(NVME, SECOND, one.nbytes, kind=SLOTS) for one in several]
        if self.choice.states.tries_steps:
            found += [Region(NVME, TRIED_SLOTS, one.nbytes, kind=SLOTS) for one in several]
        return found if self.choice.commits.every is None else found + self._of_room()

    def _of_room(self) -> list[Region]:
        """What manifests and records take; see [Note: room for commits] in room.py."""
        paths, manifest = self.choice.commits.paths, manifest_bytes(self.layout, self.slots.committed or 0)
        found = [Region(NVME, MANIFEST, round_up(manifest, PAGE_BYTES), SPARES * len(paths))]
        if self.layout.rank == 0:
            record = record_bytes(paths, self.layout.ranks)
            found.append(Region(NVME, RECORD, round_up(record, PAGE_BYTES), SPARES))
        return found

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by state kind.

        Parameters that are on the device only around their use do not count as held there.
        """
        layout, choice = self.layout, self.choice
        params = grads = 0
        for flat in layout.flats:
            shard, whole = layout.shard_numel(flat.index), layout.padded_numel(flat.index)
            params += (layout.replicas * shard if choice.params.tier > DEVICE else whole) * flat.dtype.itemsize
            sums_locally = self.reduction is not None and self.reduction.sums_locally
            grads += (whole if sums_locally else shard) * (4 if choice.grads.micro_batches > 1 else flat.dtype.itemsize)
        held = Counter({"param": params, "grad": grads} | dict.fromkeys(layout.state_kinds, 0))
        for chunk in layout.chunks:
            held[MASTER] += MASTER_ITEM_BYTES * chunk.numel
            for state in layout.flats[chunk.flat].states:
                held[state.name] += sum(size * -(-chunk.numel // block) for size, block in state.form.arrays)
        return dict(held)

    def moved_bytes(self, pools: Mapping[ChunkKind, Pool], staying: Container[str] = ()) -> tuple[int, int]:
        """Bytes that a step reads from the disk, and that it writes to it.

        States are read and written. Gradients are written by each micro-batch, and read by the next one or the step.
        Parameters are read by each forward and each backward. Only the forward after a step finds those in RAM that
        were just made there, but for tiles: they are fetched when their whole weight has been updated. Frozen
        parameters that stay on the device are not read, and trained ones that do once at most.

        Args:
            pools: of all kinds.
            staying: the units that stay on the device.
        """
        streamed = Counter({kind: sum(pool.streamed) for kind, pool in pools.items() if self.tiers[kind].is_durable})
        if streamed[ChunkKind.GRADS]:  # those of states on the device are there, and their slots are not used
            streamed[ChunkKind.GRADS] -= sum(pools[ChunkKind.GRADS].sizes[chunk] for chunk in self.on_device)
        micro_batches, new = self.choice.grads.micro_batches, streamed[ChunkKind.PARAMS]
        sizes = zip(self.layout.param_chunks, self._sizes[ChunkKind.PARAMS], strict=True) if new else ()
        found = sum(size for chunk, size in sizes if not self.layout.tile_of(chunk.flat))
        both = streamed[ChunkKind.STATES] + micro_batches * streamed[ChunkKind.GRADS]
        reads = 2 * micro_batches
        read = both + reads * (new + streamed[ChunkKind.FROZEN]) - found
        read -= (reads - 1) * self._read_of(ChunkKind.PARAMS, pools, staying)
        read -= reads * self._read_of(ChunkKind.FROZEN, pools, staying)
        return read, both + new

    def _read_of(self, kind: ChunkKind, pools: Mapping[ChunkKind, Pool], units: Container[str]) -> int:
        """The bytes of the chunks of parameters of these units that stream from the disk."""
        if not self.tiers[kind].is_durable or kind not in pools:
            return 0
        first = 0 if kind is ChunkKind.PARAMS else len(self.layout.param_chunks)
        chunks = self.held.param_chunks[first : first + len(pools[kind].sizes)]
        return sum(
            size
            for number, (chunk, size) in enumerate(zip(chunks, pools[kind].sizes, strict=True))
            if number not in pools[kind].resident and self.held.flats[chunk.flat].unit in units
        )


def dithered_room_of(layout: Layout) -> int:
    """How many elements with moments of one or two bytes a device steps at a time by torch; 0: it has none."""
    largest = max((spec.numel for spec in layout.specs if is_dithered(spec.states)), default=0)
    numel = sum(chunk.numel for chunk in layout.chunks if is_dithered(layout.flats[chunk.flat].states))
    return dithered_room(largest, numel) if largest else 0


def _slot(kind: ChunkKind, one: SlotArrays, names: Sequence[str], *, is_moved: bool) -> Region:
    """A chunk's first slot.

    Args:
        kind: the kind of the chunk.
        one: the arrays in the slot.
        names: what they are called.
        is_moved: whether steps read or write it.
    """
    what = f"slots of {kind}"
    if not is_moved:
        return Region(NVME, what, one.nbytes, kind=SLOTS)
    return Region(NVME, what, one.nbytes, holds=kinds_held(one, names))


# Where the states go.


class OnDevice(NamedTuple):
    """What is on the device.

    Attributes:
        needs: what is needed, with the states there that have room.
        model_bytes: see `Placement`.
        streamed_bytes: see `Placement`.
        staying: see `Placement`.
        tiled_in_ram: see `Placement`.
    """

    needs: Needs
    model_bytes: int
    streamed_bytes: int
    staying: frozenset[str]
    tiled_in_ram: frozenset[str]


class Most(NamedTuple):
    """The most that may be on the device, so that several ranks have alike there.

    Attributes:
        staying: how many streamed units stay.
        device_flats: the flat parameters whose states and gradients are there.
    """

    staying: int
    device_flats: frozenset[int]


def fill_device(needs: Needs, room: Room, most: Most | None = None) -> OnDevice:
    """Decides what is on the device beside what has to be: streamed units that stay, and states.

    share.py says which of both come first.

    Args:
        needs: without states there, unless all are.
        room: what the device has room for.
        most: the most that may be there; None: anything.

    Raises:
        BudgetError: the device has no room.
    """
    most_staying, most_flats = (None, None) if most is None else most
    layout, choice = needs.held, needs.choice
    slab_bytes, least = needs.device_bytes, streamed_bytes(layout, choice)
    model_bytes, limit = _require_room(layout, choice, room, slab_bytes), room.device_memory
    if limit is None and choice.params.is_chosen:
        limit = room.limit
    states_first = states_come_first(choice, layout.shard_group_size)
    if room.device_memory is not None and states_first:
        needs = needs.with_states_on_device(room.device_memory - model_bytes, most_flats)
        slab_bytes = needs.device_bytes
    on_top = None if room.limit is None else room.limit - slab_bytes - model_bytes
    in_ram = tiled_in_ram(layout, on_top, direct=needs.direct)
    staying, at_once = frozenset[str](), least
    if limit is not None:
        staying, at_once = units_that_stay(layout, choice, limit - slab_bytes - model_bytes + least, most_staying)
        model_bytes += at_once - least
    if room.device_memory is not None and not states_first:
        needs = needs.with_states_on_device(room.device_memory - model_bytes, most_flats)
    return OnDevice(needs, model_bytes, at_once, staying, in_ram)


def place(
    layout: Layout,
    choice: Choice,
    *,
    direct: bool,
    room: Room | None = None,
    reserved: int = 0,
    most: Most | None = None,
) -> Placement:
    """Decides which chunks stay in RAM, and which units on the device.

    Args:
        layout: of all parameters that are trained or stream.
        choice: what was decided.
        direct: whether the model's device is the CPU, so that copies need no buffers.
        room: what the device and the RAM have room for.
        reserved: bytes of RAM to leave free for reading a commit in another layout.
        most: the most that may be on the device; None: anything.

    Raises:
        ConfigError: gradients are to be on NVMe, and the parameters stay on a device with memory of its own.
        BudgetError: RAM or the device has no room. The error names the bytes that are needed and there, and the option
            that would fix it.
    """
    room = Room() if room is None else room
    require_possible(choice, direct=direct)
    return place_in_ram(fill_device(Needs(layout, choice, direct), room, most), room, reserved)


def require_possible(choice: Choice, *, direct: bool) -> None:
    """Requires that gradients can wait where it was decided.

    Args:
        choice: what was decided.
        direct: whether the model's device is the CPU.

    Raises:
        ConfigError: that is NVMe, and the parameters stay on a device with memory of its own.
    """
    if choice.grads_of_resident_params_on_nvme and not direct:
        few = "trained parameters stay on the device, because they are few beside the frozen ones: leave grad_tier out"
        others = 'it needs param_tier="cpu" or "nvme" where the device has memory of its own'
        raise ConfigError(f'grad_tier="nvme": {few if choice.params.keeps_trained else others}')


def place_in_ram(there: OnDevice, room: Room, reserved: int = 0) -> Placement:
    """Decides which chunks stay in RAM, beside what was decided for the device, which does not depend on it.

    Args:
        there: what is on the device.
        room: see `place`.
        reserved: see `place`.

    Raises:
        BudgetError: RAM has no room; see `place`.
    """
    needs = there.needs
    choice, direct, streams = needs.choice, needs.direct, needs.choice.states.tier.is_durable
    activations = needs.of_activations(needs.activation_bytes, 0)
    given = room.cpu_memory
    # Ranks of one machine look before any of them takes memory: each may take its share.
    free = (free_memory() if room.free_cpu_bytes is None else room.free_cpu_bytes) // room.ranks_on_node
    budget = free // 2 if given is None else given
    # Of RAM: all but the states.
    beside = total_bytes(needs.fixed, CPU)
    all_states = needs.states_in_memory.nbytes
    least = reserved + (needs.least_bytes if streams else beside + all_states + total_bytes(activations, CPU))
    if least > min(budget, free):
        other = 'tier="nvme" with a path' if choice.states.tier == CPU else "a smaller Tuning(chunk=...)"
        raise _too_small(least, budget, given, free, other, room.of_each)
    activation_bytes, spill_bytes = needs.activation_bytes, 0
    share = max(min(budget, free) - least, 0) // ACTIVATION_SHARE // PAGE_BYTES * PAGE_BYTES
    if needs.has_activations_on_device:
        spill_bytes = min(activation_bytes, share)
    elif activation_bytes and choice.activations.nbytes is None:
        activation_bytes = max(activation_bytes, share)
    activations = needs.of_activations(activation_bytes, spill_bytes)
    fixed_bytes = reserved + beside + total_bytes(activations, CPU)
    tried: list[Region] = []
    while True:
        tried_bytes = total_bytes(tried, CPU)
        pool = needs.states_within(budget - fixed_bytes - tried_bytes) if streams else needs.states_in_memory
        tried = needs.of_trials(pool)
        if total_bytes(tried, CPU) <= tried_bytes:
            break  # what is tried takes RAM, and the less of it states have, the more of them are tried
    used = fixed_bytes + total_bytes(tried, CPU) + pool.nbytes
    if given is not None and used > free:
        other = ', and tier="nvme" with a path' if choice.states.tier == CPU else ""
        raise BudgetError(
            f"{format_bytes(used - reserved)} of RAM would be used and {format_bytes(free)} are free{room.of_each}: "
            f'give cpu_memory="{option_bytes(free, at_most=True)}" or less{other}',
            needed=used - reserved,
            available=free,
            option="cpu_memory",
        )
    pools = needs.pools(min(budget, free) - used)
    # The states' memory comes first: a resume reads into it while the rest is made.
    regions = [
        *needs.of_states(pool),
        *tried,
        *needs.regions,
        *needs.of_pools(pools),
        *activations,
        *needs.of_files(pool),
    ]
    pools[ChunkKind.STATES] = pool
    read_bytes, written_bytes = needs.moved_bytes(pools, there.staying)
    return Placement(
        choice,
        direct,
        regions,
        arrays=needs.arrays,
        slots=needs.slots,
        pools=pools,
        device_flats=needs.device_flats,
        budget_bytes=budget,
        device_budget_bytes=room.limit,
        device_memory=room.device_memory,
        model_bytes=there.model_bytes,
        resident_bytes=room.resident(choice),
        streamed_bytes=there.streamed_bytes,
        staying=there.staying,
        tiled_in_ram=there.tiled_in_ram,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        held_bytes=needs.held_bytes,
        uses_disk=bool(pool.streamed) or NVME in (choice.params.tier, choice.grads.tier),
    )


def _resident(sizes: Sequence[int]) -> Pool:
    """A pool in which all chunks are resident."""
    return Pool(sizes, frozenset(range(len(sizes))), 0)


def _within(room: int, whole: Pool, in_flight: int | None) -> Pool:
    """A pool of at most `room` bytes: buffers for streamed chunks, and as many resident chunks as fit beside them.

    There are never more buffers than streamed chunks: if so few chunks were left, all would fit.

    Args:
        room: the most bytes.
        whole: the pool in which none stream.
        in_flight: how many buffers there are; None: IN_FLIGHT, or fewer where that is what fits.
    """
    if whole.nbytes <= room:
        return whole
    largest = max(whole.sizes)
    buffers = min(in_flight or IN_FLIGHT, room // largest)
    kept = residents(sorted(whole.resident), whole.sizes, room - buffers * largest)
    return Pool(whole.sizes, kept, buffers, whole.on_device)


def _too_small(needed: int, budget: int, given: int | None, free: int, other: str, of_each: str) -> BudgetError:
    origin = "cpu_memory allows" if given is not None else "half of the free RAM is"
    has, how = f"{origin} {format_bytes(budget)}", f'give cpu_memory="{option_bytes(needed)}" or more, or {other}'
    if needed > free:  # whatever is given
        has, how = f"{format_bytes(free)} are free{of_each}", f"free some, or choose {other}"
    return BudgetError(
        f"{format_bytes(needed)} of RAM are needed and {has}: {how}",
        needed=needed,
        available=min(budget, free),
        option="cpu_memory",
    )
