"""Collectives: the contract of a communicator, the arithmetic of a reduction, and the communicator of one process.

[Note: collectives]
Every rank of a communicator has to launch the same collectives in the same order, from one thread at a time: only that
order says which calls belong together. Tensors travel as bytes, so bits arrive as they were sent, in any dtype.

A reduction is an all-to-all in the wire dtype, which gives every rank all ranks' versions of its own shard, and a local
sum: in fp32, in rank order, starting with rank 0's version; then one fp32 division by the number of ranks; then, if
`out` is not fp32, one rounding to nearest even. Each element is summed by itself, so the bits do not depend on bucket
size or device. It sends as much as a reduce-scatter does, (N-1)/N of the elements.

[Note: the numbers of ranks]
A shard lies on the disk of a machine, and a launcher may number the machines otherwise at the next start. Then ranks
are counted in a group by the shards that they hold: `Communicator.rank` is the number of the shard, by which files are
called, too, and `user_rank` is the rank as the launcher and the user's loop know it. Sums go by `user_rank`, as the
batches do, so the bits are those of a run whose machines were not renumbered.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
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

    Until `wait` has returned, `out` must not be read or reused, and what is sent must not be changed or freed. Every
    work has to be waited for. On a device, what is queued on the current stream after `wait`, or `wait_on_device`, sees
    the result.
    """

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return without waiting for another rank. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until the collective has completed. May be called again.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    def wait_on_device(self) -> None:
        """Makes what is queued on the current stream from now on begin after the collective.

        The host waits only if the tensors are on the CPU. `wait` has to follow; it raises what went wrong.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self.wait()


class Communicator(ABC):
    """Collectives among `size` ranks that hold one shard each. See [Note: collectives].

    Guarantees: the bits of a result are the same on all ranks, however the data is split into calls. If a rank is slow,
    stuck or dead, the others raise RankError within the timeout, and every later call raises the same error at once.
    `stats` counts what this rank sends to others, padding included.

    With replicas, `size` is a multiple of `shard_group.size`. The ranks of a shard group are consecutive, and those at
    the same place in each shard group are a replicate group. A failure in one of these groups, in `tensor_parallel` or
    in `everyone` fails all of them.

    Attributes:
        rank: this rank's number in the group.
        size: how many ranks the group has.
        user_ranks: for each number in the group, the rank as the user counts it: [Note: the numbers of ranks].
        local_rank: this process's number among those of the job on this machine.
        ranks_on_node: how many of the job's processes share this machine's RAM, cores and drives.
        timeout_s: how many seconds after the launch of a collective another rank counts as lost.
    """

    timeout_s = math.inf

    def __init__(self, rank: int, size: int, local_rank: int, ranks_on_node: int) -> None:
        self.rank = rank
        self.size = size
        self.user_ranks: Sequence[int] = range(size)
        self.local_rank = local_rank
        self.ranks_on_node = ranks_on_node

    @property
    def user_rank(self) -> int:
        """This rank, as the user counts ranks."""
        return self.user_ranks[self.rank]

    def in_order(self, user_ranks: Sequence[int]) -> Communicator | None:
        """The same ranks, counted otherwise; see [Note: the numbers of ranks]. All of them have to call it.

        Args:
            user_ranks: for each number, which of this group's ranks gets it.

        Returns:
            The communicator of the run from now on; None: the ranks of this one cannot be counted otherwise, because
            they are members of other groups, too.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        return None

    @property
    def shard_group(self) -> Communicator:
        """The ranks among which the parameters are sharded."""
        return self

    @property
    def replicate_group(self) -> Communicator:
        """The ranks that keep the same shards of the parameters."""
        return SingleProcess(self.local_rank, self.ranks_on_node)

    @property
    def tensor_parallel(self) -> Communicator:
        """The ranks that have the parts of one model: [Note: tensor parallelism] in tensor_parallel.py."""
        return SingleProcess(self.local_rank, self.ranks_on_node)

    @property
    def everyone(self) -> Communicator:
        """All ranks that train one model: these, and those of the other slices, one slice after the other."""
        return self

    @property
    def side_group(self) -> Communicator:
        """The same ranks, with an order of collectives of its own.

        It is for collectives that ranks do not launch at the same place among the others. Failures and counts are
        shared with this group. The first use is a collective.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        return self

    @abstractmethod
    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        """Averages over the ranks: `out` gets elements rank * k to (rank + 1) * k of the average of all `full`.

        Args:
            full: shape (size * k,), contiguous, fp32, bf16 or fp16: the wire dtype.
            out: 1-D, k elements together, which get the average one after the other, of one dtype: fp32 or the wire
                dtype.
            scratch: like `full`, lent until `wait` has returned; None: allocated.

        Raises:
            ValueError: for other shapes or dtypes.
            RankError: another rank failed, or cannot be reached.
        """

    @abstractmethod
    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        """Gathers the shards of all ranks into `out`, in rank order.

        Args:
            shard: shape (k,), contiguous.
            out: shape (size * k,), of the same dtype; `shard` may be its own place in it.

        Raises:
            ValueError: for other shapes or dtypes.
            RankError: another rank failed, or cannot be reached.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites `tensor` with that of rank `source`.

        Args:
            tensor: contiguous, of the same shape and dtype on all ranks.
            source: the rank.

        Raises:
            ValueError: if `source` is no rank, or `tensor` is not contiguous.
            RankError: another rank failed, or cannot be reached.
        """

    @abstractmethod
    def exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        """Sends bytes to one rank and receives bytes from one. All ranks have to call it.

        Args:
            sent: uint8 on the CPU, 1-D; empty: nothing is sent.
            target: the rank that receives them.
            received: uint8 on the CPU, 1-D, as long as what `source` sends to this rank; written. Empty: nothing comes.
            source: the rank that sends them.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """

    @abstractmethod
    def all_gather(self, values: Tensor) -> Tensor:
        """Gathers a few values from every rank, and waits for them.

        Args:
            values: shape (m,), on the CPU, with the same m on all ranks.

        Returns:
            Shape (size, m), on the CPU, in rank order.

        Raises:
            ValueError: for another shape or device.
            RankError: another rank failed, or cannot be reached.
        """

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """For each collective used: `<name>_calls`, and what this rank sent, `<name>_elements` and `<name>_bytes`."""

    @abstractmethod
    def close(self) -> bool:
        """Ends all collectives. May be called again.

        Returns:
            Whether no tensor that was given to a collective is read or written any more. It is False if a rank is
            stuck. Then the memory of these tensors must stay mapped.
        """

    def check(self) -> None:  # noqa: B027
        """Raises the failure of an earlier collective, if there was one.

        Raises:
            RankError: if a collective failed before.
        """

    def require_device(self, device: torch.device) -> None:  # noqa: B027
        """Requires that tensors on `device` can travel.

        Raises:
            ConfigError: if they cannot.
        """

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def all_reduce_any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        return bool(self.all_gather(torch.tensor([flag], device="cpu")).any())

    def all_equal(self, text: str) -> bool:
        """Whether all ranks gave the same text.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        digests = self.all_gather(digest_of(text))
        return bool((digests == digests[0]).all())

    def exact_sum(self, values: Iterable[float]) -> float:
        """The sum of all ranks' values, rounded once: the same bits as `math.fsum` over all of them.

        Each rank's exact sum travels as a few doubles, so the result does not depend on the number of ranks. It is inf
        or nan if a value is not finite.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        terms = torch.zeros(_DOUBLES, dtype=torch.float64, device="cpu")
        exact = _exact_terms(values)
        terms[: len(exact)] = torch.tensor(exact, dtype=torch.float64, device="cpu")
        return _fsum(self.all_gather(terms).flatten().tolist())


def digest_of(text: str) -> Tensor:
    """What stands for a text where ranks compare theirs: 32 numbers of a byte each."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


