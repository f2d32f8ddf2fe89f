"""A directory of a run that is not mounted, is an older copy, or belongs elsewhere: typed, and nothing is removed."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload import OffloadZero
from offload.errors import PathInUseError, ResumeError
from offload.storage.directories import older_swap_name
from tests.faults.conftest import Make, Tiny, assert_same, bits, one_step
from tests.faults.test_commits import committed
from tests.faults.test_resharding import LARGER
from tests.support.lost import lose
from tests.support.run_files import contents, kinds_in, swaps_in


def unmounted(place: Path) -> Path:
    """What is left of a directory is an empty mount point. Returns: where the disk is."""
    away = place.with_name(f"{place.name} away")
    place.rename(away)
    place.mkdir()
    return away


def mounted(place: Path, away: Path) -> None:
    for file in place.iterdir():
        assert file.name == "offload.lock", f"{file.name} was written to a mount point"
        file.unlink()
    place.rmdir()
    away.rename(place)


@pytest.mark.parametrize("options", [{}, {"tuning": LARGER, "cpu_memory": "1MiB"}], ids=["as it was", "another layout"])
@pytest.mark.parametrize("resume", [False, True, "auto"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_directory_that_is_not_mounted_is_said_and_missed(
    make: Make, tmp_path: Path, missing: int, resume: bool | str, options: dict[str, Any]
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    model, optimizer = committed(make, path=places)
    expected = bits(model, optimizer)
    optimizer.close()
    away = unmounted(places[missing])
    before = contents(tmp_path)
    with pytest.raises(ResumeError) as caught:
        make(Tiny(), path=places, resume=resume, commit_every=0, **options)
    assert contents(tmp_path) == before
    if resume and missing == 1:
        assert "directory 1 of the 2" in str(caught.value)
    if missing == 0:
        assert f"{places[1]} belongs to a run whose COMMIT record is not in" in str(caught.value)
    mounted(places[missing], away)
    again = Tiny()
    optimizer = make(again, path=places, resume=True, commit_every=0, **options)
    assert optimizer.resumed == (3, {"seen": 3})
    assert_same(expected, bits(again, optimizer))


def test_of_a_dead_run_nothing_goes_where_its_home_is_not_mounted(make: Make, tmp_path: Path) -> None:
    """It was replaced by one in other directories, and cut off before it was removed; then its home's disk is gone."""
    places = [tmp_path / name for name in "abc"]
    committed(make, path=places[:2])[1].close()
    copy = tmp_path / "copy"
    shutil.copytree(places[1], copy)
    make(Tiny(), path=places[2], resume=places[:2], commit_every=0, cpu_memory="1MiB").close()
    assert not swaps_in(places[1])
    shutil.rmtree(places[1])
    copy.rename(places[1])
    before = contents(places[1])
    with pytest.raises(ResumeError, match="belongs to a run whose COMMIT record is not in"):
        make(Tiny(), path=places[:2], commit_every=0)
    assert contents(places[1]) == before


@pytest.mark.parametrize("options", [{}, {"tuning": LARGER, "cpu_memory": "1MiB"}], ids=["as it was", "another layout"])
@pytest.mark.parametrize("stale", [0, 1])
def test_an_older_copy_of_one_directory_is_found(
    make: Make, tmp_path: Path, stale: int, options: dict[str, Any]
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    model, optimizer = committed(make, path=places)
    shutil.copytree(places[stale], tmp_path / "older")
    for step in (3, 4, 5):
        one_step(model, optimizer, step)
        optimizer.commit({"seen": step + 1})
    expected = bits(model, optimizer)
    optimizer.close()
    places[stale].rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "older", places[stale])
    before = contents(tmp_path)
    with pytest.raises(ResumeError, match=f"{places[stale]} .* is older, a copy from before") as caught:
        make(Tiny(), path=places, resume=True, commit_every=0, **options)
    steps = ("step 6 of rank 0", "of step 3") if stale == 0 else ("step 3 of rank 0", "of step 6")
    assert all(step in str(caught.value) for step in steps)
    assert contents(tmp_path) == before
    shutil.rmtree(places[stale])
    (tmp_path / "newest").rename(places[stale])
    again = Tiny()
    assert_same(expected, bits(again, make(again, path=places, resume=True, commit_every=0, **options)))


def test_directories_whose_names_were_swapped_are_known_by_what_lies_in_them(make: Make, tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    model, optimizer = committed(make, path=places)
    expected = bits(model, optimizer)
    optimizer.close()
    places[0].rename(tmp_path / "c")
    places[1].rename(places[0])
    (tmp_path / "c").rename(places[1])
    again = Tiny()
    optimizer = make(again, path=places, resume=True, commit_every=0)
    assert_same(expected, bits(again, optimizer))
    one_step(again, optimizer, 3)
    optimizer.commit()
    optimizer.close()
    assert make(Tiny(), path=places, resume=True, commit_every=0).resumed == (4, None)


def test_a_run_that_was_moved_goes_on_and_clears_up_from_its_next_commit_on(make: Make, tmp_path: Path) -> None:
    committed(make, path=tmp_path / "old")[1].close()
    (tmp_path / "old").rename(tmp_path / "new")
    model = Tiny()
    optimizer = make(model, path=tmp_path / "new", resume=True, commit_every=0)
    assert optimizer.resumed == (3, {"seen": 3})
    for step in (3, 4):
        one_step(model, optimizer, step)
        optimizer.commit()
    optimizer.close()
    assert kinds_in(tmp_path / "new") == {"COMMIT", "manifest", "swap", "tag"}
    assert len([*(tmp_path / "new").glob("manifest-*")]) == 1
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize("places", [1, 2])
def test_what_was_never_committed_goes_when_the_next_run_begins(make: Make, tmp_path: Path, places: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"][:places]
    lost: list[OffloadZero] = []
    for _ in range(3):
        lost.append(make(Tiny(), path=paths, commit_every=0))
        lose(lost[-1])
        assert [len(swaps_in(path)) for path in paths] == [1] * places
        assert [len([*path.glob("tag-*")]) for path in paths] == [1] * places


def test_a_live_rank_of_an_older_version_keeps_a_directory(make: Make, path: Path) -> None:
    """Older versions hold the swap files of their own ranks, and no other lock."""
    path.mkdir()
    with open(path / older_swap_name(1), "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PathInUseError):
            make(Tiny(), commit_every=0)
        assert [file.name for file in path.iterdir()] == [older_swap_name(1)]
    make(Tiny(), commit_every=0)
