"""Where the bytes go: computed from the same layout and cache code that training runs on, before anything runs.

With `tier="cpu"` every chunk is kept in RAM; with `tier="nvme"` as many as the budget has room for beside the
buffers that the others stream through. It is one computation with different budgets. With `tier="device"` all that
would be in RAM is on the device, and in RAM are only the buffers through which commits go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from offload import config as configuration
from offload.config import LEAST_IN_FLIGHT, MASTER_ITEM_BYTES, Config, Tuning
from offload.dist import exchange
from offload.errors import BudgetError, ConfigError
from offload.grads import local as gradients
from offload.grads.buckets import Reduction
from offload.layout import Layout, build, tiled
from offload.model.units import rows_of, specs_of
from offload.native.torch_kernels import scratch_bytes
from offload.optim import adam as step
from offload.planner.device import Room, require_room
from offload.planner.machine import free_memory
from offload.sizes import format_bytes
from offload.storage.arena import carved_bytes
from offload.storage.chunk_cache import residents
from offload.storage.swap_format import STATE_KINDS, Record, file_bytes, param_records_of, records_of

IN_FLIGHT = 4
"""Buffers for streamed chunks if the budget allows: one more than the least, so that a late write delays no read."""

TYPICAL_TBW = 600e12
"""Bytes a common 1 TB consumer drive is warranted for."""


_SHOWN = {"device": "the device", "cpu": "RAM", "nvme": "NVMe"}


@dataclass(frozen=True)
class Pool:
    """Which chunks of one kind stay in RAM, and how many buffers the others pass through. Sizes in bytes."""

    kept: frozenset[int]
    in_flight: int
    kept_bytes: int
    largest: int

    @property
    def nbytes(self) -> int:
        return self.kept_bytes + self.in_flight * self.largest


@dataclass(frozen=True)
class Placement:
    """Bytes by tier, fixed before the first step.

    kept: chunks whose states stay where they are; in_flight: buffers for the others; arena_bytes: all that this library
    holds in RAM; budget_bytes: what it may hold; read_bytes, written_bytes: of the disk, a step; disk_bytes: the swap
    file; device_bytes: the most that parameters and buffers take on the model's device at once, resident_bytes of it by
    those that nobody trains; device_budget_bytes: what they may take, None: anything; streamed_chunks: those not kept;
    utilisation: the share of the chunks' buffers that chunks fill; params: of 16-bit parameters that are streamed, or
    brought here only to be committed, None where they stay on the device; staged: the same of states that are on the
    device; held_bytes: what this rank holds of each state kind, wherever it lies, gaps between parameters included;
    slab_bytes: of device_bytes, those of states, gradients and what works on them, with tier="device"; with others, of
    what goes between ranks, if the device has memory of its own.
    """

    kept: frozenset[int]
    in_flight: int
    arena_bytes: int
    budget_bytes: int
    read_bytes: int
    written_bytes: int
    disk_bytes: int
    device_bytes: int
    streamed_chunks: int
    utilisation: float
    params: Pool | None = None
    grads: Pool | None = None
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    device_budget_bytes: int | None = None
    resident_bytes: int = 0
    slab_bytes: int = 0
    staged: Pool | None = None

    def describe(self, layout: Layout, config: Config) -> str:
        """One line for people."""
        streamed = self.streamed_chunks
        places = " and ".join(map(str, config.paths))
        at_most = f" of {format_bytes(config.device_memory)} allowed" if config.device_memory is not None else ""
        where = "" if config.param_tier == "device" else f", streamed from {_SHOWN[config.param_tier]}"
        if config.tier == "device" and where:
            where = ", gathered from the ranks"
        tiled = sum(spec.tile > 0 for spec in layout.specs)
        where += f", {tiled} layers run in tiles of {format_bytes(config.tile_bytes or 0)}" if tiled else ""
        where += f", gradients on {_SHOWN[config.grad_tier]}" if config.grad_tier == "nvme" else ""
        text = (
            f"offload: {layout.numel:,} parameters{where}; peak on the device "
            f"{format_bytes(self.device_bytes)}{at_most}; "
            f"peak RAM {format_bytes(self.arena_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
        )
        if not self.written_bytes:
            text += f"optimizer states stay {'in' if config.tier == 'cpu' else 'on'} {_SHOWN[config.tier]}"
            text += f" ({len(self.kept)} chunks)"
            if config.commit_every is None:
                return text
            return f"{text}, and are written to {places} ({format_bytes(self.disk_bytes)}) at a commit{_every(config)}"
        steps = TYPICAL_TBW / self.written_bytes
        return text + (
            f"{streamed} of {len(layout.chunks)} chunks stream through {places} ({format_bytes(self.disk_bytes)}): "
            f"{format_bytes(self.read_bytes)} read and {format_bytes(self.written_bytes)} written a step, "
            f"{steps:,.0f} steps for a drive warranted for 600 TB written; "
            + ("nothing is committed" if config.commit_every is None else f"a commit{_every(config)}")
        )


def _every(config: Config) -> str:
    """When commits are made, in words."""
    return f" every {config.commit_every} steps" if config.commit_every else " when commit() is called"


def place(layout: Layout, config: Config, *, direct: bool, room: Room | None = None, beside: int = 0) -> Placement:
    """Decides which chunks stay in RAM.

    Args: direct: whether the model's device is the CPU, so that copies need no buffers; room: on the device; beside:
    bytes to leave free for reading a commit in another layout.
    Raises: ConfigError; BudgetError naming what is needed, what is there and the option that would fix it.
    """
    if config.grad_tier == "nvme" and config.param_tier == "device" and not direct:
        # New parameters rest in the memory of their gradients until they land.
        raise ConfigError('grad_tier="nvme" needs param_tier="cpu" or "nvme" where the device has memory of its own')
    room = Room() if room is None else room
    slab_bytes = _slab_bytes(layout, config, direct=direct)
    device_bytes = require_room(layout, config, room, slab_bytes)
    given = config.cpu_memory
    budget = free_memory() // 2 // config.ranks_on_node if given is None else given
    records = records_of(layout, split_master=config.split_master)
    sizes = [record.nbytes for record in records]
    staged = _few(sizes, config) if config.tier == "device" and config.paths else None
    fixed = beside + (0 if config.tier == "device" else _fixed_bytes(layout, config, direct=direct))
    fixed += 0 if staged is None else staged.nbytes
    states = 0 if config.tier == "device" else sum(sizes)
    if config.tier != "nvme":
        if fixed + states > budget:
            other = 'or tier="nvme" with a path' if config.tier == "cpu" else "or a smaller Tuning(chunk=...)"
            raise _too_small(fixed + states, budget, given, other)
        kept, in_flight = frozenset(range(len(sizes))), 0
    else:
        least = fixed + min(LEAST_IN_FLIGHT * max(sizes, default=0), sum(sizes))
        if least > budget:
            raise _too_small(least, budget, given, "or a smaller Tuning(chunk=...)")
        kept, in_flight = _keep_and_stream(sizes, budget - fixed, config.in_flight)
    streamed = [size for chunk, size in enumerate(sizes) if chunk not in kept]
    kept_bytes, largest = sum(sizes) - sum(streamed), max(streamed, default=0)
    arena_bytes = fixed - beside + (kept_bytes if states else 0) + in_flight * largest
    filled = kept_bytes + (in_flight * sum(streamed) / len(streamed) if streamed else 0)
    read, written = _moved_beside(layout, config)
    if given is not None and arena_bytes + beside > (free := free_memory()):
        other = ', and tier="nvme" with a path' if config.tier == "cpu" else ""
        raise BudgetError(
            f"{format_bytes(arena_bytes)} of RAM would be used and {format_bytes(free)} are free: "
            f"give cpu_memory={free} or less{other}",
            needed=arena_bytes,
            available=free,
            option="cpu_memory",
        )
    return Placement(
        kept=kept,
        in_flight=in_flight,
        arena_bytes=arena_bytes,
        budget_bytes=budget,
        read_bytes=sum(streamed) + read,
        written_bytes=sum(streamed) + written,
        disk_bytes=_disk_bytes(layout, config),
        device_bytes=device_bytes,
        device_budget_bytes=room.limit(config),
        resident_bytes=room.resident_bytes,
        params=_params_pool(layout, config),
        grads=_grads_pool(layout, config),
        held_bytes=_held_bytes(layout, config),
        slab_bytes=slab_bytes,
        staged=staged,
        streamed_chunks=len(streamed),
        utilisation=filled / max(kept_bytes + in_flight * largest, 1),
    )


def _slab_bytes(layout: Layout, config: Config, *, direct: bool) -> int:
    """Of the device, for all but parameters: with tier="device" nothing has to be copied there; else what goes between
    ranks."""
    if config.tier != "device":
        return 0 if direct or layout.ranks == 1 else _travelling_bytes(layout, config, direct=False)
    states = sum(record.nbytes for record in records_of(layout, split_master=config.split_master))
    largest = max((spec.numel for spec in layout.specs), default=0)
    return _fixed_bytes(layout, config, direct=True) + states + (0 if direct else carved_bytes(scratch_bytes(largest)))


def _held_bytes(layout: Layout, config: Config) -> dict[str, int]:
    """By state kind; parameters that are on the device only for a while do not count."""
    states = sum(chunk.numel for chunk in layout.chunks) * MASTER_ITEM_BYTES
    params = gradients_held = 0
    for flat in layout.flats:
        part, whole = layout.part_numel(flat.index), layout.padded_numel(flat.index)
        params += (layout.replicas * part if config.param_tier != "device" else whole) * flat.dtype.itemsize
        sums_locally = layout.ranks > 1 and config.stage == 1 and config.accumulation > 1
        itemsize = 4 if config.accumulation > 1 else flat.dtype.itemsize
        gradients_held += (whole if sums_locally else part) * itemsize
    return {"param": params, "grad": gradients_held} | dict.fromkeys(STATE_KINDS, states)


def slot_records(layout: Layout, config: Config) -> list[Record]:
    """What all slots of a run hold: the states of each chunk, then, if they go there, its parameters and gradients."""
    params = param_records_of(layout) if config.param_tier == "nvme" or config.commits_parameters else []
    grads = gradients.records_of(layout, config.accumulation) if config.grad_tier == "nvme" else []
    return records_of(layout, split_master=config.split_master) + params + grads


def committed_slots(layout: Layout, config: Config) -> int:
    """How many of `slot_records`, the first ones, are committed."""
    return len(layout.chunks) * (2 if config.commits_parameters else 1)


def _disk_bytes(layout: Layout, config: Config) -> int:
    """Of this rank's swap files, but for a page each after the first."""
    if not config.paths:
        return 0
    return file_bytes(slot_records(layout, config), config.places, committed_slots(layout, config))


