"""What a run says of its own speed: seconds predicted before it begins, and measured ones beside them."""

from __future__ import annotations

import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace as replace_struct
from torch import nn

from offload import OffloadZero, Tuning
from offload.devices.copies import accelerator, device_name
from offload.io import select
from offload.io.select import Settings
from offload.planner import prediction, rates
from offload.planner.explain import plan_of
from offload.planner.measured import Here
from offload.planner.prediction import Prediction
from offload.planner.rates import HostRates, Rate, Rates
from offload.planner.simulate import Iteration, simulate
from offload.planner.simulate.speeds import DriveSpeed, LinkSpeed, Passes, Speeds
from offload.planner.simulate.what_if import passes_of
from offload.planner.verdict import Work
from tests.support.beside import often_switching
from tests.support.disks import on_disk
from tests.support.faulty_engine import FaultyEngine

WIDTH, WORDS = 32, 50
FLOPS, STEPPED, DISK = 2e9, 1e8, 1e9


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h)
        return h


NUMEL = WORDS * WIDTH + 3 * WIDTH * (WIDTH + 1)


def measured(folder: Path, *, flops: float = FLOPS) -> None:
    """As `offload probe` writes it down."""
    steps = {"adamw, fp32": Rate.of([STEPPED])}
    rates.remember(Rates(device_name(accelerator()), 1, Rate.of([1e12]), {"bf16": Rate.of([flops])}, steps))
    select.remember(folder, Settings("auto", 1 << 20, 4, DISK, DISK, DISK))


def run(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Trains with micro-batches of 2 x 5 tokens, and returns what `stats()` says."""
    model = Words()
    given: dict[str, Any] = {"tier": "cpu", "tuning": Tuning(chunk="4KiB", threads=1)} | options
    with OffloadZero(model, **given) as optimizer:
        for _ in range(steps):
            for _ in range(given.get("accumulation", 1)):
                mask = torch.ones(3, 100, dtype=torch.bool)
                model(torch.arange(10).view(2, 5), mask=mask).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.zeros(7, 7, dtype=torch.long))  # counts for nothing
        return optimizer.stats()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_iteration_is_predicted_by_the_tokens_that_the_model_is_given(
    accumulation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 FLOP a parameter and token, and the kernels beside, on a CPU."""
    measured(tmp_path)
    found = run(tmp_path, 2, accumulation=accumulation)
    moving = NUMEL / STEPPED
    assert found["predicted_iteration_s"] == pytest.approx(accumulation * 6 * NUMEL * 10 / FLOPS + moving, rel=0.02)
    line = capsys.readouterr().err
    said = re.search(r"a step moves this in (\S+) s \(predicted\), as long as (\d+) tokens a micro-batch compute", line)
    assert said is not None
    assert float(said[1]) == pytest.approx(moving, rel=0.02)
    assert int(said[2]) == round(moving * FLOPS / (accumulation * 6 * NUMEL))
    assert line.count("\n") == 1


def test_chunks_that_stream_take_what_python_takes(tmp_path: Path) -> None:
    """A second for each, beside which all else is next to nothing."""
    measured(tmp_path)
    known = rates.recall(device_name(accelerator()))
    assert known is not None
    rates.remember(replace_struct(known, host=HostRates(Rate.of([7.0]), Rate.of([1.0]))))
    options: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "run", "commit_every": None}
    planned = plan_of(Words(), direct=accelerator() is None, tuning=Tuning(chunk="4KiB", threads=1), **options)
    least = planned.cpu_memory_for(0.0)
    chunks = len(planned.with_memory(least).place().states.streamed)
    assert chunks > 2
    found = run(tmp_path, 2, cpu_memory=least, **options)
    assert found["predicted_iteration_s"] == pytest.approx(chunks, rel=0.02)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("sizes", "tokens"), [((2, 5, WIDTH), 10), ((2, 3, 4, WIDTH), None)], ids=["vectors", "images"]
)
def test_classes_are_no_tokens_and_patches_of_images_are_not_known(
    sizes: tuple[int, ...], tokens: int | None, tmp_path: Path
) -> None:
    measured(tmp_path, flops=1e6)
    model = Patches()
    with OffloadZero(model, tier="cpu", tuning=Tuning(chunk="4KiB", threads=1)) as optimizer:
        model(torch.ones(sizes), torch.zeros(sizes[0], dtype=torch.long)).float().sum().backward()
        optimizer.step()
        predicted = optimizer.stats()["predicted_iteration_s"]
    if tokens is None:
        assert math.isnan(predicted)
    else:
        assert predicted == pytest.approx(6 * 3 * WIDTH * (WIDTH + 1) * tokens / 1e6, rel=0.02)


