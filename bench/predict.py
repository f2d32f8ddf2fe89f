"""How well a simulated iteration predicts a measured one: `python bench/predict.py [--only NAME,...] [--save]`.

For each configuration the machine's rates are measured right before and right after it: the drive's reads, writes and
both at once, through the library's own engine; the optimizer's kernels; a copy in RAM; and plain torch's forward and
backward of the same model and batch. planner/simulate predicts the iteration from their means. Bytes are predicted
without any rate.

Runs of two ranks are in predict_ranks.py.

Drives drift by a factor of two within minutes, and what else runs on the machine changes all of this: only an idle
machine says how good the predictions are.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.limits import Disk
from bench.report import Folder, Json, Out, Report, Save, Table, judged, note, run, scratch
from offload import OffloadZero, Tuning, native
from offload.cli.machine import fast_dtype
from offload.cli.plan_models import optimizers, rules_named
from offload.cli.plots import new_figure
from offload.cli.probing import copies, steps_of
from offload.demo.gpt import GPT, PRESETS, GPTConfig
from offload.planner.explain import Planned, plan_of
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.speeds import DriveSpeed, Passes, Speeds
from offload.sizes import MIB

SIZES = PRESETS | {"46m": GPTConfig(layers=14, width=512, heads=8)}
WARM_UP = 3
MEDIAN_TARGET, WORST_TARGET = 0.08, 0.20
"""Of the errors of seconds."""
DISK_TRANSFERS, DISK_BYTES = 16, 24 * MIB
COMPUTED = 3
"""How often plain torch's passes are timed; the median counts."""
HEADINGS = (
    *("configuration", "parameters", "predicted", "measured", "error", "rates moved", "waits for", "bytes", "counted"),
)
ABOUT = """\
**predicted, measured**: seconds of an iteration; **error**: predicted by measured, less 1; **rates moved**: by how much
the rate that changed most differs after the configuration from before it; **waits for**: what most of the predicted
time is; **bytes**: read and written by drives in an iteration, predicted; **counted**: those of the run."""


@dataclass(frozen=True)
class Configuration:
    """A run. Attributes: size: of the model, by name; tokens: of a micro-batch; share: of the states that RAM has room
    for; None: the options say; optimizer: as `offload plan` names it; options: of OffloadZero."""

    size: str
    tokens: tuple[int, int] = (4, 256)
    share: float | None = None
    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accumulation(self) -> int:
        return int(self.options.get("accumulation", 1))


def _on_nvme(size: str, share: float, optimizer: str = "adamw", **options: Any) -> Configuration:
    return Configuration(
        size, share=share, optimizer=optimizer, options={"tier": "nvme", "commit_every": None} | options
    )


SPLIT = Tuning(chunk="16MiB", split_master=True)
CONFIGURATIONS = {
    "46m, in RAM": Configuration("46m", options={"tier": "cpu"}),
    "46m, half": _on_nvme("46m", 0.5),
    "46m, NVMe": _on_nvme("46m", 0.0),
    "46m, NVMe, more tokens": Configuration("46m", (16, 256), 0.0, options={"tier": "nvme", "commit_every": None}),
    "46m, NVMe, accumulation": _on_nvme("46m", 0.0, accumulation=4),
    "46m, parameters in RAM": Configuration("46m", options={"tier": "cpu", "param_tier": "cpu"}),
    "125m, in RAM": Configuration("125m", options={"tier": "cpu"}),
    "125m, half": _on_nvme("125m", 0.5),
    "125m, NVMe": _on_nvme("125m", 0.0),
    "125m, NVMe, more tokens": Configuration("125m", (16, 256), 0.0, options={"tier": "nvme", "commit_every": None}),
    "125m, NVMe, accumulation": _on_nvme("125m", 0.0, accumulation=4),
    "125m, parameters in RAM": _on_nvme("125m", 0.0, param_tier="cpu"),
    "125m, parameters on NVMe": _on_nvme("125m", 0.0, param_tier="nvme"),
    "125m, parameters on NVMe, accumulation": _on_nvme("125m", 0.0, param_tier="nvme", accumulation=4),
    "125m, split masters": _on_nvme("125m", 0.0, tuning=SPLIT),
    "125m, split masters, half": _on_nvme("125m", 0.5, tuning=SPLIT),
    "125m, 8-bit states": _on_nvme("125m", 0.0, states="8bit"),
    "125m, bf16 states": _on_nvme("125m", 0.0, states="bf16"),
    "125m, SGD": _on_nvme("125m", 0.0, optimizer="sgd-momentum"),
    "125m, commits": _on_nvme("125m", 0.0, commit_every=4),
    "125m, commits, half": _on_nvme("125m", 0.5, commit_every=4),
    "350m, half": _on_nvme("350m", 0.5),
    "350m, NVMe": _on_nvme("350m", 0.0),
    "350m, all on NVMe": _on_nvme("350m", 0.0, param_tier="nvme", grad_tier="nvme"),
    "350m, in RAM": Configuration("350m", options={"tier": "cpu"}),
    "1b, NVMe": _on_nvme("1b", 0.0),
    "125m, activations in RAM": _on_nvme("125m", 0.0, activation_tier="cpu"),
    "125m, steps tried": _on_nvme("125m", 0.0, tuning=Tuning(chunk="16MiB", speculate=True)),
}
"""By name. Where no time is predicted for one, the page says why."""


