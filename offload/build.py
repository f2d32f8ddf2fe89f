"""Puts a run together: decides what is where, then reserves memory, opens files and makes the parts.

None of this knows torch's optimizer interface, which is optimizer.py's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offload import config as configuration
from offload.checkpoint.recovery import Start
from offload.config import Config
from offload.devices.copies import Copier, HostCopier, accelerator, copier_for, stream_handle
from offload.entries import Entries
from offload.grads.base import GradientBuffer
from offload.grads.local import LocalGradients
from offload.grads.reduce_scatter import ReducedGradients
from offload.grads.shards import gradient_slot_arrays
from offload.io.engine import IOEngine
from offload.io.files import Files
from offload.io.select import weights
from offload.layout import Layout
from offload.model.aliases import aliases_of
from offload.model.flat_param import FlatParameters
from offload.model.master_weights import MasterWeights
from offload.model.meta_init import is_meta
from offload.model.units import device_for, require_movable, require_on_mesh, require_streamable
from offload.native import Kernels, load, load_on
from offload.native.memory import return_large_blocks
from offload.native.threads import usable_cpus
from offload.native.torch_kernels import scratch_bytes
from offload.optim.adam import NewParameters, Step
from offload.planner.choice import ModelShape, choose
from offload.planner.machine import free_memory
from offload.planner.placement import Placement, Pool, Room, all_slot_arrays, committed_slots
from offload.profiling import Timeline
from offload.ranks.communicator import Communicator
from offload.run import Memory, OpenEngine, Run, Stores
from offload.storage.activation_store import ActivationStore, SpillFiles
from offload.storage.arena import Arena, Lender
from offload.storage.chunk_cache import Store
from offload.storage.device_store import DeviceArena, DeviceStore
from offload.storage.files import replaceable_in
from offload.storage.swap_file import RunFiles, Stripes
from offload.storage.swap_format import SlotArrays, frozen_slot_arrays, param_slot_arrays, state_slot_arrays

# Deciding.


@dataclass(frozen=True)
class Plan:
    """What is decided before anything is allocated.

    Attributes: config: with the tiers chosen; held: the layout of all that is trained or streams; params: in the order
    of `held.specs`; moved: the names of parameters that get other memory when the model is taken; room: on the model's
    device.
    """

    config: Config
    held: Layout
    params: Sequence[nn.Parameter]
    moved: Mapping[nn.Parameter, str]
    device: torch.device
    copier: Copier
    room: Room

    @property
    def layout(self) -> Layout:
        """Of what is trained."""
        return self.held.trained

    def room_at_end(self, placement: Placement, is_parked: bool) -> int:
        """Bytes on the device for parameters that were streamed: half of what is free, and within their budget. Of a
        model that is parked, in RAM."""
        free = _free_on_device(HostCopier() if is_parked else self.copier, self.config) // 2
        limit = None if is_parked else placement.device_budget_bytes
        return free if limit is None else min(free, limit - placement.resident_bytes)


def plan_run(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    config: Config,
    comm: Communicator,
    device: torch.device | str | None,
    files: Files,
) -> Plan:
    """Decides what is where. Args: groups: the optimizer's param_groups; device: see OffloadZero.

    Raises: ConfigError, BudgetError. Warns of an accelerator that nobody asked for, and of a path that others can
    change.
    """
    found = accelerator()
    if device is None and found is not None and is_meta(model):
        warnings.warn(
            "the model has no device yet, and is going to be trained on the CPU, beside an accelerator: give "
            f'OffloadZero device="{found.type}", or device="cpu" if that is meant',
            stacklevel=4,
        )
    for directory in dict.fromkeys(filter(None, (replaceable_in(path, files) for path in config.paths))):
        warnings.warn(
            f"{directory} is another user's, and every user may write to it: others can replace the files of this run; "
            f"give a path in a directory of your own, or have the sticky bit set on this one (chmod +t {directory})",
            stacklevel=4,
        )
    shape = ModelShape.of(model, groups, config, planned=is_meta(model))
    config = shape.config(config)
    on = device_for(device, shape.params[0].device)
    require_on_mesh(on, shape.specs, shape.params)
    comm.require_device(on)
    slices = comm.tensor_parallel.size
    config = configuration.over_ranks(config, ranks=comm.size, ranks_on_node=comm.ranks_on_node, slices=slices)
    replicas = configuration.replicas_of(config, ranks=comm.size, rows=comm.replicate_group.size)
    copier = copier_for(on)
    own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()) if t.device == on)
    available = own + _free_on_device(copier, config) // 2
    room = shape.room(available)
    layout_of = partial(shape.layout, ranks=comm.size, rank=comm.rank, replicas=replicas)
    config, held, _ = choose(config, layout_of, direct=copier.direct, room=room)
    first, every = len(held.trained.specs), len(held.specs)
    require_streamable(held.specs[first:], shape.params[first:every])
    pairs = enumerate(zip(shape.specs, shape.params, strict=True))
    moved = {p: s.name for n, (s, p) in pairs if n < every or (p.dtype, p.device) != (s.dtype, on)}
    require_movable(moved)
    aliases_of(model, moved)
    return Plan(config, held, shape.params[:every], moved, on, copier, room)


def _free_on_device(copier: Copier, config: Config) -> int:
    free = copier.free_bytes()
    return free_memory() // config.ranks_on_node if free is None else free


# Building.


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        run: what all parts share.
        stores: of states, parameters and gradients.
        streamed: that of the parameters, if these are on the device only around their use.
        parameters: the model's, in flat parameters; masters: between them and the states.
        gradients: the gradient buffer; step: Adam; new_params: the way of its results into the model.
        slots: the swap files; engine: what reads and writes them; None without files.
        activations: where they wait; None: where they are made.
    """

    run: Run
    stores: Stores
    streamed: Store | None
    parameters: FlatParameters
    masters: MasterWeights
    gradients: GradientBuffer
    new_params: NewParameters
    step: Step
    slots: Stripes | None
    engine: IOEngine | None
    activations: ActivationStore | None


