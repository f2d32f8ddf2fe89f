"""What ranks agree on beside gradients: first values, whole parameters, errors, options."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from offload.choices import Choice
from offload.errors import ConfigError, OtherRankError
from offload.layout import Layout
from offload.ranks.communicator import Communicator
from offload.sizes import MIB

T = TypeVar("T")

TOLD_AFTER_S = 5.0
"""How often ranks that wait for others are told that these go on."""
BLOCK = 1 << 20
"""Elements gathered at once, so that the buffer for all ranks stays small."""
TOGETHER_BYTES = 4 * MIB
"""Of first values that travel together."""
SMALL_BYTES = 1024
"""Objects of so many bytes travel with their sizes, in one collective."""
_SIZE_BYTES = 8
_FOUND, _FAILED = b"\0", b"\1"
"""What begins the bytes of a rank that found something, and of one that failed."""


@torch.no_grad()
def broadcast_from_first(comm: Communicator, tensors: Iterable[Tensor]) -> None:
    """Gives `tensors` the values that they have on the user's rank 0, as DistributedDataParallel does.

    Small ones travel together.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    if comm.size == 1:
        return
    together: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > TOGETHER_BYTES:
            _broadcast(comm, [tensor])
        elif tensor.numel():
            small = together.setdefault(tensor.device, [])
            if sum(other.nbytes for other in small) + tensor.nbytes > TOGETHER_BYTES:
                _broadcast(comm, small)
                small.clear()
            small.append(tensor)
    for small in together.values():
        _broadcast(comm, small)


