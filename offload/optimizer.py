"""OffloadZero: an ordinary torch optimizer whose states are kept where there is room for them.

[Note: a loss scale]
A GradScaler uses an optimizer in two ways:

- `scaler.unscale_(optimizer)` calls one torch function on all `p.grad`. The stand-ins there (model/gradient.py) call
  `_unscale`, which says whether a gradient is not finite and notes the inverse of the loss scale. The gradients stay
  as they are; the step multiplies them in fp32, as it does with the factor of clipping.
- `scaler.step(optimizer)` calls the same function with an inverse of 1, if nobody called `unscale_`, to learn whether
  the gradients are finite. It then calls `step()` in any case, as for all optimizers with `_step_supports_amp_scaling`.
  During that call the optimizer has two more attributes: `found_inf`, and the scale as `grad_scale`, which is None
  after `unscale_`.

The sums of squares, which tell whether gradients are finite, are those of all ranks. So all ranks skip a step together,
and their scalers stay alike.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Never, NoReturn, Self, overload
from uuid import uuid4

import torch
from torch import Tensor, nn

from offload import interrupts, torch_private
from offload.build import Parts, build, keep_base, plan_run, settle_trials
from offload.checkpoint import recovery
from offload.checkpoint.attached import RNG, Attached, Committed
from offload.checkpoint.commit import spelled
from offload.checkpoint.committer import Commits
from offload.checkpoint.export import export
from offload.checkpoint.extra import Carried, carried_in, memory_of, stored
from offload.checkpoint.manifest import ADAM, Manifest
from offload.checkpoint.recovery import RecoveryPlan, Resumed
from offload.checkpoint.shard_table import in_order_of_shards
from offload.checkpoint.tensors import Entry
from offload.devices.copies import DOWN, UP, require_not_recorded
from offload.entries import Entries, entry, exclusive_entry, not_compiled, training_entry
from offload.errors import (
    FEW_FILES,
    AccumulationError,
    BudgetError,
    ConfigError,
    NonFiniteGradientError,
    OffloadError,
    ResumeError,
)
from offload.health import Health
from offload.held_model import HeldModel, Values
from offload.interrupts import uninterrupted
from offload.io.files import unusable
from offload.layout import is_dithered
from offload.model import written_frozen
from offload.model.aliases import aliases_of
from offload.model.forgotten import Watch
from offload.model.hooks import require_free
from offload.model.inner import is_wrapper, kind_of
from offload.model.meta_init import Init, Source, check_source, source_of
from offload.model.original import Original
from offload.model.states import States
from offload.model.torch_helpers import Hook, numbered_alike
from offload.model.trace import recorded
from offload.model.units import stop_reducing, unwrapped
from offload.model.weights import Changes, Part
from offload.native import codes
from offload.optim.adopt import (
    defaults_of,
    groups_of,
    groups_state,
    load_groups,
    move_hooks,
    optimizers_of,
    require_matching,
    require_sound,
    retired,
    rules_of,
    take_options,
)
from offload.optim.chunk_work import StepKey
from offload.optim.frameworks import is_loading_a_checkpoint, warn_of_new_loop
from offload.optim.method import MethodCall
from offload.optim.rule import Progress, StepKind, like_of
from offload.optim.rules.adam import MOST_OF_CODES
from offload.options import Options, PathLike, Tuning
from offload.planner.advice import DeviceAdvice
from offload.planner.decide import commits_of
from offload.planner.placement import Most, Placement, place, units_that_stay
from offload.planner.prediction import Prediction
from offload.profiling import PHASES, Timeline
from offload.ranks import torch_distributed
from offload.ranks.agreement import all_gather_shards, require_alike, together
from offload.ranks.tensor_parallel import is_dtensor, local_of, mesh_of, whole_of
from offload.run import DISK, Expected, Owner
from offload.sizes import format_bytes
from offload.tiers import CPU, DEVICE

HANDED_OVER = ("grad_scale", "found_inf")
"""Attributes that an optimizer has while a GradScaler calls its step."""
_VARIANT = ("decoupled_weight_decay",)
"""The options of Adam's groups in which a commit has to be as the run: AdamW, or Adam."""
_SPANS = ("step_s", "apply_s", "adam_s", "gradient_s", "wait_nvme_s", "wait_device_s", "wait_cpu_s", "park_s")


