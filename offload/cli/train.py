"""`offload train`, the command. Knows no torch until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli.options import (
    SAMPLE,
    STREAMED_SAMPLE,
    Chunk,
    CpuMemory,
    DeviceMemory,
    GradTier,
    Json,
    ParamTier,
    States,
    Tier,
    TrainOptions,
)


def train(
    preset: Annotated[str, typer.Option(help="Size of the model: 1m, 5m, 20m, 125m, 350m, 1b or 2b.")] = "5m",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Bytes of text a sequence.")] = 256,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate at its peak: warm-up, then cosine. Default: 0.001, or that of the run resumed."
        ),
    ] = None,
    accumulation: Annotated[int, typer.Option(help="Micro-batches a step.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of parameters, activations and gradients: bf16 or fp32.",
            show_default="bf16, or fp32 on a CPU that multiplies bf16 slowly",
        ),
    ] = None,
    tier: Tier = "nvme",
    param_tier: ParamTier = "device",
    grad_tier: GradTier = "cpu",
    device_memory: DeviceMemory = None,
    checkpoint_activations: Annotated[
        bool,
        typer.Option(
            "--checkpoint-activations",
            help="Keep only what enters each block, and compute the rest again in backward: less memory, more time.",
        ),
    ] = False,
    activation_tier: Annotated[
        str | None,
        typer.Option(
            help="Where what enters a block waits for its backward: device, cpu or nvme. The rest is computed again.",
            show_default="all activations stay on the device",
        ),
    ] = None,
    path: Annotated[Path, typer.Option(help="Directory of the swap files.")] = Path("scratch"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the swap files there at the end.")] = False,
    cpu_memory: CpuMemory = None,
    chunk: Chunk = None,
    states: States = "fp32",
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
    json: Json = False,
) -> None:
    """Train a byte-level GPT with OffloadZero and show what it took.

    The last 5 % of the text are held out to validate with: before the first step and after the last, in runs of 20
    steps or more also now and then between. Ctrl-C ends the run and removes its swap files, unless it commits; SIGTERM
    then makes it commit the step it is in before it ends, with exit status 143.
    """
    from offload.cli.machine import fast_dtype

    options = TrainOptions(
        preset=preset,
        steps=steps,
        batch=batch,
        seq=seq,
        lr=lr,
        accumulation=accumulation,
        dtype=dtype or fast_dtype(),
        tier=tier,
        path=path,
        keep=keep,
        cpu_memory=cpu_memory,
        chunk=chunk,
        states=states,
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
        activation_tier=activation_tier,
    )
    from offload.cli.train_run import run

    run(options, as_json=json)
