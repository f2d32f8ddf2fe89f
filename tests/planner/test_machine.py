"""What a control group leaves of the machine's RAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.planner import machine

NONE = (1 << 63) - 4096
"""What version 1 says where there is no limit."""


@pytest.mark.parametrize(
    ("own", "files", "room"),
    [
        ("0::/a/b", {"a/b/memory": ("max", 50), "a/memory": (200, 80)}, 120),
        ("0::/a/b", {"a/b/memory": (100, 50), "a/memory": (200, 80)}, 50),
        ("0::/a", {"a/memory": ("max", 50)}, None),
        ("0::/a", {"a/memory": (100, 150)}, 0),
        ("0::/elsewhere", {}, None),
        ("5:memory:/a/b\n1:cpu:/", {"memory/a/b/memory": (NONE, 50), "memory/a/memory": (200, 80)}, 120),
        ("5:cpu,memory:/a", {"memory/a/memory": (100, 50), "memory/memory": (NONE, 80)}, 50),
        ("5:memory:/a\n0::/", {"memory/a/memory": (NONE, 50)}, None),
        # Another controller's limit is none of memory.
        ("5:cpu:/a", {"memory/a/memory": (100, 50)}, None),
        ("5:memory:/a\n0::/b", {"memory/a/memory": (100, 50), "b/memory": (100, 70)}, 30),
    ],
)
def test_the_least_room_of_the_groups_it_is_in_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, tuple[str | int, int]], room: int | None
) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, (limit, used) in files.items():
        unified = not name.startswith("memory/")
        folder = tmp_path / "cgroup" / Path(name).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        (folder / ("memory.current" if unified else "memory.usage_in_bytes")).write_text(f"{used}\n")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    assert machine.cgroup_room() == room
    monkeypatch.setattr(machine, "_available", lambda: 110)
    assert machine.free_memory() == (110 if room is None else min(110, room))


def test_without_groups_all_of_the_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "missing")
    assert machine.cgroup_room() is None
