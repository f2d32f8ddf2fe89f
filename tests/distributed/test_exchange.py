"""New parameters between ranks, which are threads here, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.devices.copies import copier_for
from offload.errors import RankError
from offload.layout import Chunk, Layout, ParamSpec, build
from offload.ranks.communicator import Communicator, SingleProcess, Work
from offload.ranks.exchange import EXCHANGED, FlatGather, ReplicaExchange, regions
from offload.ranks.gathers import Gathers
from offload.storage.chunk_cache import Use
from offload.storage.param_store import StreamedParams
from offload.storage.swap_format import param_slot_arrays
from offload.tiers import CPU
from tests.support.communicators import GoneWork, PendingWork
from tests.support.runs import run_of, store_in_ram
from tests.support.threads import Threads

NUMELS = (1000, 1, 4097, 64, 333)


def layout_of(ranks: int, rank: int, replicas: int = 1) -> Layout:
    """Two units of bf16, and one of fp32."""
    dtypes = [torch.bfloat16] * 4 + [torch.float32]
    specs = [ParamSpec(f"p{n}", numel, f"unit{n // 2}", dtypes[n], 0) for n, numel in enumerate(NUMELS)]
    return build(specs, 512, ranks=ranks, rank=rank, replicas=replicas)


def bits_of(layout: Layout, seed: int) -> list[np.ndarray]:
    """By flat, padding included: the bytes of its elements."""
    rng = np.random.default_rng(seed)
    sizes = [layout.padded_numel(flat.index) * flat.dtype.itemsize for flat in layout.flats]
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def part(bits: list[np.ndarray], layout: Layout, chunk: Chunk) -> np.ndarray:
    size = layout.flats[chunk.flat].dtype.itemsize
    return bits[chunk.flat][chunk.start * size : (chunk.start + chunk.numel) * size]


def gathers_of(layout: Layout, comm: Communicator, bucket_bytes: int) -> Gathers:
    memory = [torch.empty(region.nbytes, dtype=torch.uint8) for region in regions(layout, CPU, bucket_bytes)]
    return Gathers(comm, memory, copier_for(torch.device("cpu")))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 12_000, 1 << 20])
def test_each_rank_gets_the_shards_of_all_others(ranks: int, bucket_bytes: int) -> None:
    new = bits_of(layout_of(ranks, 0), 1)

    def gather(comm: Communicator) -> list[Tensor]:
        layout = layout_of(ranks, comm.rank)
        flats = [torch.zeros(len(bits), dtype=torch.uint8).view(layout.flats[n].dtype) for n, bits in enumerate(new)]
        for flat, bits in zip(flats, new, strict=True):
            each = len(bits) // ranks
            own = slice(comm.rank * each, (comm.rank + 1) * each)
            flat.view(torch.uint8)[own] = torch.from_numpy(bits[own])
        gathering = FlatGather(layout, flats, gathers_of(layout, comm, bucket_bytes), comm.rank)
        for flat in range(len(flats)):
            gathering.start(flat, 1)
        gathering.send_rest()
        for flat in reversed(range(len(flats))):
            gathering.finish(flat)
        return flats

    for flats in Threads(ranks).run(gather):
        for flat, bits in zip(flats, new, strict=True):
            assert np.array_equal(flat.view(torch.uint8).numpy(), bits)


def is_new(chunk: Chunk) -> bool:
    """Some chunks do not change in the step: first, middle and last ones of shards."""
    return (chunk.start // 64 + chunk.flat) % 3 != 0


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 3), (4, 2), (6, 3)])
def test_replicas_have_what_each_of_them_made(ranks: int, replicas: int) -> None:
    group = ranks // replicas
    old, new = bits_of(layout_of(ranks, 0), 1), bits_of(layout_of(ranks, 0), 2)

    def exchange(comm: Communicator, column: int) -> list[str]:
        """What is wrong on this rank."""
        layout = layout_of(ranks, comm.rank * group + column, replicas)
        run = run_of(layout, param_tier="cpu")
        store = store_in_ram(run, param_slot_arrays(layout))
        for chunk in layout.param_chunks:
            with store.lease(chunk.index, Use.OVERWRITE, step=0) as lease:
                lease.arrays[0].view(torch.uint8)[:] = torch.from_numpy(part(old, layout, chunk))
        updated: dict[int, np.ndarray] = {}

        def chunk_updated(chunk: Chunk, values: Tensor) -> None:
            updated[chunk.index] = values.view(torch.uint8).numpy().copy()

        (buffer,) = run.memory.take(EXCHANGED)
        params = StreamedParams(layout, store)
        params.chunk_updated = chunk_updated
        exchanging = ReplicaExchange(layout, params, buffer, comm)
        for flat in layout.flats:
            exchanging.begin()
            for chunk in layout.chunks:
                if chunk.flat == flat.index and is_new(chunk):
                    with params.lease(chunk.index, Use.OVERWRITE, step=1) as values:
                        values.view(torch.uint8)[:] = torch.from_numpy(part(new, layout, chunk))
                        exchanging.send(chunk, values, 1)
            exchanging.start(flat.index, 1)
        wrong = []
        for chunk in layout.param_chunks:
            expected = part(new if is_new(chunk) else old, layout, chunk)
            with store.lease(chunk.index, Use.READ, step=1) as lease:
                if not np.array_equal(lease.arrays[0].view(torch.uint8).numpy(), expected):
                    wrong.append(f"chunk {chunk}")
        expected_of = {copy.index: part(new if is_new(copy) else old, layout, copy) for copy in layout.stateless}
        wrong += [f"said of chunk {index}" for index in updated.keys() ^ expected_of.keys()]
        return wrong + [f"said of {n}" for n, bits in expected_of.items() if not np.array_equal(updated[n], bits)]

    for column in range(group):
        for wrong in Threads(replicas).run(lambda comm, column=column: exchange(comm, column)):
            assert not wrong


class Lost(SingleProcess):
    """Rank 0 of two, whose collectives never complete."""

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        return GoneWork()


class Noting(SingleProcess):
    """Rank 0 of two. Its works end when they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[PendingWork] = []

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        self.works.append(PendingWork())
        return self.works[-1]


