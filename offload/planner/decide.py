"""What the options mean for a model on its ranks: the one place where choices are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.choices import (
    ActivationChoice,
    Choice,
    CommitChoice,
    GradChoice,
    ModelChoice,
    ParamChoice,
    StateChoice,
)
from offload.errors import ConfigError
from offload.options import Options
from offload.sizes import option_bytes
from offload.storage.pool import LEAST_IN_FLIGHT
from offload.tiers import CPU, DEVICE, Tier

SMALL = 1 / 16
"""Of the frozen parameters' bytes: trained parameters that take less stay on the device while the others stream."""


@dataclass(frozen=True)
class Situation:
    """What the options are read for.

    Attributes:
        trained_bytes: what the trained parameters take on the device.
        frozen_bytes: what the frozen ones take there.
        ranks: how many ranks hold a shard each.
        ranks_on_node: how many ranks share this machine.
        slices: how many tensor-parallel ranks there are.
        temporary_bytes: what the optimizers take at once beside the arrays that they step.
        loss_weights: see `ModelChoice`.
        token_sum_bytes: likewise.
        has_same_bits: whether all optimizers give the same bits on the device and on the CPU.
        base_bytes: what a kept base takes, if frozen parameters are on NVMe; see `ParamChoice`. 0: none is kept.
        base_memory_bytes: likewise.
    """

    trained_bytes: int
    frozen_bytes: int
    ranks: int = 1
    ranks_on_node: int = 1
    slices: int = 1
    temporary_bytes: int = 0
    loss_weights: frozenset[str] = frozenset()
    token_sum_bytes: int = 0
    has_same_bits: bool = False
    base_bytes: int = 0
    base_memory_bytes: int = 0

    @property
    def keeps_trained(self) -> bool:
        """Whether trained parameters are so few beside the frozen ones that they stay on the device."""
        return self.trained_bytes < self.frozen_bytes * SMALL

    @property
    def is_alone(self) -> bool:
        """Whether one rank trains the model. Several ranks all have the same tiers, whatever each of them has free."""
        return self.ranks * self.slices == 1


class Wish(NamedTuple):
    """What the user may leave open, and choice.py tries in turn.

    Attributes:
        params: the tier of frozen parameters; trained ones follow, but on no slower tier than their states.
        grads: the tier of gradients.
        prefetch_units: how many units are fetched ahead.
        tile_bytes: the size of a tile; 0: there are no tiles.
    """

    params: Tier
    grads: Tier
    prefetch_units: int
    tile_bytes: int


def wish_of(options: Options) -> Wish:
    """The wish that the options say, with what is tried first where they say nothing."""
    ahead = options.tuned.prefetch_units
    return Wish(options.params, options.grads, 1 if ahead is None else ahead, options.tile_bytes or 0)


def chooses_params(options: Options, situation: Situation) -> bool:
    """Whether the planner may choose where parameters are."""
    return options.param_tier is None and options.state_tier > DEVICE and situation.is_alone


def chooses_grads(options: Options, situation: Situation) -> bool:
    """Whether the planner may choose where gradients wait."""
    return options.grad_tier is None and options.state_tier > DEVICE and situation.is_alone


def decide(options: Options, situation: Situation, wish: Wish | None = None) -> Choice:
    """Makes all choices.

    Args:
        options: what the user said.
        situation: what they are read for.
        wish: what is tried; None: `wish_of(options)`.

    Raises:
        ConfigError: if this model, or several ranks, cannot have what was asked for.
    """
    wish = wish_of(options) if wish is None else wish
    _require_possible(options, situation)
    params = _params(options, situation, wish)
    stage = _stage(options, situation, params)
    if stage == 3 and situation.ranks > 1:
        # A rank's shards of the parameters rest where its gradients wait, and come to the device around their use.
        params = _params(options, situation, wish, least=CPU)
    tuning, split = options.tuned, options.splits_masters
    ahead = tuning.prefetch_chunks
    return Choice(
        ModelChoice(
            options.compute_dtype,
            options.fp32_modules,
            options.cast_forward_inputs,
            options.units,
            situation.loss_weights,
            situation.token_sum_bytes,
        ),
        StateChoice(
            options.state_tier,
            split_master=split,
            form=options.states,
            chunk_numel=options.chunk_numel,
            in_flight=None if ahead is None else max(ahead + 2, LEAST_IN_FLIGHT),
            temporary_bytes=situation.temporary_bytes,
            tries_steps=tuning.speculate,
            shares=_shares(options, situation, params, wish.grads),
            is_late=tuning.late and options.state_tier.is_durable,
        ),
        params,
        GradChoice(
            wish.grads,
            micro_batches=options.micro_batches,
            takes_any=options.takes_any,
            params_stay=params.tier == DEVICE,
            stage=stage,
            bucket_bytes=options.bucket_bytes,
        ),
        ActivationChoice(
            options.activations,
            options.activation_bytes,
            recompute=tuning.recompute,
            partitioned=options.partition_activations,
            units=options.units,
        ),
        replace(commits_of(options), holds_params=split and options.every is not None),
    )


