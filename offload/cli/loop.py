"""The training loop of `offload train`: plain PyTorch, with a clock around each phase."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload import BudgetError, ConfigError, OffloadZero, Tuning
from offload.cli.options import TrainOptions
from offload.cli.progress import Tell, training_status
from offload.cli.text import Batches, Text, cut_windows, even_starts
from offload.models import GPT, GPTConfig
from offload.models.gpt import initial_values
from offload.planner import least_cpu_memory
from offload.planner.machine import free_memory
from offload.sizes import format_bytes

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP = 0.05
"""Part of the steps in which the learning rate rises; then a cosine takes it down to LAST_LR of the peak."""
LAST_LR = 0.1
PROMPT_BYTES = 64
PROMPT_SEARCH = 1024
EXIT_TERMINATED = 143  # 128 + SIGTERM
TIMELINE_STEPS = 3
"""The last steps, recorded with --timeline and not validated between."""
VALIDATION_POINTS = 10
"""Validations after the one before the first step, in a run of twice as many steps or more; else only the last."""


@dataclass
class Record:
    """What a run measured. Losses in nats a byte, times in seconds.

    losses: of each step's batches, before its update; validation: (steps done, loss).
    seconds: by phase: forward, backward, step, evaluate; begun: steps that an earlier process had done.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    begun: int = 0

    @property
    def training_s(self) -> float:
        return sum(spent for phase, spent in self.seconds.items() if phase != "evaluate")

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.training_s if self.training_s else 0.0


class Clock:
    """Seconds a phase, on the wall."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self._seconds = seconds
        self._device = device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            # Work queued in one phase would be paid in the next. What it costs, an empty queue between
            # forward and backward, is small beside either.
            torch.cuda.synchronize(self._device)
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
    is_streamed = options.param_tier != "device"
    tuning = Tuning(chunk=options.chunk or Tuning().chunk, threads=options.threads)
    cpu_memory: int | str | None = options.cpu_memory
    commit_every = None if options.commit_every is None else 0  # the loop commits itself, with what it needs to go on
    if cpu_memory is None and options.tier == "nvme":
        cpu_memory = least_cpu_memory(
            model,
            adamw,
            accumulation=options.accumulation,
            param_tier=options.given_param_tier,
            grad_tier=options.given_grad_tier,
            commit_every=commit_every,
            tuning=tuning,
        )
    return OffloadZero(
        model,
        adamw,
        tier=options.tier,
        path=options.path if options.tier == "nvme" else None,
        cpu_memory=cpu_memory,
        accumulation=options.accumulation,
        commit_every=commit_every,
        resume="auto" if options.resume else False,
        device_memory=options.device_memory,
        param_tier=options.given_param_tier,
        grad_tier=options.given_grad_tier,
        device="cuda" if is_streamed and torch.cuda.is_available() else None,
        init=initial_values(model.config, options.seed) if is_streamed else None,
        tuning=tuning,
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


def _more_at_once(model: GPT) -> int:
    """How many micro-batches validation takes in one pass, which brings all parameters that stream. Not so many that it
    takes more memory than training: at its peak it holds 10 widths a token, where training holds one of every block and
    16 of one block even with checkpoints, without which validation has the same bits."""
    return 1 + model.config.layers // 10


def train_loop(
    model: GPT,
    optimizer: OffloadZero,
    text: Text,
    options: TrainOptions,
    device: torch.device,
    tell: Tell,
) -> Record:
    """Train for `options.steps`, validating before, after and now and then between.

    Raises: SystemExit(143) on SIGTERM, where it commits: after the step it is in, and its commit.
    """
    record = Record()
    clock = Clock(record.seconds, device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    batches = Batches(text.train, options.batch, options.seq, options.seed, device)
    starts = even_starts(text.validation, options.validation, options.seq)
    at_once = options.batch * _more_at_once(model)
    held_out = cut_windows(text.validation, starts, options.seq, device)
    # A short run would validate as long as it trains, above all where parameters stream.
    between = options.steps // VALIDATION_POINTS if options.steps >= 2 * VALIDATION_POINTS else options.steps

    def validate(done: int) -> None:
        with clock("step"):
            optimizer.synchronize()  # or validation would pay for the step under way
        with clock("evaluate"):
            record.validation.append((done, evaluate(model, held_out, at_once)))

    record.begun = _continue(optimizer, scheduler, batches, options.steps)
    recorded_from = max(1, options.steps - TIMELINE_STEPS + 1) if options.timeline else math.inf
    validate(record.begun)
    with contextlib.ExitStack() as recording:
        terminated = recording.enter_context(_noted_sigterm()) if options.commit_every else []
        for done in range(record.begun + 1, options.steps + 1):
            if done == recorded_from:
                optimizer.synchronize()  # what is drawn is all of these steps, and nothing else
                recording.enter_context(optimizer.timeline(options.timeline_file))
            record.losses.append(_accumulate(model, batches, options.accumulation, clock))
            with clock("step"):
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record.tokens += options.batch * options.seq * options.accumulation
            if done == options.steps:
                with clock("step"):
                    optimizer.synchronize()
                recording.close()
            if done == options.steps or (done % between == 0 and done < recorded_from):
                validate(done)
            tell(done, training_status(record.losses[-1], record.tokens_per_s, optimizer.stats()))
            if options.commit_every and (terminated or done == options.steps or done % options.commit_every == 0):
                with clock("step"):
                    optimizer.commit({"scheduler": scheduler.state_dict(), "batches": batches.state()})
            if terminated:
                sys.exit(EXIT_TERMINATED)
    return record


def _continue(
    optimizer: OffloadZero, scheduler: torch.optim.lr_scheduler.LambdaLR, batches: Batches, steps: int
) -> int:
    """The steps done by the run that this one resumes; puts schedule and batches where they were."""
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
    """A list that is not empty once SIGTERM has come."""
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
