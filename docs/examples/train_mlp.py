"""The smallest complete use: an ordinary loop, with the optimizer's states in swap files."""

import tempfile

import torch
from torch import nn

from offload import OffloadZero, Tuning

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
inputs, targets = torch.randn(512, 64), torch.randint(10, (512,))

small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all

with tempfile.TemporaryDirectory() as scratch:
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with OffloadZero(model, adamw, tier="nvme", path=scratch, cpu_memory="900KiB", tuning=small) as optimizer:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        for step in range(60):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == 59:
                print(f"step {step:2d}  loss {loss.item():.3f}  gradient norm {norm.item():.3f}")
        print({key: value for key, value in optimizer.stats().items() if key.startswith("nvme")})
