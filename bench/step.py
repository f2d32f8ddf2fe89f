"""One whole `step()` on each tier against its limit: the bytes through the same disk, and the kernels alone.

    python bench/step.py [--n 1e8] [--rounds 5] [--path DIR] [--budgets 0 0.5 1] [--json] [--save]

Every figure is a ratio to a limit measured in the same run, round by round in turn: machines are shared, and disks
drift. The gradients are assigned, so that nothing but the step is timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from offload import OffloadZero, Tuning
from offload.copies import HostCopier
from offload.io.engine import IOFuture
from offload.io.settings import open_engine
from offload.native import AdamScalars, Kernels, cpu_model, load
from offload.planner import least_cpu_memory
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.store.arena import Arena
from offload.store.slots import memory_of, slot_bytes

WIDTH = 2048
CHUNK_NUMEL = WIDTH * WIDTH
IN_FLIGHT = 4

HEAD = """# A whole step

`python bench/step.py --rounds 9 --save`. `x limit` is the median over the rounds of the step's time by the larger of
`disk alone` (the same bytes through the same engine, reading and writing at once) and `Adam alone` (the same kernels on
states in RAM). Below 1 on the cpu tier: the states of the step are found warmer than those of the reference, which runs
after the disk's. What is not Adam on the cpu tier is Python between the chunks and the kernel threads' waking.

"""


@dataclass(frozen=True)
class Row:
    """One configuration. Times are medians over the rounds; `x_limit` is the median of the rounds' ratios.

    limit_s: the larger of disk_s (the same bytes moved by the same engine, reading and writing at once, without
    computing anything) and kernel_s (Adam on the same states in RAM).
    """

    tier: str
    budget: float
    n: int
    step_s: float
    spread_s: float
    disk_s: float
    kernel_s: float
    x_limit: float
    adam_share: float
    wait_share: float
    bytes_per_param: float


class Disk:
    """Reads all slots and writes as many bytes, as many requests at a time as a step does."""

    def __init__(self, path: Path, slot: int, slots: int) -> None:
        self._engine = open_engine("auto", [path])
        self._file = self._engine.open(str(path / "limit"))
        self._slot, self._slots = slot, slots
        self._arena = Arena(IN_FLIGHT * slot, HostCopier())
        self._buffers = [memory_of(self._arena.carve(slot)) for _ in range(IN_FLIGHT)]
        for future in [self._engine.write(self._file, i * slot, self._buffers[0]) for i in range(slots)]:
            future.result()

    def run(self, slots: int) -> float:
        start = time.perf_counter()
        writes: list[IOFuture | None] = [None] * IN_FLIGHT
        reads: list[IOFuture | None] = [None] * IN_FLIGHT
        for i in range(slots + 2):
            if i < slots:
                before = writes[i % IN_FLIGHT]
                if before is not None:
                    before.result()
                reads[i % IN_FLIGHT] = self._engine.read(self._file, i * self._slot, self._buffers[i % IN_FLIGHT])
            if i >= 2:
                read = reads[(i - 2) % IN_FLIGHT]
                assert read is not None
                read.result()
                writes[(i - 2) % IN_FLIGHT] = self._engine.write(
                    self._file, (i - 2) * self._slot, self._buffers[(i - 2) % IN_FLIGHT]
                )
        for write in writes:
            if write is not None:
                write.result()
        return time.perf_counter() - start

    def close(self) -> None:
        self._engine.close()


class Alone:
    """Adam on states in RAM: what a step would cost if nothing had to move."""

    def __init__(self, n: int, kernels: Kernels) -> None:
        self._kernels = kernels
        # On huge pages, as in the step.
        self._arena = Arena(16 * n + 5 * PAGE_BYTES, HostCopier())
        self._states = [self._arena.carve(4 * n).view(torch.float32) for _ in range(3)]
        self._grad, self._out = (self._arena.carve(2 * n).view(torch.bfloat16) for _ in range(2))
        self._grad.fill_(1e-3)
        self._scalars = AdamScalars.at(
            step=10, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True
        )

    def run(self) -> float:
        start = time.perf_counter()
        for low in range(0, len(self._grad), CHUNK_NUMEL):
            part = slice(low, low + CHUNK_NUMEL)
            master, exp_avg, exp_avg_sq = (state[part] for state in self._states)
            self._kernels.adam(master, exp_avg, exp_avg_sq, self._grad[part], self._out[part], self._scalars)
        return time.perf_counter() - start


def build(n: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(round(n / WIDTH**2), 4))))


class Subject:
    """OffloadZero with a share `budget` of the states kept in RAM."""

    def __init__(self, n: int, tier: str, budget: float, path: Path) -> None:
        model = build(n)
        self.n = sum(p.numel() for p in model.parameters())
        tuning = Tuning(chunk=4 * CHUNK_NUMEL)
        options: dict[str, Any] = {"tier": tier, "tuning": tuning}
        if tier == "nvme":
            # The least that works has one buffer fewer than are used where there is room.
            more = 1 + round(budget * (self.n // CHUNK_NUMEL))
            least = least_cpu_memory(model, tuning=tuning)
            options |= {"path": path / f"b{budget}", "cpu_memory": least + more * slot_bytes(CHUNK_NUMEL)}
        self.optimizer = OffloadZero(model, **options)
        self._params: list[tuple[nn.Parameter, Tensor]] = [
            (p, torch.randn(p.shape, dtype=p.dtype)) for p in model.parameters()
        ]

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds from the call of step() until the last byte is written, and the counters' differences."""
        before = self.optimizer.stats()
        for param, grad in self._params:
            param.grad = grad
        self.optimizer.grad(self._params[0][0])  # the gradients are in RAM before the step, as after a backward
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        elapsed = time.perf_counter() - start
        after = self.optimizer.stats()
        return elapsed, {key: after[key] - before[key] for key in after if key.endswith(("_s", "_bytes"))}


