"""Python's share of a step, by chunk: `python bench/chunks.py [--counts 500,8000] [--save]`.

Chunks of 64 parameters leave nothing but overhead: leases, queues, kernel calls, transfers of a few pages. CPU time is
that of all threads of the process, so that others on the machine disturb it little.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import BETAS, EPS, LR, WEIGHT_DECAY
from bench.report import Folder, Json, Out, Report, Rounds, Save, Table, judged, note, run, scratch
from offload import native
from offload.devices.copies import HostCopier
from offload.grads.local import LocalGradients, regions
from offload.io.select import open_engine
from offload.layout import ParamSpec, build
from offload.optim.chunk_work import StepKey
from offload.optim.late import LateSteps
from offload.optim.new_params import new_parameters
from offload.optim.rule import Progress
from offload.optim.rules.adam import AdamRule
from offload.optim.step import Step
from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.profiling import Timeline
from offload.ranks.communicator import SingleProcess
from offload.regions import total_bytes
from offload.run import Memory, Run
from offload.storage.arena import Arena, Reserved
from offload.storage.chunk_cache import Store
from offload.storage.param_store import ResidentParams
from offload.storage.slot_map import ChunkKind, SlotMap
from offload.storage.swap_file import Stripes
from offload.storage.swap_format import state_slot_arrays
from offload.tiers import CPU

NUMEL = 64
"""Parameters of a chunk."""
BUFFERS = 8
LEAST_CHUNKS = 8_000
"""Of a round: its steps have at least so many together."""
GROUP = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": True}

ABOUT = f"""\
A step over chunks of {NUMEL} parameters, one thread, in microseconds a chunk, the least of the rounds. `resident`: all
states in RAM; `streamed`: all of them read and written, {BUFFERS} buffers. `user`: CPU time of all threads outside the
system's kernel, which is Python's; `system`: that within, for transfers and wake-ups; `wall`: elapsed.
"""
TARGET_US = 35.0


@dataclass(frozen=True)
class Result:
    """Microseconds for each chunk, by round."""

    name: str
    count: int
    rounds: Sequence[tuple[float, float, float]]

    @property
    def least(self) -> tuple[float, float, float]:
        """The least of all rounds: user, system and wall-clock time."""
        user, system, wall = (min(values) for values in zip(*self.rounds, strict=True))
        return user, system, wall

    def row(self) -> tuple[str, ...]:
        return (f"{self.name}, {self.count:,} chunks", *(f"{value:.1f}" for value in self.least))


@contextmanager
def step_over(count: int, folder: Path | None) -> Iterator[Step]:
    """A step over `count` chunks. Args: folder: where all states are streamed from; None: they are in RAM."""
    layout = build([ParamSpec("p", count * NUMEL, "", torch.bfloat16, 0)], NUMEL)
    slot_arrays = state_slot_arrays(layout, split_master=False)
    choice = decide(Options(tier="cpu"), Situation(layout.numel, 0))
    with ExitStack() as stack:
        copier = HostCopier()
        kept = count if folder is None else BUFFERS
        gradients_of = regions(layout, choice.grads, in_place=True)
        size = kept * slot_arrays[0].nbytes + total_bytes(gradients_of, CPU)
        arena = stack.enter_context(closing(Arena(size, copier)))
        buffers = [arena.carve(slot_arrays[0].nbytes) for _ in range(kept)]
        kernels = stack.enter_context(closing(native.load(1)))
        memory = Memory(arena, None, Reserved(gradients_of, {CPU: arena}), copier, copier)
        work = Run(choice.commits, (), layout, memory, kernels, SingleProcess(), Timeline())
        slots = None
        if folder is not None:
            engine = stack.enter_context(closing(open_engine("auto", [folder])))
            engine.register(arena.memory)
            wanted = SlotMap({ChunkKind.STATES: slot_arrays})
            stripes = stack.enter_context(closing(Stripes(engine, [folder / "swap"], [1.0], wanted)))
            slots = stripes.of(ChunkKind.STATES)
        resident, passing = (dict(enumerate(buffers)), []) if folder is None else ({}, buffers)
        store = stack.enter_context(closing(Store(slot_arrays, resident, passing, slots, work.timeline, work.health)))
        gradients = stack.enter_context(closing(LocalGradients(work, choice.grads)))
        flats = [torch.zeros(flat.numel, dtype=flat.dtype) for flat in layout.flats]
        rules, params = [AdamRule()], ResidentParams(layout, flats)
        new_params, late = new_parameters(work, params, flats, gradients), LateSteps(work, rules, store, params)
        yield stack.enter_context(closing(Step(work, choice.states, rules, store, gradients, new_params, late)))


def measure(name: str, count: int, folder: Path | None, rounds: int) -> Result:
    """Measures `rounds` rounds, after one that warms up."""
    note(f"{name}, {count} chunks: {rounds} rounds")
    steps, done = max(1, LEAST_CHUNKS // count), 0
    found = []
    with step_over(count, folder) as step:
        for _ in range(1 + rounds):
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            for _ in range(steps):
                done += 1
                step.begin(done, {0: StepKey(0, Progress(done - 1))}, [GROUP], 1.0, [0])
                step.apply(0)
            after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
            spent = (after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, wall)
            user, system, wall = (1e6 * seconds / (steps * count) for seconds in spent)
            found.append((user, system, wall))
    return Result(name, count, found[1:])


def main(
    counts: Annotated[str, typer.Option(help="Numbers of chunks.")] = "500,8000",
    rounds: Rounds = 5,
    path: Folder = Path(),
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Measure and print the table."""
    results = []
    with scratch(path) as folder:
        for count in (int(count) for count in counts.split(",")):
            results.append(measure("resident", count, None, rounds))
            (own := folder / str(count)).mkdir()
            results.append(measure("streamed", count, own, rounds))
    Report(
        name="chunks",
        title="Python by chunk",
        about=ABOUT,
        tables=[Table(("states", "user", "system", "wall"), [result.row() for result in results])],
        data={"runs": [{"name": one.name, "chunks": one.count, "rounds": one.rounds} for one in results]},
        remarks=[judged(f"user, {one.name}, {one.count:,} chunks", one.least[0], TARGET_US) for one in results],
    ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
