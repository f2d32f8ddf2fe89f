"""Puts a run together: decides what is where, then reserves memory, opens files and makes the parts.

None of this knows torch's optimizer interface, which is optimizer.py's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.checkpoint.recovery import Start
from offload.choices import Choice
from offload.devices.copies import COPIER_FOR, Copier, HostCopier, accelerator, device_name, stream_handle
from offload.entries import Entries
from offload.errors import BudgetError, ConfigError
from offload.grads.base import GradientBuffer
from offload.grads.local import LocalGradients
from offload.grads.reduce_scatter import ReducedGradients
from offload.grads.shards import open_shards
from offload.health import Health
from offload.io.engine import IOEngine
from offload.io.files import Files
from offload.io.select import weights
from offload.layout import Layout
from offload.model.aliases import aliases_of
from offload.model.flat_param import FlatParameters, Streaming
from offload.model.inner import Inner, inner_tensors, require_movable_wrappers
from offload.model.master_weights import MasterWeights
from offload.model.meta_init import Source, is_meta, kept_tensors, kept_values
from offload.model.transfer import UNITS
from offload.model.units import (
    bytes_on,
    compute_dtypes,
    device_for,
    require_movable,
    require_on_mesh,
    require_streamable,
    unquantised,
)
from offload.native import Kernels, load, load_on
from offload.native.memory import return_large_blocks
from offload.optim.late import LateSteps
from offload.optim.new_params import NewParameters, new_parameters
from offload.optim.rule import Rule
from offload.optim.scale import StepScale
from offload.optim.step import Step
from offload.options import Options
from offload.planner.choice import ModelShape, choose
from offload.planner.decide import decide, replicas_of
from offload.planner.fastest import Fastest
from offload.planner.machine import free_memory, kernel_threads
from offload.planner.measured import Here
from offload.planner.placement import (
    ACTIVATIONS,
    SCRATCH,
    SPILLED,
    Placement,
    Room,
    dithered_room_of,
    place,
)
from offload.planner.rates import step_name
from offload.planner.trying import OF_RULES, Speed, is_worth_it, with_trials
from offload.planner.verdict import Work
from offload.profiling import Timeline
from offload.ranks.agreement import all_gather_object, together, while_others_wait
from offload.ranks.communicator import Communicator
from offload.ranks.gathers import Gathers
from offload.regions import lent_bytes
from offload.run import Disk, Memory, OpenEngine, Run, Stores
from offload.storage.activation_store import ActivationStore, NamelessFiles, stacked
from offload.storage.arena import Arena, Reserved
from offload.storage.cached_chunk import Version
from offload.storage.chunk_cache import Store
from offload.storage.device_store import DeviceArena, DeviceStore
from offload.storage.directories import replaceable_in
from offload.storage.kept_base import BaseChunk, BaseName, BasePart, Contents, KeptBase, is_there, make
from offload.storage.param_store import ParamStore, ResidentParams, StreamedParams
from offload.storage.pool import Pool, in_flight, resident
from offload.storage.room import MANIFEST, RECORD
from offload.storage.slot_map import ChunkKind
from offload.storage.swap_file import RunFiles, Slots, Stripes
from offload.storage.swap_format import MAX_PLACES
from offload.tiers import CPU, DEVICE

# Deciding.


class OpenTrials(NamedTuple):
    """What decides whether steps are tried in backward; see trying.py.

    Attributes:
        work: what a step computes.
        speed: of this machine; None: it was not measured.
    """

    work: Work
    speed: Speed | None


@dataclass(frozen=True)
class Plan:
    """What is decided before anything is allocated.

    Attributes:
        choice: what was decided for each part.
        rules: that of each param group.
        held: the layout of all parameters that are trained or stream.
        inners: the inner tensors of these parameters, in the order of `held.specs`.
        moved: the names of parameters, and of inner tensors, that get other memory when the model is taken.
        device: the device to train on.
        copier: copies between that device and RAM.
        room: what there is room for.
        threads: see `Tuning`.
        io_engine: see `Tuning`.
        unquantised: what a quantised base has in 16 or 32 bits; see `units.unquantised`.
        base: the base that is kept, without its key until `keep_base` has found it; None: there is none.
        base_names: the names of the frozen parameters in it, in the order of `held.specs`.
        trials: what decides whether steps are tried; None: that is decided.
        work: what a micro-batch of one token computes.
        here: how fast this machine is.
    """

    choice: Choice
    rules: Sequence[Rule]
    held: Layout
    inners: Sequence[Inner]
    moved: Mapping[Tensor, str]
    device: torch.device
    copier: Copier
    room: Room
    threads: int | None
    io_engine: str
    unquantised: tuple[int, Sequence[str]]
    base: BaseName | None
    base_names: Sequence[str]
    trials: OpenTrials | None
    work: Work
    here: Here

    @property
    def layout(self) -> Layout:
        """The layout of what is trained."""
        return self.held.trained

    def placed_with_trials(self, reserved: int = 0) -> Placement | None:
        """What is where if steps are tried, where the user leaves that open; None: they cannot be.

        Args:
            reserved: bytes of RAM to leave free.
        """
        if self.trials is None or not all(rule.can_try for rule in self.rules):
            return None
        with suppress(BudgetError):
            return place(
                self.held, with_trials(self.choice), direct=self.copier.direct, room=self.room, reserved=reserved
            )
        return None

    def gains_by_trials(self, tried: Placement) -> bool:
        """Whether steps are worth to be tried.

        Args:
            tried: what is where if they are.
        """
        if self.trials is None or self.trials.speed is None:
            return False
        with suppress(BudgetError):
            without = place(self.held, self.choice, direct=self.copier.direct, room=self.room)
            return is_worth_it(self.held, without, tried, self.trials.work, self.trials.speed)
        return False

    def room_at_end(self, placement: Placement, is_parked: bool) -> int:
        """How many bytes of the device parameters may take that were streamed, once the run is closed.

        That is half of what is free, within the budget. If the model is parked in RAM, it is half of what is free
        there.
        """
        free = _free_on_device(HostCopier() if is_parked else self.copier, self.room.ranks_on_node) // 2
        limit = None if is_parked else placement.device_budget_bytes
        return free if limit is None else min(free, limit - placement.resident_bytes)

    def room_to_generate(self, placement: Placement) -> int:
        """How many bytes of the device streamed units may take while a text is generated.

        That is what the rest of the plan leaves of the device's budget. Unless `device_memory` was given, it is no more
        than half of what is free now and, where the device is the CPU, than what the plan leaves of the RAM's budget.
        """
        limit = placement.device_budget_bytes
        free = [] if limit is None else [limit - placement.device_bytes]
        if placement.device_memory is None:
            free.append(_free_on_device(self.copier, self.room.ranks_on_node) // 2)
            if self.copier.direct:
                free.append(placement.budget_bytes - placement.arena_bytes)
        return placement.streamed_bytes + max(min(free), 0)


def plan_run(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    rules: Sequence[Rule],
    options: Options,
    comm: Communicator,
    files: Files,
    source: Source,
) -> Plan:
    """Decides what is where.

    Warns of an accelerator that nobody asked for, and of a path in which other users can replace files.

    Args:
        model: the model.
        groups: the optimizer's param_groups.
        rules: that of each group.
        options: what the user said.
        comm: the ranks.
        files: the file system.
        source: where values come from.

    Raises:
        ConfigError: if the model, or several ranks, cannot have what was asked for.
        BudgetError: if nothing fits.
    """
    accelerator_device, device = accelerator(), options.device
    if device is None and accelerator_device is not None and is_meta(model):
        warnings.warn(
            "the model has no device yet, and is going to be trained on the CPU, beside an accelerator: give "
            f'OffloadZero device="{accelerator_device.type}", or device="cpu" if that is meant',
            stacklevel=4,
        )
    for directory in dict.fromkeys(filter(None, (replaceable_in(path, files) for path in options.paths))):
        warnings.warn(
            f"{directory} is another user's, and every user may write to it: others can replace the files of this run; "
            f"give a path in a directory of your own, or have the sticky bit set on this one (chmod +t {directory})",
            stacklevel=4,
        )
    shape = ModelShape.of(model, groups, options, planned=is_meta(model)).with_rules(rules, options)
    nodes = comm.ranks_on_node
    situation = shape.situation(ranks=comm.size, ranks_on_node=nodes, slices=comm.tensor_parallel.size)
    first_choice = decide(options, situation)
    on = device_for(device, shape.inners[0].param.device)
    require_on_mesh(on, shape.specs, shape.inners)
    comm.require_device(on)
    replicas = replicas_of(first_choice, ranks=comm.size, rows=comm.replicate_group.size)
    copier = COPIER_FOR.get()(on)
    available = bytes_on(model, on) + _free_on_device(copier, nodes) // 2
    room = shape.room(options, available, ranks_on_node=nodes)
    unsplit = next((rule.name for rule in rules if not rule.splits_masters), None)
    if first_choice.states.split_master and unsplit is not None:
        raise ConfigError(f"Tuning.split_master=True with {unsplit}: only Adam's masters can be split; leave it out")
    if options.tuned.speculate is True:
        untried = next((rule.name for rule in rules if not rule.can_try), None)
        if untried is not None:
            raise ConfigError(
                f"Tuning.speculate=True with {untried}: it steps whole parameters, and only steps of single elements "
                "can be tried; leave it out"
            )
    layout_of = partial(shape.layout, ranks=comm.size, rank=comm.rank, replicas=replicas)
    threads = kernel_threads(options.tuned.threads, ranks_on_node=nodes, direct=copier.direct)
    kept = source.kept() if comm.tensor_parallel.size == 1 else None
    in_base = {} if kept is None else kept_tensors(model, kept)
    contents = Contents.of((name, one.tensor.dtype, one.tensor.numel()) for name, one in in_base.items())
    situation = replace(
        situation,
        base_bytes=contents.nbytes if in_base else 0,
        base_memory_bytes=contents.memory_bytes,
        temporary_bytes=shape.temporary_bytes(rules, options, threads),
        has_same_bits=all(rule.has_same_bits for rule in rules),
    )
    device_kind = device_name(None if on.type == "cpu" else on)
    name = OF_RULES.get(rules[0].name, "") if len({rule.name for rule in rules}) == 1 else ""
    step = step_name(name, options.states, split_master=options.splits_masters)
    here = Here.of(device_kind, options.compute_dtype, step, options.paths)
    work = _work_of(shape, first_choice)
    pick = Fastest(work, here.speeds)
    held, placed = choose(options, situation, layout_of, direct=copier.direct, room=room, pick=pick)
    first, every = len(held.trained.specs), len(held.specs)
    require_streamable(held.specs[first:], shape.inners[first:every])
    pairs = enumerate(zip(shape.specs, shape.inners, strict=True))
    stays = [(spec.dtype, on) for spec in shape.specs]
    moved = {i.used: s.name for n, (s, i) in pairs if n < every or (i.tensor.dtype, i.tensor.device) != stays[n]}
    require_movable(moved)
    names = {param: name for name, param in model.named_parameters()}
    require_movable_wrappers(inner_tensors(names), names, on)
    aliases_of(model, moved)
    tuning, inners = options.tuned, shape.inners[:every]
    left = unquantised(model, compute_dtypes(model, options.fp32_modules, options.compute_dtype))
    choice, base, base_names = placed.choice, None, list[str]()
    if choice.params.base_bytes:
        assert kept is not None
        numbers = {one.used: name for name, one in in_base.items()}
        if all(one.used in numbers for one in inners[first:]):
            base_names = [numbers[one.used] for one in inners[first:]]
            base = BaseName(kept.directory or options.paths[0], "", contents)
        else:
            choice = replace(choice, params=replace(choice.params, base_bytes=0, base_memory_bytes=0))
    trials = None
    if choice.states.leaves_trials_open:
        speed = Speed.remembered(device_kind, options.compute_dtype, step, options.paths, direct=copier.direct)
        trials = OpenTrials(work, speed)
    plan = Plan(
        choice, rules, held, inners, moved, on, copier, room, tuning.threads, tuning.io_engine, left, base, base_names,
        trials, work, here,
    )  # fmt: skip
    keeps = plan.placed_with_trials() is not None
    return replace(plan, choice=replace(choice, commits=replace(choice.commits, keeps_places=keeps)))


def _work_of(shape: ModelShape, choice: Choice) -> Work:
    """What a micro-batch of one token computes."""
    trained, frozen = (
        sum(spec.numel for spec in shape.specs if spec.is_frozen is is_frozen) for is_frozen in (False, True)
    )
    return Work(trained, frozen, tokens=1, recomputes=choice.activations.recomputes)


def settle_trials(plan: Plan, start: Start, comm: Communicator) -> Plan:
    """Decides whether steps are tried, if the user leaves that open: what rank 0 would do, if all ranks can.

    A run that is resumed keeps as many slots a chunk as it has.

    Args:
        plan: what was decided.
        start: what is resumed, or that a run begins anew.
        comm: all ranks, each of which calls this.

    Raises:
        PathError: a directory cannot be looked at.
        OtherRankError: it failed on another rank.
        RankError: another rank failed, or cannot be reached.
    """
    if plan.trials is None:
        return plan
    found = start.found
    with together(comm):
        tried = plan.placed_with_trials(0 if found is None else found.buffer_bytes)
        wanted, can = False, tried is not None
        if found is not None:
            wanted, can = found.first.places == MAX_PLACES, can or found.manifest is not None
        elif tried is not None:
            free = dict(map(start.files.space, start.paths))
            can = plan.room.ranks_on_node * tried.disk_bytes <= sum(free.values())
            wanted = plan.gains_by_trials(tried)
    told = all_gather_object(comm, (wanted, can))
    if not (told[0][0] and all(can for _, can in told)):
        return plan
    return replace(plan, choice=with_trials(plan.choice))


def _base_chunks(held: Layout, names: Sequence[str]) -> tuple[BaseChunk, ...]:
    """What the chunks of frozen parameters hold of a base.

    Args:
        held: the layout of all held parameters.
        names: the names that the frozen ones have in the base.
    """
    first = len(held.trained.specs)
    return tuple(
        BaseChunk(
            held.flats[chunk.flat].dtype,
            [BasePart(names[one.param - first], one.param_offset, one.chunk_offset, one.numel) for one in chunk.pieces],
        )
        for chunk in held.param_chunks[len(held.trained.param_chunks) :]
    )


def _free_on_device(copier: Copier, ranks_on_node: int) -> int:
    free = copier.free_bytes()
    return free_memory() // ranks_on_node if free is None else free


# The kept base.


def keep_base(plan: Plan, model: nn.Module, source: Source, comm: Communicator, disk: Disk, files: Files) -> Plan:
    """Makes the base that a run is to read, unless it is there.

    Of ranks that share a directory one makes it, and the others wait, however long that takes.

    Args:
        plan: what was decided.
        model: the model, on the meta device.
        source: where its values come from.
        comm: the ranks. All of them call this.
        disk: makes the engine that writes it.
        files: the run's file system.

    Returns:
        The plan with the key of the base.

    Raises:
        ConfigError: if the ranks have bases of other values.
        PathError: if its directory cannot be used.
        BudgetError: if the disk has no room for it.
        TierIOError: if a disk or its file system failed.
        OtherRankError: if another rank failed, and this one did not.
    """
    base, kept = plan.base, source.kept()
    if base is None:  # on all ranks, as they have agreed
        return plan
    assert kept is not None
    if not comm.all_equal(f"{base.contents.digest}; {kept.settings}"):
        raise ConfigError(
            "the ranks differ in what is in the quantised base that they keep: give all of them the same model, "
            "source, settings and base"
        )
    is_first = comm.local_rank == 0
    with while_others_wait(comm, "another rank reads the source of the quantised base") as meanwhile:
        key = kept.key(meanwhile) if is_first else ""
    keys = {one for one in all_gather_object(comm, key) if one}
    if len(keys) > 1:
        raise ConfigError(
            "machines have other files or libraries to quantise the base from: give all of them the same source, and "
            "the same versions of torch and of the quantiser"
        )
    base = replace(base, key=keys.pop())
    for makes in (is_first, True):  # ranks on one machine may have directories of their own
        with while_others_wait(comm, f"another rank makes the quantised base {base.path}") as meanwhile:
            if makes and not is_there(base, files):
                with ExitStack() as undo:
                    engine = disk.open_engine(plan.io_engine, [base.directory])
                    undo.callback(engine.close)
                    make(base, kept_values(model, source, kept), files, engine, meanwhile)
    return replace(plan, base=base)


# Building.


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        run: what all parts share.
        stores: of states, parameters and gradients.
        params: the trained parameters, in the model or in a store.
        parameters: the model's parameters, in flat parameters.
        gathers: of units, over the ranks that share the parameters.
        masters: what moves values between the parameters and the states.
        gradients: the gradient buffer.
        new_params: brings the results of a step into the model.
        step: Adam's step.
        scale: by what it multiplies the gradients.
        slots: the swap files; None: there are none.
        engine: what reads and writes them; None: there are none.
        activations: where activations wait for their backward; None: where they are made.
        base: the frozen parameters, if they are kept; None: they are not.
    """

    run: Run
    stores: Stores
    params: ParamStore
    parameters: FlatParameters
    gathers: Gathers
    masters: MasterWeights
    gradients: GradientBuffer
    new_params: NewParameters
    step: Step
    scale: StepScale
    slots: Stripes | None
    engine: IOEngine | None
    activations: ActivationStore | None
    base: KeptBase | None


