"""Who gets the lock of a swap file, and who waits for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.io.engine import IOFile
from offload.io.files import LOCAL, Files
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


class Patient(Files):
    """Waits so long for a lock whose holder does not live."""

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.patience_s = patience_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.fixture
def file(path: Path) -> Iterator[IOFile]:
    with LOCAL.open(path, os.O_RDWR) as file:
        yield file


def busy(file: IOFile, files: Files = LOCAL, *, exclusive: bool = True) -> bool:
    try:
        files.lock(file, exclusive=exclusive)
    except BlockingIOError:
        return True
    return False


def test_the_lock_of_a_killed_process_is_waited_for(path: Path, file: IOFile) -> None:
    with start_python(HOLD, str(path)) as holder:
        assert holder.stdout.readline() == "\n"
        assert busy(file, Patient(1e9)), "a live one is not waited for"
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert not LOCAL.lives(holder.pid), "a process that nobody has waited for"
        assert busy(file, Patient(0.1)), "not for ever"
        tries: list[None] = []

        class Watched(Patient):
            def lives(self, pid: int) -> bool:
                assert pid == holder.pid
                tries.append(None)
                if len(tries) == 5:
                    holder.stdin.close()
                return False

        assert not busy(file, Watched(60.0))
        assert len(tries) >= 5


def test_readers_share_and_a_dead_ones_lock_is_not_a_live_ones(path: Path, file: IOFile) -> None:
    other = LOCAL.open(path, os.O_RDONLY)
    LOCAL.lock(other, exclusive=False)
    assert not busy(file, exclusive=False)
    assert busy(file)
    other.close()
    assert not busy(file)


def test_a_process_lives_whatever_bytes_its_name_has() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"tr\xe4ner")
        assert LOCAL.lives(os.getpid())
    finally:
        comm.write_bytes(before.rstrip(b"\n"))


def test_a_holder_that_is_not_seen_counts_as_alive(path: Path, file: IOFile) -> None:
    class Blind(Patient):
        def holders(self, file: IOFile) -> list[int]:
            return []

    with LOCAL.open(path, os.O_RDONLY) as other:
        LOCAL.lock(other, exclusive=True)
        assert busy(file, Blind(1e9))


def test_a_lock_that_the_kernel_tells_under_another_device_is_found(path: Path, file: IOFile) -> None:
    """As on btrfs, where each subvolume has a device of its own, which /proc/locks does not know."""

    class Btrfs(Files):
        def kernel_text(self, path: Path) -> str:
            assert path == Path("/proc/locks")
            return f"1: FLOCK  ADVISORY  WRITE 4242 00:99:{inode} 0 EOF\n"

    inode = os.stat(path).st_ino
    assert Btrfs().holders(file) == [4242]
    with LOCAL.open(Path(os.devnull), os.O_RDONLY) as other:
        assert Btrfs().holders(other) == []
