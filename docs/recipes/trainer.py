"""Full fine-tuning with Trainer of transformers, stopped and resumed: its checkpoints name commits of the optimizer."""

from pathlib import Path
from typing import Any

import torch
import toys
import twin
from transformers import Trainer, TrainingArguments

from offload import OffloadZero, Tuning

rows = torch.randint(2, 32, (32, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, *, steps: int, resume: bool) -> None:
    model = toys.llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not twin.PLAIN:
        # `accumulation` is what `gradient_accumulation_steps` says.
        options = {"tier": "nvme", "param_tier": "nvme", "accumulation": 2, "resume": "auto"}
        options["activation_tier"] = "cpu"  # what enters a block waits in RAM
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "2MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    arguments = TrainingArguments(
        output_dir=folder / "trainer",
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    if not twin.PLAIN:
        train(folder, steps=4, resume=False)  # stopped here, and resumed
    train(folder, steps=8, resume=not twin.PLAIN)
