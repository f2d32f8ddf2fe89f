"""`offload train`: a GPT on real text, with its optimizer states on the chosen tier."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json
from offload.cli.options import SAMPLE, STREAMED_SAMPLE, TrainOptions
from offload.errors import ConfigError
from offload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from offload import OffloadZero
    from offload.cli.loop import Record
    from offload.models import GPT


def train(
    preset: Annotated[str, typer.Option(help="Size of the model: 1m, 5m, 20m, 125m, 350m, 1b or 2b.")] = "5m",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Bytes of text a sequence.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate at its peak: warm-up, then cosine.")] = 1e-3,
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
    checkpoint_activations: Annotated[
        bool,
        typer.Option(
            "--checkpoint-activations",
            help="Keep only what enters each block, and compute the rest again in backward: less memory, more time.",
        ),
    ] = False,
    path: Annotated[Path, typer.Option(help="Directory of the swap files.")] = Path("scratch"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the swap files there at the end.")] = False,
    cpu_memory: Annotated[
        str | None,
        typer.Option(
            help="RAM for the states and gradients, such as 2GiB.",
            show_default="with nvme the least that works, so that all goes through the disk",
        ),
    ] = None,
    chunk: Annotated[str | None, typer.Option(help="Bytes of fp32 master a chunk.", show_default="64MiB")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU kernels.", show_default="all usable CPUs")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial values, the batches and the sample.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="File of text, or folder of them (hidden and binary ones are left out).",
            show_default="the sources of Python's standard library",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the timeline.")] = Path("out"),
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Record the last 3 steps, for ui.perfetto.dev and as a picture.")
    ] = False,
    validation: Annotated[int, typer.Option(help="Sequences to validate with.")] = 32,
    sample: Annotated[
        int | None,
        typer.Option(
            help="Bytes that the model writes at the end.",
            show_default=f"{SAMPLE}, or {STREAMED_SAMPLE} where parameters stream: each takes all of them once",
        ),
    ] = None,
    commit_every: Annotated[
        int | None,
        typer.Option(help="Steps between commits; the files stay, and --resume goes on.", show_default="none"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run committed in --path, if there is one.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Train a byte-level GPT with OffloadZero and show what it took.

    The last 5 % of the text are held out to validate with: before the first step and after the last, in runs of 20
    steps or more also now and then between. Ctrl-C ends the run and removes its swap files, unless it commits; SIGTERM
    then makes it commit the step it is in before it ends, with exit status 143.
    """
    options = TrainOptions(
        preset=preset,
        steps=steps,
        batch=batch,
        seq=seq,
        lr=lr,
        accumulation=accumulation,
        tier=tier,
        path=path,
        keep=keep,
        cpu_memory=cpu_memory,
        chunk=chunk,
        threads=threads,
        seed=seed,
        data=data,
        out=out,
        timeline=timeline,
        param_tier=param_tier,
        grad_tier=grad_tier,
        validation=validation,
        sample=sample,
        commit_every=commit_every,
        resume=resume,
        device_memory=device_memory,
        checkpoint_activations=checkpoint_activations,
    )
    _run(options, as_json=json)


def _run(options: TrainOptions, *, as_json: bool) -> None:
    """Check, build, train, report; the swap files go whatever happens."""
    import torch
    from rich.console import Console

    from offload.cli.loop import build_model, train_loop
    from offload.cli.loop import sample as write
    from offload.cli.plots import loss_curve
    from offload.cli.progress import progress
    from offload.cli.text import load_text
    from offload.models import PRESETS

    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: choose one of {', '.join(PRESETS)}")
    config = PRESETS[options.preset]
    if options.seq > config.context:
        raise ConfigError(f"--seq {options.seq}: this preset's context is {config.context} bytes")
    text = load_text(options.data, options.seq)
    options.prepare_out()

    stderr = Console(stderr=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, options)
    if options.param_tier == "device":
        model = model.to(device)
    with contextlib.ExitStack() as stack:
        optimizer = _take(stack, model, options)
        with progress(stderr, options.steps) as bar:
            record = train_loop(model, optimizer, text, options, device, bar)
        stats = optimizer.stats()
        prompt, continuation = write(model, text, options.sample_bytes, options.seed, device)
        kept = list(optimizer.files) if options.keep or options.commit_every else []
    picture = options.out / "loss.png"
    summary = summarise(record, stats, options) | {"device": str(device), "text": text.source, "files": kept}
    loss_curve(picture, _title(summary), record.losses, record.validation)
    summary |= {
        "picture": str(picture),
        "sample": continuation,
        "timeline": _drawn(options, _title(summary)) if options.timeline else [],
    }
    if as_json:
        print_json(summary)
    else:
        _show(Console(), summary, prompt)


