"""Pretrained models of transformers, read from their files straight to their tiers: what `from_pretrained` gives.

Random weights, saved in several files by `save_pretrained`. The oracle: the model that `from_pretrained` loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offload import ConfigError, OffloadZero, Tuning
from tests.peers.test_transformers import DEFAULTS, MODELS, SMALL, llama, loss_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")


def gpt_neox() -> Any:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **DEFAULTS))


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, **DEFAULTS
    )
    return transformers.OPTForCausalLM(config)


def bloom() -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **DEFAULTS)
    )


def gpt_neo() -> Any:
    config = transformers.GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
        **DEFAULTS,
    )
    return transformers.GPTNeoForCausalLM(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        **{**DEFAULTS, "eos_token_id": 2},
    )
    return transformers.WhisperForConditionalGeneration(config)


ALL: dict[str, Callable[[], Any]] = MODELS | {
    "mistral": llama("Mistral", tie_word_embeddings=False),
    "qwen3": llama("Qwen3", head_dim=8),
    "qwen2 moe": llama("Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "gemma2 tied": llama("Gemma2", head_dim=8),
    "phi3": llama("Phi3"),
    "gpt neox": gpt_neox,
    "gpt neo tied": gpt_neo,
    "opt tied": opt,
    "bloom tied": bloom,
    "whisper tied": whisper,
}
OPTIONS: dict[str, Any] = {"compute_dtype": torch.float32, "tuning": Tuning(chunk="16KiB", threads=1)}
PLACES: list[dict[str, Any]] = [{"tier": "cpu"}, {"param_tier": "nvme"}]


def saved(name: str, path: Path, **options: Any) -> tuple[type, Path]:
    """The class of a model, and the directory it was saved to."""
    torch.manual_seed(11)
    model = ALL[name]()
    with torch.no_grad():
        for param in model.parameters():  # also those that begin as zeros or ones
            param.add_(torch.randn_like(param), alpha=0.02)
    model.save_pretrained(path / "saved", max_shard_size="40KB", **options)
    return type(model), path / "saved"


def taken(*args: Any, **options: Any) -> tuple[Any, OffloadZero]:
    from offload.integrations.transformers import from_pretrained

    return from_pretrained(*args, partial(torch.optim.AdamW, lr=1e-2), **options)


def loss(name: str, model: Any) -> torch.Tensor:
    if "whisper" in name:
        features = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32)
        return model(input_features=features, labels=torch.arange(4, 12).view(2, 4)).loss
    return loss_of(name, model, 0)


@pytest.mark.parametrize("options", PLACES, ids=["ram", "disk"])
@pytest.mark.parametrize("name", ALL)
def test_a_model_from_its_files_is_the_one_that_transformers_loads(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    kind, path = saved(name, tmp_path)
    assert len(list(path.glob("*.safetensors"))) > 1
    plain = kind.from_pretrained(path)
    options = OPTIONS | options
    model, optimizer = taken(kind, path, path=tmp_path / "run", **options)
    with optimizer:
        assert type(model) is kind
        assert model.config.to_dict() == plain.config.to_dict()
        assert not model.training
        params = dict(model.named_parameters(remove_duplicate=False))
        expected = dict(plain.named_parameters(remove_duplicate=False))
        assert params.keys() == expected.keys()
        for key, param in expected.items():
            assert torch.equal(params[key], param), key
            param.requires_grad_(params[key].requires_grad)  # transformers unfreezes what its constructors freeze
            for other in expected:
                assert (params[key] is params[other]) == (param is expected[other])
        buffers = dict(model.named_buffers(remove_duplicate=False))
        assert buffers.keys() == dict(plain.named_buffers(remove_duplicate=False)).keys()
        for key, buffer in plain.named_buffers(remove_duplicate=False):
            assert buffers[key].dtype is buffer.dtype
            assert torch.equal(buffers[key], buffer), key
        assert "tied" not in name or len(params) > len(set(params.values()))
        found = loss(name, model)
        assert found.item() == loss(name, plain).item()
        found.backward()
        optimizer.step()
        trained = {key: param.detach().clone() for key, param in model.named_parameters()}
    with OffloadZero(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), **OPTIONS) as optimizer:
        loss(name, plain).backward()
        optimizer.step()
        for key, param in plain.named_parameters():
            assert torch.equal(trained[key], param), key


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_bf16_files_are_taken_by_an_auto_class_and_go_on_from_a_commit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    path = tmp_path / "saved"
    ALL[name]().to(torch.bfloat16).save_pretrained(path, max_shard_size="20KB")
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    options = {"path": tmp_path / "run", "commit_every": 0, "param_tier": "nvme"}
    model, optimizer = taken(transformers.AutoModelForCausalLM, path, **options)
    with optimizer:
        for (key, param), (other, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert key == other
            assert torch.equal(optimizer.state_of(param)["master"], expected.detach().float())
        loss(name, model).backward()
        optimizer.step()
        optimizer.commit()
        masters = {key: optimizer.state_of(param)["master"] for key, param in model.named_parameters()}
    model, optimizer = taken(transformers.AutoModelForCausalLM, path, resume=True, **options)
    with optimizer:
        for key, param in model.named_parameters():
            assert torch.equal(optimizer.state_of(param)["master"], masters[key])
        assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Puts the tensors of a directory, changed, into one file."""
    tensors: dict[str, Any] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_what_the_files_lack_is_listed_and_made_only_if_asked_for(tmp_path: Path) -> None:
    kind, path = saved("llama", tmp_path)
    lacking = ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    rewritten(path, lambda tensors: [tensors.pop(key) for key in lacking])
    with pytest.raises(ConfigError, match=r"no values for model\.layers\.1\.mlp\.up_proj\.weight, lm_head\.weight: "):
        taken(kind, path, **OPTIONS)
    model, optimizer = taken(kind, path, init_missing=True, **OPTIONS)
    plain = kind.from_pretrained(path)
    with optimizer:
        for key, param in plain.named_parameters():
            mine = dict(model.named_parameters())[key]
            assert torch.equal(mine, param) == (key not in lacking)
            assert abs(mine.std() - param.std()) < 0.005


