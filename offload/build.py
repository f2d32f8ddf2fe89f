"""Puts a run together: decides what is where, then reserves memory, opens files and makes the parts.

None of this knows torch's optimizer interface, which is optimizer.py's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.recovery import Start
from offload.choices import Choice
from offload.devices.copies import Copier, HostCopier, accelerator, copier_for, stream_handle
from offload.entries import Entries
from offload.grads.base import GradientBuffer
from offload.grads.local import LocalGradients
from offload.grads.reduce_scatter import ReducedGradients
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
from offload.optim.adam import NewParameters, Step
from offload.options import Options
from offload.planner.choice import ModelShape, choose
from offload.planner.decide import decide, replicas_of
from offload.planner.machine import free_memory
from offload.planner.placement import (
    ACTIVATIONS,
    SCRATCH,
    SPILLED,
    STAGED,
    Placement,
    Room,
)
from offload.profiling import Timeline
from offload.ranks.communicator import Communicator
from offload.run import Memory, OpenEngine, Run, Stores
from offload.storage.activation_store import ActivationStore, SpillFiles
from offload.storage.arena import Arena, Reserved
from offload.storage.chunk_cache import Store
from offload.storage.device_store import DeviceArena, DeviceStore
from offload.storage.directories import replaceable_in
from offload.storage.pool import Pool, in_flight, resident
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import RunFiles, Stripes
from offload.tiers import CPU, DEVICE

# Deciding.


@dataclass(frozen=True)
class Plan:
    """What is decided before anything is allocated.

    Attributes:
        choice: what was decided.
        held: the layout of all that is trained or streams.
        params: in the order of `held.specs`.
        moved: the names of parameters that get other memory when the model is taken.
        device, copier: to train on, and between it and RAM.
        room: what there is room for.
        threads, io_engine: see `Tuning`.
    """

    choice: Choice
    held: Layout
    params: Sequence[nn.Parameter]
    moved: Mapping[nn.Parameter, str]
    device: torch.device
    copier: Copier
    room: Room
    threads: int | None
    io_engine: str

    @property
    def layout(self) -> Layout:
        """Of what is trained."""
        return self.held.trained

    def room_at_end(self, placement: Placement, is_parked: bool) -> int:
        """Bytes on the device for parameters that were streamed: half of what is free, and within their budget. Of a
        model that is parked, in RAM."""
        free = _free_on_device(HostCopier() if is_parked else self.copier, self.room.ranks_on_node) // 2
        limit = None if is_parked else placement.device_budget_bytes
        return free if limit is None else min(free, limit - placement.resident_bytes)


def plan_run(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    options: Options,
    comm: Communicator,
    files: Files,
) -> Plan:
    """Decides what is where. Args: groups: the optimizer's param_groups.

    Raises: ConfigError, BudgetError. Warns of an accelerator that nobody asked for, and of a path that others can
    change.
    """
    found, device = accelerator(), options.device
    if device is None and found is not None and is_meta(model):
        warnings.warn(
            "the model has no device yet, and is going to be trained on the CPU, beside an accelerator: give "
            f'OffloadZero device="{found.type}", or device="cpu" if that is meant',
            stacklevel=4,
        )
    for directory in dict.fromkeys(filter(None, (replaceable_in(path, files) for path in options.paths))):
        warnings.warn(
            f"{directory} is another user's, and every user may write to it: others can replace the files of this run; "
            f"give a path in a directory of your own, or have the sticky bit set on this one (chmod +t {directory})",
            stacklevel=4,
        )
    shape = ModelShape.of(model, groups, options, planned=is_meta(model))
    nodes = comm.ranks_on_node
    situation = shape.situation(ranks=comm.size, ranks_on_node=nodes, slices=comm.tensor_parallel.size)
    first_choice = decide(options, situation)
    on = device_for(device, shape.params[0].device)
    require_on_mesh(on, shape.specs, shape.params)
    comm.require_device(on)
    replicas = replicas_of(first_choice, ranks=comm.size, rows=comm.replicate_group.size)
    copier = copier_for(on)
    own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()) if t.device == on)
    available = own + _free_on_device(copier, nodes) // 2
    room = shape.room(options, available, ranks_on_node=nodes)
    layout_of = partial(shape.layout, ranks=comm.size, rank=comm.rank, replicas=replicas)
    held, placed = choose(options, situation, layout_of, direct=copier.direct, room=room)
    first, every = len(held.trained.specs), len(held.specs)
    require_streamable(held.specs[first:], shape.params[first:every])
    pairs = enumerate(zip(shape.specs, shape.params, strict=True))
    moved = {p: s.name for n, (s, p) in pairs if n < every or (p.dtype, p.device) != (s.dtype, on)}
    require_movable(moved)
    aliases_of(model, moved)
    tuning, params = options.tuned, shape.params[:every]
    return Plan(placed.choice, held, params, moved, on, copier, room, tuning.threads, tuning.io_engine)


def _free_on_device(copier: Copier, ranks_on_node: int) -> int:
    free = copier.free_bytes()
    return free_memory() // ranks_on_node if free is None else free


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
    choice, layout, held = plan.choice, plan.layout, plan.held
    memory = _reserve(undo, plan, placement, comm)
    # Before there are files: it may be refused its threads.
    kernels = _kernels_for(undo, plan, memory)
    entries = Entries(comm.everyone.size)
    run = Run(choice.commits, start.paths, layout, memory, kernels, comm, timeline, start.files, entries)
    slots, engine = _open_files(undo, run, plan, placement, start, open_engine)
    pool_store = partial(_pool_store, undo, run, placement, slots)
    # First of all in memory: a resume reads into it while the rest is made.
    store = _state_store(undo, run, placement, slots)
    grads = pool_store(ChunkKind.GRADS, placement.grads)
    gradients: GradientBuffer = (LocalGradients if comm.size == 1 else ReducedGradients)(run, choice.grads, grads)
    undo.callback(gradients.close)
    trained_streams, first_frozen = choice.params.tier > DEVICE, len(layout.flats)
    streamed_flats = range(0 if trained_streams else first_frozen, len(held.flats))
    limit = placement.streamed_bytes
    parameters = FlatParameters(held, plan.params, plan.device, plan.copier, streamed=streamed_flats, limit=limit)
    params = pool_store(ChunkKind.PARAMS, placement.params)
    frozen = pool_store(ChunkKind.FROZEN, placement.frozen)
    streamed = params if trained_streams else None
    if choice.params.streams:
        return_large_blocks()  # units come and go: without it RSS would grow with depth
    new_params = NewParameters(run, parameters.flats, gradients, streamed)
    step = Step(run, choice.states, store, gradients, new_params)
    undo.callback(step.close)
    stores = Stores(store, params, grads, frozen)
    masters = MasterWeights(run, choice.states, parameters, stores, streamed)
    activations = _activation_store(undo, plan, run, engine)
    assert not memory.reserved.left, memory.reserved.left
    return Parts(run, stores, streamed, parameters, masters, gradients, new_params, step, slots, engine, activations)


def _reserve(undo: ExitStack, plan: Plan, placement: Placement, comm: Communicator) -> Memory:
    """RAM, whose pages are there when it is prefaulted, and memory of the model's device. Raises: BudgetError."""
    ram = Arena(placement.arena_bytes, plan.copier, at_once=False)
    undo.callback(_free, comm, ram)
    is_on_device = plan.choice.states.tier == DEVICE
    if not is_on_device and not placement.slab_bytes:
        return Memory(ram, None, Reserved(placement.regions, {CPU: ram}), plan.copier)
    if plan.copier.direct:
        slab: Arena | DeviceArena = Arena(placement.slab_bytes, plan.copier, at_once=False)
    else:
        slab = DeviceArena(placement.slab_bytes, plan.device)
    undo.callback(_free, comm, slab)
    if isinstance(slab, Arena):
        slab.prefault(lambda: None)
    reserved = Reserved(placement.regions, {CPU: ram, DEVICE: slab})
    if is_on_device:
        # Nothing leaves it in a step. Frozen parameters may come from RAM.
        link = plan.copier if plan.choice.params.tier == DEVICE and plan.choice.params.frozen_tier > DEVICE else None
        return Memory(ram, slab, reserved, HostCopier(), link)
    return Memory(ram, slab, reserved, plan.copier)