@dataclass(frozen=True)
class Measured:
    """Rates, measured once. Attributes: forward_s, backward_s: of a micro-batch; others: see `Speeds`."""

    drive: DriveSpeed
    elements_per_s: float
    memory: float
    forward_s: float
    backward_s: float

    @property
    def all(self) -> tuple[float, ...]:
        drive = self.drive
        return drive.read, drive.write, drive.both, self.elements_per_s, self.memory, self.forward_s, self.backward_s

    def mean_with(self, other: Measured) -> Measured:
        means = [statistics.mean(pair) for pair in zip(self.all, other.all, strict=True)]
        return Measured(DriveSpeed(*means[:3]), *means[3:])

    def moved_from(self, other: Measured) -> float:
        """The largest relative difference."""
        return max(abs(one / before - 1) for one, before in zip(self.all, other.all, strict=True))


@dataclass(frozen=True)
class Result:
    """One configuration. Attributes: predicted: None: `reason` says why; measured_s: of an iteration, by round."""

    name: str
    parameters: int
    reason: str = ""
    predicted_s: float = 0.0
    measured_s: Sequence[float] = ()
    rates_moved: float = 0.0
    waits_for: str = ""
    bytes_predicted: float = 0.0
    bytes_counted: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1

    def row(self) -> tuple[str, ...]:
        if self.reason:
            return self.name, f"{self.parameters:,}", *("-",) * 7
        moved = (f"{nbytes / 1e9:.4f} GB" for nbytes in (self.bytes_predicted, self.bytes_counted))
        times = f"{self.predicted_s:.3f} s", f"{self.step_s:.3f} s", f"{self.error:+.1%}", f"{self.rates_moved:.0%}"
        return self.name, f"{self.parameters:,}", *times, self.waits_for, *moved

    def as_json(self) -> dict[str, Any]:
        found = {"name": self.name, "parameters": self.parameters, "not_predicted": self.reason or None}
        if self.reason:
            return found
        return found | {
            "predicted_s": self.predicted_s,
            "measured_s": list(self.measured_s),
            "error": self.error,
            "rates_moved": self.rates_moved,
            "waits_for": self.waits_for,
            "parts_s": dict(self.parts_s),
            "bytes_predicted": self.bytes_predicted,
            "bytes_counted": self.bytes_counted,
        }


