"""Merged weights of a held model: the names and bits of what peft makes of a plain copy of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import ConfigError, OffloadZero, Tuning
from tests.peers.test_transformers import gpt2, llama

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TUNING = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1)
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme"},
    "tiles": {"tier": "cpu", "param_tier": "cpu", "tuning": Tuning(chunk="4KiB", tile="2KiB")},
}
QV = ["q_proj", "v_proj"]


def lora(model: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: peft.get_peft_model(model(), peft.LoraConfig(**({"r": 2, "target_modules": QV} | options)))


MODELS: dict[str, Callable[[], Any]] = {
    "lora": lora(llama("Llama")),
    "dora": lora(llama("Llama"), use_dora=True),
    "all layers, with biases": lora(llama("Qwen2"), target_modules="all-linear", bias="lora_only"),
    "module saved": lora(llama("Llama"), modules_to_save=["lm_head"]),
    "tied": lora(llama("Qwen2", tie_word_embeddings=True), target_modules=[*QV, "lm_head"]),
    "tied, embedding": lora(llama("Qwen2", tie_word_embeddings=True), target_modules=[*QV, "embed_tokens"]),
    "Conv1D": lora(gpt2(tied=True), target_modules=["c_attn"], fan_in_fan_out=True),
    "experts": lora(
        llama("Mixtral", num_local_experts=4), target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "tokens": lora(llama("Llama"), trainable_token_indices=[3, 5]),
    "ia3": lambda: peft.get_peft_model(
        llama("Llama")(), peft.IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"])
    ),
}


def loss_of(model: Any, count: int) -> Tensor:
    words = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(count))
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def held(model: Any, place: str, path: Path, **options: Any) -> OffloadZero:
    trained = [param for param in model.parameters() if param.requires_grad]
    given = {"tuning": TUNING, "path": path, **PLACES[place]}
    return OffloadZero(model, torch.optim.AdamW(trained, lr=1e-1), **given | options)


def step(model: Any, optimizer: OffloadZero, count: int) -> None:
    loss_of(model, count).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_merged(model: Any, optimizer: OffloadZero, **since: int) -> dict[str, Tensor]:
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    before = copy.deepcopy(model).state_dict()
    found = dict(optimizer.weights(merged=True, **since))
    assert since or found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype is expected[name].dtype
        assert torch.equal(value, expected[name]), name
    # The model is what it was.
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return found


CASES = [
    *((name, "streamed from nvme") for name in MODELS),
    *(("tied", place) for place in PLACES),
    ("lora", "resident"),
]


@pytest.mark.parametrize(("name", "place"), dict.fromkeys(CASES))
def test_they_are_what_peft_makes_of_a_copy(name: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    untrained = copy.deepcopy(model).merge_and_unload().state_dict()
    dtype = torch.bfloat16 if name in ("lora", "tied") else torch.float32
    with held(model, place, tmp_path, compute_dtype=dtype) as optimizer:
        for count in range(2):
            step(model, optimizer, count)
        found = assert_merged(model, optimizer)
        assert not all(torch.equal(value, untrained[key].to(dtype)) for key, value in found.items())


@pytest.mark.parametrize("place", ["resident", "streamed from nvme"])
def test_since_a_step_there_are_only_the_layers_that_changed(place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["lora"]()
    with held(model, place, tmp_path) as optimizer:
        step(model, optimizer, 0)
        assert {name.split(".")[-2] for name in assert_merged(model, optimizer, since=0)} == set(QV)
        assert assert_merged(model, optimizer, since=1) == {}
        with torch.no_grad():
            model.get_base_model().model.layers[1].mlp.up_proj.weight.add_(1)
            model.get_base_model().model.layers[2].self_attn.q_proj.base_layer.weight.add_(1)
        changed = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"]
        assert sorted(assert_merged(model, optimizer, since=1)) == changed


@pytest.mark.parametrize("place", ["streamed from cpu", "streamed from nvme"])
def test_a_merge_takes_the_copy_of_one_layer(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each copy that is merged all memory is gone before the next one is made."""
    torch.manual_seed(0)
    model = MODELS["all layers, with biases"]()
    made: list[weakref.ref[Any]] = []
    linear = peft.tuners.lora.layer.Linear
    merge = linear.merge

    def noted(layer: Any, *args: Any, **options: Any) -> None:
        assert not any(ref() is not None for ref in made)
        made.extend(weakref.ref(param) for param in layer.parameters())
        merge(layer, *args, **options)

    with held(model, place, tmp_path) as optimizer:
        step(model, optimizer, 0)
        optimizer.synchronize()
        planned = optimizer.stats()["peak_device_bytes"]
        monkeypatch.setattr(linear, "merge", noted)
        for _, tensor in optimizer.weights(merged=True):
            made.append(weakref.ref(tensor))
            del tensor
        assert made
        assert optimizer.stats()["peak_device_bytes"] == planned


def quantised(kind: str, path: Path) -> Any:
    """A model with adapters on a base that transformers has quantised."""
    torch.manual_seed(0)
    llama("Llama", hidden_size=64, intermediate_size=64)().save_pretrained(path)
    if kind == "torchao":
        pytest.importorskip("torchao")
        from torchao.quantization import Int8WeightOnlyConfig

        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes")
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "double"}
        config = transformers.BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else nf4))
    base = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, device_map="cpu")
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=QV)).train()


@pytest.mark.parametrize("param_tier", ["device", "nvme"])
@pytest.mark.parametrize("kind", ["nf4", "double", "int8", "torchao"])
def test_those_of_a_quantised_base_are_what_peft_makes_of_a_copy(kind: str, param_tier: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path / "base")
    with held(model, "resident", tmp_path, param_tier=param_tier, compute_dtype=torch.float32) as optimizer:
        step(model, optimizer, 0)
        found = {name: parts_of(value) for name, value in optimizer.weights(merged=True)}
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        assert found.keys() == {name for name, value in expected.items() if isinstance(value, Tensor)}
        for name, parts in found.items():
            for one, other in zip(parts, parts_of(expected[name]), strict=True):
                assert torch.equal(one, other), name


def parts_of(value: Any) -> list[Tensor]:
    names = getattr(value, "__tensor_flatten__", lambda: ([], None))()[0]
    return [part for name in names for part in parts_of(getattr(value, name))] if names else [value]


def test_what_peft_refuses_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["lora"]()

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such merge")

    with OffloadZero(model, param_tier="cpu") as optimizer:
        monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", fails)
        names = []
        with pytest.raises(
            ConfigError, match=r"cannot merge model.layers.0.self_attn.q_proj \(Linear\): no such merge"
        ):
            names.extend(name for name, _ in optimizer.weights(merged=True))
        model.get_base_model().quantization_method = "gptq"
        with pytest.raises(ConfigError, match="Cannot merge LORA layers when the model is gptq quantized"):
            optimizer.weights(merged=True)
    prompts = peft.get_peft_model(
        llama("Llama")(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with OffloadZero(prompts) as optimizer, pytest.raises(ConfigError, match="is a PeftModelForCausalLM without any"):
        optimizer.weights(merged=True)
