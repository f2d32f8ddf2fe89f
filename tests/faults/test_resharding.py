"""A run that is resumed in another layout: cut off anywhere, one of the two commits is there, whole."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offload import OffloadZero, Tuning
from offload.checkpoint import reader as reading
from offload.checkpoint.manifest import committed_slots
from offload.checkpoint.reader import Reader
from offload.errors import BudgetError, CorruptionError, OffloadError, PathInUseError, ResumeError
from offload.io.engine import PRIVATE, IOFile, IOFuture
from offload.io.files import Files
from offload.planner import least_cpu_memory
from offload.storage.directories import COMMIT_NAME, LOCK_NAME, file_name, older_swap_name
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, bits, one_step
from tests.faults.test_commits import Cuts, committed, cut_power, kill
from tests.support.damage import flip
from tests.support.disks import FreeFiles, SwitchedFiles, on_disk
from tests.support.faulty_engine import FaultyEngine
from tests.support.lost import lose
from tests.support.run_files import contents, swap_in
from tests.support.simulated_files import PowerCut

LARGER = Tuning(chunk="12KiB", threads=1)
_slow = partial(pytest.param, marks=pytest.mark.slow)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def require_only(folder: Path, used: list[str]) -> None:
    """That there is nothing but one committed run, in the directories that it has."""
    assert len([place for place in folder.iterdir() if (place / COMMIT_NAME).exists()]) == 1
    for place in folder.iterdir():
        named = {file_name(name) for name in names(place)} - {None}
        kinds = sorted(name.kind for name in named if name is not None and name.kind not in ("older", "room"))
        if place.name in used:
            assert kinds == ["manifest", "swap", "tag"]
            assert len({name.run_id for name in named if name is not None and name.run_id}) == 1
        else:
            assert not names(place)


# Cut off.


class Counted(Files):
    """The files of this machine, until an operation in whose place the process ends."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PowerCut

    def create(self, path: Path, mode: int = PRIVATE) -> IOFile:
        self.spend()
        return super().create(path, mode)

    def sync(self, file: IOFile) -> None:
        self.spend()
        super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        self.spend()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self.spend()
        super().link(old, new)

    def open_or_create(self, path: Path) -> IOFile:
        self.spend()
        return super().open_or_create(path)

    def remove(self, path: Path) -> None:
        self.spend()
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self.spend()
        super().sync_directory(path)

    # A process that has ended changes nothing either by what a run does when it ends in order.

    def truncate(self, file: IOFile, size: int) -> None:
        self.require_alive()
        super().truncate(file, size)

    def remove_directory(self, path: Path) -> None:
        self.require_alive()
        super().remove_directory(path)

    def require_alive(self) -> None:
        if self.left < 0:
            raise PowerCut


def resume_in(folder: Path, path: list[str], tuning: Tuning, **more: Any) -> tuple[Tiny, OffloadZero]:
    model = Tiny()
    given: dict[str, Any] = {"commit_every": 0, "resume": [folder / name for name in "ab"]} | more
    return model, OffloadZero(model, path=[folder / name for name in path], tuning=tuning, **given)


@pytest.mark.parametrize(("before", "after"), [_slow("a", "a"), ("a", "ab"), _slow("ab", "b"), _slow("ab", "ba")])
def test_cut_off_at_any_operation_one_of_the_two_commits_is_there(before: str, after: str, tmp_path: Path) -> None:
    first, folder = tmp_path / "first", tmp_path / "run"
    folder.mkdir()
    model = Tiny()
    with OffloadZero(model, path=[folder / name for name in before], tuning=SMALL, commit_every=0) as optimizer:
        for step in range(2):
            one_step(model, optimizer, step)
        optimizer.commit({"seen": 2})
        expected = bits(model, optimizer)
    folder.rename(first)
    seen = set()
    for left in range(200):
        shutil.copytree(first, folder)
        files = Counted(left)
        with on_disk(files), suppress(PowerCut):
            resume_in(folder, [*after], LARGER)[1].close()
        with Reader([folder / name for name in "ab"]) as reader:
            seen.add((reader.commit.replaces is None, files.left < 0))
        wanted = ([*before], SMALL) if left % 2 else ([*after], LARGER)
        again, optimizer = resume_in(folder, *wanted)
        assert optimizer.resumed == (2, {"seen": 2})
        assert_same(expected, bits(again, optimizer))
        optimizer.close()
        require_only(folder, wanted[0])
        shutil.rmtree(folder)
        if files.left >= 0:
            break
    assert seen == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize(("before", "after"), [("a", "a"), ("ab", "b"), _slow("ab", "ba")])
