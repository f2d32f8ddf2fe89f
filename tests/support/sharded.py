"""A training run over ranks, and the same on one process: gradients summed in rank order, then the NumPy reference.

Every function here that takes no world runs on a rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from offload import OffloadZero
from offload.layout import Layout
from offload.model.dense import flattened_like
from offload.optim import reference
from offload.planner import least_cpu_memory
from offload.ranks import torch_distributed as comm
from offload.ranks.communicator import Communicator
from tests.support import models
from tests.support.communicators import Awaited, Late, Ordered
from tests.support.late_copier import LateCopier, copying_by
from tests.support.training import CLIP, LR, SPOILS, LossScale, Run, kept, schedule, settled


def batches_of(kind: str, model: nn.Module, rank: int, ranks: int) -> Iterator[Any]:
    """Every rank's own micro-batches; the last rank's are of another kind of numbers, so that a mix-up shows."""
    every = models.losses(kind, model)
    while True:
        drawn = [next(every) for _ in range(ranks)]
        yield drawn[rank]


@contextmanager
def communicators(kind: str) -> Iterator[None]:
    """Args: kind: "plain", "late", "ordered" or "awaited"."""
    if kind == "plain":
        yield
        return
    made, wrapped = comm.connect, {"late": Late, "ordered": Ordered, "awaited": Awaited}[kind]
    connected: list[Communicator] = []

    def connect(*args: Any, **options: Any) -> Communicator:
        connected.append(wrapped(made(*args, **options)))
        return connected[-1]

    with patch.object(comm, "connect", connect):
        yield
    for one in connected:
        if isinstance(one, Ordered):
            one.require_one_order()
        if isinstance(one, Awaited):
            assert not one.under_way


@contextmanager
def devices_apart(is_so: bool) -> Iterator[None]:
    """Whether devices count as having memory of their own."""
    rank = torch.distributed.get_rank()
    with copying_by(lambda: LateCopier(rank)) if is_so else nullcontext():
        yield


def train(
    kind: str,
    steps: int,
    accumulation: int = 1,
    wire: str = "plain",
    idle: bool = False,
    mesh: tuple[int, int] | None = None,
    along: str | None = None,
    scale: LossScale | None = None,
    spoilt: int | None = None,
    apart: bool = False,
    declares: bool = True,
    **options: Any,
) -> Run:
    """As tests.support.training.train, on this rank.

    Args: apart: as if the device had memory of its own; declares: accumulation, to OffloadZero, too; idle, spoilt: see
    `Reference`; mesh: of all ranks, replicas by shards; along: the dimension to train along, each row or column of it
    for itself; None: both.
    """
    model = models.build(kind)
    rank, ranks, replicas = torch.distributed.get_rank(), torch.distributed.get_world_size(), 1
    if mesh is not None:
        made = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        options["process_group"] = made if along is None else made[along]
        if along is None:
            replicas = mesh[0]
        else:
            rank, ranks = made.get_local_rank(along), made[along].size()
    if rank:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(random.random())  # rank 0's values count
    if idle:
        model.calls = rank  # type: ignore[assignment]
    run = Run()
    plain = torch.optim.AdamW(models.groups(model), lr=LR)
    if options.get("cpu_memory") == "least":
        given = {
            name: options[name]
            for name in ("param_tier", "grad_tier", "tuning", "stage", "compute_dtype", "states")
            if name in options
        }
        options["cpu_memory"] = least_cpu_memory(
            model,
            plain,
            accumulation=accumulation,
            keep_fp32=models.keep_fp32(kind),
            ranks=ranks,
            replicas=replicas,
            **given,
        )
    with (
        communicators(wire),
        devices_apart(apart),
        OffloadZero(
            model,
            plain,
            accumulation=accumulation if declares else "auto",
            keep_fp32=models.keep_fp32(kind),
            **options,
        ) as optimizer,
    ):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        batches = batches_of(kind, model, rank, ranks)
        scaler = (scale or LossScale()).scaler()
        for step in range(steps):
            by = factors(step, rank, ranks, accumulation, spoilt)
            losses = (next(batches)() / accumulation * factor for factor in by)
            without = idle and is_idle(step, rank, options.get("stage"))
            run.step(optimizer, scheduler, losses, is_idle=without, scaler=scaler)
        run.end(model, optimizer)
    return run


def factors(step: int, rank: int, ranks: int, accumulation: int, spoilt: int | None) -> list[float]:
    """Of the losses of a step: the last rank's first gradients are too large in step `spoilt`."""
    return [SPOILS if (step, rank) == (spoilt, ranks - 1) else 1.0] + [1.0] * (accumulation - 1)


def is_idle(step: int, rank: int, stage: int | None) -> bool:
    """At stage 3 a rank without a backward would not gather what the others do."""
    return step == 1 and rank == 1 and stage != 3


