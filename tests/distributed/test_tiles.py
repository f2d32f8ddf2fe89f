"""Weights in tiles over ranks: the bits of one process that runs them whole, whatever each rank's tokens are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload import AccumulationError, ConfigError, OffloadZero, Tuning
from tests.distributed.test_training import trained
from tests.support import models, sharded
from tests.support.cases import some
from tests.support.experts import USES, Layer, loss_of, quantised, tokens
from tests.support.quantised import in_blocks
from tests.support.ranks import Worlds
from tests.support.training import Run

TILES = Tuning(chunk=4096, threads=1, bucket=512, tile=512)
"""Two of six experts, one of each of two ranks' shards; an expert takes 256 bytes, and is two buckets."""

LAYER = 2 * 6 * 256
"""Bytes of a layer's experts."""

STEPS = 6
"""In two of them one rank has no tokens for experts, in one both have none, and in two a rank uses one expert."""


def in_tiles(worlds: Worlds, use: str, ranks: int, stage: int, **options: Any) -> list[Run]:
    chosen: dict[str, Any] = {"param_tier": "cpu", "tuning": TILES} | options
    return trained(worlds, use, ranks, STEPS, stage=stage, **chosen)


BY_ROW = ("indexed", "iterated")
"""Uses that take one expert after the other, which is refused where ranks share parameters."""

CASES = [*product(USES, [1, 2], [1, 2]), *product(sorted(USES.keys() - set(BY_ROW)), [3], [1, 2])]
OFTEN = [("indexed", 1, 1), ("indexed", 2, 2), ("grouped", 2, 1), ("grouped", 3, 1), ("gathered", 3, 2)]


@pytest.mark.parametrize(("use", "stage", "accumulation"), some(CASES, OFTEN))
def test_experts_in_tiles_have_the_bits_of_one_process(worlds: Worlds, use: str, stage: int, accumulation: int) -> None:
    """The buckets of a rank's tiles without tokens are sent with those of others."""
    in_tiles(worlds, use, 2, stage, accumulation=accumulation, wire="ordered")


ON_DISKS = [("indexed", 2), *product(["grouped", "summed"], [2, 3])]


@pytest.mark.parametrize(("use", "stage"), some(ON_DISKS, [("grouped", 3)]))
def test_they_do_on_disks_beside_late_copies(worlds: Worlds, use: str, stage: int, tmp_path: Path) -> None:
    tiers = dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme")
    options: dict[str, Any] = {"tuning": replace(TILES, chunk="256KiB")}
    options |= tiers | {"path": str(tmp_path / "swap"), "apart": True, "wire": "late"}
    in_tiles(worlds, use, 2, stage, **options)


def _refused(stage: int, use: str) -> str:
    model = models.build(use)
    with OffloadZero(model, tier="cpu", param_tier="cpu", stage=stage, tuning=TILES) as optimizer:
        assert optimizer._parts.parameters.tiles
        with pytest.raises(ConfigError) as caught:
            next(models.losses(use, model))()
    return str(caught.value)


@pytest.mark.parametrize("use", BY_ROW)
def test_experts_one_by_one_are_refused_where_ranks_share_parameters(worlds: Worlds, use: str) -> None:
    for message in worlds(2).run(_refused, 3, use):
        assert message.startswith("layers.0.experts.up runs in tiles")
        assert 'experts_implementation="grouped_mm"' in message


