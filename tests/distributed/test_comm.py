"""The communicator on 1, 2, 3 and 4 ranks. Functions that begin with an underscore run on the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import ConfigError, RankError
from offload.profiling import Timeline
from offload.ranks import torch_distributed as comm
from offload.ranks.communicator import Communicator
from tests.native.bits import assert_same_bits, narrowed, widened
from tests.support.communicators import Delayed, Late
from tests.support.ranks import World, Worlds

SIZES = [1, 2, 3, 4]
WIRES = [torch.float32, torch.bfloat16, torch.float16]
KINDS: dict[str, Callable[[Communicator], Communicator]] = {
    "plain": lambda inner: inner,
    "delayed": lambda inner: Delayed(inner, 0.002),
    "late": Late,
}
pytestmark = pytest.mark.timeout(120)


def gradients(rank: int, numel: int, wire: torch.dtype) -> Tensor:
    """One rank's gradient: numbers of many sizes, so that every order of summation gives other bits."""
    rng = np.random.default_rng(rank)
    values = rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 4, numel)
    return narrowed(values.astype(np.float32), wire)


def averaged(size: int, numel: int, wire: torch.dtype, out: torch.dtype) -> Tensor:
    """The average by NumPy: fp32, in rank order from rank 0, one division, one rounding."""
    total = widened(gradients(0, numel, wire)).copy()
    for rank in range(1, size):
        total += widened(gradients(rank, numel, wire))
    total /= np.float32(size)
    return narrowed(total, out)


def _reduced(kind: str, numel: int, bucket: int, wire: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """This rank's part of the average, reduced in buckets, each the same sub-range of every rank's part."""
    group = KINDS[kind](comm.connect())
    own = gradients(group.rank, group.size * numel, wire)
    out = torch.empty(numel, dtype=out_dtype)
    works = []
    for start in range(0, numel, bucket):
        full = own.view(group.size, numel)[:, start : start + bucket].contiguous().view(-1)
        scratch = torch.empty_like(full) if start else None
        works.append(group.reduce_scatter(full, [out[start : start + bucket]], scratch=scratch))
    for work in reversed(works):
        work.wait()
        work.wait()
        assert work.done()
    assert group.close()
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_reduction_equals_numpys_sum_in_rank_order(worlds: Worlds, size: int, wire: torch.dtype) -> None:
    for numel, out in ((1, torch.float32), (300_007, torch.float32), (300_007, wire)):
        parts = worlds(size).run(_reduced, "plain", numel, numel, wire, out)
        assert_same_bits(torch.cat(parts), averaged(size, size * numel, wire, out), f"{numel} elements in {out}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_reduction_has_the_same_bits_at_any_bucket_size(worlds: Worlds, size: int, kind: str) -> None:
    wanted = averaged(size, size * 257, torch.bfloat16, torch.float32)
    for bucket in (1, 64, 100, 256, 257):
        parts = worlds(size).run(_reduced, kind, 257 if bucket > 1 else 5, bucket, torch.bfloat16, torch.float32)
        if bucket == 1:
            assert_same_bits(torch.cat(parts), averaged(size, size * 5, torch.bfloat16, torch.float32))
        else:
            assert_same_bits(torch.cat(parts), wanted, f"buckets of {bucket}")


def _inf_and_nan() -> Tensor:
    group = comm.connect()
    full = torch.zeros(2 * group.size)
    full[0] = float("inf") if group.rank else float("-inf")
    full[1] = float("inf") if group.rank else 1.0
    out = torch.empty(2)
    group.reduce_scatter(full, [out]).wait()
    group.close()
    return out


def test_inf_and_nan_survive_the_reduction(worlds: Worlds) -> None:
    first, second = worlds(2).run(_inf_and_nan)
    assert math.isnan(first[0])
    assert first[1] == math.inf
    assert second.tolist() == [0, 0]


def _gathered(kind: str, dtype: torch.dtype, in_place: bool) -> Tensor:
    group = KINDS[kind](comm.connect())
    out = torch.zeros(group.size * 1000, dtype=dtype)
    place = out[group.rank * 1000 : (group.rank + 1) * 1000]
    shard = place if in_place else torch.empty(1000, dtype=dtype)
    shard.copy_(torch.arange(1000) % 64 + group.rank)
    group.all_gather_into_tensor(shard, out).wait()
    group.close()
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8], ids=str)
def test_every_rank_gathers_all_shards_in_rank_order(worlds: Worlds, size: int, kind: str, dtype: torch.dtype) -> None:
    wanted = torch.cat([(torch.arange(1000) % 64 + rank).to(dtype) for rank in range(size)])
    for in_place in (False, True):
        for found in worlds(size).run(_gathered, kind, dtype, in_place):
            assert torch.equal(found, wanted)


