"""One training run, the same in everything but where its states lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload import OffloadZero
from offload.model.dense import flattened_like
from offload.optim import reference
from offload.planner import least_cpu_memory
from tests.support import models
from tests.support.device import DEVICE

LR = 3e-3
CLIP = 0.5
SPOILS = 1e8
"""A loss times this has gradients that fp16 cannot hold."""


@dataclass
class Run:
    """What a run computed: everything that has to have the same bits."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    def step(
        self,
        optimizer: OffloadZero,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        losses: Iterable[Tensor],
        *,
        is_idle: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """One step of the training. Args: losses: one a micro-batch; is_idle: there is no backward."""
        scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
        for loss in losses:
            if not is_idle:
                scaler.scale(loss).backward()
            self.losses.append(loss.item())
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(CLIP).item()
        self.norms.append(norm if math.isfinite(norm) else math.inf)
        scaler.step(optimizer)
        scaler.update()
        self.scales.append(scaler.get_scale())
        scheduler.step()
        optimizer.zero_grad()

    def end(self, model: nn.Module, optimizer: OffloadZero) -> None:
        """What there is after the last step."""
        optimizer.synchronize()
        self.stats = optimizer.stats()
        for name, param in model.named_parameters():
            with optimizer.gathered(param):
                self.tensors[name] = param.detach().cpu().clone()
            if param.requires_grad:
                state = optimizer.state_of(param)
                self.steps[name] = state.pop("step")
                self.tensors |= {f"{name}.{key}": value for key, value in state.items()}

    def assert_same_bits(self, other: Run) -> None:
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.scales == other.scales
        assert self.steps == other.steps
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


@dataclass
class LossScale:
    """What a GradScaler does, in plain Python. Attribute: clean, how many steps in a row had no overflow."""

    scale: float = 1.0
    interval: int | None = None
    clean: int = 0

    def update(self, is_finite: bool) -> None:
        if self.interval is None:
            return
        self.clean = self.clean + 1 if is_finite else 0
        self.scale *= 1.0 if is_finite else 0.5
        if self.clean == self.interval:
            self.clean, self.scale = 0, 2 * self.scale

    def scaler(self, device: str = "cpu") -> torch.amp.GradScaler:
        """One that begins as this is now."""
        enabled = self.interval is not None
        return torch.amp.GradScaler(device, init_scale=self.scale, growth_interval=self.interval or 1, enabled=enabled)


def schedule(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 40))


def train(
    kind: str,
    *,
    steps: int = 12,
    accumulation: int = 1,
    device: str = DEVICE,
    prepare: Callable[[nn.Module], None] | None = None,
    each_step: Callable[[OffloadZero], None] | None = None,
    adam: type[torch.optim.Optimizer] = torch.optim.AdamW,
    scale: LossScale | None = None,
    spoilt: Collection[int] = (),
    **options: Any,
) -> Run:
    """Two param groups, a scheduler, clipping and accumulation, `steps` steps of the model `kind`.

    Args: scale: at first; None: there is no GradScaler; spoilt: the steps in which the last gradients are too large.
    """
    model = models.build(kind).to(device)
    if prepare is not None:
        prepare(model)
    plain = adam(models.groups(model), lr=LR)
    run = Run()
    if options.get("cpu_memory") == "least":
        options["cpu_memory"] = least_cpu_memory(
            model,
            plain,
            accumulation=accumulation,
            keep_fp32=models.keep_fp32(kind),
            param_tier=options.get("param_tier"),
            grad_tier=options.get("grad_tier"),
            commit_every=options.get("commit_every", "auto"),
            states=options.get("states", "fp32"),
            tuning=options.get("tuning"),
            compute_dtype=options.get("compute_dtype", torch.bfloat16),
        )
    scaler = (scale or LossScale()).scaler(device)
    with OffloadZero(model, plain, accumulation=accumulation, keep_fp32=models.keep_fp32(kind), **options) as optimizer:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        batches = models.losses(kind, model, device)
        for step in range(steps):
            by = [1.0] * (accumulation - 1) + [SPOILS if step in spoilt else 1.0]
            run.step(optimizer, scheduler, (next(batches)() / accumulation * factor for factor in by), scaler=scaler)
            if each_step is not None:
                each_step(optimizer)
        run.end(model, optimizer)
    return run


