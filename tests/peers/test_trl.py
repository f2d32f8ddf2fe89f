"""TRL's trainers with their defaults, their losses in chunks included: the bits of the same trainer and torch's SGD.

Torch's own class steps pieces of the masters, so nothing differs from plain torch, not even in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadZero, Tuning
from tests.peers.test_transformers import llama

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

STEPS = 3
TEXT = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text().split("\n\n")[:200]
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"tier": "cpu"},
    "streamed from cpu": {"tier": "cpu", "param_tier": "cpu"},
    "streamed from nvme": {"tier": "nvme", "param_tier": "nvme", "grad_tier": "nvme", "tuning": Tuning(chunk="256KiB")},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of words that begin and end in spaces, learned from a page of ours."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=320, special_tokens=["<pad>", "<end>"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def arguments(kind: str, path: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # norms are summed in fp64 here
        "seed": 3,
    }
    return getattr(trl, f"{kind}Config")(**(given | options))


def sft(model: Any, tokenizer: Any, optimizer: Any, path: Path) -> Any:
    rows = [{"text": text} for text in TEXT[:16]]
    return trl.SFTTrainer(
        model, arguments("SFT", path, max_length=24), train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, optimizers=(optimizer, None),
    )  # fmt: skip


def dpo(model: Any, tokenizer: Any, optimizer: Any, path: Path) -> Any:
    rows = [
        {"prompt": text[:40], "chosen": text[40:80], "rejected": other[40:90]}
        for text, other in zip(TEXT[:16], TEXT[16:32], strict=True)
    ]
    torch.manual_seed(8)
    reference = None if isinstance(model, peft.PeftModel) else build(adapts=False)
    return trl.DPOTrainer(
        model, reference, arguments("DPO", path, max_length=32), train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, optimizers=(optimizer, None),
    )  # fmt: skip


def with_many_vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(one.count(letter) for letter in "aeiou") / 4 for one in completions]


def grpo(model: Any, tokenizer: Any, optimizer: Any, path: Path) -> Any:
    beta = 0.1 if isinstance(model, peft.PeftModel) else 0.0
    args = arguments("GRPO", path, num_generations=2, max_completion_length=6, beta=beta)
    rows = [{"prompt": text[:30]} for text in TEXT[:8]]
    return trl.GRPOTrainer(
        model, with_many_vowels, args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, optimizers=(optimizer, None),
    )  # fmt: skip


TRAINERS: dict[str, Callable[..., Any]] = {"SFT": sft, "DPO": dpo, "GRPO": grpo}


def build(*, adapts: bool) -> Any:
    model = llama("Llama", vocab_size=320, eos_token_id=1)()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if adapts else model


def trained(kind: str, tokenizer: Any, path: Path, adapts: bool, **options: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """What was logged, and the state dict at the end. Args: options: of OffloadZero; none: plain torch."""
    torch.manual_seed(0)
    model = build(adapts=adapts)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if options:
        optimizer = OffloadZero(
            model, optimizer, compute_dtype=torch.float32, accumulation=2, path=path / "run", commit_every=0, **options
        )
    trainer = TRAINERS[kind](model, tokenizer, optimizer, path / "trainer")
    trainer.train()
    known = ("loss", "reward", "rewards/margins", "mean_token_accuracy", "completions/mean_length")
    logged = [{name: entry[name] for name in known if name in entry} for entry in trainer.state.log_history]
    assert len([entry for entry in logged if "loss" in entry]) == STEPS
    if options:
        assert optimizer.stats()["step"] == STEPS
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if options:
        optimizer.close()
    return logged, state


PLAIN: dict[tuple[str, bool], Any] = {}


CASES = [
    *((kind, adapts, "streamed from nvme") for kind in TRAINERS for adapts in (False, True)),
    *((kind, False, place) for kind in TRAINERS for place in ("resident", "streamed from cpu")),
]


@pytest.mark.parametrize(("kind", "adapts", "place"), CASES)
def test_trainers_have_the_bits_of_plain_torch(
    kind: str, adapts: bool, place: str, tokenizer: Any, tmp_path: Path
) -> None:
    if (kind, adapts) not in PLAIN:
        PLAIN[kind, adapts] = trained(kind, tokenizer, tmp_path / "plain", adapts)
    logged, state = PLAIN[kind, adapts]
    found, values = trained(kind, tokenizer, tmp_path, adapts, **PLACES[place])
    assert found == logged
    assert len({entry["loss"] for entry in found if "loss" in entry}) > 1
    assert values.keys() == state.keys()
    assert [name for name, value in state.items() if not torch.equal(values[name], value)] == []
