"""What the recipes share: whether plain torch trains, and what a run leaves behind.

python docs/recipes/lora.py              # trains with offload, in a directory that is removed afterwards
python docs/recipes/lora.py --plain      # the same training in plain torch
python docs/recipes/lora.py DIRECTORY    # keeps the directory, with what bench/recipes.py compares
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import OffloadZero
from offload.sizes import format_bytes

PLAIN = "--plain" in sys.argv[1:]
RESULT = "result.pt"
TIERS = {"device": "peak_device_bytes", "RAM": "peak_cpu_bytes", "disk": "disk_bytes"}
"""Where bytes are, and how `OffloadZero.stats` calls them."""


@contextmanager
def directory() -> Iterator[Path]:
    """The directory of a run: the one of the command line, else one that is removed afterwards."""
    given = [Path(one) for one in sys.argv[1:] if one != "--plain"]
    if given:
        given[0].mkdir(parents=True, exist_ok=True)
        yield given[0]
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def first_step(optimizer: Any) -> int:
    """How many steps a run has made already, in processes before this one."""
    return optimizer.resumed.step if isinstance(optimizer, OffloadZero) and optimizer.resumed else 0


def leave(folder: Path, model: nn.Module, optimizer: Any, losses: Mapping[int, float]) -> None:
    """Prints the losses and the bytes, saves them with the trained weights, and closes the optimizer.

    Args:
        folder: of the run. Losses of a run that was stopped in it, and is resumed here, are kept.
        model: as it was given to the optimizer.
        optimizer: an OffloadZero, or the optimizer of plain torch.
        losses: by step, from 1 on.
    """
    result = {
        "losses": dict(losses),
        "weights": {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad},
        "bytes": {},
    }
    for step, loss in losses.items():
        print(f"step {step:2d}  loss {loss:.6f}")
    if isinstance(optimizer, OffloadZero):
        stats = optimizer.stats()
        result["bytes"] = {tier: stats[name] for tier, name in TIERS.items()}
        print(", ".join(f"{tier} {format_bytes(found)}" for tier, found in result["bytes"].items()))
        if optimizer.resumed:
            before = torch.load(folder / RESULT)["losses"]
            result["losses"] = {step: loss for step, loss in before.items() if step not in losses} | dict(losses)
        optimizer.close()
    torch.save(result, folder / RESULT)
