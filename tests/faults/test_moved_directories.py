"""The working directory changes, or a run's directory or file is moved, removed or cut off, while the run lives."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.checkpoint.reader import Reader
from offload.errors import CorruptionError, OffloadError, PathError
from offload.io.files import Files
from offload.storage.directories import COMMIT_NAME
from tests.faults.conftest import Make, Tiny, assert_same, backward, bits, one_step
from tests.faults.test_commits import committed
from tests.support.disks import FailingFiles, SwitchedFiles, on_disk
from tests.support.run_files import swap_in, swaps_in


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def require_commit(make: Make, path: Path, step: int, expected: dict[str, Tensor]) -> None:
    """Resumes what is in `path`."""
    model = Tiny()
    with make(model, path=path, resume=True, commit_every=0) as optimizer:
        assert optimizer.resumed is not None
        assert optimizer.resumed.step == step
        assert_same(expected, bits(model, optimizer))


APART = 31
"""Of the calls of a run one case lets so many apart fail."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [1, *(pytest.param(nth, marks=pytest.mark.slow) for nth in range(2, APART + 1))])
def test_whatever_call_fails_in_a_run_is_an_error_of_ours_and_a_commit_is_what_it_was(
    first: int, make: Make, tmp_path: Path
) -> None:
    model, optimizer = committed(make, path=tmp_path / "whole")
    expected = {3: bits(model, optimizer)}
    for seed in (3, 4):
        one_step(model, optimizer, seed)
        expected[seed + 1] = bits(model, optimizer)
    for nth in range(first, 1000, APART):
        path, files = tmp_path / str(nth), FailingFiles(nth, errno.EIO)
        files.is_on = False
        with on_disk(files):
            model, optimizer = committed(make, path=path)
        files.is_on = True
        with suppress(OffloadError):
            optimizer.snapshot(keep=1)
            one_step(model, optimizer, 3)
            optimizer.commit()
            optimizer.snapshot(keep=1)
            one_step(model, optimizer, 9)
            optimizer.rollback()
            one_step(model, optimizer, 4)
            optimizer.commit()
        files.is_on = False
        with suppress(OffloadError):
            optimizer.close()
        model = Tiny()
        with make(model, path=path, resume=True, commit_every=0) as optimizer:
            assert optimizer.resumed is not None
            assert_same(expected[optimizer.resumed.step], bits(model, optimizer))
        if not files.failed:
            break
    assert nth > 150


@pytest.mark.parametrize("is_list", [False, True])
def test_a_relative_path_is_understood_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_list: bool
) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for place in (one, other):
        place.mkdir()
    monkeypatch.chdir(other)
    committed(make, path="run")[1].close()
    before = contents(other / "run")
    monkeypatch.chdir(one)
    model, optimizer = committed(make, path=["run"] if is_list else "run")
    monkeypatch.chdir(other)
    one_step(model, optimizer, 3)
    optimizer.commit()
    optimizer.snapshot()
    expected = bits(model, optimizer)
    optimizer.close()
    assert contents(other / "run") == before
    assert len([*(one / "run").glob("snapshot-4-*")]) == 1
    require_commit(make, one / "run", 4, expected)


@pytest.mark.parametrize("begins", [False, True], ids=["nothing there", "another run there"])
@pytest.mark.parametrize("engine", ["uring", "portable"])
def test_a_commit_of_a_directory_that_was_moved_is_refused_until_it_is_back(
    make: Make, path: Path, begins: bool, engine: str
) -> None:
    tuning = Tuning(chunk="4KiB", threads=1, io_engine="auto" if engine == "uring" else engine)
    model, optimizer = committed(make, tuning=tuning)
    expected = bits(model, optimizer)
    moved = path.with_name("moved")
    path.rename(moved)
    other: tuple[Tiny, OffloadZero] | None = None
    if begins:
        other = committed(make, steps=2)
        theirs = bits(*other)
        before = contents(path)
    one_step(model, optimizer, 3)
    for call in (optimizer.commit, optimizer.snapshot):
        with pytest.raises(PathError, match="moved or removed: move it back") as caught:
            call()
        assert caught.value.filename == str(path)
    shutil.copytree(moved, path.with_name("copy"))
    require_commit(make, path.with_name("copy"), 3, expected)
    if other is not None:
        assert contents(path) == before
        one_step(*other, 2)
        other[1].rollback()
        other[1].close()
        require_commit(make, path, 2, theirs)
        path.rename(path.with_name("theirs"))
    moved.rename(path)
    optimizer.commit()
    one_step(model, optimizer, 4)
    optimizer.commit()
    expected = bits(model, optimizer)
    optimizer.close()
    require_commit(make, path, 5, expected)


