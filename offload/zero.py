"""OffloadZero: an ordinary torch optimizer whose states lie where there is room for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import Any, NamedTuple, Never, NoReturn, Self, overload

import torch
from torch import nn

from offload import comm, resuming, zero_commits
from offload import config as configuration
from offload.assembly import assemble
from offload.attachment import Attachment
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.options import stored
from offload.commits import Commits
from offload.config import Config, PathLike, Tuning
from offload.copies import Copier, copier_for
from offload.errors import (
    ClosedError,
    ConfigError,
    InterruptedStepError,
    OffloadError,
)
from offload.interrupts import uninterrupted
from offload.layout import Layout, build, tiled
from offload.module.hooks import require_free
from offload.module.materialise import Init, Source, is_meta, source_of
from offload.module.parameters import device_for, untrained_bytes
from offload.module.sharing import all_or_none, require_alike
from offload.module.units import compute_dtypes, rows_of, specs_of, stop_reducing, unwrapped
from offload.optim.adopt import NoStates, require_adoptable, retire
from offload.optim.adopt import unwrapped as unwrapped_optimizer
from offload.optim.step import StepKey
from offload.planner.choice import choose
from offload.planner.device import Room
from offload.planner.machine import free_memory
from offload.planner.placement import place
from offload.resuming import Resumed, Start
from offload.timeline import PHASES, Timeline
from offload.zero_commits import Committing
from offload.zero_looks import Looking
from offload.zero_scaling import Scaling


class _Plan(NamedTuple):
    """What is fixed before anything is allocated."""

    params: Sequence[nn.Parameter]
    device: torch.device
    copier: Copier
    room: Room
    wanted: Manifest


class OffloadZero(Scaling, Looking, Committing, torch.optim.Optimizer):
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
        self._comm = comm.connect(process_group, timeline=self._timeline)
        given = unwrapped_optimizer(optimizer)
        with ExitStack() as undo:
            with all_or_none(self._comm):
                require_free(model)
                given = torch.optim.AdamW(model.parameters()) if given is None else given
                source = source_of(init)
                plan = self._plan(given, source, device)
            undo.callback(self._comm.close)
            require_alike(self._comm, self._layout, self._config)
            start = resuming.find_together(undo, self._config, self._comm, self._layout, plan.wanted)
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
        wanted = resuming.describe(self._config, self._layout, params, kinds)
        return _Plan(params, device, copier, room, wanted)

    def _assemble(self, undo: ExitStack, plan: _Plan, start: Start) -> None:
        """Reserves memory and opens files. Raises as the constructor does; the model is not touched."""
        found = start.found
        beside = 0 if found is None else found.buffer_bytes
        self._placement = place(self._layout, self._config, direct=plan.copier.direct, room=plan.room, beside=beside)
        slots = None if found is None else found.slots
        is_aside = found is not None and slots is None
        run = (self._config, self._layout, self._placement, plan.params, plan.device, plan.copier)
        beginning = (slots, is_aside, start.run_id, start.held)
        self._parts = assemble(undo, *run, self._timeline, self._comm, *beginning)
        self._commits = Commits(self._config, self._layout, self._parts, plan.wanted, found)
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

    # Torch's optimizer interface.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction: the layout, and with it the memory and disk reserved, is fixed."""
        if self._adopted:
            raise ConfigError("parameters cannot be added after OffloadZero took the model: make a new one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Groups, step and path; no tensors: those are in the tiers."""
        return zero_commits.groups_state(self.param_groups, self._step, self._config.paths)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the groups' hyper-parameters. The tensors are not in it, so it must be of this very step.

        Raises: ResumeError if it is of another step, or its groups do not match.
        """
        zero_commits.load_groups(self.param_groups, state_dict, self._step)

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
