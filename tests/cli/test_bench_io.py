"""`offload bench io`: what it says and remembers, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import io as text_io
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from offload.cli import (
    bench_io,
    bench_io_contestants,
    bench_io_field,
    bench_io_place,
    bench_io_race,
    bench_io_report,
    machine,
)
from offload.cli.bench_io_contestants import OPERATIONS, Contestant, LeftOutError
from offload.cli.bench_io_progress import progress
from offload.cli.bench_io_race import Family, Point
from offload.cli.main import app
from offload.errors import BudgetError, PathError
from offload.io import io_uring as ring
from offload.io import select as settings
from offload.sizes import GIB, MIB
from tests.support.processes import ROOT, open_files, own_threads

TINY = bench_io_field.Grid(
    requests=(MIB, 2 * MIB), depths=(2,), portable=((MIB, 2),), fio=((MIB, 4),), pool=((MIB, 4),), rounds=1
)
KEYS = {
    "path", "fs", "read_gb_per_s", "write_gb_per_s", "mixed_gb_per_s", "engine", "request_bytes", "depth",
    "cpu_s_per_gib", "references", "points",
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(bench_io_field, "QUICK", TINY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    # Its starts are what takes time here: tests that need it ask for `fio`.
    monkeypatch.setattr(bench_io_field, "shutil", SimpleNamespace(which=lambda name: None))


@pytest.fixture
def fio(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is one, which may then be used."""
    monkeypatch.setattr(bench_io_field, "shutil", shutil)
    return shutil.which("fio") is not None


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def bench(*arguments: str | Path, out: Path) -> Any:
    words = ["bench", "io", *map(str, arguments), "--quick", "--size", "16MiB", "--rounds", "2", "--out", str(out)]
    return CliRunner().invoke(app, words)


def test_json_has_the_agreed_keys_and_settings_are_remembered(drive: Path, tmp_path: Path, fio: bool) -> None:
    done = bench(drive, "--json", out=tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= KEYS
    assert found["path"] == str(drive)
    tried = {(point["engine"], point["request_bytes"], point["depth"]) for point in found["points"]}
    assert (found["engine"], found["request_bytes"], found["depth"]) in tried
    assert {engine for engine, *_ in tried} >= {"threads", "portable"}
    assert set(found["references"]) >= {"preadv pool", "fio libaio"} if fio else {"preadv pool"}
    for reference in found["references"].values():
        for operation in OPERATIONS:
            assert reference[f"{operation}_gb_per_s"] > 0
            assert reference[f"{operation}_ratio"] > 0
    known = settings.recall(drive)
    assert known is not None
    assert (known.engine, known.request_bytes, known.depth) == (
        found["engine"],
        found["request_bytes"],
        found["depth"],
    )
    assert known.mixed_bytes_per_s == pytest.approx(found["mixed_gb_per_s"] * 1e9)
    for picture in ("io-heat.png", "io-bars.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")


def test_two_paths_are_a_list_with_pictures_of_their_own(drive: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    done = bench(drive, tmp_path / "other", "--json", out=tmp_path / "out")
    assert [one["path"] for one in json.loads(done.stdout)] == [str(drive), str(tmp_path / "other")]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


def test_it_leaves_no_file_no_descriptor_and_no_thread(drive: Path, tmp_path: Path) -> None:
    bench(drive, out=tmp_path / "out")  # what is loaded once stays
    before = open_files()
    assert bench(drive, out=tmp_path / "out").exit_code == 0
    assert list(drive.iterdir()) == []
    assert open_files() == before
    assert not own_threads()


def test_people_learn_what_it_means_for_training(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_io_report, "matmul_flops", lambda: 6e12)
    monkeypatch.setattr(bench_io_report.Result, "mixed_bytes_per_s", 2e9)
    shown = bench(drive, "--tbw", "864TB", out=tmp_path / "out").stdout
    # t = 24 bytes / 2 GB/s = 12 ns: F t / 6 and F t / 2 tokens; 1 GB/s written is 86.4 TB a day.
    assert "12 s a step for a billion parameters" in shown
    assert "from 12,000 tokens a step on" in shown
    assert "from 36,000" in shown
    assert "in 10.0 days" in shown


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["missing"], "PathError", "no such directory"),
        (["file"], "PathError", "not a file"),
        (["--size", "512", "."], "ConfigError", "--size=512 B is too small"),
        (["--size", "900TB", "."], "BudgetError", "lower --size"),
        (["--tbw=0", "."], "ConfigError", "--tbw=0"),
    ],
)
def test_wrong_arguments_are_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    extra = {
        "--size=512 B is too small": ["--size", "512"],
        "lower --size": ["--size", "900TB"],
        "--tbw=0": ["--tbw=0"],
    }
    done = CliRunner().invoke(app, ["bench", "io", *arguments, *extra.get(message, [])])
    assert done.exit_code == 2
    assert done.stderr.startswith(error)
    assert message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_bad_path_of_two_is_refused_before_the_good_one_is_measured(drive: Path) -> None:
    with pytest.raises(PathError):
        bench_io.checked([drive, drive / "missing"], None, quick=True)