def build(
    undo: ExitStack,
    plan: Plan,
    placement: Placement,
    start: Start,
    comm: Communicator,
    timeline: Timeline,
    open_engine: OpenEngine,
) -> Parts:
    """Reserves memory, opens files and makes the parts. Calls no other rank.

    Args: undo: gets what closes them, to be called in reverse order; start: what is resumed, or that a run begins
    anew; open_engine: makes the engine, if there are files.
    Raises: BudgetError, PathError, PathInUseError, ResumeError, ConfigError; the model is not touched.
    """
    config, layout, held = start.config, plan.layout, plan.held
    memory = _reserve(undo, replace(plan, config=config), placement, comm)
    # Before there are files: it may be refused its threads.
    kernels = _kernels_for(undo, config, layout, memory, direct=plan.copier.direct)
    run = Run(config, layout, memory, kernels, comm, timeline, start.files, Entries(comm.everyone.size))
    slots, engine = _open_files(undo, run, held, placement, start, open_engine)
    states = state_slot_arrays(layout, split_master=config.split_master)
    # First of all in memory: a resume reads into it while the rest is made.
    store = _state_store(undo, run, placement, slots, states)
    first_of_gradients = len(all_slot_arrays(layout, config)) - len(layout.chunks)
    grad_arrays = gradient_slot_arrays(layout, config.accumulation)
    grads = _pool_store(undo, run, placement.grads, grad_arrays, slots, first_of_gradients)
    gradients: GradientBuffer = LocalGradients(run, grads) if comm.size == 1 else ReducedGradients(run, grads)
    undo.callback(gradients.close)
    trained_streams, first_frozen = config.param_tier != "device", len(layout.flats)
    streamed_flats = range(0 if trained_streams else first_frozen, len(held.flats))
    limit = placement.streamed_bytes
    parameters = FlatParameters(held, plan.params, plan.device, plan.copier, streamed=streamed_flats, limit=limit)
    params = _pool_store(undo, run, placement.params, param_slot_arrays(layout), slots, len(states))
    beside = memory.states if memory.link is None else memory.ram
    frozen_arrays, first_slot = frozen_slot_arrays(held), len(all_slot_arrays(layout, config))
    frozen = _pool_store(undo, run, placement.frozen, frozen_arrays, slots, first_slot, beside)
    streamed = params if trained_streams else None
    if config.streams:
        return_large_blocks()  # units come and go: without it RSS would grow with depth
    new_params = NewParameters(run, parameters.flats, gradients, streamed)
    step = Step(run, store, gradients, new_params)
    undo.callback(step.close)
    stores = Stores(store, params, grads, frozen)
    masters = MasterWeights(run, parameters, stores, streamed)
    activations = _activation_store(undo, plan, run, placement, engine)
    return Parts(run, stores, streamed, parameters, masters, gradients, new_params, step, slots, engine, activations)


