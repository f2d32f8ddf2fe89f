"""What `offload train` does: a plain PyTorch loop over OffloadZero, with a clock around each phase."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload import ConfigError, OffloadZero
from offload.demo.gpt import GPT, initial_values
from offload.demo.text import Batches, Text, cut_windows, even_starts
from offload.demo.workspace import Workspace, removed_at_end

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
LR = 1e-3
WARM_UP = 0.05
"""Part of the steps in which the learning rate rises; then a cosine takes it down to LAST_LR of the peak."""
LAST_LR = 0.1
PROMPT_BYTES = 64
PROMPT_SEARCH = 1024
EXIT_TERMINATED = 143  # 128 + SIGTERM
TIMELINE_STEPS = 3
"""How many of the last steps a timeline records. There is no validation between them."""
VALIDATION_POINTS = 10
"""Validations beside the one before the first step, in a run of at least twice as many steps; else one, at the end."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the GPT is trained.

    Attributes:
        steps: how many steps the optimizer takes.
        batch: how many sequences a micro-batch has.
        seq: how many bytes a sequence has.
        lr: the learning rate at its peak; None: LR, or that of the run which is resumed.
        accumulation: how many micro-batches a step has.
        seed: the seed of the initial values, the batches and the sample.
        validation: how many sequences to validate with.
        commit_every: how many steps there are between commits; None: there are none.
        timeline: the file that gets what ran when in the last TIMELINE_STEPS steps; None: they are not recorded.
    """

    steps: int
    batch: int
    seq: int
    lr: float | None
    accumulation: int
    seed: int
    validation: int
    commit_every: int | None = None
    timeline: Path | None = None


@dataclass
class Measured:
    """What was measured in a run. Losses are in nats a byte.

    Attributes:
        losses: the loss of each step's batches, before its update.
        validation: for each validation, how many steps were done and the loss.
        seconds: the time that each phase took: "forward", "backward", "step" and "evaluate".
        tokens: how many tokens this process trained on.
        begun: how many steps an earlier process had done.
        committed: the step of the run's last commit, also by an earlier process; None: there is none.
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
    """Adds up the wall-clock seconds of each phase.

    Args:
        seconds: gets the sums, by phase.
        device: the device that computes. At the end of a phase it is waited for.
    """

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


