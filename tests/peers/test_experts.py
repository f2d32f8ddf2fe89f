"""Experts of transformers' models in tiles: the bits of plain torch, and of the run without tiles.

The plain model has the held one's values before each step. Some steps have so few tokens that most experts get none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import BudgetError, OffloadZero, Tuning
from tests.support.ranks import World
from tests.support.streamed import in_little_memory, state_of

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
ONE_WAY = ("Llama 4",)
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


TILE = 8192
"""Bytes: of one or two experts. No linear layer has more, so these run whole, with the bits of plain torch."""
IN_RAM: dict[str, Any] = {"tier": "cpu", "param_tier": "cpu"}
ON_NVME: dict[str, Any] = dict.fromkeys(("tier", "param_tier", "grad_tier"), "nvme")
PLACES: dict[str, dict[str, Any]] = {
    "in RAM": IN_RAM,
    "on NVMe": ON_NVME,
    "activations in RAM": {**ON_NVME, "activation_tier": "cpu"},
    "activations on NVMe": {**ON_NVME, "activation_tier": "nvme"},
    "all activations in RAM": {**IN_RAM, "activation_tier": "cpu"},
}


def held(model: nn.Module, path: Path, place: str = "in RAM", **tuned: Any) -> OffloadZero:
    """Holds a model in a place of `PLACES`, with the least RAM if it is on NVMe. Args: tuned: as Tuning has it."""
    on_nvme = PLACES[place]["tier"] == "nvme"
    chunk = "256KiB" if on_nvme else "16KiB"
    tuning = Tuning(**{"tile": TILE, "chunk": chunk, "threads": 1, "recompute": "all" not in place} | tuned)
    given: dict[str, Any] = {"compute_dtype": torch.float32, "accumulation": "auto", "tuning": tuning, **PLACES[place]}
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    if on_nvme:
        return in_little_memory(model, adamw, path=path, commit_every=0, **given)
    return OffloadZero(model, adamw, **given)


def tiled(model: nn.Module, optimizer: OffloadZero) -> list[nn.Parameter]:
    """The parameters that run in tiles."""
    parameters = optimizer._parts.parameters
    held_ones = (param for param in model.parameters() if param in parameters.index)
    return [param for param in held_ones if len(parameters.tiles_of(parameters.index[param])) > 1]


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 3]


def same_steps(
    model: nn.Module, plain: nn.Module, optimizer: OffloadZero, counts: tuple[int, ...], backwards: int
) -> None:
    """Trains on `counts` tokens a step, in `backwards` micro-batches. Plain torch has the bits from the same values."""
    for step, count in enumerate(counts):
        for micro_batch in range(backwards):
            ids = token_ids(backwards * step + micro_batch, count)
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
                if own.requires_grad:
                    own.copy_(param)


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_experts_in_tiles_have_the_bits_of_plain_torch(name: str, way: str, frozen: bool, tmp_path: Path) -> None:
    model, plain = build(name, way), build(name, way)
    for one in (model, plain) if frozen else ():
        for key, param in one.named_parameters():
            param.requires_grad_("q_" in key or "norm" in key)  # little beside the base, which streams
    with held(model, tmp_path) as optimizer:
        assert tiled(model, optimizer) == experts_of(model) != []
        same_steps(model, plain, optimizer, (9, 2, 9), 2)


@pytest.mark.parametrize(
    ("name", "way", "place", "backwards"),
    [
        ("Mixtral", "eager", "activations on NVMe", 2),
        ("Qwen3-MoE", "grouped_mm", "activations in RAM", 2),
        ("gpt-oss", "grouped_mm", "on NVMe", 2),
        ("gpt-oss", "eager", "all activations in RAM", 1),
        ("DeepSeek-V3", "grouped_mm", "activations on NVMe", 1),
        ("DeepSeek-V3", "eager", "on NVMe", 2),
        ("Llama 4", "eager", "activations in RAM", 2),
        ("OLMoE", "batched_mm", "activations on NVMe", 2),
        ("OLMoE", "eager", "on NVMe", 1),
        ("Qwen2-MoE", "grouped_mm", "all activations in RAM", 2),
        ("Qwen2-MoE", "eager", "activations in RAM", 1),
        ("Granite-MoE", "eager", "activations on NVMe", 1),
    ],
)
def test_a_run_in_tiles_has_the_bits_of_the_run_without_them(
    name: str, way: str, place: str, backwards: int, tmp_path: Path
) -> None:
    """Idle experts owe steps on NVMe, which the run without tiles makes in time."""
    found = []
    for tile in (TILE, 0):
        model, plain = build(name, way), build(name, way)
        with held(model, tmp_path / str(tile), place, tile=tile) as optimizer:
            assert tiled(model, optimizer) == (experts_of(model) if tile else [])
            same_steps(model, plain, optimizer, (9, 2, 2, 9, 2), backwards)
            found.append(state_of(model, optimizer))
    assert found[0].keys() == found[1].keys()
    for key, value in found[1].items():
        assert torch.equal(found[0][key], value), key


def adapted(model: nn.Module, **config: Any) -> nn.Module:
    """A frozen model with adapters of peft, with values that change what it computes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **config))
    return made


