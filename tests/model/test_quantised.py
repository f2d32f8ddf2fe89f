"""Frozen parameters that are made of several tensors, streamed. The oracle is plain torch over the same base.

`Codes` of tests/support stands in for the wrapper subclasses of torchao and quanto; tests/peers has those, too.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, ResumeError, build
from offload.integrations.quantised import parameters_of_buffers
from offload.model import inner
from offload.model.inner import Format, inner_tensors
from offload.sizes import MIB
from tests.model.test_frozen import options, trained
from tests.support.quantised import (
    GROUP,
    TABLE,
    Adapted,
    AWQLayout,
    Codes,
    GPTQLayout,
    quantised,
    real_bytes,
    weights_of,
)
from tests.support.streamed import in_little_memory
from tests.support.toy import WIDTH, Net, batch, squares, take_step

WHERE = [("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"), ("device", "cpu")]


def held(model: nn.Module, **given: Any) -> OffloadZero:
    return in_little_memory(model, torch.optim.AdamW(trained(model), lr=1e-2), **given)


def follow(plain: nn.Module, model: nn.Module) -> None:
    """Gives a plain model the values of the trained parameters of another one, and no gradients."""
    with torch.no_grad():
        for own, other in zip(trained(plain), trained(model), strict=True):
            own.copy_(other)
            own.grad = None


def same_steps(optimizer: OffloadZero, model: nn.Module, plain: nn.Module, steps: range) -> None:
    """Trains a held model. From the values before each step a plain one has to get the same loss and gradients."""
    for step in steps:
        follow(plain, model)
        found, expected = squares(model, batch(step)), squares(plain, batch(step))
        assert found.item() == expected.item()
        found.backward()
        expected.backward()
        for own, other in zip(trained(plain), trained(model), strict=True):
            assert torch.equal(optimizer.grad(other), own.grad)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("tier", "param_tier"), WHERE)
def test_a_quantised_base_streams_with_the_bits_of_the_resident_one(tier: str, param_tier: str, tmp_path: Path) -> None:
    model, plain = quantised(), quantised()
    objects = weights_of(model)
    with held(model, **options(tier, param_tier, tmp_path)) as optimizer:
        same_steps(optimizer, model, plain, range(4))
        assert optimizer.stats()["peak_device_bytes"] <= optimizer._placement.device_bytes
        names = {spec.name for spec in optimizer._plan.held.specs}
        assert {"blocks.0.up.base.weight.codes", "blocks.0.up.base.weight.scales"} <= names
        assert not any(name.endswith(("weight", "table")) for name in names if "base" in name)
        assert not optimizer._parts.parameters.units["blocks.3"].is_here
    assert all(one is other for one, other in zip(objects, weights_of(model), strict=True))
    assert [type(one) for one in objects] == [Codes] * len(objects)
    assert all(type(one.codes) is type(one.scales) is Tensor for one in objects)
    follow(plain, model)
    assert torch.equal(model(batch(9)), plain(batch(9)))


@pytest.mark.parametrize(("tier", "param_tier"), WHERE[:3])
def test_a_quantised_base_stays_while_a_text_is_generated(
    tier: str, param_tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has the bits of the resident base, and so has the training inside and after it."""
    model, plain = quantised(), quantised()
    adamw = torch.optim.AdamW(trained(model), lr=1e-2)
    with OffloadZero(model, adamw, **options(tier, param_tier, tmp_path)) as optimizer:
        monkeypatch.setattr(build, "_free_on_device", lambda *_: MIB)
        same_steps(optimizer, model, plain, range(2))
        follow(plain, model)
        with optimizer.generating():
            moved = []
            for token in range(4):
                before = optimizer.stats()["gathered_bytes"]
                with torch.no_grad():
                    assert torch.equal(model(batch(token)), plain(batch(token)))
                moved.append(optimizer.stats()["gathered_bytes"] - before)
            assert moved[0] > 0 == sum(moved[1:])
            assert optimizer._parts.parameters.units["blocks.0"].is_here
            same_steps(optimizer, model, plain, range(2, 4))
            follow(plain, model)
            with torch.no_grad():
                assert torch.equal(model(batch(4)), plain(batch(4)))
        assert not optimizer._parts.parameters.units["blocks.0"].is_here
        same_steps(optimizer, model, plain, range(4, 6))


