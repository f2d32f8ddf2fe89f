"""What the contract in offload/io/engine.py promises, for every engine."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from offload.errors import PathError, TierIOError
from offload.io import engine as engine_module
from offload.io import io_uring
from offload.io.engine import REQUEST_BYTES, IOEngine, IOFile, IOFuture, QueuedEngine, Request, open_file
from offload.io.files import LOCAL
from offload.io.io_uring import UringEngine
from offload.io.portable import PortableEngine
from offload.io.threads import ThreadEngine
from offload.sizes import MIB, PAGE_BYTES
from tests.io.conftest import ENGINES, QUEUED
from tests.support.cases import often
from tests.support.faulty_engine import FaultyEngine, aligned
from tests.support.interrupted import interrupted_at
from tests.support.processes import holds_in_child, open_files
from tests.support.scripts import run_code

SIZES = [
    0,
    PAGE_BYTES,
    3 * PAGE_BYTES,
    4 * MIB - PAGE_BYTES,
    4 * MIB,
    4 * MIB + PAGE_BYTES,
    3 * REQUEST_BYTES + 5 * PAGE_BYTES,
]
WAIT_S = 30


def noise(size: int, seed: int = 0) -> memoryview:
    return aligned(random.Random(seed).randbytes(size))


def blank(size: int) -> memoryview:
    return aligned(bytes(size))


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read_back_at_any_size(engine: IOEngine, place: str, size: int) -> None:
    file = engine.open(place)
    data, into = noise(size), blank(size)
    assert engine.write(file, 2 * PAGE_BYTES, data).result(WAIT_S) == size
    assert engine.read(file, 2 * PAGE_BYTES, into).result(WAIT_S) == size
    assert into == data
    assert Path(place).read_bytes()[2 * PAGE_BYTES :] == data


def test_many_transfers_at_once_go_where_they_belong(engine: IOEngine, place: str) -> None:
    file = engine.open(place)
    parts = [noise(3 * PAGE_BYTES, seed) for seed in range(24)]
    for future in [engine.write(file, n * 3 * PAGE_BYTES, part) for n, part in enumerate(parts)]:
        future.result(WAIT_S)
    assert engine.sync(file).result(WAIT_S) == 0
    found = [blank(3 * PAGE_BYTES) for _ in parts]
    for future in [engine.read(file, n * 3 * PAGE_BYTES, into) for n, into in enumerate(found)]:
        future.result(WAIT_S)
    assert found == parts


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_is_not_aligned_is_refused_at_the_call(engine: IOEngine, place: str, operation: str) -> None:
    file = engine.open(place)
    transfer = getattr(engine, operation)
    pages = blank(3 * PAGE_BYTES)
    for offset, buffer in [(512, pages), (0, pages[:512]), (0, pages[512 : 512 + PAGE_BYTES]), (0, pages[:5000])]:
        with pytest.raises(ValueError, match="multiple"):
            transfer(file, offset, buffer)


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_resolves_only_when_no_part_is_under_way(
    over_preadv: IOEngine, place: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = over_preadv.open(place)
    gate, started, ended = threading.Event(), threading.Semaphore(0), []
    real = os.pwritev

    def gated(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0 and fails:
            raise OSError(errno.EIO, "no")
        started.release()
        assert gate.wait(WAIT_S)
        count = real(fd, buffers, offset)
        ended.append(offset)
        return count

    monkeypatch.setattr(os, "pwritev", gated)
    whole = over_preadv.write(file, 0, blank(2 * REQUEST_BYTES))
    for _ in range(1 if fails else 2):
        assert started.acquire(timeout=WAIT_S)
    assert not whole.done()
    gate.set()
    error = whole.exception(WAIT_S)
    assert len(ended) == (1 if fails else 2)
    assert isinstance(error, TierIOError) if fails else error is None


def cut_to(size: int) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def wrap(real: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, buffers, offset: real(fd, [buffers[0][:size]], offset)

    return wrap


@pytest.mark.parametrize("size", [PAGE_BYTES, 3 * PAGE_BYTES + 512, PAGE_BYTES + 1])
def test_short_transfers_are_continued(
    over_preadv: IOEngine, place: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = over_preadv.open(place)
    data, into = noise(11 * PAGE_BYTES), blank(11 * PAGE_BYTES)
    bounce = blank(11 * PAGE_BYTES)
    real_read, real_write = os.preadv, os.pwritev

    def short_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        # The kernel may take any number of bytes, also one that O_DIRECT would refuse to be asked for.
        return min(real_write(fd, buffers, offset), size)

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = min(real_read(fd, [bounce[: len(buffers[0])]], offset), size)
        buffers[0][:count] = bounce[:count]
        return count

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    assert over_preadv.write(file, 0, data).result(WAIT_S) == len(data)
    assert over_preadv.read(file, 0, into).result(WAIT_S) == len(data)
    assert into == data


@pytest.mark.parametrize(("operation", "call"), [("read", "preadv"), ("write", "pwritev")])
@pytest.mark.parametrize("count", [0, 512])
def test_a_transfer_that_gets_nowhere_is_an_error(
    over_preadv: IOEngine, place: str, operation: str, call: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = over_preadv.open(place)
    monkeypatch.setattr(os, call, lambda fd, buffers, offset: count if file.direct else 0)
    with pytest.raises(TierIOError) as caught:
        getattr(over_preadv, operation)(file, 0, blank(2 * PAGE_BYTES)).result(WAIT_S)
    assert (caught.value.errno, caught.value.offset, caught.value.operation) == (errno.EIO, 0, operation)


def test_a_file_shorter_than_recorded_is_an_error_with_the_place_where_it_ends(engine: IOEngine, place: str) -> None:
    file = engine.open(place)
    engine.write(file, 0, noise(6 * PAGE_BYTES)).result(WAIT_S)
    for length in (3 * PAGE_BYTES, 3 * PAGE_BYTES + 100):
        os.truncate(place, length)
        with pytest.raises(TierIOError) as caught:
            engine.read(file, PAGE_BYTES, blank(4 * PAGE_BYTES)).result(WAIT_S)
        assert caught.value.offset == 3 * PAGE_BYTES
        assert caught.value.length == 2 * PAGE_BYTES
    with pytest.raises(TierIOError):
        engine.read(file, 100 * PAGE_BYTES, blank(PAGE_BYTES)).result(WAIT_S)


@pytest.mark.parametrize(("operation", "call"), [("read", "preadv"), ("write", "pwritev")])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EDQUOT])
def test_an_error_in_the_middle_says_what_failed_where(
    over_preadv: IOEngine, place: str, operation: str, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = over_preadv.open(place)
    size = 3 * REQUEST_BYTES
    over_preadv.write(file, 0, blank(size)).result(WAIT_S)
    real = getattr(os, call)

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == REQUEST_BYTES:
            raise OSError(code, os.strerror(code))
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(TierIOError) as caught:
        getattr(over_preadv, operation)(file, 0, blank(size)).result(WAIT_S)
    error = caught.value
    assert (error.errno, error.filename, error.offset, error.length) == (code, place, REQUEST_BYTES, REQUEST_BYTES)
    assert error.operation == operation
    assert str(REQUEST_BYTES) in str(error)
    assert os.strerror(code) in str(error)
    # It was this transfer's error, nobody else's.
    assert getattr(over_preadv, operation)(file, 0, blank(PAGE_BYTES)).result(WAIT_S) == PAGE_BYTES


def test_a_failing_sync_is_an_error(over_preadv: IOEngine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = over_preadv.open(place)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(TierIOError) as caught:
        over_preadv.sync(file).result(WAIT_S)
    assert (caught.value.errno, caught.value.filename, caught.value.operation) == (errno.EIO, place, "sync")


@pytest.mark.parametrize("make", ENGINES)
def test_close_waits_then_leaves_neither_descriptor_nor_thread(make: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    engine = ENGINES[make]()
    files = [engine.open(str(tmp_path / str(n))) for n in range(3)]
    futures = [engine.write(file, n * PAGE_BYTES, noise(PAGE_BYTES)) for file in files for n in range(8)]
    engine.close()
    assert all(future.done() for future in futures)
    assert all(future.result() == PAGE_BYTES for future in futures)
    assert not {file.path for file in files}.intersection(open_files())
    assert set(threading.enumerate()) == threads
    engine.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", often(QUEUED, "threads", "uring"))
def test_an_interrupt_anywhere_in_an_engines_life_leaves_no_thread(make: str) -> None:
    """A thread that is started and not told to end would be waited for, for ever."""
    before, instruction, is_over = set(threading.enumerate()), 1, False
    while not is_over:
        with suppress(KeyboardInterrupt), interrupted_at(instruction) as left:
            ENGINES[make]().close()
        is_over = left[0] > 0
        instruction += 1
        deadline = time.monotonic() + 20
        while not set(threading.enumerate()) <= before:
            gc.collect()  # what held an engine that was cut off is in the exception's frames
            assert time.monotonic() < deadline, f"left by an interrupt at place {instruction - 1}"
            time.sleep(0.001)


def test_a_file_that_nobody_closed_is_closed_with_its_last_reference(place: str) -> None:
    engine = ThreadEngine()
    engine.open(place)
    assert place in open_files()
    del engine
    assert place not in open_files()


def test_a_forked_child_holds_no_file_of_its_parents_engine(engine: IOEngine, place: str) -> None:
    file = engine.open(place)
    assert place in open_files()
    assert holds_in_child(lambda: file.fd == -1 and place not in open_files())
    engine.write(file, 0, noise(PAGE_BYTES)).result(WAIT_S)


def test_a_refused_o_direct_falls_back_and_says_so_once(
    engine: IOEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING, "offload"):
        files = [engine.open(str(tmp_path / str(n))) for n in range(3)]
    assert [record.message.count("O_DIRECT") for record in caplog.records] == ([] if engine.name == "portable" else [1])
    for file in files:
        assert not file.direct
        data, into = noise(5 * PAGE_BYTES), blank(5 * PAGE_BYTES)
        engine.write(file, 0, data).result(WAIT_S)
        engine.read(file, 0, into).result(WAIT_S)
        assert into == data


def test_where_the_file_system_takes_o_direct_it_is_on_but_for_the_portable_engine(
    engine: IOEngine, place: str
) -> None:
    try:
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT here")
    assert engine.open(place).direct == (engine.name != "portable")


def test_a_memory_file_system_works(engine: IOEngine) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = f"/dev/shm/offload-test-{os.getpid()}"
    try:
        file = engine.open(path)
        data, into = noise(REQUEST_BYTES + PAGE_BYTES), blank(REQUEST_BYTES + PAGE_BYTES)
        engine.write(file, 0, data).result(WAIT_S)
        engine.read(file, 0, into).result(WAIT_S)
        assert into == data
    finally:
        os.unlink(path)


def test_a_file_is_made_private(engine: IOEngine, place: str) -> None:
    before = os.umask(0)
    try:
        engine.open(place)
    finally:
        os.umask(before)
    assert os.stat(place).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("folder", ["", "/dev/shm"])
def test_a_file_that_has_to_be_new_is_not_one_that_is_there(engine: IOEngine, tmp_path: Path, folder: str) -> None:
    """Its name is new, but a file system of several machines may lead it to a file that another one has renamed."""
    place = f"{folder or tmp_path}/offload-test-new-{os.getpid()}"
    try:
        engine.open(place, is_new=True)
        assert os.stat(place).st_mode & 0o777 == 0o600
        with pytest.raises(PathError) as caught:
            engine.open(place, is_new=True)
        assert caught.value.errno == errno.EEXIST
    finally:
        os.unlink(place)


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink", "dangling symlink", "no parent"])
def test_what_is_no_regular_file_is_refused_without_hanging(engine: IOEngine, tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "file", tmp_path / "other"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "no parent":
        place = other / "file"
    else:
        place.symlink_to(other)
        if kind == "symlink":
            other.write_text("mine")
    with pytest.raises(PathError) as caught:
        engine.open(str(place))
    assert caught.value.filename == str(place)
    assert str(place) not in open_files()
    if kind == "symlink":
        assert other.read_text() == "mine"
    if kind == "dangling symlink":
        assert not other.exists()


def test_the_late_engine_is_late_and_out_of_order(place: str) -> None:
    engine = FaultyEngine(delay_s=0.02)
    file = engine.open(place)
    order: list[int] = []
    futures = [engine.write(file, n * PAGE_BYTES, blank(PAGE_BYTES)) for n in range(20)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda _, n=n: order.append(n))
    engine.close()
    assert sorted(order) == list(range(20))
    assert order != list(range(20))
    assert engine.most_at_once > 3


Answer = Callable[[Request], int | None]


def answer(engine: IOEngine, monkeypatch: pytest.MonkeyPatch, instead: Answer) -> list[Request]:
    """Requests for which `instead` gives a result end with it, without being started; returns all requests."""
    assert isinstance(engine, QueuedEngine)
    seen: list[Request] = []
    real = engine._start

    def start(requests: list[Request]) -> None:
        seen.extend(requests)
        for request in requests:
            result = instead(request)
            if result is None:
                real([request])
            else:
                threading.Thread(target=engine._ended, args=(request, result)).start()

    monkeypatch.setattr(engine, "_start", start)
    return seen


def moved_by_hand(request: Request, count: int) -> int:
    """Moves the first `count` bytes past the engine, as a transfer that ends short."""
    with open(request.file.path, "r+b", buffering=0) as plain:
        plain.seek(request.offset)
        part = request.view[:count]
        if request.operation == "read":
            plain.readinto(part)
        else:
            plain.write(part)
    return count


@pytest.mark.parametrize("count", [PAGE_BYTES, 2 * PAGE_BYTES + 512, 3 * PAGE_BYTES - 1])
def test_every_engine_continues_what_ended_short(
    queued: IOEngine, place: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = queued.open(place)
    data, into = noise(11 * PAGE_BYTES), blank(11 * PAGE_BYTES)

    def short(request: Request) -> int | None:
        return moved_by_hand(request, count) if request.length > 4 * PAGE_BYTES else None

    seen = answer(queued, monkeypatch, short)
    assert queued.write(file, 0, data).result(WAIT_S) == len(data)
    assert queued.read(file, 0, into).result(WAIT_S) == len(data)
    assert into == data
    assert len(seen) > 4


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(("result", "code"), [(-errno.EIO, errno.EIO), (-errno.ENOSPC, errno.ENOSPC), (0, errno.EIO)])
def test_every_engine_says_what_failed_where(
    queued: IOEngine, place: str, operation: str, result: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = queued.open(place)
    size = 3 * REQUEST_BYTES
    queued.write(file, 0, blank(size)).result(WAIT_S)
    answer(queued, monkeypatch, lambda request: result if request.offset == REQUEST_BYTES else None)
    with pytest.raises(TierIOError) as caught:
        getattr(queued, operation)(file, 0, blank(size)).result(WAIT_S)
    error = caught.value
    assert (error.errno, error.filename, error.offset, error.length) == (code, place, REQUEST_BYTES, REQUEST_BYTES)
    assert getattr(queued, operation)(file, 0, blank(PAGE_BYTES)).result(WAIT_S) == PAGE_BYTES


def held(engine: IOEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Request], Callable[[], None]]:
    """Requests are collected, and end, successfully and in any order, when the second is called."""
    assert isinstance(engine, QueuedEngine)
    under_way: list[Request] = []
    monkeypatch.setattr(engine, "_start", under_way.extend)

    def release() -> None:
        assert isinstance(engine, QueuedEngine)
        batch = under_way[:]
        under_way.clear()
        for request in random.Random(1).sample(batch, len(batch)):
            engine._ended(request, request.length)

    return under_way, release


def test_no_more_than_the_depth_is_under_way_and_large_transfers_are_split(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ThreadEngine(request_bytes=2 * PAGE_BYTES, depth=3)
    file = engine.open(place)
    under_way, release = held(engine, monkeypatch)
    whole = engine.read(file, 0, blank(21 * PAGE_BYTES))
    sizes = []
    while under_way:
        assert len(under_way) <= 3
        sizes += [request.length for request in under_way]
        assert not whole.done()
        release()
    assert sizes == [2 * PAGE_BYTES] * 10 + [PAGE_BYTES]
    assert whole.result(0) == 21 * PAGE_BYTES
    engine.close()


def test_reading_and_writing_share_a_drive_by_bytes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ThreadEngine(request_bytes=PAGE_BYTES, depth=4)
    file = engine.open(place)
    under_way, release = held(engine, monkeypatch)
    futures = [engine.write(file, 0, blank(40 * PAGE_BYTES)), engine.read(file, 0, blank(40 * PAGE_BYTES))]
    counts = {"read": 0, "write": 0}
    release()
    while all(not future.done() for future in futures):
        for request in under_way:
            counts[request.operation] += 1
        assert abs(counts["read"] - counts["write"]) <= 4
        release()
    while under_way:
        release()
    assert all(future.result(0) == 40 * PAGE_BYTES for future in futures)
    engine.close()


def test_closing_frees_the_lock_at_once_and_a_childs_closing_does_not(engine: IOEngine, place: str) -> None:
    file = engine.open(place)
    fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # The kernel may hold the file a little longer, for io_uring; so does this.
    longer = os.dup(file.fd)
    try:
        # The child closes its copy as it begins.
        assert holds_in_child(lambda: file.fd == -1)
        with open(place, "rb") as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.close()
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(longer)


@pytest.mark.timeout(60)
def test_more_requests_than_the_ring_holds_wait_for_room(tmp_path: Path) -> None:
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    engine = UringEngine(request_bytes=PAGE_BYTES, depth=256)
    files = [engine.open(str(tmp_path / str(n))) for n in range(4)]
    data = noise(2 * MIB)
    futures = [engine.write(file, 0, data) for file in files]
    assert [future.result(WAIT_S) for future in futures] == [2 * MIB] * 4
    found = [blank(2 * MIB) for _ in files]
    for future in [engine.read(file, 0, into) for file, into in zip(files, found, strict=True)]:
        future.result(WAIT_S)
    assert all(into == data for into in found)
    engine.close()


def test_space_is_reserved_where_the_c_library_writes_a_byte_to_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ext4 without extents, which has no fallocate, and takes O_DIRECT. What is there stays."""
    opened = LOCAL.open_or_create(tmp_path / "file"), open_file(str(tmp_path / "file"))
    real, asked = os.posix_fallocate, []

    def by_bytes(fd: int, offset: int, length: int) -> None:
        asked.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & engine_module.O_DIRECT))
        if asked[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", by_bytes)
    data = noise(PAGE_BYTES)
    for file in opened:
        os.pwrite(file.fd, data, PAGE_BYTES)
        before = open_files()
        LOCAL.allocate(file, 0, MIB)
        assert open_files() == before
        info = LOCAL.stat(file)
        assert (info.st_size, info.st_blocks * 512 >= MIB) == (MIB, True)
        assert (tmp_path / "file").read_bytes()[PAGE_BYTES : 2 * PAGE_BYTES] == data
        LOCAL.truncate(file, 2 * PAGE_BYTES)
    assert asked == [False, *([True, False] if opened[1].direct else [False])]
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: by_bytes(fd, offset, -1))
    with pytest.raises(OSError, match="Invalid argument"):
        LOCAL.allocate(opened[1], 0, MIB)


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.ECANCELED, errno.EFAULT])
def test_what_only_the_ring_refuses_is_done_by_a_plain_call(
    place: str, operation: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to the thread that submits, or its end, is no failure of the disk."""
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    engine = UringEngine()
    file, data = engine.open(place), noise(3 * REQUEST_BYTES)
    Path(place).write_bytes(data if operation == "read" else bytes(len(data)))
    memory = blank(len(data)) if operation == "read" else data
    called: list[int] = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (called.append(fd), fdatasync(fd))[1])
    seen = answer(engine, monkeypatch, lambda request: -code if request.offset != REQUEST_BYTES else None)
    moving = engine.sync(file) if operation == "sync" else getattr(engine, operation)(file, 0, memory)
    assert moving.result(WAIT_S) == (0 if operation == "sync" else len(data))
    assert len(seen) == (1 if operation == "sync" else 3)
    assert called == ([file.fd] if operation == "sync" else [])
    assert operation == "sync" or (memory == data and Path(place).read_bytes() == data)
    engine.close()


@pytest.mark.timeout(60)
def test_reads_of_a_thread_that_has_ended_go_on(tmp_path: Path) -> None:
    """The kernel ends what a thread has submitted, and what waits for the page cache, with the thread."""
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    engine, data = UringEngine(), noise(8 * REQUEST_BYTES)
    futures: list[IOFuture] = []
    into = [blank(REQUEST_BYTES) for _ in range(8)]
    for trial in range(4):
        place = tmp_path / str(trial)
        with place.open("wb") as cold:
            cold.write(data)
            os.fsync(cold.fileno())
            os.posix_fadvise(cold.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file = engine.adopt(open_file(str(place), buffered=True))

        def begin(file: IOFile = file) -> None:
            futures[:] = [engine.read(file, n * REQUEST_BYTES, part) for n, part in enumerate(into)]

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        assert [future.result(WAIT_S) for future in futures] == [REQUEST_BYTES] * 8
        assert b"".join(into) == data
    engine.close()


def test_a_file_is_not_left_in_the_mode_that_kept_its_opening_from_blocking(engine: IOEngine, tmp_path: Path) -> None:
    """io_uring may fail a transfer with EAGAIN instead of waiting where O_NONBLOCK is on."""
    opened = [engine.open(str(tmp_path / "a")), LOCAL.create(tmp_path / "b"), LOCAL.open_followed(tmp_path / "a")]
    assert all(os.get_blocking(file.fd) for file in opened)
    assert [bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & engine_module.O_DIRECT) for file in opened] == [
        file.direct for file in opened
    ]


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_an_interrupt_while_requests_are_started_leaves_none_that_never_ends(
    queued: QueuedEngine, place: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = queued.open(place)
    data, start = noise(3 * PAGE_BYTES), queued._start

    def interrupted(requests: list[Request]) -> None:
        signal.raise_signal(signal.SIGINT)
        start(requests)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(queued, "_start", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            queued.write(file, 0, data) if operation == "write" else queued.sync(file)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
    closing = threading.Thread(target=queued.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    is_stuck = closing.is_alive()
    queued._drives.clear()  # or this test could never end
    assert not is_stuck
    assert operation == "sync" or Path(place).read_bytes() == data


def test_the_portable_engine_opens_the_same_file_again_or_none(tmp_path: Path) -> None:
    """It opens a handle for each request under way, when it first needs one."""
    folder = tmp_path / "run"
    folder.mkdir()
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    engine = PortableEngine()
    try:
        named = engine.open(str(folder / "named"))
        held = engine.open(str(folder / "held"), dir_fd=within)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / "named").write_bytes(b"another's")
        engine.write(held, 0, noise(PAGE_BYTES)).result(WAIT_S)
        for _ in range(2):
            with pytest.raises(TierIOError):
                engine.write(named, 0, noise(PAGE_BYTES)).result(WAIT_S)
            (folder / "named").unlink(missing_ok=True)
    finally:
        engine.close()
        os.close(within)
    assert not [*folder.iterdir()]
    assert (tmp_path / "moved" / "held").stat().st_size == PAGE_BYTES


def failing_once(real: Callable[..., object], error: BaseException) -> Callable[..., object]:
    left = [error]

    def call(*args: object, **kwargs: object) -> object:
        if left:
            raise left.pop()
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
def test_what_is_thrown_in_while_a_request_is_started_is_no_error_of_the_disk(
    queued: QueuedEngine, place: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, came = queued.open(place), TimeoutError("of the user's own")
    queued.write(file, 0, noise(PAGE_BYTES)).result(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(queued, "_start", lambda requests: [(request, came) for request in requests])
        moving = queued.sync(file) if operation == "sync" else getattr(queued, operation)(file, 0, blank(PAGE_BYTES))
    assert moving.exception(WAIT_S) is came
    assert queued.write(file, 0, noise(PAGE_BYTES)).result(WAIT_S) == PAGE_BYTES


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 3000])
def test_however_many_requests_are_queued_all_of_them_end_where_none_can_be_started(
    place: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ThreadEngine(request_bytes=PAGE_BYTES)
    file, pages = engine.open(place), blank(count * PAGE_BYTES)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        patch.setattr(engine, "_start", lambda requests: [(request, full) for request in requests])
        for moving in (engine.write(file, 0, pages), engine.read(file, 0, pages)):
            with pytest.raises(TierIOError, match="Cannot allocate memory"):
                moving.result(WAIT_S)
    assert engine.write(file, 0, blank(PAGE_BYTES)).result(WAIT_S) == PAGE_BYTES
    engine.close()


@pytest.mark.timeout(60)
def test_no_memory_while_a_request_ends_fails_that_transfer_and_no_later_one(
    queued: QueuedEngine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = queued.open(place)
    monkeypatch.setattr(Request, "moved", failing_once(Request.moved, MemoryError()))
    with pytest.raises(TierIOError) as caught:
        queued.write(file, 0, noise(PAGE_BYTES)).result(WAIT_S)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, place)
    assert isinstance(caught.value.__cause__, MemoryError)
    data, into = noise(3 * REQUEST_BYTES), blank(3 * REQUEST_BYTES)
    assert queued.write(file, 0, data).result(WAIT_S) == len(data)
    assert queued.read(file, 0, into).result(WAIT_S) == len(data)
    assert into == data


@pytest.mark.timeout(60)
def test_a_reaper_that_has_no_memory_for_completions_loses_none(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    engine = UringEngine()
    file = engine.open(place)
    monkeypatch.setattr(io_uring, "_unpacked", failing_once(io_uring._unpacked, MemoryError()))
    data = noise(PAGE_BYTES)
    assert engine.write(file, 0, data).result(WAIT_S) == PAGE_BYTES
    assert Path(place).read_bytes() == data
    engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_what_a_ring_does_not_take_at_once_is_submitted_after_a_completion(
    place: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uring.h: fewer when the ring is full; 0 only while something is under way."""
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    engine = UringEngine(request_bytes=PAGE_BYTES)
    file = engine.open(place)
    real: Callable[[Sequence[io_uring.Submission]], int] = engine._ring.submit
    taken: list[int] = []

    def submit(batch: Sequence[io_uring.Submission]) -> int:
        taken.append(real(batch[: most or len(taken) % 2]))
        return taken[-1]

    monkeypatch.setattr(engine._ring, "submit", submit)
    data = noise(20 * PAGE_BYTES)
    assert engine.write(file, 0, data).result(WAIT_S) == len(data)
    assert Path(place).read_bytes() == data
    taken[:] = [0] * (len(taken) // 2 * 2)  # next comes 0, if ever
    engine.close()  # the end of the thread that waits is a request, too
    assert not engine._reaper.is_alive()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", QUEUED)
def test_an_engine_that_nobody_closed_ends_its_threads_and_files(make: str, tmp_path: Path) -> None:
    gc.collect()  # engines of other tests
    place, before, threads = str(tmp_path / "file"), len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(3):
        engine = ENGINES[make]()
        file = engine.open(place)
        engine.write(file, 0, noise(PAGE_BYTES)).result(WAIT_S)
        del engine, file
        gc.collect()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.timeout(60)
def test_registering_where_the_kernel_would_wait_for_the_reaper_is_left_out(place: str) -> None:
    if not io_uring.is_available()[0]:
        pytest.skip("no io_uring here")
    old = io_uring.Ring(8, without=io_uring.RSRC_TAGS)
    waiting = threading.Thread(target=old.wait)
    waiting.start()
    time.sleep(0.05)
    assert not old.register_buffers([blank(PAGE_BYTES)])
    old.submit([io_uring.Submission(io_uring.NOP)])
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    old.close()


EXIT = """
import sys
from pathlib import Path
from offload.io.select import open_engine
from offload.sizes import MIB
from tests.support.faulty_engine import aligned
engine = open_engine(sys.argv[1], [Path(sys.argv[2]).parent])
file = engine.open(sys.argv[2])
memory = aligned(bytes(16 * MIB))
engine.write(file, 0, memory).result()
under_way = [engine.read(file, 0, memory) for _ in range(16)]
"""


@pytest.mark.parametrize("name", QUEUED)
def test_a_process_ends_in_silence_with_reads_under_way(name: str, place: str) -> None:
    done = run_code(EXIT, name, str(place), limit_s=60)
    assert (done.returncode, done.stderr) == (0, "")
