"""The gradient buffer: what a gradient meets between autograd's hook and the step.

[Note: the way of a gradient]
1. A hook (model/gradient.py) hands over each gradient as soon as autograd has accumulated it: `accumulate`.
2. With one rank it is copied to the tier of the gradients at once (local.py). With several it is first averaged over
   the ranks, and each rank keeps the average of its own shards (reduce_scatter.py).
3. There it waits for the step (shards.py): in RAM, or with `grad_tier="nvme"` in a store of its own, which writes it to
   the swap file. With more than one micro-batch a step, gradients are summed in fp32, in the order they come in.
4. On the way the squares are summed, in blocks fixed by an element's position in its parameter. The norm and the check
   for NaN and Inf come from these sums: they cost no pass over the gradients, and their bits do not depend on units,
   chunks, threads or the number of ranks.
5. `finalize` waits for all of it; then the step reads each chunk once, with `shard`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import Tensor

from offload.choices import GradChoice
from offload.errors import AccumulationError
from offload.grads.shards import ShardsInMemory, open_shards
from offload.layout import Chunk
from offload.run import Run
from offload.storage.chunk_cache import Store


class GradientBuffer(ABC):
    """Holds the gradients of one step. Parameters are named by their index in `layout.specs`.

    Norms and the check for NaN and Inf are of the whole model: [Note: tensor parallelism] in ranks/tensor_parallel.py.

    Over several ranks, all of them have to call `finalize`, `norm`, `norms`, `not_finite`, `clear_all` and `reset` in
    the same order. These raise RankError.

    Args:
        store: where the gradients wait with `grad_tier="nvme"`; None: they wait in RAM (or on the device, with the
            states).

    Attributes:
        most: the most micro-batches that a step may have; None: any number.
        expected: how many micro-batches this step is expected to have.
    """

    def __init__(self, run: Run, choice: GradChoice, store: Store | None = None) -> None:
        self.most: int | None = None if choice.takes_any else choice.passes
        self.expected = self.most or 1
        self._is_summed = choice.passes > 1
        self._layout = run.layout
        self._kernels = run.kernels
        self._copier = run.memory.copier
        self._timeline = run.timeline
        # Gradients do not come alike on all ranks: their collectives are in an order of their own.
        self._comm = run.comm.side_group
        self._everyone = run.comm.everyone.side_group
        # What every slice has is counted by the first one.
        is_first = run.comm.tensor_parallel.rank == 0
        self._counts = [is_first or spec.shard_dim is not None for spec in run.layout.specs]
        self._shards = open_shards(run, choice.passes, store)
        # On their way to a device of its own; see NewParameters in optim/adam.py.
        is_bounce = not self._copier.direct and choice.params_stay
        self._is_written_over = [
            is_bounce and self._shards.dtypes[run.layout.locations[param][0]] is spec.dtype
            for param, spec in enumerate(run.layout.specs)
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

    @abstractmethod
    def has(self, param: int) -> bool:
        """Whether a gradient of `param` was accumulated since it was last cleared."""

    @abstractmethod
    def clear(self, param: int) -> None:
        """Forgets the gradient of `param`: the next one replaces it.

        Raises:
            AccumulationError: if other ranks have that gradient already.
        """

    @abstractmethod
    def clear_all(self) -> None:
        """Forgets all gradients: the next ones replace them."""

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

    def declare(self, most: int | None) -> None:
        """Sets the most micro-batches of every step from now on; None: any number.

        Called while no gradient is there, with the same number on all ranks.
        """
        self.most, self.expected = most, most or 1

    def _learn(self, count: int) -> None:
        """Expects as many micro-batches in the next step as this one had, where their number is not declared."""
        if self.most is None and count:
            self.expected = count

    @abstractmethod
    def finalize(self, params: Collection[int]) -> list[int]:
        """Waits until the gradients of `params`, each of which has one, are where the step reads them.

        Returns:
            The parameters that have a gradient on any rank.
        """

    @abstractmethod
    def drain(self) -> None:
        """Waits for all transfers under way."""

    def values(self, param: int) -> Tensor:
        """This rank's elements of a gradient, `layout.param_shard_range(param)`: 1-D, in the order of its memory."""
        return self._shards.values(param)

    @abstractmethod
    def write(self, param: int, values: Tensor) -> None:
        """Replaces the elements that `values(param)` returns. Called after `finalize`, where there is one rank."""

    def norm(self, params: Collection[int]) -> float:
        """The 2-norm over `params`, in fp64, over all ranks. It is inf or nan if one of them is not finite.

        Called after `finalize`. The sum over the blocks is rounded once, exactly, so it does not depend on their order.
        """
        sums = self._shards.sums_on_cpu()
        blocks = (block for param in params if self._counts[param] for block in sums[param])
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
            sums = self._shards.sums_on_cpu()
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
        sums = self._shards.sums_on_cpu()
        bad = [not all(bool(block.isfinite().all()) for block in sums[param]) for param in params]
        flags = self._everyone.all_gather(torch.tensor(bad, device="cpu")).any(0).tolist()
        return [param for param, flag in zip(params, flags, strict=True) if flag]

    def _sum_over_ranks(self, params: Sequence[int], values: Sequence[float]) -> Tensor:
        once = [value if self._counts[param] else 0.0 for param, value in zip(params, values, strict=True)]
        rows = self._everyone.all_gather(torch.tensor(once, dtype=torch.float64, device="cpu"))
        return torch.tensor([math.fsum(column) for column in rows.T.tolist()], dtype=torch.float64, device="cpu")

    # For the step.

    def outlives_step(self, param: int) -> bool:
        """Whether the gradient of `param` stays in its memory after the step, until the next gradient comes.

        It stays where this rank has all of it and no new parameter takes its memory. Gradients in slots do not stay.
        """
        return self.is_in_memory and self._layout.ranks == 1 and not self._is_written_over[param]

    def expect(self, chunks: Iterable[int]) -> None:
        """Announces the order in which the step reads the chunks."""
        self._shards.expect(chunks)

    def shard(self, index: int) -> AbstractContextManager[Tensor]:
        """Lends the gradients of a chunk, shape (chunk.numel,), to the step, where the states are. They are not needed
        later.
        """
        return self._shards.shard(index)

    @property
    def is_in_memory(self) -> bool:
        """Whether all gradients are where the states are, so that the step does not wait for them."""
        return isinstance(self._shards, ShardsInMemory)

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


def too_often(name: str, accumulation: int) -> AccumulationError:
    """The error for more gradients of a parameter than `accumulation` declares."""
    return AccumulationError(
        f"{name} got its gradient a {_ordinal(accumulation + 1)} time before step(), and accumulation={accumulation}: "
        "declare how many backward passes come before each step, OffloadZero(..., accumulation=N), or "
        'accumulation="auto" where that is not known, or call step() or zero_grad() after each (with reentrant '
        "checkpointing, a module used twice counts twice: set "
        "use_reentrant=False)"
    )


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
