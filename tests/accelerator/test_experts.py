"""Experts in tiles on a device with memory of its own. The oracle is plain torch there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import BudgetError, OffloadZero, Tuning
from tests import simulated_device
from tests.support.experts import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    WIDTH,
    Experts,
    Mixture,
    grouped,
    in_tiles,
    loss_of,
    mixture,
    quantised,
    same_steps,
    tokens,
    weights_of,
    wrapped,
)

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = torch.device("simulated:0") if simulated_device.is_wanted() else torch.device("cpu")
MATRIX = WIDTH * HIDDEN * 4
"""Bytes of one expert's part of a parameter."""

TUNING = Tuning(chunk="256KiB", prefetch_units=1, threads=1, tile=2 * MATRIX)


def held(model: Mixture, **options: Any) -> OffloadZero:
    chosen = {"tier": "cpu", "param_tier": "cpu", "compute_dtype": torch.float32, "tuning": TUNING} | options
    return OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **chosen)


@pytest.mark.parametrize("use", ["indexed", "gathered", "grouped", "batched"])
def test_experts_in_tiles_train_with_the_bits_of_plain_torch_on_the_device(use: str) -> None:
    model, plain = mixture(use)().to(DEVICE), mixture(use)().to(DEVICE)
    with held(model) as optimizer:
        same_steps(model, plain, optimizer)


@pytest.mark.parametrize("case", ["int8 indexed", "fp8 gathered", "int8 grouped", "blocks grouped", "blocks batched"])
def test_quantised_experts_in_tiles_do_so_too(case: str) -> None:
    """The table of `blocks` is on the device for tiles, and in RAM for the whole weight."""
    kind, use = case.split()
    model, plain = quantised(FORMATS[kind], use), quantised(FORMATS[kind], use).to(DEVICE)
    values = [weight.dequantise() for weight in weights_of(model)]
    trained = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    options: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu", "device": DEVICE, "compute_dtype": torch.float32}
    with pytest.raises(BudgetError) as caught:
        OffloadZero(model, trained, tuning=in_tiles(model), device_memory=1, **options)
    least = caught.value.needed  # without room for a whole weight
    with OffloadZero(model, trained, tuning=in_tiles(model), device_memory=least, **options) as optimizer:
        same_steps(model, plain, optimizer)
        up = model.layers[0].experts.up
        assert up.device.type == up.codes.device.type == "cpu"  # type: ignore[union-attr]
        with optimizer.gathered(up, writable=True), torch.no_grad():
            ids = tokens(9, words=5).to(DEVICE)
            assert torch.equal(model(ids), plain(ids))
        for weight, own in zip(weights_of(model), values, strict=True):
            assert torch.equal(weight.dequantise(), own)
        assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes <= least
    for weight, own in zip(weights_of(model), values, strict=True):
        assert weight.device == DEVICE
        assert torch.equal(weight.dequantise().cpu(), own)


def test_experts_on_nvme_do_so_too(tmp_path: Path) -> None:
    model, plain = mixture("grouped")().to(DEVICE), mixture("grouped")().to(DEVICE)
    tiers = dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme")
    with held(model, path=tmp_path / "run", commit_every=0, accumulation=2, **tiers) as optimizer:
        same_steps(model, plain, optimizer, counts=(40, 2, 1), backwards=2)


def test_steps_that_idle_experts_owe_have_the_bits_of_steps_in_time(tmp_path: Path) -> None:
    tiers = dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme")
    found = []
    for late in (True, False):
        model = mixture("grouped")().to(DEVICE)
        tuning = replace(TUNING, tile=MATRIX, late=late)
        with held(model, path=tmp_path / str(late), commit_every=0, tuning=tuning, **tiers) as optimizer:
            for step in range(10):
                loss_of(model, tokens(step, 2 if step % 4 else 40).to(DEVICE)).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert bool(optimizer._parts.masters.late.owed) == late
            found.append({name: param.detach().cpu() for name, param in model.named_parameters()})
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


def penalised(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Uses its matrices in tiles, and as a whole."""
    scores = torch.einsum("tw,ehw->th", x, own.up).mean(1, keepdim=True)
    return grouped(own, x, expert) * (1 + 0.1 * scores)


def test_a_weight_is_whole_on_the_device_for_other_uses_if_there_is_room() -> None:
    model, plain = Mixture(penalised).to(DEVICE), Mixture(penalised).to(DEVICE)
    with held(model) as optimizer:
        assert model.layers[0].experts.up.device == DEVICE
        for one in (model, plain):
            loss_of(one, tokens(0).to(DEVICE)).backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            found = optimizer.grad(other)
            assert found is not None
            torch.testing.assert_close(found.reshape(own.shape), own.grad.cpu(), rtol=1e-4, atol=1e-5)
        whole = EXPERTS * MATRIX
        assert optimizer.stats()["peak_device_bytes"] > whole


def test_without_room_another_use_is_a_budget_error_and_the_weight_can_be_read_in_ram() -> None:
    model = Mixture(penalised).to(DEVICE)
    values = model.layers[0].experts.up.detach().cpu().clone()
    with pytest.raises(BudgetError) as caught:
        OffloadZero(model, param_tier="cpu", device_memory=1, compute_dtype=torch.float32, tuning=TUNING)
    with held(model, device_memory=caught.value.needed) as optimizer:
        with pytest.raises(BudgetError, match=r"experts\.up runs in tiles, and einsum needs all of its 3 KiB"):
            loss_of(model, tokens(0).to(DEVICE))
        optimizer.zero_grad()
        for layer in model.layers:
            layer.experts.use = grouped
        loss_of(model, tokens(0).to(DEVICE)).backward()
        assert torch.equal(model.layers[0].experts.up.detach(), values)
        assert torch.equal(model.state_dict()["layers.0.experts.up"], values)
        assert optimizer.stats()["peak_device_bytes"] <= caught.value.needed


def test_a_parameter_that_a_wrapper_uses_whole_needs_its_room_from_the_start() -> None:
    model, plain = wrapped().to(DEVICE), wrapped().to(DEVICE)
    with pytest.raises(BudgetError) as refused:
        held(model, device_memory=1)
    with held(model, device_memory=refused.value.needed) as optimizer:
        same_steps(model, plain, optimizer)
        assert optimizer.stats()["peak_device_bytes"] <= refused.value.needed