def build(
    undo: ExitStack,
    plan: Plan,
    placement: Placement,
    start: Start,
    comm: Communicator,
    timeline: Timeline,
    open_engine: OpenEngine,
    health: Health,
) -> Parts:
    """Reserves memory, opens files and makes the parts. Calls no other rank, and does not touch the model.

    Args:
        undo: gets what closes the parts, to be called in reverse order.
        plan: what was decided.
        placement: what is where.
        start: what is resumed, or that a run begins anew.
        comm: the ranks.
        timeline: counts what runs.
        open_engine: makes the I/O engine, if there are files.
        health: of the run.

    Raises:
        BudgetError: if the system refuses memory, threads or disk space.
        PathError: if a path cannot hold swap files.
        PathInUseError: if another process uses one.
        ResumeError: if what is there cannot be resumed.
        ConfigError: if the I/O engine cannot run here.
    """
    choice, layout, held = plan.choice, plan.layout, plan.held
    memory = _reserve(undo, plan, placement, comm)
    # Before there are files: it may be refused its threads.
    kernels, device_kernels = _kernels_for(undo, plan, memory)
    entries = Entries(comm.everyone.size)
    run = Run(
        choice.commits,
        start.paths,
        layout,
        memory,
        kernels,
        comm,
        timeline,
        start.files,
        start.claims,
        entries,
        health,
        placement.device_flats,
        device_kernels,
    )
    slots, engine = _open_files(undo, run, plan, placement, start, open_engine)
    base = None
    if plan.base is not None:
        assert engine is not None
        chunks = _base_chunks(held, plan.base_names)
        base = KeptBase(engine, plan.base, plan.base_names, chunks, start.files, timeline)
        undo.callback(base.close)
    stores = _stores(undo, run, placement, slots, base)
    shards = open_shards(run, choice.grads.micro_batches, stores.get(ChunkKind.GRADS))
    gradients: GradientBuffer = (LocalGradients if comm.size == 1 else ReducedGradients)(run, choice.grads, shards)
    undo.callback(gradients.close)
    tier_of = choice.params.tier_of
    streamed = {flat.index for flat in held.flats if tier_of(is_frozen=flat.is_frozen) > DEVICE}
    streaming = Streaming(streamed, placement.streamed_bytes, placement.staying, placement.tiled_in_ram)
    parameters = FlatParameters(held, plan.inners, plan.device, plan.copier, streaming)
    params: ParamStore
    if choice.params.tier > DEVICE:
        params = StreamedParams(layout, stores[ChunkKind.PARAMS])
    else:
        params = ResidentParams(layout, parameters.flats, beneath=stores.params)
    if choice.params.streams:
        return_large_blocks()  # units come and go: without it RSS would grow with depth
    new_params = new_parameters(run, params, parameters.flats, gradients)
    late = LateSteps(run, plan.rules, stores.states, params)
    step = Step(run, choice.states, plan.rules, stores.states, gradients, new_params, late)
    undo.callback(step.close)
    gathers = Gathers(comm.shard_group, memory.take(UNITS), memory.param_copier)
    masters = MasterWeights(run, choice.states, parameters, stores.states, params, late)
    activations = _activation_store(undo, plan, run, engine)
    assert not memory.reserved.left, memory.reserved.left
    scale = StepScale()
    return Parts(
        run,
        stores,
        params,
        parameters,
        gathers,
        masters,
        gradients,
        new_params,
        step,
        scale,
        slots,
        engine,
        activations,
        base,
    )


