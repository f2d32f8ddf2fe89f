"""What a commit does, one thing after the other, and what it lets be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoint.commit import read_commit
from offload.checkpoint.reader import Reader
from offload.checkpoint.snapshot import Snapshot
from offload.errors import ConfigError, PathInUseError, TierIOError
from offload.io.engine import IOFile, IOFuture
from offload.io.files import Files
from offload.io.threads import ThreadEngine
from offload.storage.directories import COMMIT_NAME, OLDER_SUFFIX, TEMPORARY, file_name
from offload.storage.swap_file import CommittedFile, SwapFile
from tests.faults.conftest import Make, Tiny, assert_same, bits, one_step
from tests.faults.test_commits import committed
from tests.faults.test_resharding import LARGER
from tests.support.disks import on_disk
from tests.support.run_files import swap_in


class Logged(Files):
    """What was asked of the file system; `fail` raises instead."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.fails = ""

    def _note(self, what: str, path: Path) -> None:
        name = path.name
        if (file := file_name(name)) is not None:
            # Of a spare: what it is for.
            name = file.kind if file.kind != "room" else f"spare {name.rpartition('-')[2][:-1]}"
        self.log.append(f"{what} {name}")
        if self.log[-1] == self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync(self, file: IOFile) -> None:
        self._note("sync", Path(file.path))
        super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        self._note("rename", new)
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._note("link", new)

    def remove(self, path: Path) -> None:
        if not path.name.endswith(TEMPORARY):
            self._note("remove", path)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self._note("sync directory", path)
        super().sync_directory(path)


@pytest.fixture
def files() -> Iterator[Logged]:
    made = Logged()
    with on_disk(made):
        yield made


