"""`offload plan`: what `OffloadZero` would need with these options, and whether that fits.

No memory is taken for it, and no file is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from offload.cli.console import plain_console, print_json
from offload.cli.options import LEAST, MOST, Chunk, DeviceMemory, GradTier, Json, ParamTier, PlanOptions, States, Tier
from offload.errors import BudgetError, ConfigError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from offload.cli.plan_models import Sized
    from offload.planner.activations import Waiting
    from offload.planner.explain import Planned
    from offload.planner.machine_file import Figure, Machine
    from offload.planner.placement import Placement
    from offload.planner.simulate import NotPredicted
    from offload.planner.simulate.speeds import Passes, Speeds
    from offload.planner.verdict import Computing, Work

T = TypeVar("T")

LISTED = "list"
"""As --machine: shows the names of machines."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ASSUMED_FLOPS = 100e12
"""That a GPU achieves, if nothing is said: about a third of what an A100 could do in bf16."""
ASSUMED_DISK_GB_PER_S = 3.0
ASSUMED_LINK_GB_PER_S = 25.0
"""What is assumed of the link between RAM and a GPU, each way: PCIe 4.0 with 16 lanes."""


def plan(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="Size of the model, as `offload train` has them.")] = "5m",
    layers: Annotated[int | None, typer.Option(help="Blocks.", show_default="the preset's")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.", show_default="the preset's")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A transformers model instead of a preset: its config.json, or the directory of it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model instead of a preset: module:function, imported from here or where Python finds it, and "
            "called on the meta device. It returns a module that takes tokens (batch, seq), or a tuple of one and what "
            "it takes.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    accumulation: Annotated[str, typer.Option(help='Micro-batches a step, or "auto", counted as 2.')] = "1",
    dtype: Annotated[str, typer.Option(help="Of parameters, activations and gradients: bf16 or fp32.")] = "bf16",
    optimizer: Annotated[
        str,
        typer.Option(
            help="Class of torch.optim in lower case, such as sgd; or sgd-momentum, rmsprop-centered, amsgrad."
        ),
    ] = "adamw",
    tier: Tier = "nvme",
    param_tier: ParamTier = "auto",
    grad_tier: GradTier = "auto",
    device_memory: DeviceMemory = None,
    activation_tier: Annotated[
        str | None,
        typer.Option(
            help="Where what enters each block waits for its backward: device, cpu or nvme.",
            show_default="all activations stay on the device",
        ),
    ] = None,
    cpu_memory: Annotated[
        str | None,
        typer.Option(
            help='RAM for states, gradients and buffers, such as 2GiB, or "least": the least that works.',
            show_default="half of what is free",
        ),
    ] = None,
    chunk: Chunk = None,
    states: States = "fp32",
    split_master: Annotated[
        bool, typer.Option("--split-master", help="Only the low halves of the masters leave RAM.")
    ] = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="States on NVMe are stepped in backward: one slot a chunk more.")
    ] = False,
    commit_every: Annotated[
        int | None, typer.Option(help="Steps between commits: two slots a chunk.", show_default="100")
    ] = None,
    no_commits: Annotated[bool, typer.Option("--no-commits", help="Nothing is committed: one slot a chunk.")] = False,
    frozen: Annotated[
        int, typer.Option(help="Blocks that are frozen, from the first one on, and the embeddings with them.")
    ] = 0,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank on all linear layers of the blocks, and freeze the rest."),
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            help="Format of the frozen linear layers of blocks: nf4 (double quantised) or int8 as bitsandbytes has "
            "them, or fp8 with a scale a row.",
            show_default="they are not quantised",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Over how many ranks; what is shown is one rank's.")] = 1,
    stage: Annotated[
        int | None,
        typer.Option(help="ZeRO's, with several ranks: 1, 2 or 3.", show_default="3 if parameters stream, else 2"),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(help="Ranks that share the matrices of each block; --ranks are those that share states."),
    ] = 1,
    partition_activations: Annotated[
        bool, typer.Option("--partition-activations", help="Each of these keeps a part of what enters a block.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            help='Plan for this machine: a name, or a file such as `offload probe --save` writes; "list" shows names.',
            show_default="this machine",
        ),
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(
            help="A directory on each drive that the run will use, whose rates `offload probe` measured.",
            show_default="the current directory",
        ),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Plan for a GPU, also where there is none.")] = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="The GPU's memory, such as 24GiB; means --gpu. What activations leave of it is --device-memory.",
            show_default="the machine's",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            help="RAM that is free where it will run, such as 128GiB.",
            show_default="the machine's, or what is free here",
        ),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            help="FLOP/s that the device achieves, such as 150e12.",
            show_default="of products, as `offload probe` measured them or the machine has them; of a GPU 100e12, else "
            "unknown",
        ),
    ] = None,
    disk_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--disk-gb-per-s",
            help="What the disks move, reads and writes together.",
            show_default="what `offload probe` or `bench io` measured here, the machine's, or 3",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help='What a rank sends to others, such as 25GB/s; with the delay of a collective of two: "25GB/s,20us".',
            show_default="the machine's",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Show what a step moves with each of twelve budgets of this, and draw it into a PNG of that name, or "
            "into --picture: device_memory.",
            show_default="the plan of one budget",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Search for the best tiers, states, RAM, chunk and accumulation. What is given, stays."
        ),
    ] = False,
    goal: Annotated[
        str | None,
        typer.Option(
            help="What --search is for: fastest (tokens/s), least-wear (bytes written a token), or largest (as many "
            "blocks as fit).",
            show_default="fastest",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Write a PNG of what a step takes its time from, by the share of states in RAM; with --search of the "
            "front, with --sweep of its budgets."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show, before anything is allocated, whether a run fits, how long a step takes, and what other budgets do."""
    if machine == LISTED:
        from offload.cli.plan_machines import show_machines

        show_machines(json=json)
        return
    if picture is not None:
        from offload.cli.plots import require_file

        require_file(picture, "--picture")
    there = None if machine is None else _machine(machine)
    options = PlanOptions(
        preset=preset, layers=layers, width=width, config=config, frozen=frozen, lora_rank=lora_rank, quantise=quantise,
        batch=batch, seq=seq, accumulation=_whole(accumulation), dtype=dtype, optimizer=optimizer, tier=tier,
        param_tier=param_tier, grad_tier=grad_tier, device_memory=device_memory, activation_tier=activation_tier,
        cpu_memory=cpu_memory, chunk=chunk, states=states, split_master=split_master, speculate=speculate,
        commit_every=commit_every, no_commits=no_commits, ranks=ranks, stage=stage, tensor_parallel=tensor_parallel,
        partition_activations=partition_activations, gpu_memory=gpu_memory, ram=ram, flops=flops,
        gpu=gpu or gpu_memory is not None or (there is not None and there.device is not None),
        disk_gb_per_s=disk_gb_per_s, network=network, machine=there, paths=tuple(path or ()), sweep=sweep,
        search=search, goal=goal, model=model,
    )  # fmt: skip
    if options.search:
        from offload.cli.plan_search import show_search

        show_search(options, _given(context), picture, json=json)
        return
    from offload.cli.plan_models import sized

    sizes = sized(options)
    waiting = waiting_of(options, sizes)
    if options.sweep is not None:
        from offload.cli.plan_sweep import show_sweep

        show_sweep(options, sizes, waiting, picture, json=json)
        return
    planned = planned_of(options, sizes, waiting)
    try:
        figures = _figures(planned, options, sizes, waiting)
    except BudgetError as error:
        if error.option == "cpu_memory" and not json:
            _say_what_would(error, _what_fits(planned, options, sizes) | {"endurance_bytes": endurance_of(options)})
        raise
    figures |= _what_fits(planned, options, sizes) | _left_out(options, sizes)
    if picture is not None:
        _draw(picture, planned, options, sizes, figures, waiting)
    if json:
        given = {"preset": preset, "layers": layers, "width": width, "frozen": frozen, "lora_rank": lora_rank}
        named = {"config": None if config is None else str(config), "model": model}
        given = next(({name: one, "lora_rank": lora_rank} for name, one in named.items() if one is not None), given)
        print_json(given | figures)
        return
    from offload.cli.plan_tables import show

    show(plain_console(), figures, options, sizes)


def default_options(**given: Any) -> PlanOptions:
    """The options of the command as they are if nothing is said, but for some; for scripts that plan."""
    import inspect
    from dataclasses import fields

    defaults = {name: one.default for name, one in inspect.signature(plan).parameters.items()}
    known = {one.name: defaults[one.name] for one in fields(PlanOptions) if one.name in defaults}
    return PlanOptions(**known | {"paths": (), "accumulation": 1} | given)


def _given(context: typer.Context) -> frozenset[str]:
    """The names of the options that the user gave."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")


def _draw(
    file: Path,
    planned: Planned,
    options: PlanOptions,
    model: Sized,
    figures: dict[str, Any],
    waiting: Waiting | None,
) -> None:
    """Draws what a step takes its time from, in this plan and with other budgets of RAM.

    Raises:
        ConfigError: no time can be predicted, or the file cannot be written.
    """
    from offload.cli.plan_time import draw
    from offload.tiers import NVME

    if figures["predicted"] is None:
        raise ConfigError(f"--picture: no time is predicted: {figures['not_predicted']}")
    steps = [("this plan", figures["predicted"]["parts_s"])]
    for budget in figures["budgets"]:
        other = planned.on(NVME).with_memory(budget["cpu_bytes"])
        other = replace(
            other, room=replace(other.room, free_cpu_bytes=max(budget["cpu_bytes"], figures["free_cpu_bytes"]))
        )
        found = predicted_of(
            other, options, model, figures["flops"], waiting, figures.get("update_flops_per_s"), hides=False
        )
        found = found["predicted"]
        if found is not None:
            steps.append((f"{budget['share']:.0%}", found["parts_s"]))
    draw(file, f"{figures['parameters']:,} trained parameters: what a step takes its time from", steps)


def _machine(wanted: str) -> Machine:
    from offload.planner.machine_file import find

    return find(wanted)


def _left_out(options: PlanOptions, model: Sized) -> dict[str, Any]:
    """The format of the frozen weights, and what of these it leaves out; nothing without --quantise."""
    from offload.model.units import compute_dtypes, unquantised

    if options.quantise is None:
        return {}
    nbytes, names = unquantised(model.module, compute_dtypes(model.module, (), options.compute_dtype))
    return {"quantise": options.quantise, "unquantised_bytes": nbytes, "unquantised": names}


def _say_what_would(error: BudgetError, budgets: dict[str, Any]) -> None:
    """Prints what would fit, where the RAM that was given does not suffice."""
    from offload.cli.plan_tables import show_budgets

    console = plain_console()
    console.print(f"Fits: no. {format_bytes(error.needed)} of RAM are needed.")
    show_budgets(console, budgets)


def _whole(accumulation: str) -> int | str:
    """Reads `accumulation`: a whole number, or "auto".

    Raises:
        ConfigError: it is neither.
    """
    if accumulation == "auto":
        return accumulation
    if not accumulation.isdecimal() or len(accumulation) > len(str(MOST)):
        raise ConfigError(f'--accumulation {accumulation}: give a whole number, at least 1, or "auto"')
    return int(accumulation)


def waiting_of(options: PlanOptions, model: Sized) -> Waiting | None:
    """What waits of a micro-batch for its backward, measured on the meta device.

    Returns:
        None if the model's forward does not run on the meta device.
    """
    from offload.planner.activations import measure

    return _measured(measure, options, model)


def why_not_measured(options: PlanOptions, model: Sized) -> str:
    """What a forward raises that does not run on the meta device, and in which module, in a line."""
    from offload.planner.activations import measure

    try:
        _measure(measure, options, model)
    except Exception as error:
        words, within = str(error).strip().split("\n")[0].rstrip("."), _innermost(error, model.module)
        return type(error).__name__ + (f" in {within}" if within else "") + (f": {words}" if words else "")
    return "not always"


def _innermost(error: Exception, model: nn.Module) -> str:
    """The name of the innermost module whose code an error came through, in a copy of a model; "" if none has."""
    from torch import nn

    names: dict[nn.Module, str] = {}
    found = ""
    for frame, _ in walk_tb(error.__traceback__):
        one = frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            if not names and type(one) is type(model):
                names = {module: name for name, module in one.named_modules()}
            found = names.get(one, found)
    return found


def _measured(measure: Callable[..., T | None], options: PlanOptions, model: Sized) -> T | None:
    """What a forward of a micro-batch on the meta device keeps; None if the model's does not run there."""
    try:
        return _measure(measure, options, model)
    except Exception:  # whatever a model does not like: the formula is left
        return None


def _measure(measure: Callable[..., T], options: PlanOptions, model: Sized) -> T:
    """As `_measured`, but it raises what the forward raises."""
    import torch

    from offload import torch_private

    tokens = torch.empty(options.batch, options.seq, dtype=torch.long, device="meta")
    given = (tokens,) if model.inputs is None else model.inputs
    given = torch_private.tree_map_only(torch.Tensor, partial(_computed_with, options=options), given)
    with redirect_stdout(sys.stderr):  # what a model prints is not of the plan
        return measure(model.module, options.compute_dtype, lambda module: module(*given), gpu=options.gpu)


def _computed_with(given: Tensor, options: PlanOptions) -> Tensor:
    """A tensor that a forward is given, as the compute dtype has it."""
    return given.to(options.compute_dtype) if given.is_floating_point() else given


def arguments_of(options: PlanOptions, model: Sized, waiting: Waiting | None) -> dict[str, Any]:
    """What `OffloadZero` is given beside the model and its optimizer.

    Args:
        options: the options of the command.
        model: the model.
        waiting: what waits of a micro-batch; None: it follows from the formula for transformers.

    Raises:
        BudgetError: activations leave nothing of the GPU's memory.
    """
    from offload import Tuning
    from offload.model.partition import partition_bytes
    from offload.planner.placement import activation_memory

    a_block = options.entering_bytes(model.width)
    if waiting is not None:
        a_block = max(waiting.largest_bytes, -(-waiting.entering_bytes // max(model.blocks, 1)))
    if options.partition_activations:
        a_block = partition_bytes(a_block, options.tensor_parallel)
    given: dict[str, Any] = {} if options.commit_every is None else {"commit_every": options.commit_every}
    return {
        "states": options.states,
        "tier": options.tier,
        "path": "." if options.has_path else None,
        "cpu_memory": options.given_cpu_memory,
        "compute_dtype": options.compute_dtype,
        "accumulation": options.accumulation,
        "device_memory": _device_memory(options, model, waiting),
        "param_tier": options.given_param_tier,
        "grad_tier": options.given_grad_tier,
        "tuning": Tuning(
            chunk=options.chunk or Tuning().chunk, split_master=options.split_master, speculate=options.speculate
        ),
        "activation_tier": options.activation_tier,
        "activation_memory": activation_memory(options.activation_tier, model.blocks, a_block),
        "stage": options.stage,
        **given,
        **({"commit_every": None} if options.no_commits else {}),
    }


def planned_of(options: PlanOptions, model: Sized, waiting: Waiting | None) -> Planned:
    """The plan of the run.

    Args:
        options: the options of the command.
        model: the model.
        waiting: what waits of a micro-batch; None: it follows from the formula for transformers.

    Raises:
        ConfigError: OffloadZero would refuse these options for this model.
        BudgetError: the GPU's memory, or RAM, does not suffice.
    """
    from offload.cli.plan_models import rules_named
    from offload.devices.copies import accelerator
    from offload.planner.fastest import Fastest

    rules = rules_named(options.optimizer, options.states)
    if options.splits_masters and not rules[0].splits_masters:
        raise ConfigError(f"--split-master with --optimizer {options.optimizer}: only Adam's masters can be split")
    if options.tensor_parallel > model.width:
        raise ConfigError(
            f"--tensor-parallel {options.tensor_parallel}: matrices of a width of {model.width} are shared by "
            f"{model.width} ranks at most"
        )
    direct = not options.gpu and (options.machine is not None or accelerator() is None)
    if options.speculate and not rules[0].can_try:
        raise ConfigError(
            f"--speculate with --optimizer {options.optimizer}: it steps whole parameters, and only steps of single "
            "elements can be tried; leave it out"
        )
    planned = model.plans.of(
        direct=direct,
        free_cpu_bytes=options.free_cpu_bytes,
        cpus=threads_of(options.machine),
        rules=rules,
        pick=Fastest(_work_of(options, model), speeds_for(options)),
        partition_activations=options.partition_activations,
        ranks=options.ranks,
        tensor_parallel=options.tensor_parallel,
        **arguments_of(options, model, waiting),
    )
    return planned.with_memory(planned.least()) if options.cpu_memory == "least" else planned


def threads_of(machine: Machine | None) -> int | None:
    """How many CPUs a machine has; None: that is unknown, or it is this one."""
    return None if machine is None or machine.threads is None else machine.threads.number


def computing_of(
    options: PlanOptions, model: Sized, waiting: Waiting | None, outputs: int | None = None
) -> Computing | None:
    """What a micro-batch takes on the device beside the plan; None: that is unknown.

    Args:
        options: the options of the command.
        model: what they are about.
        waiting: what waits for the backward.
        outputs: bytes that stand in place of the logits.
    """
    from offload.planner.verdict import Computing

    has_tier = options.activation_tier is not None
    return None if waiting is None else Computing.of(waiting, model.blocks, has_tier=has_tier, outputs=outputs)


def resources_beside(options: PlanOptions, model: Sized) -> dict[str, int]:
    """Bytes of a GPU's memory that belong neither to the plan nor to a micro-batch, by name; 0 without a GPU."""
    from offload.planner.verdict import COMMUNICATOR_BYTES, COMMUNICATORS, CONTEXT_BYTES, leaving_bytes

    if not options.gpu:
        return {"leaving_bytes": 0, "context_bytes": 0, "communication_bytes": 0}
    itemsize = options.compute_dtype.itemsize
    shared = options.tensor_parallel
    units = [itemsize * numel // shared for numel in model.trained_of_units]
    alone = options.ranks == 1
    # States on the device: what a backward makes is added to what waits there, and goes.
    leaving = leaving_bytes(units, alone=alone and options.tier != "device")
    communicators = 0 if alone and shared == 1 else COMMUNICATORS
    return {
        "leaving_bytes": leaving,
        "context_bytes": CONTEXT_BYTES,
        "communication_bytes": communicators * COMMUNICATOR_BYTES,
    }


def _device_memory(options: PlanOptions, model: Sized, waiting: Waiting | None) -> int | str | None:
    """The `device_memory` that is given, or what activations leave of the GPU's memory.

    Raises:
        BudgetError: they leave nothing.
    """
    if options.gpu_bytes is None or options.device_memory is not None:
        return options.device_memory
    computing = computing_of(options, model, waiting)
    beside = sum(resources_beside(options, model).values()) + (0 if computing is None else computing.nbytes)
    if beside < options.gpu_bytes:
        return options.gpu_bytes - beside
    way_out = "a smaller --batch or --seq, or --activation-tier cpu"
    if options.activation_tier is not None:
        way_out = "a smaller --batch or --seq"
    raise BudgetError(
        f"{format_bytes(beside)} of the GPU's memory are for CUDA, gradients on their way and the activations of "
        f"{options.batch} x {options.seq} tokens, and it has {format_bytes(options.gpu_bytes)}: give {way_out}",
        needed=beside,
        available=options.gpu_bytes,
        option="gpu_memory",
    )


def _figures(planned: Planned, options: PlanOptions, model: Sized, waiting: Waiting | None) -> dict[str, Any]:
    """All figures of the run, as --json prints them and the tables show them.

    Raises:
        BudgetError: memory or disk space does not suffice, as `OffloadZero` would say.
    """
    from offload.cli.plan_updates import update_figures

    entering = model.blocks * options.entering_bytes(model.width) if waiting is None else waiting.entering_bytes
    saved = None if waiting is None else waiting.saved_bytes
    found = {"entering_bytes": entering, "saved_bytes": saved} | summarise(planned, options)
    if waiting is None:
        found["not_measured"] = why_not_measured(options, model)
    found |= _zero_r(planned, options, model) | speed_of(planned, options, model) | _trials(planned, options, model)
    on_gpu = options.gpu or not planned.direct
    found |= update_figures(
        planned, options.optimizer, on_gpu=on_gpu, flops_per_s=found["flops"], link=link_of(options),
        measures=options.machine is None,
    )  # fmt: skip
    found |= predicted_of(planned, options, model, found["flops"], waiting, found.get("update_flops_per_s"))
    found |= _computed(options, model, waiting) | _routed(planned, options, model)
    return found | verdict_of(found, options, computing_of(options, model, waiting), resources_beside(options, model))


def _computed(options: PlanOptions, model: Sized, waiting: Waiting | None) -> dict[str, int | None]:
    """What a micro-batch takes on the device: as it is, and in ways that spare some of it.

    These are `linear_cross_entropy` in place of the logits, and the MLPs of blocks in tiles of tokens.

    Returns:
        None for what is unknown, or cannot be done.
    """
    from offload.model.loss import bytes_in_chunks
    from offload.planner.activations import TILE, measure_in_tiles

    tokens, chunks, tiled = options.batch * options.seq, None, None
    if waiting is not None and waiting.output_numel >= tokens:
        words, trains = waiting.output_numel // tokens, options.lora_rank is None
        chunks = bytes_in_chunks(tokens, words, model.width, options.compute_dtype, trains_head=trains)
    if waiting is not None and tokens > TILE:
        tiled = _measured(measure_in_tiles, options, model)
    of_tiles, sums = (None, 0) if tiled is None else (tiled.waiting, tiled.sum_bytes)
    ways = {
        "computed_bytes": computing_of(options, model, waiting),
        "computed_bytes_in_tiles": computing_of(options, model, of_tiles),
        "computed_bytes_in_chunks": None if chunks is None else computing_of(options, model, waiting, chunks),
        "computed_bytes_in_both": None if chunks is None else computing_of(options, model, of_tiles, chunks),
    }
    of_sums = dict.fromkeys(("computed_bytes_in_tiles", "computed_bytes_in_both"), sums)
    found = {name: None if one is None else one.nbytes + of_sums.get(name, 0) for name, one in ways.items()}
    return {"output_bytes_in_chunks": chunks, **found}


def _routed(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """What the experts of a mixture move; nothing of another model.

    Raises:
        BudgetError: memory or disk space does not suffice.
    """
    from offload.planner.routing import routed_bytes

    if model.routing is None or not model.experts:
        return {}
    tokens = options.batch * options.seq
    moved = routed_bytes(planned, model.experts, model.routing, tokens)
    needed = model.routing.experts * model.routing.likelihood(tokens)
    return {"experts": model.routing._asdict() | {"expected": needed} | moved._asdict()}


def summarise(planned: Planned, options: PlanOptions) -> dict[str, Any]:
    """The figures of what lies where, and of what a step moves.

    Raises:
        BudgetError: memory or disk space does not suffice.
    """
    from offload.devices.copies import accelerator
    from offload.planner import explain
    from offload.planner.link import link_bytes
    from offload.tiers import DEVICE

    device = accelerator()
    placement = planned.place()
    link = None if planned.direct else link_bytes(planned.layout, placement)
    return {
        "tier": planned.choice.states.tier.name,
        "param_tier": planned.choice.params.tier.name,
        "grad_tier": planned.choice.grads.tier.name,
        "device": "cpu" if planned.direct else device.type if device is not None else "gpu",
        "accumulation": planned.choice.grads.declared,
        "states": planned.choice.states.form,
        "split_master": planned.choice.states.split_master,
        "speculate": planned.choice.states.tries_steps,
        "commit_every": planned.choice.commits.every,
        "optimizer": options.optimizer,
        "activation_tier": options.activation_tier,
        "parameters": planned.layout.trained.numel,
        "frozen_tier": planned.choice.params.frozen_tier.name,
        "chunks": len(planned.layout.chunks),
        "kept_chunks": len(placement.states.sizes) - len(placement.states.streamed),
        "kept_share": 1 - sum(placement.states.streamed) / sum(placement.states.sizes),
        "device_chunks": len(placement.states.on_device),
        "buffers": placement.states.in_flight,
        "arena_utilisation": placement.states.utilisation,
        "rows": [{"kind": row.kind, "tier": row.tier.name, "nbytes": row.nbytes} for row in explain.explain(placement)],
        "device_bytes": placement.device_bytes,
        "device_budget_bytes": placement.device_budget_bytes,
        "peak_cpu_bytes": placement.arena_bytes,
        "cpu_budget_bytes": placement.budget_bytes,
        "least_cpu_bytes": planned.least(),
        "build_bytes": 4 * planned.layout.numel if planned.choice.params.tier == DEVICE else 0,
        "disk_bytes": placement.disk_bytes,
        "read_bytes": placement.read_bytes,
        "written_bytes": placement.written_bytes,
        "commit_bytes": placement.commit_bytes,
        "staying_units": len(placement.staying),
        "link_up_bytes": None if link is None else link.up,
        "link_down_bytes": None if link is None else link.down,
        "bytes_per_param": explain.bytes_per_param(placement, planned.layout),
        "drive_life_steps": life_of(placement, options),
        "endurance_bytes": endurance_of(options),
        "ranks": planned.layout.ranks,
        "stage": planned.choice.grads.stage,
        "held_bytes": dict(placement.held_bytes),
        "sent_elements": explain.sent_numel(planned),
    }


def _zero_r(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """The figures of tensor parallelism; see `zero_r` in planner/explain.py.

    Raises:
        BudgetError: memory or disk space does not suffice.
    """
    from offload.planner.explain import zero_r

    ranks, entering_bytes = options.tensor_parallel, options.entering_bytes(model.width)
    found = {"tensor_parallel": ranks, "partition_activations": planned.choice.activations.partitioned}
    if ranks == 1:
        return found
    return found | {"zero_r": zero_r(planned, ranks, blocks=model.blocks, entering_bytes=entering_bytes)}


def speed_of(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """How long a step takes, and for which rates that was computed.

    Raises:
        BudgetError: memory or disk space does not suffice.
    """
    from offload.planner.verdict import step_time

    found, steps = rates_of(options)
    flops, disk_bytes_per_s = found["flops"], 1e9 * found["disk_gb_per_s"]
    elements = None if steps is None else steps.value
    work = work_of(planned, options, model)
    time = step_time(planned, work, flops=flops, disk_bytes_per_s=disk_bytes_per_s, elements_per_s=elements)
    of_step = work.tokens * planned.choice.grads.micro_batches
    found |= {"tokens_per_step": of_step, "disk_seconds": time.disk}
    if flops is None:
        return found
    there = machine_of(options)
    return found | {
        "compute_seconds": time.compute,
        "kernel_seconds": None if elements is None else time.update,
        "kernels_from": None if steps is None or there is None else _known(steps, there),
        "step_seconds": time.step,
        "tokens_per_s": of_step / time.step,
        "waits_for": time.waits_for,
        "hiding_tokens": time.hiding_tokens,
    }


def rates_of(options: PlanOptions) -> tuple[dict[str, Any], Figure | None]:
    """How fast the disks and the device are, where that is from, and the elements a second that the optimizer steps."""
    there = machine_of(options)
    disk, disk_from = ASSUMED_DISK_GB_PER_S, "assumed"
    if options.disk_gb_per_s is not None:
        disk, disk_from = options.disk_gb_per_s, "given"
    elif there is not None and there.disk is not None:
        disk, disk_from = there.disk.value / 1e9, _known(there.disk, there)
    flops, flops_from = options.flops, "given"
    if flops is None and there is not None and options.dtype in there.products:
        product = there.products[options.dtype]
        flops, flops_from = product.value, _known(product, there)
    elif flops is None:
        flops, flops_from = (ASSUMED_FLOPS, "assumed") if options.gpu else (None, "unknown")
    steps = None if there is None else there.elements_per_s(_step_name(options), bytes_an_element(options))
    found = {"flops": flops, "flops_from": flops_from, "disk_gb_per_s": disk, "disk_from": disk_from}
    return found, steps


def _trials(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """How many times as fast steps are that are tried in backward, and whether "auto" would try them by these rates.

    Both are None where steps cannot be tried, or a rate is unknown.
    """
    from offload.cli.plan_models import rules_named
    from offload.planner.trying import Speed, gain, is_worth_it, with_trials

    found, steps = rates_of(options)
    names = ("speculate_gain", "speculate_pays")
    can = planned.choice.states.tier.is_durable and rules_named(options.optimizer, options.states)[0].can_try
    if found["flops"] is None or not can:
        return dict.fromkeys(names)
    never = replace(planned.choice, states=replace(planned.choice.states, tries_steps=False))
    try:
        plans = [replace(planned, choice=one, refusal=None) for one in (never, with_trials(never))]
        if options.cpu_memory == LEAST:
            plans = [one.with_memory(one.least()) for one in plans]
        without, tried = (one.place() for one in plans)
    except BudgetError:
        return dict.fromkeys(names)
    elements = None if steps is None else steps.value
    work, speed = work_of(planned, options, model), Speed(found["flops"], 1e9 * found["disk_gb_per_s"], elements)
    of_layout = (planned.layout, without, tried, work, speed)
    return dict(zip(names, (gain(*of_layout), is_worth_it(*of_layout)), strict=True))


def work_of(planned: Planned, options: PlanOptions, model: Sized) -> Work:
    """What a micro-batch computes. Of a mixture's experts a token uses a few."""
    from offload.planner.verdict import Work

    trained = planned.layout.trained.numel
    recomputes = options.activation_tier is not None and planned.choice.activations.recompute
    frozen = max(model.numel // options.tensor_parallel - trained, 0)
    if model.routing is not None:
        params = dict(model.module.named_parameters())
        numels = [(params[name].requires_grad, params[name].numel()) for name in model.experts]
        unused = 1 - model.routing.per_token / model.routing.experts
        trained -= round(unused * sum(numel for is_trained, numel in numels if is_trained))
        frozen -= round(unused * sum(numel for is_trained, numel in numels if not is_trained))
    return Work(trained, frozen, options.batch * options.seq, recomputes)


def _work_of(options: PlanOptions, model: Sized) -> Work:
    """What a micro-batch computes, before it is decided what is where."""
    from offload.planner.verdict import Work

    trained = sum(model.trained_of_units)
    return Work(trained, max(model.numel - trained, 0), options.batch * options.seq, recomputes=False)


def predicted_of(
    planned: Planned,
    options: PlanOptions,
    model: Sized,
    flops_per_s: float | None,
    waiting: Waiting | None,
    matrix_flops: float | None = None,
    *,
    hides: bool = True,
) -> dict[str, Any]:
    """How long a simulated step takes; see `plan_time.predicted`.

    An optimizer of matrices has Adam beside it, which steps all else.

    Raises:
        BudgetError: memory or disk space does not suffice.
    """
    from offload.cli.plan_time import predicted

    speeds, beside = speeds_for(options, matrix_flops), beside_of(planned, options, model, waiting)
    return predicted(planned, work_of(planned, options, model), flops_per_s, speeds, beside, hides=hides)


def beside_of(planned: Planned, options: PlanOptions, model: Sized, waiting: Waiting | None) -> Passes:
    """What is known of a micro-batch but its seconds.

    Args:
        planned: the plan.
        options: of the command.
        model: the model.
        waiting: what waits of a micro-batch for its backward; None: that is unknown.
    """
    from offload.planner.simulate.speeds import Passes
    from offload.planner.simulate.what_if import expected_tiles
    from offload.planner.tile_bytes import tiled_bytes

    sizes = {} if waiting is None else waiting.of(planned.choice.activations)
    tiles = {}
    if model.routing is not None:
        tiles = expected_tiles(planned.layout, model.experts, model.routing, options.batch * options.seq)
    linears = {} if waiting is None or not planned.direct else waiting.linears
    return Passes(waiting=sizes, tiles=tiles, tiled_bytes=tiled_bytes(planned.layout, linears, options.compute_dtype))


def speeds_for(options: PlanOptions, matrix_flops: float | None = None) -> Speeds | NotPredicted:
    """The speeds of the machine that will run it, or why they are not known.

    Args:
        options: of the command.
        matrix_flops: see `Speeds`.
    """
    from offload.planner.measured import speeds_of

    there = machine_of(options)
    beside_matrices = options if matrix_flops is None else replace(options, optimizer="adamw")
    disk = None if options.disk_gb_per_s is None else 1e9 * options.disk_gb_per_s
    return speeds_of(
        there,
        elements_per_s=elements_per_s(beside_matrices, there),
        disk_bytes_per_s=disk,
        matrix_flops=matrix_flops,
        network=options.network_speed,
    )


def elements_per_s(options: PlanOptions, machine: Machine | None) -> float | None:
    """How many elements the optimizer steps in RAM a second on a machine; None: that is not known."""
    found = None if machine is None else machine.elements_per_s(_step_name(options), bytes_an_element(options))
    return None if found is None else found.value


def machine_of(options: PlanOptions) -> Machine | None:
    """The machine that will run it; None: another one than this, of which nothing is known but what options say."""
    from offload.planner.machine_file import here

    if options.is_elsewhere:
        return options.machine
    return here(options.paths or (Path.cwd(),))


def _known(figure: Figure, machine: Machine) -> str:
    """Where a figure is from: "measured" here, "elsewhere", or "described"."""
    return "described" if not figure.measured else "measured" if machine.is_here else "elsewhere"


def link_of(options: PlanOptions) -> tuple[float, float, str]:
    """Bytes a second to the GPU and back, and where they are from."""
    there = machine_of(options)
    if there is None or there.link is None:
        return 1e9 * ASSUMED_LINK_GB_PER_S, 1e9 * ASSUMED_LINK_GB_PER_S, "assumed"
    return there.link.up.value, there.link.down.value, _known(there.link.up, there)


def endurance_of(options: PlanOptions) -> float | None:
    """The bytes that may be written to the machine's drives; None: that is unknown."""
    return None if options.machine is None else options.machine.endurance


def life_of(placement: Placement, options: PlanOptions) -> float | None:
    """After how many steps the drives have been written as much as their warranty covers; None: never."""
    return placement.life_steps(endurance_of(options))


def bytes_an_element(options: PlanOptions) -> float | None:
    """What Adam's kernel reads and writes of an element: states both ways, a gradient, and the parameter.

    Of a split master the upper half is in the parameter. None: the optimizer has no kernel of its own.
    """
    from offload.cli.plan_models import rules_named
    from offload.optim.rules.adam import AdamRule
    from offload.sizes import MASTER_ITEM_BYTES

    rule, _ = rules_named(options.optimizer, options.states)
    if not isinstance(rule, AdamRule):
        return None
    of_states = sum(size / block for state in rule.states for size, block in state.form.arrays)
    itemsize = options.compute_dtype.itemsize
    master = MASTER_ITEM_BYTES - itemsize if options.splits_masters else MASTER_ITEM_BYTES
    return 2 * (master + of_states) + itemsize + (2 * itemsize if options.splits_masters else itemsize)


def _step_name(options: PlanOptions) -> str:
    from offload.planner.rates import step_name

    return step_name(options.optimizer, options.states, split_master=options.splits_masters)


def verdict_of(
    found: dict[str, Any], options: PlanOptions, computing: Computing | None, beside: dict[str, int]
) -> dict[str, Any]:
    """Whether all of it fits, and the sums that say so.

    Args:
        found: the figures so far.
        options: the options of the command.
        computing: what a micro-batch takes on the device; None: that is unknown, and not counted.
        beside: what else takes a GPU's memory.
    """
    from offload.planner.machine import free_memory

    computed = 0 if computing is None else computing.nbytes
    on_device = found["device_bytes"] + computed + sum(beside.values())
    free = free_memory() if options.free_cpu_bytes is None else options.free_cpu_bytes
    in_ram = found["peak_cpu_bytes"] + (on_device if found["device"] == "cpu" else 0)
    fits_device = options.gpu_bytes is None or on_device <= options.gpu_bytes
    capacity = None if options.machine is None else options.machine.disk_capacity
    fits_disk = capacity is None or found["disk_bytes"] <= capacity
    return {
        "fits": fits_device and fits_disk and in_ram <= free,
        "fits_device": fits_device,
        "fits_disk": fits_disk,
        "disk_capacity_bytes": capacity,
        "activation_bytes": None if computing is None else computing.activation_bytes,
        "output_bytes": None if computing is None else computing.output_bytes,
        "backward_bytes": None if computing is None else computing.backward_bytes,
        **beside,
        "device_total_bytes": on_device,
        "gpu_bytes": options.gpu_bytes,
        "cpu_total_bytes": in_ram,
        "free_cpu_bytes": free,
    }


def _what_fits(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """What other budgets of RAM would do with the states on NVMe, and which of them this machine has.

    Raises:
        BudgetError: the device lacks memory, or the disk lacks space.
    """
    from offload.planner.machine import free_memory
    from offload.tiers import NVME

    free = planned.room.free_cpu_bytes
    if free is None:
        free = free_memory()
    on_disk = planned.on(NVME)
    everything = on_disk.cpu_memory_for(1.0)
    budgets = []
    for share in SHARES:
        needed = on_disk.cpu_memory_for(share)
        # With so few chunks, buffers for the others would take as much as all.
        if needed == everything and share < 1:
            continue
        ample = on_disk.with_memory(needed)
        ample = replace(ample, room=replace(ample.room, free_cpu_bytes=max(needed, free)))
        placed = ample.place()
        speed = speed_of(ample, options, model)
        budgets.append(
            {
                "share": share,
                "cpu_bytes": needed,
                "streamed_bytes": sum(placed.states.streamed),
                "moved_bytes": placed.read_bytes + placed.written_bytes,
                "step_seconds": speed.get("step_seconds", speed["disk_seconds"]),
                "drive_life_steps": life_of(placed, options),
                "fits": needed <= free,
            }
        )
    return {"free_cpu_bytes": free, "largest_share": planned.largest_share(free), "budgets": budgets}
