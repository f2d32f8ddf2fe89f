"""Snapshots that are copied to other storage beside training: whole or not there, whatever fails on either side."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload import OffloadZero
from offload.checkpoint.atomic_file import sync_directory, write_file
from offload.checkpoint.commit import Commit, RankFiles, manifest_name, spelled
from offload.checkpoint.manifest import Digest, digest, serialise
from offload.checkpoint.reader import Reader
from offload.checkpoint.snapshot import Snapshot
from offload.checkpoint.snapshot_copy import decide
from offload.errors import OffloadError, PathError
from offload.io.engine import PRIVATE, IOFile
from offload.io.files import Files
from offload.storage.directories import COMMIT_NAME
from tests.faults.conftest import Make, Tiny, assert_same, bits, one_step
from tests.faults.test_commits import committed
from tests.support.committed import manifest_of
from tests.support.copying import CopyingFiles
from tests.support.disks import on_disk
from tests.support.run_files import contents
from tests.support.simulated_files import PowerCut, SimulatedFiles

EARLY, KEPT = 2, 4
"""The steps of two snapshots."""


class Watched(CopyingFiles):
    """The files of this machine. Copies wait for `goes_on`, and operations of the copying thread may fail.

    Attributes: goes_on; left: how many of these operations work, -1: all; count: how many there were.
    """

    def __init__(self, left: int = -1) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.left = left
        self.count = 0

    def copies(self) -> None:
        assert self.goes_on.wait(30)
        self.count += 1
        if 0 <= self.left < self.count:
            raise OSError(errno.EIO, "broken")


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def local_snapshots(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("snapshot-"))


def go_to(model: Tiny, optimizer: OffloadZero, step: int) -> dict[str, Tensor]:
    for number in range(optimizer.stats()["step"], step):
        one_step(model, optimizer, number)
    return bits(model, optimizer)


def resumed(make: Make, path: Path, directories: list[Path]) -> dict[str, Tensor]:
    model = Tiny()
    return bits(model, make(model, path=path, resume=directories, commit_every=0, cpu_memory="1MiB"))


@pytest.mark.parametrize("places", [["run"], ["run", "second"]])
def test_training_goes_on_while_a_snapshot_is_copied(make: Make, tmp_path: Path, places: list[str]) -> None:
    paths, target = [tmp_path / name for name in places], tmp_path / "shared"
    files = Watched()
    with on_disk(files):
        model, optimizer = committed(make, KEPT, path=paths)
    expected = bits(model, optimizer)
    files.goes_on.clear()
    directories = optimizer.snapshot(path=target)
    assert directories[0].parent == target
    go_to(model, optimizer, 6)
    optimizer.commit()
    later = go_to(model, optimizer, 7)
    stats = optimizer.stats()
    assert stats["snapshot_copied_step"] == 0
    assert stats["snapshot_left_bytes"] > 0
    assert all(len(local_snapshots(path)) == 1 for path in paths)
    files.goes_on.set()
    optimizer.close()
    assert not any(local_snapshots(path) for path in paths)
    with Reader(directories) as reader:
        assert reader.commit.step == KEPT
        assert all(slot.error is None for slot in reader.verify())
    for path in paths:  # the machine is lost
        shutil.rmtree(path)
    again = Tiny()
    optimizer = make(again, path=tmp_path / "new", resume=[*directories], commit_every=0, cpu_memory="1MiB")
    assert optimizer.resumed == (KEPT, {"seen": KEPT})
    assert_same(expected, bits(again, optimizer))
    assert_same(later, go_to(again, optimizer, 7))


def test_a_relative_target_is_where_it_led_at_first(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Watched()
    with on_disk(files):
        _, optimizer = committed(make, KEPT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    files.goes_on.clear()
    optimizer.snapshot(path="shared")
    monkeypatch.chdir(tmp_path / "elsewhere")
    files.goes_on.set()
    optimizer.close()
    assert local_snapshots(tmp_path / "shared")
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_the_next_commit_takes_note_of_it(make: Make, path: Path, tmp_path: Path) -> None:
    model, optimizer = committed(make, KEPT)
    (directory,) = optimizer.snapshot(path=tmp_path / "shared")
    wait_until(lambda: (directory / "COMMIT").exists())
    assert local_snapshots(path)
    optimizer._commits._copying.wait()  # type: ignore[union-attr]
    go_to(model, optimizer, KEPT + 1)
    optimizer.commit()
    assert not local_snapshots(path)
    stats = optimizer.stats()
    assert (stats["snapshot_copied_step"], stats["snapshot_left_bytes"]) == (KEPT, 0)
    assert stats["snapshot_copied_bytes"] == os.stat(next(directory.glob("swap-*"))).st_blocks * 512


def test_the_newest_copies_stay_and_older_ones_go_when_the_new_one_is_there(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "shared"
    files = Watched()
    with on_disk(files):
        model, optimizer = committed(make, EARLY)
    (first,) = optimizer.snapshot(path=target, keep=1)
    go_to(model, optimizer, KEPT)
    optimizer.commit()
    assert len(local_snapshots(target)) == 1
    files.goes_on.clear()
    waits = threading.Timer(0.2, files.goes_on.set)
    waits.start()
    (second,) = optimizer.snapshot(path=target, keep=1)
    assert (first / "COMMIT").exists()
    optimizer.close()
    assert local_snapshots(target) == [second.name]
    waits.join()


def operations(make: Make, tmp_path: Path) -> int:
    files = Watched()
    with on_disk(files):
        _, optimizer = committed(make, EARLY, path=tmp_path / "counted")
    optimizer.snapshot(path=tmp_path / "counted-copies")
    optimizer.close()
    return files.count


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_copy_that_fails_at_any_operation_is_not_there_and_the_one_before_is(
    make: Make, tmp_path: Path, every: int
) -> None:
    count = operations(make, tmp_path)
    assert count > 10
    for left in range(0, count, every):
        path, target = tmp_path / f"run{left}", tmp_path / f"shared{left}"
        files = Watched()
        with on_disk(files):
            model, optimizer = committed(make, EARLY, path=path)
        early = bits(model, optimizer)
        (first,) = optimizer.snapshot(path=target)
        go_to(model, optimizer, KEPT)
        optimizer.commit()
        optimizer.snapshot(keep=1)  # waits for the first
        files.count, files.left = 0, left
        (second,) = optimizer.snapshot(path=target)
        with pytest.warns(UserWarning, match=f"the snapshot of step {KEPT} was not copied to {second}: "):
            optimizer.close()
        assert len(local_snapshots(path)) == 1
        assert not (second / "COMMIT").exists()
        assert_same(early, resumed(make, tmp_path / f"new{left}", [first]))


def test_what_a_copy_has_left_is_cleared_away_by_the_next(make: Make, path: Path, tmp_path: Path) -> None:
    files, target = Watched(left=3), tmp_path / "shared"
    with on_disk(files):
        model, optimizer = committed(make, EARLY)
    (first,) = optimizer.snapshot(path=target)
    go_to(model, optimizer, KEPT)
    optimizer._commits._copying.wait()  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="was not copied"):
        optimizer.commit()
    assert first.exists()
    files.left = -1
    (second,) = optimizer.snapshot(path=target)
    optimizer.close()
    assert local_snapshots(target) == [second.name]
    assert local_snapshots(path) == [first.name]  # which is the user's to remove


class Halting(CopyingFiles):
    """Attributes: at: the end of the name of the file whose sync by a copying thread is followed by a halt, until
    `goes_on`; halted: whether that came."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.halted, self.goes_on = threading.Event(), threading.Event()

    def copies(self) -> None:
        """Every operation works."""

    def sync(self, file: IOFile) -> None:
        super().sync(file)
        if threading.current_thread().name.startswith("offload-snapshot") and self.at in file.path:
            self.halted.set()
            assert self.goes_on.wait(30)


