"""Adapters of peft on a base in 4 bits that streams from NVMe (QLoRA)."""

from pathlib import Path

import torch
import toys
import twin
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from offload import OffloadZero

rows = torch.randint(0, 32, (32, 16), generator=torch.Generator().manual_seed(0))


def train(base: Path, folder: Path, *, steps: int) -> None:
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map="cpu", dtype=torch.float32)
    torch.manual_seed(0)  # of the adapters
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    model.train()  # from_pretrained evaluates, in which bitsandbytes packs its codes anew on some CPUs
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    if not twin.PLAIN:
        options = {"tier": "cpu", "param_tier": "nvme", "commit_every": 4, "resume": "auto"}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", compute_dtype=torch.float32, **options)
    losses = {}
    for step in range(twin.first_step(optimizer), steps):
        batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizer, losses)


with twin.directory() as folder:
    toys.llama().bfloat16().save_pretrained(folder / "base")  # what would be downloaded: a model in 16 bits
    if not twin.PLAIN:
        train(folder / "base", folder, steps=4)  # stopped here, and resumed
    train(folder / "base", folder, steps=8)