class OffloadZero(torch.optim.Optimizer):
    """Trains `model` with a torch optimizer, with its fp32 states on the device, in RAM or on NVMe.

    The model is hooked in place. Its parameters become `compute_dtype` on the device to train on. Its class, its names
    and its `state_dict` keys stay. Masters are made from the values before that cast. The training loop stays ordinary
    PyTorch: whoever reads a parameter or a gradient gets its current value, and what is written to one in place counts,
    also while it is on another tier. docs/compatibility.md lists the exceptions.

    Example:
        The loop of plain PyTorch, with one more line:

            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            optimizer = OffloadZero(model, optimizer, tier="nvme", path="./run1", resume="auto")
            for inputs, targets in loader:
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()

    Args:
        model: any nn.Module with dense floating-point parameters on one device. If it is a DistributedDataParallel, the
            module inside is trained, and DDP's own reduction of gradients is switched off.
        optimizer: any fresh torch optimizer whose step looks at one parameter at a time, as AdamW, SGD, Muon or a class
            of your own, also as wrapped by Accelerate or Lightning. Any other is a ConfigError with the reason, and
            the model is not changed; docs/optimizers.md lists both. Its param groups are adopted (the same dicts), and
            hooks that were registered on it move along. Its own `step()` raises GradientMovedError from then on.
            Several in a list are one: one step, one clip, one commit. None: AdamW(model.parameters()).
        tier: where the optimizer states are: "device", "cpu" or "nvme". None: "nvme" if `path` is given, else "cpu".
        path: a directory for this run's swap files and commits, or several to stripe them over. A directory is made
            (mode 0700) if its parent exists.
        param_tier: where parameters are outside their unit's forward and backward: "device", "cpu" or "nvme";
            docs/tiers.md says what is different then. Frozen parameters always go there. Trained ones do, too, but
            for two cases: their states are on a faster tier, or they are so few that they stay on the device. None: the
            fastest that fits the budgets.
        grad_tier: where gradients wait for the step: "cpu" or "nvme"; on the device if the states are there. None: the
            fastest that fits the budgets.
        cpu_memory: the limit of RAM for everything that this library holds, in bytes or such as "48GiB". None: half of
            what is free.
        device_memory: the limit of device memory, in bytes or such as "48GiB", for the parameters and buffers that are
            there at once and for what `tier` puts there. Activations and gradients in transfer do not count. None: what
            the model takes there now, and half of what is free beside it.
        compute_dtype: the dtype of the parameters in the model: torch.bfloat16, torch.float32, or torch.float16, which
            needs a torch.amp.GradScaler.
        keep_fp32: modules, or module types, that stay fp32. Modules with running statistics (BatchNorm, spectral norm)
            always do.
        accumulation: how many backward passes come before each step. With more than one, gradients are summed in fp32.
            "auto": as many as come, with the bits of a fixed number of at least 2. See the attribute of that name.
        nonfinite: what a NaN or Inf in a gradient does: "raise" raises NonFiniteGradientError, "skip" skips the step
            and counts it.
        commit_every: how many steps come between commits; a commit is made at the start of the next step. 0: only
            `commit()` commits. None: there are no commits, which halves the disk space. "auto": 100 if a `path` is
            given, else None.
        resume: False: begin a new run. True: continue the run committed in `path`. "auto": continue it if there is one.
            A Path, or a list: the directories of the run, if they are not all in `path`. Where the layout differs
            (chunks, directories, ranks, split masters), the commit is first written in the new layout, and the old one
            is removed when that is committed. See `resumed`.
        resume_states: "committed": the run goes on with the states of its optimizer, which has to be of the same class
            and keep the same arrays in the same form. "convert": they become what `states` says, and are rounded where
            that is smaller; so do those of commits that `load_state_dict` goes to. "anew": it goes on with any
            optimizer, whose states and hyper-parameters begin anew, and the masters and the number of the step are
            those of the commit. Each resume with it begins them again.
        resume_transfer: whether slots that lie on the disk of another machine are sent to the rank that needs them, as
            where another number of ranks resumes. False: that is a ResumeError, which says how many bytes they are. No
            slot has to be sent where as many ranks resume, in whatever order the machines come.
        device: where to train a model that is on the CPU or on the meta device. It goes there a unit at a time, so it
            may be larger than the device. None: where it is; for the meta device, the CPU.
        init: where the values of a model come from that was built on the meta device: a function that is called with
            each name and tensor and fills the tensor; a directory with model.safetensors or its index; a safetensors
            file; or the index of several. None: `reset_parameters()` of its modules.
        init_missing: whether parameters without a value in the files are made by the model's own initialisation:
            `_init_weights(module)` or `reset_parameters()`. Buffers that are not saved are made so in any case.
        stage: the stage of ZeRO over several ranks of torch.distributed: 1, 2 or 3. None: 3 if parameters stream, else
            2.
        process_group: the data-parallel ranks, as a ProcessGroup or a DeviceMesh. Of a mesh with two dimensions, the
            second shards parameters (at stage 3), and the first replicates them. None: all ranks.
        cast_forward_inputs: whether floating-point inputs of the model's forward are cast to `compute_dtype`. False is
            for models that cast their inputs where they have to (time steps, positions).
        keep: how many of the commits that `state_dict()` has named stay, beside the last commit.
        lock_timeout: for how many seconds a directory is waited for whose lock names another machine, which may have
            been lost: a file server keeps its lock until a lease ends. What a run on this machine holds is not waited
            for.
        activation_tier: where activations wait between a forward and its backward: "device", "cpu" or "nvme". Only what
            enters a unit is kept, and the unit's forward runs again in its backward; see Tuning.recompute. What
            torch.utils.checkpoint keeps in the model waits there, too. None: they stay where they are made.
        activation_memory: the size of the region that is reserved for activations, in bytes or such as "4GiB". It is on
            the device, or in RAM, where it counts as `cpu_memory`. What does not fit on the device goes to a region of
            RAM, which is as large, but at most a quarter of what is left of `cpu_memory`. What does not fit in RAM goes
            to files in `path`; without a `path`, the forward raises BudgetError. None: a quarter of the RAM that is
            left, or no region where activations stay on the device that they are made on.
        partition_activations: with an `activation_tier` and tensor parallelism, whether each tensor-parallel rank keeps
            only a part of what enters a unit, where that is the same on all of them. It is gathered before the unit is
            recomputed.
        states: how Adam and AdamW keep their moments: "fp32", which is torch's own training; "bf16", 4 bytes of each
            parameter in place of 8; or "8bit", 2.03 bytes. The last two round moments up or down by random bits, which
            is another training (docs/small-states.md). Param groups of other optimizers keep fp32.
        tuning: options that only change speed, but for `tile`, which changes results within rounding.

    Raises:
        ConfigError: an option, or a combination of options, cannot work with this model.
        BudgetError: it does not fit in memory or on the disk.
        PathError: a directory or a file cannot be used; PathInUseError if a live run holds it.
        ResumeError: the run in `path` cannot be resumed, or would be overwritten.
        CorruptionError: bytes of the commit to resume are not those that were written.
        TierIOError: the disk failed.
        RankError: another rank does not take part.
        OtherRankError: the construction failed on another rank.

    After these, after any other exception, and after an interrupt the model is what it was. A few parameters may be
    lost then, because no copy of their values is left. These are NaN, and a note on the error names them:
    docs/errors.md says when.

    After `close()`, and in a forked child, methods that need the run raise ClosedError. After a failure that cut off a
    step or a transfer, they raise that failure again, or InterruptedStepError if it is none of this library's. A method
    that hears of an earlier failure of the device raises DeviceError. docs/errors.md says what helps.

    offload/optim/reference.py states the arithmetic of a step of Adam and AdamW. With torch's own settings fixed, the
    result has the same bits on every tier, with every budget and chunk size, on any number of kernel threads and with
    any instruction set. docs/exactness.md says what holds for other optimizers.
    """

    # Construct.

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        tier: str | None = None,
        path: PathLike | Sequence[PathLike] | None = None,
        param_tier: str | None = None,
        grad_tier: str | None = None,
        cpu_memory: int | str | None = None,
        device_memory: int | str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: Iterable[nn.Module | type[nn.Module]] = (),
        accumulation: int | str = 1,
        nonfinite: str = "raise",
        commit_every: int | str | None = "auto",
        resume: bool | str | PathLike | Sequence[PathLike] = False,
        resume_states: str = "committed",
        resume_transfer: bool = False,
        device: torch.device | str | None = None,
        init: Init = None,
        init_missing: bool = False,
        stage: int | None = None,
        process_group: object | None = None,
        cast_forward_inputs: bool = True,
        keep: int = 2,
        lock_timeout: float = 120.0,
        activation_tier: str | None = None,
        activation_memory: int | str | None = None,
        partition_activations: bool = False,
        states: str = "fp32",
        tuning: Tuning | None = None,
        **unknown: Never,
    ) -> None:
        options = Options.of(locals())  # each argument has the name of its option
        wrapper, model = model, unwrapped(model)
        self._model = model
        self._timeline = Timeline()
        self._health = Health()
        self._step = 0
        self._skipped = 0
        self._skips_nonfinite = options.nonfinite == "skip"
        self._has_warned = self._has_told = False
        self._first: _First | None = None
        self._adopted = False
        mesh = mesh_of(model.named_parameters()) if isinstance(model, nn.Module) else None
        self._comm = torch_distributed.connect(
            options.process_group, timeline=self._timeline, mesh=mesh, health=self._health
        )
        if options.partition_activations and self._comm.tensor_parallel.size == 1:
            raise ConfigError(
                "partition_activations=True, and no parameter is a DTensor that several ranks share: shard the model "
                "with torch's parallelize_module before, or leave it out"
            )
        # The ranks that agree and commit together; with tensor parallelism more than those that share states.
        self._everyone = self._comm.everyone
        self._health.is_shared = self._everyone.size > 1
        self._undo = undo = ExitStack()
        try:
            given, source, found = self._reserve(undo, optimizer, options)
            with together(self._everyone) as check:
                super().__init__(groups_of(given), defaults_of(given))
                move_hooks(given, self)
                self._adopted = True
                original = self._hold(undo, source, found, check)
            if self._prediction.is_counting:
                counts = Hook(self._prediction.forward_begins)
                handle = self._model.register_forward_pre_hook(counts, with_kwargs=True)
                undo.callback(numbered_alike(self._model, handle).remove)
            if found is not None:
                self._begin_at(found)
            with together(self._everyone) as check:
                self._take_over(undo, wrapper, given, found, check)
            self._advice.model_is_taken()
            original.kept = None  # the last instruction: no interrupt comes between it and the end
        except BaseException as error:
            self._give_back(error)
            if isinstance(error, OSError) and error.errno == errno.EMFILE:  # whatever it was opened for
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise BudgetError(
                    f"this process may have {limit} files open, and more are needed{FEW_FILES}, or close some",
                    needed=limit + 1,
                    available=limit,
                    option="ulimit -n",
                ) from error
            raise

    def _reserve(
        self,
        undo: ExitStack,
        given: Any,
        options: Options,
    ) -> tuple[list[torch.optim.Optimizer], Source, RecoveryPlan | None]:
        """Decides what is where, finds the commit to resume, and gets memory and files. The model stays as it is.

        Args:
            undo: gets what gives all of it back.
            given: the user's optimizer, or several; None: an AdamW is made.
            options: the arguments of the constructor.

        Returns:
            The optimizers to take over, where the values of the model come from, and the commit to resume, if any.
        """
        if torch.is_inference_mode_enabled():
            raise ConfigError(
                "OffloadZero was made inside torch.inference_mode(), where autograd takes no hooks: make it outside"
            )
        model, disk = self._model, DISK.get()
        files = disk.files()
        self._comm = in_order_of_shards(self._comm, commits_of(options), files)
        self._everyone = self._comm.everyone
        with together(self._everyone):
            require_free(model)
            given = optimizers_of(given, model)
            rules, groups = rules_of(given, options.states), groups_of(given)
            kinds = [{name: group[name] for name in _VARIANT if name in group} for group in groups]
            if options.every is not None:
                stored(groups)
            source = source_of(options.init, init_missing=options.init_missing)
            check_source(source, model)
            self._plan = plan_run(model, groups, rules, options, self._comm, files, source)
            self._choice, self._layout = self._plan.choice, self._plan.layout
            params = [one.param for one in self._plan.inners[: len(self._layout.specs)]]
            self._dithered = {n for n, spec in enumerate(self._layout.specs) if is_dithered(spec.states)}
            self._likes = [like_of(rules, spec) for spec in self._layout.specs]
            self._given = {param.dtype for param in params}
            frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
            wanted = recovery.describe(self._choice, self._layout, params, kinds, self._comm)
            if any(rule.name != ADAM for rule in rules):
                wanted = replace(wanted, rules=tuple(rule.name for rule in rules))
        interrupts.hold()
        undo.callback(interrupts.give_back)  # last: an interrupt in what is undone before is deferred
        undo.callback(self._comm.close)
        require_alike(self._comm, self._plan.held, self._choice)
        commits = self._choice.commits
        # What nobody foresaw of a file system still is an error of these directories. No code of the user's runs here.
        no_use = partial(unusable, "cannot be used", " or ".join(map(str, commits.paths)))
        with no_use():
            start = recovery.find_together(undo, commits, self._everyone, self._layout, wanted, files, frozen)
        found = start.found
        self._plan = settle_trials(self._plan, start, self._everyone)
        self._choice = self._plan.choice
        wanted = replace(wanted, places=self._choice.slots_per_chunk)
        self._placement = self._place(0 if found is None else found.buffer_bytes)
        self._plan = keep_base(self._plan, model, source, self._comm, disk, start.files)
        if (base := self._plan.base) is not None:
            wanted = replace(wanted, base=(spelled(base.directory), base.path.name))
        with no_use(), together(self._everyone):
            self._parts = parts = build(
                undo, self._plan, self._placement, start, self._comm, self._timeline, disk.open_engine, self._health
            )
            self._commits = Commits(
                parts.run, parts.slots, parts.stores, parts.masters, parts.new_params, wanted, found
            )
            undo.callback(self._commits.stop_copy)
            self._commits.read_ahead()
            if parts.slots is not None and found is None:
                parts.slots.shut_out_older()
        if parts.base is not None and not self._everyone.all_equal(parts.base.digest):
            raise ConfigError(
                f"{self._plan.base.path} has other values on some ranks, since their machines do not quantise alike: "  # type: ignore[union-attr]
                "remove it there, and copy that of one machine to all others"
            )
        plan = self._plan
        self._prediction = Prediction(plan.held, self._placement, plan.work, plan.here, parts.run.paths)
        own_bytes = partial(_own_bytes, self._placement.resident_bytes, parts)
        self._advice = DeviceAdvice(self._plan.held, self._placement, self._plan.room, self._plan.copier, own_bytes)
        # At the end of the process, too: what a backward raises nobody else may see.
        undo.callback(weakref.finalize(self, _tell_at_exit, weakref.ref(self._advice)).detach)
        return given, source, found

    @uninterrupted
    def _give_back(self, error: BaseException) -> None:
        """Undoes what a construction that failed has done so far; original.py says what becomes of the model."""
        self._undo.__exit__(type(error), error, error.__traceback__)

    def _hold(self, undo: ExitStack, source: Source, found: RecoveryPlan | None, check: Callable[[], None]) -> Original:
        """Takes the model: its parameters go to their tiers, those that are in no commit with their values.

        Args:
            undo: gets what gives the model back.
            source: where the values of a model on the meta device come from.
            found: the commit to resume; None: there is none.
            check: called before values travel. It raises if another rank has failed.

        Returns:
            What gives the model back, until it forgets what the model was.
        """
        self._owner = Owner(
            step=lambda: self._step,
            require_usable=self._require_usable,
            collect=self._finalize_gradients,
            unscale=self._unscale,
            expected=self._expected,
            forward_failed=self._advice.note,
        )
        parts, aliases = self._parts, aliases_of(self._model, self._plan.moved)
        if parts.step.trials is not None:
            parts.step.trials.owner = self._owner
        undo.push(original := Original(self._model, parts.parameters, parts.masters, aliases))
        values = Values(source, check)
        if found is not None:
            found = found.with_frozen({spec.name for spec in self._layout.specs})
            frozen = found.extra.attached.get(written_frozen.NAME)
            written_frozen.write(self._model, frozen, original.keep)
            values = Values(source, check, {param.name for param in found.first.parameters}, frozen)
        self._held = HeldModel(self._model, parts, self._placement, values, self._owner, original, undo)
        self._attached = Attached(_committed(found))
        self._resumed = None if found is None else Resumed(found.commit.step, found.extra.extra)
        self._take_initial_progress()
        self._is_loop_resumed = found is None
        return original

    def _take_over(
        self,
        undo: ExitStack,
        wrapper: nn.Module,
        given: Sequence[torch.optim.Optimizer],
        found: RecoveryPlan | None,
        check: Callable[[], None],
    ) -> None:
        """Takes what is left, once states and parameters have the values that they begin with.

        Args:
            undo: gets what lets go of all of it.
            wrapper: the model, or what is around it.
            given: the optimizers to take over.
            found: the commit to resume; None: there is none.
            check: see `_hold`.
        """
        streams = any(spec.is_frozen for spec in self._plan.held.specs) and self._choice.commits.every is not None
        if streams or written_frozen.NAME in self._attached.committed_names:
            carries = self._held.written_frozen(self._placement.budget_bytes)
            self._attach({written_frozen.NAME: carries}, undo)
        self._watch = Watch(self._model, self.param_groups, self._held.answers.is_live_of)
        undo.callback(self._watch.settle)
        stop_reducing(wrapper, undo)
        for one in given:
            undo.enter_context(retired(one))
        with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            paths, left = self._parts.run.paths, self._plan.unquantised
            line = self._placement.describe(self._plan.held, paths, self._given, left)
            print(line + self._prediction.words, file=sys.stderr)
            if self._everyone.size > self._everyone.ranks_on_node:
                print(
                    "offload: ranks on several machines: one that is lost is found after "
                    f"{self._everyone.timeout_s:.0f} s; a shorter init_process_group(timeout=...) finds it sooner",
                    file=sys.stderr,
                )
            if found is not None:
                states = "; the optimizer's states begin anew" if found.begins_states else ""
                at = f"step {self._step}, committed {found.committed_at}"
                print(f"offload: resumed at {at}{states}", file=sys.stderr)
        self._held.take_others(check)
        self._changes = Changes(self._parts.parameters, self._model.parameters(), self._step)
        if self._parts.slots is not None and (found is None or self._choice.commits.every is not None):
            self._parts.slots.make_permanent()

    def _place(self, reserved: int) -> Placement:
        """Decides what is where. On the device ranks have alike what each of them has room for.

        Ranks that share parameters fetch them in one order, so they apply the updates of a step at one place, too.

        Args:
            reserved: bytes of RAM to leave free.

        Raises:
            BudgetError: if there is no room.
            RankError: another rank failed.
        """
        plan, choice = self._plan, self._choice
        placed = partial(place, plan.held, choice, direct=plan.copier.direct, room=plan.room, reserved=reserved)
        with together(self._everyone):
            placement = placed()
        may_differ = choice.params.streams or (choice.states.shares and not plan.copier.direct)
        if self._comm.size == 1 or not may_differ:
            return placement
        with together(self._everyone):  # ranks of another slice may need no turn, and hear of an error in one here
            rows = self._on_devices(placement)
            while bool((rows[1:] != rows[0])[:, 1:].any()):  # each turn some rank has less there
                on_all = frozenset(rows[:, 2:].all(0).nonzero().flatten().tolist())
                with together(self._comm):  # the RAM that is free may be less by now
                    placement = placed(most=Most(int(rows[:, 1].min()), on_all))
                rows = self._on_devices(placement)
        return replace(placement, uses_disk=bool(rows[:, 0].any()))

    def _on_devices(self, placement: Placement) -> Tensor:
        """What each rank has on its device.

        Returns:
            Shape (ranks, 2 + flats): whether its steps use a disk; how many units stay; for each flat parameter,
            whether its states and gradients are there.
        """
        flats = [flat.index in placement.device_flats for flat in self._layout.flats]
        own = torch.tensor([placement.uses_disk, len(placement.staying), *flats], device="cpu")
        return self._comm.all_gather(own)

    # Step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @not_compiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step of the optimizer for every parameter that has a gradient, and consumes the gradients.

        It fixes the gradients, their scale and the hyper-parameters, queues the work, and returns. The new value of a
        parameter is applied when somebody uses the parameter next. Where states are in RAM and the model is on the CPU,
        all values are applied when this returns. A commit that is due is made first.

        A GradScaler calls it, too (`scaler.step(optimizer)`). Then a step whose gradients are not finite is skipped,
        whatever `nonfinite` says. Over several ranks all have to call it.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What `closure` returns; None without one.

        Raises:
            NonFiniteGradientError: a gradient has NaN or Inf, and `nonfinite` is "raise". The state is untouched.
            ConfigError: a hyper-parameter is out of range; a parameter of the model was replaced, added or unfrozen;
                fp16 is trained without a GradScaler, or with one that is used in a wrong order; it is recorded into a
                graph of the device; or several ranks are about to step differently. Nothing is changed.
            AccumulationError: over several ranks, some dropped gradients that others use.
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            StaleActivationError: with partition_activations, the tensor-parallel ranks had different batches. The state
                is untouched.
            PathError: for a commit that is due, a directory or a swap file was moved, removed or cut off.
            BudgetError: for a commit that is due, the disk has no space for a snapshot of the one before, which a state
                dict names.
            PathInUseError: another run has taken a directory, on a file system whose locks do not reach its machine.
                Nothing is changed.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: a commit that is due failed on another rank.
            RankError: another rank does not take part.
        """
        callback = torch_private.set_frame_callback(None)
        try:
            require_not_recorded(self._parts.parameters.device, "step()")
            self._watch.settle()
            if not self._is_loop_resumed:
                self._is_loop_resumed = True
                warn_of_new_loop(self._step)
            with self._forgetting_the_scaler():
                self._require_usable()
                loss = None
                if closure is not None:
                    if not callable(closure):
                        raise ConfigError(
                            f"step({closure!r}): give a function that evaluates the model and returns the loss, or "
                            "nothing"
                        )
                    with torch.enable_grad():
                        loss = closure()
                self._attached.step_begins(self.param_groups)
                if self._is_commit_due():
                    self._attached.capture_rest()
                with self._timeline.span("step_s"), self._timeline.event(PHASES, "step"):
                    self._take_step()
                    self._capture_if_due()
            lines = self._advice.step_ends(), self._prediction.step_ends(self._timeline, self._plan.copier)
            if self._everyone.user_rank == 0:
                for line in lines:
                    _tell(line)
            return loss
        finally:
            torch_private.set_frame_callback(callback)

    @training_entry
    def _take_step(self) -> None:
        self._require_usable()
        self._held.step_begins()
        # First, because ranks may have sent different gradients so far: from here on all have sent the same.
        active = self._finalize_gradients()
        self._end_trials()
        self._commit_if_due()
        update = self._agreed_update(active) if self._is_to_step(active) else None
        if update is not None and not self._fits_states(active, update.factor):
            update = None
        if update is not None:
            self._held.take_outside_writes()
            self._commit_first()
        self._advance(active, update)
        self._held.step_ends()

    def _finalize_gradients(self) -> list[int]:
        """Waits for the gradients.

        Returns:
            The numbers of the parameters that have one on any rank.
        """
        torch_private.past_subclasses(self._parts.parameters.require_unchanged, self._model, self.param_groups)
        self._held.pending.before_gradients()
        self._held.answers.require_whole()
        self._held.answers.take_changes()
        return self._parts.gradients.finalize(self._held.answers.active)

    @uninterrupted
    def _advance(self, active: Sequence[int], update: _Update | None) -> None:
        """Makes all changes of a step, or none of them.

        Args:
            active: the numbers of the parameters that have a gradient.
            update: what the step does; None: it is skipped.
        """
        try:
            if update is None:
                self._skipped += 1
            else:
                self._begin_step(active, update)
            self._consume(active)
        except BaseException as error:
            self._health.fail(error)  # what another thread throws in comes between any two of these changes
            raise

    def _expected(self) -> Expected:
        """What is expected of the step whose first gradient comes: what clips nothing, and unscales as the last one."""
        scale = self._parts.scale
        return Expected(self._step + 1, self.param_groups, scale.usual, self._key_of, scale.most_squares)

    def _key_of(self, number: int) -> StepKey:
        """What decides, for the elements of a parameter, how a step changes them."""
        progress = self._parts.parameters.held[number].progress
        return StepKey(self._layout.groups[number], progress, self._parts.scale.relative(number))

    def _end_trials(self) -> None:
        if self._parts.step.trials is not None:
            self._parts.step.trials.end()

    def _trials_paused(self) -> AbstractContextManager[None]:
        trials = self._parts.step.trials
        return nullcontext() if trials is None else trials.paused()

    def _begin_step(self, active: Sequence[int], update: _Update) -> None:
        keys = {n: self._key_of(n) for n in active}
        flats = self._held.pending.begin(active)
        self._parts.step.begin(self._step + 1, keys, self.param_groups, update.factor, flats)
        self._step += 1
        self._changes.step_ends(active, self._step)
        self._parts.scale.step_begins(update.factor)
        self._make_changes(active, update.changes)

    def _make_changes(self, numbers: Iterable[int], changes: _Changes) -> None:
        """Gives parameters their new progress, and param groups the options that have changed with it.

        Args:
            numbers: the parameters that have changed.
            changes: what becomes of each group and progress of theirs.
        """
        held = self._parts.parameters.held
        for number in numbers:
            held[number].progress = changes[self._step_kind(number)][0]
        for kind, (_, changed) in changes.items():
            self.param_groups[kind.group].update(changed)

    def _advanced(self, active: Iterable[int]) -> _Changes:
        """What a step makes of the progress of parameters, and which options it changes. Nothing is changed.

        Args:
            active: the numbers of the parameters that have a gradient.

        Raises:
            ConfigError: an optimizer refuses its options.
        """
        found = dict.fromkeys(map(self._step_kind, active))  # alike on all ranks
        rules, groups = self._plan.rules, self.param_groups
        return {one: rules[one.group].advance(groups[one.group], one.before, one.like) for one in found}

    def _step_kind(self, number: int) -> StepKind:
        """What decides how a parameter goes on."""
        return StepKind(self._layout.groups[number], self._parts.parameters.held[number].progress, self._likes[number])

    @training_entry
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step.

        Args:
            set_to_none: False: the gradients that there were become zeros, which the next step uses.
        """
        with torch_private.PastSubclasses():
            had = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            super().zero_grad(set_to_none=True)
        if self._adopted:
            self._consume()
            self._held.answers.become_zeros([] if set_to_none else had)
            self._held.answers.drop()
            _tell(self._advice.gradients_are_dropped())

    # Other methods of the optimizer's class.

    @exclusive_entry("apply")
    def apply(self, method: str) -> None:
        """Runs another method of the class of the optimizer that was taken, over parameters and states.

        So schedule-free optimizers go to the averaged weights and back:

            optimizer.apply("eval")
            evaluate(model)
            optimizer.apply("train")

        It runs on pieces of the masters or on whole parameters, as the step does, and the model has the new values when
        it returns. Options that it changes are changed in the param groups. It sees no gradients, and those that wait
        for the step stay what they are. What it returns is dropped. Of several optimizers, those whose class has the
        method run it. Over several ranks all have to call it.

        Args:
            method: the name of a method without arguments, which is the class's own: not of torch.optim.Optimizer.

        Raises:
            ConfigError: no class has the method; it raises; it cannot run on pieces of parameters; or several ranks are
                about to apply different ones. Nothing is changed.
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it cannot run on another rank.
            RankError: another rank does not take part.
        """
        self._require_usable()
        everyone, progress = self._everyone, self._parts.parameters.progress
        with together(everyone):
            call = MethodCall(method, self._plan.rules, self.param_groups, self._layout, progress)
        if everyone.size > 1 and not everyone.all_equal(repr((method, self._agreed_options))):
            raise ConfigError(
                f"apply({method!r}): the ranks differ in the method, or in the hyper-parameters of the optimizer: call "
                "it alike on every rank; nothing was changed"
            )
        self._held.step_begins()
        self._held.take_outside_writes()
        self._commit_first()
        with self._trials_paused(), self._together():
            self._apply(call)

    def _apply(self, call: MethodCall) -> None:
        try:
            self._commits.is_outdated = True
            self._changes.all_changed()
            self._held.run(call, self._step)
            self._make_all_changes(call)
        except BaseException as error:
            self._health.fail(error)  # some masters have changed, and others have not
            raise

    @uninterrupted
    def _make_all_changes(self, call: MethodCall) -> None:
        self._make_changes(call.keys, call.changes)

    # Clip and scale.

    @training_entry
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of this step to a 2-norm of `max_norm`, over all parameters together.

        With a GradScaler, call it after `scaler.unscale_(optimizer)`. It costs no pass over the gradients: the factor,
        torch's `min(1, max_norm / (norm + 1e-6))`, is applied in the step. A gradient that comes after this call raises
        AccumulationError. Over several ranks all have to call it.

        Args:
            max_norm: the largest norm that the gradients have afterwards, at least 0.

        Returns:
            The norm before clipping (and after unscaling), a 0-dim fp32 CPU tensor.

        Raises:
            NonFiniteGradientError: a gradient has NaN or Inf, and `nonfinite` is "raise". Not where a GradScaler has
                unscaled the gradients, which then skips the step.
            ConfigError: `max_norm` is no number of at least 0, or fp16 gradients were not unscaled.
            AccumulationError: over several ranks, some dropped gradients that others use.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            RankError: another rank does not take part.
        """
        self._require_usable()
        try:
            is_limit = float(max_norm) >= 0
        except (TypeError, ValueError, RuntimeError):
            is_limit = False
        if not is_limit:
            raise ConfigError(f"max_norm={max_norm!r}: give a number, at least 0")
        gradients, scale, active = self._parts.gradients, self._parts.scale, self._finalize_gradients()
        if scale.unscaled is None:
            if active and self._choice.model.compute_dtype is torch.float16:
                raise ConfigError(
                    "clip_grad_norm_() of fp16 gradients that are not unscaled yet: call scaler.unscale_(optimizer) of "
                    "a torch.amp.GradScaler before, on every rank, after a backward of scaler.scale(loss)"
                )
            self._all_finite(active)
        norm = gradients.norm(active) * scale.common
        if not scale.is_common:
            each = zip(active, gradients.norms(active), strict=True)
            norm = math.sqrt(math.fsum((scale.of(number) * one) ** 2 for number, one in each))
        scale.clip_to(float(max_norm), norm)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    @property
    def entries(self) -> Entries:
        """The threads that use the model, for other parts of this library."""
        return self._parts.run.entries

    @property
    def _streams(self) -> bool:
        """Whether parameters stream."""
        return self._parts.parameters.streams_any

    @property
    def _is_of_scaler(self) -> bool:
        """Whether it is a GradScaler that calls the step."""
        return "found_inf" in vars(self)

    def _unscale(self, found_inf: Tensor, inverse: Tensor) -> None:
        """Answers a GradScaler; see [Note: a loss scale].

        Args:
            found_inf: a 0-dim fp32 tensor; it becomes 1 if a gradient is not finite.
            inverse: the inverse of the loss scale, a 0-dim fp32 tensor.

        Raises:
            ConfigError: the inverse is no positive finite number, the loss scale would be divided out twice, or the
                gradients were clipped before.
        """
        self._require_usable()
        active, by = self._finalize_gradients(), inverse.item()
        self._parts.scale.common_if_unscaled(by)  # raises before anything is changed
        if not math.isfinite(self._parts.gradients.norm(active)):
            found_inf.fill_(1.0)
        self._parts.scale.unscale(by)

    @contextmanager
    def _forgetting_the_scaler(self) -> Iterator[None]:
        """Removes what a GradScaler has set on the optimizer, if the step in the body raises.

        The scaler itself removes it only after a step that returns. What is left would be multiplied into the next
        step's scale.
        """
        try:
            yield
        except BaseException:
            handed = [vars(self).pop(name, None) for name in HANDED_OVER]
            if handed[0] is not None:
                self._parts.scale.take_back_unit()
            raise

    def _is_to_step(self, active: Sequence[int]) -> bool:
        """Whether this step is made, and not skipped.

        Args:
            active: the numbers of the parameters that have a gradient.

        Raises:
            NonFiniteGradientError: a gradient is not finite, `nonfinite` is "raise", and no GradScaler calls the step.
        """
        if self._is_of_scaler:
            return math.isfinite(self._parts.gradients.norm(active))
        return self._all_finite(active)

    def _all_finite(self, active: Sequence[int]) -> bool:
        gradients = self._parts.gradients
        bad = gradients.not_finite(active)
        bad = bad or [number for number in active if not math.isfinite(self._parts.scale.of(number))]
        if bad and not self._skips_nonfinite:
            name = self._layout.specs[bad[0]].name
            others = f" and in {len(bad) - 1} more parameters" if len(bad) > 1 else ""
            # Of a released parameter, what reads past torch's functions sees NaN.
            view = "; or a module keeps a view of a streamed weight: take it in each forward" if self._streams else ""
            raise NonFiniteGradientError(
                f"NaN or Inf in the gradient of {name}{others}; the optimizer's state is untouched: call zero_grad() "
                f'and go on with the next batch, or choose nonfinite="skip"{view}',
                parameter=name,
            )
        return not bad

    def _fits_states(self, active: Sequence[int], factor: float) -> bool:
        """Whether no gradient is too large for moments in codes, or the step is skipped.

        A gradient counts with the weight decay that the step adds to it.

        Args:
            active: the numbers of the parameters that have a gradient.
            factor: the factor of all gradients.

        Raises:
            NonFiniteGradientError: one is too large, and `nonfinite` is "raise".
        """
        if not self._dithered:
            return True
        scale, gradients = self._parts.scale, self._parts.gradients
        those = [number for number in active if number in self._dithered]
        decays = self._decays(those)
        largest = max((abs(scale.relative(number)) for number in those), default=0.0) * abs(factor)
        if gradients.norm(active) * largest + sum(decays.values()) < MOST_OF_CODES:
            return True
        norms = zip(those, gradients.norms(those), strict=True)
        sizes = {number: norm * abs(factor * scale.relative(number)) for number, norm in norms}
        # A NaN, which only a weight can be here, is no smaller either.
        bad = [number for number in those if not sizes[number] + decays.get(number, 0.0) < MOST_OF_CODES]
        if bad and not self._skips_nonfinite:
            name = self._layout.specs[bad[0]].name
            has_decay, way_out = "", "clip gradients, or call"
            if bad[0] in decays and sizes[bad[0]] < MOST_OF_CODES:
                has_decay = f", with its weight decay of up to {decays[bad[0]]:.3g},"
                way_out = "look at these weights; to go on without this batch, call"
            raise NonFiniteGradientError(
                f"the gradient of {name}{has_decay} has a norm of {MOST_OF_CODES:.3g} or more, and its square has no "
                f'room in states="{self._choice.states.form}"; the optimizer\'s state is untouched: {way_out} '
                'zero_grad() and go on with the next batch, or choose nonfinite="skip"',
                parameter=name,
            )
        return not bad

    def _decays(self, numbers: Sequence[int]) -> dict[int, float]:
        """The most that a step adds to an element of a gradient as weight decay, of each parameter where it does.

        It takes a pass over these parameters, which fetches those that stream. All ranks call it alike.
        """
        groups, rules = self._layout.groups, self._plan.rules
        factors = {n: rules[groups[n]].decay_in_gradient(self.param_groups[groups[n]]) for n in numbers}
        decayed = [number for number, factor in factors.items() if factor and self._layout.specs[number].numel]
        largest = []
        for number in decayed:
            held = self._parts.parameters.held[number]
            with (
                self._held.access.gathered(held.tensor, writable=False),
                torch_private.PastSubclasses(),
                torch.no_grad(),
            ):
                largest.append(torch.linalg.vector_norm(held.local, math.inf).double().cpu())
        if decayed and self._everyone.size > 1:
            largest = list(self._everyone.all_gather(torch.stack(largest)).amax(0))
        # A master is the parameter before it was rounded, by 2^-8 of it at most.
        return {n: factors[n] * float(one) * (1 + 2**-7) for n, one in zip(decayed, largest, strict=True)}

    def _agreed_update(self, active: Sequence[int]) -> _Update | None:
        """What the step does, the same on all ranks. Nothing is changed.

        Args:
            active: the numbers of the parameters that have a gradient.

        Returns:
            What it does; None: a GradScaler has found an Inf elsewhere, and the step is skipped.

        Raises:
            ConfigError: on all ranks, if one of them cannot step, or they would step differently.
            AccumulationError: if this rank has dropped a gradient by hand that ranks have averaged.
            PathInUseError: if another run has taken a directory of this rank.
            RankError: another rank failed, or cannot be reached.
        """
        update = _Update(math.nan, {})
        fault: Exception | None = None
        try:
            self._parts.run.claims.require_ours()
            if self._everyone.size > 1:
                self._require_kept(active)
            require_sound(self._plan.rules, self.param_groups)
            changes = self._advanced(active)
            if self._choice.commits.every is not None:
                stored(self.param_groups)  # now, and not when the commit is due
            update = _Update(self._factor(active), changes)
        except Exception as error:
            fault = error
        skips = bool(vars(self).get("found_inf", 0.0))
        if self._everyone.size > 1:
            names = [spec.name for spec in self._layout.specs]
            # A rank that cannot step agrees with none, so all of them raise.
            numbers = None if fault is not None else [update.factor, *self._agreed_options]
            have = self._held.answers.active
            if not self._parts.scale.agree(self._everyone, have, names, repr((numbers, skips))) and fault is None:
                fault = ConfigError(
                    "the ranks differ in the hyper-parameters of this step, or in how its gradients are clipped or "
                    "scaled, or one of them cannot step and says why: set param groups, call clip_grad_norm_ and use a "
                    "GradScaler alike on every rank, then step() again; nothing was changed"
                )
        if fault is not None:
            raise fault
        return None if skips else update

    def _require_kept(self, active: Sequence[int]) -> None:
        """Requires that no gradient of this rank which ranks have averaged was dropped by hand.

        Args:
            active: the numbers of the parameters that have a gradient on any rank, as they were when that was asked.

        Raises:
            AccumulationError: naming the parameter. Nothing is changed.
        """
        answers = self._held.answers
        for number in active:
            if answers.is_live(number) and not answers.has(number):
                raise AccumulationError(
                    f"the gradient of {self._layout.specs[number].name} was dropped by hand and is a part of the "
                    "average over the ranks: drop it on every rank, after the last backward and before "
                    "clip_grad_norm_(), a norm or grad() is asked for, or all of them with optimizer.zero_grad(); "
                    "nothing was changed"
                )

    @property
    def _agreed_options(self) -> list[Hashable]:
        """What of the param groups has to be the same on all ranks."""
        return [rule.agreed(group) for rule, group in zip(self._plan.rules, self.param_groups, strict=True)]

    def _factor(self, active: Sequence[int]) -> float:
        scale, handed = self._parts.scale, vars(self).get("grad_scale")
        if handed is not None:
            # In fp32, as `unscale_` gives it.
            return scale.common_if_unscaled(handed.double().reciprocal().float().item())
        if active and scale.unscaled is None and self._is_of_scaler:
            raise ConfigError(
                "the gradients of this step are not those that scaler.unscale_(optimizer) has met: call it after the "
                "last backward of a step, on every rank, and scaler.update() before the next; nothing was changed"
            )
        if active and scale.unscaled is None and self._choice.model.compute_dtype is torch.float16:
            raise ConfigError(
                "fp16 gradients need a loss scale: run backward on scaler.scale(loss) of a torch.amp.GradScaler, then "
                "scaler.step(optimizer) and scaler.update(), or choose compute_dtype=torch.bfloat16; where no scale is "
                "meant, GradScaler(device, init_scale=1.0, growth_interval=2**31 - 1) says so; nothing was changed"
            )
        return scale.common

    @property
    def accumulation(self) -> int | str:
        """How many backward passes come before each step, at most; "auto": as many as come.

        If OffloadZero was made with accumulation="auto", it can be set to a number, and to "auto" again, between steps
        and on all ranks alike. One more backward than that number then raises AccumulationError. Over several ranks the
        number saves a message after each backward, and at stage 1 gradients may leave during the last one. If
        OffloadZero was made with a number, it can be set to a smaller one, which changes nothing.

        Raises:
            ConfigError: it is set to what is no number of at least 1 and not "auto", to more than OffloadZero was made
                for, or between a backward and its step.
        """
        most = self._parts.gradients.micro_batches.most
        return "auto" if most is None else most

    @accumulation.setter
    @entry
    def accumulation(self, micro_batches: int | str) -> None:
        self._require_usable()
        is_number = isinstance(micro_batches, int) and not isinstance(micro_batches, bool) and micro_batches >= 1
        if not is_number and micro_batches != "auto":
            raise ConfigError(f'accumulation={micro_batches!r}: give a whole number, at least 1, or "auto"')
        most = micro_batches if isinstance(micro_batches, int) else None
        if not self._choice.grads.takes_any:
            if most is None or most > self._choice.grads.micro_batches:
                many = "any number of" if most is None else most
                other = "" if most is None else ', or "auto"'
                raise ConfigError(
                    f"accumulation={self._choice.grads.micro_batches}, and {many} backward passes are to come before "
                    f"each step: give OffloadZero accumulation={micro_batches!r}{other}"
                )
            return
        if most != self._parts.gradients.micro_batches.most:
            if self._held.answers.active:
                raise ConfigError(
                    f"accumulation={micro_batches!r} between a backward and its step: set it before the backward"
                )
            self._parts.gradients.micro_batches.declare(most)

    def _consume(self, used: Sequence[int] = ()) -> None:
        """Clears the gradients.

        Args:
            used: the numbers of the parameters whose gradients a step has used.
        """
        self._held.answers.begin_anew(used)
        self._parts.scale.reset()
        self._parts.gradients.clear_all()
        if self._parts.step.trials is not None:
            self._parts.step.trials.begin_anew()

    # Look.

    @property  # type: ignore[override]
    def state(self) -> States:
        """The states of each parameter that was stepped, as a torch optimizer has them.

        It is a mapping from a parameter to what the optimizer's class names, for Adam "step", "exp_avg" and
        "exp_avg_sq". They are read when they are used, one parameter at a time, as by `state_of`, and cannot be
        written to.

        Raises:
            ConfigError: it is replaced.
        """
        return States(self.param_groups, weakref.WeakMethod(self._shown_states), weakref.WeakMethod(self.state_of))

    @state.setter
    def state(self, value: object) -> None:
        if self._adopted:  # and not torch, which makes an empty one
            raise ConfigError(
                "optimizer.state cannot be replaced: the states are in the tiers; make a new OffloadZero, whose states "
                "begin with zeros, or go back to a commit with rollback()"
            )

    @exclusive_entry("grad")
    def grad(self, param: Tensor) -> Tensor | None:
        """The gradient of `param` as the next step will use it.

        It is summed over micro-batches. It is unscaled and clipped if `scaler.unscale_` and `clip_grad_norm_` were
        called; before `unscale_` it is that of the scaled loss. Over several ranks all have to call it.

        Args:
            param: a trained parameter of the model.

        Returns:
            A copy, an fp32 CPU tensor of the parameter's shape; None without a gradient.

        Raises:
            ConfigError: the tensor is no trained parameter.
            AccumulationError: over several ranks, some dropped gradients that others use.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it failed on another rank.
            RankError: another rank does not take part.
        """
        self._require_usable()
        number = self._number(param)
        if not self._has_gradient(number):
            return None
        first, last = self._layout.param_shard_range(number)
        view = torch.empty(self._layout.specs[number].numel, dtype=torch.float32, device="cpu")
        with together(self._everyone):
            view[first:last] = self._parts.gradients.values(number).float() * self._parts.scale.of(number)
        all_gather_shards(self._comm, self._layout, number, [view])
        return self._whole(number, view)

    def _has_gradient(self, number: int) -> bool:
        """Whether a parameter has a gradient, on any rank, which is final then."""
        if self._everyone.size > 1:
            return number in self._finalize_gradients()
        self._held.answers.require_whole()
        self._held.answers.take_changes([number])
        return bool(self._parts.gradients.finalize([number] if self._held.answers.has(number) else []))

    def gathered(
        self, module_or_params: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False
    ) -> AbstractContextManager[None]:
        """`with optimizer.gathered(model.head):` keeps these parameters on the device, with their current values.

        Where several ranks share the parameters, all of them have to enter it, in the thread that trains.

        Args:
            module_or_params: a module, for all its parameters, or parameters.
            writable: whether to look, at the end, for writes that bypass torch (NumPy). Other writes count in any case.

        Returns:
            A context manager.

        Raises:
            ConfigError: a tensor is no parameter of the model.
            BudgetError: it is entered by a thread beside the one that trains, and `device_memory` has no room for them.
            ReleasedParameterError: it is entered by such a thread, and their values are on several ranks.
            StaleParameterError: one was written to, through a view from before the last step, while its new value was
                pending.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            RankError: another rank does not take part.
        """
        self._require_usable()
        return self._held.access.gathered(module_or_params, writable=writable)

    def generating(self) -> AbstractContextManager[None]:
        """`with optimizer.generating():` keeps streamed units on the device from one token of a text to the next.

        Outside, each forward without gradients moves the whole model. Inside, as many units stay from their first use
        on as there is room for, and the root unit; the others come and go as ever. At the end they leave:

            with optimizer.generating():
                answers = model.generate(**prompts)

        There is room for what the plan leaves of `device_memory`. If that was not given, it is half of what is free on
        the device then, within the budget of `stats()["device_budget_bytes"]`; where the model is on the CPU, what the
        plan leaves of `cpu_memory`. `stats()["generating_units"]` says how many units stayed. Weights in tiles come as
        ever. `gathered(model)` keeps all units, whatever room they take.

        It changes no value and forbids nothing: writes count, and training inside has the bits that it has outside,
        but its activations share the device with what stays. A context inside another one changes nothing. Where all
        parameters are resident, neither does this one. Where several ranks share the parameters, all of them have to
        enter it and call the model equally often, and as many units stay as all of them have room for.

        Returns:
            A context manager.

        Raises:
            ConfigError: it is entered by a thread beside the one that trains, which has a pass under way that does not
                end, or where there are several ranks.
            TierIOError: the disk failed, when it ends.
            RankError: another rank does not take part.
        """
        self._require_usable()
        return _Generating(self._begin_generating)

    @exclusive_entry("generating")
    def _begin_generating(self, stack: ExitStack) -> None:
        self._require_usable()
        self._held.units.generate(self._units_to_generate, stack)

    def _units_to_generate(self) -> tuple[frozenset[str], int]:
        """The names of the units that stay while a text is generated, and the most bytes that units take then."""
        room = self._plan.room_to_generate(self._placement)
        if self._plan.held.shard_group_size > 1:  # what stays on some ranks only would be gathered by the others alone
            room = int(self._comm.shard_group.all_gather(torch.tensor([room], device="cpu")).min())
        return units_that_stay(self._plan.held, self._choice, room)

    def weights(self, *, merged: bool = False, since: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Hands over the weights, tensor by tensor, as they are after the last step: to an engine that generates.

        Units come one after the other, in the order of the store, and each is on the device while its tensors are
        taken. So this takes the memory of one unit beside what is held, or less:

            for name, tensor in optimizer.weights(merged=True):
                engine.load_weights([(name, tensor)])

        All have to be taken before the next step. Over several ranks all call it, and each takes all of them.

        Args:
            merged: False: every tensor that `model.state_dict()` has. True: what
                `model.merge_and_unload().state_dict()` of a plain copy has, with the same bits. One layer after the
                other is copied, and peft merges the copy, so the model is not changed, as it is by `merge_adapter()`.
                What a module saves by `_save_to_state_dict` is handed over; hooks of state dicts, which see all of one,
                do not run.
            since: leaves out parameters whose values are those after this step, such as `stats()["step"]` at the last
                hand-over. What was written to after that step is handed over, though it may be the same. Buffers
                always are. None: leaves out nothing.

        Returns:
            An iterator of names and tensors. Each tensor is a copy, in the dtype and the shape that it has in the
            state dict: on the device, or in RAM if it runs in tiles. A quantised weight is what it is there, too, and a
            DTensor this rank's part.

        Raises:
            ConfigError: `merged`, and the model has no adapters of peft, or peft cannot merge them, which the iterator
                says of a single layer; `since` is no step so far; the model has a parameter that OffloadZero did not
                take; the ranks call it differently; or, by the iterator, a step was made meanwhile.
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            BudgetError: a unit does not fit on the device beside what `gathered` holds.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it failed on another rank.
            RankError: another rank does not take part.
        """
        return self._held.weights.hand_over(self._parts_since(since, merged=merged), self._step)

    @exclusive_entry("weights")
    def _parts_since(self, since: int | None, *, merged: bool) -> list[Part]:
        """What `weights` hands over, the same on all ranks."""
        self._require_usable()
        newest, everyone = self._changes.newest, self._everyone
        is_step = isinstance(since, int) and not isinstance(since, bool) and 0 <= since <= newest
        with together(everyone):
            if since is not None and not is_step:
                raise ConfigError(
                    f"weights(since={since!r}): give a step from 0 to {newest}, the last one, or None for all"
                )
            if since is not None:
                self._held.take_outside_writes()
            parts = self._held.weights.parts(
                lambda param: since is None or self._changes.of(param, self._step) >= since, merged=bool(merged)
            )
        if everyone.size > 1 and not everyone.all_equal(repr((self._step, [part.names for part in parts]))):
            raise ConfigError(
                f"weights(merged={merged}, since={since}): the ranks would hand over different parameters: call it "
                "with the same arguments on every rank, and write alike to parameters; nothing was moved"
            )
        return parts

    @exclusive_entry("state_of")
    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Copies the states of a parameter.

        Over several ranks all have to call it.

        Args:
            param: a trained parameter of the model.

        Returns:
            By name: "master", and what the optimizer keeps, for Adam "exp_avg" and "exp_avg_sq": fp32 CPU tensors of
            the parameter's shape, unless the optimizer keeps one of another shape; and "step", how often it was
            stepped.

        Raises:
            ConfigError: the tensor is no trained parameter.
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it failed on another rank.
            RankError: another rank does not take part.
        """
        self._require_usable()
        number = self._number(param)
        self._held.pending.apply_all()
        with together(self._everyone):
            self._held.take_outside_writes([number])
            views = self._parts.masters.states(number, self._step)
        all_gather_shards(self._comm, self._layout, number, [*views.values()])
        forms, small = {state.name: state.form for state in self._layout.specs[number].states}, self._small_of(number)
        shaped: dict[str, Any] = {
            kind: codes.small(forms[kind], view, small[kind]).contiguous()
            if kind in small
            else self._whole(number, view)
            for kind, view in views.items()
        }
        progress = self._parts.parameters.held[number].progress
        return shaped | {one.name: one.value for one in progress.scalars} | {"step": progress.step}

    def stats(self) -> dict[str, Any]:
        """What was moved, waited for and taken since training began, and what runs where.

        Over several ranks the figures are of this rank:

        - step, skipped_steps: steps made, and steps left out for NaN or Inf.
        - parameters: elements that are trained. chunks: pieces of their states. device_chunks: those that stay on the
          device. streamed_chunks: those that stay neither there nor in RAM.
        - param_tier, grad_tier, activation_tier: the tier of each (None: activations are not moved).
        - nvme_init_bytes: written before the first step. nvme_read_bytes, nvme_written_bytes: read and written since
          then.
        - tried_bytes, kept_bytes: states of steps that were tried in backward, and those of them that `step()` kept
          (`Tuning.speculate`).
        - owing_chunks: chunks of idle experts that owe steps now. late_bytes: states on NVMe that steps neither read
          nor wrote, as their chunks owe these steps (`Tuning.late`).
        - host_to_device_bytes, device_to_host_bytes: parameters and gradients copied between RAM and the device, those
          of streamed units, too. gathered_bytes: parameters of streamed units brought to where they are used, wherever
          the model is.
        - generating_units, generating_bytes: how many streamed units the last `generating()` kept on the device, and
          their bytes.
        - activation_read_bytes, activation_written_bytes: activations read from disk and written to it.
        - step_s: time spent in `step()`; apply_s: in applying its results later; gradient_s: in backward. adam_s is a
          part of the first two.
        - wait_nvme_s: time spent waiting for the disk; wait_cpu_s: for the worker that runs Adam for a device;
          wait_device_s: for gradients, for memory that a copy still uses, and for a device that is too far behind.
          Where Adam runs on the CPU these are parts of step_s and apply_s.
        - nvme_busy_s: time in which a drive had something to read or write, waited for or not; of several drives the
          sum. host_to_device_s, device_to_host_s: time that copies took each way between RAM and a device, estimated
          from one in sixteen of them (0: the model is on the CPU, or its device does not say).
        - iteration_s: from the end of a step to the end of the next one, the median of the last ones (nan: there were
          too few). predicted_iteration_s: what was predicted, from what `offload probe` measured and the tokens of the
          first micro-batches (nan: it is not predicted).
        - park_s: time spent in moving the model to the CPU and back (`model.cpu()`, `model.to(device)`), while an
          engine generates there. parked_bytes: what that copied of parameters, states and buffers for gradients.
        - peak_cpu_bytes, cpu_budget_bytes: RAM that this library took at most, and may take. peak_device_bytes,
          device_budget_bytes: the same for parameters, buffers and states on the device. What torch takes for a moment
          in the step of an optimizer that it runs is counted as it was planned.
        - activation_bytes, peak_activation_bytes: the size of the region for activations, and the most that was in it
          at once.
        - snapshot_copied_step: the step of the last snapshot that was copied to another `path`, 0: none.
          snapshot_left_bytes: what of the one under way is not copied yet. snapshot_copied_bytes: of all of them.
        - disk_bytes: the size of the swap files. arena_utilisation: the share of the buffers' bytes that chunks fill, 0
          to 1.
        - held_param_bytes, held_grad_bytes, held_master_bytes, held_exp_avg_bytes, held_exp_avg_sq_bytes: what this
          rank holds of each, on any tier. Parameters that are on the device only for their use are not counted there.
        - kernel, threads, io_engine: which kernels run Adam, on how many threads, and how files are read (None: none
          are).
        - rank, ranks: among those that share the data. tensor_parallel_rank, tensor_parallel_ranks: among those that
          share the layers. stage: the stage of ZeRO. With several ranks there are also `<collective>_calls`,
          `<collective>_elements` and `<collective>_bytes`: what this rank sent.

        Returns:
            By name: integers, floats where the unit is seconds or a share, words, and None.
        """
        placement, parts, memory = self._placement, self._parts, self._parts.run.memory
        counted, initial = self._timeline.counted, self._held.initial_bytes
        beside = placement.resident_bytes + placement.temporary_bytes(DEVICE)
        copies_s = self._plan.copier.busy_s
        return {
            "step": self._step,
            "skipped_steps": self._skipped,
            "parameters": self._layout.numel,
            "param_tier": self._choice.params.tier.name,
            "grad_tier": self._choice.grads.tier.name,
            "chunks": len(placement.states.sizes),
            "streamed_chunks": len(placement.states.streamed),
            "device_chunks": len(placement.states.on_device),
            "nvme_init_bytes": initial,
            "nvme_read_bytes": counted("nvme_read_bytes"),
            "nvme_written_bytes": counted("nvme_written_bytes") - initial,
            "tried_bytes": counted("tried_bytes"),
            "kept_bytes": counted("kept_bytes"),
            "owing_chunks": len(parts.masters.late.owed),
            "late_bytes": counted("late_bytes"),
            "host_to_device_bytes": counted("host_to_device_bytes"),
            "device_to_host_bytes": counted("device_to_host_bytes"),
            "gathered_bytes": counted("gathered_bytes"),
            "generating_units": self._held.units.kept[0],
            "generating_bytes": self._held.units.kept[1],
            "parked_bytes": counted("parked_bytes"),
            "peak_cpu_bytes": memory.ram.used + placement.temporary_bytes(CPU),
            "cpu_budget_bytes": placement.budget_bytes,
            "peak_device_bytes": beside + parts.parameters.peak_bytes + memory.device_bytes,
            "device_budget_bytes": placement.device_budget_bytes,
            "arena_utilisation": placement.states.utilisation,
            "disk_bytes": placement.disk_bytes,
            **self._commits.copies_of_snapshots,
            "snapshot_copied_bytes": counted("snapshot_copied_bytes"),
            **{name: self._timeline.seconds(name) for name in _SPANS},
            "nvme_busy_s": sum(self._timeline.busy_s.values()),
            "host_to_device_s": copies_s.get(UP, 0.0),
            "device_to_host_s": copies_s.get(DOWN, 0.0),
            **self._prediction.figures,
            "kernel": parts.run.kernels.variant,
            "threads": parts.run.kernels.threads,
            "io_engine": None if parts.engine is None else parts.engine.name,
            "activation_tier": None if (tier := self._choice.activations.tier) is None else tier.name,
            "activation_bytes": placement.activation_bytes,
            "peak_activation_bytes": self._held.peak_activation_bytes,
            "activation_read_bytes": counted("activation_read_bytes"),
            "activation_written_bytes": counted("activation_written_bytes"),
            "rank": self._comm.user_rank,
            "ranks": self._comm.size,
            "tensor_parallel_rank": self._comm.tensor_parallel.rank,
            "tensor_parallel_ranks": self._comm.tensor_parallel.size,
            "stage": self._choice.grads.stage,
            **{f"held_{kind}_bytes": nbytes for kind, nbytes in placement.held_bytes.items()},
            **self._comm.stats(),
        }

    def timeline(self, file: PathLike) -> AbstractContextManager[None]:
        """`with optimizer.timeline("t.json"):` records every transfer, kernel, wait and hook inside.

        The file is in Chrome's trace format, for ui.perfetto.dev or chrome://tracing. It is written at the end, also
        when the body raises. Recording changes no bit. It keeps the first 100,000 events, in about 30 MB of RAM.

        Args:
            file: where it is written; an older file is replaced.

        Returns:
            A context manager.

        Raises:
            PathError: the file cannot be written. It is raised before the body runs, or at its end if the disk fails.
            ConfigError: `file` is no path, or another timeline is being recorded.
        """
        self._require_usable()
        return recorded(self._timeline, file, self._model, self._plan.held, self._choice.model.units)

    @property
    def files(self) -> tuple[str, ...]:
        """The swap files of this rank. They stay after `close()`; without commits nothing can be resumed from them."""
        return () if self._parts.slots is None else self._parts.slots.paths

    def _whole(self, number: int, view: Tensor) -> Tensor:
        """A parameter's values in its shape, with the parts of other tensor-parallel ranks.

        Args:
            number: the parameter's number.
            view: its flattened view, without the parts of other tensor-parallel ranks.
        """
        held = self._parts.parameters.held[number]
        local = torch_private.past_subclasses(held.shaped, view)
        return whole_of(self._comm, held.tensor, local)

    def _shown_states(self, param: Any) -> Mapping[str, Any]:
        """The states of a parameter that was stepped, as `States` takes them; nothing for all else."""
        number = self._parts.parameters.index.get(param)
        if number is None or number >= self._parts.parameters.trained:
            return {}
        progress = self._parts.parameters.held[number].progress
        if not progress.step:
            return {}
        shown = self._plan.rules[self._layout.groups[number]].shown(progress)
        return shown | {name: torch.Size(shape) for name, shape in self._small_of(number).items() if name in shown}

    def _small_of(self, number: int) -> Mapping[str, tuple[int, ...]]:
        """The shapes of those states of a parameter that have another one, by name."""
        whole = self._layout.specs[number].whole
        return {} if whole is None else dict(whole.small)

    def _number(self, param: Tensor) -> int:
        if not isinstance(param, Tensor):
            raise ConfigError(f"{param!r} is no tensor: give the parameter itself, as model.get_parameter(name) does")
        number = self._parts.parameters.index.get(param)
        if number is None or number >= len(self._layout.specs):
            raise ConfigError(f"the tensor of shape {tuple(param.shape)} is no parameter that this optimizer trains")
        return int(number)

    # Commit.

    @property
    def resumed(self) -> Resumed | None:
        """The step at which this run was resumed, and the `extra` that was committed with it; None: it began anew."""
        return self._resumed

    def attach(self, *unnamed: object, rng: bool = False, **objects: object) -> None:
        """Makes every commit carry the state of these objects from now on, automatic commits too.

        In a resumed run each object gets back the state that was committed under its name, if it is attached before the
        first step. So a loop needs no code of its own for resuming:

            scheduler = CosineAnnealingLR(optimizer, 1000)
            loader = StatefulDataLoader(...)  # of torchdata: torch's DataLoader has no state
            optimizer.attach(scheduler=scheduler, loader=loader, rng=True)

        The state of what is drawn from (loaders, generators) is captured when `step()` returns, every other state when
        the next forward begins. So a resumed run draws what the uninterrupted one drew. A scheduler's constructor sets
        the first learning rate again; attaching the scheduler sets the committed one. Over several ranks each has its
        own states. If the run is resumed on another number of ranks, all ranks get the first rank's states, but for
        those of what is drawn from, which begin anew.

        Args:
            rng: whether to carry the global random number generators of Python, NumPy and torch, as `collect_rng()`
                gives them.
            **objects: objects with `state_dict()` and `load_state_dict()`, or torch.Generators, by a name of your
                choice.

        Raises:
            ConfigError: an object has no name, no state, or one that cannot be stored. Nothing is attached then.
        """
        self._require_usable()
        if unnamed:
            kind = type(unnamed[0]).__name__
            raise ConfigError(f"attach({kind}): each object needs a name, as in attach(scheduler=scheduler)")
        if RNG in objects or not isinstance(rng, bool):
            raise ConfigError(f"attach(rng={rng!r}): give True or False; other generators take another name")
        if own := [name for name, one in objects.items() if one is self]:
            raise ConfigError(
                f"attach({own[0]}=...) is the OffloadZero itself, whose state is what its commits are: leave it out"
            )
        given = {RNG: None, **objects} if rng else objects
        self._attach(given, self._undo)
        self._is_loop_resumed = True
        if groups := self._attached.groups_for(given):
            take_options(self.param_groups, groups)
        self._capture_if_due()

    def _attach(self, given: Mapping[str, object], undo: ExitStack) -> None:
        is_first = not self._attached
        self._attached.attach(given)
        if is_first and self._attached:
            hook = Hook(lambda *_: self._attached.capture_rest())
            undo.callback(self._model.register_forward_pre_hook(hook).remove)

    def _capture_if_due(self) -> None:
        if self._attached and self._commits.is_due(self._step):
            try:
                self._attached.step_ends(self._step)
            except BaseException as error:
                if self._everyone.size > 1:
                    self._health.fail(error)  # the other ranks will commit this step, and this one cannot
                raise

    def commit(self, extra: object = None) -> None:
        """Commits the state after this step; it is durable when this returns. Call it at the end of an iteration.

        Over several ranks all have to call it, each with its own `extra`.

        Args:
            extra: what else the loop needs to continue: plain values, containers and tensors, but no objects.

        Raises:
            ConfigError: there is no `path`, or commit_every=None; `extra` or a hyper-parameter cannot be stored; the
                step is committed already.
            PathError: a directory or a swap file was moved, removed or cut off.
            BudgetError: the disk has no space for a snapshot of the last commit, which a state dict names.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: another rank's commit failed.
            RankError: another rank does not take part. A resume finds this commit or the last one.

        After all of these but RankError the last commit is what it was.
        """
        is_committed = False
        while not is_committed:
            step = self._begin_commit()
            with together(self._everyone):
                carried = self._attached.carry(extra)
            is_committed = self._commit_of(step, carried)

    @exclusive_entry("commit")
    def _begin_commit(self) -> int:
        """Applies all of the last step.

        Returns:
            The number of that step.
        """
        self._require_usable()
        self._held.step_begins()
        return self._step

    @exclusive_entry("commit")
    def _commit_of(self, step: int, extra: object) -> bool:
        """Commits, unless another thread has made a step since `extra` was captured.

        Args:
            step: the number of the last step when `extra` was captured.
            extra: what the commit carries.

        Returns:
            Whether it did.
        """
        if self._step == step:
            self._require_usable()
            self._commit(extra)
        return self._step == step

    def _is_commit_due(self) -> bool:
        return self._commits.is_due(self._step) and self._attached.is_captured(self._step)

    def _commit_if_due(self) -> None:
        if self._is_commit_due():
            self._commit(self._attached.carry_captured())

    def _commit_first(self) -> None:
        """Makes the commit that state dicts of step 0 name. Called before the first step."""
        if self._first is not None:
            if not self._commits.has(0):
                self._commit(self._first.carries)
            self._commits.name_last()
            self._first = None

    def _commit(self, extra: object) -> None:
        if self._first is not None:
            extra = carried_in(extra)._replace(source=self._first.name)

        def prepare() -> None:
            require_sound(self._plan.rules, self.param_groups)
            self._held.take_outside_writes()

        with self._trials_paused(), self._together():
            self._commits.commit(prepare, self._step, self._parts.parameters.progress, self.param_groups, extra)
        self._attached.commit_ends()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context for what all ranks do together.

        A rank that is interrupted in it (Ctrl-C) cannot continue with the others.
        """
        try:
            yield
        except BaseException as error:
            if self._everyone.size > 1 and not isinstance(error, OffloadError):
                self._health.fail(error)
            raise

    @exclusive_entry("snapshot")
    def snapshot(self, *, keep: int | None = None, path: PathLike | None = None) -> tuple[Path, ...]:
        """Copies the last commit, which the next one would replace; the copy is durable when this returns.

        Each directory of this run gets a directory with its part of the snapshot. `resume=[...]` and `offload inspect`,
        `verify`, `export` and `remove` take these directories as they take those of any run. Where the file system can
        (XFS, Btrfs), a snapshot shares its blocks with the swap file. Over several ranks all have to call it.

        Args:
            keep: how many snapshots of this run to keep, this one included; older ones are removed, but for those that
                were made because a state dict names their commit. None: all. With a `path` those in it are meant.
            path: a directory that all ranks see, on storage that outlives a machine. The snapshot is copied there while
                training goes on, and is there when `stats()["snapshot_copied_step"]` says so, or after `close()`. Then
                it is removed from this run's directories. None: it stays in these.

        Returns:
            The directories of the snapshot, one for each of this rank's in `path`.

        Raises:
            ResumeError: nothing was committed.
            ConfigError: `keep` is no number of snapshots.
            BudgetError: the disk has no space for it.
            PathError: something else has its name, or a directory or a swap file was moved, removed or cut off.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it failed on another rank.
            RankError: another rank does not take part.

        After any of these the run and its last commit are what they were.
        """
        self._require_usable()
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"keep={keep!r}: give a whole number, at least 1, or None to keep all")
        if path is not None:
            _require_path("snapshot", path)
        with self._together():
            # Where it leads now: the copy goes on while the working directory may change.
            return self._commits.snapshot(keep, None if path is None else Path(path).absolute())

    def rollback(self) -> None:
        """Goes back to the last commit, also after an error: states, parameters, hyper-parameters and step.

        Gradients are dropped. What is attached gets its committed state, too; an iterator over a loader has to be made
        anew. Other schedulers and loaders, and frozen parameters that do not stream, are not changed. Over several
        ranks all have to call it. After an error that only some ranks had, they have to be started again instead.

        Raises:
            ResumeError: nothing was committed. Or a frozen parameter, which it names, was first written to since then;
                all else is restored.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            OtherRankError: it failed on another rank.
            RankError: another rank does not take part.
        """
        self._attached.go_back(self._roll_back())

    @exclusive_entry("rollback")
    def _roll_back(self) -> Carried:
        """Goes back to the last commit, but for attached objects.

        Returns:
            What the commit carries of attached objects.
        """
        self._health.require_mendable()
        self._commits.require_last()
        try:
            self._changes.all_changed()
            self._held.abandon()
            carried = self._commits.carried() if self._attached else Carried()
            self._take_progress(self._commits.restore())
        except BaseException as error:
            self._health.fail(error, replaces=True)
            raise
        self._health.reset()
        self.zero_grad()
        return carried

    def _take_progress(self, committed: Manifest) -> None:
        """Takes hyper-parameters and step counts from a commit, whatever its layout."""
        progress = {param.name: param.restored() for param in committed.parameters}
        take_options(self.param_groups, committed.groups)
        self._step = committed.step
        self._take_initial_progress()
        parameters = self._parts.parameters
        for held in parameters.held[: parameters.trained]:
            held.progress = progress.get(held.spec.name, held.progress)

    def _take_initial_progress(self) -> None:
        parameters, rules = self._parts.parameters, self._plan.rules
        for held, group in zip(parameters.held[: parameters.trained], self._layout.groups, strict=True):
            held.progress = rules[group].initial

    def _begin_at(self, found: RecoveryPlan) -> None:
        if found.manifest is not None:
            self._take_progress(self._commits.restore())
            return
        if found.begins_states:
            self._step = found.commit.step
        else:
            self._take_progress(found.first)
        self._commits.reshard(found, self._parts.parameters.progress, self.param_groups)

    @exclusive_entry("export")
    def export(self, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Writes the model's state_dict as it is now, in its own dtypes, as safetensors.

        transformers (`from_pretrained`) and safetensors read these files. A large model gets several files, and an
        index.

        At stage 3 and with tensor parallelism all ranks have to call it. They put the whole tensors together in RAM,
        and the first rank writes them into its `directory`. What goes wrong there is raised on all.

        At stages 1 and 2 each rank that calls it exports by itself: one is enough. If several give the same directory,
        the first of them writes. For the others it is enough that they have the same values.

        Args:
            directory: where to write; it is made if its parent exists.

        Returns:
            The files; none where another rank writes them.

        Raises:
            PathError: it is no directory, or has an export already.
            BudgetError: the disk lacks space, or RAM lacks room for the whole tensors.
            ConfigError: safetensors cannot hold a name, a dtype, or a wrapper around other tensors.
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            RankError: where all ranks call it, another one does not take part.
            OtherRankError: where all ranks call it, another one failed, and this one did not.
        """
        self._require_usable()
        _require_path("export", directory)
        self._held.synchronize()
        state = self._model.state_dict()
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        ranks = self._everyone
        is_shared = self._choice.grads.stage == 3 or self._comm.tensor_parallel.size > 1
        writes = ranks.user_rank == 0 or not is_shared
        agreed = partial(together, ranks) if is_shared else nullcontext
        with agreed():
            _require_plain(tensors)
            self._require_room_for_whole(tensors.values())
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                whole = whole_of(self._comm, tensor, local_of(tensor).cpu())
                tensors[name] = whole if writes else local_of(tensor)
        entries = (Entry(name, t.dtype, tuple(t.shape), partial(_pieces, t)) for name, t in tensors.items())
        with agreed():
            if not writes:
                return ()
            files = self._parts.run.files
            return export(Path(directory), entries, shared=ranks.size > 1 and not is_shared, files=files)

    def _require_room_for_whole(self, tensors: Iterable[Tensor]) -> None:
        """Requires that RAM has room for the whole of the tensors that tensor-parallel ranks share.

        Args:
            tensors: all tensors of an export.

        Raises:
            BudgetError: they do not fit in `cpu_memory` together.
        """
        needed, available = sum(t.nbytes for t in tensors if is_dtensor(t)), self._placement.budget_bytes
        if needed > available:
            raise BudgetError(
                f"an export puts {format_bytes(needed)} of parameters together that tensor-parallel ranks share, and "
                f"cpu_memory allows {format_bytes(available)}: give more, or save state_dict() with "
                "torch.distributed.checkpoint, which writes each rank's part",
                needed=needed,
                available=available,
                option="cpu_memory",
            )

    # Torch's optimizer interface.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters after construction, when the layout is fixed, and with it the memory and the disk space.

        Args:
            param_group: a param group.

        Raises:
            ConfigError: the optimizer is constructed.
            ClosedError: the optimizer is closed.
        """
        if self._adopted:
            self._health.require_open()
            raise ConfigError(
                "parameters cannot be added after OffloadZero took the model: make a new OffloadZero, or give it all "
                "parameters, and requires_grad_(False) to those that are trained later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Param groups and step, and the name of a commit of this step, which has the tensors.

        The commit is made if there is none of this step. Before a later one replaces it, it is kept as a snapshot. Of
        the commits that were named so, the newest `keep` stay. Over several ranks all call `consolidate_state_dict()`
        before. The commit of step 0 is made just before the first step.

        Returns:
            By name: "param_groups", as torch has them; "state", which is empty; "step"; "path", a directory, a list of
            several, or None; and "commit", the name of the commit, or None if there are no commits.

        Raises:
            OffloadError: the commit failed, as `commit` says.
            BudgetError: the disk has no space for the snapshot.
            ConfigError: over several ranks, this step is not committed.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @exclusive_entry("state_dict")
    def _state(self) -> dict[str, Any]:
        return groups_state(self.param_groups, self._step, self._parts.run.paths, self._name_commit())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Commits this step, so that `state_dict()` can name it: before some ranks call that, all have to call this.

        The name is that of torch's ZeroRedundancyOptimizer, so frameworks that know it call it by themselves. It does
        nothing at step 0, without commits, and if the step is committed.

        Args:
            to: not used; any rank may call `state_dict()` afterwards.

        Raises:
            OffloadError: the commit failed, as `commit` says.
        """
        self._require_usable()
        if self._step and self._choice.commits.every is not None and not self._commits.has(self._step):
            self.commit()

    def _name_commit(self) -> str | None:
        """Gives the commit of this step a place in a state dict. Makes it, if there is none.

        Returns:
            The name of the commit; None: there is nothing to resume from.

        Raises:
            OffloadError: the commit failed, as `commit` says.
            ConfigError: over several ranks, this step is not committed.
        """
        if not self._adopted:
            return None
        if self._choice.commits.every is None:
            if self._step and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "this state dict has hyper-parameters only, and a run cannot be resumed from it: masters and "
                    "moments are in no file; give OffloadZero a path, and leave commit_every as it is",
                    stacklevel=5,
                )
            return None
        is_committed = self._commits.has(self._step) and not self._commits.is_outdated
        if self._health.is_closed:
            return self._commits.last_id if is_committed else None
        self._require_usable()
        if not is_committed and self._step == 0:
            # Frameworks ask for it before they train, and few of them come back: the commit is made when it is needed.
            if self._first is None and self._everyone.size == 1:
                self._first = _First(f"first-{uuid4().hex}", self._attached.carry(None))
            return None if self._first is None else self._first.name
        if not is_committed:
            if self._everyone.size > 1:
                raise ConfigError(
                    f"step {self._step} is not committed, and a commit is for all ranks together: call "
                    "consolidate_state_dict() on every rank before state_dict(), as offload.integrations do for "
                    "transformers and accelerate"
                )
            self.commit()
        nbytes = self._commits.name_last()
        if not self._has_told:
            self._has_told = True
            with suppress(OSError, ValueError):
                print(
                    f"offload: a state dict names the commit of step {self._step}; of the commits named so the newest "
                    f"{self._choice.commits.keep} stay as snapshots, of up to {format_bytes(nbytes)} each",
                    file=sys.stderr,
                )
        return self._commits.last_id

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the step of a state dict, and takes its hyper-parameters.

        If the optimizer is at that step already, and has no other commit of it, nothing else is changed. Otherwise
        states and parameters become those of the commit that the state dict names, also if the run has gone on since,
        and gradients are dropped.

        Args:
            state_dict: what `state_dict()` returned, in this process or in an earlier one.

        Raises:
            ResumeError: that commit is gone, the groups do not match, its states are in another form and are not to
                become, or cannot become, those of this run (`resume_states`), or, over several ranks, it is of another
                step.
            ConfigError: `state_dict` is no mapping, or a hyper-parameter is out of range.
            PathError: a directory or a file cannot be used.
            BudgetError: the disk has no space for a snapshot of the last commit, which a state dict names.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
        """
        self._health.require_open()
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"load_state_dict({state_dict!r}): give what state_dict() returned, not a file of it")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        carried = self._go_to(state_dict)
        self._is_loop_resumed = self._is_loop_resumed or is_loading_a_checkpoint()
        if carried is not None:
            self._attached.go_back(carried)
        with torch.no_grad():
            load_groups(self.param_groups, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @exclusive_entry("load_state_dict")
    @torch.no_grad()
    def _go_to(self, state_dict: Mapping[str, Any]) -> Carried | None:
        """Goes to the step of a state dict.

        Returns:
            What its commit carries of attached objects; None: the optimizer was at that step already.
        """
        step, commit = require_matching(self._plan.rules, self.param_groups, state_dict)
        is_committed = commit is not None and self._commits.has(step)
        is_another = is_committed and (commit != self._commits.last_id or self._commits.is_outdated)
        if step != self._step or is_another:
            return self._go_back(step, commit)
        if is_committed:
            self._commits.name_last()
        elif self._first is not None and not self.entries.has_trained:
            self._first = None  # a framework has passed it through
        return None

    def _go_back(self, step: int, commit: object) -> Carried:
        self._require_usable()
        if commit is None or self._everyone.size > 1 or self._choice.commits.every is None:
            how = 'commit to a path, and give resume="auto", or the directories of a snapshot'
            if self._choice.commits.every is None:
                how = (
                    "give OffloadZero a path, where the commits lie that a state dict names, or make the model and the "
                    "optimizer again"
                )
            raise ResumeError(
                f"the state dict is of step {step}, this optimizer is at step {self._step}, and masters and moments "
                f"are not in a state dict: {how}"
            )
        if self._commits.has(step) and commit == self._commits.last_id:
            carried = self._roll_back()
            self._commits.name_last()
            return carried
        with self._commits.snapshot_of(step, commit) as reader:
            carried = carried_in(reader.extra())
            self._roll_back()
            try:
                self._take_progress(reader.manifests[0])
                self._commits.go_back_to(reader, self._parts.parameters.progress, self.param_groups)
                self._commits.name_last()
            except BaseException as error:
                self._health.fail(error)
                raise
        return carried

    # Close.

    @exclusive_entry("synchronize")
    def synchronize(self) -> None:
        """Applies all pending updates and waits for all transfers.

        Raises:
            StaleParameterError: a parameter was written to, through a view from before the last step, while its new
                value was pending.
            TierIOError: the disk failed.
            CorruptionError: bytes that were read are not those that were written.
            RankError: another rank does not take part.
        """
        self._require_usable()
        self._held.synchronize()

    def close(self) -> None:
        """Ends the last step, unhooks the model, and frees memory, files and their lock. May be called again.

        The model keeps its parameters in the compute dtype, and gradients are dropped. A commit that is due is made.
        Inputs are not cast any more: if any were, a line on stderr says so. Another line says so if a resumed run made
        no step and has a loader attached. Streamed parameters are fetched for good, if all of them fit in
        `device_memory` and in half of what is free. If they do not, or if ranks share them, they stay released, and any
        use of them raises ReleasedParameterError.

        Raises:
            OffloadError: the last step or the commit failed, as `synchronize` and `commit` say. All is freed
                nevertheless.
        """
        self._close(tells=True)

    def _close(self, *, tells: bool) -> None:
        if not self._health.is_here:
            return
        _tell(self._advice.left_unsaid())
        lines = self._last_words() if tells and not self._health.is_stopped and self._everyone.user_rank == 0 else []
        self._close_here()
        with suppress(OSError, ValueError):
            for line in lines:
                print(f"offload: closed: {line}", file=sys.stderr)

    def _last_words(self) -> list[str]:
        """What would surprise a user later, a line each."""
        lines = []
        if self._resumed and self._step == self._resumed.step and self._attached.has_loader:
            lines.append(
                f"resumed at step {self._step}, and no step was made since then: a loader that was committed at its "
                "end gives nothing more"
            )
        if self._held.has_cast_inputs:
            dtype = self._choice.model.compute_dtype
            way_out = "" if dtype is torch.float32 else ", or call model.float()"
            lines.append(f"the model stays in {dtype}, and its inputs are not cast any more: give it {dtype}{way_out}")
        return lines

    @training_entry
    def _close_here(self) -> None:
        if self._health.is_closed:
            self._end()  # a call that was interrupted left it to this one
            return
        try:
            if not self._health.is_stopped:
                self._held.pending.apply_all()
                self._parts.new_params.wait_for_transfers()
                if self._is_commit_due():
                    self._parts.gradients.reset()  # no step will use them; all ranks have sent the same then
                    self._commit_if_due()
                self._commits.finish_copy(waits=True)
                is_parked = self._parts.parameters.is_parked
                self._held.keep_parameters(self._plan.room_at_end(self._placement, is_parked))
        finally:
            self._health.close()
            self._end()

    @uninterrupted
    def _end(self) -> None:
        """Lets go of everything, once. No interrupt may come between two of these calls, or one would be lost."""
        self._undo.close()
        self._owner.let_go()

    def __enter__(self) -> Self:
        self._health.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._advice.note(error)
        if error is not None and self._everyone.size > 1:
            self._health.fail(error)  # the other ranks may be somewhere else: no collective is possible any more
        # What is being raised is the cause of any error of the ending.
        with suppress(OffloadError) if error is not None else nullcontext():
            self._close(tells=error is None)

    def __getstate__(self) -> NoReturn:
        raise ConfigError("OffloadZero cannot be copied or pickled: its states are in the tiers, not in it")

    @entry
    def _require_usable(self) -> None:
        if self._commits.is_undecided and self._health.is_here and not self._health.is_stopped:
            self._commits.learn_outcome()
        self._health.check()


_Changes = Mapping[StepKind, tuple[Progress, Mapping[str, Any]]]
"""By what decides it: the next progress of parameters, and the options of their group that change with it."""


class _Generating(AbstractContextManager[None]):
    """The context of `OffloadZero.generating`. An interrupt leaves nothing behind, wherever it comes.

    Args:
        begin: begins it, and gives a stack what ends it.
    """

    def __init__(self, begin: Callable[[ExitStack], None]) -> None:
        self._begin = begin
        self._stack = ExitStack()

    def __enter__(self) -> None:
        try:
            self._begin(self._stack)
        except BaseException:
            self._stack.close()
            raise

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Update(NamedTuple):
    """What a step does, fixed before it begins.

    Attributes:
        factor: that of all gradients.
        changes: what becomes of the progress of parameters, and of param groups.
    """

    factor: float
    changes: _Changes


class _First(NamedTuple):
    """A commit of step 0 that a state dict names, and that is not made yet.

    Attributes:
        name: what state dicts call it.
        carries: what it will carry of attached objects.
    """

    name: str
    carries: object


def _own_bytes(resident_bytes: int, parts: Parts) -> int:
    """How many bytes a run has on the model's device now."""
    return resident_bytes + parts.parameters.nbytes + parts.run.memory.device_bytes


def _require_path(method: str, given: object) -> None:
    """Requires that a method was given the name of a directory.

    Raises:
        ConfigError: it is of another type, or empty.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(f"{method}({given!r}): give the name of a directory, a string or a Path")


def _tell(line: str | None) -> None:
    if line is not None:
        with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            print(line, file=sys.stderr)


def _tell_at_exit(advice: weakref.ref[DeviceAdvice]) -> None:
    alive = advice()
    if alive is not None:
        with suppress(RuntimeError):  # the driver may be at its end
            _tell(alive.left_unsaid())


def _committed(found: RecoveryPlan | None) -> Committed:
    if found is None:
        return Committed(Carried())
    return Committed(found.extra, () if found.begins_states else found.first.groups)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    yield memory_of(tensor.cpu())


def _require_plain(tensors: Mapping[str, Tensor]) -> None:
    """Requires that an export's tensors have elements of their own.

    Raises:
        ConfigError: naming the first one that is a quantised wrapper.
    """
    for name, tensor in tensors.items():
        if is_wrapper(kind_of(tensor)) and not is_dtensor(tensor):
            raise ConfigError(
                f"{name} is a {kind_of(tensor).__name__}, which safetensors cannot hold: save what is trained "
                "({name: p for name, p in model.named_parameters() if p.requires_grad}), or save as its library does"
            )
