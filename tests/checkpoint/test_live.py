"""Which files live in a run's directories, what is removed of the others, and in which order."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from offload.checkpoint.commit import (
    Commit,
    RankFiles,
    manifest_name,
    names_of,
    read_commit,
    spelled,
    write_commit,
)
from offload.checkpoint.live import (
    Tag,
    collect,
    collect_homes,
    garbage,
    last_of,
    leave,
    live,
    read_tag,
    swaps,
    untag,
    withdraw,
    write_tag,
)
from offload.checkpoint.manifest import Digest
from offload.errors import CorruptionError, PathError, PathInUseError, ResumeError
from offload.io.files import LOCAL, Files
from offload.sizes import PAGE_BYTES
from offload.storage import swap_format as slots
from offload.storage.directories import COMMIT_NAME, LOCK_NAME, older_swap_name, swap_name, tag_name
from offload.storage.swap_file import open_locked
from tests.support.committed import manifest_of, named, superblock, superblock_of, write_manifest
from tests.support.simulated_files import PowerCut, SimulatedFiles

OLD, NEW, OTHER = "a" * 32, "b" * 32, "c" * 32
"""The run that was, the one that replaces it, and one that has nothing to do with them."""
BEFORE = Commit(OLD, 7, (Digest(1, "0" * 32),))
AFTER = Commit(NEW, 7, (Digest(1, "0" * 32),), OLD)


def swap(directory: Path, run_id: str, path: int = 0, paths: int = 1, rank: int = 0) -> Path:
    file = directory / swap_name(run_id, rank)
    file.write_bytes(superblock(manifest_of(run_id=run_id, paths=paths), path))
    return file


def older(directory: Path, name: str, run_id: str, path: int = 0, paths: int = 1) -> Path:
    """As older versions named it, and longer than the page that keeps these out."""
    file = directory / f"offload-{name}"
    file.write_bytes(superblock(manifest_of(run_id=run_id, paths=paths), path) + bytes(PAGE_BYTES))
    return file


def tag(directory: Path, run_id: str, places: Sequence[Path], rank: int = 0) -> None:
    stripe = (places.index(directory), len(places))
    write_tag(directory, Tag(run_id, rank, stripe, (tuple(map(spelled, places)),)))


def begun(places: Sequence[Path], run_id: str) -> None:
    """A run that committed nothing."""
    for number, place in enumerate(places):
        tag(place, run_id, places)
        swap(place, run_id, number, len(places))


def decided(places: Sequence[Path], commit: Commit) -> Commit:
    """The run of a commit, as it lies in all of its directories. Returns: the record, in the first."""
    for number, place in enumerate(places):
        swap(place, commit.run_id, number, len(places))
        write_manifest(place, manifest_of(run_id=commit.run_id, paths=len(places)))
    record = named(commit, places)
    write_commit(places[0], record)
    return record


def names(place: Path) -> set[str]:
    """All but what a next commit is written into."""
    return {file.name for file in place.iterdir() if not file.name.startswith("room-")}


def cleared(places: Sequence[Path], record: Commit | None, files: Files = LOCAL) -> None:
    """As one start does that has these directories."""
    found = live(places, files)
    for place in places:
        withdraw(place, found.replaced, files)
    for place in places:
        collect(place, record, found.dead, files)
    for place in places:
        collect_homes(place, found.dead, {spelled(place) for place in places}, files)


# What is a swap file, and a tag.


def test_what_is_no_regular_file_is_no_swap_file(places: list[Path]) -> None:
    real = swap(places[1], NEW)
    (places[0] / swap_name(NEW, 0)).symlink_to(real)
    os.mkfifo(places[0] / swap_name(NEW, 1))
    (places[0] / swap_name(NEW, 2)).mkdir()
    (places[0] / f"swap-{NEW}-03").touch()
    older(places[0], "rank3.swap.new", NEW)
    (places[0] / older_swap_name(4)).write_bytes(superblock(manifest_of(run_id=NEW), 0))
    assert [(one.rank, one.name.kind, one.run_id) for one in swaps(places[0], LOCAL)] == [(3, "older", NEW)]
    assert not [*swaps(places[0] / "missing", LOCAL)]
    assert not [*swaps(real, LOCAL)]


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(places: list[Path]) -> None:
    class Refusing(Files):
        def names(self, directory: Path) -> list[str]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PathError) as caught:
        [*swaps(places[0], Refusing())]
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(places[0]))


@pytest.mark.parametrize("becomes", ["nothing", "a link"])
def test_a_file_that_goes_meanwhile_is_no_error(places: list[Path], becomes: str) -> None:
    """A run that ends in order removes what it has beside its files, while others look. A link is not followed."""
    first, second = (swap(places[0], NEW, rank=rank) for rank in range(2))
    other = swap(places[1], NEW)

    class Meanwhile(Files):
        def read(self, path: Path, most: int) -> bytes:
            if path == first:
                first.unlink()
                if becomes == "a link":
                    first.symlink_to(other)
            return super().read(path, most)

    assert [one.path for one in swaps(places[0], Meanwhile())] == [second]


def test_a_swap_file_of_a_newer_version_is_of_no_run(places: list[Path]) -> None:
    (places[0] / swap_name(NEW, 0)).write_bytes(superblock_of(b"{}", slots.FORMAT_OF_TRIALS + 1))
    assert [one.run_id for one in swaps(places[0], LOCAL)] == [None]


def test_a_tag_is_taken_as_it_was_written_or_not_at_all(places: list[Path]) -> None:
    strange = places[0] / os.fsdecode(b"no UTF-8: \xff, and % a")
    strange.mkdir()
    written = Tag(NEW, 3, (1, 2), ((spelled(strange),), (spelled(places[1]),)))
    write_tag(strange, written)
    path = strange / tag_name(NEW, 3)
    found = read_tag(path)
    assert found == written
    assert found is not None
    assert (found.home, found.is_home) == (strange, False)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert read_tag(path) is None
    path.write_bytes(data)
    path.rename(strange / tag_name(OLD, 3))
    assert read_tag(strange / tag_name(OLD, 3)) is None


# What lives.


def test_a_run_lives_as_long_as_there_is_a_record_of_it(places: list[Path]) -> None:
    begun(places, OLD)
    assert (live(places, LOCAL).dead, live(places, LOCAL).unknown) == ({OLD}, [])
    record = decided(places, BEFORE)
    found = live(places, LOCAL)
    assert (found.dead, found.unknown, found.records) == (set(), [], ((places[0], record),))


def test_of_a_run_whose_home_is_not_there_nothing_is_known(places: list[Path]) -> None:
    decided(places, BEFORE)
    away = places[0].with_name("away")
    places[0].rename(away)
    places[0].mkdir()  # as a mount point looks without its disk
    before = names(places[1])
    for given in (places, places[1:]):
        found = live(given, LOCAL)
        assert not found.dead
        with pytest.raises(ResumeError, match=r"b belongs to a run whose COMMIT record is not in") as caught:
            last_of(found, given)
        assert all(said in str(caught.value) for said in (str(places[0]), "Nothing was removed"))
        cleared(given, None)
        assert names(places[1]) == before
    places[0].rmdir()
    away.rename(places[0])
    assert last_of(live(places, LOCAL), places) == (places[0], read_commit(places[0]))


def test_a_home_that_was_not_given_is_read_where_the_tag_says(places: list[Path]) -> None:
    begun(places, OLD)
    assert live(places[1:], LOCAL).dead == {OLD}
    decided(places, BEFORE)
    assert live(places[1:], LOCAL).dead == set()
    copy = places[1].with_name("copy")
    (places[0] / COMMIT_NAME).unlink()
    shutil.copytree(places[1], copy)
    assert live(places[1:], LOCAL).dead == {OLD}
    assert live([copy], LOCAL).dead == set(), "its tag does not name a copy"


def test_a_directory_whose_record_is_missed_is_refused_whatever_else_was_begun(places: list[Path]) -> None:
    """Nothing is known of the run in the second one by a run that never committed in the first."""
    decided(places, BEFORE)
    for file in places[0].iterdir():
        file.unlink()
    begun(places[:1], OTHER)
    with pytest.raises(ResumeError, match="b belongs to a run whose COMMIT record is not in"):
        last_of(live(places, LOCAL), places)


def test_an_older_run_is_known_by_its_first_file(places: list[Path]) -> None:
    older(places[1], "rank0.swap", OLD, path=1, paths=2)
    assert live(places, LOCAL).dead == {OLD}, "no manifest is there"
    write_manifest(places[1], manifest_of(run_id=OLD, paths=2))
    with pytest.raises(ResumeError, match="b belongs to a run whose COMMIT record is not in"):
        last_of(live(places, LOCAL), places)
    older(places[0], "rank0.swap", OLD, paths=2)
    assert last_of(live(places, LOCAL), places) is None


def test_a_record_that_replaces_itself_is_refused(places: list[Path]) -> None:
    write_commit(places[0], Commit(NEW, 7, AFTER.manifests, NEW))
    with pytest.raises(ResumeError):
        last_of(live(places, LOCAL), places)


# What is removed.


@pytest.mark.parametrize("order", [1, -1])
def test_an_old_record_elsewhere_is_gone_for_good_before_anything_else_is_done(places: list[Path], order: int) -> None:
    decided(places, BEFORE)
    record = decided(places[1:], AFTER)

    class Logged(Files):
        log: list[str] = []  # noqa: RUF012

        def remove(self, path: Path) -> None:
            self.log.append(f"remove {path.name.partition('-')[0]}")
            super().remove(path)

        def sync_directory(self, path: Path) -> None:
            self.log.append(f"sync {path.name}")
            super().sync_directory(path)

    files = Logged()
    cleared(places[::order], record, files)
    rest = ["remove manifest", "remove swap", "sync {}"]
    first, second = ([what.format(place) for what in rest] for place in "ab")
    tags = ["remove tag", "sync b"]
    each = [first, second + tags][::order]
    assert files.log == ["remove COMMIT", "sync a", *each[0], *each[1], "remove tag", "sync a"]
    assert names(places[0]) == set()
    assert names(places[1]) == {COMMIT_NAME, tag_name(NEW, 0), swap_name(NEW, 0), manifest_name(AFTER, 0)}


LEFT: dict[str, tuple[str, bytes | str]] = {
    "of a dead run": (swap_name(OLD, 5), OLD),
    "of one that did not get far": (swap_name(OLD, 5), bytes(PAGE_BYTES)),
    "of one that is empty": (swap_name(OLD, 5), b""),
    "tensors of a dead run": (f"extra-{OLD}-7-rank5.safetensors", b"half"),
    "half of a manifest": (f"manifest-{OLD}-7-rank5.json.offload.new", b"half"),
    "an older commit of this run": (f"manifest-{NEW}-6-rank0.json", b"any"),
    "half of a record": (f"{COMMIT_NAME}.offload.new", b"half"),
    "of an older version, aside": ("offload-rank5.swap.new", bytes(PAGE_BYTES)),
}
STAYS: dict[str, tuple[str, bytes | str]] = {
    "of this run": (swap_name(NEW, 0), NEW),
    "of another run": (swap_name(OTHER, 5), OTHER),
    "of somebody else, under a dead run's name": (swap_name(OLD, 5), b"mine".rjust(PAGE_BYTES, b"\0")),
    "of somebody else, of zeros": (swap_name(OLD, 5), bytes(PAGE_BYTES + 1)),
    "of another run under this name": (swap_name(OLD, 5), OTHER),
    "tensors of another run": (f"extra-{OTHER}-7-rank5.safetensors", b"any"),
    "what keeps older versions out": ("offload-rank5.swap", bytes(PAGE_BYTES)),
    "the user's own": ("notes", b"mine"),
}


@pytest.mark.parametrize("what", LEFT | STAYS)
def test_what_was_left_goes_and_what_others_have_stays(places: list[Path], what: str) -> None:
    record = decided(places, AFTER)
    begun(places, OLD)
    cleared(places, record)
    rest = names(places[1])
    assert rest == {swap_name(NEW, 0), tag_name(NEW, 0), manifest_name(AFTER, 0)}
    name, content = (LEFT | STAYS)[what]
    if isinstance(content, str):
        content = superblock(manifest_of(run_id=content, paths=2), 1)
    (places[1] / name).write_bytes(content)
    assert bool(garbage(places[1], record, {OLD}, LOCAL)) == (what in LEFT)
    for _ in range(2):
        collect(places[1], record, {OLD}, LOCAL)
        assert names(places[1]) == rest | ({name} if what in STAYS else set())


def test_ranks_that_share_a_directory_may_clear_it_at_once(places: list[Path]) -> None:
    class Meanwhile(Files):
        """Another rank does each thing first."""

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            super().rename(old, new)

        def remove(self, path: Path) -> None:
            super().remove(path)
            super().remove(path)

    record = decided(places, AFTER)
    begun(places, OLD)
    cleared(places, record)
    rest = names(places[1])
    for step in (5, 6, 8):
        (places[1] / f"manifest-{NEW}-{step}-rank0.json").touch()
    collect(places[1], record, {OLD}, Meanwhile())
    assert names(places[1]) == rest
    assert len([*places[1].glob("room-*")]) == 2


def test_a_record_says_nothing_of_directories_that_it_does_not_name(places: list[Path]) -> None:
    """As of a copy that somebody put elsewhere."""
    record = decided(places[:1], AFTER)
    (places[0] / f"manifest-{NEW}-6-rank0.json").touch()
    shutil.rmtree(places[1])
    shutil.copytree(places[0], places[1])
    before = names(places[1])
    for place in places:
        collect(place, record, (), LOCAL)
    assert names(places[1]) == before
    assert names(places[0]) == before - {f"manifest-{NEW}-6-rank0.json"}


def test_a_record_says_nothing_of_the_files_of_ranks_that_have_another_directory(places: list[Path]) -> None:
    """As where the names of two ranks' directories were swapped."""
    for rank, place in enumerate(places):
        swap(place, NEW, rank=rank)
        tag(place, NEW, [place], rank)
        for step in (6, 7):
            (place / f"manifest-{NEW}-{step}-rank{rank}.json").touch()
    at = manifest_of(run_id=NEW)
    files = tuple(RankFiles((spelled(places[1 - rank]),), names_of(at, rank, has_tensors=False)) for rank in range(2))
    before = [names(place) for place in places]
    for place in places:
        collect(place, replace(AFTER, manifests=AFTER.manifests * 2, files=files), (), LOCAL)
    assert [names(place) for place in places] == before


