"""Another run that goes on from a commit while this one is about to: whoever is late changes nothing and says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from offload import OffloadZero, Tuning
from offload.checkpoint import committer, recovery
from offload.checkpoint.reader import Reader
from offload.checkpoint.recovery import RecoveryPlan
from offload.errors import CorruptionError, OffloadError, PathInUseError, ResumeError
from offload.io.engine import IOFile
from offload.io.files import Files, Host
from offload.ranks.communicator import Communicator
from offload.storage.directories import LOCK_NAME
from offload.storage.directory_lock import Claimant, Claims
from tests.faults.conftest import SMALL, Make, Tiny, assert_same, backward, bits, one_step
from tests.faults.test_commits import committed
from tests.faults.test_resharding import LARGER
from tests.support.disks import on_disk
from tests.support.run_files import contents, swap_in, swaps_in


def once(patch: pytest.MonkeyPatch, owner: Any, name: str, work: Callable[[], None], *, after: bool) -> None:
    """Calls `work` before or after the next call of this function, and only then."""
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        patch.setattr(owner, name, real)
        if not after:
            work()
        found = real(*args, **options)
        if after:
            work()
        return found

    patch.setattr(owner, name, call)


def another(path: Path, tuning: Tuning) -> None:
    """A whole run, from the last commit to the next one."""
    model = Tiny()
    with OffloadZero(model, path=path, resume=True, commit_every=0, tuning=tuning, cpu_memory="1MiB") as optimizer:
        one_step(model, optimizer, 3)
        optimizer.commit({"seen": 4})


MOMENTS = [
    (recovery, "read_together", False),
    (recovery, "_directories_in_order", True),
    (RecoveryPlan, "collect", True),
    (RecoveryPlan, "lock", True),
]
each_moment = pytest.mark.parametrize(("owner", "name", "after"), MOMENTS, ids=[name for _, name, _ in MOMENTS])


@each_moment
@pytest.mark.parametrize("own", [SMALL, LARGER], ids=["used where it lies", "read"])
def test_no_other_run_begins_in_directories_that_a_start_has_taken(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, own: Tuning
) -> None:
    committed(make)[1].close()
    refused: list[dict[str, bytes]] = []

    def meanwhile() -> None:
        before = contents(path)
        with pytest.raises(PathInUseError) as caught:
            another(path, SMALL)
        assert caught.value.filename == str(path)
        assert contents(path) == before
        refused.append(before)

    once(monkeypatch, owner, name, meanwhile, after=after)
    optimizer = make(Tiny(), resume=True, commit_every=0, tuning=own, cpu_memory="1MiB")
    assert optimizer.resumed == (3, {"seen": 3})
    assert refused


@each_moment
@pytest.mark.parametrize("other", [SMALL, LARGER], ids=["same chunks", "other chunks"])
def test_what_another_run_commits_meanwhile_is_not_touched(
    make: Make,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
    other: Tuning,
) -> None:
    """The run is moved elsewhere, and its directory is not this start's until it is known that it has the commit."""
    committed(make)[1].close()
    late: list[dict[str, bytes]] = []

    def meanwhile() -> None:
        another(path, other)
        late.append(contents(path))

    once(monkeypatch, owner, name, meanwhile, after=after)
    is_held = name in ("collect", "lock")
    with pytest.raises(PathInUseError if is_held else ResumeError):
        make(Tiny(), path=tmp_path / "new", resume=[path], commit_every=0, cpu_memory="1MiB")
    if not is_held:
        assert late == [contents(path)]
    with Reader([path]) as reader:
        assert reader.commit.step == (3 if is_held else 4)
        assert all(slot.error is None for slot in reader.verify())


def test_damage_is_not_taken_for_a_run_that_committed_meanwhile(make: Make, path: Path) -> None:
    committed(make)[1].close()
    for manifest in path.glob("manifest-*"):
        manifest.unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        make(Tiny(), resume=True, commit_every=0)


def test_a_live_run_that_has_committed_nothing_is_not_joined(make: Make, path: Path, tmp_path: Path) -> None:
    committed(make)[1].close()
    there = tmp_path / "there"
    make(Tiny(), path=there, commit_every=0)
    swap_in(there).rename(there / "offload-rank1.swap")  # its other rank is on another machine
    before = contents(tmp_path)
    with pytest.raises(PathInUseError):
        make(Tiny(), path=there, resume=[path], commit_every=0, cpu_memory="1MiB")
    assert contents(tmp_path) == before


