"""Gradients that leave a device together come as they were made, whatever waits with them and whenever they go."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadZero
from offload.devices.copies import Copier, DeviceEvent, HostCopier
from offload.grads.local import LocalGradients
from offload.grads.shards import gradient_slot_arrays, open_shards
from offload.grads.staging import STAGING, Staging, regions
from offload.io.threads import Workers
from offload.layout import Layout, ParamSpec, build
from offload.sizes import PAGE_BYTES, SUM_BLOCK
from tests.support.late_copier import CopiedBy, HeldCopier, LateCopier
from tests.support.runs import layout_of, run_of, store_in_ram


@contextmanager
def limits(*, large: int = 1 << 20, staged: int = 1 << 20) -> Iterator[None]:
    """Bytes of a gradient that leaves alone, and of all that leave together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.grads.staging.LARGE_BYTES", large)
        patch.setattr("offload.grads.staging.STAGED_BYTES", staged)
        yield


@contextmanager
def buffer_of(
    layout: Layout, copier: Copier, accumulation: int = 1, *, in_slots: bool = False
) -> Iterator[LocalGradients]:
    options: dict[str, Any] = {"tier": "nvme", "path": ".", "grad_tier": "nvme"} if in_slots else {"tier": "cpu"}
    run = run_of(layout, copier=copier, accumulation=accumulation, **options)
    store = store_in_ram(run, gradient_slot_arrays(layout, accumulation)) if in_slots else None
    buffer = LocalGradients(run, run.choice.grads, open_shards(run, accumulation, store))
    try:
        yield buffer
    finally:
        buffer.close()


EIGHT = layout_of((64, 128, 10, 64) * 2, units=["a"] * 4 + ["b"] * 4)


def made(layout: Layout, param: int, seed: int = 0) -> Tensor:
    spec = layout.specs[param]
    generator = torch.Generator().manual_seed(100 * seed + param)
    return torch.randn(spec.numel, generator=generator).to(spec.dtype)


def come(buffer: LocalGradients, layout: Layout, params: Sequence[int], seed: int = 0) -> None:
    for param in params:
        buffer.accumulate(param, made(layout, param, seed))


def assert_gaps_are_zeros(buffer: LocalGradients, layout: Layout) -> None:
    """Those between parameters, with which kernels compute."""
    for chunk in layout.chunks:
        gaps = buffer.chunk_memory(chunk.index).clone()
        for piece in chunk.pieces:
            gaps[piece.chunk_offset : piece.chunk_offset + piece.numel] = 0
        assert not gaps.count_nonzero()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_a_unit_leave_in_one_copy_when_the_last_is_there(accumulation: int) -> None:
    copier = LateCopier(1)
    with buffer_of(EIGHT, copier, accumulation) as buffer:
        for seed in range(accumulation):
            for so_far, unit in enumerate(((7, 6, 5, 4), (3, 2, 1, 0))):
                come(buffer, EIGHT, unit[:-1], seed)
                assert copier.copies == 2 * seed + so_far
                come(buffer, EIGHT, unit[-1:], seed)
                assert copier.copies == 2 * seed + so_far + 1
        buffer.finalize(range(8))
        for param in range(8):
            total = sum(made(EIGHT, param, seed).float() for seed in range(accumulation))
            assert torch.equal(buffer.values(param).float(), total)
        assert_gaps_are_zeros(buffer, EIGHT)


def test_a_large_gradient_leaves_at_once_and_what_fills_the_region_before_the_next() -> None:
    copier = LateCopier(1)
    with limits(large=128, staged=256 + 256), buffer_of(EIGHT, copier) as buffer:
        come(buffer, EIGHT, [1])
        assert copier.copies == 1
        come(buffer, EIGHT, [0, 2])
        assert copier.copies == 1
        come(buffer, EIGHT, [3])  # no room: 0 leaves, and 2, which is not beside it; then 3, the last of its unit
        assert copier.copies == 4
        buffer.finalize(range(4))
        assert all(torch.equal(buffer.values(param), made(EIGHT, param)) for param in range(4))


def test_a_gradient_between_two_that_leave_stays_what_it_was() -> None:
    copier = LateCopier(1)
    with buffer_of(EIGHT, copier) as buffer:
        come(buffer, EIGHT, [2], seed=1)
        buffer.drain()
        come(buffer, EIGHT, [3, 1, 0])
        assert copier.copies == 3
        buffer.finalize(range(4))
        for param in range(4):
            assert torch.equal(buffer.values(param), made(EIGHT, param, int(param == 2)))


