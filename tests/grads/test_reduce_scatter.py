"""The gradient buffer over ranks, which are threads here, with gradients that differ: against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import Tuning
from offload.dist.communicator import Communicator
from offload.errors import AccumulationError
from offload.grads.reduce_scatter import ReducedGradients
from offload.optim import reference
from tests.support.runs import layout_of, run_of
from tests.support.threads import Threads

NUMELS = (1000, 1, 4097, 333)
RANKS = 3
MISSING = {(3, 1), (3, 2), (1, 0)}
"""(parameter, rank): these have no gradient."""


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
        buffer = ReducedGradients(run)
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
        buffer = ReducedGradients(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm))
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
        buffer = ReducedGradients(run_of(layout_of(NUMELS, ranks=2, rank=comm.rank), comm))
        buffer.accumulate(0, gradient(0, comm.rank, 0))
        with pytest.raises(AccumulationError) as caught:
            buffer.clear_all() if comm.rank == 1 else buffer.finalize([0])
        return str(caught.value), buffer.has(0)

    for said, has in Threads(2).run(reduce):
        assert "ranks [1] were dropped" in said
        assert not has
