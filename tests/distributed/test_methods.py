"""Another method of the optimizer's class over ranks: the bits of plain torch on averaged gradients, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero
from tests.distributed.test_optimizers import TUNING, gradients, net
from tests.optim.test_methods import Averaged
from tests.support.ranks import Worlds
from tests.support.toy import batch

STEPS = 6
HALF = 4
Found = tuple[list[Tensor], dict[str, Tensor], dict[str, Mapping[str, Any]]]


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(batch(99)).clone()  # type: ignore[no-any-return]


@cache
def plain(counts: tuple[int, ...]) -> Found:
    """What plain torch evaluates, its parameters and its states. Args: counts: how many ranks take each step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    model = net()
    optimizer = Averaged(list(model.parameters()))
    outputs = []
    for step, ranks in enumerate(counts):
        total: dict[str, Tensor] = {}
        for rank in range(ranks):
            model.zero_grad()
            gradients(model, step, rank, ranks)
            for key, param in model.named_parameters():
                if param.grad is not None:
                    total[key] = total[key] + param.grad if key in total else param.grad.clone()
        for key, param in model.named_parameters():
            param.grad = total[key] / ranks if key in total else None
        optimizer.step()
        if step % 2:
            optimizer.eval()
            outputs.append(evaluated(model))
            optimizer.train()
            optimizer.exchange()
    torch.set_num_threads(before)
    states = {key: dict(optimizer.state[param]) for key, param in model.named_parameters()}
    return outputs, {key: param.detach().clone() for key, param in model.named_parameters()}, states


def train(first: int, last: int, options: dict[str, Any]) -> Found:
    """On a rank. It commits in the mode for evaluation, which it resumes in."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = net()
    outputs = []
    given = Averaged(list(model.parameters()))
    with OffloadZero(model, given, compute_dtype=torch.float32, tuning=TUNING, **options) as optimizer:
        for step in range(first, last):
            if optimizer.resumed is not None and step == first:
                outputs.append(evaluated(model))
                optimizer.apply("train")
                optimizer.apply("exchange")
            optimizer.zero_grad()
            gradients(model, step, rank, ranks)
            optimizer.step()
            if step % 2:
                optimizer.apply("eval")
                outputs.append(evaluated(model))
                if step == last - 1 < STEPS - 1:
                    optimizer.commit()
                else:
                    optimizer.apply("train")
                    optimizer.apply("exchange")
        states = {key: dict(optimizer.state_of(param)) for key, param in model.named_parameters()}
        # At stage 3 no rank has a whole parameter between two units.
        read = (
            (lambda key, _: states[key]["master"])
            if options["stage"] == 3
            else (lambda _, param: param.detach().clone())
        )
        return outputs, {key: read(key, param) for key, param in model.named_parameters()}, states


def assert_as_plain(counts: tuple[int, ...], runs: list[Found]) -> None:
    outputs, params, states = plain(counts)
    for evaluations, found, shown in runs:
        for one, other in zip(evaluations, outputs[-len(evaluations) :], strict=True):
            assert torch.equal(one, other)
        for key, value in params.items():
            assert torch.equal(found[key], value), key
            assert torch.equal(shown[key]["master"], value), key
            assert torch.equal(shown[key]["z"], states[key]["z"]), key
            assert shown[key]["count"] == states[key]["count"]


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_have_the_bits_of_plain_torch(worlds: Worlds, stage: int, tier: str) -> None:
    runs = worlds(2).run(train, 0, STEPS, {"tier": "cpu", "stage": stage, "param_tier": tier})
    assert_as_plain((2,) * STEPS, runs)


@pytest.mark.parametrize("after", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_is_committed_after_a_method_is_resumed(worlds: Worlds, after: int, tmp_path: Path) -> None:
    options = {"tier": "nvme", "path": tmp_path / "run", "commit_every": 0, "stage": 2}
    worlds(2).run(train, 0, HALF, options)
    runs = worlds(after).run(train, HALF, STEPS, options | {"resume": True})
    assert_as_plain((2,) * HALF + (after,) * (STEPS - HALF), runs)


def apply_differently() -> str:
    model = net()
    with OffloadZero(model, Averaged(list(model.parameters())), tier="cpu", tuning=TUNING) as optimizer:
        gradients(model, 2, 0, 1)
        optimizer.step()
        before = {key: param.detach().clone() for key, param in model.named_parameters()}
        error = ""
        try:
            optimizer.apply(("eval", "exchange")[torch.distributed.get_rank()])
        except ConfigError as raised:
            error = str(raised)
        assert all(torch.equal(param, before[key]) for key, param in model.named_parameters())
        optimizer.apply("eval")
        return error


def test_ranks_that_apply_different_methods_apply_none(worlds: Worlds) -> None:
    for error in worlds(2).run(apply_differently):
        assert "the ranks differ in the method" in error
