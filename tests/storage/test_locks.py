"""Who gets the lock of a swap file, and who waits for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.storage import swap_file
from offload.storage.swap_file import take_lock
from tests.support.processes import start_python

HOLD = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
if not os.fork():
    # Holds the same open file, as the kernel does for a killed process's transfers.
    sys.stdin.read()
    os._exit(0)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def busy(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        take_lock(fd, how)
    except BlockingIOError:
        return True
    return False


def test_the_lock_of_a_killed_process_is_waited_for(path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_python(HOLD, str(path)) as holder:
        assert holder.stdout.readline() == "\n"
        monkeypatch.setattr(swap_file, "PATIENCE_S", 1e9)
        assert busy(fd), "a live one is not waited for"
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert not swap_file._lives(holder.pid), "a process that nobody has waited for"
        monkeypatch.setattr(swap_file, "PATIENCE_S", 0.1)
        assert busy(fd), "not for ever"
        tries: list[None] = []

        def lives(pid: int) -> bool:
            assert pid == holder.pid
            tries.append(None)
            if len(tries) == 5:
                holder.stdin.close()
            return False

        monkeypatch.setattr(swap_file, "PATIENCE_S", 60.0)
        monkeypatch.setattr(swap_file, "_lives", lives)
        assert not busy(fd)
        assert len(tries) >= 5


def test_readers_share_and_a_dead_ones_lock_is_not_a_live_ones(path: Path, fd: int) -> None:
    other = os.open(path, os.O_RDONLY)
    take_lock(other, fcntl.LOCK_SH)
    assert not busy(fd, fcntl.LOCK_SH)
    assert busy(fd)
    os.close(other)
    assert not busy(fd)


def test_a_holder_that_is_not_seen_counts_as_alive(path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.open(path, os.O_RDONLY)
    take_lock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(swap_file, "_holders", lambda fd: [])
    monkeypatch.setattr(swap_file, "PATIENCE_S", 1e9)
    assert busy(fd)
    os.close(other)


def test_a_lock_that_the_kernel_tells_under_another_device_is_found(
    fd: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on btrfs, where each subvolume has a device of its own, which /proc/locks does not know."""
    line = f"1: FLOCK  ADVISORY  WRITE 4242 00:99:{os.fstat(fd).st_ino} 0 EOF\n"
    monkeypatch.setattr(Path, "read_text", lambda self: line)
    assert swap_file._holders(fd) == [4242]
    assert swap_file._holders(os.open(os.devnull, os.O_RDONLY)) == []
