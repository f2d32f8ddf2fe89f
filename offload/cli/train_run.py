"""What `offload train` does with its options: the sizes that follow from them, the run, and what is shown of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from offload.cli.console import plain_console, say
from offload.cli.options import TrainOptions
from offload.cli.plots import MISSING, can_draw, loss_curve
from offload.cli.progress import progress, training_status
from offload.cli.timeline_plot import timeline_picture
from offload.cli.train_tables import show, summarise, title
from offload.demo.gpt import GPT, PRESETS, GPTConfig
from offload.demo.loop import Measured, Recipe, build_adamw, opened, sample, train_loop
from offload.demo.text import load_text
from offload.devices.copies import accelerator
from offload.errors import BudgetError, ConfigError
from offload.options import Tuning, absolute
from offload.planner import least_cpu_memory
from offload.planner.machine import free_memory
from offload.planner.placement import activation_memory
from offload.sizes import format_bytes


def run(options: TrainOptions, *, as_json: bool) -> None:
    """Checks the options, builds the model, trains it and reports.

    The swap files are removed at the end, also after an error, unless they are to be kept or the run commits.
    """
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: choose one of {', '.join(PRESETS)}")
    config = PRESETS[options.preset]
    if options.seq > config.context:
        raise ConfigError(f"--seq {options.seq}: this preset's context is {config.context} bytes")
    text = load_text(options.data, options.seq)
    options.prepare_out()

    stderr = plain_console(stderr=True)
    draws = can_draw()
    if not draws:
        if options.timeline:
            raise ConfigError(f"--timeline cannot be drawn, because {MISSING}")
        say(stderr, f"The loss will not be drawn: {MISSING}")
    device = accelerator() or torch.device("cpu")
    model = _build_model(config, options, device)
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        seq=options.seq,
        lr=options.lr,
        accumulation=options.accumulation,
        seed=options.seed,
        validation=options.validation,
        commit_every=options.commit_every,
        timeline=options.timeline_file if options.timeline else None,
    )
    keep = options.keep or options.commit_every is not None
    with opened(model, recipe, keep=keep, **_optimizer_options(model, options, device)) as optimizer:
        measured = Measured(committed=None if optimizer.resumed is None else optimizer.resumed.step)
        if options.commit_every:
            promise = f"offload: {_times(options.commit_every)} and at the end the run is committed to {options.path}"
            say(stderr, promise)
        with _saying_how_to_go_on(stderr, options, measured), progress(stderr, "step", options.steps) as tell:

            def on_step(done: int) -> None:
                tell(done, training_status(measured.losses[-1], measured.tokens_per_s, optimizer.stats()))

            train_loop(model, optimizer, text, recipe, device, measured, on_step)
        stats = optimizer.stats()
        prompt, continuation = sample(model, text, options.sample_bytes, options.seed, device)
        kept = list(optimizer.files) if keep else []
    summary = summarise(measured, stats, options) | {"device": str(device), "text": text.source, "files": kept}
    summary |= {"sample": continuation, "picture": None, "timeline": []}
    if draws:
        picture = options.out / "loss.png"
        loss_curve(picture, title(summary), measured.losses, measured.validation)
        summary["picture"] = str(picture)
    if options.timeline:
        pictured = options.timeline_file.with_suffix(".png")
        timeline_picture(options.timeline_file, pictured, f"The last steps of {title(summary)}")
        summary["timeline"] = [str(options.timeline_file), str(pictured)]
    show(summary, prompt, as_json=as_json)


def _build_model(config: GPTConfig, options: TrainOptions, device: torch.device) -> GPT:
    """Makes the model in fp32 on `device`, or on the meta device where its parameters stream.

    Raises:
        BudgetError: RAM has no room to make the model in. Nothing was allocated.
    """
    shapes = GPT(config, device="meta", checkpoint_activations=options.checkpoint_activations)
    if options.param_tier != "device":
        return shapes
    needed, free = 4 * sum(parameter.numel() for parameter in shapes.parameters()), free_memory()
    if needed > free:
        raise BudgetError(
            f"--preset {options.preset} needs {format_bytes(needed)} of RAM to be made, and {format_bytes(free)} "
            f"are free: choose a smaller preset",
            needed=needed,
            available=free,
            option="--preset",
        )
    return GPT(config, options.seed, checkpoint_activations=options.checkpoint_activations).to(device)


def _optimizer_options(model: GPT, options: TrainOptions, device: torch.device) -> dict[str, Any]:
    """The options of OffloadZero.

    Without --cpu-memory the NVMe tier gets the least that works, so that every chunk goes through the disk.
    """
    entering = options.entering_bytes(model.config.width)
    sized: dict[str, Any] = {
        "compute_dtype": options.compute_dtype,
        "accumulation": options.accumulation,
        "param_tier": options.given_param_tier,
        "grad_tier": options.given_grad_tier,
        # The loop commits itself, with what it needs to go on.
        "commit_every": None if options.commit_every is None else 0,
        "states": options.states,
        "tuning": Tuning(chunk=options.chunk or Tuning().chunk, threads=options.threads),
        "activation_tier": options.activation_tier,
        "activation_memory": activation_memory(options.activation_tier, model.config.layers, entering),
        "device": device,
    }
    on_disk = options.tier == "nvme"
    cpu_memory: int | str | None = options.cpu_memory
    if cpu_memory is None and on_disk:
        cpu_memory = least_cpu_memory(model, build_adamw(model, options.lr), **sized)
    return {
        **sized,
        "tier": options.tier,
        "path": absolute(options.path) if on_disk else None,
        "cpu_memory": cpu_memory,
        "device_memory": options.device_memory,
        "resume": "auto" if options.resume else False,
    }


def _times(every: int) -> str:
    return "after each step" if every == 1 else f"every {every} steps"


@contextlib.contextmanager
def _saying_how_to_go_on(stderr: Console, options: TrainOptions, measured: Measured) -> Iterator[None]:
    """A context that says how to continue the run, if it ends before its last step."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if options.commit_every:
            at = f"go on with --resume, from step {measured.committed}"
            if measured.committed is None:
                at = f"nothing was committed yet: that comes {_times(options.commit_every)}"
            say(stderr, at)
        raise
