"""How long a step takes in virtual time, beside the ideal schedule on the same compute, link and CPU.

Copies take their bytes, matrix products and each unit's Adam a fixed time, everything else nothing. The dependencies
are those that the run makes: streams, events, what the host waits for, and the order in which its threads work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload import OffloadZero, Tuning
from offload.grads.local import LocalGradients
from offload.io.threads import Workers
from offload.optim.adam import Step
from offload.ranks.torch_distributed import _GroupWork
from tests import simulated_device
from tests.simulated_device import process_group
from tests.support.ranks import World

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not simulated_device.is_wanted(), reason="needs a process of its own (make test-device) and a C++ compiler"
    ),
]

UNITS, WIDTH = 12, 32
PRODUCT_S = 1.0
COPY_S, ADAM_S = 0.8, 0.5
"""Of a unit, each way, whose forward is one product and whose backward is two."""
CLOCKS = {"offload-gradients": 1, "offload-step": 2}
"""Of the workers, by name; all other threads are one after the other, and have clock 0."""


@contextmanager
def workers_have_clocks() -> Iterator[None]:
    """A task of a worker begins when it was submitted; who waits for it goes on when it has ended."""
    run, wait_for, drain = Step._run, Step._wait_for, LocalGradients.drain
    ends: dict[Future[Any], float] = {}

    def submit_clocked(self: Workers, work: Callable[..., Any], *args: Any) -> Future[Any]:
        began = simulated_device.host_s()
        future: Future[Any] = Future()

        def task() -> Any:
            clock = CLOCKS.get(threading.current_thread().name.rpartition("_")[0], 0)
            simulated_device.use_clock(clock)
            simulated_device.host_until(began, clock)
            result = work(*args)
            ends[future] = simulated_device.host_s(clock)
            return result

        self.put(future, task)
        return future

    def run_clocked(self: Step, work: Any) -> None:
        run(self, work)
        clock = CLOCKS["offload-step"]
        simulated_device.host_until(simulated_device.host_s(clock) + ADAM_S, clock)

    def wait_for_clocked(self: Step, done: Future[None], chunk: Any) -> None:
        wait_for(self, done, chunk)
        simulated_device.host_until(ends[done])

    def drain_clocked(self: LocalGradients) -> None:
        drain(self)
        simulated_device.host_until(simulated_device.host_s(CLOCKS["offload-gradients"]))

    def arrives_clocked(self: _GroupWork, deadline: float) -> bool:
        if not isinstance(self._call, process_group.StagedWork):
            return arrives_by(self, deadline)
        self._call.synchronize()
        return True

    arrives_by = _GroupWork.arrives_by
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "submit", submit_clocked)
        patch.setattr(Step, "_run", run_clocked)
        patch.setattr(Step, "_wait_for", wait_for_clocked)
        patch.setattr(LocalGradients, "drain", drain_clocked)
        patch.setattr(_GroupWork, "arrives_by", arrives_clocked)
        yield


def measured(
    options: dict[str, Any], device: str = "simulated:0", copy_s: float = COPY_S, rows: int = 4
) -> tuple[float, list[simulated_device.Span]]:
    """Virtual seconds from one step() to the next, and what ran in them. Args: copy_s: of a whole unit."""
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(UNITS))).to(device)
    nbytes = 2 * (WIDTH * WIDTH + WIDTH)
    x = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=device)
    with workers_have_clocks(), simulated_device.virtual_time(nbytes / copy_s, PRODUCT_S):
        with OffloadZero(model, tier="cpu", tuning=Tuning(chunk="8KiB"), **options) as optimizer:
            ends = []
            for _ in range(4):
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append(simulated_device.host_s())
        return ends[-1] - ends[-2], [one for one in simulated_device.spans() if ends[-2] < one.end_s <= ends[-1]]


def ideal(*, streams: bool) -> float:
    """The same work, each piece as soon as what it needs is there and its resource is free.

    Adam begins when all gradients have come, one unit after the other in the order of the forward; two units have
    memory on the device where parameters stream.
    """
    adam = up = compute = 0.0
    forward_ends: list[float] = []
    for unit in range(UNITS):
        adam += ADAM_S
        up = max(up, adam, forward_ends[unit - 2] if streams and unit > 1 else 0.0) + COPY_S
        compute = max(compute, up) + PRODUCT_S
        forward_ends.append(compute)
    down = 0.0
    left = [*forward_ends[-2:]]  # when the memory of the units before was left
    for number in range(UNITS):
        if streams and number:
            up = max(up, left[-2]) + COPY_S
            compute = max(compute, up)
        # The first unit has nobody to give a gradient of its input to.
        compute += PRODUCT_S if number == UNITS - 1 else 2 * PRODUCT_S
        left.append(compute)
        down = max(down, compute) + COPY_S
    return down


CASES: dict[str, dict[str, Any]] = {"resident": {}, "streamed": {"param_tier": "cpu"}}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_little_more_than_the_ideal_schedule(case: str) -> None:
    found, _ = measured(CASES[case])
    wanted = ideal(streams=case == "streamed")
    assert 0.9 <= found / wanted <= 1.1, (found, wanted)


SHARED_COPY_S = 0.3
"""Of a unit between ranks and link, each way: half of it travels over a rank's own link."""


