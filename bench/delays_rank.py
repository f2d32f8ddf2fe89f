"""One rank of bench/delays.py: `python bench/delays_rank.py RANK RANKS ADDRESS SWITCH JSON`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from offload import OffloadZero
from offload.demo.gpt import GPT, GPTConfig
from tests.support import switch

BLOCKS = 8
PORT = 29500


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=BLOCKS, heads=2, width=64, context=32))


def _plain(wrap: Callable[[GPT], nn.Module]) -> Callable[[], None]:
    model = wrap(_model().to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        _backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _backward(model: nn.Module) -> None:
    tokens = torch.randint(256, (2, 33))
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1].backward()


def _sharded(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _ours(**options: Any) -> tuple[Callable[[], None], OffloadZero]:
    model = _model()
    optimizer = OffloadZero(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)

    def step() -> None:
        _backward(model)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def measure(
    control: Path, path: Path, delays: list[float], rounds: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each contestant's step, by delay and round; and of a start and a commit of ours."""
    committing, optimizer = _ours(stage=2, path=path, commit_every=0)
    runs: dict[str, Callable[[], None]] = {
        "DDP": _plain(DistributedDataParallel),
        "FSDP2": _plain(_sharded),
        "offload, stage 2": _ours(stage=2)[0],
        "offload, stage 3": _ours(stage=3)[0],
    }
    for run in (*runs.values(), committing):
        for _ in range(3):  # the order of units is known then
            run()
    optimizer.commit()

    def commit(delay: float) -> None:
        committing()
        optimizer.synchronize()
        began = time.monotonic()
        optimizer.commit()
        found["a commit"][str(delay)].append(time.monotonic() - began)

    def start(number: int, delay: float) -> None:
        began = time.monotonic()
        made = _ours(stage=2, path=path.with_name(f"{path.name}-{number}-{delay}"))[1]
        found["a start"][str(delay)].append(time.monotonic() - began)
        made.close()

    found: dict[str, dict[str, list[float]]] = {
        name: {str(one): [] for one in delays} for name in (*runs, "a commit", "a start")
    }
    for number in range(rounds):
        for delay in delays:
            if dist.get_rank() == 0:
                switch.command(control, f"delay {delay}")
            dist.barrier()
            for name, run in runs.items():
                run()  # what waits for the one before is over
                began = time.monotonic()
                for _ in range(steps):
                    run()
                found[name][str(delay)].append((time.monotonic() - began) / steps)
            commit(delay)
            start(number, delay)
    return found


def main(rank: str, ranks: str, address: str, control: str, options: str) -> None:
    given = json.loads(options)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT), "RANK": rank, "WORLD_SIZE": ranks}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(Path(control), Path(given["path"]), given["delays"], given["rounds"], given["steps"])
    if rank == "0":
        Path(given["found"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
