"""How gradients travel between ranks: in which buckets and dtypes, and in how much memory. For the plan and the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from offload.choices import GradChoice
from offload.grads import shards
from offload.layout import Layout
from offload.ranks.buckets import Bucket, cut_buckets
from offload.regions import Region
from offload.tiers import Tier

BUFFERS = 3
"""Buckets under way at a time: one is filled while one travels and one is averaged."""

SENT, RECEIVED, AVERAGES = "buckets that are sent", "buckets that are received", "averages of buckets"
COPIED, WHOLE = "averages from the device", "sums of whole gradients"
TRAVELLING = (SENT, RECEIVED, AVERAGES, WHOLE)
"""The regions in which gradients travel."""


class ReductionPlan:
    """How gradients are averaged; see [Note: averaging gradients over ranks] in reduce_scatter.py.

    Args:
        layout: of the trained parameters.
        choice: what was decided for the gradients, with a stage.
        direct: whether kernels can write where the model's gradients are.
        device_flats: see `Run`. No bucket has others, too.

    Attributes:
        sums_locally: whether micro-batches are summed before they are sent, not after.
        rounds: how often each bucket is sent in a step, as far as `accumulation` says.
        buckets: in the order in which they are sent.
        buffers: how many buckets have memory at once.
        full_bytes: of the buffer for what a rank sends, and of the one for what it receives.
        average_bytes: of the buffer for averages that cannot be written to where they wait; 0 if all can.
        copied_bytes: of the buffer in RAM for these, once they are copied from the device.
        whole_bytes: for each flat parameter, of the sums of its whole gradient; empty without `sums_locally`.
    """

    def __init__(self, layout: Layout, choice: GradChoice, *, direct: bool, device_flats: Collection[int] = ()) -> None:
        stage, accumulation, stored = choice.stage, choice.micro_batches, choice.tier.is_durable
        assert stage is not None
        self.sums_locally = stage == 1 and accumulation > 1
        self.rounds = 1 if self.sums_locally else accumulation
        self._layout = layout
        self._average_dtypes = shards.dtypes_of(layout, accumulation)
        self._device_flats = frozenset(device_flats)
        self.buckets = cut_buckets(layout, choice.bucket_bytes // 4, self._device_flats)
        self.buffers = min(BUFFERS, len(self.buckets))
        sent = (layout.ranks * bucket.numel * self.wire_of(bucket).itemsize for bucket in self.buckets)
        self.full_bytes = max(sent, default=0)
        there, others = ([one for one in self.buckets if self.is_on_device(one) is which] for which in (True, False))
        leaves, is_added = not direct, self.rounds > 1 or stored
        passing = [*(others if leaves or is_added else ()), *(there if self.rounds > 1 else ())]
        self.average_bytes = self._most_averaged(passing)
        self.copied_bytes = self._most_averaged(others) if is_added and leaves else 0
        self.whole_bytes = [4 * flat.numel for flat in layout.flats] if self.sums_locally else []
        self._shards = shards.regions(layout, choice, self._device_flats)
        self._memory = choice.tier.memory

    def is_on_device(self, bucket: Bucket) -> bool:
        """Whether the averages of a bucket wait on the device, and those of others do not."""
        return bucket.ranges[0].within.flat in self._device_flats

    def _most_averaged(self, buckets: Sequence[Bucket]) -> int:
        """The most bytes of the averages of one of these buckets."""
        return max((bucket.numel * self.average_dtype_of(bucket).itemsize for bucket in buckets), default=0)

    def wire_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype in which the gradients of a bucket travel."""
        return torch.float32 if self.sums_locally else self._layout.flats[bucket.ranges[0].within.flat].dtype

    def average_dtype_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype in which the averages of a bucket wait."""
        return self._average_dtypes[bucket.ranges[0].within.flat]

    def regions(self, communication: Tier) -> list[Region]:
        """What ReducedGradients reserves.

        Args:
            communication: the tier whose memory the buffers of the collectives are in.
        """
        of_buckets = ((SENT, self.full_bytes), (RECEIVED, self.full_bytes), (AVERAGES, self.average_bytes))
        return [
            *self._shards,
            *(Region(communication, WHOLE, nbytes, kind="grad") for nbytes in self.whole_bytes),
            *(Region(communication, what, nbytes, self.buffers, "grad") for what, nbytes in of_buckets),
            Region(self._memory, COPIED, self.copied_bytes, self.buffers, "grad"),
        ]