def ideal_of_two(*, streams: bool) -> float:
    """As `ideal`, for one of two ranks: each has half of a unit's states, and a stream for collectives.

    A collective sends and receives: of an all-gather a half and a whole unit, of a reduction two whole ones. They take
    less than the compute beside them, so only what is before the first unit and after the last one counts. Parameters
    that do not stream are gathered in step(), so that no forward is a collective: all of Adam counts then.
    """
    half, gather, reduce = SHARED_COPY_S / 2, 1.5 * SHARED_COPY_S, 2 * SHARED_COPY_S
    assert half + gather < PRODUCT_S
    assert half + gather + reduce < 2 * PRODUCT_S
    before = ADAM_S + half + gather if streams else UNITS * ADAM_S
    return before + (3 * UNITS - 1) * PRODUCT_S + reduce + half


def measured_with_another(options: dict[str, Any]) -> tuple[float, list[simulated_device.Span]]:
    process_group.register()
    group = dist.new_group(backend=process_group.BACKEND)
    torch.accelerator.set_device_index(dist.get_rank())
    return measured(options | {"process_group": group}, f"simulated:{dist.get_rank()}", SHARED_COPY_S)


SHARED_CASES: dict[str, dict[str, Any]] = {
    "resident, stage 2": {"stage": 2},
    "streamed, stage 3": {"stage": 3, "param_tier": "cpu"},
}


@pytest.mark.parametrize("case", SHARED_CASES)
def test_a_step_of_two_ranks_takes_little_more_than_the_ideal_schedule(case: str) -> None:
    world = World(2)
    try:
        found = world.run(measured_with_another, SHARED_CASES[case])
    finally:
        world.close()
    wanted = ideal_of_two(streams="param_tier" in SHARED_CASES[case])
    steps = [step_s for step_s, _ in found]
    assert all(0.99 <= step_s / wanted <= 1.02 for step_s in steps), (steps, wanted)


@pytest.mark.parametrize("case", CASES)
def test_activations_that_wait_in_ram_delay_a_step_little(case: str) -> None:
    """Against the ideal schedule and each unit's forward once more. What enters a unit takes half as long on the link
    as its parameters. Without copies ahead of their use: 1.09 and 1.26."""
    waits = {"activation_tier": "cpu", "activation_memory": "1MiB"}
    found, spans = measured(CASES[case] | waits, rows=16)
    wanted = ideal(streams=case == "streamed") + UNITS * PRODUCT_S
    copies = [one for one in spans if one.name.startswith("copy")]
    assert len(copies) >= 4 * UNITS - 2  # an activation there and back, a gradient, parameters
    assert 0.9 <= found / wanted <= 1.05, (found, wanted)


def test_a_units_parameters_travel_while_the_one_before_it_computes() -> None:
    _, spans = measured(CASES["streamed"])
    uploads = [one for one in spans if one.name == "copy to device"]
    products = [one for one in spans if one.name in ("aten::mm", "aten::addmm")]
    under = [any(p.start_s < u.end_s and u.start_s < p.end_s for p in products) for u in uploads]
    assert sum(under) > 0.8 * len(under)


def draw(file: Path, runs: dict[str, list[simulated_device.Span]]) -> None:
    """One row a stream, of each run."""
    from offload.cli.plots import new_figure

    figure = new_figure(12, 1.6 * len(runs) + 1)
    axes = figure.subplots(len(runs), 1, squeeze=False)
    for (name, spans), row in zip(runs.items(), axes.flat, strict=True):
        streams = sorted({one.stream for one in spans}, reverse=True)
        for one in spans:
            row.barh(streams.index(one.stream), one.end_s - one.start_s, left=one.start_s, edgecolor="white")
        labels = {one.stream: one.name for one in spans}
        row.set_yticks(range(len(streams)), [labels[stream] for stream in streams])
        row.set_title(name)
    figure.savefig(file)
