"""Who gets a directory: the ranks of one start, and nobody else."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from offload.errors import PathError, PathInUseError
from offload.io.engine import IOFile
from offload.io.files import Files
from offload.storage.directories import LOCK_NAME
from offload.storage.directory_lock import claim
from tests.support.processes import start_python

ONE, OTHER = b"1" * 16, b"2" * 16


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


def test_of_simultaneous_starts_one_wins_with_all_of_its_ranks(tmp_path: Path) -> None:
    for attempt in range(40):
        starts, ranks = 3, 3
        together, taken, won = Barrier(starts * ranks), list[IOFile](), list[bytes]()

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
from offload.storage.directory_lock import claim
held = claim(Path(sys.argv[1]), b"1" * 16, Files())
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_lets_go_of_it(tmp_path: Path) -> None:
    with start_python(HOLD, str(tmp_path)) as holder:
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

    file = claim(tmp_path, ONE, Removing())
    assert os.path.samestat(os.stat(tmp_path / LOCK_NAME), os.fstat(file.fd))
    with pytest.raises(PathInUseError):
        claim(tmp_path, OTHER, Files())
    file.close()


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
