"""A disk that others fill while a run goes on: commits as large as one before still work, larger ones lose nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadZero
from offload.checkpoint.commit import read_commit
from offload.checkpoint.reader import Reader
from offload.errors import BudgetError, TierIOError
from offload.io.files import Files
from offload.storage.room import Room
from tests.faults.conftest import Make, Tiny, assert_same, bits, one_step
from tests.support.disks import FullFiles, SwitchedFiles, on_disk
from tests.support.lost import lose
from tests.support.run_files import contents
from tests.support.simulated_files import PowerCut


@pytest.fixture
def files() -> FullFiles:
    return FullFiles()


def begun(make: Make, files: Files, **options: Any) -> tuple[Tiny, OffloadZero]:
    model = Tiny()
    with on_disk(files):
        return model, make(model, commit_every=0, **options)


def large(step: int, numel: int = 3000) -> dict[str, Any]:
    """What is committed along: some in the manifest, and tensors."""
    return {"step": step, "text": "x" * (numel // 10), "values": torch.full((numel,), float(step))}


def is_whole(paths: list[Path], step: int) -> bool:
    """Whether the record, the manifests and the tensors that it names are there. Slots are the live run's."""
    with Reader(paths) as reader:
        reader.extra()
        return reader.commit.step == step


@pytest.mark.parametrize("places", ["a", "abc"])
def test_commits_of_sizes_that_were_seen_need_nothing_of_a_full_disk(
    make: Make, tmp_path: Path, files: FullFiles, places: str
) -> None:
    paths = [tmp_path / place for place in places]
    model, optimizer = begun(make, files, path=paths)
    expected, plain = begun(make, Files(), path=tmp_path / "plain")
    sizes = [3000, 3000, 10, 3000, 1, 2999, 700, 3000]
    for step, numel in enumerate(sizes, 1):
        one_step(model, optimizer, step)
        one_step(expected, plain, step)
        optimizer.commit(large(step, numel))
        assert is_whole(paths, step)
        files.is_full = True
    assert_same(bits(model, optimizer), bits(expected, plain))
    optimizer.close()
    model, optimizer = begun(make, files, path=paths, resume=True)
    assert optimizer.resumed is not None
    assert optimizer.resumed.extra["values"].tolist() == [8.0] * 3000
    assert_same(bits(model, optimizer), bits(expected, plain))
    for step in (9, 10):
        one_step(model, optimizer, step)
        one_step(expected, plain, step)
        optimizer.commit(large(step))
    assert_same(bits(model, optimizer), bits(expected, plain))
    assert is_whole(paths, 10)


def test_the_first_commits_are_reserved_before_training(make: Make, path: Path, files: FullFiles) -> None:
    model, optimizer = begun(make, files)
    optimizer.attach(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50))
    before = sum(len(data) for data in contents(path).values())
    files.is_full = True
    for step in range(1, 6):
        one_step(model, optimizer, step)
        optimizer.commit()
        assert is_whole([path], step)
    assert sum(len(data) for data in contents(path).values()) <= before


@pytest.mark.parametrize("larger", [large(2), large(2, 100_000), {"text": "x" * 9000, "values": torch.zeros(7)}])
def test_what_grows_on_a_full_disk_is_refused_and_the_run_goes_on(
    make: Make, path: Path, files: FullFiles, larger: dict[str, Any]
) -> None:
    """Tensors, or only the manifest, which is written after them."""
    small = {"values": torch.ones(7)}
    model, optimizer = begun(make, files)
    one_step(model, optimizer, 1)
    optimizer.commit(small)
    kept, files.is_full = bits(model, optimizer), True
    record = read_commit(path)
    for step in (2, 3):
        one_step(model, optimizer, step)
        with pytest.raises(TierIOError, match="No space left on device") as caught:
            optimizer.commit(larger)
        assert caught.value.errno == errno.ENOSPC
        assert read_commit(path) == record
        assert is_whole([path], 1)
    optimizer.rollback()
    assert_same(bits(model, optimizer), kept)
    one_step(model, optimizer, 2)
    optimizer.commit(small)
    one_step(model, optimizer, 3)
    files.is_full = False
    optimizer.commit(larger)
    files.is_full = True
    one_step(model, optimizer, 4)
    optimizer.commit(larger)
    now = bits(model, optimizer)
    optimizer.close()
    model, optimizer = begun(make, files, resume=True)
    assert_same(bits(model, optimizer), now)


