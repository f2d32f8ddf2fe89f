"""Which engine is taken, and what is remembered of a file system."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any, Never

import pytest

from offload import ConfigError
from offload.io import io_uring, remembered
from offload.io import select as settings
from offload.io.remembered import cache_file
from offload.io.select import Settings, measure_mixed, open_engine, recall, remember, weights
from offload.planner import rates
from offload.planner.rates import Rate
from offload.sizes import MIB


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_told", set())


def chosen(name: str, *paths: Path) -> tuple[str, int, int]:
    engine = open_engine(name, paths)
    engine.close()
    return engine.name, engine._request_bytes, engine._depth  # type: ignore[attr-defined]


def without_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_uring, "is_available", lambda: (False, "the sysctl kernel.io_uring_disabled forbids it"))


@pytest.mark.parametrize("name", ["threads", "portable"])
def test_an_engine_is_taken_by_name(name: str, tmp_path: Path) -> None:
    assert chosen(name, tmp_path)[0] == name


def test_auto_falls_back_to_threads_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_io_uring(monkeypatch)
    with caplog.at_level(logging.WARNING, "offload"):
        assert chosen("auto", tmp_path)[0] == chosen("auto", tmp_path)[0] == "threads"
    assert [record.message for record in caplog.records] == [
        "I/O goes through the thread engine: the sysctl kernel.io_uring_disabled forbids it"
    ]


def test_io_uring_asked_for_by_name_where_it_cannot_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_io_uring(monkeypatch)
    with pytest.raises(ConfigError, match=r'io_engine="uring" cannot run here: the sysctl.*"threads"'):
        open_engine("uring", [tmp_path])


def test_a_ring_that_opens_and_takes_nothing_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a filter of system calls that knows io_uring_setup alone."""

    def refused(*_: object) -> Never:
        raise PermissionError(errno.EPERM, "io_uring: Operation not permitted")

    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    monkeypatch.setattr(io_uring.Ring, "submit", refused)
    assert chosen("auto", tmp_path)[0] == "threads"
    with pytest.raises(ConfigError, match=r'io_engine="uring" cannot run here: .*seccomp.*EPERM'):
        open_engine("uring", [tmp_path])


def test_what_was_measured_is_what_auto_uses(tmp_path: Path) -> None:
    remember(tmp_path, Settings("portable", request_bytes=MIB, depth=3, mixed_bytes_per_s=2e9))
    assert chosen("auto", tmp_path) == ("portable", MIB, 3)
    assert chosen("threads", tmp_path) == ("threads", MIB, 3)


def test_it_is_remembered_for_the_file_system_not_the_folder(tmp_path: Path) -> None:
    remember(tmp_path, Settings("threads", depth=7))
    found = recall(tmp_path / "not" / "there" / "yet")
    assert found is not None
    assert found.depth == 7
    assert time.time() - found.measured_at < 60
    assert recall(Path("/proc")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "magic"},
        {"request_bytes": 1000},
        {"request_bytes": 0},
        {"request_bytes": "4MiB"},
        {"depth": 0},
        {"depth": 10**9},
        {"measured_at": 0},
        {"measured_at": 1e12},
        {"mixed_bytes_per_s": -1},
        {"mixed_bytes_per_s": float("nan")},
        {"more": 1},
    ],
)
def test_what_is_stale_or_makes_no_sense_is_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    remember(tmp_path, Settings("threads"))
    found = json.loads(cache_file().read_text())
    for entry in found["sections"]["file_systems"].values():
        entry.update(change)
    cache_file().write_text(json.dumps(found))
    assert recall(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"version": 1}',
        "null",
        '{"version": 2, "machine": "", "sections": {}}',
        '{"version": 1, "machine": "", "sections": {}}',
    ],
)
def test_a_damaged_or_foreign_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    place = remember(tmp_path, Settings("threads"))
    place.write_text(text)
    assert recall(tmp_path) is None
    remember(tmp_path, Settings("portable"))
    assert recall(tmp_path) is not None


