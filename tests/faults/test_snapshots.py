"""Snapshots: what was committed stays, whatever the run does, and whenever power or disk fail."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.checkpoint import committer
from offload.checkpoint.commit import Commit, manifest_name, read_commit, write_commit
from offload.checkpoint.manifest import Digest, committed_slots, serialise
from offload.checkpoint.reader import Reader
from offload.checkpoint.snapshot import Need, Snapshot, require_space
from offload.errors import (
    BudgetError,
    ConfigError,
    CorruptionError,
    OffloadError,
    PathError,
    PathInUseError,
    ResumeError,
    TierIOError,
)
from offload.io.files import Files
from offload.storage.directories import COMMIT_NAME, older_swap_name, swap_name, tag_name
from offload.storage.swap_file import CommittedFile
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, bits, one_step
from tests.faults.test_commits import committed, flip
from tests.faults.test_resharding import LARGER, Counted
from tests.support.committed import manifest_of, superblock
from tests.support.disks import SwitchedFiles, on_disk
from tests.support.run_files import contents, kinds_in, swap_in
from tests.support.simulated_files import PowerCut, SimulatedFiles

SPLIT = Tuning(chunk="4KiB", threads=1, split_master=True)
KEPT, LATER = 3, 7
"""The step of the snapshot; the one to which the run has gone on, with commits at every second step."""


def go_on(model: Tiny, optimizer: OffloadZero, start: int, stop: int) -> dict[str, Tensor]:
    for step in range(start, stop):
        one_step(model, optimizer, step)
        if step % 2:
            optimizer.commit()
    return bits(model, optimizer)


def kept(make: Make, **options: Any) -> tuple[dict[str, Tensor], tuple[Path, ...], dict[str, Tensor], OffloadZero]:
    """A run with a snapshot that has gone on: the bits of the snapshot, its directories, the bits later, the run."""
    model = Tiny()
    optimizer = make(model, **{"commit_every": 0, "cpu_memory": "1MiB"} | options)
    go_on(model, optimizer, 0, KEPT)
    expected = bits(model, optimizer)
    optimizer.commit({"seen": KEPT, "x": torch.arange(5)})
    directories = optimizer.snapshot()
    return expected, directories, go_on(model, optimizer, KEPT, LATER), optimizer


def is_whole(directories: tuple[Path, ...] | list[Path]) -> bool:
    with Reader(directories) as reader:
        return reader.commit.is_snapshot and all(slot.error is None for slot in reader.verify())


# Going on from one.

WAYS: dict[str, dict[str, Any]] = {
    "elsewhere": {"path": "new"},
    "where the run was": {"path": "run"},
    "elsewhere in other chunks": {"path": "new", "tuning": LARGER},
    "in RAM": {"path": None, "tier": "cpu", "commit_every": None},
    "without commits": {"path": "run", "commit_every": None},
}


PLACES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "split": {"tuning": SPLIT},
    "cpu": {"tier": "cpu"},
    "two paths": {"path": ["run", "second"]},
    "parameters on disk": {"param_tier": "nvme"},
}
PAIRS = [("nvme", way) for way in WAYS] + [
    ("split", "in RAM"),
    ("split", "where the run was"),
    ("cpu", "elsewhere in other chunks"),
    ("two paths", "where the run was"),
    ("parameters on disk", "elsewhere"),
]


@pytest.mark.parametrize(("place", "way"), PAIRS)
def test_what_was_kept_goes_on_as_the_run_did(make: Make, tmp_path: Path, place: str, way: str) -> None:
    options = PLACES[place]
    if isinstance(options.get("path"), list):
        options = options | {"path": [tmp_path / name for name in options["path"]]}
    expected, directories, later, optimizer = kept(make, **options)
    optimizer.close()
    before = [contents(directory) for directory in directories]
    assert is_whole(directories)
    given = {"commit_every": 0, "cpu_memory": "1MiB", "resume": [*directories]} | WAYS[way]
    if given["path"] is not None:
        given["path"] = options["path"] if given["path"] == "run" and "path" in options else tmp_path / given["path"]
    model = Tiny()
    again = make(model, **given)
    assert again.resumed is not None
    step, extra = again.resumed
    assert (step, extra["seen"], extra["x"].tolist()) == (KEPT, KEPT, [0, 1, 2, 3, 4])  # type: ignore[index]
    assert_same(expected, bits(model, again))
    for number in range(KEPT, LATER):
        one_step(model, again, number)
        if number % 2 and given["commit_every"] is not None:
            again.commit()
    assert_same(later, bits(model, again))
    again.close()
    assert [contents(directory) for directory in directories] == before


def test_in_its_own_directory_it_becomes_a_run(make: Make, path: Path) -> None:
    expected, directories, later, first = kept(make)
    model = Tiny()
    inside = make(model, path=directories[0], resume=True, commit_every=0, cpu_memory="1MiB")
    assert_same(expected, bits(model, inside))
    assert first.snapshot(keep=1) != directories  # it is in use
    assert_same(later, go_on(model, inside, KEPT, LATER))
    inside.close()
    record = read_commit(directories[0])
    assert record is not None
    assert (record.is_snapshot, record.step) == (False, 6)
    first.commit()
    first.snapshot(keep=1)
    assert read_commit(directories[0]) == record
    again = make(Tiny(), path=directories[0], resume=True, commit_every=0, cpu_memory="1MiB")
    assert again.resumed == (6, None)


def test_going_back_replaces_what_the_run_did_later(make: Make, path: Path) -> None:
    _, directories, _, optimizer = kept(make)
    with pytest.raises(PathInUseError):
        make(Tiny(), resume=[*directories], cpu_memory="1MiB")
    optimizer.close()
    found = read_commit(path)
    assert found is not None
    again = make(Tiny(), resume=[*directories], cpu_memory="1MiB")
    assert again.resumed is not None
    again.close()
    record = read_commit(path)
    assert record is not None
    assert (record.step, record.replaces, record.is_snapshot) == (KEPT, found.run_id, False)
    kinds = {kind.split("-")[0] for kind in kinds_in(path)}
    assert kinds == {"COMMIT", "manifest", "extra", "swap", "tag", "snapshot"}
    assert [len([*path.glob(f"{kind}-*")]) for kind in ("manifest", "swap", "tag")] == [1, 1, 1]
    # The same call once more, as a script that is started again makes it, goes on from what is there.
    once_more = make(Tiny(), resume=[*directories], cpu_memory="1MiB")
    assert once_more.resumed is not None
    assert read_commit(path) == record
    one_step(model := Tiny(), make(model, path=path.with_name("x"), resume=[*directories], cpu_memory="1MiB"))


def test_what_is_replaced_is_held_and_what_is_only_read_is_shared(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directories, _, optimizer = kept(make)
    optimizer.close()
    real, looked, replaced = committer.copy_ranges, [], swap_in(path)

    def look_around(*args: Any) -> Any:
        CommittedFile(swap_in(directories[0])).close()
        with pytest.raises(PathInUseError):
            CommittedFile(swap_in(directories[0]), exclusive=True)
        with pytest.raises(PathInUseError):
            CommittedFile(replaced)
        looked.append(True)
        return real(*args)

    monkeypatch.setattr(committer, "copy_ranges", look_around)
    make(Tiny(), resume=[*directories], cpu_memory="1MiB")
    assert looked
    CommittedFile(swap_in(directories[0]), exclusive=True).close()


def test_another_run_does_not_give_way_to_a_snapshot(make: Make, path: Path, tmp_path: Path) -> None:
    _, directories, _, optimizer = kept(make)
    optimizer.close()
    other = tmp_path / "other"
    committed(make, path=other)[1].close()
    before = contents(tmp_path)
    with pytest.raises(ResumeError, match=r"not of the run of which .* is a snapshot: give\s+resume=True"):
        make(Tiny(), path=other, resume=[*directories])
    assert contents(tmp_path) == before


def test_of_several_snapshots_one_has_to_be_named(make: Make, path: Path) -> None:
    _, directories, _, optimizer = kept(make)
    second = optimizer.snapshot()
    optimizer.close()
    with pytest.raises(ResumeError, match="snapshots: name the directories of one"):
        make(Tiny(), path=path.with_name("new"), resume=[*directories, *second])
    with pytest.raises(ResumeError, match="is a snapshot"):
        make(Tiny(), path=second[0], resume=[*directories])
    assert is_whole(directories)
    assert is_whole(second)


def test_half_of_a_snapshot_is_missed(make: Make, tmp_path: Path) -> None:
    _, directories, _, optimizer = kept(make, path=[tmp_path / "a", tmp_path / "b"])
    optimizer.close()
    before = contents(tmp_path)
    for named, place, says in (
        (directories[:1], tmp_path / "new", "directory 1 of the 2"),
        (directories[1:], tmp_path / "new", "whose COMMIT record is not in"),
        (directories, directories[1], "whose COMMIT record is not in"),
    ):
        with pytest.raises(ResumeError, match=says):
            make(Tiny(), path=place, resume=[*named], cpu_memory="1MiB")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("after", ["run", pytest.param("new", marks=pytest.mark.slow)])
def test_going_back_cut_off_anywhere_leaves_what_was_or_what_is_to_be(after: str, tmp_path: Path) -> None:
    first, folder = tmp_path / "first", tmp_path / "folder"
    folder.mkdir()
    model = Tiny()
    with OffloadZero(model, path=folder / "run", tuning=SMALL, commit_every=0) as optimizer:
        go_on(model, optimizer, 0, 2)
        expected = bits(model, optimizer)
        name = optimizer.snapshot()[0].name
        go_on(model, optimizer, 2, 4)
        later = bits(model, optimizer)
    folder.rename(first)
    seen = set()
    for left in range(100):
        shutil.copytree(first, folder)
        run, snapshot = folder / "run", folder / "run" / name

        def resume(folder: Path = folder, **options: Any) -> tuple[Tiny, OffloadZero]:
            again = Tiny()
            return again, OffloadZero(again, path=folder / after, tuning=SMALL, commit_every=0, **options)

        files = Counted(left)
        with on_disk(files), suppress(PowerCut):
            resume(resume=[snapshot])[1].close()
        assert is_whole([snapshot])
        if after == "run":
            again, optimizer = resume(resume=True)
            assert optimizer.resumed is not None
            seen.add(step := optimizer.resumed.step)
            assert_same(expected if step == 2 else later, bits(again, optimizer))
            optimizer.close()
        else:
            seen |= {2, 4}
            with Reader([run]) as reader:
                assert reader.commit.step == 4
        again, optimizer = resume(resume=[snapshot])
        assert_same(expected, bits(again, optimizer))
        optimizer.close()
        assert not [*folder.rglob("*.new")]
        shutil.rmtree(folder)
        if files.left >= 0:
            break
    assert seen == {2, 4}
    assert left > 8


# Keeping some.


def steps_of(path: Path) -> list[int]:
    return sorted(int(one.name.split("-")[1]) for one in path.glob("snapshot-*"))


def test_the_newest_stay_and_nothing_else_goes(make: Make, path: Path) -> None:
    model = Tiny()
    optimizer = make(model, commit_every=0)
    (path / "snapshot-0-01234567").mkdir()
    (path / "snapshot-0-01234567" / "notes").write_text("mine")
    (path / "snapshot-0-00000000").symlink_to(path / "snapshot-0-01234567")
    for step in range(5):
        one_step(model, optimizer, step)
        optimizer.commit()
        found = optimizer.snapshot(keep=2)
        assert found == (path / found[0].name,)
        assert steps_of(path) == [0, 0, *range(max(1, step), step + 2)]
        assert all(is_whole([one]) for one in path.glob("snapshot-[1-9]*"))
    (found[0] / "more").write_text("mine")
    assert optimizer.snapshot() == found
    assert optimizer.snapshot(keep=1) == found
    assert steps_of(path) == [0, 0, 5]
    one_step(model, optimizer, 5)
    optimizer.commit()
    optimizer.snapshot(keep=1)
    assert [file.name for file in found[0].iterdir()] == ["more"]
    assert (path / "snapshot-0-01234567" / "notes").read_text() == "mine"


def test_snapshots_of_other_runs_stay(make: Make, path: Path) -> None:
    _, directories, _, optimizer = kept(make)
    optimizer.close()
    model = Tiny()
    again = make(model, resume=[*directories], commit_every=0, cpu_memory="1MiB")
    second = again.snapshot(keep=1)
    one_step(model, again, KEPT)
    again.commit()
    again.snapshot(keep=1)
    assert steps_of(path) == [KEPT, KEPT + 1]
    assert is_whole(directories)
    assert not second[0].exists()


@pytest.mark.parametrize("other", ["under another name", "the record of a run"])
def test_what_only_looks_like_a_snapshot_of_this_run_stays(make: Make, path: Path, other: str) -> None:
    """A copy that somebody made and named, and one that somebody went on in."""
    model, optimizer = committed(make)
    (first,) = optimizer.snapshot()
    if other == "under another name":
        left = path / "snapshot-2-00000000"
        shutil.copytree(first, left)
    else:
        left = first
        record = read_commit(first)
        assert record is not None
        write_commit(first, replace(record, is_snapshot=False))
    before = contents(left)
    one_step(model, optimizer, 3)
    optimizer.commit()
    optimizer.snapshot(keep=1)
    assert contents(left) == before
    assert steps_of(path) == ([2, 4] if left != first else [3, 4])


def test_the_one_that_is_made_stays_also_where_later_ones_are(make: Make, path: Path, tmp_path: Path) -> None:
    """As in a run whose directory was brought back from an older copy."""
    model, optimizer = committed(make)
    shutil.copytree(path, tmp_path / "older")
    one_step(model, optimizer, 3)
    optimizer.commit()
    (later,) = optimizer.snapshot()
    optimizer.close()
    later.rename(tmp_path / "older" / later.name)
    shutil.rmtree(path)
    (tmp_path / "older").rename(path)
    found = make(Tiny(), commit_every=0, resume=True).snapshot(keep=1)
    assert [*path.glob("snapshot-*")] == [*found]
    assert is_whole(found)


def test_nobody_can_begin_to_read_one_that_is_about_to_go(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = committed(make)
    first = optimizer.snapshot()[0]
    one_step(model, optimizer, 3)
    optimizer.commit()
    withdraw, tried = Snapshot.withdraw, []

    def read_first(part: Snapshot, names: Iterable[str]) -> None:
        with pytest.raises(PathInUseError):
            CommittedFile(swap_in(first))
        tried.append(1)
        withdraw(part, names)

    monkeypatch.setattr(Snapshot, "withdraw", read_first)
    optimizer.snapshot(keep=1)
    assert tried
    assert steps_of(path) == [4]


def test_what_was_taken_elsewhere_is_no_leftover(make: Make, tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    _, directories, _, optimizer = kept(make, path=places)
    elsewhere = tmp_path / "elsewhere"
    directories[0].rename(elsewhere)
    before = contents(directories[1])
    optimizer.snapshot(keep=1)
    assert is_whole([elsewhere, directories[1]])
    assert contents(directories[1]) == before
    directories[0].symlink_to(elsewhere)  # found again, but not where this run keeps its own
    optimizer.snapshot(keep=1)
    assert is_whole([elsewhere, directories[1]])


def test_what_has_a_record_is_never_cleared(make: Make, path: Path) -> None:
    _, optimizer = committed(make)
    (directory,) = optimizer.snapshot()
    record, manifest = optimizer._commits._record, optimizer._commits.last
    assert record is not None
    assert manifest is not None
    part = Snapshot(record, manifest, [path], optimizer.files, Files())
    assert part.undecided() == []
    part.clear([directory.name])
    assert is_whole([directory])
    part.withdraw([directory.name])
    assert part.undecided() == [directory.name]
    part.clear([directory.name])
    part.clear_homes([directory.name])
    assert not directory.exists()


def test_what_a_run_inside_it_left_does_not_take_its_place(make: Make, path: Path) -> None:
    """A run in another layout writes beside the committed file until its first commit, and was killed."""
    _, optimizer = committed(make)
    (directory,) = optimizer.snapshot()
    for left in (swap_name("f" * 32, 0), tag_name("f" * 32, 0)):
        (directory / left).write_bytes(bytes(4096))
    assert optimizer.snapshot() == (directory,)
    assert is_whole([directory])


def test_what_never_got_its_record_goes_if_its_home_is_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that is not there, as where it was taken elsewhere, says nothing."""
    places = [tmp_path / "a", tmp_path / "b"]
    model, optimizer = committed(make, path=places)

    def cut(*args: Any) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "decide", cut)
        with pytest.raises(PowerCut):
            optimizer.snapshot()
    home, other = (place / next(place.glob("snapshot-*")).name for place in places)
    one_step(model, optimizer, 3)
    optimizer.commit()
    home.rename(tmp_path / "elsewhere")
    before = contents(other)
    assert is_whole(optimizer.snapshot())
    assert contents(other) == before
    (tmp_path / "elsewhere").rename(home)
    assert is_whole(optimizer.snapshot())
    assert not home.exists()
    assert not other.exists()