def _params_pool(layout: Layout, config: Config) -> Pool | None:
    """All in RAM, or as few as work: what else the budget has room for saves as many bytes with states in it."""
    sizes = [record.nbytes for record in param_records_of(layout)]
    if config.param_tier == "device":
        # At a commit some are written while another is copied: with two, the drive would wait for half of the time.
        return (
            Pool(frozenset(), min(IN_FLIGHT, len(sizes)), 0, max(sizes, default=0))
            if config.commits_parameters
            else None
        )
    return Pool(frozenset(range(len(sizes))), 0, sum(sizes), 0) if config.param_tier == "cpu" else _few(sizes, config)


def _grads_pool(layout: Layout, config: Config) -> Pool | None:
    """None where the sink has them all in RAM."""
    if config.grad_tier != "nvme":
        return None
    return _few([record.nbytes for record in gradients.records_of(layout, config.accumulation)], config)


def _moved_beside(layout: Layout, config: Config) -> tuple[int, int]:
    """Bytes of parameters and gradients read, and written, a step.

    A forward after a step finds its parameters in RAM, where they have just been made; every other pass reads them.
    Gradients are written by each micro-batch, and read by the next one or the step.
    """
    passes = config.accumulation
    params = tiled = 0
    if config.param_tier == "nvme":
        for chunk, record in zip(layout.param_chunks, param_records_of(layout), strict=True):
            params += record.nbytes
            # A tile comes when all new values of its weight have landed: it is read in the first forward as in others.
            tiled += record.nbytes if layout.tile_of(chunk.flat) else 0
    grads = gradients.records_of(layout, passes) if config.grad_tier == "nvme" else []
    gradient_bytes = passes * sum(record.nbytes for record in grads)
    return (2 * passes - 1) * params + tiled + gradient_bytes, params + gradient_bytes


