"""What ranks do together: the contract of a communicator, its arithmetic, and a world of one.

[Note: collectives]
Every rank of a communicator has to launch the same collectives in the same order, from one thread at a time; what
belongs together is found by that order alone. Tensors travel as bytes, so the wire dtype is the tensor's own and bits
arrive as they were sent.

A reduction is an all-to-all in the wire dtype, in which every rank gets all ranks' versions of its own part, and a
local sum: in fp32, in rank order, beginning with rank 0's version, then one fp32 division by the number of ranks, then,
if `out` is not fp32, one rounding to nearest even. Each element is summed by itself: the same bits at any bucket size,
on any device. It sends as much as a reduce-scatter does, (N-1)/N of the elements.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_BLOCK_NUMEL = 1 << 18
"""Elements summed over all ranks before the next: their fp32 sums stay in the cache."""
_DOUBLES = 40
"""Doubles that can hold any sum of doubles exactly: 2098 bits of range, 53 in each."""


class Work(ABC):
    """A collective under way.

    Until `wait` has returned, nobody may read or reuse `out`, nor change or free what is sent; every work has to be
    waited for. Where tensors are on a CUDA device, the result is there for what is queued on the current stream after
    `wait`.
    """

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would not block on another rank; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until the collective has completed. May be called again. Raises: RankError."""


