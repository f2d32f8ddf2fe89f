"""GRPO with TRL, of adapters on a base that streams from NVMe. The model itself makes completions, then an engine.

SGD is used, of which a held model has the bits: another bit in a weight might be another completion.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import toys
import twin
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer

from offload import OffloadZero

tokenizer = toys.letters()
prompts = Dataset.from_list([{"prompt": text[:9]} for text in toys.SENTENCES])


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]


class Engine:
    """Stands in for vLLM: it has weights of its own, and takes new ones before it generates.

    Args:
        weights: gives those that changed after a step, by name.
    """

    def __init__(self, weights: Callable[[int | None], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._weights = weights
        self._model = toys.llama()
        self._step: int | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            own = self._model.state_dict()
            for name, tensor in self._weights(self._step):
                own[name].copy_(tensor)
            self._step = trainer.state.global_step
        asked = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad():
            made = self._model.generate(**asked, generation_config=trainer.generation_config)
        rows = made[:, asked.input_ids.shape[1] :].tolist()
        answers = [row[: row.index(1) + 1] if 1 in row else row for row in rows]
        return {"prompt_ids": tokenizer(prompts).input_ids, "completion_ids": answers, "logprobs": None}


def with_weights_there(model: Any, optimizer: OffloadZero) -> Callable[..., Any]:
    """The model's `generate`, with as many parameters on the device as fit: else each token moves all of them."""
    generate = model.generate

    def generating(*args: Any, **options: Any) -> Any:
        with optimizer.generating():
            return generate(*args, **options)

    return generating


def train(folder: Path, *, by_engine: bool) -> None:
    folder.mkdir()
    model = get_peft_model(toys.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.SGD(adapters, lr=0.5, momentum=0.9)
    if twin.PLAIN:
        engine = Engine(lambda _: copy.deepcopy(model).merge_and_unload().state_dict().items())
    else:
        options = {"tier": "cpu", "param_tier": "nvme", "commit_every": 0, "compute_dtype": torch.float32}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
        engine = Engine(lambda since: optimizer.weights(merged=True, since=since))
        model.generate = with_weights_there(model, optimizer)
    arguments = GRPOConfig(
        output_dir=str(folder / "trainer"),
        max_steps=6,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_grad_norm=0,  # norms are summed in fp64 here, which would be other bits
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
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    train(folder / "by-itself", by_engine=False)
    train(folder / "by-engine", by_engine=True)