def test_unwritable_path_is_refused(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PathError, match="may not write") as caught:
        bench_io_place.check(drive, None)
    assert caught.value.errno == errno.EACCES


def test_read_only_file_system_is_a_path_error(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench_io_place.check(drive, 16 * MIB)
    monkeypatch.setattr(bench_io_place, "_nameless", raising(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(PathError, match="Read-only"), bench_io_place.opened(plan):
        pass


def test_file_system_that_fills_up_is_a_path_error_and_leaves_nothing(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bench_io_place.check(drive, 16 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")))
    before = open_files()
    with pytest.raises(PathError, match="No space left"), bench_io_place.opened(plan):
        pass
    assert open_files() == before
    assert list(drive.iterdir()) == []


def test_full_path_is_a_budget_error_with_numbers(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, total=GIB, free=20 * MIB)
    with pytest.raises(BudgetError) as caught:
        bench_io_place.check(drive, None)
    assert (caught.value.needed, caught.value.available) == (32 * MIB, 20 * MIB)


def test_default_size_fits_the_free_space_and_a_full_disk_is_said(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, total=100 * GIB, free=GIB)
    plan = bench_io_place.check(drive, None)
    assert plan.size == 256 * MIB
    assert any("99% full" in warning for warning in plan.warnings)
    with_free(monkeypatch, total=100 * GIB, free=11 * GIB)
    assert not any("full" in warning for warning in bench_io_place.check(drive, None).warnings)


@pytest.mark.parametrize(
    ("system", "words"), [("tmpfs", "RAM"), ("btrfs", "copies on write"), ("zfs", "compress"), ("fuse.sshfs", "shared")]
)
def test_file_systems_that_mislead_are_named(
    drive: Path, monkeypatch: pytest.MonkeyPatch, system: str, words: str
) -> None:
    monkeypatch.setattr(machine, "file_system", lambda path: system)
    (warning,) = [text for text in bench_io_place.check(drive, 16 * MIB).warnings if system in text]
    assert words in warning or "others share it" in warning


def test_without_direct_io_it_works_and_says_so(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fio: bool
) -> None:
    opening = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opening(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refusing)
    done = bench(drive, "--json", out=tmp_path / "out")
    assert "no O_DIRECT" in done.stderr
    found = json.loads(done.stdout)
    assert found["o_direct"] is False
    assert not any(name.startswith("fio") for name in found["references"])


def test_without_nameless_files_one_is_unlinked_at_once(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opening(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refusing)
    with bench_io_place.opened(bench_io_place.check(drive, 16 * MIB)) as place:
        assert list(drive.iterdir()) == []
        assert os.fstat(place.fd).st_size == 16 * MIB


def test_without_io_uring_the_threads_are_recommended(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "is_available", lambda: (False, "the sysctl forbids it"))
    found = json.loads(bench(drive, "--json", out=tmp_path / "out").stdout)
    assert found["engine"] in ("threads", "portable")
    assert "uring: the sysctl forbids it" in found["left_out"]


def test_without_fio_it_works_and_says_so(drive: Path, tmp_path: Path) -> None:
    found = json.loads(bench(drive, "--json", out=tmp_path / "out").stdout)
    assert set(found["references"]) == {"preadv pool", "preadv pool, small"}
    assert "fio: not installed" in found["left_out"]


def test_cache_that_cannot_be_written_is_said(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    done = bench(drive, out=tmp_path / "out")
    assert done.exit_code == 0
    assert "cannot write down the settings" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_leaves_nothing(drive: Path, tmp_path: Path, number: int) -> None:
    words = ["-m", "offload.cli", "bench", "io", str(drive), "--size", "64MiB", "--out", str(tmp_path / "out")]
    code = "import sys; from offload.cli.main import run; sys.argv = ['offload', *sys.argv[3:]]; run()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if "sweep" in line:
                break
        assert list(drive.iterdir()), "the portable engine's folder is there"
        child.send_signal(number)
        assert child.wait(timeout=60) == (130 if number == signal.SIGINT else 128 + number)
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()
    assert list(drive.iterdir()) == []


def test_recommended_is_the_cheapest_of_those_as_fast_as_the_fastest() -> None:
    points = [point("a", 10.0, 0.05), point("b", 9.8, 0.01), point("c", 9.0, 0.001)]
    assert bench_io_race.recommended(points).engine == "b"


def test_race_takes_the_median_of_paired_ratios_and_the_reference_at_its_best() -> None:
    slow, fast = Fake("it", "slow", [2.0] * 99), Fake("it", "fast", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 8.0] * 9)
    ours = Fake("uring", "", [1.0, 1.0, 1.0] * 99)
    sizes: list[int | None] = []

    def make(most: int | None) -> Any:
        sizes.append(most)
        return ours

    one = bench_io_race.race(make, [Family("it", [slow, fast])], point("uring", 1.0, 0.0), 3, 10, lambda what: None)
    assert {duel.contestant.settings for duel in one.duels["it"].values()} == {"fast"}
    assert all(len(duel.theirs) == len(duel.ours) == 3 for duel in one.duels["it"].values())
    assert set(sizes) == {None, fast.buffer_bytes}
    duel = one.duels["it"]["read"]
    duel.ours, duel.theirs = [1.0, 4.0, 9.0], [2.0, 2.0, 3.0]
    assert duel.ratio == 2.0


def test_reference_that_fails_is_left_out_with_its_reason() -> None:
    broken = Fake("it", "", [])
    one = bench_io_race.race(
        lambda most: Fake("uring", "", [1.0] * 99),
        [Family("it", [broken])],
        point("uring", 1.0, 0.0),
        1,
        10,
        lambda _: None,
    )
    assert one.duels == {}
    assert one.left_out == ["it: no more"]


def test_engine_that_fails_in_the_sweep_is_named_and_dropped() -> None:
    good, bad = point("good", 0.0, 0.0), point("bad", 0.0, 0.0)
    for each in (good, bad):
        each.speeds = {operation: [] for operation in OPERATIONS}

    def enter(one: Point) -> Any:
        return Fake(one.engine, "", [1.0] * 99) if one is good else Broken()

    reasons = list(bench_io_race.sweep([good, bad], enter, 2, 10, lambda what: None))
    assert len(reasons) == 1
    assert "bad" in reasons[0]
    assert len(good.speeds["read"]) == 2
    assert bad.speeds["read"] == []


def test_mixed_reads_the_first_half_and_writes_the_second() -> None:
    parts = bench_io_contestants.parts("mixed", 12, 4)
    assert parts == [("read", 0, 4), ("write", 6, 4), ("read", 4, 2), ("write", 10, 2)]


def test_contestants_move_every_byte(drive: Path) -> None:
    plan = bench_io_place.check(drive, 16 * MIB)
    memory = memoryview(mmap.mmap(-1, 8 * MIB))
    memory[:] = os.urandom(MIB) * 8
    with bench_io_place.opened(plan) as place:
        field = bench_io_field.Field(place, drive / "named", memory, TINY)
        assert field.lay_out(limited=False) == plan.size
        families, _ = field.families()
        everyone: list[Contestant] = [field.ours(one) for one in field.points()[0]]
        everyone += [one for family in families if not family.name.startswith("fio") for one in family.candidates]
        for contestant in everyone:
            file = str(drive / "named") if contestant.name == "portable" else place.name
            Path(file).write_bytes(bytes(plan.size))
            contestant.run("write", plan.size)
            assert Path(file).read_bytes() == bytes(memory[:MIB]) * 16, contestant.settings


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_fio_that_fails_is_left_out_with_its_own_words(drive: Path) -> None:
    with bench_io_place.opened(bench_io_place.check(drive, 16 * MIB)) as place:
        wrong = bench_io_contestants.Fio(place, "no_such_engine", MIB, 4)
        with pytest.raises(LeftOutError, match="no_such_engine"):
            wrong.run("read", 16 * MIB)


def test_terminal_gets_a_bar_and_a_file_gets_lines(drive: Path) -> None:
    for terminal in (True, False):
        console = Console(file=text_io.StringIO(), force_terminal=terminal, width=100)
        with progress(console, "/here", 2) as tick:
            tick("one thing")
            tick("another")
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("━" in shown) is terminal
        assert ("/here: 1/2 one thing\n" in shown) is not terminal


class Fake(Contestant):
    """Takes the seconds it is told, one after the other."""

    cpu_s = 0.0
    buffer_bytes = 4096

    def __init__(self, name: str, settings: str, seconds: list[float]) -> None:
        self.name, self.settings, self._seconds = name, settings, list(seconds)

    def run(self, operation: str, nbytes: int) -> float:
        if not self._seconds:
            raise LeftOutError("no more")
        return self._seconds.pop(0)


class Broken:
    def run(self, operation: str, nbytes: int) -> float:
        raise OSError(errno.EIO, "Input/output error")


def point(engine: str, speed: float, cpu: float) -> Point:
    return Point(engine, MIB, 2, {operation: [speed] for operation in OPERATIONS}, [cpu])


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        raise error

    return call


def with_free(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(total, total - free, free))
