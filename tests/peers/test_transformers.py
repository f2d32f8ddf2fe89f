"""Models of the transformers library, unmodified: the same bits with streamed parameters as with them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import Tuning
from tests.support.streamed import Streams, Watched, finish

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DEFAULTS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def llama(kind: str, **more: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(transformers, f"{kind}Config")(**(SMALL | DEFAULTS | more))
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


def gpt2(tied: bool) -> Callable[[], Any]:
    def build() -> Any:
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4, tie_word_embeddings=tied, **DEFAULTS
        )
        return transformers.GPT2LMHeadModel(config)

    return build


def t5(tied: bool) -> Callable[[], Any]:
    def build() -> Any:
        config = transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            tie_word_embeddings=tied,
            decoder_start_token_id=0,
            **DEFAULTS,
        )
        return transformers.T5ForConditionalGeneration(config)

    return build


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, "pad_token_id": 0}))


def vit() -> Any:
    sizes = {
        key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2 tied": gpt2(True),
    "gpt2": gpt2(False),
    "llama tied": llama("Llama", tie_word_embeddings=True),
    "llama": llama("Llama", tie_word_embeddings=False),
    "qwen2": llama("Qwen2"),
    "mixtral": llama("Mixtral", num_local_experts=4, output_router_logits=True),
    "t5 tied": t5(True),
    "t5": t5(False),
    "bert": bert,
    "vit": vit,
}


def loss_of(name: str, model: Any, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    tokens = torch.randint(2, 64, (2, 12), generator=generator)
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss


CHECKPOINTS = pytest.mark.parametrize("checkpoints", [None, False, True], ids=["", "saved", "reentrant"])


def five_steps(name: str, checkpoints: bool | None) -> Callable[[Any, Watched], None]:
    """Training. Args: checkpoints: whether the model's own are reentrant; None: it has none."""

    def body(model: Any, optimizer: Watched) -> None:
        model.train()
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
            if checkpoints and name != "vit":
                model.enable_input_require_grads()
        for count in range(5):
            torch.manual_seed(count)  # dropout
            loss = loss_of(name, model, count)
            loss.backward()
            optimizer.losses.append(loss.item())
            finish(optimizer)
            if model.can_generate() and count % 2:
                model.eval()
                made = model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=4, do_sample=False)
                optimizer.losses += made.flatten().tolist()
                model.train()

    return body


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@CHECKPOINTS
@pytest.mark.parametrize("param_tier", ["cpu", "nvme"])
@pytest.mark.parametrize("name", MODELS)
def test_five_steps_have_the_same_bits(name: str, param_tier: str, checkpoints: bool | None, tmp_path: Path) -> None:
    streams = Streams(tmp_path, {"param_tier": param_tier})
    streams.assert_same_bits(five_steps(name, checkpoints), MODELS[name], tuning=Tuning(chunk="16KiB", threads=1))


@CHECKPOINTS
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "all saved"])
@pytest.mark.parametrize("param_tier", ["device", "nvme"])
@pytest.mark.parametrize("name", [name for name in MODELS if "tied" not in name])
def test_activations_in_files_change_no_bit(
    name: str, param_tier: str, recompute: bool, checkpoints: bool | None, tmp_path: Path
) -> None:
    streams, body = Streams(tmp_path, {"param_tier": param_tier}), five_steps(name, checkpoints)
    written = []

    def watched(model: Any, optimizer: Watched) -> None:
        body(model, optimizer)
        written.append(optimizer.stats()["activation_written_bytes"])

    expected = streams.run(body, MODELS[name], tuning=Tuning(chunk="16KiB", threads=1))
    tuning = Tuning(chunk="16KiB", threads=1, recompute=recompute)
    options: dict[str, Any] = {"activation_tier": "nvme", "activation_memory": "16KiB"}
    losses, state = streams.run(watched, MODELS[name], tuning=tuning, **options)
    assert losses == expected[0]
    for key, tensor in expected[1].items():
        assert torch.equal(state[key], tensor), key
    assert written[0] > 0 or name == "vit"  # of whose five tokens little is large enough