@pytest.mark.parametrize("paths", [1, 2])
def test_room_for_commits_is_part_of_what_a_run_needs(make: Make, tmp_path: Path, paths: int) -> None:
    """A disk that has room for the slots only is refused, with nothing left on it."""

    class Small(Files):
        free = 0

        def available(self, file: Any) -> int:
            return self.free

    files, places = Small(), [tmp_path / place for place in "ab"[:paths]]
    with pytest.raises(BudgetError, match=r"free some, or choose another path") as caught:
        begun(make, files, path=places)
    files.free = caught.value.needed - 4096 - 1  # one page was written by then
    with pytest.raises(BudgetError):
        begun(make, files, path=places)
    assert not contents(tmp_path)
    files.free += 1 + (4096 << 10) * (paths > 1)
    begun(make, files, path=places)[1].close()


def test_a_start_that_finds_no_room_takes_none(make: Make, path: Path) -> None:
    class Half(Files):
        """Whose disk is full when the last file is reserved."""

        left = 3

        def allocate(self, file: Any, offset: int, length: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "full")
            super().allocate(file, offset, length)

    with pytest.raises(BudgetError):
        begun(make, Half())
    assert not path.exists()
    model, optimizer = begun(make, Files())
    one_step(model, optimizer)
    optimizer.commit()
    optimizer.close()
    for spare in path.glob("room-*"):
        spare.unlink()
    before = contents(path)
    files = Half()
    files.left = 1
    with pytest.raises(BudgetError):
        begun(make, files, resume=True)
    assert contents(path) == before
    begun(make, Files(), resume=True)


def test_a_run_that_never_commits_reserves_none(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=None)
    assert not [*path.glob("room-*")]
    assert optimizer.stats()["disk_bytes"] == sum(file.stat().st_size for file in path.glob("swap-*"))


@pytest.mark.parametrize(("before", "interrupted"), [(2, "link"), (3, "link"), (3, "rename")])
def test_a_record_is_never_written_over(make: Make, path: Path, before: int, interrupted: str) -> None:
    """For a moment it has the name of a spare, too."""

    class Interrupted(Files):
        is_on, waits_for = False, interrupted

        def link(self, old: Path, new: Path) -> None:
            super().link(old, new)
            self._raise("link")

        def rename(self, old: Path, new: Path) -> None:
            if new.name == "COMMIT":
                self._raise("rename")
            super().rename(old, new)

        def write(self, file: Any, data: memoryview) -> None:
            if self.is_on and Path(file.path).name.endswith(("record0", "record1")):
                super().write(file, memoryview(b"torn"))
                raise OSError(errno.EIO, "torn")
            super().write(file, data)

        def _raise(self, what: str) -> None:
            if self.is_on and self.waits_for == what:
                self.waits_for = ""
                raise KeyboardInterrupt

    files = Interrupted()
    model, optimizer = begun(make, files)
    for step in range(before):
        one_step(model, optimizer, step)
        optimizer.commit()
    record = read_commit(path)
    one_step(model, optimizer, before)
    real, files.write = files.write, super(Interrupted, files).write  # type: ignore[method-assign]
    files.is_on = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.commit()
    assert read_commit(path) == record
    files.write = real  # type: ignore[method-assign]
    with suppress(TierIOError):
        optimizer.commit()
    assert read_commit(path) == record
    files.is_on = False
    optimizer.rollback()
    one_step(model, optimizer, before)
    optimizer.commit()
    assert is_whole([path], before + 1)


def test_a_copy_made_of_links_stays_what_it_was(make: Make, path: Path, tmp_path: Path) -> None:
    """As backups are that link what has not changed."""
    files = FullFiles()
    model, optimizer = begun(make, files)
    for step in (1, 2):
        one_step(model, optimizer, step)
        optimizer.commit(large(step))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():
        if not file.name.startswith(("swap-", "offload")):
            (copy / file.name).hardlink_to(file)
    before = contents(copy)
    for step in (3, 4, 5):
        one_step(model, optimizer, step)
        optimizer.commit(large(step))
    assert contents(copy) == before
    assert is_whole([path], 5)