_abandoned: list[Arena | DeviceArena] = []
"""Memory that stays mapped: a rank that is stuck may still make this one write to it."""


def _free(comm: Communicator, arena: Arena | DeviceArena) -> None:
    if not comm.close():
        _abandoned.append(arena)
    arena.close()


def _kernels_for(undo: ExitStack, plan: Plan, memory: Memory) -> Kernels:
    """The kernels that work where the states are."""
    direct = plan.copier.direct
    if plan.choice.states.tier == DEVICE and not direct:
        (scratch,) = memory.take(SCRATCH)
        kernels = load_on(scratch, partial(stream_handle, scratch.device))
    else:
        kernels = load(kernel_threads(plan.threads, ranks_on_node=plan.room.ranks_on_node, direct=direct))
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


def _state_store(undo: ExitStack, run: Run, placement: Placement, slots: Stripes | None) -> Store:
    """The store of the states; on a device it has one in RAM beneath it, through which commits go."""
    memory, timeline, kind = run.memory, run.timeline, ChunkKind.STATES
    arrays, own = placement.arrays[kind], None if slots is None else slots.of(kind)
    resident, buffers = _memory_of(kind, placement.states, memory)
    if placement.choice.states.tier > DEVICE:
        store = Store(arrays, resident, buffers, own, timeline, is_due=run.commits.is_due)
    else:
        assert memory.device is not None
        beneath = _pool_store(undo, run, placement, slots, kind, placement.staged, STAGED)
        store = DeviceStore(arrays, resident, memory.device, beneath, timeline)
    undo.callback(store.close)
    return store


