"""Whether a run fits, and how long its step takes: computed from a plan and a few rates, and measured by nobody."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from offload.grads.local import UNITS_LEAVING
from offload.layout import Layout
from offload.planner.activations import Waiting
from offload.planner.explain import Planned
from offload.planner.placement import Placement
from offload.sizes import MIB
from offload.tiers import DEVICE

LOGIT_BYTES = 12
"""What a logit takes in the backward of a cross entropy in fp32: itself in 16 bits, log-softmax, its gradient, and that
in 16 bits (2 + 4 + 4 + 2)."""
CONTEXT_BYTES = 600 * MIB
"""Of a card's memory that CUDA and the libraries of its kernels take before anything is computed. Assumed."""

COMMUNICATOR_BYTES = 256 * MIB
"""Of a card's memory that a communicator of NCCL takes. Assumed."""
COMMUNICATORS = 2
"""Of a run with several ranks: of those that share gradients, and of those that share parameters."""


def leaving_bytes(unit_bytes: Iterable[int], *, alone: bool) -> int:
    """How many bytes of gradients are on the device at once.

    They are of the unit whose backward runs, and of those before it that still leave.

    Args:
        unit_bytes: of the gradients of each unit.
        alone: whether one rank trains the model. Several ranks have buffers for gradients, which the plan counts.
    """
    return sum(heapq.nlargest(1 + UNITS_LEAVING if alone else 1, unit_bytes))


@dataclass(frozen=True)
class Computing:
    """What a micro-batch takes on the device beside the plan.

    Attributes:
        activation_bytes: activations that wait on the device; with an activation tier, what the recomputed unit saves.
        output_bytes: the logits, their loss and their gradients.
        backward_bytes: what the peak of activations and their gradients, in the backward of units, takes beyond both:
            the logits are gone by then. 0 where that is unknown.
    """

    activation_bytes: int
    output_bytes: int
    backward_bytes: int

    @classmethod
    def of(cls, waiting: Waiting, units: int, *, has_tier: bool, outputs: int | None = None) -> Computing:
        """Computes it from what was measured.

        Args:
            waiting: what waits for the backward.
            units: how many units the model has.
            has_tier: whether there is an activation tier.
            outputs: bytes that stand in place of the logits, their loss and their gradients.
        """
        kept, peak = waiting.saved_bytes, waiting.peak_bytes
        if has_tier:
            kept, peak = ceil(kept / max(units, 1)), waiting.peak_bytes_with_tier
        outputs = LOGIT_BYTES * waiting.output_numel if outputs is None else outputs
        return cls(kept, outputs, 0 if peak is None else max(peak - kept - outputs, 0))

    @property
    def nbytes(self) -> int:
        return self.activation_bytes + self.output_bytes + self.backward_bytes


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        trained: elements of trained parameters.
        frozen: elements of frozen parameters.
        tokens: of a micro-batch.
        recomputes: whether forwards run twice.
    """

    trained: int
    frozen: int
    tokens: int
    recomputes: bool

    @property
    def forward_flops(self) -> float:
        """FLOP of the forward of one micro-batch.

        That is 2 for each parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1).
        """
        return 2.0 * self.tokens * (self.trained + self.frozen)

    @property
    def backward_flops(self) -> float:
        """FLOP of its backward: twice those of the forward, but as many for frozen parameters."""
        return 2.0 * self.tokens * (2 * self.trained + self.frozen)

    @property
    def flops(self) -> float:
        """FLOP of one micro-batch."""
        return (2 if self.recomputes else 1) * self.forward_flops + self.backward_flops


@dataclass(frozen=True)
class StepTime:
    """How long a step takes.

    Attributes:
        compute: seconds, if nothing else took time.
        update: seconds of the optimizer's kernels, likewise; 0: unknown.
        disk: seconds, likewise.
        step: seconds of all together.
        waits_for: what the step takes its time from: "compute", "update" or "disk".
        hiding_tokens: the tokens of a micro-batch from which on the disk costs no time.
    """

    compute: float
    update: float
    disk: float
    step: float
    waits_for: str
    hiding_tokens: int


def step_time(
    planned: Planned, work: Work, *, flops: float | None, disk_bytes_per_s: float, elements_per_s: float | None = None
) -> StepTime:
    """How long a step of a plan takes; see `time_of`.

    Raises:
        BudgetError: if the plan does not fit.
    """
    rates = {"flops": flops, "disk_bytes_per_s": disk_bytes_per_s, "elements_per_s": elements_per_s}
    return time_of(planned.layout, planned.place(), work, **rates)  # type: ignore[arg-type]


def time_of(
    layout: Layout,
    placement: Placement,
    work: Work,
    *,
    flops: float | None,
    disk_bytes_per_s: float,
    elements_per_s: float | None,
) -> StepTime:
    """How long a step takes if nothing but compute, the optimizer's kernels and the disk took time.

    Parameters and gradients move beside all of the compute. States move, and are stepped, between the last gradient and
    their unit's next forward, so only the first forward of a step hides that. Where steps are tried, and all trials are
    kept, the last backward does so, too: what is not tried leaves a forward its share. Where a model computes on the
    CPU, the kernels have the cores that it computes with.

    Args:
        layout: of all parameters that are trained or stream.
        placement: what is where.
        work: what the step computes.
        flops: FLOP/s that are achieved; None: unknown, and compute takes no time.
        disk_bytes_per_s: reads and writes together.
        elements_per_s: that the optimizer steps in RAM; None: unknown, and that takes no time.
    """
    choice = placement.choice
    micro_batches = choice.grads.micro_batches
    disk = moved_bytes(placement) / disk_bytes_per_s
    states = 2 * sum(placement.states.streamed) / disk_bytes_per_s
    update = 0.0 if elements_per_s is None else stepped_in_ram(layout, placement) / elements_per_s
    if flops is None:
        return StepTime(0.0, update, disk, disk, "disk", 0)
    compute, forward = micro_batches * work.flops / flops, work.forward_flops / flops
    beside = work.flops / flops if choice.states.tries_steps else forward
    enough = max(disk / compute, states / beside) * work.tokens
    shared = update if placement.is_direct else 0.0
    ends = {
        "compute": compute + shared,
        "update": compute - beside + update,
        "disk": max(disk, compute - beside + states),
    }
    longest = max(ends, key=lambda name: ends[name])
    waits_for = "update" if longest == "compute" and shared > compute else longest
    return StepTime(compute, update, disk, ends[longest], waits_for, ceil(enough))


def stepped_in_ram(layout: Layout, placement: Placement) -> int:
    """How many elements a rank steps by the CPU's kernels."""
    if placement.choice.states.tier == DEVICE:
        return 0
    on_device = set(placement.states.on_device)
    return sum(chunk.numel for chunk in layout.chunks if chunk.index not in on_device)


def moved_bytes(placement: Placement) -> int:
    """How many bytes the disk reads and writes in a step."""
    return placement.read_bytes + placement.written_bytes