def _reserve(undo: ExitStack, plan: Plan, placement: Placement, comm: Communicator) -> Memory:
    """Reserves RAM, whose pages are there once it is prefaulted, and memory of the model's device.

    Raises:
        BudgetError: if there is not enough.
    """
    ram = Arena(lent_bytes(placement.regions, CPU), plan.copier, at_once=False)
    undo.callback(_free, comm, ram)
    is_on_device = plan.choice.states.tier == DEVICE
    slab_bytes = lent_bytes(placement.regions, DEVICE)
    if not is_on_device and not slab_bytes:
        return Memory(ram, None, Reserved(placement.regions, {CPU: ram}), plan.copier, plan.copier)
    if plan.copier.direct:
        slab: Arena | DeviceArena = Arena(slab_bytes, plan.copier, at_once=False)
    else:
        slab = DeviceArena(slab_bytes, plan.device)
    undo.callback(_free, comm, slab)
    if isinstance(slab, Arena):
        slab.prefault(lambda: None)
    reserved = Reserved(placement.regions, {CPU: ram, DEVICE: slab})
    if is_on_device:
        # Nothing leaves it in a step. If all that is trained stays there, what streams comes from RAM.
        streams_from_ram = plan.choice.params.tier == DEVICE
        return Memory(ram, slab, reserved, HostCopier(), plan.copier if streams_from_ram else HostCopier())
    return Memory(ram, slab, reserved, plan.copier, plan.copier)


