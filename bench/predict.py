"""How well a simulated iteration predicts a measured one: `python bench/predict.py [--only NAME,...] [--save]`.

For each configuration the machine's rates are measured right before and right after it: the drive's reads, writes and
both at once, through the library's own engine; the optimizer's kernels; a copy in RAM; plain torch's forward and
backward of the same model and batch; and what the host takes for chunks, tiles and transfers
(offload/cli/host_costs.py). planner/simulate predicts the iteration from their means. Bytes are predicted without any
rate.

The whole takes an hour or more. What has been measured is in OUT/predict-rows.json, and `--resume` goes on with what is
left, in a folder of the same machine.

Runs of two ranks are in predict_ranks.py.

Drives drift by a factor of two within minutes, and what else runs on the machine changes all of this: only an idle
machine says how good the predictions are.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from bench.experts import LAYERS, Experts
from bench.limits import Disk
from bench.report import Folder, Json, Out, Report, Save, Table, judged, machine, note, run, scratch
from offload import OffloadZero, Tuning, native
from offload.cli import host_costs
from offload.cli.machine import fast_dtype
from offload.cli.plan_models import optimizers, rules_named
from offload.cli.plan_updates import measured_seconds
from offload.cli.plots import new_figure
from offload.cli.probing import copies, steps_of
from offload.demo.gpt import GPT, PRESETS, GPTConfig
from offload.optim.flops import MatrixWork, matrix_work
from offload.planner.activations import measure
from offload.planner.explain import Planned, plan_of
from offload.planner.routing import Routing
from offload.planner.simulate import Iteration, NotPredicted, simulate
from offload.planner.simulate.speeds import DriveSpeed, HostCosts, Passes, Speeds
from offload.planner.simulate.what_if import expected_tiles, shared_out
from offload.planner.tile_bytes import noting, tiled_bytes
from offload.sizes import MIB

WIDTH, ROUTING = 512, Routing(16, 1)
"""Of the mixture of experts."""
SIZES = PRESETS | {"46m": GPTConfig(layers=14, width=512, heads=8)}
WARM_UP, WARM_UP_LATE = 2, 12
"""Iterations before those that are timed; where experts may owe steps, as many as until most of them do."""
LEAST_STEPS = 3
"""Iterations that are timed at least, however long one takes."""
HOST_ROUNDS = 5
"""How often it is measured what Python takes; the median counts."""
RUNNING = 0.6
"""Of the time of a configuration; in the rest rates are measured."""
MEDIAN_TARGET, WORST_TARGET = 0.08, 0.20
"""Of the errors of seconds."""
DISK_TRANSFERS, DISK_BYTES = 16, 24 * MIB
ANY_SPEEDS = Speeds(1e9, drives=[DriveSpeed(1e9, 1e9, 1e9)], matrix_flops=1e9)
"""With which a configuration is simulated to learn whether it can be."""
WHOSE = "nvme", "activation"
"""In `stats()`, what drives move."""
COMPUTED = 3
"""How often plain torch's passes are timed; the median counts."""
HEADINGS = (
    *("configuration", "parameters", "predicted", "measured", "error", "rates moved", "waits for", "bytes", "counted"),
)
ABOUT = """\
**predicted, measured**: seconds of an iteration; **error**: predicted by measured, less 1; **rates moved**: by how much
the rate that changed most differs after the configuration from before it; **waits for**: what most of the predicted
time is; **bytes**: read and written by drives in an iteration, predicted; **counted**: those of the run.
Experts are predicted as uniform routing is expected to use them, so their bytes differ from those of a run; so do those
of parameters on NVMe, by what buffers hold."""


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

    @property
    def is_of_experts(self) -> bool:
        return self.size == "experts"

    @property
    def used_experts(self) -> int:
        """Of each layer, those that a micro-batch is expected to have tokens for."""
        return max(round(ROUTING.experts * ROUTING.likelihood(self.tokens[0] * self.tokens[1], 1)), 1)

    def model(self, device: str, experts: int = ROUTING.experts) -> nn.Module:
        if not self.is_of_experts:
            return GPT(SIZES[self.size], 0, device)
        torch.manual_seed(0)
        with torch.device(device):
            return nn.Sequential(*[Experts(WIDTH, experts, grouped=True) for _ in range(LAYERS)])

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """Runs a forward on the batch of this number."""
        made = torch.Generator().manual_seed(number)
        sequences, length = self.tokens
        if self.is_of_experts:
            x = torch.randn(sequences * length, WIDTH, generator=made)
            found: Tensor = model(x.to(next(model.parameters()).dtype))
            return found.float().square().mean()
        words = torch.randint(0, 256, (sequences, length + 1), generator=made)
        loss: Tensor = model(words[:, :-1], words[:, 1:])[1]
        return loss

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Its optimizer; where that takes matrices alone, AdamW for all else."""
        kind, options = optimizers()[self.optimizer]
        if kind is not torch.optim.Muon:
            return [kind(model.parameters(), **options)]
        own = [param for name, param in model.named_parameters() if name.startswith("blocks") and param.dim() == 2]
        others = [param for param in model.parameters() if all(param is not one for one in own)]
        return [kind(own, **options), torch.optim.AdamW(others)]


NVME: dict[str, Any] = {"tier": "nvme", "commit_every": None}


def _on_nvme(size: str, share: float, optimizer: str = "adamw", **options: Any) -> Configuration:
    return Configuration(size, share=share, optimizer=optimizer, options=NVME | options)


EXPERTS_IN_TILES = Tuning(chunk="1MiB", tile="1MiB", late=False)
STEPPED_LATER = Tuning(chunk="1MiB", tile="1MiB")
SPLIT = Tuning(chunk="16MiB", split_master=True)
CONFIGURATIONS = {
    "46m, in RAM": Configuration("46m", options={"tier": "cpu"}),
    "46m, half": _on_nvme("46m", 0.5),
    "46m, NVMe": _on_nvme("46m", 0.0),
    "46m, NVMe, more tokens": Configuration("46m", (16, 256), 0.0, options=NVME),
    "46m, NVMe, accumulation": _on_nvme("46m", 0.0, accumulation=4),
    "46m, parameters in RAM": Configuration("46m", options={"tier": "cpu", "param_tier": "cpu"}),
    "125m, in RAM": Configuration("125m", options={"tier": "cpu"}),
    "125m, half": _on_nvme("125m", 0.5),
    "125m, NVMe": _on_nvme("125m", 0.0),
    "125m, NVMe, more tokens": Configuration("125m", (16, 256), 0.0, options=NVME),
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
    "350m, gradients on NVMe, accumulation": _on_nvme("350m", 0.0, grad_tier="nvme", accumulation=2),
    "350m, in RAM": Configuration("350m", options={"tier": "cpu"}),
    "1b, NVMe": _on_nvme("1b", 0.0),
    "125m, activations recomputed": _on_nvme("125m", 0.0, activation_tier="cpu"),
    "125m, activations on NVMe": _on_nvme("125m", 0.0, activation_tier="nvme", activation_memory="8MiB"),
    "125m, all activations on NVMe": _on_nvme(
        "125m", 0.0, activation_tier="nvme", activation_memory="256MiB", tuning=Tuning(chunk="16MiB", recompute=False)
    ),
    "125m, steps tried": _on_nvme("125m", 0.0, tuning=Tuning(chunk="16MiB", speculate=True)),
    "125m, steps tried, more tokens": Configuration(
        "125m", (16, 256), 0.0, options={**NVME, "tuning": Tuning(chunk="16MiB", speculate=True)}
    ),
    "125m, tiles": _on_nvme("125m", 0.0, param_tier="cpu", tuning=Tuning(chunk="16MiB", tile="2MiB")),
    "experts in tiles": _on_nvme("experts", 0.5, param_tier="cpu", tuning=EXPERTS_IN_TILES),
    "experts in tiles, few tokens": Configuration(
        "experts", (1, 4), 0.5, options={**NVME, "param_tier": "nvme", "tuning": EXPERTS_IN_TILES}
    ),
    "experts in tiles, idle ones stepped later": Configuration(
        "experts", (1, 4), 0.5, options={**NVME, "param_tier": "nvme", "tuning": STEPPED_LATER}
    ),
    "46m, Muon": _on_nvme("46m", 0.0, optimizer="muon"),
}
"""By name. Where no time is predicted for one, the page says why."""


@dataclass(frozen=True)
class Measured:
    """Rates, measured once. Attributes: forward_s, backward_s: of a micro-batch; others: see `Speeds`, `HostCosts`."""

    drive: DriveSpeed
    elements_per_s: float
    memory: float
    forward_s: float
    backward_s: float
    matrix_flops: float
    tile_s: float
    chunk_s: float
    resident_s: float
    moved_s: float
    delay_s: float

    @property
    def all(self) -> tuple[float, ...]:
        drive, passes, flops = self.drive, (self.forward_s, self.backward_s), self.matrix_flops
        of_host = self.tile_s, self.chunk_s, self.resident_s, self.moved_s, self.delay_s
        return drive.read, drive.write, drive.both, self.elements_per_s, self.memory, *passes, flops, *of_host

    @property
    def speeds(self) -> Speeds:
        host = HostCosts(self.tile_s, self.chunk_s, self.resident_s, self.moved_s, self.delay_s)
        return Speeds(self.elements_per_s, self.memory, [self.drive], matrix_flops=self.matrix_flops, host=host)

    def mean_with(self, other: Measured) -> Measured:
        means = [statistics.mean(pair) for pair in zip(self.all, other.all, strict=True)]
        return Measured(DriveSpeed(*means[:3]), *means[3:])

    def moved_from(self, other: Measured) -> float:
        """The largest relative difference."""
        return max(abs(one / before - 1) for one, before in zip(self.all, other.all, strict=True) if before)


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
    """Measures the rates that a configuration needs.

    Args: dtype: of compute; kernels: None: on all CPUs; matrices: see `Speeds.matrix_flops`; None: there are none;
    folder: on the drive, if states stream from there; alone: a process group of this rank, if there are several.
    """

    def __init__(
        self,
        one: Configuration,
        disk: Disk,
        dtype: torch.dtype,
        kernels: native.Kernels | None = None,
        matrices: MatrixWork | None = None,
        folder: Path | None = None,
        alone: object | None = None,
    ) -> None:
        self._one, self._disk, self._dtype, self._matrices = one, disk, dtype, matrices
        self._folder, self._has_tiles = folder, one.options.get("tuning", Tuning()).tile is not None
        self._alone = alone
        states, tuning = one.options.get("states", "fp32"), one.options.get("tuning", Tuning())
        self._kernels = kernels or native.load()
        stepped = one.optimizer if matrices is None else "adamw"  # beside matrices
        self._steps = steps_of(self._kernels, stepped, states, split=bool(tuning.split_master))
        self._copies = copies()

    def measure(self) -> Measured:
        nbytes = self._disk.count * self._disk.length
        alone = {way: nbytes / self._disk.run(ways=(way,)) for way in ("read", "write")}
        both = 2 * nbytes / self._disk.run()
        drive, work = DriveSpeed(alone["read"], alone["write"], both), self._matrices
        flops = 1.0 if work is None else work.flops / measured_seconds(self._one.optimizer, work.shapes)
        return Measured(drive, self._steps(), self._copies(), *self._passes(), flops, *self._host_seconds())

    def _host_seconds(self) -> Iterator[float]:
        """What Python takes, in the order of `HostCosts`; 0 for what the configuration does not have."""
        group, folder, options = self._alone, self._folder, self._one.options
        moves = folder is not None and "nvme" in (options.get("param_tier"), options.get("grad_tier"))
        yield host_seconds(host_costs.tiles(group)) if self._has_tiles else 0.0
        yield 0.0 if folder is None else host_seconds(host_costs.chunks(folder, group=group))
        yield host_seconds(host_costs.resident_chunks(group)) if "param_tier" in options else 0.0
        yield host_seconds(host_costs.moved_chunks(folder, group=group)) if folder is not None and moves else 0.0
        yield 0.0 if folder is None else host_seconds(host_costs.delays(folder))

    def _passes(self) -> tuple[float, float]:
        """Seconds of plain torch's forward and backward.

        Of experts in tiles those that have tokens, alone: torch makes gradients of zeros for all others, tiles do not.
        """
        one = self._one
        model = one.model("cpu", one.used_experts) if self._has_tiles and one.is_of_experts else one.model("cpu")
        model = model.to(self._dtype)
        times = []
        for _ in range(1 + COMPUTED):
            start = time.perf_counter()
            loss = self._one.loss(model, 0)
            middle = time.perf_counter()
            loss.backward()
            times.append((middle - start, time.perf_counter() - middle))
            model.zero_grad()
        forward, backward = zip(*times[1:], strict=True)
        return statistics.median(forward), statistics.median(backward)

    def close(self) -> None:
        self._kernels.close()


def host_seconds(measured: AbstractContextManager[Callable[[], float]]) -> float:
    """What Python takes, the median of HOST_ROUNDS after one that warms up."""
    with measured as measure:
        return statistics.median([measure() for _ in range(1 + HOST_ROUNDS)][1:])


def options_of(one: Configuration, folder: Path, dtype: torch.dtype, ranks: int = 1) -> tuple[dict[str, Any], Planned]:
    """What OffloadZero is given, and its plan."""
    given: dict[str, Any] = {"tuning": Tuning(chunk="16MiB"), "compute_dtype": dtype} | dict(one.options)
    if given["tier"] == "nvme":
        given["path"] = folder / "run"
    rules = rules_named(one.optimizer, given.get("states", "fp32"))
    planned = plan_of(one.model("meta"), direct=True, rules=rules, ranks=ranks, **given)
    if one.share is not None:
        planned = planned.with_memory(planned.cpu_memory_for(one.share))
        given["cpu_memory"] = planned.room.cpu_memory
    return given, planned


def waiting_of(one: Configuration, planned: Planned, dtype: torch.dtype) -> Mapping[str, Sequence[int]]:
    """What of a micro-batch waits in the activation tier; of none, nothing."""
    choice = planned.choice.activations
    if choice.tier is None:
        return {}
    words = torch.zeros(one.tokens, dtype=torch.long, device="meta")
    return measure(one.model("meta"), dtype, lambda model: model(words)).of(choice)


def tiled_bytes_of(one: Configuration, planned: Planned, dtype: torch.dtype) -> Mapping[str, tuple[float, float]]:
    """What tiles of dense weights read and write beside, in a micro-batch."""
    if one.is_of_experts or not any(spec.tile for spec in planned.layout.specs):
        return {}
    model, words = one.model("meta"), torch.zeros(one.tokens, dtype=torch.long, device="meta")
    with noting(model) as given, torch.no_grad():
        model(words)
    return tiled_bytes(planned.layout, given, dtype)


def tiles_of(one: Configuration, planned: Planned) -> Mapping[str, Sequence[Sequence[int]]]:
    """The tiles of experts that are used, as they are expected of uniform routing."""
    names = {spec.name for spec in planned.layout.specs if spec.tile} if one.is_of_experts else set()
    return expected_tiles(planned.layout, names, ROUTING, one.tokens[0] * one.tokens[1])


def beside_of(one: Configuration, planned: Planned, dtype: torch.dtype) -> Passes:
    """What is known of a micro-batch before its seconds are."""
    return Passes(
        waiting=waiting_of(one, planned, dtype),
        tiles=tiles_of(one, planned),
        tiled_bytes=tiled_bytes_of(one, planned, dtype),
    )


def measured(
    one: Configuration, given: Mapping[str, Any], steps: int, most_s: float, warm_up: int = WARM_UP
) -> tuple[list[float], float]:
    """Seconds of each iteration, and the bytes that drives moved in one.

    Args:
        one: the configuration.
        given: the options of OffloadZero.
        steps: iterations that are timed at most.
        most_s: seconds after which no other begins, but for LEAST_STEPS and for the steps up to a commit.
        warm_up: iterations before these.
    """
    model = one.model("cpu")
    seconds, moved = [], []
    every = given.get("commit_every") or 1
    begin = end = time.perf_counter()
    with OffloadZero(model, one.optimizers(model), **given) as optimizer:
        for step in range(warm_up + steps):
            for number in range(one.accumulation):
                one.loss(model, step * one.accumulation + number).backward()
            optimizer.step()
            optimizer.zero_grad()
            start, end = end, time.perf_counter()
            seconds.append(end - start)
            stats = optimizer.stats()
            moved.append(sum(stats[f"{whose}_{way}_bytes"] for whose in WHOSE for way in ("read", "written")))
            timed = len(seconds) - warm_up
            if timed >= LEAST_STEPS and timed % every == 0 and end - begin > most_s:
                break
    return seconds[warm_up:], (moved[-1] - moved[warm_up - 1]) / (len(moved) - warm_up)


def result_of(
    name: str, one: Configuration, folder: Path, disk: Disk, dtype: torch.dtype, steps: int, most_s: float
) -> Result:
    """Predicts and measures a configuration; see `measured`."""
    given, planned = options_of(one, folder, dtype)
    layout, placement, count = planned.layout, planned.place(), planned.layout.trained.numel
    beside = beside_of(one, planned, dtype)
    unknown = simulate(layout, placement, beside, ANY_SPEEDS)
    if isinstance(unknown, NotPredicted):
        return Result(name, count, unknown.reason)
    work = matrix_work(layout.trained, layout.trained.chunks)
    on_drive = folder if placement.states.streamed else None
    with closing(Rates(one, disk, dtype, matrices=work if work.flops else None, folder=on_drive)) as rates:
        before = rates.measure()
        gc.collect()
        is_late = bool(layout.trained.late_chunks)
        seconds, counted = measured(one, given, steps, most_s, WARM_UP_LATE if is_late else WARM_UP)
        gc.collect()
        after = rates.measure()
    mean = before.mean_with(after)
    found = simulate(layout, placement, shared_out(layout, mean.forward_s, mean.backward_s, beside), mean.speeds)
    assert isinstance(found, Iteration)
    every = planned.choice.commits.every or 0
    commit_s, commit_bytes = (found.commit_s / every, found.commit_bytes / every) if every else (0.0, 0.0)
    if every or is_late:  # some steps are longer than others: their mean counts
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


class Rows:
    """What has been measured, in a file. Args: file: its path; resumes: whether what it has counts.

    Raises:
        typer.BadParameter: it is to count, and another machine has measured it.
    """

    def __init__(self, file: Path, *, resumes: bool) -> None:
        self._file = file
        self.by_name: dict[str, Result] = {}
        if resumes and file.exists():
            found = json.loads(file.read_text())
            if found["machine"] != machine():
                raise typer.BadParameter(f"{file} is of another machine: {found['machine']}; this is {machine()}")
            self.by_name = {row["name"]: Result(**row) for row in found["rows"]}

    def add(self, row: Result) -> None:
        self.by_name[row.name] = row
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(one) for one in self.by_name.values()]
        self._file.write_text(json.dumps({"machine": machine(), "rows": rows}))


def main(
    only: Annotated[str, typer.Option(help="Names, with * for anything, separated by semicolons.")] = "*",
    steps: Annotated[int, typer.Option(min=1, help="Iterations that are timed at most.")] = 8,
    minutes: Annotated[float, typer.Option(help="For all configurations: where one is slow, fewer are timed.")] = 20.0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that calls before have measured.")] = False,
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
    rows = Rows(out / "predict-rows.json", resumes=resume)
    left = [name for name in chosen if name not in rows.by_name]
    end = time.perf_counter() + 60 * minutes
    with scratch(path) as folder, closing(Disk(folder, DISK_TRANSFERS, DISK_BYTES)) as disk:
        disk.search()
        for number, name in enumerate(left):
            one = chosen[name]
            note(name)
            place = folder / f"{number}"
            place.mkdir()
            if name in predict_ranks.CONFIGURATIONS:
                found = predict_ranks.result_of(name, place, dtype, steps)
            else:
                most_s = RUNNING * max(end - time.perf_counter(), 0.0) / (len(left) - number)
                found = result_of(name, one, place, disk, dtype, steps, most_s)
            note(f"  {found.reason or ', '.join(found.row()[2:])}")
            rows.add(found)
            shutil.rmtree(place)  # else all of them fill a disk
        results = [rows.by_name[name] for name in chosen]
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