def _drawn(options: TrainOptions, title: str) -> list[str]:
    """Draws the timeline; returns its files."""
    from offload.cli.timeline_plot import timeline_picture

    picture = options.timeline_file.with_suffix(".png")
    timeline_picture(options.timeline_file, picture, f"The last steps of {title}")
    return [str(options.timeline_file), str(picture)]


def _take(stack: contextlib.ExitStack, model: GPT, options: TrainOptions) -> OffloadZero:
    """The optimizer, whose files go with `stack` unless they are to be kept."""
    from offload.cli.loop import build_optimizer
    from offload.cli.workspace import Workspace, removed_at_end
    from offload.storage.files import SWAP_NAME

    if options.tier != "nvme" or options.keep or options.commit_every:
        return stack.enter_context(build_optimizer(model, options))
    space = Workspace(options.path)
    try:
        optimizer = stack.enter_context(build_optimizer(model, options))
    except BaseException:
        space.remove_abandoned(SWAP_NAME)
        raise
    stack.enter_context(removed_at_end(space, optimizer.files))
    return optimizer


def summarise(record: Record, stats: dict[str, Any], options: TrainOptions) -> dict[str, Any]:
    """The object that --json prints: `_s` seconds, `_bytes` bytes, losses in nats a byte."""
    from offload.cli.loop import peak_rss_bytes

    taken = (
        "parameters chunks kernel threads wait_nvme_s adam_s nvme_read_bytes nvme_written_bytes nvme_init_bytes "
        "host_to_device_bytes device_to_host_bytes peak_cpu_bytes cpu_budget_bytes peak_device_bytes"
    )
    seconds = {f"{phase}_s": spent for phase, spent in record.seconds.items()}
    return {
        "preset": options.preset,
        "tier": options.tier,
        "param_tier": stats["param_tier"],
        "grad_tier": stats["grad_tier"],
        "steps": options.steps,
        "steps_before": record.begun,
        "committed": options.commit_every is not None,
        "tokens": record.tokens,
        "loss_first": record.losses[0],
        "loss_last": record.losses[-1],
        "val_loss_first": record.validation[0][1],
        "val_loss_last": record.validation[-1][1],
        "tokens_per_s": record.tokens_per_s,
        **seconds,
        **{name: stats[name] for name in taken.split()},
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": record.losses,
        "validation": record.validation,
    }


def _title(summary: dict[str, Any]) -> str:
    size = f"{summary['parameters']:,} parameters"
    return f"GPT {summary['preset']}, {size}, optimizer states on {summary['tier']}"


def _show(console: Console, summary: dict[str, Any], prompt: str) -> None:
    """Tables, sample and picture, for people."""
    from rich.markup import escape

    console.print(_table(summary))
    console.print("\n[bold]After[/bold] (from the held-out text)")
    console.print(escape(_printable(prompt)), highlight=False)
    console.print("[bold]the model writes[/bold]")
    console.print(escape(_printable(summary["sample"])), highlight=False)
    console.print(f"\nLoss curve: {summary['picture']}", highlight=False, soft_wrap=True)
    if summary["timeline"]:
        console.print("Timeline: {} (open it in ui.perfetto.dev), {}".format(*summary["timeline"]), soft_wrap=True)
    for file in summary["files"]:
        fate = "committed: see offload inspect" if summary["committed"] else "not committed: it cannot be resumed from"
        console.print(f"Kept: {file} ({fate})", soft_wrap=True)


def _table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    def size(key: str) -> str:
        return format_bytes(summary[key])

    table = Table(title=_title(summary), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    steps = summary["steps"]
    rows = {
        "training loss": f"{summary['loss_first']:.3f} → {summary['loss_last']:.3f} nats a byte",
        "validation loss": f"{summary['val_loss_first']:.3f} → {summary['val_loss_last']:.3f} nats a byte",
        "speed": f"{summary['tokens_per_s']:,.0f} tokens/s",
        "forward": f"{summary['forward_s']:.2f} s",
        "backward": f"{summary['backward_s']:.2f} s",
        "step": f"{summary['step_s']:.2f} s",
        "waiting": f"{summary['wait_nvme_s']:.2f} s",
        "NVMe": f"{size('nvme_read_bytes')} read, {size('nvme_written_bytes')} written",
    }
    each = summary["parameters"] * max(steps - summary["steps_before"], 1)
    moved = summary["nvme_read_bytes"] + summary["nvme_written_bytes"]
    rows["a parameter and step"] = f"{moved / each:.2f} bytes, in {summary['chunks']} chunks"
    rows["peak CPU memory"] = f"{size('peak_cpu_bytes')} of a budget of {size('cpu_budget_bytes')}"
    rows["peak of the process"] = size("peak_rss_bytes")
    rows["Adam kernel"] = f"{summary['kernel']}, {summary['threads']} threads"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "·" for char in text)