ATTENTION = r".*self_attn\.(q|k|v|o|q_a|q_b|kv_b)_proj"


@pytest.mark.parametrize(
    ("name", "way", "place", "backwards"),
    [
        ("Mixtral", "grouped_mm", "activations on NVMe", 2),
        ("Qwen3-MoE", "eager", "on NVMe", 2),
        ("gpt-oss", "grouped_mm", "activations in RAM", 1),
        ("DeepSeek-V3", "grouped_mm", "on NVMe", 2),
        ("Llama 4", "eager", "activations on NVMe", 1),
        ("OLMoE", "grouped_mm", "all activations in RAM", 2),
        ("Qwen2-MoE", "eager", "activations on NVMe", 2),
        ("Granite-MoE", "eager", "on NVMe", 2),
    ],
)
def test_adapters_of_attention_over_frozen_experts_have_the_bits_of_plain_torch(
    name: str, way: str, place: str, backwards: int, tmp_path: Path
) -> None:
    model, plain = (adapted(build(name, way), target_modules=ATTENTION) for _ in range(2))
    with held(model, tmp_path / "run", place) as optimizer:
        assert tiled(model, optimizer) == experts_of(model) != []
        same_steps(model, plain, optimizer, (9, 2, 9), backwards)


TARGETS = {
    "Llama 4": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "Granite-MoE": ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
}
OF_MLP = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("name", "way", "backwards"),
    [
        ("Mixtral", "grouped_mm", 2),
        ("Qwen3-MoE", "eager", 1),
        ("gpt-oss", "grouped_mm", 1),
        ("DeepSeek-V3", "eager", 2),
        ("Llama 4", "eager", 1),
        ("OLMoE", "grouped_mm", 1),
        ("Qwen2-MoE", "batched_mm", 2),
        ("Granite-MoE", "eager", 2),
    ],
)
def test_adapters_of_experts_have_the_bits_of_plain_torch_or_there_is_no_room(
    name: str, way: str, backwards: int, tmp_path: Path
) -> None:
    """peft adds to the whole parameter each time that it is used, so it does not run in tiles."""
    targets = list(TARGETS.get(name, OF_MLP))
    model, plain = (adapted(build(name, way), target_modules=[], target_parameters=targets) for _ in range(2))
    before = {key: (param, type(param), param.data_ptr()) for key, param in model.named_parameters()}
    adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    given: dict[str, Any] = {"compute_dtype": torch.float32, "accumulation": backwards, **IN_RAM}
    tuning = Tuning(tile=TILE, chunk="16KiB", threads=1)
    with pytest.raises(BudgetError) as refused:
        OffloadZero(model, adamw, device_memory=1, tuning=tuning, **given)
    layers = [sum(param.nbytes for param in one.parameters()) for one in plain.modules() if _is_layer(one)]
    root = sum(param.nbytes for param in plain.parameters()) - sum(layers)
    assert refused.value.needed >= root + max(layers)
    assert refused.value.option == "device_memory"
    with pytest.raises(BudgetError):
        OffloadZero(model, adamw, device_memory=refused.value.needed - 1, tuning=tuning, **given)
    assert {key: (param, type(param), param.data_ptr()) for key, param in model.named_parameters()} == before
    with OffloadZero(model, adamw, device_memory=refused.value.needed, tuning=tuning, **given) as optimizer:
        assert not tiled(model, optimizer)
        same_steps(model, plain, optimizer, (9, 2, 9), backwards)
        assert optimizer.stats()["peak_device_bytes"] <= refused.value.needed


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


