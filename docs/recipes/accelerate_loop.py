"""A loop with Accelerate: accumulation, clipping, a scheduler, and a state that is saved and loaded."""

from pathlib import Path
from typing import Any

import torch
import twin
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offload import OffloadZero, Tuning


def train(folder: Path, *, epochs: range) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(16, 128), *(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 4))
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    made: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if not twin.PLAIN:
        options = {"tier": "nvme", "accumulation": 2, "resume": "auto", "compute_dtype": torch.float32}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        made = OffloadZero(net, made, path=folder / "run", cpu_memory="1MiB", tuning=small, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 4, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(net, made, loader, scheduler)
    if epochs.start:
        accelerator.load_state(folder / "state")
    losses = {}
    for epoch in epochs:
        for number, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[epoch * 4 + number // 2 + 1] = loss.item()  # four steps an epoch
    accelerator.save_state(folder / "state")
    twin.leave(folder, net, made, losses)


with twin.directory() as folder:
    if twin.PLAIN:
        train(folder, epochs=range(4))
    else:
        train(folder, epochs=range(2))  # stopped here, and resumed
        train(folder, epochs=range(2, 4))
