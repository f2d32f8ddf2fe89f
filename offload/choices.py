"""What was decided of a run: a small frozen value for each part. Each part gets its own value and knows no other.

The planner makes all of them in one place (planner/decide.py), from the options, the model and the ranks. Then nothing
changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from offload.tiers import CPU, DEVICE, Tier


@dataclass(frozen=True)
class ModelChoice:
    """How the model computes.

    Attributes:
        compute_dtype: see `OffloadZero`.
        keep_fp32: see `OffloadZero`.
        cast_forward_inputs: see `OffloadZero`.
        units: see `Tuning`; None: each element of a list of blocks is a unit.
        loss_weights: the weights of output layers whose gradients are made in the forward, by name.
        token_sum_bytes: fp32 gradients of the largest module that sees a few tokens at a time (`tile_tokens`).
    """

    compute_dtype: torch.dtype
    keep_fp32: tuple[nn.Module | type[nn.Module], ...]
    cast_forward_inputs: bool
    units: tuple[str | type[nn.Module], ...] | None
    loss_weights: frozenset[str] = frozenset()
    token_sum_bytes: int = 0


@dataclass(frozen=True)
class StateChoice:
    """What was decided for the optimizer states.

    Attributes:
        tier: where they live.
        split_master: whether only the low halves of bf16 parameters' masters are kept.
        form: how states are kept by rules that can do it; see `OffloadZero`.
        tries_steps: whether steps of chunks that stream are tried in backward.
        leaves_trials_open: whether that is decided when the files are known, since the user left it open.
        chunk_numel: elements of a chunk.
        in_flight: buffers for chunks that stream, of any kind; None: 4, or 3 where the budget has no room for more.
        temporary_bytes: what the optimizers take at once beside the arrays that they step.
        shares: whether some states may be on the device while others are not: a step has the same bits on both sides.
        is_late: whether tiles of experts whose gradient is zeros may owe steps; see optim/late.py.
    """

    tier: Tier
    split_master: bool
    chunk_numel: int
    in_flight: int | None
    temporary_bytes: int = 0
    form: str = "fp32"
    tries_steps: bool = False
    leaves_trials_open: bool = False
    shares: bool = False
    is_late: bool = False


@dataclass(frozen=True)
class ParamChoice:
    """What was decided for the parameters.

    Attributes:
        tier: where trained ones are outside their use.
        frozen_tier: where frozen ones are outside their use.
        has_frozen: whether the model has frozen ones.
        keeps_trained: whether trained ones stay on the device because they are few beside the frozen ones.
        prefetch_units: how many units are fetched ahead of the one in use.
        tile_bytes: weights larger than this run in tiles; 0: none do.
        is_chosen: whether the planner chose the tiers, since the user named none.
        base_bytes: what a file of their own takes, in which frozen ones on NVMe are, and which other runs may use; 0:
            there is none.
        base_memory_bytes: what a rank keeps in RAM to read that file.
    """

    tier: Tier
    frozen_tier: Tier
    has_frozen: bool = False
    keeps_trained: bool = False
    prefetch_units: int = 1
    tile_bytes: int = 0
    is_chosen: bool = False
    base_bytes: int = 0
    base_memory_bytes: int = 0

    @property
    def streams(self) -> bool:
        """Whether parameters stream."""
        return max(self.tier, self.frozen_tier) > DEVICE

    def tier_of(self, *, is_frozen: bool) -> Tier:
        """Where a parameter is outside its use."""
        return self.frozen_tier if is_frozen else self.tier


@dataclass(frozen=True)
class GradChoice:
    """What was decided for the gradients.

    Attributes:
        tier: where they wait for the step.
        micro_batches: the most micro-batches of a step; where any number is taken, how many are counted.
        takes_any: whether any number of micro-batches is taken.
        params_stay: whether trained parameters stay on the device. Then new ones on their way to a device with memory
            of its own may take the memory of their gradients.
        stage: of ZeRO; None: there is one rank.
        bucket_bytes: of a buffer in which gradients travel between ranks.
    """

    tier: Tier
    micro_batches: int
    takes_any: bool
    params_stay: bool
    stage: int | None
    bucket_bytes: int

    @property
    def declared(self) -> int | str:
        """The value of the option `accumulation`."""
        return "auto" if self.takes_any else self.micro_batches


@dataclass(frozen=True)
class ActivationChoice:
    """What was decided for the activations. The sizes of their regions follow from the budgets (planner/placement.py).

    Attributes:
        tier: where they wait for their backward; None: where they are made.
        nbytes: of the region for them; None: a share of the RAM that is left.
        recompute: whether units keep only what enters them.
        partitioned: whether each tensor-parallel rank keeps a part.
        units: see `ModelChoice`.
    """

    tier: Tier | None
    nbytes: int | None = None
    recompute: bool = True
    partitioned: bool = False
    units: tuple[str | type[nn.Module], ...] | None = None

    @property
    def recomputes(self) -> bool:
        """Whether the forwards of units run again in their backward."""
        return self.tier is not None and self.recompute


@dataclass(frozen=True)
class CommitChoice:
    """What was decided for the files and for commits.

    Attributes:
        paths: the directories of this run, as they were given.
        origins: directories of the run to resume that are not among `paths`.
        every: steps between commits; 0: the user asks for each one; None: there are none.
        keep: how many commits stay of those that state dicts name.
        resume: whether to go on with the run that is there; "auto": if there is one.
        begins_states: whether only masters are taken from it, and the states of the optimizer begin.
        converts_states: whether states may be in another form than they were committed in.
        holds_params: whether commits hold the 16-bit parameters, too, since these are the upper halves of split
            masters.
        transfers: whether slots that a rank does not see may be sent to it.
        keeps_places: whether slots of a commit that have a place for steps that are tried are used as they lie, though
            this run would make none.
        lock_timeout_s: for how many seconds the lock of a directory that a lost machine may hold is waited for.
    """

    paths: tuple[Path, ...] = ()
    origins: tuple[Path, ...] = ()
    every: int | None = None
    keep: int = 2
    resume: bool | Literal["auto"] = False
    holds_params: bool = False
    begins_states: bool = False
    converts_states: bool = False
    transfers: bool = False
    keeps_places: bool = False
    lock_timeout_s: float = 120.0

    def is_due(self, step: int) -> bool:
        """Whether a commit of `step` is due."""
        every = self.every or 0
        return every > 0 and step > 0 and step % every == 0


@dataclass(frozen=True)
class Choice:
    """All that was decided. Only those who put the parts together see it as a whole."""

    model: ModelChoice
    states: StateChoice
    params: ParamChoice
    grads: GradChoice
    activations: ActivationChoice
    commits: CommitChoice

    @property
    def slots_per_chunk(self) -> int:
        """How many slots a chunk of states has: for the last step, the last commit, and a step that is tried."""
        return 1 + (self.commits.every is not None) + self.states.tries_steps

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of small units are fetched ahead, more than `ParamChoice.prefetch_units`; 0: none.

        It is for ranks that share parameters, to gather several units at once. Where parameters come from a disk, what
        is read ahead sets the pace.
        """
        params, shares = self.params, self.grads.stage == 3
        from_disk = max(params.tier, params.frozen_tier).is_durable
        return self.grads.bucket_bytes if shares and params.prefetch_units and not from_disk else 0

    @property
    def grads_of_resident_params_on_nvme(self) -> bool:
        """Whether gradients are on NVMe while their parameters stay on the device.

        A device with memory of its own cannot have that: new parameters wait in the memory of their gradients until
        they are applied.
        """
        return self.grads.tier.is_durable and self.params.tier == DEVICE

    def with_states_on(self, tier: Tier) -> Choice:
        """The same choice with the states on another tier, which must not be the device."""
        grads = max(CPU, self.grads.tier)
        tries = self.states.tries_steps and tier.is_durable
        states = replace(self.states, tier=tier, tries_steps=tries, is_late=self.states.is_late and tier.is_durable)
        return replace(self, states=states, grads=replace(self.grads, tier=grads))
