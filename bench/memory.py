"""How much RAM training takes where everything streams: `python bench/memory.py depth [--layers 12,24,48] [--save]`.

The same width at several depths, parameters and gradients on NVMe, each in a process of its own. The peak RSS of the
process is not to grow with depth by more than the activations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.contest import parameters
from bench.report import Folder, Json, Report, Save, Table, scratch
from bench.trainer import peak_rss_bytes
from offload import OffloadZero, Tuning
from offload.demo.gpt import GPT, GPTConfig, initial_values
from offload.sizes import MIB, format_bytes

WIDTH, HEADS, CONTEXT = 768, 12, 64
TOKENS = 16
STEPS = 3
CHUNK_BYTES = 4 * MIB
BUDGET_BYTES = 128 * MIB

app = typer.Typer(add_completion=False)


@app.command(hidden=True)
def child(layers: int, path: Path) -> None:
    """Trains some steps, and prints the memory that they took."""
    config = GPTConfig(layers, WIDTH, HEADS, CONTEXT)
    model = GPT(config, device="meta")
    count = parameters(config)
    optimizer = OffloadZero(
        model, path=path, param_tier="nvme", grad_tier="nvme", cpu_memory=BUDGET_BYTES, init=initial_values(config, 0),
        commit_every=None, tuning=Tuning(chunk=CHUNK_BYTES),
    )  # fmt: skip
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
        "layers": layers,
        "parameters": count,
        "disk_bytes": stats["disk_bytes"],
        "library_bytes": stats["peak_cpu_bytes"],
        "peak_rss_bytes": peak,
        "step_s": round(min(seconds), 2),
        "bytes_per_param": round(moved / count, 1),
    }
    print(json.dumps(found))


@app.command()
def depth(
    layers: Annotated[str, typer.Option(help="Depths, with commas.")] = "12,24,48",
    path: Folder = Path(),
    as_json: Json = False,
    save: Save = False,
) -> None:
    """Peaks at several depths."""
    rows = []
    for count in layers.split(","):
        with scratch(path) as folder:
            words = [sys.executable, __file__, "child", count, str(folder / "swap")]
            rows.append(json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout))
    about = (
        f"GPT of width {WIDTH}, {TOKENS} tokens, states, parameters and gradients on NVMe, "
        f"`cpu_memory={format_bytes(BUDGET_BYTES)}`, built on the meta device; {STEPS} steps in a process of its own "
        "for each depth. `disk bytes`: states, parameters and gradients; `library bytes`: the library's own RAM; `peak "
        "rss bytes`: of the process, until its last step. Activations are kept for every layer, so they grow with "
        "depth. `step s`: the fastest."
    )
    cells = [
        [format_bytes(value) if name.endswith("bytes") else f"{value:,}" for name, value in row.items()] for row in rows
    ]
    table = Table([heading.replace("_", " ") for heading in rows[0]], cells)
    Report("depth", "Memory by depth", about, [table], {"runs": rows}).publish(as_json=as_json, save=save)


if __name__ == "__main__":
    app()
