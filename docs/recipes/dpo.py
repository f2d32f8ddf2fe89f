"""DPO with TRL, of adapters on a base that streams from NVMe: without its adapters the base is the reference model."""

from pathlib import Path
from typing import Any

import torch
import toys
import twin
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer

from offload import OffloadZero

data = Dataset.from_list(
    [
        {"prompt": chosen[:8], "chosen": chosen[8:], "rejected": rejected[8:]}
        for chosen, rejected in zip(toys.SENTENCES, reversed(toys.SENTENCES), strict=True)
    ]
)


def train(folder: Path) -> None:
    model = get_peft_model(toys.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(adapters, lr=1e-2)
    if not twin.PLAIN:
        options = {"tier": "cpu", "param_tier": "nvme", "accumulation": 2, "commit_every": 0}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", compute_dtype=torch.float32, **options)
    arguments = DPOConfig(
        output_dir=str(folder / "trainer"),
        max_steps=8,
        max_length=48,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = DPOTrainer(
        model, None, arguments, train_dataset=data, processing_class=toys.letters(), optimizers=(optimizer, None)
    )
    trainer.train()
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    train(folder)
