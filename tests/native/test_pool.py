"""The C library's threads: each piece once, nothing at work afterwards, no thread left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from offload import native
from offload.errors import BudgetError
from offload.native.library import open_library
from offload.native.pool import LibraryPool, LibraryWork, Piecewise
from tests.support.interrupted import interrupt, interrupted_at, thrown_in

from .bits import assert_same_bits, kernels
from .test_threads import SCALARS, fresh

LIBRARY, REASON = open_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=str(REASON))
_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)  # kernels.h


class Called(LibraryWork):
    """A kernel that is a function of Python, called with the range."""

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self.kept = _KERNEL(lambda tensors, types, first, n, scalars: function(first, first + n))
        address = ctypes.cast(self.kept, ctypes.c_void_p).value
        assert address is not None
        super().__init__(self.kept, address, b"", b"", None)


def new_pool(workers: int) -> LibraryPool:
    assert LIBRARY is not None
    return LibraryPool(LIBRARY, workers)


def kernel_threads() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("offload-kernel")


def wait_for_kernel_threads(count: int, seconds: float = 10) -> int:
    deadline = time.monotonic() + seconds
    while (found := kernel_threads()) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(("cut", "first"), [(64, 0), (65536, 0), (65536, 1234)])
@pytest.mark.parametrize("n", [131_072, 131_073, 200_003, 1_000_000, 12_345_678])
def test_pieces_cover_the_range_once_and_split_at_the_given_places(n: int, cut: int, first: int) -> None:
    parts: list[tuple[int, int]] = []
    mine = kernels(native.available_variants()[0], 3)
    mine.run([native.Task(Called(lambda low, high: parts.append((low, high))), first, first + n, cut)])
    parts.sort()
    assert parts[0][0] == first
    assert parts[-1][1] == first + n
    assert len(parts) > 1
    for (_, high), (low, _) in itertools.pairwise(parts):
        assert high == low
        assert low % cut == 0


def test_many_callers_on_many_threads_have_the_bits_of_one_thread() -> None:
    mine, numels = native.load(6), [300_007, 131_072, 1_000_003]
    wanted = [fresh(n) for n in numels]
    for tensors in wanted:
        native.load(1).call(native.ADAM, *tensors, scalars=SCALARS)
    found = [fresh(n) for _ in range(8) for n in numels]

    def call(number: int) -> None:
        for tensors in found[3 * number : 3 * number + 3]:
            mine.call(native.ADAM, *tensors, scalars=SCALARS)

    callers = [threading.Thread(target=partial(call, number)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    mine.close()
    for number, tensors in enumerate(found):
        for x, y in zip(tensors, wanted[number % 3], strict=True):
            assert_same_bits(x, y)


def test_a_call_is_drawn_while_the_one_before_it_runs() -> None:
    is_drawn, was_drawn = threading.Event(), []

    def calls() -> Iterator[Piecewise]:
        yield Called(lambda low, high: was_drawn.append(is_drawn.wait(10))), 0, 1, 64
        is_drawn.set()
        yield Called(lambda low, high: None), 0, 1, 64

    new_pool(1).run(calls())
    assert was_drawn == [True]


def test_what_the_caller_fails_to_draw_ends_the_call_after_what_has_begun() -> None:
    ended = []

    def slow(low: int, high: int) -> None:
        time.sleep(0.1)
        ended.append(low)

    def calls() -> Iterator[Piecewise]:
        yield Called(slow), 0, 192, 64
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        new_pool(2).run(calls())
    assert sorted(ended) == [0, 64, 128]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", [interrupt, thrown_in])
def test_an_interrupt_at_any_instruction_leaves_no_thread_at_work(by: Callable[[], None]) -> None:
    pool, instruction, is_over = new_pool(2), 1, False
    at_work: list[int] = []

    def part(low: int, high: int) -> None:
        at_work.append(low)
        time.sleep(0.001)
        at_work.remove(low)

    works = [Called(part) for _ in range(3)]
    while not is_over:
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(instruction, by) as left:
            pool.run((work, 0, 256, 64) for work in works)
        is_over = left[0] > 0
        assert not at_work
        instruction += 1
    assert instruction > 10


def test_threads_end_when_they_are_told_to_and_when_nobody_needs_them() -> None:
    gc.collect()
    before = kernel_threads()
    while (now := wait_for_kernel_threads(0, seconds=0.2)) != before:  # those of other tests that end
        before = now
    mine = native.load(4)
    mine.start()
    assert wait_for_kernel_threads(before + 3) == before + 3
    mine.close()
    assert wait_for_kernel_threads(before) == before
    pool = new_pool(2)
    assert wait_for_kernel_threads(before + 2) == before + 2
    del pool
    gc.collect()
    assert wait_for_kernel_threads(before) == before


def test_a_call_of_a_closed_pool_runs_in_its_caller() -> None:
    pool, used = new_pool(2), []
    pool.stop()
    pool.run([(Called(lambda low, high: used.append(threading.current_thread())), 0, 256, 64)])
    assert used == [threading.current_thread()] * 4


def test_threads_that_the_system_refuses_are_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def offload_pool_open(self, workers: int, handle: object) -> int:
            return -11

    before = kernel_threads()
    with pytest.raises(BudgetError, match=r"refuses 3 threads .*Tuning\(threads") as raised:
        LibraryPool(Refusing(), 3)  # type: ignore[arg-type]
    assert (raised.value.needed, raised.value.option) == (3, "threads")
    assert kernel_threads() == before


def test_a_call_enters_the_library_twice_whatever_its_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, entered = native.load(3), []
    run = LibraryPool._run

    def counted(self: LibraryPool, *arguments: object) -> None:
        entered.append(arguments)
        run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LibraryPool, "_run", counted)
    for n in (200_000, 20_000_000):
        entered.clear()
        mine.call(native.CAST, torch.ones(n), torch.zeros(n))
        assert len(entered) <= 2
    mine.close()