class Rates:
    """Measures the rates that a configuration needs. Args: dtype: of compute; kernels: None: on all CPUs."""

    def __init__(
        self, one: Configuration, disk: Disk, dtype: torch.dtype, kernels: native.Kernels | None = None
    ) -> None:
        self._one, self._disk, self._dtype = one, disk, dtype
        states, tuning = one.options.get("states", "fp32"), one.options.get("tuning", Tuning())
        self._kernels = kernels or native.load()
        self._steps = steps_of(self._kernels, one.optimizer, states, split=bool(tuning.split_master))
        self._copies = copies()

    def measure(self) -> Measured:
        nbytes = self._disk.count * self._disk.length
        alone = {way: nbytes / self._disk.run(ways=(way,)) for way in ("read", "write")}
        both = 2 * nbytes / self._disk.run()
        forward_s, backward_s = self._passes()
        return Measured(
            DriveSpeed(alone["read"], alone["write"], both), self._steps(), self._copies(), forward_s, backward_s
        )

    def _passes(self) -> tuple[float, float]:
        """Seconds of plain torch's forward and backward."""
        model = GPT(SIZES[self._one.size], 0).to(self._dtype)
        tokens = batch(self._one, 0)
        times = []
        for _ in range(1 + COMPUTED):
            start = time.perf_counter()
            loss = model(*tokens)[1]
            middle = time.perf_counter()
            loss.backward()
            times.append((middle - start, time.perf_counter() - middle))
            model.zero_grad()
        forward, backward = zip(*times[1:], strict=True)
        return statistics.median(forward), statistics.median(backward)

    def close(self) -> None:
        self._kernels.close()