def test_one_that_is_being_read_stays_this_time(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    first = optimizer.snapshot()[0]
    one_step(model, optimizer)
    optimizer.commit()
    reading = CommittedFile(swap_in(first))
    optimizer.snapshot(keep=1)
    assert steps_of(path) == [3, 4]
    assert is_whole([first])
    reading.close()
    optimizer.snapshot(keep=1)
    assert steps_of(path) == [4]


# What is refused.


def test_what_cannot_be_kept_is_refused(make: Make, path: Path) -> None:
    with pytest.raises(ResumeError, match="nothing has been committed"):
        make(Tiny(), path=path.with_name("first"), commit_every=0).snapshot()
    with pytest.raises(ResumeError, match="nothing has been committed"):
        make(Tiny(), path=None, tier="cpu", cpu_memory="1MiB").snapshot()
    _, optimizer = committed(make)
    wrong: list[Any] = [0, -1, 1.0, True, "2"]
    for keep in wrong:
        with pytest.raises(ConfigError, match=f"keep={keep!r}: give a whole number"):
            optimizer.snapshot(keep=keep)
    assert steps_of(path) == []


@pytest.mark.parametrize("what", ["file", "folder", "run", "snapshot"])
def test_what_has_its_name_already_is_left_alone(make: Make, path: Path, what: str) -> None:
    _, optimizer = committed(make)
    directory = optimizer.snapshot()[0]
    record = read_commit(directory)
    assert record is not None
    if what != "snapshot":
        shutil.rmtree(directory)
    if what == "snapshot":
        write_commit(directory, replace(record, manifests=(Digest(1, "0" * 32),)))
    elif what == "file":
        directory.write_text("mine")
    elif what == "folder":
        directory.mkdir()
        (directory / "mine").write_text("mine")
    else:
        committed(make, path=directory, steps=2)[1].close()
    before = contents(path)
    with pytest.raises(PathError, match="is there already"):
        optimizer.snapshot()
    assert contents(path) == before
    optimizer.close()


def test_only_what_lies_on_one_disk_is_added() -> None:
    apart = [Need(disk, 60, 100, Path("x")) for disk in range(3)]
    require_space(apart)
    for need in apart:
        with pytest.raises(BudgetError) as caught:
            require_space([*apart, need])
        assert (caught.value.needed, caught.value.available) == (120, 100)


@pytest.mark.parametrize("paths", [1, 2])
def test_too_little_disk_is_refused_before_anything_is_written(
    make: Make, path: Path, tmp_path: Path, paths: int
) -> None:
    class Full(Files):
        free = 0

        def space(self, path: Path) -> tuple[int, int]:
            return super().space(path)[0], self.free

    model, files = Tiny(), Full()
    with on_disk(files):
        optimizer = make(model, path=[path, tmp_path / "second"][:paths], commit_every=0)
    optimizer.commit({"x": torch.ones(1000)})
    with Reader([Path(file).parent for file in optimizer.files]) as reader:
        slots = sum(slot.size for manifest in reader.manifests for slot in committed_slots(manifest))
        (written,), (tensors,) = reader.commit.manifests, [one.tensors for one in reader.manifests]
    assert tensors is not None
    manifest = written.size + tensors.size
    needed = slots + paths * (4096 + manifest)
    files.free = needed - 1
    before = contents(tmp_path)
    with pytest.raises(BudgetError, match="a snapshot needs") as caught:
        optimizer.snapshot()
    assert (caught.value.needed, caught.value.available) == (needed, needed - 1)
    assert contents(tmp_path) == before
    files.free = needed
    assert is_whole(optimizer.snapshot())
    one_step(model, optimizer)
    optimizer.commit()


def test_damage_in_the_manifest_is_not_kept(make: Make, path: Path) -> None:
    _, optimizer = committed(make)
    flip(next(path.glob("manifest-*")), 100)
    with pytest.raises(CorruptionError, match="not the file that was committed"):
        optimizer.snapshot()
    assert steps_of(path) == []


# Power and disk.


class Undone:
    """A run with a snapshot of step 2 and a commit of step 4, and its files, with which operations may go wrong."""

    def __init__(self, make: Make, path: Path) -> None:
        self.path, self.switched = path, SwitchedFiles()
        self.model = Tiny()
        path.mkdir()
        with on_disk(self.switched):
            self.optimizer = make(self.model, path=[path / "a", path / "b"], commit_every=0)
        self.expected: dict[int, dict[str, Tensor]] = {}
        for step in (2, 4):
            self.expected[step] = go_on(self.model, self.optimizer, step - 2, step)
            if step == 2:
                self.first = self.optimizer.snapshot()[0]
        one_step(self.model, self.optimizer, 4)
        self.optimizer.synchronize()
        self.now = bits(self.model, self.optimizer)

    def files(self, **fault: Any) -> tuple[SimulatedFiles, BaseException | None]:
        """Tries to make another snapshot, and to take the first away."""
        files = SimulatedFiles(**fault).load(self.path)
        with self.switched.switched(files):
            try:
                self.optimizer.snapshot(keep=1)
            except (PowerCut, OffloadError) as error:
                return files, error
        return files, None


def look(folder: Path, expected: dict[int, dict[str, Tensor]]) -> set[int]:
    """Checks that the commit is there, and that every snapshot that has a record is whole. Returns: their steps."""
    found = set()
    for name in {Path(), *(Path(one.name) for one in folder.glob("*/snapshot-*"))}:
        if (folder / "a" / name / COMMIT_NAME).exists():
            with Reader([folder / "a" / name, folder / "b" / name]) as reader:
                step = reader.commit.step
                for row in reader.tensors():
                    param = row.facts.name
                    for kind in ("master", "exp_avg", "exp_avg_sq"):
                        assert torch.equal(reader.read(param, kind), expected[step][f"{param}.{kind}"])
                assert reader.commit.is_snapshot == (name != Path())
            found.add(step if name != Path() else -step)
    assert -4 in found
    return found - {-4}


def cut_off_anywhere(make: Make, path: Path, cuts: int | None, every: int = 1) -> None:
    """At operations, `every` of them apart.

    Args: cuts: how often the power is cut at each; None: only the process ends.
    """
    run = Undone(make, path)
    seen = set()
    folder = path.with_name("after")
    for number in range(0, 200, every):
        files, error = run.files(cut_at=number)
        for seed in range(1 if cuts is None else cuts):
            after = files.killed() if cuts is None else files.after_cut(100 * number + seed)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            after.move(path, folder).write_out(folder)
            found = look(folder, run.expected)
            assert found, "neither the old snapshot is there nor the new one"
            if error is None or "sync directory" in " ".join(files.log).partition("rename COMMIT")[2]:
                assert 4 in found
            seen.add(frozenset(found))
            # Whoever comes next clears up.
            places = [folder / "a", folder / "b"]
            with OffloadZero(
                Tiny(), path=places, resume=True, commit_every=0, tuning=SMALL, cpu_memory="1MiB"
            ) as optimizer:
                optimizer.snapshot(keep=1)
            assert steps_of(folder / "a") == steps_of(folder / "b") == [4]
            assert look(folder, run.expected) == {4}
        if error is None:
            break
    outcomes = {frozenset({2}), frozenset({2, 4}), frozenset({4})}
    assert seen == outcomes or (every > 1 and {frozenset({2}), frozenset({4})} <= seen <= outcomes)
    # Few power cuts show it: the record is gone for good before anything else goes.
    assert files.log[files.log.index("remove COMMIT") + 1].startswith("sync directory snapshot-2-")
    assert number > 15
    assert_same(run.now, bits(run.model, run.optimizer))


def test_cut_off_at_every_third_operation_there_is_no_half_snapshot(make: Make, path: Path) -> None:
    cut_off_anywhere(make, path, 1, every=3)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [1, None], ids=["without power", "killed"])