def build_adamw(model: GPT, lr: float | None = None) -> torch.optim.AdamW:
    """Makes an AdamW that decays matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR if lr is None else lr, betas=BETAS)


def build_optimizer(model: GPT, recipe: Recipe, **options: Any) -> OffloadZero:
    """Makes an AdamW, and an OffloadZero that takes it over.

    Args:
        model: in fp32; on the meta device where its parameters stream. They then get their values as they are taken.
        recipe: how the model is trained.
        **options: options of OffloadZero.
    """
    is_meta = next(model.parameters()).is_meta
    init = initial_values(model.config, recipe.seed) if is_meta else None
    return OffloadZero(model, build_adamw(model, recipe.lr), init=init, **options)


@contextlib.contextmanager
def opened(model: GPT, recipe: Recipe, *, keep: bool, path: Path | None, **options: Any) -> Iterator[OffloadZero]:
    """A context that makes the optimizer, and closes it at its end.

    Args:
        model: as for `build_optimizer`.
        recipe: how the model is trained.
        keep: False: the swap files that the run made are removed at the end, also after an error.
        path: the directory of the swap files, absolute; None: there are none.
        **options: other options of OffloadZero.
    """
    if path is None or keep:
        with build_optimizer(model, recipe, path=path, **options) as optimizer:
            yield optimizer
        return
    space = Workspace(path)
    try:
        optimizer = build_optimizer(model, recipe, path=path, **options)
    except BaseException:
        space.remove_directory()
        raise
    with optimizer, removed_at_end(space, optimizer.files):
        yield optimizer


def lr_factor(step: int, steps: int) -> float:
    """The factor of the learning rate: a linear warm-up to 1, then half a cosine down to LAST_LR.

    Args:
        step: the step's number, from 0.
        steps: how many steps there are.
    """
    warm_up = max(1, round(steps * WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def evaluate(model: GPT, windows: tuple[Tensor, Tensor], batch: int) -> float:
    """The mean loss over some windows.

    Args:
        model: the model.
        windows: tokens and targets, (n, seq) int64 each.
        batch: how many windows are computed at a time.

    Returns:
        The loss in nats a byte.
    """
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
    recipe: Recipe,
    device: torch.device,
    measured: Measured,
    on_step: Callable[[int], None],
) -> None:
    """Trains for `recipe.steps` steps. Validates before the first, after the last, and now and then between.

    Args:
        model: the model.
        optimizer: its optimizer.
        text: what to train on.
        recipe: how the model is trained.
        device: where the model computes.
        measured: gets what is measured.
        on_step: called after each step with the number of steps that are done.

    Raises:
        ConfigError: the run that is resumed is at the last step already, has another learning rate, or is none of
            `offload train`.
        SystemExit: with status 143, after a SIGTERM in a run that commits. The step under way is made and committed
            first.
    """
    clock = Clock(measured.seconds, device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, recipe.steps))
    batches = Batches(text.train, recipe.batch, recipe.seq, recipe.seed, device)
    starts = even_starts(text.validation, recipe.validation, recipe.seq)
    # A pass fetches all parameters that stream, so it takes several micro-batches, but no more memory than training: at
    # its peak it holds 10 widths a token, where training holds one of every block and 16 of one block even with
    # checkpoints, without which validation has the same bits.
    at_once = recipe.batch * (1 + model.config.layers // 10)
    held_out = cut_windows(text.validation, starts, recipe.seq, device)
    # A short run would validate as long as it trains, above all where parameters stream.
    between = recipe.steps // VALIDATION_POINTS if recipe.steps >= 2 * VALIDATION_POINTS else recipe.steps

    def validate(done: int) -> None:
        with clock("step"):
            optimizer.synchronize()  # otherwise validation would wait for the step under way
        with clock("evaluate"):
            measured.validation.append((done, evaluate(model, held_out, at_once)))

    measured.begun = _continue(optimizer, scheduler, batches, recipe)
    recorded_from = max(1, recipe.steps - TIMELINE_STEPS + 1) if recipe.timeline else math.inf
    validate(measured.begun)
    with contextlib.ExitStack() as recording:
        terminated = recording.enter_context(_noted_sigterm()) if recipe.commit_every else []
        for done in range(measured.begun + 1, recipe.steps + 1):
            if recipe.timeline and done == recorded_from:
                optimizer.synchronize()  # what is drawn is all of these steps, and nothing else
                recording.enter_context(optimizer.timeline(recipe.timeline))
            measured.losses.append(_accumulate(model, batches, recipe.accumulation, clock))
            with clock("step"):
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            measured.tokens += recipe.batch * recipe.seq * recipe.accumulation
            if done == recipe.steps:
                with clock("step"):
                    optimizer.synchronize()
                recording.close()
            if done == recipe.steps or (done % between == 0 and done < recorded_from):
                validate(done)
            on_step(done)
            if recipe.commit_every and (terminated or done == recipe.steps or done % recipe.commit_every == 0):
                with clock("step"):
                    optimizer.commit({"scheduler": scheduler.state_dict(), "batches": batches.state()})
                measured.committed = done
            if terminated:
                sys.exit(EXIT_TERMINATED)


def _continue(
    optimizer: OffloadZero, scheduler: torch.optim.lr_scheduler.LambdaLR, batches: Batches, recipe: Recipe
) -> int:
    """Continues the schedule and the batches of the run that this one resumes.

    Returns:
        How many steps that run has done; 0 if none is resumed.

    Raises:
        ConfigError: it has done all steps already, has another learning rate, or is none of `offload train`.
    """
    if optimizer.resumed is None:
        return 0
    step, extra = optimizer.resumed
    if step >= recipe.steps:
        raise ConfigError(f"the run is at step {step} already: give --steps above that, or leave --resume out")
    if not isinstance(extra, dict) or extra.keys() != {"scheduler", "batches"}:
        raise ConfigError("what is committed here was not trained by `offload train`: choose another --path")
    scheduler.load_state_dict(extra["scheduler"])
    begun_with = scheduler.base_lrs[0]
    if recipe.lr not in (None, begun_with):
        raise ConfigError(
            f"the run was begun with --lr {begun_with}: leave --lr out, or begin anew with another --path"
        )
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    batches.restore(extra["batches"])
    return step


@contextlib.contextmanager
def _noted_sigterm() -> Iterator[list[int]]:
    """A context that gives a list. When SIGTERM comes, the list gets the signal's number, and nothing else happens."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _accumulate(model: GPT, batches: Batches, accumulation: int, clock: Clock) -> float:
    """Runs forward and backward over the micro-batches of one step.

    Returns:
        Their mean loss in nats a byte.
    """
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
    """Lets the model continue a prompt from the held-out text.

    Args:
        model: the model.
        text: what the prompt is taken from.
        count: how many bytes the model writes.
        seed: the seed of the random choices.
        device: where the model computes.

    Returns:
        The prompt, and what the model wrote after it.
    """
    opening = text.validation[:PROMPT_SEARCH].tobytes()
    start = opening.find(b"\n") + 1  # of a line, or of the text where there is none
    prompt = torch.tensor(list(opening[start : start + PROMPT_BYTES] or opening), device=device)
    generator = torch.Generator().manual_seed(seed)
    tokens = model.generate(prompt, count, temperature=0.7, generator=generator)
    written = bytes(tokens.tolist())
    return written[: len(prompt)].decode(errors="replace"), written[len(prompt) :].decode(errors="replace")