@pytest.mark.parametrize("at", ["swap-", "manifest-"])
@pytest.mark.parametrize("places", [["one"], ["one", "second"]])
def test_what_another_run_copies_to_the_same_storage_stays(
    make: Make, tmp_path: Path, at: str, places: list[str]
) -> None:
    target, files = tmp_path / "shared", Halting(at)
    with on_disk(files):
        model, one = committed(make, KEPT, path=[tmp_path / name for name in places])
    expected = bits(model, one)
    directories = one.snapshot(path=target)
    assert files.halted.wait(30)
    _, two = committed(make, KEPT, path=tmp_path / "two")
    (other,) = two.snapshot(path=target)
    two.close()
    files.goes_on.set()
    one.close()
    assert {directories[0].name, other.name} == {*local_snapshots(target)}
    assert not local_snapshots(tmp_path / "one")
    assert_same(expected, resumed(make, tmp_path / "new", [*directories]))


@pytest.mark.parametrize("looked", range(3))
def test_a_copy_that_gets_its_record_while_another_run_clears_up_stays(make: Make, tmp_path: Path, looked: int) -> None:
    """It has looked into so many of its files before, and saw no record."""
    target, files = tmp_path / "shared", Halting("manifest-")
    with on_disk(files):
        model, one = committed(make, KEPT, path=tmp_path / "one")
    expected = bits(model, one)
    directories = one.snapshot(path=target)
    assert files.halted.wait(30)
    opened: list[str] = []

    def goes_on() -> None:
        files.goes_on.set()
        one.close()

    class Slow(Files):
        def open(self, path: Path, flags: int) -> IOFile:
            if path.parent == directories[0]:
                opened.append(path.name)
                if len(opened) == looked + 1:
                    goes_on()
            return super().open(path, flags)

    with on_disk(Slow()):
        _, two = committed(make, KEPT, path=tmp_path / "two")
    two.snapshot(path=target)
    two.close()
    assert opened
    goes_on()
    assert not local_snapshots(tmp_path / "one")
    assert_same(expected, resumed(make, tmp_path / "new", [*directories]))