def _broadcast(source: int) -> list[Tensor]:
    group = comm.connect()
    tensors = [
        torch.full((2, 3), float(group.rank)),
        torch.full((5,), group.rank, dtype=torch.bfloat16),
        torch.tensor(group.rank),
        torch.nn.Parameter(torch.full((4,), float(group.rank))),
    ]
    for tensor in tensors:
        group.broadcast(tensor, source)
    group.barrier()
    group.close()
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_the_sources_values(worlds: Worlds, size: int) -> None:
    for source in {0, size - 1}:
        for tensors in worlds(size).run(_broadcast, source):
            assert all(bool((tensor == source).all()) for tensor in tensors)


# What all ranks have to know alike.


def _known(values: list[list[float]]) -> tuple[float, list[bool], list[bool]]:
    group = comm.connect()
    total = group.exact_sum(values[group.rank])
    flags = [
        group.all_reduce_any(False),
        group.all_reduce_any(group.rank == group.size - 1),
        group.all_reduce_any(True),
    ]
    agreed = [group.all_equal("the same"), group.all_equal(f"layout {group.rank}")]
    group.close()
    return total, flags, agreed


@pytest.mark.parametrize("size", SIZES)
def test_norms_have_the_bits_of_one_rank(worlds: Worlds, size: int) -> None:
    rng = np.random.default_rng(0)
    values = [(rng.random(999 + rank) * 10.0 ** rng.integers(-30, 60, 999 + rank)).tolist() for rank in range(size)]
    wanted = math.fsum(value for each in values for value in each)
    for total, flags, agreed in worlds(size).run(_known, values):
        assert total == wanted
        assert flags == [False, True, True]
        assert agreed == [True, size == 1]


def test_exact_sums_cancel_across_ranks(worlds: Worlds) -> None:
    values = [[1e300, 1.0, 5e-324], [-1e300, 1e-200], []]
    assert {total for total, _, _ in worlds(3).run(_known, values)} == {math.fsum(chain(*values))}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_sums_that_are_not_finite_are_so_on_every_rank(worlds: Worlds, bad: float) -> None:
    for total, _, _ in worlds(2).run(_known, [[1.0, bad], [1.0]]):
        assert total == bad or (math.isnan(total) and math.isnan(bad))


# Counters and timeline.


def _counted(numel: int) -> dict[str, int]:
    group = comm.connect()
    full = torch.ones(group.size * numel, dtype=torch.bfloat16)
    group.reduce_scatter(full, [torch.empty(numel)]).wait()
    group.reduce_scatter(full, [torch.empty(numel)]).wait()
    group.all_gather_into_tensor(full[:numel].clone(), full).wait()
    group.broadcast(torch.zeros(10), source=0)
    group.all_gather(torch.zeros(3))
    group.close()
    return group.stats()