def test_clearing_up_may_be_lost_in_any_part(before: str, after: str, tmp_path: Path) -> None:
    """What follows the decision, without the removal of the record that no longer counts, is in no order."""
    first, folder = tmp_path / "first", tmp_path / "run"
    folder.mkdir()
    model = Tiny()
    with OffloadZero(model, path=[folder / name for name in before], tuning=SMALL, commit_every=0) as optimizer:
        one_step(model, optimizer)
        optimizer.commit({"seen": 1})
        expected = bits(model, optimizer)
    folder.rename(first)
    for seed in range(12):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        chance = random.Random(seed)

        class Losing(Files):
            def remove(self, path: Path, chance: random.Random = chance) -> None:
                # Of what is removed between two syncs.
                name, is_temporary = file_name(path.name), path.name.endswith(".new")
                is_other = name is None or name.kind not in ("swap", "manifest", "extra")
                if is_temporary or is_other or chance.random() < 0.5:
                    super().remove(path)

        with on_disk(Losing()):
            resume_in(folder, [*after], LARGER)[1].close()
        again, optimizer = resume_in(folder, [*after], LARGER)
        assert optimizer.resumed == (1, {"seen": 1})
        assert_same(expected, bits(again, optimizer))
        optimizer.close()
        require_only(folder, [*after])


class Dying(FaultyEngine):
    """A disk at whose so-manieth write the process ends."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def write(self, file: IOFile, offset: int, data: memoryview) -> IOFuture:
        self.left -= 1
        if self.left < 0:
            raise PowerCut
        return super().write(file, offset, data)


def test_a_first_commit_and_the_start_after_it_may_both_be_cut_off_anywhere(tmp_path: Path) -> None:
    """With manifests in two directories and no record the run has committed nothing, also when one of its swap files
    is another run's already."""
    outcomes = []
    for left in range(4, 40):
        first = tmp_path / f"first{left}"
        first.mkdir()
        switched, files = SwitchedFiles(), Counted(left)
        with on_disk(switched):
            model, optimizer = resume_in(first, ["a", "b"], SMALL, resume="auto")
        one_step(model, optimizer)
        with switched.switched(files), suppress(PowerCut):
            optimizer.commit({"seen": 1})
        with switched.switched(Counted(0)):
            lose(optimizer)
        is_committed = (first / "a" / COMMIT_NAME).exists()
        if [*(first / "b").glob("manifest-*.json")]:
            with on_disk(Counted(1000), Dying(1)), suppress(PowerCut, OffloadError):
                resume_in(first, ["a", "b"], LARGER, resume="auto")[1].close()
            _, again = resume_in(first, ["a", "b"], SMALL, resume="auto")
            assert (again.resumed is not None) == is_committed
            again.close()
            outcomes.append(is_committed)
        shutil.rmtree(first)
        if files.left >= 0:
            break
    assert outcomes.count(False) > 2
    assert outcomes[-1]


class LayoutCuts(Cuts):
    """Every start has other chunks and directories, and is given those that the start before may have left."""

    def __init__(self, make: Make, path: Path) -> None:
        path.mkdir()
        self._places = [path / name for name in "abc"]
        self.layouts: list[tuple[int, ...]] = []
        super().__init__(make, path)

    def begin_anew(self) -> None:
        super().begin_anew()
        self._path.mkdir()

    def _options(self, chance: random.Random) -> dict[str, Any]:
        given: dict[str, Any] = {"tuning": chance.choice([SMALL, LARGER]), "cpu_memory": "1MiB"}
        there = [place for place in self._places if place.is_dir()]
        if not any(COMMIT_NAME in self.files.names(place) for place in there):
            return {"path": self._places, "resume": "auto"} | given
        chosen = chance.sample(self._places, chance.randrange(1, 4))
        return {"path": chosen, "resume": there} | given

    def _after_step(self, optimizer: OffloadZero, chance: random.Random) -> None:
        used = [Path(file).parent for file in optimizer.files]
        self.layouts.append(tuple(self._places.index(place) for place in used))
        for place in self._places:
            if place.is_dir():
                # The tag in a home stays as long as not all directories of its run were given.
                named = [name for name in map(file_name, self.files.names(place)) if name is not None]
                found = [name for name in named if name.kind not in ("older", "tag")]
                assert {name.run_id for name in found} <= {optimizer._parts.slots.run_id.hex()}  # type: ignore[union-attr]
                assert bool(found) == (place in used)


def test_power_cuts_in_ever_other_layouts_lose_nothing_that_was_committed(make: Make, path: Path) -> None:
    training = LayoutCuts(make, path)
    cut_power(training, 30, seed=7)
    assert len(set(training.layouts)) > 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_power_cuts_in_ever_other_layouts(make: Make, path: Path) -> None:
    cut_power(LayoutCuts(make, path), 1000, seed=8)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_killed_at_any_instant_in_ever_other_layouts(tmp_path: Path, states: str) -> None:
    kill(tmp_path, 2, 3, seed=5, states=states, each="layouts")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_hundred_kills_in_ever_other_layouts(tmp_path: Path, states: str) -> None:
    kill(tmp_path, 100, 3, seed=6, states=states, each="layouts")


# Nothing of the old commit is touched before.


