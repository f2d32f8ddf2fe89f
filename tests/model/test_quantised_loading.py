"""Bases that are quantised while they are loaded. The oracle is plain torch over the base quantised as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offload import ConfigError, OffloadZero
from offload.integrations.quantised import Quantised
from tests.model.test_frozen import options
from tests.model.test_quantised import WHERE, held, same_steps
from tests.support.quantised import Codes, adapt, quantise, quantised, weights_of
from tests.support.toy import Net


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(Net(4).state_dict(), path)
    return path


def on_meta() -> Net:
    with torch.device("meta"):
        return Net(4)


def loaded(init: Any, quantiser: Callable[[nn.Module], object] = quantise) -> tuple[Net, Quantised]:
    """A model with adapters on the meta device, and the source of its values."""
    model = on_meta()
    source = Quantised(init, quantiser, model)
    return adapt(model), source


@pytest.mark.parametrize(("tier", "param_tier"), [*WHERE, ("cpu", "device")])
def test_a_base_quantised_while_loading_has_the_bits_of_one_quantised_before(
    tier: str, param_tier: str, weights: Path, tmp_path: Path
) -> None:
    model, source = loaded(weights)
    objects = weights_of(model)
    assert all(one.is_meta for one in objects)
    with held(model, init=source, device="cpu", **options(tier, param_tier, tmp_path)) as optimizer:
        assert all(one is other for one, other in zip(objects, weights_of(model), strict=True))
        same_steps(optimizer, model, quantised(), range(3))
        assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes
    assert {one.device.type for one in objects} == {"cpu"}
    for one, expected in zip(objects, weights_of(quantised()), strict=True):
        assert torch.equal(one.codes, expected.codes)
        assert torch.equal(one.scales, expected.scales)


def test_one_module_at_a_time_is_there_before_it_is_quantised(tmp_path: Path) -> None:
    values = Net(4).state_dict()
    plain: list[weakref.ref[Tensor]] = []
    alive = []

    def init(name: str, tensor: Tensor) -> None:
        tensor.copy_(values[name])
        if tensor.dim() == 2 and "blocks" in name and "after" not in name:
            plain.append(weakref.ref(tensor))

    def watched(model: nn.Module) -> None:
        alive.append(sum(one() is not None for one in plain))
        quantise(model)

    model, source = loaded(init, watched)
    with held(model, init=source, device="cpu", **options("cpu", "nvme", tmp_path)):
        assert len(plain) == 8
        assert alive == [0] + [1] * 8
        assert not any(one() is not None for one in plain)


def test_weights_that_reset_parameters_makes_are_quantised(tmp_path: Path) -> None:
    model = nn.Sequential()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    source = Quantised(None, quantise, model)
    model.requires_grad_(False)
    model.adapter = nn.Linear(8, 8)
    torch.manual_seed(5)
    expected = [nn.Linear(8, 8) for _ in range(2)]
    torch.manual_seed(5)
    with held(model, init=source, device="cpu", **options("cpu", "cpu", tmp_path)):
        for layer, other in zip(model.blocks, expected, strict=True):
            assert torch.equal(layer.weight.dequantise(), Codes.of(other.weight).dequantise())  # type: ignore[operator]
            assert torch.equal(layer.bias, other.bias)  # type: ignore[arg-type]


def test_what_was_quantised_on_the_meta_device_needs_a_quantiser(weights: Path, tmp_path: Path) -> None:
    model = on_meta()
    quantise(model)
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.base\.weight was quantised on the meta device, and init"):
        held(adapt(model), init=weights, device="cpu", **options("cpu", "nvme", tmp_path))
    assert not (tmp_path / "run").exists()
    assert all(type(one) is Codes and one.is_meta and one.codes.is_meta for one in weights_of(model))


def test_a_quantiser_that_makes_other_tensors_than_planned_is_refused(weights: Path, tmp_path: Path) -> None:
    def unlike(model: nn.Module) -> None:
        for layer in [one for name, one in model.named_modules() if name.endswith("up")]:
            assert isinstance(layer, nn.Linear)
            if not layer.weight.is_meta:
                layer.weight.data = layer.weight.repeat(1, 2)
        quantise(model)

    model, source = loaded(weights, unlike)
    weight = model.blocks[0].up.base.weight  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.base\.weight was quantised on the meta device with"):
        held(model, init=source, device="cpu", **options("cpu", "cpu", tmp_path))
    assert all(one.is_meta for one in (weight, weight.codes, weight.scales))  # type: ignore[union-attr]


def test_a_quantiser_that_adds_modules_is_refused(weights: Path) -> None:
    def adding(model: nn.Module) -> None:
        model.more = nn.Linear(2, 2, device="meta")

    with pytest.raises(ConfigError, match="more was added by the quantiser"):
        loaded(weights, adding)


def test_a_failure_on_the_way_gives_the_model_back_without_values(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = loaded(weights)
    objects = weights_of(model)

    def failing(*_: Any) -> None:
        raise OSError("the hooks fail")

    with monkeypatch.context() as patched:
        patched.setattr("offload.held_model.Hooks", failing)
        with pytest.raises(OSError, match="the hooks fail"):
            held(model, init=source, device="cpu", **options("cpu", "nvme", tmp_path))
    assert all(type(one) is Codes and one.is_meta and one.codes.is_meta for one in objects)
    with held(model, init=source, device="cpu", **options("cpu", "nvme", tmp_path)) as optimizer:
        assert isinstance(optimizer, OffloadZero)
        same_steps(optimizer, model, quantised(), range(1))
