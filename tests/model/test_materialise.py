"""Models built on the meta device: the bits of those built whole, without ever being whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig, initial_values
from offload.model.meta_init import FromFunction, FromSafetensors
from tests.support.released import has_no_values
from tests.support.toy import take_step

TIERS: list[dict[str, Any]] = [{}, {"param_tier": "cpu"}, {"param_tier": "nvme"}]
CONFIG = GPTConfig(layers=3, width=32, heads=2, context=16)


class Net(nn.Module):
    """Of modules that ask for random numbers in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def trained(model: nn.Module, path: Path, **options: Any) -> dict[str, Tensor]:
    """Masters and parameters after two steps."""
    params = list(model.parameters())
    with OffloadZero(model, path=path, tuning=Tuning(chunk="4KiB"), **options) as optimizer:
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        for _ in range(2):
            out = model(torch.arange(8).view(1, 8))
            take_step(optimizer, (out[0] if isinstance(out, tuple) else out).square().sum())
        found = {}
        for name, param in model.named_parameters():
            found[name] = optimizer.state_of(param)["master"]
            with optimizer.gathered(param):
                found[f"{name} copy"] = param.detach().clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("options", TIERS)
def test_reset_parameters_gives_the_values_of_a_model_built_whole(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = trained(Net(), tmp_path / "whole")
    model = on_meta(Net)
    torch.manual_seed(5)
    assert same(trained(model, tmp_path / "parts", **options), whole)


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("options", TIERS)
def test_a_function_of_name_and_tensor_gives_them_too(options: dict[str, Any], tied_head: bool, tmp_path: Path) -> None:
    config = GPTConfig(layers=3, width=32, heads=2, context=16, tied_head=tied_head)
    whole = trained(GPT(config, seed=3), tmp_path / "whole")
    parts = trained(GPT(config, device="meta"), tmp_path / "parts", init=initial_values(config, 3), **options)
    assert same(parts, whole)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("options", TIERS)
def test_values_come_from_safetensors(options: dict[str, Any], sharded: bool, tmp_path: Path) -> None:
    config = GPTConfig(layers=3, width=32, heads=2, context=16, tied_head=True)
    model = GPT(config, seed=3)
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    whole = trained(model, tmp_path / "whole")
    if sharded:
        names = sorted(tensors)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, mine in halves.items():
            save_file({name: tensors[name] for name in mine}, tmp_path / file)
        init = tmp_path / "model.safetensors.index.json"
        init.write_text(json.dumps({"weight_map": {name: file for file, mine in halves.items() for name in mine}}))
    else:
        init = tmp_path / "model.safetensors"
        save_file(tensors, init)
    assert same(trained(GPT(config, device="meta"), tmp_path / "parts", init=init, **options), whole)


class Angles(nn.Module):
    """A table that is not saved, and a mask."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("mask", torch.empty(2, 2, dtype=torch.bool), persistent=False)
        self.resets = resets
        if not self.table.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(4) / 4)
            if self.resets:
                self.mask.copy_(torch.tensor([[True, False], [False, True]]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table[1] + self.mask[0, 0]


class Pretrained(Net):
    """As transformers builds models: one initialisation for all modules. Args: resets: whether of all buffers."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.angles = Angles(resets)
        self.twin = nn.Embedding(11, 16)
        self.twin.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7.0)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Angles):
            module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.angles(self.twin(x))[..., :5]


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A directory as transformers writes it, of two files."""
    folder.mkdir()
    names = sorted(tensors)
    halves = {f"model-{n}.safetensors": names[n::2] for n in range(2)}
    for file, mine in halves.items():
        save_file({name: tensors[name] for name in mine}, folder / file)
    weights = {name: file for file, mine in halves.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if not name.startswith("twin")}


@pytest.mark.parametrize("options", TIERS)
def test_a_directory_gives_a_model_its_values_and_buffers_that_are_not_saved_are_made(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(4)
    model = Pretrained()
    folder = write(tmp_path / "saved", tensors_of(model))
    whole = trained(model, tmp_path / "whole")
    parts = on_meta(Pretrained)
    assert same(trained(parts, tmp_path / "parts", init=folder, **options), whole)
    assert parts.twin.weight is parts.embed.weight
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(parts.named_buffers())[name], buffer)


def test_what_a_directory_lacks_is_listed_and_made_only_if_asked_for(tmp_path: Path) -> None:
    model = Pretrained()
    tensors = tensors_of(model)
    gone = ["blocks.1.0.bias", "head.weight"]
    folder = write(tmp_path / "saved", {name: tensor for name, tensor in tensors.items() if name not in gone})
    parts = on_meta(Pretrained)
    with pytest.raises(
        ConfigError, match=r"no values for blocks\.1\.0\.bias, head\.weight: give .* or init_missing=True"
    ):
        OffloadZero(parts, init=folder)
    assert all(param.is_meta for param in parts.parameters())
    with OffloadZero(parts, init=folder, init_missing=True, compute_dtype=torch.float32):
        found = dict(parts.named_parameters())
        assert found["blocks.1.0.bias"].eq(0).all()
        assert found["head.weight"].eq(7).all()
        for name in tensors.keys() - set(gone):
            assert torch.equal(found[name], tensors[name]), name


def test_files_of_other_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(Pretrained())
    wrong = {
        r"angles\.mask is in no file, and .* Angles leaves it undefined": (partial(Pretrained, False), {}),
        r"twin\.weight are one parameter": (Pretrained, {"twin.weight": tensors["embed.weight"] + 1}),
        r"head\.bias has shape \(5,\) in the model and \(6,\)": (Pretrained, {"head.bias": torch.ones(6)}),
    }
    for number, (match, (build, others)) in enumerate(wrong.items()):
        folder = write(tmp_path / str(number), tensors | others)
        with pytest.raises(ConfigError, match=match):
            OffloadZero(on_meta(build), init=folder)
    with pytest.raises(ConfigError, match="init_missing=True, and init=None names no files"):
        OffloadZero(on_meta(Pretrained), init_missing=True)


def test_only_a_unit_and_the_root_are_in_memory_at_once(tmp_path: Path) -> None:
    config = GPTConfig(layers=12, width=64, heads=2, context=16)
    model = GPT(config, device="meta")
    held: list[int] = []
    fill = initial_values(config, 0)

    def watch(name: str, tensor: Tensor) -> None:
        fill(name, tensor)
        here = (p for p in model.parameters() if not p.is_meta and p.numel() and not has_no_values(p))
        held.append(sum(p.numel() for p in here))

    with OffloadZero(model, path=tmp_path / "run", param_tier="nvme", tuning=Tuning(chunk="64KiB"), init=watch):
        pass
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - 12 * block
    assert max(held) <= root + block


class Stacks(nn.Module):
    """Two large parameters in one module, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(4, 32, 32)) for _ in range(2))
        self.bias = nn.Parameter(torch.empty(32))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.tanh(x @ up) @ down + self.bias
        return x