_abandoned: list[Arena | DeviceArena] = []
"""Memory that stays mapped: a rank that is stuck may still make this one write to it."""


def _free(comm: Communicator, arena: Arena | DeviceArena) -> None:
    if not comm.close():
        _abandoned.append(arena)
    arena.close()


def _kernels_for(undo: ExitStack, plan: Plan, memory: Memory) -> tuple[Kernels, Kernels | None]:
    """Loads the kernels that work where the states are.

    Returns:
        Those of all states but `Run.device_flats`, and those of these, if there are any.
    """
    direct = plan.copier.direct
    loaded = [
        load_on(scratch, partial(stream_handle, scratch.device), dithered_room_of(plan.held))
        for scratch in memory.take(SCRATCH)
    ]
    if plan.choice.states.tier > DEVICE or direct:
        loaded.insert(0, load(kernel_threads(plan.threads, ranks_on_node=plan.room.ranks_on_node, direct=direct)))
    for kernels in loaded:
        undo.callback(kernels.close)
        kernels.start()
    first, *others = loaded
    return first, next(iter(others), None)


def _stores(undo: ExitStack, run: Run, placement: Placement, slots: Stripes | None, base: KeptBase | None) -> Stores:
    """The stores of all kinds of chunks that have a pool."""
    # The states' is made first of all in memory: a resume reads into it while the rest is made.
    stores = Stores({ChunkKind.STATES: _state_store(undo, run, placement, slots)})
    for kind, pool in placement.pools.items():
        if kind not in stores:
            part = None if slots is None else slots.of(kind)
            if base is not None and kind is ChunkKind.FROZEN:
                part = base.slots
            stores[kind] = _pool_store(undo, run, placement, part, kind, pool)
    if base is not None:
        stores[ChunkKind.FROZEN].reset(dict.fromkeys(range(len(placement.arrays[ChunkKind.FROZEN])), Version(0, 0)))
    return stores


