"""Experts in tiles: parameters with three dimensions, matrix by matrix on the device. The oracle is plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import BudgetError, ConfigError, OffloadZero, ReleasedParameterError, Tuning
from offload.integrations.quantised import Quantised
from offload.model import inner
from offload.model.inner import Format
from offload.planner.explain import plan_of
from tests.support.cases import often
from tests.support.experts import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    USES,
    WIDTH,
    Experts,
    Mixture,
    bytes_of,
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
from tests.support.quantised import BLOCK, TABLE, Matrices, in_blocks, in_int8
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
        with optimizer.gathered(up, writable=True), torch.no_grad():
            up[2].fill_(4.0)
        model.layers[0].experts.use = overwrites
        with pytest.raises(ReleasedParameterError, match=r"layers\.0\.experts\.up, which runs in tiles"):
            model(tokens(0))
        optimizer.zero_grad()
        expected = torch.full((HIDDEN, WIDTH), 3.0)
        expected[0] = 5.0
        assert torch.equal(up[1], expected)
        assert torch.equal(up[2], torch.full((HIDDEN, WIDTH), 4.0))
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


QUANTISED = [
    f"{kind} {use}"
    for kind, uses in {
        "fp8": ("indexed", "grouped", "summed"),
        "int8": ("gathered", "indexed"),
        "uint8": ("gathered", "batched", "grouped"),
        "blocks": ("grouped", "gathered", "iterated", "indexed"),
    }.items()
    for use in uses
]


@pytest.mark.parametrize(
    "case",
    often(QUANTISED, "fp8 indexed", "fp8 summed", "int8 gathered", "uint8 batched", "blocks grouped", "blocks indexed"),
)
def test_quantised_experts_in_tiles_train_with_the_bits_of_plain_torch(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, use = case.split()
    model, plain = quantised(FORMATS[kind], use), quantised(FORMATS[kind], use)
    with held(model, tuning=in_tiles(model), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        for weight in weights_of(model):
            numbers = parameters.numbers_of(weight)
            assert len(numbers) == len(weight.NAMES) - (kind == "blocks")
            assert {len(parameters.tiles_of(number)) for number in numbers} == {3}
        same_steps(model, plain, optimizer)
    assert not caplog.records  # that a weight is used as a whole
    for weight, own in zip(weights_of(model), weights_of(plain), strict=True):
        assert torch.equal(weight.dequantise(), own.dequantise())


@pytest.mark.parametrize(
    ("kind", "use", "activation_tier", "recompute"),
    [("blocks", "indexed", None, True), ("int8", "gathered", "cpu", True), ("fp8", "grouped", "nvme", False)],
)
def test_quantised_experts_on_nvme_beside_activations_elsewhere(
    kind: str, use: str, activation_tier: str | None, recompute: bool, tmp_path: Path
) -> None:
    model, plain = quantised(FORMATS[kind], use), quantised(FORMATS[kind], use)
    options = on_nvme(tmp_path, activation_tier=activation_tier, accumulation=2)
    options["tuning"] = replace(options["tuning"], tile=in_tiles(model).tile, recompute=recompute)
    with held(model, **options) as optimizer:
        same_steps(model, plain, optimizer, counts=(40, 2, 1), backwards=2)


@pytest.mark.parametrize(("kind", "use"), [("int8", "indexed"), ("fp8", "gathered"), ("blocks", "grouped")])
def test_quantised_experts_are_read_only_where_tokens_go(kind: str, use: str) -> None:
    model, plain = quantised(FORMATS[kind], use), quantised(FORMATS[kind], use)
    ids = torch.zeros(4, dtype=torch.int64)  # all tokens are alike, and go to one expert in each layer
    with held(model, tuning=in_tiles(model, 1, ahead=0), **ON_CPU) as optimizer:
        same_steps(model, plain, optimizer, counts=(40,))
        before = optimizer.stats()["gathered_bytes"]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
        read = optimizer.stats()["gathered_bytes"] - before
        layout = optimizer._parts.parameters.layout
    of_layers = (flat for flat in layout.flats if flat.unit.endswith(("0", "1")))  # the root is there
    others = sum(flat.numel * flat.dtype.itemsize for flat in of_layers)
    of_one = sum(map(bytes_of, weights_of(plain))) // EXPERTS
    assert others + of_one <= read <= others + 2 * of_one  # a view is made of a tile, and used: it may come twice


def with_large_experts() -> Mixture:
    """A mixture whose layers are little else than quantised experts."""
    model = quantised(in_int8, "grouped")
    for layer in model.layers:
        experts = layer.experts
        experts.up = nn.Parameter(in_int8(torch.randn(EXPERTS, 5 * HIDDEN, WIDTH)), requires_grad=False)
        experts.down = nn.Parameter(in_int8(torch.randn(EXPERTS, WIDTH, 5 * HIDDEN)), requires_grad=False)
        experts.bias = nn.Parameter(torch.rand(EXPERTS, 1), requires_grad=False)
    return model


def test_quantised_layers_larger_than_the_device_budget_run_in_tiles_by_themselves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, plain = with_large_experts(), with_large_experts()
    budget = int(0.6 * sum(map(bytes_of, weights_of(model)[:2])))
    options: dict[str, Any] = {"device_memory": budget, "tuning": Tuning(threads=1), **ON_CPU}
    whole = options | {"tuning": Tuning(tile=0), "compute_dtype": torch.float32}
    with pytest.raises(BudgetError):
        OffloadZero(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), **whole)
    planned = plan_of(model, direct=True, compute_dtype=torch.float32, **options).place()
    with held(model, **options) as optimizer:
        assert "4 layers run in tiles" in capsys.readouterr().err
        same_steps(model, plain, optimizer)
        assert optimizer.stats()["peak_device_bytes"] <= planned.device_bytes <= budget


def test_tiles_end_where_both_blocks_and_matrices_end() -> None:
    """6 matrices have 16 blocks together, so one tile has 3 of them at least."""
    make = partial(in_blocks, block=48)
    model, plain = quantised(make, "grouped"), quantised(make, "grouped")
    with held(model, tuning=in_tiles(model, 1), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        assert len(parameters.tiles_of(parameters.index[model.layers[0].experts.up])) == 2
        same_steps(model, plain, optimizer)


class Unsliced(Matrices):
    def rows(self, func: Any, args: Any) -> Any:
        raise NotImplementedError("only as a whole")


class Copying(Matrices):
    def rows(self, func: Any, args: Any) -> Any:
        return self.like([func(getattr(self, name), *args).clone() for name in self.NAMES])


class Sideways(Matrices):
    """Its matrices are along the second dimension of its codes."""

    @staticmethod
    def outer(codes: Tensor) -> Any:
        return codes.transpose(0, 1).shape, codes.transpose(0, 1).stride()

    def dequantise(self) -> Tensor:
        return (self.codes.float() * self.scales).transpose(0, 1)

    def rows(self, func: Any, args: Any) -> Any:
        return self.like([func(getattr(self, name).transpose(0, 1), *args).transpose(0, 1) for name in self.NAMES])


def _bytes_of(weight: Tensor, scales: Tensor | None = None) -> list[Tensor]:
    scales = torch.rand(EXPERTS, 1, 1) if scales is None else scales
    return [(weight * 10).to(torch.int8), scales]


UNCUT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "one scale": (
        lambda weight: Matrices(_bytes_of(weight, torch.rand(1, 1, 1)), weight.dtype),
        r"Matrices, and scales, of shape \(1, 1, 1\), cannot be cut where one of its 6 matrices ends",
    ),
    "one block": (
        lambda weight: in_blocks(weight, weight.numel()),
        r"Blocks, and scales, of shape \(1,\), cannot be cut where one of its 6 matrices ends",
    ),
    "no slices": (
        lambda weight: Unsliced(_bytes_of(weight), weight.dtype),
        r"Unsliced, and w\[a:b\] of a Unsliced raises NotImplementedError \(only as a whole\)",
    ),
    "copies": (
        lambda weight: Copying(_bytes_of(weight), weight.dtype),
        r"Copying, and w\[a:b\] of a Copying is no view of the same rows of each of its inner tensors",
    ),
    "one row of scales": (
        lambda weight: Sideways(
            _bytes_of(weight.transpose(0, 1).contiguous(), torch.rand(1, EXPERTS, 1)), weight.dtype
        ),
        r"Sideways, and scales, of shape \(1, 6, 1\), cannot be cut where one of its 6 matrices ends",
    ),
    "rows that look like others": (
        lambda weight: Sideways(
            _bytes_of(weight.transpose(0, 1).contiguous(), torch.rand(EXPERTS, EXPERTS, 1)), weight.dtype
        ),
        r"Sideways, and w\[a:b\] of a Sideways is no view of the same rows of each of its inner tensors",
    ),
}


@pytest.mark.parametrize("case", UNCUT)
def test_quantised_experts_that_cannot_be_cut_are_refused_by_name(case: str) -> None:
    make, why = UNCUT[case]
    model = Mixture(grouped, words=5).requires_grad_(False)
    model.head.requires_grad_(True)
    experts = model.layers[1].experts
    experts.up = nn.Parameter(make(experts.up), requires_grad=False)
    options: dict[str, Any] = {"compute_dtype": torch.float32, **ON_CPU}
    what = rf"layers\.1\.experts\.up is a {why}, so it runs in no tiles: quantise it in blocks that end where a matrix"
    adamw = torch.optim.AdamW(model.head.parameters())
    with pytest.raises(ConfigError, match=rf"Tuning\.tile=256: {what}.*; or give Tuning\(tile=0\)"):
        OffloadZero(model, adamw, tuning=Tuning(tile=256), **options)
    with pytest.raises(BudgetError, match=what):
        OffloadZero(model, adamw, device_memory=2048, **options)
    OffloadZero(model, adamw, tuning=Tuning(tile=0), **options).close()


class Packed(nn.Parameter):
    """Codes of matrices, whose scales are attributes of an attribute, as those of bitsandbytes are."""

    class State:
        absmax: Tensor
        table: Tensor
        shape: tuple[int, ...]


class InFormat(nn.Module):
    """Frozen experts of codes and a state.

    Args:
        is_flat: whether codes and scales of all matrices are end to end.
    """

    def __init__(self, is_flat: bool) -> None:
        super().__init__()
        self.is_flat = is_flat
        for name, shape in (("up", (EXPERTS, HIDDEN, WIDTH)), ("down", (EXPERTS, WIDTH, HIDDEN))):
            codes = torch.randint(0, 16, shape, dtype=torch.uint8)
            weight = Packed(codes.view(-1, 1) if is_flat else codes, requires_grad=False)
            weight.state = state = Packed.State()  # type: ignore[attr-defined]
            absmax = torch.rand(EXPERTS, HIDDEN * WIDTH // BLOCK)
            state.absmax, state.table, state.shape = absmax.flatten() if is_flat else absmax, TABLE, shape
            self.register_parameter(name, weight)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in expert.unique().tolist():
            rows = (expert == number).nonzero().view(-1)
            up, down = (self._values(weight, number) for weight in (self.up, self.down))
            out = out.index_add(0, rows, torch.tanh(x[rows] @ up.t()) @ down.t())
        return out

    def _values(self, weight: Any, number: int) -> Tensor:
        state = weight.state
        if self.is_flat:
            each = WIDTH * HIDDEN
            codes = weight[number * each : (number + 1) * each]
            absmax = state.absmax.narrow(0, number * each // BLOCK, each // BLOCK)
        else:
            codes, absmax = weight[number], state.absmax[number]
        values: Tensor = state.table[codes.int()].view(-1, BLOCK) * absmax[:, None]
        return values.view(state.shape[1:])


@pytest.mark.parametrize("is_flat", [False, True])
def test_experts_with_a_quant_state_run_in_tiles(
    is_flat: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the tensors is indexed by the forward itself."""
    known = Format(("", "state.absmax"), tables=("state.table",), shape="state.shape")
    monkeypatch.setitem(inner.FORMATS, f"{Packed.__module__}.{Packed.__qualname__}", known)
    model, plain = mixture("indexed", words=5)(), mixture("indexed", words=5)()
    for one in (model, plain):
        torch.manual_seed(5)
        for layer in one.layers:
            layer.experts = InFormat(is_flat)
    with held(model, tuning=Tuning(chunk="4KiB", threads=1, tile=EXPERTS * HIDDEN * WIDTH), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        numbers = parameters.numbers_of(model.layers[1].experts.up)
        assert [len(parameters.tiles_of(number)) for number in numbers] == [2, 2]
        same_steps(model, plain, optimizer)
    assert not caplog.records


def as_matrix(weight: Tensor) -> Matrices:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return Matrices([(weight / scales).round().to(torch.int8), scales], weight.dtype)


def test_quantised_linear_layers_run_in_tiles_too() -> None:
    """Within rounding: the gradient of its input is a sum over tiles."""
    model, plain = quantised(in_int8, "grouped", words=64), quantised(in_int8, "grouped", words=64)
    for one in (model, plain):
        torch.manual_seed(5)
        one.head = Adapted(one.head)  # type: ignore[assignment]
        weight = as_matrix(one.head.layer.weight.detach())  # type: ignore[union-attr, operator]
        one.head.layer.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
    with held(model, tuning=in_tiles(model, 1), **ON_CPU) as optimizer:
        parameters = optimizer._parts.parameters
        assert len(parameters.tiles_of(parameters.index[model.head.layer.weight])) > 1  # type: ignore[index, union-attr]
        losses = [loss_of(one, tokens(0, words=64)) for one in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            if own.grad is not None:
                torch.testing.assert_close(optimizer.grad(other).reshape(own.shape), own.grad, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]
        optimizer.zero_grad()
        for one in (model, plain):
            loss = loss_of(one, tokens(0, words=64))
            with torch.no_grad():
                one.head.layer.weight.copy_(weight)  # type: ignore[union-attr, operator]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def same_gradients(model: Mixture, plain: Mixture, optimizer: OffloadZero, step: int) -> None:
    """A step of a held model. Plain torch has the same loss and gradients from the values of before."""
    trained = [(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True) if a.requires_grad]
    with torch.no_grad():
        for own, other in trained:
            own.copy_(other)
            own.grad = None
    losses = [loss_of(one, tokens(step, words=5)) for one in (model, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for own, other in trained:
        assert torch.equal(optimizer.grad(other).reshape(own.shape), own.grad)  # type: ignore[union-attr, arg-type]
    optimizer.step()
    optimizer.zero_grad()


def test_quantised_experts_in_tiles_are_written_read_committed_and_resumed_in_others(tmp_path: Path) -> None:
    model, plain = quantised(in_blocks, "indexed"), quantised(in_blocks, "indexed")
    options = on_nvme(tmp_path, commit_every=1)
    options["tuning"] = replace(options["tuning"], tile=in_tiles(model).tile)
    with held(model, **options) as optimizer:
        same_gradients(model, plain, optimizer, 0)
        up, own = model.layers[0].experts.up, plain.layers[0].experts.up
        with torch.no_grad():
            for one in (up, own):
                one.scales[2:4].mul_(1.5)  # type: ignore[operator, index]
        with optimizer.gathered(up, writable=True), torch.no_grad():
            for one in (up, own):
                for number in range(4):
                    one[number].scales.mul_(1.25)  # type: ignore[operator, index]
        assert torch.equal(up.dequantise(), own.dequantise())
        assert torch.equal(up.mT.dequantise(), own.mT.dequantise())
        same_gradients(model, plain, optimizer, 1)
        copied, other = copy.deepcopy(model), quantised(in_blocks, "indexed")
        other.load_state_dict(model.state_dict())
        with optimizer.gathered(up), torch.no_grad():
            assert torch.equal(up[3].dequantise(), own[3].dequantise())
            assert torch.equal(model(tokens(9, words=5)), other(tokens(9, words=5)))
        assert torch.equal(copied(tokens(9, words=5)), other(tokens(9, words=5)))
    for tile in (0, in_tiles(model, 1).tile):
        model = quantised(in_blocks, "indexed")
        given = options | {"tuning": replace(options["tuning"], tile=tile), "resume": True}
        adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with in_little_memory(model, adamw, compute_dtype=torch.float32, **given) as optimizer:
            same_gradients(model, plain, optimizer, 2)


def dequantised(own: Experts, x: Tensor, expert: Tensor) -> Tensor:
    """Uses a weight as a whole, beside its tiles."""
    return grouped(own, x, expert) * (1 + 0.01 * own.up.dequantise().square().sum())  # type: ignore[operator]


def test_another_use_of_quantised_experts_takes_them_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = quantised(in_int8, dequantised), quantised(in_int8, dequantised)
    with held(model, tuning=in_tiles(model), **ON_CPU) as optimizer:
        same_steps(model, plain, optimizer)
    told = [record.getMessage() for record in caplog.records]
    assert [message.partition(" as a whole")[0] for message in told] == [
        f"the forward uses layers.{layer}.experts.up" for layer in range(2)
    ]


def quantise(model: nn.Module) -> None:
    """Quantises experts in place, with values or on the meta device."""
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        for name in ("up", "down"):
            setattr(experts, name, nn.Parameter(in_int8(getattr(experts, name).detach()), requires_grad=False))


def test_experts_quantised_while_they_are_loaded_run_in_tiles(tmp_path: Path) -> None:
    values = Mixture(grouped, words=5).state_dict()
    with torch.device("meta"):
        model = Mixture(grouped, words=5)
    source = Quantised(lambda name, tensor: tensor.copy_(values[name]), quantise, model)
    for layer in model.layers:
        layer.experts.requires_grad_(False)
    options = on_nvme(tmp_path, init=source, device="cpu")
    options["tuning"] = replace(options["tuning"], tile=in_tiles(model).tile)
    with held(model, **options) as optimizer:
        parameters = optimizer._parts.parameters
        assert [len(parameters.tiles_of(parameters.index[weight])) for weight in weights_of(model)] == [3] * 4
        same_steps(model, quantised(in_int8, "grouped"), optimizer)


def test_what_is_written_to_scales_reaches_tiles_that_are_on_the_device() -> None:
    model, plain = quantised(in_int8, "batched"), quantised(in_int8, "batched")
    with held(model, tuning=in_tiles(model), **ON_CPU) as optimizer:
        losses = [loss_of(one, tokens(0, words=5)) for one in (model, plain)]
        down, parameters = model.layers[1].experts.down, optimizer._parts.parameters
        assert parameters.units["layers.1.experts.down[2]"].is_here
        with optimizer.gathered(down), torch.no_grad():
            down.scales.mul_(2)  # type: ignore[operator, union-attr]
        with torch.no_grad():
            plain.layers[1].experts.down.scales.mul_(2)  # type: ignore[operator, union-attr]
        (_, tile) = parameters.tiles_of(parameters.index[down.scales])[2]  # type: ignore[index]
        assert torch.equal(tile, plain.layers[1].experts.down.scales[4:])  # type: ignore[index]
        for loss in losses:
            loss.backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            if own.grad is not None:
                assert torch.equal(optimizer.grad(other).reshape(own.shape), own.grad)  # type: ignore[union-attr]
