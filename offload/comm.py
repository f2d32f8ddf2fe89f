"""The only file that knows torch.distributed."""

from __future__ import annotations

import torch.distributed as dist

from offload.errors import ConfigError


def require_one_rank() -> None:
    """Raises: ConfigError in a job of several ranks, which this version cannot partition."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed runs with {dist.get_world_size()} ranks: this version trains on one. "
            "Start a single process, without torchrun or with --nproc-per-node=1"
        )
