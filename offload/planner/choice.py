"""Chooses what the user left open: the tiers of parameters and gradients, how many units are prefetched, and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from offload import config as configuration
from offload.config import SUM_BLOCK, Config
from offload.errors import BudgetError, ConfigError
from offload.layout import Layout, ParamSpec, build, tiled
from offload.model.units import (
    ROOT,
    compute_dtypes,
    device_for,
    frozen_of,
    resident_bytes_of,
    rows_of,
    specs_of,
    untrained_bytes,
)
from offload.planner.placement import Needs, Placement, Room, place
from offload.tiers import CPU, DEVICE, NVME

# Read and written a parameter and step by streamed 16-bit parameters, and by gradients in slots.
_BYTES_OF_PARAM = {DEVICE: 0, CPU: 0, NVME: 6}
_BYTES_OF_GRAD = {DEVICE: 0, CPU: 0, NVME: 4}

_Refused = tuple[Config, Layout, BudgetError]

MOST_HALVINGS = 8
"""Of the largest weight, until its tiles fit."""


@dataclass(frozen=True)
class ModelShape:
    """What a layout needs to know of a model.

    Attributes: specs: of trained parameters, then of frozen ones; params: in the same order; rows: the elements of a
    row of each parameter that can be tiled; resident_bytes: of all else, which stays on the device.
    """

    specs: Sequence[ParamSpec]
    params: Sequence[nn.Parameter]
    rows: Mapping[int, int]
    resident_bytes: int

    @classmethod
    def of(
        cls, model: nn.Module, groups: Sequence[Mapping[str, Any]], config: Config, *, planned: bool = True
    ) -> ModelShape:
        """Args: groups: the optimizer's param_groups; planned: only shapes count, as of a model on the meta device.

        Raises: ConfigError as `OffloadZero` does.
        """
        keep_fp32, dtype = config.keep_fp32, config.compute_dtype
        specs, params = specs_of(model, groups, keep_fp32, dtype, chosen=config.units, planned=planned)
        frozen, others = frozen_of(model, keep_fp32, dtype, chosen=config.units)
        specs, params = [*specs, *frozen], [*params, *others]
        resident_bytes = untrained_bytes(model, params, compute_dtypes(model, keep_fp32, dtype))
        return cls(specs, params, rows_of(model, params), resident_bytes)

    def cut(self, parts: int) -> ModelShape:
        """What one of `parts` tensor-parallel ranks would have, judged by shapes alone: a part of each matrix in a
        block, and all of everything else (embeddings, head, norms, biases)."""
        of_blocks = [param.dim() > 1 and spec.unit != ROOT for spec, param in zip(self.specs, self.params, strict=True)]
        specs = [
            replace(spec, numel=-(-spec.numel // parts), shard_dim=0) if is_cut else spec
            for spec, is_cut in zip(self.specs, of_blocks, strict=True)
        ]
        return replace(self, specs=specs, rows={})

    @property
    def frozen_bytes(self) -> int:
        """Bytes that the frozen parameters take on the device."""
        both = zip(self.specs, self.params, strict=True)
        return sum(resident_bytes_of(param, spec.numel, spec.dtype) for spec, param in both if spec.is_frozen)

    def config(self, config: Config) -> Config:
        """What `config` means for this model. Raises: ConfigError; see `config.for_model`."""
        trained_bytes = sum(spec.numel * spec.dtype.itemsize for spec in self.specs if not spec.is_frozen)
        return configuration.for_model(config, trained_bytes=trained_bytes, frozen_bytes=self.frozen_bytes)

    def room(self, available_bytes: int | None = None) -> Room:
        """What the model's device has room for. Args: available_bytes: see `Room`."""
        return Room(self.resident_bytes, available_bytes, self.frozen_bytes)

    def layout(self, config: Config, *, ranks: int = 1, rank: int = 0, replicas: int = 1) -> Layout:
        """The layout of what is trained, and of frozen parameters if they stream. Args: replicas: how many groups of
        ranks each keep all trained parameters."""
        streams = {False: config.param_tier > DEVICE, True: config.frozen_tier > DEVICE}
        rows = {number: row for number, row in self.rows.items() if streams[self.specs[number].is_frozen]}
        specs = tiled(self.specs, rows, config.tile_bytes or 0)
        if config.frozen_tier == DEVICE:
            specs = [spec for spec in specs if not spec.is_frozen]
            return build(specs, config.chunk_numel, ranks=ranks, rank=rank, replicas=replicas)
        kept = replicas if config.stage == 3 else ranks
        return build(specs, config.chunk_numel, ranks=ranks, rank=rank, replicas=kept, trained_replicas=replicas)


def choose(
    config: Config, layout_of: Callable[[Config], Layout], *, direct: bool, room: Room
) -> tuple[Config, Layout, Placement]:
    """The fastest configuration that fits the budgets: fewest bytes over the disk first, then over the link.

    Args: layout_of: lays the model out for a configuration; direct: as in `place`.
    Raises: BudgetError if nothing fits, see `_refusal`; ConfigError.
    """
    chosen, layout, found = search(config, layout_of, direct=direct, room=room)
    if isinstance(found, BudgetError):
        raise found
    return chosen, layout, found