def _reserve(undo: ExitStack, plan: Plan, placement: Placement, comm: Communicator) -> Memory:
    """RAM, whose pages are there when it is prefaulted, and memory of the model's device. Raises: BudgetError."""
    ram = Arena(placement.arena_bytes, plan.copier, at_once=False)
    undo.callback(_free, comm, ram)
    is_on_device = plan.config.tier == "device"
    if not is_on_device and not placement.slab_bytes:
        return Memory(ram, None, ram, ram, plan.copier)
    if plan.copier.direct:
        slab: Arena | DeviceArena = Arena(placement.slab_bytes, plan.copier, at_once=False)
    else:
        slab = DeviceArena(placement.slab_bytes, plan.device)
    undo.callback(_free, comm, slab)
    if isinstance(slab, Arena):
        slab.prefault(lambda: None)
    if is_on_device:
        # Nothing leaves it in a step. Frozen parameters may come from RAM.
        link = plan.copier if plan.config.param_tier == "device" and plan.config.frozen_tier != "device" else None
        return Memory(ram, slab, slab, slab, HostCopier(), link)
    return Memory(ram, slab, ram, slab, plan.copier)


_abandoned: list[Arena | DeviceArena] = []
"""Memory that stays mapped: a rank that is stuck may still make this one write to it."""


def _free(comm: Communicator, arena: Arena | DeviceArena) -> None:
    if not comm.close():
        _abandoned.append(arena)
    arena.close()


def _kernels_for(undo: ExitStack, config: Config, layout: Layout, memory: Memory, *, direct: bool) -> Kernels:
    """The kernels that work where the states are. Args: direct: whether the model's device is the CPU."""
    if isinstance(memory.states, DeviceArena):
        largest = max((spec.numel for spec in layout.specs), default=0)
        scratch = memory.states.carve(scratch_bytes(largest))
        kernels = load_on(scratch, partial(stream_handle, scratch.device))
    else:
        kernels = load(kernel_threads(config.threads, ranks_on_node=config.ranks_on_node, direct=direct))
    undo.callback(kernels.close)
    kernels.start()
    return kernels


LAUNCHING_THREADS = 2
"""Of a model on a device: the one of the forward and autograd's own, which launch its kernels one after the other. One
that has to wait for a CPU delays all that comes after it."""


