"""Adapters over frozen bases in other people's quantised formats, streamed: with the bits of the resident run.

The oracle is plain torch over the same base: losses, gradients and values of the adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, ResumeError, Tuning
from offload.integrations.quantised import parameters_of_buffers
from offload.model.inner import inner_tensors
from tests.support.quantised import GROUP, Adapted, AWQLayout, GPTQLayout
from tests.support.streamed import in_little_memory
from tests.support.toy import Block, squares, take_step

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

WIDTH = 64
STEPS = 6


class Wide(nn.Module):
    """Blocks whose matrices are as large as a block of every format."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def bnb_4bit(**options: Any) -> Callable[[nn.Linear], nn.Module]:
    bnb = pytest.importorskip("bitsandbytes")

    def make(layer: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, **{"compute_dtype": torch.float32} | options)
        made.load_state_dict(layer.state_dict())
        return made.to("cpu")

    return make


def bnb_8bit() -> Callable[[nn.Linear], nn.Module]:
    bnb = pytest.importorskip("bitsandbytes")

    def make(layer: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
        made.load_state_dict(layer.state_dict())
        return made.to("cpu")

    return make


def bnb_8bit_used() -> Callable[[nn.Linear], nn.Module]:
    """After a forward, which moves codes and scales into the module's state."""
    fresh = bnb_8bit()

    def make(layer: nn.Linear) -> nn.Module:
        made = fresh(layer)
        made(torch.ones(1, layer.in_features))
        return made

    return make


def torchao(name: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    quantization = pytest.importorskip("torchao.quantization")

    def make(layer: nn.Linear) -> nn.Module:
        quantization.quantize_(layer, getattr(quantization, name)(**options))
        return layer

    return make


def intx() -> Callable[[nn.Linear], nn.Module]:
    pytest.importorskip("torchao.quantization")
    from torchao.quantization.granularity import PerGroup

    return torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))


def nf4_tensor() -> Callable[[nn.Linear], nn.Module]:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = nf4.linear_nf4(x, self.weight)
            return out if self.bias is None else out + self.bias

    def make(layer: nn.Linear) -> nn.Module:
        made = Linear(layer.in_features, layer.out_features)
        made.load_state_dict(layer.state_dict())
        made.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
        return made

    return make


def quanto() -> Callable[[nn.Linear], nn.Module]:
    lib = pytest.importorskip("optimum.quanto")

    def make(layer: nn.Linear) -> nn.Module:
        holder = nn.Sequential(layer)
        lib.quantize(holder, weights=lib.qint8)
        lib.freeze(holder)
        return holder[0]

    return make


def hqq() -> Callable[[nn.Linear], nn.Module]:
    core = pytest.importorskip("hqq.core.quantize")

    def make(layer: nn.Linear) -> nn.Module:
        config = core.BaseQuantizeConfig(nbits=4, group_size=32)
        made: nn.Module = core.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
        return made

    return make


def gguf() -> Callable[[nn.Linear], nn.Module]:
    file = pytest.importorskip("gguf")
    utils = pytest.importorskip("diffusers.quantizers.gguf.utils")

    def make(layer: nn.Linear) -> nn.Module:
        kind = file.GGMLQuantizationType.Q4_0
        made = utils.GGUFLinear(layer.in_features, layer.out_features, compute_dtype=torch.float32)
        codes = torch.from_numpy(file.quants.quantize(layer.weight.detach().numpy(), kind))
        made.weight = utils.GGUFParameter(codes, quant_type=kind)
        made.bias = layer.bias
        return made

    return make