def test_what_another_run_has_left_half_copied_goes(make: Make, tmp_path: Path) -> None:
    files, target = Watched(left=3), tmp_path / "shared"
    with on_disk(files):
        _, one = committed(make, EARLY, path=tmp_path / "one")
    (left,) = one.snapshot(path=target)
    with pytest.warns(UserWarning, match="was not copied"):
        one.close()
    assert [*left.glob("swap-*")]
    _, two = committed(make, KEPT, path=tmp_path / "two")
    (other,) = two.snapshot(path=target)
    two.close()
    assert local_snapshots(target) == [other.name]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_where_the_storage_has_no_locks_only_what_the_run_itself_has_left_goes(
    make: Make, tmp_path: Path, code: int
) -> None:
    """A copy needs no lock. Without any nobody can tell whether another run is at work."""
    target = tmp_path / "shared"

    class Lockless(Watched):
        def lock(self, file: IOFile, *, exclusive: bool) -> None:
            if "shared" in Path(file.path).parts:
                raise OSError(code, os.strerror(code))
            super().lock(file, exclusive=exclusive)

    files = Lockless(left=3)
    with on_disk(files):
        model, one = committed(make, EARLY, path=tmp_path / "one")
    (first,) = one.snapshot(path=target)
    one._commits._copying.wait()  # type: ignore[union-attr]
    go_to(model, one, KEPT)
    with pytest.warns(UserWarning, match="was not copied"):
        one.commit()
    files.left = -1
    with on_disk(Lockless()):
        _, two = committed(make, KEPT, path=tmp_path / "two")
    (other,) = two.snapshot(path=target)
    two.close()
    assert local_snapshots(target) == sorted([first.name, other.name])
    (second,) = one.snapshot(path=target)
    one.close()
    assert local_snapshots(target) == sorted([second.name, other.name])