def test_an_expert_that_the_files_lack_is_refused_with_its_key(tmp_path: Path) -> None:
    kind, path = saved("mixtral", tmp_path)
    with safe_open(next(path.glob("*.safetensors")), "pt") as file:
        assert not any("gate_up_proj" in key for key in list(file.keys()))  # saved apart, merged by transformers
    weights = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    gone = next(key for key in weights if "experts.1.w1" in key)
    rewritten(path, lambda tensors: tensors.pop(gone))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj"):
        taken(kind, path, **OPTIONS)


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    kind, path = saved("llama tied", tmp_path)
    key = "model.embed_tokens.weight"
    rewritten(path, lambda tensors: tensors.update({"lm_head.weight": tensors[key] + 1}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight are one parameter of the model"):
        taken(kind, path, **OPTIONS)


def test_a_base_model_is_read_from_the_files_of_one_with_a_head(tmp_path: Path) -> None:
    _, path = saved("llama", tmp_path)
    plain = transformers.AutoModel.from_pretrained(path)
    model, optimizer = taken(transformers.AutoModel, path, **OPTIONS)
    with optimizer:
        for key, param in plain.named_parameters():
            assert torch.equal(dict(model.named_parameters())[key], param)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        taken(transformers.AutoModel, tmp_path)


@pytest.mark.parametrize("options", PLACES, ids=["ram", "disk"])
def test_adapters_train_on_files_that_are_never_in_memory(options: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    kind, path = saved("llama", tmp_path)
    adapt = partial(peft.get_peft_model, peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model, optimizer = taken(kind, path, adapt=adapt, path=tmp_path / "run", **OPTIONS | options)
    plain = adapt(kind.from_pretrained(path))
    first = {key: param.detach().clone() for key, param in model.named_parameters()}
    assert any(value.any() for key, value in first.items() if "lora_A" in key)
    with torch.no_grad():
        for key, param in plain.named_parameters():
            if "lora_A" in key:
                param.copy_(first[key])  # drawn anew
    assert plain.state_dict().keys() == model.state_dict().keys()
    adamw = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
    with optimizer:
        for key, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
        for _ in range(3):
            for one, step in ((model, optimizer), (plain, adamw)):
                one(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
                step.step()
                step.zero_grad()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_adapters_that_need_the_weights_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    kind, path = saved("llama", tmp_path)

    def added(model: Any) -> Any:
        model.extra = torch.nn.Linear(2, 2, device="meta")
        return model

    with pytest.raises(ConfigError, match=r"extra\.bias was added to the model without values"):
        taken(kind, path, adapt=added, path=tmp_path / "run")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="orthogonal")
    with pytest.raises(ConfigError, match="init_lora_weights='orthogonal'"):
        taken(kind, path, adapt=partial(peft.get_peft_model, peft_config=config), path=tmp_path / "run")


def quantisations() -> dict[str, Callable[[], Any]]:
    def torchao() -> Any:
        quantization = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())

    def bitsandbytes(**options: Any) -> Any:
        pytest.importorskip("bitsandbytes")
        return transformers.BitsAndBytesConfig(**options)

    return {
        "nf4 double": lambda: bitsandbytes(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "fp4": lambda: bitsandbytes(load_in_4bit=True),
        # What is computed in fp32, as where nothing else is said, is dequantised to bf16 before.
        "fp4 of bf16": lambda: bitsandbytes(load_in_4bit=True),
        "int8": lambda: bitsandbytes(load_in_8bit=True),
        "torchao int8": torchao,
    }


@pytest.mark.parametrize("is_saved", [False, True], ids=["quantised", "saved"])
@pytest.mark.parametrize("name", quantisations())
def test_a_base_is_quantised_while_it_is_loaded(
    name: str, is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the model that transformers quantises, or loads quantised, with the same adapters."""
    peft = pytest.importorskip("peft")
    config = quantisations()[name]
    kind, path = transformers.AutoModelForCausalLM, tmp_path / "saved"
    sizes, dtype = SMALL | {"hidden_size": 64, "intermediate_size": 64}, torch.float32
    if "bf16" in name:
        dtype = torch.bfloat16
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **DEFAULTS)).to(dtype).save_pretrained(path)
    given = {"quantization_config": config()}
    if is_saved:
        kind.from_pretrained(path, device_map="cpu", **given).save_pretrained(tmp_path / "quantised")
        path, given = tmp_path / "quantised", {}

    def adapt(model: Any) -> Any:
        torch.manual_seed(7)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian")
        )

    plain = adapt(kind.from_pretrained(path, device_map="cpu", **given)).train()
    given = given and {"quantization_config": config()}
    if "torchao" not in name:  # as in a process that has quantised nothing yet
        monkeypatch.setattr("bitsandbytes.functional.name2qmap", {})
    more = {"param_tier": "nvme", "compute_dtype": dtype, "tuning": Tuning(chunk="16KiB")}
    model, optimizer = taken(kind, path, adapt=adapt, path=tmp_path / "run", device="cpu", **given, **more)
    for param in plain.parameters():
        param.data = param.data.to(dtype) if param.requires_grad else param.data
    trained = [[param for param in one.parameters() if param.requires_grad] for one in (plain, model.train())]
    with optimizer:
        for step in range(3):
            ids = torch.arange(step, step + 8)[None]
            with torch.no_grad():
                for own, other in zip(*trained, strict=True):
                    own.copy_(other)
                    own.grad = None
            losses = [one(input_ids=ids, labels=ids).loss for one in (plain, model)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            for own, other in zip(*trained, strict=True):
                assert torch.equal(optimizer.grad(other), own.grad)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["nf4 double", "int8", "torchao int8"])
def test_another_run_with_other_adapters_quantises_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    from offload.integrations.transformers import Quantiser

    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 64}
    path, counts, losses, quantised = tmp_path / "saved", [], [], Quantiser.quantised
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **DEFAULTS)).save_pretrained(path)

    def counted(self: Any, key: str, values: torch.Tensor) -> Any:
        counts[-1] += not values.is_meta
        return quantised(self, key, values)

    monkeypatch.setattr(Quantiser, "quantised", counted)
    for run, targets in enumerate(("all-linear", ["q_proj"])):
        counts.append(0)
        adapt = partial(peft.get_peft_model, peft_config=peft.LoraConfig(r=2, target_modules=targets))
        more = {"quantization_config": quantisations()[name](), "adapt": adapt, "base": tmp_path / "base"}
        options = {"param_tier": "nvme", "path": tmp_path / str(run), "device": "cpu", "commit_every": None}
        model, optimizer = taken(transformers.AutoModelForCausalLM, path, **more, **options)
        with optimizer, torch.no_grad():
            losses.append(model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.item())
    assert counts == [21, 0]
    assert losses[0] == losses[1]