def test_rare_commits_are_in_no_median(tmp_path: Path) -> None:
    """A commit writes all states, of which an iteration moves none."""
    measured(tmp_path, flops=1e12)
    select.remember(tmp_path, Settings("auto", 1 << 20, 4, 1e6, 1e6, 1e6))
    found = [
        run(tmp_path, 2, tier="nvme", path=tmp_path / f"{every}", commit_every=every)["predicted_iteration_s"]
        for every in (1, 10, 1000)
    ]
    assert found[1] == found[2] < found[0]


def test_without_a_probe_nothing_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, 6)
    assert math.isnan(found["predicted_iteration_s"])
    assert found["iteration_s"] > 0
    assert "predicted" not in capsys.readouterr().err
    assert math.isnan(run(tmp_path, 1)["iteration_s"])


@pytest.mark.parametrize("faster", [1e-5, None, 1e5], ids=["far less", "as predicted", "far more"])
def test_a_line_says_once_what_differs_most(
    faster: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a machine that computes far faster, or slower, than was measured."""
    measured(tmp_path, flops=FLOPS if faster is None else FLOPS * faster)
    if faster is None:
        monkeypatch.setattr(prediction, "FAR", 1e9)
    found = run(tmp_path, prediction.STEPS + 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "an iteration takes" in line]
    assert len(lines) == (faster is not None)
    if lines:
        assert "What differs most: compute, and the loop itself" in lines[0]
        assert f"{found['predicted_iteration_s']:.3g} s were predicted" in lines[0]


def test_kernels_that_are_slower_than_measured_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"adamw, fp32": Rate.of([1e3])}  # elements a second: 4.7 s a step
    rates.remember(Rates(device_name(accelerator()), 1, Rate.of([1e12]), {"bf16": Rate.of([1e12])}, one))
    run(tmp_path, prediction.STEPS)
    assert "What differs most: optimizer's kernels" in capsys.readouterr().err


def test_a_disk_that_is_slower_than_measured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transfer of its states takes 40 ms on average, and a GB a second was measured."""
    measured(tmp_path, flops=1e12)
    monkeypatch.setattr(prediction, "STEPS", 7)
    began, engine = perf_counter(), FaultyEngine(delay_s=0.04)
    options: dict[str, Any] = {"tier": "nvme", "path": tmp_path / "run", "commit_every": 0}
    tuning = Tuning(chunk="4KiB", threads=1)
    least = plan_of(Words(), direct=True, tuning=tuning, **options).cpu_memory_for(0.0)
    with on_disk(engine=engine):
        found = run(tmp_path, prediction.STEPS, tuning=tuning, cpu_memory=least, **options)
    assert f"What differs most: the disk of {tmp_path / 'run'}" in capsys.readouterr().err
    assert 0.5 * found["wait_nvme_s"] <= found["nvme_busy_s"] <= perf_counter() - began


FAST = Speeds(1e9, 1e12, [DriveSpeed(1e9, 1e9, 1e9)], LinkSpeed(1e9, 1e9, 1e9))
"""The kernels of an iteration take 5 us, the disk about 170 us, the link about 40 us."""
PLENTY = 1e15
"""FLOP/s: compute takes nothing."""


class Told(NamedTuple):
    """What is slower than was measured, and what is said of it.

    Attributes: speeds: of the machine; flops: that it computes a second; probed: that it was measured to compute."""

    said: str
    speeds: Speeds
    flops: float = PLENTY
    probed: float = PLENTY


TOLD = {
    "kernels": Told("optimizer's kernels", replace(FAST, elements_per_s=1e6)),
    "a drive": Told("the disk of {path}", replace(FAST, drives=[DriveSpeed(1e8, 1e8, 1e8)])),
    "the link up": Told("the link to the device", replace(FAST, link=LinkSpeed(1e6, 1e9, 1.001e9 / 2))),
    "the link down": Told("the link to RAM", replace(FAST, link=LinkSpeed(1e9, 1e6, 1.001e9 / 2))),
    "the device": Told("compute, and the loop itself", FAST, flops=1e8),
    "the device, and beside it the link down": Told(  # which takes 8 ms where it was to take 10 us: most is hidden
        "compute, and the loop itself", replace(FAST, link=LinkSpeed(1e9, 1.2e6, 5e8)), flops=2e7, probed=3e7
    ),
}


class _Counted:
    """Stands in for the timeline and the copier of a run of which each iteration is like a simulated one."""

    def __init__(self, one: Iteration) -> None:
        self.iterations = 0
        self._one = one

    def seconds(self, name: str) -> float:
        each = {"adam_s": self._one.busy_s["kernels"], "wait_nvme_s": self._one.parts.get("disk", 0.0)}
        return self.iterations * each[name]

    @property
    def busy_s(self) -> dict[str, float]:
        found = {name: self.iterations * seconds for name, seconds in self._one.busy_s.items()}
        return {name.removeprefix("link: "): seconds for name, seconds in found.items()}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_named_is_what_makes_an_iteration_longer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which something is slower than was measured is simulated in place of a run. What takes longer than
    was predicted beside something that takes longer still is not named."""
    told, path, tokens = TOLD[name], Path("/scratch/run"), torch.zeros(2, 5, dtype=torch.long)
    options: dict[str, Any] = {"tier": "nvme", "param_tier": "cpu", "path": path, "commit_every": None}
    planned = plan_of(Words(), direct=False, tuning=Tuning(chunk="4KiB"), **options)
    planned = planned.with_memory(planned.cpu_memory_for(0.0))
    layout, placement, work = planned.layout, planned.place(), Work(NUMEL, 0, 1, recomputes=False)
    passes = passes_of(layout, replace(work, tokens=tokens.numel()), told.flops)
    truth = simulate(layout, placement, passes, told.speeds)
    assert isinstance(truth, Iteration)
    now, counted, lines = [0.0], _Counted(truth), []
    monkeypatch.setattr(prediction, "perf_counter", lambda: now[0])
    one = Prediction(layout, placement, work, Here(FAST, told.probed), [path])
    one.forward_begins(None, (tokens,), {})
    for _ in range(prediction.STEPS):
        now[0] += truth.seconds
        counted.iterations += 1
        lines.append(one.step_ends(counted, counted))  # type: ignore[arg-type]
    assert not any(lines[:-1])
    assert lines[-1] is not None
    assert f"What differs most: {told.said.format(path=path)}, " in lines[-1]


def test_figures_may_be_asked_in_another_thread_while_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_of(Words(), direct=True, tier="cpu")
    layout, placement, work = planned.layout, planned.place(), Work(NUMEL, 0, 1, recomputes=False)
    truth = simulate(layout, placement, Passes(), FAST)
    assert isinstance(truth, Iteration)
    monkeypatch.setattr(prediction, "STEPS", 1000)
    one = Prediction(layout, placement, work, Here(FAST, PLENTY), [])
    counted, tokens, ended = _Counted(truth), torch.zeros(1, 1, dtype=torch.long), threading.Event()

    def train() -> None:
        try:
            for _ in range(10_000):
                one.forward_begins(None, (tokens,), {})
                one.step_ends(counted, counted)  # type: ignore[arg-type]
        finally:
            ended.set()

    with often_switching(), ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not ended.is_set():
            assert all(math.isnan(seconds) or seconds >= 0 for seconds in one.figures.values())
        training.result()