def search(
    config: Config, layout_of: Callable[[Config], Layout], *, direct: bool, room: Room
) -> tuple[Config, Layout, Placement | BudgetError]:
    """As `choose`. If nothing fits, the configuration that lacks least, and the error; see `_refusal`."""
    refused: list[_Refused] = []
    for tiers in _tiers(config, direct=direct):
        for candidate in _shapes(tiers, layout_of):
            layout = layout_of(candidate)
            try:
                return candidate, layout, place(layout, candidate, direct=direct, room=room)
            except BudgetError as error:
                refused.append((candidate, layout, error))
                if error.option != "device_memory":
                    break  # what saves memory on the device does not help
    return _refusal(refused, direct=direct, room=room)


def _refusal(refused: Sequence[_Refused], *, direct: bool, room: Room) -> _Refused:
    """Of configurations of which none fits: that which lacks least of one budget, if any lacks one only. If all lack
    both, its error names both. With what the error says to give, it fits."""
    one: list[_Refused] = []
    both: list[tuple[_Refused, BudgetError]] = []
    for config, layout, error in refused:
        try:
            if error.option == "device_memory":  # RAM comes after it
                unbound = replace(config, device_memory=None)
                place(layout, unbound, direct=direct, room=replace(room, available_bytes=None))
            one.append((config, layout, error))
        except BudgetError as other:
            both.append(((config, layout, error), other))
    if one:
        return min(one, key=lambda refused: _lack(refused[2]))
    (config, layout, first), second = min(both, key=lambda pair: _lack(pair[0][2]) + _lack(pair[1]))
    error = BudgetError(
        f"{first}. Besides, {second}", needed=first.needed, available=first.available, option=first.option
    )
    return config, layout, error


def _lack(error: BudgetError) -> int:
    return error.needed - error.available


def _tiers(config: Config, *, direct: bool) -> Iterator[Config]:
    wanted = config.frozen_tier if config.has_frozen else config.param_tier
    params = [wanted]
    grads = [config.grad_tier]
    if config.chooses_params:
        has_nvme = config.tier.is_durable or (config.has_frozen and config.paths)
        params = [DEVICE, CPU, NVME] if has_nvme else [DEVICE, CPU]
    if config.chooses_grads and config.tier.is_durable and config.chunk_numel >= SUM_BLOCK:
        grads = [CPU, NVME]
    pairs = sorted(product(params, grads), key=lambda pair: _BYTES_OF_PARAM[pair[0]] + _BYTES_OF_GRAD[pair[1]])
    chosen = [
        replace(config.with_params_on(param) if config.chooses_params else config, grad_tier=grad)
        for param, grad in pairs
    ]
    # Where nothing else is left `place` says what is wrong.
    yield from [one for one in chosen if direct or not one.stores_gradients_of_device] or chosen


def _shapes(config: Config, layout_of: Callable[[Config], Layout]) -> Iterator[Config]:
    """Configurations with other numbers of prefetched units and other tiles, from the fastest to the one that takes
    least memory on the device."""
    if not config.streams:
        yield replace(config, tile_bytes=0)
        return
    depths = (config.prefetch_units, 0) if config.chooses_prefetch else (config.prefetch_units,)
    whole = replace(config, tile_bytes=config.tile_bytes or 0)
    yield from (replace(whole, prefetch_units=depth) for depth in depths)
    if config.tile_bytes is None:
        specs = layout_of(whole).specs
        largest = max((spec.numel * spec.dtype.itemsize for spec in specs), default=0)
        for tile in (largest >> halvings for halvings in range(1, MOST_HALVINGS + 1)):
            yield from (replace(whole, prefetch_units=depth, tile_bytes=max(tile, 1)) for depth in depths)


def least_cpu_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ranks: int = 1,
    replicas: int = 1,
    device: torch.device | str | None = None,
    **options: Any,
) -> int:
    """The least `cpu_memory`, in bytes, with which `OffloadZero(model, ..., tier="nvme")` runs on each of `ranks`.

    Args: replicas: rows of the mesh that is given as process_group; device, options: as OffloadZero's, but for `tier`
    and `path`.
    Raises: ConfigError as `OffloadZero` does.
    """
    for name in options.keys() & {"tier", "path"}:
        raise ConfigError(f'{name}={options[name]!r}: this is the least of tier="nvme" on any path: leave {name} out')
    config = configuration.check(tier="nvme", path=".", **options)
    groups = [{"params": list(model.parameters())}] if optimizer is None else optimizer.param_groups
    shape = ModelShape.of(model, groups, config)
    config = configuration.over_ranks(shape.config(config), ranks=ranks, ranks_on_node=1)
    copies = configuration.replicas_of(config, ranks=ranks, rows=replicas)
    direct = device_for(device, shape.params[0].device).type == "cpu"
    if config.chooses_params and config.grad_tier.is_durable and not direct:
        config = config.with_params_on(NVME)  # the least of those that `place` takes
    tiles = config if config.streams else replace(config, tile_bytes=0)
    layouts = (shape.layout(tiles, ranks=ranks, rank=rank, replicas=copies) for rank in range(ranks))
    return max(Needs(layout, config, direct).least_bytes for layout in layouts)