@pytest.mark.parametrize("init", ["a function", "files"])
def test_of_a_module_in_tiles_one_parameter_is_in_memory_at_once(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, here = on_meta(Stacks), []
    values = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    save_file(values, tmp_path / "model.safetensors")
    fill = FromSafetensors.fill if init == "files" else FromFunction.fill

    def watched(self: Any, prefix: str, module: nn.Module, fresh: dict[str, Tensor]) -> None:
        fill(self, prefix, module, fresh)
        here.append([n for n, p in model.named_parameters() if not p.is_meta and p.numel() and not has_no_values(p)])

    monkeypatch.setattr(FromSafetensors if init == "files" else FromFunction, "fill", watched)
    given: Any = tmp_path if init == "files" else (lambda name, tensor: tensor.copy_(values[name]))
    options: dict[str, Any] = {"tuning": Tuning(chunk="4KiB", tile=32 * 32 * 4), "compute_dtype": torch.float32}
    with OffloadZero(model, path=tmp_path / "run", param_tier="nvme", init=given, **options):
        assert here == [["up"], ["down"], ["bias"]]
        for name, value in values.items():
            assert torch.equal(model.get_parameter(name), value)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.empty(2), persistent=False)


@pytest.mark.parametrize(
    ("build", "init", "match"),
    [
        (Odd, None, r"Odd.*no reset_parameters"),
        (Net, 5, "init=5"),
        (Net, "missing.safetensors", "is no safetensors file"),
        (Net, "empty", r"no values for embed\.weight"),
        (WithBuffer, "empty", "angles is a buffer"),
    ],
)
def test_what_will_be_missing_is_said_before_anything_is_made(
    build: Callable[[], nn.Module], init: Any, match: str, tmp_path: Path
) -> None:
    if init == "empty":
        init = tmp_path / "empty.safetensors"
        save_file({"linear.weight": torch.zeros(2, 2), "linear.bias": torch.zeros(2)}, init)
    model = on_meta(build)
    with pytest.raises(ConfigError, match=match):
        OffloadZero(model, path=tmp_path / "run", init=init)
    assert all(param.is_meta for param in model.parameters())
    assert not (tmp_path / "run").exists()


def test_parts_with_values_keep_them_beside_those_without() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1] = nn.Linear(8, 8)
    values = {f"1.{name}": param.detach().clone() for name, param in model[1].named_parameters()}
    with OffloadZero(model, init=lambda name, tensor: tensor.fill_(0.5), compute_dtype=torch.float32):
        for name, param in model.named_parameters():
            assert torch.equal(param, values.get(name, torch.full_like(param, 0.5))), name


def test_values_that_init_kept_for_itself_stay() -> None:
    """Memory that is made for a parameter goes page by page as it is cast, but for what somebody else has."""
    kept: list[Tensor] = []

    def fill(name: str, tensor: Tensor) -> None:
        tensor.fill_(3.0)
        kept.append(tensor.detach())

    model = on_meta(lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
    with OffloadZero(model, tier="cpu", init=fill):
        assert all(torch.equal(one, torch.full_like(one, 3.0)) for one in kept)
        assert all(torch.equal(param, torch.full_like(param, 3.0)) for param in model.parameters())


def test_frozen_parameters_are_cast_as_they_get_values() -> None:
    dtypes = []

    def fill(name: str, tensor: Tensor) -> None:
        tensor.fill_(1.0)
        dtypes.append([param.dtype for param in model.parameters() if not param.is_meta])

    model = on_meta(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    with OffloadZero(model, tier="cpu", init=fill):
        assert dtypes == [[torch.bfloat16] * before + [torch.float32] for before in range(4)]
