"""What training takes of RAM where everything streams: `python bench/memory.py depth|larger [options]`.

depth: the same width at several depths, parameters and gradients on NVMe, each in a process of its own: the peak RSS of
the process, and the most parameters that were in the model's memory at once. larger: `offload train` in a memory cgroup
that kills what takes more than budget and margin (needs the right to make one, root's as a rule).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import RESULTS, Grid, hardware, scratch
from bench.trainer import peak_rss_bytes
from offload import OffloadZero, Tuning
from offload.models.gpt import GPT, GPTConfig, initial_values
from offload.sizes import MIB, format_bytes, parse_bytes

WIDTH, HEADS, CONTEXT = 768, 12, 64
TOKENS = 16
STEPS = 3
CHUNK_BYTES = 4 * MIB
BUDGET_BYTES = 128 * MIB
CGROUPS = Path("/sys/fs/cgroup")

app = typer.Typer(add_completion=False)


class Resident:
    """The most bytes of parameters that had memory at once, looked at wherever a block begins or ends."""

    def __init__(self, model: GPT) -> None:
        self.most_bytes = 0
        self._params = list(model.parameters())
        for block in model.blocks:
            block.register_forward_hook(self._look)
            block.register_full_backward_pre_hook(self._look)

    def _look(self, module: nn.Module, *more: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # those that are not there have guards
            storages = [param.untyped_storage() for param in self._params]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        self.most_bytes = max(self.most_bytes, sum(sizes.values()))


@app.command(hidden=True)
def child(layers: int, path: Path) -> None:
    """Trains some steps and prints what they took."""
    config = GPTConfig(layers, WIDTH, HEADS, CONTEXT)
    model = GPT(config, device="meta")
    optimizer = OffloadZero(
        model, path=path, param_tier="nvme", grad_tier="nvme", cpu_memory=BUDGET_BYTES, init=initial_values(config, 0),
        commit_every=None, tuning=Tuning(chunk=CHUNK_BYTES),
    )  # fmt: skip
    resident = Resident(model)
    tokens = torch.arange(TOKENS).view(1, -1)
    seconds = []
    with optimizer:
        for _ in range(STEPS):
            start = time.perf_counter()
            loss: Tensor = model(tokens, tokens)[1]
            loss.backward()
            optimizer.step()
            optimizer.synchronize()
            seconds.append(time.perf_counter() - start)
        stats, peak = optimizer.stats(), peak_rss_bytes()  # close() may bring all parameters back
    moved = (stats["nvme_read_bytes"] + stats["nvme_written_bytes"]) / STEPS
    found = {
        "parameters": sum(param.numel() for param in GPT(config, device="meta").parameters()),
        "peak_rss_bytes": peak,
        "resident_bytes": resident.most_bytes,
        "library_bytes": stats["peak_cpu_bytes"],
        "disk_bytes": stats["disk_bytes"],
        "step_s": min(seconds),
        "moved_bytes": moved,
    }
    print(json.dumps(found))


@app.command()
def depth(
    layers: Annotated[str, typer.Option(help="Depths, with commas.")] = "12,24,48",
    path: Annotated[Path, typer.Option(help="A folder on the disk.")] = Path(),
    save: Annotated[bool, typer.Option(help="Write bench/results/depth.md.")] = False,
) -> None:
    """Peaks at several depths."""
    found = []
    for count in map(int, layers.split(",")):
        with scratch(path) as folder:
            words = [sys.executable, __file__, "child", str(count), str(folder / "swap")]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found.append((count, json.loads(done.stdout)))
    headings = ("layers", "parameters", "states, parameters, gradients", "library's RAM", "most parameters at once",
                "peak RSS", "step s", "bytes a parameter")  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            str(count),
            f"{one['parameters']:,}",
            format_bytes(one["disk_bytes"]),
            format_bytes(one["library_bytes"]),
            format_bytes(one["resident_bytes"]),
            format_bytes(one["peak_rss_bytes"]),
            f"{one['step_s']:.2f}",
            f"{one['moved_bytes'] / one['parameters']:.1f}",
        )
        for count, one in found
    ]
    grid = Grid(headings, rows)
    grid.show(Console(width=150), "Memory by depth")
    text = (
        f"GPT of width {WIDTH}, {TOKENS} tokens, states, parameters and gradients on NVMe, "
        f"`cpu_memory={format_bytes(BUDGET_BYTES)}`, built on the meta device; {STEPS} steps in a process of its own "
        "for each depth. `most parameters at once`: in the model's memory, as blocks begin and end; `peak RSS`: "
        "of the process, from its start to its last step; activations, which are kept for every layer, grow with "
        "depth. `step s`: the fastest."
    )
    if save:
        _save("depth.md", "Memory by depth", text, grid)


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup, of either version."""

    folder: Path
    unified: bool

    @property
    def most_bytes(self) -> int:
        return int((self.folder / ("memory.peak" if self.unified else "memory.max_usage_in_bytes")).read_text())

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]
        return subprocess.run([*enter, *words], stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Cgroup]:
    """A new one that may hold `limit` bytes, page cache included; it goes at the end."""
    unified = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if unified else CGROUPS / "memory") / f"offload-bench-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit))
        if unified:
            (folder / "memory.swap.max").write_text("0")
        yield Cgroup(folder, unified)
    finally:
        folder.rmdir()