def commits_of(options: Options) -> CommitChoice:
    """The choice for commits, as far as it needs no model."""
    return CommitChoice(
        options.paths,
        options.origins,
        every=options.every,
        keep=options.keep,
        resume=options.resumes,
        converts_states=options.converts_states,
        begins_states=options.begins_states,
        transfers=options.resume_transfer,
        lock_timeout_s=options.lock_timeout,
    )


def _params(options: Options, situation: Situation, wish: Wish, least: Tier = DEVICE) -> ParamChoice:
    """The choice for parameters.

    Args:
        options: what the user said.
        situation: what they are read for.
        wish: what is tried.
        least: the fastest tier that they may have outside their use.
    """
    has_frozen = situation.frozen_bytes > 0
    # Trained ones are on no slower tier than their states, or on the device if they are few.
    trained = DEVICE if situation.keeps_trained else min(wish.params, options.state_tier)
    tile_bytes = wish.tile_bytes if situation.slices == 1 else 0
    frozen = max(wish.params, least) if has_frozen else DEVICE
    return ParamChoice(
        max(trained, least),
        frozen,
        has_frozen=has_frozen,
        keeps_trained=situation.keeps_trained,
        prefetch_units=wish.prefetch_units,
        tile_bytes=tile_bytes,
        is_chosen=chooses_params(options, situation),
        base_bytes=situation.base_bytes if frozen.is_durable else 0,
        base_memory_bytes=situation.base_memory_bytes if frozen.is_durable else 0,
    )


def _shares(options: Options, situation: Situation, params: ParamChoice, grads: Tier) -> bool:
    """Whether some states may be on the device while others are not.

    Where the parameters stream, that saves bytes of the disk only; see share.py. A split master is half in its
    parameter, and over several ranks gradients are averaged where all of them wait.
    """
    states = options.state_tier
    is_possible = params.tier == DEVICE < states or (states.is_durable and not grads.is_durable)
    is_allowed = situation.is_alone and not options.splits_masters and not options.tuned.speculate
    return is_possible and is_allowed and situation.has_same_bits


def _stage(options: Options, situation: Situation, params: ParamChoice) -> int | None:
    if situation.ranks == 1:
        return options.stage
    return options.stage or (3 if params.streams else 2)


def _require_possible(options: Options, situation: Situation) -> None:
    wanted, states = options.params, options.state_tier
    if wanted > DEVICE and not situation.frozen_bytes:
        if states == DEVICE:
            raise ConfigError(
                f'param_tier="{wanted}" with tier="device", and no parameter is frozen: states take six '
                "times what parameters take, and would stay there; leave param_tier out, or choose "
                'tier="cpu" or "nvme"'
            )
        if wanted > states:
            raise ConfigError(
                f'param_tier="{wanted}" with tier="{states}", and no parameter is frozen: states take '
                'six times what parameters take, and would stay in RAM; choose tier="nvme", or param_tier="cpu"'
            )
    if situation.slices > 1 and options.tile_bytes:
        raise ConfigError(
            f"Tuning.tile={option_bytes(options.tile_bytes)} with {situation.slices} tensor-parallel ranks: each of "
            "them has a part of every layer, which comes as a whole; leave it out"
        )
    if situation.ranks > 1 and options.grads.is_durable and options.stage == 1 and options.micro_batches > 1:
        raise ConfigError(
            f'grad_tier="nvme" with stage=1 and accumulation={options.accumulation!r}: at stage 1 each rank sums whole '
            "gradients in RAM; choose stage=2, or leave grad_tier out"
        )


def replicas_of(choice: Choice, *, ranks: int, rows: int) -> int:
    """How many groups of ranks each keep all parameters in their tier.

    At stage 3 each row of the mesh is one group. Before stage 3 each rank that streams parameters keeps all of them.

    Args:
        choice: what was decided.
        ranks: how many ranks there are.
        rows: of the mesh that is given as process_group.
    """
    if choice.grads.stage == 3:
        return rows
    return 1 if choice.params.tier == DEVICE else ranks
