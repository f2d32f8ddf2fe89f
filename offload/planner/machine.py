"""What this machine has."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes of RAM that this process may still use: the machine's, or less if a control group limits it."""
    free = _meminfo("MemAvailable") or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = cgroup_room()
    return free if room is None else min(free, room)


def cgroup_room() -> int | None:
    """Bytes that this process's control group (v2) and its parents leave it; None: no limit."""
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return None
    rooms = []
    group = _CGROUP / line.removeprefix("0::").strip().lstrip("/")
    for folder in (group, *group.parents):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                rooms.append(max(int(limit) - int((folder / "memory.current").read_text()), 0))
        except (OSError, ValueError):
            pass
        if folder == _CGROUP:
            break
    return min(rooms, default=None)


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
