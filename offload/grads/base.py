"""The gradient buffer: what a gradient meets between autograd's hook and the step.

[Note: the way of a gradient]
Each of these files calls the next one, and none of these is called back:

1. model/gradient.py takes each gradient as soon as autograd has accumulated it, and passes it on: `accumulate`. Its
   micro-batch is counted (micro_batches.py).
2. With one rank it is brought to RAM (local.py): from a device at once if it is large, else with others of its unit
   (staging.py). With several it is first averaged over the ranks, and each rank keeps the average of its own shards
   (reduce_scatter.py).
3. There it waits for the step (shards.py): in RAM, or with `grad_tier="nvme"` in a store of its own, which writes it to
   the swap file. With more than one micro-batch a step, gradients are summed in fp32, in the order they come in.
4. On the way the squares are summed (sums.py), in blocks fixed by an element's position in its parameter. The norm and
   the check for NaN and Inf come from these sums: they cost no pass over the gradients, and their bits do not depend on
   units, chunks, threads or the number of ranks.

`finalize` waits for all of it; then the step reads each chunk once, with `shard`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import Tensor

from offload import torch_private
from offload.choices import GradChoice
from offload.grads.micro_batches import MicroBatches
from offload.grads.shards import GradShards, ShardsInMemory
from offload.layout import Chunk
from offload.run import Run


def nobody(param: int) -> None:
    """What `GradientBuffer.watch` takes where nobody wants to know any more."""


def is_in_backward() -> bool:
    """Whether a backward calls, in this thread."""
    return bool(torch_private.graph_task_id() >= 0)


class GradientBuffer(ABC):
    """Holds the gradients of one step. Parameters are named by their index in `layout.specs`.

    Norms and the check for NaN and Inf are of the whole model: [Note: tensor parallelism] in ranks/tensor_parallel.py.

    Over several ranks, all of them have to call `finalize`, `norm`, `norms`, `not_finite`, `clear_all` and `reset` in
    the same order. These raise RankError.

    Args:
        run: what the parts of a run share.
        choice: what was decided for the gradients.
        shards: where they wait for the step; None: in memory.

    Attributes:
        micro_batches: how many micro-batches of each gradient have come, and may come.
    """

    def __init__(self, run: Run, choice: GradChoice, shards: GradShards | None = None) -> None:
        self.micro_batches = MicroBatches(run.layout, choice)
        self._layout = run.layout
        self._copier = run.memory.copier
        self._timeline = run.timeline
        # Gradients do not come alike on all ranks: their collectives are in an order of their own.
        self._comm = run.comm.side_group
        self._everyone = run.comm.everyone.side_group
        # A parameter that tensor-parallel ranks do not split is counted by the first of them alone.
        is_first = run.comm.tensor_parallel.rank == 0
        self._is_counted = [is_first or spec.shard_dim is not None for spec in run.layout.specs]
        self._shards = shards or ShardsInMemory(run, choice.micro_batches)
        self._on_whole: Callable[[int], None] = nobody
        # Tensor-parallel ranks ask one another for norms, and have to do so alike, though only one of them may have
        # written to a gradient. Nobody writes to gradients that are averaged over ranks.
        self._asks_always = self._everyone.size > 1 and run.layout.ranks == 1
        # On their way to a device of its own; see `ToDevice` in optim/new_params.py.
        self._is_written_over = [
            choice.params_stay and not run.reaches(flat) and self._shards.dtypes[flat] is spec.dtype
            for flat, spec in zip(run.layout.flat_of, run.layout.specs, strict=True)
        ]

    # As autograd makes them.

    @abstractmethod
    def accumulate(self, param: int, grad: Tensor, start: int = 0) -> None:
        """Adds the gradient of one micro-batch, which may still be in transfer when this returns.

        Args:
            param: the parameter's index.
            grad: shape (numel,), on the model's device, in the parameter's dtype: the gradient of the whole parameter,
                or of one of its tiles.
            start: the element of the parameter at which the tile begins.

        Raises:
            AccumulationError: if the parameter has all of its declared micro-batches already.
        """

    def has(self, param: int) -> bool:
        """Whether a gradient of `param` was accumulated since it was last cleared."""
        return self.micro_batches.has(param)

    def clear(self, param: int) -> None:
        """Forgets the gradient of `param`: the next one replaces it.

        Raises:
            AccumulationError: if other ranks have that gradient already.
        """
        self.micro_batches.clear(param)
        self._shards.sums.forget(param)

    def clear_all(self) -> None:
        """Forgets all gradients: the next ones replace them."""
        self._begin_anew()

    def _begin_anew(self, had: int | None = None) -> None:
        """Begins the gradients of the next step.

        Args:
            had: as for `MicroBatches.clear_all`.
        """
        self.micro_batches.clear_all(had)
        self._shards.sums.forget_all()

    def backward_enters(self, unit: str, left: Sequence[str], *, is_alone: bool) -> None:  # noqa: B027
        """Tells that backward is about to fetch a unit.

        Ranks that share parameters call this and `backward_ends` in the same order.

        Args:
            unit: the unit's name.
            left: units whose gradients have all come.
            is_alone: whether no other unit is fetched until this one is left.
        """

    def backward_ends(self, left: Sequence[str], *, is_whole: bool) -> None:  # noqa: B027
        """Tells that a backward ends.

        Args:
            left: units whose gradients have all come.
            is_whole: False for a backward inside another one.
        """

    # When all of them have come.

    def finalize(self, params: Collection[int]) -> list[int]:
        """Waits until the gradients of `params`, each of which has one, are where the step reads them.

        Returns:
            The parameters that have a gradient on any rank.

        Raises:
            AccumulationError: on all ranks, if some of them drop gradients that were averaged; then all have dropped
                them.
        """
        with self._timeline.span("gradient_s"):
            active = self._collect(params)
            self._shards.sum_squares(active)
        return active

    @abstractmethod
    def _collect(self, params: Collection[int]) -> list[int]:
        """Waits until the gradients of `params` have come to the shards. See `finalize`."""

    @abstractmethod
    def drain(self) -> None:
        """Waits for all transfers under way."""

    def values(self, param: int) -> Tensor:
        """This rank's elements of a gradient, `layout.param_shard_range(param)`: 1-D, in the order of its memory."""
        return self._shards.values(param)

    def write(self, param: int, values: Tensor) -> None:
        """Replaces the elements that `values(param)` returns. Called after `finalize`, where there is one rank."""
        assert self._layout.ranks == 1  # else no rank has all of a gradient
        self._shards.write(param, values)

    def norm(self, params: Collection[int]) -> float:
        """The 2-norm over `params`, in fp64, over all ranks. It is inf or nan if one of them is not finite.

        Called after `finalize`. The sum over the blocks is rounded once, exactly, so it does not depend on their order.
        It is computed once, until a gradient changes.
        """
        if self._asks_always:
            return self._norm(params)
        norms, key = self._shards.sums.norms, tuple(params)
        if key not in norms:
            norms[key] = self._norm(params)
        return norms[key]

    def _norm(self, params: Collection[int]) -> float:
        sums = self._shards.sums.on_cpu()
        blocks = (block for param in params if self._is_counted[param] for block in sums[param])
        return math.sqrt(self._everyone.exact_sum(chain.from_iterable(block.tolist() for block in blocks)))

    def norms(self, params: Sequence[int], order: float = 2.0) -> list[float]:
        """The norm of each of `params`, without any factor, in fp64, over all ranks. Called after `finalize`.

        Args:
            params: the parameters.
            order: of the norm; 2 costs no pass over the gradients.
        """
        if not params:
            return []
        if order == 2.0:
            sums = self._shards.sums.on_cpu()
            norms = [math.fsum(chain.from_iterable(block.tolist() for block in sums[param])) for param in params]
            return self._sum_over_ranks(params, norms).sqrt().tolist()
        gradients = (self.values(param).float() for param in params)
        norms = [float(torch.linalg.vector_norm(values, order)) if len(values) else 0.0 for values in gradients]
        if self._everyone.size == 1:
            return norms
        if math.isinf(order):
            rows = self._everyone.all_gather(torch.tensor(norms, dtype=torch.float64, device="cpu"))
            return (rows.amax(0) if order > 0 else rows.amin(0)).tolist()
        return (self._sum_over_ranks(params, [norm**order for norm in norms]) ** (1 / order)).tolist()

    def not_finite(self, params: Collection[int]) -> list[int]:
        """The parameters among `params` whose gradient has NaN or Inf on any rank. Called after `finalize`."""
        if math.isfinite(self.norm(params)):
            return []
        sums = self._shards.sums.on_cpu()
        bad = [not all(bool(block.isfinite().all()) for block in sums[param]) for param in params]
        flags = self._everyone.all_gather(torch.tensor(bad, device="cpu")).any(0).tolist()
        return [param for param, flag in zip(params, flags, strict=True) if flag]

    def _sum_over_ranks(self, params: Sequence[int], values: Sequence[float]) -> Tensor:
        once = [value if self._is_counted[param] else 0.0 for param, value in zip(params, values, strict=True)]
        rows = self._everyone.all_gather(torch.tensor(once, dtype=torch.float64, device="cpu"))
        return torch.tensor([math.fsum(column) for column in rows.T.tolist()], dtype=torch.float64, device="cpu")

    # For trials, and the step.

    def read_soon(self, chunks: Collection[int]) -> None:
        """Says which chunks a trial reads soon after their gradients have come: until then these stay in RAM."""
        self._shards.read_soon = chunks

    def watch(self, on_whole: Callable[[int], None]) -> None:
        """Has `on_whole` called with each parameter whose gradient, or a tile of it, has come as often as is expected.

        It is called during the backward that made the gradient, or soon after it, from any thread.
        """
        self._on_whole = on_whole

    def generation(self, param: int) -> int | None:
        """A number that changes with the gradient of `param`; None: there is none, or it is not whole."""
        return self._shards.sums.generation(param)

    def squares(self, param: int) -> float:
        """The sum of the squares of a gradient on this rank, of the tiles that have come."""
        return self._shards.sums.squares(param)

    def outlives_step(self, param: int) -> bool:
        """Whether the gradient of `param` stays in its memory after the step, until the next gradient comes.

        It stays where this rank has all of it and no new parameter takes its memory. Gradients in slots do not stay.
        """
        return self.is_in_memory and self._layout.ranks == 1 and not self._is_written_over[param]

    def are_zeros(self, param: int, parts: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether parts of a gradient are zeros on this rank; see SquareSums. Called after `finalize`."""
        return self._shards.sums.are_zeros(param, parts)

    def discard(self, index: int) -> None:
        """Forgets the gradients of a chunk, which the step does not need."""
        self._shards.discard(index)

    def expect(self, chunks: Iterable[int], *, repeats: bool = True) -> None:
        """Announces the order in which the step reads the chunks.

        Args:
            chunks: their numbers.
            repeats: whether the next gradients come to all chunks as the last ones did, and are read by a step alone.
        """
        self._shards.expect(chunks, repeats=repeats)

    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        """Lends the gradients of a chunk, shape (chunk.numel,), to the step, where the states are. They are not needed
        later.
        """
        return self._shards.shard(index)

    def lend(self, index: int) -> AbstractContextManager[Tensor]:
        """Lends the gradients of a chunk, shape (chunk.numel,), to a trial, which leaves them as they are."""
        return self._shards.lend(index)

    def drop_chunk(self, index: int) -> None:
        """Forgets the gradients of a chunk whose step was tried: nobody reads them any more."""
        self._shards.drop_chunk(index)

    @property
    def is_in_memory(self) -> bool:
        """Whether all gradients are in memory that the step's kernels use, so that it does not wait for them."""
        return self._shards.is_in_memory

    def chunk_memory(self, index: int) -> Tensor:
        """The memory of a chunk's gradients, shape (chunk.numel,). Called only if `is_in_memory`."""
        return self._shards.chunk_memory(index)

    def dtype(self, chunk: Chunk) -> torch.dtype:
        """The dtype of a chunk's gradients while they wait."""
        return self._shards.dtypes[chunk.flat]

    # Ending.

    @abstractmethod
    def reset(self) -> None:
        """Drops all gradients and failures, before a rollback. The owner of the store of gradients resets that."""

    @abstractmethod
    def close(self) -> None:
        """Waits for transfers that write into memory about to be freed."""
