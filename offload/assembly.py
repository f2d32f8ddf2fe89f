"""Puts the parts together for one run: memory, files, kernels, gradient sink, store, step. They know nothing of torch's
optimizer interface, which is optimizer.py's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload import interrupts
from offload.config import Config
from offload.devices.copies import Copier
from offload.dist.communicator import Communicator
from offload.grads.base import Gradients
from offload.grads.buckets import Reduction
from offload.grads.local import GradientSink
from offload.grads.local import records_of as gradient_records_of
from offload.grads.reduce_scatter import ReducedGradients
from offload.io.select import open_engine, weights
from offload.layout import Layout
from offload.memory import kernels_for, reserve
from offload.model.flat_param import Parameters
from offload.model.master_weights import Masters
from offload.native import Kernels
from offload.native.memory import return_large_blocks
from offload.optim.adam import ParameterReturn, Step
from offload.planner.placement import Placement, committed_slots, slot_records
from offload.profiling import Timeline
from offload.run import Memory
from offload.storage.arena import Arena
from offload.storage.chunk_cache import Store
from offload.storage.device_store import DeviceStore
from offload.storage.files import Directories
from offload.storage.swap_file import RunFiles, Stripes, new_run_id
from offload.storage.swap_format import Record, param_records_of, records_of


@dataclass(frozen=True)
class Parts:
    """What a run is made of. store: of the states; params: of the parameters, stored: of the gradients, if they are
    there; streamed: params, if these are on the device only around their use; slots: the swap files; io_engine: its
    name, None without files."""

    memory: Memory
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
            "peak_cpu_bytes": self.memory.ram.used,
            "cpu_budget_bytes": placement.budget_bytes,
            "peak_device_bytes": self.parameters.peak_bytes + placement.resident_bytes + self.memory.device_bytes,
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
    is_temporary: bool = False,
    run_id: bytes | None = None,
    within: Directories | None = None,
) -> Parts:
    """Reserves memory and opens files; `undo` gets their closing, in reverse order. Calls nothing of the other ranks.

    Args: resumed: the run whose files are there; is_temporary: it continues another one; run_id: of a new one; within:
    directories that are open already; see Stripes.
    Raises: BudgetError, PathError, PathInUseError, ResumeError, ConfigError; the model is not touched.
    """
    interrupts.hold()
    undo.callback(interrupts.give_back)
    memory = reserve(undo, config, placement, device, copier, comm)
    slots, io_engine = _open_files(
        undo, config, layout, placement, memory.ram, timeline, comm.rank, resumed, is_temporary, run_id, within
    )
    kernels = kernels_for(undo, config, layout, memory)
    records = records_of(layout, split_master=config.split_master)
    # First of all in memory, for a resume reads into it while the rest comes.
    store = _states(undo, config, placement, memory, slots, records, timeline)
    stored = None
    if placement.grads is not None:
        first = len(slot_records(layout, config)) - len(layout.chunks)
        grads, pool = gradient_records_of(layout, config.accumulation), placement.grads
        stored = Store(grads, pool.kept, pool.in_flight, memory.states, slots and slots.starting_at(first), timeline)
        undo.callback(stored.close)
    sink = _sink(config, layout, memory, kernels, timeline, stored, comm)
    undo.callback(sink.close)
    parameters = Parameters(layout, params, device, streams=config.param_tier != "device")
    params_store = None
    if placement.params is not None:
        pool = placement.params
        params_store = Store(
            param_records_of(layout),
            pool.kept,
            pool.in_flight,
            memory.states,
            slots and slots.starting_at(len(records)),
            timeline,
        )
        undo.callback(params_store.close)
    streamed = None if config.param_tier == "device" else params_store
    if streamed is not None:
        return_large_blocks()  # units come and go: without it RSS would grow with depth
    split_master = config.split_master
    run = (layout, parameters.flats, sink, memory.states, memory.copier, timeline)
    returned = ParameterReturn(*run, comm, memory.travelling, split_master=split_master, streamed=streamed)
    step = Step(layout, store, sink, returned, kernels, timeline, split_master=split_master)
    undo.callback(step.close)
    return Parts(
        memory=memory,
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


def _states(
    undo: ExitStack,
    config: Config,
    placement: Placement,
    memory: Memory,
    slots: Stripes | None,
    records: Sequence[Record],
    timeline: Timeline,
) -> Store:
    """The store of the states."""
    pool = placement.staged
    beneath = None if pool is None else Store(records, pool.kept, pool.in_flight, memory.ram, slots, timeline)
    if beneath is not None:
        undo.callback(beneath.close)
    if memory.states is memory.ram:
        store = Store(records, placement.kept, placement.in_flight, memory.ram, slots, timeline, is_due=config.is_due)
    else:
        store = DeviceStore(records, memory.states, beneath, timeline)
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
    is_temporary: bool,
    run_id: bytes | None,
    within: Directories | None,
) -> tuple[Stripes | None, str | None]:
    """The swap files and the name of their engine, if there are any."""
    if not config.paths:
        arena.prefault(lambda: None)
        return None, None
    engine = open_engine(config.io_engine, config.paths)
    undo.callback(engine.close)
    undo.callback(arena.join)
    arena.prefault(partial(engine.register, arena.memory))
    slots = Stripes(
        engine,
        config.paths,
        weights(config.paths),
        slot_records(layout, config),
        RunFiles(
            places=config.places,
            committed=None if config.commit_every is None else committed_slots(layout, config),
            resumed=None if resumed is None else resumed[1],
            is_temporary=is_temporary,
            is_known=run_id is not None,
            run_id=(run_id or new_run_id()) if resumed is None else resumed[0],
            rank=rank,
            directories=Directories() if within is None else within,
        ),
        timeline=timeline,
        # What another budget is to find again lies in an order that no budget changes.
        kept=placement.kept if config.commit_every is None else (),
    )
    undo.callback(slots.close)
    return slots, engine.name


def _sink(
    config: Config,
    layout: Layout,
    memory: Memory,
    kernels: Kernels,
    timeline: Timeline,
    stored: Store | None,
    comm: Communicator,
) -> Gradients:
    if comm.size == 1:
        return GradientSink(layout, config.accumulation, memory.states, kernels, memory.copier, timeline, stored)
    assert config.stage is not None
    return ReducedGradients(
        layout,
        Reduction(
            layout,
            config.stage,
            config.accumulation,
            config.bucket_bytes,
            direct=memory.copier.direct,
            stored=stored is not None,
        ),
        config.accumulation,
        memory.states,
        memory.travelling,
        memory.copier,
        kernels,
        comm.beside,
        timeline,
        stored,
    )