class Expert(nn.Module):
    """An expert of a model, in 4 bits.

    Args:
        experts: the module of all experts.
        number: of this one.
    """

    def __init__(self, experts: Any, number: int) -> None:
        super().__init__()
        bnb = pytest.importorskip("bitsandbytes")
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name).detach()[number]
            if type(experts).__name__ in ("GptOssExperts", "Llama4TextExperts"):  # which have (inputs, outputs)
                weight = weight.t()
            bias = getattr(experts, f"{name}_bias", None)
            made = bnb.nn.Linear4bit(*weight.t().shape, bias is not None, torch.float32, quant_type="nf4")
            given = {"weight": weight.contiguous()} | ({} if bias is None else {"bias": bias.detach()[number].clone()})
            made.load_state_dict(given)
            self.add_module(name, made.to("cpu"))
        self._activate = getattr(experts, "_apply_gate", None) or partial(_gated, experts.act_fn)

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, width)."""
        out: Tensor = self.down_proj(self._activate(self.gate_up_proj(x)))
        return out


def _gated(activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activate(gate) * up


class Listed(nn.Module):
    """All experts of a layer, each a module: those without tokens have no gradient. Args: experts: see `Expert`."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert(experts, number) for number in range(experts.num_experts))

    def forward(self, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """x: (tokens, width). index, weights: (tokens, experts of a token); None: x has equally many rows for each."""
        if index is None or weights is None:
            return torch.cat([one(rows) for one, rows in zip(self.each, x.chunk(len(self.each)), strict=True)])
        out = torch.zeros_like(x)
        for number in index.unique().tolist():
            token, place = torch.where(index == number)
            out = out.index_add(0, token, self.each[number](x[token]) * weights[token, place, None])
        return out


def in_4_bits(name: str) -> nn.Module:
    """A model whose experts are lists in 4 bits, with adapters of its attention."""
    model = build(name, "eager")
    for path, module in [*model.named_modules()]:
        if path.endswith(".experts"):
            model.set_submodule(path, Listed(module))
    return adapted(model, target_modules=ATTENTION)


@pytest.mark.parametrize(
    ("name", "place", "has_units", "backwards"),
    [
        ("Mixtral", "on NVMe", True, 2),
        ("Qwen3-MoE", "activations on NVMe", False, 2),
        ("gpt-oss", "activations in RAM", True, 1),
        ("DeepSeek-V3", "on NVMe", False, 1),
        ("Llama 4", "all activations in RAM", True, 2),
        ("OLMoE", "activations on NVMe", True, 1),
        ("Qwen2-MoE", "in RAM", True, 2),
        ("Granite-MoE", "activations in RAM", False, 2),
    ],
)
def test_experts_in_4_bits_have_the_bits_of_the_resident_ones(
    name: str, place: str, has_units: bool, backwards: int, tmp_path: Path
) -> None:
    """Lists of bitsandbytes' layers. Args: has_units: whether an expert is a unit, which stays away without tokens."""
    model, plain = in_4_bits(name), in_4_bits(name)
    layer = next(type(one) for one in model.modules() if _is_layer(one))
    with held(model, tmp_path / "run", place, tile=None, units=(Expert, layer) if has_units else None) as optimizer:
        names = {path for path, one in model.named_modules() if isinstance(one, Expert)}
        assert (names <= optimizer._parts.parameters.units.keys()) is has_units
        same_steps(model, plain, optimizer, (9, 2, 9), backwards)


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
        ("OLMoE", "batched_mm", 3),
        ("Qwen2-MoE", "grouped_mm", 3),
        ("Granite-MoE", "eager", 1),
    ],
)
def test_experts_in_tiles_over_two_ranks_have_the_gradients_of_one_process(name: str, way: str, stage: int) -> None:
    with World(2) as world:
        world.run(_over_ranks, name, way, stage, timeout_s=150)
