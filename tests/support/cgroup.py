"""A memory cgroup of a test's own, in which the kernel kills what needs more."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[Path | None]:
    """A cgroup, of version 1 or 2, with room for `nbytes`; None where none can be made: it needs root."""
    is_old = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if is_old else ROOT) / f"offload-test-{os.getpid()}"
    with suppress(OSError):
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if is_old else "memory.max")
        swap = folder / ("memory.memsw.limit_in_bytes" if is_old else "memory.swap.max")
        limit.write_text(str(nbytes))
        with suppress(OSError):  # a kernel without swap
            swap.write_text(str(nbytes if is_old else 0))
    try:
        yield folder if (folder / "cgroup.procs").exists() and _limit(folder) == nbytes else None
    finally:
        for _ in range(50):
            with suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:  # what was killed is still being taken apart
                    time.sleep(0.1)
                    continue
            break


def run_in(folder: Path, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """A command, in a cgroup from its first instruction on."""
    join = f'echo $$ > "{folder}/cgroup.procs" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", join, "sh", *command], capture_output=True, text=True, timeout=timeout, check=False
    )


def was_killed(ended: subprocess.CompletedProcess[str]) -> bool:
    return ended.returncode == -signal.SIGKILL


def _limit(folder: Path) -> int:
    for name in ("memory.limit_in_bytes", "memory.max"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return -1
