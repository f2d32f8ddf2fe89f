"""Adapters of peft on a base that streams from NVMe: of the model, only the adapters and a block are on the device."""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from offload import OffloadZero

rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))


def train(folder: Path, *, steps: int, resume: bool) -> None:
    torch.manual_seed(0)  # the base is the same in every run, as one that was downloaded is
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True))
    adapters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adamw = torch.optim.AdamW(adapters.values(), lr=1e-2)
    options = {"tier": "cpu", "param_tier": "nvme", "commit_every": 4, "resume": resume}
    with OffloadZero(model, adamw, path=folder / "run", **options) as optimizer:
        first = 0 if optimizer.resumed is None else optimizer.resumed.step
        for step in range(first, steps):
            batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1:2d}  loss {loss.item():.3f}")
        torch.save({name: param.detach().cpu() for name, param in adapters.items()}, folder / "adapters.pt")


with tempfile.TemporaryDirectory() as scratch:
    train(Path(scratch), steps=4, resume=False)
    print("resumed")
    train(Path(scratch), steps=8, resume=True)
