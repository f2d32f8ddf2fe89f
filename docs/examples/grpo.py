"""GRPO with TRL, of adapters on a base that streams from NVMe. Completions come from the model itself, or an engine.

The same training runs in plain torch beside it, and gives the same rewards and losses: of torch's SGD a held model has
the bits, of AdamW they are those within rounding.
"""

import copy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from offload import OffloadZero

STEPS = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz "
letters = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, **{letter: n + 2 for n, letter in enumerate(LETTERS)}}))
letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", padding_side="left")
prompts = Dataset.from_list(
    [{"prompt": text} for text in ("a cat", "the sea", "rain", "some tea", "as far as", "a day")]
)


def base() -> Any:
    """What would be downloaded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1))


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]


class Engine:
    """Stands in for vLLM: it has weights of its own, and takes new ones before it generates.

    Args:
        weights: gives those that changed after a step, by name.
    """

    def __init__(self, weights: Callable[[int | None], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._weights = weights
        self._model = base()
        self._step: int | None = None
        self.taken = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            own = self._model.state_dict()
            for name, tensor in self._weights(self._step):
                own[name].copy_(tensor)
                self.taken += 1
            self._step = trainer.state.global_step
        asked = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad():
            made = self._model.generate(**asked, generation_config=trainer.generation_config)[
                :, asked.input_ids.shape[1] :
            ]
        answers = [row[: row.index(1) + 1] if 1 in row else row for row in made.tolist()]
        return {"prompt_ids": tokenizer(prompts).input_ids, "completion_ids": answers, "logprobs": None}


def train(folder: Path, *, held: bool, by_engine: bool) -> list[tuple[float, float]]:
    """Trains, and returns the reward and the loss of each step."""
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.SGD(adapters, lr=0.5, momentum=0.9)
    if held:
        options = {"tier": "cpu", "param_tier": "nvme", "compute_dtype": torch.float32}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)

    if by_engine and held:
        engine = Engine(lambda since: optimizer.weights(merged=True, since=since))
    elif by_engine:
        engine = Engine(lambda _: copy.deepcopy(model).merge_and_unload().state_dict().items())
    elif held:
        generate = model.generate

        def with_all_weights(*args: Any, **options: Any) -> Any:
            with optimizer.gathered(model):  # else each token moves all of them
                return generate(*args, **options)

        model.generate = with_all_weights

    arguments = GRPOConfig(
        output_dir=folder / "trainer",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_grad_norm=0,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model, vowels, args=arguments, train_dataset=prompts, processing_class=tokenizer,
        optimizers=(optimizer, None), rollout_func=engine if by_engine else None,
    )  # fmt: skip
    trainer.train()
    if held:
        optimizer.close()
    if by_engine:
        print(f"the engine took {engine.taken} tensors")
    return [(one["reward"], one["loss"]) for one in trainer.state.log_history if "loss" in one]


for by_engine in (False, True):
    print("completions from the engine" if by_engine else "completions from the model")
    with tempfile.TemporaryDirectory() as scratch:
        plain = train(Path(scratch), held=False, by_engine=by_engine)
        held = train(Path(scratch), held=True, by_engine=by_engine)
    for step, (reward, loss) in enumerate(held, 1):
        print(f"step {step:2d}  reward {reward:.3f}  loss {loss:+.5f}")
    print("the same as in plain torch" if held == plain else f"plain torch has {plain}")
