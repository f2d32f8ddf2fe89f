"""The simulated disk keeps what was synced and nothing it need not keep: otherwise crash tests prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.sizes import PAGE_BYTES
from tests.support.faulty_engine import aligned
from tests.support.simulated_disk import SECTOR_BYTES, SimulatedDisk


def filled(value: int, pages: int = 4) -> memoryview:
    return aligned(bytes([value]) * (pages * PAGE_BYTES))


def after_crash(tmp_path: Path, seed: int, *, sync_first: bool) -> bytes:
    """Written 1, perhaps synced, written 2, then 3 on the first page; the power is cut."""
    disk = SimulatedDisk()
    file = disk.open(str(tmp_path / f"file-{seed}"))
    disk.write(file, 0, filled(1)).result()
    if sync_first:
        disk.sync(file).result()
        assert disk.unsynced() == 0
    disk.write(file, 0, filled(2)).result()
    disk.write(file, 0, filled(3, pages=1)).result()
    disk.crash(seed)
    return Path(file.path).read_bytes()


def sectors(data: bytes) -> list[int]:
    found = [data[start : start + SECTOR_BYTES] for start in range(0, len(data), SECTOR_BYTES)]
    assert all(len(set(sector)) == 1 for sector in found), "torn inside a sector"
    return [sector[0] for sector in found]


def test_what_was_synced_survives_and_what_came_after_may_or_may_not(tmp_path: Path) -> None:
    first, later = set(), set()
    for seed in range(20):
        found = sectors(after_crash(tmp_path, seed, sync_first=True))
        first |= set(found[: PAGE_BYTES // SECTOR_BYTES])
        later |= set(found[PAGE_BYTES // SECTOR_BYTES :])
        assert len(set(found)) > 1, "a crash takes any subset, not all or nothing"
    assert (first, later) == ({1, 2, 3}, {1, 2})


def test_without_a_sync_nothing_need_survive(tmp_path: Path) -> None:
    found = {value for seed in range(20) for value in sectors(after_crash(tmp_path, seed, sync_first=False))}
    assert found == {0, 1, 2, 3}


def test_a_sync_covers_what_completed_before_it_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    file = disk.open(str(tmp_path / "file"))
    disk.write(file, 0, filled(1)).result()
    settle = disk._settle

    def write_meanwhile(path: str, before: dict[int, int]) -> None:
        disk._remember_now(file, filled(2))  # type: ignore[attr-defined]
        settle(path, before)

    def remember_now(target: object, data: memoryview) -> None:
        with open(file.path, "r+b", buffering=0) as plain:
            with disk._cache:
                for n in range(len(data) // SECTOR_BYTES):
                    disk._volatile[file.path].setdefault(n, [bytes([1]) * SECTOR_BYTES]).append(
                        bytes(data[n * SECTOR_BYTES : (n + 1) * SECTOR_BYTES])
                    )
            plain.write(data)

    monkeypatch.setattr(disk, "_remember_now", remember_now, raising=False)
    monkeypatch.setattr(disk, "_settle", write_meanwhile)
    disk.sync(file).result()
    assert disk.unsynced() == 4 * PAGE_BYTES // SECTOR_BYTES
    disk.crash(1)
    assert set(sectors(Path(file.path).read_bytes())) == {1, 2}
