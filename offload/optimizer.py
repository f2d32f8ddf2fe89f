"""OffloadZero: an ordinary torch optimizer whose states lie where there is room for them.

[Note: a loss scale]
A GradScaler works on an optimizer in two ways, and both come here:

- `scaler.unscale_(optimizer)` calls one torch function on all `p.grad`. The stand-ins there (module/gradient.py) answer
  with `_unscale`: it says whether a gradient is not finite, and notes the inverse of the loss scale. The gradients stay
  as they are held; the step multiplies them, in fp32, as it does with the factor of clipping.
- `scaler.step(optimizer)` calls the same function with an inverse of 1, if nobody called `unscale_`, for the sake of
  its answer. It calls `step()` in any case, as of all optimizers with `_step_supports_amp_scaling`, and meanwhile the
  optimizer has two attributes more: `found_inf`, and the scale as `grad_scale`, None after `unscale_`.

Whether gradients are finite is known from their sums of squares, which are those of all ranks: so ranks skip together,
and their scalers stay alike.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Never, NoReturn, Self, overload

import torch
from torch import Tensor, nn

from offload import config as configuration
from offload.assembly import assemble
from offload.attachment import Attachment
from offload.checkpoint import recovery
from offload.checkpoint.committer import Commits, Stores
from offload.checkpoint.export import export
from offload.checkpoint.extra import memory_of, stored
from offload.checkpoint.manifest import Manifest, Option
from offload.checkpoint.recovery import RecoveryPlan, Resumed, Start
from offload.checkpoint.tensors import Entry
from offload.config import Config, PathLike, Tuning
from offload.devices.copies import Copier, copier_for
from offload.dist import torch_distributed
from offload.dist.agreement import all_or_none, require_alike, require_same_step, whole_line
from offload.errors import (
    ClosedError,
    ConfigError,
    InterruptedStepError,
    NonFiniteGradientError,
    OffloadError,
    ResumeError,
)
from offload.interrupts import uninterrupted
from offload.layout import Layout, build, tiled
from offload.model.flat_param import device_for, shaped_like, untrained_bytes
from offload.model.hooks import require_free
from offload.model.meta_init import Init, Source, is_meta, source_of
from offload.model.trace import recorded
from offload.model.units import compute_dtypes, rows_of, specs_of, stop_reducing, unwrapped
from offload.optim.adam import StepKey
from offload.optim.adopt import NoStates, require_adoptable, require_sound, retire
from offload.optim.adopt import unwrapped as unwrapped_optimizer
from offload.planner.choice import choose
from offload.planner.device import Room
from offload.planner.machine import free_memory
from offload.planner.placement import place
from offload.profiling import PHASES, Timeline
from offload.run import Run

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
HANDED_OVER = ("grad_scale", "found_inf")
"""Attributes that an optimizer has while a GradScaler calls its step."""


class _Plan(NamedTuple):
    """What is fixed before anything is allocated."""

    params: Sequence[nn.Parameter]
    device: torch.device
    copier: Copier
    room: Room
    wanted: Manifest


class OffloadZero(torch.optim.Optimizer):
    """Trains `model` with Adam or AdamW, the fp32 masters and moments on the device, in RAM or in NVMe swap files.

    The model is hooked in place: its parameters become `compute_dtype` on the device they are on, and its class,
    names and `state_dict` keys stay. Masters are taken from the uncast values. The training loop stays ordinary
    PyTorch: whoever reads a parameter or a gradient gets its current value, and what is written in place counts, also
    where they are in another tier. docs/compatibility.md lists the exceptions.

    Args:
        model: any nn.Module with dense floating parameters on one device. Of a DistributedDataParallel the model in it
            is taken, and its own reduction of gradients switched off.
        optimizer: a fresh torch.optim.Adam or AdamW, whose param groups are adopted (the same dicts) and whose own
            `step()` raises from then on, also one that Accelerate or Lightning has wrapped; None:
            AdamW(model.parameters()).
        tier: where the optimizer states live: "device", "cpu" or "nvme"; None: "nvme" if `path` is given, else "cpu".
        path: the directory for this run's swap files and commits, or several; made (0700) if their parents exist.
        cpu_memory: bytes, or such as "48GiB", for everything this library holds in RAM; None: half of what is free.
        compute_dtype: of the parameters in the model: torch.bfloat16, torch.float32, or torch.float16, which needs a
            torch.amp.GradScaler.
        keep_fp32: modules, or module types, that stay fp32. Those with running statistics (BatchNorm, spectral norm)
            do in any case.
        accumulation: backward passes a step; with more than one, gradients are summed in fp32.
        nonfinite: "raise" NonFiniteGradientError on NaN or Inf, or "skip" the step and count it.
        device: where a model built on the meta device is to train; None: "cpu". Of any other it is the model's own.
        init: where the values of a model built on the meta device come from: a function called with name and tensor,
            a safetensors file or the index of several, or None: `reset_parameters()` of its modules.
        tuning: what only tunes speed.
        param_tier: where the parameters live outside their unit's forward and backward: "device", "cpu" or "nvme"; see
            docs/guide.md for what is different then. None: the fastest that fits the budgets.
        grad_tier: where gradients wait for the step: "cpu" or "nvme"; None: the fastest that fits. On the device if the
            states are there.
        commit_every: steps between commits, each made where the next step begins; 0: only `commit()`; None: no commits,
            one slot a chunk and half the space. "auto": 100 where a `path` is given, else None.
        resume: True: continue the committed run in `path`; "auto": if there is one; or the directories of the run, as a
            list, if they are not all in `path`; see `resumed`. In another layout (chunks, directories, ranks, split
            masters) the commit is first written anew, beside the old one, which is removed when that is committed.
        stage: of ZeRO, with several ranks of torch.distributed: 1, 2 or 3; None: 3 if parameters stream, else 2.
        process_group: the ranks that hold one partition each, a ProcessGroup or a DeviceMesh; None: all. Of a mesh of
            two dimensions the second is that over which stage 3 gathers parameters, and the first is of replicas.
        cast_forward_inputs: whether floating inputs of the model's forward are cast to `compute_dtype`. False leaves
            them as they are, for models that cast where they have to (time steps, positions).
        device_memory: bytes, or such as "48GiB", for parameters and buffers on the device at once, and what `tier`
            puts there; activations and gradients on their way not included; None: half of what is free there, beside
            what the model has already.

    Raises: ConfigError, BudgetError, PathError, PathInUseError, ResumeError; before the model is changed. RankError.

    The numeric contract of the step is in offload/optim/reference.py: the result has the same bits on every tier,
    budget, chunk size, thread count and instruction set.
    """

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tier: str | None = None,
        path: PathLike | Sequence[PathLike] | None = None,
        param_tier: str | None = None,
        grad_tier: str | None = None,
        cpu_memory: int | str | None = None,
        device_memory: int | str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: Iterable[nn.Module | type[nn.Module]] = (),
        accumulation: int = 1,
        nonfinite: str = "raise",
        commit_every: int | str | None = "auto",
        resume: bool | str | PathLike | Sequence[PathLike] = False,
        device: torch.device | str | None = None,
        init: Init = None,
        stage: int | None = None,
        process_group: object | None = None,
        cast_forward_inputs: bool = True,
        tuning: Tuning | None = None,
        **unknown: Never,
    ) -> None:
        self._config = configuration.check(
            tier=tier,
            path=path,
            cpu_memory=cpu_memory,
            compute_dtype=compute_dtype,
            keep_fp32=keep_fp32,
            accumulation=accumulation,
            nonfinite=nonfinite,
            param_tier=param_tier,
            grad_tier=grad_tier,
            tuning=tuning,
            device_memory=device_memory,
            commit_every=commit_every,
            resume=resume,
            stage=stage,
            cast_forward_inputs=cast_forward_inputs,
            **unknown,
        )
        wrapper, model = model, unwrapped(model)
        self._model = model
        self._pid = os.getpid()
        self._timeline = Timeline()
        self._failure: BaseException | None = None
        self._step = 0
        self._skipped = 0
        self._adopted = False
        self._comm = torch_distributed.connect(process_group, timeline=self._timeline)
        given = unwrapped_optimizer(optimizer)
        with ExitStack() as undo:
            with all_or_none(self._comm):
                require_free(model)
                given = torch.optim.AdamW(model.parameters()) if given is None else given
                source = source_of(init)
                plan = self._plan(given, source, device)
            undo.callback(self._comm.close)
            require_alike(self._comm, self._layout, self._config)
            start = recovery.find_together(undo, self._config, self._comm, self._layout, plan.wanted)
            self._config, found = start.config, start.found
            with all_or_none(self._comm):
                self._assemble(undo, plan, start)
            super().__init__(given.param_groups, dict(given.defaults))
            self.state = NoStates()  # type: ignore[assignment]
            self._adopted = True
            self._attached = self._attach(source, resumes=found is not None)
            self._resumed = None if found is None else Resumed(found.commit.step, found.extra)
            if found is not None:
                self._begin_at(found)
            # Not before: a model that is left without values stays marked as taken.
            undo.callback(self._attached.remove)
            stop_reducing(wrapper, undo)
            self._undo = undo.pop_all()
        retire(given)
        with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            print(self._placement.describe(self._layout, self._config), file=sys.stderr)

    def _plan(self, given: torch.optim.Optimizer, source: Source, device: torch.device | str | None) -> _Plan:
        """Decides what lies where. Raises as the constructor does; nothing is allocated."""
        require_adoptable(given)
        kinds = tuple({"decoupled_weight_decay": group["decoupled_weight_decay"]} for group in given.param_groups)
        if self._config.commit_every is not None:
            stored(given.param_groups)
        keep, dtype, model, ranks = self._config.keep_fp32, self._config.compute_dtype, self._model, self._comm
        specs, params = specs_of(
            model, given.param_groups, keep, dtype, chosen=self._config.units, planned=is_meta(model)
        )
        self._ages = [0] * len(specs)
        device = device_for(device, params[0].device)
        source.check(model)
        ranks.require_device(device)
        self._config = configuration.over_ranks(self._config, ranks=ranks.size, ranks_on_node=ranks.ranks_on_node)
        replicas = configuration.replicas_of(self._config, ranks=ranks.size, rows=ranks.across.size)
        copier = self._copier = copier_for(device)
        rows = rows_of(model, params)

        def laid_out(config: Config) -> Layout:
            split = tiled(specs, rows, config.tile_bytes or 0)
            return build(split, config.chunk_numel, ranks=ranks.size, rank=ranks.rank, replicas=replicas)

        room = self._room(copier, params)
        self._config, self._layout, _ = choose(self._config, laid_out, direct=copier.direct, room=room)
        wanted = recovery.describe(self._config, self._layout, params, kinds)
        return _Plan(params, device, copier, room, wanted)

    def _assemble(self, undo: ExitStack, plan: _Plan, start: Start) -> None:
        """Reserves memory and opens files. Raises as the constructor does; the model is not touched."""
        found = start.found
        beside = 0 if found is None else found.buffer_bytes
        self._placement = place(self._layout, self._config, direct=plan.copier.direct, room=plan.room, beside=beside)
        slots = None if found is None else found.slots
        is_temporary = found is not None and slots is None
        run = (self._config, self._layout, self._placement, plan.params, plan.device, plan.copier)
        beginning = (slots, is_temporary, start.run_id, start.held)
        self._parts = assemble(undo, *run, self._timeline, self._comm, *beginning)
        parts = self._parts
        shared = Run(self._config, self._layout, parts.memory, parts.kernels, self._comm, self._timeline)
        stores = Stores(parts.store, parts.params, parts.stored)
        self._commits = Commits(shared, parts.slots, stores, parts.masters, parts.returned, plan.wanted, found)
        self._commits.read_ahead()

    def _room(self, copier: Copier, params: Sequence[nn.Parameter]) -> Room:
        """On the device: what the model has there now, and half of what is free."""
        model, free = self._model, copier.free_bytes()
        dtypes = compute_dtypes(model, self._config.keep_fp32, self._config.compute_dtype)
        own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
        free = free_memory() // self._config.ranks_on_node if free is None else free
        return Room(untrained_bytes(model, params, dtypes), own + free // 2)

    def _room_at_end(self) -> int:
        """On the device, for parameters that were streamed: in half of what is free, and in what they may take."""
        free = self._copier.free_bytes()
        free = (free_memory() // self._config.ranks_on_node if free is None else free) // 2
        limit = self._placement.device_budget_bytes
        return free if limit is None else min(free, limit - self._placement.resident_bytes)

    def _attach(self, source: Source, *, resumes: bool) -> Attachment:
        return Attachment(
            self._model,
            self._parts,
            self._config,
            self._layout,
            self._placement,
            source,
            resumes=resumes,
            step=lambda: self._step,
            usable=self._require_usable,
            failed=self._cut_off,
            collects=self._collect,
            unscales=self._unscale,
        )

    def _cut_off(self, error: BaseException) -> None:
        self._failure = self._failure or error

    # Training.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of Adam over every parameter whose gradient has arrived; consumes the gradients.

        It fixes the gradients, their scale and the hyper-parameters, queues the work, and returns. Whoever uses a
        parameter then gets its new value: what is pending is applied by the first use. Where states are in RAM and the
        model is on the CPU, all is done when it returns.

        A GradScaler's `scaler.step(optimizer)` calls it, and then it skips a step whose gradients are not finite,
        whatever `nonfinite` says.

        Args: closure: evaluates the model again and returns the loss, which is returned.
        Raises: NonFiniteGradientError (nonfinite="raise"; the state is untouched), ConfigError (fp16 without a
        GradScaler, or one that is not used as it should be; nothing is changed), TierIOError, CorruptionError; over
        several ranks ConfigError (not the same step on all of them; nothing is changed), AccumulationError, RankError.
        """
        with self._beside_a_scaler():
            self._require_usable()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with self._timeline.span("step_s"), self._timeline.event(PHASES, "step"):
                self._attached.step_begins()
                self._commit_if_due()
                active = self._collect()
                factor = self._agreed_factor(active) if self._is_to_step(active) else None
                if factor is not None:
                    self._attached.take_outside_writes()
                self._advance(active, factor)
                self._attached.step_ends()
        return loss

    def _collect(self) -> list[int]:
        """Waits for the gradients; returns the parameters that have one."""
        with torch._C.DisableTorchFunctionSubclass():
            self._parts.parameters.require_in(self._model)
            self._parts.parameters.require_all_of(self._model, self.param_groups)
        self._attached.landing.before_gradients()
        self._attached.answers.take_changes()
        return self._parts.sink.collect(self._attached.answers.active)

    @uninterrupted
    def _advance(self, active: Sequence[int], factor: float | None) -> None:
        """All that changes with a step, or none of it. Args: factor: of the gradients; None: the step is skipped."""
        if factor is None:
            self._skipped += 1
        else:
            self._begin(active, factor)
        self._consume(active)

    def _begin(self, active: Sequence[int], factor: float) -> None:
        specs, factors = self._layout.specs, self._parts.sink.factors
        keys: dict[int, StepKey] = {n: (specs[n].group, self._ages[n] + 1, factors.get(n, 1.0)) for n in active}
        try:
            flats = self._attached.landing.begins(active)
            self._parts.step.begin(self._step + 1, keys, self.param_groups, factor, flats)
        except BaseException as error:
            self._cut_off(error)
            raise
        self._step += 1
        for number in active:
            self._ages[number] += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step; with `set_to_none=False` they become zeros, which the step uses."""
        with torch._C.DisableTorchFunctionSubclass():
            had = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            super().zero_grad(set_to_none=True)
        if self._adopted:
            self._consume()
            self._attached.answers.become_zeros([] if set_to_none else had)

    # Clipping, and torch.amp.GradScaler.

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of this step to a 2-norm of `max_norm`, over all parameters together.

        With a GradScaler it comes after `scaler.unscale_(optimizer)`, and is about the unscaled gradients.

        Returns: the norm before clipping, a 0-dim fp32 CPU tensor. Clipping costs no pass over the gradients: the
        factor, torch's `min(1, max_norm / (norm + 1e-6))`, is folded into the step.
        Raises: NonFiniteGradientError with nonfinite="raise", but not of gradients that a GradScaler has met, whose
        step is skipped; ConfigError of fp16 gradients that none has. A gradient that comes after it raises
        AccumulationError.
        """
        self._require_usable()
        if not float(max_norm) >= 0:
            raise ConfigError(f"max_norm={max_norm!r}: give a number, at least 0")
        sink, active = self._parts.sink, self._collect()
        if sink.scale.unscaled is None:
            if active and self._needs_a_scaler:
                raise ConfigError(
                    "clip_grad_norm_() of fp16 gradients that are not unscaled yet: call scaler.unscale_(optimizer) of "
                    "a torch.amp.GradScaler before, on every rank, after a backward of scaler.scale(loss)"
                )
            self._all_finite(active)
        norm = sink.norm(active) * sink.scale.factor
        if sink.factors:
            each = zip(active, sink.norms(active), strict=True)
            norm = math.sqrt(math.fsum((sink.factor_of(number) * one) ** 2 for number, one in each))
        factor = min(1.0, float(max_norm) / (norm + CLIP_EPSILON)) if norm == norm else 1.0
        clip = 1.0 if sink.scale.clip is None else sink.scale.clip
        sink.scale = replace(sink.scale, clip=clip * factor)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    @property
    def _needs_a_scaler(self) -> bool:
        return self._config.compute_dtype is torch.float16

    @property
    def _is_of_scaler(self) -> bool:
        """Whether it is a GradScaler that calls the step."""
        return "found_inf" in vars(self)

    def _unscale(self, found_inf: Tensor, inverse: Tensor) -> None:
        """Answers a GradScaler; see the note at the top. Args: found_inf, inverse: 0-dim fp32; the first is written."""
        self._require_usable()
        factor = _checked(inverse.item())
        sink, active = self._parts.sink, self._collect()
        before = sink.scale
        if factor != 1.0 and before.clip is not None:
            raise _clipped_too_early()
        if factor != 1.0 and before.unscaled not in (None, 1.0):
            raise _unscaled_twice()
        if not math.isfinite(sink.norm(active)):
            found_inf.fill_(1.0)
        sink.scale = replace(before, unscaled=factor * (1.0 if before.unscaled is None else before.unscaled))

    @contextmanager
    def _beside_a_scaler(self) -> Iterator[None]:
        """A GradScaler takes away what it handed over after a step that returns. After one that raises it does not, and
        would multiply the next step's scale with what is left."""
        try:
            yield
        except BaseException:
            handed, sink = [vars(self).pop(name, None) for name in HANDED_OVER], self._parts.sink
            if handed[0] is not None and sink.scale.unscaled == 1.0:
                sink.scale = replace(sink.scale, unscaled=None)  # only asked, for this step
            raise

    def _is_to_step(self, active: Sequence[int]) -> bool:
        """Whether the step under way is not skipped. Raises: NonFiniteGradientError."""
        if self._is_of_scaler:
            return math.isfinite(self._parts.sink.norm(active))
        return self._all_finite(active)

    def _all_finite(self, active: Sequence[int]) -> bool:
        sink = self._parts.sink
        bad = sink.not_finite(active) or [number for number in active if not math.isfinite(sink.factor_of(number))]
        if bad and not self._config.skip_nonfinite:
            name = self._layout.specs[bad[0]].name
            others = f" and in {len(bad) - 1} more parameters" if len(bad) > 1 else ""
            raise NonFiniteGradientError(
                f"NaN or Inf in the gradient of {name}{others}; the optimizer's state is untouched: call zero_grad() "
                'and go on with the next batch, or choose nonfinite="skip"',
                parameter=name,
            )
        return not bad

    def _agreed_factor(self, active: Sequence[int]) -> float | None:
        """By what the step multiplies the gradients held; None: it is skipped, a GradScaler has found an Inf elsewhere.

        Raises: ConfigError on all ranks if one of them cannot step, or they would step differently; RankError.
        """
        factor, fault = math.nan, None
        try:
            require_sound(self.param_groups)
            if self._config.commit_every is not None:
                stored(self.param_groups)  # now, and not when the commit is due
            factor = self._factor(active)
        except ConfigError as error:
            fault = error
        skips = bool(vars(self).get("found_inf", 0.0))
        factor = self._with_factors(active, factor)
        require_same_step(self._comm, self.param_groups, factor, skips=skips, fault=fault)
        return None if skips else factor

    def _with_factors(self, active: Sequence[int], factor: float) -> float:
        """Makes the factors by which users multiplied gradients alike on all ranks: one that has no gradient of a
        parameter takes it from the others. Returns `factor`, with one that all have. Raises: ConfigError on all ranks.
        """
        sink = self._parts.sink
        if self._comm.size == 1:
            return factor
        mine = self._attached.answers.active
        own = [sink.factors.get(number, 1.0) for number in mine]
        row = (1.0, min(own), max(own)) if own else (0.0, 1.0, 1.0)
        told = self._comm.gather(torch.tensor(row, dtype=torch.float64, device="cpu"))
        known = {value for row in told.tolist() if row[0] for value in row[1:]}
        if len(known) > 1:
            self._share_factors(mine)
            return factor
        sink.factors.clear()
        return factor * known.pop() if known else factor

    def _share_factors(self, mine: Sequence[int]) -> None:
        sink = self._parts.sink
        row = torch.full((len(self._layout.specs),), math.nan, dtype=torch.float64, device="cpu")
        for number in mine:
            row[number] = sink.factors.get(number, 1.0)
        for number, column in enumerate(self._comm.gather(row).T.tolist()):
            factors = {value for value in column if value == value}
            if len(factors) > 1:
                raise ConfigError(
                    f"the gradient of {self._layout.specs[number].name} was multiplied by {sorted(factors)} on the "
                    "ranks: multiply it by the same number on each; nothing was changed, call zero_grad()"
                )
            if factors:
                sink.factors[number] = factors.pop()

    def _factor(self, active: Sequence[int]) -> float:
        scale, handed = self._parts.sink.scale, vars(self).get("grad_scale")
        if handed is None:
            if active and scale.unscaled is None and (self._needs_a_scaler or self._is_of_scaler):
                raise _not_unscaled(is_of_scaler=self._is_of_scaler)
            return scale.factor
        # In fp32, as `unscale_` gives it.
        inverse = _checked(handed.double().reciprocal().float().item())
        if inverse != 1.0 and scale.clip is not None:
            raise _clipped_too_early()
        if inverse != 1.0 and scale.unscaled not in (None, 1.0):
            raise _unscaled_twice()
        return scale.factor * inverse

    def _consume(self, used: Sequence[int] | None = None) -> None:
        """The next gradients begin anew. Args: used: of which parameters a step used them; None: they are dropped."""
        if used is None:
            self._attached.answers.dropped()
        else:
            self._attached.answers.consumed(used)
        self._parts.sink.as_held()
        self._parts.sink.forget_all()

    # Looking at what it holds.

    def grad(self, param: Tensor) -> Tensor | None:
        """The gradient of `param` as it is now: summed over micro-batches, and, once they were called, unscaled by a
        GradScaler's `unscale_` and clipped. Before `unscale_` it is that of the scaled loss. None without a gradient.

        Returns: an fp32 CPU tensor of the parameter's shape; a copy.
        """
        self._require_usable()
        number = self._number(param)
        if number not in self._collect():
            return None
        first, last = self._layout.held_of(number)
        line = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        line[first:last] = self._parts.sink.line(number).float() * self._parts.sink.factor_of(number)
        return shaped_like(param, whole_line(self._comm, self._layout, number, line))

    def gathered(
        self, module_or_params: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False
    ) -> AbstractContextManager[None]:
        """`with optimizer.gathered(model.head):` the parameters' values are there, the last step's, streamed or not.

        Args: writable: also what is written to them past torch (NumPy) is found at the end; other writes count anyway.
        Raises: ConfigError for a tensor that is no parameter of the model.
        """
        self._require_usable()
        return self._attached.access.gathered(module_or_params, writable=writable)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """{"master", "exp_avg", "exp_avg_sq": fp32 CPU tensors of the parameter's shape, "step": int}; copies."""
        self._require_usable()
        number = self._number(param)
        self._attached.landing.everything()
        self._attached.take_outside_writes()
        lines = self._parts.masters.states(number, self._step)
        whole = {kind: whole_line(self._comm, self._layout, number, line) for kind, line in lines.items()}
        shaped: dict[str, Any] = {kind: shaped_like(param, line) for kind, line in whole.items()}
        return shaped | {"step": self._ages[number]}

    def stats(self) -> dict[str, Any]:
        """Counters since training began. Bytes end in `_bytes`, seconds in `_s`.

        nvme_init_bytes is what was written before the first step; nvme_read_bytes and nvme_written_bytes what moved
        since. step_s is spent in step(), landing_s in waits for its results; adam_s, and where that runs on the CPU the
        waits for tiers wait_nvme_s and wait_device_s, are parts of the two. gradient_s is spent in backward.
        peak_device_bytes: the most that parameters and buffers had on the device at once.
        arena_utilisation: the share of the buffers' bytes that chunks fill.
        """
        return {
            "step": self._step,
            "skipped_steps": self._skipped,
            "parameters": self._layout.numel,
            "param_tier": self._config.param_tier,
            "grad_tier": self._config.grad_tier,
            **self._parts.stats(self._placement, self._attached.initial_bytes),
        }

    def timeline(self, file: PathLike) -> AbstractContextManager[None]:
        """Records every transfer, kernel, wait and hook inside `with optimizer.timeline("t.json"):`.

        The file is in Chrome's trace format, for ui.perfetto.dev or chrome://tracing. It is written at the end, also
        when the body raises. A recording changes no bit, and keeps the first 100,000 events (some 30 MB of RAM).
        Raises: PathError before the body runs, or at its end if the disk fails; ConfigError if one is going on.
        """
        self._require_usable()
        return recorded(self._timeline, file, self._model, self._layout, self._config.units)

    @property
    def files(self) -> tuple[str, ...]:
        """The swap files. They stay after `close()`; without commits there is nothing in them to resume from."""
        return self._parts.files

    def _number(self, param: Tensor) -> int:
        number = self._parts.parameters.index.get(param)  # type: ignore[call-overload]
        if number is None:
            raise ConfigError(f"the tensor of shape {tuple(param.shape)} is no parameter that this optimizer trains")
        return int(number)

    # Committing, and going back.

    @property
    def resumed(self) -> Resumed | None:
        """The step that this run was resumed at, and the extra committed with it; None if it began anew."""
        return self._resumed

    def commit(self, extra: object = None) -> None:
        """Makes this step the one to come back to, at the end of an iteration; durable when it returns.

        Args: extra: what else the loop needs to go on: plain values, containers, tensors; no objects.
        Raises: ConfigError (no path, or commit_every=None; extra cannot be stored; the step is committed already);
        TierIOError, and then the last commit is still there; OtherRankError and RankError over several ranks, all of
        which have to call it, each with its own extra.
        """
        self._require_usable()
        self._attached.step_begins()
        self._commit(extra)

    def _commit_if_due(self) -> None:
        if self._commits.is_due(self._step):
            self._commit(None)

    def _commit(self, extra: object) -> None:
        prepare = self._attached.take_outside_writes
        try:
            with self._beside_others():
                self._commits.commit(prepare, self._step, self._ages, self.param_groups, extra)
        finally:
            if self._commits.final is not None:
                self._cut_off(self._commits.final)

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        """What all ranks do together: one that is interrupted in it (Ctrl-C) is elsewhere than the others."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if self._comm.size > 1:
                self._cut_off(error)
            raise

    def snapshot(self, *, keep: int | None = None) -> tuple[Path, ...]:
        """Keeps the last commit, which the next one would replace, for as long as you like.

        It is copied to a directory of its own in each directory of this run, or shares its blocks with the swap file
        where the file system can do that (XFS, Btrfs); `resume=[...]` and `offload inspect`, `verify`, `export` and
        `remove` take these directories as those of any run. Training goes on when it returns, and it is durable then.

        Args: keep: how many snapshots of this run stay, the newest ones, this one among them; None: all.
        Returns: the directories, one for each of this rank's in `path`.
        Raises: ResumeError (nothing was committed), ConfigError (keep), BudgetError (disk space), PathError (something
        else has its name), TierIOError, CorruptionError; OtherRankError and RankError over several ranks, all of which
        have to call it. The run and its last commit stay what they were.
        """
        self._require_usable()
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"keep={keep!r}: give a whole number, at least 1, or None to keep all")
        with self._beside_others():
            return self._commits.snapshot(keep)

    def rollback(self) -> None:
        """Goes back to the last commit, also after an error: states, parameters, hyper-parameters and step.

        Gradients are dropped. Schedulers, data and frozen parameters are the caller's. Over several ranks all have to
        call it, and none can after an error that the others did not have: they are elsewhere, and have to start again.
        Raises: ResumeError if nothing was committed; CorruptionError, TierIOError, OtherRankError, RankError.
        """
        is_elsewhere = self._comm.size > 1 and self._failure is not None
        if os.getpid() != self._pid or isinstance(self._failure, ClosedError) or is_elsewhere:
            self._require_usable()
        self._commits.require_last()
        try:
            self._attached.abandon()
            self._return_to_commit()
        except BaseException as error:
            self._failure = error
            raise
        self._failure = None
        self.zero_grad()

    def _return_to_commit(self) -> None:
        manifest = self._commits.restore()
        _take_groups(self.param_groups, manifest.groups)
        self._step = manifest.step
        self._ages = [facts.age for facts in manifest.parameters]

    def _begin_at(self, found: RecoveryPlan) -> None:
        if found.manifest is not None:
            self._return_to_commit()
            return
        committed = found.reader.manifests[0]
        ages = {param.name: param.age for param in committed.parameters}
        _take_groups(self.param_groups, committed.groups)
        self._step = committed.step
        self._ages = [ages[spec.name] for spec in self._layout.specs]
        self._commits.take_over(found, self._ages, self.param_groups)

    def export(self, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Writes the model as it is now, under its own names and in its own dtypes, as safetensors.

        The files are what `from_pretrained` of transformers and `safetensors` read; large models get several and an
        index. Returns: the files. Raises: PathError, BudgetError (disk space), ConfigError, TierIOError.
        """
        self._require_usable()
        self._attached.synchronize()
        state = self._model.state_dict()
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        return export(Path(directory), (_entry(name, tensor) for name, tensor in tensors.items()))

    # Torch's optimizer interface.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction: the layout, and with it the memory and disk reserved, is fixed."""
        if self._adopted:
            raise ConfigError("parameters cannot be added after OffloadZero took the model: make a new one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Groups, step and path; no tensors: those are in the tiers."""
        return _groups_state(self.param_groups, self._step, self._config.paths)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the groups' hyper-parameters. The tensors are not in it, so it must be of this very step.

        Raises: ResumeError if it is of another step, or its groups do not match.
        """
        _load_groups(self.param_groups, state_dict, self._step)

    # Living and ending.

    def synchronize(self) -> None:
        """Waits until nothing is under way on any tier. Raises what went wrong there."""
        self._require_usable()
        self._attached.synchronize()

    def close(self) -> None:
        """Ends the last step, unhooks the model, frees memory, files and their lock. May be called again.

        The model keeps its parameters in the compute dtype; what backward left in `p.grad` is dropped. Streamed ones
        are brought to the device, if all of them fit in `device_memory` and in half of what is free; if not, or if
        ranks partition them, they stay released, and any use of them raises ReleasedParameterError.
        """
        if os.getpid() != self._pid or isinstance(self._failure, ClosedError):
            return
        try:
            if self._failure is None:
                self._attached.landing.everything()
                self._commit_if_due()
                self._attached.keep_parameters(self._room_at_end())
        finally:
            self._failure = ClosedError("the optimizer is closed: make a new one")
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._comm.size > 1:
            self._cut_off(error)  # the other ranks may be elsewhere: nothing is done together any more
        # What is being raised is the cause; an error of the ending follows from it.
        with suppress(OffloadError) if error is not None else nullcontext():
            self.close()

    def __getstate__(self) -> NoReturn:
        raise ConfigError("OffloadZero cannot be copied or pickled: its states are in the tiers, not in it")

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this is a forked child: the optimizer works only in the process that made it")
        if isinstance(self._failure, OffloadError):
            raise self._failure
        if self._failure is not None:
            raise InterruptedStepError(
                f"a step was interrupted by {self._failure!r} and left some parameters a step further than others: "
                "start again"
            ) from self._failure
        try:
            self._commits.know()
            self._comm.check()
            for store in self._parts.stores:
                store.check()
        except OffloadError as error:
            self._cut_off(error)
            raise


@torch.no_grad()
def _take_groups(groups: Sequence[dict[str, Any]], committed: Sequence[Mapping[str, Option]]) -> None:
    """Gives param groups the hyper-parameters that were committed."""
    for group, options in zip(groups, committed, strict=True):
        for name, value in options.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def _groups_state(groups: Sequence[Mapping[str, Any]], step: int, paths: Sequence[Path]) -> dict[str, Any]:
    """See OffloadZero.state_dict."""
    params = [param for group in groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    names = [str(path) for path in paths]
    return {
        "state": {},
        "param_groups": [{**group, "params": [numbers[param] for param in group["params"]]} for group in groups],
        "step": step,
        "path": names[0] if len(names) == 1 else names or None,
    }


def _load_groups(groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any], step: int) -> None:
    """See OffloadZero.load_state_dict."""
    theirs = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if [len(group["params"]) for group in theirs] != sizes:
        raise ResumeError(f"the state dict's groups do not match the {len(sizes)} groups of {sizes} parameters")
    if state_dict.get("step") != step:
        raise ResumeError(
            f"the state dict is of step {state_dict.get('step')}, this optimizer is at step {step}, and masters and "
            "moments are not in a state dict: commit to a path, and give resume=True, for that"
        )
    for number, (group, other) in enumerate(zip(groups, theirs, strict=True)):
        kind = "decoupled_weight_decay"
        if other.get(kind, group[kind]) != group[kind]:
            raise ResumeError(f"param group {number} of the state dict is of {'AdamW' if other[kind] else 'Adam'}")
    require_sound([{**group, **other} for group, other in zip(groups, theirs, strict=True)])
    for group, other in zip(groups, theirs, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


def _checked(inverse: float) -> float:
    if not 0 < inverse < math.inf:
        raise ConfigError(
            f"the loss scale of the GradScaler is the inverse of {inverse}: it was halved at every step until nothing "
            "was left, or doubled for ever; look for the NaN or the zeros in the loss, and make a new GradScaler"
        )
    return inverse


def _not_unscaled(*, is_of_scaler: bool) -> ConfigError:
    if is_of_scaler:
        return ConfigError(
            "the gradients of this step are not those that scaler.unscale_(optimizer) has met: call it after the last "
            "backward of a step, on every rank, and scaler.update() before the next; nothing was changed"
        )
    return ConfigError(
        "fp16 gradients need a loss scale: run backward on scaler.scale(loss) of a torch.amp.GradScaler, then "
        "scaler.step(optimizer) and scaler.update(), or choose compute_dtype=torch.bfloat16; where no scale is meant, "
        "GradScaler(device, init_scale=1.0, growth_interval=2**31 - 1) says so; nothing was changed"
    )


def _clipped_too_early() -> ConfigError:
    return ConfigError(
        "clip_grad_norm_() came before the loss scale was divided out, and clipped the gradients of the scaled loss: "
        "call scaler.unscale_(optimizer) before it; nothing was changed, call zero_grad()"
    )


def _unscaled_twice() -> ConfigError:
    return ConfigError(
        "the loss scale would be divided out twice: call scaler.unscale_() once a step, with the optimizer that "
        "scaler.step() is called with; nothing was changed, call zero_grad()"
    )


def _entry(name: str, tensor: Tensor) -> Entry:
    def pieces() -> Iterator[memoryview]:
        yield memory_of(tensor.cpu())

    return Entry(name, tensor.dtype, tuple(tensor.shape), pieces)