def gptqmodel() -> Callable[[nn.Linear], nn.Module]:
    """The layer of the library, which needs another torch than the other tests, and so is seldom there."""
    lib = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")

    def make(layer: nn.Linear) -> nn.Module:
        rows, columns = layer.in_features, layer.out_features
        about = {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": True, "bias": True}
        made: nn.Module = lib.TorchLinear(in_features=rows, out_features=columns, **about)
        found = GPTQLayout(layer)
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            made.get_buffer(name).copy_(found.get_buffer(name))
        made.get_buffer("bias").copy_(torch.randn(columns))
        return made

    return make


def compressed_tensors() -> Callable[[nn.Linear], nn.Module]:
    """The library's layer, with weights that the library has packed. It computes with unpacked ones only, so these are
    unpacked for each forward, by the library."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor, compress_module
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    class Unpacked(nn.Module):
        def __init__(self, packed: Any) -> None:
            super().__init__()
            self.packed = packed
            self.compressor = BaseCompressor.get_value_from_registry(packed.quantization_scheme.format.value)

        def forward(self, x: Tensor) -> Tensor:
            state = {name: param.detach() for name, param in self.packed.named_parameters()}
            found = self.compressor.decompress(state, self.packed.quantization_scheme)
            return nn.functional.linear(x, found["weight"].to(x.dtype), self.packed.bias)

    def make(layer: nn.Linear) -> nn.Module:
        about = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=GROUP)
        scheme = QuantizationScheme(targets=["Linear"], weights=about)
        holder = nn.Sequential(layer)
        given: Any = {"g": scheme}
        apply_quantization_config(holder, QuantizationConfig(config_groups=given, format="pack-quantized"))
        made: Any = holder[0]
        rows = made.weight.detach().unflatten(1, (-1, GROUP))
        least, most = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
        made.weight_scale.data.copy_((most - least) / 15)
        made.weight_zero_point.data.copy_(torch.round(-least / made.weight_scale.data) - 8)
        compress_module(made)
        assert made.weight_packed.dtype is torch.int32
        return Unpacked(made)

    return make


FORMATS: dict[str, Callable[[], Callable[[nn.Linear], nn.Module]]] = {
    "bnb nf4": lambda: bnb_4bit(quant_type="nf4", compress_statistics=False),
    "bnb nf4 double": lambda: bnb_4bit(quant_type="nf4"),
    "bnb fp4": lambda: bnb_4bit(quant_type="fp4"),
    "bnb fp4 unset": lambda: bnb_4bit(quant_type="fp4", compute_dtype=None),
    "bnb nf4 in fp32": lambda: bnb_4bit(quant_type="nf4", quant_storage=torch.float32),
    "bnb int8": bnb_8bit,
    "bnb int8 used": bnb_8bit_used,
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4 in int8": intx,
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao NF4Tensor": nf4_tensor,
    "quanto int8": quanto,
    "hqq": hqq,
    "gguf": gguf,
    "GPTQ's layout": lambda: GPTQLayout,
    "AWQ's layout": lambda: AWQLayout,
    "gptqmodel": gptqmodel,
    "compressed-tensors": compressed_tensors,
}
PACKED = ("GPTQ's layout", "AWQ's layout", "gptqmodel", "compressed-tensors")
"""Those whose codes, scales and zeros are tensors of the layer."""
WRAPPERS = [name for name in FORMATS if "torchao" in name or "quanto" in name]
SPLIT = [name for name in FORMATS if name not in ("hqq", "gguf", *PACKED)]
"""Formats that are more than their own elements."""
PLACES = [("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"), ("cpu", "device")]


def base(name: str) -> Any:
    """A frozen quantised model with trained adapters."""
    make = FORMATS[name]()
    model = Wide().requires_grad_(False)
    torch.manual_seed(4)
    for block in model.blocks:
        for one in ("up", "down"):
            made = make(getattr(block, one)).requires_grad_(False)
            made.in_features, made.out_features = getattr(block, one).in_features, getattr(block, one).out_features
            setattr(block, one, Adapted(made))  # type: ignore[arg-type]
    return model


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def options(tier: str, param_tier: str, path: Path, **more: Any) -> dict[str, Any]:
    on_disk = {"path": path / "run"} if "nvme" in (tier, param_tier) else {}
    given: dict[str, Any] = {"tier": tier, "param_tier": param_tier, "compute_dtype": torch.float32}
    return {**given, "commit_every": None, "tuning": Tuning(chunk="16KiB", threads=1), **on_disk, **more}


def plain_steps(model: nn.Module, count: int = STEPS) -> Iterator[tuple[float, dict[str, Tensor]]]:
    optimizer = torch.optim.AdamW(adapters(model).values(), lr=1e-2)
    for step in range(count):
        loss = squares(model, batch(step))
        loss.backward()
        yield loss.item(), {name: param.grad.clone() for name, param in adapters(model).items()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def same_steps(optimizer: OffloadZero, model: nn.Module, plain: nn.Module, steps: range = range(STEPS)) -> None:
    """Trains a held model. Before each step a plain model is given its values, and has to have its bits."""
    for step in steps:
        values = {name: param.detach().clone() for name, param in adapters(model).items()}
        with torch.no_grad():
            for name, param in adapters(plain).items():
                param.copy_(values[name])
                param.grad = None
        found, expected = squares(model, batch(step)), squares(plain, batch(step))
        assert found.item() == expected.item()
        found.backward()
        expected.backward()
        for name, param in adapters(model).items():
            assert torch.equal(optimizer.grad(param), adapters(plain)[name].grad), name  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module, **given: Any) -> OffloadZero:
    parameters_of_buffers(model)
    return in_little_memory(model, torch.optim.AdamW(adapters(model).values(), lr=1e-2), **given)


@pytest.mark.parametrize(("tier", "param_tier"), PLACES)
@pytest.mark.parametrize("name", FORMATS)
def test_adapters_over_a_streamed_base_have_the_bits_of_the_resident_one(
    name: str, tier: str, param_tier: str, tmp_path: Path
) -> None:
    model, plain = base(name), base(name)
    with held(model, **options(tier, param_tier, tmp_path)) as optimizer:
        same_steps(optimizer, model, plain)
        stats = optimizer.stats()
        assert stats["peak_device_bytes"] <= optimizer._placement.device_bytes
    assert torch.equal(model(batch(9)), plain_with(plain, model)(batch(9)))


@pytest.mark.parametrize("name", PACKED)
def test_what_is_packed_streams_in_its_own_dtypes(name: str, tmp_path: Path) -> None:
    """GPTQ's and AWQ's buffers stay on the device unless they become parameters, with the keys that they had."""
    model, keys = base(name), base(name).state_dict().keys()
    expected = base(name).state_dict()
    assert parameters_of_buffers(model) == (0 if name == "compressed-tensors" else len(buffers_of(base(name))))
    with held(model, **options("cpu", "nvme", tmp_path, compute_dtype=torch.bfloat16)) as optimizer:
        assert model.state_dict().keys() == keys
        assert not buffers_of(model)
        assert optimizer._placement.resident_bytes < 1 << 14
        for key, value in model.state_dict().items():
            if not value.is_floating_point() or value.dtype is torch.float16:
                assert torch.equal(value, expected[key])


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Those that are saved."""
    return [value for name, value in model.named_buffers() if name in model.state_dict()]


def plain_with(plain: nn.Module, model: nn.Module) -> nn.Module:
    """A plain model with the adapters of another one."""
    with torch.no_grad():
        for name, param in adapters(plain).items():
            param.copy_(adapters(model)[name])
    return plain


COMMITTED = ["bnb nf4 double", "bnb int8", "torchao int8", "torchao NF4Tensor", "quanto int8", "GPTQ's layout"]


@pytest.mark.parametrize("name", COMMITTED)
def test_a_run_over_a_quantised_base_goes_on_from_its_commit(name: str, tmp_path: Path) -> None:
    model = base(name)
    given = options("nvme", "nvme", tmp_path, commit_every=3)
    with held(model, **given) as optimizer:
        same_steps(optimizer, model, base(name), range(4))
    model = base(name)
    with held(model, **given, resume=True) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == 3
        same_steps(optimizer, model, base(name), range(3, 8))


CHANGED = {
    "bnb nf4 double": ("quant_state.state2.absmax", lambda weight: weight.quant_state.state2.absmax),
    "bnb int8": ("SCB", lambda weight: weight.SCB),
    "torchao int8": ("scale", lambda weight: weight.scale),
    "quanto int8": ("_scale", lambda weight: weight._scale),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_resume_over_a_base_with_another_scale_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    given = options("nvme", "nvme", tmp_path, commit_every=1)
    model = base(name)
    with held(model, **given) as optimizer:
        take_step(optimizer, squares(model, batch(0)))
    key, scale = CHANGED[name]
    model = base(name)
    scale(model.blocks[2].up.base.weight).view(-1)[0] *= 1.5
    with pytest.raises(ResumeError, match=rf"blocks\.2\.up\.base\.weight\.{key} is frozen, and has other values"):
        held(model, **given, resume=True)


@pytest.mark.parametrize("name", SPLIT)
def test_a_streamed_base_is_saved_copied_and_read_as_a_plain_one(name: str, tmp_path: Path) -> None:
    model, plain = base(name), base(name)
    with held(model, **options("cpu", "cpu", tmp_path)):
        saved, expected = model.state_dict(), plain.state_dict()
        assert saved.keys() == expected.keys()
        other = base(name)
        if name != "bnb int8 used":  # which bitsandbytes does not load
            other.load_state_dict({key: saved[key] for key in saved if "weight_format" not in key}, strict=False)
        copied = copy.deepcopy(model)
        torch.save(copied.state_dict(), tmp_path / "saved.pt")
        model(batch(1))  # the units that were copied are released
        for key, value in saved.items():
            assert as_plain(value).numpy().tobytes() == as_plain(expected[key]).numpy().tobytes(), key
        for made in (model, copied):
            assert torch.equal(made(batch(1)), plain(batch(1)))
        assert torch.equal(other.train()(batch(1)), plain(batch(1)))
        layer, own = model.blocks[1].up.base, plain.blocks[1].up.base
        x = torch.randn(2, WIDTH)
        assert torch.equal(layer(x), own(x))
        assert model.to("cpu") is model
        assert torch.equal(dequantised(name, layer.weight), dequantised(name, own.weight))


def as_plain(value: Any) -> Tensor:
    """The values of what a state_dict has, whatever it is."""
    dequantise = getattr(value, "get_original_weight", None) or getattr(value, "dequantize", None)
    return dequantise() if type(value) is not Tensor and dequantise is not None and value.is_floating_point() else value


def dequantised(name: str, weight: Any) -> Tensor:
    if "4" in name and "bnb" in name:
        bnb = pytest.importorskip("bitsandbytes")
        made: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        return made
    if name.startswith("bnb int8"):
        return weight.data.float()
    return as_plain(weight)


@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["bnb nf4", "bnb int8", "torchao int8", "torchao NF4Tensor"])
def test_activations_wait_elsewhere_over_a_quantised_base(name: str, activations: str, tmp_path: Path) -> None:
    model, plain = base(name), base(name)
    given = options("cpu", "nvme" if activations == "nvme" else "cpu", tmp_path)
    with held(model, **given, activation_tier=activations) as optimizer:
        same_steps(optimizer, model, plain, range(3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bnb nf4 double", "bnb int8", "torchao float8", "quanto int8"])
def test_blocks_are_recomputed_over_a_quantised_base(name: str, reentrant: bool, tmp_path: Path) -> None:
    model, plain = base(name), base(name)
    for one in (model, plain):
        one.forward = lambda x, one=one: checkpointed(one, x, reentrant)  # type: ignore[method-assign]
    with held(model, **options("cpu", "nvme", tmp_path)) as optimizer:
        same_steps(optimizer, model, plain, range(3))


def checkpointed(model: Any, x: Tensor, reentrant: bool) -> Tensor:
    h = model.embed(x).requires_grad_()
    for block in model.blocks:
        h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=reentrant)
    made: Tensor = model.head(h)
    return made


@pytest.mark.parametrize("name", ["bnb int8", "bnb int8 used"])
def test_codes_that_bitsandbytes_moves_into_a_module_keep_no_other_memory(name: str, tmp_path: Path) -> None:
    model = base(name)
    with held(model, **options("cpu", "cpu", tmp_path)) as optimizer:
        take_step(optimizer, squares(model, batch(0)))
        for block in model.blocks:
            layer = block.up.base
            assert layer.weight.CB is None
            flat = optimizer._parts.parameters.slice_at(layer.state.CB)
            assert flat is not None
            assert flat == optimizer._parts.parameters.flat_of(optimizer._parts.parameters.index[layer.weight])


def test_codes_that_bitsandbytes_packs_anew_in_evaluation_are_refused(tmp_path: Path) -> None:
    bnb_modules = pytest.importorskip("bitsandbytes.nn.modules")
    if not bnb_modules.has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16, for which codes are packed")
    model, plain = base("bnb nf4"), base("bnb nf4")
    with held(model, **options("cpu", "cpu", tmp_path)), torch.no_grad():
        model.eval()
        with pytest.raises(ConfigError, match=r"weight is a Params4bit: .* evaluation mode.* copy\.deepcopy"):
            model(batch(0))
        assert torch.equal(model.train()(batch(0)), plain(batch(0)))
        assert model.blocks[0].up.base.weight.quant_state.absmax.numel() > 0
        copy.deepcopy(model).eval()(batch(0))


@pytest.mark.parametrize("name", SPLIT)
def test_a_quantised_base_takes_the_bytes_that_are_planned(name: str, tmp_path: Path) -> None:
    model = base(name)
    real = sum(param.nbytes for param in adapters(model).values())
    tensors = [part for param in model.parameters() if not param.requires_grad for part in parts_of(param)]
    real += sum({part.untyped_storage()._cdata: part.nbytes for part in tensors}.values())
    with held(model, **options("cpu", "device", tmp_path)) as optimizer:
        planned = optimizer.stats()["peak_device_bytes"]
    gaps = 64 * 4 * len(adapters(model))
    assert real <= planned <= real + gaps


def parts_of(param: Any) -> list[Tensor]:
    """What a parameter of one of these formats is made of, as its library has it."""
    if (state := getattr(param, "quant_state", None)) is not None:
        nested = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
        return [param.data, state.absmax, state.code, *nested]
    if isinstance(getattr(param, "SCB", None), Tensor):
        return [param.data, param.SCB]
    if hasattr(param, "__tensor_flatten__"):
        return [part for key in param.__tensor_flatten__()[0] for part in parts_of(getattr(param, key))]
    return [param.data]


@pytest.mark.parametrize("name", ["torchao int8", "quanto int8"])
def test_a_trained_quantised_parameter_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = base(name)
    model.blocks[1].up.base.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"blocks\.1\.up\.base\.weight is a .*, which is made of .*Freeze it"):
        OffloadZero(model, **options("cpu", "cpu", tmp_path))


PLANNED = {
    "nf4": lambda: bnb_4bit(quant_type="nf4"),
    "int8": bnb_8bit,
    "fp8": lambda: torchao("Float8WeightOnlyConfig"),
}


@pytest.mark.parametrize("form", PLANNED)
def test_a_plan_counts_what_the_libraries_make(form: str) -> None:
    """But for tables, a few hundred bytes."""
    from offload.cli.plan_models import _Quantised

    layer = nn.Linear(512, 1024, bias=False)
    counted = sum(param.nbytes for param in _Quantised(layer.to("meta"), form).parameters())
    weight = PLANNED[form]()(nn.Linear(512, 1024)).weight
    tables = [one.tensor.nbytes for one in inner_tensors([weight]) if one.is_table]
    assert counted == sum(one.tensor.nbytes for one in inner_tensors([weight])) - sum(tables)
    assert sum(tables) < 2048


PRETRAINED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("form", PRETRAINED)
def test_qlora_by_transformers_and_peft_has_the_bits_of_the_resident_base(kind: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **ids, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / "base")

    def made() -> Any:
        given = transformers.BitsAndBytesConfig(**PRETRAINED[form], bnb_4bit_compute_dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=given, device_map="cpu", dtype=torch.float32
        )
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, lora).train()

    model, plain = made(), made()
    with held(model, **options("cpu", "nvme", tmp_path)) as optimizer:
        for step in range(4):
            with torch.no_grad():
                for name, param in adapters(plain).items():
                    param.copy_(adapters(model)[name])
                    param.grad = None
            rows = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))
            found, expected = (one(input_ids=rows, labels=rows).loss for one in (model, plain))
            assert found.item() == expected.item()
            found.backward()
            expected.backward()
            for name, param in adapters(model).items():
                assert torch.equal(optimizer.grad(param), adapters(plain)[name].grad), name  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
        rows = torch.arange(4)[None]
        made_by = [
            one.generate(input_ids=rows, max_new_tokens=6, do_sample=False) for one in (model, plain_with(plain, model))
        ]
        assert torch.equal(*made_by)
        merged = copy.deepcopy(model).merge_and_unload()
        assert torch.equal(merged(input_ids=rows).logits, plain.merge_and_unload()(input_ids=rows).logits)
