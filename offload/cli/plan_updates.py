"""How long the step of an optimizer takes that multiplies matrices. Others take next to nothing beside the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from offload.optim.flops import matrix_work

if TYPE_CHECKING:
    from offload.optim.rule import Rule
    from offload.planner.explain import Planned

MEASURED = (1024, 1024)
"""The largest matrix whose step is measured. Larger ones are taken to have its rate."""
MEASURED_S = 0.05
"""For about so many seconds a matrix is stepped, and at least three times."""


def update_figures(
    planned: Planned,
    optimizer: str,
    *,
    on_gpu: bool,
    flops_per_s: float | None,
    link: tuple[float, float, str],
    measures: bool = True,
) -> dict[str, Any]:
    """What a step of the optimizer takes of a rank.

    Args:
        planned: the plan.
        optimizer: the name of the optimizer.
        on_gpu: whether matrices are stepped on a GPU.
        flops_per_s: what the device achieves; None: it is unknown.
        link: bytes a second to the GPU and back, and where they are from.
        measures: whether what a CPU does may be measured here, since it is this one.

    Returns:
        Nothing if it multiplies no matrices. Else "update_flops"; "update_link_bytes" over the link to a GPU, both ways
        together, 0 without; "update_flops_per_s"; and "update_seconds", on a GPU of whichever of the two takes longer.
        If there is no GPU, the last two are measured here; else they are None if they are unknown.
    """
    flops, up_bytes, down_bytes, shapes = matrix_work(planned.layout.trained, planned.layout.chunks)
    if not flops:
        return {}
    up, down, link_from = link
    if on_gpu or not measures:
        rate = flops_per_s
        over_link = max(up_bytes / up, down_bytes / down) if on_gpu else 0.0
        seconds = None if rate is None else max(flops / rate, over_link)
    else:
        seconds = measured_seconds(optimizer, shapes)
        rate = flops / seconds
    return {
        "update_flops": flops,
        "update_link_bytes": up_bytes + down_bytes if on_gpu else 0,
        "update_link": {"up_gb_per_s": up / 1e9, "down_gb_per_s": down / 1e9, "from": link_from},
        "update_measured": measures and not on_gpu,
        "update_flops_per_s": rate,
        "update_seconds": seconds,
    }


def measured_seconds(optimizer: str, shapes: Mapping[tuple[int, ...], int]) -> float:
    """What the steps of matrices take on this machine's CPU, as a run makes them, with torch's threads.

    One matrix of each shape is stepped. Those that take more operations than one of `MEASURED` are not: they are taken
    to have the rate of that one.

    Args:
        optimizer: the name of the optimizer.
        shapes: how many matrices there are of each shape.
    """
    import torch
    from torch import nn

    from offload.cli.plan_models import optimizers
    from offload.optim.adopt import rules_of

    kind, options = optimizers()[optimizer]
    given = kind([nn.Parameter(torch.zeros(2, 2, device="cpu"))], **options)
    (rule,) = rules_of([given])
    group = {name: value for name, value in given.param_groups[0].items() if name != "params"}
    seconds_of = cache(partial(_seconds_of, rule, group))
    most = rule.flops(MEASURED)
    seconds = 0.0
    for shape, count in shapes.items():
        larger = max(rule.flops(shape) / most, 1.0)
        seconds += count * larger * seconds_of(MEASURED if larger > 1 else shape)
    return seconds


def _seconds_of(rule: Rule, group: Mapping[str, Any], shape: tuple[int, ...]) -> float:
    """The fastest of some steps of one matrix: what else the machine does makes steps slower only."""
    import torch

    from offload import native
    from offload.layout import Whole, blocks_of
    from offload.optim.rule import SegmentMemory, Span

    kept, numel = rule.kept(shape), math.prod(shape)
    made = torch.Generator("cpu").manual_seed(0)
    arrays = [torch.zeros(-(-numel // block), device="cpu") for block in blocks_of(kept.states)]
    grad, out = (torch.randn(numel, generator=made, device="cpu").bfloat16() for _ in range(2))
    span = Span(0, numel, Whole(shape, small=kept.small))
    kernels = native.load(1)
    bound = rule.bind(kernels, SegmentMemory(arrays, grad, out, [span]))
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < MEASURED_S:
        start = time.perf_counter()
        kernels.run([bound(rule.scalars(group, rule.initial, 1.0))])
        taken.append(time.perf_counter() - start)
    return min(taken)
