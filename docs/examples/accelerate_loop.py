"""A loop with Accelerate: accumulation, clipping, and a state that is saved and loaded."""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offload import OffloadZero


def train(folder: Path, *, epochs: int, resume: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))), batch_size=8, shuffle=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OffloadZero(model, adamw, path=folder / "run", accumulation=2, resume="auto") as held:
        scheduler = torch.optim.lr_scheduler.StepLR(held, 4, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(model, held, loader, scheduler)
        if resume:
            accelerator.load_state(folder / "state")
        for epoch in range(epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs).float(), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            print(f"epoch {epoch}  step {held.stats()['step']:2d}  loss {loss.item():.3f}")
        accelerator.save_state(folder / "state")


with tempfile.TemporaryDirectory() as scratch:
    train(Path(scratch), epochs=2, resume=False)
    print("resumed")
    train(Path(scratch), epochs=2, resume=True)