def _broadcast(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Broadcasts tensors of one device from the user's rank 0, as one."""
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    comm.broadcast(whole, comm.user_ranks.index(0))
    for tensor, part in zip(tensors, whole.split([len(part) for part in parts]), strict=True):
        if part.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def all_gather_shards(comm: Communicator, layout: Layout, param: int, views: Sequence[Tensor]) -> None:
    """Completes values of a parameter's elements from all ranks. Each of them has to call it.

    Args:
        comm: the ranks.
        layout: the layout.
        param: the parameter's index.
        views: of one dtype, each of shape (numel,), on the CPU. This rank's shard of them,
            `layout.param_shard_range(param)`, is sent; the rest is overwritten.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    if comm.size == 1:
        return
    numel, at_once = views[0].numel(), BLOCK // len(views)
    for start in range(0, numel, at_once):
        stop = min(start + at_once, numel)
        rows = comm.all_gather(torch.cat([view[start:stop] for view in views]))
        for rank, row in enumerate(rows.view(comm.size, len(views), -1)):
            first, last = (min(max(edge, start), stop) for edge in layout.param_shard_range(param, rank))
            for view, values in zip(views, row, strict=True):
                view[first:last] = values[first - start : last - start]


def all_gather_object(comm: Communicator, value: T, kind: Any = Any) -> list[T]:
    """Gathers an object from each rank.

    Args:
        comm: the ranks.
        value: of plain types, dataclasses, named tuples and paths.
        kind: the type that each is made into again; Any: plain dicts and lists.

    Returns:
        What each rank gave, by rank.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    return [_decoded(row, kind) for row in _all_gather_bytes(comm, _encoded(value))]


def found_by_all(comm: Communicator, find: Callable[[], T], kind: Any = Any) -> list[T]:
    """Gathers what each rank finds: all ranks succeed, or all fail, as in `together`. It costs one collective.

    Args:
        comm: the ranks.
        find: called on each rank. It returns what `all_gather_object` takes.
        kind: see `all_gather_object`.

    Returns:
        What each rank found, by rank.

    Raises:
        Exception: what `find` raised on this rank.
        OtherRankError: it failed on another rank, and not on this one.
        RankError: another rank failed, or cannot be reached.
    """
    try:
        data = _FOUND + _encoded(find())
    except Exception as error:
        _all_gather_bytes(comm, _FAILED + _encoded(_Failure.of(error, comm)))
        raise
    rows = _all_gather_bytes(comm, data)
    _raise_if_failed([_decoded(row[1:], _Failure) if row[:1] == _FAILED else None for row in rows], comm)
    return [_decoded(row[1:], kind) for row in rows]


def _encoded(value: object) -> bytes:
    # Paths are what msgspec does not know: they travel as the bytes of their names.
    return msgspec.msgpack.encode(value, enc_hook=os.fsencode)


def _decoded(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda _, name: Path(os.fsdecode(name)))


def _all_gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Gathers bytes from each rank: few in one collective, many in two."""
    small = len(data).to_bytes(_SIZE_BYTES, "little") + data[:SMALL_BYTES]
    told = [row.numpy().tobytes() for row in comm.all_gather(_bytes(small, _SIZE_BYTES + SMALL_BYTES))]
    sizes = [int.from_bytes(row[:_SIZE_BYTES], "little") for row in told]
    found = [row[_SIZE_BYTES:] for row in told]
    if max(sizes) > SMALL_BYTES:
        rest = comm.all_gather(_bytes(data[SMALL_BYTES:], max(sizes) - SMALL_BYTES))
        found = [row + more.numpy().tobytes() for row, more in zip(found, rest, strict=True)]
    return [row[:size] for row, size in zip(found, sizes, strict=True)]


def _bytes(data: bytes, numel: int) -> Tensor:
    """Bytes as a tensor, shape (numel,), with zeros behind them."""
    return torch.frombuffer(bytearray(data.ljust(numel, b"\0")), dtype=torch.uint8)


def _never() -> bool:
    return False


@contextmanager
def together(
    comm: Communicator, result: str = "", is_final: Callable[[], bool] = _never
) -> Iterator[Callable[[], None]]:
    """A context whose work succeeds on all ranks, or fails on all: no rank waits for one that has given up.

    A rank that fails raises its own error. The other ranks learn of it. If no rank fails, this costs one small
    collective.

    Args:
        comm: the ranks, each of which does its part.
        result: what is the case after a failure; it ends the message on ranks that did not fail.
        is_final: called after a failure on this rank: whether nothing can go on after it.

    Yields:
        What ranks may call in between, all of them as often: it raises what the end of the context would.

    Raises:
        OtherRankError: if another rank failed, and this one did not. It has that rank's message and `is_final`.
        RankError: if a rank does not take part.
    """
    is_told = False

    def check() -> None:
        nonlocal is_told
        if comm.all_reduce_any(False):
            is_told = True
            _raise_if_failed(all_gather_object(comm, None, _Failure | None), comm, result)

    try:
        yield check
    except Exception as error:
        if is_told:
            raise
        comm.all_reduce_any(True)
        all_gather_object(comm, _Failure.of(error, comm, is_final=is_final()))
        raise
    check()


class _Failure(NamedTuple):
    """How a rank failed, as it tells the others.

    Attributes:
        message: what follows the number of the rank in their message.
        is_final: whether nothing can go on after it.
    """

    message: str
    is_final: bool

    @classmethod
    def of(cls, error: Exception, comm: Communicator, *, is_final: bool = False) -> _Failure:
        """Of an error of this rank."""
        machine = f" on {socket.gethostname()}" if comm.size > comm.ranks_on_node else ""
        message = f"{machine}: {type(error).__name__}: {error}"
        # Names of files may hold what UTF-8 has no bytes for.
        return cls(message.encode(errors="backslashreplace").decode(), is_final)


def _raise_if_failed(told: Sequence[_Failure | None], comm: Communicator, result: str = "") -> None:
    """Raises if a rank failed.

    Args:
        told: what each rank told; None: it did not fail.
        comm: the ranks.
        result: see `together`.

    Raises:
        OtherRankError: one did.
    """
    failed = [(rank, one) for rank, one in zip(comm.user_ranks, told, strict=True) if one is not None]
    if failed:
        rank, first = min(failed)
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        is_final = any(one.is_final for _, one in failed)
        raise OtherRankError(f"rank {rank}{first.message}{more}{result}", is_final=is_final)


@contextmanager
def while_others_wait(comm: Communicator, message: str) -> Iterator[Callable[[], None]]:
    """A context for work of some ranks that may take longer than a collective is waited for. All ranks enter it.

    A rank that has nothing to do waits at the end, for all others. It succeeds on all ranks, or fails on all, as
    `together`.

    Args:
        comm: the ranks.
        message: printed by a rank that has to wait long.

    Yields:
        What the work calls now and then: it tells those who wait that it goes on.

    Raises:
        OtherRankError: if another rank failed, and this one did not.
        RankError: if a rank does not take part.
    """
    told = time.monotonic()

    def goes_on() -> None:
        nonlocal told
        if time.monotonic() - told > TOLD_AFTER_S:
            comm.all_reduce_any(True)
            told = time.monotonic()

    has_said = comm.size == 1
    with together(comm):
        try:
            yield goes_on
        finally:
            while comm.all_reduce_any(False):
                if not has_said:
                    with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
                        print(f"offload: rank {comm.rank} waits: {message}", file=sys.stderr)
                has_said = True


def require_alike(comm: Communicator, layout: Layout, choice: Choice) -> None:
    """Makes sure that all ranks train the same model in the same way.

    This is the first collective of a run, and also makes `side_group`.

    Raises:
        ConfigError: if their models, or the options that decide what they send, differ.
        RankError: another rank failed, or cannot be reached.
    """
    grads, waiting = choice.grads, choice.activations
    options = (grads.stage, grads.declared, str(choice.params.tier), grads.bucket_bytes, choice.params.base_bytes > 0)
    activations = (str(waiting.tier), waiting.partitioned, waiting.recompute)
    states = (choice.states.split_master, choice.states.form)
    resume = (
        choice.commits.resume,
        choice.commits.begins_states,
        choice.commits.converts_states,
        choice.commits.transfers,
    )
    same = (layout.ranks, layout.replicas, options, (choice.commits.every, resume, states), activations)
    told = (
        "stage, accumulation, param_tier, commit_every, resume, resume_states, resume_transfer, states, "
        "activation_tier, partition_activations, Tuning.split_master, Tuning.recompute, Tuning.bucket or in whether "
        "they keep a quantised base: give all of them the same"
    )
    if not comm.all_equal(repr((layout.specs, layout.flats, same))):
        raise ConfigError(f"the ranks differ in the model (names, sizes, dtypes, units, param groups), or in {told}")
    comm.side_group.barrier()
    if comm.everyone is comm:
        return
    # Parts of one parameter may differ in size: beside that all slices train the same.
    names = [(spec.name, spec.unit, spec.dtype, spec.group, spec.shard_dim) for spec in layout.specs]
    if not comm.everyone.all_equal(repr((names, same))):
        raise ConfigError(
            "the tensor-parallel ranks differ in the model (names, dtypes, units, param groups, how it is sharded), or "
            f"in {told}"
        )
    comm.everyone.side_group.barrier()
