"""Trainer of transformers, stopped and resumed: its checkpoints name commits of the optimizer."""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from offload import OffloadZero

rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, *, steps: int, resume: bool) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    arguments = TrainingArguments(
        output_dir=folder / "trainer",
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
    )
    # `accumulation` is what `gradient_accumulation_steps` says.
    with OffloadZero(model, adamw, path=folder / "run", accumulation=2, resume="auto") as optimizer:
        trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']:2d}  loss {entry['loss']:.3f}  gradient norm {entry['grad_norm']:.3f}")


with tempfile.TemporaryDirectory() as scratch:
    train(Path(scratch), steps=4, resume=False)
    print("resumed")
    train(Path(scratch), steps=8, resume=True)
