"""What of this machine a run may use: free memory, and threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from offload.io.files import LOCAL
from offload.native.threads import usable_cpus

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60


def free_memory() -> int:
    """How many bytes of RAM this process may still use: those of the machine, or less if a control group limits it."""
    free = _available() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = cgroup_room()
    return free if room is None else min(free, room)


def cgroup_room() -> int | None:
    """How many bytes are left below the limits of this process's control groups, v1 and v2; None: there is no limit."""
    try:
        lines = [line.split(":", 2) for line in LOCAL.kernel_text(_OWN_GROUPS).splitlines()]
    except OSError:
        return None
    rooms: list[int] = []
    for number, controllers, group in lines:
        if number == "0":
            rooms += _rooms(_CGROUP, group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms(_CGROUP / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms, default=None)


def _rooms(root: Path, group: str, limit: str, used: str) -> Iterator[int]:
    """How many bytes are left below the limit of a control group, and of each of its parents up to `root`.

    Groups without a limit are left out. They have "max" there, or a huge number.
    """
    folder = root / group.strip().lstrip("/")
    for one in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):
            most = int(LOCAL.kernel_text(one / limit))
            if most < _NO_LIMIT:
                yield max(most - int(LOCAL.kernel_text(one / used)), 0)
        if one == root:
            break


def _available() -> int | None:
    """How many bytes of RAM are available on the whole machine, as the kernel estimates it; None if it does not say."""
    try:
        for line in LOCAL.kernel_text(Path("/proc/meminfo")).splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


LAUNCHING_THREADS = 2
"""Of a model on a device: the one of the forward and autograd's own, which launch its kernels one after the other. One
that has to wait for a CPU delays all that comes after it."""


def kernel_threads(wanted: int | None, *, ranks_on_node: int, direct: bool, cpus: int | None = None) -> int:
    """How many threads this rank's kernels take.

    Args:
        wanted: `Tuning.threads`; None: a share of the usable CPUs, less those of the threads that launch a device's
            kernels.
        ranks_on_node: how many ranks share the CPUs.
        direct: whether the model's device is the CPU, which waits while kernels run.
        cpus: how many CPUs there are; None: those that are usable here.
    """
    count = usable_cpus() if cpus is None else cpus
    return wanted or max(count // ranks_on_node - (0 if direct else LAUNCHING_THREADS), 1)