@app.command()
def larger(
    runs: Annotated[str, typer.Option(help="preset:cpu_memory, with commas.")] = "1b:2GiB,2b:3GiB",
    margin: Annotated[str, typer.Option(help="Bytes beyond the budget that the cgroup allows.")] = "1.5GiB",
    steps: Annotated[int, typer.Option(min=1)] = 6,
    batch: Annotated[int, typer.Option(min=1)] = 32,
    seq: Annotated[int, typer.Option(min=1)] = 32,
    lr: Annotated[float, typer.Option(help="At its peak, which so short a run reaches in its first step.")] = 1e-6,
    path: Annotated[Path, typer.Option(help="A folder on the disk.")] = Path(),
    save: Annotated[bool, typer.Option(help="Write bench/results/larger.md.")] = False,
) -> None:
    """`offload train` with everything streamed, killed if it takes more than budget and margin."""
    rows = []
    for run in runs.split(","):
        preset, budget = run.split(":")
        limit = parse_bytes(budget, "runs") + parse_bytes(margin, "margin")
        with scratch(path) as folder, cgroup(limit) as group:
            options = {"preset": preset, "cpu-memory": budget, "steps": steps, "batch": batch, "seq": seq, "lr": lr}
            options["sample"] = 8
            options |= {"param-tier": "nvme", "grad-tier": "nvme", "path": folder / "swap", "out": folder / "out"}
            words = ["--checkpoint-activations", *(f"--{name}={value}" for name, value in options.items())]
            start = time.perf_counter()
            done = group.run(
                [sys.executable, "-c", "from offload.cli.main import run; run()", "train", "--json", *words]
            )
            wall, most = time.perf_counter() - start, group.most_bytes
        if done.returncode:
            print(f"{run}: ended with {done.returncode}; the cgroup held {format_bytes(most)}", file=sys.stderr)
            raise typer.Exit(1)
        rows.append(_row(json.loads(done.stdout), limit, most, wall))
    headings = ("preset", "parameters", "budget", "library's RAM", "peak RSS", "cgroup's limit", "cgroup's peak",
                "forward s", "backward s", "step s", "whole run s", "bytes a parameter and step", "loss")  # fmt: skip
    grid = Grid(headings, rows)
    grid.show(Console(width=190), "Larger than memory")
    text = (
        "`offload train --checkpoint-activations --param-tier nvme --grad-tier nvme "
        f"--steps {steps} --batch {batch} --seq {seq} --lr {lr:g}` "
        f"with the `--cpu-memory` of the table, in a memory cgroup of {margin} more, in which the kernel kills what "
        "needs more. `forward`, `backward`, `step`: a step. `bytes a parameter and step`: read and written, those of "
        "validation and sample included, which read all parameters again. `loss`: of the first and of the last step. "
        "At the lr of 1e-3 of longer runs it rises in the first steps, which have no warm-up to speak of, as it does "
        "with torch's AdamW. Without checkpoints the activations of all layers are saved: those of 1,024 "
        "tokens did not fit beside."
    )
    if save:
        _save("larger.md", "Larger than memory", text, grid)


def _row(found: dict[str, Any], limit: int, most: int, wall: float) -> tuple[str, ...]:
    moved = found["nvme_read_bytes"] + found["nvme_written_bytes"]
    return (
        found["preset"],
        f"{found['parameters']:,}",
        format_bytes(found["cpu_budget_bytes"]),
        format_bytes(found["peak_cpu_bytes"]),
        format_bytes(found["peak_rss_bytes"]),
        format_bytes(limit),
        format_bytes(most),
        *(f"{found[name] / found['steps']:.1f}" for name in ("forward_s", "backward_s", "step_s")),
        f"{wall:.0f}",
        f"{moved / found['parameters'] / found['steps']:.1f}",
        f"{found['loss_first']:.3f} → {found['loss_last']:.3f}",
    )


def _save(name: str, title: str, text: str, grid: Grid) -> None:
    words = ["DIR" if word.startswith("/") else word for word in sys.argv[1:]]
    command = f"`python bench/memory.py {shlex.join(words)}`"
    lines = [f"# {title}", "", f"{hardware()}; torch {torch.__version__}.", "", command, "", text, "", *grid.markdown()]
    (RESULTS / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app()