def delete(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    os.truncate(file, 4096)


def replace(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


def link(file: Path) -> None:
    file.rename(file.with_name("there"))
    file.symlink_to(file.with_name("there"))


@pytest.mark.parametrize("damage", [delete, cut_short, replace, link])
def test_a_commit_without_its_swap_file_is_refused(make: Make, path: Path, damage: Callable[[Path], None]) -> None:
    # All in RAM: nothing is read back that would show the damage.
    model = Tiny()
    optimizer = make(model, commit_every=0, cpu_memory="1GiB")
    one_step(model, optimizer)
    optimizer.commit()
    record = (path / COMMIT_NAME).read_bytes()
    swap = swap_in(path)
    damage(swap)
    one_step(model, optimizer)
    with pytest.raises(PathError, match=r"while this run|moved or removed") as caught:
        optimizer.commit()
    assert caught.value.filename == str(swap)
    assert (path / COMMIT_NAME).read_bytes() == record


def test_what_is_cut_short_while_a_commit_is_written_is_not_committed(make: Make, path: Path) -> None:
    """Looking once, before it is written, would not do."""

    class Deleting(Files):
        def rename(self, old: Path, new: Path) -> None:
            delete(swap_in(new.parent))
            super().rename(old, new)

    files = SwitchedFiles()
    with on_disk(files):
        model, optimizer = committed(make)
    record = (path / COMMIT_NAME).read_bytes()
    one_step(model, optimizer)
    with files.switched(Deleting()), pytest.raises(PathError):
        optimizer.commit()
    assert (path / COMMIT_NAME).read_bytes() == record


def test_a_due_commit_that_is_refused_leaves_the_step_to_be_made(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=1)
    one_step(model, optimizer, 0)
    path.rename(path.with_name("moved"))
    backward(model, 1)
    before = bits(model, optimizer)
    with pytest.raises(PathError):
        optimizer.step()
    assert_same(before, bits(model, optimizer))
    path.with_name("moved").rename(path)
    optimizer.step()
    with Reader([path]) as reader:
        assert reader.commit.step == 1


def test_the_portable_engine_opens_no_other_file_and_makes_none(make: Make, path: Path) -> None:
    """It has a handle for each request under way, and opens more as it needs them."""
    tuning = Tuning(chunk="4KiB", threads=1, io_engine="portable")
    model = Tiny()
    optimizer = make(model, tuning=tuning, commit_every=0)
    path.rename(path.with_name("moved"))
    for step in range(3):
        one_step(model, optimizer, step)
    optimizer.synchronize()
    assert not path.exists()


def test_a_run_that_fails_removes_no_file_but_its_own(make: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another layout its file lies beside the old one until it is committed, and goes with it before."""
    committed(make)[1].close()
    moved, before, strange = path.with_name("moved"), swap_in(path), list[Path]()

    def move(*args: object) -> None:
        strange.extend(file for file in swaps_in(path) if file != before)
        path.rename(moved)
        path.mkdir()
        strange[0].write_text("another's")
        raise CorruptionError("damaged", file="manifest")

    monkeypatch.setattr("offload.checkpoint.committer.copy_ranges", move)
    with pytest.raises(CorruptionError):
        make(Tiny(), resume=True, commit_every=0, tuning=Tuning(chunk="8KiB", threads=1), cpu_memory="1MiB")
    assert strange[0].read_text() == "another's"
    assert swap_in(moved).name == before.name