def test_what_a_live_run_has_beside_the_commit_is_not_cleared_away(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the commit, and writes it anew in its own chunks."""
    committed(make)[1].close()
    refused: list[bool] = []

    def meanwhile() -> None:
        before = contents(path)
        with pytest.raises(PathInUseError):
            make(Tiny(), resume=True, commit_every=0)
        refused.append(contents(path) == before and len(swaps_in(path)) == 2)

    once(monkeypatch, committer, "copy_ranges", meanwhile, after=False)
    make(Tiny(), resume=True, commit_every=0, tuning=LARGER, cpu_memory="1MiB").close()
    assert refused == [True]
    with Reader([path]) as reader:
        assert all(slot.error is None for slot in reader.verify())


def test_a_run_whose_directory_another_machine_takes_writes_no_more(make: Make, path: Path) -> None:
    """Where locks stay on each machine: it finds out before a step and before a commit, and changes nothing."""
    model, optimizer = committed(make)
    optimizer.synchronize()
    before, stored, ours = bits(model, optimizer), contents(path), (path / LOCK_NAME).read_bytes()
    (path / LOCK_NAME).write_bytes(Claimant(b"2" * 16, (Host("other", "boot"),)).encode())
    backward(model, 3)
    for work in (optimizer.step, optimizer.commit):
        with pytest.raises(PathInUseError, match="another run on other") as caught:
            work()
        assert caught.value.filename == str(path)
    assert contents(path) == stored
    assert_same(bits(model, optimizer), before)
    (path / LOCK_NAME).write_bytes(ours)
    optimizer.step()
    optimizer.commit()


class Deaf(Files):
    """What a machine sees of a file system that keeps its locks to itself there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._host = Host(name, f"boot-{name}")

    def host(self) -> Host:
        return self._host

    def lock(self, file: IOFile, *, exclusive: bool) -> None:
        pass


CUT_IN = [
    (Claims, "require_ours", False),
    (committer, "write_files", False),
    (committer, "write_files", True),
    (committer, "write_commit", False),
]
"""Moments of a commit."""


@pytest.mark.parametrize(("owner", "name", "after"), CUT_IN, ids=["begins", "writes", "has written", "decides"])
def test_where_locks_stay_on_each_machine_a_second_run_in_a_commit_makes_no_wrong_number(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """The second run resumes, trains on other data, and commits the same step."""
    with on_disk(Deaf("alpha")):
        model, optimizer = committed(make)
    one_step(model, optimizer, 3)
    made: list[dict[str, Tensor]] = []

    def meanwhile() -> None:
        other = Tiny()
        with on_disk(Deaf("beta")), make(other, resume=True, commit_every=0) as second:
            one_step(other, second, 77)
            second.commit({"seen": 77})
            made.append(bits(other, second))

    once(monkeypatch, owner, name, meanwhile, after=after)
    with pytest.raises(PathInUseError, match="another run on beta"):
        optimizer.commit({"seen": 4})
    with suppress(OffloadError):
        optimizer.close()
    found = Tiny()
    with Reader([path]) as reader:
        assert all(slot.error is None for slot in reader.verify())
    resumed = make(found, resume=True, commit_every=0)
    assert resumed.resumed == (4, {"seen": 77})
    assert_same(bits(found, resumed), made[0])


def test_a_lock_is_waited_for_half_as_long_as_other_ranks_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a collective, and would take a rank that waits longer for lost."""
    waits = list[float]()

    class Noted(Claims):
        def __init__(self, *args: Any, wait_s: float, **options: Any) -> None:
            waits.append(wait_s)
            super().__init__(*args, wait_s=wait_s, **options)

    monkeypatch.setattr(recovery, "Claims", Noted)
    make(Tiny()).close()
    make(Tiny(), lock_timeout=7, resume="auto").close()
    monkeypatch.setattr(Communicator, "timeout_s", 10.0)
    make(Tiny(), lock_timeout=7, resume="auto").close()
    assert waits == [120, 7, 5]
