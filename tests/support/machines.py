"""Machines with disks of their own, as folders of one: ranks work in that of their machine.

`/proc/self/cwd/run` is a name that the kernel follows to another directory in each process, so nothing of the library
is replaced to hide the files of other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

RUN = "/proc/self/cwd/run"
"""The name of the run's directory on every machine."""

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/cwd"), reason="needs Linux's /proc")


@contextmanager
def on(base: str, machines: Sequence[int]) -> Iterator[None]:
    """This rank is on its machine. Args: machines: by rank."""
    before = os.getcwd()
    here = Path(base, f"machine{machines[dist.get_rank()]}")
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    try:
        yield
    finally:
        os.chdir(before)
