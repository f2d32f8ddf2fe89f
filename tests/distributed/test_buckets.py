"""Gradients through buckets and the communicator, as stages 2 and 3 reduce them."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from offload.dist import torch_distributed as comm
from offload.dist.partition import Bucket, Buckets, cut_buckets, splits_of
from offload.layout import Layout, ParamSpec, build
from tests.distributed.test_comm import KINDS, gradients
from tests.native.bits import assert_same_bits
from tests.support.communicators import Delayed
from tests.support.ranks import Worlds

NUMELS = (1000, 1, 4097, 64, 0, 333, 2500)


def _layout() -> Layout:
    return build(
        [ParamSpec(f"p{n}", numel, f"block{n // 3}", torch.bfloat16, 0) for n, numel in enumerate(NUMELS)], 1 << 20
    )


def _gets_no_gradient(param: int, rank: int) -> bool:
    return (param, rank) in ((0, 1), (5, 0), (5, 1), (5, 2), (5, 3))


def _gradient(param: int, rank: int) -> Tensor:
    if _gets_no_gradient(param, rank):
        return torch.zeros(NUMELS[param], dtype=torch.bfloat16)
    return gradients(rank, sum(NUMELS), torch.bfloat16).split(NUMELS)[param]


def _reduced(kind: str, bucket_numel: int, seed: int) -> list[Tensor]:
    """This rank's partitions of the averaged gradients, which arrive in an order of the rank's own."""
    group = KINDS[kind](comm.connect())
    layout = _layout()
    splits = splits_of(layout, group.size)
    buckets = Buckets(cut_buckets(layout, splits, bucket_numel))
    buffers = [torch.full((group.size * b.numel,), float("nan"), dtype=torch.bfloat16) for b in buckets.buckets]
    found = [torch.zeros(cut.shard_numel) for cut in splits]
    works = []
    arrived: set[int] = set()

    def launch(bucket: Bucket) -> None:
        buffer = buffers[bucket.index]
        for start, stop in bucket.holes:
            buffer[start:stop] = 0
        for piece in bucket.pieces:
            if piece.param not in arrived:
                buffer[piece.chunk_offset : piece.chunk_offset + piece.numel] = 0
        out = found[bucket.flat][bucket.start : bucket.start + bucket.numel]
        works.append(group.reduce_scatter(buffer, out))

    params = [param for param in range(len(NUMELS)) if not _gets_no_gradient(param, group.rank)]
    random.Random(seed + group.rank).shuffle(params)
    for param in params:
        grad = _gradient(param, group.rank)
        for bucket in buckets.buckets:
            for piece in bucket.pieces:
                if piece.param == param:
                    part = grad[piece.param_offset : piece.param_offset + piece.numel]
                    buffers[bucket.index][piece.chunk_offset : piece.chunk_offset + piece.numel] = part
        arrived.add(param)
        for bucket in buckets.ready(param):
            launch(bucket)
    for bucket in buckets.flush():
        launch(bucket)
    for work in works:
        work.wait()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "late"])
def test_partitions_have_the_same_bits_at_any_bucket_size_and_order(worlds: Worlds, size: int, kind: str) -> None:
    layout = _layout()
    wanted = [torch.zeros(cut.padded_numel) for cut in splits_of(layout, size)]
    for param, numel in enumerate(NUMELS):
        total = _gradient(param, 0).float()
        for rank in range(1, size):
            total += _gradient(param, rank).float()
        flat, offset = layout.locations[param]
        wanted[flat][offset : offset + numel] = total / torch.tensor([float(size)])
    for seed, bucket_numel in enumerate((1, 1000, 1 << 20)):
        by_rank = worlds(size).run(_reduced, kind, bucket_numel, seed)
        for flat, parts in enumerate(zip(*by_rank, strict=True)):
            assert_same_bits(torch.cat(parts), wanted[flat], f"flat {flat}, buckets of {bucket_numel}")


def _seconds(overlapped: bool, delay_s: float) -> float:
    """Of a backward that computes for a while after each of 6 buckets has left."""
    group = Delayed(comm.connect(), delay_s)
    group.barrier()
    began = time.monotonic()
    works = []
    for _ in range(6):
        works.append(group.reduce_scatter(torch.ones(1000 * group.size), torch.empty(1000)))
        if not overlapped:
            works[-1].wait()
        time.sleep(1.2 * delay_s)
    for work in works:
        work.wait()
    assert group.busy_s == pytest.approx(7 * delay_s)
    return time.monotonic() - began


def test_collectives_are_under_way_while_the_rank_computes(worlds: Worlds) -> None:
    """Compared with waiting for each at once: no absolute times, which depend on the machine."""
    delay_s = 0.05
    apart = max(worlds(2).run(_seconds, False, delay_s))
    overlapped = max(worlds(2).run(_seconds, True, delay_s))
    assert apart - overlapped > 0.8 * 5 * delay_s
