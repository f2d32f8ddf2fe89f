"""Tries what the user left open: the tiers of parameters and gradients, how many units are prefetched, and tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.choices import Choice
from offload.errors import BudgetError, ConfigError
from offload.layout import Layout, ParamSpec, Rows, Whole, build, tiled
from offload.model.dense import is_dense
from offload.model.inner import Inner
from offload.model.loss import LossLinear
from offload.model.token_tiles import token_sum_bytes
from offload.model.units import (
    ROOT,
    compute_dtypes,
    device_for,
    rows_of,
    specs_of,
    untrained_bytes,
)
from offload.optim.adopt import groups_of, rules_of
from offload.optim.rule import Rule
from offload.optim.rules.adam import AdamRule
from offload.options import Options
from offload.planner.decide import Situation, Wish, chooses_grads, chooses_params, decide, replicas_of, wish_of
from offload.planner.machine import kernel_threads
from offload.planner.placement import Needs, Placement, Room, place, require_cuts
from offload.sizes import SUM_BLOCK, option_bytes
from offload.tiers import CPU, DEVICE, NVME

# Read and written a parameter and step by streamed 16-bit parameters, and by gradients in slots.
_BYTES_OF_PARAM = {DEVICE: 0, CPU: 0, NVME: 6}
_BYTES_OF_GRAD = {DEVICE: 0, CPU: 0, NVME: 4}

_Refused = tuple[Choice, Layout, BudgetError]


class Candidate(NamedTuple):
    """A choice that fits.

    Attributes:
        choice: what was decided.
        layout: the model, laid out for it.
        placement: what is where.
    """

    choice: Choice
    layout: Layout
    placement: Placement


Pick = Callable[[Candidate, Iterator[Candidate]], Candidate]
"""Returns the fastest of several candidates. It is given the one that moves the fewest bytes over the disk, then over
the link, and the others, which are made when it asks for them."""

MOST_HALVINGS = 8
"""Of the largest weight, until its tiles fit."""


@dataclass(frozen=True)
class ModelShape:
    """What a layout needs to know of a model.

    Attributes:
        specs: of trained parameters, then of frozen ones.
        inners: the inner tensors of parameters that these are of, in the same order.
        rows: the weights that can be tiled, by the index of the first spec of each.
        resident_bytes: of buffers and of parameters that always stay on the device.
        loss_weights: see `ModelChoice`.
        token_sum_bytes: likewise.
    """

    specs: Sequence[ParamSpec]
    inners: Sequence[Inner]
    rows: Mapping[int, Rows]
    resident_bytes: int
    loss_weights: frozenset[str] = frozenset()
    token_sum_bytes: int = 0
    _layouts: dict[Hashable, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, model: nn.Module, groups: Sequence[Mapping[str, Any]], options: Options, *, planned: bool = True
    ) -> ModelShape:
        """The shape of a model.

        Args:
            model: the model.
            groups: the optimizer's param_groups.
            options: what the user said.
            planned: whether only shapes count, as of a model on the meta device.

        Raises:
            ConfigError: as `OffloadZero` does.
        """
        keep_fp32, dtype = options.fp32_modules, options.compute_dtype
        specs, inners = specs_of(model, groups, keep_fp32, dtype, chosen=options.units, planned=planned)
        resident_bytes = untrained_bytes(model, inners, compute_dtypes(model, keep_fp32, dtype))
        late = {one.weight for one in model.modules() if isinstance(one, LossLinear)}
        names = frozenset(spec.name for spec, one in zip(specs, inners, strict=True) if one.param in late)
        rows, whole = rows_of(model, specs, inners)
        specs = [replace(spec, why_whole=whole.get(number, "")) for number, spec in enumerate(specs)]
        return cls(specs, inners, rows, resident_bytes, names, token_sum_bytes(model))

    def with_groups_by_kind(self) -> ModelShape:
        """The shape with the matrices of blocks in param group 0, and all else that is trained in group 1."""
        specs = [
            spec if spec.group is None else replace(spec, group=int(one.param.dim() != 2 or spec.unit == ROOT))
            for spec, one in zip(self.specs, self.inners, strict=True)
        ]
        return replace(self, specs=specs)

    def with_rules(self, rules: Sequence[Rule], options: Options) -> ModelShape:
        """The shape for these optimizers.

        Args:
            rules: that of each param group.
            options: what the user said.

        Raises:
            ConfigError: one steps whole parameters, of which a rank or a tile has a part only.
        """
        specs, rows = [], dict(self.rows)
        for number, (spec, one) in enumerate(zip(self.specs, self.inners, strict=True)):
            if spec.group is None:
                specs.append(spec)
                continue
            rule = rules[spec.group]
            if not rule.is_whole:
                is_late = rule.can_be_late and one.param.dim() == 3
                specs.append(replace(spec, states=rule.states, whole=None, is_late=is_late))
                continue
            if spec.shard_dim is not None:
                raise ConfigError(
                    f"{spec.name} is cut by tensor parallelism, and {rule.name} steps whole parameters: give it "
                    "another optimizer"
                )
            if options.tile_bytes and rows.pop(number, None):
                raise ConfigError(
                    f"Tuning.tile={option_bytes(options.tile_bytes)}: {rule.name} steps {spec.name} as a whole, and a "
                    "tile is a part of it: leave tile out, or give that parameter another optimizer"
                )
            rows.pop(number, None)
            kept = rule.kept(tuple(one.param.shape))
            strides = tuple(one.param.stride()) if is_dense(one.param) and not one.param.is_contiguous() else ()
            shape = tuple(one.param.shape)
            whole = Whole(shape, strides, kept.small, kept.has_slices and not strides, rule.flops(shape))
            specs.append(replace(spec, states=kept.states, whole=whole))
        return replace(self, specs=specs, rows=rows)

    def temporary_bytes(self, rules: Sequence[Rule], options: Options, threads: int) -> int:
        """What rules take at once beside the arrays that they step: those of one optimizer, and of others beside it.

        Args:
            rules: that of each param group.
            options: what the user said.
            threads: how many threads the kernels have.
        """
        each: dict[str, int] = {}
        for spec in self.specs:
            if spec.group is not None:
                rule = rules[spec.group]
                numel = options.chunk_numel if spec.whole is None else spec.whole.part_numel
                each[rule.name] = max(each.get(rule.name, 0), rule.temporary_bytes(numel, threads))
        return sum(each.values())

    def cut(self, parts: int) -> ModelShape:
        """The shape of the part that one of `parts` tensor-parallel ranks would have, judged by shapes alone.

        The rank has a part of each matrix in a block, and all of everything else (embeddings, head, norms, biases).
        """
        both = zip(self.specs, self.inners, strict=True)
        of_blocks = [one.tensor.dim() > 1 and spec.unit != ROOT for spec, one in both]
        specs = [
            replace(spec, numel=-(-spec.numel // parts), shard_dim=0) if is_cut else spec
            for spec, is_cut in zip(self.specs, of_blocks, strict=True)
        ]
        return replace(self, specs=specs, rows={})

    def nbytes(self, *, is_frozen: bool) -> int:
        """How many bytes the trained, or the frozen, parameters take on the device."""
        return sum(spec.numel * spec.dtype.itemsize for spec in self.specs if spec.is_frozen is is_frozen)

    def situation(self, *, ranks: int = 1, ranks_on_node: int = 1, slices: int = 1) -> Situation:
        """What the options are read for; see `Situation` for the arguments."""
        trained_bytes, frozen_bytes = (self.nbytes(is_frozen=is_frozen) for is_frozen in (False, True))
        return Situation(
            *(trained_bytes, frozen_bytes, ranks, ranks_on_node, slices),
            loss_weights=self.loss_weights,
            token_sum_bytes=self.token_sum_bytes,
        )

    def room(self, options: Options, available_bytes: int | None = None, *, ranks_on_node: int = 1) -> Room:
        """What there is room for; see `Room` for the arguments."""
        return Room(
            self.resident_bytes,
            available_bytes,
            self.nbytes(is_frozen=True),
            cpu_memory=options.cpu_bytes,
            device_memory=options.device_bytes,
            ranks_on_node=ranks_on_node,
        )

    def layout(self, choice: Choice, *, ranks: int = 1, rank: int = 0, replicas: int = 1) -> Layout:
        """The layout of the parameters that are trained or stream. Choices for which it is the same one share it.

        Args:
            choice: what was decided.
            ranks: how many ranks hold a shard each.
            rank: which one this is.
            replicas: how many groups of ranks each keep all trained parameters.
        """
        comes = {is_frozen: choice.params.tier_of(is_frozen=is_frozen) > DEVICE for is_frozen in (False, True)}
        # Who makes owed steps has to hear of every use. Where ranks have copies, they use these alone.
        can_owe = choice.states.is_late and (ranks == 1 or (choice.grads.stage == 3 and replicas == 1))
        kept = replicas if choice.grads.stage == 3 or choice.params.frozen_tier == DEVICE else ranks
        tile_bytes, numel = choice.params.tile_bytes, choice.states.chunk_numel
        key = (comes[True], comes[False] and tile_bytes > 0, tile_bytes, can_owe, numel, ranks, rank, kept, replicas)
        if key not in self._layouts:
            rows = [row for number, row in self.rows.items() if comes[self.specs[number].is_frozen]]
            specs = tiled(self.specs, rows, tile_bytes, ranks=ranks)
            specs = [replace(one, is_late=one.is_late and one.tile > 0 and can_owe) for one in specs]
            held = [spec for spec in specs if comes[True] or not spec.is_frozen]
            made = build(held, numel, ranks=ranks, rank=rank, replicas=kept, trained_replicas=replicas)
            self._layouts[key] = made
        return self._layouts[key]


def choose(
    options: Options,
    situation: Situation,
    layout_of: Callable[[Choice], Layout],
    *,
    direct: bool,
    room: Room,
    pick: Pick | None = None,
) -> tuple[Layout, Placement]:
    """The fastest choice that fits the budgets.

    Args:
        options: what the user said.
        situation: what the options are read for.
        layout_of: lays the model out for a choice.
        direct: whether the model's device is the CPU, so that copies need no buffers.
        room: what there is room for.
        pick: says which one is the fastest, of those with the same tiles; None: the one that moves the fewest bytes
            over the disk, then over the link.

    Returns:
        The layout and the placement.

    Raises:
        BudgetError: if nothing fits, see `_refusal`.
        ConfigError: if the model, or several ranks, cannot have what was asked for.
    """
    _, layout, placement = search(options, situation, layout_of, direct=direct, room=room, pick=pick)
    if isinstance(placement, BudgetError):
        raise placement
    return layout, placement


def search(
    options: Options,
    situation: Situation,
    layout_of: Callable[[Choice], Layout],
    *,
    direct: bool,
    room: Room,
    pick: Pick | None = None,
) -> tuple[Choice, Layout, Placement | BudgetError]:
    """As `choose`, but returns the error if nothing fits, with the choice that lacks least; see `_refusal`."""
    refused: list[_Refused] = []

    def fitting() -> Iterator[Candidate]:
        """The fastest one first, as far as the bytes say it."""
        is_first = True
        for tiers in _tiers(options, situation, direct=direct):
            for wish in _shapes(tiers, options, situation, layout_of, direct=direct):
                if not is_first and wish.tile_bytes not in (0, tiers.tile_bytes):
                    break  # tiles are for what does not fit without them
                choice = decide(options, situation, wish)
                layout = layout_of(choice)
                try:
                    placement = place(layout, choice, direct=direct, room=room)
                except BudgetError as error:
                    refused.append((choice, layout, error))
                    if error.option != "device_memory":
                        break  # what saves memory on the device does not help
                    continue
                if is_first:
                    require_cuts(layout, options.tile_bytes)
                    is_first = False
                yield Candidate(choice, layout, placement)

    candidates = fitting()
    first = next(candidates, None)
    if first is None:
        return _refusal(refused, direct=direct, room=room)
    if pick is None:
        return first
    tiles = _tiles_of(first.layout)  # which decide bits
    return pick(first, (one for one in candidates if _tiles_of(one.layout) == tiles))


def _tiles_of(layout: Layout) -> dict[str, int]:
    """The elements of a tile, by the name of each parameter that has some."""
    return {spec.name: spec.tile for spec in layout.specs if spec.tile}


def _refusal(refused: Sequence[_Refused], *, direct: bool, room: Room) -> _Refused:
    """Of choices that do not fit, the one whose error helps most.

    If some lack one budget only, it is the one of these that lacks least. If all lack both budgets, its error names
    both. With what the error says to give, the choice fits.
    """
    one: list[_Refused] = []
    both: list[tuple[_Refused, BudgetError]] = []
    for choice, layout, error in refused:
        try:
            if error.option == "device_memory":  # RAM comes after it
                unbound = replace(room, available_bytes=None, device_memory=None)
                place(layout, choice, direct=direct, room=unbound)
            one.append((choice, layout, error))
        except BudgetError as other:
            both.append(((choice, layout, error), other))
    if one:
        return min(one, key=lambda refused: _lack(refused[2]))
    (choice, layout, first), second = min(both, key=lambda pair: _lack(pair[0][2]) + _lack(pair[1]))
    error = BudgetError(
        f"{first}. Besides, {second}", needed=first.needed, available=first.available, option=first.option
    )
    return choice, layout, error


def _lack(error: BudgetError) -> int:
    return error.needed - error.available


def _tiers(options: Options, situation: Situation, *, direct: bool) -> Iterator[Wish]:
    first, states = wish_of(options), options.state_tier
    params, grads = [first.params], [first.grads]
    if chooses_params(options, situation):
        has_nvme = states.is_durable or (situation.frozen_bytes and options.paths)
        params = [DEVICE, CPU, NVME] if has_nvme else [DEVICE, CPU]
    if chooses_grads(options, situation) and states.is_durable and options.chunk_numel >= SUM_BLOCK:
        grads = [CPU, NVME]
    pairs = sorted(product(params, grads), key=lambda pair: _BYTES_OF_PARAM[pair[0]] + _BYTES_OF_GRAD[pair[1]])
    wishes = [first._replace(params=param, grads=grad) for param, grad in pairs]
    possible = [
        wish for wish in wishes if direct or not decide(options, situation, wish).grads_of_resident_params_on_nvme
    ]
    yield from possible or wishes  # where nothing else is left `place` says what is wrong


def _shapes(
    wish: Wish, options: Options, situation: Situation, layout_of: Callable[[Choice], Layout], *, direct: bool
) -> Iterator[Wish]:
    """The same wish with other numbers of prefetched units, and with other tiles.

    They go from the fastest one to the one that takes least memory on the device.
    """
    first = decide(options, situation, wish)
    if not first.params.streams:
        yield wish._replace(tile_bytes=0)
        return
    depths: Sequence[int] = (wish.prefetch_units,)
    if options.tuned.prefetch_units is None:
        # Nothing copies beside a CPU that computes: what is fetched ahead would be waited for at once.
        depths = (0,) if direct and situation.is_alone else (wish.prefetch_units, 0)
    yield from (wish._replace(prefetch_units=depth) for depth in depths)
    if options.tile_bytes is None and situation.is_alone:
        specs = layout_of(first).specs
        largest = max((spec.numel * spec.dtype.itemsize for spec in specs), default=0)
        for tile in (largest >> halvings for halvings in range(1, MOST_HALVINGS + 1)):
            yield from (wish._replace(prefetch_units=depth, tile_bytes=max(tile, 1)) for depth in depths)


def least_cpu_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    ranks: int = 1,
    replicas: int = 1,
    device: torch.device | str | None = None,
    **options: Any,
) -> int:
    """The least `cpu_memory`, in bytes, with which `OffloadZero(model, ..., tier="nvme")` runs on each of `ranks`.

    Args:
        model: may be on the meta device: only shapes count.
        optimizer: whose param_groups are trained; None: all parameters are one group of AdamW's.
        ranks: data-parallel ranks.
        replicas: rows of the mesh that is given as process_group.
        device: as OffloadZero's.
        **options: as OffloadZero's, but for `tier` and `path`.

    Raises:
        ConfigError: as `OffloadZero` does.
    """
    for name in options.keys() & {"tier", "path"}:
        raise ConfigError(f'{name}={options[name]!r}: this is the least of tier="nvme" on any path: leave {name} out')
    given = Options(tier=NVME.name, path=".", **options)
    optimizers: Any = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    groups = groups_of(optimizers) if optimizers else [{"params": list(model.parameters())}]
    shape = ModelShape.of(model, groups, given)
    rules = rules_of(optimizers, given.states) if optimizers else [AdamRule(given.states)]
    shape = shape.with_rules(rules, given)
    situation, wish = shape.situation(ranks=ranks), wish_of(given)
    direct = device_for(device, shape.inners[0].param.device).type == "cpu"
    threads = kernel_threads(given.tuned.threads, ranks_on_node=1, direct=direct)
    situation = replace(situation, temporary_bytes=shape.temporary_bytes(rules, given, threads))
    copies = replicas_of(decide(given, situation, wish), ranks=ranks, rows=replicas)
    if chooses_params(given, situation) and given.grads.is_durable and not direct:
        wish = wish._replace(params=NVME)  # the least of those that `place` takes
    if not decide(given, situation, wish).params.streams:
        wish = wish._replace(tile_bytes=0)
    choice = decide(given, situation, wish)
    layouts = (shape.layout(choice, ranks=ranks, rank=rank, replicas=copies) for rank in range(ranks))
    return max(Needs(layout, choice, direct).least_bytes for layout in layouts)
