"""Experts in tiles: parameters with three dimensions, matrix by matrix on the device. The oracle is plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import BudgetError, OffloadZero, ReleasedParameterError, Tuning
from offload.planner.explain import plan_of
from tests.support.experts import (
    EXPERTS,
    HIDDEN,
    USES,
    WIDTH,
    Experts,
    Mixture,
    grouped,
    loss_of,
    mixture,
    same_steps,
    tokens,
    wrapped,
)
from tests.support.streamed import in_little_memory

MATRIX = WIDTH * HIDDEN * 4
"""Bytes of one expert's part of a parameter."""

ON_CPU = {"tier": "cpu", "param_tier": "cpu"}


def on_nvme(path: Path, **more: Any) -> dict[str, Any]:
    tuning = Tuning(chunk="256KiB", threads=1, tile=2 * MATRIX)
    tiers = dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme")
    return {"path": path / "run", "commit_every": 0, "tuning": tuning, **tiers, **more}


def tuning(matrices: int = 2, ahead: int = 1) -> Tuning:
    return Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=ahead, threads=1, tile=matrices * MATRIX)


def held(model: nn.Module, **options: Any) -> OffloadZero:
    chosen = {"tuning": tuning(), "compute_dtype": torch.float32} | options
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    made = in_little_memory(model, optimizer, **chosen) if "path" in chosen else OffloadZero(model, optimizer, **chosen)
    assert made._parts.parameters.tiles
    return made


@pytest.mark.parametrize("use", USES)
def test_experts_in_tiles_train_with_the_bits_of_plain_torch(use: str) -> None:
    model, plain = mixture(use)(), mixture(use)()
    with held(model, **ON_CPU) as optimizer:
        same_steps(model, plain, optimizer)


PLACES = [("indexed", 1), ("gathered", 2), ("grouped", 1), ("grouped", 2), ("indexed", 2)]


@pytest.mark.parametrize(("use", "backwards"), PLACES)
def test_experts_on_nvme_train_with_the_bits_of_plain_torch(use: str, backwards: int, tmp_path: Path) -> None:
    """Some tiles get tokens in none of a step's micro-batches, or in one of two."""
    model, plain = mixture(use)(), mixture(use)()
    with held(model, accumulation=backwards, **on_nvme(tmp_path)) as optimizer:
        same_steps(model, plain, optimizer, counts=(40, 2, 1, 40), backwards=backwards)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("use", ["indexed", "grouped"])
def test_experts_in_tiles_with_activations_elsewhere(use: str, recompute: bool, tmp_path: Path) -> None:
    model, plain = mixture(use)(), mixture(use)()
    options = on_nvme(tmp_path, activation_tier="nvme")
    options["tuning"] = replace(options["tuning"], recompute=recompute)
    with held(model, **options) as optimizer:
        same_steps(model, plain, optimizer)


@pytest.mark.parametrize("use", ["indexed", "gathered", "grouped"])
def test_frozen_experts_are_read_only_where_tokens_go(use: str) -> None:
    model, plain = mixture(use)(), mixture(use)()
    for one in (model, plain):
        for layer in one.layers:
            layer.experts.requires_grad_(False)
    ids = torch.zeros(4, dtype=torch.int64)  # all tokens are alike, and go to one expert in each layer
    with held(model, tuning=tuning(1, ahead=0), **ON_CPU) as optimizer:
        same_steps(model, plain, optimizer, counts=(40,))
        before = optimizer.stats()["gathered_bytes"]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
        read = optimizer.stats()["gathered_bytes"] - before
    others = sum(p.nbytes for name, p in plain.named_parameters() if not name.endswith(("up", "down")))
    assert read <= others + 2 * 2 * 2 * MATRIX  # a view is made of a tile, and used: it may come twice