def test_the_old_commit_is_untouched_until_the_new_one_decides(make: Make, path: Path) -> None:
    committed(make)[1].close()
    before = contents(path)
    seen: list[bool] = []
    decided: list[str] = []

    class Looking(Files):
        def rename(self, old: Path, new: Path) -> None:
            found = contents(path)
            if COMMIT_NAME not in decided:
                seen.append(all(found[name] == data for name, data in before.items()))
            decided.append(new.name)
            super().rename(old, new)

    with on_disk(Looking()):
        make(Tiny(), commit_every=0, resume=True, tuning=LARGER, cpu_memory="1MiB").close()
    assert seen == [True, True, True]  # a tag, a manifest, COMMIT
    assert not (before.keys() - {COMMIT_NAME, LOCK_NAME, older_swap_name(0)}) & contents(path).keys()


def test_too_little_disk_for_both_is_refused_before_anything_is_written(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    optimizer.close()
    before = contents(path)
    with on_disk(FreeFiles(20 * 4096)), pytest.raises(BudgetError) as caught:
        make(Tiny(), commit_every=0, resume=True, tuning=LARGER, cpu_memory="1MiB")
    assert caught.value.available == 21 * 4096 < caught.value.needed  # the superblock has its page already
    assert contents(path) == before
    again = Tiny()
    assert_same(expected, bits(again, make(again, commit_every=0, resume=True)))


def test_what_reading_needs_is_within_the_budget(make: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots of the old layout, which are not there yet when the arena is made."""
    committed(make, tuning=LARGER, cpu_memory="1MiB")[1].close()
    with Reader([path]) as reader:
        reading_bytes = reader.slots_bytes()
    least = least_cpu_memory(Tiny(), tuning=SMALL)
    held: list[int] = []
    aligned = reading.aligned_memory
    monkeypatch.setattr(reading, "aligned_memory", lambda size: held.append(size) or aligned(size))
    with pytest.raises(BudgetError, match="cpu_memory"):
        make(Tiny(), commit_every=0, resume=True, cpu_memory=least + reading_bytes - 1)
    optimizer = make(Tiny(), commit_every=0, resume=True, cpu_memory=least + reading_bytes)
    assert sum(held) <= reading_bytes
    assert sum(held) + optimizer.stats()["peak_cpu_bytes"] <= least + reading_bytes


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_corrupt_slot_is_found_and_nothing_new_is_left(make: Make, path: Path, chunk: int) -> None:
    committed(make)[1].close()
    with Reader([path]) as reader:
        slot = committed_slots(reader.manifests[0])[chunk]
    flip(swap_in(path), slot.offset + 4096 + 5)
    before = contents(path)
    with pytest.raises(CorruptionError) as caught:
        make(Tiny(), commit_every=0, resume=True, tuning=LARGER, cpu_memory="1MiB")
    assert (caught.value.chunk, caught.value.offset) == (chunk, slot.offset)
    assert contents(path) == before


# Whose the directories are.


def test_a_live_run_is_not_resumed_elsewhere(make: Make, path: Path, tmp_path: Path) -> None:
    model, optimizer = committed(make)
    before = contents(path)
    for place in (path, tmp_path / "other"):
        with pytest.raises(PathInUseError):
            make(Tiny(), path=place, commit_every=0, resume=[path], tuning=LARGER, cpu_memory="1MiB")
        assert contents(path) == before
    one_step(model, optimizer)


def test_a_run_that_reads_a_commit_holds_it(make: Make, path: Path, tmp_path: Path) -> None:
    committed(make)[1].close()
    live = make(Tiny(), commit_every=None, resume=True, tuning=LARGER, cpu_memory="1MiB")
    with pytest.raises(PathInUseError):
        make(Tiny(), commit_every=0, resume=True)
    live.close()
    make(Tiny(), commit_every=0, resume=True)


def test_a_directory_of_another_committed_run_is_refused(make: Make, path: Path, tmp_path: Path) -> None:
    committed(make)[1].close()
    pair = [tmp_path / "c", tmp_path / "d"]
    committed(make, path=pair)[1].close()
    before = contents(tmp_path)
    for other in pair:
        with pytest.raises(ResumeError, match=r"several runs|another committed run"):
            make(Tiny(), path=[path, other], commit_every=0, resume=True)
    assert contents(tmp_path) == before


def test_a_directory_of_the_run_that_is_not_named_is_missed(make: Make, path: Path, tmp_path: Path) -> None:
    committed(make, path=[path, tmp_path / "second"])[1].close()
    before = contents(tmp_path)
    with pytest.raises(ResumeError, match="directory 1 of the 2"):
        make(Tiny(), commit_every=0, resume=True)
    assert contents(tmp_path) == before


def test_what_a_crash_left_beside_the_commit_is_removed(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    optimizer.close()
    (path / f"{older_swap_name(0)}.new").write_bytes(bytes(4096))
    (path / "offload-rank7.swap.new").write_text("not ours")
    again = Tiny()
    assert_same(expected, bits(again, make(again, commit_every=0, resume=True)))
    assert "offload-rank7.swap.new" in names(path)
    assert f"{older_swap_name(0)}.new" not in names(path)
