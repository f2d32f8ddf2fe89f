"""Pretraining a GPT on text from scratch: `torchrun --nproc-per-node 2 docs/recipes/pretrain.py`, or without torchrun.

Each rank keeps its share of the states in a swap file of its own. In plain torch it is DistributedDataParallel.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import twin
from torch.nn.parallel import DistributedDataParallel

from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig
from offload.demo.text import load_text

STEPS, SEQUENCES, LENGTH = 8, 8, 64
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
text = torch.from_numpy(load_text(None, LENGTH).train[: 1 << 20].copy())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's sequences, and what comes after each of their bytes."""
    starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1].long() for start in starts[rank::ranks]])
    return rows[:, :-1], rows[:, 1:]


def rate(step: int) -> float:
    """Of the learning rate: two steps of warm-up, then a cosine."""
    return min((step + 1) / 2, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def train(folder: Path, *, steps: int) -> None:
    model = GPT(GPTConfig(layers=8, width=64, heads=4, context=LENGTH))
    decayed = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    trained: Any = model
    if not twin.PLAIN:
        options = {"tier": "nvme", "commit_every": 4, "resume": "auto"}
        small = Tuning(chunk="64KiB", bucket="256KiB")  # a small model needs small chunks to stream at all
        options |= {"cpu_memory": "3MiB", "compute_dtype": torch.float32, "tuning": small}
        optimizer = OffloadZero(model, optimizer, path=folder / "run", **options)
    elif ranks > 1:
        trained = DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    if not twin.PLAIN:
        optimizer.attach(scheduler=scheduler)
    losses = {}
    for step in range(twin.first_step(optimizer), steps):
        _, loss = trained(*batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    twin.leave(folder / f"rank-{rank}" if rank else folder, model, optimizer, losses)


if ranks > 1:
    dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl", after torch.accelerator.set_device_index(...)
with twin.directory() as own:
    shared = [own]
    if ranks > 1:
        dist.broadcast_object_list(shared)  # the directory of rank 0
    folder = shared[0]
    (folder / f"rank-{rank}").mkdir(exist_ok=True)
    if not twin.PLAIN:
        train(folder, steps=4)  # stopped here, and resumed
    train(folder, steps=STEPS)
    if ranks > 1:
        dist.barrier()  # rank 0 removes the directory
if ranks > 1:
    dist.destroy_process_group()