def test_cut_off_at_any_operation_there_is_no_half_snapshot(make: Make, path: Path, cuts: int | None) -> None:
    cut_off_anywhere(make, path, cuts)


@pytest.mark.parametrize("left", ["all", "no manifest", "no home", "its record", "something else"])
def test_what_an_older_version_left_half_made_goes_too(make: Make, tmp_path: Path, left: str) -> None:
    """In format 1, where swap files have no run in their names, and there are no tags."""
    _, optimizer = committed(make, path=[tmp_path / "a", tmp_path / "b"])
    manifest = manifest_of(run_id="7" * 32, paths=2)
    parts = [tmp_path / place / "snapshot-5-77777777" for place in "ab"]
    for number, part in enumerate(parts):
        part.mkdir()
        (part / older_swap_name(0)).write_bytes(superblock(manifest, number) + bytes(4096))
        if left != "no manifest":
            (part / manifest_name(manifest, 0)).write_bytes(serialise(manifest))
    if left == "no home":
        parts[0].rename(tmp_path / "away")
    elif left == "its record":
        write_commit(parts[0], Commit(manifest.run_id, 5, (Digest(1, "0" * 32),), is_snapshot=True))
    elif left == "something else":
        (parts[1] / "notes").touch()
    before = contents(tmp_path)
    optimizer.snapshot()
    gone = {str(Path(name).parent) for name in before.keys() - contents(tmp_path).keys()}
    stays = left in ("no home", "its record")
    assert gone == (set() if stays else {f"{place}/snapshot-5-77777777" for place in "ab"})
    assert [part.exists() for part in parts] == [stays and left != "no home", stays or left == "something else"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_power_cut_a_dozen_times_at_any_operation(make: Make, path: Path) -> None:
    cut_off_anywhere(make, path, 12)


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_failing_disk_is_said_and_leaves_no_half_snapshot(make: Make, path: Path, code: int) -> None:
    run = Undone(make, path)
    failed = 0
    for number in range(0, 200, 2):
        files, error = run.files(fail_at=number, code=code)
        if error is not None:
            assert isinstance(error, TierIOError)
            assert error.errno == code
            failed += 1
        folder = path.with_name("after")
        folder.mkdir()
        files.killed().move(path, folder).write_out(folder)
        found = look(folder, run.expected)
        assert found, "neither the old snapshot is there nor the new one"
        if error is None:
            assert 4 in found
        shutil.rmtree(folder)
        if number >= files.operations:
            break
    assert failed > 10
    assert_same(run.now, bits(run.model, run.optimizer))
    one_step(run.model, run.optimizer, 5)
    run.optimizer.commit()
    run.optimizer.snapshot(keep=1)
    assert steps_of(path / "a") == steps_of(path / "b") == [6]


# Copying.


@pytest.mark.parametrize("kernel", ["copies", "cannot", "says nothing"])
def test_holes_stay_holes_and_the_rest_is_the_same(tmp_path: Path, kernel: str) -> None:
    class Copying(Files):
        piece_bytes = 8192

        def copy_in_kernel(self, source: int, target: int, offset: int, length: int) -> int:
            if kernel == "copies":
                return super().copy_in_kernel(source, target, offset, length)
            if kernel == "cannot":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return 0

    source, target = tmp_path / "source", tmp_path / "target"
    data = os.urandom(1 << 20)
    source.write_bytes(data)
    files = Copying()
    file = files.create(target)
    files.copy(source, file, 0, 4096)
    files.copy(source, file, 900_000, 100_001)
    files.close(file)
    found = target.read_bytes()
    assert found == data[:4096] + bytes(900_000 - 4096) + data[900_000:1_000_001]
    assert target.stat().st_blocks * 512 < 200_000
    file = files.create(tmp_path / "more")
    with pytest.raises(OSError, match="ends at 1048576"):
        files.copy(source, file, 1_000_000, 100_000)
    files.close(file)
