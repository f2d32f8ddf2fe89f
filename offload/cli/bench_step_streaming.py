"""`offload bench step --param-tier nvme`: whole iterations of a model whose parameters stream, against their limits.

An iteration is forward, backward and step of a GPT, from where one step() returns to where the next does, so that each
pays for one whole iteration of a training that goes on. Its limit is the larger of

    compute  the same model wholly resident (`tier="cpu"`), its Adam included
    disk     the bytes that the iteration moved, through the same engine, reading and writing at once

in the same run, in turns. Few tokens make the disk the larger one, many the compute. Where they are alike no order of
work reaches that limit: a layer is stepped between a backward's end, when the gradients' norm is known, and the next
forward's entry into it, so that 26 of 30 bytes move in forward. `phases` is that limit for forward and for what follows
it separately.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.cli import bench_step
from offload.cli.bench_io_progress import progress
from offload.cli.bench_step import SEQUENCE
from offload.cli.bench_step_contestants import EACH_WAY, Disk, Transfers
from offload.cli.bench_step_sheet import hardware, median
from offload.models.gpt import GPT, VOCABULARY, GPTConfig, initial_values
from offload.planner import least_cpu_memory
from offload.sizes import PAGE_BYTES, round_up

STATE_BYTES, PARAM_BYTES, GRAD_BYTES = 24, 6, 4
"""A parameter and iteration, at most."""
LAYER_WIDTHS = (1024, 512, 256)
LEAST_LAYERS = 8
ITERATIONS = 3
"""Timed of a block, behind one that is not."""
CHUNKS_A_LAYER = 3
BUFFERS = 2
"""Chunks in RAM beyond the least that works."""


@dataclass(frozen=True)
class Job:
    """A model, and where its parameters and gradients are."""

    layers: int
    width: int
    param_tier: str
    grad_tier: str

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.layers, self.width, heads=self.width // 64, context=SEQUENCE)

    @property
    def n(self) -> int:
        return sum(param.numel() for param in GPT(self.config, device="meta").parameters())

    @property
    def tuning(self) -> Tuning:
        layer = 12 * self.width**2 + 4 * self.width
        return Tuning(chunk=round_up(4 * layer // CHUNKS_A_LAYER, PAGE_BYTES))

    @property
    def allowed_bytes(self) -> int:
        """A parameter and iteration."""
        return STATE_BYTES + PARAM_BYTES * (self.param_tier == "nvme") + GRAD_BYTES * (self.grad_tier == "nvme")

    @property
    def cpu_memory(self) -> int:
        model = GPT(self.config, device="meta")
        chunk = self.tuning.chunk
        assert isinstance(chunk, int)
        least = least_cpu_memory(model, param_tier=self.param_tier, grad_tier=self.grad_tier, tuning=self.tuning)
        return least + BUFFERS * (3 * chunk + 2 * PAGE_BYTES)


def job_of(n: int, param_tier: str, grad_tier: str) -> Job:
    """The widest model of about n parameters that has LEAST_LAYERS."""
    width = next((width for width in LAYER_WIDTHS if n >= LEAST_LAYERS * 12 * width**2), LAYER_WIDTHS[-1])
    return Job(max(2, round(n / (12 * width**2))), width, param_tier, grad_tier)


class Subject:
    """A model in training. path: of its swap files, which go at the end; None: all of it is resident."""

    def __init__(self, job: Job, path: Path | None) -> None:
        self._path = path
        options: dict[str, Any] = {"tier": "cpu", "param_tier": "device", "grad_tier": "cpu"}
        if path is not None:
            options = {"tier": "nvme", "path": path, "cpu_memory": job.cpu_memory, "commit_every": None}
            options |= {"param_tier": job.param_tier, "grad_tier": job.grad_tier, "init": initial_values(job.config, 0)}
        self._model = GPT(job.config, device="cpu" if path is None else "meta")
        self.optimizer = OffloadZero(self._model, tuning=job.tuning, **options)

    def run(self, tokens: Tensor) -> Block:
        """Times ITERATIONS iterations."""
        spent = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        before, start, cpu, in_forward = self.optimizer.stats(), time.perf_counter(), time.process_time(), 0.0
        for number in range(1 + ITERATIONS):
            if number == 1:
                before, start, cpu, in_forward = self.optimizer.stats(), time.perf_counter(), time.process_time(), 0.0
                spent = dict.fromkeys(spent, 0.0)
            moved = _moved(self.optimizer)
            at = time.perf_counter()
            loss: Tensor = self._model(tokens, tokens)[1]
            spent["forward"] += time.perf_counter() - at
            in_forward += _moved(self.optimizer) - moved
            at = time.perf_counter()
            loss.backward()
            spent["backward"] += time.perf_counter() - at
            at = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            spent["step"] += time.perf_counter() - at
        seconds, cpu_s, after = time.perf_counter() - start, time.process_time() - cpu, self.optimizer.stats()
        self.optimizer.synchronize()

        def counted(name: str) -> float:
            return float(after[name] - before[name]) / ITERATIONS

        parts = {name: taken / ITERATIONS for name, taken in spent.items()}
        return Block(
            seconds=seconds / ITERATIONS,
            cpu_s=cpu_s / ITERATIONS,
            moved_bytes=counted("nvme_read_bytes") + counted("nvme_written_bytes"),
            forward_bytes=in_forward / ITERATIONS,
            wait_s=counted("wait_nvme_s"),
            parts=parts,
        )

    def close(self) -> None:
        try:
            self.optimizer.close()
        finally:
            if self._path is not None:
                shutil.rmtree(self._path, ignore_errors=True)
            del self._model, self.optimizer
            gc.collect()


def _moved(optimizer: OffloadZero) -> float:
    """Bytes on the disk, ever."""
    stats = optimizer.stats()
    return float(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])


@dataclass(frozen=True)
class Block:
    """Of an iteration: seconds, CPU seconds, bytes moved on the disk, in forward, seconds of waiting for it, and of its
    parts."""

    seconds: float
    cpu_s: float
    moved_bytes: float
    forward_bytes: float
    wait_s: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Round:
    """Seconds: disk_s for the bytes that the streamed iteration moved."""

    streamed: Block
    resident: Block
    disk_s: float

    @property
    def limit_s(self) -> float:
        return max(self.resident.seconds, self.disk_s)

    @property
    def phases_s(self) -> float:
        """The same of forward, and of what follows it, together."""
        forward_s = self.resident.parts["forward"]
        disk_s = self.disk_s * self.streamed.forward_bytes / self.streamed.moved_bytes
        return max(forward_s, disk_s) + max(self.resident.seconds - forward_s, self.disk_s - disk_s)


@dataclass(frozen=True)
class Result:
    """Of one number of tokens."""

    job: Job
    tokens: int
    rounds: list[Round]
    peak_cpu_bytes: int

    @property
    def streamed_s(self) -> float:
        return median(self.rounds, lambda one: one.streamed.seconds)

    @property
    def resident_s(self) -> float:
        return median(self.rounds, lambda one: one.resident.seconds)

    @property
    def disk_s(self) -> float:
        return median(self.rounds, lambda one: one.disk_s)

    @property
    def x_limit(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.rounds, lambda one: one.streamed.seconds / one.limit_s)

    @property
    def x_phases(self) -> float:
        return median(self.rounds, lambda one: one.streamed.seconds / one.phases_s)

    @property
    def x_cpu(self) -> float:
        """CPU time that it takes, of the resident model's."""
        return median(self.rounds, lambda one: one.streamed.cpu_s / one.resident.cpu_s)

    @property
    def forward_share(self) -> float:
        """Of the bytes."""
        return median(self.rounds, lambda one: one.streamed.forward_bytes / one.streamed.moved_bytes)

    @property
    def bytes_per_param(self) -> float:
        return median(self.rounds, lambda one: one.streamed.moved_bytes) / self.job.n

    @property
    def wait_share(self) -> float:
        return median(self.rounds, lambda one: one.streamed.wait_s / one.streamed.seconds)

    def part_s(self, name: str) -> float:
        return median(self.rounds, lambda one: one.streamed.parts[name])