def measure(subject: Subject, tier: str, budget: float, disk: Disk, alone: Alone, rounds: int) -> Row:
    """Interleaves the subject with its limits; the first round warms up."""
    streamed = subject.optimizer.stats()["streamed_chunks"]
    steps, disks, kernels, shares = [], [], [], []
    for number in range(rounds + 1):
        disk_s = disk.run(streamed) if streamed else 0.0
        kernel_s = alone.run()
        step_s, moved = subject.run()
        if number:
            steps.append(step_s)
            disks.append(disk_s)
            kernels.append(kernel_s)
            shares.append((moved["adam_s"] / step_s, moved["wait_s"] / step_s))
    moved_bytes = moved["nvme_read_bytes"] + moved["nvme_written_bytes"]
    ratios = [step / max(d, k) for step, d, k in zip(steps, disks, kernels, strict=True)]
    return Row(
        tier=tier,
        budget=budget,
        n=subject.n,
        step_s=statistics.median(steps),
        spread_s=max(steps) - min(steps),
        disk_s=statistics.median(disks),
        kernel_s=statistics.median(kernels),
        x_limit=statistics.median(ratios),
        adam_share=statistics.median(share[0] for share in shares),
        wait_share=statistics.median(share[1] for share in shares),
        bytes_per_param=moved_bytes / subject.n,
    )


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"step() of {rows[0].n:,} parameters", caption=caption())
    for heading in ("tier", "in RAM", "step", "spread", "disk alone", "Adam alone", "x limit", "Adam", "waiting"):
        table.add_column(heading, justify="right")
    table.add_column("bytes a parameter", justify="right")
    for row in rows:
        table.add_row(
            row.tier,
            f"{row.budget:.0%}",
            f"{row.step_s:.3f} s",
            f"{row.spread_s:.3f} s",
            f"{row.disk_s:.3f} s",
            f"{row.kernel_s:.3f} s",
            f"{row.x_limit:.2f}",
            f"{row.adam_share:.0%}",
            f"{row.wait_share:.0%}",
            f"{row.bytes_per_param:.2f}",
        )
    return table


def caption() -> str:
    kernels = load()
    text = f"{cpu_model()[0]}, {kernels.threads} threads, kernel {kernels.variant}, torch {torch.__version__}"
    kernels.close()
    return text


def run(n: int, rounds: int, path: Path, budgets: list[float], say: Callable[[str], None]) -> list[Row]:
    kernels = load()
    size = slot_bytes(CHUNK_NUMEL)
    chunks = max(round(n / CHUNK_NUMEL), 4)
    disk, alone = Disk(path, round_up(size, PAGE_BYTES), chunks), Alone(chunks * CHUNK_NUMEL, kernels)
    say(f"disk reference: {format_bytes(chunks * size)} each way in {path}")
    rows = []
    for tier, budget in [("cpu", 1.0), *(("nvme", budget) for budget in budgets)]:
        say(f"{tier} {budget:.0%}")
        subject = Subject(n, tier, budget, path)
        try:
            rows.append(measure(subject, tier, budget, disk, alone, rounds))
        finally:
            subject.optimizer.close()
            shutil.rmtree(path / f"b{budget}", ignore_errors=True)
    disk.close()
    kernels.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=float, default=1e8, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.0, 0.5])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write bench/results/step.md")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-step-", dir=options.path))
    try:
        rows = run(int(options.n), options.rounds, folder, options.budgets, lambda text: print(text, file=sys.stderr))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(width=130).print(table_of(rows))
    if options.save:
        text = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        text.print(table_of(rows))
        Path(__file__).with_name("results").joinpath("step.md").write_text(HEAD + f"```\n{text.export_text()}```\n")


if __name__ == "__main__":
    main()
