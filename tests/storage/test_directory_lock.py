"""Who gets a directory: the ranks of one start, and nobody else."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any, Never

import pytest

from offload.errors import PathError, PathInUseError
from offload.io.engine import IOFile
from offload.io.files import Files, Host
from offload.storage.directories import LOCK_NAME
from offload.storage.directory_lock import Claimant, Claims
from tests.support.processes import Forked

ONE, OTHER = b"1" * 16, b"2" * 16


def claim(directory: Path, start: bytes, files: Files) -> ExitStack:
    """Takes a directory for a start on this machine. Closing what is returned gives it back."""
    stack = ExitStack()
    stack.callback(Claims(Claimant(start, (files.host(),)), files).take(directory))
    return stack


class OnHost(Files):
    """Files as another machine, or the same one after a reboot, sees them: it lists no process of this one."""

    def __init__(self, name: str, boot: str) -> None:
        super().__init__()
        self._host = Host(name, boot)

    def host(self) -> Host:
        return self._host

    def holders(self, file: IOFile) -> list[int]:
        return []


class Refusing(Files):
    """The system refuses one of the calls. Args: method: its name; code: the number of its error."""

    def __init__(self, method: str, code: int) -> None:
        super().__init__()

        def refuse(*_: object, **__: object) -> Never:
            raise OSError(code, os.strerror(code), "name")

        setattr(self, method, refuse)


def test_ranks_of_one_start_share_it_and_another_start_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(claim(tmp_path, ONE, Files()))
        with pytest.raises(PathInUseError) as caught:
            claim(tmp_path, OTHER, Files())
        assert caught.value.filename == str(tmp_path)
        stack.enter_context(claim(tmp_path, ONE, Files()))
    claim(tmp_path, OTHER, Files()).close()
    claim(tmp_path, ONE, Files()).close()
    assert os.listdir(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("method", ["open_or_create", "lock"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO])
def test_a_lock_that_cannot_be_opened_or_taken_is_told_as_one(method: str, code: int, tmp_path: Path) -> None:
    """Not as that of a live run."""
    files = Refusing(method, code)
    with pytest.raises(PathError, match="cannot be locked") as caught:
        claim(tmp_path, ONE, files)
    assert not isinstance(caught.value, PathInUseError)
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / LOCK_NAME))


def test_a_lock_of_another_user_is_told_as_one_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="cannot be locked: Permission denied"):
        claim(tmp_path, ONE, Refusing("open_or_create", errno.EACCES))


def test_of_simultaneous_starts_one_wins_with_all_of_its_ranks(tmp_path: Path) -> None:
    for attempt in range(40):
        starts, ranks = 3, 3
        together, taken, won = Barrier(starts * ranks), list[ExitStack](), list[bytes]()

        def take(start: bytes, together: Any = together, taken: Any = taken, won: Any = won) -> None:
            together.wait()
            with suppress(PathInUseError):
                taken.append(claim(tmp_path, start, Files()))
                won.append(start)

        threads = [Thread(target=take, args=(bytes([attempt, n] * 8),)) for n in range(starts) for _ in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(won)) == 1
        assert len(won) == ranks
        for file in taken:
            file.close()


HOLD = """
import sys
from pathlib import Path
from offload.io.files import Files
from offload.storage.directory_lock import Claimant, Claims
held = Claims(Claimant(b"1" * 16, (Files().host(),)), Files()).take(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_lets_go_of_it(tmp_path: Path) -> None:
    with Forked(HOLD, str(tmp_path)) as holder:
        assert holder.stdout.readline() == "\n"
        with pytest.raises(PathInUseError):
            claim(tmp_path, OTHER, Files())
        claim(tmp_path, ONE, Files()).close()  # another rank of the same start
        holder.kill()
        holder.wait()
        claim(tmp_path, OTHER, Files()).close()


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path: Path) -> None:
    """Whoever has locked a file without a name has locked nothing."""

    class Removing(Files):
        left = 2

        def lock(self, file: IOFile, *, exclusive: bool) -> None:
            super().lock(file, exclusive=exclusive)
            if not exclusive and self.left:
                self.left -= 1
                os.unlink(file.path)

    with claim(tmp_path, ONE, Removing()), pytest.raises(PathInUseError):
        claim(tmp_path, OTHER, Files())


