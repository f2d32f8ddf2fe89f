"""How long the step of an optimizer takes that multiplies matrices. Others take next to nothing beside the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from offload.sizes import MASTER_ITEM_BYTES

if TYPE_CHECKING:
    from offload.planner.explain import Planned

MEASURED = (1024, 1024)
"""The matrix whose step is measured."""
LINK_GB_PER_S = 25.0
"""What is assumed of the link between RAM and a GPU, each way: PCIe 4.0 with 16 lanes."""


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Floating-point operations of a step of torch's Muon on a matrix.

    In each of five rounds x, with at most as many rows as columns, is multiplied by its transpose, the product by
    itself, and x by what comes out.
    """
    rows, columns = sorted(shape)
    return 5.0 * (2 * rows * rows * columns + 2 * rows**3 + 2 * rows * rows * columns)


FLOPS: dict[str, Callable[[Sequence[int]], float]] = {"muon": newton_schulz_flops}
"""Of a step of a matrix, by the name of the optimizer, as --optimizer has it."""


def update_figures(planned: Planned, optimizer: str, *, on_gpu: bool, flops_per_s: float | None) -> dict[str, Any]:
    """What a step of the optimizer takes of a rank.

    Args:
        planned: the plan.
        optimizer: the name of the optimizer.
        on_gpu: whether matrices are stepped on a GPU.
        flops_per_s: what a GPU achieves; None: it is unknown.

    Returns:
        Nothing if it multiplies no matrices. Else "update_flops"; "update_link_bytes" over the link to a GPU, both ways
        together, 0 without; "update_flops_per_s", measured here if there is no GPU; and "update_seconds", of whichever
        of the two takes longer. The last two are None if they are unknown.
    """
    count = FLOPS.get(optimizer)
    if count is None:
        return {}
    specs = planned.layout.specs
    wholes = [(specs[piece.param], piece.numel) for chunk in planned.layout.chunks for piece in chunk.pieces]
    flops, up_bytes, down_bytes = 0.0, 0, 0
    for spec, numel in wholes:
        if spec.whole is not None:
            flops += count(spec.whole.shape)
            states = MASTER_ITEM_BYTES * (numel + sum(spec.whole.numels(spec.states)))
            up_bytes += states + spec.dtype.itemsize * numel  # with the gradient
            down_bytes += states
    rate = flops_per_s if on_gpu else measured_rate(optimizer, count)
    seconds = None if rate is None else flops / rate
    if on_gpu and seconds is not None:
        seconds = max(seconds, up_bytes / (1e9 * LINK_GB_PER_S))
    return {
        "update_flops": flops,
        "update_link_bytes": up_bytes + down_bytes if on_gpu else 0,
        "update_flops_per_s": rate,
        "update_seconds": seconds,
    }


def measured_rate(optimizer: str, count: Callable[[Sequence[int]], float]) -> float:
    """The FLOP/s of the fastest of three steps of one matrix on this machine's CPU, with torch's threads.

    Args:
        optimizer: the name of the optimizer.
        count: its floating-point operations.
    """
    import torch
    from torch import nn

    from offload.cli.plan_models import optimizers

    kind, options = optimizers()[optimizer]
    made = torch.Generator("cpu").manual_seed(0)
    matrix = nn.Parameter(torch.randn(MEASURED, generator=made, device="cpu"))
    matrix.grad = torch.randn(MEASURED, generator=made, device="cpu")
    stepped = kind([matrix], **options)
    stepped.step()  # which makes its states
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        stepped.step()
        taken.append(time.perf_counter() - start)
    return count(MEASURED) / min(taken)  # what else the machine does makes steps slower only
