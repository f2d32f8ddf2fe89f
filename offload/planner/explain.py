"""A placement in rows for people and machines: which kind of bytes is on which tier, and what other budgets would do.

[Note: rows]
The rows of a tier add up to the placement's figure for it: `device_bytes`, `arena_bytes`, `disk_bytes`. A row is of a
state kind (param, grad, master, and the optimizer's, as exp_avg and exp_avg_sq), or one of

    frozen    frozen parameters that stream, or are always on the device, with buffers of the model
    buffers   that streamed chunks pass through, and in which replicas exchange new parameters
    activation what enters units, or is saved in them, on its way from the forward to the backward
    slots     reserved on the disk, and not written in every step: those of resident chunks; with commits, the second
              slot of each chunk, and both of parameters that live elsewhere; where steps are tried, one more
    rest      headers, padding, bounce buffers of copies to and from a device, temporaries of a device's kernels and of
              optimizers that torch runs, and what commits write beside slots

With `tier="device"` all of this is on the device, and only the buffers of commits are in RAM.

`grad` includes the sums of squares, bounce buffers, and the buffers in which gradients travel between ranks; on the
device the region through which small gradients leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from offload.choices import Choice
from offload.errors import BudgetError
from offload.layout import Layout
from offload.model.partition import partition_bytes
from offload.model.units import ROOT
from offload.optim.rule import Rule
from offload.optim.rules.adam import AdamRule
from offload.options import Options
from offload.planner.choice import ModelShape, Pick, search
from offload.planner.decide import decide, replicas_of
from offload.planner.machine import kernel_threads
from offload.planner.placement import (
    ACTIVATIONS,
    IN_FLIGHT,
    SLOTS,
    Needs,
    OnDevice,
    Placement,
    Room,
    fill_device,
    place_in_ram,
    require_possible,
)
from offload.regions import REST, total_of
from offload.tiers import CPU, DEVICE, NVME, TIERS, Tier

FIRST, LAST = ("grad",), ("param", "frozen", "buffers", "activation", SLOTS, REST)
"""Kinds of rows that come before those of states, and after them."""


@dataclass(frozen=True)
class Row:
    """Bytes of one kind on one tier; see [Note: rows]."""

    kind: str
    tier: Tier
    nbytes: int


@dataclass(frozen=True)
class Planned:
    """A model and what was decided for it. Nothing is allocated.

    Attributes:
        layout: of the parameters.
        choice: what was decided.
        direct: whether the model's device is the CPU, so that copies need no buffers.
        room: what there is room for.
        refusal: the error, if neither this choice nor another one fits.
        there: what is on the device, as it was decided for this choice with another budget of RAM; None: it was not.
    """

    layout: Layout
    choice: Choice
    direct: bool
    room: Room = field(default_factory=Room)
    refusal: BudgetError | None = None
    there: OnDevice | None = field(default=None, repr=False, compare=False)

    @cached_property
    def needs(self) -> Needs:
        """What it needs, with the states on the device that there is room for."""
        with suppress(BudgetError):  # which `place` raises
            return self._there.needs
        return Needs(self.layout, self.choice, self.direct)

    @cached_property
    def _there(self) -> OnDevice:
        """What is on the device.

        Raises:
            BudgetError: the device has no room.
        """
        if self.there is not None and self.there.needs.choice is self.choice:
            return self.there
        return fill_device(Needs(self.layout, self.choice, self.direct), self.room)

    def place(self) -> Placement:
        """The placement of this plan.

        Raises:
            BudgetError: as `OffloadZero` does.
        """
        if self.refusal is not None:
            raise self.refusal
        return self._placed

    @cached_property
    def _placed(self) -> Placement:
        require_possible(self.choice, direct=self.direct)
        return place_in_ram(self._there, self.room)

    def with_memory(self, cpu_memory: int) -> Planned:
        """This plan with another budget of RAM."""
        there = self.there
        with suppress(BudgetError):  # which `place` raises
            there = self._there
        return replace(self, room=replace(self.room, cpu_memory=cpu_memory), refusal=None, there=there)

    def least(self) -> int:
        """The least `cpu_memory` that works, in bytes.

        Raises:
            BudgetError: if none does, since another memory is too small.
        """
        try:
            # Asked of the planner itself, so that there is one formula.
            return self.with_memory(0).place().arena_bytes
        except BudgetError as error:
            if error.option != "cpu_memory":
                raise  # more RAM would not help
            return error.needed

    def cpu_memory_for(self, share: float) -> int:
        """The `cpu_memory` that has room for a `share` of the states beside everything else, for tier="nvme".

        Args:
            share: 0 to 1; at 0 there is still room for all buffers in flight that the planner uses.
        """
        everything, states = self._all_in_ram(), self.needs.state_bytes
        left = states - self.needs.tried_bytes  # what streams takes RAM too, where its steps are tried
        return min(everything - left + self._buffer_bytes() + round(share * left), everything)

    def largest_share(self, cpu_memory: int) -> float | None:
        """The share of the states that `cpu_memory` keeps in RAM with tier="nvme"; None if the run does not fit."""
        if cpu_memory < self.on(NVME).least():
            return None
        if cpu_memory >= self._all_in_ram():
            return 1.0
        room = cpu_memory - self.cpu_memory_for(0.0)
        return max(0.0, min(1.0, room / (self.needs.state_bytes - self.needs.tried_bytes)))

    def _all_in_ram(self) -> int:
        return self.on(CPU).least()

    def on(self, tier: Tier) -> Planned:
        """This plan with the optimizer states on another tier, which must not be the device."""
        return replace(self, choice=self.choice.with_states_on(tier), refusal=None)

    def _buffer_bytes(self) -> int:
        slot_arrays = self.needs.states
        buffers = min(self.choice.states.in_flight or IN_FLIGHT, len(slot_arrays))
        return buffers * max((slot.nbytes for slot in slot_arrays), default=0)


class Plans:
    """Makes plans of one model. What of them depends on the model alone is computed once.

    Args:
        model: may be on the meta device: only shapes count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes: dict[Hashable, ModelShape] = {}

    def of(
        self,
        *,
        direct: bool,
        ranks: int = 1,
        tensor_parallel: int = 1,
        free_cpu_bytes: int | None = None,
        cpus: int | None = None,
        rules: tuple[Rule, Rule] | None = None,
        pick: Pick | None = None,
        **options: Any,
    ) -> Planned:
        """The plan of `OffloadZero(model, **options)`.

        Args:
            direct: whether the model's device is the CPU.
            ranks: data-parallel ranks, each with a machine to itself; the plan is of the first one, which holds most.
            tensor_parallel: ranks that share the matrices of blocks.
            free_cpu_bytes: free RAM; None: what is free here.
            cpus: usable CPUs; None: those that are here.
            rules: of the optimizers of blocks' matrices, and of all else; None: Adam's.
            pick: see `choose`.
            **options: of OffloadZero.

        Raises:
            ConfigError: as `OffloadZero` does.
        """
        given = Options(**options)
        shape = self._shape(given, rules, tensor_parallel)
        room = replace(shape.room(given), free_cpu_bytes=free_cpu_bytes)
        situation = shape.situation(ranks=ranks, slices=tensor_parallel)
        has_same_bits = all(rule.has_same_bits for rule in rules or (AdamRule(given.states),))
        situation = replace(situation, has_same_bits=has_same_bits)
        if rules is not None:
            threads = kernel_threads(given.tuned.threads, ranks_on_node=1, direct=direct, cpus=cpus)
            situation = replace(situation, temporary_bytes=shape.temporary_bytes(rules, given, threads))
        replicas = replicas_of(decide(given, situation), ranks=ranks, rows=1)
        layout_of = partial(shape.layout, ranks=ranks, replicas=replicas)
        choice, layout, result = search(given, situation, layout_of, direct=direct, room=room, pick=pick)
        return Planned(layout, choice, direct, room, result if isinstance(result, BudgetError) else None)

    def _shape(self, given: Options, rules: tuple[Rule, Rule] | None, parts: int) -> ModelShape:
        """The shape of the part of the model that one of `parts` tensor-parallel ranks has, for these optimizers."""
        of_options = given.compute_dtype, given.fp32_modules, given.units, given.tile_bytes
        key = (rules or given.states, parts, *of_options)
        if key not in self._shapes:
            shape = ModelShape.of(self._model, [{"params": list(self._model.parameters())}], given)
            if rules is None:
                shape = shape.with_rules([AdamRule(given.states)], given)
            else:
                shape = shape.with_groups_by_kind().with_rules(rules, given)
            self._shapes[key] = shape.cut(parts) if parts > 1 else shape
        return self._shapes[key]