def test_machines_that_share_a_home_directory_keep_what_each_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = settings.file_system_of(tmp_path)
    remember(tmp_path, Settings("threads", depth=3))
    with monkeypatch.context() as there:
        there.setattr(remembered, "_machine", lambda: "another")
        assert recall(tmp_path) is None
        assert remembered.why_not(settings.SECTION, key, Settings) == "is of another machine"
        remember(tmp_path, Settings("portable", depth=5))
        assert recall(tmp_path).depth == 5  # type: ignore[union-attr]
    assert recall(tmp_path).depth == 3  # type: ignore[union-attr]
    assert remembered.why_not(settings.SECTION, key, Settings) is None
    with monkeypatch.context() as third:
        third.setattr(remembered, "_machine", lambda: "a third one")
        cache_file().write_bytes(max(cache_file().parent.iterdir()).read_bytes())  # of another machine, copied
        assert recall(tmp_path) is None


def test_two_that_write_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins when the first one has read, and is about to write."""
    load = remembered._load
    other = threading.Thread(target=rates.remember, args=(rates.Rates("cpu", 1, Rate.of([1.0]), {}, {}),))

    def slow() -> dict[str, dict[str, Any]]:
        found = load()
        monkeypatch.setattr(remembered, "_load", load)
        other.start()
        other.join(0.3)  # it has written by then, unless it waits
        return found

    monkeypatch.setattr(remembered, "_load", slow)
    remember(tmp_path, Settings("threads"))
    other.join()
    assert recall(tmp_path) is not None
    assert rates.recall("cpu") is not None


@pytest.mark.parametrize("content", ["", "\n", "uninitialized\n"])
def test_machines_without_an_identity_of_their_own_are_told_apart_by_their_names(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of containers have such a file."""
    (tmp_path / "machine-id").write_text(content)
    monkeypatch.setattr(remembered, "_MACHINE_ID", tmp_path / "machine-id")
    found = set()
    for name in ("one", "other"):
        monkeypatch.setattr(remembered.platform, "node", lambda name=name: name)
        found.add(remembered.identity())
    assert len(found) == 2


def test_without_a_home_directory_nothing_is_remembered_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert recall(tmp_path) is None
    assert remembered.why_not(settings.SECTION, "x", Settings) is None
    with pytest.raises(OSError, match="there is no home directory: set HOME"):
        remember(tmp_path, Settings("threads"))


def test_what_bench_io_and_probe_find_stands_in_one_file(tmp_path: Path) -> None:
    one = Rate.of([1.0])
    files = {rates.remember(rates.Rates("cpu", 1, one, {}, {})), remember(tmp_path, Settings("threads"))}
    assert files == {cache_file()} == set(cache_file().parent.iterdir())
    assert rates.recall("cpu") is not None
    assert recall(tmp_path) is not None


def test_several_paths_are_weighed_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "fast", tmp_path / "slow"]
    monkeypatch.setattr(settings, "file_system_of", lambda path: path.name)
    remember(paths[0], Settings("threads", mixed_bytes_per_s=3e9))
    remember(paths[1], Settings("threads", mixed_bytes_per_s=5e8))
    with caplog.at_level(logging.WARNING, "offload"):
        assert weights(paths) == [3e9, 5e8]
    assert "slow moves 0.50 GB/s" in caplog.records[0].message
    assert weights(paths[:1]) == [1.0]


def test_an_unknown_path_is_measured_once_and_leaves_nothing(tmp_path: Path) -> None:
    try:
        measure_mixed(tmp_path, 16 * MIB)
    except OSError:
        pytest.skip("no nameless files with O_DIRECT here")
    before = set(tmp_path.iterdir())
    found = weights([tmp_path / "a", tmp_path / "b"])
    assert found[0] == found[1] > 1e6
    assert set(tmp_path.iterdir()) == before
    assert weights([tmp_path / "a", tmp_path / "b"]) == found


def test_where_nothing_can_be_measured_all_paths_are_equal() -> None:
    assert weights([Path("/proc/a"), Path("/proc/b")]) == [1.0, 1.0]
