"""What the parts of a run share, made by hand: for unit tests of parts, without a model and without files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from offload import native
from offload.choices import Choice
from offload.devices.copies import Copier, HostCopier
from offload.layout import Layout, ParamSpec, build
from offload.options import Options
from offload.planner.decide import Situation, decide
from offload.planner.placement import Needs
from offload.profiling import Timeline
from offload.ranks.communicator import Communicator, SingleProcess, Work, average
from offload.run import Memory, Run
from offload.sizes import MIB
from offload.storage.arena import Arena, Reserved
from offload.storage.chunk_cache import Store
from offload.storage.swap_format import SlotArrays
from offload.tiers import CPU


class Done(Work):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Twins(SingleProcess):
    """Rank 0 of two; the other one always sends what this one sends."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        own = full.view(2, -1)[0]
        average(torch.stack([own, own]), out)
        return Done()

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, values])

    def exact_sum(self, values: Iterable[float]) -> float:
        return Communicator.exact_sum(self, values)


def layout_of(
    numels: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    chunk_numel: int = 1 << 16,
    ranks: int = 1,
    rank: int = 0,
    units: Sequence[str] = (),
) -> Layout:
    """Parameters p0, p1, ... Args: units: the unit of each; all are of one by default."""
    names = units or [""] * len(numels)
    specs = [
        ParamSpec(f"p{number}", numel, unit, dtype, 0)
        for number, (numel, unit) in enumerate(zip(numels, names, strict=True))
    ]
    return build(specs, chunk_numel, ranks=ranks, rank=rank)


@dataclass(frozen=True)
class RunByHand(Run):
    """Attributes: choice: of all parts."""

    choice: Choice = field(default_factory=lambda: decide(Options(), Situation(1, 0)))


def run_of(layout: Layout, comm: Communicator | None = None, copier: Copier | None = None, **options: Any) -> RunByHand:
    """Args: options: of `OffloadZero`."""
    comm, copier = comm or SingleProcess(), copier or HostCopier()
    choice = decide(Options(**options), Situation(1, 0, ranks=layout.ranks))
    arena = Arena(64 * MIB, copier, at_once=False)
    regions = (replace(region, tier=CPU) for region in Needs(layout, choice, copier.direct).regions)
    commits = choice.commits
    memory = Memory(arena, None, Reserved(regions, {CPU: arena}), copier, copier)
    return RunByHand(commits, commits.paths, layout, memory, native.load(1), comm, Timeline(), choice=choice)


def store_in_ram(run: Run, slot_arrays: Sequence[SlotArrays]) -> Store:
    """All chunks are kept, so it has no swap file."""
    memory = {number: run.memory.ram.carve(slot.nbytes) for number, slot in enumerate(slot_arrays)}
    return Store(slot_arrays, memory, (), None, run.timeline, run.health)