@dataclass
class Reference:
    """One process that plays all ranks: torch makes the gradients, NumPy does the rest. See `train`.

    idle: the parameters that get a gradient in turn get it at another time on each rank, and one rank none at all in
    one step, if the stage allows that. spoilt: in this step the gradients of the last rank are too large.
    """

    kind: str
    ranks: int
    layout: Layout
    accumulation: int = 1
    sums_locally: bool = False
    idle: bool = False
    stage: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scale: LossScale = field(default_factory=LossScale)
    spoilt: int | None = None
    form: str = "fp32"
    scales: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = [models.build(self.kind) for _ in range(self.ranks)]
        for rank, model in enumerate(self.models if self.idle else ()):
            model.calls = rank  # type: ignore[assignment]
        numbers = {spec.name: number for number, spec in enumerate(self.layout.specs)}
        first = dict(self.models[0].named_parameters())
        self.number_of = {name: numbers[name] for name in first if name in numbers}
        self.groups = torch.optim.AdamW(models.groups(self.models[0]), lr=LR).param_groups
        self.states = {}
        for name, number in self.number_of.items():
            master = flattened_like(first[name], first[name].detach()).float().numpy().copy()
            self.states[number] = [master, np.zeros_like(master), np.zeros_like(master)]
        self.ages = dict.fromkeys(self.states, 0)
        in_fp32 = models.keep_fp32(self.kind)
        for model in self.models:
            model.to(self.dtype)
            for module in model.modules():
                if in_fp32 and isinstance(module, in_fp32):
                    module.float()
                    module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
                    module.register_forward_hook(lambda _, args, out: out.to(self.dtype))
            model.register_forward_pre_hook(
                lambda _, args: tuple(x.to(self.dtype) if x.is_floating_point() else x for x in args)
            )
        self.batches = [batches_of(self.kind, model, rank, self.ranks) for rank, model in enumerate(self.models)]

    def train(self, steps: int) -> None:
        for step in range(steps):
            found: list[list[dict[int, Tensor]]] = []  # by micro-batch and rank
            self.losses.append([])
            for micro in range(self.accumulation):
                found.append([])
                for rank, model in enumerate(self.models):
                    by = factors(step, rank, self.ranks, self.accumulation, self.spoilt)
                    loss = next(self.batches[rank])() / self.accumulation * by[micro]
                    self.losses[-1].append(loss.item())
                    if not (self.idle and is_idle(step, rank, self.stage)):
                        (loss * self.scale.scale).backward()
                    found[-1].append(self._take_gradients(model))
            self._step(step, self._averaged(found))

    def _take_gradients(self, model: nn.Module) -> dict[int, Tensor]:
        found = {}
        for name, param in model.named_parameters():
            if param.grad is not None and name in self.number_of:
                found[self.number_of[name]] = flattened_like(param, param.grad).clone()
                param.grad = None
        return found

    def _averaged(self, found: list[list[dict[int, Tensor]]]) -> dict[int, np.ndarray[Any, Any]]:
        if self.sums_locally:
            added: list[dict[int, Tensor]] = []
            for rank in range(self.ranks):
                total: dict[int, Tensor] = {}
                for batch in found:
                    for number, grad in batch[rank].items():
                        total[number] = total[number] + grad.float() if number in total else grad.float()
                added.append(total)
            found = [added]
        sums: dict[int, np.ndarray[Any, Any]] = {}
        for by_rank in found:
            for number in sorted(set().union(*by_rank)):
                numel = self.layout.specs[number].numel
                total = torch.zeros(numel)
                for rank, grads in enumerate(by_rank):
                    grad = grads[number].float() if number in grads else torch.zeros(numel)
                    total = grad.clone() if rank == 0 else total + grad
                average = total / torch.tensor([float(self.ranks)])
                if self.accumulation == 1:
                    average = average.to(self.layout.specs[number].dtype).float()
                add = average.numpy()
                sums[number] = reference.accumulate(sums[number], add) if number in sums else add
        return sums

    def _step(self, step: int, grads: dict[int, np.ndarray[Any, Any]]) -> None:
        squares = [
            value
            for number, grad in grads.items()
            for rank in range(self.ranks)
            for first, last in [self.layout.param_shard_range(number, rank)]
            for value in reference.sum_squares(grad[first:last], first).tolist()
        ]
        inverse = 1 / self.scale.scale
        norm = math.sqrt(math.fsum(squares)) * inverse
        is_finite = math.isfinite(norm)
        self.norms.append(torch.tensor(norm, dtype=torch.float32).item() if is_finite else math.inf)
        self.scale.update(is_finite)
        self.scales.append(self.scale.scale)
        for number, grad in grads.items() if is_finite else ():
            group = self.groups[self.layout.specs[number].group]
            self.ages[number] += 1
            dtype = self.layout.specs[number].dtype
            after = list(
                reference.adam(
                    settled(self.states[number][0], self.form, dtype),
                    *self.states[number][1:],
                    grad,
                    step=self.ages[number],
                    lr=LR * schedule(step),
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    decoupled=True,
                    scale=min(1.0, CLIP / (norm + 1e-6)) * inverse,
                )
            )
            self.states[number] = kept(after, self.ages[number], self.form, dtype)
        with torch.no_grad():
            for model in self.models:
                for name, param in model.named_parameters():
                    if name in self.number_of:
                        flattened_like(param, param.data).copy_(torch.from_numpy(self.states[self.number_of[name]][0]))

    def assert_same_bits(self, runs: list[Run]) -> None:
        for rank, run in enumerate(runs):
            assert run.losses == [loss for step in self.losses for loss in step[rank :: self.ranks]], rank
            assert run.norms == self.norms, rank
            assert run.scales == self.scales, rank
            for name, param in self.models[0].named_parameters():
                assert torch.equal(run.tensors[name], param.detach()), (rank, name)
                if name in self.number_of:
                    number = self.number_of[name]
                    for key, values in zip(("master", "exp_avg", "exp_avg_sq"), self.states[number], strict=True):
                        mine = flattened_like(param, run.tensors[f"{name}.{key}"])
                        assert np.array_equal(mine.numpy(), values), (rank, name, key)
                    assert run.steps[name] == self.ages[number]