def _pool_store(
    undo: ExitStack,
    run: Run,
    placement: Placement,
    slots: Stripes | None,
    kind: ChunkKind,
    pool: Pool | None,
    name: str | None = None,
) -> Store | None:
    """A store of a kind of chunks with the memory of a pool; None without one. Args: name: of its regions, if it is not
    the kind's."""
    if pool is None:
        return None
    own = None if slots is None else slots.of(kind)
    store = Store(placement.arrays[kind], *_memory_of(name or kind, pool, run.memory), own, run.timeline)
    undo.callback(store.close)
    return store


def _memory_of(name: str, pool: Pool, memory: Memory) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Of each resident chunk of a pool, and of its buffers. Args: name: of its regions."""
    return dict(zip(sorted(pool.resident), memory.take(resident(name)), strict=True)), memory.take(in_flight(name))


def _activation_store(undo: ExitStack, plan: Plan, run: Run, engine: IOEngine | None) -> ActivationStore | None:
    """Where activations wait; None: where they are made."""
    store, is_on_device = None, plan.choice.activations.tier == DEVICE and not plan.copier.direct
    for region in run.memory.take(SPILLED if is_on_device else ACTIVATIONS):
        spill = None
        if engine is not None:
            opened = [engine.adopt(run.files.create_nameless(path)) for path in run.paths]
            spill = SpillFiles(run.files, engine, opened)
        store = ActivationStore(region, plan.copier, plan.device, run.timeline, spill)
    for region in run.memory.take(ACTIVATIONS):
        # What stays on the device is copied there, in the order of its own work.
        store = ActivationStore(region, HostCopier(), plan.device, run.timeline, beneath=store)
    if store is not None:
        undo.callback(store.close)
    return store


def _open_files(
    undo: ExitStack, run: Run, plan: Plan, placement: Placement, start: Start, open_engine: OpenEngine
) -> tuple[Stripes | None, IOEngine | None]:
    """The swap files and their engine, if there are any."""
    memory, paths = run.memory, run.paths
    if not paths:
        memory.ram.prefault(lambda: None)
        return None, None
    engine = open_engine(plan.io_engine, paths)
    undo.callback(engine.close)
    undo.callback(memory.ram.join)
    memory.ram.prefault(partial(engine.register, memory.ram.memory))
    resumed = None if start.found is None else start.found.slots
    own = RunFiles(
        resumed=None if resumed is None else resumed[1],
        is_temporary=start.found is not None and resumed is None,
        is_known=True,
        run_id=start.run_id if resumed is None else resumed[0],
        rank=run.comm.everyone.rank,
        files=run.files,
    )
    # With commits, another budget has to find the same order of slots.
    stays = placement.states.resident if plan.choice.commits.every is None else ()
    resident = {slot for chunk, slot in enumerate(placement.slots.of(ChunkKind.STATES)) if chunk in stays}
    slots = Stripes(engine, paths, weights(paths), placement.slots, own, timeline=run.timeline, resident=resident)
    undo.callback(slots.close)
    return slots, engine