def batch(one: Configuration, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    words = torch.randint(0, 256, (one.tokens[0], one.tokens[1] + 1), generator=made)
    return words[:, :-1], words[:, 1:]


def passes_of(planned: Planned, forward_s: float, backward_s: float) -> Passes:
    """A micro-batch's passes, shared out over the units by their elements."""
    numels: dict[str, int] = {}
    for spec in planned.layout.specs:
        numels[spec.unit] = numels.get(spec.unit, 0) + spec.numel
    total = sum(numels.values())
    return Passes(*({unit: seconds * n / total for unit, n in numels.items()} for seconds in (forward_s, backward_s)))


def options_of(one: Configuration, folder: Path, dtype: torch.dtype, ranks: int = 1) -> tuple[dict[str, Any], Planned]:
    """What OffloadZero is given, and its plan."""
    given: dict[str, Any] = {"tuning": Tuning(chunk="16MiB"), "compute_dtype": dtype} | dict(one.options)
    if given["tier"] == "nvme":
        given["path"] = folder / "run"
    rules = rules_named(one.optimizer, given.get("states", "fp32"))
    planned = plan_of(GPT(SIZES[one.size], device="meta"), direct=True, rules=rules, ranks=ranks, **given)
    if one.share is not None:
        planned = planned.with_memory(planned.cpu_memory_for(one.share))
        given["cpu_memory"] = planned.room.cpu_memory
    return given, planned


def measured(one: Configuration, given: Mapping[str, Any], steps: int) -> tuple[list[float], float]:
    """Seconds of each iteration, and the bytes that drives moved in one."""
    model = GPT(SIZES[one.size], 0)
    kind, options = optimizers()[one.optimizer]
    seconds, moved = [], []
    with OffloadZero(model, kind(model.parameters(), **options), **given) as optimizer:
        end = time.perf_counter()
        for step in range(WARM_UP + steps):
            for number in range(one.accumulation):
                model(*batch(one, step * one.accumulation + number))[1].backward()
            optimizer.step()
            optimizer.zero_grad()
            start, end = end, time.perf_counter()
            seconds.append(end - start)
            stats = optimizer.stats()
            moved.append(stats["nvme_read_bytes"] + stats["nvme_written_bytes"])
    return seconds[WARM_UP:], (moved[-1] - moved[WARM_UP - 1]) / steps


def result_of(name: str, one: Configuration, folder: Path, disk: Disk, dtype: torch.dtype, steps: int) -> Result:
    """Predicts and measures a configuration."""
    given, planned = options_of(one, folder, dtype)
    layout, placement, count = planned.layout, planned.place(), planned.layout.trained.numel
    unknown = simulate(layout, placement, Passes(), Speeds(1e9, drives=[DriveSpeed(1e9, 1e9, 1e9)]))
    if isinstance(unknown, NotPredicted):
        return Result(name, count, unknown.reason)
    with closing(Rates(one, disk, dtype)) as rates:
        before = rates.measure()
        gc.collect()
        seconds, counted = measured(one, given, steps)
        gc.collect()
        after = rates.measure()
    mean = before.mean_with(after)
    speeds = Speeds(mean.elements_per_s, mean.memory, [mean.drive])
    found = simulate(layout, placement, passes_of(planned, mean.forward_s, mean.backward_s), speeds)
    assert isinstance(found, Iteration)
    every = planned.choice.commits.every or 0
    commit_s, commit_bytes = (found.commit_s / every, found.commit_bytes / every) if every else (0.0, 0.0)
    if every:  # a step with a commit is longer than the others: their mean counts
        seconds = [statistics.mean(seconds)]
    return Result(
        name,
        count,
        predicted_s=found.seconds + commit_s,
        measured_s=seconds,
        rates_moved=after.moved_from(before),
        waits_for=found.waits_for,
        bytes_predicted=found.read_bytes + found.written_bytes + commit_bytes,
        bytes_counted=counted,
        parts_s=found.parts,
    )


def draw(results: Sequence[Result]) -> Callable[[Path], None]:
    """A scatter plot of predicted by measured seconds."""

    def to(file: Path) -> None:
        figure = new_figure(6.5, 6)
        axes = figure.add_subplot()
        known = [one for one in results if not one.reason]
        ends = [seconds for one in known for seconds in (one.predicted_s, one.step_s)] or [1.0]
        span = [0.8 * min(ends), 1.25 * max(ends)]
        axes.plot(span, span, color="#555555", linewidth=1)
        axes.fill_between(span, [0.8 * end for end in span], [1.2 * end for end in span], color="#4c78a8", alpha=0.15)
        for part in sorted({one.waits_for for one in known}):
            there = [one for one in known if one.waits_for == part]
            axes.scatter([one.step_s for one in there], [one.predicted_s for one in there], s=22, label=part)
        axes.set(xscale="log", yscale="log", xlim=span, ylim=span, title="An iteration; shaded: 20 %")
        axes.set(xlabel="seconds, measured", ylabel="seconds, predicted")
        axes.grid(alpha=0.3, which="both")
        axes.legend(title="most of it")
        figure.savefig(file)

    return to


def remarks_of(results: Sequence[Result]) -> Iterator[str]:
    errors = [abs(one.error) for one in results if not one.reason]
    if errors:
        yield judged("median error", statistics.median(errors), MEDIAN_TARGET)
        yield judged("worst error", max(errors), WORST_TARGET)
    yield from (f"{one.name}: not predicted: {one.reason}" for one in results if one.reason)


def main(
    only: Annotated[str, typer.Option(help="Names, with * for anything, separated by semicolons.")] = "*",
    steps: Annotated[int, typer.Option(min=1, help="Iterations that are timed.")] = 8,
    path: Folder = Path(),
    as_json: Json = False,
    out: Out = Path("out"),
    save: Save = False,
) -> None:
    """Predict, measure, print the table, draw the picture."""
    from bench import predict_ranks  # which needs what is above

    dtype = torch.bfloat16 if fast_dtype() == "bf16" else torch.float32
    chosen = {
        name: one
        for name, one in (CONFIGURATIONS | predict_ranks.CONFIGURATIONS).items()
        if any(fnmatch(name, pattern.strip()) for pattern in only.split(";"))
    }
    results = []
    with scratch(path) as folder, closing(Disk(folder, DISK_TRANSFERS, DISK_BYTES)) as disk:
        disk.search()
        for number, (name, one) in enumerate(chosen.items()):
            note(name)
            place = folder / f"{number}"
            place.mkdir()
            if name in predict_ranks.CONFIGURATIONS:
                results.append(predict_ranks.result_of(name, place, dtype, steps))
            else:
                results.append(result_of(name, one, place, disk, dtype, steps))
        Report(
            name="predict",
            title="Iterations, predicted and measured",
            about=ABOUT,
            tables=[Table(HEADINGS, [one.row() for one in results])],
            data={"configurations": [one.as_json() for one in results]},
            remarks=list(remarks_of(results)),
            setup=f"{disk.setup}, compute in {dtype}",
            pictures={"predict.png": draw(results)},
        ).publish(as_json=as_json, save=save, out=out)


if __name__ == "__main__":
    run(main)
