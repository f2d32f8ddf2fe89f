"""`offload plan`: what `offload train` would need with these options. Nothing is allocated, read or written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json
from offload.cli.train import TrainOptions
from offload.errors import ConfigError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from offload.models import GPTConfig
    from offload.planner.explain import Planned

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

KINDS = {
    "param": "what the model computes with",
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


def plan(
    preset: Annotated[str, typer.Option(help="Size of the model, as `offload train` has them.")] = "5m",
    layers: Annotated[int | None, typer.Option(help="Blocks.", show_default="the preset's")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.", show_default="the preset's")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch; only activations depend on it.")] = 4,
    seq: Annotated[int, typer.Option(help="Bytes of text a sequence, likewise.")] = 256,
    accumulation: Annotated[int, typer.Option(help="Micro-batches a step.")] = 1,
    tier: Annotated[str, typer.Option(help="Where the optimizer states live: nvme, cpu or device.")] = "nvme",
    param_tier: Annotated[
        str,
        typer.Option(help="Where the parameters live outside their use: device, cpu, nvme, or auto: what fits."),
    ] = "device",
    grad_tier: Annotated[str, typer.Option(help="Where gradients wait for the step: cpu, nvme or auto.")] = "cpu",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory on the device for parameters, such as 2GiB.", show_default="half of what is free"),
    ] = None,
    activation_tier: Annotated[
        str | None,
        typer.Option(
            help="Where what enters each block waits for its backward: device, cpu or nvme.",
            show_default="activations are not counted",
        ),
    ] = None,
    cpu_memory: Annotated[
        str | None,
        typer.Option(
            help="RAM for the states and gradients, such as 2GiB.",
            show_default="with nvme the least that works, so that all goes through the disk",
        ),
    ] = None,
    chunk: Annotated[str | None, typer.Option(help="Bytes of fp32 master a chunk.", show_default="64MiB")] = None,
    split_master: Annotated[
        bool, typer.Option("--split-master", help="Only the low halves of the masters leave RAM.")
    ] = False,
    commit_every: Annotated[
        int | None, typer.Option(help="Steps between commits: two slots a chunk.", show_default="none")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Over how many ranks; what is shown is one rank's.")] = 1,
    stage: Annotated[
        int | None,
        typer.Option(help="ZeRO's, with several ranks: 1, 2 or 3.", show_default="3 if parameters stream, else 2"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a run needs on every tier, and what more or less RAM would do, before anything is allocated."""
    from rich.console import Console

    # What only a run needs is given as is, so that what both take is checked in one place.
    options = TrainOptions(
        preset=preset, steps=1, batch=batch, seq=seq, lr=1.0, accumulation=accumulation, tier=tier, path=Path(),
        keep=False, cpu_memory=cpu_memory, chunk=chunk, threads=None, seed=0, data=None, out=Path(), timeline=False,
        param_tier=param_tier, grad_tier=grad_tier, device_memory=device_memory, commit_every=commit_every,
        activation_tier=activation_tier,
    )  # fmt: skip
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: give a whole number, at least 1")
    config = model_config(preset, layers, width)
    planned = planned_of(options, config, split_master=split_master, ranks=ranks, stage=stage)
    fits = _what_fits(planned)
    entering = config.layers * options.entering_bytes(config.width)
    if json:
        sizes = {"preset": preset, "layers": layers, "width": width, "entering_bytes": entering}
        print_json(sizes | summarise(planned) | fits)
        return
    console = Console()
    try:
        _show(console, summarise(planned))
        console.print(
            f"What enters {config.layers} blocks in a micro-batch of {batch} x {seq} takes {format_bytes(entering)}.",
            soft_wrap=True,
            highlight=False,
        )
    finally:
        # Also where it does not fit: this says what would.
        _show_what_fits(console, fits)


def model_config(preset: str, layers: int | None, width: int | None) -> GPTConfig:
    """The preset with other sizes. Raises: ConfigError."""
    from offload.models import PRESETS

    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    for option, value in (("layers", layers), ("width", width)):
        if value is not None and value < 1:
            raise ConfigError(f"--{option} {value}: give a whole number, at least 1")
    config = PRESETS[preset]
    chosen = config.width if width is None else width
    # How many heads share the width changes no size.
    heads = math.gcd(chosen, config.heads)
    return replace(config, layers=config.layers if layers is None else layers, width=chosen, heads=heads)