def test_a_run_that_ends_with_an_error_leaves_a_copy_that_does_not_count(make: Make, tmp_path: Path) -> None:
    files, target = Watched(), tmp_path / "shared"
    with on_disk(files):
        _, optimizer = committed(make, EARLY)
    files.goes_on.clear()
    (directory,) = optimizer.snapshot(path=target)
    threading.Timer(0.2, files.goes_on.set).start()
    optimizer._commits.stop_copy()  # as an end does that asks no other rank
    with pytest.warns(UserWarning, match="is not whole: the run ended before"):
        optimizer.close()
    assert not (directory / "COMMIT").exists()
    with pytest.raises(OffloadError):
        resumed(make, tmp_path / "new", [directory])


def test_a_target_that_cannot_be_used_is_refused_and_nothing_is_changed(make: Make, tmp_path: Path) -> None:
    _, optimizer = committed(make, EARLY)
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    for target in (tmp_path / "file", tmp_path / "missing" / "shared"):
        with pytest.raises(PathError):
            optimizer.snapshot(path=target)
    assert {name for name in contents(tmp_path) if "snapshot" not in name} == {*before}
    optimizer.snapshot(path=tmp_path / "shared")
    optimizer.close()


def test_the_manifest_comes_last_so_that_whoever_sees_it_finds_all_else(make: Make, tmp_path: Path) -> None:
    """Rank 0 decides when it sees those of all ranks, whose tensors may be as large as it pleases the user."""
    made: list[str] = []

    class Seen(Watched):
        def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
            if "shared" in path.parts:
                made.append(path.name.split("-")[0])
            return super().create(path, mode)

    with on_disk(Seen()):
        model, optimizer = committed(make, EARLY)
    one_step(model, optimizer, EARLY)
    optimizer.commit({"x": torch.arange(5)})
    optimizer.snapshot(path=tmp_path / "shared")
    optimizer.close()
    assert made.index("swap") < made.index("extra") < made.index("manifest") < made.index("COMMIT.offload.new")


@pytest.mark.parametrize("paths", [1, 2])
def test_what_the_first_rank_sees_of_others_is_durable_before_its_record_is(paths: int) -> None:
    """Another rank may be between the rename of its manifest and the sync of its directory. The power is cut."""
    here = Path("/shared")
    places = [here, *(here / f"path{number}" for number in range(1, paths))]
    manifests = [manifest_of(rank, world=2, paths=paths) for rank in range(2)]
    digests = tuple(Digest(len(data), digest(data)) for data in map(serialise, manifests))
    own = RankFiles(tuple(map(spelled, places)), ("manifest",))
    commit = Commit(manifests[0].run_id, manifests[0].step, digests, None, (own, own))

    def until_cut(cut_at: int | None) -> tuple[SimulatedFiles, list[Path]]:
        files = SimulatedFiles()
        copy = Snapshot(commit, manifests[0], places, ["swap"] * paths, files)
        for directory in copy.directories:
            files.make_directory(directory)
            for rank, manifest in enumerate(manifests):
                write_file(files, directory / manifest_name(commit, rank), [serialise(manifest)])
                if rank == 0:
                    sync_directory(files, directory)
                    sync_directory(files, directory.parent)
        files.cut_at = None if cut_at is None else files.operations + cut_at
        with suppress(PowerCut):
            decide(copy, threading.Event(), 10)
        return files, [*copy.directories]

    whole = until_cut(0)[0].operations
    count, decided = until_cut(None)[0].operations - whole, 0
    for cut_at in range(count + 2):  # one more: where it is cut counts, too
        files, directories = until_cut(cut_at)
        for seed in range(20):
            found = files.after_cut(seed)
            if COMMIT_NAME in found.names(directories[0]):
                decided += 1
                for directory in directories:
                    for rank, manifest in enumerate(manifests):
                        assert found.read(directory / manifest_name(commit, rank), 1 << 30) == serialise(manifest)
    assert decided > 20
