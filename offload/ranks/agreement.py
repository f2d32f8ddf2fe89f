"""What ranks agree on beside gradients: first values, whole parameters, errors, options."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from offload.choices import Choice
from offload.errors import ConfigError, OtherRankError
from offload.layout import Layout
from offload.ranks.communicator import Communicator

T = TypeVar("T")

TOLD_AFTER_S = 5.0
"""How often ranks that wait for others are told that these go on."""
BLOCK = 1 << 20
"""Elements gathered at once, so that the buffer for all ranks stays small."""


@torch.no_grad()
def broadcast_from_first(comm: Communicator, tensors: Iterable[Tensor]) -> None:
    """Gives `tensors` the values that they have on rank 0, as DistributedDataParallel does.

    Raises:
        RankError: another rank failed, or cannot be reached.
    """
    if comm.size == 1:
        return
    for tensor in tensors:
        if tensor.numel():
            view = tensor.detach().contiguous()
            comm.broadcast(view)
            if view.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(view)


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
    # Paths are what msgspec does not know: they travel as the bytes of their names.
    data = msgspec.msgpack.encode(value, enc_hook=os.fsencode)
    sizes = comm.all_gather(torch.tensor([len(data)], device="cpu")).flatten().tolist()
    rows = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
    rows[comm.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for rank, row in enumerate(rows):
        comm.broadcast(row, rank)
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=lambda _, name: Path(os.fsdecode(name)))
    return [decoder.decode(row.numpy().tobytes()) for row in rows]


def _never() -> bool:
    return False


@contextmanager
def together(comm: Communicator, result: str = "", is_final: Callable[[], bool] = _never) -> Iterator[None]:
    """A context whose work succeeds on all ranks, or fails on all: no rank waits for one that has given up.

    A rank that fails raises its own error. The other ranks learn of it. If no rank fails, this costs one small
    collective.

    Args:
        comm: the ranks, each of which does its part.
        result: what is the case after a failure; it ends the message on ranks that did not fail.
        is_final: called after a failure on this rank: whether nothing can go on after it.

    Raises:
        OtherRankError: if another rank failed, and this one did not. It has that rank's message and `is_final`.
        RankError: if a rank does not take part.
    """
    try:
        yield
    except Exception as error:
        comm.all_reduce_any(True)
        machine = f" on {socket.gethostname()}" if comm.size > comm.ranks_on_node else ""
        message = f"{machine}: {type(error).__name__}: {error}"
        # Names of files may hold what UTF-8 has no bytes for.
        all_gather_object(comm, (message.encode(errors="backslashreplace").decode(), is_final()))
        raise
    if comm.all_reduce_any(False):
        told: list[tuple[str, bool] | None] = all_gather_object(comm, None)
        failed = [(rank, *one) for rank, one in enumerate(told) if one is not None]
        rank, message, _ = failed[0]
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise OtherRankError(f"rank {rank}{message}{more}{result}", is_final=any(final for *_, final in failed))


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
    options = (grads.stage, grads.declared, str(choice.params.tier), grads.bucket_bytes)
    activations = (str(waiting.tier), waiting.partitioned, waiting.recompute)
    states = (choice.states.split_master, choice.states.form)
    resume = (choice.commits.resume, choice.commits.begins_states, choice.commits.converts_states)
    commits = (choice.commits.every, resume, states)
    if not comm.all_equal(repr((layout.specs, layout.flats, layout.ranks, layout.replicas, options, commits))):
        raise ConfigError(
            "the ranks differ in the model (names, sizes, dtypes, units, param groups), or in stage, accumulation, "
            "param_tier, commit_every, resume, resume_states, states, Tuning.split_master or Tuning.bucket: give all "
            "of them the same"
        )
    # Parts of one parameter may differ in size: beside that all slices train the same.
    names = [(spec.name, spec.unit, spec.dtype, spec.group, spec.shard_dim) for spec in layout.specs]
    if not comm.everyone.all_equal(repr((names, layout.ranks, layout.replicas, options, commits, activations))):
        raise ConfigError(
            "the tensor-parallel ranks differ in the model (names, dtypes, units, param groups, how it is sharded), or "
            "in stage, accumulation, param_tier, commit_every, resume, resume_states, states, activation_tier, "
            "partition_activations, Tuning.split_master, Tuning.recompute or Tuning.bucket: give all of them the same"
        )
    comm.side_group.barrier()
    comm.everyone.side_group.barrier()
