"""Supervised fine-tuning with TRL: all weights of a model whose parameters and states stream from NVMe."""

from pathlib import Path
from typing import Any

import torch
import toys
import twin
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from offload import OffloadZero, Tuning

data = Dataset.from_list([{"text": text} for text in toys.SENTENCES])


def train(folder: Path) -> None:
    model = toys.llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not twin.PLAIN:
        # `accumulation` is what `gradient_accumulation_steps` says.
        options = {"tier": "nvme", "param_tier": "nvme", "accumulation": 2, "commit_every": 0}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "2MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    arguments = SFTConfig(
        output_dir=str(folder / "trainer"),
        max_steps=8,
        max_length=32,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = SFTTrainer(
        model, arguments, train_dataset=data, processing_class=toys.letters(), optimizers=(optimizer, None)
    )
    trainer.train()
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    train(folder)