def _state_store(undo: ExitStack, run: Run, placement: Placement, slots: Stripes | None) -> Store:
    """The store of the states. If some are on a device, it has another one beneath it, in RAM."""
    memory, timeline, kind, pool = run.memory, run.timeline, ChunkKind.STATES, placement.states
    arrays, part = placement.arrays[kind], None if slots is None else slots.of(kind)
    stay, buffers = _memory_of(kind, pool, memory)
    resident, there = ({chunk: stay[chunk] for chunk in chunks} for chunks in (pool.resident, pool.on_device))
    store = None
    if not there or resident or buffers:
        store = Store(arrays, resident, buffers, part, timeline, run.health, run.commits.is_due)
        undo.callback(store.close)
    if there:
        assert memory.device is not None
        store = DeviceStore(arrays, there, memory.device, store, timeline, run.health)
        undo.callback(store.close)
    assert store is not None
    return store


def _pool_store(
    undo: ExitStack,
    run: Run,
    placement: Placement,
    part: Slots | None,
    kind: ChunkKind,
    pool: Pool,
) -> Store:
    """A store of one kind of chunks with the memory of a pool.

    Args:
        undo: gets what closes the store.
        run: what the parts share.
        placement: what each chunk holds.
        part: the slots of these chunks.
        kind: the kind of chunks.
        pool: which chunks stay in RAM, and how many buffers there are.
    """
    store = Store(placement.arrays[kind], *_memory_of(kind, pool, run.memory), part, run.timeline, run.health)
    undo.callback(store.close)
    return store


