"""The simulated accelerator itself: does it show what a device would? Oracles: what CUDA documents, and the CPU."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import simulated_device
from tests.support.scripts import run_code

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

DEVICE = "simulated:0"
N = 1000


def pinned(value: float) -> Tensor:
    return torch.full((N,), value).pin_memory()


def values(device: Tensor) -> Tensor:
    """By a blocking copy."""
    return device.cpu()


# Late copies.


def test_a_pinned_copy_reads_its_source_late() -> None:
    simulated_device.set_delays(1, longest_us=2_000_000)
    seen = set()
    for _ in range(12):
        source = pinned(1.0)
        there = source.to(DEVICE, non_blocking=True)
        source.fill_(2.0)
        seen.add(values(there)[0].item())
    assert 2.0 in seen


def test_blocking_and_pageable_copies_take_their_source_at_once() -> None:
    for _ in range(8):
        source, other = pinned(1.0), torch.full((N,), 1.0)
        there, late = source.to(DEVICE), other.to(DEVICE, non_blocking=True)
        source.fill_(2.0)
        other.fill_(2.0)
        assert values(there).eq(1.0).all()
        assert values(late).eq(1.0).all()


def test_a_pinned_copy_to_the_host_comes_late_and_by_its_event() -> None:
    simulated_device.set_delays(1, longest_us=2_000_000)
    there = torch.full((N,), 3.0, device=DEVICE)
    was_late = False
    for _ in range(12):
        here = pinned(0.0)
        here.copy_(there, non_blocking=True)
        event = torch.Event(DEVICE)
        event.record()
        was_late = was_late or here[0].item() == 0.0
        event.synchronize()
        assert here.eq(3.0).all()
    assert was_late


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_sees_old_values(waits: bool) -> None:
    simulated_device.set_delays(1, longest_us=2_000_000)
    copies = torch.Stream(DEVICE)
    wrong = 0
    for _ in range(12):
        there = torch.zeros(N, device=DEVICE)
        torch.accelerator.synchronize()
        source = pinned(1.0)
        with copies:
            there.copy_(source, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(copies)
        wrong += int(not values(there + 0).eq(1.0).all())
        torch.accelerator.synchronize()
    assert (wrong == 0) is waits
    assert (not simulated_device.races()) is waits


# Races, by vector clocks: without delays, so that values are right.


def on_streams(order: bool, first: Any, second: Any) -> list[str]:
    """What is found when `first` runs on one stream and `second` on another."""
    simulated_device.set_delays(0, longest_us=0)
    one, two = torch.Stream(DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    simulated_device.races()
    with one:
        first()
    if order:
        two.wait_event(one.record_event())
    with two:
        second()
    found = simulated_device.races()
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_a_write_after_a_read_of_another_stream_is_a_race(ordered: bool) -> None:
    shared, source = torch.ones(N, device=DEVICE), pinned(2.0)
    found = on_streams(ordered, lambda: shared.sum(), lambda: shared.copy_(source, non_blocking=True))
    assert bool(found) is not ordered
    assert ordered or "reads" in found[0]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_read_of_what_another_stream_writes_is_a_race(ordered: bool) -> None:
    shared = torch.ones(N, device=DEVICE)
    found = on_streams(ordered, lambda: shared.add_(1), lambda: shared.sum())
    assert bool(found) is not ordered


def test_parts_of_one_tensor_do_not_race() -> None:
    shared = torch.ones(N, device=DEVICE)
    assert not on_streams(False, lambda: shared[: N // 2].add_(1), lambda: shared[N // 2 :].add_(1))
    assert on_streams(False, lambda: shared[: N // 2 + 1].add_(1), lambda: shared[N // 2 :].add_(1))


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_while_another_stream_uses_it_is_a_race(recorded: bool) -> None:
    simulated_device.set_delays(0, longest_us=0)
    side = torch.Stream(DEVICE)
    shared = torch.ones(N, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        shared.sum()
    if recorded:
        shared.record_stream(side)
    del shared
    torch.ones(N, device=DEVICE)
    assert bool(simulated_device.races()) is not recorded


def test_what_the_host_waited_for_is_in_order() -> None:
    one, two = torch.Stream(DEVICE), torch.Stream(DEVICE)
    shared = torch.ones(N, device=DEVICE)
    torch.accelerator.synchronize()
    with one:
        shared.add_(1)
    one.record_event().synchronize()
    with two:
        shared.add_(1)
    assert not simulated_device.races()
    two.synchronize()


# Memory.


def test_freed_memory_is_poisoned_in_stream_order() -> None:
    around, source, neighbour = (torch.ones(N, device=DEVICE) for _ in range(3))  # so that it is not joined with others
    torch.accelerator.synchronize()
    address = source.data_ptr()
    doubled = source * 2
    del source
    again = torch.empty(N, device=DEVICE)
    assert again.data_ptr() == address
    assert values(again).isnan().all()
    assert all(values(tensor).eq(value).all() for tensor, value in ((doubled, 2.0), (around, 1.0), (neighbour, 1.0)))


def test_each_stream_has_its_own_pool() -> None:
    side = torch.Stream(DEVICE)
    there = torch.empty(N, device=DEVICE)
    address = there.data_ptr()
    del there
    with side:
        other = torch.empty(N, device=DEVICE)
    assert other.data_ptr() != address
    assert torch.empty(N, device=DEVICE).data_ptr() == address


def test_record_stream_keeps_memory_from_being_reused() -> None:
    simulated_device.set_delays(1, longest_us=2_000_000)
    side = torch.Stream(DEVICE)
    source = torch.ones(N, device=DEVICE)
    here = pinned(0.0)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        here.copy_(source, non_blocking=True)
    source.record_stream(side)
    del source
    junk = [torch.zeros(N, device=DEVICE) for _ in range(4)]
    side.synchronize()
    assert here.eq(1.0).all()
    assert values(junk[0]).eq(0.0).all()
    assert not simulated_device.races()


def test_out_of_memory_is_torchs_error_and_passes() -> None:
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_allocated()
    with simulated_device.memory_limit(used + (64 << 20)):
        there = torch.empty(40 << 20, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(40 << 20, dtype=torch.uint8, device=DEVICE)
        del there
        # Of another size: the cached segment has to be given back first.
        torch.empty(50 << 20, dtype=torch.uint8, device=DEVICE)
        free, total = torch.accelerator.get_memory_info()
        assert total == used + (64 << 20)
        assert free <= 14 << 20
        torch.accelerator.empty_cache()
        assert torch.accelerator.get_memory_info()[0] >= 50 << 20


def test_storages_are_resized() -> None:
    there = torch.arange(N, dtype=torch.float32, device=DEVICE)
    before = torch.accelerator.memory_allocated()
    there.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() < before
    with pytest.raises(RuntimeError, match="of a storage of 0"):
        there + 1
    there.untyped_storage().resize_(4 * N)
    assert values(there).isnan().all()
    there.untyped_storage().resize_(8 * N)
    assert there.fill_(1).sum().item() == N


def test_the_host_cannot_read_it() -> None:
    script = "import ctypes, torch; from tests import simulated_device; simulated_device.load(); "
    script += (
        "x = torch.ones(9, device='simulated'); print(x.sum().item(), flush=True); ctypes.string_at(x.data_ptr(), 1)"
    )
    done = run_code(script)
    assert done.stdout == "9.0\n"
    assert done.returncode == -11


@pytest.mark.slow
def test_the_child_of_a_fork_cannot_use_it() -> None:
    torch.ones(9, device=DEVICE)
    script = (
        "import os, torch; from tests import simulated_device\n"
        "simulated_device.load(); x = torch.ones(9, device='simulated')\n"
        "pid = os.fork()\n"
        "if pid: print(os.waitpid(pid, 0)[1])\n"
        "else:\n"
        "    try: x + 1\n"
        "    except RuntimeError as error: os._exit(7 if 'child of a fork' in str(error) else 8)\n"
    )
    done = run_code(script)
    assert done.stdout == f"{7 << 8}\n", done.stderr


# Page-locked memory.


def test_registered_memory_is_pinned() -> None:
    torch.zeros(1).pin_memory()  # to torch no memory is pinned before the device was asked for some
    runtime: Any = torch.get_device_module(DEVICE).cudart()
    here = torch.zeros(N)
    assert not here.is_pinned()
    assert runtime.cudaHostRegister(here.data_ptr(), here.nbytes, 0) == 0
    assert here.is_pinned()
    assert runtime.cudaHostRegister(here.data_ptr(), here.nbytes, 0) == 712
    assert runtime.cudaHostUnregister(here.data_ptr()) == 0
    assert not here.is_pinned()
    assert runtime.cudaHostUnregister(here.data_ptr()) == 713
    with pytest.raises(RuntimeError, match="error 713, of an earlier call"):  # the next launch, as on CUDA
        torch.ones(1, device=DEVICE)
    torch.ones(1, device=DEVICE)


def test_pinning_can_fail() -> None:
    runtime: Any = torch.get_device_module(DEVICE).cudart()
    here = torch.zeros(N)
    simulated_device.refuse_pinning(2)
    assert runtime.cudaHostRegister(here.data_ptr(), here.nbytes, 0) == 2
    with pytest.raises(RuntimeError, match="error 2, of an earlier call"):
        torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="page-locked"):
        torch.zeros(N, pin_memory=True)
    assert torch.zeros(N, pin_memory=True).is_pinned()


def test_pinned_memory_is_rounded_up_to_powers_of_two() -> None:
    with simulated_device.counted() as counts:
        here = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
    assert counts["pinned_bytes"] == 8 << 20
    assert here.is_pinned()


# Counters.


def test_counters() -> None:
    here, there = pinned(1.0), torch.zeros(N, device=DEVICE)
    with simulated_device.counted() as counts:
        there.copy_(here, non_blocking=True)
        there.copy_(torch.ones(N), non_blocking=True)
        torch.Event(DEVICE).record()
        event = torch.accelerator.current_stream().record_event()
        event.synchronize()
        torch.accelerator.synchronize()
        there.add_(1)
        there.sum().item()
        here.copy_(there)
    wanted = {"to_device": 2, "pageable_non_blocking": 1, "event_waits": 1, "device_waits": 1, "kernels": 3}
    wanted |= {"to_host": 1, "to_host_bytes": 4 * N, "blocking_copies": 2, "allocations": 1}
    assert counts | wanted == counts


# Kernels.


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.LayerNorm(24),
        torch.nn.Sequential(torch.nn.Unflatten(1, (4, 6)), torch.nn.GroupNorm(2, 4)),
        torch.nn.Sequential(torch.nn.Unflatten(1, (1, 4, 6)), torch.nn.Conv2d(1, 3, 3, padding=1)),
        torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.GELU(), torch.nn.Linear(24, 5), torch.nn.Softmax(1)),
        torch.nn.TransformerEncoderLayer(24, 2, 32, dropout=0.0, batch_first=True),
    ],
    ids=["layer norm", "group norm", "convolution", "mlp", "transformer"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_have_the_bits_of_the_cpu(module: torch.nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    found = []
    x = torch.randn(6, 24)
    for device in ("cpu", DEVICE):
        copy = deepcopy(module).to(dtype).to(device)
        y = x.to(dtype).to(device).detach().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = copy(y)
            out.float().square().sum().backward()
        assert out.device == y.device
        found.append([out, y.grad, *(p.grad for p in copy.parameters())])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there.cpu())
    assert not simulated_device.races()


def test_tensors_of_the_cpu_are_refused_beside_those_of_the_device() -> None:
    there = torch.ones(4, 4, device=DEVICE)
    assert (there + torch.ones(())).sum().item() == 32.0
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        there @ torch.ones(4, 4)


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device=DEVICE)
    module: Any = torch.get_device_module(DEVICE)
    states = module.get_rng_state_all()
    second = torch.rand(4, device=DEVICE)
    module.set_rng_state_all(states)
    assert torch.equal(values(torch.rand(4, device=DEVICE)), values(second))
    assert not torch.equal(values(first), values(second))
    torch.manual_seed(5)
    assert torch.equal(values(torch.rand(4, device=DEVICE)), values(first))


def test_two_threads_may_use_it() -> None:
    results: dict[int, bool] = {}

    def work(number: int) -> None:
        x = torch.full((N,), float(number), device=DEVICE)
        for _ in range(50):
            x = x + 1
        results[number] = bool(values(x).eq(number + 50).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}


def test_the_host_spends_virtual_time() -> None:
    """As plain arithmetic has it. A product takes a second."""
    costs = simulated_device.HostCosts(launch_s=1e-3, event_s=1e-4, wake_s=1e-2, hook_s=0.5)
    x, other = torch.ones(8, 8, device=DEVICE), torch.Stream(DEVICE)
    weight = torch.ones(8, 8, device=DEVICE, requires_grad=True)
    passed = []

    def spent() -> float:
        passed.append(simulated_device.host_s())
        return passed[-1] - (passed[-2] if len(passed) > 1 else 0.0)

    with simulated_device.virtual_time(1e9, 1.0, host=costs):
        for _ in range(10):
            x.add_(1)
        assert spent() == pytest.approx(10e-3)
        torch.mm(x, x)
        event = torch.accelerator.current_stream().record_event()
        other.wait_event(event)
        assert not event.query()
        assert spent() == pytest.approx(1e-3 + 3 * 1e-4)
        event.synchronize()
        assert spent() == pytest.approx(11e-3 + 1 + 1e-2 - 11.3e-3)  # it began after its launch
        event.synchronize()
        assert spent() == 0
        weight.register_post_accumulate_grad_hook(lambda leaf: None)
        loss = (weight * 2).sum()
        with simulated_device.counted() as counts:
            spent()
            loss.backward()
        assert spent() == pytest.approx(0.5 + 1e-3 * (counts["kernels"] + counts["on_device"]))
        waits = [span for span in simulated_device.spans() if span.stream < 0]
    assert [(span.stream, span.name) for span in waits] == [(-1, "wait")]
    assert waits[0].end_s - waits[0].start_s == pytest.approx(1 - 0.3e-3)
