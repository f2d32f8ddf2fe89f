"""`offload plan`: what `offload train` would need with these options. Nothing is allocated, read or written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json
from offload.cli.options import Chunk, CpuMemory, DeviceMemory, GradTier, Json, ParamTier, PlanOptions, Tier
from offload.errors import ConfigError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import nn

    from offload.planner.activations import Waiting
    from offload.planner.explain import Planned

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

KINDS = {
    "param": "what the model computes with",
    "frozen": "frozen parameters, and buffers of the model",
    "grad": "gradients, sums of squares, bounces",
    "master": "fp32 masters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "activation": "what enters blocks, on its way to their backward",
    "buffers": "what streamed chunks pass through",
    "slots": "of chunks that stay in RAM",
    "rest": "headers, padding, buffers of copies",
}
TIERS = {"device": "device", "cpu": "RAM", "nvme": "NVMe"}
WHERE = {"device": "on the device", "cpu": "in RAM", "nvme": "on NVMe"}


def plan(
    preset: Annotated[str, typer.Option(help="Size of the model, as `offload train` has them.")] = "5m",
    layers: Annotated[int | None, typer.Option(help="Blocks.", show_default="the preset's")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.", show_default="the preset's")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A transformers model instead of a preset: its config.json, or the directory of it."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch; only activations depend on it.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens a sequence, likewise.")] = 256,
    accumulation: Annotated[str, typer.Option(help='Micro-batches a step, or "auto", counted as 2.')] = "1",
    dtype: Annotated[str, typer.Option(help="Of parameters, activations and gradients: bf16 or fp32.")] = "bf16",
    tier: Tier = "nvme",
    param_tier: ParamTier = "device",
    grad_tier: GradTier = "cpu",
    device_memory: DeviceMemory = None,
    activation_tier: Annotated[
        str | None,
        typer.Option(
            help="Where what enters each block waits for its backward: device, cpu or nvme.",
            show_default="activations are not counted",
        ),
    ] = None,
    cpu_memory: CpuMemory = None,
    chunk: Chunk = None,
    split_master: Annotated[
        bool, typer.Option("--split-master", help="Only the low halves of the masters leave RAM.")
    ] = False,
    commit_every: Annotated[
        int | None, typer.Option(help="Steps between commits: two slots a chunk.", show_default="none")
    ] = None,
    frozen: Annotated[
        int, typer.Option(help="Blocks that are frozen, from the first one on, and the embeddings with them.")
    ] = 0,
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
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Plan for a GPU, also where there is none; --device-memory says its size.")
    ] = False,
    ram: Annotated[
        str | None,
        typer.Option(help="RAM that is free where it will run, such as 128GiB.", show_default="what is free here"),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="FLOP/s that the device achieves, such as 150e12: then the tokens that hide the disk."),
    ] = None,
    disk_gb_per_s: Annotated[
        float, typer.Option("--disk-gb-per-s", help="What the disks move, reads and writes together (--flops).")
    ] = 3.0,
    json: Json = False,
) -> None:
    """Show what a run needs on every tier, and what more or less RAM would do, before anything is allocated."""
    from rich.console import Console

    options = PlanOptions(
        preset=preset, layers=layers, width=width, config=config, frozen=frozen, batch=batch, seq=seq,
        accumulation=_whole(accumulation), dtype=dtype, tier=tier, param_tier=param_tier, grad_tier=grad_tier,
        device_memory=device_memory, activation_tier=activation_tier, cpu_memory=cpu_memory, chunk=chunk,
        split_master=split_master, commit_every=commit_every, ranks=ranks, stage=stage,
        tensor_parallel=tensor_parallel, partition_activations=partition_activations, gpu=gpu, ram=ram, flops=flops,
        disk_gb_per_s=disk_gb_per_s,
    )  # fmt: skip
    model = _preset_model(options) if config is None else _configured(options, config)
    waiting = waiting_of(options, model)
    planned = planned_of(options, model, waiting)
    fits = _what_fits(planned)
    if json:
        given = {"preset": preset, "layers": layers, "width": width, "frozen": frozen}
        of = given if config is None else {"config": str(config)}
        print_json(of | _figures(planned, options, model, waiting) | fits)
        return
    console = Console()
    try:
        _show(console, _figures(planned, options, model, waiting), options, model)
    finally:
        # Also where it does not fit: this says what would.
        _show_what_fits(console, fits)


@dataclass(frozen=True)
class Sized:
    """A model on the meta device. Attributes: blocks: how many it has; width: elements of each token between blocks."""

    module: nn.Module
    blocks: int
    width: int


def _preset_model(options: PlanOptions) -> Sized:
    """The GPT of the preset with other sizes, on the meta device. Raises: ConfigError."""
    from offload.models import GPT, PRESETS

    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: choose one of {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    width = preset.width if options.width is None else options.width
    # How many heads share the width changes no size.
    heads = math.gcd(width, preset.heads)
    layers = preset.layers if options.layers is None else options.layers
    model = GPT(replace(preset, layers=layers, width=width, heads=heads), device="meta")
    _freeze([*model.blocks], [model.embed, model.positions], options.frozen)
    return Sized(model, layers, width)


def _freeze(blocks: list[nn.Module], embeddings: list[nn.Module], frozen: int) -> None:
    """Freezes so many blocks, the first ones, and the embeddings before them. Raises: ConfigError."""
    if not 0 <= frozen <= len(blocks):
        raise ConfigError(f"--frozen {frozen}: give a whole number, from 0 to the model's {len(blocks)} blocks")
    for module in [*embeddings, *blocks[:frozen]] if frozen else ():
        module.requires_grad_(False)


def _configured(options: PlanOptions, config: Path) -> Sized:
    """The transformers model of a config.json, on the meta device. Raises: ConfigError."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--config needs transformers: pip install transformers") from error
    try:
        found = transformers.AutoConfig.from_pretrained(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--config {config} is no configuration that transformers knows: {error}") from error
    from offload.model.units import blocks_of

    architectures = getattr(found, "architectures", None) or ()
    kind = next((getattr(transformers, name) for name in architectures if hasattr(transformers, name)), None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(found) if kind is None else kind(found)
    blocks = [module for _, module in blocks_of(model)]
    _freeze(blocks, [model.get_input_embeddings()], options.frozen)
    return Sized(model, len(blocks), found.get_text_config().hidden_size)


def _whole(accumulation: str) -> int | str:
    """`accumulation` as a whole number, or "auto"."""
    if accumulation == "auto":
        return accumulation
    if not accumulation.isdecimal():
        raise ConfigError(f'--accumulation {accumulation}: give a whole number, at least 1, or "auto"')
    return int(accumulation)


def waiting_of(options: PlanOptions, model: Sized) -> Waiting | None:
    """What waits of a micro-batch for its backward, measured on the meta device; None if the forward does not run
    there."""
    import torch

    from offload import config as configuration
    from offload.planner.activations import measure

    tokens = torch.empty(options.batch, options.seq, dtype=torch.long, device="meta")
    config = configuration.check(compute_dtype=options.compute_dtype, activation_tier="cpu")
    try:
        return measure(model.module, config, lambda module: module(tokens))
    except Exception:  # whatever a model does not like: the formula is left
        return None


def planned_of(options: PlanOptions, model: Sized, waiting: Waiting | None) -> Planned:
    """The plan of the run that `offload train` would make. Raises: ConfigError.

    Args: waiting: what waits of a micro-batch; None: it follows from the formula for transformers.
    """
    from offload import Tuning
    from offload.devices.copies import accelerator
    from offload.model.partition import partition_bytes
    from offload.planner.explain import plan_of
    from offload.planner.placement import activation_memory

    a_block = options.entering_bytes(model.width)
    if waiting is not None:
        a_block = max(waiting.largest_bytes, -(-waiting.entering_bytes // max(model.blocks, 1)))
    on_disk = "nvme" in (options.tier, options.param_tier, options.activation_tier)
    if options.partition_activations:
        a_block = partition_bytes(a_block, options.tensor_parallel)
    planned = plan_of(
        model.module,
        direct=accelerator() is None and not options.gpu,
        free_cpu_bytes=options.free_cpu_bytes,
        tier=options.tier,
        path="." if on_disk else None,
        cpu_memory=options.cpu_memory,
        compute_dtype=options.compute_dtype,
        accumulation=options.accumulation,
        device_memory=options.device_memory,
        param_tier=options.given_param_tier,
        grad_tier=options.given_grad_tier,
        commit_every=options.commit_every,
        tuning=Tuning(chunk=options.chunk or Tuning().chunk, split_master=options.split_master),
        activation_tier=options.activation_tier,
        activation_memory=activation_memory(options.activation_tier, model.blocks, a_block),
        partition_activations=options.partition_activations,
        ranks=options.ranks,
        tensor_parallel=options.tensor_parallel,
        stage=options.stage,
    )
    if options.cpu_memory is None and "nvme" in (options.tier, planned.config.frozen_tier):
        return planned.with_memory(planned.least())
    return planned


def _figures(planned: Planned, options: PlanOptions, model: Sized, waiting: Waiting | None) -> dict[str, Any]:
    """All figures of the run, as --json prints them and the tables show them. Raises: BudgetError, as `offload
    train`."""
    entering = model.blocks * options.entering_bytes(model.width) if waiting is None else waiting.entering_bytes
    saved = None if waiting is None else waiting.saved_bytes
    found = {"entering_bytes": entering, "saved_bytes": saved} | summarise(planned)
    return found | _zero_r(planned, options, model) | _hiding(planned, options)


def summarise(planned: Planned) -> dict[str, Any]:
    """What lies where, and what a step moves. Raises: BudgetError."""
    from dataclasses import asdict

    from offload.devices.copies import accelerator
    from offload.planner import explain

    device = accelerator()
    placement = planned.place()
    return {
        "tier": planned.config.tier,
        "param_tier": planned.config.param_tier,
        "grad_tier": planned.config.grad_tier,
        "device": "cpu" if planned.direct else device.type if device is not None else "gpu",
        "accumulation": planned.config.declared,
        "split_master": planned.config.split_master,
        "commit_every": planned.config.commit_every,
        "activation_tier": planned.config.activation_tier,
        "parameters": planned.layout.trained.numel,
        "frozen_tier": planned.config.frozen_tier,
        "chunks": len(planned.layout.chunks),
        "kept_chunks": len(placement.states.resident),
        "kept_share": placement.states.resident_bytes / planned.needs.state_bytes,
        "buffers": placement.states.in_flight,
        "arena_utilisation": placement.states.utilisation,
        "rows": [asdict(row) for row in explain.explain(placement, planned)],
        "device_bytes": placement.device_bytes,
        "device_budget_bytes": placement.device_budget_bytes,
        "peak_cpu_bytes": placement.arena_bytes,
        "cpu_budget_bytes": placement.budget_bytes,
        "least_cpu_bytes": planned.least(),
        "build_bytes": 4 * planned.layout.numel if planned.config.param_tier == "device" else 0,
        "disk_bytes": placement.disk_bytes,
        "read_bytes": placement.read_bytes,
        "written_bytes": placement.written_bytes,
        "bytes_per_param": explain.bytes_per_param(placement, planned.layout),
        "drive_life_steps": placement.drive_life_steps,
        "ranks": planned.layout.ranks,
        "stage": planned.config.stage,
        "held_bytes": dict(placement.held_bytes),
        "sent_elements": explain.sent_numel(planned),
    }


def _zero_r(planned: Planned, options: PlanOptions, model: Sized) -> dict[str, Any]:
    """Figures of tensor parallelism; see `zero_r`. Raises: BudgetError."""
    from offload.planner.explain import zero_r

    ranks, entering_bytes = options.tensor_parallel, options.entering_bytes(model.width)
    found = {"tensor_parallel": ranks, "partition_activations": planned.config.partition_activations}
    if ranks == 1:
        return found
    return found | {"zero_r": zero_r(planned, ranks, blocks=model.blocks, entering_bytes=entering_bytes)}


def _hiding(planned: Planned, options: PlanOptions) -> dict[str, Any]:
    """How many tokens a step needs to hide the disk's time, if `flops` is given. Raises: BudgetError."""
    from offload.planner import explain

    flops, speed = options.flops, options.disk_gb_per_s
    if flops is None:
        return {}
    least, enough = explain.hiding_tokens(planned, flops, 1e9 * speed)
    return {"flops": flops, "disk_gb_per_s": speed, "least_hiding_tokens": least, "hiding_tokens": enough}


def _what_fits(planned: Planned) -> dict[str, Any]:
    """What other budgets of RAM would do on the NVMe tier, and which of them this machine has."""
    from offload.planner.machine import free_memory

    free = planned.room.free_cpu_bytes
    if free is None:
        free = free_memory()
    everything = planned.cpu_memory_for(1.0)
    budgets = []
    for share in SHARES:
        needed = planned.cpu_memory_for(share)
        # With so few chunks, buffers for the others would take as much as all.
        if needed != everything or share == 1:
            streamed = round((1 - share) * planned.needs.state_bytes)
            budgets.append({"share": share, "cpu_bytes": needed, "streamed_bytes": streamed, "fits": needed <= free})
    return {"free_cpu_bytes": free, "largest_share": planned.largest_share(free), "budgets": budgets}


def _show(console: Console, summary: dict[str, Any], options: PlanOptions, model: Sized) -> None:
    console.print(_placement_table(summary))
    if summary["ranks"] > 1:
        console.print(_rank_table(summary))
    if "zero_r" in summary:
        console.print(_zero_r_table(summary, model.blocks))
    for line in (*_lines(summary), *_activation_lines(summary, options, model)):
        console.print(line, soft_wrap=True, highlight=False)


def _show_what_fits(console: Console, summary: dict[str, Any]) -> None:
    console.print(_budget_table(summary))
    share, free = summary["largest_share"], format_bytes(summary["free_cpu_bytes"])
    fits = "not even the least fits" if share is None else f"{share:.0%} of the states fit"
    console.print(f"In {free} of free RAM, {fits}.", soft_wrap=True, highlight=False)


def _placement_table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    title = f"{summary['parameters']:,} parameters, optimizer states on {summary['tier']}"
    table = Table(title=title, title_justify="left")
    names = TIERS | ({"device": "device (the CPU)"} if summary["device"] == "cpu" else {})
    table.add_column("tier")
    table.add_column("bytes", justify="right")
    table.add_column("what")
    for tier, total in (("device", "device_bytes"), ("cpu", "peak_cpu_bytes"), ("nvme", "disk_bytes")):
        rows = [row for row in summary["rows"] if row["tier"] == tier]
        for row in rows:
            table.add_row(names[tier], format_bytes(row["nbytes"]), f"{row['kind']}: {KINDS[row['kind']]}")
        if rows:
            table.add_row(names[tier], format_bytes(summary[total]), "together", style="bold")
            table.add_section()
    return table


def _rank_table(summary: dict[str, Any]) -> Table:
    """What one of several ranks holds and sends."""
    from rich.table import Table

    sent = summary["sent_elements"]
    caption = (
        f"sent in a step: {sent['gradients']:,} elements of gradients, {sent['parameters']:,} of parameters, "
        f"{sum(sent.values()) / summary['parameters']:.2f} a parameter"
    )
    title = f"One of {summary['ranks']} ranks at stage {summary['stage']}"
    table = Table("held of", "bytes", "a parameter of the model", title=title, caption=caption)
    for kind, size in summary["held_bytes"].items():
        table.add_row(kind, format_bytes(size), f"{size / summary['parameters']:.3f}")
    return table


def _zero_r_table(summary: dict[str, Any], blocks: int) -> Table:
    """What ZeRO-R does to activations on one of several tensor-parallel ranks."""
    from rich.table import Table

    ranks, found = summary["tensor_parallel"], summary["zero_r"]
    title = f"ZeRO-R on one of {ranks} tensor-parallel ranks: the matrices of blocks are cut, all else counts as whole"
    caption = f"sent in a backward by --partition-activations: {found['gathered_elements']:,} elements of activations"
    table = Table("ZeRO-R", "bytes", "what", title=title, title_justify="left", caption=caption)
    for name, key, what in (
        ("", "checkpoint_bytes", f"what enters {blocks} blocks, all of it on each rank"),
        ("P_a", "part_bytes", f"1/{ranks} of it on each rank, with --partition-activations, in the activation tier"),
        ("P_a+cpu, P_a+nvme", "device_bytes", "on the device with the parts elsewhere: two gathered inputs"),
        ("C_B", "buffer_bytes", "buffers of gradients on their way, constant in the model's size"),
        ("M_D", "region_bytes", "reserved for activations in one piece"),
    ):
        table.add_row(name, format_bytes(found[key]), what)
    return table


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    limit, built = summary["device_budget_bytes"], summary["build_bytes"]
    building = f"The model takes {format_bytes(built)} more while it is built in fp32."
    if not built:
        building = "The model is built in parts, on the way to its tiers."
    allowed = "" if limit is None else f" of {format_bytes(limit)} allowed"
    yield (
        f"Peak on the device: {format_bytes(summary['device_bytes'])}{allowed}, with parameters "
        f"{WHERE[summary['param_tier']]} and gradients {WHERE[summary['grad_tier']]}."
    )
    yield (
        f"Peak RAM: {format_bytes(summary['peak_cpu_bytes'])} of {format_bytes(summary['cpu_budget_bytes'])} allowed; "
        f"the least that works is {format_bytes(summary['least_cpu_bytes'])}. {building}"
    )
    kept, chunks = summary["kept_chunks"], summary["chunks"]
    if not summary["written_bytes"]:
        where = "on the device" if summary["tier"] == "device" else "in RAM"
        read = summary["read_bytes"]
        what = f"{format_bytes(read)} of frozen parameters are read" if read else "nothing is read or written"
        yield f"All {chunks} chunks stay {where}: {what} in a step."
        return
    yield (
        f"{chunks - kept} of {chunks} chunks stream through {summary['buffers']} buffers. "
        f"Chunks fill {summary['arena_utilisation']:.0%} of the bytes reserved for them in RAM."
    )
    yield (
        f"A step reads {format_bytes(summary['read_bytes'])} and writes {format_bytes(summary['written_bytes'])}, "
        f"{summary['bytes_per_param']:.2f} "
        f"bytes a parameter; a drive warranted for 600 TB written lasts {summary['drive_life_steps']:,.0f} steps."
    )


def _activation_lines(summary: dict[str, Any], options: PlanOptions, model: Sized) -> Iterator[str]:
    """Lines on how many tokens hide the disk's time, and on the activations that wait for the backward."""
    if "flops" in summary:
        speeds = f"At {summary['flops']:.3g} FLOP/s and {summary['disk_gb_per_s']:g} GB/s"
        if summary["hiding_tokens"]:
            yield (
                f"{speeds}, a step of {summary['hiding_tokens']:,} tokens hides the disk; a disk that worked all the "
                f"time would need {summary['least_hiding_tokens']:,}. Computing forwards again makes both a quarter "
                "less."
            )
        else:
            yield f"{speeds}: nothing moves over the disk in a step, so any number of tokens will do."
    entering, saved = format_bytes(summary["entering_bytes"]), summary["saved_bytes"]
    known = f"; all that they save without being recomputed, {format_bytes(saved or 0)}."
    if saved is None:
        known = ", by the formula for transformers: this model's forward does not run on the meta device."
    yield (
        f"What enters {model.blocks} blocks in a micro-batch of {options.batch} x {options.seq} takes {entering}{known}"
    )


def _budget_table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="What budgets would do (--tier nvme)", title_justify="left")
    for heading in ("states in RAM", "--cpu-memory", "read, and as much written, a step", "fits"):
        table.add_column(heading, justify="right")
    for row in summary["budgets"]:
        streamed = format_bytes(row["streamed_bytes"])
        fits = "yes" if row["fits"] else "no"
        table.add_row(f"{row['share']:.0%}", format_bytes(row["cpu_bytes"]), streamed, fits)
    return table
