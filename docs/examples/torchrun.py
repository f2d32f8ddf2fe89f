"""Data-parallel training: `torchrun --nproc-per-node 2 docs/examples/torchrun.py`. Without torchrun it is one rank.

A rank keeps its share of the states in a swap file of its own. The run is committed, stopped and resumed.

With a directory that all machines share it is elastic: it goes on from the last commit with those that are there.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 9 --rdzv-id run --rdzv-backend c10d \
        --rdzv-endpoint HOST:29400 docs/examples/torchrun.py /shared
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from offload import OffloadZero

has_ranks = "WORLD_SIZE" in os.environ
if has_ranks:
    # With GPUs "cpu:gloo,cuda:nccl", after torch.accelerator.set_device_index(...). A machine that loses power tells
    # nobody: the others wait for it so long.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
rank = dist.get_rank() if has_ranks else 0
ranks = dist.get_world_size() if has_ranks else 1

inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
targets = inputs[:, :10].argmax(dim=1)


def train(path: str, *, steps: int) -> None:
    """Trains up to step `steps`, from the last commit in `path`. Each rank has its own part of a batch."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with OffloadZero(model, adamw, path=path, commit_every=4, resume="auto") as optimizer:
        first = optimizer.resumed.step if optimizer.resumed else 0
        for step in range(first, steps):
            batch = torch.arange(64 * step, 64 * step + 64)[rank::ranks] % len(inputs)
            loss = nn.functional.cross_entropy(model(inputs[batch]).float(), targets[batch])
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step + 1:2d}  loss {loss.item():.3f}  ranks {ranks}", flush=True)


if len(sys.argv) > 1:
    train(f"{sys.argv[1]}/run", steps=24)
else:
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if has_ranks:
            dist.broadcast_object_list(shared)  # the directory of rank 0
        path = f"{shared[0]}/run"
        train(path, steps=4)
        if rank == 0:
            print("resumed", flush=True)
        train(path, steps=8)
        if has_ranks:
            dist.barrier()  # rank 0 removes the directory
if has_ranks:
    dist.destroy_process_group()
