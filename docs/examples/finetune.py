"""Full fine-tuning of a directory of transformers: weights go straight to NVMe, and end in such a directory again."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from offload.integrations.transformers import from_pretrained

rows = (torch.arange(32)[:, None] + 3 * torch.arange(16)) % 64


def pretrained(folder: Path) -> Path:
    """Stands for a model that was downloaded."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "pretrained", max_shard_size="100KB")
    return folder / "pretrained"


def train(folder: Path, source: Path, *, steps: int, resume: bool) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    options = {"tier": "nvme", "param_tier": "nvme", "commit_every": 4, "resume": resume}
    model, optimizer = from_pretrained(AutoModelForCausalLM, source, adamw, path=folder / "run", **options)
    model.train()  # as from_pretrained of transformers, it comes in evaluation mode
    with optimizer:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
        optimizer.attach(scheduler=scheduler, rng=True)
        first = 0 if optimizer.resumed is None else optimizer.resumed.step
        for step in range(first, steps):
            batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {step + 1:2d}  loss {loss.item():.3f}")
        if resume:
            optimizer.export(folder / "trained")
            model.config.save_pretrained(folder / "trained")


with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch)
    source = pretrained(folder)
    train(folder, source, steps=4, resume=False)
    print("resumed")
    train(folder, source, steps=8, resume=True)
    AutoModelForCausalLM.from_pretrained(folder / "trained")  # as any other
