"""Muon for the matrices of the blocks, AdamW for the rest: two optimizers of torch, held as one.

Early in training Muon makes large what rounding has made, so another bit soon is another matrix. To be compared, AdamW
has `amsgrad`, which runs torch's own class, and nothing is clipped, since norms are summed in fp64 here.
"""

from pathlib import Path
from typing import Any

import torch
import twin

from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig
from offload.demo.text import load_text

STEPS, LENGTH = 8, 64
text = torch.from_numpy(load_text(None, LENGTH).train[: 1 << 20].copy())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight sequences of bytes, and what comes after each byte."""
    starts = torch.randint(len(text) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1].long() for start in starts])
    return rows[:, :-1], rows[:, 1:]


def train(folder: Path, *, steps: int) -> None:
    model = GPT(GPTConfig(layers=4, width=64, heads=4, context=LENGTH))
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    known = set(matrices)
    rest = [param for param in model.parameters() if param not in known]
    optimizers: list[Any] = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3, amsgrad=True)]
    if not twin.PLAIN:
        options = {"tier": "nvme", "param_tier": "nvme", "commit_every": 4, "resume": "auto"}
        small = Tuning(chunk="64KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "3MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizers = [OffloadZero(model, optimizers, path=folder / "run", **options)]
    losses = {}
    for step in range(twin.first_step(optimizers[0]), steps):
        _, loss = model(*batch(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder, model, optimizers[0], losses)


with twin.directory() as folder:
    if not twin.PLAIN:
        train(folder, steps=4)  # stopped here, and resumed
    train(folder, steps=STEPS)