def _few(sizes: list[int], config: Config) -> Pool:
    return Pool(frozenset(), min(config.in_flight or IN_FLIGHT, len(sizes)), 0, max(sizes, default=0))


def _fixed_bytes(layout: Layout, config: Config, *, direct: bool) -> int:
    """All but the states."""
    pools = [pool.nbytes for pool in (_params_pool(layout, config), _grads_pool(layout, config)) if pool is not None]
    stored = config.grad_tier == "nvme"
    returned = step.arena_bytes(
        layout,
        config.accumulation,
        direct=direct or config.param_tier != "device",
        split_master=config.split_master,
    )
    if layout.ranks > 1:
        travelling = _travelling_bytes(layout, config, direct=True) if direct else 0
        return _reduction(layout, config, direct=direct).waiting_bytes + travelling + returned + sum(pools)
    return gradients.arena_bytes(layout, config.accumulation, direct=direct, stored=stored) + returned + sum(pools)


def _reduction(layout: Layout, config: Config, *, direct: bool) -> Reduction:
    assert config.stage is not None
    stored = config.grad_tier == "nvme"
    return Reduction(layout, config.stage, config.accumulation, config.bucket_bytes, direct=direct, stored=stored)


def _travelling_bytes(layout: Layout, config: Config, *, direct: bool) -> int:
    """Of the device's memory, in which gradients and parameters go between ranks."""
    return _reduction(layout, config, direct=direct).travelling_bytes + exchange.arena_bytes(layout)