def test_layers_larger_than_the_device_budget_run_in_tiles_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = mixture("grouped", words=5)(), mixture("grouped", words=5)()
    of_experts = 2 * EXPERTS * MATRIX
    of_root = sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("layers"))
    options: dict[str, Any] = {"device_memory": of_root + int(0.7 * of_experts), "tuning": Tuning(threads=1), **ON_CPU}
    with pytest.raises(BudgetError):
        OffloadZero(mixture("grouped", words=5)(), **options | {"tuning": Tuning(tile=0)}, compute_dtype=torch.float32)
    planned = plan_of(model, direct=True, compute_dtype=torch.float32, **options).place()
    with held(model, **options) as optimizer:
        assert "4 layers run in tiles" in capsys.readouterr().err
        same_steps(model, plain, optimizer)
        assert optimizer.stats()["peak_device_bytes"] <= planned.device_bytes <= options["device_memory"]


def test_a_tile_without_tokens_has_a_gradient_of_zeros() -> None:
    model, plain = mixture("grouped")(), mixture("grouped")()
    with held(model, **ON_CPU):
        ids = torch.zeros(4, dtype=torch.int64)
        weights = [(one.layers[0].experts.up, one.head.bias) for one in (model, plain)]
        found, expected = (
            torch.autograd.grad(loss_of(one, ids), ours) for one, ours in zip((model, plain), weights, strict=True)
        )
        assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True, True]
        assert sum(bool(one.any()) for one in found[0]) == 1
        for one in (model, plain):
            loss_of(one, ids).backward()
        assert torch.equal(weights[0][0].grad, weights[1][0].grad)
        assert torch.equal(nn.utils.get_total_norm([weights[0][0].grad]), nn.utils.get_total_norm([weights[1][0].grad]))


