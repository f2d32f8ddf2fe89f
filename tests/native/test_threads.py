"""The thread pool: nothing lost, nothing allocated, forks survived; and how many threads there are."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from offload import native
from offload.errors import ClosedError
from offload.native import threads
from offload.planner import machine
from tests.support.interrupted import interrupt, interrupted_at, thrown_in
from tests.support.scripts import run_code

from .bits import assert_same_bits, kernels

VARIANTS = native.available_variants()
SCALARS = native.AdamScalars.at(step=3, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def fresh(n: int) -> tuple[torch.Tensor, ...]:
    ones = torch.ones(n)
    out = torch.zeros(n, dtype=torch.bfloat16)
    return ones.clone(), ones * 0.1, ones * 0.01, torch.linspace(-1, 1, n).to(torch.bfloat16), out


def split_calls(mine: native.Kernels, tensors: tuple[torch.Tensor, ...], low: torch.Tensor) -> None:
    master, exp_avg, exp_avg_sq, grad, param = tensors
    mine.call(native.SPLIT, master, low, exp_avg_sq, param)
    mine.call(native.ADAM_SPLIT, param, low, exp_avg, exp_avg_sq, grad, param, scalars=SCALARS)
    mine.call(native.JOIN, param, low, exp_avg_sq, master, exp_avg_sq)


@every_variant
def test_calls_from_several_threads_at_once_do_not_mix(variant: str) -> None:
    mine = kernels(variant, 2)
    wanted = fresh(200_003)
    mine.call(native.ADAM, *wanted, scalars=SCALARS)
    results = [fresh(200_003) for _ in range(4)]
    callers = [
        threading.Thread(target=partial(mine.call, native.ADAM, *tensors, scalars=SCALARS)) for tensors in results
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for tensors in results:
        for x, y in zip(tensors, wanted, strict=True):
            assert_same_bits(x, y)


@every_variant
def test_a_warm_call_allocates_the_same_whatever_the_size(variant: str) -> None:
    mine = kernels(variant, 2)
    peaks = []
    for n in (140_000, 1_400_000):
        tensors, sums = fresh(n), torch.zeros(native.sum_blocks(0, n), dtype=torch.float64)
        low = torch.zeros(n, dtype=torch.int16)

        def step(
            tensors: tuple[torch.Tensor, ...] = tensors, sums: torch.Tensor = sums, low: torch.Tensor = low
        ) -> None:
            mine.call(native.ADAM, *tensors, scalars=SCALARS)
            mine.call(native.SUM_SQUARES, tensors[3], sums)
            mine.call(native.ACCUMULATE, tensors[0], tensors[3])
            mine.call(native.CAST, tensors[0], tensors[4])
            split_calls(mine, tensors, low)

        # The pool's threads take turns by chance: a few calls make every thread's temporaries.
        for _ in range(5):
            step()
        tracemalloc.start()
        try:
            step()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 8192, f"peak bytes of Python's allocator: {peaks}"


@every_variant
def test_torch_allocates_no_tensor_in_a_warm_call(variant: str) -> None:
    mine, tensors = kernels(variant), fresh(100_003)
    sums = torch.zeros(native.sum_blocks(0, 100_003), dtype=torch.float64)
    low = torch.zeros(100_003, dtype=torch.int16)

    def step() -> None:
        mine.call(native.ADAM, *tensors, scalars=SCALARS)
        mine.call(native.SUM_SQUARES, tensors[3], sums)
        mine.call(native.ACCUMULATE, tensors[0], tensors[3])
        mine.call(native.CAST, tensors[0], tensors[4])
        split_calls(mine, tensors, low)

    step()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    allocated = [event for event in profile.function_events if event.cpu_memory_usage > 0]
    # A scalar operand is wrapped in a tensor of a few bytes.
    assert sum(event.cpu_memory_usage for event in allocated) < 8192, allocated


def test_an_error_in_a_pool_thread_is_raised_by_the_call() -> None:
    def part(low: int, high: int) -> None:
        if low > 0:
            raise ArithmeticError(f"from {low}")

    with pytest.raises(ArithmeticError, match="from"):
        kernels("torch", 2).run([native.Task(part, 0, 1_000_000)])
    kernels("torch", 2).call(native.ACCUMULATE, torch.ones(200_000), torch.ones(200_000))


def test_an_interrupted_call_waits_for_its_threads() -> None:
    ended, begun = [], threading.Barrier(3)

    def part(low: int, high: int) -> None:
        begun.wait(timeout=60)  # a range that nobody has begun is not run any more
        if low == 0:
            raise KeyboardInterrupt
        time.sleep(0.1)
        ended.append(low)

    with pytest.raises(KeyboardInterrupt):
        kernels("torch", 3).run([native.Task(part, 0, 1_000_000)])
    assert len(ended) == 2


def test_a_call_is_not_over_while_a_thread_has_a_range_that_it_has_only_just_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller, is_over, late = threading.current_thread(), threading.Event(), []

    class Slow(deque[threads.Range]):
        def popleft(self) -> threads.Range:
            while threading.current_thread() is caller and len(self) == 1:
                time.sleep(0.001)  # the last one is for the pool's thread
            one = super().popleft()
            if threading.current_thread() is not caller:
                time.sleep(0.1)
            return one

    monkeypatch.setattr(threads, "deque", Slow)
    pool = threads.Pool(1)
    pool.run((lambda low, high: late.append(is_over.is_set()), n, n + 1) for n in range(3))
    is_over.set()
    time.sleep(0.2)
    pool.stop()
    assert late == [False] * 3


@every_variant
def test_kernels_that_run_together_have_the_bits_of_each_by_itself(variant: str) -> None:
    """Some so small that they run while others are drawn, one empty, one of fp32 that gets its master."""
    mine, numels = kernels(variant, 3), [1, 200_003, 65_536, 0, 4095, 400_001, 140_000]
    expected, found = ([fresh(n) for n in numels] for _ in range(2))
    wide = [torch.zeros(140_000) for _ in range(2)]
    for tensors in expected:
        kernels(variant, 1).call(native.ADAM, *tensors, scalars=SCALARS)
    kernels(variant, 1).call(native.CAST, expected[-1][0], wide[0])
    drawn = []

    def tasks() -> Iterator[native.Task]:
        for index, tensors in enumerate(found):
            drawn.append(index)
            out = wide[1] if index == len(found) - 1 else tensors[4]
            yield mine.bind(native.ADAM, *tensors[:4], out)(SCALARS)

    versions = [tensors[0]._version for tensors in found]
    mine.run(tasks())
    assert drawn == list(range(len(numels)))
    assert all(tensors[0]._version > before for tensors, before in zip(found, versions, strict=True))
    for one, other in zip(expected[:-1], found[:-1], strict=True):
        for x, y in zip(one, other, strict=True):
            assert_same_bits(x, y)
    assert_same_bits(*wide)


def test_what_the_caller_fails_to_draw_ends_the_call_after_what_has_begun() -> None:
    ended = []

    def slow(low: int, high: int) -> None:
        time.sleep(0.05)
        ended.append(low)

    def tasks() -> Iterator[native.Task]:
        yield native.Task(slow, 0, 1_000_000)
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        kernels("torch", 3).run(tasks())
    assert len(ended) == 3


def test_threads_that_still_work_are_waited_for_when_sigterm_ends_the_process() -> None:
    ended = []

    def part(low: int, high: int) -> None:
        if low > 0:
            time.sleep(0.3)
            ended.append(low)

    def terminate(number: int, frame: object) -> None:
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
    try:
        with pytest.raises(SystemExit):  # noqa: PT012
            timer.start()
            kernels("torch", 3).run([native.Task(part, 0, 1_000_000)])
        assert len(ended) == 2
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", [interrupt, thrown_in])
def test_an_interrupt_at_any_instruction_leaves_no_thread_at_work(by: Callable[[], None]) -> None:
    pool, instruction, is_over = threads.Pool(2), 1, False
    while not is_over:
        at_work: list[int] = []
        ran: list[int] = []

        def part(low: int, high: int, at_work: list[int] = at_work, ran: list[int] = ran) -> None:
            at_work.append(low)
            ran.append(low)
            at_work.remove(low)

        with contextlib.suppress(KeyboardInterrupt), interrupted_at(instruction, by) as left:
            pool.run((part, low, low + 1) for low in range(4))
        is_over = left[0] > 0
        assert not at_work
        if by is interrupt and not is_over:
            assert sorted(ran) == sorted(set(ran))
        instruction += 1
    pool.run([(part, 0, 1), (part, 1, 2)])
    pool.stop()


@pytest.mark.parametrize(("cut", "first"), [(64, 0), (65536, 0), (65536, 1234)])
@pytest.mark.parametrize("n", [131_072, 131_073, 200_003, 1_000_000])
def test_parts_cover_the_range_once_and_split_at_the_given_places(n: int, cut: int, first: int) -> None:
    parts: list[tuple[int, int]] = []
    kernels("torch", 3).run([native.Task(lambda low, high: parts.append((low, high)), first, first + n, cut)])
    parts.sort()
    assert parts[0][0] == first
    assert parts[-1][1] == first + n
    assert len(parts) > 1
    for (_, high), (low, _) in itertools.pairwise(parts):
        assert high == low
        assert low % cut == 0


def test_small_ranges_run_on_the_calling_thread() -> None:
    used = []
    kernels("torch", 3).run([native.Task(lambda low, high: used.append(threading.current_thread()), 0, 65_536)])
    assert used == [threading.current_thread()]


def test_closed_kernels_say_so_and_their_threads_end() -> None:
    mine = native.load(2, "torch")
    before = threading.active_count()
    mine.call(native.ACCUMULATE, torch.ones(200_000), torch.ones(200_000))
    assert threading.active_count() == before + 1
    mine.close()
    mine.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    with pytest.raises(ClosedError):
        mine.call(native.ACCUMULATE, torch.ones(2), torch.ones(2))


EXIT = """
import sys, torch
from offload import native
mine = [native.load(3, variant) for variant in native.available_variants()]
x = torch.ones(300_000)
sums = torch.zeros(native.sum_blocks(0, 300_000), dtype=torch.float64)
for one in mine:
    one.call(native.SUM_SQUARES, x, sums)
