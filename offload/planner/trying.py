"""Whether steps are tried in backward where the user leaves that open: `Tuning(speculate="auto")`.

[Note: what trials gain]
Without trials the states move, and are stepped, beside the first forward of a step; with them beside its last backward,
too (verdict.py has the formula). They gain most where the disk takes as long as all of the compute, and nothing where
the compute takes far longer. The RAM for new parameters is taken from states that would stay there, so more bytes move:
where the disk takes far longer than the compute, that is lost. Where a model computes on the CPU the kernels take its
cores, from the forward or from the backward; the formula counts them as compute either way.

How many tokens a step will have is not known when this is decided. So steps are tried where the formula gains
LEAST_GAIN at some number of tokens, and loses nothing at any with which a step computes LEAST_COMPUTE of the disk's
time or longer. With fewer tokens a run waits for the disk, whatever is done. The rates are what `offload probe`
measured. Where one is not known, nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from offload.choices import Choice
from offload.io import select
from offload.layout import Layout
from offload.planner import rates
from offload.planner.placement import Placement
from offload.planner.verdict import StepTime, Work, time_of

LEAST_GAIN = 1.05
"""Times as fast: less is not worth a third slot a chunk."""
MOST_LOST = 0.99
LEAST_COMPUTE = 0.25
"""Of the seconds that the disk takes without trials."""
TOKENS = tuple(1 << power for power in range(25))
"""Of a micro-batch: each of these is looked at."""
OF_RULES = {"Adam": "adamw"}
"""What `offload probe` calls the optimizers whose steps it has measured, by the rule that makes them."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Speed(NamedTuple):
    """How fast a machine is.

    Attributes:
        flops: FLOP/s of products of matrices.
        disk_bytes_per_s: reads and writes of all directories together.
        elements_per_s: that the optimizer steps in RAM; None: unknown, and that takes no time.
    """

    flops: float
    disk_bytes_per_s: float
    elements_per_s: float | None

    @classmethod
    def remembered(
        cls, device: str, dtype: torch.dtype, step: str, paths: Sequence[Path], *, direct: bool
    ) -> Speed | None:
        """What was measured here; None: not all of it was.

        Args:
            device: that models train on, as `Rates.device`.
            dtype: in which they compute.
            step: the optimizer, as `rates.step_name` calls it.
            paths: the directories of the swap files.
            direct: whether models train on the CPU: then the optimizer's rate has to be known, too.
        """
        disks = {select.file_system_of(path): select.recall(path) for path in paths}
        disk = [0.0 if known is None else known.mixed_bytes_per_s for known in disks.values()]
        found = rates.recall(device)
        if found is None or not all(disk) or DTYPES[dtype] not in found.products:
            return None
        steps = found.steps.get(step)
        if steps is None and direct:
            return None
        return cls(found.products[DTYPES[dtype]].median, sum(disk), None if steps is None else steps.median)


def with_trials(choice: Choice) -> Choice:
    """The same choice with steps that are tried in backward. Then no state is on the device beside others elsewhere."""
    return replace(choice, states=replace(choice.states, tries_steps=True, shares=False))


def gain(layout: Layout, without: Placement, tried: Placement, work: Work, speed: Speed) -> float:
    """How many times as fast a step is where it is tried.

    Args:
        layout: of all parameters that are trained or stream.
        without: what is where if steps are not tried.
        tried: the same if they are.
        work: what a step computes.
        speed: of the machine.
    """
    return _time(layout, without, work, speed).step / _time(layout, tried, work, speed).step


def is_worth_it(layout: Layout, without: Placement, tried: Placement, work: Work, speed: Speed) -> bool:
    """Whether trials gain enough at some number of tokens, and lose nothing; see [Note: what trials gain].

    Args:
        layout: of all parameters that are trained or stream.
        without: what is where if steps are not tried.
        tried: the same if they are.
        work: what a step computes, whatever its tokens.
        speed: of the machine.
    """
    if not without.states.streamed:
        return False
    gains = []
    for tokens in TOKENS:
        some = replace(work, tokens=tokens)
        time = _time(layout, without, some, speed)
        if time.compute >= LEAST_COMPUTE * time.disk:
            gains.append(gain(layout, without, tried, some, speed))
    return bool(gains) and max(gains) >= LEAST_GAIN and min(gains) >= MOST_LOST


def _time(layout: Layout, placement: Placement, work: Work, speed: Speed) -> StepTime:
    return time_of(
        layout,
        placement,
        work,
        flops=speed.flops,
        disk_bytes_per_s=speed.disk_bytes_per_s,
        elements_per_s=speed.elements_per_s,
    )
