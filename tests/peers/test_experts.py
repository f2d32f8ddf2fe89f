"""Experts of transformers' models in tiles: losses and gradients of plain torch, bit for bit.

The plain model has the held one's values before each step. Some steps have so few tokens that most experts get none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from tests.support.ranks import World

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


def _adapted(name: str, targets: tuple[str, ...]) -> nn.Module:
    """With adapters of the experts, which peft adds to the whole parameter each time that it is used."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=list(targets), init_lora_weights=False)
    made: nn.Module = peft.get_peft_model(build(name, "grouped_mm"), config)
    return made


TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_adapters_of_the_experts_themselves_train_as_in_plain_torch(name: str) -> None:
    """peft uses the whole parameter, so it comes whole, and the results are those without tiles."""
    model, plain = _adapted(name, TARGETS), _adapted(name, TARGETS)
    options: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu", "compute_dtype": torch.float32}
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with OffloadZero(model, adamw, tuning=Tuning(tile=4096, chunk="16KiB", threads=1), **options) as optimizer:
        parameters = optimizer._parts.parameters
        tiled = [param for param in model.parameters() if len(parameters.tiles_of(parameters.index[param])) > 1]
        assert sum(param.dim() == 3 for param in tiled) == 4
        for step, count in enumerate((9, 2, 9)):
            ids = token_ids(step, count)
            loss, expected = (one(input_ids=ids, labels=ids).loss for one in (model, plain))
            torch.testing.assert_close(loss, expected)  # the head runs in tiles: within rounding
            loss.backward()
            expected.backward()
            for param, own in zip(model.parameters(), plain.parameters(), strict=True):
                if own.requires_grad:
                    grad = optimizer.grad(param)
                    assert (grad is None) == (own.grad is None)
                    if grad is not None:
                        torch.testing.assert_close(grad.reshape(own.shape), own.grad, rtol=1e-4, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            with torch.no_grad():
                for param, own in zip(model.parameters(), plain.parameters(), strict=True):
                    own.copy_(param)


def _over_ranks(name: str, way: str, stage: int) -> None:
    """Trains on a rank. Its second step has so few tokens that the ranks need different experts."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, plain = build(name, way), build(name, way)
    options: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu", "compute_dtype": torch.float32, "stage": stage}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tuning = Tuning(tile=8192, chunk="16KiB", threads=1)
    with OffloadZero(model, adamw, tuning=tuning, **options) as optimizer:
        parameters = optimizer._parts.parameters
        assert all(len(parameters.tiles_of(parameters.index[p])) > 1 for p in model.parameters() if p.dim() == 3)
        for step, count in enumerate((9, 1, 9)):
            ids = [token_ids(ranks * step + one, count + 1) for one in range(ranks)]
            model(input_ids=ids[rank], labels=ids[rank]).loss.backward()
            sums: list[Any] = [None for _ in plain.parameters()]
            for one in ids:
                plain.zero_grad()
                plain(input_ids=one, labels=one).loss.backward()
                for number, param in enumerate(plain.parameters()):
                    if param.grad is not None:
                        sums[number] = param.grad.clone() if sums[number] is None else sums[number] + param.grad
            for param, total in zip(model.parameters(), sums, strict=True):
                grad = optimizer.grad(param)
                assert (grad is None) == (total is None)
                assert grad is None or torch.equal(grad.reshape(param.shape), total / ranks)
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered(model), torch.no_grad():
                for param, own in zip(model.parameters(), plain.parameters(), strict=True):
                    own.copy_(param)


@pytest.mark.parametrize(
    ("name", "way", "stage"),
    [
        ("Mixtral", "eager", 2),
        ("Qwen3-MoE", "grouped_mm", 2),
        ("DeepSeek-V3", "grouped_mm", 3),
        ("Llama 4", "eager", 3),
    ],
)
def test_experts_in_tiles_over_two_ranks_have_the_gradients_of_one_process(name: str, way: str, stage: int) -> None:
    with World(2) as world:
        world.run(_over_ranks, name, way, stage, timeout_s=150)
