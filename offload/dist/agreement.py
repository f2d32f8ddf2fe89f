"""What ranks tell each other beside gradients: first values, whole lines of partitioned tensors, their options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.dist.communicator import Communicator
from offload.config import Config
from offload.errors import ConfigError, OffloadError
from offload.layout import Layout
from offload.optim.adopt import UNSUPPORTED
from offload.optim.adam import scalars_of

BLOCK = 1 << 20
"""Elements that are gathered at once, so that what all ranks send stays small."""


@torch.no_grad()
def broadcast_from_first(comm: Communicator, tensors: Iterable[Tensor]) -> None:
    """Gives `tensors` the values that they have on rank 0, as DistributedDataParallel does. Raises: RankError."""
    if comm.size == 1:
        return
    for tensor in tensors:
        if tensor.numel():
            line = tensor.detach().contiguous()
            comm.broadcast(line)
            if line.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(line)


def all_gather_shards(comm: Communicator, layout: Layout, param: int, line: Tensor) -> Tensor:
    """A line of `param` with every rank's part of it; all ranks have to call it.

    Args: line: shape (numel,), on the CPU, of which this rank's part, `layout.param_shard_range(param)`, counts; overwritten.
    Raises: RankError.
    """
    if comm.size == 1:
        return line
    for start in range(0, line.numel(), BLOCK):
        stop = min(start + BLOCK, line.numel())
        rows = comm.all_gather(line[start:stop])
        for rank, row in enumerate(rows):
            first, last = (min(max(edge, start), stop) for edge in layout.param_shard_range(param, rank))
            line[first:last] = row[first - start : last - start]
    return line


def all_gather_object(comm: Communicator, data: bytes) -> list[bytes]:
    """What every rank gave, by rank. Raises: RankError."""
    sizes = comm.all_gather(torch.tensor([len(data)], device="cpu")).flatten().tolist()
    lines = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
    lines[comm.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for rank, line in enumerate(lines):
        comm.broadcast(line, rank)
    return [line.numpy().tobytes() for line in lines]


@contextmanager
def agree_on_error(comm: Communicator, elsewhere: OffloadError | None = None) -> Iterator[None]:
    """What raises here on one rank raises on all of them, so that none waits for one that has given up.

    Raises: on ranks where nothing was wrong `elsewhere` (None: a ConfigError), RankError.
    """
    try:
        yield
    except Exception:
        comm.all_reduce_any(True)
        raise
    if comm.all_reduce_any(False):
        raise elsewhere or ConfigError("another rank could not take the model: its own error says why")


def require_alike(comm: Communicator, layout: Layout, config: Config) -> None:
    """Makes the order of collectives `beside` others, as this is the first time that ranks meet as ranks of one run.

    Raises: ConfigError if their models, or what else decides about what they send, differ; RankError.
    """
    options = (config.stage, config.accumulation, config.param_tier, config.bucket_bytes)
    commits = (config.commit_every, config.resume, config.split_master)
    if not comm.all_equal(repr((layout.specs, layout.flats, layout.ranks, layout.replicas, options, commits))):
        raise ConfigError(
            "the ranks differ in the model (names, sizes, dtypes, units, param groups), or in stage, accumulation, "
            "param_tier, commit_every, resume, Tuning.split_master or Tuning.bucket: give all of them the same"
        )
    comm.side_group.barrier()


def require_same_step(
    comm: Communicator,
    groups: Sequence[Mapping[str, Any]],
    scale: float,
    *,
    skips: bool = False,
    fault: ConfigError | None = None,
) -> None:
    """Args: groups: the optimizer's param_groups; scale: of the gradients (clipping, a loss scale), NaN if this rank
    has a fault; skips: whether it skips the step; fault: why it cannot make it, to be raised.

    Raises: ConfigError on all ranks if they are about to step differently, or one has a fault; RankError.
    """
    if comm.size > 1:
        scalars = None if fault is not None else [scalars_of(group, 1, scale) for group in groups]
        variants = [[bool(group.get(option)) for option in UNSUPPORTED] for group in groups]
        if not comm.all_equal(repr((scalars, variants, skips))) and fault is None:
            raise ConfigError(
                "the ranks differ in the hyper-parameters of this step, or in how its gradients are clipped or scaled: "
                "set param groups, call clip_grad_norm_ and use a GradScaler alike on every rank, then step() again; "
                "nothing was changed"
            )
    if fault is not None:
        raise fault