@dataclass(frozen=True)
class Report:
    """hardware: and versions."""

    results: list[Result]
    hardware: str


def check_place(path: Path, job: Job) -> None:
    """Whether RAM and disk have room. Writes nothing. Raises: PathError, BudgetError."""
    bench_step.require_directory(path)
    most = _transfers(job)
    buffers = 2 * max(EACH_WAY) * most.length
    # Resident: built in fp32, states, parameters, gradients; streamed: states, parameters, gradients, once.
    bench_step.require_room(path, job.n, ram=20 * job.n + job.cpu_memory + buffers, disk=16 * job.n + most.nbytes // 2)


def measure(job: Job, tokens: Sequence[int], path: Path, rounds: int, console: Console) -> Report:
    """Runs both with every number of tokens, in a folder in `path` that goes at the end, however it ends.

    Raises: PathError, TierIOError.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(bench_step.folder_in(path))
        disk = stack.enter_context(closing(Disk(folder, _transfers(job))))
        tick = stack.enter_context(progress(console, "bench step", len(tokens) * (rounds + 1)))
        streamed = stack.enter_context(closing(Subject(job, folder / "swap")))
        resident = stack.enter_context(closing(Subject(job, None)))
        stats = streamed.optimizer.stats()
        shown = hardware(stats["threads"], stats["kernel"], f", {stats['io_engine']}")
        results = []
        for count in tokens:
            sequence = min(count, SEQUENCE)
            text = torch.arange(count).remainder(VOCABULARY).view(-1, sequence)
            found = []
            for number in range(rounds + 1):
                found.append(_round(job, streamed, resident, disk, text, streamed_first=number % 2 == 1))
                tick(f"{count} tokens: {f'round {number}/{rounds}' if number else 'warm'}")
            peak = int(streamed.optimizer.stats()["peak_cpu_bytes"])
            results.append(Result(job, count, found[1:], peak))
        return Report(results, shown)


def _transfers(job: Job) -> Transfers:
    """As large as a chunk's states, and as many as hold all of them."""
    chunk = job.tuning.chunk
    assert isinstance(chunk, int)
    return Transfers(-(-4 * job.n // chunk), 3 * chunk + PAGE_BYTES)


def _round(job: Job, streamed: Subject, resident: Subject, disk: Disk, text: Tensor, *, streamed_first: bool) -> Round:
    other = None if streamed_first else resident.run(text)
    transfers = _transfers(job)
    # A drive drifts within seconds: what it takes before and after.
    before = disk.run(transfers, EACH_WAY[1])
    one = streamed.run(text)
    disk_s = (before + disk.run(transfers, EACH_WAY[1])) / 2
    other = resident.run(text) if other is None else other
    return Round(one, other, disk_s * one.moved_bytes / transfers.nbytes)