def test_a_rank_leaves_what_others_are_writing(places: list[Path]) -> None:
    record = decided(places, AFTER)
    other = record.files[0]._replace(names=names_of(manifest_of(run_id=NEW), 1, has_tensors=False))
    record = replace(record, manifests=record.manifests * 2, files=(*record.files, other))
    for rank in range(2):
        (places[0] / f"manifest-{NEW}-8-rank{rank}.json").touch()
    (places[0] / f"{COMMIT_NAME}.offload.new").touch()
    before = names(places[0])
    collect(places[0], record, (), LOCAL, rank=1)
    assert before - names(places[0]) == {f"manifest-{NEW}-8-rank1.json"}


def test_a_tag_stays_in_a_home_whose_other_directories_were_not_cleared(places: list[Path]) -> None:
    begun(places, OLD)
    cleared(places[:1], None)
    assert names(places[0]) == {tag_name(OLD, 0)}
    assert live(places[1:], LOCAL).dead == {OLD}, "it tells of the other one"
    cleared(places[1:], None)
    assert names(places[1]) == set()
    cleared(places, None)
    assert names(places[0]) == set()


def test_nothing_of_a_run_goes_that_a_process_holds(places: list[Path]) -> None:
    begun(places, OLD)
    before = [names(place) for place in places]
    with open(places[0] / swap_name(OLD, 0), "rb") as one, open(places[1] / swap_name(OLD, 0), "rb") as two:
        for held in (one, two):
            fcntl.flock(held, fcntl.LOCK_EX)
        cleared(places, None)
        assert [names(place) for place in places] == before
    cleared(places, None)
    assert [names(place) for place in places] == [set(), set()]


