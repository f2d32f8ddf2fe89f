"""Experts of transformers' models in tiles: losses and gradients of plain torch, bit for bit.

The plain model has the held one's values before each step. Some steps have so few tokens that most experts get none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadZero, Tuning

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
_SMALL = {"intermediate_size": 48, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
_GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"intermediate_size": 48, "num_local_experts": 6}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_SMALL, "num_experts": 8, "head_dim": 8}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"intermediate_size": 32, "num_local_experts": 6, "head_dim": 8},
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_SMALL, **_LATENT, **_GROUPS, "num_key_value_heads": 4},
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "intermediate_size": 32,
            "intermediate_size_mlp": 48,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "head_dim": 8,
        },
    ),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", {"intermediate_size": 16, "num_experts": 8}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_SMALL, "shared_expert_intermediate_size": 32, "num_experts": 8},
    ),
    "Granite-MoE": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {"intermediate_size": 32, "num_local_experts": 6}),
}
WAYS = ("eager", "batched_mm", "grouped_mm")
ONE_WAY = ("Llama 4", "Granite-MoE")
CASES = [(name, way) for name in MODELS for way in (WAYS if name not in ONE_WAY else WAYS[:1])]


def build(name: str, way: str) -> nn.Module:
    model, config, sizes = MODELS[name]
    given = getattr(transformers, config)(**COMMON | sizes)
    if name not in ONE_WAY:
        given._experts_implementation = way
    torch.manual_seed(1)
    made: nn.Module = getattr(transformers, model)(given)
    return made


def token_ids(step: int, count: int) -> Tensor:
    return torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(step))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """With more, torch itself sums the gradients of `w[ids]` in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_experts_in_tiles_have_the_bits_of_plain_torch(name: str, way: str, frozen: bool) -> None:
    model, plain = build(name, way), build(name, way)
    experts = [param for param in model.parameters() if param.dim() == 3]
    assert experts
    for one in (model, plain) if frozen else ():
        for key, param in one.named_parameters():
            param.requires_grad_("q_" in key or "norm" in key)  # little beside the base, which streams
    options: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu", "compute_dtype": torch.float32, "accumulation": 2}
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with OffloadZero(model, adamw, tuning=Tuning(tile=8192, chunk="16KiB", threads=1), **options) as optimizer:
        parameters = optimizer._parts.parameters
        assert all(len(parameters.tiles_of(parameters.index[param])) > 1 for param in experts)
        for step, count in enumerate((9, 2, 9)):
            for micro_batch in range(2):
                ids = token_ids(2 * step + micro_batch, count)
                loss, expected = (one(input_ids=ids, labels=ids).loss for one in (model, plain))
                assert loss.item() == expected.item()
                loss.backward()
                expected.backward()
            for param, own in zip(model.parameters(), plain.parameters(), strict=True):
                grad = optimizer.grad(param) if own.requires_grad else None
                assert (grad is None) == (own.grad is None)
                assert grad is None or torch.equal(grad.reshape(own.shape), own.grad)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            with torch.no_grad():
                for param, own in zip(model.parameters(), plain.parameters(), strict=True):
                    own.copy_(param)
