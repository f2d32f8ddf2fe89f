"""What `offload train` does: a plain PyTorch loop with a clock around each phase, and what it shows at the end."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from offload.cli.console import print_json, say, show_table
from offload.cli.options import TrainOptions
from offload.cli.plots import MISSING, can_draw, loss_curve
from offload.cli.progress import Tell, progress, training_status
from offload.cli.text import Batches, Text, cut_windows, even_starts, load_text
from offload.cli.timeline_plot import timeline_picture
from offload.cli.workspace import Workspace, removed_at_end
from offload.devices.copies import accelerator
from offload.models import GPT, PRESETS, GPTConfig
from offload.models.gpt import initial_values
from offload.planner import least_cpu_memory
from offload.planner.machine import free_memory
from offload.planner.placement import activation_memory
from offload.sizes import format_bytes
from offload.storage.directories import SWAP_NAME

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP = 0.05
"""Part of the steps in which the learning rate rises; then a cosine takes it down to LAST_LR of the peak."""
LAST_LR = 0.1
PLAIN_BYTES = 16
"""Bytes of a parameter with its gradient and states, in mixed precision as in fp32 (Rajbhandari et al., "ZeRO: memory
optimizations toward training trillion parameter models", 2020, section 3.1)."""
PROMPT_BYTES = 64
PROMPT_SEARCH = 1024
EXIT_TERMINATED = 143  # 128 + SIGTERM
TIMELINE_STEPS = 3
"""How many of the last steps --timeline records. There is no validation between them."""
VALIDATION_POINTS = 10
"""Validations beside the one before the first step, in a run of at least twice as many steps; else one, at the end."""


@dataclass
class Measured:
    """What was measured in a run. Losses are in nats a byte, times in seconds.

    losses: of each step's batches, before its update; validation: (steps done, loss).
    seconds: by phase: forward, backward, step, evaluate; begun: steps that an earlier process had done; committed: the
    step of the last commit, None: there is none.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    begun: int = 0
    committed: int | None = None

    @property
    def tokens_per_s(self) -> float:
        training_s = sum(spent for phase, spent in self.seconds.items() if phase != "evaluate")
        return self.tokens / training_s if training_s else 0.0


class Clock:
    """Adds up the wall-clock seconds of each phase."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self._seconds = seconds
        self._device = device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type != "cpu":
            # Otherwise work queued in one phase would be timed in the next. An empty queue between forward and
            # backward costs little beside either.
            torch.accelerator.synchronize(self._device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start


def build_model(config: GPTConfig, options: TrainOptions) -> GPT:
    """The model in fp32, or, where its parameters stream, on the meta device. Raises: BudgetError, before anything is
    allocated, if RAM has no room for that."""
    if options.param_tier != "device":
        return GPT(config, device="meta", checkpoint_activations=options.checkpoint_activations)
    parameters = sum(parameter.numel() for parameter in GPT(config, device="meta").parameters())
    needed, free = 4 * parameters, free_memory()
    if needed > free:
        raise BudgetError(
            f"--preset {options.preset} needs {format_bytes(needed)} of RAM to be made, and {format_bytes(free)} "
            f"are free: choose a smaller preset",
            needed=needed,
            available=free,
            option="--preset",
        )
    return GPT(config, options.seed, checkpoint_activations=options.checkpoint_activations)


def build_optimizer(model: GPT, options: TrainOptions) -> OffloadZero:
    """AdamW with decay on matrices only, taken over by OffloadZero.

    Without --cpu-memory the NVMe tier gets the least that works, so that every chunk goes through the disk.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=options.lr, betas=BETAS)
    entering = options.entering_bytes(model.config.width)
    given: dict[str, Any] = {
        "compute_dtype": options.compute_dtype,
        "accumulation": options.accumulation,
        "param_tier": options.given_param_tier,
        "grad_tier": options.given_grad_tier,
        # The loop commits itself, with what it needs to go on.
        "commit_every": None if options.commit_every is None else 0,
        "tuning": Tuning(chunk=options.chunk or Tuning().chunk, threads=options.threads),
        "activation_tier": options.activation_tier,
        "activation_memory": activation_memory(options.activation_tier, model.config.layers, entering),
    }
    cpu_memory: int | str | None = options.cpu_memory
    if cpu_memory is None and options.tier == "nvme":
        cpu_memory = least_cpu_memory(model, adamw, **given)
    is_streamed = options.param_tier != "device"
    return OffloadZero(
        model,
        adamw,
        tier=options.tier,
        path=options.path if options.tier == "nvme" else None,
        cpu_memory=cpu_memory,
        device_memory=options.device_memory,
        resume="auto" if options.resume else False,
        device=accelerator() if is_streamed else None,
        init=initial_values(model.config, options.seed) if is_streamed else None,
        **given,
    )


def lr_factor(step: int, steps: int) -> float:
    """Warm-up, then half a cosine from 1 down to LAST_LR. Steps count from 0."""
    warm_up = max(1, round(steps * WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def evaluate(model: GPT, windows: tuple[Tensor, Tensor], batch: int) -> float:
    """Mean loss over (tokens, targets), `batch` windows at a time."""
    tokens, targets = windows
    total = 0.0
    for part, aims in zip(torch.split(tokens, batch), torch.split(targets, batch), strict=True):
        _, loss = model(part, aims)
        total += loss.item() * len(part)
    return total / len(tokens)


def train_loop(
    model: GPT,
    optimizer: OffloadZero,
    text: Text,
    options: TrainOptions,
    device: torch.device,
    tell: Tell,
    measured: Measured,
) -> None:
    """Train for `options.steps`, validating before, after and now and then between. Fills in `measured`.

    Raises: SystemExit(143) on SIGTERM, where it commits: after the step it is in, and its commit.
    """
    clock = Clock(measured.seconds, device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    batches = Batches(text.train, options.batch, options.seq, options.seed, device)
    starts = even_starts(text.validation, options.validation, options.seq)
    # A pass fetches all parameters that stream, so it takes several micro-batches, but no more memory than training: at
    # its peak it holds 10 widths a token, where training holds one of every block and 16 of one block even with
    # checkpoints, without which validation has the same bits.
    at_once = options.batch * (1 + model.config.layers // 10)
    held_out = cut_windows(text.validation, starts, options.seq, device)
    # A short run would validate as long as it trains, above all where parameters stream.
    between = options.steps // VALIDATION_POINTS if options.steps >= 2 * VALIDATION_POINTS else options.steps

    def validate(done: int) -> None:
        with clock("step"):
            optimizer.synchronize()  # otherwise validation would wait for the step under way
        with clock("evaluate"):
            measured.validation.append((done, evaluate(model, held_out, at_once)))

    measured.begun = _continue(optimizer, scheduler, batches, options.steps)
    recorded_from = max(1, options.steps - TIMELINE_STEPS + 1) if options.timeline else math.inf
    validate(measured.begun)
    with contextlib.ExitStack() as recording:
        terminated = recording.enter_context(_noted_sigterm()) if options.commit_every else []
        for done in range(measured.begun + 1, options.steps + 1):
            if done == recorded_from:
                optimizer.synchronize()  # what is drawn is all of these steps, and nothing else
                recording.enter_context(optimizer.timeline(options.timeline_file))
            measured.losses.append(_accumulate(model, batches, options.accumulation, clock))
            with clock("step"):
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            measured.tokens += options.batch * options.seq * options.accumulation
            if done == options.steps:
                with clock("step"):
                    optimizer.synchronize()
                recording.close()
            if done == options.steps or (done % between == 0 and done < recorded_from):
                validate(done)
            tell(done, training_status(measured.losses[-1], measured.tokens_per_s, optimizer.stats()))
            if options.commit_every and (terminated or done == options.steps or done % options.commit_every == 0):
                with clock("step"):
                    optimizer.commit({"scheduler": scheduler.state_dict(), "batches": batches.state()})
                measured.committed = done
            if terminated:
                sys.exit(EXIT_TERMINATED)


def _continue(
    optimizer: OffloadZero, scheduler: torch.optim.lr_scheduler.LambdaLR, batches: Batches, steps: int
) -> int:
    """Continues the schedule and the batches of the run that this one resumes. Returns: the steps that it did, 0 if
    none is resumed."""
    if optimizer.resumed is None:
        return 0
    step, extra = optimizer.resumed
    if step >= steps:
        raise ConfigError(f"the run is at step {step} already: give --steps above that, or leave --resume out")
    if not isinstance(extra, dict) or extra.keys() != {"scheduler", "batches"}:
        raise ConfigError("what is committed here was not trained by `offload train`: choose another --path")
    scheduler.load_state_dict(extra["scheduler"])
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    batches.restore(extra["batches"])
    return step


@contextlib.contextmanager
def _noted_sigterm() -> Iterator[list[int]]:
    """Gives a list that gets the signal's number when SIGTERM comes."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _accumulate(model: GPT, batches: Batches, accumulation: int, clock: Clock) -> float:
    """Forward and backward over the micro-batches of one step; gives their mean loss."""
    total = 0.0
    for _ in range(accumulation):
        tokens, targets = batches()
        with clock("forward"):
            _, loss = model(tokens, targets)
        with clock("backward"):
            (loss / accumulation).backward()
        total += loss.item()
    return total / accumulation


def sample(model: GPT, text: Text, count: int, seed: int, device: torch.device) -> tuple[str, str]:
    """A prompt from the held-out text, and what the model writes after it."""
    opening = text.validation[:PROMPT_SEARCH].tobytes()
    start = opening.find(b"\n") + 1  # of a line, or of the text where there is none
    prompt = torch.tensor(list(opening[start : start + PROMPT_BYTES] or opening), device=device)
    generator = torch.Generator().manual_seed(seed)
    tokens = model.generate(prompt, count, temperature=0.7, generator=generator)
    written = bytes(tokens.tolist())
    return written[: len(prompt)].decode(errors="replace"), written[len(prompt) :].decode(errors="replace")


def peak_rss_bytes() -> int:
    """The most RAM this process held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(options: TrainOptions, *, as_json: bool) -> None:
    """Checks, builds, trains and reports. The swap files are removed at the end, also after an error."""
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: choose one of {', '.join(PRESETS)}")
    config = PRESETS[options.preset]
    if options.seq > config.context:
        raise ConfigError(f"--seq {options.seq}: this preset's context is {config.context} bytes")
    text = load_text(options.data, options.seq)
    options.prepare_out()

    stderr = Console(stderr=True)
    draws = can_draw()
    if not draws:
        if options.timeline:
            raise ConfigError(f"--timeline cannot be drawn, because {MISSING}")
        say(stderr, f"The loss will not be drawn: {MISSING}", markup=False)
    device = accelerator() or torch.device("cpu")
    model = build_model(config, options)
    if options.param_tier == "device":
        model = model.to(device)
    with contextlib.ExitStack() as stack:
        optimizer = _take(stack, model, options)
        measured = Measured(committed=None if optimizer.resumed is None else optimizer.resumed.step)
        if options.commit_every:
            promise = f"offload: {_times(options.commit_every)} and at the end the run is committed to {options.path}"
            say(stderr, promise, markup=False)
        with _saying_how_to_go_on(stderr, options, measured), progress(stderr, "step", options.steps) as tell:
            train_loop(model, optimizer, text, options, device, tell, measured)
        stats = optimizer.stats()
        prompt, continuation = sample(model, text, options.sample_bytes, options.seed, device)
        kept = list(optimizer.files) if options.keep or options.commit_every else []
    summary = summarise(measured, stats, options) | {"device": str(device), "text": text.source, "files": kept}
    summary |= {"sample": continuation, "picture": None, "timeline": []}
    if draws:
        picture = options.out / "loss.png"
        loss_curve(picture, _title(summary), measured.losses, measured.validation)
        summary["picture"] = str(picture)
    if options.timeline:
        pictured = options.timeline_file.with_suffix(".png")
        timeline_picture(options.timeline_file, pictured, f"The last steps of {_title(summary)}")
        summary["timeline"] = [str(options.timeline_file), str(pictured)]
    if as_json:
        print_json(summary)
    else:
        _show(Console(), summary, prompt)


def _times(every: int) -> str:
    return "after each step" if every == 1 else f"every {every} steps"


@contextlib.contextmanager
def _saying_how_to_go_on(stderr: Console, options: TrainOptions, measured: Measured) -> Iterator[None]:
    """Says so where the run ends before its last step."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if options.commit_every:
            at = f"go on with --resume, from step {measured.committed}"
            if measured.committed is None:
                at = f"nothing was committed yet: that comes {_times(options.commit_every)}"
            say(stderr, at, markup=False)
        raise


def _take(stack: contextlib.ExitStack, model: GPT, options: TrainOptions) -> OffloadZero:
    """The optimizer; its files are removed when `stack` is left, unless they are to be kept."""
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


def summarise(measured: Measured, stats: dict[str, Any], options: TrainOptions) -> dict[str, Any]:
    """The object that --json prints: `_s` seconds, `_bytes` bytes, losses in nats a byte."""
    taken = (
        "parameters chunks kernel threads wait_nvme_s adam_s nvme_read_bytes nvme_written_bytes nvme_init_bytes "
        "host_to_device_bytes device_to_host_bytes peak_cpu_bytes cpu_budget_bytes peak_device_bytes"
    )
    return {
        "preset": options.preset,
        "dtype": options.dtype,
        "tier": options.tier,
        "param_tier": stats["param_tier"],
        "grad_tier": stats["grad_tier"],
        "steps": options.steps,
        "steps_before": measured.begun,
        "committed": options.commit_every is not None,
        "tokens": measured.tokens,
        "loss_first": measured.losses[0],
        "loss_last": measured.losses[-1],
        "val_loss_first": measured.validation[0][1],
        "val_loss_last": measured.validation[-1][1],
        "tokens_per_s": measured.tokens_per_s,
        **{f"{phase}_s": spent for phase, spent in measured.seconds.items()},
        **{name: stats[name] for name in taken.split()},
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": measured.losses,
        "validation": measured.validation,
    }


def _title(summary: dict[str, Any]) -> str:
    size = f"{summary['parameters']:,} parameters"
    return f"GPT {summary['preset']}, {size}, optimizer states on {summary['tier']}"


def _show(console: Console, summary: dict[str, Any], prompt: str) -> None:
    """Prints tables and a sample, and draws the picture."""
    show_table(console, _table(summary))
    console.print("\n[bold]After[/bold] (from the held-out text)")
    console.print(escape(_printable(prompt)), highlight=False)
    console.print("[bold]the model writes[/bold]")
    console.print(escape(_printable(summary["sample"])), highlight=False)
    if summary["picture"]:
        say(console, f"\nLoss curve: {summary['picture']}")
    if summary["timeline"]:
        say(console, "Timeline: {} (open it in ui.perfetto.dev), {}".format(*summary["timeline"]))
    for file in summary["files"]:
        fate = "committed: see offload inspect" if summary["committed"] else "not committed: it cannot be resumed from"
        say(console, f"Kept: {file} ({fate})")


def _table(summary: dict[str, Any]) -> Table:
    def size(key: str) -> str:
        return format_bytes(summary[key])

    table = Table(title=_title(summary), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    each = summary["parameters"] * max(summary["steps"] - summary["steps_before"], 1)
    training_s = sum(summary[f"{phase}_s"] for phase in ("forward", "backward", "step"))
    waited_s, plain = summary["wait_nvme_s"], PLAIN_BYTES * summary["parameters"]
    moved = summary["nvme_read_bytes"] + summary["nvme_written_bytes"]
    rows = {
        "training loss": f"{summary['loss_first']:.3f} → {summary['loss_last']:.3f} nats a byte",
        "validation loss": f"{summary['val_loss_first']:.3f} → {summary['val_loss_last']:.3f} nats a byte",
        "speed": f"{summary['tokens_per_s']:,.0f} tokens/s",
        "forward": f"{summary['forward_s']:.2f} s",
        "backward": f"{summary['backward_s']:.2f} s",
        "step": f"{summary['step_s']:.2f} s",
        "waiting": f"{waited_s:.2f} s for the disk, {waited_s / training_s:.0%} of the time",
        "NVMe": f"{size('nvme_read_bytes')} read, {size('nvme_written_bytes')} written",
        "a parameter and step": f"{moved / each:.2f} bytes, in {summary['chunks']} chunks",
        "peak CPU memory": f"{size('peak_cpu_bytes')} of a budget of {size('cpu_budget_bytes')}",
        "peak of the process": size("peak_rss_bytes"),
        "plain torch would take": f"{format_bytes(plain)} on the device, beside activations",
        "Adam kernel": f"{summary['kernel']}, {summary['threads']} threads",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "·" for char in text)