def settled(master: np.ndarray[Any, Any], form: str, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """A master as states of `form` have it beside a parameter of `dtype`."""
    return reference.settle(master) if form != "fp32" and dtype is torch.bfloat16 else master


def kept(states: list[np.ndarray[Any, Any]], step: int, form: str, dtype: torch.dtype) -> list[np.ndarray[Any, Any]]:
    """What is left of a master and two moments between two steps, decoded."""
    p, *moments = states
    found, random = [settled(p, form, dtype)], reference.dither(len(p), step)
    for x, signed in zip(moments, (True, False), strict=True):
        if form == "bf16":
            found.append(reference.from_bf16(reference.to_dithered_bf16(x, random)))
        elif form == "8bit":
            found.append(reference.from_codes(*reference.to_codes(x, random, signed=signed), signed=signed))
        else:
            found.append(x)
    return found


class NumpyAdam:
    """The reference, driven by the gradients that autograd made in a run: nothing of the library but the layout."""

    def __init__(
        self, accumulation: int, decoupled: bool = True, scale: LossScale | None = None, form: str = "fp32"
    ) -> None:
        self._form = form
        self._accumulation = accumulation
        self._decoupled = decoupled
        self._scale = scale or LossScale()
        self._steps = 0
        self._params: dict[str, nn.Parameter] = {}
        self._masters: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._grads: dict[str, np.ndarray[Any, Any]] = {}
        self._ages: dict[str, int] = {}

    def watch(self, model: nn.Module) -> None:
        """Called before OffloadZero takes the model."""
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._params[name] = param
                master = flattened_like(param, param.detach()).float().cpu().numpy().copy()
                self._masters[name] = [master, np.zeros_like(master), np.zeros_like(master)]
                self._ages[name] = 0
                param.register_hook(lambda grad, name=name: self._arrives(name, grad))

    def _arrives(self, name: str, arriving: Tensor) -> None:
        grad = flattened_like(self._params[name], arriving).float().cpu().numpy().copy()
        self._grads[name] = reference.accumulate(self._grads[name], grad) if name in self._grads else grad

    def step(self, optimizer: OffloadZero) -> None:
        """After the optimizer's step, with the hyper-parameters it used (the scheduler has moved on by one)."""
        layout = optimizer._layout
        number_of = {spec.name: number for number, spec in enumerate(layout.specs)}
        sums = [value for name, grad in self._grads.items() for value in reference.sum_squares(grad).tolist()]
        norm, inverse = math.sqrt(math.fsum(sums)), 1 / self._scale.scale
        scale = min(1.0, CLIP / (norm * inverse + 1e-6)) * inverse
        is_finite = math.isfinite(norm)
        self._scale.update(is_finite)
        self._steps += 1
        for name, grad in self._grads.items() if is_finite else ():
            group = optimizer.param_groups[layout.specs[number_of[name]].group]
            self._ages[name] += 1
            after = reference.adam(
                settled(self._masters[name][0], self._form, self._params[name].dtype),
                *self._masters[name][1:],
                grad,
                step=self._ages[name],
                lr=LR * schedule(self._steps - 1),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=self._decoupled,
                scale=scale,
            )
            self._masters[name] = kept([*after], self._ages[name], self._form, self._params[name].dtype)
        self._grads.clear()

    def assert_same_bits(self, run: Run) -> None:
        for name, param in self._params.items():
            for kind, values in zip(("master", "exp_avg", "exp_avg_sq"), self._masters[name], strict=True):
                mine = flattened_like(param, run.tensors[f"{name}.{kind}"])
                assert np.array_equal(mine.numpy(), values), (name, kind)
            assert run.steps[name] == self._ages[name]
            rounded = run.tensors[f"{name}.master"].to(run.tensors[name].dtype)
            assert torch.equal(run.tensors[name], rounded), name