def planned_of(
    options: TrainOptions, config: GPTConfig, *, split_master: bool, ranks: int = 1, stage: int | None = None
) -> Planned:
    """The model on the meta device, laid out as `offload train` would have it. Raises: ConfigError."""
    from offload import Tuning
    from offload.devices.copies import accelerator
    from offload.models import GPT
    from offload.planner.explain import plan_of
    from offload.planner.placement import activation_memory

    planned = plan_of(
        GPT(config, device="meta"),
        direct=accelerator() is None,
        tier=options.tier,
        path=options.path if options.tier == "nvme" else None,
        cpu_memory=options.cpu_memory,
        accumulation=options.accumulation,
        device_memory=options.device_memory,
        param_tier=options.given_param_tier,
        grad_tier=options.given_grad_tier,
        commit_every=options.commit_every,
        tuning=Tuning(chunk=options.chunk or Tuning().chunk, split_master=split_master),
        activation_tier=options.activation_tier,
        activation_memory=activation_memory(
            options.activation_tier, config.layers, options.entering_bytes(config.width)
        ),
        ranks=ranks,
        stage=stage,
    )
    if options.cpu_memory is None and options.tier == "nvme":
        return planned.with_memory(planned.least())
    return planned


def summarise(planned: Planned) -> dict[str, Any]:
    """The object that --json prints. Raises: BudgetError, as `offload train` would."""
    from dataclasses import asdict

    from offload.devices.copies import accelerator
    from offload.planner import explain

    device = accelerator()
    placement = planned.place()
    kept = sum(planned.needs.states[chunk].nbytes for chunk in placement.kept)
    return {
        "tier": planned.config.tier,
        "param_tier": planned.config.param_tier,
        "grad_tier": planned.config.grad_tier,
        "device": "cpu" if device is None else device.type,
        "accumulation": planned.config.accumulation,
        "split_master": planned.config.split_master,
        "commit_every": planned.config.commit_every,
        "activation_tier": planned.config.activation_tier,
        "parameters": planned.layout.numel,
        "chunks": len(planned.layout.chunks),
        "kept_chunks": len(placement.kept),
        "kept_share": kept / planned.needs.state_bytes,
        "buffers": placement.in_flight,
        "arena_utilisation": placement.utilisation,
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
        "drive_life_steps": explain.drive_life_steps(placement),
        "ranks": planned.layout.ranks,
        "stage": planned.config.stage,
        "held_bytes": dict(placement.held_bytes),
        "sent_elements": explain.sent_numel(planned),
    }


def _what_fits(planned: Planned) -> dict[str, Any]:
    """What other budgets would do on the NVMe tier, and what of them is possible here."""
    from offload.planner.machine import free_memory

    free, everything = free_memory(), planned.cpu_memory_for(1.0)
    budgets = []
    for share in SHARES:
        needed = planned.cpu_memory_for(share)
        # With so few chunks, buffers for the others would take as much as all.
        if needed != everything or share == 1:
            streamed = round((1 - share) * planned.needs.state_bytes)
            budgets.append({"share": share, "cpu_bytes": needed, "streamed_bytes": streamed, "fits": needed <= free})
    return {"free_cpu_bytes": free, "largest_share": planned.largest_share(free), "budgets": budgets}


def _show(console: Console, summary: dict[str, Any]) -> None:
    console.print(_placement_table(summary))
    if summary["ranks"] > 1:
        console.print(_rank_table(summary))
    for line in _lines(summary):
        console.print(line, soft_wrap=True, highlight=False)


def _show_what_fits(console: Console, summary: dict[str, Any]) -> None:
    console.print(_budget_table(summary))
    share, free = summary["largest_share"], format_bytes(summary["free_cpu_bytes"])
    fits = "not even the least fits" if share is None else f"{share:.0%} of the states fit"
    console.print(f"In the {free} of RAM that are free here, {fits}.", soft_wrap=True, highlight=False)


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


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    limit, built = summary["device_budget_bytes"], summary["build_bytes"]
    building = f"The model takes {format_bytes(built)} more while it is built in fp32."
    if not built:
        building = "The model is built in parts, on the way to its tiers."
    allowed = "" if limit is None else f" of {format_bytes(limit)} allowed"
    yield (
        f"Peak on the device: {format_bytes(summary['device_bytes'])}{allowed}, with parameters on "
        f"{TIERS[summary['param_tier']]} and gradients on {TIERS[summary['grad_tier']]}."
    )
    yield (
        f"Peak RAM: {format_bytes(summary['peak_cpu_bytes'])} of {format_bytes(summary['cpu_budget_bytes'])} allowed; "
        f"the least that works is {format_bytes(summary['least_cpu_bytes'])}. {building}"
    )
    kept, chunks = summary["kept_chunks"], summary["chunks"]
    if not summary["written_bytes"]:
        where = "on the device" if summary["tier"] == "device" else "in RAM"
        yield f"All {chunks} chunks stay {where}: nothing is read or written in a step."
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


def _budget_table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="What budgets would do (--tier nvme)", title_justify="left")
    for heading in ("states in RAM", "--cpu-memory", "read, and as much written, a step", "fits here"):
        table.add_column(heading, justify="right")
    for row in summary["budgets"]:
        streamed = format_bytes(row["streamed_bytes"])
        fits = "yes" if row["fits"] else "no"
        table.add_row(f"{row['share']:.0%}", format_bytes(row["cpu_bytes"]), streamed, fits)
    return table
