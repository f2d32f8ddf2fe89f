"""`fuse_loss`: models of transformers that compute their loss without their logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import ConfigError, OffloadZero, Tuning
from offload.model import loss as losses
from offload.model.loss import LateLogits
from tests.peers.test_transformers import llama
from tests.support.streamed import Streams, finish

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")

MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama("Llama"),
    "qwen2 tied": llama("Qwen2", tie_word_embeddings=True),
    "gemma2": llama("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "cohere": llama("Cohere", logit_scale=0.25),
    "granite": llama("Granite", logits_scaling=4.0),
    "mixtral": llama("Mixtral", num_local_experts=4, output_router_logits=True),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "BLOCK", 24)
    monkeypatch.setattr(losses, "CHUNK", 8)


def fuse_loss(model: Any) -> Any:
    from offload.integrations.transformers import fuse_loss

    return fuse_loss(model)


def batch(count: int) -> dict[str, Tensor]:
    words = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(count))
    labels = words.clone()
    labels[0, :5] = -100
    return {"input_ids": words, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]().train()
    fused = fuse_loss(copy.deepcopy(plain))
    for more in ({}, {"num_items_in_batch": torch.tensor(31)}, {"num_items_in_batch": 17}):
        expected, found = plain(**batch(0), **more), fused(**batch(0), **more)
        assert found.logits is None
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        found.loss.backward()
        expected.loss.backward()
        for (key, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=key)
        fused.zero_grad()
        plain.zero_grad()
    words = batch(1)["input_ids"]
    assert torch.equal(fused(words).logits, plain(words).logits)  # without labels
    assert sum(one is None for one in fused(**batch(1), return_dict=False)) == 1
    # In evaluation, and where nothing is to be trained.
    with torch.no_grad():
        assert torch.equal(fused(**batch(1)).logits, plain(**batch(1)).logits)
    found, expected = fused.eval()(**batch(1)), plain.eval()(**batch(1))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    # The logits of a training step with a loss are never computed.
    monkeypatch.setattr(LateLogits, "computed", None)
    fused.train()(**batch(1)).loss.backward()


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "gemma2"])
@pytest.mark.parametrize(
    "options", [{}, {"tile": 700}, {"units": ("lm_head", "model.layers")}], ids=["", "tile", "unit"]
)
def test_held_models_have_the_bits_of_resident_ones(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any) -> None:
        for count in range(6):
            loss = model(**batch(count), num_items_in_batch=19).loss
            loss.backward()
            optimizer.losses.append(loss.item())
            if count % 2:
                finish(optimizer)

    if "tile" in options:
        options = {**options, "units": ()}
    streams = Streams(tmp_path, {"param_tier": "nvme"})
    tuning = Tuning(chunk="4KiB", prefetch_chunks=1, prefetch_units=1, threads=1, **options)

    def build() -> Any:
        return fuse_loss(MODELS[name]()).train()

    if "tile" not in options:
        streams.assert_same_bits(body, build, tuning=tuning, accumulation=2)
        return
    found, _ = streams.run(body, build, tuning=tuning, accumulation=2)  # other layers run in tiles, too
    expected, _ = streams.run(body, build, param_tier="device", accumulation=2)
    assert found == pytest.approx(expected, rel=0.01)


def test_trainer_trains_it_as_it_trains_the_model(tmp_path: Path) -> None:
    data = [{key: value[0] for key, value in batch(count).items()} for count in range(12)]

    def losses_of(change: Callable[[Any], Any], **options: Any) -> list[float]:
        torch.manual_seed(0)
        model = change(MODELS["gemma2"]())
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", seed=3,
        )  # fmt: skip
        held = OffloadZero(model, adam, compute_dtype=torch.float32, accumulation=2, **options) if options else adam
        trainer = transformers.Trainer(model, args, train_dataset=data, optimizers=(held, None))
        trainer.train()
        return [one["loss"] for one in trainer.state.log_history if "loss" in one]

    expected = losses_of(lambda model: model)
    assert losses_of(fuse_loss) == pytest.approx(expected, rel=1e-4)
    assert losses_of(fuse_loss, param_tier="cpu") == pytest.approx(expected, rel=1e-4)


def test_a_model_that_it_does_not_know_is_refused() -> None:
    held = MODELS["llama"]()
    with OffloadZero(held), pytest.raises(ConfigError, match="fuse_loss came after OffloadZero"):
        fuse_loss(held)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(hidden_size=16, num_attention_heads=2, vocab_size=64))
    with pytest.raises(ConfigError, match="the loss of BertForMaskedLM is ForMaskedLMLoss"):
        fuse_loss(bert)
    changed = MODELS["llama"]()
    changed.lm_head = nn.Sequential(changed.lm_head)
    with pytest.raises(ConfigError, match="the output layer of LlamaForCausalLM is Sequential"):
        fuse_loss(changed)
    with pytest.raises(ConfigError, match="the output layer of Linear is NoneType"):
        fuse_loss(nn.Linear(2, 2))


def test_what_reads_the_logits_of_a_training_forward_gets_them() -> None:
    torch.manual_seed(0)
    plain = MODELS["cohere"]().train()
    fused = fuse_loss(copy.deepcopy(plain))

    def own(logits: Any, labels: Tensor, **_: Any) -> Tensor:
        value: Tensor = logits.float().view(-1, 64).logsumexp(-1).mean() + torch.softmax(logits[..., :3], -1).mean()
        return value

    plain.loss_function = fused.loss_function = own
    assert torch.equal(fused(**batch(0)).loss, plain(**batch(0)).loss)
    late = LateLogits(plain.lm_head, torch.ones(2, 32))
    exact = plain.lm_head(torch.ones(2, 32))
    uses: list[Callable[[Any], Any]] = [
        lambda x: 3 * (x / 2).tanh(),
        lambda x: torch.tanh(x) * -2,
        lambda x: x.tanh().tanh(),
        lambda x: (x * 2) * torch.ones(64),
    ]
    for use in uses:
        value = use(late)
        torch.testing.assert_close(value.computed() if isinstance(value, LateLogits) else value, use(exact))
