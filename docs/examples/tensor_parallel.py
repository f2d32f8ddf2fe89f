"""Tensor parallelism: `torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py`; with 4 ranks beside ZeRO over 2.

Two ranks share each matrix. Each trains its part, whose states are in a swap file of its own.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from offload import OffloadZero

dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl", after torch.accelerator.set_device_index(...)
shape = int(os.environ["WORLD_SIZE"]) // 2, 2
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("zero", "tensor"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


torch.manual_seed(0)  # until it is sharded, the model is the same on all ranks
model = nn.Sequential(nn.Linear(64, 128), Block(128), Block(128), nn.Linear(128, 10))
kinds = {"wide": ColwiseParallel, "narrow": RowwiseParallel}
plan = {f"{number}.{name}": kind() for number in (1, 2) for name, kind in kinds.items()}
parallelize_module(model, mesh["tensor"], plan)

inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
targets = inputs[:, :10].argmax(dim=1)
own = slice(mesh.get_local_rank("zero"), None, shape[0])  # ranks that share matrices take the same batch

with tempfile.TemporaryDirectory() as directory:
    shared = [directory]
    dist.broadcast_object_list(shared)  # the directory of rank 0
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Where all ranks share matrices, leave process_group out.
    group = mesh["zero"] if shape[0] > 1 else None
    with OffloadZero(model, adamw, path=f"{shared[0]}/run", process_group=group) as optimizer:
        for step in range(8):
            batch = torch.arange(64 * step, 64 * step + 64)[own] % len(inputs)
            loss = nn.functional.cross_entropy(model(inputs[batch]).float(), targets[batch])
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)  # of the whole model
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step + 1}  loss {loss.item():.3f}  norm {norm:.3f}", flush=True)
    dist.barrier()  # rank 0 removes the directory
    dist.destroy_process_group()