@pytest.mark.parametrize("size", SIZES[1:])
def test_counters_are_what_leaves_a_rank(worlds: Worlds, size: int) -> None:
    """(N-1)/N of the elements each way, as FSDP and ZeRO count them: 2 bytes each in bf16."""
    numel = 1000
    sent = (size - 1) * numel  # of size * numel elements
    for rank, stats in enumerate(worlds(size).run(_counted, numel)):
        assert stats == {
            "reduce_scatter_calls": 2,
            "reduce_scatter_elements": 2 * sent,
            "reduce_scatter_bytes": 4 * sent,
            "all_gather_calls": 1,
            "all_gather_elements": sent,
            "all_gather_bytes": 2 * sent,
            "broadcast_calls": 1,
            "broadcast_elements": 10 * (size - 1) if rank == 0 else 0,
            "broadcast_bytes": 40 * (size - 1) if rank == 0 else 0,
            "gather_calls": 1,
            "gather_elements": 3 * (size - 1),
            "gather_bytes": 12 * (size - 1),
        }


def test_a_world_of_one_makes_no_call(worlds: Worlds) -> None:
    assert worlds(1).run(_counted, 10) == [{}]


def _recorded(file: str) -> str:
    timeline = Timeline()
    group = comm.connect(timeline=timeline)
    if group.rank == 0:
        with timeline.recorded(file):
            work = group.all_gather_into_tensor(torch.ones(1000), torch.empty(2000))
            time.sleep(0.6)  # the other rank comes after 0.2 s
            work.wait()
    else:
        time.sleep(0.2)
        group.all_gather_into_tensor(torch.ones(1000), torch.empty(2000)).wait()
    group.close()
    return Path(file).read_text() if group.rank == 0 else ""


def test_the_timeline_shows_when_a_collective_ended_not_when_it_was_waited_for(worlds: Worlds, tmp_path: Path) -> None:
    import json

    events = json.loads(worlds(2).run(_recorded, str(tmp_path / "t.json"))[0])["traceEvents"]
    begun = next(event for event in events if event["ph"] == "b")
    ended = next(event for event in events if event["ph"] == "e")
    assert (begun["cat"], begun["name"], begun["args"]["bytes"]) == ("all_gather", "collectives", 4000)
    assert 0.1e6 < ended["ts"] - begun["ts"] < 0.5e6


# Groups.


def _subgroups() -> list[float]:
    world = comm.connect()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for part in (mesh["shard"], mesh.get_group("replicate")):
        group = comm.connect(part)
        assert group.size == 2
        assert (group.local_rank, group.ranks_on_node) == (world.rank, 4)
        out = torch.empty(1)
        group.reduce_scatter(torch.full((2,), float(world.rank)), [out]).wait()
        tensor = torch.tensor([float(world.rank)])
        group.broadcast(tensor, source=1)
        found += [out.item(), tensor.item()]
        group.close()
    alone = comm.connect(dist.init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))["b"])
    assert (alone.size, alone.local_rank, alone.ranks_on_node) == (1, world.rank, 4)
    with pytest.raises(ConfigError, match=r'such as mesh\["dp"\]'):
        comm.connect(dist.init_device_mesh("cpu", (2, 2, 1)))
    with pytest.raises(ConfigError, match=r"of the ranks \[\[0, 2\], \[1, 3\]\]: they have to count up"):
        comm.connect(DeviceMesh("cpu", [[0, 2], [1, 3]]))
    world.close()
    return found


def test_a_group_or_a_dimension_of_a_mesh_can_be_given(worlds: Worlds) -> None:
    """Ranks 0 1 / 2 3: shards go along rows, replicas along columns."""
    assert worlds(4).run(_subgroups) == [[0.5, 1, 1, 2], [0.5, 1, 2, 3], [2.5, 3, 1, 2], [2.5, 3, 2, 3]]