def _keep_and_stream(sizes: list[int], room: int, in_flight: int | None) -> tuple[frozenset[int], int]:
    """The chunks to keep and the buffers for the others, within `room` bytes."""
    if sum(sizes) <= room:
        return frozenset(range(len(sizes))), 0
    buffer = max(sizes, default=0)
    buffers = min(in_flight or IN_FLIGHT, len(sizes), room // buffer)
    kept = residents(range(len(sizes)), sizes, room - buffers * buffer)
    return kept, min(buffers, len(sizes) - len(kept))


def _too_small(needed: int, budget: int, given: int | None, other: str) -> BudgetError:
    origin = "cpu_memory allows" if given is not None else "half of the free RAM is"
    return BudgetError(
        f"{format_bytes(needed)} of RAM are needed and {origin} {format_bytes(budget)}: "
        f"give cpu_memory={needed} or more, {other}",
        needed=needed,
        available=budget,
        option="cpu_memory",
    )


def least_cpu_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    keep_fp32: Iterable[nn.Module | type[nn.Module]] = (),
    accumulation: int = 1,
    param_tier: str | None = None,
    grad_tier: str | None = None,
    commit_every: int | str | None = "auto",
    tuning: Tuning | None = None,
    stage: int | None = None,
    ranks: int = 1,
    replicas: int = 1,
) -> int:
    """The least `cpu_memory`, in bytes, with which `OffloadZero(model, ..., tier="nvme")` runs on each of `ranks`.

    Args: replicas: rows of the mesh that is given as process_group.

    Raises: ConfigError as `OffloadZero` does.
    """
    config = configuration.check(
        tier="nvme",
        path=".",
        compute_dtype=compute_dtype,
        keep_fp32=keep_fp32,
        accumulation=accumulation,
        param_tier=param_tier,
        grad_tier=grad_tier,
        commit_every=commit_every,
        tuning=tuning,
        stage=stage,
    )
    groups = [{"params": list(model.parameters())}] if optimizer is None else optimizer.param_groups
    specs, params = specs_of(model, groups, config.keep_fp32, config.compute_dtype, chosen=config.units, planned=True)
    device = params[0].device
    config = configuration.over_ranks(config, ranks=ranks, ranks_on_node=1)
    copies = configuration.replicas_of(config, ranks=ranks, rows=replicas)
    if config.param_tier != "device":
        specs = tiled(specs, rows_of(model, params), config.tile_bytes or 0)
    layouts = (build(specs, config.chunk_numel, ranks=ranks, rank=rank, replicas=copies) for rank in range(ranks))
    return max(_least(layout, config, direct=device.type != "cuda") for layout in layouts)


def _least(layout: Layout, config: Config, *, direct: bool) -> int:
    sizes = [record.nbytes for record in records_of(layout, split_master=config.split_master)]
    fixed = _fixed_bytes(layout, config, direct=direct)
    return fixed + min(LEAST_IN_FLIGHT * max(sizes, default=0), sum(sizes))