def test_a_parameter_that_a_wrapper_of_peft_uses_whole_is_no_tiles_and_needs_its_room() -> None:
    model, plain = wrapped(), wrapped()
    options: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": tuning(), **ON_CPU}
    layer = sum(p.nbytes for name, p in model.layers[0].named_parameters() if not name.endswith("down"))
    root = sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("layers"))
    with pytest.raises(BudgetError) as refused:
        OffloadZero(model, device_memory=1, **options)
    assert refused.value.needed >= root + layer
    assert not any(hasattr(type(p), "_kind") for p in model.parameters())
    with held(model, device_memory=refused.value.needed, **options) as optimizer:
        parameters = optimizer._parts.parameters
        inside = model.layers[0].experts.inside
        tiles = [len(parameters.tiles_of(parameters.index[one])) for one in (inside.up, inside.down)]
        assert tiles == [0, EXPERTS // 2]
        same_steps(model, plain, optimizer)
        assert optimizer.stats()["peak_device_bytes"] <= refused.value.needed


def penalised(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Uses its matrices in tiles, and as a whole."""
    return grouped(own, x, expert) * (1 + 0.01 * own.up.transpose(1, 2).square().sum())


def test_an_other_use_takes_the_whole_weight() -> None:
    model, plain = Mixture(penalised), Mixture(penalised)
    with held(model, **ON_CPU) as optimizer:
        for one in (model, plain):
            loss_of(one, tokens(0)).backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(optimizer.grad(other).reshape(own.shape), own.grad, rtol=1e-5, atol=1e-6)


def overwrites(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    with torch.no_grad():
        own.up[1].mul_(2)
    return grouped(own, x, expert)


def test_writes_to_matrices_count_outside_of_the_forward_and_are_refused_inside() -> None:
    model = mixture("indexed")()
    with held(model, **ON_CPU) as optimizer:
        up = model.layers[0].experts.up
        with torch.no_grad():
            up[1].fill_(3.0)
            for one in up:
                one[0] = 5.0
        model.layers[0].experts.use = overwrites
        with pytest.raises(ReleasedParameterError, match=r"layers\.0\.experts\.up, which runs in tiles"):
            model(tokens(0))
        optimizer.zero_grad()
        expected = torch.full((HIDDEN, WIDTH), 3.0)
        expected[0] = 5.0
        assert torch.equal(up[1], expected)
        assert torch.equal(optimizer.state_of(up)["master"][1], expected)


@pytest.mark.parametrize(
    ("equation", "shape", "exact"),
    [("etw,ehw->eth", (EXPERTS, 5, WIDTH), True), ("tw,ehw->teh", (5, WIDTH), False), ("tw,ehw->th", (5, WIDTH), True)],
)
def test_einsum_runs_in_tiles_if_its_output_has_the_experts(equation: str, shape: tuple[int, ...], exact: bool) -> None:
    """The last one sums over experts, and takes the whole weight."""

    def use(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
        del expert
        made = torch.einsum(equation, x.sum() * torch.linspace(-1, 1, shape[:-1].numel() * WIDTH).view(shape), own.up)
        return x * made.sin().sum()

    shape = torch.Size(shape)
    model, plain = Mixture(use), Mixture(use)
    with held(model, **ON_CPU) as optimizer:
        for one in (model, plain):
            loss_of(one, tokens(0)).backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            grad = optimizer.grad(other)
            assert (grad is None) == (own.grad is None)
            if grad is not None and exact:
                assert torch.equal(grad.reshape(own.shape), own.grad)
            elif grad is not None:
                torch.testing.assert_close(grad.reshape(own.shape), own.grad, rtol=1e-4, atol=1e-4)
        whole = model.layers[0].experts.up.nbytes
        assert optimizer.stats()["peak_device_bytes"] < sum(p.nbytes for p in model.parameters()) - whole


class InBytes(nn.Module):
    """Frozen experts of a byte an element, with a scale each, in plain parameters, as published checkpoints have them.

    Args:
        dtype: of the bytes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("up", (EXPERTS, HIDDEN, WIDTH)), ("down", (EXPERTS, WIDTH, HIDDEN))):
            scale = torch.rand(EXPERTS, 1, 1) / 20
            codes = (torch.randn(shape) / scale).clamp(-100, 100).to(dtype)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in expert.unique():
            rows = (expert == number).nonzero().view(-1)
            up, down = (self._values(name, number) for name in ("up", "down"))
            out = out.index_add(0, rows, torch.tanh(x[rows] @ up.t()) @ down.t())
        return out

    def _values(self, name: str, number: Tensor) -> Tensor:
        return getattr(self, name)[number].float() * getattr(self, f"{name}_scale")[number]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_frozen_experts_of_a_byte_an_element_run_in_tiles_beside_their_scales(dtype: torch.dtype) -> None:
    model, plain = mixture("indexed")(), mixture("indexed")()
    for one in (model, plain):
        torch.manual_seed(5)
        for layer in one.layers:
            layer.experts = InBytes(dtype)
    with held(model, tuning=Tuning(chunk="4KiB", threads=1, tile=EXPERTS // 2 * HIDDEN * WIDTH), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        assert len(parameters.tiles_of(parameters.index[model.layers[0].experts.up])) == 2
        same_steps(model, plain, optimizer)
        for own, other in zip(plain.layers, model.layers, strict=True):
            assert torch.equal(own.experts.up.view(torch.uint8), other.experts.up.detach().view(torch.uint8))


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it, as LoRA has."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def test_adapters_of_linear_layers_in_tiles_train_beside_frozen_experts() -> None:
    """Within rounding: of a tiled linear layer the gradient of its input is a sum over tiles."""
    model, plain = mixture("grouped", words=64)(), mixture("grouped", words=64)()
    for one in (model, plain):
        torch.manual_seed(5)
        one.requires_grad_(False)
        one.head = Adapted(one.head)  # type: ignore[assignment]
        for layer in one.layers:
            layer.router = Adapted(layer.router)  # type: ignore[assignment]
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    with held(model, tuning=tuning(1), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        assert len(parameters.tiles_of(parameters.index[model.head.layer.weight])) > 1  # type: ignore[index, union-attr]
        for step in range(4):
            ids = tokens(step, words=64)
            losses = [loss_of(one, ids) for one in (model, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            for one in (optimizer, adamw):
                one.step()
                one.zero_grad()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.detach().clone(), own.detach(), rtol=1e-3, atol=1e-5)
