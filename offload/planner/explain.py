"""A placement in rows for people and machines: which kind of bytes lies on which tier, and what other budgets would do.

[Note: rows]
The rows of a tier add up to the placement's figure for it: `device_bytes`, `arena_bytes`, `disk_bytes`. A row is of a
state kind (param, grad, master, exp_avg, exp_avg_sq), or one of

    buffers   what streamed chunks pass through, and new parameters between ranks that keep the same ones
    slots     reserved on the disk, and not written in every step: those of chunks that are kept in RAM, and with
              commits the second place of each, and of parameters that live elsewhere both
    rest      headers, padding, what copies to and from a device pass through, and temporaries of a device's kernels

With `tier="device"` what else is in RAM is on the device, and in RAM are the buffers of commits.

`grad` holds the gradients' sums of squares and bounce buffers, too, and the buffers in which they travel between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from offload import config as configuration
from offload.config import Config, Tier
from offload.dist import exchange
from offload.errors import BudgetError
from offload.grads import local as gradients
from offload.grads.buckets import Reduction
from offload.layout import Layout, build, tiled
from offload.model.flat_param import untrained_bytes
from offload.model.units import ROOT, compute_dtypes, rows_of, specs_of
from offload.planner.choice import choose
from offload.planner.device import Room
from offload.planner.placement import IN_FLIGHT, TYPICAL_TBW, Placement, committed_slots, place, slot_records
from offload.storage.swap_format import STATE_KINDS, Record, records_of


@dataclass(frozen=True)
class Row:
    """See [Note: rows]."""

    kind: str
    tier: Tier
    nbytes: int


@dataclass(frozen=True)
class Planned:
    """A model and a configuration, of which nothing is allocated.

    direct: whether the model's device is the CPU, so that copies need no buffers; room: on the device.
    """

    layout: Layout
    config: Config
    direct: bool
    room: Room = field(default_factory=Room)

    @property
    def records(self) -> list[Record]:
        return records_of(self.layout, split_master=self.config.split_master)

    @property
    def state_bytes(self) -> int:
        """What all chunks take in RAM."""
        return sum(record.nbytes for record in self.records)

    def place(self) -> Placement:
        """Raises: BudgetError as `OffloadZero` does."""
        return place(self.layout, self.config, direct=self.direct, room=self.room)

    def with_memory(self, cpu_memory: int) -> Planned:
        return replace(self, config=replace(self.config, cpu_memory=cpu_memory))

    def least(self) -> int:
        """The least `cpu_memory` that works, in bytes."""
        try:
            # Asked of the planner itself, so that there is one formula.
            return self.with_memory(0).place().arena_bytes
        except BudgetError as error:
            return error.needed

    def cpu_memory_for(self, share: float) -> int:
        """The `cpu_memory` that has room for a `share` of the states beside everything else, for tier="nvme".

        Args: share: 0 to 1; at 0 there is still room for all buffers in flight that the planner uses.
        """
        everything = self._all_in_ram()
        fixed = everything - self.state_bytes
        return min(fixed + self._buffer_bytes() + round(share * self.state_bytes), everything)

    def largest_share(self, cpu_memory: int) -> float | None:
        """The share of the states that `cpu_memory` keeps in RAM with tier="nvme"; None: not even the least fits."""
        if cpu_memory < self._on("nvme").least():
            return None
        if cpu_memory >= self._all_in_ram():
            return 1.0
        room = cpu_memory - self.cpu_memory_for(0.0)
        return max(0.0, min(1.0, room / self.state_bytes))

    def _all_in_ram(self) -> int:
        in_ram = self._on("cpu")
        return replace(in_ram, config=replace(in_ram.config, paths=())).least()

    def _on(self, tier: Tier) -> Planned:
        """The same with states elsewhere, off the device."""
        grads: Tier = "cpu" if self.config.grad_tier == "device" else self.config.grad_tier
        return replace(self, config=replace(self.config, tier=tier, grad_tier=grads))

    def _buffer_bytes(self) -> int:
        records = self.records
        buffers = min(self.config.in_flight or IN_FLIGHT, len(records))
        return buffers * max((record.nbytes for record in records), default=0)


def plan_of(model: nn.Module, *, direct: bool, ranks: int = 1, **options: Any) -> Planned:
    """What `OffloadZero(model, **options)` would be given. The model may be on the meta device: only shapes count.

    Args: ranks: of which this is the first, which holds most, with a machine to itself.
    Raises: ConfigError as `OffloadZero` does.
    """
    config = configuration.check(**options)
    groups = [{"params": list(model.parameters())}]
    specs, params = specs_of(model, groups, config.keep_fp32, config.compute_dtype, chosen=config.units, planned=True)
    dtypes = compute_dtypes(model, config.keep_fp32, config.compute_dtype)
    room = Room(untrained_bytes(model, params, dtypes))
    rows = rows_of(model, params)
    config = configuration.over_ranks(config, ranks=ranks, ranks_on_node=1)
    replicas = configuration.replicas_of(config, ranks=ranks, rows=1)

    def laid_out(chosen: Config) -> Layout:
        split = tiled(specs, rows, chosen.tile_bytes or 0)
        return build(split, chosen.chunk_numel, ranks=ranks, replicas=replicas)

    try:
        config, layout, _ = choose(config, laid_out, direct=direct, room=room)
    except BudgetError:  # said by `place`
        layout = laid_out(config)
    return Planned(layout, config, direct, room)


def sent_numel(planned: Planned) -> dict[str, int]:
    """Elements that a rank sends to others in a step, padding included, by what they are.

    At stage 3 every micro-batch gathers all units for its forward, and for its backward all but those that are still
    there: the root and the last block, if blocks run in the order of the model.
    """
    layout, config = planned.layout, planned.config
    if layout.ranks == 1:
        return {"gradients": 0, "parameters": 0}
    assert config.stage is not None
    parts = dict.fromkeys(dict.fromkeys(flat.unit for flat in layout.flats), 0)
    for flat in layout.flats:
        parts[flat.unit] += layout.part_numel(flat.index)
    rounds = Reduction(layout, config.stage, config.accumulation, config.bucket_bytes).rounds
    gathered = sum(parts.values())
    if config.stage == 3:
        last = next((unit for unit in reversed(parts) if unit != ROOT), ROOT)
        kept = sum(parts[unit] for unit in {ROOT, last} if unit in parts)
        gathered = config.accumulation * (2 * gathered - kept)
    others = layout.ranks - 1
    return {"gradients": others * rounds * sum(parts.values()), "parameters": others * gathered}


def explain(placement: Placement, planned: Planned) -> list[Row]:
    """Every byte of `placement`, by state kind and tier; see [Note: rows]. Rows without bytes are left out."""
    rows = [
        Row("param", "device", placement.device_bytes - placement.slab_bytes),
        *_in_memory(placement, planned),
        *_on_disk(placement, planned),
    ]
    return [row for row in rows if row.nbytes]


def _in_memory(placement: Placement, planned: Planned) -> Iterator[Row]:
    """In RAM, or on the device."""
    where: Tier = "device" if planned.config.tier == "device" else "cpu"
    total = placement.slab_bytes if where == "device" else placement.arena_bytes
    records = planned.records
    streamed = [record.nbytes for chunk, record in enumerate(records) if chunk not in placement.kept]
    rows = [
        Row("grad", where, _gradient_bytes(planned)),
        *_states([records[chunk] for chunk in placement.kept], where),
        Row("param", where, placement.params.kept_bytes if placement.params else 0),
        Row("buffers", where, placement.in_flight * max(streamed, default=0) + _param_buffers(placement, planned)),
    ]
    yield from rows
    yield Row("rest", where, total - sum(row.nbytes for row in rows))
    if placement.staged is not None:
        yield Row("buffers", "cpu", placement.staged.nbytes)
    if where == "cpu":
        yield Row("buffers", "device", placement.slab_bytes)


def _gradient_bytes(planned: Planned) -> int:
    config, layout = planned.config, planned.layout
    stored = config.grad_tier == "nvme"
    direct = planned.direct or config.tier == "device"
    if layout.ranks > 1:
        assert config.stage is not None
        reduction = Reduction(
            layout, config.stage, config.accumulation, config.bucket_bytes, direct=direct, stored=stored
        )
        return reduction.waiting_bytes + (reduction.travelling_bytes if direct else 0)
    return gradients.arena_bytes(planned.layout, config.accumulation, direct=direct, stored=stored)


def _param_buffers(placement: Placement, planned: Planned) -> int:
    """What streamed parameters and gradients pass through."""
    pools = sum(pool.in_flight * pool.largest for pool in (placement.params, placement.grads) if pool)
    direct = planned.direct or planned.config.tier == "device"
    return pools + (exchange.arena_bytes(planned.layout) if direct else 0)


def _on_disk(placement: Placement, planned: Planned) -> Iterator[Row]:
    if not placement.disk_bytes:
        return
    records = planned.records
    rows = [
        *_states([record for chunk, record in enumerate(records) if chunk not in placement.kept], "nvme"),
        Row("param", "nvme", sum(_param_bytes(planned.layout)) if planned.config.param_tier == "nvme" else 0),
        Row("grad", "nvme", _stored_gradient_bytes(planned)),
        Row("slots", "nvme", sum(records[chunk].nbytes for chunk in placement.kept) + _second_places(planned)),
    ]
    yield from rows
    yield Row("rest", "nvme", placement.disk_bytes - sum(row.nbytes for row in rows))


def _second_places(planned: Planned) -> int:
    """What commits take more on the disk."""
    config, layout = planned.config, planned.layout
    records = slot_records(layout, config)[: committed_slots(layout, config)]
    elsewhere = config.commits_parameters and config.param_tier != "nvme"
    once = sum(record.nbytes for record in records[len(layout.chunks) :]) if elsewhere else 0
    return (config.places - 1) * sum(record.nbytes for record in records) + once


def _stored_gradient_bytes(planned: Planned) -> int:
    if planned.config.grad_tier != "nvme":
        return 0
    records = gradients.records_of(planned.layout, planned.config.accumulation)
    return sum(record.numel * record.itemsizes[0] for record in records)


def _param_bytes(layout: Layout) -> Iterator[int]:
    return (chunk.numel * layout.flats[chunk.flat].dtype.itemsize for chunk in layout.param_chunks)


def _states(records: list[Record], tier: Tier) -> Iterator[Row]:
    """Without headers and padding. A split master is half as wide: its upper half is the parameter."""
    for number, kind in enumerate(STATE_KINDS):
        yield Row(kind, tier, sum(record.itemsizes[number] * record.numel for record in records))


def drive_life_steps(placement: Placement) -> float | None:
    """Steps until a common drive has been written as much as it is warranted for; None where nothing is written."""
    return TYPICAL_TBW / placement.written_bytes if placement.written_bytes else None


def bytes_per_param(placement: Placement, layout: Layout) -> float:
    """Read and written, a parameter and step."""
    return (placement.read_bytes + placement.written_bytes) / layout.numel