def test_power_cuts_while_files_go_lose_none_that_live(places: list[Path]) -> None:
    """In any state that a cut leaves it is known what lives, and the next start ends what this one did not."""
    decided(places, BEFORE)
    begun(places, OTHER)
    record = decided(places[::-1], AFTER)
    lives = [{swap_name(NEW, 0), tag_name(NEW, 0), manifest_name(AFTER, 0)} for _ in places]
    lives[1].add(COMMIT_NAME)
    seen, is_over = set(), False
    for cut_at in range(40):
        for seed in range(8):
            files = SimulatedFiles(cut_at=cut_at).load(places[0].parent)
            with suppress(PowerCut):
                cleared(places, record, files)
                is_over = True
            after = files.after_cut(seed)
            found = live(places, after)
            assert last_of(found, places) == (places[1], record)
            assert not found.unknown
            left = [{*after.names(place)} for place in places]
            seen.add(str(left))
            assert all(own <= those for own, those in zip(lives, left, strict=True))
            cleared(places, record, after)
            assert [{*after.names(place)} for place in places] == lives
    assert is_over
    assert len(seen) > 12


# The lock, and what keeps older versions out.


def test_locks_stay_as_long_as_anything_else_of_ours_does(places: list[Path]) -> None:
    for name in (LOCK_NAME, older_swap_name(0), older_swap_name(1)):
        (places[0] / name).touch()
    (places[0] / "notes").touch()
    begun(places[:1], OLD)
    before = names(places[0])
    leave(places[0], LOCAL)
    assert names(places[0]) == before
    cleared(places[:1], None)
    with open(places[0] / older_swap_name(1), "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        leave(places[0], LOCAL)
        assert older_swap_name(0) in names(places[0])
    leave(places[0], LOCAL)
    assert names(places[0]) == {"notes"}


def test_a_page_beside_an_older_manifest_stays(places: list[Path]) -> None:
    """It is the swap file of a rank that has no chunks in this directory."""
    page = places[1] / older_swap_name(0)
    page.write_bytes(superblock(manifest_of(run_id=OLD, paths=2), 1))
    write_manifest(places[1], manifest_of(run_id=OLD, paths=2))
    (places[1] / LOCK_NAME).touch()
    before = names(places[1])
    leave(places[1], LOCAL)
    assert names(places[1]) == before - {LOCK_NAME}


def test_a_file_to_be_claimed_is_no_link_and_a_held_one_leaves_no_descriptor(places: list[Path]) -> None:
    file = swap(places[0], NEW)
    link = places[1] / swap_name(NEW, 0)
    link.symlink_to(file)
    with pytest.raises(PathError) as caught:
        open_locked(link, LOCAL)
    assert caught.value.errno == errno.ELOOP
    with open(file, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(PathInUseError) as busy:
            open_locked(file, LOCAL)
        assert len(os.listdir("/proc/self/fd")) == before, busy
    shutil.rmtree(places[0])
    with pytest.raises(PathError):
        open_locked(file, LOCAL)


def test_a_damaged_record_is_said_before_anything_is_judged(places: list[Path]) -> None:
    decided(places, AFTER)
    data = (places[0] / COMMIT_NAME).read_bytes()
    (places[0] / COMMIT_NAME).write_bytes(data[:-3] + b"\n")
    with pytest.raises(CorruptionError):
        live(places, LOCAL)


def test_a_tag_goes_only_when_it_is_certain_that_its_swap_file_has_gone(places: list[Path]) -> None:
    """A start that failed removes what it made, and then power goes: a swap file that is back has to have its tag."""
    for seed in range(20):
        begun(places[:1], OLD)
        files = SimulatedFiles().load(places[0])
        untag(places[0], OLD, 0, files)
        assert tag_name(OLD, 0) in files.names(places[0]), "its swap file is there"
        files.remove(places[0] / swap_name(OLD, 0))
        untag(places[0], OLD, 0, files)
        assert files.names(places[0]) == []
        assert files.after_cut(seed).names(places[0]) in ([], [tag_name(OLD, 0)])
