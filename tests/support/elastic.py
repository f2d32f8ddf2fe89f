"""What a rank of an elastic run does: `torchrun ... tests/support/elastic.py DIRECTORY OPTIONS`.

DIRECTORY is shared. It has the run, one line of JSON for what happens on rank 0 (`log`), and the weights at the end. A
file hold-WORLD-STEP[-WHERE] stops the last of WORLD ranks before that step, or in a call of it; it says so by a file
held-WORLD-STEP[-WHERE], and goes on when somebody removes that one.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.checkpoint import committer
from tests.support.toy import Net

STEPS, EVERY = 18, 3
"""Of the run, and from a commit to the next."""
HELD_S = 600.0
"""Nobody stays stopped for longer."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net(3)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Each rank has batches of its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, model.embed.in_features, generator=generator)  # type: ignore[union-attr,arg-type]
    return model(x).float().square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


CLIP = 0.05


def main(directory: Path, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = 0

    def log(**line: object) -> None:
        if rank == 0:
            with (directory / "log").open("a") as lines:
                lines.write(json.dumps({"ranks": ranks, **line}) + "\n")

    def hold(where: str = "") -> None:
        name = f"{ranks}-{step}{where}"
        if rank == ranks - 1 and (directory / f"hold-{name}").exists():
            held = directory / f"held-{name}"
            held.touch()
            end = time.monotonic() + HELD_S
            while held.exists() and time.monotonic() < end:
                time.sleep(0.05)

    net = model()
    write = committer.write_files

    def writes(*args: Any, **how: Any) -> Any:
        hold("-commit")
        return write(*args, **how)

    tuning = Tuning(chunk="4KiB", threads=1)
    options = {"path": directory / "run", "commit_every": EVERY, "resume": "auto", "tuning": tuning} | options
    with (
        patch.object(committer, "write_files", writes),
        OffloadZero(net, adamw(net), compute_dtype=torch.float32, **options) as optimizer,
    ):
        schedule = schedule_of(optimizer)
        optimizer.attach(schedule=schedule, rng=True)
        step = optimizer.resumed.step if optimizer.resumed else 0
        log(resumed=step)
        while step < STEPS:
            hold()
            loss = loss_of(net, step, rank)
            loss.register_hook(lambda _: hold("-backward"))
            loss.backward()
            optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            log(step=step)
        weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    if rank == 0:
        torch.save(weights, directory / "weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