"""


@pytest.mark.slow
def test_a_process_ends_cleanly_with_its_pools_open() -> None:
    for _ in range(3):
        done = run_code(EXIT, limit_s=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_kernels_let_go_end_their_threads() -> None:
    before = threading.active_count()
    mine = native.load(3, "torch")
    mine.call(native.ACCUMULATE, torch.ones(200_000), torch.ones(200_000))
    del mine
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


FORK = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")  # Python warns of forks beside threads from 3.12 on; this one is meant
from offload import native
mine = native.load(2, sys.argv[1])
x, one = torch.ones(300_000), torch.ones(300_000)
mine.call(native.ACCUMULATE, x, one)
child = os.fork()
if child == 0:
    mine.call(native.ACCUMULATE, x, one)
    # By NumPy: torch's own threads do not survive a fork.
    os._exit(0 if (x.numpy() == 3).all() else 3)
_, status = os.waitpid(child, 0)
mine.call(native.ACCUMULATE, x, one)
sys.exit(os.waitstatus_to_exitcode(status) or (0 if (x.numpy() == 3).all() else 4))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("variant", [VARIANTS[0], "torch"])
def test_a_forked_child_can_call_and_does_not_hang(variant: str) -> None:
    done = run_code(FORK, variant, limit_s=60)
    assert done.returncode == 0, done.stderr


def test_usable_cpus_follow_affinity_and_quota_whoever_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(threads, "_cgroup_quotas", lambda *_: [])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert native.usable_cpus() == 12
    monkeypatch.setattr(threads, "_cgroup_quotas", lambda *_: [6.5, 8.0])
    assert native.usable_cpus() == 6
    # What ranks take of it is divided where the number of threads is chosen, and only there.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert native.usable_cpus() == 6


def test_ranks_share_the_cpus_of_their_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(threads, "_cgroup_quotas", lambda *_: [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine.kernel_threads(None, ranks_on_node=8, direct=True) == 8
    assert machine.kernel_threads(3, ranks_on_node=8, direct=True) == 3
    assert machine.kernel_threads(None, ranks_on_node=100, direct=True) == 1


def test_threads_that_launch_kernels_of_a_device_keep_two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(threads, "_cgroup_quotas", lambda *_: [])
    assert machine.kernel_threads(None, ranks_on_node=1, direct=False) == 14
    assert machine.kernel_threads(None, ranks_on_node=2, direct=False) == 6
    assert machine.kernel_threads(None, ranks_on_node=16, direct=False) == 1
    assert machine.kernel_threads(16, ranks_on_node=1, direct=False) == 16


def test_quota_of_cgroup_v2_is_read_up_to_the_root(tmp_path: Path) -> None:
    inner = tmp_path / "fs" / "a" / "b"
    inner.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert threads._cgroup_quotas(membership, tmp_path / "fs") == []
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert threads._cgroup_quotas(membership, tmp_path / "fs") == [1.5]


def test_quota_of_a_cgroup_whose_name_is_no_text_is_read(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_bytes(b"0::/tr\xe4ner\n")
    folder = tmp_path / "fs" / os.fsdecode(b"tr\xe4ner")
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("150000 100000")
    assert threads._cgroup_quotas(membership, tmp_path / "fs") == [1.5]


def test_quota_of_cgroup_v1_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "fs" / "cpu" / "job"
    folder.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads._cgroup_quotas(membership, tmp_path / "fs") == []
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert threads._cgroup_quotas(membership, tmp_path / "fs") == [3.0]


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert threads._cgroup_quotas(tmp_path / "missing", tmp_path) == []
