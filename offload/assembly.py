"""Puts the parts together for one run: arena, files, kernels, gradient sink, store, step. They know nothing of torch's
optimizer interface, which is zero.py's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.collectives import Communicator
from offload.config import Config
from offload.copies import Copier, HostCopier
from offload.io.probe import weights
from offload.io.settings import open_engine
from offload.layout import Layout
from offload.module.masters import Masters
from offload.module.parameters import Parameters
from offload.module.reduction import ReducedGradients
from offload.native import Kernels, load, load_on
from offload.native.device import scratch_bytes
from offload.native.library import return_large_blocks
from offload.native.threads import usable_cpus
from offload.optim.gradients import GradientSink
from offload.optim.gradients import records_of as gradient_records_of
from offload.optim.sink import Gradients
from offload.optim.step import ParameterReturn, Step
from offload.planner.placement import Placement, committed_slots, slot_records
from offload.store.arena import Arena, Lender
from offload.store.device import DeviceArena, DeviceStore
from offload.store.slots import Record, param_records_of, records_of
from offload.store.store import Store
from offload.store.stripes import Stripes
from offload.timeline import Timeline


@dataclass(frozen=True)
class Parts:
    """What a run is made of. arena: RAM; slab: memory of the device, with tier="device"; store: of the states; params:
    of the parameters, stored: of the gradients, if they are there; streamed: params, if these are on the device only
    around their use; slots: the swap files; io_engine: its name, None without files; copier: between the model's
    device and where parameters and gradients wait."""

    arena: Arena
    slab: Lender | None
    copier: Copier
    kernels: Kernels
    sink: Gradients
    store: Store
    params: Store | None
    streamed: Store | None
    stored: Store | None
    returned: ParameterReturn
    parameters: Parameters
    masters: Masters
    step: Step
    timeline: Timeline
    slots: Stripes | None
    io_engine: str | None
    comm: Communicator

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(store for store in (self.store, self.params, self.stored) if store is not None)

    @property
    def files(self) -> tuple[str, ...]:
        return () if self.slots is None else self.slots.paths

    def stats(self, placement: Placement, initial_bytes: int) -> dict[str, Any]:
        """The counters of the parts; see OffloadZero.stats. Args: initial_bytes: written before the first step."""
        counted, seconds = self.timeline.counted, self.timeline.seconds
        return {
            "chunks": len(placement.kept) + placement.streamed_chunks,
            "streamed_chunks": placement.streamed_chunks,
            "nvme_init_bytes": initial_bytes,
            "nvme_read_bytes": counted("nvme_read_bytes"),
            "nvme_written_bytes": counted("nvme_written_bytes") - initial_bytes,
            "host_to_device_bytes": counted("host_to_device_bytes"),
            "device_to_host_bytes": counted("device_to_host_bytes"),
            "gathered_bytes": counted("gathered_bytes"),
            "peak_cpu_bytes": self.arena.used,
            "cpu_budget_bytes": placement.budget_bytes,
            "peak_device_bytes": self.parameters.peak_bytes
            + placement.resident_bytes
            + (0 if self.slab is None else self.slab.used),
            "device_budget_bytes": placement.device_budget_bytes,
            "arena_utilisation": placement.utilisation,
            "disk_bytes": placement.disk_bytes,
            **{name: seconds(name) for name in _SPANS},
            "kernel": self.kernels.variant,
            "threads": self.kernels.threads,
            "io_engine": self.io_engine,
            "rank": self.comm.rank,
            "ranks": self.comm.size,
            **{f"held_{kind}_bytes": nbytes for kind, nbytes in placement.held_bytes.items()},
            **self.comm.stats(),
        }


_SPANS = ("step_s", "landing_s", "adam_s", "gradient_s", "wait_nvme_s", "wait_device_s", "wait_cpu_s")


def assemble(
    undo: ExitStack,
    config: Config,
    layout: Layout,
    placement: Placement,
    params: Sequence[nn.Parameter],
    device: torch.device,
    copier: Copier,
    timeline: Timeline,
    comm: Communicator,
    resumed: tuple[bytes, Sequence[int]] | None = None,
    *,
    is_aside: bool = False,
    run_id: bytes | None = None,
) -> Parts:
    """Reserves memory and opens files; `undo` gets their closing, in reverse order. Calls nothing of the other ranks.

    Args: resumed: the run whose files are there; is_aside: it continues another one; run_id: of a new one; see Stripes.
    Raises: BudgetError, PathError, PathInUseError, ResumeError, ConfigError; the model is not touched.
    """
    arena = Arena(placement.arena_bytes, copier, at_once=False)
    slab = _slab(config, placement, device, copier)
    undo.callback(_end, comm, arena, slab)
    memory: Lender = arena if slab is None else slab
    # The device's memory needs no copies to or from itself.
    moves = copier if slab is None else HostCopier()
    slots, io_engine = _open_files(
        undo, config, layout, placement, arena, timeline, comm.rank, resumed, is_aside, run_id
    )
    if isinstance(slab, DeviceArena):
        kernels = load_on(slab.carve(scratch_bytes(max((spec.numel for spec in layout.specs), default=0))))
    else:
        kernels = load(config.threads or max(usable_cpus() // config.ranks_on_node, 1))
    undo.callback(kernels.close)
    records = records_of(layout, split_master=config.split_master)
    stored = None
    if placement.grads is not None:
        first = len(slot_records(layout, config)) - len(layout.chunks)
        grads, pool = gradient_records_of(layout, config.accumulation), placement.grads
        stored = Store(grads, pool.kept, pool.in_flight, memory, slots, timeline, first=first)
        undo.callback(stored.close)
    sink = _sink(config, layout, memory, kernels, moves, timeline, stored, comm)
    undo.callback(sink.close)
    store = _states(undo, layout, placement, arena, slab, slots, records, timeline)
    parameters = Parameters(layout, params, device)
    params_store = None
    if placement.params is not None:
        pool = placement.params
        params_store = Store(
            param_records_of(layout), pool.kept, pool.in_flight, memory, slots, timeline, first=len(records)
        )
        undo.callback(params_store.close)
    streamed = None if config.param_tier == "device" else params_store
    if streamed is not None:
        return_large_blocks()  # units come and go: without it RSS would grow with depth
    split_master = config.split_master
    run = (layout, parameters.flats, sink, memory, moves, timeline)
    returned = ParameterReturn(*run, split_master=split_master, streamed=streamed, comm=comm, device=device)
    step = Step(layout, store, sink, returned, kernels, timeline, split_master=split_master)
    undo.callback(step.close)
    return Parts(
        arena=arena,
        slab=slab,
        copier=moves,
        kernels=kernels,
        sink=sink,
        store=store,
        parameters=parameters,
        masters=Masters(
            layout, parameters, store, kernels, split_master=split_master, params=params_store, streamed=streamed
        ),
        params=params_store,
        streamed=streamed,
        stored=stored,
        returned=returned,
        step=step,
        timeline=timeline,
        slots=slots,
        io_engine=io_engine,
        comm=comm,
    )


def _slab(config: Config, placement: Placement, device: torch.device, copier: Copier) -> Arena | DeviceArena | None:
    """Memory of the device for all that else is in RAM."""
    if config.tier != "device":
        return None
    if not copier.direct:
        return DeviceArena(placement.slab_bytes, device)
    arena = Arena(placement.slab_bytes, copier, at_once=False)
    arena.touch(lambda: None)
    return arena


def _states(
    undo: ExitStack,
    layout: Layout,
    placement: Placement,
    arena: Arena,
    slab: Lender | None,
    slots: Stripes | None,
    records: Sequence[Record],
    timeline: Timeline,
) -> Store:
    """The store of the states."""
    pool = placement.staged
    beneath = None if pool is None else Store(records, pool.kept, pool.in_flight, arena, slots, timeline)
    if beneath is not None:
        undo.callback(beneath.close)
    if slab is None:
        store = Store(records, placement.kept, placement.in_flight, arena, slots, timeline)
    else:
        store = DeviceStore(records, slab, beneath, timeline)
    undo.callback(store.close)
    return store


def _open_files(
    undo: ExitStack,
    config: Config,
    layout: Layout,
    placement: Placement,
    arena: Arena,
    timeline: Timeline,
    rank: int,
    resumed: tuple[bytes, Sequence[int]] | None,
    is_aside: bool,
    run_id: bytes | None,
) -> tuple[Stripes | None, str | None]:
    """The swap files and the name of their engine, if there are any."""
    if not config.paths:
        arena.touch(lambda: None)
        return None, None
    engine = open_engine(config.io_engine, config.paths)
    undo.callback(engine.close)
    undo.callback(arena.settle)
    arena.touch(partial(engine.register, arena.memory))
    slots = Stripes(
        engine,
        config.paths,
        weights(config.paths),
        slot_records(layout, config),
        timeline,
        # What another budget is to find again lies in an order that no budget changes.
        placement.kept if config.commit_every is None else (),
        places=config.places,
        committed=None if config.commit_every is None else committed_slots(layout, config),
        resumed=resumed,
        rank=rank,
        is_aside=is_aside,
        run_id=run_id,
    )
    undo.callback(slots.close)
    return slots, engine.name


def _sink(
    config: Config,
    layout: Layout,
    arena: Lender,
    kernels: Kernels,
    copier: Copier,
    timeline: Timeline,
    stored: Store | None,
    comm: Communicator,
) -> Gradients:
    if comm.size == 1:
        return GradientSink(layout, config.accumulation, arena, kernels, copier, timeline, stored)
    assert config.stage is not None
    return ReducedGradients(
        layout, config.stage, config.accumulation, config.bucket_bytes, arena, kernels, comm.beside, timeline, stored
    )


_abandoned: list[Arena | DeviceArena] = []
"""Into which a rank that is stuck may still make this one write: they stay mapped."""


def _end(comm: Communicator, arena: Arena, slab: Arena | DeviceArena | None) -> None:
    arenas = [one for one in (arena, slab) if one is not None]
    if not comm.close():
        _abandoned.extend(arenas)
    for one in arenas:
        one.close()
