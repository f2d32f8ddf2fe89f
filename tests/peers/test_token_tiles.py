"""MLPs of transformers' models in tiles of tokens: beside the model without, and with the same bits on every tier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Tuning, tile_tokens
from tests.peers.test_transformers import gpt2, llama
from tests.support.streamed import Streams, Watched, finish

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("offload.integrations.transformers")

TOKENS, TILE = 40, 7
"""Of a micro-batch: six tiles, of which the last is smaller."""
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama("Llama", mlp_bias=True),
    "qwen2 tied": llama("Qwen2", tie_word_embeddings=True),
    "qwen3": llama("Qwen3", head_dim=8),
    "gemma": llama("Gemma", head_dim=8),
    "gemma2": llama("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "mistral": llama("Mistral"),
    "phi3": llama("Phi3"),
    "gpt2": gpt2(tied=True),  # with dropout
    "mixtral": llama("Mixtral", num_local_experts=4, output_router_logits=False),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiled(model: Any, tokens: int = TILE) -> Any:
    """The model, the MLP of each of whose blocks sees a few tokens at a time."""
    found = [one for name, one in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    assert len(found) == 3
    for mlp in found:
        tile_tokens(mlp, tokens)
    return model


def loss_of(model: Any, count: int) -> Tensor:
    words = torch.randint(3, 64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(count))
    loss: Tensor = model(input_ids=words, labels=words, use_cache=False).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a step, with the loss."""
    loss = loss_of(model, 0)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }


def without_dropout(model: Any) -> Any:
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    return model


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str) -> None:
    """In fp64, where nothing but the order of sums can differ, and in fp32."""
    torch.manual_seed(0)
    plain = without_dropout(MODELS[name]().train())
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5}
    if name == "mixtral":  # whose products of groups have no fp64
        bounds.pop(torch.float64)
    for dtype, within in bounds.items():
        expected = gradients(copy.deepcopy(plain).to(dtype))
        found = gradients(tiled(copy.deepcopy(plain).to(dtype)))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=within * float(value.abs().max()), msg=key)
        assert all(value.any() for key, value in expected.items() if key.endswith("weight"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_within_the_bound_of_docs_exactness(dtype: torch.dtype) -> None:
    """Of an MLP alone: 2 u S + T v S from the exact sum of the gradients of tiles, S that of their absolute values."""
    torch.manual_seed(0)
    mlp = MODELS["llama"]().model.layers[0].mlp.to(dtype)
    inputs, of_result = (torch.randn(1, TOKENS, 32).to(dtype) for _ in range(2))
    exact: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for rows in zip(inputs.split(TILE, 1), of_result.split(TILE, 1), strict=True):
        mlp.zero_grad()
        mlp(rows[0]).backward(rows[1])
        for name, param in mlp.named_parameters():
            exact[name] = exact.get(name, 0) + param.grad.double()
            sizes[name] = sizes.get(name, 0) + param.grad.double().abs()
    mlp.zero_grad()
    tile_tokens(mlp, TILE)(inputs).backward(of_result)
    bound = 2 * torch.finfo(dtype).eps / 2 + -(-TOKENS // TILE) * 2**-24
    for name, param in mlp.named_parameters():
        assert ((param.grad.double() - exact[name]).abs() <= bound * sizes[name]).all(), name


def three_steps(model: Any, optimizer: Watched) -> None:
    model.train()
    for count in range(3):
        torch.manual_seed(count)  # dropout
        loss = loss_of(model, count)
        loss.backward()
        optimizer.losses.append(loss.item())
        finish(optimizer)


def adapted(name: str) -> Callable[[], Any]:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
        return tiled(peft.get_peft_model(MODELS[name](), config))

    return build


TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"tier": "cpu", "param_tier": "cpu"},
    "nvme": {"param_tier": "nvme"},
    "activations": {"param_tier": "nvme", "activation_tier": "nvme", "activation_memory": "64KiB"},
}
PAIRS = [*((name, "nvme") for name in MODELS), *(("llama", tier) for tier in TIERS), ("gpt2", "activations")]


@pytest.mark.parametrize(("name", "tier"), dict.fromkeys(PAIRS))
def test_three_steps_have_the_same_bits_on_every_tier(name: str, tier: str, tmp_path: Path) -> None:
    streams, tuning = Streams(tmp_path, {}), Tuning(chunk="16KiB", threads=1)
    losses, expected = streams.run(three_steps, lambda: tiled(MODELS[name]()), tier="cpu", tuning=tuning)
    found, state = streams.run(three_steps, lambda: tiled(MODELS[name]()), tuning=tuning, **TIERS[tier])
    assert found == losses
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert losses != streams.run(three_steps, MODELS[name], tier="cpu", tuning=tuning)[0] or name == "mixtral"


@pytest.mark.parametrize(("name", "tier"), [("llama", tier) for tier in TIERS] + [("gemma2", "nvme")])
def test_adapters_of_an_mlp_in_tiles_have_the_same_bits_on_every_tier(name: str, tier: str, tmp_path: Path) -> None:
    def body(model: Any, optimizer: Watched) -> None:
        three_steps(model, optimizer)

    streams, tuning = Streams(tmp_path, {}), Tuning(chunk="16KiB", threads=1)
    losses, expected = streams.run(body, adapted(name), tier="cpu", param_tier="device", tuning=tuning)
    found, state = streams.run(body, adapted(name), tuning=tuning, **TIERS[tier])
    assert found == losses
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    trained = [key for key in expected if key.endswith(".step")]
    assert any("mlp" in key and expected[key] == 3 for key in trained)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_model_go_around_them(reentrant: bool, tmp_path: Path) -> None:
    def body(model: Any, optimizer: Watched) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        three_steps(model, optimizer)

    streams, tuning = Streams(tmp_path, {}), Tuning(chunk="16KiB", threads=1)
    expected = streams.run(three_steps, lambda: tiled(MODELS["gpt2"]()), tier="cpu", tuning=tuning)
    for options in (TIERS["nvme"], TIERS["activations"]):
        losses, state = streams.run(body, lambda: tiled(MODELS["gpt2"]()), tuning=tuning, **options)
        assert losses == expected[0]
        assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def test_a_model_with_both_trains_with_neither_logits_nor_whole_mlps(tmp_path: Path) -> None:
    seen: list[int] = []

    def build() -> Any:
        model = integration.fuse_loss(tiled(MODELS["qwen2 tied"]())).train()
        model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _, __, made: seen.append(made.shape[-2]))
        return model

    Streams(tmp_path, {"param_tier": "nvme"}).assert_same_bits(three_steps, build)
    assert set(seen) == {TILE, TOKENS % TILE}