@pytest.mark.parametrize(("start", "is_let_in"), [(ONE, True), (OTHER, False)])
def test_who_writes_its_id_on_a_busy_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, is_let_in: bool
) -> None:
    """Here 40 seconds pass in a tenth of one."""
    began, synced, slept = time.monotonic(), Event(), 0

    class Busy(Files):
        def sync(self, file: IOFile) -> None:
            began_to_write.set()
            assert synced.wait(30)
            super().sync(file)

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 100:
            synced.set()
        real_sleep(seconds / 10)

    began_to_write, real_sleep, taken = Event(), time.sleep, ExitStack()
    first = Thread(target=lambda: taken.enter_context(claim(tmp_path, ONE, Busy())))
    first.start()
    assert began_to_write.wait(30)
    monkeypatch.setattr("offload.storage.directory_lock.time.monotonic", lambda: began + slept * 0.4)
    monkeypatch.setattr("offload.storage.directory_lock.time.sleep", sleep)
    try:
        if is_let_in:
            claim(tmp_path, start, Files()).close()
        else:
            with pytest.raises(PathInUseError):
                claim(tmp_path, start, Files())
    finally:
        monkeypatch.undo()
        synced.set()
        first.join()
        taken.close()
    assert slept >= 100


def test_who_has_it_alone_for_good_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.storage.directory_lock.PATIENCE_S", 0.1)
    (tmp_path / LOCK_NAME).touch()
    with subprocess.Popen(["flock", "-x", str(tmp_path / LOCK_NAME), "cat"], stdin=subprocess.PIPE) as holder:
        while True:
            try:
                claim(tmp_path, ONE, Files()).close()
            except PathInUseError:
                break
        holder.kill()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathError):
        claim(tmp_path, ONE, Files())
    assert not (tmp_path / "elsewhere").exists()


def test_the_lock_of_a_lost_machine_is_waited_for_and_that_is_said(tmp_path: Path) -> None:
    lost, here = OnHost("alpha", "boot-1"), OnHost("beta", "boot-2")
    lease = claim(tmp_path, ONE, lost)
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        lease.close()  # the file server ends it

    claims = Claims(Claimant(OTHER, (here.host(),)), here, wait_s=60, say=say)
    give_back = claims.take(tmp_path)
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert "on alpha" in said[0]
    give_back()


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_lock_that_stays_is_refused_with_who_may_have_it(tmp_path: Path, name: str) -> None:
    """Another machine, and this one before it was started again."""
    with claim(tmp_path, ONE, OnHost(name, "boot-1")):
        here = OnHost("beta", "boot-2")
        with pytest.raises(PathInUseError, match=f"on {name}, and a lost machine may still hold it") as caught:
            Claims(Claimant(OTHER, (here.host(),)), here, wait_s=0.3).take(tmp_path)
        assert caught.value.filename == str(tmp_path)


def test_what_a_run_on_this_machine_holds_is_not_waited_for(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        raise AssertionError(line)

    held = Files(), OnHost("alpha", "boot-1")
    for one, names in ((held[0], ()), (held[0], (held[1].host(),))):  # also where it runs on others, too
        stack = ExitStack()
        with stack:
            stack.callback(Claims(Claimant(ONE, (one.host(), *names)), one).take(tmp_path))
            with pytest.raises(PathInUseError, match="a live run holds this path"):
                Claims(Claimant(OTHER, (one.host(),)), Files(), wait_s=60, say=fail).take(tmp_path)
    with (tmp_path / LOCK_NAME).open("wb") as older:  # a version that named no machine
        older.write(ONE)
        older.flush()
        fcntl.flock(older, fcntl.LOCK_SH)
        with pytest.raises(PathInUseError, match="a live run holds this path"):
            Claims(Claimant(OTHER, ()), OnHost("alpha", "boot-1"), wait_s=60, say=fail).take(tmp_path)


def test_who_has_lost_a_directory_to_another_start_finds_it_out(tmp_path: Path) -> None:
    """A file system that keeps flock to itself on each machine lets both take it."""

    class Alone(OnHost):
        def lock(self, file: IOFile, *, exclusive: bool) -> None:
            pass

    first, second = Alone("alpha", "boot-1"), Alone("beta", "boot-2")
    ours = Claims(Claimant(ONE, (first.host(),)), first)
    ours.take(tmp_path)
    ours.require_ours()
    theirs = Claims(Claimant(OTHER, (second.host(),)), second)
    theirs.take(tmp_path)
    theirs.require_ours()
    with pytest.raises(PathInUseError, match="taken by another run on beta") as caught:
        ours.require_ours()
    assert caught.value.filename == str(tmp_path)