def test_codes_and_scales_keep_their_own_dtypes_whatever_is_computed_in(tmp_path: Path) -> None:
    """Of wrappers in 16 bits, and of those that say that they are in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        for param_tier in ("cpu", "device"):
            model, plain = quantised(dtype=dtype), quantised(dtype=dtype)
            given = options("cpu", param_tier, tmp_path, compute_dtype=dtype)
            with held(model, **given), torch.no_grad():
                assert torch.equal(model(batch(0)), plain(batch(0).to(dtype)))
                assert {one.scales.dtype for one in weights_of(model)} == {torch.float32}
                assert {one.dtype for one in weights_of(model)} == {dtype}


def test_whoever_uses_a_released_weight_gets_its_values(tmp_path: Path) -> None:
    model, plain = quantised(), quantised()
    with held(model, **options("cpu", "cpu", tmp_path)) as optimizer:
        unit = optimizer._parts.parameters.units["blocks.2"]

        def released() -> tuple[Any, Any]:
            model(batch(0))
            assert not unit.is_here
            return model.blocks[2].down.weight, plain.blocks[2].down.weight  # type: ignore[union-attr]

        weight, own = released()
        assert isinstance(weight, Codes)
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(weight.codes, own.codes)
        weight, own = released()
        assert torch.equal(weight.scales * 2, own.scales * 2)
        weight, own = released()
        assert torch.equal(weight.dequantise(), own.dequantise())
        weight, own = released()
        assert torch.equal(weight.to(torch.float32), own.to(torch.float32))  # of its own dtype and device
        weight, own = released()
        assert repr(weight) == repr(own)
        assert weight._version == own._version
        for made in (weight.data, weight.detach(), weight.scales[1:]):
            released()
            if isinstance(made, Codes):
                released()
                assert torch.equal(made.scales, own.scales)
                released()
                assert torch.equal(made.dequantise(), own.dequantise())
            else:
                assert torch.equal(made + 0, own.scales[1:])
        weight, own = released()
        x = torch.randn(3, 2 * WIDTH, requires_grad=True)
        made = nn.functional.linear(x, weight)
        released()
        (grad,) = torch.autograd.grad(made.sum(), x)
        assert torch.equal(grad, torch.ones(3, WIDTH) @ own.dequantise())
        layer = model.blocks[2].down  # type: ignore[union-attr]
        released()
        assert torch.equal(layer(x), plain.blocks[2].down(x))  # type: ignore[union-attr]


def test_a_streamed_base_is_saved_copied_moved_and_loaded(tmp_path: Path) -> None:
    model, plain = quantised(), quantised()
    with held(model, **options("cpu", "nvme", tmp_path)):
        assert model.to("cpu").to(torch.float32).float() is model
        with pytest.raises(ConfigError, match=r"weight is \(.*\), torch.float32 on cpu and would become"):
            model.to(torch.float64)
        saved, copied, pickled = model.state_dict(), copy.deepcopy(model), pickle.dumps(weights_of(model)[0])
        variables = model.state_dict(keep_vars=True)
        assert variables["blocks.1.down.weight"] is model.blocks[1].down.weight  # type: ignore[union-attr]
        other = quantised()
        with torch.no_grad():
            for weight in weights_of(other):
                weight.scales.zero_()
        model(batch(0))
        other.load_state_dict(saved)
        for made in (copied, other):
            assert {type(one) for one in weights_of(made)} == {Codes}
            assert torch.equal(made(batch(1)), plain(batch(1)))
        assert torch.equal(pickle.loads(pickled).dequantise(), weights_of(plain)[0].dequantise())


def test_an_export_of_wrappers_is_refused_by_name(tmp_path: Path) -> None:
    model = quantised()
    with (
        held(model, **options("cpu", "cpu", tmp_path)) as optimizer,
        pytest.raises(ConfigError, match=r"blocks\.0\.up\.base\.weight is a Codes, which safetensors cannot hold"),
    ):
        optimizer.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_what_is_written_to_a_scale_counts_and_is_committed(tmp_path: Path) -> None:
    given = options("nvme", "nvme", tmp_path, commit_every=1)
    model, plain = quantised(), quantised()

    def write(one: Any) -> None:
        with torch.no_grad():
            one.blocks[1].down.weight.scales.mul_(1.5)
            one.blocks[3].down.weight.copy_(Codes.of(torch.full((WIDTH, 2 * WIDTH), 0.5)))

    with held(model, **given) as optimizer:
        same_steps(optimizer, model, plain, range(1))
        write(model)
        write(plain)
        same_steps(optimizer, model, plain, range(1, 3))
    model = quantised()
    with held(model, **given, resume=True) as optimizer:
        same_steps(optimizer, model, plain, range(3, 5))


def test_a_resume_over_another_scale_is_refused_by_its_name(tmp_path: Path) -> None:
    given = options("nvme", "nvme", tmp_path, commit_every=1)
    model = quantised()
    with held(model, **given) as optimizer:
        take_step(optimizer, squares(model))
    model = quantised()
    weights_of(model)[2].scales[0, 0] *= 2
    with pytest.raises(ResumeError, match=r"blocks\.1\.up\.base\.weight\.scales is frozen, and has other values"):
        held(model, **given, resume=True)


@pytest.mark.parametrize("activation_tier", ["cpu", "nvme"])
def test_activations_wait_elsewhere_over_a_quantised_base(activation_tier: str, tmp_path: Path) -> None:
    model, plain = quantised(), quantised()
    given = options("cpu", "nvme", tmp_path, activation_tier=activation_tier)
    with held(model, **given) as optimizer:
        same_steps(optimizer, model, plain, range(3))


def test_all_that_a_base_takes_on_the_device_is_planned(tmp_path: Path) -> None:
    model = quantised()
    real = real_bytes(model) + sum(param.nbytes for param in trained(model))
    with held(model, **options("cpu", "device", tmp_path)) as optimizer:
        planned = optimizer.stats()["peak_device_bytes"]
    gaps = 64 * 4 * len(trained(model))
    assert real <= planned < real + gaps


def test_the_first_line_names_what_was_not_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = quantised()
    left = 4 * (4 * WIDTH * WIDTH + 5 * WIDTH + 3 * WIDTH)  # of 4 blocks, the embedding and the head, in fp32
    held(model, **options("cpu", "cpu", tmp_path)).close()
    names = r"blocks\.0\.after, blocks\.1\.after and 4 others"
    assert re.search(rf"{left / 1024:.4g} KiB of frozen ones not quantised \({names}\)", capsys.readouterr().err)
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    held(model, **options("cpu", "cpu", tmp_path)).close()
    assert "not quantised" not in capsys.readouterr().err


def test_a_base_that_fails_to_be_taken_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = quantised(), quantised()
    before = [(one, one.codes, one.codes.data_ptr()) for one in weights_of(model)]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr("offload.held_model.Hooks", fails)
    with pytest.raises(RuntimeError, match="no more"):
        held(model, **options("cpu", "cpu", tmp_path))
    assert [(one, one.codes, one.codes.data_ptr()) for one in weights_of(model)] == before
    assert {type(one) for one in weights_of(model)} == {Codes}
    assert torch.equal(model(batch(0)), plain(batch(0)))


def test_the_memory_of_before_is_freed(tmp_path: Path) -> None:
    model = quantised()
    before = [weakref.ref(one.codes.untyped_storage()) for one in weights_of(model)]
    with held(model, **options("cpu", "nvme", tmp_path)):
        gc.collect()
        assert not any(storage() for storage in before)


def test_a_trained_parameter_of_several_tensors_is_refused_by_name(tmp_path: Path) -> None:
    model = quantised()
    model.blocks[1].down.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"blocks\.1\.down\.weight is a Codes, which is made of codes, scales, table: .* Freeze it"
    ):
        OffloadZero(model, **options("cpu", "cpu", tmp_path))


def test_experts_in_mxfp4_are_refused_with_what_to_load(tmp_path: Path) -> None:
    class Mxfp4GptOssExperts(nn.Linear):
        """As transformers calls it. Its weights are no parameters."""

    model = quantised()
    model.head = Mxfp4GptOssExperts(WIDTH, 3)
    with pytest.raises(ConfigError, match=r"head has weights in MXFP4.*Mxfp4Config\(dequantize=True\)"):
        OffloadZero(model, **options("cpu", "device", tmp_path))


class Packed(nn.Parameter):
    """A format that is no wrapper subclass: a scale is an attribute of an attribute."""

    class State:
        scale: Tensor
        table: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 15, (WIDTH, WIDTH), dtype=torch.uint8)
        self.weight = Packed(codes, requires_grad=False)
        self.weight.state = Packed.State()  # type: ignore[attr-defined]
        self.weight.state.scale, self.weight.state.table = torch.rand(WIDTH, 1), TABLE  # type: ignore[attr-defined]
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.codes_too = {"of the weight": self.weight.data}  # as bitsandbytes has it

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state  # type: ignore[attr-defined]
        weight = state.table[self.codes_too["of the weight"].int()] * state.scale
        return x + self.adapter(x) + x @ weight / WIDTH


def packed() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)))


def test_another_format_needs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{Packed.__module__}.{Packed.__qualname__}"
    monkeypatch.setitem(inner.FORMATS, name, Format(("", "state.scale", "state.none"), tables=("state.table",)))
    model, plain = packed(), packed()
    assert [one.key for one in inner_tensors([model[0].weight])] == ["", "state.scale", "state.table"]
    x = torch.randn(4, WIDTH)
    with held(model, **options("cpu", "nvme", tmp_path)) as optimizer:
        assert optimizer._placement.resident_bytes == TABLE.nbytes
        for _ in range(2):
            take_step(optimizer, squares(model, x))
            follow(plain, model)
            assert torch.equal(model(x), plain(x))
        parameters = optimizer._parts.parameters
        for layer, own in zip(model, plain, strict=True):
            assert torch.equal(layer.weight.state.scale, own.weight.state.scale)
            assert layer.weight.state.table is TABLE
            assert parameters.slice_at(layer.codes_too["of the weight"]) == parameters.slice_at(layer.weight)


def _over_packed(layout: type[nn.Module]) -> Net:
    """A frozen model with adapters beside layers that have packed weights as buffers."""
    torch.manual_seed(0)
    model = Net(3).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(nn.Linear(WIDTH, 2 * WIDTH))  # type: ignore[assignment]
        block.up.base = nn.Sequential(nn.Linear(WIDTH, GROUP), layout(nn.Linear(GROUP, 2 * WIDTH)))  # type: ignore[assignment, union-attr]
        block.up.base.requires_grad_(False)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("layout", [GPTQLayout, AWQLayout])
def test_layers_with_packed_buffers_stream_as_parameters(layout: type[nn.Module], tmp_path: Path) -> None:
    model, plain = _over_packed(layout), _over_packed(layout)
    saved = {name for name, _ in plain.named_buffers() if name in plain.state_dict()}
    assert parameters_of_buffers(model) == len(saved)
    assert parameters_of_buffers(model) == 0
    with held(model, **options("cpu", "nvme", tmp_path)) as optimizer:
        same_steps(optimizer, model, plain, range(3))
        assert saved <= {spec.name for spec in optimizer._plan.held.specs}
        assert model.state_dict().keys() == plain.state_dict().keys()


def test_layers_with_a_weight_keep_their_buffers() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("counts", torch.zeros(2, 2, dtype=torch.int64))
    assert parameters_of_buffers(model) == 0
    assert dict(model.named_buffers()).keys() == {"counts"}
