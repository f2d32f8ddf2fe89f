"""Runs that end as if their process had been killed, in a process that goes on."""

from __future__ import annotations

from offload import OffloadZero


class LostError(Exception):
    """What stops a run that is lost."""


def lose(optimizer: OffloadZero) -> None:
    """Nothing more is committed, and the files are free for the next run."""
    optimizer._parts.run.health.fail(LostError())
    optimizer.close()
