"""The gradient buffer over ranks, which are threads here, with gradients that differ: against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import Tuning
from offload.errors import AccumulationError
from offload.grads.reduce_scatter import ReducedGradients
from offload.layout import ParamSpec, build
from offload.optim import reference
from offload.ranks.communicator import Communicator
from tests.support.late_copier import LateCopier
from tests.support.runs import RunByHand, layout_of, run_of
from tests.support.threads import Threads

NUMELS = (1000, 1, 4097, 333)
RANKS = 3
MISSING = {(3, 1), (3, 2), (1, 0)}
"""(parameter, rank): these have no gradient."""


def reduced(run: RunByHand) -> ReducedGradients:
    return ReducedGradients(run, run.choice.grads)


def gradient(param: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * param + 10 * rank + micro)
    return torch.randn(NUMELS[param], generator=generator).bfloat16()


def averages(accumulation: int, sums_locally: bool) -> list[np.ndarray]:
    """In fp32 and the order of the ranks; summed over micro-batches before or after that."""
    found = []
    for param, numel in enumerate(NUMELS):
        grads = np.zeros((accumulation, RANKS, numel), dtype=np.float32)
        for micro, rank in np.ndindex(accumulation, RANKS):
            if (param, rank) not in MISSING:
                grads[micro, rank] = gradient(param, rank, micro).float().numpy()
        rounds = grads.cumsum(0, dtype=np.float32)[-1:] if sums_locally else grads
        total = np.zeros(numel, dtype=np.float32)
        for by_rank in rounds:
            total += by_rank.cumsum(0, dtype=np.float32)[-1] / np.float32(RANKS)
        if accumulation == 1:
            total = reference.from_bf16(reference.to_bf16(total))
        found.append(total)
    return found


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("bucket", [4096, "1MiB"])
def test_each_rank_holds_the_average_of_its_shards(stage: int, accumulation: int, bucket: Any) -> None:
    def reduce(comm: Communicator) -> list[Tensor]:
        run = run_of(
            layout_of(NUMELS, ranks=RANKS, rank=comm.rank),
            comm,
            stage=stage,
            accumulation=accumulation,
            tuning=Tuning(bucket=bucket),
        )
        buffer = reduced(run)
        for micro in range(accumulation):
            # Each rank makes its gradients in an order of its own.
            for param in np.random.default_rng(comm.rank).permutation(len(NUMELS)).tolist():
                if (param, comm.rank) not in MISSING:
                    buffer.accumulate(param, gradient(param, comm.rank, micro))
        mine = [param for param in range(len(NUMELS)) if (param, comm.rank) not in MISSING]
        assert buffer.finalize(mine) == list(range(len(NUMELS)))
        return [buffer.values(param).clone() for param in range(len(NUMELS))]

    expected = averages(accumulation, sums_locally=stage == 1)
    by_rank = Threads(RANKS).run(reduce)
    for param, average in enumerate(expected):
        found = torch.cat([values[param] for values in by_rank]).float().numpy()
        assert np.array_equal(found, average)


def test_a_gradient_after_the_average_and_one_dropped_by_hand_are_refused() -> None:
    def reduce(comm: Communicator) -> list[str]:
        said = []
        buffer = reduced(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm))
        buffer.accumulate(0, gradient(0, comm.rank, 0))
        with pytest.raises(AccumulationError) as dropped:
            buffer.clear(0)
        said.append(str(dropped.value))
        buffer.finalize([0])
        with pytest.raises(AccumulationError) as late:
            buffer.accumulate(1, gradient(1, comm.rank, 0))
        said.append(str(late.value))
        buffer.clear_all()
        buffer.accumulate(0, gradient(0, comm.rank, 0))
        return said

    for dropped, late in Threads(2).run(reduce):
        assert "dropped or replaced by hand" in dropped
        assert "p1 came after" in late


def test_ranks_that_drop_what_others_use_all_say_so_and_begin_anew() -> None:
    def reduce(comm: Communicator) -> tuple[str, bool]:
        buffer = reduced(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm))
        buffer.accumulate(0, gradient(0, comm.rank, 0))
        with pytest.raises(AccumulationError) as caught:
            buffer.clear_all() if comm.rank == 1 else buffer.finalize([0])
        return str(caught.value), buffer.has(0)

    for said, has in Threads(2).run(reduce):
        assert "ranks [1] were dropped" in said
        assert not has


def _turns(comm: Communicator, accumulation: int) -> ReducedGradients:
    run = run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm, stage=3, accumulation=accumulation)
    return reduced(run)


def test_a_unit_that_backward_left_is_sent_with_zeros_for_what_is_missing() -> None:
    def reduce(comm: Communicator) -> list[Tensor]:
        buffer = _turns(comm, 2)
        for micro, sent in enumerate((1, 2)):
            if micro == 0:  # torch.autograd.grad(), which accumulates nothing
                buffer.backward_enters("", [], is_alone=False)
                buffer.backward_ends([""], is_whole=True)
            buffer.accumulate(0, gradient(0, comm.rank, micro))
            if comm.rank:
                buffer.accumulate(3, gradient(3, comm.rank, micro))
            assert comm.stats() == {"reduce_scatter": sent - 1}, "sent before its turn"
            buffer.backward_enters("next", [""], is_alone=True)
            assert comm.stats() == {"reduce_scatter": sent}
            buffer.backward_ends([], is_whole=True)
        assert buffer.finalize([0]) == [0, 3] if comm.rank == 0 else buffer.finalize([0, 3])
        return [buffer.values(param).clone() for param in (0, 3)]

    by_rank = Threads(2).run(reduce)
    for at, param in enumerate((0, 3)):
        total = np.zeros(NUMELS[param], dtype=np.float32)
        for micro in range(2):
            grads = [gradient(param, rank, micro).float().numpy() for rank in range(2)]
            total += ((0 if param == 3 else grads[0]) + grads[1]) / np.float32(2)
        assert np.array_equal(torch.cat([values[at] for values in by_rank]).numpy(), total)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_comes_when_its_unit_was_sent_is_of_the_next_backward(accumulation: int) -> None:
    def reduce(comm: Communicator) -> tuple[str, list[Tensor]]:
        buffer = _turns(comm, accumulation)
        buffer.accumulate(0, gradient(0, comm.rank, 0))
        buffer.backward_ends([""], is_whole=True)
        try:
            buffer.accumulate(1, gradient(1, comm.rank, 0))
        except AccumulationError as error:
            return str(error), []
        buffer.finalize([0, 1])
        return "", [buffer.values(param).clone() for param in (0, 1)]

    said, values = zip(*Threads(2).run(reduce), strict=True)
    if accumulation == 1:
        assert all("p1 came when those of its unit" in one and "accumulation=2" in one for one in said)
        return
    for param in (0, 1):
        average = (gradient(param, 0, 0).float() + gradient(param, 1, 0).float()) / 2
        assert torch.equal(torch.cat([held[param] for held in values]), average)


def test_complete_buckets_wait_for_their_turn_unless_their_unit_is_alone() -> None:
    def reduce(comm: Communicator) -> None:
        buffer = _turns(comm, 2)
        for micro, is_alone in enumerate((False, True)):
            buffer.backward_enters("", [], is_alone=is_alone)
            for param in range(len(NUMELS)):
                buffer.accumulate(param, gradient(param, comm.rank, micro))
            assert comm.stats()["reduce_scatter"] == (2 if is_alone else 0)
            buffer.backward_ends([""], is_whole=True)
        buffer.finalize(range(len(NUMELS)))

    Threads(2).run(reduce)


@pytest.mark.parametrize(("bucket", "sent"), [("512B", [1, 2]), ("32MiB", [0, 1])])
def test_a_unit_entered_again_ends_the_round_on_ranks_without_its_gradients_too(bucket: str, sent: list[int]) -> None:
    def reduce(comm: Communicator) -> None:
        specs = [ParamSpec("head", 100, "", torch.bfloat16, 0), ParamSpec("p", 100, "block", torch.bfloat16, 0)]
        layout = build(specs, 1 << 16, ranks=2, rank=comm.rank)
        buffer = reduced(run_of(layout, comm, stage=3, accumulation=2, tuning=Tuning(bucket=bucket)))
        buffer.accumulate(1, torch.ones(100).bfloat16())
        buffer.backward_ends(["block"], is_whole=True)
        buffer.accumulate(0, torch.ones(100).bfloat16())
        found = [comm.stats()["reduce_scatter"]]
        buffer.backward_enters("block", [], is_alone=True)
        found.append(comm.stats()["reduce_scatter"])
        assert found == sent
        buffer.finalize([0, 1])

    Threads(2).run(reduce)


def test_a_bucket_of_several_units_is_sent_when_backward_leaves_the_last_of_them() -> None:
    def reduce(comm: Communicator) -> list[Tensor]:
        specs = [ParamSpec(name, 100, name, torch.bfloat16, 0) for name in ("first", "second")]
        buffer = reduced(run_of(build(specs, 1 << 16, ranks=2, rank=comm.rank), comm, stage=3))
        buffer.backward_enters("second", [], is_alone=True)
        buffer.accumulate(1, gradient(2, comm.rank, 0)[:100])
        buffer.backward_enters("first", ["second"], is_alone=comm.rank == 0)
        assert comm.stats()["reduce_scatter"] == 0
        buffer.accumulate(0, gradient(0, comm.rank, 0)[:100])
        assert comm.stats()["reduce_scatter"] == (comm.rank == 0), "the turn of `first` is not over"
        buffer.backward_ends(["first"], is_whole=True)
        assert comm.stats()["reduce_scatter"] == 1
        buffer.finalize([0, 1])
        return [buffer.values(param).clone() for param in (0, 1)]

    by_rank = Threads(2).run(reduce)
    for param in (0, 1):
        grads = [gradient(2 * param, rank, 0)[:100].float() for rank in range(2)]
        assert torch.equal(torch.cat([values[param] for values in by_rank]), ((grads[0] + grads[1]) / 2).bfloat16())


def test_complete_buckets_are_sent_at_once_where_nothing_is_gathered() -> None:
    def reduce(comm: Communicator) -> None:
        buffer = reduced(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm, stage=2))
        for param in range(len(NUMELS)):
            assert comm.stats() == {"reduce_scatter": 0}
            buffer.accumulate(param, gradient(param, comm.rank, 0))
        assert comm.stats() == {"reduce_scatter": 1}

    Threads(2).run(reduce)


def test_no_copy_writes_to_the_gradients_memory_after_close() -> None:
    def reduce(comm: Communicator) -> int:
        copier = LateCopier()
        buffer = reduced(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm, copier))
        for param in range(len(NUMELS)):
            buffer.accumulate(param, gradient(param, comm.rank, 0))
        buffer.close()
        return sum(not copy.done() for copy in copier._late)

    assert Threads(2).run(reduce) == [0, 0]


def test_a_rank_without_elements_of_a_gradient_asks_for_its_norm_in_each_step_as_the_others_do() -> None:
    def reduce(comm: Communicator) -> list[float]:
        buffer = reduced(run_of(layout_of((10,), ranks=2, rank=comm.rank), comm))
        norms = []
        for value in (1.0, 2.0):
            buffer.accumulate(0, torch.full((10,), value).bfloat16())
            buffer.finalize([0])
            norms += [buffer.norm([0]), buffer.norm([0])]
            buffer.clear_all()
        return norms

    expected = [np.linalg.norm(np.full(10, value)) for value in (1.0, 1.0, 2.0, 2.0)]
    for norms in Threads(2).run(reduce):
        assert norms == pytest.approx(expected, rel=1e-12)
