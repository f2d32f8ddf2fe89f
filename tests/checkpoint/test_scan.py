"""Which files in a run's directories are whose, and what happens to them, in which order."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from offload.checkpoint.commit import Commit, manifest_name, read_commit, write_commit, write_manifest
from offload.checkpoint.manifest import Digest
from offload.checkpoint.scan import clean_up, foreign, is_clean, last_of, require_free, scan, swaps
from offload.errors import PathError, PathInUseError, ResumeError
from offload.io.files import LOCAL, Files
from offload.sizes import PAGE_BYTES
from offload.storage import swap_format as slots
from offload.storage.directories import COMMIT_NAME, SWAP_NAME
from offload.storage.swap_file import open_locked
from tests.support.committed import manifest_of, superblock, superblock_of
from tests.support.simulated_files import PowerCut, SimulatedFiles

OLD, NEW, OTHER = "a" * 32, "b" * 32, "c" * 32
"""The run that was, the one that replaces it, and one that has nothing to do with them."""
BEFORE = Commit(OLD, 7, (Digest(1, "0" * 32),))
AFTER = Commit(NEW, 7, (Digest(1, "0" * 32),), OLD)


def swap(directory: Path, name: str, run_id: str, path: int = 0, paths: int = 1) -> Path:
    file = directory / f"offload-{name}"
    file.write_bytes(superblock(manifest_of(run_id=run_id, paths=paths), path))
    return file


def names(directory: Path) -> set[str]:
    return {file.name.removeprefix("offload-") for file in directory.iterdir()}


class Logged(Files):
    """What was asked of the file system, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def rename(self, old: Path, new: Path) -> None:
        self.log.append(f"rename {old.name}")
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self.log.append(f"remove {path.name}")
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self.log.append(f"sync {path.name}")
        super().sync_directory(path)


# What is a swap file.


def test_what_is_no_regular_file_is_no_swap_file(places: list[Path]) -> None:
    real = swap(places[1], "rank0.swap", NEW)
    (places[0] / "offload-rank0.swap").symlink_to(real)
    os.mkfifo(places[0] / "offload-rank1.swap")
    (places[0] / "offload-rank2.swap").mkdir()
    swap(places[0], "rank03.swap", NEW)
    swap(places[0], "rank3.swap.new", NEW)
    assert [(one.rank, one.is_temporary, one.run_id) for one in swaps(places[0], LOCAL)] == [(3, True, NEW)]
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
    first, second = (swap(places[0], f"rank{rank}.swap", NEW) for rank in range(2))
    other = swap(places[1], "rank0.swap", NEW)

    class Meanwhile(Files):
        def read(self, path: Path, most: int) -> bytes:
            if path == first:
                first.unlink()
                if becomes == "a link":
                    first.symlink_to(other)
            return super().read(path, most)

    assert [one.path for one in swaps(places[0], Meanwhile())] == [second]


def test_a_swap_file_of_a_newer_version_is_of_no_run(places: list[Path]) -> None:
    (places[0] / "offload-rank0.swap").write_bytes(superblock_of(b"{}", slots.FORMAT + 1))
    assert [one.run_id for one in swaps(places[0], LOCAL)] == [None]


# Whose they are.


def test_a_directory_whose_record_is_missed_is_refused_whatever_else_was_begun(places: list[Path]) -> None:
    """Nothing is known of the run in the second one by a run that never committed in the first."""
    manifest = manifest_of(run_id=OLD, paths=2)
    swap(places[1], "rank0.swap", OLD, path=1, paths=2)
    write_manifest(places[1], manifest)
    swap(places[0], "rank0.swap", OTHER)
    with pytest.raises(ResumeError, match="b belongs to a committed run whose COMMIT record is not in"):
        last_of(scan(places, LOCAL), places)
    swap(places[0], "rank0.swap", OLD, paths=2)
    assert last_of(scan(places, LOCAL), places) is None


def test_a_record_that_replaces_itself_is_refused(places: list[Path]) -> None:
    write_commit(places[0], Commit(NEW, 7, AFTER.manifests, NEW))
    with pytest.raises(ResumeError):
        last_of(scan(places, LOCAL), places)


