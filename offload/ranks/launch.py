"""What launchers (torchrun, Open MPI, MPICH, Slurm) tell a process in its environment."""

from __future__ import annotations

from collections.abc import Mapping

from offload.errors import ConfigError

_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Variables of each launcher: the local rank, and the number of processes on the node."""


def launched(environ: Mapping[str, str]) -> int:
    """How many processes were started together.

    Raises:
        ConfigError: if the variable is no valid number.
    """
    return _number(environ, "WORLD_SIZE", least=1, default=1)


def rank_on_node(environ: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Reads (local_rank, ranks_on_node) from the launcher's variables.

    Without them all `size` processes count as being on this machine: a budget divided by too many still holds.

    Raises:
        ConfigError: if a variable is no valid number.
    """
    for name, count in _LOCAL:
        if name in environ and count in environ:
            ranks_on_node = _number(environ, count, least=1)
            local_rank = _number(environ, name, least=0)
            if local_rank >= ranks_on_node:
                raise ConfigError(f"{name}={local_rank} and {count}={ranks_on_node}: the first counts from 0")
            return local_rank, ranks_on_node
    return rank, size


def _number(environ: Mapping[str, str], name: str, *, least: int, default: int | None = None) -> int:
    text = environ.get(name, default)
    try:
        number = int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise ConfigError(f"the environment says {name}={text!r}: it has to be a number, at least {least}")
    return number
