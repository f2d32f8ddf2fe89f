"""How gradients travel between ranks: in which buckets and dtypes, and in how much memory. For the plan and the run."""

from __future__ import annotations

import torch

from offload.dist.partition import cut_buckets, splits_of
from offload.grads import shards as waiting
from offload.layout import Layout
from offload.storage.arena import carved_bytes

BUFFERS = 3
"""Buckets under way at a time: one is filled while one travels and one is averaged."""


class Reduction:
    """See [Note: the way of a gradient over ranks] in reduction.py.

    Args: direct: whether the model's device is the CPU; stored: whether averages go to slots.
    Attributes: sums_locally: micro-batches are summed before they are sent; rounds: how often each bucket is; wire,
    held: by flat, the dtypes of what travels and of what stays; full_bytes: of a buffer of what is sent, and of what
    comes; part_bytes: of averages beside where they belong; landing_bytes: of these, copied from the device.
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        accumulation: int,
        bucket_bytes: int,
        *,
        direct: bool = True,
        stored: bool = False,
    ) -> None:
        self.sums_locally = stage == 1 and accumulation > 1
        self.rounds = 1 if self.sums_locally else accumulation
        dtypes = [flat.dtype for flat in layout.flats]
        self.wire = [torch.float32 if self.sums_locally else dtype for dtype in dtypes]
        self.held = [torch.float32 if accumulation > 1 else dtype for dtype in dtypes]
        self.buckets = cut_buckets(layout, splits_of(layout, layout.ranks), bucket_bytes // 4)
        self.full_bytes = max((layout.ranks * b.numel * self.wire[b.flat].itemsize for b in self.buckets), default=0)
        averages = (b.numel * self.held[b.flat].itemsize for b in self.buckets)
        is_put = self.rounds > 1 or stored
        self.part_bytes = max(averages, default=0) if is_put or not direct else 0
        self.landing_bytes = self.part_bytes if is_put and not direct else 0
        self.buffers = min(BUFFERS, len(self.buckets))
        self.whole = [4 * flat.numel for flat in layout.flats] if self.sums_locally else []
        self._waiting = waiting.arena_bytes(layout, self.held, stored=stored)

    @property
    def waiting_bytes(self) -> int:
        """What the sink takes where gradients wait."""
        return self._waiting + self.buffers * carved_bytes(self.landing_bytes)

    @property
    def travelling_bytes(self) -> int:
        """What it takes of the device's memory, which may be the same."""
        buffer = 2 * carved_bytes(self.full_bytes) + carved_bytes(self.part_bytes)
        return sum(map(carved_bytes, self.whole)) + self.buffers * buffer
