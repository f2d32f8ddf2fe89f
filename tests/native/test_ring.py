"""The io_uring ring under the engine: what comes back, how often, and what is left behind."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload import native
from offload.errors import ClosedError
from offload.io import io_uring
from offload.io.io_uring import (
    FDATASYNC,
    NOP,
    READ,
    WRITE,
    Completion,
    Ring,
    Submission,
)
from offload.sizes import GIB, MIB, PAGE_BYTES
from tests.support.faulty_engine import aligned
from tests.support.processes import holds_in_child, open_files
from tests.support.scripts import run_code

AVAILABLE, REASON = io_uring.is_available()
needs_ring = pytest.mark.skipif(not AVAILABLE, reason=REASON)
LAST = 2**64 - 1


@pytest.fixture
def rings() -> Iterator[Ring]:
    made = Ring(64)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(tmp_path / "file", flags | os.O_DIRECT)
    except OSError:  # a file system without O_DIRECT
        fd = os.open(tmp_path / "file", flags)
    yield fd
    os.close(fd)


def noise(size: int, seed: int = 0) -> memoryview:
    return aligned(random.Random(seed).randbytes(size))


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def run(rings: Ring, *requests: Submission) -> list[Completion]:
    """All at once, waited for; in the order of user_data."""
    assert rings.submit(requests) == len(requests)
    found: list[Completion] = []
    while len(found) < len(requests):
        found += rings.wait()
    return sorted(found)


@needs_ring
@pytest.mark.parametrize("size", [PAGE_BYTES, 3 * PAGE_BYTES, MIB, 4 * MIB + PAGE_BYTES])
@pytest.mark.parametrize("buffers", [False, True], ids=["memory", "registered memory"])
def test_what_was_written_is_read_back(rings: Ring, file: int, size: int, buffers: bool) -> None:
    data, into = noise(size), noise(size, 1)
    if buffers and not rings.register_buffers([data, (address_of(into), size)]):
        pytest.skip("this system refuses to pin so much")
    # With an index the memory has to lie in that buffer.
    one, two = (0, 1) if buffers else (-1, -1)
    at = 5 * PAGE_BYTES
    assert run(rings, Submission(WRITE, file, one, size, address_of(data), at, 7)) == [(7, size)]
    assert run(rings, Submission(FDATASYNC, file, user_data=8)) == [(8, 0)]
    assert run(rings, Submission(READ, file, two, size, address_of(into), at, LAST)) == [(LAST, size)]
    assert into == data
    with open(f"/proc/self/fd/{file}", "rb") as again:
        assert again.read()[at:] == data


@needs_ring
def test_a_registered_buffer_is_the_one_its_index_names(rings: Ring, file: int) -> None:
    first, second = noise(PAGE_BYTES), noise(PAGE_BYTES, 1)
    assert rings.register_buffers([first, second])
    assert run(rings, Submission(WRITE, file, 0, PAGE_BYTES, address_of(second), 0, 1)) == [(1, -errno.EFAULT)]
    assert run(rings, Submission(WRITE, file, 1, PAGE_BYTES, address_of(second), 0, 1)) == [(1, PAGE_BYTES)]
    assert rings.register_buffers([second]), "a new list takes the place of the old one"
    assert run(rings, Submission(READ, file, 0, PAGE_BYTES, address_of(second), 0, 1)) == [(1, PAGE_BYTES)]
    assert rings.register_buffers([])
    assert run(rings, Submission(READ, file, 0, PAGE_BYTES, address_of(second), 0, 1)) == [(1, -errno.EFAULT)]


@needs_ring
def test_many_from_several_threads_come_back_once_each(file: int) -> None:
    many = Ring(8)  # far fewer than are submitted: full most of the time
    each, threads = 500, 4
    data = noise(16 * PAGE_BYTES)
    os.pwrite(file, data, 0)
    into = [aligned(bytes(PAGE_BYTES)) for _ in range(16)]
    freed = threading.Semaphore(0)

    def submit(first: int) -> None:
        todo = [
            Submission(READ, file, -1, PAGE_BYTES, address_of(into[n % 16]), n % 16 * PAGE_BYTES, n)
            if n % 3
            else Submission(NOP, user_data=n)
            for n in range(first, first + each)
        ]
        while todo:
            todo = todo[many.submit(todo[:11]) :]
            freed.acquire(timeout=0.001)

    workers = [threading.Thread(target=submit, args=(k * each,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    found: list[Completion] = []
    while len(found) < each * threads:
        taken = many.wait()
        found += taken
        freed.release(len(taken))
    for worker in workers:
        worker.join()
    assert sorted(found) == [(n, PAGE_BYTES if n % 3 else 0) for n in range(each * threads)]
    assert b"".join(into) == data
    many.close()


@needs_ring
def test_a_full_ring_takes_what_fits_and_goes_on_after_a_completion() -> None:
    small = Ring(4)
    batch = [Submission(NOP, user_data=n) for n in range(100)]
    most = []
    found: list[Completion] = []
    while batch:
        taken = small.submit(batch)
        most.append(taken)
        batch = batch[taken:]
        if taken == 0:
            found += small.wait()
    while len(found) < 100:
        found += small.wait()
    assert sorted(found) == [(n, 0) for n in range(100)]
    assert max(most) == small.entries == 4
    assert most[:3] == [4, 4, 0], "twice the entries may be under way"
    small.close()


@needs_ring
def test_a_thread_that_ends_leaves_its_requests_to_be_completed(rings: Ring, file: int) -> None:
    # A write beyond the file's end and a sync are done by workers of the kernel that belong to the thread.
    data = noise(MIB)
    batch = [Submission(WRITE, file, -1, MIB, address_of(data), n * MIB, n) for n in range(24)]
    batch += [Submission(FDATASYNC, file, user_data=100 + n) for n in range(8)]
    thread = threading.Thread(target=lambda: rings.submit(batch))
    thread.start()
    thread.join()
    found: list[Completion] = []
    while len(found) < 32:
        found += rings.wait()
    assert sorted(found) == [(n, MIB) for n in range(24)] + [(100 + n, 0) for n in range(8)]


@needs_ring
def test_errors_and_short_reads_are_results(rings: Ring, file: int) -> None:
    data = noise(4 * PAGE_BYTES)
    os.pwrite(file, data[: 3 * PAGE_BYTES], 0)
    address = address_of(data)
    assert run(
        rings,
        Submission(READ, 9999, -1, PAGE_BYTES, address, 0, 1),
        Submission(READ, -1, -1, PAGE_BYTES, address, 0, 2),
        Submission(READ, file, 5, PAGE_BYTES, address, 0, 3),
        Submission(READ, file, -1, 4 * PAGE_BYTES, address, PAGE_BYTES, 4),
        Submission(READ, file, -1, PAGE_BYTES, address, 3 * PAGE_BYTES, 5),
        Submission(WRITE, file, -1, PAGE_BYTES, 0, 0, 6),
        Submission(FDATASYNC, 9999, user_data=7),
    ) == [
        (1, -errno.EBADF),
        (2, -errno.EBADF),
        (3, -errno.EFAULT),
        (4, 2 * PAGE_BYTES),
        (5, 0),
        (6, -errno.EFAULT),
        (7, -errno.EBADF),
    ]


@needs_ring
def test_what_is_no_request_is_refused_at_the_call(rings: Ring) -> None:
    for wrong in (
        Submission(9),
        Submission(READ, length=2**32),
        Submission(READ, offset=-1),
        Submission(READ, fd=2**31),
    ):
        with pytest.raises(ValueError, match=r"request has"):
            rings.submit([wrong])
    assert rings.submit([]) == 0
    assert rings.submit([Submission(NOP, user_data=1), Submission(9)]) == 1, "those before it are under way"
    assert rings.wait() == [(1, 0)]
    with pytest.raises(ValueError, match="1 GiB"):
        rings.register_buffers([(PAGE_BYTES, GIB + 1)])


@needs_ring
def test_waiting_takes_no_cpu_and_ends_with_the_completion(rings: Ring) -> None:
    late = threading.Timer(0.3, lambda: rings.submit([Submission(NOP, user_data=3)]))
    late.start()
    wall, cpu = time.monotonic(), time.process_time()
    assert rings.wait() == [(3, 0)]
    assert time.monotonic() - wall >= 0.25
    assert time.process_time() - cpu < 0.1
    late.join()


@needs_ring
def test_a_signal_is_handled_while_waiting(rings: Ring) -> None:
    class CameError(Exception):
        pass

    def raises(*_: object) -> None:
        raise CameError

    before = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(CameError):
            rings.wait()
        # And one that does not raise ends no wait.
        signal.signal(signal.SIGALRM, lambda *_: rings.submit([Submission(NOP, user_data=4)]) and None)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert rings.wait() == [(4, 0)]
    finally:
        signal.signal(signal.SIGALRM, before)


@needs_ring
def test_one_thread_waits_at_a_time_and_a_busy_ring_is_not_closed(rings: Ring) -> None:
    found: list[Completion] = []
    waiter = threading.Thread(target=lambda: found.extend(rings.wait()))
    waiter.start()
    while not _sleeps(waiter):
        time.sleep(0.001)
    with pytest.raises(OSError, match="busy"):
        rings.close()
    with pytest.raises(OSError, match="busy"):
        rings.wait()
    rings.submit([Submission(NOP, user_data=5)])
    waiter.join()
    assert found == [(5, 0)]
    rings.submit([Submission(NOP, user_data=6)])
    with pytest.raises(OSError, match="busy"):
        rings.close()
    assert rings.wait() == [(6, 0)]


def _sleeps(thread: threading.Thread) -> bool:
    """Whether it is in io_uring_enter."""
    return Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0] == "426"


def ring_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("io_uring")


@needs_ring
@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_frees_descriptor_and_mappings(how: str, file: int) -> None:
    files, mappings = open_files(), ring_mappings()
    for _ in range(20):
        one: Ring | None = Ring(32)
        assert one is not None
        assert ring_mappings() > mappings
        one.register_buffers([noise(MIB)])
        assert run(one, Submission(NOP, user_data=1)) == [(1, 0)]
        if how == "close":
            one.close()
            one.close()
            for call in (one.wait, lambda: one.submit([Submission(NOP)])):  # noqa: B023
                with pytest.raises(ClosedError):
                    call()
            with pytest.raises(ClosedError):
                one.register_buffers([])
        one = None
        assert open_files() == files
        assert ring_mappings() == mappings


LOW_MEMLOCK = """
import ctypes, mmap, os, resource, sys
from offload.io.io_uring import READ, WRITE, Submission, Ring, is_available
is_available()  # loads the library while we may read it
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
memory = memoryview(mmap.mmap(-1, 1 << 20))
memory[:] = b"x" * len(memory)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ring = Ring(8)
print(ring.register_buffers([memory]))
print(ring.submit([Submission(WRITE, fd, -1, 1 << 20, address, 0, 1)]), ring.wait())
print(ring.submit([Submission(READ, fd, 0, 1 << 20, address, 0, 2)]), ring.wait())
print(ring.register_buffers([memory[:4096]]))
print(ring.submit([Submission(READ, fd, 0, 4096, address, 0, 3)]), ring.wait())
ring.close()
"""


@needs_ring
def test_a_low_memlock_only_means_unregistered(tmp_path: Path) -> None:
    child = run_code(LOW_MEMLOCK, str(tmp_path / "file"), limit_s=60)
    lines = child.stdout.split("\n")
    if child.returncode and os.getuid() == 0 and not lines[0]:
        pytest.skip("this system lets no other user open a ring")
    assert lines == [
        "False",
        f"1 [(1, {MIB})]",
        f"1 [(2, {-errno.EFAULT})]",
        "True",
        f"1 [(3, {PAGE_BYTES})]",
        "",
    ]


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.ENOSYS, "no io_uring"), (errno.EPERM, "sysctl.*seccomp"), (errno.ENOMEM, "MEMLOCK"), (errno.EIO, "EIO")],
)
def test_a_refused_ring_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    class Refuses:
        def offload_ring_open(self, *_: object) -> int:
            return -code

    monkeypatch.setattr(io_uring, "_library", Refuses)
    files = open_files()
    with pytest.raises(OSError, match="io_uring") as caught:
        Ring(8)
    assert caught.value.errno == code
    usable, reason = io_uring.is_available()
    assert not usable
    assert re.search(says, reason)
    assert open_files() == files


def test_without_the_library_there_is_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Callable[[], None] = io_uring._library.cache_clear
    monkeypatch.setattr(native, "open_library", lambda: (None, "no C compiler"))
    old()
    try:
        with pytest.raises(OSError, match="no io_uring: no C compiler") as caught:
            Ring(8)
        assert caught.value.errno == errno.ENOSYS
        assert io_uring.is_available()[0] is False
    finally:
        old()


@needs_ring
def test_a_forked_child_has_no_part_in_the_ring(rings: Ring) -> None:
    def shut_out() -> bool:
        # At once, without a call: a child that never uses the ring keeps nothing of it open.
        left = any("io_uring" in name for name in open_files()) or ring_mappings() > 0
        calls: list[Callable[[], object]] = [
            rings.wait,
            lambda: rings.submit([Submission(NOP)]),
            lambda: rings.register_buffers([]),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="child"):
                call()
        rings.close()
        own = Ring(8)
        works = run(own, Submission(NOP, user_data=9)) == [(9, 0)]
        own.close()
        return works and not left and not any("io_uring" in name for name in open_files()) and ring_mappings() == 0

    assert holds_in_child(shut_out)
    assert run(rings, Submission(NOP, user_data=1)) == [(1, 0)], "the parent's goes on"


@needs_ring
def test_a_fork_in_the_middle_of_a_submit_and_a_wait_does_not_hang_the_child(rings: Ring) -> None:
    stop = threading.Event()
    seen = itertools.count()

    def submit() -> None:
        while not stop.is_set():
            rings.submit([Submission(NOP)] * 8)
        while rings.submit([Submission(NOP, user_data=LAST)]) == 0:
            time.sleep(0.001)

    def wait() -> None:
        while LAST not in (user_data for user_data, _ in rings.wait()):
            next(seen)

    threads = [threading.Thread(target=submit), threading.Thread(target=wait)]
    for thread in threads:
        thread.start()

    def closes() -> bool:
        rings.close()
        return True

    try:
        assert all(holds_in_child(closes, 10) for _ in range(10))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert next(seen)