class _Done(Work):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SingleProcess(Communicator):
    """One process alone. It makes no call, and sends nothing."""

    def __init__(self, local_rank: int = 0, ranks_on_node: int = 1) -> None:
        super().__init__(0, 1, local_rank, ranks_on_node)

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        check_reduction(full, out, scratch, 1)
        average(full.view(1, -1), out)
        return _Done()

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        check_gather(shard, out, 1)
        if shard.data_ptr() != out.data_ptr():
            with torch.no_grad():
                out.copy_(shard)
        return _Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        check_source(source, 1)

    def exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        received.copy_(sent)

    def all_gather(self, values: Tensor) -> Tensor:
        return values.clone().reshape(1, -1)

    def exact_sum(self, values: Iterable[float]) -> float:
        return _fsum(values)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> bool:
        return True


class SingleOfSlice(SingleProcess):
    """One of several tensor-parallel ranks that is the only data-parallel rank of its slice."""

    def __init__(self, tensor_parallel: Communicator, everyone: Communicator) -> None:
        super().__init__(everyone.local_rank, everyone.ranks_on_node)
        self._tensor_parallel = tensor_parallel
        self._everyone = everyone

    @property
    def tensor_parallel(self) -> Communicator:
        return self._tensor_parallel

    @property
    def everyone(self) -> Communicator:
        return self._everyone

    def stats(self) -> dict[str, int]:
        return self._everyone.stats()

    def close(self) -> bool:
        return self._everyone.close()

    def check(self) -> None:
        self._everyone.check()

    def require_device(self, device: torch.device) -> None:
        self._everyone.require_device(device)