def test_only_files_under_their_names_and_of_neither_run_are_in_the_way(places: list[Path]) -> None:
    swap(places[0], "rank0.swap", OLD)
    swap(places[0], "rank1.swap", NEW)
    swap(places[0], "rank2.swap.new", OTHER)
    assert not foreign(all_of(places), AFTER, LOCAL)
    others = [swap(places[1], "rank3.swap", OTHER), places[1] / "offload-rank4.swap"]
    others[1].write_bytes(b"")
    assert [one.path for one in foreign(all_of(places), AFTER, LOCAL)] == others
    require_free(places, AFTER, LOCAL)
    with open(others[0], "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PathInUseError):
            require_free(places, AFTER, LOCAL)


# Settling.


def all_of(places: Sequence[Path]) -> dict[Path, range]:
    """Looked at whole, as by a rank that alone sees them."""
    return dict.fromkeys(places, range(100))


def settled(places: Sequence[Path], files: Files = LOCAL) -> None:
    clean_up(places, AFTER, files, locked=False)


@pytest.mark.parametrize("order", [1, -1])
def test_the_old_record_is_gone_for_good_before_anything_else_is_done(places: list[Path], order: int) -> None:
    write_commit(places[0], BEFORE)
    swap(places[0], "rank0.swap", OLD)
    write_commit(places[1], AFTER)
    swap(places[1], "rank0.swap.new", NEW)
    swap(places[1], "rank0.swap", OLD)
    files = Logged()
    settled(places[::order], files)
    assert files.log[:2] == ["remove COMMIT", "sync a"]
    rest = [["remove offload-rank0.swap", "sync a"], ["rename offload-rank0.swap.new", "sync b"]][::order]
    assert files.log[2:] == rest[0] + rest[1]
    assert (read_commit(places[0]), read_commit(places[1])) == (None, AFTER)
    assert (names(places[0]), names(places[1])) == (set(), {COMMIT_NAME, "rank0.swap"})


LEFT: dict[str, tuple[str, bytes | str]] = {
    "of this run aside": ("rank5.swap.new", NEW),
    "of the run before": ("rank5.swap", OLD),
    "of the run before aside": ("rank5.swap.new", OLD),
    "of another run aside": ("rank5.swap.new", OTHER),
    "that did not begin": ("rank5.swap.new", bytes(PAGE_BYTES)),
    "that is empty": ("rank5.swap.new", b""),
}
STAYS: dict[str, tuple[str, bytes | str]] = {
    "of this run": ("rank5.swap", NEW),
    "of another run": ("rank5.swap", OTHER),
    "of somebody else, of zeros": ("rank5.swap.new", bytes(PAGE_BYTES + 1)),
    "of somebody else aside": ("rank5.swap.new", b"mine".rjust(PAGE_BYTES, b"\0")),
    "of somebody else": ("rank5.swap", bytes(PAGE_BYTES)),
}


@pytest.mark.parametrize("what", LEFT | STAYS)
def test_what_was_left_goes_and_what_others_have_stays(places: list[Path], what: str) -> None:
    write_commit(places[0], AFTER)
    swap(places[0], "rank0.swap", NEW)
    assert is_clean(all_of(places), AFTER, LOCAL)
    name, content = (LEFT | STAYS)[what]
    if isinstance(content, str):
        swap(places[1], name, content)
    else:
        (places[1] / f"offload-{name}").write_bytes(content)
    assert is_clean(all_of(places), AFTER, LOCAL) == (what in STAYS)
    settled(places)
    expected = {name} if what in STAYS else {"rank5.swap"} if content == NEW else set()
    assert (names(places[0]), names(places[1])) == ({COMMIT_NAME, "rank0.swap"}, expected)
    assert is_clean(all_of(places), AFTER, LOCAL)


def test_what_older_commits_left_goes_along_with_what_is_astray(places: list[Path]) -> None:
    manifest = manifest_of(run_id=OLD)
    write_manifest(places[0], manifest)
    assert manifest_name(BEFORE, 0) in names(places[0])
    assert not is_clean(all_of(places), AFTER, LOCAL)
    swap(places[0], "rank0.swap.new", NEW)
    settled(places)
    assert names(places[0]) == {"rank0.swap"}


def test_what_a_start_that_was_cut_off_wrote_goes_with_its_swap_file(places: list[Path]) -> None:
    """Nothing but that file says whose the tensors are."""
    write_commit(places[0], AFTER)
    swap(places[0], "rank0.swap", NEW)
    swap(places[0], "rank0.swap.new", OTHER)
    for name in (f"extra-{OTHER}-7-rank0.safetensors", f"manifest-{OTHER}-7-rank0.json.offload.new"):
        (places[0] / name).write_text("half")
    strange = places[0] / f"extra-{OLD[::-1].replace('a', 'd')}-7-rank0.safetensors"
    strange.write_text("mine")
    settled(places)
    assert names(places[0]) == {COMMIT_NAME, "rank0.swap", strange.name}
    assert is_clean(all_of(places), AFTER, LOCAL)


def test_power_cuts_while_files_get_their_names_lose_none(places: list[Path]) -> None:
    write_commit(places[0], BEFORE)
    write_commit(places[1], AFTER)
    for place in places:
        swap(place, "rank0.swap", OLD)
        swap(place, "rank0.swap.new", NEW)
    seen = set()
    for cut_at in range(12):
        for seed in range(6):
            files = SimulatedFiles(cut_at=cut_at).load(places[0].parent)
            with suppress(PowerCut):
                clean_up(places, AFTER, files, locked=True)
            assert cut_at < 9 or {"rename offload-rank0.swap", "sync directory b"} < {*files.log}
            after = files.after_cut(seed)
            assert last_of(scan(places, after), places) == (places[1], AFTER)
            names = [after.names(place) for place in places]
            seen.add(str(names))
            for place in places:
                assert [one.run_id for one in swaps(place, after)] in ([OLD, NEW], [NEW])
            clean_up(places, AFTER, after, locked=True)
            assert [after.names(place) for place in places] == [[SWAP_NAME], [COMMIT_NAME, SWAP_NAME]]
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["rank0.swap.new", "rank0.swap"])
@pytest.mark.parametrize("run_id", [OLD, NEW, OTHER])
def test_nothing_is_settled_under_a_live_run(places: list[Path], name: str, run_id: str) -> None:
    write_commit(places[0], BEFORE)
    file = swap(places[1], name, run_id)
    if run_id == OTHER and name == "rank0.swap":
        swap(places[1], "rank1.swap.new", OTHER)
        file = places[1] / "offload-rank1.swap.new"
    before = [names(place) for place in places]
    with open(file, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PathInUseError):
            settled(places)
        assert [names(place) for place in places] == before
    settled(places)
    assert not (places[0] / COMMIT_NAME).exists()


def test_a_file_to_be_claimed_is_no_link_and_a_held_one_leaves_no_descriptor(places: list[Path]) -> None:
    file = swap(places[0], "rank0.swap", NEW)
    link = places[1] / "offload-rank0.swap"
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
