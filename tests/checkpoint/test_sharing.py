"""Which directories ranks share, and whether locks reach from one machine to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.checkpoint.sharing import Sharing, remove_marks, share_together
from offload.errors import OtherRankError, PathError
from offload.io.engine import IOFile
from offload.io.files import Files, Host
from offload.ranks.communicator import Communicator
from offload.storage.directories import mark_name
from offload.storage.directory_lock import Claimant
from tests.support.threads import Threads

START = b"s" * 16


class OnMachine(Files):
    """Files as a machine sees them, with devices numbered as there."""

    def __init__(self, host: Host, device: int = 1) -> None:
        super().__init__()
        self._host, self._device = host, device

    def host(self) -> Host:
        return self._host

    def holders(self, file: IOFile) -> list[int]:
        return []

    def space(self, path: Path) -> tuple[int, int]:
        return self._device, 0


class Deaf(OnMachine):
    """Keeps locks to itself."""

    def lock(self, file: IOFile, *, exclusive: bool) -> None:
        pass


ALPHA, BETA, CLONE = Host("alpha", "1"), Host("beta", "2"), Host("alpha", "3")


def share(disks: Sequence[Files], paths: Sequence[Sequence[Path]]) -> list[Sharing]:
    claimant = Claimant(START, tuple(files.host() for files in disks))

    def work(comm: Communicator) -> Sharing:
        return share_together(paths[comm.rank], claimant, comm, disks[comm.rank])

    return Threads(len(disks)).run(work)


def groups(numbers: list[list[int]]) -> list[list[int]]:
    """Counted in the order in which they come."""
    known: dict[int, int] = {}
    return [[known.setdefault(number, len(known)) for number in those] for those in numbers]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"place{number}" for number in range(3)]
    for place in found:
        place.mkdir()
    return found


def test_a_directory_is_known_by_what_is_in_it(places: list[Path]) -> None:
    """Machines may call a device by different numbers, and machines that were copied have the same name."""
    one, two, three = places
    found = share(
        [OnMachine(ALPHA, 1), OnMachine(BETA, 2), OnMachine(CLONE, 1), OnMachine(ALPHA, 1)],
        [[one, two], [two], [three], [three.parent / "place2"]],
    )
    for each in found:
        assert groups(each.directories) == [[0, 1], [1], [2], [2]]
        assert groups(each.disks) == [[0, 0], [0], [0], [0]]
        assert each.deaf == ()
    (apart, _) = share([OnMachine(ALPHA, 1), OnMachine(CLONE, 1)], [[one], [two]])
    assert groups(apart.disks) == [[0], [1]]
    (together, _) = share([OnMachine(ALPHA, 1), OnMachine(ALPHA, 1)], [[one], [two]])
    assert (groups(together.disks), groups(together.directories)) == ([[0], [0]], [[0], [1]])
    assert not [*one.iterdir(), *two.iterdir(), *three.iterdir()]


def test_locks_that_stay_on_a_machine_are_found_out(places: list[Path]) -> None:
    one, two, _ = places
    deaf = [each.deaf for each in share([Deaf(ALPHA), Deaf(BETA)], [[one, two], [two]])]
    assert deaf == [(two,), (two,)]
    assert [each.deaf for each in share([Deaf(ALPHA), Deaf(ALPHA)], [[one], [one]])] == [(), ()]


def test_a_rank_that_cannot_make_its_mark_fails_on_all_and_leaves_none(places: list[Path]) -> None:
    class Full(OnMachine):
        def create(self, path: Path) -> IOFile:
            raise OSError(28, "No space left on device", str(path))

    claimant = Claimant(START, (ALPHA, BETA))
    disks = [OnMachine(ALPHA), Full(BETA)]

    def work(comm: Communicator) -> str:
        with pytest.raises((OtherRankError, PathError)) as caught:
            share_together(places[:1], claimant, comm, disks[comm.rank])
        return type(caught.value).__name__

    assert Threads(2).run(work) == ["OtherRankError", "PathError"]
    assert not [*places[0].iterdir()]


def test_marks_of_starts_that_were_killed_are_removed(places: list[Path]) -> None:
    (place, *_) = places
    old, own = place / mark_name("0" * 32, 3, 1), place / mark_name(START.hex(), 0, 0)
    others = [place / name for name in ("mark", "mark-1", f"mark-{'0' * 32}-3")]
    for path in (old, own, *others):
        path.touch()
    remove_marks(place, START, Files())
    assert {*place.iterdir()} == {own, *others}