def test_what_is_abandoned_has_ended_before_its_memory_is_used_again() -> None:
    layout, comm = layout_of(2, 0, replicas=2), Noting()
    flats = [torch.zeros(layout.padded_numel(flat.index), dtype=flat.dtype) for flat in layout.flats]
    gathering = FlatGather(layout, flats, gathers_of(layout, comm, 0), comm.rank)
    for flat in range(len(flats)):
        gathering.start(flat, 1)
    gathering.send_rest()
    gathering.abandon()
    assert len(comm.works) == len(flats)
    assert all(work.has_ended for work in comm.works)
    comm.works.clear()
    run = run_of(layout, param_tier="cpu")
    (buffer,) = run.memory.take(EXCHANGED)
    exchanging = ReplicaExchange(
        layout, StreamedParams(layout, store_in_ram(run, param_slot_arrays(layout))), buffer, comm
    )
    exchanging.begin()
    exchanging.send(layout.chunks[0], torch.zeros(layout.chunks[0].numel, dtype=torch.bfloat16), 1)
    assert [work.has_ended for work in comm.works] == [False]
    exchanging.abandon()
    assert [work.has_ended for work in comm.works] == [True]


def test_what_another_rank_did_not_send_is_raised_once_and_dropped_when_abandoned() -> None:
    layout = layout_of(2, 0, replicas=2)
    flats = [torch.zeros(layout.padded_numel(flat.index), dtype=flat.dtype) for flat in layout.flats]
    gathering = FlatGather(layout, flats, gathers_of(layout, Lost(), 0), 0)
    gathering.start(0, 1)
    gathering.send_rest()
    with pytest.raises(RankError, match="rank 1 is gone"):
        gathering.finish(0)
    with pytest.raises(RankError, match="rank 1 is gone"):
        gathering.wait()
    gathering.abandon()
    gathering.wait()
    gathering.finish(0)
    run = run_of(layout, param_tier="cpu")
    store = store_in_ram(run, param_slot_arrays(layout))
    (buffer,) = run.memory.take(EXCHANGED)
    exchanging = ReplicaExchange(layout, StreamedParams(layout, store), buffer, Lost())
    with pytest.raises(RankError, match="rank 1 is gone"):
        exchanging.start(0, 1)
    exchanging.abandon()
    exchanging.begin()
    exchanging.send(layout.chunks[0], torch.zeros(layout.chunks[0].numel, dtype=torch.bfloat16), 1)
    exchanging.abandon()