def _replicas() -> tuple[list[float], str]:
    """Two rows of two ranks in a world of five."""
    mesh = DeviceMesh("cpu", [[1, 2], [3, 4]])
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match="rank 0 is not in DeviceMesh"):
            comm.connect(mesh)
        return [], ""
    group = comm.connect(mesh, timeout_s=0.5)
    found = [float(group.rank), float(group.size)]
    for part in (group, group.shard_group, group.replicate_group):
        out = torch.empty(part.size)
        part.all_gather_into_tensor(torch.tensor([float(dist.get_rank())]), out).wait()
        found += out.tolist()
    assert group.stats() == {"all_gather_calls": 3, "all_gather_elements": 5, "all_gather_bytes": 20}
    if group.rank < 2:
        with pytest.raises(RankError) as caught:
            group.replicate_group.barrier()
        with pytest.raises(RankError) as again:
            group.check()
        assert again.value is caught.value
    else:
        time.sleep(1)
    return found, "" if group.rank else str(caught.value)


def test_replicas_of_shards_in_a_larger_world() -> None:
    with World(5) as world:
        (none, _), (first, said), *others = world.run(_replicas)
        assert none == []
        assert first == [0, 4, 1, 2, 3, 4, 1, 2, 1, 3]
        assert [found for found, _ in others] == [
            [1, 4, 1, 2, 3, 4, 1, 2, 2, 4],
            [2, 4, 1, 2, 3, 4, 3, 4, 1, 3],
            [3, 4, 1, 2, 3, 4, 3, 4, 2, 4],
        ]
        assert "gather on rank 0 of 2 failed" in said
        world.usable = False  # where collectives failed


def _outsider() -> str:
    members = dist.new_group([0])
    try:
        comm.connect(members).close()
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_rank_outside_the_group_is_told_so(worlds: Worlds) -> None:
    inside, outside = worlds(2).run(_outsider)
    assert inside == "taken"
    assert "rank 1 is not in it" in outside


def _in_another_order() -> list[float]:
    """The ranks of a group in another order, and of the one beside it, where rank 0 has a group more than rank 1."""
    dist.new_group([0])
    group = comm.connect().in_order([1, 0])
    assert group is not None
    own = torch.tensor([float(dist.get_rank())])
    found = [*group.all_gather(own).flatten().tolist(), *group.side_group.all_gather(own).flatten().tolist()]
    group.close()
    return found


def test_ranks_that_have_other_groups_meet_in_another_order(worlds: Worlds) -> None:
    for _ in range(2):
        assert worlds(2).run(_in_another_order) == [[1, 0, 1, 0]] * 2


# Mistakes.


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_tensors_are_refused_before_anything_is_sent(worlds: Worlds, size: int) -> None:
    worlds(size).run(_wrong_tensors)


def _wrong_tensors() -> None:
    group = comm.connect()
    n = group.size
    f32, bf16 = torch.zeros(4 * n), torch.zeros(4 * n, dtype=torch.bfloat16)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("full is torch.int64", lambda: group.reduce_scatter(torch.zeros(4 * n, dtype=torch.int64), [torch.zeros(4)])),
        ("out is torch.bfloat16", lambda: group.reduce_scatter(f32, [torch.zeros(4, dtype=torch.bfloat16)])),
        ("full has to be", lambda: group.reduce_scatter(f32, [torch.zeros(5)])),
        ("full has to be", lambda: group.reduce_scatter(f32.view(-1, 2), [torch.zeros(4)])),
        ("full has to be", lambda: group.reduce_scatter(torch.zeros(8 * n)[::2], [torch.zeros(4)])),
        ("scratch has to be", lambda: group.reduce_scatter(f32, [torch.zeros(4)], scratch=torch.zeros(4 * n + 1))),
        ("scratch is torch.bfloat16", lambda: group.reduce_scatter(f32, [torch.zeros(4)], scratch=bf16)),
        ("out has to be", lambda: group.all_gather_into_tensor(torch.zeros(4), torch.zeros(4 * n + 1))),
        ("shard has to be", lambda: group.all_gather_into_tensor(torch.zeros(2, 2), f32)),
        ("they have to be alike", lambda: group.all_gather_into_tensor(torch.zeros(4), bf16)),
        ("is no rank", lambda: group.broadcast(torch.zeros(1), source=n)),
    ]
    for text, call in wrong:
        with pytest.raises(ValueError, match=text):
            call()
    assert group.stats() == {}
    group.close()