def test_a_gradient_that_comes_again_and_one_of_another_unit_come_after_those_that_wait() -> None:
    copier = LateCopier(1)
    with buffer_of(EIGHT, copier, accumulation=2) as buffer:
        come(buffer, EIGHT, [0, 1])
        come(buffer, EIGHT, [0], seed=1)
        assert copier.copies == 1
        come(buffer, EIGHT, [4])
        assert copier.copies == 2
        buffer.finalize([0, 1, 4])
        assert torch.equal(buffer.values(0), made(EIGHT, 0).float() + made(EIGHT, 0, 1).float())
        assert torch.equal(buffer.values(1), made(EIGHT, 1).float())


def test_a_gradient_that_was_dropped_while_it_waited_does_not_leave() -> None:
    copier = LateCopier(1)
    with buffer_of(EIGHT, copier) as buffer:
        for _ in range(20):
            come(buffer, EIGHT, [0])
            buffer.clear(0)
        come(buffer, EIGHT, [0, 1, 2])
        buffer.clear(1)
        come(buffer, EIGHT, [1], seed=1)
        buffer.finalize([0, 1, 2])
        assert copier.copies == 1
        assert torch.equal(buffer.values(1), made(EIGHT, 1, 1))
        come(buffer, EIGHT, [4])
        buffer.clear_all()
        buffer.finalize([])
        assert copier.copies == 1


def test_a_gradient_of_another_dtype_or_device_leaves_alone() -> None:
    memory = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    staging = Staging(EIGHT, [memory])
    assert staging.takes(0, made(EIGHT, 0))
    assert not staging.takes(0, made(EIGHT, 0).float())
    assert not staging.takes(0, torch.empty(64, dtype=torch.bfloat16, device="meta"))
    assert not Staging(EIGHT, []).takes(0, made(EIGHT, 0))
    assert not Staging(EIGHT, [memory[:64]]).takes(0, made(EIGHT, 0))  # it is larger than the region
    tiled = build([ParamSpec("p", 128, "p", torch.bfloat16, 0, tile=64)], SUM_BLOCK)
    assert not Staging(tiled, [memory]).takes(0, torch.zeros(128, dtype=torch.bfloat16))


def test_the_region_has_room_for_the_unit_with_most_and_no_more_than_is_ever_used() -> None:
    (region,) = regions(EIGHT)
    assert (region.what, region.nbytes, region.kind) == (STAGING, 4 * 256, "grad")
    with limits(staged=512):
        assert [one.nbytes for one in regions(EIGHT)] == [512]
    with limits(large=128):
        assert [one.nbytes for one in regions(EIGHT)] == [3 * 256]
    with limits(large=100):  # of each unit one, which has no others to leave with
        assert regions(EIGHT) == []


class Streams(LateCopier):
    """Attributes: stream: the current one; marked: the streams of the marks."""

    def __init__(self) -> None:
        super().__init__(1)
        self.stream: object = "first"
        self.marked: list[object] = []

    def current(self) -> object:
        return self.stream

    def mark(self, stream: object = None) -> DeviceEvent:
        self.marked.append(stream)
        return super().mark(stream)


def test_gradients_leave_after_the_stream_that_made_them() -> None:
    """Whatever the current one is when they leave."""
    copier = Streams()
    with buffer_of(EIGHT, copier) as buffer:
        come(buffer, EIGHT, [0, 1])
        copier.stream = "second"
        come(buffer, EIGHT, [2])
        copier.stream = "third"
        buffer.drain()
    assert copier.marked == ["first", "second"]


@st.composite
def ways(draw: st.DrawFn) -> tuple[Layout, list[list[int]], int, int]:
    """Parameters of units and dtypes, in which order their gradients come in each micro-batch, and two limits."""
    count = draw(st.integers(1, 8))
    sizes, dtypes = (
        st.sampled_from((1, 7, 64, 65, 200, SUM_BLOCK + 3)),
        st.sampled_from((torch.bfloat16, torch.float32)),
    )
    specs = [
        ParamSpec(f"p{number}", draw(sizes), draw(st.sampled_from("ab")), draw(dtypes), 0) for number in range(count)
    ]
    subsets = st.lists(st.sampled_from(range(count)), unique=True, max_size=count)
    orders = draw(st.lists(subsets, min_size=1, max_size=3))
    return (
        build(specs, SUM_BLOCK),
        orders,
        draw(st.sampled_from((0, 128, 1 << 20))),
        draw(st.sampled_from((300, 1 << 20))),
    )


