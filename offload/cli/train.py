"""`offload train`: its options, checked before anything is read or allocated. Knows no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import ConfigError
from offload.sizes import parse_bytes

TIERS = ("nvme", "cpu", "device")
PARAM_TIERS = ("device", "cpu", "nvme", "auto")
GRAD_TIERS = ("cpu", "nvme", "auto")
SAMPLE, STREAMED_SAMPLE = 200, 20
"""Bytes that the model writes at the end: each is a pass through all parameters."""


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
    activation_tier: Annotated[
        str | None,
        typer.Option(
            help="Where what enters a block waits for its backward: device, cpu or nvme. The rest is computed again.",
            show_default="all activations stay on the device",
        ),
    ] = None,
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
        activation_tier=activation_tier,
    )
    from offload.cli.loop import run

    run(options, as_json=json)


@dataclass(frozen=True)
class TrainOptions:
    """What `offload train --help` says; sizes as given ("64MiB"), None where the library chooses.

    Raises: ConfigError naming the option, its value and what is allowed.
    """

    preset: str
    steps: int
    batch: int
    seq: int
    lr: float
    accumulation: int
    tier: str
    path: Path
    keep: bool
    cpu_memory: str | None
    chunk: str | None
    threads: int | None
    seed: int
    data: Path | None
    out: Path
    timeline: bool
    param_tier: str = "device"
    grad_tier: str = "cpu"
    validation: int = 32
    sample: int | None = None
    commit_every: int | None = None
    resume: bool = False
    device_memory: str | None = None
    checkpoint_activations: bool = False
    activation_tier: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "batch", "seq", "accumulation", "validation", "threads", "commit_every", "sample"):
            value, least = getattr(self, option), 0 if option == "sample" else 1
            if value is not None and value < least:
                raise ConfigError(f"--{_name(option)} {value}: give a whole number, at least {least}")
        if self.commit_every is not None and self.tier != "nvme":
            raise ConfigError("--commit-every needs --tier nvme: what is committed lies there")
        if self.resume and self.commit_every is None:
            raise ConfigError("--resume needs --commit-every: give the steps between commits")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr {self.lr}: give a learning rate above 0, such as 1e-3")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to 2**63 - 1")
        for option, tiers in (("tier", TIERS), ("param_tier", PARAM_TIERS), ("grad_tier", GRAD_TIERS)):
            if getattr(self, option) not in tiers:
                raise ConfigError(f"--{_name(option)} {getattr(self, option)}: choose one of {', '.join(tiers)}")
        if self.activation_tier not in (None, *TIERS):
            raise ConfigError(f"--activation-tier {self.activation_tier}: choose one of {', '.join(TIERS)}")
        if self.activation_tier == "nvme" and self.tier != "nvme":
            raise ConfigError("--activation-tier nvme needs --tier nvme: activations wait in the same directory")
        for option in ("cpu_memory", "device_memory", "chunk"):
            value = getattr(self, option)
            if value is not None:
                parse_bytes(_number(value), f"--{_name(option)}")

    @property
    def sample_bytes(self) -> int:
        if self.sample is not None:
            return self.sample
        return SAMPLE if self.param_tier == "device" else STREAMED_SAMPLE

    @property
    def given_param_tier(self) -> str | None:
        """As OffloadZero takes it, None where it chooses."""
        return None if self.param_tier == "auto" else self.param_tier

    @property
    def given_grad_tier(self) -> str | None:
        """As OffloadZero takes it: None where it chooses, and beside states on the device, where there is one place."""
        is_default = self.tier == "device" and self.grad_tier == "cpu"
        return None if is_default or self.grad_tier == "auto" else self.grad_tier

    def entering_bytes(self, width: int) -> int:
        """Of what enters a block of the model, (batch, seq, width), in 16 bits."""
        return 2 * self.batch * self.seq * width

    @property
    def timeline_file(self) -> Path:
        """Where --timeline writes; its picture lies beside it."""
        return self.out / "timeline.json"

    def prepare_out(self) -> None:
        """Make --out, where the pictures go. Raises: ConfigError where it cannot be made or written to."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be made: {error.strerror}") from error
        if not os.access(self.out, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.out} is not writable: choose another folder for the picture")


def _name(option: str) -> str:
    """As the command line has it."""
    return option.replace("_", "-")


def _number(value: str) -> int | str:
    """A bare number is bytes, also a negative one, so that the error names what is wrong with it."""
    return int(value) if value.lstrip("-").isdecimal() else value