def _memory_of(name: str, pool: Pool, memory: Memory) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The memory of each resident chunk of a pool, and of its buffers. Its regions are named after `name`."""
    stay = sorted(pool.resident | pool.on_device)
    return dict(zip(stay, memory.take(resident(name)), strict=True)), memory.take(in_flight(name))


def _activation_store(undo: ExitStack, plan: Plan, run: Run, engine: IOEngine | None) -> ActivationStore | None:
    """The store in which activations wait; None: they wait where they are made."""

    def spill() -> NamelessFiles | None:
        if engine is None:
            return None
        opened = [engine.adopt(run.files.create_nameless(path)) for path in run.paths]
        return NamelessFiles(run.files, engine, opened, run.timeline)

    is_on_device = plan.choice.activations.tier == DEVICE and not plan.copier.direct
    in_ram = run.memory.take(SPILLED if is_on_device else ACTIVATIONS)
    regions = in_ram, run.memory.take(ACTIVATIONS)
    store = stacked(regions, plan.copier, plan.device, run.timeline, spill)
    if store is not None:
        undo.callback(store.close)
    return store


def _open_files(
    undo: ExitStack, run: Run, plan: Plan, placement: Placement, start: Start, open_engine: OpenEngine
) -> tuple[Stripes | None, IOEngine | None]:
    """Opens the swap files and their engine, if there are any."""
    memory, paths = run.memory, run.paths
    if not paths:
        memory.ram.prefault(lambda: None)
        return None, None
    engine = open_engine(plan.io_engine, paths)
    undo.callback(engine.close)
    undo.callback(memory.ram.join)
    memory.ram.prefault(partial(engine.register, memory.ram.memory))
    resumed = None if start.found is None else start.found.slots
    run_id, chosen = (start.run_id, None) if resumed is None else resumed
    room = {one.what: one.nbytes for one in placement.regions if one.what in (MANIFEST, RECORD)}
    run_files = RunFiles(run_id, run.comm.everyone.rank, chosen, run.files, room)
    # With commits, another budget has to find the same order of slots.
    states = placement.states
    stays = states.resident | states.on_device if plan.choice.commits.every is None else ()
    resident = {slot for chunk, slot in enumerate(placement.slots.of(ChunkKind.STATES)) if chunk in stays}
    slots = Stripes(engine, paths, weights(paths), placement.slots, run_files, timeline=run.timeline, resident=resident)
    undo.callback(slots.close)
    return slots, engine