@pytest.mark.parametrize("in_slots", [False, True], ids=["in RAM", "in slots"])
@settings(max_examples=60, deadline=None)
@given(way=ways(), seed=st.integers(0, 5))
def test_whatever_leaves_together_comes_as_it_was_made(
    in_slots: bool, way: tuple[Layout, list[list[int]], int, int], seed: int
) -> None:
    """Sums over micro-batches, too. The norms are those of a device without memory of its own."""
    layout, orders, large, staged = way
    params = sorted({param for order in orders for param in order})
    norms = []
    for copier in (HostCopier(), LateCopier(seed)):
        with limits(large=large, staged=staged), buffer_of(layout, copier, len(orders), in_slots=in_slots) as buffer:
            for number, order in enumerate(orders):
                come(buffer, layout, order, number)
            buffer.finalize(params)
            norms.append((buffer.norm(params), buffer.norms(params)))
            for param in params:
                grads = [made(layout, param, number) for number, order in enumerate(orders) if param in order]
                total = grads[0] if len(orders) == 1 else reduce(Tensor.add, [grad.float() for grad in grads])
                assert torch.equal(buffer.values(param), total)
            if not in_slots:
                assert_gaps_are_zeros(buffer, layout)
    assert norms[0] == norms[1]


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("goes_on", ["with what came", "anew", "with another backward"])
@pytest.mark.parametrize("at", [1, 2, 6, 11])
def test_an_interrupt_while_gradients_wait_loses_none(
    goes_on: str, at: int, copied_by: CopiedBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain torch, whose hook of the same parameter is interrupted."""
    copied_by(lambda: LateCopier(3))
    torch.manual_seed(2)
    plain = Interrupted()
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    add, left = Staging.add, at

    def interrupted(self: Staging, *args: Any) -> None:
        nonlocal left
        add(self, *args)
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Staging, "add", interrupted)
    with OffloadZero(model, tier="cpu", compute_dtype=torch.float32, accumulation=2) as optimizer:
        with pytest.raises(KeyboardInterrupt):
            model(x).backward()
        came = [name for name, param in model.named_parameters() if param.grad is not None]
        assert len(came) == at
        plain(x).backward()
        for name, param in plain.named_parameters():
            if name not in came:
                param.grad = None
        for one in (model, plain):
            if goes_on == "anew":
                one.zero_grad()
            if goes_on != "with what came":
                one(x).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            held = optimizer.grad(found)
            assert (held is None) == (expected.grad is None)
            assert held is None or torch.equal(held, expected.grad)


class PartlyUsed(nn.Module):
    """A unit whose gradients do not all come, so that those that do wait until somebody asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


@pytest.mark.parametrize("where", ["in the queue", "on the way to the worker"])
def test_an_interrupt_while_the_last_gradients_leave_in_a_call_of_the_optimizer_loses_none(
    where: str, copied_by: CopiedBy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by(lambda: LateCopier(3))
    torch.manual_seed(2)
    plain = PartlyUsed()
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    take, put = Staging.take, Workers.put

    def taken(self: Staging) -> dict[int, Tensor]:
        found = take(self)
        signal.raise_signal(signal.SIGINT)
        return found

    def handed(self: Workers, *call: Any, **options: Any) -> None:
        put(self, *call, **options)
        signal.raise_signal(signal.SIGINT)

    with OffloadZero(model, tier="cpu", compute_dtype=torch.float32) as optimizer:
        model(x).backward()
        with monkeypatch.context() as patch:
            if where == "in the queue":
                patch.setattr(Staging, "take", taken)
            else:
                patch.setattr(Workers, "put", handed)
            with pytest.raises(KeyboardInterrupt):
                optimizer.grad(model.used.weight)
        plain(x).backward()
        for found, expected in zip(model.used.parameters(), plain.used.parameters(), strict=True):
            assert expected.grad is not None
            held = optimizer.grad(found)
            assert held is not None
            assert torch.equal(held, expected.grad)


@pytest.mark.parametrize("drops", ["all", "one"])
@pytest.mark.parametrize("large", [1, 1 << 20])
def test_a_gradient_that_was_dropped_on_its_way_is_not_taken_for_the_next(drops: str, large: int) -> None:
    """Nor does it come over the next one."""
    layout, copier = layout_of((64, 128)), HeldCopier()
    with limits(large=large), buffer_of(layout, copier) as buffer:
        come(buffer, layout, [1, 0])
        sent = len(copier.gates)
        letting_go = threading.Timer(0.1, copier.let_go)
        letting_go.start()
        if drops == "all":
            buffer.clear_all()
        else:
            buffer.clear(1)
            buffer.clear(0)
        assert [buffer.generation(param) for param in (0, 1)] == [None, None]
        come(buffer, layout, [1, 0], seed=1)
        letting_go.join()
        assert len(copier.gates) == 2 * sent
        time.sleep(0.05)  # what is left of the first ones would have come by now
        assert [buffer.generation(param) for param in (0, 1)] == [None, None]
        copier.let_go()
        buffer.finalize([0, 1])
        assert None not in [buffer.generation(param) for param in (0, 1)]
        for param in (0, 1):
            assert torch.equal(buffer.values(param), made(layout, param, seed=1))
