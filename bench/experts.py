"""Experts in tiles beside whole layers: `python bench/experts.py [--tokens 16,128,2048] [--json] [--save]`.

A mixture of experts whose parameters stream from RAM takes steps on batches of several sizes: in whole layers, and in
tiles of one expert each, with `grouped_mm` and with a loop over the experts. Each step has other tokens, so that others
of the experts are used. Two more have parameters and states on NVMe, as little of them in RAM as they need: one steps
all experts in time, and in the other idle ones owe their steps. The contestants take turns. The bytes are those that
come to the device in a step, and those that a step reads from the disk and writes to it.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.report import Folder, Json, Report, Rounds, Save, Table, run, scratch, spread
from offload import OffloadZero, Tuning
from offload.planner import least_cpu_memory

LAYERS = 4
BUFFERS = 16
"""Chunks that may wait in RAM, with everything on NVMe."""
MOVED = ("gathered_bytes", "nvme_read_bytes", "nvme_written_bytes")


class Experts(nn.Module):
    """A layer of experts in two parameters, each of which an expert has a matrix of. A token goes to one of them.

    Args:
        width: of tokens.
        count: of experts.
        grouped: whether they are applied by `grouped_mm`; else one after the other.
    """

    def __init__(self, width: int, count: int, *, grouped: bool) -> None:
        super().__init__()
        self._grouped = grouped
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, 2 * width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        made = self._in_groups(x[order], expert[order]) if self._grouped else self._one_by_one(x[order], expert[order])
        out: Tensor = x + torch.empty_like(x).index_copy(0, order, made) * weight.unsqueeze(1)
        return out

    def _in_groups(self, x: Tensor, expert: Tensor) -> Tensor:
        offs = torch.bincount(expert, minlength=len(self.up)).cumsum(0).to(torch.int32)
        made: Tensor = F.grouped_mm(F.silu(F.grouped_mm(x, self.up.mT, offs=offs)), self.down.mT, offs=offs)
        return made

    def _one_by_one(self, x: Tensor, expert: Tensor) -> Tensor:
        counts = torch.bincount(expert, minlength=len(self.up)).tolist()
        parts = enumerate(x.split(counts))
        return torch.cat([F.linear(F.silu(F.linear(p, self.up[e])), self.down[e]) for e, p in parts if len(p)])


class Contestant:
    """A model in training.

    Args:
        width: of tokens.
        experts: of each layer.
        grouped: see Experts.
        tile: bytes of a tile; 0: whole layers.
        folder: where all of it is on NVMe; None: it is in RAM.
        late: as Tuning has it.
    """

    def __init__(
        self, width: int, experts: int, *, grouped: bool, tile: int, folder: Path | None = None, late: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Experts(width, experts, grouped=grouped) for _ in range(LAYERS)])
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        tier = "cpu" if folder is None else "nvme"
        options: dict[str, Any] = {"param_tier": tier, "compute_dtype": torch.float32}
        options["tuning"] = Tuning(tile=tile, late=late, prefetch_chunks=BUFFERS)
        if folder is not None:
            least = least_cpu_memory(self.model, adamw, **options)
            options |= {"path": folder / str(late), "cpu_memory": least + BUFFERS * 3 * tile}
        options["tier"] = tier
        with contextlib.redirect_stderr(io.StringIO()):
            self.optimizer = OffloadZero(self.model, adamw, commit_every=None, **options)
        self.seconds: list[float] = []
        self.nbytes: list[int] = []
        self.disk_nbytes: list[int] = []

    def step(self, x: Tensor) -> None:
        """Takes a step on tokens, shape (tokens, width), and notes how long it took, and what came to the device."""
        before, start = self.optimizer.stats(), time.perf_counter()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.synchronize()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        moved = {name: self.optimizer.stats()[name] - before[name] for name in MOVED}
        self.nbytes.append(moved.pop("gathered_bytes"))
        self.disk_nbytes.append(sum(moved.values()))


def measure(width: int, experts: int, tokens: int, rounds: int, folder: Path) -> dict[str, Contestant]:
    """The contestants, after a first step that counts for nothing and `rounds` others."""
    tile = 4 * 2 * width * width
    contestants = {
        "whole layers": Contestant(width, experts, grouped=True, tile=0),
        "tiles, grouped_mm": Contestant(width, experts, grouped=True, tile=tile),
        "tiles, a loop": Contestant(width, experts, grouped=False, tile=tile),
        "NVMe, all stepped": Contestant(width, experts, grouped=True, tile=tile, folder=folder, late=False),
        "NVMe, idle ones late": Contestant(width, experts, grouped=True, tile=tile, folder=folder),
    }
    for number in range(1 + rounds):
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(number))
        for one in contestants.values():
            one.step(x)
    for one in contestants.values():
        one.optimizer.close()
        del one.seconds[0], one.nbytes[0], one.disk_nbytes[0]
    return contestants


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of a step, with commas.")] = "16,128,2048",
    width: Annotated[int, typer.Option(help="Of a token.")] = 256,
    experts: Annotated[int, typer.Option(help="Of each layer.")] = 32,
    path: Folder = Path(),
    rounds: Rounds = 9,
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Measure, print the table."""
    rows: list[dict[str, Any]] = []
    for count in map(int, tokens.split(",")):
        with scratch(path) as folder:
            found = measure(width, experts, count, rounds, folder)
        whole = found["whole layers"]
        for what, one in found.items():
            ratios = [own / other for own, other in zip(one.seconds, whole.seconds, strict=True)]
            nbytes = statistics.median(one.nbytes)
            rows.append(
                {
                    "tokens": count,
                    "what": what,
                    "seconds": statistics.median(one.seconds),
                    "spread": spread(one.seconds, 4),
                    "x_whole": statistics.median(ratios),
                    "mib": nbytes / 2**20,
                    "x_bytes": nbytes / statistics.median(whole.nbytes),
                    "peak_mib": one.optimizer.stats()["peak_device_bytes"] / 2**20,
                    "disk_mib": statistics.median(one.disk_nbytes) / 2**20,
                }
            )
    headings = (
        "tokens",
        "what",
        "s a step",
        "spread",
        "x whole layers",
        "MiB to the device",
        "x whole",
        "peak MiB there",
        "MiB over the disk",
    )
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    about = (
        f"{LAYERS} layers of {experts} experts, width {width}, one expert a token, parameters and states in RAM, or on "
        "NVMe, fp32."
    )
    table = Table(headings, cells, "Experts in tiles beside whole layers")
    Report("experts", table.title, about, [table], {"rows": rows}).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    run(main)