def plan_of(model: nn.Module, **options: Any) -> Planned:
    """The plan of `OffloadZero(model, ...)`; see `Plans.of`, which takes the same."""
    return Plans(model).of(**options)


def zero_r(planned: Planned, tensor_parallel: int, *, blocks: int, entering_bytes: int) -> dict[str, int]:
    """What ZeRO-R does to one of several tensor-parallel ranks, in bytes but for `gathered_elements`.

    - checkpoint_bytes: what enters all blocks in a micro-batch. Without partitioning each rank keeps all of it.
    - part_bytes: the part of it that each rank keeps with partitioning (P_a), in whatever tier.
    - device_bytes: what is gathered on the device at once, which is the inputs of the block that is recomputed and of
    the next one. With the parts in RAM or on NVMe (P_a+cpu, P_a+nvme), nothing else of them is on the device.
    - gathered_elements: what a rank sends in the backward of a micro-batch.
    - buffer_bytes: the buffers in which gradients travel, whatever the model's size (C_B).
    - region_bytes: the memory reserved for activations in one piece (M_D).

    Args:
        planned: the plan.
        tensor_parallel: how many ranks share the matrices of blocks.
        blocks: how many blocks the model has.
        entering_bytes: what enters one of them.

    Returns:
        A number for each of these names.

    Raises:
        BudgetError: as `Planned.place`.
    """
    partition = partition_bytes(entering_bytes, tensor_parallel)
    return {
        "checkpoint_bytes": blocks * entering_bytes,
        "part_bytes": blocks * partition,
        "device_bytes": min(blocks, 2) * tensor_parallel * partition,
        "gathered_elements": blocks * (tensor_parallel - 1) * partition // planned.choice.model.compute_dtype.itemsize,
        "buffer_bytes": planned.needs.communication_bytes,
        "region_bytes": total_of(planned.place().regions, (ACTIVATIONS,)),
    }