def is_in_order(user_ranks: Sequence[int]) -> bool:
    """Whether ranks have the shards of their own numbers; see [Note: the numbers of ranks]."""
    return [*user_ranks] == [*range(len(user_ranks))]


def average(rows: Tensor, out: Sequence[Tensor], user_ranks: Sequence[int] | None = None) -> None:
    """Averages over the ranks, the local half of a reduction; see [Note: collectives] for its arithmetic.

    Args:
        rows: shape (size, k), fp32, bf16 or fp16, by number in the group.
        out: 1-D, k elements together, fp32 or the dtype of `rows`; written, one after the other.
        user_ranks: the rank of each row, by which they are summed; None: their numbers.
    """
    for part, into in zip(rows.split([len(one) for one in out], dim=1), out, strict=True):
        _average(part, into, user_ranks)


def _average(rows: Tensor, out: Tensor, user_ranks: Sequence[int] | None) -> None:
    size, numel = rows.shape
    # As a tensor: by a number, CUDA multiplies with its reciprocal.
    divisor = torch.full((1,), size, dtype=torch.float32, device=out.device)
    block = min(_BLOCK_NUMEL, numel) if out.is_cpu else numel
    first, *others = range(size) if user_ranks is None else sorted(range(size), key=user_ranks.__getitem__)
    fp32 = None if out.dtype == torch.float32 else torch.empty(block, dtype=torch.float32, device=out.device)
    with torch.no_grad():
        for start in range(0, numel, block or 1):
            stop = min(start + block, numel)
            into = out[start:stop]
            total = into if fp32 is None else fp32[: stop - start]
            total.copy_(rows[first, start:stop])
            for row in others:
                total.add_(rows[row, start:stop])
            total.div_(divisor)
            if fp32 is not None:
                into.copy_(total)


def _exact_terms(values: Iterable[float]) -> list[float]:
    """At most _DOUBLES doubles whose exact sum is that of `values`; a single one if the sum is not finite."""
    numbers = array("d", values)
    terms: list[float] = []
    while True:
        rest = _fsum(chain(numbers, (-term for term in terms)))
        if rest == 0 or not math.isfinite(rest):
            return terms if rest == 0 else [rest]
        terms.append(rest)


def _fsum(values: Iterable[float]) -> float:
    """The result of math.fsum, also where it is not finite and math.fsum raises."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def check_reduction(full: Tensor, out: Sequence[Tensor], scratch: Tensor | None, size: int) -> None:
    if full.dtype not in WIRE_DTYPES:
        raise ValueError(f"full is {full.dtype}, not {' or '.join(map(str, WIRE_DTYPES))}")
    for one in out:
        if one.dtype not in (full.dtype, torch.float32):
            raise ValueError(f"out is {one.dtype}, not torch.float32 or {full.dtype}, which full is")
        _check_vector("out", one, one.numel(), full)
    _check_vector("full", full, sum(one.numel() for one in out) * size, full)
    if scratch is not None:
        _check_vector("scratch", scratch, full.numel(), full)
        if scratch.dtype != full.dtype:
            raise ValueError(f"scratch is {scratch.dtype}, not {full.dtype}, which full is")


def check_gather(shard: Tensor, out: Tensor, size: int) -> None:
    _check_vector("shard", shard, shard.numel(), out)
    _check_vector("out", out, shard.numel() * size, shard)
    if shard.dtype != out.dtype:
        raise ValueError(f"shard is {shard.dtype} and out {out.dtype}: they have to be alike")


def _check_vector(name: str, x: Tensor, numel: int, other: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.numel() != numel or x.device != other.device:
        raise ValueError(f"{name} has to be a contiguous [{numel}] tensor on {other.device}, not {describe(x)}")


def check_source(source: int, size: int) -> None:
    if not 0 <= source < size:
        raise ValueError(f"source={source} is no rank of {size}")


def describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"
