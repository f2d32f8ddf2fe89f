"""A whole loop that is killed again and again: dropout, a shuffled loader with workers, a warm-up.

`python -m tests.support.killed_loop SEED KILLS SCRATCH LOADER`: kills trainings that commit and attach what they
need at random instants, and compares what the one that reaches the end has with a training that does neither.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Subset

from offload import OffloadZero, Tuning
from tests.support.killed import finish, fork, kill, require_same, states

STEPS = 30
EXAMPLES = 28
BATCH = 4
"""An epoch has seven batches: with a commit every third step, they fall on each of its places."""
EVERY = 3
WORKERS = 2


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Shuffled:
    """Shuffled epochs of torch's DataLoader, with the position in them that it does not keep."""

    def __init__(self) -> None:
        self.epoch = self.batches = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        rest = Subset(Rows(), order[BATCH * self.batches :])
        # With a generator of its own, it draws its workers' seeds from nobody else's.
        for batch in DataLoader(rest, BATCH, num_workers=WORKERS, generator=torch.Generator()):
            self.batches += 1
            yield batch
        self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(), BATCH, shuffle=True, num_workers=WORKERS)


LOADERS: dict[str, Callable[[], Any]] = {"own": Shuffled, "torchdata": stateful}


def train(kind: str, result: Path, path: Path | None = None) -> None:
    """Writes the states after the last step to `result`. Args: path: of commits; None: none, nothing attached."""
    os.setpgid(0, 0)  # workers outlive a killed parent by seconds: they can be ended together
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 16)
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    commits: dict[str, Any] = {} if path is None else {"path": path, "commit_every": EVERY, "resume": "auto"}
    with OffloadZero(model, plain, tuning=Tuning(chunk="4KiB", threads=1), **commits) as optimizer:
        warm_up = LinearLR(optimizer, 0.1, total_iters=8)
        scheduler = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - 8)], milestones=[8])
        loader = LOADERS[kind]()
        if path is not None:
            optimizer.attach(scheduler=scheduler, loader=loader, rng=True)
        step = optimizer.resumed.step if optimizer.resumed else 0
        while step < STEPS:
            for batch in loader:
                model(batch.bfloat16()).float().square().mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    break
        found = states(model, optimizer)
    save_file(found, str(result))


def main(seed: int, kills: int, scratch: Path, kind: str) -> None:
    chance = random.Random(seed)
    expected = scratch / "expected.safetensors"
    whole_s = finish(partial(train, kind, expected))
    done = resumed = rounds = 0
    groups: list[int] = []
    while done < kills:
        rounds += 1
        path, result = scratch / f"round{rounds}", scratch / f"round{rounds}.safetensors"
        while done < kills:
            groups.append(fork(partial(train, kind, result, path)))
            time.sleep(chance.uniform(0, 0.8 * whole_s))
            if not kill(groups[-1]):
                break
            done += 1
            resumed += (path / "COMMIT").exists()
        finish(partial(train, kind, result, path))
        require_same(result, expected)
        shutil.rmtree(path)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    print(f"{done} kills, {resumed} of them after a commit, {rounds} rounds, {whole_s:.2f} s each")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