def sent_numel(planned: Planned) -> dict[str, int]:
    """How many elements of each kind a rank sends to others in a step, padding included.

    At stage 3 every micro-batch gathers all units for its forward, and for its backward all but those that are still
    there: the root and the last block, if blocks run in the order of the model.
    """
    layout, choice = planned.layout.trained, planned.choice
    reduction = planned.needs.reduction
    if reduction is None:
        return {"gradients": 0, "parameters": 0}
    shards = dict.fromkeys(dict.fromkeys(flat.unit for flat in layout.flats), 0)
    for flat in layout.flats:
        shards[flat.unit] += layout.shard_numel(flat.index)
    gathered = sum(shards.values())
    if choice.grads.stage == 3:
        last = next((unit for unit in reversed(shards) if unit != ROOT), ROOT)
        kept = sum(shards[unit] for unit in {ROOT, last} if unit in shards)
        gathered = choice.grads.micro_batches * (2 * gathered - kept)
    receivers = layout.ranks - 1
    return {"gradients": receivers * reduction.rounds * sum(shards.values()), "parameters": receivers * gathered}


def explain(placement: Placement) -> list[Row]:
    """Every byte of `placement`, by kind and tier, in the order of `TIERS` and of kinds; see [Note: rows].

    Rows without bytes are left out.
    """
    rows = [
        Row("param", DEVICE, placement.model_bytes - placement.resident_bytes),
        Row("frozen", DEVICE, placement.resident_bytes),
    ]
    totals = Counter[tuple[Tier, str]]()
    for region in placement.regions:
        for kind, nbytes in region.rows():
            totals[region.tier, kind] += nbytes
    states = [kind for _, kind in totals if kind not in FIRST + LAST]
    kinds = (*FIRST, *dict.fromkeys(states), *LAST)
    rows += [Row(kind, tier, totals[tier, kind]) for tier in TIERS.values() for kind in kinds]
    return [row for row in rows if row.nbytes]


def bytes_per_param(placement: Placement, layout: Layout) -> float:
    """How many bytes the disk reads and writes in a step for each trained parameter."""
    return (placement.read_bytes + placement.written_bytes) / layout.trained.numel