def fill(place: Path) -> None:
    """Takes all that is free."""
    with suppress(OSError), (place / "others").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.mark.parametrize("before", [0, 1])
def test_on_a_disk_that_is_really_full(make: Make, small_disk: Path, before: int) -> None:
    path = small_disk / "run"
    model, optimizer = begun(make, Files(), path=path)
    extra: Callable[[int], Any] = large if before else lambda _: None
    for step in range(1, 1 + before):
        one_step(model, optimizer, step)
        optimizer.commit(extra(step))
    for step in range(1 + before, 6 + before):
        fill(small_disk)
        one_step(model, optimizer, step)
        optimizer.commit(extra(step))
        assert is_whole([path], step)
    fill(small_disk)
    one_step(model, optimizer, 9)
    with pytest.raises(TierIOError, match="No space left"):
        optimizer.commit(large(9, 100_000))
    assert is_whole([path], 5 + before)
    optimizer.close()
    fill(small_disk)
    model, optimizer = begun(make, Files(), path=path, resume=True)
    one_step(model, optimizer, 9)
    optimizer.commit(extra(9))
    (small_disk / "others").unlink()
    one_step(model, optimizer, 10)
    optimizer.commit(large(10, 20_000))
    assert is_whole([path], 7 + before)


@pytest.mark.parametrize("number", [0, 1])
def test_a_spare_that_is_something_else_is_let_go(tmp_path: Path, number: int) -> None:
    """The record of a process that was killed between its two names; somebody's copy; a link."""
    room = Room(tmp_path, "0" * 32, 0, Files())
    record = tmp_path / "COMMIT"
    record.write_bytes(b"whole")
    for kind in ("record", "manifest"):
        spare = tmp_path / f"room-{'0' * 32}-0-{kind}{number}"
        spare.hardlink_to(record) if kind == "record" else spare.symlink_to(record)
        room.reserve({kind: 9000})
        assert record.read_bytes() == b"whole"
        assert record.stat().st_nlink == 1
        found = room.spare(kind)
        assert found is not None
        assert found.stat().st_size == 9000


def test_killed_in_a_commit_on_a_full_disk_it_goes_on(make: Make, path: Path, files: FullFiles) -> None:
    class Killed(FullFiles):
        left = 0

        def rename(self, old: Path, new: Path) -> None:
            self.left -= 1
            if self.left < 0:
                raise PowerCut
            super().rename(old, new)

    path.mkdir()
    for left in range(20):
        killed, switched = Killed(), SwitchedFiles()
        model, optimizer = begun(make, switched, path=path / str(left))
        for step in (1, 2):
            one_step(model, optimizer, step)
            optimizer.commit(large(step))
        killed.left, killed.is_full = left, True
        one_step(model, optimizer, 3)
        with switched.switched(killed):
            with suppress(PowerCut):
                optimizer.commit(large(3))
            lose(optimizer)
        files.is_full = True
        model, optimizer = begun(make, files, path=path / str(left), resume=True)
        assert optimizer.resumed is not None
        for step in range(optimizer.resumed.step, 6):
            one_step(model, optimizer, step)
            optimizer.commit(large(step + 1))
        optimizer.close()
        if killed.left >= 0:
            break
    assert left > 3


def test_a_spare_is_as_long_as_what_is_asked_for(tmp_path: Path) -> None:
    room = Room(tmp_path, "0" * 32, 1, Files())
    assert room.spare("manifest") is None
    needed = {"manifest": 5000, "record": 1}
    assert room.missing(needed, 2) == 2 * 5001
    room.reserve(needed, 2)
    assert room.missing(needed, 2) == 0
    assert room.missing({"manifest": 8192, "record": 4096}, 2) == 0  # they have the blocks
    assert room.missing({"manifest": 8193}, 1) == 1
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    name = "room-" + "0" * 32 + "-1-"
    assert sizes == {f"{name}manifest{n}": 5000 for n in "01"} | {f"{name}record{n}": 1 for n in "01"}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())
    (tmp_path / "old").write_bytes(b"x" * 10)
    assert not room.keep(tmp_path / "old", "manifest")
    assert room.keep(tmp_path / "old", "extra")
    assert not (tmp_path / "old").exists()
    spare = room.spare("extra")
    assert spare is not None
    assert spare.read_bytes() == b"x" * 10