def kernel_threads(wanted: int | None, *, ranks_on_node: int, direct: bool) -> int:
    """How many threads this rank's kernels take.

    Args: wanted: `Tuning.threads`; None: a share of the usable CPUs, but for those of threads that launch kernels of a
    device; direct: whether the model's device is the CPU, where kernels run while it waits.
    """
    return wanted or max(usable_cpus() // ranks_on_node - (0 if direct else LAUNCHING_THREADS), 1)


def _state_store(
    undo: ExitStack, run: Run, placement: Placement, slots: Stripes | None, slot_arrays: Sequence[SlotArrays]
) -> Store:
    """The store of the states; on a device it has one in RAM beneath it, through which commits go."""
    memory, timeline, pool = run.memory, run.timeline, placement.states
    if memory.states is memory.ram:
        is_due = run.config.is_due
        store = Store(slot_arrays, pool.resident, pool.in_flight, memory.ram, slots, timeline, is_due=is_due)
    else:
        beneath = _pool_store(undo, run, placement.staged, slot_arrays, slots, 0, memory.ram)
        store = DeviceStore(slot_arrays, memory.states, beneath, timeline)
    undo.callback(store.close)
    return store


def _pool_store(
    undo: ExitStack,
    run: Run,
    pool: Pool | None,
    slot_arrays: Sequence[SlotArrays],
    slots: Stripes | None,
    first: int,
    memory: Lender | None = None,
) -> Store | None:
    """A store with the buffers of a pool; None without one. Args: first: slot of its first chunk."""
    if pool is None:
        return None
    memory = run.memory.states if memory is None else memory
    held = None if slots is None else slots.starting_at(first)
    store = Store(slot_arrays, pool.resident, pool.in_flight, memory, held, run.timeline)
    undo.callback(store.close)
    return store


def _activation_store(
    undo: ExitStack, plan: Plan, run: Run, placement: Placement, engine: IOEngine | None
) -> ActivationStore | None:
    """Where activations wait; None: where they are made."""
    memory, nbytes, store = run.memory, placement.activation_bytes, None
    is_on_device = run.config.activation_tier == "device" and not plan.copier.direct
    in_ram = placement.activation_spill_bytes if is_on_device else nbytes
    if in_ram:
        spill = None
        if engine is not None:
            opened = [engine.adopt(run.files.create_nameless(path)) for path in run.config.paths]
            spill = SpillFiles(run.files, engine, opened)
        store = ActivationStore(memory.ram.carve(in_ram), plan.copier, plan.device, run.timeline, spill)
    if is_on_device and nbytes:
        assert memory.device is not None
        # What stays on the device is copied there, in the order of its own work.
        region = memory.device.carve(nbytes)
        store = ActivationStore(region, HostCopier(), plan.device, run.timeline, beneath=store)
    if store is not None:
        undo.callback(store.close)
    return store


def _open_files(
    undo: ExitStack, run: Run, held: Layout, placement: Placement, start: Start, open_engine: OpenEngine
) -> tuple[Stripes | None, IOEngine | None]:
    """The swap files and their engine, if there are any. Args: held: as in `Plan`."""
    config, memory = run.config, run.memory
    if not config.paths:
        memory.ram.prefault(lambda: None)
        return None, None
    engine = open_engine(config.io_engine, config.paths)
    undo.callback(engine.close)
    undo.callback(memory.ram.join)
    memory.ram.prefault(partial(engine.register, memory.ram.memory))
    resumed = None if start.found is None else start.found.slots
    own = RunFiles(
        slots_per_chunk=config.slots_per_chunk,
        committed=None if config.commit_every is None else committed_slots(held, config),
        resumed=None if resumed is None else resumed[1],
        is_temporary=start.found is not None and resumed is None,
        is_known=True,
        run_id=start.run_id if resumed is None else resumed[0],
        rank=run.comm.everyone.rank,
        files=run.files,
    )
    # With commits, another budget has to find the same order of slots.
    resident = placement.states.resident if config.commit_every is None else ()
    slot_arrays, speeds = all_slot_arrays(held, config), weights(config.paths)
    slots = Stripes(engine, config.paths, speeds, slot_arrays, own, timeline=run.timeline, resident=resident)
    undo.callback(slots.close)
    return slots, engine
