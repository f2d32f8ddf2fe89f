"""Adapters of peft on a base that streams from NVMe: of the model, only the adapters and a block are on the device."""

from pathlib import Path

import torch
import twin
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from offload import OffloadZero

rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))


def train(folder: Path, *, steps: int) -> None:
    torch.manual_seed(0)  # the base is the same in every run, as one that was downloaded is
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    if not twin.PLAIN:
        options = {"tier": "cpu", "param_tier": "nvme", "commit_every": 4, "resume": "auto"}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", compute_dtype=torch.float32, **options)
        optimizer.attach(rng=True)  # of dropout
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
    if not twin.PLAIN:
        train(folder, steps=4)  # stopped here, and resumed
    train(folder, steps=8)