def test_nothing_is_decided_before_all_that_it_names_is_durable(
    make: Make, tmp_path: Path, files: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_permanent = SwapFile.make_permanent

    class Noting(ThreadEngine):
        def sync(self, file: IOFile) -> IOFuture:
            future = super().sync(file)
            future.result()
            files.log.append("sync swap")
            return future

    def permanent(file: SwapFile) -> None:
        files.log.append("permanent")
        make_permanent(file)

    monkeypatch.setattr(SwapFile, "make_permanent", permanent)
    model = Tiny()
    (tmp_path / "x").mkdir()
    with on_disk(engine=Noting()):
        optimizer = make(model, path=[tmp_path / "x" / "first", tmp_path / "second"], commit_every=0)
    for step in range(2):
        files.log.clear()
        one_step(model, optimizer, step)
        optimizer.commit()
        manifests = [
            what
            for name in ("first", "second")
            for what in ("sync spare manifest", "rename manifest", f"sync directory {name}")
        ]
        assert files.log == [
            *["sync swap"] * 2,
            *([f"sync directory {name}" for name in ("x", tmp_path.name)] if not step else []),
            *manifests,
            *["permanent"] * 2,
            *(["link spare record"] if step else []),
            "sync spare record",
            f"rename {COMMIT_NAME}",
            "sync directory first",
            *(["rename spare manifest"] * 2 if step else []),
        ]  # fmt: skip


class Unreadable(Files):
    """Attributes: directory: one that cannot be opened to be synced; code: why."""

    def __init__(self, directory: Path, code: int) -> None:
        super().__init__()
        self.directory, self.code = directory, code

    def sync_directory(self, path: Path) -> None:
        if path == self.directory and self.code:
            raise OSError(self.code, os.strerror(self.code), str(path))
        super().sync_directory(path)


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_whose_neighbours_nobody_may_list_is_committed_in(make: Make, path: Path, exists: bool) -> None:
    """As on a cluster whose /scratch is a directory of mode 711 with one of each user in it."""
    if exists:
        path.mkdir()
    with on_disk(Unreadable(path.parent, errno.EACCES)):
        model, optimizer = committed(make)
    expected = bits(model, optimizer)
    optimizer.close()
    again = Tiny()
    assert_same(expected, bits(again, make(again, commit_every=0, resume=True)))


@pytest.mark.parametrize("which", ["around it", "the run's", "the run's, later"])
def test_a_directory_that_was_not_synced_is_final(make: Make, path: Path, which: str) -> None:
    """A second sync may not say that names are lost. The kernel says it once."""
    files = Unreadable(path, 0)
    with on_disk(files):
        optimizer = make(model := Tiny(), commit_every=0)
    one_step(model, optimizer, 0)
    if which.endswith("later"):
        optimizer.commit()
        one_step(model, optimizer, 1)
    files.code, files.directory = errno.EIO, path.parent if which == "around it" else path
    with pytest.raises(TierIOError) as caught:
        optimizer.commit()
    assert (caught.value.operation, caught.value.filename) == ("sync", str(files.directory))
    files.code = 0
    for call in (optimizer.commit, optimizer.rollback, optimizer.synchronize):
        with pytest.raises(TierIOError) as again:
            call()
        assert again.value is caught.value
    found = read_commit(path)
    assert (None if found is None else found.step) == (1 if which.endswith("later") else None)


def test_what_cannot_be_cleared_away_waits_for_the_next_commit(make: Make, path: Path, files: Logged) -> None:
    model, optimizer = committed(make)
    files.fails = "rename spare manifest"
    one_step(model, optimizer, 3)
    optimizer.commit()
    found = read_commit(path)
    assert found is not None
    assert found.step == 4
    assert len([*path.glob("manifest-*")]) == 2
    files.fails = ""
    one_step(model, optimizer, 4)
    optimizer.commit()
    assert len([*path.glob("manifest-*")]) == 1


def test_a_record_is_durable_before_what_it_does_not_name_goes(make: Make, path: Path, files: Logged) -> None:
    """Who wrote it may have been killed before that."""
    committed(make)[1].close()
    found = read_commit(path)
    assert found is not None
    (path / f"manifest-{found.run_id}-2-rank0.json").touch()
    for options in ({}, {"tuning": LARGER, "cpu_memory": "1MiB"}):
        files.log.clear()
        make(Tiny(), commit_every=0, resume=True, **options).close()
        changes = [what for what in files.log if what.startswith(("rename", "remove", "sync"))]
        assert changes[:2] == ["sync offload.lock", "sync directory run"]


def test_so_it_is_where_a_snapshot_outside_is_resumed(make: Make, path: Path, tmp_path: Path, files: Logged) -> None:
    """Its run has committed later in this one's directory. What that commit superseded goes, and then the commit."""
    model, optimizer = committed(make)
    (directory,) = optimizer.snapshot()
    kept = directory.rename(tmp_path / directory.name)
    one_step(model, optimizer, 3)
    optimizer.commit()
    optimizer.close()
    found = read_commit(path)
    assert found is not None
    (path / f"manifest-{found.run_id}-2-rank0.json").touch()
    files.log.clear()
    again = make(Tiny(), commit_every=0, resume=[kept], cpu_memory="1MiB")
    changes = [what for what in files.log if what.startswith(("rename", "remove", "sync"))]
    assert changes[:2] == ["sync offload.lock", "sync directory run"]
    assert again.resumed is not None
    assert again.resumed.step == 3


@pytest.mark.parametrize("way", ["snapshot", "state dict"])
def test_a_snapshot_that_is_found_is_durable_before_it_counts(make: Make, path: Path, files: Logged, way: str) -> None:
    """Who wrote its record may have been killed before that."""
    model, optimizer = committed(make)
    (directory,) = optimizer.snapshot()
    files.log.clear()
    if way == "state dict":
        optimizer.state_dict()
        one_step(model, optimizer, 3)
        optimizer.commit()
        synced = files.log.index(f"sync directory {directory.name}")
        assert synced < files.log.index("sync spare manifest")
    else:
        assert optimizer.snapshot() == (directory,)
        assert files.log[-1] == f"sync directory {directory.name}"


def test_a_new_directory_for_copies_is_durable_before_a_copy_counts(make: Make, tmp_path: Path, files: Logged) -> None:
    """The snapshot that it is made of is removed then."""
    _, optimizer = committed(make)
    (tmp_path / "others").mkdir()
    files.log.clear()
    optimizer.snapshot(path=tmp_path / "others" / "new")
    optimizer.close()
    assert files.log.count(f"rename {COMMIT_NAME}") == 2
    last = len(files.log) - 1 - files.log[::-1].index(f"rename {COMMIT_NAME}")
    assert "sync directory others" in files.log[:last]


def test_what_another_rank_is_writing_is_not_cleared_away(make: Make, path: Path) -> None:
    """It may be a commit ahead: it has heard of the decision, and this rank has not got further."""
    model, optimizer = committed(make)
    found = read_commit(path)
    assert found is not None
    for step in (2, 9):
        (path / f"manifest-{found.run_id}-{step}-rank1.json").touch()
    (path / f"{COMMIT_NAME}{OLDER_SUFFIX}").touch()
    one_step(model, optimizer, 3)
    optimizer.commit()
    assert len([*path.glob("manifest-*-rank1.json")]) == 2


def test_other_states_at_a_committed_step_are_not_taken_for_committed(make: Make, path: Path) -> None:
    model, optimizer = committed(make)
    expected = bits(model, optimizer)
    with torch.no_grad():
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    with pytest.raises(ConfigError, match="committed already"):
        optimizer.commit()
    optimizer.rollback()
    assert_same(expected, bits(model, optimizer))


def test_only_the_first_commit_in_another_layout_says_what_it_replaces(make: Make, path: Path) -> None:
    committed(make)[1].close()
    before = read_commit(path)
    model = Tiny()
    optimizer = make(model, resume=True, commit_every=0, tuning=LARGER, cpu_memory="1MiB")
    found = [read_commit(path)]
    (directory,) = optimizer.snapshot()  # of the file that was made beside the other one
    assert swap_in(directory).exists()
    one_step(model, optimizer, 3)
    optimizer.commit()
    found.append(read_commit(path))
    assert before is not None
    assert [one and one.replaces for one in found] == [before.run_id, None]


def test_what_nobody_changed_since_it_was_read_is_committed_as_it_is(make: Make, path: Path) -> None:
    committed(make)[1].close()
    model = Tiny()
    with make(model, resume=True, commit_every=0) as optimizer:
        model.last(torch.randn(4, 32).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.commit()
    with Reader([path]) as reader:
        assert {chunk.step for chunk in reader.manifests[0].chunks} == {3, 4}
        assert all(slot.error is None for slot in reader.verify())


def test_a_snapshot_that_fails_gives_its_space_back_at_once(make: Make, path: Path, files: Logged) -> None:
    _, optimizer = committed(make)
    files.fails = "rename manifest"
    with pytest.raises(TierIOError):
        optimizer.snapshot()
    assert not [*path.glob("snapshot-*")]


def test_a_snapshot_on_its_way_out_is_held(make: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = committed(make)
    (old,) = optimizer.snapshot()
    one_step(model, optimizer, 3)
    optimizer.commit()
    withdraw, held = Snapshot.withdraw, []

    def meanwhile(part: Snapshot, names: list[str]) -> None:
        with pytest.raises(PathInUseError):
            CommittedFile(swap_in(old))
        held.append(names)
        withdraw(part, names)

    monkeypatch.setattr(Snapshot, "withdraw", meanwhile)
    optimizer.snapshot(keep=1)
    assert held == [[old.name]]
    assert not old.exists()


def test_a_commit_that_is_due_is_made_once_and_none_before_the_first_step(
    make: Make, files: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    model = Tiny()
    optimizer = make(model, commit_every=1)
    real = optimizer._commits.commit
    monkeypatch.setattr(optimizer._commits, "commit", lambda *args: calls.append(args[1]) or real(*args))
    for step in range(2):
        optimizer.zero_grad()
        one_step(model, optimizer, step)
        optimizer.zero_grad()
    optimizer.close()
    assert calls == [1, 2]
    again = make(Tiny(), commit_every=1, resume=True)
    assert [again._commits.is_due(step) for step in (2, 3)] == [False, True]