class Penalised(models.Routed):
    """Its forward uses the experts as a whole, too."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__("grouped")

    def forward(self, words: Tensor) -> Tensor:
        out = super().forward(words)
        experts = [layer.experts for layer in self.layers if isinstance(layer, Layer)]
        self.penalty = 0.1 * torch.stack([one.up.square().sum() for one in experts]).sum()
        return out


def _penalised(stage: int) -> str:
    model = Penalised()
    with OffloadZero(
        model, tier="cpu", param_tier="cpu", stage=stage, accumulation=2, tuning=TILES, compute_dtype=torch.float32
    ):
        loss = next(models.losses("grouped", model))() + model.penalty
        with pytest.raises(AccumulationError) as caught:
            loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_that_are_used_as_a_whole_too_are_refused(worlds: Worlds, stage: int) -> None:
    """Their gradients come one by one, and would count as those of two micro-batches."""
    for message in worlds(2).run(_penalised, stage):
        assert message.startswith("layers.1.experts.up was used both in tiles and as a whole")


def _quantised(stage: int, use: str) -> tuple[list[bool], int]:
    model, plain = (quantised(partial(in_blocks, block=2), use) for _ in range(2))  # of which two ranks have even parts
    trained = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
    # A tile without tokens is used at stage 3: two experts of each, and rank 0 has tokens for one or two.
    options: dict[str, Any] = {"stage": stage, "tuning": replace(TILES, tile=1), "compute_dtype": torch.float32}
    found = []
    with OffloadZero(model, trained, tier="cpu", param_tier="cpu", **options) as optimizer:
        parameters = optimizer._parts.parameters
        tiles = len(parameters.tiles_of(parameters.index[model.layers[0].experts.up]))
        for step in range(3):
            ids = tokens(step, words=5) if dist.get_rank() else torch.zeros(3, dtype=torch.int64)
            with torch.no_grad(), optimizer.gathered(model):
                for own, other in zip(plain.parameters(), model.parameters(), strict=True):
                    if own.requires_grad:
                        own.copy_(other)
            pairs = [(one, loss_of(one, ids)) for one in (model, plain)]
            routers = [torch.autograd.grad(loss, one.layers[0].router.weight, retain_graph=True) for one, loss in pairs]
            found += [torch.equal(pairs[0][1], pairs[1][1]), torch.equal(routers[0][0], routers[1][0])]
            pairs[0][1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return found, tiles


@pytest.mark.parametrize(("stage", "use"), [(2, "indexed"), (3, "grouped"), (3, "gathered")])
def test_quantised_experts_in_tiles_have_each_ranks_own_bits(worlds: Worlds, stage: int, use: str) -> None:
    for found, tiles in worlds(2).run(_quantised, stage, use):
        assert tiles == 3
        assert found == [True] * 6


def _peak(stage: int, tile: int) -> int:
    model = models.build("grouped")
    options: dict[str, Any] = {"tuning": replace(TILES, tile=tile), "stage": stage}
    with OffloadZero(model, tier="cpu", param_tier="cpu", **options) as optimizer:
        next(models.losses("grouped", model))().backward()
        peak: int = optimizer.stats()["peak_device_bytes"]
    return peak


@pytest.mark.parametrize("stage", [2, 3])
def test_two_tiles_are_on_the_device_at_a_time(worlds: Worlds, stage: int) -> None:
    """Two of a layer's six, the one in use and the next one; of the embedding's two at least one less."""
    in_tiles, whole = (worlds(2).run(_peak, stage, tile) for tile in (512, 0))
    for tiled_bytes, whole_bytes in zip(in_tiles, whole, strict=True):
        assert tiled_bytes <= whole_bytes - LAYER // 2


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_three_ranks_have_tiles_of_what_they_share_equally(worlds: Worlds, stage: int) -> None:
    """Three shards of the experts have whole rows, and those of the embedding's 64 rows have not."""
    in_tiles(worlds, "batched", 3, stage)


def _unsent(use: str) -> list[str]:
    """The units of layers whose gradients a rank has not sent when its backward ends."""
    model = models.build(use)
    batches = models.losses(use, model)
    with OffloadZero(model, tier="cpu", param_tier="cpu", stage=2, tuning=TILES) as optimizer:
        gradients: Any = optimizer._parts.gradients
        losses = [next(batches)() for _ in range(3)]
        losses[2 - 2 * dist.get_rank()].backward()  # of one expert, and of several
        buckets = gradients._buckets
        left = [unit for bucket in buckets.buckets[buckets._sent :] for unit in bucket.units]
        optimizer.step()
    return left


def test_gradients_do_not_wait_for_tiles_without_tokens(worlds: Worlds) -> None:
    """Buckets leave in one order. Those of such tiles leave with zeros when backward has left their layer."""
    for units in worlds(2).run(_unsent, "indexed"):
        assert not [unit for unit in units if unit.startswith("layers")]


def _leg(path: str, stage: int, tile: int, steps: int) -> dict[str, Tensor]:
    """Goes on for `steps` steps. Returns the parameters."""
    model = models.build("grouped")
    options: dict[str, Any] = {"tuning": replace(TILES, tile=tile), "stage": stage, "resume": "auto", "path": path}
    with OffloadZero(model, param_tier="nvme", commit_every=0, **options) as optimizer:
        batches = sharded.batches_of("grouped", model, dist.get_rank(), 2)
        done = optimizer.resumed.step if optimizer.resumed else 0
        for number in range(done + steps):
            loss = next(batches)()
            if number >= done:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.commit()
        with optimizer.gathered(model):
            return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_a_run_goes_on_with_other_tiles_at_another_stage(worlds: Worlds, tmp_path: Path) -> None:
    legs = [(2, 512), (3, 1024), (1, 0), (3, 512)]
    for stage, tile in legs:
        found = worlds(2).run(_leg, str(tmp_path / "legs"), stage, tile, 2)
    wanted = worlds(2).run(_leg, str(tmp_path / "whole"), 2, 0, 2 * len(legs))
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            assert torch.equal(one[name], value), name


@pytest.mark.slow
def test_tiles_of_a_mesh_of_replicas_by_shards(worlds: Worlds) -> None:
    """The experts have no four equal shards, the embedding has."""
    in_tiles(worlds, "batched", 4, 3, mesh=(2, 2))