class Communicator(ABC):
    """Collectives among `size` ranks that hold one partition each. See [Note: collectives].

    Guarantees: results have the same bits on all ranks that get the same result, and whatever the sizes of the calls;
    a rank that is slow, stuck or dead raises RankError on the others within the timeout, and then every later call
    raises the same error at once. Counts what this rank sends to others, padding included, by name of the collective.

    Attributes: rank and size in the group; local_rank and ranks_on_node among all processes of the job on this
    machine, which share its RAM, cores and drives. With replicas, `size` is a multiple of `shard_group.size`, the ranks
    of a shard group are consecutive, and those at one place in each of these are a replicate group; all of them fail
    together.
    """

    def __init__(self, rank: int, size: int, local_rank: int, ranks_on_node: int) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.ranks_on_node = ranks_on_node

    @property
    def shard_group(self) -> Communicator:
        """The ranks that keep all parameters together, where these are partitioned."""
        return self

    @property
    def replicate_group(self) -> Communicator:
        """The ranks that keep the same partitions of the parameters."""
        return SingleProcess(self.local_rank, self.ranks_on_node)

    @property
    def side_group(self) -> Communicator:
        """The same ranks, whose collectives are in an order of their own: for what does not come alike on all ranks
        between others. Failures and counts are shared. All ranks have to ask for it together at first.

        Raises: RankError.
        """
        return self

    @abstractmethod
    def reduce_scatter(self, full: Tensor, out: Tensor, *, scratch: Tensor | None = None) -> Work:
        """Averages over the ranks: `out` gets elements rank * k to (rank + 1) * k of the average of all `full`.

        Args: full: [size * k], contiguous, fp32, bf16 or fp16: the wire dtype. out: [k], fp32 or the wire dtype.
            scratch: like `full`, lent until `wait` has returned; None: allocated.
        Raises: ValueError for other shapes or dtypes, RankError.
        """

    @abstractmethod
    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        """`out` gets the shards of all ranks in rank order.

        Args: shard: [k], contiguous. out: [size * k], of the same dtype; `shard` may be its own place in it.
        Raises: ValueError for other shapes or dtypes, RankError.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites `tensor` (contiguous, of one shape and dtype on all ranks) with that of rank `source`.

        Raises: ValueError, RankError.
        """

    @abstractmethod
    def all_gather(self, values: Tensor) -> Tensor:
        """Every rank's `values`: [m] on the CPU, m alike on all ranks. Returns: [size, m] on the CPU, in rank order.

        For few values: blocks. Raises: ValueError, RankError.
        """

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """For each collective used: `<name>_calls`, and what this rank sent, `<name>_elements` and `<name>_bytes`."""

    @abstractmethod
    def close(self) -> bool:
        """Whether nobody reads or writes a tensor given here any more; may be called again.

        Not so after RankError where a rank is stuck: memory that a collective was given must then stay mapped.
        """

    def check(self) -> None:  # noqa: B027
        """Raises: RankError if a collective failed before."""

    def require_device(self, device: torch.device) -> None:  # noqa: B027
        """Raises: ConfigError if tensors on `device` cannot travel."""

    def barrier(self) -> None:
        """Returns when every rank has called it. Raises: RankError."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def all_reduce_any(self, flag: bool) -> bool:
        """Whether `flag` is true on one rank at least. Raises: RankError."""
        return bool(self.all_gather(torch.tensor([flag], device="cpu")).any())

    def all_equal(self, text: str) -> bool:
        """Whether all ranks gave the same text, a description of the layout, say. Raises: RankError."""
        digest = hashlib.sha256(text.encode()).digest()
        digests = self.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        return bool((digests == digests[0]).all())

    def exact_sum(self, values: Iterable[float]) -> float:
        """The sum of all ranks' values, exactly rounded: the bits of `math.fsum` over all of them on one rank.

        Each rank's sum travels without rounding, as a few doubles, so neither their number nor the ranks' matters.
        Returns: inf or nan if a value is not finite. Raises: RankError.
        """
        parts = torch.zeros(_DOUBLES, dtype=torch.float64, device="cpu")
        own = _exact_parts(values)
        parts[: len(own)] = torch.tensor(own, dtype=torch.float64, device="cpu")
        return _fsum(self.all_gather(parts).flatten().tolist())


class _Done(Work):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SingleProcess(Communicator):
    """A world of one: makes no call, and sends nothing."""

    def __init__(self, local_rank: int = 0, ranks_on_node: int = 1) -> None:
        super().__init__(0, 1, local_rank, ranks_on_node)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, scratch: Tensor | None = None) -> Work:
        check_reduction(full, out, scratch, 1)
        with torch.no_grad():
            out.copy_(full)
        return _Done()

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        check_gather(shard, out, 1)
        if shard.data_ptr() != out.data_ptr():
            with torch.no_grad():
                out.copy_(shard)
        return _Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        check_source(source, 1)

    def all_gather(self, values: Tensor) -> Tensor:
        return values.clone().reshape(1, -1)

    def exact_sum(self, values: Iterable[float]) -> float:
        return _fsum(values)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> bool:
        return True


def average(parts: Tensor, out: Tensor) -> None:
    """The local half of a reduction: see [Note: collectives] for its arithmetic.

    Args: parts: [size, k], fp32, bf16 or fp16, by rank. out: [k], fp32 or the dtype of `parts`; written.
    """
    size, numel = parts.shape
    # As a tensor: by a number, CUDA multiplies with its reciprocal.
    divisor = torch.full((1,), size, dtype=torch.float32, device=out.device)
    block = min(_BLOCK_NUMEL, numel) if out.is_cpu else numel
    own = None if out.dtype == torch.float32 else torch.empty(block, dtype=torch.float32, device=out.device)
    with torch.no_grad():
        for start in range(0, numel, block or 1):
            stop = min(start + block, numel)
            into = out[start:stop]
            total = into if own is None else own[: stop - start]
            total.copy_(parts[0, start:stop])
            for part in parts[1:, start:stop]:
                total.add_(part)
            total.div_(divisor)
            if own is not None:
                into.copy_(total)


def _exact_parts(values: Iterable[float]) -> list[float]:
    """At most _DOUBLES doubles whose exact sum is that of `values`; one alone if that is not finite."""
    own = array("d", values)
    parts: list[float] = []
    while True:
        rest = _fsum(chain(own, (-part for part in parts)))
        if rest == 0 or not math.isfinite(rest):
            return parts if rest == 0 else [rest]
        parts.append(rest)


def _fsum(values: Iterable[float]) -> float:
    """math.fsum, which raises where its result is not finite."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def check_reduction(full: Tensor, out: Tensor, scratch: Tensor | None, size: int) -> None:
    if full.dtype not in WIRE_DTYPES:
        raise ValueError(f"full is {full.dtype}, not {' or '.join(map(str, WIRE_DTYPES))}")
    if out.dtype not in (full.dtype, torch.float32):
        raise ValueError(f"out is {out.dtype}, not torch.float32 or {full.dtype}, which full is")
    _check_vector("out", out, out.numel(), full)
    _check_vector("full", full, out.numel() * size, out)
    if scratch is not None:
        _check_vector("scratch", scratch, full.numel(), full)
        if scratch.dtype != full.dtype:
            raise ValueError(f"scratch is {scratch.dtype}, not {full.dtype}, which full is")


def check_gather(shard: Tensor, out: Tensor, size: int) -> None:
    _check_vector("shard", shard, shard.numel(), out)
    _check_vector("out", out, shard.numel() * size, shard)
    if shard.dtype != out.dtype:
        raise ValueError(f"shard is {shard.dtype} and out {out.dtype}: they have to be alike")


def _check_vector(name: str, x: Tensor, numel: int, beside: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.numel() != numel or x.device != beside.device:
        raise ValueError(f"{name} has to be a contiguous [{numel}] tensor on {beside.device}, not {describe(x)}")


def check_source(source: int, size: int) -> None:
    if not 0 <= source < size:
        raise ValueError(f"source={source} is no rank of {size}")


def describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"
